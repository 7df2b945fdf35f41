/* table_digests: the digests that ranks compare after each step. */
#include "proto/wire.h"
#include "table_fixture.h"
#include "table_model.h"

/* ---- digests of the steps ---- */

#define DIGEST_ROW_COUNT 6
#define DIGEST_BLOCK_COUNT 5

/* DIGEST_ROW_COUNT sequences, 100 and up, of 3 tokens and DIGEST_BLOCK_COUNT blocks each. */
static void digest_announce(uint64_t base)
{
    Request *request = packed_new(COX_FORWARD_PREFILL, base);
    for (uint32_t slot = 0; slot < DIGEST_ROW_COUNT; slot++) {
        packed_table(packed_announce(request, slot, 100 + slot, numbers + slot, 3), numbers,
                     DIGEST_BLOCK_COUNT);
        packed_row(request, slot, 0, 3);
    }
    advance(request, 50);
}

static Request *digest_step(uint32_t forward_type)
{
    Request *request = packed(forward_type);
    for (uint32_t slot = 0; slot < DIGEST_ROW_COUNT; slot++)
        packed_row(request, slot, cox_sequence_store_get(&f.table->store, slot)->tokens.count - 1,
                   1);
    if (forward_type == COX_FORWARD_DECODE)
        request->step->n_row_token_count = 0;
    return request;
}

static void chain_get(uint64_t *chain)
{
    memcpy(chain, cox_table_chain(f.table), COX_STEP_CHAIN_SIZE * sizeof *chain);
}

enum bent { BENT_NOTHING, BENT_ID, BENT_POSITION, BENT_LAST_BLOCK, BENT_FIRST_BLOCK, BENT_TOKEN };

/* A prefill and steps after it, twice: the second time with one thing bent before the first step
 * and left so. Returns the first step after which `which` is another than the first time; 0: none.
 * All other digests stay as they are. */
static int digest_differs(enum bent bent, uint32_t row, enum cox_digest which,
                          uint32_t forward_type, int step_count)
{
    static uint64_t chains[2][64][COX_STEP_CHAIN_SIZE];
    COX_ASSERT(step_count < 64);
    for (int turn = 0; turn < 2; turn++) {
        f.table = cox_table_free(f.table);
        table_start(MODEL_SLOT_MAX, 100);
        digest_announce(0);
        struct cox_stored_sequence *sequence = cox_sequence_store_get(&f.table->store, row);
        if (turn && bent == BENT_ID)
            sequence->id += 1000;
        if (turn && bent == BENT_LAST_BLOCK)
            sequence->tables[0].items[DIGEST_BLOCK_COUNT - 1] ^= 64;
        if (turn && bent == BENT_FIRST_BLOCK)
            sequence->tables[0].items[0] ^= 64;
        for (int step = 1; step <= step_count; step++) {
            request_reset();
            assert_int_equal(apply(digest_step(forward_type)), 0);
            for (uint32_t i = 0; i < DIGEST_ROW_COUNT; i++)
                f.outputs[i].token = 7 + (turn && bent == BENT_TOKEN && i == row);
            if (turn && bent == BENT_POSITION && step == 1)
                f.table->builder.rows[row].position--;
            cox_table_commit(f.table);
            chain_get(chains[turn][step]);
        }
        if (turn && bent == BENT_ID) /* what the store finds it by */
            sequence->id -= 1000;
    }
    int first = 0;
    for (int step = step_count; step > 0; step--)
        for (uint32_t i = 0; i < COX_STEP_CHAIN_SIZE; i++) {
            const bool differs = chains[0][step][i] != chains[1][step][i];
            if (i == 1 + (uint32_t)which && differs)
                first = step;
            else if (i != 1 + (uint32_t)which)
                assert_false(differs);
            /* Once different, for good. */
            if (i == 1 + (uint32_t)which && !differs)
                assert_true(first == 0 || first > step);
        }
    return first;
}

TEST(s2_a_digest_says_what_differs)
{
    for (uint32_t row = 0; row < DIGEST_ROW_COUNT; row++) {
        /* A step of any other form reads all. */
        for (int kind = 0; kind < 2; kind++) {
            const uint32_t type = kind ? COX_FORWARD_MIXED : COX_FORWARD_DECODE;
            const int turn = kind ? 1 : (DIGEST_ROW_COUNT + 3) / COX_STEP_DIGEST_ROW_COUNT;
            const int blocks = kind ? 1 : 2 * DIGEST_ROW_COUNT * DIGEST_BLOCK_COUNT;
            assert_int_equal(digest_differs(BENT_POSITION, row, COX_DIGEST_POSITIONS, type, 1), 1);
            assert_int_equal(digest_differs(BENT_TOKEN, row, COX_DIGEST_TOKENS, type, 1), 1);
            assert_in_range(digest_differs(BENT_ID, row, COX_DIGEST_SEQUENCES, type, turn), 1,
                            turn);
            assert_in_range(digest_differs(BENT_LAST_BLOCK, row, COX_DIGEST_BLOCKS, type, turn), 1,
                            turn);
            assert_in_range(digest_differs(BENT_FIRST_BLOCK, row, COX_DIGEST_BLOCKS, type, blocks),
                            1, blocks);
            assert_int_equal(digest_differs(BENT_NOTHING, row, COX_DIGEST_TOKENS, type, 2), 0);
        }
    }
}

