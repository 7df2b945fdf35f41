/*
 * One dead rank is started again while the others live: requirement P8, the channel's part of it.
 */
#include "testing.h"

GROUPS_TEST(p8_a_dead_rank_is_replaced_while_the_others_live)
{
    pid_t pids[8];
    test_expect_echo(g, "before");
    for (uint32_t rank = 0; rank < n; rank++) {
        for (uint32_t other = 0; other < n; other++)
            pids[other] = test_pid(g, other);
        unsigned before = test_served(g, (rank + 1) % n);
        test_kill_rank(g, rank);
        test_restart_rank(g, rank);
        test_expect_echo(g, "after");
        for (uint32_t other = 0; other < n; other++)
            assert_int_equal(test_pid(g, other) == pids[other], other != rank);
        if (n > 1) /* the echo, and this one */
            assert_int_equal(test_served(g, (rank + 1) % n), before + 2);
        assert_int_equal(test_served(g, rank), 2);
    }
}

GROUP_TEST(p8_a_restart_of_a_live_rank_does_nothing, 2)
{
    pid_t pid = test_pid(g, 1);
    test_restart_rank(g, 1);
    assert_int_equal(test_pid(g, 1), pid);
    test_kill_rank(g, 1);
    test_restart_rank(g, 1);
    pid = test_pid(g, 1);
    test_restart_rank(g, 1);
    assert_int_equal(test_pid(g, 1), pid);
    test_expect_echo(g, "x");
}

GROUP_TEST(p8_what_the_others_do_goes_on, 3)
{
    struct test_pipe *pipe = test_pipe_new();
    const struct test_how how = {.gather = COX_GATHER_ALL, .ranks = 1};
    assert_int_equal(test_submit(g, &how, "block %s", test_pipe_path(pipe)), 0);
    test_await_lines(g, 0, "blocked", 1);
    test_kill_rank(g, 2);
    test_restart_rank(g, 2);
    const struct test_how beside = {.gather = COX_GATHER_ALL, .ranks = 6};
    OWN_COMPLETION c = {0};
    assert_int_equal(test_call_how(g, &c, &beside, "echo beside"), 0);
    assert_string_equal(c.ranks[2].bytes, "beside");
    assert_int_equal(test_completion_count(g), 0);
    test_pipe_release(pipe, 1);
    assert_string_equal(test_await(g, 0)->ranks[0].bytes, "released");
    test_expect_echo(g, "all");
}

TEST(p8_p4_the_next_incarnation_owes_nothing)
{
    for (uint32_t depth = 1; depth <= 4; depth *= 2) {
        OWN_GROUP *g = test_group_start(2, START_WITH(.depth = depth));
        struct test_how brief = {.gather = COX_GATHER_ALL, .timeout_ms = 100};
        test_stop_process(test_pid(g, 1));
        assert_int_equal(test_call_how(g, NULL, &brief, "echo too late"), COX_TIMEOUT);
        test_kill_rank(g, 1);
        test_restart_rank(g, 1);
        for (uint32_t k = 0; k < 3 * depth; k++) {
            char text[32];
            snprintf(text, sizeof text, "request %" PRIu32, k);
            test_expect_echo(g, text);
        }
        /* Nor has it replied to what the dead one owed. */
        struct cox_executor_status status;
        struct cox_rank_status ranks[2];
        cox_executor_read_status(test_group_executor(g), &status, ranks);
        assert_int_equal(ranks[1].late_replies, 0);
    }
}

GROUP_TEST(p8_every_channel_works_again, 2)
{
    test_kill_rank(g, 1);
    test_restart_rank(g, 1);
    const struct test_how how = {.gather = COX_GATHER_ALL, .ranks = 2};
    assert_int_equal(test_call_how(g, NULL, &how, "fault of the new one"), 0);
    test_await_faults(g, 1);
    assert_string_equal(test_fault(g, 0), "1 of the new one");
    struct cox_link_status links;
    assert_ok(cox_executor_link_status(executor, test_patience(), &links, test_err()));
    cox_link_status_deinit(&links);
    struct cox_recover_result results[2];
    assert_ok(
        cox_executor_recover(executor, COX_RECOVER_CLEAR, test_patience(), results, test_err()));
}

GROUP_TEST(p8_what_cannot_be_restarted_is_refused, 2)
{
    assert_refused(cox_executor_restart(executor, 2, test_patience(), test_err()), COX_INVALID,
                   "there is no rank 2");
}

GROUP_TEST_WITH(p8_p7_nothing_grows, 2, .name = NULL)
{
    const char *name = cox_executor_name(executor);
    /* Every rank has logged on, and no connection of a dead one is there. */
    test_await_socket(g);
    const size_t fds = test_count_fds();
    for (int k = 0; k < 30; k++) {
        test_kill_rank(g, (uint32_t)k & 1);
        test_restart_rank(g, (uint32_t)k & 1);
        assert_int_equal(test_count_names(name), 0);
    }
    test_await_socket(g);
    assert_int_equal(test_count_fds(), fds);
    test_expect_echo(g, "x");
}
