#include "model_fixture.h"
#include "engine/model/config.h"
#include "tests/lib/test.h"

static char directory[FIXTURE_PATH_SIZE];
static char path[FIXTURE_PATH_SIZE + 32];

static int open_directory(void **state)
{
    (void)state;
    fixture_directory_create(directory);
    snprintf(path, sizeof(path), "%s/config.json", directory);
    return 0;
}

static int close_directory(void **state)
{
    (void)state;
    fixture_directory_remove(directory);
    return 0;
}

/* The keys without which nothing works, one of them with another value (NULL: left out). */
static int load(const char *key, const char *value, struct cox_model_config *ret_config,
                struct cox_error *err)
{
    static const struct {
        const char *key, *value;
    } keys[] = {
        {"model_type", "\"llama\""},  {"hidden_size", "128"}, {"intermediate_size", "352"},
        {"num_hidden_layers", "4"},   {"vocab_size", "16"},   {"num_attention_heads", "8"},
        {"num_key_value_heads", "4"},
    };
    char text[4096] = "{";
    size_t used = 1;

    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++)
        if (!key || strcmp(key, keys[i].key))
            used += (size_t)snprintf(text + used, sizeof(text) - used, "\"%s\":%s,", keys[i].key,
                                     keys[i].value);
    if (value)
        used += (size_t)snprintf(text + used, sizeof(text) - used, "\"%s\":%s,", key, value);
    text[used - 1] = '}';
    fixture_write(directory, "config.json", text, used);
    return cox_model_config_load(path, ret_config, err);
}

static struct cox_model_config load_ok(const char *key, const char *value)
{
    struct cox_model_config config;

    assert_ok(load(key, value, &config, test_err()));
    return config;
}

static void load_fails(const char *key, const char *value, int code, const char *word)
{
    struct cox_model_config config;
    struct cox_error err = {0};
    int r = load(key, value, &config, &err);

    if (r != code)
        fail_msg("%s = %s: %d instead of %d", key, value ? value : "missing", r, code);
    if (!strstr(err.text, word) || !strstr(err.text, "config.json"))
        fail_msg("\"%s\" does not say \"%s\" or the file", err.text, word);
}

PLAIN_TEST(takes_the_defaults_of_hugging_face)
{
    struct cox_model_config config = load_ok(NULL, NULL);

    assert_int_equal(config.hidden_size, 128);
    assert_int_equal(config.intermediate_size, 352);
    assert_int_equal(config.layer_count, 4);
    assert_int_equal(config.head_count, 8);
    assert_int_equal(config.kv_head_count, 4);
    assert_int_equal(config.head_dim, 16);
    assert_int_equal(config.vocab_size, 16);
    assert_int_equal(config.position_count_max, 2048);
    assert_true(config.rms_norm_eps > 0.99e-6f && config.rms_norm_eps < 1.01e-6f);
    assert_true(config.rope_theta >= 10000 && config.rope_theta <= 10000);
    assert_false(config.tied_embeddings);
    assert_int_equal(config.bos_token, 1);
    assert_int_equal(config.eos_token_count, 1);
    assert_int_equal(config.eos_tokens[0], 2);
    assert_int_equal(load_ok("num_key_value_heads", NULL).kv_head_count, 8);
}

PLAIN_TEST(reads_what_is_written)
{
    struct cox_model_config config = load_ok("eos_token_id", "[3, 7, 15]");

    assert_int_equal(config.eos_token_count, 3);
    assert_int_equal(config.eos_tokens[2], 15);
    assert_int_equal(load_ok("eos_token_id", "9").eos_tokens[0], 9);
    assert_int_equal(load_ok("eos_token_id", "null").eos_token_count, 0);
    assert_int_equal(load_ok("bos_token_id", "null").bos_token, -1);
    assert_int_equal(load_ok("bos_token_id", "0").bos_token, 0);
    assert_int_equal(load_ok("head_dim", "64").head_dim, 64);
    assert_int_equal(load_ok("head_dim", "null").head_dim, 16);
    assert_true(load_ok("tie_word_embeddings", "true").tied_embeddings);
    assert_true(load_ok("rope_theta", "500000.0").rope_theta > 499999);
    assert_true(
        load_ok("rope_parameters", "{\"rope_type\":\"default\",\"rope_theta\":77}").rope_theta <
        78);
    (void)load_ok("rope_scaling", "null");
    (void)load_ok("attention_bias", "false");
    (void)load_ok("hidden_act", "\"silu\"");
    (void)load_ok("hidden_act", "\"swish\"");
    assert_int_equal(load_ok("intermediate_size", "353").intermediate_size, 353);
    /* Keys that transformers' LlamaForCausalLM does not look at either. */
    (void)load_ok("qk_norm", "true");
    (void)load_ok("embedding_multiplier", "12.0");
    (void)load_ok("sliding_window", "null");
    (void)load_ok("layer_types", "[\"full_attention\",\"full_attention\"]");
    (void)load_ok("architectures", "[\"LlamaForCausalLM\"]");
}

