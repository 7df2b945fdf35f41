#include "batch_builder.h"

#include "channel/base/idioms.h"
#include "proto/executor.pb-c.h"

#include <stdlib.h>
#include <string.h>

int cox_batch_builder_init(struct cox_batch_builder *builder, uint32_t sequence_count_max)
{
    *builder = (struct cox_batch_builder){
        .finished = calloc(sequence_count_max, sizeof *builder->finished),
    };
    return builder->finished ? 0 : -ENOMEM;
}

void cox_batch_builder_deinit(struct cox_batch_builder *builder)
{
    free(builder->rows);
    free(builder->outputs);
    free(builder->views);
    free(builder->pairs);
    free(builder->finished);
    *builder = (struct cox_batch_builder){0};
}

void cox_batch_builder_begin(struct cox_batch_builder *builder, uint64_t sequence,
                             const void *void_word)
{
    builder->batch = (struct cox_batch){
        .sequence = sequence,
        .table_count = 1,
        .finished_slots = builder->finished,
        .void_word = void_word,
    };
}

static int pairs_fill(struct cox_block_pair *to, Coxswain__IntPair *const *from, size_t count,
                      const char *name, struct cox_error *err)
{
    for (size_t i = 0; i < count; i++) {
        /* An absent number is 0, as proto3 writers leave it out. */
        to[i] = (struct cox_block_pair){.from = from[i]->num1, .to = from[i]->num2};
        if (to[i].from < 0 || to[i].to < 0)
            return cox_fail(err, COX_CORRUPT, "%s[%zu]: block pair (%d, %d) is negative", name, i,
                            to[i].from, to[i].to);
    }
    return 0;
}

int cox_batch_builder_moves(struct cox_batch_builder *builder,
                            const struct Coxswain__ExecuteModelRequest *request,
                            struct cox_error *err)
{
    struct cox_batch *batch = &builder->batch;
    if ((unsigned)request->forward_type > COX_FORWARD_DUMMY)
        return cox_fail(err, COX_CORRUPT, "forward_type %d is unknown", (int)request->forward_type);
    batch->forward_type = (enum cox_forward_type)request->forward_type;

    size_t in = request->n_blocks_to_swap_in;
    size_t out = request->n_blocks_to_swap_out;
    size_t copy = request->n_blocks_to_copy;
    int r = cox_reserve((void **)&builder->pairs, &builder->pair_capacity, in + out + copy,
                        sizeof *builder->pairs);
    if (r)
        return cox_fail(err, r, "no memory for %zu block pairs", in + out + copy);
    if (in + out + copy == 0)
        return 0;

    r = pairs_fill(builder->pairs, request->blocks_to_swap_in, in, "blocks_to_swap_in", err);
    if (!r)
        r = pairs_fill(builder->pairs + in, request->blocks_to_swap_out, out, "blocks_to_swap_out",
                       err);
    if (!r)
        r = pairs_fill(builder->pairs + in + out, request->blocks_to_copy, copy, "blocks_to_copy",
                       err);
    batch->swap_in = builder->pairs;
    batch->swap_in_count = (uint32_t)in;
    batch->swap_out = builder->pairs + in;
    batch->swap_out_count = (uint32_t)out;
    batch->copy = builder->pairs + in + out;
    batch->copy_count = (uint32_t)copy;
    return r;
}

void cox_batch_builder_finish(struct cox_batch_builder *builder, struct cox_sequence_store *store,
                              uint32_t slot)
{
    cox_sequence_store_drop(store, slot);
    builder->finished[builder->batch.finished_count++] = slot;
}

/* Fails with what is wrong with a row. */
static int row_refuse(const struct cox_sequence_store *store, uint32_t index, uint32_t slot,
                      uint32_t position, uint32_t token_count, struct cox_error *err)
{
    const struct cox_stored_sequence *sequence = cox_sequence_store_get(store, slot);
    if (!sequence)
        return cox_fail(err, COX_CORRUPT, "row %u: slot %u has no sequence", index, slot);
    if (store->slots[slot].row_step == store->step)
        return cox_fail(err, COX_CORRUPT, "row %u: slot %u has a row already", index, slot);
    if (token_count == 0 || (uint64_t)position + token_count > sequence->tokens.count)
        return cox_fail(err, COX_CORRUPT, "row %u: %u tokens from %u, but slot %u has %u", index,
                        token_count, position, slot, sequence->tokens.count);
    if (sequence->tables[0].count == 0)
        return cox_fail(err, COX_CORRUPT, "row %u: slot %u has no blocks", index, slot);
    return cox_fail(err, COX_CORRUPT, "row %u: a dummy step has no rows", index);
}

