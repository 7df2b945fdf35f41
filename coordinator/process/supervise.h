/*
 * supervise: the processes of a group: started, watched, heard, ended.
 *
 * One supervisor thread lives as long as the group. It forks every worker itself, because a
 * worker's PDEATHSIG fires when the thread that forked it ends, and watches pidfds and the workers'
 * output.
 *
 * Threads: start and free from one thread; everything else from any. Hooks run on the supervisor
 *   thread, without a lock, from the moment that start has stored ret_supervisor on; they may call
 *   the getters (pid to describe) and signal, but never wait, end or free (asserted). They should
 *   be short: a hook that blocks delays every other line and death.
 * Ownership: options and what they point to are copied; strings handed to hooks are lent for the
 *   call.
 * Blocks: start until every worker was executed or could not be, or its deadline; wait and end
 *   until theirs.
 * Process groups: every worker leads one of its own, so keys pressed at a terminal are not for it.
 *   When it is dead, however it ended, whatever is left of its group gets SIGKILL: it may hold the
 *   group's memory, or a device that the next incarnation of the rank needs. A process that is to
 *   outlive its worker leaves the group (setsid).
 * If the process dies: workers get SIGKILL from the kernel (PDEATHSIG), also stopped ones; pipes
 *   and pidfds close by themselves. Processes that a worker started are then its own affair, except
 *   that cox_worker_run ends its process wherever it is.
 */
#ifndef COX_COORDINATOR_SUPERVISE_H
#define COX_COORDINATOR_SUPERVISE_H

#include "rank.h"

#include <stdatomic.h>
#include <sys/types.h>

struct cox_supervisor;
struct cox_launch_incarnation;

/* How a worker ended. */
struct cox_exit {
    /* false: it is dead, but somebody else reaped it, or a debugger still has it */
    bool known;
    /* the signal that killed it, 0: it exited */
    int signal;
    /* when it exited */
    int exit_status;
};

struct cox_supervise_hooks {
    void *context;
    /* One line a worker wrote (stdout or stderr), without its newline; over-long lines come in
     * pieces of at most 4,000 bytes. */
    void (*line)(void *context, uint32_t rank, bool is_stderr, const char *text);
    /* A worker is dead and reaped: its state (cox_supervisor_dead) and its last lines say so from
     * now on. First of all that is said of a death, for whoever waits for the rank; it must not
     * block at all. */
    void (*wake)(void *context, uint32_t rank);
    /* The same death, after wake, and after all that the worker wrote before was handed to line.
     * Once per started process, unless start failed: then no hook is ever called. Lines can come
     * later still, from processes that the worker left behind with its pipes. */
    void (*death)(void *context, uint32_t rank, pid_t pid, const struct cox_exit *how);
};

struct cox_supervise_options {
    uint32_t rank_count;
    /* rank_count of them, as cox_ranks_init leaves them; borrowed until free */
    struct cox_rank *ranks;
    /* argv of every worker, NULL-terminated; PATH is searched */
    const char *const *command;
    /* append --local_rank R --local_world_size N --npu_num_per_dp N --npu_device_id D --parent_pid
     * P --shm_name_prefix PREFIX */
    bool pass_flags;
    /* "/NAME" */
    const char *prefix;
    /* rank_count of them; NULL: device = rank */
    const int32_t *devices;
    /* COXSWAIN_DOOR: path of the group's control socket; NULL: none */
    const char *control_socket;
    /* COXSWAIN_ATTACH: workers log on there */
    bool sealed;
    /* none is started: see cox_supervisor_register; command is not used */
    bool external;
    /* rank_count eventfds, which the workers inherit (COXSWAIN_NOTIFY_FD); borrowed until free;
     * NULL: none */
    const int *notify_fds;
    /* by when every worker is executed; 0: never */
    uint64_t deadline_ns;
    struct cox_supervise_hooks hooks;
    struct cox_log log;
};

