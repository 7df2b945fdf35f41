/* coxswain doctor: what a group needs of this machine, what is missing, and how to change that. */
#include "channel/base/cgroup.h"
#include "channel/base/idioms.h"
#include "channel/shm/control.h"
#include "channel/shm/region.h"
#include "channel/socket/control_socket.h"
#include "program/cli/console.h"
#include "program/cli/foreground.h"
#include "program/cli/group_options.h"
#include "doctor_checks.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

/* The threads of a coordinator and its ranks; multi/commands_doctor counts them. */
#define THREADS_OF_COORDINATOR 11
#define THREADS_OF_WORKER 7
/* A process with its libraries and buffers, without weights and a KV cache. */
#define BYTES_OF_PROCESS (UINT64_C(16) << 20)

enum verdict { GOOD, NOTE, BAD };

struct doctor {
    /* of the group in question */
    uint32_t rank_count;
    /* -n was given: this group must fit; otherwise any group */
    bool asked;
    /* neither progress nor what is ok */
    bool quiet;
    uint32_t bad_count;
};

/* One finding: what it is, what was found, and what to do (NULL: nothing). */
__attribute__((format(printf, 5, 6))) static void finding(struct doctor *doctor,
                                                          enum verdict verdict, const char *what,
                                                          const char *advice, const char *format,
                                                          ...)
{
    static const char *const marks[] = {"ok  ", "note", "BAD "};
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (verdict == GOOD && doctor->quiet)
        return;
    cox_console_make_room();
    printf("%s  %-22s %s\n", marks[verdict], what, text);
    if (advice && verdict != GOOD)
        printf("      %-22s -> %s\n", "", advice);
    doctor->bad_count += verdict == BAD;
}

/* A shortage for the group in question is bad if the user named it, or if no group fits. */
static enum verdict shortage(const struct doctor *doctor, bool group_fits, bool one_rank_fits)
{
    return group_fits ? GOOD : one_rank_fits && !doctor->asked ? NOTE : BAD;
}

/* Reports what works, or fails with -r. The advice depends on the reason: a kernel without the
 * call, or a policy that denies it. */
static void finding_call(struct doctor *doctor, enum verdict otherwise, const char *what, int r,
                         const char *good, const char *missing, const char *denied)
{
    finding(doctor, r ? otherwise : GOOD, what, r == -ENOSYS ? missing : denied, "%s",
            r ? cox_status_text(r) : good);
}

static bool read_line(const char *path, char *buffer, size_t buffer_size)
{
    _cox_cleanup_(cox_close_fd) int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? -1 : read(fd, buffer, buffer_size - 1);
    if (length < 0)
        return false;
    buffer[length] = '\0';
    buffer[strcspn(buffer, "\n")] = '\0';
    return true;
}

static const char *at_most(char *buffer, size_t buffer_size, uint64_t value)
{
    if (value == UINT64_MAX)
        snprintf(buffer, buffer_size, "no limit");
    else
        snprintf(buffer, buffer_size, "at most %" PRIu64, value);
    return buffer;
}

/* ---- shared memory ---- */

static struct cox_geometry geometry_of(uint32_t rank_count)
{
    struct cox_geometry geometry;
    const struct cox_geometry_choice choice = {0};
    cox_geometry_resolve(rank_count, &choice, &geometry, NULL);
    return geometry;
}

