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

#include <coxswain/executor.h>

#define COX_LATENCY_BUCKET_COUNT 496

/* How long something took, many times over: a histogram of fixed size.
 *
 * Buckets are log-linear: every value below 16 ns has one of its own, and every power of two above
 * that is cut into 8 of equal width. For v >= 8, with e = floor(log2(v)):
 *
 *     bucket(v) = 8 (e - 2) + (floor(v / 2^(e-3)) mod 8)      bucket(v) = v below 8
 *
 * A bucket that begins at b is at most b / 8 wide and stands for its middle, so that what is read
 * is off by at most 1/16 of the true value (6.25 %). All 64 bits have a bucket: nothing is cut off.
 */
struct cox_latency {
    /* of all buckets together */
    uint64_t count;
    uint64_t buckets[COX_LATENCY_BUCKET_COUNT];
};

void cox_latency_add(struct cox_latency *latency, uint64_t ns);
/* The smallest value that permille of 1,000 values do not exceed (1 to 1,000; 500 is the median),
 * as its bucket says it. 0 when there are no values. */
uint64_t cox_latency_percentile(const struct cox_latency *latency, uint32_t permille);
/* The sum of all values, each as its bucket says it, and how many were below 2^(10 + i). */
uint64_t cox_latency_sum(const struct cox_latency *latency, uint64_t below[COX_PHASE_BOUND_COUNT]);

struct cox_stats {
    /* without its phases, which read adds */
    struct cox_channel_stats counts;
    struct cox_latency phases[COX_PHASE_COUNT];
    struct cox_latency death_detection, hang_detection;
};

/* Of one rank. */
struct cox_rank_stats {
    uint64_t errors, stale_replies, late_replies;
    uint64_t group_ns, group_wait_ns;
    /* of its callback in steps, as it reports them */
    struct cox_latency execute;
};

struct Coxswain__ExecuteResponse;

/* Counts a reply that was an error or invalid. */
void cox_rank_stats_fail(struct cox_rank_stats *stats, int32_t code);
/* Counts the times of a step's reply, if it has any. Times that cannot be are none. */
void cox_rank_stats_reply(struct cox_rank_stats *stats,
                          const struct Coxswain__ExecuteResponse *response);
/* Reads a histogram. */
void cox_latency_read(const struct cox_latency *latency, struct cox_phase_stats *ret_stats);

/* Counts a request that was published. out_of_line: it was out of line. */
void cox_stats_publish(struct cox_stats *stats, uint64_t request_size, bool out_of_line);
/* The replies that were taken for one request, of all ranks. */
struct cox_stats_taken {
    uint64_t bytes;
    /* of these, out of line */
    uint64_t large_count;
    uint64_t large_bytes;
};
void cox_stats_end(struct cox_stats *stats, int status, const struct cox_stats_taken *taken);
/* Counts a completion whose handler returned at returned_ns. */
void cox_stats_return(struct cox_stats *stats, const struct cox_completion *completion,
                      uint64_t returned_ns);
void cox_stats_read(const struct cox_stats *stats, struct cox_channel_stats *ret_stats);

/* "queue", "ranks", ...; "unknown" outside. Static storage. */
const char *cox_phase_name(uint32_t phase);

#endif
