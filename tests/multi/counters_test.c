/* What a group counts and remembers, as its status tells it. */
#include "coordinator/collector/stats.h"
#include "testing.h"

#define RANK_COUNT_MAX 4
#define INTERVAL_NS (3 * COX_NSEC_PER_MSEC)

struct seen {
    struct cox_executor_status group;
    struct cox_rank_status ranks[RANK_COUNT_MAX];
};
static struct seen seen;

static const struct cox_channel_stats *look(struct test_group *g)
{
    cox_executor_read_status(test_group_executor(g), &seen.group, seen.ranks);
    return &seen.group.channels[COX_CHANNEL_EXECUTE].stats;
}

/* The rank has written "blocked" when this returns, and is inside a request that ends with it. */
static void block(struct test_group *g, uint32_t rank, const struct test_pipe *pipe)
{
    const struct test_how how = {.gather = COX_GATHER_ALL, .ranks = UINT64_C(1) << rank};
    size_t before = test_count_lines(g, (int)rank, "blocked");
    assert_int_equal(test_submit(g, &how, "block %s", test_pipe_path(pipe)), 0);
    test_await_lines(g, (int)rank, "blocked", before + 1);
}

/* ---- deaths ---- */

static void expect_lives(struct test_group *g, uint32_t rank, int liveness, uint64_t deaths,
                         uint64_t restarts)
{
    look(g);
    assert_int_equal(seen.ranks[rank].liveness, liveness);
    assert_int_equal(seen.ranks[rank].deaths, deaths);
    assert_int_equal(seen.ranks[rank].restarts, restarts);
}

GROUP_TEST(p3_status_counts_deaths_and_restarts_and_keeps_the_last_words, 3)
{
    test_needs_processes();
    struct test_pipe *pipe = test_pipe_new();
    char old[64];
    look(g);
    for (uint32_t rank = 0; rank < 3; rank++) {
        assert_int_equal(seen.ranks[rank].deaths + seen.ranks[rank].restarts, 0);
        assert_string_equal(seen.ranks[rank].last_error, "");
        assert_string_equal(seen.ranks[rank].last_lines, "");
        assert_int_equal(seen.ranks[rank].last_error_age_ns, 0);
    }
    block(g, 1, pipe);
    snprintf(old, sizeof old, "rank 1 (pid %d)", test_pid(g, 1));
    uint64_t before_ns = cox_now_ns();
    test_kill_rank(g, 1);
    expect_lives(g, 1, COX_LIVENESS_DEAD, 1, 0);
    assert_string_equal(seen.ranks[1].last_error, seen.ranks[1].death);
    assert_string_equal(seen.ranks[1].last_lines, "blocked");
    test_restart_rank(g, 1);
    test_expect_echo(g, "replaced");
    expect_lives(g, 1, COX_LIVENESS_ALIVE, 1, 1);
    assert_int_equal(seen.ranks[1].incarnation, 2);
    assert_string_equal(seen.ranks[1].death, "");
    assert_contains(seen.ranks[1].last_error, old);
    assert_contains(seen.ranks[1].last_error, "killed by signal 9");
    assert_in_range(seen.ranks[1].last_error_age_ns, 1, cox_now_ns() - before_ns);
    assert_string_equal(seen.ranks[1].last_lines, "blocked");
    /* The next one has written nothing. */
    test_kill_rank(g, 1);
    test_restart_rank(g, 1);
    expect_lives(g, 1, COX_LIVENESS_ALIVE, 2, 2);
    assert_string_equal(seen.ranks[1].last_lines, "");
    assert_null(strstr(seen.ranks[1].last_error, old));
    test_kill_rank(g, 2);
    look(g);
    assert_int_equal(seen.ranks[0].deaths + seen.ranks[0].restarts, 0);
    assert_int_equal(seen.group.deaths, 3);
    assert_int_equal(seen.group.restarts, 2);
}

