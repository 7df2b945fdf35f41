#include "channel/base/base_internal.h"
#include "channel/base/fault.h"
#include "channel/base/futex.h"
#include "channel/base/idioms.h"
#include "channel/base/options.h"
#include "memory/pool/pool_internal.h"
#include "queue_internal.h"
#include "queue_lock.h"

#include <inttypes.h>
#include <stdlib.h>
#include <unistd.h>

/* Limit for waiting for the copy of another process; afterwards the subscriber makes its own. */
#define COPY_PATIENCE_MS 10000

/* ---- create and free ---- */

static int slot_find(struct cox_queue *queue, uint32_t *ret_slot)
{
    for (uint32_t i = 0; i < queue->geometry.subscriber_count_max; i++)
        if (COX_QUEUE_LOAD(cox_queue_subscriber_at(queue, i)->subscriber_process) == 0) {
            *ret_slot = i;
            return 0;
        }
    return COX_FULL;
}

/* Under the lock. */
static int subscriber_enter(struct cox_subscriber *subscriber, struct cox_error *err)
{
    struct cox_queue *queue = subscriber->queue;
    struct cox_queue_layout_state *state = &queue->layout->state;
    const struct cox_domain_id host = {COX_DOMAIN_HOST, 0};
    int r = slot_find(queue, &subscriber->slot);
    if (r)
        return cox_fail(err, r, "queue: it has %" PRIu32 " subscribers, which is its limit",
                        queue->geometry.subscriber_count_max);
    subscriber->pool_index = UINT32_MAX;
    if (subscriber->pool)
        r = cox_queue_entry_add(
            queue, cox_pool_id(subscriber->pool), cox_pool_domain(subscriber->pool),
            subscriber->exported ? &subscriber->handle : NULL, false, &subscriber->pool_index, err);
    if (r == 0)
        r = cox_queue_domain_add(queue, subscriber->pool ? cox_pool_domain(subscriber->pool) : host,
                                 &subscriber->domain, err);
    if (r)
        return r;
    subscriber->next = COX_QUEUE_LOAD(state->queue_head) + 1;
    struct cox_queue_layout_subscriber *line = cox_subscriber_line(subscriber);
    atomic_store_explicit(&line->subscriber_next, subscriber->next, memory_order_relaxed);
    atomic_store_explicit(&line->subscriber_domain, subscriber->domain, memory_order_relaxed);
    atomic_store_explicit(&line->subscriber_pool, subscriber->pool_index, memory_order_relaxed);
    atomic_store_explicit(&line->subscriber_sleeping, 0, memory_order_relaxed);
    if (COX_QUEUE_LOAD(state->subscriber_end) <= subscriber->slot)
        atomic_store_explicit(&state->subscriber_end, subscriber->slot + 1, memory_order_relaxed);
    atomic_store_explicit(&line->subscriber_process, queue->identity, memory_order_release);
    cox_fault_point(COX_FAULT_QUEUE_SUBSCRIBER_JOINED);
    return 0;
}

static int subscriber_join(struct cox_subscriber *subscriber, struct cox_error *err)
{
    struct cox_queue *queue = subscriber->queue;
    /* Retries once after reaping dead endpoints. */
    for (int round = 0;; round++) {
        int r = cox_queue_enter(queue, err);
        if (r)
            return r;
        r = subscriber_enter(subscriber, round == 0 ? NULL : err);
        cox_queue_leave(queue);
        if (r != COX_FULL || round > 0)
            return r && round == 0 ? cox_fail(err, r, "queue: %s", cox_status_text(r)) : r;
        cox_queue_reap_dead(queue, true);
    }
}

/* Prepares all but the slot in the queue. */
static int subscriber_prepare(struct cox_subscriber *subscriber,
                              const struct cox_subscriber_options *options, struct cox_error *err)
{
    int r = 0;
    if (options->pool)
        r = cox_queue_pool_cache_add(&subscriber->pool_cache, options->pool, err);
    for (uint32_t i = 0; r == 0 && i < options->pool_count; i++)
        if (!cox_queue_pool_cache_find(&subscriber->pool_cache, cox_pool_id(options->pools[i])))
            r = cox_queue_pool_cache_add(&subscriber->pool_cache, options->pools[i], err);
    if (r == 0 && options->pool && options->exporter) {
        r = cox_pool_export(options->pool, options->exporter, false, &subscriber->handle, err);
        subscriber->exported = r == 0;
    }
    return r;
}

