/*
 * kv_blocks: the blocks of a KV cache, which one process writes and others copy from.
 *
 * The memory has one writer, the owner, which created it. Seals prevent every other process from
 * mapping it writable, writing to it, reopening it for writing, punching holes or truncating it.
 * Readers of other groups write no shared word: the owner does not track them, and never waits for
 * one. A pool (pool.h) in contrast is for processes that trust each other.
 *
 * The user of a block is a number that the owner chooses (the sequence), or COX_KV_UNUSED:
 *
 *     UNUSED -give: its content belongs to U-> U -take: it will be written, or U has ended-> UNUSED
 *
 * Expect instead of take says that a give will follow soon: until then the user is COX_KV_EXPECTED,
 * and a reader can wait for it.
 *
 * Each take or expect also increments a counter of the block. A reader loads counter and user,
 * copies, and loads the counter again. If the block was taken meanwhile, the copy may be torn:
 * COX_STALE.
 * So a block may be written only
 *   - between take or expect, and give; or
 *   - for the user it was given to, behind the positions that were filled at the give. Readers
 *     ignore those bytes, so no copy becomes invalid.
 * New content under the same user is detected as well: there is a take in between.
 * kv_blocks_layout.h explains the memory order.
 *
 * Threads: any. But no other call on the object runs during new, free or attach, and only one take,
 *   expect or give of a block at a time. Concurrent ones make the content of that block invalid,
 *   and have no other effect.
 * Ownership: memory and fd belong to the object and are lent until free. A view has its own mapping
 *   and outlives the owner.
 * Blocks: await. Nothing else: a copy is tried once, and the owner waits for no reader.
 * Bytes: what a view reads is untrusted input. A hostile owner can falsify only its own blocks; a
 *   hostile reader cannot harm the owner.
 * Forks: in a child only free may be called on the owner's object.
 * If the owner dies (at any instruction): the memory stays until the last view is freed, and blocks
 *   that the owner had given can still be copied.
 * If a reader dies: nothing is left.
 */
#ifndef COX_KV_H
#define COX_KV_H

#include <coxswain/base.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The user of a block that has none: it cannot be copied. */
#define COX_KV_UNUSED UINT64_C(0)
/* That of a block whose content is on its way: it cannot be copied yet. */
#define COX_KV_EXPECTED UINT64_MAX
#define COX_KV_BLOCK_COUNT_MAX (UINT32_C(1) << 24)
/* block_size is a multiple of it, and blocks are aligned to it. */
#define COX_KV_BLOCK_ALIGNMENT 64

/* The user that all ranks give the blocks of a sequence, and that a pull asks for: its id if that
 * is 1 to 2^47, otherwise a hash above that range and below 2^48. Two hashes are equal in one of
 * 2^47 cases. */
COX_PUBLIC uint64_t cox_kv_user_of(int64_t sequence);

struct cox_kv_info {
    uint32_t block_count;
    /* of one block */
    uint64_t block_size;
    /* The owner's block 0; block b is b * block_size bytes behind it. Lent until free. NULL of a
     * view. */
    void *memory;
    /* The owner's fd for readers, open for reading only. Lent until free. For a handle to it, call
     * cox_exporter_export (handle.h) with offset and size 0. -1 of a view. */
    int fd;
};

/* ---- the owner ---- */

struct cox_kv_blocks;

/* Creates block_count blocks of block_size bytes, all zero, every page reserved, all without a
 * user. The memory is named memfd:cox_payload_kv. A process that could write to it could falsify
 * the owner's keys and values, and nothing else.
 * Returns
 *   0
 *   COX_INVALID: a number out of range, err says which
 *   COX_NO_SPACE
 *   -errno
 */
COX_PUBLIC int cox_kv_blocks_new(uint32_t block_count, uint64_t block_size,
                                 struct cox_kv_blocks **ret_blocks, struct cox_error *err);
/* NULL-safe, returns NULL. Views stay valid. */
COX_PUBLIC struct cox_kv_blocks *cox_kv_blocks_free(struct cox_kv_blocks *blocks);
COX_PUBLIC struct cox_kv_info cox_kv_blocks_info(const struct cox_kv_blocks *blocks);

/* From now on the block has no user and may be written; copies in progress become stale. Also legal
 * for a block without a user.
 * Returns
 *   0
 *   COX_INVALID: no such block
 */
COX_PUBLIC int cox_kv_blocks_take(struct cox_kv_blocks *blocks, uint32_t block);
/* As take, and says that a give, or a take, will follow soon: readers that know of the block wait
 * for it. For readers on other machines, whose agent copies it for them, it is stale until then. */
COX_PUBLIC int cox_kv_blocks_expect(struct cox_kv_blocks *blocks, uint32_t block);
/* From now on the block's content belongs to this user.
 * Returns
 *   0
 *   COX_INVALID: no such block, or user COX_KV_UNUSED or COX_KV_EXPECTED
 *   COX_STATE: the block has a user, which stays: take it first
 */
COX_PUBLIC int cox_kv_blocks_give(struct cox_kv_blocks *blocks, uint32_t block, uint64_t user);
/* The current value, COX_KV_EXPECTED too; a relaxed load. COX_KV_UNUSED also if there is no such
 * block. */
COX_PUBLIC uint64_t cox_kv_blocks_user(const struct cox_kv_blocks *blocks, uint32_t block);

/* ---- readers ---- */

struct cox_kv_view;

/* fd: a duplicate, in this process, of the owner's cox_kv_info.fd. It stays the caller's, and may
 * be closed.
 * Returns
 *   0
 *   COX_DENIED: the memory could shrink, processes other than its owner could write it, or it is
 *     another user's
 *   COX_CORRUPT: the memory does not contain KV blocks
 *   COX_VERSION
 *   -errno
 */
COX_PUBLIC int cox_kv_view_attach(int fd, struct cox_kv_view **ret_view, struct cox_error *err);
/* NULL-safe, returns NULL. */
COX_PUBLIC struct cox_kv_view *cox_kv_view_free(struct cox_kv_view *view);

COX_PUBLIC struct cox_kv_info cox_kv_view_info(const struct cox_kv_view *view);
/* Copies the block, block_size bytes. user: the user that it must have; COX_KV_UNUSED: any.
 * Waits while the block's content is on its way, at most until deadline_ns (CLOCK_MONOTONIC; 0: not
 * at all).
 * Returns
 *   0: `to` has the content that the owner gave to one user
 *   COX_INVALID: no such block
 *   COX_EMPTY: the block's content is still on its way
 *   COX_STALE: the block has another user or none, or was taken during the copy; the bytes in `to`
 *     are invalid
 */
COX_PUBLIC int cox_kv_view_copy(const struct cox_kv_view *view, uint32_t block, uint64_t user,
                                uint64_t deadline_ns, void *to, struct cox_error *err);

#ifdef __cplusplus
}
#endif

#endif
