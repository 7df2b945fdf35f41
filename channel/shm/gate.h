/*
 * gate: how the two sides of one channel block and wake each other.
 *
 * Each rank has four wakeups (named in geometry.h). A wakeup only ends a wait; what happened is
 * read from the state words. Each token that is posted is meant to be taken once: a side that
 * blocked has taken it, and a side that saw the state without blocking absorbs it, so that counts
 * do not drift. A surplus token costs one check of the shared state. Legacy ranks have no state
 * words: for them the token itself is the event, and take and wait count tokens.
 *
 * The produce wakeups signal free space. Only legacy ranks and the error channel block on them
 * (gate.credits). Elsewhere free space is read from the shared state alone, and they keep their
 * initial values.
 *
 * There are two kinds: semaphores (channel/attach/named/semaphore_gate.h), which work as described,
 * and futexes (channel/attach/sealed/futex_gate.h), which have no tokens. A gate has the functions
 * of its kind; those below call them.
 *
 * A thread that is about to block reads a wake sequence first, then checks the shared state, then
 * waits with that wake sequence. So a wakeup in between is not missed.
 *
 * Threads: post and wake: any. absorb and take of one wakeup: one thread at a time (a lock of the
 *   caller's will do). wait: one thread; it may overlap an absorb.
 * Ownership: the gate owns its wakeups; the caller owns struct cox_gate.
 * Blocks: only cox_gate_wait, until its deadline.
 * If the process dies: names stay until unlinked (control.h). Tokens it took are lost, state words
 *   are not.
 */
#ifndef COX_CHANNEL_GATE_H
#define COX_CHANNEL_GATE_H

#include "channel/base/idioms.h"
#include "state.h"

#include <unistd.h>

struct cox_gate;

/* What a kind of gate does for the functions below, which have the contracts. */
struct cox_gate_ops {
    /* one wakeup wakes every rank, and the coordinator blocks on all ranks at once */
    bool shared;
    /* NULL: nothing to do, every reply posts */
    void (*arm)(struct cox_gate *gate, uint64_t sequence, uint32_t count);
    void (*open)(struct cox_gate *gate, const struct cox_rank_set *ranks);
    void (*reply)(struct cox_gate *gate, uint32_t rank, uint64_t sequence, bool failed);
    void (*post)(struct cox_gate *gate, uint32_t rank, enum cox_wakeup wakeup);
    void (*wake)(struct cox_gate *gate, uint32_t rank, enum cox_wakeup wakeup);
    /* NULL: nothing to do, a token that is posted between the check and the wait ends the wait */
    uint32_t (*wake_sequence)(const struct cox_gate *gate, enum cox_wakeup wakeup);
    int (*wait)(struct cox_gate *gate, uint32_t rank, enum cox_wakeup wakeup,
                uint32_t wake_sequence, uint64_t deadline_ns);
    /* NULL: nothing to do, there are no tokens; all three or none */
    bool (*take)(struct cox_gate *gate, uint32_t rank, enum cox_wakeup wakeup);
    void (*absorb)(struct cox_gate *gate, uint32_t rank, enum cox_wakeup wakeup);
    int (*reset)(struct cox_gate *gate, enum cox_channel_id channel, uint32_t rank, unsigned depth,
                 int ret_fds[COX_WAKEUP_COUNT], struct cox_error *err);
    void (*close)(struct cox_gate *gate);
};

struct cox_gate {
    /* NULL: it was never made */
    const struct cox_gate_ops *ops;
    /* ranks [rank_first, rank_first + rank_count) have wakeups here */
    uint32_t rank_first;
    uint32_t rank_count;
    /* rank_count x COX_WAKEUP_COUNT; NULL: the kind has none */
    struct cox_gate_wakeup *wakeups;
    /* futexes: borrowed; NULL on the error channel */
    struct cox_layout_ranks_wakeup *ranks_wakeup;
    /* futexes: borrowed */
    struct cox_layout_wake_channel *wake;
    uint32_t depth;
    /* semaphores: the produce wakeups are posted and taken; true until the owner clears it */
    bool credits;
    /* may write `ranks_wakeup` */
    bool coordinator;
    /* a signal that this thread handles ends a wait for a request */
    bool signals_end;
    /* A rank's: borrowed; its word `notify` says whether replies are also notified through the
     * eventfd. NULL: the rank has none. */
    const struct cox_layout_channel_state *state;
    int notify_fd;
};

/* For a rank: replies also write to the eventfd while the coordinator asks for that. Both are
 * borrowed until close. */
static inline void cox_gate_set_notify(struct cox_gate *gate,
                                       const struct cox_layout_channel_state *state, int notify_fd)
{
    gate->state = state;
    gate->notify_fd = notify_fd;
}
/* For hosts of a coordinator that wait in poll, or in an event loop: each kind calls it after a
 * reply. */
