/* Several requests in flight on one channel: one that is stuck holds up no other, a wake-up that
 * got lost is sent again, and what a handler does in between wedges nothing. */
#include "channel/attach/named/names.h"
#include "channel/base/semaphore.h"
#include "channel/shm/control.h"
#include "channel/shm/state.h"
#include "coordinator/executor/executor_internal.h"
#include "steps.h"

static struct cox_channel_stats stats_of(struct test_group *g, enum cox_channel_id channel)
{
    return test_stats(test_group_executor(g), channel);
}

/* ---- requests without reply ---- */

static int submit_link(struct cox_executor *executor)
{
    Coxswain__PDLinkRequest link = COXSWAIN__PDLINK_REQUEST__INIT;
    Coxswain__ExecuteRequest request = REQUEST_OF(PD_LINK, PD_LINK_REQUEST, &link);
    return cox_executor_submit(
        executor, &request, SUBMIT_WITH(.gather = COX_GATHER_NONE, .deadline_ns = test_patience()),
        NULL, NULL);
}

/* Submits that many links, each again while the ranks still read the frame. Returns the first other
 * reply. */
static int submit_links(struct cox_executor *executor, uint32_t count)
{
    int r = 0;
    for (uint32_t k = 0; k < count && r == 0; k++)
        AWAIT((r = submit_link(executor)) != COX_FULL);
    return r;
}

/* How many links every rank has seen by now. */
static void expect_links(struct test_group *g, uint32_t count)
{
    char expected[32];
    struct cox_link_status status;
    bool found = false;
    assert_ok(
        cox_executor_link_status(test_group_executor(g), test_patience(), &status, test_err()));
    snprintf(expected, sizeof expected, "linked %" PRIu32, count);
    for (size_t i = 0; i < status.success_count; i++)
        found = found || strcmp(status.success[i], expected) == 0;
    cox_link_status_deinit(&status);
    if (!found)
        fail_msg("not every rank says '%s'", expected);
}

TEST(m7_links_in_a_row)
{
    for (uint32_t depth = 1; depth <= 4; depth += 3) {
        OWN_GROUP *g = test_group_start(2, START_WITH(.depth = depth));
        assert_int_equal(submit_links(test_group_executor(g), 100), 0);
        assert_int_equal(stats_of(g, COX_CHANNEL_LINK).submitted, 100);
        expect_links(g, 100);
        /* No call waited for them, so there was no completion. */
        assert_int_equal(stats_of(g, COX_CHANNEL_LINK).completed, 1);
    }
}

struct visit {
    struct cox_executor *executor;
    uint32_t count;
    int calls, submitted, called;
};

static void visit_and_link(void *context, const struct cox_completion *completion)
{
    struct visit *visit = context;
    Coxswain__PDLinkRequest link = COXSWAIN__PDLINK_REQUEST__INIT;
    Coxswain__ExecuteRequest request = REQUEST_OF(PD_LINK, PD_LINK_REQUEST, &link);
    visit->calls += completion->status == 0;
    visit->submitted = submit_links(visit->executor, visit->count);
    visit->called = cox_executor_call(
        visit->executor, &request,
        SUBMIT_WITH(.gather = COX_GATHER_NONE, .deadline_ns = test_patience()), NULL, NULL, NULL);
}

/* The request whose replies are looked at has ended, so its frame is taken again meanwhile. */
TEST(m7_links_from_inside_a_handler)
{
    for (uint32_t depth = 1; depth <= 4; depth *= 2) {
        OWN_GROUP *g = test_group_start(2, START_WITH(.depth = depth));
        Coxswain__PDLinkStatusRequest body = COXSWAIN__PDLINK_STATUS_REQUEST__INIT;
        Coxswain__ExecuteRequest request =
            REQUEST_OF(PD_LINK_STATUS_QUERY, PD_LINK_STATUS_REQUEST, &body);
        uint32_t links = 0;
        for (uint32_t count = 1; count <= 3 * depth; count++) {
            struct visit visit = {.executor = test_group_executor(g), .count = count};
            assert_ok(cox_executor_call(
                test_group_executor(g), &request,
                SUBMIT_WITH(.gather = COX_GATHER_ALL, .deadline_ns = test_patience()),
                visit_and_link, &visit, test_err()));
            assert_int_equal(visit.calls, 1);
            assert_int_equal(visit.submitted, 0);
            assert_int_equal(visit.called, COX_DEADLOCK);
            links += count;
            expect_links(g, links);
        }
    }
}

