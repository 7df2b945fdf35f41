#include "stack_writer.h"

#include "channel/base/base_internal.h"
#include "channel/base/futex.h"
#include "channel/base/idioms.h"
#include "channel/base/thread.h"
#include "channel/socket/socket.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

/* How long a call on the connection may block; then it is seen whether the rank stops. */
#define SLICE_US 100000
/* How many of these a helper may say nothing, or not read. */
#define SLICE_COUNT_MAX 50

struct entry64 { /* struct linux_dirent64 */
    uint64_t inode;
    int64_t offset;
    unsigned short length;
    unsigned char type;
    char name[];
};

struct copies {
    uint32_t thread_count, pool_used;
    struct cox_stack_thread threads[COX_STACK_THREAD_MAX];
    uint8_t pool[COX_STACK_POOL_SIZE];
};

/* ---- copies of the other threads' stacks, where ptrace is denied ---- */

/* Reads "NUMBER ... SP PC" or "-1 SP PC". Returns false: it runs, or the kernel says nothing. */
static bool thread_registers(int folder_fd, const char *name, struct cox_stack_thread *thread)
{
    char path[64], text[512];
    size_t used = 0;
    for (const char *c = name; *c && used < 16; c++)
        path[used++] = *c;
    memcpy(path + used, "/syscall", sizeof "/syscall");
    const int fd = openat(folder_fd, path, O_RDONLY | O_CLOEXEC);
    const ssize_t size = fd >= 0 ? read(fd, text, sizeof text - 1) : -1;
    if (fd >= 0)
        close(fd);
    if (size <= 0)
        return false;
    text[size] = '\0';
    char *pc = strrchr(text, ' ');
    if (!pc)
        return false;
    *pc = '\0';
    char *sp = strrchr(text, ' ');
    if (!sp)
        return false;
    thread->pc = strtoull(pc + 1, NULL, 16);
    thread->sp = strtoull(sp + 1, NULL, 16);
    thread->known = 1;
    return thread->sp != 0;
}

/* /proc/self/mem, since the address may be invalid by now. */
static void thread_copy(struct copies *copies, int memory_fd, struct cox_stack_thread *thread,
                        uint32_t *used)
{
    const uint32_t room = COX_STACK_POOL_SIZE - *used;
    const uint32_t want = room < COX_STACK_COPY_MAX ? room : COX_STACK_COPY_MAX;
    const ssize_t size = want ? pread(memory_fd, copies->pool + *used, want, (off_t)thread->sp) : 0;
    thread->at = *used;
    thread->size = size > 0 ? (uint32_t)size : 0;
    *used += thread->size;
}

static void copies_take(struct copies *copies)
{
    const int32_t own_tid = (int32_t)syscall(SYS_gettid);
    char entries[4096];
    const int folder_fd = open("/proc/self/task", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const int memory_fd = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
    uint32_t count = 0, used = 0;
    for (;;) {
        const long size = folder_fd < 0 || memory_fd < 0
                              ? -1
                              : syscall(SYS_getdents64, folder_fd, entries, sizeof entries);
        if (size <= 0)
            break;
        for (long at = 0; at < size && count < COX_STACK_THREAD_MAX;) {
            const struct entry64 *entry = (const struct entry64 *)(const void *)(entries + at);
            struct cox_stack_thread thread = {.tid = (int32_t)strtol(entry->name, NULL, 10)};
            at += entry->length;
            if (thread.tid <= 0 || thread.tid == own_tid)
                continue;
            if (thread_registers(folder_fd, entry->name, &thread))
                thread_copy(copies, memory_fd, &thread, &used);
            copies->threads[count++] = thread;
        }
    }
    if (folder_fd >= 0)
        close(folder_fd);
    if (memory_fd >= 0)
        close(memory_fd);
    copies->thread_count = count;
    copies->pool_used = used;
}

/* ---- the connection ---- */

/* Returns a connection to the coordinator's helper; -1: no socket has that name, or the coordinator
 * did not make it. Nothing was read or written then. */
static int helper_connect(const struct cox_stack_writer *writer)
{
    const struct timeval slice = {.tv_usec = SLICE_US};
    const int yes = 1, buffer_size = (int)COX_STACK_TEXT_MAX;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct cox_socket_peer peer;
    char *const name = address.sun_path + 1;
    memcpy(name, writer->doorbell->name, sizeof writer->doorbell->name);
    const socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 +
                                       strnlen(name, sizeof writer->doorbell->name));
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffer_size, sizeof buffer_size);
    if (cox_fd_raise(&fd) || setsockopt(fd, SOL_SOCKET, SO_PASSCRED, &yes, sizeof yes) < 0 ||
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &slice, sizeof slice) < 0 ||
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &slice, sizeof slice) < 0 ||
        connect(fd, (struct sockaddr *)&address, size) < 0 || cox_socket_read_peer(fd, &peer) ||
        peer.pid != writer->coordinator)
        cox_close_fd(&fd);
    return fd;
}

