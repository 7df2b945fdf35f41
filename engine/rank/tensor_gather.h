/*
 * tensor_gather: an all-gather of float slices between the ranks of a group, in shared memory.
 *
 * Every rank owns the same number of slices, in rank order. A rank writes its slices into its own
 * memfd. The others map that for reading, with the fd they got through the group. After a barrier
 * every rank can read all slices where their owners wrote them. The gather copies bits and adds
 * nothing; its caller adds in the order of the slices.
 *
 * Each rank has two buffers, used in turn, so that one barrier per gather is enough. A rank that
 * writes a buffer has passed the barrier of the previous gather. At that barrier every rank had
 * finished reading the gather before, which used this buffer. Nothing is copied out: until a rank
 * arrives at the next gather, it reads the others' slices in place.
 *
 * The memory is `cox_payload_exchange`: sealed, so that only its owner can write it. It contains
 * only numbers.
 *
 * Epochs are those of the group, and change only after a cancelled step. A new epoch ends whatever
 * other ranks still wait for in the previous one. In a new epoch the first buffer is written
 * without waiting. Another rank may still read it for the cancelled step, and gets garbage. So the
 * caller must discard results of such a step: a rank begins a new epoch only when the step is void
 * on all ranks.
 *
 * Threads: one at a time per object; cox_group_abort from any thread ends a gather.
 * Ownership: the caller owns the object; the group is lent until free.
 * Blocks: new and gather, until their deadline, while they wait for other ranks.
 * Codes: those of the group's operations; err names the rank that died or is missing. After
 * COX_TIMEOUT, COX_PEER_DEAD, COX_ABORTED and cox_group_abort the epoch is over: every gather in it
 * fails, on all ranks.
 * If the process dies: its memfd lives while other ranks map it; these get COX_PEER_DEAD.
 */
#ifndef COX_ENGINE_TENSOR_GATHER_H
#define COX_ENGINE_TENSOR_GATHER_H

#include "channel/base/idioms.h"

#include <coxswain/group.h>

struct cox_tensor_gather;

/* slice_count: slices of this rank, equal on every rank. slice_length_max: floats of the longest
 * slice. Every rank of the group calls it, with the same numbers and in the same epoch. After a
 * failure nothing is left.
 * Returns
 *   0
 *   COX_INVALID: another rank has other numbers
 *   COX_CORRUPT, COX_DENIED: another rank's memory is not sealed, or not of this size and user; err
 *     says which
 *   COX_NO_SPACE
 *   as cox_group_gather and cox_group_gather_fds
 */
int cox_tensor_gather_new(struct cox_group *group, uint32_t slice_count, size_t slice_length_max,
                          uint64_t deadline_ns, struct cox_tensor_gather **ret_gather,
                          struct cox_error *err);
struct cox_tensor_gather *cox_tensor_gather_free(struct cox_tensor_gather *gather);
COX_DEFINE_FREEP(struct cox_tensor_gather, cox_tensor_gather_free);

/* Time of this rank in the gathers of a step, without the time to read the slices. */
struct cox_tensor_gather_times {
    uint64_t total_ns;
    /* part of it from its own arrival until all others had arrived and it was running again */
    uint64_t wait_ns;
};
/* Since begin; lent until free. */
const struct cox_tensor_gather_times *cox_tensor_gather_times(
    const struct cox_tensor_gather *gather);

/* Begins a step in this epoch of the group: the current one or a larger one, the same on every
 * rank. Its gathers must end by the deadline. Returns 0, or COX_INVALID: a smaller epoch. */
int cox_tensor_gather_begin(struct cox_tensor_gather *gather, uint64_t epoch, uint64_t deadline_ns,
                            struct cox_error *err);
/* slices has room for the slices of all ranks, stride floats apart. This rank has filled the first
 * slice_length floats of its own. On success ret_slices has the address of each slice, lent until
 * the next gather. Its own slices are in slices, the others' where their owners wrote them. Every
 * rank calls it equally often in a step, with the same slice_length, at most slice_length_max. The
 * stride may differ. */
int cox_tensor_gather_all(struct cox_tensor_gather *gather, const float *slices, size_t stride,
                          size_t slice_length, const float **ret_slices, struct cox_error *err);
/* To be called when a result computed from the last gather is not finite, to find the rank at
 * fault. A rank passes on what it computes from others' slices under its own name, so it must ask
 * first. Never returns 0, but COX_INVALID. err names the rank with a slice that is not finite. If
 * there is none, it names the rank with the largest number if that can overflow the sum, otherwise
 * no rank. The following cox_group_abort reports that rank to the others. */
int cox_tensor_gather_blame(const struct cox_tensor_gather *gather, const float *const *slices,
                            size_t slice_length, struct cox_error *err);

#endif
