/*
 * queue_fixture: shared by tests of queues: pools of known blocks, and shortcuts to publish and
 * take.
 *
 * Threads and processes: any. A failure ends the process by COX_ASSERT, so forked processes can use
 *   it, too.
 * Ownership: the caller owns what is returned.
 * Blocks: nothing.
 */
#ifndef COX_TESTS_UNIT_QUEUE_FIXTURE_H
#define COX_TESTS_UNIT_QUEUE_FIXTURE_H

#include <coxswain/memory/queue.h>

#define FIXTURE_BLOCK_SIZE 4096

/* A fixed pool in the domain of that kind, which domains must have. */
struct cox_pool *fixture_pool(const struct cox_domains *domains, uint32_t kind,
                              uint32_t block_count);
struct cox_queue *fixture_queue(uint32_t depth);
struct cox_publisher *fixture_publisher(struct cox_queue *queue, struct cox_pool *pool,
                                        const struct cox_domains *domains,
                                        struct cox_exporter *exporter);
/* pool, pools and exporter may be NULL. */
struct cox_subscriber *fixture_subscriber(struct cox_queue *queue, struct cox_pool *pool,
                                          struct cox_pool *const *pools, uint32_t pool_count,
                                          const struct cox_domains *domains,
                                          struct cox_exporter *exporter);
/* Bytes computed from the user data, so that readers can check them. */
void fixture_fill(void *bytes, uint64_t length, uint64_t user_data);
bool fixture_is_filled(const void *bytes, uint64_t length, uint64_t user_data);
/* Allocates and fills a block, publishes it, and releases its own reference. Returns as publish or
 * allocate. */
int fixture_publish(struct cox_publisher *publisher, struct cox_pool *pool, uint64_t length,
                    uint64_t user_data, uint64_t *ret_number);
/* True: the message's bytes match its user data. */
bool fixture_is_sound(const struct cox_message *message);
void fixture_let_go(const struct cox_message *message);
/* Number of blocks that are referenced or pinned. */
uint32_t fixture_used(const struct cox_pool *pool);

#endif