static void check_shared_memory(struct doctor *doctor, const struct cox_cgroup *cgroup)
{
    (void)cgroup;
    struct statvfs vfs;
    struct cox_region_space space;
    struct cox_geometry group = geometry_of(doctor->rank_count), one = geometry_of(1);
    int r = cox_region_space(&space);
    if (r || statvfs("/dev/shm", &vfs) < 0) {
        finding(doctor, BAD, "/dev/shm", "mount a tmpfs there", "%s",
                cox_status_text(r ? r : -errno));
        return;
    }
    uint64_t needed = cox_geometry_memory_bytes(&group);
    char text[64] = "no limit";
    if (space.bytes != UINT64_MAX)
        snprintf(text, sizeof text, "%.1f of %.1f MiB free", (double)space.bytes / 1048576,
                 (double)vfs.f_blocks * (double)vfs.f_frsize / 1048576);
    finding(doctor,
            shortage(doctor, space.bytes >= needed, space.bytes >= cox_geometry_memory_bytes(&one)),
            "/dev/shm", "mount -o remount,size=1G /dev/shm; in a container --shm-size=1g",
            "%s; a group of %" PRIu32 " ranks takes %.2f MiB", text, doctor->rank_count,
            (double)needed / 1048576);
    uint64_t names = cox_geometry_account(&group).name_count;
    finding(doctor,
            shortage(doctor, space.files >= names,
                     space.files >= cox_geometry_account(&one).name_count),
            "files there", "mount -o remount,nr_inodes=1M /dev/shm, or remove unneeded files",
            "%s; a group of %" PRIu32 " ranks takes %" PRIu64,
            at_most(text, sizeof text, space.files), doctor->rank_count, names);
    uint64_t size = cox_geometry_account(&group).region_size_max;
    /* The sizes of model and KV cache are unknown here. */
    const bool limited = space.region != UINT64_MAX;
    finding(doctor,
            limited && space.region >= size
                ? NOTE
                : shortage(doctor, space.region >= size,
                           space.region >= cox_geometry_account(&one).region_size_max),
            "size of a file", "ulimit -f unlimited", "%s; the largest region has %" PRIu64 "%s",
            at_most(text, sizeof text, space.region), size,
            limited ? ", a rank's KV cache is a file as well, and so are shared weights" : "");
    finding_call(
        doctor, BAD, "unnamed files there", cox_doctor_unnamed_file(), "O_TMPFILE and linkat work",
        "put a tmpfs on /dev/shm, not another file system",
        "it takes a tmpfs on /dev/shm, /proc mounted, and a seccomp profile that allows linkat");
}

/* ---- processes ---- */

static void check_calls(struct doctor *doctor, const struct cox_cgroup *cgroup)
{
    (void)cgroup;
    finding_call(
        doctor, BAD, "sealed memory", cox_doctor_seals(), "memfd with all seals",
        "Linux 5.1 has it; without it neither sealed groups start nor a model on more than one rank",
        "the seccomp profile has to allow memfd_create, and /proc is needed; without it neither sealed groups start nor a model on more than one rank");
    finding_call(doctor, BAD, "children by pidfd", cox_doctor_child_pidfd(),
                 "CLONE_PIDFD and P_PIDFD work", "Linux 5.4 or later is needed",
                 "the seccomp profile has to allow clone and waitid");
    finding_call(
        doctor, NOTE, "pidfd_open", cox_doctor_pidfd_open(), "deaths are seen at once",
        "Linux 5.3 has it; without it ranks see each other's deaths by /proc, and a worker inside a wrapper (sh -c) cannot start",
        "the seccomp profile has to allow pidfd_open (Docker 20.10 or later does); without it ranks see each other's deaths by /proc, and a worker inside a wrapper (sh -c) cannot start");
    finding_call(doctor, NOTE, "close_range", cox_doctor_close_range(), "there",
                 "Linux 5.9 has it; without it a worker starts more slowly",
                 "a newer seccomp profile allows it; without it a worker starts more slowly");
    finding_call(doctor, NOTE, "futex_waitv", cox_doctor_futex_waitv(), "there",
                 "Linux 5.16 has it; not needed yet",
                 "a newer seccomp profile allows it; not needed yet");
}

