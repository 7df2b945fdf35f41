#include "launch.h"

#include "channel/base/base_internal.h"
#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/base/tsan.h"
#include "fork_server.h"
#include "supervise.h"

#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* Linux 6.9 */
#ifndef PIDFD_SIGNAL_PROCESS_GROUP
#define PIDFD_SIGNAL_PROCESS_GROUP (1U << 2)
#endif

/* The first fd that a new process inherits besides its standard ones; 3 is the report until exec.
 */
#define FD_FIRST 4

/* Of the new process, until exec: for its function and system calls. */
#define CHILD_STACK_SIZE (64 * 1024)

struct pipe {
    int read_fd;
    int write_fd;
};

static void strings_deinit(struct cox_strings *strings)
{
    for (size_t i = 0; i < strings->count; i++)
        free(strings->items[i]);
    free(strings->items);
    *strings = (struct cox_strings){0};
}

__attribute__((format(printf, 2, 3))) static void strings_add(struct cox_strings *strings,
                                                              const char *format, ...)
{
    char **items = realloc(strings->items, (strings->count + 2) * sizeof *items);
    if (items) {
        strings->items = items;
        va_list args;
        va_start(args, format);
        if (vasprintf(&items[strings->count], format, args) >= 0)
            strings->count++;
        else
            strings->failed = true;
        va_end(args);
        items[strings->count] = NULL;
    } else {
        strings->failed = true;
    }
}

static void pipe_deinit(struct pipe *pipe)
{
    cox_close_fd(&pipe->read_fd);
    cox_close_fd(&pipe->write_fd);
}

/* Only the read end is non-blocking: the write end becomes the standard output of a process. */
static int pipe_init(struct pipe *pipe)
{
    int fds[2];
    if (pipe2(fds, O_CLOEXEC) < 0)
        return -errno;
    *pipe = (struct pipe){.read_fd = fds[0], .write_fd = fds[1]};
    int r = cox_fd_raise(&pipe->read_fd);
    if (!r)
        r = cox_fd_raise(&pipe->write_fd);
    return r || fcntl(pipe->read_fd, F_SETFL, O_NONBLOCK) == 0 ? r : -errno;
}

/* A relative path starts in the workers' directory. */
static const char *path_start(const struct cox_launch_plan *plan, const char *path)
{
    return plan->working_directory && path[0] != '/' ? plan->working_directory : "";
}

/* Finds a command as a shell does in the workers' environment, which skips folders that cannot be
 * searched. NULL with errno: ENOENT, nowhere in PATH; ENOMEM. A file that cannot be executed is
 * returned only if there is no better one, so that exec reports what is wrong with it. */
static char *program_find(const struct cox_launch_plan *plan)
{
    const char *command = plan->command.items[0];
    char *candidate;
    const char *start = path_start(plan, command);
    if (strchr(command, '/'))
        return asprintf(&candidate, "%s%s%s", start, start[0] ? "/" : "", command) < 0 ? NULL
                                                                                       : candidate;
    const char *path = "/usr/local/bin:/bin:/usr/bin";
    for (size_t i = 0; i < plan->environment.count; i++)
        if (strncmp(plan->environment.items[i], "PATH=", strlen("PATH=")) == 0)
            path = plan->environment.items[i] + strlen("PATH=");
    _cox_cleanup_(cox_free_ptr) char *second_best = NULL;
    while (path) {
        size_t length = strcspn(path, ":");
        start = path_start(plan, path);
        /* An empty entry means the working directory. */
        if (asprintf(&candidate, "%s%s%.*s/%s", start, start[0] ? "/" : "",
                     length ? (int)length : 1, length ? path : ".", command) < 0)
            return NULL;
        struct stat st;
        errno = 0;
        bool there = command[0] != '\0' && stat(candidate, &st) == 0 && S_ISREG(st.st_mode);
        if (errno == ENOMEM) { /* no error of the folder */
            cox_free_ptr(&candidate);
            return NULL;
        }
        if (there && faccessat(AT_FDCWD, candidate, X_OK, AT_EACCESS) == 0)
            return candidate;
        if (there && !second_best)
            second_best = candidate;
        else
            free(candidate);
        path = path[length] ? path + length + 1 : NULL;
    }
    errno = ENOENT;
    return cox_steal_ptr(&second_best);
}

