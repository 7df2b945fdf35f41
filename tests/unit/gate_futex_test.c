/* The gate over futexes: one wakeup for all ranks, the last reply wakes, hints count. */
#include "channel/attach/sealed/futex_gate.h"
#include "channel/shm/gate.h"

#include "channel/base/futex.h"
#include "channel_fixture.h"

#define DEPTH 4
#define RANK_COUNT 8
#define PATIENCE_MS 60000

/* What both sides share, as layout.h has it. */
struct shared {
    struct cox_layout_ranks_wakeup ranks_wakeup;
    struct cox_layout_wake_channel wake;
    /* of the tests */
    _Atomic uint64_t events[RANK_COUNT];
    _Atomic uint64_t published;
};

static struct shared *shared;
static struct cox_gate coordinator, rank;
static const struct cox_rank_set everybody = {{~UINT64_C(0), ~UINT64_C(0)}};

/* ---- system calls: the linker sends the gate's here ---- */

static _Atomic unsigned wakes;
static _Atomic unsigned faults; /* so many of the next fail, as at a hole that is being made */

long __real_syscall(long number, long a, long b, long c, long d, long e, long f);
long __wrap_syscall(long number, long a, long b, long c, long d, long e, long f);
long __wrap_syscall(long number, long a, long b, long c, long d, long e, long f)
{
    if (number == SYS_futex && faults > 0) {
        faults--;
        errno = EFAULT;
        return -1;
    }
    if (number == SYS_futex && b == FUTEX_WAKE)
        wakes++;
    return __real_syscall(number, a, b, c, d, e, f);
}

/* How many were made since the last time it was asked. */
static unsigned wakes_made(void)
{
    return atomic_exchange(&wakes, 0);
}

/* ---- */

static int setup(void **state)
{
    leak_setup(state);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        return -1;
    cox_gate_bind(&coordinator, &shared->ranks_wakeup, &shared->wake, DEPTH, true);
    cox_gate_bind(&rank, &shared->ranks_wakeup, &shared->wake, DEPTH, false);
    wakes = 0;
    return 0;
}

static int teardown(void **state)
{
    cox_gate_close(&coordinator);
    cox_gate_close(&coordinator);
    cox_gate_close(&rank);
    munmap(shared, sizeof *shared);
    return leak_teardown(state);
}

#define GATE_TEST(name) TEST_WITH(name, setup, teardown)

static uint64_t patience(void)
{
    return cox_deadline_after_ms(PATIENCE_MS);
}

static void sleep_for_request(void *context)
{
    const uint32_t *which = context;
    uint32_t wake_sequence = cox_gate_wake_sequence(&rank, COX_WAKEUP_REQUEST_CONSUME);
    CHECK(cox_gate_wait(&rank, *which, COX_WAKEUP_REQUEST_CONSUME, wake_sequence, patience()) == 0);
    atomic_fetch_add(&shared->events[*which], 1);
}

GATE_TEST(one_wakeup_releases_all_waiters)
{
    pid_t pids[RANK_COUNT];
    uint32_t numbers[RANK_COUNT];
    for (uint32_t i = 0; i < RANK_COUNT; i++) {
        numbers[i] = i;
        pids[i] = child_start(sleep_for_request, &numbers[i]);
    }
    for (uint32_t i = 0; i < RANK_COUNT; i++)
        child_asleep(pids[i]);
    uint32_t before = shared->ranks_wakeup.word;
    cox_gate_open(&coordinator, &everybody);
    assert_int_equal(wakes_made(), 1);
    assert_int_equal(shared->ranks_wakeup.word, before + 1);
    for (uint32_t i = 0; i < RANK_COUNT; i++) {
        child_join(pids[i]);
        assert_int_equal(shared->events[i], 1);
    }
}

static void sleep_for_replies(void *context)
{
    uint32_t wake_sequence = cox_gate_wake_sequence(&coordinator, COX_WAKEUP_RESPONSE_CONSUME);
    (void)context;
    CHECK(cox_gate_wait(&coordinator, 0, COX_WAKEUP_RESPONSE_CONSUME, wake_sequence,
                        COX_DEADLINE_NEVER) == 0);
}

