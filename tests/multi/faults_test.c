/* The error channel when a rank dies while it holds the one slot: reports of the others still
 * arrive. */
#include "channel/attach/named/names.h"
#include "channel/base/peer.h"
#include "channel/base/semaphore.h"
#include "channel/shm/geometry.h"
#include "channel/shm/state.h"
#include "testing.h"

#if COX_TESTING

/* A group of four in which `rank` does `action` at a point; report.claimed: once the slot is its
 * own. */
static struct test_group *group_of(const char *point, const char *action, uint32_t rank)
{
    char plan[64];
    snprintf(plan, sizeof plan, "%s:%s:%" PRIu32, point, action, rank);
    setenv("COXSWAIN_FAULT", plan, 1);
    struct test_group *g = test_group_start(4, START_WITH(.memory.keep_names = true));
    unsetenv("COXSWAIN_FAULT");
    return g;
}

/* Each rank but the dead one reports; every word arrives, once. */
static void expect_heard(struct test_group *g, uint32_t dead, size_t heard_before)
{
    size_t heard = heard_before;
    for (int round = 0; round < 3; round++)
        for (uint32_t rank = 0; rank < 4; rank++) {
            if (rank == dead)
                continue;
            const struct test_how how = {.gather = COX_GATHER_ALL, .ranks = UINT64_C(1) << rank};
            char expected[64];
            if (test_call_how(g, NULL, &how, "fault of round %d", round))
                fail_msg("rank %" PRIu32 ": %s", rank, test_error_text(g));
            test_await_faults(g, ++heard);
            snprintf(expected, sizeof expected, "%" PRIu32 " of round %d", rank, round);
            assert_string_equal(test_fault(g, heard - 1), expected);
        }
}

TEST(p8_a_rank_killed_while_it_holds_the_slot_silences_no_other)
{
    for (uint32_t dead = 0; dead < 4; dead++) {
        OWN_GROUP *g = group_of("report.claimed", "kill", dead);
        const struct test_how how = {.gather = COX_GATHER_ALL, .ranks = UINT64_C(1) << dead};
        assert_int_equal(test_call_how(g, NULL, &how, "fault never heard"), COX_PEER_DEAD);
        test_await_death(g, dead);
        expect_heard(g, dead, 0);
    }
}

/* A stopped process stays so until it is continued: the point has been passed. */
static void await_stopped(pid_t pid)
{
    AWAIT(cox_peer_stopped(pid));
}

/* The others ask for the slot while it is in the hand that will not give it back. */
TEST(p8_a_rank_that_waits_for_the_slot_gets_it)
{
    OWN_GROUP *g = group_of("report.claimed", "stop", 1);
    pid_t pid = cox_executor_pid(test_group_executor(g), 1);
    const struct test_how holder = {.gather = COX_GATHER_ALL, .ranks = 2};
    const struct test_how others = {.gather = COX_GATHER_ALL, .ranks = 1 + 4 + 8};
    assert_int_equal(test_submit(g, &holder, "fault never heard"), 0);
    await_stopped(pid);
    assert_int_equal(test_submit(g, &others, "fault waited for it"), 0);
    assert_int_equal(test_submit(g, &others, "fault waited, too"), 0);
    assert_int_equal(kill(pid, SIGKILL), 0);
    for (size_t n = 0; n < 3;
         n++) { /* in no order: the slot may be free before the death is looked at */
        const struct test_completion *c = test_await(g, n);
        assert_int_equal(c->status, c->sequence == 1 ? COX_PEER_DEAD : 0);
    }
    test_await_faults(g, 6);
    for (size_t i = 0; i < 6; i++)
        assert_contains(test_fault(g, i), "waited");
}

/* Tokens of the slot, once no process moves them any more. */
static void expect_one_token(struct test_group *g)
{
    char object[COX_OBJECT_NAME_SIZE];
    struct cox_semaphore wakeup = {0};
    cox_name_wakeup(object, cox_executor_name(test_group_executor(g)), COX_CHANNEL_ERROR,
                    COX_WAKEUP_RESPONSE_PRODUCE, 0);
    assert_int_equal(cox_semaphore_attach(&wakeup, object, NULL), 0);
    uint64_t deadline_ns = cox_deadline_after_ms(TEST_PATIENCE_MS);
    int value = 0;
    while (value != 1 && cox_now_ns() < deadline_ns) {
        assert_int_equal(sem_getvalue(wakeup.sem, &value), 0);
        sched_yield();
    }
    cox_semaphore_detach(&wakeup);
    assert_int_equal(value, 1);
}

static void await_waiting(struct test_group *g, uint32_t rank)
{
    struct cox_control control = COX_CONTROL_NONE;
    assert_ok(cox_control_attach(&control, cox_executor_name(test_group_executor(g)), NULL));
    const struct cox_layout_rank_line *line = cox_state_line(&control, rank, COX_CHANNEL_ERROR);
    AWAIT(atomic_load(&line->word) >> COX_STATE_SHIFT != COX_RANK_IDLE);
    uint64_t state = atomic_load(&line->word) >> COX_STATE_SHIFT;
    cox_control_close(&control);
    assert_int_not_equal(state, COX_RANK_IDLE);
}

/* Rank 2 dies while it waits for the slot, which rank 1 holds: the report of rank 1, and those of
 * waiting ranks, are not overwritten. */
TEST(p8_a_rank_that_dies_waiting_for_the_slot_leaves_one_token)
{
    OWN_GROUP *g = group_of("report.claimed", "stop", 1);
    pid_t pid = cox_executor_pid(test_group_executor(g), 1);
    const struct test_how holder = {.gather = COX_GATHER_ALL, .ranks = 2};
    const struct test_how others = {.gather = COX_GATHER_ALL, .ranks = 1 + 4 + 8};
    assert_int_equal(test_submit(g, &holder, "fault held"), 0);
    await_stopped(pid);
    assert_int_equal(test_submit(g, &others, "fault waited"), 0);
    await_waiting(g, 2);
    assert_int_equal(kill(cox_executor_pid(test_group_executor(g), 2), SIGKILL), 0);
    test_await_death(g, 2);
    /* Longer than the interval of the check: while the slot's holder lives, its token is not
     * restored. */
    const uint64_t until_ns = cox_deadline_after_ms(300);
    while (cox_now_ns() < until_ns)
        sched_yield();
    assert_int_equal(kill(pid, SIGCONT), 0);
    test_await_faults(g, 3);
    for (size_t i = 0; i < 3; i++)
        assert_contains(test_fault(g, i), i == 0 ? "1 held" : "waited");
    expect_one_token(g);
}

/* It has written its report and dies before it can say so. */
TEST(p8_the_last_words_of_a_rank_are_heard)
{
    for (uint32_t dead = 0; dead < 4; dead++) {
        OWN_GROUP *g = group_of("report.written", "kill", dead);
        const struct test_how how = {.gather = COX_GATHER_ALL, .ranks = UINT64_C(1) << dead};
        char expected[32];
        snprintf(expected, sizeof expected, "%" PRIu32 " last words", dead);
        assert_int_equal(test_call_how(g, NULL, &how, "fault last words"), COX_PEER_DEAD);
        test_await_faults(g, 1);
        assert_string_equal(test_fault(g, 0), expected);
        expect_heard(g, dead, 1);
        expect_one_token(g);
    }
}

#endif