/* program NULL: it was not found in PATH. */
static int exec_failed(const char *command, const char *program, uint32_t rank, int error,
                       struct cox_error *err)
{
    struct stat st;
    bool there = program && stat(program, &st) == 0;
    const char *advice = "run it in a shell to see more";
    if (!program)
        advice = "it is in no directory of PATH: install it there or give its full path";
    else if (there && S_ISDIR(st.st_mode))
        advice = "it is a directory: name the program inside it";
    else if (error == ENOENT && there)
        advice =
            "the file is there, but its interpreter (first line) or its loader is not: install that";
    else if (error == ENOENT || error == ENOTDIR)
        advice = "check the path of the worker's program";
    else if (error == EACCES)
        advice = "make it executable (chmod +x), on a file system that is not mounted noexec";
    else if (error == ENOEXEC)
        advice = "it is no program for this machine; a script needs a first line such as #!/bin/sh";
    else if (error == E2BIG)
        advice = "its arguments and the environment are too large together: shorten them";
    return cox_fail(err, COX_EXEC_FAILED, "rank %u: cannot execute '%.400s': %s: %s", rank,
                    program ? program : command, cox_status_text(-error), advice);
}

static bool is_ours(const char *variable)
{
    static const char *const names[] = {"COXSWAIN_PREFIX=",
                                        "COXSWAIN_RANK=",
                                        "COXSWAIN_WORLD_SIZE=",
                                        "COXSWAIN_DEVICE=",
                                        "COXSWAIN_PARENT_PID=",
                                        "COXSWAIN_INCARNATION=",
                                        "COXSWAIN_FDS=",
                                        "COXSWAIN_SOCKET=",
                                        "COXSWAIN_NOTIFY_FD=",
                                        "COXSWAIN_LOCAL_RANK=",
                                        "COXSWAIN_LOCAL_WORLD_SIZE="};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strncmp(variable, names[i], strlen(names[i])) == 0)
            return true;
    return false;
}

/* Whether one of the changes is about this variable. */
static bool is_changed(const char *variable, const char *const *changes)
{
    const size_t length = strcspn(variable, "=");
    for (; changes && *changes; changes++)
        if (strcspn(*changes, "=") == length && strncmp(variable, *changes, length) == 0)
            return true;
    return false;
}

static int environment_init(struct cox_strings *environment, const char *const *changes,
                            struct cox_error *err)
{
    for (char **variable = environ; variable && *variable; variable++)
        if (!is_ours(*variable) && !is_changed(*variable, changes))
            strings_add(environment, "%s", *variable);
    for (; changes && *changes; changes++) {
        const char *change = *changes, *value = strchr(change, '=');
        const int length = (int)strcspn(change, "=");
        if (length == 0)
            return cox_fail(err, COX_INVALID,
                            "environment has '%.200s', which names no variable: expected "
                            "NAME=value, or NAME to remove it",
                            change);
        char name[64];
        snprintf(name, sizeof name, "%.*s=", length, change);
        if (is_ours(name))
            return cox_fail(err, COX_INVALID,
                            "environment has %.*s, which the group sets itself for every rank: "
                            "leave it out",
                            length, change);
        if (is_changed(change, changes + 1))
            return cox_fail(err, COX_INVALID, "environment has %.*s twice: leave one out", length,
                            change);
        if (value)
            strings_add(environment, "%s", change);
    }
    return 0;
}

/* Checked now, not by the first worker in its own way. */
static int working_directory_init(char **ret_directory, const char *path, struct cox_error *err)
{
    struct stat st;
    if (stat(path, &st) < 0)
        return cox_fail(err, errno == ENOMEM ? -ENOMEM : COX_NOT_FOUND,
                        "the ranks cannot have '%.400s' as their working directory: %s", path,
                        cox_status_text(-errno));
    if (!S_ISDIR(st.st_mode) || faccessat(AT_FDCWD, path, X_OK, AT_EACCESS) < 0)
        return cox_fail(err, COX_NOT_FOUND,
                        "the ranks cannot have '%.400s' as their working directory: %s", path,
                        S_ISDIR(st.st_mode) ? cox_status_text(-errno) : "it is no directory");
    *ret_directory = realpath(path, NULL);
    return *ret_directory
               ? 0
               : cox_fail(err, -errno, "the path of '%.400s': %s", path, cox_status_text(-errno));
}

