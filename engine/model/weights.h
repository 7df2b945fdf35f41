/*
 * weights: tensors of a model as F32 in one block of memory, all or those of one share, and where
 * each one stands in it.
 *
 * The layout is a function of the configuration and the share alone. The block of the whole model
 * may be private memory, or a shared block that one process fills and all ranks map; a rank then
 * uses its slices in place. The block of a share holds its slices and no others: a rank that loads
 * for itself has 1/N of the matrices.
 *
 * Every tensor is cut in pieces: query, attention output, gate, up and down in the slices of
 * share.h, key and value by KV head, embedding and output by vocabulary slice. Pieces stand one
 * after the other, each row-major with a leading dimension of its own and from a multiple of 64
 * bytes on. So a product has the same shape, the same leading dimensions and the same alignment in
 * every block; nothing that a matrix kernel could ask for tells it how many ranks there are. Norms
 * have one piece, which every share has.
 *
 * Any process, any thread. The functions own nothing. Filling blocks on reading the files. If the
 * process dies half-way through a fill the block holds rubbish: who shares it publishes it only
 * after the fill returned.
 */
#ifndef COX_MODEL_WEIGHTS_H
#define COX_MODEL_WEIGHTS_H

#include "share.h"

#define COX_WEIGHTS_ALIGNMENT 64

/* Offsets, lengths and strides in floats. Tensors of layer l stand at layers + l * layer_stride +
 * the offset named, of which piece p of those that the block holds is at + p * its stride. */
struct cox_weights_layout {
    /* the slices that the block holds */
    uint32_t slice_first;
    uint32_t slice_count;
    /* and the KV heads */
    struct cox_kv_heads kv_heads;
    /* slices [vocab_slice][hidden]; rows from vocab_size on are zero */
    uint64_t embedding;
    /* the same; equal to embedding when tied */
    uint64_t output;
    /* [hidden] */
    uint64_t output_norm;
    uint64_t layers;
    uint64_t layer_stride;
    /* [hidden] */
    uint64_t attention_norm;
    /* slices [slice heads * head_dim][hidden] */
    uint64_t query;
    /* KV heads [head_dim][hidden] */
    uint64_t key;
    /* like key */
    uint64_t value;
    /* slices [hidden][slice heads * head_dim] */
    uint64_t attention_output;
    /* [hidden] */
    uint64_t feed_forward_norm;
    /* slices [column_slice][hidden] */
    uint64_t gate;
    /* like gate */
    uint64_t up;
    /* slices [hidden][column_slice] */
    uint64_t down;
    /* of query and attention_output */
    uint64_t head_stride;
    /* of key and value */
    uint64_t kv_stride;
    /* of gate, up and down */
    uint64_t column_stride;
    /* of embedding and output */
    uint64_t vocab_stride;
    /* floats in all */
    uint64_t length;
    /* Feed-forward columns and vocabulary are padded with zeros so that their slices are equally
     * long; no matrix product then depends on which slice it is. */
    uint32_t column_slice;
    uint32_t vocab_slice;
    uint32_t vocab_padded;
};

/* Of the whole model. Cannot fail for a configuration that was loaded. */
struct cox_weights_layout cox_weights_layout(const struct cox_model_config *config);
/* Of a share that was checked. */
struct cox_weights_layout cox_weights_share_layout(const struct cox_model_config *config,
                                                   const struct cox_share *share);

static inline uint64_t cox_weights_size(const struct cox_weights_layout *layout)
{
    return layout->length * sizeof(float);
}

/* Reads the checkpoint of a folder into memory of cox_weights_size bytes, aligned to
 * COX_WEIGHTS_ALIGNMENT, which the caller owns. Returns 0; COX_NOT_FOUND a file or tensor is
 * missing; COX_INVALID a tensor of another shape or dtype than config.json implies, not finite, or
 * that nobody uses; COX_CORRUPT; a negative errno. */
int cox_weights_fill(const struct cox_model_config *config, const char *directory, float *memory,
                     struct cox_error *err);
/* The same, asked after every layer whether it is to go on: COX_ABORTED. */
int cox_weights_fill_until(const struct cox_model_config *config, const char *directory,
                           float *memory, bool (*cancelled)(void *context), void *context,
                           struct cox_error *err);
/* The same for a share: of every tensor only what the share holds is read. */
int cox_weights_share_fill(const struct cox_model_config *config, const struct cox_share *share,
                           const char *directory, float *memory, struct cox_error *err);

#endif
