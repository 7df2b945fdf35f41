#include "forward.h"
#include "attention.h"
#include "tile.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "channel/base/idioms.h"

/* One token row of a pass. */
struct token_row {
    /* in the batch */
    uint32_t row;
    uint32_t position;
    uint32_t token;
    /* NULL: none */
    const struct cox_adapter *adapter;
    /* index among the rows of the pass whose tokens are in the same slice */
    uint32_t place;
    /* the last one of its batch row, whose logits are wanted */
    bool last;
};

/* Rows of a pass with the same adapter. */
struct adapted {
    const struct cox_adapter *adapter;
    /* index in adapted_rows */
    uint32_t first;
    uint32_t count;
};

struct cox_forward {
    struct cox_model_config config;
    struct cox_weights_layout layout;
    const float *weights;
    struct cox_share share;
    /* of the model */
    uint32_t slice_count;
    struct cox_slices own;
    struct cox_kv_heads kv_heads;
    /* token rows of a pass, whole tiles */
    uint32_t row_count_max;
    /* head_count * head_dim */
    size_t head_width;
    /* part of it in one slice */
    size_t head_slice;
    /* feed-forward columns including padding */
    size_t column_width;
    size_t kv_width;
    /* Scratch. [row] stands for the token rows of a pass, rounded up to whole tiles. */
    struct token_row *tokens;
    /* the one allocation that the pointers below point into */
    float *memory;
    /* [row][hidden]: the residual stream */
    float *hidden;
    /* [row][hidden] */
    float *normed;
    /* [row][head_width] */
    float *query;
    /* [row][kv_width] */
    float *key;
    /* [row][kv_width] */
    float *value;
    /* [row][head_width] */
    float *attended;
    /* [row][column_width] */
    float *gate;
    /* [row][column_width] */
    float *up;
    /* [slice][row][hidden] */
    float *parts;
    /* [head_dim / 2] */
    float *frequencies;
    /* [row][head_dim / 2] */
    float *cosines;
    /* [row][head_dim / 2] */
    float *sines;
    /* [position_count_max] */
    float *scores;
    /* [COX_TILE_ROWS][hidden]: rows whose logits are wanted */
    float *head;
    /* [slice][COX_TILE_ROWS][vocab_slice] */
    float *sliced;
    /* [vocab_padded] */
    float *logits;
    /* [COX_TILE_ROWS][hidden or head_width] */
    float *adapter_input;
    /* [COX_TILE_ROWS][COX_ADAPTER_RANK_MAX] */
    float *adapter_low;
    /* [COX_TILE_ROWS][max(hidden, head slice, head_dim)] */
    float *adapter_output;
    struct adapted *adapted;
    /* token rows, sorted by adapter */
    uint32_t *adapted_rows;
    struct cox_adapter_source adapters;
    /* The running pass. */
    uint32_t token_count;
    uint32_t tile_count;
    /* adapters of the pass */
    uint32_t adapted_count;
};

/* Progress through the batch. */
struct cursor {
    uint32_t row;
    /* tokens of that row in earlier passes */
    uint32_t done;
};

static uint32_t slice_end(const struct cox_forward *forward)
{
    return forward->own.first + forward->own.count;
}

static bool owns_slice(const struct cox_forward *forward, uint32_t slice)
{
    return slice >= forward->own.first && slice < slice_end(forward);
}

static const float *layer_tensor(const struct cox_forward *forward, uint32_t layer, uint64_t offset)
{
    return forward->weights + forward->layout.layers + layer * forward->layout.layer_stride +
           offset;
}

/* Address of a slice of a tensor in the block, which may contain more slices than this rank's. */
static const float *slice_of(const struct cox_forward *forward, const float *tensor,
                             uint64_t stride, uint32_t slice)
{
    return tensor + (slice - forward->layout.slice_first) * stride;
}

static const float *kv_head_of(const struct cox_forward *forward, const float *tensor,
                               uint32_t head)
{
    return tensor + (head - forward->layout.kv_heads.first) * forward->layout.kv_stride;
}

static struct cox_matrix matrix_of(const float *piece, size_t out, size_t in)
{
    return (struct cox_matrix){piece, in, out, in};
}

