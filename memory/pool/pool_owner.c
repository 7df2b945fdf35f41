/* pool_owner: the rows of a pool, and their owners. */
#include <inttypes.h>

#include "channel/base/fault.h"
#include "pool_internal.h"

/* Before the first count: from now on scans of all rows include this one. */
static void owner_raise(struct cox_pool *pool, uint32_t owner)
{
    uint32_t high = atomic_load(&pool->header->owner_high);
    while (high <= owner &&
           !atomic_compare_exchange_weak(&pool->header->owner_high, &high, owner + 1))
        ;
    cox_fault_point(COX_FAULT_POOL_JOINED);
}

static bool owner_take(struct cox_pool *pool, uint32_t owner)
{
    const uint64_t own = cox_pool_identity(COX_POOL_OWNER_LIVE, pool->pid, pool->start);
    uint64_t released = 0, identity = atomic_load(&pool->owners[owner].owner_identity);
    if (cox_pool_identity_state(identity) == COX_POOL_OWNER_EMPTY) {
        bool taken =
            atomic_compare_exchange_strong(&pool->owners[owner].owner_identity, &identity, own);
        cox_fault_point(COX_FAULT_POOL_JOINED);
        return taken;
    }
    return cox_pool_identity_is_dead(pool, identity) &&
           cox_pool_sweep_owner(pool, owner, identity, own, &released);
}

int cox_pool_owner_claim(struct cox_pool *pool, uint32_t incarnation, struct cox_error *err)
{
    bool taken = false;
    uint32_t owner = 0;
    /* Empty rows first: a row of a dead owner costs a pass over all blocks. */
    for (; owner < pool->geometry.owner_count; owner++)
        if (atomic_load(&pool->owners[owner].owner_identity) == COX_POOL_OWNER_EMPTY &&
            (taken = owner_take(pool, owner)))
            break;
    for (owner = taken ? owner : 0; !taken && owner < pool->geometry.owner_count; owner++)
        if ((taken = owner_take(pool, owner)))
            break;
    if (!taken)
        return cox_fail(err, COX_FULL,
                        "the pool has %" PRIu32 " owners already (owner_count_max), all alive",
                        pool->geometry.owner_count);
    pool->owner = owner;
    owner_raise(pool, owner);
    /* relaxed: for display */
    atomic_store_explicit(&pool->owners[owner].owner_incarnation, incarnation ? incarnation : 1,
                          memory_order_relaxed);
    cox_fault_point(COX_FAULT_POOL_JOINED);
    return 0;
}

void cox_pool_owner_leave(struct cox_pool *pool)
{
    uint64_t released = 0;
    if (pool->owner == UINT32_MAX)
        return;
    cox_pool_sweep_owner(pool, pool->owner,
                         cox_pool_identity(COX_POOL_OWNER_LIVE, pool->pid, pool->start), 0,
                         &released);
}
