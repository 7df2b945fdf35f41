/*
 * executor: the coordinator side of a group: N worker processes, five channels, requests and their
 * completions.
 *
 * Threads: any thread may submit and call; call inside a handler is refused (COX_DEADLOCK). The
 *   execute and transfer channels have a response thread each, which runs their handlers one at a
 *   time. A handler may submit; submit never blocks. start and free run on one thread. stop may run
 *   on any thread before free, but not inside a handler or hook.
 * Ownership: submit packs the request before it returns; the request stays the caller's. A
 *   completion and all it points to are lent until the handler returns.
 * Blocks: submit never (it returns COX_FULL instead); call until its deadline; start until every
 *   rank has attached, or for start_timeout_ms; stop for finalize_ms + term_ms at most.
 * Exactly once: each submit that returned 0 gets one completion: at the last reply, at its
 *   deadline, at the first error or death of an asked rank, or when the group stops (COX_CLOSED).
 * If the process dies: the kernel kills the workers. Names exist only while ranks attach (or with
 *   keep_names, or legacy workers), and the next start under the same name removes them.
 */
#ifndef COX_COORDINATOR_EXECUTOR_H
#define COX_COORDINATOR_EXECUTOR_H

#include <coxswain/base.h>
#include "../../channel/base/spin.h"
#include "../../coordinator/collector/completion.h"

#include <sys/types.h>
#include <sys/uio.h>