TEST(p3_status_counts_a_restart_that_fails_as_a_death)
{
    test_needs_processes();
    const char *const fragile[] = {test_worker_program(), "dies", "2", "3", NULL};
    OWN_GROUP *g = test_group_start(2, START_WITH(.workers.command = fragile));
    test_kill_rank(g, 1);
    for (uint32_t k = 0; k < 2; k++) {
        assert_int_equal(cox_executor_restart(test_group_executor(g), 1, test_patience(), NULL),
                         COX_PEER_DEAD);
        expect_lives(g, 1, COX_LIVENESS_DEAD, 2 + k, 0);
        assert_int_equal(seen.ranks[1].incarnation, 2 + k);
    }
    test_restart_rank(g, 1);
    expect_lives(g, 1, COX_LIVENESS_ALIVE, 3, 1);
    assert_int_equal(seen.ranks[1].incarnation, 4);
}

/* Its lines are not those of the process that was to take its place and never came to be. */
TEST(p3_status_keeps_the_last_words_when_no_process_can_be_started)
{
    test_needs_processes();
    char program[4096], folder[] = "/tmp/cox_counters_XXXXXX";
    assert_non_null(mkdtemp(folder));
    snprintf(program, sizeof program, "%s/worker", folder);
    assert_int_equal(symlink(test_worker_program(), program), 0);
    const char *const command[] = {program, NULL};
    OWN_GROUP *g = test_group_start(2, START_WITH(.workers.command = command));
    struct test_pipe *pipe = test_pipe_new();
    block(g, 1, pipe);
    test_kill_rank(g, 1);
    assert_int_equal(unlink(program), 0);
    assert_int_equal(rmdir(folder), 0);
    assert_int_equal(cox_executor_restart(test_group_executor(g), 1, test_patience(), NULL),
                     COX_EXEC_FAILED);
    expect_lives(g, 1, COX_LIVENESS_DEAD, 1, 0);
    assert_string_equal(seen.ranks[1].last_lines, "blocked");
}

GROUP_TEST(m15_a_stop_is_no_death, 2)
{
    test_expect_echo(g, "x");
    cox_executor_stop(executor);
    look(g);
    assert_int_equal(seen.group.deaths, 0);
    for (uint32_t rank = 0; rank < 2; rank++) {
        assert_int_equal(seen.ranks[rank].deaths, 0);
        assert_string_equal(seen.ranks[rank].last_error, "");
    }
}

/* ---- errors ---- */

GROUP_TEST(p3_status_keeps_the_last_error_of_each_rank, 3)
{
    OWN_COMPLETION c = {0};
    uint64_t before_ns = cox_now_ns();
    assert_int_equal(test_call(g, &c, "only 1 fail 7 no such adapter"), COX_REJECTED);
    char expected[128];
    snprintf(expected, sizeof expected,
             "pid %d on execute sequence %" PRIu64 " (OPAQUE): ", c.ranks[1].pid, c.sequence);
    look(g);
    assert_contains(seen.ranks[1].last_error, expected);
    assert_contains(seen.ranks[1].last_error, "no such adapter");
    uint64_t age_ns = seen.ranks[1].last_error_age_ns;
    assert_in_range(age_ns, 1, cox_now_ns() - before_ns);
    assert_string_equal(seen.ranks[0].last_error, "");
    assert_string_equal(seen.ranks[2].last_error, "");
    test_expect_echo(g, "all is well");
    look(g);
    assert_contains(seen.ranks[1].last_error, "no such adapter");
    assert_true(seen.ranks[1].last_error_age_ns > age_ns);

    const struct test_how how = {.gather = COX_GATHER_ALL, .ranks = 6};
    assert_int_equal(test_call_how(g, NULL, &how, "fault too hot"), 0);
    test_await_faults(g, 2);
    look(g);
    for (uint32_t rank = 1; rank < 3; rank++)
        assert_contains(seen.ranks[rank].last_error, "it reported: too hot");
    assert_string_equal(seen.ranks[0].last_error, "");
    assert_int_equal(seen.group.deaths, 0);
}

