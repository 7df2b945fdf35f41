#include "column_parser.h"

#include "announcement.h"
#include "proto/executor.pb-c.h"

#include <string.h>

/* Appends. Neither tokens nor blocks are ever negative. */
static int numbers_append(struct cox_numbers *numbers, const int32_t *items, size_t count,
                          uint32_t limit)
{
    int r = cox_numbers_reserve(numbers, numbers->count + count, limit);
    if (r)
        return r;
    if (count == 0)
        return 0;
    /* The sign bits of all are or'ed instead of a branch for each. */
    int32_t signs = 0;
    for (size_t i = 0; i < count; i++)
        signs |= items[i];
    if (signs < 0)
        return COX_CORRUPT;
    memcpy(numbers->items + numbers->count, items, count * sizeof *items);
    numbers->count += (uint32_t)count;
    return 0;
}

static int columns_check(const Coxswain__StepDelta *step, struct cox_error *err)
{
    if (step->n_append_block != step->n_append_slot ||
        (step->n_append_table && step->n_append_table != step->n_append_slot))
        return cox_fail(err, COX_CORRUPT, "append columns: %zu slots, %zu blocks, %zu tables",
                        step->n_append_slot, step->n_append_block, step->n_append_table);
    if (step->n_token != step->n_token_slot)
        return cox_fail(err, COX_CORRUPT, "token columns: %zu slots, %zu tokens",
                        step->n_token_slot, step->n_token);
    if (step->n_row_position != step->n_row_slot ||
        (step->n_row_token_count && step->n_row_token_count != step->n_row_slot))
        return cox_fail(err, COX_CORRUPT, "row columns: %zu slots, %zu positions, %zu counts",
                        step->n_row_slot, step->n_row_position, step->n_row_token_count);
    if (step->has_table_count && step->table_count == 0)
        return cox_fail(err, COX_CORRUPT, "table_count is 0");
    if (step->has_table_count && step->table_count > COX_BLOCK_TABLE_COUNT_MAX)
        return cox_fail(err, COX_TOO_LARGE, "table_count %u, at most %d", step->table_count,
                        COX_BLOCK_TABLE_COUNT_MAX);
    return 0;
}

static int finished_read(struct cox_sequence_store *store, struct cox_batch_builder *builder,
                         const Coxswain__StepDelta *step, struct cox_error *err)
{
    if (step->base_sequence == 0) {
        uint32_t slot;
        while (cox_sequence_store_lowest_live(store, &slot))
            cox_batch_builder_finish(builder, store, slot);
        return 0;
    }
    for (size_t i = 0; i < step->n_finished; i++) {
        if (!cox_sequence_store_get(store, step->finished[i]))
            return cox_fail(err, COX_CORRUPT, "finished[%zu]: slot %u has no sequence", i,
                            step->finished[i]);
        cox_batch_builder_finish(builder, store, step->finished[i]);
    }
    return 0;
}

static int announced_read(struct cox_sequence_store *store, uint32_t table_count,
                          const Coxswain__StepSequence *from, size_t index, struct cox_error *err)
{
    uint32_t slot = from->slot;
    uint32_t other;
    if (slot >= store->sequence_count_max)
        return cox_fail(err, COX_TOO_LARGE, "announced[%zu]: slot %u, at most %u sequences", index,
                        slot, store->sequence_count_max);
    if (cox_sequence_store_get(store, slot))
        return cox_fail(err, COX_CORRUPT, "announced[%zu]: slot %u is taken", index, slot);
    if (cox_sequence_store_find_id(store, from->seq_id, &other))
        return cox_fail(err, COX_CORRUPT, "announced[%zu]: sequence %lld lives in slot %u", index,
                        (long long)from->seq_id, other);
    if (from->n_tokens == 0)
        return cox_fail(err, COX_CORRUPT, "announced[%zu]: no tokens", index);
    if (from->n_tables > table_count)
        return cox_fail(err, COX_CORRUPT, "announced[%zu]: %zu tables, the step has %u", index,
                        from->n_tables, table_count);

    struct cox_stored_sequence *sequence;
    int r = cox_sequence_store_announce(store, slot, from->seq_id, NULL, &sequence);
    if (!r)
        r = numbers_append(&sequence->tokens, from->tokens, from->n_tokens, store->token_count_max);
    if (r)
        return cox_fail(err, r, "announced[%zu]: %zu tokens (at most %u): %s", index,
                        from->n_tokens, store->token_count_max, cox_status_text(r));
    for (size_t t = 0; t < from->n_tables; t++) {
        /* A block holds one position at least: no table is longer than the longest sequence. */
        r = numbers_append(&sequence->tables[t], from->tables[t]->blocks, from->tables[t]->n_blocks,
                           store->token_count_max);
        if (r)
            return cox_fail(err, r, "announced[%zu]: table %zu of %zu blocks: %s", index, t,
                            from->tables[t]->n_blocks, cox_status_text(r));
    }
    sequence->table_count = table_count;
    sequence->announced_count = sequence->tokens.count;
    sequence->sampling = cox_announcement_sampling(from->sampling);
    return cox_announcement_set_lora(store, slot, from->lora_id, "announced", index, err);
}

