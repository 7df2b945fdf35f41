/*
 * prefill_decode: completes prompts with two running groups. The prefill group computes a prompt
 * and keeps a KV lease; the decode group pulls its KV blocks and generates. The text is the same as
 * with one group.
 *
 * Threads: one.
 * Ownership: everything is the caller's.
 * Blocks: until every prompt is done, a group has ended, or stop_fd is readable.
 * If the process dies: both groups cancel its prompts and end its leases.
 */
#ifndef COX_PROGRAM_PREFILL_DECODE_H
#define COX_PROGRAM_PREFILL_DECODE_H

#include "program/client/client.h"
#include "prompts.h"

struct cox_prefill_decode_options {
    /* names of the groups */
    const char *prefill;
    const char *decode;
    /* prompts under way at a time: at least 1, at most what either group accepts */
    uint32_t window;
    /* time to link the groups */
    uint64_t connect_ms;
};

struct cox_prefill_decode_stats {
    /* prompts that the decode group continued */
    uint64_t pulled;
    /* prompts that it had to compute itself */
    uint64_t recomputed;
    /* how often the groups were linked */
    uint64_t links;
};

/* As cox_remote_complete, with a connection to each group. Links the groups where needed.
 * ret_pair_stats is always filled. */
int cox_prefill_decode_complete(struct cox_prompts *prompts, struct cox_client *prefill,
                                struct cox_client *decode,
                                const struct cox_prefill_decode_options *how, int stop_fd,
                                const struct cox_complete_options *options,
                                struct cox_engine_loop_stats *ret_stats,
                                struct cox_prefill_decode_stats *ret_pair_stats,
                                struct cox_error *err);

#endif
