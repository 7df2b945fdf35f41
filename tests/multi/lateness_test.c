/* Late ranks: their replies are never taken for others, their frames are never overwritten, and
 * only their channel waits for them. */
#include "proto/executor.pb-c.h"
#include "testing.h"

static struct cox_channel_stats stats_of(struct test_group *g)
{
    return test_stats(test_group_executor(g), COX_CHANNEL_EXECUTE);
}

/* Every second request ends at its deadline while one rank holds it; the replies that come later
 * are replies to nothing. Each reply names its request, so that a swapped one is seen. */
GROUP_TEST(p4_a_late_reply_is_never_taken_for_another, 2)
{
    struct test_pipe *pipe = test_pipe_new();
    int late_count = 0;
    for (int round = 0; round < 1000; round++) {
        const struct test_how brief = {.gather = COX_GATHER_ALL, .timeout_ms = 2};
        OWN_COMPLETION c = {0};
        char expected[32];
        /* The call waits for room until the late rank of the round before has replied. */
        snprintf(expected, sizeof expected, "%d", round);
        int r = test_call_how(g, &c, &test_all, "echo %d", round);
        if (r)
            fail_msg("round %d: %s", round, test_error_text(g));
        for (uint32_t rank = 0; rank < 2; rank++)
            assert_string_equal(c.ranks[rank].bytes, expected);

        int bad = round % 2;
        test_call_in_vain(g, &c, &brief, "only %d block %s", bad, test_pipe_path(pipe));
        assert_int_equal(c.status, COX_TIMEOUT);
        assert_int_equal(c.ranks[bad].outcome, COX_OUTCOME_LATE);
        for (uint32_t rank = 0; rank < 2; rank++)
            late_count += c.ranks[rank].outcome == COX_OUTCOME_LATE;
        test_pipe_release(pipe, 1);
    }
    test_expect_echo(g, "the end");
    struct cox_channel_stats stats = stats_of(g);
    assert_int_equal(stats.timeouts, 1000);
    assert_int_equal(stats.late_replies, late_count);
    assert_int_equal(stats.completed, 2001);
    assert_int_equal(stats.submitted, 2001);
}

/* The same with several requests in flight when the deadline comes. */
GROUP_TEST(p4_b50_late_replies_of_a_full_pipeline_are_dropped, 2)
{
    struct test_pipe *pipe = test_pipe_new();
    size_t n = 0, late_count = 0;
    for (int round = 0; round < 100; round++) {
        const struct test_how brief = {.gather = COX_GATHER_ALL, .timeout_ms = 5};
        char blocks[128];
        snprintf(blocks, sizeof blocks, "only 1 block %s", test_pipe_path(pipe));
        assert_int_equal(test_submit_persist(g, &brief, blocks), 0);
        size_t more = 0;
        while (more < 3 && test_submit(g, &brief, "echo dead %d", round) == 0)
            more++;
        for (size_t i = 0; i <= more; i++) {
            const struct test_completion *c = test_await(g, n++);
            assert_int_equal(c->status, COX_TIMEOUT);
            for (uint32_t rank = 0; rank < 2; rank++)
                late_count += c->ranks[rank].outcome == COX_OUTCOME_LATE;
        }
        test_pipe_release(pipe, 1);
        char live[32];
        snprintf(live, sizeof live, "echo live %d", round);
        assert_int_equal(test_submit_persist(g, &test_all, live), 0);
        const struct test_completion *c = test_await(g, n++);
        assert_int_equal(c->status, 0);
        for (uint32_t rank = 0; rank < 2; rank++)
            assert_string_equal(c->ranks[rank].bytes, live + strlen("echo "));
    }
    assert_int_equal(stats_of(g).late_replies, late_count);
}