/* Multiplies all tiles of the pass. The matrix stays in the processor's cache from tile to tile. */
static void multiply_tiles(const struct cox_forward *forward, struct cox_matrix matrix,
                           const float *input, size_t input_leading, float *output,
                           size_t output_leading)
{
    for (size_t tile = 0; tile < forward->tile_count; tile++)
        cox_tile_multiply(&matrix, input + tile * COX_TILE_ROWS * input_leading, input_leading,
                          output + tile * COX_TILE_ROWS * output_leading, output_leading);
}

static void norm_tiles(const struct cox_forward *forward, const float *gain)
{
    const size_t stride = (size_t)COX_TILE_ROWS * forward->config.hidden_size;

    for (size_t tile = 0; tile < forward->tile_count; tile++)
        cox_tile_rms_norm(forward->hidden + tile * stride, gain, forward->config.rms_norm_eps,
                          forward->config.hidden_size, forward->normed + tile * stride);
}

static int gather_slices(const struct cox_forward *forward, float *slices, size_t stride,
                         size_t slice_length, const float **ret_slices, struct cox_error *err)
{
    if (forward->share.gather)
        return forward->share.gather(forward->share.context, slices, stride, slice_length,
                                     ret_slices, err);
    for (size_t slice = 0; slice < forward->slice_count; slice++)
        ret_slices[slice] = slices + slice * stride;
    return 0;
}

/* ---- adapters ---- */

/* Groups the rows of the pass by adapter. A search per row suffices, since adapters are few. */
static void gather_adapted(struct cox_forward *forward)
{
    uint32_t done = 0;

    forward->adapted_count = 0;
    for (uint32_t i = 0; i < forward->token_count; i++) {
        const struct cox_adapter *adapter = forward->tokens[i].adapter;
        struct adapted *adapted = &forward->adapted[forward->adapted_count];
        bool known = !adapter;

        for (uint32_t k = 0; !known && k < forward->adapted_count; k++)
            known = forward->adapted[k].adapter == adapter;
        if (known)
            continue;
        *adapted = (struct adapted){adapter, done, 0};
        forward->adapted_count++;
        for (uint32_t row = i; row < forward->token_count; row++)
            if (forward->tokens[row].adapter == adapter)
                forward->adapted_rows[done++] = row;
        adapted->count = done - adapted->first;
    }
}

/* Copies up to one tile of rows to adapter_input, padded with zeros. Returns the number of rows. */
static uint32_t take_tile(struct cox_forward *forward, const struct adapted *adapted, uint32_t from,
                          const float *input, size_t width)
{
    const uint32_t left = adapted->count - from;
    const uint32_t count = left < COX_TILE_ROWS ? left : COX_TILE_ROWS;
    const uint32_t *rows = forward->adapted_rows + adapted->first + from;

    for (uint32_t i = 0; i < count; i++)
        memcpy(forward->adapter_input + i * width, input + rows[i] * width, width * sizeof(float));
    memset(forward->adapter_input + count * width, 0,
           (COX_TILE_ROWS - count) * width * sizeof(float));
    return count;
}

/* low = A * the columns of adapter_input from `column` on. */
static void multiply_a(struct cox_forward *forward, const struct cox_adapter *adapter,
                       const float *a, size_t column, size_t in, size_t width)
{
    const struct cox_matrix matrix = matrix_of(a, adapter->rank, in);

    cox_tile_multiply(&matrix, forward->adapter_input + column, width, forward->adapter_low,
                      adapter->rank);
}

/* Adds scale * B * low to the columns of output from `column` on, in the rows that the tile was
 * copied from. */
static void add_b(struct cox_forward *forward, const struct cox_adapter *adapter, const float *b,
                  size_t out, const uint32_t *rows, uint32_t count, float *output, size_t column,
                  size_t width)
{
    const struct cox_matrix matrix = matrix_of(b, out, adapter->rank);
    const float scale = adapter->scale;

    cox_tile_multiply(&matrix, forward->adapter_low, adapter->rank, forward->adapter_output, out);
    for (uint32_t row = 0; row < count; row++) {
        float *to = output + rows[row] * width + column;
        const float *from = forward->adapter_output + row * out;

        for (size_t i = 0; i < out; i++)
            to[i] += scale * from[i];
    }
}

