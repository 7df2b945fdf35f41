/* Domains and pools of messages, under the lock. Entries have no reference count: they are scanned
 * when room is needed, and kept until then. */
#include "queue_internal.h"

#include <inttypes.h>
#include <string.h>

#include "channel/base/fault.h"

static_assert(sizeof(struct cox_pool_handle) ==
                  sizeof((struct cox_queue_layout_pool *)0)->pool_handle,
              "handle");

/* ---- entries in use ---- */

struct entries_used {
    bool pools[COX_QUEUE_POOL_COUNT_MAX];
    /* bit mask */
    uint32_t domains;
};

static void used_pool(struct entries_used *used, uint32_t index)
{
    if (index < COX_QUEUE_POOL_COUNT_MAX)
        used->pools[index] = true;
}

static void used_by_rows(struct cox_queue *queue, struct entries_used *used)
{
    for (uint32_t i = 0; i < queue->geometry.depth; i++) {
        struct cox_queue_message message;
        cox_queue_row_read(queue, i, &message);
        if (message.number == 0)
            continue;
        used->domains |= message.mask;
        for (uint32_t d = 0; d < queue->geometry.domain_count_max; d++)
            if (message.mask >> d & 1)
                used_pool(used, message.copies[d].pool);
    }
}

static void used_by_endpoints(struct cox_queue *queue, struct entries_used *used)
{
    for (uint32_t i = 0; i < queue->geometry.publisher_count_max; i++) {
        struct cox_queue_layout_publisher *publisher = cox_queue_publisher_at(queue, i);
        if (COX_QUEUE_LOAD(publisher->publisher_process))
            used_pool(used, COX_QUEUE_LOAD(publisher->publisher_pool));
    }
    for (uint32_t i = 0; i < queue->geometry.subscriber_count_max; i++) {
        struct cox_queue_layout_subscriber *subscriber = cox_queue_subscriber_at(queue, i);
        if (COX_QUEUE_LOAD(subscriber->subscriber_process) == 0)
            continue;
        used_pool(used, COX_QUEUE_LOAD(subscriber->subscriber_pool));
        uint32_t domain = COX_QUEUE_LOAD(subscriber->subscriber_domain);
        if (domain < COX_DOMAIN_COUNT_MAX)
            used->domains |= UINT32_C(1) << domain;
    }
}

static void used_by_pending_frees(struct cox_queue *queue, struct entries_used *used)
{
    for (uint32_t i = 0; i < queue->geometry.pending_free_count_max; i++) {
        struct cox_queue_layout_pending_free *pending_free = cox_queue_pending_free_at(queue, i);
        if (COX_QUEUE_LOAD(pending_free->pending_free_tag))
            used_pool(used, COX_QUEUE_LOAD(pending_free->pending_free_pool));
    }
}

/* Frees entries without a reference. If there are none, those with pending frees alone: no endpoint
 * uses their pool, whose last process releases all its pins anyway. */
static void reclaim_pools(struct cox_queue *queue)
{
    struct entries_used used = {0}, pending_free = {0};
    used_by_rows(queue, &used);
    used_by_endpoints(queue, &used);
    used_by_pending_frees(queue, &pending_free);
    uint32_t free_count = 0;
    for (int round = 0; round < 2 && free_count == 0; round++)
        for (uint32_t i = 0; i < queue->geometry.pool_count_max; i++) {
            if (used.pools[i] || (round == 0 && pending_free.pools[i]))
                continue;
            atomic_store_explicit(&queue->layout->pools[i].pool_id, 0, memory_order_relaxed);
            cox_fault_point(COX_FAULT_QUEUE_POOL_CLEARED);
            free_count++;
        }
}

static void reclaim_domains(struct cox_queue *queue)
{
    struct entries_used used = {0};
    used_by_rows(queue, &used);
    used_by_endpoints(queue, &used);
    for (uint32_t i = 0; i < queue->geometry.pool_count_max; i++) {
        struct cox_queue_entry entry;
        if (cox_queue_entry_read(queue, i, &entry))
            used.domains |= UINT32_C(1) << entry.domain;
    }
    for (uint32_t d = 0; d < queue->geometry.domain_count_max; d++)
        if (!(used.domains >> d & 1)) {
            atomic_store_explicit(&queue->layout->queue_domains[d], 0, memory_order_relaxed);
            cox_fault_point(COX_FAULT_QUEUE_DOMAIN_CLEARED);
        }
}

