/* serve: one request of one lane: unpack, call back, answer. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../channel/fault.h"
#include "../channel/reply.h"
#include "../channel/truth.h"
#include "../proto/bulk_ref.h"
#include "../proto/operation.h"
#include "group.h"
#include "kv_layout.h"
#include "lora_uses.h"
#include "proto/executor.pb-c.h"
#include "rank_weights.h"
#include "worker_internal.h"

typedef ModelExecuteData__ExecuteRequest ExecuteRequest;
typedef ModelExecuteData__ExecuteResponse ExecuteResponse;
#define TYPE(name) MODEL_EXECUTE_DATA__EXECUTE_TYPE__##name
#define REQUEST(name) MODEL_EXECUTE_DATA__EXECUTE_REQUEST__REQUEST_##name
#define RESULT(name) MODEL_EXECUTE_DATA__EXECUTE_RESPONSE__RESULT_##name
/* How long a failing answer may wait to be announced on the error channel; the collector looks by
 * itself anyway. */
#define NOTICE_MS 100
/* How long sequences of an adapter that goes are waited for, where the request does not say. */
#define LORA_RETIRE_MS 5000
#define LORA_ANSWER_MS 500
/* How soon a wait for a legacy coordinator's token notices that the worker leaves. */
#define SLICE_MS 50

struct cox_init_request {
    const struct cox_worker *worker;
    const ExecuteRequest *request;
    uint64_t sequence;
    const struct cox_layout_channel_truth *truth;
    const struct cox_visit *visit;
};

uint64_t cox_init_request_sequence(const struct cox_init_request *request)
{
    return request->sequence;
}

bool cox_init_request_replayed(const struct cox_init_request *request)
{
    return request->request->replayed;
}

void cox_init_request_group(const struct cox_init_request *request,
                            struct cox_group_options *options)
{
    const struct cox_worker *worker = request->worker;
    const uint64_t life = request->request->group_life;
    options->name = NULL;
    options->fd = worker->group_fd;
    options->fd_offset = cox_geometry_group_offset(&worker->control.geometry, life);
    options->rank = worker->options.rank;
    options->rank_count = worker->options.rank_count;
    options->life = life;
    options->spin_ns = worker->control.geometry.spin_ns;
}

static bool bytes_copy(const ProtobufCBinaryData *bytes, void *to, size_t size)
{
    if (bytes->len != size)
        return false;
    memcpy(to, bytes->data, size);
    return true;
}

int cox_init_request_weights(const struct cox_init_request *request,
                             struct cox_weights_offer *ret_offer, struct cox_error *err)
{
    const ExecuteRequest *message = request->request;
    const struct cox_worker_options *options = &request->worker->options;
    const ModelExecuteData__PoolBlock *block = message->weights;
    struct cox_weights_offer offer = {.version = message->weights_version};
    if (!message->has_weights_queue)
        return COX_EMPTY;
    if (!block || !offer.version ||
        !bytes_copy(&message->weights_queue, &offer.queue, sizeof offer.queue) ||
        !bytes_copy(&block->handle, &offer.pool, sizeof offer.pool) ||
        !bytes_copy(&block->ref, &offer.ref, sizeof offer.ref))
        return cox_fail(
            err, COX_CORRUPT,
            "init: the weights are told as a queue of %zu bytes, version %" PRIu64
            ", a pool of %zu bytes and a block of %zu: expected %zu, a version, %zu and %zu",
            message->weights_queue.len, offer.version, block ? block->handle.len : 0,
            block ? block->ref.len : 0, sizeof offer.queue, sizeof offer.pool, sizeof offer.ref);
    /* A group that nobody could visit has none: then only what can be opened without it is opened. */
    if (strchr(options->door, '/'))
        snprintf(offer.door, sizeof offer.door, "%s", options->door);
    else if (cox_door_find(options->prefix + (options->prefix[0] == '/'), offer.door, NULL))
        offer.door[0] = '\0';
    *ret_offer = offer;
    return 0;
}

/* It is no step, and void_through says nothing of it; but it has ended without this rank's answer. */
bool cox_init_request_aborted(const struct cox_init_request *request)
{
    return cox_truth_ended(request->truth) >= request->sequence ||
           /* acquire; partner: wait_tell in pause.c. */
           atomic_load_explicit(&request->visit->told, memory_order_acquire) >= request->sequence;
}

const char *cox_init_request_get(const struct cox_init_request *request, const char *key)
{
    for (size_t i = 0; i < request->request->n_config; i++) {
        const ModelExecuteData__ExecuteRequest__ConfigEntry *entry = request->request->config[i];
        if (entry->key && strcmp(entry->key, key) == 0)
            return entry->value ? entry->value : "";
    }
    return NULL;
}

/* ---- answers ---- */

COX_HOT static void lane_return(struct cox_lane *lane, uint64_t sequence)
{
    cox_lane_set_returned(lane, sequence);
    cox_gate_post(&lane->channel.gate, lane->worker->options.rank, COX_BELL_REQUEST_PRODUCE);
}

/* The bytes are in the slot. message: an ExecuteResponse, also where answers are opaque. */
COX_HOT static void lane_send(struct cox_lane *lane, uint64_t sequence, size_t length, bool message,
                              bool failed)
{
    cox_reply_commit(&lane->channel, lane->worker->options.rank, sequence, length, message);
    cox_lane_set_done(lane, sequence);
    cox_gate_reply(&lane->channel.gate, lane->worker->options.rank, sequence, failed);
}

