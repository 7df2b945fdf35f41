/*
 * prefill_decode: prompts completed by two running groups: one computes them and holds their keys
 * and values, the other pulls these and generates. The text is that of one group.
 *
 * Threads: one.
 * Ownership: everything is the caller's.
 * Blocks: until every prompt is done, a group has ended, or stop_fd is readable.
 * If the process dies: both groups forget what it asked; what was held for it is free.
 */
#ifndef COX_COORDINATOR_SPLIT_H
#define COX_COORDINATOR_SPLIT_H

#include "coordinator/client/client.h"
#include "prompts.h"

struct cox_prefill_decode_options {
    /* names of the groups */
    const char *prefill;
    const char *decode;
    /* keys and values of a prompt are held so long */
    uint64_t lease_ms;
    /* what cannot be pulled is computed again in the first group, twice at most, and then fails */
    bool no_recompute;
    /* prompts under way at a time, at least 1, and not more than either group takes */
    uint32_t window;
    /* to link the groups */
    uint64_t connect_ms;
};

struct cox_prefill_decode_stats {
    /* prompts that the second group went on with */
    uint64_t pulled;
    /* that it had to compute itself */
    uint64_t recomputed;
    /* times that the groups were linked */
    uint64_t links;
};

/* As cox_remote_complete, which see, with a connection to each group. Links them where needed.
 * ret_split is filled in any case. */
int cox_prefill_decode_complete(struct cox_prompts *prompts, struct cox_client *prefill,
                                struct cox_client *decode,
                                const struct cox_prefill_decode_options *split, int stop_fd,
                                const struct cox_complete_options *options,
                                struct cox_engine_loop_stats *ret_stats,
                                struct cox_prefill_decode_stats *ret_split, struct cox_error *err);

#endif
