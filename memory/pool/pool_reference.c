/* pool_reference: allocate, ref, unref, lookup, copies. */
#include "channel/base/fault.h"
#include "memory/domain/domain_table.h"
#include "pool_internal.h"

#include <inttypes.h>

int cox_pool_check_ref(const struct cox_pool *pool, const struct cox_block_ref *ref,
                       struct cox_error *err)
{
    if (ref->pool != pool->id)
        return cox_fail(err, COX_NOT_FOUND,
                        "the block is of pool %016" PRIx64 ", this is %016" PRIx64, ref->pool,
                        pool->id);
    if (ref->block >= pool->geometry.block_count)
        return cox_fail(err, COX_INVALID, "block %" PRIu32 " of %" PRIu32, ref->block,
                        pool->geometry.block_count);
    if (ref->epoch == 0 || ref->epoch > COX_POOL_EPOCH_MAX || ref->reserved)
        return cox_fail(err, COX_INVALID, "a reference of block %" PRIu32 " that is none",
                        ref->block);
    const uint64_t room = pool->geometry.slab_count
                              ? pool->geometry.memory_size - cox_pool_block_offset(pool, ref->block)
                              : pool->geometry.block_size;
    if (ref->size == 0 || ref->size > room)
        return cox_fail(err, COX_INVALID,
                        "%" PRIu64 " bytes of block %" PRIu32 ", which has %" PRIu64, ref->size,
                        ref->block, room);
    return 0;
}

bool cox_pool_has(const struct cox_pool *pool, const struct cox_block_ref *ref)
{
    return cox_pool_local_refs_has(pool->local_refs, ref->block, ref->epoch);
}

/* As check_ref; also COX_STATE in the child of a fork. */
static int reference_check(const struct cox_pool *pool, const struct cox_block_ref *ref,
                           struct cox_error *err)
{
    int r = cox_pool_check_here(pool, err);
    return r ? r : cox_pool_check_ref(pool, ref, err);
}

static int fail_stale(const struct cox_block_ref *ref, struct cox_error *err)
{
    return cox_fail(err, COX_STALE, "block %" PRIu32 " has no epoch %" PRIu64 " any more",
                    ref->block, ref->epoch);
}

/* ---- allocate ---- */

static int fixed_find(struct cox_pool *pool, uint32_t *ret_block, uint64_t *ret_epoch,
                      struct cox_error *err)
{
    int r = cox_pool_block_find(pool, false, ret_block, ret_epoch);
    if (r || !pool->geometry.on_demand)
        return r;
    cox_pool_pages_release(pool, *ret_block);
    r = cox_pool_pages_commit(pool, *ret_block, err);
    if (r == 0)
        return 0;
    cox_pool_block_unclaim(pool, *ret_block, *ret_epoch, pool->owner);
    if (r != COX_NO_SPACE || cox_pool_block_find(pool, true, ret_block, ret_epoch))
        return r;
    cox_pool_pages_release(pool, *ret_block);
    return 0;
}

static int block_find(struct cox_pool *pool, uint64_t size, uint32_t *ret_block,
                      uint64_t *ret_epoch, struct cox_error *err)
{
    return pool->geometry.slab_count ? cox_pool_slab_find(pool, size, ret_block, ret_epoch, err)
                                     : fixed_find(pool, ret_block, ret_epoch, err);
}

int cox_pool_allocate(struct cox_pool *pool, uint64_t size, struct cox_block_ref *ret_ref,
                      struct cox_error *err)
{
    uint32_t block = 0;
    uint64_t epoch = 0, released = 0;
    int r = cox_pool_check_here(pool, err);
    if (r)
        return r;
    if (pool->read_only)
        return cox_fail(err, COX_DENIED, "the pool is attached for reading only");
    const uint64_t size_max =
        pool->geometry.slab_count ? pool->geometry.memory_size : pool->geometry.block_size;
    if (size == 0)
        return cox_fail(err, COX_INVALID, "a block of 0 bytes");
    if (size > size_max)
        return cox_fail(err, COX_TOO_LARGE,
                        "a block of %" PRIu64 " bytes; this pool has none above %" PRIu64, size,
                        size_max);
    r = block_find(pool, size, &block, &epoch, err);
    if (r == COX_FULL && cox_pool_sweep_dead(pool, &released))
        r = block_find(pool, size, &block, &epoch, err);
    if (r == COX_FULL)
        return cox_fail(err, r, "no block of %" PRIu64 " bytes is free", size);
    if (r)
        return r;
    r = cox_pool_local_refs_add(pool->local_refs, block, epoch);
    if (r == 0 && (r = cox_pool_block_use(pool, block, epoch)))
        cox_pool_local_refs_drop(pool->local_refs, block, epoch);
    if (r) {
        cox_pool_block_unclaim(pool, block, epoch, pool->owner);
        return cox_fail(err, r, "block %" PRIu32 ": %s", block, cox_status_text(r));
    }
    *ret_ref = (struct cox_block_ref){pool->id, epoch, size, block, 0};
    return 0;
}