GROUP_TEST(p3_status_reports_an_error_or_a_death_whichever_came_last, 2)
{
    test_needs_processes();
    assert_int_equal(test_call(g, NULL, "only 1 fail 7 first"), COX_REJECTED);
    test_kill_rank(g, 1);
    look(g);
    assert_contains(seen.ranks[1].last_error, "killed by signal 9");
    test_restart_rank(g, 1);
    look(g);
    assert_contains(seen.ranks[1].last_error, "killed by signal 9");
    assert_int_equal(test_call(g, NULL, "only 1 fail 7 second"), COX_REJECTED);
    look(g);
    assert_contains(seen.ranks[1].last_error, "second");
    assert_int_equal(seen.ranks[1].deaths, 1);
}

GROUP_TEST(p3_p10_an_reply_that_makes_no_sense_is_an_error, 2)
{
    assert_int_not_equal(test_call(g, NULL, "only 1 lie 99999999"), 0);
    look(g);
    assert_contains(seen.ranks[1].last_error, "99999999");
    assert_string_equal(seen.ranks[0].last_error, "");
}

/* ---- counts ---- */

/* A call that is published and ends at its deadline while rank 1 is blocked: a busy machine may not
 * get to publish it. Returns how many were late, on such a machine rank 0 as well. */
static uint64_t block_in_vain(struct test_group *g, const struct test_pipe *pipe)
{
    const struct test_how brief = {.gather = COX_GATHER_ALL, .timeout_ms = 100};
    OWN_COMPLETION c = {0};
    do
        assert_int_equal(test_call_how(g, &c, &brief, "only 1 block %s", test_pipe_path(pipe)),
                         COX_TIMEOUT);
    while (c.rank_count == 0);
    assert_int_equal(c.ranks[1].outcome, COX_OUTCOME_LATE);
    return 1 + (c.ranks[0].outcome == COX_OUTCOME_LATE);
}

GROUP_TEST(p4_late_replies_are_counted, 2)
{
    struct test_pipe *pipe = test_pipe_new();
    uint64_t late = 0;
    for (uint64_t round = 1; round <= 3; round++) {
        uint64_t before = late;
        late += block_in_vain(g, pipe);
        const struct cox_channel_stats *stats = look(g);
        assert_int_equal(stats->timeouts, round);
        assert_int_equal(stats->failed, round);
        assert_in_range(stats->late_replies, before, late - 1);
        assert_true(cox_rank_set_has(&seen.group.channels[COX_CHANNEL_EXECUTE].late, 1));
        test_pipe_release(pipe, 1);
        test_expect_echo(g, "waits for room until the late one is there");
        stats = look(g);
        assert_int_equal(stats->late_replies, late);
        assert_int_equal(stats->timeouts, round);
        assert_int_equal(stats->submitted, 2 * round);
        assert_int_equal(stats->completed, 2 * round);
        assert_int_equal(seen.group.channels[COX_CHANNEL_EXECUTE].late.words[0], 0);
    }
    /* Late is no error: nothing failed, nothing died. */
    for (uint32_t rank = 0; rank < 2; rank++)
        assert_string_equal(seen.ranks[rank].last_error, "");
}

/* Requests count once, however many ranks read them; replies of all ranks. */
GROUP_TEST_WITH(p3_status_counts_the_bytes_that_were_moved, 4, .memory.refuse_large_payloads = true)
{
    uint64_t sent = 0, received = 0;
    static const size_t sizes[] = {7, 255, 0, 4096, 60000, 1, 300, 0, 9};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        char command[64];
        OWN_COMPLETION c = {0};
        uint64_t ranks = i % 2 ? TEST_ALL_RANKS : 5;
        const struct test_how how = {.gather = i % 3 ? COX_GATHER_RANK0 : COX_GATHER_ALL,
                                     .ranks = ranks};
        snprintf(command, sizeof command, "size %zu", sizes[i]);
        if (test_call_how(g, &c, &how, "%s", command))
            fail_msg("%s: %s", command, test_error_text(g));
        sent += strlen(command);
        received += sizes[i] * (ranks == 5 ? 2 : 4);
        const struct cox_channel_stats *stats = look(g);
        assert_int_equal(stats->request_bytes, sent);
        assert_int_equal(stats->reply_bytes, received);
    }
    /* What is refused before it is published was not moved. */
    size_t size = test_request_size_max(executor, COX_CHANNEL_EXECUTE) + 1;
    _cox_cleanup_(cox_free_ptr) char *large = calloc(size, 1);
    assert_non_null(large);
    assert_int_equal(cox_executor_call_opaque(executor, large, size,
                                              SUBMIT_WITH(.deadline_ns = test_patience()), NULL,
                                              NULL, test_err()),
                     COX_TOO_LARGE);
    assert_int_equal(look(g)->request_bytes, sent);
    for (int c = 1; c < COX_TWO_WAY_COUNT; c++) {
        assert_int_equal(seen.group.channels[c].stats.request_bytes, 0);
        assert_int_equal(seen.group.channels[c].stats.reply_bytes, 0);
    }
}