/* Ranks read a number that another process overwrote, and see requests that do not exist yet. */
GROUP_TEST(p10_a_number_turned_up_replies_nothing, 2)
{
    struct cox_layout_channel_state *shared =
        cox_state_channel(&executor->control, COX_CHANNEL_EXECUTE);
    for (int round = 0; round < 8; round++) /* every frame has held something */
        test_expect_echo(g, "before");
    for (uint64_t round = 0; round < 60; round++) {
        uint64_t published = cox_state_published(shared);
        atomic_store(&shared->published, published + 1 + round % 3);
        for (uint32_t rank = 0; rank < 2; rank++)
            cox_gate_post(&executor->channels[COX_CHANNEL_EXECUTE].gate, rank,
                          COX_WAKEUP_REQUEST_CONSUME);
        const uint64_t until_ns = cox_deadline_after_ms(2); /* for them to be misled in */
        while (cox_now_ns() < until_ns)
            sched_yield();
        test_expect_echo(g, "of its own");
    }
}

/* Every thread of the process is in a system call. */
static bool process_sleeps(pid_t pid)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/task", (int)pid);
    DIR *tasks = opendir(path);
    assert_non_null(tasks);
    bool sleeps = true;
    for (const struct dirent *task; sleeps && (task = readdir(tasks));) {
        char call[sizeof path + sizeof task->d_name + 16], text[64];
        if (task->d_name[0] == '.')
            continue;
        snprintf(call, sizeof call, "%s/%s/syscall", path, task->d_name);
        FILE *file = fopen(call, "re");
        sleeps = file && fgets(text, sizeof text, file) && strncmp(text, "running", 7) != 0;
        if (file)
            fclose(file);
    }
    closedir(tasks);
    return sleeps;
}

GROUP_TEST_WITH(p10_a_rank_sleeps_on_a_number_turned_up, 1, .spin = COX_SPIN_MAX)
{
    test_needs_processes();
    struct cox_layout_channel_state *shared =
        cox_state_channel(&executor->control, COX_CHANNEL_EXECUTE);
    struct test_pipe *pipe = test_pipe_new();
    assert_int_equal(test_submit(g, &test_all, "block %s", test_pipe_path(pipe)), 0);
    test_await_lines(g, 0, "blocked", 1);
    atomic_store(&shared->published, cox_state_published(shared) + 100);
    test_pipe_release(pipe, 1);
    assert_int_equal(test_await(g, 0)->status, 0);
    AWAIT(process_sleeps(cox_executor_pid(executor, 0)));
    test_expect_echo(g, "of its own");
}

/* ---- beside a stuck request ---- */

