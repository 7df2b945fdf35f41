/* Completions that the host collects on its own threads. */
#include "testing.h"

#define EXECUTE COX_CHANNEL_EXECUTE
#define DEPTH 4

static struct test_group *start(uint32_t rank_count)
{
    return test_group_start(rank_count,
                            START_WITH(.collect = true, .depth = DEPTH, .times.finalize_ms = 300));
}

static int submit(struct test_group *g, const char *text, void *context, uint64_t deadline_ns,
                  struct cox_error *err)
{
    uint64_t sequence;
    return cox_executor_submit_opaque(test_group_executor(g), text, strlen(text),
                                      SUBMIT_WITH(.gather = COX_GATHER_ALL,
                                                  .deadline_ns = deadline_ns,
                                                  .request_context = context),
                                      &sequence, err);
}

/* After a request that ended early, some ranks may still have to reply to it. */
static void submit_persist(struct test_group *g, const char *text)
{
    int r;
    while ((r = submit(g, text, NULL, test_patience(), test_err())) == COX_LATE || r == COX_FULL)
        sched_yield();
    assert_int_equal(r, 0);
}

static int collect(struct test_group *g, struct cox_completion *completions, uint32_t count_max,
                   uint64_t deadline_ns, uint32_t *ret_count)
{
    return cox_executor_completions(test_group_executor(g), EXECUTE, completions, count_max,
                                    deadline_ns, ret_count, test_err());
}

/* The next one. */
static struct cox_completion collect_one(struct test_group *g)
{
    struct cox_completion completion;
    uint32_t count;
    assert_ok(collect(g, &completion, 1, test_patience(), &count));
    assert_int_equal(count, 1);
    return completion;
}

static void expect_nothing(struct test_group *g)
{
    struct cox_completion completion;
    uint32_t count;
    assert_int_equal(collect(g, &completion, 1, 0, &count), COX_TIMEOUT);
}

/* ranks: a command for "only"; "": all of them. */
static const char *block_text(const struct test_pipe *pipe, const char *ranks)
{
    static char text[256];
    snprintf(text, sizeof text, "%sblock %s", ranks, test_pipe_path(pipe));
    return text;
}

static void expect_text(const struct cox_completion *completion, const char *text)
{
    assert_int_equal(completion->status, 0);
    for (uint32_t rank = 0; rank < completion->rank_count; rank++) {
        assert_int_equal(completion->ranks[rank].outcome, COX_OUTCOME_OK);
        assert_int_equal(completion->ranks[rank].size, strlen(text));
        assert_memory_equal(completion->ranks[rank].bytes, text, strlen(text));
    }
}

/* ---- in order, and lent until the next collection ---- */

TEST(p4_completions_are_collected_in_order_and_stay_whole)
{
    for (uint32_t n = 1; n <= 8; n *= 2) {
        OWN_GROUP *g = start(n);
        struct cox_completion completions[DEPTH];
        uint32_t count, seen = 0;
        char texts[64][32];
        for (uint32_t sent = 0; seen < 64;) {
            /* Their frames are used again while they are looked at. */
            for (int twice = 0; twice < 2; twice++) {
                int r = 0;
                while (sent < 64 && r == 0) {
                    snprintf(texts[sent], sizeof texts[sent], "echo number %u", sent);
                    r = submit(g, texts[sent], texts[sent], test_patience(), test_err());
                    sent += r == 0;
                }
                assert_true(r == 0 || r == COX_FULL || r == COX_LATE);
                if (twice == 0)
                    assert_ok(collect(g, completions, DEPTH, test_patience(), &count));
            }
            for (uint32_t i = 0; i < count; i++, seen++) {
                assert_ptr_equal(completions[i].request_context, texts[seen]);
                expect_text(&completions[i], texts[seen] + strlen("echo "));
            }
        }
        expect_nothing(g);
    }
}

/* ---- room ---- */

