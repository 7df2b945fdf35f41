/*
 * The forward pass and the step around it. The reference for every comparison of bits is the
 * sequence computed alone, in one prefill, by one rank.
 */
#include "model_bench.h"
#include "engine/model/model_image.h"
#include "engine/model/digest.h"
#include "tests/lib/test.h"

/* The linker sends the model's calls through here: once the digest is taken, other weights come
 * into the folder. */
static bool rewrites;

int __real_cox_model_digest_folder(const char *directory, uint64_t *ret_digest,
                                   struct cox_error *err);
int __wrap_cox_model_digest_folder(const char *directory, uint64_t *ret_digest,
                                   struct cox_error *err);

int __wrap_cox_model_digest_folder(const char *directory, uint64_t *ret_digest,
                                   struct cox_error *err)
{
    int r = __real_cox_model_digest_folder(directory, ret_digest, err);

    if (rewrites)
        fixture_write_model(directory, &fixture_shapes[0], 2, 1);
    return r;
}

/* The folder of the model that the test has, and the logits after the whole sequence, alone. */
static const struct cox_model_options none;
static const char *folder;
static const float *reference;

static void step_ok(struct bench *bench)
{
    assert_ok(bench_step(bench, test_err()));
}

static struct bench *bench_in_folder(const struct cox_model_config *config)
{
    struct bench *bench;

    bench_aborted_after = -1;
    folder = test_folder();
    fixture_write_model(folder, config, 3, 1);
    bench = bench_new(bench_load(folder, NULL));
    bench_add(bench, bench->sequence, 0, SEQUENCE_LENGTH, 0);
    step_ok(bench);
    reference = bench_keep(bench, 0);
    bench_clear(bench);
    return bench;
}

/* A test over a model of each shape, fixture_shapes[c]. */
#define SHAPES_TEST(name)                                                                          \
    static void name##_in(struct bench *bench, size_t c);                                          \
    PLAIN_TEST(name)                                                                               \
    {                                                                                              \
        for (size_t c = 0; c < FIXTURE_SHAPE_COUNT; c++)                                           \
            name##_in(bench_in_folder(&fixture_shapes[c]), c);                                     \
    }                                                                                              \
    static void name##_in(struct bench *bench, __attribute__((unused)) size_t c)

SHAPES_TEST(s5_logits_same_bits_at_any_place_in_a_batch)
{
    for (uint32_t before = 0; before < 10; before++) {
        bench_clear(bench);
        /* Rows of 1 to 3 tokens move the sequence through all places of a tile. */
        for (uint32_t i = 0; i < before; i++)
            bench_add(bench, bench->noise, 0, 1 + i % 3, 11 + i);
        bench_add(bench, bench->sequence, 0, SEQUENCE_LENGTH, 21);
        bench_add(bench, bench->noise, 0, 5, 90);
        step_ok(bench);
        bench_expect(bench, before, reference);
    }
}

SHAPES_TEST(s5_logits_same_bits_for_any_prefill_chunks)
{
    static const uint32_t chunks[] = {1, 2, 3, 7, 8, 9, 16, 36};
    for (size_t i = 0; i < sizeof(chunks) / sizeof(chunks[0]); i++) {
        bench_open_cache(bench, 4);
        for (uint32_t done = 0; done < SEQUENCE_LENGTH; done += chunks[i]) {
            uint32_t left = SEQUENCE_LENGTH - done;

            bench_clear(bench);
            bench_add(bench, bench->sequence, done, left < chunks[i] ? left : chunks[i], 5);
            step_ok(bench);
        }
        bench_expect(bench, 0, reference);
    }
}

