/*
 * queue_layout: every struct of a queue's memory. Private to the library.
 *
 *   0                 header: geometry, written by the creator before anyone attaches; magic last
 *   128               lock (queue_lock.h)
 *   256               state of the queue
 *   384               intent of the lock's owner
 *   512               domains[32]
 *   768               pools[pool_count_max]
 *   then, each where the one before ends: publishers, subscribers,
 *   pending_frees[pending_free_count_max], and from a line's start on the ring: depth rows, each
 *   with domain_count_max copies
 *
 * Only the lock's owner writes what is at 256 and behind; fields that are read without the lock say
 * so. Readers load each word once, check the copy and use the copy: any process that has the memory
 * can write anything.
 *
 * A process is one word, its identity: pid in 22 bits (the most that Linux has), start time in 42;
 * 0: none. So the word alone tells, in every state, which process it belongs to and whether that is
 * dead.
 */
#ifndef COX_MEMORY_QUEUE_LAYOUT_H
#define COX_MEMORY_QUEUE_LAYOUT_H

#include <coxswain/memory/domain.h>

#include <assert.h>
#include <stdatomic.h>

#define COX_QUEUE_MAGIC UINT64_C(0x3145554555584F43) /* "COXUEUE1" */
#define COX_QUEUE_VERSION 1u
#define COX_QUEUE_ABI 0x01020304u /* reads differently on a machine of the other byte order */

struct cox_queue_layout_header {
    /* stored last with release; partner: the acquire load of attach */
    _Atomic uint64_t queue_magic;
    uint32_t version;
    uint32_t abi;
    /* of the whole memory */
    uint64_t size;
    /* random, not 0; the pools know the queue by it */
    uint64_t id;
    /* boot, pid and time namespace (handle.h): identities are valid only there */
    uint64_t system;
    uint32_t depth;
    uint32_t domain_count_max;
    uint32_t publisher_count_max;
    uint32_t subscriber_count_max;
    uint32_t pool_count_max;
    uint32_t pending_free_count_max;
    uint8_t padding[128 - 64];
};

struct cox_queue_layout_lock {
    /* identity; 0: free */
    _Atomic uint64_t lock_owner;
    /* incremented by each owner: shows waiters that the lock changes hands */
    _Atomic uint64_t lock_turns;
    /* waiters block on it */
    _Atomic uint32_t lock_wake;
    /* 1: a process blocks on lock_wake */
    _Atomic uint32_t lock_waiting;
    uint8_t padding[128 - 24];
};

struct cox_queue_layout_state {
    /* number of the last message; seq_cst, also read without the lock */
    _Atomic uint64_t queue_head;
    /* Number of the message that is being published, 0: none; also read without the lock. Stored
     * before subscribers are woken, cleared after the head is stored: a subscriber that sees it
     * takes the lock before it blocks. */
    _Atomic uint64_t queue_publishing;
    /* incremented when a copy is done or cancelled; waiters block on it */
    _Atomic uint32_t queue_copied;
    /* 1: a process blocks on queue_copied */
    _Atomic uint32_t queue_copy_wait;
    /* entries from here on are unused */
    _Atomic uint32_t publisher_end;
    _Atomic uint32_t subscriber_end;
    _Atomic uint32_t pending_free_end;
    /* frees that did not fit the table */
    _Atomic uint32_t pending_free_lost;
    /* incremented with each entry */
    _Atomic uint64_t pending_free_turn;
    /* incremented with each pool entry */
    _Atomic uint64_t pool_turn;
    uint8_t padding[128 - 56];
};

enum cox_queue_intent {
    COX_QUEUE_INTENT_NONE = 0,
    COX_QUEUE_INTENT_PIN = 1, /* the block is about to be pinned as a copy of the message, or is */
};

/* Written before a block is pinned, cleared when the row refers to it. When the owner died, its
 * successor unpins that block unless the row has it: clearing a pin that was never set is
 * harmless. */
struct cox_queue_layout_intent {
    /* enum cox_queue_intent; release, stored last */
    _Atomic uint32_t intent_step;
    _Atomic uint32_t intent_pool;
    _Atomic uint32_t intent_block;
    _Atomic uint32_t intent_domain;
    _Atomic uint64_t intent_epoch;
    _Atomic uint64_t intent_size;
    _Atomic uint64_t intent_number;
    uint8_t padding[128 - 40];
};

enum cox_queue_pool_flags {
    COX_QUEUE_POOL_HANDLE = 1,    /* it has a handle to open */
    COX_QUEUE_POOL_READ_ONLY = 2, /* opened for reading only */
};

/* An entry of one publisher or subscriber; entries without a handle are shared by all endpoints
 * that give none. It stays while an endpoint, a message or a pending free refers to it. */
struct cox_queue_layout_pool {
    /* 0: free; stored last */
    _Atomic uint64_t pool_id;
    /* unique among all entries, ever */
    _Atomic uint64_t pool_stamp;
    /* index */
    _Atomic uint32_t pool_domain;
    _Atomic uint32_t pool_flags;
    /* struct cox_pool_handle */
    _Atomic uint64_t pool_handle[16];
    uint8_t padding[192 - 152];
};

