/* table_memory: what a table allocates, and what is left of a step without memory. */
#include "proto/wire.h"
#include "table_fixture.h"
#include "table_model.h"
#include "tests/lib/allocations.h"

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

TEST(s1_a_steady_load_allocates_nothing)
{
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

TEST(s1_many_sequences_are_found_by_id)
{
    table_teardown(NULL);
    table_start(4096, 64);
    for (int turn = 0; turn < 3; turn++) {
        request_reset();
        Request *request = steady_announce(4096);
        advance(request, 1);
        assert_int_equal(f.table->store.live_count, 4096);
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
        assert_int_equal(f.table->store.live_count, 96);
        table_check_invariants(f.table);
    }
}

TEST(s1_without_memory_nothing_changes)
{
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
