/*
 * table: steps of both forms become batches, and a table moves only when a step succeeded. The
 * property tests compare it with table_model, a naive reference, over thousands of random steps,
 * valid and broken.
 */
#include "channel/base/idioms.h"
#include "proto/wire.h"
#include "worker/sequences/table_private.h"
#include "table_model.h"
#include "table_request.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#define LENGTH(array) (sizeof(array) / sizeof(array)[0])

/* ---- allocations of the whole process ---- */

static size_t allocation_count;

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#elif defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#endif

#ifdef SANITIZED
/* gcc 12 ships the function without the declaration. */
int __sanitizer_install_malloc_and_free_hooks(void (*on_malloc)(const volatile void *, size_t),
                                              void (*on_free)(const volatile void *));

static void on_malloc(const volatile void *memory, size_t size)
{
    (void)memory;
    (void)size;
    allocation_count++;
}

static void on_free(const volatile void *memory)
{
    (void)memory;
}
#else
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *memory, size_t size);

/* Allocations that still succeed; SIZE_MAX: all. */
static size_t allocations_left = SIZE_MAX;

static bool allocation_refused(void)
{
    allocation_count++;
    if (allocations_left == SIZE_MAX)
        return false;
    if (allocations_left == 0)
        return true;
    allocations_left--;
    return false;
}

void *malloc(size_t size)
{
    return allocation_refused() ? NULL : __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    return allocation_refused() ? NULL : __libc_calloc(count, size);
}

void *realloc(void *memory, size_t size)
{
    return allocation_refused() ? NULL : __libc_realloc(memory, size);
}
#endif

/* ---- a table under test ---- */

static const int32_t numbers[] = {10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25};

struct fixture {
    struct cox_table *table;
    const struct cox_batch *batch;
    struct cox_batch_output *outputs;
    struct cox_error err;
    /* of the last step tried */
    uint64_t sequence;
};

static struct fixture f;

static unsigned char dump_before[1 << 20];
static unsigned char dump_after[1 << 20];

static void table_start(uint32_t sequence_count_max, uint32_t token_count_max)
{
    request_reset();
    f = (struct fixture){0};
    assert_int_equal(cox_table_new(sequence_count_max, token_count_max, &f.table), 0);
}

static int table_setup(void **state)
{
    (void)state;
    table_start(MODEL_SLOT_MAX, MODEL_TOKEN_MAX);
    return 0;
}

static int table_teardown(void **state)
{
    (void)state;
    f.table = cox_table_free(f.table);
    return 0;
}

static int apply(const Request *request)
{
    f.err = (struct cox_error){0};
    f.batch = NULL;
    f.outputs = NULL;
    int r = cox_table_apply(f.table, ++f.sequence, request, &f.batch, &f.outputs, &f.err);
    if (r) {
        assert_null(f.batch);
        assert_null(f.outputs);
        assert_int_equal(f.err.code, r);
        assert_true(f.err.text[0] != '\0');
    } else if (f.batch->row_count) {
        for (uint32_t i = 0; i < f.batch->row_count; i++)
            assert_int_equal(f.outputs[i].token, -1);
    }
    return r;
}

/* Applies and commits; row i emits first_token + i. */
static void advance(const Request *request, int32_t first_token)
{
    if (apply(request) != 0)
        fail_msg("%s", f.err.text);
    for (uint32_t i = 0; i < f.batch->row_count; i++)
        f.outputs[i].token = f.batch->rows[i].emit ? first_token + (int32_t)i : -1;
    cox_table_commit(f.table);
    table_check_invariants(f.table);
}

/* The step is refused with this status and leaves every byte alone. */
static void refuse(const Request *request, int status)
{
    size_t size = table_dump(f.table, dump_before, sizeof dump_before);
    int r = apply(request);
    if (r != status)
        fail_msg("%d instead of %d: %s", r, status, f.err.text);
    assert_int_equal(table_dump(f.table, dump_after, sizeof dump_after), size);
    assert_memory_equal(dump_before, dump_after, size);
    table_check_invariants(f.table);
}

static Request *packed(uint32_t forward_type)
{
    return packed_new(forward_type, cox_table_base(f.table));
}

/* Sequences 100 and 101 in slots 0 and 3: prompts of 5 and 3 tokens, blocks {7, 8} and {9},
 * computed. Known are 6 and 4 tokens then. */
static void two_sequences(void)
{
    Request *request = packed(COX_FORWARD_PREFILL);
    packed_table(packed_announce(request, 0, 100, numbers, 5), (int32_t[]){7, 8}, 2);
    packed_table(packed_announce(request, 3, 101, numbers + 8, 3), (int32_t[]){9}, 1);
    packed_row(request, 0, 0, 5);
    packed_row(request, 3, 0, 3);
    advance(request, 50);
}

static void check_tokens(uint32_t slot, const int32_t *tokens, uint32_t count)
{
    const struct cox_stored_sequence *sequence = cox_sequence_store_get(&f.table->store, slot);
    assert_non_null(sequence);
    assert_int_equal(sequence->tokens.count, count);
    assert_memory_equal(sequence->tokens.items, tokens, count * sizeof *tokens);
}

/* ---- the packed form ---- */

