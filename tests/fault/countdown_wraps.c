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

/* A wrap of nothing else: the real one, or `failed`. execve does not return: what AddressSanitizer
 * notes of its frame would stay, of memory that is unmapped then (cox_launch_clone). */
#define FAILABLE(type, name, failed, error, status, flags, parameters, arguments)                  \
    type __real_##name parameters;                                                                 \
    type __wrap_##name parameters;                                                                 \
    __attribute__((no_sanitize("address"))) type __wrap_##name parameters                          \
    {                                                                                              \
        return FAILS(#name, error, status, flags) ? failed : __real_##name arguments;              \
    }
/* Of what takes something back: it works, and says that it did not. */
#define TAKES_BACK(name, parameters, arguments)                                                    \
    int __real_##name parameters;                                                                  \
    int __wrap_##name parameters;                                                                  \
    int __wrap_##name parameters                                                                   \
    {                                                                                              \
        int r = __real_##name arguments;                                                           \
        return r < 0 ? r : countdown_took_back();                                                  \
    }

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

FAILABLE(void *, mmap, MAP_FAILED, ENOMEM, 0, 0,
         (void *address, size_t size, int protection, int flags, int fd, off_t offset),
         (address, size, protection, flags, fd, offset))

TAKES_BACK(munmap, (void *address, size_t size), (address, size))

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

TAKES_BACK(close, (int fd), (fd))

FAILABLE(int, statx, -1, ENOMEM, 0, COUNTDOWN_PASSABLE,
         (int folder_fd, const char *path, int flags, unsigned mask, struct statx *ret),
         (folder_fd, path, flags, mask, ret))

FAILABLE(int, fstat, -1, ENOMEM, 0, COUNTDOWN_PASSABLE, (int fd, struct stat *ret), (fd, ret))

FAILABLE(int, stat, -1, ENOMEM, 0, COUNTDOWN_PASSABLE, (const char *path, struct stat *ret),
         (path, ret))

FAILABLE(int, statvfs, -1, ENOSYS, 0, COUNTDOWN_PASSABLE, (const char *path, struct statvfs *ret),
         (path, ret))

FAILABLE(int, access, -1, ENOMEM, 0, COUNTDOWN_PASSABLE, (const char *path, int mode), (path, mode))

FAILABLE(int, faccessat, -1, ENOMEM, 0, COUNTDOWN_PASSABLE,
         (int folder, const char *path, int mode, int flags), (folder, path, mode, flags))

FAILABLE(ssize_t, readlink, -1, ENOMEM, 0, 0, (const char *path, char *buffer, size_t size),
         (path, buffer, size))

FAILABLE(int, fchmod, -1, EROFS, 0, 0, (int fd, mode_t mode), (fd, mode))

FAILABLE(int, fchmodat, -1, EROFS, 0, 0, (int folder, const char *path, mode_t mode, int flags),
         (folder, path, mode, flags))

FAILABLE(int, chmod, -1, EROFS, 0, 0, (const char *path, mode_t mode), (path, mode))

FAILABLE(int, mkdir, -1, ENOSPC, 0, 0, (const char *path, mode_t mode), (path, mode))

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

FAILABLE(int, renameat, -1, ENOSPC, 0, 0, (int from, const char *old, int to, const char *path),
         (from, old, to, path))

TAKES_BACK(unlinkat, (int folder, const char *path, int flags), (folder, path, flags))

FAILABLE(DIR *, opendir, NULL, EMFILE, 0, 0, (const char *path), (path))

FAILABLE(DIR *, fdopendir, NULL, ENOMEM, 0, 0, (int fd), (fd))

FAILABLE(int, memfd_create, -1, EMFILE, 0, 0, (const char *name, unsigned flags), (name, flags))

FAILABLE(ssize_t, getrandom, -1, ENOSYS, 0, COUNTDOWN_INTERRUPTIBLE,
         (void *buffer, size_t size, unsigned flags), (buffer, size, flags))

FAILABLE(int, linkat, -1, ENOSPC, 0, 0,
         (int from, const char *old, int to, const char *path, int flags),
         (from, old, to, path, flags))

TAKES_BACK(unlink, (const char *path), (path))

WRAP(int, flock, int fd, int operation)
{
    if (operation != LOCK_UN)
        return FAILS("flock", ENOLCK, 0, 0) ? -1 : __real_flock(fd, operation);
    __real_flock(fd, operation);
    return countdown_took_back();
}

FAILABLE(int, posix_fallocate, errno, ENOSPC, COX_NO_SPACE, COUNTDOWN_INTERRUPTIBLE,
         (int fd, off_t offset, off_t size), (fd, offset, size))

/* A window that is not given back now is so with the next. */
FAILABLE(int, fallocate, -1, EDQUOT, 0, COUNTDOWN_INTERRUPTIBLE | COUNTDOWN_PASSABLE,
         (int fd, int mode, off_t offset, off_t size), (fd, mode, offset, size))

FAILABLE(int, ftruncate, -1, EDQUOT, 0, COUNTDOWN_INTERRUPTIBLE, (int fd, off_t size), (fd, size))

FAILABLE(int, shm_open, -1, EMFILE, 0, 0, (const char *name, int flags, mode_t mode),
         (name, flags, mode))

TAKES_BACK(shm_unlink, (const char *name), (name))

TAKES_BACK(sem_unlink, (const char *name), (name))

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

FAILABLE(ssize_t, pread, -1, EIO, 0, COUNTDOWN_INTERRUPTIBLE,
         (int fd, void *buffer, size_t size, off_t offset), (fd, buffer, size, offset))

FAILABLE(ssize_t, pwrite, -1, ENOSPC, COX_NO_SPACE, COUNTDOWN_INTERRUPTIBLE,
         (int fd, const void *bytes, size_t size, off_t offset), (fd, bytes, size, offset))

/* Into a file. A pipe or an eventfd of ours, far from full, takes what it gets. */
WRAP(ssize_t, write, int fd, const void *bytes, size_t size)
{
    struct stat st;
    bool file = __real_fstat(fd, &st) == 0 && S_ISREG(st.st_mode);
    if (file && FAILS("write", ENOSPC, 0, 0))
        return -1;
    return __real_write(fd, bytes, size);
}

FAILABLE(FILE *, fopen, NULL, EMFILE, 0, 0, (const char *path, const char *mode), (path, mode))

FAILABLE(FILE *, fdopen, NULL, ENOMEM, 0, 0, (int fd, const char *mode), (fd, mode))

TAKES_BACK(fclose, (FILE * file), (file))

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

FAILABLE(int, socketpair, -1, EMFILE, 0, 0, (int domain, int type, int protocol, int fds[2]),
         (domain, type, protocol, fds))

FAILABLE(ssize_t, send, -1, ENOBUFS, 0, COUNTDOWN_INTERRUPTIBLE,
         (int fd, const void *bytes, size_t size, int flags), (fd, bytes, size, flags))

FAILABLE(ssize_t, recv, -1, ENOMEM, 0, COUNTDOWN_INTERRUPTIBLE,
         (int fd, void *bytes, size_t size, int flags), (fd, bytes, size, flags))

FAILABLE(ssize_t, sendmsg, -1, ENOBUFS, 0, COUNTDOWN_INTERRUPTIBLE,
         (int fd, const struct msghdr *message, int flags), (fd, message, flags))

WRAP(ssize_t, recvmsg, int fd, struct msghdr *message, int flags)
{
    /* A connection whose queue cannot be looked into is closed by another thread
     * (channel/socket/closer.h). */
    if (FAILS("recvmsg", ENOMEM, 0,
              COUNTDOWN_INTERRUPTIBLE | (flags & MSG_PEEK ? COUNTDOWN_PASSABLE : 0)))
        return -1;
    return __real_recvmsg(fd, message, flags);
}

FAILABLE(int, getsockopt, -1, ENOBUFS, 0, 0,
         (int fd, int level, int option, void *value, socklen_t *size),
         (fd, level, option, value, size))

WRAP(int, setsockopt, int fd, int level, int option, const void *value, socklen_t size)
{
    /* The same. */
    if (FAILS("setsockopt", ENOMEM, 0, option == SO_OOBINLINE ? COUNTDOWN_PASSABLE : 0))
        return -1;
    return __real_setsockopt(fd, level, option, value, size);
}

FAILABLE(int, socket, -1, EMFILE, 0, 0, (int domain, int type, int protocol),
         (domain, type, protocol))

FAILABLE(int, bind, -1, ENOSPC, 0, 0, (int fd, const struct sockaddr *address, socklen_t size),
         (fd, address, size))

FAILABLE(int, listen, -1, ENOBUFS, 0, 0, (int fd, int backlog), (fd, backlog))

FAILABLE(int, connect, -1, ENOMEM, 0, COUNTDOWN_INTERRUPTIBLE,
         (int fd, const struct sockaddr *address, socklen_t size), (fd, address, size))

FAILABLE(int, accept4, -1, EMFILE, 0, COUNTDOWN_INTERRUPTIBLE | COUNTDOWN_PASSABLE,
         (int fd, struct sockaddr *address, socklen_t *size, int flags), (fd, address, size, flags))

/* ---- processes ---- */

FAILABLE(int, pipe2, -1, EMFILE, 0, 0, (int fds[2], int flags), (fds, flags))

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

FAILABLE(int, eventfd, -1, ENFILE, 0, 0, (unsigned value, int flags), (value, flags))

FAILABLE(int, epoll_create1, -1, EMFILE, 0, 0, (int flags), (flags))

FAILABLE(int, epoll_ctl, -1, ENOSPC, 0, 0,
         (int epoll_fd, int operation, int fd, struct epoll_event *event),
         (epoll_fd, operation, fd, event))

FAILABLE(int, timerfd_create, -1, EMFILE, 0, 0, (int clock, int flags), (clock, flags))

FAILABLE(int, signalfd, -1, EMFILE, 0, 0, (int fd, const sigset_t *set, int flags),
         (fd, set, flags))

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

FAILABLE(int, dup2, -1, EBUSY, 0, 0, (int fd, int target), (fd, target))

FAILABLE(int, dup3, -1, EBUSY, 0, 0, (int fd, int target, int flags), (fd, target, flags))

FAILABLE(int, close_range, -1, ENOSYS, 0, 0, (unsigned first, unsigned last, int flags),
         (first, last, flags))

FAILABLE(int, execve, -1, ENOEXEC, COX_EXEC_FAILED, 0,
         (const char *path, char *const *argv, char *const *envp), (path, argv, envp))

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

FAILABLE(int, waitid, -1, 0, 0, COUNTDOWN_INTERRUPTIBLE,
         (idtype_t type, id_t id, siginfo_t *ret, int options), (type, id, ret, options))

FAILABLE(int, sem_init, -1, ENOSPC, 0, 0, (sem_t * sem, int shared, unsigned value),
         (sem, shared, value))
