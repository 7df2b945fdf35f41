/*
 * channel: one logical channel: its request ring, its reply slots, its gate, and all their names.
 *
 * The coordinator creates, each worker attaches its own rank. request.h, reply.h and gate.h do the
 * work; this is where their memory comes from.
 *
 * Threads: create, attach and close from one thread.
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
    /* none on the error channel */
    struct cox_region request;
    struct cox_region response;
    struct cox_gate gate;
};

/* For gate.rooms: only legacy ranks and reports of faults wait for the tokens of room. */
static inline bool cox_channel_has_rooms(const struct cox_channel *channel)
{
    return channel->control->geometry.legacy || channel->id == COX_CHANNEL_ERROR;
}

/* Creates regions and semaphores of `id`. Returns 0; COX_TAKEN, COX_NO_SPACE, -errno as region.h
 * and gate.h say. Nothing is left behind unless 0. */
int cox_channel_create(struct cox_channel *channel, const char *name,
                       const struct cox_control *control, enum cox_channel_id id,
                       struct cox_error *err);
/* Attaches as `rank`; requests are mapped read-only. Returns 0; COX_NOT_FOUND, COX_DENIED,
 * COX_CORRUPT, -errno. */
int cox_channel_attach(struct cox_channel *channel, const char *name,
                       const struct cox_control *control, enum cox_channel_id id, uint32_t rank,
                       struct cox_error *err);
/* The same in a sealed group: coordinator for all ranks, or worker for its own; nothing can fail.
 */
struct cox_sealed;
void cox_channel_bind(struct cox_channel *channel, const struct cox_sealed *sealed,
                      const struct cox_control *control, enum cox_channel_id id, bool coordinator);
/* Creator, with every rank dead and nobody writing: other regions in place of its own, under the
 * same names, which legacy workers may have taken along. Returns what cox_region_renew returns;
 * some may be new, so try again. */
int cox_channel_renew_regions(struct cox_channel *channel, const char *name, struct cox_error *err);
void cox_channel_close(struct cox_channel *channel); /* names stay; idempotent */

#endif
