/*
 * queue_internal: what queue, publisher, subscriber and set share beyond the contract (queue.h).
 *
 * Three parts: the queue's memory (queue.c), the pools that this process has open (queue_pools.c),
 * and the bookkeeping of messages under the lock (queue_rows.c).
 *
 * Threads: a mutex guards the pools; it is taken after the queue's lock and never held while
 *   waiting. Functions marked "under the lock" are called between enter and leave.
 * Ownership: an endpoint has a use of each pool in its pool cache; a pool that was opened here is
 *   freed with its last use.
 * Blocks: enter, as queue_lock.h; pool_cache_open, at a control socket, never under the lock.
 * If the process dies: as queue.h.
 */
#ifndef COX_MEMORY_QUEUE_INTERNAL_H
#define COX_MEMORY_QUEUE_INTERNAL_H

#include "channel/shm/region.h"
#include "queue_layout.h"

#include <coxswain/memory/queue.h>

#include <pthread.h>
#include <sys/types.h>

/* Larger message numbers are invalid: they never wrap. */
#define COX_QUEUE_HEAD_MAX (UINT64_C(1) << 62)
#define COX_QUEUE_POOL_COUNT_MAX 1024
#define COX_QUEUE_PENDING_FREE_COUNT_MAX 65536
#define COX_QUEUE_SLICE_NS (50 * COX_NSEC_PER_MSEC)
/* Limit for fetching fds from a control socket. */
#define COX_QUEUE_SOCKET_MS 1000

/* relaxed: under the lock, or a hint, unless stated otherwise. Each word is loaded once, then
 * checked. */
#define COX_QUEUE_LOAD(word) atomic_load_explicit(&(word), memory_order_relaxed)

struct cox_queue_geometry {
    uint32_t depth, domain_count_max, publisher_count_max, subscriber_count_max, pool_count_max,
        pending_free_count_max;
    /* offsets */
    uint64_t publishers, subscribers, pending_frees, rows;
    uint64_t row_size, size;
};

