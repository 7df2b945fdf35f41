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
 * Two kinds of wakeups share these functions. Semaphores (named attach) work as described. Futexes
 * (sealed attach) have no tokens but words that grow with every wakeup, in memory that all ranks
 * write. Per channel there is one word on which all ranks block, so that one call wakes them all;
 * only the coordinator changes it. A second word per channel is the one on which the coordinator
 * blocks. A count per frame says how many replies its request lacks: the rank with the last reply,
 * or with a failure, wakes the coordinator, and the others skip the call. The count is changed by
 * compare-and-swap and contains the sequence, so that a late reply never counts for a later
 * request. A wrong count costs at most one slice.
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

#include "geometry.h"

struct cox_gate {
    /* ranks [rank_first, rank_first + rank_count) have wakeups here */
    uint32_t rank_first;
    uint32_t rank_count;
    /* rank_count x COX_WAKEUP_COUNT; NULL: futexes */
    struct cox_gate_wakeup *wakeups;
    /* borrowed; NULL on the error channel */
    struct cox_layout_ranks_wakeup *ranks_wakeup;
    /* borrowed */
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

/* Uses futexes, whose words are borrowed. Closed like the others. */
void cox_gate_bind(struct cox_gate *gate, struct cox_layout_ranks_wakeup *ranks_wakeup,
                   struct cox_layout_wake_channel *wake, uint32_t depth, bool coordinator);
/* For a rank: replies also write to the eventfd while the coordinator asks for that. Both are
 * borrowed until close. */
void cox_gate_set_notify(struct cox_gate *gate, const struct cox_layout_channel_state *state,
                         int notify_fd);
/* True if one wakeup wakes every rank, and the coordinator blocks on all ranks at once. */
static inline bool cox_gate_shared(const struct cox_gate *gate)
{
    return gate->wake != NULL;
}

/* Creates the semaphores of every rank. Returns 0; COX_TAKEN; -errno. On failure nothing is left.
 */
int cox_gate_create_semaphores(struct cox_gate *gate, const char *name, enum cox_channel_id channel,
                               const struct cox_geometry *geometry, struct cox_error *err);
/* Attaches the four wakeups of one rank. Returns 0; COX_NOT_FOUND; COX_DENIED; -errno. */
int cox_gate_attach_semaphores(struct cox_gate *gate, const char *name, enum cox_channel_id channel,
                               uint32_t rank, struct cox_error *err);
/* The same by fds, which stay the caller's: fds[wakeup], -1 where the channel has no such wakeup.
 */
int cox_gate_attach_fds(struct cox_gate *gate, const int fds[COX_WAKEUP_COUNT],
                        enum cox_channel_id channel, uint32_t rank, struct cox_error *err);
/* Makes new wakeups, with their initial values, for a rank whose process is dead. ret_fds become
 * the caller's; the next process attaches by them. Under the lock of absorb and take, while no
 * thread waits on them. Returns 0; -errno: some may be new, so try again. */
int cox_gate_renew(struct cox_gate *gate, enum cox_channel_id channel, uint32_t rank,
                   unsigned depth, int ret_fds[COX_WAKEUP_COUNT], struct cox_error *err);
void cox_gate_close(struct cox_gate *gate); /* idempotent */

/* Before a request is published: `count` ranks will reply to it. */
void cox_gate_arm(struct cox_gate *gate, uint64_t sequence, uint32_t count);
/* Wakes every rank of the set: one post each, or one for all. */
void cox_gate_open(struct cox_gate *gate, const struct cox_rank_set *ranks);
/* A rank has replied to `sequence`, and its shared words say so. failed: the reply is a failure, so
 * the coordinator is woken without waiting for other ranks. */
void cox_gate_reply(struct cox_gate *gate, uint32_t rank, uint64_t sequence, bool failed);
/* Posts the wakeup of one rank. With futexes it wakes all waiters of the word, of whatever rank,
 * and whether or not they are announced. A rank that posts COX_WAKEUP_REQUEST_CONSUME, to wake its
 * own threads, cannot change the word, and has to repeat the call until they are awake. */
void cox_gate_post(struct cox_gate *gate, uint32_t rank, enum cox_wakeup wakeup);
/* The same for a wakeup that must not be lost, by a thread that will not repeat it soon: semaphores
 * are posted, too, whether or not waiters are announced. */
void cox_gate_wake(struct cox_gate *gate, uint32_t rank, enum cox_wakeup wakeup);
/* For wait; to be read before the check of the shared state. */
uint32_t cox_gate_wake_sequence(const struct cox_gate *gate, enum cox_wakeup wakeup);
/* Blocks for a token. Returns 0: one was taken (futexes: possibly spurious); COX_EMPTY: woken, but
 * another thread took the token, or it was overwritten; COX_TIMEOUT; -EINTR, with signals_end;
 * -errno: waiting is impossible here. */
int cox_gate_wait(struct cox_gate *gate, uint32_t rank, enum cox_wakeup wakeup,
                  uint32_t wake_sequence, uint64_t deadline_ns);
/* True: a token was there and was taken. */
bool cox_gate_take(struct cox_gate *gate, uint32_t rank, enum cox_wakeup wakeup);
/* The state words have shown the event of one token: matches it, now or when it is posted. */
void cox_gate_absorb(struct cox_gate *gate, uint32_t rank, enum cox_wakeup wakeup);
/* The coordinator has taken the reply of a rank out of its slot: matches the reply's token; with
 * credits, gives the slot back to the rank. */
void cox_gate_consume_reply(struct cox_gate *gate, uint32_t rank);
/* Wakes a rank that may have missed its wakeup. Returns false, and does nothing, with credits:
 * there each token stands for one request. */
bool cox_gate_rewake(struct cox_gate *gate, uint32_t rank);
/* Gives a rank whose process is dead wakeups in their initial state: as cox_gate_renew, except that
 * with credits the same ones are reset, which the next process finds by name, and with futexes
 * there is nothing to do. Then ret_fds is unchanged. */
int cox_gate_reset(struct cox_gate *gate, enum cox_channel_id channel, uint32_t rank,
                   unsigned depth, int ret_fds[COX_WAKEUP_COUNT], struct cox_error *err);

#endif
