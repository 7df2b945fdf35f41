/*
 * model_fixture: checkpoints for the tests of worker/model, written to a folder of their own.
 *
 * Failures end the test through cmocka. The folder is the caller's to remove.
 */
#ifndef COX_TESTS_UNIT_MODEL_FIXTURE_H
#define COX_TESTS_UNIT_MODEL_FIXTURE_H

#include "engine/model/share.h"

#include <pthread.h>

#define FIXTURE_PATH_SIZE 64

/* Shapes that meet the corners: grouped heads down to one KV head, columns that are no multiple of
 * a vector, vocabularies that do not divide by 8, tied embeddings, a head_dim of its own. The first
 * is the plainest. */
#define FIXTURE_SHAPE_COUNT 10u
extern const struct cox_model_config fixture_shapes[FIXTURE_SHAPE_COUNT];

/* Ranks as threads: one shared block of slices stands for the group's exchange. */
struct fixture_group {
    pthread_barrier_t barrier;
    float *slices;
};
struct fixture_rank {
    struct fixture_group *group;
    /* of the model */
    uint32_t slice_count;
    struct cox_slices own;
};
/* A gather of cox_share; context is the fixture_rank. */
int fixture_exchange(void *context, float *slices, size_t stride, size_t slice_length,
                     const float **ret_slices, struct cox_error *err);

/* Makes an empty folder under /tmp and writes its path. */
void fixture_directory_create(char path[FIXTURE_PATH_SIZE]);

/* Removes the folder and the files in it. */
void fixture_directory_remove(const char *path);

void fixture_write(const char *directory, const char *name, const void *bytes, size_t size);

/* config.json and F32 weights from a fixed noise: the same numbers for the same arguments. With
 * shard_count above 1: that many files and an index. */
void fixture_write_model(const char *directory, const struct cox_model_config *config,
                         uint32_t seed, uint32_t shard_count);

/* A LoRA adapter. All zero but rank: alpha 16, all four projections, nothing wrong with it. */
struct fixture_adapter {
    uint32_t rank;
    uint32_t alpha;
    uint32_t seed;
    /* letters of q, k, v, o; NULL: all */
    const char *modules;
    bool zero_b;
    /* What may be wrong. */
    /* of every B */
    uint32_t b_rank;
    /* of every A */
    uint32_t a_more_columns;
};

/* adapter_config.json and adapter_model.safetensors, of a noise. */
void fixture_write_adapter(const char *directory, const struct cox_model_config *config,
                           const struct fixture_adapter *adapter);

/* The next number of a noise in [-1, 1). */
float fixture_noise(uint32_t *state);

#endif
