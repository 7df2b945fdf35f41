/* submit: checks requests, packs them into their frames, and publishes them; calls wait for the
 * reply. */
#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/base/options.h"
#include "channel/recorder/probes.h"
#include "channel/shm/parts.h"
#include "channel/shm/request.h"
#include "coordinator/collector/collector.h"
#include "coordinator/collector/reentrancy.h"
#include "proto/executor.pb-c.h"
#include "proto/large_payload_ref.h"
#include "proto/operation.h"
#include "proto/step_wire.h"
#include "proto/utf8.h"
#include "proto/wire.h"
#include "engine_gate.h"
#include "executor_internal.h"

#include <coxswain/executor.h>

#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* A number outside ExecuteType. */
#define NO_TYPE (COX_TYPE_OPAQUE_LARGE - 1)

/* Returns 0; COX_TOO_LARGE; COX_INVALID: a string of the message is no UTF-8. */
COX_HOT static int payload_pack(const struct cox_payload *payload, uint8_t *frame, size_t capacity,
                                size_t *ret_length, struct cox_error *err)
{
    /* A step without announcements has no strings. */
    if (payload->request &&
        cox_step_wire_pack_request(payload->request, frame, capacity, ret_length))
        return 0;
    if (payload->request) {
        int r = cox_utf8_check_request(payload->request, err);
        return r ? r : cox_wire_request_pack(payload->request, frame, capacity, ret_length);
    }
    if (payload->size > capacity)
        return COX_TOO_LARGE;
    *ret_length = payload->size;
    if (payload->parts)
        cox_parts_join(frame, payload->parts, payload->size);
    else if (payload->bytes)
        cox_copy(frame, payload->bytes, payload->size);
    else if (payload->size)
        return cox_fail(err, COX_INVALID, "memory for a request of %zu bytes, which fits its frame",
                        payload->size);
    return 0;
}

/* Memory of the frame for a payload, and the payload in it. */
static int payload_write(struct cox_collector *collector, const struct cox_payload *payload,
                         uint64_t sequence, size_t size, struct cox_large_payload **ret_payload,
                         size_t *ret_packed, struct cox_error *err)
{
    const struct iovec whole = {(void *)(uintptr_t)payload->bytes, size};
    const struct iovec *parts = payload->bytes ? &whole : payload->parts;
    const struct cox_payload_content content = {
        .memory = payload->memory,
        .parts = size > COX_LARGE_PAYLOAD_KEEP_SIZE ? parts : NULL,
    };
    *ret_packed = size;
    int r = cox_collector_prepare_payload(collector, sequence, &content, size, ret_payload, err);
    if (r || content.memory || content.parts)
        return r;
    r = payload_pack(payload, (*ret_payload)->region.base, (*ret_payload)->region.size, ret_packed,
                     NULL);
    COX_ASSERT(r == 0);
    return 0;
}

/* For ranks of other machines: the transport takes a copy while the request is committed.
 * *ret_owned: what is freed then. */
static int payload_pack_away(const struct cox_payload *payload, size_t size,
                             struct cox_entry *entry, void **ret_owned)
{
    size_t packed = size;
    entry->away = payload->bytes;
    if (!payload->bytes) {
        *ret_owned = cox_allocate_large(NULL, size);
        if (!*ret_owned)
            return COX_NO_SPACE;
        int r = payload_pack(payload, *ret_owned, size, &packed, NULL);
        COX_ASSERT(r == 0);
        entry->away = *ret_owned;
    }
    entry->large_size = packed;
    return 0;
}

/* A payload that does not fit the frame is sent out of line, and the frame has the reference.
 * Without the collector's lock. */
