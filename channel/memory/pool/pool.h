/*
 * pool: blocks of memory that several processes share, counted by owner.
 *
 * For processes that trust each other. This is the shared form: every process that has the pool's
 * words may write all of them, and one that means harm spoils them for all, for as long as the pool
 * is. Memory that one process fills for others that it does not trust is an image (region.h), which
 * nobody can write: so the model's weights come to the ranks of a group.
 *
 * A pool is two pieces of memory: the blocks, in some domain (domain.h), and the pool's words, in a
 * sealed memfd that every process which uses the pool maps. Each such process has a row of counts
 * there, one count per block, that it alone writes (an *owner*: pid, start time, generation). There
 * is no sum: a block is free when no row counts it. So what a dead process held is known exactly,
 * and any other one gives it back (sweep).
 *
 * A reference names a block and its generation. Whoever takes a reference counts it in its own row
 * first, and then looks whether the block still has that generation; whoever frees or renews a
 * block changes its word first, and then looks at all rows (both seq_cst): one of the two sees the
 * other. That one protocol is the reference count, and it is the pin of a reader in another group:
 *
 *     FREE(g) -allocate-> CLAIMED(g, owner) -> USED(g) -last unref-> CLOSING(g, owner) -> FREE(g+1)
 *                                                ^    '--bump_generation: USED(g')   |
 *                                                '---- somebody counts it -'
 *
 * CLAIMED and CLOSING belong to an owner for a moment; of a dead one they are undone by sweep.
 * tests/model/pool.pml is the protocol for Spin.
 *
 * This is the shared form, for processes that trust each other: all of them write the words, and
 * one that spoils them spoils the pool. KV caches, which groups that do not trust each other read,
 * are no pools: kv_blocks.h.
 *
 * Holds: a block that a message of a queue refers to is held by that message, not by a process. A
 * hold is {holder, tag}, set and cleared by compare-and-swap, so that whoever completes what a dead
 * process had begun may do it twice. It counts like a row. A holder lives while one of the owners
 * that joined it does.
 *
 * Two ways to cut the memory:
 *   COX_POOL_FIXED  block_count blocks of block_size bytes: block b is at b * block_size
 *   COX_POOL_SLAB   slabs of slab_size, each cut into blocks of one power of two from block_size
 *                   on; an empty slab takes another size; larger blocks are runs of whole slabs
 *
 * Threads: all functions but create, attach and free may be called by any thread of the process;
 *   the threads share the process's row (counts are atomic).
 * Ownership: a reference that allocate or ref gave is the process's until it says unref. fds are
 *   dup'd. Pointers into blocks are lent while a reference is held.
 * Blocks: bump_generation and wait_unpinned, until their deadline; the rest nothing. A full pool is
 *   COX_FULL, and nothing is ever overwritten. In the child of a fork everything that changes
 *   something is COX_STATE: the row is its parent's. Bytes: the words are input, for every process
 *   that has them may have spoilt them: numbers out of range are COX_CORRUPT. A spoilt count can
 *   free a block too early or never; it crashes nobody. exec: a process that execs lives on, and so
 *   does its row, with all that it counts, until it ends: free first. If the process dies, at any
 *   instruction: its row stays until sweep, which every allocate that finds nothing calls. The last
 *   process out destroys pool and blocks: both are memfds (or what the domain has) without names.
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
/* Holds of one block at a time: messages of so many queues may refer to it. */
#define COX_POOL_PIN_COUNT_MAX 4

