/*
 * engine loop: whole runs against the rank of engine_loop_fixture.h.
 */
#include "channel/base/idioms.h"
#include "engine_loop_fixture.h"
#include "tests/lib/allocations.h"
#include "tests/lib/test.h"

#include <stdlib.h>
#include <string.h>

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

static struct cox_engine_loop_options options_make(void)
{
    return (struct cox_engine_loop_options){
        .block_count = BLOCK_COUNT_MAX,
        .block_size = BLOCK_SIZE,
        .position_count_max = 128,
        .done = on_done,
    };
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

/* Runs all requests and expects `code` of the run; every request is reported once. */
static void run_all(struct cox_executor *executor, const struct cox_engine_loop_options *options,
                    int code, struct cox_error *ret_error, struct cox_engine_loop_stats *ret_stats)
{
    struct cox_engine_loop *engine_loop = NULL;
    struct cox_error error = {0};
    if (cox_engine_loop_new(executor, options, &engine_loop, &error))
        fail_msg("%s", error.text);
    for (int i = 0; i < REQUEST_COUNT; i++)
        expectations[i].code = code;
    add_all(engine_loop);
    int r = cox_engine_loop_run(engine_loop, &error);
    if (r != code)
        fail_msg("run returned %d: %s", r, error.text);
    for (int i = 0; i < REQUEST_COUNT; i++)
        assert_int_equal(expectations[i].done_count, 1);
    cox_engine_loop_stats(engine_loop, ret_stats);
    cox_engine_loop_free(engine_loop);
    *ret_error = error;
    if (!code)
        assert_int_equal(cox_table_count(executor->table), 0);
}

PLAIN_TEST(many_requests_share_steps)
{
    struct cox_executor *executor = executor_new();
    struct cox_engine_loop_options options = options_make();
    struct cox_engine_loop_stats stats;
    struct cox_error error;
    expectations_make(1);
    run_all(executor, &options, 0, &error, &stats);
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
    run_all(executor, &options, 0, &error, &stats);
    assert_int_equal(stats.batcher.preemptions, 0);
    executor_free(executor);
}

PLAIN_TEST(small_pools_chunks_and_frames_change_no_text)
{
    uint64_t preemptions = 0;
    for (uint32_t seed = 1; seed <= 30; seed++) {
        struct cox_executor *executor = executor_new();
        expectations_make(seed);
        struct cox_engine_loop_options options = options_make();
        options.block_count = 24 + draw(30);
        options.token_count_max = 1 + draw(40);
        options.sequence_count_max = 1 + draw(40);
        executor->legacy = seed % 3 == 0;
        options.steps_in_flight = executor->legacy ? 1 : 1 + seed % FIXTURE_DEPTH;
        if (seed % 2)
            executor->request_size_max = 4000 + draw(2000);
        struct cox_engine_loop_stats stats;
        struct cox_error error;
        run_all(executor, &options, 0, &error, &stats);
        if (!executor->legacy)
            assert_true(executor->token_count_max <= options.token_count_max);
        preemptions += stats.batcher.preemptions;
        executor_free(executor);
    }
    assert_true(preemptions > 0);
}

static int fails_now_and_then(uint64_t number)
{
    static const int statuses[] = {COX_REJECTED, COX_TIMEOUT, COX_STALE, COX_ABORTED};
    uint64_t h = number * 2654435761u >> 7;
    return h % 5 == 0 ? statuses[h / 5 % 4] : 0;
}

PLAIN_TEST(failed_steps_change_no_text)
{
    for (uint32_t seed = 1; seed <= 24; seed++) {
        struct cox_executor *executor = executor_new();
        expectations_make(seed);
        struct cox_engine_loop_options options = options_make();
        options.block_count = 24 + draw(100);
        options.token_count_max = 100;
        options.retry_max = 20;
        executor->legacy = seed % 3 == 0;
        options.steps_in_flight = executor->legacy ? 1 : 1 + seed % FIXTURE_DEPTH;
        executor->script.status = fails_now_and_then;
        executor->script.loses_table = seed % 2;
        struct cox_engine_loop_stats stats;
        struct cox_error error;
        run_all(executor, &options, 0, &error, &stats);
        assert_true(stats.retries > 0);
        executor_free(executor);
    }
}

static int always_rejected(uint64_t number)
{
    (void)number;
    return COX_REJECTED;
}

PLAIN_TEST(retries_end)
{
    for (uint32_t in_flight = 1; in_flight <= 3; in_flight++) {
        struct cox_executor *executor = executor_new();
        struct cox_engine_loop_options options = options_make();
        struct cox_engine_loop_stats stats;
        struct cox_error error;
        expectations_make(1);
        options.steps_in_flight = in_flight;
        executor->script.status = always_rejected;
        run_all(executor, &options, COX_REJECTED, &error, &stats);
        /* Those that are void with another one do not count. */
        assert_in_range(executor->submit_count, 4, 4 * in_flight);
        assert_int_equal(stats.retries, 3);
        assert_non_null(strstr(error.text, "rank 1 says no"));
        assert_non_null(strstr(error.text, "tried 4 times"));
        executor_free(executor);
    }
}

static void runs_when_the_next_is_there(struct cox_executor *executor, uint64_t number)
{
    if (number < 4)
        executor_await_published(executor, number + 1);
}

/* A rank begins with it when it has ended those before, each of which has as long. */
PLAIN_TEST(a_step_behind_others_has_the_time_of_a_step)
{
    struct cox_executor *executor = executor_new();
    struct cox_engine_loop_options options = options_make();
    struct cox_engine_loop *engine_loop = NULL;
    struct cox_error error = {0};
    const uint64_t step_ns = 600000 * COX_NSEC_PER_MSEC;
    options.done = NULL;
    options.step_ms = 600000;
    executor->script.taken = runs_when_the_next_is_there;
    assert_int_equal(cox_engine_loop_new(executor, &options, &engine_loop, &error), 0);
    const int32_t tokens[3] = {1, 2, 3};
    const struct cox_prompt_request request = {
        .tokens = tokens, .token_count = 3, .new_count_max = 9};
    assert_int_equal(cox_engine_loop_add(engine_loop, &request), 0);
    const uint64_t before_ns = cox_now_ns();
    assert_int_equal(cox_engine_loop_run(engine_loop, &error), 0);
    const uint64_t after_ns = cox_now_ns();
    assert_in_range(executor->deadlines_ns[1], before_ns + step_ns, after_ns + step_ns);
    /* And not that of all that were ever in flight. */
    for (int number = 2; number <= 4; number++)
        assert_in_range(executor->deadlines_ns[number], before_ns + 2 * step_ns,
                        after_ns + 2 * step_ns);
    cox_engine_loop_free(engine_loop);
    executor_free(executor);
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
PLAIN_TEST(m10_a_step_that_is_not_sent_leaves_no_visible_lease)
{
    struct cox_executor *executor = executor_new();
    struct cox_engine_loop_options options = options_make();
    struct held held = {0};
    struct cox_error error = {0};
    options.done = on_done_held;
    options.done_context = &held;
    options.hold_count_max = 2;
    executor->script.submit = second_refused;
    assert_int_equal(cox_engine_loop_new(executor, &options, &held.engine_loop, &error), 0);
    const int32_t tokens[3] = {1, 2, 3};
    struct cox_prompt_request request = {.tokens = tokens, .token_count = 3, .new_count_max = 9};
    assert_int_equal(cox_engine_loop_add(held.engine_loop, &request), 0);
    request.hold_ms = 600000;
    assert_int_equal(cox_engine_loop_add(held.engine_loop, &request), 0);
    assert_int_equal(cox_engine_loop_run(held.engine_loop, &error), 0);
    assert_int_equal(held.done_count, 2);
    assert_int_equal(cox_engine_loop_free_blocks(held.engine_loop), BLOCK_COUNT_MAX);
    cox_engine_loop_free(held.engine_loop);
    executor_free(executor);
}

/* Not for ever, so that an engine loop that never ends fails here. */
static int every_second_rejected(uint64_t number)
{
    return number > 100 ? COX_DIVERGED : number % 2 ? 0 : COX_REJECTED;
}

/* Its first chunk is computed again each time, which is no step ahead. */
PLAIN_TEST(retries_of_a_second_chunk_end)
{
    struct cox_executor *executor = executor_new();
    struct cox_engine_loop_options options = options_make();
    struct cox_engine_loop *engine_loop = NULL;
    struct cox_engine_loop_stats stats;
    struct cox_error error = {0};
    options.done = NULL;
    options.steps_in_flight = 1;
    options.token_count_max = 8;
    executor->script.status = every_second_rejected;
    assert_int_equal(cox_engine_loop_new(executor, &options, &engine_loop, &error), 0);
    const int32_t tokens[12] = {1, 2, 3};
    const struct cox_prompt_request request = {
        .tokens = tokens, .token_count = 12, .new_count_max = 9};
    assert_int_equal(cox_engine_loop_add(engine_loop, &request), 0);
    assert_int_equal(cox_engine_loop_run(engine_loop, &error), COX_REJECTED);
    assert_non_null(strstr(error.text, "tried 4 times"));
    cox_engine_loop_stats(engine_loop, &stats);
    assert_int_equal(stats.retries, 3);
    cox_engine_loop_free(engine_loop);
    executor_free(executor);
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

PLAIN_TEST(a_late_rank_is_waited_for)
{
    struct cox_executor *executor = executor_new();
    struct cox_engine_loop_options options = options_make();
    struct cox_engine_loop_stats stats;
    struct cox_error error;
    expectations_make(3);
    executor->script.submit = late_at_first;
    run_all(executor, &options, 0, &error, &stats);
    assert_true(executor->submit_count > stats.steps);
    assert_int_equal(stats.retries, 0);

    expectations_make(3);
    executor->script.submit = late_for_ever;
    options.step_ms = 50;
    run_all(executor, &options, COX_LATE, &error, &stats);
    assert_non_null(strstr(error.text, "submit says"));
    executor_free(executor);
}

static int dead(uint64_t number)
{
    (void)number;
    return COX_PEER_DEAD;
}

PLAIN_TEST(a_death_and_nonsense_end_all)
{
    struct cox_engine_loop_options options = options_make();
    struct cox_engine_loop_stats stats;
    struct cox_error error;
    struct cox_executor *executor = executor_new();
    executor->script.status = dead;
    expectations_make(4);
    run_all(executor, &options, COX_PEER_DEAD, &error, &stats);
    assert_int_equal(stats.retries, 0);
    executor_free(executor);

    for (int nested = 0; nested < 2; nested++) {
        executor = executor_new();
        executor->legacy = nested;
        executor->script.bad_reply = true;
        expectations_make(4);
        run_all(executor, &options, COX_CORRUPT, &error, &stats);
        assert_non_null(strstr(error.text, "tokens for"));
        executor_free(executor);
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

PLAIN_TEST(p8_a_recovered_group_gets_everything_again)
{
    for (uint32_t seed = 1; seed <= 24; seed++) {
        struct cox_executor *executor = executor_new();
        struct recoveries recoveries = {.result = COX_STALE};
        struct cox_engine_loop_options options = options_make();
        expectations_make(seed);
        options.block_count = 24 + draw(100);
        options.token_count_max = 100;
        options.retry_max = 1;
        executor->legacy = seed % 3 == 0;
        options.steps_in_flight = executor->legacy ? 1 : 1 + seed % FIXTURE_DEPTH;
        options.recover = on_recover;
        options.recover_context = &recoveries;
        executor->script.status = dies_now_and_then;
        executor->script.submit = refuses_now_and_then;
        /* Otherwise the base of the next step shows what was refused, and there is none. */
        if (executor->legacy)
            executor->script.cleanup = cleanup_refuses_now_and_then;
        executor->script.loses_table = seed % 2;
        struct cox_engine_loop_stats stats;
        struct cox_error error;
        run_all(executor, &options, 0, &error, &stats);
        assert_int_equal(stats.retries, recoveries.count);
        assert_int_equal(recoveries.seen,
                         1 << COX_PEER_DEAD | 1 << COX_STATE | 1 << COX_ABORTED | 1 << COX_TIMEOUT);
        executor_free(executor);
    }
}

/* The group had no failure: the limit stands. Without recovery, that is the error. */
PLAIN_TEST(p8_what_is_not_recovered_ends_the_run)
{
    struct recoveries recoveries = {.result = 0};
    struct cox_engine_loop_options options = options_make();
    struct cox_engine_loop_stats stats;
    struct cox_error error;
    options.recover = on_recover;
    options.recover_context = &recoveries;
    struct cox_executor *executor = executor_new();
    executor->script.status = always_rejected;
    expectations_make(4);
    run_all(executor, &options, COX_REJECTED, &error, &stats);
    assert_int_equal(recoveries.count, 4);
    assert_non_null(strstr(error.text, "tried 4 times"));
    executor_free(executor);

    executor = executor_new();
    executor->script.status = dead;
    expectations_make(4);
    run_all(executor, &options, COX_PEER_DEAD, &error, &stats);
    assert_int_equal(recoveries.count, 5);
    executor_free(executor);

    executor = executor_new();
    recoveries.result = COX_PEER_DEAD;
    executor->script.status = always_rejected;
    expectations_make(4);
    run_all(executor, &options, COX_PEER_DEAD, &error, &stats);
    assert_string_equal(error.text, "given up");
    assert_int_equal(recoveries.count, 6);
    executor_free(executor);
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
    struct cox_executor *executor;
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
        feeder->announcement = feeder->announcement &&
                               cox_table_count(feeder->executor->table) == 0 &&
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

PLAIN_TEST(requests_come_and_go_while_it_runs)
{
    for (uint32_t seed = 1; seed <= 20; seed++) {
        struct cox_executor *executor = executor_new();
        struct cox_engine_loop_options options = options_make();
        struct feeder feeder = {.cancel_at = (int)(seed * 7 % 100),
                                .free_min = BLOCK_COUNT_MAX,
                                .announcement = true,
                                .executor = executor};
        struct cox_error error = {0};
        options.feed = on_feed;
        options.feed_context = &feeder;
        executor->legacy = seed % 3 == 0;
        options.steps_in_flight = executor->legacy ? 1 : 1 + seed % FIXTURE_DEPTH;
        options.retry_max = 20;
        if (seed % 2)
            executor->script.status = fails_now_and_then;
        expectations_make(seed);
        /* It has no end of its own. */
        struct expectation *cancelled = &expectations[feeder.cancel_at];
        cancelled->code = COX_CLOSED;
        cancelled->new_max = 60;
        cancelled->unstoppable = true;
        assert_int_equal(cox_engine_loop_new(executor, &options, &feeder.engine_loop, &error), 0);
        if (cox_engine_loop_run(feeder.engine_loop, &error))
            fail_msg("%s", error.text);
        for (int i = 0; i < REQUEST_COUNT; i++)
            assert_int_equal(expectations[i].done_count, 1);
        assert_true(feeder.idle_count > 0);
        assert_true(seed % 2 ||
                    feeder.announcement); /* a step that failed is forgotten at the next one */
        assert_true(feeder.free_min < BLOCK_COUNT_MAX);
        assert_int_equal(cox_engine_loop_free_blocks(feeder.engine_loop), BLOCK_COUNT_MAX);
        cox_engine_loop_free(feeder.engine_loop);
        executor_free(executor);
    }
}

struct canceller {
    struct cox_engine_loop *engine_loop;
    struct cox_executor *executor;
};

/* Ends the first request between a step that failed and the next one. */
static bool cancels_after_a_failure(void *context, bool idle, uint64_t until_ns)
{
    (void)until_ns;
    struct canceller *canceller = context;
    if (!idle && canceller->executor->submit_count == 3)
        cox_engine_loop_cancel(canceller->engine_loop, &expectations[0]);
    return !idle;
}

static int third_is_rejected(uint64_t number)
{
    return number == 3 ? COX_REJECTED : 0;
}

/* No step announces it again, and legacy ranks clear their tables at no step. */
PLAIN_TEST(a_sequence_that_ends_after_a_failure_leaves_legacy_ranks)
{
    struct cox_executor *executor = executor_new();
    struct cox_engine_loop_options options = options_make();
    struct canceller canceller = {.executor = executor};
    struct cox_error error = {0};
    executor->legacy = true;
    executor->script.status = third_is_rejected;
    options.steps_in_flight = 1;
    options.feed = cancels_after_a_failure;
    options.feed_context = &canceller;
    expectations_make(5);
    expectations[0].code = COX_CLOSED;
    expectations[0].new_max = 60;
    expectations[0].unstoppable = true;
    assert_int_equal(cox_engine_loop_new(executor, &options, &canceller.engine_loop, &error), 0);
    add_one(canceller.engine_loop, &expectations[0]);
    add_one(canceller.engine_loop, &expectations[1]);
    assert_int_equal(cox_engine_loop_run(canceller.engine_loop, &error), 0);
    assert_int_equal(expectations[0].done_count, 1);
    assert_int_equal(expectations[1].done_count, 1);
    assert_int_equal(cox_table_count(executor->table), 0);
    cox_engine_loop_free(canceller.engine_loop);
    executor_free(executor);
}

static void *stop_soon(void *context)
{
    cox_engine_loop_stop(context);
    return NULL;
}

PLAIN_TEST(stop_ends_a_run_whose_step_never_ends)
{
    struct cox_executor *executor = executor_new();
    struct cox_engine_loop_options options = options_make();
    struct cox_engine_loop *engine_loop = NULL;
    struct cox_error error = {0};
    executor->script.silent = true;
    expectations_make(5);
    for (int i = 0; i < REQUEST_COUNT; i++)
        expectations[i].code = COX_CLOSED;
    assert_int_equal(cox_engine_loop_new(executor, &options, &engine_loop, &error), 0);
    add_all(engine_loop);
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, stop_soon, engine_loop), 0);
    assert_int_equal(cox_engine_loop_run(engine_loop, &error), COX_CLOSED);
    pthread_join(thread, NULL);
    for (int i = 0; i < REQUEST_COUNT; i++)
        assert_int_equal(expectations[i].done_count, 1);
    error.code = 0;
    assert_int_equal(cox_engine_loop_run(engine_loop, &error), COX_CLOSED);
    cox_engine_loop_free(engine_loop);
    executor_free(executor);
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

PLAIN_TEST(stop_ends_a_run_that_waits_for_recovery)
{
    struct cox_executor *executor = executor_new();
    struct cox_engine_loop_options options = options_make();
    struct cox_engine_loop *engine_loop = NULL;
    struct cox_error error = {0};
    options.recover = on_recover_sleep;
    options.recover_cancel = on_recover_cancel;
    options.recover_context = &sleeper;
    executor->script.status = dead;
    expectations_make(5);
    for (int i = 0; i < REQUEST_COUNT; i++)
        expectations[i].code = COX_CLOSED;
    assert_int_equal(cox_engine_loop_new(executor, &options, &engine_loop, &error), 0);
    add_all(engine_loop);
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, stop_when_asleep, engine_loop), 0);
    assert_int_equal(cox_engine_loop_run(engine_loop, &error), COX_CLOSED);
    pthread_join(thread, NULL);
    cox_engine_loop_free(engine_loop);
    executor_free(executor);
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

PLAIN_TEST(steps_allocate_nothing)
{
#ifdef SANITIZED
    skip();
#endif
    for (int nested = 0; nested < 2; nested++) {
        struct cox_executor *executor = executor_new();
        struct cox_engine_loop_options options = options_make();
        struct cox_engine_loop *engine_loop = NULL;
        struct cox_error error = {0};
        executor->script.submit = counts_allocations;
        options.done = NULL;
        executor->legacy = nested;
        assert_int_equal(cox_engine_loop_new(executor, &options, &engine_loop, &error), 0);
        const int32_t tokens[3] = {1, 2, 3};
        struct cox_prompt_request request = {
            .tokens = tokens, .token_count = 3, .new_count_max = 40};
        for (int i = 0; i < 8; i++)
            assert_int_equal(cox_engine_loop_add(engine_loop, &request), 0);
        allocations_before = allocations_after = 0;
        assert_int_equal(cox_engine_loop_run(engine_loop, &error), 0);
        assert_int_equal(executor->submit_count, 40);
        assert_true(allocations_before > 0);
        assert_int_equal(allocations_after, allocations_before);
        cox_engine_loop_free(engine_loop);
        executor_free(executor);
    }
}

/* They cannot compute tokens that the coordinator does not know. */
PLAIN_TEST(legacy_workers_have_one_step_in_flight)
{
    struct cox_executor *executor = executor_new();
    struct cox_engine_loop_options options = options_make();
    struct cox_engine_loop *engine_loop = NULL;
    struct cox_error error = {0};
    executor->legacy = true;
    options.steps_in_flight = 2;
    assert_int_equal(cox_engine_loop_new(executor, &options, &engine_loop, &error), COX_INVALID);
    assert_string_equal(error.text, "2 steps in flight: at most 1 with legacy workers");
    executor_free(executor);
}

PLAIN_TEST(capacities_of_init_are_checked)
{
    struct cox_engine_loop_options options = {0};
    struct cox_init_summary summary = {
        .npu_block_count = 100,
        .max_position_embeddings = 64,
        .kv_cache_count = 1,
        .kv_caches = {{.block_count = 100, .block_size = 16}},
    };
    struct cox_error error = {0};
    assert_int_equal(cox_engine_loop_fit(&options, &summary, &error), 0);
    assert_int_equal(options.block_count, 100);
    assert_int_equal(options.block_size, 16);
    assert_int_equal(options.position_count_max, 64);
    summary.kv_caches[0].block_size = 0;
    assert_int_equal(cox_engine_loop_fit(&options, &summary, &error), COX_CORRUPT);
    summary.kv_caches[0].block_size = 16;
    summary.npu_block_count = -5;
    assert_int_equal(cox_engine_loop_fit(&options, &summary, NULL), COX_CORRUPT);
    summary.kv_cache_count = 0;
    assert_int_equal(cox_engine_loop_fit(&options, &summary, NULL), COX_CORRUPT);
    summary.kv_cache_count = 2;
    assert_int_equal(cox_engine_loop_fit(&options, &summary, NULL), COX_UNSUPPORTED);
}
