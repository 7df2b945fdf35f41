/*
 * pool_kill_test: a process that uses a pool is killed at each passage of each fault point, beside
 * a live process and one that died before. After a sweep all that the dead had is free, the living
 * have lost nothing, and every block, row and queue can be used.
 */
#include "forks.h"
#include "testing.h"

#include "tests/unit/pool_fixture.h"
#include "channel/base/fault.h"
#include "memory/pool/pool_internal.h"

#if COX_TESTING

#define KEPT_COUNT 3
#define BOTH 5  /* a queue that the survivor has joined, too */
#define ALONE 6 /* a queue that it has not joined */
/* Exit status of a victim that was not killed. */
#define SPARED 9

struct run {
    struct cox_pool_options options;
    int fds[2];
    struct cox_block_ref kept[KEPT_COUNT];
    /* referenced by the dead process as it was about to be freed */
    struct cox_block_ref left;
    const char *point;
    uint32_t passage;
};

static uint64_t size_of(const struct run *run)
{
    return run->options.block_size;
}

/* ---- the process that died before ---- */

static void mess_main(const struct forks_self *self)
{
    struct run *run = self->context;
    struct cox_pool *pool = NULL;
    struct cox_block_ref ref;
    FORK_CHECK(cox_pool_attach(run->fds, NULL, &pool, NULL) == 0, "attach");
    FORK_CHECK(cox_pool_ref(pool, &run->kept[0], NULL) == 0, "ref");
    FORK_CHECK(cox_pool_queue_join(pool, BOTH, NULL) == 0, "join");
    FORK_CHECK(cox_pool_queue_join(pool, ALONE, NULL) == 0, "join");
    FORK_CHECK(cox_pool_pin(pool, &run->kept[0], BOTH, 50, NULL) == 0, "pin");
    for (int i = 0; i < 2; i++) {
        FORK_CHECK(cox_pool_allocate(pool, size_of(run), &ref, NULL) == 0, "allocate");
        FORK_CHECK(cox_pool_pin(pool, &ref, i ? ALONE : BOTH, 51, NULL) == 0, "pin");
    }
    if (run->options.slab_size)
        FORK_CHECK(cox_pool_allocate(pool, 2 * run->options.slab_size, &ref, NULL) == 0, "run");
    FORK_CHECK(cox_pool_allocate(pool, size_of(run), &run->left, NULL) == 0, "allocate");
    cox_fault_arm("pool.closing:kill:0:1");
    cox_pool_unref(pool, &run->left, NULL);
    kill(getpid(), SIGKILL);
}

/* ---- the victim ---- */

static void use_references(const struct forks_self *self, struct cox_pool *pool)
{
    struct run *run = self->context;
    for (int i = 0; i < KEPT_COUNT; i++)
        FORK_CHECK(cox_pool_ref(pool, &run->kept[i], NULL) == 0, "ref");
    FORK_CHECK(cox_pool_ref(pool, &run->kept[1], NULL) == 0, "ref");
    FORK_CHECK(cox_pool_unref(pool, &run->kept[1], NULL) == 0, "unref");
    FORK_CHECK(cox_pool_unref(pool, &run->kept[2], NULL) == 0, "unref");
    struct cox_block_ref stale = run->kept[2];
    stale.epoch++;
    FORK_CHECK(cox_pool_ref(pool, &stale, NULL) == COX_STALE, "stale");
}

static void use_blocks(const struct forks_self *self, struct cox_pool *pool)
{
    struct run *run = self->context;
    uint64_t sizes[] = {size_of(run), size_of(run), run->options.slab_size,
                        2 * run->options.slab_size, 0};
    struct cox_block_ref refs[5];
    const int count = run->options.slab_size ? 4 : 5;
    for (int i = 2; run->options.slab_size == 0 && i < count; i++)
        sizes[i] = size_of(run); /* larger than what the dead left with pages */
    for (int i = 0; i < count; i++) {
        FORK_CHECK(cox_pool_allocate(pool, sizes[i], &refs[i], NULL) == 0, "allocate %d", i);
        block_fill(cox_pool_pointer(pool, &refs[i]), sizes[i], refs[i].block, refs[i].epoch);
    }
    for (int i = 1; i < count; i++) {
        FORK_CHECK(cox_pool_ref(pool, &refs[i], NULL) == 0, "ref");
        FORK_CHECK(cox_pool_unref(pool, &refs[i], NULL) == 0, "unref");
        FORK_CHECK(cox_pool_unref(pool, &refs[i], NULL) == 0, "unref");
        FORK_CHECK(cox_pool_ref(pool, &refs[i], NULL) == COX_STALE, "stale");
    }
}

