/*
 * stats: what a channel has done so far: its counters, and how long requests took in each phase.
 *
 * Threads: no lock of its own: under that of its collector.
 * Ownership: the caller's memory; zeroed means nothing has happened.
 * Blocks: nothing, and allocates nothing.
 * If the process dies: private memory.
 */
#ifndef COX_COORDINATOR_STATS_H
#define COX_COORDINATOR_STATS_H

#include "completion.h"
#include "latency.h"

struct cox_stats {
    /* without its phases, which read adds */
    struct cox_channel_stats counts;
    struct cox_latency phases[COX_PHASE_COUNT];
};

/* in_block: it did not fit its frame. */
void cox_stats_publish(struct cox_stats *stats, uint64_t request_size, bool in_block);
/* What was taken for a request, of all ranks together. */
struct cox_stats_taken {
    uint64_t bytes;
    /* of these, in blocks */
    uint64_t block_count;
    uint64_t block_bytes;
};
void cox_stats_end(struct cox_stats *stats, int status, const struct cox_stats_taken *taken);
/* And its completion, with all its times, was handed to who returned at returned_ns. */
void cox_stats_return(struct cox_stats *stats, const struct cox_completion *completion,
                      uint64_t returned_ns);
void cox_stats_read(const struct cox_stats *stats, struct cox_channel_stats *ret_stats);

#endif
