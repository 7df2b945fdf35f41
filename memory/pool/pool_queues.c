/*
 * pool_queues: queues that joined the pool.
 *
 * The table of queues changes under a lock in shared memory that names its owner; when the owner is
 * dead, the next process takes the lock over. Each change is one word, so nothing is left half
 * done.
 */
#include "channel/base/base_internal.h"
#include "channel/base/fault.h"
#include "pool_internal.h"

#include <inttypes.h>
#include <sched.h>

/* The lock is held for microseconds, or for one pass over the blocks, unless its owner is
 * stopped. */
#define LOCK_PATIENCE_NS COX_NSEC_PER_SEC

/* ---- the lock ---- */

static bool lock_try(struct cox_pool *pool)
{
    const uint64_t own = cox_pool_identity(COX_POOL_OWNER_LIVE, pool->pid, pool->start);
    uint64_t seen = atomic_load(&pool->header->queues_lock);
    if (seen && (seen == own || !cox_pool_identity_is_dead(pool, seen)))
        return false;
    bool locked = atomic_compare_exchange_strong(&pool->header->queues_lock, &seen, own);
    cox_fault_point(COX_FAULT_POOL_QUEUE);
    return locked;
}

static int lock_wait(struct cox_pool *pool, struct cox_error *err)
{
    const uint64_t deadline_ns = cox_deadline_after_ns(LOCK_PATIENCE_NS);
    while (!lock_try(pool)) {
        if (cox_now_ns() > deadline_ns)
            return cox_fail(err, COX_BUSY,
                            "process %d is stopped while it changes the pool's queues",
                            cox_pool_identity_pid(atomic_load(&pool->header->queues_lock)));
        sched_yield();
    }
    return 0;
}

static void lock_release(struct cox_pool *pool)
{
    atomic_store(&pool->header->queues_lock, 0);
    cox_fault_point(COX_FAULT_POOL_QUEUE);
}

/* ---- queues ---- */

uint32_t cox_pool_place_of(const struct cox_pool *pool, uint64_t queue_id)
{
    for (uint32_t place = 0; place < COX_POOL_QUEUE_COUNT_MAX; place++)
        if (atomic_load(&pool->header->queues[place].queue_id) == queue_id)
            return place;
    return COX_POOL_PLACE_NONE;
}

/* Bits of the queues that any process with a row, dead or alive, has joined. */
static uint64_t joined_by_all(const struct cox_pool *pool)
{
    uint64_t joined = 0;
    for (uint32_t owner = 0; owner < cox_pool_owner_high(pool); owner++)
        joined |= atomic_load(&pool->owners[owner].owner_joined);
    return joined;
}

/* Under the lock: clears all pins of these places, corrupt ones included. */
static uint64_t pins_drop(struct cox_pool *pool, uint64_t places, uint32_t as)
{
    uint64_t dropped = 0;
    for (uint32_t block = 0; block < pool->geometry.block_count; block++) {
        bool changed = false;
        for (uint32_t i = 0; i < COX_POOL_PIN_COUNT_MAX; i++) {
            uint64_t word = atomic_load(&pool->pins[block].pin_word[i]);
            if (word && places >> (word & 63) & 1) {
                changed |= atomic_compare_exchange_strong(&pool->pins[block].pin_word[i], &word, 0);
                cox_fault_point(COX_FAULT_POOL_UNPINNED);
                dropped++;
            }
        }
        if (changed)
            cox_pool_block_reclaim(pool, block, as);
    }
    return dropped;
}

/* Under the lock: frees places of queues without members. */
static uint64_t places_free(struct cox_pool *pool, uint32_t as)
{
    const uint64_t joined = joined_by_all(pool);
    uint64_t gone = 0, dropped = 0;
    for (uint32_t place = 0; place < COX_POOL_QUEUE_COUNT_MAX; place++)
        if (atomic_load(&pool->header->queues[place].queue_id) && !(joined >> place & 1))
            gone |= UINT64_C(1) << place;
    if (gone == 0)
        return 0;
    dropped = pins_drop(pool, gone, as);
    for (uint32_t place = 0; place < COX_POOL_QUEUE_COUNT_MAX; place++)
        if (gone >> place & 1) {
            atomic_store(&pool->header->queues[place].queue_id, 0);
            cox_fault_point(COX_FAULT_POOL_QUEUE);
        }
    return dropped;
}

uint64_t cox_pool_queues_sweep(struct cox_pool *pool, uint32_t as)
{
    if (!lock_try(pool))
        return 0; /* the lock owner does it, or the next sweep */
    const uint64_t dropped = places_free(pool, as);
    lock_release(pool);
    return dropped;
}

static int place_take(struct cox_pool *pool, uint64_t queue_id, uint32_t *ret_place)
{
    uint32_t place = cox_pool_place_of(pool, queue_id);
    if (place == COX_POOL_PLACE_NONE &&
        (place = cox_pool_place_of(pool, 0)) != COX_POOL_PLACE_NONE) {
        atomic_fetch_add(&pool->header->queues[place].queue_epoch, 1);
        atomic_store(&pool->header->queues[place].queue_id, queue_id);
        cox_fault_point(COX_FAULT_POOL_QUEUE);
    }
    *ret_place = place;
    return place == COX_POOL_PLACE_NONE ? COX_FULL : 0;
}

int cox_pool_queue_join(struct cox_pool *pool, uint64_t queue_id, struct cox_error *err)
{
    uint32_t place = COX_POOL_PLACE_NONE;
    int r = cox_pool_check_here(pool, err);
    if (r)
        return r;
    if (queue_id == 0)
        return cox_fail(err, COX_INVALID, "0 is no queue");
    r = lock_wait(pool, err);
    if (r)
        return r;
    places_free(pool, pool->owner);
    r = place_take(pool, queue_id, &place);
    if (r == 0) {
        pthread_mutex_lock(&pool->joined_lock);
        pool->joined_counts[place]++;
        atomic_fetch_or(&pool->owners[pool->owner].owner_joined, UINT64_C(1) << place);
        pthread_mutex_unlock(&pool->joined_lock);
        cox_fault_point(COX_FAULT_POOL_QUEUE);
    }
    lock_release(pool);
    return r ? cox_fail(err, r, "%d other queues have joined the pool already",
                        COX_POOL_QUEUE_COUNT_MAX)
             : 0;
}

void cox_pool_queue_leave(struct cox_pool *pool, uint64_t queue_id)
{
    if (cox_pool_check_here(pool, NULL) || queue_id == 0)
        return;
    /* The place is stable while this process has joined the queue. */
    const uint32_t place = cox_pool_place_of(pool, queue_id);
    if (place == COX_POOL_PLACE_NONE)
        return;
    pthread_mutex_lock(&pool->joined_lock);
    const bool last = pool->joined_counts[place] > 0 && --pool->joined_counts[place] == 0;
    if (last)
        atomic_fetch_and(&pool->owners[pool->owner].owner_joined, ~(UINT64_C(1) << place));
    pthread_mutex_unlock(&pool->joined_lock);
    cox_fault_point(COX_FAULT_POOL_QUEUE);
    if (last)
        cox_pool_queues_sweep(pool, pool->owner);
}
