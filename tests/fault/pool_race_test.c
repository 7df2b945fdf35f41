/*
 * pool_race_test: stops two processes between their steps to force rare interleavings: a block is
 * being closed while another process counts it for a moment.
 */
#include "forks.h"
#include "testing.h"

#include "tests/unit/pool_fixture.h"
#include "channel/base/fault.h"

#if COX_TESTING

#define BLOCK_COUNT 8

struct race {
    int fds[2];
    struct cox_block_ref ref;
    _Atomic uint32_t step;
    _Atomic bool is_over;
};

static struct cox_pool *attached(const struct forks_self *self)
{
    const struct race *race = self->context;
    struct cox_pool *pool = NULL;
    FORK_CHECK(cox_pool_attach(race->fds, NULL, &pool, NULL) == 0, "attach");
    return pool;
}

/* No process leaves before the test has checked: leaving scans every block. */
static void wait_until_over(struct race *race)
{
    AWAIT(atomic_load(&race->is_over));
}

/* Runs before the stopped process continues. */
static void stop_again(int signal_number)
{
    (void)signal_number;
    cox_fault_arm("pool.checked:stop:0:1");
}

static void go_on(int signal_number)
{
    (void)signal_number;
    cox_fault_arm(NULL);
}

static void closer_main(const struct forks_self *self)
{
    struct race *race = self->context;
    struct cox_pool *pool = attached(self);
    FORK_CHECK(cox_pool_allocate(pool, 1, &race->ref, NULL) == 0, "allocate");
    signal(SIGCONT, stop_again);
    cox_fault_arm("pool.closing:stop:0:1");
    FORK_CHECK(cox_pool_unref(pool, &race->ref, NULL) == 0, "unref");
    atomic_fetch_add(&race->step, 1);
    wait_until_over(race);
    cox_pool_free(pool);
}

/* Counts the block for a moment, through a stale reference. */
static void opener_main(const struct forks_self *self)
{
    struct race *race = self->context;
    struct cox_pool *pool = attached(self);
    struct cox_block_ref stale = race->ref;
    stale.epoch++;
    signal(SIGCONT, go_on);
    cox_fault_arm("pool.counted:stop:1:1");
    FORK_CHECK(cox_pool_ref(pool, &stale, NULL) == COX_STALE, "ref");
    atomic_fetch_add(&race->step, 1);
    wait_until_over(race);
    cox_pool_free(pool);
}

static void await_step(struct race *race, uint32_t step)
{
    AWAIT(atomic_load(&race->step) >= step);
}

static struct race *race_new(struct cox_pool **ret_pool)
{
    static const struct cox_pool_options options = {
        .size = sizeof(struct cox_pool_options), .block_size = 64, .block_count = BLOCK_COUNT};
    struct race *race = forks_share(sizeof *race);
    *ret_pool = pool_made(&options);
    cox_pool_fds(*ret_pool, race->fds);
    return race;
}

static void race_ends(struct race *race, struct forks *forks, struct cox_pool *pool)
{
    assert_int_equal(pool_stats(pool).reference_count, 0);
    assert_int_equal(pool_stats(pool).free_count, BLOCK_COUNT);
    atomic_store(&race->is_over, true);
    forks_wait(forks);
    pool_is_whole(pool);
    cox_pool_free(pool);
}

/* The closer sees the opener's count and would leave the block in use, but the opener has dropped
 * its count by then. */
TEST(b24_b31_the_last_to_release_takes_the_last_check_over)
{
    struct cox_pool *pool;
    struct race *race = race_new(&pool);
    struct forks forks;
    forks_start(&forks, 1, closer_main, race);
    test_await_stopped(forks.pids[0]); /* it has set CLOSING, and has not checked */
    forks_add(&forks, 1, 2, opener_main, race);
    test_await_stopped(forks.pids[1]); /* it counts, and has not checked */
    kill(forks.pids[0], SIGCONT);
    test_await_stopped(forks.pids[0]); /* it has seen the count, and has not stored USED */
    kill(forks.pids[1], SIGCONT);
    await_step(race, 1);
    /* Its last compare-and-swap fails. */
    kill(forks.pids[0], SIGCONT);
    await_step(race, 2);
    race_ends(race, &forks, pool);
}

