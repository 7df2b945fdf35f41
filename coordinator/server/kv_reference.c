#include "kv_reference.h"

#include "channel/base/idioms.h"
#include "channel/shm/geometry.h"
#include "proto/control.pb-c.h"
#include "server_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* The limit for one sequence; no cache has as many. */
#define BLOCK_COUNT_MAX (UINT32_C(1) << 24)

const char *cox_pull_state_name(enum cox_pull_state state)
{
    static const char *const names[COX_PULL_STATE_COUNT] = {
        "queued", "sent", "success", "failed", "timeout", "peer dead", "cancelled",
    };
    return (size_t)state < COX_PULL_STATE_COUNT ? names[state] : "unknown";
}

struct cox_kv_reference *cox_kv_reference_dup(const struct cox_kv_reference *reference)
{
    size_t blocks_size = reference->block_count * sizeof *reference->blocks;
    size_t name_size = strlen(reference->cluster_id) + 1;
    struct cox_kv_reference *copy = malloc(sizeof *copy + blocks_size + name_size);
    if (!copy)
        return NULL;
    *copy = *reference;
    int32_t *blocks = (int32_t *)(copy + 1);
    if (blocks_size)
        memcpy(blocks, reference->blocks, blocks_size);
    copy->blocks = blocks;
    copy->cluster_id =
        memcpy((char *)(blocks + reference->block_count), reference->cluster_id, name_size);
    return copy;
}

int cox_kv_reference_read(const struct CoxswainControl__KvReference *message,
                          struct cox_kv_reference *ret_reference, struct cox_error *err)
{
    if (!message->cluster_id || !message->has_epoch || !message->has_sequence ||
        !message->has_lease_ns || message->n_blocks == 0)
        return cox_fail(err, COX_INVALID,
                        "a source needs a group, its epoch, a sequence, a lease and blocks");
    /* The name appears in logs. */
    if (cox_name_check(message->cluster_id, NULL))
        return cox_fail(err, COX_INVALID, "a source's group has a name of %zu bytes that is none",
                        strlen(message->cluster_id));
    if (message->sequence < 1 || message->n_blocks > BLOCK_COUNT_MAX)
        return cox_fail(err, COX_INVALID,
                        "a source of sequence %" PRId64 " with %zu blocks: there is none",
                        message->sequence, message->n_blocks);
    for (size_t i = 0; i < message->n_blocks; i++)
        if (message->blocks[i] < 0)
            return cox_fail(err, COX_INVALID, "block %" PRId32 " of a source does not exist",
                            message->blocks[i]);
    *ret_reference = (struct cox_kv_reference){
        .cluster_id = message->cluster_id,
        .epoch = message->epoch,
        .sequence = message->sequence,
        .lease_ns = message->lease_ns,
        .blocks = message->blocks,
        .block_count = (uint32_t)message->n_blocks,
    };
    return 0;
}

void cox_kv_reference_write(const struct cox_kv_reference *reference,
                            struct CoxswainControl__KvReference *message)
{
    coxswain_control__kv_reference__init(message);
    message->cluster_id = (char *)(uintptr_t)reference->cluster_id;
    COX_SET(message, epoch, reference->epoch);
    COX_SET(message, sequence, reference->sequence);
    COX_SET(message, lease_ns, reference->lease_ns);
    message->blocks = (int32_t *)(uintptr_t)reference->blocks;
    message->n_blocks = reference->block_count;
}