/* A pool that this process has. */
struct cox_queue_pool {
    struct cox_pool *pool;
    uint64_t id;
    /* endpoints */
    uint32_t users;
    /* opened by this library, from a handle */
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
    /* that created the object; differs in the child of a fork */
    pid_t pid;
    int fd;
    _Atomic uint32_t endpoint_count;
    /* when a thread last checked slow subscribers for death */
    _Atomic uint64_t reaped_ns;
    /* pools */
    pthread_mutex_t mutex;
    struct cox_queue_pool *pools;
    uint32_t pool_count;
    size_t pool_capacity;
    /* Under the lock. */
    /* depth + 1; scratch of recount */
    uint32_t *counts;
    /* pending_free_turn when this process had run all pending frees that it could */
    uint64_t drained;
    /* incremented when the pools change, under the mutex */
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
/* The row of any message number: masked. */
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
/* Bounds the end mark of a table, which is input. */
static inline uint32_t cox_queue_bound(uint32_t end, uint32_t count_max)
{
    return end < count_max ? end : count_max;
}

/* Takes the lock, and repairs what a dead owner left.
 * Returns:
 *   0
 *   COX_STATE: in the child of a fork
 *   COX_TIMEOUT: a live process keeps the lock
 *   COX_CORRUPT: the head is invalid
 *   -errno */
int cox_queue_enter(struct cox_queue *queue, struct cox_error *err);
/* The same, until the deadline. */
int cox_queue_enter_until(struct cox_queue *queue, uint64_t deadline_ns, struct cox_error *err);
void cox_queue_leave(struct cox_queue *queue);
/* Removes dead subscribers that are behind (all: any dead endpoint). Takes the lock. Returns the
 * number of endpoints. */
uint32_t cox_queue_reap_dead(struct cox_queue *queue, bool all);

/* ---- entries of pools and domains, under the lock ---- */

/* A checked copy of an entry. */
struct cox_queue_entry {
    uint64_t id, stamp;
    uint32_t domain, flags;
    struct cox_pool_handle handle;
};
/* False: none, or invalid. */
bool cox_queue_entry_read(struct cox_queue *queue, uint32_t index,
                          struct cox_queue_entry *ret_entry);
/* The entry of this pool; of id 0: a free one. False: there is none. */
bool cox_queue_entry_find(struct cox_queue *queue, uint64_t id, uint32_t *ret_index);
/* handle NULL: the entry without a handle is shared. Returns 0; COX_FULL: domains or pools, with
 * the limit. */
int cox_queue_entry_add(struct cox_queue *queue, uint64_t id, struct cox_domain_id domain,
                        const struct cox_pool_handle *handle, bool read_only, uint32_t *ret_index,
                        struct cox_error *err);
int cox_queue_domain_add(struct cox_queue *queue, struct cox_domain_id domain, uint32_t *ret_index,
                         struct cox_error *err);
/* Clears the handle; messages in the pool stay for processes that have it. */
void cox_queue_entry_close(struct cox_queue *queue, uint32_t index);

/* ---- pools that this process has ---- */

/* The pool cache of one endpoint: pools that it got or opened. */
struct cox_queue_pool_cache {
    struct cox_queue *queue;
    const struct cox_domains *domains;
    char *socket_path;
    /* each with a use */
    struct cox_pool **pools;
    uint32_t count;
    size_t capacity;
    /* per entry: the result of the last open, so that it is not retried for every message */
    struct cox_queue_failed {
        uint64_t stamp;
        int code;
        uint64_t until_ns;
    } * failed;
};
/* Returns 0 or -ENOMEM. Deinit is needed also after a failure. */
int cox_queue_pool_cache_init(struct cox_queue_pool_cache *cache, struct cox_queue *queue,
                              const struct cox_domains *domains, const char *socket_path,
                              struct cox_error *err);
void cox_queue_pool_cache_deinit(struct cox_queue_pool_cache *cache); /* idempotent */
/* The pool is borrowed. Returns 0; COX_FULL: as cox_pool_queue_join; -ENOMEM. */
int cox_queue_pool_cache_add(struct cox_queue_pool_cache *cache, struct cox_pool *pool,
                             struct cox_error *err);
/* NULL: not in the cache. */
struct cox_pool *cox_queue_pool_cache_find(const struct cox_queue_pool_cache *cache, uint64_t id);
/* 0, or the code of the last open. */
int cox_queue_pool_cache_failed(const struct cox_queue_pool_cache *cache, uint32_t index,
                                const struct cox_queue_entry *entry);
/* Opens a pool that is not in the cache. Not under the lock. Returns 0; COX_PEER_DEAD: no handle;
 * as cox_pool_open; COX_CORRUPT. */
int cox_queue_pool_cache_open(struct cox_queue_pool_cache *cache, uint32_t index,
                              const struct cox_queue_entry *entry, struct cox_error *err);
/* Opens every pool entry that can be opened. Not under the lock. */
void cox_queue_pool_cache_open_all(struct cox_queue_pool_cache *cache);

/* Adds a use of a pool that this process opened from a handle. NULL: none. */
struct cox_pool *cox_queue_pools_use_opened(struct cox_queue *queue, uint64_t id);
/* Adds a use; the first one joins the queue to the pool. owned: the last unuse frees the pool.
 * Returns as cox_pool_queue_join. */
int cox_queue_pools_use(struct cox_queue *queue, struct cox_pool *pool, bool owned,
                        struct cox_error *err);
void cox_queue_pools_unuse(struct cox_queue *queue, struct cox_pool *pool);
/* This process opened the pool from a handle. */
bool cox_queue_pools_opened(struct cox_queue *queue, const struct cox_pool *pool);
/* Unpins through any pool of this process with that id. False: it has none. */
bool cox_queue_pools_unpin(struct cox_queue *queue, const struct cox_block_ref *ref, uint64_t tag);
void cox_queue_pools_sweep(struct cox_queue *queue);
uint32_t cox_queue_pools_turn(struct cox_queue *queue);

/* ---- messages, under the lock ---- */

/* A copy of a row, each word loaded once. */
struct cox_queue_copy {
    uint64_t copier, epoch, size;
    uint32_t pool, block;
};
struct cox_queue_message {
    uint64_t number, user_data, length;
    uint32_t mask, interest;
    struct cox_queue_copy copies[COX_DOMAIN_COUNT_MAX];
};
void cox_queue_copy_read(struct cox_queue_layout_copy *copy, struct cox_queue_copy *ret_copy);
void cox_queue_row_read(struct cox_queue *queue, uint64_t number,
                        struct cox_queue_message *ret_message);
/* Pins the block as the copy of the message in that domain, after it recorded the intent, which
 * stays until intent_clear. Returns as cox_pool_pin; *ret_copy is for copy_fill. */
int cox_queue_pin(struct cox_queue *queue, struct cox_pool *pool, uint32_t pool_index,
                  const struct cox_block_ref *ref, uint64_t number, uint32_t domain,
                  struct cox_queue_copy *ret_copy, struct cox_error *err);
/* After the row refers to the block. */
void cox_queue_intent_clear(struct cox_queue *queue);
void cox_queue_copy_fill(struct cox_queue_layout_copy *copy, const struct cox_queue_copy *from);
/* Ends the message: unpins all its copies. */
void cox_queue_row_end(struct cox_queue *queue, struct cox_queue_layout_row *row);
/* Recounts the subscribers that each message waits for, and ends messages without one. */
void cox_queue_recount(struct cox_queue *queue);
void cox_queue_repair(struct cox_queue *queue);
/* Runs the pending frees of blocks in pools of this process. */
void cox_queue_drain(struct cox_queue *queue);
/* Wakes the process that waits for this subscriber. */
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
    /* NULL: none */
    struct cox_pool *pool;
    struct cox_exporter *exporter;
    struct cox_pool_handle handle;
    bool exported;
    uint32_t slot, pool_index, domain;
    /* authoritative; other processes use the shared one */
    uint64_t next;
    /* messages skipped since the last one taken */
    uint64_t skipped;
    uint64_t pending_free_seen;
    /* NULL: in no set */
    struct cox_queue_set *set;
};
/* Its line in the queue. */
static inline struct cox_queue_layout_subscriber *cox_subscriber_line(
    const struct cox_subscriber *subscriber)
{
    return cox_queue_subscriber_at(subscriber->queue, subscriber->slot);
}

void cox_queue_dump(struct cox_queue *queue, void (*line)(void *context, const char *text),
                    void *context);

#endif
