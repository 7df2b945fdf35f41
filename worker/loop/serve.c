/* serve: one request of one channel thread: unpack, call back, reply. */
#include "channel/base/base_internal.h"
#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/shm/reply.h"
#include "channel/shm/state.h"
#include "proto/operation.h"
#include "proto/wire.h"
#include "worker/sequences/adapter_references.h"
#include "worker/sequences/weights_candidate.h"
#include "serve_internal.h"
#include "worker_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define TYPE(name) COXSWAIN__EXECUTE_TYPE__##name
#define REQUEST(name) COXSWAIN__EXECUTE_REQUEST__REQUEST_##name
/* How long an unload waits for the adapter's sequences if the request has no deadline. */
#define LORA_RETIRE_MS 5000
#define LORA_REPLY_MS 500

/* ---- steps ---- */

/* Replies in the form of the request. Returns false without memory. */
static bool step_fill_nested(struct cox_channel_thread *thread, const struct cox_batch *batch,
                             const struct cox_batch_output *outputs,
                             Coxswain__ExecuteModelResponse *body)
{
    struct nested_row {
        Coxswain__CompletionSequenceGroupOutput group;
        Coxswain__SequenceOutput sample;
        Coxswain__SequenceOutput *sample_pointer;
        int64_t token;
        float logprob;
    };
    struct nested_row *rows =
        cox_arena_alloc(&thread->arena, (batch->row_count + 1) * sizeof *rows);
    Coxswain__CompletionSequenceGroupOutput **pointers =
        cox_arena_alloc(&thread->arena, (batch->row_count + 1) * sizeof *pointers);
    if (!rows || !pointers)
        return false;
    for (uint32_t i = 0; i < batch->row_count; i++) {
        struct nested_row *row = &rows[i];
        coxswain__completion_sequence_group_output__init(&row->group);
        coxswain__sequence_output__init(&row->sample);
        row->token = outputs[i].token;
        row->logprob = outputs[i].logprob;
        row->sample.has_seq_id = row->sample.has_finish_reason = 1;
        row->sample.seq_id = batch->rows[i].id;
        COX_SET(&row->sample, parent_seq_id, batch->rows[i].id);
        row->sample.n_output_token = row->sample.n_logprob = outputs[i].token >= 0;
        row->sample.output_token = &row->token;
        row->sample.logprob = &row->logprob;
        row->sample_pointer = &row->sample;
        row->group.n_samples = 1;
        row->group.samples = &row->sample_pointer;
        pointers[i] = &row->group;
    }
    body->n_outputs = batch->row_count;
    body->outputs = pointers;
    return true;
}

/* The same as columns. */
static bool step_fill_columns(struct cox_channel_thread *thread, const struct cox_batch *batch,
                              const struct cox_batch_output *outputs, Coxswain__StepResult *result)
{
    const uint32_t count = batch->row_count;
    int32_t *tokens = cox_arena_alloc(&thread->arena, count * sizeof *tokens);
    float *logprobs = cox_arena_alloc(&thread->arena, count * sizeof *logprobs);
    if (!tokens || !logprobs)
        return false;
    for (uint32_t i = 0; i < count; i++) {
        tokens[i] = outputs[i].token;
        logprobs[i] = outputs[i].logprob;
    }
    result->n_tokens = result->n_logprobs = count;
    result->tokens = tokens;
    result->logprobs = logprobs;
    return true;
}

/* A reinit empties the sequence table, which only this thread may change. */
static void thread_forget(struct cox_channel_thread *thread)
{
    struct cox_pause *pause = &thread->worker->pause;
    /* acquire; partner: serve_recover. The plain load avoids the exchange in every step. */
    if (atomic_load_explicit(&pause->forget, memory_order_acquire) &&
        atomic_exchange_explicit(&pause->forget, false, memory_order_acquire))
        cox_table_clear(thread->worker->table);
}

void cox_worker_tell_group_time(struct cox_worker *worker, uint64_t group_ns, uint64_t wait_ns)
{
    worker->group_time_warned = true;
    worker->group_ns = group_ns;
    worker->group_wait_ns = wait_ns;
}

void cox_worker_set_digest(struct cox_worker *worker, enum cox_digest which, uint64_t value)
{
    COX_ASSERT((unsigned)which < COX_DIGEST_COUNT);
    cox_table_set_digest(worker->table, which, value);
}

