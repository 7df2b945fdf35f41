/*
 * batcher, with several steps in flight: what is planned on tokens that are not known yet, and what
 * becomes of it.
 */
#include "batcher_fixture.h"

#define STOP 99

/* Two steps in flight. */
#define BATCHER_TEST(name) BATCHER_TEST_WITH(name, .step_count_max = 2)

static void add_with(struct cox_batcher *batcher, uint32_t token_count, uint32_t new_count_max,
                     uint64_t hold_ms, void *context)
{
    const int32_t tokens[64] = {1, 2, 3};
    struct cox_prompt_request request = {
        .tokens = tokens,
        .token_count = token_count,
        .new_count_max = new_count_max,
        .stop_tokens = {STOP},
        .stop_count = 1,
        .hold_ms = hold_ms,
        .owner = 1,
        .context = context,
    };
    assert_int_equal(cox_batcher_add(batcher, &request), 0);
}

static void add(struct cox_batcher *batcher, uint32_t token_count, uint32_t new_count_max)
{
    add_with(batcher, token_count, new_count_max, 0, NULL);
}

/* The next step, on its way as number `sequence`. */
static const struct cox_step *publish(struct cox_batcher *batcher, uint64_t sequence)
{
    const struct cox_step *step = NULL;
    assert_int_equal(cox_batcher_next(batcher, &step), 0);
    cox_batcher_publish(batcher, sequence);
    return step;
}

static void commit(struct cox_batcher *batcher, int32_t first, int32_t others)
{
    const int32_t tokens[4] = {first, others, others, others};
    assert_ok(cox_batcher_commit(batcher, tokens, NULL, NULL, test_err()));
}

static void expect_done(struct cox_batcher *batcher, int64_t id, enum cox_finish finish,
                        uint32_t token_count)
{
    struct cox_sequence *done = done_of(batcher);
    assert_int_equal(done->id, id);
    assert_int_equal(done->finish, finish);
    assert_int_equal(done->token_count, token_count);
    for (uint32_t i = 0; i < done->token_count; i++)
        assert_true(done->tokens[i] >= 0);
}

static struct cox_batcher_stats stats(const struct cox_batcher *batcher)
{
    struct cox_batcher_stats stats;
    cox_batcher_stats(batcher, &stats);
    return stats;
}

/* ---- two steps in flight ---- */

BATCHER_TEST(a_step_follows_before_the_token_is_known)
{
    add(batcher, 3, 3);
    const struct cox_step *one = publish(batcher, 7);
    const struct cox_step *two = publish(batcher, 8);
    expect_row(one, 0, 1, 0, 3, true, true);
    assert_int_equal(one->base, 0);
    assert_int_equal(one->kind, COX_STEP_PREFILL);
    expect_row(two, 0, 1, 3, 1, false, true);
    assert_int_equal(two->base, 7);
    assert_int_equal(two->kind, COX_STEP_DECODE);
    commit(batcher, 50, 0);
    assert_int_equal(stats(batcher).generated_tokens, 1);
    /* The block of position 4 is announced in the step that needs it. */
    const struct cox_step *three;
    assert_int_equal(cox_batcher_next(batcher, &three), 0);
    expect_row(three, 0, 1, 4, 1, false, true);
    assert_int_equal(three->rows[0].sequence->block_count, 2);
    assert_int_equal(three->rows[0].sequence->sent_block_count, 1);
    cox_batcher_publish(batcher, 9);
    commit(batcher, 51, 0);
    /* It ends by length, which is known beforehand. */
    expect_nothing(batcher, COX_BUSY);
    assert_null(cox_batcher_done(batcher));
    commit(batcher, 52, 0);
    struct cox_sequence *done = done_of(batcher);
    assert_int_equal(done->finish, COX_FINISH_LENGTH);
    assert_int_equal(done->token_count, 6);
    assert_int_equal(done->tokens[3], 50);
    assert_int_equal(done->tokens[4], 51);
    assert_int_equal(done->tokens[5], 52);
    expect_nothing(batcher, COX_EMPTY);
    assert_int_equal(cox_batcher_free_blocks(batcher), 16);
    assert_int_equal(stats(batcher).generated_tokens, 3);
}

