/* Steps as deltas with real workers: what the callback sees, and that a step that failed anywhere
 * had no effect anywhere. */
#include "chats.h"

/* ---- what steps are made of ---- */

static void step_pairs(struct step *s, int list, Coxswain__IntPair ***ret_pairs, size_t *ret_count,
                       const int32_t *numbers, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        coxswain__int_pair__init(&s->pairs[list][i]);
        s->pair_pointers[list][i] = &s->pairs[list][i];
        s->pairs[list][i].has_num1 = s->pairs[list][i].has_num2 = 1;
        s->pairs[list][i].num1 = numbers[2 * i];
        s->pairs[list][i].num2 = numbers[2 * i + 1];
    }
    *ret_pairs = s->pair_pointers[list];
    *ret_count = count;
}

#define STEP_COUNT 10
/* What an undisturbed run gives. */
static void chats_reference(struct chat *chats)
{
    OWN_GROUP *g = test_group_start(1, NULL);
    uint64_t base = 0;
    chats_init(chats);
    for (int i = 0; i < STEP_COUNT; i++)
        assert_int_equal(chats_step(g, chats, &base, TEST_PATIENCE_MS), 0);
}

static void expect_batch(struct test_group *g, uint32_t rank, const char *expected)
{
    OWN_COMPLETION c = {0};
    const struct test_how how = {.gather = COX_GATHER_ALL, .ranks = UINT64_C(1) << rank};
    assert_int_equal(test_call_how(g, &c, &how, "tell batch"), 0);
    assert_string_equal(c.ranks[rank].bytes, expected);
}

/* ---- what the callback sees ---- */

TEST(m8_rows_tables_moves_and_types_reach_every_rank)
{
    static const int32_t in[] = {1, 2, 3, 4}, out[] = {5, 6}, copy[] = {7, 8, 9, 10, 11, 12};
    for (uint32_t n = 1; n <= 8; n *= 2) {
        OWN_GROUP *g = test_group_start(n, NULL);
        struct chat chats[CHAT_COUNT];
        struct step s;
        OWN_COMPLETION c = {0};
        chats_init(chats);
        step_init(&s, 0, COX_FORWARD_PREFILL);
        step_row(&s, &chats[0], true);
        step_pairs(&s, 0, &s.own.model.blocks_to_swap_in, &s.own.model.n_blocks_to_swap_in, in, 2);
        step_pairs(&s, 1, &s.own.model.blocks_to_swap_out, &s.own.model.n_blocks_to_swap_out, out,
                   1);
        step_pairs(&s, 2, &s.own.model.blocks_to_copy, &s.own.model.n_blocks_to_copy, copy, 3);
        assert_int_equal(step_call(g, &s, TEST_PATIENCE_MS, &c), 0);
        uint64_t base = c.sequence;
        assert_int_equal(c.token_count, 1);
        int32_t first = c.tokens[0];
        chats[0].tokens[chats[0].count++] = first;
        for (uint32_t rank = 0; rank < n; rank++)
            expect_batch(
                g, rank,
                "type=0 tables=2 in=1>2,3>4 out=5>6 copy=7>8,9>10,11>12 finished=; id=1000 slot=1 at=0+3 emit=1 tokens=0,1,2 t0=10,11 t1=110,111");

        /* A mixed one: the known chat decodes and gets a block in each table, the new one is
         * announced; no emission. */
        step_init(&s, base, COX_FORWARD_MIXED);
        step_row(&s, &chats[0], false);
        step_row(&s, &chats[1], true);
        uint32_t append_slot[] = {1, 1}, append_table[] = {0, 1}, silent[] = {1};
        int32_t append_block[] = {12, 112};
        s.own.delta.n_append_slot = s.own.delta.n_append_table = s.own.delta.n_append_block = 2;
        s.own.delta.append_slot = append_slot;
        s.own.delta.append_table = append_table;
        s.own.delta.append_block = append_block;
        s.own.delta.n_row_silent = 1;
        s.own.delta.row_silent = silent;
        assert_int_equal(step_call(g, &s, TEST_PATIENCE_MS, &c), 0);
        base = c.sequence;
        assert_int_equal(c.token_count, 2);
        assert_int_equal(c.tokens[1], -1);
        char expected[512];
        snprintf(
            expected, sizeof expected,
            "type=3 tables=2 in= out= copy= finished=; id=1000 slot=1 at=3+1 emit=1 tokens=0,1,2,%d t0=10,11,12 t1=110,111,112; id=1001 slot=8 at=0+4 emit=0 tokens=100,101,102,103 t0=80,81 t1=180,181",
            first);
        for (uint32_t rank = 0; rank < n; rank++)
            expect_batch(g, rank, expected);

        /* A dummy keeps ranks in step, with no rows; the next one tells of an end. */
        step_init(&s, base, COX_FORWARD_DUMMY);
        assert_int_equal(step_call(g, &s, TEST_PATIENCE_MS, &c), 0);
        base = c.sequence;
        assert_int_equal(c.token_count, 0);
        step_init(&s, base, COX_FORWARD_DECODE);
        uint32_t finished[] = {8};
        s.own.delta.n_finished = 1;
        s.own.delta.finished = finished;
        assert_int_equal(step_call(g, &s, TEST_PATIENCE_MS, &c), 0);
        for (uint32_t rank = 0; rank < n; rank++)
            expect_batch(g, rank, "type=1 tables=2 in= out= copy= finished=8");
        /* Ended without a step: by id, and only those that live. */
        const int64_t ids[] = {1000, 1001, 77};
        assert_ok(cox_executor_cleanup(test_group_executor(g), ids, 3,
                                       cox_deadline_after_ms(TEST_PATIENCE_MS), test_err()));
        assert_int_equal(test_call(g, &c, "tell log"), 0);
        for (uint32_t rank = 0; rank < n; rank++)
            assert_string_equal(c.ranks[rank].bytes, "cleanup 1;");
    }
}

