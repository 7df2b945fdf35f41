/*
 * executor: the coordinator side of a group: N worker processes, five channels, requests in,
 * completions out.
 *
 * Threads: any thread may submit and call, except that call is refused (COX_DEADLOCK) inside a
 *   handler. Handlers run on the response thread of their channel, one at a time; submit from
 *   inside a handler is fine and never blocks. start and free from one thread; stop from any other
 *   than those of handlers and hooks, before free.
 * Ownership: requests are packed before submit returns and stay the caller's. A completion and all
 *   it points to are lent until the handler returns.
 * Blocks: submit never (COX_FULL instead), call until its deadline, start until every rank attached
 *   or start_timeout_ms, stop until finalize_ms + term_ms have passed at most.
 * Exactly once: every submit that returned 0 gets one completion: at the end, at its deadline, at
 *   the first error or death of a rank it asked, or with COX_CLOSED when the group stops.
 * If the process dies: the kernel kills the workers; names exist only while ranks attach (or with
 *   keep_names, or legacy workers), and the next start under the same name removes them.
 */
#ifndef COX_COORDINATOR_EXECUTOR_H
#define COX_COORDINATOR_EXECUTOR_H

#include "../../channel/base/base.h"
#include "../../channel/base/spin.h"
#include "../collector/completion.h"

#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

struct cox_executor;
struct Coxswain__ExecuteRequest;

/* 0 or NULL everywhere means default. */
struct cox_executor_options {
    /* set by COX_EXECUTOR_OPTIONS_INIT (base.h) */
    size_t size;
    /* of the group; NULL: "<pid>_<counter>" */
    const char *name;
    /* required */
    uint32_t rank_count;
    /* required: argv of every worker, NULL-terminated */
    const char *const *command;
    /* do not append the rank flags to command; the environment has all of it */
    bool no_flags;
    /* rank_count of them; NULL: device = rank */
    const int32_t *devices;
    /* requests in flight per channel, 1 to 32; default 4 */
    uint32_t depth;
    /* whether who waits looks before it sleeps; channel/base/spin.h; default auto */
    enum cox_spin spin;
    /* how workers come to the group's memory; default named */
    enum cox_attach attach;
    /* sealed: on huge pages, if there are any */
    bool huge_pages;
    /* None is started: all log on at the control socket by themselves (coxswain-worker --socket
     * PATH), and start waits for them, without a limit unless start_timeout_ms says one. command is
     * not used.
     */
    bool external_workers;
    /* The host collects completions itself, on threads of its own (cox_executor_completions): there
     * are no response threads and no handlers. Not with legacy workers. */
    bool collect;
    /* ranks that know nothing of the control region; depth 1 */
    bool legacy_workers;
    /* leave names in /dev/shm while the group lives */
    bool keep_names;
    /* bytes of a channel's request region, all frames together */
    uint64_t request_size[COX_CHANNEL_COUNT];
    /* bytes of a channel's response region, all slots together */
    uint64_t response_size[COX_CHANNEL_COUNT];
    /* What is larger than its frame or slot goes in memory of its own, made when it is needed and
     * not before: requests up to large_payload_size_max bytes (default 2 GiB; a message has 2 GiB -
     * 1 at most), replies of one rank up to reply_size_max (default 1 GiB + 64 MiB). The
     * coordinator has a private copy of every such reply until its handler has returned. Legacy
     * workers know nothing of it. no_large_payloads: it is refused as too large. */
    bool no_large_payloads;
    uint64_t large_payload_size_max;
    uint64_t reply_size_max;
    /* NULL: $XDG_RUNTIME_DIR/coxswain or /tmp/coxswain-<uid>; only during start */
    const char *runtime_dir;
    /* no socket; not with sealed attach or external workers */
    bool no_socket;
    /* Without one start fails; otherwise, where this user has no place for it, that is logged, and
     * the group goes without (not with sealed attach or external workers). */
    bool need_socket;
    /* default 60,000 */
    uint64_t start_timeout_ms;
    /* how long stop waits for workers to leave by themselves; default 3,000 */
    uint64_t finalize_ms;
    /* and then, after SIGTERM; default 2,000 */
    uint64_t term_ms;
    struct cox_log log;
    void *hook_context;
    /* A line that a worker wrote, without newline. NULL: dropped. On the supervisor thread. */
    void (*line)(void *hook_context, uint32_t rank, bool is_stderr, const char *text);
    /* A worker reported a fault outside any reply. rank is -1 where it is unknown: the workers of
     * MindIE-LLM do not say which rank they are. NULL: logged. On the error thread. */
    void (*fault)(void *hook_context, int32_t rank, const char *text);
    /* External workers can log on from now on, at this control socket. Called once, inside start.
     * NULL: nobody is told. */
    void (*waiting)(void *hook_context, const char *name, const char *control_socket);
    /* The ranks that have not attached yet, while start waits for them: at first all, then whenever
     * there are fewer. On the thread of start. NULL: nobody is told. */
    void (*attaching)(void *hook_context, const struct cox_rank_set *missing);
    /* Asked every 50 ms while start waits for the ranks: true ends it with COX_CLOSED. NULL: never.
     */
    bool (*cancelled)(void *hook_context);
    /* A command has come in at the control socket and was accepted: fd, a blocking stream socket,
     * is given; not 0: it is refused with err's text, and fd is not taken. On the control socket's
     * thread: must not block. NULL: commands are refused. */
    int (*control)(void *hook_context, int fd, struct cox_error *err);
    /* A worker died. NULL: logged. On the supervisor thread, or inside start for who died
     * meanwhile. */
    void (*death)(void *hook_context, uint32_t rank, const char *text);
};
#define COX_EXECUTOR_OPTIONS_INIT COX_OPTIONS_INIT(struct cox_executor_options)