/* Rank 2 has replied when rank 0's reply ends it all; rank 1 never does. */
TEST(m4_replies_before_a_failure_are_reported)
{
    enum { ROUND_COUNT = 20 };
    test_needs_processes();
    char name[64];
    OWN_GROUP *g =
        test_group_start(3, START_WITH(.memory.keep_names = true, .name = test_unique_name(name)));
    struct cox_executor *executor = test_group_executor(g);
    const struct cox_layout_rank_line *line =
        cox_state_line(&executor->control, 2, COX_CHANNEL_EXECUTE);
    struct test_pipe *pipe = test_pipe_new();
    const struct test_how how = {.gather = COX_GATHER_ALL, .timeout_ms = 10 * TEST_PATIENCE_MS};
    char text[512];
    snprintf(text, sizeof text, "each raw 64 failed|block %s|echo there", test_pipe_path(pipe));
    for (size_t round = 0; round < ROUND_COUNT; round++) {
        const uint64_t done = cox_state_done(line);
        test_stop_process(cox_executor_pid(executor, 0));
        assert_int_equal(test_submit_persist(g, &how, text), 0);
        AWAIT(cox_state_done(line) != done);
        assert_int_equal(kill(cox_executor_pid(executor, 0), SIGCONT), 0);
        const struct test_completion *c = test_await(g, round);
        assert_int_equal(c->status, COX_CORRUPT);
        assert_int_equal(c->ranks[0].outcome, COX_OUTCOME_ERROR);
        assert_int_equal(c->ranks[2].outcome, COX_OUTCOME_OK);
        assert_string_equal(c->ranks[2].bytes, "there");
        test_await_lines(g, 1, "blocked", round + 1);
        test_pipe_release(pipe, 1);
        test_expect_echo(g, "all of them");
    }
}

GROUP_TEST(p1_an_end_behind_a_stuck_request_is_reported_at_once, 2)
{
    struct test_pipe *pipe = test_pipe_new();
    const struct test_how stuck = {
        .gather = COX_GATHER_ALL, .ranks = 1, .timeout_ms = 10 * TEST_PATIENCE_MS};
    const struct test_how beside = {
        .gather = COX_GATHER_ALL, .ranks = 2, .timeout_ms = 10 * TEST_PATIENCE_MS};
    assert_int_equal(test_submit(g, &stuck, "block %s", test_pipe_path(pipe)), 0);
    test_await_lines(g, 0, "blocked", 1);

    static const struct {
        const char *command;
        int status;
        const char *text;
    } ends[] = {{"echo the answer", 0, ""},
                {"fail 7 the words of it", COX_REJECTED, "rank 1 failed: the words of it"},
                {"kill 9", COX_PEER_DEAD, "rank 1"}};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        assert_int_equal(test_submit(g, &beside, "%s", ends[i].command), 0);
        const struct test_completion *c = test_await(g, i);
        assert_int_equal(c->sequence, 2 + i);
        assert_int_equal(c->status, ends[i].status);
        assert_contains(c->text, ends[i].text);
        assert_int_equal(c->ranks[0].outcome, COX_OUTCOME_NOT_ASKED);
    }
    assert_string_equal(test_await(g, 0)->ranks[1].bytes, "the answer");
    assert_int_equal(test_completion_count(g), 3);
    test_pipe_release(pipe, 1);
    const struct test_completion *c = test_await(g, 3);
    assert_int_equal(c->sequence, 1);
    assert_int_equal(c->status, 0);
    assert_string_equal(c->ranks[0].bytes, "released");
}

/* It ended before the stuck one in front of it; its reply is owed all the same. */
GROUP_TEST(p3_a_request_that_ended_out_of_order_is_late, 3)
{
    struct test_pipe *stuck_pipe = test_pipe_new(), *late_pipe = test_pipe_new();
    const struct test_how stuck = {
        .gather = COX_GATHER_ALL, .ranks = 1, .timeout_ms = 10 * TEST_PATIENCE_MS};
    const struct test_how brief = {.gather = COX_GATHER_ALL, .ranks = 2, .timeout_ms = 30};
    const struct test_how third = {.gather = COX_GATHER_ALL, .ranks = 4};
    assert_int_equal(test_submit(g, &stuck, "block %s", test_pipe_path(stuck_pipe)), 0);
    char text[300];
    snprintf(text, sizeof text, "block %s", test_pipe_path(late_pipe));
    assert_int_equal(test_submit_persist(g, &brief, text), 0);
    const struct test_completion *c = test_await(g, 0);
    assert_int_equal(c->sequence, 2);
    assert_int_equal(c->status, COX_TIMEOUT);
    assert_int_equal(c->ranks[1].outcome, COX_OUTCOME_LATE);
    test_await_lines(g, 1, "blocked", 1); /* else the next refusal may only be for a slow start */
    assert_int_equal(test_submit(g, &third, "echo x"), COX_LATE);
    assert_contains(test_error_text(g), "rank 1 still owes the reply to sequence 2");
    test_pipe_release(late_pipe, 1);
    assert_int_equal(test_submit_persist(g, &third, "echo x"), 0);
    c = test_await(g, 1);
    assert_int_equal(c->sequence, 3);
    assert_int_equal(c->status, 0);
    assert_int_equal(stats_of(g, COX_CHANNEL_EXECUTE).late_replies, 1);
    test_pipe_release(stuck_pipe, 1);
    assert_int_equal(test_await(g, 2)->sequence, 1);
}

