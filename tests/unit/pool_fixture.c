#include "pool_fixture.h"

#include "memory/domain/domain_table.h"
#include "tests/lib/test.h"

struct failing failing;

static int failing_create(void *context, uint32_t device, uint64_t size, bool on_demand,
                          struct cox_domain_memory **ret_memory, struct cox_error *err)
{
    if (failing.create)
        return cox_fail(err, failing.create, "no memory today");
    int r = cox_domain_host_functions.create(context, device, size, on_demand, ret_memory, err);
    if (r == 0)
        (*ret_memory)->functions = &failing_functions;
    return r;
}

static int failing_attach(void *context, uint32_t device, int fd, uint64_t size, bool writable,
                          struct cox_domain_memory **ret_memory, struct cox_error *err)
{
    if (failing.attach)
        return cox_fail(err, failing.attach, "not this one");
    int r = cox_domain_host_functions.attach(context, device, fd, size, writable, ret_memory, err);
    if (r == 0)
        (*ret_memory)->functions = &failing_functions;
    return r;
}

static int failing_commit(struct cox_domain_memory *memory, uint64_t offset, uint64_t size,
                          struct cox_error *err)
{
    failing.commit_count++;
    if (failing.commit)
        return cox_fail(err, failing.commit, "no pages today");
    return cox_domain_host_functions.commit(memory, offset, size, err);
}

static void failing_decommit(struct cox_domain_memory *memory, uint64_t offset, uint64_t size)
{
    failing.decommit_count++;
    cox_domain_host_functions.decommit(memory, offset, size);
}

static void failing_destroy(struct cox_domain_memory *memory)
{
    cox_domain_host_functions.destroy(memory);
}

static int failing_copy_to(struct cox_domain_memory *memory, uint64_t offset, const void *host,
                           size_t size, struct cox_error *err)
{
    if (failing.copy_to)
        return cox_fail(err, failing.copy_to, "no copies today");
    return cox_domain_host_functions.copy_to(memory, offset, host, size, err);
}

static int failing_copy_from(struct cox_domain_memory *memory, uint64_t offset, void *host,
                             size_t size, struct cox_error *err)
{
    return cox_domain_host_functions.copy_from(memory, offset, host, size, err);
}

const struct cox_domain_functions failing_functions = {
    .name = "failing",
    .create = failing_create,
    .attach = failing_attach,
    .destroy = failing_destroy,
    .copy_to = failing_copy_to,
    .copy_from = failing_copy_from,
    .commit = failing_commit,
    .decommit = failing_decommit,
};

struct cox_pool *pool_made(const struct cox_pool_options *options)
{
    struct cox_pool *pool = NULL;
    assert_ok(cox_pool_create(options, &pool, test_err()));
    return pool;
}

struct cox_pool *pool_attached(const struct cox_pool *pool)
{
    struct cox_pool *attached = NULL;
    int fds[2];
    cox_pool_fds(pool, fds);
    assert_ok(cox_pool_attach(fds, NULL, &attached, test_err()));
    return attached;
}

TEST_OWNED(cox_pool_free)

struct cox_pool *own_pool(const struct cox_pool_options *options)
{
    return test_own(pool_made(options), cox_pool_free_owned);
}

struct cox_pool *own_attached(const struct cox_pool *pool)
{
    return test_own(pool_attached(pool), cox_pool_free_owned);
}

struct cox_block_ref pool_allocated(struct cox_pool *pool, uint64_t size)
{
    struct cox_block_ref ref = {0};
    assert_ok(cox_pool_allocate(pool, size, &ref, test_err()));
    return ref;
}

struct cox_pool_stats pool_stats(const struct cox_pool *pool)
{
    struct cox_pool_stats stats;
    cox_pool_read_stats(pool, &stats);
    return stats;
}

void pool_is_whole(struct cox_pool *pool)
{
    struct cox_pool_stats stats = pool_stats(pool);
    const uint64_t size = stats.size / stats.block_count;
    assert_int_equal(stats.free_count, stats.block_count);
    assert_int_equal(stats.used_size, 0);
    assert_int_equal(stats.reference_count, 0);
    assert_int_equal(stats.pin_count, 0);
    struct cox_block_ref *refs = calloc(stats.block_count, sizeof *refs);
    assert_non_null(refs);
    for (uint32_t i = 0; i < stats.block_count; i++)
        refs[i] = pool_allocated(pool, size);
    struct cox_block_ref none;
    assert_int_equal(cox_pool_allocate(pool, size, &none, NULL), COX_FULL);
    for (uint32_t i = 0; i < stats.block_count; i++)
        assert_int_equal(cox_pool_unref(pool, &refs[i], NULL), 0);
    free(refs);
    assert_int_equal(pool_stats(pool).free_count, stats.block_count);
}

static uint64_t mix(uint64_t x)
{
    x ^= x >> 33;
    x *= UINT64_C(0xff51afd7ed558ccd);
    return x ^ (x >> 29);
}

void block_fill(void *bytes, uint64_t size, uint32_t block, uint64_t epoch)
{
    uint64_t *words = bytes;
    const uint64_t seed = mix(epoch << 24 ^ block);
    for (uint64_t i = 0; i < size / sizeof *words; i++)
        words[i] = seed + i * UINT64_C(0x9e3779b97f4a7c15);
}

bool block_is(const void *bytes, uint64_t size, uint32_t block, uint64_t epoch)
{
    const uint64_t *words = bytes;
    const uint64_t seed = mix(epoch << 24 ^ block);
    for (uint64_t i = 0; i < size / sizeof *words; i++)
        if (words[i] != seed + i * UINT64_C(0x9e3779b97f4a7c15))
            return false;
    return true;
}