/* What a replaced rank, or one that has failed a step, has in common with the others: nothing,
 * until a step builds on none. */
TEST(s2_a_chain_begins_anew_with_base_0)
{
    uint64_t chain[COX_STEP_CHAIN_SIZE], other[COX_STEP_CHAIN_SIZE];
    digest_announce(0);
    advance(digest_step(COX_FORWARD_DECODE), 60);
    chain_get(chain);
    assert_true(chain[0] == 1);
    /* A step that fails leaves it alone, and so does one without rows. */
    assert_int_equal(apply(digest_step(COX_FORWARD_DECODE)), 0);
    cox_table_revert(f.table);
    chain_get(other);
    assert_memory_equal(chain, other, sizeof chain);
    advance(packed(COX_FORWARD_DUMMY), 0);
    chain_get(other);
    assert_memory_equal(chain, other, sizeof chain);
    digest_announce(0);
    chain_get(chain);
    assert_true(chain[0] == f.sequence);
    /* A new process, whose first step this is. */
    const uint64_t sequence = f.sequence;
    f.table = cox_table_free(f.table);
    table_start(MODEL_SLOT_MAX, MODEL_TOKEN_MAX);
    f.sequence = sequence - 1;
    digest_announce(0);
    chain_get(other);
    assert_memory_equal(chain, other, sizeof chain);
    /* The nested form builds on no step that it names, and is compared step by step; slots are each
     * rank's own. */
    for (uint32_t slot = 0; slot < 2; slot++) {
        f.table = cox_table_free(f.table);
        table_start(MODEL_SLOT_MAX, MODEL_TOKEN_MAX);
        if (slot) {
            Request *before = request_new(COX_FORWARD_PREFILL);
            Metadata *metadata = nested_add(before, "other", 1, true);
            metadata->prompt_token_ids = nested_bytes(numbers, 2);
            nested_table(metadata, numbers, 1);
            advance(before, 1);
        }
        f.sequence = 9;
        Request *request = request_new(COX_FORWARD_PREFILL);
        Metadata *metadata = nested_add(request, "this", 2, true);
        metadata->prompt_token_ids = nested_bytes(numbers, 4);
        nested_table(metadata, numbers, 3);
        advance(request, 5);
        chain_get(slot ? other : chain);
    }
    assert_true(chain[0] == 10);
    assert_memory_equal(chain, other, sizeof chain);
}

TEST(s2_tokens_count_where_the_rank_samples)
{
    uint64_t chain[COX_STEP_CHAIN_SIZE];
    Request *request = packed_new(COX_FORWARD_PREFILL, 0);
    packed_table(packed_announce(request, 0, 100, numbers, 5), numbers, 2);
    packed_row(request, 0, 0, 3);
    packed_silent(request, 0);
    advance(request, 50);
    chain_get(chain);
    assert_true(chain[1 + COX_DIGEST_TOKENS] == 0 && chain[1 + COX_DIGEST_POSITIONS] != 0);
    request = packed(COX_FORWARD_PREFILL);
    packed_row(request, 0, 3, 2);
    advance(request, 50);
    chain_get(chain);
    assert_true(chain[1 + COX_DIGEST_TOKENS] != 0);
    /* One that the caller has set stands in for the table's, for this step; 0 is none. */
    for (uint32_t which = 0; which < COX_DIGEST_COUNT; which++) {
        uint64_t after[3][COX_STEP_CHAIN_SIZE];
        for (uint64_t value = 0; value < 3; value++) {
            f.table = cox_table_free(f.table);
            table_start(MODEL_SLOT_MAX, MODEL_TOKEN_MAX);
            digest_announce(0);
            assert_int_equal(apply(digest_step(COX_FORWARD_DECODE)), 0);
            cox_table_set_digest(f.table, (enum cox_digest)which, value);
            for (uint32_t i = 0; i < DIGEST_ROW_COUNT; i++)
                f.outputs[i].token = 7;
            cox_table_commit(f.table);
            chain_get(after[value]);
        }
        for (uint32_t i = 0; i < COX_STEP_CHAIN_SIZE; i++)
            assert_true((after[1][i] == after[2][i]) == (i != 1 + which));
        assert_true(after[0][1 + which] == 0);
    }
}
