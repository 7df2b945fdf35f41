#include "table_request.h"

#include "channel/base/idioms.h"
#include "proto/wire.h"

#include <coxswain/base.h>

#include <string.h>

#define MEMORY_SIZE ((size_t)32 << 20)

static _Alignas(16) unsigned char memory[MEMORY_SIZE];
static size_t memory_used;

void request_reset(void)
{
    memory_used = 0;
}

void *request_take(size_t size)
{
    size_t rounded = (size + 15) & ~(size_t)15;
    COX_ASSERT(rounded <= MEMORY_SIZE - memory_used);
    void *taken = memory + memory_used;
    memory_used += rounded;
    return memset(taken, 0, rounded);
}

/* Appends to a column whose memory is taken at its first item. */
#define PUSH(column, count, value)                                                                 \
    do {                                                                                           \
        COX_ASSERT((count) < REQUEST_COLUMN_MAX);                                                  \
        if (!(column))                                                                             \
            (column) = request_take(REQUEST_COLUMN_MAX * sizeof *(column));                        \
        (column)[(count)++] = (value);                                                             \
    } while (0)

Request *request_new(uint32_t forward_type)
{
    Request *request = request_take(sizeof *request);
    coxswain__execute_model_request__init(request);
    request->has_forward_type = true;
    request->forward_type = (Coxswain__ForwardType)forward_type;
    return request;
}

static Coxswain__IntPair *pair_new(int32_t from, int32_t to)
{
    Coxswain__IntPair *pair = request_take(sizeof *pair);
    coxswain__int_pair__init(pair);
    pair->has_num1 = true;
    pair->num1 = from;
    pair->has_num2 = true;
    pair->num2 = to;
    return pair;
}

void request_swap_in(Request *request, int32_t from, int32_t to)
{
    PUSH(request->blocks_to_swap_in, request->n_blocks_to_swap_in, pair_new(from, to));
}

void request_swap_out(Request *request, int32_t from, int32_t to)
{
    PUSH(request->blocks_to_swap_out, request->n_blocks_to_swap_out, pair_new(from, to));
}

void request_copy(Request *request, int32_t from, int32_t to)
{
    PUSH(request->blocks_to_copy, request->n_blocks_to_copy, pair_new(from, to));
}

Request *packed_new(uint32_t forward_type, uint64_t base)
{
    Request *request = request_new(forward_type);
    request->step = request_take(sizeof *request->step);
    coxswain__step_delta__init(request->step);
    request->step->has_base_sequence = true;
    request->step->base_sequence = base;
    return request;
}

void packed_finish(Request *request, uint32_t slot)
{
    PUSH(request->step->finished, request->step->n_finished, slot);
}

StepSequence *packed_announce(Request *request, uint32_t slot, int64_t id, const int32_t *tokens,
                              size_t token_count)
{
    StepSequence *sequence = request_take(sizeof *sequence);
    coxswain__step_sequence__init(sequence);
    sequence->has_seq_id = true;
    sequence->seq_id = id;
    sequence->has_slot = true;
    sequence->slot = slot;
    sequence->n_tokens = token_count;
    sequence->tokens = request_take(token_count * sizeof *tokens);
    if (token_count)
        memcpy(sequence->tokens, tokens, token_count * sizeof *tokens);
    PUSH(request->step->announced, request->step->n_announced, sequence);
    return sequence;
}

void packed_table(StepSequence *sequence, const int32_t *blocks, size_t block_count)
{
    Coxswain__StepBlockTable *table = request_take(sizeof *table);
    coxswain__step_block_table__init(table);
    table->n_blocks = block_count;
    table->blocks = request_take(block_count * sizeof *blocks);
    if (block_count)
        memcpy(table->blocks, blocks, block_count * sizeof *blocks);
    if (!sequence->tables)
        sequence->tables = request_take(8 * sizeof(void *));
    COX_ASSERT(sequence->n_tables < 8);
    sequence->tables[sequence->n_tables++] = table;
}

void packed_append(Request *request, uint32_t slot, int32_t block, uint32_t table)
{
    PUSH(request->step->append_slot, request->step->n_append_slot, slot);
    PUSH(request->step->append_block, request->step->n_append_block, block);
    PUSH(request->step->append_table, request->step->n_append_table, table);
}

void packed_token(Request *request, uint32_t slot, int32_t token)
{
    PUSH(request->step->token_slot, request->step->n_token_slot, slot);
    PUSH(request->step->token, request->step->n_token, token);
}

uint32_t packed_row(Request *request, uint32_t slot, uint32_t position, uint32_t token_count)
{
    PUSH(request->step->row_slot, request->step->n_row_slot, slot);
    PUSH(request->step->row_position, request->step->n_row_position, position);
    PUSH(request->step->row_token_count, request->step->n_row_token_count, token_count);
    return (uint32_t)request->step->n_row_slot - 1;
}

void packed_silent(Request *request, uint32_t row)
{
    PUSH(request->step->row_silent, request->step->n_row_silent, row);
}

ProtobufCBinaryData nested_ids(const int64_t *ids, size_t count)
{
    ProtobufCBinaryData bytes = {.len = count * 8, .data = request_take(count * 8)};
    for (size_t i = 0; i < count; i++)
        cox_wire_int64_set(bytes.data, i, ids[i]);
    return bytes;
}

ProtobufCBinaryData nested_bytes(const int32_t *values, size_t count)
{
    ProtobufCBinaryData bytes = {.len = count * 8, .data = request_take(count * 8)};
    for (size_t i = 0; i < count; i++)
        cox_wire_int64_set(bytes.data, i, values[i]);
    return bytes;
}

Metadata *nested_add(Request *request, const char *request_id, int64_t id, bool is_prompt)
{
    Metadata *metadata = request_take(sizeof *metadata);
    coxswain__sequence_group_metadata__init(metadata);
    if (request_id) {
        metadata->request_id = request_take(strlen(request_id) + 1);
        strcpy(metadata->request_id, request_id);
    }
    metadata->has_is_prompt = true;
    metadata->is_prompt = is_prompt;
    metadata->has_seqids = true;
    metadata->seqids = nested_ids(&id, 1);
    PUSH(request->seq_group_metadata_list, request->n_seq_group_metadata_list, metadata);
    return metadata;
}

void nested_table(Metadata *metadata, const int32_t *blocks, size_t block_count)
{
    if (!metadata->block_tables)
        metadata->block_tables = request_take(8 * sizeof *metadata->block_tables);
    COX_ASSERT(metadata->n_block_tables < 8);
    metadata->block_tables[metadata->n_block_tables++] = nested_bytes(blocks, block_count);
}

void nested_split(Metadata *metadata, int32_t start, int32_t end, bool last)
{
    metadata->split_start_pos = request_take(sizeof(int32_t));
    metadata->split_start_pos[0] = start;
    metadata->n_split_start_pos = 1;
    metadata->split_end_pos = request_take(sizeof(int32_t));
    metadata->split_end_pos[0] = end;
    metadata->n_split_end_pos = 1;
    metadata->is_req_last_chunk = request_take(sizeof(protobuf_c_boolean));
    metadata->is_req_last_chunk[0] = last;
    metadata->n_is_req_last_chunk = 1;
}

void nested_finish(Request *request, const char *request_id)
{
    char *copy = request_take(strlen(request_id) + 1);
    strcpy(copy, request_id);
    PUSH(request->finished_requests_ids, request->n_finished_requests_ids, copy);
}
