/*
 * pool_internal: what the files of the pool share. Private to the library.
 *
 * Layers, each of which calls only those below it (tests/tree/calls.py):
 *
 *   pool.c            create, attach, free, handles
 *   pool_pin.c: pins
 *   pool_reference.c  allocate, ref, unref, find, copy; pool_owner.c: rows, claim and leave
 *   pool_sweep.c      what dead owners left
 *   pool_queues.c     queues that joined the pool
 *   pool_reclaim.c    frees blocks that nothing counts: the protocol; finds free ones
 *   pool_slab.c       slabs and runs of them; trims pages
 *   pool_pages.c      on_demand
 *   pool_block.c      steps of a block's word and counts
 *   pool_identity.c   liveness of processes; pool_local_refs.c: references of this process, by
 *                     epoch, in private memory
 *   pool_geometry.c   sizes and offsets
 *
 * pool_display.c has stats and dump.
 *
 * `as` is the owner on whose behalf a step is done: this process, or a dead one whose row this
 * thread sweeps.
 */
#ifndef COX_MEMORY_POOL_INTERNAL_H
#define COX_MEMORY_POOL_INTERNAL_H

#include "channel/shm/region.h"
#include "pool_geometry.h"

#include <pthread.h>

/* Threads of one process close a block one after the other; different blocks rarely share a
 * lock. */
#define COX_POOL_LOCK_COUNT 16
/* Classes of a slab pool: 64 bytes << 24 at most. */
#define COX_POOL_CLASS_COUNT 32
/* How often a waiter sweeps dead owners. */
#define COX_POOL_SLICE_NS (50 * COX_NSEC_PER_MSEC)

struct cox_pool_local_refs;

struct cox_pool {
    struct cox_pool_geometry geometry;
    uint64_t id;
    struct cox_region words;
    int words_fd;
    /* if the caller gave none */
    struct cox_domains *own_domains;
    struct cox_domain_memory *memory;
    bool read_only;
    /* row of this process; UINT32_MAX: none */
    uint32_t owner;
    int32_t pid;
    uint64_t start;

    struct cox_pool_layout_header *header;
    struct cox_pool_layout_owner *owners;
    struct cox_pool_layout_block *blocks;
    struct cox_pool_layout_pins *pins;
    struct cox_pool_layout_hints *hints;
    struct cox_pool_layout_slab *slabs;
    struct cox_pool_layout_pages *pages;

    struct cox_pool_local_refs *local_refs;
    pthread_mutex_t locks[COX_POOL_LOCK_COUNT];
    /* guards joined_counts and this process's owner_joined bits */
    pthread_mutex_t joined_lock;
    /* by place: joins minus leaves */
    uint32_t joined_counts[COX_POOL_QUEUE_COUNT_MAX];
    /* where the next search for a free block starts */
    _Atomic uint32_t cursors[COX_POOL_CLASS_COUNT];
};

static inline _Atomic uint64_t *cox_pool_block_word_of(const struct cox_pool *pool, uint32_t block)
{
    return &pool->blocks[block].block_word;
}

static inline struct cox_pool_layout_count *cox_pool_count_of(const struct cox_pool *pool,
                                                              uint32_t owner, uint32_t block)
{
    struct cox_pool_layout_count *row =
        (struct cox_pool_layout_count *)((uint8_t *)pool->words.base +
                                         pool->geometry.reference_rows +
                                         owner * pool->geometry.row_stride);
    return &row[block];
}

/* What is committed at a time: a block, or a slab. */
static inline uint64_t cox_pool_page_size(const struct cox_pool *pool)
{
    return pool->geometry.slab_count ? pool->geometry.slab_size : pool->geometry.block_size;
}

/* Rows that were ever used. The word is input. */
static inline uint32_t cox_pool_owner_high(const struct cox_pool *pool)
{
    uint32_t high = atomic_load(&pool->header->owner_high);
    return high < pool->geometry.owner_count ? high : pool->geometry.owner_count;
}

static inline uint64_t cox_pool_block_offset(const struct cox_pool *pool, uint32_t block)
{
    return block * pool->geometry.block_size;
}

/* ---- pool.c ---- */

/* A random number, not 0; what begins the error's text. Returns 0 or -errno. */
int cox_pool_make_id(const char *what, uint64_t *ret_id, struct cox_error *err);

/* ---- pool_identity.c ---- */

/* Returns 0; COX_STATE: in the child of a fork, whose row is its parent's. */
int cox_pool_check_here(const struct cox_pool *pool, struct cox_error *err);

