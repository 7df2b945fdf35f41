/*
 * pool: blocks of memory that several processes share, with reference counts per process.
 *
 * For processes that trust each other: each can write all shared words, so one faulty process can
 * corrupt the pool for all. Where the readers do not trust each other, use other means: KV caches
 * are kv_blocks.h, model weights are sealed images (region.h).
 *
 * A pool is two pieces of memory: the blocks, in some domain (domain.h), and the words, a sealed
 * memfd that every process maps. Each process (an *owner*: pid, start time, incarnation) has a
 * reference row there: one count per block, which only that process writes. There is no total: a
 * block is free when no row counts it. So the references of a dead process are known exactly, and
 * any other process releases them (sweep).
 *
 * A reference names a block and its generation. Taking one increments the count in the own row,
 * then checks that the block still has that generation. Freeing a block or bumping its generation
 * changes the block's word, then scans all rows. All four accesses are seq_cst, so at least one
 * side sees the other:
 *
 *     FREE(g) -allocate-> CLAIMED(g, owner) -> USED(g) -last unref-> CLOSING(g, owner) -> FREE(g+1)
 *                                                ^    '--bump_generation: USED(g')   |
 *                                                '---- a row or a pin counts it -----'
 *
 * CLAIMED and CLOSING are short; when their owner dies in one, sweep reverts it.
 * tests/model/pool.pml is the protocol for Spin.
 *
 * Pins: a message of a queue pins its block, on behalf of the queue and not of a process. A pin is
 * {queue, tag}, set and cleared by compare-and-swap, so that a process which finishes the work of a
 * dead one may repeat a step. A pin counts like a row. A queue exists in the pool while at least
 * one owner that joined it is alive.
 *
 * Two ways to divide the memory:
 *   COX_POOL_FIXED  block_count blocks of block_size bytes: block b is at b * block_size
 *   COX_POOL_SLAB   slabs of slab_size, each divided into blocks of one power of two, block_size at
 *                   least; an empty slab can change its size; larger blocks are runs of slabs
 *
 * Threads: any thread of the process may call all functions but create, attach and free; the
 *   threads share the process's row, whose counts are atomic.
 * Ownership: the process owns a reference from allocate or ref until unref. fds are dup'd. Pointers
 *   into blocks are lent while a reference is held.
 * Blocks: wait_unpinned, until its deadline; nothing else. A full pool is COX_FULL; no block in use
 *   is ever overwritten.
 * Forks: in a child, functions that change the pool return COX_STATE: the row is the parent's.
 * Bytes: the words are input, since any process can corrupt them: numbers out of range are
 *   COX_CORRUPT. A corrupt count frees a block early or never, and crashes no process.
 * exec: the process keeps its pid, so its row and references stay until it ends: free first.
 * If the process dies: at any instruction; its row stays until the next sweep, which allocate runs
 *   when it finds no block. The last process to leave frees pool and blocks, which are memfds (or
 *   what the domain uses) without names.
 */
#ifndef COX_CHANNEL_MEMORY_POOL_H
#define COX_CHANNEL_MEMORY_POOL_H

#include "../../handle/handle.h"
#include "../domain/domain.h"

