#include "blocks.h"

#include <stdlib.h>

#include "channel/base/idioms.h"

int cox_blocks_init(struct cox_blocks *blocks, uint32_t count)
{
    *blocks = (struct cox_blocks){
        .free = calloc(count ? count : 1, sizeof *blocks->free),
        .taken = calloc(count ? count : 1, sizeof *blocks->taken),
        .free_count = count,
        .count = count,
    };
    if (!blocks->free || !blocks->taken) {
        cox_blocks_deinit(blocks);
        return -ENOMEM;
    }
    /* The lowest ids are on top, so that a small load touches few pages of the cache. */
    for (uint32_t i = 0; i < count; i++)
        blocks->free[i] = (int32_t)(count - 1 - i);
    return 0;
}

void cox_blocks_deinit(struct cox_blocks *blocks)
{
    free(blocks->free);
    free(blocks->taken);
    *blocks = (struct cox_blocks){0};
}

bool cox_blocks_take(struct cox_blocks *blocks, uint32_t count, int32_t *ret_ids)
{
    if (count > blocks->free_count)
        return false;
    for (uint32_t i = 0; i < count; i++) {
        ret_ids[i] = blocks->free[--blocks->free_count];
        blocks->taken[ret_ids[i]] = true;
    }
    return true;
}

void cox_blocks_reserve(struct cox_blocks *blocks, const int32_t *ids, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (ids[i] >= 0 && (uint32_t)ids[i] < blocks->count)
            blocks->taken[ids[i]] = true;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < blocks->free_count; i++)
        if (!blocks->taken[blocks->free[i]])
            blocks->free[kept++] = blocks->free[i];
    blocks->free_count = kept;
}

void cox_blocks_give(struct cox_blocks *blocks, const int32_t *ids, uint32_t count)
{
    /* Backwards, so that a later take gets the same ids in the same order. */
    for (uint32_t i = count; i-- > 0;) {
        COX_ASSERT(ids[i] >= 0 && (uint32_t)ids[i] < blocks->count && blocks->taken[ids[i]]);
        blocks->taken[ids[i]] = false;
        blocks->free[blocks->free_count++] = ids[i];
    }
}