/* Adapts query, key and value of a tile of rows; adapter_input has the normed rows. */
static void adapt_tile(struct cox_forward *forward, const struct cox_adapter *adapter,
                       uint32_t layer, const uint32_t *rows, uint32_t count)
{
    static const enum cox_projection projections[] = {COX_PROJECTION_KEY, COX_PROJECTION_VALUE};
    float *const outputs[] = {forward->key, forward->value};
    const size_t hidden = forward->config.hidden_size, head_dim = forward->config.head_dim;
    const size_t piece = forward->head_slice;
    const struct cox_kv_heads kv = forward->kv_heads;

    if (adapter->has[COX_PROJECTION_QUERY]) {
        multiply_a(forward, adapter, cox_adapter_a(adapter, layer, COX_PROJECTION_QUERY, 0), 0,
                   hidden, hidden);
        for (uint32_t slice = forward->own.first; slice < slice_end(forward); slice++)
            add_b(forward, adapter,
                  cox_adapter_b(adapter, layer, COX_PROJECTION_QUERY, slice - adapter->slice_first),
                  piece, rows, count, forward->query, slice * piece, forward->head_width);
    }
    for (size_t p = 0; p < 2; p++) {
        if (!adapter->has[projections[p]])
            continue;
        multiply_a(forward, adapter, cox_adapter_a(adapter, layer, projections[p], 0), 0, hidden,
                   hidden);
        for (uint32_t head = kv.first; head < kv.first + kv.count; head++)
            add_b(forward, adapter,
                  cox_adapter_b(adapter, layer, projections[p], head - adapter->kv_head_first),
                  head_dim, rows, count, outputs[p], head * head_dim, forward->kv_width);
    }
}

static void adapt_projections(struct cox_forward *forward, uint32_t layer)
{
    for (uint32_t g = 0; g < forward->adapted_count; g++) {
        const struct adapted *adapted = &forward->adapted[g];
        uint32_t count;

        for (uint32_t from = 0; from < adapted->count; from += count) {
            count = take_tile(forward, adapted, from, forward->normed, forward->config.hidden_size);
            adapt_tile(forward, adapted->adapter, layer,
                       forward->adapted_rows + adapted->first + from, count);
        }
    }
}

/* Adapts the slices' parts of the attention output, before they are summed. */
static void adapt_output(struct cox_forward *forward, uint32_t layer)
{
    const size_t hidden = forward->config.hidden_size, width = forward->head_width;
    const size_t length = (size_t)forward->tile_count * COX_TILE_ROWS * hidden;
    const size_t piece = width / forward->slice_count;

    for (uint32_t g = 0; g < forward->adapted_count; g++) {
        const struct adapted *adapted = &forward->adapted[g];
        const struct cox_adapter *adapter = adapted->adapter;
        uint32_t count;

        if (!adapter->has[COX_PROJECTION_OUTPUT])
            continue;
        for (uint32_t from = 0; from < adapted->count; from += count) {
            count = take_tile(forward, adapted, from, forward->attended, width);
            for (uint32_t slice = forward->own.first; slice < slice_end(forward); slice++) {
                multiply_a(forward, adapter,
                           cox_adapter_a(adapter, layer, COX_PROJECTION_OUTPUT,
                                         slice - adapter->slice_first),
                           slice * piece, piece, width);
                add_b(forward, adapter, cox_adapter_b(adapter, layer, COX_PROJECTION_OUTPUT, 0),
                      hidden, forward->adapted_rows + adapted->first + from, count,
                      forward->parts + slice * length, 0, hidden);
            }
        }
    }
}

/* ---- layers ---- */

/* Weights * input, where the columns of the weights are divided into slices: this rank's parts. */
static void multiply_row_parallel(struct cox_forward *forward, const float *tensor, uint64_t stride,
                                  const float *input, size_t width)
{
    const size_t hidden = forward->config.hidden_size;
    const size_t length = (size_t)forward->tile_count * COX_TILE_ROWS * hidden;
    const size_t piece = width / forward->slice_count;

    for (uint32_t slice = forward->own.first; slice < slice_end(forward); slice++)
        multiply_tiles(forward, matrix_of(slice_of(forward, tensor, stride, slice), hidden, piece),
                       input + slice * piece, width, forward->parts + slice * length, hidden);
}