/* ---- times ---- */

/* Waits long enough to be distinguished from no time. Returns how long. */
static uint64_t pass_time(void)
{
    const uint64_t begin_ns = cox_now_ns();
    AWAIT(cox_now_ns() - begin_ns >= INTERVAL_NS);
    return cox_now_ns() - begin_ns;
}

/* As a histogram tells it. */
static uint64_t least(uint64_t ns)
{
    return ns - ns / 16;
}

static uint64_t most(uint64_t ns)
{
    return ns + ns / 16;
}

GROUP_TEST(p3_the_phases_of_every_completed_request_are_counted, 2)
{
    const struct cox_channel_stats *stats = look(g);
    for (int phase = 0; phase < COX_PHASE_COUNT; phase++) {
        assert_int_equal(stats->phases[phase].count, 0);
        assert_int_equal(stats->phases[phase].p99_ns, 0);
    }
    uint64_t begin_ns = cox_now_ns();
    for (int i = 0; i < 50; i++)
        test_expect_echo(g, "x");
    assert_int_equal(test_call(g, NULL, "fail 7 also failed ones"), COX_REJECTED);
    uint64_t elapsed_ns = cox_now_ns() - begin_ns;
    stats = look(g);
    assert_int_equal(stats->completed, 51);
    for (int phase = 0; phase < COX_PHASE_COUNT; phase++) {
        const struct cox_phase_stats *times = &stats->phases[phase];
        assert_int_equal(times->count, 51);
        assert_true(times->p50_ns <= times->p99_ns);
        assert_true(times->p99_ns <= most(elapsed_ns));
        /* At least half of them took as long as the median. */
        assert_true(25 * least(times->p50_ns) <= elapsed_ns);
        assert_true(times->p50_ns <= most(stats->phases[COX_PHASE_TOTAL].p50_ns));
    }
    assert_true(stats->phases[COX_PHASE_RANKS].p50_ns > 0);
    assert_string_equal(cox_phase_name(COX_PHASE_QUEUE), "queue");
    assert_string_equal(cox_phase_name(COX_PHASE_TOTAL), "total");
    assert_string_equal(cox_phase_name(COX_PHASE_COUNT), "unknown");
}

struct slow {
    sem_t entered, go_on;
    struct cox_executor *executor;
    /* In the handler phase, while a handler runs. Atomic, since ThreadSanitizer does not know
     * sem_clockwait. */
    _Atomic uint64_t counted_inside;
};

static void slow_handler(void *context, const struct cox_completion *completion)
{
    struct slow *slow = context;
    (void)completion;
    slow->counted_inside =
        test_stats(slow->executor, COX_CHANNEL_EXECUTE).phases[COX_PHASE_HANDLER].count;
    sem_post(&slow->entered);
    sem_wait(&slow->go_on);
}

