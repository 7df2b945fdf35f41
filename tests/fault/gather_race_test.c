/*
 * gather_race_test: the response thread stands still between two of its steps, so that what seldom
 * happens does: a reply and the deadline come between a look at the replies and the clock; a rank
 * is replaced while memory is given back.
 *
 * Groups are named, or, with COXSWAIN_TEST_ATTACH=sealed in the environment, sealed.
 */
#include "channel/base/fault.h"
#include "channel/shm/state.h"
#include "coordinator/executor/executor_internal.h"
#include "testing.h"

#if COX_TESTING

#define MIB ((size_t)1 << 20)

static const struct cox_fault_counts *counts;

static struct cox_collector *collector_of(struct test_group *g)
{
    return &test_group_executor(g)->collectors[COX_CHANNEL_EXECUTE];
}

/* Before a group starts. Returns how often plans have struck so far. */
static uint32_t arm(const char *plan)
{
    cox_fault_arm(plan);
    return atomic_load(&counts->struck);
}

static void await_strike(uint32_t before)
{
    AWAIT(atomic_load(&counts->struck) != before);
}

/* Without a lock: a stopped process may hold it. */
static void await_reply(struct test_group *g, uint32_t rank)
{
    const struct cox_layout_rank_line *line =
        cox_state_line(&test_group_executor(g)->control, rank, COX_CHANNEL_EXECUTE);
    AWAIT(cox_state_done(line) >= 1);
}

static void *wake_main(void *collector)
{
    cox_collector_wake(collector);
    return NULL;
}

/* Rank 1 is seen to owe its reply, rank 0 to have given it; there the look stops until rank 1 has
 * replied, too, and the deadline has come. Returns false if rank 1 did not make it in time. */
static bool reply_in_time(uint64_t timeout_ms)
{
    const uint32_t before = arm("reply.fetched:hold:coordinator:1");
    struct test_group *g = test_group_start(2, NULL);
    struct cox_collector *collector = collector_of(g);
    struct test_pipe *pipes[] = {test_pipe_new(), test_pipe_new()};
    const struct test_how how = {.gather = COX_GATHER_ALL, .timeout_ms = timeout_ms};
    const uint64_t begin_ns = cox_now_ns();
    pthread_t waker;
    assert_int_equal(test_submit(g, &how, "each block %s|block %s", test_pipe_path(pipes[0]),
                                 test_pipe_path(pipes[1])),
                     0);
    const uint64_t deadline_ns = cox_deadline_after_ms(timeout_ms); /* or before */
    test_await_lines(g, -1, "blocked", 2);
    /* No slice, in which it would look again in any case. */
    pthread_mutex_lock(&collector->lock);
    collector->rewake_ns = COX_DEADLINE_NEVER;
    pthread_mutex_unlock(&collector->lock);
    test_pipe_release(pipes[0], 1);
    await_reply(g, 0);
    assert_int_equal(pthread_create(&waker, NULL, wake_main, collector), 0);
    /* Or, where all this took too long, the request has ended by its deadline. */
    AWAIT(!(atomic_load(&counts->struck) == before && test_completion_count(g) == 0));
    test_pipe_release(pipes[1], 1);
    await_reply(g, 1);
    const bool in_time = cox_now_ns() < begin_ns + timeout_ms * COX_NSEC_PER_MSEC;
    while (cox_now_ns() < deadline_ns)
        sched_yield();
    cox_fault_arm(NULL);
    pthread_join(waker, NULL);
    const struct test_completion *c = test_await(g, 0);
    if (in_time) {
        if (c->status)
            fail_msg("it was replied to in time: %d: %s", c->status, c->text);
        assert_string_equal(c->ranks[0].bytes, "released");
        assert_string_equal(c->ranks[1].bytes, "released");
    }
    test_group_free(g);
    return in_time;
}

TEST(p3_an_reply_in_time_is_no_timeout_however_late_it_is_looked_at)
{
    uint64_t timeout_ms = 1000;
    while (!reply_in_time(timeout_ms)) {
        timeout_ms *= 2;
        assert_true(timeout_ms < TEST_PATIENCE_MS);
    }
}

/* The request was in memory that is too large to be kept (COX_LARGE_PAYLOAD_KEEP_SIZE), which is
 * given back behind the handler; that may take as long as it likes. */
TEST(p8_m3_memory_is_given_back_when_the_handler_has_returned)
{
    const uint32_t before = arm("large_payload.dropped:hold:coordinator:1");
    OWN_GROUP *g = test_group_start(2, NULL);
    char *bytes = malloc(24 * MIB + 1);
    assert_non_null(bytes);
    memset(bytes, 'x', 24 * MIB);
    bytes[24 * MIB] = '\0';
    assert_int_equal(test_submit(g, &test_all, "sum %s", bytes), 0);
    free(bytes);
    assert_int_equal(test_await(g, 0)->status, 0);
    await_strike(before);
    /* A rank is replaced once the handlers that got its death have returned. */
    assert_int_equal(kill(cox_executor_pid(test_group_executor(g), 1), SIGKILL), 0);
    test_await_death(g, 1);
    int r = cox_executor_restart(test_group_executor(g), 1, cox_deadline_after_ms(TEST_PATIENCE_MS),
                                 test_err());
    if (r) {
        cox_fault_arm(NULL);
        fail_msg("%s", test_error.text);
    }
    assert_int_equal(test_submit(g, &test_all, "echo next"), 0);
    assert_int_equal(test_completion_count(g), 1);
    cox_fault_arm(NULL);
    assert_string_equal(test_await(g, 1)->ranks[1].bytes, "next");
}

/* In this process alone; ranks count nothing. */
static void count_strikes(void)
{
    char path[] = "/tmp/cox_gather_XXXXXX";
    int fd = mkostemp(path, O_CLOEXEC);
    if (fd < 0 || ftruncate(fd, sizeof *counts) < 0)
        abort();
    counts = mmap(NULL, sizeof *counts, PROT_READ, MAP_SHARED, fd, 0);
    if (counts == MAP_FAILED)
        abort();
    setenv("COXSWAIN_FAULT_COUNTS", path, 1);
    cox_fault_arm(NULL); /* reads it */
    unsetenv("COXSWAIN_FAULT_COUNTS");
    unlink(path);
    close(fd);
}

int main(void)
{
    count_strikes();
    return test_run(NULL, NULL);
}

#endif
