#include "message.h"

#include "channel/base/idioms.h"
#include "proto/executor.pb-c.h"

#include <coxswain/base.h>
#include <coxswain/requests.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef Coxswain__StepSequence StepSequence;
typedef Coxswain__StepBlockTable StepBlockTable;
typedef Coxswain__SamplingParams SamplingParams;
typedef Coxswain__SequenceGroupMetadata Group;

/* digits of an int64, its sign and the terminating 0 */
#define ID_SIZE 24

/* All structs for one row of the nested form. */
struct row_group {
    Group group;
    SamplingParams sampling;
    ProtobufCBinaryData table;
    char id[ID_SIZE];
    protobuf_c_boolean is_prefill;
    protobuf_c_boolean is_last_chunk;
    /* [start, end): the positions that the row computes */
    int32_t start, end;
};

/* All structs for an announcement of the packed form. */
struct announcement {
    StepSequence sequence;
    StepBlockTable table;
    /* &table: a repeated field is an array of pointers */
    StepBlockTable *tables;
    SamplingParams sampling;
};

struct cox_step_message {
    bool nested;
    uint32_t row_count_max;
    Coxswain__ExecuteRequest request;
    Coxswain__ExecuteModelRequest model;
    Coxswain__WeightsCandidate weights;
    uint8_t weights_handle[COX_HANDLE_SIZE];

    Coxswain__StepDelta delta;
    struct announcement *announcements;
    StepSequence **announced;
    /* one allocation for all columns of uint32_t */
    uint32_t *columns;
    int32_t *append_block;

    struct row_group *groups;
    Group **group_list;
    /* the int64 arrays of a nested step */
    uint8_t *bytes;
    size_t bytes_size;
};

static void sampling_fill(SamplingParams *params, const struct cox_sequence *sequence)
{
    const struct cox_prompt_sampling *choice = &sequence->request.sampling;
    coxswain__sampling_params__init(params);
    COX_SET(params, temperature, choice->temperature);
    COX_SET(params, top_k, choice->top_k);
    COX_SET(params, top_p, choice->top_p);
    COX_SET(params, seed, choice->seed);
    COX_SET(params, n, 1);
    COX_SET(params, max_output_len, (int32_t)(sequence->token_end - sequence->prompt_count));
}

/* ---- constructor and destructor ---- */

static int packed_init(struct cox_step_message *message)
{
    size_t n = message->row_count_max;
    message->announcements = calloc(n, sizeof *message->announcements);
    message->announced = calloc(n, sizeof *message->announced);
    message->columns = calloc(n, 5 * sizeof *message->columns);
    message->append_block = calloc(n, sizeof *message->append_block);
    if (!message->announcements || !message->announced || !message->columns ||
        !message->append_block)
        return -ENOMEM;
    Coxswain__StepDelta *delta = &message->delta;
    coxswain__step_delta__init(delta);
    delta->has_base_sequence = true;
    delta->announced = message->announced;
    delta->append_slot = message->columns;
    delta->append_block = message->append_block;
    delta->row_slot = message->columns + n;
    delta->row_position = message->columns + 2 * n;
    delta->row_token_count = message->columns + 3 * n;
    delta->row_silent = message->columns + 4 * n;
    message->model.step = delta;
    for (size_t i = 0; i < n; i++) {
        struct announcement *a = &message->announcements[i];
        coxswain__step_sequence__init(&a->sequence);
        coxswain__step_block_table__init(&a->table);
        a->tables = &a->table;
        a->sequence.has_seq_id = a->sequence.has_slot = true;
        a->sequence.n_tables = 1;
        a->sequence.tables = &a->tables;
        a->sequence.sampling = &a->sampling;
        message->announced[i] = &a->sequence;
    }
    return 0;
}

static int nested_init(struct cox_step_message *message)
{
    size_t n = message->row_count_max;
    message->groups = calloc(n, sizeof *message->groups);
    message->group_list = calloc(n, sizeof *message->group_list);
    if (!message->groups || !message->group_list)
        return -ENOMEM;
    message->model.seq_group_metadata_list = message->group_list;
    for (size_t i = 0; i < n; i++)
        message->group_list[i] = &message->groups[i].group;
    return 0;
}

int cox_step_message_new(uint32_t row_count_max, bool nested, struct cox_step_message **ret_message)
{
    struct cox_step_message *message = calloc(1, sizeof *message);
    if (!message)
        return -ENOMEM;
    message->nested = nested;
    message->row_count_max = row_count_max;
    coxswain__execute_request__init(&message->request);
    coxswain__execute_model_request__init(&message->model);
    COX_SET(&message->request, execute_type, COXSWAIN__EXECUTE_TYPE__MODEL_INFER);
    message->request.request_case = COXSWAIN__EXECUTE_REQUEST__REQUEST_EXECUTE_MODEL_REQUEST;
    message->request.execute_model_request = &message->model;
    message->model.has_forward_type = true;
    int r = nested ? nested_init(message) : packed_init(message);
    if (r) {
        cox_step_message_free(message);
        return r;
    }
    *ret_message = message;
    return 0;
}

