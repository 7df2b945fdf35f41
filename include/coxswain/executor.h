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
#ifndef COX_EXECUTOR_H
#define COX_EXECUTOR_H

#include <coxswain/base.h>

#include <sys/types.h>
#include <sys/uio.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * ==== completion: the result of a request (the outcome on every rank it asked, the payload, the
 * times) and the counters of a channel. The types that the executor gives its caller.
 *
 * Threads: plain values. A completion is lent to the handler that gets it (executor.h).
 */

struct Coxswain__ExecuteResponse;

/* Selects the ranks whose payload a completion carries. With every policy the completion has the
 * status of every asked rank, and the request ends at the first error or death of an asked rank. */
enum cox_gather {
    COX_GATHER_RANK0 = 0,   /* payload of the lowest asked rank */
    COX_GATHER_ALL,         /* payload of every asked rank */
    COX_GATHER_FIRST_ERROR, /* no payload */
    COX_GATHER_NONE,        /* for requests without a reply: no completion */
};

enum cox_outcome {
    COX_OUTCOME_NOT_ASKED = 0,
    COX_OUTCOME_OK,
    COX_OUTCOME_ERROR, /* the rank replied with an error, or with invalid bytes */
    COX_OUTCOME_DEAD,
    COX_OUTCOME_LATE, /* the rank had not replied when the request ended */
};

struct cox_rank_result {
    enum cox_outcome outcome;
    /* ERROR: the rank's status, or an enum cox_status if its reply was refused */
    int32_t code;
    /* ERROR, DEAD, LATE: the reason, never NULL */
    const char *text;
    /* the process that serves the rank, which may be a child of the one that was started */
    pid_t pid;
    /* DEAD: the signal that killed it; 0: it exited, or unknown */
    int signal;
    /* DEAD: -1 when unknown or killed */
    int exit_status;
    /* the rank had taken the request (a legacy rank: had returned the frame) */
    bool taken;
    /* LATE: time since the rank last stored a state on this channel, or since publication */
    uint64_t silent_ns;
    /* payload, if the policy asks for it; ERROR: what the rank has added to its text
     * (cox_worker_reply_error), NULL: nothing */
    const void *bytes;
    size_t size;
    /* the same unpacked; NULL for opaque requests */
    const struct Coxswain__ExecuteResponse *response;
};

struct cox_completion {
    /* number of the request on its channel */
    uint64_t sequence;
    enum cox_channel_id channel;
    /* ExecuteType or COX_TYPE_OPAQUE */
    uint32_t type;
    /* 0: every asked rank replied ok; COX_TIMEOUT, COX_PEER_DEAD, COX_REJECTED, COX_CORRUPT,
     * COX_STALE, COX_ABORTED, COX_DIVERGED, COX_CLOSED. COX_LATE: the second completion of a
     * request (options.report_late). A rank that was late then is OK (its reply was dropped) or
     * DEAD; all others are NOT_ASKED. */
    int status;
    /* if status is not 0: the rank, the reason and the time */
    const char *text;
    uint32_t rank_count;
    /* rank_count of them */
    const struct cox_rank_result *ranks;
    /* RANK0: the result with the payload; else NULL */
    const struct cox_rank_result *payload;
    /* as given to submit */
    void *request_context;
    /* CLOCK_MONOTONIC */
    uint64_t submitted_ns, published_ns, completed_ns;
};

typedef void (*cox_completion_fn)(void *context, const struct cox_completion *completion);

/* The phases of a request. */
enum cox_phase {
    COX_PHASE_QUEUE = 0, /* submit or call entered -> published; a call may wait for a frame */
    COX_PHASE_RANKS,     /* published -> handed over, with every reply copied and unpacked */
    COX_PHASE_HANDLER,   /* handed over -> handler returned */
    COX_PHASE_TOTAL,     /* the three together */
    COX_PHASE_COUNT,
};

/* The bounds of cox_phase_stats.below: bound i is 2^(10 + i) ns, from 1 us to 69 s. */
#define COX_PHASE_BOUND_COUNT 27
#define COX_PHASE_BOUND_NS(i) (UINT64_C(1024) << (i))

/* Times of all completions whose handler has returned, also of those that failed. The error of each
 * value is at most 6.25 %, and that of the sum less. */
struct cox_phase_stats {
    uint64_t count;
    /* 0 when count is */
    uint64_t p50_ns, p99_ns, sum_ns;
    /* how many were shorter than each bound; exact */
    uint64_t below[COX_PHASE_BOUND_COUNT];
};

