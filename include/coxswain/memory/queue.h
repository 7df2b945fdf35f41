/*
 * queue: messages that are references to pool blocks. Each is published once and taken by every
 * subscriber; it is copied only for subscribers that cannot access its memory.
 *
 * For processes that trust each other: each can write all of the queue's memory, the lock included.
 * So one hostile process can corrupt it for all, or make each call wait for the lock's 5 s. Groups
 * of workers do not use queues.
 *
 * The queue is a sealed memfd. It has a ring of depth messages, the subscribers and publishers with
 * their process identities, and handles to the pools that contain messages. A message has at most
 * one copy per domain, and a mask of those domains. A subscriber in one of them copies nothing. The
 * first subscriber of another domain copies the message into its own pool, and later ones of that
 * domain share the copy.
 *
 * Messages pin their blocks (pool.h, pins). A message ends when every subscriber that existed at
 * its publication has taken or skipped it, or when depth newer messages exist. Then all its copies
 * are unpinned at once.
 *
 * One lock in the queue's memory contains the identity of its owner. If the owner dies, the next
 * process takes over the lock, and first completes or reverts the owner's unfinished change. The
 * lock is held for the bookkeeping of one message, never during a copy.
 *
 * Threads: one thread at a time uses an endpoint (publisher or subscriber); different endpoints,
 *   different threads.
 * Ownership: the caller keeps its reference after publish. The caller owns a taken message's
 *   reference until cox_pool_unref on message.pool. Pools are borrowed until the endpoint is freed.
 * Blocks: wait until its deadline. Every change of the queue for the lock: COX_TIMEOUT if one live
 *   process keeps it for 5 s. take also waits while another live process makes the copy that it
 *   needs, for 10 s at most; then it makes its own copy. Opening a pool at a control socket can
 *   block for 1 s.
 * Bytes: the content of the queue's memory is untrusted input: COX_CORRUPT, never a crash.
 * Forks: in a child every function returns COX_STATE, except free, which only closes and unmaps.
 * exec: call free first. Otherwise the endpoints stay registered until the process ends, because it
 *   keeps its pid.
 * If the process dies: the next sweep, or a publish (which checks every 50 ms), marks its
 *   subscribers as having skipped everything. Its messages stay for processes that have attached
 *   their pool; the others skip them (COX_PEER_DEAD, once each). The queue has no name: the kernel
 *   frees it with the last process that has attached it.
 */
#ifndef COX_MEMORY_QUEUE_H
#define COX_MEMORY_QUEUE_H

#include <coxswain/memory/pool.h>

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
    /* pools that contain messages; 0: 16 */
    uint32_t pool_count_max;
    /* 0; reserved for a later field */
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
/* expected (NULL: any): limits that the queue must have at least. A queue never grows. fd is dup'd.
 * Returns as cox_pool_attach, and
 *   COX_UNSUPPORTED: the queue has less than expected (depth, domains); err has both numbers
 */
COX_PUBLIC int cox_queue_attach(int fd, const struct cox_queue_options *expected,
                                struct cox_queue **ret_queue, struct cox_error *err);
/* All endpoints must be freed before: asserted. NULL-safe, returns NULL. */
COX_PUBLIC struct cox_queue *cox_queue_free(struct cox_queue *queue);
COX_PUBLIC int cox_queue_fd(const struct cox_queue *queue); /* lent */
/* Exports the queue as a handle. Returns as cox_exporter_export. */
COX_PUBLIC int cox_queue_export(struct cox_queue *queue, struct cox_exporter *exporter,
                                struct cox_handle *ret_handle, struct cox_error *err);
/* Attaches in any process that can open the handle. Returns as cox_handle_open and
 * cox_queue_attach. */
COX_PUBLIC int cox_queue_open(const struct cox_handle *handle, const char *socket_path,
                              uint64_t deadline_ns, const struct cox_queue_options *expected,
                              struct cox_queue **ret_queue, struct cox_error *err);

