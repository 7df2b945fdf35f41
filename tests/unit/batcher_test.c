/*
 * batcher: admission, chunks, growth, preemption and refusals, step by step and without any
 * process.
 */
#include "batcher_fixture.h"

#define BATCHER_TEST(name) BATCHER_TEST_WITH(name, 0)

static void add(struct cox_batcher *batcher, uint32_t token_count, uint32_t new_count_max)
{
    int32_t tokens[256];
    for (int i = 0; i < 256; i++)
        tokens[i] = i;
    struct cox_prompt_request request = {
        .tokens = tokens,
        .token_count = token_count,
        .new_count_max = new_count_max,
        .stop_tokens = {99},
        .stop_count = 1,
    };
    assert_int_equal(cox_batcher_add(batcher, &request), 0);
}

static const struct cox_step *next(struct cox_batcher *batcher)
{
    const struct cox_step *step = NULL;
    assert_int_equal(cox_batcher_next(batcher, &step), 0);
    return step;
}

/* Commits with the same token everywhere. */
static void commit(struct cox_batcher *batcher, uint64_t sequence, int32_t token)
{
    int32_t tokens[16];
    for (int i = 0; i < 16; i++)
        tokens[i] = token;
    cox_batcher_publish(batcher, sequence);
    assert_ok(cox_batcher_commit(batcher, tokens, NULL, NULL, test_err()));
}

PLAIN_TEST(blocks_are_taken_and_given)
{
    struct cox_blocks blocks;
    int32_t ids[3], more[2];
    assert_int_equal(cox_blocks_init(&blocks, 4), 0);
    assert_true(cox_blocks_take(&blocks, 3, ids));
    assert_int_equal(ids[0], 0);
    assert_int_equal(ids[2], 2);
    assert_false(cox_blocks_take(&blocks, 2, more));
    assert_int_equal(blocks.free_count, 1);
    cox_blocks_give(&blocks, ids, 1);
    assert_true(cox_blocks_take(&blocks, 2, more));
    assert_int_equal(more[0], 0);
    assert_int_equal(more[1], 3);
    cox_blocks_deinit(&blocks);
    cox_blocks_deinit(&blocks);
}

BATCHER_TEST(a_sequence_is_announced_once_and_decodes)
{
    add(batcher, 3, 3);
    const struct cox_step *step = next(batcher);
    assert_int_equal(step->base, 0);
    assert_int_equal(step->kind, COX_STEP_PREFILL);
    assert_int_equal(step->row_count, 1);
    expect_row(step, 0, 1, 0, 3, true, true);
    assert_int_equal(step->rows[0].sequence->block_count, 1);
    commit(batcher, 7, 50);

    step = next(batcher);
    assert_int_equal(step->base, 7);
    assert_int_equal(step->kind, COX_STEP_DECODE);
    expect_row(step, 0, 1, 3, 1, false, true);
    assert_int_equal(step->rows[0].sequence->tokens[3], 50);
    commit(batcher, 8, 51);

    /* The table grows by one block when position 4 is computed. */
    step = next(batcher);
    expect_row(step, 0, 1, 4, 1, false, true);
    assert_int_equal(step->rows[0].sequence->block_count, 2);
    assert_int_equal(step->rows[0].sequence->sent_block_count, 1);
    commit(batcher, 9, 52);

    struct cox_sequence *done = done_of(batcher);
    assert_int_equal(done->finish, COX_FINISH_LENGTH);
    assert_int_equal(done->token_count, 6);
    assert_int_equal(done->tokens[5], 52);
    assert_null(cox_batcher_done(batcher));
    expect_nothing(batcher, COX_EMPTY);
    assert_int_equal(cox_batcher_free_blocks(batcher), 16);

    /* No step will tell: it has to be cleaned up. */
    assert_int_equal(unreported_count(batcher), 1);
    assert_int_equal(unreported_ids[0], 1);
    cox_batcher_reported(batcher);
    assert_int_equal(unreported_count(batcher), 0);
}

