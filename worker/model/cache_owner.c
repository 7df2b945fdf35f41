/* cache_owner: whose the blocks of a cache are, as generations of its pool. */
#include "channel/fault.h"
#include "channel/memory/pool.h"
#include "worker/model/cache_private.h"

#include <stdlib.h>
#include <string.h>

#define GENERATION_PLAIN_MAX (UINT64_C(1) << 47)
/* A step's wait for readers, who copy a few MiB at a time. Not as long as a coordinator waits for a step: it knows only that the
 * rank is silent, and not who does not let go. */
#define STEP_WAIT_MS 5000
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

void cox_cache_use_host(struct cox_cache *cache, const struct cox_cache_host *host)
{
    cache->host = *host;
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

/* Of a step. */
static int step_take(struct cox_cache *cache, uint32_t block,
                     const struct cox_cache_patience *patience, struct cox_error *err)
{
    struct cox_error why;
    int r;

    cox_error_clear(&why);
    if (cache->host.hold)
        cache->host.hold();
    r = cox_cache_take(cache, block, patience, &why);
    if (cache->host.release)
        cache->host.release();
    if (r == COX_TIMEOUT)
        return cox_fail(err, r, "the step cannot write KV block %u: %s", block, why.text);
    return r ? cox_fail(err, r, "%s", why.text) : 0;
}

static int take_targets(struct cox_cache *cache, const struct cox_block_pair *pairs, uint32_t count,
                        const struct cox_cache_patience *patience, struct cox_error *err)
{
    int r = 0;

    for (uint32_t i = 0; r == 0 && i < count; i++)
        r = step_take(cache, (uint32_t)pairs[i].to, patience, err);
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
            r = step_take(cache, block, patience, err);
    }
    return r;
}

static int take_all_written(struct cox_cache *cache, const struct cox_batch *batch,
                            struct cox_error *err)
{
    const struct cox_cache_patience patience = {
        .deadline_ns = cox_deadline_after_ms(STEP_WAIT_MS),
        .given_up = cache->host.given_up,
        .context = cache->host.context,
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