/* ---- add ---- */

static bool domain_find(struct cox_queue *queue, uint64_t word, uint32_t *ret_index)
{
    for (uint32_t d = 0; d < queue->geometry.domain_count_max; d++)
        if (COX_QUEUE_LOAD(queue->layout->queue_domains[d]) == word) {
            *ret_index = d;
            return true;
        }
    return false;
}

int cox_queue_domain_add(struct cox_queue *queue, struct cox_domain_id domain, uint32_t *ret_index,
                         struct cox_error *err)
{
    const uint64_t word = (uint64_t)domain.kind << 32 | domain.device;
    uint32_t index;
    if (domain_find(queue, word, ret_index))
        return 0;
    if (!domain_find(queue, 0, &index)) {
        reclaim_pools(queue);
        reclaim_domains(queue);
        if (!domain_find(queue, 0, &index))
            return cox_fail(err, COX_FULL,
                            "queue: it has memory of %" PRIu32
                            " domains, which is its limit; %" PRIu32 ":%" PRIu32
                            " would be one more",
                            queue->geometry.domain_count_max, domain.kind, domain.device);
    }
    atomic_store_explicit(&queue->layout->queue_domains[index], word, memory_order_relaxed);
    cox_fault_point(COX_FAULT_QUEUE_DOMAIN_ENTERED);
    *ret_index = index;
    return 0;
}

bool cox_queue_entry_find(struct cox_queue *queue, uint64_t id, uint32_t *ret_index)
{
    for (uint32_t i = 0; i < queue->geometry.pool_count_max; i++)
        if (COX_QUEUE_LOAD(queue->layout->pools[i].pool_id) == id) {
            *ret_index = i;
            return true;
        }
    return false;
}

static void entry_fill(struct cox_queue *queue, uint32_t index, uint64_t id, uint32_t domain,
                       const struct cox_pool_handle *handle, bool read_only)
{
    struct cox_queue_layout_pool *pool = &queue->layout->pools[index];
    uint64_t words[sizeof *handle / 8] = {0};
    if (handle)
        memcpy(words, handle, sizeof words);
    for (size_t i = 0; i < sizeof words / 8; i++)
        atomic_store_explicit(&pool->pool_handle[i], words[i], memory_order_relaxed);
    uint32_t flags = handle ? COX_QUEUE_POOL_HANDLE : 0;
    if (handle && read_only)
        flags |= COX_QUEUE_POOL_READ_ONLY;
    atomic_store_explicit(&pool->pool_flags, flags, memory_order_relaxed);
    atomic_store_explicit(&pool->pool_domain, domain, memory_order_relaxed);
    uint64_t stamp =
        atomic_fetch_add_explicit(&queue->layout->state.pool_turn, 1, memory_order_relaxed) + 1;
    atomic_store_explicit(&pool->pool_stamp, stamp, memory_order_relaxed);
    atomic_store_explicit(&pool->pool_id, id, memory_order_relaxed);
    cox_fault_point(COX_FAULT_QUEUE_POOL_ENTERED);
}

int cox_queue_entry_add(struct cox_queue *queue, uint64_t id, struct cox_domain_id domain,
                        const struct cox_pool_handle *handle, bool read_only, uint32_t *ret_index,
                        struct cox_error *err)
{
    uint32_t domain_index, index;
    int r = cox_queue_domain_add(queue, domain, &domain_index, err);
    if (r)
        return r;
    if (!handle && cox_queue_entry_find(queue, id, ret_index))
        return 0;
    if (!cox_queue_entry_find(queue, 0, &index)) {
        reclaim_pools(queue);
        if (!cox_queue_entry_find(queue, 0, &index))
            return cox_fail(err, COX_FULL,
                            "queue: its messages lie in %" PRIu32 " pools, which is its limit",
                            queue->geometry.pool_count_max);
    }
    entry_fill(queue, index, id, domain_index, handle, read_only);
    *ret_index = index;
    return 0;
}

void cox_queue_entry_close(struct cox_queue *queue, uint32_t index)
{
    atomic_store_explicit(&queue->layout->pools[index].pool_flags, 0, memory_order_relaxed);
    cox_fault_point(COX_FAULT_QUEUE_POOL_CLOSED);
}
