#include "closer.h"

#include "channel/base/base_internal.h"
#include "channel/base/idioms.h"
#include "channel/base/thread.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* SCM_MAX_FD of the kernel. */
#define KERNEL_FD_COUNT_MAX 253
/* The bytes of a queue that are searched for fds when a connection ends; a larger queue is assumed
 * to hold some. */
#define LOOK_SIZE ((size_t)8 << 10)
/* Messages drained from a connection that ends; no queue holds more. */
#define DRAIN_COUNT_MAX 4096
#define CAPACITY_MIN 64

struct pending_close {
    int fd;
    /* its queue is emptied first */
    bool connection;
};

struct closer_thread {
    struct cox_closer *closer;
    pthread_t id;
    bool used;
    bool busy;
    /* busy */
    uint64_t since_ns;
};

struct cox_closer {
    /* everything below */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* a ring: count of capacity, from first on */
    struct pending_close *entries;
    size_t capacity, first, count;
    uint64_t closed;
    /* threads leave when nothing is left */
    bool ending;
    /* free, and every thread that it has left running */
    uint32_t owners;
    struct closer_thread threads[COX_CLOSER_THREAD_MAX];
};

/* ---- what a thread does ---- */

static void foreign_close(int fd)
{
    const struct linger off = {0, 0};
    /* Fails harmlessly for fds that are not sockets. */
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &off, sizeof off);
    cox_close_fd(&fd);
}

/* Receives the fds of one message. Returns false if the queue is empty. */
static bool connection_drain_once(int fd)
{
    union {
        char bytes[CMSG_SPACE(KERNEL_FD_COUNT_MAX * sizeof(int)) + CMSG_SPACE(64)];
        struct cmsghdr header;
    } control;
    char bytes[4096];
    struct iovec part = {.iov_base = bytes, .iov_len = sizeof bytes};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = &control,
                             .msg_controllen = sizeof control};
    ssize_t size = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (size <= 0)
        return size < 0 && errno == EINTR;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c))
        for (size_t at = CMSG_LEN(0);
             c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS && at < c->cmsg_len;
             at += sizeof(int)) {
            int came;
            memcpy(&came, (char *)c + at, sizeof came);
            foreign_close(came);
        }
    return true;
}

static void entry_close(struct pending_close entry)
{
    for (int i = 0; entry.connection && i < DRAIN_COUNT_MAX && connection_drain_once(entry.fd); i++)
        continue;
    if (entry.connection)
        cox_close_fd(&entry.fd);
    else
        foreign_close(entry.fd);
}

/* Fds remain only if no thread could be created. */
static void closer_destroy(struct cox_closer *closer)
{
    for (size_t i = 0; i < closer->count; i++)
        entry_close(closer->entries[(closer->first + i) % closer->capacity]);
    pthread_cond_destroy(&closer->changed);
    pthread_mutex_destroy(&closer->lock);
    free(closer->entries);
    free(closer);
}

static void *closer_main(void *argument)
{
    struct closer_thread *self = argument;
    struct cox_closer *closer = self->closer;
    pthread_mutex_lock(&closer->lock);
    while (closer->count > 0 || !closer->ending) {
        if (closer->count == 0) {
            pthread_cond_wait(&closer->changed, &closer->lock);
            continue;
        }
        const struct pending_close entry = closer->entries[closer->first];
        closer->first = (closer->first + 1) % closer->capacity;
        closer->count--;
        self->busy = true;
        self->since_ns = cox_now_ns();
        pthread_mutex_unlock(&closer->lock);
        entry_close(entry);
        pthread_mutex_lock(&closer->lock);
        self->busy = false;
        closer->closed++;
        pthread_cond_broadcast(&closer->changed);
    }
    bool last = !self->used && --closer->owners == 0;
    pthread_mutex_unlock(&closer->lock);
    if (last)
        closer_destroy(closer);
    return NULL;
}

/* ---- the queue; the lock is held ---- */

static bool closer_grow(struct cox_closer *closer)
{
    size_t capacity = closer->capacity ? 2 * closer->capacity : CAPACITY_MIN;
    struct pending_close *entries = calloc(capacity, sizeof *entries);
    if (!entries)
        return false;
    for (size_t i = 0; i < closer->count; i++)
        entries[i] = closer->entries[(closer->first + i) % closer->capacity];
    free(closer->entries);
    closer->entries = entries;
    closer->capacity = capacity;
    closer->first = 0;
    return true;
}