/* What the control socket needs, and what sealed groups need. */
static void check_socket(struct doctor *doctor, const struct cox_cgroup *cgroup)
{
    (void)cgroup;
    char path[COX_SOCKET_PATH_SIZE] = "";
    struct cox_error err = {0};
    int r = cox_doctor_runtime_dir(path, &err);
    finding(
        doctor, r ? NOTE : GOOD, "runtime directory",
        "without it a group starts, but coxswain status and stop cannot reach it, nor workers that are started by hand",
        "%s", r ? err.text : path);
    static const char advice[] =
        "the seccomp profile has to allow getsockopt; named attach works without";
    finding_call(doctor, NOTE, "socket peers", cox_doctor_socket_peer(), "SO_PEERCRED works",
                 advice, advice);
    r = cox_doctor_futex_read_only();
    /* Without futexes between processes there are no semaphores either. */
    finding(doctor,
            r == -EFAULT ? NOTE
            : r          ? BAD
                         : GOOD,
            "futex, read-only",
            r == -EFAULT ? "this kernel wants to write what is slept on; named attach works without"
                         : "the seccomp profile has to allow futex",
            "%s", r ? cox_status_text(r) : "memory that cannot be written can be slept on");
}

static void check_handles(struct doctor *doctor, const struct cox_cgroup *cgroup)
{
    (void)cgroup;
    int scope = 0;
    char text[32], advice[160];
    if (read_line("/proc/sys/kernel/yama/ptrace_scope", text, sizeof text)) {
        scope = atoi(text);
        finding(
            doctor, scope == 0 ? GOOD : NOTE, "ptrace scope",
            scope >= 3
                ? "fds are passed over sockets instead; only a restart changes it"
                : "sysctl kernel.yama.ptrace_scope=0 lets workers fetch fds from each other; without, they are passed over sockets",
            "kernel.yama.ptrace_scope = %d", scope);
    } else {
        finding(doctor, GOOD, "ptrace scope", NULL,
                "no Yama: processes of one user may open each other's fds");
    }
    int parent = cox_doctor_pidfd_getfd(COX_PROBE_CHILD);
    int sibling = cox_doctor_pidfd_getfd(COX_PROBE_SIBLING);
    if (parent == -ENOSYS)
        snprintf(advice, sizeof advice, "Linux 5.6 has it; fds are passed over sockets instead");
    else if (scope)
        snprintf(advice, sizeof advice, "ptrace scope %d; fds are passed over sockets instead",
                 scope);
    else
        snprintf(
            advice, sizeof advice,
            "fds are passed over sockets instead; in a container --cap-add SYS_PTRACE or a looser seccomp profile");
    if (parent)
        finding(doctor, NOTE, "pidfd_getfd", advice, "%s", cox_status_text(parent));
    else if (sibling)
        finding(doctor, NOTE, "pidfd_getfd", advice,
                "a parent can fetch fds of its children, workers not of each other: %s",
                cox_status_text(sibling));
    else
        finding(doctor, GOOD, "pidfd_getfd", NULL, "fds can be fetched by value");
}

static uint64_t threads_of_group(uint32_t rank_count)
{
    return THREADS_OF_COORDINATOR + THREADS_OF_WORKER * (uint64_t)rank_count;
}

static void check_limits(struct doctor *doctor, const struct cox_cgroup *cgroup)
{
    (void)cgroup;
    struct rlimit limit;
    char text[32];
    uint64_t fds = cox_foreground_fd_count(doctor->rank_count, false, true);
    uint64_t sealed = cox_foreground_fd_count(doctor->rank_count, true, true);
    getrlimit(RLIMIT_NOFILE, &limit);
    finding(doctor,
            shortage(doctor, limit.rlim_cur >= fds,
                     limit.rlim_cur >= cox_foreground_fd_count(1, false, true)),
            "open files", "ulimit -n 1024",
            "%s; a coordinator of %" PRIu32 " ranks takes %" PRIu64 ", sealed %" PRIu64
            ", with %d for a model's weights",
            at_most(text, sizeof text, limit.rlim_cur), doctor->rank_count, fds, sealed,
            COX_FOREGROUND_FDS_OF_WEIGHTS);
    uint64_t threads = threads_of_group(doctor->rank_count);
    getrlimit(RLIMIT_NPROC, &limit);
    finding(doctor, limit.rlim_cur < threads ? NOTE : GOOD, "processes",
            "ulimit -u 4096; all processes and threads of the user count (but not root's)",
            "%s; a group of %" PRIu32 " ranks has %" PRIu64 " threads",
            at_most(text, sizeof text, limit.rlim_cur), doctor->rank_count, threads);
    getrlimit(RLIMIT_MEMLOCK, &limit);
    finding(doctor, limit.rlim_cur == RLIM_INFINITY ? GOOD : NOTE, "locked memory",
            "a group locks none; ulimit -l unlimited for workers that register memory for RDMA",
            "%s", at_most(text, sizeof text, limit.rlim_cur));
}

