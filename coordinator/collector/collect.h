/*
 * collect: the coordinator's private half of one two-way channel: what is in flight, who still owes
 * a reply, and the gathering of the replies.
 *
 * A request is an entry in a ring of `depth`, at its frame's index. It goes
 *
 *     free -> claimed -> published -> ended -> free
 *
 *   claimed    under the submit lock only; its frame is being packed
 *   published  in the ring, gate opened; everything in flight is looked at, oldest first
 *   ended      its completion was or is being handed over, or nobody replies to it. Ranks that had
 *              not replied are late: the entry stays until each has replied (the reply is dropped
 *              and counted) or is dead, and every asked rank has returned the frame
 *
 * Ranks reply in order, so requests to the same ranks end in order; a deadline, an error or a
 * death ends a request also before its turn, but not before what that rank had replied until then.
 *
 * Threads: submit_lock serializes claim to publish. lock protects everything below it; gathering
 *   gives it up while it sleeps, and never holds it over a handler. Wakers (a death, a report on
 *   the error channel, stop) are threads of this process: they store their cause, count it in
 *   `causes`, and post the semaphore that the collector sleeps on.
 * Ownership: the collector owns its copies of replies; a completion lends them.
 * Blocks: gather until the request ends; the rest not.
 * If the process dies: private memory; the workers are killed by the kernel.
 */
#ifndef COX_COORDINATOR_COLLECT_H
#define COX_COORDINATOR_COLLECT_H

#include "channel/base/spin.h"
#include "channel/shm/channel.h"
#include "completion.h"
#include "coordinator/process/last_errors.h"
#include "gathering.h"
#include "readiness.h"
#include "stats.h"
#include "coordinator/process/supervise.h"

#include <pthread.h>
#include <stdatomic.h>

/* Somebody who is owed something looks again this often. */
#define COX_SLICE_NS (50 * COX_NSEC_PER_MSEC)
/* How long a rank that has left may take to end its process, before it is given up without that. */
#define COX_LEAVING_NS (2 * COX_SLICE_NS)
/* And this often while a reply may come that wakes nobody: a collector sleeps on one rank, and
 * a later request is owed by others only. */
#define COX_APART_NS COX_NSEC_PER_MSEC
/* A request that failed waits this long for a death that has begun, so that the death is told and
 * not what it did to the others. */
#define COX_EXITING_NS (20 * COX_SLICE_NS)

struct cox_operation;

/* What a group's channels have in common where bytes go in blocks (channel/memory/large_payload.h).
 */
struct cox_blocks_choice {
    struct cox_large_payload_sender sender;
    /* 0: requests do not */
    uint64_t request_size_max;
    struct cox_reply_limits reply_limits;
};

/* The block behind a frame. */
struct cox_request_buffer {
    /* under submit_lock while not in use */
    struct cox_large_payload block;
    /* by the request in the frame; under lock */
    bool used;
};

struct cox_waiter {
    /* NULL: nobody looks */
    cox_completion_fn handler;
    void *handler_context;
    bool done;
    int status;
    struct cox_error *err;
};

struct cox_entry {
    /* 0: free */
    uint64_t sequence;
    uint32_t type;
    const struct cox_operation *operation;
    enum cox_gather gather;
    struct cox_rank_set asked;
    /* replies taken out of their slots, or dropped */
    struct cox_rank_set consumed;
    bool replies;
    bool ended;
    uint64_t deadline_ns;
    uint64_t submitted_ns;
    uint64_t published_ns;
    /* of the group, in which it was planned; 0: in any */
    uint64_t life;
    /* bytes of it that are in the frame's block; 0: it is in the frame itself */
    uint64_t block_size;
    /* it has failed, and waits until then for a death; 0: not yet */
    uint64_t exiting_ns;
    /* of the collector, before its ranks were looked at by claim */
    uint32_t causes;
    void *request_context;
    /* a call; NULL: the registered handler */
    struct cox_waiter *waiter;
};

/* What there was to be seen before a look: whatever comes after it ends the sleep. */
struct cox_wait_snapshot {
    uint32_t causes;
    uint32_t wake_sequence;
};

/* What this channel alone knows of a legacy rank. */
struct cox_collector_rank {
    /* ranks without lines: the shared state their tokens tell */
    uint64_t legacy_done;
    /* a request_produce token is in hand */
    bool legacy_free;
    /* tokens posted by wakers, to be told from a legacy rank's */
    _Atomic uint32_t foreign;
};

struct cox_collector {
    /* borrowed */
    struct cox_channel *channel;
    /* borrowed; set before the first request */
    struct cox_supervisor *supervisor;
    /* of the group's ranks; the same */
    struct cox_rank *records;
    /* the same */
    struct cox_last_errors *last_errors;
    uint32_t rank_count;
    bool legacy;
    /* the executor, for cox_reentrancy_inside */
    const void *owner;
    const struct cox_log *log;
    /* borrowed */
    struct cox_blocks_choice *blocks;

