/*
 * transfers: the states of a pull, one end each, blocks in quarantine, on the executor of
 * engine_loop_fixture.h, whose pulls the test completes.
 */
#include "coordinator/server/server_internal.h"
#include "engine/batching/transfers.h"
#include "proto/executor.pb-c.h"
#include "engine_loop_fixture.h"
#include "tests/lib/test.h"

#define PULL_ERROR COXSWAIN__PDERROR_CODE__PD_PULL_KV_ERROR

struct fixture {
    struct cox_executor *executor;
    struct cox_transfers *transfers;
    _Atomic int wakes;
};

static void on_wake(void *context)
{
    struct fixture *f = context;
    atomic_fetch_add(&f->wakes, 1);
}

static int32_t no_token(const struct Coxswain__PullKVRequest__PullKVInfo *info, uint32_t position)
{
    (void)info;
    return (int32_t)position;
}

static void fixture_free(void *object)
{
    struct fixture *f = object;
    cox_transfers_free(f->transfers);
    free(f);
}

static struct fixture *fixture_new(void)
{
    struct cox_executor *executor = executor_new();
    struct fixture *f = test_own(calloc(1, sizeof *f), fixture_free);
    const struct cox_transfers_options options = {.wake = on_wake, .wake_context = f};
    executor->script.pulls_held = true;
    executor->remote_token = no_token;
    f->executor = executor;
    assert_ok(cox_transfers_new(executor, &options, &f->transfers, test_err()));
    return f;
}

/* A test over it. */
#define FIXTURE_TEST(name)                                                                         \
    static void name##_in(struct fixture *f);                                                      \
    PLAIN_TEST(name)                                                                               \
    {                                                                                              \
        name##_in(fixture_new());                                                                  \
    }                                                                                              \
    static void name##_in(__attribute__((unused)) struct fixture *f)

static const int32_t theirs[] = {7, 8, 9};

static void begin_with(struct fixture *f, int64_t sequence, uint64_t deadline_ns,
                       uint64_t not_before_ns)
{
    const struct cox_kv_reference source = {.cluster_id = "other",
                                            .epoch = 3,
                                            .sequence = 70 + sequence,
                                            .lease_ns = COX_DEADLINE_NEVER,
                                            .blocks = theirs,
                                            .block_count = 3};
    const int32_t ours[] = {(int32_t)sequence * 3, (int32_t)sequence * 3 + 1,
                            (int32_t)sequence * 3 + 2};
    const struct cox_pull_request request = {.sequence = sequence,
                                             .attempt = 1,
                                             .source = &source,
                                             .blocks = ours,
                                             .deadline_ns = deadline_ns,
                                             .not_before_ns = not_before_ns,
                                             .epoch = 1};
    assert_int_equal(cox_transfers_start(f->transfers, &request), 0);
}

static void begin(struct fixture *f, int64_t sequence)
{
    begin_with(f, sequence, COX_DEADLINE_NEVER, 0);
}

static struct fixture_pull sent(struct fixture *f, const char *id)
{
    cox_transfers_turn(f->transfers);
    struct fixture_pull pull = executor_await_pull(f->executor);
    if (id)
        assert_string_equal(pull.ids[0], id);
    return pull;
}

static void expect_end(struct fixture *f, int64_t sequence, enum cox_pull_state state, int code,
                       bool drained)
{
    struct cox_pull_outcome outcome;
    assert_int_equal(cox_transfers_take(f->transfers, &outcome), 0);
    assert_int_equal(outcome.sequence, sequence);
    assert_string_equal(cox_pull_state_name(outcome.report->state), cox_pull_state_name(state));
    assert_int_equal(outcome.report->error.code, code);
    assert_int_equal(outcome.drained, drained);
    free(outcome.report);
}

static void expect_none(struct fixture *f)
{
    struct cox_pull_outcome outcome;
    assert_int_equal(cox_transfers_take(f->transfers, &outcome), COX_EMPTY);
}

static struct cox_transfers_status status(struct fixture *f)
{
    struct cox_transfers_status status;
    cox_transfers_status(f->transfers, &status);
    return status;
}

