#include "channel/base/fault.h"
#include "channel/base/options.h"
#include "memory/pool/pool_internal.h"
#include "queue_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <unistd.h>

/* ---- create and free ---- */

static int slot_find(struct cox_queue *queue, uint32_t *ret_slot)
{
    for (uint32_t i = 0; i < queue->geometry.publisher_count_max; i++)
        if (COX_QUEUE_LOAD(cox_queue_publisher_at(queue, i)->publisher_process) == 0) {
            *ret_slot = i;
            return 0;
        }
    return COX_FULL;
}

/* Under the lock. */
static int publisher_enter(struct cox_publisher *publisher, bool read_only, struct cox_error *err)
{
    struct cox_queue *queue = publisher->queue;
    struct cox_queue_layout_state *state = &queue->layout->state;
    struct cox_queue_entry entry;
    int r = slot_find(queue, &publisher->slot);
    if (r)
        return cox_fail(err, r, "queue: it has %" PRIu32 " publishers, which is its limit",
                        queue->geometry.publisher_count_max);
    r = cox_queue_entry_add(queue, cox_pool_id(publisher->pool), cox_pool_domain(publisher->pool),
                            publisher->exported ? &publisher->handle : NULL, read_only,
                            &publisher->pool_index, err);
    if (r)
        return r;
    if (!cox_queue_entry_read(queue, publisher->pool_index, &entry))
        return cox_fail(err, COX_CORRUPT, "queue: the entry of a pool is corrupt");
    publisher->domain = entry.domain;
    struct cox_queue_layout_publisher *line = cox_queue_publisher_at(queue, publisher->slot);
    atomic_store_explicit(&line->publisher_pool, publisher->pool_index, memory_order_relaxed);
    atomic_store_explicit(&line->publisher_count, 0, memory_order_relaxed);
    if (COX_QUEUE_LOAD(state->publisher_end) <= publisher->slot)
        atomic_store_explicit(&state->publisher_end, publisher->slot + 1, memory_order_relaxed);
    atomic_store_explicit(&line->publisher_process, queue->identity, memory_order_release);
    cox_fault_point(COX_FAULT_QUEUE_PUBLISHER_JOINED);
    return 0;
}

static int publisher_join(struct cox_publisher *publisher, bool read_only, struct cox_error *err)
{
    struct cox_queue *queue = publisher->queue;
    /* Retries once after reaping dead endpoints. */
    for (int round = 0;; round++) {
        int r = cox_queue_enter(queue, err);
        if (r)
            return r;
        r = publisher_enter(publisher, read_only, round == 0 ? NULL : err);
        cox_queue_leave(queue);
        if (r != COX_FULL || round > 0)
            return r && round == 0 ? cox_fail(err, r, "queue: %s", cox_status_text(r)) : r;
        cox_queue_reap_dead(queue, true);
    }
}

int cox_publisher_new(struct cox_queue *queue, const struct cox_publisher_options *options,
                      struct cox_publisher **ret_publisher, struct cox_error *err)
{
    struct cox_publisher_options known;
    int r = cox_options_copy(&known, sizeof known, options, "cox_publisher_options", err);
    if (r)
        return r;
    options = &known;
    struct cox_publisher *publisher = calloc(1, sizeof *publisher);
    if (!publisher)
        return cox_fail(err, -ENOMEM, "publisher: %s", cox_status_text(-ENOMEM));
    publisher->queue = queue;
    publisher->pool = options->pool;
    publisher->exporter = options->exporter;
    r = cox_queue_pool_cache_init(&publisher->pool_cache, queue, options->domains,
                                  options->socket_path, err);
    if (r == 0)
        r = cox_queue_pool_cache_add(&publisher->pool_cache, options->pool, err);
    if (r == 0 && options->exporter) {
        r = cox_pool_export(options->pool, options->exporter, options->read_only,
                            &publisher->handle, err);
        publisher->exported = r == 0;
    }
    if (r == 0)
        r = publisher_join(publisher, options->read_only, err);
    if (r) {
        if (publisher->exported)
            cox_pool_unexport(publisher->exporter, &publisher->handle);
        cox_queue_pool_cache_deinit(&publisher->pool_cache);
        free(publisher);
        return r;
    }
    /* relaxed: a count; the caller synchronizes its threads before it frees the queue. */
    atomic_fetch_add_explicit(&queue->endpoint_count, 1, memory_order_relaxed);
    *ret_publisher = publisher;
    return 0;
}

