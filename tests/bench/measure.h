/*
 * measure: what a slice of rounds took: percentiles of the rounds, CPU time and sleeps of every
 * process concerned.
 *
 * One thread of the coordinator. The caller owns samples and pids. Nothing blocks. If the process
 * dies: nothing is left.
 */
#ifndef BENCH_MEASURE_H
#define BENCH_MEASURE_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Since each process started. */
struct measure_usage {
    uint64_t cpu_ns;    /* user and system time of all threads */
    uint64_t sleeps;    /* voluntary context switches: somebody slept, and was woken */
    uint64_t preempted; /* involuntary ones */
};

/* One slice; per round where not said otherwise. */
struct measure_slice {
    double p50_us;
    double p99_us;
    double cpu_us;
    double sleeps;
    double preempted;
};

uint64_t measure_now_ns(void);
/* This process and `pids` together. The two readings of a slice leave the cost of reading outside
 * of each other: `begin` reads CPU time last, `end` reads it first. Returns 0 or -errno. */
int measure_usage_begin(const pid_t *pids, uint32_t pid_count, struct measure_usage *ret_usage);
int measure_usage_end(const pid_t *pids, uint32_t pid_count, struct measure_usage *ret_usage);

/* Sorts the samples. */
void measure_slice_fill(struct measure_slice *slice, uint64_t *samples_ns, size_t sample_count,
                        const struct measure_usage *begin, const struct measure_usage *end);
/* Sorts the values; the middle one, of an even number the mean of two. */
double measure_median(double *values, size_t count);

#endif
