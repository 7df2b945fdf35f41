/*
 * adapter: a LoRA adapter of the attention projections, as one rank uses it: the parts of the
 * low-rank matrices A and B of every layer that its share needs.
 *
 * On disk it is a folder with the names of PEFT: adapter_config.json (r, lora_alpha,
 * target_modules) and adapter_model.safetensors with the tensors
 *   base_model.model.model.layers.N.self_attn.{q,k,v,o}_proj.lora_A.weight [r][in]
 *   base_model.model.model.layers.N.self_attn.{q,k,v,o}_proj.lora_B.weight [out][r]
 * A projection becomes W x + scale * B (A x), scale = lora_alpha / r (use_rslora: / sqrt r).
 *
 * Matrices are divided as the projections are (weights.h): B of query in slices, B of key and value
 * by KV head, A of the attention output in slices. The other matrix of each pair is whole on every
 * rank. r is padded with zeros to a multiple of COX_ADAPTER_RANK_STEP, so that no product has a
 * tail. Every piece is the same for any number of ranks, and so are the products: an adapter's
 * contribution has the same bits on every rank.
 *
 * Threads: load and free on any one thread; the rest only reads.
 * Ownership: the caller owns the adapter that load returns.
 * Blocks: load reads files.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_ENGINE_ADAPTER_H
#define COX_ENGINE_ADAPTER_H

#include "channel/base/idioms.h"
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
    /* layers, layer_stride apart; each piece is 64-byte aligned */
    float *memory;
    /* bytes */
    uint64_t size;
    /* Of the folder's contents, the same for every share; never 0. As with a model
     * (engine/model/digest.h), a large file contributes a sample. */
    uint64_t digest;
    uint64_t layer_stride;
    /* of B of query and A of the output */
    uint32_t slice_first;
    /* of B of key and value */
    uint32_t kv_head_first;
    bool has[COX_PROJECTION_COUNT];
    /* offset in a layer of [rank][in], or of the pieces of it */
    uint64_t a[COX_PROJECTION_COUNT];
    /* likewise of [out][rank] */
    uint64_t b[COX_PROJECTION_COUNT];
    /* from one piece to the next; 0: a single piece */
    uint64_t a_stride[COX_PROJECTION_COUNT];
    uint64_t b_stride[COX_PROJECTION_COUNT];
};

/* Loads and checks a folder for a model and a share. All numbers that a rank reads are finite, and
 * small enough that no row computed with them fails a step. On failure err says which file and why.
 * Returns
 *   0
 *   COX_NOT_FOUND: a file or tensor is missing
 *   COX_CORRUPT: not JSON, or not safetensors
 *   COX_DIVERGED: r is 0, above COX_ADAPTER_RANK_MAX, or differs between adapter_config.json, A and
 *     B
 *   COX_INVALID: another shape than the model's, modules other than the attention projections, or
 *     an unsupported kind
 *   COX_TOO_LARGE: a configuration above 1 MiB
 *   COX_NO_SPACE
 *   -errno
 */
int cox_adapter_load(const char *directory, const struct cox_model_config *config,
                     const struct cox_share *share, struct cox_adapter **ret_adapter,
                     struct cox_error *err);
struct cox_adapter *cox_adapter_free(struct cox_adapter *adapter); /* NULL-safe */
COX_DEFINE_FREEP(struct cox_adapter, cox_adapter_free);

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

/* How a step finds the adapters that its rows name. find is called during a step and must not
 * block. Its result stays valid until the end of the step; NULL: no adapter of that name. */
struct cox_adapter_source {
    const struct cox_adapter *(*find)(void *context, const char *lora_id);
    void *context;
};

#endif