TEST(s5_tokens_are_the_same_for_every_world_size)
{
    struct chat reference[CHAT_COUNT], chats[CHAT_COUNT];
    chats_reference(reference);
    for (uint32_t n = 1; n <= 8; n *= 2) {
        OWN_GROUP *g = test_group_start(n, NULL);
        uint64_t base = 0;
        chats_init(chats);
        for (int i = 0; i < STEP_COUNT; i++)
            assert_int_equal(chats_step(g, chats, &base, TEST_PATIENCE_MS), 0);
        assert_memory_equal(chats, reference, sizeof chats);
    }
}

/* ---- a base that is not there ---- */

TEST(s1_a_delta_on_a_wrong_base_is_stale_and_without_effect)
{
    struct chat reference[CHAT_COUNT];
    chats_reference(reference);
    for (uint32_t n = 1; n <= 8; n *= 2) {
        OWN_GROUP *g = test_group_start(n, NULL);
        struct chat chats[CHAT_COUNT];
        OWN_COMPLETION told = {0};
        OWN_COMPLETION c = {0};
        uint64_t base = 0, earlier = 0;
        chats_init(chats);
        for (int i = 0; i < STEP_COUNT; i++) {
            if (i > 1) {
                assert_int_equal(test_call(g, &told, "tell batch"), 0);
                const uint64_t wrong[] = {earlier, base + 1, base + 1000, UINT64_MAX};
                for (size_t w = 0; w < 4; w++) {
                    struct step s;
                    step_init(&s, wrong[w], COX_FORWARD_DECODE);
                    step_row(&s, &chats[0], false);
                    assert_int_equal(step_call(g, &s, TEST_PATIENCE_MS, &c), COX_STALE);
                    for (uint32_t rank = 0; rank < n; rank++)
                        assert_true(c.ranks[rank].outcome == COX_OUTCOME_LATE ||
                                    (c.ranks[rank].outcome == COX_OUTCOME_ERROR &&
                                     c.ranks[rank].code == COX_STALE));
                }
                assert_int_equal(test_call(g, &c, "tell batch"), 0);
                for (uint32_t rank = 0; rank < n; rank++)
                    assert_string_equal(c.ranks[rank].bytes, told.ranks[rank].bytes);
            }
            earlier = base ? base : earlier;
            assert_int_equal(chats_step(g, chats, &base, TEST_PATIENCE_MS),
                             0); /* the right base still counts */
        }
        assert_memory_equal(chats, reference, sizeof chats);
    }
}

/* ---- steps that fail ---- */

/* Any rank, any step, any way: afterwards everything is announced again, and the tokens are those
 * of a quiet run. */
TEST(s2_a_step_that_failed_on_one_rank_took_effect_on_none)
{
    struct chat reference[CHAT_COUNT], chats[CHAT_COUNT];
    static const struct {
        const char *trick;
        int status;
    } tricks[] = {{"fail", COX_REJECTED}, {"diverge", COX_DIVERGED}, {"block", COX_TIMEOUT}};
    chats_reference(reference);
    for (uint32_t n = 1; n <= 8; n *= 2) {
        OWN_GROUP *g = test_group_start(n, NULL);
        struct test_pipe *pipe = test_pipe_new();
        size_t blocked = 0;
        for (size_t t = 0; t < 3; t++)
            for (uint32_t bad = 0; bad<n; bad += n> 2 ? n - 1 : 1)
                for (int at = 1; at <= 7; at += 3) {
                    if (tricks[t].status == COX_DIVERGED && n == 1)
                        continue; /* one rank agrees with itself */
                    bool block = tricks[t].status == COX_TIMEOUT;
                    uint64_t base = 0;
                    int failures = 0;
                    chats_init(chats);
                    assert_int_equal(test_call(g, NULL, "only %" PRIu32 " step %s %d %s", bad,
                                               tricks[t].trick, at, test_pipe_path(pipe)),
                                     0);
                    for (int done = 0, attempt = 1; done < STEP_COUNT; attempt++) {
                        int r = chats_step(g, chats, &base,
                                           block && attempt == at ? 250 : TEST_PATIENCE_MS);
                        done += r == 0;
                        if (r == 0)
                            continue;
                        failures++;
                        assert_int_equal(attempt, at);
                        assert_int_equal(r, tricks[t].status);
                        if (block) {
                            test_await_lines(g, -1, "blocked", ++blocked);
                            test_pipe_release(pipe, 1);
                        }
                    }
                    assert_int_equal(failures, 1);
                    assert_memory_equal(chats, reference, sizeof chats);
                }
    }
}

