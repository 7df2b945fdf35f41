#include "worker/model/weights.h"
#include "worker/model/checkpoint.h"

#include <stdio.h>
#include <string.h>

#define ALIGNMENT_FLOATS (COX_WEIGHTS_ALIGNMENT / sizeof(float))

/* Slices of the vocabulary are a multiple of this: no tails in the matrix kernels. */
#define VOCAB_SLICE_MULTIPLE 16u

/* Takes length floats at *used and moves it on, aligned. */
static uint64_t place(uint64_t *used, uint64_t length)
{
    uint64_t offset = *used;

    *used += (length + ALIGNMENT_FLOATS - 1) / ALIGNMENT_FLOATS * ALIGNMENT_FLOATS;
    return offset;
}

struct cox_weights_layout cox_weights_layout(const struct cox_model_config *config)
{
    /* With the limits of config.h the largest sum is below 2^50 floats. */
    const uint64_t hidden = config->hidden_size;
    const uint64_t intermediate = config->intermediate_size;
    const uint64_t head_width = (uint64_t)config->head_count * config->head_dim;
    const uint64_t kv_width = (uint64_t)config->kv_head_count * config->head_dim;
    struct cox_weights_layout layout = {0};
    uint64_t used = 0, layer = 0;

    layout.vocab_slice = (config->vocab_size + COX_SLICE_COUNT - 1) / COX_SLICE_COUNT;
    layout.vocab_slice = (layout.vocab_slice + VOCAB_SLICE_MULTIPLE - 1) / VOCAB_SLICE_MULTIPLE *
                         VOCAB_SLICE_MULTIPLE;
    layout.vocab_padded = layout.vocab_slice * COX_SLICE_COUNT;

    layout.embedding = place(&used, layout.vocab_padded * hidden);
    layout.output =
        config->tied_embeddings ? layout.embedding : place(&used, layout.vocab_padded * hidden);
    layout.output_norm = place(&used, hidden);

    layout.attention_norm = place(&layer, hidden);
    layout.query = place(&layer, head_width * hidden);
    layout.key = place(&layer, kv_width * hidden);
    layout.value = place(&layer, kv_width * hidden);
    layout.attention_output = place(&layer, hidden * head_width);
    layout.feed_forward_norm = place(&layer, hidden);
    layout.gate = place(&layer, intermediate * hidden);
    layout.up = place(&layer, intermediate * hidden);
    layout.down = place(&layer, hidden * intermediate);

    layout.layer_stride = layer;
    layout.layers = place(&used, layer * config->layer_count);
    layout.length = used;
    return layout;
}

/* A matrix, or a vector where columns is 0. */
static int read_tensor(const struct cox_checkpoint *checkpoint, const char *name, uint64_t rows,
                       uint64_t columns, float *buffer, struct cox_error *err)
{
    const uint64_t shape[] = {rows, columns};

    return cox_checkpoint_read(checkpoint, name, shape, columns ? 2 : 1, buffer, err);
}

static int read_layer(const struct cox_checkpoint *checkpoint,
                      const struct cox_model_config *config,
                      const struct cox_weights_layout *layout, uint32_t layer, float *memory,
                      struct cox_error *err)
{
    const uint64_t hidden = config->hidden_size;
    const uint64_t intermediate = config->intermediate_size;
    const uint64_t head_width = (uint64_t)config->head_count * config->head_dim;
    const uint64_t kv_width = (uint64_t)config->kv_head_count * config->head_dim;
    const struct {
        const char *name;
        uint64_t offset, rows, columns;
    } tensors[] = {
        {"input_layernorm", layout->attention_norm, hidden, 0},
        {"self_attn.q_proj", layout->query, head_width, hidden},
        {"self_attn.k_proj", layout->key, kv_width, hidden},
        {"self_attn.v_proj", layout->value, kv_width, hidden},
        {"self_attn.o_proj", layout->attention_output, hidden, head_width},
        {"post_attention_layernorm", layout->feed_forward_norm, hidden, 0},
        {"mlp.gate_proj", layout->gate, intermediate, hidden},
        {"mlp.up_proj", layout->up, intermediate, hidden},
        {"mlp.down_proj", layout->down, hidden, intermediate},
    };
    float *base = memory + layout->layers + layer * layout->layer_stride;
    char name[96];

    for (size_t i = 0; i < sizeof(tensors) / sizeof(tensors[0]); i++) {
        snprintf(name, sizeof(name), "model.layers.%u.%s.weight", layer, tensors[i].name);
        int r = read_tensor(checkpoint, name, tensors[i].rows, tensors[i].columns,
                            base + tensors[i].offset, err);
        if (r)
            return r;
    }
    return 0;
}

int cox_weights_fill(const struct cox_model_config *config, const char *directory, float *memory,
                     struct cox_error *err)
{
    _cox_cleanup_(cox_checkpoint_freep) struct cox_checkpoint *checkpoint = NULL;
    const struct cox_weights_layout layout = cox_weights_layout(config);
    const uint64_t hidden = config->hidden_size;
    const uint64_t vocab_length = config->vocab_size * hidden;
    const size_t padding_size =
        (size_t)(layout.vocab_padded * hidden - vocab_length) * sizeof(float);
    int r;

    r = cox_checkpoint_new(directory, &checkpoint, err);
    if (r)
        return r;
    /* Layers first: a configuration that is not that of the checkpoint shows before much was read.
     */
    for (uint32_t layer = 0; layer < config->layer_count; layer++) {
        r = read_layer(checkpoint, config, &layout, layer, memory, err);
        if (r)
            return r;
    }
    r = read_tensor(checkpoint, "model.norm.weight", hidden, 0, memory + layout.output_norm, err);
    if (r)
        return r;
    r = read_tensor(checkpoint, "model.embed_tokens.weight", config->vocab_size, hidden,
                    memory + layout.embedding, err);
    if (r)
        return r;
    memset(memory + layout.embedding + vocab_length, 0, padding_size);
    if (config->tied_embeddings)
        return 0;
    r = read_tensor(checkpoint, "lm_head.weight", config->vocab_size, hidden,
                    memory + layout.output, err);
    if (r)
        return r;
    memset(memory + layout.output + vocab_length, 0, padding_size);
    return 0;
}
