/*
 * LoRA adapters: what is loaded of a folder, what is refused, and what they add to rows of a step.
 * The reference for every comparison of bits is the sequence computed alone, in one prefill, by one
 * rank.
 */
#include "model_fixture.h"
#include "engine/compute/adapter.h"
#include "engine/compute/model.h"
#include "tests/lib/test.h"

#define LENGTH 21u
#define BLOCK_COUNT 128u
#define ROW_COUNT_MAX 12u
#define TABLE_LENGTH 8u
#define ADAPTER_COUNT 3u
/* The adapter whose B is zero. */
#define ZERO 2

/* The worker library's function; no batch is cancelled here. */
bool cox_batch_cancelled(const struct cox_batch *batch)
{
    (void)batch;
    return false;
}

static const struct fixture_adapter kinds[ADAPTER_COUNT] = {
    {.rank = 4, .seed = 11},
    {.rank = 13, .alpha = 5, .seed = 12, .modules = "vo"},
    {.rank = 8, .seed = 13, .zero_b = true},
};
static const char *const names[ADAPTER_COUNT] = {"first", "second", "zero"};
static const struct cox_sampling greedy = {.top_p = 1, .repetition_penalty = 1};

/* ---- what is loaded ---- */

TEST_OWNED(cox_adapter_free)

static struct cox_adapter *load(const char *directory, const struct cox_model_config *config,
                                const struct cox_share *share)
{
    struct cox_adapter *adapter = NULL;

    assert_ok(cox_adapter_load(directory, config, share, &adapter, test_err()));
    return test_own(adapter, cox_adapter_free_owned);
}

static void expect_refused(const struct cox_model_config *config,
                           const struct fixture_adapter *kind, int code, const char *words)
{
    const char *directory = fixture_directory();
    const struct cox_share share = {0};
    struct cox_adapter *adapter = NULL;
    fixture_write_adapter(directory, config, kind);
    assert_refused(cox_adapter_load(directory, config, &share, &adapter, test_err()), code, words);
    assert_null(adapter);
}

#define CONFIG_OF(more) "{\"r\":4,\"lora_alpha\":8,\"target_modules\":[\"q_proj\"]" more "}"

