#include "model_fixture.h"
#include "tests/lib/test.h"

#define TENSOR_NAME_SIZE 96
#define HEADER_SIZE_MAX ((size_t)1 << 20)

/* Sizes of the hidden and intermediate vectors, layers, heads, KV heads, of a head and of the
 * vocabulary; and more. */
#define SHAPE(hidden, intermediate, layers, heads, kv_heads, dim, ... /* vocabulary, more */)      \
    {                                                                                              \
        .hidden_size = hidden, .intermediate_size = intermediate, .layer_count = layers,           \
        .head_count = heads, .kv_head_count = kv_heads, .head_dim = dim,                           \
        .position_count_max = 128, .vocab_size = __VA_ARGS__                                       \
    }

const struct cox_model_config fixture_shapes[FIXTURE_SHAPE_COUNT] = {
    SHAPE(64, 176, 2, 8, 4, 8, 61),
    SHAPE(60, 88, 2, 8, 1, 10, 33, .tied_embeddings = true),
    SHAPE(128, 256, 1, 24, 6, 12, 500),
    SHAPE(256, 688, 1, 8, 8, 32, 1000),
    /* Slices by KV head, columns that do not divide by them; fewer columns than slices. */
    SHAPE(72, 100, 2, 9, 3, 8, 61, .rope_type = COX_ROPE_LLAMA3, .rope_factor = 8,
          .rope_low_freq_factor = 1, .rope_high_freq_factor = 4,
          .rope_original_position_count = 32),
    SHAPE(60, 88, 2, 15, 5, 4, 33, .tied_embeddings = true),
    SHAPE(64, 11, 2, 8, 4, 8, 17),
    /* Odd rows, and few or as many KV heads as heads. */
    SHAPE(63, 104, 2, 24, 3, 6, 301, .tied_embeddings = true),
    SHAPE(41, 64, 2, 8, 8, 6, 257),
    SHAPE(48, 72, 2, 16, 2, 4, 509),
};

/* A file of tensors that grows; the header is text until it is written. */
struct shard {
    char name[48];
    char *header;
    size_t header_size;
    float *data;
    size_t length;
};

struct writer {
    struct shard *shards;
    uint32_t shard_count;
    /* tensors go round the shards */
    uint32_t next;
    char *index;
    size_t index_size;
    uint32_t noise;
};

void fixture_directory_create(char path[FIXTURE_PATH_SIZE])
{
    snprintf(path, FIXTURE_PATH_SIZE, "/tmp/coxswain_model_XXXXXX");
    assert_non_null(mkdtemp(path));
}

void fixture_directory_remove(const char *path)
{
    DIR *directory = opendir(path);
    struct dirent *entry;

    assert_non_null(directory);
    while ((entry = readdir(directory)))
        if (entry->d_name[0] != '.')
            assert_int_equal(unlinkat(dirfd(directory), entry->d_name, 0), 0);
    closedir(directory);
    assert_int_equal(rmdir(path), 0);
}

static void write_whole(const char *directory, const char *name, const void *const *pieces,
                        const size_t *sizes, size_t count)
{
    char path[FIXTURE_PATH_SIZE + 64];
    FILE *file;

    snprintf(path, sizeof(path), "%s/%s", directory, name);
    file = fopen(path, "wb");
    assert_non_null(file);
    for (size_t i = 0; i < count; i++)
        if (sizes[i])
            assert_int_equal(fwrite(pieces[i], 1, sizes[i], file), sizes[i]);
    assert_int_equal(fclose(file), 0);
}

void fixture_write(const char *directory, const char *name, const void *bytes, size_t size)
{
    write_whole(directory, name, &bytes, &size, 1);
}

static void write_safetensors(const char *directory, const char *name, const char *header,
                              const void *data, size_t size)
{
    const uint64_t header_size = strlen(header);
    const void *pieces[] = {&header_size, header, data};
    const size_t sizes[] = {sizeof(header_size), header_size, size};

    write_whole(directory, name, pieces, sizes, 3);
}

float fixture_noise(uint32_t *state)
{
    *state = *state * UINT32_C(1664525) + UINT32_C(1013904223);
    return (float)(int32_t)*state * 0x1p-31f;
}

static void append(char *text, size_t *size, const char *piece)
{
    size_t length = strlen(piece);

    assert_true(*size + length < HEADER_SIZE_MAX);
    memcpy(text + *size, piece, length + 1);
    *size += length;
}

