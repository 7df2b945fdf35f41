#include "rank_weights.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "../channel/fault.h"

/* A reference that this process has; version 0: none. */
struct held {
    uint64_t version;
    struct cox_block_ref ref;
    struct cox_pool *pool; /* lent: the pool below, or the subscriber's */
    uint64_t length;
};

struct cox_rank_weights {
    struct cox_pool *pool; /* that the init named */
    struct cox_queue *queue;
    struct cox_subscriber *subscriber;
    struct held present, next;
};

static void held_drop(struct held *held)
{
    if (held->version)
        cox_pool_unref(held->pool, &held->ref, NULL);
    *held = (struct held){0};
}

static int weights_open(struct cox_rank_weights *weights, const struct cox_weights_offer *offer,
                        uint64_t deadline_ns, struct cox_error *err)
{
    const char *door = offer->door[0] ? offer->door : NULL;
    const struct cox_pool_attach_options attach = {.read_only = true};
    struct cox_error why = {0};
    int r = cox_queue_open(&offer->queue, door, deadline_ns, NULL, &weights->queue, &why);

    if (r)
        return cox_fail(err, r,
                        "the queue of the model's weights: %s (with --no-shared-weights every rank "
                        "loads its own)",
                        why.text);
    r = cox_pool_open(&offer->pool, door, deadline_ns, &attach, &weights->pool, &why);
    if (r)
        return cox_fail(err, r, "the memory of the model's weights: %s", why.text);
    /* Before the reference: what is published after the offer was made comes by the queue. */
    const struct cox_subscriber_options options = {
        .pools = &weights->pool, .pool_count = 1, .door_path = door};
    r = cox_subscriber_new(weights->queue, &options, &weights->subscriber, &why);
    if (r)
        return cox_fail(err, r, "the queue of the model's weights: %s", why.text);
    return cox_rank_weights_offer(weights, offer, err);
}

int cox_rank_weights_open(const struct cox_weights_offer *offer, uint64_t deadline_ns,
                          struct cox_rank_weights **ret_weights, struct cox_error *err)
{
    struct cox_rank_weights *weights = calloc(1, sizeof *weights);
    int r;

    if (!weights)
        return cox_fail(err, -ENOMEM, "no memory for the model's weights");
    r = weights_open(weights, offer, deadline_ns, err);
    if (r)
        weights = cox_rank_weights_free(weights);
    else
        *ret_weights = weights;
    return r;
}

struct cox_rank_weights *cox_rank_weights_free(struct cox_rank_weights *weights)
{
    if (!weights)
        return NULL;
    held_drop(&weights->next);
    held_drop(&weights->present);
    cox_subscriber_free(weights->subscriber);
    cox_queue_free(weights->queue);
    cox_pool_free(weights->pool);
    free(weights);
    return NULL;
}

int cox_rank_weights_offer(struct cox_rank_weights *weights, const struct cox_weights_offer *offer,
                           struct cox_error *err)
{
    struct cox_error why = {0};
    int r;

    if (offer->version == weights->present.version || offer->version == weights->next.version)
        return 0;
    r = cox_pool_ref(weights->pool, &offer->ref, &why);
    if (r)
        return cox_fail(err, r, "version %" PRIu64 " of the model's weights: %s", offer->version,
                        why.text);
    held_drop(&weights->next);
    weights->next = (struct held){.version = offer->version,
                                  .ref = offer->ref,
                                  .pool = weights->pool,
                                  .length = offer->ref.size};
    cox_fault_point(COX_FAULT_WEIGHTS_TAKEN);
    return 0;
}

uint64_t cox_rank_weights_version(const struct cox_rank_weights *weights)
{
    return weights->present.version;
}

/* Goes through the queue up to the message of this version. */
static int weights_seek(struct cox_rank_weights *weights, uint64_t version, struct cox_error *err)
{
    struct cox_message message;
    struct cox_error why = {0};
    int r;

    while ((r = cox_subscriber_take(weights->subscriber, &message, &why)) == 0) {
        struct held taken = {message.note, message.ref, message.pool, message.length};
        if (taken.version == version) {
            held_drop(&weights->next);
            weights->next = taken;
            cox_fault_point(COX_FAULT_WEIGHTS_TAKEN);
            return 0;
        }
        cox_pool_unref(taken.pool, &taken.ref, NULL);
        if (taken.version > version)
            break;
    }
    if (r && r != COX_EMPTY)
        return cox_fail(err, r, "version %" PRIu64 " of the model's weights: %s", version,
                        why.text);
    return cox_fail(err, COX_NOT_FOUND,
                    "version %" PRIu64 " of the model's weights is not in their queue, %s", version,
                    r ? "which is empty" : "where a later one follows");
}

static int held_lend(const struct held *held, const void **ret_bytes, uint64_t *ret_length,
                     struct cox_error *err)
{
    const void *bytes = cox_pool_pointer(held->pool, &held->ref);

    if (!bytes)
        return cox_fail(err, COX_UNSUPPORTED,
                        "the model's weights lie in memory without addresses");
    *ret_bytes = bytes;
    *ret_length = held->length;
    return 0;
}

int cox_rank_weights_take(struct cox_rank_weights *weights, uint64_t version,
                          const void **ret_bytes, uint64_t *ret_length, struct cox_error *err)
{
    int r;

    if (version < weights->present.version)
        return cox_fail(err, COX_STALE,
                        "version %" PRIu64
                        " of the model's weights was asked for after version %" PRIu64,
                        version, weights->present.version);
    if (version == weights->present.version)
        return held_lend(&weights->present, ret_bytes, ret_length, err);
    r = version == weights->next.version ? 0 : weights_seek(weights, version, err);
    return r ? r : held_lend(&weights->next, ret_bytes, ret_length, err);
}

bool cox_rank_weights_same(const struct cox_rank_weights *weights)
{
    return weights->present.version && weights->next.version &&
           memcmp(&weights->present.ref, &weights->next.ref, sizeof weights->next.ref) == 0;
}

void cox_rank_weights_keep(struct cox_rank_weights *weights)
{
    if (!weights->next.version)
        return;
    held_drop(&weights->present);
    weights->present = weights->next;
    weights->next = (struct held){0};
    cox_fault_point(COX_FAULT_WEIGHTS_SWITCHED);
}
