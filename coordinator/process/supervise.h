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

#include <sys/types.h>

struct cox_supervisor;
struct cox_launch_incarnation;

/* How a worker ended. */
struct cox_exit {
    /* false: it is dead, but another thread of the host reaped it, or a debugger still has it */
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
     * now on. The first hook to hear of a death, for threads that wait for the rank; it must not
     * block at all. */
    void (*wake)(void *context, uint32_t rank);
    /* The same death, after wake, and after all that the worker wrote before was handed to line.
     * Once per started process, unless start failed: then no hook is ever called. Lines can come
     * later still, from processes that the worker left behind with its pipes. */
    void (*death)(void *context, uint32_t rank, pid_t pid, const struct cox_exit *how);
    /* A process on another machine is to get SIGKILL. Takes no lock of the supervisor; on any
     * thread, with its lock held. */
    void (*kill)(void *context, uint32_t rank);
};

struct cox_supervise_options {
    uint32_t rank_count;
    /* rank_count of them, as cox_ranks_init leaves them; borrowed until free */
    struct cox_rank *ranks;
    /* argv of every worker, NULL-terminated; PATH is searched */
    const char *const *command;
    /* as in struct cox_executor_options */
    const char *const *environment;
    const char *working_directory;
    /* append --local_rank R --local_world_size N --npu_num_per_dp N --npu_device_id D --parent_pid
     * P --shm_name_prefix PREFIX */
    bool pass_flags;
    /* ranks get the mark of peer.h */
    bool mark;
    /* "/NAME" */
    const char *prefix;
    /* rank_count of them; NULL: device = rank */
    const int32_t *devices;
    /* COXSWAIN_SOCKET: path of the group's control socket; NULL: none */
    const char *control_socket;
    /* memory that the first processes inherit (COXSWAIN_FDS): memory_fd_count fds of rank 0, then
     * of rank 1, and so on, lent until start returns; 0: none */
    const int *memory_fds;
    uint32_t memory_fd_count;
    /* starts no worker, see cox_supervisor_register; command is not used */
    bool external;
    /* Starts only these ranks; the others are on other machines. local_count 0: all. devices:
     * local_count of them. */
    uint32_t local_first;
    uint32_t local_count;
    /* rank_count eventfds, which the workers inherit (COXSWAIN_NOTIFY_FD); borrowed until free;
     * NULL: none */
    const int *notify_fds;
    /* rank_count sockets of fork servers, -1: none; borrowed until free; NULL: none at all
     * (fork_server.h) */
    const int *fork_server_fds;
    /* deadline for the execution of every worker; 0: none */
    uint64_t deadline_ns;
    struct cox_supervise_hooks hooks;
    struct cox_log log;
};

/* Starts the thread and all workers. The environment of each has COXSWAIN_PREFIX, COXSWAIN_RANK,
 * COXSWAIN_WORLD_SIZE, COXSWAIN_DEVICE, COXSWAIN_PARENT_PID, COXSWAIN_INCARNATION (1). stdin is
 * /dev/null, stdout and stderr are pipes of the supervisor; signal mask and dispositions are the
 * defaults; no other fd is inherited; PDEATHSIG is SIGKILL. On failure every worker that was
 * started is killed and reaped, and nothing is left.
 * Returns
 *   0
 *   COX_EXEC_FAILED: err names command, rank and reason
 *   COX_NOT_FOUND: working_directory is no directory that can be entered
 *   COX_TIMEOUT: a process had not executed the command by the deadline; err names its rank
 *   COX_INVALID: no command, no prefix, an invalid change of the environment, a number of ranks
 *     outside 1 to 128
 *   -errno
 */
int cox_supervisor_start(const struct cox_supervise_options *options,
                         struct cox_supervisor **ret_supervisor, struct cox_error *err);

/* The process that was started. */
pid_t cox_supervisor_pid(struct cox_supervisor *supervisor, uint32_t rank);
/* Updates the record of a rank from `left`, its word that it has left: to LEAVING and back. Returns
 * for how many nanoseconds it has been seen to have left; 0: it has not, or is dead. Takes the
 * supervisor's lock; may be called with the lock of a collector. */
uint64_t cox_supervisor_see_left(struct cox_supervisor *supervisor, uint32_t rank, bool left);
/* True once the worker is dead; ret_how (may be NULL) then says how. Takes no lock while it lives.
 */
