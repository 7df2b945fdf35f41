/*
 * launch: one worker process: found, prepared, forked, executed.
 *
 * Threads: a plan may be read by any thread once it is made; cox_launch by the thread that shall
 *   live as long as the worker, with all signals blocked: the worker is killed when that thread
 *   ends (PDEATHSIG).
 * Ownership: a plan owns copies of everything; what cox_launch returns is the caller's.
 * Blocks: cox_launch until the program is executed or could not be: without a bound, when somebody
 *   stops the new process before that. Another thread can end it through the pidfd, see struct
 *   cox_launched.
 * If the process dies: a worker between fork and exec dies with it, as one after that does.
 */
#ifndef COX_COORDINATOR_LAUNCH_H
#define COX_COORDINATOR_LAUNCH_H

#include "channel/base/base.h"

#include <signal.h>
#include <stdatomic.h>
#include <sys/types.h>

struct cox_supervise_options;

/* Strings with a NULL behind them, as exec wants them. */
struct cox_strings {
    char **items;
    size_t count;
    /* no memory for one of them */
    bool failed;
};

/* How every worker of a group is started. */
struct cox_launch_plan {
    /* this process */
    pid_t coordinator;
    uint32_t rank_count;
    bool pass_flags;
    char *prefix;
    /* NULL: none */
    char *control_socket;
    bool sealed;
    /* what is executed: a path; found in PATH */
    char *program;
    /* argv without flags */
    struct cox_strings command;
    /* without COXSWAIN_ variables of ours */
    struct cox_strings environment;
    int32_t devices[COX_RANK_COUNT_MAX];
    /* borrowed, of each rank; NULL: none */
    const int *notify_fds;
};

struct cox_launched {
    pid_t pid;
    /* Of the new process as soon as there is one, also while cox_launch sleeps until it has
     * executed its program. The caller's in any case, also after a failure; -1: there is none. */
    _Atomic int pidfd;
    /* read ends of standard output and error, O_NONBLOCK */
    int stream_fds[2];
};

/* Fds that a new process inherits, at most. */
#define COX_LAUNCH_FD_COUNT_MAX 30

/* Which incarnation of its rank a process is. */
struct cox_launch_incarnation {
    /* COXSWAIN_GENERATION */
    uint32_t number;
    /* fd_count of them, lent: the new process has them from 4 on, COXSWAIN_FDS says so */
    const int *fds;
    uint32_t fd_count;
};

/* Copies what options say, and finds the program (not where workers are external). Returns 0;
 * COX_INVALID; COX_EXEC_FAILED: it is not in PATH; -ENOMEM. */
int cox_launch_plan_init(struct cox_launch_plan *plan, const struct cox_supervise_options *options,
                         struct cox_error *err);
void cox_launch_plan_deinit(struct cox_launch_plan *plan);
/* Starts one worker. Returns 0; COX_EXEC_FAILED: err names command, rank and reason; -errno.
 * Nothing is left unless 0, but the pidfd. */
int cox_launch(const struct cox_launch_plan *plan, uint32_t rank,
               const struct cox_launch_incarnation *incarnation, struct cox_launched *ret_launched,
               struct cox_error *err);
/* SIGKILL for the process that was started, if it lives, and whatever of its process group does.
 * Before it is reaped. */
void cox_launch_kill_group(pid_t pid, int pidfd);
/* Takes the end of a process that is dead, or (wait) about to be. False: somebody else reaped it,
 * because the host ignores SIGCHLD or waits for any child on another thread; or (no wait) a
 * debugger that traces it has it first. Dead it is all the same. ret_info is zeroed memory; errno
 * is ECHILD in the first case, 0 in the second. */
bool cox_launch_reap(int pidfd, bool wait, siginfo_t *ret_info);

#endif
