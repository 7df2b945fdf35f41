#include "rank_connection.h"

#include "channel/base/futex.h"
#include "channel/base/idioms.h"
#include "channel/socket/socket.h"

#include <coxswain/base.h>

#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

/* With its end, since the rank has other files whose names begin so. */
#define LINK "/memfd:" COX_STACK_DOORBELL_NAME " (deleted)"

/* ---- ring ---- */

/* Returns an fd, -1: none. */
static int doorbell_find(pid_t pid, int *ret_error)
{
    char path[300], target[64];
    snprintf(path, sizeof path, "/proc/%" PRId32 "/fd", (int32_t)pid);
    DIR *folder = opendir(path);
    int fd = -1;
    *ret_error = folder ? 0 : errno;
    for (const struct dirent *entry; folder && fd < 0 && (entry = readdir(folder));) {
        snprintf(path, sizeof path, "/proc/%" PRId32 "/fd/%s", (int32_t)pid, entry->d_name);
        const ssize_t size = readlink(path, target, sizeof target);
        if (size != (ssize_t)strlen(LINK) || strncmp(target, LINK, strlen(LINK)) != 0)
            continue;
        fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
        if (fd < 0)
            *ret_error = errno;
    }
    if (folder)
        closedir(folder);
    return fd;
}

/* name: of the socket, size bytes. */
static int ring(pid_t pid, const char *name, size_t size)
{
    int error;
    struct stat status;
    struct cox_stack_doorbell *doorbell;
    _cox_cleanup_(cox_close_fd) int fd = doorbell_find(pid, &error);
    if (fd < 0)
        return error ? -error : COX_NOT_FOUND;
    /* A file that could shrink would end this process by SIGBUS. */
    const int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(fd, &status) < 0 ||
        status.st_size != (off_t)sizeof *doorbell || size >= sizeof doorbell->name)
        return COX_CORRUPT;
    doorbell = mmap(NULL, sizeof *doorbell, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (doorbell == MAP_FAILED)
        return -errno;
    memset(doorbell->name, 0, sizeof doorbell->name);
    memcpy(doorbell->name, name, size);
    /* release: the name; partner: writer_main in worker/loop/stack_writer.c. */
    atomic_fetch_add_explicit(&doorbell->rings, 1, memory_order_release);
    cox_futex_wake_some(&doorbell->rings, 1);
    munmap(doorbell, sizeof *doorbell);
    return 0;
}

/* ---- the connection ---- */

static bool listens(void)
{
    int yes = 0;
    socklen_t size = sizeof yes;
    return getsockopt(COX_STACK_LISTEN_FD, SOL_SOCKET, SO_ACCEPTCONN, &yes, &size) == 0 && yes;
}

/* Any process may connect: those that are not the rank are sent away. */
static int rank_accept(struct cox_rank_connection *connection, uint64_t deadline_ns)
{
    for (;;) {
        struct cox_socket_peer peer;
        const int r = cox_now_ns() < deadline_ns
                          ? cox_socket_wait(COX_STACK_LISTEN_FD, POLLIN, deadline_ns)
                          : COX_TIMEOUT;
        if (r)
            return r;
        _cox_cleanup_(cox_close_fd) int fd =
            accept4(COX_STACK_LISTEN_FD, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0 && errno != EAGAIN && errno != EINTR && errno != ECONNABORTED)
            return -errno;
        if (fd >= 0 && cox_socket_read_peer(fd, &peer) == 0 && peer.pid == connection->pid) {
            connection->fd = cox_steal_fd(&fd);
            return 0;
        }
    }
}

int cox_rank_connection_open(struct cox_rank_connection *connection, pid_t pid,
                             uint64_t deadline_ns)
{
    struct sockaddr_un address;
    socklen_t size = sizeof address;
    *connection = (struct cox_rank_connection){.pid = pid, .fd = -1};
    if (!listens())
        return COX_UNSUPPORTED;
    if (getsockname(COX_STACK_LISTEN_FD, (struct sockaddr *)&address, &size) < 0)
        return -errno;
    const size_t head = offsetof(struct sockaddr_un, sun_path) + 1;
    if (address.sun_family != AF_UNIX || size <= head || address.sun_path[0])
        return COX_UNSUPPORTED;
    /* Not to wait where a process that is not the rank has come and gone. */
    fcntl(COX_STACK_LISTEN_FD, F_SETFL, O_NONBLOCK);
    const int r = ring(pid, address.sun_path + 1, size - head);
    return r ? r : rank_accept(connection, deadline_ns);
}

