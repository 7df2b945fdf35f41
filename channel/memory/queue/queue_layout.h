/*
 * queue_layout: every struct of a queue's memory. Private to the library.
 *
 *   0                 header: geometry, written by the creator before anyone attaches; magic last
 *   128               the lock (queue_lock.h)
 *   256               where the queue stands
 *   384               the intent of who has the lock
 *   512               domains[32]
 *   768               pools[pool_count_max]
 *   then, each where the one before ends: publishers, subscribers,
 *   pending_frees[pending_free_count_max], and from a line's start on the ring: depth rows, each
 *   with domain_count_max copies
 *
 * Everything from 256 on is written by who has the lock; what is looked at without it says so. What
 * anybody reads is read once, checked, and used: the processes that have the memory may write
 * anything. A process is one word, its identity: pid in 22 bits (the most that Linux has), start
 * time in 42; 0: none. So whom a word belongs to, and whether that one is dead, is known from the
 * word alone, in every state.
 */
#ifndef COX_CHANNEL_MEMORY_QUEUE_LAYOUT_H
#define COX_CHANNEL_MEMORY_QUEUE_LAYOUT_H

#include "channel/memory/domain/domain.h"

#include <assert.h>
#include <stdatomic.h>

#define COX_QUEUE_MAGIC UINT64_C(0x3145554555584F43) /* "COXUEUE1" */
#define COX_QUEUE_VERSION 1u
#define COX_QUEUE_ABI 0x01020304u /* read back swapped by a machine of the other byte order */

struct cox_queue_layout_header {
    /* stored last with release; partner: the acquire load of attach */
    _Atomic uint64_t queue_magic;
    uint32_t version;
    uint32_t abi;
    /* of all */
    uint64_t size;
    /* random, not 0; the holder of the pools' holds */
    uint64_t id;
    /* boot, pid and time namespace (handle.h): identities mean nothing elsewhere */
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
    /* by each owner, one more: who waits sees that it moves */
    _Atomic uint64_t lock_turns;
    /* what those sleep on who wait for it */
    _Atomic uint32_t lock_wake;
    /* 1: somebody does */
    _Atomic uint32_t lock_waiting;
    uint8_t padding[128 - 24];
};

struct cox_queue_layout_state {
    /* number of the last message; seq_cst, looked at without the lock */
    _Atomic uint64_t queue_head;
    /* The number of a message that is being published, 0: none. Stored before sleepers are woken,
     * and cleared after the head was stored: who sees it goes through the lock before it sleeps.
     * Looked at without the lock. */
    _Atomic uint64_t queue_publishing;
    /* moves on when a copy is done or given up; slept on */
    _Atomic uint32_t queue_copied;
    /* 1: somebody does */
    _Atomic uint32_t queue_copy_wait;
    /* no used one from here on */
    _Atomic uint32_t publisher_end;
    _Atomic uint32_t subscriber_end;
    _Atomic uint32_t pending_free_end;
    /* not kept for want of room */
    _Atomic uint32_t pending_free_lost;
    /* one more with each that is kept */
    _Atomic uint64_t pending_free_turn;
    /* one more with each pool that is entered */
    _Atomic uint64_t pool_turn;
    uint8_t padding[128 - 56];
};

enum cox_queue_intent {
    COX_QUEUE_INTENT_NONE = 0,
    COX_QUEUE_INTENT_PIN = 1, /* the block is about to be held as a copy of the message, or is */
};

/* Written before a block is held, cleared when a row says the same. Of a dead owner it says what to
 * let go unless the row has it: a hold that was never made is let go without harm. */
struct cox_queue_layout_intent {
    /* enum cox_queue_intent; release, after the rest */
    _Atomic uint32_t intent_step;
    _Atomic uint32_t intent_pool;
    _Atomic uint32_t intent_block;
    _Atomic uint32_t intent_domain;
    _Atomic uint64_t intent_generation;
    _Atomic uint64_t intent_size;
    _Atomic uint64_t intent_number;
    uint8_t padding[128 - 40];
};

enum cox_queue_pool_flags {
    COX_QUEUE_POOL_HANDLE = 1,    /* it can be opened */
    COX_QUEUE_POOL_READ_ONLY = 2, /* and is to be opened so */
};

/* Of one publisher or subscriber, or of all that have none to tell how to open it. It stays while
 * an endpoint, a message or a deferred release refers to it. */