int cox_subscriber_new(struct cox_queue *queue, const struct cox_subscriber_options *options,
                       struct cox_subscriber **ret_subscriber, struct cox_error *err)
{
    struct cox_subscriber_options known;
    int r = cox_options_copy(&known, sizeof known, options, "cox_subscriber_options", err);
    if (r)
        return r;
    options = &known;
    struct cox_subscriber *subscriber = calloc(1, sizeof *subscriber);
    if (!subscriber)
        return cox_fail(err, -ENOMEM, "subscriber: %s", cox_status_text(-ENOMEM));
    subscriber->queue = queue;
    subscriber->pool = options->pool;
    subscriber->exporter = options->exporter;
    r = cox_queue_pool_cache_init(&subscriber->pool_cache, queue, options->domains,
                                  options->socket_path, err);
    if (r == 0)
        r = subscriber_prepare(subscriber, options, err);
    if (r == 0)
        r = subscriber_join(subscriber, err);
    if (r) {
        if (subscriber->exported)
            cox_pool_unexport(subscriber->exporter, &subscriber->handle);
        cox_queue_pool_cache_deinit(&subscriber->pool_cache);
        free(subscriber);
        return r;
    }
    /* relaxed: as in publisher.c. */
    atomic_fetch_add_explicit(&queue->endpoint_count, 1, memory_order_relaxed);
    *ret_subscriber = subscriber;
    return 0;
}

static void subscriber_leave(struct cox_subscriber *subscriber)
{
    struct cox_queue *queue = subscriber->queue;
    if (cox_queue_enter(queue, NULL))
        return; /* the slot stays until this process ends */
    atomic_store_explicit(&cox_subscriber_line(subscriber)->subscriber_process, 0,
                          memory_order_relaxed);
    cox_fault_point(COX_FAULT_QUEUE_SUBSCRIBER_LEFT);
    cox_queue_recount(queue);
    if (subscriber->exported)
        cox_queue_entry_close(queue, subscriber->pool_index);
    cox_queue_drain(queue);
    cox_queue_leave(queue);
}

struct cox_subscriber *cox_subscriber_free(struct cox_subscriber *subscriber)
{
    if (!subscriber)
        return NULL;
    struct cox_queue *queue = subscriber->queue;
    COX_ASSERT(!subscriber->set);
    if (queue->pid == getpid()) {
        /* Messages may end with their last subscriber: opens their pools, to unpin the copies at
         * once. */
        if (cox_subscriber_pending(subscriber) > 0)
            cox_queue_pool_cache_open_all(&subscriber->pool_cache);
        subscriber_leave(subscriber);
    }
    if (subscriber->exported)
        cox_pool_unexport(subscriber->exporter, &subscriber->handle);
    cox_queue_pool_cache_deinit(&subscriber->pool_cache);
    atomic_fetch_sub_explicit(&queue->endpoint_count, 1, memory_order_release);
    free(subscriber);
    return NULL;
}

uint64_t cox_subscriber_pending(const struct cox_subscriber *subscriber)
{
    /* seq_cst: partner is the store of publish; see cox_queue_set_wait. */
    uint64_t head = atomic_load(&subscriber->queue->layout->state.queue_head);
    if (subscriber->next > head)
        return 0;
    uint64_t behind = head - subscriber->next + 1;
    return behind < subscriber->queue->geometry.depth ? behind : subscriber->queue->geometry.depth;
}

/* ---- take, under the lock ---- */

/* State of one take. */
struct taking {
    struct cox_queue_message message;
    struct cox_queue_entry entry;
    /* of entry */
    uint32_t pool_index;
    /* domain to copy from */
    uint32_t source;
    struct cox_pool *source_pool;
    /* makes a private copy */
    bool alone;
    /* identity; 0: none */
    uint64_t dead_copier;
    /* process that is waited for, and until when */
    uint64_t copier;
    uint64_t patience_ns;
    /* code of the last pool that could not be opened */
    int failed;
};

