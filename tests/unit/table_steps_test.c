/* table_steps: steps of the packed form become batches, and a table moves only when a step
 * succeeded. */
#include "proto/wire.h"
#include "table_fixture.h"
#include "table_model.h"

#include <math.h>

/* ---- the packed form ---- */

TEST(s1_a_sequence_is_announced_once_and_then_known)
{
    assert_true(cox_table_base(f.table) == 0);
    Request *request = packed(COX_FORWARD_PREFILL);
    StepSequence *announced = packed_announce(request, 2, 77, numbers, 4);
    packed_table(announced, (int32_t[]){5, 6}, 2);
    SamplingParams sampling = COXSWAIN__SAMPLING_PARAMS__INIT;
    sampling.has_temperature = true;
    sampling.temperature = 0.5f;
    sampling.has_seed = true;
    sampling.seed = 9;
    announced->sampling = &sampling;
    packed_row(request, 2, 0, 4);
    assert_int_equal(apply(request), 0);

    assert_true(f.batch->sequence == 1);
    assert_int_equal(f.batch->row_count, 1);
    assert_int_equal(f.batch->table_count, 1);
    assert_int_equal(f.batch->finished_count, 0);
    const struct cox_batch_row *row = &f.batch->rows[0];
    assert_true(row->id == 77 && row->slot == 2 && row->position == 0 && row->token_count == 4);
    assert_true(row->emit);
    assert_memory_equal(row->tokens, numbers, 4 * sizeof(int32_t));
    assert_int_equal(row->tables[0].count, 2);
    assert_int_equal(row->tables[0].blocks[1], 6);
    assert_true(row->sampling->temperature == 0.5f && row->sampling->seed == 9);
    f.outputs[0].token = 31;
    cox_table_commit(f.table);
    assert_true(cox_table_base(f.table) == 1);
    assert_int_equal(f.table->store.live_count, 1);

    /* Decode: slot and position are enough. */
    request = packed(COX_FORWARD_DECODE);
    packed_append(request, 2, 12, 0);
    packed_row(request, 2, 4, 1);
    request->step->n_row_token_count = 0;
    request->step->n_append_table = 0;
    assert_int_equal(apply(request), 0);
    row = &f.batch->rows[0];
    assert_true(row->position == 4 && row->token_count == 1 && row->emit);
    assert_int_equal(row->tokens[4], 31);
    assert_int_equal(row->tables[0].count, 3);
    assert_int_equal(row->tables[0].blocks[2], 12);
    f.outputs[0].token = 32;
    cox_table_commit(f.table);
    check_tokens(2, (int32_t[]){10, 11, 12, 13, 31, 32}, 6);
}

TEST(s1_a_delta_on_another_base_changes_nothing)
{
    Request *request = packed_new(COX_FORWARD_DECODE, 1);
    refuse(request, COX_STALE);
    two_sequences();
    for (uint64_t base = 1; base < 6; base++) {
        if (base == cox_table_base(f.table))
            continue;
        request = packed_new(COX_FORWARD_DECODE, base);
        packed_finish(request, 0);
        packed_append(request, 3, 44, 0);
        packed_token(request, 3, 1);
        packed_row(request, 3, 3, 1);
        refuse(request, COX_STALE);
    }
    /* A reverted step is no base either. */
    assert_int_equal(apply(packed(COX_FORWARD_DECODE)), 0);
    cox_table_revert(f.table);
    refuse(packed_new(COX_FORWARD_DECODE, f.sequence), COX_STALE);
}

TEST(s1_ids_that_change_slots_revert)
{
    two_sequences();
    size_t size = table_dump(f.table, dump_before, sizeof dump_before);
    /* Both ways round, so that one of them undoes into an id that is still taken. */
    for (int turn = 0; turn < 2; turn++) {
        Request *request = packed(COX_FORWARD_PREFILL);
        packed_finish(request, turn ? 3 : 0);
        packed_finish(request, turn ? 0 : 3);
        packed_announce(request, 3, 100, numbers, 1);
        packed_announce(request, 0, 101, numbers, 1);
        assert_int_equal(apply(request), 0);
        cox_table_revert(f.table);
        assert_int_equal(table_dump(f.table, dump_after, sizeof dump_after), size);
        assert_memory_equal(dump_before, dump_after, size);
        table_check_invariants(f.table);
    }
}

