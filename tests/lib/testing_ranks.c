#include "testing.h"

uint64_t test_patience(void)
{
    return cox_deadline_after_ms(TEST_PATIENCE_MS);
}

void test_yield(uint64_t deadline_ns)
{
    assert_true(cox_now_ns() < deadline_ns);
    sched_yield();
}

bool test_sem_await(sem_t *semaphore)
{
    const struct timespec until = cox_deadline_timespec(test_patience());
    while (sem_clockwait(semaphore, CLOCK_MONOTONIC, &until))
        if (errno != EINTR)
            return false;
    return true;
}

pid_t test_pid(struct test_group *group, uint32_t rank)
{
    return cox_executor_pid(test_group_executor(group), rank);
}

struct cox_rank_status test_rank_status(struct cox_executor *executor, uint32_t rank)
{
    struct cox_executor_status status;
    struct cox_rank_status ranks[COX_RANK_COUNT_MAX];
    cox_executor_read_status(executor, &status, ranks);
    return ranks[rank];
}

void test_init(struct test_group *group)
{
    struct cox_init_summary summary;
    assert_ok(cox_executor_init(test_group_executor(group), NULL, 0, test_patience(), &summary,
                                test_err()));
}

int test_recover(struct test_group *group, enum cox_recover_command command,
                 struct cox_recover_result *results, struct cox_error *err)
{
    struct cox_recover_result own[COX_RANK_COUNT_MAX];
    return cox_executor_recover(test_group_executor(group), command, test_patience(),
                                results ? results : own, err);
}

void test_kill_rank(struct test_group *group, uint32_t rank)
{
    const struct test_how how = {.gather = COX_GATHER_ALL, .ranks = UINT64_C(1) << rank};
    assert_int_equal(kill(test_pid(group, rank), SIGKILL), 0);
    int r;
    while ((r = test_call_how(group, NULL, &how, "echo still there?")) == 0)
        continue;
    assert_int_equal(r, COX_PEER_DEAD);
}

void test_restart_rank(struct test_group *group, uint32_t rank)
{
    int r = cox_executor_restart(test_group_executor(group), rank, test_patience(), test_err());
    if (r)
        fail_msg("restart of rank %" PRIu32 ": %d: %s", rank, r, test_error.text);
}

unsigned test_served(struct test_group *group, uint32_t rank)
{
    const struct test_how how = {.gather = COX_GATHER_ALL, .ranks = UINT64_C(1) << rank};
    OWN_COMPLETION c = {0};
    if (test_call_how(group, &c, &how, "served"))
        fail_msg("rank %" PRIu32 ": %s", rank, test_error_text(group));
    unsigned count = (unsigned)atoi(c.ranks[rank].bytes);
    return count;
}
