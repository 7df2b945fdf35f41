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
        Coxswain__CompletionSequenceGroupOutput *group_pointer;
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
        row->sample.has_parent_seq_id = 1;
        row->sample.parent_seq_id = batch->rows[i].id;
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

struct step_call {
    const struct cox_worker *worker;
    const struct cox_batch *batch;
    struct cox_batch_output *outputs;
    struct cox_error *err;
};

COX_HOT static int call_step(void *argument)
{
    const struct step_call *call = argument;
    return call->worker->callbacks->execute(call->worker->context, call->batch, call->outputs,
                                            call->err);
}

/* The part before the callback. */
COX_HOT static int step_begin(struct cox_channel_thread *thread, const struct cox_request *request,
                              const ExecuteRequest *message, struct cox_served_step *step)
{
    struct cox_worker *worker = thread->worker;
    int r = 0;
    step->request = request;
    step->batch = NULL;
    step->message = message->request_case == REQUEST(EXECUTE_MODEL_REQUEST)
                        ? message->execute_model_request
                        : NULL;
    thread_forget(thread);
    if (cox_state_void_through(cox_state_channel(&worker->control, thread->channel.id)) >=
        request->sequence)
        r = cox_fail(&thread->error, COX_ABORTED, "step %" PRIu64 " is void", request->sequence);
    else if (!step->message)
        r = cox_fail(&thread->error, COX_CORRUPT, "a step without an execute_model_request");
    else if (!worker->callbacks->execute && !thread->lending.on)
        r = cox_fail(&thread->error, COX_UNSUPPORTED, "this worker has no execute callback");
    else if (cox_worker_paused(worker)) /* before any part of the step is read */
        r = cox_channel_thread_fail_paused(thread);
    if (r == 0 && message->weights)
        r = cox_weights_candidate_read(message, &step->candidate, &thread->error);
    if (r == 0)
        r = cox_table_apply(worker->table, request->sequence, step->message, &step->batch,
                            &step->outputs, &thread->error);
    if (r)
        return r;
    step->begin_ns = cox_now_ns();
    cox_table_weights(worker->table, message->weights_version,
                      message->weights ? &step->candidate : NULL);
    cox_channel_thread_set_state(thread, COX_RANK_RUNNING, request->sequence, step->begin_ns);
    cox_channel_thread_record_begin(thread, request->sequence, request->type, step->begin_ns);
    cox_fault_point(COX_FAULT_EXECUTE);
    worker->group_time_warned = false;
    return 0;
}