/* Nothing to answer with: no-reply requests, and legacy ranks that only wait and post. */
static void lane_done(struct cox_lane *lane, uint64_t sequence, bool post)
{
    cox_lane_set_done(lane, sequence);
    if (post)
        cox_gate_post(&lane->channel.gate, lane->worker->options.rank, COX_BELL_RESPONSE_CONSUME);
}

/* A legacy coordinator may send the next request before it has read the answer to the last one. */
static bool lane_await_slot(struct cox_lane *lane)
{
    struct cox_worker *worker = lane->worker;
    int r;
    do
        r = cox_gate_wait(&lane->channel.gate, worker->options.rank, COX_BELL_RESPONSE_PRODUCE, 0,
                          cox_deadline_after_ms(SLICE_MS));
    while (r == COX_TIMEOUT && !atomic_load_explicit(&worker->stopping, memory_order_acquire));
    return r == 0;
}

/* NULL: the worker leaves before the slot is free. */
COX_HOT static uint8_t *lane_slot(struct cox_lane *lane, uint64_t sequence, bool whole,
                                  size_t *ret_capacity)
{
    if (lane->worker->stands_in && !lane_await_slot(lane))
        return NULL;
    /* The slot is free since the coordinator published this sequence: see claim in
     * coordinator/collect.h. */
    cox_gate_settle(&lane->channel.gate, lane->worker->options.rank, COX_BELL_RESPONSE_PRODUCE);
    cox_truth_set_state(lane->line, COX_RANK_REPLYING, sequence, lane->stamp_ns);
    return cox_reply_slot(&lane->channel, lane->worker->options.rank, sequence, whole,
                          ret_capacity);
}

/* Makes the response an error with the lane's text. */
static void response_fail(struct cox_lane *lane, ExecuteResponse *response, int status)
{
    response->status = status;
    response->has_status = 1;
    response->error_text =
        lane->error.text[0] ? lane->error.text : (char *)(uintptr_t)cox_status_text(status);
    response->result_case = RESULT(_NOT_SET);
    response->execute_model_response = NULL;
}

/* In a legacy group: is this answered by rank 0 alone, whose payload may fill the region? What is
 * of no type that belongs here gets slots where there is room for them, so that every rank can tell
 * of it. */
static bool lane_whole(const struct cox_lane *lane, uint32_t type)
{
    if (!lane->worker->control.geometry.legacy)
        return false;
    if (lane->channel.id == COX_CHANNEL_LINK)
        return true;
    const struct cox_operation *operation = cox_operation_find(type);
    return operation && operation->channel == lane->channel.id && !operation->legacy_slotted;
}

/* The answer is in the block: says so in the slot. */
static void lane_send_block(struct cox_lane *lane, uint64_t sequence, uint32_t type, uint64_t size)
{
    struct cox_bulk_ref ref = cox_lane_refer_block(lane, sequence, size);
    ModelExecuteData__BulkRef bulk;
    ExecuteResponse response = MODEL_EXECUTE_DATA__EXECUTE_RESPONSE__INIT;
    cox_bulk_ref_fill(&bulk, &ref);
    response.bulk = &bulk;
    response.has_msg_type = response.has_rank = response.has_status = 1;
    response.msg_type = (int32_t)type;
    response.rank = (int32_t)lane->worker->options.rank;
    size_t capacity, length;
    uint8_t *slot = lane_slot(lane, sequence, false, &capacity);
    int r = cox_wire_response_pack(&response, slot, capacity, &length);
    COX_ASSERT(r == 0); /* the smallest slot has room for it */
    lane_send(lane, sequence, length, type == COX_TYPE_OPAQUE, false);
}

/* What does not fit the slot. Returns 0: it is sent; or why not, in the lane's error. */
static int lane_answer_in_block(struct cox_lane *lane, uint64_t sequence, uint32_t type,
                                const ExecuteResponse *response, size_t capacity)
{
    const size_t size = cox_wire_response_size(response);
    uint8_t *block;
    size_t length;
    lane->error.code = 0;
    if (!cox_lane_has_blocks(lane))
        return cox_fail(&lane->error, COX_TOO_LARGE,
                        "the answer has %zu bytes, a slot holds %zu: use a larger response region",
                        size, capacity);
    int r = cox_lane_reserve_block(lane, sequence, size, &block, &lane->error);
    if (r)
        return r;
    r = cox_wire_response_pack(response, block, size, &length);
    COX_ASSERT(r == 0);
    lane_send_block(lane, sequence, type, length);
    return 0;
}