struct cox_pool_options {
    /* NULL: host memory only */
    const struct cox_domains *domains;
    /* all zero: host */
    struct cox_domain_id domain;
    /* 0: fixed */
    enum cox_pool_strategy strategy;
    /* fixed: bytes of a block, a multiple of 64. slab: of the smallest class, a power of two */
    uint64_t block_size;
    /* fixed */
    uint32_t block_count;
    /* slab: a power of two, at least a page; 0: 64 KiB */
    uint64_t slab_size;
    /* slab: bytes of all slabs */
    uint64_t size;
    /* 0: 16 */
    uint32_t owner_count_max;
    /* Pages are reserved when a block is allocated, and given back when it is freed beyond
     * retain_size bytes of free ones; allocate may then answer COX_NO_SPACE. Fixed: block_size is a
     * multiple of 4096. */
    bool on_demand;
    uint64_t retain_size;
    /* of this process as an owner, in its messages; 0: 1 */
    uint32_t incarnation;
};

/* Plain bytes, 32 of them; survives memcpy, a file, a protobuf field, shared memory. */
struct cox_block_ref {
    /* cox_pool_id */
    uint64_t pool;
    /* 1 to 2^48 - 1 */
    uint64_t generation;
    /* bytes asked for */
    uint64_t size;
    uint32_t block;
    /* 0 */
    uint32_t reserved;
};

/* Returns 0; COX_INVALID: err says which option; COX_NO_SPACE; what the domain says; -errno. */
COX_PUBLIC int cox_pool_create(const struct cox_pool_options *options, struct cox_pool **ret_pool,
                               struct cox_error *err);

struct cox_pool_attach_options {
    /* NULL: host memory only */
    const struct cox_domains *domains;
    /* blocks cannot be written through this view; needs an fd open for reading only to be so
     * against malice as well */
    bool read_only;
    /* 0: 1 */
    uint32_t incarnation;
};
/* fds: words, blocks, as cox_pool_fds gives them. Returns 0; COX_DENIED: memory that could shrink,
 * is another user's, or was made where pids mean other processes (another boot, pid or time
 * namespace); COX_VERSION; COX_CORRUPT; COX_FULL: no row is free (of the dead, rows are taken);
 * COX_INVALID: a domain that this process does not know; what the domain says; -errno. */
COX_PUBLIC int cox_pool_attach(const int fds[2], const struct cox_pool_attach_options *options,
                               struct cox_pool **ret_pool, struct cox_error *err);
/* Gives back all that this process holds, and lets go. NULL-safe, returns NULL. In the child of a
 * fork it only lets go of memory and fds: the row is the parent's. */
COX_PUBLIC struct cox_pool *cox_pool_free(struct cox_pool *pool);
COX_PUBLIC void cox_pool_freep(struct cox_pool **pool); /* for _cox_cleanup_ */

/* True when this process holds no reference of any block; what adopt_all took is none. A look at
 * the local references of all blocks. */
COX_PUBLIC bool cox_pool_is_idle(const struct cox_pool *pool);

/* Lent until free. ret_fds[1] is open for writing where this process may write the blocks. */
COX_PUBLIC void cox_pool_fds(const struct cox_pool *pool, int ret_fds[2]);

/* By value (handle.h): 128 plain bytes. */
struct cox_pool_handle {
    struct cox_handle words, blocks;
};
/* read_only: the blocks' handle opens for reading only. Two puts at the exporter undo it
 * (unexport). Returns as cox_exporter_export; COX_UNSUPPORTED: the domain's memory has no fd, or,
 * read_only, one that is no file (a device's). */
COX_PUBLIC int cox_pool_export(struct cox_pool *pool, struct cox_exporter *exporter, bool read_only,
                               struct cox_pool_handle *ret_handle, struct cox_error *err);
COX_PUBLIC void cox_pool_unexport(struct cox_exporter *exporter,
                                  const struct cox_pool_handle *handle);
/* Attaches in any process that can open the handles (door_path as in cox_handle_open). Returns as
 * cox_handle_open and cox_pool_attach. */
COX_PUBLIC int cox_pool_open(const struct cox_pool_handle *handle, const char *door_path,
                             uint64_t deadline_ns, const struct cox_pool_attach_options *options,
                             struct cox_pool **ret_pool, struct cox_error *err);

