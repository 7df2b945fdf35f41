/* Waiting on several queues, and the queue lock. */
#include "memory/queue/queue_internal.h"
#include "memory/queue/queue_lock.h"
#include "memory/queue/queue_set.h"
#include "queue_fixture.h"
#include "tests/lib/test.h"

#define QUEUE_COUNT 3
#define PATIENCE_MS 20000
/* Retries: a loaded machine may delay one try. */
#define TRIES 3

static struct cox_pool *host;
static struct cox_queue *queues[QUEUE_COUNT];
static struct cox_publisher *publishers[QUEUE_COUNT];
static struct cox_subscriber *subscribers[QUEUE_COUNT];
static struct cox_queue_set *set;

static int setup(void **state)
{
    (void)state;
    host = fixture_pool(NULL, COX_DOMAIN_HOST, 64);
    assert_int_equal(cox_queue_set_new(&set), 0);
    for (int i = 0; i < QUEUE_COUNT; i++) {
        queues[i] = fixture_queue(8);
        publishers[i] = fixture_publisher(queues[i], host, NULL, NULL);
        subscribers[i] = fixture_subscriber(queues[i], NULL, &host, 1, NULL, NULL);
        assert_int_equal(cox_queue_set_add(set, subscribers[i], NULL), 0);
    }
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    cox_queue_set_free(set);
    for (int i = 0; i < QUEUE_COUNT; i++) {
        cox_subscriber_free(subscribers[i]);
        cox_publisher_free(publishers[i]);
        cox_queue_free(queues[i]);
    }
    const uint32_t used = fixture_used(host);
    cox_pool_free(host);
    return used == 0 ? 0 : -1;
}

#define TEST(name) TEST_WITH(name, setup, teardown)

static void publish(int i, uint64_t user_data)
{
    assert_int_equal(fixture_publish(publishers[i], host, 100, user_data, NULL), 0);
}

static void take(struct cox_subscriber *subscriber, uint64_t user_data)
{
    struct cox_message message;
    assert_int_equal(cox_subscriber_take(subscriber, &message, NULL), 0);
    assert_int_equal(message.user_data, user_data);
    assert_true(fixture_is_sound(&message));
    fixture_let_go(&message);
}

static struct cox_subscriber *wait_ready(void)
{
    struct cox_subscriber *ready = NULL;
    assert_int_equal(cox_queue_set_wait(set, cox_deadline_after_ms(PATIENCE_MS), &ready), 0);
    return ready;
}

TEST(h14_wait_returns_which_queue_has_a_message)
{
    for (int i = QUEUE_COUNT - 1; i >= 0; i--) {
        publish(i, 50 + (uint64_t)i);
        struct cox_subscriber *ready = wait_ready();
        assert_ptr_equal(ready, subscribers[i]);
        take(ready, 50 + (uint64_t)i);
    }
}

TEST(h14_a_deadline_ends_the_wait)
{
    struct cox_subscriber *ready = NULL;
    assert_int_equal(cox_queue_set_wait(set, 0, &ready), COX_TIMEOUT);
    const uint64_t deadline_ns = cox_deadline_after_ms(30);
    assert_int_equal(cox_queue_set_wait(set, deadline_ns, &ready), COX_TIMEOUT);
    assert_true(cox_now_ns() >= deadline_ns);
    assert_null(ready);
    /* A present message is found also after the deadline. */
    publish(1, 1);
    assert_int_equal(cox_queue_set_wait(set, 0, &ready), 0);
    assert_ptr_equal(ready, subscribers[1]);
}

TEST(h14_each_queue_gets_its_turn)
{
    for (uint64_t user_data = 1; user_data <= 4; user_data++)
        for (int i = 0; i < QUEUE_COUNT; i++)
            publish(i, user_data);
    for (uint64_t user_data = 1; user_data <= 4; user_data++)
        for (int i = 0; i < QUEUE_COUNT; i++) {
            struct cox_subscriber *ready = wait_ready();
            assert_ptr_equal(ready, subscribers[i]);
            struct cox_message message;
            assert_int_equal(cox_subscriber_take(ready, &message, NULL), 0);
            fixture_let_go(&message);
            publish(0, user_data); /* a queue that always has a message */
        }
}

