/*
 * legacy_shim: a private control region of this worker, for a group whose coordinator has none.
 *
 * A legacy coordinator creates regions and semaphores and keeps no state words. A token on
 * request_consume means "the next request is in the frame", one on response_produce "the slot is
 * free". The legacy shim is a control layout in private memory. The worker stores there what the
 * tokens mean, and all other code reads state words as usual. legacy_bridge.h is the
 * counterpart.
 *
 * Threads: create and new from one.
 * Ownership: control is the caller's, closed with cox_control_close.
 * Blocks: nothing.
 * If the process dies: private memory; the names are the coordinator's.
 */
#ifndef COX_LEGACY_SHIM_H
#define COX_LEGACY_SHIM_H

#include "channel/shm/channel.h"

#include <sys/types.h>

/* Derives the geometry from the sizes of the regions.
 * Returns
 *   0
 *   COX_NOT_FOUND: the regions do not exist
 *   COX_DENIED
 *   COX_INVALID: rank_count ranks do not fit them; err has the numbers
 *   COX_PEER_DEAD: there is no process coordinator_pid
 *   -errno
 */
int cox_legacy_shim_create(struct cox_control *control, const char *name, uint32_t rank_count,
                           pid_t coordinator_pid, struct cox_error *err);
/* For channel->tokens of the rank's channel (channel/shm/tokens.h), which stays where it is.
 * Returns 0 or -ENOMEM. */
int cox_legacy_shim_new(const struct cox_channel *channel, struct cox_tokens **ret_tokens);

#endif
