#include "model_image.h"
#include "model_image_layout.h"
#include "digest.h"
#include "file.h"

#include <stdio.h>
#include <string.h>

#include "channel/base/idioms.h"
#include "channel/base/hash.h"

static_assert(COX_MODEL_IMAGE_HEAD_SIZE % COX_WEIGHTS_ALIGNMENT == 0, "weights follow the head");
static_assert(COX_EOS_TOKEN_COUNT_MAX == 8, "as many as the head has");

uint64_t cox_model_image_size(const struct cox_model_config *config)
{
    const struct cox_weights_layout layout = cox_weights_layout(config);

    return COX_MODEL_IMAGE_HEAD_SIZE + cox_weights_size(&layout);
}

int cox_model_folder_config(const char *directory, struct cox_model_config *ret_config,
                            struct cox_error *err)
{
    _cox_cleanup_(cox_free_ptr) char *path = NULL;

    if (asprintf(&path, "%s/config.json", directory) < 0) {
        path = NULL;
        return cox_fail(err, -ENOMEM, "no memory to load %s", directory);
    }
    return cox_file_blame(cox_model_config_load(path, ret_config, err), err);
}

static uint64_t head_check(const struct cox_model_image_head *head)
{
    return cox_hash_bytes(COX_HASH_START, head, offsetof(struct cox_model_image_head, check));
}

static void head_write(const struct cox_model_config *config, uint64_t digest, void *image)
{
    struct cox_model_image_head head = {
        .magic = COX_MODEL_IMAGE_MAGIC,
        .version = COX_MODEL_IMAGE_VERSION,
        .head_size = COX_MODEL_IMAGE_HEAD_SIZE,
        .digest = digest,
        .weights_offset = COX_MODEL_IMAGE_HEAD_SIZE,
        .weights_size = cox_model_image_size(config) - COX_MODEL_IMAGE_HEAD_SIZE,
        .hidden_size = config->hidden_size,
        .intermediate_size = config->intermediate_size,
        .layer_count = config->layer_count,
        .head_count = config->head_count,
        .kv_head_count = config->kv_head_count,
        .head_dim = config->head_dim,
        .vocab_size = config->vocab_size,
        .position_count_max = config->position_count_max,
        .tied_embeddings = config->tied_embeddings,
        .bos_token = config->bos_token,
        .eos_token_count = config->eos_token_count,
        .rms_norm_eps = config->rms_norm_eps,
        .rope_theta = config->rope_theta,
        .rope_type = (uint32_t)config->rope_type,
        .rope_original_position_count = config->rope_original_position_count,
        .rope_factor = config->rope_factor,
        .rope_low_freq_factor = config->rope_low_freq_factor,
        .rope_high_freq_factor = config->rope_high_freq_factor,
    };

    memcpy(head.eos_tokens, config->eos_tokens, sizeof head.eos_tokens);
    head.check = head_check(&head);
    memcpy(image, &head, sizeof head);
}

int cox_model_image_fill(const struct cox_model_config *config, const char *directory, void *image,
                         bool (*progress)(void *context, uint32_t done, uint32_t count),
                         void *context, struct cox_error *err)
{
    const struct cox_share whole = {0};
    float *weights = (float *)((char *)image + COX_MODEL_IMAGE_HEAD_SIZE);
    uint64_t digest;
    int r;

    memset(image, 0, COX_MODEL_IMAGE_HEAD_SIZE);
    r = cox_model_digest_folder(directory, &digest, err);
    if (!r)
        r = cox_weights_fill(config, &whole, directory, weights, progress, context, err);
    if (!r)
        r = cox_model_digest_verify(directory, digest, err);
    if (!r)
        head_write(config, digest, image);
    return cox_file_blame(r, err);
}

static bool within(uint64_t number, uint64_t least, uint64_t most)
{
    return number >= least && number <= most;
}

static bool rope_makes_sense(const struct cox_model_config *config)
{
    if (config->rope_type == COX_ROPE_DEFAULT)
        return true;
    return config->rope_type == COX_ROPE_LLAMA3 &&
           within(config->rope_original_position_count, 1, 1 << 24) && config->rope_factor >= 1 &&
           config->rope_factor <= 1e6 && config->rope_low_freq_factor >= 1e-6 &&
           config->rope_low_freq_factor <= 1e6 &&
           config->rope_high_freq_factor > config->rope_low_freq_factor &&
           config->rope_high_freq_factor <= 2e6;
}