static void expect_drained(struct fixture *f, int32_t first)
{
    int32_t *blocks;
    uint32_t count;
    assert_int_equal(cox_transfers_take_drained(f->transfers, &blocks, &count), 0);
    assert_int_equal(count, 3);
    assert_int_equal(blocks[0], first);
    free(blocks);
    assert_int_equal(cox_transfers_take_drained(f->transfers, &blocks, &count), COX_EMPTY);
}

static void expect_not_drained(struct fixture *f)
{
    int32_t *blocks;
    uint32_t count;
    assert_int_equal(cox_transfers_take_drained(f->transfers, &blocks, &count), COX_EMPTY);
}

PLAIN_TEST(m11_the_table_of_moves_has_one_end_for_each_pull)
{
    for (int from = 0; from < COX_PULL_STATE_COUNT; from++)
        for (int to = 0; to < COX_PULL_STATE_COUNT; to++) {
            bool may = cox_pull_may_move((enum cox_pull_state)from, (enum cox_pull_state)to);
            if (cox_pull_has_ended((enum cox_pull_state)from) || from == to)
                assert_false(may);
            else
                assert_true(may || (from == COX_PULL_QUEUED && to == COX_PULL_SUCCESS));
        }
    assert_false(cox_pull_may_move(COX_PULL_QUEUED, COX_PULL_SUCCESS));
    assert_false(cox_pull_may_move(COX_PULL_STATE_COUNT, COX_PULL_SENT));
    assert_string_equal(cox_pull_state_name(COX_PULL_STATE_COUNT), "unknown");
}

FIXTURE_TEST(m11_pulls_that_wait_go_together_and_each_has_its_own_end)
{
    begin(f, 1);
    begin(f, 2);
    begin_with(f, 3, COX_DEADLINE_NEVER, COX_DEADLINE_NEVER); /* not yet */
    struct fixture_pull pull = sent(f, "other.1.1");
    assert_int_equal(pull.count, 2);
    assert_int_equal(status(f).running, 3);
    expect_none(f);
    pull.count = 1; /* the rank does not mention the second */
    executor_complete_pull(f->executor, &pull, 0, COX_OUTCOME_OK, 0, 0);
    assert_int_equal(atomic_load(&f->wakes), 1);
    expect_end(f, 1, COX_PULL_SUCCESS, 0, true);
    expect_end(f, 2, COX_PULL_FAILED, COX_REJECTED, true);
    expect_none(f);
    assert_int_equal(status(f).succeeded, 1);
    assert_int_equal(status(f).failed, 1);
    assert_int_equal(status(f).bytes, 100);
    assert_int_equal(status(f).quarantined_blocks, 0);
}

FIXTURE_TEST(m11_a_short_pull_does_not_wait_for_a_long_one)
{
    const uint64_t soon_ns = cox_deadline_after_ms(60000);
    begin_with(f, 1, soon_ns, 0);
    begin_with(f, 2, cox_deadline_after_ms(3600000), 0);
    begin_with(f, 3, soon_ns + COX_NSEC_PER_SEC / 2, 0);
    struct fixture_pull first = sent(f, "other.1.1"), second = sent(f, "other.2.1");
    assert_int_equal(first.count, 2);
    assert_string_equal(first.ids[1], "other.3.1");
    assert_int_equal(second.count, 1);
    executor_complete_pull(f->executor, &first, 0, COX_OUTCOME_OK, 0, 0);
    expect_end(f, 1, COX_PULL_SUCCESS, 0, true);
    expect_end(f, 3, COX_PULL_SUCCESS, 0, true);
    expect_none(f);
    executor_complete_pull(f->executor, &second, 0, COX_OUTCOME_OK, 0, 0);
    expect_end(f, 2, COX_PULL_SUCCESS, 0, true);
}

