/*
 * model_bench: a model with its cache and rows to fill, alone or as the ranks of a group.
 *
 * Everything is the test's (test_own); failures end it through cmocka. The program has the worker
 * library's cox_batch_cancelled from here.
 */
#ifndef COX_TESTS_UNIT_MODEL_BENCH_H
#define COX_TESTS_UNIT_MODEL_BENCH_H

#include "model_fixture.h"
#include "engine/compute/model.h"

#define SEQUENCE_LENGTH 37u
#define BLOCK_COUNT 96u
#define ROW_COUNT_MAX 24u
#define TABLE_LENGTH 40u

struct bench {
    struct cox_model *model;
    struct cox_cache *cache;
    uint32_t vocab_size;
    int32_t sequence[SEQUENCE_LENGTH];
    /* another sequence */
    int32_t noise[SEQUENCE_LENGTH];
    /* [ROW_COUNT_MAX][vocab_size] */
    float *logits;
    struct cox_batch_row rows[ROW_COUNT_MAX];
    struct cox_block_table tables[ROW_COUNT_MAX];
    int32_t blocks[ROW_COUNT_MAX][TABLE_LENGTH];
    struct cox_batch_output outputs[ROW_COUNT_MAX];
    struct cox_batch batch;
};

/* Of the model, which it takes. The cache has blocks of 4. */
struct bench *bench_new(struct cox_model *model);

struct cox_model *bench_load(const char *directory, const struct cox_model_options *options);

/* Another cache, of blocks of this size. */
void bench_open_cache(struct bench *bench, uint32_t block_size);

/* Adds tokens [position, position + count) of a sequence whose blocks count up from first_block. */
struct cox_batch_row *bench_add(struct bench *bench, const int32_t *tokens, uint32_t position,
                                uint32_t count, uint32_t first_block);
void bench_clear(struct bench *bench);

int bench_step(struct bench *bench, struct cox_error *err);

/* The row's logits have the bits of the reference. */
void bench_expect(const struct bench *bench, uint32_t row, const float *reference);

/* The row's logits, which the caller frees by test_own. */
float *bench_keep(const struct bench *bench, uint32_t row);

/* Ranks as threads: the test makes the model of ranks[r] with shares[r]. */
struct bench_group {
    struct fixture_group exchange;
    uint32_t rank_count;
    struct fixture_rank contexts[COX_SLICE_COUNT_MAX];
    struct cox_share shares[COX_SLICE_COUNT_MAX];
    struct bench *ranks[COX_SLICE_COUNT_MAX];
};
struct bench_group *bench_group_new(const struct cox_model_config *config, uint32_t rank_count);

/* All ranks step their rows, which succeeds. */
void bench_group_step(struct bench_group *group);

/* The batch is cancelled when it was looked at so many times; -1: never. */
extern int bench_aborted_after;

#endif
