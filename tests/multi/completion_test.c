/* The content of a completion when several things go wrong at once, and its punctuality when
 * another thread is late. */
#include "coordinator/executor/core.h"
#include "coordinator/executor/executor_internal.h"
#include "steps.h"

/* ---- what is said ---- */

/* Rank 0 fails, with these words, because rank 2 has died. Every time. */
static void expect_death_reported(const char *words)
{
    char pipe[64];
    snprintf(pipe, sizeof pipe, "/tmp/coxswain_test_%d", (int)getpid());
    assert_int_equal(mkfifo(pipe, 0600), 0);
    for (int k = 0; k < 10; k++) {
        OWN_GROUP *g = test_group_start(3, NULL);
        OWN_COMPLETION c = {0};
        const struct test_how how = {.gather = COX_GATHER_ALL, .ranks = 5};
        assert_int_equal(
            test_call_how(g, &c, &how, "each lose %s %s|echo|drop %s", pipe, words, pipe),
            COX_PEER_DEAD);
        if (c.ranks[0].outcome == COX_OUTCOME_ERROR) { /* else the death was faster */
            assert_string_equal(c.ranks[0].text, words);
            assert_contains(c.text, "rank 0 failed: ");
        }
        assert_int_equal(c.ranks[2].outcome, COX_OUTCOME_DEAD);
        assert_int_equal(c.ranks[2].signal, SIGKILL);
        assert_contains(test_error_text(g), "rank 2");
        assert_contains(test_error_text(g), "killed by signal 9");
    }
    unlink(pipe);
}

TEST(p1_the_death_that_made_the_others_fail_is_reported)
{
    expect_death_reported("the peer closed the connection");
}

TEST(p3_a_death_is_reported_before_a_long_story)
{
    char story[1000];
    memset(story, 'x', sizeof story - 1);
    story[sizeof story - 1] = '\0';
    expect_death_reported(story);
}

static bool ranges_reported(uint64_t timeout_ms)
{
    static const char silent[] = "ranks 0-6 never took it, silent for up to ";
    OWN_GROUP *g = test_group_start(8, NULL);
    OWN_COMPLETION c = {0};
    const struct test_how how = {.gather = COX_GATHER_ALL, .timeout_ms = timeout_ms};
    for (uint32_t rank = 0; rank < 7; rank++)
        test_stop_process(test_pid(g, rank));
    const uint64_t begin_ns = cox_now_ns();
    assert_int_equal(test_call_how(g, &c, &how, "echo x"), COX_TIMEOUT);
    if (!strstr(test_error_text(g), "1 of 8 ranks replied"))
        return false;
    assert_contains(test_error_text(g), silent);
    const double seconds = strtod(strstr(test_error_text(g), silent) + strlen(silent), NULL);
    assert_true(seconds >= 0.19 && seconds <= (double)(cox_now_ns() - begin_ns) / 1e9 + 0.01);
    for (uint32_t rank = 0; rank < 7; rank++)
        assert_contains(c.ranks[rank].text, "alive but stopped by a signal");
    return true;
}

TEST(p3_many_late_ranks_are_reported_as_ranges)
{
    test_with_longer_deadlines(ranges_reported);
}

/* So that the error need not wait for it; unless the thread gets no processor just then. */
GROUP_TEST(p3_what_holds_a_rank_is_read_before_the_deadline, 8)
{
    struct cox_collector *collector = &executor->collectors[COX_CHANNEL_EXECUTE];
    const struct test_how how = {.gather = COX_GATHER_ALL, .timeout_ms = 50};
    const pid_t pid = cox_executor_pid(executor, 5);
    bool looked = false;
    for (int i = 0; i < 100 && !looked; i++) {
        OWN_COMPLETION c = {0};
        test_stop_process(pid);
        test_call_in_vain(g, &c, &how, "echo x");
        assert_contains(c.ranks[5].text, "alive but stopped by a signal");
        const struct cox_entry *entry = &collector->entries[cox_geometry_frame(
            c.sequence, collector->channel->control->geometry.depth)];
        looked = entry->look_rank > 5 && entry->looked_ns < entry->deadline_ns;
        assert_true(!looked || entry->looked_ns > entry->published_ns);
        kill(pid, SIGCONT);
        test_expect_echo(g, "y");
    }
    assert_true(looked);
}