struct cox_channel_stats {
    /* requests published */
    uint64_t submitted;
    /* completions handed over */
    uint64_t completed;
    /* of these, with a status other than 0 */
    uint64_t failed;
    uint64_t timeouts;
    /* steps whose ranks disagreed (COX_DIVERGED) */
    uint64_t divergences;
    /* replies that came after their request had ended; dropped */
    uint64_t late_replies;
    /* wakeups sent again because a rank had not taken its frame */
    uint64_t rewakes;
    /* times a collector woke up */
    uint64_t wakeups;
    /* waits of a collector, for replies or work, that ended while spinning */
    uint64_t spins;
    /* bytes of published requests; each counts once, however many ranks read it */
    uint64_t request_bytes;
    /* bytes of copied replies, of all ranks; late ones are dropped without being read */
    uint64_t reply_bytes;
    /* those of them that were sent out of line: they did not fit their frame or slot */
    uint64_t large_requests;
    uint64_t large_request_bytes;
    uint64_t large_replies;
    uint64_t large_reply_bytes;
    /* bytes of large requests that a rank may still read */
    uint64_t large_held_bytes;
    struct cox_phase_stats phases[COX_PHASE_COUNT];
    /* Of requests that ended with COX_PEER_DEAD: since the kernel reported the end of the process,
     * or since the request was published, if that was later. Of those that ended with COX_TIMEOUT:
     * how long the rank that was silent longest had been silent. */
    struct cox_phase_stats death_detection, hang_detection;
};

/* ==== executor ==== */

struct cox_executor;
struct cox_executor_nodes;
struct Coxswain__ExecuteRequest;

/* The options of a group. 0 or NULL means the default everywhere, except where it says required. */

/* The worker processes. */
struct cox_executor_workers {
    /* required: argv of every worker, NULL-terminated */
    const char *const *command;
    /* A worker learns its rank from its environment alone. By default command also gets flags with
     * the same values. */
    bool environment_only;
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
     * (docs/architecture.md); -1: this rank has none. Borrowed until free has
     * returned. NULL: command is executed. */
    const int *fork_server_fds;
    /* Starts no worker: workers are started by other means and connect to the control socket
     * (coxswain-worker --socket PATH). start waits for all of them, without a limit unless
     * times.start_timeout_ms sets one. command is not used. */
    bool external;
    /* The workers are MindIE-LLM's, which do not use the shared state; depth is 1. */
    bool legacy;
};

/* The memory that coordinator and workers share. */
struct cox_executor_memory {
    /* how workers get it; default named */
    enum cox_attach attach;
    /* sealed attach: uses huge pages, if any are free */
    bool huge_pages;
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
     * returned. Legacy workers do not support this. refuse_large_payloads: such requests and
     * replies are refused as too large. */
    bool refuse_large_payloads;
    uint64_t large_payload_size_max;
    uint64_t reply_size_max;
};

enum cox_socket_use {
    /* without a usable runtime directory, the group logs this and runs without the socket (except
     * with external workers) */
    COX_SOCKET_IF_POSSIBLE = 0,
    COX_SOCKET_REQUIRED, /* start fails if the control socket cannot be opened */
    COX_SOCKET_NONE,     /* start opens none; not with external workers */
};

/* The control socket. */
struct cox_executor_socket {
    enum cox_socket_use use;
    /* runtime directory; NULL: $COXSWAIN_RUNTIME_DIR, $XDG_RUNTIME_DIR/coxswain, or
     * /tmp/coxswain-<uid>; read by start */
    const char *runtime_dir;
};

/* Times, in milliseconds. */
struct cox_executor_times {
    /* default 60,000 */
    uint64_t start_timeout_ms;
    /* time that stop waits for workers to exit by themselves; default 3,000 */
    uint64_t finalize_ms;
    /* time that stop then waits after SIGTERM; default 2,000 */
    uint64_t term_ms;
};

enum cox_recorder_use {
    COX_RECORDER_ALWAYS = 0,
    COX_RECORDER_NONE, /* neither the coordinator nor the ranks record what they do */
};

/* When the stacks of ranks are gathered. cox_executor_stacks works in any case. */
enum cox_stacks_use {
    /* by themselves, when a request passes its deadline, when ranks diverge or are stuck at stop */
    COX_STACKS_AT_FAILURES = 0,
    COX_STACKS_ON_REQUEST,
};

/* The flight recorders (docs/tracing.md). */
struct cox_executor_recorder {
    enum cox_recorder_use use;
    enum cox_stacks_use stacks;
    /* files of crash_dir also have the bytes of requests that were under way */
    bool crash_contents;
    /* A directory for what the group did when something failed: after a death, a timeout, a
     * divergence or a failed start a file is written there, at most 16 for a name. The recorders
     * are files there too, removed when the group stops. Created if it does not exist. NULL: none.
     */
    const char *crash_dir;
};