struct held {
    sem_t inside, go;
    _Atomic int runs, lost;
    struct test_group *group;
};

/* The first run waits for the test. */
static void held_handler(void *context, const struct cox_completion *completion)
{
    struct held *held = context;
    if (atomic_fetch_add(&held->runs, 1) == 0) {
        sem_post(&held->inside);
        atomic_fetch_add(&held->lost, !test_sem_await(&held->go));
    }
    test_handler(held->group, completion);
}

static void await_done(const struct cox_control *control, uint32_t rank, uint64_t sequence)
{
    AWAIT(cox_state_done(cox_state_line(control, rank, COX_CHANNEL_EXECUTE)) >= sequence);
}

static void await_clock(uint64_t time_ns)
{
    const struct timespec until = cox_deadline_timespec(time_ns);
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL))
        continue;
}

/* All had replied in time; only the thread that checks was delayed, past the deadline. */
TEST(p3_an_reply_of_every_rank_is_no_timeout)
{
    char name[64];
    struct test_group *g =
        test_group_start(2, START_WITH(.memory.keep_names = true, .name = test_unique_name(name)));
    struct cox_executor *executor = test_group_executor(g);
    struct held held = {.group = g};
    struct cox_control control = COX_CONTROL_NONE;
    sem_init(&held.inside, 0, 0);
    sem_init(&held.go, 0, 0);
    assert_int_equal(cox_control_attach(&control, name, NULL), 0);
    assert_ok(cox_executor_set_handler(executor, COX_CHANNEL_EXECUTE, held_handler, &held));
    assert_int_equal(test_submit(g, &test_all, "echo first"), 0);
    assert_true(test_sem_await(&held.inside));
    const uint64_t deadline_ns = cox_deadline_after_ms(300);
    uint64_t sequence;
    assert_ok(cox_executor_submit_opaque(
        executor, "echo second", 11,
        SUBMIT_WITH(.gather = COX_GATHER_ALL, .deadline_ns = deadline_ns), &sequence, NULL));
    await_done(&control, 0, sequence);
    await_done(&control, 1, sequence);
    await_clock(deadline_ns + 1);
    sem_post(&held.go);
    const struct test_completion *c = test_await(g, 1);
    assert_int_equal(c->sequence, sequence);
    assert_int_equal(c->status, 0);
    assert_true(c->completed_ns > deadline_ns);
    assert_string_equal(c->ranks[1].bytes, "second");
    assert_int_equal(atomic_load(&held.lost), 0);
    cox_control_close(&control);
    test_group_free(g);
    sem_destroy(&held.inside);
    sem_destroy(&held.go);
}

/* ---- handlers that follow each other ---- */

struct swap {
    struct test_group *group;
    sem_t old_inside, old_go, new_ran, replaced;
    _Atomic int old_runs, new_runs, lost;
    int result;
    int old_runs_at_return;
    bool old_finished_at_return;
    _Atomic bool old_finished;
};