/* The ranges of config.h, which no later code checks again. */
static bool config_makes_sense(const struct cox_model_config *config)
{
    bool sense =
        within(config->hidden_size, 1, 65536) && within(config->intermediate_size, 1, 1 << 20) &&
        within(config->layer_count, 1, 1024) && within(config->head_count, 1, 1024) &&
        within(config->kv_head_count, 1, config->head_count) &&
        config->head_count % config->kv_head_count == 0 && within(config->head_dim, 2, 1024) &&
        config->head_dim % 2 == 0 && within(config->vocab_size, 2, 1 << 24) &&
        within(config->position_count_max, 1, 1 << 24) &&
        config->eos_token_count <= COX_EOS_TOKEN_COUNT_MAX && config->bos_token >= -1 &&
        config->bos_token < (int32_t)config->vocab_size;

    for (uint32_t i = 0; sense && i < config->eos_token_count; i++)
        sense = within((uint32_t)config->eos_tokens[i], 0, config->vocab_size - 1);
    /* Written so that a NaN is refused. */
    return sense && config->rms_norm_eps > 0 && config->rms_norm_eps <= 0.1f &&
           config->rope_theta >= 1 && config->rope_theta <= 1e12 && rope_makes_sense(config);
}

static struct cox_model_config head_config(const struct cox_model_image_head *head)
{
    struct cox_model_config config = {
        .hidden_size = head->hidden_size,
        .intermediate_size = head->intermediate_size,
        .layer_count = head->layer_count,
        .head_count = head->head_count,
        .kv_head_count = head->kv_head_count,
        .head_dim = head->head_dim,
        .vocab_size = head->vocab_size,
        .position_count_max = head->position_count_max,
        .rms_norm_eps = head->rms_norm_eps,
        .rope_theta = head->rope_theta,
        .rope_type = (enum cox_rope_type)head->rope_type,
        .rope_original_position_count = head->rope_original_position_count,
        .rope_factor = head->rope_factor,
        .rope_low_freq_factor = head->rope_low_freq_factor,
        .rope_high_freq_factor = head->rope_high_freq_factor,
        .tied_embeddings = head->tied_embeddings != 0,
        .bos_token = head->bos_token,
        .eos_token_count = head->eos_token_count,
    };

    memcpy(config.eos_tokens, head->eos_tokens, sizeof config.eos_tokens);
    return config;
}

int cox_model_image_read(const void *image, uint64_t size, struct cox_model_image *ret_image,
                         struct cox_error *err)
{
    struct cox_model_image_head head;
    struct cox_model_config config;

    if (size < sizeof head)
        return cox_fail(err, COX_CORRUPT, "an image of %llu bytes is too small for a model",
                        (unsigned long long)size);
    memcpy(&head, image, sizeof head);
    if (head.magic != COX_MODEL_IMAGE_MAGIC || head.check != head_check(&head))
        return cox_fail(err, COX_CORRUPT, "the image does not start with the head of a model");
    if (head.version != COX_MODEL_IMAGE_VERSION || head.head_size != COX_MODEL_IMAGE_HEAD_SIZE)
        return cox_fail(err, COX_VERSION,
                        "the image's layout has version %u, this program reads %u", head.version,
                        COX_MODEL_IMAGE_VERSION);
    config = head_config(&head);
    if (!config_makes_sense(&config))
        return cox_fail(err, COX_CORRUPT, "the image's configuration is invalid");
    if (head.weights_offset != COX_MODEL_IMAGE_HEAD_SIZE ||
        cox_model_image_size(&config) != head.weights_offset + head.weights_size ||
        head.weights_offset + head.weights_size > size)
        return cox_fail(
            err, COX_CORRUPT,
            "the image has %llu bytes, with %llu of weights from byte %llu on; its configuration implies %llu",
            (unsigned long long)size, (unsigned long long)head.weights_size,
            (unsigned long long)head.weights_offset,
            (unsigned long long)cox_model_image_size(&config));
    *ret_image = (struct cox_model_image){
        .config = config,
        .digest = head.digest,
        .weights = (const float *)((const char *)image + COX_MODEL_IMAGE_HEAD_SIZE),
        .weights_size = head.weights_size,
    };
    return 0;
}

int cox_model_config_compare(const struct cox_model_config *present,
                             const struct cox_model_config *other, struct cox_error *err)
{
    const struct {
        const char *key;
        uint32_t present, other;
    } numbers[] = {
        {"hidden_size", present->hidden_size, other->hidden_size},
        {"intermediate_size", present->intermediate_size, other->intermediate_size},
        {"num_hidden_layers", present->layer_count, other->layer_count},
        {"num_attention_heads", present->head_count, other->head_count},
        {"num_key_value_heads", present->kv_head_count, other->kv_head_count},
        {"head_dim", present->head_dim, other->head_dim},
        {"vocab_size", present->vocab_size, other->vocab_size},
        {"max_position_embeddings", present->position_count_max, other->position_count_max},
        {"tie_word_embeddings", present->tied_embeddings, other->tied_embeddings},
    };

    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        if (numbers[i].present != numbers[i].other)
            return cox_fail(err, COX_INVALID, "%s is %u, that of the model in use %u",
                            numbers[i].key, numbers[i].other, numbers[i].present);
    /* Clients have read the end tokens, and would not learn of others. */
    if (present->eos_token_count != other->eos_token_count ||
        memcmp(present->eos_tokens, other->eos_tokens,
               present->eos_token_count * sizeof present->eos_tokens[0]) != 0)
        return cox_fail(err, COX_INVALID, "eos_token_id is not that of the model in use");
    return 0;
}