/* Functions that the group calls; NULL: not called, except where another default is given. */
struct cox_executor_hooks {
    void *context;
    /* log lines of the group; it has a context of its own */
    struct cox_log log;
    /* A line of a worker's output, without the newline. On the supervisor thread. NULL: it is
     * written to this process's standard output or error, as "rank R: TEXT", unless nobody reads.
     */
    void (*line)(void *context, uint32_t rank, bool is_stderr, const char *text);
    /* A worker reported a fault outside any reply. rank is -1 if unknown: workers of MindIE-LLM do
     * not report their rank. NULL: logged. On the error thread. */
    void (*fault)(void *context, int32_t rank, const char *text);
    /* From now on external workers can connect to this control socket. Called once, inside start.
     */
    void (*waiting)(void *context, const char *name, const char *control_socket);
    /* Reports the ranks that start still waits for: first all of them, then after each change. On
     * the thread of start. */
    void (*attaching)(void *context, const struct cox_rank_set *missing);
    /* Called every 50 ms while start waits for ranks; true ends start with COX_CLOSED. NULL: never.
     */
    bool (*cancelled)(void *context);
    /* A command client has connected to the control socket and was accepted. The hook takes
     * ownership of fd, a blocking stream socket. If it does not return 0, fd is not taken, and the
     * client is refused with the text of err. On the control socket's thread: it must not block.
     * NULL: command clients are refused. */
    int (*control)(void *context, int fd, struct cox_error *err);
    /* A worker died. NULL: logged. On the supervisor thread, or inside start for deaths during
     * start. */
    void (*death)(void *context, uint32_t rank, const char *text);
};

struct cox_executor_options {
    /* set by COX_EXECUTOR_OPTIONS_INIT (base.h) */
    size_t size;
    /* the group; NULL: "<pid>_<counter>" */
    const char *name;
    /* required */
    uint32_t rank_count;
    /* requests in flight per channel, 1 to 32; default 4 */
    uint32_t depth;
    /* whether waits spin before they block; default auto */
    enum cox_spin spin;
    /* The host collects completions on threads of its own (cox_executor_completions). There are no
     * response threads and no handlers. Not with legacy workers. */
    bool collect;
    struct cox_executor_workers workers;
    struct cox_executor_memory memory;
    struct cox_executor_socket socket;
    struct cox_executor_times times;
    struct cox_executor_recorder recorder;
    struct cox_executor_hooks hooks;
    /* The ranks are on several machines (below): workers.command, workers.devices and memory.attach
     * are not used, and no worker can connect here. rank_count may be 0. Borrowed until start has
     * returned. NULL: on this machine. */
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
 *   COX_TAKEN: another coordinator has taken the ranks over
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
    /* the node where it runs; "": this machine */
    char node[48];
    /* why it may not answer now: it has not taken a request that others have, or its process is
     * frozen, or in the kernel, or its node is suspect; "": nothing is known */
    char trouble[160];
};

/* The oldest request of a channel that has not ended. */
struct cox_oldest_status {
    /* 0: all have ended */
    uint64_t sequence;
    /* from submit to its deadline; 0: it has none */
    uint64_t limit_ns;
    /* How long it has been published, and no rank has changed its state on the channel. */
    uint64_t still_ns;
    /* live ranks that have not replied to it */
    struct cox_rank_set owing;
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
    uint32_t incarnation;
    uint64_t uptime_ns;
    /* processor time of this process so far; 0: unknown */
    uint64_t cpu_ns;
    /* how long waits spin before they block; 0: they do not spin */
    uint32_t spin_ns;
    /* options.workers.legacy: the ranks have no epochs, links or shared weights */
    bool legacy;
    /* ranks know steps as nested messages alone */
    bool nested_steps;
    /* Steps in flight, at most: depth, or 1 where ranks cannot compute tokens that the coordinator
     * does not know yet. */
    uint32_t flight_max;
    bool stopping;
    /* sums over all ranks; 0 if no ranks are read */
    uint64_t deaths, restarts;
    /* The last fault that was reported without a rank (legacy workers). Empty: there was none. */
    char unknown_error[512];
    uint64_t unknown_error_age_ns;
    struct cox_executor_channel_status {
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
        struct cox_oldest_status oldest;
    } channels[COX_TWO_WAY_COUNT];
};

/* Reads the shared state and counters. It asks no worker, and takes no lock that is held during a
 * wait: it returns at once whatever state the group is in. From the return of start until free. Any
 * thread, also inside a handler or hook. ret_ranks: rank_count of them; NULL: no ranks are read.
 * Values that ranks report are not checked. */
COX_PUBLIC void cox_executor_read_status(struct cox_executor *executor,
                                         struct cox_executor_status *ret_status,
                                         struct cox_rank_status *ret_ranks);