/* After a call that failed. */
static bool try_again(struct cox_stack_writer *writer, int *slices)
{
    /* acquire: with stop, below. */
    return (errno == EAGAIN || errno == EINTR) && ++*slices < SLICE_COUNT_MAX &&
           !atomic_load_explicit(&writer->stopping, memory_order_acquire);
}

/* Returns false: the helper is done, or has said nothing for too long. */
static bool request_take(struct cox_stack_writer *writer, int fd, uint32_t *ret_flags,
                         pid_t *ret_sender)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(struct ucred))];
    } control;
    struct cox_stack_request request;
    struct iovec part = {&request, sizeof request};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = &control,
                             .msg_controllen = sizeof control};
    struct ucred sender;
    ssize_t size;
    int slices = 0;
    do
        size = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
    while (size < 0 && try_again(writer, &slices));
    const struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (size != (ssize_t)sizeof request || request.magic != COX_STACK_MAGIC || !header ||
        header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_CREDENTIALS ||
        header->cmsg_len != CMSG_LEN(sizeof sender))
        return false;
    memcpy(&sender, CMSG_DATA(header), sizeof sender);
    *ret_flags = request.flags;
    *ret_sender = sender.pid;
    return true;
}

static bool bytes_send(struct cox_stack_writer *writer, int fd, const void *bytes, size_t size)
{
    const char *from = bytes;
    int slices = 0;
    while (size) {
        const ssize_t sent = send(fd, from, size, MSG_NOSIGNAL);
        if (sent < 0 && !try_again(writer, &slices))
            return false;
        from += sent > 0 ? sent : 0;
        size -= sent > 0 ? (size_t)sent : 0;
    }
    return true;
}

/* Returns a file of them, -1: there are none. */
static int frames_write(struct cox_stack_writer *writer, uint32_t *ret_size)
{
    int fd = memfd_create(COX_STACK_DOORBELL_NAME "-frames", MFD_CLOEXEC);
    *ret_size = 0;
    if (fd < 0 || cox_fd_raise(&fd)) {
        cox_close_fd(&fd);
        return -1;
    }
    if (writer->write_frames)
        writer->write_frames(writer->context, fd);
    else if (writer->python_dump)
        writer->python_dump(fd, NULL, NULL);
    const off_t size = lseek(fd, 0, SEEK_END);
    if (size > 0)
        *ret_size = size < (off_t)COX_STACK_TEXT_MAX ? (uint32_t)size : COX_STACK_TEXT_MAX;
    return fd;
}

static bool frames_send(struct cox_stack_writer *writer, int fd, int frames_fd, uint32_t size)
{
    char bytes[16384];
    for (uint32_t at = 0; at < size;) {
        const size_t want = size - at < sizeof bytes ? size - at : sizeof bytes;
        const ssize_t got = pread(frames_fd, bytes, want, (off_t)at);
        if (got <= 0 || !bytes_send(writer, fd, bytes, (size_t)got))
            return false;
        at += (uint32_t)got;
    }
    return true;
}

static bool reply(struct cox_stack_writer *writer, int fd, uint32_t flags)
{
    struct cox_stack_reply head = {0};
    struct copies *copies = MAP_FAILED;
    int frames_fd = -1;
    if (flags & COX_STACK_FRAMES)
        frames_fd = frames_write(writer, &head.text_size);
    if (flags & COX_STACK_COPIES)
        copies =
            mmap(NULL, sizeof *copies, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copies != MAP_FAILED) {
        copies_take(copies);
        head.thread_count = copies->thread_count;
        head.pool_size = copies->pool_used;
    }
    bool sent = bytes_send(writer, fd, &head, sizeof head) &&
                frames_send(writer, fd, frames_fd, head.text_size);
    if (copies != MAP_FAILED) {
        sent = sent &&
               bytes_send(writer, fd, copies->threads,
                          head.thread_count * sizeof copies->threads[0]) &&
               bytes_send(writer, fd, copies->pool, head.pool_size);
        munmap(copies, sizeof *copies);
    }
    /* The host may keep a copy of the fd (faulthandler's is of the process). */
    if (frames_fd >= 0 && ftruncate(frames_fd, 0) < 0)
        sent = false;
    cox_close_fd(&frames_fd);
    return sent;
}

static bool torch_reply(struct cox_stack_writer *writer, int fd)
{
    struct cox_stack_reply head = {0};
    const char *dump = NULL;
    head.torch = (uint32_t)cox_torch_recorder_dump(
        writer->torch, cox_deadline_after_ms(COX_STACK_TORCH_MS), &dump, &head.text_size);
    return bytes_send(writer, fd, &head, sizeof head) &&
           bytes_send(writer, fd, dump, head.text_size);
}

