/*
 * collect: the coordinator's private state of one two-way channel: the requests in flight, the
 * ranks that owe replies, and the gathering of replies.
 *
 * A request is an entry in a ring of `depth` entries, at the index of its frame. Its states:
 *
 *     free -> claimed -> published -> ended -> free
 *
 *   claimed    only under the submit lock, while its frame is packed
 *   published  in the ring, and the gate is open; entries are checked oldest first
 *   ended      its completion is ready, or was taken, or it has none. Ranks that had not replied
 *   are late. The entry stays until each of them has replied (the reply is dropped and counted) or
 *   is dead, and every asked rank has returned the frame.
 *
 * There is one way to complete (complete.c): a thread that waits for something gathers until it
 * is there. One thread gathers at a time, for all. A completion becomes ready in its frame, and is
 * taken by the one that it is for: the caller that waits for it, the response thread, which runs
 * the registered handler, or the host that collects.
 *
 * Ranks reply in order, so requests to the same ranks end in order. A deadline, an error or a death
 * also ends a request before its turn, but only after the replies that a rank had given by then are
 * taken.
 *
 * Threads: submit_lock serializes submits, until the gate is open. lock protects all fields below
 *   it; a submit takes it once, from begin to commit. Gathering releases it while it blocks, and no
 *   handler runs under it. Wakers (a death, a report on
 *   the error channel, stop) are threads of this process: they store their cause, count it in
 *   `causes`, and post the semaphore that the collector blocks on.
 * Ownership: the collector owns its copies of replies; a completion lends them.
 * Blocks: gather, until the request ends; the rest does not.
 * If the process dies: private memory; the kernel kills the workers.
 */
#ifndef COX_COORDINATOR_COLLECTOR_H
#define COX_COORDINATOR_COLLECTOR_H

#include "fault_reports.h"
#include "channel/base/spin.h"
#include "channel/recorder/recorder.h"
#include "channel/shm/channel.h"
#include "coordinator/process/last_errors.h"
#include "coordinator/process/supervise.h"
#include "replies.h"
#include "readiness.h"
#include "stats.h"

#include <coxswain/executor.h>

#include <pthread.h>
#include <stdatomic.h>

/* A waiter that awaits something checks again at this interval. */
#define COX_SLICE_NS (50 * COX_NSEC_PER_MSEC)
/* Time that a rank which has left may take to end its process; then it counts as dead without that.
 */
#define COX_LEAVING_NS (2 * COX_SLICE_NS)
/* The interval while a reply may come that wakes no waiter: a collector blocks on one rank, while a
 * later request awaits only others. */
#define COX_APART_NS COX_NSEC_PER_MSEC
/* A request that failed waits this long for a death that has begun, so that the death is reported
 * instead of its effect on other ranks. */
#define COX_EXITING_NS (20 * COX_SLICE_NS)

struct cox_incidents;
struct cox_operation;
struct cox_transport;

/* Shared by a group's channels: payloads out of line (channel/memory/large_payload.h). */
struct cox_large_payload_choice {
    struct cox_large_payload_sender sender;
    /* 0: requests are never out of line */
    uint64_t request_size_max;
    struct cox_reply_limits reply_limits;
};

/* The memory for a request that does not fit its frame. */
struct cox_request_buffer {
    /* under submit_lock while not in use */
    struct cox_large_payload payload;
    /* used by the request in the frame; under lock */
    bool used;
    /* the last request whose bytes were in the payload */
    uint64_t sequence;
};

/* A handler that runs, or is about to; on the stack of its thread. */
struct cox_handler_run {
    uint64_t number;
    /* the registered handler, which runs on the response thread; not that of a call */
    bool registered;
    /* its completion, and what that points to */
    struct cox_replies *taken;
    struct cox_handler_run *next;
};

/* A call that waits. */
struct cox_waiter {
    bool done;
    /* once done: the run of its handler has begun */
    struct cox_handler_run run;
};

struct cox_entry {
    /* 0: free */
    uint64_t sequence;
    uint32_t type;
    const struct cox_operation *operation;
    enum cox_gather gather;
    struct cox_rank_set asked;
    /* forwarded: the ranks that its sender asked, here or elsewhere; the record has them */
    struct cox_rank_set asked_anywhere;
    /* ranks whose replies were taken, or dropped */
    struct cox_rank_set consumed;
    bool replies;
    /* a second completion follows where ranks are late (late.c) */
    bool reports_late;
    bool ended;
    uint64_t deadline_ns;
    uint64_t submitted_ns, published_ns;
    /* in the recorder's clock: the call, and its frame was claimed; 0: not recorded */
    uint64_t recorded_submit, recorded_packing;
    /* epoch of the group that it was made for; 0: any */
    uint64_t epoch;
    /* its bytes in the frame's large payload, or in `away`; 0: it is in the frame itself */
    uint64_t large_size;
    /* lent until commit has returned: bytes of which a transport takes a copy; NULL: none */
    const void *away;
    /* it has failed, and waits until then for a death; 0: it has not */
    uint64_t exiting_ns;
    /* it was told to the incidents */
    bool suspected;
    /* the first look at ranks that are silent; 0: there was none */
    uint64_t looked_ns;
    /* the next look is at this rank, or one behind it */
    uint32_t look_rank;
    /* `causes` of the collector, before begin checked its ranks */
    uint32_t causes;
    void *request_context;
    /* the call that waits for its completion; NULL: none */
    struct cox_waiter *waiter;
};