/* Advances to the next existing message. Returns 0; COX_EMPTY: none; COX_CORRUPT. */
static int taking_find(struct cox_subscriber *subscriber, struct taking *taking)
{
    struct cox_queue *queue = subscriber->queue;
    const uint64_t head = COX_QUEUE_LOAD(queue->layout->state.queue_head);
    const uint32_t depth = queue->geometry.depth;
    const uint64_t before = subscriber->next;
    int r = COX_EMPTY;
    if (head > COX_QUEUE_HEAD_MAX) /* corrupt: the loop would not end */
        return COX_CORRUPT;
    if (head >= depth && subscriber->next < head - depth + 1) {
        subscriber->skipped += head - depth + 1 - subscriber->next;
        subscriber->next = head - depth + 1;
    }
    for (; r == COX_EMPTY && subscriber->next <= head;) {
        cox_queue_row_read(queue, subscriber->next, &taking->message);
        if (taking->message.number == subscriber->next && taking->message.mask) {
            r = 0;
            break;
        }
        if (taking->message.number && taking->message.number != subscriber->next)
            r = COX_CORRUPT;
        /* Otherwise a publisher died after it had ended the old message and before it filled the
         * row. */
        subscriber->skipped++;
        subscriber->next++;
    }
    if (subscriber->next != before) {
        atomic_store_explicit(&cox_subscriber_line(subscriber)->subscriber_next, subscriber->next,
                              memory_order_relaxed);
        cox_fault_point(COX_FAULT_QUEUE_SKIPPED);
    }
    return r;
}

/* Marks the message as taken; the last subscriber ends it. */
static void taking_consume(struct cox_subscriber *subscriber, const struct taking *taking)
{
    struct cox_queue *queue = subscriber->queue;
    const uint64_t number = taking->message.number;
    if (subscriber->next != number)
        return;
    subscriber->next = number + 1;
    atomic_store_explicit(&cox_subscriber_line(subscriber)->subscriber_next, subscriber->next,
                          memory_order_relaxed);
    cox_fault_point(COX_FAULT_QUEUE_TAKEN);
    struct cox_queue_layout_row *row = cox_queue_row_at(queue, number);
    if (COX_QUEUE_LOAD(row->row_number) != number)
        return; /* replaced by a newer message during the copy */
    uint32_t interest = COX_QUEUE_LOAD(row->row_interest);
    interest -= interest > 0;
    atomic_store_explicit(&row->row_interest, interest, memory_order_relaxed);
    cox_fault_point(COX_FAULT_QUEUE_TAKE_COUNTED);
    if (interest == 0)
        cox_queue_row_end(queue, row);
}

/* The last subscriber unpins all copies: finds a pool that it must open before. */
static bool taking_last_unknown(struct cox_subscriber *subscriber, struct taking *taking)
{
    for (uint32_t d = 0;
         taking->message.interest <= 1 && d < subscriber->queue->geometry.domain_count_max; d++) {
        taking->pool_index = taking->message.copies[d].pool;
        if ((taking->message.mask >> d & 1) &&
            cox_queue_entry_read(subscriber->queue, taking->pool_index, &taking->entry) &&
            !cox_queue_pool_cache_find(&subscriber->pool_cache, taking->entry.id) &&
            !cox_queue_pool_cache_failed(&subscriber->pool_cache, taking->pool_index,
                                         &taking->entry))
            return true;
    }
    return false;
}

enum taking_step {
    TAKING_DONE, /* with the result r */
    TAKING_OPEN, /* open the pool of taking->entry, then retry */
    TAKING_WAIT, /* wait for taking->copier */
    TAKING_COPY, /* source is referenced */
};

static int fail_corrupt(const struct taking *taking, const char *what, struct cox_error *err)
{
    return cox_fail(err, COX_CORRUPT, "message %" PRIu64 ": %s", taking->message.number, what);
}

static void message_fill(const struct taking *taking, struct cox_pool *pool,
                         const struct cox_block_ref *ref, bool copied,
                         struct cox_subscriber *subscriber, struct cox_message *ret_message)
{
    *ret_message = (struct cox_message){
        .ref = *ref,
        .pool = pool,
        .bytes = cox_pool_pointer(pool, ref),
        .length = taking->message.length,
        .user_data = taking->message.user_data,
        .number = taking->message.number,
        .skipped = subscriber->skipped,
        .copied = copied,
    };
    subscriber->skipped = 0;
}

static struct cox_block_ref copy_ref(const struct taking *taking, uint32_t domain, uint64_t pool)
{
    const struct cox_queue_copy *copy = &taking->message.copies[domain];
    return (struct cox_block_ref){
        .pool = pool, .epoch = copy->epoch, .size = copy->size, .block = copy->block};
}

