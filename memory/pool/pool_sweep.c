/*
 * pool_sweep: releases what a dead owner left.
 *
 * One thread sweeps a row: the one whose compare-and-swap won it. If that process dies, the next
 * one starts over, since each step may be repeated. It visits all blocks: the dead owner may have
 * dropped a count without its last check.
 */
#include "channel/base/fault.h"
#include "pool_internal.h"

static uint64_t sweep_row(struct cox_pool *pool, uint32_t owner)
{
    uint64_t released = 0;
    for (uint32_t block = 0; block < pool->geometry.block_count; block++) {
        struct cox_pool_layout_count *count = cox_pool_count_of(pool, owner, block);
        if (atomic_load_explicit(&count->ref_count, memory_order_relaxed) == 0)
            continue; /* no other process writes this row */
        released += atomic_exchange(&count->ref_count, 0);
        cox_fault_point(COX_FAULT_POOL_UNCOUNTED);
    }
    return released;
}

static void sweep_block(struct cox_pool *pool, uint32_t block, uint32_t owner)
{
    const struct cox_pool_word word =
        cox_pool_word_split(atomic_load(cox_pool_block_word_of(pool, block)));
    if (word.phase == COX_POOL_CLAIMED && word.owner == owner) {
        if (pool->geometry.on_demand && !pool->geometry.slab_count)
            cox_pool_pages_decommit(pool, block);
        cox_pool_block_unclaim(pool, block, word.epoch, owner);
    } else if (word.phase == COX_POOL_USED || word.phase == COX_POOL_CLOSING) {
        cox_pool_block_reclaim(pool, block, owner);
        /* The dead owner set CLOSING, and the block is still counted: reopens it for new
         * references. */
        const struct cox_pool_word now =
            cox_pool_word_split(atomic_load(cox_pool_block_word_of(pool, block)));
        uint64_t closing = cox_pool_word(now.epoch, COX_POOL_CLOSING, owner);
        if (now.phase == COX_POOL_CLOSING && now.owner == owner) {
            atomic_compare_exchange_strong(&pool->blocks[block].block_word, &closing,
                                           cox_pool_word(now.epoch, COX_POOL_USED, 0));
            cox_fault_point(COX_FAULT_POOL_REOPENED);
        }
    }
}
bool cox_pool_sweep_owner(struct cox_pool *pool, uint32_t owner, uint64_t identity, uint64_t next,
                          uint64_t *released)
{
    struct cox_pool_layout_owner *line = &pool->owners[owner];
    const uint64_t own = cox_pool_identity(COX_POOL_OWNER_SWEEPING, pool->pid, pool->start);
    const bool leaves = owner == pool->owner;
    if (!atomic_compare_exchange_strong(&line->owner_identity, &identity, own))
        return false;
    cox_fault_point(COX_FAULT_POOL_SWEEPING);
    uint64_t count = sweep_row(pool, owner);
    atomic_store(&line->owner_joined, 0);
    cox_fault_point(COX_FAULT_POOL_QUEUE);
    count += cox_pool_queues_sweep(pool, owner);
    for (uint32_t block = 0; block < pool->geometry.block_count; block++)
        sweep_block(pool, block, owner);
    if (pool->geometry.slab_count)
        cox_pool_slab_sweep(pool, owner);
    if (pool->geometry.on_demand && !leaves)
        cox_pool_pages_sweep(pool, owner);
    if (!leaves) {
        /* relaxed: for display */
        atomic_fetch_add_explicit(&line->owner_swept, count, memory_order_relaxed);
        cox_fault_point(COX_FAULT_POOL_SWEPT);
        *released += count;
    }
    atomic_store(&line->owner_identity, next);
    cox_fault_point(COX_FAULT_POOL_LEFT);
    return true;
}

bool cox_pool_sweep_dead(struct cox_pool *pool, uint64_t *released)
{
    bool swept = false;
    if (cox_pool_check_here(pool, NULL))
        return false;
    for (uint32_t owner = 0; owner < pool->geometry.owner_count; owner++) {
        const uint64_t identity = atomic_load(&pool->owners[owner].owner_identity);
        if (identity != COX_POOL_OWNER_EMPTY && cox_pool_identity_is_dead(pool, identity) &&
            cox_pool_sweep_owner(pool, owner, identity, COX_POOL_OWNER_EMPTY, released))
            swept = true;
    }
    /* Pins remain if another process had queues_lock during the sweep of a row. */
    const uint64_t dropped = cox_pool_queues_sweep(pool, pool->owner);
    *released += dropped;
    return swept || dropped > 0;
}

uint64_t cox_pool_sweep(struct cox_pool *pool)
{
    uint64_t released = 0;
    cox_pool_sweep_dead(pool, &released);
    return released;
}
