#include "step_wire.h"

#include "proto/executor.pb-c.h"
#include "varint.h"

#include <assert.h>
#include <limits.h>
#include <string.h>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "fixed numbers are copied as they are");

typedef Coxswain__ExecuteRequest ExecuteRequest;
typedef Coxswain__ExecuteModelRequest ExecuteModelRequest;
typedef Coxswain__StepDelta StepDelta;
typedef Coxswain__ExecuteResponse ExecuteResponse;
typedef Coxswain__ExecuteModelResponse ExecuteModelResponse;
typedef Coxswain__StepResult StepResult;

/* What stands in front of a field: its number and how it is written. */
#define TAG_VARINT(number) ((number) << 3)
#define TAG_BYTES(number) ((number) << 3 | 2)
#define TAG_FIXED32(number) ((number) << 3 | 5)
/* Of a number from 1000 up to 1022, in two bytes as they lie in memory. */
#define TAG_OWN(tag) (uint16_t)(((tag)&0x7f) | 0x80 | (tag) >> 7 << 8)

/* All but the columns: tags, lengths and single numbers of three messages, the longest of each. */
#define FIXED_SIZE_MAX 256

/* Of every number in a column: uint32_t, int32_t or float. */
#define COLUMN_ITEM_SIZE sizeof(uint32_t)

/* Digests of a StepResult: all of them, or none. */
#define DIGEST_COUNT 5
#define DIGEST_SIZE (DIGEST_COUNT * sizeof(uint64_t))

/* Columns of a StepDelta are known by their numbers, which fit a byte with the tag. */
#define COLUMN_COUNT 14

/* ---- packing, from the last field to the first ---- */

static uint8_t *put_tag(uint8_t *end, unsigned tag)
{
    *--end = (uint8_t)tag;
    return end;
}

static uint8_t *put_own_tag(uint8_t *end, unsigned tag)
{
    const uint16_t bytes = TAG_OWN(tag);
    end -= sizeof bytes;
    memcpy(end, &bytes, sizeof bytes);
    return end;
}

static uint8_t *put_own_number(uint8_t *end, unsigned number, bool has, uint64_t value)
{
    return has ? put_own_tag(cox_varint_put(end, value), TAG_VARINT(number)) : end;
}

static uint8_t *put_number(uint8_t *end, unsigned number, bool has, uint64_t value)
{
    return has ? put_tag(cox_varint_put(end, value), TAG_VARINT(number)) : end;
}

/* In front of what was written between begin and end. */
static uint8_t *put_length(uint8_t *begin, const uint8_t *end)
{
    return cox_varint_put(begin, (uint64_t)(end - begin));
}

/* A packed column of count numbers of 4 bytes. */
static uint8_t *put_column(uint8_t *end, unsigned number, const void *values, size_t count)
{
    if (count == 0)
        return end;
    const size_t size = COLUMN_ITEM_SIZE * count;
    memcpy(end - size, values, size);
    return put_tag(cox_varint_put(end - size, size), TAG_BYTES(number));
}

static bool request_is_plain(const ExecuteRequest *request)
{
    if (request->request_case != COXSWAIN__EXECUTE_REQUEST__REQUEST_EXECUTE_MODEL_REQUEST ||
        !request->execute_model_request || !request->execute_model_request->step)
        return false;
    const ExecuteModelRequest *model = request->execute_model_request;
    const StepDelta *step = model->step;
    const size_t counts =
        request->n_config | request->base.n_unknown_fields | model->base.n_unknown_fields |
        step->base.n_unknown_fields | model->n_seq_group_metadata_list |
        model->n_blocks_to_swap_in | model->n_blocks_to_swap_out | model->n_blocks_to_copy |
        model->n_finished_requests_ids | model->n_last_sampled_token_ids |
        model->n_all_dp_batches_seq_lens | step->n_announced | request->n_group_memory;
    const int flags = request->has_rank_group_incarnation | request->has_replayed |
                      model->has_virtual_engine | model->has_num_lookahead_slots |
                      model->has_running_queue_size | model->has_num_steps |
                      model->has_spec_step_idx | model->has_wait_queue_len;
    return counts == 0 && flags == 0 && !request->large_payload && !request->weights;
}