TEST(s1_sampling_parameters)
{
    SamplingParams params = COXSWAIN__SAMPLING_PARAMS__INIT;
    struct {
        float temperature, top_p, repetition_penalty;
        int32_t top_k, seed;
        struct cox_sampling expected;
    } cases[] = {
        {0.7f, 0.9f, 1.2f, 40, 5, {0.7f, 0.9f, 40, 1.2f, 5}},
        {0, 1, 1, 0, 0, {0, 1, 0, 1, 0}},
        {-1, -1, -1, -1, -1, {0, 1, 0, 1, UINT32_MAX}},
        {NAN, NAN, NAN, INT32_MIN, 1, {0, 1, 0, 1, 1}},
        {INFINITY, INFINITY, INFINITY, INT32_MAX, 1, {0, 1, INT32_MAX, 1, 1}},
    };
    for (size_t i = 0; i < 2 + LENGTH(cases); i++) {
        struct cox_sampling expected = {0, 1, 0, 1, 0};
        if (i < LENGTH(cases)) {
            params.has_temperature = params.has_top_p = params.has_repetition_penalty = true;
            params.has_top_k = params.has_seed = true;
            params.temperature = cases[i].temperature;
            params.top_p = cases[i].top_p;
            params.repetition_penalty = cases[i].repetition_penalty;
            params.top_k = cases[i].top_k;
            params.seed = cases[i].seed;
            expected = cases[i].expected;
        } else {
            coxswain__sampling_params__init(&params); /* all absent */
        }
        Request *request = packed_new(COX_FORWARD_PREFILL, 0);
        StepSequence *announced = packed_announce(request, 0, 1, numbers, 1);
        announced->sampling = i == LENGTH(cases) + 1 ? NULL : &params;
        packed_table(announced, numbers, 1);
        packed_row(request, 0, 0, 1);
        assert_int_equal(apply(request), 0);
        const struct cox_sampling *is = f.batch->rows[0].sampling;
        assert_true(is->temperature == expected.temperature);
        assert_true(is->top_p == expected.top_p);
        assert_true(is->top_k == expected.top_k);
        assert_true(is->repetition_penalty == expected.repetition_penalty);
        assert_true(is->seed == expected.seed);
        cox_table_commit(f.table);
    }
}

/* A step over two_sequences that is fine, and one thing wrong with it. */
static void break_packed(Request *request, int what)
{
    Step *step = request->step;
    // clang-format off
    switch (what) {
    case 0: step->n_append_slot--; break;
    case 1: step->n_append_block--; break;
    case 2: step->n_append_table--; break;
    case 3: step->n_token--; break;
    case 4: step->n_token_slot--; break;
    case 5: step->n_row_slot--; break;
    case 6: step->n_row_position--; break;
    case 7: step->n_row_token_count--; break;
    case 8: step->has_table_count = true; step->table_count = 0; break;
    case 9: step->finished[0] = 1; break;
    case 10: step->finished[0] = MODEL_SLOT_MAX; break;
    case 11: step->finished[0] = UINT32_MAX; break;
    case 12: packed_finish(request, step->finished[0]); break;
    case 13: step->announced[0]->slot = 0; break;
    case 14: step->announced[0]->seq_id = 100; break;
    case 15: step->announced[0]->n_tokens = 0; break;
    case 16: step->announced[0]->tokens[1] = -1; break;
    case 17: step->announced[0]->tables[0]->blocks[0] = -5; break;
    case 18: packed_table(step->announced[0], numbers, 1); break;
    case 19: step->append_slot[0] = 6; break;
    case 20: step->append_slot[0] = MODEL_SLOT_MAX; break;
    case 21: step->append_slot[0] = UINT32_MAX; break;
    case 22: step->append_block[0] = INT32_MIN; break;
    case 23: step->append_table[0] = 1; break;
    case 24: step->append_table[0] = UINT32_MAX; break;
    case 25: step->token_slot[0] = 6; break;
    case 26: step->token_slot[0] = UINT32_MAX; break;
    case 27: step->token[0] = -1; break;
    case 28: step->row_slot[0] = 6; break;
    case 29: step->row_slot[0] = UINT32_MAX; break;
    case 30: step->row_slot[0] = step->row_slot[1]; break;
    case 31: step->row_position[0] = 8; break;
    case 32: step->row_position[0] = UINT32_MAX; break;
    case 33: step->row_token_count[0] = 0; break;
    case 34: step->row_token_count[0] = 4; break;
    case 35: step->row_token_count[0] = UINT32_MAX; break;
    case 36: step->row_silent[0] = 2; break;
    case 37: step->row_silent[0] = UINT32_MAX; break;
    case 38: step->announced[0]->tables[0]->n_blocks = 0; break;
    case 39: step->announced[0]->n_tables = 0; break;
    case 40: request->forward_type = (Coxswain__ForwardType)6; break;
    case 41: request->forward_type = (Coxswain__ForwardType)-1; break;
    case 42: request->forward_type = (Coxswain__ForwardType)COX_FORWARD_DUMMY; break;
    case 43: request_swap_in(request, -1, 0); break;
    case 44: request_swap_out(request, 0, -1); break;
    case 45: request_copy(request, INT32_MIN, 0); break;
    case 46: nested_add(request, "r", 1, true); break;
    case 47: step->announced[0] = packed_announce(request, 1, 300, numbers, 1); break;
    default: fail();
    }
    // clang-format on
}

