#include "weights.h"
#include "checkpoint.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "channel/base/idioms.h"

/* Vocabulary slices are padded to a multiple of this, to avoid tails in the matrix kernels. */
#define VOCAB_SLICE_MULTIPLE 16u

/* Floats read at a time from a matrix that is divided by columns. */
#define BAND_LENGTH (UINT64_C(64) << 10)

static const struct cox_share whole;

/* Reserves count pieces at *used and advances it. */
static uint64_t place(uint64_t *used, uint64_t count, uint64_t stride)
{
    uint64_t offset = *used;

    *used += count * stride;
    return offset;
}

struct cox_weights_layout cox_weights_share_layout(const struct cox_model_config *config,
                                                   const struct cox_share *share)
{
    /* With the limits of config.h the largest sum is below 2^50 floats. */
    const uint64_t hidden = config->hidden_size;
    const uint32_t slice_count = cox_slice_count(config);
    const uint64_t slice_heads = config->head_count / slice_count;
    const uint32_t column_slice = (config->intermediate_size + slice_count - 1) / slice_count;
    const uint64_t norm = cox_weights_align(hidden);
    const struct cox_slices own = cox_share_slices(config, share);
    struct cox_weights_layout layout = {
        .slice_first = own.first,
        .slice_count = own.count,
        .kv_heads = cox_share_kv_heads(config, share),
        .head_stride = cox_weights_align(slice_heads * config->head_dim * hidden),
        .kv_stride = cox_weights_align(config->head_dim * hidden),
        .column_stride = cox_weights_align(column_slice * hidden),
        .column_slice = column_slice,
    };
    const uint64_t slices = layout.slice_count, kv_heads = layout.kv_heads.count;
    uint64_t used = 0, layer = 0;

    layout.vocab_slice = (config->vocab_size + slice_count - 1) / slice_count;
    layout.vocab_slice = (layout.vocab_slice + VOCAB_SLICE_MULTIPLE - 1) / VOCAB_SLICE_MULTIPLE *
                         VOCAB_SLICE_MULTIPLE;
    layout.vocab_padded = layout.vocab_slice * slice_count;
    layout.vocab_stride = cox_weights_align(layout.vocab_slice * hidden);

    layout.embedding = place(&used, slices, layout.vocab_stride);
    layout.output =
        config->tied_embeddings ? layout.embedding : place(&used, slices, layout.vocab_stride);
    layout.output_norm = place(&used, 1, norm);

    layout.attention_norm = place(&layer, 1, norm);
    layout.query = place(&layer, slices, layout.head_stride);
    layout.key = place(&layer, kv_heads, layout.kv_stride);
    layout.value = place(&layer, kv_heads, layout.kv_stride);
    layout.attention_output = place(&layer, slices, layout.head_stride);
    layout.feed_forward_norm = place(&layer, 1, norm);
    layout.gate = place(&layer, slices, layout.column_stride);
    layout.up = place(&layer, slices, layout.column_stride);
    layout.down = place(&layer, slices, layout.column_stride);

    layout.layer_stride = layer;
    layout.layers = place(&used, config->layer_count, layer);
    layout.length = used;
    return layout;
}

struct cox_weights_layout cox_weights_layout(const struct cox_model_config *config)
{
    return cox_weights_share_layout(config, &whole);
}

/* Pieces of a rows x columns matrix, from file to array. Each has piece_rows rows and piece_columns
 * columns; one of the two is the whole dimension. */