/* In lanes, so that compilers vectorise it. An exponent of all ones is an infinity or a NaN. */
static bool is_finite(const float *numbers, size_t count)
{
    enum { LANES = 16 };
    const uint32_t beyond = UINT32_C(0x7f800000);
    uint32_t most[LANES] = {0}, lanes[LANES];
    for (size_t i = 0; i + LANES <= count; i += LANES) {
        memcpy(lanes, numbers + i, sizeof lanes);
        for (int lane = 0; lane < LANES; lane++) {
            uint32_t magnitude = lanes[lane] & (beyond | UINT32_C(0x7fffff));
            most[lane] = magnitude > most[lane] ? magnitude : most[lane];
        }
    }
    for (int lane = 0; lane < LANES; lane++)
        if (most[lane] >= beyond)
            return false;
    for (size_t i = count - count % LANES; i < count; i++)
        if (!isfinite(numbers[i]))
            return false;
    return true;
}

/* Checked before a rank computes with the slices and passes on the result under its own name. */
static int check_gathered(const struct cox_forward *forward, const float *sum, size_t count,
                          const float *const *slices, size_t slice_length, struct cox_error *err)
{
    if (!forward->share.blame || is_finite(sum, count))
        return 0;
    return forward->share.blame(forward->share.context, slices, slice_length, err);
}

/* Adds the parts of all ranks, read in place, to the residual stream. Padding rows stay zero. */
static int add_row_parallel(struct cox_forward *forward, struct cox_error *err)
{
    const size_t hidden = forward->config.hidden_size;
    const size_t stride = (size_t)forward->tile_count * COX_TILE_ROWS * hidden;
    const size_t length = forward->token_count * hidden;
    const float *parts[COX_SLICE_COUNT_MAX];
    int r = gather_slices(forward, forward->parts, stride, length, parts, err);
    if (r)
        return r;
    cox_tile_add_parts(forward->hidden, parts, forward->slice_count, length);
    return check_gathered(forward, forward->hidden, length, parts, length, err);
}

static void project(struct cox_forward *forward, uint32_t layer)
{
    const struct cox_weights_layout *layout = &forward->layout;
    const size_t hidden = forward->config.hidden_size, head_dim = forward->config.head_dim;
    const size_t piece = forward->head_slice;
    const float *query = layer_tensor(forward, layer, layout->query);
    const float *key = layer_tensor(forward, layer, layout->key);
    const float *value = layer_tensor(forward, layer, layout->value);
    const struct cox_kv_heads kv = forward->kv_heads;

    for (uint32_t slice = forward->own.first; slice < slice_end(forward); slice++)
        multiply_tiles(
            forward, matrix_of(slice_of(forward, query, layout->head_stride, slice), piece, hidden),
            forward->normed, hidden, forward->query + slice * piece, forward->head_width);
    /* By KV head and not by slice: two ranks whose slices share a KV head both compute it, with the
     * same bits. */
    for (uint32_t head = kv.first; head < kv.first + kv.count; head++) {
        multiply_tiles(forward, matrix_of(kv_head_of(forward, key, head), head_dim, hidden),
                       forward->normed, hidden, forward->key + head * head_dim, forward->kv_width);
        multiply_tiles(forward, matrix_of(kv_head_of(forward, value, head), head_dim, hidden),
                       forward->normed, hidden, forward->value + head * head_dim,
                       forward->kv_width);
    }
}

static struct cox_attention_place place_of(const struct cox_forward *forward,
                                           struct cox_cache *cache, const struct cox_batch *batch,
                                           uint32_t token, uint32_t layer, uint32_t kv_head)
{
    return (struct cox_attention_place){
        .cache = cache,
        .table = &batch->rows[forward->tokens[token].row].tables[0],
        .layer = layer,
        .kv_head = kv_head - forward->kv_heads.first,
    };
}

/* Stores the keys and values of the whole pass before attention: a token attends to earlier ones of
 * its own pass. */
