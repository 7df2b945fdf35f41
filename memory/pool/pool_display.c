/* pool_display: numbers and text for people. */
#include <inttypes.h>
#include <stdio.h>

#include "pool_internal.h"

#define LINE_SIZE 256

static uint64_t references_of(const struct cox_pool *pool, uint32_t block)
{
    uint64_t count = 0;
    for (uint32_t owner = 0; owner < cox_pool_owner_high(pool); owner++)
        count += atomic_load(&cox_pool_count_of(pool, owner, block)->ref_count);
    return count;
}

static uint64_t pins_of(const struct cox_pool *pool, uint32_t block)
{
    uint64_t count = 0;
    for (uint32_t i = 0; i < COX_POOL_PIN_COUNT_MAX; i++)
        count += atomic_load(&pool->pins[block].pin_word[i]) != 0;
    return count;
}

static struct cox_pool_word word_load(const struct cox_pool *pool, uint32_t block)
{
    return cox_pool_word_split(atomic_load(cox_pool_block_word_of(pool, block)));
}

static uint64_t block_size_of(const struct cox_pool *pool, uint32_t block)
{
    return pool->geometry.slab_count ? cox_pool_slab_block_size(pool, block)
                                     : pool->geometry.block_size;
}

/* ---- stats ---- */

/* None of its blocks is used. */
static bool slab_is_empty(const struct cox_pool *pool, uint32_t slab)
{
    const uint32_t units = pool->geometry.slab_units;
    const uint32_t phase =
        cox_pool_slab_word_split(atomic_load(&pool->slabs[slab].slab_word)).phase;
    if (phase == COX_POOL_SLAB_EMPTY)
        return true;
    if (phase != COX_POOL_SLAB_CUT)
        return false;
    for (uint32_t unit = 0; unit < units; unit++)
        if (word_load(pool, slab * units + unit).phase != COX_POOL_FREE)
            return false;
    return true;
}

void cox_pool_read_stats(const struct cox_pool *pool, struct cox_pool_stats *ret_stats)
{
    struct cox_pool_stats stats = {.size = pool->geometry.memory_size};
    for (uint32_t block = 0; block < pool->geometry.block_count; block++) {
        if (word_load(pool, block).phase != COX_POOL_FREE)
            stats.used_size += block_size_of(pool, block);
        else if (pool->geometry.slab_count == 0)
            stats.free_count++;
        stats.reference_count += references_of(pool, block);
        stats.pin_count += pins_of(pool, block);
    }
    stats.block_count =
        pool->geometry.slab_count ? pool->geometry.slab_count : pool->geometry.block_count;
    for (uint32_t slab = 0; slab < pool->geometry.slab_count; slab++)
        stats.free_count += slab_is_empty(pool, slab);
    for (uint32_t owner = 0; owner < cox_pool_owner_high(pool); owner++) {
        const struct cox_pool_layout_owner *line = &pool->owners[owner];
        stats.owner_count += atomic_load(&line->owner_identity) != COX_POOL_OWNER_EMPTY;
        stats.allocated += atomic_load(&line->owner_allocated);
        stats.freed += atomic_load(&line->owner_freed);
        stats.swept += atomic_load(&line->owner_swept);
    }
    *ret_stats = stats;
}

/* ---- dump ---- */

typedef void (*line_fn)(void *context, const char *text);

static void dump_owner(const struct cox_pool *pool, uint32_t owner, line_fn line, void *context)
{
    const struct cox_pool_layout_owner *entry = &pool->owners[owner];
    const uint64_t identity = atomic_load(&entry->owner_identity);
    char text[LINE_SIZE];
    if (identity == COX_POOL_OWNER_EMPTY)
        return;
    snprintf(text, sizeof text,
             "owner %" PRIu32 ": %sprocess %d started at %" PRIu64 ", incarnation %" PRIu32
             ", joined %016" PRIx64 ", allocated %" PRIu64 ", freed %" PRIu64 "%s",
             owner, cox_pool_identity_state(identity) == COX_POOL_OWNER_LIVE ? "" : "swept by ",
             cox_pool_identity_pid(identity), cox_pool_identity_start(identity),
             atomic_load(&entry->owner_incarnation), atomic_load(&entry->owner_joined),
             atomic_load(&entry->owner_allocated), atomic_load(&entry->owner_freed),
             cox_pool_identity_is_dead(pool, identity) ? ", dead" : "");
    line(context, text);
}

static void dump_block(const struct cox_pool *pool, uint32_t block, line_fn line, void *context)
{
    static const char *const phases[] = {"free", "claimed", "used", "closing"};
    const struct cox_pool_word word = word_load(pool, block);
    char text[LINE_SIZE];
    if (word.phase == COX_POOL_FREE)
        return;
    int length = snprintf(
        text, sizeof text,
        "block %" PRIu32 ": %s, epoch %" PRIu64 ", %" PRIu64 " bytes at %" PRIu64 ", counted by",
        block, word.phase <= COX_POOL_CLOSING ? phases[word.phase] : "corrupt", word.epoch,
        block_size_of(pool, block), cox_pool_block_offset(pool, block));
    size_t at = (size_t)length;
    for (uint32_t owner = 0; owner < cox_pool_owner_high(pool) && at < sizeof text - 24; owner++) {
        const unsigned count = atomic_load(&cox_pool_count_of(pool, owner, block)->ref_count);
        if (count)
            at += (size_t)snprintf(text + at, sizeof text - at, " %" PRIu32 "x%u", owner, count);
    }
    snprintf(text + at, sizeof text - at, ", pins %" PRIu64, pins_of(pool, block));
    line(context, text);
}

void cox_pool_dump(const struct cox_pool *pool, void (*line)(void *context, const char *text),
                   void *context)
{
    char text[LINE_SIZE];
    snprintf(text, sizeof text,
             "pool %016" PRIx64 ": %s, %" PRIu32 " %s of %" PRIu64 " bytes, %" PRIu64
             " bytes in domain %" PRIu32 ":%" PRIu32,
             pool->id, pool->geometry.slab_count ? "slabs" : "fixed",
             pool->geometry.slab_count ? pool->geometry.slab_count : pool->geometry.block_count,
             pool->geometry.slab_count ? "slabs" : "blocks",
             pool->geometry.slab_count ? pool->geometry.slab_size : pool->geometry.block_size,
             pool->geometry.memory_size, pool->geometry.domain.kind, pool->geometry.domain.device);
    line(context, text);
    for (uint32_t owner = 0; owner < cox_pool_owner_high(pool); owner++)
        dump_owner(pool, owner, line, context);
    for (uint32_t place = 0; place < COX_POOL_QUEUE_COUNT_MAX; place++) {
        const uint64_t queue_id = atomic_load(&pool->header->queues[place].queue_id);
        if (!queue_id)
            continue;
        snprintf(text, sizeof text, "queue %016" PRIx64 ": place %" PRIu32, queue_id, place);
        line(context, text);
    }
    for (uint32_t block = 0; block < pool->geometry.block_count; block++)
        dump_block(pool, block, line, context);
}