static Request *packed_sound(void)
{
    Request *request = packed(COX_FORWARD_MIXED);
    packed_finish(request, 3);
    packed_table(packed_announce(request, 1, 300, numbers, 3), (int32_t[]){1}, 1);
    packed_append(request, 0, 30, 0);
    packed_append(request, 0, 31, 0);
    packed_token(request, 0, 40);
    packed_token(request, 0, 41);
    packed_row(request, 0, 5, 2);
    packed_row(request, 1, 0, 2);
    packed_silent(request, 1);
    return request;
}

TEST(s1_every_malformed_column_is_refused)
{
    two_sequences();
    for (int what = 0; what <= 47; what++) {
        Request *request = packed_sound();
        break_packed(request, what);
        print_message("%d: ", what);
        refuse(request, COX_CORRUPT);
        print_message("%s\n", f.err.text);
    }
    advance(packed_sound(), 1);
}

TEST(s1_a_table_longer_than_the_limits_is_refused)
{
    int32_t many[MODEL_TOKEN_MAX + 1];
    for (size_t i = 0; i < LENGTH(many); i++)
        many[i] = (int32_t)i;

    Request *request = packed(COX_FORWARD_PREFILL);
    packed_announce(request, 0, 1, many, MODEL_TOKEN_MAX + 1);
    refuse(request, COX_TOO_LARGE);
    request = packed(COX_FORWARD_PREFILL);
    packed_announce(request, MODEL_SLOT_MAX, 1, many, 1);
    refuse(request, COX_TOO_LARGE);
    request = packed(COX_FORWARD_PREFILL);
    packed_announce(request, UINT32_MAX, 1, many, 1);
    refuse(request, COX_TOO_LARGE);
    request = packed(COX_FORWARD_PREFILL);
    packed_table(packed_announce(request, 0, 1, many, 1), many, MODEL_TOKEN_MAX + 1);
    refuse(request, COX_TOO_LARGE);
    request = packed(COX_FORWARD_PREFILL);
    request->step->has_table_count = true;
    request->step->table_count = 5;
    refuse(request, COX_TOO_LARGE);

    /* Exactly at the limit: computed, but nothing follows. */
    for (int emit = 0; emit < 2; emit++) {
        request = packed_new(COX_FORWARD_PREFILL, 0);
        packed_table(packed_announce(request, 0, 1, many, MODEL_TOKEN_MAX), many, MODEL_TOKEN_MAX);
        uint32_t row = packed_row(request, 0, 0, MODEL_TOKEN_MAX);
        if (emit) {
            refuse(request, COX_TOO_LARGE);
        } else {
            packed_silent(request, row);
            advance(request, 1);
        }
    }
    request = packed(COX_FORWARD_DECODE);
    packed_token(request, 0, 1);
    refuse(request, COX_TOO_LARGE);
    request = packed(COX_FORWARD_DECODE);
    packed_append(request, 0, 1, 0);
    refuse(request, COX_TOO_LARGE);
    request = packed(COX_FORWARD_DECODE); /* recomputes all but the last: the sample is not kept */
    packed_row(request, 0, 0, MODEL_TOKEN_MAX - 1);
    advance(request, 1);

    /* One below the limit: the last token fits. */
    request = packed_new(COX_FORWARD_PREFILL, 0);
    packed_table(packed_announce(request, 0, 1, many, MODEL_TOKEN_MAX - 1), many, 1);
    packed_row(request, 0, 0, MODEL_TOKEN_MAX - 1);
    advance(request, 1);
    assert_int_equal(cox_sequence_store_get(&f.table->store, 0)->tokens.count, MODEL_TOKEN_MAX);
}

