#include "config.h"
#include "file.h"

#include <string.h>

#include "channel/base/idioms.h"

/* The largest known config.json is below 100 KiB. */
#define CONFIG_SIZE_MAX ((size_t)1 << 20)

#define TOKEN_NONE (-1)
#define NUMBER_REQUIRED INT64_MIN

/* The object being read, and the destination of errors. */
struct reader {
    const json_t *root;
    const char *path;
    /* of its keys in error texts */
    const char *prefix;
    struct cox_error *err;
};

/* A key that is absent or null; Hugging Face writes both for the default. */
static bool is_absent(const json_t *value)
{
    return !value || json_is_null(value);
}

static int check_integer(const struct reader *reader, const char *key, const json_t *value,
                         int64_t min, int64_t max, int64_t *ret_number)
{
    char text[128];

    if (!json_is_integer(value) || json_integer_value(value) < min ||
        json_integer_value(value) > max)
        return cox_fail(reader->err, COX_INVALID,
                        "%s: %s%s is %s; allowed: an integer from %lld to %lld", reader->path,
                        reader->prefix, key, cox_json_text(value, text, sizeof(text)),
                        (long long)min, (long long)max);
    *ret_number = json_integer_value(value);
    return 0;
}

/* Reads an integer in [min, max]. If the key is absent: fallback, or an error for NUMBER_REQUIRED.
 * min is never negative. */
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

static int check_real(const struct reader *reader, const char *key, const json_t *value, double min,
                      double max, double *ret_number)
{
    double number = json_number_value(value);
    char text[128];

    if (!value)
        return cox_fail(reader->err, COX_INVALID,
                        "%s: %s%s is missing; needed: a number from %g to %g", reader->path,
                        reader->prefix, key, min, max);
    /* Written so that a NaN is refused too, in case a parser accepts one. */
    if (!json_is_number(value) || !(number >= min && number <= max))
        return cox_fail(reader->err, COX_INVALID, "%s: %s%s is %s; allowed: a number from %g to %g",
                        reader->path, reader->prefix, key, cox_json_text(value, text, sizeof(text)),
                        min, max);
    *ret_number = number;
    return 0;
}

static int read_real(const struct reader *reader, const char *key, double min, double max,
                     double fallback, double *ret_number)
{
    const json_t *value = json_object_get(reader->root, key);

    if (is_absent(value)) {
        *ret_number = fallback;
        return 0;
    }
    return check_real(reader, key, value, min, max, ret_number);
}

static int read_bool(const struct reader *reader, const char *key, bool *ret_value)
{
    const json_t *value = json_object_get(reader->root, key);
    char text[128];

    if (!is_absent(value) && !json_is_boolean(value))
        return cox_fail(reader->err, COX_INVALID, "%s: %s is %s; allowed: true or false",
                        reader->path, key, cox_json_text(value, text, sizeof(text)));
    *ret_value = json_is_true(value);
    return 0;
}

/* A key that must have one of two values, or be absent. */
static int expect_word(const struct reader *reader, const char *key, const char *word,
                       const char *other)
{
    const json_t *value = json_object_get(reader->root, key);
    const char *found = json_string_value(value);
    char text[128];

    if (!is_absent(value) && (!found || (strcmp(found, word) != 0 && strcmp(found, other) != 0)))
        return cox_fail(reader->err, COX_INVALID, "%s: %s is %s; this worker computes only \"%s\"",
                        reader->path, key, cox_json_text(value, text, sizeof(text)), word);
    return 0;
}

/* Refuses an unsupported feature. */
static int refuse(const struct reader *reader, const char *key, const json_t *value,
                  const char *expected)
{
    char text[128];

    return cox_fail(reader->err, COX_INVALID,
                    "%s: %s%s is %s; this worker computes only models without it (%s)",
                    reader->path, reader->prefix, key, cox_json_text(value, text, sizeof(text)),
                    expected);
}

static int expect_off(const struct reader *reader, const char *key)
{
    const json_t *value = json_object_get(reader->root, key);

    return is_absent(value) || json_is_false(value) ? 0
                                                    : refuse(reader, key, value, "null or false");
}

static int expect_null(const struct reader *reader, const char *key)
{
    const json_t *value = json_object_get(reader->root, key);

    return is_absent(value) ? 0 : refuse(reader, key, value, "null");
}

/* ---- rotary positions ---- */

/* As in transformers, absent, null and empty values are overridden, and no others. */
static bool is_empty(const json_t *value)
{
    return is_absent(value) || json_is_false(value) ||
           (json_is_object(value) && json_object_size(value) == 0);
}