/* ---- references ---- */

/* After this process counts the block: checks that it still has the epoch. CLOSING becomes
 * USED again, since it is counted. Returns 0; COX_STALE; COX_CORRUPT. */
static int word_confirm(struct cox_pool *pool, const struct cox_block_ref *ref)
{
    _Atomic uint64_t *block_word = cox_pool_block_word_of(pool, ref->block);
    uint64_t word = atomic_load(block_word);
    for (;;) {
        const struct cox_pool_word seen = cox_pool_word_split(word);
        if (seen.phase > COX_POOL_CLOSING)
            return COX_CORRUPT;
        if (seen.epoch != ref->epoch || seen.phase == COX_POOL_FREE ||
            seen.phase == COX_POOL_CLAIMED)
            return COX_STALE;
        if (seen.phase == COX_POOL_USED)
            return 0;
        bool changed = atomic_compare_exchange_strong(block_word, &word,
                                                      cox_pool_word(seen.epoch, COX_POOL_USED, 0));
        cox_fault_point(COX_FAULT_POOL_REOPENED);
        if (changed)
            return 0;
    }
}

int cox_pool_ref(struct cox_pool *pool, const struct cox_block_ref *ref, struct cox_error *err)
{
    int r = reference_check(pool, ref, err);
    if (r)
        return r;
    if (cox_pool_count_add(pool, ref->block))
        return cox_fail(err, COX_FULL, "this process has %d references of block %" PRIu32,
                        COX_POOL_COUNT_MAX, ref->block);
    r = word_confirm(pool, ref);
    if (r == 0 && pool->geometry.slab_count &&
        ref->size > cox_pool_slab_block_size(pool, ref->block))
        r = COX_INVALID;
    if (r == 0)
        r = cox_pool_local_refs_add(pool->local_refs, ref->block, ref->epoch);
    if (r == 0)
        return 0;
    cox_pool_count_drop(pool, ref->block);
    return r == COX_STALE ? fail_stale(ref, err)
           : r == COX_INVALID
               ? cox_fail(err, r, "%" PRIu64 " bytes of block %" PRIu32 ", which has fewer",
                          ref->size, ref->block)
               : cox_fail(err, r, "block %" PRIu32 ": %s", ref->block, cox_status_text(r));
}

int cox_pool_unref(struct cox_pool *pool, const struct cox_block_ref *ref, struct cox_error *err)
{
    int r = reference_check(pool, ref, err);
    if (r)
        return r;
    if (!cox_pool_local_refs_drop(pool->local_refs, ref->block, ref->epoch))
        return cox_fail(err, COX_STALE,
                        "this process has no reference of block %" PRIu32 ", epoch %" PRIu64,
                        ref->block, ref->epoch);
    return cox_pool_count_drop(pool, ref->block)
               ? 0
               : cox_fail(err, COX_CORRUPT, "the counts of block %" PRIu32 " are corrupt",
                          ref->block);
}

bool cox_pool_is_idle(const struct cox_pool *pool)
{
    return cox_pool_local_refs_is_empty(pool->local_refs, pool->geometry.block_count);
}

/* ---- lookup ---- */

int cox_pool_offset(const struct cox_pool *pool, const struct cox_block_ref *ref,
                    uint64_t *ret_offset)
{
    int r = cox_pool_check_ref(pool, ref, NULL);
    if (r == 0)
        *ret_offset = cox_pool_block_offset(pool, ref->block);
    return r;
}

