/*
 * tokenizer: text to ids and back, and every file that is not what it should be.
 */
#include "engine/model/tokenizer.h"
#include "tests/lib/test.h"

#define MODEL COX_TEST_SOURCE_DIR "/models/sums"

static char folder[] = "/tmp/cox_tokenizer_XXXXXX";

static void put(const char *name, const char *text)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

static int setup(void **state)
{
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    char path[256];
    snprintf(path, sizeof path, "%s/tokenizer.json", folder);
    unlink(path);
    snprintf(path, sizeof path, "%s/config.json", folder);
    unlink(path);
    return rmdir(folder);
}

/* Loads what was put, and expects a refusal whose text has `part` in it. */
static void refused(const char *json, int code, const char *part)
{
    struct cox_tokenizer *tokenizer = NULL;
    struct cox_error error = {0};
    put("tokenizer.json", json);
    assert_int_equal(cox_tokenizer_load(folder, &tokenizer, &error), code);
    assert_null(tokenizer);
    assert_int_equal(error.code, code);
    assert_contains(error.text, part);
}

static struct cox_tokenizer *loaded(const char *json)
{
    struct cox_tokenizer *tokenizer = NULL;
    put("tokenizer.json", json);
    assert_ok(cox_tokenizer_load(folder, &tokenizer, test_err()));
    return tokenizer;
}

PLAIN_TEST(sums_model_there_and_back)
{
    struct cox_tokenizer *tokenizer = NULL;
    struct cox_error error = {0};
    assert_int_equal(cox_tokenizer_load(MODEL, &tokenizer, &error), 0);
    int32_t *tokens = NULL;
    uint32_t count = 0;
    assert_int_equal(cox_tokenizer_encode(tokenizer, "27+58=", &tokens, &count, &error), 0);
    const int32_t expected[] = {1, 5, 10, 13, 8, 11, 14};
    assert_int_equal(count, 7);
    assert_memory_equal(tokens, expected, sizeof expected);
    char *text = NULL;
    assert_int_equal(cox_tokenizer_decode(tokenizer, tokens, count, &text), 0);
    assert_string_equal(text, "27+58=");
    free(text);
    free(tokens);

    /* Specials are dropped, ids that do not exist are shown. */
    const int32_t odd[] = {8, 2, 15, 99, -1, 3};
    assert_int_equal(cox_tokenizer_decode(tokenizer, odd, 6, &text), 0);
    assert_string_equal(text, "5\xef\xbf\xbd\xef\xbf\xbd"
                              "0");
    free(text);

    /* <bos> alone is a prompt. */
    assert_int_equal(cox_tokenizer_encode(tokenizer, "", &tokens, &count, &error), 0);
    assert_int_equal(count, 1);
    assert_int_equal(tokens[0], 1);
    free(tokens);
    cox_tokenizer_free(tokenizer);
}

PLAIN_TEST(unknown_character_is_named_with_its_position)
{
    struct cox_tokenizer *tokenizer = NULL;
    assert_int_equal(cox_tokenizer_load(MODEL, &tokenizer, NULL), 0);
    static const struct {
        const char *text;
        const char *parts[3];
    } cases[] = {
        {"27-58=", {"'-'", "position 3", "+0123456789="}},
        {"\xc3\xa4", {"'\xc3\xa4'", "position 1", "0123456789"}},
        {"1+\xe2\x82\xac", {"'\xe2\x82\xac'", "position 3", "0123456789"}},
        {"1\t", {"U+0009", "position 2", "0123456789"}},
        {"12\xff", {"0xff", "position 3", "not UTF-8"}},
        {"12\xc3", {"0xc3", "position 3", "not UTF-8"}},       /* cut short */
        {"\xc0\xb1", {"0xc0", "position 1", "not UTF-8"}},     /* overlong */
        {"\xed\xa0\x80", {"0xed", "position 1", "not UTF-8"}}, /* surrogate */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int32_t *tokens = NULL;
        uint32_t count = 0;
        struct cox_error error = {0};
        assert_int_equal(cox_tokenizer_encode(tokenizer, cases[i].text, &tokens, &count, &error),
                         COX_INVALID);
        assert_null(tokens);
        for (int p = 0; p < 3; p++)
            assert_contains(error.text, cases[i].parts[p]);
    }
    cox_tokenizer_free(tokenizer);
}

PLAIN_TEST(characters_of_all_lengths)
{
    struct cox_tokenizer *tokenizer = loaded(
        "{\"model\":{\"type\":\"WordLevel\",\"vocab\":{\"a\":4,\"\u00e4\":0,\"\u20ac\":7,\"\U0001f6a3\":2,\"<\":9}}}");
    int32_t *tokens = NULL;
    uint32_t count = 0;
    const char *text = "\U0001f6a3<a\u20ac\u00e4";
    assert_int_equal(cox_tokenizer_encode(tokenizer, text, &tokens, &count, NULL), 0);
    const int32_t expected[] = {2, 9, 4, 7, 0};
    assert_int_equal(count, 5);
    assert_memory_equal(tokens, expected, sizeof expected);
    char *back = NULL;
    assert_int_equal(cox_tokenizer_decode(tokenizer, tokens, count, &back), 0);
    assert_string_equal(back, text);
    free(back);
    free(tokens);
    /* No <bos>, no text: nothing to compute. */
    assert_refused(cox_tokenizer_encode(tokenizer, "", &tokens, &count, test_err()), COX_INVALID,
                   "<bos>");
    cox_tokenizer_free(tokenizer);
}

