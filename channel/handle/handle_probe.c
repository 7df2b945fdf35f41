/* Which ways of opening a handle work here, why one does not, and the ptrace policy. */
#include "channel/base/base_internal.h"
#include "channel/base/idioms.h"
#include "fd_store.h"
#include "handle_internal.h"

#include <fcntl.h>
#include <inttypes.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define YAMA_PATH "/proc/sys/kernel/yama/ptrace_scope"

/* ---- from /proc ---- */

int cox_handle_yama(void)
{
    char text[32];
    return cox_small_file_read(YAMA_PATH, text, sizeof text) >= 0 ? atoi(text) : -1;
}

/* Reads a number from /proc/PID/status: of `name`, in its `column`-th column from 0. */
static bool status_number(const char *status, const char *name, int column, unsigned *ret_number)
{
    const char *line = strstr(status, name);
    if (!line)
        return false;
    char *end;
    line += strlen(name);
    for (int i = 0; i <= column; i++, line = end) {
        *ret_number = (unsigned)strtoul(line, &end, 10);
        if (end == line)
            return false;
    }
    return true;
}

/* For a process that lives but is not visible in /proc. NULL: another reason. */
static const char *hidden_reason(pid_t exporter, const char *path)
{
    struct stat st;
    if (stat(path, &st) == 0)
        return NULL;
    if (kill(exporter, 0) == 0)
        return "it is not dumpable";
    return errno == EPERM ? "it belongs to another user" : NULL;
}

/* Checks the kernel's conditions in its order; returns the first that explains the denial. */
static const char *denied_reason(pid_t exporter, char *buffer, size_t buffer_size)
{
    char path[64], status[2048];
    unsigned uid, filter;
    struct stat st;
    snprintf(path, sizeof path, "/proc/%jd/status", (intmax_t)exporter);
    bool known = cox_small_file_read(path, status, sizeof status) >= 0 &&
                 status_number(status, "\nUid:", 1, &uid);
    const char *hidden = known ? NULL : hidden_reason(exporter, path);
    if (hidden)
        snprintf(buffer, buffer_size, "%s, and /proc is mounted with hidepid", hidden);
    else if (known && uid != geteuid())
        snprintf(buffer, buffer_size, "it belongs to user %u, this process to user %u", uid,
                 (unsigned)geteuid());
    else if (known && stat(path, &st) == 0 && st.st_uid != uid)
        /* Then its files in /proc belong to root, except the folder. */
        snprintf(buffer, buffer_size,
                 "it is not dumpable (prctl PR_SET_DUMPABLE, or its program may not be read)");
    else if (cox_handle_yama() > 0)
        snprintf(buffer, buffer_size, "kernel.yama.ptrace_scope is %d", cox_handle_yama());
    else if (cox_small_file_read("/proc/self/status", status, sizeof status) >= 0 &&
             status_number(status, "\nSeccomp:", 0, &filter) && filter)
        snprintf(buffer, buffer_size, "a seccomp filter is on this process");
    else
        snprintf(buffer, buffer_size,
                 "a seccomp filter, a security module, or another user namespace");
    return buffer;
}

void cox_handle_explain_denied(pid_t exporter, char *text, size_t text_size)
{
    char reason[128];
    denied_reason(exporter, reason, sizeof reason);
    int yama = cox_handle_yama();
    char scope[48] = "no Yama here";
    if (yama >= 0)
        snprintf(scope, sizeof scope, "kernel.yama.ptrace_scope is %d", yama);
    snprintf(
        text, text_size,
        "; the likely reason: %s (%s). Run both as one user, name a control socket to both sides, set the exporter's ptrace policy (Yama 1), make it dumpable, or allow pidfd_getfd in the seccomp profile",
        reason, scope);
}

/* ---- trying ---- */

struct probe {
    int fds[2];
};

/* A child of a bare clone: it must not call the C library. */
static _Noreturn void probe_child(const struct probe *probe)
{
    char byte;
    syscall(SYS_close, probe->fds[1]);
    syscall(SYS_read, probe->fds[0], &byte,
            sizeof byte); /* until it is killed, or its parent is gone */
    for (;;)
        syscall(SYS_exit_group, 0);
}

static int probe_getfd(pid_t pid, int fd)
{
    struct cox_peer peer = COX_PEER_NONE;
    int r = cox_peer_open(pid, 0, &peer);
    if (r)
        return r > 0 ? -ESRCH : r;
    _cox_cleanup_(cox_close_fd) int taken = (int)syscall(SYS_pidfd_getfd, peer.pidfd, fd, 0);
    r = taken < 0 ? -errno : 0;
    cox_peer_close(&peer);
    return r;
}

/* Tries it on a child without an exit signal, which the host neither notices nor reaps by accident.
 * ret_error: the result. Returns 0, or -errno: it could not be tried. */
static int probe_child_getfd(int *ret_error)
{
    struct probe probe;
    if (pipe2(probe.fds, O_CLOEXEC) < 0)
        return -errno;
    pid_t pid = (pid_t)syscall(SYS_clone, 0UL, NULL, NULL, NULL, NULL);
    if (pid == 0)
        probe_child(&probe);
    int r = pid < 0 ? -errno : 0;
    if (r == 0) {
        *ret_error = probe_getfd(pid, probe.fds[0]);
        kill(pid, SIGKILL); /* not reaped yet, so the pid is still its own */
    }
    close(probe.fds[0]);
    close(probe.fds[1]);
    siginfo_t info;
    while (r == 0 && waitid(P_PID, (id_t)pid, &info, WEXITED | __WALL) < 0 && errno == EINTR)
        continue;
    return r;
}

int cox_handle_query(const char *socket_path, uint64_t deadline_ns,
                     struct cox_handle_probe *ret_ways)
{
    struct cox_handle_probe ways = {.yama = cox_handle_yama()};
    int r = probe_child_getfd(&ways.pidfd_error);
    if (r)
        return r;
    ways.pidfd_getfd = ways.pidfd_error == 0;
    if (socket_path) {
        struct cox_fd_store fd_store = {.fd = -1};
        ways.socket_error = cox_fd_store_connect(&fd_store, socket_path, deadline_ns, NULL);
        ways.control_socket = ways.socket_error == 0;
        cox_fd_store_close(&fd_store);
    }
    ways.dumpable = prctl(PR_GET_DUMPABLE, 0UL, 0UL, 0UL, 0UL) == 1; /* 2: root only */
    *ret_ways = ways;
    return 0;
}

/* ---- ptrace policy ---- */

int cox_ptrace_policy_set(enum cox_ptrace_policy policy, int32_t pid)
{
    if (policy == COX_PTRACE_NONE)
        return 0;
    /* As an argument 0 withdraws the permission, and -1 gives it to every process: never by
     * accident. */
    if ((policy != COX_PTRACE_PROCESS && policy != COX_PTRACE_ANY) ||
        (policy == COX_PTRACE_PROCESS && pid <= 0))
        return COX_INVALID;
    unsigned long tracer = policy == COX_PTRACE_ANY ? PR_SET_PTRACER_ANY : (unsigned long)pid;
    if (prctl(PR_SET_PTRACER, tracer, 0UL, 0UL, 0UL) == 0)
        return 0;
    /* The kernel returns EINVAL for unknown options and, with Yama, for a process that does not
     * exist. */
    return errno != EINVAL ? -errno : cox_handle_yama() < 0 ? COX_UNSUPPORTED : -EINVAL;
}