PLAIN_TEST(m13_an_adapter_of_another_shape_or_kind_is_refused)
{
    static const struct {
        struct fixture_adapter kind;
        int code;
        const char *words;
    } kinds_refused[] = {
        {{.rank = 4, .b_rank = 5}, COX_DIVERGED, "has rank 5; adapter_config.json says 4"},
        {{.rank = 65}, COX_DIVERGED, "r is 65; allowed: 1 to 64"},
        {{.rank = 4, .a_more_columns = 1}, COX_INVALID, "has the shape"},
        {{.rank = 4, .b_more_rows = 1}, COX_INVALID, "has the shape"},
        {{.rank = 4, .vector = true}, COX_INVALID, "has the shape"},
        {{.rank = 4, .skip = "layers.0.self_attn.k_proj.lora_B"}, COX_NOT_FOUND, "has no tensor"},
        {{.rank = 4, .extra = true}, COX_INVALID, "tensors; target_modules and the model imply"},
        {{.rank = 4, .not_finite = true}, COX_INVALID, "not finite"},
    };
    static const struct {
        const char *config;
        int code;
        const char *words;
    } texts_refused[] = {
        {"{\"r\":6,\"lora_alpha\":8,\"target_modules\":[\"q_proj\"]}", COX_DIVERGED,
         "has rank 4; adapter_config.json says 6"},
        {"{\"r\":0,\"lora_alpha\":8,\"target_modules\":[\"q_proj\"]}", COX_DIVERGED, "r is 0"},
        {"{\"r\":-1,\"lora_alpha\":8,\"target_modules\":[\"q_proj\"]}", COX_DIVERGED, "r is -1"},
        {"{\"r\":\"4\",\"lora_alpha\":8,\"target_modules\":[\"q_proj\"]}", COX_DIVERGED,
         "r is not an integer"},
        {"{\"lora_alpha\":8,\"target_modules\":[\"q_proj\"]}", COX_DIVERGED, "r is not an integer"},
        {"{", COX_CORRUPT, "adapter_config.json"},
        {"[]", COX_CORRUPT, "adapter_config.json"},
        {"{\"r\":4,\"target_modules\":[\"q_proj\"]}", COX_INVALID, "lora_alpha is not a number"},
        {"{\"r\":4,\"lora_alpha\":1e300,\"target_modules\":[\"q_proj\"]}", COX_INVALID,
         "lora_alpha is 1e+300"},
        {"{\"r\":4,\"lora_alpha\":8,\"target_modules\":\"all-linear\"}", COX_INVALID,
         "target_modules"},
        {"{\"r\":4,\"lora_alpha\":8,\"target_modules\":[]}", COX_INVALID, "target_modules"},
        {"{\"r\":4,\"lora_alpha\":8,\"target_modules\":[\"up_proj\"]}", COX_INVALID, "'up_proj'"},
        {"{\"r\":4,\"lora_alpha\":8,\"target_modules\":[7]}", COX_INVALID, "no name"},
        {CONFIG_OF(",\"peft_type\":\"LOHA\""), COX_INVALID, "LOHA"},
        {CONFIG_OF(",\"use_dora\":true"), COX_INVALID, "use_dora"},
        {CONFIG_OF(",\"bias\":\"all\""), COX_INVALID, "bias"},
        {CONFIG_OF(",\"use_dora\":\"true\""), COX_INVALID, "use_dora is \"true\""},
        {CONFIG_OF(",\"use_dora\":1"), COX_INVALID, "use_dora is 1"},
        {CONFIG_OF(",\"use_dora\":{}"), COX_INVALID, "use_dora is {}"},
        {CONFIG_OF(",\"lora_bias\":\"no\""), COX_INVALID, "lora_bias is \"no\""},
        {CONFIG_OF(",\"fan_in_fan_out\":0"), COX_INVALID, "fan_in_fan_out is 0"},
        {CONFIG_OF(",\"use_rslora\":\"true\""), COX_INVALID, "use_rslora"},
        {CONFIG_OF(",\"bias\":1"), COX_INVALID, "bias is 1"},
        {CONFIG_OF(",\"bias\":false"), COX_INVALID, "bias is false"},
        {CONFIG_OF(",\"bias\":[\"all\"]"), COX_INVALID, "bias is [\"all\"]"},
        {CONFIG_OF(",\"peft_type\":3"), COX_INVALID, "peft_type is 3"},
        {CONFIG_OF(",\"peft_type\":[\"LOHA\"]"), COX_INVALID, "peft_type is [\"LOHA\"]"},
        {CONFIG_OF(",\"rank_pattern\":{\"a\":1}"), COX_INVALID, "rank_pattern"},
        {CONFIG_OF(",\"modules_to_save\":[\"lm_head\"]"), COX_INVALID, "modules_to_save"},
        {CONFIG_OF(",\"layers_to_transform\":0"), COX_INVALID, "layers_to_transform"},
    };

    for (size_t i = 0; i < sizeof(kinds_refused) / sizeof(kinds_refused[0]); i++)
        expect_refused(&fixture_shapes[0], &kinds_refused[i].kind, kinds_refused[i].code,
                       kinds_refused[i].words);
    for (size_t i = 0; i < sizeof(texts_refused) / sizeof(texts_refused[0]); i++) {
        const struct fixture_adapter kind = {.rank = 4, .config = texts_refused[i].config};
        expect_refused(&fixture_shapes[0], &kind, texts_refused[i].code, texts_refused[i].words);
    }
}

/* null is what PEFT writes for "nothing". */
PLAIN_TEST(m13_an_empty_text_is_no_reason)
{
    static const struct fixture_adapter kind = {
        .rank = 4,
        .modules = "q",
        .config = CONFIG_OF(
            ",\"peft_type\":\"LORA\",\"bias\":null,\"use_dora\":null,\"lora_bias\":false,\"use_rslora\":null,\"rank_pattern\":{}")};
    const struct cox_share all = {0};
    const char *directory = fixture_directory();
    fixture_write_adapter(directory, &fixture_shapes[0], &kind);
    load(directory, &fixture_shapes[0], &all);
}

