/* The calls of the libraries that can fail, each as the linker's __wrap_ of it: fails when the
 * countdown says so, and else is the real one. */
#include "countdown.h"
#include "tests/lib/posix.h"

#include <linux/futex.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <sys/file.h>
#include <sys/signalfd.h>
#include <sys/statvfs.h>

void (*countdown_at_poll)(void);

/* The real one and the wrap, and in the wrap: does this call fail? */
#define WRAP(type, name, ...)                                                                      \
    type __real_##name(__VA_ARGS__);                                                               \
    type __wrap_##name(__VA_ARGS__);                                                               \
    type __wrap_##name(__VA_ARGS__)
#define FAILS(name, error, status, flags)                                                          \
    (countdown_fails(&(const struct countdown_call){name, error, status, flags},                   \
                     __builtin_return_address(0)))

/* ---- memory ---- */

static void *block(void *memory)
{
    if (memory)
        countdown_block(1);
    return memory;
}

WRAP(void *, malloc, size_t size)
{
    return FAILS("malloc", ENOMEM, 0, 0) ? NULL : block(__real_malloc(size));
}

WRAP(void *, calloc, size_t count, size_t size)
{
    return FAILS("calloc", ENOMEM, 0, 0) ? NULL : block(__real_calloc(count, size));
}

WRAP(void *, aligned_alloc, size_t alignment, size_t size)
{
    return FAILS("aligned_alloc", ENOMEM, 0, 0) ? NULL
                                                : block(__real_aligned_alloc(alignment, size));
}

WRAP(int, posix_memalign, void **ret_memory, size_t alignment, size_t size)
{
    int r = FAILS("posix_memalign", ENOMEM, 0, 0)
                ? ENOMEM
                : __real_posix_memalign(ret_memory, alignment, size);
    if (r == 0)
        block(*ret_memory);
    return r;
}

WRAP(void *, realloc, void *old, size_t size)
{
    if (FAILS("realloc", ENOMEM, 0, 0))
        return NULL;
    bool fresh = !old;
    void *memory = __real_realloc(old, size);
    return fresh ? block(memory) : memory;
}

WRAP(void *, reallocarray, void *old, size_t count, size_t size)
{
    if (FAILS("reallocarray", ENOMEM, 0, 0))
        return NULL;
    bool fresh = !old;
    void *memory = __real_reallocarray(old, count, size);
    return fresh ? block(memory) : memory;
}

WRAP(char *, strdup, const char *text)
{
    return FAILS("strdup", ENOMEM, 0, 0) ? NULL : block(__real_strdup(text));
}

WRAP(char *, strndup, const char *text, size_t size)
{
    return FAILS("strndup", ENOMEM, 0, 0) ? NULL : block(__real_strndup(text, size));
}

/* What a failed asprintf leaves in *ret is undefined, and must not be freed. */
static int print_failed(char **ret)
{
    *ret = (char *)16;
    return -1;
}

int __real_vasprintf(char **ret, const char *format, va_list args)
    __attribute__((format(printf, 2, 0)));
int __wrap_vasprintf(char **ret, const char *format, va_list args)
    __attribute__((format(printf, 2, 0)));
int __wrap_asprintf(char **ret, const char *format, ...) __attribute__((format(printf, 2, 3)));

static int print(char **ret, const char *format, va_list args)
    __attribute__((format(printf, 2, 0)));
static int print(char **ret, const char *format, va_list args)
{
    int length = __real_vasprintf(ret, format, args);
    if (length >= 0)
        countdown_block(1);
    return length;
}

int __wrap_vasprintf(char **ret, const char *format, va_list args)
{
    return FAILS("vasprintf", ENOMEM, 0, 0) ? print_failed(ret) : print(ret, format, args);
}

int __wrap_asprintf(char **ret, const char *format, ...)
{
    if (FAILS("asprintf", ENOMEM, 0, 0))
        return print_failed(ret);
    va_list args;
    va_start(args, format);
    int length = print(ret, format, args);
    va_end(args);
    return length;
}

WRAP(void, free, void *memory)
{
    if (memory)
        countdown_block(-1);
    __real_free(memory);
}