static int payload_pack_out_of_line(struct cox_collector *collector,
                                    const struct cox_payload *payload, struct cox_entry *entry,
                                    uint8_t *frame, size_t capacity, size_t *ret_length,
                                    void **ret_owned, struct cox_error *err)
{
    const char *name = cox_channel_name(collector->channel->id);
    const size_t size = payload->request ? cox_wire_request_size(payload->request) : payload->size;
    uint64_t size_max = collector->large_payloads->request_size_max;
    if ((payload->request || payload->packed) && size_max > INT32_MAX) /* protobuf's own limit */
        size_max = INT32_MAX;
    if (size_max == 0)
        return cox_fail(
            err, COX_TOO_LARGE,
            "%s: a request of %zu bytes, a frame holds %zu: use a larger request region", name,
            size, capacity);
    if (size > size_max)
        return cox_fail(err, COX_TOO_LARGE,
                        "%s: a request of %zu bytes, a frame holds %zu and a large payload %" PRIu64
                        " at most",
                        name, size, capacity, size_max);
    struct cox_large_payload *large;
    struct cox_error why = {0};
    size_t packed;
    if (collector->transport) {
        *ret_length = 0;
        int r = payload_pack_away(payload, size, entry, ret_owned);
        return r ? cox_fail(err, r, "%s: no memory for a request of %zu bytes", name, size) : 0;
    }
    int r = payload_write(collector, payload, entry->sequence, size, &large, &packed, &why);
    if (r)
        return cox_fail(err, r, "%s: a request of %zu bytes: %s", name, size, why.text);
    cox_fault_point(COX_FAULT_LARGE_PAYLOAD_WRITTEN);
    struct cox_large_payload_ref ref = cox_large_payload_refer(large, packed);
    Coxswain__LargePayloadRef reference;
    Coxswain__ExecuteRequest outer = COXSWAIN__EXECUTE_REQUEST__INIT;
    cox_large_payload_ref_fill(&reference, &ref);
    outer.large_payload = &reference;
    if (payload->packed) {
        COX_SET(&outer, execute_type, entry->type);
    } else if (payload->request) {
        outer.has_execute_type = payload->request->has_execute_type;
        outer.execute_type = payload->request->execute_type;
        outer.has_deadline_ns = payload->request->has_deadline_ns;
        outer.deadline_ns = payload->request->deadline_ns;
    }
    r = cox_wire_request_pack(&outer, frame, capacity, ret_length);
    COX_ASSERT(r == 0); /* the smallest frame has room for it */
    entry->large_size = packed;
    return 0;
}

COX_HOT int cox_executor_pack(struct cox_collector *collector, const struct cox_payload *payload,
                              struct cox_entry *entry, struct cox_error *err)
{
    size_t capacity, length;
    void *owned = NULL;
    entry->recorded_packing = cox_recorder_submits_now(&collector->recorder);
    COX_PROBE(request__pack, collector->channel->id, entry->sequence, entry->type, 0);
    uint8_t *frame = cox_request_frame(collector->channel, entry->sequence, &capacity);
    int r = payload_pack(payload, frame, capacity, &length, err);
    if (r == COX_TOO_LARGE) { /* writing a gigabyte takes time */
        pthread_mutex_unlock(&collector->lock);
        r = payload_pack_out_of_line(collector, payload, entry, frame, capacity, &length, &owned,
                                     err);
        pthread_mutex_lock(&collector->lock);
    }
    if (r == 0)
        cox_collector_commit(collector, entry, length);
    else
        pthread_mutex_unlock(&collector->lock);
    free(owned);
    return r;
}