void cox_launch_plan_deinit(struct cox_launch_plan *plan)
{
    strings_deinit(&plan->command);
    strings_deinit(&plan->environment);
    cox_free_ptr(&plan->prefix);
    cox_free_ptr(&plan->program);
    cox_free_ptr(&plan->working_directory);
    cox_free_ptr(&plan->control_socket);
    plan->prefix = plan->program = plan->working_directory = plan->control_socket = NULL;
}

int cox_launch_plan_init(struct cox_launch_plan *plan, const struct cox_supervise_options *options,
                         struct cox_error *err)
{
    if (options->rank_count == 0 || options->rank_count > COX_RANK_COUNT_MAX)
        return cox_fail(err, COX_INVALID, "%u ranks: must be 1 to %d", options->rank_count,
                        COX_RANK_COUNT_MAX);
    if (options->external) {
        *plan =
            (struct cox_launch_plan){.coordinator = getpid(), .rank_count = options->rank_count};
        return 0;
    }
    if (!options->command || !options->command[0] || !options->prefix)
        return cox_fail(err, COX_INVALID,
                        "the workers' command and the group's prefix must be given");
    _cox_cleanup_(cox_launch_plan_deinit) struct cox_launch_plan made = {
        .coordinator = getpid(),
        .rank_count = options->rank_count,
        .pass_flags = options->pass_flags,
        .mark = options->mark,
        .prefix = strdup(options->prefix),
        .control_socket = options->control_socket ? strdup(options->control_socket) : NULL,
        .notify_fds = options->notify_fds,
        .fork_server_fds = options->fork_server_fds,
        .log = options->log,
        .local_first = options->local_first,
        .local_count = options->local_count ? options->local_count : options->rank_count,
    };
    for (const char *const *argument = options->command; *argument; argument++)
        strings_add(&made.command, "%s", *argument);
    int r = environment_init(&made.environment, options->environment, err);
    if (r == 0 && options->working_directory)
        r = working_directory_init(&made.working_directory, options->working_directory, err);
    if (r)
        return r;
    for (uint32_t i = 0; i < made.local_count; i++)
        made.devices[made.local_first + i] = options->devices ? options->devices[i] : (int32_t)i;
    if (!made.prefix || (options->control_socket && !made.control_socket) || made.command.failed ||
        made.environment.failed)
        return cox_fail(err, -ENOMEM, "preparing the workers' command: %s",
                        cox_status_text(-ENOMEM));
    made.program = program_find(&made);
    if (!made.program && errno != ENOENT)
        return cox_fail(err, -ENOMEM, "looking for '%.400s': %s", made.command.items[0],
                        cox_status_text(-ENOMEM));
    if (!made.program)
        return exec_failed(made.command.items[0], NULL, 0, ENOENT, err);
    *plan = made;
    made = (struct cox_launch_plan){0};
    return 0;
}

/* Everything that a new process needs, made before the fork. */
struct launch {
    const struct cox_launch_plan *plan;
    uint32_t rank;
    struct cox_strings argv;
    struct cox_strings envp;
    struct pipe streams[2];
    /* close-on-exec: nothing arrives when the program was executed */
    struct pipe report;
    /* copies with numbers above those they get in the child */
    int fds[COX_FORK_SERVER_FD_COUNT_MAX];
    uint32_t fd_count;
};

#define LAUNCH_EMPTY                                                                               \
    {                                                                                              \
        .streams = {{-1, -1}, {-1, -1}}, .report = { -1, -1 }                                      \
    }

/* The reason why a new process could not become a worker. */
struct launch_report {
    int error;
    enum { AT_SETUP, AT_DIRECTORY, AT_EXEC } stage;
};

static void launch_deinit(struct launch *launch)
{
    strings_deinit(&launch->argv);
    strings_deinit(&launch->envp);
    pipe_deinit(&launch->streams[0]);
    pipe_deinit(&launch->streams[1]);
    pipe_deinit(&launch->report);
    for (uint32_t i = 0; i < launch->fd_count; i++)
        cox_close_fd(&launch->fds[i]);
}

