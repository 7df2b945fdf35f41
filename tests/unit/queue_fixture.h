/*
 * queue_fixture: what tests of queues share: pools of known blocks, and short ways to publish and
 * take.
 *
 * Threads and processes: any; what goes wrong ends the process by COX_ASSERT, so that forked
 * processes may use it, too. Ownership: what is returned is the caller's. Blocks: nothing.
 */
#ifndef COX_TESTS_UNIT_QUEUE_FIXTURE_H
#define COX_TESTS_UNIT_QUEUE_FIXTURE_H

#include "channel/memory/queue/queue.h"

#define FIXTURE_BLOCK_SIZE 4096

/* A fixed pool in the domain of that kind. domains: with that kind. */
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
/* Bytes that follow from the user data, so that whoever reads can tell. */
void fixture_fill(void *bytes, uint64_t length, uint64_t user_data);
bool fixture_is_filled(const void *bytes, uint64_t length, uint64_t user_data);
/* Allocates, fills with what follows from user data, publishes, and lets go of its own reference.
 * Returns what publish (or allocate) returns. */
int fixture_publish(struct cox_publisher *publisher, struct cox_pool *pool, uint64_t length,
                    uint64_t user_data, uint64_t *ret_number);
/* The message's bytes are those of its user data, wherever they are. */
bool fixture_is_sound(const struct cox_message *message);
void fixture_let_go(const struct cox_message *message);
/* Blocks that somebody counts or holds. */
uint32_t fixture_used(const struct cox_pool *pool);

#endif
