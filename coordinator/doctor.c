/* coxswain doctor: what this machine lets a group do, and what to change where it does not. */
#include "command.h"

#include "../channel/geometry.h"
#include "../channel/peer.h"
#include "../channel/region.h"

#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum verdict { GOOD, NOTE, BAD };

/* One finding: what it is, what was found, and what to do (NULL: nothing). */
static void finding(enum verdict verdict, const char *what, const char *advice, const char *format,
                    ...) __attribute__((format(printf, 4, 5)));
static uint32_t bad_count;

static void finding(enum verdict verdict, const char *what, const char *advice, const char *format,
                    ...)
{
    static const char *const marks[] = {"ok  ", "note", "BAD "};
    char text[256];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    printf("%s  %-22s %s\n", marks[verdict], what, text);
    if (advice && verdict != GOOD)
        printf("      %-22s -> %s\n", "", advice);
    bad_count += verdict == BAD;
}

static bool read_file(const char *path, char *buffer, size_t buffer_size)
{
    _cox_cleanup_(cox_close_fd) int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? -1 : read(fd, buffer, buffer_size - 1);
    if (length < 0)
        return false;
    buffer[length] = '\0';
    buffer[strcspn(buffer, "\n")] = '\0';
    return true;
}

/* ---- shared memory ---- */

static void check_shared_memory(void)
{
    struct statvfs vfs;
    struct cox_geometry geometry;
    const struct cox_geometry_choice choice = {0};
    cox_geometry_resolve(8, &choice, &geometry, NULL);
    uint64_t needed = cox_geometry_memory_bytes(&geometry);
    if (statvfs("/dev/shm", &vfs) < 0) {
        finding(BAD, "/dev/shm", "mount a tmpfs there", "%s", cox_status_text(-errno));
        return;
    }
    uint64_t available = (uint64_t)vfs.f_bavail * vfs.f_frsize;
    finding(available < needed ? BAD : GOOD, "/dev/shm",
            "mount -o remount,size=1G /dev/shm; in a container --shm-size=1g",
            "%" PRIu64 " MiB of %" PRIu64 " MiB free; a group of 8 ranks takes %.1f MiB",
            available >> 20, ((uint64_t)vfs.f_blocks * vfs.f_frsize) >> 20,
            (double)needed / 1048576);
    _cox_cleanup_(cox_close_fd) int fd = open("/dev/shm", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    finding(fd < 0 ? BAD : GOOD, "unnamed files there",
            "put a tmpfs on /dev/shm, not another file system", "%s",
            fd < 0 ? cox_status_text(-errno) : "O_TMPFILE works");
}

static void check_seals(void)
{
    _cox_cleanup_(cox_close_fd) int fd =
        memfd_create("coxswain-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    bool sealed = fd >= 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0 &&
                  fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE) == 0;
    finding(sealed ? GOOD : NOTE, "sealed memory", "Linux 5.1 has it; named attach works without",
            "%s", sealed ? "memfd with all seals" : cox_status_text(-errno));
}

/* ---- processes ---- */

static void check_pidfd(void)
{
    struct cox_peer self = COX_PEER_NONE;
    int r = cox_peer_open(getpid(), 0, &self);
    finding(r ? BAD : GOOD, "pidfd_open", "Linux 5.3 has it; a seccomp filter may deny it", "%s",
            r ? cox_status_text(r) : "deaths are seen at once");
    if (r)
        return;
    int fd = (int)syscall(SYS_pidfd_getfd, self.pidfd, STDIN_FILENO, 0);
    int e = errno;
    finding(fd < 0 && e != EBADF ? NOTE : GOOD, "pidfd_getfd",
            "fds cannot be fetched by value; in a container --cap-add SYS_PTRACE or a looser "
            "seccomp profile",
            "%s", fd < 0 && e != EBADF ? cox_status_text(-e) : "fds can be fetched by value");
    cox_close_fd(&fd);
    cox_peer_close(&self);
}

static void check_ptrace_scope(void)
{
    char text[32];
    if (!read_file("/proc/sys/kernel/yama/ptrace_scope", text, sizeof text)) {
        finding(GOOD, "ptrace scope", NULL,
                "no Yama: processes of one user may open each other's fds");
        return;
    }
    int scope = atoi(text);
    finding(
        scope == 0 ? GOOD : NOTE, "ptrace scope",
        scope >= 3
            ? "fds are passed over sockets instead"
            : "fetching fds by value works towards children only, or with consent (PR_SET_PTRACER)",
        "kernel.yama.ptrace_scope = %d", scope);
}

static void check_futex_waitv(void)
{
#ifdef SYS_futex_waitv
    long r = syscall(SYS_futex_waitv, NULL, 0, 0, NULL, 0);
    bool there = r < 0 && errno != ENOSYS;
#else
    bool there = false;
#endif
    finding(there ? GOOD : NOTE, "futex_waitv", "Linux 5.16 has it; not needed yet", "%s",
            there ? "there" : "not there");
}

static void check_limits(void)
{
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    finding(limit.rlim_cur < 1024 ? BAD : GOOD, "open files", "ulimit -n 1024 or more",
            "at most %ju", (uintmax_t)limit.rlim_cur);
    getrlimit(RLIMIT_NPROC, &limit);
    finding(limit.rlim_cur < 512 ? NOTE : GOOD, "processes",
            "each worker has 5 threads: ulimit -u 4096",
            limit.rlim_cur == RLIM_INFINITY ? "no limit" : "at most %ju",
            (uintmax_t)limit.rlim_cur);
    getrlimit(RLIMIT_MEMLOCK, &limit);
    finding(GOOD, "locked memory", NULL,
            limit.rlim_cur == RLIM_INFINITY ? "no limit" : "at most %ju bytes",
            (uintmax_t)limit.rlim_cur);
}

/* ---- the machine ---- */

static void check_memory(void)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t total = page * (uint64_t)sysconf(_SC_PHYS_PAGES);
    uint64_t available = page * (uint64_t)sysconf(_SC_AVPHYS_PAGES);
    finding(GOOD, "memory", NULL, "%" PRIu64 " MiB, %" PRIu64 " MiB free", total >> 20,
            available >> 20);
}