COX_HOT static int executor_publish(struct cox_executor *executor,
                                    const struct cox_payload *payload, struct cox_entry *entry,
                                    struct cox_error *err)
{
    struct cox_collector *collector = &executor->collectors[entry->operation->channel];
    const char *name = cox_channel_name(collector->channel->id);
    pthread_mutex_lock(&collector->submit_lock);
    int r = 0;
    if (atomic_load_explicit(&collector->stopping, memory_order_acquire))
        r = cox_fail(err, COX_CLOSED, "%s: the group is being stopped", name);
    else if (entry->operation->step)
        r = cox_executor_admit_step(executor, err);
    else if (entry->type == COXSWAIN__EXECUTE_TYPE__MODEL_INIT && cox_collector_in_step(collector))
        /* The first rank in an init leaves the rank group, in which others may not have finished
         * the step. */
        r = cox_fail(err, COX_FULL, "%s: an init waits for the end of the steps in flight", name);
    cox_collector_release_payloads(collector);
    if (r == 0)
        r = cox_collector_begin(collector, entry, err);
    if (r == 0 && entry->epoch && entry->epoch != cox_executor_epoch(executor)) {
        /* After begin: a rank that was started again can be asked only after it was counted. */
        pthread_mutex_unlock(&collector->lock);
        r = cox_fail(err, COX_STALE,
                     "%s: ranks were started or initialized again since this request was planned",
                     name);
    } else if (r == 0) {
        r = cox_executor_pack(collector, payload, entry, err);
    }
    if (r == 0 && entry->type == COXSWAIN__EXECUTE_TYPE__MODEL_INIT)
        cox_executor_note_sent(executor);
    pthread_mutex_unlock(&collector->submit_lock);
    return r;
}

COX_HOT static int entry_prepare(struct cox_executor *executor, uint32_t type,
                                 const struct cox_submit_options *options,
                                 struct cox_entry *ret_entry, struct cox_error *err)
{
    const struct cox_operation *operation = cox_operation_find(type);
    if (!operation || operation->channel == COX_CHANNEL_ERROR)
        return cox_fail(err, COX_INVALID, "execute type %" PRIu32 " is no request", type);
    if (type == COXSWAIN__EXECUTE_TYPE__MODEL_FINALIZE)
        return cox_fail(err, COX_INVALID, "finalize is sent by cox_executor_stop");
    if (type == COX_TYPE_OPAQUE && !executor->geometry.mode->limits.extensions)
        return cox_fail(err, COX_UNSUPPORTED, "legacy workers know no opaque requests");
    struct cox_entry entry = {
        .type = type,
        .operation = operation,
        .gather = operation->replies ? options->gather : COX_GATHER_NONE,
        .replies = operation->replies,
        .reports_late = options->report_late,
        .deadline_ns = options->deadline_ns,
        .submitted_ns = cox_now_ns(),
        .request_context = options->request_context,
        .epoch = options->epoch,
        .asked = cox_rank_set_first(executor->geometry.rank_count),
    };
    entry.recorded_submit = cox_recorder_submits_time(
        &executor->collectors[operation->channel].recorder, entry.submitted_ns);
    if (operation->replies && options->deadline_ns <= entry.submitted_ns) {
        int r = cox_deadline_check(options->deadline_ns, err);
        return r ? r
                 : cox_fail(err, COX_TIMEOUT,
                            "%s: the deadline has passed already; it is absolute, on "
                            "CLOCK_MONOTONIC: cox_deadline_after_ms",
                            operation->name);
    }
    if (operation->replies && options->gather == COX_GATHER_NONE)
        return cox_fail(err, COX_INVALID,
                        "%s has replies: gather NONE is for requests without a reply",
                        operation->name);
    if (options->asked) {
        struct cox_rank_set all = entry.asked;
        uint64_t outside = 0, any = 0;
        for (size_t i = 0; i < COX_RANK_COUNT_MAX / 64; i++) {
            outside |= options->asked->words[i] & ~all.words[i];
            any |= options->asked->words[i];
        }
        if (outside || !any)
            return cox_fail(err, COX_INVALID,
                            "the set of asked ranks is empty or names a rank over %" PRIu32,
                            executor->geometry.rank_count - 1);
        if (!executor->geometry.mode->limits.extensions &&
            memcmp(options->asked, &all, sizeof all) != 0)
            return cox_fail(err, COX_UNSUPPORTED, "legacy workers are always asked together");
        entry.asked = *options->asked;
    }
    *ret_entry = entry;
    return 0;
}

