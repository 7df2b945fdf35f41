/*
 * queue: messages that are references to pool blocks. Each is published once and taken by every
 * subscriber; it is copied only for subscribers that cannot access its memory.
 *
 * For processes that trust each other: each can write all of the queue's memory, the lock included,
 * so one hostile process can corrupt it for all, or make each call wait for its 5 s. No group of
 * ours uses a queue.
 *
 * The queue is a sealed memfd: a ring of depth messages, the subscribers and publishers with their
 * process identities, and the pools that contain messages, by handle. A message has at most one
 * copy per domain, and a mask of those domains. A subscriber in one of them copies nothing. The
 * first subscriber of another domain copies the message into its own pool, and later ones of that
 * domain share the copy.
 *
 * Messages pin their blocks (pool.h, pins). A message is over when every subscriber that existed at
 * its publication has taken or skipped it, or when depth newer ones exist: then all its copies are
 * unpinned at once.
 *
 * One lock in the queue's memory names its owner. When the owner dies, the next process takes the
 * lock over and first completes or undoes what it had begun. The lock is held for the bookkeeping
 * of one message, never during a copy.
 *
 * Threads: one thread at a time uses an endpoint (publisher or subscriber); different endpoints,
 *   different threads.
 * Ownership: the caller keeps its reference after publish. The caller owns a taken message's
 *   reference until cox_pool_unref on message.pool. Pools are borrowed until the endpoint is freed.
 * Blocks: wait, until its deadline. Every change of the queue, for the lock: COX_TIMEOUT when one
 *   live process keeps it for 5 s. take also waits for another process that makes the copy it
 *   needs, while that process is alive, for 10 s at most; then it makes its own. Opening a pool can
 *   take 1 s at a control socket.
 * Bytes: what is in the queue's memory is input: COX_CORRUPT, never a crash.
 * Forks: in a child every function returns COX_STATE, except free, which only closes and unmaps.
 * exec: the process keeps its pid, so its endpoints stay registered until it ends: free first.
 * If the process dies: its subscribers count as having skipped everything, from the next sweep or
 *   publish on (which checks every 50 ms). Its messages stay for the processes that have their
 *   pool, and the others skip them (COX_PEER_DEAD, once each). The last process to leave frees the
 *   queue; it has no daemon and no name.
 */
#ifndef COX_CHANNEL_MEMORY_QUEUE_H
#define COX_CHANNEL_MEMORY_QUEUE_H

#include "../pool/pool.h"

