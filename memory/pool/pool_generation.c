/* pool_generation: blocks that one process manages by number. */
#include "channel/base/base_internal.h"
#include "channel/base/fault.h"
#include "channel/base/futex.h"
#include "pool_internal.h"

#include <inttypes.h>

static struct cox_pool_word word_load(const struct cox_pool *pool, uint32_t block)
{
    return cox_pool_word_split(atomic_load(cox_pool_block_word_of(pool, block)));
}

static bool generation_is(uint64_t generation)
{
    return generation > 0 && generation <= COX_POOL_GENERATION_MAX;
}

/* ---- adopt_all ---- */

static int adopt_one(struct cox_pool *pool, uint32_t block, uint64_t generation,
                     struct cox_error *err)
{
    uint64_t first;
    if (!cox_pool_block_claim(pool, block, pool->owner, &first))
        return COX_STATE;
    int r = 0;
    if (pool->geometry.on_demand) {
        cox_pool_pages_release(pool, block);
        r = cox_pool_pages_commit(pool, block, err);
    }
    if (r == 0)
        r = cox_pool_block_use(pool, block, generation);
    if (r)
        cox_pool_block_unclaim(pool, block, first, pool->owner);
    return r;
}

int cox_pool_adopt_all(struct cox_pool *pool, uint64_t generation, struct cox_error *err)
{
    const uint32_t count = pool->geometry.block_count;
    uint32_t adopted = 0;
    int r = cox_pool_check_here(pool, err);
    if (r)
        return r;
    if (!generation_is(generation))
        return cox_fail(err, COX_INVALID, "generation %" PRIu64 ": 1 to 2^48 - 1", generation);
    if (pool->read_only)
        return cox_fail(err, COX_DENIED, "the pool is attached for reading only");
    if (pool->geometry.slab_count)
        r = COX_STATE;
    for (uint32_t block = 0; r == 0 && block < count; block++)
        if (atomic_load(cox_pool_block_word_of(pool, block)) != cox_pool_word(1, COX_POOL_FREE, 0))
            r = COX_STATE;
    while (r == 0 && adopted < count)
        if ((r = adopt_one(pool, adopted, generation, err)) == 0)
            adopted++;
    if (r == 0) {
        atomic_store(&pool->adopted_all, true);
        return 0;
    }
    /* Another process has allocated a block, or memory ran out: all or none. */
    while (adopted > 0)
        cox_pool_count_drop(pool, --adopted);
    return cox_fail(err, r, "all blocks of the pool cannot be adopted: %s",
                    r == COX_STATE ? "some are, or were, in use" : cox_status_text(r));
}

uint64_t cox_pool_generation(const struct cox_pool *pool, uint32_t block)
{
    if (!atomic_load(&pool->adopted_all) || block >= pool->geometry.block_count)
        return 0;
    return word_load(pool, block).generation;
}

/* ---- bump_generation ---- */

/* A process that is about to free the block fails its compare-and-swap on the new word, and this
 * process counts the block. */
int cox_pool_bump_generation(struct cox_pool *pool, uint32_t block, uint64_t generation)
{
    int r = cox_pool_check_here(pool, NULL);
    if (r)
        return r;
    if (block >= pool->geometry.block_count || !generation_is(generation))
        return COX_INVALID;
    if (!atomic_load(&pool->adopted_all))
        return COX_STATE;
    uint64_t word = atomic_load(cox_pool_block_word_of(pool, block));
    for (;;) {
        const struct cox_pool_word seen = cox_pool_word_split(word);
        if (seen.phase != COX_POOL_USED && seen.phase != COX_POOL_CLOSING)
            return COX_STATE; /* another process corrupted the word */
        if (seen.generation == generation)
            return 0;
        bool changed = atomic_compare_exchange_strong(&pool->blocks[block].block_word, &word,
                                                      cox_pool_word(generation, COX_POOL_USED, 0));
        cox_fault_point(COX_FAULT_POOL_GENERATION_BUMPED);
        if (changed)
            return 0;
    }
}

/* ---- wait_unpinned ---- */