/* A pass of one tile cuts the prompt in five; blocks of other sizes and places change nothing. */
SHAPES_TEST(s5_logits_same_bits_for_any_pass_and_block_size)
{
    static const uint32_t block_sizes[] = {1, 3, 4, 16, 64};
    const struct cox_model_options options = {.tile_count_max = 1};

    cox_model_free(bench->model);
    bench->model = bench_load(folder, &options);
    for (size_t i = 0; i < sizeof(block_sizes) / sizeof(block_sizes[0]); i++) {
        bench_open_cache(bench, block_sizes[i]);
        bench_clear(bench);
        bench_add(bench, bench->noise, 0, 3, 50);
        bench_add(bench, bench->sequence, 0, SEQUENCE_LENGTH, 70);
        step_ok(bench);
        bench_expect(bench, 1, reference);
    }
}

/* Decodes among others, dropped half-way and computed again as one prefill. */
SHAPES_TEST(s5_logits_same_bits_after_recomputation)
{
    bench_clear(bench);
    bench_add(bench, bench->sequence, 0, 5, 0);
    step_ok(bench);
    for (uint32_t done = 5; done < 20; done++) {
        bench_clear(bench);
        for (uint32_t i = 0; i < done % 4; i++)
            bench_add(bench, bench->noise, 0, 1, 60 + i);
        bench_add(bench, bench->sequence, done, 1, 0);
        step_ok(bench);
    }
    bench_clear(bench);
    bench_add(bench, bench->sequence, 0, 20, 30);
    step_ok(bench);
    for (uint32_t done = 20; done < SEQUENCE_LENGTH; done++) {
        bench_clear(bench);
        bench_add(bench, bench->sequence, done, 1, 30);
        step_ok(bench);
    }
    bench_expect(bench, 0, reference);
}

static struct cox_model *borrow(const void *image, const struct bench *bench,
                                const struct cox_model_options *options)
{
    struct cox_model *model;

    assert_ok(cox_model_borrow(image, cox_model_image_size(cox_model_config(bench->model)), options,
                               &model, test_err()));
    return model;
}

/* image NULL: each loads its own weights. */
static void check_ranks(struct bench *bench, uint32_t rank_count, const void *image)
{
    const struct cox_model_config *config = cox_model_config(bench->model);
    struct bench_group *group = bench_group_new(config, rank_count);

    for (uint32_t r = 0; r < rank_count; r++) {
        const struct cox_model_options options = {.share = group->shares[r]};
        const struct cox_weights_layout layout = cox_weights_share_layout(config, &options.share);
        struct cox_model *model =
            image ? borrow(image, bench, &options) : bench_load(folder, &options);

        assert_true(cox_model_digest(model) == cox_model_digest(bench->model));
        assert_int_equal(cox_model_weights_size(model), image ? 0 : cox_weights_size(&layout));
        group->ranks[r] = bench_new(model);
        bench_add(group->ranks[r], bench->noise, 0, 6, 80);
        bench_add(group->ranks[r], bench->sequence, 0, SEQUENCE_LENGTH, 3);
    }
    bench_group_step(group);
    for (uint32_t r = 0; r < rank_count; r++) {
        bench_expect(group->ranks[r], 1, reference);
        assert_int_equal(group->ranks[r]->outputs[1].token, group->ranks[0]->outputs[1].token);
    }
    for (uint32_t r = 0; r < rank_count; r++)
        test_release(group->ranks[r]);
}

/* The whole model in an image that describes itself; the caller frees it. */
static void *fill_image(void)
{
    struct cox_model_config config;
    void *image;

    assert_int_equal(cox_model_folder_config(folder, &config, NULL), 0);
    image = test_own(aligned_alloc(COX_WEIGHTS_ALIGNMENT, cox_model_image_size(&config)), free);
    assert_int_equal(cox_model_image_fill(&config, folder, image, NULL, NULL, NULL), 0);
    return image;
}