COX_HOT static void lane_answer(struct cox_lane *lane, uint64_t sequence, uint32_t type,
                                ExecuteResponse *response)
{
    struct cox_worker *worker = lane->worker;
    bool whole = lane_whole(lane, type);
    bool silent = whole && worker->options.rank > 0;
    size_t capacity, length = 0;
    uint8_t *slot = lane_slot(lane, sequence, whole, &capacity);
    if (!slot)
        return;
    bool failed = response->status != 0;
    if (silent) {
        lane_done(lane, sequence, true);
    } else {
        response->has_msg_type = 1;
        response->msg_type = (int32_t)type;
        response->has_rank = 1;
        response->rank = (int32_t)worker->options.rank;
        response->has_status = 1;
        int r = cox_wire_response_pack(response, slot, capacity, &length);
        if (r == COX_TOO_LARGE && !failed) {
            r = lane_answer_in_block(lane, sequence, type, response, capacity);
            if (r == 0)
                return;
            response_fail(lane, response, r);
            failed = true;
            r = cox_wire_response_pack(response, slot, capacity, &length);
        }
        /* What failed first stays what is told, in fewer words where they do not fit. */
        while (r == COX_TOO_LARGE && lane->error.text[0]) {
            lane->error.text[strlen(lane->error.text) / 2] = '\0';
            cox_text_trim(lane->error.text);
            response->error_text = lane->error.text;
            r = cox_wire_response_pack(response, slot, capacity, &length);
        }
        lane_send(lane, sequence, length, failed, failed);
    }
    /* Where the rank has no answer of its own, the report is all there is: then it is about no
     * request. Where all ranks share a bell, the failed answer itself has rung it. */
    if (failed && (silent || !cox_gate_shared(&lane->channel.gate)))
        cox_worker_tell(worker, silent ? -1 : (int)lane->channel.id, sequence,
                        response->error_text ? response->error_text : "",
                        cox_deadline_after_ms(NOTICE_MS));
}

/* ---- init ---- */

struct init_answer {
    ModelExecuteData__ExecuteResponse__InitResults results;
    ModelExecuteData__ExecuteResponse__InitResults__InitResultMapEntry entries[8];
    ModelExecuteData__ExecuteResponse__InitResults__InitResultMapEntry *entry_pointers[8];
    char numbers[8][24];
    ModelExecuteData__KVCacheDesc descs[COX_KV_CACHE_DESC_COUNT_MAX];
    ModelExecuteData__KVCacheDesc *desc_pointers[COX_KV_CACHE_DESC_COUNT_MAX];
    struct cox_kv_pool_message kv_pool;
};

static void init_put_text(struct init_answer *answer, const char *key, const char *value)
{
    size_t i = answer->results.n_init_result_map++;
    model_execute_data__execute_response__init_results__init_result_map_entry__init(
        &answer->entries[i]);
    answer->entries[i].key = (char *)(uintptr_t)key;
    answer->entries[i].value = (char *)(uintptr_t)value;
    answer->entry_pointers[i] = &answer->entries[i];
}

static void init_put_number(struct init_answer *answer, const char *key, int64_t value)
{
    char *text = answer->numbers[answer->results.n_init_result_map];
    snprintf(text, sizeof answer->numbers[0], "%" PRId64, value);
    init_put_text(answer, key, text);
}

static void init_fill(struct init_answer *answer, const struct cox_init_result *result)
{
    model_execute_data__execute_response__init_results__init(&answer->results);
    answer->results.init_result_map = answer->entry_pointers;
    init_put_text(answer, "status", "ok");
    init_put_number(answer, "cpuBlockNum", result->cpu_block_count);
    init_put_number(answer, "npuBlockNum", result->npu_block_count);
    init_put_number(answer, "maxPositionEmbeddings", result->max_position_embeddings);
    init_put_number(answer, "memPoolId", result->mem_pool_id);
    if (result->start_thinking_id >= 0)
        init_put_number(answer, "startThinkingId", result->start_thinking_id);
    if (result->stop_thinking_id >= 0)
        init_put_number(answer, "stopThinkingId", result->stop_thinking_id);
    if (result->early_stopping_ids)
        init_put_text(answer, "earlyStoppingIds", result->early_stopping_ids);
    answer->results.n_kv_cache_descs = result->kv_cache_count;
    answer->results.kv_cache_descs = answer->desc_pointers;
    for (uint32_t i = 0; i < result->kv_cache_count; i++) {
        ModelExecuteData__KVCacheDesc *desc = &answer->descs[i];
        model_execute_data__kvcache_desc__init(desc);
        desc->has_npu_block_num = desc->has_block_size = 1;
        desc->has_compression_ratio = desc->has_cache_type = 1;
        desc->npu_block_num = result->kv_caches[i].block_count;
        desc->block_size = result->kv_caches[i].block_size;
        desc->compression_ratio = result->kv_caches[i].compression_ratio;
        desc->cache_type = result->kv_caches[i].cache_type;
        answer->desc_pointers[i] = desc;
    }
    if (result->kv_pool.block_count)
        answer->results.kv_pool = cox_kv_pool_fill(&answer->kv_pool, &result->kv_pool);
}

struct init_call {
    const struct cox_worker *worker;
    const struct cox_init_request *request;
    struct cox_init_result *result;
    struct cox_error *err;
};

static int call_init(void *argument)
{
    const struct init_call *call = argument;
    return call->worker->callbacks->init(call->worker->context, call->request, call->result,
                                         call->err);
}

