/*
 * model_image: a model in one image, and its digest.
 */
#include "channel/base/hash.h"
#include "engine/model/model_image.h"
#include "engine/model/model_image_layout.h"
#include "engine/model/digest.h"
#include "model_fixture.h"
#include "tests/lib/test.h"

static const struct cox_model_config small = {
    .hidden_size = 32,
    .intermediate_size = 48,
    .layer_count = 2,
    .head_count = 8,
    .kv_head_count = 4,
    .head_dim = 4,
    .vocab_size = 37,
    .position_count_max = 64,
    .rms_norm_eps = 1e-5f,
    .rope_theta = 10000,
    .bos_token = 1,
    .eos_token_count = 2,
    .eos_tokens = {2, 5},
};

static const char *directory;

static int open_directory(void **state)
{
    (void)state;
    directory = test_folder();
    fixture_write_model(directory, &small, 7, 1);
    return 0;
}

#define TEST(name) TEST_WITH(name, open_directory, NULL)

static uint64_t digest_of(const char *folder)
{
    uint64_t digest = 0;

    assert_ok(cox_model_digest_folder(folder, &digest, test_err()));
    assert_true(digest != 0);
    return digest;
}

/* An image of the folder's model. */
static void *fill(struct cox_model_config *config, uint64_t *ret_size)
{
    void *image;

    assert_ok(cox_model_folder_config(directory, config, test_err()));
    *ret_size = cox_model_image_size(config);
    image = test_own(aligned_alloc(COX_WEIGHTS_ALIGNMENT, *ret_size), free);
    assert_non_null(image);
    memset(image, 0xff, *ret_size);
    assert_ok(cox_model_image_fill(config, directory, image, NULL, NULL, test_err()));
    return image;
}

TEST(model_image_is_a_whole_model)
{
    struct cox_model_config config;
    struct cox_model_image found;
    uint64_t size;
    float *alone;
    void *image = fill(&config, &size);

    assert_ok(cox_model_image_read(image, size, &found, test_err()));
    assert_ok(cox_model_config_compare(&config, &found.config, test_err()));
    assert_int_equal(found.config.eos_token_count, config.eos_token_count);
    assert_memory_equal(found.config.eos_tokens, config.eos_tokens, sizeof config.eos_tokens);
    assert_int_equal(found.config.bos_token, config.bos_token);
    assert_true(found.config.rope_theta == config.rope_theta);
    assert_true(found.config.rms_norm_eps == config.rms_norm_eps);
    assert_true(found.digest == digest_of(directory));
    assert_int_equal((uintptr_t)found.weights % COX_WEIGHTS_ALIGNMENT, 0);
    alone = test_own(aligned_alloc(COX_WEIGHTS_ALIGNMENT, found.weights_size), free);
    assert_non_null(alone);
    assert_ok(cox_weights_fill(&config, &(struct cox_share){0}, directory, alone, NULL, NULL,
                               test_err()));
    assert_memory_equal(alone, found.weights, found.weights_size);
}

/* Any byte of the head, and any length too short, is refused; nothing is read behind the image. */
TEST(model_image_bad_heads_are_refused)
{
    struct cox_model_config config;
    struct cox_model_image found;
    uint64_t size;
    unsigned char *image = fill(&config, &size);

    for (size_t i = 0; i < COX_MODEL_IMAGE_HEAD_SIZE; i++)
        for (unsigned bit = 0; bit < 8; bit += 7) {
            image[i] ^= (unsigned char)(1u << bit);
            assert_int_not_equal(cox_model_image_read(image, size, &found, NULL), 0);
            image[i] ^= (unsigned char)(1u << bit);
        }
    assert_int_equal(cox_model_image_read(image, size - 1, &found, NULL), COX_CORRUPT);
    assert_int_equal(cox_model_image_read(image, 10, &found, NULL), COX_CORRUPT);
    assert_int_equal(cox_model_image_read(image, size, &found, NULL), 0);
}