/* The others are inside the step, and wait for it. */
TEST(p3_a_rank_that_cannot_go_on_is_named_first)
{
    for (uint32_t n = 2; n <= 8; n *= 4) {
        OWN_GROUP *g = test_group_start(n, NULL);
        struct test_pipe *pipe = test_pipe_new();
        OWN_COMPLETION c = {0};
        const struct test_how how = {.gather = COX_GATHER_ALL, .timeout_ms = 1500};
        const pid_t pid = cox_executor_pid(test_group_executor(g), n - 1);
        char first[128], status[64];
        test_stop_process(pid);
        assert_int_equal(test_call_how(g, &c, &how, "block %s", test_pipe_path(pipe)), COX_TIMEOUT);
        snprintf(first, sizeof first,
                 "0 of %u ranks replied; rank %u (pid %d) had not replied: never took it, silent "
                 "for ",
                 n, n - 1, (int)pid);
        assert_contains(test_error_text(g), first);
        assert_contains(test_error_text(g), " s, alive but stopped by a signal; rank");
        snprintf(first, sizeof first, " s, alive, and may wait for rank %u", n - 1);
        assert_contains(c.ranks[0].text, first);
        if (n > 4)
            assert_contains(test_error_text(g), "; ranks 0-6 took it and have not replied");
        struct cox_executor_status group;
        struct cox_rank_status ranks[8];
        cox_executor_read_status(test_group_executor(g), &group, ranks);
        snprintf(status, sizeof status, "has not taken execute %u since ", 1);
        assert_true(strncmp(ranks[n - 1].trouble, status, strlen(status)) == 0);
        assert_true(ranks[n - 1].stopped);
        assert_string_equal(ranks[0].trouble, "");
        test_pipe_release(pipe, n);
        kill(pid, SIGCONT);
    }
}

GROUP_TEST(m4_rank0_is_the_lowest_asked_or_none, 3)
{
    OWN_COMPLETION c = {0};
    const struct test_how how = {.gather = COX_GATHER_RANK0};
    test_stop_process(cox_executor_pid(executor, 2));
    assert_int_equal(test_call_how(g, &c, &how, "each fail 7 no|echo yes|echo late"), COX_REJECTED);
    assert_int_equal(c.payload_rank, -1);
    assert_false(c.ranks[1].has_payload);
    kill(cox_executor_pid(executor, 2), SIGCONT);
    const struct test_how upper = {.gather = COX_GATHER_RANK0, .ranks = 6};
    assert_int_equal(test_call_how(g, &c, &upper, "echo yes"), 0);
    assert_int_equal(c.payload_rank, 1);
    assert_string_equal(c.ranks[1].bytes, "yes");
}

GROUP_TEST(m3_a_message_of_the_number_of_bytes_is_refused, 1)
{
    Coxswain__ExecuteRequest request = test_request((Coxswain__ExecuteType)-1, 0, NULL);
    assert_int_equal(cox_executor_call(executor, &request,
                                       SUBMIT_WITH(.deadline_ns = COX_DEADLINE_NEVER), NULL, NULL,
                                       NULL),
                     COX_INVALID);
    test_expect_echo(g, "x");
}

/* ---- in time ---- */

struct held {
    struct cox_executor *executor, *other;
    sem_t inside, go_on;
    _Atomic int runs, called, replaced;
};

static void held_init(struct held *held, struct cox_executor *executor)
{
    *held = (struct held){.executor = executor};
    sem_init(&held->inside, 0, 0);
    sem_init(&held->go_on, 0, 0);
}

static void hold(void *context, const struct cox_completion *completion)
{
    struct held *held = context;
    (void)completion;
    if (atomic_fetch_add(&held->runs, 1) > 0)
        return;
    sem_post(&held->inside);
    test_sem_await(&held->go_on);
}

static int submit_echo(struct cox_executor *executor)
{
    return cox_executor_submit_opaque(executor, "echo x", 6,
                                      SUBMIT_WITH(.deadline_ns = COX_DEADLINE_NEVER), NULL, NULL);
}