static uint32_t busy_count(const struct cox_closer *closer, uint64_t since_ns)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < COX_CLOSER_THREAD_MAX; i++)
        count += closer->threads[i].used && closer->threads[i].busy &&
                 closer->threads[i].since_ns <= since_ns;
    return count;
}

/* Starts a thread if none is free. If that fails it is tried at the next turn. Returns when that
 * is. */
static uint64_t closer_staff(struct cox_closer *closer)
{
    const uint64_t now_ns = cox_now_ns(), hang_ns = COX_CLOSER_HANG_MS * COX_NSEC_PER_MSEC;
    uint64_t due_ns = COX_DEADLINE_NEVER;
    struct closer_thread *unused = NULL;
    if (closer->count == 0 || closer->ending)
        return due_ns;
    for (uint32_t i = 0; i < COX_CLOSER_THREAD_MAX; i++) {
        struct closer_thread *thread = &closer->threads[i];
        if (!thread->used)
            unused = unused ? unused : thread;
        else if (!thread->busy)
            return due_ns;
        else if (thread->since_ns + hang_ns > now_ns)
            due_ns = cox_deadline_min(due_ns, thread->since_ns + hang_ns);
    }
    if (due_ns != COX_DEADLINE_NEVER || !unused)
        return due_ns;
    *unused = (struct closer_thread){.closer = closer, .used = true};
    if (cox_thread_start(&unused->id, closer_main, unused) == 0)
        return COX_DEADLINE_NEVER; /* undone if the thread did not start */
    unused->used = false;
    return now_ns + hang_ns;
}

static void closer_put(struct cox_closer *closer, int *fd, bool connection)
{
    bool taken = false;
    if (*fd < 0)
        return;
    pthread_mutex_lock(&closer->lock);
    if (closer->count < closer->capacity || closer_grow(closer)) {
        closer->entries[(closer->first + closer->count++) % closer->capacity] =
            (struct pending_close){.fd = cox_steal_fd(fd), .connection = connection};
        taken = true;
        closer_staff(closer);
        pthread_cond_broadcast(&closer->changed);
    }
    pthread_mutex_unlock(&closer->lock);
    if (!taken)
        cox_close_fd(fd);
}

/* ---- for all ---- */

int cox_closer_new(struct cox_closer **ret_closer)
{
    struct cox_closer *closer = calloc(1, sizeof *closer);
    if (!closer)
        return -ENOMEM;
    closer->owners = 1;
    pthread_mutex_init(&closer->lock, NULL);
    cox_condition_init(&closer->changed);
    *ret_closer = closer;
    return 0;
}

struct cox_closer *cox_closer_free(struct cox_closer *closer)
{
    pthread_t joined[COX_CLOSER_THREAD_MAX];
    uint32_t join_count = 0;
    if (!closer)
        return NULL;
    const uint64_t end_ns = cox_deadline_after_ms(COX_CLOSER_END_MS);
    pthread_mutex_lock(&closer->lock);
    while ((closer->count > 0 || busy_count(closer, UINT64_MAX) > 0) && cox_now_ns() < end_ns) {
        const struct timespec until =
            cox_deadline_timespec(cox_deadline_min(end_ns, closer_staff(closer)));
        pthread_cond_timedwait(&closer->changed, &closer->lock, &until);
    }
    closer->ending = true;
    pthread_cond_broadcast(&closer->changed);
    for (uint32_t i = 0; i < COX_CLOSER_THREAD_MAX; i++) {
        struct closer_thread *thread = &closer->threads[i];
        /* A thread that is joined has nothing left to do. */
        if (thread->used && (thread->busy || closer->count > 0)) {
            thread->used = false;
            closer->owners++;
            pthread_detach(thread->id);
        } else if (thread->used) {
            joined[join_count++] = thread->id;
        }
    }
    pthread_mutex_unlock(&closer->lock);
    for (uint32_t i = 0; i < join_count; i++)
        pthread_join(joined[i], NULL);
    pthread_mutex_lock(&closer->lock);
    bool last = --closer->owners == 0;
    pthread_mutex_unlock(&closer->lock);
    if (last)
        closer_destroy(closer);
    return NULL;
}

void cox_closer_give(struct cox_closer *closer, int *fd)
{
    closer_put(closer, fd, false);
}

/* Makes out-of-band bytes (MSG_OOB) ordinary ones. Otherwise a receive skips them and closes the
 * fds that came with them on the calling thread, and poll reports them for ever. Returns 0 or
 * -errno. */