static void publisher_leave(struct cox_publisher *publisher)
{
    struct cox_queue *queue = publisher->queue;
    if (cox_queue_enter(queue, NULL))
        return; /* the slot stays until this process ends */
    if (publisher->exported)
        cox_queue_entry_close(queue, publisher->pool_index);
    struct cox_queue_layout_publisher *line = cox_queue_publisher_at(queue, publisher->slot);
    atomic_store_explicit(&line->publisher_process, 0, memory_order_relaxed);
    cox_fault_point(COX_FAULT_QUEUE_PUBLISHER_LEFT);
    cox_queue_drain(queue);
    cox_queue_leave(queue);
}

struct cox_publisher *cox_publisher_free(struct cox_publisher *publisher)
{
    if (!publisher)
        return NULL;
    struct cox_queue *queue = publisher->queue;
    if (queue->pid == getpid()) {
        /* Blocks that dead subscribers keep would stay pinned if this were the last process with
         * their pool. */
        cox_queue_reap_dead(queue, false);
        publisher_leave(publisher);
    }
    if (publisher->exported)
        cox_pool_unexport(publisher->exporter, &publisher->handle);
    cox_queue_pool_cache_deinit(&publisher->pool_cache);
    atomic_fetch_sub_explicit(&queue->endpoint_count, 1, memory_order_release);
    free(publisher);
    return NULL;
}

/* ---- publish ---- */

/* Finds a pool that has a copy of the message to be evicted, and that can be opened. */
static bool evicted_unknown(struct cox_publisher *publisher, uint64_t number, uint32_t *ret_index,
                            struct cox_queue_entry *ret_entry)
{
    struct cox_queue_message message;
    cox_queue_row_read(publisher->queue, number, &message);
    for (uint32_t d = 0; message.number && d < publisher->queue->geometry.domain_count_max; d++) {
        const uint32_t index = message.copies[d].pool;
        if (!(message.mask >> d & 1) || !cox_queue_entry_read(publisher->queue, index, ret_entry) ||
            cox_queue_pool_cache_find(&publisher->pool_cache, ret_entry->id) ||
            cox_queue_pool_cache_failed(&publisher->pool_cache, index, ret_entry))
            continue;
        *ret_index = index;
        return true;
    }
    return false;
}

/* Takes the lock once the pools of all messages to be evicted are open, as far as possible. */
static int enter_prepared(struct cox_publisher *publisher, uint32_t count, struct cox_error *err)
{
    struct cox_queue *queue = publisher->queue;
    /* Each round opens one pool, which is not tried again. */
    for (uint32_t round = 0;; round++) {
        struct cox_queue_entry entry;
        uint32_t index;
        int r = cox_queue_enter(queue, err);
        if (r)
            return r;
        cox_queue_drain(queue);
        const uint64_t head = COX_QUEUE_LOAD(queue->layout->state.queue_head);
        bool unknown = false;
        for (uint32_t i = 1; !unknown && i <= count; i++)
            unknown = evicted_unknown(publisher, head + i, &index, &entry);
        if (!unknown || round > queue->geometry.pool_count_max)
            return 0;
        cox_queue_leave(queue);
        cox_queue_pool_cache_open(&publisher->pool_cache, index, &entry, NULL);
    }
}

/* Wakes waiting subscribers. Returns how many get message `number`. */
static uint32_t announce(struct cox_queue *queue, uint64_t number)
{
    struct cox_queue_layout_state *state = &queue->layout->state;
    uint32_t interest = 0, end = cox_queue_bound(COX_QUEUE_LOAD(state->subscriber_end),
                                                 queue->geometry.subscriber_count_max);
    /* seq_cst: a subscriber that is about to block either sees this and takes the lock, or is seen
     * as sleeping. So none misses a message whose publisher dies right after it stored the head. */
    atomic_store(&state->queue_publishing, number);
    cox_fault_point(COX_FAULT_QUEUE_ANNOUNCED);
    for (uint32_t i = 0; i < end; i++) {
        struct cox_queue_layout_subscriber *subscriber = cox_queue_subscriber_at(queue, i);
        if (COX_QUEUE_LOAD(subscriber->subscriber_process) == 0)
            continue;
        if (COX_QUEUE_LOAD(subscriber->subscriber_next) <= number)
            interest++;
        cox_queue_wake_subscriber(subscriber);
    }
    return interest;
}

static void row_fill(struct cox_publisher *publisher, struct cox_queue_layout_row *row,
                     const struct cox_queue_message *message)
{
    const struct cox_queue_copy none = {0};
    for (uint32_t d = 0; d < publisher->queue->geometry.domain_count_max; d++)
        cox_queue_copy_fill(&row->copies[d], d == publisher->domain ? &message->copies[d] : &none);
    atomic_store_explicit(&row->row_user_data, message->user_data, memory_order_relaxed);
    atomic_store_explicit(&row->row_length, message->length, memory_order_relaxed);
    atomic_store_explicit(&row->row_interest, message->interest, memory_order_relaxed);
    atomic_store_explicit(&row->row_mask, UINT32_C(1) << publisher->domain, memory_order_relaxed);
    atomic_store_explicit(&row->row_number, message->number, memory_order_relaxed);
    cox_fault_point(COX_FAULT_QUEUE_ROW_FILLED);
}