/* State before a check: any change since then ends the wait that follows. */
struct cox_wait_snapshot {
    uint32_t causes;
    uint32_t wake_sequence;
};

/* A request that has ended, and is to be reported again when its late ranks have replied. */
struct cox_late_request {
    /* 0: none */
    uint64_t sequence;
    uint64_t ended_ns;
    struct cox_rank_set ranks;
    /* of these; the rest are dead */
    struct cox_rank_set replied;
};

struct cox_collector {
    /* borrowed */
    struct cox_channel *channel;
    /* Of the group, borrowed: where ranks report a failed step apart from its reply; NULL. */
    struct cox_fault_reports *reports;
    /* their count when the last request was published */
    uint64_t report_count;
    /* borrowed; set before the first request */
    struct cox_supervisor *supervisor;
    /* records of the group's ranks; the same */
    struct cox_rank *records;
    /* the same */
    struct cox_last_errors *last_errors;
    uint32_t rank_count;
    /* the executor, for cox_reentrancy_inside */
    const void *owner;
    const struct cox_log *log;
    /* borrowed */
    struct cox_large_payload_choice *large_payloads;

    pthread_mutex_t submit_lock;
    /* published or stopping; the thread that gathers waits on it */
    pthread_cond_t work;
    /* on another cache line than submit_lock, for which callers compete */
    pthread_mutex_t lock;
    /* a completion is ready or was taken, a handler has returned, or no thread gathers */
    pthread_cond_t ended_cond;
    struct cox_entry entries[COX_DEPTH_MAX];
    uint64_t published;
    /* every request up to here has ended; later ones may have */
    uint64_t ended;
    /* the replies to requests up to here are awaited */
    uint64_t begun;
    /* bit i: the request in frame i has ended without the replies of all its ranks */
    uint64_t cancelled;
    /* up to here every reply was taken or dropped, or none is expected */
    uint64_t finished;
    /* by frame */
    struct cox_late_request late[COX_DEPTH_MAX];
    /* of these in use */
    uint32_t late_count;
    /* Times at which ranks that have not taken their frame are woken again: rewake_ns for requests
     * in flight, by the gathering thread; claim_rewake_ns for ranks without which there is no room,
     * by a submit that is refused. With one time for both, one of the two would never be due. */
    uint64_t rewake_ns, claim_rewake_ns;
    /* of the last pass over the requests in flight; the gathering thread's */
    struct cox_wait_snapshot seen;
    /* the next pass checks every rank; the same */
    bool rescan;
    /* a recent time; 0: not known; the same */
    uint64_t cached_now_ns;
    /* of the last pass that found ranks pending; the same */
    uint64_t pass_ns;
    /* the first step on which ranks disagreed, and the begin of its chain; 0: none; the same */
    uint64_t diverged_sequence, diverged_begin;
    /* Of the gathering thread; before the first request, of the thread that waits for ranks to
     * attach. */
    struct cox_spinner spinner;
    /* the rank on whose wakeup the collector blocks; -1: it does not block */
    int sleep_rank;
    /* until then */
    uint64_t sleep_ns;
    struct cox_stats stats;
    /* set before the first request */
    struct cox_recorder_submits recorder;
    /* A request has ended with this status, which is not 0; NULL: no thread asks. Without the lock,
     * on the gathering thread, before the handler. Set before the first request. */
    void (*failed)(const void *owner, const struct cox_collector *collector, uint64_t sequence,
                   int status, const char *text);
    /* Where the ranks stand is gathered once a request has spent most of its time, and appended to
     * its text when it reaches its deadline. Borrowed, set before the first request; NULL: off. */
    struct cox_incidents *incidents;
    /* rank_count of them */
    struct cox_rank_stats *rank_stats;
    /* NULL: none is registered */
    cox_completion_fn handler;
    void *handler_context;
    /* relaxed: a handler is registered, and stays; saves submitters the lock */
    _Atomic bool handled;
    /* handlers entered so far */
    uint64_t handler_runs;
    /* of these, those that have not returned */
    struct cox_handler_run *running;
    /* a thread gathers */
    bool gathering;
    /* threads that wait on ended_cond */
    uint32_t waiting;