/* Starts the thread and all workers. In the environment of each: COXSWAIN_PREFIX, COXSWAIN_RANK,
 * COXSWAIN_WORLD_SIZE, COXSWAIN_DEVICE, COXSWAIN_PARENT_PID, COXSWAIN_GENERATION (1). stdin is
 * /dev/null; stdout and stderr are pipes of the supervisor; signal mask and dispositions are the
 * defaults; no other fd is inherited; PDEATHSIG is SIGKILL. Returns 0; COX_EXEC_FAILED: err names
 * command, rank and reason; COX_TIMEOUT: a process did not get as far as executing the command by
 * the deadline, err names its rank; COX_INVALID: no command, no prefix, or a number of ranks
 * outside 1 to 128; -errno. Unless 0, every worker that did start is already killed and reaped, and
 * nothing is left. */
int cox_supervisor_start(const struct cox_supervise_options *options,
                         struct cox_supervisor **ret_supervisor, struct cox_error *err);

/* The process that was started. */
pid_t cox_supervisor_pid(struct cox_supervisor *supervisor, uint32_t rank);
/* left: the word in which the rank says that it has left. The record follows it, to LEAVING and
 * back. Returns since how many nanoseconds it is seen to have left; 0: it has not, or is dead.
 * Takes the supervisor's lock; may be called with the lock of a collector. */
uint64_t cox_supervisor_see_left(struct cox_supervisor *supervisor, uint32_t rank, bool left);
/* A pidfd that stays valid until free or a relaunch; readable once dead. */
int cox_supervisor_pidfd(struct cox_supervisor *supervisor, uint32_t rank);
/* True once the worker is dead; how (may be NULL) then tells. Lock-free for the caller's fast path
 * when alive. */
bool cox_supervisor_dead(struct cox_supervisor *supervisor, uint32_t rank,
                         struct cox_exit *ret_how);
/* True when a rank is dead, or its process has ended and the supervisor thread will know it in a
 * moment. */
bool cox_supervisor_ended(struct cox_supervisor *supervisor, uint32_t rank);
/* True when a rank is dead, or its death has begun and the supervisor thread will know it in a
 * moment. */
bool cox_supervisor_exiting(struct cox_supervisor *supervisor, uint32_t rank);
/* The last lines a worker wrote (16 of at most 400 bytes), newest last, joined by newlines; of
 * those, the newest that fit buffer_size. Returns the length; 0: it wrote nothing. */
size_t cox_supervisor_last_lines(struct cox_supervisor *supervisor, uint32_t rank, char *buffer,
                                 size_t buffer_size);
/* The last death of a rank, kept over its next incarnations. */
struct cox_last_death {
    /* of its deaths; 0: there was none, and the rest is empty */
    uint32_t count;
    /* CLOCK_MONOTONIC */
    uint64_t when_ns;
    /* as describe said it */
    char text[512];
    /* that it wrote until then; as above */
    char last_lines[2048];
};
/* Deaths after cox_supervisor_expect_end are not counted, nor kept. Has the death by the time that
 * cox_supervisor_dead says so. */
void cox_supervisor_last_death(struct cox_supervisor *supervisor, uint32_t rank,
                               struct cox_last_death *ret_death);
/* "rank 2 (pid 123) was killed by signal 9 (Killed)", with " (core dumped)"; "... exited with
 * status 1"; "... is alive". With an adopted process: "rank 2 (pid 124, in its wrapper 123) is
 * dead; its wrapper exited with status 137", or what else the wrapper came to. */
void cox_supervisor_describe(struct cox_supervisor *supervisor, uint32_t rank, char *buffer,
                             size_t buffer_size);

/* The process that serves a rank may be another than the one that was started: a wrapper (sh -c,
 * numactl, valgrind) has it as a child. From now on both are watched: when either dies the other
 * one is killed, and when both are gone the rank is dead: until then its memory may be written to.
 * The same process is fine. Unless its end has begun, the rank runs from now on. Returns 0;
 * COX_DENIED: the process does not descend from the one that was started; COX_PEER_DEAD: there is
 * no such process, or the rank is dead, and the process is killed if it is the rank's; -errno. */
int cox_supervisor_adopt(struct cox_supervisor *supervisor, uint32_t rank, pid_t pid,
                         uint64_t start);
/* A process that somebody else started is a rank from now on, of a supervisor with `external`:
 * watched through its pidfd, and signalled like the others, but not with its process group, and
 * nobody knows how it ends. Never waits. Returns 0; COX_TAKEN: another process is this rank;
 * COX_STATE: one was, and its slot was not released; COX_PEER_DEAD: there is no such process;
 * -errno. */