/* Under the lock. If the process dies here, the message is published only if its number is the
 * head. */
static int publish(struct cox_publisher *publisher, const struct cox_block_ref *ref,
                   struct cox_queue_message *message, struct cox_error *err)
{
    struct cox_queue *queue = publisher->queue;
    struct cox_queue_layout_state *state = &queue->layout->state;
    struct cox_queue_layout_publisher *line = cox_queue_publisher_at(queue, publisher->slot);
    message->number = COX_QUEUE_LOAD(state->queue_head) + 1;
    struct cox_queue_layout_row *row = cox_queue_row_at(queue, message->number);
    int r = cox_queue_pin(queue, publisher->pool, publisher->pool_index, ref, message->number,
                          publisher->domain, &message->copies[publisher->domain], err);
    if (r)
        return r;
    cox_queue_row_end(queue, row);
    message->interest = announce(queue, message->number);
    row_fill(publisher, row, message);
    cox_queue_intent_clear(queue);
    /* seq_cst, both: partner is the check of a subscriber that is about to block. */
    atomic_store(&state->queue_head, message->number);
    cox_fault_point(COX_FAULT_QUEUE_PUBLISHED);
    atomic_store(&state->queue_publishing, 0);
    atomic_fetch_add_explicit(&line->publisher_count, 1, memory_order_relaxed);
    cox_fault_point(COX_FAULT_QUEUE_PUBLISH_DONE);
    if (message->interest == 0)
        cox_queue_row_end(queue, row);
    return 0;
}

static int publication_check(const struct cox_publisher *publisher,
                             const struct cox_publication *publication, struct cox_error *err)
{
    if (publication->length > publication->ref.size)
        return cox_fail(err, COX_INVALID, "message of %" PRIu64 " bytes in a block of %" PRIu64,
                        publication->length, publication->ref.size);
    if (publication->ref.pool != cox_pool_id(publisher->pool))
        return cox_fail(err, COX_NOT_FOUND,
                        "block of pool %016" PRIx64 "; this publisher's is %016" PRIx64,
                        publication->ref.pool, cox_pool_id(publisher->pool));
    return 0;
}

/* Reaps dead subscribers, once per slice. */
static void reap_periodically(struct cox_queue *queue)
{
    const uint64_t now = cox_now_ns();
    /* relaxed: as above. */
    if (now - atomic_load_explicit(&queue->reaped_ns, memory_order_relaxed) <= COX_QUEUE_SLICE_NS)
        return;
    atomic_store_explicit(&queue->reaped_ns, now, memory_order_relaxed);
    cox_queue_reap_dead(queue, false);
}

int cox_publisher_publish_batch(struct cox_publisher *publisher,
                                struct cox_publication *publications, uint32_t count,
                                uint32_t *ret_count, struct cox_error *err)
{
    struct cox_queue *queue = publisher->queue;
    *ret_count = 0;
    if (count > queue->geometry.depth)
        return cox_fail(err, COX_INVALID,
                        "%" PRIu32 " messages at once in a queue of depth %" PRIu32, count,
                        queue->geometry.depth);
    int r = 0;
    for (uint32_t i = 0; r == 0 && i < count; i++)
        r = publication_check(publisher, &publications[i], err);
    if (r || count == 0)
        return r;
    reap_periodically(queue);
    r = enter_prepared(publisher, count, err);
    if (r)
        return r;
    for (uint32_t i = 0; r == 0 && i < count; i++) {
        struct cox_queue_message message = {.length = publications[i].length,
                                            .user_data = publications[i].user_data};
        r = publish(publisher, &publications[i].ref, &message, err);
        if (r == 0) {
            publications[i].number = message.number;
            *ret_count = i + 1;
        }
    }
    cox_queue_leave(queue);
    return r;
}

int cox_publisher_publish(struct cox_publisher *publisher, const struct cox_block_ref *ref,
                          uint64_t length, uint64_t user_data, uint64_t *ret_number,
                          struct cox_error *err)
{
    struct cox_publication publication = {.ref = *ref, .length = length, .user_data = user_data};
    uint32_t count;
    int r = cox_publisher_publish_batch(publisher, &publication, 1, &count, err);
    if (r == 0)
        *ret_number = publication.number;
    return r;
}