/* The next larger number of ranks that the model can be shared out to; 0: there is none. */
static uint32_t next_rank_count(size_t c, uint32_t rank_count)
{
    struct cox_share share = {.rank_count = rank_count + 1};

    while (share.rank_count <= COX_SLICE_COUNT_MAX &&
           cox_share_check(&fixture_shapes[c], &share, NULL) != 0)
        share.rank_count++;
    return share.rank_count <= COX_SLICE_COUNT_MAX ? share.rank_count : 0;
}

SHAPES_TEST(s5_logits_same_bits_for_any_number_of_ranks)
{
    void *image = fill_image();

    for (uint32_t rank_count = 1; rank_count; rank_count = next_rank_count(c, rank_count))
        check_ranks(bench, rank_count, image);
}

/* Each rank loads what its share needs and nothing else. */
SHAPES_TEST(s5_logits_same_bits_with_the_weights_of_a_share_alone)
{
    for (uint32_t rank_count = 1; rank_count; rank_count = next_rank_count(c, rank_count))
        check_ranks(bench, rank_count, NULL);
}

/* What is in private memory is 1/N of the whole, but for what must be everywhere. */
PLAIN_TEST(s5_weights_of_a_share_are_one_nth)
{
    for (size_t c = 0; c < FIXTURE_SHAPE_COUNT; c++) {
        const struct cox_model_config *config = &fixture_shapes[c];
        const struct cox_weights_layout all = cox_weights_layout(config);
        const uint64_t norms = all.query - all.attention_norm;
        const uint64_t all_norms = (2 * config->layer_count + 1) * norms;
        const uint64_t all_kv =
            2 * (uint64_t)config->layer_count * config->kv_head_count * all.kv_stride;

        for (uint32_t n = 1; n; n = next_rank_count(c, n))
            for (uint32_t rank = 0; rank < n; rank++) {
                const struct cox_share share = {.rank = rank, .rank_count = n};
                struct cox_weights_layout layout;
                uint64_t kv;

                assert_int_equal(cox_share_check(config, &share, NULL), 0);
                layout = cox_weights_share_layout(config, &share);
                kv = 2 * (uint64_t)config->layer_count * layout.kv_heads.count * all.kv_stride;
                assert_int_equal(layout.length,
                                 (all.length - all_norms - all_kv) / n + all_norms + kv);
                /* Divided, or one that others have as well; else the ranks at a border share one.
                 */
                if (config->kv_head_count % n == 0 || n % config->kv_head_count == 0)
                    assert_int_equal(layout.kv_heads.count, (config->kv_head_count + n - 1) / n);
                else
                    assert_in_range(layout.kv_heads.count, 1,
                                    (config->kv_head_count + n - 1) / n + 1);
            }
    }
}

PLAIN_TEST(s5_sampled_tokens_repeat_in_any_batch)
{
    const struct cox_sampling sampling = {
        .temperature = 0.8f, .top_p = 0.9f, .top_k = 20, .repetition_penalty = 1.2f, .seed = 99};
    struct cox_batch_output alone;

    struct bench *bench = bench_in_folder(&fixture_shapes[0]);
    bench_add(bench, bench->sequence, 0, SEQUENCE_LENGTH, 0);
    bench->rows[0].sampling = &sampling;
    step_ok(bench);
    alone = bench->outputs[0];
    assert_in_range(alone.token, 0, bench->vocab_size - 1);
    assert_true(alone.logprob < 0);
    bench_clear(bench);
    bench_add(bench, bench->noise, 0, 4, 40);
    bench->rows[0].emit = false;
    bench->rows[0].sampling = NULL;
    bench_add(bench, bench->sequence, SEQUENCE_LENGTH - 1, 1, 0);
    bench->rows[1].sampling = &sampling;
    step_ok(bench);
    assert_int_equal(bench->outputs[0].token, -1);
    assert_memory_equal(&bench->outputs[1], &alone, sizeof(alone));
}