void cox_rank_connection_close(struct cox_rank_connection *connection)
{
    cox_close_fd(&connection->fd);
}

/* ---- ask ---- */

static int bytes_take(int fd, void *bytes, size_t size, uint64_t deadline_ns)
{
    char *to = bytes;
    while (size) {
        const ssize_t got = recv(fd, to, size, 0);
        if (got == 0)
            return COX_CLOSED;
        if (got < 0 && errno != EAGAIN && errno != EINTR)
            return -errno;
        const int r = got < 0 ? cox_socket_wait(fd, POLLIN, deadline_ns) : 0;
        if (r)
            return r;
        to += got > 0 ? got : 0;
        size -= got > 0 ? (size_t)got : 0;
    }
    return 0;
}

static void text_check(char *text, uint32_t size)
{
    for (uint32_t i = 0; i < size; i++)
        if ((text[i] < ' ' && text[i] != '\n') || text[i] == 0x7f)
            text[i] = '?';
    text[size] = '\0';
}

/* Of a rank that copied itself nothing but where each thread is can be known. */
static void threads_check(struct cox_stack_copy *copy)
{
    for (uint32_t i = 0; i < copy->count; i++) {
        struct cox_stack_thread *thread = &copy->threads[i];
        thread->known = thread->known == 1;
        thread->self = 0;
        if (thread->at > copy->pool_used || thread->size > copy->pool_used - thread->at)
            thread->size = 0;
    }
}

int cox_rank_connection_ask(struct cox_rank_connection *connection, uint32_t flags,
                            uint64_t deadline_ns, struct cox_stack_copy *copy)
{
    const struct cox_stack_request request = {.magic = COX_STACK_MAGIC, .flags = flags};
    struct cox_stack_reply reply;
    const int fd = connection->fd;
    if (fd < 0 || send(fd, &request, sizeof request, MSG_NOSIGNAL) != (ssize_t)sizeof request)
        return COX_CLOSED;
    int r = bytes_take(fd, &reply, sizeof reply, deadline_ns);
    if (r == 0 &&
        (reply.text_size > COX_STACK_TEXT_MAX || reply.thread_count > COX_STACK_THREAD_MAX ||
         reply.pool_size > COX_STACK_POOL_SIZE))
        return COX_CORRUPT;
    if (r == 0)
        r = bytes_take(fd, copy->text, reply.text_size, deadline_ns);
    if (r == 0 && (flags & COX_STACK_FRAMES)) {
        text_check(copy->text, reply.text_size);
        atomic_store(&copy->frames, 1);
    }
    if (r || !(flags & COX_STACK_COPIES))
        return r;
    copy->count = 0;
    r = bytes_take(fd, copy->threads, reply.thread_count * sizeof copy->threads[0], deadline_ns);
    if (r == 0)
        r = bytes_take(fd, copy->pool, reply.pool_size, deadline_ns);
    if (r)
        return r;
    copy->count = reply.thread_count;
    copy->pool_used = reply.pool_size;
    threads_check(copy);
    return 0;
}

int cox_rank_connection_ask_torch(struct cox_rank_connection *connection, uint64_t deadline_ns,
                                  enum cox_stack_torch *ret_torch, char **ret_text)
{
    const struct cox_stack_request request = {.magic = COX_STACK_MAGIC, .flags = COX_STACK_TORCH};
    struct cox_stack_reply reply;
    const int fd = connection->fd;
    if (fd < 0 || send(fd, &request, sizeof request, MSG_NOSIGNAL) != (ssize_t)sizeof request)
        return COX_CLOSED;
    int r = bytes_take(fd, &reply, sizeof reply, deadline_ns);
    if (r)
        return r;
    if (reply.torch > COX_STACK_TORCH_TOO_LARGE || reply.text_size > COX_STACK_TORCH_MAX)
        return COX_CORRUPT;
    *ret_torch = (enum cox_stack_torch)reply.torch;
    if (reply.torch != COX_STACK_TORCH_THERE)
        return 0;
    char *text = malloc(reply.text_size + 1);
    if (!text)
        return -ENOMEM;
    r = bytes_take(fd, text, reply.text_size, deadline_ns);
    text[r ? 0 : reply.text_size] = '\0';
    if (r)
        free(text);
    else
        *ret_text = text;
    return r;
}
