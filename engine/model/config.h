/*
 * config: the contents of config.json of a Hugging Face Llama checkpoint, checked.
 *
 * After a successful load every number is in the range given here. So sizes computed from them fit
 * into 64 bits, and no later code checks again.
 *
 * Threads: any.
 * Ownership: nothing is owned.
 * Blocks: only on reading the file.
 * If the process dies: nothing is left.
 */
#ifndef COX_MODEL_CONFIG_H
#define COX_MODEL_CONFIG_H

#include <coxswain/base.h>

/* Limit of the end-of-text tokens kept. */
#define COX_EOS_TOKEN_COUNT_MAX 8

/* How the rotary frequencies follow from rope_theta. */
enum cox_rope_type {
    COX_ROPE_DEFAULT = 0,
    COX_ROPE_LLAMA3, /* low ones divided by a factor, since Llama 3.1 */
};

struct cox_model_config {
    /* 1 to 65536 */
    uint32_t hidden_size;
    /* feed-forward columns: 1 to 2^20 */
    uint32_t intermediate_size;
    /* 1 to 1024 */
    uint32_t layer_count;
    /* 1 to 1024 */
    uint32_t head_count;
    /* divides head_count */
    uint32_t kv_head_count;
    /* even, 2 to 1024 */
    uint32_t head_dim;
    /* 2 to 2^24 */
    uint32_t vocab_size;
    /* valid positions are 0 to this - 1; 1 to 2^24 */
    uint32_t position_count_max;
    /* above 0, to 0.1 */
    float rms_norm_eps;
    /* 1 to 1e12 */
    double rope_theta;
    enum cox_rope_type rope_type;
    /* The next four are for COX_ROPE_LLAMA3. */
    /* 1 to 1e6 */
    double rope_factor;
    /* 1e-6 to 1e6 */
    double rope_low_freq_factor;
    /* above that, to 2e6 */
    double rope_high_freq_factor;
    /* 1 to 2^24 */
    uint32_t rope_original_position_count;
    /* the output layer is the embedding matrix */
    bool tied_embeddings;
    /* -1: none */
    int32_t bos_token;
    uint32_t eos_token_count;
    int32_t eos_tokens[COX_EOS_TOKEN_COUNT_MAX];
};

/* Reads and checks a config.json. An accepted file has the meaning that it has for LlamaForCausalLM
 * of transformers 5. On failure err has the key, its value and the allowed ones.
 * Returns
 *   0
 *   COX_NOT_FOUND: no such file
 *   COX_CORRUPT: not a JSON object
 *   COX_TOO_LARGE: above 1 MiB
 *   COX_INVALID: an invalid value, or an unsupported kind of model
 *   -errno
 */
int cox_model_config_load(const char *path, struct cox_model_config *ret_config,
                          struct cox_error *err);

#endif