    pthread_mutex_t submit_lock;
    /* published or stopping: the response thread */
    pthread_cond_t work;
    /* on another cache line than submit_lock, which callers compete for */
    pthread_mutex_t lock;
    /* ended, or a handler returned */
    pthread_cond_t ended_cond;
    struct cox_entry entries[COX_DEPTH_MAX];
    uint64_t published;
    /* every request up to here has ended; later ones may have */
    uint64_t ended;
    /* the gatherings of requests up to here have begun */
    uint64_t begun;
    /* bit i: the request in frame i has ended without the replies of all ranks */
    uint64_t cancelled;
    /* of requests up to here no reply is to come, or counts */
    uint64_t settled;
    /* When whoever has not taken its frame is woken again: those in flight by who gathers, those
     * without whom there is no room by who is refused. One clock for both would ring for whoever
     * comes first in each slice, and never for the other. */
    uint64_t rewake_ns, claim_rewake_ns;
    /* before the last pass over what is in flight; the gathering thread's */
    struct cox_wait_snapshot seen;
    /* the next pass looks at every rank; the same */
    bool rescan;
    /* the time as it was a moment before the next pass; 0: not known; the same */
    uint64_t cached_now_ns;
    /* causes, as the last claim began; under submit_lock */
    uint32_t claim_causes;
    /* Of who gathers; before the first request, of who waits for the ranks to attach. */
    struct cox_spinner spinner;
    /* the collector sleeps on its wakeup, -1: awake */
    int sleep_rank;
    /* until then */
    uint64_t sleep_ns;
    /* in place of a caller that waits no longer */
    struct cox_waiter nobody;
    struct cox_collector_rank *ranks;
    struct cox_stats stats;
    /* NULL: none is registered */
    cox_completion_fn handler;
    void *handler_context;
    /* relaxed: one is, and will stay; spares who submits the lock */
    _Atomic bool handled;
    bool in_handler;
    /* handlers entered so far */
    uint64_t handler_runs;
    pthread_t handler_thread;
    /* channels without a response thread: a caller gathers */
    bool gathering;

    _Atomic bool stopping;
    /* published, for who looks without the lock */
    _Atomic uint64_t news;
    /* reasons to look that did not come through the gate */
    _Atomic uint32_t causes;
    /* rank + 1 whose response_consume the collector sleeps on, 0: awake */
    _Atomic uint32_t sleeping;

    struct cox_request_buffer request_buffers[COX_DEPTH_MAX];
    /* of these; relaxed: spares every request the lock */
    _Atomic uint32_t blocks_used;
    /* The replies to the request in each frame; the gathering thread's alone. */
    struct cox_gathering gatherings[COX_DEPTH_MAX];

    /* The host collects completions itself (collecting.c); there is no response thread. */
    bool collected;
    /* a thread is inside cox_collector_collect */
    bool collecting;
    /* Completions that nobody has collected yet, by frame; `gatherings` has what they point to. */
    struct cox_completion *kept;
    bool is_kept[COX_DEPTH_MAX];
    uint32_t kept_count;
    /* the next deadline in flight, of the last pass; the gathering thread's */
    uint64_t next_ns;
    /* what cox_executor_fd hands out */
    struct cox_readiness readiness;
    /* What the completions point to that were collected last; depth of them. */
    struct cox_gathering *lent;
    uint32_t lent_count;

    bool threaded;
    pthread_t thread;
};
_Static_assert(offsetof(struct cox_collector, lock) - offsetof(struct cox_collector, submit_lock) >=
                   64 + 24, /* a line, and the part of a mutex that is ever written */
               "two locks on one line");

int cox_collector_init(struct cox_collector *collector, struct cox_channel *channel,
                       const void *owner, struct cox_blocks_choice *blocks,
                       const struct cox_log *log);
void cox_collector_deinit(struct cox_collector *collector);
/* Starts the response thread. Returns 0 or -errno. */
int cox_collector_start(struct cox_collector *collector);
/* In place of start: the host collects the completions. Returns 0 or -ENOMEM. */
int cox_collector_start_collected(struct cox_collector *collector);
/* Ends what is in flight with COX_CLOSED and refuses what comes; joins the thread, if any.
 * Idempotent. */
void cox_collector_stop(struct cox_collector *collector);

/* Under submit_lock: may a request to `asked` be published now? Returns 0, and *ret_sequence is its
 * number; COX_PEER_DEAD, COX_FULL, COX_LATE, with err saying who. The caller has looked at
 * `stopping`: only the goodbye is published after a stop. */
int cox_collector_claim(struct cox_collector *collector, const struct cox_rank_set *asked,
                        uint64_t *ret_sequence, struct cox_error *err);
/* Under submit_lock, after claim and with the frame filled: publishes and opens the gate. */
void cox_collector_publish(struct cox_collector *collector, const struct cox_entry *entry,
                           size_t length);
/* Under submit_lock, after claim: the block of the frame, with room for size bytes. Returns as
 * cox_large_payload_reserve. */