static uint8_t *put_step(uint8_t *end, const StepDelta *step)
{
    uint8_t *at = end;
    at = put_column(at, 13, step->row_silent, step->n_row_silent);
    at = put_column(at, 12, step->row_token_count, step->n_row_token_count);
    at = put_column(at, 11, step->row_position, step->n_row_position);
    at = put_column(at, 10, step->row_slot, step->n_row_slot);
    at = put_column(at, 9, step->token, step->n_token);
    at = put_column(at, 8, step->token_slot, step->n_token_slot);
    at = put_column(at, 7, step->append_table, step->n_append_table);
    at = put_column(at, 6, step->append_block, step->n_append_block);
    at = put_column(at, 5, step->append_slot, step->n_append_slot);
    at = put_column(at, 3, step->finished, step->n_finished);
    at = put_number(at, 2, step->has_table_count, step->table_count);
    at = put_number(at, 1, step->has_base_sequence, step->base_sequence);
    return put_own_tag(put_length(at, end), TAG_BYTES(1000));
}

/* The message lies at the end of what was set aside for it. */
static void to_front(uint8_t *buffer, const uint8_t *at, const uint8_t *end, size_t *ret_size)
{
    *ret_size = (size_t)(end - at);
    memmove(buffer, at, *ret_size);
}

bool cox_step_wire_pack_request(const ExecuteRequest *request, uint8_t *buffer, size_t buffer_size,
                                size_t *ret_size)
{
    if (!request_is_plain(request))
        return false;
    const ExecuteModelRequest *model = request->execute_model_request;
    const StepDelta *step = model->step;
    const size_t numbers = step->n_finished + step->n_append_slot + step->n_append_block +
                           step->n_append_table + step->n_token_slot + step->n_token +
                           step->n_row_slot + step->n_row_position + step->n_row_token_count +
                           step->n_row_silent;
    const size_t size_max = FIXED_SIZE_MAX + COLUMN_ITEM_SIZE * numbers;
    if (size_max > buffer_size || size_max > INT_MAX)
        return false;
    uint8_t *const end = buffer + size_max;
    uint8_t *at = end;
    at = put_own_number(at, 1006, request->has_weights_version, request->weights_version);
    at = put_own_number(at, 1001, request->has_trace_id, request->trace_id);
    at = put_own_number(at, 1000, request->has_deadline_ns, request->deadline_ns);
    uint8_t *const model_end = at;
    at = put_step(at, step);
    at = put_number(at, 12, model->has_forward_type, (uint64_t)(int64_t)(int)model->forward_type);
    at = put_tag(put_length(at, model_end), TAG_BYTES(3));
    at =
        put_number(at, 1, request->has_execute_type, (uint64_t)(int64_t)(int)request->execute_type);
    to_front(buffer, at, end, ret_size);
    return true;
}

static bool response_is_plain(const ExecuteResponse *response)
{
    if (response->result_case != COXSWAIN__EXECUTE_RESPONSE__RESULT_EXECUTE_MODEL_RESPONSE ||
        !response->execute_model_response || !response->execute_model_response->step)
        return false;
    const ExecuteModelResponse *model = response->execute_model_response;
    const size_t digests = model->step->n_digests;
    const size_t counts = response->base.n_unknown_fields | model->base.n_unknown_fields |
                          model->step->base.n_unknown_fields | model->n_outputs |
                          (digests && digests != DIGEST_COUNT);
    const int flags = response->has_error_channel | response->has_error_sequence |
                      model->has_model_forward_time | model->has_layerwise_is_prefill |
                      response->has_error_detail;
    return counts == 0 && flags == 0 && !response->error_text && !response->large_payload &&
           !model->err_msg;
}