static void store_keys(struct cox_forward *forward, struct cox_cache *cache,
                       const struct cox_batch *batch, uint32_t layer)
{
    const uint32_t head_dim = forward->config.head_dim;
    const struct cox_kv_heads kv = forward->kv_heads;

    for (uint32_t i = 0; i < forward->token_count; i++)
        for (uint32_t head = kv.first; head < kv.first + kv.count; head++) {
            struct cox_attention_place place = place_of(forward, cache, batch, i, layer, head);
            size_t offset = i * forward->kv_width + (size_t)head * head_dim;

            cox_rotary_turn(forward->key + offset, head_dim,
                            forward->cosines + (size_t)i * (head_dim / 2),
                            forward->sines + (size_t)i * (head_dim / 2));
            cox_attention_store(&place, forward->tokens[i].position, forward->key + offset,
                                forward->value + offset);
        }
}

static void attend(struct cox_forward *forward, struct cox_cache *cache,
                   const struct cox_batch *batch, uint32_t layer)
{
    const uint32_t head_dim = forward->config.head_dim;
    const uint32_t slice_heads = forward->config.head_count / forward->slice_count;
    const uint32_t group = forward->config.head_count / forward->config.kv_head_count;
    const size_t padding = (size_t)forward->tile_count * COX_TILE_ROWS - forward->token_count;

    for (uint32_t i = 0; i < forward->token_count; i++)
        for (uint32_t head = forward->own.first * slice_heads;
             head < slice_end(forward) * slice_heads; head++) {
            struct cox_attention_place place =
                place_of(forward, cache, batch, i, layer, head / group);
            size_t offset = i * forward->head_width + (size_t)head * head_dim;

            cox_rotary_turn(forward->query + offset, head_dim,
                            forward->cosines + (size_t)i * (head_dim / 2),
                            forward->sines + (size_t)i * (head_dim / 2));
            cox_attention(&place, forward->tokens[i].position, forward->query + offset,
                          forward->scores, forward->attended + offset);
        }
    memset(forward->attended + forward->token_count * forward->head_width, 0,
           padding * forward->head_width * sizeof(float));
}

static int run_attention(struct cox_forward *forward, struct cox_cache *cache,
                         const struct cox_batch *batch, uint32_t layer, struct cox_error *err)
{
    norm_tiles(forward, layer_tensor(forward, layer, forward->layout.attention_norm));
    project(forward, layer);
    adapt_projections(forward, layer);
    store_keys(forward, cache, batch, layer);
    attend(forward, cache, batch, layer);
    multiply_row_parallel(forward, layer_tensor(forward, layer, forward->layout.attention_output),
                          forward->layout.head_stride, forward->attended, forward->head_width);
    adapt_output(forward, layer);
    return add_row_parallel(forward, err);
}

static int run_feed_forward(struct cox_forward *forward, uint32_t layer, struct cox_error *err)
{
    const uint64_t stride = forward->layout.column_stride;
    const float *gate = layer_tensor(forward, layer, forward->layout.gate);
    const float *up = layer_tensor(forward, layer, forward->layout.up);
    const size_t hidden = forward->config.hidden_size;
    const size_t width = forward->column_width;
    const size_t piece = forward->layout.column_slice;

    norm_tiles(forward, layer_tensor(forward, layer, forward->layout.feed_forward_norm));
    for (uint32_t slice = forward->own.first; slice < slice_end(forward); slice++) {
        multiply_tiles(forward, matrix_of(slice_of(forward, gate, stride, slice), piece, hidden),
                       forward->normed, hidden, forward->gate + slice * piece, width);
        multiply_tiles(forward, matrix_of(slice_of(forward, up, stride, slice), piece, hidden),
                       forward->normed, hidden, forward->up + slice * piece, width);
        for (size_t tile = 0; tile < forward->tile_count; tile++) {
            size_t offset = tile * COX_TILE_ROWS * width + slice * piece;
            cox_tile_silu_multiply(forward->gate + offset, forward->up + offset, piece, width);
        }
    }
    multiply_row_parallel(forward, layer_tensor(forward, layer, forward->layout.down), stride,
                          forward->gate, width);
    return add_row_parallel(forward, err);
}

