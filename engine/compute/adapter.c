#include "adapter.h"
#include "channel/base/idioms.h"
#include "channel/base/hash.h"
#include "engine/model/digest.h"
#include "engine/model/file.h"
#include "engine/model/safetensors.h"
#include "tile.h"
#include "engine/model/weights.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CONFIG_SIZE_MAX ((size_t)1 << 20)
/* Limit of the numbers, of the scale, and of their product. Real adapters are far below it, and
 * below it no row overflows on the way to its logits. A step with a row that overflows would fail
 * for all its prompts. */
#define SIZE_OF_NUMBERS_MAX 1e6

static const char *const module_names[] = {"q_proj", "k_proj", "v_proj", "o_proj"};

/* Contents of adapter_config.json. */
struct description {
    uint32_t rank;
    float scale;
    bool has[COX_PROJECTION_COUNT];
};

/* One matrix of the file, and the part of it that the share needs. Either rows or columns are
 * divided. */
struct matrix {
    uint64_t rows, columns;
    uint64_t piece_rows, piece_columns;
    /* pieces */
    uint32_t first, count;
    /* floats from one row of a piece to the next, in memory */
    uint64_t leading;
    /* from one piece to the next */
    uint64_t stride;
};

/* ---- the configuration ---- */

static int find_module(const char *name)
{
    const char *last = strrchr(name, '.');

    for (int i = 0; i < COX_PROJECTION_COUNT; i++)
        if (!strcmp(last ? last + 1 : name, module_names[i]))
            return i;
    return -1;
}

static int read_modules(const json_t *root, const char *path, struct description *description,
                        struct cox_error *err)
{
    const json_t *modules = json_object_get(root, "target_modules");
    const json_t *value;
    size_t index;

    if (!json_is_array(modules) || json_array_size(modules) == 0)
        return cox_fail(err, COX_INVALID, "%s: target_modules is not a list of names", path);
    json_array_foreach(modules, index, value)
    {
        const char *name = json_string_value(value);
        int module = name ? find_module(name) : -1;

        if (module < 0)
            return cox_fail(
                err, COX_INVALID,
                "%s: target_modules has '%.64s'; this worker computes adapters of q_proj, k_proj, v_proj and o_proj alone",
                path, name ? name : "no name");
        description->has[module] = true;
    }
    return 0;
}

#define VALUE_TEXT_SIZE 65

/* The key must be absent, null or that word: any other value asks for something unsupported. */
static int expect_word(const json_t *root, const char *path, const char *key, const char *word,
                       struct cox_error *err)
{
    const json_t *value = json_object_get(root, key);
    const char *found = json_string_value(value);
    char text[VALUE_TEXT_SIZE];

    if (!value || json_is_null(value) || (found && strcmp(found, word) == 0))
        return 0;
    return cox_fail(err, COX_INVALID, "%s: %s is %s; expected \"%s\"", path, key,
                    cox_json_text(value, text, sizeof(text)), word);
}

static int expect_false(const json_t *root, const char *path, const char *key,
                        struct cox_error *err)
{
    const json_t *value = json_object_get(root, key);
    char text[VALUE_TEXT_SIZE];

    if (!value || json_is_null(value) || json_is_false(value))
        return 0;
    return cox_fail(err, COX_INVALID,
                    "%s: %s is %s; this worker computes only adapters without it (false)", path,
                    key, cox_json_text(value, text, sizeof(text)));
}

/* Refuses options that mean other arithmetic with the same tensors. */
static int check_kind(const json_t *root, const char *path, struct cox_error *err)
{
    static const char *const switches[] = {"use_dora", "fan_in_fan_out", "lora_bias"};
    static const char *const lists[] = {"rank_pattern", "alpha_pattern", "modules_to_save",
                                        "layers_to_transform", "layers_pattern"};
    int r = expect_word(root, path, "peft_type", "LORA", err);

    if (!r)
        r = expect_word(root, path, "bias", "none", err);
    for (size_t i = 0; !r && i < sizeof(switches) / sizeof(switches[0]); i++)
        r = expect_false(root, path, switches[i], err);
    if (r)
        return r;
    for (size_t i = 0; i < sizeof(lists) / sizeof(lists[0]); i++) {
        const json_t *value = json_object_get(root, lists[i]);

        if (value && !json_is_null(value) && json_object_size(value) == 0 &&
            json_array_size(value) == 0 && (json_is_object(value) || json_is_array(value)))
            continue;
        if (value && !json_is_null(value))
            return cox_fail(err, COX_INVALID, "%s: %s is not computed by this worker", path,
                            lists[i]);
    }
    return 0;
}