/* Appends the rows, for which there is room. Inlined twice: for one token each, and for more. */
__attribute__((always_inline)) static inline int rows_append(struct cox_batch_builder *builder,
                                                             const struct cox_sequence_store *store,
                                                             const uint32_t *slots,
                                                             const uint32_t *positions,
                                                             const uint32_t *token_counts,
                                                             size_t count, struct cox_error *err)
{
    /* Loaded once, so that the compiler need not reload it after the stores below. */
    struct cox_slot *const sequence_store_slots = store->slots;
    const uint32_t slot_count = store->sequence_count_max;
    const uint64_t step = store->step;
    const bool dummy = builder->batch.forward_type == COX_FORWARD_DUMMY;
    struct cox_batch_row *row = builder->rows + builder->batch.row_count;
    for (size_t i = 0; i < count; i++, row++) {
        const uint32_t slot = slots[i], position = positions[i];
        const uint32_t token_count = token_counts ? token_counts[i] : 1;
        const struct cox_stored_sequence *sequence =
            slot < slot_count ? sequence_store_slots[slot].now : NULL;
        if (!sequence || sequence_store_slots[slot].row_step == step || token_count == 0 ||
            (uint64_t)position + token_count > sequence->tokens.count ||
            sequence->tables[0].count == 0 || dummy)
            return row_refuse(store, (uint32_t)(row - builder->rows), slot, position, token_count,
                              err);
        sequence_store_slots[slot].row_step = step;
        /* Pointers are set in seal. */
        row->id = sequence->id;
        row->slot = slot;
        row->position = position;
        row->token_count = token_count;
        row->emit = true;
    }
    builder->batch.row_count = (uint32_t)(row - builder->rows);
    return 0;
}

int cox_batch_builder_rows(struct cox_batch_builder *builder, struct cox_sequence_store *store,
                           const uint32_t *slots, const uint32_t *positions,
                           const uint32_t *token_counts, size_t count, struct cox_error *err)
{
    if (count == 0)
        return 0;
    /* Each live slot once: more rows than that are refused below, without memory for all. One at
     * least, so that the first row has an address. */
    const size_t live_count = store->live_count ? store->live_count : 1;
    size_t room = builder->batch.row_count;
    room += count < live_count ? count : live_count;
    int r =
        cox_reserve((void **)&builder->rows, &builder->row_capacity, room, sizeof *builder->rows);
    if (r)
        return cox_fail(err, r, "no memory for %zu rows", room);
    return token_counts ? rows_append(builder, store, slots, positions, token_counts, count, err)
                        : rows_append(builder, store, slots, positions, NULL, count, err);
}

int cox_batch_builder_row(struct cox_batch_builder *builder, struct cox_sequence_store *store,
                          uint32_t slot, uint32_t position, uint32_t token_count, bool emit,
                          struct cox_error *err)
{
    int r = cox_batch_builder_rows(builder, store, &slot, &position, &token_count, 1, err);
    if (r == 0)
        builder->rows[builder->batch.row_count - 1].emit = emit;
    return r;
}

/* Gives each row its pointers, and room for its token. table_count is that of the batch. Inlined
 * twice: for one table, of which there is no loop, and for more. */
__attribute__((always_inline)) static inline int rows_seal(struct cox_batch_builder *builder,
                                                           const struct cox_sequence_store *store,
                                                           const uint32_t table_count,
                                                           struct cox_error *err)
{
    struct cox_block_table *view = builder->views;
    struct cox_batch_output *output = builder->outputs;
    struct cox_batch_row *const rows = builder->rows, *const end = rows + builder->batch.row_count;
    const struct cox_slot *const slots = store->slots;
    const uint32_t token_count_max = store->token_count_max;
    for (struct cox_batch_row *row = rows; row < end; row++, output++) {
        struct cox_stored_sequence *sequence = slots[row->slot].now;
        const uint32_t token_count = sequence->tokens.count;
        if (row->emit && row->position + row->token_count == token_count &&
            (token_count >= sequence->tokens.capacity || token_count >= token_count_max)) {
            int r =
                cox_numbers_reserve(&sequence->tokens, (size_t)token_count + 1, token_count_max);
            if (r)
                return cox_fail(err, r, "row %u: no room for token %u of slot %u (at most %u)",
                                (uint32_t)(row - rows), token_count, row->slot, token_count_max);
        }
        row->tokens = sequence->tokens.items;
        row->tables = view;
        row->sampling = &sequence->sampling;
        row->lora_id = sequence->lora ? sequence->lora->name : NULL;
        const struct cox_numbers *tables = sequence->tables;
        for (uint32_t t = 0; t < table_count; t++, view++) {
            view->blocks = tables[t].items;
            view->count = tables[t].count;
        }
        output->token = -1;
        output->logprob = 0;
    }
    return 0;
}

int cox_batch_builder_seal(struct cox_batch_builder *builder, struct cox_sequence_store *store,
                           struct cox_error *err)
{
    uint32_t row_count = builder->batch.row_count;
    uint32_t table_count = builder->batch.table_count;
    int r = cox_reserve((void **)&builder->outputs, &builder->output_capacity, row_count,
                        sizeof *builder->outputs);
    if (!r)
        r = cox_reserve((void **)&builder->views, &builder->view_capacity,
                        (size_t)row_count * table_count, sizeof *builder->views);
    if (r)
        return cox_fail(err, r, "no memory for the view of %u rows", row_count);
    r = table_count == 1 ? rows_seal(builder, store, 1, err)
                         : rows_seal(builder, store, table_count, err);
    if (r == 0)
        builder->batch.rows = builder->rows;
    return r;
}
