/*
 * pool_pin: pins of blocks for queues.
 *
 * Pins need no lock: only a process that joined the queue sets them, which keeps the queue's
 * place. They are cleared by compare-and-swap of the exact word.
 */
#include <inttypes.h>

#include "channel/base/fault.h"
#include "pool_internal.h"

static int pin_word_of(const struct cox_pool *pool, uint64_t queue_id, uint64_t tag,
                       uint64_t *ret_word, uint32_t *ret_place)
{
    const uint32_t place = queue_id ? cox_pool_place_of(pool, queue_id) : COX_POOL_PLACE_NONE;
    if (place == COX_POOL_PLACE_NONE)
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
    if (tag == 0 || tag > COX_POOL_EPOCH_MAX)
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
        tag > COX_POOL_EPOCH_MAX || pin_word_of(pool, queue_id, tag, &word, &place))
        return;
    pin_clear(pool, ref->block, word);
}