TEST(s1_cleanup_drops_by_id)
{
    two_sequences();
    uint64_t base = cox_table_base(f.table);
    const uint32_t *slots;
    uint32_t count;
    int64_t ids[] = {5, 101, 101, -1, INT64_MAX};
    cox_table_cleanup(f.table, ids, LENGTH(ids), &slots, &count);
    assert_int_equal(count, 1);
    assert_int_equal(slots[0], 3);
    assert_true(cox_table_base(f.table) == base);
    assert_int_equal(f.table->store.live_count, 1);
    table_check_invariants(f.table);
    Request *request = packed(COX_FORWARD_DECODE);
    packed_row(request, 3, 3, 1);
    refuse(request, COX_CORRUPT);
    request = packed(COX_FORWARD_DECODE);
    packed_row(request, 0, 5, 1);
    advance(request, 1);
    cox_table_cleanup(f.table, NULL, 0, &slots, &count);
    assert_int_equal(count, 0);
}

TEST(s1_clear_drops_everything)
{
    two_sequences();
    cox_table_clear(f.table);
    table_check_invariants(f.table);
    assert_int_equal(f.table->store.live_count, 0);
    assert_true(cox_table_base(f.table) == 0);
    refuse(packed_new(COX_FORWARD_DECODE, 1), COX_STALE);
    two_sequences();
}

TEST(s1_limits_outside_reason_are_refused)
{
    struct cox_table *table = NULL;
    assert_int_equal(cox_table_new(0, 10, &table), COX_INVALID);
    assert_int_equal(cox_table_new(10, 0, &table), COX_INVALID);
    assert_int_equal(cox_table_new(UINT32_MAX, 10, &table), COX_INVALID);
    assert_int_equal(cox_table_new(10, UINT32_MAX, &table), COX_INVALID);
    assert_null(table);
    assert_null(cox_table_free(NULL));
}

TEST(s1_a_step_given_up_is_seen)
{
    assert_int_equal(apply(packed_new(COX_FORWARD_DUMMY, 0)), 0);
    assert_false(cox_batch_cancelled(f.batch)); /* nothing to watch */
    cox_table_commit(f.table);

    _Atomic uint64_t void_through = 1;
    cox_table_watch(f.table, &void_through, NULL);
    assert_int_equal(apply(packed_new(COX_FORWARD_DUMMY, 0)), 0);
    assert_true(f.batch->sequence == 2);
    assert_false(cox_batch_cancelled(f.batch));
    atomic_store(&void_through, 2);
    assert_true(cox_batch_cancelled(f.batch));
    atomic_store(&void_through, 9);
    assert_true(cox_batch_cancelled(f.batch));
    cox_table_revert(f.table);
}

/* ---- what a step carries besides rows ---- */

TEST(m8_a_dummy_step_is_empty_and_moves_the_base)
{
    two_sequences();
    for (int nested = 0; nested < 2; nested++) {
        assert_int_equal(apply(nested ? request_new(COX_FORWARD_DUMMY) : packed(COX_FORWARD_DUMMY)),
                         0);
        assert_int_equal(f.batch->forward_type, COX_FORWARD_DUMMY);
        assert_int_equal(f.batch->row_count, 0);
        assert_int_equal(f.batch->finished_count, 0);
        cox_table_commit(f.table);
        assert_true(cox_table_base(f.table) == f.sequence);
    }
    assert_int_equal(f.table->store.live_count, 2);
    Request *request = request_new(COX_FORWARD_DUMMY);
    nested_add(request, NULL, 100, false);
    refuse(request, COX_CORRUPT);
}
