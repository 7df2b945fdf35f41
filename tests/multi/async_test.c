/* Asynchronous scheduling: the next step is published while the ranks run one, and texts are the same for any number of steps
 * in flight, also where sequences end, are preempted or cancelled meanwhile and ranks are replaced: row P8. */
#include "async_model.h"
#include "testing.h"

#include "coordinator/serving/recovery.h"
#include "coordinator/serving/scheduler.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#define REQUEST_COUNT 100
#define PROMPT_MAX 40
#define NEW_MAX 40
/* A little more than the longest of them takes. */
#define BLOCK_COUNT_SMALL 24
#define AWAITED "8"

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

static void group_start(uint32_t rank_count, uint32_t depth, const char *await_ms)
{
    const char *const command[] = {COX_TEST_BIN_DIR "/async_worker", await_ms ? "await" : NULL,
                                   AWAITED, await_ms, NULL};
    const struct cox_executor_options options = {.rank_count = rank_count,
                                                 .command = command,
                                                 .attach = test_attach(),
                                                 .depth = depth,
                                                 .death = on_death};
    const struct cox_recovery_options replaces = {.on_death = COX_ON_DEATH_RESTART,
                                                  .restart_max = 1000,
                                                  .backoff_min_ms = 1,
                                                  .backoff_max_ms = 10};
    struct cox_recovery *started = NULL;
    struct cox_init_summary summary;
    struct cox_error err = {0};
    int r = cox_executor_start(&options, &executor, &err);
    if (r == 0)
        r = cox_executor_init(executor, NULL, 0, cox_deadline_after_ms(TEST_PATIENCE_MS), &summary,
                              &err);
    if (r == 0)
        r = cox_recovery_start(executor, &replaces, &started, &err);
    if (r)
        fail_msg("no group: %d: %s", r, err.text);
    atomic_store(&recovery, started);
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

/* ---- prompts whose texts are known ---- */

struct request {
    int32_t tokens[PROMPT_MAX + NEW_MAX];
    uint32_t prompt_count, new_max;
    bool cancelled;
    uint32_t done_count;
};

static struct request requests[REQUEST_COUNT];
static struct cox_scheduler *scheduler;
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

static uint32_t feed_count, kill_every, cancel_every;

static bool on_feed(void *context, bool idle, uint64_t until_ns)
{
    (void)context, (void)until_ns;
    if (idle)
        return false;
    feed_count++;
    if (kill_every && feed_count % kill_every == 0) {
        struct cox_error err = {0};
        uint32_t rank = draw(cox_executor_rank_count(executor));
        if (cox_executor_kill(executor, rank, &err))
            fail_msg("rank %" PRIu32 " was not killed: %s", rank, err.text);
    }
    if (cancel_every && feed_count % cancel_every == 0) {
        struct request *request = &requests[draw(REQUEST_COUNT)];
        request->cancelled = request->cancelled || request->done_count == 0;
        cox_scheduler_cancel(scheduler, request);
    }
    return true;
}

static int on_recover(void *context, struct cox_error *err)
{
    return cox_recovery_await(context, err);
}

static void run(uint32_t in_flight, uint32_t block_count, int code,
                struct cox_scheduler_stats *ret_stats)
{
    const struct cox_scheduler_options options = {
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
    struct cox_error err = {0};
    feed_count = 0;
    int r = cox_scheduler_new(executor, &options, &scheduler, &err);
    if (r)
        fail_msg("no scheduler: %s", err.text);
    for (int i = 0; i < REQUEST_COUNT; i++) {
        const struct cox_request request = {
            .tokens = requests[i].tokens,
            .token_count = requests[i].prompt_count,
            .new_count_max = requests[i].new_max,
            .stop_tokens = {ASYNC_STOP},
            .stop_count = 1,
            .context = &requests[i],
        };
        assert_int_equal(cox_scheduler_add(scheduler, &request), 0);
    }
    r = cox_scheduler_run(scheduler, &err);
    if (r != code)
        fail_msg("run returned %d: %s", r, err.text);
    for (int i = 0; i < REQUEST_COUNT; i++)
        assert_int_equal(requests[i].done_count, 1);
    assert_int_equal(cox_scheduler_free_blocks(scheduler), block_count);
    cox_scheduler_stats(scheduler, ret_stats);
    scheduler = cox_scheduler_free(scheduler);
}

static const uint32_t rank_counts[] = {1, 2, 4};

static void texts_are_the_same_however_many_steps_are_in_flight(void **state)
{
    (void)state;
    for (size_t n = 0; n < 3; n++) {
        group_start(rank_counts[n], 0, NULL);
        for (uint32_t in_flight = 1; in_flight <= 4; in_flight++) {
            struct cox_scheduler_stats stats;
            requests_make(1);
            kill_every = cancel_every = 0;
            run(in_flight, BLOCK_COUNT_SMALL, 0, &stats);
            assert_int_equal(stats.retries, 0);
            assert_true(stats.plan.preemptions > 0);
            uint64_t generated = 0;
            for (int i = 0; i < REQUEST_COUNT; i++)
                generated += requests[i].new_max;
            assert_true(stats.plan.generated_tokens < generated); /* some were stopped */
        }
        group_end();
    }
}

static void p8_texts_are_the_same_when_ranks_die_and_prompts_are_cancelled(void **state)
{
    (void)state;
    for (size_t n = 0; n < 3; n++) {
        group_start(rank_counts[n], 0, NULL);
        for (uint32_t i = 0; i < 6; i++) {
            struct cox_scheduler_stats stats;
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
static void the_next_step_is_published_while_the_ranks_run_one(void **state)
{
    (void)state;
    struct cox_scheduler_stats stats;
    kill_every = cancel_every = 0;
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

static void more_steps_than_the_channel_has_frames_are_refused(void **state)
{
    (void)state;
    struct cox_scheduler_options options = {
        .block_count = 8, .block_size = 4, .position_count_max = 32, .steps_in_flight = 3};
    struct cox_scheduler_stats stats;
    struct cox_error err = {0};
    kill_every = cancel_every = 0;
    group_start(1, 2, NULL);
    assert_int_equal(cox_scheduler_new(executor, &options, &scheduler, &err), COX_INVALID);
    assert_non_null(strstr(err.text, "3 steps in flight: at most 2"));
    options.steps_in_flight = 2;
    options.nested = true;
    err = (struct cox_error){0};
    assert_int_equal(cox_scheduler_new(executor, &options, &scheduler, &err), COX_INVALID);
    assert_non_null(strstr(err.text, "legacy"));
    group_end();
    group_start(1, 1, NULL); /* 0: what may be */
    requests_make(9);
    run(0, ASYNC_BLOCK_COUNT, 0, &stats);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, test_setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(texts_are_the_same_however_many_steps_are_in_flight),
        CASE(p8_texts_are_the_same_when_ranks_die_and_prompts_are_cancelled),
        CASE(the_next_step_is_published_while_the_ranks_run_one),
        CASE(more_steps_than_the_channel_has_frames_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