/* Keeps the bit of this process set while any of its threads waits. */
static void unpin_waiter_change(struct cox_pool *pool, bool begins)
{
    _Atomic uint64_t *unpin_waiters = &pool->header->unpin_waiters[pool->owner / 64];
    const uint64_t mask = UINT64_C(1) << (pool->owner % 64);
    pthread_mutex_lock(&pool->unpin_lock);
    if (begins && pool->unpin_waiter_count++ == 0)
        atomic_fetch_or(unpin_waiters, mask);
    else if (!begins && --pool->unpin_waiter_count == 0)
        atomic_fetch_and(unpin_waiters, ~mask);
    pthread_mutex_unlock(&pool->unpin_lock);
    cox_fault_point(COX_FAULT_POOL_UNPIN_WAITING);
}

/* A process other than this one that references the block; owner_count: a message pins it;
 * UINT32_MAX: none. */
static uint32_t find_reader(const struct cox_pool *pool, uint32_t block)
{
    const uint32_t high = cox_pool_owner_high(pool);
    for (uint32_t owner = 0; owner < high; owner++)
        if (owner != pool->owner && atomic_load(&cox_pool_count_of(pool, owner, block)->ref_count))
            return owner;
    for (uint32_t i = 0; i < COX_POOL_PIN_COUNT_MAX; i++)
        if (atomic_load(&pool->pins[block].pin_word[i]))
            return pool->geometry.owner_count;
    return UINT32_MAX;
}

static int fail_timeout(const struct cox_pool *pool, uint32_t block, uint32_t reader,
                        struct cox_error *err)
{
    if (reader >= pool->geometry.owner_count)
        return cox_fail(err, COX_TIMEOUT, "block %" PRIu32 " is still pinned by a message", block);
    return cox_fail(err, COX_TIMEOUT, "block %" PRIu32 " is still read by process %d", block,
                    cox_pool_identity_pid(atomic_load(&pool->owners[reader].owner_identity)));
}

static int wait_unpinned_loop(struct cox_pool *pool, uint32_t block, uint64_t deadline_ns,
                              bool (*cancelled)(void *context), void *context,
                              struct cox_error *err)
{
    uint64_t sweep_ns = cox_deadline_after_ns(COX_POOL_SLICE_NS);
    for (;;) {
        const uint32_t wakeup = atomic_load(&pool->header->unpin_wakeup);
        const uint32_t reader = find_reader(pool, block);
        if (reader == UINT32_MAX)
            return 0;
        if (cancelled && cancelled(context))
            return cox_fail(err, COX_ABORTED, "cancelled while block %" PRIu32 " was read", block);
        const uint64_t now_ns = cox_now_ns();
        if (now_ns >= deadline_ns)
            return fail_timeout(pool, block, reader, err);
        if (now_ns >= sweep_ns) { /* the reader may be dead */
            cox_pool_sweep(pool);
            sweep_ns = now_ns + COX_POOL_SLICE_NS;
            continue;
        }
        int r = cox_futex_wait(&pool->header->unpin_wakeup, wakeup,
                               cox_deadline_min(sweep_ns, deadline_ns));
        if (r && r != COX_TIMEOUT)
            return cox_fail(err, r, "waiting for readers of block %" PRIu32 ": %s", block,
                            cox_status_text(r));
    }
}

int cox_pool_wait_unpinned(struct cox_pool *pool, uint32_t block, uint64_t deadline_ns,
                           bool (*cancelled)(void *context), void *context, struct cox_error *err)
{
    int r = cox_pool_check_here(pool, err);
    if (r)
        return r;
    if (block >= pool->geometry.block_count)
        return cox_fail(err, COX_INVALID, "block %" PRIu32 " of %" PRIu32, block,
                        pool->geometry.block_count);
    if (find_reader(pool, block) == UINT32_MAX)
        return 0;
    unpin_waiter_change(pool, true);
    r = wait_unpinned_loop(pool, block, deadline_ns, cancelled, context, err);
    unpin_waiter_change(pool, false);
    return r;
}