struct cox_step_message *cox_step_message_free(struct cox_step_message *message)
{
    if (message) {
        free(message->announcements);
        free(message->announced);
        free(message->columns);
        free(message->append_block);
        free(message->groups);
        free(message->group_list);
        free(message->bytes);
        free(message);
    }
    return NULL;
}

/* ---- the packed form ---- */

static void packed_announce(struct announcement *a, const struct cox_sequence *sequence)
{
    a->sequence.seq_id = sequence->id;
    a->sequence.slot = sequence->slot;
    a->sequence.n_tokens = sequence->token_count;
    a->sequence.tokens = sequence->tokens;
    a->table.n_blocks = sequence->block_count;
    a->table.blocks = sequence->blocks;
    a->sequence.lora_id = (char *)(uintptr_t)sequence->request.lora;
    sampling_fill(&a->sampling, sequence);
}

static void packed_fill(struct cox_step_message *message, const struct cox_step *step)
{
    Coxswain__StepDelta *delta = &message->delta;
    delta->base_sequence = step->base;
    delta->finished = (uint32_t *)step->finished_slots; /* only read */
    delta->n_finished = step->finished_count;
    delta->n_announced = 0;
    delta->n_append_slot = 0;
    delta->n_row_silent = 0;
    bool single = true;
    for (uint32_t i = 0; i < step->row_count; i++) {
        const struct cox_step_row *row = &step->rows[i];
        const struct cox_sequence *sequence = row->sequence;
        if (row->announce)
            packed_announce(&message->announcements[delta->n_announced++], sequence);
        for (uint32_t b = row->announce ? sequence->block_count : sequence->sent_block_count;
             b < sequence->block_count; b++) {
            /* A known sequence got the blocks of its prompt when it was announced. After that it
             * grows by one block at a time. */
            COX_ASSERT(delta->n_append_slot < message->row_count_max);
            delta->append_slot[delta->n_append_slot] = sequence->slot;
            delta->append_block[delta->n_append_slot++] = sequence->blocks[b];
        }
        delta->row_slot[i] = sequence->slot;
        delta->row_position[i] = row->position;
        delta->row_token_count[i] = row->count;
        single = single && row->count == 1;
        if (!row->emit)
            delta->row_silent[delta->n_row_silent++] = i;
    }
    delta->n_append_block = delta->n_append_slot;
    delta->n_row_slot = delta->n_row_position = step->row_count;
    delta->n_row_token_count = single ? 0 : step->row_count;
}

static int packed_read(const struct cox_step *step, uint64_t sequence,
                       const Coxswain__ExecuteModelResponse *response, int32_t *ret_tokens,
                       struct cox_error *err)
{
    const Coxswain__StepResult *result = response->step;
    if (!result)
        return cox_fail(err, COX_CORRUPT, "the reply to step %" PRIu64 " has no tokens", sequence);
    if (result->n_tokens != step->row_count)
        return cox_fail(err, COX_CORRUPT,
                        "the reply to step %" PRIu64 " has %zu tokens for %" PRIu32 " rows",
                        sequence, result->n_tokens, step->row_count);
    if (result->has_base_sequence && result->base_sequence != sequence)
        return cox_fail(err, COX_CORRUPT,
                        "after step %" PRIu64 " the sequence table stands at step %" PRIu64,
                        sequence, result->base_sequence);
    for (uint32_t i = 0; i < step->row_count; i++)
        ret_tokens[i] = step->rows[i].emit ? result->tokens[i] : -1;
    return 0;
}

/* ---- the nested form ---- */

/* Takes count numbers from the byte buffer. */
static uint8_t *bytes_take(uint8_t **bytes, size_t count, ProtobufCBinaryData *ret_data)
{
    uint8_t *taken = *bytes;
    *bytes += count * sizeof(int64_t);
    ret_data->data = taken;
    ret_data->len = count * sizeof(int64_t);
    return taken;
}

static void nested_prompt(struct row_group *g, const struct cox_sequence *sequence, uint8_t **bytes)
{
    Group *group = &g->group;
    group->has_prompt_lens = group->has_prompt_token_ids = true;
    cox_wire_int64_set(bytes_take(bytes, 1, &group->prompt_lens), 0, sequence->token_count);
    uint8_t *ids = bytes_take(bytes, sequence->token_count, &group->prompt_token_ids);
    for (uint32_t i = 0; i < sequence->token_count; i++)
        cox_wire_int64_set(ids, i, sequence->tokens[i]);
}