static uint8_t *put_result(uint8_t *end, const StepResult *result)
{
    uint8_t *at = end;
    if (result->n_digests) {
        at -= DIGEST_SIZE;
        memcpy(at, result->digests, DIGEST_SIZE);
        *--at = DIGEST_SIZE;
        at = put_tag(at, TAG_BYTES(5));
    }
    at = put_number(at, 4, result->has_base_sequence, result->base_sequence);
    at = put_column(at, 2, result->logprobs, result->n_logprobs);
    at = put_column(at, 1, result->tokens, result->n_tokens);
    return put_own_tag(put_length(at, end), TAG_BYTES(1000));
}

bool cox_step_wire_pack_response(const ExecuteResponse *response, uint8_t *buffer,
                                 size_t buffer_size, size_t *ret_size)
{
    if (!response_is_plain(response))
        return false;
    const ExecuteModelResponse *model = response->execute_model_response;
    const size_t size_max =
        FIXED_SIZE_MAX + COLUMN_ITEM_SIZE * (model->step->n_tokens + model->step->n_logprobs);
    if (size_max > buffer_size || size_max > INT_MAX)
        return false;
    uint8_t *const end = buffer + size_max;
    uint8_t *at = put_own_number(end, 1002, model->has_group_wait_ns, model->group_wait_ns);
    at = put_own_number(at, 1001, model->has_group_ns, model->group_ns);
    at = put_result(at, model->step);
    if (model->has_model_execute_time) {
        at -= sizeof model->model_execute_time;
        memcpy(at, &model->model_execute_time, sizeof model->model_execute_time);
        at = put_tag(at, TAG_FIXED32(3));
    }
    at = put_tag(put_length(at, end), TAG_BYTES(4));
    at = put_number(at, 3, response->has_status, (uint64_t)response->status);
    at = put_number(at, 2, response->has_rank, (uint64_t)response->rank);
    at = put_number(at, 1, response->has_msg_type, (uint64_t)response->msg_type);
    to_front(buffer, at, end, ret_size);
    return true;
}

/* ---- unpacking, in the order in which fields are written ---- */

struct span {
    const uint8_t *at;
    const uint8_t *end;
};

/* Takes the tag if it is the next one. */
static inline bool take_tag(struct span *span, unsigned tag)
{
    if (span->at == span->end || *span->at != tag)
        return false;
    span->at++;
    return true;
}

static inline bool take_own_tag(struct span *span, unsigned tag)
{
    uint16_t bytes;
    if (span->end - span->at < (ptrdiff_t)sizeof bytes)
        return false;
    memcpy(&bytes, span->at, sizeof bytes);
    if (bytes != TAG_OWN(tag))
        return false;
    span->at += sizeof bytes;
    return true;
}

/* Behind a tag of bytes. */
static inline bool take_span(struct span *span, struct span *ret_inner)
{
    const uint8_t *const length = span->at;
    uint64_t size;
    if (!cox_varint_get(&span->at, span->end, &size) || size > (uint64_t)(span->end - span->at) ||
        span->at - length > COX_VARINT_UINT32_SIZE_MAX)
        return false;
    *ret_inner = (struct span){span->at, span->at + size};
    span->at += size;
    return true;
}

/* The same for a column. */
static inline bool take_column(struct span *span, struct span *ret_column)
{
    return take_span(span, ret_column) &&
           (size_t)(ret_column->end - ret_column->at) % COLUMN_ITEM_SIZE == 0;
}

/* A field that may be there: false only when it is, and broken. */
static inline bool take_number(struct span *span, bool tagged, protobuf_c_boolean *ret_has,
                               uint64_t *ret_value)
{
    if (!tagged)
        return true;
    *ret_has = 1;
    return cox_varint_get(&span->at, span->end, ret_value);
}

/* The same for an int32 or an enum, none of which is ever negative here. */
static inline bool take_int(struct span *span, bool tagged, protobuf_c_boolean *ret_has,
                            int *ret_value)
{
    uint64_t value = 0;
    if (!take_number(span, tagged, ret_has, &value) || value > INT_MAX)
        return false;
    if (tagged)
        *ret_value = (int)value;
    return true;
}

