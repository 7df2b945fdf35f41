#include "worker/model/cache.h"

#include "channel/fault.h"
#include "channel/memory/pool.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define BLOCK_SIZE_MAX 4096u
#define BLOCK_COUNT_MAX (1u << 24)

struct cox_cache {
    struct cox_cache_geometry geometry;
    size_t block_length; /* floats, padded to COX_CACHE_ALIGNMENT */
    float *blocks;
    float *host_blocks;
    struct cox_pool *pool; /* of blocks, when they are our own */
    /* Of the last row that was in a slot, its generation; 0: none. Grown to the highest slot. */
    uint64_t *slots;
    uint32_t slot_count;
    bool (*given_up)(void *context);
    void *given_up_context;
    /* Blocks given away by any thread. release; partner: cox_cache_begin, which then sees what a pull wrote. */
    _Atomic uint64_t given;
};

/* Where a list moves blocks from or to. */
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

    /* The limits of config.h and these keep a block below 2^46 bytes and all blocks below 2^63
     * unless absurd. */
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

/* Pages of its own: a cache that is made again (reinit) gives the old one's back at once, which malloc, once
 * it has seen one freed, does not. They are zero, and there from now on. */
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

/* As many sequences as a worker has room for, where nobody says otherwise. */
#define SLOT_COUNT_DEFAULT 4096

static int create_pool(struct cox_cache *cache, struct cox_error *err)
{
    const struct cox_pool_options options = {
        .strategy = COX_POOL_FIXED,
        .block_size = cox_cache_block_size(&cache->geometry),
        .block_count = cache->geometry.block_count,
        .owner_count_max = COX_CACHE_READER_COUNT_MAX + 1,
    };
    struct cox_error why = {0};
    int r = cox_pool_create(&options, &cache->pool, &why);

    if (r == 0)
        r = cox_pool_take_all(cache->pool, COX_CACHE_NOBODY, &why);
    if (r)
        return cox_fail(err, r,
                        "KV cache: %u KV blocks of %llu bytes: %s; use fewer or smaller ones",
                        options.block_count, (unsigned long long)options.block_size, why.text);
    cache->slots = calloc(SLOT_COUNT_DEFAULT, sizeof(*cache->slots));
    if (!cache->slots)
        return cox_fail(err, COX_NO_SPACE, "KV cache: no memory");
    cache->slot_count = SLOT_COUNT_DEFAULT;
    cache->blocks = cox_pool_memory(cache->pool)->address;
    return 0;
}

int cox_cache_new(const struct cox_cache_geometry *geometry, void *memory,
                  struct cox_cache **ret_cache, struct cox_error *err)
{
    _cox_cleanup_(cox_cache_freep) struct cox_cache *cache = NULL;
    int r;

    COX_ASSERT((uintptr_t)memory % COX_CACHE_ALIGNMENT == 0);
    r = check_geometry(geometry, err);
    if (r)
        return r;
    cache = calloc(1, sizeof(*cache));
    if (!cache)
        return cox_fail(err, COX_NO_SPACE, "KV cache: no memory");
    cache->geometry = *geometry;
    cache->block_length = (size_t)(cox_cache_block_size(geometry) / sizeof(float));
    cache->blocks = memory;
    if (!memory) {
        r = create_pool(cache, err);
        if (r)
            return r;
    }
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
    cox_pool_free(cache->pool);
    free(cache->slots);
    release(cache, cache->host_blocks, cache->geometry.swap_block_count);
    free(cache);
    return NULL;
}

