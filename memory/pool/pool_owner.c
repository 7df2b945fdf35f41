/* pool_owner: the rows of a pool, and their owners. */
#include <inttypes.h>

#include "channel/base/fault.h"
#include "channel/base/peer.h"
#include "pool_internal.h"

bool cox_pool_identity_is_dead(const struct cox_pool *pool, uint64_t identity)
{
    const uint32_t state = cox_pool_identity_state(identity);
    const int32_t pid = cox_pool_identity_pid(identity);
    struct cox_peer peer = COX_PEER_NONE;
    uint64_t start;
    if (state != COX_POOL_OWNER_LIVE && state != COX_POOL_OWNER_SWEEPING)
        return false;
    if (pid == pool->pid &&
        cox_pool_identity_start(identity) == cox_pool_identity_start(pool->start))
        return false;
    int r = pid == 0 ? COX_PEER_DEAD : cox_peer_open(pid, cox_pool_identity_start(identity), &peer);
    cox_peer_close(&peer);
    if (r == 0 || r == COX_PEER_DEAD)
        return r == COX_PEER_DEAD;
    /* Without a pidfd: the pid may belong to another process now, so compare start times. A zombie
     * counts as alive, since its other threads may still run. */
    r = cox_peer_start_time(pid, &start);
    return r == COX_PEER_DEAD ||
           (r == 0 && cox_pool_identity_start(start) != cox_pool_identity_start(identity));
}

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