PLAIN_TEST(block_moves_happen_before_the_rows)
{
    /* 36 positions in blocks 0 to 8 of 4 go out, come back at 20 and up, two by way of a copy. */
    struct cox_block_pair out[8], in[8], copy[2] = {{20, 40}, {8, 41}};

    struct bench *bench = bench_in_folder(&fixture_shapes[0]);
    bench_add(bench, bench->sequence, 0, SEQUENCE_LENGTH - 1, 0);
    step_ok(bench);
    for (int32_t i = 0; i < 8; i++) {
        out[i] = (struct cox_block_pair){i, 7 - i};
        in[i] = (struct cox_block_pair){7 - i, 20 + i};
    }
    bench_clear(bench);
    bench_add(bench, bench->sequence, SEQUENCE_LENGTH - 1, 1, 20);
    bench->blocks[0][0] = 40;
    bench->blocks[0][8] = 41;
    bench->batch.swap_out = out;
    bench->batch.swap_out_count = 8;
    bench->batch.swap_in = in;
    bench->batch.swap_in_count = 8;
    bench->batch.copy = copy;
    bench->batch.copy_count = 2;
    step_ok(bench);
    bench_expect(bench, 0, reference);
}

static void expect_refused(struct bench *bench, const char *word)
{
    assert_refused(bench_step(bench, test_err()), COX_INVALID, word);
}

/* Each row is wrong in one way; the first row is right and must not have been computed. */
PLAIN_TEST(step_refuses_a_bad_row_without_effect)
{
    const struct cox_sampling hot = {.temperature = -1, .top_p = 1, .repetition_penalty = 1};
    const struct cox_block_pair pair = {0, (int32_t)BLOCK_COUNT};
    struct bench *bench = bench_in_folder(&fixture_shapes[0]);
    const size_t size =
        (size_t)cox_cache_block_size(cox_cache_geometry(bench->cache)) * BLOCK_COUNT;
    void *before = test_own(malloc(size), free);
    memcpy(before, cox_cache_block(bench->cache, 0), size);

    for (int wrong = 0; wrong < 9; wrong++) {
        static const char *const words[] = {"0 tokens",    "positions below", "token 61",
                                            "token -1",    "KV blocks",       "KV block 96",
                                            "KV block -1", "temperature",     "copy 0"};
        int32_t tokens[SEQUENCE_LENGTH];
        struct cox_batch_row *row;

        memcpy(tokens, bench->sequence, sizeof(tokens));
        bench_clear(bench);
        bench_add(bench, bench->noise, 0, 9, 50);
        bench_add(bench, tokens, 1, SEQUENCE_LENGTH - 1, 0);
        row = &bench->rows[1];
        // clang-format off
        switch (wrong) {
        case 0: row->token_count = 0; break;
        case 1: row->position = UINT32_MAX; break;
        case 2: tokens[3] = 61; break;
        case 3: tokens[0] = -1; break;
        case 4: bench->tables[1].count = 9; break;
        case 5: bench->blocks[1][9] = (int32_t)BLOCK_COUNT; break;
        case 6: bench->blocks[1][0] = -1; break;
        case 7: row->sampling = &hot; break;
        default: bench->batch.copy = &pair; bench->batch.copy_count = 1;
        }
        // clang-format on
        expect_refused(bench, words[wrong]);
        assert_memory_equal(cox_cache_block(bench->cache, 0), before, size);
    }
}

PLAIN_TEST(step_stops_between_layers_when_given_up)
{

    struct bench *bench = bench_in_folder(&fixture_shapes[0]);
    for (int after = 0; after < 3; after++) {
        bench_clear(bench);
        bench_add(bench, bench->sequence, 0, SEQUENCE_LENGTH, 0);
        bench_aborted_after = after;
        assert_int_equal(bench_step(bench, NULL), COX_ABORTED);
    }
    bench_aborted_after = -1;
    step_ok(bench);
    bench_expect(bench, 0, reference);
}

