/* Slabs, runs of slabs, and memory on demand. */
#include "memory/pool/pool_internal.h"
#include "channel_fixture.h"
#include "pool_fixture.h"

#define SLAB UINT64_C(65536)
#define SLAB_COUNT 16

static const struct cox_pool_options slabs = {.size = sizeof(struct cox_pool_options),
                                              .strategy = COX_POOL_SLAB,
                                              .block_size = 64,
                                              .slabs_size = SLAB_COUNT * SLAB};

static int setup(void **state)
{
    failing = (struct failing){0};
    return leak_setup(state);
}

#define SLAB_TEST(name) TEST_WITH(name, setup, leak_teardown)
static void drop(struct cox_pool *pool, struct cox_block_ref *refs, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        assert_int_equal(cox_pool_unref(pool, &refs[i], NULL), 0);
}

SLAB_TEST(a30_h21_sizes_are_classes)
{
    struct cox_pool *pool = own_pool(&slabs);
    struct cox_block_ref found, ref;
    assert_int_equal(pool->geometry.block_size, 64);
    for (uint64_t size = 1; size <= SLAB_COUNT * SLAB; size += size < 200 ? 1 : size / 7) {
        uint64_t room = 64, offset = 1;
        while (room < size)
            room = room < SLAB ? room * 2 : room + SLAB;
        ref = pool_allocated(pool, size);
        assert_int_equal(cox_pool_offset(pool, &ref, &offset), 0);
        assert_int_equal(offset % (room < SLAB ? room : SLAB), 0);
        assert_int_equal(pool_stats(pool).used_size, room);
        assert_int_equal(cox_pool_find(pool, offset + size - 1, &found), 0);
        assert_int_equal(found.block, ref.block);
        assert_int_equal(found.epoch, ref.epoch);
        assert_int_equal(found.size, room);
        assert_int_equal(
            cox_pool_find_pointer(pool, (uint8_t *)cox_pool_pointer(pool, &ref) + room - 1, &found),
            0);
        assert_int_equal(found.block, ref.block);
        /* More than the block has, less than the pool has. */
        struct cox_block_ref longer = ref;
        longer.size = room + 1;
        assert_int_equal(cox_pool_ref(pool, &longer, NULL), COX_INVALID);
        assert_int_equal(cox_pool_unref(pool, &ref, NULL), 0);
        assert_int_equal(cox_pool_find(pool, offset, &found), COX_NOT_FOUND);
    }
    assert_int_equal(cox_pool_allocate(pool, SLAB_COUNT * SLAB + 1, &ref, NULL), COX_TOO_LARGE);
    pool_is_whole(pool);
}

/* Blocks of all sizes in any order; a table shows that they do not overlap. */
SLAB_TEST(a30_h28_no_two_blocks_overlap)
{
    struct cox_pool *pool = own_pool(&slabs), *other = own_attached(pool);
    static struct cox_block_ref refs[4000];
    static uint8_t units[SLAB_COUNT * SLAB / 64];
    uint64_t random = 99;
    uint32_t count = 0, full = 0;
    memset(units, 0, sizeof units);
    for (int step = 0; step < 60000; step++) {
        struct cox_pool *who = random_next(&random) % 2 ? pool : other;
        const bool grows =
            step / 5000 % 2 == 0 ? random_next(&random) % 8 < 5 : random_next(&random) % 8 < 3;
        if (grows && count < 4000) {
            const uint64_t size =
                1 + random_next(&random) % (UINT64_C(64) << random_next(&random) % 13);
            int r = cox_pool_allocate(who, size, &refs[count], NULL);
            if (r == COX_FULL) {
                full++;
                continue;
            }
            assert_int_equal(r, 0);
            for (uint64_t unit = 0; unit < (size + 63) / 64; unit++)
                assert_int_equal(units[refs[count].block + unit]++, 0);
            if (who == other) { /* in the end pool has all */
                assert_int_equal(cox_pool_ref(pool, &refs[count], NULL), 0);
                assert_int_equal(cox_pool_unref(other, &refs[count], NULL), 0);
            }
            count++;
        } else if (count > 0) {
            const uint32_t at = (uint32_t)(random_next(&random) % count);
            for (uint64_t unit = 0; unit < (refs[at].size + 63) / 64; unit++)
                units[refs[at].block + unit]--;
            if (who == other) { /* freed by another process */
                assert_int_equal(cox_pool_ref(other, &refs[at], NULL), 0);
                assert_int_equal(cox_pool_unref(pool, &refs[at], NULL), 0);
                assert_int_equal(cox_pool_unref(other, &refs[at], NULL), 0);
            } else {
                assert_int_equal(cox_pool_unref(pool, &refs[at], NULL), 0);
            }
            refs[at] = refs[--count];
        }
    }
    assert_true(full > 0);
    drop(pool, refs, count);
    pool_is_whole(pool);
    struct cox_block_ref all = pool_allocated(other, SLAB_COUNT * SLAB);
    assert_int_equal(cox_pool_unref(other, &all, NULL), 0);
}

