/*
 * LoRA adapters: what is loaded of a folder, what is refused, and what they add to rows of a step.
 * The reference for every comparison of bits is the sequence computed alone, in one prefill, by one
 * rank.
 */
#include "model_bench.h"
#include "engine/compute/adapter.h"
#include "tests/lib/test.h"

#define LENGTH 21u
/* of a place in the cache */
#define PLACE_LENGTH 8u
#define ADAPTER_COUNT 3u
/* The adapter whose B is zero. */
#define ZERO 2

static const struct fixture_adapter kinds[ADAPTER_COUNT] = {
    {.rank = 4, .seed = 11},
    {.rank = 13, .alpha = 5, .seed = 12, .modules = "vo"},
    {.rank = 8, .seed = 13, .zero_b = true},
};
static const char *const names[ADAPTER_COUNT] = {"first", "second", "zero"};

/* ---- what is loaded ---- */

TEST_OWNED(cox_adapter_free)

static struct cox_adapter *load(const char *directory, const struct cox_model_config *config,
                                const struct cox_share *share)
{
    struct cox_adapter *adapter = NULL;

    assert_ok(cox_adapter_load(directory, config, share, &adapter, test_err()));
    return test_own(adapter, cox_adapter_free_owned);
}

/* Each part is that of the whole, and padding is zero. */
PLAIN_TEST(m13_a_share_has_its_parts_of_the_whole)
{
    for (size_t c = 0; c < FIXTURE_SHAPE_COUNT; c++) {
        const struct cox_model_config *config = &fixture_shapes[c];
        const struct cox_share all = {0};
        const size_t piece =
            (size_t)config->head_count * config->head_dim / cox_slice_count(config);
        const char *directory = test_folder();
        struct cox_adapter *whole;
        fixture_write_adapter(directory, config, &kinds[0]);
        whole = load(directory, config, &all);
        assert_int_equal(whole->rank, 8);
        for (uint32_t n = 1; n <= cox_slice_count(config); n++)
            for (uint32_t rank = 0; cox_slice_count(config) % n == 0 && rank < n; rank++) {
                const struct cox_share share = {.rank = rank, .rank_count = n};
                const struct cox_slices own = cox_share_slices(config, &share);
                struct cox_adapter *part;
                struct cox_kv_heads kv;

                kv = cox_share_kv_heads(config, &share);
                part = load(directory, config, &share);
                assert_true(part->digest == whole->digest);
                for (uint32_t layer = 0; layer < config->layer_count; layer++) {
                    for (uint32_t i = 0; i < own.count; i++) {
                        const uint32_t slice = own.first + i;

                        assert_memory_equal(
                            cox_adapter_b(part, layer, COX_PROJECTION_QUERY, i),
                            cox_adapter_b(whole, layer, COX_PROJECTION_QUERY, slice),
                            piece * whole->rank * sizeof(float));
                        assert_memory_equal(
                            cox_adapter_a(part, layer, COX_PROJECTION_OUTPUT, i),
                            cox_adapter_a(whole, layer, COX_PROJECTION_OUTPUT, slice),
                            piece * whole->rank * sizeof(float));
                    }
                    for (uint32_t i = 0; i < kv.count; i++)
                        assert_memory_equal(
                            cox_adapter_b(part, layer, COX_PROJECTION_VALUE, i),
                            cox_adapter_b(whole, layer, COX_PROJECTION_VALUE, kv.first + i),
                            (size_t)config->head_dim * whole->rank * sizeof(float));
                    for (size_t i = 4 * (size_t)config->hidden_size;
                         i < 8 * (size_t)config->hidden_size; i++)
                        assert_true(cox_adapter_a(part, layer, COX_PROJECTION_KEY, 0)[i] == 0);
                }
            }
    }
}

/* ---- in a step ---- */

/* Of all benches. */
static const char *model_directory, *adapter_directories[ADAPTER_COUNT];

static const struct cox_adapter *find(void *context, const char *lora_id)
{
    struct cox_adapter *const *adapters = context;

    for (size_t i = 0; i < ADAPTER_COUNT; i++)
        if (!strcmp(lora_id, names[i]))
            return adapters[i];
    return NULL;
}

static void files_create(const struct cox_model_config *config)
{
    model_directory = test_folder();
    fixture_write_model(model_directory, config, 3, 1);
    for (size_t i = 0; i < ADAPTER_COUNT; i++) {
        adapter_directories[i] = test_folder();
        fixture_write_adapter(adapter_directories[i], config, &kinds[i]);
    }
}

/* One model of one share, with its adapters. */
static struct bench *bench_of(const struct cox_model_config *config, const struct cox_share *share)
{
    struct cox_adapter **adapters = test_own(calloc(ADAPTER_COUNT, sizeof(*adapters)), free);
    const struct cox_model_options options = {
        .tile_count_max = 2, .share = *share, .adapters = {find, adapters}};

    for (size_t i = 0; i < ADAPTER_COUNT; i++)
        adapters[i] = load(adapter_directories[i], config, share);
    return bench_new(bench_load(model_directory, &options));
}