/* Creates regions and semaphores, starts the workers, waits until all attached (legacy workers are
 * not waited for: their reply to init tells), removes the names. Nothing is left behind unless 0.
 * err tells which rank and why.
 * Returns
 *   0
 *   COX_INVALID: the options
 *   COX_TAKEN
 *   COX_DENIED
 *   COX_NO_SPACE
 *   COX_EXEC_FAILED
 *   COX_PEER_DEAD: a worker ended before it attached
 *   COX_TIMEOUT: one never attached
 *   -errno
 */
COX_PUBLIC int cox_executor_start(const struct cox_executor_options *options,
                                  struct cox_executor **ret_executor, struct cox_error *err);
/* Finalizes: what is outstanding completes with COX_CLOSED, and whoever is inside a submit or a
 * call comes out; then a message on every channel, finalize_ms, SIGTERM, term_ms, SIGKILL.
 * Idempotent. Not inside a handler or hook (asserted), and not while holding what one waits for.
 * Bounded by the two times once running handlers have returned, a process that the kernel holds
 * (state D) excepted. Returns how many
 * workers had to be signalled. */
COX_PUBLIC uint32_t cox_executor_stop(struct cox_executor *executor);
/* For a process that is about to end at once, as at a second SIGTERM: kills the workers, removes
 * the names and the socket, and waits for nothing. Any thread, also while another one is in stop;
 * not while start or free has not returned. What else may be called afterwards: stop and free. */
COX_PUBLIC void cox_executor_abandon(struct cox_executor *executor);
/* Stops if needed, removes what is left, frees. NULL-safe, returns NULL. Not inside a handler. */
COX_PUBLIC struct cox_executor *cox_executor_free(struct cox_executor *executor);

/* Starts a dead rank again, while the others live and keep what they have: with wakeups of its own,
 * its place in every channel as at the start, and a generation that no late reply of the dead one
 * has. Until it has attached, requests that ask it are refused with COX_PEER_DEAD. What its model
 * needs (init, the live sequences) is the caller's to send; a step on a base that it does not have
 * is replied to with COX_STALE. Blocks until it attached, or deadline_ns. Any thread; not inside a
 * handler or hook. Unless 0 the rank is dead as before, and can be tried again. Of workers that are
 * started by hand none is started: the rank is free for one that logs on, which is waited for, and
 * err says how one comes. Returns
 *   0, also when the rank is alive and nothing is to be done
 *   COX_BUSY: another thread is starting this rank, or start has not returned
 *   COX_UNSUPPORTED: legacy workers, a group of which starts again as a whole
 *     (cox_executor_restart_all)
 *   COX_INVALID: no such rank
 *   COX_DEADLOCK
 *   COX_CLOSED: the group stops
 *   COX_EXEC_FAILED
 *   COX_PEER_DEAD: the new process ended before it attached
 *   COX_TIMEOUT
 *   COX_CORRUPT: what attached is not what was started
 *   COX_DENIED: what attached is not what was started
 *   -errno
 */
COX_PUBLIC int cox_executor_restart(struct cox_executor *executor, uint32_t rank,
                                    uint64_t deadline_ns, struct cox_error *err);

