#include "channel/base/idioms.h"
#include "channel/shm/reply.h"
#include "channel/shm/state.h"
#include "proto/large_payload_ref.h"
#include "proto/legacy/legacy_failure.h"
#include "proto/operation.h"
#include "proto/wire.h"
#include "serve_internal.h"

#include <string.h>

/* The interval at which a wait for a legacy coordinator's token checks whether the worker leaves.
 */
#define SLICE_MS 50

/* status and text: of a failure. */
COX_HOT static void thread_publish(struct cox_channel_thread *thread, uint64_t sequence,
                                   size_t length, bool message, int status, const char *text)
{
    cox_channel_thread_record_reply(thread, sequence, status, length);
    cox_reply_commit(&thread->channel, thread->worker->options.rank, sequence, length, message);
    cox_lending_ready(thread, sequence, status ? COX_LENT_FAILURE : COX_LENT_REPLY, text);
}

COX_HOT void cox_channel_thread_send(struct cox_channel_thread *thread, uint64_t sequence,
                                     size_t length, bool message)
{
    thread_publish(thread, sequence, length, message, 0, "");
}

void cox_channel_thread_done(struct cox_channel_thread *thread, bool post)
{
    const uint64_t sequence = thread->served.request.sequence;
    cox_channel_thread_record_reply(thread, sequence, 0, 0);
    cox_lending_ready(thread, sequence, post ? COX_LENT_TOKEN : COX_LENT_NONE, "");
}

/* Waits for the slot: a legacy coordinator may send the next request before it has read the last
 * reply. Returns false if the worker leaves before. */
__attribute__((cold, noinline)) static bool thread_await_slot(struct cox_channel_thread *thread)
{
    struct cox_worker *worker = thread->worker;
    struct cox_gate *gate = &thread->channel.gate;
    const uint32_t rank = worker->options.rank;
    int r = 0;
    do
        if (!cox_worker_limits(worker)->coordinator_words)
            r = cox_gate_wait(gate, rank, COX_WAKEUP_RESPONSE_PRODUCE, 0,
                              cox_deadline_after_ms(SLICE_MS));
    while ((r == COX_TIMEOUT || r == COX_EMPTY) &&
           !atomic_load_explicit(&worker->stopping, memory_order_acquire));
    if (r == 0)
        cox_gate_absorb(gate, rank, COX_WAKEUP_RESPONSE_PRODUCE);
    return r == 0;
}

COX_HOT bool cox_channel_thread_begin_reply(struct cox_channel_thread *thread, uint64_t sequence)
{
    /* Elsewhere the slot has been free since the coordinator published this sequence: see claim in
     * coordinator/collector/collector.h. */
    if (thread->channel.gate.credits && !thread_await_slot(thread))
        return false;
    cox_channel_thread_set_state(thread, COX_RANK_REPLYING, sequence);
    return true;
}

COX_HOT uint8_t *cox_channel_thread_slot(struct cox_channel_thread *thread, uint64_t sequence,
                                         bool whole, size_t *ret_capacity)
{
    if (!cox_channel_thread_begin_reply(thread, sequence))
        return NULL;
    return cox_reply_slot(&thread->channel, thread->worker->options.rank, sequence, whole,
                          ret_capacity);
}

void cox_channel_thread_fail(struct cox_channel_thread *thread, ExecuteResponse *response,
                             int status)
{
    response->status = status;
    response->has_status = 1;
    response->error_text =
        thread->error.text[0] ? thread->error.text : (char *)(uintptr_t)cox_status_text(status);
    response->result_case = RESULT(_NOT_SET);
    response->execute_model_response = NULL;
}

/* In a legacy group: returns true if only rank 0 replies, with a payload that may fill the region.
 * Types that do not belong to this channel use slots if there is room, so that every rank can
 * report the error. */
static bool thread_whole(const struct cox_channel_thread *thread, uint32_t type)
{
    if (!cox_worker_limits(thread->worker)->whole_replies)
        return false;
    if (thread->channel.id == COX_CHANNEL_LINK)
        return true;
    const struct cox_operation *operation = cox_operation_find(type);
    return operation && operation->channel == thread->channel.id && !operation->legacy_slotted;
}

COX_HOT static inline void response_head(const struct cox_channel_thread *thread, uint32_t type,
                                         ExecuteResponse *response)
{
    response->has_msg_type = response->has_rank = response->has_status = 1;
    response->msg_type = (int32_t)type;
    response->rank = (int32_t)thread->worker->options.rank;
}