#ifdef __cplusplus
extern "C" {
#endif

struct cox_pool;

enum cox_pool_strategy {
    COX_POOL_FIXED = 1,
    COX_POOL_SLAB = 2,
};

#define COX_POOL_BLOCK_SIZE_MIN 64
#define COX_POOL_BLOCK_COUNT_MAX (UINT32_C(1) << 24)
#define COX_POOL_OWNER_COUNT_MAX 1024
#define COX_POOL_QUEUE_COUNT_MAX 64
/* Pins of one block at a time: messages of so many queues may refer to it. */
#define COX_POOL_PIN_COUNT_MAX 4

struct cox_pool_options {
    /* set by COX_POOL_OPTIONS_INIT (base.h) */
    size_t size;
    /* NULL: host memory only */
    const struct cox_domains *domains;
    /* all zero: host */
    struct cox_domain_id domain;
    /* 0: fixed */
    enum cox_pool_strategy strategy;
    /* fixed: bytes of a block, a multiple of 64. slab: bytes of the smallest size class, a power of
     * two */
    uint64_t block_size;
    /* fixed */
    uint32_t block_count;
    /* slab: a power of two, at least a page; 0: 64 KiB */
    uint64_t slab_size;
    /* slab: bytes of all slabs */
    uint64_t slabs_size;
    /* 0: 16 */
    uint32_t owner_count_max;
    /* Pages are allocated with their block (then allocate can fail with COX_NO_SPACE), and released
     * with it once free blocks keep more than retain_size bytes. Fixed: block_size is a multiple of
     * 4096. */
    bool on_demand;
    uint64_t retain_size;
    /* of this process as an owner, in its messages; 0: 1 */
    uint32_t incarnation;
    /* 0: the place of a later field */
    uint32_t reserved;
};
#define COX_POOL_OPTIONS_INIT COX_OPTIONS_INIT(struct cox_pool_options)

/* 32 plain bytes: can be copied to a file, a protobuf field or shared memory. */
struct cox_block_ref {
    /* cox_pool_id */
    uint64_t pool;
    /* 1 to 2^48 - 1 */
    uint64_t generation;
    /* as requested from allocate */
    uint64_t size;
    uint32_t block;
    /* 0 */
    uint32_t reserved;
};

/* Returns
 *   0
 *   COX_INVALID: err says which option
 *   COX_NO_SPACE
 *   what the domain says
 *   -errno
 */
COX_PUBLIC int cox_pool_create(const struct cox_pool_options *options, struct cox_pool **ret_pool,
                               struct cox_error *err);

struct cox_pool_attach_options {
    /* set by COX_POOL_ATTACH_OPTIONS_INIT (base.h) */
    size_t size;
    /* NULL: host memory only */
    const struct cox_domains *domains;
    /* maps the blocks for reading only; protects against a hostile process only where the fd itself
     * is open for reading only */
    bool read_only;
    /* 0: 1 */
    uint32_t incarnation;
};
#define COX_POOL_ATTACH_OPTIONS_INIT COX_OPTIONS_INIT(struct cox_pool_attach_options)
/* fds: words, blocks, as cox_pool_fds gives them.
 * Returns
 *   0
 *   COX_DENIED: memory that could shrink, is another user's, or was made where pids mean other
 *     processes (another boot, pid or time namespace)
 *   COX_VERSION
 *   COX_CORRUPT
 *   COX_FULL: no row is free (of the dead, rows are taken)
 *   COX_INVALID: the options; a domain that this process does not know
 *   what the domain says
 *   -errno
 */
COX_PUBLIC int cox_pool_attach(const int fds[2], const struct cox_pool_attach_options *options,
                               struct cox_pool **ret_pool, struct cox_error *err);
/* Releases all references of this process and unmaps the pool. NULL-safe, returns NULL. In the
 * child of a fork it only closes and unmaps: the row is the parent's. */
COX_PUBLIC struct cox_pool *cox_pool_free(struct cox_pool *pool);
#ifdef COX_INTERNAL
void cox_pool_freep(struct cox_pool **pool); /* for _cox_cleanup_ */

/* True when this process holds no reference of any block; what adopt_all took is none. Checks the
 * local references of all blocks. */
bool cox_pool_is_idle(const struct cox_pool *pool);
#endif

/* Lent until free. ret_fds[1] is writable only if this process may write the blocks. */
COX_PUBLIC void cox_pool_fds(const struct cox_pool *pool, int ret_fds[2]);

/* Plain bytes, 128 of them (handle.h). */
struct cox_pool_handle {
    struct cox_handle words, blocks;
};
/* read_only: the blocks' handle opens for reading only. Two puts at the exporter undo it
 * (unexport).
 * Returns
 *   as cox_exporter_export
 *   COX_UNSUPPORTED: the domain's memory has no fd, or, read_only, one that is no file (a device's)
 */
COX_PUBLIC int cox_pool_export(struct cox_pool *pool, struct cox_exporter *exporter, bool read_only,
                               struct cox_pool_handle *ret_handle, struct cox_error *err);
COX_PUBLIC void cox_pool_unexport(struct cox_exporter *exporter,
                                  const struct cox_pool_handle *handle);
/* Attaches in any process that can open the handles; socket_path as in cox_handle_open. Returns as
 * cox_handle_open and cox_pool_attach. */
COX_PUBLIC int cox_pool_open(const struct cox_pool_handle *handle, const char *socket_path,
                             uint64_t deadline_ns, const struct cox_pool_attach_options *options,
                             struct cox_pool **ret_pool, struct cox_error *err);

COX_PUBLIC uint64_t cox_pool_id(const struct cox_pool *pool); /* random, not 0 */
#ifdef COX_INTERNAL
struct cox_domain_id cox_pool_domain(const struct cox_pool *pool);
uint32_t cox_pool_block_count(const struct cox_pool *pool);
uint64_t cox_pool_block_size(
    const struct cox_pool *pool); /* fixed: of each; slab: of the smallest */
#endif
COX_PUBLIC struct cox_domain_memory *cox_pool_memory(const struct cox_pool *pool); /* lent */

/* ---- references ---- */

/* The bytes are whatever was there before.
 * Returns
 *   0, with one reference held
 *   COX_FULL: no block of that size is free, also after sweep
 *   COX_TOO_LARGE: no block of this pool has size bytes
 *   COX_NO_SPACE: on_demand, and there is no memory
 *   COX_INVALID: size 0
 *   COX_DENIED: attached read-only
 */
COX_PUBLIC int cox_pool_allocate(struct cox_pool *pool, uint64_t size,
                                 struct cox_block_ref *ret_ref, struct cox_error *err);
/* One more reference, of this process's own or of one that another process passed.
 * Returns
 *   0
 *   COX_NOT_FOUND: of another pool
 *   COX_INVALID: no such block, or size beyond it
 *   COX_STALE: freed or renewed since
 *   COX_FULL: the count of this process for the block is at its limit (65,535)
 */
COX_PUBLIC int cox_pool_ref(struct cox_pool *pool, const struct cox_block_ref *ref,
                            struct cox_error *err);
/* One less; the last one of all frees the block.
 * Returns
 *   0
 *   COX_NOT_FOUND: this process holds no such reference (also a second unref of the same)
 *   COX_INVALID: this process holds no such reference (also a second unref of the same)
 *   COX_STALE: this process holds no such reference (also a second unref of the same)
 */
COX_PUBLIC int cox_pool_unref(struct cox_pool *pool, const struct cox_block_ref *ref,
                              struct cox_error *err);

/* Where in the pool's memory the block is.
 * Returns
 *   0
 *   COX_NOT_FOUND
 *   COX_INVALID
 */
COX_PUBLIC int cox_pool_offset(const struct cox_pool *pool, const struct cox_block_ref *ref,
                               uint64_t *ret_offset);
/* Address of the block in this process; NULL: the domain has none, or no such block. */
COX_PUBLIC void *cox_pool_pointer(const struct cox_pool *pool, const struct cox_block_ref *ref);
#ifdef COX_INTERNAL
/* The reference of the block that a byte is in, as it is now: by offset, or by address. Counts
 * nothing.
 * Returns
 *   0
 *   COX_NOT_FOUND: not in this pool, or in no used block
 */
int cox_pool_find(const struct cox_pool *pool, uint64_t offset, struct cox_block_ref *ret_ref);
int cox_pool_find_pointer(const struct cox_pool *pool, const void *pointer,
                          struct cox_block_ref *ret_ref);
#endif

/* The next three copy bytes [offset, offset + size) of the block, from and to the host, and from
 * block to block of any two pools. The process holds a reference (asserted in no build: checked).
 * Returns
 *   0
 *   COX_NOT_FOUND
 *   COX_INVALID
 *   COX_STALE
 *   COX_DENIED: read-only
 *   what the domain says
 */
COX_PUBLIC int cox_pool_copy_to(struct cox_pool *pool, const struct cox_block_ref *ref,
                                uint64_t offset, const void *host, uint64_t size,
                                struct cox_error *err);
COX_PUBLIC int cox_pool_copy_from(struct cox_pool *pool, const struct cox_block_ref *ref,
                                  uint64_t offset, void *host, uint64_t size,
                                  struct cox_error *err);
COX_PUBLIC int cox_pool_copy(struct cox_pool *to, const struct cox_block_ref *to_ref,
                             struct cox_pool *from, const struct cox_block_ref *from_ref,
                             uint64_t size, struct cox_error *err);

/* ---- blocks that one process manages by number ----
 *
 * The creator of a fixed pool adopts all blocks and decides itself what each contains; other
 * processes take references with cox_pool_ref. The creator then chooses the generations: any number
 * but the one before. For readers that need not be trusted or waited for: kv_blocks.h. */

#ifdef COX_INTERNAL
/* Every block becomes USED with this generation, counted by this process. Of a fresh fixed pool
 * only: COX_STATE. A block taken so is no reference to unref: it stays this process's until free.
 * All or none; what the domain says, on demand: then the pool is not fresh any more. */
int cox_pool_adopt_all(struct cox_pool *pool, uint64_t generation, struct cox_error *err);
/* The generation of a block that this process took; 0: no such block. Not ordered with anything. */
uint64_t cox_pool_generation(const struct cox_pool *pool, uint32_t block);
/* Gives the block another generation: from now on the old one cannot be pinned. Does not wait;
 * until wait_unpinned the block must not be written.
 * Returns
 *   0, also when it has that generation
 *   COX_INVALID
 *   COX_STATE: not this process's
 */
int cox_pool_bump_generation(struct cox_pool *pool, uint32_t block, uint64_t generation);
/* Blocks until no other process has a reference to the block: then it may be written. Checks at
 * once, at every unref and every 50 ms, and takes back the references of dead processes. cancelled
 * (NULL: never) is asked in each slice.
 * Returns
 *   0
 *   COX_TIMEOUT: err says which process still reads it
 *   COX_ABORTED: cancelled
 *   COX_INVALID
 */
int cox_pool_wait_unpinned(struct cox_pool *pool, uint32_t block, uint64_t deadline_ns,
                           bool (*cancelled)(void *context), void *context, struct cox_error *err);
#endif

/* ---- pins, for queues ---- */

#ifdef COX_INTERNAL
/* The owner joins a holder (a queue's id, not 0), so that its holds stay while this process lives.
 * Each join takes a leave, for two users of one pool in one process know nothing of each other;
 * free leaves all.
 * Returns
 *   0
 *   COX_FULL
 *   COX_INVALID
 *   COX_BUSY: a process is stopped, for a second now, in the midst of the same
 */
int cox_pool_queue_join(struct cox_pool *pool, uint64_t queue_id, struct cox_error *err);
void cox_pool_queue_leave(struct cox_pool *pool, uint64_t queue_id);
/* The block is held by {holder, tag}; the process has a reference of its own. tag: 1 to 2^48 - 1.
 * Idempotent.
 * Returns
 *   0
 *   COX_STALE
 *   COX_FULL: COX_POOL_PIN_COUNT_MAX others hold it
 *   COX_NOT_FOUND: not joined
 *   COX_INVALID
 */
int cox_pool_pin(struct cox_pool *pool, const struct cox_block_ref *ref, uint64_t queue_id,
                 uint64_t tag, struct cox_error *err);
/* Not held by it any more; frees the block if nothing else counts it. Idempotent, from any process.
 */
void cox_pool_unpin(struct cox_pool *pool, const struct cox_block_ref *ref, uint64_t queue_id,
                    uint64_t tag);
#endif

/* ---- the dead, and display ---- */

/* Releases references of dead owners and pins of dead queues. Any process, any time. Returns how
 * many it released. */
COX_PUBLIC uint64_t cox_pool_sweep(struct cox_pool *pool);

struct cox_pool_stats {
    /* slab: whole slabs; free_count: the empty ones */
    uint32_t block_count, free_count;
    /* bytes of all blocks, and of used ones */
    uint64_t size, used_size;
    /* rows in use */
    uint32_t owner_count;
    uint64_t reference_count, pin_count;
    /* blocks, since the pool was created, by all processes */
    uint64_t allocated, freed;
    /* references and pins released for the dead */
    uint64_t swept;
};
/* Exact only while no process changes the pool. */
COX_PUBLIC void cox_pool_stats(const struct cox_pool *pool, struct cox_pool_stats *ret_stats);
#ifdef COX_INTERNAL
/* Owners, holders and used blocks as text, one a line, for a debugger or a log. line is called for
 * each. */
void cox_pool_dump(const struct cox_pool *pool, void (*line)(void *context, const char *text),
                   void *context);
#endif

#ifdef __cplusplus
}
#endif

#endif