FIXTURE_TEST(m11_the_median_of_what_ranks_copied_in_a_second)
{
    assert_int_equal(status(f).bytes_per_s, 0);
    begin(f, 1);
    struct fixture_pull pull = sent(f, NULL);
    executor_complete_pull(f->executor, &pull, 0, COX_OUTCOME_OK, PULL_ERROR, COX_STALE);
    expect_end(f, 1, COX_PULL_FAILED, COX_STALE, true);
    /* What failed was copied for nothing, and says nothing of speed. */
    assert_int_equal(status(f).bytes, 100);
    assert_int_equal(status(f).copy_ns, 25);
    assert_int_equal(status(f).bytes_per_s, 0);
    for (int64_t sequence = 2; sequence <= 4; sequence++)
        begin(f, sequence);
    pull = sent(f, NULL);
    assert_int_equal(pull.count, 3);
    executor_complete_pull(f->executor, &pull, 0, COX_OUTCOME_OK, 0, 0);
    for (int64_t sequence = 2; sequence <= 4; sequence++)
        expect_end(f, sequence, COX_PULL_SUCCESS, 0, true);
    /* 100 bytes in 25, 100 and 400 ns: 4, 1 and 0.25 GB/s. */
    assert_int_equal(status(f).bytes, 400);
    assert_int_equal(status(f).copy_ns, 550);
    assert_in_range(status(f).bytes_per_s, 937500000, 1062500000);
}

PLAIN_TEST(p9_a_ranks_reply_becomes_the_end)
{
    static const struct {
        int32_t status;
        enum cox_pull_state state;
    } cases[] = {{COX_STALE, COX_PULL_FAILED},        {COX_NOT_FOUND, COX_PULL_FAILED},
                 {COX_INVALID, COX_PULL_FAILED},      {COX_TIMEOUT, COX_PULL_TIMEOUT},
                 {COX_PEER_DEAD, COX_PULL_PEER_DEAD}, {COX_ABORTED, COX_PULL_FAILED}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct fixture *f = fixture_new();
        struct cox_pull_outcome outcome;
        begin(f, 1);
        struct fixture_pull pull = sent(f, NULL);
        executor_complete_pull(f->executor, &pull, 0, COX_OUTCOME_OK, PULL_ERROR, cases[i].status);
        assert_int_equal(cox_transfers_take(f->transfers, &outcome), 0);
        assert_int_equal(outcome.report->state, cases[i].state);
        assert_int_equal(outcome.report->error.code, cases[i].status);
        assert_int_equal(outcome.report->ranks[0].code, PULL_ERROR);
        assert_false(outcome.own_death); /* that is the other group's */
        free(outcome.report);
    }
}

FIXTURE_TEST(p9_late_replies_are_dropped_and_their_blocks_wait)
{
    begin_with(f, 1, cox_now_ns() + 1000000, 0);
    struct fixture_pull pull = sent(f, NULL);
    expect_none(f);
    while (status(f).running) {
        cox_transfers_turn(f->transfers);
        nanosleep(&(struct timespec){.tv_nsec = COX_NSEC_PER_MSEC}, NULL);
    }
    expect_end(f, 1, COX_PULL_TIMEOUT, COX_TIMEOUT, false);
    assert_int_equal(status(f).quarantined_blocks, 3);
    cox_transfers_turn(f->transfers);
    assert_int_equal(f->executor->leave_count, 1); /* told once */
    expect_not_drained(f);
    executor_complete_pull(f->executor, &pull, 0, COX_OUTCOME_OK, 0, 0);
    assert_int_equal(status(f).late_results, 1);
    assert_int_equal(status(f).succeeded, 0);
    assert_int_equal(status(f).quarantined_blocks, 0);
    expect_none(f);
    expect_drained(f, 3);
    cox_transfers_turn(f->transfers);
    assert_int_equal(f->executor->leave_count, 1);
}