COX_HOT static int call_step(struct cox_channel_thread *thread)
{
    const struct cox_worker *worker = thread->worker;
    const struct cox_served_step *step = &thread->served.step;
    return worker->callbacks->execute(worker->context, step->batch, step->outputs, &thread->error);
}

/* The part before the callback. */
COX_HOT static int step_begin(struct cox_channel_thread *thread)
{
    struct cox_worker *worker = thread->worker;
    struct cox_served_step *step = &thread->served.step;
    const ExecuteRequest *message = thread->message;
    const uint64_t sequence = thread->served.request.sequence;
    int r = 0;
    step->message = message->request_case == REQUEST(EXECUTE_MODEL_REQUEST)
                        ? message->execute_model_request
                        : NULL;
    thread_forget(thread);
    if (cox_state_void_through(cox_state_channel(&worker->control, thread->channel.id)) >= sequence)
        r = cox_fail(&thread->error, COX_ABORTED, "step %" PRIu64 " is void", sequence);
    else if (!step->message)
        r = cox_fail(&thread->error, COX_CORRUPT, "a step without an execute_model_request");
    else if (!worker->callbacks->execute && !thread->lending.on)
        r = cox_fail(&thread->error, COX_UNSUPPORTED, "this worker has no execute callback");
    else if (cox_worker_paused(worker)) /* before any part of the step is read */
        r = cox_channel_thread_fail_paused(thread);
    if (r == 0 && message->weights)
        r = cox_weights_candidate_read(message, &step->candidate, &thread->error);
    if (r == 0)
        r = cox_table_apply(worker->table, sequence, step->message, &step->batch, &step->outputs,
                            &thread->error);
    if (r)
        return r;
    thread->served.kind = COX_LENT_STEP;
    thread->stamp_ns = step->begin_ns = cox_now_ns();
    cox_table_weights(worker->table, message->weights_version,
                      message->weights ? &step->candidate : NULL);
    cox_channel_thread_record_begin(thread, sequence, thread->served.request.type, step->begin_ns);
    worker->group_time_warned = false;
    return 0;
}

/* The part after the callback; r is its result. */
COX_HOT static int step_finish(struct cox_channel_thread *thread,
                               Coxswain__ExecuteModelResponse *body, Coxswain__StepResult *result,
                               int r)
{
    const struct cox_request *request = &thread->served.request;
    const struct cox_served_step *step = &thread->served.step;
    const struct cox_worker *worker = thread->worker;
    struct cox_table *table = worker->table;
    const bool lowest = request->lowest, packed = step->message->step != NULL;
    cox_fault_point(COX_FAULT_EXECUTED);
    thread->stamp_ns = cox_now_ns();
    cox_channel_thread_record_end(thread, request->sequence, request->type, r, thread->stamp_ns);
    COX_SET(body, model_execute_time, (float)((double)(thread->stamp_ns - step->begin_ns) / 1e6));
    if (worker->group_time_warned) {
        COX_SET(body, group_ns, worker->group_ns);
        COX_SET(body, group_wait_ns, worker->group_wait_ns);
    }
    /* The view is invalid after commit: take what the reply needs first. */
    if (r == 0 && lowest &&
        !(packed ? step_fill_columns(thread, step->batch, step->outputs, result)
                 : step_fill_nested(thread, step->batch, step->outputs, body)))
        r = cox_fail(&thread->error, COX_TOO_LARGE, "no memory for the reply of %" PRIu32 " rows",
                     step->batch->row_count);
    if (r == 0)
        cox_table_commit(table);
    else
        cox_table_revert(table);
    cox_fault_point(COX_FAULT_STEP_COMMITTED);
    if (r)
        return r;
    COX_SET(result, base_sequence, cox_table_base(table));
    result->n_digests = COX_STEP_CHAIN_SIZE;
    result->digests = (uint64_t *)cox_table_chain(table); /* only read */
    return 0;
}

COX_HOT void cox_channel_thread_end_step(struct cox_channel_thread *thread, int r)
{
    ExecuteResponse response = COXSWAIN__EXECUTE_RESPONSE__INIT;
    Coxswain__ExecuteModelResponse body = COXSWAIN__EXECUTE_MODEL_RESPONSE__INIT;
    Coxswain__StepResult result = COXSWAIN__STEP_RESULT__INIT;
    r = step_finish(thread, &body, &result, r);
    if (r) {
        cox_channel_thread_fail(thread, &response, r);
    } else {
        body.step = &result;
        response.result_case = RESULT(EXECUTE_MODEL_RESPONSE);
        response.execute_model_response = &body;
    }
    cox_channel_thread_reply(thread, &response);
}

