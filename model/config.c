#include "model/config.h"
#include "model/file.h"

#include <string.h>

/* The largest config.json in the wild is below 100 KiB. */
#define CONFIG_SIZE_MAX ((size_t)1 << 20)

#define TOKEN_NONE (-1)
#define NUMBER_REQUIRED INT64_MIN

/* The object being read, and where complaints go. */
struct reader {
    const json_t *root;
    const char *path;
    struct cox_error *err;
};

/* A key that is absent or null; Hugging Face writes both for "take the default". */
static bool is_absent(const json_t *value)
{
    return !value || json_is_null(value);
}

/* The value as JSON text for an error message, cut to size. */
static const char *value_text(const json_t *value, char *text, size_t size)
{
    size_t n = json_dumpb(value, text, size - 1, JSON_ENCODE_ANY | JSON_COMPACT);

    if (n < size)
        text[n] = '\0';
    if (n == 0 || n >= size)
        memcpy(text, "a long value", sizeof("a long value"));
    return text;
}

static int check_integer(const struct reader *reader, const char *key, const json_t *value,
                         int64_t min, int64_t max, int64_t *ret_number)
{
    char text[128];

    if (!json_is_integer(value) || json_integer_value(value) < min ||
        json_integer_value(value) > max)
        return cox_fail(reader->err, COX_INVALID,
                        "%s: %s is %s; allowed: an integer from %lld to %lld", reader->path, key,
                        value_text(value, text, sizeof(text)), (long long)min, (long long)max);
    *ret_number = json_integer_value(value);
    return 0;
}

/* An integer in [min, max]; fallback where the key is absent, or NUMBER_REQUIRED. min is never
 * negative. */
static int read_integer(const struct reader *reader, const char *key, int64_t min, int64_t max,
                        int64_t fallback, uint32_t *ret_number)
{
    const json_t *value = json_object_get(reader->root, key);
    int64_t number = fallback;
    int r;

    if (is_absent(value) && fallback == NUMBER_REQUIRED)
        return cox_fail(reader->err, COX_INVALID,
                        "%s: %s is missing; needed: an integer from %lld to %lld", reader->path,
                        key, (long long)min, (long long)max);
    if (!is_absent(value)) {
        r = check_integer(reader, key, value, min, max, &number);
        if (r)
            return r;
    }
    *ret_number = (uint32_t)number;
    return 0;
}

static int read_real(const struct reader *reader, const json_t *object, const char *key, double min,
                     double max, double fallback, double *ret_number)
{
    const json_t *value = json_object_get(object, key);
    double number = json_number_value(value);
    char text[128];

    if (is_absent(value)) {
        *ret_number = fallback;
        return 0;
    }
    /* Written so that a NaN, should a parser let one through, is refused too. */
    if (!json_is_number(value) || !(number >= min && number <= max))
        return cox_fail(reader->err, COX_INVALID, "%s: %s is %s; allowed: a number from %g to %g",
                        reader->path, key, value_text(value, text, sizeof(text)), min, max);
    *ret_number = number;
    return 0;
}

static int read_bool(const struct reader *reader, const char *key, bool *ret_value)
{
    const json_t *value = json_object_get(reader->root, key);
    char text[128];

    if (!is_absent(value) && !json_is_boolean(value))
        return cox_fail(reader->err, COX_INVALID, "%s: %s is %s; allowed: true or false",
                        reader->path, key, value_text(value, text, sizeof(text)));
    *ret_value = json_is_true(value);
    return 0;
}

/* A key that has to hold one word if it is there at all. */
static int expect_word(const struct reader *reader, const char *key, const char *word)
{
    const json_t *value = json_object_get(reader->root, key);
    char text[128];

    if (!is_absent(value) && (!json_is_string(value) || strcmp(json_string_value(value), word)))
        return cox_fail(reader->err, COX_INVALID, "%s: %s is %s; this worker computes only \"%s\"",
                        reader->path, key, value_text(value, text, sizeof(text)), word);
    return 0;
}

