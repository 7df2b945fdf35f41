/*
 * attention: rotary position embedding, and attention of one query head to the cached keys and
 * values of its sequence.
 *
 * Plain loops in an order that depends only on position and head_dim, so a token has the same bits
 * in any batch and with any chunking. This folder is compiled without contraction of products and
 * sums: a compiler may contract the body of a loop but not its tail.
 *
 * Threads: as the cache.
 * Ownership: nothing is owned.
 * Blocks: nothing.
 * If the process dies: nothing is left.
 */
#ifndef COX_ENGINE_ATTENTION_H
#define COX_ENGINE_ATTENTION_H

#include "cache.h"
#include "engine/model/config.h"

/* Fills the head_dim / 2 rotary frequencies, in radians per position. */
void cox_rotary_frequencies(const struct cox_model_config *config, float *frequencies);

/* Fills half cosines and sines for one position; half: the number of frequencies. */
void cox_rotary_angles(const float *frequencies, uint32_t half, uint32_t position, float *cosines,
                       float *sines);

/* Rotates one head of a query or key in place: element i with element i + head_dim / 2, the order
 * of Hugging Face's Llama checkpoints. */
void cox_rotary_turn(float *head, uint32_t head_dim, const float *cosines, const float *sines);

/* Where a sequence stores its positions. The caller has checked the block ids against the cache. */
struct cox_attention_place {
    struct cox_cache *cache;
    const struct cox_block_table *table;
    uint32_t layer;
    /* of the cache, so of this rank */
    uint32_t kv_head;
};

/* Stores key and value of one KV head at a position. */
void cox_attention_store(const struct cox_attention_place *place, uint32_t position,
                         const float *key, const float *value);

/* output[head_dim] = softmax(query . keys / sqrt(head_dim)) . values over positions 0 to position,
 * inclusive. scores: scratch of position + 1 floats. */
void cox_attention(const struct cox_attention_place *place, uint32_t position, const float *query,
                   float *scores, float *output);

#endif