static void check_clock(void)
{
    struct timespec resolution;
    char source[64] = "unknown";
    clock_getres(CLOCK_MONOTONIC, &resolution);
    read_file("/sys/devices/system/clocksource/clocksource0/current_clocksource", source,
              sizeof source);
    uint64_t begin = cox_now_ns();
    for (int i = 0; i < 10000; i++)
        cox_now_ns();
    double ns = (double)(cox_now_ns() - begin) / 10000;
    finding(ns > 500 ? NOTE : GOOD, "monotonic clock",
            "a slow clock source costs every step; tsc or kvm-clock is fast",
            "source %s, %.0f ns a look, resolution %ld ns", source, ns, resolution.tv_nsec);
}

static void check_cpus(void)
{
    cpu_set_t set;
    int allowed = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : -1;
    finding(GOOD, "processors", NULL, "%d of %ld may be used", allowed,
            sysconf(_SC_NPROCESSORS_ONLN));
    char text[64];
    long long quota, period;
    if (!read_file("/sys/fs/cgroup/cpu.max", text, sizeof text) ||
        sscanf(text, "%lld %lld", &quota, &period) != 2 || period <= 0) {
        finding(GOOD, "cgroup CPU quota", NULL, "none");
        return;
    }
    double cpus = (double)quota / (double)period;
    finding(cpus < allowed ? NOTE : GOOD, "cgroup CPU quota",
            "more ranks than this are throttled together: raise it, or use fewer ranks",
            "%.2f processors", cpus);
}

static void help(FILE *file)
{
    fprintf(
        file,
        "Usage: coxswain doctor\n"
        "\n"
        "Looks at what this machine lets a group do: shared memory, process handles, limits,\n"
        "memory, clock and processors, and says what to change. BAD keeps a group from starting\n"
        "or working; note is worth knowing. Exit status 1 when something is BAD.\n"
        "\n"
        "  -h, --help  this text\n");
    cox_exit_help(file);
}

int cox_command_doctor(int argc, char **argv)
{
    static const struct option options[] = {{"help", no_argument, NULL, 'h'}, {NULL, 0, NULL, 0}};
    int option = getopt_long(argc, argv, "+h", options, NULL);
    if (option == 'h') {
        help(stdout);
        return cox_exit_flushed(COX_EXIT_OK);
    }
    if (option != -1 || optind < argc) {
        struct cox_error err = {0};
        cox_fail(&err, COX_INVALID, "'%.64s' is no argument of this command",
                 argv[option != -1 ? optind - 1 : optind]);
        return cox_exit_usage("doctor", &err);
    }
    check_shared_memory();
    check_seals();
    check_pidfd();
    check_ptrace_scope();
    check_futex_waitv();
    check_limits();
    check_memory();
    check_clock();
    check_cpus();
    return cox_exit_flushed(bad_count ? COX_EXIT_FAILED : COX_EXIT_OK);
}