BATCHER_TEST(chunks_of_a_prompt_follow_each_other)
{
    add(batcher, 40, 2);
    expect_row(publish(batcher, 1), 0, 1, 0, 16, true, false);
    expect_row(publish(batcher, 2), 0, 1, 16, 16, false, false);
    commit(batcher, -1, -1);
    expect_row(publish(batcher, 3), 0, 1, 32, 8, false, true);
    commit(batcher, -1, -1);
    expect_row(publish(batcher, 4), 0, 1, 40, 1, false, true);
    commit(batcher, 50, 0);
    expect_nothing(batcher, COX_BUSY);
    commit(batcher, 51, 0);
    expect_done(batcher, 1, COX_FINISH_LENGTH, 42);
    assert_int_equal(stats(batcher).prompt_tokens, 40);
}

/* It waits, the pool and the slots are full, and the next sequence would take what a row may still
 * write to. */
BATCHER_TEST_WITH(what_an_end_leaves_has_no_user_while_a_row_is_in_flight, .step_count_max = 2,
                  .sequence_count_max = 1, .block_count = 2)
{
    add(batcher, 4, 5);
    add(batcher, 5, 2);
    publish(batcher, 1);
    const struct cox_step *step = publish(batcher, 2);
    assert_int_equal(cox_batcher_free_blocks(batcher), 0);
    commit(batcher, STOP, 0);
    expect_done(batcher, 1, COX_FINISH_STOP, 5); /* at once */
    assert_null(step->rows[0].sequence);
    assert_int_equal(cox_batcher_free_blocks(batcher), 0);
    assert_int_equal(unreported_count(batcher), 0);
    expect_nothing(batcher, COX_BUSY);
    commit(batcher, 7, 0);
    assert_null(cox_batcher_done(batcher));
    assert_int_equal(stats(batcher).generated_tokens, 1); /* what it gave counts nowhere */
    assert_int_equal(cox_batcher_free_blocks(batcher), 2);
    assert_int_equal(unreported_count(batcher), 1);
    step = publish(batcher, 3);
    expect_row(step, 0, 2, 0, 5, true, true);
    assert_int_equal(step->finished_count, 1);
}

/* Where there are slots for that the next one need not wait, with blocks of its own. */
BATCHER_TEST_WITH(the_next_one_is_admitted_beside_what_an_end_leaves, .step_count_max = 2,
                  .sequence_count_max = 1, .retiring_count_max = 1)
{
    for (int i = 0; i < 3; i++)
        add(batcher, 4, 5);
    publish(batcher, 1);
    publish(batcher, 2);
    commit(batcher, STOP, 0);
    const struct cox_step *step = publish(batcher, 3);
    expect_row(step, 0, 2, 0, 4, true, true);
    assert_int_equal(step->rows[0].sequence->slot, 1);
    assert_int_equal(step->finished_count, 0);
    commit(batcher, 7, 0);
    step = publish(batcher, 4);
    expect_row(step, 0, 2, 4, 1, false, true);
    commit(batcher, STOP, 0);
    step = publish(batcher, 5); /* the first one's slot was announced meanwhile */
    expect_row(step, 0, 3, 0, 4, true, true);
    assert_int_equal(step->rows[0].sequence->slot, 0);
}

BATCHER_TEST(nothing_left_to_run_is_not_empty_while_a_row_is_in_flight)
{
    add(batcher, 3, 9);
    publish(batcher, 1);
    publish(batcher, 2);
    commit(batcher, STOP, 0);
    expect_nothing(batcher, COX_BUSY);
    commit(batcher, 7, 0);
    expect_nothing(batcher, COX_EMPTY);
    assert_int_equal(unreported_count(batcher), 1);
    assert_int_equal(cox_batcher_free_blocks(batcher), 16);
}

BATCHER_TEST(a_slot_that_ends_meanwhile_is_announced_by_the_step_after)
{
    add(batcher, 3, 1);
    add(batcher, 3, 9);
    publish(batcher, 1);
    const struct cox_step *step =
        publish(batcher, 2); /* has no row of the first, and does not tell */
    expect_row(step, 0, 2, 3, 1, false, true);
    assert_int_equal(step->finished_count, 0);
    commit(batcher, 5, 5);
    assert_int_equal(cox_batcher_next(batcher, &step), 0);
    assert_int_equal(step->finished_count, 1);
    assert_int_equal(step->base, 2);
    cox_batcher_publish(batcher, 3);
    commit(batcher, 5, 5);
    /* Told by a step that is not over, so not again. */
    assert_int_equal(cox_batcher_next(batcher, &step), 0);
    assert_int_equal(step->finished_count, 0);
}