/* ---- the machine ---- */

static void check_memory(struct doctor *doctor, const struct cox_cgroup *cgroup)
{
    struct cox_geometry group = geometry_of(doctor->rank_count), one = geometry_of(1);
    uint64_t needed =
        cox_geometry_memory_bytes(&group) + (doctor->rank_count + UINT64_C(1)) * BYTES_OF_PROCESS;
    uint64_t least = cox_geometry_memory_bytes(&one) + 2 * BYTES_OF_PROCESS, available;
    int r = cox_doctor_memory(&available);
    if (r)
        finding(doctor, NOTE, "memory", "mount /proc", "unknown: %s", cox_status_text(r));
    else
        finding(doctor, shortage(doctor, available >= needed, available >= least), "memory",
                "use fewer ranks, or end what else runs here",
                "%" PRIu64 " MiB available; a group of %" PRIu32 " ranks takes %" PRIu64
                " MiB without weights and cache",
                available >> 20, doctor->rank_count, needed >> 20);
    const struct cox_cgroup_limit *limit = &cgroup->memory;
    available = limit->limit > limit->used ? limit->limit - limit->used : 0;
    if (limit->state == COX_CGROUP_LIMITED)
        finding(
            doctor, shortage(doctor, available >= needed, available >= least),
            "cgroup memory limit",
            "raise it (in a container --memory; systemd MemoryMax=), or use fewer ranks; /dev/shm counts, too",
            "%" PRIu64 " MiB, %" PRIu64 " MiB of it free; a group of %" PRIu32
            " ranks takes %" PRIu64 " MiB (%s)",
            limit->limit >> 20, available >> 20, doctor->rank_count, needed >> 20, limit->file);
    else
        finding(doctor, limit->state == COX_CGROUP_NONE ? GOOD : NOTE, "cgroup memory limit",
                "mount /sys/fs/cgroup, so that it can be read",
                limit->state == COX_CGROUP_NONE ? "none" : "unknown");
}

static void check_tasks(struct doctor *doctor, const struct cox_cgroup *cgroup)
{
    const struct cox_cgroup_limit *limit = &cgroup->pids;
    uint64_t needed = threads_of_group(doctor->rank_count);
    uint64_t available = limit->limit > limit->used ? limit->limit - limit->used : 0;
    if (limit->state == COX_CGROUP_LIMITED)
        finding(doctor, shortage(doctor, available >= needed, available >= threads_of_group(1)),
                "cgroup process limit",
                "raise it (in a container --pids-limit; systemd TasksMax=), or use fewer ranks",
                "%" PRIu64 ", %" PRIu64 " of it free; a group of %" PRIu32 " ranks has %" PRIu64
                " threads (%s)",
                limit->limit, available, doctor->rank_count, needed, limit->file);
    else
        finding(doctor, limit->state == COX_CGROUP_NONE ? GOOD : NOTE, "cgroup process limit",
                "mount /sys/fs/cgroup, so that it can be read",
                limit->state == COX_CGROUP_NONE ? "none" : "unknown");
}