/* A feature that this worker does not compute: absent, null or false. */
static int expect_off(const struct reader *reader, const char *key)
{
    const json_t *value = json_object_get(reader->root, key);
    char text[128];

    if (!is_absent(value) && !json_is_false(value))
        return cox_fail(reader->err, COX_INVALID,
                        "%s: %s is %s; this worker computes only models without it (null or false)",
                        reader->path, key, value_text(value, text, sizeof(text)));
    return 0;
}

/* rope_theta stands at the top, or, since transformers 5, inside rope_parameters. */
static int read_rope(const struct reader *reader, struct cox_model_config *config)
{
    const json_t *parameters = json_object_get(reader->root, "rope_parameters");
    const json_t *type = json_object_get(parameters, "rope_type");
    char text[128];
    int r;

    r = expect_off(reader, "rope_scaling");
    if (r)
        return r;
    if (is_absent(parameters))
        return read_real(reader, reader->root, "rope_theta", 1, 1e12, 10000, &config->rope_theta);
    if (!json_is_object(parameters) ||
        (!is_absent(type) && (!json_is_string(type) || strcmp(json_string_value(type), "default"))))
        return cox_fail(
            reader->err, COX_INVALID,
            "%s: rope_parameters is %s; this worker computes only rope_type \"default\"",
            reader->path, value_text(parameters, text, sizeof(text)));
    return read_real(reader, parameters, "rope_theta", 1, 1e12, 10000, &config->rope_theta);
}

static int read_sizes(const struct reader *reader, struct cox_model_config *config)
{
    int r;

    r = read_integer(reader, "hidden_size", 1, 65536, NUMBER_REQUIRED, &config->hidden_size);
    if (r)
        return r;
    r = read_integer(reader, "intermediate_size", COX_SLICE_COUNT, 1 << 20, NUMBER_REQUIRED,
                     &config->intermediate_size);
    if (r)
        return r;
    r = read_integer(reader, "num_hidden_layers", 1, 1024, NUMBER_REQUIRED, &config->layer_count);
    if (r)
        return r;
    r = read_integer(reader, "num_attention_heads", 1, 1024, NUMBER_REQUIRED, &config->head_count);
    if (r)
        return r;
    r = read_integer(reader, "num_key_value_heads", 1, 1024, config->head_count,
                     &config->kv_head_count);
    if (r)
        return r;
    /* 0 stands for "hidden_size / num_attention_heads" until check_sizes. */
    r = read_integer(reader, "head_dim", 2, 1024, 0, &config->head_dim);
    if (r)
        return r;
    r = read_integer(reader, "vocab_size", 2, 1 << 24, NUMBER_REQUIRED, &config->vocab_size);
    if (r)
        return r;
    return read_integer(reader, "max_position_embeddings", 1, 1 << 24, 2048,
                        &config->position_count_max);
}

/* What the sizes have to be to each other. */
static int check_sizes(const struct reader *reader, struct cox_model_config *config)
{
    if (config->head_count % COX_SLICE_COUNT)
        return cox_fail(
            reader->err, COX_INVALID,
            "%s: num_attention_heads is %u; this worker cuts the heads in %d slices and "
            "needs a multiple of %d",
            reader->path, config->head_count, COX_SLICE_COUNT, COX_SLICE_COUNT);
    if (config->intermediate_size % COX_SLICE_COUNT)
        return cox_fail(
            reader->err, COX_INVALID,
            "%s: intermediate_size is %u; this worker cuts the feed-forward layer in %d "
            "slices and needs a multiple of %d",
            reader->path, config->intermediate_size, COX_SLICE_COUNT, COX_SLICE_COUNT);
    if (config->head_count % config->kv_head_count)
        return cox_fail(reader->err, COX_INVALID,
                        "%s: num_key_value_heads is %u; allowed: a divisor of num_attention_heads, "
                        "which is %u",
                        reader->path, config->kv_head_count, config->head_count);
    if (config->head_dim == 0) {
        if (config->hidden_size % config->head_count)
            return cox_fail(
                reader->err, COX_INVALID,
                "%s: hidden_size is %u, not a multiple of num_attention_heads, which is "
                "%u, and there is no head_dim",
                reader->path, config->hidden_size, config->head_count);
        config->head_dim = config->hidden_size / config->head_count;
    }
    if (config->head_dim % 2 || config->head_dim > 1024)
        return cox_fail(reader->err, COX_INVALID,
                        "%s: head_dim is %u; allowed: an even number from 2 to 1024, because "
                        "rotary positions turn pairs",
                        reader->path, config->head_dim);
    return 0;
}

