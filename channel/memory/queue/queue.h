/*
 * queue: messages that are references to blocks: published once, taken by every subscriber, copied
 * only where a subscriber cannot reach the memory that the message is in.
 *
 * For processes that trust each other. This is the shared form: every process that has the queue
 * may write all of its memory, the lock included, and one that means harm spoils it for all, or
 * keeps each call waiting for its 5 s again and again. No group of ours uses one.
 *
 * The queue is a sealed memfd: a ring of depth messages, the subscribers and publishers with the
 * process each is in, and the pools that messages lie in, by handle. A message has up to one copy
 * per domain (a mask says which): a taker whose domain is among them copies nothing, the first
 * taker of another domain copies into a pool of its own, and later takers of that domain share the
 * copy. Messages hold their blocks (pool.h, holds); a message is over when every subscriber that
 * was there at its publication has taken it or skipped it, or depth newer ones are there: then all
 * its copies are let go, at once.
 *
 * One lock in the queue's memory, which names its owner: of a dead one it is taken over, and what
 * that one had begun is completed or undone first. It is held for the bookkeeping of one message,
 * never for a copy.
 *
 * Threads: an endpoint (publisher or subscriber) is used by one thread at a time; different ones by
 * different threads. Ownership: publish leaves the caller's reference the caller's. What take gives
 * is the caller's until it says
 *   cox_pool_unref on the pool it was told. Pools are borrowed until the endpoint is freed.
 * Blocks: wait, until its deadline; all that changes the queue for the lock, which ends by itself:
 *   when one live process keeps it for 5 s (it is stopped, or lies), the call ends with
 *   COX_TIMEOUT. take also for another process that makes the copy it needs, while that one lives,
 *   10 s at most; then it makes its own. Opening a pool may visit a door, 1 s at most.
 * Bytes: what is in the queue's memory is input: COX_CORRUPT, never a crash.
 * Forks: in the child nothing works but the frees, which let go of memory and fds alone; COX_STATE.
 * exec: a process that execs lives on, and its endpoints count as its own until it ends: free
 * first. If the process dies: its subscribers count as having skipped everything, from the next
 * publish (one in 50 ms looks) or sweep on; its messages
 *   stay for those that have their pool, and are skipped (COX_PEER_DEAD, once each) by those that
 *   cannot get it any more. The last one out destroys the queue; there is no daemon, and no name.
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

/* Of each of the two, at most. */
#define COX_QUEUE_ENDPOINT_COUNT_MAX 65535
#define COX_QUEUE_DEPTH_MAX 65536

struct cox_queue_options {
    /* messages kept; 0: 16; a power of two */
    uint32_t depth;
    /* 0: 4; at most COX_DOMAIN_COUNT_MAX */
    uint32_t domain_count_max;
    /* 0: 8 */
    uint32_t publisher_count_max;
    /* 0: 64 */
    uint32_t subscriber_count_max;
    /* that messages may lie in; 0: 16 */
    uint32_t pool_count_max;
};

/* Returns 0; COX_INVALID: a limit, err says which; COX_NO_SPACE; -errno. */
COX_PUBLIC int cox_queue_create(const struct cox_queue_options *options,
                                struct cox_queue **ret_queue, struct cox_error *err);
/* expected (NULL: any): what the attacher was built for; where it is more than the queue has (a
 * deeper history, more domains), COX_UNSUPPORTED with both numbers: a queue does not grow under
 * those that are attached. fd is dup'd. Otherwise as cox_pool_attach. */
COX_PUBLIC int cox_queue_attach(int fd, const struct cox_queue_options *expected,
                                struct cox_queue **ret_queue, struct cox_error *err);
/* Endpoints first: asserted. NULL-safe, returns NULL. */
COX_PUBLIC struct cox_queue *cox_queue_free(struct cox_queue *queue);
COX_PUBLIC void cox_queue_freep(struct cox_queue **queue);  /* for _cox_cleanup_ */
COX_PUBLIC int cox_queue_fd(const struct cox_queue *queue); /* lent */
COX_PUBLIC int cox_queue_export(struct cox_queue *queue, struct cox_exporter *exporter,
                                struct cox_handle *ret_handle, struct cox_error *err);
COX_PUBLIC int cox_queue_open(const struct cox_handle *handle, const char *door_path,
                              uint64_t deadline_ns, const struct cox_queue_options *expected,
                              struct cox_queue **ret_queue, struct cox_error *err);
COX_PUBLIC uint64_t cox_queue_id(const struct cox_queue *queue);

struct cox_publisher_options {
    /* that its messages are in */
    struct cox_pool *pool;
    /* How others come to the pool: the queue keeps the handle. NULL: only processes that are told
     * the pool by other ways (cox_subscriber_options.pools) can take. */
    struct cox_exporter *exporter;
    /* others get the blocks for reading only */
    bool read_only;
    /* For the pools of others: publish lets copies go that lie there. What cannot be opened is left
     * to those that have it. */
    /* NULL: host memory only */
    const struct cox_domains *domains;
    const char *door_path;
};
/* Returns 0; COX_FULL: too many publishers, pools or domains, err says which and the limit; as
 * cox_pool_export. */
COX_PUBLIC int cox_publisher_new(struct cox_queue *queue,
                                 const struct cox_publisher_options *options,
                                 struct cox_publisher **ret_publisher, struct cox_error *err);
/* Its messages stay for those that have their pool by then, as if it had died. NULL-safe, returns
 * NULL. */