BATCHER_TEST_WITH(a_slot_is_announced_and_used_again_in_the_same_step, .sequence_count_max = 1)
{
    add(batcher, 2, 9);
    add(batcher, 2, 9);
    next(batcher);
    commit(batcher, 1, 99);
    struct cox_sequence *done = done_of(batcher);
    assert_int_equal(done->finish, COX_FINISH_STOP);
    assert_int_equal(done->tokens[2], 99);
    const struct cox_step *step = next(batcher);
    assert_int_equal(step->finished_count, 1);
    assert_int_equal(step->finished_slots[0], 0);
    expect_row(step, 0, 2, 0, 2, true, true);
    assert_int_equal(step->rows[0].sequence->slot, 0);
    commit(batcher, 2, 1);
    assert_int_equal(next(batcher)->finished_count, 0);
}

BATCHER_TEST(long_prompts_go_in_chunks_beside_decodes)
{
    add(batcher, 2, 9);
    next(batcher);
    commit(batcher, 1, 5);
    add(batcher, 40, 2);
    const struct cox_step *step = next(batcher);
    assert_int_equal(step->kind, COX_STEP_MIXED);
    assert_int_equal(step->token_count, 16);
    expect_row(step, 0, 1, 2, 1, false, true);
    expect_row(step, 1, 2, 0, 15, true, false);
    assert_int_equal(step->rows[1].sequence->block_count, 10); /* the whole prompt's */
    commit(batcher, 2, 5);
    step = next(batcher);
    expect_row(step, 1, 2, 15, 15, false, false);
    commit(batcher, 3, 5);
    step = next(batcher);
    expect_row(step, 1, 2, 30, 10, false, true);
    commit(batcher, 4, 5);
    step = next(batcher);
    assert_int_equal(step->kind, COX_STEP_DECODE);
    expect_row(step, 1, 2, 40, 1, false, true);
}

BATCHER_TEST_WITH(a_dry_pool_preempts_the_youngest, .block_count = 6)
{
    add(batcher, 4, 20); /* 6 blocks in the end */
    add(batcher, 4, 12); /* 4 blocks in the end */
    const struct cox_step *step = next(batcher);
    assert_int_equal(step->row_count, 2);
    uint64_t sequence = 1;
    struct cox_batcher_stats stats = {0};
    while (stats.preemptions == 0) {
        assert_int_equal(step->row_count, 2);
        commit(batcher, sequence++, 5);
        step = next(batcher);
        cox_batcher_stats(batcher, &stats);
    }
    /* Both had 3 blocks; the older one took its fourth from the younger one. */
    assert_int_equal(step->row_count, 1);
    expect_row(step, 0, 1, 12, 1, false, true);
    assert_int_equal(step->finished_count, 1);
    assert_int_equal(step->waiting_count, 1);
    commit(batcher, sequence++, 5);

    /* It comes back, with what it had generated, when the first one is done. */
    do {
        step = next(batcher);
        assert_int_equal(step->row_count, 1);
        if (step->rows[0].sequence->id == 2)
            break;
        commit(batcher, sequence++, 5);
        cox_sequence_free(cox_batcher_done(batcher));
    } while (true);
    expect_row(step, 0, 2, 0, 13, true, true);
    commit(batcher, sequence++, 5);
}

BATCHER_TEST(a_revert_recomputes_everything_from_the_start)
{
    add(batcher, 3, 9);
    add(batcher, 14, 9);
    next(batcher);
    commit(batcher, 1, 5);
    const struct cox_step *step = next(batcher);
    expect_row(step, 0, 1, 3, 1, false, true);
    expect_row(step, 1, 2, 13, 1, false, true);
    cox_batcher_revert(batcher);

    step = next(batcher);
    assert_int_equal(step->base, 0);
    assert_int_equal(step->finished_count, 0);
    expect_row(step, 0, 1, 0, 4, true, true);
    expect_row(step, 1, 2, 0, 12, true, false); /* 16 tokens in all */
    cox_batcher_revert(batcher);                /* twice in a row */
    step = next(batcher);
    assert_int_equal(step->base, 0);
    expect_row(step, 0, 1, 0, 4, true, true);
    expect_row(step, 1, 2, 0, 12, true, false);
    commit(batcher, 5, 6);
    step = next(batcher);
    assert_int_equal(step->base, 5);
    expect_row(step, 0, 1, 4, 1, false, true);
    expect_row(step, 1, 2, 12, 2, false, true);
}

