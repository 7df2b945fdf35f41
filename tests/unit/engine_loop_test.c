/*
 * engine loop: whole runs against the rank of engine_loop_fixture.h.
 */
#include "worker/sequences/table_private.h"
#include "engine_loop_fixture.h"
#include "tests/lib/allocations.h"
#include "tests/lib/test.h"

/* ---- requests whose replies are known ---- */

#define REQUEST_COUNT 200
#define PROMPT_MAX 60

struct expectation {
    int32_t tokens[PROMPT_MAX + 40];
    uint32_t prompt_count;
    uint32_t new_max;
    uint32_t done_count;
    /* expected */
    int code;
    bool unstoppable;
};

static struct expectation expectations[REQUEST_COUNT];
static uint32_t random_state;

static uint32_t draw(uint32_t below)
{
    random_state = random_state * 1664525 + 1013904223;
    return (random_state >> 8) % below;
}

static void expectations_make(uint32_t seed)
{
    random_state = seed;
    memset(expectations, 0, sizeof expectations);
    for (int i = 0; i < REQUEST_COUNT; i++) {
        struct expectation *e = &expectations[i];
        e->prompt_count = 1 + draw(draw(4) ? 10 : PROMPT_MAX);
        e->new_max = 1 + draw(30);
        for (uint32_t t = 0; t < e->prompt_count; t++)
            e->tokens[t] = (int32_t)draw(100);
    }
}

static void on_done(void *context, const struct cox_sequence *sequence)
{
    (void)context;
    struct expectation *e = sequence->request.context;
    e->done_count++;
    COX_ASSERT(sequence->error.code == e->code);
    if (e->code) {
        COX_ASSERT(sequence->finish == COX_FINISH_ERROR);
        return;
    }
    int32_t tokens[PROMPT_MAX + 40];
    uint32_t count = e->prompt_count;
    memcpy(tokens, e->tokens, sizeof tokens);
    do
        tokens[count] = model(tokens, count);
    while (tokens[count++] != STOP && count < e->prompt_count + e->new_max);
    COX_ASSERT(sequence->token_count == count);
    COX_ASSERT(!memcmp(sequence->tokens, tokens, count * sizeof *tokens));
    COX_ASSERT(sequence->finish ==
               (tokens[count - 1] == STOP ? COX_FINISH_STOP : COX_FINISH_LENGTH));
}

/* Made for each test, or each round of one: a rank, and the options of its engine loops. */
static struct cox_executor *executor;
static struct cox_engine_loop_options options;

static int setup(void **state)
{
    (void)state;
    executor = executor_new();
    options = (struct cox_engine_loop_options){
        .block_count = BLOCK_COUNT_MAX,
        .block_size = BLOCK_SIZE,
        .position_count_max = 128,
        .done = on_done,
    };
    return 0;
}

#define LOOP_TEST(name) TEST_WITH(name, setup, NULL)

/* The same for one round of many; its requests are those of the seed, and every third is legacy. */
static void setup_round(uint32_t seed)
{
    setup(NULL);
    expectations_make(seed);
    executor->legacy = seed % 3 == 0;
    options.steps_in_flight = executor->legacy ? 1 : 1 + seed % FIXTURE_DEPTH;
}

TEST_OWNED(cox_engine_loop_free)

static struct cox_engine_loop *engine_loop_new(void)
{
    struct cox_engine_loop *engine_loop = NULL;
    assert_ok(cox_engine_loop_new(executor, &options, &engine_loop, test_err()));
    return test_own(engine_loop, cox_engine_loop_free_owned);
}

static void add_one(struct cox_engine_loop *engine_loop, struct expectation *e)
{
    struct cox_prompt_request request = {
        .tokens = e->tokens,
        .token_count = e->prompt_count,
        .new_count_max = e->new_max,
        .stop_tokens = {STOP},
        .stop_count = e->unstoppable ? 0 : 1,
        .context = e,
    };
    COX_ASSERT(cox_engine_loop_add(engine_loop, &request) == 0);
}

static void add_all(struct cox_engine_loop *engine_loop)
{
    for (int i = 0; i < REQUEST_COUNT; i++)
        add_one(engine_loop, &expectations[i]);
}

