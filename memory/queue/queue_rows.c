/* Messages, under the lock: their copies, their subscribers, and the repair of what a dead owner of
 * the lock left half done. */
#include "channel/base/fault.h"
#include "channel/base/futex.h"
#include "memory/pool/pool_internal.h"
#include "queue_internal.h"

#include <string.h>

/* A pin's tag: message and domain. Numbers wrap at 43 bits; by then the old message is long
 * over. */
#define TAG_DOMAIN_BITS 5
#define TAG_NUMBER_MAX ((UINT64_C(1) << (48 - TAG_DOMAIN_BITS)) - 1)
static_assert(COX_DOMAIN_COUNT_MAX <= 1 << TAG_DOMAIN_BITS, "tags");

static uint64_t tag_of(uint64_t number, uint32_t domain)
{
    return (number % TAG_NUMBER_MAX + 1) << TAG_DOMAIN_BITS | domain;
}

static void subscriber_wake(struct cox_queue_layout_subscriber *subscriber)
{
    /* relaxed: it only has to differ from the value that was seen. */
    atomic_fetch_add_explicit(&subscriber->subscriber_wake, 1, memory_order_relaxed);
    cox_futex_wake(&subscriber->subscriber_wake);
    cox_fault_point(COX_FAULT_QUEUE_WOKEN);
}

void cox_queue_wake_subscriber(struct cox_queue_layout_subscriber *subscriber)
{
    /* seq_cst: either this thread sees that the subscriber is about to block, or the subscriber
     * sees what was stored before this call (queue_set.c). */
    if (!atomic_load(&subscriber->subscriber_sleeping) ||
        !atomic_exchange(&subscriber->subscriber_sleeping, 0))
        return;
    cox_fault_point(COX_FAULT_QUEUE_WAKING);
    subscriber_wake(subscriber);
}

/* A process that died while waking may have cleared `sleeping` without the futex wake, which no
 * other process would repeat. */
static void repair_sleepers(struct cox_queue *queue)
{
    for (uint32_t i = 0; i < queue->geometry.subscriber_count_max; i++) {
        struct cox_queue_layout_subscriber *subscriber = cox_queue_subscriber_at(queue, i);
        if (COX_QUEUE_LOAD(subscriber->subscriber_process))
            subscriber_wake(subscriber);
    }
}

/* ---- pending frees: copies whose pool this process does not have ---- */

/* Wakes subscribers that use the pool. */
static void pending_free_wake(struct cox_queue *queue, uint32_t pool)
{
    uint32_t end = cox_queue_bound(COX_QUEUE_LOAD(queue->layout->state.subscriber_end),
                                   queue->geometry.subscriber_count_max);
    for (uint32_t i = 0; i < end; i++) {
        struct cox_queue_layout_subscriber *subscriber = cox_queue_subscriber_at(queue, i);
        if (COX_QUEUE_LOAD(subscriber->subscriber_process) &&
            COX_QUEUE_LOAD(subscriber->subscriber_pool) == pool)
            cox_queue_wake_subscriber(subscriber);
    }
}

static void pending_free_add(struct cox_queue *queue, const struct cox_queue_copy *copy,
                             uint64_t stamp, uint64_t tag)
{
    struct cox_queue_layout_state *state = &queue->layout->state;
    const uint32_t count_max = queue->geometry.pending_free_count_max;
    uint32_t slot = 0;
    while (slot < count_max &&
           COX_QUEUE_LOAD(cox_queue_pending_free_at(queue, slot)->pending_free_tag))
        slot++;
    if (slot == count_max) {
        /* The block stays pinned until the last process that has the pool leaves the queue. */
        atomic_fetch_add_explicit(&state->pending_free_lost, 1, memory_order_relaxed);
        cox_fault_point(COX_FAULT_QUEUE_FREE_PENDING);
        return;
    }
    struct cox_queue_layout_pending_free *pending_free = cox_queue_pending_free_at(queue, slot);
    atomic_store_explicit(&pending_free->pending_free_stamp, stamp, memory_order_relaxed);
    atomic_store_explicit(&pending_free->pending_free_pool, copy->pool, memory_order_relaxed);
    atomic_store_explicit(&pending_free->pending_free_block, copy->block, memory_order_relaxed);
    atomic_store_explicit(&pending_free->pending_free_epoch, copy->epoch, memory_order_relaxed);
    atomic_store_explicit(&pending_free->pending_free_size, copy->size, memory_order_relaxed);
    if (COX_QUEUE_LOAD(state->pending_free_end) <= slot)
        atomic_store_explicit(&state->pending_free_end, slot + 1, memory_order_relaxed);
    atomic_store_explicit(&pending_free->pending_free_tag, tag, memory_order_release);
    /* seq_cst: a subscriber that is about to block either sees this, or is seen as sleeping below
     * (queue_set.c). */
    atomic_fetch_add(&state->pending_free_turn, 1);
    cox_fault_point(COX_FAULT_QUEUE_FREE_PENDING);
    pending_free_wake(queue, copy->pool);
}