/* ---- rotary positions ---- */

#define LLAMA3                                                                                     \
    "\"factor\":8,\"low_freq_factor\":1,\"high_freq_factor\":4,"                                   \
    "\"original_max_position_embeddings\":64"

static bool same(double a, double b)
{
    return a >= b && a <= b;
}

/* value: of rope_scaling or rope_parameters, and what stands behind it at the top. */
PLAIN_TEST(g4a_rotary_positions_are_those_of_transformers)
{
    static const struct {
        const char *key, *value;
        double theta;
    } cases[] = {
        {"rope_parameters", "{}", 10000},
        {"rope_parameters", "{},\"rope_theta\":50", 50},
        {"rope_parameters", "null,\"rope_theta\":50", 50},
        {"rope_parameters", "{\"type\":\"default\"}", 10000},
        {"rope_parameters", "{\"type\":\"default\"},\"rope_theta\":50", 50},
        {"rope_parameters", "{\"rope_type\":\"default\",\"rope_theta\":70},\"rope_theta\":50", 70},
        {"rope_parameters", "{\"rope_theta\":70}", 70},
        {"rope_parameters", "{\"rope_type\":\"default\",\"type\":\"yarn\"}", 10000},
        {"rope_parameters", "{\"rope_theta\":70,\"factor\":null}", 70},
        {"rope_parameters", "{\"rope_theta\":70,\"partial_rotary_factor\":1.0}", 70},
        {"rope_scaling", "null,\"rope_theta\":50", 50},
        {"rope_scaling", "false,\"rope_theta\":50", 50},
        {"rope_scaling", "{},\"rope_parameters\":{\"rope_theta\":70},\"rope_theta\":50", 70},
        {"rope_scaling", "{\"type\":\"default\"},\"rope_parameters\":{\"rope_theta\":70}", 10000},
        {"rope_scaling", "{\"type\":\"default\"},\"rope_theta\":50", 50},
        {"rope_scaling", "{\"rope_type\":\"default\",\"rope_theta\":60},\"rope_theta\":50", 60},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const struct cox_model_config config = load_ok(cases[i].key, cases[i].value);

        assert_int_equal(config.rope_type, COX_ROPE_DEFAULT);
        if (!same(config.rope_theta, cases[i].theta))
            fail_msg("%s %s: rope_theta %g", cases[i].key, cases[i].value, config.rope_theta);
    }
}

PLAIN_TEST(g4b_llama3_is_read_in_every_spelling)
{
    static const struct {
        const char *key, *value;
        double theta;
        uint32_t original;
    } cases[] = {
        {"rope_parameters", "{\"rope_type\":\"llama3\"," LLAMA3 "}", 10000, 64},
        {"rope_parameters", "{\"rope_type\":\"llama3\",\"rope_theta\":70," LLAMA3 "}", 70, 64},
        {"rope_parameters", "{\"type\":\"llama3\"," LLAMA3 "},\"rope_theta\":50", 50, 64},
        {"rope_scaling", "{\"rope_type\":\"llama3\"," LLAMA3 "},\"rope_theta\":50", 50, 64},
        {"rope_scaling", "{\"type\":\"llama3\"," LLAMA3 "}", 10000, 64},
        {"rope_scaling",
         "{\"rope_type\":\"llama3\"," LLAMA3 "},\"original_max_position_embeddings\":32", 10000,
         32},
        {"rope_scaling",
         "{\"rope_type\":\"llama3\",\"factor\":8.0,\"low_freq_factor\":1.0,\"high_freq_factor\":4.0}",
         10000, 2048},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const struct cox_model_config config = load_ok(cases[i].key, cases[i].value);

        assert_int_equal(config.rope_type, COX_ROPE_LLAMA3);
        assert_true(same(config.rope_theta, cases[i].theta) && same(config.rope_factor, 8) &&
                    same(config.rope_low_freq_factor, 1) && same(config.rope_high_freq_factor, 4));
        assert_int_equal(config.rope_original_position_count, cases[i].original);
    }
}

