/*
 * stacks_fetch: where the threads of ranks on nodes are, which the lead asks for and waits for.
 *
 * STACKS_ASK has a number in `sequence`, ranks in `asked`, and a deadline. The node replies with one
 * STACKS for each of its ranks, with the same number and that rank alone in `asked`; its payload is
 * text: a line "summary: ...", and those of struct cox_rank_stacks (executor.h). Neither is sent
 * again: what is lost is missed by the deadline of the lead.
 *
 * Bytes: a frame of a node is input. Only a text of a rank that the node has, and that is awaited, is
 *   copied; what is in it is as untrusted as before.
 * Threads: one at a time, under the caller's lock.
 * Ownership: the texts are the caller's, of malloc.
 */
#ifndef COX_NODES_STACKS_FETCH_H
#define COX_NODES_STACKS_FETCH_H

#include "frame.h"

struct cox_stacks_fetch {
    /* one more for each; the first is 1 */
    uint64_t number;
    /* those whose text has not come; empty: nothing is awaited */
    struct cox_rank_set awaited;
    /* of each rank, with a zero at its end; NULL: it has not come */
    char *texts[COX_RANK_COUNT_MAX];
};

static inline bool cox_stacks_fetch_awaits(const struct cox_stacks_fetch *fetch)
{
    return (fetch->awaited.words[0] | fetch->awaited.words[1]) != 0;
}
/* It is not awaited any more. */
static inline void cox_stacks_fetch_forget(struct cox_stacks_fetch *fetch, uint32_t rank)
{
    fetch->awaited.words[rank / 64] &= ~(UINT64_C(1) << rank % 64);
}
/* Begins with nothing awaited; the caller adds ranks. */
void cox_stacks_fetch_begin(struct cox_stacks_fetch *fetch);
/* A STACKS of the node, whose ranks these are. Returns true: a text has come. One that nobody waits
 * for is dropped, and so is one for which there is no memory. */
bool cox_stacks_fetch_take(struct cox_stacks_fetch *fetch, const struct cox_frame *frame,
                           uint32_t rank_first, uint32_t rank_count);

/* Makes the reply to a STACKS_ASK for one rank, cut to COX_FRAME_STACKS_MAX; NULL: no memory. The
 * caller frees it. */
uint8_t *cox_stacks_fetch_reply(const struct cox_frame *ask, uint32_t rank, const char *summary,
                                const char *text, uint64_t now_ns, size_t *ret_size);

#endif