/* A matrix, or a vector of ones and a little noise where columns is 0. */
static void add_tensor(struct writer *writer, const char *name, size_t rows, size_t columns)
{
    struct shard *shard = &writer->shards[writer->next++ % writer->shard_count];
    const size_t length = rows * (columns ? columns : 1);
    const size_t begin = shard->length * sizeof(float);
    char text[2 * TENSOR_NAME_SIZE + 128], shape[64];

    snprintf(shape, sizeof(shape), columns ? "%zu,%zu" : "%zu", rows, columns);
    snprintf(text, sizeof(text),
             "%s\"%s\":{\"dtype\":\"F32\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}",
             shard->header_size > 1 ? "," : "", name, shape, begin, begin + length * sizeof(float));
    append(shard->header, &shard->header_size, text);
    snprintf(text, sizeof(text), "%s\"%s\":\"%s\"", writer->next > 1 ? "," : "", name, shard->name);
    append(writer->index, &writer->index_size, text);

    shard->data = realloc(shard->data, (shard->length + length) * sizeof(float));
    assert_non_null(shard->data);
    for (size_t i = 0; i < length; i++)
        shard->data[shard->length + i] = columns ? fixture_noise(&writer->noise) * 0.3f
                                                 : 1 + fixture_noise(&writer->noise) * 0.1f;
    shard->length += length;
}

static void add_tensors(struct writer *writer, const struct cox_model_config *config)
{
    const size_t hidden = config->hidden_size, intermediate = config->intermediate_size;
    const size_t head_width = (size_t)config->head_count * config->head_dim;
    const size_t kv_width = (size_t)config->kv_head_count * config->head_dim;
    const struct {
        const char *name;
        size_t rows, columns;
    } tensors[] = {
        {"input_layernorm", hidden, 0},           {"self_attn.q_proj", head_width, hidden},
        {"self_attn.k_proj", kv_width, hidden},   {"self_attn.v_proj", kv_width, hidden},
        {"self_attn.o_proj", hidden, head_width}, {"post_attention_layernorm", hidden, 0},
        {"mlp.gate_proj", intermediate, hidden},  {"mlp.up_proj", intermediate, hidden},
        {"mlp.down_proj", hidden, intermediate},
    };
    char name[TENSOR_NAME_SIZE];

    add_tensor(writer, "model.embed_tokens.weight", config->vocab_size, hidden);
    for (uint32_t layer = 0; layer < config->layer_count; layer++)
        for (size_t i = 0; i < sizeof(tensors) / sizeof(tensors[0]); i++) {
            snprintf(name, sizeof(name), "model.layers.%u.%s.weight", layer, tensors[i].name);
            add_tensor(writer, name, tensors[i].rows, tensors[i].columns);
        }
    add_tensor(writer, "model.norm.weight", hidden, 0);
    if (!config->tied_embeddings)
        add_tensor(writer, "lm_head.weight", config->vocab_size, hidden);
}

static void write_config(const char *directory, const struct cox_model_config *config)
{
    char text[1024], rope[256] = "{}";
    int size;

    if (config->rope_type == COX_ROPE_LLAMA3)
        snprintf(
            rope, sizeof(rope),
            "{\"rope_type\":\"llama3\",\"factor\":%g,\"low_freq_factor\":%g,\"high_freq_factor\":%g,\"original_max_position_embeddings\":%u}",
            config->rope_factor, config->rope_low_freq_factor, config->rope_high_freq_factor,
            config->rope_original_position_count);
    size = snprintf(
        text, sizeof(text),
        "{\"model_type\":\"llama\",\"hidden_size\":%u,\"intermediate_size\":%u,\"num_hidden_layers\":%u,\"num_attention_heads\":%u,\"num_key_value_heads\":%u,\"head_dim\":%u,\"vocab_size\":%u,\"max_position_embeddings\":%u,\"tie_word_embeddings\":%s,\"rope_parameters\":%s}",
        config->hidden_size, config->intermediate_size, config->layer_count, config->head_count,
        config->kv_head_count, config->head_dim, config->vocab_size, config->position_count_max,
        config->tied_embeddings ? "true" : "false", rope);

    fixture_write(directory, "config.json", text, (size_t)size);
}

static void write_adapter_config(const char *directory, const struct fixture_adapter *adapter)
{
    const char *modules = adapter->modules ? adapter->modules : "qkvo";
    char text[512];
    size_t size =
        (size_t)snprintf(text, sizeof(text),
                         "{\"peft_type\":\"LORA\",\"r\":%u,\"lora_alpha\":%u,\"target_modules\":[",
                         adapter->rank, adapter->alpha ? adapter->alpha : 16);

    for (size_t i = 0; modules[i]; i++)
        size += (size_t)snprintf(text + size, sizeof(text) - size, "%s\"%c_proj\"", i ? "," : "",
                                 modules[i]);
    size += (size_t)snprintf(text + size, sizeof(text) - size, "]}");
    fixture_write(directory, "adapter_config.json", text, size);
}