GATE_TEST(only_the_last_reply_wakes)
{
    for (uint32_t count = 1; count <= RANK_COUNT; count++) {
        const uint64_t sequence = 100 + count;
        cox_gate_arm(&coordinator, sequence, count);
        pid_t pid = child_start(sleep_for_replies, NULL);
        child_asleep(pid);
        for (uint32_t i = 0; i + 1 < count; i++) {
            uint32_t wakeup = shared->wake.wakeup;
            cox_gate_reply(&rank, i, sequence, false);
            assert_int_equal(shared->wake.wakeup, wakeup);
            assert_int_equal(wakes_made(), 0);
        }
        child_asleep(pid);
        uint32_t wakeup = shared->wake.wakeup;
        cox_gate_reply(&rank, count - 1, sequence, false);
        assert_int_equal(shared->wake.wakeup, wakeup + 1);
        assert_int_equal(wakes_made(), 1);
        child_join(pid);
        /* And no reply beyond. */
        cox_gate_reply(&rank, 0, sequence, false);
        assert_int_equal(shared->wake.wakeup, wakeup + 1);
        assert_int_equal(wakes_made(), 0);
    }
}

GATE_TEST(the_first_failure_wakes)
{
    for (uint32_t failing = 0; failing < 4; failing++) {
        const uint64_t sequence = 7 + failing;
        cox_gate_arm(&coordinator, sequence, 4);
        pid_t pid = child_start(sleep_for_replies, NULL);
        child_asleep(pid);
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t wakeup = shared->wake.wakeup;
            cox_gate_reply(&rank, i, sequence, i == failing);
            /* The last one too, when it comes; but no thread sleeps then. */
            assert_int_equal(shared->wake.wakeup - wakeup, i == failing || i == 3);
            assert_int_equal(wakes_made(), i == failing);
            if (i == failing)
                child_join(pid);
        }
    }
}

GATE_TEST(a_late_reply_does_not_count_for_the_next_request_of_its_frame)
{
    uint32_t wakeup = shared->wake.wakeup;
    cox_gate_arm(&coordinator, 3, 2);
    cox_gate_reply(&rank, 0, 3, false);
    /* The other one is late; its frame is used again. */
    cox_gate_arm(&coordinator, 3 + DEPTH, 2);
    cox_gate_reply(&rank, 1, 3, false);
    cox_gate_reply(&rank, 1, 3, false);
    assert_int_equal(shared->wake.wakeup, wakeup);
    cox_gate_reply(&rank, 0, 3 + DEPTH, false);
    assert_int_equal(shared->wake.wakeup, wakeup);
    cox_gate_reply(&rank, 1, 3 + DEPTH, false);
    assert_int_equal(shared->wake.wakeup, wakeup + 1);
    /* Frames beside each other have nothing to do with each other. */
    for (uint64_t s = 8; s < 8 + DEPTH; s++)
        cox_gate_arm(&coordinator, s, 1);
    for (uint64_t s = 8; s < 8 + DEPTH; s++) {
        cox_gate_reply(&rank, 0, s, false);
        assert_int_equal(shared->wake.wakeup, wakeup + 2 + (s - 8));
    }
}

/* Whatever is written there: a reply ends, and the next request's count is its own. */
GATE_TEST(p10_a_hint_of_any_bits_is_gone_with_the_next_request)
{
    uint64_t random = 4711;
    for (uint32_t i = 0; i < 64 + 1000; i++) {
        const uint64_t sequence = 4 + i;
        cox_gate_arm(&coordinator, sequence, 3);
        _Atomic uint64_t *hint = &shared->wake.hints[sequence % DEPTH].word;
        *hint = i < 64 ? *hint ^ UINT64_C(1) << i : random_next(&random);
        uint32_t wakeup = shared->wake.wakeup;
        for (uint32_t r = 0; r < 3; r++)
            cox_gate_reply(&rank, r, sequence, false);
        assert_true(shared->wake.wakeup - wakeup <= 1);
        cox_gate_arm(&coordinator, sequence, 2);
        wakeup = shared->wake.wakeup;
        cox_gate_reply(&rank, 0, sequence, false);
        assert_int_equal(shared->wake.wakeup, wakeup);
        cox_gate_reply(&rank, 1, sequence, false);
        assert_int_equal(shared->wake.wakeup, wakeup + 1);
    }
}

