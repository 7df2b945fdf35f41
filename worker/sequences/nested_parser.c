#include "nested_parser.h"

#include "announcement.h"
#include "proto/wire.h"
#include "proto/executor.pb-c.h"

#include <string.h>

typedef Coxswain__SequenceGroupMetadata Metadata;

/* Sequences of one group, at most. Each takes a copy of the prompt: this bounds the memory that a
 * request can use. */
#define GROUP_ID_COUNT_MAX 128

/* The parts of a SequenceGroupMetadata that all its ids share. */
struct parsed_group {
    const Metadata *metadata;
    /* in the list */
    size_t index;
    /* at least 1 */
    uint32_t id_count;
};

/* Elements of a byte field, each of which must fit into a non-negative int32. */
static int field_count(const struct parsed_group *group, const ProtobufCBinaryData *field,
                       const char *name, size_t *ret_count, struct cox_error *err)
{
    int64_t count = cox_wire_int64_count(field->len);
    if (count < 0)
        return cox_fail(err, COX_CORRUPT, "metadata %zu: %s: %zu bytes are no int64 array",
                        group->index, name, field->len);
    *ret_count = (size_t)count;
    return 0;
}

static int field_get(const struct parsed_group *group, const ProtobufCBinaryData *field,
                     size_t index, const char *name, int32_t *ret_value, struct cox_error *err)
{
    int64_t value = cox_wire_int64_get(field->data, index);
    if (value < 0 || value > INT32_MAX)
        return cox_fail(err, COX_CORRUPT, "metadata %zu: %s[%zu] is %lld", group->index, name,
                        index, (long long)value);
    *ret_value = (int32_t)value;
    return 0;
}

/* Appends `count` elements of a field, of which there are so many, to numbers. */
static int field_append(const struct parsed_group *group, const ProtobufCBinaryData *field,
                        size_t from, size_t count, const char *name, struct cox_numbers *numbers,
                        uint32_t limit, struct cox_error *err)
{
    int r = cox_numbers_reserve(numbers, numbers->count + count, limit);
    if (r)
        return cox_fail(err, r, "metadata %zu: %s: %zu elements (at most %u)", group->index, name,
                        numbers->count + count, limit);
    for (size_t i = from; i < from + count; i++) {
        r = field_get(group, field, i, name, &numbers->items[numbers->count], err);
        if (r)
            return r;
        numbers->count++;
    }
    return 0;
}

static int tables_count_check(const struct parsed_group *group, struct cox_error *err)
{
    if (group->metadata->n_block_tables > COX_BLOCK_TABLE_COUNT_MAX)
        return cox_fail(err, COX_TOO_LARGE, "metadata %zu: %zu block tables, at most %d",
                        group->index, group->metadata->n_block_tables, COX_BLOCK_TABLE_COUNT_MAX);
    return 0;
}

/* Fills the tables of a sequence that this step owns. */
static int tables_fill(struct cox_sequence_store *store, const struct parsed_group *group,
                       struct cox_stored_sequence *sequence, struct cox_error *err)
{
    for (uint32_t t = 0; t < COX_BLOCK_TABLE_COUNT_MAX; t++)
        sequence->tables[t].count = 0;
    sequence->table_count = (uint32_t)group->metadata->n_block_tables;
    for (uint32_t t = 0; t < sequence->table_count; t++) {
        const ProtobufCBinaryData *field = &group->metadata->block_tables[t];
        size_t count = 0;
        int r = field_count(group, field, "block_tables", &count, err);
        if (!r)
            r = field_append(group, field, 0, count, "block_tables", &sequence->tables[t],
                             store->token_count_max, err);
        if (r)
            return r;
    }
    return 0;
}

/* Returns true if the new tables are the old ones with blocks appended. */
static int tables_extend(const struct parsed_group *group,
                         const struct cox_stored_sequence *sequence, bool *ret_extend,
                         struct cox_error *err)
{
    size_t table_count = group->metadata->n_block_tables;
    bool extend = sequence->table_count == table_count;
    for (size_t t = 0; t < COX_BLOCK_TABLE_COUNT_MAX && extend; t++) {
        const struct cox_numbers *table = &sequence->tables[t];
        if (t >=
            table_count) { /* a step in columns may have filled more tables than were announced */
            extend = table->count == 0;
            continue;
        }
        const ProtobufCBinaryData *field = &group->metadata->block_tables[t];
        size_t count = 0;
        int r = field_count(group, field, "block_tables", &count, err);
        if (r)
            return r;
        extend = count >= table->count;
        for (uint32_t i = 0; i < table->count && extend; i++)
            extend = cox_wire_int64_get(field->data, i) == table->items[i];
    }
    *ret_extend = extend;
    return 0;
}