void cox_cache_freep(struct cox_cache **cache)
{
    cox_cache_free(*cache);
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

int cox_cache_swap_out(struct cox_cache *cache, const struct cox_block_pair *pairs, uint32_t count,
                       struct cox_error *err)
{
    int r = check_pairs(kv_side(cache), host_side(cache), "swap-out", pairs, count, err);

    if (!r)
        move_pairs(cache, kv_side(cache), host_side(cache), pairs, count);
    return r;
}

int cox_cache_swap_in(struct cox_cache *cache, const struct cox_block_pair *pairs, uint32_t count,
                      struct cox_error *err)
{
    int r = check_pairs(host_side(cache), kv_side(cache), "swap-in", pairs, count, err);

    if (!r)
        move_pairs(cache, host_side(cache), kv_side(cache), pairs, count);
    return r;
}

int cox_cache_copy(struct cox_cache *cache, const struct cox_block_pair *pairs, uint32_t count,
                   struct cox_error *err)
{
    int r = check_pairs(kv_side(cache), kv_side(cache), "copy", pairs, count, err);

    if (!r)
        move_pairs(cache, kv_side(cache), kv_side(cache), pairs, count);
    return r;
}

/* ---- whose blocks they are ---- */

#define GENERATION_PLAIN_MAX (UINT64_C(1) << 47)
/* A step's wait for readers: the coordinator gives it up long before. */
#define STEP_WAIT_MS (UINT64_C(10) * 60 * 1000)
/* Sequences that are forgotten in one look at all blocks. */
#define FORGOTTEN_COUNT_MAX 64

struct cox_pool *cox_cache_pool(const struct cox_cache *cache)
{
    return cache->pool;
}

uint64_t cox_cache_generation_of(int64_t sequence)
{
    uint64_t mixed = (uint64_t)sequence;

    if (sequence >= 1 && mixed <= GENERATION_PLAIN_MAX)
        return mixed;
    /* The finaliser of a common hash: neighbours come apart. */
    mixed = (mixed ^ mixed >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    mixed = (mixed ^ mixed >> 27) * UINT64_C(0x94d049bb133111eb);
    mixed ^= mixed >> 31;
    return GENERATION_PLAIN_MAX + 1 + mixed % (COX_CACHE_NOBODY - GENERATION_PLAIN_MAX - 1);
}

int cox_cache_take(struct cox_cache *cache, uint32_t block,
                   const struct cox_cache_patience *patience, struct cox_error *err)
{
    int r;

    if (block >= cache->geometry.block_count)
        return cox_fail(err, COX_INVALID, "KV block %u does not exist; there are %u", block,
                        cache->geometry.block_count);
    if (!cache->pool)
        return 0;
    r = cox_pool_renew(cache->pool, block, COX_CACHE_NOBODY);
    if (r)
        return cox_fail(err, r, "KV block %u: %s", block, cox_status_text(r));
    /* Also of one that was nobody's before: who read it under a former generation may do so still. */
    r = cox_pool_settle(cache->pool, block, patience->deadline_ns, patience->given_up,
                        patience->context, err);
    if (r == 0)
        cox_fault_point(COX_FAULT_CACHE_TAKEN);
    return r;
}

bool cox_cache_is_taken(const struct cox_cache *cache, uint32_t block)
{
    return !cache->pool || cox_pool_generation(cache->pool, block) == COX_CACHE_NOBODY;
}

void cox_cache_give(struct cox_cache *cache, uint32_t block, uint64_t generation)
{
    if (!cache->pool)
        return;
    /* It cannot fail: the block was taken, and all of the pool are this process's. */
    cox_pool_renew(cache->pool, block, generation);
    atomic_fetch_add_explicit(&cache->given, 1, memory_order_release);
    cox_fault_point(COX_FAULT_CACHE_GIVEN);
}

void cox_cache_wait_while(struct cox_cache *cache, bool (*given_up)(void *context), void *context)
{
    cache->given_up = given_up;
    cache->given_up_context = context;
}

/* Those of a step; the blocks of all that are in the list go in one look at the pool. */
struct forgotten {
    struct cox_cache *cache;
    uint64_t generations[FORGOTTEN_COUNT_MAX];
    uint32_t count;
};

static void forgotten_flush(struct forgotten *forgotten)
{
    struct cox_cache *cache = forgotten->cache;

    for (uint32_t block = 0; forgotten->count && block < cache->geometry.block_count; block++) {
        const uint64_t generation = cox_pool_generation(cache->pool, block);

        for (uint32_t i = 0; generation != COX_CACHE_NOBODY && i < forgotten->count; i++)
            if (forgotten->generations[i] == generation) {
                cox_pool_renew(cache->pool, block, COX_CACHE_NOBODY);
                break;
            }
    }
    forgotten->count = 0;
}

static void forgotten_add(struct forgotten *forgotten, uint64_t generation)
{
    if (forgotten->count == FORGOTTEN_COUNT_MAX)
        forgotten_flush(forgotten);
    forgotten->generations[forgotten->count++] = generation;
}

static void forgotten_add_slots(struct forgotten *forgotten, const uint32_t *slots, uint32_t count)
{
    struct cox_cache *cache = forgotten->cache;

    for (uint32_t i = 0; i < count; i++)
        if (slots[i] < cache->slot_count && cache->slots[slots[i]]) {
            forgotten_add(forgotten, cache->slots[slots[i]]);
            cache->slots[slots[i]] = 0;
        }
}

void cox_cache_forget(struct cox_cache *cache, const uint32_t *slots, uint32_t count)
{
    struct forgotten forgotten = {.cache = cache};

    if (!cache->pool)
        return;
    forgotten_add_slots(&forgotten, slots, count);
    forgotten_flush(&forgotten);
}

void cox_cache_forget_all(struct cox_cache *cache)
{
    if (!cache->pool)
        return;
    for (uint32_t block = 0; block < cache->geometry.block_count; block++)
        cox_pool_renew(cache->pool, block, COX_CACHE_NOBODY);
    if (cache->slots)
        memset(cache->slots, 0, cache->slot_count * sizeof(*cache->slots));
}

int cox_cache_clear(struct cox_cache *cache, const struct cox_cache_patience *patience,
                    struct cox_error *err)
{
    int r = 0;

    cox_cache_forget_all(cache);
    for (uint32_t block = 0; r == 0 && block < cache->geometry.block_count; block++) {
        r = cox_cache_take(cache, block, patience, err);
        if (r == 0)
            memset(cox_cache_block(cache, block), 0, cache->block_length * sizeof(float));
    }
    if (r == 0 && cache->host_blocks)
        memset(cache->host_blocks, 0,
               cache->block_length * sizeof(float) * cache->geometry.swap_block_count);
    return r;
}

/* What of its last row is in each slot. A step allocates nothing, for it may be left wherever it is (worker.h),
 * unless somebody lets it have more slots than is usual. */
static int note_slots(struct cox_cache *cache, const struct cox_batch *batch, struct cox_error *err)
{
    uint32_t needed = cache->slot_count;

    for (uint32_t i = 0; i < batch->row_count; i++)
        needed = batch->rows[i].slot >= needed ? batch->rows[i].slot + 1 : needed;
    if (needed > cache->slot_count) {
        uint64_t *grown = realloc(cache->slots, needed * sizeof(*grown));

        if (!grown)
            return cox_fail(err, COX_NO_SPACE, "KV cache: no memory for %u sequences", needed);
        memset(grown + cache->slot_count, 0, (needed - cache->slot_count) * sizeof(*grown));
        cache->slots = grown;
        cache->slot_count = needed;
    }
    for (uint32_t i = 0; i < batch->row_count; i++)
        cache->slots[batch->rows[i].slot] = cox_cache_generation_of(batch->rows[i].id);
    return 0;
}

static void forget_ended(struct cox_cache *cache, const struct cox_batch *batch)
{
    struct forgotten forgotten = {.cache = cache};

    forgotten_add_slots(&forgotten, batch->finished_slots, batch->finished_count);
    for (uint32_t i = 0; i < batch->row_count; i++)
        if (batch->rows[i].position == 0)
            forgotten_add(&forgotten, cox_cache_generation_of(batch->rows[i].id));
    forgotten_flush(&forgotten);
}

/* The part of its table that a row writes. */
static void written_part(const struct cox_cache *cache, const struct cox_batch_row *row,
                         uint32_t *ret_first, uint32_t *ret_end)
{
    const uint32_t size = cache->geometry.block_size;

    *ret_first = row->position / size;
    *ret_end = (row->position + row->token_count - 1) / size + 1;
}

static int take_targets(struct cox_cache *cache, const struct cox_block_pair *pairs, uint32_t count,
                        const struct cox_cache_patience *patience, struct cox_error *err)
{
    int r = 0;

    for (uint32_t i = 0; r == 0 && i < count; i++)
        r = cox_cache_take(cache, (uint32_t)pairs[i].to, patience, err);
    return r;
}

/* Of the sequence's own blocks it costs a relaxed load. */
static int take_written(struct cox_cache *cache, const struct cox_batch_row *row,
                        const struct cox_cache_patience *patience, struct cox_error *err)
{
    const uint64_t generation = cox_cache_generation_of(row->id);
    uint32_t first, end;
    int r = 0;

    written_part(cache, row, &first, &end);
    for (uint32_t i = first; r == 0 && i < end; i++) {
        const uint32_t block = (uint32_t)row->tables[0].blocks[i];

        if (cox_pool_generation(cache->pool, block) != generation)
            r = cox_cache_take(cache, block, patience, err);
    }
    return r;
}

static int take_all_written(struct cox_cache *cache, const struct cox_batch *batch,
                            struct cox_error *err)
{
    const struct cox_cache_patience patience = {
        .deadline_ns = cox_deadline_after_ms(STEP_WAIT_MS),
        .given_up = cache->given_up,
        .context = cache->given_up_context,
    };
    int r;

    /* acquire; partner: cox_cache_give on another thread. */
    (void)atomic_load_explicit(&cache->given, memory_order_acquire);
    forget_ended(cache, batch);
    r = note_slots(cache, batch, err);
    if (!r)
        r = take_targets(cache, batch->swap_in, batch->swap_in_count, &patience, err);
    if (!r)
        r = take_targets(cache, batch->copy, batch->copy_count, &patience, err);
    for (uint32_t i = 0; !r && i < batch->row_count; i++)
        r = take_written(cache, &batch->rows[i], &patience, err);
    return r;
}

int cox_cache_begin(struct cox_cache *cache, const struct cox_batch *batch, struct cox_error *err)
{
    int r = cox_cache_check_moves(cache, batch, err);

    if (!r && cache->pool)
        r = take_all_written(cache, batch, err);
    return r ? r : cox_cache_move(cache, batch, err);
}

/* The sequence in whose table the block is; COX_CACHE_NOBODY: in none of a row. */
static uint64_t owner_in(const struct cox_batch *batch, int32_t block)
{
    for (uint32_t i = 0; i < batch->row_count; i++)
        for (uint32_t k = 0; k < batch->rows[i].tables[0].count; k++)
            if (batch->rows[i].tables[0].blocks[k] == block)
                return cox_cache_generation_of(batch->rows[i].id);
    return COX_CACHE_NOBODY;
}

static void give_targets(struct cox_cache *cache, const struct cox_batch *batch,
                         const struct cox_block_pair *pairs, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        cox_cache_give(cache, (uint32_t)pairs[i].to, owner_in(batch, pairs[i].to));
}

void cox_cache_end(struct cox_cache *cache, const struct cox_batch *batch)
{
    if (!cache->pool)
        return;
    give_targets(cache, batch, batch->swap_in, batch->swap_in_count);
    give_targets(cache, batch, batch->copy, batch->copy_count);
    for (uint32_t i = 0; i < batch->row_count; i++) {
        const struct cox_batch_row *row = &batch->rows[i];
        const uint64_t generation = cox_cache_generation_of(row->id);
        uint32_t first, end;

        written_part(cache, row, &first, &end);
        for (uint32_t k = first; k < end; k++)
            if (cox_pool_generation(cache->pool, (uint32_t)row->tables[0].blocks[k]) != generation)
                cox_cache_give(cache, (uint32_t)row->tables[0].blocks[k], generation);
    }
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