BATCHER_TEST(a_revert_takes_all_of_them_back)
{
    add(batcher, 3, 9);
    add(batcher, 3, 9);
    publish(batcher, 1);
    publish(batcher, 2);
    commit(batcher, 50, STOP);
    expect_done(batcher, 2, COX_FINISH_STOP, 4);
    publish(batcher, 3);
    cox_batcher_revert(batcher);
    assert_int_equal(cox_batcher_free_blocks(batcher), 14); /* also what the second one left */
    const struct cox_step *step = publish(batcher, 4);
    assert_int_equal(step->base, 0);
    assert_int_equal(step->row_count, 1);
    expect_row(step, 0, 1, 0, 4, true, true);
    assert_int_equal(step->finished_count, 0);
    /* Two more, of which one was given only. */
    cox_batcher_next(batcher, &step);
    expect_row(step, 0, 1, 4, 1, false, true);
    cox_batcher_revert(batcher);
    step = publish(batcher, 5);
    expect_row(step, 0, 1, 0, 4, true, true);
    assert_int_equal(step->rows[0].sequence->tokens[3], 50);
}

BATCHER_TEST(after_a_revert_with_nothing_left_ended_sequences_are_announced)
{
    add(batcher, 3, 9);
    add(batcher, 3, 1);
    publish(batcher, 1);
    publish(batcher, 2);
    commit(batcher, STOP, 50);
    cox_batcher_revert(batcher);
    expect_nothing(batcher, COX_EMPTY);
    assert_int_equal(unreported_count(batcher), 2);
    assert_int_equal(unreported_ids[0] + unreported_ids[1], 3);
    assert_int_equal(cox_batcher_free_blocks(batcher), 16);
}

BATCHER_TEST(what_a_step_told_in_vain_is_announced_again)
{
    add(batcher, 3, 1);
    add(batcher, 3, 3);
    publish(batcher, 1);
    commit(batcher, 50, 50);
    assert_int_equal(publish(batcher, 2)->finished_count, 1);
    assert_int_equal(publish(batcher, 3)->finished_count, 0);
    assert_int_equal(unreported_count(batcher), 0);
    cox_batcher_revert(batcher);
    assert_int_equal(unreported_count(batcher), 1);
    assert_int_equal(unreported_ids[0], 1);
}

/* A preempted sequence would be announced again with an unknown token, and two would write to its
 * blocks. */
BATCHER_TEST_WITH(a_dry_pool_preempts_when_nothing_is_in_flight, .step_count_max = 2,
                  .block_count = 4)
{
    add(batcher, 4, 12);
    add(batcher, 4, 12);
    publish(batcher, 1);
    commit(batcher, 50, 50);
    publish(batcher, 2); /* each has its second block: the pool is dry */
    for (uint64_t sequence = 3; sequence < 6; sequence++) {
        publish(batcher, sequence);
        commit(batcher, 50, 50);
    }
    expect_nothing(batcher, COX_BUSY); /* position 8 */
    assert_int_equal(stats(batcher).preemptions, 0);
    commit(batcher, 50, 50);
    const struct cox_step *step = publish(batcher, 6);
    assert_int_equal(stats(batcher).preemptions, 1);
    assert_int_equal(step->row_count, 1);
    expect_row(step, 0, 1, 8, 1, false, true);
    assert_int_equal(step->finished_count, 1);
    /* With one in flight the other one does not come back before there is room. */
    expect_row(publish(batcher, 7), 0, 1, 9, 1, false, true);
    commit(batcher, STOP, 0);
    commit(batcher, 50, 0);
    step = publish(batcher, 8);
    expect_row(step, 0, 2, 0, 9, true, true);
    assert_int_equal(step->rows[0].sequence->tokens[8], 50);
}