/* A head that is well formed and says what cannot be. */
TEST(model_image_impossible_configurations_are_refused)
{
    static const struct {
        size_t offset;
        uint32_t value;
    } rows[] = {
        {offsetof(struct cox_model_image_head, hidden_size), 0},
        {offsetof(struct cox_model_image_head, hidden_size), 65537},
        {offsetof(struct cox_model_image_head, hidden_size), 64},
        {offsetof(struct cox_model_image_head, intermediate_size), 40},
        {offsetof(struct cox_model_image_head, intermediate_size), UINT32_MAX},
        {offsetof(struct cox_model_image_head, layer_count), 0},
        {offsetof(struct cox_model_image_head, layer_count), 3},
        {offsetof(struct cox_model_image_head, head_count), 7},
        {offsetof(struct cox_model_image_head, kv_head_count), 0},
        {offsetof(struct cox_model_image_head, kv_head_count), 3},
        {offsetof(struct cox_model_image_head, head_dim), 3},
        {offsetof(struct cox_model_image_head, vocab_size), 1},
        {offsetof(struct cox_model_image_head, vocab_size), UINT32_MAX},
        {offsetof(struct cox_model_image_head, position_count_max), 0},
        {offsetof(struct cox_model_image_head, bos_token), 37},
        {offsetof(struct cox_model_image_head, eos_token_count), 9},
        {offsetof(struct cox_model_image_head, eos_tokens), 37},
        {offsetof(struct cox_model_image_head, eos_tokens), UINT32_MAX},
        {offsetof(struct cox_model_image_head, rms_norm_eps), 0},
        {offsetof(struct cox_model_image_head, rms_norm_eps), 0x7fc00000}, /* no number */
        {offsetof(struct cox_model_image_head, rope_theta) + 4, 0x7ff80000},
        {offsetof(struct cox_model_image_head, rope_type), 1}, /* and none of its numbers */
        {offsetof(struct cox_model_image_head, rope_type), 2},
        {offsetof(struct cox_model_image_head, weights_offset), 64},
        {offsetof(struct cox_model_image_head, weights_offset) + 4, UINT32_MAX},
        {offsetof(struct cox_model_image_head, weights_size) + 4, UINT32_MAX},
    };
    struct cox_model_config config;
    struct cox_model_image found;
    struct cox_model_image_head good, bad;
    uint64_t size;
    unsigned char *image = fill(&config, &size);

    memcpy(&good, image, sizeof good);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        bad = good;
        memcpy((unsigned char *)&bad + rows[i].offset, &rows[i].value, sizeof rows[i].value);
        bad.check =
            cox_hash_bytes(COX_HASH_START, &bad, offsetof(struct cox_model_image_head, check));
        memcpy(image, &bad, sizeof bad);
        if (cox_model_image_read(image, size, &found, NULL) != COX_CORRUPT)
            fail_msg("row %zu was taken", i);
    }
    bad = good;
    bad.version++;
    bad.check = cox_hash_bytes(COX_HASH_START, &bad, offsetof(struct cox_model_image_head, check));
    memcpy(image, &bad, sizeof bad);
    assert_int_equal(cox_model_image_read(image, size, &found, NULL), COX_VERSION);
}