static int appends_read(struct cox_sequence_store *store, uint32_t table_count,
                        const Coxswain__StepDelta *step, struct cox_error *err)
{
    for (size_t i = 0; i < step->n_append_slot; i++) {
        uint32_t slot = step->append_slot[i];
        uint32_t t = step->n_append_table ? step->append_table[i] : 0;
        struct cox_stored_sequence *sequence = cox_sequence_store_get(store, slot);
        if (!sequence)
            return cox_fail(err, COX_CORRUPT, "append_slot[%zu]: slot %u has no sequence", i, slot);
        if (t >= table_count)
            return cox_fail(err, COX_CORRUPT, "append_table[%zu]: table %u of %u", i, t,
                            table_count);
        cox_sequence_store_touch(store, slot);
        int r =
            numbers_append(&sequence->tables[t], &step->append_block[i], 1, store->token_count_max);
        if (r)
            return cox_fail(err, r, "append_block[%zu]: block %d of slot %u: %s", i,
                            step->append_block[i], slot, cox_status_text(r));
    }
    return 0;
}

static int tokens_read(struct cox_sequence_store *store, const Coxswain__StepDelta *step,
                       struct cox_error *err)
{
    for (size_t i = 0; i < step->n_token_slot; i++) {
        uint32_t slot = step->token_slot[i];
        struct cox_stored_sequence *sequence = cox_sequence_store_get(store, slot);
        if (!sequence)
            return cox_fail(err, COX_CORRUPT, "token_slot[%zu]: slot %u has no sequence", i, slot);
        cox_sequence_store_touch(store, slot);
        int r = numbers_append(&sequence->tokens, &step->token[i], 1, store->token_count_max);
        if (r)
            return cox_fail(err, r, "token[%zu]: token %d of slot %u: %s", i, step->token[i], slot,
                            cox_status_text(r));
    }
    return 0;
}

static int rows_read(struct cox_sequence_store *store, struct cox_batch_builder *builder,
                     const Coxswain__StepDelta *step, struct cox_error *err)
{
    int r = cox_batch_builder_rows(builder, store, step->row_slot, step->row_position,
                                   step->n_row_token_count ? step->row_token_count : NULL,
                                   step->n_row_slot, err);
    if (r)
        return r;
    for (size_t i = 0; i < step->n_row_silent; i++) {
        if (step->row_silent[i] >= builder->batch.row_count)
            return cox_fail(err, COX_CORRUPT, "row_silent[%zu]: row %u of %u", i,
                            step->row_silent[i], builder->batch.row_count);
        builder->rows[step->row_silent[i]].emit = false;
    }
    return 0;
}

int cox_column_parser_apply(struct cox_sequence_store *store, struct cox_batch_builder *builder,
                            const struct Coxswain__StepDelta *step, struct cox_error *err)
{
    int r = columns_check(step, err);
    if (r)
        return r;
    uint32_t table_count = step->has_table_count ? step->table_count : 1;
    builder->batch.table_count = table_count;

    r = finished_read(store, builder, step, err);
    for (size_t i = 0; i < step->n_announced && !r; i++)
        r = announced_read(store, table_count, step->announced[i], i, err);
    if (!r)
        r = appends_read(store, table_count, step, err);
    if (!r)
        r = tokens_read(store, step, err);
    if (!r)
        r = rows_read(store, builder, step, err);
    return r;
}
