/*
 * pool_pages: the pages of an on_demand pool.
 *
 * The recorded state never understates what is allocated: SOME is stored before pages are allocated
 * or released, ALL or NONE afterwards. It changes only while an owner has the block (slab) in
 * CLAIMED. It never changes in CLOSING, from which a new reference may reopen the block: so no
 * referenced page is released. sweep releases what a dead owner had in CLAIMED.
 *
 * `retained` only steers the policy. After a death it is wrong, until the next sweep recounts it.
 */
#include "channel/base/fault.h"
#include "pool_internal.h"

static uint64_t page_size(const struct cox_pool *pool)
{
    return pool->geometry.slab_count ? pool->geometry.slab_size : pool->geometry.block_size;
}

static void page_set(struct cox_pool *pool, uint32_t page, enum cox_pool_pages state)
{
    atomic_store(&pool->pages[page].page_state, (uint8_t)state);
    cox_fault_point(COX_FAULT_POOL_PAGES);
}

bool cox_pool_pages_are_there(const struct cox_pool *pool, uint32_t page)
{
    return !pool->geometry.on_demand ||
           atomic_load(&pool->pages[page].page_state) == COX_POOL_PAGES_ALL;
}

int cox_pool_pages_commit(struct cox_pool *pool, uint32_t page, struct cox_error *err)
{
    if (cox_pool_pages_are_there(pool, page))
        return 0;
    page_set(pool, page, COX_POOL_PAGES_SOME);
    if (pool->memory->functions->commit) {
        int r = pool->memory->functions->commit(pool->memory, page * page_size(pool),
                                                page_size(pool), err);
        if (r) {
            cox_pool_pages_decommit(pool, page);
            return r;
        }
    }
    page_set(pool, page, COX_POOL_PAGES_ALL);
    return 0;
}

void cox_pool_pages_decommit(struct cox_pool *pool, uint32_t page)
{
    if (pool->read_only || !pool->memory->functions->decommit)
        return; /* a process that may write will do it */
    page_set(pool, page, COX_POOL_PAGES_SOME);
    pool->memory->functions->decommit(pool->memory, page * page_size(pool), page_size(pool));
    page_set(pool, page, COX_POOL_PAGES_NONE);
}

static void retained_add(struct cox_pool *pool, uint32_t page, int64_t sign)
{
    if (!pool->geometry.on_demand || !cox_pool_pages_are_there(pool, page))
        return;
    atomic_fetch_add(&pool->header->retained, sign * (int64_t)page_size(pool));
    cox_fault_point(COX_FAULT_POOL_RETAINED);
}

void cox_pool_pages_retain(struct cox_pool *pool, uint32_t page)
{
    retained_add(pool, page, 1);
}

void cox_pool_pages_release(struct cox_pool *pool, uint32_t page)
{
    retained_add(pool, page, -1);
}

void cox_pool_pages_trim(struct cox_pool *pool, uint32_t page, uint32_t as)
{
    uint64_t generation = 0;
    if (!pool->geometry.on_demand || pool->read_only ||
        atomic_load(&pool->header->retained) <= (int64_t)pool->geometry.retain_size ||
        !cox_pool_pages_are_there(pool, page))
        return;
    if (pool->geometry.slab_count ? !cox_pool_slab_claim(pool, page, as)
                                  : !cox_pool_block_claim(pool, page, as, &generation))
        return;
    cox_pool_pages_release(pool, page);
    cox_pool_pages_decommit(pool, page);
    if (pool->geometry.slab_count)
        cox_pool_slab_unclaim(pool, page, as);
    else
        cox_pool_block_unclaim(pool, page, generation, as);
}

/* A snapshot: no owner has the block. */
static bool page_is_free(const struct cox_pool *pool, uint32_t page)
{
    if (pool->geometry.slab_count)
        return cox_pool_slab_word_split(atomic_load(&pool->slabs[page].slab_word)).phase ==
               COX_POOL_SLAB_EMPTY;
    return cox_pool_word_split(atomic_load(cox_pool_block_word_of(pool, page))).phase ==
           COX_POOL_FREE;
}

void cox_pool_pages_sweep(struct cox_pool *pool, uint32_t as)
{
    int64_t retained = 0;
    for (uint32_t page = 0; page < pool->geometry.page_count; page++)
        if (cox_pool_pages_are_there(pool, page) && page_is_free(pool, page))
            retained += (int64_t)page_size(pool);
    atomic_store(&pool->header->retained, retained);
    cox_fault_point(COX_FAULT_POOL_RETAINED);
    for (uint32_t page = 0; page < pool->geometry.page_count; page++)
        cox_pool_pages_trim(pool, page, as);
}