static bool silent_rank_named(uint64_t timeout_ms)
{
    OWN_GROUP *g = test_group_start(4, NULL);
    struct test_pipe *pipe = test_pipe_new();
    /* Rank 3 does not even take it: it is stopped. Rank 1 took it and hangs. The others reply. */
    pid_t stopped = test_pid(g, 3);
    test_stop_process(stopped);
    const struct test_how brief = {.gather = COX_GATHER_ALL, .timeout_ms = timeout_ms};
    OWN_COMPLETION c = {0};
    const uint64_t begin_ns = cox_now_ns();
    assert_int_equal(test_call_how(g, &c, &brief, "only 1 block %s", test_pipe_path(pipe)),
                     COX_TIMEOUT);
    if (!strstr(test_error_text(g), "2 of 4 ranks replied") || !c.ranks[1].taken) {
        test_pipe_release(pipe, 1);
        return false;
    }
    assert_int_equal(c.ranks[0].outcome, COX_OUTCOME_OK);
    assert_int_equal(c.ranks[1].outcome, COX_OUTCOME_LATE);
    assert_int_equal(c.ranks[2].outcome, COX_OUTCOME_OK);
    assert_int_equal(c.ranks[3].outcome, COX_OUTCOME_LATE);
    assert_false(c.ranks[3].taken);
    assert_contains(c.ranks[1].text, "running");
    assert_contains(c.ranks[3].text, "never took it");
    assert_true(c.ranks[1].silent_ns > 100 * COX_NSEC_PER_MSEC);
    assert_true(c.ranks[3].silent_ns > 100 * COX_NSEC_PER_MSEC);
    /* From the request on, by a clock that may be a tick behind. */
    assert_true(c.ranks[1].silent_ns < cox_now_ns() - begin_ns + 10 * COX_NSEC_PER_MSEC);
    assert_contains(c.text, "sequence 1");
    assert_contains(c.text, "OPAQUE");
    assert_contains(c.text, "alive");
    char pid[32];
    snprintf(pid, sizeof pid, "rank 3 (pid %d)", stopped);
    assert_contains(c.text, pid);
    assert_int_equal(kill(stopped, SIGCONT), 0);
    test_pipe_release(pipe, 1);
    test_expect_echo(g, "awake");
    return true;
}

TEST(p3_a_timeout_names_the_silent_rank_and_its_state)
{
    test_with_longer_deadlines(silent_rank_named);
}

GROUPS_TEST(s4_a_late_rank_blocks_its_channel_only)
{
    struct test_pipe *pipe = test_pipe_new();
    const struct test_how brief = {.gather = COX_GATHER_RANK0, .timeout_ms = 20};
    uint32_t bad = n - 1, late_count = 0;
    OWN_COMPLETION c = {0};
    test_call_in_vain(g, &c, &brief, "only %" PRIu32 " block %s", bad, test_pipe_path(pipe));
    for (uint32_t rank = 0; rank < n; rank++)
        late_count += c.ranks[rank].outcome == COX_OUTCOME_LATE;
    /* execute does not run ahead: submit's error names rank and request. Ranks that were only
     * slow reply. */
    char named[64];
    snprintf(named, sizeof named, "rank %" PRIu32 " still owes the reply to sequence 1", bad);
    AWAIT((assert_int_equal(test_submit(g, &test_all, "echo x"), COX_LATE),
           strstr(test_error_text(g), named)));
    if (n > 1) { /* also for ranks that owe nothing */
        const struct test_how others = {.gather = COX_GATHER_ALL, .ranks = 1};
        assert_int_equal(test_submit(g, &others, "echo x"), COX_LATE);
    }
    /* The other channels go on. */
    struct cox_link_status links = {0};
    assert_ok(cox_executor_link_status(executor, test_patience(), &links, test_err()));
    cox_link_status_deinit(&links);
    struct cox_recover_result results[8];
    assert_ok(
        cox_executor_recover(executor, COX_RECOVER_CLEAR, test_patience(), results, test_err()));
    Coxswain__PullKVRequest pull = COXSWAIN__PULL_KVREQUEST__INIT;
    struct cox_pull_result *pulled = NULL;
    size_t count = 0;
    assert_ok(cox_executor_pull_kv(executor, &pull, test_patience(), &pulled, &count, test_err()));
    free(pulled);
    assert_int_equal(test_submit(g, &test_all, "echo x"), COX_LATE);
    /* Usable as soon as the rank has replied. */
    test_pipe_release(pipe, 1);
    assert_int_equal(test_submit_persist(g, &test_all, "echo back"), 0);
    assert_string_equal(test_await(g, 0)->ranks[bad].bytes, "back");
    assert_int_equal(stats_of(g).late_replies, late_count);
}

/* The handler gets the second completion as well, in a group with a response thread. */
GROUP_TEST(s4_the_handler_gets_that_the_late_rank_is_free, 2)
{
    struct test_pipe *pipe = test_pipe_new();
    int context;
    const struct test_how late = {
        .gather = COX_GATHER_ALL, .timeout_ms = 20, .context = &context, .report_late = true};
    for (size_t n = 0; n < 9; n += 3) {
        int r;
        do /* on a machine that was held up the deadline has passed before */
            r = test_submit(g, &late, "only 1 block %s", test_pipe_path(pipe));
        while (r == COX_TIMEOUT);
        assert_int_equal(r, 0);
        const struct test_completion *first = test_await(g, n);
        assert_int_equal(first->status, COX_TIMEOUT);
        assert_int_equal(first->ranks[1].outcome, COX_OUTCOME_LATE);
        assert_int_equal(test_completion_count(g), n + 1);
        test_pipe_release(pipe, 1);
        const struct test_completion *second = test_await(g, n + 1);
        assert_int_equal(second->status, COX_LATE);
        assert_int_equal(second->sequence, first->sequence);
        assert_int_equal(second->ranks[1].outcome, COX_OUTCOME_OK);
        assert_int_equal(test_submit(g, &test_all, "echo next"), 0);
        assert_string_equal(test_await(g, n + 2)->ranks[1].bytes, "next");
    }
}