/* The opposite order: the closer has seen no count, then another process takes a reference: the
 * block is not freed. */
static void reader_main(const struct forks_self *self)
{
    struct race *race = self->context;
    struct cox_pool *pool = attached(self);
    FORK_CHECK(cox_pool_ref(pool, &race->ref, NULL) == 0, "ref");
    atomic_fetch_add(&race->step, 1);
    AWAIT(atomic_load(&race->step) >= 3);
    FORK_CHECK(cox_pool_unref(pool, &race->ref, NULL) == 0, "unref");
    atomic_fetch_add(&race->step, 1);
    wait_until_over(race);
    cox_pool_free(pool);
}

static void looker_main(const struct forks_self *self)
{
    struct race *race = self->context;
    struct cox_pool *pool = attached(self);
    FORK_CHECK(cox_pool_allocate(pool, 1, &race->ref, NULL) == 0, "allocate");
    cox_fault_arm("pool.checked:stop:0:2");
    FORK_CHECK(cox_pool_unref(pool, &race->ref, NULL) == 0, "unref");
    atomic_fetch_add(&race->step, 1);
    wait_until_over(race);
    cox_pool_free(pool);
}

TEST(b24_b31_a_reference_after_the_last_check_keeps_the_block)
{
    struct cox_pool *pool;
    struct race *race = race_new(&pool);
    struct forks forks;
    forks_start(&forks, 1, looker_main, race);
    test_await_stopped(forks.pids[0]);
    forks_add(&forks, 1, 2, reader_main, race);
    await_step(race, 1);
    kill(forks.pids[0], SIGCONT);
    await_step(race, 2);
    assert_int_equal(pool_stats(pool).reference_count, 1);
    assert_int_equal(pool_stats(pool).free_count, BLOCK_COUNT - 1);
    struct cox_block_ref rest[BLOCK_COUNT];
    for (int i = 0; i < BLOCK_COUNT - 1; i++) {
        rest[i] = pool_allocated(pool, 1);
        assert_int_not_equal(rest[i].block, race->ref.block);
    }
    for (int i = 0; i < BLOCK_COUNT - 1; i++)
        assert_int_equal(cox_pool_unref(pool, &rest[i], NULL), 0);
    atomic_fetch_add(&race->step, 1);
    await_step(race, 4);
    race_ends(race, &forks, pool);
}

/* ---- a slab that is emptied while another process claims a block of it ---- */

static void wanting_main(const struct forks_self *self)
{
    struct race *race = self->context;
    struct cox_pool *pool = attached(self);
    struct cox_block_ref ref;
    FORK_CHECK(cox_pool_allocate(pool, 64, &ref, NULL) == 0, "allocate");
    FORK_CHECK(cox_pool_unref(pool, &ref, NULL) == 0, "unref");
    signal(SIGCONT, go_on);
    cox_fault_arm("pool.hinted:stop:0:1");
    int r = cox_pool_allocate(pool, 64, &ref, NULL);
    FORK_CHECK(r == COX_FULL, "%d", r);
    atomic_fetch_add(&race->step, 1);
    wait_until_over(race);
    cox_pool_free(pool);
}