/* Kills a rank's process, whatever it does, stopped ones included; everything else is as after any
 * death. Does not wait.
 * Returns
 *   0, also when it is dead
 *   COX_INVALID: no such rank
 *   COX_UNSUPPORTED: nobody has logged on as it
 *   -errno
 */
COX_PUBLIC int cox_executor_kill(struct cox_executor *executor, uint32_t rank,
                                 struct cox_error *err);
/* Ends every worker and starts all of them again, under the same name, control socket and sequence
 * numbers: the way of legacy groups, and of models whose ranks cannot take a new one among them.
 * What is in flight ends with COX_PEER_DEAD. Blocks until all have attached (legacy: were started),
 * or deadline_ns. Unless 0 some ranks are dead. Hand-started workers are told to leave, and others
 * waited for. Returns as cox_executor_restart. */
COX_PUBLIC int cox_executor_restart_all(struct cox_executor *executor, uint64_t deadline_ns,
                                        struct cox_error *err);

COX_PUBLIC const char *cox_executor_name(const struct cox_executor *executor);
/* Path of the socket that workers and commands come in by; NULL: it has none. Lent until free. */
COX_PUBLIC const char *cox_executor_socket(const struct cox_executor *executor);
/* What clients have caused to be kept at the control socket (control_socket.h). From any thread.
 * False: there is no control socket (any more). */
struct cox_control_socket_counts;
#ifdef COX_INTERNAL
bool cox_executor_socket_counts(struct cox_executor *executor,
                                struct cox_control_socket_counts *ret_counts);
#endif
COX_PUBLIC uint32_t cox_executor_rank_count(const struct cox_executor *executor);
/* Requests in flight per channel, at most. */
COX_PUBLIC uint32_t cox_executor_depth(const struct cox_executor *executor);
/* options.legacy_workers of the group: its ranks know no epochs, links or shared weights. */
COX_PUBLIC bool cox_executor_legacy(const struct cox_executor *executor);
/* The process that was started for the rank; with a wrapper (sh -c, numactl) it is the wrapper. */
COX_PUBLIC pid_t cox_executor_pid(const struct cox_executor *executor, uint32_t rank);

/* Registers the handler of an asynchronous channel (execute or transfer).
 * Returns
 *   0
 *   COX_BUSY: there is one
 *   COX_INVALID: another channel
 *   COX_STATE: the host collects (options.collect)
 */
COX_PUBLIC int cox_executor_register(struct cox_executor *executor, enum cox_channel_id channel,
                                     cox_completion_fn handler, void *context);
/* Puts another handler in place of the present one (or the first one); NULL is COX_INVALID. On
 * return the old one is not running and will not be called again (inside the old handler itself:
 * once it returns).
 * Returns
 *   0
 *   COX_INVALID: no handler, or another channel
 *   COX_STATE: the host collects (options.collect)
 *   COX_DEADLOCK: inside a handler or hook while a handler of another thread runs, which may be
 *     waiting for this one
 */
COX_PUBLIC int cox_executor_replace(struct cox_executor *executor, enum cox_channel_id channel,
                                    cox_completion_fn handler, void *context);

/* Collects completions of the execute or transfer channel on the calling thread, in place of
 * handlers, in a group that was started with options.collect: waits until there is at least one, or
 * until deadline_ns (absolute; 0: takes what is there), and hands out those that are there, oldest
 * request first, count_max at most (depth is enough for all).
 *
 * Ownership: ret_completions is the caller's; what they point to is lent until the next call for
 *   the same channel, or free.
 * Threads: any, one at a time per channel; not inside the handler of a call, nor inside a hook.
 * Calls by other threads may run meanwhile: the thread that waits here gathers for them, and their
 * handlers run on it, or the other way round. Deadlines of requests expire, and deaths end them,
 * while some thread collects or calls. After stop, what was in flight can be collected, as
 * COX_CLOSED. A submit for which no completion was collected from `depth` requests before is
 * COX_FULL.
 *
 * Returns
 *   0: *ret_count is at least 1
 *   COX_TIMEOUT: none until the deadline
 *   COX_CLOSED: the group has been stopped, and everything is collected
 *   COX_BUSY: another thread is collecting this channel
 *   COX_STATE: the group was started without options.collect
 *   COX_DEADLOCK: inside a handler or hook
 *   COX_INVALID: another channel, or a count_max of 0
 */
COX_PUBLIC int cox_executor_completions(struct cox_executor *executor, enum cox_channel_id channel,
                                        struct cox_completion *ret_completions, uint32_t count_max,
                                        uint64_t deadline_ns, uint32_t *ret_count,
                                        struct cox_error *err);

