#include "cache.h"

#include "cache_private.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "channel/base/idioms.h"

#define BLOCK_SIZE_MAX 4096u
#define BLOCK_COUNT_MAX (1u << 24)

/* Memory that a list copies from or to. */
struct side {
    const char *name;
    float *blocks;
    uint32_t count;
};

uint64_t cox_cache_block_size(const struct cox_cache_geometry *geometry)
{
    uint64_t size = (uint64_t)geometry->layer_count * 2 * geometry->kv_head_count *
                    geometry->block_size * geometry->head_dim * sizeof(float);

    return (size + COX_CACHE_ALIGNMENT - 1) / COX_CACHE_ALIGNMENT * COX_CACHE_ALIGNMENT;
}

static int check_range(const char *name, uint32_t value, uint32_t min, uint32_t max,
                       struct cox_error *err)
{
    if (value >= min && value <= max)
        return 0;
    return cox_fail(err, COX_INVALID, "KV cache: %s is %u; allowed: %u to %u", name, value, min,
                    max);
}

static int check_geometry(const struct cox_cache_geometry *geometry, struct cox_error *err)
{
    int r;

    /* With the limits of config.h, these keep a block below 2^46 bytes and all blocks below 2^63.
     */
    r = check_range("layers", geometry->layer_count, 1, 1024, err);
    if (!r)
        r = check_range("KV heads", geometry->kv_head_count, 1, 1024, err);
    if (!r)
        r = check_range("head_dim", geometry->head_dim, 1, 1024, err);
    if (!r)
        r = check_range("block_size", geometry->block_size, 1, BLOCK_SIZE_MAX, err);
    if (!r)
        r = check_range("block_count", geometry->block_count, 1, BLOCK_COUNT_MAX, err);
    if (!r)
        r = check_range("swap_block_count", geometry->swap_block_count, 0, BLOCK_COUNT_MAX, err);
    return r;
}

/* Mapped pages instead of malloc: when reinit replaces a cache, the pages of the old one are
 * returned at once. malloc does not do that once it has seen one freed. The pages are zero, and
 * populated here. */
static int allocate(uint64_t block_size, uint32_t count, const char *name, float **ret_blocks,
                    struct cox_error *err)
{
    uint64_t size;
    void *blocks = MAP_FAILED;

    if (!__builtin_mul_overflow(block_size, (uint64_t)count, &size) && size <= SIZE_MAX / 2)
        blocks = mmap(NULL, (size_t)size, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (blocks == MAP_FAILED)
        return cox_fail(
            err, COX_NO_SPACE,
            "KV cache: no memory for %u %s blocks of %llu bytes; use fewer or smaller ones", count,
            name, (unsigned long long)block_size);
    *ret_blocks = blocks;
    return 0;
}

static void release(const struct cox_cache *cache, float *blocks, uint32_t count)
{
    if (blocks)
        munmap(blocks, (size_t)cox_cache_block_size(&cache->geometry) * count);
}

/* Slots for as many sequences as a worker has by default. */
#define SLOT_COUNT_DEFAULT 4096

static int create_kv_blocks(struct cox_cache *cache, struct cox_error *err)
{
    const uint64_t block_size = cox_cache_block_size(&cache->geometry);
    struct cox_error why = {0};
    int r = cox_kv_blocks_new(cache->geometry.block_count, block_size, &cache->kv, &why);

    if (r)
        return cox_fail(err, r,
                        "KV cache: %u KV blocks of %llu bytes: %s; use fewer or smaller ones",
                        cache->geometry.block_count, (unsigned long long)block_size, why.text);
    cache->slots = calloc(SLOT_COUNT_DEFAULT, sizeof(*cache->slots));
    if (!cache->slots)
        return cox_fail(err, COX_NO_SPACE, "KV cache: no memory");
    cache->slot_count = SLOT_COUNT_DEFAULT;
    cache->blocks = cox_kv_blocks_info(cache->kv).memory;
    return 0;
}

int cox_cache_new(const struct cox_cache_geometry *geometry, struct cox_cache **ret_cache,
                  struct cox_error *err)
{
    _cox_cleanup_(cox_cache_freep) struct cox_cache *cache = NULL;
    int r;

