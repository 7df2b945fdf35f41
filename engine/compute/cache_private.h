/* The cache's own memory, shared by cache.c (blocks and moves) and cache_owner.c (whose they are).
 */
#ifndef COX_WORKER_MODEL_CACHE_PRIVATE_H
#define COX_WORKER_MODEL_CACHE_PRIVATE_H

#include "cache.h"

#include <stdatomic.h>

struct cox_cache {
    struct cox_cache_geometry geometry;
    /* floats, padded to COX_CACHE_ALIGNMENT */
    size_t block_length;
    float *blocks;
    float *host_blocks;
    /* blocks, when they are our own */
    struct cox_kv_blocks *kv;
    /* Of the last row that was in a slot, its generation; 0: none. Grown to the highest slot. */
    uint64_t *slots;
    uint32_t slot_count;
    /* Blocks given away by any thread. release; partner: cox_cache_begin, which then sees what a
     * pull wrote. */
    _Atomic uint64_t given;
};

#endif
