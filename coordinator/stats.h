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

#include "executor.h"
#include "latency.h"

struct cox_stats {
    struct cox_channel_stats counts; /* without its phases, which read adds */
    struct cox_latency phases[COX_PHASE_COUNT];
};

void cox_stats_publish(struct cox_stats *stats, size_t request_size);
/* A request ends: reply_size bytes were taken out of slots for it. */
void cox_stats_end(struct cox_stats *stats, int status, uint64_t reply_size);
/* And its completion, with all its times, was handed to who returned at returned_ns. */
void cox_stats_return(struct cox_stats *stats, const struct cox_completion *completion,
                      uint64_t returned_ns);
void cox_stats_read(const struct cox_stats *stats, struct cox_channel_stats *ret_stats);

#endif
