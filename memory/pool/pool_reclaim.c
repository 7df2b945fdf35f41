/*
 * pool_reclaim: frees blocks that nothing counts, and finds free ones.
 *
 * Why a block is freed exactly when nothing counts it. All these words are seq_cst, so all steps
 * have one order.
 *
 *   1. An owner that drops its last count then checks whether another count remains; if so, it
 *   stops. The last owner to drop, in that order, finds none.
 *   2. That owner sets CLOSING and checks once more. A new reference increments its count before it
 *   reads the word. So either the last check sees the count, or the new owner sees CLOSING (or its
 *   outcome).
 *   3. An owner that counts the block and finds its epoch in CLOSING sets USED again, which is
 *   true. The closing owner's compare-and-swap to FREE then fails.
 *   4. An owner that sees a count in its last check sets USED again and stops. The counting owner
 *   will check by rule 1, and takes over a CLOSING that it finds.
 *
 * Between CLOSING and FREE of one owner no other thread may set CLOSING for the same owner, or rule
 * 3 would not hold: so the threads of a process close a block one after the other.
 */
#include "channel/base/fault.h"
#include "pool_internal.h"

/* After this thread set the block FREE. */
static void block_freed(struct cox_pool *pool, uint32_t block, uint32_t as)
{
    /* relaxed: for display */
    atomic_fetch_add_explicit(&pool->owners[as].owner_freed, 1, memory_order_relaxed);
    if (pool->geometry.slab_count) {
        cox_pool_slab_freed(pool, block, as);
    } else if (pool->geometry.on_demand) {
        cox_pool_pages_retain(pool, block);
        cox_pool_pages_trim(pool, block, as);
    }
    cox_pool_hint(pool, block);
}

/* Serialized per owner by the caller. Returns whether this call set the block FREE. */
static bool block_close(struct cox_pool *pool, uint32_t block, uint32_t as)
{
    _Atomic uint64_t *block_word = cox_pool_block_word_of(pool, block);
    uint64_t word = atomic_load(block_word), closing;
    struct cox_pool_word seen;
    do {
        seen = cox_pool_word_split(word);
        if (seen.phase != COX_POOL_USED && seen.phase != COX_POOL_CLOSING)
            return false;
        closing = cox_pool_word(seen.epoch, COX_POOL_CLOSING, as);
    } while (!atomic_compare_exchange_weak(block_word, &word, closing));
    cox_fault_point(COX_FAULT_POOL_CLOSING);
    const bool counted = cox_pool_block_is_counted(pool, block);
    cox_fault_point(COX_FAULT_POOL_CHECKED);
    word = closing;
    const uint64_t next = counted
                              ? cox_pool_word(seen.epoch, COX_POOL_USED, 0)
                              : cox_pool_word(cox_pool_epoch_next(seen.epoch), COX_POOL_FREE, 0);
    const bool changed = atomic_compare_exchange_strong(block_word, &word, next);
    cox_fault_point(counted ? COX_FAULT_POOL_REOPENED : COX_FAULT_POOL_FREED);
    return changed && !counted;
}

void cox_pool_block_reclaim(struct cox_pool *pool, uint32_t block, uint32_t as)
{
    if (cox_pool_block_is_counted(pool, block))
        return;
    cox_fault_point(COX_FAULT_POOL_CHECKED);
    /* For a dead owner this thread is alone: it won the row. */
    pthread_mutex_t *lock = as == pool->owner ? &pool->locks[block % COX_POOL_LOCK_COUNT] : NULL;
    if (lock)
        pthread_mutex_lock(lock);
    const bool freed = block_close(pool, block, as);
    if (lock)
        pthread_mutex_unlock(lock);
    if (freed)
        block_freed(pool, block, as);
}

bool cox_pool_count_drop(struct cox_pool *pool, uint32_t block)
{
    struct cox_pool_layout_count *count = cox_pool_count_of(pool, pool->owner, block);
    uint16_t seen = atomic_load_explicit(&count->ref_count, memory_order_relaxed);
    do
        if (seen == 0) /* another process corrupted the word */
            return false;
    while (!atomic_compare_exchange_weak(&count->ref_count, &seen, (uint16_t)(seen - 1)));
    cox_fault_point(COX_FAULT_POOL_UNCOUNTED);
    if (seen > 1)
        return true;
    cox_pool_block_reclaim(pool, block, pool->owner);
    return true;
}

/* ---- finding one ---- */

static bool block_take(struct cox_pool *pool, uint32_t block, bool only_pages, uint64_t *ret_epoch)
{
    if (block >= pool->geometry.block_count ||
        (only_pages && !cox_pool_pages_are_there(pool, block)))
        return false;
    return cox_pool_block_claim(pool, block, pool->owner, ret_epoch);
}

/* Searches the hints, from where the last free block was found. */
static bool block_find_hinted(struct cox_pool *pool, uint32_t *ret_block, uint64_t *ret_epoch)
{
    const uint32_t count = (pool->geometry.block_count + 63) / 64;
    /* relaxed: any value is valid */
    const uint32_t first = atomic_load_explicit(&pool->cursors[0], memory_order_relaxed) % count;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t index = first + i < count ? first + i : first + i - count;
        _Atomic uint64_t *hint_bits = &pool->hints[index].hint_bits;
        uint64_t bits = atomic_load(hint_bits);
        while (bits) {
            const uint32_t bit = (uint32_t)__builtin_ctzll(bits);
            const uint64_t mask = UINT64_C(1) << bit;
            bits &= ~mask;
            if ((atomic_fetch_and(hint_bits, ~mask) & mask) == 0)
                continue;
            cox_fault_point(COX_FAULT_POOL_HINTED);
            if (!block_take(pool, index * 64 + bit, false, ret_epoch))
                continue;
            if (index != first)
                atomic_store_explicit(&pool->cursors[0], index, memory_order_relaxed);
            *ret_block = index * 64 + bit;
            return true;
        }
    }
    return false;
}

int cox_pool_block_find(struct cox_pool *pool, bool only_pages, uint32_t *ret_block,
                        uint64_t *ret_epoch)
{
    if (!only_pages && block_find_hinted(pool, ret_block, ret_epoch))
        return 0;
    /* Fallback: a hint is lost when its taker dies. */
    for (uint32_t block = 0; block < pool->geometry.block_count; block++)
        if (block_take(pool, block, only_pages, ret_epoch)) {
            *ret_block = block;
            return 0;
        }
    return COX_FULL;
}
