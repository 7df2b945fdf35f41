/*
 * Asynchronous scheduling: the next step is published while the ranks run one, and texts are the
 * same for any number of steps in flight, also where sequences end, are preempted or cancelled
 * meanwhile and ranks are replaced: requirement P8.
 */
#include "coordinator/recovery/recovery.h"
#include "engine/batching/engine_loop.h"
#include "async_model.h"
#include "testing.h"

#define REQUEST_COUNT 100
#define PROMPT_MAX 40
#define NEW_MAX 40
/* A little more than the longest of them takes. */
#define BLOCK_COUNT_SMALL 24
#define AWAITED "8"

/* How often ranks are killed and prompts cancelled, 0: never; between so many steps. */
static uint32_t feed_count, kill_every, cancel_every;

/* ---- a group that replaces its dead ---- */

static struct cox_executor *executor;
static struct cox_recovery *_Atomic recovery;

static void on_death(void *context, uint32_t rank, const char *text)
{
    (void)context;
    struct cox_recovery *told = atomic_load(&recovery);
    if (told)
        cox_recovery_death(told, rank, text);
}

/* Tokens of the first steps that rank 0 was given; complete when the group has ended. */
#define SIZE_COUNT_MAX 16
static uint32_t sizes[SIZE_COUNT_MAX], size_count;

static void on_line(void *context, uint32_t rank, bool is_stderr, const char *text)
{
    (void)context, (void)is_stderr;
    uint32_t size;
    if (rank == 0 && sscanf(text, "step of %" SCNu32 " tokens", &size) == 1 &&
        size_count < SIZE_COUNT_MAX)
        sizes[size_count++] = size;
}

static void group_start_as(uint32_t rank_count, uint32_t depth, const char *const *command)
{
    const struct cox_executor_options options = {.size = sizeof(struct cox_executor_options),
                                                 .rank_count = rank_count,
                                                 .workers.command = command,
                                                 .memory.attach = test_attach(),
                                                 .depth = depth,
                                                 .hooks.line = on_line,
                                                 .hooks.death = on_death};
    const struct cox_recovery_options replaces = {.policy.on_death = COX_ON_DEATH_RESTART,
                                                  .policy.restart_max = 1000,
                                                  .policy.backoff_min_ms = 1,
                                                  .policy.backoff_max_ms = 10};
    struct cox_recovery *started = NULL;
    struct cox_init_summary summary;
    kill_every = cancel_every = 0;
    assert_ok(cox_executor_start(&options, &executor, test_err()));
    assert_ok(cox_executor_init(executor, NULL, 0, cox_deadline_after_ms(TEST_PATIENCE_MS),
                                &summary, test_err()));
    assert_ok(cox_recovery_start(executor, &replaces, &started, test_err()));
    atomic_store(&recovery, started);
}

static void group_start(uint32_t rank_count, uint32_t depth, const char *await_ms)
{
    const char *const command[] = {COX_TEST_BIN_DIR "/async_worker", await_ms ? "await" : NULL,
                                   AWAITED, await_ms, NULL};
    group_start_as(rank_count, depth, command);
}

static void group_end(void)
{
    if (executor)
        cox_executor_stop(executor);
    atomic_store(&recovery, cox_recovery_free(atomic_load(&recovery)));
    executor = cox_executor_free(executor);
}

static int teardown(void **state)
{
    group_end();
    return test_teardown(state);
}

#define ASYNC_TEST(name) TEST_WITH(name, test_setup, teardown)

/* ---- prompts whose texts are known ---- */

struct request {
    int32_t tokens[PROMPT_MAX + NEW_MAX];
    uint32_t prompt_count, new_max;
    bool cancelled;
    uint32_t done_count;
};

static struct request requests[REQUEST_COUNT];
static struct cox_engine_loop *engine_loop;
static uint32_t random_state;

static uint32_t draw(uint32_t below)
{
    random_state = random_state * 1664525 + 1013904223;
    return (random_state >> 8) % below;
}

static void requests_make(uint32_t seed)
{
    random_state = seed;
    memset(requests, 0, sizeof requests);
    for (int i = 0; i < REQUEST_COUNT; i++) {
        requests[i].prompt_count = 1 + draw(draw(3) ? 12 : PROMPT_MAX);
        requests[i].new_max = 1 + draw(NEW_MAX);
        for (uint32_t t = 0; t < requests[i].prompt_count; t++)
            requests[i].tokens[t] = (int32_t)draw(100);
    }
}