    _Atomic bool stopping;
    /* published, for readers without the lock */
    _Atomic uint64_t news;
    /* counts reasons to check that do not come through the gate */
    _Atomic uint32_t causes;
    /* 1 + the rank on whose response_consume the collector blocks; 0: it does not */
    _Atomic uint32_t sleeping;

    struct cox_request_buffer request_buffers[COX_DEPTH_MAX];
    /* of these in use; relaxed: saves each request the lock */
    _Atomic uint32_t payloads_used;
    /* Large replies are read here: one per rank and frame, the gathering thread's alone. That of a
     * dead rank stays mapped until its replacement has such a reply in the frame. */
    struct cox_large_payload_view *reply_views;
    /* The replies to the request in each frame; the gathering thread's alone until the completion
     * is ready. A completion is taken with its replies, and the frame gets a spare one. */
    struct cox_replies *replies[COX_DEPTH_MAX];
    struct cox_replies *spares;
    /* all of them */
    struct cox_replies *replies_memory;
    /* By frame: its completion is not taken yet, or its replies are lent in place. */
    bool is_ready[COX_DEPTH_MAX];
    /* The frames of those that no call waits for, in the order in which they became ready. */
    uint8_t ready[COX_DEPTH_MAX];
    uint32_t ready_begin, ready_count;

    /* The host collects completions itself; there is no response thread. */
    bool collected;
    /* a thread is inside cox_collector_collect */
    bool collecting;
    /* the next deadline in flight, as of the last pass; the gathering thread's */
    uint64_t next_ns;
    /* the fd of cox_executor_fd */
    struct cox_readiness readiness;
    /* what the completions that were collected last point to */
    struct cox_replies *lent;

    /* Set before the first request; borrowed. NULL: the ranks are in shared memory. */
    const struct cox_transport *transport;
    /* Requests were published elsewhere, and asked ranks there as well. */
    bool forwards;

    bool threaded;
    pthread_t thread;
};
_Static_assert(offsetof(struct cox_collector, lock) - offsetof(struct cox_collector, submit_lock) >=
                   64 + 24, /* a line, and the part of a mutex that is ever written */
               "two locks on one line");

int cox_collector_init(struct cox_collector *collector, struct cox_channel *channel,
                       const void *owner, struct cox_large_payload_choice *large_payloads,
                       const struct cox_log *log);
void cox_collector_deinit(struct cox_collector *collector);
/* Starts the response thread. Returns 0 or -errno. */
int cox_collector_start(struct cox_collector *collector);
/* In place of start: the host collects the completions. */
void cox_collector_start_collected(struct cox_collector *collector);
/* Ends what is in flight with COX_CLOSED and refuses what comes; joins the thread, if any.
 * Idempotent. */
void cox_collector_stop(struct cox_collector *collector);

/* Under submit_lock: checks whether there is room for a request to entry->asked, and reserves its
 * frame. The caller has checked `stopping`: after a stop only the goodbye is published.
 * Returns
 *   0: entry->sequence is the number of the request. lock is held until commit, or the caller
 *     releases it instead: then the frame stays free. For what takes long it may be released in
 *     between, and taken again.
 *   COX_PEER_DEAD: err names the rank
 *   COX_FULL: err names the reason
 *   COX_LATE: err names the rank
 */
int cox_collector_begin(struct cox_collector *collector, struct cox_entry *entry,
                        struct cox_error *err);
/* After begin, with the frame filled: publishes, releases lock, and opens the gate. */
void cox_collector_commit(struct cox_collector *collector, const struct cox_entry *entry,
                          size_t length);
/* What memory for a large request is to have in it. All NULL: nothing yet. */
struct cox_payload_content {
    /* that has it, as of cox_large_payload_adopt; its reference ends as release_payloads says, or
     * with the collector */
    struct cox_payload_memory *memory;
    /* parts that nobody writes to any more */
    const struct iovec *parts;
};
/* Under submit_lock, after begin: the frame's memory for a large request of size bytes, with that
 * content. Returns as cox_large_payload_reserve, _fill or _adopt. */
int cox_collector_prepare_payload(struct cox_collector *collector, uint64_t sequence,
                                  const struct cox_payload_content *content, uint64_t size,
                                  struct cox_large_payload **ret_payload, struct cox_error *err);
/* Releases the memory of large requests that have ended, and whose frame every asked rank has
 * returned, or is dead. Takes the lock, if there is any. Idempotent. Called before every submit,
 * and by the gathering thread in every slice until all are released. */