void cox_channel_thread_send_payload(struct cox_channel_thread *thread, uint64_t sequence,
                                     uint32_t type, uint64_t size)
{
    struct cox_large_payload_ref ref = cox_channel_thread_refer_payload(thread, sequence, size);
    Coxswain__LargePayloadRef reference;
    ExecuteResponse response = COXSWAIN__EXECUTE_RESPONSE__INIT;
    cox_large_payload_ref_fill(&reference, &ref);
    response.large_payload = &reference;
    response_head(thread, type, &response);
    size_t capacity, length;
    uint8_t *slot = cox_channel_thread_slot(thread, sequence, false, &capacity);
    int r = cox_wire_response_pack(&response, slot, capacity, &length);
    COX_ASSERT(r == 0); /* it fits the smallest slot */
    cox_channel_thread_send(thread, sequence, length, type == COX_TYPE_OPAQUE);
}

/* Sends a reply that does not fit the slot. Returns 0: it is sent; or why not, in the channel
 * thread's error. */
static int thread_reply_out_of_line(struct cox_channel_thread *thread, uint64_t sequence,
                                    uint32_t type, const ExecuteResponse *response, size_t capacity)
{
    const size_t size = cox_wire_response_size(response);
    uint8_t *large;
    size_t length;
    thread->error.code = 0;
    if (!cox_channel_thread_has_payloads(thread))
        return cox_fail(&thread->error, COX_TOO_LARGE,
                        "the reply has %zu bytes, a slot holds %zu: use a larger response region",
                        size, capacity);
    int r = cox_channel_thread_reserve_payload(thread, sequence, size, &large, &thread->error);
    if (r)
        return r;
    r = cox_wire_response_pack(response, large, size, &length);
    COX_ASSERT(r == 0);
    cox_channel_thread_send_payload(thread, sequence, type, length);
    return 0;
}

void cox_channel_thread_send_failure(struct cox_channel_thread *thread, uint64_t sequence,
                                     uint32_t type, ExecuteResponse *response, char *text,
                                     uint8_t *slot, size_t capacity)
{
    struct cox_legacy_reply legacy_reply;
    const int status = response->status; /* which a legacy reply replaces */
    size_t length = 0;
    response_head(thread, type, response);
    if (!cox_worker_limits(thread->worker)->coordinator_words)
        cox_legacy_failure_fill(
            &(struct cox_legacy_failure){.channel = thread->channel.id,
                                         .type = type,
                                         .device = thread->worker->options.device,
                                         .message = thread->message,
                                         .arena = &thread->arena,
                                         .error = &thread->error},
            response, &legacy_reply);
    int r = cox_wire_response_pack(response, slot, capacity, &length);
    if (r == COX_TOO_LARGE && response->has_error_detail) {
        response->has_error_detail = 0;
        r = cox_wire_response_pack(response, slot, capacity, &length);
    }
    while (r == COX_TOO_LARGE && text[0]) {
        text[strlen(text) / 2] = '\0';
        cox_text_trim(text);
        response->error_text = text;
        r = cox_wire_response_pack(response, slot, capacity, &length);
    }
    response->result_case = RESULT(_NOT_SET); /* its parts belong to this function */
    response->execute_model_response = NULL;
    thread_publish(thread, sequence, length, true, status,
                   response->error_text ? response->error_text : "");
}

COX_HOT void cox_channel_thread_reply(struct cox_channel_thread *thread, ExecuteResponse *response)
{
    struct cox_worker *worker = thread->worker;
    const uint64_t sequence = thread->served.request.sequence;
    const uint32_t type = thread->served.request.type;
    bool whole = thread_whole(thread, type);
    bool silent = whole && worker->options.rank > 0;
    size_t capacity, length = 0;
    uint8_t *slot = cox_channel_thread_slot(thread, sequence, whole, &capacity);
    if (!slot)
        return;
    bool failed = response->status != 0;
    if (silent) {
        cox_channel_thread_done(thread, true);
        if (failed) /* the report is the only notice, and is about no request */
            cox_worker_tell(worker, -1, sequence, response->error_text ? response->error_text : "",
                            cox_deadline_after_ms(NOTICE_MS));
        return;
    }
    response_head(thread, type, response);
    int r = failed ? 0 : cox_wire_response_pack(response, slot, capacity, &length);
    if (r == COX_TOO_LARGE) {
        r = thread_reply_out_of_line(thread, sequence, type, response, capacity);
        if (r == 0)
            return;
        cox_channel_thread_fail(thread, response, r);
        failed = true;
    }
    if (failed)
        cox_channel_thread_send_failure(thread, sequence, type, response, thread->error.text, slot,
                                        capacity);
    else
        cox_channel_thread_send(thread, sequence, length, false);
}