static int call_cleanup(struct cox_channel_thread *thread)
{
    const struct cox_worker *worker = thread->worker;
    const Coxswain__TGCleanupRequest *cleanup = thread->message->text_generator_cleanup_request;
    const uint32_t *slots;
    uint32_t count;
    thread_forget(thread);
    cox_table_cleanup(worker->table, cleanup->seq_ids, cleanup->n_seq_ids, &slots, &count);
    if (count && worker->callbacks->cleanup)
        worker->callbacks->cleanup(worker->context, slots, count);
    return 0;
}

static void serve_cleanup(struct cox_channel_thread *thread)
{
    const ExecuteRequest *message = thread->message;
    if (message->request_case == REQUEST(TEXT_GENERATOR_CLEANUP_REQUEST) &&
        message->text_generator_cleanup_request)
        cox_channel_thread_call(thread, COX_CALLBACK_UNPAUSABLE, call_cleanup);
    cox_channel_thread_done(thread, false);
}

/* ---- the other channels ---- */

static int serve_link_status(struct cox_channel_thread *thread, ExecuteResponse *response)
{
    const struct cox_worker *worker = thread->worker;
    if (!worker->callbacks->link_status)
        return cox_fail(&thread->error, COX_UNSUPPORTED, "this worker has no link_status callback");
    Coxswain__PDLinkStatusResponse *body = cox_arena_alloc(&thread->arena, sizeof *body);
    if (!body)
        return cox_fail(&thread->error, COX_TOO_LARGE, "no memory for the reply");
    coxswain__pdlink_status_response__init(body);
    response->result_case = RESULT(PD_LINK_STATUS_RESPONSE);
    response->pd_link_status_response = body;
    return worker->callbacks->link_status(worker->context, &thread->arena, body, &thread->error);
}

static int serve_lora(struct cox_channel_thread *thread, ExecuteResponse *response)
{
    const struct cox_worker *worker = thread->worker;
    const ExecuteRequest *message = thread->message;
    if (message->request_case != REQUEST(LORA_OPERATION_REQUEST) ||
        !message->lora_operation_request)
        return cox_fail(&thread->error, COX_CORRUPT, "a LoRA operation without its request");
    Coxswain__LoraOperationResponse *body = cox_arena_alloc(&thread->arena, sizeof *body);
    if (!body)
        return cox_fail(&thread->error, COX_TOO_LARGE, "no memory for the reply");
    coxswain__lora_operation_response__init(body);
    body->lora_name = message->lora_operation_request->lora_name;
    COX_SET(body, lora_op_status, COXSWAIN__LORA_OPERATION_STATUS__UNSUPPORT_CMD);
    response->result_case = RESULT(LORA_OPERATION_RESPONSE);
    response->lora_operation_response = body;
    if (!worker->callbacks->lora)
        return 0; /* the protocol has a status for this */
    int r = worker->callbacks->lora(worker->context, message->lora_operation_request,
                                    &thread->arena, body, &thread->error);
    cox_adapter_references_open(cox_table_adapter_references(worker->table));
    return r;
}

static bool lora_cancelled(void *context)
{
    const struct cox_channel_thread *thread = context;
    const struct cox_worker *worker = thread->worker;
    return atomic_load_explicit(&worker->stopping, memory_order_acquire) ||
           cox_state_ended(cox_state_channel(&worker->control, thread->channel.id)) >=
               thread->taken;
}

/* A little before the coordinator's deadline: the reply takes time. */
static uint64_t lora_deadline(uint64_t deadline_ns)
{
    uint64_t now = cox_now_ns(), least = LORA_REPLY_MS * COX_NSEC_PER_MSEC;
    if (deadline_ns == 0)
        return cox_deadline_after_ms(LORA_RETIRE_MS);
    uint64_t left = deadline_ns > now ? deadline_ns - now : 0;
    return deadline_ns - (left / 4 < least ? left / 4 : least);
}