/* `count` prompts of 3 tokens, each with so many new ones. */
static void add_prompts(struct cox_engine_loop *engine_loop, int count, uint32_t new_count)
{
    static const int32_t tokens[3] = {1, 2, 3};
    const struct cox_prompt_request request = {
        .tokens = tokens, .token_count = 3, .new_count_max = new_count};
    for (int i = 0; i < count; i++)
        assert_int_equal(cox_engine_loop_add(engine_loop, &request), 0);
}

static void expect_all_done(void)
{
    for (int i = 0; i < REQUEST_COUNT; i++)
        assert_int_equal(expectations[i].done_count, 1);
}

/* Of the last run. */
static struct cox_error run_error;

/* Runs all requests and expects `code` of the run; every request is reported once. */
static struct cox_engine_loop_stats run_all(int code)
{
    struct cox_engine_loop *engine_loop = engine_loop_new();
    struct cox_engine_loop_stats stats;
    for (int i = 0; i < REQUEST_COUNT; i++)
        expectations[i].code = code;
    add_all(engine_loop);
    cox_error_clear(&run_error);
    int r = cox_engine_loop_run(engine_loop, &run_error);
    if (r != code)
        fail_msg("run returned %d: %s", r, run_error.text);
    expect_all_done();
    cox_engine_loop_stats(engine_loop, &stats);
    test_release(engine_loop);
    if (!code)
        assert_int_equal(executor->table->store.live_count, 0);
    return stats;
}

LOOP_TEST(many_requests_share_steps)
{
    expectations_make(1);
    struct cox_engine_loop_stats stats = run_all(0);
    assert_true(executor->row_count_max > 32);
    assert_true(executor->row_count_max <= 64);
    assert_true(executor->token_count_max <= 512);
    assert_int_equal(stats.steps, executor->submit_count);
    assert_int_equal(stats.retries, 0);
    assert_true(stats.step_p50_ns > 0 && stats.step_p50_ns <= stats.step_p99_ns);
    assert_true(stats.channel_p50_ns > 0 && stats.channel_p99_ns <= stats.step_p99_ns);
    assert_true(stats.run_ns > 0);

    /* A second engine loop on the same group starts anew. */
    expectations_make(2);
    options.sequence_count_max = 1;
    assert_int_equal(run_all(0).batcher.preemptions, 0);
}

LOOP_TEST(small_pools_chunks_and_frames_change_no_text)
{
    uint64_t preemptions = 0;
    for (uint32_t seed = 1; seed <= 30; seed++) {
        setup_round(seed);
        options.block_count = 24 + draw(30);
        options.token_count_max = 1 + draw(40);
        options.sequence_count_max = 1 + draw(40);
        if (seed % 2)
            executor->request_size_max = 4000 + draw(2000);
        struct cox_engine_loop_stats stats = run_all(0);
        if (!executor->legacy)
            assert_true(executor->token_count_max <= options.token_count_max);
        preemptions += stats.batcher.preemptions;
    }
    assert_true(preemptions > 0);
}

static int fails_now_and_then(uint64_t number)
{
    static const int statuses[] = {COX_REJECTED, COX_TIMEOUT, COX_STALE, COX_ABORTED};
    uint64_t h = number * 2654435761u >> 7;
    return h % 5 == 0 ? statuses[h / 5 % 4] : 0;
}

LOOP_TEST(failed_steps_change_no_text)
{
    for (uint32_t seed = 1; seed <= 24; seed++) {
        setup_round(seed);
        options.block_count = 24 + draw(100);
        options.token_count_max = 100;
        options.retry_max = 20;
        executor->script.status = fails_now_and_then;
        executor->script.loses_table = seed % 2;
        assert_true(run_all(0).retries > 0);
    }
}

static int always_rejected(uint64_t number)
{
    (void)number;
    return COX_REJECTED;
}

LOOP_TEST(retries_end)
{
    for (uint32_t in_flight = 1; in_flight <= 3; in_flight++) {
        setup_round(1);
        options.steps_in_flight = in_flight;
        executor->script.status = always_rejected;
        assert_int_equal(run_all(COX_REJECTED).retries, 3);
        /* Those that are void with another one do not count. */
        assert_in_range(executor->submit_count, 4, 4 * in_flight);
        assert_contains(run_error.text, "rank 1 says no");
        assert_contains(run_error.text, "tried 4 times");
    }
}

static void runs_when_the_next_is_there(struct cox_executor *own, uint64_t number)
{
    if (number < 4)
        executor_await_published(own, number + 1);
}