COX_PUBLIC struct cox_publisher *cox_publisher_free(struct cox_publisher *publisher);
/* The block becomes a message for every subscriber of now; ref is of the publisher's pool, with a
 * reference that the caller has. length: bytes of it that are meant, at most ref->size; user_data:
 * 8 bytes of the caller's own. Never waits for subscribers: what is depth messages old is let go.
 * Returns 0 and the message's number, from 1; COX_STALE, COX_NOT_FOUND, COX_INVALID, COX_FULL: as
 * cox_pool_pin; COX_CORRUPT. */
COX_PUBLIC int cox_publisher_publish(struct cox_publisher *publisher,
                                     const struct cox_block_ref *ref, uint64_t length,
                                     uint64_t user_data, uint64_t *ret_number,
                                     struct cox_error *err);

struct cox_publication {
    struct cox_block_ref ref;
    /* as above */
    uint64_t length, user_data;
    /* of the message, once it is published */
    uint64_t number;
};
/* Several at once, in this order, with nobody's between them: the lock is taken once. Returns as
 * publish, *ret_count publications are messages then, those before the one that failed; COX_INVALID
 * also for more of them than the queue is deep. What is no block of the publisher's pool, or too
 * short, is found before any is published. */
COX_PUBLIC int cox_publisher_publish_batch(struct cox_publisher *publisher,
                                           struct cox_publication *publications, uint32_t count,
                                           uint32_t *ret_count, struct cox_error *err);

struct cox_subscriber_options {
    /* In whose domain it takes: what lies elsewhere is copied into it. NULL: it takes host memory
     * as it is, and what lies elsewhere is COX_UNSUPPORTED. */
    struct cox_pool *pool;
    /* Pools that this process has already; others are opened by the queue's handles. */
    /* borrowed until it is freed */
    struct cox_pool *const *pools;
    uint32_t pool_count;
    const struct cox_domains *domains;
    /* where handles are opened else (handle.h) */
    const char *door_path;
    /* How others of its domain come to the copies that it makes in pool. NULL: those alone that are
     * told the pool by other ways; who cannot come to it makes a copy of its own. */
    struct cox_exporter *exporter;
};
/* Sees messages from now on. Returns 0; COX_FULL; -errno. */
COX_PUBLIC int cox_subscriber_new(struct cox_queue *queue,
                                  const struct cox_subscriber_options *options,
                                  struct cox_subscriber **ret_subscriber, struct cox_error *err);
/* What it has not taken counts as skipped. NULL-safe, returns NULL. */
COX_PUBLIC struct cox_subscriber *cox_subscriber_free(struct cox_subscriber *subscriber);

struct cox_message {
    /* one reference is held; unref on pool */
    struct cox_block_ref ref;
    /* lent while a reference of it is held; one that was lent to the subscriber: as long as that */
    struct cox_pool *pool;
    /* NULL: the domain has no addresses */
    const void *bytes;
    uint64_t length;
    uint64_t user_data;
    /* of the message */
    uint64_t number;
    /* messages that this subscriber missed before it */
    uint64_t skipped;
    /* this call made the copy */
    bool copied;
};
/* The oldest message not taken. Returns 0; COX_EMPTY: none; COX_FULL, COX_NO_SPACE, -ENOMEM: no
 * room for the copy in its pool, or its reference, the message stays; COX_PEER_DEAD, COX_DENIED,
 * COX_UNSUPPORTED, ...: this one cannot be had, err says why, and it counts as taken; COX_CORRUPT.
 */
COX_PUBLIC int cox_subscriber_take(struct cox_subscriber *subscriber,
                                   struct cox_message *ret_message, struct cox_error *err);
/* As many as there are, count_max (1 at least) at most, the oldest first. Returns 0: one at least;
 * COX_EMPTY; as take, of the one behind the *ret_count messages that are the caller's in any case.
 */
COX_PUBLIC int cox_subscriber_take_batch(struct cox_subscriber *subscriber,
                                         struct cox_message *ret_messages, uint32_t count_max,
                                         uint32_t *ret_count, struct cox_error *err);
/* Messages that take would go through, those skipped not counted. */
COX_PUBLIC uint64_t cox_subscriber_pending(const struct cox_subscriber *subscriber);

/* ---- waiting on several queues ---- */

struct cox_queue_set;

COX_PUBLIC int cox_queue_set_new(struct cox_queue_set **ret_set);
COX_PUBLIC struct cox_queue_set *cox_queue_set_free(struct cox_queue_set *set); /* NULL-safe */
/* Borrowed until removed. Returns 0; COX_FULL: 64 at most; COX_BUSY: it is in. */
COX_PUBLIC int cox_queue_set_add(struct cox_queue_set *set, struct cox_subscriber *subscriber,
                                 struct cox_error *err);
COX_PUBLIC void cox_queue_set_remove(struct cox_queue_set *set, struct cox_subscriber *subscriber);
/* Waits until one has something to take; of several, one after the other gets its turn. Sleeps
 * without waking up, but where the kernel can sleep on one word alone (before Linux 5.16): there it
 * looks every 10 ms. Returns 0; COX_TIMEOUT; COX_ABORTED: triggered, once per trigger; COX_EMPTY:
 * the set is empty; COX_CORRUPT, -errno. */
COX_PUBLIC int cox_queue_set_wait(struct cox_queue_set *set, uint64_t deadline_ns,
                                  struct cox_subscriber **ret_subscriber);
/* From any thread, and from signal handlers. */
COX_PUBLIC void cox_queue_set_trigger(struct cox_queue_set *set);

/* ---- the dead, and display ---- */

/* Takes out endpoints of dead processes and lets go what only they kept. Returns how many
 * endpoints. */
COX_PUBLIC uint32_t cox_queue_sweep(struct cox_queue *queue);
COX_PUBLIC void cox_queue_dump(struct cox_queue *queue,
                               void (*line)(void *context, const char *text), void *context);

#ifdef __cplusplus
}
#endif

#endif