TEST(a30_b31_no_block_of_a_slab_that_is_gone)
{
    static const struct cox_pool_options options = {.size = sizeof(struct cox_pool_options),
                                                    .strategy = COX_POOL_SLAB,
                                                    .block_size = 64,
                                                    .slab_size = 4096,
                                                    .slabs_size = 4 * 4096};
    struct cox_pool *pool = pool_made(&options);
    struct race *race = forks_share(sizeof *race);
    struct forks forks;
    cox_pool_fds(pool, race->fds);
    forks_start(&forks, 1, wanting_main, race);
    test_await_stopped(forks.pids[0]); /* it has found a free block, and has not claimed it */
    struct cox_block_ref all = pool_allocated(pool, 4 * 4096);
    kill(forks.pids[0], SIGCONT);
    await_step(race, 1);
    assert_int_equal(cox_pool_unref(pool, &all, NULL), 0);
    assert_int_equal(pool_stats(pool).free_count, 4);
    atomic_store(&race->is_over, true);
    forks_wait(&forks);
    pool_is_whole(pool);
    cox_pool_free(pool);
}

/* ---- threads of one process ---- */

struct closer {
    struct cox_pool *pool;
    struct cox_block_ref ref;
    _Atomic pid_t tid;
    int result;
};

static _Atomic uint32_t woken;

static void wake(int signal_number)
{
    (void)signal_number;
    atomic_fetch_add(&woken, 1);
}

static void *closer_thread(void *argument)
{
    struct closer *closer = argument;
    atomic_store(&closer->tid, (pid_t)syscall(SYS_gettid));
    closer->result = cox_pool_unref(closer->pool, &closer->ref, NULL);
    return NULL;
}

/* True: the thread is at its fault point, or waits for a lock. */
static void await_sleep(const struct closer *closer)
{
    char path[64], state = 0;
    while (state != 'S') {
        snprintf(path, sizeof path, "/proc/self/task/%d/stat", (int)atomic_load(&closer->tid));
        FILE *file = fopen(path, "re");
        if (file && fscanf(file, "%*d (%*[^)]) %c", &state) != 1)
            state = 0;
        if (file)
            fclose(file);
        sched_yield();
    }
}

/* One thread has seen no count and is about to free; another one takes a reference, releases it,
 * and is about to check, when a third takes one. The first thread must not take the second's
 * CLOSING for its own. */
TEST(b31_b24_threads_of_a_process_close_one_after_the_other)
{
    static const struct cox_pool_options options = {
        .size = sizeof(struct cox_pool_options), .block_size = 64, .block_count = BLOCK_COUNT};
    struct cox_pool *pool = pool_made(&options), *other = pool_attached(pool);
    struct closer first = {.pool = pool, .ref = pool_allocated(pool, 1)}, second = first;
    const struct sigaction action = {.sa_handler = wake};
    pthread_t threads[2];
    assert_int_equal(sigaction(SIGUSR1, &action, NULL), 0);
    cox_fault_arm("pool.checked:read:coordinator:2");
    assert_int_equal(pthread_create(&threads[0], NULL, closer_thread, &first), 0);
    await_sleep(&first);
    assert_int_equal(cox_pool_ref(pool, &second.ref, NULL), 0);
    cox_fault_arm("pool.checked:read:coordinator:1");
    assert_int_equal(pthread_create(&threads[1], NULL, closer_thread, &second), 0);
    await_sleep(&second);
    assert_int_equal(cox_pool_ref(other, &second.ref, NULL), 0);
    cox_fault_arm("pool.closing:read:coordinator:1");
    pthread_kill(threads[1], SIGUSR1);
    AWAIT(atomic_load(&woken) >= 1);
    await_sleep(&second);
    pthread_kill(threads[0], SIGUSR1);
    pthread_join(threads[0], NULL);
    while (pthread_tryjoin_np(threads[1], NULL)) { /* the thread may get there only now */
        pthread_kill(threads[1], SIGUSR1);
        sched_yield();
    }
    cox_fault_arm(NULL);
    assert_int_equal(first.result, 0);
    assert_int_equal(second.result, 0);
    assert_int_equal(pool_stats(pool).free_count, BLOCK_COUNT - 1);
    assert_int_equal(cox_pool_unref(other, &second.ref, NULL), 0);
    assert_int_equal(pool_stats(pool).free_count, BLOCK_COUNT);
    cox_pool_free(other);
    pool_is_whole(pool);
    cox_pool_free(pool);
}

#endif