static void old_handler(void *context, const struct cox_completion *completion)
{
    struct swap *swap = context;
    (void)completion;
    if (atomic_fetch_add(&swap->old_runs, 1) == 0) {
        sem_post(&swap->old_inside);
        atomic_fetch_add(&swap->lost, !test_sem_await(&swap->old_go));
    }
    atomic_store(&swap->old_finished, true);
}

/* Runs right behind the old one, and does not return before replace has: the channel is inside a
 * handler all the time. */
static void new_handler(void *context, const struct cox_completion *completion)
{
    struct swap *swap = context;
    (void)completion;
    if (atomic_fetch_add(&swap->new_runs, 1) == 0)
        atomic_fetch_add(&swap->lost, !test_sem_await(&swap->replaced));
    sem_post(&swap->new_ran);
}

static void *replace_main(void *argument)
{
    struct swap *swap = argument;
    swap->result = cox_executor_set_handler(test_group_executor(swap->group), COX_CHANNEL_EXECUTE,
                                            new_handler, swap);
    swap->old_finished_at_return = atomic_load(&swap->old_finished);
    swap->old_runs_at_return = atomic_load(&swap->old_runs);
    sem_post(&swap->replaced);
    return NULL;
}

TEST(m5_set_handler_returns_although_the_new_handler_runs_on)
{
    struct test_group *g = test_group_start(2, NULL);
    struct cox_executor *executor = test_group_executor(g);
    struct swap swap = {.group = g};
    sem_t *const sems[] = {&swap.old_inside, &swap.old_go, &swap.new_ran, &swap.replaced};
    for (size_t i = 0; i < 4; i++)
        sem_init(sems[i], 0, 0);
    assert_ok(cox_executor_set_handler(executor, COX_CHANNEL_EXECUTE, old_handler, &swap));
    for (int k = 0; k < 4; k++)
        assert_int_equal(test_submit(g, &test_all, "echo %d", k), 0);
    assert_true(test_sem_await(&swap.old_inside));
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, replace_main, &swap), 0);
    /* Once the new handler is in place, set_handler holds the lock or waits. */
    struct cox_collector *collector = &executor->collectors[COX_CHANNEL_EXECUTE];
    bool placed = false;
    for (uint64_t deadline_ns = test_patience(); !placed && cox_now_ns() < deadline_ns;
         sched_yield()) {
        pthread_mutex_lock(&collector->lock);
        placed = collector->handler == new_handler;
        pthread_mutex_unlock(&collector->lock);
    }
    sem_post(&swap.old_go);
    bool ran = true;
    for (int k = 0; k < 3; k++)
        ran = ran && test_sem_await(&swap.new_ran);
    pthread_join(thread, NULL);
    assert_true(placed);
    assert_true(ran);
    assert_int_equal(atomic_load(&swap.lost), 0);
    assert_int_equal(swap.result, 0);
    assert_true(swap.old_finished_at_return);
    assert_int_equal(swap.old_runs_at_return, 1);
    assert_int_equal(atomic_load(&swap.old_runs), 1);
    test_group_free(g);
    for (size_t i = 0; i < 4; i++)
        sem_destroy(sems[i]);
}

/* ---- deadlines ---- */

