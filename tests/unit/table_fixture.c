#include "table_fixture.h"

#include "proto/wire.h"
#include "table_model.h"

/* ---- a table under test ---- */

const int32_t numbers[] = {10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25};

struct fixture f;

unsigned char dump_before[1 << 20];
unsigned char dump_after[1 << 20];

void table_start(uint32_t sequence_count_max, uint32_t token_count_max)
{
    request_reset();
    f = (struct fixture){0};
    assert_int_equal(cox_table_new(sequence_count_max, token_count_max, &f.table), 0);
}

int table_setup(void **state)
{
    (void)state;
    table_start(MODEL_SLOT_MAX, MODEL_TOKEN_MAX);
    return 0;
}

int table_teardown(void **state)
{
    (void)state;
    f.table = cox_table_free(f.table);
    return 0;
}

int apply(const Request *request)
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

void advance(const Request *request, int32_t first_token)
{
    if (apply(request) != 0)
        fail_msg("%s", f.err.text);
    for (uint32_t i = 0; i < f.batch->row_count; i++)
        f.outputs[i].token = f.batch->rows[i].emit ? first_token + (int32_t)i : -1;
    cox_table_commit(f.table);
    table_check_invariants(f.table);
}

void refuse(const Request *request, int status)
{
    size_t size = table_dump(f.table, dump_before, sizeof dump_before);
    int r = apply(request);
    if (r != status)
        fail_msg("%d instead of %d: %s", r, status, f.err.text);
    assert_int_equal(table_dump(f.table, dump_after, sizeof dump_after), size);
    assert_memory_equal(dump_before, dump_after, size);
    table_check_invariants(f.table);
}

Request *packed(uint32_t forward_type)
{
    return packed_new(forward_type, cox_table_base(f.table));
}

void two_sequences(void)
{
    Request *request = packed(COX_FORWARD_PREFILL);
    packed_table(packed_announce(request, 0, 100, numbers, 5), (int32_t[]){7, 8}, 2);
    packed_table(packed_announce(request, 3, 101, numbers + 8, 3), (int32_t[]){9}, 1);
    packed_row(request, 0, 0, 5);
    packed_row(request, 3, 0, 3);
    advance(request, 50);
}

void check_tokens(uint32_t slot, const int32_t *tokens, uint32_t count)
{
    const struct cox_stored_sequence *sequence = cox_sequence_store_get(&f.table->store, slot);
    assert_non_null(sequence);
    assert_int_equal(sequence->tokens.count, count);
    assert_memory_equal(sequence->tokens.items, tokens, count * sizeof *tokens);
}

/* ---- the nested form ---- */

Metadata *nested_prompt(Request *request, const char *request_id, int64_t id, size_t token_count,
                        size_t block_count)
{
    Metadata *m = nested_add(request, request_id, id, true);
    m->prompt_token_ids = nested_bytes(numbers, token_count);
    nested_table(m, numbers, block_count);
    return m;
}