COX_PUBLIC uint64_t cox_pool_id(const struct cox_pool *pool); /* random, not 0 */
COX_PUBLIC struct cox_domain_id cox_pool_domain(const struct cox_pool *pool);
COX_PUBLIC uint32_t cox_pool_block_count(const struct cox_pool *pool);
COX_PUBLIC uint64_t
cox_pool_block_size(const struct cox_pool *pool); /* fixed: of each; slab: of the smallest */
COX_PUBLIC struct cox_domain_memory *cox_pool_memory(const struct cox_pool *pool); /* lent */

/* ---- references ---- */

/* Returns 0, with one reference held; COX_FULL: no block of that size is free, also after sweep;
 * COX_TOO_LARGE: no block of this pool has size bytes; COX_NO_SPACE: on_demand, and there is no
 * memory; COX_INVALID: size 0; COX_DENIED: attached read-only. The bytes are whatever was there
 * before. */
COX_PUBLIC int cox_pool_allocate(struct cox_pool *pool, uint64_t size,
                                 struct cox_block_ref *ret_ref, struct cox_error *err);
/* One more reference, of this process's own or of one that another process told. Returns 0;
 * COX_NOT_FOUND: of another pool; COX_INVALID: no such block, or size beyond it; COX_STALE: freed
 * or renewed since; COX_FULL: the count of this process for the block is at its limit (65,535). */
COX_PUBLIC int cox_pool_ref(struct cox_pool *pool, const struct cox_block_ref *ref,
                            struct cox_error *err);
/* One less; the last one of all frees the block. Returns 0; COX_NOT_FOUND, COX_INVALID, COX_STALE:
 * this process holds no such reference (also a second unref of the same). */
COX_PUBLIC int cox_pool_unref(struct cox_pool *pool, const struct cox_block_ref *ref,
                              struct cox_error *err);

/* Where in the pool's memory the block is. Returns 0; COX_NOT_FOUND, COX_INVALID. */
COX_PUBLIC int cox_pool_offset(const struct cox_pool *pool, const struct cox_block_ref *ref,
                               uint64_t *ret_offset);
/* Address of the block in this process; NULL: the domain has none, or no such block. */
COX_PUBLIC void *cox_pool_pointer(const struct cox_pool *pool, const struct cox_block_ref *ref);
/* The reference of the block that a byte is in, as it is now: by offset, or by address. Counts
 * nothing. Returns 0; COX_NOT_FOUND: not in this pool, or in no used block. */
COX_PUBLIC int cox_pool_find(const struct cox_pool *pool, uint64_t offset,
                             struct cox_block_ref *ret_ref);
COX_PUBLIC int cox_pool_find_pointer(const struct cox_pool *pool, const void *pointer,
                                     struct cox_block_ref *ret_ref);

/* Bytes [offset, offset + size) of the block, from and to the host, and from block to block of any
 * two pools. The process holds a reference (asserted in no build: checked). Returns 0;
 * COX_NOT_FOUND, COX_INVALID, COX_STALE; COX_DENIED: read-only; what the domain says. */
COX_PUBLIC int cox_pool_copy_to(struct cox_pool *pool, const struct cox_block_ref *ref,
                                uint64_t offset, const void *host, uint64_t size,
                                struct cox_error *err);
COX_PUBLIC int cox_pool_copy_from(struct cox_pool *pool, const struct cox_block_ref *ref,
                                  uint64_t offset, void *host, uint64_t size,
                                  struct cox_error *err);
COX_PUBLIC int cox_pool_copy(struct cox_pool *to, const struct cox_block_ref *to_ref,
                             struct cox_pool *from, const struct cox_block_ref *from_ref,
                             uint64_t size, struct cox_error *err);

/* ---- blocks that one process gives out by number ----
 *
 * The process that created the pool takes all blocks of a fixed one and says itself what each is
 * for; others pin them with cox_pool_ref. Generations are then its own numbers, any but the one
 * before. For readers that need not be trusted, and are not waited for: kv_blocks.h. */