PLAIN_TEST(step_without_rows_does_nothing)
{
    struct bench *bench = bench_in_folder(&fixture_shapes[0]);
    bench->batch = (struct cox_batch){.forward_type = COX_FORWARD_DUMMY};
    step_ok(bench);
}

PLAIN_TEST(cache_of_another_model_is_refused)
{
    struct cox_cache_geometry geometry;
    struct cox_cache *cache;

    struct bench *bench = bench_in_folder(&fixture_shapes[0]);
    geometry = cox_model_cache_geometry(bench->model, BLOCK_COUNT, 4, 0);
    geometry.layer_count++;
    cache = bench->cache;
    assert_int_equal(cox_cache_new(&geometry, &bench->cache, NULL), 0);
    bench_add(bench, bench->sequence, 0, 1, 0);
    expect_refused(bench, "layers");
    cox_cache_free(cache);
}

static void load_fails(const char *directory, const struct cox_model_options *options, int code,
                       const char *word)
{
    struct cox_model *model = NULL;

    assert_refused(cox_model_load(directory, options, &model, test_err()), code, word);
    assert_null(model);
}

PLAIN_TEST(load_refuses_what_cannot_be)
{
    struct cox_model_options options = {.share = {.rank = 0, .rank_count = 2}};
    const char *directory = test_folder();

    load_fails(directory, &none, COX_NOT_FOUND, "config.json");
    fixture_write_model(directory, &fixture_shapes[0], 1, 1);
    load_fails(directory, &options, COX_INVALID, "no gather function");
    options = (struct cox_model_options){.share = {.rank_count = 3, .gather = fixture_exchange}};
    load_fails(directory, &options, COX_INVALID, "8 slices");
    options = (struct cox_model_options){
        .share = {.rank = 2, .rank_count = 2, .gather = fixture_exchange}};
    load_fails(directory, &options, COX_INVALID, "rank 2 of 2");
    options = (struct cox_model_options){.share = {.rank = 5, .gather = fixture_exchange}};
    load_fails(directory, &options, COX_INVALID, "rank 5 of 1");
    options = (struct cox_model_options){.tile_count_max = COX_TILE_COUNT_MAX + 1};
    load_fails(directory, &options, COX_INVALID, "tile_count_max");
}

/* Ranks that load by themselves tell what they have by the digest alone. */
PLAIN_TEST(load_refuses_what_changes_meanwhile)
{
    const char *directory = test_folder();

    fixture_write_model(directory, &fixture_shapes[0], 1, 1);
    rewrites = true;
    load_fails(directory, &none, COX_INVALID, "changed while it was read");
    rewrites = false;
    cox_model_free(bench_load(directory, NULL));
}

/* Of every number of ranks up to 20; the rest of the message is that of the numbers that go. */
static void check_rank_counts(uint32_t heads, uint32_t kv_heads, uint32_t slices, const char *list)
{
    struct cox_model_config config = fixture_shapes[0];

    config.head_count = heads;
    config.kv_head_count = kv_heads;
    assert_int_equal(cox_slice_count(&config), slices);
    for (uint32_t n = 1; n <= 20; n++) {
        const struct cox_share share = {.rank = n - 1, .rank_count = n};
        const struct cox_share behind = {.rank = n, .rank_count = n};
        const struct cox_slices own = cox_share_slices(&config, &share);
        const bool fits = slices % n == 0;
        struct cox_error err = {0};
        char words[32];

        assert_int_equal(cox_share_check(&config, &share, &err), fits ? 0 : COX_INVALID);
        if (fits) {
            assert_int_equal(own.count, slices / n);
            assert_int_equal(own.first + own.count, slices);
            assert_int_equal(cox_share_check(&config, &behind, NULL), COX_INVALID);
            continue;
        }
        snprintf(words, sizeof(words), "-n %u: heads", n);
        assert_contains(err.text, words);
        snprintf(words, sizeof(words), "in %u slices", slices);
        assert_contains(err.text, words);
        assert_contains(err.text, list);
    }
}

