#include "await_token.h"
#include "channel/attach/named/semaphore_gate.h"

#include "channel_fixture.h"

#define GROUP test_name("g")

static struct cox_geometry geometry_of(uint32_t rank_count, uint32_t depth)
{
    const struct cox_geometry_choice choice = {.depth = depth};
    struct cox_geometry geometry;
    assert_int_equal(cox_geometry_resolve(rank_count, &choice, &geometry, NULL), 0);
    return geometry;
}

static struct cox_gate created(enum cox_channel_id channel, uint32_t rank_count, uint32_t depth)
{
    struct cox_geometry geometry = geometry_of(rank_count, depth);
    struct cox_gate gate = {0};
    assert_ok(cox_gate_create_semaphores(&gate, GROUP, channel, &geometry, test_err()));
    return gate;
}

static void unlink_wakeups(enum cox_channel_id channel, uint32_t rank_count)
{
    char object[COX_OBJECT_NAME_SIZE];
    for (uint32_t rank = 0; rank < rank_count; rank++)
        for (int b = 0; b < COX_WAKEUP_COUNT; b++)
            assert_int_equal(cox_semaphore_unlink(
                                 cox_name_wakeup(object, GROUP, channel, (enum cox_wakeup)b, rank)),
                             0);
}

static void gone(struct cox_gate *gate, enum cox_channel_id channel, uint32_t rank_count)
{
    unlink_wakeups(channel, rank_count);
    cox_gate_close(gate);
    cox_gate_close(gate);
}

/* The count as any process sees it. */
static int count_of(enum cox_channel_id channel, enum cox_wakeup wakeup, uint32_t rank)
{
    char object[COX_OBJECT_NAME_SIZE];
    struct cox_semaphore semaphore = {0};
    int value = -1;
    assert_int_equal(cox_semaphore_attach(
                         &semaphore, cox_name_wakeup(object, GROUP, channel, wakeup, rank), NULL),
                     0);
    sem_getvalue(semaphore.sem, &value);
    cox_semaphore_detach(&semaphore);
    return value;
}

LEAK_TEST(produce_starts_at_depth_and_consume_at_none)
{
    for (uint32_t depth = 1; depth <= 8; depth += 3)
        for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
            enum cox_channel_id channel = (enum cox_channel_id)c;
            struct cox_gate gate = created(channel, 3, depth);
            assert_int_equal(shm_count("sem."), 3 * COX_WAKEUP_COUNT);
            for (uint32_t rank = 0; rank < 3; rank++) {
                assert_int_equal(count_of(channel, COX_WAKEUP_REQUEST_PRODUCE, rank), depth);
                assert_int_equal(count_of(channel, COX_WAKEUP_REQUEST_CONSUME, rank), 0);
                assert_int_equal(count_of(channel, COX_WAKEUP_RESPONSE_PRODUCE, rank), depth);
                assert_int_equal(count_of(channel, COX_WAKEUP_RESPONSE_CONSUME, rank), 0);
            }
            gone(&gate, channel, 3);
        }
}

LEAK_TEST(the_error_channel_has_one_pair_for_all_ranks)
{
    struct cox_gate gate = created(COX_CHANNEL_ERROR, 5, 4), rank4 = {0};
    assert_int_equal(shm_count("sem."), 2);
    assert_int_equal(count_of(COX_CHANNEL_ERROR, COX_WAKEUP_RESPONSE_PRODUCE, 0), 1);
    assert_int_equal(count_of(COX_CHANNEL_ERROR, COX_WAKEUP_RESPONSE_CONSUME, 0), 0);
    assert_int_equal(cox_gate_attach_semaphores(&rank4, GROUP, NULL, COX_CHANNEL_ERROR, 4, NULL),
                     0);
    assert_true(cox_gate_take(&rank4, 0, COX_WAKEUP_RESPONSE_PRODUCE));
    cox_gate_post(&rank4, 0, COX_WAKEUP_RESPONSE_CONSUME);
    assert_int_equal(
        cox_gate_wait(&gate, 0, COX_WAKEUP_RESPONSE_CONSUME, 0, cox_deadline_after_ms(10000)), 0);
    cox_gate_close(&rank4);
    gone(&gate, COX_CHANNEL_ERROR, 1);
}

