/* What is read from files or made of memory alone: models, tokenizers, prompts, the engine loop's
 * parts; with each of their calls failing in turn. */
#include "engine/batching/batcher.h"
#include "engine/batching/message.h"
#include "engine/compute/model.h"
#include "engine/compute/sample.h"
#include "engine/model/checkpoint.h"
#include "engine/model/file.h"
#include "engine/model/safetensors.h"
#include "engine/model/tokenizer.h"
#include "program/cli/group_options.h"
#include "program/engine/prompts.h"
#include "tests/unit/model_fixture.h"
#include "worker/sequences/adapter_references.h"
#include "countdown.h"
#include "testing.h"

#include <jansson.h>

#define MODEL COX_TEST_SOURCE_DIR "/models/sums"
#define JSON_SIZE_MAX 65536
/* Of a mistake in the text at some place, where the parser got no memory for what is there. */
#define NOT_JSON "is not valid JSON"

/* Documented for want of memory. */
static const int no_space[] = {COX_NO_SPACE, 0};

/* ---- files of a checkpoint ---- */

struct opened {
    int fd;
    uint64_t size;
};

static int file_open(void *object, struct cox_error *err)
{
    struct opened *opened = object;
    return cox_file_open(MODEL "/config.json", &opened->fd, &opened->size, err);
}

DESTROY(file_close, cox_close_fd(object))
CONSTRUCT(json_make, cox_json_load(MODEL "/config.json", JSON_SIZE_MAX, object, err))
DESTROY(json_drop, cox_json_unref(object))
CONSTRUCT(config_load, cox_model_config_load(MODEL "/config.json", object, err))
CONSTRUCT(safetensors_new, cox_safetensors_new(MODEL "/model.safetensors", object, err))
DESTROY(safetensors_free, cox_safetensors_freep(object))

static const char *checkpoint_folder;

CONSTRUCT(checkpoint_new, cox_checkpoint_new(checkpoint_folder, object, err))
DESTROY(checkpoint_free, cox_checkpoint_freep(object))

/* A folder with an index of one shard. */
static char sharded[64];

static void sharded_make(void)
{
    char path[128];
    snprintf(sharded, sizeof sharded, "countdown_%d", (int)getpid());
    assert_int_equal(mkdir(sharded, 0700), 0);
    snprintf(path, sizeof path, "%s/one.safetensors", sharded);
    assert_int_equal(symlink(MODEL "/model.safetensors", path), 0);
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", sharded);
    FILE *file = fopen(path, "we");
    assert_non_null(file);
    fputs("{\"weight_map\": {\"model.norm.weight\": \"one.safetensors\"}}", file);
    assert_int_equal(fclose(file), 0);
}

static void sharded_remove(void)
{
    char path[128];
    snprintf(path, sizeof path, "%s/one.safetensors", sharded);
    unlink(path);
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", sharded);
    unlink(path);
    rmdir(sharded);
}

/* ---- a model ---- */

static struct cox_model *own_model;

static const struct cox_model_options no_options;
static const struct cox_share whole;

CONSTRUCT(model_load, cox_model_load(MODEL, &no_options, object, err))
DESTROY(model_free, cox_model_freep(object))

/* The weights alone, in memory of the test. */
static struct cox_model_config config;
static float *weights;

static void weights_prepare(void)
{
    assert_ok(cox_model_config_load(MODEL "/config.json", &config, test_err()));
    const struct cox_weights_layout layout = cox_weights_layout(&config);
    weights = aligned_alloc(COX_WEIGHTS_ALIGNMENT, cox_weights_size(&layout));
    assert_non_null(weights);
    assert_ok(cox_weights_fill(&config, &whole, MODEL, weights, NULL, NULL, test_err()));
}

static void weights_restore(void)
{
    free(weights);
    weights = NULL;
}

CONSTRUCT(weights_fill, cox_weights_fill(&config, &whole, MODEL, weights, NULL, NULL, err))

static int forward_new(void *object, struct cox_error *err)
{
    const struct cox_adapter_source no_adapters = {0};
    const struct cox_weights_layout layout = cox_weights_layout(&config);
    return cox_forward_new(&config, &layout, weights, &whole, 2, &no_adapters, object, err);
}

DESTROY(forward_free, cox_forward_freep(object))
CONSTRUCT(sampler_new, cox_sampler_new(100, object, err))
DESTROY(sampler_free, cox_sampler_freep(object))

static int cache_new(void *object, struct cox_error *err)
{
    static const struct cox_cache_geometry geometry = {
        .layer_count = 2,
        .kv_head_count = 2,
        .head_dim = 4,
        .block_size = 8,
        .block_count = 4,
        .swap_block_count = 4,
    };
    return cox_cache_new(&geometry, object, err);
}

CONSTRUCT(model_cache_new, cox_model_cache_new(own_model, 4, 8, 2, object, err))
DESTROY(cache_free, cox_cache_freep(object))