/* Waiting for the step in flight may show that no sequence has to go. */
BATCHER_TEST_WITH(an_end_in_flight_saves_a_preemption, .step_count_max = 2, .block_count = 3)
{
    add(batcher, 4, 8);
    add(batcher, 4, 8);
    publish(batcher, 1);
    expect_nothing(batcher, COX_BUSY);
    commit(batcher, STOP, 50);
    expect_row(publish(batcher, 2), 0, 2, 4, 1, false, true);
    assert_int_equal(stats(batcher).preemptions, 0);
}

BATCHER_TEST(who_is_cancelled_leaves_its_rows)
{
    int contexts[2];
    add_with(batcher, 3, 9, 0, &contexts[0]);
    add_with(batcher, 20, 9, 0, &contexts[1]);
    const struct cox_step *one = publish(batcher, 1);
    const struct cox_step *two = publish(batcher, 2);
    expect_row(one, 1, 2, 0, 13, true, false);
    expect_row(two, 1, 2, 13, 7, false, true);
    cox_batcher_cancel(batcher, &contexts[1]); /* with a row in both */
    expect_done(batcher, 2, COX_FINISH_ERROR, 20);
    assert_int_equal(cox_batcher_free_blocks(batcher), 10);
    commit(batcher, 50, -1);
    assert_int_equal(cox_batcher_free_blocks(batcher), 10);
    cox_batcher_cancel(batcher, &contexts[0]); /* with a token that is known and one that is not */
    expect_done(batcher, 1, COX_FINISH_ERROR, 4);
    assert_int_equal(stats(batcher).prompt_tokens, 3);
    commit(batcher, 51, 52);
    assert_int_equal(cox_batcher_free_blocks(batcher), 16);
    assert_int_equal(stats(batcher).generated_tokens, 1);
    assert_int_equal(unreported_count(batcher), 2);
}

BATCHER_TEST_WITH(m10_what_is_held_has_no_row_in_flight, .step_count_max = 2, .hold_count_max = 4)
{
    add_with(batcher, 6, 1, 60000, NULL);
    publish(batcher, 1);
    expect_nothing(batcher, COX_BUSY);
    add(batcher, 3, 9);
    const struct cox_step *step = publish(batcher, 2);
    assert_int_equal(step->row_count, 1);
    commit(batcher, 50, 0);
    struct cox_sequence *done = done_of(batcher);
    assert_non_null(done->hold);
    int64_t id = done->id;
    /* Released with a step in flight, which does not know its blocks. */
    cox_batcher_release(batcher, 1, id);
    assert_int_equal(cox_batcher_free_blocks(batcher), 15);
    assert_int_equal(cox_batcher_next(batcher, &step), 0);
    assert_int_equal(step->finished_count, 1);
}

/* A client that gets the end may unload its adapter from ranks which then still need it. */
PLAIN_TEST(who_is_cancelled_before_ranks_know_it_keeps_its_adapter)
{
    const int32_t tokens[] = {1, 2, 3};
    int context;
    const struct cox_prompt_request request = {
        .tokens = tokens, .token_count = 3, .new_count_max = 9, .lora = "one", .context = &context};
    for (int ending = 0; ending < 4; ending++) {
        struct cox_batcher *batcher = batcher_with(.step_count_max = 2);
        assert_int_equal(cox_batcher_add(batcher, &request), 0);
        add(batcher, 3, 9);
        publish(batcher, 1);
        publish(batcher, 2);
        cox_batcher_cancel(batcher, &context);
        assert_null(cox_batcher_done(batcher));
        cox_batcher_cancel(batcher, &context);
        if (ending == 0) {
            commit(batcher, 50, 50);
            assert_null(cox_batcher_done(batcher));
            commit(batcher, 51, 51);
        } else if (ending == 1) {
            cox_batcher_revert(batcher);
        } else if (ending == 2) {
            cox_batcher_fail(batcher, COX_PEER_DEAD, "rank 1 is gone");
        }
        if (ending < 3)
            expect_done(batcher, 1, COX_FINISH_ERROR, 3);
    }
}