int cox_collector_reserve_block(struct cox_collector *collector, uint64_t sequence, uint64_t size,
                                struct cox_large_payload **ret_block, struct cox_error *err);
/* Lets go of blocks that nobody reads any more: their requests have ended, and every asked rank has
 * returned the frame or is dead. Takes the lock. Idempotent; done after every claim, and where
 * there is a response thread every slice until they are all released. */
void cox_collector_release_blocks(struct cox_collector *collector);
/* Of blocks in use. The lock is held. */
uint64_t cox_collector_held_bytes(const struct cox_collector *collector);
/* Waits until the completion of `sequence`, published for `waiter`, was handed over. Returns its
 * status; COX_TIMEOUT when from deadline_ns on the response thread is held up in one handler for a
 * slice: the completion then goes to nobody. */
int cox_collector_await(struct cox_collector *collector, uint64_t sequence,
                        struct cox_waiter *waiter, uint64_t deadline_ns, struct cox_error *err);
/* A step is in flight. Takes the lock. */
bool cox_collector_in_step(struct cox_collector *collector);
/* Sleeps a little for room after COX_FULL or COX_LATE; returns when something ended or after a
 * slice at most. */
void cox_collector_await_room(struct cox_collector *collector, uint64_t deadline_ns);

/* One caller at a time gathers on a channel without a response thread. Returns 0; COX_TIMEOUT:
 * others did until the deadline (a deadline of 0 asks only). Pairs with leave. */
int cox_collector_gather_enter(struct cox_collector *collector, uint64_t deadline_ns);
void cox_collector_gather_leave(struct cox_collector *collector);
/* Gathers everything published up to `sequence` on the calling thread (channels without a response
 * thread). */
void cox_collector_gather(struct cox_collector *collector, uint64_t sequence);

/* ---- channels whose completions the host collects (collecting.c) ---- */

/* Under submit_lock, after claim: the frame's last completion was not collected yet, and its
 * replies still lie where those of the next request go. Takes the lock. */
bool cox_collector_is_uncollected(struct cox_collector *collector, uint64_t sequence);
/* Waits on the calling thread until the completion of `waiter` was handed over: gathers, or waits
 * for the thread that does. Returns its status. */
int cox_collector_collect_call(struct cox_collector *collector, const struct cox_waiter *waiter);
/* Collects on the calling thread. As cox_executor_completions, without COX_INVALID and COX_STATE.
 */
int cox_collector_collect(struct cox_collector *collector, struct cox_completion *completions,
                          uint32_t count_max, uint64_t deadline_ns, uint32_t *ret_count);
/* The fd of cox_executor_fd, made at the first call: from then on ranks write to theirs after
 * replies. Returns 0 or -errno. */
int cox_collector_fd(struct cox_collector *collector, const int *rank_fds, int *ret_fd);
/* For cox_collector_await_room: gathers, until something has ended or the deadline has passed. */
void cox_collector_collect_room(struct cox_collector *collector, uint64_t deadline_ns);
/* Ends what is in flight, once `stopping` is set. */
void cox_collector_collect_rest(struct cox_collector *collector);
/* With lock held, which it gives up meanwhile: until no request in flight asks the rank, or the
 * deadline. */
void cox_collector_collect_rank(struct cox_collector *collector, uint32_t rank,
                                uint64_t deadline_ns);

/* A dead rank is about to be started again. From now on requests that ask it are refused with
 * COX_PEER_DEAD; returns when all that did ask it have ended, and handlers that were told so have
 * returned: 0; COX_TIMEOUT. Not inside a handler. */
int cox_collector_detach(struct cox_collector *collector, uint32_t rank, uint64_t deadline_ns);
/* After detach: the next process of the rank owes nothing, and finds the channel as at the
 * start: its lines reset, its wakeups new (ret_fds: the caller's; untouched where ranks share one
 * wakeup, and for legacy ranks, whose wakeups stay and are put back to their starting values).
 * Replies count from `generation` on. Returns 0 or -errno. */
int cox_collector_reset_rank(struct cox_collector *collector, uint32_t rank,
                             int ret_fds[COX_WAKEUP_COUNT], struct cox_error *err);
/* The lines again, which the rank itself may have written to since, or have in other memory now. */
void cox_collector_reset_line(struct cox_collector *collector, uint32_t rank);
/* After detach: requests may ask it again. */
void cox_collector_attach(struct cox_collector *collector, uint32_t rank);

/* A cause was stored elsewhere: makes the collector look. From any thread. */
void cox_collector_wake(struct cox_collector *collector);
struct cox_wait_snapshot cox_collector_snapshot(const struct cox_collector *collector);
/* With lock held, which it gives up meanwhile: looks for a while, and then sleeps on the reply
 * wakeup of a rank (of all ranks, where they share one), which owes the reply to `sequence`, until
 * it is rung, a wake since `before`, or the deadline. */
void cox_collector_sleep(struct cox_collector *collector, uint32_t rank, uint64_t sequence,
                         const struct cox_wait_snapshot *before, uint64_t deadline_ns);

#endif