/* Fills the next pass with token rows. */
static void fill_pass(struct cox_forward *forward, const struct cox_batch *batch, bool all_rows,
                      struct cursor *cursor)
{
    const uint32_t half = forward->config.head_dim / 2;
    const struct cox_adapter *adapter = NULL;
    const char *lora_id = NULL; /* of `adapter` */
    uint32_t count = 0;

    while (count < forward->row_count_max && cursor->row < batch->row_count) {
        const struct cox_batch_row *row = &batch->rows[cursor->row];
        uint32_t position = row->position + cursor->done++;
        bool last = cursor->done == row->token_count;

        if (row->lora_id != lora_id) {
            lora_id = row->lora_id;
            adapter = lora_id ? forward->adapters.find(forward->adapters.context, lora_id) : NULL;
        }
        cox_rotary_angles(forward->frequencies, half, position,
                          forward->cosines + (size_t)count * half,
                          forward->sines + (size_t)count * half);
        forward->tokens[count++] = (struct token_row){
            .row = cursor->row,
            .position = position,
            .token = (uint32_t)row->tokens[position],
            .adapter = adapter,
            .last = last && (all_rows || row->emit),
        };
        if (last)
            *cursor = (struct cursor){cursor->row + 1, 0};
    }
    forward->token_count = count;
    forward->tile_count = (count + COX_TILE_ROWS - 1) / COX_TILE_ROWS;
    gather_adapted(forward);
}

/* Starts the residual stream with the embeddings of the pass, and pads the last tile with zeros.
 * All slices have the length of the one with the most tokens. All ranks know all tokens, so they
 * agree on it. Bytes behind a slice's own rows are undefined and never read. */
static int embed(struct cox_forward *forward, struct cox_error *err)
{
    const struct cox_weights_layout *layout = &forward->layout;
    const size_t hidden = forward->config.hidden_size, count = forward->token_count;
    const float *embedding = forward->weights + layout->embedding;
    uint32_t places[COX_SLICE_COUNT_MAX] = {0}, most = 0;
    const float *slices[COX_SLICE_COUNT_MAX];
    int r;

    for (uint32_t i = 0; i < count; i++) {
        struct token_row *row = &forward->tokens[i];
        uint32_t *taken = &places[row->token / layout->vocab_slice];

        row->place = (*taken)++;
        most = *taken > most ? *taken : most;
    }
    for (uint32_t i = 0; i < count; i++) {
        const struct token_row *row = &forward->tokens[i];
        const uint32_t slice = row->token / layout->vocab_slice;
        const uint32_t index = row->token % layout->vocab_slice;

        if (owns_slice(forward, slice))
            memcpy(forward->parts + ((size_t)slice * most + row->place) * hidden,
                   slice_of(forward, embedding, layout->vocab_stride, slice) + index * hidden,
                   hidden * sizeof(float));
    }
    r = gather_slices(forward, forward->parts, most * hidden, most * hidden, slices, err);
    if (r)
        return r;
    for (uint32_t i = 0; i < count; i++) {
        const struct token_row *row = &forward->tokens[i];
        const size_t slice = row->token / layout->vocab_slice;

        memcpy(forward->hidden + i * hidden, slices[slice] + row->place * hidden,
               hidden * sizeof(float));
    }
    memset(forward->hidden + count * hidden, 0,
           ((size_t)forward->tile_count * COX_TILE_ROWS - count) * hidden * sizeof(float));
    return check_gathered(forward, forward->hidden, count * hidden, slices, most * hidden, err);
}