/* LIVE or SWEEPING, and the process is dead. */
bool cox_pool_identity_is_dead(const struct cox_pool *pool, uint64_t identity);

/* ---- pool_owner.c ---- */

/* Takes a row, that of a dead owner if no other is left. Returns 0 or COX_FULL. */
int cox_pool_owner_claim(struct cox_pool *pool, uint32_t incarnation, struct cox_error *err);
/* Releases all references and pins of this process, and its row. */
void cox_pool_owner_leave(struct cox_pool *pool);
/* ---- pool_block.c ---- */

/* FREE -> CLAIMED; false: another owner was faster, or it is not free. */
bool cox_pool_block_claim(struct cox_pool *pool, uint32_t block, uint32_t as, uint64_t *ret_epoch);
/* CLAIMED -> FREE with the same epoch: no other process knows it. */
void cox_pool_block_unclaim(struct cox_pool *pool, uint32_t block, uint64_t epoch, uint32_t as);
/* CLAIMED -> USED with this epoch, counted by this process. Returns 0; COX_FULL: a count at
 * its limit. */
int cox_pool_block_use(struct cox_pool *pool, uint32_t block, uint64_t epoch);
/* One more in this process's row. Returns 0 or COX_FULL. */
int cox_pool_count_add(struct cox_pool *pool, uint32_t block);
/* A row or a pin counts it. */
bool cox_pool_block_is_counted(const struct cox_pool *pool, uint32_t block);
void cox_pool_hint(struct cox_pool *pool, uint32_t block);

/* ---- pool_pages.c: a page is the memory of a block; in a slab pool, of a slab ---- */

/* Allocates pages of a block that this process has in CLAIMED. Returns 0, or the domain's code with
 * nothing allocated. */
int cox_pool_pages_commit(struct cox_pool *pool, uint32_t page, struct cox_error *err);
/* Releases pages of a block that `as` has in CLAIMED, or had when it died. */
void cox_pool_pages_decommit(struct cox_pool *pool, uint32_t page);
bool cox_pool_pages_are_there(const struct cox_pool *pool, uint32_t page);
/* Counts the pages of a free block as retained, and no longer. */
void cox_pool_pages_retain(struct cox_pool *pool, uint32_t page);
void cox_pool_pages_release(struct cox_pool *pool, uint32_t page);

/* ---- pool_slab.c ---- */

/* Bytes of the block that starts here; 0: none does. */
uint64_t cox_pool_slab_block_size(const struct cox_pool *pool, uint32_t block);
/* First unit of the block that contains the unit; UINT32_MAX: none. */
uint32_t cox_pool_slab_block_of(const struct cox_pool *pool, uint32_t unit);
/* Claims a free block. Returns 0; COX_FULL; the domain's code. */
int cox_pool_slab_find(struct cox_pool *pool, uint64_t size, uint32_t *ret_block,
                       uint64_t *ret_epoch, struct cox_error *err);
/* After the block became FREE: its slab may be empty. */
void cox_pool_slab_freed(struct cox_pool *pool, uint32_t block, uint32_t as);
/* Reverts slabs that a dead owner was changing, and frees runs whose block is free. */
void cox_pool_slab_sweep(struct cox_pool *pool, uint32_t as);

/* If more than retain_size is retained, claims the free block and releases its pages. */
void cox_pool_pages_trim(struct cox_pool *pool, uint32_t page, uint32_t as);
/* Recounts retained pages, and trims all: after a death. */
void cox_pool_pages_sweep(struct cox_pool *pool, uint32_t as);

/* ---- pool_reclaim.c ---- */

/* One less; frees the block if that was the last one of all. False:
 * there was none. */
bool cox_pool_count_drop(struct cox_pool *pool, uint32_t block);
/* USED or CLOSING, and nothing counts it -> FREE. To call after every decrement and unpin. */
void cox_pool_block_reclaim(struct cox_pool *pool, uint32_t block, uint32_t as);
/* Claims a free block of a fixed pool. Returns 0 or COX_FULL; only_pages: one whose pages are
 * allocated. */
int cox_pool_block_find(struct cox_pool *pool, bool only_pages, uint32_t *ret_block,
                        uint64_t *ret_epoch);

/* ---- pool_local_refs.c ---- */

int cox_pool_local_refs_new(uint32_t block_count, struct cox_pool_local_refs **ret_refs,
                            struct cox_error *err);