struct pieces {
    uint64_t rows, columns;
    uint64_t piece_rows, piece_columns;
    uint32_t first, count;
    uint64_t stride;
};

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Rows of a piece beyond the last row are filled with zeros. */
static int read_by_rows(const struct cox_checkpoint *checkpoint, const char *name,
                        const struct pieces *pieces, float *memory, struct cox_error *err)
{
    for (uint32_t i = 0; i < pieces->count; i++) {
        const uint64_t index = pieces->first + i;
        const uint64_t row_first = least(index * pieces->piece_rows, pieces->rows);
        const struct cox_tensor_part part = {
            .row_first = row_first,
            .row_count = least(pieces->piece_rows, pieces->rows - row_first),
            .column_count = pieces->columns,
        };
        const uint64_t length = part.row_count * part.column_count;
        float *piece = memory + i * pieces->stride;
        int r = cox_checkpoint_read_part(checkpoint, name, pieces->rows, pieces->columns, &part,
                                         piece, err);

        if (r)
            return r;
        memset(piece + length, 0, (size_t)(pieces->stride - length) * sizeof(float));
    }
    return 0;
}

/* The columns of all pieces are adjacent in a row. Many rows are read at once and distributed,
 * since reading piece by piece would need a system call per row and piece. Columns beyond the last
 * one are filled with zeros. */
static int read_by_columns(const struct cox_checkpoint *checkpoint, const char *name,
                           const struct pieces *pieces, float *memory, struct cox_error *err)
{
    const uint64_t width = pieces->piece_columns;
    const uint64_t first = least(pieces->first * width, pieces->columns);
    const uint64_t own = least(pieces->count * width, pieces->columns - first);
    const uint64_t row_max = own < BAND_LENGTH ? BAND_LENGTH / (own + !own) : 1;
    _cox_cleanup_(cox_free_ptr) float *band = malloc((size_t)(row_max * own + 1) * sizeof(*band));
    struct cox_tensor_part part = {.column_first = first, .column_count = own};
    int r;

    if (!band)
        return cox_fail(err, -ENOMEM, "no memory to read %s", name);
    if (own < pieces->count * width)
        memset(memory, 0, (size_t)(pieces->count * pieces->stride) * sizeof(float));
    for (; part.row_first < pieces->rows; part.row_first += part.row_count) {
        part.row_count = least(row_max, pieces->rows - part.row_first);
        r = cox_checkpoint_read_part(checkpoint, name, pieces->rows, pieces->columns, &part, band,
                                     err);
        if (r)
            return r;
        for (uint64_t row = 0; row < part.row_count; row++)
            for (uint64_t i = 0; i * width < own; i++)
                memcpy(memory + i * pieces->stride + (part.row_first + row) * width,
                       band + row * own + i * width,
                       (size_t)least(width, own - i * width) * sizeof(float));
    }
    for (uint32_t i = 0; i < pieces->count; i++)
        memset(memory + i * pieces->stride + pieces->rows * width, 0,
               (size_t)(pieces->stride - pieces->rows * width) * sizeof(float));
    return 0;
}

static int read_pieces(const struct cox_checkpoint *checkpoint, const char *name,
                       const struct pieces *pieces, float *memory, struct cox_error *err)
{
    return pieces->piece_columns == pieces->columns
               ? read_by_rows(checkpoint, name, pieces, memory, err)
               : read_by_columns(checkpoint, name, pieces, memory, err);
}

static int read_norm(const struct cox_checkpoint *checkpoint, const char *name, uint64_t hidden,
                     float *memory, struct cox_error *err)
{
    int r = cox_checkpoint_read(checkpoint, name, &hidden, 1, memory, err);

    if (!r)
        memset(memory + hidden, 0, (size_t)(cox_weights_align(hidden) - hidden) * sizeof(float));
    return r;
}

static int read_norms(const struct cox_checkpoint *checkpoint,
                      const struct cox_model_config *config,
                      const struct cox_weights_layout *layout, uint32_t layer, float *base,
                      struct cox_error *err)
{
    char name[96];
    int r;

    snprintf(name, sizeof(name), "model.layers.%u.input_layernorm.weight", layer);
    r = read_norm(checkpoint, name, config->hidden_size, base + layout->attention_norm, err);
    if (r)
        return r;
    snprintf(name, sizeof(name), "model.layers.%u.post_attention_layernorm.weight", layer);
    return read_norm(checkpoint, name, config->hidden_size, base + layout->feed_forward_norm, err);
}

