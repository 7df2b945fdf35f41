/*
 * channel: one logical channel: its request ring, its reply slots, its gate, and the names of
 * these.
 *
 * The coordinator creates it, and each worker attaches its own rank. request.h, reply.h and gate.h
 * work on the memory that is mapped here.
 *
 * Threads: create, attach and close on one thread.
 * Ownership: the caller owns struct cox_channel; it borrows the control, which must outlive it.
 * Blocks: nothing.
 * If the process dies: names stay until the control region's sweep (control.h).
 */
#ifndef COX_CHANNEL_CHANNEL_H
#define COX_CHANNEL_CHANNEL_H

#include "control.h"
#include "gate.h"

struct cox_channel {
    enum cox_channel_id id;
    /* borrowed */
    const struct cox_control *control;
    /* not on the error channel */
    struct cox_region request;
    struct cox_region response;
    struct cox_gate gate;
};

/* For gate.credits: only legacy ranks and fault reports wait for tokens that stand for free space.
 */
static inline bool cox_channel_has_credits(const struct cox_channel *channel)
{
    return !channel->control->geometry.mode->limits.rank_words || channel->id == COX_CHANNEL_ERROR;
}

/* Creates the regions and semaphores of `id`. Returns 0; COX_TAKEN, COX_NO_SPACE, -errno as in
 * region.h and gate.h. On failure nothing is left. */
int cox_channel_create(struct cox_channel *channel, const char *name,
                       const struct cox_control *control, enum cox_channel_id id,
                       struct cox_error *err);
/* Attaches as `rank`; requests are mapped read-only. Returns 0; COX_NOT_FOUND, COX_DENIED,
 * COX_CORRUPT, -errno. */
int cox_channel_attach(struct cox_channel *channel, const char *name,
                       const struct cox_control *control, enum cox_channel_id id, uint32_t rank,
                       struct cox_error *err);
/* The same in a sealed group: as coordinator for all ranks, or as worker for its own. Cannot fail.
 */
struct cox_sealed;
void cox_channel_bind(struct cox_channel *channel, const struct cox_sealed *sealed,
                      const struct cox_control *control, enum cox_channel_id id, bool coordinator);
/* For the creator, while every rank is dead: replaces its regions by new ones under the same names,
 * which legacy workers may have unlinked. Returns what cox_region_renew returns; on failure some
 * may be new, so try again. */
int cox_channel_renew_regions(struct cox_channel *channel, const char *name, struct cox_error *err);
void cox_channel_close(struct cox_channel *channel); /* names stay; idempotent */

#endif
