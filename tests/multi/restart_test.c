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

/* The new process does not make it: killed before it attached, or it never does. The group is as
 * before, and the next try can succeed. */
TEST(p8_a_restart_that_dies_half_way_is_done_again)
{
    const char *const fragile[] = {test_worker_program(), "dies", "2", "3", NULL};
    OWN_GROUP *g = test_group_start(2, START_WITH(.workers.command = fragile));
    test_kill_rank(g, 1);
    for (int k = 0; k < 2; k++) {
        assert_refused(cox_executor_restart(test_group_executor(g), 1, test_patience(), test_err()),
                       COX_PEER_DEAD, "rank 1");
        assert_contains(test_error.text, "killed by signal 9");
        const struct test_how living = {.gather = COX_GATHER_ALL, .ranks = 1};
        assert_int_equal(test_call_how(g, NULL, &living, "echo alone"), 0);
        assert_int_equal(test_call(g, NULL, "echo both"), COX_PEER_DEAD);
    }
    test_restart_rank(g, 1);
    test_expect_echo(g, "both");
}

TEST(p8_b2_a_restart_that_never_attaches_ends_at_its_deadline)
{
    const char *const slow[] = {test_worker_program(), "sleeps", "2", NULL};
    OWN_GROUP *g = test_group_start(2, START_WITH(.workers.command = slow));
    test_kill_rank(g, 0);
    assert_refused(
        cox_executor_restart(test_group_executor(g), 0, cox_deadline_after_ms(200), test_err()),
        COX_TIMEOUT, "rank 0");
    assert_contains(test_error.text, "did not attach in time");
    assert_int_equal(test_call(g, NULL, "echo both"), COX_PEER_DEAD);
    test_restart_rank(g, 0);
    test_expect_echo(g, "both");
}

struct restarter {
    struct cox_executor *executor;
    uint32_t rank;
    int status;
};

static void *restarter_main(void *argument)
{
    struct restarter *restarter = argument;
    restarter->status =
        cox_executor_restart(restarter->executor, restarter->rank, test_patience(), NULL);
    return NULL;
}

GROUP_TEST(p8_two_ranks_at_once, 4)
{
    for (int k = 0; k < 5; k++) {
        struct restarter restarters[2];
        pthread_t threads[2];
        for (uint32_t i = 0; i < 2; i++) {
            test_kill_rank(g, 2 * i + 1);
            restarters[i] =
                (struct restarter){.executor = test_group_executor(g), .rank = 2 * i + 1};
        }
        for (int i = 0; i < 2; i++)
            assert_int_equal(pthread_create(&threads[i], NULL, restarter_main, &restarters[i]), 0);
        for (int i = 0; i < 2; i++) {
            pthread_join(threads[i], NULL);
            assert_int_equal(restarters[i].status, 0);
        }
        test_expect_echo(g, "all four");
    }
}

TEST(m15_a_stop_ends_a_restart)
{
    const char *const slow[] = {test_worker_program(), "sleeps", "2", NULL};
    OWN_GROUP *g = test_group_start(2, START_WITH(.workers.command = slow));
    test_kill_rank(g, 1);
    struct restarter restarter = {.executor = test_group_executor(g), .rank = 1};
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, restarter_main, &restarter), 0);
    test_await_lines(g, 1, "sleeps as told", 1);
    cox_executor_stop(test_group_executor(g));
    pthread_join(thread, NULL);
    assert_int_equal(restarter.status, COX_CLOSED);
    assert_int_equal(cox_executor_restart(test_group_executor(g), 1, test_patience(), NULL),
                     COX_CLOSED);
}

TEST(p8_through_a_wrapper)
{
    char line[300];
    snprintf(line, sizeof line, "%s \"$@\"; exit $?", test_worker_program());
    const char *const wrapped[] = {"sh", "-c", line, "worker", NULL};
    OWN_GROUP *g = test_group_start(2, START_WITH(.workers.command = wrapped));
    for (int k = 0; k < 3; k++) {
        test_kill_rank(g, 1);
        test_restart_rank(g, 1);
        test_expect_echo(g, "through a wrapper");
    }
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
