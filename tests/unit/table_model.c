#include "table_model.h"

#include "proto/wire.h"
#include "worker/sequences/table_private.h"
#include "tests/lib/test.h"

static struct cox_sampling model_sampling(const SamplingParams *params)
{
    struct cox_sampling s = {0, 1, 0, 1, 0};
    if (!params)
        return s;
    s.temperature = params->has_temperature && params->temperature > 0 ? params->temperature : 0;
    s.top_k = params->has_top_k && params->top_k > 0 ? params->top_k : 0;
    s.top_p = params->has_top_p ? params->top_p : 1;
    if (params->has_repetition_penalty && params->repetition_penalty > 0)
        s.repetition_penalty = params->repetition_penalty;
    s.seed = params->has_seed ? (uint64_t)params->seed : 0;
    return s;
}

static struct model_sequence *model_slot(struct model *model, uint32_t slot)
{
    return slot < MODEL_SLOT_MAX && model->slots[slot].live ? &model->slots[slot] : NULL;
}

static struct model_sequence *model_find(struct model *model, int64_t id)
{
    for (uint32_t i = 0; i < MODEL_SLOT_MAX; i++)
        if (model->slots[i].live && model->slots[i].id == id)
            return &model->slots[i];
    return NULL;
}

static int push(int32_t *items, uint32_t *count, int64_t value)
{
    if (*count == MODEL_TOKEN_MAX)
        return COX_TOO_LARGE;
    if (value < 0 || value > INT32_MAX)
        return COX_CORRUPT;
    items[(*count)++] = (int32_t)value;
    return 0;
}

static int push_all(int32_t *items, uint32_t *count, const int32_t *values, size_t value_count)
{
    if (*count + value_count > MODEL_TOKEN_MAX)
        return COX_TOO_LARGE;
    for (size_t i = 0; i < value_count; i++)
        if (push(items, count, values[i]))
            return COX_CORRUPT;
    return 0;
}

static int push_bytes(int32_t *items, uint32_t *count, const ProtobufCBinaryData *bytes)
{
    if (bytes->len % 8)
        return COX_CORRUPT;
    if (*count + bytes->len / 8 > MODEL_TOKEN_MAX)
        return COX_TOO_LARGE;
    for (size_t i = 0; i < bytes->len / 8; i++)
        if (push(items, count, cox_wire_int64_get(bytes->data, i)))
            return COX_CORRUPT;
    return 0;
}

static int model_row(struct model *model, uint32_t forward_type, uint32_t slot, uint32_t position,
                     uint32_t token_count, bool emit)
{
    struct model_sequence *s = model_slot(model, slot);
    if (!s || token_count == 0 || (uint64_t)position + token_count > s->token_count ||
        s->block_counts[0] == 0 || forward_type == COX_FORWARD_DUMMY)
        return COX_CORRUPT;
    for (uint32_t i = 0; i < model->row_count; i++)
        if (model->rows[i].slot == slot)
            return COX_CORRUPT;
    model->rows[model->row_count++] = (struct model_row){slot, position, token_count, emit};
    return 0;
}