    r = check_geometry(geometry, err);
    if (r)
        return r;
    cache = calloc(1, sizeof(*cache));
    if (!cache)
        return cox_fail(err, COX_NO_SPACE, "KV cache: no memory");
    cache->geometry = *geometry;
    cache->block_length = (size_t)(cox_cache_block_size(geometry) / sizeof(float));
    r = create_kv_blocks(cache, err);
    if (r)
        return r;
    if (geometry->swap_block_count) {
        r = allocate(cox_cache_block_size(geometry), geometry->swap_block_count, "host",
                     &cache->host_blocks, err);
        if (r)
            return r;
    }
    *ret_cache = cox_steal_ptr(&cache);
    return 0;
}

struct cox_cache *cox_cache_free(struct cox_cache *cache)
{
    if (!cache)
        return NULL;
    cox_kv_blocks_free(cache->kv);
    free(cache->slots);
    release(cache, cache->host_blocks, cache->geometry.swap_block_count);
    free(cache);
    return NULL;
}

const struct cox_cache_geometry *cox_cache_geometry(const struct cox_cache *cache)
{
    return &cache->geometry;
}

static float *locate(struct cox_cache *cache, uint32_t block, uint32_t layer, uint32_t kv_head,
                     uint32_t kind)
{
    const struct cox_cache_geometry *g = &cache->geometry;
    size_t index = ((size_t)layer * 2 + kind) * g->kv_head_count + kv_head;

    COX_ASSERT(block < g->block_count && layer < g->layer_count && kv_head < g->kv_head_count);
    return cache->blocks + block * cache->block_length + index * g->block_size * g->head_dim;
}

float *cox_cache_keys(struct cox_cache *cache, uint32_t block, uint32_t layer, uint32_t kv_head)
{
    return locate(cache, block, layer, kv_head, 0);
}

float *cox_cache_values(struct cox_cache *cache, uint32_t block, uint32_t layer, uint32_t kv_head)
{
    return locate(cache, block, layer, kv_head, 1);
}

void *cox_cache_block(struct cox_cache *cache, int64_t block)
{
    if (block < 0 || block >= cache->geometry.block_count)
        return NULL;
    return cache->blocks + (size_t)block * cache->block_length;
}

static struct side kv_side(const struct cox_cache *cache)
{
    return (struct side){"KV block", cache->blocks, cache->geometry.block_count};
}

static struct side host_side(const struct cox_cache *cache)
{
    return (struct side){"host block", cache->host_blocks, cache->geometry.swap_block_count};
}

static int check_id(const struct side *side, const char *verb, int32_t id, uint32_t index,
                    struct cox_error *err)
{
    if (id >= 0 && (uint32_t)id < side->count)
        return 0;
    return cox_fail(err, COX_INVALID, "%s %u: %s %d does not exist; there are %u", verb, index,
                    side->name, id, side->count);
}

static int check_pairs(struct side from, struct side to, const char *verb,
                       const struct cox_block_pair *pairs, uint32_t count, struct cox_error *err)
{
    for (uint32_t i = 0; i < count; i++) {
        int r = check_id(&from, verb, pairs[i].from, i, err);
        if (!r)
            r = check_id(&to, verb, pairs[i].to, i, err);
        if (r)
            return r;
    }
    return 0;
}

/* The pairs were checked. */
static void move_pairs(const struct cox_cache *cache, struct side from, struct side to,
                       const struct cox_block_pair *pairs, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        memmove(to.blocks + (size_t)pairs[i].to * cache->block_length,
                from.blocks + (size_t)pairs[i].from * cache->block_length,
                cache->block_length * sizeof(float));
}

int cox_cache_check_moves(const struct cox_cache *cache, const struct cox_batch *batch,
                          struct cox_error *err)
{
    struct side kv = kv_side(cache), host = host_side(cache);
    int r;

    r = check_pairs(kv, host, "swap-out", batch->swap_out, batch->swap_out_count, err);
    if (!r)
        r = check_pairs(host, kv, "swap-in", batch->swap_in, batch->swap_in_count, err);
    if (!r)
        r = check_pairs(kv, kv, "copy", batch->copy, batch->copy_count, err);
    return r;
}

int cox_cache_move(struct cox_cache *cache, const struct cox_batch *batch, struct cox_error *err)
{
    int r = cox_cache_check_moves(cache, batch, err);

    if (r)
        return r;
    move_pairs(cache, kv_side(cache), host_side(cache), batch->swap_out, batch->swap_out_count);
    move_pairs(cache, host_side(cache), kv_side(cache), batch->swap_in, batch->swap_in_count);
    move_pairs(cache, kv_side(cache), kv_side(cache), batch->copy, batch->copy_count);
    return 0;
}