/* The parser takes a token that it got no memory for as one that does not belong there. Its text
 * buffer, which grows by doubling from 16 bytes, it does not check at all (2.14): that would test
 * the parser, and end in its writing past the buffer. */
void *countdown_malloc(size_t size)
{
    bool doubled = size > 16 && (size & (size - 1)) == 0;
    if (!doubled && FAILS("malloc of jansson", ENOMEM, COX_CORRUPT, COUNTDOWN_FOREIGN))
        return NULL;
    return block(__real_malloc(size));
}

void countdown_free(void *memory)
{
    __wrap_free(memory);
}

WRAP(void *, mmap, void *address, size_t size, int protection, int flags, int fd, off_t offset)
{
    if (FAILS("mmap", ENOMEM, 0, 0))
        return MAP_FAILED;
    return __real_mmap(address, size, protection, flags, fd, offset);
}

WRAP(int, munmap, void *address, size_t size)
{
    __real_munmap(address, size);
    return countdown_took_back();
}

/* ---- files ---- */

int __real_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...)
{
    /* A look at a process that fails is repeated (cox_supervisor_see_dump). Without the kernel's
     * clock source recorders have another one. */
    const bool repeated = strncmp(path, "/proc/", 6) == 0 && strstr(path, "/status");
    unsigned passes = repeated || strstr(path, "/clocksource/") ? COUNTDOWN_PASSABLE : 0;
    if (FAILS("open", EMFILE, 0, passes))
        return -1;
    va_list args;
    va_start(args, flags);
    bool creates = flags & (O_CREAT | O_TMPFILE);
    mode_t mode = creates ? va_arg(args, mode_t) : 0;
    va_end(args);
    return __real_open(path, flags, mode);
}

WRAP(int, close, int fd)
{
    __real_close(fd);
    return countdown_took_back();
}

WRAP(int, statx, int folder_fd, const char *path, int flags, unsigned mask, struct statx *ret)
{
    return FAILS("statx", ENOMEM, 0, COUNTDOWN_PASSABLE)
               ? -1
               : __real_statx(folder_fd, path, flags, mask, ret);
}

WRAP(int, fstat, int fd, struct stat *ret)
{
    return FAILS("fstat", ENOMEM, 0, COUNTDOWN_PASSABLE) ? -1 : __real_fstat(fd, ret);
}

WRAP(int, stat, const char *path, struct stat *ret)
{
    return FAILS("stat", ENOMEM, 0, COUNTDOWN_PASSABLE) ? -1 : __real_stat(path, ret);
}

WRAP(int, statvfs, const char *path, struct statvfs *ret)
{
    return FAILS("statvfs", ENOSYS, 0, COUNTDOWN_PASSABLE) ? -1 : __real_statvfs(path, ret);
}

WRAP(int, access, const char *path, int mode)
{
    return FAILS("access", ENOMEM, 0, COUNTDOWN_PASSABLE) ? -1 : __real_access(path, mode);
}

WRAP(int, faccessat, int folder, const char *path, int mode, int flags)
{
    if (FAILS("faccessat", ENOMEM, 0, COUNTDOWN_PASSABLE))
        return -1;
    return __real_faccessat(folder, path, mode, flags);
}

WRAP(ssize_t, readlink, const char *path, char *buffer, size_t size)
{
    return FAILS("readlink", ENOMEM, 0, 0) ? -1 : __real_readlink(path, buffer, size);
}

WRAP(int, fchmod, int fd, mode_t mode)
{
    return FAILS("fchmod", EROFS, 0, 0) ? -1 : __real_fchmod(fd, mode);
}

WRAP(int, fchmodat, int folder, const char *path, mode_t mode, int flags)
{
    if (FAILS("fchmodat", EROFS, 0, 0))
        return -1;
    return __real_fchmodat(folder, path, mode, flags);
}

WRAP(int, chmod, const char *path, mode_t mode)
{
    return FAILS("chmod", EROFS, 0, 0) ? -1 : __real_chmod(path, mode);
}

