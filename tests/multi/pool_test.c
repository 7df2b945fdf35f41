/* Pools between processes: attach by fd and by handle, free in another process, death of owners. */
#include "channel/base/fault.h"
#include "channel/base/peer.h"
#include "memory/pool/pool_internal.h"
#include "memory/pool/pool_layout.h"
#include "tests/lib/rights.h"
#include "tests/unit/pool_fixture.h"
#include "forks.h"
#include "ranks.h"
#include "testing.h"

#include <sys/inotify.h>

#define RANK_COUNT 4
#define BLOCK_SIZE 4096
#define BLOCK_COUNT 64

static const struct cox_pool_options fixed = {
    .size = sizeof(struct cox_pool_options), .block_size = BLOCK_SIZE, .block_count = BLOCK_COUNT};

struct shared {
    int fds[2];
    /* the second one for reading only */
    struct cox_pool_handle handles[2];
    struct cox_block_ref refs[BLOCK_COUNT];
    _Atomic uint32_t step;
    _Atomic uint32_t count;
};

static void step_await(struct shared *shared, uint32_t step)
{
    AWAIT(atomic_load(&shared->step) >= step);
}

static struct cox_pool *attached(const struct forks_self *self, const struct shared *shared)
{
    struct cox_pool *pool = NULL;
    FORK_CHECK(cox_pool_attach(shared->fds, NULL, &pool, test_err()) == 0, "%s", test_error.text);
    return pool;
}

#define WORDS_SIZE (2 * COX_POOL_PAGE_SIZE)

