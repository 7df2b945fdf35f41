/*
 * model: a Llama checkpoint as a worker uses it: load, make a KV cache for it, step.
 *
 * Threads: load and free on any one thread; step by one thread at a time.
 * Ownership: the model owns its weights unless the options lent them; caches are the caller's,
 *   separate from the model.
 * Blocks: loading reads files; a step blocks only in the caller's gather. Positive codes are those
 *   of base.h, explained in err.
 * If the process dies nothing is left but lent memory: weights and KV blocks in shared memory keep
 *   their bytes, and who shares them cleans them up.
 */
#ifndef COX_WORKER_MODEL_MODEL_H
#define COX_WORKER_MODEL_MODEL_H

#include "worker/sequences/batch.h"
#include "cache.h"
#include "engine/model/config.h"
#include "forward.h"
#include "engine/model/weights.h"

struct cox_model;

/* All zero: load the weights into private memory, own all slices. Of weights that are loaded only
 * those of the share are in memory: 1/N of the matrices, KV heads that ranks share, and the norms.
 */
struct cox_model_options {
    /* tiles of 8 tokens computed together; 0: COX_TILE_COUNT_DEFAULT */
    uint32_t tile_count_max;
    /* the part of this rank; context is lent until free */
    struct cox_share share;
    /* A block that cox_weights_fill has filled from the same folder, lent until free; NULL: load.
     */
    const float *weights;
    /* bytes; checked against config.json */
    uint64_t weights_size;
    /* lent until free; without find rows name none */
    struct cox_adapter_source adapters;
};

/* Loads config.json and the weights of a folder. options NULL: all zero.
 * Returns 0 and gives the model; COX_NOT_FOUND a file or tensor is missing; COX_INVALID a
 * configuration, tensor or option that cannot be used, a broken file, or one that was changed
 * meanwhile; COX_NO_SPACE; a negative errno. err says which and why. */
int cox_model_load(const char *directory, const struct cox_model_options *options,
                   struct cox_model **ret_model, struct cox_error *err);
/* The same on a model's block (engine/model/block.h), all of it, aligned to COX_WEIGHTS_ALIGNMENT
 * and lent for reading until free; options->weights are not looked at. Returns 0 and gives the
 * model; COX_CORRUPT, COX_VERSION: the block holds none; COX_INVALID, COX_NO_SPACE as above. */
int cox_model_borrow(const void *block, uint64_t size, const struct cox_model_options *options,
                     struct cox_model **ret_model, struct cox_error *err);
struct cox_model *cox_model_free(struct cox_model *model);
void cox_model_freep(struct cox_model **model); /* for _cox_cleanup_ */

/* Vocabulary, end tokens, positions and sizes; lent until free. */
const struct cox_model_config *cox_model_config(const struct cox_model *model);

/* Of configuration and weights (engine/model/digest.h), not 0: the same for all that were made from
 * the same folder, whether they loaded it or borrow its block. Keys and values that one model has
 * computed are of use to another one of the same digest alone. */
uint64_t cox_model_digest(const struct cox_model *model);

/* Bytes of weights in private memory; 0 when they are lent. */
uint64_t cox_model_weights_size(const struct cox_model *model);

/* The KV heads of the share. */
struct cox_kv_heads cox_model_kv_heads(const struct cox_model *model);

/* Slices of the share. */
uint32_t cox_model_slice_count(const struct cox_model *model);

/* The longest slice, in floats, that the share's gather is called with. */
size_t cox_model_slice_length_max(const struct cox_model *model);

/* True when the matrix kernels of this machine forced the slow, row-by-row way (tile.h). */
bool cox_model_rows_apart(const struct cox_model *model);

/* The geometry of a KV cache for this model and share; its block size in bytes is
 * cox_cache_block_size. */
struct cox_cache_geometry cox_model_cache_geometry(const struct cox_model *model,
                                                   uint32_t block_count, uint32_t block_size,
                                                   uint32_t swap_block_count);

/* A cache of that geometry; memory, codes and ownership as in cox_cache_new. */
int cox_model_cache_new(const struct cox_model *model, uint32_t block_count, uint32_t block_size,
                        uint32_t swap_block_count, void *memory, struct cox_cache **ret_cache,
                        struct cox_error *err);

/* One step: the block moves of the batch, then all its rows, then one token for each row that
 * emits.
 *
 * outputs has one entry per row. logits is NULL or [row_count][vocab_size]: the logits after the
 * last token of every row, also of rows that do not emit; all ranks of a group ask for them, or
 * none. The whole batch is checked before anything happens: COX_INVALID then had no effect. After
 * any other failure the outputs are undefined and the cache holds some of the step; repeating the
 * step, with its moves if blocks they name still hold what they did, writes the same. Returns 0;
 * COX_INVALID a token, position, block, count or sampling value outside what is allowed, an adapter
 * that is not there, or logits that are not finite; COX_ABORTED given up by the coordinator
 * meanwhile; what gather returned. */
int cox_model_step(struct cox_model *model, struct cox_cache *cache, const struct cox_batch *batch,
                   struct cox_batch_output *outputs, float *logits, struct cox_error *err);

#endif
