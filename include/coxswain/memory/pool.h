/*
 * pool: blocks of memory that several processes share, with reference counts per process.
 *
 * For processes that trust each other: each can write all shared words, so one faulty process can
 * corrupt the pool for all. For readers that are not trusted there are kv.h (KV caches) and
 * sealed images (handle.h; model weights).
 *
 * A pool has two memories: the blocks, in some domain (domain.h), and the words, a sealed memfd
 * that every process maps. Each process (an *owner*: pid, start time, incarnation) has a reference
 * row in the words: one count per block, which only that process writes. There is no total: a block
 * is free when every row counts 0 for it. So the references of a dead process are known exactly,
 * and any other process can release them (sweep).
 *
 * A reference names a block and its epoch. A process that takes one increments the count in
 * its row, then checks that the block still has that epoch. A process that frees a block
 * changes the block's word, then scans all rows. All four accesses are seq_cst, so at least one
 * side sees the other:
 *
 *     FREE(g) -allocate-> CLAIMED(g, owner) -> USED(g) -last unref-> CLOSING(g, owner) -> FREE(g+1)
 *                                                ^                                |
 *                                                '--- a row or a pin counts it ---'
 *
 * CLAIMED and CLOSING last only for a few instructions. If a process dies in one of them, sweep
 * reverts it. tests/model/pool.pml is a model of the protocol for Spin.
 *
 * Pins: a message of a queue pins its block. The pin belongs to the queue, not to a process. A pin
 * is {queue, tag}, set and cleared by compare-and-swap, so that a process which completes the work
 * of a dead one may repeat a step. A pinned block is in use, as if a row counted it. The pins of a
 * queue are valid while at least one owner that joined it is alive.
 *
 * Two ways to divide the memory:
 *   COX_POOL_FIXED  block_count blocks of block_size bytes: block b is at b * block_size
 *   COX_POOL_SLAB   slabs of slab_size, each divided into blocks of one power of two, block_size at
 *                   least; an empty slab can change its size; larger blocks are runs of slabs
 *
 * Threads: any, except for create, attach and free. The threads of a process share its row, whose
 *   counts are atomic.
 * Ownership: the process owns a reference from allocate or ref until unref. fds are dup'd. Pointers
 *   into blocks are lent while a reference is held.
 * Blocks: nothing. A full pool is COX_FULL; no block in use is ever overwritten.
 * Forks: in a child, functions that change the pool return COX_STATE: the row is the parent's.
 * Bytes: the words are input, since any process can corrupt them: numbers out of range are
 *   COX_CORRUPT. A corrupt count frees a block early or never, and crashes no process.
 * exec: call free first. Otherwise the row and its references stay until the process ends, because
 *   it keeps its pid.
 * If the process dies (at any instruction): its row stays until the next sweep, which allocate runs
 *   if it finds no free block. The memories have no names: the kernel frees them with the last
 *   process that has attached them.
 */
#ifndef COX_MEMORY_POOL_H
#define COX_MEMORY_POOL_H

#include <coxswain/handle.h>
#include <coxswain/memory/domain.h>

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
/* Limit of pins of one block, that is of messages that refer to it at a time. */
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
    /* incarnation of this process as an owner, for texts; 0: 1 */
    uint32_t incarnation;
    /* 0; reserved for a later field */
    uint32_t reserved;
};
#define COX_POOL_OPTIONS_INIT COX_OPTIONS_INIT(struct cox_pool_options)