static int launch_copy_fd(struct launch *launch, int fd)
{
    COX_ASSERT(launch->fd_count < COX_FORK_SERVER_FD_COUNT_MAX);
    int copy = fcntl(fd, F_DUPFD_CLOEXEC, FD_FIRST + COX_FORK_SERVER_FD_COUNT_MAX);
    if (copy < 0)
        return -errno;
    launch->fds[launch->fd_count++] = copy;
    return 0;
}

/* Copies the fds of the group's memory, and then the eventfd of the rank. */
static int launch_copy_fds(struct launch *launch, const struct cox_launch_incarnation *incarnation)
{
    int r = 0;
    for (uint32_t i = 0; r == 0 && i < incarnation->fd_count; i++)
        r = launch_copy_fd(launch, incarnation->fds[i]);
    const int *notify_fds = launch->plan->notify_fds;
    return r == 0 && notify_fds ? launch_copy_fd(launch, notify_fds[launch->rank]) : r;
}

static int launch_init(struct launch *launch, const struct cox_launch_plan *plan, uint32_t rank,
                       const struct cox_launch_incarnation *incarnation)
{
    launch->plan = plan;
    launch->rank = rank;
    int32_t device = plan->devices[rank];
    struct cox_strings *argv = &launch->argv;
    for (size_t i = 0; i < plan->command.count; i++)
        strings_add(argv, "%s", plan->command.items[i]);
    if (plan->pass_flags) {
        const char *const names[] = {"--local_rank", "--local_world_size", "--npu_num_per_dp",
                                     "--npu_device_id", "--parent_pid"};
        const intmax_t values[] = {rank, plan->rank_count, plan->rank_count, device,
                                   plan->coordinator};
        for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
            strings_add(argv, "%s", names[i]);
            strings_add(argv, "%jd", values[i]);
        }
        strings_add(argv, "--shm_name_prefix");
        strings_add(argv, "%s", plan->prefix);
    }
    struct cox_strings *envp = &launch->envp;
    for (size_t i = 0; i < plan->environment.count; i++)
        strings_add(envp, "%s", plan->environment.items[i]);
    strings_add(envp, "COXSWAIN_PREFIX=%s", plan->prefix);
    strings_add(envp, "COXSWAIN_RANK=%u", rank);
    strings_add(envp, "COXSWAIN_WORLD_SIZE=%u", plan->rank_count);
    strings_add(envp, "COXSWAIN_LOCAL_RANK=%u", rank - plan->local_first);
    strings_add(envp, "COXSWAIN_LOCAL_WORLD_SIZE=%u", plan->local_count);
    strings_add(envp, "COXSWAIN_DEVICE=%d", device);
    strings_add(envp, "COXSWAIN_PARENT_PID=%d", plan->coordinator);
    strings_add(envp, "COXSWAIN_INCARNATION=%u", incarnation->number);
    if (incarnation->fd_count)
        strings_add(envp, "COXSWAIN_FDS=%d:%u", FD_FIRST, incarnation->fd_count);
    if (plan->notify_fds)
        strings_add(envp, "COXSWAIN_NOTIFY_FD=%u", FD_FIRST + incarnation->fd_count);
    if (plan->control_socket)
        strings_add(envp, "COXSWAIN_SOCKET=%s", plan->control_socket);
    if (argv->failed || envp->failed)
        return -ENOMEM;
    int r = pipe_init(&launch->streams[0]);
    if (!r)
        r = pipe_init(&launch->streams[1]);
    if (!r)
        r = launch_copy_fds(launch, incarnation);
    return r ? r : pipe_init(&launch->report);
}

COX_LAUNCH_CHILD static _Noreturn void child_exit(void)
{
    for (;;)
        syscall(SYS_exit_group, 127);
}

/* Returns fd, or a copy of it, outside the numbers that are about to be replaced. */
COX_LAUNCH_CHILD static int child_fd_above_report(int fd)
{
    return fd > 3 ? fd : (int)syscall(SYS_fcntl, fd, F_DUPFD_CLOEXEC, 4);
}

/* The kernel's directory entry; no header has it. */
struct child_dirent {
    uint64_t ino;
    int64_t offset;
    unsigned short size;
    unsigned char type;
    char name[];
};

