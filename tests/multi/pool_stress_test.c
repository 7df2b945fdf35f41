/*
 * Processes (or threads) that allocate, share, pin and free concurrently, each block with bytes
 * that identify it; some processes are killed at random moments.
 */
#include "channel/base/tsan.h"
#include "memory/pool/pool_internal.h"
#include "tests/unit/pool_fixture.h"
#include "forks.h"
#include "ranks.h"
#include "testing.h"

#define BOX_COUNT 16
#define OWN_COUNT 8
#define QUEUE_ID 77
#define THREAD_COUNT 2 /* per process; they share its row */
#define BLOCK_SIZE 1024

#ifdef COX_TSAN
#define ROUNDS 1000
#else
#define ROUNDS 10000
#endif
#define KILLS 25

struct stress {
    int fds[2];
    bool is_slab;
    bool for_ever;
    /* allocated blocks: box_of */
    _Atomic uint64_t boxes[BOX_COUNT];
    _Atomic uint64_t progress[FORKS_MAX];
    _Atomic uint64_t shared, stale, full;
    /* ranks that have released all and know it */
    _Atomic uint32_t dropped, looked;
};

/* {epoch:32, class:8, block:24} */
static uint64_t box_of(const struct cox_block_ref *ref)
{
    uint64_t class = 0;
    while (UINT64_C(64) << class < ref->size)
        class ++;
    return ref->epoch << 32 | class << 24 | ref->block;
}

static struct cox_block_ref ref_of(const struct cox_pool *pool, uint64_t box)
{
    return (struct cox_block_ref){cox_pool_id(pool), box >> 32, UINT64_C(64) << (box >> 24 & 0xff),
                                  (uint32_t)(box & 0xffffff), 0};
}

static uint64_t random_next(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    return *state ^= *state << 17;
}

/* Per thread: one reference to each, and maybe a pin. */
struct own {
    struct cox_block_ref refs[OWN_COUNT];
    /* 0: not pinned */
    uint64_t tags[OWN_COUNT];
    uint64_t tag;
    uint64_t random;
    struct cox_pool *pool;
    const struct forks_self *self;
};

static void check_bytes(const struct forks_self *self, const struct own *own,
                        const struct cox_block_ref *ref)
{
    FORK_CHECK(block_is(cox_pool_pointer(own->pool, ref), ref->size, ref->block, ref->epoch),
               "block %" PRIu32 " epoch %" PRIu64, ref->block, ref->epoch);
}

static void drop(const struct forks_self *self, struct own *own, uint32_t at)
{
    struct cox_block_ref *ref = &own->refs[at];
    if (ref->pool == 0)
        return;
    check_bytes(self, own, ref);
    if (own->tags[at] && own->tags[at] % 2)
        cox_pool_unpin(own->pool, ref, QUEUE_ID, own->tags[at]);
    FORK_CHECK(cox_pool_unref(own->pool, ref, NULL) == 0, "unref");
    if (own->tags[at] && own->tags[at] % 2 == 0) /* the message was the last to count it */
        cox_pool_unpin(own->pool, ref, QUEUE_ID, own->tags[at]);
    *ref = (struct cox_block_ref){0};
    own->tags[at] = 0;
}

static void make(const struct forks_self *self, struct own *own, uint32_t at)
{
    struct stress *stress = self->context;
    uint64_t size = BLOCK_SIZE;
    if (stress->is_slab)
        size = UINT64_C(64) << (random_next(&own->random) % 32 ? random_next(&own->random) % 6
                                                               : random_next(&own->random) % 11);
    int r = cox_pool_allocate(own->pool, size, &own->refs[at], test_err());
    if (r == COX_FULL) {
        atomic_fetch_add_explicit(&stress->full, 1, memory_order_relaxed);
        return;
    }
    FORK_CHECK(r == 0, "%d %s", r, test_error.text);
    const struct cox_block_ref *ref = &own->refs[at];
    block_fill(cox_pool_pointer(own->pool, ref), size, ref->block, ref->epoch);
    if (random_next(&own->random) % 4 == 0) {
        own->tags[at] = ++own->tag;
        FORK_OK(cox_pool_pin(own->pool, ref, QUEUE_ID, own->tags[at], test_err()));
    }
    /* release: a thread that has the number sees the block filled */
    atomic_store_explicit(&stress->boxes[random_next(&own->random) % BOX_COUNT], box_of(ref),
                          memory_order_release);
}

