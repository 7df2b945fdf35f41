/*
 * legacy_shim: a control region of this worker's own, for a group whose coordinator has none.
 *
 * A legacy coordinator creates regions and semaphores and keeps no state words: a token on
 * request_consume says "the next request is in the frame", one on response_produce "the slot is
 * yours". The legacy shim is a control layout in private memory. The worker writes into it what the
 * tokens tell, and everything behind that reads state words as ever.
 *
 * Threads: create from one; publish on the channel thread.
 * Ownership: control is the caller's, closed with cox_control_close.
 * Blocks: nothing.
 * If the process dies: private memory; the coordinator's names are its own.
 */
#ifndef COX_WORKER_LEGACY_SHIM_H
#define COX_WORKER_LEGACY_SHIM_H

#include "channel/shm/channel.h"

#include <sys/types.h>

/* Takes the geometry from the sizes of the regions. Returns 0; COX_NOT_FOUND: there are no such
 * regions; COX_DENIED; COX_INVALID: rank_count ranks do not fit them, with the numbers;
 * COX_PEER_DEAD: there is no process coordinator_pid; -errno. */
int cox_legacy_shim_create(struct cox_control *control, const char *name, uint32_t rank_count,
                           pid_t coordinator_pid, struct cox_error *err);
/* A token was taken: what the frame of this one-frame channel holds is request `sequence`. Its type
 * is not known, only the message tells. */
void cox_legacy_shim_publish(const struct cox_channel *channel, uint64_t sequence);

#endif