int cox_worker_lora_retire(struct cox_worker *worker, const char *lora_id, struct cox_error *err)
{
    struct cox_channel_thread *thread = &worker->threads[COX_CHANNEL_LINK];
    uint32_t count = 0;
    uint64_t deadline_ns = lora_deadline(thread->message->deadline_ns);
    int r = cox_adapter_references_close(cox_table_adapter_references(worker->table), lora_id,
                                         deadline_ns, lora_cancelled, thread, &count);
    if (r == COX_BUSY)
        return cox_fail(err, r, "the LoRA adapter '%.*s' is still in use by %" PRIu32 " sequence%s",
                        COX_LORA_NAME_LENGTH_MAX, lora_id, count, count == 1 ? "" : "s");
    return r ? cox_fail(err, r, "no memory to unload a LoRA adapter") : 0;
}

static int call_pull(struct cox_channel_thread *thread)
{
    const struct cox_worker *worker = thread->worker;
    return worker->callbacks->pull_kv(worker->context, thread->message->pull_kv_request,
                                      &thread->arena, thread->served.pull, &thread->error);
}

static int serve_pull(struct cox_channel_thread *thread, ExecuteResponse *response)
{
    const struct cox_worker *worker = thread->worker;
    const ExecuteRequest *message = thread->message;
    if (message->request_case != REQUEST(PULL_KV_REQUEST) || !message->pull_kv_request)
        return cox_fail(&thread->error, COX_CORRUPT, "a KV transfer without its request");
    if (!worker->callbacks->pull_kv)
        return cox_fail(&thread->error, COX_UNSUPPORTED, "this worker has no pull_kv callback");
    Coxswain__PullKVResponse *body = cox_arena_alloc(&thread->arena, sizeof *body);
    if (!body)
        return cox_fail(&thread->error, COX_TOO_LARGE, "no memory for the reply");
    coxswain__pull_kvresponse__init(body);
    response->result_case = RESULT(PULL_KV_RESPONSE);
    response->pull_kv_response = body;
    thread->served.pull = body;
    return cox_channel_thread_call(thread, COX_CALLBACK_PAUSABLE, call_pull);
}

/* A command's failure is a result (command_result), not a failed request, because every rank's
 * result is wanted. */
static int serve_recover(struct cox_channel_thread *thread, ExecuteResponse *response)
{
    const struct cox_worker *worker = thread->worker;
    const ExecuteRequest *message = thread->message;
    const struct cox_worker_callbacks *callbacks = worker->callbacks;
    int (*command)(void *, struct cox_error *) = NULL;
    switch (message->execute_type) {
    case TYPE(PAUSE_COMMAND_EXEC):
        command = callbacks->pause;
        break;
    case TYPE(PAUSE_COMMAND_EXEC_ROCE):
        command = callbacks->pause_net;
        break;
    case TYPE(CLEAR_COMMAND_EXEC):
        command = callbacks->clear;
        break;
    case TYPE(RECOVER_COMMAND_EXEC):
        command = callbacks->reinit;
        break;
    case TYPE(START_COMMAND_EXEC):
        command = callbacks->start;
        break;
    default:
        break;
    }
    Coxswain__RecoverCommandResponse *body = cox_arena_alloc(&thread->arena, sizeof *body);
    if (!body)
        return cox_fail(&thread->error, COX_TOO_LARGE, "no memory for the reply");
    coxswain__recover_command_response__init(body);
    COX_SET(body, npu_device_id, worker->options.device);
    COX_SET(body, command_result,
            command ? command(worker->context, &thread->error)
                    : cox_fail(&thread->error, COX_UNSUPPORTED,
                               "this worker has no callback for this command"));
    /* release; partner: thread_forget. */
    if (message->execute_type == TYPE(RECOVER_COMMAND_EXEC) && body->command_result == 0)
        atomic_store_explicit(&thread->worker->pause.forget, true, memory_order_release);
    if (body->command_result)
        body->error_msg = thread->error.text;
    response->result_case = RESULT(RECOVER_COMMAND_RESPONSE);
    response->recover_command_response = body;
    return 0;
}

static void serve_with(struct cox_channel_thread *thread,
                       int (*serve)(struct cox_channel_thread *, ExecuteResponse *))
{
    const struct cox_request *request = &thread->served.request;
    ExecuteResponse response = COXSWAIN__EXECUTE_RESPONSE__INIT;
    cox_channel_thread_record_begin(thread, request->sequence, request->type, 0);
    int r = serve(thread, &response);
    cox_channel_thread_record_end(thread, request->sequence, request->type, r, 0);
    if (r)
        cox_channel_thread_fail(thread, &response, r);
    thread->stamp_ns = cox_now_coarse_ns();
    cox_channel_thread_reply(thread, &response);
}