static int model_packed(struct model *model, const Request *request)
{
    const Step *step = request->step;
    if (step->n_append_slot != step->n_append_block || step->n_token != step->n_token_slot ||
        step->n_row_slot != step->n_row_position ||
        (step->n_append_table && step->n_append_table != step->n_append_slot) ||
        (step->n_row_token_count && step->n_row_token_count != step->n_row_slot))
        return COX_CORRUPT;
    model->table_count = step->has_table_count ? step->table_count : 1;
    if (model->table_count == 0)
        return COX_CORRUPT;
    if (model->table_count > 4)
        return COX_TOO_LARGE;

    for (uint32_t i = 0; i < MODEL_SLOT_MAX && step->base_sequence == 0; i++) {
        model->finished[i] = model->slots[i].live;
        model->slots[i].live = false;
    }
    for (size_t i = 0; i < step->n_finished && step->base_sequence; i++) {
        struct model_sequence *s = model_slot(model, step->finished[i]);
        if (!s)
            return COX_CORRUPT;
        s->live = false;
        model->finished[step->finished[i]] = true;
    }
    for (size_t i = 0; i < step->n_announced; i++) {
        const StepSequence *from = step->announced[i];
        if (from->slot >= MODEL_SLOT_MAX)
            return COX_TOO_LARGE;
        if (model_slot(model, from->slot) || model_find(model, from->seq_id) ||
            from->n_tokens == 0 || from->n_tables > model->table_count)
            return COX_CORRUPT;
        struct model_sequence *s = &model->slots[from->slot];
        *s = (struct model_sequence){.live = true, .id = from->seq_id};
        int r = push_all(s->tokens, &s->token_count, from->tokens, from->n_tokens);
        for (size_t t = 0; t < from->n_tables && !r; t++)
            r = push_all(s->blocks[t], &s->block_counts[t], from->tables[t]->blocks,
                         from->tables[t]->n_blocks);
        if (r)
            return r;
        s->table_count = model->table_count;
        s->announced_count = s->token_count;
        s->sampling = model_sampling(from->sampling);
    }
    for (size_t i = 0; i < step->n_append_slot; i++) {
        struct model_sequence *s = model_slot(model, step->append_slot[i]);
        uint32_t t = step->n_append_table ? step->append_table[i] : 0;
        if (!s || t >= model->table_count)
            return COX_CORRUPT;
        int r = push(s->blocks[t], &s->block_counts[t], step->append_block[i]);
        if (r)
            return r;
    }
    for (size_t i = 0; i < step->n_token; i++) {
        struct model_sequence *s = model_slot(model, step->token_slot[i]);
        int r = s ? push(s->tokens, &s->token_count, step->token[i]) : COX_CORRUPT;
        if (r)
            return r;
    }
    for (size_t i = 0; i < step->n_row_slot; i++) {
        int r = model_row(model, request->forward_type, step->row_slot[i], step->row_position[i],
                          step->n_row_token_count ? step->row_token_count[i] : 1, true);
        if (r)
            return r;
    }
    for (size_t i = 0; i < step->n_row_silent; i++) {
        if (step->row_silent[i] >= model->row_count)
            return COX_CORRUPT;
        model->rows[step->row_silent[i]].emit = false;
    }
    return 0;
}

static int model_tables(struct model_sequence *s, const Metadata *metadata)
{
    memset(s->block_counts, 0, sizeof s->block_counts);
    s->table_count = (uint32_t)metadata->n_block_tables;
    for (size_t t = 0; t < metadata->n_block_tables; t++) {
        int r = push_bytes(s->blocks[t], &s->block_counts[t], &metadata->block_tables[t]);
        if (r)
            return r;
    }
    return 0;
}

