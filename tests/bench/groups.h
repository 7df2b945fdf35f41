/*
 * groups: what a group takes besides the time of a round: processor at a steady rate, wake-ups when
 * nothing is asked, memory, and the time until it is started.
 *
 * Rows like those of cells (section, kind, placement, ranks, and the figures), appended to the
 * bench's. Placed by the kernel, where nothing else is said. One thread.
 */
#ifndef BENCH_GROUPS_H
#define BENCH_GROUPS_H

#include "cells.h"

/* rate: cpu_share of one core at 950 rounds a second, and p50_us. */
void groups_rate(struct bench *bench, const char *const *kinds, enum placement placement,
                 uint32_t rank_count);
/* idle: sleeps of all threads in idle_ms. */
void groups_idle(struct bench *bench, uint32_t rank_count);
/* start: start_ms, pss_kib, private_kib, shared_kib. */
void groups_start(struct bench *bench, uint32_t rank_count);
/* allocations: how many there were in so many rounds, by all processes. */
void groups_allocations(struct bench *bench, uint32_t rank_count);

#endif
