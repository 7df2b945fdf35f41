/* out_of_line: requests and replies of a channel thread that are out of line
 * (channel/memory/large_payload.h). */
#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/shm/parts.h"
#include "channel/shm/state.h"
#include "proto/large_payload_ref.h"
#include "worker_internal.h"

#include <inttypes.h>
#include <string.h>

static const char *worker_fd_store(const struct cox_worker *worker)
{
    const struct cox_worker_options *options = &worker->options;
    return options->control_socket[0] ? options->control_socket
           : options->fd_store[0]     ? options->fd_store
                                      : NULL;
}

COX_HOT bool cox_channel_thread_has_payloads(const struct cox_channel_thread *thread)
{
    return cox_worker_limits(thread->worker)->extensions;
}

/* ---- requests ---- */

static struct cox_large_payload_origin worker_coordinator(const struct cox_worker *worker)
{
    return (struct cox_large_payload_origin){
        .pid = worker->coordinator.pid,
        .start = worker->coordinator.start,
        .socket_path = worker_fd_store(worker),
    };
}

int cox_channel_thread_open_payload(struct cox_channel_thread *thread, uint64_t sequence,
                                    const struct Coxswain__LargePayloadRef *message,
                                    const uint8_t **ret_bytes, size_t *ret_size)
{
    const struct cox_large_payload_origin peer = worker_coordinator(thread->worker);
    struct cox_large_payload_ref ref;
    struct cox_error why = {0};
    struct cox_large_payload_view *view = cox_channel_thread_view(thread, sequence);
    int r = cox_large_payload_ref_read(message, &ref, &why);
    if (r == 0) {
        cox_large_payload_view_find(thread->views, COX_DEPTH_MAX, 1, view, &ref);
        r = cox_large_payload_view_map(view, &ref, &peer, ret_bytes, &why);
    }
    if (r)
        return cox_fail(&thread->error, r, "the memory that the request is in: %s", why.text);
    *ret_size = ref.size;
    return 0;
}

void cox_channel_thread_close_payload(struct cox_channel_thread *thread, uint64_t sequence)
{
    cox_large_payload_view_release(cox_channel_thread_view(thread, sequence));
}

int cox_channel_thread_copy_payload(struct cox_channel_thread *thread, uint64_t sequence,
                                    size_t size, void **ret_bytes, struct cox_error *err)
{
    const struct cox_large_payload_origin peer = worker_coordinator(thread->worker);
    return cox_large_payload_view_copy(cox_channel_thread_view(thread, sequence), size, &peer,
                                       ret_bytes, err);
}

/* ---- replies ---- */

static struct cox_channel_thread_reply *thread_reply_payload(struct cox_channel_thread *thread,
                                                             uint64_t sequence)
{
    return &thread->replies[cox_geometry_frame(sequence, thread->worker->control.geometry.depth)];
}

/* With payloads_lock. */
static void reply_forget(struct cox_channel_thread *thread, struct cox_channel_thread_reply *reply)
{
    if (reply->sequence)
        atomic_fetch_sub_explicit(&thread->reply_count, 1, memory_order_relaxed);
    reply->sequence = 0;
}

static void reply_release(struct cox_channel_thread *thread, struct cox_channel_thread_reply *reply)
{
    reply_forget(thread, reply);
    if (cox_large_payload_is_transient(&reply->payload))
        cox_large_payload_drop(&thread->worker->large_payloads, &reply->payload);
}

/* With payloads_lock. */
static void reply_release_ended(struct cox_channel_thread *thread)
{
    const uint64_t ended =
        cox_state_ended(cox_state_channel(&thread->worker->control, thread->channel.id));
    for (uint32_t slot = 0; slot < COX_DEPTH_MAX; slot++)
        if (thread->replies[slot].sequence && thread->replies[slot].sequence <= ended)
            reply_release(thread, &thread->replies[slot]);
}

/* As the coordinator does with the memory of requests: what was used last, and is free, is used
 * again. With payloads_lock. */
static void reply_use_again(struct cox_channel_thread *thread, struct cox_channel_thread_reply *own,
                            uint64_t size)
{
    struct cox_channel_thread_reply *last = own;
    reply_release_ended(thread);
    for (uint32_t slot = 0; slot < COX_DEPTH_MAX; slot++) {
        struct cox_channel_thread_reply *other = &thread->replies[slot];
        if (!other->sequence && !other->reserved && other->payload.region.size >= size &&
            other->last > last->last)
            last = other;
    }
    if (last != own)
        cox_large_payload_swap(&own->payload, &last->payload);
    last->last = own->last;
    own->reserved = true;
}

