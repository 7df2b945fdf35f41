/*
 * memory: a channel in private memory: every region a heap block of exactly its size, where a
 * sanitizer sees one step beyond. Kept from input to input for each of the few geometries.
 */
#ifndef COX_TESTS_FUZZ_MEMORY_H
#define COX_TESTS_FUZZ_MEMORY_H

#include "channel/shm/channel.h"

#define MEMORY_RANK_COUNT_MAX 4
#define MEMORY_DEPTH_MAX 3
#define MEMORY_GROUP_INCARNATION 0x1234567u

/* Everything zero but what an earlier user wrote; rank_count and depth are taken modulo what there
 * is. legacy: depth 1, 512 KiB a slot. */
struct cox_channel *memory_channel(uint8_t rank_count, uint8_t depth, bool legacy,
                                   enum cox_channel_id id);

#endif