SLAB_TEST(a30_empty_slabs_take_another_size)
{
    struct cox_pool *pool = own_pool(&slabs);
    static struct cox_block_ref refs[SLAB_COUNT * 1024];
    for (uint64_t size = 64; size <= SLAB; size *= 2) {
        const uint32_t count = (uint32_t)(SLAB_COUNT * SLAB / size);
        for (uint32_t i = 0; i < count; i++)
            refs[i] = pool_allocated(pool, size);
        assert_int_equal(cox_pool_allocate(pool, size, &refs[count], NULL), COX_FULL);
        assert_int_equal(pool_stats(pool).free_count, 0);
        assert_int_equal(pool_stats(pool).used_size, SLAB_COUNT * SLAB);
        drop(pool, refs, count);
        assert_int_equal(pool_stats(pool).free_count, SLAB_COUNT);
    }
    /* A run of adjacent slabs: one block in the middle prevents it, until it is freed. */
    refs[0] = pool_allocated(pool, SLAB * 7);
    refs[1] = pool_allocated(pool, 64);
    refs[2] = pool_allocated(pool, SLAB * 7 + 1);
    assert_int_equal(cox_pool_allocate(pool, SLAB + 1, &refs[3], NULL), COX_FULL);
    assert_int_equal(cox_pool_unref(pool, &refs[0], NULL), 0);
    assert_int_equal(cox_pool_unref(pool, &refs[2], NULL), 0);
    assert_int_equal(cox_pool_allocate(pool, SLAB * 9, &refs[3], NULL), COX_FULL);
    assert_int_equal(cox_pool_unref(pool, &refs[1], NULL), 0);
    refs[3] = pool_allocated(pool, SLAB * 16);
    assert_int_equal(cox_pool_unref(pool, &refs[3], NULL), 0);
    pool_is_whole(pool);
}

SLAB_TEST(b24_p9_references_outlive_no_slab)
{
    struct cox_pool *pool = own_pool(&slabs), *other = own_attached(pool);
    struct cox_block_ref small = pool_allocated(pool, 64), large, next;
    next = pool_allocated(pool, 64);
    assert_int_equal(cox_pool_unref(pool, &small, NULL), 0);
    assert_int_equal(cox_pool_unref(pool, &next, NULL), 0);
    large = pool_allocated(pool, SLAB_COUNT * SLAB);
    assert_int_equal(large.block, small.block); /* the same place */
    assert_int_equal(cox_pool_ref(other, &small, NULL), COX_STALE);
    assert_int_equal(cox_pool_ref(other, &next, NULL), COX_STALE); /* in its middle */
    assert_int_equal(cox_pool_unref(pool, &next, NULL), COX_STALE);
    assert_int_equal(cox_pool_unref(pool, &large, NULL), 0);
    test_release(other);
    pool_is_whole(pool);
}