/* An fd for poll, epoll or an event loop, made at the first call: readable when completions of this
 * channel are worth collecting, of a group that was started with options.collect. The host then
 * calls cox_executor_completions with a deadline of 0, until it returns COX_TIMEOUT or less than
 * count_max completions; that also makes the fd unreadable. The host does not read the fd.
 *
 *   poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, -1);
 *   r = cox_executor_completions(executor, channel, completions, depth, 0, &count, &err);
 *
 * It may be readable although there is no completion yet (COX_TIMEOUT): in a named group after the
 * reply of each rank, in a sealed one after the last; up to every 50 ms while requests are in
 * flight; once after the last one. An idle group causes no wakeup. Replies, deadlines, deaths and
 * stop make it readable; without a host that collects, deadlines do not expire.
 *
 * Cost: from the first call on, a rank writes to an eventfd after a reply. A group that never asks
 * for the fd has one eventfd per rank, and no call more.
 *
 * Ownership: the fd is the executor's, and the same at each call: do not close it; remove it from
 *   the event loop before free. Blocks: nothing.
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
    /* Submit only. If the request ends while ranks owe replies (COX_TIMEOUT, an error of another
     * rank), a second completion follows once each of these ranks has replied or is dead. Its
     * status is COX_LATE. From then on the channel takes requests again: until then submit returns
     * COX_LATE. After stop it does not follow. */
    bool report_late;
    /* absolute, CLOCK_MONOTONIC; required, COX_DEADLINE_NEVER is allowed */
    uint64_t deadline_ns;
    /* NULL: every rank */
    const struct cox_rank_set *asked;
    void *request_context;
    /* as cox_executor_life; what was planned in another one is COX_STALE; 0: in any */
    uint64_t life;
};
#define COX_SUBMIT_OPTIONS_INIT COX_OPTIONS_INIT(struct cox_submit_options)

/* Another number, greater than 0, whenever ranks may have forgotten what they were told: after a
 * rank was started again, and with every init. Any thread. */
COX_PUBLIC uint64_t cox_executor_life(const struct cox_executor *executor);

/* Packs and publishes a request on the channel of its type; the completion goes to the registered
 * handler (NONE: no completion, ret_sequence may be NULL).
 * Returns
 *   0
 *   COX_FULL: depth requests are in flight, or a rank still reads the frame; an init: a step is in
 *     flight
 *   COX_LATE: a rank still owes a reply to a request that has ended (err names rank and sequence)
 *   COX_PEER_DEAD: a rank it asks is dead
 *   COX_STALE: options->life is over
 *   COX_TOO_LARGE: over the frame, and over what may go in a block (err has the sizes)
 *   COX_NO_SPACE: no memory for a block
 *   COX_STATE: no handler is registered, or a step while the engine is paused (a recovery command
 *     runs, or the state is PAUSE or READY)
 *   COX_CLOSED: the group stops
 *   COX_INVALID: the options; no such type, or not for submit; or a string of the request is no
 *     UTF-8: err names field and byte, and nothing was sent
 *   -errno: a block cannot be told to others
 */
COX_PUBLIC int cox_executor_submit(struct cox_executor *executor,
                                   const struct Coxswain__ExecuteRequest *request,
                                   const struct cox_submit_options *options, uint64_t *ret_sequence,
                                   struct cox_error *err);
/* The same for bytes of the caller's own, on the execute channel; workers reply them in their
 * opaque callback. Returns as cox_executor_submit. */
COX_PUBLIC int cox_executor_submit_opaque(struct cox_executor *executor, const void *bytes,
                                          size_t size, const struct cox_submit_options *options,
                                          uint64_t *ret_sequence, struct cox_error *err);

/* Submits on any two-way channel, waiting for room, and waits for the completion, which `handler`
 * (may be NULL) sees before call returns; handler runs on the calling or on a response thread. A
 * handler that holds the response thread up from the deadline on is waited for 50 ms: then the call
 * ends with COX_TIMEOUT although the request is under way, and handler is not called. err gets the
 * completion's text.
 * Returns
 *   the completion's status
 *   what cox_executor_submit returns, except COX_FULL and COX_LATE
 *   COX_TIMEOUT: the same, and COX_FULL or COX_LATE lasted until the deadline
 *   COX_DEADLOCK: inside a handler or hook
 */
