#include "model.h"
#include "channel/base/idioms.h"
#include "engine/model/model_image.h"
#include "engine/model/digest.h"
#include "engine/model/file.h"
#include "sample.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct cox_model {
    struct cox_model_config config;
    /* NULL: an image is borrowed */
    float *own_weights;
    struct cox_forward *forward;
    struct cox_sampler *sampler;
    struct cox_share share;
    struct cox_adapter_source adapters;
    /* of the share for own weights, else of the whole model */
    struct cox_weights_layout layout;
    uint64_t digest;
};

/* The running step, for the callback that receives its logits. */
struct step {
    struct cox_model *model;
    const struct cox_batch *batch;
    struct cox_batch_output *outputs;
    float *logits;
    struct cox_error *err;
};

static int load_weights(struct cox_model *model, const char *directory, struct cox_error *err)
{
    const uint64_t size = cox_weights_size(&model->layout);

    if (size <= SIZE_MAX / 2)
        model->own_weights = aligned_alloc(COX_WEIGHTS_ALIGNMENT, (size_t)size);
    if (!model->own_weights)
        return cox_fail(err, COX_NO_SPACE, "%s: no memory for %llu bytes of weights", directory,
                        (unsigned long long)size);
    return cox_weights_fill(&model->config, &model->share, directory, model->own_weights, NULL,
                            NULL, err);
}

/* Completes a model that has configuration, digest and weights. */
static int complete(struct cox_model *model, const float *weights,
                    const struct cox_model_options *options, struct cox_error *err)
{
    int r = cox_forward_new(&model->config, &model->layout, weights, &options->share,
                            options->tile_count_max, &options->adapters, &model->forward, err);

    if (r)
        return r;
    model->adapters = options->adapters;
    return cox_sampler_new(model->config.vocab_size, &model->sampler, err);
}

static int model_new(const struct cox_model_options *options, const char *what,
                     struct cox_model **ret_model, struct cox_error *err)
{
    struct cox_model *model = calloc(1, sizeof(*model));

    if (!model)
        return cox_fail(err, COX_NO_SPACE, "no memory to load %s", what);
    model->share = options->share;
    *ret_model = model;
    return 0;
}

int cox_model_load(const char *directory, const struct cox_model_options *options,
                   struct cox_model **ret_model, struct cox_error *err)
{
    _cox_cleanup_(cox_model_freep) struct cox_model *model = NULL;
    int r;

    r = model_new(options, directory, &model, err);
    if (!r)
        r = cox_model_folder_config(directory, &model->config, err);
    if (!r)
        r = cox_share_check(&model->config, &options->share, err);
    if (r)
        return r;
    model->layout = cox_weights_share_layout(&model->config, &model->share);
    /* The digest is taken before and after: files that changed in between would give the digest of
     * other weights. */
    r = cox_model_digest_folder(directory, &model->digest, err);
    if (!r)
        r = load_weights(model, directory, err);
    if (!r)
        r = cox_model_digest_verify(directory, model->digest, err);
    r = cox_file_blame(r, err);
    if (!r)
        r = complete(model, model->own_weights, options, err);
    if (r)
        return r;
    *ret_model = cox_steal_ptr(&model);
    return 0;
}

int cox_model_borrow(const void *image, uint64_t size, const struct cox_model_options *options,
                     struct cox_model **ret_model, struct cox_error *err)
{
    _cox_cleanup_(cox_model_freep) struct cox_model *model = NULL;
    struct cox_model_image found;
    int r;

    r = cox_model_image_read(image, size, &found, err);
    if (!r)
        r = model_new(options, "a model in an image", &model, err);
    if (r)
        return r;
    model->config = found.config;
    model->digest = found.digest;
    model->layout = cox_weights_layout(&found.config);
    r = complete(model, found.weights, options, err);
    if (r)
        return r;
    *ret_model = cox_steal_ptr(&model);
    return 0;
}

struct cox_model *cox_model_free(struct cox_model *model)
{
    if (!model)
        return NULL;
    cox_sampler_free(model->sampler);
    cox_forward_free(model->forward);
    free(model->own_weights);
    free(model);
    return NULL;
}

const struct cox_model_config *cox_model_config(const struct cox_model *model)
{
    return &model->config;
}

uint64_t cox_model_digest(const struct cox_model *model)
{
    return model->digest;
}

uint64_t cox_model_weights_size(const struct cox_model *model)
{
    return model->own_weights ? cox_weights_size(&model->layout) : 0;
}

struct cox_kv_heads cox_model_kv_heads(const struct cox_model *model)
{
    return cox_share_kv_heads(&model->config, &model->share);
}

uint32_t cox_model_slice_count(const struct cox_model *model)
{
    return cox_share_slices(&model->config, &model->share).count;
}

size_t cox_model_slice_length_max(const struct cox_model *model)
{
    return cox_forward_slice_length_max(model->forward);
}

struct cox_cache_geometry cox_model_cache_geometry(const struct cox_model *model,
                                                   uint32_t block_count, uint32_t block_size,
                                                   uint32_t swap_block_count)
{
    return (struct cox_cache_geometry){
        .layer_count = model->config.layer_count,
        .kv_head_count = cox_share_kv_heads(&model->config, &model->share).count,
        .head_dim = model->config.head_dim,
        .block_size = block_size,
        .block_count = block_count,
        .swap_block_count = swap_block_count,
    };
}