static void serve_link(struct cox_channel_thread *thread)
{
    struct cox_worker *worker = thread->worker;
    const ExecuteRequest *message = thread->message;
    if (message->request_case == REQUEST(PD_LINK_REQUEST) && message->pd_link_request &&
        worker->callbacks->link)
        worker->callbacks->link(worker->context, message->pd_link_request);
    cox_channel_thread_done(thread, false);
    /* Without a link callback a legacy coordinator would wait for ever. */
    if (!cox_worker_limits(worker)->coordinator_words && !worker->callbacks->link)
        cox_worker_tell(worker, -1, thread->served.request.sequence,
                        "this worker has no link callback", cox_deadline_after_ms(NOTICE_MS));
}

/* ---- opaque ---- */

COX_HOT static int call_opaque(struct cox_channel_thread *thread)
{
    const struct cox_worker *worker = thread->worker;
    const struct cox_request *request = &thread->served.request;
    struct cox_opaque_reply *reply = &thread->served.opaque;
    return worker->callbacks->opaque(worker->context, request->bytes, request->size, reply->slot,
                                     reply->slot_capacity, &reply->length, &thread->error);
}

COX_HOT static int opaque_begin(struct cox_channel_thread *thread)
{
    const struct cox_worker *worker = thread->worker;
    const struct cox_request *request = &thread->served.request;
    struct cox_opaque_reply *reply = &thread->served.opaque;
    if (!worker->callbacks->opaque && !thread->lending.on)
        return cox_fail(&thread->error, COX_UNSUPPORTED, "this worker has no opaque callback");
    reply->slot = reply->bytes = cox_reply_slot(&thread->channel, worker->options.rank,
                                                request->sequence, false, &reply->slot_capacity);
    reply->capacity = reply->slot_capacity;
    reply->length = 0;
    thread->served.kind = COX_LENT_OPAQUE;
    COX_PROBE(callback__enter, thread->channel.id, request->sequence, request->type, 0);
    return 0;
}

COX_HOT static void answer_opaque(struct cox_channel_thread *thread)
{
    struct cox_opaque_reply *reply = &thread->served.opaque;
    const uint64_t sequence = thread->served.request.sequence;
    reply->runs = true;
    int r = cox_channel_thread_call(thread, COX_CALLBACK_PAUSABLE, call_opaque);
    reply->runs = false;
    COX_PROBE(callback__return, thread->channel.id, sequence, COX_TYPE_OPAQUE, r);
    if (r == 0 && reply->length > reply->capacity)
        r = cox_fail(&thread->error, COX_TOO_LARGE,
                     "the reply has %zu bytes, there is room for %zu: cox_worker_reply_grow makes "
                     "more, before the reply is written",
                     reply->length, reply->capacity);
    if (r == 0 && reply->length > reply->slot_capacity) {
        cox_channel_thread_send_payload(thread, sequence, COX_TYPE_OPAQUE, reply->length);
        return;
    }
    if (r == 0 && !cox_channel_thread_begin_reply(thread, sequence))
        return;
    if (reply->bytes != reply->slot) { /* it grew */
        if (r == 0)
            memcpy(reply->slot, reply->bytes, reply->length);
        cox_channel_thread_release_payload(thread, sequence);
    }
    if (r == 0)
        cox_channel_thread_send(thread, sequence, reply->length, false);
    else
        cox_channel_thread_refuse(thread, r);
}

/* ---- open ---- */

/* A private copy: other ranks of a named group could write the frame while it is unpacked. */
COX_HOT static int thread_copy(struct cox_channel_thread *thread, const struct cox_request *request)
{
    if (thread->copy_size < request->size) {
        uint8_t *grown = realloc(thread->copy, request->size);
        if (!grown)
            return cox_fail(&thread->error, -ENOMEM, "no memory for a request of %zu bytes",
                            request->size);
        thread->copy = grown;
        thread->copy_size = request->size;
    }
    if (request->size >
        0) /* a message with default values has no bytes, and copy may still be NULL */
        memcpy(thread->copy, request->bytes, request->size);
    /* A process that has overwritten this rank's words may have made the coordinator take the frame
     * for free; then the copy is partly the next request. */
    const struct cox_control *control = &thread->worker->control;
    if (!cox_state_frame_holds(cox_state_channel(control, thread->channel.id),
                               control->geometry.depth, request->sequence))
        return cox_fail(&thread->error, COX_CORRUPT,
                        "the frame was written again while it was read");
    return 0;
}