/* A rank begins with it when it has ended those before, each of which has as long. */
LOOP_TEST(a_step_behind_others_has_the_time_of_a_step)
{
    const uint64_t step_ns = 600000 * COX_NSEC_PER_MSEC;
    options.done = NULL;
    options.step_ms = 600000;
    executor->script.taken = runs_when_the_next_is_there;
    struct cox_engine_loop *engine_loop = engine_loop_new();
    add_prompts(engine_loop, 1, 9);
    const uint64_t before_ns = cox_now_ns();
    assert_ok(cox_engine_loop_run(engine_loop, test_err()));
    const uint64_t after_ns = cox_now_ns();
    assert_in_range(executor->deadlines_ns[1], before_ns + step_ns, after_ns + step_ns);
    /* And not that of all that were ever in flight. */
    for (int number = 2; number <= 4; number++)
        assert_in_range(executor->deadlines_ns[number], before_ns + 2 * step_ns,
                        after_ns + 2 * step_ns);
}

static int second_refused(uint64_t number)
{
    return number == 2 ? COX_REJECTED : 0;
}

struct held {
    struct cox_engine_loop *engine_loop;
    uint32_t done_count;
};

static void on_done_held(void *context, const struct cox_sequence *sequence)
{
    struct held *held = context;
    const struct cox_kv_lease *hold = cox_engine_loop_kv_leases(held->engine_loop)->first;
    while (hold && hold != sequence->hold)
        hold = hold->next;
    assert_ptr_equal(hold, sequence->hold);
    assert_int_equal(sequence->error.code, 0);
    held->done_count++;
}

/* The first one ended well, and its hold has ended with the second. */
LOOP_TEST(m10_a_step_that_is_not_sent_leaves_no_visible_lease)
{
    struct held held = {0};
    options.done = on_done_held;
    options.done_context = &held;
    options.hold_count_max = 2;
    executor->script.submit = second_refused;
    held.engine_loop = engine_loop_new();
    const int32_t tokens[3] = {1, 2, 3};
    struct cox_prompt_request request = {.tokens = tokens, .token_count = 3, .new_count_max = 9};
    assert_int_equal(cox_engine_loop_add(held.engine_loop, &request), 0);
    request.hold_ms = 600000;
    assert_int_equal(cox_engine_loop_add(held.engine_loop, &request), 0);
    assert_ok(cox_engine_loop_run(held.engine_loop, test_err()));
    assert_int_equal(held.done_count, 2);
    assert_int_equal(cox_engine_loop_free_blocks(held.engine_loop), BLOCK_COUNT_MAX);
}

/* Not for ever, so that an engine loop that never ends fails here. */
static int every_second_rejected(uint64_t number)
{
    return number > 100 ? COX_DIVERGED : number % 2 ? 0 : COX_REJECTED;
}

/* Its first chunk is computed again each time, which is no step ahead. */
LOOP_TEST(retries_of_a_second_chunk_end)
{
    struct cox_engine_loop_stats stats;
    options.done = NULL;
    options.steps_in_flight = 1;
    options.token_count_max = 8;
    executor->script.status = every_second_rejected;
    struct cox_engine_loop *engine_loop = engine_loop_new();
    const int32_t tokens[12] = {1, 2, 3};
    const struct cox_prompt_request request = {
        .tokens = tokens, .token_count = 12, .new_count_max = 9};
    assert_int_equal(cox_engine_loop_add(engine_loop, &request), 0);
    assert_refused(cox_engine_loop_run(engine_loop, test_err()), COX_REJECTED, "tried 4 times");
    cox_engine_loop_stats(engine_loop, &stats);
    assert_int_equal(stats.retries, 3);
}

static int late_at_first(uint64_t number)
{
    return number % 7 ? 0 : number % 2 ? COX_LATE : COX_FULL;
}

static int late_for_ever(uint64_t number)
{
    (void)number;
    return COX_LATE;
}

LOOP_TEST(a_late_rank_is_waited_for)
{
    expectations_make(3);
    executor->script.submit = late_at_first;
    struct cox_engine_loop_stats stats = run_all(0);
    assert_true(executor->submit_count > stats.steps);
    assert_int_equal(stats.retries, 0);

    expectations_make(3);
    executor->script.submit = late_for_ever;
    options.step_ms = 50;
    run_all(COX_LATE);
    assert_contains(run_error.text, "submit says");
}

static int dead(uint64_t number)
{
    (void)number;
    return COX_PEER_DEAD;
}