BATCHER_TEST_WITH(what_can_never_run_is_refused_with_numbers, .block_count = 8,
                  .request_size_max = 1000)
{
    static const struct {
        uint32_t token_count, new_count_max;
        /* NULL: it fits */
        const char *part;
    } cases[] = {
        {0, 1, "empty"},
        {1, 0, "no new tokens"},
        {60, 6, "65 positions; the model has 64"},
        {30, 4, "9 blocks of KV cache of 4 positions; the workers have 8"},
        {30, 3, NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        add(batcher, cases[i].token_count, cases[i].new_count_max);
        if (!cases[i].part) {
            assert_null(cox_batcher_done(batcher));
            continue;
        }
        const struct cox_sequence *done = done_of(batcher);
        assert_int_equal(done->finish, COX_FINISH_ERROR);
        assert_contains(done->error.text, cases[i].part);
    }

    /* A frame that holds no announcement of that size. */
    batcher = batcher_with(.block_count = 64, .request_size_max = 1000, .position_count_max = 250);
    add(batcher, 150, 1);
    assert_contains(done_of(batcher)->error.text, "holds 1000");
}

PLAIN_TEST(a_batcher_without_blocks_is_refused)
{
    struct cox_batcher *none = NULL;
    assert_int_equal(cox_batcher_new(&(struct cox_batcher_options){0}, &none, NULL), COX_INVALID);
}

BATCHER_TEST(shorten_fits_what_is_there)
{
    const int32_t tokens[70] = {0};
    struct cox_prompt_request request = {
        .tokens = tokens, .token_count = 60, .new_count_max = 1000, .shorten = true};
    assert_int_equal(cox_batcher_add(batcher, &request), 0);
    /* 64 positions: the token after the last of them can still be sampled. */
    assert_int_equal(next(batcher)->rows[0].sequence->token_end, 65);
    request.token_count = 65;
    assert_int_equal(cox_batcher_add(batcher, &request), 0);
    assert_int_equal(done_of(batcher)->error.code, COX_TOO_LARGE);
}

BATCHER_TEST_WITH(steps_stay_below_the_frame, .token_count_max = 1000, .block_count = 100,
                  .request_size_max = 1000)
{
    add(batcher, 50, 2);
    add(batcher, 50, 2);
    assert_int_equal(next(batcher)->row_count, 1);
    commit(batcher, 1, 5);
    const struct cox_step *step = next(batcher);
    assert_int_equal(step->row_count, 2);
    cox_batcher_revert(batcher);
    assert_int_equal(next(batcher)->row_count, 1);
}

BATCHER_TEST_WITH(nested_steps_are_all_prefill_or_all_decode, .nested = true)
{
    add(batcher, 3, 2);
    add(batcher, 40, 2);
    add(batcher, 4, 2);
    const struct cox_step *step = next(batcher);
    assert_int_equal(step->row_count, 1);
    expect_row(step, 0, 1, 0, 3, true, true);
    commit(batcher, 1, 5);
    step = next(batcher); /* longer than a step: alone, and whole */
    assert_int_equal(step->kind, COX_STEP_PREFILL);
    assert_int_equal(step->row_count, 1);
    expect_row(step, 0, 2, 0, 40, true, true);
    commit(batcher, 2, 5);
    step = next(batcher);
    expect_row(step, 0, 3, 0, 4, true, true);
    commit(batcher, 3, 5);
    step = next(batcher);
    assert_int_equal(step->kind, COX_STEP_DECODE);
    assert_int_equal(step->row_count, 3);
    assert_int_equal(step->finished_count, 0);
    commit(batcher, 4, 5);
    assert_int_equal(unreported_count(batcher), 3);
}

BATCHER_TEST(who_is_cancelled_gives_everything_back)
{
    static const int32_t tokens[5] = {1, 2, 3, 4, 5};
    char contexts[8];
    for (int i = 0; i < 6; i++) { /* four run, two wait */
        struct cox_prompt_request request = {
            .tokens = tokens, .token_count = 3, .new_count_max = 20, .context = &contexts[i]};
        assert_int_equal(cox_batcher_add(batcher, &request), 0);
    }
    const struct cox_step *step = next(batcher);
    assert_int_equal(step->row_count, 4);
    commit(batcher, 1, 50);
    uint32_t free_count = cox_batcher_free_blocks(batcher);
    cox_batcher_cancel(batcher, &contexts[6]); /* none */
    assert_null(cox_batcher_done(batcher));
    cox_batcher_cancel(batcher, &contexts[1]); /* runs */
    cox_batcher_cancel(batcher, &contexts[5]); /* waits, the last */
    struct cox_prompt_request request = {
        .tokens = tokens, .token_count = 3, .new_count_max = 1, .context = &contexts[7]};
    assert_int_equal(cox_batcher_add(batcher, &request),
                     0); /* and another one waits in its place */
    assert_int_equal(cox_batcher_free_blocks(batcher), free_count + 1);
    for (int i = 0; i < 2; i++) {
        struct cox_sequence *done = done_of(batcher);
        assert_ptr_equal(done->request.context, &contexts[i ? 5 : 1]);
        assert_int_equal(done->finish, COX_FINISH_ERROR);
        assert_int_equal(done->error.code, COX_CLOSED);
    }
    assert_null(cox_batcher_done(batcher));
    /* Its slot is announced as finished, and the waiting one has it. */
    step = next(batcher);
    assert_int_equal(step->finished_count, 1);
    assert_int_equal(step->row_count, 4);
    assert_ptr_equal(step->rows[3].sequence->request.context, &contexts[4]);
    assert_int_equal(step->rows[3].sequence->slot, step->finished_slots[0]);
    commit(batcher, 2, 50);
    for (int i = 0; i < 5; i++)
        cox_batcher_cancel(batcher, &contexts[i]);
    assert_int_equal(cox_batcher_free_blocks(batcher), 16);
    step = next(batcher);
    assert_int_equal(step->row_count, 1);
    assert_ptr_equal(step->rows[0].sequence->request.context, &contexts[7]);
    assert_int_equal(step->finished_count, 4);
    commit(batcher, 3, 50);
}

BATCHER_TEST(a_failure_ends_all)
{
    for (int i = 0; i < 6; i++)
        add(batcher, 3, 2);
    next(batcher);
    cox_batcher_fail(batcher, COX_PEER_DEAD, "rank 1 is gone");
    int64_t id = 0;
    for (struct cox_sequence *done; (done = cox_batcher_done(batcher)); cox_sequence_free(done)) {
        assert_int_equal(done->id, ++id); /* in order */
        assert_int_equal(done->finish, COX_FINISH_ERROR);
        assert_string_equal(done->error.text, "rank 1 is gone");
    }
    assert_int_equal(id, 6);
    assert_int_equal(cox_batcher_free_blocks(batcher), 16);

    /* A token that none is changes nothing. */
    add(batcher, 3, 2);
    next(batcher);
    int32_t token = -1;
    struct cox_error error = {0};
    cox_batcher_publish(batcher, 1);
    assert_int_equal(cox_batcher_commit(batcher, &token, NULL, NULL, &error), COX_CORRUPT);
}

/* ---- holds and pulls ---- */

/* Of 6 tokens, which are 2 blocks. */
static void add_held(struct cox_batcher *batcher, uint64_t owner, uint64_t hold_ms)
{
    int32_t tokens[6] = {1, 2, 3, 4, 5, 6};
    struct cox_prompt_request request = {.tokens = tokens,
                                         .token_count = 6,
                                         .new_count_max = 1,
                                         .hold_ms = hold_ms,
                                         .owner = owner,
                                         .stop_tokens = {99},
                                         .stop_count = 1};
    assert_int_equal(cox_batcher_add(batcher, &request), 0);
}

static int64_t held_id(struct cox_batcher *batcher, bool held)
{
    struct cox_sequence *done = done_of(batcher);
    assert_int_equal(done->hold != NULL, held);
    int64_t id = done->id;
    if (held) {
        assert_int_equal(done->finish, COX_FINISH_LENGTH);
        assert_int_equal(done->hold->id, id);
        assert_int_equal(done->hold->block_count, 2);
    }
    return id;
}

BATCHER_TEST_WITH(m10_a_held_sequence_keeps_its_blocks_until_it_is_released, .hold_count_max = 4,
                  .token_count_max = 64)
{
    add_held(batcher, 7, 60000);
    next(batcher);
    commit(batcher, 1, 50);
    int64_t id = held_id(batcher, true);
    assert_int_equal(cox_batcher_free_blocks(batcher), 14);
    assert_int_equal(cox_batcher_kv_leases(batcher)->count, 1);
    /* The ranks still know it, so no other sequence gets its blocks. */
    assert_int_equal(unreported_count(batcher), 0);
    expect_nothing(batcher, COX_EMPTY);
    cox_batcher_release(batcher, 8, id); /* another one's */
    cox_batcher_release(batcher, 7, id + 1);
    cox_batcher_expire(batcher, cox_now_ns());
    assert_int_equal(cox_batcher_free_blocks(batcher), 14);
    cox_batcher_release(batcher, 7, id);
    cox_batcher_release(batcher, 7, id);
    assert_int_equal(cox_batcher_free_blocks(batcher), 16);
    assert_int_equal(unreported_count(batcher), 1);
    assert_int_equal(unreported_ids[0], id);
    /* The next step tells. */
    add(batcher, 3, 2);
    const struct cox_step *step = next(batcher);
    assert_int_equal(step->finished_count, 1);
    commit(batcher, 2, 50);
    assert_int_equal(unreported_count(batcher), 0);
}

BATCHER_TEST_WITH(m10_a_hold_ends_with_its_lease_its_owner_and_a_step_that_failed,
                  .hold_count_max = 4, .token_count_max = 64)
{
    add_held(batcher, 1, 1);
    add_held(batcher, 2, 60000);
    add_held(batcher, 3, 60000);
    next(batcher);
    commit(batcher, 1, 50);
    held_id(batcher, true);
    held_id(batcher, true);
    held_id(batcher, true);
    assert_int_equal(cox_batcher_free_blocks(batcher), 10);
    uint64_t due_ns = cox_kv_leases_due_ns(cox_batcher_kv_leases(batcher));
    cox_batcher_expire(batcher, due_ns - 1);
    assert_int_equal(cox_batcher_kv_leases(batcher)->count, 3);
    cox_batcher_expire(batcher, due_ns);
    assert_int_equal(cox_batcher_kv_leases(batcher)->count, 2);
    cox_batcher_release(batcher, 2, 0);
    assert_int_equal(cox_batcher_kv_leases(batcher)->count, 1);
    add(batcher, 3, 2);
    next(batcher);
    cox_batcher_revert(batcher);
    assert_int_equal(cox_batcher_kv_leases(batcher)->count, 0);
    /* The next step tells, whose base empties the tables. */
    const struct cox_step *step = next(batcher);
    assert_int_equal(step->base, 0);
    assert_int_equal(step->finished_count, 0);
    commit(batcher, 2, 50);
    assert_int_equal(unreported_count(batcher), 0);
}

BATCHER_TEST_WITH(m10_a_prompt_that_stops_or_finds_no_room_is_not_held, .token_count_max = 64,
                  .hold_count_max = 1)
{
    add_held(batcher, 1, 60000);
    next(batcher);
    commit(batcher, 1, 99);
    struct cox_sequence *done = done_of(batcher);
    assert_int_equal(done->finish, COX_FINISH_STOP);
    assert_null(done->hold);
    assert_int_equal(cox_batcher_free_blocks(batcher), 16);
    add_held(batcher, 1, 60000);
    add_held(batcher, 1, 60000);
    next(batcher);
    commit(batcher, 2, 50);
    held_id(batcher, true);
    held_id(batcher, false);
    assert_int_equal(cox_batcher_free_blocks(batcher), 14);
}

static const int32_t remote_blocks[] = {8, 9, 3, 4};

/* token_count tokens, the last of them generated elsewhere. */
static void add_pulled(struct cox_batcher *batcher, uint32_t token_count, uint32_t new_count_max,
                       const struct cox_prompt_request *like)
{
    int32_t tokens[64];
    for (int i = 0; i < 64; i++)
        tokens[i] = i;
    const struct cox_kv_reference source = {.cluster_id = "other",
                                            .epoch = 5,
                                            .sequence = 77,
                                            .lease_ns = COX_DEADLINE_NEVER,
                                            .blocks = remote_blocks,
                                            .block_count = (token_count + 2) / 4};
    struct cox_prompt_request request = *like;
    request.tokens = tokens;
    request.token_count = token_count;
    request.new_count_max = new_count_max;
    request.source = &source;
    assert_int_equal(cox_batcher_add(batcher, &request), 0);
}

BATCHER_TEST(m11_a_pulled_sequence_goes_on_behind_its_source_while_others_run)
{
    add(batcher, 3, 9);
    add_pulled(batcher, 6, 3, &(struct cox_prompt_request){0});
    const struct cox_step *step = next(batcher);
    assert_int_equal(step->row_count, 1);
    const struct cox_sequence *pulled = cox_batcher_pull(batcher);
    assert_non_null(pulled);
    assert_null(cox_batcher_pull(batcher));
    assert_int_equal(pulled->id, 2);
    assert_int_equal(pulled->source->sequence, 77);
    assert_int_equal(pulled->source->blocks[1], 9);
    assert_int_equal(pulled->block_count, 2);
    commit(batcher, 1, 50);
    /* It has no row until it is there. */
    step = next(batcher);
    expect_row(step, 0, 1, 3, 1, false, true);
    assert_int_equal(step->row_count, 1);
    commit(batcher, 2, 50);
    assert_int_equal(cox_batcher_pulled(batcher, 3, COX_PULL_END_DONE, true, NULL, NULL),
                     COX_NOT_FOUND);
    assert_int_equal(cox_batcher_pulled(batcher, 2, COX_PULL_END_DONE, true, NULL, NULL), 0);
    step = next(batcher);
    assert_int_equal(step->row_count, 2);
    expect_row(step, 1, 2, 5, 1, true, true);
    commit(batcher, 3, 51);
    step = next(batcher);
    expect_row(step, 1, 2, 6, 1, false, true);
    /* A step that fails takes it back to the beginning, like any other. */
    cox_batcher_revert(batcher);
    step = next(batcher);
    expect_row(step, 1, 2, 0, 7, true, true);
    commit(batcher, 4, 52);
}

BATCHER_TEST(m11_what_cannot_be_pulled_is_pulled_again_computed_or_fails)
{
    struct cox_error error = {.code = COX_STALE, .text = "gone"};
    add_pulled(batcher, 6, 3, &(struct cox_prompt_request){0});
    expect_nothing(batcher, COX_BUSY);
    assert_int_equal(cox_batcher_pull(batcher)->pulls, 1);
    assert_int_equal(cox_batcher_pulled(batcher, 1, COX_PULL_END_RETRY, true, NULL, &error), 0);
    assert_int_equal(cox_batcher_free_blocks(batcher), 16);
    expect_nothing(batcher, COX_BUSY);
    assert_int_equal(cox_batcher_pull(batcher)->pulls, 2);
    assert_int_equal(cox_batcher_pulled(batcher, 1, COX_PULL_END_RECOMPUTE, true, NULL, &error), 0);
    const struct cox_step *step = next(batcher);
    expect_row(step, 0, 1, 0, 6, true, true);
    assert_null(cox_batcher_pull(batcher));
    assert_true(step->rows[0].sequence->recomputed);
    commit(batcher, 1, 50);
    add_pulled(batcher, 6, 3, &(struct cox_prompt_request){.context = &error});
    step = next(batcher);
    assert_non_null(cox_batcher_pull(batcher));
    commit(batcher, 2, 51);
    assert_int_equal(cox_batcher_pulling(batcher, 0, &error)->id, 2);
    assert_null(cox_batcher_pulling(batcher, 0, batcher));
    assert_int_equal(cox_batcher_pulled(batcher, 2, COX_PULL_END_FAIL, true, NULL, &error), 0);
    struct cox_sequence *done = done_of(batcher);
    assert_int_equal(done->finish, COX_FINISH_ERROR);
    assert_int_equal(done->error.code, COX_STALE);
}

BATCHER_TEST_WITH(m11_blocks_that_a_late_rank_may_write_have_no_user, .block_count = 3)
{
    const struct cox_error error = {.code = COX_TIMEOUT, .text = "late"};
    int32_t blocks[2];
    add_pulled(batcher, 6, 3, &(struct cox_prompt_request){0});
    expect_nothing(batcher, COX_BUSY);
    memcpy(blocks, cox_batcher_pull(batcher)->blocks, sizeof blocks);
    assert_int_equal(cox_batcher_pulled(batcher, 1, COX_PULL_END_RECOMPUTE, false, NULL, &error),
                     0);
    assert_int_equal(cox_batcher_free_blocks(batcher), 1);
    /* It needs two, and waits for them. */
    expect_nothing(batcher, COX_BUSY);
    cox_batcher_give(batcher, blocks, 2);
    const struct cox_step *step = next(batcher);
    expect_row(step, 0, 1, 0, 6, true, true);
    commit(batcher, 1, 50);

    /* A batcher that comes after leaves them alone. */
    batcher = batcher_with(.block_count = 3);
    cox_batcher_reserve(batcher, blocks, 2);
    cox_batcher_reserve(batcher, blocks, 1);
    assert_int_equal(cox_batcher_free_blocks(batcher), 1);
    add(batcher, 2, 2);
    step = next(batcher);
    assert_int_equal(step->rows[0].sequence->blocks[0], 2);
    commit(batcher, 1, 50);
    cox_batcher_give(batcher, blocks, 2);
    assert_int_equal(cox_batcher_free_blocks(batcher), 2);
}

BATCHER_TEST(m11_a_pull_alone_needs_no_tokens_and_gives_its_blocks_back)
{
    int report = 0;
    add_pulled(batcher, 6, 1, &(struct cox_prompt_request){.pull_only = true});
    expect_nothing(batcher, COX_BUSY);
    assert_non_null(cox_batcher_pull(batcher));
    assert_int_equal(cox_batcher_free_blocks(batcher), 14);
    assert_int_equal(cox_batcher_pulled(batcher, 1, COX_PULL_END_DONE, true,
                                        memcpy(malloc(4), &report, 4), NULL),
                     0);
    struct cox_sequence *done = done_of(batcher);
    assert_int_equal(done->finish, COX_FINISH_LENGTH);
    assert_non_null(done->report);
    assert_int_equal(cox_batcher_free_blocks(batcher), 16);
    expect_nothing(batcher, COX_EMPTY);
}

BATCHER_TEST(m11_sources_that_do_not_fit_are_refused)
{
    const struct cox_kv_reference source = {
        .cluster_id = "other", .blocks = remote_blocks, .block_count = 3};
    int32_t tokens[6] = {0};
    struct cox_prompt_request request = {
        .tokens = tokens, .token_count = 6, .new_count_max = 1, .source = &source};
    assert_int_equal(cox_batcher_add(batcher, &request), 0);
    assert_int_equal(done_of(batcher)->error.code, COX_INVALID);
}

/* The last position that there is was generated elsewhere. */
BATCHER_TEST_WITH(m11_nothing_left_to_do_is_no_error, .position_count_max = 5)
{
    add_pulled(batcher, 6, 9, &(struct cox_prompt_request){.shorten = true});
    struct cox_sequence *done = done_of(batcher);
    assert_int_equal(done->finish, COX_FINISH_LENGTH);
    assert_int_equal(done->token_count, 6);
    add_pulled(batcher, 6, 9, &(struct cox_prompt_request){0});
    done = done_of(batcher);
    assert_int_equal(done->error.code, COX_TOO_LARGE);
}

BATCHER_TEST(m11_a_pull_that_no_rank_began_is_cancelled_like_any_other)
{
    int mine;
    add_pulled(batcher, 6, 3, &(struct cox_prompt_request){.context = &mine});
    expect_nothing(batcher, COX_BUSY);
    cox_batcher_cancel(batcher, &mine);
    assert_int_equal(done_of(batcher)->error.code, COX_CLOSED);
    assert_int_equal(cox_batcher_free_blocks(batcher), 16);
    assert_null(cox_batcher_pull(batcher));
}

BATCHER_TEST_WITH(m10_a_held_prompt_ends_with_one_token_of_those_that_are_to_fit,
                  .hold_count_max = 4, .token_count_max = 64)
{
    int32_t tokens[6] = {0};
    struct cox_prompt_request request = {
        .tokens = tokens, .token_count = 6, .new_count_max = 59, .hold_ms = 60000, .owner = 1};
    assert_int_equal(cox_batcher_add(batcher, &request), 0);
    request.new_count_max = 60; /* one more than there are positions */
    assert_int_equal(cox_batcher_add(batcher, &request), 0);
    assert_int_equal(done_of(batcher)->error.code, COX_TOO_LARGE);
    next(batcher);
    commit(batcher, 1, 50);
    held_id(batcher, true);
}

BATCHER_TEST_WITH(m10_ids_go_on_where_the_plan_before_ended, .last_id = 41)
{
    add(batcher, 2, 2);
    assert_int_equal(next(batcher)->rows[0].sequence->id, 42);
    commit(batcher, 1, 50);
    assert_int_equal(cox_batcher_last_id(batcher), 42);
}
