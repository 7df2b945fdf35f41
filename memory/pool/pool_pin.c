/*
 * pool_pin: queues that joined the pool, and pins of blocks for them.
 *
 * The table of queues changes under a lock in shared memory that names its owner; when the owner is
 * dead, the next process takes the lock over. Each change is one word, so nothing is left half
 * done. Pins need no lock: only a process that joined the queue sets them, which keeps the queue's
 * place. They are cleared by compare-and-swap of the exact word.
 */
#include <inttypes.h>

#include "channel/base/fault.h"
#include "pool_internal.h"

#include <sched.h>

/* The lock is held for microseconds, or for one pass over the blocks, unless its owner is
 * stopped. */
#define LOCK_PATIENCE_NS COX_NSEC_PER_SEC
#define PLACE_NONE UINT32_MAX

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

static uint32_t place_of(const struct cox_pool *pool, uint64_t queue_id)
{
    for (uint32_t place = 0; place < COX_POOL_QUEUE_COUNT_MAX; place++)
        if (atomic_load(&pool->header->queues[place].queue_id) == queue_id)
            return place;
    return PLACE_NONE;
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
    if (dropped)
        cox_pool_wake_unpin_waiters(pool);
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
    uint32_t place = place_of(pool, queue_id);
    if (place == PLACE_NONE && (place = place_of(pool, 0)) != PLACE_NONE) {
        atomic_fetch_add(&pool->header->queues[place].queue_epoch, 1);
        atomic_store(&pool->header->queues[place].queue_id, queue_id);
        cox_fault_point(COX_FAULT_POOL_QUEUE);
    }
    *ret_place = place;
    return place == PLACE_NONE ? COX_FULL : 0;
}

int cox_pool_queue_join(struct cox_pool *pool, uint64_t queue_id, struct cox_error *err)
{
    uint32_t place = PLACE_NONE;
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
    const uint32_t place = place_of(pool, queue_id);
    if (place == PLACE_NONE)
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

/* ---- pins ---- */

static int pin_word_of(const struct cox_pool *pool, uint64_t queue_id, uint64_t tag,
                       uint64_t *ret_word, uint32_t *ret_place)
{
    const uint32_t place = queue_id ? place_of(pool, queue_id) : PLACE_NONE;
    if (place == PLACE_NONE)
        return COX_NOT_FOUND;
    const uint64_t epoch = atomic_load(&pool->header->queues[place].queue_epoch);
    /* Without a join the place may have passed to another queue meanwhile, whose messages use the
     * same tags. */
    if (atomic_load(&pool->header->queues[place].queue_id) != queue_id)
        return COX_NOT_FOUND;
    *ret_place = place;
    *ret_word = cox_pool_pin_word(tag, epoch, place);
    return 0;
}

/* Returns 0; COX_FULL. */
static int pin_set(struct cox_pool *pool, uint32_t block, uint64_t word)
{
    struct cox_pool_layout_pins *pins = &pool->pins[block];
    for (uint32_t i = 0; i < COX_POOL_PIN_COUNT_MAX; i++)
        if (atomic_load(&pins->pin_word[i]) == word)
            return 0;
    for (uint32_t i = 0; i < COX_POOL_PIN_COUNT_MAX; i++) {
        uint64_t none = 0;
        bool set = atomic_compare_exchange_strong(&pins->pin_word[i], &none, word);
        cox_fault_point(COX_FAULT_POOL_PINNED);
        if (set)
            return 0;
    }
    return COX_FULL;
}

static void pin_clear(struct cox_pool *pool, uint32_t block, uint64_t word)
{
    bool changed = false;
    for (uint32_t i = 0; i < COX_POOL_PIN_COUNT_MAX; i++) {
        uint64_t seen = word;
        changed |= atomic_compare_exchange_strong(&pool->pins[block].pin_word[i], &seen, 0);
        cox_fault_point(COX_FAULT_POOL_UNPINNED);
    }
    if (!changed)
        return;
    cox_pool_wake_unpin_waiters(pool);
    cox_pool_block_reclaim(pool, block, pool->owner);
}

int cox_pool_pin(struct cox_pool *pool, const struct cox_block_ref *ref, uint64_t queue_id,
                 uint64_t tag, struct cox_error *err)
{
    uint64_t word = 0;
    uint32_t place = 0;
    int r = cox_pool_check_here(pool, err);
    if (r == 0)
        r = cox_pool_check_ref(pool, ref, err);
    if (r)
        return r;
    if (tag == 0 || tag > COX_POOL_GENERATION_MAX)
        return cox_fail(err, COX_INVALID, "tag %" PRIu64 ": 1 to 2^48 - 1", tag);
    if (pin_word_of(pool, queue_id, tag, &word, &place) ||
        !(atomic_load(&pool->owners[pool->owner].owner_joined) >> place & 1))
        return cox_fail(err, COX_NOT_FOUND, "this process has not joined queue %016" PRIx64,
                        queue_id);
    /* This process's reference keeps the block in use: no check afterwards. */
    if (!cox_pool_has(pool, ref))
        return cox_fail(err, COX_STALE, "this process has no such reference of block %" PRIu32,
                        ref->block);
    r = pin_set(pool, ref->block, word);
    if (r == COX_FULL && cox_pool_sweep(pool))
        r = pin_set(pool, ref->block, word);
    return r ? cox_fail(err, r, "block %" PRIu32 " has %d other pins already", ref->block,
                        COX_POOL_PIN_COUNT_MAX)
             : 0;
}

void cox_pool_unpin(struct cox_pool *pool, const struct cox_block_ref *ref, uint64_t queue_id,
                    uint64_t tag)
{
    uint64_t word;
    uint32_t place;
    if (cox_pool_check_here(pool, NULL) || cox_pool_check_ref(pool, ref, NULL) || tag == 0 ||
        tag > COX_POOL_GENERATION_MAX || pin_word_of(pool, queue_id, tag, &word, &place))
        return;
    pin_clear(pool, ref->block, word);
}
