/* pool_block: the steps of a block's word, of the counts and of the hints. pool_reclaim.c has the
 * protocol. */
#include "channel/base/fault.h"
#include "pool_internal.h"

/* ---- counts ---- */

int cox_pool_count_add(struct cox_pool *pool, uint32_t block)
{
    struct cox_pool_layout_count *count = cox_pool_count_of(pool, pool->owner, block);
    uint16_t seen = atomic_load_explicit(&count->ref_count, memory_order_relaxed);
    do
        if (seen == COX_POOL_COUNT_MAX)
            return COX_FULL;
    while (!atomic_compare_exchange_weak(&count->ref_count, &seen, (uint16_t)(seen + 1)));
    cox_fault_point(COX_FAULT_POOL_COUNTED);
    return 0;
}

bool cox_pool_block_is_counted(const struct cox_pool *pool, uint32_t block)
{
    const uint32_t high = cox_pool_owner_high(pool);
    for (uint32_t owner = 0; owner < high; owner++)
        if (atomic_load(&cox_pool_count_of(pool, owner, block)->ref_count))
            return true;
    for (uint32_t i = 0; i < COX_POOL_PIN_COUNT_MAX; i++)
        if (atomic_load(&pool->pins[block].pin_word[i]))
            return true;
    return false;
}

/* ---- hints ---- */

/* After the word: a process that takes the hint finds the block free, or already taken. */
void cox_pool_hint(struct cox_pool *pool, uint32_t block)
{
    atomic_fetch_or(&pool->hints[block / 64].hint_bits, UINT64_C(1) << (block % 64));
    cox_fault_point(COX_FAULT_POOL_HINTED);
}

/* ---- words ---- */

bool cox_pool_block_claim(struct cox_pool *pool, uint32_t block, uint32_t as, uint64_t *ret_epoch)
{
    uint64_t word = atomic_load(cox_pool_block_word_of(pool, block));
    const struct cox_pool_word seen = cox_pool_word_split(word);
    if (seen.phase != COX_POOL_FREE ||
        !atomic_compare_exchange_strong(&pool->blocks[block].block_word, &word,
                                        cox_pool_word(seen.epoch, COX_POOL_CLAIMED, as)))
        return false;
    cox_fault_point(COX_FAULT_POOL_CLAIMED);
    *ret_epoch = seen.epoch;
    return true;
}

/* Only `as` changes its CLAIMED words, so these two cannot fail unless a process corrupts them. */
void cox_pool_block_unclaim(struct cox_pool *pool, uint32_t block, uint64_t epoch, uint32_t as)
{
    uint64_t word = cox_pool_word(epoch, COX_POOL_CLAIMED, as);
    atomic_compare_exchange_strong(&pool->blocks[block].block_word, &word,
                                   cox_pool_word(epoch, COX_POOL_FREE, 0));
    cox_fault_point(COX_FAULT_POOL_FREED);
    cox_pool_hint(pool, block);
}

int cox_pool_block_use(struct cox_pool *pool, uint32_t block, uint64_t epoch)
{
    int r = cox_pool_count_add(pool, block);
    if (r)
        return r;
    atomic_store(&pool->blocks[block].block_word, cox_pool_word(epoch, COX_POOL_USED, 0));
    cox_fault_point(COX_FAULT_POOL_USED);
    /* relaxed: for display */
    atomic_fetch_add_explicit(&pool->owners[pool->owner].owner_allocated, 1, memory_order_relaxed);
    cox_fault_point(COX_FAULT_POOL_COUNTED);
    return 0;
}