GROUP_TEST(p3_a_deadline_that_has_passed_publishes_nothing, 2)
{
    assert_int_equal(cox_executor_set_handler(executor, COX_CHANNEL_EXECUTE, test_handler, g), 0);
    const uint64_t deadlines[] = {1, cox_now_ns() - 1};
    for (size_t i = 0; i < 2; i++) {
        const struct cox_submit_options options = {.size = sizeof(struct cox_submit_options),
                                                   .gather = COX_GATHER_ALL,
                                                   .deadline_ns = deadlines[i]};
        uint64_t sequence = 77;
        assert_int_equal(
            cox_executor_submit_opaque(executor, "echo x", 6, &options, &sequence, test_err()),
            COX_TIMEOUT);
        assert_int_equal(sequence, 77);
        assert_contains(test_error.text, "has passed");
        assert_int_equal(
            cox_executor_call_opaque(executor, "echo x", 6, &options, NULL, NULL, test_err()),
            COX_TIMEOUT);
        struct cox_link_status status;
        assert_int_equal(cox_executor_link_status(executor, deadlines[i], &status, test_err()),
                         COX_TIMEOUT);
    }
    assert_int_equal(stats_of(g, COX_CHANNEL_EXECUTE).submitted, 0);
    assert_int_equal(stats_of(g, COX_CHANNEL_LINK).submitted, 0);
    test_expect_echo(g, "first");
    OWN_COMPLETION c = {0};
    assert_int_equal(test_call(g, &c, "served"), 0); /* no rank saw one of them */
    assert_string_equal(c.ranks[1].bytes, "2");
    assert_int_equal(test_completion_count(g), 0);
}

/* ---- wake-ups that get lost ---- */

struct thief {
    struct test_group *group;
    struct cox_semaphore wakeup;
    /* links so far */
    uint32_t links;
    /* that holds rank 0 */
    struct test_pipe *pipe;
};

/* Stops rank 1 once it sleeps: one that spins finds the next request without a wake-up. */
static void thief_stop(struct thief *thief)
{
    const pid_t pid = cox_executor_pid(test_group_executor(thief->group), 1);
    AWAIT(process_sleeps(pid));
    test_stop_process(pid);
}

/* Rank 1 is stopped and something was published for it. Returns how many tokens there were. */
static int thief_steal(struct thief *thief)
{
    int count = 0;
    while (cox_semaphore_take(&thief->wakeup))
        count++;
    assert_int_equal(kill(cox_executor_pid(test_group_executor(thief->group), 1), SIGCONT), 0);
    return count;
}

static uint64_t rewakes_of(const struct thief *thief, enum cox_channel_id channel)
{
    return stats_of(thief->group, channel).rewakes;
}

#define ROUND_COUNT 100

/* Until a round in which the rank was woken, which the round returns: one that was still on its way
 * to sleep finds the request without a wake-up. */
static void thief_run(enum cox_channel_id channel, uint32_t depth,
                      bool (*round)(struct thief *thief, struct test_group *g, size_t n))
{
    char name[64], object[COX_OBJECT_NAME_SIZE];
    struct thief thief = {.pipe = test_pipe_new()};
    bool woken = false;
    thief.group = test_group_start(
        2, START_WITH(.memory.keep_names = true, .name = test_unique_name(name), .depth = depth));
    cox_name_wakeup(object, name, channel, COX_WAKEUP_REQUEST_CONSUME, 1);
    assert_ok(cox_semaphore_attach(&thief.wakeup, object, test_err()));
    for (size_t n = 0; n < ROUND_COUNT && !woken; n++)
        woken = round(&thief, thief.group, n);
    assert_true(woken);
    cox_semaphore_detach(&thief.wakeup);
    test_group_free(thief.group);
}

#define THIEF_TEST(name, channel, depth)                                                           \
    static bool name##_round(struct thief *thief, struct test_group *g, size_t n);                 \
    TEST(name)                                                                                     \
    {                                                                                              \
        thief_run(channel, depth, name##_round);                                                   \
    }                                                                                              \
    static bool name##_round(struct thief *thief, struct test_group *g,                            \
                             __attribute__((unused)) size_t n)

THIEF_TEST(p2_a_lost_wake_up_is_sent_again, COX_CHANNEL_EXECUTE, 1)
{
    test_expect_echo(g, "awake");
    uint64_t before = rewakes_of(thief, COX_CHANNEL_EXECUTE);
    thief_stop(thief);
    assert_int_equal(test_submit(g, &test_all, "echo in flight"), 0);
    assert_true(thief_steal(thief) > 0);
    assert_int_equal(test_await(g, n)->status, 0);
    return rewakes_of(thief, COX_CHANNEL_EXECUTE) > before;
}