static int model_metadata(struct model *model, const Request *request, const Metadata *metadata,
                          int64_t id, int64_t last_token)
{
    struct model_sequence *s = model_find(model, id);
    if (!metadata->is_prompt) {
        if (!s)
            return COX_STALE;
        if (metadata->n_block_tables) {
            int r = model_tables(s, metadata);
            if (r)
                return r;
        }
        if (last_token >= 0 && s->token_count > s->announced_count)
            s->tokens[s->token_count - 1] = (int32_t)last_token;
        return model_row(model, request->forward_type, (uint32_t)(s - model->slots),
                         s->token_count - 1, 1, true);
    }

    if (metadata->request_id && strlen(metadata->request_id) > 128)
        return COX_TOO_LARGE;
    if (metadata->prompt_token_ids.len == 0)
        return COX_CORRUPT;
    for (uint32_t i = 0; i < MODEL_SLOT_MAX && !s; i++)
        if (!model->slots[i].live)
            s = &model->slots[i];
    if (!s)
        return COX_TOO_LARGE;
    *s = (struct model_sequence){.live = true, .id = id};
    if (metadata->request_id)
        strcpy(s->request_id, metadata->request_id);
    int r = push_bytes(s->tokens, &s->token_count, &metadata->prompt_token_ids);
    if (!r)
        r = model_tables(s, metadata);
    if (r)
        return r;
    s->announced_count = s->token_count;
    s->sampling = model_sampling(metadata->sampling_params);
    if (metadata->has_do_sample && !metadata->do_sample)
        s->sampling.temperature = 0;

    int64_t start = 0;
    int64_t end = s->token_count;
    if (metadata->n_split_start_pos || metadata->n_split_end_pos) {
        if (!metadata->n_split_start_pos || !metadata->n_split_end_pos)
            return COX_CORRUPT;
        start = metadata->split_start_pos[0];
        end = metadata->split_end_pos[0];
    }
    if (start < 0 || end <= start)
        return COX_CORRUPT;
    bool emit = !metadata->n_is_req_last_chunk || metadata->is_req_last_chunk[0];
    return model_row(model, request->forward_type, (uint32_t)(s - model->slots), (uint32_t)start,
                     (uint32_t)(end - start), emit);
}

static int model_nested(struct model *model, const Request *request)
{
    model->table_count = 1;
    for (size_t i = 0; i < request->n_finished_requests_ids; i++)
        for (uint32_t k = 0; k < MODEL_SLOT_MAX; k++)
            if (model->slots[k].live && model->slots[k].request_id[0] &&
                !strcmp(model->slots[k].request_id, request->finished_requests_ids[i])) {
                model->slots[k].live = false;
                model->finished[k] = true;
            }

    size_t decode_count = 0;
    for (size_t i = 0; i < request->n_seq_group_metadata_list; i++)
        if (!request->seq_group_metadata_list[i]->is_prompt)
            decode_count += request->seq_group_metadata_list[i]->seqids.len / 8;
    size_t decode_index = 0;
    for (size_t i = 0; i < request->n_seq_group_metadata_list; i++) {
        const Metadata *metadata = request->seq_group_metadata_list[i];
        if (metadata->seqids.len == 0 || metadata->seqids.len % 8)
            return COX_CORRUPT;
        if (metadata->seqids.len / 8 > 128 || metadata->n_block_tables > 4)
            return COX_TOO_LARGE;
        for (size_t k = 0; k < metadata->seqids.len / 8; k++) {
            int64_t last = -1;
            if (!metadata->is_prompt && request->n_last_sampled_token_ids == decode_count)
                last = request->last_sampled_token_ids[decode_index++];
            int r = model_metadata(model, request, metadata,
                                   cox_wire_int64_get(metadata->seqids.data, k), last);
            if (r)
                return r;
        }
    }
    for (uint32_t i = 0; i < model->row_count; i++)
        if (model->slots[model->rows[i].slot].table_count > model->table_count)
            model->table_count = model->slots[model->rows[i].slot].table_count;
    return 0;
}

static bool pairs_bad(Coxswain__IntPair *const *pairs, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (pairs[i]->num1 < 0 || pairs[i]->num2 < 0)
            return true;
    return false;
}

int model_apply(const struct model *before, uint64_t sequence, const Request *request,
                struct model *after)
{
    *after = *before;
    after->sequence = sequence;
    after->row_count = 0;
    memset(after->finished, 0, sizeof after->finished);
    if (request->step && request->step->base_sequence &&
        request->step->base_sequence != before->base)
        return COX_STALE;
    if (request->step && request->n_seq_group_metadata_list)
        return COX_CORRUPT;
    if (request->forward_type < 0 || request->forward_type > 5 ||
        pairs_bad(request->blocks_to_swap_in, request->n_blocks_to_swap_in) ||
        pairs_bad(request->blocks_to_swap_out, request->n_blocks_to_swap_out) ||
        pairs_bad(request->blocks_to_copy, request->n_blocks_to_copy))
        return COX_CORRUPT;
    int r = request->step ? model_packed(after, request) : model_nested(after, request);
    for (uint32_t i = 0; i < after->row_count && !r; i++) {
        const struct model_row *row = &after->rows[i];
        const struct model_sequence *s = &after->slots[row->slot];
        if (row->emit && row->position + row->token_count == MODEL_TOKEN_MAX &&
            s->token_count == MODEL_TOKEN_MAX)
            r = COX_TOO_LARGE;
    }
    return r;
}