COX_HOT static int thread_parse(struct cox_channel_thread *thread, const uint8_t *bytes,
                                size_t size, ExecuteRequest **ret_message)
{
    int r = cox_wire_request_unpack(&thread->arena, bytes, size, ret_message);
    return r ? cox_fail(&thread->error, r, "a request of %zu bytes that is no ExecuteRequest", size)
             : 0;
}

/* Unpacks the message, which may be out of line. Opaque bytes that are out of line stay there, and
 * have no message. */
COX_HOT static int thread_unpack(struct cox_channel_thread *thread)
{
    struct cox_served *served = &thread->served;
    struct cox_request *request = &served->request;
    ExecuteRequest *message = NULL;
    cox_arena_reset(&thread->arena);
    int r = thread_copy(thread, request);
    if (r == 0)
        r = thread_parse(thread, thread->copy, request->size, &message);
    served->out_of_line =
        r == 0 && message->large_payload && cox_channel_thread_has_payloads(thread);
    if (served->out_of_line)
        r = cox_channel_thread_open_payload(thread, request->sequence, message->large_payload,
                                            &request->bytes, &request->size);
    if (request->type == COX_TYPE_OPAQUE_LARGE)
        return r || served->out_of_line
                   ? r
                   : cox_fail(&thread->error, COX_CORRUPT,
                              "opaque bytes in a large payload without its reference");
    if (served->out_of_line && r == 0) {
        if (thread->worker->request_size_default)
            thread->arena.size_max += 2 * request->size;
        r = thread_parse(thread, request->bytes, request->size, &message);
    }
    if (served->out_of_line)
        cox_channel_thread_close_payload(thread, request->sequence);
    if (r == 0)
        thread->message = message;
    return r;
}

static bool thread_is_goodbye(const struct cox_channel_thread *thread)
{
    /* The record must agree: overwritten bytes of a frame must not end a rank. */
    return thread->message->execute_type == TYPE(MODEL_FINALIZE) &&
           thread->served.request.type == TYPE(MODEL_FINALIZE);
}

COX_HOT static int thread_begin(struct cox_channel_thread *thread)
{
    const uint32_t type = (uint32_t)thread->message->execute_type;
    const struct cox_operation *operation = cox_operation_find(type);
    if (!operation || operation->channel != thread->channel.id ||
        type != thread->served.request.type)
        return cox_fail(&thread->error, COX_CORRUPT, "%s does not belong on the %s channel",
                        cox_wire_type_name(type), cox_channel_name(thread->channel.id));
    if (type == TYPE(MODEL_INFER) || type == TYPE(MODEL_INFER_SECOND))
        return step_begin(thread);
    if (type == TYPE(MODEL_INIT))
        return cox_channel_thread_begin_init(thread);
    thread->served.kind = COX_LENT_MESSAGE;
    thread->stamp_ns = cox_now_coarse_ns();
    return 0;
}

/* Requests without a reply get none: a legacy coordinator would take the token of such a reply for
 * the one of its next request. */
__attribute__((noinline)) static void thread_reject(struct cox_channel_thread *thread, int status)
{
    const struct cox_request *request = &thread->served.request;
    const struct cox_operation *operation = cox_operation_find(request->type);
    if (operation && !operation->replies) {
        cox_channel_thread_done(thread, false);
        cox_worker_tell(thread->worker, -1, request->sequence, thread->error.text,
                        cox_deadline_after_ms(NOTICE_MS));
        return;
    }
    ExecuteResponse response = COXSWAIN__EXECUTE_RESPONSE__INIT;
    cox_channel_thread_fail(thread, &response, status);
    cox_channel_thread_reply(thread, &response);
}

void cox_channel_thread_refuse(struct cox_channel_thread *thread, int status)
{
    if (thread->served.kind == COX_LENT_STEP)
        cox_channel_thread_end_step(thread, status);
    else if (thread->served.kind == COX_LENT_INIT)
        cox_channel_thread_end_init(thread, status);
    else
        thread_reject(thread, status);
}

