/*
 * What the files of the supervisor share: supervise.c (start, end, what other threads ask), watch.c
 * (its thread), child.c (one process that is watched: started, its output, its death), unreaped.c
 * (what is left of it). For no one else.
 */
#ifndef COX_COORDINATOR_SUPERVISE_INTERNAL_H
#define COX_COORDINATOR_SUPERVISE_INTERNAL_H

#include "supervise.h"

#include "channel/base/peer.h"
#include "launch.h"
#include "output.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

struct cox_child {
    struct cox_supervisor *supervisor;
    uint32_t rank;
    /* the rank's; its phase moves under the supervisor's lock */
    struct cox_rank *record;
    /* of the process that was started; under the supervisor's lock */
    int pidfd;
    /* Other threads can read its pidfd here while the supervisor thread is blocked in cox_launch.
     */
    struct cox_launched launched;
    /* The process that serves the rank, when that is not pid; under the supervisor's lock. */
    struct cox_peer adopted;
    /* Which of its processes have ended: the rank is EXITING when one has, and dead when both are
     * reaped. Written by the supervisor thread, under the lock. */
    /* pid is dead, perhaps not reaped */
    bool ended;
    bool adopted_ended;
    /* by us, since the adopted process had died */
    bool wrapper_killed;
    /* The kernel writes the core of the process that serves: both are taken for ended, and get no
     * signal, which would cut the core off. `how` has the signal. Set by any thread, under the
     * lock, with the move to EXITING. */
    bool dumping;
    /* Of the supervisor thread alone; index 1 is standard error. */
    struct cox_output streams[2];
    /* 0: it was not tried yet */
    uint64_t reap_until_ns;
    /* Under the supervisor's lock. */
    struct cox_last_lines last_lines;
    /* once dead */
    struct cox_exit how;
    bool core_dumped;
    /* of an incarnation before, too */
    struct cox_last_death last_death;
    /* The rank is on another machine: pidfd is the fd of its end. "": it is not. */
    char node[48];
    struct cox_exit remote_how;
    char remote_end[448];
    /* external: the rank's process before its slot was released */
    pid_t former_pid;
    /* external: former_pid lived when its slot was released */
    bool left_alive;
};

/* The process of a dead rank that cannot be reaped yet: a debugger has it, or its core is written.
 */
struct cox_unreaped {
    uint32_t rank;
    /* that was started */
    pid_t pid;
    int pidfd;
    /* the process that served the rank, if its core is written; -1: it is not */
    int dumping_fd;
    pid_t dumping_pid;
};

/* A process to be started again; on the stack of the thread that waits for it. */
struct cox_relaunch {
    uint32_t rank;
    const struct cox_launch_incarnation *incarnation;
    struct cox_error *err;
    bool begun, done;
    int status;
};

/* COX_WATCH_LAUNCHING -> COX_WATCH_FAILED the thread ends COX_WATCH_LAUNCHING -> COX_WATCH_LAUNCHED
 * -> COX_WATCH_WATCHING the thread moves on when start has handed the supervisor out */
enum cox_watch_phase {
    COX_WATCH_LAUNCHING,
    COX_WATCH_FAILED,
    COX_WATCH_LAUNCHED,
    COX_WATCH_WATCHING
};

struct cox_supervisor {
    /* Constant once the thread runs. */
    struct cox_launch_plan plan;
    struct cox_supervise_hooks hooks;
    struct cox_log log;
    /* eventfd, readable: check `leaving` and the adopted processes */
    int stop_fd;
    /* every worker is dead and free wants the thread */
    atomic_bool leaving;
    /* workers have the order to end */
    atomic_bool ending;
    /* processes are others' children, and come by register */
    bool external;
    /* of the options; start's */
    const int *memory_fds;
    uint32_t memory_fd_count;
    pthread_t thread;
    /* of the supervisor thread alone */
    struct pollfd *polled;
    /* what of polled is an fd */
    struct pollfd *packed;
    struct cox_child *children;

    pthread_mutex_t lock;
    /* on CLOCK_MONOTONIC; phase or alive */
    pthread_cond_t changed;
    enum cox_watch_phase phase;
    /* the rank whose process is being started */
    uint32_t launching;
    /* start has waited long enough: no further process is started */
    bool expired;
    /* records that are `awaited` */
    uint32_t alive;
    /* changed by the supervisor thread */
    struct cox_unreaped *unreaped;
    uint32_t unreaped_count;
    /* NULL: none is asked for */
    struct cox_relaunch *relaunch;
    /* no relaunch any more */
    bool cancelled;
    struct cox_error launch_error;
};

/* Of the supervisor's thread alone, unless it says otherwise; they take the lock themselves. */

/* Its end is waited for from now on, and no more. From any thread, with the lock held. */
void cox_child_await(struct cox_child *child);
void cox_child_await_no_more(struct cox_child *child);
/* LAUNCHING -> STARTING, or back. Starts its process. Returns as cox_launch;
 * COX_TIMEOUT: start does not wait any longer. */
int cox_child_begin(struct cox_child *child, const struct cox_launch_incarnation *incarnation,
                    struct cox_error *err);
/* Reads the available bytes of standard output (0) or error (1), and passes the lines to the hook.
 */
void cox_child_read(struct cox_child *child, int stream);
/* The process of a rank is dead, and stays unreaped. */
void cox_unreaped_add(struct cox_child *child);
/* Reaps what can be reaped by now. Also called by the thread that destroys the supervisor. */
void cox_unreaped_retry(struct cox_supervisor *supervisor);
/* At the end of a group: waits for cores that are written while that goes on, then kills the
 * processes. Not on the supervisor thread. */
void cox_unreaped_end(struct cox_supervisor *supervisor);
void cox_unreaped_deinit(struct cox_supervisor *supervisor);
/* SIGKILL, for its process group as well, which only a process that was started here leads; nothing
 * while it dumps core. From any thread, with the lock held there. Returns 0 or -errno. */
int cox_child_kill(struct cox_child *child);
/* How a process ended, as waitid tells it. With the lock held. */
void cox_child_set_how(struct cox_child *child, const siginfo_t *info);
/* In words, of what is known by now. From any thread, with the lock held. */
void cox_child_describe(struct cox_child *child, bool dead, char *buffer, size_t buffer_size);
/* The fds that show its end; -1: none is left. */
void cox_child_polled_fds(struct cox_child *child, int *ret_fd, int *ret_adopted_fd);
/* Of a rank on another machine: its end was told. With the lock held, from any thread. */
bool cox_child_remote_ended(const struct cox_child *child);
void cox_child_adopted_ended(struct cox_child *child);
void cox_child_ended(struct cox_child *child);
/* Both its processes are dead, and it is not reaped. */
bool cox_child_is_gone(struct cox_child *child);
void cox_child_reap(struct cox_child *child);
/* -> LAUNCHING: nothing of its last incarnation is left. */
void cox_child_reset(struct cox_child *child);

/* Returns 0 or -errno. From any thread. */
int cox_pidfd_signal(int pidfd, int number);

/* The supervisor's thread: starts all processes, and watches them until `leaving` is set. */
void *cox_supervisor_main(void *context);

#endif