/* Of a model that is smaller than the shipped one. */
static const struct cox_model_config adapter_model = {.hidden_size = 16,
                                                      .intermediate_size = 16,
                                                      .layer_count = 1,
                                                      .head_count = 8,
                                                      .kv_head_count = 8,
                                                      .head_dim = 2,
                                                      .vocab_size = 16,
                                                      .position_count_max = 16};
static char adapter_folder[FIXTURE_PATH_SIZE];

static int adapter_load(void *object, struct cox_error *err)
{
    return cox_adapter_load(adapter_folder, &adapter_model, &whole, object, err);
}

DESTROY(adapter_free, cox_adapter_freep(object))

/* ---- texts ---- */

static struct cox_tokenizer *own_tokenizer;

CONSTRUCT(tokenizer_load, cox_tokenizer_load(MODEL, object, err))
DESTROY(tokenizer_free, cox_tokenizer_freep(object))

struct eos {
    int32_t tokens[COX_EOS_COUNT_MAX];
    uint32_t count;
};

static int eos_load(void *object, struct cox_error *err)
{
    struct eos *eos = object;
    return cox_eos_load(MODEL, eos->tokens, &eos->count, err);
}

CONSTRUCT(vocab_size_load, cox_vocab_size_load(MODEL, object, err))
CONSTRUCT(positions_load, cox_positions_load(MODEL, object, err))
CONSTRUCT(text_digest_load, cox_text_digest_load(MODEL, object, err))

struct encoded {
    int32_t *tokens;
    char *text;
};

static int text_there_and_back(void *object, struct cox_error *err)
{
    struct encoded *encoded = object, made = {0};
    uint32_t count;
    int r = cox_tokenizer_encode(own_tokenizer, "27+58=", &made.tokens, &count, err);
    if (r)
        return r;
    r = cox_tokenizer_decode(own_tokenizer, made.tokens, count, &made.text);
    if (r) {
        free(made.tokens);
        return cox_fail(err, r, "decode: %s", cox_status_text(r));
    }
    *encoded = made;
    return 0;
}

static void encoded_free(void *object)
{
    struct encoded *encoded = object;
    free(encoded->tokens);
    free(encoded->text);
}

/* Enough lines for the list to grow. */
#define LINE_COUNT 40
static char prompts_path[64];

static void prompts_file_make(void)
{
    snprintf(prompts_path, sizeof prompts_path, "countdown_%d.txt", (int)getpid());
    FILE *file = fopen(prompts_path, "we");
    assert_non_null(file);
    for (int i = 0; i < LINE_COUNT; i++)
        fprintf(file, "%d+%d=\n", i, i + 1);
    assert_int_equal(fclose(file), 0);
}

/* On failure too the list owns what it has. */
static int prompts_read(void *object, struct cox_error *err)
{
    struct cox_prompts *prompts = object;
    *prompts = (struct cox_prompts){0};
    int r = cox_prompts_load(prompts, prompts_path, err);
    if (r == 0 && prompts->count != LINE_COUNT)
        r = cox_fail(err, COX_EMPTY, "%zu lines of %d", prompts->count, LINE_COUNT);
    if (r == 0)
        r = cox_prompts_encode(prompts, own_tokenizer, 0, err);
    if (r)
        cox_prompts_deinit(prompts);
    return r;
}

DESTROY(prompts_free, cox_prompts_deinit(object))

/* ---- look-ups of the command line ---- */

static int worker_find(void *object, struct cox_error *err)
{
    static struct cox_group_choice options;
    cox_group_choice_init(&options);
    return cox_worker_find(&options, object, err);
}

static int model_find(void *object, struct cox_error *err)
{
    static struct cox_group_choice options;
    cox_group_choice_init(&options);
    options.model = MODEL;
    return cox_model_find(&options, object, err);
}

/* ---- the engine loop's parts ---- */

CONSTRUCT(blocks_init, cox_blocks_init(object, 16))
DESTROY(blocks_deinit, cox_blocks_deinit(object))

/* With a request in it. */
static int plan_new(void *object, struct cox_error *err)
{
    static const struct cox_batcher_options options = {
        .sequence_count_max = 4,
        .token_count_max = 16,
        .block_count = 16,
        .block_size = 4,
        .position_count_max = 64,
    };
    static const int32_t tokens[] = {1, 2, 3};
    static const struct cox_prompt_request request = {
        .tokens = tokens, .token_count = 3, .new_count_max = 4, .lora = "adapter"};
    struct cox_batcher *plan = NULL;
    int r = cox_batcher_new(&options, &plan, err);
    if (r)
        return r;
    r = cox_batcher_add(plan, &request);
    if (r) {
        cox_batcher_free(plan);
        return cox_fail(err, r, "plan_add: %s", cox_status_text(r));
    }
    *(struct cox_batcher **)object = plan;
    return 0;
}

DESTROY(plan_free, cox_batcher_free(*(struct cox_batcher **)object))

static bool message_nested;