void model_commit(struct model *model, const struct cox_batch_output *outputs)
{
    for (uint32_t i = 0; i < model->row_count; i++) {
        const struct model_row *row = &model->rows[i];
        struct model_sequence *s = &model->slots[row->slot];
        if (row->emit && outputs[i].token >= 0 &&
            row->position + row->token_count == s->token_count)
            s->tokens[s->token_count++] = outputs[i].token;
    }
    model->base = model->sequence;
}

static void check_sampling(const struct cox_sampling *a, const struct cox_sampling *b)
{
    assert_true(a->temperature == b->temperature && a->top_p == b->top_p && a->top_k == b->top_k &&
                a->repetition_penalty == b->repetition_penalty && a->seed == b->seed);
}

static void check_pairs(const struct cox_block_pair *pairs, uint32_t count,
                        Coxswain__IntPair *const *from, size_t from_count)
{
    assert_int_equal(count, from_count);
    for (uint32_t i = 0; i < count; i++) {
        assert_int_equal(pairs[i].from, from[i]->num1);
        assert_int_equal(pairs[i].to, from[i]->num2);
    }
}

void model_check_batch(const struct model *model, const Request *request,
                       const struct cox_batch *batch)
{
    assert_true(batch->sequence == model->sequence);
    assert_int_equal(batch->forward_type, request->forward_type);
    check_pairs(batch->swap_in, batch->swap_in_count, request->blocks_to_swap_in,
                request->n_blocks_to_swap_in);
    check_pairs(batch->swap_out, batch->swap_out_count, request->blocks_to_swap_out,
                request->n_blocks_to_swap_out);
    check_pairs(batch->copy, batch->copy_count, request->blocks_to_copy, request->n_blocks_to_copy);
    assert_int_equal(batch->table_count, model->table_count);
    assert_int_equal(batch->row_count, model->row_count);
    for (uint32_t i = 0; i < batch->row_count; i++) {
        const struct cox_batch_row *row = &batch->rows[i];
        const struct model_row *expected = &model->rows[i];
        const struct model_sequence *s = &model->slots[expected->slot];
        assert_true(row->id == s->id);
        assert_int_equal(row->slot, expected->slot);
        assert_int_equal(row->position, expected->position);
        assert_int_equal(row->token_count, expected->token_count);
        assert_int_equal(row->emit, expected->emit);
        assert_memory_equal(row->tokens, s->tokens, s->token_count * sizeof(int32_t));
        for (uint32_t t = 0; t < batch->table_count; t++) {
            assert_int_equal(row->tables[t].count, s->block_counts[t]);
            if (s->block_counts[t])
                assert_memory_equal(row->tables[t].blocks, s->blocks[t],
                                    s->block_counts[t] * sizeof(int32_t));
        }
        check_sampling(row->sampling, &s->sampling);
    }
    uint32_t finished_count = 0;
    for (uint32_t slot = 0; slot < MODEL_SLOT_MAX; slot++)
        finished_count += model->finished[slot];
    assert_int_equal(batch->finished_count, finished_count);
    for (uint32_t i = 0; i < batch->finished_count; i++) {
        assert_true(model->finished[batch->finished_slots[i]]);
        if (request->step && request->step->base_sequence) /* in its order */
            assert_int_equal(batch->finished_slots[i], request->step->finished[i]);
    }
}