/* ---- the thread ---- */

static void helper_serve(struct cox_stack_writer *writer)
{
    bool consented = false, sent = true;
    uint32_t flags;
    pid_t sender;
    int fd = helper_connect(writer);
    while (fd >= 0 && sent && request_take(writer, fd, &flags, &sender)) {
        /* In place of a policy that the host may have (an exporter's ptrace_policy), so only where
         * the helper has tried without. */
        if ((flags & COX_STACK_CONSENT) && sender > 0)
            consented = prctl(PR_SET_PTRACER, (unsigned long)sender, 0UL, 0UL, 0UL) == 0;
        sent = flags & COX_STACK_TORCH ? torch_reply(writer, fd) : reply(writer, fd, flags);
    }
    if (consented)
        prctl(PR_SET_PTRACER, 0UL, 0UL, 0UL, 0UL);
    cox_close_fd(&fd);
}

static void *writer_main(void *argument)
{
    struct cox_stack_writer *writer = argument;
    _Atomic uint32_t *rings = &writer->doorbell->rings;
    uint32_t answered = 0;
    pthread_setname_np(pthread_self(), COX_STACK_THREAD_NAME);
    for (;;) {
        /* acquire: the name that was stored before; partner: ring in
         * program/stacks/rank_connection.c. */
        const uint32_t rung = atomic_load_explicit(rings, memory_order_acquire);
        /* acquire: with stop, below. */
        if (atomic_load_explicit(&writer->stopping, memory_order_acquire))
            return NULL;
        if (rung == answered)
            cox_futex_wait(rings, rung, COX_DEADLINE_NEVER);
        else
            helper_serve(writer);
        answered = rung;
    }
}

static int doorbell_make(struct cox_stack_writer *writer)
{
    const unsigned seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    struct rlimit limit;
    /* Beyond it the kernel would raise SIGXFSZ. */
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < sizeof *writer->doorbell)
        return -EFBIG;
    _cox_cleanup_(cox_close_fd) int fd =
        memfd_create(COX_STACK_DOORBELL_NAME, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    int r = fd < 0 ? -errno : 0;
    while (r == 0 && ftruncate(fd, (off_t)sizeof *writer->doorbell) < 0)
        r = errno == EINTR ? 0 : -errno;
    if (r == 0 && fcntl(fd, F_ADD_SEALS, seals) < 0)
        r = -errno;
    if (r)
        return r;
    void *base = mmap(NULL, sizeof *writer->doorbell, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED)
        return -errno;
    writer->doorbell = base;
    writer->fd = cox_steal_fd(&fd);
    return 0;
}

int cox_stack_writer_start(struct cox_stack_writer *writer, pid_t coordinator,
                           void (*write_frames)(void *context, int fd), void *context,
                           struct cox_error *err)
{
    *writer = (struct cox_stack_writer){
        .fd = -1, .coordinator = coordinator, .write_frames = write_frames, .context = context};
    if (coordinator <= 0)
        return 0;
    if (!write_frames)
        *(void **)(void *)&writer->python_dump = dlsym(RTLD_DEFAULT, "_Py_DumpTracebackThreads");
    int r = doorbell_make(writer);
    if (r == -ENOSYS || r == -EPERM || r == -EACCES || r == -EFBIG)
        return 0;
    if (r)
        return cox_fail(err, r, "the memory file of the stacks: %s", cox_status_text(r));
    writer->torch = cox_torch_recorder_new();
    r = cox_thread_start(&writer->thread, writer_main, writer);
    if (r) {
        writer->torch = cox_torch_recorder_free(writer->torch);
        munmap(writer->doorbell, sizeof *writer->doorbell);
        writer->doorbell = NULL;
        cox_close_fd(&writer->fd);
        return cox_fail(err, r, "starting a thread: %s", cox_status_text(r));
    }
    return 0;
}

void cox_stack_writer_stop(struct cox_stack_writer *writer)
{
    if (!writer->doorbell)
        return;
    /* release: with the thread's load. The word changes, so that the thread does not block again.
     */
    atomic_store_explicit(&writer->stopping, true, memory_order_release);
    atomic_fetch_add_explicit(&writer->doorbell->rings, 1, memory_order_release);
    cox_futex_wake_some(&writer->doorbell->rings, 1);
    pthread_join(writer->thread, NULL);
    writer->torch = cox_torch_recorder_free(writer->torch);
    munmap(writer->doorbell, sizeof *writer->doorbell);
    writer->doorbell = NULL;
    cox_close_fd(&writer->fd);
}