int cox_supervisor_register(struct cox_supervisor *supervisor, uint32_t rank, pid_t pid,
                            uint64_t start);
/* A process that was registered is done with the group and lives on: it is not waited for any more,
 * and gets no signal. has_served: it was the rank, and when it dies that is told; otherwise it
 * never became the rank, which another one may be. Nothing happens where its end has begun. */
void cox_supervisor_set_left(struct cox_supervisor *supervisor, uint32_t rank, bool has_served);
/* With `external`: the next process that is registered may be this rank. One that is dead and told
 * of makes room; one that has left and lives on is no child any more, and not looked at any more.
 * From then on the rank is neither dead nor has it a pid. Returns 0, also when it is vacant;
 * COX_TIMEOUT: a hook about its death did not return in time. Not inside a hook. */
int cox_supervisor_release_slot(struct cox_supervisor *supervisor, uint32_t rank,
                                uint64_t deadline_ns, struct cox_error *err);
/* The end of that: true when nobody is the rank, which is then as dead as before; false: somebody
 * was registered. */
bool cox_supervisor_cancel_slot(struct cox_supervisor *supervisor, uint32_t rank);
/* Kills the process that serves the rank, if it is still this one (0: whichever it is), and with it
 * its wrapper. One that has left is no rank any more, and spared. Returns 0, also when there is
 * none; -errno. */
int cox_supervisor_kill(struct cox_supervisor *supervisor, uint32_t rank, pid_t pid);
/* Workers are about to be told to end: from now on neither the end of an adopted process kills its
 * wrapper, which may have something left to do, nor the other way round; both get what
 * cox_supervisor_end sends. */
void cox_supervisor_expect_end(struct cox_supervisor *supervisor);

/* Starts the process of a dead rank again, on the supervisor thread, as the next incarnation of the
 * rank; it is alive from then on, with another pid and pidfd and no last lines. Before that, its
 * death hook has returned, and all that was started for the rank is gone. Returns 0; COX_STATE: it
 * is alive; COX_TIMEOUT: the dead one's wrapper or program would not go, or hooks did not return in
 * time; COX_EXEC_FAILED; COX_CLOSED: cancelled; -errno. Unless 0 it is as dead as before. Not
 * inside a hook. */
int cox_supervisor_relaunch(struct cox_supervisor *supervisor, uint32_t rank,
                            const struct cox_launch_incarnation *incarnation, uint64_t deadline_ns,
                            struct cox_error *err);
/* Relaunches end soon, with COX_CLOSED, and none begins. */
void cox_supervisor_cancel(struct cox_supervisor *supervisor);
/* Waits until a rank is dead and its death is told: the hook has returned, and nothing that was
 * started for it runs any more. Returns 0 or COX_TIMEOUT. Not inside a hook. */
int cox_supervisor_await_end(struct cox_supervisor *supervisor, uint32_t rank, uint64_t deadline_ns,
                             struct cox_error *err);

/* Signals one rank through its pidfd. Returns 0; COX_PEER_DEAD; -errno. */
int cox_supervisor_signal(struct cox_supervisor *supervisor, uint32_t rank, int signal_number);
/* Signals every process that lives and has not left; of a rank in a wrapper both, but for
 * SIGTERM, which is for the one that serves. Returns how many got it. */
uint32_t cox_supervisor_signal_all(struct cox_supervisor *supervisor, int signal_number);
/* Waits until every worker is dead and its death hook has returned. Returns 0 or COX_TIMEOUT. */
int cox_supervisor_wait(struct cox_supervisor *supervisor, uint64_t deadline_ns);
/* Ends every worker: waits exit_ms for them to leave by themselves, sends SIGTERM (and SIGCONT, a
 * stopped one would not hear it), waits term_ms, sends SIGKILL, waits until all are reaped. Bounded
 * by the two times, since SIGKILL cannot be ignored; only a process held inside the kernel (a
 * driver) takes longer, and is named in the log after 10 s. Returns how many needed SIGTERM or
 * SIGKILL. */
uint32_t cox_supervisor_end(struct cox_supervisor *supervisor, uint64_t exit_ms, uint64_t term_ms);
/* end(0, 0) for whoever still lives, then joins the thread. NULL-safe, returns NULL. */
struct cox_supervisor *cox_supervisor_free(struct cox_supervisor *supervisor);

#endif
