/*
 * latency: how long something took, many times over: a histogram of fixed size.
 *
 * Buckets are log-linear: every value below 16 ns has one of its own, and every power of two above
 * that is cut into 8 of equal width. For v >= 8, with e = floor(log2(v)):
 *
 *     bucket(v) = 8 (e - 2) + (floor(v / 2^(e-3)) mod 8)      bucket(v) = v below 8
 *
 * A bucket that begins at b is at most b / 8 wide and stands for its middle, so that what is read
 * is off by at most 1/16 of the true value (6.25 %). All 64 bits have a bucket: nothing is cut off.
 *
 * Threads: no lock of its own; one thread at a time per object.
 * Ownership: the caller's memory; zeroed means empty.
 * Blocks: nothing, and allocates nothing. add takes the same time whatever was added before.
 * If the process dies: private memory.
 */
#ifndef COX_COORDINATOR_LATENCY_H
#define COX_COORDINATOR_LATENCY_H

#include "channel/base/base.h"

#define COX_LATENCY_BUCKET_COUNT 496

struct cox_latency {
    /* of all buckets together */
    uint64_t count;
    uint64_t buckets[COX_LATENCY_BUCKET_COUNT];
};

void cox_latency_add(struct cox_latency *latency, uint64_t ns);
/* The smallest value that permille of 1,000 values do not exceed (1 to 1,000; 500 is the median),
 * as its bucket says it. 0 when there are no values. */
uint64_t cox_latency_percentile(const struct cox_latency *latency, uint32_t permille);

#endif