/* The output layer for up to one tile of rows in head; rows[i] is the batch row of the i-th. */
static int run_output(struct cox_forward *forward, const uint32_t *rows, uint32_t count,
                      cox_logits_fn fn, void *context, struct cox_error *err)
{
    const struct cox_weights_layout *layout = &forward->layout;
    const size_t hidden = forward->config.hidden_size, width = layout->vocab_slice;
    const size_t length = COX_TILE_ROWS * width;
    const float *output = forward->weights + layout->output;
    const float *slices[COX_SLICE_COUNT_MAX];
    int r;

    memset(forward->head + count * hidden, 0, (COX_TILE_ROWS - count) * hidden * sizeof(float));
    cox_tile_rms_norm(forward->head, forward->weights + layout->output_norm,
                      forward->config.rms_norm_eps, hidden, forward->normed);
    for (uint32_t slice = forward->own.first; slice < slice_end(forward); slice++) {
        struct cox_matrix matrix =
            matrix_of(slice_of(forward, output, layout->vocab_stride, slice), width, hidden);

        cox_tile_multiply(&matrix, forward->normed, hidden, forward->sliced + slice * length,
                          width);
    }
    r = gather_slices(forward, forward->sliced, length, count * width, slices, err);
    for (uint32_t i = 0; !r && i < count; i++) {
        for (size_t slice = 0; slice < forward->slice_count; slice++)
            memcpy(forward->logits + slice * width, slices[slice] + i * width,
                   width * sizeof(float));
        r = check_gathered(forward, forward->logits, forward->slice_count * width, slices,
                           count * width, err);
        if (r == 0)
            r = fn(context, rows[i], forward->logits);
    }
    return r;
}

/* Collects the rows of the pass whose logits are wanted, a tile at a time. */
static int finish_pass(struct cox_forward *forward, cox_logits_fn fn, void *context,
                       struct cox_error *err)
{
    const size_t hidden = forward->config.hidden_size;
    uint32_t rows[COX_TILE_ROWS];
    uint32_t count = 0;
    int r = 0;

    for (uint32_t i = 0; !r && i < forward->token_count; i++) {
        if (!forward->tokens[i].last)
            continue;
        memcpy(forward->head + count * hidden, forward->hidden + i * hidden,
               hidden * sizeof(float));
        rows[count++] = forward->tokens[i].row;
        if (count == COX_TILE_ROWS) {
            r = run_output(forward, rows, count, fn, context, err);
            count = 0;
        }
    }
    if (!r && count)
        r = run_output(forward, rows, count, fn, context, err);
    return r;
}

int cox_forward_run(struct cox_forward *forward, struct cox_cache *cache,
                    const struct cox_batch *batch, bool all_rows, cox_logits_fn fn, void *context,
                    struct cox_error *err)
{
    struct cursor cursor = {0, 0};
    int r;

    while (cursor.row < batch->row_count) {
        fill_pass(forward, batch, all_rows, &cursor);
        r = embed(forward, err);
        if (r)
            return cox_fail(err, r, "embedding: %s", cox_status_text(r));
        for (uint32_t layer = 0; layer < forward->config.layer_count; layer++) {
            if (cox_batch_cancelled(batch))
                return cox_fail(err, COX_ABORTED, "the step was cancelled before layer %u", layer);
            r = run_attention(forward, cache, batch, layer, err);
            if (!r)
                r = run_feed_forward(forward, layer, err);
            if (r)
                return cox_fail(err, r, "layer %u: %s", layer, cox_status_text(r));
        }
        r = finish_pass(forward, fn, context, err);
        if (r)
            return cox_fail(err, r, "output layer: %s", cox_status_text(r));
    }
    return 0;
}

size_t cox_forward_slice_length_max(const struct cox_forward *forward)
{
    const size_t hidden = (size_t)forward->row_count_max * forward->config.hidden_size;
    const size_t vocabulary = (size_t)COX_TILE_ROWS * forward->layout.vocab_slice;

    return hidden > vocabulary ? hidden : vocabulary;
}

static size_t longest(size_t a, size_t b, size_t c)
{
    const size_t most = a > b ? a : b;

    return most > c ? most : c;
}