/* Every block becomes USED with this generation, counted by this process. Of a fresh fixed pool
 * only: COX_STATE. A block taken so is no reference to unref: it stays this process's until free.
 * All or none; what the domain says, on demand: then the pool is not fresh any more. */
COX_PUBLIC int cox_pool_adopt_all(struct cox_pool *pool, uint64_t generation,
                                  struct cox_error *err);
/* The generation of a block that this process took; 0: no such block. Not ordered with anything. */
COX_PUBLIC uint64_t cox_pool_generation(const struct cox_pool *pool, uint32_t block);
/* Gives the block another generation: from now on nobody can pin the old one. Does not wait; until
 * wait_unpinned the block must not be written. Returns 0, also when it has that generation;
 * COX_INVALID; COX_STATE: not this process's. */
COX_PUBLIC int cox_pool_bump_generation(struct cox_pool *pool, uint32_t block, uint64_t generation);
/* Waits until nobody but this process counts the block: then it may be written. Looks at once, and
 * then, sleeping, at every unref and every 50 ms, whether who counts it is alive; the dead are
 * given back. cancelled (NULL: never) is asked in each slice. Returns 0; COX_TIMEOUT: err says
 * which process still reads it; COX_ABORTED: cancelled; COX_INVALID. */
COX_PUBLIC int cox_pool_wait_unpinned(struct cox_pool *pool, uint32_t block, uint64_t deadline_ns,
                                      bool (*cancelled)(void *context), void *context,
                                      struct cox_error *err);

/* ---- holds, for queues ---- */

/* The owner joins a holder (a queue's id, not 0), so that its holds stay while this process lives.
 * Each join takes a leave, for two users of one pool in one process know nothing of each other;
 * free leaves all. Returns 0; COX_FULL; COX_INVALID; COX_BUSY: a process is stopped, for a second
 * now, in the midst of the same. */
COX_PUBLIC int cox_pool_queue_join(struct cox_pool *pool, uint64_t queue_id, struct cox_error *err);
COX_PUBLIC void cox_pool_queue_leave(struct cox_pool *pool, uint64_t queue_id);
/* The block is held by {holder, tag}; the process has a reference of its own. tag: 1 to 2^48 - 1.
 * Idempotent. Returns 0; COX_STALE; COX_FULL: COX_POOL_PIN_COUNT_MAX others hold it;
 * COX_NOT_FOUND: not joined; COX_INVALID. */
COX_PUBLIC int cox_pool_pin(struct cox_pool *pool, const struct cox_block_ref *ref,
                            uint64_t queue_id, uint64_t tag, struct cox_error *err);
/* Not held by it any more; frees the block if nothing else counts it. Idempotent, from any process.
 */
COX_PUBLIC void cox_pool_unpin(struct cox_pool *pool, const struct cox_block_ref *ref,
                               uint64_t queue_id, uint64_t tag);

/* ---- the dead, and display ---- */

/* Gives back what dead owners and holders left. Any process, any time, as often as you like.
 * Returns the references and holds that were given back. */
COX_PUBLIC uint64_t cox_pool_sweep(struct cox_pool *pool);

struct cox_pool_stats {
    /* slab: of whole slabs, free_count the empty ones */
    uint32_t block_count, free_count;
    /* bytes of all, and of used blocks */
    uint64_t size, used_size;
    /* rows in use */
    uint32_t owner_count;
    uint64_t reference_count, pin_count;
    /* blocks, since the pool is, by all processes */
    uint64_t allocated, freed;
    /* references and holds given back for the dead */
    uint64_t swept;
};
/* A picture that is exact only while nobody changes anything. */
COX_PUBLIC void cox_pool_stats(const struct cox_pool *pool, struct cox_pool_stats *ret_stats);
/* Owners, holders and used blocks as text, one a line, for a debugger or a log. line is called for
 * each. */
COX_PUBLIC void cox_pool_dump(const struct cox_pool *pool,
                              void (*line)(void *context, const char *text), void *context);

#ifdef __cplusplus
}
#endif

#endif