COX_PUBLIC int cox_executor_call(struct cox_executor *executor,
                                 const struct Coxswain__ExecuteRequest *request,
                                 const struct cox_submit_options *options,
                                 cox_completion_fn handler, void *handler_context,
                                 struct cox_error *err);
/* The same for bytes of the caller's own. */
COX_PUBLIC int cox_executor_call_opaque(struct cox_executor *executor, const void *bytes,
                                        size_t size, const struct cox_submit_options *options,
                                        cox_completion_fn handler, void *handler_context,
                                        struct cox_error *err);

/* The largest request, in bytes, that fits a frame of the channel. What is larger goes in a block.
 */
COX_PUBLIC size_t cox_executor_request_size_max(const struct cox_executor *executor,
                                                enum cox_channel_id channel);

#ifdef COX_INTERNAL
void cox_executor_stats(struct cox_executor *executor, enum cox_channel_id channel,
                        struct cox_channel_stats *ret_stats);
#endif

/* ---- how it is now, for people ---- */

enum cox_rank_life {
    COX_LIFE_ALIVE = 0,
    COX_LIFE_DEAD,
    COX_LIFE_LEFT, /* it serves no more, its process lives */
    /* it is being started again, and has not attached; pid 0: it has not logged on */
    COX_LIFE_ABSENT,
};

/* What a rank says of itself on one channel. */
struct cox_rank_channel_status {
    /* false: a rank without lines */
    bool known;
    /* 0 idle, 1 taken, 2 running, 3 replying; above: it wrote nonsense */
    uint32_t state;
    /* that the state is of */
    uint64_t sequence;
    /* of the state; 0: it has had no other, or says nonsense */
    uint64_t age_ns;
};

struct cox_rank_status {
    /* of the process that was started */
    pid_t pid;
    /* of the one that serves, where that is another */
    pid_t serving_pid;
    uint32_t generation;
    enum cox_rank_life life;
    /* by a signal or a debugger */
    bool stopped;
    /* processor time of serving_pid so far; 0: DEAD, or it cannot be told */
    uint64_t cpu_ns;
    /* of its processes, replacements included; not of those that stop ends */
    uint32_t deaths;
    /* of these that were followed by a process that attached */
    uint32_t restarts;
    /* DEAD, LEFT: how, in words */
    char death[512];
    /* DEAD: what it wrote last, newest last. Otherwise, if there were deaths, what its former
     * process wrote last. */
    char last_lines[2048];
    /* What went wrong last, in words: how a process of the rank ended, a reply of it that was an
     * error or made no sense, or a fault it reported. Kept over restarts. Empty: nothing has. */
    char last_error[512];
    uint64_t last_error_age_ns;
    struct cox_rank_channel_status channels[COX_TWO_WAY_COUNT];
};

struct cox_executor_status {
    /* lent until free */
    const char *name;
    /* how ranks get at the memory; static storage */
    const char *attach;
    /* static storage */
    const char *engine_state;
    uint32_t rank_count;
    uint32_t depth;
    uint32_t epoch;
    uint64_t uptime_ns;
    /* processor time of this process so far; 0: it cannot be told */
    uint64_t cpu_ns;
    /* who waits looks for so long before it sleeps; 0: it does not */
    uint32_t spin_ns;
    bool legacy;
    bool stopping;
    /* of all ranks together */
    uint64_t deaths, restarts;
    /* The last fault that a rank reported without saying which rank it is (legacy workers).
     * Empty: none. */
    char unknown_error[512];
    uint64_t unknown_error_age_ns;
    struct {
        /* last sequence in the ring */
        uint64_t published;
        /* every request up to here has ended */
        uint64_t ended;
        uint32_t in_flight;
        /* owe the reply of a request that has ended, and live */
        struct cox_rank_set late;
        struct cox_channel_stats stats;
    } channels[COX_TWO_WAY_COUNT];
};

/* Asks no worker, and takes no lock that is held over anything that waits: it replies whatever the
 * group is in, from after start has returned until free. Any thread, also inside a handler or
 * hook. ret_ranks: rank_count of them. What ranks say of themselves is their own writing. */
COX_PUBLIC void cox_executor_status(struct cox_executor *executor,
                                    struct cox_executor_status *ret_status,
                                    struct cox_rank_status *ret_ranks);
#ifdef COX_INTERNAL
/* "idle", "taken", ...; "alive", "dead", ...; "unknown" outside. Static storage. */
const char *cox_rank_state_name(uint32_t state);
const char *cox_rank_life_name(uint32_t life);
#endif

#ifdef __cplusplus
}
#endif

#endif
