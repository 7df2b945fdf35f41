/*
 * weights: all tensors of a model as F32 in one block of memory, and where each one stands in it.
 *
 * The layout is a function of the configuration alone, so the block may be private memory, or a
 * shared block that one process fills and all ranks map. Every tensor keeps the row order of the
 * checkpoint ([out][in]) and starts at a multiple of 64 bytes. A rank uses its slices in place:
 * rows of the column-parallel tensors, columns (by the leading dimension) of the row-parallel ones.
 *
 * Any process, any thread. The functions own nothing. cox_weights_fill blocks on reading the files.
 * If the process dies half-way through a fill the block holds rubbish: who shares it publishes it
 * only after the fill returned.
 */
#ifndef COX_WORKER_MODEL_WEIGHTS_H
#define COX_WORKER_MODEL_WEIGHTS_H

#include "worker/model/config.h"

#define COX_WEIGHTS_ALIGNMENT 64

/* Offsets and lengths in floats. Tensors of layer l stand at layers + l * layer_stride + the offset
 * named. */
struct cox_weights_layout {
    uint64_t embedding;   /* [vocab_padded][hidden]; rows from vocab_size on are zero */
    uint64_t output;      /* the same shape; equal to embedding when tied */
    uint64_t output_norm; /* [hidden] */
    uint64_t layers;
    uint64_t layer_stride;
    uint64_t attention_norm;    /* [hidden] */
    uint64_t query;             /* [head_count * head_dim][hidden] */
    uint64_t key;               /* [kv_head_count * head_dim][hidden] */
    uint64_t value;             /* like key */
    uint64_t attention_output;  /* [hidden][head_count * head_dim] */
    uint64_t feed_forward_norm; /* [hidden] */
    uint64_t gate;              /* [intermediate][hidden] */
    uint64_t up;                /* like gate */
    uint64_t down;              /* [hidden][intermediate] */
    uint64_t length;            /* floats in all */
    /* The vocabulary is padded so that its COX_SLICE_COUNT slices are equally long; no matrix
     * product then depends on which slice it is. */
    uint32_t vocab_slice;
    uint32_t vocab_padded;
};

/* Cannot fail for a configuration that was loaded. */
struct cox_weights_layout cox_weights_layout(const struct cox_model_config *config);

static inline uint64_t cox_weights_size(const struct cox_weights_layout *layout)
{
    return layout->length * sizeof(float);
}

/* Reads the checkpoint of a folder into memory of cox_weights_size bytes, aligned to
 * COX_WEIGHTS_ALIGNMENT, which the caller owns. Returns 0; COX_NOT_FOUND a file or tensor is
 * missing; COX_INVALID a tensor of another shape or dtype than config.json implies, or not finite;
 * COX_CORRUPT; a negative errno. */
int cox_weights_fill(const struct cox_model_config *config, const char *directory, float *memory,
                     struct cox_error *err);

#endif