GATE_TEST(a_wake_up_after_the_wake_sequence_was_read_is_not_slept_through)
{
    static const enum cox_wakeup wakeups[] = {COX_WAKEUP_REQUEST_CONSUME,
                                              COX_WAKEUP_RESPONSE_CONSUME};
    for (size_t b = 0; b < 2; b++) {
        uint32_t wake_sequence = cox_gate_wake_sequence(&rank, wakeups[b]);
        uint64_t deadline_ns = cox_deadline_after_ms(10);
        assert_int_equal(cox_gate_wait(&rank, 0, wakeups[b], wake_sequence, deadline_ns),
                         COX_TIMEOUT);
        assert_true(cox_now_ns() >= deadline_ns);
        assert_int_equal(cox_gate_wait(&rank, 0, wakeups[b], wake_sequence, 0), COX_TIMEOUT);
        cox_gate_post(&coordinator, 0, wakeups[b]);
        assert_int_equal(cox_gate_wait(&rank, 0, wakeups[b], wake_sequence, patience()), 0);
        assert_int_equal(cox_gate_wait(&rank, 0, wakeups[b], wake_sequence, COX_DEADLINE_NEVER), 0);
    }
}

/* ---- time and signals ---- */

static void wait_for_20_ms(void *context)
{
    static const enum cox_wakeup wakeups[] = {COX_WAKEUP_REQUEST_CONSUME,
                                              COX_WAKEUP_RESPONSE_CONSUME};
    (void)context;
    for (size_t b = 0; b < 2; b++) {
        uint32_t wake_sequence = cox_gate_wake_sequence(&rank, wakeups[b]);
        CHECK(cox_gate_wait(&rank, 0, wakeups[b], wake_sequence, cox_deadline_after_ms(20)) ==
              COX_TIMEOUT);
    }
}

GATE_TEST(b48_the_calendar_does_not_matter)
{
    child_run_in_another_time(wait_for_20_ms, NULL);
}

static volatile sig_atomic_t ticks, ringing_tick; /* 0: none of them wakes */

static void on_tick(int number)
{
    (void)number;
    ticks = ticks + 1;
    if (ringing_tick && ticks == ringing_tick)
        cox_gate_post(&coordinator, 0, COX_WAKEUP_REQUEST_CONSUME);
}

/* Nor moves its deadline: each signal begins it anew. */
GATE_TEST(b47_a_storm_of_signals_ends_no_wait)
{
    ticks = ringing_tick = 0;
    storm_begin(on_tick, 500);
    uint32_t wake_sequence = cox_gate_wake_sequence(&rank, COX_WAKEUP_REQUEST_CONSUME);
    /* Longer, where a busy machine has let this process see few of them. */
    for (uint64_t ms = 100, end_ns = patience(); ticks <= 5; ms *= 2) {
        assert_true(cox_now_ns() < end_ns);
        uint64_t deadline_ns = cox_deadline_after_ms(ms);
        assert_int_equal(
            cox_gate_wait(&rank, 0, COX_WAKEUP_REQUEST_CONSUME, wake_sequence, deadline_ns),
            COX_TIMEOUT);
        assert_true(cox_now_ns() >= deadline_ns);
    }
    for (int never = 0; never < 2; never++) {
        wake_sequence = cox_gate_wake_sequence(&rank, COX_WAKEUP_REQUEST_CONSUME);
        ringing_tick = ticks + 20;
        assert_int_equal(cox_gate_wait(&rank, 0, COX_WAKEUP_REQUEST_CONSUME, wake_sequence,
                                       never ? COX_DEADLINE_NEVER : patience()),
                         0);
        assert_true(ticks >= ringing_tick);
    }
    storm_end();
    assert_int_equal(shared->ranks_wakeup.asleep, 0);
}