CONSTRUCT(message_new, cox_step_message_new(8, message_nested, object))
DESTROY(message_free, cox_step_message_free(*(struct cox_step_message **)object))

/* ---- adapters ---- */

CONSTRUCT(uses_new, cox_adapter_references_new(object))
DESTROY(uses_free, cox_adapter_references_free(*(struct cox_adapter_references **)object))

/* ---- tests ---- */

static void checkpoint_try(const char *folder)
{
    checkpoint_folder = folder;
    COUNTDOWN(EACH_MODE, SUBJECT(checkpoint_new, MAKES(struct cox_checkpoint *, checkpoint_free),
                                 .costly = true, .own_only = true));
}

TEST(b15_b19_files_are_closed_and_their_first_failure_is_reported)
{
    COUNTDOWN(EACH_MODE, SUBJECT(file_open, MAKES(struct opened, file_close)),
              SUBJECT(json_make, MAKES(json_t *, json_drop), .word = NOT_JSON),
              SUBJECT(config_load, .own_only = true, .size = sizeof(struct cox_model_config)),
              SUBJECT(safetensors_new, MAKES(struct cox_safetensors *, safetensors_free),
                      .costly = true, .word = NOT_JSON));
    checkpoint_try(MODEL);
    sharded_make();
    checkpoint_try(sharded);
    sharded_remove();
}

TEST(b15_b19_a_model_is_loaded_whole_or_not_at_all)
{
    const struct fixture_adapter kind = {.rank = 3};
    weights_prepare();
    fixture_directory_create(adapter_folder);
    fixture_write_adapter(adapter_folder, &adapter_model, &kind);
    COUNTDOWN(EACH_MODE,
              SUBJECT(model_load, MAKES(struct cox_model *, model_free), .own_only = true,
                      .codes = no_space, .costly = true),
              SUBJECT(weights_fill, .own_only = true, .costly = true),
              SUBJECT(forward_new, MAKES(struct cox_forward *, forward_free), .codes = no_space),
              SUBJECT(sampler_new, MAKES(struct cox_sampler *, sampler_free), .codes = no_space),
              SUBJECT(cache_new, MAKES(struct cox_cache *, cache_free), .codes = no_space,
                      .lenient = true),
              SUBJECT(adapter_load, MAKES(struct cox_adapter *, adapter_free), .word = NOT_JSON,
                      .codes = no_space));
    fixture_directory_remove(adapter_folder);
    weights_restore();
    assert_ok(model_load(&own_model, test_err()));
    COUNTDOWN(EACH_MODE, SUBJECT(model_cache_new, MAKES(struct cox_cache *, cache_free),
                                 .codes = no_space, .lenient = true));
    own_model = cox_model_free(own_model);
}

TEST(b15_b19_texts_are_read_whole_or_not_at_all)
{
    assert_ok(tokenizer_load(&own_tokenizer, test_err()));
    prompts_file_make();
    COUNTDOWN(
        EACH_MODE,
        SUBJECT(tokenizer_load, MAKES(struct cox_tokenizer *, tokenizer_free), .word = NOT_JSON),
        SUBJECT(eos_load, .own_only = true, .size = sizeof(struct eos)),
        SUBJECT(positions_load, .own_only = true, .size = sizeof(uint32_t)),
        SUBJECT(text_digest_load, .size = sizeof(uint64_t)),
        SUBJECT(vocab_size_load, .own_only = true, .size = sizeof(uint32_t)),
        NAMED_SUBJECT("tokenizer_encode and decode", text_there_and_back,
                      MAKES(struct encoded, encoded_free)),
        NAMED_SUBJECT("prompts_load and encode", prompts_read,
                      MAKES(struct cox_prompts, prompts_free), .in_place = true));
    unlink(prompts_path);
    own_tokenizer = cox_tokenizer_free(own_tokenizer);
}

COUNTDOWN_TEST(b19_look_ups_report_the_first_failure, EACH_MODE,
               /* A program that cannot be looked at is searched in PATH. */
               SUBJECT(worker_find, .size = sizeof(const char *), .lenient = true),
               SUBJECT(model_find, .size = sizeof(const char *)))

static void message_try(bool nested)
{
    message_nested = nested;
    COUNTDOWN(EACH_MODE, SUBJECT(message_new, MAKES(struct cox_step_message *, message_free),
                                 .wordless = true));
}

TEST(b19_a_plan_is_made_whole_or_not_at_all)
{
    COUNTDOWN(
        EACH_MODE,
        SUBJECT(uses_new, MAKES(struct cox_adapter_references *, uses_free), .wordless = true),
        SUBJECT(blocks_init, MAKES(struct cox_blocks, blocks_deinit), .in_place = true,
                .wordless = true),
        NAMED_SUBJECT("plan_new and add", plan_new, MAKES(struct cox_batcher *, plan_free)));
    message_try(false);
    message_try(true);
}

int main(void)
{
    json_set_alloc_funcs(countdown_malloc, countdown_free);
    return test_run(NULL, NULL);
}