bool cox_supervisor_dead(struct cox_supervisor *supervisor, uint32_t rank,
                         struct cox_exit *ret_how);
/* True if a rank is dead, or its process has ended and the supervisor thread is about to notice. */
bool cox_supervisor_ended(struct cox_supervisor *supervisor, uint32_t rank);
/* True if a rank is dead, or its death has begun and the supervisor thread is about to notice. */
bool cox_supervisor_exiting(struct cox_supervisor *supervisor, uint32_t rank);
/* Looks whether the kernel writes the core of a rank, which its pidfd tells only when that is done,
 * minutes later for a large process. Such a rank is dead as any other, known as soon as the
 * supervisor thread runs, and may be replaced: none of its threads runs again. Called while its
 * reply is waited for, with the lock of a collector or without one. */
void cox_supervisor_see_dump(struct cox_supervisor *supervisor, uint32_t rank);
/* The last lines of a worker's output (16 of at most 400 bytes), newest last, joined by newlines;
 * as many of the newest as fit buffer_size. Returns the length; 0: there are none. */
size_t cox_supervisor_last_lines(struct cox_supervisor *supervisor, uint32_t rank, char *buffer,
                                 size_t buffer_size);
/* The last death of a rank, kept over its next incarnations. */
struct cox_last_death {
    /* number of its deaths; 0: there was none, and all other fields are empty */
    uint32_t count;
    /* CLOCK_MONOTONIC */
    uint64_t when_ns;
    /* the text of describe */
    char text[512];
    /* its last lines at that time, as above */
    char last_lines[2048];
};
/* Deaths after cox_supervisor_expect_end are neither counted nor kept. A death is there no later
 * than cox_supervisor_dead reports it. */
void cox_supervisor_last_death(struct cox_supervisor *supervisor, uint32_t rank,
                               struct cox_last_death *ret_death);
/* "rank 2 (pid 123) was killed by signal 9 (Killed)", with " (core dumped)"; "... is dumping core
 * after signal 11 (Segmentation fault)"; "... exited with status 1"; "... is alive". With an adopted process: "rank 2 (pid 124, in its wrapper 123) is
 * dead; its wrapper exited with status 137", or what else the wrapper came to. */
void cox_supervisor_describe(struct cox_supervisor *supervisor, uint32_t rank, char *buffer,
                             size_t buffer_size);

/* The process that serves a rank may not be the one that was started, if a wrapper (sh -c, numactl,
 * valgrind) has it as a child. From now on both are watched. When either dies the other one is
 * killed, and the rank is dead when both are gone: until then its memory may be written to. pid may
 * be the process that was started. Unless its end has begun, the rank is RUNNING from now on.
 * Returns
 *   0
 *   COX_DENIED: the process does not descend from the one that was started
 *   COX_PEER_DEAD: there is no such process, or the rank is dead; a process of the rank is killed
 *   -errno
 */
int cox_supervisor_adopt(struct cox_supervisor *supervisor, uint32_t rank, pid_t pid,
                         uint64_t start);
/* Registers a process that another process started as a rank, with `external`. It is watched
 * through its pidfd and signalled like the others, but without its process group; how it ends is
 * not known. Never waits.
 * Returns
 *   0
 *   COX_TAKEN: another process is this rank
 *   COX_STATE: another process was, and its slot was not released
 *   COX_PEER_DEAD: there is no such process
 *   -errno
 */
int cox_supervisor_register(struct cox_supervisor *supervisor, uint32_t rank, pid_t pid,
                            uint64_t start);
/* The pid of a remote rank whose process there never was. */
#define COX_SUPERVISOR_PID_NONE 1
/* Registers a process on another machine as a rank, with `external`. `end_fd`, which becomes the
 * supervisor's, is readable when it is dead; set_remote_end says how it ended, before. The process
 * is not signalled: cox_supervisor_kill calls hooks.kill. Returns as register. */
int cox_supervisor_register_remote(struct cox_supervisor *supervisor, uint32_t rank,
                                   const char *node, pid_t pid, int end_fd);
/* text follows the rank, its node and its pid, as in "was killed by signal 9 (Killed)". */
void cox_supervisor_set_remote_end(struct cox_supervisor *supervisor, uint32_t rank,
                                   const struct cox_exit *how, const char *text);
