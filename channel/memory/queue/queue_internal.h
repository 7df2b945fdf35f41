/*
 * queue_internal: what queue, publisher, subscriber and set share of a queue beyond its contract
 * (queue.h).
 *
 * Three parts: the queue's memory (queue.c), the pools that this process knows (queue_pools.c), and
 * the bookkeeping of messages under the lock (queue_rows.c).
 *
 * Threads: the pools have a mutex of their own, which is taken behind the queue's lock and never
 *   held while waiting. What is marked "under the lock" is called between enter and leave.
 * Ownership: endpoints hold a use of each pool they may take from; a pool that was opened here is
 * freed with its last use. Blocks: enter, as queue_lock.h; pool_cache_open, at a door, never under
 * the lock. If the process dies: as queue.h.
 */
#ifndef COX_CHANNEL_MEMORY_QUEUE_INTERNAL_H
#define COX_CHANNEL_MEMORY_QUEUE_INTERNAL_H

#include "queue.h"
#include "queue_layout.h"

#include <pthread.h>
#include <sys/types.h>

#include "channel/shm/region.h"

/* Numbers beyond are nobody's: there is no wrapping round. */
#define COX_QUEUE_HEAD_MAX (UINT64_C(1) << 62)
#define COX_QUEUE_POOL_COUNT_MAX 1024
#define COX_QUEUE_PENDING_FREE_COUNT_MAX 65536
#define COX_QUEUE_SLICE_NS (50 * COX_NSEC_PER_MSEC)
/* For a visit at a door. */
#define COX_QUEUE_DOOR_MS 1000

/* relaxed: under the lock, or a hint, where nothing else is said. Each word is loaded once and then
 * checked. */
#define COX_QUEUE_LOAD(word) atomic_load_explicit(&(word), memory_order_relaxed)

struct cox_queue_geometry {
    uint32_t depth, domain_count_max, publisher_count_max, subscriber_count_max, pool_count_max,
        pending_free_count_max;
    /* offsets */
    uint64_t publishers, subscribers, pending_frees, rows;
    uint64_t row_size, size;
};

/* A pool that this process knows. */
struct cox_queue_pool {
    struct cox_pool *pool;
    uint64_t id;
    /* endpoints */
    uint32_t users;
    /* opened here */
    bool owned;
};

struct cox_queue {
    struct cox_region region;
    /* region.base */
    struct cox_queue_layout *layout;
    struct cox_queue_geometry geometry;
    uint64_t id;
    /* of this process */
    uint64_t identity;
    /* the child of a fork is another one */
    pid_t pid;
    int fd;
    _Atomic uint32_t endpoint_count;
    /* when somebody last looked for the dead among the slow */
    _Atomic uint64_t reaped_ns;
    /* pools */
    pthread_mutex_t mutex;
    struct cox_queue_pool *pools;
    uint32_t pool_count, pool_capacity;
    /* Under the lock. */
    /* depth + 1, for the count of interest */
    uint32_t *counts;
    /* pending_free_turn at which nothing was left that this process can let go */
    uint64_t drained;
    /* changes with the pools, under the mutex */
    uint32_t pool_turn;
    /* pool_turn then */
    uint32_t drained_at;
};

/* ---- the memory ---- */

