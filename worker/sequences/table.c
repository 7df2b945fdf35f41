#include "table.h"

#include "channel/base/idioms.h"
#include "proto/executor.pb-c.h"
#include "column_parser.h"
#include "nested_parser.h"
#include "table_private.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

int cox_table_new(uint32_t sequence_count_max, uint32_t token_count_max,
                  struct cox_table **ret_table)
{
    if (sequence_count_max == 0 || sequence_count_max > COX_TABLE_SEQUENCE_COUNT_LIMIT ||
        token_count_max == 0 || token_count_max > COX_TABLE_TOKEN_COUNT_LIMIT)
        return COX_INVALID;
    struct cox_table *table = calloc(1, sizeof *table);
    if (!table)
        return -ENOMEM;
    int r = cox_sequence_store_init(&table->store, sequence_count_max, token_count_max);
    if (!r)
        r = cox_batch_builder_init(&table->builder, sequence_count_max);
    if (r) {
        cox_table_free(table);
        return r;
    }
    *ret_table = table;
    return 0;
}

struct cox_table *cox_table_free(struct cox_table *table)
{
    if (table) {
        cox_batch_builder_deinit(&table->builder);
        cox_sequence_store_deinit(&table->store);
        free(table);
    }
    return NULL;
}

void cox_table_watch(struct cox_table *table, const void *void_word, const void *cancel_word)
{
    table->void_word = void_word;
    table->cancel_word = cancel_word;
}

uint64_t cox_batch_void_through(const struct cox_batch *batch)
{
    const _Atomic uint64_t *void_through = batch->void_word;
    /* acquire; partner: cox_state_set_void in the coordinator. A callback that stops early sees why
     * the step is void. */
    return void_through ? atomic_load_explicit(void_through, memory_order_acquire) : 0;
}

bool cox_batch_cancelled(const struct cox_batch *batch)
{
    const _Atomic uint64_t *cancelled = batch->cancel_word;
    if (batch->void_word && batch->sequence <= cox_batch_void_through(batch))
        return true;
    /* acquire; partner: wait_tell in pause.c. */
    return cancelled && batch->sequence <= atomic_load_explicit(cancelled, memory_order_acquire);
}

int cox_table_apply(struct cox_table *table, uint64_t sequence,
                    const struct Coxswain__ExecuteModelRequest *request,
                    const struct cox_batch **ret_batch, struct cox_batch_output **ret_outputs,
                    struct cox_error *err)
{
    COX_ASSERT(!table->pending);
    const Coxswain__StepDelta *step = request->step;
    if (step && step->base_sequence != 0 && step->base_sequence != table->base)
        return cox_fail(err, COX_STALE, "the step builds on step %llu, the table stands at %llu",
                        (unsigned long long)step->base_sequence, (unsigned long long)table->base);
    if (step && request->n_seq_group_metadata_list)
        return cox_fail(err, COX_CORRUPT, "a step in both forms");

    cox_sequence_store_begin(&table->store);
    cox_batch_builder_begin(&table->builder, sequence, table->void_word);
    table->builder.batch.cancel_word = table->cancel_word;
    int r = cox_batch_builder_moves(&table->builder, request, err);
    if (!r)
        r = step ? cox_column_parser_apply(&table->store, &table->builder, step, err)
                 : cox_nested_parser_apply(&table->store, &table->builder, request, err);
    if (!r)
        r = cox_batch_builder_seal(&table->builder, &table->store, err);
    if (r) {
        cox_sequence_store_revert(&table->store);
        return r;
    }
    table->pending = true;
    table->chained = step && step->base_sequence != 0;
    table->single = step && !step->n_row_token_count && table->builder.batch.table_count == 1;
    table->own_digests = 0;
    *ret_batch = &table->builder.batch;
    *ret_outputs = table->builder.outputs;
    return 0;
}

void cox_table_weights(struct cox_table *table, uint64_t version,
                       const struct cox_weights_candidate *candidate)
{
    COX_ASSERT(table->pending);
    table->builder.batch.weights_version = version;
    table->builder.batch.weights = candidate;
}

void cox_table_set_digest(struct cox_table *table, enum cox_digest which, uint64_t value)
{
    COX_ASSERT(table->pending);
    table->own_digests |= UINT32_C(1) << which;
    table->own_values[which] = value;
}

/* before: the chain up to the step before. */
static void own_digests_take(struct cox_table *table, const uint64_t *before)
{
    for (uint32_t which = 0; which < COX_DIGEST_COUNT; which++) {
        const uint64_t value = table->own_values[which], last = before[1 + which];
        if (table->own_digests >> which & 1)
            table->chain[1 + which] =
                value ? cox_step_digest_mix(last ? last : COX_STEP_DIGEST_START, value) : 0;
    }
}

void cox_table_commit(struct cox_table *table)
{
    COX_ASSERT(table->pending);
    const struct cox_batch_builder *builder = &table->builder;
    if (!table->chained)
        cox_step_digest_restart(table->chain, builder->batch.sequence);
    uint64_t before[COX_STEP_CHAIN_SIZE];
    if (table->own_digests)
        memcpy(before, table->chain, sizeof before);
    const struct cox_slot *const slots = table->store.slots;
    const struct cox_batch_row *row = builder->rows;
    const struct cox_batch_output *output = builder->outputs;
    for (uint32_t i = builder->batch.row_count; i > 0; i--, row++, output++) {
        /* A row that ends before the last known token recomputes: later tokens are known already.
         * seal made room for the token. */
        struct cox_numbers *tokens = &slots[row->slot].now->tokens;
        const uint32_t count = tokens->count;
        if (row->emit && output->token >= 0 && row->position + row->token_count == count) {
            tokens->items[count] = output->token;
            tokens->count = count + 1;
        }
    }
    cox_step_digest_add(table->chain, &builder->batch, builder->outputs, table->single);
    if (table->own_digests)
        own_digests_take(table, before);
    cox_sequence_store_commit(&table->store);
    table->base = builder->batch.sequence;
    table->pending = false;
}

void cox_table_revert(struct cox_table *table)
{
    COX_ASSERT(table->pending);
    cox_sequence_store_revert(&table->store);
    table->pending = false;
}

uint64_t cox_table_base(const struct cox_table *table)
{
    return table->base;
}

const uint64_t *cox_table_chain(const struct cox_table *table)
{
    return table->chain;
}

void cox_table_cleanup(struct cox_table *table, const int64_t *seq_ids, size_t id_count,
                       const uint32_t **ret_slots, uint32_t *ret_count)
{
    COX_ASSERT(!table->pending);
    cox_sequence_store_begin(&table->store);
    cox_batch_builder_begin(&table->builder, table->base, table->void_word);
    uint32_t slot;
    for (size_t i = 0; i < id_count; i++)
        if (cox_sequence_store_find_id(&table->store, seq_ids[i], &slot))
            cox_batch_builder_finish(&table->builder, &table->store, slot);
    cox_sequence_store_commit(&table->store);
    *ret_slots = table->builder.finished;
    *ret_count = table->builder.batch.finished_count;
}

void cox_table_clear(struct cox_table *table)
{
    COX_ASSERT(!table->pending);
    cox_sequence_store_begin(&table->store);
    uint32_t slot;
    while (cox_sequence_store_lowest_live(&table->store, &slot))
        cox_sequence_store_drop(&table->store, slot);
    cox_sequence_store_commit(&table->store);
    table->base = 0;
}

struct cox_adapter_references *cox_table_adapter_references(const struct cox_table *table)
{
    return table->store.adapter_references;
}
