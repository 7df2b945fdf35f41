/*
 * gate: what the two sides of one channel sleep on and wake each other with.
 *
 * Per rank four wakeups (geometry.h names them). A wakeup carries wake-ups; what happened is read
 * from the state words. Every token that is posted is meant to be taken once: a side that slept
 * took it, a side that found the shared state without sleeping settles it, so that counts do not
 * drift. Surplus tokens cost one check of the shared state each and are forgotten. With legacy
 * ranks there are no state words and the token itself is the news: take and wait count.
 *
 * The produce wakeups tell of room. Only legacy ranks, and the error channel, sleep on them;
 * elsewhere room is read from the shared state alone, and they stay at their starting values:
 * gate.credits.
 *
 * Two kinds behind the same functions. Semaphores (named attach) are as said. Futexes (sealed
 * attach) have no tokens, only words that grow with every wake-up, in memory that all write: one
 * per channel that all ranks sleep on, so that one call wakes them all, and which only the
 * coordinator moves; and one per channel that the coordinator sleeps on. With that comes a count
 * per frame of the replies its request lacks: who finds that his was the last, or has failed, wakes
 * the coordinator, the others do not. The count is changed by compare-and-swap and carries the
 * sequence, so that a late reply never counts for a later request; a wrong one costs a slice at
 * most.
 *
 * Whoever is about to sleep first asks for a wake sequence, then looks at the shared, then waits
 * with the wake sequence: a wake-up in between is not slept through.
 *
 * Threads: post and wake from any; settle and take of one wakeup from one thread at a time (a lock
 *   of the caller's will do), wait from one thread, which may overlap a settle.
 * Ownership: the gate owns its wakeups; the caller owns struct cox_gate.
 * Blocks: only cox_gate_wait, until its deadline.
 * If the process dies: names stay until unlinked (control.h); tokens it took are lost, state words
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
    struct cox_layout_ring *ring;
    /* borrowed */
    struct cox_layout_wake_channel *wake;
    uint32_t depth;
    /* semaphores: the produce wakeups are posted and taken; true until the owner says else */
    bool credits;
    /* may write `ring` */
    bool coordinator;
    /* futexes: who sleeps says so, and nobody is called to wake up who does not */
    bool elides;
    /* a signal that this thread handles ends a wait for a request */
    bool signals_end;
    /* Of a rank: borrowed, says whether replies are notified, by writing to the eventfd. NULL: the
     * rank has none. */
    const struct cox_layout_channel_state *state;
    int notify_fd;
};

/* Futexes, whose words are borrowed. elides: where ranks look before they sleep, so that most
 * wake-ups are for nobody. Closed as the others. */
void cox_gate_bind(struct cox_gate *gate, struct cox_layout_ring *ring,
                   struct cox_layout_wake_channel *wake, uint32_t depth, bool coordinator,
                   bool elides);
/* A rank: replies are also written to the eventfd while the coordinator asks for that. Both are
 * borrowed until close. */
void cox_gate_set_notify(struct cox_gate *gate, const struct cox_layout_channel_state *state,
                         int notify_fd);
/* True: one wake-up is for every rank at once, and the coordinator sleeps on all ranks at once. */
static inline bool cox_gate_shared(const struct cox_gate *gate)
{
    return gate->wake != NULL;
}

/* Creates the semaphores of every rank. Returns 0; COX_TAKEN; -errno. Nothing is left behind unless
 * 0. */
int cox_gate_create_semaphores(struct cox_gate *gate, const char *name, enum cox_channel_id channel,
                               const struct cox_geometry *geometry, struct cox_error *err);
/* Attaches the four of one rank. Returns 0; COX_NOT_FOUND; COX_DENIED; -errno. */
int cox_gate_attach_semaphores(struct cox_gate *gate, const char *name, enum cox_channel_id channel,
                               uint32_t rank, struct cox_error *err);
/* The same by fds, which stay the caller's: fds[wakeup], -1 where the channel has no such wakeup.
 */
int cox_gate_attach_fds(struct cox_gate *gate, const int fds[COX_WAKEUP_COUNT],
                        enum cox_channel_id channel, uint32_t rank, struct cox_error *err);
/* The four of one rank, whose process is dead, anew and at their starting values; ret_fds, the
 * caller's, are what its next process attaches by. Under the lock of settle and take, and nobody
 * sleeps on them. Returns 0; -errno: some may be new, so try again. */
int cox_gate_renew(struct cox_gate *gate, enum cox_channel_id channel, uint32_t rank,
                   unsigned depth, int ret_fds[COX_WAKEUP_COUNT], struct cox_error *err);
void cox_gate_close(struct cox_gate *gate); /* idempotent */

/* Before a request is published: `count` ranks are going to reply it. */
void cox_gate_arm(struct cox_gate *gate, uint64_t sequence, uint32_t count);
/* Lets every rank of the set through: one post each, or one for all. */
void cox_gate_open(struct cox_gate *gate, const struct cox_rank_set *ranks);
/* A rank has replied `sequence` (its shared words say so already). failed: the reply tells of a
 * failure, which nobody should wait for the others with. */
void cox_gate_reply(struct cox_gate *gate, uint32_t rank, uint64_t sequence, bool failed);
/* With futexes: wakes who sleeps on the wakeup, whatever the rank and whatever is said of who
 * sleeps; a rank that posts COX_WAKEUP_REQUEST_ CONSUME, to wake its own threads, cannot change the
 * word, and has to do it until they woke. */
void cox_gate_post(struct cox_gate *gate, uint32_t rank, enum cox_wakeup wakeup);
/* The same for a wake-up that must not be lost, by one that has no more to say for long: with
 * semaphores, too, the sleepers wake up whatever is said of who sleeps. */
void cox_gate_wake(struct cox_gate *gate, uint32_t rank, enum cox_wakeup wakeup);
/* For wait; to be asked for before the check of the shared state. */
uint32_t cox_gate_wake_sequence(const struct cox_gate *gate, enum cox_wakeup wakeup);
/* Sleeps for a token. Returns 0: one was taken (futexes: it may also be for no reason); COX_EMPTY:
 * woken, and the token is somebody else's, or was written over; COX_TIMEOUT; -EINTR, with
 * signals_end; -errno: there can be no wait here. */
int cox_gate_wait(struct cox_gate *gate, uint32_t rank, enum cox_wakeup wakeup,
                  uint32_t wake_sequence, uint64_t deadline_ns);
/* True: a token was there and was taken. */
bool cox_gate_take(struct cox_gate *gate, uint32_t rank, enum cox_wakeup wakeup);
/* The state words showed the event of one token: match it, now or as soon as it is posted. */
void cox_gate_absorb(struct cox_gate *gate, uint32_t rank, enum cox_wakeup wakeup);
/* The four of one rank, whose process is dead, at their starting values, but the same: for legacy
 * ranks, which know them by their names. Nobody sleeps on them. */
void cox_gate_restore(struct cox_gate *gate, uint32_t rank, unsigned depth);

#endif
