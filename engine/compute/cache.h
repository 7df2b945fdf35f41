/*
 * cache: the paged KV cache of one rank: blocks of positions, and host blocks to swap them to.
 *
 * A block has the keys and values of block_size positions, for every layer and every KV head of
 * this rank, as floats:
 *   [layer][key, value][kv_head][position in block][head_dim]
 * So a block is contiguous, and is swapped, copied or pulled in one piece.
 *
 * The cache's own blocks are KV blocks that other groups may copy
 * (coxswain/kv.h), and that no other process can write. Block b of the block
 * tables is KV block b. Its user is the sequence (cox_kv_user_of) that owns it: whose positions in
 * the block were all written by successful steps or pulls; or COX_CACHE_UNUSED. A block is written
 * only
 *   - after it was taken: it has no owner, so a concurrent copy is stale; or
 *   - by the sequence that owns it, behind its last position, or with the same bytes again: neither
 *     disturbs a copy. A sequence that starts a block at its first position takes it, even its own.
 * A block is given to a sequence only at the end of the step. A sequence that has ended, or starts
 * again at position 0, owns no blocks: references that other groups have to them are stale.
 *
 * Threads: one at a time, the worker's step thread. Other threads may call take, give, block
 *   and kv_blocks at the same time, for blocks that no step accesses meanwhile. The coordinator
 *   decides which: a wrong decision gives wrong keys and values, but no crash.
 *   Users are atomic, so that of two threads that take the same block one may detect it.
 * Ownership: the object owns the blocks and the host blocks. Every block id is input from the
 *   coordinator and is checked, in all builds.
 * Blocks (threads): nothing. Other groups that read the blocks delay no step.
 * If the process dies: the blocks live until the last process unmaps them.
 */
#ifndef COX_ENGINE_CACHE_H
#define COX_ENGINE_CACHE_H

#include "channel/base/idioms.h"

#include <coxswain/kv.h>
#include <coxswain/worker.h>

#define COX_CACHE_ALIGNMENT COX_KV_BLOCK_ALIGNMENT

struct cox_cache_geometry {
    uint32_t layer_count;
    /* of this rank */
    uint32_t kv_head_count;
    uint32_t head_dim;
    /* positions per block, 1 to 4096 */
    uint32_t block_size;
    /* 1 to 2^24 */
    uint32_t block_count;
    /* 0 to 2^24 */
    uint32_t swap_block_count;
};

struct cox_cache;

/* User of a block without an owner; no pull matches it. */
#define COX_CACHE_UNUSED COX_KV_UNUSED

/* Bytes of one block. */
uint64_t cox_cache_block_size(const struct cox_cache_geometry *geometry);

/* The memory starts zeroed.
 * Returns
 *   0
 *   COX_INVALID: a number outside its range
 *   COX_NO_SPACE: err has the size needed
 *   -errno
 */
int cox_cache_new(const struct cox_cache_geometry *geometry, struct cox_cache **ret_cache,
                  struct cox_error *err);
struct cox_cache *cox_cache_free(struct cox_cache *cache);
COX_DEFINE_FREEP(struct cox_cache, cox_cache_free);

const struct cox_cache_geometry *cox_cache_geometry(const struct cox_cache *cache);

/* Keys or values of one layer, block and KV head of this rank: [block_size][head_dim], lent. block
 * must be below block_count: asserted. */
float *cox_cache_keys(struct cox_cache *cache, uint32_t block, uint32_t layer, uint32_t kv_head);
float *cox_cache_values(struct cox_cache *cache, uint32_t block, uint32_t layer, uint32_t kv_head);

/* The bytes of a block, lent, for a transfer; NULL when there is no such block. */
void *cox_cache_block(struct cox_cache *cache, int64_t block);

/* ---- owners of blocks ---- */

/* Lent until free. */
struct cox_kv_blocks *cox_cache_kv_blocks(const struct cox_cache *cache);

/* Removes the owner, so that the block may be written. The caller has checked that there is such a
 * block. */
void cox_cache_take(struct cox_cache *cache, uint32_t block);
/* Returns whether the block was taken and not given to a sequence since. */
bool cox_cache_is_taken(const struct cox_cache *cache, uint32_t block);
/* Makes the sequence of this user the owner of a taken block; COX_CACHE_UNUSED: it stays
 * without one. A block that has an owner keeps it. */
void cox_cache_give(struct cox_cache *cache, uint32_t block, uint64_t user);

/* Begins a step. Sequences that ended, or start again, lose their blocks; blocks to be copied to or
 * written are taken; then the copies are made. The caller has checked the batch.
 * Returns
 *   0
 *   COX_INVALID: an id out of range, nothing was copied
 *   COX_NO_SPACE
 */
int cox_cache_begin(struct cox_cache *cache, const struct cox_batch *batch, struct cox_error *err);
/* Ends a successful step. Written blocks go to their sequences. Blocks copied to go to the sequence
 * whose table contains them, if it has a row. */
void cox_cache_end(struct cox_cache *cache, const struct cox_batch *batch);
/* Zeroes all blocks and removes their owners, as in a new cache. The memory stays, so handles that
 * other groups have remain valid. */
void cox_cache_clear(struct cox_cache *cache);
/* Ends the sequences that last had rows in these slots, or all sequences. */
void cox_cache_forget(struct cox_cache *cache, const uint32_t *slots, uint32_t count);
void cox_cache_forget_all(struct cox_cache *cache);

/* The three lists of a batch in the order that worker.h defines, all checked first. Returns 0, or
 * COX_INVALID: nothing was copied. */
int cox_cache_check_moves(const struct cox_cache *cache, const struct cox_batch *batch,
                          struct cox_error *err);
int cox_cache_move(struct cox_cache *cache, const struct cox_batch *batch, struct cox_error *err);

#endif