/* ---- on demand ---- */

TEST_OWNED(cox_domains_free)

static struct cox_domains *failing_domains(void)
{
    struct cox_domains *domains = NULL;
    assert_int_equal(cox_domains_new(&domains), 0);
    assert_int_equal(cox_domains_add(domains, FAILING_KIND, 1, &failing_functions, NULL, NULL), 0);
    return test_own(domains, cox_domains_free_owned);
}

static uint64_t pages_of(const struct cox_pool *pool)
{
    struct stat st;
    int fds[2];
    cox_pool_fds(pool, fds);
    assert_int_equal(fstat(fds[1], &st), 0);
    return (uint64_t)st.st_blocks * 512;
}

SLAB_TEST(h27_h28_a_domain_that_fails_is_reported)
{
    struct cox_domains *domains = failing_domains();
    struct cox_pool_options options = {.size = sizeof(struct cox_pool_options),
                                       .domains = domains,
                                       .domain = {FAILING_KIND, 0},
                                       .block_size = 4096,
                                       .block_count = 8};
    struct cox_pool *pool = NULL, *other = NULL;
    failing.create = COX_NO_SPACE;
    assert_refused(cox_pool_create(&options, &pool, test_err()), COX_NO_SPACE, "today");
    failing.create = -ENODEV;
    assert_int_equal(cox_pool_create(&options, &pool, NULL), -ENODEV);
    assert_null(pool);
    failing.create = 0;
    pool = own_pool(&options);
    int fds[2];
    cox_pool_fds(pool, fds);
    const struct cox_pool_attach_options attach = {.size = sizeof(struct cox_pool_attach_options),
                                                   .domains = domains};
    /* A process that does not know the domain, and one whose domain refuses. */
    assert_int_equal(cox_pool_attach(fds, NULL, &other, NULL), COX_INVALID);
    failing.attach = COX_DENIED;
    assert_int_equal(cox_pool_attach(fds, &attach, &other, NULL), COX_DENIED);
    failing.attach = 0;
    assert_int_equal(cox_pool_attach(fds, &attach, &other, NULL), 0);
    struct cox_block_ref ref = pool_allocated(pool, 4096);
    assert_int_equal(cox_pool_ref(other, &ref, NULL), 0);
    cox_pool_free(other);
}

static void pages_follow(const struct cox_pool_options *options, uint64_t size)
{
    struct cox_pool *pool = own_pool(options);
    const uint64_t page = options->slab_size ? options->slab_size : options->block_size;
    struct cox_block_ref refs[8];
    assert_int_equal(pages_of(pool), 0);
    for (uint32_t i = 0; i < 8; i++) {
        refs[i] = pool_allocated(pool, size);
        assert_int_equal(pages_of(pool), (i + 1) * page);
        memset(cox_pool_pointer(pool, &refs[i]), 0xff, size);
    }
    /* A block that another process reads keeps its pages. */
    struct cox_pool *other = own_attached(pool);
    assert_int_equal(cox_pool_ref(other, &refs[0], NULL), 0);
    drop(pool, refs, 8);
    assert_int_equal(pages_of(pool), options->retain_size + page);
    assert_int_equal(((uint8_t *)cox_pool_pointer(other, &refs[0]))[size - 1], 0xff);
    assert_int_equal(cox_pool_unref(other, &refs[0], NULL), 0);
    assert_int_equal(pages_of(pool), options->retain_size);
    /* Retained pages are used before others are allocated. */
    const uint32_t retained = (uint32_t)(options->retain_size / page);
    if (options->slab_size) {
        for (uint32_t i = 0; i < retained; i++)
            refs[i] = pool_allocated(pool, size);
        assert_int_equal(pages_of(pool), options->retain_size);
        drop(pool, refs, retained);
    }
    test_release(other);
    pool_is_whole(pool);
    test_release(pool);
}

