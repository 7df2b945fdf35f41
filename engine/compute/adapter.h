/*
 * adapter: a LoRA adapter of the attention projections, as one rank uses it: the low-rank matrices
 * A and B of every layer, of which it holds what its share needs.
 *
 * On disk a folder in the naming of PEFT: adapter_config.json (r, lora_alpha, target_modules) and
 * adapter_model.safetensors with
 * base_model.model.model.layers.N.self_attn.{q,k,v,o}_proj.lora_A.weight [r][in] and .lora_B.weight
 * [out][r]. A projection becomes W x + scale * B (A x), scale = lora_alpha / r (use_rslora: / sqrt
 * r).
 *
 * Pieces are those of the projections themselves (weights.h): B of query in slices, B of key and
 * value by KV head, A of the attention output in slices; the other side of each is whole on every
 * rank. r is padded with zeros to a multiple of COX_ADAPTER_RANK_STEP, so that every product has a
 * shape without tails. Every piece is the same for any number of ranks, and so are the products:
 * what a rank adds has the same bits wherever it is computed.
 *
 * Threads: load and free on any one thread; the rest is read only. Ownership: the caller owns what
 * load gives. Blocks: load reads files. If the process dies nothing is left.
 */
#ifndef COX_WORKER_MODEL_ADAPTER_H
#define COX_WORKER_MODEL_ADAPTER_H

#include "engine/model/share.h"

#define COX_ADAPTER_RANK_MAX 64u
#define COX_ADAPTER_RANK_STEP 8u

enum cox_projection {
    COX_PROJECTION_QUERY = 0,
    COX_PROJECTION_KEY,
    COX_PROJECTION_VALUE,
    COX_PROJECTION_OUTPUT,
    COX_PROJECTION_COUNT,
};

/* Lengths and strides in floats. */
struct cox_adapter {
    /* padded */
    uint32_t rank;
    float scale;
    /* as in tile.h, for the shapes of this adapter */
    bool rows_apart;
    /* layers, layer_stride apart; 64-byte aligned, and so is every piece */
    float *memory;
    /* bytes */
    uint64_t size;
    /* Of what the folder says, the same for every share; never 0. As of a model
     * (engine/model/digest.h): of a large file it is of a sample. */
    uint64_t digest;
    uint64_t layer_stride;
    /* of query's B and the output's A */
    uint32_t slice_first;
    /* of key's and value's B */
    uint32_t kv_head_first;
    bool has[COX_PROJECTION_COUNT];
    /* offset in a layer; [rank][in] or pieces of it */
    uint64_t a[COX_PROJECTION_COUNT];
    /* [out][rank], or pieces of it */
    uint64_t b[COX_PROJECTION_COUNT];
    /* from one piece to the next; 0: there is one */
    uint64_t a_stride[COX_PROJECTION_COUNT];
    uint64_t b_stride[COX_PROJECTION_COUNT];
};

/* Loads and checks a folder for a model and a share of it. All that a rank reads is finite, and
 * none of it so large that a row computed with it could fail a step. Returns 0 and gives the
 * adapter; COX_NOT_FOUND: a file or tensor is missing; COX_CORRUPT: not JSON, not safetensors;
 * COX_DIVERGED: its rank: 0, above COX_ADAPTER_RANK_MAX, or not the same in adapter_config.json, A
 * and B; COX_INVALID: of another shape than the model implies, of other modules than the attention
 * projections, or of a kind that is not computed here; COX_TOO_LARGE: a configuration above 1 MiB;
 * COX_NO_SPACE; a negative errno. err says which and why. */
int cox_adapter_load(const char *directory, const struct cox_model_config *config,
                     const struct cox_share *share, struct cox_adapter **ret_adapter,
                     struct cox_error *err);
struct cox_adapter *cox_adapter_free(struct cox_adapter *adapter); /* NULL-safe */
void cox_adapter_freep(struct cox_adapter **adapter);              /* for _cox_cleanup_ */

static inline const float *cox_adapter_a(const struct cox_adapter *adapter, uint32_t layer,
                                         enum cox_projection projection, uint32_t piece)
{
    return adapter->memory + layer * adapter->layer_stride + adapter->a[projection] +
           piece * adapter->a_stride[projection];
}

static inline const float *cox_adapter_b(const struct cox_adapter *adapter, uint32_t layer,
                                         enum cox_projection projection, uint32_t piece)
{
    return adapter->memory + layer * adapter->layer_stride + adapter->b[projection] +
           piece * adapter->b_stride[projection];
}

/* Where a step finds the adapters that its rows name. find is called in a step, may not block, and
 * what it gives stays until the step's end; NULL: there is none of that name. */
struct cox_adapter_source {
    const struct cox_adapter *(*find)(void *context, const char *lora_id);
    void *context;
};

#endif
