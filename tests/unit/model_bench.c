#include "model_bench.h"
#include "tests/lib/test.h"

int bench_aborted_after = -1;

bool cox_batch_cancelled(const struct cox_batch *batch)
{
    (void)batch;
    return bench_aborted_after >= 0 && bench_aborted_after-- == 0;
}

struct cox_model *bench_load(const char *directory, const struct cox_model_options *options)
{
    const struct cox_model_options none = {0};
    struct cox_model *model = NULL;

    assert_ok(cox_model_load(directory, options ? options : &none, &model, test_err()));
    return model;
}

void bench_open_cache(struct bench *bench, uint32_t block_size)
{
    cox_cache_free(bench->cache);
    bench->cache = NULL;
    assert_ok(
        cox_model_cache_new(bench->model, BLOCK_COUNT, block_size, 8, &bench->cache, test_err()));
}

static void bench_free(void *object)
{
    struct bench *bench = object;
    cox_cache_free(bench->cache);
    cox_model_free(bench->model);
    free(bench->logits);
    free(bench);
}

struct bench *bench_new(struct cox_model *model)
{
    struct bench *bench = test_own(calloc(1, sizeof(*bench)), bench_free);
    const uint32_t vocab_size = cox_model_config(model)->vocab_size;
    uint32_t noise = 7;

    bench->model = model;
    bench->vocab_size = vocab_size;
    bench_open_cache(bench, 4);
    for (uint32_t i = 0; i < SEQUENCE_LENGTH; i++) {
        bench->sequence[i] = (int32_t)((fixture_noise(&noise) + 1) / 2 * (float)vocab_size);
        bench->noise[i] = (int32_t)((fixture_noise(&noise) + 1) / 2 * (float)vocab_size);
    }
    bench->logits = calloc((size_t)vocab_size * ROW_COUNT_MAX, sizeof(float));
    assert_non_null(bench->logits);
    bench_clear(bench);
    return bench;
}

struct cox_batch_row *bench_add(struct bench *bench, const int32_t *tokens, uint32_t position,
                                uint32_t count, uint32_t first_block)
{
    static const struct cox_sampling greedy = {.top_p = 1, .repetition_penalty = 1};
    uint32_t row = bench->batch.row_count++;

    assert_true(row < ROW_COUNT_MAX);
    for (uint32_t i = 0; i < TABLE_LENGTH; i++)
        bench->blocks[row][i] = (int32_t)((first_block + i) % BLOCK_COUNT);
    bench->tables[row] = (struct cox_block_table){bench->blocks[row], TABLE_LENGTH};
    bench->rows[row] = (struct cox_batch_row){
        .id = (int64_t)row + 100,
        .position = position,
        .token_count = count,
        .emit = true,
        .tokens = tokens,
        .tables = &bench->tables[row],
        .sampling = &greedy,
    };
    return &bench->rows[row];
}

void bench_clear(struct bench *bench)
{
    bench->batch = (struct cox_batch){.rows = bench->rows, .table_count = 1};
}

int bench_step(struct bench *bench, struct cox_error *err)
{
    return cox_model_step(bench->model, bench->cache, &bench->batch, bench->outputs, bench->logits,
                          err);
}

void bench_expect(const struct bench *bench, uint32_t row, const float *reference)
{
    assert_memory_equal(bench->logits + (size_t)row * bench->vocab_size, reference,
                        bench->vocab_size * sizeof(float));
}

float *bench_keep(const struct bench *bench, uint32_t row)
{
    const size_t size = bench->vocab_size * sizeof(float);

    return memcpy(test_own(malloc(size), free), bench->logits + (size_t)row * bench->vocab_size,
                  size);
}

static void group_free(void *object)
{
    struct bench_group *group = object;
    pthread_barrier_destroy(&group->exchange.barrier);
    free(group->exchange.slices);
    free(group);
}

struct bench_group *bench_group_new(const struct cox_model_config *config, uint32_t rank_count)
{
    struct bench_group *group = test_own(calloc(1, sizeof(*group)), group_free);

    assert_int_equal(pthread_barrier_init(&group->exchange.barrier, NULL, rank_count), 0);
    group->exchange.slices = calloc((size_t)1 << 20, sizeof(float));
    assert_non_null(group->exchange.slices);
    group->rank_count = rank_count;
    for (uint32_t r = 0; r < rank_count; r++) {
        group->shares[r] = (struct cox_share){.rank = r,
                                              .rank_count = rank_count,
                                              .gather = fixture_exchange,
                                              .context = &group->contexts[r]};
        group->contexts[r] = (struct fixture_rank){&group->exchange, cox_slice_count(config),
                                                   cox_share_slices(config, &group->shares[r])};
    }
    return group;
}

static void *step_main(void *bench)
{
    return (void *)(intptr_t)bench_step(bench, NULL);
}

void bench_group_step(struct bench_group *group)
{
    pthread_t threads[COX_SLICE_COUNT_MAX];
    void *result;

    for (uint32_t r = 0; r < group->rank_count; r++)
        threads[r] = test_thread(step_main, group->ranks[r]);
    for (uint32_t r = 0; r < group->rank_count; r++) {
        assert_int_equal(pthread_join(threads[r], &result), 0);
        assert_null(result);
    }
}