static void on_done(void *context, const struct cox_sequence *sequence)
{
    (void)context;
    struct request *request = sequence->request.context;
    request->done_count++;
    if (sequence->finish == COX_FINISH_ERROR) {
        /* Run says what failed. */
        if (sequence->error.code == COX_CLOSED && !request->cancelled)
            fail_msg("a request ended: %s", sequence->error.text);
        return;
    }
    int32_t tokens[PROMPT_MAX + NEW_MAX];
    uint32_t count = request->prompt_count;
    memcpy(tokens, request->tokens, sizeof tokens);
    do
        tokens[count] = async_model(tokens, count);
    while (tokens[count++] != ASYNC_STOP && count < request->prompt_count + request->new_max);
    assert_int_equal(sequence->token_count, count);
    assert_memory_equal(sequence->tokens, tokens, count * sizeof *tokens);
}

/* ---- disturbed between two steps, with one in flight where there may be two ---- */

static bool on_feed(void *context, bool idle, uint64_t until_ns)
{
    (void)context, (void)until_ns;
    if (idle)
        return false;
    feed_count++;
    if (kill_every && feed_count % kill_every == 0) {
        uint32_t rank = draw(cox_executor_rank_count(executor));
        if (cox_executor_kill(executor, rank, test_err()))
            fail_msg("rank %" PRIu32 " was not killed: %s", rank, test_error.text);
    }
    if (cancel_every && feed_count % cancel_every == 0) {
        struct request *request = &requests[draw(REQUEST_COUNT)];
        request->cancelled = request->cancelled || request->done_count == 0;
        cox_engine_loop_cancel(engine_loop, request);
    }
    return true;
}

static int on_recover(void *context, struct cox_error *err)
{
    return cox_recovery_await(context, COX_DEADLINE_NEVER, err);
}

static void loop_open(const struct cox_engine_loop_options *options, int request_count)
{
    assert_ok(cox_engine_loop_new(executor, options, &engine_loop, test_err()));
    for (int i = 0; i < request_count; i++) {
        const struct cox_prompt_request request = {
            .tokens = requests[i].tokens,
            .token_count = requests[i].prompt_count,
            .new_count_max = requests[i].new_max,
            .stop_tokens = {ASYNC_STOP},
            .stop_count = 1,
            .context = &requests[i],
        };
        assert_int_equal(cox_engine_loop_add(engine_loop, &request), 0);
    }
}

static void run(uint32_t in_flight, uint32_t block_count, int code,
                struct cox_engine_loop_stats *ret_stats)
{
    const struct cox_engine_loop_options options = {
        .block_count = block_count,
        .block_size = ASYNC_BLOCK_SIZE,
        .position_count_max = 128,
        .sequence_count_max = 24,
        .token_count_max = 40,
        .steps_in_flight = in_flight,
        .retry_max = code ? 1 : 50,
        .done = on_done,
        .feed = on_feed,
        .recover = on_recover,
        .recover_context = atomic_load(&recovery),
    };
    feed_count = 0;
    loop_open(&options, REQUEST_COUNT);
    assert_refused(cox_engine_loop_run(engine_loop, test_err()), code, "");
    for (int i = 0; i < REQUEST_COUNT; i++)
        assert_int_equal(requests[i].done_count, 1);
    assert_int_equal(cox_engine_loop_free_blocks(engine_loop), block_count);
    cox_engine_loop_stats(engine_loop, ret_stats);
    engine_loop = cox_engine_loop_free(engine_loop);
}

static const uint32_t rank_counts[] = {1, 2, 4};

ASYNC_TEST(texts_are_the_same_however_many_steps_are_in_flight)
{
    for (size_t n = 0; n < 3; n++) {
        group_start(rank_counts[n], 0, NULL);
        for (uint32_t in_flight = 1; in_flight <= 4; in_flight++) {
            struct cox_engine_loop_stats stats;
            requests_make(1);
            run(in_flight, BLOCK_COUNT_SMALL, 0, &stats);
            assert_int_equal(stats.retries, 0);
            assert_true(stats.batcher.preemptions > 0);
            uint64_t generated = 0;
            for (int i = 0; i < REQUEST_COUNT; i++)
                generated += requests[i].new_max;
            assert_true(stats.batcher.generated_tokens < generated); /* some were stopped */
        }
        group_end();
    }
}

