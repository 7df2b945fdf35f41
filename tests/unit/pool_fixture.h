/*
 * pool_fixture: shared by tests of pools: pools in this process, a domain that fails on demand, and
 * blocks with recognizable bytes.
 *
 * Processes and threads: the caller's.
 * Ownership: the caller owns pools.
 */
#ifndef COX_TESTS_UNIT_POOL_FIXTURE_H
#define COX_TESTS_UNIT_POOL_FIXTURE_H

#include <coxswain/memory/pool.h>

/* A user-defined domain: host memory whose functions fail as `fails` says. */
#define FAILING_KIND COX_DOMAIN_USER_FIRST
struct failing {
    /* codes that the functions return; 0: they work */
    int create, attach, commit, copy_to;
    uint32_t commit_count, decommit_count;
};
/* Adds the domain to a table, on top of the table's host domain. */
extern const struct cox_domain_functions failing_functions;
extern struct failing failing;

/* Fails the test (cmocka) on error. */
struct cox_pool *pool_made(const struct cox_pool_options *options);
struct cox_pool *pool_attached(const struct cox_pool *pool);
/* The same, and the test's own. */
struct cox_pool *own_pool(const struct cox_pool_options *options);
struct cox_pool *own_attached(const struct cox_pool *pool);
struct cox_block_ref pool_allocated(struct cox_pool *pool, uint64_t size);
struct cox_pool_stats pool_stats(const struct cox_pool *pool);
/* Asserts that no block is used, counted or pinned, and that every block can be allocated: of a
 * fixed pool, or of slabs of one size. */
void pool_is_whole(struct cox_pool *pool);

/* Bytes unique to this block and epoch. */
void block_fill(void *bytes, uint64_t size, uint32_t block, uint64_t epoch);
bool block_is(const void *bytes, uint64_t size, uint32_t block, uint64_t epoch);

#endif