/* Almost always one block or none is new, and the sequence grows in place. Otherwise the step gets
 * a sequence of its own, since what a revert needs must not be overwritten. */
static int tables_replace(struct cox_sequence_store *store, const struct parsed_group *group,
                          uint32_t slot, struct cox_error *err)
{
    struct cox_stored_sequence *sequence = cox_sequence_store_get(store, slot);
    bool extend;
    int r = tables_extend(group, sequence, &extend, err);
    if (r)
        return r;
    if (!extend) {
        r = cox_sequence_store_own(store, slot, &sequence);
        if (r)
            return cox_fail(err, r, "metadata %zu: no memory", group->index);
        return tables_fill(store, group, sequence, err);
    }
    for (uint32_t t = 0; t < sequence->table_count; t++) {
        const ProtobufCBinaryData *field = &group->metadata->block_tables[t];
        if (field->len == (size_t)sequence->tables[t].count * sizeof(int64_t))
            continue;
        cox_sequence_store_touch(store, slot);
        const uint32_t known = sequence->tables[t].count;
        r = field_append(group, field, known, field->len / sizeof(int64_t) - known, "block_tables",
                         &sequence->tables[t], store->token_count_max, err);
        if (r)
            return r;
    }
    return 0;
}

/* ---- prompts, whole or in chunks ---- */

/* The entry of sequence k in a repeated field with an entry per sequence, or one for all. */
static size_t entry_of(size_t count, uint32_t k)
{
    return k < count ? k : 0;
}

/* Returns true if sequence k computes tokens of its prompt. In a mixed step is_prompt does not
 * tell. */
static bool is_prefill(const Metadata *metadata, uint32_t k)
{
    return metadata->n_is_req_prefill
               ? metadata->is_req_prefill[entry_of(metadata->n_is_req_prefill, k)]
               : metadata->is_prompt;
}

/* The part of a prompt that one sequence computes: `count` tokens of the message, from element
 * `from`, are at positions [known, known + count), and [position, end) of them are computed. */
struct prompt {
    size_t from, count;
    /* tokens before, from an earlier chunk */
    uint32_t known;
    uint32_t position;
    /* the end; 0: the end of the tokens */
    uint32_t end;
};

/* The tokens of sequence k: each has its own if prompt_lens counts them, else all share them. */
static int prompt_find(const struct parsed_group *group, uint32_t k, struct prompt *prompt,
                       struct cox_error *err)
{
    const Metadata *metadata = group->metadata;
    size_t lens = 0, sum = 0;
    int r =
        field_count(group, &metadata->prompt_token_ids, "prompt_token_ids", &prompt->count, err);
    if (!r && metadata->has_prompt_lens)
        r = field_count(group, &metadata->prompt_lens, "prompt_lens", &lens, err);
    if (r || group->id_count == 1 || lens != group->id_count)
        return r;
    size_t from = 0, count = 0;
    for (uint32_t i = 0; i < lens; i++) {
        int64_t len = cox_wire_int64_get(metadata->prompt_lens.data, i);
        if (len < 0 || (uint64_t)len > prompt->count - sum)
            return 0; /* without own tokens all share them */
        from = i == k ? sum : from;
        count = i == k ? (size_t)len : count;
        sum += (size_t)len;
    }
    if (sum == prompt->count) {
        prompt->from = from;
        prompt->count = count;
    }
    return 0;
}

/* The positions of a prompt's row. A message has the whole prompt up to the end of the computation,
 * or only the chunk. */
static int prompt_place(const struct parsed_group *group, uint32_t k,
                        const struct cox_stored_sequence *sequence, struct prompt *prompt,
                        struct cox_error *err)
{
    const Metadata *metadata = group->metadata;
    if (metadata->n_split_start_pos == 0 && metadata->n_split_end_pos == 0) {
        /* In a mixed step, what follows what is known. */
        prompt->known = sequence && !metadata->is_prompt ? sequence->tokens.count : 0;
        prompt->position = prompt->known;
        return 0;
    }
    if (metadata->n_split_start_pos == 0 || metadata->n_split_end_pos == 0)
        return cox_fail(err, COX_CORRUPT, "metadata %zu: a split with one end", group->index);
    int32_t start = metadata->split_start_pos[entry_of(metadata->n_split_start_pos, k)];
    int32_t end = metadata->split_end_pos[entry_of(metadata->n_split_end_pos, k)];
    if (start < 0 || end <= start)
        return cox_fail(err, COX_CORRUPT, "metadata %zu: split from %d to %d", group->index, start,
                        end);
    prompt->position = (uint32_t)start;
    prompt->end = (uint32_t)end;
    if (prompt->count < prompt->end && prompt->count == prompt->end - prompt->position)
        prompt->known = prompt->position;
    return 0;
}