/* Its end was not reported yet, so no client can have released it. */
BATCHER_TEST_WITH(m10_what_a_revert_ends_is_not_shown_as_held, .step_count_max = 2,
                  .hold_count_max = 4)
{
    add_with(batcher, 6, 1, 60000, NULL);
    add_with(batcher, 6, 1, 60000, NULL);
    publish(batcher, 1);
    commit(batcher, 50, 50);
    cox_batcher_release(batcher, 1, 1);
    struct cox_sequence *done = done_of(batcher);
    assert_null(done->hold);
    assert_int_equal(cox_batcher_kv_leases(batcher)->count, 1);
    cox_batcher_revert(batcher);
    done = done_of(batcher);
    assert_int_equal(done->finish, COX_FINISH_LENGTH);
    assert_null(done->hold);
    assert_int_equal(cox_batcher_free_blocks(batcher), 16);
}

/* A step in flight announces a slot's end and its next owner, which leaves it, too: both must be
 * announced again when that step comes to nothing, as often as it does. */
BATCHER_TEST_WITH(slots_announced_in_vain_and_left_again_have_room, .step_count_max = 2,
                  .sequence_count_max = 1, .retiring_count_max = 1)
{
    int contexts[2];
    add(batcher, 3, 1);
    publish(batcher, 1);
    commit(batcher, 50, 0);
    expect_done(batcher, 1, COX_FINISH_LENGTH, 4);
    int64_t id = 2;
    for (uint64_t sequence = 2; sequence < 8; sequence += 2, id += 2) {
        add_with(batcher, 3, 9, 0, &contexts[0]);
        const struct cox_step *step = publish(batcher, sequence);
        expect_row(step, 0, id, 0, 3, true, true);
        assert_int_equal(step->finished_count, sequence == 2);
        cox_batcher_cancel(batcher, &contexts[0]);
        add_with(batcher, 3, 9, 0, &contexts[1]);
        expect_row(publish(batcher, sequence + 1), 0, id + 1, 0, 3, true, true);
        cox_batcher_cancel(batcher, &contexts[1]);
        cox_batcher_revert(batcher);
        expect_done(batcher, id, COX_FINISH_ERROR, 3);
        expect_done(batcher, id + 1, COX_FINISH_ERROR, 3);
        expect_nothing(batcher, COX_EMPTY);
        /* The last to leave, if there is no room for all. */
        assert_int_equal(unreported_count(batcher), 2);
        assert_int_equal(unreported_ids[0] + unreported_ids[1], 2 * id + 1);
    }
    assert_int_equal(cox_batcher_free_blocks(batcher), 16);
}

BATCHER_TEST(a_failure_ends_what_is_in_flight)
{
    for (int i = 0; i < 6; i++)
        add(batcher, 3, 9);
    publish(batcher, 1);
    publish(batcher, 2);
    commit(batcher, STOP, 50);
    expect_done(batcher, 1, COX_FINISH_STOP, 4);
    publish(batcher, 3);
    cox_batcher_fail(batcher, COX_PEER_DEAD, "rank 1 is gone");
    for (int64_t id = 2; id <= 6; id++)
        expect_done(batcher, id, COX_FINISH_ERROR, id <= 4 ? 4 : 3);
    assert_int_equal(cox_batcher_free_blocks(batcher), 16);
}

/* ---- at random, against ranks that run the steps in order ---- */

#define REQUEST_COUNT 60
#define BLOCK_COUNT 24
#define IN_FLIGHT_MAX 4

static uint32_t random_state;

static uint32_t draw(uint32_t below)
{
    random_state = random_state * 1664525 + 1013904223;
    return (random_state >> 8) % below;
}

struct wanted {
    uint32_t prompt_count;
    uint32_t new_max;
    bool cancelled;
    bool done;
};

/* What a rank samples behind so many tokens. */
static int32_t token_of(int64_t id, uint32_t count)
{
    uint32_t h = ((uint32_t)id * 2654435761u + count * 40503u) >> 8;
    return h % 9 == 0 ? STOP : (int32_t)(h % 90);
}

struct ranks {
    const struct cox_step *steps[IN_FLIGHT_MAX];
    int32_t tokens[IN_FLIGHT_MAX][8];
    uint32_t first, count;
    uint64_t sequence;
    /* which sequence writes to a block in steps in flight; 0: none */
    int64_t owner[BLOCK_COUNT];
    /* so many steps from now on */
    uint32_t until[BLOCK_COUNT];
};