FIXTURE_TEST(p9_a_late_rank_keeps_the_blocks_until_the_channel_is_in_order)
{
    begin(f, 1);
    struct fixture_pull pull = sent(f, NULL);
    f->executor->late = true;
    /* Another rank's death ends the request at once; this one copies on. */
    executor_complete_pull(f->executor, &pull, COX_PEER_DEAD, COX_OUTCOME_LATE, 0, 0);
    struct cox_pull_outcome outcome;
    assert_int_equal(cox_transfers_take(f->transfers, &outcome), 0);
    assert_int_equal(outcome.report->state, COX_PULL_PEER_DEAD);
    assert_true(outcome.own_death);
    assert_false(outcome.drained);
    free(outcome.report);
    cox_transfers_turn(f->transfers);
    cox_transfers_turn(f->transfers);
    expect_not_drained(f);
    assert_true(cox_transfers_due_ns(f->transfers) < cox_now_ns() + COX_NSEC_PER_SEC);
    f->executor->late = false;
    cox_transfers_turn(f->transfers);
    expect_drained(f, 3);
    assert_int_equal(cox_transfers_due_ns(f->transfers), COX_DEADLINE_NEVER);
}

FIXTURE_TEST(p9_a_cancelled_pull_is_not_reported_and_drained_when_it_is_over)
{
    begin_with(f, 1, COX_DEADLINE_NEVER, COX_DEADLINE_NEVER);
    assert_true(cox_transfers_cancel(f->transfers, 1)); /* never sent */
    begin(f, 2);
    struct fixture_pull pull = sent(f, NULL);
    assert_false(cox_transfers_cancel(f->transfers, 2));
    assert_true(cox_transfers_cancel(f->transfers, 2)); /* there is no such any more */
    assert_int_equal(status(f).cancelled, 2);
    assert_int_equal(status(f).running, 0);
    cox_transfers_turn(f->transfers);
    assert_int_equal(f->executor->leave_count, 1);
    executor_complete_pull(f->executor, &pull, 0, COX_OUTCOME_OK, PULL_ERROR, COX_ABORTED);
    expect_none(f);
    expect_drained(f, 6);
    /* One that had ended before the cancel came. */
    begin(f, 3);
    pull = sent(f, NULL);
    executor_complete_pull(f->executor, &pull, 0, COX_OUTCOME_OK, 0, 0);
    assert_true(cox_transfers_cancel(f->transfers, 3));
    expect_none(f);
    expect_not_drained(f);
    assert_int_equal(status(f).cancelled, 2);
}

static int submit_result;

static int refuse(uint64_t number)
{
    (void)number;
    return submit_result;
}

PLAIN_TEST(m11_what_cannot_be_sent_waits_or_fails)
{
    static const int waits[] = {COX_FULL, COX_LATE};
    static const struct {
        int result;
        enum cox_pull_state state;
        bool own_death;
    } fails[] = {{COX_PEER_DEAD, COX_PULL_PEER_DEAD, true},
                 {COX_STALE, COX_PULL_FAILED, true},
                 {COX_TOO_LARGE, COX_PULL_FAILED, false},
                 {COX_CLOSED, COX_PULL_FAILED, false}};
    for (size_t i = 0; i < sizeof waits / sizeof waits[0]; i++) {
        struct fixture *f = fixture_new();
        submit_result = waits[i];
        f->executor->script.pull_submit = refuse;
        begin(f, 1);
        cox_transfers_turn(f->transfers);
        cox_transfers_turn(f->transfers);
        assert_int_equal(f->executor->pull_count, 1); /* not again at once */
        expect_none(f);
        assert_true(cox_transfers_due_ns(f->transfers) <= cox_now_ns() + 50 * COX_NSEC_PER_MSEC);
        submit_result = 0;
        while (f->executor->held_count == 0)
            cox_transfers_turn(f->transfers);
        struct fixture_pull pull = sent(f, "other.1.1");
        executor_complete_pull(f->executor, &pull, 0, COX_OUTCOME_OK, 0, 0);
        expect_end(f, 1, COX_PULL_SUCCESS, 0, true);
        /* A pull that never finds room ends at its deadline, and nothing was written. */
        submit_result = waits[i];
        begin_with(f, 2, cox_now_ns() + 1000000, 0);
        while (status(f).running)
            cox_transfers_turn(f->transfers);
        expect_end(f, 2, COX_PULL_TIMEOUT, COX_TIMEOUT, true);
    }
    for (size_t i = 0; i < sizeof fails / sizeof fails[0]; i++) {
        struct fixture *f = fixture_new();
        struct cox_pull_outcome outcome;
        submit_result = fails[i].result;
        f->executor->script.pull_submit = refuse;
        begin(f, 1);
        begin(f, 2);
        cox_transfers_turn(f->transfers);
        for (int k = 0; k < 2; k++) {
            assert_int_equal(cox_transfers_take(f->transfers, &outcome), 0);
            assert_int_equal(outcome.report->state, fails[i].state);
            assert_int_equal(outcome.report->error.code, fails[i].result);
            assert_int_equal(outcome.own_death, fails[i].own_death);
            assert_true(outcome.drained);
            free(outcome.report);
        }
    }
}