/* Leaves it to protobuf-c to say that the arena is exhausted. */
static void *arena_take(struct cox_arena *arena, size_t size)
{
    const bool exhausted = arena->exhausted;
    void *memory = cox_arena_alloc(arena, size);
    arena->exhausted = exhausted;
    return memory;
}

/* Behind the structs of a message: its columns. */
struct step_request {
    ExecuteRequest request;
    ExecuteModelRequest model;
    StepDelta step;
    uint32_t numbers[];
};

static const struct step_request blank_request = {
    .request = COXSWAIN__EXECUTE_REQUEST__INIT,
    .model = COXSWAIN__EXECUTE_MODEL_REQUEST__INIT,
    .step = COXSWAIN__STEP_DELTA__INIT,
};

/* What a message is made of, before there is memory for it. */
struct request_plan {
    struct span columns[COLUMN_COUNT];
    /* of all of them */
    size_t column_size;
    uint64_t deadline_ns, trace_id, weights_version, base_sequence, table_count;
    int execute_type, forward_type;
    protobuf_c_boolean has_deadline_ns, has_trace_id, has_weights_version, has_base_sequence,
        has_table_count, has_execute_type, has_forward_type;
};

static bool plan_step(struct span span, struct request_plan *plan)
{
    unsigned last = 2;
    if (!take_number(&span, take_tag(&span, TAG_VARINT(1)), &plan->has_base_sequence,
                     &plan->base_sequence) ||
        !take_number(&span, take_tag(&span, TAG_VARINT(2)), &plan->has_table_count,
                     &plan->table_count) ||
        plan->table_count > UINT32_MAX)
        return false;
    while (span.at < span.end) {
        const unsigned tag = *span.at++, number = tag >> 3;
        /* Not an announcement, which has columns of its own. */
        if ((tag & 7) != 2 || number <= last || number >= COLUMN_COUNT || number == 4 ||
            !take_column(&span, &plan->columns[number]))
            return false;
        plan->column_size += (size_t)(plan->columns[number].end - plan->columns[number].at);
        last = number;
    }
    return true;
}

static bool plan_request(struct span span, struct request_plan *plan)
{
    struct span model, step;
    return take_int(&span, take_tag(&span, TAG_VARINT(1)), &plan->has_execute_type,
                    &plan->execute_type) &&
           take_tag(&span, TAG_BYTES(3)) && take_span(&span, &model) &&
           take_number(&span, take_own_tag(&span, TAG_VARINT(1000)), &plan->has_deadline_ns,
                       &plan->deadline_ns) &&
           take_number(&span, take_own_tag(&span, TAG_VARINT(1001)), &plan->has_trace_id,
                       &plan->trace_id) &&
           take_number(&span, take_own_tag(&span, TAG_VARINT(1006)), &plan->has_weights_version,
                       &plan->weights_version) &&
           span.at == span.end &&
           take_int(&model, take_tag(&model, TAG_VARINT(12)), &plan->has_forward_type,
                    &plan->forward_type) &&
           take_own_tag(&model, TAG_BYTES(1000)) && take_span(&model, &step) &&
           model.at == model.end && plan_step(step, plan);
}

/* Copies a column to free. Returns what is free behind it. */
static uint32_t *column_get(const struct span *span, uint32_t *free, size_t *ret_count,
                            uint32_t **ret_numbers)
{
    const size_t size = (size_t)(span->end - span->at);
    if (size == 0)
        return free;
    memcpy(free, span->at, size);
    *ret_count = size / COLUMN_ITEM_SIZE;
    *ret_numbers = free;
    return free + *ret_count;
}

