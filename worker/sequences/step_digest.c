#include "step_digest.h"

#include "channel/base/idioms.h"

/* Of words, in their order. */
struct sum {
    uint64_t words;
    /* of `words` after each word */
    uint64_t sums;
};

__attribute__((always_inline)) static inline void sum_add(struct sum *sum, uint64_t word)
{
    sum->words += word;
    sum->sums += sum->words;
}

COX_HOT static void chain_add(uint64_t *chain, enum cox_digest which, const struct sum *sum)
{
    const uint64_t before = chain[1 + which] ? chain[1 + which] : COX_STEP_DIGEST_START;
    chain[1 + which] = cox_step_digest_mix(cox_step_digest_mix(before, sum->sums), sum->words);
}

/* Some rows in turn, and two more blocks of another. All ranks have the same sequence and number
 * of rows, so that all read the same ones. */
COX_HOT static void some_add(struct sum *sequences, struct sum *blocks,
                             const struct cox_batch *batch)
{
    const uint32_t row_count = batch->row_count;
    const uint32_t turn = (uint32_t)batch->sequence % row_count;
    const uint32_t round = (uint32_t)batch->sequence / row_count;
    const struct cox_batch_row *const end = batch->rows + row_count;
    const struct cox_batch_row *row = &batch->rows[turn * COX_STEP_DIGEST_ROW_COUNT % row_count];
    for (uint32_t i = COX_STEP_DIGEST_ROW_COUNT; i > 0; i--) {
        const struct cox_block_table *table = row->tables;
        sum_add(sequences, (uint64_t)row->id);
        sum_add(blocks, (uint32_t)table->blocks[table->count - 1] | (uint64_t)table->count << 32);
        row = row + 1 < end ? row + 1 : batch->rows;
    }
    const struct cox_block_table *table = batch->rows[turn].tables;
    const uint32_t first = round * 2 % table->count;
    const uint32_t second = first + 1 < table->count ? first + 1 : 0;
    sum_add(blocks,
            (uint32_t)table->blocks[first] | (uint64_t)(uint32_t)table->blocks[second] << 32);
}

static void all_add(struct sum *sequences, struct sum *blocks, const struct cox_batch *batch)
{
    for (uint32_t i = 0; i < batch->row_count; i++) {
        const struct cox_batch_row *row = &batch->rows[i];
        sum_add(sequences, (uint64_t)row->id);
        for (uint32_t t = 0; t < batch->table_count; t++) {
            const struct cox_block_table *table = &row->tables[t];
            sum_add(blocks, table->count);
            for (uint32_t k = 0; k < table->count; k++)
                sum_add(blocks, (uint32_t)table->blocks[k]);
        }
    }
}

COX_HOT void cox_step_digest_add(uint64_t *chain, const struct cox_batch *batch,
                                 const struct cox_batch_output *outputs, bool single)
{
    const uint32_t row_count = batch->row_count;
    struct sum sequences = {0}, positions = {0}, blocks = {0}, tokens = {0};
    if (!row_count)
        return;
    const struct cox_batch_row *row = batch->rows;
#pragma GCC unroll 4
    for (uint32_t i = row_count; i > 0; i--, row++, outputs++) {
        sum_add(&positions, row->position | (uint64_t)row->token_count << 32);
        sum_add(&tokens, (uint32_t)outputs->token);
    }
    if (single)
        some_add(&sequences, &blocks, batch);
    else
        all_add(&sequences, &blocks, batch);
    chain_add(chain, COX_DIGEST_SEQUENCES, &sequences);
    chain_add(chain, COX_DIGEST_POSITIONS, &positions);
    chain_add(chain, COX_DIGEST_BLOCKS, &blocks);
    if (tokens.words != row_count * (uint64_t)UINT32_MAX) /* not -1 throughout */
        chain_add(chain, COX_DIGEST_TOKENS, &tokens);
}

void cox_step_digest_restart(uint64_t *chain, uint64_t sequence)
{
    chain[0] = sequence;
    chain[1 + COX_DIGEST_SEQUENCES] = COX_STEP_DIGEST_START;
    chain[1 + COX_DIGEST_POSITIONS] = COX_STEP_DIGEST_START;
    chain[1 + COX_DIGEST_BLOCKS] = COX_STEP_DIGEST_START;
    chain[1 + COX_DIGEST_TOKENS] = 0;
}