static int too_large_for_two(uint64_t number)
{
    return number == 1 ? COX_TOO_LARGE : 0;
}

FIXTURE_TEST(m11_a_batch_that_is_too_large_goes_in_parts)
{
    f->executor->script.pull_submit = too_large_for_two;
    for (int64_t sequence = 1; sequence <= 4; sequence++)
        begin(f, sequence);
    struct fixture_pull pull = sent(f, "other.1.1");
    assert_int_equal(pull.count, 2);
    executor_complete_pull(f->executor, &pull, 0, COX_OUTCOME_OK, 0, 0);
    pull = sent(f, "other.3.1");
    assert_int_equal(pull.count, 2);
    executor_complete_pull(f->executor, &pull, 0, COX_OUTCOME_OK, 0, 0);
    for (int64_t sequence = 1; sequence <= 4; sequence++)
        expect_end(f, sequence, COX_PULL_SUCCESS, 0, true);
}

static void count_blocks(void *context, const int32_t *blocks, uint32_t count)
{
    (void)blocks;
    *(uint32_t *)context += count;
}

FIXTURE_TEST(p9_a_new_engine_loop_finds_the_blocks_that_are_still_written)
{
    uint32_t count = 0;
    begin(f, 1);
    struct fixture_pull first = sent(f, NULL);
    begin(f, 2);
    struct fixture_pull second = sent(f, NULL);
    begin_with(f, 3, COX_DEADLINE_NEVER, COX_DEADLINE_NEVER);
    executor_complete_pull(f->executor, &second, 0, COX_OUTCOME_OK, 0, 0);
    cox_transfers_abandon(f->transfers);
    expect_none(f);
    cox_transfers_quarantine(f->transfers, count_blocks, &count);
    assert_int_equal(count, 3); /* of the first alone */
    executor_complete_pull(f->executor, &first, 0, COX_OUTCOME_OK, 0, 0);
    expect_drained(f, 3);
}

FIXTURE_TEST(p9_blocks_drained_before_the_check_are_not_released_twice)
{
    uint32_t count = 0;
    begin(f, 1);
    struct fixture_pull pull = sent(f, NULL);
    cox_transfers_abandon(f->transfers);
    /* The response thread comes in between. */
    executor_complete_pull(f->executor, &pull, 0, COX_OUTCOME_OK, 0, 0);
    cox_transfers_quarantine(f->transfers, count_blocks, &count);
    assert_int_equal(count, 0);
    expect_not_drained(f);
}

/* ---- at random ---- */

#define RANDOM_COUNT 4000
/* Not more than the executor holds requests. */
#define RANDOM_LIVE_MAX 24

/* What has become of each pull, at the number of its sequence. */
struct fate {
    bool cancelled;
    /* its blocks are still written, as quarantine tells */
    bool awaited;
    uint8_t ended, returned;
};

struct chance {
    struct fixture *f;
    /* of the test's thread */
    uint64_t seed;
    struct fate fates[RANDOM_COUNT + 1];
    int64_t started;
    uint32_t returned_count;
    /* under the executor's lock */
    bool stop;
};

static uint32_t draw(uint64_t *seed, uint32_t count)
{
    *seed = *seed * UINT64_C(6364136223846793005) + 1442695040888963407;
    return (uint32_t)(*seed >> 33) % count;
}

/* Lets the other thread go on, for less than 200 us. Beside busy programs a sleep costs that, and a
 * yield what all of them run for. */