static void use_pins(const struct forks_self *self, struct cox_pool *pool)
{
    struct run *run = self->context;
    struct cox_block_ref ref;
    FORK_CHECK(cox_pool_queue_join(pool, BOTH, NULL) == 0, "join");
    FORK_CHECK(cox_pool_queue_join(pool, ALONE, NULL) == 0, "join");
    FORK_CHECK(cox_pool_pin(pool, &run->kept[0], ALONE, 1, NULL) == 0, "pin");
    FORK_CHECK(cox_pool_pin(pool, &run->kept[1], BOTH, 2, NULL) == 0, "pin");
    /* A block that only a message pins, and then nothing. */
    FORK_CHECK(cox_pool_allocate(pool, size_of(run), &ref, NULL) == 0, "allocate");
    FORK_CHECK(cox_pool_pin(pool, &ref, BOTH, 3, NULL) == 0, "pin");
    FORK_CHECK(cox_pool_unref(pool, &ref, NULL) == 0, "unref");
    FORK_CHECK(cox_pool_ref(pool, &ref, NULL) == 0, "ref");
    FORK_CHECK(cox_pool_unref(pool, &ref, NULL) == 0, "unref");
    cox_pool_unpin(pool, &ref, BOTH, 3);
    FORK_CHECK(cox_pool_ref(pool, &ref, NULL) == COX_STALE, "stale");
    cox_pool_unpin(pool, &run->kept[1], BOTH, 2);
    cox_pool_queue_leave(pool, ALONE);
}

/* A pool that the victim makes itself. */
static void use_own(const struct forks_self *self)
{
    const struct cox_pool_options options = {
        .size = sizeof(struct cox_pool_options), .block_size = 4096, .block_count = 4};
    struct cox_pool *pool = NULL;
    FORK_CHECK(cox_pool_create(&options, &pool, NULL) == 0, "create");
    cox_pool_free(pool);
}

static void victim_main(const struct forks_self *self)
{
    struct run *run = self->context;
    struct cox_pool *pool = NULL;
    char plan[64];
    snprintf(plan, sizeof plan, "%s:kill:%" PRIu32 ":%" PRIu32, run->point, self->rank,
             run->passage);
    cox_fault_arm(plan);
    FORK_CHECK(cox_pool_attach(run->fds, NULL, &pool, NULL) == 0, "attach");
    /* No process has tried to free it, unless the row was taken, which tries. */
    if (cox_pool_ref(pool, &run->left, NULL) == 0)
        FORK_CHECK(cox_pool_unref(pool, &run->left, NULL) == 0, "unref");
    cox_pool_sweep(pool);
    use_references(self, pool);
    use_blocks(self, pool);
    use_pins(self, pool);
    use_own(self);
    cox_pool_free(pool);
    _exit(SPARED);
}

/* ---- the survivor ---- */

static uint64_t pages_of(const struct run *run)
{
    struct stat st;
    assert_int_equal(fstat(run->fds[1], &st), 0);
    return (uint64_t)st.st_blocks * 512;
}

static void check_kept(struct cox_pool *pool, struct run *run)
{
    for (int i = 0; i < KEPT_COUNT; i++) {
        const struct cox_block_ref *ref = &run->kept[i];
        assert_true(block_is(cox_pool_pointer(pool, ref), size_of(run), ref->block, ref->epoch));
        assert_int_equal(cox_pool_ref(pool, ref, NULL), 0);
        assert_int_equal(cox_pool_unref(pool, ref, NULL), 0);
        assert_int_equal(cox_pool_unref(pool, ref, NULL), 0);
        assert_int_equal(cox_pool_unref(pool, ref, NULL), COX_STALE);
    }
}

