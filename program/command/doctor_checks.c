#include "doctor_checks.h"

#include "channel/base/futex.h"
#include "channel/base/idioms.h"
#include "channel/socket/runtime_dir.h"
#include "channel/socket/socket.h"

#include <fcntl.h>
#include <inttypes.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

int cox_doctor_unnamed_file(void)
{
    _cox_cleanup_(cox_close_fd) int fd = open("/dev/shm", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0)
        return -errno;
    char self[64], path[64];
    snprintf(self, sizeof self, "/proc/self/fd/%d", fd);
    snprintf(path, sizeof path, "/dev/shm/%jd_doctor", (intmax_t)getpid());
    if (linkat(AT_FDCWD, self, AT_FDCWD, path, AT_SYMLINK_FOLLOW) < 0)
        return -errno;
    return unlink(path) < 0 ? -errno : 0;
}

/* A page of unnamed memory, and a read-only fd of it. The fds are the caller's, also after a
 * failure. */
static int memory_make(int ret_fds[2])
{
    char path[64];
    ret_fds[1] = -1;
    ret_fds[0] = memfd_create("coxswain-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (ret_fds[0] < 0 || ftruncate(ret_fds[0], sysconf(_SC_PAGESIZE)) < 0)
        return -errno;
    snprintf(path, sizeof path, "/proc/self/fd/%d", ret_fds[0]);
    ret_fds[1] = open(path, O_RDONLY | O_CLOEXEC);
    return ret_fds[1] < 0 ? -errno : 0;
}

static int memory_seal(const int fds[2])
{
    const size_t size = (size_t)sysconf(_SC_PAGESIZE);
    if (fcntl(fds[0], F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) < 0 ||
        fcntl(fds[0], F_ADD_SEALS, F_SEAL_FUTURE_WRITE) < 0)
        return -errno;
    void *writable = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
    if (writable != MAP_FAILED) {
        munmap(writable, size);
        return -ENOSYS; /* accepts the seal without enforcing it */
    }
    return 0;
}

int cox_doctor_seals(void)
{
    int fds[2];
    int r = memory_make(fds);
    if (r == 0)
        r = memory_seal(fds);
    cox_close_fd(&fds[0]);
    cox_close_fd(&fds[1]);
    return r;
}

int cox_doctor_futex_read_only(void)
{
    const size_t size = (size_t)sysconf(_SC_PAGESIZE);
    void *map = mmap(NULL, size, PROT_READ, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED)
        return -errno;
    /* With a deadline in the past: the kernel must still look up the word. */
    int r = cox_futex_wait(map, 0, cox_now_ns());
    munmap(map, size);
    return r == COX_TIMEOUT ? 0 : r;
}

int cox_doctor_socket_peer(void)
{
    int fds[2];
    struct cox_socket_peer peer;
    int r = cox_socket_pair(fds);
    if (r)
        return r;
    r = cox_socket_read_peer(fds[0], &peer);
    if (r == 0 && (peer.pid != getpid() || peer.uid != geteuid()))
        r = -EPROTO;
    cox_close_fd(&fds[0]);
    cox_close_fd(&fds[1]);
    return r;
}

/* Binds to a name that no control socket has. */
static int runtime_dir_bind(int runtime_dir_fd, const char *path, struct cox_error *err)
{
    char file[32];
    struct sockaddr_un address;
    snprintf(file, sizeof file, "%jd.doctor", (intmax_t)getpid());
    cox_runtime_dir_address(runtime_dir_fd, file, &address);
    _cox_cleanup_(cox_close_fd) int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || bind(fd, (const struct sockaddr *)&address, sizeof address) < 0 ||
        unlinkat(runtime_dir_fd, file, 0) < 0)
        return cox_fail(err, -errno,
                        "a socket in %s: %s (set COXSWAIN_RUNTIME_DIR to a folder where it works)",
                        path, cox_status_text(-errno));
    return 0;
}

/* The folder does not exist: checks whether a start could make it. */
static int runtime_dir_try_parent(const char *path, struct cox_error *err)
{
    char parent[COX_SOCKET_PATH_SIZE];
    snprintf(parent, sizeof parent, "%s", path);
    *strrchr(parent, '/') = '\0';
    if (faccessat(AT_FDCWD, parent, W_OK | X_OK, AT_EACCESS) == 0)
        return 0;
    return cox_fail(
        err, -errno,
        "%s cannot be made in %s: %s (set XDG_RUNTIME_DIR to a folder of your own, or unset it, or set COXSWAIN_RUNTIME_DIR)",
        strrchr(path, '/') + 1, parent, cox_status_text(-errno));
}