static int expect_whole_heads(const struct reader *reader)
{
    static const char key[] = "partial_rotary_factor";
    const json_t *value = json_object_get(reader->root, key);
    const double number = json_number_value(value);

    if (is_absent(value) || (json_is_number(value) && number >= 1 && number <= 1))
        return 0;
    return refuse(reader, key, value, "1 or null");
}

/* rope_type has precedence over type, its name before transformers 4.43. */
static int read_rope_type(const struct reader *reader, enum cox_rope_type *ret_type)
{
    const json_t *type = json_object_get(reader->root, "rope_type");
    const char *key = type ? "rope_type" : "type";
    const char *word;
    char text[128];

    if (!type)
        type = json_object_get(reader->root, key);
    word = type ? json_string_value(type) : "default";
    if (word && strcmp(word, "default") == 0)
        *ret_type = COX_ROPE_DEFAULT;
    else if (word && strcmp(word, "llama3") == 0)
        *ret_type = COX_ROPE_LLAMA3;
    else
        return cox_fail(reader->err, COX_INVALID,
                        "%s: %s%s is %s; this worker computes only \"default\" and \"llama3\"",
                        reader->path, reader->prefix, key, cox_json_text(type, text, sizeof(text)));
    return 0;
}

/* Refuses keys that are not used: ignoring one would silently change the arithmetic. */
static int refuse_unused(const struct reader *reader, enum cox_rope_type type)
{
    static const char *const used[] = {/* of all types */ "rope_type",
                                       "type",
                                       "rope_theta",
                                       "partial_rotary_factor",
                                       /* of llama3 */ "factor",
                                       "low_freq_factor",
                                       "high_freq_factor",
                                       "original_max_position_embeddings"};
    const size_t count = type == COX_ROPE_LLAMA3 ? sizeof(used) / sizeof(used[0]) : 4;
    const char *key;
    json_t *value;

    json_object_foreach((json_t *)(uintptr_t)reader->root, key, value)
    {
        bool known = json_is_null(value);

        for (size_t i = 0; !known && i < count; i++)
            known = strcmp(key, used[i]) == 0;
        if (!known)
            return refuse(reader, key, value, "null");
    }
    return 0;
}

/* top: the whole config.json, whose own original_max_position_embeddings has precedence. */
static int read_llama3(const struct reader *reader, const struct reader *top,
                       struct cox_model_config *config)
{
    static const char original[] = "original_max_position_embeddings";
    const json_t *at_top = json_object_get(top->root, original);
    const json_t *here = json_object_get(reader->root, original);
    const json_t *count = at_top ? at_top : here;
    int64_t number = config->position_count_max;
    int r;

    r = check_real(reader, "factor", json_object_get(reader->root, "factor"), 1, 1e6,
                   &config->rope_factor);
    if (!r)
        r = check_real(reader, "low_freq_factor", json_object_get(reader->root, "low_freq_factor"),
                       1e-6, 1e6, &config->rope_low_freq_factor);
    /* Frequencies between the two factors are divided by their difference. */
    if (!r)
        r = check_real(
            reader, "high_freq_factor", json_object_get(reader->root, "high_freq_factor"),
            config->rope_low_freq_factor * (1 + 1e-6), 2e6, &config->rope_high_freq_factor);
    if (!r && count)
        r = check_integer(at_top ? top : reader, original, count, 1, 1 << 24, &number);
    config->rope_original_position_count = (uint32_t)number;
    return r;
}

/* rope_scaling has precedence as a whole, together with rope_theta at the top level. Since
 * transformers 5 all is inside rope_parameters, and a top-level rope_theta counts only if there is
 * none inside. */
static int read_rope(const struct reader *top, struct cox_model_config *config)
{
    struct reader rope = {.path = top->path, .prefix = "rope_scaling.", .err = top->err};
    const json_t *theta = NULL;
    enum cox_rope_type type = COX_ROPE_DEFAULT;
    char text[128];
    int r;

    rope.root = json_object_get(top->root, "rope_scaling");
    if (is_empty(rope.root)) {
        rope.prefix = "rope_parameters.";
        rope.root = json_object_get(top->root, "rope_parameters");
    }
    if (is_empty(rope.root))
        rope.root = NULL;
    else if (!json_is_object(rope.root))
        return cox_fail(top->err, COX_INVALID, "%s: %.*s is %s; allowed: an object, or null",
                        top->path, (int)strlen(rope.prefix) - 1, rope.prefix,
                        cox_json_text(rope.root, text, sizeof(text)));
    r = expect_whole_heads(top);
    if (!r && rope.root)
        r = expect_whole_heads(&rope);
    if (!r && rope.root)
        r = read_rope_type(&rope, &type);
    if (!r && rope.root)
        r = refuse_unused(&rope, type);
    config->rope_type = type;
    if (!r && type == COX_ROPE_LLAMA3)
        r = read_llama3(&rope, top, config);
    if (r)
        return r;
    if (rope.root)
        theta = json_object_get(rope.root, "rope_theta");
    if (theta)
        return check_real(&rope, "rope_theta", theta, 1, 1e12, &config->rope_theta);
    theta = json_object_get(top->root, "rope_theta");
    if (theta)
        return check_real(top, "rope_theta", theta, 1, 1e12, &config->rope_theta);
    config->rope_theta = 10000;
    return 0;
}