static void share(const struct forks_self *self, struct own *own, uint32_t at)
{
    struct stress *stress = self->context;
    const uint64_t box = atomic_load_explicit(&stress->boxes[random_next(&own->random) % BOX_COUNT],
                                              memory_order_acquire);
    if (box == 0)
        return;
    const struct cox_block_ref ref = ref_of(own->pool, box);
    int r = cox_pool_ref(own->pool, &ref, test_err());
    FORK_CHECK(r == 0 || r == COX_STALE, "%d %s", r, test_error.text);
    atomic_fetch_add_explicit(r ? &stress->stale : &stress->shared, 1, memory_order_relaxed);
    if (r)
        return;
    check_bytes(self, own, &ref);
    own->refs[at] = ref;
}

static void *thread_main(void *argument)
{
    struct own *own = argument;
    const struct forks_self *self = own->self;
    struct stress *stress = self->context;
    for (uint64_t round = 0; stress->for_ever || round < ROUNDS; round++) {
        const uint32_t at = (uint32_t)(random_next(&own->random) % OWN_COUNT);
        drop(self, own, at);
        if (random_next(&own->random) % 2)
            make(self, own, at);
        else
            share(self, own, at);
        if (round % 512 == 0)
            cox_pool_sweep(own->pool);
        atomic_fetch_add(&stress->progress[self->rank], 1);
    }
    for (uint32_t at = 0; at < OWN_COUNT; at++)
        drop(self, own, at);
    return NULL;
}

/* All ranks have released all, and none has left, which would scan every block: all blocks are
 * free. */
static void check_all_free(const struct forks_self *self, const struct cox_pool *pool)
{
    struct stress *stress = self->context;
    struct cox_pool_stats stats;
    atomic_fetch_add(&stress->dropped, 1);
    AWAIT(atomic_load(&stress->dropped) >= self->rank_count);
    cox_pool_read_stats(pool, &stats);
    FORK_CHECK(stats.free_count == stats.block_count && stats.reference_count == 0 &&
                   stats.allocated == stats.freed,
               "%" PRIu32 " of %" PRIu32 " free", stats.free_count, stats.block_count);
    atomic_fetch_add(&stress->looked, 1);
    AWAIT(atomic_load(&stress->looked) >= self->rank_count);
}

static void stress_main(const struct forks_self *self)
{
    struct stress *stress = self->context;
    struct cox_pool *pool = NULL;
    struct own *owns = calloc(THREAD_COUNT, sizeof *owns);
    pthread_t threads[THREAD_COUNT];
    FORK_CHECK(owns, "calloc");
    FORK_OK(cox_pool_attach(stress->fds, NULL, &pool, test_err()));
    FORK_OK(cox_pool_queue_join(pool, QUEUE_ID, test_err()));
    for (uint32_t i = 0; i < THREAD_COUNT; i++) {
        struct own *own = &owns[i];
        *own = (struct own){.pool = pool, .self = self};
        /* Tags of all incarnations of all ranks differ. */
        own->tag = ((atomic_load(&stress->progress[self->rank]) * UINT64_C(64) + self->rank) *
                        THREAD_COUNT +
                    i)
                   << 16;
        own->random = own->tag + cox_now_ns() + self->rank + 1;
        FORK_CHECK(pthread_create(&threads[i], NULL, thread_main, own) == 0, "thread");
    }
    for (uint32_t i = 0; i < THREAD_COUNT; i++)
        pthread_join(threads[i], NULL);
    check_all_free(self, pool);
    cox_pool_free(pool);
    free(owns);
}