struct cox_pool_local_refs *cox_pool_local_refs_free(struct cox_pool_local_refs *refs,
                                                     uint32_t block_count); /* NULL-safe */
/* False in the child of a fork. */
bool cox_pool_local_refs_is_here(const struct cox_pool_local_refs *refs);
/* Adds a reference. Returns 0; COX_FULL; -ENOMEM. */
int cox_pool_local_refs_add(struct cox_pool_local_refs *refs, uint32_t block, uint64_t epoch);
/* Removes a reference; false: none. */
bool cox_pool_local_refs_drop(struct cox_pool_local_refs *refs, uint32_t block, uint64_t epoch);
bool cox_pool_local_refs_is_empty(const struct cox_pool_local_refs *refs, uint32_t block_count);
bool cox_pool_local_refs_has(struct cox_pool_local_refs *refs, uint32_t block, uint64_t epoch);

/* ---- pool_reference.c ---- */

/* Checks the numbers of a reference. Returns 0; COX_NOT_FOUND; COX_INVALID. */
int cox_pool_check_ref(const struct cox_pool *pool, const struct cox_block_ref *ref,
                       struct cox_error *err);
/* This process holds the reference. */
bool cox_pool_has(const struct cox_pool *pool, const struct cox_block_ref *ref);

/* ---- pool_queues.c ---- */

#define COX_POOL_PLACE_NONE UINT32_MAX
/* The queue's place in the table; queue_id 0: a free one. */
uint32_t cox_pool_place_of(const struct cox_pool *pool, uint64_t queue_id);

/* Clears pins of queues that no owner has joined, on behalf of `as`. Returns how many. */
uint64_t cox_pool_queues_sweep(struct cox_pool *pool, uint32_t as);

/* ---- pool_sweep.c ---- */

/* As cox_pool_sweep. Returns whether it did anything: a dead owner also leaves blocks that it does
 * not count. */
bool cox_pool_sweep_dead(struct cox_pool *pool, uint64_t *released);

/* Takes a dead owner's row by compare-and-swap and releases what it held; then the row is EMPTY, or
 * taken by `next` (0: none). Returns whether it won the row. */
bool cox_pool_sweep_owner(struct cox_pool *pool, uint32_t owner, uint64_t identity, uint64_t next,
                          uint64_t *released);

/* True if this process holds no reference to any block. Scans the local references of all
 * blocks. */
bool cox_pool_is_idle(const struct cox_pool *pool);

struct cox_domain_id cox_pool_domain(const struct cox_pool *pool);

/* Find the block that contains a byte, by its offset or address, and its present epoch. They
 * take no reference.
 * Returns
 *   0
 *   COX_NOT_FOUND: the byte is not in this pool, or in no used block
 */
int cox_pool_find(const struct cox_pool *pool, uint64_t offset, struct cox_block_ref *ret_ref);
int cox_pool_find_pointer(const struct cox_pool *pool, const void *pointer,
                          struct cox_block_ref *ret_ref);

/* Joins this process to a queue (its id, not 0), so that the queue's pins stay valid while the
 * process lives. Each join needs one leave, because one process may have several users of the pool;
 * free leaves all queues.
 * Returns
 *   0
 *   COX_FULL
 *   COX_INVALID
 *   COX_BUSY: another live process, probably stopped, has held the lock of the queues for a second
 */
int cox_pool_queue_join(struct cox_pool *pool, uint64_t queue_id, struct cox_error *err);
void cox_pool_queue_leave(struct cox_pool *pool, uint64_t queue_id);
/* Sets the pin {queue, tag} on the block, to which this process must have a reference. tag: 1 to
 * 2^48 - 1. Idempotent.
 * Returns
 *   0
 *   COX_STALE
 *   COX_FULL: the block has COX_POOL_PIN_COUNT_MAX other pins
 *   COX_NOT_FOUND: this process has not joined the queue
 *   COX_INVALID
 */
int cox_pool_pin(struct cox_pool *pool, const struct cox_block_ref *ref, uint64_t queue_id,
                 uint64_t tag, struct cox_error *err);
/* Clears the pin, and frees the block if no row counts it and no other pin is left. Idempotent, in
 * any process. */
void cox_pool_unpin(struct cox_pool *pool, const struct cox_block_ref *ref, uint64_t queue_id,
                    uint64_t tag);

/* Owners, queues and used blocks as text, for a debugger or a log. line is called for each line. */
void cox_pool_dump(const struct cox_pool *pool, void (*line)(void *context, const char *text),
                   void *context);

#endif
