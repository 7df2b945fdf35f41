/*
 * launch: one worker process: finds its program, prepares its environment, forks and executes it,
 *   or has a fork server fork it (fork_server.h).
 *
 * Threads: a plan may be read on any thread once it is made. cox_launch runs on the thread that
 *   lives as long as the worker, with all signals blocked: the worker is killed when that thread
 *   ends (PDEATHSIG); one of a fork server when the main thread ends.
 * Ownership: a plan owns copies of everything. The result of cox_launch is the caller's.
 * Blocks: cox_launch until the program was executed or could not be; without a limit if the new
 *   process is stopped before that. Another thread can end it through the pidfd (struct
 *   cox_launched).
 * If the process dies: its worker dies with it, also between fork and exec.
 */
#ifndef COX_COORDINATOR_LAUNCH_H
#define COX_COORDINATOR_LAUNCH_H

#include <coxswain/base.h>

#include <signal.h>
#include <stdatomic.h>
#include <sys/types.h>

struct cox_supervise_options;

/* A NULL-terminated array of strings, for exec. */
struct cox_strings {
    char **items;
    size_t count;
    /* there was no memory for a string */
    bool failed;
};

/* How every worker of a group is started. */
struct cox_launch_plan {
    /* the coordinator, this process */
    pid_t coordinator;
    uint32_t rank_count;
    bool pass_flags, mark;
    char *prefix;
    /* NULL: none */
    char *control_socket;
    /* path of the program, found in the workers' PATH */
    char *program;
    /* absolute; NULL: that of this process */
    char *working_directory;
    /* argv without flags */
    struct cox_strings command;
    /* with the changes of the options, without the COXSWAIN_ variables that the launch sets */
    struct cox_strings environment;
    int32_t devices[COX_RANK_COUNT_MAX];
    /* the ranks that are started here: COXSWAIN_LOCAL_RANK, COXSWAIN_LOCAL_WORLD_SIZE */
    uint32_t local_first, local_count;
    /* of each rank, borrowed; NULL: none */
    const int *notify_fds;
    /* of each rank, borrowed, -1: none; NULL: none at all */
    const int *fork_server_fds;
    struct cox_log log;
};

struct cox_launched {
    pid_t pid;
    /* Of the new process, as soon as it exists, also while cox_launch waits until it has executed
     * its program. The caller's, also after a failure; -1: there is no process. */
    _Atomic int pidfd;
    /* read ends of standard output and error, O_NONBLOCK */
    int stream_fds[2];
};

/* Which incarnation of its rank a process is. */
struct cox_launch_incarnation {
    /* COXSWAIN_INCARNATION */
    uint32_t number;
    /* fd_count of them, lent; the new process has them from 4 on, and COXSWAIN_FDS names them */
    const int *fds;
    uint32_t fd_count;
};

/* Copies the options and finds the program (unless workers are external). Returns 0; COX_INVALID;
 * COX_NOT_FOUND: the working directory; COX_EXEC_FAILED: it is not in PATH; -ENOMEM. */
int cox_launch_plan_init(struct cox_launch_plan *plan, const struct cox_supervise_options *options,
                         struct cox_error *err);
void cox_launch_plan_deinit(struct cox_launch_plan *plan);
/* Starts one worker. Where its fork server does not make it, this is logged, and the program is
 * executed. Returns 0; COX_EXEC_FAILED: err names command, rank and reason; -errno. On failure
 * nothing is left except the pidfd. */
int cox_launch(const struct cox_launch_plan *plan, uint32_t rank,
               const struct cox_launch_incarnation *incarnation, struct cox_launched *ret_launched,
               struct cox_error *err);
/* Of functions that run in a child of cox_launch_clone: they use system calls directly, since
 * sanitizers wrap the C library's functions (and instrument every memory access) with locks, which
 * another thread may hold, and know nothing of this stack. */
#define COX_LAUNCH_CHILD                                                                           \
    __attribute__((noinline, no_sanitize("thread"), no_sanitize("address"),                        \
                   no_sanitize("undefined")))
/* A process as posix_spawn makes it: it has this process's memory until it executes its program, so
 * that the page tables of a host with much memory are not copied, which takes 50 ms for each GB.
 * This thread continues when the child has executed its program or is dead, which end-of-file on a
 * pipe does not show once another thread of the host has forked. The child comes with its pidfd, so
 * that no other thread can reap the pid in between (a host that ignores SIGCHLD would); the kernel
 * stores the pidfd before this thread sleeps. Fork handlers of the host do not run. All signals are
 * blocked meanwhile, also those that the C library keeps for itself: a handler in the child would
 * change this process's memory. main executes a program or exits, by system calls. Returns the pid;
 * -1: errno. */
pid_t cox_launch_clone(int (*main)(void *argument), void *argument, _Atomic int *ret_pidfd);
/* Sends SIGKILL to the process that was started, if it lives, and to its process group. Before it
 * is reaped. */
void cox_launch_kill_group(pid_t pid, int pidfd);
/* Reaps a process that is dead, or (wait) about to be. ret_info is zeroed memory. False: another
 * thread reaped it, because the host ignores SIGCHLD or waits for any child (errno ECHILD); or,
 * without wait, a debugger that traces it reaps it first (errno 0). It is dead in both cases. */
bool cox_launch_reap(int pidfd, bool wait, siginfo_t *ret_info);

#endif