struct cox_queue_layout_pool {
    /* 0: free; after the rest */
    _Atomic uint64_t pool_id;
    /* of no other entry, ever */
    _Atomic uint64_t pool_stamp;
    /* index */
    _Atomic uint32_t pool_domain;
    _Atomic uint32_t pool_flags;
    /* struct cox_pool_handle */
    _Atomic uint64_t pool_handle[16];
    uint8_t padding[192 - 152];
};

struct cox_queue_layout_publisher {
    /* identity; 0: free; after the rest */
    _Atomic uint64_t publisher_process;
    /* index */
    _Atomic uint32_t publisher_pool;
    uint32_t reserved;
    /* messages; for display */
    _Atomic uint64_t publisher_count;
    uint64_t reserved2;
};

struct cox_queue_layout_subscriber {
    /* identity; 0: free; after the rest */
    _Atomic uint64_t subscriber_process;
    /* number of the message it takes next */
    _Atomic uint64_t subscriber_next;
    /* index */
    _Atomic uint32_t subscriber_domain;
    /* index; UINT32_MAX: none of its own */
    _Atomic uint32_t subscriber_pool;
    /* Its own word to sleep on, so that nobody sleeps through another's wake. Written without the
     * lock, as the next. */
    _Atomic uint32_t subscriber_wake;
    /* 1: about to sleep, or asleep; seq_cst */
    _Atomic uint32_t subscriber_sleeping;
    uint8_t padding[64 - 32];
};

/* A copy to be let go, by whoever has its pool: who let the message go has not. */
struct cox_queue_layout_pending_free {
    /* 0: free; after the rest */
    _Atomic uint64_t pending_free_tag;
    /* of the pool's entry */
    _Atomic uint64_t pending_free_stamp;
    /* index */
    _Atomic uint32_t pending_free_pool;
    _Atomic uint32_t pending_free_block;
    _Atomic uint64_t pending_free_generation;
    _Atomic uint64_t pending_free_size;
    uint64_t reserved;
};

/* A message in one domain. */
struct cox_queue_layout_copy {
    /* identity of who is making it; 0: nobody */
    _Atomic uint64_t copy_copier;
    _Atomic uint64_t copy_generation;
    _Atomic uint64_t copy_size;
    /* index */
    _Atomic uint32_t copy_pool;
    _Atomic uint32_t copy_block;
};

/* In row_number: nobody takes the message any more, whoever has not yet. A death in between leaves
 * it set, and no copy counts that may be gone. */
#define COX_QUEUE_ROW_ENDING (UINT64_C(1) << 63)

struct cox_queue_layout_row {
    /* of the message; 0: none; after the rest, and cleared after its copies, which are let go with
     * COX_QUEUE_ROW_ENDING set here */
    _Atomic uint64_t row_number;
    _Atomic uint64_t row_user_data;
    _Atomic uint64_t row_length;
    /* bit d: there is a copy in domain d, and the message holds it */
    _Atomic uint32_t row_mask;
    /* subscribers whose next is not beyond it */
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
static_assert(offsetof(struct cox_queue_layout_intent, intent_generation) == 16, "intent");
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
static_assert(offsetof(struct cox_queue_layout_pending_free, pending_free_generation) == 24,
              "pending free");
static_assert(offsetof(struct cox_queue_layout_pending_free, pending_free_size) == 32,
              "pending free");
static_assert(sizeof(struct cox_queue_layout_copy) == 32, "copy");
static_assert(offsetof(struct cox_queue_layout_copy, copy_generation) == 8, "copy");
static_assert(offsetof(struct cox_queue_layout_copy, copy_size) == 16, "copy");
static_assert(offsetof(struct cox_queue_layout_copy, copy_pool) == 24, "copy");
static_assert(offsetof(struct cox_queue_layout_copy, copy_block) == 28, "copy");
static_assert(sizeof(struct cox_queue_layout_row) == 64, "row");
static_assert(offsetof(struct cox_queue_layout_row, row_user_data) == 8, "row");
static_assert(offsetof(struct cox_queue_layout_row, row_length) == 16, "row");
static_assert(offsetof(struct cox_queue_layout_row, row_mask) == 24, "row");
static_assert(offsetof(struct cox_queue_layout_row, row_interest) == 28, "row");
static_assert(offsetof(struct cox_queue_layout_row, copies) == 64, "row");

/* What is at fixed places. */
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
