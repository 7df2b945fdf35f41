/*
 * named_channel: a channel (channel/shm/channel.h) whose regions and semaphores have names, or had
 * them.
 *
 * Threads, ownership, blocking, and what is left if the process dies: as in channel/shm/channel.h.
 */
#ifndef COX_CHANNEL_ATTACH_NAMED_CHANNEL_H
#define COX_CHANNEL_ATTACH_NAMED_CHANNEL_H

#include "channel/shm/channel.h"
#include "channel/shm/fd_bundle.h"

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
/* For the creator, while every rank is dead: replaces its regions by new ones under the same names,
 * which legacy workers may have unlinked. Returns what cox_region_renew returns; on failure some
 * may be new, so try again. */
int cox_channel_renew_regions(struct cox_channel *channel, const char *name, struct cox_error *err);

/* ---- by fds: what a rank that is replaced gets, since the names are gone ---- */

/* The order of fd_bundle.h: 0 is the control region; of channel c (0 to 3), 1 + 6 c is the request
 * region, for reading, 2 + 6 c the response region, and 3 + 6 c + b wakeup b of the rank, which are
 * semaphores of its own, newly made; 25 is the response region of the error channel, 26 and 27 are
 * its two wakeups, which all ranks share; 28 is the memory of the rank group. */
#define COX_FD_BUNDLE_CONTROL 0
#define COX_FD_BUNDLE_GROUP 28
static inline int cox_fd_bundle_request(enum cox_channel_id channel)
{
    return 1 + 6 * (int)channel;
}
static inline int cox_fd_bundle_response(enum cox_channel_id channel)
{
    return channel == COX_CHANNEL_ERROR ? 25 : 2 + 6 * (int)channel;
}
static inline int cox_fd_bundle_wakeup(enum cox_channel_id channel, enum cox_wakeup wakeup)
{
    return channel == COX_CHANNEL_ERROR ? 26 + (wakeup == COX_WAKEUP_RESPONSE_CONSUME)
                                        : 3 + 6 * (int)channel + (int)wakeup;
}

/* Coordinator, while the names exist: opens the objects that all ranks share; the wakeups of ranks
 * stay -1. Returns 0 or -errno. */
int cox_fd_bundle_open(struct cox_fd_bundle *bundle, const char *name,
                       const struct cox_geometry *geometry, struct cox_error *err);
/* Worker: attaches one channel from the fds, which stay open. The same checks and codes as
 * cox_channel_attach; a file need not have a name. */
int cox_fd_bundle_attach(const struct cox_fd_bundle *bundle, struct cox_channel *channel,
                         const struct cox_control *control, enum cox_channel_id id, uint32_t rank,
                         struct cox_error *err);

#endif