static void s1_a_sequence_is_announced_once_and_then_known(void **state)
{
    (void)state;
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
    assert_int_equal(cox_table_count(f.table), 1);

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

static void s1_a_delta_on_another_base_changes_nothing(void **state)
{
    (void)state;
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

static void s1_revert_puts_back_every_byte(void **state)
{
    (void)state;
    two_sequences();
    size_t size = table_dump(f.table, dump_before, sizeof dump_before);
    Request *request = packed(COX_FORWARD_MIXED);
    packed_finish(request, 0);
    packed_table(packed_announce(request, 0, 101000, numbers, 16), numbers, 16);
    packed_table(packed_announce(request, 1, 100, numbers, 2), numbers, 1);
    for (int32_t i = 0; i < 20; i++) {
        packed_append(request, 3, 60 + i, 0);
        packed_token(request, 3, 80 + i);
    }
    packed_row(request, 0, 0, 16);
    packed_row(request, 3, 3, 21);
    assert_int_equal(apply(request), 0);
    assert_int_equal(f.batch->finished_count, 1);
    assert_int_equal(f.batch->finished_slots[0], 0);
    cox_table_revert(f.table);
    assert_int_equal(table_dump(f.table, dump_after, sizeof dump_after), size);
    assert_memory_equal(dump_before, dump_after, size);
    table_check_invariants(f.table);
}

static void s1_ids_that_change_slots_revert(void **state)
{
    (void)state;
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

static void s1_base_0_empties_the_table(void **state)
{
    (void)state;
    two_sequences();
    size_t size = table_dump(f.table, dump_before, sizeof dump_before);
    for (int turn = 0; turn < 2; turn++) {
        Request *request = packed_new(COX_FORWARD_PREFILL, 0);
        packed_finish(request, 3); /* gone already, with all others */
        packed_table(packed_announce(request, 3, 101, numbers + 8, 4), (int32_t[]){4}, 1);
        packed_row(request, 3, 0, 4);
        assert_int_equal(apply(request), 0);
        assert_int_equal(f.batch->finished_count, 2);
        assert_int_equal(f.batch->finished_slots[0], 0);
        assert_int_equal(f.batch->finished_slots[1], 3);
        assert_int_equal(f.batch->rows[0].tables[0].blocks[0], 4);
        f.outputs[0].token = 5;
        if (turn == 0) {
            cox_table_revert(f.table);
            assert_int_equal(table_dump(f.table, dump_after, sizeof dump_after), size);
            assert_memory_equal(dump_before, dump_after, size);
        } else {
            cox_table_commit(f.table);
        }
        table_check_invariants(f.table);
    }
    assert_int_equal(cox_table_count(f.table), 1);
    assert_true(cox_table_base(f.table) == f.sequence);
    check_tokens(3, (int32_t[]){18, 19, 20, 21, 5}, 5);

    /* A broken reset leaves everything too. */
    Request *request = packed_new(COX_FORWARD_PREFILL, 0);
    packed_row(request, 3, 0, 1);
    refuse(request, COX_CORRUPT);
}

static void s1_chunks_stay_silent_until_the_last(void **state)
{
    (void)state;
    Request *request = packed(COX_FORWARD_PREFILL);
    packed_table(packed_announce(request, 1, 5, numbers, 10), numbers, 3);
    packed_silent(request, packed_row(request, 1, 0, 4));
    assert_int_equal(apply(request), 0);
    assert_false(f.batch->rows[0].emit);
    f.outputs[0].token = 99; /* not asked for, not taken */
    cox_table_commit(f.table);
    check_tokens(1, numbers, 10);

    /* Ends before the last known token: what follows is known, the sample is dropped. */
    request = packed(COX_FORWARD_EXTEND);
    packed_row(request, 1, 4, 3);
    advance(request, 88);
    check_tokens(1, numbers, 10);

    request = packed(COX_FORWARD_EXTEND);
    packed_row(request, 1, 7, 3);
    advance(request, 88);
    const struct cox_stored_sequence *sequence = cox_sequence_store_get(&f.table->store, 1);
    assert_int_equal(sequence->tokens.count, 11);
    assert_int_equal(sequence->tokens.items[10], 88);

    /* No token sampled: nothing to append. */
    request = packed(COX_FORWARD_DECODE);
    packed_row(request, 1, 10, 1);
    assert_int_equal(apply(request), 0);
    cox_table_commit(f.table);
    assert_int_equal(sequence->tokens.count, 11);
}

static void s1_forced_tokens_are_known_before_the_rows(void **state)
{
    (void)state;
    two_sequences();
    Request *request = packed(COX_FORWARD_EXTEND);
    packed_token(request, 0, 70);
    packed_token(request, 3, 80);
    packed_token(request, 0, 71);
    packed_row(request, 0, 5, 3);
    packed_row(request, 3, 4, 1);
    advance(request, 90);
    check_tokens(0, (int32_t[]){10, 11, 12, 13, 14, 50, 70, 71, 90}, 9);
    check_tokens(3, (int32_t[]){18, 19, 20, 51, 80, 91}, 6);
}

static void s1_finished_slots_are_announced_and_free(void **state)
{
    (void)state;
    two_sequences();
    Request *request = packed(COX_FORWARD_PREFILL);
    packed_finish(request, 3);
    packed_finish(request, 0);
    packed_table(packed_announce(request, 0, 101, numbers, 2), numbers, 1); /* slot and id again */
    packed_row(request, 0, 0, 2);
    assert_int_equal(apply(request), 0);
    assert_int_equal(f.batch->finished_count, 2);
    assert_int_equal(f.batch->finished_slots[0], 3);
    assert_int_equal(f.batch->finished_slots[1], 0);
    cox_table_commit(f.table);
    table_check_invariants(f.table);
    assert_int_equal(cox_table_count(f.table), 1);

    request = packed(COX_FORWARD_DECODE);
    packed_row(request, 3, 0, 1);
    refuse(request, COX_CORRUPT);
}

static void s1_sampling_parameters(void **state)
{
    (void)state;
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

static void s1_every_malformed_column_is_refused(void **state)
{
    (void)state;
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

static void s1_a_table_longer_than_the_limits_is_refused(void **state)
{
    (void)state;
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

static void s1_cleanup_drops_by_id(void **state)
{
    (void)state;
    two_sequences();
    uint64_t base = cox_table_base(f.table);
    const uint32_t *slots;
    uint32_t count;
    int64_t ids[] = {5, 101, 101, -1, INT64_MAX};
    cox_table_cleanup(f.table, ids, LENGTH(ids), &slots, &count);
    assert_int_equal(count, 1);
    assert_int_equal(slots[0], 3);
    assert_true(cox_table_base(f.table) == base);
    assert_int_equal(cox_table_count(f.table), 1);
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

static void s1_clear_drops_everything(void **state)
{
    (void)state;
    two_sequences();
    cox_table_clear(f.table);
    table_check_invariants(f.table);
    assert_int_equal(cox_table_count(f.table), 0);
    assert_true(cox_table_base(f.table) == 0);
    refuse(packed_new(COX_FORWARD_DECODE, 1), COX_STALE);
    two_sequences();
}

static void s1_limits_outside_reason_are_refused(void **state)
{
    (void)state;
    struct cox_table *table = NULL;
    assert_int_equal(cox_table_new(0, 10, &table), COX_INVALID);
    assert_int_equal(cox_table_new(10, 0, &table), COX_INVALID);
    assert_int_equal(cox_table_new(UINT32_MAX, 10, &table), COX_INVALID);
    assert_int_equal(cox_table_new(10, UINT32_MAX, &table), COX_INVALID);
    assert_null(table);
    assert_null(cox_table_free(NULL));
}

static void s1_a_step_given_up_is_seen(void **state)
{
    (void)state;
    assert_int_equal(apply(packed_new(COX_FORWARD_DUMMY, 0)), 0);
    assert_false(cox_batch_cancelled(f.batch)); /* nothing to watch */
    cox_table_commit(f.table);

    _Atomic uint64_t void_through = 1;
    cox_table_watch(f.table, &void_through);
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

static void m8_every_forward_type_arrives(void **state)
{
    (void)state;
    two_sequences();
    for (uint32_t type = COX_FORWARD_PREFILL; type <= COX_FORWARD_DUMMY; type++) {
        Request *request = packed(type);
        if (type != COX_FORWARD_DUMMY)
            packed_row(request, 0, 0, 1);
        assert_int_equal(apply(request), 0);
        assert_int_equal(f.batch->forward_type, type);
        assert_int_equal(f.batch->row_count, type != COX_FORWARD_DUMMY);
        cox_table_commit(f.table);

        request = request_new(type);
        if (type != COX_FORWARD_DUMMY)
            nested_add(request, NULL, 100, false);
        assert_int_equal(apply(request), 0);
        assert_int_equal(f.batch->forward_type, type);
        assert_int_equal(f.batch->row_count, type != COX_FORWARD_DUMMY);
        cox_table_commit(f.table);
    }
    /* Absent, as proto3 writers leave 0 out. */
    Request *request = request_new(COX_FORWARD_PREFILL);
    request->has_forward_type = false;
    assert_int_equal(apply(request), 0);
    assert_int_equal(f.batch->forward_type, COX_FORWARD_PREFILL);
    cox_table_commit(f.table);
}

static void m8_a_dummy_step_is_empty_and_moves_the_base(void **state)
{
    (void)state;
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
    assert_int_equal(cox_table_count(f.table), 2);
    Request *request = request_new(COX_FORWARD_DUMMY);
    nested_add(request, NULL, 100, false);
    refuse(request, COX_CORRUPT);
}

static void m8_swap_and_copy_lists_arrive_in_order(void **state)
{
    (void)state;
    for (int nested = 0; nested < 2; nested++) {
        Request *request = nested ? request_new(COX_FORWARD_DECODE) : packed(COX_FORWARD_DECODE);
        for (int32_t i = 0; i < 50; i++) {
            if (i < 30)
                request_swap_in(request, i, 100 + i);
            if (i < 40)
                request_swap_out(request, 200 + i, 300 + i);
            request_copy(request, 400 + i, INT32_MAX - i);
        }
        assert_int_equal(apply(request), 0);
        assert_int_equal(f.batch->swap_in_count, 30);
        assert_int_equal(f.batch->swap_out_count, 40);
        assert_int_equal(f.batch->copy_count, 50);
        for (int32_t i = 0; i < 50; i++) {
            if (i < 30)
                assert_true(f.batch->swap_in[i].from == i && f.batch->swap_in[i].to == 100 + i);
            if (i < 40)
                assert_true(f.batch->swap_out[i].from == 200 + i &&
                            f.batch->swap_out[i].to == 300 + i);
            assert_true(f.batch->copy[i].from == 400 + i && f.batch->copy[i].to == INT32_MAX - i);
        }
        cox_table_commit(f.table);
        /* They belong to one step. */
        assert_int_equal(apply(packed(COX_FORWARD_DECODE)), 0);
        assert_int_equal(f.batch->swap_in_count, 0);
        assert_int_equal(f.batch->swap_out_count, 0);
        assert_int_equal(f.batch->copy_count, 0);
        cox_table_commit(f.table);
    }
}

static void m8_several_block_tables(void **state)
{
    (void)state;
    Request *request = packed(COX_FORWARD_PREFILL);
    request->step->has_table_count = true;
    request->step->table_count = 4;
    StepSequence *a = packed_announce(request, 0, 1, numbers, 3);
    for (int32_t t = 0; t < 4; t++)
        packed_table(a, (int32_t[]){t, 10 + t}, t == 2 ? 0 : 2);
    packed_table(packed_announce(request, 1, 2, numbers, 3), (int32_t[]){77}, 1);
    packed_append(request, 0, 90, 3);
    packed_append(request, 1, 91, 2);
    packed_row(request, 1, 0, 3);
    packed_row(request, 0, 0, 3);
    assert_int_equal(apply(request), 0);
    assert_int_equal(f.batch->table_count, 4);
    const struct cox_block_table *tables = f.batch->rows[0].tables;
    assert_int_equal(tables[0].count, 1);
    assert_int_equal(tables[1].count, 0);
    assert_int_equal(tables[2].count, 1);
    assert_int_equal(tables[2].blocks[0], 91);
    tables = f.batch->rows[1].tables;
    assert_int_equal(tables[0].blocks[1], 10);
    assert_int_equal(tables[2].count, 0);
    assert_int_equal(tables[3].count, 3);
    assert_int_equal(tables[3].blocks[2], 90);
    cox_table_commit(f.table);

    request = packed(COX_FORWARD_DECODE);
    request->step->has_table_count = true;
    request->step->table_count = 2;
    packed_append(request, 0, 5, 2);
    refuse(request, COX_CORRUPT);

    /* Nested: as many as the row with the most; all are replaced. */
    request = request_new(COX_FORWARD_MIXED);
    Metadata *m = nested_add(request, NULL, 1, false);
    nested_table(m, (int32_t[]){5, 6, 7}, 3);
    nested_table(m, numbers, 0);
    nested_table(m, (int32_t[]){8}, 1);
    m = nested_add(request, "n", 3, true);
    m->prompt_token_ids = nested_bytes(numbers, 2);
    nested_table(m, (int32_t[]){9}, 1);
    assert_int_equal(apply(request), 0);
    assert_int_equal(f.batch->table_count, 3);
    tables = f.batch->rows[0].tables;
    assert_int_equal(tables[0].count, 3);
    assert_int_equal(tables[0].blocks[2], 7);
    assert_int_equal(tables[1].count, 0);
    assert_int_equal(tables[2].blocks[0], 8);
    assert_int_equal(f.batch->rows[1].tables[0].blocks[0], 9);
    assert_int_equal(f.batch->rows[1].tables[2].count, 0);
    assert_int_equal(f.batch->rows[1].slot, 2);
    cox_table_commit(f.table);
}

/* ---- the nested form ---- */

static Metadata *nested_prompt(Request *request, const char *request_id, int64_t id,
                               size_t token_count, size_t block_count)
{
    Metadata *m = nested_add(request, request_id, id, true);
    m->prompt_token_ids = nested_bytes(numbers, token_count);
    nested_table(m, numbers, block_count);
    return m;
}

static void s1_nested_prompts_take_the_lowest_free_slot(void **state)
{
    (void)state;
    Request *request = request_new(COX_FORWARD_PREFILL);
    for (int64_t id = 0; id < 4; id++) {
        char name[8];
        snprintf(name, sizeof name, "r%d", (int)id);
        nested_prompt(request, name, id, 3, 1);
    }
    advance(request, 60);
    assert_int_equal(cox_table_count(f.table), 4);
    check_tokens(2, (int32_t[]){10, 11, 12, 62}, 4);

    request = request_new(COX_FORWARD_MIXED);
    nested_finish(request, "r2");
    nested_finish(request, "r1");
    nested_finish(request, "unknown");
    nested_finish(request, "");
    nested_add(request, NULL, 3, false);
    nested_prompt(request, "r9", 9, 2, 1);
    assert_int_equal(apply(request), 0);
    assert_int_equal(f.batch->finished_count, 2);
    assert_int_equal(f.batch->finished_slots[0], 2);
    assert_int_equal(f.batch->finished_slots[1], 1);
    assert_true(f.batch->rows[0].slot == 3 && f.batch->rows[0].position == 3 &&
                f.batch->rows[0].token_count == 1 && f.batch->rows[0].emit);
    assert_int_equal(f.batch->rows[1].slot, 1);
    cox_table_commit(f.table);
    table_check_invariants(f.table);

    request = request_new(COX_FORWARD_DECODE);
    nested_add(request, NULL, 2, false);
    refuse(request, COX_STALE);
}

static void s1_nested_chunks_announce_again(void **state)
{
    (void)state;
    for (int32_t chunk = 0; chunk < 3; chunk++) {
        Request *request = request_new(COX_FORWARD_PREFILL);
        nested_split(nested_prompt(request, "r", 8, 9, (size_t)chunk + 1), 3 * chunk, 3 * chunk + 3,
                     chunk == 2);
        assert_int_equal(apply(request), 0);
        const struct cox_batch_row *row = &f.batch->rows[0];
        assert_true(row->position == (uint32_t)chunk * 3 && row->token_count == 3);
        assert_int_equal(row->emit, chunk == 2);
        assert_int_equal(row->tables[0].count, chunk + 1);
        assert_int_equal(f.batch->finished_count, 0);
        f.outputs[0].token = row->emit ? 44 : -1;
        cox_table_commit(f.table);
        table_check_invariants(f.table);
    }
    assert_int_equal(cox_table_count(f.table), 1);
    assert_int_equal(cox_sequence_store_get(&f.table->store, 0)->tokens.count, 10);
    assert_int_equal(cox_sequence_store_get(&f.table->store, 0)->tokens.items[9], 44);
}

static void s1_nested_tables_grow_shrink_and_change(void **state)
{
    (void)state;
    Request *request = request_new(COX_FORWARD_PREFILL);
    nested_prompt(request, "r", 8, 2, 3);
    advance(request, 1);
    static const struct {
        int32_t blocks[6];
        size_t count;
    } tables[] = {
        {{10, 11, 12, 13}, 4}, {{10, 11}, 2}, {{10, 99, 12, 13, 14}, 5}, {{10, 99}, 2}, {{1}, 1},
    };
    for (size_t i = 0; i < LENGTH(tables); i++) {
        size_t size = table_dump(f.table, dump_before, sizeof dump_before);
        for (int turn = 0; turn < 2; turn++) {
            request = request_new(COX_FORWARD_DECODE);
            Metadata *m = nested_add(request, NULL, 8, false);
            nested_table(m, tables[i].blocks, tables[i].count);
            assert_int_equal(apply(request), 0);
            assert_int_equal(f.batch->rows[0].tables[0].count, tables[i].count);
            assert_memory_equal(f.batch->rows[0].tables[0].blocks, tables[i].blocks,
                                tables[i].count * sizeof(int32_t));
            if (turn == 0) {
                cox_table_revert(f.table);
                assert_int_equal(table_dump(f.table, dump_after, sizeof dump_after), size);
                assert_memory_equal(dump_before, dump_after, size);
            } else {
                f.outputs[0].token = (int32_t)i;
                cox_table_commit(f.table);
            }
            table_check_invariants(f.table);
        }
    }
    /* Absent: they stay. */
    request = request_new(COX_FORWARD_DECODE);
    nested_add(request, NULL, 8, false);
    assert_int_equal(apply(request), 0);
    assert_int_equal(f.batch->rows[0].tables[0].count, 1);
    assert_int_equal(f.batch->rows[0].position, 7);
    cox_table_revert(f.table);
}

static void s1_nested_last_sampled_tokens_overrule_ours(void **state)
{
    (void)state;
    Request *request = request_new(COX_FORWARD_PREFILL);
    nested_prompt(request, "a", 1, 2, 1);
    nested_prompt(request, "b", 2, 2, 1);
    nested_prompt(request, "c", 3, 2, 1);
    nested_split(nested_prompt(request, "d", 4, 2, 1), 0, 1, false);
    advance(request, 70);
    size_t size = table_dump(f.table, dump_before, sizeof dump_before);
    for (int turn = 0; turn < 3; turn++) {
        request = request_new(COX_FORWARD_DECODE);
        nested_add(request, NULL, 4, false); /* has announced tokens only */
        nested_add(request, NULL, 2, false);
        nested_add(request, NULL, 1, false);
        nested_prompt(request, "e", 5, 1, 1);
        nested_add(request, NULL, 3, false);
        int32_t last[] = {600, 71, 601, -1, 9};
        request->last_sampled_token_ids = last;
        request->n_last_sampled_token_ids = turn == 1 ? 5 : 4;
        assert_int_equal(apply(request), 0);
        assert_int_equal(f.batch->rows[0].tokens[1], 11);
        assert_int_equal(f.batch->rows[1].tokens[2], 71);
        assert_int_equal(f.batch->rows[2].tokens[2], turn == 1 ? 70 : 601);
        assert_int_equal(f.batch->rows[4].tokens[2], 72);
        if (turn == 2)
            break;
        cox_table_revert(f.table);
        assert_int_equal(table_dump(f.table, dump_after, sizeof dump_after), size);
        assert_memory_equal(dump_before, dump_after, size);
    }
    cox_table_commit(f.table);
    check_tokens(0, (int32_t[]){10, 11, 601}, 3);
}

static void s1_nested_groups_of_several_sequences(void **state)
{
    (void)state;
    Request *request = request_new(COX_FORWARD_PREFILL);
    Metadata *m = nested_prompt(request, "pair", 0, 3, 2);
    m->seqids = nested_ids((int64_t[]){41, 42}, 2);
    m->has_do_sample = true;
    m->do_sample = false;
    SamplingParams sampling = COXSWAIN__SAMPLING_PARAMS__INIT;
    sampling.has_temperature = true;
    sampling.temperature = 2;
    m->sampling_params = &sampling;
    advance(request, 20);
    assert_int_equal(cox_table_count(f.table), 2);
    check_tokens(1, (int32_t[]){10, 11, 12, 21}, 4);
    request = request_new(COX_FORWARD_DECODE);
    m = nested_add(request, NULL, 0, false);
    m->seqids = nested_ids((int64_t[]){42, 41}, 2);
    assert_int_equal(apply(request), 0);
    assert_true(f.batch->rows[0].id == 42 && f.batch->rows[1].id == 41);
    assert_true(f.batch->rows[0].sampling->temperature == 0); /* do_sample was false */
    cox_table_commit(f.table);
    request = request_new(COX_FORWARD_DECODE);
    nested_finish(request, "pair");
    assert_int_equal(apply(request), 0);
    assert_int_equal(f.batch->finished_count, 2);
    cox_table_commit(f.table);
    assert_int_equal(cox_table_count(f.table), 0);
    table_check_invariants(f.table);

    /* One of a pair goes alone; its request must not be found in the empty slot. */
    for (uint32_t gone = 0; gone < 2; gone++) {
        request = request_new(COX_FORWARD_PREFILL);
        m = nested_prompt(request, "pair", 0, 3, 2);
        m->seqids = nested_ids((int64_t[]){41, 42}, 2);
        advance(request, 20);
        const uint32_t *slots;
        uint32_t count;
        cox_table_cleanup(f.table, (int64_t[]){41 + gone}, 1, &slots, &count);
        assert_int_equal(count, 1);
        table_check_invariants(f.table);
        request = request_new(COX_FORWARD_DECODE);
        nested_finish(request, "pair");
        advance(request, 20);
        assert_int_equal(cox_table_count(f.table), 0);
    }
}

/* ---- mixed steps: is_req_prefill marks the sequences that compute their prompt ---- */

static void nested_prefill(Metadata *m, const protobuf_c_boolean *prefill, size_t count)
{
    m->is_req_prefill = request_take(count * sizeof *prefill);
    memcpy(m->is_req_prefill, prefill, count * sizeof *prefill);
    m->n_is_req_prefill = count;
}

/* Tokens [from, from + count) of the numbers, with is_prompt false. */
static Metadata *nested_chunk(Request *request, int64_t id, size_t from, size_t count)
{
    Metadata *m = nested_add(request, "r", id, false);
    m->prompt_token_ids = nested_bytes(numbers + from, count);
    nested_table(m, numbers, 2);
    nested_prefill(m, (protobuf_c_boolean[]){true}, 1);
    return m;
}

static void check_row(uint32_t row, uint32_t position, uint32_t token_count, bool emit)
{
    const struct cox_batch_row *r = &f.batch->rows[row];
    assert_int_equal(r->position, position);
    assert_int_equal(r->token_count, token_count);
    assert_int_equal(r->emit, emit);
    for (uint32_t i = 0; i < position + token_count; i++)
        assert_int_equal(r->tokens[i], numbers[i]);
}

static void s1_nested_chunks_have_their_own_tokens_alone(void **state)
{
    (void)state;
    for (int how = 0; how < 4;
         how++) { /* 1: no split; 2: all tokens so far; 3: a step is cancelled */
        for (int32_t chunk = 0; chunk < 3; chunk++) {
            for (int turn = how == 3 ? 0 : 1; turn < 2; turn++) {
                Request *request = request_new(COX_FORWARD_MIXED);
                Metadata *m = nested_chunk(request, 8, how == 2 ? 0 : 3 * (size_t)chunk,
                                           how == 2 ? 3 * (size_t)chunk + 3 : 3);
                nested_split(m, 3 * chunk, 3 * chunk + 3, chunk == 2);
                if (how == 1)
                    m->n_split_start_pos = m->n_split_end_pos = 0;
                assert_int_equal(apply(request), 0);
                check_row(0, (uint32_t)chunk * 3, 3, chunk == 2);
                if (turn == 0) {
                    cox_table_revert(f.table);
                } else {
                    f.outputs[0].token = chunk == 2 ? 44 : -1;
                    cox_table_commit(f.table);
                }
                table_check_invariants(f.table);
            }
        }
        check_tokens(0, (int32_t[]){10, 11, 12, 13, 14, 15, 16, 17, 18, 44}, 10);
        Request *request = request_new(COX_FORWARD_DECODE);
        Metadata *m = nested_add(request, "r", 8, true); /* is_prompt says nothing */
        nested_prefill(m, (protobuf_c_boolean[]){false}, 1);
        assert_int_equal(apply(request), 0);
        assert_true(f.batch->rows[0].position == 9 && f.batch->rows[0].token_count == 1);
        cox_table_revert(f.table);
        request = request_new(COX_FORWARD_DECODE);
        nested_finish(request, "r");
        advance(request, 0);
    }
}

static void s1_nested_chunks_that_follow_nothing_are_refused(void **state)
{
    (void)state;
    Request *request = request_new(COX_FORWARD_MIXED);
    nested_split(nested_chunk(request, 8, 3, 3), 3, 6, false);
    refuse(request, COX_STALE); /* the tokens before are unknown */
    request = request_new(COX_FORWARD_MIXED);
    nested_split(nested_chunk(request, 8, 0, 3), 0, 3, false);
    advance(request, 0);
    request = request_new(COX_FORWARD_MIXED);
    nested_split(nested_chunk(request, 8, 6, 3), 6, 9, true);
    refuse(request, COX_STALE); /* one is missing */
    request = request_new(COX_FORWARD_MIXED);
    nested_split(nested_chunk(request, 8, 3, 2), 3, 6, true);
    refuse(request, COX_CORRUPT); /* neither the chunk nor all of it */
    request = request_new(COX_FORWARD_MIXED);
    nested_split(nested_chunk(request, 8, 3, 3), 3, 6, true);
    nested_split(nested_chunk(request, 8, 3, 3), 3, 6, true);
    refuse(request, COX_CORRUPT); /* two rows of one sequence */
    /* Said again, and from an earlier position: what the coordinator says last counts. */
    for (int32_t start = 3; start > 0; start -= 2) {
        request = request_new(COX_FORWARD_MIXED);
        nested_split(nested_chunk(request, 8, (size_t)start, 3), start, start + 3, false);
        assert_int_equal(apply(request), 0);
        check_row(0, (uint32_t)start, 3, false);
        cox_table_commit(f.table);
        table_check_invariants(f.table);
    }
    assert_int_equal(cox_sequence_store_get(&f.table->store, 0)->tokens.count, 4);
}

static void s1_nested_prefill_is_given_per_sequence(void **state)
{
    (void)state;
    Request *request = request_new(COX_FORWARD_PREFILL);
    nested_prompt(request, "a", 1, 2, 1);
    advance(request, 70);
    /* One group: a sequence that decodes and two that begin, with tokens of their own. */
    request = request_new(COX_FORWARD_MIXED);
    Metadata *m = nested_add(request, "g", 0, false);
    m->seqids = nested_ids((int64_t[]){2, 1, 3}, 3);
    nested_prefill(m, (protobuf_c_boolean[]){true, false, true}, 3);
    m->prompt_token_ids = nested_bytes((int32_t[]){10, 11, 12, 10, 11}, 5);
    m->has_prompt_lens = true;
    m->prompt_lens = nested_bytes((int32_t[]){3, 0, 2}, 3);
    nested_table(m, numbers, 1);
    m->is_req_last_chunk = request_take(3 * sizeof(protobuf_c_boolean));
    m->is_req_last_chunk[0] = m->is_req_last_chunk[1] = true; /* and the third is not */
    m->n_is_req_last_chunk = 3;
    request->last_sampled_token_ids = (int32_t[]){600}; /* of the one row that decodes */
    request->n_last_sampled_token_ids = 1;
    assert_int_equal(apply(request), 0);
    check_row(0, 0, 3, true);
    assert_true(f.batch->rows[1].position == 2 && f.batch->rows[1].token_count == 1);
    assert_int_equal(f.batch->rows[1].tokens[2], 600);
    check_row(2, 0, 2, false);
    cox_table_revert(f.table);
}

static void s1_nested_groups_have_128_sequences_at_most(void **state)
{
    (void)state;
    table_teardown(NULL);
    table_start(200, 64);
    int64_t ids[129];
    for (size_t i = 0; i < LENGTH(ids); i++)
        ids[i] = (int64_t)i;
    for (size_t count = 128; count <= 129; count++) {
        Request *request = request_new(COX_FORWARD_PREFILL);
        Metadata *m = nested_prompt(request, "many", 0, 3, 2);
        m->seqids = nested_ids(ids, count);
        if (count == 128)
            advance(request, 1);
        else
            refuse(request, COX_TOO_LARGE);
    }
}

static void s1_equal_hashes_are_distinguished(void **state)
{
    (void)state;
    /* Pairs with one hash each, found by search: ids and request ids. */
    static const int64_t ids[] = {85078, 177926};
    static const char *const names[] = {"da67e4", "edadf9"};
    for (int first = 0; first < 2; first++) {
        int second = !first;
        Request *request = request_new(COX_FORWARD_PREFILL);
        nested_prompt(request, names[first], ids[first], 2, 1);
        advance(request, 1);
        request = request_new(COX_FORWARD_DECODE);
        nested_finish(request, names[second]);
        nested_add(request, NULL, ids[second], false);
        refuse(request, COX_STALE);
        request = request_new(COX_FORWARD_DECODE);
        nested_finish(request, names[second]);
        nested_prompt(request, names[second], ids[second], 2, 1);
        advance(request, 1);
        assert_int_equal(cox_table_count(f.table), 2);
        request = request_new(COX_FORWARD_DECODE);
        nested_finish(request, names[second]);
        nested_add(request, NULL, ids[first], false);
        advance(request, 1);
        assert_int_equal(cox_table_count(f.table), 1);
        cox_table_clear(f.table);
    }
}

/* One more thing wrong with a nested request that is fine; returns the status. */
static int break_nested(Request *request, int what)
{
    Metadata *prompt = request->seq_group_metadata_list[0];
    Metadata *decode = request->seq_group_metadata_list[1];
    static const int32_t negative[] = {-1};
    static const int64_t huge[] = {INT64_C(1) << 32};
    char name[130] = "";
    // clang-format off
    switch (what) {
    case 0: prompt->seqids.len = 0; return COX_CORRUPT;
    case 1: prompt->seqids.len = 7; return COX_CORRUPT;
    case 2: prompt->prompt_token_ids.len = 0; return COX_CORRUPT;
    case 3: prompt->prompt_token_ids.len = 9; return COX_CORRUPT;
    case 4: prompt->prompt_token_ids = nested_bytes(negative, 1); return COX_CORRUPT;
    case 5: prompt->prompt_token_ids = nested_ids(huge, 1); return COX_CORRUPT;
    case 6: prompt->block_tables[0].len = 1; return COX_CORRUPT;
    case 7: prompt->block_tables[0] = nested_ids(huge, 1); return COX_CORRUPT;
    case 8: prompt->n_block_tables = 0; return COX_CORRUPT;
    case 9: prompt->n_split_start_pos = 0; return COX_CORRUPT;
    case 10: prompt->n_split_end_pos = 0; return COX_CORRUPT;
    case 11: prompt->split_start_pos[0] = -1; return COX_CORRUPT;
    case 12: prompt->split_end_pos[0] = 0; return COX_CORRUPT;
    case 13: prompt->split_end_pos[0] = 4; return COX_CORRUPT;
    case 14: prompt->split_end_pos[0] = INT32_MIN; return COX_CORRUPT;
    case 15: decode->seqids = prompt->seqids; return COX_CORRUPT;
    case 16: decode->block_tables[0].len = 15; return COX_CORRUPT;
    case 17: decode->block_tables[0] = nested_bytes(negative, 1); return COX_CORRUPT;
    case 18: decode->block_tables[0].len = 0; return COX_CORRUPT;
    case 19: decode->block_tables[0] = nested_ids(huge, 1); return COX_CORRUPT;
    case 20: decode->seqids = nested_ids(huge, 1); return COX_STALE;
    case 21: decode->seqids = nested_ids((int64_t[]){100, 100}, 2); return COX_CORRUPT;
    case 22:
        memset(name, 'x', 129);
        prompt->request_id = strcpy(request_take(130), name);
        return COX_TOO_LARGE;
    case 23:
        for (int i = 0; i < 4; i++)
            nested_table(prompt, numbers, 1);
        return COX_TOO_LARGE;
    case 24:
        for (int i = 0; i < 4; i++)
            nested_table(decode, numbers, 1);
        return COX_TOO_LARGE;
    case 25:
        prompt->prompt_token_ids = (ProtobufCBinaryData){
            .len = 8 * (MODEL_TOKEN_MAX + 1), .data = request_take(8 * (MODEL_TOKEN_MAX + 1))};
        return COX_TOO_LARGE;
    case 26:
        decode->block_tables[0] = (ProtobufCBinaryData){
            .len = 8 * (MODEL_TOKEN_MAX + 1), .data = request_take(8 * (MODEL_TOKEN_MAX + 1))};
        return COX_TOO_LARGE;
    case 27: request_copy(request, 1, -1); return COX_CORRUPT;
    case 29: prompt->split_start_pos[0] = INT32_MIN; return COX_CORRUPT;
    case 28: /* slots 0 and 3 live, 1 gets the prompt above */
        for (int64_t id = 500; id < 506; id++)
            nested_prompt(request, NULL, id, 1, 1);
        return COX_TOO_LARGE;
    default: fail();
    }
    // clang-format on
    return 0;
}

static void s1_every_malformed_nested_field_is_refused(void **state)
{
    (void)state;
    two_sequences();
    for (int what = -1; what <= 29; what++) {
        Request *request = request_new(COX_FORWARD_MIXED);
        nested_split(nested_prompt(request, "p", 400, 3, 2), 0, 3, true);
        Metadata *decode = nested_add(request, NULL, 100, false);
        nested_table(decode, (int32_t[]){7, 8, 30}, 3);
        if (what < 0) {
            assert_int_equal(apply(request), 0);
            cox_table_revert(f.table);
            continue;
        }
        int status = break_nested(request, what);
        print_message("%d: ", what);
        refuse(request, status);
        print_message("%s\n", f.err.text);
    }
}

/* ---- memory ---- */

#define STEADY_ROW_COUNT 256

static Request *steady_announce(uint32_t row_count)
{
    Request *request = packed_new(COX_FORWARD_PREFILL, 0);
    for (uint32_t slot = 0; slot < row_count; slot++) {
        StepSequence *sequence = packed_announce(request, slot, 1000 + slot, numbers, 8);
        packed_table(sequence, numbers, 2);
        packed_row(request, slot, 0, 8);
    }
    return request;
}

static void s1_a_steady_load_allocates_nothing(void **state)
{
    (void)state;
    table_teardown(NULL);
    table_start(512, 1024);
    size_t steady = 0;
    size_t warm = 0;
    for (int life = 0; life < 4; life++) {
        request_reset();
        if (life == 2)
            warm = allocation_count;
        Request *request = steady_announce(STEADY_ROW_COUNT);
        assert_int_equal(apply(request), 0);
        cox_table_revert(f.table);
        advance(request, 1);
        for (uint32_t position = 7; position < 40; position++) {
            request_reset();
            request = packed(COX_FORWARD_DECODE);
            for (uint32_t slot = 0; slot < STEADY_ROW_COUNT; slot++) {
                if (position % 4 == 0)
                    packed_append(request, slot, (int32_t)position, 0);
                packed_row(request, slot, position + 1, 1);
            }
            steady = allocation_count;
            assert_int_equal(apply(request), 0);
            cox_table_revert(f.table);
            advance(request, 2);
        }
        for (int step = 0; step < 20; step++) {
            request_reset();
            request = request_new(COX_FORWARD_DECODE);
            for (uint32_t slot = 0; slot < STEADY_ROW_COUNT; slot++)
                nested_table(nested_add(request, NULL, 1000 + slot, false), numbers, 12);
            assert_int_equal(apply(request), 0);
            cox_table_revert(f.table);
            advance(request, 2);
        }
        request = request_new(COX_FORWARD_DECODE);
        const uint32_t *slots;
        uint32_t count;
        cox_table_cleanup(f.table, (int64_t[]){1003, 1004}, 2, &slots, &count);
        assert_int_equal(count, 2);
    }
    assert_true(steady > 0);
    assert_int_equal(allocation_count, warm);
}

static void s1_many_sequences_are_found_by_id(void **state)
{
    (void)state;
    table_teardown(NULL);
    table_start(4096, 64);
    for (int turn = 0; turn < 3; turn++) {
        request_reset();
        Request *request = steady_announce(4096);
        advance(request, 1);
        assert_int_equal(cox_table_count(f.table), 4096);
        request_reset();
        request = request_new(COX_FORWARD_DECODE);
        for (int64_t slot = 0; slot < 4096; slot++)
            nested_add(request, NULL, 1000 + (slot * 11) % 4096, false);
        advance(request, 3);
        int64_t ids[4096];
        for (int64_t i = 0; i < 4096; i++)
            ids[i] = 1000 + (i * 7) % 4096;
        const uint32_t *slots;
        uint32_t count;
        cox_table_cleanup(f.table, ids, 4000, &slots, &count);
        assert_int_equal(count, 4000);
        assert_int_equal(slots[1], 7);
        assert_int_equal(cox_table_count(f.table), 96);
        table_check_invariants(f.table);
    }
}

static void s1_without_memory_nothing_changes(void **state)
{
    (void)state;
#ifdef SANITIZED
    skip();
#else
    struct cox_table *table = NULL;
    for (size_t left = 0; !table; left++) {
        allocations_left = left;
        int r = cox_table_new(64, 64, &table);
        allocations_left = SIZE_MAX;
        assert_true(r == (table ? 0 : -ENOMEM));
        assert_true(left < 50);
    }
    cox_table_free(table);

    for (int nested = 0; nested < 2; nested++) {
        table_teardown(NULL);
        table_setup(NULL); /* without spares of the turn before */
        two_sequences();
        Request *request =
            nested ? request_new(COX_FORWARD_MIXED) : packed_new(COX_FORWARD_MIXED, 0);
        request_copy(request, 1, 2);
        request_copy(request, 1, 2);
        if (nested) {
            nested_prompt(request, "x", 7, 16, 16);
            nested_table(nested_add(request, NULL, 100, false), numbers + 3, 9);
            nested_prompt(request, "y", 8, 16, 16);
        } else {
            for (uint32_t slot = 0; slot < 6; slot++) {
                packed_table(packed_announce(request, slot, slot, numbers, 16), numbers, 16);
                packed_row(request, slot, 0, 16);
            }
        }
        int refused = 0;
        for (size_t left = 0;; left++) {
            size_t size = table_dump(f.table, dump_before, sizeof dump_before);
            f.err = (struct cox_error){0};
            allocations_left = left;
            int r = cox_table_apply(f.table, ++f.sequence, request, &f.batch, &f.outputs, &f.err);
            allocations_left = SIZE_MAX;
            if (r == 0)
                break;
            assert_int_equal(r, -ENOMEM);
            assert_int_equal(f.err.code, -ENOMEM);
            assert_int_equal(table_dump(f.table, dump_after, sizeof dump_after), size);
            assert_memory_equal(dump_before, dump_after, size);
            table_check_invariants(f.table);
            refused++;
        }
        cox_table_revert(f.table);
        assert_true(refused > 0);
    }
#endif
}

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

static void s2_a_digest_says_what_differs(void **state)
{
    (void)state;
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
static void s2_a_chain_begins_anew_with_base_0(void **state)
{
    (void)state;
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

static void s2_tokens_count_where_the_rank_samples(void **state)
{
    (void)state;
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

int main(void)
{
#ifdef SANITIZED
    __sanitizer_install_malloc_and_free_hooks(on_malloc, on_free);
#endif
#define TEST(name) cmocka_unit_test_setup_teardown(name, table_setup, table_teardown)
    const struct CMUnitTest tests[] = {
        TEST(s2_a_digest_says_what_differs),
        TEST(s2_a_chain_begins_anew_with_base_0),
        TEST(s2_tokens_count_where_the_rank_samples),
        TEST(s1_a_sequence_is_announced_once_and_then_known),
        TEST(s1_a_delta_on_another_base_changes_nothing),
        TEST(s1_revert_puts_back_every_byte),
        TEST(s1_ids_that_change_slots_revert),
        TEST(s1_base_0_empties_the_table),
        TEST(s1_chunks_stay_silent_until_the_last),
        TEST(s1_forced_tokens_are_known_before_the_rows),
        TEST(s1_finished_slots_are_announced_and_free),
        TEST(s1_sampling_parameters),
        TEST(s1_every_malformed_column_is_refused),
        TEST(s1_a_table_longer_than_the_limits_is_refused),
        TEST(s1_cleanup_drops_by_id),
        TEST(s1_clear_drops_everything),
        TEST(s1_limits_outside_reason_are_refused),
        TEST(s1_a_step_given_up_is_seen),
        TEST(m8_every_forward_type_arrives),
        TEST(m8_a_dummy_step_is_empty_and_moves_the_base),
        TEST(m8_swap_and_copy_lists_arrive_in_order),
        TEST(m8_several_block_tables),
        TEST(s1_nested_prompts_take_the_lowest_free_slot),
        TEST(s1_nested_chunks_announce_again),
        TEST(s1_nested_tables_grow_shrink_and_change),
        TEST(s1_nested_last_sampled_tokens_overrule_ours),
        TEST(s1_nested_groups_of_several_sequences),
        TEST(s1_nested_chunks_have_their_own_tokens_alone),
        TEST(s1_nested_chunks_that_follow_nothing_are_refused),
        TEST(s1_nested_prefill_is_given_per_sequence),
        TEST(s1_nested_groups_have_128_sequences_at_most),
        TEST(s1_equal_hashes_are_distinguished),
        TEST(s1_every_malformed_nested_field_is_refused),
        TEST(s1_a_steady_load_allocates_nothing),
        TEST(s1_many_sequences_are_found_by_id),
        TEST(s1_without_memory_nothing_changes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
