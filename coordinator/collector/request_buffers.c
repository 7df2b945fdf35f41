/*
 * Payload buffers, for requests that do not fit their frame (channel/memory/large_payload.h).
 */
#include "collector_internal.h"

static struct cox_request_buffer *collector_request_buffer(struct cox_collector *collector,
                                                           uint64_t sequence)
{
    return &collector->request_buffers[cox_geometry_frame(sequence,
                                                          collector_geometry(collector)->depth)];
}

/* The memory that was used last, and is free, is the one of this frame from now on: a host that
 * sends one request at a time writes to, and ranks read from, the same memory each time. */
static void collector_use_again(struct cox_collector *collector, struct cox_request_buffer *own,
                                uint64_t size)
{
    struct cox_request_buffer *last = own;
    pthread_mutex_lock(&collector->lock);
    for (uint32_t frame = 0; frame < collector_geometry(collector)->depth; frame++) {
        struct cox_request_buffer *other = &collector->request_buffers[frame];
        if (!other->used && other->payload.region.size >= size && other->sequence > last->sequence)
            last = other;
    }
    if (last != own)
        cox_large_payload_swap(&own->payload, &last->payload);
    last->sequence = own->sequence;
    pthread_mutex_unlock(&collector->lock);
}

int cox_collector_prepare_payload(struct cox_collector *collector, uint64_t sequence,
                                  const struct cox_payload_content *content, uint64_t size,
                                  struct cox_large_payload **ret_payload, struct cox_error *err)
{
    struct cox_large_payload_sender *sender = &collector->large_payloads->sender;
    const char *socket_path = collector->large_payloads->reply_limits.socket_path;
    struct cox_request_buffer *behind = collector_request_buffer(collector, sequence);
    int r;
    if (content->memory) {
        r = cox_large_payload_adopt(sender, socket_path, content->memory, size, &behind->payload,
                                    err);
    } else if (content->parts) {
        r = cox_large_payload_fill(sender, socket_path, content->parts, size, &behind->payload,
                                   err);
    } else {
        collector_use_again(collector, behind, size);
        behind->sequence = sequence;
        r = cox_large_payload_reserve(sender, socket_path, size, &behind->payload, err);
    }
    if (r == 0)
        *ret_payload = &behind->payload;
    return r;
}

bool cox_collector_uses_payload(struct cox_collector *collector, uint64_t sequence)
{
    return atomic_load_explicit(&collector->payloads_used, memory_order_relaxed) > 0 &&
           collector_request_buffer(collector, sequence)->used;
}

void cox_collector_use_payload(struct cox_collector *collector, uint64_t sequence)
{
    struct cox_request_buffer *behind = collector_request_buffer(collector, sequence);
    /* relaxed: changed under the lock; reads without it are hints. */
    atomic_fetch_add_explicit(&collector->payloads_used, !behind->used, memory_order_relaxed);
    behind->used = true;
}

/* Returns true if no rank that the request asked can still open it. lock is held. */
static bool collector_payload_is_free(struct cox_collector *collector,
                                      const struct cox_entry *entry)
{
    bool free = entry->ended;
    for (uint32_t rank = 0; free && rank < collector->rank_count; rank++)
        free = !cox_rank_set_has(&entry->asked, rank) || cox_rank_set_has(&entry->consumed, rank) ||
               collector_returned(collector, rank, entry->sequence) ||
               collector_dead(collector, rank);
    return free;
}

void cox_collector_release_payloads(struct cox_collector *collector)
{
    struct cox_large_payload large[COX_DEPTH_MAX];
    uint32_t count = 0;
    /* relaxed: a thread that claims has seen the request in that frame published. */
    if (atomic_load_explicit(&collector->payloads_used, memory_order_relaxed) == 0)
        return;
    pthread_mutex_lock(&collector->lock);
    for (uint32_t frame = 0; frame < collector_geometry(collector)->depth; frame++) {
        struct cox_request_buffer *behind = &collector->request_buffers[frame];
        if (!behind->used || !collector_payload_is_free(collector, &collector->entries[frame]))
            continue;
        behind->used = false;
        atomic_fetch_sub_explicit(&collector->payloads_used, 1, memory_order_relaxed);
        if (cox_large_payload_is_transient(&behind->payload)) {
            large[count++] = behind->payload;
            behind->payload = (struct cox_large_payload){0};
        }
    }
    pthread_mutex_unlock(&collector->lock);
    /* Without the lock: releasing a gigabyte takes time. */
    for (uint32_t i = 0; i < count; i++)
        cox_large_payload_drop(&collector->large_payloads->sender, &large[i]);
}

uint64_t cox_collector_held_bytes(const struct cox_collector *collector)
{
    uint64_t bytes = 0;
    for (uint32_t frame = 0; frame < collector_geometry(collector)->depth; frame++)
        if (collector->request_buffers[frame].used)
            bytes += collector->request_buffers[frame].payload.region.size;
    return bytes;
}
