#include "await_token.h"

#include "channel_fixture.h"

static const char *object_path(void)
{
    static char path[600];
    snprintf(path, sizeof path, SHM "/sem.%s", test_name("a"));
    return path;
}

static struct cox_semaphore created(unsigned value)
{
    struct cox_semaphore semaphore = {0};
    assert_ok(cox_semaphore_create(&semaphore, test_object("a"), value, test_err()));
    return semaphore;
}

static void gone(struct cox_semaphore *semaphore)
{
    cox_semaphore_detach(semaphore);
    assert_null(semaphore->sem);
    cox_semaphore_detach(semaphore);
    assert_int_equal(cox_semaphore_unlink(test_object("a")), 0);
    assert_int_equal(cox_semaphore_unlink(test_object("a")), 0); /* already gone */
}

LEAK_TEST(tokens_are_taken_once_by_either_side)
{
    struct cox_semaphore own = created(2), other = {0};
    assert_int_equal(cox_semaphore_attach(&other, test_object("a"), NULL), 0);
    assert_ptr_not_equal(own.sem, other.sem);
    assert_true(cox_semaphore_take(&other));
    assert_true(cox_semaphore_take(&own));
    assert_false(cox_semaphore_take(&own));
    assert_false(cox_semaphore_take(&other));
    cox_semaphore_post(&own);
    assert_int_equal(cox_semaphore_wait(&other, cox_deadline_after_ms(10000)), 0);
    assert_false(cox_semaphore_take(&own));
    cox_semaphore_post(&other);
    assert_int_equal(cox_semaphore_wait(&own, COX_DEADLINE_NEVER), 0);
    cox_semaphore_detach(&other);
    gone(&own);
}

LEAK_TEST(a_name_that_is_gone_is_not_found)
{
    struct cox_semaphore own = created(1), other = {0};
    assert_int_equal(cox_semaphore_unlink(test_object("a")), 0);
    assert_refused(cox_semaphore_attach(&other, test_object("a"), test_err()), COX_NOT_FOUND,
                   test_object("a"));
    assert_null(other.sem);
    assert_true(cox_semaphore_take(&own)); /* the mapping works on */
    gone(&own);
}

/* ---- time ---- */

LEAK_TEST(b48_a_deadline_in_the_past_does_not_block)
{
    static const uint64_t past[] = {0, 1, COX_NSEC_PER_SEC};
    struct cox_semaphore own = created(0);
    alarm(20); /* ends a wait that blocks */
    for (size_t i = 0; i < sizeof past / sizeof past[0]; i++)
        assert_int_equal(cox_semaphore_wait(&own, past[i]), COX_TIMEOUT);
    assert_int_equal(cox_semaphore_wait(&own, cox_now_ns()), COX_TIMEOUT);
    /* A token that is there is taken however late it is. */
    for (size_t i = 0; i < sizeof past / sizeof past[0]; i++) {
        cox_semaphore_post(&own);
        assert_int_equal(cox_semaphore_wait(&own, past[i]), 0);
    }
    alarm(0);
    gone(&own);
}

LEAK_TEST(b48_a_wait_lasts_until_its_monotonic_deadline)
{
    struct cox_semaphore own = created(0);
    /* Read as CLOCK_REALTIME these lie decades back and would end at once. */
    for (uint64_t ms = 5; ms <= 40; ms += 5) {
        uint64_t deadline = cox_deadline_after_ms(ms) + ms * 111111;
        assert_int_equal(cox_semaphore_wait(&own, deadline), COX_TIMEOUT);
        assert_true(cox_now_ns() >= deadline);
    }
    gone(&own);
}

static void wait_for_20_ms(void *context)
{
    CHECK(cox_semaphore_wait(context, cox_deadline_after_ms(20)) == COX_TIMEOUT);
}

LEAK_TEST(b48_the_calendar_does_not_matter)
{
    struct cox_semaphore own = created(0);
    cox_semaphore_unlink(test_object("a")); /* it may be skipped */
    child_run_in_another_time(wait_for_20_ms, &own);
    gone(&own);
}

/* ---- signals ---- */

static volatile sig_atomic_t ticks;
static struct cox_semaphore *woken; /* posted by the handler at its 20th call */

static void on_tick(int number)
{
    (void)number;
    ticks = ticks + 1;
    if (woken && ticks == 20)
        cox_semaphore_post(woken);
}

LEAK_TEST(b47_a_storm_of_signals_ends_no_wait)
{
    ticks = 0;
    storm_begin(on_tick, 500);
    struct cox_semaphore own = created(0);
    uint64_t deadline = cox_deadline_after_ms(100);
    assert_int_equal(cox_semaphore_wait(&own, deadline), COX_TIMEOUT);
    assert_true(cox_now_ns() >= deadline);
    assert_true(ticks > 5);
    for (int never = 0; never < 2; never++) {
        ticks = 0;
        woken = &own;
        assert_int_equal(
            cox_semaphore_wait(&own, never ? COX_DEADLINE_NEVER : cox_deadline_after_ms(60000)), 0);
        assert_true(ticks >= 20);
        woken = NULL;
    }
    storm_end();
    gone(&own);
}

