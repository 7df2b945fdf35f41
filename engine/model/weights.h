/*
 * weights: tensors of a model, or of one share of it, as F32 in one array, and their
 * layout.
 *
 * The layout depends only on the configuration and the share. The array of the whole model may be
 * private memory. Or it is shared: one process fills it, all ranks map it, and each uses its slices
 * in place. The array of a share contains only its slices: a rank that loads by itself has 1/N of
 * the matrices.
 *
 * Every tensor is divided into pieces: query, attention output, gate, up and down in the slices of
 * share.h, key and value by KV head, embedding and output by vocabulary slice. Pieces are
 * consecutive; each is row-major with its own leading dimension, and aligned to 64 bytes. So a
 * product has the same shape, leading dimensions and alignment in every array: no input of a matrix
 * kernel depends on the number of ranks. Norms are one piece, which every share contains.
 *
 * Threads: any.
 * Ownership: the functions own nothing.
 * Blocks: fill, while it reads the files.
 * If the process dies: a half-filled array has garbage. Its owner shares it only after the fill has
 *   returned.
 */
#ifndef COX_MODEL_WEIGHTS_H
#define COX_MODEL_WEIGHTS_H

#include "share.h"

#define COX_WEIGHTS_ALIGNMENT 64

/* Offsets, lengths and strides in floats. A tensor of layer l starts at layers + l * layer_stride +
 * its offset; its piece p, counted within the array, at + p * its stride. */
struct cox_weights_layout {
    /* slices in the array */
    uint32_t slice_first;
    uint32_t slice_count;
    /* KV heads in the array */
    struct cox_kv_heads kv_heads;
    /* slices [vocab_slice][hidden]; rows from vocab_size on are zero */
    uint64_t embedding;
    /* likewise; equal to embedding when tied */
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
    /* floats of the whole array */
    uint64_t length;
    /* Feed-forward columns and vocabulary are padded with zeros, so that all slices have equal
     * length and no product depends on the slice. */
    uint32_t column_slice;
    uint32_t vocab_slice;
    uint32_t vocab_padded;
};

/* The layout of the whole model. Cannot fail for a loaded configuration. */
struct cox_weights_layout cox_weights_layout(const struct cox_model_config *config);
/* The layout of a checked share. */
struct cox_weights_layout cox_weights_share_layout(const struct cox_model_config *config,
                                                   const struct cox_share *share);

/* Floats of a piece of this length with the padding behind it. */
static inline uint64_t cox_weights_align(uint64_t length)
{
    const uint64_t step = COX_WEIGHTS_ALIGNMENT / sizeof(float);

    return (length + step - 1) / step * step;
}

static inline uint64_t cox_weights_size(const struct cox_weights_layout *layout)
{
    return layout->length * sizeof(float);
}

/* Reads the share's part of every tensor of a folder into memory of cox_weights_size bytes, aligned
 * to COX_WEIGHTS_ALIGNMENT, which the caller owns. A share of zeros is the whole model. progress is
 * called before every layer, with the number of those that are read; true ends the fill. NULL:
 * never.
 * Returns
 *   0
 *   COX_ABORTED: by progress
 *   COX_NOT_FOUND: a file or tensor is missing
 *   COX_INVALID: a tensor that config.json does not imply, of another shape or dtype, or not finite
 *   COX_CORRUPT
 *   -errno
 */
int cox_weights_fill(const struct cox_model_config *config, const struct cox_share *share,
                     const char *directory, float *memory,
                     bool (*progress)(void *context, uint32_t done, uint32_t count), void *context,
                     struct cox_error *err);

#endif