/* Unpins the copy. True: the entry is done. */
static bool pending_free_run(struct cox_queue *queue,
                             struct cox_queue_layout_pending_free *pending_free, uint64_t tag)
{
    struct cox_queue_entry entry;
    if (!cox_queue_entry_read(queue, COX_QUEUE_LOAD(pending_free->pending_free_pool), &entry) ||
        entry.stamp != COX_QUEUE_LOAD(pending_free->pending_free_stamp))
        return true;
    const struct cox_block_ref ref = {
        .pool = entry.id,
        .epoch = COX_QUEUE_LOAD(pending_free->pending_free_epoch),
        .size = COX_QUEUE_LOAD(pending_free->pending_free_size),
        .block = COX_QUEUE_LOAD(pending_free->pending_free_block),
    };
    return cox_queue_pools_unpin(queue, &ref, tag);
}

void cox_queue_drain(struct cox_queue *queue)
{
    struct cox_queue_layout_state *state = &queue->layout->state;
    uint32_t end = cox_queue_bound(COX_QUEUE_LOAD(state->pending_free_end),
                                   queue->geometry.pending_free_count_max);
    if (end == 0)
        return;
    const uint64_t turn = COX_QUEUE_LOAD(state->pending_free_turn);
    const uint32_t pool_turn = cox_queue_pools_turn(queue);
    if (turn == queue->drained && pool_turn == queue->drained_at)
        return;
    for (uint32_t i = 0; i < end; i++) {
        struct cox_queue_layout_pending_free *pending_free = cox_queue_pending_free_at(queue, i);
        uint64_t tag = COX_QUEUE_LOAD(pending_free->pending_free_tag);
        if (tag && pending_free_run(queue, pending_free, tag))
            atomic_store_explicit(&pending_free->pending_free_tag, 0, memory_order_relaxed);
    }
    while (end > 0 &&
           COX_QUEUE_LOAD(cox_queue_pending_free_at(queue, end - 1)->pending_free_tag) == 0)
        end--;
    atomic_store_explicit(&state->pending_free_end, end, memory_order_relaxed);
    queue->drained = turn;
    queue->drained_at = pool_turn;
    cox_fault_point(COX_FAULT_QUEUE_DRAINED);
}

/* ---- copies ---- */

static void copy_unpin(struct cox_queue *queue, const struct cox_queue_copy *copy, uint64_t number,
                       uint32_t domain)
{
    const uint64_t tag = tag_of(number, domain);
    struct cox_queue_entry entry;
    if (!cox_queue_entry_read(queue, copy->pool, &entry))
        return; /* corrupt: the block is unknown */
    const struct cox_block_ref ref = {
        .pool = entry.id, .epoch = copy->epoch, .size = copy->size, .block = copy->block};
    if (!cox_queue_pools_unpin(queue, &ref, tag))
        pending_free_add(queue, copy, entry.stamp, tag);
}

void cox_queue_copy_fill(struct cox_queue_layout_copy *copy, const struct cox_queue_copy *from)
{
    atomic_store_explicit(&copy->copy_copier, from->copier, memory_order_relaxed);
    atomic_store_explicit(&copy->copy_epoch, from->epoch, memory_order_relaxed);
    atomic_store_explicit(&copy->copy_size, from->size, memory_order_relaxed);
    atomic_store_explicit(&copy->copy_pool, from->pool, memory_order_relaxed);
    atomic_store_explicit(&copy->copy_block, from->block, memory_order_relaxed);
    cox_fault_point(COX_FAULT_QUEUE_COPY_FILLED);
}

