/*
 * model: a Llama checkpoint for a worker: load it, create a KV cache for it, compute steps.
 *
 * Threads: load and free on any one thread; step by one thread at a time.
 * Ownership: a loaded model owns its weights, a borrowed one uses an image of the caller. Caches
 *   are separate objects of the caller.
 * Blocks: load reads files; a step blocks only in the caller's gather.
 * Codes: positive ones are those of base.h, explained in err.
 * If the process dies: private memory is gone. A borrowed image keeps its bytes; its owner frees
 *   it.
 */
#ifndef COX_ENGINE_MODEL_H
#define COX_ENGINE_MODEL_H

#include "channel/base/idioms.h"
#include "engine/model/config.h"
#include "engine/model/weights.h"
#include "cache.h"
#include "forward.h"

#include <coxswain/worker.h>

struct cox_model;

/* All zero: all slices, and no adapters. */
struct cox_model_options {
    /* tiles of 8 tokens computed together; 0: COX_TILE_COUNT_DEFAULT */
    uint32_t tile_count_max;
    /* the part of this rank; context is lent until free */
    struct cox_share share;
    /* lent until free; without find no row may name an adapter */
    struct cox_adapter_source adapters;
};

/* Loads config.json and the weights of a folder into private memory. Weights are only those of the
 * share: 1/N of the matrices, KV heads that ranks share, and the norms. On failure err says which
 * file and why.
 * Returns
 *   0
 *   COX_NOT_FOUND: a file or tensor is missing
 *   COX_INVALID: an unusable configuration, tensor or option, a broken file, or one that changed
 *     meanwhile
 *   COX_NO_SPACE
 *   -errno
 */
int cox_model_load(const char *directory, const struct cox_model_options *options,
                   struct cox_model **ret_model, struct cox_error *err);
/* As cox_model_load, with an image (engine/model/model_image.h) instead of a folder. The image is
 * complete, aligned to COX_WEIGHTS_ALIGNMENT, and lent for reading until free.
 * Returns
 *   0
 *   COX_CORRUPT, COX_VERSION: the image contains no model
 *   COX_INVALID, COX_NO_SPACE: as cox_model_load
 */
int cox_model_borrow(const void *image, uint64_t size, const struct cox_model_options *options,
                     struct cox_model **ret_model, struct cox_error *err);
struct cox_model *cox_model_free(struct cox_model *model);
COX_DEFINE_FREEP(struct cox_model, cox_model_free);

/* Vocabulary, end tokens, positions and sizes; lent until free. */
const struct cox_model_config *cox_model_config(const struct cox_model *model);

/* Digest of configuration and weights (engine/model/digest.h), not 0. It is the same for all models
 * of one folder, whether loaded or borrowed. Keys and values of one model are valid only for models
 * with the same digest. */
uint64_t cox_model_digest(const struct cox_model *model);

/* Bytes of weights in private memory; 0 when they are borrowed. */
uint64_t cox_model_weights_size(const struct cox_model *model);

/* The KV heads of the share. */
struct cox_kv_heads cox_model_kv_heads(const struct cox_model *model);

/* Slices of the share. */
uint32_t cox_model_slice_count(const struct cox_model *model);

/* The longest slice, in floats, that the share's gather is called with. */
size_t cox_model_slice_length_max(const struct cox_model *model);

/* The geometry of a KV cache for this model and share. cox_cache_block_size gives the bytes of a
 * image. */
struct cox_cache_geometry cox_model_cache_geometry(const struct cox_model *model,
                                                   uint32_t block_count, uint32_t block_size,
                                                   uint32_t swap_block_count);

/* Creates a cache of that geometry; codes and ownership as in cox_cache_new. */
int cox_model_cache_new(const struct cox_model *model, uint32_t block_count, uint32_t block_size,
                        uint32_t swap_block_count, struct cox_cache **ret_cache,
                        struct cox_error *err);

/* Computes one step: the block moves of the batch, all its rows, and a token for each row that
 * emits.
 *
 * outputs has one entry per row. logits is NULL or [row_count][vocab_size]: the logits after the
 * last token of every row, also of rows that do not emit. Either all ranks of a group pass logits,
 * or none. The whole batch is checked before anything happens, so COX_INVALID from the checks has
 * no effect. After any other failure the outputs are undefined, and the cache has part of the step.
 * Repeating the step writes the same bytes; its moves may be repeated only while the source blocks
 * are unchanged.
 * Returns
 *   0
 *   COX_INVALID: a token, position, block, count or sampling value out of range, an unknown
 *     adapter, or logits that are not finite
 *   COX_ABORTED: cancelled by the coordinator meanwhile
 *   the result of gather
 */
int cox_model_step(struct cox_model *model, struct cox_cache *cache, const struct cox_batch *batch,
                   struct cox_batch_output *outputs, float *logits, struct cox_error *err);

#endif