static void serve_init(struct cox_lane *lane, const struct cox_request *request,
                       const ExecuteRequest *message)
{
    const struct cox_worker *worker = lane->worker;
    ExecuteResponse response = MODEL_EXECUTE_DATA__EXECUTE_RESPONSE__INIT;
    struct init_answer answer = {0};
    struct cox_init_result result = {.start_thinking_id = -1, .stop_thinking_id = -1};
    const struct cox_init_request init = {
        .worker = worker,
        .request = message,
        .sequence = request->sequence,
        .truth = cox_truth_channel(&worker->control, lane->channel.id),
        .visit = &lane->visit,
    };
    struct init_call call = {worker, &init, &result, &lane->error};
    int r = worker->callbacks->init
                ? cox_lane_call(lane, request, COX_VISIT_LET, call_init, &call)
                : cox_fail(&lane->error, COX_UNSUPPORTED, "this worker has no init callback");
    if (r == 0 && result.kv_cache_count > COX_KV_CACHE_DESC_COUNT_MAX)
        r = cox_fail(&lane->error, COX_INVALID, "init tells of %" PRIu32 " KV caches: at most %d",
                     result.kv_cache_count, COX_KV_CACHE_DESC_COUNT_MAX);
    if (r == 0) {
        init_fill(&answer, &result);
        response.result_case = RESULT(INIT_RESULTS);
        response.init_results = &answer.results;
        cox_table_clear(lane->worker->table);
    } else {
        response_fail(lane, &response, r);
    }
    lane_answer(lane, request->sequence, request->type, &response);
}

/* ---- steps ---- */