COX_HOT static inline void cox_gate_notify(const struct cox_gate *gate)
{
    if (!gate->state || !cox_state_notifies(gate->state))
        return;
    const uint64_t one = 1;
    /* Fails when the counter is at its maximum; then the fd is readable anyway. */
    const ssize_t written = write(gate->notify_fd, &one, sizeof one);
    (void)written;
}
/* True if one wakeup wakes every rank, and the coordinator blocks on all ranks at once. */
static inline bool cox_gate_shared(const struct cox_gate *gate)
{
    return gate->ops->shared;
}

/* Idempotent. */
static inline void cox_gate_close(struct cox_gate *gate)
{
    if (gate->ops)
        gate->ops->close(gate);
}

/* Before a request is published: `count` ranks will reply to it. */
static inline void cox_gate_arm(struct cox_gate *gate, uint64_t sequence, uint32_t count)
{
    if (gate->ops->arm)
        gate->ops->arm(gate, sequence, count);
}
/* Wakes every rank of the set: one post each, or one for all. */
static inline void cox_gate_open(struct cox_gate *gate, const struct cox_rank_set *ranks)
{
    gate->ops->open(gate, ranks);
}
/* A rank has replied to `sequence`, and its shared words say so. failed: the reply is a failure, so
 * the coordinator is woken without waiting for other ranks. */
static inline void cox_gate_reply(struct cox_gate *gate, uint32_t rank, uint64_t sequence,
                                  bool failed)
{
    gate->ops->reply(gate, rank, sequence, failed);
}
/* Posts the wakeup of one rank. With futexes it wakes all waiters of the word, of whatever rank,
 * and whether or not they are announced. A rank that posts COX_WAKEUP_REQUEST_CONSUME, to wake its
 * own threads, cannot change the word, and has to repeat the call until they are awake. */
static inline void cox_gate_post(struct cox_gate *gate, uint32_t rank, enum cox_wakeup wakeup)
{
    gate->ops->post(gate, rank, wakeup);
}
/* The same for a wakeup that must not be lost, by a thread that will not repeat it soon: semaphores
 * are posted, too, whether or not waiters are announced. */
static inline void cox_gate_wake(struct cox_gate *gate, uint32_t rank, enum cox_wakeup wakeup)
{
    gate->ops->wake(gate, rank, wakeup);
}
/* For wait; to be read before the check of the shared state. */
static inline uint32_t cox_gate_wake_sequence(const struct cox_gate *gate, enum cox_wakeup wakeup)
{
    return gate->ops->wake_sequence ? gate->ops->wake_sequence(gate, wakeup) : 0;
}
/* Blocks for a token. Returns 0: one was taken (futexes: possibly spurious); COX_EMPTY: woken, but
 * another thread took the token, or it was overwritten; COX_TIMEOUT; -EINTR, with signals_end;
 * -errno: waiting is impossible here. */
static inline int cox_gate_wait(struct cox_gate *gate, uint32_t rank, enum cox_wakeup wakeup,
                                uint32_t wake_sequence, uint64_t deadline_ns)
{
    return gate->ops->wait(gate, rank, wakeup, wake_sequence, deadline_ns);
}
/* True: a token was there and was taken. */
static inline bool cox_gate_take(struct cox_gate *gate, uint32_t rank, enum cox_wakeup wakeup)
{
    return gate->ops->take ? gate->ops->take(gate, rank, wakeup) : false;
}
/* The state words have shown the event of one token: matches it, now or when it is posted. */
static inline void cox_gate_absorb(struct cox_gate *gate, uint32_t rank, enum cox_wakeup wakeup)
{
    if (gate->ops->absorb)
        gate->ops->absorb(gate, rank, wakeup);
}
/* The coordinator has taken the reply of a rank out of its slot: matches the reply's token; with
 * credits, gives the slot back to the rank. */
static inline void cox_gate_consume_reply(struct cox_gate *gate, uint32_t rank)
{
    if (gate->credits)
        cox_gate_post(gate, rank, COX_WAKEUP_RESPONSE_PRODUCE);
    else
        cox_gate_absorb(gate, rank, COX_WAKEUP_RESPONSE_CONSUME);
}
/* Wakes a rank that may have missed its wakeup. Returns false, and does nothing, with credits:
 * there each token stands for one request. */
static inline bool cox_gate_rewake(struct cox_gate *gate, uint32_t rank)
{
    if (gate->credits)
        return false;
    cox_gate_wake(gate, rank, COX_WAKEUP_REQUEST_CONSUME);
    return true;
}
/* Gives a rank whose process is dead wakeups in their initial state, under the lock of absorb and
 * take, while no thread waits on them. New semaphores: ret_fds become the caller's; the next
 * process attaches by them. With credits the same ones are reset, which it finds by name, and with
 * futexes there is nothing to do: then ret_fds is unchanged. Returns 0; -errno: some may be new, so
 * try again. */
static inline int cox_gate_reset(struct cox_gate *gate, enum cox_channel_id channel, uint32_t rank,
                                 unsigned depth, int ret_fds[COX_WAKEUP_COUNT],
                                 struct cox_error *err)
{
    return gate->ops->reset ? gate->ops->reset(gate, channel, rank, depth, ret_fds, err) : 0;
}

#endif
