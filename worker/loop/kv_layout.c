#include "kv_layout.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* X(field): all of struct cox_kv_layout, which the message has under the same names. */
#define FIELDS(X)                                                                                  \
    X(rank)                                                                                        \
    X(rank_count)                                                                                  \
    X(layer_count)                                                                                 \
    X(kv_head_first)                                                                               \
    X(kv_head_count)                                                                               \
    X(head_dim)                                                                                    \
    X(block_size)                                                                                  \
    X(block_bytes)                                                                                 \
    X(element_bytes)                                                                               \
    X(model_digest)

Coxswain__KvPool *cox_kv_pool_fill(struct cox_kv_pool_message *message,
                                   const struct cox_kv_pool *pool)
{
    coxswain__kv_pool__init(&message->pool);
    coxswain__kv_layout__init(&message->layout);
#define PUT(field)                                                                                 \
    message->layout.has_##field = 1;                                                               \
    message->layout.field = pool->layout.field;
    FIELDS(PUT)
#undef PUT
    message->pool.has_blocks = message->pool.has_block_count = 1;
    message->pool.blocks =
        (ProtobufCBinaryData){sizeof pool->handle, (uint8_t *)(uintptr_t)pool->handle};
    message->pool.block_count = pool->block_count;
    message->pool.layout = &message->layout;
    return &message->pool;
}

int cox_kv_pool_read(const Coxswain__KvPool *message, struct cox_kv_pool *ret_pool,
                     struct cox_error *err)
{
    struct cox_kv_pool pool = {.block_count = message->block_count};
    if (message->blocks.len != sizeof pool.handle)
        return cox_fail(err, COX_CORRUPT, "the handle of KV blocks has %zu bytes: expected %zu",
                        message->blocks.len, sizeof pool.handle);
    if (pool.block_count == 0 || !message->layout)
        return cox_fail(err, COX_CORRUPT, "KV blocks of no number or without a layout");
    memcpy(pool.handle, message->blocks.data, sizeof pool.handle);
#define GET(field) pool.layout.field = message->layout->field;
    FIELDS(GET)
#undef GET
    *ret_pool = pool;
    return 0;
}

int cox_kv_layout_check(const struct cox_kv_layout *theirs, const struct cox_kv_layout *ours,
                        struct cox_error *err)
{
    char text[700];
    size_t used = 0;
    text[0] = '\0';
#define COMPARE(field)                                                                             \
    if (theirs->field != ours->field && used < sizeof text)                                        \
        used += (size_t)snprintf(                                                                  \
            text + used, sizeof text - used, "%s" #field " %" PRIu64 " there, %" PRIu64 " here",   \
            used ? "; " : "", (uint64_t)theirs->field, (uint64_t)ours->field);
    FIELDS(COMPARE)
#undef COMPARE
    return used ? cox_fail(err, COX_INVALID, "its KV blocks are laid out in another way: %s", text)
                : 0;
}