/* Blocks that only messages pin. */
static uint64_t held_blocks(const struct cox_pool *pool, const struct run *run)
{
    const uint64_t unit_count = pool_stats(pool).size / run->options.block_size;
    uint64_t held = 0;
    for (uint64_t unit = 0; unit < unit_count; unit++) {
        bool is_held = false;
        for (int i = 0; i < COX_POOL_PIN_COUNT_MAX; i++)
            is_held = is_held || atomic_load(&pool->pins[unit].pin_word[i]);
        for (int i = 0; i < KEPT_COUNT; i++)
            is_held = is_held && run->kept[i].block != unit;
        held += is_held;
    }
    return held;
}

/* Every free block can be allocated. */
static void check_free(struct cox_pool *pool, const struct run *run)
{
    const uint64_t count = pool_stats(pool).size / size_of(run);
    struct cox_block_ref *refs = calloc(count, sizeof *refs);
    uint64_t had = 0;
    assert_non_null(refs);
    while (had < count && cox_pool_allocate(pool, size_of(run), &refs[had], NULL) == 0)
        had++;
    assert_int_equal(had, count - KEPT_COUNT);
    while (had > 0)
        assert_int_equal(cox_pool_unref(pool, &refs[--had], NULL), 0);
    free(refs);
}

/* Of the queues. */
static void check_lock(const struct run *run)
{
    const struct cox_pool_layout_header *header =
        mmap(NULL, COX_POOL_PAGE_SIZE, PROT_READ, MAP_SHARED, run->fds[0], 0);
    assert_ptr_not_equal(header, MAP_FAILED);
    assert_int_equal(atomic_load(&header->queues_lock), 0);
    munmap((void *)header, COX_POOL_PAGE_SIZE);
}

static void check_rows_and_queues(struct cox_pool *pool, const struct run *run)
{
    struct cox_pool *others[8];
    assert_int_equal(pool_stats(pool).owner_count, 1);
    for (uint32_t i = 0; i + 1 < run->options.owner_count_max; i++)
        others[i] = pool_attached(pool);
    for (uint32_t i = 0; i + 1 < run->options.owner_count_max; i++)
        cox_pool_free(others[i]);
    for (uint64_t i = 0; i < COX_POOL_QUEUE_COUNT_MAX; i++)
        assert_int_equal(cox_pool_queue_join(pool, 100 + i, NULL), 0);
    for (uint64_t i = 0; i < COX_POOL_QUEUE_COUNT_MAX; i++)
        cox_pool_queue_leave(pool, 100 + i);
}

/* Without a sweep: what the dead process was doing delays no other, and allocate sweeps by itself
 * when it finds nothing. */
static void check_unswept(struct cox_pool *pool, const struct run *run)
{
    const uint64_t count = pool_stats(pool).size / size_of(run);
    struct cox_block_ref *refs = calloc(count, sizeof *refs);
    uint64_t had = 0;
    int r = 0;
    assert_non_null(refs);
    for (int i = 0; i < KEPT_COUNT; i++) {
        const struct cox_block_ref *ref = &run->kept[i];
        assert_int_equal(cox_pool_ref(pool, ref, NULL), 0);
        assert_true(block_is(cox_pool_pointer(pool, ref), size_of(run), ref->block, ref->epoch));
        assert_int_equal(cox_pool_unref(pool, ref, NULL), 0);
    }
    while ((r = cox_pool_allocate(pool, size_of(run), &refs[had], NULL)) == 0) {
        for (uint64_t i = 0; i < had; i++)
            assert_int_not_equal(refs[had].block, refs[i].block);
        for (int i = 0; i < KEPT_COUNT; i++)
            assert_int_not_equal(refs[had].block, run->kept[i].block);
        if (++had == count)
            break;
    }
    assert_int_equal(r, COX_FULL);
    /* A block that cannot be allocated is kept, or pinned for live processes. */
    assert_int_equal(had + KEPT_COUNT, count - held_blocks(pool, run));
    while (had > 0)
        assert_int_equal(cox_pool_unref(pool, &refs[--had], NULL), 0);
    free(refs);
}