void *cox_pool_pointer(const struct cox_pool *pool, const struct cox_block_ref *ref)
{
    if (!pool->memory->address || cox_pool_check_ref(pool, ref, NULL))
        return NULL;
    return (uint8_t *)pool->memory->address + cox_pool_block_offset(pool, ref->block);
}

int cox_pool_find(const struct cox_pool *pool, uint64_t offset, struct cox_block_ref *ret_ref)
{
    if (offset >= pool->geometry.memory_size)
        return COX_NOT_FOUND;
    uint32_t block = (uint32_t)(offset / pool->geometry.block_size);
    uint64_t size = pool->geometry.block_size;
    if (pool->geometry.slab_count) {
        block = cox_pool_slab_block_of(pool, block);
        size = block < pool->geometry.block_count ? cox_pool_slab_block_size(pool, block) : 0;
    }
    if (size == 0)
        return COX_NOT_FOUND;
    const struct cox_pool_word word =
        cox_pool_word_split(atomic_load(cox_pool_block_word_of(pool, block)));
    if ((word.phase != COX_POOL_USED && word.phase != COX_POOL_CLOSING) || word.epoch == 0)
        return COX_NOT_FOUND;
    *ret_ref = (struct cox_block_ref){pool->id, word.epoch, size, block, 0};
    return 0;
}

int cox_pool_find_pointer(const struct cox_pool *pool, const void *pointer,
                          struct cox_block_ref *ret_ref)
{
    const uintptr_t base = (uintptr_t)pool->memory->address, address = (uintptr_t)pointer;
    if (base == 0 || address < base)
        return COX_NOT_FOUND;
    return cox_pool_find(pool, address - base, ret_ref);
}

/* ---- copies ---- */

/* Checks a range of a block that this process must have referenced. */
static int range_check(const struct cox_pool *pool, const struct cox_block_ref *ref,
                       uint64_t offset, uint64_t size, bool writes, struct cox_error *err)
{
    int r = reference_check(pool, ref, err);
    if (r)
        return r;
    if (!cox_pool_has(pool, ref))
        return cox_fail(err, COX_STALE,
                        "this process has no reference of block %" PRIu32 ", epoch %" PRIu64,
                        ref->block, ref->epoch);
    if (offset > ref->size || size > ref->size - offset)
        return cox_fail(err, COX_INVALID,
                        "%" PRIu64 " bytes from %" PRIu64 " on, of a block of %" PRIu64, size,
                        offset, ref->size);
    if (pool->geometry.slab_count && ref->size > cox_pool_slab_block_size(pool, ref->block))
        return cox_fail(err, COX_INVALID, "%" PRIu64 " bytes of block %" PRIu32 ", which has fewer",
                        ref->size, ref->block);
    if (writes && pool->read_only)
        return cox_fail(err, COX_DENIED, "the pool is attached for reading only");
    return 0;
}

int cox_pool_copy_to(struct cox_pool *pool, const struct cox_block_ref *ref, uint64_t offset,
                     const void *host, uint64_t size, struct cox_error *err)
{
    int r = range_check(pool, ref, offset, size, true, err);
    if (r)
        return r;
    return cox_domain_copy_to(pool->memory, cox_pool_block_offset(pool, ref->block) + offset, host,
                              size, err);
}

int cox_pool_copy_from(struct cox_pool *pool, const struct cox_block_ref *ref, uint64_t offset,
                       void *host, uint64_t size, struct cox_error *err)
{
    int r = range_check(pool, ref, offset, size, false, err);
    if (r)
        return r;
    return cox_domain_copy_from(pool->memory, cox_pool_block_offset(pool, ref->block) + offset,
                                host, size, err);
}

int cox_pool_copy(struct cox_pool *to, const struct cox_block_ref *to_ref, struct cox_pool *from,
                  const struct cox_block_ref *from_ref, uint64_t size, struct cox_error *err)
{
    int r = range_check(to, to_ref, 0, size, true, err);
    if (r == 0)
        r = range_check(from, from_ref, 0, size, false, err);
    if (r)
        return r;
    return cox_domain_copy(to->memory, cox_pool_block_offset(to, to_ref->block), from->memory,
                           cox_pool_block_offset(from, from_ref->block), size, err);
}