/* Workers whose split fuse is on take lengths from these fields alone, also in steps that are all
 * prefill or all decode; others ignore them. */
static void nested_split(struct row_group *g, const struct cox_step_row *row)
{
    Group *group = &g->group;
    g->is_prefill = row->announce;
    g->is_last_chunk = true;
    g->start = (int32_t)row->position;
    g->end = (int32_t)(row->position + row->count);
    group->n_is_req_prefill = group->n_is_req_last_chunk = 1;
    group->n_split_start_pos = group->n_split_end_pos = 1;
    group->is_req_prefill = &g->is_prefill;
    group->is_req_last_chunk = &g->is_last_chunk;
    group->split_start_pos = &g->start;
    group->split_end_pos = &g->end;
}

static void nested_group(struct row_group *g, const struct cox_step_row *row, uint8_t **bytes)
{
    const struct cox_sequence *sequence = row->sequence;
    Group *group = &g->group;
    coxswain__sequence_group_metadata__init(group);
    snprintf(g->id, sizeof g->id, "%" PRId64, sequence->id);
    group->request_id = g->id;
    group->has_is_prompt = group->has_seqids = true;
    group->is_prompt = row->announce;
    cox_wire_int64_set(bytes_take(bytes, 1, &group->seqids), 0, sequence->id);
    if (row->announce)
        nested_prompt(g, sequence, bytes);
    nested_split(g, row);
    uint8_t *blocks = bytes_take(bytes, sequence->block_count, &g->table);
    for (uint32_t b = 0; b < sequence->block_count; b++)
        cox_wire_int64_set(blocks, b, sequence->blocks[b]);
    group->n_block_tables = 1;
    group->block_tables = &g->table;
    group->has_computed_block_lens = true; /* no block of the prompt is cached elsewhere */
    cox_wire_int64_set(bytes_take(bytes, 1, &group->computed_block_lens), 0, 0);
    COX_SET(group, token_chunk_size, (int32_t)row->count);
    COX_SET(group, do_sample, sequence->request.sampling.temperature > 0);
    group->n_stop_token_ids = sequence->request.stop_count;
    group->stop_token_ids = (int32_t *)sequence->request.stop_tokens; /* only read */
    group->lora_id = (char *)(uintptr_t)sequence->request.lora;
    sampling_fill(&g->sampling, sequence);
    group->sampling_params = &g->sampling;
}

static int nested_fill(struct cox_step_message *message, const struct cox_step *step)
{
    size_t count = 0;
    for (uint32_t i = 0; i < step->row_count; i++) {
        const struct cox_step_row *row = &step->rows[i];
        count += 3 + (size_t)row->sequence->block_count +
                 (row->announce ? row->sequence->token_count : 0);
    }
    int r = cox_reserve((void **)&message->bytes, &message->bytes_size, count * sizeof(int64_t), 1);
    if (r)
        return r;
    uint8_t *bytes = message->bytes;
    for (uint32_t i = 0; i < step->row_count; i++)
        nested_group(&message->groups[i], &step->rows[i], &bytes);
    message->model.n_seq_group_metadata_list = step->row_count;
    COX_SET(&message->model, running_queue_size, (int32_t)step->running_count);
    COX_SET(&message->model, wait_queue_len, (int32_t)step->waiting_count);
    return 0;
}

/* The row of a sequence id. Replies mostly have the order of the request, hence the hint. */
static uint32_t row_find(const struct cox_step *step, uint32_t hint, int64_t id)
{
    for (uint32_t i = 0; i < step->row_count; i++) {
        uint32_t row = (hint + i) % step->row_count;
        if (step->rows[row].sequence->id == id)
            return row;
    }
    return step->row_count;
}

/* Finish reasons of MindIE-LLM (docs/wire.md). */
static struct cox_row_end row_end(int32_t reason)
{
    static const char *const errors[] = {
        [7] = "the output does not have the structure that was asked for",
        [9] = "out of memory",
    };
    struct cox_row_end end = {.ended = reason != 0, .reason = reason};
    if (reason >= 1 && reason <= 3) {
        end.finish = COX_FINISH_STOP; /* end of sequence, stop string, stop token */
    } else if (reason == 5 || reason == 6) {
        end.finish = COX_FINISH_LENGTH; /* the longest sequence, the most output */
    } else if (reason != 0) {
        end.finish = COX_FINISH_ERROR;
        end.code = reason == 9 ? COX_NO_SPACE : COX_UNSUPPORTED;
        end.words =
            reason > 0 && (size_t)reason < sizeof errors / sizeof errors[0] ? errors[reason] : NULL;
        end.words = end.words ? end.words : "a reason that is unknown here";
    }
    return end;
}