WRAP(int, mkdir, const char *path, mode_t mode)
{
    return FAILS("mkdir", ENOSPC, 0, 0) ? -1 : __real_mkdir(path, mode);
}

int __real_openat(int folder, const char *path, int flags, ...);
int __wrap_openat(int folder, const char *path, int flags, ...);
int __wrap_openat(int folder, const char *path, int flags, ...)
{
    if (FAILS("openat", EMFILE, 0, 0))
        return -1;
    va_list args;
    va_start(args, flags);
    mode_t mode = flags & O_CREAT ? va_arg(args, mode_t) : 0;
    va_end(args);
    return __real_openat(folder, path, flags, mode);
}

WRAP(int, renameat, int from, const char *old, int to, const char *path)
{
    return FAILS("renameat", ENOSPC, 0, 0) ? -1 : __real_renameat(from, old, to, path);
}

WRAP(int, unlinkat, int folder, const char *path, int flags)
{
    int r = __real_unlinkat(folder, path, flags);
    return r < 0 ? r : countdown_took_back();
}

WRAP(DIR *, opendir, const char *path)
{
    return FAILS("opendir", EMFILE, 0, 0) ? NULL : __real_opendir(path);
}

WRAP(DIR *, fdopendir, int fd)
{
    return FAILS("fdopendir", ENOMEM, 0, 0) ? NULL : __real_fdopendir(fd);
}

WRAP(int, memfd_create, const char *name, unsigned flags)
{
    return FAILS("memfd_create", EMFILE, 0, 0) ? -1 : __real_memfd_create(name, flags);
}

WRAP(ssize_t, getrandom, void *buffer, size_t size, unsigned flags)
{
    return FAILS("getrandom", ENOSYS, 0, COUNTDOWN_INTERRUPTIBLE)
               ? -1
               : __real_getrandom(buffer, size, flags);
}

WRAP(int, linkat, int from, const char *old, int to, const char *path, int flags)
{
    return FAILS("linkat", ENOSPC, 0, 0) ? -1 : __real_linkat(from, old, to, path, flags);
}

WRAP(int, unlink, const char *path)
{
    int r = __real_unlink(path);
    return r < 0 ? r : countdown_took_back();
}

WRAP(int, flock, int fd, int operation)
{
    if (operation != LOCK_UN)
        return FAILS("flock", ENOLCK, 0, 0) ? -1 : __real_flock(fd, operation);
    __real_flock(fd, operation);
    return countdown_took_back();
}

WRAP(int, posix_fallocate, int fd, off_t offset, off_t size)
{
    if (FAILS("posix_fallocate", ENOSPC, COX_NO_SPACE, COUNTDOWN_INTERRUPTIBLE))
        return errno;
    return __real_posix_fallocate(fd, offset, size);
}

/* A window that is not given back now is so with the next. */
WRAP(int, fallocate, int fd, int mode, off_t offset, off_t size)
{
    if (FAILS("fallocate", EDQUOT, 0, COUNTDOWN_INTERRUPTIBLE | COUNTDOWN_PASSABLE))
        return -1;
    return __real_fallocate(fd, mode, offset, size);
}

WRAP(int, ftruncate, int fd, off_t size)
{
    return FAILS("ftruncate", EDQUOT, 0, COUNTDOWN_INTERRUPTIBLE) ? -1 : __real_ftruncate(fd, size);
}

WRAP(int, shm_open, const char *name, int flags, mode_t mode)
{
    return FAILS("shm_open", EMFILE, 0, 0) ? -1 : __real_shm_open(name, flags, mode);
}

WRAP(int, shm_unlink, const char *name)
{
    int r = __real_shm_unlink(name);
    return r < 0 ? r : countdown_took_back();
}

WRAP(int, sem_unlink, const char *name)
{
    int r = __real_sem_unlink(name);
    return r < 0 ? r : countdown_took_back();
}

/* Of a file or a pipe; an eventfd has its count or nothing. Once: what a child says of its own
 * failure is read. */