SLAB_TEST(h18_on_demand_pages_come_and_go)
{
    struct cox_pool_options fixed = {.size = sizeof(struct cox_pool_options),
                                     .block_size = 8192,
                                     .block_count = 20,
                                     .on_demand = true};
    struct cox_pool_options slab = {.size = sizeof(struct cox_pool_options),
                                    .strategy = COX_POOL_SLAB,
                                    .block_size = 64,
                                    .slab_size = 16384,
                                    .slabs_size = 20 * 16384,
                                    .on_demand = true};
    pages_follow(&fixed, 8192);
    fixed.retain_size = 3 * 8192;
    pages_follow(&fixed, 8000);
    pages_follow(&slab, 16384);
    slab.retain_size = 2 * 16384;
    pages_follow(&slab, 10000);
}

SLAB_TEST(h18_on_demand_a_run_has_pages)
{
    const struct cox_pool_options slab = {.size = sizeof(struct cox_pool_options),
                                          .strategy = COX_POOL_SLAB,
                                          .block_size = 64,
                                          .slab_size = 16384,
                                          .slabs_size = 20 * 16384,
                                          .on_demand = true,
                                          .retain_size = 16384};
    struct cox_pool *pool = own_pool(&slab);
    struct cox_block_ref ref = pool_allocated(pool, 5 * 16384);
    assert_int_equal(pages_of(pool), 5 * 16384);
    assert_int_equal(cox_pool_unref(pool, &ref, NULL), 0);
    assert_int_equal(pages_of(pool), 16384);
    ref = pool_allocated(pool, 20 * 16384);
    assert_int_equal(pages_of(pool), 20 * 16384);
    assert_int_equal(cox_pool_unref(pool, &ref, NULL), 0);
    assert_int_equal(pages_of(pool), 16384);
    pool_is_whole(pool);
}

static void no_pages(struct cox_pool_options options, uint64_t size, uint64_t retained)
{
    struct cox_domains *domains = failing_domains();
    struct cox_pool *pool;
    struct cox_block_ref refs[8], none;
    options.domains = domains;
    options.domain = (struct cox_domain_id){FAILING_KIND, 0};
    options.on_demand = true;
    options.retain_size = retained * size;
    pool = own_pool(&options);
    for (uint32_t i = 0; i < 8; i++)
        refs[i] = pool_allocated(pool, size);
    drop(pool, refs, 8);
    /* Without free memory, blocks with pages can be allocated; a failed try loses none. */
    failing.commit = COX_NO_SPACE;
    for (int round = 0; round < 3; round++) {
        for (uint32_t i = 0; i < retained; i++)
            refs[i] = pool_allocated(pool, size);
        assert_refused(cox_pool_allocate(pool, size, &none, test_err()), COX_NO_SPACE, "today");
        assert_int_equal(pool_stats(pool).reference_count, retained);
        drop(pool, refs, (uint32_t)retained);
    }
    failing.commit = 0;
    pool_is_whole(pool);
    assert_int_equal(pages_of(pool), retained * size);
    test_release(pool);
}

SLAB_TEST(h18_h28_no_pages_is_an_error_and_no_loss)
{
    no_pages((struct cox_pool_options){.size = sizeof(struct cox_pool_options),
                                       .block_size = 8192,
                                       .block_count = 20},
             8192, 3);
    no_pages((struct cox_pool_options){.size = sizeof(struct cox_pool_options),
                                       .block_size = 8192,
                                       .block_count = 20},
             8192, 0);
    no_pages((struct cox_pool_options){.size = sizeof(struct cox_pool_options),
                                       .strategy = COX_POOL_SLAB,
                                       .block_size = 4096,
                                       .slab_size = 16384,
                                       .slabs_size = 20 * 16384},
             16384, 3);
    no_pages((struct cox_pool_options){.size = sizeof(struct cox_pool_options),
                                       .strategy = COX_POOL_SLAB,
                                       .block_size = 4096,
                                       .slab_size = 16384,
                                       .slabs_size = 20 * 16384},
             16384, 0);
}