#ifdef __cplusplus
extern "C" {
#endif

struct cox_executor;
struct cox_executor_nodes;
struct Coxswain__ExecuteRequest;

/* 0 or NULL means the default, except in required fields. */
struct cox_executor_options {
    /* set by COX_EXECUTOR_OPTIONS_INIT (base.h) */
    size_t size;
    /* the group; NULL: "<pid>_<counter>" */
    const char *name;
    /* required */
    uint32_t rank_count;
    /* required: argv of every worker, NULL-terminated */
    const char *const *command;
    /* do not append the rank's flags to command; the environment has the same values */
    bool no_flags;
    /* Changes of the environment that every worker inherits from this process, replacements
     * included: "NAME=value" sets a variable, "NAME" removes one; NULL-terminated. Variables that
     * the group sets itself (COXSWAIN_RANK, ...) are refused. Only for workers that this group
     * starts. NULL: none. */
    const char *const *environment;
    /* The working directory of every worker. A command that is a relative path, and relative
     * entries of PATH, start there. Only for workers that this group starts. NULL: that of this
     * process when the worker starts. */
    const char *working_directory;
    /* rank_count of them; NULL: device = rank */
    const int32_t *devices;
    /* rank_count sockets of fork servers, which start the workers as long as they live
     * (coordinator/process/fork_server.h); -1: this rank has none. Borrowed until free has
     * returned. NULL: command is executed. */
    const int *fork_server_fds;
    /* requests in flight per channel, 1 to 32; default 4 */
    uint32_t depth;
    /* whether waits spin before they block (channel/base/spin.h); default auto */
    enum cox_spin spin;
    /* how workers get the group's memory; default named */
    enum cox_attach attach;
    /* sealed attach: uses huge pages, if any are free */
    bool huge_pages;
    /* Starts no worker: workers are started by other means and connect to the control socket
     * (coxswain-worker --socket PATH). start waits for all of them, without a limit unless
     * start_timeout_ms sets one. command is not used. */
    bool external_workers;
    /* The host collects completions on threads of its own (cox_executor_completions). There are no
     * response threads and no handlers. Not with legacy workers. */
    bool collect;
    /* The workers are MindIE-LLM's, which do not use the shared state; depth is 1. */
    bool legacy_workers;
    /* keeps the names in /dev/shm while the group lives */
    bool keep_names;
    /* bytes of a channel's request region, for all frames together */
    uint64_t request_size[COX_CHANNEL_COUNT];
    /* bytes of a channel's response region, for all slots together */
    uint64_t response_size[COX_CHANNEL_COUNT];
    /* Requests larger than their frame, and replies larger than their slot, are sent out of line,
     * in memory allocated on demand. Limits: large_payload_size_max bytes for requests (default 2
     * GiB; a message has at most 2 GiB - 1), reply_size_max for replies of one rank (default 1 GiB
     * + 64 MiB). The coordinator keeps a private copy of each such reply until its handler has
     * returned. Legacy workers do not support this. no_large_payloads: such requests and replies
     * are refused as too large. */
    bool no_large_payloads;
    uint64_t large_payload_size_max;
    uint64_t reply_size_max;
    /* runtime directory; NULL: $COXSWAIN_RUNTIME_DIR, $XDG_RUNTIME_DIR/coxswain, or
     * /tmp/coxswain-<uid>; read by start */
    const char *runtime_dir;
    /* start opens no control socket; not with external workers */
    bool no_socket;
    /* start fails if the control socket cannot be opened. By default, a group without a usable
     * runtime directory logs this and runs without the socket (except with external workers). */
    bool need_socket;
    /* default 60,000 */
    uint64_t start_timeout_ms;
    /* time that stop waits for workers to exit by themselves; default 3,000 */
    uint64_t finalize_ms;
    /* time that stop then waits after SIGTERM; default 2,000 */
    uint64_t term_ms;
    struct cox_log log;
    void *hook_context;
    /* A line of a worker's output, without the newline. On the supervisor thread. NULL: it is
     * written to this process's standard output or error, as "rank R: TEXT", unless nobody reads. */
    void (*line)(void *hook_context, uint32_t rank, bool is_stderr, const char *text);
    /* A worker reported a fault outside any reply. rank is -1 if unknown: workers of MindIE-LLM do
     * not report their rank. NULL: logged. On the error thread. */
    void (*fault)(void *hook_context, int32_t rank, const char *text);
    /* From now on external workers can connect to this control socket. Called once, inside start.
     * NULL: not called. */
    void (*waiting)(void *hook_context, const char *name, const char *control_socket);
    /* Reports the ranks that start still waits for: first all of them, then after each change. On
     * the thread of start. NULL: not called. */
    void (*attaching)(void *hook_context, const struct cox_rank_set *missing);
    /* Called every 50 ms while start waits for ranks; true ends start with COX_CLOSED. NULL: never.
     */
    bool (*cancelled)(void *hook_context);
    /* A command client has connected to the control socket and was accepted. The hook takes
     * ownership of fd, a blocking stream socket. If it does not return 0, fd is not taken, and the
     * client is refused with the text of err. On the control socket's thread: it must not block.
     * NULL: command clients are refused. */
    int (*control)(void *hook_context, int fd, struct cox_error *err);
    /* A worker died. NULL: logged. On the supervisor thread, or inside start for deaths during
     * start. */
    void (*death)(void *hook_context, uint32_t rank, const char *text);
    /* Neither the coordinator nor the ranks record what they do (docs/tracing.md). */
    bool no_recorder;
    /* Files of crash_dir also have the bytes of requests that were under way. */
    bool crash_contents;
    /* A directory for what the group did when something failed: after a death, a timeout, a
     * divergence or a failed start a file is written there, at most 16 for a name. The recorders
     * are files there too, removed when the group stops. Created if it does not exist. NULL: none.
     */
    const char *crash_dir;
    /* The ranks are on several machines (nodes.h): command, devices and attach are not used, and no
     * worker can connect here. rank_count may be 0. Borrowed until start has returned. NULL: on
     * this machine. */
    const struct cox_executor_nodes *nodes;
};
#define COX_EXECUTOR_OPTIONS_INIT COX_OPTIONS_INIT(struct cox_executor_options)

/* Creates regions and semaphores, starts the workers, waits until all have attached, and removes
 * the names. It does not wait for legacy workers: their reply to init shows that they run. On
 * failure nothing is left, and err has the rank and the reason.
 * Returns
 *   0
 *   COX_INVALID: the options
 *   COX_TAKEN: a live group has the name
 *   COX_DENIED: an object with another owner, mode or type is in the way
 *   COX_NO_SPACE
 *   COX_EXEC_FAILED: the program of a worker cannot be executed
 *   COX_NOT_FOUND: working_directory is no directory that can be entered
 *   COX_PEER_DEAD: a worker ended before it attached
 *   COX_TIMEOUT: a worker did not attach in time
 *   -errno
 */
COX_PUBLIC int cox_executor_start(const struct cox_executor_options *options,
                                  struct cox_executor **ret_executor, struct cox_error *err);
/* Stops the group: requests in flight complete with COX_CLOSED, and pending submits and calls
 * return. Then it publishes MODEL_FINALIZE on every channel, waits finalize_ms, sends SIGTERM,
 * waits term_ms, and sends SIGKILL. Handlers that run, processes in uninterruptible sleep (state D)
 * and cores that are being written add to these times. Idempotent. Not inside a handler or hook
 * (asserted), and not while holding a lock that one of them waits for. Returns the number of
 * workers that had to be signalled. */
COX_PUBLIC uint32_t cox_executor_stop(struct cox_executor *executor);
#ifdef COX_INTERNAL
/* For a process that is about to exit, for example at a second SIGTERM: kills the workers, removes
 * the names and the socket, and does not block. Any thread, also while another one is in stop; not
 * while start or free runs. Afterwards only stop and free may be called. */
void cox_executor_abandon(struct cox_executor *executor);
#endif
/* Stops the group if needed, and frees. NULL-safe, returns NULL. Not inside a handler. */
COX_PUBLIC struct cox_executor *cox_executor_free(struct cox_executor *executor);

/* Instead of a rank: all of them. */
#define COX_RANK_ALL UINT32_MAX

/* Replaces a dead rank while the others live and keep their state. The new process gets new wakeups
 * and slots in every channel, and a new incarnation: late replies of the dead process are ignored.
 * Requests that ask the rank are refused with COX_PEER_DEAD until it has attached. The caller then
 * sends what the model needs (init, the live sequences): a step on a base that the rank lacks gets
 * the reply COX_STALE. In groups of external workers this call starts no process. It opens the rank
 * for attach and waits for a worker; on timeout err says how to start one. Blocks until the rank
 * has attached, or until deadline_ns. Any thread; not inside a handler or hook. On failure the rank
 * stays dead, and the call may be repeated.
 *
 * COX_RANK_ALL: ends every worker and starts all of them again. Name, control socket and sequence
 * numbers continue. For legacy groups, and for models whose ranks cannot admit a replacement.
 * Requests in flight end with COX_PEER_DEAD. External workers are asked to exit, and the call waits
 * for new ones. Legacy workers are not waited for. On failure some ranks are dead.
 * Returns
 *   0: also if the one rank is alive; then nothing is done
 *   COX_BUSY: another thread replaces the rank, or start has not returned
 *   COX_UNSUPPORTED: one rank of legacy workers
 *   COX_INVALID: no such rank
 *   COX_DEADLOCK: inside a handler or hook
 *   COX_CLOSED: the group stops
 *   COX_TAKEN: another coordinator has taken the ranks over (nodes.h)
 *   COX_EXEC_FAILED: the program cannot be executed
 *   COX_PEER_DEAD: the new process ended before it attached
 *   COX_TIMEOUT: it did not attach in time
 *   COX_CORRUPT: the process that attached is not the one that was started
 *   COX_DENIED: the process that attached is not the one that was started
 *   -errno
 */
COX_PUBLIC int cox_executor_restart(struct cox_executor *executor, uint32_t rank,
                                    uint64_t deadline_ns, struct cox_error *err);

/* Kills the process of a rank with SIGKILL, also if it is stopped; the death is then handled like
 * any other. Does not wait.
 * Returns
 *   0: also if it is dead already
 *   COX_INVALID: no such rank
 *   COX_UNSUPPORTED: no process has attached as this rank
 *   -errno
 */
COX_PUBLIC int cox_executor_kill(struct cox_executor *executor, uint32_t rank,
                                 struct cox_error *err);
#ifdef COX_INTERNAL
/* As in struct cox_executor_status, of which each is a part. */
const char *cox_executor_name(const struct cox_executor *executor);
const char *cox_executor_socket(const struct cox_executor *executor);
uint32_t cox_executor_rank_count(const struct cox_executor *executor);
bool cox_executor_legacy(const struct cox_executor *executor);
pid_t cox_executor_pid(const struct cox_executor *executor, uint32_t rank);
size_t cox_executor_request_size_max(const struct cox_executor *executor,
                                     enum cox_channel_id channel);

/* Counts what clients hold at the control socket (control_socket.h). Any thread. False: there is no
 * control socket, or it is closed. */
struct cox_control_socket_counts;
/* Copies the flight recorder of a rank, or COX_RECORDER_COORDINATOR, into cox_recorder_block_size
 * bytes (recorder.h). That of a rank elsewhere is sent by its node, until deadline_ns. Any thread.
 * Returns
 *   0
 *   COX_NOT_FOUND: nothing is recorded there
 *   of a rank elsewhere, as recorder in transport.h
 */
int cox_executor_recorder(struct cox_executor *executor, uint32_t rank, void *copy,
                          uint64_t deadline_ns, struct cox_error *err);
bool cox_executor_socket_counts(struct cox_executor *executor,
                                struct cox_control_socket_counts *ret_counts);
/* As cox_server_take_name. */
int cox_executor_take_name(struct cox_executor *executor, const char *name, struct cox_error *err);
/* The process that serves the rank. */
pid_t cox_executor_serving_pid(const struct cox_executor *executor, uint32_t rank);
/* The node where a rank is, or was last. Returns false, and "": it is on this machine, or has not
 * been started. */
bool cox_executor_node(struct cox_executor *executor, uint32_t rank, char *buffer,
                       size_t buffer_size);
/* taken_over of its transport. */
int cox_executor_taken_over(struct cox_executor *executor, struct cox_error *err);
#endif

/* Sets the handler of an asynchronous channel (execute or transfer), in place of the one that it
 * has. On return that one is not running and will not be called again. Inside that handler this
 * holds once it returns.
 * Returns
 *   0
 *   COX_INVALID: no handler, or another channel
 *   COX_STATE: the host collects (options.collect)
 *   COX_BUSY: the channel has this handler with this context already
 *   COX_DEADLOCK: inside a handler or hook, while another thread runs a handler that may wait for
 *     this one
 */
COX_PUBLIC int cox_executor_set_handler(struct cox_executor *executor, enum cox_channel_id channel,
                                        cox_completion_fn handler, void *context);

/* Collects completions of the execute or transfer channel on the calling thread, in a group that
 * was started with options.collect. Blocks until there is at least one, or until deadline_ns
 * (absolute; 0: does not block). Returns those that are ready, oldest request first, at most
 * count_max of them. An array of `depth` has room for all.
 *
 * Ownership: ret_completions is the caller's. What the completions point to is lent until the next
 *   call for the same channel, or free.
 * Threads: any, one at a time per channel; not inside the handler of a call, nor inside a hook.
 *
 * Other threads may use cox_executor_call meanwhile: the thread that waits gathers for all of them
 * and runs their handlers. Deadlines expire, and deaths end requests, only while some thread
 * collects or calls. After stop the requests that were in flight can be collected; their status is
 * COX_CLOSED. submit returns COX_FULL until the completion of the request `depth` numbers before is
 * collected.
 *
 * Returns
 *   0: *ret_count is at least 1
 *   COX_TIMEOUT: none before the deadline
 *   COX_CLOSED: the group has stopped, and everything is collected
 *   COX_BUSY: another thread collects this channel
 *   COX_STATE: the group was started without options.collect
 *   COX_DEADLOCK: inside a handler or hook
 *   COX_INVALID: another channel, or a count_max of 0
 */
COX_PUBLIC int cox_executor_completions(struct cox_executor *executor, enum cox_channel_id channel,
                                        struct cox_completion *ret_completions, uint32_t count_max,
                                        uint64_t deadline_ns, uint32_t *ret_count,
                                        struct cox_error *err);

/* Gives the memory of a reply that came out of line, result->bytes, to the caller, which frees it
 * with cox_executor_free_reply. result: of a completion that is lent. Returns false if it is not
 * given, because the reply fitted its slot, or was given already: then it stays lent. */
COX_PUBLIC bool cox_executor_take_reply(struct cox_executor *executor, enum cox_channel_id channel,
                                        const struct cox_rank_result *result);
/* Any thread, also after the group has ended. Some memory is kept for later replies, which saves
 * them fresh pages: at most 64 MiB in a process, while it has a group. NULL: nothing. */
COX_PUBLIC void cox_executor_free_reply(void *bytes);

/* Creates, at the first call, an fd for poll, epoll or an event loop, in a group that was started
 * with options.collect. The fd is readable when the channel may have completions to collect. The
 * host then calls cox_executor_completions with a deadline of 0, until it returns COX_TIMEOUT or
 * less than count_max completions; that also makes the fd unreadable. The host does not read the
 * fd.
 *
 *   poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, -1);
 *   r = cox_executor_completions(executor, channel, completions, depth, 0, &count, &err);
 *
 * Replies, deadlines, deaths and stop make it readable. It may be readable although there is no
 * completion yet (COX_TIMEOUT): after the reply of each rank in a named group, or of the last rank
 * in a sealed one; every 50 ms while requests are in flight; once after the last request. An idle
 * group causes no wakeup. If the host does not collect, deadlines do not expire.
 *
 * Cost: from the first call on, a rank writes to an eventfd after a reply. Without a call, each
 * rank has an eventfd but makes no additional system call.
 *
 * Ownership: the executor owns the fd, which is the same at each call. Do not close it, and remove
 *   it from the event loop before free.
 * Blocks: nothing.
 *
 * Returns
 *   0
 *   COX_STATE: the group was started without options.collect
 *   COX_INVALID: another channel than execute or transfer
 *   -errno: no fd, no memory
 */
COX_PUBLIC int cox_executor_fd(struct cox_executor *executor, enum cox_channel_id channel,
                               int *ret_fd, struct cox_error *err);

struct cox_submit_options {
    /* set by COX_SUBMIT_OPTIONS_INIT (base.h) */
    size_t size;
    enum cox_gather gather;
    /* Submit only. If the request ends before some ranks have replied (COX_TIMEOUT, an error of
     * another rank), submit returns COX_LATE until each of these ranks has replied or is dead. Then
     * the channel accepts requests again, and a second completion with status COX_LATE follows. No
     * second completion follows after stop. */
    bool report_late;
    /* absolute, CLOCK_MONOTONIC; required, COX_DEADLINE_NEVER is allowed */
    uint64_t deadline_ns;
    /* NULL: every rank */
    const struct cox_rank_set *asked;
    void *request_context;
    /* epoch of the group that the request was made for (cox_executor_epoch); in another one it is
     * refused with COX_STALE; 0: any */
    uint64_t epoch;
};
#define COX_SUBMIT_OPTIONS_INIT COX_OPTIONS_INIT(struct cox_submit_options)

/* The epoch of the group, greater than 0. It changes after each restart of a rank and with every
 * init, that is whenever ranks may have lost state. Any thread. */
COX_PUBLIC uint64_t cox_executor_epoch(const struct cox_executor *executor);

/* Packs and publishes a request on the channel of its type. The completion goes to the registered
 * handler, or to the host that collects. A request without a reply (gather NONE) has no completion;
 * ret_sequence may then be NULL.
 * Returns
 *   0
 *   COX_FULL: depth requests are in flight, or a rank still reads the frame; an init: a step is in
 *     flight
 *   COX_LATE: a rank has not yet replied to a request that has ended; err names rank and sequence
 *   COX_PEER_DEAD: an asked rank is dead
 *   COX_STALE: options->epoch is not the present epoch
 *   COX_TOO_LARGE: larger than the frame and than the limit for large payloads; err has the sizes
 *   COX_NO_SPACE: no memory for a large payload
 *   COX_STATE: no handler is registered; or a step while the engine is paused (a recovery command
 *     runs, or the state is PAUSE or READY)
 *   COX_CLOSED: the group stops
 *   COX_INVALID: the options; no such type, or a type that submit does not accept; or a string of
 *     the request is not UTF-8, err names field and byte
 *   -errno: the handle of a large payload could not be made
 */
COX_PUBLIC int cox_executor_submit(struct cox_executor *executor,
                                   const struct Coxswain__ExecuteRequest *request,
                                   const struct cox_submit_options *options, uint64_t *ret_sequence,
                                   struct cox_error *err);
/* The same for opaque bytes of the caller, on the execute channel; workers reply to them in their
 * opaque callback. Returns as cox_executor_submit. */
COX_PUBLIC int cox_executor_submit_opaque(struct cox_executor *executor, const void *bytes,
                                          size_t size, const struct cox_submit_options *options,
                                          uint64_t *ret_sequence, struct cox_error *err);
/* The same for bytes that lie in several places, one after the other, so that the caller need not
 * join them. */
COX_PUBLIC int cox_executor_submit_parts(struct cox_executor *executor, const struct iovec *parts,
                                         size_t part_count,
                                         const struct cox_submit_options *options,
                                         uint64_t *ret_sequence, struct cox_error *err);

/* Submits on any two-way channel, waits while submit would return COX_FULL or COX_LATE, and waits
 * for the completion. handler (may be NULL) gets the completion on the calling thread, before call
 * returns. err gets the completion's text. A handler of the channel that runs long does not hold
 * the call up: while the response thread is inside it, the calling thread gathers the replies. So a
 * call may return before the handlers of earlier requests have run.
 * Returns
 *   the completion's status
 *   what cox_executor_submit returns, except COX_FULL and COX_LATE
 *   COX_TIMEOUT: also when COX_FULL or COX_LATE lasted until the deadline
 *   COX_DEADLOCK: inside a handler or hook
 */
COX_PUBLIC int cox_executor_call(struct cox_executor *executor,
                                 const struct Coxswain__ExecuteRequest *request,
                                 const struct cox_submit_options *options,
                                 cox_completion_fn handler, void *handler_context,
                                 struct cox_error *err);
/* The same for opaque bytes of the caller. */
COX_PUBLIC int cox_executor_call_opaque(struct cox_executor *executor, const void *bytes,
                                        size_t size, const struct cox_submit_options *options,
                                        cox_completion_fn handler, void *handler_context,
                                        struct cox_error *err);

#ifdef COX_INTERNAL
void cox_executor_stats(struct cox_executor *executor, enum cox_channel_id channel,
                        struct cox_channel_stats *ret_stats);
#endif

/* ---- status, for display ---- */

enum cox_rank_liveness {
    COX_LIVENESS_ALIVE = 0,
    COX_LIVENESS_DEAD,
    COX_LIVENESS_LEFT, /* the rank has left the group, its process lives */
    /* the rank is being replaced and has not attached; pid 0: no process has connected yet */
    COX_LIVENESS_ABSENT,
};

/* What a rank reports of itself on one channel. */
struct cox_rank_channel_status {
    /* false: a legacy rank, which reports nothing */
    bool known;
    /* 0 idle, 1 taken, 2 running, 3 replying; any other value is invalid */
    uint32_t state;
    /* of the request that the state is about */
    uint64_t sequence;
    /* time since the state changed; 0: it never changed, or the rank's clock value is invalid */
    uint64_t age_ns;
};

struct cox_rank_status {
    /* of the process that was started; with a wrapper (sh -c, numactl) that of the wrapper */
    pid_t pid;
    /* the process that serves the rank, if it is another one */
    pid_t serving_pid;
    uint32_t incarnation;
    enum cox_rank_liveness liveness;
    /* stopped by a signal or a debugger */
    bool stopped;
    /* processor time of serving_pid so far; 0: DEAD, or unknown */
    uint64_t cpu_ns;
    /* memory of serving_pid that is resident, shared pages included; 0: DEAD, or unknown */
    uint64_t resident_bytes;
    /* deaths of its processes, replacements included, except those ended by stop */
    uint32_t deaths;
    /* deaths that were followed by a process that attached */
    uint32_t restarts;
    /* replies on all channels that were errors or invalid; of these, COX_STALE; and those that came
     * after their request had ended */
    uint64_t errors, stale_replies, late_replies;
    /* Of steps: their time in the callback, as the rank reports it, and of this the time with other
     * ranks (cox_worker_tell_group_time), and what of that was waiting for them. */
    struct cox_phase_stats execute;
    uint64_t group_ns, group_wait_ns;
    /* DEAD: the signal that killed it; 0: it exited, or unknown */
    int32_t signal;
    /* DEAD: -1 if unknown or killed */
    int32_t exit_status;
    /* DEAD, LEFT: how it ended, as text */
    char death[512];
    /* DEAD: the last lines of its output, newest last. Otherwise those of the rank's last process
     * that died. */
    char last_lines[2048];
    /* The last failure, as text: how a process of the rank ended, a reply that was an error or
     * invalid, or a fault that the rank reported. Kept across restarts. Empty: there was none. */
    char last_error[512];
    uint64_t last_error_age_ns;
    struct cox_rank_channel_status channels[COX_TWO_WAY_COUNT];
    /* the node where it runs (transport.h); "": this machine */
    char node[48];
    /* why it may not answer now: it has not taken a request that others have, or its process is
     * frozen, or in the kernel, or its node is suspect; "": nothing is known */
    char trouble[160];
};

struct cox_executor_status {
    /* lent until free */
    const char *name;
    /* path of the control socket, lent until free; NULL: the group has none */
    const char *socket;
    /* how ranks attach; static storage */
    const char *attach;
    /* static storage */
    const char *engine_state;
    /* A pause has failed but may have reached some ranks: engine_state is unchanged, but those
     * ranks refuse steps. Until a pause or start succeeds, start is legal in any state. */
    bool partially_paused;
    uint32_t rank_count;
    /* requests in flight per channel, at most */
    uint32_t depth;
    /* cox_executor_epoch */
    uint64_t epoch;
    /* differs between groups, also between groups started under the same name */
    uint32_t instance;
    uint64_t uptime_ns;
    /* processor time of this process so far; 0: unknown */
    uint64_t cpu_ns;
    /* how long waits spin before they block; 0: they do not spin */
    uint32_t spin_ns;
    /* options.legacy_workers: the ranks have no epochs, links or shared weights */
    bool legacy;
    bool stopping;
    /* sums over all ranks; 0 if no ranks are read */
    uint64_t deaths, restarts;
    /* The last fault that was reported without a rank (legacy workers). Empty: there was none. */
    char unknown_error[512];
    uint64_t unknown_error_age_ns;
    struct {
        /* last sequence that was published */
        uint64_t published;
        /* every request up to here has ended */
        uint64_t ended;
        uint32_t in_flight;
        /* live ranks that have not replied to a request that has ended */
        struct cox_rank_set late;
        /* of the largest request that fits a frame; a larger one is sent out of line */
        size_t request_size_max;
        struct cox_channel_stats stats;
    } channels[COX_TWO_WAY_COUNT];
};

/* Reads the shared state and counters. It asks no worker, and takes no lock that is held during a
 * wait: it returns at once whatever state the group is in. From the return of start until free. Any
 * thread, also inside a handler or hook. ret_ranks: rank_count of them; NULL: no ranks are read.
 * Values that ranks report are not checked. */
COX_PUBLIC void cox_executor_read_status(struct cox_executor *executor,
                                         struct cox_executor_status *ret_status,
                                         struct cox_rank_status *ret_ranks);
#ifdef COX_INTERNAL
/* "idle", "taken", ...; "alive", "dead", ...; "unknown" outside. Static storage. */
const char *cox_rank_state_name(uint32_t state);
const char *cox_rank_liveness_name(uint32_t liveness);
#endif

#ifdef __cplusplus
}
#endif

#endif