LEAK_TEST(each_rank_attaches_its_own_four)
{
    struct cox_gate gate = created(COX_CHANNEL_EXECUTE, 4, 1), ranks[4];
    for (uint32_t rank = 0; rank < 4; rank++)
        assert_int_equal(
            cox_gate_attach_semaphores(&ranks[rank], GROUP, NULL, COX_CHANNEL_EXECUTE, rank, NULL),
            0);
    for (uint32_t asked = 0; asked < 4; asked++) {
        struct cox_rank_set set = {{0}};
        cox_rank_set_add(&set, asked);
        cox_gate_open(&gate, &set);
        for (uint32_t rank = 0; rank < 4; rank++)
            assert_int_equal(cox_gate_take(&ranks[rank], rank, COX_WAKEUP_REQUEST_CONSUME),
                             rank == asked);
        cox_gate_post(&ranks[asked], asked, COX_WAKEUP_RESPONSE_CONSUME);
        for (uint32_t rank = 0; rank < 4; rank++)
            assert_int_equal(cox_gate_take(&gate, rank, COX_WAKEUP_RESPONSE_CONSUME),
                             rank == asked);
    }
    for (uint32_t rank = 0; rank < 4; rank++)
        cox_gate_close(&ranks[rank]);
    gone(&gate, COX_CHANNEL_EXECUTE, 4);
}

LEAK_TEST(attaching_says_which_semaphore_is_missing)
{
    struct cox_gate gate = created(COX_CHANNEL_LINK, 2, 1), rank = {0};
    char object[COX_OBJECT_NAME_SIZE], path[COX_OBJECT_NAME_SIZE + 32];
    for (int b = 0; b < COX_WAKEUP_COUNT; b++) {
        cox_name_wakeup(object, GROUP, COX_CHANNEL_LINK, (enum cox_wakeup)b, 1);
        snprintf(path, sizeof path, SHM "/sem.%s", object + 1);
        assert_int_equal(chmod(path, 0640), 0);
        assert_refused(
            cox_gate_attach_semaphores(&rank, GROUP, NULL, COX_CHANNEL_LINK, 1, test_err()),
            COX_DENIED, object);
        assert_int_equal(chmod(path, 0600), 0);
    }
    for (int b = COX_WAKEUP_COUNT - 1; b >= 0; b--) {
        cox_name_wakeup(object, GROUP, COX_CHANNEL_LINK, (enum cox_wakeup)b, 1);
        assert_int_equal(cox_semaphore_unlink(object), 0);
        assert_refused(
            cox_gate_attach_semaphores(&rank, GROUP, NULL, COX_CHANNEL_LINK, 1, test_err()),
            COX_NOT_FOUND, object);
    }
    assert_null(rank.wakeups);
    assert_int_equal(cox_gate_attach_semaphores(&rank, GROUP, NULL, COX_CHANNEL_LINK, 2, NULL),
                     COX_NOT_FOUND);
    gone(&gate, COX_CHANNEL_LINK, 2);
}

LEAK_TEST(a_name_in_the_way_leaves_only_itself)
{
    struct cox_geometry geometry = geometry_of(3, 2);
    struct cox_gate gate = {0};
    struct cox_semaphore stale = {0};
    char object[COX_OBJECT_NAME_SIZE];
    cox_name_wakeup(object, GROUP, COX_CHANNEL_TRANSFER, COX_WAKEUP_RESPONSE_PRODUCE, 1);
    assert_int_equal(cox_semaphore_create(&stale, object, 5, NULL), 0);
    assert_refused(
        cox_gate_create_semaphores(&gate, GROUP, COX_CHANNEL_TRANSFER, &geometry, test_err()),
        COX_TAKEN, object);
    assert_null(gate.wakeups);
    assert_int_equal(shm_count("sem."), 1);
    assert_int_equal(count_of(COX_CHANNEL_TRANSFER, COX_WAKEUP_RESPONSE_PRODUCE, 1), 5);
    cox_semaphore_detach(&stale);
    unlink_wakeups(COX_CHANNEL_TRANSFER, 3);
}