THIEF_TEST(p2_also_when_the_request_has_ended, COX_CHANNEL_EXECUTE, 1)
{
    const struct test_how brief = {.gather = COX_GATHER_ALL, .timeout_ms = 10};
    test_expect_echo(g, "awake");
    thief_stop(thief);
    test_call_in_vain(g, NULL, &brief, "echo late");
    uint64_t before = rewakes_of(thief, COX_CHANNEL_EXECUTE);
    assert_true(thief_steal(thief) > 0);
    test_expect_echo(g, "again");
    return rewakes_of(thief, COX_CHANNEL_EXECUTE) > before;
}

THIEF_TEST(p2_also_when_no_call_waits_for_a_reply, COX_CHANNEL_LINK, 1)
{
    expect_links(g, thief->links);
    uint64_t before = rewakes_of(thief, COX_CHANNEL_LINK);
    /* The frame of the status has been returned, else the link would find it taken. */
    assert_int_equal(submit_links(test_group_executor(g), 1), 0);
    expect_links(g, ++thief->links);
    thief_stop(thief);
    int r = submit_link(test_group_executor(g));
    assert_true(r == 0 || r == COX_FULL);
    thief->links += r == 0;
    int stolen = thief_steal(thief);
    assert_true(r || stolen > 0);
    expect_links(g, thief->links);
    return r == 0 && rewakes_of(thief, COX_CHANNEL_LINK) > before;
}

static uint64_t ring_time(struct cox_collector *collector)
{
    pthread_mutex_lock(&collector->lock);
    uint64_t time_ns = collector->rewake_ns;
    pthread_mutex_unlock(&collector->lock);
    return time_ns;
}

/* Submits again each time the response thread has woken for what is in flight, while the reply is
 * LATE. */
static int submit_after_rings(struct test_group *g, const struct test_how *how)
{
    struct cox_collector *collector = &test_group_executor(g)->collectors[COX_CHANNEL_EXECUTE];
    uint64_t deadline_ns = cox_deadline_after_ms(TEST_PATIENCE_MS / 4);
    int r = COX_LATE;
    while (r == COX_LATE && cox_now_ns() < deadline_ns) {
        uint64_t before = ring_time(collector);
        while (ring_time(collector) == before && cox_now_ns() < deadline_ns)
            sched_yield();
        r = test_submit(g, how, "echo again");
    }
    return r;
}

/* Found by the model (tests/model): the first to check in a slice sent the rewake, and no other
 * did. */
THIEF_TEST(p2_also_beside_a_stuck_request, COX_CHANNEL_EXECUTE, 4)
{
    const struct test_how stuck = {
        .gather = COX_GATHER_ALL, .ranks = 1, .timeout_ms = 10 * TEST_PATIENCE_MS};
    const struct test_how brief = {.gather = COX_GATHER_ALL, .ranks = 2, .timeout_ms = 10};
    const struct test_how again = {.gather = COX_GATHER_ALL, .ranks = 2};
    test_expect_echo(g, "awake");
    assert_int_equal(test_submit(g, &stuck, "block %s", test_pipe_path(thief->pipe)), 0);
    test_await_lines(g, 0, "blocked", n + 1);
    thief_stop(thief);
    assert_int_equal(test_submit_persist(g, &brief, "echo late"), 0);
    assert_int_equal(test_await(g, 3 * n)->status, COX_TIMEOUT);
    uint64_t before = rewakes_of(thief, COX_CHANNEL_EXECUTE);
    assert_true(thief_steal(thief) > 0);
    assert_int_equal(submit_after_rings(g, &again), 0);
    const bool woken = rewakes_of(thief, COX_CHANNEL_EXECUTE) > before;
    assert_int_equal(test_await(g, 3 * n + 1)->status, 0);
    test_pipe_release(thief->pipe, 1);
    assert_int_equal(test_await(g, 3 * n + 2)->status, 0);
    return woken;
}