int cox_queue_pin(struct cox_queue *queue, struct cox_pool *pool, uint32_t pool_index,
                  const struct cox_block_ref *ref, uint64_t number, uint32_t domain,
                  struct cox_queue_copy *ret_copy, struct cox_error *err)
{
    struct cox_queue_layout_intent *intent = &queue->layout->intent;
    atomic_store_explicit(&intent->intent_pool, pool_index, memory_order_relaxed);
    atomic_store_explicit(&intent->intent_block, ref->block, memory_order_relaxed);
    atomic_store_explicit(&intent->intent_domain, domain, memory_order_relaxed);
    atomic_store_explicit(&intent->intent_epoch, ref->epoch, memory_order_relaxed);
    atomic_store_explicit(&intent->intent_size, ref->size, memory_order_relaxed);
    atomic_store_explicit(&intent->intent_number, number, memory_order_relaxed);
    /* release: partner is the lock; its next owner sees a step together with its data. */
    atomic_store_explicit(&intent->intent_step, COX_QUEUE_INTENT_PIN, memory_order_release);
    cox_fault_point(COX_FAULT_QUEUE_INTENDED);
    int r = cox_pool_pin(pool, ref, queue->id, tag_of(number, domain), err);
    cox_fault_point(COX_FAULT_QUEUE_PINNED);
    if (r) {
        cox_queue_intent_clear(queue);
        return r;
    }
    *ret_copy = (struct cox_queue_copy){
        .epoch = ref->epoch, .size = ref->size, .pool = pool_index, .block = ref->block};
    return 0;
}

void cox_queue_intent_clear(struct cox_queue *queue)
{
    atomic_store_explicit(&queue->layout->intent.intent_step, COX_QUEUE_INTENT_NONE,
                          memory_order_release);
    cox_fault_point(COX_FAULT_QUEUE_INTENT_CLEARED);
}

/* ---- rows ---- */

void cox_queue_row_end(struct cox_queue *queue, struct cox_queue_layout_row *row)
{
    const uint64_t number = COX_QUEUE_LOAD(row->row_number) & ~COX_QUEUE_ROW_ENDING;
    uint32_t mask = COX_QUEUE_LOAD(row->row_mask) & cox_queue_domain_mask(queue);
    if (number) {
        atomic_store_explicit(&row->row_number, number | COX_QUEUE_ROW_ENDING,
                              memory_order_relaxed);
        cox_fault_point(COX_FAULT_QUEUE_ROW_ENDING);
    }
    for (uint32_t d = 0; number && mask; d++) {
        if (!(mask >> d & 1))
            continue;
        struct cox_queue_copy copy;
        cox_queue_copy_read(&row->copies[d], &copy);
        copy_unpin(queue, &copy, number, d);
        cox_fault_point(COX_FAULT_QUEUE_COPY_UNPINNED);
        mask &= ~(UINT32_C(1) << d);
        atomic_store_explicit(&row->row_mask, mask, memory_order_relaxed);
    }
    atomic_store_explicit(&row->row_mask, 0, memory_order_relaxed);
    atomic_store_explicit(&row->row_number, 0, memory_order_relaxed);
    cox_fault_point(COX_FAULT_QUEUE_ROW_ENDED);
}