GROUP_TEST(b2_a_call_does_not_wait_for_a_handler, 2)
{
    struct held held;
    held_init(&held, executor);
    assert_int_equal(cox_executor_set_handler(executor, COX_CHANNEL_EXECUTE, hold, &held), 0);
    assert_int_equal(submit_echo(executor), 0);
    assert_true(test_sem_await(&held.inside));
    /* More calls than the channel has frames: none of them stays occupied by the handler. */
    for (int i = 0; i < 40; i++)
        test_expect_echo(g, "meanwhile");
    assert_int_equal(atomic_load(&held.runs), 1);
    sem_post(&held.go_on);
    test_expect_echo(g, "seen");
    assert_int_equal(atomic_load(&held.runs), 1);
}

static void call_the_other(void *context, const struct cox_completion *completion)
{
    struct held *held = context;
    (void)completion;
    sem_post(&held->inside);
    test_sem_await(&held->go_on);
    int r = cox_executor_call_opaque(held->other, "echo x", 6,
                                     SUBMIT_WITH(.deadline_ns = cox_deadline_after_ms(200)), NULL,
                                     NULL, NULL);
    atomic_store(&held->called, r == 0 ? 1 : r + 1);
}

/* Each handler waits for the other group's response thread, which is in the other handler. */
TEST(b2_two_groups_that_call_each_other_come_out)
{
    struct test_group *groups[2];
    struct held held[2];
    for (int i = 0; i < 2; i++) {
        groups[i] = test_group_start(1, NULL);
        held_init(&held[i], test_group_executor(groups[i]));
    }
    for (int i = 0; i < 2; i++) {
        held[i].other = held[!i].executor;
        assert_ok(cox_executor_set_handler(held[i].executor, COX_CHANNEL_EXECUTE, call_the_other,
                                           &held[i]));
        assert_int_equal(submit_echo(held[i].executor), 0);
    }
    for (int i = 0; i < 2; i++)
        assert_true(test_sem_await(&held[i].inside));
    for (int i = 0; i < 2; i++)
        sem_post(&held[i].go_on);
    for (int i = 0; i < 2; i++)
        cox_executor_stop(held[i].executor);
    /* At least one of them waited in vain; both came out, or the stops would not have. */
    assert_true(atomic_load(&held[0].called) && atomic_load(&held[1].called));
    for (int i = 0; i < 2; i++)
        test_group_free(groups[i]);
}

static void replace_the_other(void *context, const struct cox_completion *completion)
{
    struct held *held = context;
    (void)completion;
    sem_post(&held->inside);
    test_sem_await(&held->go_on);
    atomic_store(&held->replaced,
                 cox_executor_set_handler(held->executor, COX_CHANNEL_TRANSFER, hold, held));
    sem_post(&held->inside);
}

GROUP_TEST(m5_b2_handlers_that_set_each_other_are_refused, 1)
{
    struct held own, transfer;
    held_init(&own, executor);
    held_init(&transfer, executor);
    assert_ok(cox_executor_set_handler(own.executor, COX_CHANNEL_EXECUTE, replace_the_other, &own));
    assert_ok(cox_executor_set_handler(own.executor, COX_CHANNEL_TRANSFER, hold, &transfer));
    Coxswain__PullKVRequest pull = COXSWAIN__PULL_KVREQUEST__INIT;
    Coxswain__ExecuteRequest request = REQUEST_OF(KV_TRANSFER, PULL_KV_REQUEST, &pull);
    assert_ok(cox_executor_submit(
        executor, &request, SUBMIT_WITH(.deadline_ns = COX_DEADLINE_NEVER), NULL, test_err()));
    assert_true(test_sem_await(&transfer.inside));
    assert_int_equal(submit_echo(own.executor), 0);
    assert_true(test_sem_await(&own.inside));
    sem_post(&own.go_on);
    assert_true(test_sem_await(&own.inside)); /* again: it was refused, and did not wait */
    assert_int_equal(atomic_load(&own.replaced), COX_DEADLOCK);
    sem_post(&transfer.go_on);
}