static int read_sizes(const struct reader *reader, struct cox_model_config *config)
{
    int r;

    r = read_integer(reader, "hidden_size", 1, 65536, NUMBER_REQUIRED, &config->hidden_size);
    if (r)
        return r;
    r = read_integer(reader, "intermediate_size", 1, 1 << 20, NUMBER_REQUIRED,
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
    /* 0 means hidden_size / num_attention_heads, until check_sizes. */
    r = read_integer(reader, "head_dim", 2, 1024, 0, &config->head_dim);
    if (r)
        return r;
    r = read_integer(reader, "vocab_size", 2, 1 << 24, NUMBER_REQUIRED, &config->vocab_size);
    if (r)
        return r;
    return read_integer(reader, "max_position_embeddings", 1, 1 << 24, 2048,
                        &config->position_count_max);
}

/* Checks the sizes against each other. */
static int check_sizes(const struct reader *reader, struct cox_model_config *config)
{
    if (config->head_count % config->kv_head_count)
        return cox_fail(
            reader->err, COX_INVALID,
            "%s: num_key_value_heads is %u; allowed: a divisor of num_attention_heads, which is %u",
            reader->path, config->kv_head_count, config->head_count);
    if (config->head_dim == 0) {
        if (config->hidden_size % config->head_count)
            return cox_fail(
                reader->err, COX_INVALID,
                "%s: hidden_size is %u, not a multiple of num_attention_heads, which is %u, and there is no head_dim",
                reader->path, config->hidden_size, config->head_count);
        config->head_dim = config->hidden_size / config->head_count;
    }
    if (config->head_dim % 2 || config->head_dim > 1024)
        return cox_fail(
            reader->err, COX_INVALID,
            "%s: head_dim is %u; allowed: an even number from 2 to 1024, because rotary positions turn pairs",
            reader->path, config->head_dim);
    return 0;
}

/* eos_token_id is one token, a list, or null; absent means 2, the default of LlamaConfig. */
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

/* bos_token_id is one token or null; absent means 1, the default of LlamaConfig. */
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

/* Other layer types attend to other parts of the context. */
static int check_layer_types(const struct reader *reader)
{
    const json_t *types = json_object_get(reader->root, "layer_types");
    bool full = is_absent(types) || json_is_array(types);

    for (size_t i = 0; full && i < json_array_size(types); i++) {
        const char *type = json_string_value(json_array_get(types, i));

        full = type && strcmp(type, "full_attention") == 0;
    }
    return full ? 0 : refuse(reader, "layer_types", types, "null, or all \"full_attention\"");
}

/* Refuses all keys with which transformers' LlamaForCausalLM computes other tokens than this code.
 * Keys that it ignores, such as those of other architectures, are ignored here too. */
static int check_kind(const struct reader *reader)
{
    static const char *const off[] = {"attention_bias", "mlp_bias", "is_encoder_decoder",
                                      "quantization_config"};
    static const char *const null[] = {"sliding_window",       "attention_chunk_size",
                                       "num_kv_shared_layers", "per_layer_config",
                                       "transformers_weights", "configuration_files"};
    const json_t *causal = json_object_get(reader->root, "is_causal");
    int r;

    if (is_absent(json_object_get(reader->root, "model_type")))
        return cox_fail(reader->err, COX_INVALID, "%s: model_type is missing; needed: \"llama\"",
                        reader->path);
    r = expect_word(reader, "model_type", "llama", "llama");
    if (r)
        return r;
    r = expect_word(reader, "hidden_act", "silu", "swish");
    for (size_t i = 0; !r && i < sizeof(off) / sizeof(off[0]); i++)
        r = expect_off(reader, off[i]);
    for (size_t i = 0; !r && i < sizeof(null) / sizeof(null[0]); i++)
        r = expect_null(reader, null[i]);
    if (!r && causal && !json_is_true(causal))
        r = refuse(reader, "is_causal", causal, "true");
    return r ? r : check_layer_types(reader);
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

    struct reader reader = {.root = root, .path = path, .prefix = "", .err = err};
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
    r = read_real(&reader, "rms_norm_eps", 1e-30, 0.1, 1e-6, &eps);
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