TEST(h14_membership_is_checked)
{
    struct cox_queue_set *other;
    struct cox_subscriber *ready;
    assert_int_equal(cox_queue_set_new(&other), 0);
    assert_int_equal(cox_queue_set_wait(other, COX_DEADLINE_NEVER, &ready), COX_EMPTY);
    assert_int_equal(cox_queue_set_add(other, subscribers[0], NULL), COX_BUSY);
    cox_queue_set_remove(set, subscribers[0]);
    assert_int_equal(cox_queue_set_add(other, subscribers[0], NULL), 0);
    publish(0, 1);
    assert_int_equal(cox_queue_set_wait(set, 0, &ready), COX_TIMEOUT);
    assert_int_equal(cox_queue_set_wait(other, 0, &ready), 0);
    struct cox_subscriber *many[64];
    for (int i = 0; i < 63; i++) {
        many[i] = fixture_subscriber(queues[i % QUEUE_COUNT], NULL, &host, 1, NULL, NULL);
        assert_int_equal(cox_queue_set_add(other, many[i], NULL), 0);
    }
    assert_int_equal(cox_queue_set_add(other, subscribers[1], NULL), COX_BUSY);
    cox_queue_set_remove(set, subscribers[1]);
    assert_refused(cox_queue_set_add(other, subscribers[1], test_err()), COX_FULL, "64");
    /* Blocks on all 64 futexes and that of the trigger. */
    take(subscribers[0], 1);
    assert_int_equal(cox_queue_set_wait(other, cox_deadline_after_ms(1), &ready), COX_TIMEOUT);
    cox_queue_set_free(other);
    for (int i = 0; i < 63; i++)
        cox_subscriber_free(many[i]);
}

/* ---- triggers ---- */

TEST(h14_each_trigger_ends_one_wait)
{
    struct cox_subscriber *ready = NULL;
    cox_queue_set_trigger(set);
    cox_queue_set_trigger(set);
    publish(0, 1);
    assert_int_equal(cox_queue_set_wait(set, COX_DEADLINE_NEVER, &ready), COX_ABORTED);
    assert_int_equal(cox_queue_set_wait(set, COX_DEADLINE_NEVER, &ready), COX_ABORTED);
    assert_int_equal(cox_queue_set_wait(set, COX_DEADLINE_NEVER, &ready), 0);
    assert_ptr_equal(ready, subscribers[0]);
}

static bool asleep(int i)
{
    return atomic_load(&cox_subscriber_line(subscribers[i])->subscriber_sleeping) == 1;
}

static void *thread_wait(void *result)
{
    struct cox_subscriber *ready = NULL;
    int r = cox_queue_set_wait(set, cox_deadline_after_ms(PATIENCE_MS), &ready);
    if (r == 0)
        *(struct cox_subscriber **)result = ready;
    return (void *)(intptr_t)r;
}

static void on_signal(int number)
{
    (void)number;
    cox_queue_set_trigger(set);
}

static int joined(pthread_t thread)
{
    void *r;
    assert_int_equal(pthread_join(thread, &r), 0);
    return (int)(intptr_t)r;
}

static void wake_a_sleeper(void)
{
    struct cox_subscriber *ready = NULL;
    pthread_t thread;
    for (int i = 0; i < QUEUE_COUNT; i++) {
        assert_int_equal(pthread_create(&thread, NULL, thread_wait, &ready), 0);
        AWAIT(asleep(0) && asleep(1) && asleep(2));
        publish(i, 3);
        assert_int_equal(joined(thread), 0);
        assert_ptr_equal(ready, subscribers[i]);
        take(ready, 3);
    }
    assert_int_equal(pthread_create(&thread, NULL, thread_wait, &ready), 0);
    AWAIT(asleep(0) && asleep(1) && asleep(2));
    cox_queue_set_trigger(set);
    assert_int_equal(joined(thread), COX_ABORTED);
    assert_int_equal(pthread_create(&thread, NULL, thread_wait, &ready), 0);
    AWAIT(asleep(0) && asleep(1) && asleep(2));
    assert_int_equal(raise(SIGUSR1), 0);
    assert_int_equal(joined(thread), COX_ABORTED);
}

