/*
 * attention: rotary positions, and one query head against the cached keys and values of its
 * sequence.
 *
 * Plain loops in an order that depends only on the position and head_dim, so a token has the same
 * bits in any batch and after any chunking. The files of this folder are compiled without
 * contraction of products and sums: a compiler is free to contract the body of a loop and not its
 * tail.
 *
 * Threads: those of the cache. Nothing is owned, nothing blocks. If the process dies nothing is
 *   left.
 */
#ifndef COX_WORKER_MODEL_ATTENTION_H
#define COX_WORKER_MODEL_ATTENTION_H

#include "cache.h"
#include "engine/model/config.h"

/* Fills the head_dim / 2 frequencies of rotary positions, in radians a position. */
void cox_rotary_frequencies(const struct cox_model_config *config, float *frequencies);

/* Fills cosines and sines, half each as there are frequencies, for one position. */
void cox_rotary_angles(const float *frequencies, uint32_t half, uint32_t position, float *cosines,
                       float *sines);

/* Turns one head of a query or key in place: element i together with element i + head_dim / 2, the
 * order of Hugging Face's Llama checkpoints. */
void cox_rotary_turn(float *head, uint32_t head_dim, const float *cosines, const float *sines);

/* Where a sequence keeps its positions. The block ids were checked against the cache. */
struct cox_attention_place {
    struct cox_cache *cache;
    const struct cox_block_table *table;
    uint32_t layer;
    /* of the cache, that is of this rank */
    uint32_t kv_head;
};

/* Stores key and value of one KV head at a position. */
void cox_attention_store(const struct cox_attention_place *place, uint32_t position,
                         const float *key, const float *value);

/* output[head_dim] = softmax(query . keys / sqrt(head_dim)) . values over positions 0 to position.
 * scores: position + 1 floats of scratch. */
void cox_attention(const struct cox_attention_place *place, uint32_t position, const float *query,
                   float *scores, float *output);

#endif