void model_check_table(const struct model *model, const struct cox_table *table)
{
    assert_true(cox_table_base(table) == model->base);
    uint32_t live_count = 0;
    for (uint32_t slot = 0; slot < MODEL_SLOT_MAX; slot++) {
        const struct model_sequence *s = &model->slots[slot];
        const struct cox_stored_sequence *is = cox_sequence_store_get(&table->store, slot);
        assert_int_equal(s->live, is != NULL);
        if (!is)
            continue;
        live_count++;
        assert_true(is->id == s->id);
        assert_string_equal(is->request_id, s->request_id);
        assert_int_equal(is->tokens.count, s->token_count);
        assert_memory_equal(is->tokens.items, s->tokens, s->token_count * sizeof(int32_t));
        assert_int_equal(is->announced_count, s->announced_count);
        assert_int_equal(is->table_count, s->table_count);
        for (uint32_t t = 0; t < 4; t++) {
            assert_int_equal(is->tables[t].count, s->block_counts[t]);
            if (s->block_counts[t])
                assert_memory_equal(is->tables[t].items, s->blocks[t],
                                    s->block_counts[t] * sizeof(int32_t));
        }
        check_sampling(&is->sampling, &s->sampling);
    }
    assert_int_equal(table->store.live_count, live_count);
}

void table_check_invariants(const struct cox_table *table)
{
    const struct cox_sequence_store *store = &table->store;
    uint32_t live_count = 0;
    uint32_t cell_count = 0;
    assert_int_equal(store->touched_count, 0);
    for (uint32_t slot = 0; slot < store->sequence_count_max; slot++) {
        const struct cox_stored_sequence *sequence = store->slots[slot].now;
        bool bit = (store->live_words[slot / 64] >> (slot % 64)) & 1;
        assert_int_equal(bit, sequence != NULL);
        assert_null(store->slots[slot].before);
        if (!sequence)
            continue;
        uint32_t found;
        assert_true(cox_sequence_store_find_id(store, sequence->id, &found));
        assert_int_equal(found, slot);
        if (sequence->request_id[0]) {
            assert_true(cox_sequence_store_find_request(store, sequence->request_id, &found));
            assert_string_equal(store->slots[found].now->request_id, sequence->request_id);
            cell_count++;
        }
        cell_count++;
        live_count++;
    }
    assert_int_equal(store->live_count, live_count);
    for (uint32_t i = 0; i <= store->cell_mask; i++)
        cell_count -= store->cells[i].slot_plus_one != 0;
    assert_int_equal(cell_count, 0);
}

static void put(unsigned char *bytes, size_t capacity, size_t *used, const void *from, size_t size)
{
    assert_true(size <= capacity - *used);
    if (size)
        memcpy(bytes + *used, from, size);
    *used += size;
}

#define PUT(value) put(bytes, capacity, &used, &(value), sizeof(value))

size_t table_dump(const struct cox_table *table, unsigned char *bytes, size_t capacity)
{
    size_t used = 0;
    PUT(table->base);
    PUT(table->pending);
    PUT(table->store.live_count);
    for (uint32_t slot = 0; slot < table->store.sequence_count_max; slot++) {
        const struct cox_stored_sequence *s = table->store.slots[slot].now;
        PUT(s); /* also the identity: a reverted step leaves the very object */
        if (!s)
            continue;
        PUT(s->id);
        PUT(s->table_count);
        PUT(s->announced_count);
        PUT(s->sampling);
        put(bytes, capacity, &used, s->request_id, strlen(s->request_id) + 1);
        PUT(s->tokens.count);
        put(bytes, capacity, &used, s->tokens.items, s->tokens.count * sizeof(int32_t));
        for (uint32_t t = 0; t < COX_BLOCK_TABLE_COUNT_MAX; t++) {
            PUT(s->tables[t].count);
            put(bytes, capacity, &used, s->tables[t].items, s->tables[t].count * sizeof(int32_t));
        }
    }
    return used;
}