/* Closes all fds from `first` on. Before Linux 5.9, or if a filter denies close_range, one by one:
 * /proc lists them by number, so that closing some does not hide others. */
COX_LAUNCH_CHILD static int child_close_from(int first)
{
    if (syscall(SYS_close_range, first, ~0U, 0) == 0)
        return 0;
    int folder = (int)syscall(SYS_openat, AT_FDCWD, "/proc/self/fd", O_RDONLY | O_DIRECTORY);
    if (folder < 0)
        return -errno;
    _Alignas(struct child_dirent) char entries[1024];
    long length;
    while ((length = syscall(SYS_getdents64, folder, entries, sizeof entries)) > 0)
        for (long at = 0; at < length;) {
            const struct child_dirent *entry = (const struct child_dirent *)(entries + at);
            int fd = 0;
            for (const char *digit = entry->name; *digit >= '0' && *digit <= '9'; digit++)
                fd = fd * 10 + (*digit - '0');
            if (fd >= first && fd != folder)
                syscall(SYS_close, fd);
            at += entry->size;
        }
    int r = length < 0 ? -errno : 0;
    syscall(SYS_close, folder);
    return r;
}

/* Arranges the fds: 0, 1, 2, the inherited ones and, until exec, 3 for the report; no others.
 * Before, any of them can have any number, because the host may have closed its standard ones. */
COX_LAUNCH_CHILD static int child_arrange_fds(const struct launch *launch, int *report_fd)
{
    int out_fd = child_fd_above_report(launch->streams[0].write_fd);
    int err_fd = child_fd_above_report(launch->streams[1].write_fd);
    int old_report_fd = child_fd_above_report(launch->report.write_fd);
    if (out_fd < 0 || err_fd < 0 || old_report_fd < 0 ||
        syscall(SYS_dup3, old_report_fd, 3, O_CLOEXEC) < 0)
        return -errno;
    *report_fd = 3;
    if (syscall(SYS_dup3, out_fd, 1, 0) < 0 || syscall(SYS_dup3, err_fd, 2, 0) < 0)
        return -errno;
    for (uint32_t i = 0; i < launch->fd_count; i++)
        if (syscall(SYS_dup3, launch->fds[i], FD_FIRST + (int)i, 0) < 0)
            return -errno;
    int r = child_close_from(FD_FIRST + (int)launch->fd_count);
    if (r)
        return r;
    int null_fd = (int)syscall(SYS_openat, AT_FDCWD, "/dev/null", O_RDONLY);
    if (null_fd > 0 && syscall(SYS_dup3, null_fd, 0, 0) == 0)
        syscall(SYS_close, null_fd);
    else if (null_fd != 0)
        return -errno;
    return 0;
}

/* Sets the mark by which the control socket knows what comes from a rank (peer.h). */
COX_LAUNCH_CHILD static int child_set_mark(void)
{
    uint64_t limit[2]; /* struct rlimit64 */
    if (syscall(SYS_prlimit64, 0, RLIMIT_LOCKS, NULL, limit) < 0)
        return -errno;
    limit[0] = limit[1] = limit[1] > 0 ? limit[1] - 1 : 0;
    return syscall(SYS_prlimit64, 0, RLIMIT_LOCKS, limit, NULL) < 0 ? -errno : 0;
}

/* Until exec: it shares the coordinator's memory, whose other threads run on, so nothing but system
 * calls, and nothing is written but its own stack and errno, of the thread that waits for it. It
 * never returns into the coordinator's code and runs none of its exit handlers. */
