/* The rows of a step as columns, in one piece of memory that Python owns. */
#include "native.h"

#include <string.h>

static size_t place(size_t *end, size_t size)
{
    const size_t start = *end;
    *end = start + ((size + 7) & ~(size_t)7);
    return start;
}

static void columns_place(const struct cox_batch *batch, struct coxpy_columns *ret_columns)
{
    struct coxpy_columns columns = {.row_count = batch->row_count};
    size_t end = 0;
    const size_t rows = batch->row_count;
    for (uint32_t i = 0; i < batch->row_count; i++) {
        columns.token_count += batch->rows[i].token_count;
        for (uint32_t t = 0; t < batch->table_count; t++)
            if (batch->rows[i].tables[t].count > columns.table_widths[t])
                columns.table_widths[t] = batch->rows[i].tables[t].count;
    }
    const size_t tokens = columns.token_count;
    columns.offsets[COXPY_IDS] = place(&end, rows * sizeof(int64_t));
    columns.offsets[COXPY_SEEDS] = place(&end, rows * sizeof(uint64_t));
    columns.offsets[COXPY_SLOTS] = place(&end, rows * sizeof(uint32_t));
    columns.offsets[COXPY_STARTS] = place(&end, (rows + 1) * sizeof(int32_t));
    columns.offsets[COXPY_TOKENS] = place(&end, tokens * sizeof(int32_t));
    columns.offsets[COXPY_POSITIONS] = place(&end, tokens * sizeof(int32_t));
    columns.offsets[COXPY_TEMPERATURES] = place(&end, rows * sizeof(float));
    columns.offsets[COXPY_TOP_PS] = place(&end, rows * sizeof(float));
    columns.offsets[COXPY_TOP_KS] = place(&end, rows * sizeof(int32_t));
    columns.offsets[COXPY_PENALTIES] = place(&end, rows * sizeof(float));
    columns.offsets[COXPY_EMITS] = place(&end, rows);
    columns.offsets[COXPY_FINISHED] = place(&end, batch->finished_count * sizeof(uint32_t));
    columns.offsets[COXPY_SWAP_IN] = place(&end, batch->swap_in_count * 2 * sizeof(int32_t));
    columns.offsets[COXPY_SWAP_OUT] = place(&end, batch->swap_out_count * 2 * sizeof(int32_t));
    columns.offsets[COXPY_COPY] = place(&end, batch->copy_count * 2 * sizeof(int32_t));
    for (uint32_t t = 0; t < batch->table_count; t++)
        columns.offsets[COXPY_TABLES + t] =
            place(&end, rows * columns.table_widths[t] * sizeof(int32_t));
    columns.size = end;
    *ret_columns = columns;
}

static void pairs_fill(int32_t *to, const struct cox_block_pair *pairs, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        to[2 * i] = pairs[i].from;
        to[2 * i + 1] = pairs[i].to;
    }
}

static void table_fill(int32_t *to, uint32_t width, const struct cox_block_table *table)
{
    memcpy(to, table->blocks, table->count * sizeof *to);
    for (uint32_t i = table->count; i < width; i++)
        to[i] = -1;
}

bool coxpy_batch_fill(const struct cox_batch *batch, uint8_t *memory, size_t size,
                      struct coxpy_columns *ret_columns)
{
    columns_place(batch, ret_columns);
    const struct coxpy_columns *columns = ret_columns;
    if (columns->size > size)
        return false;
#define COLUMN(type, column) ((type *)(void *)(memory + columns->offsets[column]))
    int64_t *ids = COLUMN(int64_t, COXPY_IDS);
    uint64_t *seeds = COLUMN(uint64_t, COXPY_SEEDS);
    uint32_t *slots = COLUMN(uint32_t, COXPY_SLOTS);
    int32_t *starts = COLUMN(int32_t, COXPY_STARTS);
    int32_t *tokens = COLUMN(int32_t, COXPY_TOKENS);
    int32_t *positions = COLUMN(int32_t, COXPY_POSITIONS);
    float *temperatures = COLUMN(float, COXPY_TEMPERATURES);
    float *top_ps = COLUMN(float, COXPY_TOP_PS);
    int32_t *top_ks = COLUMN(int32_t, COXPY_TOP_KS);
    float *penalties = COLUMN(float, COXPY_PENALTIES);
    uint8_t *emits = COLUMN(uint8_t, COXPY_EMITS);
    int32_t end = 0;
    for (uint32_t i = 0; i < batch->row_count; i++) {
        const struct cox_batch_row *row = &batch->rows[i];
        ids[i] = row->id;
        slots[i] = row->slot;
        starts[i] = end;
        memcpy(tokens + end, row->tokens + row->position, row->token_count * sizeof *tokens);
        for (uint32_t t = 0; t < row->token_count; t++)
            positions[end++] = (int32_t)(row->position + t);
        seeds[i] = row->sampling->seed;
        temperatures[i] = row->sampling->temperature;
        top_ps[i] = row->sampling->top_p;
        top_ks[i] = row->sampling->top_k;
        penalties[i] = row->sampling->repetition_penalty;
        emits[i] = row->emit;
        for (uint32_t t = 0; t < batch->table_count; t++)
            table_fill(COLUMN(int32_t, COXPY_TABLES + t) + (size_t)i * columns->table_widths[t],
                       columns->table_widths[t], &row->tables[t]);
    }
    starts[batch->row_count] = end;
    if (batch->finished_count)
        memcpy(COLUMN(uint32_t, COXPY_FINISHED), batch->finished_slots,
               batch->finished_count * sizeof *batch->finished_slots);
    pairs_fill(COLUMN(int32_t, COXPY_SWAP_IN), batch->swap_in, batch->swap_in_count);
    pairs_fill(COLUMN(int32_t, COXPY_SWAP_OUT), batch->swap_out, batch->swap_out_count);
    pairs_fill(COLUMN(int32_t, COXPY_COPY), batch->copy, batch->copy_count);
#undef COLUMN
    return true;
}