/* Takes the copy in the subscriber's domain. */
static enum taking_step take_shared(struct cox_subscriber *subscriber, struct taking *taking,
                                    struct cox_message *ret_message, int *ret_r,
                                    struct cox_error *err)
{
    taking->pool_index = taking->message.copies[subscriber->domain].pool;
    if (!cox_queue_entry_read(subscriber->queue, taking->pool_index, &taking->entry)) {
        *ret_r = fail_corrupt(taking, "it is in a pool that is not there", err);
        return TAKING_DONE;
    }
    struct cox_pool *pool = cox_queue_pool_cache_find(&subscriber->pool_cache, taking->entry.id);
    if (!pool)
        return TAKING_OPEN;
    const struct cox_block_ref ref = copy_ref(taking, subscriber->domain, taking->entry.id);
    if (taking->message.length > ref.size)
        *ret_r = fail_corrupt(taking, "it is larger than its block", err);
    else
        *ret_r = cox_pool_ref(pool, &ref, err);
    if (*ret_r == 0)
        message_fill(taking, pool, &ref, false, subscriber, ret_message);
    return TAKING_DONE;
}

/* Chooses the source of a copy: pools in the cache first. */
static enum taking_step take_source(struct cox_subscriber *subscriber, struct taking *taking,
                                    int *ret_r, struct cox_error *err)
{
    struct cox_queue *queue = subscriber->queue;
    bool openable = false;
    struct cox_queue_entry entry;
    for (uint32_t d = 0; d < queue->geometry.domain_count_max; d++) {
        const uint32_t index = taking->message.copies[d].pool;
        if (!(taking->message.mask >> d & 1) || !cox_queue_entry_read(queue, index, &entry))
            continue;
        struct cox_pool *pool = cox_queue_pool_cache_find(&subscriber->pool_cache, entry.id);
        if (pool) {
            const struct cox_block_ref ref = copy_ref(taking, d, entry.id);
            if (taking->message.length > ref.size)
                *ret_r = fail_corrupt(taking, "it is larger than its block", err);
            else
                *ret_r = cox_pool_ref(pool, &ref, err);
            taking->source = d;
            taking->source_pool = pool;
            taking->entry = entry;
            return *ret_r ? TAKING_DONE : TAKING_COPY;
        }
        int failed = cox_queue_pool_cache_failed(&subscriber->pool_cache, index, &entry);
        if (failed) {
            taking->failed = failed;
            continue;
        }
        openable = true;
        taking->entry = entry;
        taking->pool_index = index;
    }
    if (openable)
        return TAKING_OPEN;
    *ret_r = cox_fail(err, taking->failed ? taking->failed : COX_CORRUPT,
                      "message %" PRIu64 ": none of the pools that it is in can be opened: %s",
                      taking->message.number,
                      cox_status_text(taking->failed ? taking->failed : COX_CORRUPT));
    return TAKING_DONE;
}

/* No copy in the domain: one process at a time makes it. */
static enum taking_step take_elsewhere(struct cox_subscriber *subscriber, struct taking *taking,
                                       int *ret_r, struct cox_error *err)
{
    struct cox_queue *queue = subscriber->queue;
    const uint64_t copier = taking->message.copies[subscriber->domain].copier;
    if (!subscriber->pool) {
        *ret_r = cox_fail(err, COX_UNSUPPORTED,
                          "message %" PRIu64
                          " is not in host memory, and this subscriber has no pool to copy it into",
                          taking->message.number);
        return TAKING_DONE;
    }
    if (!taking->alone && copier && copier != taking->dead_copier) {
        taking->copier = copier;
        return TAKING_WAIT;
    }
    enum taking_step step = take_source(subscriber, taking, ret_r, err);
    if (step == TAKING_COPY && !taking->alone) {
        struct cox_queue_layout_row *row = cox_queue_row_at(queue, taking->message.number);
        atomic_store_explicit(&row->copies[subscriber->domain].copy_copier, queue->identity,
                              memory_order_relaxed);
        cox_fault_point(COX_FAULT_QUEUE_COPYING);
    }
    return step;
}