static void pause_at_random(uint64_t *seed)
{
    nanosleep(&(struct timespec){.tv_nsec = 1000 * (long)draw(seed, 200)}, NULL);
}

static uint64_t refusal_seed = 5;

static int refuse_at_random(uint64_t number)
{
    static const int results[] = {COX_FULL,      COX_LATE,  COX_TOO_LARGE,
                                  COX_PEER_DEAD, COX_STALE, COX_CLOSED};
    (void)number;
    const uint32_t way = draw(&refusal_seed, 100);
    return way < 6 ? results[way] : 0;
}

static void late_set(struct fixture *f, bool late)
{
    pthread_mutex_lock(&f->executor->lock);
    f->executor->late = late;
    pthread_mutex_unlock(&f->executor->lock);
}

/* The response thread: what the ranks say comes whenever it likes. */
static void *completer_main(void *argument)
{
    struct chance *chance = argument;
    struct fixture *f = chance->f;
    uint64_t seed = 17;
    for (;;) {
        pthread_mutex_lock(&f->executor->lock);
        while (f->executor->held_count == 0 && !chance->stop)
            pthread_cond_wait(&f->executor->wake, &f->executor->lock);
        const bool any = f->executor->held_count > 0;
        pthread_mutex_unlock(&f->executor->lock);
        if (!any)
            return NULL;
        if (draw(&seed, 3) == 0)
            pause_at_random(&seed);
        struct fixture_pull pull = executor_await_pull(f->executor);
        const uint32_t way = draw(&seed, 8);
        if (way == 0) {
            late_set(f, true);
            executor_complete_pull(f->executor, &pull, COX_TIMEOUT, COX_OUTCOME_LATE, 0, 0);
        } else if (way == 1) {
            executor_complete_pull(f->executor, &pull, COX_PEER_DEAD, COX_OUTCOME_DEAD, 0, 0);
        } else if (way < 4) {
            executor_complete_pull(f->executor, &pull, 0, COX_OUTCOME_OK, PULL_ERROR, COX_STALE);
        } else {
            executor_complete_pull(f->executor, &pull, 0, COX_OUTCOME_OK, 0, 0);
        }
    }
}

static void blocks_return(struct chance *chance, int64_t sequence)
{
    assert_in_range(sequence, 1, chance->started);
    if (chance->fates[sequence].returned++)
        fail_msg("the blocks of pull %d are given back twice", (int)sequence);
    assert_true(chance->fates[sequence].ended || chance->fates[sequence].cancelled);
    chance->returned_count++;
}

static void take_all(struct chance *chance)
{
    struct cox_pull_outcome outcome;
    int32_t *blocks;
    uint32_t count;
    while (cox_transfers_take_drained(chance->f->transfers, &blocks, &count) == 0) {
        blocks_return(chance, blocks[0] / 3);
        free(blocks);
    }
    while (cox_transfers_take(chance->f->transfers, &outcome) == 0) {
        struct fate *fate = &chance->fates[outcome.sequence];
        if (fate->ended++ || fate->cancelled)
            fail_msg("pull %d ends again: %s", (int)outcome.sequence,
                     cox_pull_state_name(outcome.report->state));
        assert_true(cox_pull_has_ended(outcome.report->state));
        assert_true(outcome.drained || outcome.report->state != COX_PULL_SUCCESS);
        if (outcome.drained)
            blocks_return(chance, outcome.sequence);
        free(outcome.report);
    }
}

static void cancel_one(struct chance *chance)
{
    const uint32_t span =
        chance->started < RANDOM_LIVE_MAX ? (uint32_t)chance->started : RANDOM_LIVE_MAX;
    const int64_t sequence = chance->started - (int64_t)draw(&chance->seed, span + 1);
    struct fate *fate = &chance->fates[sequence];
    if (sequence < 1 || fate->ended || fate->cancelled)
        return;
    fate->cancelled = true;
    if (cox_transfers_cancel(chance->f->transfers, sequence))
        blocks_return(chance, sequence);
}

static void on_awaited(void *context, const int32_t *blocks, uint32_t count)
{
    struct chance *chance = context;
    assert_int_equal(count, 3);
    chance->fates[blocks[0] / 3].awaited = true;
}