/* ---- two processes ---- */

static void attach_and_sleep(void *context)
{
    struct cox_semaphore semaphore = {0};
    (void)context;
    CHECK(cox_semaphore_attach(&semaphore, test_object("a"), NULL) == 0);
    CHECK(cox_semaphore_wait(&semaphore, cox_deadline_after_ms(20000)) == 0);
}

/* sem_init on a semaphore that is in use forgets its sleepers. */
LEAK_TEST(b42_a_sleeper_is_woken_after_others_attached)
{
    for (int round = 0; round < 5; round++) {
        struct cox_semaphore own = created(0), second = {0}, third = {0};
        pid_t pid = child_start(attach_and_sleep, NULL);
        child_asleep(pid);
        assert_int_equal(cox_semaphore_attach(&second, test_object("a"), NULL), 0);
        assert_int_equal(cox_semaphore_attach(&third, test_object("a"), NULL), 0);
        cox_semaphore_post(round % 2 ? &own : &third);
        child_join(pid);
        cox_semaphore_detach(&second);
        cox_semaphore_detach(&third);
        gone(&own);
    }
}

LEAK_TEST(b42_attaching_keeps_the_count)
{
    struct cox_semaphore own = created(5), other = {0};
    int value = -1;
    for (int i = 0; i < 3; i++) {
        assert_int_equal(cox_semaphore_attach(&other, test_object("a"), NULL), 0);
        assert_int_equal(sem_getvalue(other.sem, &value), 0);
        assert_int_equal(value, 5);
        cox_semaphore_detach(&other);
    }
    gone(&own);
}

static void wait_for_tokens(void *context)
{
    struct cox_semaphore here = {0}, there = {0};
    (void)context;
    CHECK(cox_semaphore_attach(&here, test_object("a"), NULL) == 0);
    CHECK(cox_semaphore_attach(&there, test_object("b"), NULL) == 0);
    for (int i = 0; i < 2000; i++) {
        CHECK(await_semaphore(&here) == 0);
        cox_semaphore_post(&there);
    }
}

/* This process and a child. */
static void wake_each_other(void (*other_side)(void *context))
{
    struct cox_semaphore own = created(0), reply = {0};
    assert_int_equal(cox_semaphore_create(&reply, test_object("b"), 0, NULL), 0);
    pid_t pid = child_start(other_side, NULL);
    for (int i = 0; i < 2000; i++) {
        if (i % 100 == 0) /* each side sleeps at times and is awake at times */
            child_asleep(pid);
        cox_semaphore_post(&own);
        assert_int_equal(await_semaphore(&reply), 0);
    }
    child_join(pid);
    /* Neither a token nor a sleeper is left in the words. */
    assert_true(atomic_load(cox_semaphore_words(&own)) == 0);
    assert_true(atomic_load(cox_semaphore_words(&reply)) == 0);
    cox_semaphore_detach(&reply);
    assert_int_equal(cox_semaphore_unlink(test_object("b")), 0);
    gone(&own);
}

LEAK_TEST(two_processes_wake_each_other)
{
    wake_each_other(wait_for_tokens);
}

/* ---- glibc's own functions on the other side ---- */

static void reply_with_glibc(void *context)
{
    struct cox_semaphore here = {0}, there = {0};
    (void)context;
    CHECK(cox_semaphore_attach(&here, test_object("a"), NULL) == 0);
    CHECK(cox_semaphore_attach(&there, test_object("b"), NULL) == 0);
    alarm(60);
    for (int i = 0; i < 2000; i++) {
        while (sem_wait(here.sem) < 0)
            CHECK(errno == EINTR);
        CHECK(sem_post(there.sem) == 0);
    }
}

LEAK_TEST(g2a_glibc_and_this_wake_each_other)
{
    wake_each_other(reply_with_glibc);
}

/* ---- overwritten words ---- */

static void fill(struct cox_semaphore *semaphore, unsigned kind, unsigned byte, uint64_t *random)
{
    uint8_t bytes[sizeof(sem_t)];
    memcpy(bytes, semaphore->sem, sizeof bytes);
    for (size_t i = 0; i < sizeof bytes; i++) {
        *random = *random * UINT64_C(6364136223846793005) + 1442695040888963407;
        if (kind < 2)
            bytes[i] = kind ? 0xff : 0;
        else if (kind == 2 || i == byte % sizeof bytes)
            bytes[i] = (uint8_t)(*random >> 56);
    }
    memcpy(semaphore->sem, bytes, sizeof bytes);
}