static void check_clock(struct doctor *doctor, const struct cox_cgroup *cgroup)
{
    (void)cgroup;
    struct timespec resolution;
    char source[64] = "unknown";
    clock_getres(CLOCK_MONOTONIC, &resolution);
    read_line("/sys/devices/system/clocksource/clocksource0/current_clocksource", source,
              sizeof source);
    uint64_t begin = cox_now_ns();
    for (int i = 0; i < 10000; i++)
        cox_now_ns();
    double ns = (double)(cox_now_ns() - begin) / 10000;
    finding(doctor, ns > 500 ? NOTE : GOOD, "monotonic clock",
            "a slow clock source costs every step; tsc or kvm-clock is fast",
            "source %s, %.0f ns a reading, resolution %ld ns", source, ns, resolution.tv_nsec);
}

static void check_processors(struct doctor *doctor, const struct cox_cgroup *cgroup)
{
    const struct cox_cgroup_limit *quota = &cgroup->cpu;
    uint32_t allowed = 0;
    int r = cox_doctor_processors(&allowed);
    if (r)
        finding(doctor, NOTE, "processors", "the seccomp profile should allow sched_getaffinity",
                "unknown: %s", cox_status_text(r));
    else
        finding(
            doctor, doctor->asked && allowed < doctor->rank_count ? NOTE : GOOD, "processors",
            "ranks that compute on processors share them: use fewer ranks, or allow more (taskset, cpuset)",
            "%" PRIu32 " of %ld may be used", allowed, sysconf(_SC_NPROCESSORS_ONLN));
    if (quota->state == COX_CGROUP_LIMITED)
        finding(
            doctor, quota->limit < allowed * UINT64_C(1000000) ? NOTE : GOOD, "cgroup CPU quota",
            "more ranks than this are throttled together: raise it (in a container --cpus; systemd CPUQuota=), or use fewer ranks",
            "%.2f processors (%s)", (double)quota->limit / 1e6, quota->file);
    else
        finding(doctor, quota->state == COX_CGROUP_NONE ? GOOD : NOTE, "cgroup CPU quota",
                "mount /sys/fs/cgroup, so that it can be read",
                quota->state == COX_CGROUP_NONE ? "none" : "unknown");
}

static void init(void *choice)
{
    struct doctor *doctor = choice;
    doctor->rank_count = 8;
}

static void (*const checks[])(struct doctor *doctor, const struct cox_cgroup *cgroup) = {
    check_shared_memory, check_calls,  check_socket, check_handles,    check_limits,
    check_tasks,         check_memory, check_clock,  check_processors,
};

static int run(void *choice)
{
    struct doctor *doctor = choice;
    struct cox_cgroup cgroup;
    cox_cgroup_read("", &cgroup);
    const size_t check_count = sizeof checks / sizeof checks[0];
    for (size_t i = 0; i < check_count; i++) {
        if (!doctor->quiet)
            cox_console_progress(
                &(struct cox_progress){.what = "checks", .done = i, .total = check_count});
        checks[i](doctor, &cgroup);
    }
    cox_console_progress_end();
    return doctor->bad_count ? COX_EXIT_FAILED : COX_EXIT_OK;
}

static const struct cox_option options[] = {
    {"quiet", NULL, "print only what is not ok, and no progress", COX_FLAG(struct doctor, quiet)},
    {"ranks", "N",
     "a group of N ranks has to start (default: 8 is measured, but what lets at least one rank "
     "start is only a note)",
     .letter = 'n', COX_COUNT(struct doctor, rank_count, 1, COX_RANK_COUNT_MAX),
     COX_GIVEN(struct doctor, asked)},
    {0},
};
static const struct cox_option_group doctor_options = {.options = options};

const struct cox_command cox_command_doctor = {
    .name = "doctor",
    .summary = "check what this machine lets a group do",
    .text = "Checks what this machine lets a group do: shared memory, sockets, process handles, "
            "limits, memory, clock and processors, and says what to change. BAD keeps a group from "
            "starting or working; note is worth knowing. The exit status is 1 when something is "
            "BAD.",
    .examples = "  coxswain doctor -n 8\n"
                "  coxswain doctor --quiet\n",
    .choice_size = sizeof(struct doctor),
    .init = init,
    .groups = {{&doctor_options, 0}},
    .run = run,
};