int cox_doctor_runtime_dir(char *path, struct cox_error *err)
{
    _cox_cleanup_(cox_close_fd) int runtime_dir_fd = -1;
    struct cox_error why = {0};
    int r = cox_runtime_dir_default(path, err);
    if (r)
        return r;
    r = cox_runtime_dir_open(path, false, &runtime_dir_fd, &why);
    if (r == COX_NOT_FOUND)
        return runtime_dir_try_parent(path, err);
    return r ? cox_fail(err, r, "%s", why.text) : runtime_dir_bind(runtime_dir_fd, path, err);
}

int cox_doctor_child_pidfd(void)
{
    _cox_cleanup_(cox_close_fd) int pidfd = -1;
    pid_t pid = (pid_t)syscall(SYS_clone, (unsigned long)(CLONE_VFORK | CLONE_PIDFD | SIGCHLD),
                               NULL, &pidfd, NULL, NULL);
    if (pid < 0)
        return -errno;
    if (pid == 0)
        for (;;)
            syscall(SYS_exit_group, 0);
    siginfo_t info = {0};
    /* Kernels before 5.2 ignore the flag. */
    int r = pidfd < 0 ? -ENOSYS : 0;
    if (r == 0 && waitid(P_PIDFD, (id_t)pidfd, &info, WEXITED) < 0)
        r = errno == EINVAL ? -ENOSYS : -errno; /* kernels before 5.4 do not know P_PIDFD */
    if (r)
        waitpid(pid, NULL, 0);
    return r;
}

int cox_doctor_pidfd_open(void)
{
    int fd = (int)syscall(SYS_pidfd_open, getppid() > 0 ? getppid() : getpid(), 0);
    if (fd < 0)
        return -errno;
    close(fd);
    return 0;
}

int cox_doctor_close_range(void)
{
    return close_range(~0U, ~0U, 0) < 0 ? -errno : 0; /* there is no such fd */
}

int cox_doctor_futex_waitv(void)
{
#if defined SYS_futex_waitv && defined FUTEX_32
    const uint32_t word = 1;
    struct futex_waitv waiter = {.val = 2, .uaddr = (uintptr_t)&word, .flags = FUTEX_32};
    /* The value is not 2, which the kernel reports if the call is allowed. A filter denies it with
     * another error. */
    long r = syscall(SYS_futex_waitv, &waiter, 1, 0, NULL, 0);
    return r < 0 && errno != EAGAIN ? -errno : 0;
#else
    return -ENOSYS;
#endif
}

static int fetch(pid_t pid, int fd)
{
    _cox_cleanup_(cox_close_fd) int pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (pidfd < 0)
        return -errno;
    int fetched = (int)syscall(SYS_pidfd_getfd, pidfd, fd, 0);
    if (fetched < 0)
        return -errno;
    close(fetched);
    return 0;
}

int cox_doctor_pidfd_getfd(enum cox_doctor_whose whose)
{
    int fds[2], status = 0;
    if (pipe2(fds, O_CLOEXEC) < 0)
        return -errno;
    fflush(NULL);
    pid_t owner = fork();
    if (owner == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(fds[1]);
        char byte;
        _exit(read(fds[0], &byte, 1) == 0 ? 0 : 1); /* until the probes are done */
    }
    int r = owner < 0 ? -errno : 0;
    if (r == 0 && whose == COX_PROBE_CHILD) {
        r = fetch(owner, fds[0]);
    } else if (r == 0) {
        pid_t sibling = fork();
        if (sibling == 0)
            _exit(-fetch(owner, fds[0]));
        r = sibling < 0 || waitpid(sibling, &status, 0) < 0 ? -errno
            : WIFEXITED(status)                             ? -WEXITSTATUS(status)
                                                            : -EINTR;
    }
    close(fds[0]);
    close(fds[1]);
    if (owner > 0)
        waitpid(owner, NULL, 0);
    return r;
}

int cox_doctor_processors(uint32_t *ret_count)
{
    /* The kernel refuses a set that could be too small for the machine: cpu_set_t ends at 1024. */
    for (size_t count = CPU_SETSIZE; count <= CPU_SETSIZE << 10; count *= 2) {
        cpu_set_t *set = CPU_ALLOC(count);
        size_t size = CPU_ALLOC_SIZE(count);
        if (!set)
            return -ENOMEM;
        int r = sched_getaffinity(0, size, set) < 0 ? -errno : 0;
        if (r == 0)
            *ret_count = (uint32_t)CPU_COUNT_S(size, set);
        CPU_FREE(set);
        if (r != -EINVAL)
            return r;
    }
    return -EINVAL;
}

int cox_doctor_memory(uint64_t *ret_bytes)
{
    FILE *file = fopen("/proc/meminfo", "re");
    if (!file)
        return -errno;
    char line[256];
    uint64_t kilobytes;
    int r = -ENODATA;
    while (r && fgets(line, sizeof line, file))
        if (sscanf(line, "MemAvailable: %" SCNu64 " kB", &kilobytes) == 1)
            r = 0;
    fclose(file);
    if (r == 0)
        *ret_bytes = kilobytes << 10;
    return r;
}