/* Announces a sequence with the contents of the message, in the slot it has or the lowest free one.
 */
static int prompt_announce(struct cox_sequence_store *store, const struct parsed_group *group,
                           int64_t id, const struct prompt *prompt, uint32_t slot,
                           struct cox_stored_sequence **ret_sequence, struct cox_error *err)
{
    const Metadata *metadata = group->metadata;
    int r;
    if (prompt->known == 0) {
        r = cox_sequence_store_announce(store, slot, id, metadata->request_id, ret_sequence);
    } else {
        r = cox_sequence_store_own(store, slot, ret_sequence);
        if (!r)
            (*ret_sequence)->tokens.count = prompt->known;
    }
    if (r)
        return cox_fail(err, r, "metadata %zu: no memory", group->index);
    r = field_append(group, &metadata->prompt_token_ids, prompt->from, prompt->count,
                     "prompt_token_ids", &(*ret_sequence)->tokens, store->token_count_max, err);
    /* A later chunk may omit what the first one had. */
    if (!r && (prompt->known == 0 || metadata->n_block_tables))
        r = tables_fill(store, group, *ret_sequence, err);
    if (r)
        return r;
    (*ret_sequence)->announced_count = (*ret_sequence)->tokens.count;
    if (prompt->known == 0 || metadata->sampling_params)
        (*ret_sequence)->sampling = cox_announcement_sampling(metadata->sampling_params);
    if (metadata->has_do_sample && !metadata->do_sample)
        (*ret_sequence)->sampling.temperature = 0;
    return 0;
}

/* The adapter of a sequence whose prompt came in several chunks is the first one's. */
static int prompt_lora(struct cox_sequence_store *store, const struct parsed_group *group,
                       const struct prompt *prompt, uint32_t slot, struct cox_error *err)
{
    const char *name = group->metadata->lora_id;
    if (prompt->known == 0)
        return cox_announcement_set_lora(store, slot, name, "metadata", group->index, err);
    const struct cox_adapter_reference *lora = cox_sequence_store_get(store, slot)->lora;
    if (name && *name && (!lora || strcmp(lora->name, name) != 0))
        return cox_fail(err, COX_CORRUPT,
                        "metadata %zu: a chunk with lora_id '%.*s', the chunk before had '%s'",
                        group->index, COX_LORA_NAME_LENGTH_MAX, name, lora ? lora->name : "");
    return 0;
}

static int prompt_read(struct cox_sequence_store *store, struct cox_batch_builder *builder,
                       const struct parsed_group *group, uint32_t k, int64_t id,
                       struct cox_error *err)
{
    const Metadata *metadata = group->metadata;
    if (metadata->request_id && strlen(metadata->request_id) > COX_REQUEST_ID_LENGTH_MAX)
        return cox_fail(err, COX_TOO_LARGE, "metadata %zu: request_id of %zu bytes, at most %d",
                        group->index, strlen(metadata->request_id), COX_REQUEST_ID_LENGTH_MAX);
    struct prompt prompt = {0};
    int r = prompt_find(group, k, &prompt, err);
    if (r)
        return r;
    if (prompt.count == 0)
        return cox_fail(err, COX_CORRUPT, "metadata %zu: a prompt without tokens", group->index);
    uint32_t slot;
    struct cox_stored_sequence *sequence = NULL;
    if (cox_sequence_store_find_id(store, id, &slot))
        sequence = cox_sequence_store_get(store, slot);
    r = prompt_place(group, k, sequence, &prompt, err);
    if (r)
        return r;
    if (prompt.known > (sequence ? sequence->tokens.count : 0))
        return cox_fail(
            err, COX_STALE,
            "metadata %zu: a chunk from position %u of sequence %lld, of which %u tokens are known",
            group->index, prompt.known, (long long)id, sequence ? sequence->tokens.count : 0);
    if (!sequence && !cox_sequence_store_lowest_free(store, &slot))
        return cox_fail(err, COX_TOO_LARGE, "metadata %zu: more than %u sequences", group->index,
                        store->sequence_count_max);
    r = prompt_announce(store, group, id, &prompt, slot, &sequence, err);
    if (!r)
        r = prompt_lora(store, group, &prompt, slot, err);
    if (r)
        return r;
    const uint32_t end = prompt.end ? prompt.end : sequence->tokens.count;
    bool emit = metadata->n_is_req_last_chunk == 0 ||
                metadata->is_req_last_chunk[entry_of(metadata->n_is_req_last_chunk, k)];
    return cox_batch_builder_row(builder, store, slot, prompt.position, end - prompt.position, emit,
                                 err);
}