/* A dead rank owes nothing: the living go on. */
GROUP_TEST(s4_a_late_rank_that_dies_is_late_no_more, 2)
{
    struct test_pipe *pipe = test_pipe_new();
    const struct test_how brief = {.gather = COX_GATHER_RANK0, .timeout_ms = 20};
    OWN_COMPLETION c = {0};
    test_call_in_vain(g, &c, &brief, "only 1 block %s", test_pipe_path(pipe));
    assert_int_equal(kill(cox_executor_pid(executor, 1), SIGKILL), 0);
    const struct test_how first = {.gather = COX_GATHER_ALL, .ranks = 1};
    assert_int_equal(test_submit_persist(g, &first, "echo alone"), 0);
    assert_string_equal(test_await(g, 0)->ranks[0].bytes, "alone");
    const struct test_how rank0 = {.gather = COX_GATHER_RANK0};
    assert_int_equal(test_submit(g, &rank0, "echo x"), COX_PEER_DEAD);
}

/* Rank 1 reads its frame in place, for as long as it blocks; rank 0 replies at once. */
GROUP_TEST_WITH(s3_a_frame_is_not_written_while_a_rank_reads_it, 2, .depth = 2)
{
    struct test_pipe *pipe = test_pipe_new();
    const struct test_how both = {.gather = COX_GATHER_ALL},
                          first = {.gather = COX_GATHER_ALL, .ranks = 1};
    /* The error of rank 0 ends the request, so that the entry is free but for the frame that rank 1
     * reads. */
    for (int round = 0; round < 20; round++) {
        size_t first_one = test_completion_count(g);
        assert_int_equal(test_submit_persist(g, &both, "echo first"), 0);
        test_await(g, first_one);
        char hold[256];
        snprintf(hold, sizeof hold, "each echo done|hold %s %0100d", test_pipe_path(pipe), round);
        size_t before = test_completion_count(g);
        assert_int_equal(test_submit_persist(g, &both, hold), 0);
        test_await_lines(g, 1, "blocked", (size_t)round + 1);
        /* One more frame there is, then none. */
        int r = 0, accepted = 0;
        while ((r = test_submit(g, &first, "echo %0120d", 7)) == 0)
            accepted++;
        assert_int_equal(r, COX_FULL);
        assert_true(accepted <= 1);
        for (int k = 0; k < 100; k++)
            assert_int_equal(test_submit(g, &first, "echo %0120d", 7), COX_FULL);
        test_pipe_release(pipe, 1);
        /* In order of sequence: what was submitted before, then the held one. */
        bool seen = false;
        for (size_t n = before; !seen; n++) {
            const struct test_completion *c = test_await(g, n);
            if (c->rank_count == 2 && c->ranks[1].outcome == COX_OUTCOME_OK &&
                strcmp(c->ranks[0].bytes, "done") == 0) {
                assert_string_equal(c->ranks[1].bytes, "same");
                seen = true;
            }
        }
        for (int k = 0; k < accepted; k++)
            test_await(g, before + (size_t)k + 1);
    }
}

/* After a timeout, too: the request has ended, its frame is still read. LATE comes first then, so
 * the claim on the frame is looked at through what the rank says of its bytes. */
TEST(s3_nor_after_the_request_has_ended)
{
    for (uint32_t depth = 1; depth <= 2; depth++) {
        OWN_GROUP *g = test_group_start(2, START_WITH(.depth = depth));
        struct test_pipe *pipe = test_pipe_new();
        const struct test_how brief = {.gather = COX_GATHER_ALL, .timeout_ms = 10};
        const struct test_how first = {.gather = COX_GATHER_ALL, .ranks = 1};
        OWN_COMPLETION c = {0};
        test_call_in_vain(g, &c, &brief, "each echo x|hold %s abcdefghijklm", test_pipe_path(pipe));
        test_await_lines(g, 1, "blocked", 1);
        for (int k = 0; k < 100; k++) {
            int r = test_submit(g, &first, "echo %0120d", 7);
            assert_true(r == COX_FULL || r == COX_LATE);
        }
        test_pipe_release(pipe, 1);
        test_expect_echo(g, "still here");
    }
}

/* There is no room for another link; and whether rank 0 has read them all. */
static bool is_kept_by_rank_1(struct cox_executor *executor, const Coxswain__PDLinkRequest *link)
{
    struct cox_error err = {0};
    assert_int_equal(cox_executor_link(executor, link, cox_deadline_after_ms(20), &err),
                     COX_TIMEOUT);
    assert_contains(err.text, "still reads the frame");
    return strstr(err.text, "rank 1 still reads the frame") != NULL;
}