PLAIN_TEST(g4b_ranks_that_do_not_divide_the_slices_are_refused)
{
    check_rank_counts(8, 4, 8, "use 1, 2, 4 or 8 ranks");
    check_rank_counts(40, 5, 8, "use 1, 2, 4 or 8 ranks");
    check_rank_counts(9, 3, 3, "use 1 or 3 ranks");
    check_rank_counts(15, 5, 5, "use 1 or 5 ranks");
    check_rank_counts(12, 4, 4, "use 1, 2 or 4 ranks");
    check_rank_counts(12, 12, 12, "use 1, 2, 3, 4, 6 or 12 ranks");
    check_rank_counts(71, 1, 1, "use 1 rank");
    /* As many as divide the heads, at most 64. */
    check_rank_counts(100, 100, 50, "use 1, 2, 5, 10, 25 or 50 ranks");
    check_rank_counts(60, 60, 60, "use 1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30 or 60 ranks");
}

PLAIN_TEST(weights_of_another_model_are_refused)
{
    struct cox_model_config longer = fixture_shapes[0], shorter = longer, tied = longer,
                            wider = longer;
    longer.layer_count++;
    shorter.layer_count = 1;
    tied.tied_embeddings = true;
    wider.intermediate_size += 8;
    const struct {
        const struct cox_model_config *config;
        int code;
        const char *words[2];
    } cases[] = {
        {&longer, COX_NOT_FOUND, {"model.layers.2.", ""}},
        /* What is there and would be left out. */
        {&shorter, COX_INVALID, {"has no tensor model.layers.1.", ""}},
        {&tied, COX_INVALID, {"tensor lm_head.weight differs", "tie_word_embeddings"}},
        {&wider, COX_INVALID, {"[176, 64]", "[184, 64]"}},
        {&fixture_shapes[0], COX_NOT_FOUND, {"neither", ""}},
    };
    const char *directory = test_folder();
    char path[FIXTURE_PATH_SIZE + 32];
    float *memory = test_own(calloc((size_t)1 << 20, sizeof(float)), free);
    assert_non_null(memory);
    fixture_write_model(directory, &fixture_shapes[0], 1, 1);
    snprintf(path, sizeof(path), "%s/model.safetensors", directory);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        if (cases[i].config == &fixture_shapes[0]) /* the model itself, whose file is gone */
            assert_int_equal(remove(path), 0);
        for (int word = 0; word < 2; word++)
            assert_refused(cox_weights_fill(cases[i].config, &(struct cox_share){0}, directory,
                                            memory, NULL, NULL, test_err()),
                           cases[i].code, cases[i].words[word]);
    }
}

PLAIN_TEST(sharded_checkpoint_is_the_same_model)
{
    const char *directory = test_folder();
    char path[FIXTURE_PATH_SIZE + 48];
    const char escape[] = "{\"weight_map\":{\"a\":\"../model.safetensors\"}}";

    struct bench *bench = bench_in_folder(&fixture_shapes[0]);
    fixture_write_model(directory, &fixture_shapes[0], 3, 3);
    cox_model_free(bench->model);
    bench->model = bench_load(directory, NULL);
    bench_add(bench, bench->sequence, 0, SEQUENCE_LENGTH, 0);
    step_ok(bench);
    bench_expect(bench, 0, reference);

    snprintf(path, sizeof(path), "%s/model-00002-of-00003.safetensors", directory);
    assert_int_equal(remove(path), 0);
    load_fails(directory, &none, COX_NOT_FOUND, "model-00002-of-00003");
    fixture_write(directory, "model.safetensors.index.json", escape, sizeof(escape) - 1);
    load_fails(directory, &none, COX_INVALID, "weight_map");
    fixture_write(directory, "model.safetensors.index.json", "{}", 2);
    load_fails(directory, &none, COX_INVALID, "weight_map");
}