/* A rank makes holes where the words are, at which a call of another process fails now and then. */
GATE_TEST(p10_b16_a_call_that_meets_a_hole_does_not_fail_and_wakes)
{
    static const enum cox_wakeup wakeups[] = {COX_WAKEUP_REQUEST_CONSUME,
                                              COX_WAKEUP_RESPONSE_CONSUME};
    for (size_t b = 0; b < 2; b++) {
        const uint32_t wake_sequence = cox_gate_wake_sequence(&rank, wakeups[b]);
        faults = 1; /* woken, for no reason */
        assert_int_equal(cox_gate_wait(&rank, 0, wakeups[b], wake_sequence, COX_DEADLINE_NEVER), 0);
        assert_int_equal(faults, 0);
        faults = UINT32_MAX; /* and not for ever */
        assert_int_equal(cox_gate_wait(&rank, 0, wakeups[b], wake_sequence, cox_now_ns()),
                         COX_TIMEOUT);
        cox_gate_post(&coordinator, 0, wakeups[b]);
        faults = 0;
    }
    uint32_t which = 0;
    pid_t pid = child_start(sleep_for_request, &which);
    child_asleep(pid);
    faults = 3;
    wakes_made();
    cox_gate_open(&coordinator, &everybody);
    assert_int_equal(faults, 0);
    assert_int_equal(wakes_made(), 1);
    child_join(pid);
}

/* Otherwise the first wake, by the count, would find no sleeper while one rank sleeps, for good. */
GATE_TEST(p10_a_lost_count_of_sleepers_is_not_too_low_for_ever)
{
    uint32_t which = 0;
    pid_t pid = child_start(sleep_for_request, &which);
    child_asleep(pid);
    assert_int_equal(shared->ranks_wakeup.asleep, 1);
    shared->ranks_wakeup.asleep = 0;
    cox_gate_post(&coordinator, 0,
                  COX_WAKEUP_REQUEST_CONSUME); /* as every slice, whatever the count says */
    child_join(pid);
    assert_int_equal(shared->ranks_wakeup.asleep, 0);
    wakes_made();
    /* As when another one, woken with it, has found nothing and is about to put that right: what
     * each took it gives. */
    pid = child_start(sleep_for_request, &which);
    child_asleep(pid);
    shared->ranks_wakeup.asleep = UINT32_MAX;
    cox_gate_post(&coordinator, 0, COX_WAKEUP_REQUEST_CONSUME);
    child_join(pid);
    assert_int_equal(shared->ranks_wakeup.asleep, UINT32_MAX);
    shared->ranks_wakeup.asleep = 0;
    wakes_made();
    pid = child_start(sleep_for_request, &which);
    child_asleep(pid);
    cox_gate_open(&coordinator, &everybody);
    assert_int_equal(wakes_made(), 1);
    child_join(pid);
}

/* Tokens are the semaphores'. */
GATE_TEST(there_is_nothing_to_take_or_to_settle)
{
    assert_true(cox_gate_shared(&coordinator));
    for (int b = 0; b < COX_WAKEUP_COUNT; b++) {
        struct shared before;
        cox_gate_post(&coordinator, 3, (enum cox_wakeup)b);
        memcpy(&before, shared, sizeof before);
        assert_false(cox_gate_take(&coordinator, 3, (enum cox_wakeup)b));
        cox_gate_absorb(&coordinator, 3, (enum cox_wakeup)b);
        assert_memory_equal(&before, shared, sizeof before);
    }
    /* Only words with a sleeper are worth a system call. */
    assert_int_equal(wakes_made(), 2);
}

static void wait_for_a_frame(void *context)
{
    cox_gate_wait(context, 0, COX_WAKEUP_REQUEST_PRODUCE, 0, 0);
}

