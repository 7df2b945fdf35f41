/*
 * semaphore_gate: the gates of named groups, on semaphores. channel/shm/gate.h has the contract.
 *
 * Threads, blocking: as in channel/shm/gate.h.
 * Ownership: the gate owns its semaphores.
 * If the process dies: names stay until unlinked (control.h). Tokens it took are lost.
 */
#ifndef COX_CHANNEL_ATTACH_SEMAPHORE_GATE_H
#define COX_CHANNEL_ATTACH_SEMAPHORE_GATE_H

#include "channel/shm/gate.h"

/* Creates the semaphores of every rank. Returns 0; COX_TAKEN; -errno. On failure nothing is left.
 */
int cox_gate_create_semaphores(struct cox_gate *gate, const char *name, enum cox_channel_id channel,
                               const struct cox_geometry *geometry, struct cox_error *err);
/* Attaches the four wakeups of one rank: by fds, which stay the caller's (fds[wakeup], -1 where the
 * channel has no such wakeup); NULL: by name. Returns 0; COX_NOT_FOUND; COX_DENIED; -errno. */
int cox_gate_attach_semaphores(struct cox_gate *gate, const char *name, const int *fds,
                               enum cox_channel_id channel, uint32_t rank, struct cox_error *err);
/* As cox_gate_reset, whether or not the gate has credits. */
int cox_gate_renew(struct cox_gate *gate, enum cox_channel_id channel, uint32_t rank,
                   unsigned depth, int ret_fds[COX_WAKEUP_COUNT], struct cox_error *err);

#endif