ASYNC_TEST(p8_texts_are_the_same_when_ranks_die_and_prompts_are_cancelled)
{
    for (size_t n = 0; n < 3; n++) {
        group_start(rank_counts[n], 0, NULL);
        for (uint32_t i = 0; i < 6; i++) {
            struct cox_engine_loop_stats stats;
            requests_make(2 + i);
            kill_every = 23;
            cancel_every = 5;
            run(1 + i % 3, BLOCK_COUNT_SMALL, 0, &stats);
            assert_true(stats.retries > 0);
        }
        group_end();
    }
}

/* The first steps of each rank end only once the next one is there. */
ASYNC_TEST(the_next_step_is_published_while_the_ranks_run_one)
{
    struct cox_engine_loop_stats stats;
    for (size_t n = 0; n < 3; n++) {
        char patience[16];
        snprintf(patience, sizeof patience, "%d", TEST_PATIENCE_MS / 2);
        group_start(rank_counts[n], 2, patience);
        requests_make(7);
        run(2, ASYNC_BLOCK_COUNT, 0, &stats);
        assert_true(stats.steps > 8);
        assert_int_equal(stats.retries, 0);
        group_end();
    }
    /* Otherwise it never comes. */
    group_start(2, 2, "100");
    requests_make(7);
    run(1, ASYNC_BLOCK_COUNT, COX_REJECTED, &stats);
    assert_int_equal(stats.steps, 0);
}

/* One prompt of 40 tokens, in a group that takes for ever over steps of more than `slow`. Returns
 * what run does. */
static int run_slow(uint32_t rank_count, const char *slow, struct cox_error *err)
{
    const char *const command[] = {COX_TEST_BIN_DIR "/async_worker", "slow", slow, NULL};
    const struct cox_engine_loop_options options = {.block_count = ASYNC_BLOCK_COUNT,
                                                    .block_size = ASYNC_BLOCK_SIZE,
                                                    .position_count_max = 128,
                                                    .token_count_max = 40,
                                                    .steps_in_flight = 1,
                                                    .step_ms = 300,
                                                    .done = on_done};
    size_count = 0;
    memset(requests, 0, sizeof requests);
    requests[0].prompt_count = 40;
    requests[0].new_max = 5;
    group_start_as(rank_count, 2, command);
    loop_open(&options, 1);
    int r = cox_engine_loop_run(engine_loop, err);
    assert_int_equal(requests[0].done_count, 1);
    engine_loop = cox_engine_loop_free(engine_loop);
    group_end();
    return r;
}

ASYNC_TEST(p8_a_step_that_is_late_comes_again_with_fewer_tokens)
{
    for (size_t n = 0; n < 3; n++) {
        assert_ok(run_slow(rank_counts[n], "12", test_err()));
        /* The prompt, its half, and then all of it in parts that are in time. */
        static const uint32_t expected[] = {40, 20, 10, 10, 10, 10};
        assert_true(size_count > 6);
        assert_memory_equal(sizes, expected, sizeof expected);
    }
}

ASYNC_TEST(p8_what_is_late_for_ever_says_what_to_do)
{
    static const uint32_t expected[] = {40, 20, 10, 5};
    assert_int_equal(run_slow(2, "0", test_err()), COX_TIMEOUT);
    assert_int_equal(size_count, 4);
    assert_memory_equal(sizes, expected, sizeof expected);
    assert_contains(test_error.text, "tried 4 times, at last with 5 tokens");
    assert_contains(test_error.text, "--timeout");
    assert_contains(test_error.text, "--step-tokens");
}

ASYNC_TEST(more_steps_than_the_channel_has_frames_are_refused)
{
    struct cox_engine_loop_options options = {
        .block_count = 8, .block_size = 4, .position_count_max = 32, .steps_in_flight = 3};
    struct cox_engine_loop_stats stats;
    group_start(1, 2, NULL);
    assert_refused(cox_engine_loop_new(executor, &options, &engine_loop, test_err()), COX_INVALID,
                   "3 steps in flight: at most 2");
    group_end();
    group_start(1, 1, NULL); /* 0: what may be */
    requests_make(9);
    run(0, ASYNC_BLOCK_COUNT, 0, &stats);
}