#ifdef __cplusplus
extern "C" {
#endif

struct cox_queue;
struct cox_publisher;
struct cox_subscriber;

/* Limit of publishers, and of subscribers. */
#define COX_QUEUE_ENDPOINT_COUNT_MAX 65535
#define COX_QUEUE_DEPTH_MAX 65536

struct cox_queue_options {
    /* set by COX_QUEUE_OPTIONS_INIT (base.h) */
    size_t size;
    /* messages kept; 0: 16; a power of two */
    uint32_t depth;
    /* 0: 4; at most COX_DOMAIN_COUNT_MAX */
    uint32_t domain_count_max;
    /* 0: 8 */
    uint32_t publisher_count_max;
    /* 0: 64 */
    uint32_t subscriber_count_max;
    /* that contain messages; 0: 16 */
    uint32_t pool_count_max;
    /* 0: the place of a later field */
    uint32_t reserved;
};
#define COX_QUEUE_OPTIONS_INIT COX_OPTIONS_INIT(struct cox_queue_options)

/* Returns
 *   0
 *   COX_INVALID: a limit, err says which
 *   COX_NO_SPACE
 *   -errno
 */
COX_PUBLIC int cox_queue_create(const struct cox_queue_options *options,
                                struct cox_queue **ret_queue, struct cox_error *err);
/* expected (NULL: any): what the attacher was built for. A queue does not grow under those that are
 * attached. fd is dup'd.
 * Returns as cox_pool_attach, and
 *   COX_UNSUPPORTED: more is expected than the queue has (a deeper history, more domains); err has
 *     both numbers
 */
COX_PUBLIC int cox_queue_attach(int fd, const struct cox_queue_options *expected,
                                struct cox_queue **ret_queue, struct cox_error *err);
/* All endpoints must be freed before: asserted. NULL-safe, returns NULL. */
COX_PUBLIC struct cox_queue *cox_queue_free(struct cox_queue *queue);
#ifdef COX_INTERNAL
void cox_queue_freep(struct cox_queue **queue); /* for _cox_cleanup_ */
#endif
COX_PUBLIC int cox_queue_fd(const struct cox_queue *queue); /* lent */
/* By value. Returns as cox_exporter_export. */
COX_PUBLIC int cox_queue_export(struct cox_queue *queue, struct cox_exporter *exporter,
                                struct cox_handle *ret_handle, struct cox_error *err);
/* Attaches in any process that can open the handle. Returns as cox_handle_open and
 * cox_queue_attach. */
COX_PUBLIC int cox_queue_open(const struct cox_handle *handle, const char *socket_path,
                              uint64_t deadline_ns, const struct cox_queue_options *expected,
                              struct cox_queue **ret_queue, struct cox_error *err);
#ifdef COX_INTERNAL
uint64_t cox_queue_id(const struct cox_queue *queue);
#endif

struct cox_publisher_options {
    /* set by COX_PUBLISHER_OPTIONS_INIT (base.h) */
    size_t size;
    /* that its messages are in */
    struct cox_pool *pool;
    /* Exports the pool, whose handle the queue keeps for other processes. NULL: only processes that
     * got the pool in other ways (cox_subscriber_options.pools) can take. */
    struct cox_exporter *exporter;
    /* other processes map the blocks for reading only */
    bool read_only;
    /* For pools of other processes: publish opens them to unpin copies there. What cannot be opened
     * is left to processes that have it. */
    /* NULL: host memory only */
    const struct cox_domains *domains;
    const char *socket_path;
};
#define COX_PUBLISHER_OPTIONS_INIT COX_OPTIONS_INIT(struct cox_publisher_options)
/* Returns
 *   0
 *   COX_FULL: too many publishers, pools or domains, err says which and the limit
 *   as cox_pool_export
 */
COX_PUBLIC int cox_publisher_new(struct cox_queue *queue,
                                 const struct cox_publisher_options *options,
                                 struct cox_publisher **ret_publisher, struct cox_error *err);
/* Its messages stay for processes that have their pool by then, as after a death. NULL-safe,
 * returns NULL. */
COX_PUBLIC struct cox_publisher *cox_publisher_free(struct cox_publisher *publisher);
/* The block becomes a message for every subscriber of now; ref is of the publisher's pool, with a
 * reference that the caller has. length: bytes of it that are meant, at most ref->size; user_data:
 * 8 bytes of the caller's own. Never waits for subscribers: what is depth messages old is let go.
 * Returns
 *   0 and the message's number, from 1
 *   COX_STALE: as cox_pool_pin
 *   COX_NOT_FOUND: as cox_pool_pin
 *   COX_INVALID: as cox_pool_pin
 *   COX_FULL: as cox_pool_pin
 *   COX_CORRUPT
 */
COX_PUBLIC int cox_publisher_publish(struct cox_publisher *publisher,
                                     const struct cox_block_ref *ref, uint64_t length,
                                     uint64_t user_data, uint64_t *ret_number,
                                     struct cox_error *err);

struct cox_publication {
    struct cox_block_ref ref;
    /* as for publish */
    uint64_t length, user_data;
    /* set by publish_batch */
    uint64_t number;
};
/* Publishes several messages in this order, with none of another publisher between them: the lock
 * is taken once. All blocks are checked before the first is published.
 * Returns
 *   as publish: *ret_count publications are messages then, those before the one that failed
 *   COX_INVALID: also, there are more of them than the queue is deep
 */
COX_PUBLIC int cox_publisher_publish_batch(struct cox_publisher *publisher,
                                           struct cox_publication *publications, uint32_t count,
                                           uint32_t *ret_count, struct cox_error *err);

struct cox_subscriber_options {
    /* set by COX_SUBSCRIBER_OPTIONS_INIT (base.h) */
    size_t size;
    /* In whose domain it takes: what lies elsewhere is copied into it. NULL: it takes host memory
     * as it is, and what lies elsewhere is COX_UNSUPPORTED. */
    struct cox_pool *pool;
    /* Pools that this process has already; others are opened by the queue's handles. */
    /* borrowed until the subscriber is freed */
    struct cox_pool *const *pools;
    uint32_t pool_count;
    const struct cox_domains *domains;
    /* control socket for handles that cannot be opened otherwise (handle.h) */
    const char *socket_path;
    /* Exports pool, so that other subscribers of the domain share the copies it makes there. NULL:
     * a process that did not get the pool in other ways makes its own copy. */
    struct cox_exporter *exporter;
};
#define COX_SUBSCRIBER_OPTIONS_INIT COX_OPTIONS_INIT(struct cox_subscriber_options)
/* Sees messages from now on.
 * Returns
 *   0
 *   COX_FULL
 *   -errno
 */
COX_PUBLIC int cox_subscriber_new(struct cox_queue *queue,
                                  const struct cox_subscriber_options *options,
                                  struct cox_subscriber **ret_subscriber, struct cox_error *err);
/* Messages not taken count as skipped. NULL-safe, returns NULL. */
COX_PUBLIC struct cox_subscriber *cox_subscriber_free(struct cox_subscriber *subscriber);

struct cox_message {
    /* the caller owns one reference; unref on pool */
    struct cox_block_ref ref;
    /* lent while a reference to its block is held; a pool of cox_subscriber_options: as long as
     * that is lent */
    struct cox_pool *pool;
    /* NULL: the domain has no addresses */
    const void *bytes;
    uint64_t length;
    uint64_t user_data;
    /* of the message */
    uint64_t number;
    /* messages that this subscriber skipped before it */
    uint64_t skipped;
    /* true: this call made the copy */
    bool copied;
};
/* The oldest message not taken.
 * Returns
 *   0
 *   COX_EMPTY: none
 *   COX_FULL: no room for the copy in its pool, or its reference, the message stays
 *   COX_NO_SPACE: no room for the copy in its pool, or its reference, the message stays
 *   -ENOMEM: no room for the copy in its pool, or its reference, the message stays
 *   COX_PEER_DEAD: its publisher is gone, and so is its memory; it counts as taken
 *   COX_DENIED: its memory cannot be opened; it counts as taken
 *   COX_UNSUPPORTED: its memory is of a kind that this subscriber cannot take; it counts as taken
 *   any other: it cannot be had, err says why, and it counts as taken
 *   COX_CORRUPT
 */
COX_PUBLIC int cox_subscriber_take(struct cox_subscriber *subscriber,
                                   struct cox_message *ret_message, struct cox_error *err);
/* As many as there are, count_max (1 at least) at most, the oldest first.
 * Returns
 *   0: one at least
 *   COX_EMPTY
 *   as take, of the one behind the *ret_count messages that are the caller's in any case
 */
COX_PUBLIC int cox_subscriber_take_batch(struct cox_subscriber *subscriber,
                                         struct cox_message *ret_messages, uint32_t count_max,
                                         uint32_t *ret_count, struct cox_error *err);
/* Number of messages not yet taken, without skipped ones. */
COX_PUBLIC uint64_t cox_subscriber_pending(const struct cox_subscriber *subscriber);

/* ---- waiting on several queues ---- */

struct cox_queue_set;

/* Returns 0 or -errno. */
COX_PUBLIC int cox_queue_set_new(struct cox_queue_set **ret_set);
COX_PUBLIC struct cox_queue_set *cox_queue_set_free(struct cox_queue_set *set); /* NULL-safe */
/* Borrowed until removed.
 * Returns
 *   0
 *   COX_FULL: 64 at most
 *   COX_BUSY: it is in
 */
COX_PUBLIC int cox_queue_set_add(struct cox_queue_set *set, struct cox_subscriber *subscriber,
                                 struct cox_error *err);
COX_PUBLIC void cox_queue_set_remove(struct cox_queue_set *set, struct cox_subscriber *subscriber);
/* Blocks until a queue of the set has a message; several take turns. Causes no wakeups meanwhile,
 * except before Linux 5.16, whose futexes can wait for one word only: there it polls every 10 ms.
 * Returns
 *   0
 *   COX_TIMEOUT
 *   COX_ABORTED: triggered, once per trigger
 *   COX_EMPTY: the set is empty
 *   COX_CORRUPT
 *   -errno
 */
COX_PUBLIC int cox_queue_set_wait(struct cox_queue_set *set, uint64_t deadline_ns,
                                  struct cox_subscriber **ret_subscriber);
/* Ends a wait. Any thread; async-signal-safe. */
COX_PUBLIC void cox_queue_set_trigger(struct cox_queue_set *set);

/* ---- the dead, and display ---- */

/* Removes endpoints of dead processes, and frees what only they kept. Returns the number of
 * endpoints. */
COX_PUBLIC uint32_t cox_queue_sweep(struct cox_queue *queue);
#ifdef COX_INTERNAL
void cox_queue_dump(struct cox_queue *queue, void (*line)(void *context, const char *text),
                    void *context);
#endif

#ifdef __cplusplus
}
#endif

#endif