/* glibc ends a process that waits, or posts, with another number in the third word. */
static void use_garbage(void *context)
{
    struct cox_semaphore own = created(0);
    uint64_t random = 7;
    (void)context;
    alarm(60);
    for (unsigned i = 0; i < 400; i++) {
        fill(&own, i % 4, i / 4, &random);
        cox_semaphore_post(&own);
        fill(&own, i % 4, i / 4, &random);
        cox_semaphore_wake(&own);
        fill(&own, i % 4, i / 4, &random);
        int r = cox_semaphore_wait(&own, cox_deadline_after_ms(1));
        CHECK(r == 0 || r == COX_TIMEOUT || r == COX_EMPTY);
        /* However much was there: soon there is nothing. */
        for (unsigned n = 0; cox_semaphore_take(&own); n++)
            CHECK(n <= COX_SEMAPHORE_COUNT_MAX);
        CHECK(cox_semaphore_wait(&own, cox_deadline_after_ms(1)) == COX_TIMEOUT);
    }
    gone(&own);
}

LEAK_TEST(g2a_garbage_in_the_words_ends_no_process)
{
    child_run(use_garbage, NULL);
}

static void wait_and_tell(void *context)
{
    struct cox_semaphore semaphore = {0};
    CHECK(cox_semaphore_attach(&semaphore, test_object("a"), NULL) == 0);
    CHECK(cox_semaphore_wait(&semaphore, COX_DEADLINE_NEVER) == *(const int *)context);
}

/* A sleeper that the words no longer count, or which finds no token when it wakes up. */
LEAK_TEST(g2a_a_wake_up_gets_through_whatever_the_words_say)
{
    static int expected[] = {0, COX_EMPTY};
    struct cox_semaphore own = created(0);
    for (size_t i = 0; i < 2; i++) {
        pid_t pid = child_start(wait_and_tell, &expected[i]);
        child_asleep(pid);
        atomic_store(cox_semaphore_words(&own), 0);
        if (expected[i] == 0)
            cox_semaphore_wake(&own);
        else
            cox_futex_wake(cox_semaphore_count(&own));
        child_join(pid);
        assert_true(atomic_load(cox_semaphore_words(&own)) == 0);
    }
    gone(&own);
}

/* ---- files ---- */

static void make_good(void)
{
    struct cox_semaphore semaphore = created(0);
    cox_semaphore_detach(&semaphore);
}

static int attach_and_detach(struct cox_error *err)
{
    struct cox_semaphore semaphore = {0};
    int r = cox_semaphore_attach(&semaphore, test_object("a"), err);
    assert_int_equal(semaphore.sem != NULL, r == 0);
    cox_semaphore_detach(&semaphore);
    return r;
}

LEAK_TEST(b44_another_size_is_denied)
{
    static const off_t sizes[] = {0, 1, sizeof(sem_t) - 1, sizeof(sem_t) + 1, 4096, 1 << 20};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        char expected[64];
        make_good();
        assert_int_equal(truncate(object_path(), sizes[i]), 0);
        snprintf(expected, sizeof expected, "%jd bytes, expected %zu", (intmax_t)sizes[i],
                 sizeof(sem_t));
        assert_refused(attach_and_detach(test_err()), COX_DENIED, expected);
        assert_int_equal(unlink(object_path()), 0);
    }
}

LEAK_TEST(a_count_at_its_maximum_takes_another_post)
{
    struct cox_semaphore own = created(SEM_VALUE_MAX);
    int value = 0;
    errno = EXFULL;
    cox_semaphore_post(&own);
    assert_int_equal(errno, EXFULL);
    sem_getvalue(own.sem, &value);
    assert_int_equal(value, SEM_VALUE_MAX);
    assert_true(cox_semaphore_take(&own));
    gone(&own);
}

LEAK_TEST(a_starting_value_over_the_maximum_is_refused)
{
    struct cox_semaphore semaphore = {0};
    struct cox_error err = {0};
    assert_int_equal(cox_semaphore_create(&semaphore, test_object("a"), SEM_VALUE_MAX + 1u, &err),
                     -EINVAL);
    assert_int_equal(err.code, -EINVAL);
    assert_null(semaphore.sem);
}

static void create_in_a_full_tmpfs(void *context)
{
    static char page[4096];
    struct cox_semaphore semaphore = {0};
    struct cox_error err = {0};
    (void)context;
    CHECK(private_shm("8k"));
    int fd = open(SHM "/filler", O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    CHECK(fd >= 0);
    while (write(fd, page, sizeof page) > 0)
        ;
    CHECK(errno == ENOSPC);
    CHECK(cox_semaphore_create(&semaphore, "/a", 0, &err) == -ENOSPC);
    CHECK(strstr(err.text, "/a: No space left"));
    CHECK(shm_count("a") == 0 && shm_count("sem") == 0);
}

LEAK_TEST(a_full_tmpfs_leaves_nothing_behind)
{
    if (!private_shm_possible())
        skip();
    child_run(create_in_a_full_tmpfs, NULL);
}