struct cox_queue_layout_publisher {
    /* identity; 0: free; stored last */
    _Atomic uint64_t publisher_process;
    /* index */
    _Atomic uint32_t publisher_pool;
    uint32_t reserved;
    /* messages; for display */
    _Atomic uint64_t publisher_count;
    uint64_t reserved2;
};

struct cox_queue_layout_subscriber {
    /* identity; 0: free; stored last */
    _Atomic uint64_t subscriber_process;
    /* number of the message it takes next */
    _Atomic uint64_t subscriber_next;
    /* index */
    _Atomic uint32_t subscriber_domain;
    /* index; UINT32_MAX: none */
    _Atomic uint32_t subscriber_pool;
    /* Futex of this subscriber alone, so that it cannot miss another one's wakeup. Written without
     * the lock, as the next. */
    _Atomic uint32_t subscriber_wake;
    /* 1: about to block, or blocked; seq_cst */
    _Atomic uint32_t subscriber_sleeping;
    uint8_t padding[64 - 32];
};

/* A copy to unpin, by a process that has its pool: the one that ended the message has not. */
struct cox_queue_layout_pending_free {
    /* 0: free; stored last */
    _Atomic uint64_t pending_free_tag;
    /* pool_stamp of the entry */
    _Atomic uint64_t pending_free_stamp;
    /* index */
    _Atomic uint32_t pending_free_pool;
    _Atomic uint32_t pending_free_block;
    _Atomic uint64_t pending_free_epoch;
    _Atomic uint64_t pending_free_size;
    uint64_t reserved;
};

/* A message in one domain. */
struct cox_queue_layout_copy {
    /* identity of the process that makes the copy; 0: none */
    _Atomic uint64_t copy_copier;
    _Atomic uint64_t copy_epoch;
    _Atomic uint64_t copy_size;
    /* index */
    _Atomic uint32_t copy_pool;
    _Atomic uint32_t copy_block;
};

/* In row_number: the message cannot be taken any more. A death during the end leaves the bit set,
 * so copies that may be gone do not count. */
#define COX_QUEUE_ROW_ENDING (UINT64_C(1) << 63)

struct cox_queue_layout_row {
    /* 0: none; stored last, cleared after its copies, which are unpinned while COX_QUEUE_ROW_ENDING
     * is set */
    _Atomic uint64_t row_number;
    _Atomic uint64_t row_user_data;
    _Atomic uint64_t row_length;
    /* bit d: a copy in domain d exists, and the message pins it */
    _Atomic uint32_t row_mask;
    /* subscribers that have not taken it */
    _Atomic uint32_t row_interest;
    uint64_t reserved[4];
    struct cox_queue_layout_copy copies[];
};