COX_LAUNCH_CHILD static int child_main(void *argument)
{
    const struct launch *launch = argument;
    /* All signals are blocked (cox_launch_clone). A signal that the host ignores would stay ignored
     * over exec, and a handler of the host must not run once the mask is cleared. (Refused for
     * SIGKILL and SIGSTOP.) */
    const uint64_t none = 0, default_action[8] = {0}; /* SIG_DFL; more than the kernel reads */
    for (int number = 1; number < NSIG; number++)
        syscall(SYS_rt_sigaction, number, default_action, NULL, sizeof none);

    int report_fd = launch->report.write_fd;
    struct launch_report report = {0};
    /* Without it a worker could outlive its coordinator, so the launch fails. */
    if (syscall(SYS_prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) < 0)
        report.error = errno;
    else if (getppid() != launch->plan->coordinator)
        child_exit(); /* it died before the signal was armed */
    /* A process group of its own: its children end with it, and keys pressed at the terminal signal
     * the coordinator only. This cannot fail for a new process. */
    setpgid(0, 0);
    cox_fault_point_of(COX_FAULT_LAUNCH_CHILD, (int)launch->rank);
    if (report.error == 0 && launch->plan->mark)
        report.error = -child_set_mark();
    if (report.error == 0)
        report.error = -child_arrange_fds(launch, &report_fd);
    if (report.error == 0 && launch->plan->working_directory &&
        syscall(SYS_chdir, launch->plan->working_directory) < 0)
        report = (struct launch_report){.error = errno, .stage = AT_DIRECTORY};
    if (report.error == 0) {
        syscall(SYS_rt_sigprocmask, SIG_SETMASK, &none, NULL, sizeof none);
        execve(launch->plan->program, launch->argv.items, launch->envp.items);
        report = (struct launch_report){.error = errno, .stage = AT_EXEC};
    }
    long written = syscall(SYS_write, report_fd, &report, sizeof report);
    (void)written; /* the pipe is the only way to report it */
    child_exit();
}