TEST(p4_what_is_not_collected_takes_room)
{
    OWN_GROUP *g = start(2);
    struct cox_completion completions[DEPTH];
    uint32_t count, collected = 0;
    for (int i = 0; i < DEPTH; i++)
        assert_ok(submit(g, "echo x", NULL, test_patience(), test_err()));
    /* One at a time: the rest stays, and the thread that calls leaves them where they are. */
    collect_one(g);
    collected++;
    test_expect_echo(g, "called between");
    int r = 0;
    while (r == 0)
        r = submit(g, "echo y", NULL, test_patience(), test_err());
    assert_int_equal(r, COX_FULL);
    /* A call gathers, but makes no room: only the host takes the completions. */
    assert_refused(cox_executor_call_opaque(test_group_executor(g), "echo z", 6,
                                            SUBMIT_WITH(.deadline_ns = cox_deadline_after_ms(50)),
                                            NULL, NULL, test_err()),
                   COX_TIMEOUT, "no room in time");
    if (!strstr(test_error.text, "frames are in flight")) /* a slow machine did not get that far */
        assert_contains(test_error.text, "completions wait to be collected");
    while (collect(g, completions, DEPTH, cox_deadline_after_ms(100), &count) == 0) {
        for (uint32_t i = 0; i < count; i++)
            assert_true(completions[i].ranks[1].size == 1);
        collected += count;
    }
    assert_true(collected >= DEPTH);
    assert_ok(submit(g, "echo z", NULL, test_patience(), test_err()));
    struct cox_completion last = collect_one(g);
    expect_text(&last, "z");
}

/* ---- waits ---- */

TEST(m4_deadlines_errors_and_deaths_are_collected)
{
    OWN_GROUP *g = start(4);
    struct cox_completion c;
    uint32_t count;
    uint64_t begin_ns = cox_now_ns();
    assert_int_equal(collect(g, &c, 1, cox_deadline_after_ms(30), &count), COX_TIMEOUT);
    assert_true(cox_now_ns() - begin_ns >= 30 * COX_NSEC_PER_MSEC);

    struct test_pipe *pipe = test_pipe_new();
    assert_ok(submit(g, block_text(pipe, ""), NULL, cox_deadline_after_ms(50), test_err()));
    c = collect_one(g);
    assert_int_equal(c.status, COX_TIMEOUT);
    for (uint32_t rank = 0; rank < 4; rank++)
        assert_int_equal(c.ranks[rank].outcome, COX_OUTCOME_LATE);
    assert_contains(c.text, "0 of 4 ranks");
    test_pipe_release(pipe, 4);

    submit_persist(g, "each echo x|fail 7 no|echo x|echo x");
    c = collect_one(g);
    assert_int_equal(c.status, COX_REJECTED);
    assert_int_equal(c.ranks[1].code, 7);
    assert_string_equal(c.ranks[1].text, "no");

    test_needs_processes();
    submit_persist(g, block_text(pipe, ""));
    kill(test_pid(g, 2), SIGKILL);
    c = collect_one(g);
    assert_int_equal(c.status, COX_PEER_DEAD);
    assert_int_equal(c.ranks[2].signal, SIGKILL);
    test_pipe_release(pipe, 3);
}

TEST(m13_a_dead_rank_is_replaced_without_a_collector)
{
    test_needs_processes();
    OWN_GROUP *g = start(2);
    struct test_pipe *pipe = test_pipe_new();
    assert_ok(submit(g, block_text(pipe, "only 1 "), NULL, test_patience(), test_err()));
    kill(test_pid(g, 1), SIGKILL);
    test_await_death(g, 1);
    assert_ok(cox_executor_restart(test_group_executor(g), 1, test_patience(), test_err()));
    assert_int_equal(collect_one(g).status, COX_PEER_DEAD);
    test_expect_echo(g, "replaced");
}

/* ---- several threads ---- */

#define CALLER_COUNT 4
#define CALLS 200

struct callers {
    struct test_group *group;
    atomic_uint failed;
};

static void *call(void *context)
{
    struct callers *callers = context;
    for (int i = 0; i < CALLS; i++)
        if (cox_executor_call_opaque(test_group_executor(callers->group), "echo c", 6,
                                     SUBMIT_WITH(.deadline_ns = test_patience()), NULL, NULL, NULL))
            atomic_fetch_add(&callers->failed, 1);
    return NULL;
}

static void *submit_steadily(void *context)
{
    struct callers *callers = context;
    for (int i = 0; i < CALLS;) {
        int r = submit(callers->group, "echo s", NULL, test_patience(), test_err());
        if (r == 0)
            i++;
        else if (r != COX_FULL && r != COX_LATE)
            atomic_fetch_add(&callers->failed, 1);
        else
            sched_yield();
    }
    return NULL;
}