static int read_layer(const struct cox_checkpoint *checkpoint,
                      const struct cox_model_config *config,
                      const struct cox_weights_layout *layout, uint32_t layer, float *memory,
                      struct cox_error *err)
{
    const uint64_t hidden = config->hidden_size, dim = config->head_dim;
    const uint64_t heads = config->head_count * dim, kv = config->kv_head_count * dim;
    const uint64_t columns = config->intermediate_size;
    const uint64_t head_piece = heads / cox_slice_count(config), piece = layout->column_slice;
    const uint32_t first = layout->slice_first, count = layout->slice_count;
    const struct cox_kv_heads own = layout->kv_heads;
    const struct pieces query = {heads, hidden, head_piece,         hidden,
                                 first, count,  layout->head_stride};
    const struct pieces key = {kv, hidden, dim, hidden, own.first, own.count, layout->kv_stride};
    const struct pieces output = {
        hidden, heads, hidden, head_piece, first, count, layout->head_stride};
    const struct pieces gate = {
        columns, hidden, piece, hidden, first, count, layout->column_stride};
    const struct pieces down = {
        hidden, columns, hidden, piece, first, count, layout->column_stride};
    const struct {
        const char *name;
        uint64_t offset;
        const struct pieces *pieces;
    } tensors[] = {
        {"self_attn.q_proj", layout->query, &query},
        {"self_attn.k_proj", layout->key, &key},
        {"self_attn.v_proj", layout->value, &key},
        {"self_attn.o_proj", layout->attention_output, &output},
        {"mlp.gate_proj", layout->gate, &gate},
        {"mlp.up_proj", layout->up, &gate},
        {"mlp.down_proj", layout->down, &down},
    };
    float *base = memory + layout->layers + layer * layout->layer_stride;
    char name[96];
    int r = read_norms(checkpoint, config, layout, layer, base, err);

    for (size_t i = 0; !r && i < sizeof(tensors) / sizeof(tensors[0]); i++) {
        snprintf(name, sizeof(name), "model.layers.%u.%s.weight", layer, tensors[i].name);
        r = read_pieces(checkpoint, name, tensors[i].pieces, base + tensors[i].offset, err);
    }
    return r;
}

/* A tied output tensor that exists all the same must equal the embedding, whose pieces are in
 * memory. */
static int check_tied(const struct cox_checkpoint *checkpoint, const char *name,
                      const struct pieces *pieces, const float *memory, struct cox_error *err)
{
    const uint64_t columns = pieces->columns;
    const uint64_t row_max = columns < BAND_LENGTH ? BAND_LENGTH / columns : 1;
    const uint64_t end =
        least((pieces->first + (uint64_t)pieces->count) * pieces->piece_rows, pieces->rows);
    _cox_cleanup_(cox_free_ptr) float *band = malloc((size_t)(row_max * columns) * sizeof(*band));
    struct cox_tensor_part part = {
        .row_first = least(pieces->first * pieces->piece_rows, pieces->rows),
        .column_count = columns,
    };
    int r;

    if (!band)
        return cox_fail(err, -ENOMEM, "no memory to read %s", name);
    for (; part.row_first < end; part.row_first += part.row_count) {
        const uint64_t index = part.row_first / pieces->piece_rows - pieces->first;
        const uint64_t row = part.row_first % pieces->piece_rows;

        part.row_count = least(least(row_max, pieces->piece_rows - row), end - part.row_first);
        r = cox_checkpoint_read_part(checkpoint, name, pieces->rows, columns, &part, band, err);
        if (r)
            return r;
        if (memcmp(band, memory + index * pieces->stride + row * columns,
                   (size_t)(part.row_count * columns) * sizeof(float)) != 0)
            return cox_fail(
                err, COX_INVALID,
                "tensor %s differs from model.embed_tokens.weight, but config.json has tie_word_embeddings true: set it to false",
                name);
    }
    return 0;
}