/* parts: NULL: they are written later. */
static int reply_reserve(struct cox_channel_thread *thread, uint64_t sequence,
                         const struct iovec *parts, uint64_t size, struct cox_error *err)
{
    struct cox_large_payload_sender *sender = &thread->worker->large_payloads;
    const char *fd_store = worker_fd_store(thread->worker);
    struct cox_channel_thread_reply *reply = thread_reply_payload(thread, sequence);
    struct cox_error why = {0};
    int r = 0;
    pthread_mutex_lock(&thread->payloads_lock);
    /* Its content belongs to a request that has ended: this one is in the same frame. */
    if (parts) {
        reply_release(thread, reply);
        reply->reserved = true;
    } else {
        reply_forget(thread, reply);
        reply_use_again(thread, reply, size);
        r = cox_large_payload_reserve(sender, fd_store, size, &reply->payload, &why);
    }
    pthread_mutex_unlock(&thread->payloads_lock);
    if (parts) /* without the lock: it is copied now; nobody touches what is reserved */
        r = cox_large_payload_fill(sender, fd_store, parts, size, &reply->payload, &why);
    return r ? cox_fail(err, r, "a reply of %" PRIu64 " bytes: %s", size, why.text) : 0;
}

int cox_channel_thread_reserve_payload(struct cox_channel_thread *thread, uint64_t sequence,
                                       uint64_t size, uint8_t **ret_bytes, struct cox_error *err)
{
    int r = reply_reserve(thread, sequence, NULL, size, err);
    if (r == 0)
        *ret_bytes = thread_reply_payload(thread, sequence)->payload.region.base;
    return r;
}

int cox_channel_thread_write_payload(struct cox_channel_thread *thread, uint64_t sequence,
                                     const struct iovec *parts, uint64_t size,
                                     struct cox_error *err)
{
    uint8_t *bytes;
    if (size > COX_LARGE_PAYLOAD_KEEP_SIZE) /* which is freed after its message */
        return reply_reserve(thread, sequence, parts, size, err);
    int r = cox_channel_thread_reserve_payload(thread, sequence, size, &bytes, err);
    if (r == 0)
        cox_parts_join(bytes, parts, size);
    return r;
}

struct cox_large_payload_ref cox_channel_thread_refer_payload(struct cox_channel_thread *thread,
                                                              uint64_t sequence, uint64_t size)
{
    struct cox_channel_thread_reply *reply = thread_reply_payload(thread, sequence);
    cox_fault_point(COX_FAULT_LARGE_PAYLOAD_WRITTEN);
    const struct cox_large_payload_ref ref = cox_large_payload_refer(&reply->payload, size);
    /* Not before: memory that is still being written is not released, even if its request ends. */
    pthread_mutex_lock(&thread->payloads_lock);
    reply->sequence = reply->last = sequence;
    reply->reserved = false;
    atomic_fetch_add_explicit(&thread->reply_count, 1, memory_order_relaxed);
    pthread_mutex_unlock(&thread->payloads_lock);
    return ref;
}

void cox_channel_thread_release_payload(struct cox_channel_thread *thread, uint64_t sequence)
{
    pthread_mutex_lock(&thread->payloads_lock);
    thread_reply_payload(thread, sequence)->reserved = false;
    reply_release(thread, thread_reply_payload(thread, sequence));
    pthread_mutex_unlock(&thread->payloads_lock);
}

__attribute__((noinline)) static void thread_release_ended(struct cox_channel_thread *thread)
{
    /* A reply that needs memory does not wait for other threads: what is free is released next
     * time. */
    if (pthread_mutex_trylock(&thread->payloads_lock))
        return;
    reply_release_ended(thread);
    pthread_mutex_unlock(&thread->payloads_lock);
}

COX_HOT void cox_channel_thread_release_payloads(struct cox_channel_thread *thread)
{
    if (atomic_load_explicit(&thread->reply_count, memory_order_relaxed) > 0)
        thread_release_ended(thread);
}

void cox_channel_thread_drop_payloads(struct cox_channel_thread *thread)
{
    for (uint32_t slot = 0; slot < COX_DEPTH_MAX; slot++) {
        cox_large_payload_view_drop(&thread->views[slot]);
        cox_large_payload_drop(&thread->worker->large_payloads, &thread->replies[slot].payload);
        thread->replies[slot].sequence = 0;
    }
    atomic_store_explicit(&thread->reply_count, 0, memory_order_relaxed);
}

int cox_worker_reply_grow(struct cox_worker *worker, size_t size, uint8_t **ret_reply,
                          struct cox_error *err)
{
    struct cox_channel_thread *thread = &worker->threads[COX_CHANNEL_EXECUTE];
    struct cox_opaque_reply *reply = &thread->served.opaque;
    if (!reply->runs || !pthread_equal(thread->self, pthread_self()))
        return cox_fail(err, COX_STATE, "no opaque request is being replied to on this thread");
    if (size <= reply->slot_capacity) {
        reply->bytes = reply->slot;
        reply->capacity = reply->slot_capacity;
        *ret_reply = reply->slot;
        return 0;
    }
    if (!cox_channel_thread_has_payloads(thread))
        return cox_fail(err, COX_TOO_LARGE, "the reply has %zu bytes, a slot holds %zu", size,
                        reply->slot_capacity);
    cox_worker_allow_leave(false); /* if the callback were left here, the locks would stay locked */
    int r = cox_channel_thread_reserve_payload(thread, thread->served.request.sequence, size,
                                               ret_reply, err);
    cox_worker_allow_leave(true);
    if (r)
        return r;
    reply->bytes = *ret_reply;
    reply->capacity = size;
    return 0;
}