PLAIN_TEST(g4a_other_rotary_positions_are_refused_by_name)
{
    static const struct {
        const char *value, *words;
    } cases[] = {
        {"{\"type\":\"linear\",\"factor\":2}", "type is \"linear\""},
        {"{\"rope_type\":\"dynamic\",\"factor\":2}", "rope_type is \"dynamic\""},
        {"{\"rope_type\":\"yarn\",\"factor\":2}", "rope_type is \"yarn\""},
        {"{\"rope_type\":\"longrope\"}", "rope_type is \"longrope\""},
        {"{\"rope_type\":\"proportional\"}", "rope_type is \"proportional\""},
        {"{\"type\":\"su\"}", "type is \"su\""},
        {"{\"type\":\"mrope\",\"mrope_section\":[1,2]}", "type is \"mrope\""},
        {"{\"rope_type\":null,\"type\":\"default\"}", "rope_type is null"},
        {"{\"type\":null}", "type is null"},
        {"{\"type\":7}", "type is 7"},
        {"{\"rope_theta\":null}", "rope_theta is null"},
        {"{\"rope_theta\":\"1e4\"}", "rope_theta is \"1e4\""},
        {"{\"partial_rotary_factor\":0.5}", "partial_rotary_factor is 0.5"},
        {"{\"mrope_section\":[2,3,3]}", "mrope_section is [2,3,3]"},
        {"{\"full_attention\":{\"rope_theta\":7}}", "full_attention is {"},
        {"{\"rope_type\":\"default\",\"factor\":2}", "factor is 2"},
        {"{\"rope_type\":\"llama3\"}", "factor is missing"},
        {"{\"rope_type\":\"llama3\",\"factor\":0.5}", "factor is 0.5"},
        {"{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":1}",
         "high_freq_factor is missing"},
        {"{\"rope_type\":\"llama3\",\"factor\":8,\"high_freq_factor\":1}",
         "low_freq_factor is missing"},
        {"{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":0,\"high_freq_factor\":1}",
         "low_freq_factor is 0"},
        {"{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":4,\"high_freq_factor\":4}",
         "high_freq_factor is 4"},
        {"{\"rope_type\":\"llama3\",\"attention_factor\":2," LLAMA3 "}", "attention_factor is 2"},
        {"{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":1,\"high_freq_factor\":4,\"original_max_position_embeddings\":null}",
         "original_max_position_embeddings is null"},
        {"{\"rope_type\":\"llama3\"," LLAMA3 "},\"original_max_position_embeddings\":0",
         "original_max_position_embeddings is 0"},
        {"[1]", "is [1]"},
        {"\"llama3\"", "is \"llama3\""},
        {"true", "is true"},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        load_fails("rope_scaling", cases[i].value, COX_INVALID, cases[i].words);
        load_fails("rope_parameters", cases[i].value, COX_INVALID, cases[i].words);
    }
}