static inline struct cox_queue_layout_publisher *cox_queue_publisher_at(struct cox_queue *queue,
                                                                        uint32_t slot)
{
    return (struct cox_queue_layout_publisher *)((char *)queue->region.base +
                                                 queue->geometry.publishers) +
           slot;
}
static inline struct cox_queue_layout_subscriber *cox_queue_subscriber_at(struct cox_queue *queue,
                                                                          uint32_t slot)
{
    return (struct cox_queue_layout_subscriber *)((char *)queue->region.base +
                                                  queue->geometry.subscribers) +
           slot;
}
static inline struct cox_queue_layout_pending_free *cox_queue_pending_free_at(
    struct cox_queue *queue, uint32_t slot)
{
    return (struct cox_queue_layout_pending_free *)((char *)queue->region.base +
                                                    queue->geometry.pending_frees) +
           slot;
}
/* Of any number: masked before it is used. */
static inline struct cox_queue_layout_row *cox_queue_row_at(struct cox_queue *queue,
                                                            uint64_t number)
{
    return (struct cox_queue_layout_row *)(void *)((char *)queue->region.base +
                                                   queue->geometry.rows +
                                                   (number & (queue->geometry.depth - 1)) *
                                                       queue->geometry.row_size);
}
static inline uint32_t cox_queue_domain_mask(const struct cox_queue *queue)
{
    return (uint32_t)((UINT64_C(1) << queue->geometry.domain_count_max) - 1);
}
/* End marks of the tables: never beyond them. */
static inline uint32_t cox_queue_bound(uint32_t end, uint32_t count_max)
{
    return end < count_max ? end : count_max;
}

/* Takes the lock, and repairs what a dead owner left. Returns 0; COX_STATE: in the child of a fork;
 * COX_TIMEOUT; COX_CORRUPT: the head makes no sense; -errno. */
int cox_queue_enter(struct cox_queue *queue, struct cox_error *err);
/* The same, until the deadline at most. */
int cox_queue_enter_until(struct cox_queue *queue, uint64_t deadline_ns, struct cox_error *err);
void cox_queue_leave(struct cox_queue *queue);
/* Takes out dead subscribers that are behind (all: any dead endpoint). Without the lock. Returns
 * how many endpoints. */
uint32_t cox_queue_reap_dead(struct cox_queue *queue, bool all);

/* ---- entries of pools and domains, under the lock ---- */

/* What an entry says, checked. */
struct cox_queue_entry {
    uint64_t id, stamp;
    uint32_t domain, flags;
    struct cox_pool_handle handle;
};
/* False: there is none, or it makes no sense. */
bool cox_queue_entry_read(struct cox_queue *queue, uint32_t index,
                          struct cox_queue_entry *ret_entry);
/* handle NULL: of those that cannot be opened one does for all. Returns 0; COX_FULL: domains or
 * pools, with the limit. */
int cox_queue_entry_add(struct cox_queue *queue, uint64_t id, struct cox_domain_id domain,
                        const struct cox_pool_handle *handle, bool read_only, uint32_t *ret_index,
                        struct cox_error *err);
int cox_queue_domain_add(struct cox_queue *queue, struct cox_domain_id domain, uint32_t *ret_index,
                         struct cox_error *err);
/* Its handle opens nothing from now on; messages in it stay for those that have it. */
void cox_queue_entry_close(struct cox_queue *queue, uint32_t index);

/* ---- pools that this process knows ---- */

/* What one endpoint can come to. */
struct cox_queue_pool_cache {
    struct cox_queue *queue;
    const struct cox_domains *domains;
    char *door_path;
    /* each with a use */
    struct cox_pool **pools;
    uint32_t count, capacity;
    /* per entry: what opening it gave, so that it is not tried with every message */
    struct cox_queue_failed {
        uint64_t stamp;
        int code;
        uint64_t until_ns;
    } * failed;
};
int cox_queue_pool_cache_init(struct cox_queue_pool_cache *cache, struct cox_queue *queue,
                              const struct cox_domains *domains, const char *door_path,
                              struct cox_error *err);
void cox_queue_pool_cache_deinit(struct cox_queue_pool_cache *cache); /* idempotent */
/* Borrowed. Returns 0; COX_FULL: as cox_pool_queue_join; -ENOMEM. */
int cox_queue_pool_cache_add(struct cox_queue_pool_cache *cache, struct cox_pool *pool,
                             struct cox_error *err);