/* Replaces this rank's last token by the coordinator's. Announced tokens are the coordinator's
 * already. */
static int last_token_replace(struct cox_sequence_store *store, uint32_t slot, int32_t token,
                              struct cox_error *err)
{
    struct cox_stored_sequence *sequence = cox_sequence_store_get(store, slot);
    uint32_t count = sequence->tokens.count;
    if (token < 0 || count == sequence->announced_count ||
        sequence->tokens.items[count - 1] == token)
        return 0;
    int r = cox_sequence_store_own(store, slot, &sequence);
    if (r)
        return cox_fail(err, r, "slot %u: no memory", slot);
    sequence->tokens.items[count - 1] = token;
    return 0;
}

static int decode_read(struct cox_sequence_store *store, struct cox_batch_builder *builder,
                       const struct parsed_group *group, int64_t id, int32_t last_token,
                       struct cox_error *err)
{
    uint32_t slot;
    if (!cox_sequence_store_find_id(store, id, &slot))
        return cox_fail(err, COX_STALE, "metadata %zu: sequence %lld is unknown", group->index,
                        (long long)id);
    int r = 0;
    if (group->metadata->n_block_tables)
        r = tables_replace(store, group, slot, err);
    if (!r)
        r = last_token_replace(store, slot, last_token, err);
    if (r)
        return r;
    uint32_t known = cox_sequence_store_get(store, slot)->tokens.count;
    return cox_batch_builder_row(builder, store, slot, known - 1, 1, true, err);
}

/* Rows that decode, if the list is in order; if not, reading it fails later. */
static size_t decode_count(const struct Coxswain__ExecuteModelRequest *request)
{
    size_t count = 0;
    for (size_t i = 0; i < request->n_seq_group_metadata_list; i++) {
        const Metadata *metadata = request->seq_group_metadata_list[i];
        size_t ids = metadata->seqids.len / sizeof(int64_t);
        ids = ids < GROUP_ID_COUNT_MAX ? ids : GROUP_ID_COUNT_MAX;
        for (uint32_t k = 0; k < ids; k++)
            count += !is_prefill(metadata, k);
    }
    return count;
}

static int group_check(struct parsed_group *group, struct cox_error *err)
{
    size_t id_count = 0;
    int r = field_count(group, &group->metadata->seqids, "seqIds", &id_count, err);
    if (r)
        return r;
    if (id_count == 0)
        return cox_fail(err, COX_CORRUPT, "metadata %zu: no sequence ids", group->index);
    if (id_count > GROUP_ID_COUNT_MAX)
        return cox_fail(err, COX_TOO_LARGE, "metadata %zu: %zu sequence ids, at most %d",
                        group->index, id_count, GROUP_ID_COUNT_MAX);
    group->id_count = (uint32_t)id_count;
    return tables_count_check(group, err);
}

int cox_nested_parser_apply(struct cox_sequence_store *store, struct cox_batch_builder *builder,
                            const struct Coxswain__ExecuteModelRequest *request,
                            struct cox_error *err)
{
    uint32_t slot;
    for (size_t i = 0; i < request->n_finished_requests_ids; i++)
        while (cox_sequence_store_find_request(store, request->finished_requests_ids[i], &slot))
            cox_batch_builder_finish(builder, store, slot);

    const int32_t *last_tokens = NULL;
    if (request->n_last_sampled_token_ids == decode_count(request))
        last_tokens = request->last_sampled_token_ids;
    size_t decode_index = 0;
    for (size_t i = 0; i < request->n_seq_group_metadata_list; i++) {
        struct parsed_group group = {.metadata = request->seq_group_metadata_list[i], .index = i};
        int r = group_check(&group, err);
        for (uint32_t k = 0; k < group.id_count && !r; k++) {
            int64_t id = cox_wire_int64_get(group.metadata->seqids.data, k);
            if (is_prefill(group.metadata, k))
                r = prompt_read(store, builder, &group, k, id, err);
            else
                r = decode_read(store, builder, &group, id,
                                last_tokens ? last_tokens[decode_index++] : -1, err);
        }
        if (r)
            return r;
    }

    for (uint32_t i = 0; i < builder->batch.row_count; i++) {
        uint32_t table_count = cox_sequence_store_get(store, builder->rows[i].slot)->table_count;
        if (table_count > builder->batch.table_count)
            builder->batch.table_count = table_count;
    }
    return 0;
}