LOOP_TEST(a_death_and_nonsense_end_all)
{
    executor->script.status = dead;
    expectations_make(4);
    assert_int_equal(run_all(COX_PEER_DEAD).retries, 0);

    for (int nested = 0; nested < 2; nested++) {
        setup(state);
        executor->legacy = nested;
        executor->script.bad_reply = true;
        expectations_make(4);
        run_all(COX_CORRUPT);
        assert_contains(run_error.text, "tokens for");
    }
}

/* ---- recovery ---- */

struct recoveries {
    uint32_t count;
    /* 1: recovered */
    int result;
    /* statuses, one bit each */
    int seen;
};

static int on_recover(void *context, struct cox_error *err)
{
    struct recoveries *recoveries = context;
    recoveries->count++;
    COX_ASSERT(err->code > 0 && err->text[0]);
    recoveries->seen |= 1 << err->code;
    if (recoveries->result && recoveries->result != COX_STALE)
        *err = (struct cox_error){.code = recoveries->result, .text = "given up"};
    return recoveries->result;
}

/* More failures in a row than would be tried again. */
static int dies_now_and_then(uint64_t number)
{
    static const int statuses[] = {COX_PEER_DEAD, COX_STATE, COX_ABORTED, COX_TIMEOUT};
    return number % 16 < 6 ? statuses[number % 4] : 0;
}

static int refuses_now_and_then(uint64_t number)
{
    return number % 9 == 4 ? COX_STATE : number % 9 == 5 ? COX_PEER_DEAD : 0;
}

static int cleanups;

static int cleanup_refuses_now_and_then(void)
{
    return ++cleanups % 2 ? COX_PEER_DEAD : 0;
}

LOOP_TEST(p8_a_recovered_group_gets_everything_again)
{
    for (uint32_t seed = 1; seed <= 24; seed++) {
        struct recoveries recoveries = {.result = COX_STALE};
        setup_round(seed);
        options.block_count = 24 + draw(100);
        options.token_count_max = 100;
        options.retry_max = 1;
        options.recover = on_recover;
        options.recover_context = &recoveries;
        executor->script.status = dies_now_and_then;
        executor->script.submit = refuses_now_and_then;
        /* Otherwise the base of the next step shows what was refused, and there is none. */
        if (executor->legacy)
            executor->script.cleanup = cleanup_refuses_now_and_then;
        executor->script.loses_table = seed % 2;
        struct cox_engine_loop_stats stats = run_all(0);
        assert_int_equal(stats.retries, recoveries.count);
        assert_int_equal(recoveries.seen,
                         1 << COX_PEER_DEAD | 1 << COX_STATE | 1 << COX_ABORTED | 1 << COX_TIMEOUT);
    }
}

/* The group had no failure: the limit stands. Without recovery, that is the error. */
LOOP_TEST(p8_what_is_not_recovered_ends_the_run)
{
    struct recoveries recoveries = {.result = 0};
    options.recover = on_recover;
    options.recover_context = &recoveries;
    executor->script.status = always_rejected;
    expectations_make(4);
    run_all(COX_REJECTED);
    assert_int_equal(recoveries.count, 4);
    assert_contains(run_error.text, "tried 4 times");

    executor = executor_new();
    executor->script.status = dead;
    expectations_make(4);
    run_all(COX_PEER_DEAD);
    assert_int_equal(recoveries.count, 5);

    executor = executor_new();
    recoveries.result = COX_PEER_DEAD;
    executor->script.status = always_rejected;
    expectations_make(4);
    run_all(COX_PEER_DEAD);
    assert_string_equal(run_error.text, "given up");
    assert_int_equal(recoveries.count, 6);
}

/* ---- requests that come while it runs ---- */

struct feeder {
    struct cox_engine_loop *engine_loop;
    /* of the expectations */
    int next;
    /* times that it had nothing to do */
    int idle_count;
    /* this one is cancelled once it runs; -1: none */
    int cancel_at;
    /* blocks */
    uint32_t free_min;
    /* at every idle time the ranks had forgotten all */
    bool announcement;
};