/* Another engine loop: all blocks are its own, except those that it must keep apart. */
static void begin_anew(struct chance *chance)
{
    cox_transfers_abandon(chance->f->transfers);
    pause_at_random(&chance->seed); /* ranks reply in between */
    for (int64_t i = 1; i <= chance->started; i++)
        chance->fates[i].awaited = false;
    cox_transfers_quarantine(chance->f->transfers, on_awaited, chance);
    for (int64_t i = 1; i <= chance->started; i++) {
        struct fate *fate = &chance->fates[i];
        fate->cancelled = fate->cancelled || !fate->ended;
        assert_false(fate->awaited && fate->returned);
        if (!fate->awaited && !fate->returned)
            blocks_return(chance, i);
    }
}

/* What disturbs comes with the pulls, and not with the time that they take. */
static void start_one(struct chance *chance)
{
    const uint32_t way = draw(&chance->seed, 100);
    if (chance->started == RANDOM_COUNT ||
        (uint64_t)chance->started - chance->returned_count >= RANDOM_LIVE_MAX)
        return;
    chance->started++;
    /* Some never find room, and some wait a little. */
    begin_with(chance->f, chance->started, way < 2 ? cox_now_ns() + 1000 : COX_DEADLINE_NEVER,
               way == 2 ? cox_now_ns() + 1000000 : 0);
    if (way >= 80)
        cancel_one(chance);
    else if (way == 79)
        begin_anew(chance);
}

static void do_something(struct chance *chance)
{
    switch (draw(&chance->seed, 8)) {
    case 0:
    case 1:
    case 2:
        start_one(chance);
        break;
    case 3:
        late_set(chance->f, false);
        break;
    case 4:
        take_all(chance);
        break;
    case 5:
        pause_at_random(&chance->seed);
        break;
    default:
        cox_transfers_turn(chance->f->transfers);
    }
}

/* Whatever comes in between, each pull ends once, and its blocks are released once, when nothing
 * writes to them. */
FIXTURE_TEST(p9_m11_at_random_each_pull_ends_once_and_gives_its_blocks_back_once)
{
    static struct chance chance;
    f->executor->script.pull_submit = refuse_at_random;
    chance = (struct chance){.f = f, .seed = 3};
    pthread_t thread = test_thread(completer_main, &chance);
    const uint64_t until_ns = cox_deadline_after_ms(60000);
    while (chance.returned_count < RANDOM_COUNT && cox_now_ns() < until_ns)
        do_something(&chance);
    pthread_mutex_lock(&f->executor->lock);
    chance.stop = true;
    pthread_cond_broadcast(&f->executor->wake);
    pthread_mutex_unlock(&f->executor->lock);
    assert_int_equal(pthread_join(thread, NULL), 0);
    uint32_t ended = 0, cancelled = 0;
    for (int64_t i = 1; i <= RANDOM_COUNT; i++) {
        const struct fate *fate = &chance.fates[i];
        if (fate->returned != 1 || fate->ended + fate->cancelled != 1)
            fail_msg("pull %d ended %d times, was %scancelled, its blocks came %d times", (int)i,
                     fate->ended, fate->cancelled ? "" : "not ", fate->returned);
        ended += fate->ended;
        cancelled += fate->cancelled;
    }
    const struct cox_transfers_status now = status(f);
    assert_int_equal(now.running, 0);
    assert_int_equal(now.quarantined_blocks, 0);
    assert_int_equal(now.succeeded + now.failed + now.cancelled, RANDOM_COUNT);
    print_message(
        "%u taken, %u cancelled; %llu succeeded, %llu failed, %llu cancelled, %llu late\n", ended,
        cancelled, (unsigned long long)now.succeeded, (unsigned long long)now.failed,
        (unsigned long long)now.cancelled, (unsigned long long)now.late_results);
    /* It was not all of one kind. */
    assert_true(ended > 500 && cancelled > 200);
    assert_true(now.succeeded > 500 && now.failed > 500 && now.cancelled > 50 &&
                now.late_results > 10);
}