GROUP_TEST(p3_a_handler_that_waits_is_seen_in_its_phase, 2)
{
    static struct slow slow;
    slow = (struct slow){.executor = executor, .counted_inside = 99};
    sem_init(&slow.entered, 0, 0);
    sem_init(&slow.go_on, 0, 0);
    assert_ok(cox_executor_set_handler(slow.executor, COX_CHANNEL_EXECUTE, slow_handler, &slow));
    uint64_t begin_ns = cox_now_ns();
    assert_ok(cox_executor_submit_opaque(
        slow.executor, "echo x", 6, SUBMIT_WITH(.deadline_ns = test_patience()), NULL, test_err()));
    assert_true(test_sem_await(&slow.entered));
    uint64_t before_ns = cox_now_ns() - begin_ns, waited_ns = pass_time();
    assert_int_equal(look(g)->completed, 1);
    assert_int_equal(slow.counted_inside, 0); /* it has not returned */
    assert_int_equal(seen.group.channels[COX_CHANNEL_EXECUTE].stats.phases[COX_PHASE_TOTAL].count,
                     0);
    sem_post(&slow.go_on);
    AWAIT(look(g)->phases[COX_PHASE_HANDLER].count != 0);
    const struct cox_phase_stats *phases = seen.group.channels[COX_CHANNEL_EXECUTE].stats.phases;
    assert_true(phases[COX_PHASE_HANDLER].p50_ns >= least(waited_ns));
    assert_true(phases[COX_PHASE_TOTAL].p50_ns >= least(waited_ns));
    assert_true(phases[COX_PHASE_QUEUE].p99_ns <= most(before_ns));
    assert_true(phases[COX_PHASE_RANKS].p99_ns <= most(before_ns));
    assert_int_equal(phases[COX_PHASE_TOTAL].count, 1);
}

GROUP_TEST(p3_a_rank_that_waits_is_seen_in_its_phase, 2)
{
    struct test_pipe *pipe = test_pipe_new();
    block(g, 1, pipe);
    uint64_t waited_ns = pass_time();
    test_pipe_release(pipe, 1);
    const struct test_completion *c = test_await(g, 0);
    assert_int_equal(c->status, 0);
    uint64_t ranks_ns = c->completed_ns - c->published_ns;
    uint64_t queue_ns = c->published_ns - c->submitted_ns;
    AWAIT(look(g)->phases[COX_PHASE_TOTAL].count != 0); /* until its handler has returned */
    const struct cox_phase_stats *phases = seen.group.channels[COX_CHANNEL_EXECUTE].stats.phases;
    assert_true(phases[COX_PHASE_RANKS].p99_ns >= least(waited_ns));
    assert_in_range(phases[COX_PHASE_RANKS].p50_ns, least(ranks_ns), most(ranks_ns));
    assert_in_range(phases[COX_PHASE_QUEUE].p50_ns, least(queue_ns), most(queue_ns));
    assert_true(phases[COX_PHASE_TOTAL].p50_ns >= least(ranks_ns + queue_ns));
}

struct releaser {
    struct cox_executor *executor;
    struct test_pipe *pipe;
    /* so far */
    uint64_t rewakes;
    /* while a call waited for room */
    uint64_t waited_ns;
};

static uint64_t rewakes_of(struct cox_executor *executor)
{
    return test_stats(executor, COX_CHANNEL_EXECUTE).rewakes;
}

/* Nothing is in flight, and a rank owes a reply: a refused submitter wakes it. */
static void *releaser_main(void *argument)
{
    struct releaser *releaser = argument;
    AWAIT(rewakes_of(releaser->executor) != releaser->rewakes);
    releaser->waited_ns = pass_time();
    test_pipe_release(releaser->pipe, 1);
    return NULL;
}

GROUP_TEST(p3_a_call_that_waits_for_room_waits_in_the_queue, 2)
{
    struct test_pipe *pipe = test_pipe_new();
    OWN_COMPLETION c = {0};
    block_in_vain(g, pipe);
    test_await_lines(g, 1, "blocked", 1);
    struct releaser releaser = {.executor = test_group_executor(g), .pipe = pipe};
    releaser.rewakes = rewakes_of(releaser.executor);
    pthread_t thread = test_thread(releaser_main, &releaser);
    int r = test_call(g, &c, "echo when there is room");
    pthread_join(thread, NULL);
    assert_int_equal(r, 0);
    uint64_t queue_ns = c.published_ns - c.submitted_ns;
    assert_true(queue_ns >= releaser.waited_ns);
    /* The longer one of two. */
    const struct cox_channel_stats *stats = look(g);
    assert_int_equal(stats->phases[COX_PHASE_QUEUE].count, 2);
    assert_true(stats->phases[COX_PHASE_QUEUE].p99_ns >= least(queue_ns));
}
