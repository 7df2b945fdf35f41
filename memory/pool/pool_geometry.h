/*
 * pool_geometry: the sizes of a pool and the offsets of its areas, computed from the options, and
 * again on attach from the header, in private memory.
 *
 * Threads: any; there is no state.
 * Blocks: nothing.
 * If the process dies: nothing is left.
 */
#ifndef COX_MEMORY_POOL_GEOMETRY_H
#define COX_MEMORY_POOL_GEOMETRY_H

#include "pool_layout.h"

struct cox_pool_geometry {
    struct cox_domain_id domain;
    enum cox_pool_strategy strategy;
    bool on_demand;
    uint32_t owner_count;
    /* slab: units */
    uint32_t block_count;
    /* fixed: 0 */
    uint32_t slab_count;
    /* units of a slab, a power of two; fixed: 1 */
    uint32_t slab_units;
    /* entries of the pages area: slabs, or blocks; 0 unless on_demand */
    uint32_t page_count;
    uint64_t block_size;
    /* fixed: 0 */
    uint64_t slab_size;
    uint64_t retain_size;
    uint64_t memory_size;
    /* Offsets in the words. */
    uint64_t owners, blocks, pins, hints, slabs, pages, reference_rows;
    uint64_t row_stride;
    uint64_t words_size;
};

/* Checks the options and fills in defaults. Returns 0 or COX_INVALID. */
int cox_pool_geometry_resolve(const struct cox_pool_options *options,
                              struct cox_pool_geometry *ret_geometry, struct cox_error *err);
/* header: a private copy; size: of the words' file. Returns 0; COX_VERSION; COX_CORRUPT. */
int cox_pool_geometry_load(const struct cox_pool_layout_header *header, uint64_t size,
                           struct cox_pool_geometry *ret_geometry, struct cox_error *err);
/* CRC of the header's constants. */
uint32_t cox_pool_geometry_crc(const struct cox_pool_layout_header *header);
/* Stores the constants, except id, system, the blocks' file, and their CRC. */
void cox_pool_geometry_store(const struct cox_pool_geometry *geometry,
                             struct cox_pool_layout_header *ret_header);

#endif