static int urgent_is_ordinary(int fd)
{
    const int on = 1;
    return setsockopt(fd, SOL_SOCKET, SO_OOBINLINE, &on, sizeof on) < 0 ? -errno : 0;
}

/* Returns true if the queue holds fds, or may. The peer cannot send any more. */
static bool connection_holds_fds(int fd)
{
    char bytes[LOOK_SIZE];
    struct iovec part = {.iov_base = bytes, .iov_len = sizeof bytes};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    ssize_t size;
    int there = 0;
    if (urgent_is_ordinary(fd))
        return true;
    do
        size = recvmsg(fd, &message, MSG_DONTWAIT | MSG_PEEK);
    while (size < 0 && errno == EINTR);
    /* A peek ends at an out-of-band byte, and at another sender if credentials are requested: then
     * there is more. */
    return (size > 0 && message.msg_flags & MSG_CTRUNC) || ioctl(fd, SIOCINQ, &there) < 0 ||
           there > (size > 0 ? size : 0);
}

void cox_closer_hang_up(struct cox_closer *closer, int *fd)
{
    if (*fd < 0)
        return;
    shutdown(*fd, SHUT_RDWR);
    if (connection_holds_fds(*fd))
        closer_put(closer, fd, true);
    cox_close_fd(fd);
}

uint64_t cox_closer_turn(struct cox_closer *closer)
{
    pthread_mutex_lock(&closer->lock);
    uint64_t due_ns = closer_staff(closer);
    pthread_mutex_unlock(&closer->lock);
    return due_ns;
}

struct cox_closer_counts cox_closer_counts(struct cox_closer *closer)
{
    const uint64_t now_ns = cox_now_ns(), hang_ns = COX_CLOSER_HANG_MS * COX_NSEC_PER_MSEC;
    pthread_mutex_lock(&closer->lock);
    const struct cox_closer_counts counts = {
        .waiting = (uint32_t)closer->count + busy_count(closer, UINT64_MAX),
        .hanging = busy_count(closer, now_ns > hang_ns ? now_ns - hang_ns : 0),
        .closed = closer->closed,
    };
    pthread_mutex_unlock(&closer->lock);
    return counts;
}

/* ---- taking ---- */

int cox_closer_receive(int fd, void *bytes, size_t size, size_t *ret_size, int *ret_fd)
{
    COX_ASSERT(size > 0);
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr header;
    } control;
    struct iovec part = {.iov_base = bytes, .iov_len = size};
    /* Exactly the size for one fd, or the kernel would accept two. */
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = ret_fd ? &control : NULL,
                             .msg_controllen = ret_fd ? CMSG_LEN(sizeof(int)) : 0};
    ssize_t count;
    int came = -1, r = 0;
    if (ret_fd)
        *ret_fd = -1;
    r = urgent_is_ordinary(fd);
    if (r)
        return r;
    do
        count = recvmsg(fd, &message, MSG_DONTWAIT | MSG_PEEK | MSG_CMSG_CLOEXEC);
    while (count < 0 && errno == EINTR);
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        return COX_EMPTY;
    if (count < 0 && errno != ECONNRESET) /* reset: the peer closed with our bytes unread */
        return -errno;
    *ret_size = 0;
    if (count <= 0)
        return 0;
    const struct cmsghdr *header = message.msg_controllen ? CMSG_FIRSTHDR(&message) : NULL;
    if (header && (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS))
        r = COX_CORRUPT;
    else if (header && header->cmsg_len == CMSG_LEN(sizeof came))
        memcpy(&came, CMSG_DATA(header), sizeof came);
    if (r == 0 && message.msg_flags & MSG_CTRUNC) {
        /* An fd was wanted and could not be received, or there are more. */
        _cox_cleanup_(cox_close_fd) int other =
            ret_fd && came < 0 ? fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, STDERR_FILENO + 1) : -1;
        r = ret_fd && came < 0 && other < 0 && (errno == EMFILE || errno == ENFILE) ? -errno
                                                                                    : COX_CORRUPT;
    }
    if (r == 0 && came >= 0 && came <= STDERR_FILENO)
        r = cox_fd_raise(&came);
    if (ret_fd)
        *ret_fd = came;
    if (r)
        return r;
    /* Receives it again without peeking. The references that the kernel drops then are not the last
     * ones, except when there was no fd. */
    do
        count = recv(fd, bytes, (size_t)count, MSG_DONTWAIT);
    while (count < 0 && errno == EINTR);
    if (count < 0)
        return -errno;
    *ret_size = (size_t)count;
    return 0;
}