static int read_rank(const json_t *root, const char *path, struct description *description,
                     struct cox_error *err)
{
    const json_t *rank = json_object_get(root, "r");
    const json_t *alpha = json_object_get(root, "lora_alpha");
    const json_t *rslora = json_object_get(root, "use_rslora");
    double scale;

    if (!json_is_integer(rank))
        return cox_fail(err, COX_DIVERGED, "%s: r is not an integer; allowed: 1 to %u", path,
                        COX_ADAPTER_RANK_MAX);
    if (json_integer_value(rank) < 1 || json_integer_value(rank) > COX_ADAPTER_RANK_MAX)
        return cox_fail(err, COX_DIVERGED, "%s: r is %lld; allowed: 1 to %u", path,
                        (long long)json_integer_value(rank), COX_ADAPTER_RANK_MAX);
    if (!json_is_number(alpha))
        return cox_fail(err, COX_INVALID, "%s: lora_alpha is not a number", path);
    description->rank = (uint32_t)json_integer_value(rank);
    if (rslora && !json_is_null(rslora) && !json_is_boolean(rslora))
        return cox_fail(err, COX_INVALID, "%s: use_rslora is neither true nor false", path);
    scale = json_number_value(alpha) /
            (json_is_true(rslora) ? sqrt((double)description->rank) : (double)description->rank);
    /* Written so that a NaN is refused. */
    if (!(fabs(scale) <= SIZE_OF_NUMBERS_MAX))
        return cox_fail(err, COX_INVALID, "%s: lora_alpha is %g", path, json_number_value(alpha));
    description->scale = (float)scale;
    return 0;
}

static int read_description(const char *directory, struct description *description,
                            struct cox_error *err)
{
    _cox_cleanup_(cox_free_ptr) char *path = NULL;
    _cox_cleanup_(cox_json_unref) json_t *root = NULL;
    int r;

    if (asprintf(&path, "%s/adapter_config.json", directory) < 0) {
        path = NULL;
        return cox_fail(err, -ENOMEM, "no memory to load an adapter");
    }
    r = cox_json_load(path, CONFIG_SIZE_MAX, &root, err);
    if (!r)
        r = check_kind(root, path, err);
    if (!r)
        r = read_rank(root, path, description, err);
    if (!r)
        r = read_modules(root, path, description, err);
    return r;
}

/* ---- layout ---- */

/* A and B of a projection for the share. */
static void matrices_of(const struct cox_model_config *config, const struct cox_share *share,
                        enum cox_projection projection, uint32_t rank, struct matrix *a,
                        struct matrix *b)
{
    const uint64_t hidden = config->hidden_size, dim = config->head_dim;
    const uint64_t heads = config->head_count * dim, kv = config->kv_head_count * dim;
    const uint64_t piece = heads / cox_slice_count(config);
    const uint64_t padded =
        (rank + COX_ADAPTER_RANK_STEP - 1) / COX_ADAPTER_RANK_STEP * COX_ADAPTER_RANK_STEP;
    const struct cox_kv_heads own = cox_share_kv_heads(config, share);
    const struct cox_slices slices = cox_share_slices(config, share);
    const uint32_t first = slices.first, count = slices.count;

    *a = (struct matrix){rank, hidden, rank, hidden, 0, 1, hidden, 0};
    switch (projection) {
    case COX_PROJECTION_QUERY:
        *b = (struct matrix){heads, rank, piece, rank, first, count, padded, 0};
        break;
    case COX_PROJECTION_OUTPUT:
        *a = (struct matrix){rank, heads, rank, piece, first, count, piece, 0};
        *b = (struct matrix){hidden, rank, hidden, rank, 0, 1, padded, 0};
        break;
    default:
        *b = (struct matrix){kv, rank, dim, rank, own.first, own.count, padded, 0};
    }
    a->stride = cox_weights_align(padded * a->leading);
    b->stride = cox_weights_align(b->piece_rows * b->leading);
}