void cox_channel_thread_close(struct cox_channel_thread *thread)
{
    const struct cox_served *served = &thread->served;
    if (served->out_of_line && served->request.type == COX_TYPE_OPAQUE) {
        cox_channel_thread_close_payload(thread, served->request.sequence);
    } else if (served->out_of_line) { /* what the arena has grown for it is not kept */
        cox_arena_deinit(&thread->arena);
        cox_arena_init(&thread->arena, 0, thread->worker->options.request_size_max);
    }
}

/* Everything but an opaque request in its frame. */
COX_HOT __attribute__((noinline)) static int thread_open_message(struct cox_channel_thread *thread,
                                                                 int status)
{
    struct cox_request *request = &thread->served.request;
    int r = status ? cox_fail(&thread->error, status, "the frame has an impossible length")
                   : thread_unpack(thread);
    /* The record of a legacy shim has no type, and the message with the type may be no message. */
    if (!cox_worker_limits(thread->worker)->coordinator_words)
        request->type = thread->message ? (uint32_t)thread->message->execute_type : COX_TYPE_OPAQUE;
    if (request->type == COX_TYPE_OPAQUE_LARGE)
        request->type = COX_TYPE_OPAQUE;
    if (request->type == COX_TYPE_OPAQUE && r == 0)
        return opaque_begin(thread); /* its bytes are out of line as long as the frame is kept */
    cox_lending_return(thread, request->sequence);
    if (r == 0 && !thread_is_goodbye(thread))
        r = thread_begin(thread);
    return r;
}

COX_HOT bool cox_channel_thread_open(struct cox_channel_thread *thread, int status)
{
    struct cox_served *served = &thread->served;
    cox_error_clear(&thread->error);
    thread->message = NULL;
    served->kind = COX_LENT_MESSAGE;
    served->out_of_line = false;
    const int r = status == 0 && served->request.type == COX_TYPE_OPAQUE
                      ? opaque_begin(thread)
                      : thread_open_message(thread, status);
    if (r) {
        thread_reject(thread, r);
        cox_channel_thread_close(thread);
        return false;
    }
    if (thread->message && thread_is_goodbye(thread)) {
        cox_channel_thread_done(thread, false);
        cox_fault_point(COX_FAULT_GOODBYE_HEARD);
        cox_worker_finalized(thread->worker);
        return false;
    }
    cox_channel_thread_set_state(thread, COX_RANK_RUNNING, served->request.sequence);
    if (served->kind == COX_LENT_OPAQUE || served->kind == COX_LENT_STEP)
        cox_fault_point(COX_FAULT_EXECUTE);
    return true;
}

/* ---- answer ---- */

static void answer_message(struct cox_channel_thread *thread)
{
    switch (thread->message->execute_type) {
    case TYPE(TEXT_GENERATOR_CLEANUP):
    case TYPE(EOS_CLEANUP):
        serve_cleanup(thread);
        return;
    case TYPE(PD_LINK):
        serve_link(thread);
        return;
    case TYPE(PD_LINK_STATUS_QUERY):
        serve_with(thread, serve_link_status);
        return;
    case TYPE(LORA_OPERATION):
        serve_with(thread, serve_lora);
        return;
    case TYPE(KV_TRANSFER):
        serve_with(thread, serve_pull);
        return;
    case TYPE(PAUSE_COMMAND_EXEC):
    case TYPE(PAUSE_COMMAND_EXEC_ROCE):
    case TYPE(CLEAR_COMMAND_EXEC):
    case TYPE(RECOVER_COMMAND_EXEC):
    case TYPE(START_COMMAND_EXEC):
        serve_with(thread, serve_recover);
        return;
    default:
        thread_reject(thread,
                      cox_fail(&thread->error, COX_UNSUPPORTED, "a worker has no operation %s",
                               cox_wire_type_name(thread->served.request.type)));
    }
}

COX_HOT void cox_channel_thread_answer(struct cox_channel_thread *thread)
{
    switch (thread->served.kind) {
    case COX_LENT_OPAQUE:
        answer_opaque(thread);
        break;
    case COX_LENT_STEP:
        cox_channel_thread_end_step(
            thread, cox_channel_thread_call(thread, COX_CALLBACK_PAUSABLE, call_step));
        break;
    case COX_LENT_INIT:
        cox_channel_thread_end_init(thread, cox_channel_thread_call_init(thread));
        break;
    case COX_LENT_MESSAGE:
        answer_message(thread);
        break;
    }
    cox_channel_thread_close(thread);
}