/* 32 plain bytes: can be copied to a file, a protobuf field or shared memory. */
struct cox_block_ref {
    /* cox_pool_id */
    uint64_t pool;
    /* 1 to 2^48 - 1 */
    uint64_t epoch;
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
 *   what the domain returns
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
/* fds: those of words and blocks, in the order of cox_pool_fds.
 * Returns
 *   0
 *   COX_DENIED: the memory could shrink, is another user's, or was created on another boot or in
 *     another pid or time namespace, so that its pids are not valid here
 *   COX_VERSION
 *   COX_CORRUPT
 *   COX_FULL: all rows belong to live processes
 *   COX_INVALID: the options; a domain that is not in options->domains
 *   what the domain returns
 *   -errno
 */
COX_PUBLIC int cox_pool_attach(const int fds[2], const struct cox_pool_attach_options *options,
                               struct cox_pool **ret_pool, struct cox_error *err);
/* Releases all references of this process and unmaps the pool. NULL-safe, returns NULL. In the
 * child of a fork it only closes and unmaps: the row is the parent's. */
COX_PUBLIC struct cox_pool *cox_pool_free(struct cox_pool *pool);

/* Lent until free. ret_fds[1] is writable only if this process may write the blocks. */
COX_PUBLIC void cox_pool_fds(const struct cox_pool *pool, int ret_fds[2]);

/* 128 plain bytes (handle.h). */
struct cox_pool_handle {
    struct cox_handle words, blocks;
};
/* Exports both memories. read_only: the blocks' handle can be opened for reading only. Undone by
 * cox_pool_unexport, that is by a put of each handle.
 * Returns
 *   as cox_exporter_export
 *   COX_UNSUPPORTED: the domain's memory has no fd; or read_only, and the fd is not a file but a
 *     device's
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
COX_PUBLIC struct cox_domain_memory *cox_pool_memory(const struct cox_pool *pool); /* lent */

/* ---- references ---- */

/* Allocates a block. Its bytes are not cleared.
 * Returns
 *   0, with one reference held
 *   COX_FULL: no block of that size is free, also after a sweep
 *   COX_TOO_LARGE: the blocks of this pool are smaller than size bytes
 *   COX_NO_SPACE: on_demand, and there is no memory
 *   COX_INVALID: size 0
 *   COX_DENIED: attached read-only
 */
COX_PUBLIC int cox_pool_allocate(struct cox_pool *pool, uint64_t size,
                                 struct cox_block_ref *ret_ref, struct cox_error *err);
/* Takes a reference. ref is one of this process, or was passed by another process.
 * Returns
 *   0
 *   COX_NOT_FOUND: ref is of another pool
 *   COX_INVALID: no such block, or a size beyond it
 *   COX_STALE: the block was freed, or has another epoch now
 *   COX_FULL: the count of this process for the block is at its limit (65,535)
 */
COX_PUBLIC int cox_pool_ref(struct cox_pool *pool, const struct cox_block_ref *ref,
                            struct cox_error *err);
/* Releases a reference. When the last one of all processes is released, the block is freed.
 * Returns
 *   0
 *   COX_NOT_FOUND: this process holds no such reference (also a second unref of the same)
 *   COX_INVALID: this process holds no such reference (also a second unref of the same)
 *   COX_STALE: this process holds no such reference (also a second unref of the same)
 */
COX_PUBLIC int cox_pool_unref(struct cox_pool *pool, const struct cox_block_ref *ref,
                              struct cox_error *err);

/* Offset of the block in the pool's memory.
 * Returns
 *   0
 *   COX_NOT_FOUND
 *   COX_INVALID
 */
COX_PUBLIC int cox_pool_offset(const struct cox_pool *pool, const struct cox_block_ref *ref,
                               uint64_t *ret_offset);
/* Address of the block in this process; NULL: the domain has none, or no such block. */
COX_PUBLIC void *cox_pool_pointer(const struct cox_pool *pool, const struct cox_block_ref *ref);

/* The next three copy the bytes [offset, offset + size) of a block from or to the host, or size
 * bytes between blocks of any two pools. The process must hold a reference; otherwise they fail.
 * Returns
 *   0
 *   COX_NOT_FOUND
 *   COX_INVALID
 *   COX_STALE
 *   COX_DENIED: read-only
 *   what the domain returns
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

/* ---- clean-up after dead processes, and display ---- */

/* Releases references of dead owners and pins of dead queues. Any process, any time. Returns how
 * many it released. */
COX_PUBLIC uint64_t cox_pool_sweep(struct cox_pool *pool);

struct cox_pool_stats {
    /* number of blocks, and of free ones; slab: of slabs, and of empty ones */
    uint32_t block_count, free_count;
    /* bytes of all blocks, and of used ones */
    uint64_t size, used_size;
    /* rows in use */
    uint32_t owner_count;
    uint64_t reference_count, pin_count;
    /* blocks that all processes have allocated and freed since the pool was created */
    uint64_t allocated, freed;
    /* references and pins of dead processes that were released */
    uint64_t swept;
};
/* Exact only while no process changes the pool. */
COX_PUBLIC void cox_pool_read_stats(const struct cox_pool *pool, struct cox_pool_stats *ret_stats);

#ifdef __cplusplus
}
#endif

#endif
