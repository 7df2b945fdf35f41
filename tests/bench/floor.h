/*
 * floor: the least that blocking processes can do on this machine: one request buffer for all, one
 * reply buffer per worker, memcpy in and memcpy out, and nothing else: no deadline, no liveness, no
 * bounds, no status; a worker that dies hangs it. What a channel costs is what it takes beyond
 * this. Two ways to sleep:
 *
 *   semaphore  a pair of process-shared semaphores per worker: the coordinator posts and waits N
 *              times
 *   futex      one word that all workers wait on, woken by one call; the last one that answers (a
 *              counter) wakes the coordinator
 *
 * Subjects, see subject.h. The workers are forked and the kernel kills them with their coordinator;
 * the memory has no name.
 */
#ifndef BENCH_FLOOR_H
#define BENCH_FLOOR_H

#include "subject.h"

extern const struct subject_ops floor_semaphore_ops, floor_futex_ops;

#endif