/* eos_token_id is one token, a list, or null; absent is the default of LlamaConfig, 2. */
static int read_eos(const struct reader *reader, struct cox_model_config *config)
{
    const json_t *value = json_object_get(reader->root, "eos_token_id");
    size_t count = json_is_array(value) ? json_array_size(value) : 1;
    int64_t token;
    int r;

    if (!value && config->vocab_size > 2) {
        config->eos_tokens[config->eos_token_count++] = 2;
        return 0;
    }
    if (is_absent(value))
        return 0;
    if (count > COX_EOS_TOKEN_COUNT_MAX)
        return cox_fail(reader->err, COX_INVALID,
                        "%s: eos_token_id lists %zu tokens; allowed: at most %d", reader->path,
                        count, COX_EOS_TOKEN_COUNT_MAX);
    for (size_t i = 0; i < count; i++) {
        r = check_integer(reader, "eos_token_id",
                          json_is_array(value) ? json_array_get(value, i) : value, 0,
                          (int64_t)config->vocab_size - 1, &token);
        if (r)
            return r;
        config->eos_tokens[config->eos_token_count++] = (int32_t)token;
    }
    return 0;
}

/* bos_token_id is one token or null; absent is the default of LlamaConfig, 1. */
static int read_bos(const struct reader *reader, struct cox_model_config *config)
{
    const json_t *value = json_object_get(reader->root, "bos_token_id");
    int64_t token = value ? TOKEN_NONE : 1;
    int r;

    if (!is_absent(value)) {
        r = check_integer(reader, "bos_token_id", value, 0, (int64_t)config->vocab_size - 1,
                          &token);
        if (r)
            return r;
    }
    config->bos_token = (int32_t)token;
    return 0;
}

static int check_kind(const struct reader *reader)
{
    static const char *const off[] = {"attention_bias", "mlp_bias", "quantization_config"};
    int r;

    if (is_absent(json_object_get(reader->root, "model_type")))
        return cox_fail(reader->err, COX_INVALID, "%s: model_type is missing; needed: \"llama\"",
                        reader->path);
    r = expect_word(reader, "model_type", "llama");
    if (r)
        return r;
    r = expect_word(reader, "hidden_act", "silu");
    for (size_t i = 0; !r && i < sizeof(off) / sizeof(off[0]); i++)
        r = expect_off(reader, off[i]);
    return r;
}

int cox_model_config_load(const char *path, struct cox_model_config *ret_config,
                          struct cox_error *err)
{
    _cox_cleanup_(cox_json_unref) json_t *root = NULL;
    struct cox_model_config config = {0};
    double eps;
    int r;

    r = cox_json_load(path, CONFIG_SIZE_MAX, &root, err);
    if (r)
        return r;

    struct reader reader = {.root = root, .path = path, .err = err};
    r = check_kind(&reader);
    if (r)
        return r;
    r = read_sizes(&reader, &config);
    if (r)
        return r;
    r = check_sizes(&reader, &config);
    if (r)
        return r;
    r = read_rope(&reader, &config);
    if (r)
        return r;
    /* Not 0: the padding rows of a tile are all zeros, and their norm would be a division by zero.
     */
    r = read_real(&reader, root, "rms_norm_eps", 1e-30, 0.1, 1e-6, &eps);
    if (r)
        return r;
    config.rms_norm_eps = (float)eps;
    r = read_bool(&reader, "tie_word_embeddings", &config.tied_embeddings);
    if (r)
        return r;
    r = read_bos(&reader, &config);
    if (r)
        return r;
    r = read_eos(&reader, &config);
    if (r)
        return r;
    *ret_config = config;
    return 0;
}
