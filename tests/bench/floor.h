/*
 * floor: the least that blocking processes can do on this machine: one request buffer for all, one
 * pair of process-shared semaphores and one reply buffer per worker, memcpy. No deadline, no
 * liveness, no bounds, no status: a worker that dies hangs it. What a channel costs is what it
 * takes beyond this.
 *
 * One thread of the coordinator; the workers are forked, so start it before there are threads.
 * Ownership: struct floor owns workers and memory until free.
 * Blocks: floor_round until every worker has answered. If the process dies: the kernel kills the
 * workers; the memory has no name.
 */
#ifndef BENCH_FLOOR_H
#define BENCH_FLOOR_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct floor;

/* Returns 0 or -errno. */
int floor_start(uint32_t rank_count, size_t request_size, size_t reply_size,
                struct floor **ret_floor);
struct floor *floor_free(struct floor *floor); /* ends the workers; NULL-safe, returns NULL */
/* rank_count of them. */
const pid_t *floor_pids(const struct floor *floor);
/* One request to every worker, every reply copied out. Returns 0, or -EBADMSG: an answer to
 * something else. */
int floor_round(struct floor *floor, uint8_t *request, uint64_t round);

#endif