/* Where a rank is. */
struct cox_rank_stacks {
    uint32_t rank;
    /* of the process that was read */
    pid_t pid;
    /* how long the rank has been at its request; 0: it is at none, or that is unknown */
    uint64_t age_ns;
    /* In one line, without folders: where the thread that serves requests is, and its state, or why
     * that is not known. */
    const char *summary;
    /* Lines: each thread with its state, its frames of Python and its native frames; and what could
     * not be had, with the reason. 256 KiB at most. Paths of the machine are in it, values of
     * variables never. */
    const char *text;
};

struct cox_stacks {
    uint64_t taken_ns;
    uint32_t count;
    struct cox_rank_stacks *ranks;
    /* all summaries in one sentence: ranks that are alone at their place first */
    const char *paragraph;
};

/* Reads where all threads of ranks are. Those of nodes are read there, within 1 s; of a node that
 * does not reply the texts say so. Each rank is stopped for some milliseconds, 50 at most,
 * and goes on; no signal is sent. It works while all ranks are stuck: none has to take part. It
 * needs the program coxswain (the package of that name), elfutils for native frames (libdw1), and
 * the right to trace; the text says what is missing. asked: NULL: all ranks.
 * Blocks until deadline_ns, at most for 1 s; where the machine is so busy that this gets no
 * processor, for 3 s, and as long again for each 16 ranks, or as many as there are processors, if
 * that are more. Usually a third of a second. Any thread but those of hooks.
 * Ownership: *ret_stacks is the caller's, for cox_stacks_free.
 * Returns
 *   0: also if nothing of a rank could be read: its text says why
 *   COX_TIMEOUT: another thread gathered until the deadline
 *   -ENOMEM */
COX_PUBLIC int cox_executor_stacks(struct cox_executor *executor, const struct cox_rank_set *asked,
                                   uint64_t deadline_ns, struct cox_stacks **ret_stacks);
/* NULL-safe, returns NULL. */
COX_PUBLIC struct cox_stacks *cox_stacks_free(struct cox_stacks *stacks);

/*
 * ==== nodes: a group over several machines, for options.nodes.
 *
 * The coordinator of such a group is its lead. On each machine an agent (`coxswain node`) starts
 * and serves the ranks of that machine. They meet at a NATS server, with certificates; large
 * payloads and the sums of the ranks go by direct connections. libcoxswain-nodes.so has all that;
 * the executor opens it when options.nodes is set, and no other group needs it.
 *
 * Threads, ownership, blocking: as options of the executor; start waits until every node has come.
 */

#define COX_NODE_NAME_MAX 47
/* Nodes of a group, at most. */
#define COX_NODE_COUNT_MAX 64

/* How a process reaches the cluster, and shows who it is. */
struct cox_cluster_access {
    /* "tls://HOST:PORT", several with commas */
    const char *url;
    /* PEM files: the CA, the certificate (CN "lead", or "node-NAME"), its key */
    const char *ca, *certificate, *key;
    /* Without TLS and certificates, for trying things on one machine: all addresses must be
     * loopback. */
    bool insecure_loopback;
};

/* Times, in milliseconds; 0: the default. */
struct cox_node_times {
    /* beats, both ways, where nothing else was sent; default 100 */
    uint64_t beat_ms;
    /* silence after which a node is suspect: it gets no requests; default 300 */
    uint64_t suspect_ms;
    /* silence after which it is dead; default 800 */
    uint64_t dead_ms;
    /* a request that was not acknowledged is asked again; default 150 */
    uint64_t again_ms;
    /* how long agents wait for another lead; default 30,000 */
    uint64_t lead_grace_ms;
};

/* A value that must be the same on the lead and on every node: a difference is refused at the
 * start, in words. value NULL: the lead has none, and nodes are compared with each other. */
struct cox_node_fact {
    const char *name;
    const char *value;
};

struct cox_executor_nodes {
    /* set by COX_EXECUTOR_NODES_INIT (base.h) */
    size_t size;
    /* required: "a:4,b:4": ranks 0 to 3 are on node a, 4 to 7 on b */
    const char *nodes;
    struct cox_cluster_access access;
    /* "HOST:PORT" where nodes connect; NULL: the address from which the cluster is reached, any
     * port */
    const char *listen;
    struct cox_node_times times;
    const struct cox_node_fact *facts;
    size_t fact_count;
    /* the ranks' memory on their nodes is attached so; default named */
    enum cox_attach attach;
    /* Ranks that run for an earlier lead are not taken over: they end, and others are started.
     * Default false: they go on, with what they have loaded. */
    bool fresh;
    /* 0; for later fields */
    uint8_t reserved[3];
};
#define COX_EXECUTOR_NODES_INIT COX_OPTIONS_INIT(struct cox_executor_nodes)

#ifdef __cplusplus
}
#endif

#endif