/* The part after the callback; r is its result. */
COX_HOT static int step_finish(struct cox_channel_thread *thread,
                               const struct cox_served_step *step,
                               Coxswain__ExecuteModelResponse *body, Coxswain__StepResult *result,
                               int r)
{
    const struct cox_worker *worker = thread->worker;
    struct cox_table *table = worker->table;
    const bool lowest = step->request->lowest, packed = step->message->step != NULL;
    cox_fault_point(COX_FAULT_EXECUTED);
    body->has_model_execute_time = 1;
    thread->stamp_ns = cox_now_ns();
    cox_channel_thread_record_end(thread, step->request->sequence, step->request->type, r,
                                  thread->stamp_ns);
    body->model_execute_time = (float)((double)(thread->stamp_ns - step->begin_ns) / 1e6);
    if (worker->group_time_warned) {
        body->has_group_ns = body->has_group_wait_ns = 1;
        body->group_ns = worker->group_ns;
        body->group_wait_ns = worker->group_wait_ns;
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
    cox_state_set_base(thread->line, cox_table_base(table));
    if (r)
        return r;
    result->has_base_sequence = 1;
    result->base_sequence = cox_table_base(table);
    result->n_digests = COX_STEP_CHAIN_SIZE;
    result->digests = (uint64_t *)cox_table_chain(table); /* only read */
    return 0;
}

COX_HOT void cox_channel_thread_end_step(struct cox_channel_thread *thread,
                                         struct cox_served_step *step, int r)
{
    ExecuteResponse response = COXSWAIN__EXECUTE_RESPONSE__INIT;
    Coxswain__ExecuteModelResponse body = COXSWAIN__EXECUTE_MODEL_RESPONSE__INIT;
    Coxswain__StepResult result = COXSWAIN__STEP_RESULT__INIT;
    if (step->batch)
        r = step_finish(thread, step, &body, &result, r);
    if (r) {
        cox_channel_thread_fail(thread, &response, r);
    } else {
        body.step = &result;
        response.result_case = RESULT(EXECUTE_MODEL_RESPONSE);
        response.execute_model_response = &body;
    }
    cox_channel_thread_reply(thread, step->request->sequence, step->request->type, &response);
}

/* Returns false if it cannot be lent; it then ends with *ret_r. */
static bool step_lend(struct cox_channel_thread *thread, const struct cox_served_step *step,
                      int *ret_r)
{
    struct cox_lending *lending = &thread->lending;
    const struct cox_request *request = step->request;
    struct lent_step {
        struct cox_served_step step;
        struct cox_request request;
    } *lent = cox_arena_alloc(&thread->arena, sizeof *lent);
    if (!lent) {
        *ret_r = cox_fail(&thread->error, COX_TOO_LARGE, "no memory for a step");
        return false;
    }
    if (!cox_lending_enter(thread, request->sequence, request->type)) {
        cox_lending_leave(thread);
        *ret_r = cox_channel_thread_fail_paused(thread);
        return false;
    }
    lent->request = *request;
    lent->step = *step;
    lent->step.request = &lent->request;
    /* The table refers to the candidate while the step lasts. */
    if (step->batch->weights)
        cox_table_weights(thread->worker->table, step->batch->weights_version,
                          &lent->step.candidate);
    lending->step = &lent->step;
    cox_lending_lend(thread, request->sequence, request->type, COX_LENT_STEP, false);
    lending->to->batch = step->batch;
    lending->to->outputs = step->outputs;
    return true;
}

COX_HOT static void serve_step(struct cox_channel_thread *thread, const struct cox_request *request,
                               const ExecuteRequest *message)
{
    const struct cox_worker *worker = thread->worker;
    struct cox_served_step step;
    int r = step_begin(thread, request, message, &step);
    if (r == 0 && !worker->callbacks->execute && step_lend(thread, &step, &r))
        return;
    if (r == 0) {
        struct step_call call = {worker, step.batch, step.outputs, &thread->error};
        r = cox_channel_thread_call_any(thread, request, COX_CALLBACK_PAUSABLE, call_step, &call);
    }
    cox_channel_thread_end_step(thread, &step, r);
}

struct cleanup_call {
    const struct cox_worker *worker;
    const uint32_t *slots;
    uint32_t count;
};

static int call_cleanup(void *argument)
{
    const struct cleanup_call *call = argument;
    call->worker->callbacks->cleanup(call->worker->context, call->slots, call->count);
    return 0;
}

static void serve_cleanup(struct cox_channel_thread *thread, const struct cox_request *request,
                          const ExecuteRequest *message)
{
    const struct cox_worker *worker = thread->worker;
    if (message->request_case == REQUEST(TEXT_GENERATOR_CLEANUP_REQUEST) &&
        message->text_generator_cleanup_request) {
        const Coxswain__TGCleanupRequest *cleanup = message->text_generator_cleanup_request;
        struct cleanup_call call = {.worker = worker};
        thread_forget(thread);
        cox_table_cleanup(worker->table, cleanup->seq_ids, cleanup->n_seq_ids, &call.slots,
                          &call.count);
        if (call.count && worker->callbacks->cleanup)
            cox_channel_thread_call_any(thread, request, COX_CALLBACK_UNPAUSABLE, call_cleanup,
                                        &call);
    }
    cox_channel_thread_done(thread, request->sequence, false);
}

/* ---- the other channels ---- */

static int serve_link_status(struct cox_channel_thread *thread, const struct cox_request *request,
                             const ExecuteRequest *message, ExecuteResponse *response)
{
    (void)request;
    (void)message;
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

static int serve_lora(struct cox_channel_thread *thread, const struct cox_request *request,
                      const ExecuteRequest *message, ExecuteResponse *response)
{
    (void)request;
    const struct cox_worker *worker = thread->worker;
    if (message->request_case != REQUEST(LORA_OPERATION_REQUEST) ||
        !message->lora_operation_request)
        return cox_fail(&thread->error, COX_CORRUPT, "a LoRA operation without its request");
    Coxswain__LoraOperationResponse *body = cox_arena_alloc(&thread->arena, sizeof *body);
    if (!body)
        return cox_fail(&thread->error, COX_TOO_LARGE, "no memory for the reply");
    coxswain__lora_operation_response__init(body);
    body->lora_name = message->lora_operation_request->lora_name;
    body->has_lora_op_status = 1;
    body->lora_op_status = COXSWAIN__LORA_OPERATION_STATUS__UNSUPPORT_CMD;
    response->result_case = RESULT(LORA_OPERATION_RESPONSE);
    response->lora_operation_response = body;
    if (!worker->callbacks->lora)
        return 0; /* the protocol has a status for this */
    thread->deadline_ns = message->deadline_ns;
    return worker->callbacks->lora(worker->context, message->lora_operation_request, &thread->arena,
                                   body, &thread->error);
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
    uint64_t deadline_ns = lora_deadline(thread->deadline_ns);
    int r = cox_adapter_references_close(cox_table_adapter_references(worker->table), lora_id,
                                         deadline_ns, lora_cancelled, thread, &count);
    if (r == COX_BUSY)
        return cox_fail(err, r, "the LoRA adapter '%.*s' is still in use by %" PRIu32 " sequence%s",
                        COX_LORA_NAME_LENGTH_MAX, lora_id, count, count == 1 ? "" : "s");
    return r ? cox_fail(err, r, "no memory to unload a LoRA adapter") : 0;
}

void cox_worker_lora_admit(struct cox_worker *worker, const char *lora_id)
{
    cox_adapter_references_open(cox_table_adapter_references(worker->table), lora_id);
}

struct pull_call {
    struct cox_channel_thread *thread;
    const struct Coxswain__PullKVRequest *request;
    struct Coxswain__PullKVResponse *response;
};

static int call_pull(void *argument)
{
    const struct pull_call *call = argument;
    const struct cox_worker *worker = call->thread->worker;
    return worker->callbacks->pull_kv(worker->context, call->request, &call->thread->arena,
                                      call->response, &call->thread->error);
}

static int serve_pull(struct cox_channel_thread *thread, const struct cox_request *request,
                      const ExecuteRequest *message, ExecuteResponse *response)
{
    const struct cox_worker *worker = thread->worker;
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
    struct pull_call call = {thread, message->pull_kv_request, body};
    return cox_channel_thread_call_any(thread, request, COX_CALLBACK_PAUSABLE, call_pull, &call);
}

/* A command's failure is a result (command_result), not a failed request, because every rank's
 * result is wanted. */
static int serve_recover(struct cox_channel_thread *thread, const struct cox_request *request,
                         const ExecuteRequest *message, ExecuteResponse *response)
{
    (void)request;
    const struct cox_worker *worker = thread->worker;
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
    body->has_npu_device_id = body->has_command_result = 1;
    body->npu_device_id = worker->options.device;
    body->command_result = command ? command(worker->context, &thread->error)
                                   : cox_fail(&thread->error, COX_UNSUPPORTED,
                                              "this worker has no callback for this command");
    /* release; partner: thread_forget. */
    if (message->execute_type == TYPE(RECOVER_COMMAND_EXEC) && body->command_result == 0)
        atomic_store_explicit(&thread->worker->pause.forget, true, memory_order_release);
    if (body->command_result)
        body->error_msg = thread->error.text;
    response->result_case = RESULT(RECOVER_COMMAND_RESPONSE);
    response->recover_command_response = body;
    return 0;
}

COX_HOT static void serve_with(struct cox_channel_thread *thread, const struct cox_request *request,
                               const ExecuteRequest *message,
                               int (*serve)(struct cox_channel_thread *, const struct cox_request *,
                                            const ExecuteRequest *, ExecuteResponse *))
{
    ExecuteResponse response = COXSWAIN__EXECUTE_RESPONSE__INIT;
    thread->stamp_ns = cox_now_coarse_ns();
    cox_channel_thread_set_state(thread, COX_RANK_RUNNING, request->sequence, thread->stamp_ns);
    cox_channel_thread_record_begin(thread, request->sequence, request->type, 0);
    int r = serve(thread, request, message, &response);
    cox_channel_thread_record_end(thread, request->sequence, request->type, r, 0);
    if (r)
        cox_channel_thread_fail(thread, &response, r);
    thread->stamp_ns = cox_now_coarse_ns();
    cox_channel_thread_reply(thread, request->sequence, request->type, &response);
}

/* ---- opaque ---- */

struct opaque_call {
    struct cox_channel_thread *thread;
    const struct cox_request *request;
    struct cox_opaque_reply reply;
    size_t length;
};

COX_HOT static int call_opaque(void *argument)
{
    struct opaque_call *call = argument;
    const struct cox_worker *worker = call->thread->worker;
    return worker->callbacks->opaque(worker->context, call->request->bytes, call->request->size,
                                     call->reply.slot, call->reply.slot_capacity, &call->length,
                                     &call->thread->error);
}

static void opaque_refuse(struct cox_channel_thread *thread, const struct cox_request *request,
                          int status)
{
    ExecuteResponse response = COXSWAIN__EXECUTE_RESPONSE__INIT;
    cox_channel_thread_fail(thread, &response, status);
    cox_channel_thread_reply(thread, request->sequence, request->type, &response);
}

/* Returns false if no thread takes requests, or the worker is paused. */
static bool opaque_lend(struct cox_channel_thread *thread, const struct cox_request *request)
{
    struct cox_lending *lending = &thread->lending;
    if (!lending->on)
        return false;
    if (!cox_lending_enter(thread, request->sequence, request->type)) {
        cox_lending_leave(thread);
        return false;
    }
    const struct cox_large_payload_view *view = cox_channel_thread_view(thread, request->sequence);
    COX_PROBE(callback__enter, thread->channel.id, request->sequence, request->type, 0);
    cox_lending_lend(thread, request->sequence, request->type, COX_LENT_OPAQUE,
                     request->bytes == view->region.base);
    cox_fault_point(COX_FAULT_EXECUTE);
    lending->to->bytes = request->bytes;
    lending->to->size = request->size;
    lending->to->reply = cox_reply_slot(&thread->channel, thread->worker->options.rank,
                                        request->sequence, false, &lending->to->reply_capacity);
    return true;
}

/* taken: whether callers take from the channel. */
__attribute__((always_inline)) static inline void opaque_call_back(
    struct cox_channel_thread *thread, const struct cox_request *request, const bool taken)
{
    const struct cox_worker *worker = thread->worker;
    struct opaque_call call; /* each field is set below: zeroing would cost a tenth of all this */
    call.thread = thread;
    call.request = request;
    call.length = 0;
    if (!taken)
        cox_state_set_rank(thread->line, COX_RANK_RUNNING, request->sequence, thread->stamp_ns);
    struct cox_opaque_reply *reply = &call.reply;
    reply->thread = thread->self;
    reply->sequence = request->sequence;
    reply->slot = reply->bytes = cox_reply_slot(&thread->channel, worker->options.rank,
                                                request->sequence, false, &reply->slot_capacity);
    reply->capacity = reply->slot_capacity;
    thread->opaque = reply;
    COX_PROBE(callback__enter, thread->channel.id, request->sequence, request->type, 0);
    cox_fault_point(COX_FAULT_EXECUTE);
    int r =
        taken ? cox_lending_call(thread, request, COX_CALLBACK_PAUSABLE, call_opaque, &call)
              : cox_channel_thread_call(thread, request, COX_CALLBACK_PAUSABLE, call_opaque, &call);
    thread->opaque = NULL;
    COX_PROBE(callback__return, thread->channel.id, request->sequence, request->type, r);
    cox_channel_thread_return(thread, request->sequence);
    if (r == 0 && call.length > reply->capacity)
        r = cox_fail(&thread->error, COX_TOO_LARGE,
                     "the reply has %zu bytes, there is room for %zu: cox_worker_reply_grow makes "
                     "more, before the reply is written",
                     call.length, reply->capacity);
    if (r == 0 && call.length > reply->slot_capacity) {
        cox_channel_thread_send_block(thread, request->sequence, COX_TYPE_OPAQUE, call.length);
        return;
    }
    if (r == 0) {
        if (!cox_channel_thread_begin_reply(thread, request->sequence))
            return;
        if (reply->bytes != reply->slot) { /* it grew */
            memcpy(reply->slot, reply->bytes, call.length);
            cox_channel_thread_release_block(thread, request->sequence);
        }
        cox_channel_thread_send(thread, request->sequence, call.length, false, 0);
        return;
    }
    if (reply->bytes != reply->slot)
        cox_channel_thread_release_block(thread, request->sequence);
    opaque_refuse(thread, request, r);
}

/* Without a callback: lends the request to the caller of cox_worker_next, or refuses it. */
__attribute__((cold, noinline)) static void serve_opaque_elsewhere(
    struct cox_channel_thread *thread, const struct cox_request *request)
{
    if (thread->worker->callbacks->opaque) {
        opaque_call_back(thread, request, true);
        return;
    }
    if (opaque_lend(thread, request))
        return;
    const int r = thread->lending.on ? cox_channel_thread_fail_paused(thread)
                                     : cox_fail(&thread->error, COX_UNSUPPORTED,
                                                "this worker has no opaque callback");
    cox_channel_thread_return(thread, request->sequence);
    opaque_refuse(thread, request, r);
}

COX_HOT static void serve_opaque(struct cox_channel_thread *thread,
                                 const struct cox_request *request)
{
    if (thread->worker->callbacks->opaque && !thread->lending.on)
        opaque_call_back(thread, request, false);
    else
        serve_opaque_elsewhere(thread, request);
}

/* ---- dispatch ---- */

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
    return 0;
}

COX_HOT static void thread_dispatch(struct cox_channel_thread *thread,
                                    const struct cox_request *request,
                                    const ExecuteRequest *message)
{
    const struct cox_worker *worker = thread->worker;
    switch (message->execute_type) {
    case TYPE(MODEL_INIT):
        cox_channel_thread_reply_init_request(thread, request, message);
        return;
    case TYPE(MODEL_INFER):
    case TYPE(MODEL_INFER_SECOND):
        serve_step(thread, request, message);
        return;
    case TYPE(TEXT_GENERATOR_CLEANUP):
    case TYPE(EOS_CLEANUP):
        serve_cleanup(thread, request, message);
        return;
    case TYPE(PD_LINK):
        if (message->request_case == REQUEST(PD_LINK_REQUEST) && message->pd_link_request &&
            worker->callbacks->link)
            worker->callbacks->link(worker->context, message->pd_link_request);
        cox_channel_thread_done(thread, request->sequence, false);
        /* Without a link callback a legacy coordinator would wait for ever. */
        if (worker->is_legacy_shim && !worker->callbacks->link)
            cox_worker_tell(thread->worker, -1, request->sequence,
                            "this worker has no link callback", cox_deadline_after_ms(NOTICE_MS));
        return;
    case TYPE(PD_LINK_STATUS_QUERY):
        serve_with(thread, request, message, serve_link_status);
        return;
    case TYPE(LORA_OPERATION):
        serve_with(thread, request, message, serve_lora);
        return;
    case TYPE(KV_TRANSFER):
        serve_with(thread, request, message, serve_pull);
        return;
    case TYPE(PAUSE_COMMAND_EXEC):
    case TYPE(PAUSE_COMMAND_EXEC_ROCE):
    case TYPE(CLEAR_COMMAND_EXEC):
    case TYPE(RECOVER_COMMAND_EXEC):
    case TYPE(START_COMMAND_EXEC):
        serve_with(thread, request, message, serve_recover);
        return;
    default: {
        ExecuteResponse response = COXSWAIN__EXECUTE_RESPONSE__INIT;
        cox_fail(&thread->error, COX_UNSUPPORTED, "a worker has no operation %s",
                 cox_wire_type_name((uint32_t)message->execute_type));
        cox_channel_thread_fail(thread, &response, COX_UNSUPPORTED);
        cox_channel_thread_reply(thread, request->sequence, request->type, &response);
    }
    }
}

/* Refuses the request. Requests without a reply get none: a legacy coordinator would take the token
 * of such a reply for the one of its next request. */
static void thread_reject(struct cox_channel_thread *thread, const struct cox_request *request,
                          int status)
{
    const struct cox_operation *operation = cox_operation_find(request->type);
    if (operation && !operation->replies) {
        cox_channel_thread_done(thread, request->sequence, false);
        cox_worker_tell(thread->worker, -1, request->sequence, thread->error.text,
                        cox_deadline_after_ms(NOTICE_MS));
        return;
    }
    ExecuteResponse response = COXSWAIN__EXECUTE_RESPONSE__INIT;
    cox_channel_thread_fail(thread, &response, status);
    cox_channel_thread_reply(thread, request->sequence, request->type, &response);
}

void cox_channel_thread_refuse(struct cox_channel_thread *thread, const struct cox_request *request,
                               int status, const char *text)
{
    struct cox_request typed = *request;
    /* The record of a legacy shim has no type, and the message with the type cannot be parsed. */
    if (thread->worker->is_legacy_shim || typed.type == COX_TYPE_OPAQUE_BLOCK)
        typed.type = COX_TYPE_OPAQUE;
    thread->error = (struct cox_error){0};
    thread->message = NULL;
    cox_fail(&thread->error, status, "%s", text);
    cox_channel_thread_return(thread, request->sequence);
    thread_reject(thread, &typed, status);
}

static void thread_serve_opaque_block(struct cox_channel_thread *thread,
                                      const struct cox_request *typed, bool in_block, int r)
{
    if (r == 0 && !in_block)
        r = cox_fail(&thread->error, COX_CORRUPT,
                     "opaque bytes in a large payload without its reference");
    if (r) {
        cox_channel_thread_return(thread, typed->sequence);
        thread_reject(thread, typed, r);
    } else {
        serve_opaque(thread, typed);
    }
    if (!cox_channel_thread_lent(thread))
        cox_channel_thread_close_block(thread, typed->sequence);
}

/* The message itself is out of line, where this one refers to. */
static int thread_unpack_block(struct cox_channel_thread *thread, const struct cox_request *block,
                               ExecuteRequest **message)
{
    if (thread->worker->request_size_default)
        thread->arena.size_max += 2 * block->size;
    int r = cox_wire_request_unpack(&thread->arena, block->bytes, block->size, message);
    return r ? cox_fail(&thread->error, r, "a request of %zu bytes that is no ExecuteRequest",
                        block->size)
             : 0;
}

void cox_channel_thread_trim(struct cox_channel_thread *thread)
{
    cox_arena_deinit(&thread->arena);
    cox_arena_init(&thread->arena, 0, thread->worker->options.request_size_max); /* cannot fail */
}

COX_HOT bool cox_channel_thread_serve(struct cox_channel_thread *thread,
                                      const struct cox_request *request)
{
    cox_error_clear(&thread->error);
    thread->message = NULL;
    if (request->type == COX_TYPE_OPAQUE) {
        serve_opaque(thread, request);
        return false;
    }
    cox_arena_reset(&thread->arena);
    int r = thread_copy(thread, request);
    const struct cox_layout_channel_state *shared =
        cox_state_channel(&thread->worker->control, thread->channel.id);
    /* A process that has overwritten this rank's words may have made the coordinator take the frame
     * for free; then the copy is partly the next request. */
    if (r == 0 &&
        !cox_state_frame_holds(shared, thread->worker->control.geometry.depth, request->sequence))
        r = cox_fail(&thread->error, COX_CORRUPT, "the frame was written again while it was read");
    ExecuteRequest *message = NULL;
    struct cox_request typed = *request;
    if (r == 0) {
        r = cox_wire_request_unpack(&thread->arena, thread->copy, request->size, &message);
        if (r)
            cox_fail(&thread->error, r, "a request of %zu bytes that is no ExecuteRequest",
                     request->size);
        if (r && thread->worker->is_legacy_shim)
            typed.type = COX_TYPE_OPAQUE; /* as in cox_channel_thread_refuse */
    }
    const bool in_block = r == 0 && message->bulk && cox_channel_thread_has_blocks(thread);
    if (in_block)
        r = cox_channel_thread_open_block(thread, request->sequence, message->bulk, &typed.bytes,
                                          &typed.size);
    if (request->type == COX_TYPE_OPAQUE_BLOCK) {
        typed.type = COX_TYPE_OPAQUE;
        thread_serve_opaque_block(thread, &typed, in_block, r);
        return false;
    }
    if (in_block && r == 0)
        r = thread_unpack_block(thread, &typed, &message);
    cox_channel_thread_return(thread, request->sequence);
    if (in_block)
        cox_channel_thread_close_block(thread, request->sequence);
    const struct cox_operation *operation =
        r == 0 ? cox_operation_find((uint32_t)message->execute_type) : NULL;
    if (r == 0 && thread->worker->is_legacy_shim)
        typed.type = (uint32_t)message->execute_type;
    /* The record must agree: overwritten bytes of a frame must not end a rank. */
    if (operation && message->execute_type == TYPE(MODEL_FINALIZE) &&
        typed.type == TYPE(MODEL_FINALIZE)) {
        cox_channel_thread_done(thread, request->sequence, false);
        cox_fault_point(COX_FAULT_GOODBYE_HEARD);
        return true;
    }
    if (r == 0 && (!operation || operation->channel != thread->channel.id ||
                   (uint32_t)message->execute_type != typed.type))
        r = cox_fail(&thread->error, COX_CORRUPT, "%s does not belong on the %s channel",
                     cox_wire_type_name((uint32_t)message->execute_type),
                     cox_channel_name(thread->channel.id));
    thread->message = message;
    thread->lending.trims = in_block;
    if (r)
        thread_reject(thread, &typed, r);
    else
        thread_dispatch(thread, &typed, message);
    if (in_block && !cox_channel_thread_lent(thread))
        cox_channel_thread_trim(thread);
    return false;
}
