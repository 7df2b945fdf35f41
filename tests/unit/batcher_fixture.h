/*
 * batcher_fixture: a batcher of small defaults, and what its steps and sequences are expected to
 * be.
 *
 * Ownership: batchers and sequences are the test's (test_own). Nothing blocks.
 */
#ifndef COX_TESTS_UNIT_BATCHER_FIXTURE_H
#define COX_TESTS_UNIT_BATCHER_FIXTURE_H

#include "engine/batching/batcher.h"
#include "tests/lib/test.h"

TEST_OWNED(cox_batcher_free)
TEST_OWNED(cox_sequence_free)

/* What the options leave at 0 is small. */
static inline struct cox_batcher *batcher_new(struct cox_batcher_options options)
{
    struct cox_batcher *batcher = NULL;
    uint32_t *const numbers[] = {&options.sequence_count_max, &options.token_count_max,
                                 &options.block_count, &options.block_size,
                                 &options.position_count_max};
    const uint32_t defaults[] = {4, 16, 16, 4, 64};
    for (size_t i = 0; i < sizeof defaults / sizeof defaults[0]; i++)
        if (*numbers[i] == 0)
            *numbers[i] = defaults[i];
    assert_ok(cox_batcher_new(&options, &batcher, test_err()));
    return test_own(batcher, cox_batcher_free_owned);
}

/* batcher_with(.block_count = 6) */
#define batcher_with(...) batcher_new((struct cox_batcher_options){__VA_ARGS__})

/* A test over a batcher of these options. */
#define BATCHER_TEST_WITH(name, ...)                                                               \
    static void name##_in(struct cox_batcher *batcher);                                            \
    PLAIN_TEST(name)                                                                               \
    {                                                                                              \
        name##_in(batcher_with(__VA_ARGS__));                                                      \
    }                                                                                              \
    static void name##_in(__attribute__((unused)) struct cox_batcher *batcher)

static inline void expect_row(const struct cox_step *step, uint32_t index, int64_t id,
                              uint32_t position, uint32_t count, bool announce, bool emit)
{
    const struct cox_step_row *row = &step->rows[index];
    assert_true(index < step->row_count);
    assert_int_equal(row->sequence->id, id);
    assert_int_equal(row->position, position);
    assert_int_equal(row->count, count);
    assert_int_equal(row->announce, announce);
    assert_int_equal(row->emit, emit);
}

static inline void expect_nothing(struct cox_batcher *batcher, int code)
{
    const struct cox_step *step;
    assert_int_equal(cox_batcher_next(batcher, &step), code);
}

/* The next one that is done. */
static inline struct cox_sequence *done_of(struct cox_batcher *batcher)
{
    struct cox_sequence *done = cox_batcher_done(batcher);
    assert_non_null(done);
    return test_own(done, cox_sequence_free_owned);
}

/* Of the last unreported_count. */
static const int64_t *unreported_ids;

static inline size_t unreported_count(struct cox_batcher *batcher)
{
    return cox_batcher_unreported(batcher, &unreported_ids);
}

#endif