/* The header and the owners. */
static void *words_map(const struct cox_pool *pool)
{
    int fds[2];
    cox_pool_fds(pool, fds);
    void *words = mmap(NULL, WORDS_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
    COX_ASSERT(words != MAP_FAILED);
    return words;
}

/* The only rank. */
static void rank_kill(struct forks *forks)
{
    kill(forks->pids[0], SIGKILL);
    assert_int_equal(forks_end(forks, 0), 128 + SIGKILL);
}

/* ---- handles ---- */

static void by_handle_main(const struct forks_self *self)
{
    struct shared *shared = self->context;
    const bool reads = self->rank % 2;
    const struct cox_pool_attach_options options = {.size = sizeof(struct cox_pool_attach_options),
                                                    .read_only = reads};
    const struct cox_pool_attach_options writes = {.size = sizeof(struct cox_pool_attach_options),
                                                   .read_only = false};
    struct cox_pool *pool = NULL, *none = NULL;
    int r = cox_pool_open(&shared->handles[reads], NULL, cox_deadline_after_ms(TEST_PATIENCE_MS),
                          &options, &pool, test_err());
    FORK_CHECK(r == 0, "%d %s", r, test_error.text);
    if (reads) {
        r = cox_pool_open(&shared->handles[1], NULL, 0, &writes, &none, test_err());
        FORK_CHECK(r == COX_DENIED, "%d %s", r, test_error.text);
    }
    const struct cox_block_ref *ref = &shared->refs[self->rank];
    FORK_CHECK(cox_pool_ref(pool, ref, test_err()) == 0, "%s", test_error.text);
    FORK_CHECK(block_is(cox_pool_pointer(pool, ref), BLOCK_SIZE, ref->block, ref->epoch), "bytes");
    atomic_fetch_add(&shared->count, 1);
    while (atomic_load(&shared->count) < RANK_COUNT) /* no rank releases before all have one */
        sched_yield();
    step_await(shared, 1);
    FORK_CHECK(cox_pool_unref(pool, ref, test_err()) == 0, "%s", test_error.text);
    if (self->rank == 0)
        FORK_CHECK(cox_pool_allocate(pool, 1, &shared->refs[60], test_err()) == 0, "%s",
                   test_error.text);
    cox_pool_free(pool);
}

TEST(h19_h22_h23_attached_by_handle_and_freed_by_others)
{
    if (!test_can_take_fds())
        skip();
    struct shared *shared = forks_share(sizeof *shared);
    struct cox_pool *pool = pool_made(&fixed);
    struct cox_exporter *exporter = NULL;
    const struct cox_exporter_options options = {.size = sizeof(struct cox_exporter_options),
                                                 .ptrace_policy = COX_PTRACE_ANY};
    assert_int_equal(cox_exporter_new(&options, &exporter, NULL), 0);
    for (int i = 0; i < 2; i++)
        assert_int_equal(cox_pool_export(pool, exporter, i == 1, &shared->handles[i], NULL), 0);
    for (uint32_t i = 0; i < RANK_COUNT; i++) {
        shared->refs[i] = pool_allocated(pool, BLOCK_SIZE);
        block_fill(cox_pool_pointer(pool, &shared->refs[i]), BLOCK_SIZE, shared->refs[i].block,
                   shared->refs[i].epoch);
    }
    struct forks forks;
    forks_start(&forks, RANK_COUNT, by_handle_main, shared);
    AWAIT(atomic_load(&shared->count) >= RANK_COUNT);
    /* The allocator releases first: no block is freed by that. */
    for (uint32_t i = 0; i < RANK_COUNT; i++)
        assert_int_equal(cox_pool_unref(pool, &shared->refs[i], NULL), 0);
    assert_int_equal(pool_stats(pool).free_count, BLOCK_COUNT - RANK_COUNT);
    atomic_store(&shared->step, 1);
    forks_wait(&forks);
    pool_is_whole(pool);
    assert_int_equal(pool_stats(pool).owner_count, 1);
    for (int i = 0; i < 2; i++)
        cox_pool_unexport(exporter, &shared->handles[i]);
    struct cox_pool *none = NULL;
    assert_int_not_equal(cox_pool_open(&shared->handles[0], NULL, 0, NULL, &none, NULL), 0);
    cox_exporter_free(exporter);
    cox_pool_free(pool);
}

/* ---- the last one out ---- */

static void owner_main(const struct forks_self *self)
{
    struct shared *shared = self->context;
    struct cox_pool *pool = attached(self, shared);
    struct cox_block_ref ref;
    FORK_CHECK(cox_pool_allocate(pool, 1, &ref, NULL) == 0, "allocate");
    atomic_fetch_add(&shared->count, 1);
    if (self->rank == 0) { /* leaves by cox_pool_free */
        cox_pool_free(pool);
        close(shared->fds[0]);
        close(shared->fds[1]);
        return;
    }
    for (;;)
        pause();
}

static bool is_gone(int notify_fd)
{
    struct pollfd p = {.fd = notify_fd, .events = POLLIN};
    return poll(&p, 1, 0) > 0;
}

TEST(h20_the_last_one_out_destroys_also_when_killed)
{
    test_needs_processes();
    struct shared *shared = forks_share(sizeof *shared);
    struct cox_pool *pool = pool_made(&fixed);
    struct forks forks;
    char path[64];
    int notify_fds[2];
    cox_pool_fds(pool, shared->fds);
    /* Notices the end of the last reference to the memory, without being one. */
    for (int i = 0; i < 2; i++) {
        notify_fds[i] = inotify_init1(IN_CLOEXEC);
        snprintf(path, sizeof path, "/proc/self/fd/%d", shared->fds[i]);
        assert_true(inotify_add_watch(notify_fds[i], path, IN_DELETE_SELF) >= 0);
    }
    forks_start(&forks, 3, owner_main, shared);
    AWAIT(atomic_load(&shared->count) >= 3);
    pool = cox_pool_free(pool);
    assert_int_equal(forks_end(&forks, 0), 0);
    kill(forks.pids[1], SIGKILL);
    assert_int_equal(forks_end(&forks, 1), 128 + SIGKILL);
    assert_false(is_gone(notify_fds[0]));
    assert_false(is_gone(notify_fds[1]));
    kill(forks.pids[2], SIGKILL);
    assert_int_equal(forks_end(&forks, 2), 128 + SIGKILL);
    for (int i = 0; i < 2; i++) {
        struct pollfd p = {.fd = notify_fds[i], .events = POLLIN};
        assert_int_equal(poll(&p, 1, TEST_PATIENCE_MS), 1);
        close(notify_fds[i]);
    }
}

/* ---- dead owners ---- */

static void victim_main(const struct forks_self *self)
{
    struct shared *shared = self->context;
    struct cox_pool *pool = attached(self, shared);
    for (uint32_t i = 0; i < 20; i++) {
        FORK_CHECK(cox_pool_ref(pool, &shared->refs[i], NULL) == 0, "ref");
        FORK_CHECK(cox_pool_ref(pool, &shared->refs[i], NULL) == 0, "ref");
    }
    for (uint32_t i = 20; i < 30; i++)
        FORK_CHECK(cox_pool_allocate(pool, 1, &shared->refs[i], NULL) == 0, "allocate");
    FORK_CHECK(cox_pool_queue_join(pool, 5, NULL) == 0, "join");
    FORK_CHECK(cox_pool_pin(pool, &shared->refs[0], 5, 1, NULL) == 0, "pin");
    atomic_fetch_add(&shared->count, 1);
    for (;;)
        pause();
}

TEST(b37_b24_the_dead_give_back_when_nothing_is_free)
{
    test_needs_processes();
    struct shared *shared = forks_share(sizeof *shared);
    struct cox_pool *pool = pool_made(&fixed);
    struct cox_block_ref rest[BLOCK_COUNT], none;
    struct forks forks;
    uint32_t count = 0;
    cox_pool_fds(pool, shared->fds);
    for (uint32_t i = 0; i < 20; i++)
        shared->refs[i] = pool_allocated(pool, 1);
    forks_start(&forks, 1, victim_main, shared);
    AWAIT(atomic_load(&shared->count) >= 1);
    for (uint32_t i = 0; i < 20; i++)
        assert_int_equal(cox_pool_unref(pool, &shared->refs[i], NULL), 0);
    while (cox_pool_allocate(pool, 1, &rest[count], NULL) == 0)
        count++;
    assert_int_equal(count, BLOCK_COUNT - 30); /* it is alive and keeps its blocks */
    assert_int_equal(cox_pool_sweep(pool), 0);
    assert_int_equal(pool_stats(pool).reference_count, BLOCK_COUNT - 30 + 50);
    rank_kill(&forks);
    while (cox_pool_allocate(pool, 1, &rest[count], NULL) == 0)
        count++;
    assert_int_equal(count, BLOCK_COUNT);
    assert_int_equal(pool_stats(pool).swept, 51);
    assert_int_equal(pool_stats(pool).owner_count, 1);
    assert_int_equal(cox_pool_sweep(pool), 0);
    assert_int_equal(cox_pool_allocate(pool, 1, &none, NULL), COX_FULL);
    for (uint32_t i = 0; i < BLOCK_COUNT; i++)
        assert_int_equal(cox_pool_unref(pool, &rest[i], NULL), 0);
    pool_is_whole(pool);
    cox_pool_free(pool);
}

TEST(h20_b37_the_rows_of_the_dead_are_taken)
{
    test_needs_processes();
    struct shared *shared = forks_share(sizeof *shared);
    struct cox_pool_options options = fixed;
    options.owner_count_max = 2;
    struct cox_pool *pool = pool_made(&options);
    cox_pool_fds(pool, shared->fds);
    for (int life = 0; life < 5; life++) {
        struct forks forks;
        for (uint32_t i = 0; i < 20; i++)
            shared->refs[i] = pool_allocated(pool, 1);
        atomic_store(&shared->count, 0);
        forks_start(&forks, 1, victim_main, shared);
        AWAIT(atomic_load(&shared->count) >= 1);
        rank_kill(&forks);
        for (uint32_t i = 0; i < 20; i++)
            assert_int_equal(cox_pool_unref(pool, &shared->refs[i], NULL), 0);
    }
    struct cox_pool *other = pool_attached(pool);
    pool_is_whole(other);
    cox_pool_free(other);
    cox_pool_free(pool);
}

/* A pid alone is not an identity: it may have been reused. */
TEST(b25_a_row_whose_pid_is_another_process_is_swept)
{
    struct cox_pool *pool = pool_made(&fixed), *other = pool_attached(pool);
    struct cox_block_ref ref = pool_allocated(other, 1);
    uint64_t start;
    assert_int_equal(cox_peer_start_time(getppid(), &start), 0);
    uint8_t *words = words_map(pool);
    struct cox_pool_layout_owner *owners =
        (struct cox_pool_layout_owner *)(words + COX_POOL_PAGE_SIZE);
    atomic_store(&owners[1].owner_identity,
                 cox_pool_identity(COX_POOL_OWNER_LIVE, getppid(), start));
    assert_int_equal(cox_pool_sweep(pool), 0);
    assert_int_equal(pool_stats(pool).reference_count, 1);
    atomic_store(&owners[1].owner_identity,
                 cox_pool_identity(COX_POOL_OWNER_LIVE, getppid(), start + 1));
    assert_int_equal(cox_pool_sweep(pool), 1);
    assert_int_equal(cox_pool_ref(pool, &ref, NULL), COX_STALE);
    /* While a live process sweeps a row, no other does. Once it is dead, the next one starts
     * over. */
    struct cox_block_ref again = pool_allocated(other, 1); /* counted in the row without an owner */
    atomic_store(&owners[1].owner_identity,
                 cox_pool_identity(COX_POOL_OWNER_SWEEPING, getppid(), start));
    assert_int_equal(cox_pool_sweep(pool), 0);
    atomic_store(&owners[1].owner_identity,
                 cox_pool_identity(COX_POOL_OWNER_SWEEPING, getppid(), start + 1));
    assert_int_equal(cox_pool_sweep(pool), 1);
    assert_int_equal(cox_pool_ref(pool, &again, NULL), COX_STALE);
    munmap(words, WORDS_SIZE);
    cox_pool_free(other);
    pool_is_whole(pool);
    cox_pool_free(pool);
}

/* The owner of queues_lock is alive when a queue's last process is found dead: the next sweep
 * clears the pins. */
TEST(b33_b37_a_lock_that_is_taken_delays_a_sweep)
{
    struct cox_pool *pool = pool_made(&fixed), *other = pool_attached(pool);
    struct cox_block_ref ref = pool_allocated(other, 1);
    uint64_t start;
    assert_int_equal(cox_peer_start_time(getppid(), &start), 0);
    assert_int_equal(cox_pool_queue_join(other, 5, NULL), 0);
    assert_int_equal(cox_pool_pin(other, &ref, 5, 1, NULL), 0);
    struct cox_pool_layout_header *header = words_map(pool);
    atomic_store(&header->queues_lock, cox_pool_identity(COX_POOL_OWNER_LIVE, getppid(), start));
    assert_int_equal(cox_pool_queue_join(pool, 6, NULL), COX_BUSY);
    cox_pool_free(other);
    assert_int_equal(pool_stats(pool).pin_count, 1);
    assert_int_equal(cox_pool_sweep(pool), 0);
    atomic_store(&header->queues_lock,
                 cox_pool_identity(COX_POOL_OWNER_LIVE, getppid(), start + 1));
    assert_int_equal(cox_pool_sweep(pool), 1);
    assert_int_equal(atomic_load(&header->queues_lock), 0);
    munmap(header, WORDS_SIZE);
    pool_is_whole(pool);
    cox_pool_free(pool);
}

/* ---- readers ---- */

/* The process that has allocated all blocks is killed: references of a reader stay until it
 * releases them. */
static void doomed_owner_main(const struct forks_self *self)
{
    struct shared *shared = self->context;
    struct cox_pool *pool = attached(self, shared);
    for (int i = 0; i < BLOCK_COUNT; i++)
        FORK_CHECK(cox_pool_allocate(pool, BLOCK_SIZE, &shared->refs[i], NULL) == 0, "allocate");
    block_fill(cox_pool_pointer(pool, &shared->refs[9]), BLOCK_SIZE, 9, 1);
    atomic_store(&shared->step, 1);
    for (;;)
        pause();
}

TEST(b37_an_owner_that_is_killed_takes_no_reader_along)
{
    test_needs_processes();
    struct shared *shared = forks_share(sizeof *shared);
    struct cox_pool *pool = pool_made(&fixed);
    struct forks forks;
    cox_pool_fds(pool, shared->fds);
    forks_start(&forks, 1, doomed_owner_main, shared);
    step_await(shared, 1);
    const struct cox_block_ref ref = shared->refs[9], other = shared->refs[8];
    assert_int_equal(cox_pool_ref(pool, &ref, NULL), 0);
    rank_kill(&forks);
    assert_int_equal(cox_pool_sweep(pool), BLOCK_COUNT);
    assert_true(block_is(cox_pool_pointer(pool, &ref), BLOCK_SIZE, 9, 1));
    assert_int_equal(cox_pool_ref(pool, &other, NULL), COX_STALE);
    assert_int_equal(pool_stats(pool).free_count, BLOCK_COUNT - 1);
    assert_int_equal(cox_pool_unref(pool, &ref, NULL), 0);
    pool_is_whole(pool);
    cox_pool_free(pool);
}

/* ---- attach and leave ---- */

static void client_main(const struct forks_self *self)
{
    struct shared *shared = self->context;
    for (int visit = 0; visit < 50; visit++) {
        struct cox_pool *pool = NULL;
        struct cox_block_ref ref;
        int r = cox_pool_attach(shared->fds, NULL, &pool, test_err());
        if (r == COX_FULL) {
            atomic_fetch_add(&shared->count, 1);
            continue;
        }
        FORK_CHECK(r == 0, "%d %s", r, test_error.text);
        FORK_OK(cox_pool_allocate(pool, BLOCK_SIZE, &ref, test_err()));
        block_fill(cox_pool_pointer(pool, &ref), BLOCK_SIZE, ref.block, ref.epoch);
        FORK_CHECK(block_is(cox_pool_pointer(pool, &ref), BLOCK_SIZE, ref.block, ref.epoch),
                   "bytes");
        if (visit % 2)
            FORK_CHECK(cox_pool_unref(pool, &ref, NULL) == 0, "unref");
        cox_pool_free(pool);
    }
}

TEST(b24_b31_rows_have_one_owner_at_a_time)
{
    struct shared *shared = forks_share(sizeof *shared);
    struct cox_pool_options options = fixed;
    options.owner_count_max = 4;
    struct cox_pool *pool = pool_made(&options);
    cox_pool_fds(pool, shared->fds);
    forks_run(6, client_main, shared);
    pool_is_whole(pool);
    assert_int_equal(pool_stats(pool).owner_count, 1);
    cox_pool_free(pool);
}