static void change_byte(const char *name, off_t offset)
{
    char path[FIXTURE_PATH_SIZE + 32];
    unsigned char byte;
    int fd;

    snprintf(path, sizeof path, "%s/%s", directory, name);
    fd = open(path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    if (offset < 0) {
        struct stat st;
        assert_int_equal(fstat(fd, &st), 0);
        offset += st.st_size;
    }
    assert_int_equal(pread(fd, &byte, 1, offset), 1);
    byte ^= 1;
    assert_int_equal(pwrite(fd, &byte, 1, offset), 1);
    close(fd);
}

/* Wherever the folder is, and however often it is asked; and another one as soon as a number is
 * another one. */
TEST(weights_digest_is_of_configuration_and_weights)
{
    const uint64_t first = digest_of(directory);
    const char *other = test_folder();
    struct cox_model_config config = small;

    assert_true(first == digest_of(directory));
    fixture_write_model(other, &small, 7, 1);
    assert_true(first == digest_of(other));
    config.position_count_max = 63;
    fixture_write_model(other, &config, 7, 1);
    assert_true(first != digest_of(other));
    fixture_write_model(other, &small, 8, 1);
    assert_true(first != digest_of(other));
    change_byte("model.safetensors", -1);
    assert_true(first != digest_of(directory));
    change_byte("model.safetensors", -1);
    assert_true(first == digest_of(directory));
}

TEST(weights_digest_of_several_files)
{
    const char *other = test_folder();
    uint64_t first;

    fixture_write_model(other, &small, 7, 3);
    first = digest_of(other);
    assert_true(first == digest_of(other));
    fixture_write_model(other, &small, 9, 3);
    assert_true(first != digest_of(other));
}

/* A sample, evenly spread: the beginning, the end and whatever is changed at many places. */
TEST(weights_digest_of_a_large_file_is_of_a_sample)
{
    struct cox_model_config config = small;
    uint64_t first;

    config.hidden_size = 256;
    config.intermediate_size = 1024;
    config.head_dim = 32;
    fixture_write_model(directory, &config, 7, 1);
    first = digest_of(directory);
    change_byte("model.safetensors", -1);
    assert_true(first != digest_of(directory));
    change_byte("model.safetensors", -1);
    fixture_write_model(directory, &config, 8, 1);
    assert_true(first != digest_of(directory));
}

TEST(weights_of_other_shapes_are_refused)
{
    struct cox_model_config other = small;

    other.rope_theta = 5;
    other.rms_norm_eps = 1e-3f;
    other.bos_token = -1;
    assert_ok(cox_model_config_compare(&small, &other, test_err()));
    other.vocab_size = 38;
    assert_refused(cox_model_config_compare(&small, &other, test_err()), COX_INVALID,
                   "vocab_size is 38, that of the model in use 37");
    other = small;
    other.tied_embeddings = true;
    assert_refused(cox_model_config_compare(&small, &other, test_err()), COX_INVALID,
                   "tie_word_embeddings");
    /* Another one, one fewer, in another order. */
    for (int i = 0; i < 3; i++) {
        other = small;
        other.eos_token_count -= i == 1;
        other.eos_tokens[1] = i == 0 ? 6 : 2;
        other.eos_tokens[0] = i == 2 ? 5 : 2;
        assert_refused(cox_model_config_compare(&small, &other, test_err()), COX_INVALID,
                       "eos_token_id");
    }
}

static bool yes(void *context, uint32_t done, uint32_t count)
{
    (void)done, (void)count;
    (*(int *)context)++;
    return true;
}

TEST(weights_loading_can_be_given_up)
{
    struct cox_model_config config;
    struct cox_model_image found;
    uint64_t size;
    int asked = 0;
    void *image = fill(&config, &size);

    assert_int_equal(cox_model_image_fill(&config, directory, image, yes, &asked, NULL),
                     COX_ABORTED);
    assert_int_equal(asked, 1);
    /* And what was there before is no model any more. */
    assert_int_equal(cox_model_image_read(image, size, &found, NULL), COX_CORRUPT);
}

/* In the midst of it there are other weights of the same shapes. */
static bool rewrite(void *context, uint32_t done, uint32_t count)
{
    (void)done, (void)count;
    if ((*(int *)context)++ == 1)
        fixture_write_model(directory, &small, 8, 1);
    return false;
}

TEST(weights_that_change_while_they_are_loaded_are_no_model)
{
    struct cox_model_config config;
    struct cox_model_image found;
    uint64_t size;
    int asked = 0;
    void *image = fill(&config, &size);

    assert_refused(cox_model_image_fill(&config, directory, image, rewrite, &asked, test_err()),
                   COX_INVALID, "changed while it was read");
    assert_int_equal(cox_model_image_read(image, size, &found, NULL), COX_CORRUPT);
    asked = 2; /* and now it stays */
    assert_int_equal(cox_model_image_fill(&config, directory, image, rewrite, &asked, NULL), 0);
    assert_int_equal(cox_model_image_read(image, size, &found, NULL), 0);
    assert_true(found.digest == digest_of(directory));
}
