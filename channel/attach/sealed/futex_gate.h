/*
 * futex_gate: the gates of sealed groups, on futexes. channel/shm/gate.h has the contract.
 *
 * Futexes have no tokens but words that grow with every wakeup, in memory that all ranks
 * write. Per channel there is one word on which all ranks block, so that one call wakes them all;
 * only the coordinator changes it. A second word per channel is the one on which the coordinator
 * blocks. A count per frame says how many replies its request lacks: the rank with the last reply,
 * or with a failure, wakes the coordinator, and the others skip the call. The count is changed by
 * compare-and-swap and contains the sequence, so that a late reply never counts for a later
 * request. A wrong count costs at most one slice.
 *
 * Threads, blocking, and what is left if the process dies: as in channel/shm/gate.h.
 * Ownership: the words are borrowed, in the group's wake memory.
 */
#ifndef COX_CHANNEL_ATTACH_FUTEX_GATE_H
#define COX_CHANNEL_ATTACH_FUTEX_GATE_H

#include "channel/shm/gate.h"

/* Closed with cox_gate_close. Cannot fail. */
void cox_gate_bind(struct cox_gate *gate, struct cox_layout_ranks_wakeup *ranks_wakeup,
                   struct cox_layout_wake_channel *wake, uint32_t depth, bool coordinator);

#endif