COX_HOT static int executor_submit(struct cox_executor *executor, uint32_t type,
                                   const struct cox_payload *payload,
                                   const struct cox_submit_options *options, uint64_t *ret_sequence,
                                   struct cox_error *err)
{
    _cox_cleanup_(cox_executor_exit) struct cox_executor *entered = cox_executor_enter(executor);
    (void)entered;
    struct cox_submit_options known;
    struct cox_entry entry;
    int r = cox_options_copy(&known, sizeof known, options, "cox_submit_options", err);
    if (r == 0)
        r = entry_prepare(executor, type, &known, &entry, err);
    if (r)
        return r;
    enum cox_channel_id channel = entry.operation->channel;
    struct cox_collector *collector = &executor->collectors[channel];
    COX_PROBE(request__submit, channel, 0, type, entry.submitted_ns);
    if (entry.replies && !cox_executor_is_async(channel))
        return cox_fail(err, COX_INVALID, "%s blocks until its replies are there: use call",
                        entry.operation->name);
    if (entry.replies && !atomic_load_explicit(&collector->handled, memory_order_relaxed))
        return cox_fail(err, COX_STATE, "no handler is registered for the %s channel",
                        cox_channel_name(channel));
    r = executor_publish(executor, payload, &entry, err);
    if (r == 0 && ret_sequence)
        *ret_sequence = entry.sequence;
    return r;
}

static int executor_call(struct cox_executor *executor, uint32_t type,
                         const struct cox_payload *payload,
                         const struct cox_submit_options *options, cox_completion_fn handler,
                         void *handler_context, struct cox_error *err)
{
    _cox_cleanup_(cox_executor_exit) struct cox_executor *entered = cox_executor_enter(executor);
    (void)entered;
    if (cox_reentrancy_inside(executor))
        return cox_fail(
            err, COX_DEADLOCK,
            "a call from inside a handler or hook would wait for itself: submit, or call from another thread");
    struct cox_submit_options known;
    struct cox_entry entry;
    int r = cox_options_copy(&known, sizeof known, options, "cox_submit_options", err);
    if (r == 0)
        r = cox_deadline_check(known.deadline_ns, err);
    if (r == 0)
        r = entry_prepare(executor, type, &known, &entry, err);
    if (r)
        return r;
    enum cox_channel_id channel = entry.operation->channel;
    struct cox_collector *collector = &executor->collectors[channel];
    COX_PROBE(request__submit, channel, 0, type, entry.submitted_ns);
    struct cox_waiter waiter = {0};
    entry.waiter = entry.replies ? &waiter : NULL;
    entry.reports_late = false; /* a call has one completion */
    for (;;) {
        struct cox_error why;
        cox_error_clear(&why);
        r = executor_publish(executor, payload, &entry, &why);
        bool room = r != COX_FULL && r != COX_LATE;
        if (!room && cox_now_ns() < known.deadline_ns) {
            cox_collector_await_room(collector, known.deadline_ns);
            continue;
        }
        if (r)
            r = cox_fail(err, room ? r : COX_TIMEOUT, "%s%s",
                         room ? "" : "no room in time: ", why.text);
        break;
    }
    return r == 0 && entry.replies
               ? cox_collector_await(collector, &waiter, handler, handler_context, err)
               : r;
}

/* A message has a type of the protocol, not one of those for bytes. */
static uint32_t message_type(const Coxswain__ExecuteRequest *request)
{
    uint32_t type = (uint32_t)request->execute_type;
    return type == COX_TYPE_OPAQUE ? NO_TYPE : type;
}