PLAIN_TEST(m13_missing_or_broken_files_are_refused)
{
    static const char *const files[] = {"adapter_config.json", "adapter_model.safetensors"};
    const struct cox_share share = {0};
    struct cox_adapter *adapter = NULL;
    char path[FIXTURE_PATH_SIZE + 64];

    for (size_t i = 0; i < 2; i++) {
        const char *directory = fixture_directory();
        fixture_write_adapter(directory, &fixture_shapes[0], &kinds[0]);
        fixture_write(directory, files[i], "nothing", 7);
        assert_refused(
            cox_adapter_load(directory, &fixture_shapes[0], &share, &adapter, test_err()),
            COX_CORRUPT, files[i]);
        snprintf(path, sizeof(path), "%s/%s", directory, files[i]);
        assert_int_equal(unlink(path), 0);
        assert_refused(
            cox_adapter_load(directory, &fixture_shapes[0], &share, &adapter, test_err()),
            COX_NOT_FOUND, files[i]);
        /* A folder, and a pipe without a writer: neither is waited for. */
        assert_int_equal(mkfifo(path, 0600), 0);
        assert_int_not_equal(
            cox_adapter_load(directory, &fixture_shapes[0], &share, &adapter, NULL), 0);
    }
    assert_int_equal(cox_adapter_load("/nonexistent", &fixture_shapes[0], &share, &adapter, NULL),
                     COX_NOT_FOUND);
    assert_null(adapter);
}