PLAIN_TEST(odd_files_are_refused)
{
    struct cox_error error = {0};
    struct cox_tokenizer *tokenizer = NULL;
    assert_int_equal(cox_tokenizer_load("/nonexistent", &tokenizer, &error), COX_NOT_FOUND);
    assert_contains(error.text, "/nonexistent/tokenizer.json");
    error.code = 0;
    assert_int_equal(cox_tokenizer_load(MODEL "/config.json", &tokenizer, &error), COX_NOT_FOUND);

    refused("", COX_CORRUPT, "not valid JSON");
    refused("{\"model\": {\"type\": \"WordLevel\", \"voc", COX_CORRUPT, "not valid JSON");
    refused("[]", COX_CORRUPT, "not an object");
    refused("{}", COX_CORRUPT, "\"model\"");
    refused("{\"model\":[]}", COX_CORRUPT, "\"model\"");
    refused("{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0}}}", COX_UNSUPPORTED, "--tokens");
    refused("{\"model\":{\"vocab\":{\"a\":0}}}", COX_UNSUPPORTED, "--tokens");
    refused("{\"model\":{\"type\":\"WordLevel\"}}", COX_CORRUPT, "vocab");
    refused("{\"model\":{\"type\":\"WordLevel\",\"vocab\":{}}}", COX_CORRUPT, "vocab");
    refused("{\"model\":{\"type\":\"WordLevel\",\"vocab\":{\"a\":\"0\"}}}", COX_CORRUPT, "\"a\"");
    refused("{\"model\":{\"type\":\"WordLevel\",\"vocab\":{\"a\":-1}}}", COX_CORRUPT, "\"a\"");
    refused("{\"model\":{\"type\":\"WordLevel\",\"vocab\":{\"a\":99999999999}}}", COX_CORRUPT,
            "\"a\"");
    refused("{\"model\":{\"type\":\"WordLevel\",\"vocab\":{\"a\":0,\"b\":0}}}", COX_CORRUPT,
            "two tokens");
    refused("{\"model\":{\"type\":\"WordLevel\",\"vocab\":{\"a\":0,\"a\":1}}}", COX_CORRUPT,
            "duplicate");
    refused("{\"model\":{\"type\":\"WordLevel\",\"vocab\":{\"the\":0}}}", COX_UNSUPPORTED,
            "\"the\"");
    /* A word that added_tokens declares special is fine. */
    cox_tokenizer_free(loaded(
        "{\"added_tokens\":[{\"content\":\"END\",\"special\":true}],\"model\":{\"type\":\"WordLevel\",\"vocab\":{\"END\":0,\"a\":1}}}"));

    char path[256];
    snprintf(path, sizeof path, "%s/tokenizer.json", folder);
    unlink(path);
    assert_int_equal(mkfifo(path, 0600), 0);
    error.code = 0;
    assert_refused(cox_tokenizer_load(folder, &tokenizer, test_err()), COX_CORRUPT,
                   "not a regular file");
    unlink(path);
}

PLAIN_TEST(eos_is_a_number_a_list_or_absent)
{
    int32_t tokens[COX_EOS_COUNT_MAX];
    uint32_t count = 9;
    struct cox_error error = {0};
    assert_int_equal(cox_eos_load(MODEL, tokens, &count, &error), 0);
    assert_int_equal(count, 1);
    assert_int_equal(tokens[0], 2);
    put("config.json", "{\"eos_token_id\": [5, 7]}");
    assert_int_equal(cox_eos_load(folder, tokens, &count, &error), 0);
    assert_int_equal(count, 2);
    assert_int_equal(tokens[1], 7);
    put("config.json", "{\"eos_token_id\": null}");
    assert_int_equal(cox_eos_load(folder, tokens, &count, &error), 0);
    assert_int_equal(count, 0);
    put("config.json", "{\"eos_token_id\": \"2\"}");
    assert_int_equal(cox_eos_load(folder, tokens, &count, &error), COX_CORRUPT);
    error.code = 0;
    put("config.json", "{\"eos_token_id\": [1,2,3,4,5,6,7,8,9]}");
    assert_int_equal(cox_eos_load(folder, tokens, &count, &error), COX_INVALID);
    assert_contains(error.text, "9 tokens");
    error.code = 0;
    put("config.json", "{\"eos_token_id\": 2");
    assert_int_equal(cox_eos_load(folder, tokens, &count, &error), COX_CORRUPT);
    error.code = 0;
    assert_int_equal(cox_eos_load("/nonexistent", tokens, &count, &error), COX_NOT_FOUND);
}

int main(void)
{
    return test_run(setup, teardown);
}