LEAK_TEST(b49_a_gate_works_on_without_its_names)
{
    struct cox_gate gate = created(COX_CHANNEL_EXECUTE, 2, 1), rank = {0};
    assert_int_equal(cox_gate_attach_semaphores(&rank, GROUP, NULL, COX_CHANNEL_EXECUTE, 1, NULL),
                     0);
    unlink_wakeups(COX_CHANNEL_EXECUTE, 2);
    assert_int_equal(shm_count(NULL), 0);
    for (int i = 0; i < 100; i++) {
        cox_gate_post(&gate, 1, COX_WAKEUP_REQUEST_CONSUME);
        assert_int_equal(
            cox_gate_wait(&rank, 1, COX_WAKEUP_REQUEST_CONSUME, 0, cox_deadline_after_ms(10000)),
            0);
        cox_gate_post(&rank, 1, COX_WAKEUP_RESPONSE_CONSUME);
        assert_int_equal(
            cox_gate_wait(&gate, 1, COX_WAKEUP_RESPONSE_CONSUME, 0, cox_deadline_after_ms(10000)),
            0);
    }
    cox_gate_close(&rank);
    cox_gate_close(&gate);
}

LEAK_TEST(waiting_ends_by_its_deadline)
{
    struct cox_gate gate = created(COX_CHANNEL_EXECUTE, 1, 1);
    uint64_t deadline = cox_deadline_after_ms(10);
    assert_int_equal(cox_gate_wait(&gate, 0, COX_WAKEUP_REQUEST_CONSUME, 0, deadline), COX_TIMEOUT);
    assert_true(cox_now_ns() >= deadline);
    assert_int_equal(cox_gate_wait(&gate, 0, COX_WAKEUP_REQUEST_PRODUCE, 0, 0),
                     0); /* one frame is free */
    assert_int_equal(cox_gate_wait(&gate, 0, COX_WAKEUP_REQUEST_PRODUCE, 0, 0), COX_TIMEOUT);
    gone(&gate, COX_CHANNEL_EXECUTE, 1);
}

/* ---- accounting ---- */

static int wakeup_count(const struct cox_semaphore *wakeup)
{
    int value = -1;
    sem_getvalue(wakeup->sem, &value);
    return value;
}

/* A waiter that slept absorbs without a token, one that did not sleep takes one, and one that was
 * faster than the post takes it later. */
LEAK_TEST(settling_matches_every_token_once)
{
    enum cox_wakeup b = COX_WAKEUP_RESPONSE_CONSUME;
    struct cox_gate gate = created(COX_CHANNEL_EXECUTE, 1, 1);
    struct cox_semaphore wakeup = {0};
    char object[COX_OBJECT_NAME_SIZE];
    assert_int_equal(cox_semaphore_attach(
                         &wakeup, cox_name_wakeup(object, GROUP, COX_CHANNEL_EXECUTE, b, 0), NULL),
                     0);
    /* Posts, waits that find a token, and absorbs; then so many tokens are left. */
    static const struct {
        const char *calls;
        int left;
    } steps[] = {
        {"pwa", 0},   {"p", 1},               /* nothing was owed: the next event's token stays */
        {"wa", 0},    {"pa", 0}, {"appa", 0}, /* the debt is paid with the next event */
        {"apwpa", 0},                         /* the wake-up was spurious and is counted */
        {"ppwa", 1},                          /* two events, one sleep */
        {"a", 0},
    };
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        for (const char *call = steps[i].calls; *call; call++)
            if (*call == 'p')
                cox_gate_post(&gate, 0, b);
            else if (*call == 'a')
                cox_gate_absorb(&gate, 0, b);
            else
                assert_int_equal(cox_gate_wait(&gate, 0, b, 0, 0), 0);
        if (wakeup_count(&wakeup) != steps[i].left)
            fail_msg("after %s: %d", steps[i].calls, wakeup_count(&wakeup));
    }
    cox_semaphore_detach(&wakeup);
    gone(&gate, COX_CHANNEL_EXECUTE, 1);
}

/* Events happen, are posted a little later, and are absorbed once seen; waits come at any time.
 * However these mix: right after an absorb no token is left beyond those of events that are posted
 * and not absorbed, and a waiter that is owed nothing finds a token for the next event. */