static void columns_get(const struct span columns[static COLUMN_COUNT], StepDelta *step,
                        uint32_t *free)
{
    uint32_t *append_block = NULL, *token = NULL;
    free = column_get(&columns[3], free, &step->n_finished, &step->finished);
    free = column_get(&columns[5], free, &step->n_append_slot, &step->append_slot);
    free = column_get(&columns[6], free, &step->n_append_block, &append_block);
    free = column_get(&columns[7], free, &step->n_append_table, &step->append_table);
    free = column_get(&columns[8], free, &step->n_token_slot, &step->token_slot);
    free = column_get(&columns[9], free, &step->n_token, &token);
    free = column_get(&columns[10], free, &step->n_row_slot, &step->row_slot);
    free = column_get(&columns[11], free, &step->n_row_position, &step->row_position);
    free = column_get(&columns[12], free, &step->n_row_token_count, &step->row_token_count);
    column_get(&columns[13], free, &step->n_row_silent, &step->row_silent);
    step->append_block = (int32_t *)append_block;
    step->token = (int32_t *)token;
}

bool cox_step_wire_unpack_request(struct cox_arena *arena, const uint8_t *bytes, size_t size,
                                  ExecuteRequest **ret_request)
{
    struct request_plan plan = {0};
    if (size == 0 || !plan_request((struct span){bytes, bytes + size}, &plan))
        return false;
    struct step_request *own = arena_take(arena, sizeof *own + plan.column_size);
    if (!own)
        return false;
    memcpy(own, &blank_request, sizeof blank_request);
    columns_get(plan.columns, &own->step, own->numbers);
    own->step.has_base_sequence = plan.has_base_sequence;
    own->step.base_sequence = plan.base_sequence;
    own->step.has_table_count = plan.has_table_count;
    own->step.table_count = (uint32_t)plan.table_count;
    own->model.has_forward_type = plan.has_forward_type;
    own->model.forward_type = (Coxswain__ForwardType)plan.forward_type;
    own->model.step = &own->step;
    own->request.has_execute_type = plan.has_execute_type;
    own->request.execute_type = (Coxswain__ExecuteType)plan.execute_type;
    own->request.has_deadline_ns = plan.has_deadline_ns;
    own->request.deadline_ns = plan.deadline_ns;
    own->request.has_trace_id = plan.has_trace_id;
    own->request.trace_id = plan.trace_id;
    own->request.has_weights_version = plan.has_weights_version;
    own->request.weights_version = plan.weights_version;
    own->request.request_case = COXSWAIN__EXECUTE_REQUEST__REQUEST_EXECUTE_MODEL_REQUEST;
    own->request.execute_model_request = &own->model;
    *ret_request = &own->request;
    return true;
}

struct step_response {
    ExecuteResponse response;
    ExecuteModelResponse model;
    StepResult result;
    uint64_t digests[DIGEST_COUNT];
    uint32_t numbers[];
};

static const struct step_response blank_response = {
    .response = COXSWAIN__EXECUTE_RESPONSE__INIT,
    .model = COXSWAIN__EXECUTE_MODEL_RESPONSE__INIT,
    .result = COXSWAIN__STEP_RESULT__INIT,
};

struct response_plan {
    struct span tokens, logprobs;
    /* NULL: none */
    const uint8_t *digests;
    uint64_t base_sequence, group_ns, group_wait_ns;
    float execute_time;
    int msg_type, rank, status;
    protobuf_c_boolean has_msg_type, has_rank, has_status, has_execute_time, has_base_sequence,
        has_group_ns, has_group_wait_ns;
};

static inline bool take_fixed(struct span *span, bool tagged, void *to, size_t size,
                              protobuf_c_boolean *ret_has)
{
    if (!tagged)
        return true;
    if ((size_t)(span->end - span->at) < size)
        return false;
    memcpy(to, span->at, size);
    span->at += size;
    *ret_has = 1;
    return true;
}

static inline bool take_digests(struct span *span, const uint8_t **ret_digests)
{
    if (!take_tag(span, TAG_BYTES(5)))
        return true;
    if ((size_t)(span->end - span->at) < 1 + DIGEST_SIZE || *span->at != DIGEST_SIZE)
        return false;
    *ret_digests = span->at + 1;
    span->at += 1 + DIGEST_SIZE;
    return true;
}