/* Requests without reply are over at once, but their frames are kept until every rank has read
 * them. */
TEST(s3_a_frame_without_reply_is_kept_until_read)
{
    for (uint32_t depth = 1; depth <= 4; depth *= 2) {
        OWN_GROUP *g = test_group_start(2, START_WITH(.depth = depth));
        struct cox_executor *executor = test_group_executor(g);
        pid_t pid = cox_executor_pid(executor, 1);
        Coxswain__PDLinkRequest__PDLinkInfo info = COXSWAIN__PDLINK_REQUEST__PDLINK_INFO__INIT;
        Coxswain__PDLinkRequest__PDLinkInfo *infos[] = {&info};
        Coxswain__PDLinkRequest link = COXSWAIN__PDLINK_REQUEST__INIT;
        link.n_pd_link_info = 1;
        link.pd_link_info = infos;
        info.has_pd_role = 1;
        char expected[256] = "";
        test_stop_process(pid);
        for (uint32_t k = 0; k < depth; k++) {
            char entry[64];
            info.pd_role = (Coxswain__PDRole)(k % 4);
            assert_ok(cox_executor_link(executor, &link, test_patience(), test_err()));
            snprintf(entry, sizeof entry, "role=%" PRIu32 " change=0 link=0 unlink=0;", k % 4);
            strcat(expected, entry);
        }
        AWAIT(is_kept_by_rank_1(executor, &link));
        assert_int_equal(kill(pid, SIGCONT), 0);
        struct cox_link_status status; /* behind the links on their channel */
        assert_ok(cox_executor_link_status(executor, test_patience(), &status, test_err()));
        cox_link_status_deinit(&status);
        OWN_COMPLETION c = {0};
        assert_int_equal(test_call(g, &c, "tell links"), 0);
        for (uint32_t rank = 0; rank < 2; rank++)
            assert_string_equal(c.ranks[rank].bytes, expected);
    }
}

/* Rank 1 sleeps through many rounds of the frames, and then finds its own request among them. */
TEST(s3_a_rank_that_was_not_asked_skips_frames)
{
    for (uint32_t depth = 1; depth <= 8; depth *= 2) {
        OWN_GROUP *g = test_group_start(4, START_WITH(.depth = depth));
        const struct test_how others = {.gather = COX_GATHER_ALL, .ranks = 1 + 4 + 8};
        for (int round = 0; round < 50; round++) {
            for (int k = 0; k < round % 12; k++)
                assert_int_equal(test_call_how(g, NULL, &others, "echo skip"), 0);
            char text[32];
            snprintf(text, sizeof text, "round %d", round);
            test_expect_echo(g, text);
        }
    }
}

/* A stopped rank that is not asked delays no other. */
GROUP_TEST(s3_a_rank_that_was_not_asked_may_sleep, 2)
{
    pid_t pid = cox_executor_pid(executor, 1);
    test_stop_process(pid);
    const struct test_how first = {.gather = COX_GATHER_ALL, .ranks = 1};
    for (int k = 0; k < 100; k++)
        assert_int_equal(test_call_how(g, NULL, &first, "echo x"), 0);
    assert_int_equal(kill(pid, SIGCONT), 0);
    test_expect_echo(g, "both");
}

/* Requests and replies as large as they may be, as many as fit, in both directions, and faults on
 * top. */
GROUP_TEST_WITH(p11_both_directions_full_at_once, 4,
                .memory.request_size = {[COX_CHANNEL_EXECUTE] = 4 << 16},
                .memory.response_size = {[COX_CHANNEL_EXECUTE] = 4 * 4 << 16})
{
    size_t max = test_request_size_max(executor, COX_CHANNEL_EXECUTE);
    char *text = malloc(max + 1);
    assert_non_null(text);
    memset(text, 'b', max);
    text[max] = '\0';
    memcpy(text, "echo ", 5);
    size_t submitted = 0;
    for (int round = 0; round < 50; round++) {
        for (int k = 0; k < 8; k++, submitted++)
            assert_int_equal(test_submit_persist(g, &test_all, text), 0);
        assert_int_equal(test_submit_persist(g, &test_all, "faults 5 much to say"), 0);
        submitted++;
    }
    for (size_t n = 0; n < submitted; n++) {
        const struct test_completion *c = test_await(g, n);
        assert_int_equal(c->status, 0);
        bool large = c->ranks[0].size == max - 5;
        for (uint32_t rank = 0; rank < 4; rank++) {
            assert_int_equal(c->ranks[rank].size, large ? max - 5 : strlen("reported"));
            assert_string_equal(c->ranks[rank].bytes, large ? text + 5 : "reported");
        }
    }
    test_await_faults(g, 50 * 4 * 5);
    free(text);
}