static bool on_feed(void *context, bool idle, uint64_t until_ns)
{
    (void)until_ns;
    struct feeder *feeder = context;
    uint32_t free_count = cox_engine_loop_free_blocks(feeder->engine_loop);
    feeder->free_min = free_count < feeder->free_min ? free_count : feeder->free_min;
    if (feeder->cancel_at >= 0 && feeder->next > feeder->cancel_at + 20) {
        cox_engine_loop_cancel(feeder->engine_loop, &expectations[feeder->cancel_at]);
        cox_engine_loop_cancel(feeder->engine_loop, feeder); /* no client's */
        feeder->cancel_at = -1;
    }
    if (idle) {
        feeder->idle_count++;
        feeder->announcement = feeder->announcement && executor->table->store.live_count == 0 &&
                               free_count == BLOCK_COUNT_MAX;
        if (feeder->next == REQUEST_COUNT)
            return false;
    }
    /* Now one, now some, now none while anything runs. */
    for (uint32_t count = idle ? 1 + draw(30) : draw(3); count && feeder->next < REQUEST_COUNT;
         count--)
        add_one(feeder->engine_loop, &expectations[feeder->next++]);
    return true;
}

LOOP_TEST(requests_come_and_go_while_it_runs)
{
    for (uint32_t seed = 1; seed <= 20; seed++) {
        struct feeder feeder = {
            .cancel_at = (int)(seed * 7 % 100), .free_min = BLOCK_COUNT_MAX, .announcement = true};
        setup_round(seed);
        options.feed = on_feed;
        options.feed_context = &feeder;
        options.retry_max = 20;
        if (seed % 2)
            executor->script.status = fails_now_and_then;
        /* It has no end of its own. */
        struct expectation *cancelled = &expectations[feeder.cancel_at];
        cancelled->code = COX_CLOSED;
        cancelled->new_max = 60;
        cancelled->unstoppable = true;
        feeder.engine_loop = engine_loop_new();
        assert_ok(cox_engine_loop_run(feeder.engine_loop, test_err()));
        expect_all_done();
        assert_true(feeder.idle_count > 0);
        assert_true(seed % 2 ||
                    feeder.announcement); /* a step that failed is forgotten at the next one */
        assert_true(feeder.free_min < BLOCK_COUNT_MAX);
        assert_int_equal(cox_engine_loop_free_blocks(feeder.engine_loop), BLOCK_COUNT_MAX);
    }
}

static struct cox_engine_loop *cancelling;

/* Ends the first request between a step that failed and the next one. */
static bool cancels_after_a_failure(void *context, bool idle, uint64_t until_ns)
{
    (void)context;
    (void)until_ns;
    if (!idle && executor->submit_count == 3)
        cox_engine_loop_cancel(cancelling, &expectations[0]);
    return !idle;
}

static int third_is_rejected(uint64_t number)
{
    return number == 3 ? COX_REJECTED : 0;
}

/* No step announces it again, and legacy ranks clear their tables at no step. */
LOOP_TEST(a_sequence_that_ends_after_a_failure_leaves_legacy_ranks)
{
    executor->legacy = true;
    executor->script.status = third_is_rejected;
    options.steps_in_flight = 1;
    options.feed = cancels_after_a_failure;
    expectations_make(5);
    expectations[0].code = COX_CLOSED;
    expectations[0].new_max = 60;
    expectations[0].unstoppable = true;
    cancelling = engine_loop_new();
    add_one(cancelling, &expectations[0]);
    add_one(cancelling, &expectations[1]);
    assert_ok(cox_engine_loop_run(cancelling, test_err()));
    assert_int_equal(expectations[0].done_count, 1);
    assert_int_equal(expectations[1].done_count, 1);
    assert_int_equal(executor->table->store.live_count, 0);
}

static void *stop_soon(void *context)
{
    cox_engine_loop_stop(context);
    return NULL;
}

/* Runs it while the thread stops it. */
static struct cox_engine_loop *run_closed(void *(*thread_main)(void *))
{
    expectations_make(5);
    for (int i = 0; i < REQUEST_COUNT; i++)
        expectations[i].code = COX_CLOSED;
    struct cox_engine_loop *engine_loop = engine_loop_new();
    add_all(engine_loop);
    pthread_t thread = test_thread(thread_main, engine_loop);
    assert_int_equal(cox_engine_loop_run(engine_loop, NULL), COX_CLOSED);
    pthread_join(thread, NULL);
    return engine_loop;
}

LOOP_TEST(stop_ends_a_run_whose_step_never_ends)
{
    executor->script.silent = true;
    struct cox_engine_loop *engine_loop = run_closed(stop_soon);
    expect_all_done();
    assert_int_equal(cox_engine_loop_run(engine_loop, NULL), COX_CLOSED);
}

