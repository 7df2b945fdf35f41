/* A transport, and what it tells its executor (coordinator/transport/transport.h). */

#include <coxswain/executor.h>
#include "coordinator/transport/transport.h"
#include "tests/lib/test.h"

#define RANK_COUNT 2u
#define DEPTH 4u

static struct cox_executor *executor;
static const struct cox_transport_host *host;
static bool taken_over;
static uint32_t opened;
/* what stop was told */
static bool stopped_failed;

static int on_start(void *context, struct cox_executor *started,
                    const struct cox_transport_host *of, struct cox_error *err)
{
    (void)context;
    (void)err;
    executor = started;
    host = of;
    return 0;
}

static int on_open(void *context, uint32_t rank, uint32_t incarnation, struct cox_error *err)
{
    (void)context;
    (void)incarnation;
    opened++;
    return host->attach(executor, rank, "elsewhere", (pid_t)(1000 + rank), err);
}

static void on_kill(void *context, uint32_t rank)
{
    (void)context;
    (void)rank;
}

static void on_publish(void *context, const struct cox_transport_request *request)
{
    (void)context;
    (void)request;
}

static void on_through(void *context, enum cox_channel_id channel, uint64_t through)
{
    (void)context;
    (void)channel;
    (void)through;
}

static bool on_trouble(void *context, uint32_t rank, char *buffer, size_t buffer_size)
{
    (void)context;
    (void)rank;
    (void)buffer;
    (void)buffer_size;
    return false;
}

static int on_taken_over(void *context, struct cox_error *err)
{
    (void)context;
    return taken_over ? cox_fail(err, COX_TAKEN, "another one has them") : 0;
}

static void on_stop(void *context, bool failed)
{
    (void)context;
    stopped_failed = failed;
}

static void group_start(void)
{
    static const struct cox_transport transport = {
        .start = on_start,
        .open = on_open,
        .kill = on_kill,
        .publish = on_publish,
        .cancel_steps = on_through,
        .ended = on_through,
        .trouble = on_trouble,
        .taken_over = on_taken_over,
        .stop = on_stop,
    };
    struct cox_executor_options options = COX_EXECUTOR_OPTIONS_INIT;
    struct cox_executor *started;
    char name[64];
    snprintf(name, sizeof name, "transport-test-%d", (int)getpid());
    options.name = name;
    options.rank_count = RANK_COUNT;
    options.depth = DEPTH;
    options.collect = true;
    options.times.start_timeout_ms = 20000;
    taken_over = false;
    opened = 0;
    assert_ok(cox_executor_start_remote(
        &options, &(struct cox_executor_remote){.transport = &transport}, &started, test_err()));
    assert_int_equal(opened, RANK_COUNT);
}

static void group_end(void)
{
    for (uint32_t rank = 0; rank < RANK_COUNT; rank++) /* nothing is waited for */
        host->died(executor, rank, "has ended", true, 0, 0);
    cox_executor_stop(executor);
    cox_executor_free(executor);
}

static uint64_t submit(void)
{
    uint64_t sequence;
    struct cox_submit_options options = COX_SUBMIT_OPTIONS_INIT;
    options.deadline_ns = cox_deadline_after_ms(20000);
    options.gather = COX_GATHER_ALL;
    assert_ok(cox_executor_submit_opaque(executor, "ask", 3, &options, &sequence, test_err()));
    return sequence;
}

static void reply(uint32_t rank, uint64_t sequence)
{
    assert_ok(
        host->reply(executor, COX_CHANNEL_EXECUTE, rank, sequence, "told", 4, false, test_err()));
}

static void collect(struct cox_completion completions[DEPTH], uint32_t *ret_count)
{
    assert_ok(cox_executor_completions(executor, COX_CHANNEL_EXECUTE, completions, DEPTH,
                                       cox_deadline_after_ms(5000), ret_count, test_err()));
}

PLAIN_TEST(replies_complete_a_request)
{
    struct cox_completion completions[DEPTH];
    uint32_t count = 0;
    group_start();
    const uint64_t first = submit();
    reply(1, first);
    reply(0, first);
    assert_int_equal(host->reply(executor, COX_CHANNEL_EXECUTE, 0, first, "told", 4, false, NULL),
                     COX_STALE);
    collect(completions, &count);
    assert_int_equal(count, 1);
    assert_int_equal(completions[0].status, 0);
    group_end();
}

/* Its node has ended the first request without it, and says so later than what the rank has
 * replied to the second. */
PLAIN_TEST(a_rank_that_replies_has_replied_to_those_before)
{
    struct cox_completion completions[DEPTH];
    uint32_t count = 0;
    group_start();
    const uint64_t first = submit(), second = submit();
    reply(1, second);
    collect(completions, &count);
    assert_true(count >= 1 && completions[0].sequence == first);
    assert_int_equal(completions[0].status, COX_ABORTED);
    assert_int_equal(completions[0].ranks[1].outcome, COX_OUTCOME_ERROR);
    assert_int_equal(completions[0].ranks[1].code, COX_ABORTED);
    /* What comes then is late. */
    assert_int_equal(host->reply(executor, COX_CHANNEL_EXECUTE, 1, first, NULL, 0, false, NULL),
                     COX_STALE);
    group_end();
}

PLAIN_TEST(ranks_that_were_taken_over_are_not_started_again)
{
    struct cox_error err = {0};
    group_start();
    taken_over = true;
    for (uint32_t rank = 0; rank < RANK_COUNT; rank++)
        host->died(executor, rank, "is lost: another one has it", false, 0, -1);
    assert_int_equal(cox_executor_restart(executor, 1, cox_deadline_after_ms(5000), &err),
                     COX_TAKEN);
    assert_string_equal(err.text, "another one has them");
    assert_int_equal(
        cox_executor_restart(executor, COX_RANK_ALL, cox_deadline_after_ms(5000), &err), COX_TAKEN);
    assert_int_equal(opened, RANK_COUNT);
    group_end();
}

/* Agents end with another status then. */
PLAIN_TEST(stop_says_whether_the_group_has_failed)
{
    for (int dead = 0; dead < 2; dead++) {
        group_start();
        const uint64_t sequence = submit();
        reply(0, sequence);
        struct cox_executor_status status;
        struct cox_rank_status ranks[RANK_COUNT] = {0};
        if (dead)
            host->died(executor, 1, "was killed", true, 9, -1);
        while (dead && ranks[1].liveness != COX_LIVENESS_DEAD)
            cox_executor_read_status(executor, &status, ranks);
        stopped_failed = !dead;
        cox_executor_stop(executor);
        assert_int_equal(stopped_failed, dead);
        cox_executor_free(executor);
    }
}
