/*
 * tensor_gather: slices of numbers from every rank of a group to every other, through memory they
 * share.
 *
 * A rank owns as many slices as the others, in a row by rank. It writes its own into a memfd of its
 * own, which the others map for reading and whose fd they got by the group; a barrier later all
 * slices can be read where their owners wrote them. Bits are copied, never added: who adds does so
 * in the order of the slices.
 *
 * Each rank has two buffers, used in turn, so that one barrier per gather is enough: who writes
 * one has passed the barrier of the gather before, where everybody arrived with the one before
 * that already read. Nothing is copied out: until a rank arrives at the next gather, it reads the
 * others' slices where they are.
 *
 * The memory is `cox_payload_exchange`: sealed, so that its owner alone can write it, and what that
 * writes is numbers alone.
 *
 * Epochs are those of the group, and change only after a step that was given up: an epoch that
 * begins ends whatever others are still waiting for in the one before. In a new epoch the first
 * buffer is written without waiting, perhaps while another rank still reads it for the step that
 * was given up, and gets rubbish. So who calls makes sure that nothing comes of such a step: that a
 * rank begins a new epoch only once the step is void for all.
 *
 * Threads: one at a time per object; cox_group_abort from any ends a gather.
 * Ownership: the caller owns the object; the group is lent until free.
 * Blocks: new and gather until their deadline, as the group does, and no longer than other ranks
 *   need.
 * Codes: those of the group's operations; err names the rank that died or is missing. After
 *   COX_TIMEOUT, COX_PEER_DEAD, COX_ABORTED and cox_group_abort the epoch is over: every gather in
 *   it fails, on all ranks.
 * If the process dies: its memfd lives as long as somebody maps it; the others get COX_PEER_DEAD.
 */
#ifndef COX_ENGINE_TENSOR_GATHER_H
#define COX_ENGINE_TENSOR_GATHER_H

#include "worker/group/group.h"

struct cox_tensor_gather;

/* slice_count: slices of this rank, the same number on every one. slice_length_max: floats of the
 * longest slice. Every rank of the group calls it, with the same numbers and in the same epoch.
 * Returns 0 and gives the object; COX_INVALID: another rank has other numbers; COX_CORRUPT,
 * COX_DENIED: what another rank gave is no sealed memory of that size and this user, err says
 * which; COX_NO_SPACE; what cox_group_gather and cox_group_gather_fds return. Nothing is left
 * unless 0. */
int cox_tensor_gather_new(struct cox_group *group, uint32_t slice_count, size_t slice_length_max,
                          uint64_t deadline_ns, struct cox_tensor_gather **ret_gather,
                          struct cox_error *err);
struct cox_tensor_gather *cox_tensor_gather_free(struct cox_tensor_gather *gather);
void cox_tensor_gather_freep(struct cox_tensor_gather **gather); /* for _cox_cleanup_ */

/* Bytes that this rank shares. */
uint64_t cox_tensor_gather_size(const struct cox_tensor_gather *gather);

/* What the gathers of a step have taken this rank, without reading what it was lent. */
struct cox_tensor_gather_times {
    uint64_t total_ns;
    /* of these from its arrival until all others had arrived and it was running again */
    uint64_t wait_ns;
};
/* Since begin; lent until free. */
const struct cox_tensor_gather_times *cox_tensor_gather_times(
    const struct cox_tensor_gather *gather);

/* A step begins, in this epoch of the group: the one before or a larger one, the same on every
 * rank. Its gathers must end by the deadline. Returns 0; COX_INVALID: a smaller epoch. */
int cox_tensor_gather_begin(struct cox_tensor_gather *gather, uint64_t epoch, uint64_t deadline_ns,
                            struct cox_error *err);
/* slices has room for those of all ranks, stride floats apart, of which this rank has filled the
 * first slice_length floats of its own. On return 0 ret_slices says where each of all is, lent
 * until the next gather: own ones in slices, the others' where their owners wrote them. Every rank
 * calls it equally often in a step, with the same slice_length, at most slice_length_max; the
 * stride is its own affair. */
int cox_tensor_gather_all(struct cox_tensor_gather *gather, const float *slices, size_t stride,
                          size_t slice_length, const float **ret_slices, struct cox_error *err);
/* What comes of the slices of the last gather is not finite. A rank can give what it likes, and
 * what others compute with it they give in their own name: so this is to be asked before. Returns
 * COX_INVALID: err names the rank one of whose slices has a number that is not finite or, if there
 * is none, the largest, if that is large enough; otherwise nobody. Never 0. The cox_group_abort
 * that follows tells the other ranks who it is. */
int cox_tensor_gather_blame(const struct cox_tensor_gather *gather, const float *const *slices,
                            size_t slice_length, struct cox_error *err);

#endif
