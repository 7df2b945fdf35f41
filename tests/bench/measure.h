/*
 * measure: a clock, and what is made of samples.
 *
 * Any thread; the caller owns everything. Nothing blocks but sleep_until. If the process dies:
 * nothing is left.
 */
#ifndef BENCH_MEASURE_H
#define BENCH_MEASURE_H

#include <stddef.h>
#include <stdint.h>

uint64_t measure_now_ns(void);
void measure_sleep_until(uint64_t until_ns);
/* Sorts the values; the middle one, of an even number the mean of two. */
double measure_median(double *values, size_t count);
/* Sorts the values. Of a sorted row the one at that share of its length, 0.25 for example. */
double measure_quantile(double *values, size_t count, double share);
/* Sorts the samples. */
void measure_sort(uint64_t *samples_ns, size_t count);
/* The slope of the line through the points that has the least squares. */
double measure_slope(const double *x, const double *y, size_t count);

#endif