static enum taking_step take_step(struct cox_subscriber *subscriber, struct taking *taking,
                                  struct cox_message *ret_message, int *ret_r,
                                  struct cox_error *err)
{
    taking->failed = 0;
    *ret_r = taking_find(subscriber, taking);
    if (*ret_r) {
        if (*ret_r == COX_CORRUPT)
            cox_fail(err, COX_CORRUPT, "message %" PRIu64 ": its row is another message's",
                     subscriber->next - 1);
        return TAKING_DONE;
    }
    if (taking_last_unknown(subscriber, taking))
        return TAKING_OPEN;
    if (taking->message.mask >> subscriber->domain & 1) {
        enum taking_step step = take_shared(subscriber, taking, ret_message, ret_r, err);
        if (step != TAKING_OPEN)
            return step;
        int failed = cox_queue_pool_cache_failed(&subscriber->pool_cache, taking->pool_index,
                                                 &taking->entry);
        if (!failed)
            return TAKING_OPEN;
        /* The domain's copy is inaccessible: makes a private copy, if another one is accessible. */
        taking->failed = failed;
        if (!subscriber->pool) {
            *ret_r = cox_fail(err, failed, "message %" PRIu64 ": its pool cannot be opened: %s",
                              taking->message.number, cox_status_text(failed));
            return TAKING_DONE;
        }
        taking->alone = true;
    }
    return take_elsewhere(subscriber, taking, ret_r, err);
}

/* ---- take, without the lock ---- */

/* Blocks until the copy is done or cancelled, for a slice at most. */
static void wait_for_copy(struct cox_subscriber *subscriber, struct taking *taking, uint32_t seen)
{
    struct cox_queue *queue = subscriber->queue;
    if (!cox_queue_identity_alive(taking->copier)) {
        taking->dead_copier = taking->copier;
        return;
    }
    if (taking->patience_ns == 0)
        taking->patience_ns = cox_deadline_after_ms(COPY_PATIENCE_MS);
    if (cox_now_ns() >= taking->patience_ns)
        taking->alone = true;
    else
        cox_futex_wait(&queue->layout->state.queue_copied, seen,
                       cox_deadline_after_ns(COX_QUEUE_SLICE_NS));
}

/* Under the lock: the copy is done or cancelled; wakes waiters. */
static void copy_over(struct cox_queue *queue)
{
    struct cox_queue_layout_state *state = &queue->layout->state;
    /* relaxed: under the lock; waiters read it there. */
    atomic_fetch_add_explicit(&state->queue_copied, 1, memory_order_relaxed);
    if (atomic_exchange_explicit(&state->queue_copy_wait, 0, memory_order_relaxed))
        cox_futex_wake(&state->queue_copied);
    cox_fault_point(COX_FAULT_QUEUE_COPY_OVER);
}

/* Under the lock: shares the copy with the domain, if the message still exists. */
static void copy_share(struct cox_subscriber *subscriber, const struct taking *taking,
                       const struct cox_block_ref *ref)
{
    struct cox_queue *queue = subscriber->queue;
    const uint32_t domain = subscriber->domain;
    struct cox_queue_message now;
    struct cox_queue_copy copy;
    cox_queue_row_read(queue, taking->message.number, &now);
    if (taking->alone || now.number != taking->message.number || (now.mask >> domain & 1) ||
        now.copies[domain].copier != queue->identity)
        return;
    struct cox_queue_layout_row *row = cox_queue_row_at(queue, now.number);
    /* If the copy cannot be pinned, it stays private. */
    if (cox_queue_pin(queue, subscriber->pool, subscriber->pool_index, ref, now.number, domain,
                      &copy, NULL) == 0) {
        cox_queue_copy_fill(&row->copies[domain], &copy);
        atomic_store_explicit(&row->row_mask, now.mask | UINT32_C(1) << domain,
                              memory_order_relaxed);
        cox_fault_point(COX_FAULT_QUEUE_COPY_SHARED);
        cox_queue_intent_clear(queue);
    } else {
        atomic_store_explicit(&row->copies[domain].copy_copier, 0, memory_order_relaxed);
    }
    copy_over(queue);
}

/* Under the lock: cancels the copy, so that another process may try. */
static void copy_cancel(struct cox_subscriber *subscriber, const struct taking *taking)
{
    struct cox_queue *queue = subscriber->queue;
    struct cox_queue_layout_row *row = cox_queue_row_at(queue, taking->message.number);
    if (taking->alone || COX_QUEUE_LOAD(row->row_number) != taking->message.number ||
        COX_QUEUE_LOAD(row->copies[subscriber->domain].copy_copier) != queue->identity)
        return;
    atomic_store_explicit(&row->copies[subscriber->domain].copy_copier, 0, memory_order_relaxed);
    copy_over(queue);
}

