/*
 * cache: the paged KV cache of one rank: blocks of positions, and host blocks to swap them to.
 *
 * A block holds, for every layer, the keys and the values of block_size positions of the KV heads
 * of this rank: [layer][key, value][kv_head][position in block][head_dim]   floats so one block is
 * one piece of memory: a swap, a copy or a pull by another group moves it in one go.
 *
 * Threads: one at a time; the worker's step thread.
 * Ownership: the object owns the host blocks, and the blocks where the caller lent no memory for
 *   them. Nothing blocks. Every block id is input from the coordinator and is checked, in all
 *   builds. If the process dies, blocks in lent memory hold what was written so far; nothing else
 *   is left.
 */
#ifndef COX_WORKER_MODEL_CACHE_H
#define COX_WORKER_MODEL_CACHE_H

#include "worker/batch.h"

#define COX_CACHE_ALIGNMENT 64

struct cox_cache_geometry {
    uint32_t layer_count;
    uint32_t kv_head_count; /* of this rank */
    uint32_t head_dim;
    uint32_t block_size;       /* positions per block, 1 to 4096 */
    uint32_t block_count;      /* 1 to 2^24 */
    uint32_t swap_block_count; /* 0 to 2^24 */
};

struct cox_cache;

/* Bytes of one block. */
uint64_t cox_cache_block_size(const struct cox_cache_geometry *geometry);

/* memory is NULL, or block_count blocks aligned to COX_CACHE_ALIGNMENT that the caller lends until
 * free. Own memory starts zeroed, lent memory is taken as it is. Returns 0 and gives the object;
 * COX_INVALID a number outside its range; COX_NO_SPACE with what was needed. */
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

/* The three lists of a batch in the order that batch.h fixes, all checked first.
 * Returns 0; COX_INVALID, nothing was moved. */
int cox_cache_check_moves(const struct cox_cache *cache, const struct cox_batch *batch,
                          struct cox_error *err);
int cox_cache_move(struct cox_cache *cache, const struct cox_batch *batch, struct cox_error *err);

#endif
