/*
 * fake_torch: sets what the flight recorder of a fake libtorch_cpu.so returns.
 *
 * Threads: set while nobody asks; the others any.
 * Ownership: nothing. Blocks: nothing. If the process dies: nothing is left.
 */
#ifndef COX_TESTS_FAKE_TORCH_H
#define COX_TESTS_FAKE_TORCH_H

#include <stdbool.h>
#include <stddef.h>

/* Bytes of all collectives, letters a, and of those that have not completed, letters b. */
void fake_torch_set(size_t all, size_t active);
/* A dump does not return until it is held no more. */
void fake_torch_hold(bool hold);
/* Strings that were given back. */
int fake_torch_freed(void);

#endif