/* A line that a process on another machine wrote: the last ones are kept. */
void cox_supervisor_add_line(struct cox_supervisor *supervisor, uint32_t rank, const char *text);
/* The node of a rank on another machine. Returns false, and "": it is on this one, or no process is
 * the rank. */
bool cox_supervisor_node(struct cox_supervisor *supervisor, uint32_t rank, char *buffer,
                         size_t buffer_size);
/* A registered process has left the group and lives on: it is no longer awaited or signalled.
 * has_served: it was the rank, and its death will be reported; otherwise it never became the rank,
 * which another process may become. Does nothing if its end has begun. */
void cox_supervisor_set_left(struct cox_supervisor *supervisor, uint32_t rank, bool has_served);
/* With `external`: releases the slot, so that the next process that registers may be this rank. A
 * dead process whose death was reported makes room; one that has left and lives on is no longer
 * watched. The rank is then neither dead nor does it have a pid. Not inside a hook. Returns 0, also
 * when it is vacant; COX_TIMEOUT: a hook about its death did not return in time. */
int cox_supervisor_release_slot(struct cox_supervisor *supervisor, uint32_t rank,
                                uint64_t deadline_ns, struct cox_error *err);
/* Ends that: true if no process has registered, and the rank counts as dead as before; false: one
 * has. */
bool cox_supervisor_cancel_slot(struct cox_supervisor *supervisor, uint32_t rank);
/* Kills the process that serves the rank, and its wrapper, if it is still this one (0: any). A
 * process that has left is no rank any more, and is spared. Returns 0, also when there is none;
 * -errno. */
int cox_supervisor_kill(struct cox_supervisor *supervisor, uint32_t rank, pid_t pid);
/* Workers are about to be asked to end. From now on the end of an adopted process does not kill its
 * wrapper, which may have work left, nor the reverse; both get the signals of cox_supervisor_end.
 */
void cox_supervisor_expect_end(struct cox_supervisor *supervisor);

/* Starts a new process for a dead rank, on the supervisor thread, as its next incarnation. It then
 * has a new pid and pidfd and no last lines. First it waits for the death hook, and until all
 * processes that were started for the rank are gone. On failure the rank stays dead. Not inside a
 * hook.
 * Returns
 *   0
 *   COX_STATE: it is alive
 *   COX_TIMEOUT: the wrapper or program of the dead one did not end, or hooks did not return in
 *     time
 *   COX_EXEC_FAILED
 *   COX_CLOSED: cancelled
 *   -errno
 */
int cox_supervisor_relaunch(struct cox_supervisor *supervisor, uint32_t rank,
                            const struct cox_launch_incarnation *incarnation, uint64_t deadline_ns,
                            struct cox_error *err);
/* Ends running relaunches soon, with COX_CLOSED, and refuses new ones. */
void cox_supervisor_cancel(struct cox_supervisor *supervisor);
/* Waits until a rank is dead, its death hook has returned, and no process that was started for it
 * runs. Returns 0 or COX_TIMEOUT. Not inside a hook. */
int cox_supervisor_await_end(struct cox_supervisor *supervisor, uint32_t rank, uint64_t deadline_ns,
                             struct cox_error *err);

/* Signals every process that lives and has not left. With a wrapper both processes get it, except
 * SIGTERM, which only the serving one gets. Returns the number of processes. */
uint32_t cox_supervisor_signal_all(struct cox_supervisor *supervisor, int signal_number);
/* Waits until every worker is dead and its death hook has returned. Returns 0 or COX_TIMEOUT. */
int cox_supervisor_wait(struct cox_supervisor *supervisor, uint64_t deadline_ns);
/* Ends every worker: sends SIGTERM (and SIGCONT, so that stopped ones get it), waits term_ms, sends
 * SIGKILL, and waits until all are reaped. That time bounds it, since SIGKILL cannot be ignored;
 * only a process that is held inside the kernel (a driver) takes longer, and is named in the log
 * after 10 s. And a core that is being written is not cut off while that goes on, which is logged.
 * Returns how many needed SIGTERM or SIGKILL. */
uint32_t cox_supervisor_end(struct cox_supervisor *supervisor, uint64_t term_ms);
/* end(0) for all that still live, then joins the thread. NULL-safe, returns NULL. */
struct cox_supervisor *cox_supervisor_free(struct cox_supervisor *supervisor);

#endif
