/*
 * stats: the counters of a channel, and the time that requests took in each phase.
 *
 * Threads: no lock of its own; the collector's lock protects it.
 * Ownership: the caller's memory; zeroed means empty.
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

/* Counts a request that was published. in_block: it was out of line. */
void cox_stats_publish(struct cox_stats *stats, uint64_t request_size, bool in_block);
/* The replies that were taken for one request, of all ranks. */
struct cox_stats_taken {
    uint64_t bytes;
    /* of these, out of line */
    uint64_t block_count;
    uint64_t block_bytes;
};
void cox_stats_end(struct cox_stats *stats, int status, const struct cox_stats_taken *taken);
/* Counts a completion whose handler returned at returned_ns. */
void cox_stats_return(struct cox_stats *stats, const struct cox_completion *completion,
                      uint64_t returned_ns);
void cox_stats_read(const struct cox_stats *stats, struct cox_channel_stats *ret_stats);

#endif
