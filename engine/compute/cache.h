/*
 * cache: the paged KV cache of one rank: blocks of positions, and host blocks to swap them to.
 *
 * A block holds, for every layer, the keys and the values of block_size positions of the KV heads
 * of this rank: [layer][key, value][kv_head][position in block][head_dim]   floats so one block is
 * one piece of memory: a swap, a copy or a pull by another group moves it in one go.
 *
 * Blocks of its own are KV blocks that other groups may copy (channel/memory/pool/kv_blocks.h), and
 * that nobody else can write: block b of the block tables is block b there, and its generation says
 * whose it is: the sequence (see cox_cache_generation_of) all of whose positions there were written
 * by a step, or a pull, that succeeded; or COX_CACHE_NOBODY. A block is written only
 *   - after it was taken: it is nobody's, and a copy that somebody makes of it meanwhile is stale;
 *   or
 *   - by the sequence that it belongs to, behind the positions that it holds, or the same again,
 *     which disturbs no copy. Who begins a block at its first position takes it, also its own.
 * It goes to a sequence at the end of the step alone. A sequence that has ended, or begins anew at
 * position 0, has no blocks: what others were told of them is stale.
 *
 * Threads: one at a time, the worker's step thread; but take, give, block, generation_of and
 *   kv_blocks by others as well, at the same time, for blocks that no step writes or reads
 *   meanwhile. Which those are is the coordinator's word: a wrong one gives wrong keys and values,
 *   and crashes nobody. Generations are atomic words, so that one of two who take the same block
 *   may see it.
 * Ownership: the object owns the host blocks, and the blocks where the caller lent no memory for
 *   them. Every block id is input from the coordinator and is checked, in all builds.
 * Blocks: nothing. Other groups that read the blocks hold nobody up.
 * If the process dies, blocks in lent memory hold what was written so far; its own live with the
 *   last process that reads them.
 */
#ifndef COX_WORKER_MODEL_CACHE_H
#define COX_WORKER_MODEL_CACHE_H

#include "channel/memory/pool/kv_blocks.h"
#include "worker/sequences/batch.h"

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

/* Generation of a block that no sequence has: of none can it be pulled. */
#define COX_CACHE_NOBODY COX_KV_NOBODY

/* Bytes of one block. */
uint64_t cox_cache_block_size(const struct cox_cache_geometry *geometry);

/* memory is NULL, or block_count blocks aligned to COX_CACHE_ALIGNMENT that the caller lends until
 * free: then they are no KV blocks for others, and belong to nobody. Own memory starts zeroed, lent
 * memory is taken as it is. Returns 0 and gives the object; COX_INVALID a number outside its range;
 * COX_NO_SPACE with what was needed; -errno. */
int cox_cache_new(const struct cox_cache_geometry *geometry, void *memory,
                  struct cox_cache **ret_cache, struct cox_error *err);
struct cox_cache *cox_cache_free(struct cox_cache *cache);
void cox_cache_freep(struct cox_cache **cache); /* for _cox_cleanup_ */

const struct cox_cache_geometry *cox_cache_geometry(const struct cox_cache *cache);

/* Keys or values of one layer, block and KV head of this rank: [block_size][head_dim], lent. block
 * must be below block_count: asserted. */
float *cox_cache_keys(struct cox_cache *cache, uint32_t block, uint32_t layer, uint32_t kv_head);
float *cox_cache_values(struct cox_cache *cache, uint32_t block, uint32_t layer, uint32_t kv_head);

/* The raw bytes of a block, lent, for a transfer; NULL when there is no such block. */
void *cox_cache_block(struct cox_cache *cache, int64_t block);

/* Moves of whole blocks, in order of the list: from block to host block, from host block to block,
 * from block to block. All ids are checked before the first byte moves. Returns 0; COX_INVALID an
 * id out of range, nothing was moved. */
int cox_cache_swap_out(struct cox_cache *cache, const struct cox_block_pair *pairs, uint32_t count,
                       struct cox_error *err);
int cox_cache_swap_in(struct cox_cache *cache, const struct cox_block_pair *pairs, uint32_t count,
                      struct cox_error *err);
int cox_cache_copy(struct cox_cache *cache, const struct cox_block_pair *pairs, uint32_t count,
                   struct cox_error *err);

/* ---- whose blocks they are ---- */

/* NULL: the memory is lent. Lent until free. */
struct cox_kv_blocks *cox_cache_kv_blocks(const struct cox_cache *cache);

/* The generation of a sequence's blocks: its id, where that is 1 to 2^47; ids that cannot be
 * generations get one above, by a hash: two of them have the same one in 2^47 cases. */
uint64_t cox_cache_generation_of(int64_t sequence);

/* The block is nobody's from now on: it may be written. Returns 0; COX_INVALID: no such block. */
int cox_cache_take(struct cox_cache *cache, uint32_t block, struct cox_error *err);
/* Nobody has given the block to a sequence since it was taken. */
bool cox_cache_is_taken(const struct cox_cache *cache, uint32_t block);
/* What the block holds is this sequence's; COX_CACHE_NOBODY: it stays nobody's. One that is
 * somebody's stays that one's. */
void cox_cache_give(struct cox_cache *cache, uint32_t block, uint64_t generation);

/* A step: what ended, or begins anew, loses its blocks; the blocks that it moves to or writes are
 * taken; and the moves are done. The batch was checked. Returns 0; COX_INVALID: an id out of range,
 * nothing was moved; COX_NO_SPACE. */
int cox_cache_begin(struct cox_cache *cache, const struct cox_batch *batch, struct cox_error *err);
/* The step has succeeded: what it wrote is its sequences', and what it moved theirs in whose table
 * it is, where they have a row. */
void cox_cache_end(struct cox_cache *cache, const struct cox_batch *batch);
/* All blocks are nobody's, and zero, as in a new cache, and the memory is the same: what others
 * know of it holds. */
void cox_cache_clear(struct cox_cache *cache);
/* The sequences that had rows in these slots, or any at all, have ended. */
void cox_cache_forget(struct cox_cache *cache, const uint32_t *slots, uint32_t count);
void cox_cache_forget_all(struct cox_cache *cache);

/* The three lists of a batch in the order that batch.h fixes, all checked first.
 * Returns 0; COX_INVALID, nothing was moved. */
int cox_cache_check_moves(const struct cox_cache *cache, const struct cox_batch *batch,
                          struct cox_error *err);
int cox_cache_move(struct cox_cache *cache, const struct cox_batch *batch, struct cox_error *err);

#endif
