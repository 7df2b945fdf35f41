/*
 * gate: what the two sides of one channel sleep on and wake each other with.
 *
 * Per rank four bells (geometry.h names them). A bell carries wake-ups; what happened is read from
 * the truth words. Every token that is posted is meant to be taken once: a side that slept took it,
 * a side that found the truth without sleeping settles it, so that counts do not drift. Surplus
 * tokens cost one look at the truth each and are forgotten. With legacy ranks there are no truth
 * words and the token itself is the news: take and wait count.
 *
 * Two kinds are meant: semaphores (named attach), and futexes (sealed attach, one wake for all
 * ranks) behind the same functions.
 *
 * Threads: post from any; settle and take of one bell from one thread at a time (a lock of the
 *   caller's will do), wait from one thread, which may overlap a settle.
 * Ownership: the gate owns its bells; the caller owns struct cox_gate.
 * Blocks: only cox_gate_wait, until its deadline.
 * If the process dies: names stay until unlinked (control.h); tokens it took are lost, truth words
 *   are not.
 */
#ifndef COX_CHANNEL_GATE_H
#define COX_CHANNEL_GATE_H

#include "geometry.h"

struct cox_gate_ops;

struct cox_gate {
    const struct cox_gate_ops *ops;
    uint32_t rank_first; /* ranks [rank_first, rank_first + rank_count) have bells here */
    uint32_t rank_count;
    struct cox_gate_bell *bells; /* rank_count x COX_BELL_COUNT */
};

/* Creates the semaphores of every rank. Returns 0; COX_TAKEN; -errno. Nothing is left behind unless
 * 0. */
int cox_gate_create_semaphores(struct cox_gate *gate, const char *name, enum cox_channel_id channel,
                               const struct cox_geometry *geometry, struct cox_error *err);
/* Attaches the four of one rank. Returns 0; COX_NOT_FOUND; COX_DENIED; -errno. */
int cox_gate_attach_semaphores(struct cox_gate *gate, const char *name, enum cox_channel_id channel,
                               uint32_t rank, struct cox_error *err);
/* The same by fds, which stay the caller's: fds[bell], -1 where the channel has no such bell. */
int cox_gate_attach_fds(struct cox_gate *gate, const int fds[COX_BELL_COUNT],
                        enum cox_channel_id channel, uint32_t rank, struct cox_error *err);
/* The four of one rank, whose process is dead, anew and at their starting values; ret_fds, the
 * caller's, are what its next process attaches by. Under the lock of settle and take, and nobody
 * sleeps on them. Returns 0; -errno: some may be new, so try again. */
int cox_gate_renew(struct cox_gate *gate, enum cox_channel_id channel, uint32_t rank,
                   unsigned depth, int ret_fds[COX_BELL_COUNT], struct cox_error *err);
void cox_gate_close(struct cox_gate *gate); /* idempotent */

/* Lets every rank of the set through: one post each. */
void cox_gate_open(struct cox_gate *gate, const struct cox_rank_set *ranks);
void cox_gate_post(struct cox_gate *gate, uint32_t rank, enum cox_bell bell);
/* Sleeps for a token. Returns 0: one was taken; COX_TIMEOUT; -errno. */
int cox_gate_wait(struct cox_gate *gate, uint32_t rank, enum cox_bell bell, uint64_t deadline_ns);
/* True: a token was there and was taken. */
bool cox_gate_take(struct cox_gate *gate, uint32_t rank, enum cox_bell bell);
/* The truth words showed the event of one token: match it, now or as soon as it is posted. */
void cox_gate_settle(struct cox_gate *gate, uint32_t rank, enum cox_bell bell);

#endif