struct sleeper {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    bool asleep, cancelled;
};

static int on_recover_sleep(void *context, struct cox_error *err)
{
    struct sleeper *sleeper = context;
    pthread_mutex_lock(&sleeper->lock);
    sleeper->asleep = true;
    pthread_cond_broadcast(&sleeper->wake);
    while (!sleeper->cancelled)
        pthread_cond_wait(&sleeper->wake, &sleeper->lock);
    pthread_mutex_unlock(&sleeper->lock);
    *err = (struct cox_error){.code = COX_CLOSED, .text = "stopped"};
    return COX_CLOSED;
}

static void on_recover_cancel(void *context)
{
    struct sleeper *sleeper = context;
    pthread_mutex_lock(&sleeper->lock);
    sleeper->cancelled = true;
    pthread_cond_broadcast(&sleeper->wake);
    pthread_mutex_unlock(&sleeper->lock);
}

static struct sleeper sleeper = {.lock = PTHREAD_MUTEX_INITIALIZER,
                                 .wake = PTHREAD_COND_INITIALIZER};

static void *stop_when_asleep(void *context)
{
    pthread_mutex_lock(&sleeper.lock);
    while (!sleeper.asleep)
        pthread_cond_wait(&sleeper.wake, &sleeper.lock);
    pthread_mutex_unlock(&sleeper.lock);
    cox_engine_loop_stop(context);
    return NULL;
}

LOOP_TEST(stop_ends_a_run_that_waits_for_recovery)
{
    options.recover = on_recover_sleep;
    options.recover_cancel = on_recover_cancel;
    options.recover_context = &sleeper;
    executor->script.status = dead;
    run_closed(stop_when_asleep);
}

static uint64_t allocations_before, allocations_after;

static int counts_allocations(uint64_t number)
{
    if (number == 5)
        allocations_before = allocation_count;
    if (number == 30)
        allocations_after = allocation_count;
    return 0;
}

LOOP_TEST(steps_allocate_nothing)
{
#ifdef SANITIZED
    skip();
#endif
    for (int nested = 0; nested < 2; nested++) {
        setup(state);
        executor->script.submit = counts_allocations;
        options.done = NULL;
        executor->legacy = nested;
        struct cox_engine_loop *engine_loop = engine_loop_new();
        add_prompts(engine_loop, 8, 40);
        allocations_before = allocations_after = 0;
        assert_ok(cox_engine_loop_run(engine_loop, test_err()));
        assert_int_equal(executor->submit_count, 40);
        assert_true(allocations_before > 0);
        assert_int_equal(allocations_after, allocations_before);
    }
}

/* They cannot compute tokens that the coordinator does not know. */
LOOP_TEST(legacy_workers_have_one_step_in_flight)
{
    executor->legacy = true;
    options.steps_in_flight = 2;
    struct cox_engine_loop *none = NULL;
    assert_refused(cox_engine_loop_new(executor, &options, &none, test_err()), COX_INVALID,
                   "2 steps in flight: at most 1 with legacy workers");
}

PLAIN_TEST(capacities_of_init_are_checked)
{
    struct cox_engine_loop_options fitted = {0};
    struct cox_init_summary summary = {
        .npu_block_count = 100,
        .max_position_embeddings = 64,
        .kv_cache_count = 1,
        .kv_caches = {{.block_count = 100, .block_size = 16}},
    };
    struct cox_error error = {0};
    assert_int_equal(cox_engine_loop_fit(&fitted, &summary, &error), 0);
    assert_int_equal(fitted.block_count, 100);
    assert_int_equal(fitted.block_size, 16);
    assert_int_equal(fitted.position_count_max, 64);
    summary.kv_caches[0].block_size = 0;
    assert_int_equal(cox_engine_loop_fit(&fitted, &summary, &error), COX_CORRUPT);
    summary.kv_caches[0].block_size = 16;
    summary.npu_block_count = -5;
    assert_int_equal(cox_engine_loop_fit(&fitted, &summary, NULL), COX_CORRUPT);
    summary.kv_cache_count = 0;
    assert_int_equal(cox_engine_loop_fit(&fitted, &summary, NULL), COX_CORRUPT);
    summary.kv_cache_count = 2;
    assert_int_equal(cox_engine_loop_fit(&fitted, &summary, NULL), COX_UNSUPPORTED);
}
