/* cache_owner: the owners of a cache's blocks, as users of its KV blocks. */
#include "cache_private.h"

#include <stdlib.h>
#include <string.h>

/* Sequences that are forgotten in one pass over all blocks. */
#define FORGOTTEN_COUNT_MAX 64

struct cox_kv_blocks *cox_cache_kv_blocks(const struct cox_cache *cache)
{
    return cache->kv;
}

void cox_cache_take(struct cox_cache *cache, uint32_t block)
{
    cox_kv_blocks_take(cache->kv, block);
}

bool cox_cache_is_taken(const struct cox_cache *cache, uint32_t block)
{
    return cox_kv_blocks_user(cache->kv, block) == COX_CACHE_UNUSED;
}

void cox_cache_give(struct cox_cache *cache, uint32_t block, uint64_t user)
{
    /* A block that is not taken was given by another thread, as ordered by a faulty coordinator. */
    if (user == COX_CACHE_UNUSED || cox_kv_blocks_give(cache->kv, block, user))
        return;
    /* release; partner: take_all_written. */
    atomic_fetch_add_explicit(&cache->given, 1, memory_order_release);
}

/* The ended sequences of a step, whose blocks are taken in one pass over all blocks. */
struct forgotten {
    struct cox_cache *cache;
    uint64_t users[FORGOTTEN_COUNT_MAX];
    uint32_t count;
};

static void forgotten_flush(struct forgotten *forgotten)
{
    struct cox_cache *cache = forgotten->cache;

    for (uint32_t block = 0; forgotten->count && block < cache->geometry.block_count; block++) {
        const uint64_t user = cox_kv_blocks_user(cache->kv, block);

        for (uint32_t i = 0; user != COX_CACHE_UNUSED && i < forgotten->count; i++)
            if (forgotten->users[i] == user) {
                cox_kv_blocks_take(cache->kv, block);
                break;
            }
    }
    forgotten->count = 0;
}

static void forgotten_add(struct forgotten *forgotten, uint64_t user)
{
    if (forgotten->count == FORGOTTEN_COUNT_MAX)
        forgotten_flush(forgotten);
    forgotten->users[forgotten->count++] = user;
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

    forgotten_add_slots(&forgotten, slots, count);
    forgotten_flush(&forgotten);
}

void cox_cache_forget_all(struct cox_cache *cache)
{
    for (uint32_t block = 0; block < cache->geometry.block_count; block++)
        cox_kv_blocks_take(cache->kv, block);
    memset(cache->slots, 0, cache->slot_count * sizeof(*cache->slots));
}

void cox_cache_clear(struct cox_cache *cache)
{
    const size_t size = cache->block_length * sizeof(float);

    cox_cache_forget_all(cache);
    memset(cache->blocks, 0, size * cache->geometry.block_count);
    if (cache->host_blocks)
        memset(cache->host_blocks, 0, size * cache->geometry.swap_block_count);
}

/* Records the user of each row in its slot. A step allocates nothing, because it may be
 * abandoned anywhere (worker.h), except when a coordinator uses more slots than usual. */
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
        cache->slots[batch->rows[i].slot] = cox_kv_user_of(batch->rows[i].id);
    return 0;
}

static void forget_ended(struct cox_cache *cache, const struct cox_batch *batch)
{
    struct forgotten forgotten = {.cache = cache};

    forgotten_add_slots(&forgotten, batch->finished_slots, batch->finished_count);
    for (uint32_t i = 0; i < batch->row_count; i++)
        if (batch->rows[i].position == 0)
            forgotten_add(&forgotten, cox_kv_user_of(batch->rows[i].id));
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

static void take_targets(struct cox_cache *cache, const struct cox_block_pair *pairs,
                         uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        cox_kv_blocks_take(cache->kv, (uint32_t)pairs[i].to);
}

/* Blocks that the sequence owns cost a relaxed load. A block that the row starts holds none of its
 * positions. It may own it all the same, through a pull that failed on another rank and was retried
 * with other blocks. */
static void take_written(struct cox_cache *cache, const struct cox_batch_row *row)
{
    const uint64_t user = cox_kv_user_of(row->id);
    uint32_t first, end;

    written_part(cache, row, &first, &end);
    for (uint32_t i = first; i < end; i++) {
        const uint32_t block = (uint32_t)row->tables[0].blocks[i];
        const bool begun = i > first || row->position % cache->geometry.block_size == 0;

        if (begun || cox_kv_blocks_user(cache->kv, block) != user)
            cox_kv_blocks_take(cache->kv, block);
    }
}

static int take_all_written(struct cox_cache *cache, const struct cox_batch *batch,
                            struct cox_error *err)
{
    int r;

    /* acquire; partner: cox_cache_give on another thread. */
    (void)atomic_load_explicit(&cache->given, memory_order_acquire);
    forget_ended(cache, batch);
    r = note_slots(cache, batch, err);
    if (r)
        return r;
    take_targets(cache, batch->swap_in, batch->swap_in_count);
    take_targets(cache, batch->copy, batch->copy_count);
    for (uint32_t i = 0; i < batch->row_count; i++)
        take_written(cache, &batch->rows[i]);
    return 0;
}

int cox_cache_begin(struct cox_cache *cache, const struct cox_batch *batch, struct cox_error *err)
{
    int r = cox_cache_check_moves(cache, batch, err);

    if (!r)
        r = take_all_written(cache, batch, err);
    return r ? r : cox_cache_move(cache, batch, err);
}

/* The sequence whose table contains the block; COX_CACHE_UNUSED: no row's table does. */
static uint64_t owner_in(const struct cox_batch *batch, int32_t block)
{
    for (uint32_t i = 0; i < batch->row_count; i++)
        for (uint32_t k = 0; k < batch->rows[i].tables[0].count; k++)
            if (batch->rows[i].tables[0].blocks[k] == block)
                return cox_kv_user_of(batch->rows[i].id);
    return COX_CACHE_UNUSED;
}

static void give_targets(struct cox_cache *cache, const struct cox_batch *batch,
                         const struct cox_block_pair *pairs, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        cox_cache_give(cache, (uint32_t)pairs[i].to, owner_in(batch, pairs[i].to));
}

void cox_cache_end(struct cox_cache *cache, const struct cox_batch *batch)
{
    give_targets(cache, batch, batch->swap_in, batch->swap_in_count);
    give_targets(cache, batch, batch->copy, batch->copy_count);
    for (uint32_t i = 0; i < batch->row_count; i++) {
        const struct cox_batch_row *row = &batch->rows[i];
        const uint64_t user = cox_kv_user_of(row->id);
        uint32_t first, end;

        written_part(cache, row, &first, &end);
        for (uint32_t k = first; k < end; k++)
            if (cox_kv_blocks_user(cache->kv, (uint32_t)row->tables[0].blocks[k]) != user)
                cox_cache_give(cache, (uint32_t)row->tables[0].blocks[k], user);
    }
}