void cox_collector_release_payloads(struct cox_collector *collector);
/* Bytes of large requests in use. The lock is held. */
uint64_t cox_collector_held_bytes(const struct cox_collector *collector);
/* Before the first request: numbers continue from `sequence` on. */
void cox_collector_begin_after(struct cox_collector *collector, uint64_t sequence);
/* Before start: requests are forwarded (cox_executor_forward), and this handler gets them all. */
void cox_collector_set_forwarded(struct cox_collector *collector, cox_completion_fn handler,
                                 void *context);
/* Under submit_lock: so that `sequence` can be begun next; those between ask no rank. Returns as
 * begin; COX_STALE: it was begun before, or a later one was. */
int cox_collector_skip(struct cox_collector *collector, uint64_t sequence, struct cox_error *err);
/* True if the rank owes the reply to `sequence`: in flight, or late. Takes the lock. */
bool cox_collector_awaits(struct cox_collector *collector, uint32_t rank, uint64_t sequence);
/* Requests up to `through` that are in flight end with COX_TIMEOUT. Takes the lock. */
void cox_collector_end_through(struct cox_collector *collector, uint64_t through);
/* True if a step is in flight. Takes the lock. */
bool cox_collector_in_step(struct cox_collector *collector);

/* ---- completions (complete.c) ---- */

/* Waits until the request has ended that was committed with this waiter, and runs the handler
 * (NULL: none) on the calling thread. Returns the status of the completion, with its text in err.
 */
int cox_collector_await(struct cox_collector *collector, const struct cox_waiter *waiter,
                        cox_completion_fn handler, void *context, struct cox_error *err);
/* Waits for room after COX_FULL or COX_LATE. Returns when a request has ended, and after a
 * millisecond at the latest. */
void cox_collector_await_room(struct cox_collector *collector, uint64_t deadline_ns);
/* With lock held, which is released meanwhile: waits until no request in flight asks the rank, and
 * the handlers of those that did have returned. Returns 0; COX_TIMEOUT. */
int cox_collector_await_rank(struct cox_collector *collector, uint32_t rank, uint64_t deadline_ns);
/* With lock held: true if another thread runs the registered handler, in a run up to this one. */
bool cox_collector_runs_handler(const struct cox_collector *collector, uint64_t through);
/* With lock held, which is released meanwhile: waits until the runs of the registered handler in
 * other threads have returned. */
void cox_collector_await_handler(struct cox_collector *collector);
/* The response thread, until the collector stops: runs the registered handler. */
void cox_collector_respond(struct cox_collector *collector);
/* Gathers until nothing is in flight: what is, ends once `stopping` is set. */
void cox_collector_gather_rest(struct cox_collector *collector);
/* As cox_executor_take_reply. */
bool cox_collector_take_reply(struct cox_collector *collector,
                              const struct cox_rank_result *result);
/* Collects on the calling thread. As cox_executor_completions, without COX_INVALID and COX_STATE.
 */
int cox_collector_collect(struct cox_collector *collector, struct cox_completion *completions,
                          uint32_t count_max, uint64_t deadline_ns, uint32_t *ret_count);
/* The fd of cox_executor_fd, made at the first call: from then on ranks write to theirs after
 * replies. Returns 0 or -errno. */
int cox_collector_fd(struct cox_collector *collector, const int *rank_fds, int *ret_fd);

/* A dead rank is about to be replaced. From now on requests that ask it are refused with
 * COX_PEER_DEAD. Returns when all requests that asked it have ended, and their handlers have
 * returned: 0, and no thread reads its words until it is attached; COX_TIMEOUT. Not inside a
 * handler. */
int cox_collector_detach(struct cox_collector *collector, uint32_t rank, uint64_t deadline_ns);
/* After detach: gives the next process of the rank a clean state in the channel: its lines reset,
 * and wakeups as of cox_gate_reset. Returns 0 or -errno. */
int cox_collector_reset_rank(struct cox_collector *collector, uint32_t rank,
                             int ret_fds[COX_WAKEUP_COUNT], struct cox_error *err);
/* Resets the lines once more: the rank itself may have written to them since, or they are in other
 * memory now. */
void cox_collector_reset_line(struct cox_collector *collector, uint32_t rank);
/* After detach: requests may ask it again. */
void cox_collector_attach(struct cox_collector *collector, uint32_t rank);

/* A cause was stored: makes the collector check. Any thread. */
void cox_collector_wake(struct cox_collector *collector);
struct cox_wait_snapshot cox_collector_snapshot(const struct cox_collector *collector);
/* With lock held, which is released meanwhile: spins, and then blocks on the reply wakeup of a rank
 * (of all ranks, where they share one) that owes the reply to `sequence`. Ends when it is posted,
 * when a wake follows `before`, or at the deadline. */
void cox_collector_sleep(struct cox_collector *collector, uint32_t rank, uint64_t sequence,
                         const struct cox_wait_snapshot *before, uint64_t deadline_ns);

#endif
