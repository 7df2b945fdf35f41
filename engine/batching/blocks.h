/*
 * blocks: allocates the blocks of the KV cache.
 *
 * Every rank has the same blocks, 0 to count - 1. Only the coordinator decides which sequence uses
 * which.
 *
 * Threads: one at a time.
 * Ownership: the caller owns the ids it takes until it gives them back. Giving an id back twice is
 *   a programmer error and asserts.
 * Blocks: nothing (threads).
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_ENGINE_BLOCKS_H
#define COX_ENGINE_BLOCKS_H

#include <coxswain/base.h>

struct cox_blocks {
    /* a stack of ids: the first free_count are free */
    int32_t *free;
    /* indexed by id */
    bool *taken;
    uint32_t free_count;
    uint32_t count;
};

/* All blocks are free. Returns 0 or -ENOMEM. */
int cox_blocks_init(struct cox_blocks *blocks, uint32_t count);
void cox_blocks_deinit(struct cox_blocks *blocks); /* idempotent; a zeroed struct is fine */

/* Takes count blocks, or none. Returns false when fewer are free. */
bool cox_blocks_take(struct cox_blocks *blocks, uint32_t count, int32_t *ret_ids);
/* Takes exactly these ids. Ids that are taken already, or do not exist, are skipped. */
void cox_blocks_reserve(struct cox_blocks *blocks, const int32_t *ids, uint32_t count);
void cox_blocks_give(struct cox_blocks *blocks, const int32_t *ids, uint32_t count);

#endif