/* The map above, for compilers. */
static_assert(sizeof(struct cox_queue_layout_header) == 128, "header");
static_assert(offsetof(struct cox_queue_layout_header, version) == 8, "header");
static_assert(offsetof(struct cox_queue_layout_header, abi) == 12, "header");
static_assert(offsetof(struct cox_queue_layout_header, size) == 16, "header");
static_assert(offsetof(struct cox_queue_layout_header, id) == 24, "header");
static_assert(offsetof(struct cox_queue_layout_header, system) == 32, "header");
static_assert(offsetof(struct cox_queue_layout_header, depth) == 40, "header");
static_assert(offsetof(struct cox_queue_layout_header, domain_count_max) == 44, "header");
static_assert(offsetof(struct cox_queue_layout_header, publisher_count_max) == 48, "header");
static_assert(offsetof(struct cox_queue_layout_header, subscriber_count_max) == 52, "header");
static_assert(offsetof(struct cox_queue_layout_header, pool_count_max) == 56, "header");
static_assert(offsetof(struct cox_queue_layout_header, pending_free_count_max) == 60, "header");
static_assert(sizeof(struct cox_queue_layout_lock) == 128, "lock");
static_assert(offsetof(struct cox_queue_layout_lock, lock_turns) == 8, "lock");
static_assert(offsetof(struct cox_queue_layout_lock, lock_wake) == 16, "lock");
static_assert(offsetof(struct cox_queue_layout_lock, lock_waiting) == 20, "lock");
static_assert(sizeof(struct cox_queue_layout_state) == 128, "state");
static_assert(offsetof(struct cox_queue_layout_state, queue_publishing) == 8, "state");
static_assert(offsetof(struct cox_queue_layout_state, queue_copied) == 16, "state");
static_assert(offsetof(struct cox_queue_layout_state, queue_copy_wait) == 20, "state");
static_assert(offsetof(struct cox_queue_layout_state, publisher_end) == 24, "state");
static_assert(offsetof(struct cox_queue_layout_state, subscriber_end) == 28, "state");
static_assert(offsetof(struct cox_queue_layout_state, pending_free_end) == 32, "state");
static_assert(offsetof(struct cox_queue_layout_state, pending_free_lost) == 36, "state");
static_assert(offsetof(struct cox_queue_layout_state, pending_free_turn) == 40, "state");
static_assert(offsetof(struct cox_queue_layout_state, pool_turn) == 48, "state");
static_assert(sizeof(struct cox_queue_layout_intent) == 128, "intent");
static_assert(offsetof(struct cox_queue_layout_intent, intent_pool) == 4, "intent");
static_assert(offsetof(struct cox_queue_layout_intent, intent_block) == 8, "intent");
static_assert(offsetof(struct cox_queue_layout_intent, intent_domain) == 12, "intent");
static_assert(offsetof(struct cox_queue_layout_intent, intent_epoch) == 16, "intent");
static_assert(offsetof(struct cox_queue_layout_intent, intent_size) == 24, "intent");
static_assert(offsetof(struct cox_queue_layout_intent, intent_number) == 32, "intent");
static_assert(sizeof(struct cox_queue_layout_pool) == 192, "pool");
static_assert(offsetof(struct cox_queue_layout_pool, pool_stamp) == 8, "pool");
static_assert(offsetof(struct cox_queue_layout_pool, pool_domain) == 16, "pool");
static_assert(offsetof(struct cox_queue_layout_pool, pool_flags) == 20, "pool");
static_assert(offsetof(struct cox_queue_layout_pool, pool_handle) == 24, "pool");
static_assert(sizeof(struct cox_queue_layout_publisher) == 32, "publisher");
static_assert(offsetof(struct cox_queue_layout_publisher, publisher_pool) == 8, "publisher");
static_assert(offsetof(struct cox_queue_layout_publisher, publisher_count) == 16, "publisher");
static_assert(sizeof(struct cox_queue_layout_subscriber) == 64, "subscriber");
static_assert(offsetof(struct cox_queue_layout_subscriber, subscriber_next) == 8, "subscriber");
static_assert(offsetof(struct cox_queue_layout_subscriber, subscriber_domain) == 16, "subscriber");
static_assert(offsetof(struct cox_queue_layout_subscriber, subscriber_pool) == 20, "subscriber");
static_assert(offsetof(struct cox_queue_layout_subscriber, subscriber_wake) == 24, "subscriber");
static_assert(offsetof(struct cox_queue_layout_subscriber, subscriber_sleeping) == 28,
              "subscriber");
static_assert(sizeof(struct cox_queue_layout_pending_free) == 48, "pending free");
static_assert(offsetof(struct cox_queue_layout_pending_free, pending_free_stamp) == 8,
              "pending free");
static_assert(offsetof(struct cox_queue_layout_pending_free, pending_free_pool) == 16,
              "pending free");
static_assert(offsetof(struct cox_queue_layout_pending_free, pending_free_block) == 20,
              "pending free");
static_assert(offsetof(struct cox_queue_layout_pending_free, pending_free_epoch) == 24,
              "pending free");
static_assert(offsetof(struct cox_queue_layout_pending_free, pending_free_size) == 32,
              "pending free");
static_assert(sizeof(struct cox_queue_layout_copy) == 32, "copy");
static_assert(offsetof(struct cox_queue_layout_copy, copy_epoch) == 8, "copy");
static_assert(offsetof(struct cox_queue_layout_copy, copy_size) == 16, "copy");
static_assert(offsetof(struct cox_queue_layout_copy, copy_pool) == 24, "copy");
static_assert(offsetof(struct cox_queue_layout_copy, copy_block) == 28, "copy");
static_assert(sizeof(struct cox_queue_layout_row) == 64, "row");
static_assert(offsetof(struct cox_queue_layout_row, row_user_data) == 8, "row");
static_assert(offsetof(struct cox_queue_layout_row, row_length) == 16, "row");
static_assert(offsetof(struct cox_queue_layout_row, row_mask) == 24, "row");
static_assert(offsetof(struct cox_queue_layout_row, row_interest) == 28, "row");
static_assert(offsetof(struct cox_queue_layout_row, copies) == 64, "row");

/* The fixed part. */
struct cox_queue_layout {
    struct cox_queue_layout_header header;
    struct cox_queue_layout_lock lock;
    struct cox_queue_layout_state state;
    struct cox_queue_layout_intent intent;
    /* kind in bits 32-63, device below; 0: free */
    _Atomic uint64_t queue_domains[COX_DOMAIN_COUNT_MAX];
    struct cox_queue_layout_pool pools[];
};
static_assert(offsetof(struct cox_queue_layout, lock) == 128, "layout");
static_assert(offsetof(struct cox_queue_layout, state) == 256, "layout");
static_assert(offsetof(struct cox_queue_layout, intent) == 384, "layout");
static_assert(offsetof(struct cox_queue_layout, queue_domains) == 512, "layout");
static_assert(offsetof(struct cox_queue_layout, pools) == 768, "layout");

#endif