static void lay_out(struct cox_adapter *adapter, const struct cox_model_config *config,
                    const struct cox_share *share, const struct description *description)
{
    uint64_t length = 0;

    adapter->rank = (description->rank + COX_ADAPTER_RANK_STEP - 1) / COX_ADAPTER_RANK_STEP *
                    COX_ADAPTER_RANK_STEP;
    adapter->scale = description->scale;
    adapter->slice_first = cox_share_slices(config, share).first;
    adapter->kv_head_first = cox_share_kv_heads(config, share).first;
    for (int i = 0; i < COX_PROJECTION_COUNT; i++) {
        struct matrix a, b;

        adapter->has[i] = description->has[i];
        if (!adapter->has[i])
            continue;
        matrices_of(config, share, (enum cox_projection)i, description->rank, &a, &b);
        adapter->a[i] = length;
        adapter->a_stride[i] = a.count > 1 ? a.stride : 0;
        length += a.count * a.stride;
        adapter->b[i] = length;
        adapter->b_stride[i] = b.count > 1 ? b.stride : 0;
        length += b.count * b.stride;
    }
    adapter->layer_stride = length;
    adapter->size = config->layer_count * length * sizeof(float);
}

/* ---- the tensors ---- */

/* Checks the rank of a tensor and its other dimension, each with its own code. rank_first: the
 * tensor is an A. */
static int check_shape(const struct cox_safetensors *file, const char *name,
                       const struct matrix *matrix, bool rank_first, struct cox_error *err)
{
    uint64_t shape[COX_TENSOR_DIMENSION_COUNT_MAX];
    const uint64_t rank = rank_first ? matrix->rows : matrix->columns;
    size_t count;
    int r = cox_safetensors_shape(file, name, shape, &count, err);

    if (r)
        return r;
    if (count == 2 && shape[rank_first ? 0 : 1] != rank &&
        shape[rank_first ? 1 : 0] == (rank_first ? matrix->columns : matrix->rows))
        return cox_fail(err, COX_DIVERGED, "tensor %s has rank %llu; adapter_config.json says %llu",
                        name, (unsigned long long)shape[rank_first ? 0 : 1],
                        (unsigned long long)rank);
    return 0; /* reading it reports the rest */
}

/* memory is zero initially. *largest: the largest absolute value. */
static int read_matrix(const struct cox_safetensors *file, const char *name,
                       const struct matrix *matrix, float *memory, float *largest,
                       struct cox_error *err)
{
    const uint64_t width = matrix->piece_columns;
    _cox_cleanup_(cox_free_ptr) float *dense =
        malloc((size_t)(matrix->piece_rows * width) * sizeof(*dense));

    if (!dense)
        return cox_fail(err, COX_NO_SPACE, "no memory to read %s", name);
    for (uint32_t i = 0; i < matrix->count; i++) {
        const uint64_t index = matrix->first + i;
        const struct cox_tensor_part part = {
            .row_first = matrix->piece_rows < matrix->rows ? index * matrix->piece_rows : 0,
            .row_count = matrix->piece_rows,
            .column_first = width < matrix->columns ? index * width : 0,
            .column_count = width,
        };
        int r =
            cox_safetensors_read_part(file, name, matrix->rows, matrix->columns, &part, dense, err);

        if (r)
            return r;
        for (uint64_t n = 0; n < matrix->piece_rows * width; n++)
            if (fabsf(dense[n]) > *largest)
                *largest = fabsf(dense[n]);
        for (uint64_t row = 0; row < matrix->piece_rows; row++)
            memcpy(memory + i * matrix->stride + row * matrix->leading, dense + row * width,
                   (size_t)width * sizeof(float));
    }
    return 0;
}

static int check_numbers(const struct cox_adapter *adapter, const char *name, const float *largest,
                         struct cox_error *err)
{
    const double together = fabs((double)adapter->scale) * (double)largest[0] * (double)largest[1];

    if ((double)largest[0] <= SIZE_OF_NUMBERS_MAX && (double)largest[1] <= SIZE_OF_NUMBERS_MAX &&
        together <= SIZE_OF_NUMBERS_MAX)
        return 0;
    return cox_fail(
        err, COX_INVALID,
        "tensor %s: the numbers of A reach %g, those of B %g, and %g with the scale; allowed: up to %g",
        name, (double)largest[0], (double)largest[1], together, SIZE_OF_NUMBERS_MAX);
}