static const struct cox_pool_options kinds[] = {
    {.size = sizeof(struct cox_pool_options), .block_size = BLOCK_SIZE, .block_count = 100},
    {.size = sizeof(struct cox_pool_options),
     .strategy = COX_POOL_SLAB,
     .block_size = 64,
     .slab_size = 4096,
     .slabs_size = 512 << 10},
    {.size = sizeof(struct cox_pool_options),
     .strategy = COX_POOL_SLAB,
     .block_size = 64,
     .slab_size = 4096,
     .slabs_size = 512 << 10,
     .on_demand = true,
     .retain_size = 16384},
    {.size = sizeof(struct cox_pool_options),
     .block_size = 4096,
     .block_count = 100,
     .on_demand = true,
     .retain_size = 8 * 4096},
};
#define KIND_COUNT (sizeof kinds / sizeof kinds[0])

static struct stress *stress_new(const struct cox_pool_options *options, struct cox_pool **ret_pool)
{
    struct stress *stress = forks_share(sizeof *stress);
    struct cox_pool_options all = *options;
    all.owner_count_max = 64;
    *ret_pool = pool_made(&all);
    cox_pool_fds(*ret_pool, stress->fds);
    stress->is_slab = options->strategy == COX_POOL_SLAB;
    return stress;
}

static void stress_ends(struct stress *stress, struct cox_pool *pool)
{
    print_message("shared %" PRIu64 ", stale %" PRIu64 ", full %" PRIu64 "\n",
                  atomic_load(&stress->shared), atomic_load(&stress->stale),
                  atomic_load(&stress->full));
    assert_true(atomic_load(&stress->shared) > 0);
    assert_true(atomic_load(&stress->stale) > 0);
    cox_pool_sweep(pool);
    pool_is_whole(pool);
    assert_int_equal(pool_stats(pool).owner_count, 1);
    cox_pool_free(pool);
}

TEST(b31_b24_a30_h28_many_at_once)
{
    static const uint32_t counts[] = {2, 4, 8};
    for (size_t kind = 0; kind < KIND_COUNT; kind++)
        for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
            struct cox_pool *pool;
            struct stress *stress = stress_new(&kinds[kind], &pool);
            forks_run(counts[i], stress_main, stress);
            stress_ends(stress, pool);
        }
}

/* Each is killed after a few more steps of its own. */
TEST(b37_b24_many_at_once_and_killed)
{
    test_needs_processes();
    uint64_t random = 12345;
    for (size_t kind = 0; kind < KIND_COUNT; kind++) {
        struct cox_pool *pool;
        struct stress *stress = stress_new(&kinds[kind], &pool);
        struct forks forks;
        uint32_t ranks[4] = {0, 1, 2, 3}; /* by rank: its place in forks */
        stress->for_ever = true;
        forks_start(&forks, 4, stress_main, stress);
        for (int kills = 0; kills < KILLS; kills++) {
            const uint32_t rank = (uint32_t)(random_next(&random) % 4);
            const uint64_t until =
                atomic_load(&stress->progress[rank]) + 1 + random_next(&random) % 1000;
            AWAIT(atomic_load(&stress->progress[rank]) >= until);
            kill(forks.pids[ranks[rank]], SIGKILL);
            assert_int_equal(forks_end(&forks, ranks[rank]), 128 + SIGKILL);
            ranks[rank] = forks.count;
            forks_add(&forks, rank, 4, stress_main, stress);
        }
        for (uint32_t rank = 0; rank < 4; rank++)
            kill(forks.pids[ranks[rank]], SIGKILL);
        for (uint32_t rank = 0; rank < 4; rank++)
            assert_int_equal(forks_end(&forks, ranks[rank]), 128 + SIGKILL);
        stress_ends(stress, pool);
    }
}