/* A rank's table stays where it was: the same delta, on the same base, is as good as before. */
TEST(s2_a_failed_step_leaves_the_table_of_the_rank)
{
    struct chat reference[CHAT_COUNT], chats[CHAT_COUNT];
    chats_reference(reference);
    OWN_GROUP *g = test_group_start(1, NULL);
    uint64_t base = 0;
    chats_init(chats);
    for (int done = 0; done < STEP_COUNT; done++) {
        if (base) {
            uint64_t lost = base;
            assert_int_equal(test_call(g, NULL, "step fail 1"), 0);
            assert_int_equal(chats_step(g, chats, &lost, TEST_PATIENCE_MS), COX_REJECTED);
        }
        assert_int_equal(chats_step(g, chats, &base, TEST_PATIENCE_MS), 0);
    }
    assert_memory_equal(chats, reference, sizeof chats);
}

GROUP_TEST(s2_divergence_names_the_ranks_that_disagree, 4)
{
    struct chat chats[CHAT_COUNT];
    struct step s;
    OWN_COMPLETION c = {0};
    chats_init(chats);
    assert_int_equal(test_call(g, NULL, "only 2 step diverge 1"), 0);
    step_init(&s, 0, COX_FORWARD_PREFILL);
    step_row(&s, &chats[0], true);
    assert_int_equal(step_call(g, &s, TEST_PATIENCE_MS, &c), COX_DIVERGED);
    assert_contains(c.text, "rank 2 has ");
    assert_null(strstr(c.text, "rank 1 has "));
}

/* Rank 1 fails step A while rank 0 is still inside it and step B is published already. Then A and B
 * are void: rank 0 notices inside A, and never runs B. */
GROUP_TEST(s2_what_was_published_behind_a_failed_step_is_void, 2)
{
    struct test_pipe *first = test_pipe_new(), *second = test_pipe_new();
    struct chat chats[CHAT_COUNT];
    struct step a, b;
    chats_init(chats);
    uint64_t base = 0;
    assert_int_equal(chats_step(g, chats, &base, TEST_PATIENCE_MS), 0);
    assert_int_equal(cox_executor_set_handler(executor, COX_CHANNEL_EXECUTE, test_handler, g), 0);
    /* A pipe each, so that the order is the test's. */
    assert_int_equal(test_call(g, NULL, "each step abort 1 %s|step block 1 %s",
                               test_pipe_path(first), test_pipe_path(second)),
                     0);
    assert_int_equal(test_call(g, NULL, "only 1 step fail 1 %s", test_pipe_path(second)), 0);
    step_init(&a, base, COX_FORWARD_DECODE);
    step_row(&a, &chats[0], false);
    assert_int_equal(step_submit(g, &a), 0);
    test_await_lines(g, -1, "blocked", 2);
    step_init(&b, 0, COX_FORWARD_DUMMY); /* one that runs on any base */
    assert_int_equal(step_submit(g, &b), 0);
    test_pipe_release(second, 1);
    const struct test_completion *c = test_await(g, 0);
    assert_int_equal(c->status, COX_REJECTED);
    assert_int_equal(c->ranks[0].outcome, COX_OUTCOME_LATE);
    assert_contains(c->ranks[1].text, "fails as told");
    test_pipe_release(first, 1);
    test_await_lines(g, 0, "the step is void", 1);
    c = test_await(g, 1);
    assert_int_equal(c->status, COX_ABORTED);
    /* Rank 0 never ran B: the last it saw is A. */
    OWN_COMPLETION told = {0};
    assert_int_equal(test_call(g, &told, "tell batch"), 0);
    assert_memory_equal(told.ranks[0].bytes, "type=1 ", 7);
    /* All is well again. */
    base = 0;
    assert_int_equal(chats_step(g, chats, &base, TEST_PATIENCE_MS), 0);
    struct chat reference[CHAT_COUNT];
    chats_reference(reference);
    for (uint32_t i = 0; i < CHAT_COUNT; i++)
        assert_memory_equal(chats[i].tokens, reference[i].tokens,
                            chats[i].count * sizeof chats[i].tokens[0]);
}