static int read_layer(struct cox_adapter *adapter, const struct cox_safetensors *file,
                      const struct cox_model_config *config, const struct cox_share *share,
                      uint32_t layer, uint32_t rank, struct cox_error *err)
{
    float *base = adapter->memory + layer * adapter->layer_stride;
    int r = 0;

    for (int i = 0; r == 0 && i < COX_PROJECTION_COUNT; i++) {
        struct matrix a, b;
        float largest[2] = {0};
        char name[2][128];

        if (!adapter->has[i])
            continue;
        for (int side = 0; side < 2; side++)
            snprintf(name[side], sizeof(name[side]),
                     "base_model.model.model.layers.%u.self_attn.%s.lora_%c.weight", layer,
                     module_names[i], 'A' + side);
        matrices_of(config, share, (enum cox_projection)i, rank, &a, &b);
        r = check_shape(file, name[0], &a, true, err);
        if (!r)
            r = check_shape(file, name[1], &b, false, err);
        if (!r)
            r = read_matrix(file, name[0], &a, base + adapter->a[i], &largest[0], err);
        if (!r)
            r = read_matrix(file, name[1], &b, base + adapter->b[i], &largest[1], err);
        if (!r)
            r = check_numbers(adapter, name[1], largest, err);
    }
    return r;
}

static int digest_of(const struct cox_safetensors *file, const struct description *description,
                     uint64_t *ret_digest, struct cox_error *err)
{
    uint64_t digest = COX_HASH_START;
    int r;

    digest = cox_hash_bytes(digest, &description->rank, sizeof(description->rank));
    digest = cox_hash_bytes(digest, &description->scale, sizeof(description->scale));
    digest = cox_hash_bytes(digest, description->has, sizeof(description->has));
    r = cox_safetensors_digest(file, &digest, err);
    if (!r)
        *ret_digest = digest ? digest : 1;
    return r;
}

static int read_tensors(struct cox_adapter *adapter, const char *directory,
                        const struct cox_model_config *config, const struct cox_share *share,
                        const struct description *description, struct cox_error *err)
{
    _cox_cleanup_(cox_safetensors_freep) struct cox_safetensors *file = NULL;
    _cox_cleanup_(cox_free_ptr) char *path = NULL;
    uint64_t before = 0;
    size_t expected = 0;
    int r;

    if (asprintf(&path, "%s/adapter_model.safetensors", directory) < 0) {
        path = NULL;
        return cox_fail(err, -ENOMEM, "no memory to load an adapter");
    }
    r = cox_safetensors_new(path, &file, err);
    if (!r)
        r = digest_of(file, description, &before, err);
    for (uint32_t layer = 0; r == 0 && layer < config->layer_count; layer++)
        r = read_layer(adapter, file, config, share, layer, description->rank, err);
    for (int i = 0; i < COX_PROJECTION_COUNT; i++)
        expected += adapter->has[i] ? 2 * (size_t)config->layer_count : 0;
    /* All expected tensors exist. More than these would be ignored silently, so that is an error.
     */
    if (r == 0 && cox_safetensors_count(file) != expected)
        r = cox_fail(err, COX_INVALID, "%s has %zu tensors; target_modules and the model imply %zu",
                     path, cox_safetensors_count(file), expected);
    if (!r)
        r = digest_of(file, description, &adapter->digest, err);
    if (!r && adapter->digest != before)
        r = cox_fail(err, COX_CORRUPT, "%s was changed while it was read", path);
    return r;
}

/* ---- constructor and destructor ---- */

int cox_adapter_load(const char *directory, const struct cox_model_config *config,
                     const struct cox_share *share, struct cox_adapter **ret_adapter,
                     struct cox_error *err)
{
    _cox_cleanup_(cox_adapter_freep) struct cox_adapter *adapter = calloc(1, sizeof(*adapter));
    struct description description = {0};
    int r;

    if (!adapter)
        return cox_fail(err, COX_NO_SPACE, "no memory to load an adapter");
    r = read_description(directory, &description, err);
    if (r)
        return r;
    lay_out(adapter, config, share, &description);
    if (adapter->size <= SIZE_MAX / 2)
        adapter->memory = aligned_alloc(COX_WEIGHTS_ALIGNMENT, (size_t)adapter->size);
    if (!adapter->memory)
        return cox_fail(err, COX_NO_SPACE, "no memory for %llu bytes of an adapter",
                        (unsigned long long)adapter->size);
    memset(adapter->memory, 0, (size_t)adapter->size);
    r = read_tensors(adapter, directory, config, share, &description, err);
    if (r)
        return r;
    *ret_adapter = cox_steal_ptr(&adapter);
    return 0;
}

struct cox_adapter *cox_adapter_free(struct cox_adapter *adapter)
{
    if (adapter) {
        free(adapter->memory);
        free(adapter);
    }
    return NULL;
}