/* NULL: not known. */
struct cox_pool *cox_queue_pool_cache_find(const struct cox_queue_pool_cache *cache, uint64_t id);
/* 0, or what opening it gave. */
int cox_queue_pool_cache_failed(const struct cox_queue_pool_cache *cache, uint32_t index,
                                const struct cox_queue_entry *entry);
/* Opens what is not known. Not under the lock. Returns 0; COX_PEER_DEAD: no handle; as
 * cox_pool_open; COX_CORRUPT. */
int cox_queue_pool_cache_open(struct cox_queue_pool_cache *cache, uint32_t index,
                              const struct cox_queue_entry *entry, struct cox_error *err);
/* Opens what it can of all pools. Not under the lock. */
void cox_queue_pool_cache_open_all(struct cox_queue_pool_cache *cache);

/* By whatever pool of this process it is. False: it has none of that id. */
bool cox_queue_pools_unpin(struct cox_queue *queue, const struct cox_block_ref *ref, uint64_t tag);
void cox_queue_pools_sweep(struct cox_queue *queue);
uint32_t cox_queue_pools_turn(struct cox_queue *queue);

/* ---- messages, under the lock ---- */

/* What a row says, read once. */
struct cox_queue_copy {
    uint64_t copier, generation, size;
    uint32_t pool, block;
};
struct cox_queue_message {
    uint64_t number, user_data, length;
    uint32_t mask, interest;
    struct cox_queue_copy copies[COX_DOMAIN_COUNT_MAX];
};
void cox_queue_row_read(struct cox_queue *queue, uint64_t number,
                        struct cox_queue_message *ret_message);
/* Holds the block as the copy of the message in that domain; until intent_clear, what to undo is
 * written down. Returns as cox_pool_pin; *ret_copy is for copy_fill. */
int cox_queue_pin(struct cox_queue *queue, struct cox_pool *pool, uint32_t pool_index,
                  const struct cox_block_ref *ref, uint64_t number, uint32_t domain,
                  struct cox_queue_copy *ret_copy, struct cox_error *err);
/* The row has it. */
void cox_queue_intent_clear(struct cox_queue *queue);
void cox_queue_copy_fill(struct cox_queue_layout_copy *copy, const struct cox_queue_copy *from);
/* The message is over: lets all its copies go. */
void cox_queue_row_end(struct cox_queue *queue, struct cox_queue_layout_row *row);
/* Counts the interest in each message anew, and ends those that nobody waits for. */
void cox_queue_recount(struct cox_queue *queue);
void cox_queue_repair(struct cox_queue *queue);
/* Lets go what was deferred and is in a pool of this process. */
void cox_queue_drain(struct cox_queue *queue);
/* Wakes who sleeps as this subscriber. */
void cox_queue_wake_subscriber(struct cox_queue_layout_subscriber *subscriber);

/* ---- endpoints ---- */

struct cox_publisher {
    struct cox_queue *queue;
    struct cox_queue_pool_cache pool_cache;
    struct cox_pool *pool;
    struct cox_exporter *exporter;
    struct cox_pool_handle handle;
    bool exported;
    uint32_t slot, pool_index, domain;
};

struct cox_queue_set;

struct cox_subscriber {
    struct cox_queue *queue;
    struct cox_queue_pool_cache pool_cache;
    /* NULL: none of its own */
    struct cox_pool *pool;
    struct cox_exporter *exporter;
    struct cox_pool_handle handle;
    bool exported;
    uint32_t slot, pool_index, domain;
    /* authoritative; the shared one is what others count with */
    uint64_t next;
    /* since the last message */
    uint64_t skipped;
    uint64_t pending_free_seen;
    /* NULL: in none */
    struct cox_queue_set *set;
};
/* Its line in the queue. */
static inline struct cox_queue_layout_subscriber *cox_subscriber_line(
    const struct cox_subscriber *subscriber)
{
    return cox_queue_subscriber_at(subscriber->queue, subscriber->slot);
}

#endif
