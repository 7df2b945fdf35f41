/*
 * allocations: how often this process has called the allocator; what its libraries allocate is
 * counted as well.
 *
 * Any thread. Nothing blocks. If the process dies: nothing is left.
 */
#ifndef BENCH_ALLOCATIONS_H
#define BENCH_ALLOCATIONS_H

#include <stdint.h>

uint64_t allocations_now(void);

#endif