/* Tokens [position, position + count) in blocks of a place of their own. adapter -1: none. */
static void add_row(struct bench *bench, uint32_t place, uint32_t position, uint32_t count,
                    int adapter)
{
    bench_add(bench, bench->sequence, position, count, place * PLACE_LENGTH)->lora_id =
        adapter < 0 ? NULL : names[adapter];
}

static void step(struct bench *bench)
{
    assert_ok(bench_step(bench, test_err()));
}

/* The logits of the sequence with an adapter alone, by its number plus 1. */
static const float *references[ADAPTER_COUNT + 1];

static const float *reference_of(int adapter)
{
    return references[adapter + 1];
}

static struct bench *bench_with_references(const struct cox_model_config *config)
{
    const struct cox_share all = {0};
    struct bench *bench;

    files_create(config);
    bench = bench_of(config, &all);
    for (int adapter = -1; adapter < (int)ADAPTER_COUNT; adapter++) {
        bench_clear(bench);
        add_row(bench, 0, 0, LENGTH, adapter);
        step(bench);
        references[adapter + 1] = bench_keep(bench, 0);
    }
    bench_clear(bench);
    return bench;
}

/* A test over a whole model of each shape, fixture_shapes[c], and its references. */
#define SHAPES_TEST(name)                                                                          \
    static void name##_in(struct bench *bench, const struct cox_model_config *config);             \
    PLAIN_TEST(name)                                                                               \
    {                                                                                              \
        for (size_t c = 0; c < FIXTURE_SHAPE_COUNT; c++)                                           \
            name##_in(bench_with_references(&fixture_shapes[c]), &fixture_shapes[c]);              \
    }                                                                                              \
    static void name##_in(__attribute__((unused)) struct bench *bench,                             \
                          __attribute__((unused)) const struct cox_model_config *config)

SHAPES_TEST(m13_an_adapter_changes_logits_and_one_of_zeros_does_not)
{
    const size_t size = bench->vocab_size * sizeof(float);
    assert_memory_equal(reference_of(ZERO), reference_of(-1), size);
    assert_memory_not_equal(reference_of(0), reference_of(-1), size);
    assert_memory_not_equal(reference_of(1), reference_of(-1), size);
    assert_memory_not_equal(reference_of(0), reference_of(1), size);
}

/* Every row with an adapter of its own or none, at every place of a tile, decoding or whole. */
SHAPES_TEST(m13_s5_rows_of_any_adapters_have_the_bits_of_each_alone)
{
    for (uint32_t before = 0; before < 9; before++) {
        static const int order[] = {0, -1, 1, 0, 2, -1, 1, 1, 0, 2, 0, -1};
        bench_clear(bench);
        /* Rows of 1 to 3 tokens move the whole ones through all places. */
        for (uint32_t i = 0; i < before; i++)
            add_row(bench, i, 0, 1 + i % 3, order[i]);
        for (uint32_t i = 0; i < 3; i++)
            add_row(bench, before + i, 0, LENGTH, order[before + i]);
        step(bench);
        for (uint32_t i = 0; i < 3; i++)
            bench_expect(bench, before + i, reference_of(order[before + i]));
    }
    /* Prefill in chunks, then decode, all together. */
    for (uint32_t done = 0; done < LENGTH; done += done < 12 ? 5 : 1) {
        bench_clear(bench);
        for (uint32_t i = 0; i < 5; i++) {
            uint32_t left = LENGTH - done, count = done < 12 ? 5 : 1;

            add_row(bench, i, done, left < count ? left : count, (int)(i % 4) - 1);
        }
        step(bench);
    }
    for (uint32_t i = 0; i < 5; i++)
        bench_expect(bench, i, reference_of((int)(i % 4) - 1));
}

static void check_ranks(const struct cox_model_config *config, uint32_t rank_count)
{
    struct bench_group *group = bench_group_new(config, rank_count);

    for (uint32_t r = 0; r < rank_count; r++) {
        group->ranks[r] = bench_of(config, &group->shares[r]);
        for (uint32_t i = 0; i < 4; i++)
            add_row(group->ranks[r], i, 0, LENGTH, (int)i - 1);
    }
    bench_group_step(group);
    for (uint32_t r = 0; r < rank_count; r++)
        for (uint32_t i = 0; i < 4; i++)
            bench_expect(group->ranks[r], i, reference_of((int)i - 1));
}

SHAPES_TEST(m13_s5_adapters_give_the_same_bits_for_any_number_of_ranks)
{
    for (uint32_t rank_count = 1; rank_count <= cox_slice_count(config); rank_count++)
        if (cox_slice_count(config) % rank_count == 0)
            check_ranks(config, rank_count);
}

PLAIN_TEST(m13_an_unknown_adapter_is_refused_before_anything_happens)
{
    const struct cox_share all = {0};
    files_create(&fixture_shapes[0]);
    struct bench *bench = bench_of(&fixture_shapes[0], &all);
    add_row(bench, 0, 0, 3, 0);
    add_row(bench, 1, 0, 3, 0);
    bench->rows[1].lora_id = "missing";
    assert_refused(bench_step(bench, test_err()), COX_INVALID,
                   "sequence 101: there is no LoRA adapter 'missing' here");
}