static int nested_read(const struct cox_step *step, uint64_t sequence,
                       const Coxswain__ExecuteModelResponse *response, int32_t *ret_tokens,
                       struct cox_row_end *ret_ends, struct cox_error *err)
{
    uint32_t seen = 0;
    for (uint32_t i = 0; i < step->row_count; i++)
        ret_tokens[i] = -1;
    for (size_t o = 0; o < response->n_outputs; o++) {
        const Coxswain__CompletionSequenceGroupOutput *output = response->outputs[o];
        for (size_t s = 0; s < output->n_samples; s++) {
            const Coxswain__SequenceOutput *sample = output->samples[s];
            uint32_t row = row_find(step, seen, sample->seq_id);
            if (row == step->row_count || ret_tokens[row] >= 0)
                return cox_fail(err, COX_CORRUPT,
                                "the reply to step %" PRIu64 " has a token for sequence %" PRId64
                                " %s",
                                sequence, sample->seq_id,
                                row == step->row_count ? "which is not in the step" : "twice");
            ret_ends[row] = row_end(sample->finish_reason);
            seen++;
            if (ret_ends[row].ended && ret_ends[row].finish == COX_FINISH_ERROR) {
                ret_tokens[row] = 0; /* whatever it sends with an error is none */
                continue;
            }
            if (sample->n_output_token != 1)
                return cox_fail(err, sample->n_output_token ? COX_UNSUPPORTED : COX_CORRUPT,
                                "the reply to step %" PRIu64 " has %zu tokens for sequence %" PRId64
                                "; one is expected",
                                sequence, sample->n_output_token, sample->seq_id);
            int64_t token = sample->output_token[0];
            if (token < 0 || token > INT32_MAX)
                return cox_fail(err, COX_CORRUPT,
                                "the reply to step %" PRIu64 " has the token %" PRId64, sequence,
                                token);
            ret_tokens[row] = (int32_t)token;
        }
    }
    if (seen != step->row_count)
        return cox_fail(err, COX_CORRUPT,
                        "the reply to step %" PRIu64 " has %" PRIu32 " tokens for %" PRIu32
                        " sequences",
                        sequence, seen, step->row_count);
    /* A rank has reported a fault: tokens that claim to be none prove nothing. */
    for (uint32_t i = 0; response->err_msg && response->err_msg[0] && i < step->row_count; i++)
        if (ret_ends[i].finish != COX_FINISH_ERROR)
            return cox_fail(err, COX_REJECTED,
                            "during step %" PRIu64 " a rank reported a fault: %s", sequence,
                            response->err_msg);
    return 0;
}

/* ---- both ---- */

int cox_step_message_fill(struct cox_step_message *message, const struct cox_step *step,
                          const struct Coxswain__ExecuteRequest **ret_request)
{
    COX_ASSERT(step->row_count <= message->row_count_max);
    message->model.forward_type = (Coxswain__ForwardType)step->kind;
    if (message->nested) {
        int r = nested_fill(message, step);
        if (r)
            return r;
    } else {
        packed_fill(message, step);
    }
    *ret_request = &message->request;
    return 0;
}

void cox_step_message_weights(struct cox_step_message *message,
                              const struct cox_weights_announcement *announcement, bool offered)
{
    Coxswain__ExecuteRequest *request = &message->request;
    request->has_weights_version = announcement != NULL;
    request->weights_version = announcement ? announcement->version : 0;
    request->weights = offered ? &message->weights : NULL;
    if (!offered)
        return;
    memcpy(message->weights_handle, announcement->handle.bytes, sizeof message->weights_handle);
    coxswain__weights_candidate__init(&message->weights);
    message->weights.has_handle = message->weights.has_size = 1;
    message->weights.handle = (ProtobufCBinaryData){.data = message->weights_handle,
                                                    .len = sizeof message->weights_handle};
    message->weights.size = announcement->size;
}

int cox_step_message_read(const struct cox_step_message *message, const struct cox_step *step,
                          uint64_t sequence, const struct Coxswain__ExecuteResponse *response,
                          int32_t *ret_tokens, struct cox_row_end *ret_ends, struct cox_error *err)
{
    if (!response ||
        response->result_case != COXSWAIN__EXECUTE_RESPONSE__RESULT_EXECUTE_MODEL_RESPONSE)
        return cox_fail(err, COX_CORRUPT, "the reply to step %" PRIu64 " has another type",
                        sequence);
    for (uint32_t i = 0; i < step->row_count; i++)
        ret_ends[i] = (struct cox_row_end){0};
    if (message->nested)
        return nested_read(step, sequence, response->execute_model_response, ret_tokens, ret_ends,
                           err);
    return packed_read(step, sequence, response->execute_model_response, ret_tokens, err);
}