static void add_adapter_tensors(struct writer *writer, const struct cox_model_config *config,
                                const struct fixture_adapter *adapter)
{
    const char *modules = adapter->modules ? adapter->modules : "qkvo";
    const size_t heads = (size_t)config->head_count * config->head_dim;
    const size_t kv = (size_t)config->kv_head_count * config->head_dim;
    struct shard *shard = &writer->shards[0];

    for (uint32_t layer = 0; layer < config->layer_count; layer++)
        for (const char *module = modules; *module; module++) {
            const size_t in = *module == 'o' ? heads : config->hidden_size;
            const size_t out = *module == 'o' ? config->hidden_size : *module == 'q' ? heads : kv;
            char name[TENSOR_NAME_SIZE];

            for (int side = 0; side < 2; side++) {
                const size_t before = shard->length;

                snprintf(name, sizeof(name),
                         "base_model.model.model.layers.%u.self_attn.%c_proj.lora_%c.weight", layer,
                         *module, 'A' + side);
                if (side == 0)
                    add_tensor(writer, name, adapter->rank, in + adapter->a_more_columns);
                else
                    add_tensor(writer, name, out,
                               adapter->b_rank ? adapter->b_rank : adapter->rank);
                if (side == 1 && adapter->zero_b)
                    memset(shard->data + before, 0, (shard->length - before) * sizeof(float));
            }
        }
}

void fixture_write_adapter(const char *directory, const struct cox_model_config *config,
                           const struct fixture_adapter *adapter)
{
    struct shard shard = {.name = "adapter", .header = malloc(HEADER_SIZE_MAX)};
    struct writer writer = {.shards = &shard,
                            .shard_count = 1,
                            .noise = adapter->seed + 1,
                            .index = malloc(HEADER_SIZE_MAX)};

    assert_true(shard.header && writer.index);
    append(shard.header, &shard.header_size, "{");
    add_adapter_tensors(&writer, config, adapter);
    append(shard.header, &shard.header_size, "}");
    write_adapter_config(directory, adapter);
    write_safetensors(directory, "adapter_model.safetensors", shard.header, shard.data,
                      shard.length * sizeof(float));
    free(shard.header);
    free(shard.data);
    free(writer.index);
}

void fixture_write_model(const char *directory, const struct cox_model_config *config,
                         uint32_t seed, uint32_t shard_count)
{
    struct writer writer = {.shard_count = shard_count, .noise = seed};

    writer.shards = calloc(shard_count, sizeof(writer.shards[0]));
    writer.index = malloc(HEADER_SIZE_MAX);
    assert_true(writer.shards && writer.index);
    append(writer.index, &writer.index_size, "{\"weight_map\":{");
    for (uint32_t i = 0; i < shard_count; i++) {
        struct shard *shard = &writer.shards[i];

        snprintf(shard->name, sizeof(shard->name), "model-%05u-of-%05u.safetensors", i + 1,
                 shard_count);
        shard->header = malloc(HEADER_SIZE_MAX);
        assert_non_null(shard->header);
        append(shard->header, &shard->header_size, "{");
    }
    add_tensors(&writer, config);
    write_config(directory, config);
    append(writer.index, &writer.index_size, "}}");
    if (shard_count > 1)
        fixture_write(directory, "model.safetensors.index.json", writer.index, writer.index_size);
    for (uint32_t i = 0; i < shard_count; i++) {
        struct shard *shard = &writer.shards[i];

        append(shard->header, &shard->header_size, "}");
        write_safetensors(directory, shard_count > 1 ? shard->name : "model.safetensors",
                          shard->header, shard->data, shard->length * sizeof(float));
        free(shard->header);
        free(shard->data);
    }
    free(writer.index);
    free(writer.shards);
}

int fixture_exchange(void *context, float *slices, size_t stride, size_t slice_length,
                     const float **ret_slices, struct cox_error *err)
{
    struct fixture_rank *rank = context;
    const size_t size = slice_length * sizeof(float);

    (void)err;
    for (size_t i = 0; i < rank->slice_count; i++) {
        if (i >= rank->own.first && i < rank->own.first + rank->own.count)
            memcpy(rank->group->slices + i * slice_length, slices + i * stride, size);
        /* What this rank did not compute must not matter. */
        for (size_t k = 0; k < stride; k++)
            slices[i * stride + k] = 1e30f;
    }
    pthread_barrier_wait(&rank->group->barrier);
    for (size_t i = 0; i < rank->slice_count; i++) {
        memcpy(slices + i * stride, rank->group->slices + i * slice_length, size);
        ret_slices[i] = slices + i * stride;
    }
    pthread_barrier_wait(&rank->group->barrier);
    return 0;
}