TEST(h14_b36_a_sleeper_is_woken_by_any_of_its_queues_and_by_triggers)
{
    const struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    assert_int_equal(sigaction(SIGUSR1, &action, NULL), 0);
    wake_a_sleeper();
}

#if COX_TESTING
TEST(h14_a_kernel_that_sleeps_on_one_word_does_as_well)
{
    const struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    struct cox_subscriber *ready;
    assert_int_equal(sigaction(SIGUSR1, &action, NULL), 0);
    cox_queue_set_use_one_word(set);
    wake_a_sleeper();
    const uint64_t deadline_ns = cox_deadline_after_ms(35);
    assert_int_equal(cox_queue_set_wait(set, deadline_ns, &ready), COX_TIMEOUT);
    assert_true(cox_now_ns() >= deadline_ns);
}
#endif

/* Each waiter has its own futex: a wakeup reaches one waiter only, and takes none from others. */
TEST(b36_two_sleepers_of_one_queue_are_both_woken)
{
    struct cox_subscriber *other = fixture_subscriber(queues[0], NULL, &host, 1, NULL, NULL);
    struct cox_subscriber *ready = NULL, *of_other = NULL;
    struct cox_queue_set *second;
    assert_int_equal(cox_queue_set_new(&second), 0);
    assert_int_equal(cox_queue_set_add(second, other, NULL), 0);
    pthread_t thread = test_thread(thread_wait, &ready);
    AWAIT(asleep(0) && asleep(1) && asleep(2));
    publish(0, 9);
    /* Now, while the thread may not have checked yet. */
    assert_int_equal(cox_queue_set_wait(second, cox_deadline_after_ms(PATIENCE_MS), &of_other), 0);
    take(of_other, 9);
    assert_int_equal(joined(thread), 0);
    assert_ptr_equal(ready, subscribers[0]);
    take(ready, 9);
    cox_queue_set_free(second);
    cox_subscriber_free(other);
}

/* The process's count of voluntary context switches: every wakeup is one. */
TEST(h14_a_waiter_causes_no_wakeups)
{
    struct rusage before, after;
    struct cox_subscriber *ready;
    getrusage(RUSAGE_THREAD, &before);
    assert_int_equal(cox_queue_set_wait(set, cox_deadline_after_ms(300), &ready), COX_TIMEOUT);
    getrusage(RUSAGE_THREAD, &after);
    assert_true(after.ru_nvcsw - before.ru_nvcsw <= 2);
}

/* ---- the lock ---- */

static struct cox_queue_layout_lock *lock_share(void)
{
    struct cox_queue_layout_lock *lock = &queues[0]->layout->lock;
    assert_int_equal(atomic_load(&lock->lock_owner), 0);
    return lock;
}

static void lock_once(struct cox_queue_layout_lock *lock, bool expected_repair)
{
    uint64_t identity;
    bool repair;
    assert_int_equal(cox_queue_identity(&identity, NULL), 0);
    assert_ok(cox_queue_lock_until(lock, identity, COX_DEADLINE_NEVER, &repair, test_err()));
    assert_int_equal(repair, expected_repair);
    assert_int_equal(atomic_load(&lock->lock_owner), identity);
    cox_queue_unlock(lock, identity);
    assert_int_equal(atomic_load(&lock->lock_owner), 0);
}

TEST(b31_b34_a_dead_owner_is_found_and_told)
{
    struct cox_queue_layout_lock *lock = lock_share();
    for (int reap = 0; reap < 2; reap++) {
        int status;
        pid_t pid = fork();
        if (pid == 0) {
            uint64_t identity;
            bool repair;
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            _exit(cox_queue_identity(&identity, NULL) ||
                  cox_queue_lock_until(lock, identity, COX_DEADLINE_NEVER, &repair, NULL) ||
                  repair);
        }
        siginfo_t info;
        assert_int_equal(waitid(P_PID, (id_t)pid, &info, WEXITED | WNOWAIT), 0);
        if (reap)
            assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_int_equal(cox_queue_identity_pid(atomic_load(&lock->lock_owner)), (uint32_t)pid);
        lock_once(lock, true);
        lock_once(lock, false);
        if (!reap)
            assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_int_equal(status, 0);
    }
}