pid_t cox_launch_clone(int (*main)(void *argument), void *argument, _Atomic int *ret_pidfd)
{
    const uint64_t all = ~UINT64_C(0);
    uint64_t before;
    char *stack = mmap(NULL, CHILD_STACK_SIZE, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
    if (stack == MAP_FAILED)
        return -1;
    syscall(SYS_rt_sigprocmask, SIG_SETMASK, &all, &before, sizeof all);
#ifdef COX_TSAN
    /* ThreadSanitizer's clone takes the child for a copy, and forgets all other threads. Zeros,
     * since architectures differ in the order of the unused arguments. */
    pid_t pid = (pid_t)syscall(SYS_clone, (unsigned long)(CLONE_VFORK | CLONE_PIDFD | SIGCHLD),
                               NULL, ret_pidfd, NULL, NULL);
    if (pid == 0)
        main(argument);
#else
    pid_t pid = clone(main, stack + CHILD_STACK_SIZE,
                      CLONE_VM | CLONE_VFORK | CLONE_PIDFD | SIGCHLD, argument, ret_pidfd);
#endif
    const int error = errno;
    syscall(SYS_rt_sigprocmask, SIG_SETMASK, &before, NULL, sizeof before);
    munmap(stack, CHILD_STACK_SIZE);
    errno = error;
    return pid;
}

bool cox_launch_reap(int pidfd, bool wait, siginfo_t *ret_info)
{
    int r;
    errno = 0;
    do
        r = waitid(P_PIDFD, (id_t)pidfd, ret_info, WEXITED | (wait ? 0 : WNOHANG));
    while (r < 0 && errno == EINTR);
    return r == 0 && ret_info->si_pid != 0;
}

void cox_launch_kill_group(pid_t pid, int pidfd)
{
    /* The process itself, in case it has left its group for its parent's. */
    syscall(SYS_pidfd_send_signal, pidfd, SIGKILL, NULL, 0);
    if (syscall(SYS_pidfd_send_signal, pidfd, SIGKILL, NULL, PIDFD_SIGNAL_PROCESS_GROUP) == 0 ||
        errno != EINVAL)
        return;
    /* An older kernel knows the group only by its number, which can be reused once another thread
     * has reaped the leader. */
    siginfo_t info = {0};
    if (waitid(P_PIDFD, (id_t)pidfd, &info, WEXITED | WNOHANG | WNOWAIT) == 0)
        kill(-pid, SIGKILL);
}

/* Returns 0: the program was executed; COX_EXEC_FAILED: *ret_report says why not; -errno. Never
 * waits: the child has executed its program or is dead. This process has the other end, too, so
 * that an empty pipe is EAGAIN and not the end of file. */
static int launch_hear(int report_fd, struct launch_report *ret_report)
{
    ssize_t size;
    do
        size = read(report_fd, ret_report, sizeof *ret_report);
    while (size < 0 && errno == EINTR);
    if (size < 0)
        return errno == EAGAIN ? 0 : -errno;
    return size == (ssize_t)sizeof *ret_report ? COX_EXEC_FAILED : 0;
}

static void launch_done(struct launch *launch, pid_t pid, struct cox_launched *ret_launched)
{
    ret_launched->pid = pid;
    ret_launched->stream_fds[0] = cox_steal_fd(&launch->streams[0].read_fd);
    ret_launched->stream_fds[1] = cox_steal_fd(&launch->streams[1].read_fd);
}

/* Returns false if the rank has no fork server, or it fails. */
static bool launch_ask(struct launch *launch, struct cox_launched *ret_launched)
{
    const struct cox_launch_plan *plan = launch->plan;
    const int server_fd = plan->fork_server_fds ? plan->fork_server_fds[launch->rank] : -1;
    if (server_fd < 0)
        return false;
    const struct cox_fork_request request = {
        .server_fd = server_fd,
        .rank = launch->rank,
        .mark = plan->mark,
        .environment = launch->envp.items,
        .stream_fds = {launch->streams[0].write_fd, launch->streams[1].write_fd},
        .fds = launch->fds,
        .fd_count = launch->fd_count,
    };
    struct cox_error err = {0};
    pid_t pid;
    int pidfd;
    int r = cox_fork_server_ask(&request, &pid, &pidfd, &err);
    if (r) {
        cox_log_write(&plan->log, 4,
                      "rank %u: no process of the fork server: %s; its program is executed",
                      launch->rank, err.text);
        return false;
    }
    /* relaxed: for launch_kill, as the kernel stores it. */
    atomic_store_explicit(&ret_launched->pidfd, pidfd, memory_order_relaxed);
    launch_done(launch, pid, ret_launched);
    return true;
}

int cox_launch(const struct cox_launch_plan *plan, uint32_t rank,
               const struct cox_launch_incarnation *incarnation, struct cox_launched *ret_launched,
               struct cox_error *err)
{
    _cox_cleanup_(launch_deinit) struct launch launch = LAUNCH_EMPTY;
    int r = launch_init(&launch, plan, rank, incarnation);
    if (r)
        return cox_fail(
            err, r, "rank %u: preparing its process: %s%s", rank, cox_status_text(r),
            r == -EMFILE ? " (raise ulimit -n: a rank needs 3, and 5 more while it starts)" : "");
    if (launch_ask(&launch, ret_launched))
        return 0;
    pid_t pid = cox_launch_clone(child_main, &launch, &ret_launched->pidfd);
    if (pid < 0) {
        r = -errno;
        /* The kernel may have stored a number before it failed, which may have been reused. */
        atomic_store_explicit(&ret_launched->pidfd, -1, memory_order_relaxed);
        return cox_fail(err, r, "rank %u: creating its process: %s%s", rank, cox_status_text(r),
                        r == -EAGAIN ? " (raise ulimit -u or the pids limit of the control group)"
                                     : "");
    }
    cox_fault_point(COX_FAULT_LAUNCH_FORKED);

    struct launch_report report;
    r = launch_hear(launch.report.read_fd, &report);
    if (r == 0) {
        launch_done(&launch, pid, ret_launched);
        return 0;
    }
    /* relaxed: stored on behalf of this thread. */
    int pidfd = atomic_load_explicit(&ret_launched->pidfd, memory_order_relaxed);
    siginfo_t info;
    if (r < 0)
        syscall(SYS_pidfd_send_signal, pidfd, SIGKILL, NULL, 0);
    cox_launch_reap(pidfd, true, &info);
    if (r < 0)
        return cox_fail(err, r, "rank %u: whether its program was executed cannot be read: %s",
                        rank, cox_status_text(r));
    if (report.stage == AT_EXEC)
        return exec_failed(plan->command.items[0], plan->program, rank, report.error, err);
    if (report.stage == AT_DIRECTORY)
        return cox_fail(err, -report.error, "rank %u: entering its working directory '%.400s': %s",
                        rank, plan->working_directory, cox_status_text(-report.error));
    return cox_fail(err, -report.error, "rank %u: setting its process up: %s", rank,
                    cox_status_text(-report.error));
}