static int allocate_scratch(struct cox_forward *forward, struct cox_error *err)
{
    const struct cox_model_config *config = &forward->config;
    const size_t rows = forward->row_count_max, hidden = config->hidden_size;
    const struct {
        float **pointer;
        size_t length;
    } buffers[] = {
        {&forward->hidden, rows * hidden},
        {&forward->normed, rows * hidden},
        {&forward->query, rows * forward->head_width},
        {&forward->key, rows * forward->kv_width},
        {&forward->value, rows * forward->kv_width},
        {&forward->attended, rows * forward->head_width},
        {&forward->gate, rows * forward->column_width},
        {&forward->up, rows * forward->column_width},
        {&forward->parts, rows * hidden * forward->slice_count},
        {&forward->frequencies, config->head_dim / 2},
        {&forward->cosines, rows * (config->head_dim / 2)},
        {&forward->sines, rows * (config->head_dim / 2)},
        {&forward->scores, config->position_count_max},
        {&forward->head, COX_TILE_ROWS * hidden},
        {&forward->sliced, (size_t)COX_TILE_ROWS * forward->layout.vocab_padded},
        {&forward->logits, forward->layout.vocab_padded},
        {&forward->adapter_input, COX_TILE_ROWS * longest(hidden, forward->head_width, 0)},
        {&forward->adapter_low, (size_t)COX_TILE_ROWS * COX_ADAPTER_RANK_MAX},
        {&forward->adapter_output,
         COX_TILE_ROWS * longest(hidden, forward->head_slice, config->head_dim)},
    };
    const size_t step = COX_WEIGHTS_ALIGNMENT / sizeof(float);
    size_t length = 0, used = 0;

    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++)
        length += (buffers[i].length + step - 1) / step * step;
    forward->tokens = calloc(rows, sizeof(forward->tokens[0]));
    forward->memory = aligned_alloc(COX_WEIGHTS_ALIGNMENT, length * sizeof(float));
    forward->adapted = calloc(rows, sizeof(forward->adapted[0]));
    forward->adapted_rows = calloc(rows, sizeof(forward->adapted_rows[0]));
    if (!forward->tokens || !forward->memory || !forward->adapted || !forward->adapted_rows)
        return cox_fail(err, COX_NO_SPACE,
                        "no memory for %zu bytes of scratch; use fewer tiles than %u",
                        length * sizeof(float), forward->row_count_max / COX_TILE_ROWS);
    memset(forward->memory, 0, length * sizeof(float));
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++) {
        *buffers[i].pointer = forward->memory + used;
        used += (buffers[i].length + step - 1) / step * step;
    }
    return 0;
}

int cox_forward_new(const struct cox_model_config *config, const struct cox_weights_layout *layout,
                    const float *weights, const struct cox_share *share, uint32_t tile_count_max,
                    const struct cox_adapter_source *adapters, struct cox_forward **ret_forward,
                    struct cox_error *err)
{
    _cox_cleanup_(cox_forward_freep) struct cox_forward *forward = calloc(1, sizeof(*forward));
    int r;

    if (!forward)
        return cox_fail(err, COX_NO_SPACE, "no memory for the model");
    if (!tile_count_max)
        tile_count_max = COX_TILE_COUNT_DEFAULT;
    forward->config = *config;
    forward->layout = *layout;
    forward->weights = weights;
    forward->share = *share;
    forward->adapters = *adapters;
    r = cox_share_check(config, share, err);
    if (r)
        return r;
    if (tile_count_max > COX_TILE_COUNT_MAX)
        return cox_fail(err, COX_INVALID, "tile_count_max is %u; allowed: 1 to %u", tile_count_max,
                        COX_TILE_COUNT_MAX);
    if (share->rank_count > 1 && !share->gather)
        return cox_fail(err, COX_INVALID, "rank %u of %u, and no gather function", share->rank,
                        share->rank_count);
    forward->slice_count = cox_slice_count(config);
    forward->own = cox_share_slices(config, share);
    forward->kv_heads = cox_share_kv_heads(config, &forward->share);
    forward->row_count_max = tile_count_max * COX_TILE_ROWS;
    forward->head_width = (size_t)config->head_count * config->head_dim;
    forward->head_slice = forward->head_width / forward->slice_count;
    forward->column_width = (size_t)forward->layout.column_slice * forward->slice_count;
    forward->kv_width = (size_t)config->kv_head_count * config->head_dim;
    r = allocate_scratch(forward, err);
    if (r)
        return r;
    cox_rotary_frequencies(config, forward->frequencies);
    *ret_forward = cox_steal_ptr(&forward);
    return 0;
}

struct cox_forward *cox_forward_free(struct cox_forward *forward)
{
    if (!forward)
        return NULL;
    free(forward->tokens);
    free(forward->adapted);
    free(forward->adapted_rows);
    free(forward->memory);
    free(forward);
    return NULL;
}