TEST(b31_a_lock_without_a_live_owner_is_taken_over)
{
    struct cox_queue_layout_lock *lock = lock_share();
    const uint64_t words[] = {1, UINT64_MAX, (uint64_t)getpid() << 42,
                              ((uint64_t)getpid() << 42) + 1, UINT64_C(1) << 63};
    uint64_t took_ns = UINT64_MAX;
    for (int tries = 0; tries < TRIES && took_ns >= 2000 * COX_NSEC_PER_MSEC; tries++) {
        const uint64_t begin_ns = cox_now_ns();
        for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
            atomic_store(&lock->lock_owner, words[i]);
            lock_once(lock, true);
        }
        took_ns = cox_now_ns() - begin_ns;
    }
    assert_true(took_ns < 2000 * COX_NSEC_PER_MSEC);
}

/* Alive and stopped, or a corrupt word: every wait ends. */
TEST(b31_b52_a_lock_that_a_live_process_keeps_is_given_up_with_words)
{
    struct cox_queue_layout_lock *lock = lock_share();
    struct cox_message message;
    uint64_t identity;
    assert_int_equal(cox_queue_identity(&identity, NULL), 0);
    publish(0, 1);
    atomic_store(&lock->lock_owner, identity);
    char name[32];
    snprintf(name, sizeof name, "process %d ", getpid());
    assert_refused(cox_subscriber_take(subscribers[0], &message, test_err()), COX_TIMEOUT, name);
    atomic_store(&lock->lock_owner, 0);
    take(subscribers[0], 1);
}

/* A process is stopped in publish, with the lock: that delays its own queue, not the deadline,
 * another queue or a trigger. */
TEST(h14_b36_a_stopped_publisher_delays_no_other_queue)
{
    struct cox_queue_layout *layout = queues[0]->layout;
    struct cox_subscriber *ready = NULL;
    uint64_t identity;
    assert_int_equal(cox_queue_identity(&identity, NULL), 0);
    int slow = 0;
    for (int round = 0; round < 2; round++) {
        atomic_store(&layout->lock.lock_owner, identity);
        if (round == 0)
            atomic_store(&layout->state.queue_publishing, 1);
        else /* or as it adds a pending free */
            atomic_fetch_add(&layout->state.pending_free_turn, 1);
        uint64_t begin_ns = cox_now_ns();
        assert_int_equal(cox_queue_set_wait(set, cox_deadline_after_ms(20), &ready), COX_TIMEOUT);
        publish(1, 1);
        assert_int_equal(cox_queue_set_wait(set, COX_DEADLINE_NEVER, &ready), 0);
        assert_ptr_equal(ready, subscribers[1]);
        take(ready, 1);
        cox_queue_set_trigger(set);
        assert_int_equal(cox_queue_set_wait(set, COX_DEADLINE_NEVER, &ready), COX_ABORTED);
        /* A fifth of COX_QUEUE_LOCK_PATIENCE_MS. */
        if (cox_now_ns() - begin_ns >= 1000 * COX_NSEC_PER_MSEC) {
            assert_true(++slow < TRIES);
            round--;
        }
        atomic_store(&layout->lock.lock_owner, 0);
        atomic_store(&layout->state.queue_publishing, 0);
    }
}

#define ROUNDS 20000

struct counter {
    struct cox_queue_layout_lock *lock;
    /* plain: under the lock alone */
    uint64_t value;
};

static void *thread_count(void *argument)
{
    struct counter *counter = argument;
    uint64_t identity;
    bool repair;
    COX_ASSERT(cox_queue_identity(&identity, NULL) == 0);
    for (int i = 0; i < ROUNDS; i++) {
        COX_ASSERT(
            cox_queue_lock_until(counter->lock, identity, COX_DEADLINE_NEVER, &repair, NULL) == 0 &&
            !repair);
        counter->value++;
        cox_queue_unlock(counter->lock, identity);
    }
    return NULL;
}

TEST(b31_b34_threads_of_one_process_exclude_each_other)
{
    struct counter counter = {lock_share(), 0};
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, thread_count, &counter), 0);
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    assert_int_equal(counter.value, 4 * ROUNDS);
}