TEST(p4_calls_and_collections_gather_for_each_other)
{
    struct callers callers = {.group = start(2)};
    struct cox_completion completions[DEPTH];
    pthread_t threads[CALLER_COUNT + 1];
    uint32_t count, collected = 0;
    for (int i = 0; i < CALLER_COUNT; i++)
        threads[i] = test_thread(call, &callers);
    threads[CALLER_COUNT] = test_thread(submit_steadily, &callers);
    while (collected < CALLS) {
        assert_int_equal(collect(callers.group, completions, DEPTH, test_patience(), &count), 0);
        for (uint32_t i = 0; i < count; i++)
            expect_text(&completions[i], "s");
        collected += count;
    }
    for (int i = 0; i <= CALLER_COUNT; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(atomic_load(&callers.failed), 0);
    assert_int_equal(collected, CALLS);
    test_group_free(callers.group);
}

#define HELD_COUNT (2 * DEPTH)

struct held_calls {
    struct test_group *group;
    atomic_uint inside, failed;
    atomic_bool leave;
};

static void stay_inside(void *context, const struct cox_completion *completion)
{
    struct held_calls *held = context;
    (void)completion;
    atomic_fetch_add(&held->inside, 1);
    AWAIT(atomic_load(&held->leave));
}

static void *call_and_stay(void *context)
{
    struct held_calls *held = context;
    if (cox_executor_call_opaque(test_group_executor(held->group), "echo c", 6,
                                 SUBMIT_WITH(.deadline_ns = test_patience()), stay_inside, held,
                                 test_err()))
        atomic_fetch_add(&held->failed, 1);
    return NULL;
}

/* The handlers have all memory for completions, so what is collected stays in its frame. When they
 * have returned the frame is free, although the host does not collect again. */
TEST(p4_what_a_host_has_collected_keeps_no_frame_from_calls)
{
    struct held_calls held = {.group = start(2)};
    pthread_t threads[HELD_COUNT];
    for (int i = 0; i < HELD_COUNT; i++)
        threads[i] = test_thread(call_and_stay, &held);
    /* DEPTH + 2 have memory of their own; those that are behind them stay in their frames. */
    AWAIT(atomic_load(&held.inside) >= DEPTH + 2);
    submit_persist(held.group, "echo s");
    struct cox_completion c = collect_one(held.group);
    atomic_store(&held.leave, true);
    for (int i = 0; i < HELD_COUNT; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(atomic_load(&held.failed), 0);
    for (int i = 0; i < 2 * DEPTH; i++)
        test_expect_echo(held.group, "c");
    expect_text(&c, "s");
    test_group_free(held.group);
}

struct collector {
    struct test_group *group;
    int status;
    uint32_t closed;
};

static void *collect_until_closed(void *context)
{
    struct collector *collector = context;
    struct cox_completion completions[DEPTH];
    uint32_t count;
    while ((collector->status =
                collect(collector->group, completions, DEPTH, COX_DEADLINE_NEVER, &count)) == 0)
        for (uint32_t i = 0; i < count; i++)
            collector->closed += completions[i].status == COX_CLOSED;
    return NULL;
}

TEST(p4_a_stop_ends_the_collection_and_what_is_in_flight)
{
    for (int in_flight = 0; in_flight <= 2; in_flight++) {
        OWN_GROUP *g = start(2);
        struct collector collector = {.group = g};
        struct test_pipe *pipe = test_pipe_new();
        pthread_t thread = test_thread(collect_until_closed, &collector);
        for (int i = 0; i < in_flight; i++)
            assert_ok(submit(g, block_text(pipe, ""), NULL, COX_DEADLINE_NEVER, test_err()));
        if (in_flight) /* one that ran, so that the others are in flight */
            test_pipe_release(pipe, 2 * (size_t)in_flight - 1);
        cox_executor_stop(test_group_executor(g));
        pthread_join(thread, NULL);
        assert_int_equal(collector.status, COX_CLOSED);
        if (in_flight)
            assert_true(collector.closed >= 1);
        test_pipe_release(pipe, 1);
    }
}

/* ---- refusals ---- */

static void in_visit(void *context, const struct cox_completion *completion)
{
    struct cox_completion completions[1];
    uint32_t count;
    (void)completion;
    *(int *)context = cox_executor_completions(test_group_executor(((void **)context)[1]), EXECUTE,
                                               completions, 1, 0, &count, NULL);
}

/* ---- when a late rank is free again ---- */

/* One rank holds the request until the pipe is released; its first completion is collected. */
static uint64_t submit_late(struct test_group *g, uint32_t bad, const struct test_pipe *pipe)
{
    char text[256];
    struct cox_submit_options options = {.size = sizeof options,
                                         .gather = COX_GATHER_ALL,
                                         .request_context = g,
                                         .report_late = true};
    uint64_t sequence;
    snprintf(text, sizeof text, "only %u block %s", bad, test_pipe_path(pipe));
    do /* on a machine that was held up the deadline has passed before */
        options.deadline_ns = cox_deadline_after_ms(20);
    while (cox_executor_submit_opaque(test_group_executor(g), text, strlen(text), &options,
                                      &sequence, test_err()) == COX_TIMEOUT);
    const struct cox_completion c = collect_one(g);
    assert_int_equal(c.status, COX_TIMEOUT);
    assert_int_equal(c.ranks[bad].outcome, COX_OUTCOME_LATE);
    return sequence;
}

static void expect_late(struct test_group *g, uint64_t sequence, uint32_t bad,
                        enum cox_outcome outcome)
{
    const struct cox_completion c = collect_one(g), *completion = &c;
    assert_int_equal(completion->status, COX_LATE);
    assert_int_equal(completion->sequence, sequence);
    assert_ptr_equal(completion->request_context, g);
    assert_int_equal(completion->ranks[bad].outcome, outcome);
    assert_int_equal(completion->ranks[bad].taken, outcome == COX_OUTCOME_OK);
    assert_contains(completion->text, outcome == COX_OUTCOME_OK ? "replied" : "1 died");
    assert_null(completion->payload);
}

TEST(s4_a_second_completion_reports_that_the_late_rank_is_free)
{
    for (uint32_t n = 1; n <= 4; n *= 2) {
        OWN_GROUP *g = start(n);
        struct test_pipe *pipe = test_pipe_new();
        struct cox_completion c;
        struct cox_channel_stats before, after;
        /* More often than there are frames. */
        for (int round = 0; round < 2 * DEPTH; round++) {
            const uint64_t sequence = submit_late(g, n - 1, pipe);
            before = test_stats(test_group_executor(g), EXECUTE);
            expect_nothing(g);
            test_pipe_release(pipe, 1);
            expect_late(g, sequence, n - 1, COX_OUTCOME_OK);
            /* No rank owes anything now: the next request needs no second attempt. */
            assert_ok(submit(g, "echo next", NULL, test_patience(), test_err()));
            c = collect_one(g);
            expect_text(&c, "next");
            after = test_stats(test_group_executor(g), EXECUTE);
            assert_int_equal(after.completed, before.completed + 1);
            expect_nothing(g);
        }
    }
}

TEST(s4_a_late_rank_that_dies_or_a_stop_ends_the_wait)
{
    struct test_group *g = start(2);
    struct test_pipe *pipe = test_pipe_new();
    struct cox_completion completion;
    uint32_t count;
    uint64_t sequence = submit_late(g, 1, pipe);
    assert_int_equal(kill(test_pid(g, 1), SIGKILL), 0);
    expect_late(g, sequence, 1, COX_OUTCOME_DEAD);
    test_group_free(g);

    g = start(2);
    submit_late(g, 0, pipe);
    test_pipe_release(pipe, 1);
    cox_executor_stop(test_group_executor(g));
    assert_int_equal(collect(g, &completion, 1, test_patience(), &count), COX_CLOSED);
    test_group_free(g);
}

TEST(p4_wrong_use_is_refused)
{
    struct cox_completion completions[1];
    uint32_t count;
    struct test_group *g = start(1);
    struct cox_executor *executor = test_group_executor(g);
    assert_int_equal(
        cox_executor_completions(executor, COX_CHANNEL_LINK, completions, 1, 0, &count, test_err()),
        COX_INVALID);
    assert_int_equal(collect(g, completions, 0, 0, &count), COX_INVALID);
    assert_int_equal(cox_executor_set_handler(executor, EXECUTE, test_handler, g), COX_STATE);
    struct {
        int status;
        struct test_group *group;
    } visit = {.group = g};
    assert_ok(cox_executor_call_opaque(executor, "echo x", 6,
                                       SUBMIT_WITH(.deadline_ns = test_patience()), in_visit,
                                       &visit, test_err()));
    assert_int_equal(visit.status, COX_DEADLOCK);
    test_group_free(g);

    g = test_group_start(1, NULL);
    assert_refused(cox_executor_completions(test_group_executor(g), EXECUTE, completions, 1, 0,
                                            &count, test_err()),
                   COX_STATE, "collect");
    test_group_free(g);
}