/* The answer in the form the request had. false: no memory. */
static bool step_fill_nested(struct cox_lane *lane, const struct cox_batch *batch,
                             const struct cox_batch_output *outputs,
                             ModelExecuteData__ExecuteModelResponse *body)
{
    struct nested_row {
        ModelExecuteData__CompletionSequenceGroupOutput group;
        ModelExecuteData__SequenceOutput sample;
        ModelExecuteData__CompletionSequenceGroupOutput *group_pointer;
        ModelExecuteData__SequenceOutput *sample_pointer;
        int64_t token;
        float logprob;
    };
    struct nested_row *rows = cox_arena_alloc(&lane->arena, (batch->row_count + 1) * sizeof *rows);
    ModelExecuteData__CompletionSequenceGroupOutput **pointers =
        cox_arena_alloc(&lane->arena, (batch->row_count + 1) * sizeof *pointers);
    if (!rows || !pointers)
        return false;
    for (uint32_t i = 0; i < batch->row_count; i++) {
        struct nested_row *row = &rows[i];
        model_execute_data__completion_sequence_group_output__init(&row->group);
        model_execute_data__sequence_output__init(&row->sample);
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

/* A reinit makes the rank forget what it knew of sequences; only this thread may touch the table. */
static void lane_forget(struct cox_lane *lane)
{
    struct cox_pause *pause = &lane->worker->pause;
    /* acquire; partner: serve_recover. The plain load spares every step the exchange. */
    if (atomic_load_explicit(&pause->forget, memory_order_acquire) &&
        atomic_exchange_explicit(&pause->forget, false, memory_order_acquire))
        cox_table_clear(lane->worker->table);
}

void cox_worker_tell_group_time(struct cox_worker *worker, uint64_t group_ns, uint64_t wait_ns)
{
    worker->group_time_told = true;
    worker->group_ns = group_ns;
    worker->group_wait_ns = wait_ns;
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

COX_HOT static void serve_step(struct cox_lane *lane, const struct cox_request *request,
                               const ExecuteRequest *message)
{
    struct cox_worker *worker = lane->worker;
    struct cox_table *table = worker->table;
    const ModelExecuteData__ExecuteModelRequest *step =
        message->request_case == REQUEST(EXECUTE_MODEL_REQUEST) ? message->execute_model_request
                                                                : NULL;
    ExecuteResponse response = MODEL_EXECUTE_DATA__EXECUTE_RESPONSE__INIT;
    ModelExecuteData__ExecuteModelResponse body = MODEL_EXECUTE_DATA__EXECUTE_MODEL_RESPONSE__INIT;
    ModelExecuteData__StepResult result = MODEL_EXECUTE_DATA__STEP_RESULT__INIT;
    const struct cox_batch *batch = NULL;
    struct cox_batch_output *outputs = NULL;
    int32_t *tokens = NULL;
    float *logprobs = NULL;
    int r = 0;
    lane_forget(lane);
    if (cox_truth_void_through(cox_truth_channel(&worker->control, lane->channel.id)) >=
        request->sequence)
        r = cox_fail(&lane->error, COX_ABORTED, "step %" PRIu64 " is void", request->sequence);
    else if (!step)
        r = cox_fail(&lane->error, COX_CORRUPT, "a step without an execute_model_request");
    else if (!worker->callbacks->execute)
        r = cox_fail(&lane->error, COX_UNSUPPORTED, "this worker has no execute callback");
    else if (cox_worker_paused(worker)) /* before anything of the step is looked at */
        r = cox_lane_fail_paused(lane);
    if (r == 0)
        r = cox_table_apply(table, request->sequence, step, &batch, &outputs, &lane->error);
    if (r == 0) {
        uint64_t begin = cox_now_ns();
        cox_table_weights(table, message->weights_version);
        cox_truth_set_state(lane->line, COX_RANK_RUNNING, request->sequence, begin);
        cox_fault_point(COX_FAULT_EXECUTE);
        struct step_call call = {worker, batch, outputs, &lane->error};
        worker->group_time_told = false;
        r = cox_lane_call(lane, request, COX_VISIT_STOPPED, call_step, &call);
        cox_fault_point(COX_FAULT_EXECUTED);
        body.has_model_execute_time = 1;
        lane->stamp_ns = cox_now_ns();
        body.model_execute_time = (float)((double)(lane->stamp_ns - begin) / 1e6);
        if (worker->group_time_told && request->lowest) {
            body.has_group_ns = body.has_group_wait_ns = 1;
            body.group_ns = worker->group_ns;
            body.group_wait_ns = worker->group_wait_ns;
        }
        /* The view is gone after commit: take what the answer needs first. */
        size_t count = batch->row_count;
        tokens = cox_arena_alloc(&lane->arena, (count + 1) * sizeof *tokens);
        logprobs = cox_arena_alloc(&lane->arena, (count + 1) * sizeof *logprobs);
        if (r == 0 &&
            (!tokens || !logprobs ||
             (!step->step && request->lowest && !step_fill_nested(lane, batch, outputs, &body))))
            r = cox_fail(&lane->error, COX_TOO_LARGE, "no memory for the answer of %zu rows",
                         count);
        for (size_t i = 0; r == 0 && i < count; i++) {
            tokens[i] = outputs[i].token;
            logprobs[i] = outputs[i].logprob;
        }
        if (r == 0)
            cox_table_commit(table);
        else
            cox_table_revert(table);
        /* relaxed: for display and diagnosis; the answer itself carries the base. */
        atomic_store_explicit(&lane->line->base, cox_table_base(table), memory_order_relaxed);
        cox_fault_point(COX_FAULT_STEP_COMMITTED);
        if (r == 0) {
            result.has_digest = 1;
            result.digest = cox_wire_token_digest(tokens, count);
            result.has_base_sequence = 1;
            result.base_sequence = cox_table_base(table);
            if (request->lowest && step->step) {
                result.n_tokens = result.n_logprobs = count;
                result.tokens = tokens;
                result.logprobs = logprobs;
            }
        }
    }
    if (r) {
        response_fail(lane, &response, r);
    } else {
        body.step = &result;
        response.result_case = RESULT(EXECUTE_MODEL_RESPONSE);
        response.execute_model_response = &body;
    }
    lane_answer(lane, request->sequence, request->type, &response);
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

static void serve_cleanup(struct cox_lane *lane, const struct cox_request *request,
                          const ExecuteRequest *message)
{
    const struct cox_worker *worker = lane->worker;
    if (message->request_case == REQUEST(TEXT_GENERATOR_CLEANUP_REQUEST) &&
        message->text_generator_cleanup_request) {
        const ModelExecuteData__TGCleanupRequest *cleanup = message->text_generator_cleanup_request;
        struct cleanup_call call = {.worker = worker};
        lane_forget(lane);
        cox_table_cleanup(worker->table, cleanup->seq_ids, cleanup->n_seq_ids, &call.slots,
                          &call.count);
        if (call.count && worker->callbacks->cleanup)
            cox_lane_call(lane, request, COX_VISIT_LET, call_cleanup, &call);
    }
    lane_done(lane, request->sequence, false);
}

/* ---- the other channels ---- */

static int serve_link_status(struct cox_lane *lane, const struct cox_request *request,
                             const ExecuteRequest *message, ExecuteResponse *response)
{
    (void)request;
    (void)message;
    const struct cox_worker *worker = lane->worker;
    if (!worker->callbacks->link_status)
        return cox_fail(&lane->error, COX_UNSUPPORTED, "this worker has no link_status callback");
    ModelExecuteData__PDLinkStatusResponse *body = cox_arena_alloc(&lane->arena, sizeof *body);
    if (!body)
        return cox_fail(&lane->error, COX_TOO_LARGE, "no memory for the answer");
    model_execute_data__pdlink_status_response__init(body);
    response->result_case = RESULT(PD_LINK_STATUS_RESPONSE);
    response->pd_link_status_response = body;
    return worker->callbacks->link_status(worker->context, &lane->arena, body, &lane->error);
}

static int serve_lora(struct cox_lane *lane, const struct cox_request *request,
                      const ExecuteRequest *message, ExecuteResponse *response)
{
    (void)request;
    const struct cox_worker *worker = lane->worker;
    if (message->request_case != REQUEST(LORA_OPERATION_REQUEST) ||
        !message->lora_operation_request)
        return cox_fail(&lane->error, COX_CORRUPT, "a LoRA operation without its request");
    ModelExecuteData__LoraOperationResponse *body = cox_arena_alloc(&lane->arena, sizeof *body);
    if (!body)
        return cox_fail(&lane->error, COX_TOO_LARGE, "no memory for the answer");
    model_execute_data__lora_operation_response__init(body);
    body->lora_name = message->lora_operation_request->lora_name;
    body->has_lora_op_status = 1;
    body->lora_op_status = MODEL_EXECUTE_DATA__LORA_OPERATION_STATUS__UNSUPPORT_CMD;
    response->result_case = RESULT(LORA_OPERATION_RESPONSE);
    response->lora_operation_response = body;
    if (!worker->callbacks->lora)
        return 0; /* the protocol has a status for this */
    lane->deadline_ns = message->deadline_ns;
    return worker->callbacks->lora(worker->context, message->lora_operation_request, &lane->arena,
                                   body, &lane->error);
}

static bool lora_given_up(void *context)
{
    const struct cox_lane *lane = context;
    const struct cox_worker *worker = lane->worker;
    return atomic_load_explicit(&worker->stopping, memory_order_acquire) ||
           cox_truth_ended(cox_truth_channel(&worker->control, lane->channel.id)) >= lane->taken;
}

/* A little before the coordinator gives up: the answer takes its time. */
static uint64_t lora_deadline(uint64_t deadline_ns)
{
    uint64_t now = cox_now_ns(), least = LORA_ANSWER_MS * COX_NSEC_PER_MSEC;
    if (deadline_ns == 0)
        return cox_deadline_after_ms(LORA_RETIRE_MS);
    uint64_t left = deadline_ns > now ? deadline_ns - now : 0;
    return deadline_ns - (left / 4 < least ? left / 4 : least);
}

int cox_worker_lora_retire(struct cox_worker *worker, const char *lora_id, struct cox_error *err)
{
    struct cox_lane *lane = &worker->lanes[COX_CHANNEL_LINK];
    uint32_t count = 0;
    uint64_t deadline_ns = lora_deadline(lane->deadline_ns);
    int r = cox_lora_uses_close(cox_table_lora_uses(worker->table), lora_id, deadline_ns,
                                lora_given_up, lane, &count);
    if (r == COX_BUSY)
        return cox_fail(err, r, "the LoRA adapter '%.*s' is still in use by %" PRIu32 " sequence%s",
                        COX_LORA_NAME_LENGTH_MAX, lora_id, count, count == 1 ? "" : "s");
    return r ? cox_fail(err, r, "no memory to unload a LoRA adapter") : 0;
}

void cox_worker_lora_admit(struct cox_worker *worker, const char *lora_id)
{
    cox_lora_uses_open(cox_table_lora_uses(worker->table), lora_id);
}

struct pull_call {
    struct cox_lane *lane;
    const struct ModelExecuteData__PullKVRequest *request;
    struct ModelExecuteData__PullKVResponse *response;
};

static int call_pull(void *argument)
{
    const struct pull_call *call = argument;
    const struct cox_worker *worker = call->lane->worker;
    return worker->callbacks->pull_kv(worker->context, call->request, &call->lane->arena,
                                      call->response, &call->lane->error);
}

static int serve_pull(struct cox_lane *lane, const struct cox_request *request,
                      const ExecuteRequest *message, ExecuteResponse *response)
{
    const struct cox_worker *worker = lane->worker;
    if (message->request_case != REQUEST(PULL_KV_REQUEST) || !message->pull_kv_request)
        return cox_fail(&lane->error, COX_CORRUPT, "a KV transfer without its request");
    if (!worker->callbacks->pull_kv)
        return cox_fail(&lane->error, COX_UNSUPPORTED, "this worker has no pull_kv callback");
    ModelExecuteData__PullKVResponse *body = cox_arena_alloc(&lane->arena, sizeof *body);
    if (!body)
        return cox_fail(&lane->error, COX_TOO_LARGE, "no memory for the answer");
    model_execute_data__pull_kvresponse__init(body);
    response->result_case = RESULT(PULL_KV_RESPONSE);
    response->pull_kv_response = body;
    struct pull_call call = {lane, message->pull_kv_request, body};
    return cox_lane_call(lane, request, COX_VISIT_STOPPED, call_pull, &call);
}

/* A command's failure is a result (command_result), not a failed request: every rank's is wanted.
 */
static int serve_recover(struct cox_lane *lane, const struct cox_request *request,
                         const ExecuteRequest *message, ExecuteResponse *response)
{
    (void)request;
    const struct cox_worker *worker = lane->worker;
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
    ModelExecuteData__RecoverCommandResponse *body = cox_arena_alloc(&lane->arena, sizeof *body);
    if (!body)
        return cox_fail(&lane->error, COX_TOO_LARGE, "no memory for the answer");
    model_execute_data__recover_command_response__init(body);
    body->has_npu_device_id = body->has_command_result = 1;
    body->npu_device_id = worker->options.device;
    body->command_result = command ? command(worker->context, &lane->error)
                                   : cox_fail(&lane->error, COX_UNSUPPORTED,
                                              "this worker has no callback for this command");
    /* release; partner: lane_forget. */
    if (message->execute_type == TYPE(RECOVER_COMMAND_EXEC) && body->command_result == 0)
        atomic_store_explicit(&lane->worker->pause.forget, true, memory_order_release);
    if (body->command_result)
        body->error_msg = lane->error.text;
    response->result_case = RESULT(RECOVER_COMMAND_RESPONSE);
    response->recover_command_response = body;
    return 0;
}

COX_HOT static void serve_with(struct cox_lane *lane, const struct cox_request *request,
                               const ExecuteRequest *message,
                               int (*serve)(struct cox_lane *, const struct cox_request *,
                                            const ExecuteRequest *, ExecuteResponse *))
{
    ExecuteResponse response = MODEL_EXECUTE_DATA__EXECUTE_RESPONSE__INIT;
    lane->stamp_ns = cox_now_coarse_ns();
    cox_truth_set_state(lane->line, COX_RANK_RUNNING, request->sequence, lane->stamp_ns);
    int r = serve(lane, request, message, &response);
    if (r)
        response_fail(lane, &response, r);
    lane->stamp_ns = cox_now_coarse_ns();
    lane_answer(lane, request->sequence, request->type, &response);
}

/* ---- opaque ---- */

struct opaque_call {
    struct cox_lane *lane;
    const struct cox_request *request;
    struct cox_opaque_answer answer;
    size_t length;
};

COX_HOT static int call_opaque(void *argument)
{
    struct opaque_call *call = argument;
    const struct cox_worker *worker = call->lane->worker;
    return worker->callbacks->opaque(worker->context, call->request->bytes, call->request->size,
                                     call->answer.slot, call->answer.slot_capacity, &call->length,
                                     &call->lane->error);
}

COX_HOT static void serve_opaque(struct cox_lane *lane, const struct cox_request *request)
{
    const struct cox_worker *worker = lane->worker;
    struct opaque_call call = {.lane = lane, .request = request};
    cox_truth_set_state(lane->line, COX_RANK_RUNNING, request->sequence, lane->stamp_ns);
    struct cox_opaque_answer *answer = &call.answer;
    answer->thread = lane->self;
    answer->sequence = request->sequence;
    answer->slot = answer->bytes = cox_reply_slot(&lane->channel, worker->options.rank,
                                                  request->sequence, false, &answer->slot_capacity);
    answer->capacity = answer->slot_capacity;
    lane->opaque = answer;
    cox_fault_point(COX_FAULT_EXECUTE);
    int r = worker->callbacks->opaque
                ? cox_lane_call(lane, request, COX_VISIT_STOPPED, call_opaque, &call)
                : cox_fail(&lane->error, COX_UNSUPPORTED, "this worker has no opaque callback");
    lane->opaque = NULL;
    lane_return(lane, request->sequence);
    if (r == 0 && call.length > answer->capacity)
        r = cox_fail(&lane->error, COX_TOO_LARGE, "the answer has %zu bytes, there is room for %zu",
                     call.length, answer->capacity);
    if (r == 0 && call.length > answer->slot_capacity) {
        lane_send_block(lane, request->sequence, COX_TYPE_OPAQUE, call.length);
        return;
    }
    if (r == 0) {
        uint8_t *slot = lane_slot(lane, request->sequence, false, &answer->slot_capacity);
        if (answer->bytes != answer->slot) { /* it was to be longer */
            memcpy(slot, answer->bytes, call.length);
            cox_lane_release_block(lane, request->sequence);
        }
        lane_send(lane, request->sequence, call.length, false, false);
        return;
    }
    if (answer->bytes != answer->slot)
        cox_lane_release_block(lane, request->sequence);
    ExecuteResponse response = MODEL_EXECUTE_DATA__EXECUTE_RESPONSE__INIT;
    response_fail(lane, &response, r);
    lane_answer(lane, request->sequence, request->type, &response);
}

/* ---- dispatch ---- */

/* A private copy: other ranks of a named group could write the frame while it is unpacked. */
COX_HOT static int lane_copy(struct cox_lane *lane, const struct cox_request *request)
{
    if (lane->copy_size < request->size) {
        uint8_t *grown = realloc(lane->copy, request->size);
        if (!grown)
            return cox_fail(&lane->error, -ENOMEM, "no memory for a request of %zu bytes",
                            request->size);
        lane->copy = grown;
        lane->copy_size = request->size;
    }
    if (request->size > 0) /* a message of zeroes only has no bytes, and copy may still be NULL */
        memcpy(lane->copy, request->bytes, request->size);
    return 0;
}

COX_HOT static void lane_dispatch(struct cox_lane *lane, const struct cox_request *request,
                                  const ExecuteRequest *message)
{
    const struct cox_worker *worker = lane->worker;
    switch (message->execute_type) {
    case TYPE(MODEL_INIT):
        serve_init(lane, request, message);
        return;
    case TYPE(MODEL_INFER):
    case TYPE(MODEL_INFER_SECOND):
        serve_step(lane, request, message);
        return;
    case TYPE(TEXT_GENERATOR_CLEANUP):
    case TYPE(EOS_CLEANUP):
        serve_cleanup(lane, request, message);
        return;
    case TYPE(PD_LINK):
        if (message->request_case == REQUEST(PD_LINK_REQUEST) && message->pd_link_request &&
            worker->callbacks->link)
            worker->callbacks->link(worker->context, message->pd_link_request);
        lane_done(lane, request->sequence, false);
        return;
    case TYPE(PD_LINK_STATUS_QUERY):
        serve_with(lane, request, message, serve_link_status);
        return;
    case TYPE(LORA_OPERATION):
        serve_with(lane, request, message, serve_lora);
        return;
    case TYPE(KV_TRANSFER):
        serve_with(lane, request, message, serve_pull);
        return;
    case TYPE(PAUSE_COMMAND_EXEC):
    case TYPE(PAUSE_COMMAND_EXEC_ROCE):
    case TYPE(CLEAR_COMMAND_EXEC):
    case TYPE(RECOVER_COMMAND_EXEC):
    case TYPE(START_COMMAND_EXEC):
        serve_with(lane, request, message, serve_recover);
        return;
    default: {
        ExecuteResponse response = MODEL_EXECUTE_DATA__EXECUTE_RESPONSE__INIT;
        cox_fail(&lane->error, COX_UNSUPPORTED, "a worker has no operation %s",
                 cox_wire_type_name((uint32_t)message->execute_type));
        response_fail(lane, &response, COX_UNSUPPORTED);
        lane_answer(lane, request->sequence, request->type, &response);
    }
    }
}

/* The request is not served. What nobody waits for is not answered: a legacy coordinator would take
 * the token of such an answer for the one of its next request. */
static void lane_reject(struct cox_lane *lane, const struct cox_request *request, int status)
{
    const struct cox_operation *operation = cox_operation_find(request->type);
    if (operation && !operation->replies) {
        lane_done(lane, request->sequence, false);
        cox_worker_tell(lane->worker, -1, request->sequence, lane->error.text,
                        cox_deadline_after_ms(NOTICE_MS));
        return;
    }
    ExecuteResponse response = MODEL_EXECUTE_DATA__EXECUTE_RESPONSE__INIT;
    response_fail(lane, &response, status);
    lane_answer(lane, request->sequence, request->type, &response);
}

void cox_lane_refuse(struct cox_lane *lane, const struct cox_request *request, int status,
                     const char *text)
{
    struct cox_request typed = *request;
    /* A stand-in's record has no type, and the message that has one cannot be read. */
    if (lane->worker->stands_in || typed.type == COX_TYPE_OPAQUE_BLOCK)
        typed.type = COX_TYPE_OPAQUE;
    lane->error = (struct cox_error){0};
    cox_fail(&lane->error, status, "%s", text);
    lane_return(lane, request->sequence);
    lane_reject(lane, &typed, status);
}

static void lane_serve_opaque_block(struct cox_lane *lane, const struct cox_request *typed,
                                    bool in_block, int r)
{
    if (r == 0 && !in_block)
        r = cox_fail(&lane->error, COX_CORRUPT, "opaque bytes in a block that is not told");
    if (r) {
        lane_return(lane, typed->sequence);
        lane_reject(lane, typed, r);
    } else {
        serve_opaque(lane, typed);
    }
    cox_lane_close_block(lane, typed->sequence);
}

/* The message itself is in the block that this one tells of. */
static int lane_unpack_block(struct cox_lane *lane, const struct cox_request *block,
                             ExecuteRequest **message)
{
    if (lane->worker->request_size_default)
        lane->arena.size_max += 2 * block->size;
    int r = cox_wire_request_unpack(&lane->arena, block->bytes, block->size, message);
    return r ? cox_fail(&lane->error, r, "a request of %zu bytes that is no ExecuteRequest",
                        block->size)
             : 0;
}

/* An arena that has grown for one large request is not kept. */
static void lane_trim(struct cox_lane *lane)
{
    cox_arena_deinit(&lane->arena);
    cox_arena_init(&lane->arena, 0, lane->worker->options.request_size_max); /* cannot fail */
}

COX_HOT bool cox_lane_serve(struct cox_lane *lane, const struct cox_request *request)
{
    cox_error_clear(&lane->error);
    if (request->type == COX_TYPE_OPAQUE) {
        serve_opaque(lane, request);
        return false;
    }
    cox_arena_reset(&lane->arena);
    int r = lane_copy(lane, request);
    const struct cox_layout_channel_truth *truth =
        cox_truth_channel(&lane->worker->control, lane->channel.id);
    /* Who has written over our words may have made the coordinator believe that the frame is free;
     * what was copied is then partly the next request. */
    if (r == 0 &&
        !cox_truth_frame_holds(truth, lane->worker->control.geometry.depth, request->sequence))
        r = cox_fail(&lane->error, COX_CORRUPT, "the frame was written again while it was read");
    ExecuteRequest *message = NULL;
    struct cox_request typed = *request;
    if (r == 0) {
        r = cox_wire_request_unpack(&lane->arena, lane->copy, request->size, &message);
        if (r)
            cox_fail(&lane->error, r, "a request of %zu bytes that is no ExecuteRequest",
                     request->size);
    }
    const bool in_block = r == 0 && message->bulk && cox_lane_has_blocks(lane);
    if (in_block)
        r = cox_lane_open_block(lane, request->sequence, message->bulk, &typed.bytes, &typed.size);
    if (request->type == COX_TYPE_OPAQUE_BLOCK) {
        typed.type = COX_TYPE_OPAQUE;
        lane_serve_opaque_block(lane, &typed, in_block, r);
        return false;
    }
    if (in_block && r == 0)
        r = lane_unpack_block(lane, &typed, &message);
    lane_return(lane, request->sequence);
    if (in_block)
        cox_lane_close_block(lane, request->sequence);
    const struct cox_operation *operation =
        r == 0 ? cox_operation_find((uint32_t)message->execute_type) : NULL;
    if (r == 0 && lane->worker->stands_in)
        typed.type = (uint32_t)message->execute_type;
    /* The record says it as well: bytes written over in a frame end nobody. */
    if (operation && message->execute_type == TYPE(MODEL_FINALIZE) &&
        typed.type == TYPE(MODEL_FINALIZE)) {
        lane_done(lane, request->sequence, false);
        cox_fault_point(COX_FAULT_GOODBYE_HEARD);
        return true;
    }
    if (r == 0 && (!operation || operation->channel != lane->channel.id ||
                   (uint32_t)message->execute_type != typed.type))
        r = cox_fail(&lane->error, COX_CORRUPT, "%s does not belong on the %s channel",
                     cox_wire_type_name((uint32_t)message->execute_type),
                     cox_channel_name(lane->channel.id));
    if (r)
        lane_reject(lane, &typed, r);
    else
        lane_dispatch(lane, &typed, message);
    if (in_block)
        lane_trim(lane);
    return false;
}