PLAIN_TEST(refuses_absurd_values_by_name)
{
    static const struct {
        const char *key, *value, *word;
    } cases[] = {
        {"hidden_size", NULL, "hidden_size is missing"},
        {"hidden_size", "null", "hidden_size is missing"},
        {"hidden_size", "0", "hidden_size is 0; allowed: an integer from 1 to 65536"},
        {"hidden_size", "-128", "hidden_size is -128"},
        {"hidden_size", "128.0", "hidden_size is 128.0"},
        {"hidden_size", "\"128\"", "hidden_size is \"128\""},
        {"hidden_size", "9223372036854775807", "hidden_size is 9223372036854775807"},
        {"hidden_size", "132", "not a multiple of num_attention_heads"},
        {"intermediate_size", "0", "intermediate_size is 0"},
        {"num_hidden_layers", "0", "num_hidden_layers is 0"},
        {"num_hidden_layers", "1025", "from 1 to 1024"},
        {"num_attention_heads", "12", "not a multiple of num_attention_heads"},
        {"num_attention_heads", "0", "num_attention_heads is 0"},
        {"num_key_value_heads", "0", "num_key_value_heads is 0"},
        {"num_key_value_heads", "3", "divisor of num_attention_heads"},
        {"num_key_value_heads", "16", "divisor of num_attention_heads"},
        {"head_dim", "15", "head_dim is 15"},
        {"head_dim", "4096", "head_dim is 4096"},
        {"vocab_size", "1", "vocab_size is 1"},
        {"vocab_size", "1e3", "vocab_size is 1000.0"},
        {"vocab_size", "16777217", "from 2 to 16777216"},
        {"max_position_embeddings", "0", "max_position_embeddings is 0"},
        {"rms_norm_eps", "0", "rms_norm_eps is 0"},
        {"rms_norm_eps", "-1e-5", "rms_norm_eps is"},
        {"rms_norm_eps", "1e300", "rms_norm_eps is"},
        {"rms_norm_eps", "\"small\"", "rms_norm_eps is \"small\""},
        {"rope_theta", "0.5", "rope_theta is 0.5"},
        {"rope_theta", "true", "rope_theta is true"},
        {"rope_theta", "null", "rope_theta is null"},
        {"rope_scaling", "7", "rope_scaling is 7"},
        {"rope_parameters", "7", "rope_parameters is 7"},
        {"sliding_window", "16", "sliding_window is 16"},
        {"attention_chunk_size", "16", "attention_chunk_size is 16"},
        {"num_kv_shared_layers", "1", "num_kv_shared_layers is 1"},
        {"per_layer_config", "{\"0\":{}}", "per_layer_config is {"},
        {"is_causal", "false", "is_causal is false"},
        {"is_causal", "null", "is_causal is null"},
        {"is_encoder_decoder", "true", "is_encoder_decoder is true"},
        {"transformers_weights", "\"other.safetensors\"", "transformers_weights is"},
        {"configuration_files", "[\"config.5.0.0.json\"]", "configuration_files is"},
        {"layer_types", "[\"full_attention\",\"sliding_attention\"]", "layer_types is ["},
        {"layer_types", "\"full_attention\"", "layer_types is \"full_attention\""},
        {"partial_rotary_factor", "0.5", "partial_rotary_factor is 0.5"},
        {"partial_rotary_factor", "\"1\"", "partial_rotary_factor is \"1\""},
        {"tie_word_embeddings", "1", "tie_word_embeddings is 1; allowed: true or false"},
        {"attention_bias", "true", "attention_bias is true"},
        {"mlp_bias", "true", "mlp_bias is true"},
        {"quantization_config", "{\"bits\":4}", "quantization_config is"},
        {"hidden_act", "\"gelu\"", "hidden_act is \"gelu\""},
        {"model_type", "\"qwen2\"", "model_type is \"qwen2\""},
        {"model_type", NULL, "model_type is missing"},
        {"eos_token_id", "16", "eos_token_id is 16; allowed: an integer from 0 to 15"},
        {"eos_token_id", "-1", "eos_token_id is -1"},
        {"eos_token_id", "[2, \"x\"]", "eos_token_id is \"x\""},
        {"eos_token_id", "[1,1,1,1,1,1,1,1,1]", "lists 9 tokens"},
        {"eos_token_id", "{}", "eos_token_id is {}"},
        {"bos_token_id", "99", "bos_token_id is 99"},
        {"rms_norm_eps",
         "\"a value that is much longer than what fits into the text of an error message, and that is for this reason not repeated in it as a whole\"",
         "a long value"},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        load_fails(cases[i].key, cases[i].value, COX_INVALID, cases[i].word);
}

PLAIN_TEST(refuses_what_is_not_json)
{
    struct cox_model_config config;
    char *large = test_own(calloc(1, (size_t)2 << 20), free);

    assert_non_null(large);
    load_fails("rms_norm_eps", "NaN", COX_CORRUPT, "not valid JSON");
    load_fails("rms_norm_eps", "Infinity", COX_CORRUPT, "not valid JSON");
    load_fails("hidden_size", "99999999999999999999", COX_CORRUPT, "not valid JSON");
    load_fails("x", "1,\"x\":2", COX_CORRUPT, "duplicate");
    fixture_write(directory, "config.json", "", 0);
    assert_int_equal(cox_model_config_load(path, &config, NULL), COX_CORRUPT);
    fixture_write(directory, "config.json", "[]", 2);
    assert_int_equal(cox_model_config_load(path, &config, NULL), COX_CORRUPT);
    fixture_write(directory, "config.json", large, (size_t)2 << 20);
    assert_int_equal(cox_model_config_load(path, &config, NULL), COX_TOO_LARGE);
    assert_int_equal(remove(path), 0);
    assert_int_equal(cox_model_config_load(path, &config, NULL), COX_NOT_FOUND);
}

int main(void)
{
    return test_run(open_directory, close_directory);
}