static void check_survivor(struct cox_pool *pool, struct run *run)
{
    if (run->passage % 2 == 0)
        check_unswept(pool, run);
    cox_pool_sweep(pool);
    check_lock(run);
    assert_int_equal(pool_stats(pool).reference_count, KEPT_COUNT);
    /* Pins of a queue that both joined stay. */
    assert_true(pool_stats(pool).pin_count >= 2);
    if (run->options.on_demand) { /* pages of used and of retained blocks */
        const struct cox_pool_stats stats = pool_stats(pool);
        assert_true(pages_of(run) <=
                    run->options.retain_size +
                        (stats.block_count - stats.free_count) * (stats.size / stats.block_count));
    }
    cox_pool_queue_leave(pool, BOTH);
    assert_int_equal(pool_stats(pool).pin_count, 0);
    check_free(pool, run);
    check_kept(pool, run);
    if (run->options.on_demand)
        assert_true(pages_of(run) <= run->options.retain_size);
    pool_is_whole(pool);
    if (run->options.on_demand)
        assert_true(pages_of(run) <= run->options.retain_size);
    check_rows_and_queues(pool, run);
}

/* Returns whether the victim was killed. */
static bool strike(const struct run *kind, const char *point, uint32_t passage)
{
    struct run *run = forks_share(sizeof *run);
    struct forks forks;
    *run = *kind;
    run->point = point;
    run->passage = passage;
    struct cox_pool *pool = pool_made(&run->options);
    cox_pool_fds(pool, run->fds);
    for (uint32_t i = 0; i < KEPT_COUNT; i++) {
        struct cox_block_ref *ref = &run->kept[i];
        *ref = pool_allocated(pool, size_of(run));
        block_fill(cox_pool_pointer(pool, ref), size_of(run), ref->block, ref->epoch);
    }
    assert_int_equal(cox_pool_queue_join(pool, BOTH, NULL), 0);
    forks_start(&forks, 1, mess_main, run);
    assert_int_equal(forks_end(&forks, 0), 128 + SIGKILL);
    forks_add(&forks, 1, 2, victim_main, run);
    const int status = forks_end(&forks, 1);
    if (status != 128 + SIGKILL && status != SPARED)
        fail_msg("%s:%" PRIu32 ": the victim ended with %d", point, passage, status);
    check_survivor(pool, run);
    cox_pool_free(pool);
    munmap(run, sizeof *run);
    return status != SPARED;
}

static bool struck[COX_FAULT_POINT_COUNT];

static bool is_of_pools(const char *point)
{
    return strncmp(point, "pool.", 5) == 0 || strncmp(point, "domain.", 7) == 0 ||
           strcmp(point, "memory.created") == 0;
}

static void strike_everywhere(const struct run *kind)
{
    uint32_t count = 0;
    for (int p = 0; p < COX_FAULT_POINT_COUNT; p++) {
        const char *point = cox_fault_name((enum cox_fault_point)p);
        for (uint32_t passage = 1; is_of_pools(point) && strike(kind, point, passage); passage++) {
            struck[p] = true;
            count++;
        }
    }
    print_message("%" PRIu32 " deaths\n", count);
}

/* With options of the pool. */
#define KILL_TEST(name, ...)                                                                       \
    TEST(name)                                                                                     \
    {                                                                                              \
        const struct run kind = {                                                                  \
            .options = {.size = sizeof(struct cox_pool_options), __VA_ARGS__}};                    \
        strike_everywhere(&kind);                                                                  \
    }

/* As many rows as processes live: the victim takes that of the dead one. */
KILL_TEST(b37_b24_h20_killed_with_fixed_blocks, .block_size = 1024, .block_count = 12,
          .owner_count_max = 2)
KILL_TEST(b37_b24_killed_with_fixed_blocks_on_demand, .block_size = 4096, .block_count = 12,
          .owner_count_max = 4, .on_demand = true, .retain_size = 8192)
KILL_TEST(b37_b24_a30_killed_with_slabs, .strategy = COX_POOL_SLAB, .block_size = 1024,
          .slab_size = 4096, .slabs_size = 12 * 4096, .owner_count_max = 4)
KILL_TEST(b37_b24_a30_killed_with_slabs_on_demand, .strategy = COX_POOL_SLAB, .block_size = 1024,
          .slab_size = 4096, .slabs_size = 12 * 4096, .owner_count_max = 4, .on_demand = true,
          .retain_size = 4096)

TEST(b37_every_step_was_struck)
{
    for (int p = 0; p < COX_FAULT_POINT_COUNT; p++)
        if (is_of_pools(cox_fault_name((enum cox_fault_point)p)) && !struck[p])
            fail_msg("nobody was killed at %s", cox_fault_name((enum cox_fault_point)p));
}

#endif
