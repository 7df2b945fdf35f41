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
        int r = pool->memory->functions->commit(pool->memory, page * cox_pool_page_size(pool),
                                                cox_pool_page_size(pool), err);
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
    pool->memory->functions->decommit(pool->memory, page * cox_pool_page_size(pool),
                                      cox_pool_page_size(pool));
    page_set(pool, page, COX_POOL_PAGES_NONE);
}

static void retained_add(struct cox_pool *pool, uint32_t page, int64_t sign)
{
    if (!pool->geometry.on_demand || !cox_pool_pages_are_there(pool, page))
        return;
    atomic_fetch_add(&pool->header->retained, sign * (int64_t)cox_pool_page_size(pool));
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