int cox_model_cache_new(const struct cox_model *model, uint32_t block_count, uint32_t block_size,
                        uint32_t swap_block_count, struct cox_cache **ret_cache,
                        struct cox_error *err)
{
    const struct cox_cache_geometry geometry =
        cox_model_cache_geometry(model, block_count, block_size, swap_block_count);

    return cox_cache_new(&geometry, ret_cache, err);
}

/* Checks that the cache was made for this model. */
static int check_cache(const struct cox_model *model, const struct cox_cache *cache,
                       struct cox_error *err)
{
    const struct cox_cache_geometry *g = cox_cache_geometry(cache);
    const struct cox_cache_geometry expected =
        cox_model_cache_geometry(model, g->block_count, g->block_size, g->swap_block_count);

    if (memcmp(g, &expected, sizeof(expected)) != 0)
        return cox_fail(err, COX_INVALID,
                        "the KV cache has %u layers of %u KV heads of %u; the model %u of %u of %u",
                        g->layer_count, g->kv_head_count, g->head_dim, expected.layer_count,
                        expected.kv_head_count, expected.head_dim);
    return 0;
}

/* Checks that the blocks of a row cover positions 0 to end - 1. */
static int check_blocks(const struct cox_batch_row *row, uint64_t end,
                        const struct cox_cache_geometry *geometry, struct cox_error *err)
{
    const struct cox_block_table *table = &row->tables[0];
    const uint64_t needed = (end + geometry->block_size - 1) / geometry->block_size;

    if (table->count < needed)
        return cox_fail(err, COX_INVALID,
                        "sequence %lld has %u KV blocks of %u; %llu positions need %llu",
                        (long long)row->id, table->count, geometry->block_size,
                        (unsigned long long)end, (unsigned long long)needed);
    for (uint64_t i = 0; i < needed; i++)
        if (table->blocks[i] < 0 || (uint32_t)table->blocks[i] >= geometry->block_count)
            return cox_fail(err, COX_INVALID,
                            "sequence %lld: KV block %d does not exist; there are %u",
                            (long long)row->id, table->blocks[i], geometry->block_count);
    return 0;
}

static int check_row(const struct cox_model *model, const struct cox_cache *cache,
                     const struct cox_batch_row *row, struct cox_error *err)
{
    const uint64_t end = (uint64_t)row->position + row->token_count;
    int r;

    if (row->token_count == 0 || end > model->config.position_count_max)
        return cox_fail(
            err, COX_INVALID,
            "sequence %lld: %u tokens from position %u; allowed: at least 1, and positions below %u",
            (long long)row->id, row->token_count, row->position, model->config.position_count_max);
    /* All tokens, including those computed earlier, because the repetition penalty reads them. */
    for (uint64_t i = 0; i < end; i++)
        if (row->tokens[i] < 0 || (uint32_t)row->tokens[i] >= model->config.vocab_size)
            return cox_fail(err, COX_INVALID,
                            "sequence %lld: token %d at position %llu; allowed: 0 to %u",
                            (long long)row->id, row->tokens[i], (unsigned long long)i,
                            model->config.vocab_size - 1);
    if (row->lora_id &&
        (!model->adapters.find || !model->adapters.find(model->adapters.context, row->lora_id)))
        return cox_fail(err, COX_INVALID, "sequence %lld: there is no LoRA adapter '%.128s' here",
                        (long long)row->id, row->lora_id);
    r = check_blocks(row, end, cox_cache_geometry(cache), err);
    if (!r && row->emit)
        r = cox_sampling_check(row->sampling, err);
    return r;
}

static int check_batch(const struct cox_model *model, const struct cox_cache *cache,
                       const struct cox_batch *batch, struct cox_error *err)
{
    int r = check_cache(model, cache, err);

    if (!r)
        r = cox_cache_check_moves(cache, batch, err);
    if (!r && batch->row_count && batch->table_count < 1)
        r = cox_fail(err, COX_INVALID, "a batch without block tables");
    for (uint32_t i = 0; !r && i < batch->row_count; i++)
        r = check_row(model, cache, &batch->rows[i], err);
    return r;
}

static int take_logits(void *context, uint32_t index, const float *logits)
{
    struct step *step = context;
    const struct cox_batch_row *row = &step->batch->rows[index];
    const size_t vocab_size = step->model->config.vocab_size;

    if (step->logits)
        memcpy(step->logits + index * vocab_size, logits, vocab_size * sizeof(float));
    if (!row->emit)
        return 0;
    return cox_sampler_draw(step->model->sampler, row->sampling, row->tokens,
                            row->position + row->token_count, logits, &step->outputs[index],
                            step->err);
}

int cox_model_step(struct cox_model *model, struct cox_cache *cache, const struct cox_batch *batch,
                   struct cox_batch_output *outputs, float *logits, struct cox_error *err)
{
    struct step step = {model, batch, outputs, logits, err};
    int r;

    r = check_batch(model, cache, batch, err);
    if (r)
        return r;
    if (cox_batch_cancelled(batch))
        return cox_fail(err, COX_ABORTED, "the step was cancelled before it began");
    r = cox_cache_begin(cache, batch, err);
    if (r)
        return r;
    for (uint32_t i = 0; i < batch->row_count; i++)
        outputs[i] = (struct cox_batch_output){.token = -1, .logprob = 0};
    r = cox_forward_run(model->forward, cache, batch, logits != NULL, take_logits, &step, err);
    if (r == 0)
        cox_cache_end(cache, batch);
    return r;
}