/* Returns whether the model uses a tensor of that name. Old checkpoints have the rotary frequencies
 * in every layer; these follow from config.json. */
static bool is_used(const char *name, const struct cox_model_config *config)
{
    static const char *const whole_model[] = {"model.embed_tokens.weight", "model.norm.weight",
                                              "lm_head.weight"};
    static const char *const of_layer[] = {
        "input_layernorm",  "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
        "self_attn.v_proj", "self_attn.o_proj",         "mlp.gate_proj",    "mlp.up_proj",
        "mlp.down_proj"};
    static const char frequencies[] = "rotary_emb.inv_freq";
    const size_t length = strlen(name), end = sizeof(frequencies) - 1;
    uint32_t layer = 0;
    char expected[96];

    if (length >= end && strcmp(name + length - end, frequencies) == 0)
        return true;
    for (size_t i = 0; i < sizeof(whole_model) / sizeof(whole_model[0]); i++)
        if (strcmp(name, whole_model[i]) == 0)
            return true;
    if (sscanf(name, "model.layers.%5" SCNu32 ".", &layer) != 1 || layer >= config->layer_count)
        return false;
    for (size_t i = 0; i < sizeof(of_layer) / sizeof(of_layer[0]); i++) {
        snprintf(expected, sizeof(expected), "model.layers.%" PRIu32 ".%s.weight", layer,
                 of_layer[i]);
        if (strcmp(name, expected) == 0)
            return true;
    }
    return false;
}

/* A tensor that is not used, such as a bias, a query norm or a further layer, was trained and would
 * be missing from the results. So it is an error. */
static int check_names(const struct cox_checkpoint *checkpoint,
                       const struct cox_model_config *config, const char *directory,
                       struct cox_error *err)
{
    const char *name;

    for (size_t i = 0; (name = cox_checkpoint_name(checkpoint, i)) != NULL; i++)
        if (!is_used(name, config))
            return cox_fail(err, COX_INVALID,
                            "%s: the model that config.json describes has no tensor %s", directory,
                            name);
    return 0;
}

int cox_weights_fill(const struct cox_model_config *config, const struct cox_share *share,
                     const char *directory, float *memory,
                     bool (*progress)(void *context, uint32_t done, uint32_t count), void *context,
                     struct cox_error *err)
{
    _cox_cleanup_(cox_checkpoint_freep) struct cox_checkpoint *checkpoint = NULL;
    const struct cox_weights_layout layout = cox_weights_share_layout(config, share);
    const struct pieces vocabulary = {
        .rows = config->vocab_size,
        .columns = config->hidden_size,
        .piece_rows = layout.vocab_slice,
        .piece_columns = config->hidden_size,
        .first = layout.slice_first,
        .count = layout.slice_count,
        .stride = layout.vocab_stride,
    };
    int r;

    r = cox_checkpoint_new(directory, &checkpoint, err);
    if (!r)
        r = check_names(checkpoint, config, directory, err);
    if (r)
        return r;
    /* Layers first, so that a configuration of another checkpoint fails before much was read. */
    for (uint32_t layer = 0; layer < config->layer_count; layer++) {
        if (progress && progress(context, layer, config->layer_count))
            return cox_fail(err, COX_ABORTED, "%s: loading was cancelled", directory);
        r = read_layer(checkpoint, config, &layout, layer, memory, err);
        if (r)
            return r;
    }
    r = read_norm(checkpoint, "model.norm.weight", config->hidden_size, memory + layout.output_norm,
                  err);
    if (r)
        return r;
    r = read_pieces(checkpoint, "model.embed_tokens.weight", &vocabulary, memory + layout.embedding,
                    err);
    if (r)
        return r;
    if (config->tied_embeddings)
        return cox_checkpoint_has(checkpoint, "lm_head.weight")
                   ? check_tied(checkpoint, "lm_head.weight", &vocabulary,
                                memory + layout.embedding, err)
                   : 0;
    return read_pieces(checkpoint, "lm_head.weight", &vocabulary, memory + layout.output, err);
}