WRAP(ssize_t, read, int fd, void *buffer, size_t size)
{
    struct stat st;
    bool anonymous = __real_fstat(fd, &st) == 0 && (st.st_mode & S_IFMT) == 0;
    unsigned flags = COUNTDOWN_INTERRUPTIBLE | COUNTDOWN_PASSABLE | COUNTDOWN_ONCE;
    if (!anonymous && FAILS("read", EIO, 0, flags))
        return -1;
    return __real_read(fd, buffer, size);
}

WRAP(ssize_t, pread, int fd, void *buffer, size_t size, off_t offset)
{
    if (FAILS("pread", EIO, 0, COUNTDOWN_INTERRUPTIBLE))
        return -1;
    return __real_pread(fd, buffer, size, offset);
}

WRAP(ssize_t, pwrite, int fd, const void *bytes, size_t size, off_t offset)
{
    if (FAILS("pwrite", ENOSPC, COX_NO_SPACE, COUNTDOWN_INTERRUPTIBLE))
        return -1;
    return __real_pwrite(fd, bytes, size, offset);
}

/* Into a file. A pipe or an eventfd of ours, far from full, takes what it gets. */
WRAP(ssize_t, write, int fd, const void *bytes, size_t size)
{
    struct stat st;
    bool file = __real_fstat(fd, &st) == 0 && S_ISREG(st.st_mode);
    if (file && FAILS("write", ENOSPC, 0, 0))
        return -1;
    return __real_write(fd, bytes, size);
}

WRAP(FILE *, fopen, const char *path, const char *mode)
{
    return FAILS("fopen", EMFILE, 0, 0) ? NULL : __real_fopen(path, mode);
}

WRAP(FILE *, fdopen, int fd, const char *mode)
{
    return FAILS("fdopen", ENOMEM, 0, 0) ? NULL : __real_fdopen(fd, mode);
}

WRAP(int, fclose, FILE *file)
{
    __real_fclose(file);
    return countdown_took_back();
}

ssize_t __real___getdelim(char **line, size_t *capacity, int delimiter, FILE *file);

/* Optimized code calls getline by its other name. */
static ssize_t line_read(char **line, size_t *capacity, FILE *file)
{
    bool fresh = !*line;
    ssize_t size = __real___getdelim(line, capacity, '\n', file);
    if (fresh)
        block(*line);
    return size;
}

WRAP(ssize_t, getline, char **line, size_t *capacity, FILE *file)
{
    return FAILS("getline", ENOMEM, 0, 0) ? -1 : line_read(line, capacity, file);
}

ssize_t __wrap___getdelim(char **line, size_t *capacity, int delimiter, FILE *file);
ssize_t __wrap___getdelim(char **line, size_t *capacity, int delimiter, FILE *file)
{
    (void)delimiter;
    return FAILS("getline", ENOMEM, 0, 0) ? -1 : line_read(line, capacity, file);
}

/* ---- sockets ---- */

WRAP(int, socketpair, int domain, int type, int protocol, int fds[2])
{
    if (FAILS("socketpair", EMFILE, 0, 0))
        return -1;
    return __real_socketpair(domain, type, protocol, fds);
}

WRAP(ssize_t, send, int fd, const void *bytes, size_t size, int flags)
{
    if (FAILS("send", ENOBUFS, 0, COUNTDOWN_INTERRUPTIBLE))
        return -1;
    return __real_send(fd, bytes, size, flags);
}

WRAP(ssize_t, recv, int fd, void *bytes, size_t size, int flags)
{
    if (FAILS("recv", ENOMEM, 0, COUNTDOWN_INTERRUPTIBLE))
        return -1;
    return __real_recv(fd, bytes, size, flags);
}

WRAP(ssize_t, sendmsg, int fd, const struct msghdr *message, int flags)
{
    if (FAILS("sendmsg", ENOBUFS, 0, COUNTDOWN_INTERRUPTIBLE))
        return -1;
    return __real_sendmsg(fd, message, flags);
}

WRAP(ssize_t, recvmsg, int fd, struct msghdr *message, int flags)
{
    /* A connection whose queue cannot be looked into is closed by another thread
     * (channel/socket/closer.h). */
    if (FAILS("recvmsg", ENOMEM, 0,
              COUNTDOWN_INTERRUPTIBLE | (flags & MSG_PEEK ? COUNTDOWN_PASSABLE : 0)))
        return -1;
    return __real_recvmsg(fd, message, flags);
}