static bool plan_result(struct span span, struct response_plan *plan)
{
    return (!take_tag(&span, TAG_BYTES(1)) || take_column(&span, &plan->tokens)) &&
           (!take_tag(&span, TAG_BYTES(2)) || take_column(&span, &plan->logprobs)) &&
           take_number(&span, take_tag(&span, TAG_VARINT(4)), &plan->has_base_sequence,
                       &plan->base_sequence) &&
           take_digests(&span, &plan->digests) && span.at == span.end;
}

static bool plan_response(struct span span, struct response_plan *plan)
{
    struct span model, result;
    return take_int(&span, take_tag(&span, TAG_VARINT(1)), &plan->has_msg_type, &plan->msg_type) &&
           take_int(&span, take_tag(&span, TAG_VARINT(2)), &plan->has_rank, &plan->rank) &&
           take_int(&span, take_tag(&span, TAG_VARINT(3)), &plan->has_status, &plan->status) &&
           take_tag(&span, TAG_BYTES(4)) && take_span(&span, &model) && span.at == span.end &&
           take_fixed(&model, take_tag(&model, TAG_FIXED32(3)), &plan->execute_time,
                      sizeof plan->execute_time, &plan->has_execute_time) &&
           take_own_tag(&model, TAG_BYTES(1000)) && take_span(&model, &result) &&
           take_number(&model, take_own_tag(&model, TAG_VARINT(1001)), &plan->has_group_ns,
                       &plan->group_ns) &&
           take_number(&model, take_own_tag(&model, TAG_VARINT(1002)), &plan->has_group_wait_ns,
                       &plan->group_wait_ns) &&
           model.at == model.end && plan_result(result, plan);
}

bool cox_step_wire_unpack_response(struct cox_arena *arena, const uint8_t *bytes, size_t size,
                                   ExecuteResponse **ret_response)
{
    struct response_plan plan = {0};
    if (size == 0 || !plan_response((struct span){bytes, bytes + size}, &plan))
        return false;
    const size_t column_size =
        (size_t)(plan.tokens.end - plan.tokens.at) + (size_t)(plan.logprobs.end - plan.logprobs.at);
    struct step_response *own = arena_take(arena, sizeof *own + column_size);
    if (!own)
        return false;
    memcpy(own, &blank_response, offsetof(struct step_response, digests));
    uint32_t *tokens = NULL, *logprobs = NULL;
    uint32_t *free = column_get(&plan.tokens, own->numbers, &own->result.n_tokens, &tokens);
    column_get(&plan.logprobs, free, &own->result.n_logprobs, &logprobs);
    own->result.tokens = (int32_t *)tokens;
    own->result.logprobs = (float *)logprobs;
    if (plan.digests) {
        memcpy(own->digests, plan.digests, sizeof own->digests);
        own->result.n_digests = DIGEST_COUNT;
        own->result.digests = own->digests;
    }
    own->result.has_base_sequence = plan.has_base_sequence;
    own->result.base_sequence = plan.base_sequence;
    own->model.has_model_execute_time = plan.has_execute_time;
    own->model.model_execute_time = plan.execute_time;
    own->model.has_group_ns = plan.has_group_ns;
    own->model.group_ns = plan.group_ns;
    own->model.has_group_wait_ns = plan.has_group_wait_ns;
    own->model.group_wait_ns = plan.group_wait_ns;
    own->model.step = &own->result;
    own->response.has_msg_type = plan.has_msg_type;
    own->response.msg_type = plan.msg_type;
    own->response.has_rank = plan.has_rank;
    own->response.rank = plan.rank;
    own->response.has_status = plan.has_status;
    own->response.status = plan.status;
    own->response.result_case = COXSWAIN__EXECUTE_RESPONSE__RESULT_EXECUTE_MODEL_RESPONSE;
    own->response.execute_model_response = &own->model;
    *ret_response = &own->response;
    return true;
}
