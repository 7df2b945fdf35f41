/*
 * model_image_layout: the head of a model's image, in shared memory. The weights follow it.
 *
 *   0    magic, version, head_size
 *   16   digest
 *   24   weights_offset, weights_size
 *   40   the configuration: sizes
 *   72   flags and tokens
 *   116  rms_norm_eps, rotary positions
 *   160  reserved, zero
 *   248  check
 *
 * The publisher writes the head before any other process has the image, and never again, so no word
 * of it is atomic. Private to model_image.c.
 */
#ifndef COX_MODEL_IMAGE_LAYOUT_H
#define COX_MODEL_IMAGE_LAYOUT_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#define COX_MODEL_IMAGE_MAGIC UINT64_C(0x6567616d69786f63) /* "coximage" */
#define COX_MODEL_IMAGE_VERSION 1u
#define COX_MODEL_IMAGE_HEAD_SIZE 256u

struct cox_model_image_head {
    uint64_t magic;
    uint32_t version;
    uint32_t head_size;
    /* of the model: digest.h */
    uint64_t digest;
    /* from the start of the image */
    uint64_t weights_offset;
    /* bytes */
    uint64_t weights_size;
    uint32_t hidden_size;
    uint32_t intermediate_size;
    uint32_t layer_count;
    uint32_t head_count;
    uint32_t kv_head_count;
    uint32_t head_dim;
    uint32_t vocab_size;
    uint32_t position_count_max;
    uint32_t tied_embeddings;
    int32_t bos_token;
    uint32_t eos_token_count;
    int32_t eos_tokens[8];
    float rms_norm_eps;
    double rope_theta;
    uint32_t rope_type;
    uint32_t rope_original_position_count;
    double rope_factor;
    double rope_low_freq_factor;
    double rope_high_freq_factor;
    uint8_t reserved[88];
    /* FNV-1a of all bytes before */
    uint64_t check;
};

static_assert(offsetof(struct cox_model_image_head, digest) == 16, "layout");
static_assert(offsetof(struct cox_model_image_head, weights_offset) == 24, "layout");
static_assert(offsetof(struct cox_model_image_head, weights_size) == 32, "layout");
static_assert(offsetof(struct cox_model_image_head, hidden_size) == 40, "layout");
static_assert(offsetof(struct cox_model_image_head, position_count_max) == 68, "layout");
static_assert(offsetof(struct cox_model_image_head, tied_embeddings) == 72, "layout");
static_assert(offsetof(struct cox_model_image_head, eos_tokens) == 84, "layout");
static_assert(offsetof(struct cox_model_image_head, rms_norm_eps) == 116, "layout");
static_assert(offsetof(struct cox_model_image_head, rope_theta) == 120, "layout");
static_assert(offsetof(struct cox_model_image_head, rope_type) == 128, "layout");
static_assert(offsetof(struct cox_model_image_head, rope_factor) == 136, "layout");
static_assert(offsetof(struct cox_model_image_head, reserved) == 160, "layout");
static_assert(offsetof(struct cox_model_image_head, check) == 248, "layout");
static_assert(sizeof(struct cox_model_image_head) == COX_MODEL_IMAGE_HEAD_SIZE, "layout");

#endif