WRAP(int, getsockopt, int fd, int level, int option, void *value, socklen_t *size)
{
    if (FAILS("getsockopt", ENOBUFS, 0, 0))
        return -1;
    return __real_getsockopt(fd, level, option, value, size);
}

WRAP(int, setsockopt, int fd, int level, int option, const void *value, socklen_t size)
{
    /* The same. */
    if (FAILS("setsockopt", ENOMEM, 0, option == SO_OOBINLINE ? COUNTDOWN_PASSABLE : 0))
        return -1;
    return __real_setsockopt(fd, level, option, value, size);
}

WRAP(int, socket, int domain, int type, int protocol)
{
    return FAILS("socket", EMFILE, 0, 0) ? -1 : __real_socket(domain, type, protocol);
}

WRAP(int, bind, int fd, const struct sockaddr *address, socklen_t size)
{
    return FAILS("bind", ENOSPC, 0, 0) ? -1 : __real_bind(fd, address, size);
}

WRAP(int, listen, int fd, int backlog)
{
    return FAILS("listen", ENOBUFS, 0, 0) ? -1 : __real_listen(fd, backlog);
}

WRAP(int, connect, int fd, const struct sockaddr *address, socklen_t size)
{
    if (FAILS("connect", ENOMEM, 0, COUNTDOWN_INTERRUPTIBLE))
        return -1;
    return __real_connect(fd, address, size);
}

WRAP(int, accept4, int fd, struct sockaddr *address, socklen_t *size, int flags)
{
    if (FAILS("accept4", EMFILE, 0, COUNTDOWN_INTERRUPTIBLE | COUNTDOWN_PASSABLE))
        return -1;
    return __real_accept4(fd, address, size, flags);
}

/* ---- processes ---- */

WRAP(int, pipe2, int fds[2], int flags)
{
    return FAILS("pipe2", EMFILE, 0, 0) ? -1 : __real_pipe2(fds, flags);
}

int __real_fcntl(int fd, int command, ...);
int __wrap_fcntl(int fd, int command, ...);
int __wrap_fcntl(int fd, int command, ...)
{
    va_list args;
    va_start(args, command);
    long argument = va_arg(args, long);
    va_end(args);
    /* A duplicate at a number of some height may be had at a lower one as well. */
    unsigned flags = command == F_DUPFD_CLOEXEC && argument > 3 ? COUNTDOWN_PASSABLE : 0;
    /* How much a pipe holds is asked for when all is over; so is the lock under which a name is
     * removed. */
    if (command != F_GETPIPE_SZ && command != F_OFD_SETLK && FAILS("fcntl", EMFILE, 0, flags))
        return -1;
    return __real_fcntl(fd, command, argument);
}

WRAP(int, eventfd, unsigned value, int flags)
{
    return FAILS("eventfd", ENFILE, 0, 0) ? -1 : __real_eventfd(value, flags);
}

WRAP(int, epoll_create1, int flags)
{
    return FAILS("epoll_create1", EMFILE, 0, 0) ? -1 : __real_epoll_create1(flags);
}

WRAP(int, epoll_ctl, int epoll_fd, int operation, int fd, struct epoll_event *event)
{
    return FAILS("epoll_ctl", ENOSPC, 0, 0) ? -1 : __real_epoll_ctl(epoll_fd, operation, fd, event);
}

WRAP(int, timerfd_create, int clock, int flags)
{
    return FAILS("timerfd_create", EMFILE, 0, 0) ? -1 : __real_timerfd_create(clock, flags);
}

WRAP(int, signalfd, int fd, const sigset_t *set, int flags)
{
    return FAILS("signalfd", EMFILE, 0, 0) ? -1 : __real_signalfd(fd, set, flags);
}

