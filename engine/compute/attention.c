#include "attention.h"

#include <math.h>
#include <string.h>

/* Separate sums of a dot product, so that a compiler may vectorise without reordering sums. */
#define LANE_COUNT 8u

/* In float and in the order of transformers, so that a frequency at the border of two ranges falls
 * on the same side. */
static float scale_llama3(const struct cox_model_config *config, float frequency)
{
    const double positions = config->rope_original_position_count;
    const float low = (float)(positions / config->rope_low_freq_factor);
    const float high = (float)(positions / config->rope_high_freq_factor);
    const float factor = (float)config->rope_factor;
    const float wavelength = 6.283185307179586f * (1.0f / frequency);
    float smooth;

    if (wavelength > low)
        return frequency / factor;
    if (wavelength < high)
        return frequency;
    smooth = ((float)positions * (1.0f / wavelength) - (float)config->rope_low_freq_factor) /
             (float)(config->rope_high_freq_factor - config->rope_low_freq_factor);
    return (1.0f - smooth) * frequency / factor + smooth * frequency;
}

void cox_rotary_frequencies(const struct cox_model_config *config, float *frequencies)
{
    for (uint32_t i = 0; i < config->head_dim / 2; i++) {
        /* Frequency and angle are rounded to float, as in the training of the checkpoints. */
        frequencies[i] =
            (float)(1.0 / pow(config->rope_theta, 2.0 * (double)i / (double)config->head_dim));
        if (config->rope_type == COX_ROPE_LLAMA3)
            frequencies[i] = scale_llama3(config, frequencies[i]);
    }
}

void cox_rotary_angles(const float *frequencies, uint32_t half, uint32_t position, float *cosines,
                       float *sines)
{
    for (uint32_t i = 0; i < half; i++) {
        float angle = (float)position * frequencies[i];

        cosines[i] = cosf(angle);
        sines[i] = sinf(angle);
    }
}

void cox_rotary_turn(float *head, uint32_t head_dim, const float *cosines, const float *sines)
{
    const uint32_t half = head_dim / 2;

    for (uint32_t i = 0; i < half; i++) {
        float x = head[i], y = head[i + half];

        head[i] = x * cosines[i] - y * sines[i];
        head[i + half] = y * cosines[i] + x * sines[i];
    }
}

static float dot(const float *a, const float *b, uint32_t length)
{
    float lanes[LANE_COUNT] = {0};
    uint32_t i = 0;

    for (; i + LANE_COUNT <= length; i += LANE_COUNT)
        for (uint32_t lane = 0; lane < LANE_COUNT; lane++)
            lanes[lane] += a[i + lane] * b[i + lane];
    for (uint32_t lane = 0; i < length; i++, lane++)
        lanes[lane] += a[i] * b[i];
    return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
           ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

static float *keys_of_block(const struct cox_attention_place *place, uint32_t index)
{
    return cox_cache_keys(place->cache, (uint32_t)place->table->blocks[index], place->layer,
                          place->kv_head);
}

static float *values_of_block(const struct cox_attention_place *place, uint32_t index)
{
    return cox_cache_values(place->cache, (uint32_t)place->table->blocks[index], place->layer,
                            place->kv_head);
}

void cox_attention_store(const struct cox_attention_place *place, uint32_t position,
                         const float *key, const float *value)
{
    const struct cox_cache_geometry *geometry = cox_cache_geometry(place->cache);
    const size_t head_dim = geometry->head_dim;
    const size_t offset = position % geometry->block_size * head_dim;
    const uint32_t index = position / geometry->block_size;

    memcpy(keys_of_block(place, index) + offset, key, head_dim * sizeof(float));
    memcpy(values_of_block(place, index) + offset, value, head_dim * sizeof(float));
}

/* Turns count scores into weights that sum to 1. */
static void softmax(float *scores, uint32_t count)
{
    float top = scores[0], sum = 0;

    for (uint32_t i = 1; i < count; i++)
        if (scores[i] > top)
            top = scores[i];
    for (uint32_t i = 0; i < count; i++) {
        scores[i] = expf(scores[i] - top);
        sum += scores[i];
    }
    for (uint32_t i = 0; i < count; i++)
        scores[i] /= sum;
}

void cox_attention(const struct cox_attention_place *place, uint32_t position, const float *query,
                   float *scores, float *output)
{
    const struct cox_cache_geometry *geometry = cox_cache_geometry(place->cache);
    const uint32_t head_dim = geometry->head_dim, block_size = geometry->block_size;
    const uint32_t count = position + 1;
    const float scale = (float)(1.0 / sqrt((double)head_dim));

    for (uint32_t first = 0; first < count; first += block_size) {
        const float *keys = keys_of_block(place, first / block_size);

        for (uint32_t i = 0; i < block_size && first + i < count; i++)
            scores[first + i] = dot(query, keys + (size_t)i * head_dim, head_dim) * scale;
    }
    softmax(scores, count);

    memset(output, 0, head_dim * sizeof(float));
    for (uint32_t first = 0; first < count; first += block_size) {
        const float *values = values_of_block(place, first / block_size);

        for (uint32_t i = 0; i < block_size && first + i < count; i++)
            for (uint32_t d = 0; d < head_dim; d++)
                output[d] += scores[first + i] * values[(size_t)i * head_dim + d];
    }
}