GATE_TEST(a_sleep_that_nothing_wakes_is_a_programmer_error)
{
    struct cox_gate error = {0};
    child_aborts(wait_for_a_frame, &coordinator);
    /* The error channel has no requests. */
    cox_gate_bind(&error, NULL, &shared->wake, DEPTH, true);
    uint32_t wakeup = shared->wake.wakeup;
    cox_gate_post(&error, 0, COX_WAKEUP_REQUEST_CONSUME);
    assert_int_equal(cox_gate_wake_sequence(&error, COX_WAKEUP_REQUEST_CONSUME), 0);
    assert_int_equal(wakes_made(), 0);
    cox_gate_post(&error, 0, COX_WAKEUP_RESPONSE_CONSUME);
    assert_int_equal(shared->wake.wakeup, wakeup + 1);
    cox_gate_close(&error);
}

/* ---- a word that the rank cannot write ---- */

static void wake_read_only(void *context)
{
    (void)context;
    CHECK(mprotect(shared, sizeof *shared, PROT_READ) == 0);
    cox_gate_post(&rank, 0, COX_WAKEUP_REQUEST_CONSUME);
}

GATE_TEST(p10_a_rank_wakes_its_threads_on_memory_it_cannot_write)
{
    uint32_t which = 0;
    pid_t pid = child_start(sleep_for_request, &which);
    child_asleep(pid);
    uint32_t before = shared->ranks_wakeup.word;
    child_run(wake_read_only, NULL);
    child_join(pid);
    assert_int_equal(shared->ranks_wakeup.word, before);
}

/* ---- races ---- */

#define ROUNDS 100000

/* The worker's loop: wake sequence, look, sleep. */
static bool await_published(uint64_t round)
{
    for (;;) {
        uint32_t wake_sequence = cox_gate_wake_sequence(&rank, COX_WAKEUP_REQUEST_CONSUME);
        if (atomic_load_explicit(&shared->published, memory_order_acquire) >= round)
            return true;
        if (cox_gate_wait(&rank, 0, COX_WAKEUP_REQUEST_CONSUME, wake_sequence, patience()))
            return false;
    }
}

static uint64_t rounds;

static void reply_rounds(void *context)
{
    const uint32_t number = *(const uint32_t *)context;
    for (uint64_t round = 1; round <= rounds; round++) {
        CHECK(await_published(round));
        atomic_store_explicit(&shared->events[number], round, memory_order_release);
        cox_gate_reply(&rank, number, round, false);
    }
}

static bool replied(uint32_t count, uint64_t round)
{
    for (uint32_t i = 0; i < count; i++)
        if (atomic_load_explicit(&shared->events[i], memory_order_acquire) < round)
            return false;
    return true;
}

/* count ranks reply; the coordinator sleeps without an end between its looks, as good as. */
static void play(uint32_t count, uint64_t round_count)
{
    pid_t pids[RANK_COUNT];
    uint32_t numbers[RANK_COUNT];
    rounds = round_count;
    for (uint32_t i = 0; i < count; i++) {
        numbers[i] = i;
        pids[i] = child_start(reply_rounds, &numbers[i]);
    }
    uint32_t wakeup = shared->wake.wakeup;
    for (uint64_t round = 1; round <= rounds; round++) {
        cox_gate_arm(&coordinator, round, count);
        atomic_store_explicit(&shared->published, round, memory_order_release);
        cox_gate_open(&coordinator, &everybody);
        for (;;) {
            uint32_t wake_sequence =
                cox_gate_wake_sequence(&coordinator, COX_WAKEUP_RESPONSE_CONSUME);
            /* That of the last reply, and no other, ends the round. */
            if (wake_sequence == wakeup + (uint32_t)round)
                break;
            assert_int_equal(wake_sequence, wakeup + (uint32_t)round - 1);
            assert_int_equal(cox_gate_wait(&coordinator, 0, COX_WAKEUP_RESPONSE_CONSUME,
                                           wake_sequence, patience()),
                             0);
        }
        assert_true(replied(count, round));
    }
    for (uint32_t i = 0; i < count; i++)
        child_join(pids[i]);
}

GATE_TEST(no_wake_up_is_lost_between_state_and_sleep)
{
    play(1, ROUNDS);
}

GATE_TEST(replies_at_the_same_time_wake_once)
{
    play(4, ROUNDS / 10);
}