long __real_syscall(long number, ...);
long __wrap_syscall(long number, ...);
/* As the one of libc it takes six, however many were given. */
__attribute__((no_sanitize("address"))) long __wrap_syscall(long number, ...)
{
    long a[6];
    va_list args;
    va_start(args, number);
    for (size_t i = 0; i < sizeof a / sizeof *a; i++)
        a[i] = va_arg(args, long);
    va_end(args);
    /* A signal through a pidfd, and the end of a process, are how things are taken back. */
    if (number == SYS_clone && FAILS("clone", EAGAIN, 0, 0))
        return -1;
    if (number == SYS_pidfd_open && FAILS("pidfd_open", EMFILE, 0, 0))
        return -1;
    if (number == SYS_pidfd_getfd && FAILS("pidfd_getfd", EMFILE, 0, 0))
        return -1;
    if (number == SYS_futex && a[1] == FUTEX_WAIT_BITSET &&
        FAILS("futex", 0, 0, COUNTDOWN_INTERRUPTIBLE))
        return -1;
    return __real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

int __real_clone(int (*main)(void *argument), void *stack, int flags, void *argument, ...);
int __wrap_clone(int (*main)(void *argument), void *stack, int flags, void *argument, ...);
int __wrap_clone(int (*main)(void *argument), void *stack, int flags, void *argument, ...)
{
    va_list args;
    va_start(args, argument);
    int *pidfd = va_arg(args, int *); /* CLONE_PIDFD is the only flag with an argument */
    va_end(args);
    return FAILS("clone", EAGAIN, 0, 0) ? -1 : __real_clone(main, stack, flags, argument, pidfd);
}

int __real_prctl(int option, ...);
int __wrap_prctl(int option, ...);
int __wrap_prctl(int option, ...)
{
    va_list args;
    va_start(args, option);
    unsigned long argument = va_arg(args, unsigned long);
    va_end(args);
    return FAILS("prctl", EPERM, 0, 0) ? -1 : __real_prctl(option, argument, 0UL, 0UL, 0UL);
}

WRAP(int, dup2, int fd, int target)
{
    return FAILS("dup2", EBUSY, 0, 0) ? -1 : __real_dup2(fd, target);
}

WRAP(int, dup3, int fd, int target, int flags)
{
    return FAILS("dup3", EBUSY, 0, 0) ? -1 : __real_dup3(fd, target, flags);
}

WRAP(int, close_range, unsigned first, unsigned last, int flags)
{
    return FAILS("close_range", ENOSYS, 0, 0) ? -1 : __real_close_range(first, last, flags);
}

WRAP(int, execve, const char *path, char *const *argv, char *const *envp)
{
    return FAILS("execve", ENOEXEC, COX_EXEC_FAILED, 0) ? -1 : __real_execve(path, argv, envp);
}

/* ---- threads, waiting ---- */

/* A thread that was not joined keeps its memory: it counts as a block. */
WRAP(int, pthread_create, pthread_t *ret, const pthread_attr_t *attributes, void *(*start)(void *),
     void *argument)
{
    if (FAILS("pthread_create", EAGAIN, 0, 0))
        return errno;
    int e = __real_pthread_create(ret, attributes, start, argument);
    if (e == 0)
        countdown_block(1);
    return e;
}

WRAP(int, pthread_join, pthread_t thread, void **ret)
{
    int e = __real_pthread_join(thread, ret);
    if (e == 0)
        countdown_block(-1);
    return e ? e : -countdown_took_back();
}

WRAP(int, poll, struct pollfd *fds, nfds_t count, int timeout_ms)
{
    if (FAILS("poll", ENOMEM, 0, COUNTDOWN_INTERRUPTIBLE | COUNTDOWN_PASSABLE | COUNTDOWN_ONCE))
        return -1;
    if (countdown_at_poll)
        countdown_at_poll();
    return __real_poll(fds, count, timeout_ms);
}

WRAP(int, waitid, idtype_t type, id_t id, siginfo_t *ret, int options)
{
    return FAILS("waitid", 0, 0, COUNTDOWN_INTERRUPTIBLE) ? -1
                                                          : __real_waitid(type, id, ret, options);
}

WRAP(int, sem_init, sem_t *sem, int shared, unsigned value)
{
    return FAILS("sem_init", ENOSPC, 0, 0) ? -1 : __real_sem_init(sem, shared, value);
}
