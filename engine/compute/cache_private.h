/* The struct of the cache, shared by cache.c (blocks and copies) and cache_owner.c (owners). */
#ifndef COX_ENGINE_CACHE_PRIVATE_H
#define COX_ENGINE_CACHE_PRIVATE_H

#include "cache.h"

#include <stdatomic.h>

struct cox_cache {
    struct cox_cache_geometry geometry;
    /* floats, padded to COX_CACHE_ALIGNMENT */
    size_t block_length;
    float *blocks;
    float *host_blocks;
    /* the blocks, with their users */
    struct cox_kv_blocks *kv;
    /* Per slot, the user of the last sequence with a row there; 0: none. Grown to the highest
     * slot. */
    uint64_t *slots;
    uint32_t slot_count;
    /* Counts blocks given by any thread. release; partner: cox_cache_begin, which then sees the
     * bytes that a pull wrote. */
    _Atomic uint64_t given;
};

#endif