/* True: there may be room later, so the message stays. */
static bool is_for_now(int r)
{
    return r == COX_FULL || r == COX_NO_SPACE || r == -ENOMEM;
}

/* Releases the source's reference in any case. */
static int take_copy(struct cox_subscriber *subscriber, const struct taking *taking,
                     struct cox_message *ret_message, struct cox_error *err)
{
    struct cox_queue *queue = subscriber->queue;
    const struct cox_block_ref source = copy_ref(taking, taking->source, taking->entry.id);
    const uint64_t length = taking->message.length;
    struct cox_block_ref ref;
    int r = cox_pool_allocate(subscriber->pool, length ? length : 1, &ref, err);
    const bool allocated = r == 0;
    if (r == 0 && length)
        r = cox_pool_copy(subscriber->pool, &ref, taking->source_pool, &source, length, err);
    cox_fault_point(COX_FAULT_QUEUE_COPIED);
    int entered = cox_queue_enter(queue, err);
    if (entered == 0) {
        if (r == 0)
            copy_share(subscriber, taking, &ref);
        else
            copy_cancel(subscriber, taking);
        if (!is_for_now(r))
            taking_consume(subscriber, taking);
        cox_queue_leave(queue);
    }
    cox_pool_unref(taking->source_pool, &source, NULL);
    r = r ? r : entered;
    if (r == 0)
        message_fill(taking, subscriber->pool, &ref, true, subscriber, ret_message);
    else if (allocated)
        cox_pool_unref(subscriber->pool, &ref, NULL);
    return r;
}

int cox_subscriber_take(struct cox_subscriber *subscriber, struct cox_message *ret_message,
                        struct cox_error *err)
{
    struct cox_queue *queue = subscriber->queue;
    struct taking taking = {0};
    uint32_t opened = 0;
    for (;;) {
        uint32_t seen = 0;
        /* Fast path without the lock: no message, no pending free. */
        if (cox_subscriber_pending(subscriber) == 0 && queue->pid == getpid() &&
            COX_QUEUE_LOAD(queue->layout->state.pending_free_end) == 0)
            return COX_EMPTY;
        int r = cox_queue_enter(queue, err);
        if (r)
            return r;
        cox_queue_drain(queue);
        enum taking_step step = take_step(subscriber, &taking, ret_message, &r, err);
        if (step == TAKING_DONE && r != COX_EMPTY && !is_for_now(r))
            taking_consume(subscriber, &taking);
        if (step == TAKING_WAIT) {
            struct cox_queue_layout_state *state = &queue->layout->state;
            /* Under the lock, as is the process that ends the copy. */
            seen = COX_QUEUE_LOAD(state->queue_copied);
            atomic_store_explicit(&state->queue_copy_wait, 1, memory_order_relaxed);
        }
        cox_queue_leave(queue);
        switch (step) {
        case TAKING_DONE:
            return r;
        case TAKING_OPEN:
            /* Each pool is tried once, so more rounds mean that a process keeps overwriting the
             * entries. */
            if (opened++ > 2 * queue->geometry.pool_count_max)
                return cox_fail(
                    err, COX_CORRUPT,
                    "queue: its pool entries keep changing: a process keeps overwriting them");
            cox_queue_pool_cache_open(&subscriber->pool_cache, taking.pool_index, &taking.entry,
                                      NULL);
            break;
        case TAKING_WAIT:
            wait_for_copy(subscriber, &taking, seen);
            break;
        case TAKING_COPY:
            return take_copy(subscriber, &taking, ret_message, err);
        }
    }
}

int cox_subscriber_take_batch(struct cox_subscriber *subscriber, struct cox_message *ret_messages,
                              uint32_t count_max, uint32_t *ret_count, struct cox_error *err)
{
    uint32_t count = 0;
    int r = 0;
    COX_ASSERT(count_max > 0);
    while (r == 0 && count < count_max)
        if ((r = cox_subscriber_take(subscriber, &ret_messages[count], err)) == 0)
            count++;
    *ret_count = count;
    return r == COX_EMPTY && count > 0 ? 0 : r;
}
