/* pool_identity: whether this process may use the pool, and whether others are alive. */
#include "channel/base/peer.h"
#include "pool_internal.h"

int cox_pool_check_here(const struct cox_pool *pool, struct cox_error *err)
{
    return cox_pool_local_refs_is_here(pool->local_refs)
               ? 0
               : cox_fail(err, COX_STATE, "in the child of a fork: the pool is its parent's");
}

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