static void ranks_take(struct ranks *ranks, const struct cox_step *step)
{
    uint32_t at = (ranks->first + ranks->count++) % IN_FLIGHT_MAX;
    ranks->steps[at] = step;
    for (uint32_t i = 0; i < step->row_count; i++) {
        const struct cox_step_row *row = &step->rows[i];
        const struct cox_sequence *sequence = row->sequence;
        assert_true(row->position + row->count <= sequence->token_count);
        ranks->tokens[at][i] = row->emit ? token_of(sequence->id, row->position + row->count) : -1;
        for (uint32_t b = 0; b < sequence->block_count; b++) {
            int32_t block = sequence->blocks[b];
            assert_true(ranks->until[block] == 0 || ranks->owner[block] == sequence->id);
            ranks->owner[block] = sequence->id;
            ranks->until[block] = ranks->count;
        }
    }
}

static void ranks_end(struct ranks *ranks)
{
    ranks->first = (ranks->first + 1) % IN_FLIGHT_MAX;
    ranks->count--;
    for (int block = 0; block < BLOCK_COUNT; block++)
        ranks->until[block] -= ranks->until[block] > 0;
}

static void wanted_check(struct cox_batcher *batcher, struct wanted *wanted)
{
    struct cox_sequence *done;
    while ((done = cox_batcher_done(batcher))) {
        struct wanted *w = done->request.context;
        assert_ptr_equal(w, &wanted[done->id - 1]);
        assert_false(w->done);
        w->done = true;
        assert_int_equal(done->finish == COX_FINISH_ERROR, w->cancelled);
        uint32_t count = w->prompt_count;
        for (; count < done->token_count; count++)
            assert_int_equal(done->tokens[count], token_of(done->id, count));
        if (!w->cancelled)
            assert_true(done->tokens[count - 1] == STOP || count == w->prompt_count + w->new_max);
        cox_sequence_free(done);
    }
}

static void random_run(uint32_t seed, uint32_t in_flight)
{
    struct cox_batcher_options options = {0};
    struct wanted wanted[REQUEST_COUNT] = {0};
    struct ranks ranks = {0};
    uint32_t added = 0;
    random_state = seed;
    options.block_count = 8 + draw(BLOCK_COUNT - 7);
    options.token_count_max = 2 + draw(20);
    options.sequence_count_max = 1 + draw(8);
    options.step_count_max = in_flight;
    options.retiring_count_max = draw(10);
    struct cox_batcher *batcher = batcher_new(options);
    for (;;) {
        if (added < REQUEST_COUNT && draw(3) == 0) {
            struct wanted *w = &wanted[added++];
            w->prompt_count = 1 + draw(20);
            w->new_max = 1 + draw(12);
            add_with(batcher, w->prompt_count, w->new_max, 0, w);
        }
        wanted_check(batcher, wanted);
        if (added && draw(20) == 0) {
            struct wanted *w = &wanted[draw(added)];
            w->cancelled = w->cancelled || !w->done;
            cox_batcher_cancel(batcher, w);
        }
        wanted_check(batcher, wanted);
        const struct cox_step *step;
        int r = ranks.count < in_flight ? cox_batcher_next(batcher, &step) : COX_BUSY;
        if (!r && draw(30) > 0) {
            ranks_take(&ranks, step);
            cox_batcher_publish(batcher, ++ranks.sequence);
        } else if (!r) {
            cox_batcher_revert(batcher);
            memset(ranks.until, 0, sizeof ranks.until);
            ranks.count = 0;
        } else if (ranks.count == 0) {
            assert_int_equal(r, COX_EMPTY);
            if (added == REQUEST_COUNT)
                break;
        }
        if (ranks.count && (r || draw(3) == 0)) {
            struct cox_error error = {0};
            assert_int_equal(
                cox_batcher_commit(batcher, ranks.tokens[ranks.first], NULL, NULL, &error), 0);
            ranks_end(&ranks);
        }
    }
    for (int i = 0; i < REQUEST_COUNT; i++)
        assert_true(wanted[i].done);
    assert_int_equal(cox_batcher_free_blocks(batcher), options.block_count);
    test_release(batcher);
}

PLAIN_TEST(at_random_texts_are_right_and_blocks_of_one)
{
    for (uint32_t in_flight = 1; in_flight <= IN_FLIGHT_MAX; in_flight++)
        for (uint32_t seed = 1; seed <= 200; seed++)
            random_run(seed, in_flight);
}
