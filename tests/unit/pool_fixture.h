/*
 * pool_fixture: what the tests of pools share: pools in this process, a domain that fails when it
 * is told to, blocks whose bytes tell whose they are.
 *
 * Processes and threads: the caller's.
 * Ownership: pools are the caller's.
 */
#ifndef COX_TESTS_UNIT_POOL_FIXTURE_H
#define COX_TESTS_UNIT_POOL_FIXTURE_H

#include "channel/memory/pool/pool.h"

/* A domain of the test's own: host memory, whose functions fail while `fails` says so. */
#define FAILING_KIND COX_DOMAIN_USER_FIRST
struct failing {
    /* what these return; 0: as they should */
    int create, attach, commit;
    uint32_t commit_count, decommit_count;
};
/* On top of a table's host domain. */
extern const struct cox_domain_functions failing_functions;
extern struct failing failing;

/* Fails the test (cmocka) when that does not work. */
struct cox_pool *pool_made(const struct cox_pool_options *options);
struct cox_pool *pool_attached(const struct cox_pool *pool);
struct cox_block_ref pool_allocated(struct cox_pool *pool, uint64_t size);
struct cox_pool_stats pool_stats(const struct cox_pool *pool);
/* Nothing is used, nothing is counted or held, and every block can be had: of a fixed pool, or
 * slabs of one size. */
void pool_is_whole(struct cox_pool *pool);

/* Bytes that only this block of this generation has. */
void block_fill(void *bytes, uint64_t size, uint32_t block, uint64_t generation);
bool block_is(const void *bytes, uint64_t size, uint32_t block, uint64_t generation);

#endif