struct cox_publisher_options {
    /* set by COX_PUBLISHER_OPTIONS_INIT (base.h) */
    size_t size;
    /* the pool that contains its messages */
    struct cox_pool *pool;
    /* Exports the pool; the queue keeps the handle for other processes. NULL: only processes that
     * got the pool in other ways (cox_subscriber_options.pools) can take its messages. */
    struct cox_exporter *exporter;
    /* other processes map the blocks for reading only */
    bool read_only;
    /* Domains of other processes' pools, NULL: host memory only. publish opens such pools to unpin
     * copies there. Copies in a pool that it cannot open are unpinned by processes that have it. */
    const struct cox_domains *domains;
    /* control socket for handles that cannot be opened otherwise (handle.h) */
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
/* Its messages stay for processes that have attached their pool before, as after a death.
 * NULL-safe, returns NULL. */
COX_PUBLIC struct cox_publisher *cox_publisher_free(struct cox_publisher *publisher);
/* Publishes the block as a message for all present subscribers. ref is a reference, held by the
 * caller, to a block of the publisher's pool. length: size of the message, at most ref->size.
 * user_data: any 8 bytes. Never waits for subscribers: the message that is depth messages old ends.
 * Returns
 *   0 and the message's number, from 1
 *   COX_STALE: the reference is not to the block's present use
 *   COX_FULL: the block is in too many queues at once
 *   COX_NOT_FOUND: the block is of another pool
 *   COX_INVALID: length
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
/* Publishes several messages in this order. The lock is taken once, so no message of another
 * publisher is between them. All blocks are checked before the first is published.
 * Returns
 *   as publish; *ret_count publications were published, those before the one that failed
 *   COX_INVALID: also if count is larger than the queue's depth
 */
COX_PUBLIC int cox_publisher_publish_batch(struct cox_publisher *publisher,
                                           struct cox_publication *publications, uint32_t count,
                                           uint32_t *ret_count, struct cox_error *err);

struct cox_subscriber_options {
    /* set by COX_SUBSCRIBER_OPTIONS_INIT (base.h) */
    size_t size;
    /* The subscriber takes messages in the domain of this pool; messages in other domains are
     * copied into it. NULL: it takes messages in host memory without a copy, and others are
     * COX_UNSUPPORTED. */
    struct cox_pool *pool;
    /* Pools that this process has attached already; others are opened by the queue's handles.
     * Borrowed until the subscriber is freed. */
    struct cox_pool *const *pools;
    uint32_t pool_count;
    const struct cox_domains *domains;
    /* control socket for handles that cannot be opened otherwise (handle.h) */
    const char *socket_path;
    /* Exports pool, so that other subscribers of the domain share the copies made there. NULL: a
     * process that did not get the pool in other ways makes its own copy. */
    struct cox_exporter *exporter;
};
#define COX_SUBSCRIBER_OPTIONS_INIT COX_OPTIONS_INIT(struct cox_subscriber_options)
/* The subscriber gets the messages that are published from now on.
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
    /* lent while the caller holds a reference to one of its blocks; or, if it is one of
     * cox_subscriber_options, as long as that is borrowed */
    struct cox_pool *pool;
    /* NULL: the domain has no addresses */
    const void *bytes;
    uint64_t length;
    uint64_t user_data;
    /* number of the message, from 1 */
    uint64_t number;
    /* messages that this subscriber skipped before it */
    uint64_t skipped;
    /* true: this call made the copy */
    bool copied;
};
/* Takes the oldest message that was not taken.
 * Returns
 *   0
 *   COX_EMPTY: there is none
 *   COX_FULL: the subscriber's pool has no room for the copy or the reference; the message stays
 *   COX_NO_SPACE: the subscriber's pool has no room for the copy or the reference; the message
 *     stays
 *   -ENOMEM: no memory for the copy or the reference; the message stays
 *   COX_PEER_DEAD: the publisher is dead, and with it the message's memory; it counts as taken
 *   COX_DENIED: the message's memory cannot be opened; it counts as taken
 *   COX_UNSUPPORTED: the subscriber cannot take messages of this domain; it counts as taken
 *   any other: the message cannot be taken, err says why; it counts as taken
 *   COX_CORRUPT
 */
COX_PUBLIC int cox_subscriber_take(struct cox_subscriber *subscriber,
                                   struct cox_message *ret_message, struct cox_error *err);
/* Takes all pending messages, oldest first, at most count_max (at least 1).
 * Returns
 *   0: at least one
 *   COX_EMPTY
 *   as take, for the message that failed; the caller owns the *ret_count messages before it
 */
COX_PUBLIC int cox_subscriber_take_batch(struct cox_subscriber *subscriber,
                                         struct cox_message *ret_messages, uint32_t count_max,
                                         uint32_t *ret_count, struct cox_error *err);
/* Number of messages not taken yet; skipped ones do not count. */
COX_PUBLIC uint64_t cox_subscriber_pending(const struct cox_subscriber *subscriber);

/* ---- waiting on several queues ---- */

struct cox_queue_set;

/* Returns 0 or -errno. */
COX_PUBLIC int cox_queue_set_new(struct cox_queue_set **ret_set);
COX_PUBLIC struct cox_queue_set *cox_queue_set_free(struct cox_queue_set *set); /* NULL-safe */
/* The subscriber is borrowed until it is removed.
 * Returns
 *   0
 *   COX_FULL: the set has 64 already
 *   COX_BUSY: the set has this subscriber already
 */
COX_PUBLIC int cox_queue_set_add(struct cox_queue_set *set, struct cox_subscriber *subscriber,
                                 struct cox_error *err);
COX_PUBLIC void cox_queue_set_remove(struct cox_queue_set *set, struct cox_subscriber *subscriber);
/* Blocks until a queue of the set has a message. If several have one, they are returned in turn.
 * Before Linux 5.16 a futex wait has one word only, so it polls every 10 ms; otherwise it does not
 * wake up in between.
 * Returns
 *   0
 *   COX_TIMEOUT
 *   COX_ABORTED: cox_queue_set_trigger was called; once per call
 *   COX_EMPTY: the set is empty
 *   COX_CORRUPT
 *   -errno
 */
COX_PUBLIC int cox_queue_set_wait(struct cox_queue_set *set, uint64_t deadline_ns,
                                  struct cox_subscriber **ret_subscriber);
/* Makes one wait return COX_ABORTED. Any thread; async-signal-safe. */
COX_PUBLIC void cox_queue_set_trigger(struct cox_queue_set *set);

/* ---- clean-up after dead processes, and display ---- */

/* Removes endpoints of dead processes, and frees the messages and pools that only they kept.
 * Returns the number of removed endpoints. */
COX_PUBLIC uint32_t cox_queue_sweep(struct cox_queue *queue);

#ifdef __cplusplus
}
#endif

#endif