/* Each part is that of the whole, and padding is zero. */
PLAIN_TEST(m13_a_share_has_its_parts_of_the_whole)
{
    for (size_t c = 0; c < FIXTURE_SHAPE_COUNT; c++) {
        const struct cox_model_config *config = &fixture_shapes[c];
        const struct cox_share all = {0};
        const size_t piece =
            (size_t)config->head_count * config->head_dim / cox_slice_count(config);
        const char *directory = fixture_directory();
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

/* Of the numbers and of what they are multiplied with. */
PLAIN_TEST(m13_other_files_have_another_digest)
{
    static const struct fixture_adapter others[] = {
        {.rank = 4, .seed = 11},
        {.rank = 4, .seed = 12},
        {.rank = 4, .seed = 11, .alpha = 5},
        {.rank = 4, .seed = 11, .modules = "qkv"},
        {.rank = 5, .seed = 11},
    };
    const struct cox_share all = {0};
    uint64_t digests[5];

    for (size_t i = 0; i < 5; i++)
        for (int again = 0; again < 2; again++) {
            const char *directory = fixture_directory();
            struct cox_adapter *adapter;
            fixture_write_adapter(directory, &fixture_shapes[0], &others[i]);
            adapter = load(directory, &fixture_shapes[0], &all);
            if (again)
                assert_true(adapter->digest == digests[i]);
            digests[i] = adapter->digest;
            for (size_t other = 0; other < i; other++)
                assert_true(digests[other] != digests[i]);
        }
}

/* ---- in a step ---- */

/* One model of one share, with its adapters. */
struct bench {
    struct cox_model *model;
    struct cox_cache *cache;
    struct cox_adapter *adapters[ADAPTER_COUNT];
    uint32_t vocab_size;
    int32_t tokens[LENGTH];
    /* [ROW_COUNT_MAX][vocab_size] */
    float *logits;
    struct cox_batch_row rows[ROW_COUNT_MAX];
    struct cox_block_table tables[ROW_COUNT_MAX];
    int32_t blocks[ROW_COUNT_MAX][TABLE_LENGTH];
    struct cox_batch_output outputs[ROW_COUNT_MAX];
    struct cox_batch batch;
};

/* Of all benches. */
static const char *model_directory, *adapter_directories[ADAPTER_COUNT];

static const struct cox_adapter *find(void *context, const char *lora_id)
{
    const struct bench *bench = context;

    for (size_t i = 0; i < ADAPTER_COUNT; i++)
        if (!strcmp(lora_id, names[i]))
            return bench->adapters[i];
    return NULL;
}

static void files_create(const struct cox_model_config *config)
{
    model_directory = fixture_directory();
    fixture_write_model(model_directory, config, 3, 1);
    for (size_t i = 0; i < ADAPTER_COUNT; i++) {
        adapter_directories[i] = fixture_directory();
        fixture_write_adapter(adapter_directories[i], config, &kinds[i]);
    }
}

static void bench_free(void *object)
{
    struct bench *bench = object;
    cox_cache_free(bench->cache);
    cox_model_free(bench->model);
    free(bench->logits);
    free(bench);
}

static struct bench *bench_new(const struct cox_share *share)
{
    struct bench *bench = calloc(1, sizeof(*bench));
    const struct cox_model_options options = {
        .tile_count_max = 2, .share = *share, .adapters = {find, bench}};
    uint32_t noise = 7;
    assert_non_null(bench);
    assert_ok(cox_model_load(model_directory, &options, &bench->model, test_err()));
    assert_ok(
        cox_model_cache_new(bench->model, BLOCK_COUNT, 4, 0, NULL, &bench->cache, test_err()));
    bench->vocab_size = cox_model_config(bench->model)->vocab_size;
    for (size_t i = 0; i < ADAPTER_COUNT; i++)
        bench->adapters[i] = load(adapter_directories[i], cox_model_config(bench->model), share);
    for (uint32_t i = 0; i < LENGTH; i++)
        bench->tokens[i] = (int32_t)((fixture_noise(&noise) + 1) / 2 * (float)bench->vocab_size) %
                           (int32_t)bench->vocab_size;
    bench->logits = calloc((size_t)bench->vocab_size * ROW_COUNT_MAX, sizeof(float));
    assert_non_null(bench->logits);
    bench->batch = (struct cox_batch){.rows = bench->rows, .table_count = 1};
    return test_own(bench, bench_free);
}

/* Tokens [position, position + count) in blocks of a place of their own. adapter -1: none. */
static void add_row(struct bench *bench, uint32_t place, uint32_t position, uint32_t count,
                    int adapter)
{
    uint32_t row = bench->batch.row_count++;

    assert_true(row < ROW_COUNT_MAX);
    for (uint32_t i = 0; i < TABLE_LENGTH; i++)
        bench->blocks[row][i] = (int32_t)(place * TABLE_LENGTH + i);
    bench->tables[row] = (struct cox_block_table){bench->blocks[row], TABLE_LENGTH};
    bench->rows[row] = (struct cox_batch_row){
        .id = (int64_t)row + 100,
        .position = position,
        .token_count = count,
        .emit = true,
        .tokens = bench->tokens,
        .tables = &bench->tables[row],
        .sampling = &greedy,
        .lora_id = adapter < 0 ? NULL : names[adapter],
    };
}

static void step(struct bench *bench)
{
    assert_ok(cox_model_step(bench->model, bench->cache, &bench->batch, bench->outputs,
                             bench->logits, test_err()));
}

static void clear_rows(struct bench *bench)
{
    bench->batch.row_count = 0;
}

/* The logits of the sequence with each adapter alone, none last. */
static float *references_new(struct bench *bench)
{
    const size_t size = bench->vocab_size * sizeof(float);
    float *references = test_own(calloc(ADAPTER_COUNT + 1, size), free);
    assert_non_null(references);
    for (int adapter = 0; adapter <= (int)ADAPTER_COUNT; adapter++) {
        clear_rows(bench);
        add_row(bench, 0, 0, LENGTH, adapter == ADAPTER_COUNT ? -1 : adapter);
        step(bench);
        memcpy(references + (size_t)adapter * bench->vocab_size, bench->logits, size);
    }
    clear_rows(bench);
    return references;
}

static const float *reference_of(const struct bench *bench, const float *references, int adapter)
{
    return references + (adapter < 0 ? ADAPTER_COUNT : (size_t)adapter) * bench->vocab_size;
}

static void expect_row(const struct bench *bench, const float *references, uint32_t row,
                       int adapter)
{
    assert_memory_equal(bench->logits + (size_t)row * bench->vocab_size,
                        reference_of(bench, references, adapter),
                        bench->vocab_size * sizeof(float));
}

/* A test over a whole model of each shape, fixture_shapes[c], and its references. */
#define SHAPES_TEST(name)                                                                          \
    static void name##_in(struct bench *bench, const float *references, size_t c);                 \
    PLAIN_TEST(name)                                                                               \
    {                                                                                              \
        const struct cox_share all = {0};                                                          \
        for (size_t c = 0; c < FIXTURE_SHAPE_COUNT; c++) {                                         \
            files_create(&fixture_shapes[c]);                                                      \
            struct bench *bench = bench_new(&all);                                                 \
            name##_in(bench, references_new(bench), c);                                            \
        }                                                                                          \
    }                                                                                              \
    static void name##_in(__attribute__((unused)) struct bench *bench, const float *references,    \
                          __attribute__((unused)) size_t c)

SHAPES_TEST(m13_an_adapter_changes_logits_and_one_of_zeros_does_not)
{
    const size_t size = bench->vocab_size * sizeof(float);
    assert_memory_equal(reference_of(bench, references, ZERO), reference_of(bench, references, -1),
                        size);
    assert_memory_not_equal(reference_of(bench, references, 0), reference_of(bench, references, -1),
                            size);
    assert_memory_not_equal(reference_of(bench, references, 1), reference_of(bench, references, -1),
                            size);
    assert_memory_not_equal(reference_of(bench, references, 0), reference_of(bench, references, 1),
                            size);
}

/* Every row with an adapter of its own or none, at every place of a tile, decoding or whole. */
SHAPES_TEST(m13_s5_rows_of_any_adapters_have_the_bits_of_each_alone)
{
    for (uint32_t before = 0; before < 9; before++) {
        static const int order[] = {0, -1, 1, 0, 2, -1, 1, 1, 0, 2, 0, -1};
        clear_rows(bench);
        /* Rows of 1 to 3 tokens move the whole ones through all places. */
        for (uint32_t i = 0; i < before; i++)
            add_row(bench, i, 0, 1 + i % 3, order[i]);
        for (uint32_t i = 0; i < 3; i++)
            add_row(bench, before + i, 0, LENGTH, order[before + i]);
        step(bench);
        for (uint32_t i = 0; i < 3; i++)
            expect_row(bench, references, before + i, order[before + i]);
    }
    /* Prefill in chunks, then decode, all together. */
    for (uint32_t done = 0; done < LENGTH; done += done < 12 ? 5 : 1) {
        clear_rows(bench);
        for (uint32_t i = 0; i < 5; i++) {
            uint32_t left = LENGTH - done, count = done < 12 ? 5 : 1;

            add_row(bench, i, done, left < count ? left : count, (int)(i % 4) - 1);
        }
        step(bench);
    }
    for (uint32_t i = 0; i < 5; i++)
        expect_row(bench, references, i, (int)(i % 4) - 1);
}

struct rank {
    struct bench *bench;
    struct fixture_rank exchange;
    struct cox_share share;
    int result;
};

static void *run_rank(void *context)
{
    struct rank *rank = context;
    struct bench *bench = rank->bench;

    rank->result = cox_model_step(bench->model, bench->cache, &bench->batch, bench->outputs,
                                  bench->logits, NULL);
    return NULL;
}

static void check_ranks(const float *references, uint32_t rank_count)
{
    struct rank *ranks = test_own(calloc(rank_count, sizeof(*ranks)), free);
    pthread_t threads[COX_SLICE_COUNT_MAX];
    struct fixture_group group;

    assert_int_equal(pthread_barrier_init(&group.barrier, NULL, rank_count), 0);
    group.slices = test_own(calloc((size_t)1 << 20, sizeof(float)), free);
    assert_true(ranks && group.slices);
    for (uint32_t r = 0; r < rank_count; r++) {
        ranks[r].share = (struct cox_share){.rank = r,
                                            .rank_count = rank_count,
                                            .gather = fixture_exchange,
                                            .context = &ranks[r].exchange};
        ranks[r].bench = bench_new(&ranks[r].share);
        const struct cox_model_config *config = cox_model_config(ranks[r].bench->model);
        ranks[r].exchange = (struct fixture_rank){&group, cox_slice_count(config),
                                                  cox_share_slices(config, &ranks[r].share)};
        for (uint32_t i = 0; i < 4; i++)
            add_row(ranks[r].bench, i, 0, LENGTH, (int)i - 1);
    }
    for (uint32_t r = 0; r < rank_count; r++)
        assert_int_equal(pthread_create(&threads[r], NULL, run_rank, &ranks[r]), 0);
    for (uint32_t r = 0; r < rank_count; r++) {
        assert_int_equal(pthread_join(threads[r], NULL), 0);
        assert_int_equal(ranks[r].result, 0);
        for (uint32_t i = 0; i < 4; i++)
            expect_row(ranks[r].bench, references, i, (int)i - 1);
    }
    pthread_barrier_destroy(&group.barrier);
}

SHAPES_TEST(m13_s5_adapters_give_the_same_bits_for_any_number_of_ranks)
{
    for (uint32_t rank_count = 1; rank_count <= cox_slice_count(&fixture_shapes[c]); rank_count++)
        if (cox_slice_count(&fixture_shapes[c]) % rank_count == 0)
            check_ranks(references, rank_count);
}

PLAIN_TEST(m13_an_unknown_adapter_is_refused_before_anything_happens)
{
    const struct cox_share all = {0};
    files_create(&fixture_shapes[0]);
    struct bench *bench = bench_new(&all);
    add_row(bench, 0, 0, 3, 0);
    add_row(bench, 1, 0, 3, 0);
    bench->rows[1].lora_id = "missing";
    assert_refused(
        cox_model_step(bench->model, bench->cache, &bench->batch, bench->outputs, NULL, test_err()),
        COX_INVALID, "sequence 101: there is no LoRA adapter 'missing' here");
}