int cox_executor_completions(struct cox_executor *executor, enum cox_channel_id channel,
                             struct cox_completion *ret_completions, uint32_t count_max,
                             uint64_t deadline_ns, uint32_t *ret_count, struct cox_error *err)
{
    _cox_cleanup_(cox_executor_exit) struct cox_executor *entered = cox_executor_enter(executor);
    (void)entered;
    if (!cox_executor_is_async(channel) || count_max == 0)
        return cox_fail(err, COX_INVALID,
                        "completions are collected on the execute and transfer channels, one at "
                        "least");
    if (!executor->options.collect)
        return cox_fail(err, COX_STATE,
                        "this group's completions go to handlers: start it with options.collect");
    if (cox_reentrancy_inside(executor))
        return cox_fail(err, COX_DEADLOCK,
                        "completions are collected outside of the handlers of calls, and of hooks");
    int r = cox_collector_collect(&executor->collectors[channel], ret_completions, count_max,
                                  deadline_ns, ret_count);
    return r ? cox_fail(err, r, "%s: %s", cox_channel_name(channel),
                        r == COX_BUSY     ? "another thread is collecting"
                        : r == COX_CLOSED ? "the group has been stopped, and all is collected"
                                          : "no completion in time")
             : 0;
}

bool cox_executor_take_reply(struct cox_executor *executor, enum cox_channel_id channel,
                             const struct cox_rank_result *result)
{
    _cox_cleanup_(cox_executor_exit) struct cox_executor *entered = cox_executor_enter(executor);
    (void)entered;
    return cox_executor_is_async(channel) && executor->options.collect &&
           cox_collector_take_reply(&executor->collectors[channel], result);
}

void cox_executor_free_reply(void *bytes)
{
    cox_replies_free_reply(bytes);
}

int cox_executor_fd(struct cox_executor *executor, enum cox_channel_id channel, int *ret_fd,
                    struct cox_error *err)
{
    _cox_cleanup_(cox_executor_exit) struct cox_executor *entered = cox_executor_enter(executor);
    (void)entered;
    if (!cox_executor_is_async(channel))
        return cox_fail(err, COX_INVALID,
                        "completions are collected on the execute and transfer channels");
    if (!executor->options.collect)
        return cox_fail(err, COX_STATE,
                        "this group's completions go to handlers: start it with options.collect");
    int r = cox_collector_fd(&executor->collectors[channel], executor->notify_fds, ret_fd);
    return r ? cox_fail(err, r, "%s: an fd for completions: %s", cox_channel_name(channel),
                        cox_status_text(r))
             : 0;
}

COX_HOT int cox_executor_submit(struct cox_executor *executor,
                                const Coxswain__ExecuteRequest *request,
                                const struct cox_submit_options *options, uint64_t *ret_sequence,
                                struct cox_error *err)
{
    const struct cox_payload payload = {.request = request};
    return executor_submit(executor, message_type(request), &payload, options, ret_sequence, err);
}

COX_HOT int cox_executor_submit_opaque(struct cox_executor *executor, const void *bytes,
                                       size_t size, const struct cox_submit_options *options,
                                       uint64_t *ret_sequence, struct cox_error *err)
{
    const struct cox_payload payload = {.bytes = bytes, .size = size};
    return executor_submit(executor, COX_TYPE_OPAQUE, &payload, options, ret_sequence, err);
}

int cox_executor_submit_parts(struct cox_executor *executor, const struct iovec *parts,
                              size_t part_count, const struct cox_submit_options *options,
                              uint64_t *ret_sequence, struct cox_error *err)
{
    struct cox_payload payload = {.parts = parts};
    for (size_t i = 0; i < part_count; i++)
        payload.size += parts[i].iov_len;
    return executor_submit(executor, COX_TYPE_OPAQUE, &payload, options, ret_sequence, err);
}

int cox_executor_call(struct cox_executor *executor, const Coxswain__ExecuteRequest *request,
                      const struct cox_submit_options *options, cox_completion_fn handler,
                      void *handler_context, struct cox_error *err)
{
    const struct cox_payload payload = {.request = request};
    return executor_call(executor, message_type(request), &payload, options, handler,
                         handler_context, err);
}

int cox_executor_call_opaque(struct cox_executor *executor, const void *bytes, size_t size,
                             const struct cox_submit_options *options, cox_completion_fn handler,
                             void *handler_context, struct cox_error *err)
{
    const struct cox_payload payload = {.bytes = bytes, .size = size};
    return executor_call(executor, COX_TYPE_OPAQUE, &payload, options, handler, handler_context,
                         err);
}