void cox_queue_recount(struct cox_queue *queue)
{
    struct cox_queue_layout_state *state = &queue->layout->state;
    const uint32_t depth = queue->geometry.depth;
    const uint64_t head = COX_QUEUE_LOAD(state->queue_head);
    const uint64_t first = head >= depth ? head - depth + 1 : 1; /* the oldest that can exist */
    uint32_t end = cox_queue_bound(COX_QUEUE_LOAD(state->subscriber_end),
                                   queue->geometry.subscriber_count_max);
    /* counts[i]: subscribers whose next message is first + i; the last: those that have taken
     * all. */
    memset(queue->counts, 0, (depth + 1) * sizeof *queue->counts);
    for (uint32_t i = 0; i < end; i++) {
        struct cox_queue_layout_subscriber *subscriber = cox_queue_subscriber_at(queue, i);
        if (COX_QUEUE_LOAD(subscriber->subscriber_process) == 0)
            continue;
        uint64_t next = COX_QUEUE_LOAD(subscriber->subscriber_next);
        uint64_t behind = next <= first ? 0 : next - first;
        queue->counts[behind < depth ? behind : depth]++;
    }
    uint32_t interest = 0;
    for (uint32_t i = 0; i < depth; i++) {
        struct cox_queue_layout_row *row = cox_queue_row_at(queue, first + i);
        interest += queue->counts[i];
        if (COX_QUEUE_LOAD(row->row_number) == 0)
            continue;
        atomic_store_explicit(&row->row_interest, interest, memory_order_relaxed);
        cox_fault_point(COX_FAULT_QUEUE_COUNTED);
        /* Also ends rows outside the last depth messages: never published, or half ended. */
        if (interest == 0 || COX_QUEUE_LOAD(row->row_number) != first + i || first + i > head)
            cox_queue_row_end(queue, row);
    }
}

/* ---- repair after a death ---- */

/* A block was about to be pinned. If a valid row refers to it, that was done; otherwise unpins
 * it. */
static void repair_intent(struct cox_queue *queue)
{
    struct cox_queue_layout_intent *intent = &queue->layout->intent;
    /* acquire: partner is the release store of cox_queue_pin. */
    if (atomic_load_explicit(&intent->intent_step, memory_order_acquire) == COX_QUEUE_INTENT_NONE)
        return;
    const uint64_t number = COX_QUEUE_LOAD(intent->intent_number);
    const uint32_t domain = COX_QUEUE_LOAD(intent->intent_domain);
    const struct cox_queue_copy copy = {
        .epoch = COX_QUEUE_LOAD(intent->intent_epoch),
        .size = COX_QUEUE_LOAD(intent->intent_size),
        .pool = COX_QUEUE_LOAD(intent->intent_pool),
        .block = COX_QUEUE_LOAD(intent->intent_block),
    };
    struct cox_queue_message message;
    cox_queue_row_read(queue, number, &message);
    bool done = domain < queue->geometry.domain_count_max && message.number == number &&
                (message.mask >> domain & 1) && message.copies[domain].pool == copy.pool &&
                message.copies[domain].block == copy.block &&
                message.copies[domain].epoch == copy.epoch;
    if (!done && domain < queue->geometry.domain_count_max)
        copy_unpin(queue, &copy, number, domain);
    cox_queue_intent_clear(queue);
}

void cox_queue_repair(struct cox_queue *queue)
{
    struct cox_queue_layout_state *state = &queue->layout->state;
    const struct cox_queue_geometry *geometry = &queue->geometry;
    /* The end marks may be outdated. */
    uint32_t end = geometry->publisher_count_max;
    while (end > 0 &&
           COX_QUEUE_LOAD(cox_queue_publisher_at(queue, end - 1)->publisher_process) == 0)
        end--;
    atomic_store_explicit(&state->publisher_end, end, memory_order_relaxed);
    end = geometry->subscriber_count_max;
    while (end > 0 &&
           COX_QUEUE_LOAD(cox_queue_subscriber_at(queue, end - 1)->subscriber_process) == 0)
        end--;
    atomic_store_explicit(&state->subscriber_end, end, memory_order_relaxed);
    atomic_store_explicit(&state->pending_free_end, geometry->pending_free_count_max,
                          memory_order_relaxed);
    cox_fault_point(COX_FAULT_QUEUE_REPAIRING);
    repair_intent(queue);
    /* No process has seen a message that was not published; subscribers woken for it wait for the
     * lock. */
    cox_queue_recount(queue);
    for (uint32_t i = 0; i < geometry->depth; i++) {
        struct cox_queue_layout_row *row = cox_queue_row_at(queue, i);
        if (COX_QUEUE_LOAD(row->row_number) == 0)
            atomic_store_explicit(&row->row_mask, 0, memory_order_relaxed);
    }
    atomic_store(&state->queue_publishing, 0);
    repair_sleepers(queue);
    queue->drained = UINT64_MAX;
    cox_queue_drain(queue);
    cox_fault_point(COX_FAULT_QUEUE_REPAIRED);
}