LEAK_TEST(counts_do_not_drift_over_any_interleaving)
{
    enum cox_wakeup b = COX_WAKEUP_RESPONSE_CONSUME;
    char object[COX_OBJECT_NAME_SIZE];
    for (uint64_t seed = 1; seed <= 8; seed++) {
        struct cox_gate gate = created(COX_CHANNEL_EXECUTE, 1, 1);
        struct cox_semaphore wakeup = {0};
        assert_int_equal(
            cox_semaphore_attach(&wakeup, cox_name_wakeup(object, GROUP, COX_CHANNEL_EXECUTE, b, 0),
                                 NULL),
            0);
        uint64_t random = seed * 0x9e3779b97f4a7c15u, happened = 0, posted = 0, settled = 0;
        const uint64_t bias = seed % 4; /* which of the three comes more often */
        while (settled < 100000) {
            uint64_t dice = random_next(&random) >> 33;
            uint64_t what = dice % 8 < 3 ? bias : dice % 4;
            if (what == 0 && happened - settled < 8 && happened - posted < 8) {
                happened++;
            } else if (what == 1 && posted < happened) {
                posted++;
                cox_gate_post(&gate, 0, b);
            } else if (what == 2 && settled < happened) {
                settled++;
                cox_gate_absorb(&gate, 0, b);
                int left = wakeup_count(&wakeup);
                assert_true(left == 0 || (posted > settled && (uint64_t)left <= posted - settled));
            } else if (what == 3) {
                bool there = wakeup_count(&wakeup) > 0;
                if (!there &&
                    dice % 1024 >= 16) /* an empty wait costs a system call and changes nothing */
                    continue;
                assert_int_equal(cox_gate_wait(&gate, 0, b, 0, 0), there ? 0 : COX_TIMEOUT);
            }
            assert_true(wakeup_count(&wakeup) <= 16);
        }
        happened++; /* one more, so that debts of the last are paid */
        for (; posted < happened; posted++)
            cox_gate_post(&gate, 0, b);
        for (; settled < happened; settled++)
            cox_gate_absorb(&gate, 0, b);
        assert_int_equal(wakeup_count(&wakeup), 0);
        cox_gate_post(&gate, 0, b);
        assert_int_equal(cox_gate_wait(&gate, 0, b, 0, 0), 0);
        cox_semaphore_detach(&wakeup);
        gone(&gate, COX_CHANNEL_EXECUTE, 1);
    }
}

struct duet {
    struct cox_gate coordinator, rank;
    _Atomic uint64_t events;
    uint64_t rounds;
};

static void *play_rank(void *context)
{
    struct duet *duet = context;
    for (uint64_t i = 0; i < duet->rounds; i++) {
        atomic_fetch_add_explicit(&duet->events, 1, memory_order_release);
        cox_gate_post(&duet->rank, 0, COX_WAKEUP_RESPONSE_CONSUME);
        if (await_token(&duet->rank, 0, COX_WAKEUP_REQUEST_CONSUME))
            return (void *)1;
    }
    return NULL;
}

/* The collector's loop: look at the events, sleep only when it shows nothing new. */
LEAK_TEST(no_wake_up_is_lost_between_state_and_sleep)
{
    struct duet duet = {.coordinator = created(COX_CHANNEL_EXECUTE, 1, 1), .rounds = 20000};
    uint64_t seen = 0;
    void *result;
    assert_int_equal(
        cox_gate_attach_semaphores(&duet.rank, GROUP, NULL, COX_CHANNEL_EXECUTE, 0, NULL), 0);
    pthread_t thread = test_thread(play_rank, &duet);
    while (seen < duet.rounds) {
        if (atomic_load_explicit(&duet.events, memory_order_acquire) == seen) {
            assert_int_equal(await_token(&duet.coordinator, 0, COX_WAKEUP_RESPONSE_CONSUME), 0);
            continue;
        }
        seen++;
        cox_gate_absorb(&duet.coordinator, 0, COX_WAKEUP_RESPONSE_CONSUME);
        cox_gate_post(&duet.coordinator, 0, COX_WAKEUP_REQUEST_CONSUME);
    }
    pthread_join(thread, &result);
    assert_null(result);
    assert_true(count_of(COX_CHANNEL_EXECUTE, COX_WAKEUP_RESPONSE_CONSUME, 0) <= 1);
    assert_int_equal(count_of(COX_CHANNEL_EXECUTE, COX_WAKEUP_REQUEST_CONSUME, 0), 0);
    cox_gate_close(&duet.rank);
    gone(&duet.coordinator, COX_CHANNEL_EXECUTE, 1);
}

static void post_to_a_stranger(void *context)
{
    struct cox_gate *gate = context;
    cox_gate_post(gate, 2, COX_WAKEUP_REQUEST_CONSUME);
}

LEAK_TEST(a_rank_without_wakeups_is_a_programmer_error)
{
    struct cox_gate gate = created(COX_CHANNEL_EXECUTE, 2, 1);
    child_aborts(post_to_a_stranger, &gate);
    gone(&gate, COX_CHANNEL_EXECUTE, 2);
    child_aborts(post_to_a_stranger, &gate); /* closed: it has none */
}
