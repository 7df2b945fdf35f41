/*
 * LoRA adapters in a group of real ranks: requirement M13. The workers are this program, with the
 * engine of coxswain-worker on models/sums and two slots; each rank has a working directory of its
 * own, so that one rank can be refused what others get.
 */
#include "coordinator/executor/requests_internal.h"
#include "engine/batching/lora.h"
#include "engine/model/config.h"
#include "engine_worker.h"
#include "tests/unit/model_fixture.h"
#include "steps.h"

#define SHIPPED COX_TEST_SOURCE_DIR "/models/sums"
#define RANK_COUNT_MAX 4
#define SLOT_COUNT 2
#define PROMPT_LENGTH 6u
#define STEP_COUNT 8u
#define BLOCK_SIZE 4u
#define BLOCK_COUNT ((PROMPT_LENGTH + STEP_COUNT) / BLOCK_SIZE + 1)
#define STREAM_COUNT_MAX 4

#define LOAD COXSWAIN__LORA_OPERATION_TYPE__LOAD
#define UNLOAD COXSWAIN__LORA_OPERATION_TYPE__UNLOAD
#define STATUS(name) COXSWAIN__LORA_OPERATION_STATUS__##name

/* ---- the worker ---- */

static int worker_main(int argc, char **argv)
{
    static const struct cox_engine_options engine_options = {
        .model_dir = SHIPPED,
        .block_size = BLOCK_SIZE,
        .block_count = STREAM_COUNT_MAX * BLOCK_COUNT,
        .lora_slot_count = SLOT_COUNT,
    };
    return engine_worker_main(argc, argv, &engine_options, &cox_engine_callbacks, NULL);
}

/* ---- files ---- */

static char root[64]; /* rank folders, and adapters a, b, c, wrong, ranks */

static const struct {
    const char *name;
    struct fixture_adapter kind;
} adapters[] = {
    {"a", {.rank = 4, .seed = 1}},
    {"b", {.rank = 7, .seed = 2}},
    {"c", {.rank = 2, .seed = 3, .modules = "q"}},
    {"wrong", {.rank = 4, .a_more_columns = 1}},
    {"ranks", {.rank = 4, .b_rank = 5}},
};
#define ADAPTER_COUNT (sizeof adapters / sizeof adapters[0])

static const char *path_of(const char *name)
{
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", root, name);
    return path;
}

/* Under this name the files of another one. */
static void adapter_write_as(const char *name, const char *other)
{
    struct cox_model_config config;
    assert_ok(cox_model_config_load(SHIPPED "/config.json", &config, test_err()));
    assert_true(mkdir(path_of(name), 0700) == 0 || errno == EEXIST);
    for (size_t i = 0; i < ADAPTER_COUNT; i++)
        if (!strcmp(adapters[i].name, other))
            fixture_write_adapter(path_of(name), &config, &adapters[i].kind);
}

static void adapter_write(const char *name)
{
    adapter_write_as(name, name);
}

static const char *const rank_folders[RANK_COUNT_MAX] = {"0", "1", "2", "3"};

static int files_create(void **state)
{
    (void)state;
    strcpy(root, "/tmp/cox_lora_XXXXXX");
    assert_non_null(mkdtemp(root));
    for (size_t i = 0; i < ADAPTER_COUNT; i++)
        adapter_write(adapters[i].name);
    for (int rank = 0; rank < RANK_COUNT_MAX; rank++)
        assert_int_equal(mkdir(path_of(rank_folders[rank]), 0700), 0);
    return 0;
}

static int files_remove(void **state)
{
    (void)state;
    for (size_t i = 0; i < ADAPTER_COUNT; i++)
        fixture_directory_remove(path_of(adapters[i].name));
    for (int rank = 0; rank < RANK_COUNT_MAX; rank++)
        fixture_directory_remove(path_of(rank_folders[rank]));
    return rmdir(root);
}

/* ---- a group ---- */

static struct test_group *group_start(uint32_t rank_count)
{
    static char line[5000];
    static const char *command[] = {"sh", "-c", line, "worker", NULL};
    struct cox_init_summary summary;
    snprintf(line, sizeof line, "cd %s/$COXSWAIN_RANK && exec %s worker \"$@\"", root,
             test_program);
    struct test_group *group = test_group_start(rank_count, START_WITH(.workers.command = command));
    assert_ok(cox_executor_init(test_group_executor(group), NULL, 0, test_patience(), &summary,
                                test_err()));
    return group;
}

static int operate_until(struct test_group *group, int operation, const char *name,
                         const char *path, uint64_t deadline_ns, struct cox_lora_result *results,
                         struct cox_error *err)
{
    Coxswain__LoraOperationRequest lora = COXSWAIN__LORA_OPERATION_REQUEST__INIT;
    lora.lora_name = (char *)(uintptr_t)name;
    lora.lora_path = (char *)(uintptr_t)path;
    lora.has_lora_op_type = 1;
    lora.lora_op_type = (Coxswain__LoraOperationType)operation;
    return cox_executor_lora_results(test_group_executor(group), &lora, deadline_ns, results, err);
}

/* Every rank says the status, with these words. */
static void expect_status(struct test_group *group, int operation, const char *name,
                          const char *path, int status, const char *words)
{
    struct cox_lora_result results[RANK_COUNT_MAX];
    int r = operate_until(group, operation, name, path, test_patience(), results, test_err());
    if (r != (status ? COX_REJECTED : 0))
        fail_msg("%d: %s", r, test_error.text);
    for (uint32_t rank = 0; rank < cox_executor_rank_count(test_group_executor(group)); rank++) {
        if (results[rank].status != status)
            fail_msg("rank %" PRIu32 " says %s to '%s', not %s", rank,
                     cox_lora_status_name(results[rank].status), name,
                     cox_lora_status_name(status));
        assert_contains(results[rank].text, words);
        assert_int_equal(results[rank].text[0] != '\0', status != 0);
    }
    if (status)
        assert_contains(test_error.text, cox_lora_status_name(status));
}

static void load(struct test_group *group, const char *name)
{
    expect_status(group, LOAD, name, path_of(name), STATUS(LORA_CMD_SUCCESS), "");
}

static void unload(struct test_group *group, const char *name)
{
    expect_status(group, UNLOAD, name, NULL, STATUS(LORA_CMD_SUCCESS), "");
}

/* ---- streams of steps ---- */

struct stream {
    const char *lora;
    /* and its blocks */
    uint32_t slot;
    int64_t id;
    /* the ranks' tables have it */
    bool known;
    uint32_t count;
    int32_t tokens[PROMPT_LENGTH + STEP_COUNT];
    float logprobs[STEP_COUNT];
};

static struct stream stream_of(uint32_t slot, const char *lora)
{
    static const int32_t prompt[PROMPT_LENGTH] = {1, 5, 10, 13, 8, 11};
    static int64_t last_id;
    struct stream stream = {.lora = lora, .slot = slot, .id = ++last_id};
    memcpy(stream.tokens, prompt, sizeof prompt);
    return stream;
}

/* The next token of each stream, in one step on *base, which moves when it succeeds. finished: a
 * slot that is released first, -1: none. */
static int step(struct test_group *group, uint64_t *base, int finished, struct stream **streams,
                uint32_t count, struct cox_error *err)
{
    int32_t blocks[STREAM_COUNT_MAX][BLOCK_COUNT];
    uint32_t finished_slot = (uint32_t)finished;
    struct test_step s;
    OWN_COMPLETION c = {0};
    test_step_init(&s, *base, COXSWAIN__FORWARD_TYPE__MIXED);
    s.delta.n_finished = finished >= 0;
    s.delta.finished = &finished_slot;
    for (uint32_t i = 0; i < count; i++) {
        struct stream *stream = streams[i];
        const uint32_t length = PROMPT_LENGTH + stream->count;
        stream->known = stream->known && *base;
        for (uint32_t b = 0; b < BLOCK_COUNT; b++)
            blocks[i][b] = (int32_t)(stream->slot * BLOCK_COUNT + b);
        test_step_add(&s, &(struct test_row){.id = stream->id,
                                             .slot = stream->slot,
                                             .lora = stream->lora,
                                             .tokens = stream->tokens,
                                             .token_count = length,
                                             .position = stream->known ? length - 1 : 0,
                                             .announce = !stream->known,
                                             .blocks = blocks[i],
                                             .block_count = BLOCK_COUNT});
    }
    int r = test_step_call(group, &s, test_patience(), &c, err);
    if (r)
        return r;
    assert_true(c.token_count == count && c.logprob_count == count);
    *base = c.sequence;
    for (uint32_t i = 0; i < count; i++) {
        streams[i]->known = true;
        streams[i]->tokens[PROMPT_LENGTH + streams[i]->count] = c.tokens[i];
        streams[i]->logprobs[streams[i]->count++] = c.logprobs[i];
    }
    return 0;
}

static void rank_kill(struct test_group *group, uint32_t rank)
{
    assert_int_equal(kill(test_pid(group, rank), SIGKILL), 0);
}

static void steps(struct test_group *group, uint64_t *base, struct stream **streams, uint32_t count,
                  uint32_t step_count)
{
    for (uint32_t i = 0; i < step_count; i++)
        assert_ok(step(group, base, -1, streams, count, test_err()));
}

/* What one rank gives for a sequence alone, with the adapter. */
static const struct stream *alone(const char *lora)
{
    static struct stream references[3]; /* none, a, b */
    struct stream *reference = &references[lora ? lora[0] - 'a' + 1 : 0];
    if (reference->count == 0) {
        OWN_GROUP *group = group_start(1);
        struct stream stream = stream_of(0, lora), *streams[] = {&stream};
        uint64_t base = 0;
        if (lora)
            load(group, lora);
        steps(group, &base, streams, 1, STEP_COUNT);
        *reference = stream;
    }
    return reference;
}

/* Bit by bit. */
static void expect_alone(const struct stream *stream)
{
    const struct stream *reference = alone(stream->lora);
    assert_int_equal(stream->count, STEP_COUNT);
    assert_memory_equal(stream->tokens, reference->tokens, sizeof stream->tokens);
    assert_memory_equal(stream->logprobs, reference->logprobs, sizeof stream->logprobs);
}

/* ---- every rank's status ---- */

TEST(m13_the_7_statuses_come_from_every_rank)
{
    char long_name[130];
    memset(long_name, 'x', sizeof long_name - 1);
    long_name[sizeof long_name - 1] = '\0';
    for (uint32_t n = 1; n <= RANK_COUNT_MAX; n *= 2) {
        OWN_GROUP *g = group_start(n);
        expect_status(g, UNLOAD, "a", NULL, STATUS(INVALID_LORA_ID), "no adapter of that name");
        load(g, "a");
        expect_status(g, LOAD, "a", path_of("a"), STATUS(DUPLICATED_LORA_ID), "loaded already");
        expect_status(g, LOAD, "a", path_of("b"), STATUS(DUPLICATED_LORA_ID), "loaded already");
        expect_status(g, LOAD, "x", path_of("wrong"), STATUS(INVALID_LORA_PATH), "has the shape");
        expect_status(g, LOAD, "x", path_of("ranks"), STATUS(INVALID_LORA_RANK), "has rank 5");
        expect_status(g, LOAD, "x", path_of("nowhere"), STATUS(INVALID_LORA_PATH),
                      "does not exist");
        expect_status(g, LOAD, "x", "", STATUS(INVALID_LORA_PATH), "no adapter folder");
        expect_status(g, LOAD, "x", NULL, STATUS(INVALID_LORA_PATH), "no adapter folder");
        expect_status(g, LOAD, "", path_of("b"), STATUS(INVALID_LORA_ID), "1 to 128 bytes");
        expect_status(g, LOAD, "b\n", path_of("b"), STATUS(INVALID_LORA_ID), "control characters");
        expect_status(g, LOAD, long_name, path_of("b"), STATUS(INVALID_LORA_ID), "128 bytes");
        expect_status(g, 9, "a", path_of("a"), STATUS(UNSUPPORT_CMD), "no such operation: 9");
        load(g, "b");
        expect_status(g, LOAD, "c", path_of("c"), STATUS(SLOTS_FULL), "all 2 slots");
        unload(g, "a");
        load(g, "c");
        expect_status(g, UNLOAD, "a", NULL, STATUS(INVALID_LORA_ID), "no adapter of that name");
    }
}

TEST(m13_a_load_before_init_is_an_error)
{
    struct cox_lora_result results[2];
    OWN_GROUP *g = test_group_start(2, START_WITH(.workers.command = test_own_command));
    assert_refused(operate_until(g, LOAD, "a", path_of("a"), test_patience(), results, test_err()),
                   COX_REJECTED, "no model is loaded yet");
}

/* They belong to the model; what is said again changes nothing. */
TEST(m13_another_init_begins_without_adapters)
{
    OWN_GROUP *g = group_start(2);
    struct cox_init_summary summary;
    load(g, "a");
    assert_ok(cox_executor_replay_init(test_group_executor(g), test_patience(), test_err()));
    expect_status(g, LOAD, "a", path_of("a"), STATUS(DUPLICATED_LORA_ID), "loaded already");
    assert_ok(
        cox_executor_init(test_group_executor(g), NULL, 0, test_patience(), &summary, test_err()));
    expect_status(g, UNLOAD, "a", NULL, STATUS(INVALID_LORA_ID), "no adapter of that name");
    const struct cox_config_entry nowhere = {"model", "/nonexistent"};
    load(g, "a");
    assert_int_not_equal(cox_executor_init(test_group_executor(g), &nowhere, 1, test_patience(),
                                           &summary, test_err()),
                         0);
    expect_status(g, UNLOAD, "a", NULL, STATUS(INVALID_LORA_ID), "no adapter of that name");
}

/* ---- steps ---- */

TEST(m13_s5_sequences_of_any_adapters_in_one_batch_are_each_as_alone)
{
    /* Otherwise nothing is said. */
    assert_memory_not_equal(alone(NULL)->logprobs, alone("a")->logprobs, sizeof(float));
    assert_memory_not_equal(alone("b")->logprobs, alone("a")->logprobs, sizeof(float));
    for (uint32_t n = 1; n <= RANK_COUNT_MAX; n *= 2) {
        OWN_GROUP *g = group_start(n);
        struct stream own[] = {stream_of(0, "a"), stream_of(1, NULL), stream_of(2, "b"),
                               stream_of(3, "a")};
        struct stream *streams[] = {&own[0], &own[1], &own[2], &own[3]};
        uint64_t base = 0;
        load(g, "a");
        load(g, "b");
        steps(g, &base, streams, 4, 3);
        base = 0; /* computed anew, and announced again */
        steps(g, &base, streams, 4, STEP_COUNT - 3);
        for (int i = 0; i < 4; i++)
            expect_alone(&own[i]);
    }
}

TEST(m13_a_step_with_an_unknown_adapter_is_refused_and_no_harm)
{
    OWN_GROUP *g = group_start(2);
    struct stream good = stream_of(0, "a"), bad = stream_of(1, "missing");
    struct stream *both[] = {&good, &bad};
    uint64_t base = 0;
    load(g, "a");
    steps(g, &base, both, 1, 2);
    assert_refused(step(g, &base, -1, both, 2, test_err()), COX_REJECTED,
                   "there is no LoRA adapter 'missing' here");
    /* The tables are as they were. */
    steps(g, &base, both, 1, STEP_COUNT - 2);
    expect_alone(&good);
}

/* ---- unload waits ---- */

struct unloading {
    struct test_group *group;
    struct cox_lora_result results[RANK_COUNT_MAX];
    struct cox_error err;
    /* -1: not yet */
    _Atomic int result;
};

static void *unload_main(void *context)
{
    struct unloading *unloading = context;
    int r = operate_until(unloading->group, UNLOAD, "a", NULL, test_patience(), unloading->results,
                          &unloading->err);
    atomic_store(&unloading->result, r);
    return NULL;
}

TEST(m13_unload_waits_until_no_sequence_has_the_adapter)
{
    OWN_GROUP *g = group_start(2);
    struct stream old = stream_of(0, "a"), other = stream_of(1, "a"), plain = stream_of(2, NULL);
    struct stream *streams[] = {&old, &plain, &other};
    struct unloading unloading = {.group = g, .result = -1};
    struct cox_lora_result results[RANK_COUNT_MAX];
    uint64_t base = 0;
    alone("a");
    load(g, "a");
    steps(g, &base, streams, 2, 2);
    /* At its deadline it is still there, and takes sequences. */
    assert_refused(
        operate_until(g, UNLOAD, "a", NULL, cox_deadline_after_ms(2000), results, test_err()),
        COX_REJECTED, "still in use by 1 sequence");
    steps(g, &base, streams, 2, 1);
    pthread_t thread = test_thread(unload_main, &unloading);
    /* A new one is refused as soon as the ranks have begun. */
    int r;
    uint64_t deadline_ns = test_patience();
    do {
        r = step(g, &base, -1, streams + 2, 1, test_err());
        if (r == 0) {
            other = stream_of(1, "a");
            r = step(g, &base, 1, streams + 1, 1, test_err());
            assert_int_equal(r, 0);
            plain.count = 3;
        }
        assert_true(cox_now_ns() < deadline_ns);
    } while (r == 0);
    assert_refused(r, COX_REJECTED, "the LoRA adapter 'a' is being unloaded");
    /* The live one continues, also when it is announced again. */
    base = 0;
    steps(g, &base, streams, 2, 2);
    steps(g, &base, streams, 2, STEP_COUNT - 5);
    expect_alone(&old);
    assert_int_equal(atomic_load(&unloading.result), -1);
    /* It ends, and nothing else is waited for. */
    plain.count = 0;
    plain.known = false;
    plain.id = 1000;
    plain.slot = 3;
    assert_ok(step(g, &base, 0, streams + 1, 1, test_err()));
    pthread_join(thread, NULL);
    if (unloading.result)
        fail_msg("%s", unloading.err.text);
    other.known = false;
    assert_refused(step(g, &base, -1, streams + 2, 1, test_err()), COX_REJECTED,
                   "there is no LoRA adapter 'a' here");
    load(g, "a");
}

/* ---- loads beside steps ---- */

struct loading {
    struct test_group *group;
    struct cox_error err;
    _Atomic bool over;
    int result;
};

static void *loading_main(void *context)
{
    struct loading *loading = context;
    struct cox_lora_result results[RANK_COUNT_MAX];
    char path[128];
    snprintf(path, sizeof path, "%s/b", root);
    for (int i = 0; loading->result == 0 && i < 80; i++)
        loading->result =
            operate_until(loading->group, i % 2 ? UNLOAD : LOAD, "b", i % 2 ? NULL : path,
                          test_patience(), results, &loading->err);
    atomic_store(&loading->over, true);
    return NULL;
}

TEST(m13_adapters_come_and_go_while_steps_run)
{
    OWN_GROUP *g = group_start(2);
    struct loading loading = {.group = g};
    uint64_t base = 0, rounds = 0;
    alone("a");
    alone(NULL);
    load(g, "a");
    pthread_t thread = test_thread(loading_main, &loading);
    while (!atomic_load(&loading.over)) {
        struct stream own[] = {stream_of(0, "a"), stream_of(1, NULL)};
        struct stream *streams[] = {&own[0], &own[1]};
        base = 0;
        steps(g, &base, streams, 2, STEP_COUNT);
        expect_alone(&own[0]);
        expect_alone(&own[1]);
        rounds++;
    }
    pthread_join(thread, NULL);
    if (loading.result)
        fail_msg("%s", loading.err.text);
    assert_true(rounds > 0);
}

/* ---- ranks that agree ---- */

static struct cox_lora *lora_of(struct test_group *group)
{
    const struct cox_log log = {0};
    struct cox_lora *lora = NULL;
    assert_int_equal(cox_lora_new(test_group_executor(group), &log, &lora), 0);
    return lora;
}

/* Over a group of 2 with the adapters of ranks that agree; results is for one operation. */
#define LORA_TEST(name)                                                                            \
    static void name##_in(struct test_group *g, struct cox_lora *lora,                             \
                          struct cox_lora_result *results);                                        \
    TEST(name)                                                                                     \
    {                                                                                              \
        OWN_GROUP *g = group_start(2);                                                             \
        struct cox_lora *lora = lora_of(g);                                                        \
        struct cox_lora_result results[RANK_COUNT_MAX];                                            \
        name##_in(g, lora, results);                                                               \
        cox_lora_free(lora);                                                                       \
    }                                                                                              \
    static void name##_in(__attribute__((unused)) struct test_group *g, struct cox_lora *lora,     \
                          struct cox_lora_result *results)

/* "NAME STATE USES, ..." */
static const char *list_of(struct cox_lora *lora)
{
    static char text[256];
    struct cox_lora_info *infos;
    size_t count;
    text[0] = '\0';
    assert_int_equal(cox_lora_list(lora, &infos, &count), 0);
    for (size_t i = 0; i < count; i++)
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s%s %s %" PRIu64, i ? ", " : "",
                 infos[i].name, infos[i].state, infos[i].uses);
    free(infos);
    return text;
}

static void expect_list(struct cox_lora *lora, const char *expected)
{
    assert_string_equal(list_of(lora), expected);
}

static int lora_load(struct cox_lora *lora, const char *name, const char *path,
                     struct cox_lora_result *results, struct cox_error *err)
{
    return cox_lora_load(lora, name, path, test_patience(), results, err);
}

TEST(m13_what_one_rank_refuses_no_rank_keeps)
{
    struct cox_lora_result results[RANK_COUNT_MAX];
    char link[80];
    for (uint32_t has = 0; has < 2; has++) {
        OWN_GROUP *g = group_start(2);
        struct cox_lora *lora = lora_of(g);
        snprintf(link, sizeof link, "%s/%" PRIu32 "/adapter", root, has);
        assert_int_equal(symlink(path_of("a"), link), 0);
        assert_int_equal(lora_load(lora, "a", "/proc/self/cwd/adapter", results, test_err()),
                         COX_INVALID);
        assert_int_equal(results[has].status, STATUS(LORA_CMD_SUCCESS));
        assert_int_equal(results[1 - has].status, STATUS(INVALID_LORA_PATH));
        expect_list(lora, "");
        expect_status(g, UNLOAD, "a", NULL, STATUS(INVALID_LORA_ID), "");
        /* What there was stays where its name is asked for again. */
        assert_ok(lora_load(lora, "a", path_of("a"), results, test_err()));
        assert_int_equal(lora_load(lora, "a", path_of("b"), results, test_err()), COX_REJECTED);
        assert_int_equal(results[0].status, STATUS(DUPLICATED_LORA_ID));
        expect_list(lora, "a loaded 0");
        assert_int_equal(lora_load(lora, "b", "relative", results, test_err()), COX_INVALID);
        assert_int_equal(unlink(link), 0);
        cox_lora_free(lora);
    }
}

/* An unload of a, or a load of c, that has little time. */
static int order_soon(struct cox_lora *lora, bool unloads, struct cox_lora_result *results)
{
    const uint64_t soon = cox_deadline_after_ms(50);
    return unloads ? cox_lora_unload(lora, "a", soon, results, test_err())
                   : cox_lora_load(lora, "c", path_of("c"), soon, results, test_err());
}

/* A rank owes the reply to something else: an order finds no room until its deadline. */
LORA_TEST(m13_an_order_that_reached_no_rank_changes_nothing)
{
    test_needs_processes();
    const pid_t pid = test_pid(g, 1);
    assert_ok(lora_load(lora, "a", path_of("a"), results, test_err()));
    test_stop_process(pid);
    assert_int_equal(
        operate_until(g, 9, "x", NULL, cox_deadline_after_ms(1000), results, test_err()),
        COX_TIMEOUT);
    assert_true(results[1].asked); /* in time, also on a busy machine */
    for (int unloads = 0; unloads < 2; unloads++) {
        assert_int_not_equal(order_soon(lora, unloads, results), 0);
        assert_int_equal(results[0].status, -1);
        assert_false(results[0].asked || results[1].asked);
        expect_list(lora, "a loaded 0");
    }
    assert_ok(cox_lora_take(lora, "a", test_err()));
    cox_lora_give(lora, "a");
    assert_int_equal(kill(pid, SIGCONT), 0);
    assert_ok(cox_lora_unload(lora, "a", test_patience(), results, test_err()));
    expect_list(lora, "");
}

static void *give_main(void *context)
{
    cox_lora_give(context, "a");
    return NULL;
}

LORA_TEST(m13_an_adapter_that_prompts_use_stays)
{
    assert_int_equal(cox_lora_take(lora, "a", test_err()), COX_INVALID);
    assert_ok(lora_load(lora, "a", path_of("a"), results, test_err()));
    assert_ok(cox_lora_take(lora, "a", test_err()));
    expect_list(lora, "a loaded 1");
    assert_refused(cox_lora_unload(lora, "a", cox_deadline_after_ms(50), results, test_err()),
                   COX_BUSY, "still in use by 1 prompt");
    assert_int_equal(results[0].status, -1);
    expect_list(lora, "a loaded 1");
    pthread_t thread = test_thread(give_main, lora);
    assert_ok(cox_lora_unload(lora, "a", test_patience(), results, test_err()));
    pthread_join(thread, NULL);
    expect_list(lora, "");
    cox_lora_stop(lora);
    assert_int_equal(lora_load(lora, "a", path_of("a"), results, test_err()), COX_CLOSED);
}

/* ---- ranks that die ---- */

static void rank_replace(struct test_group *group, uint32_t rank)
{
    test_await_death(group, rank);
    assert_ok(cox_executor_restart(test_group_executor(group), rank, test_patience(), test_err()) ||
              cox_executor_replay_init(test_group_executor(group), test_patience(), test_err()));
}

static void lora_replay(struct cox_lora *lora)
{
    assert_ok(cox_lora_replay(lora, test_patience(), test_err()));
}

LORA_TEST(m13_p8_a_replaced_rank_gets_the_adapters_again)
{
    alone("a");
    alone("b");
    assert_ok(lora_load(lora, "a", path_of("a"), results, test_err()));
    assert_ok(lora_load(lora, "b", path_of("b"), results, test_err()));
    for (uint32_t victim = 0; victim < 2; victim++) {
        struct stream own[] = {stream_of(0, "a"), stream_of(1, "b")};
        struct stream *streams[] = {&own[0], &own[1]};
        uint64_t base = 0;
        steps(g, &base, streams, 2, 3);
        rank_kill(g, victim);
        rank_replace(g, victim);
        base = 0;
        /* The rank that has none says so, or the other one first that it was left alone. */
        int r = step(g, &base, -1, streams, 2, test_err());
        assert_true(r == COX_REJECTED || r == COX_ABORTED);
        lora_replay(lora);
        expect_list(lora, "a loaded 0, b loaded 0");
        steps(g, &base, streams, 2, STEP_COUNT - 3);
        expect_alone(&own[0]);
        expect_alone(&own[1]);
    }
}

/* Kills rank 1 once rank 0 has been asked. */
static void *dying_main(void *context)
{
    struct cox_executor *executor = test_group_executor(context);
    struct cox_executor_status status;
    struct cox_rank_status ranks[COX_RANK_COUNT_MAX];
    AWAIT((cox_executor_read_status(executor, &status, ranks),
           ranks[0].channels[COX_CHANNEL_LINK].sequence >= 2 &&
               ranks[0].channels[COX_CHANNEL_LINK].state == 0));
    kill(cox_executor_pid(executor, 1), SIGKILL);
    return NULL;
}

/* An order may come between the init of a new rank, which has no adapter yet, and the replay. */
TEST(m13_p8_a_name_in_use_has_the_same_files_on_every_rank)
{
    alone("a");
    for (uint32_t n = 1; n <= 2; n++) {
        OWN_GROUP *g = group_start(n);
        struct cox_lora *lora = lora_of(g);
        struct cox_lora_result results[RANK_COUNT_MAX];
        struct stream stream = stream_of(0, "a"), *streams[] = {&stream};
        uint64_t base = 0;
        assert_ok(lora_load(lora, "a", path_of("a"), results, test_err()));
        rank_kill(g, n - 1);
        rank_replace(g, n - 1);
        assert_refused(lora_load(lora, "a", path_of("b"), results, test_err()), COX_REJECTED,
                       "DUPLICATED_LORA_ID");
        lora_replay(lora);
        expect_list(lora, "a loaded 0");
        steps(g, &base, streams, 1, STEP_COUNT);
        expect_alone(&stream);
        cox_lora_free(lora);
    }
}

/* What is settled first has taken all of the order's time: the order itself was not begun. */
LORA_TEST(m13_p8_an_order_behind_one_that_cannot_be_settled_is_not_begun)
{
    test_needs_processes();
    assert_ok(lora_load(lora, "a", path_of("a"), results, test_err()));
    test_stop_process(test_pid(g, 1));
    /* Dead before it has read anything, and after the other one has. */
    pthread_t thread = test_thread(dying_main, g);
    assert_int_equal(lora_load(lora, "b", path_of("b"), results, test_err()), COX_PEER_DEAD);
    pthread_join(thread, NULL);
    expect_list(lora, "a loaded 0, b unsettled 0");
    rank_replace(g, 1);
    test_stop_process(test_pid(g, 1));
    for (int unloads = 0; unloads < 2; unloads++) {
        assert_refused(order_soon(lora, unloads, results), COX_TIMEOUT, "'b'");
        expect_list(lora, "a loaded 0, b unsettled 0");
    }
    assert_int_equal(kill(test_pid(g, 1), SIGCONT), 0);
    lora_replay(lora);
    expect_list(lora, "a loaded 0");
}

struct waiting_unload {
    struct cox_lora *lora;
    struct cox_error err;
    int result;
};

static void *waiting_unload_main(void *context)
{
    struct waiting_unload *unloading = context;
    struct cox_lora_result results[RANK_COUNT_MAX];
    unloading->result =
        cox_lora_unload(unloading->lora, "a", COX_DEADLINE_NEVER, results, &unloading->err);
    return NULL;
}

/* The prompt ends when the group is recovered, the recovery replays, and the unload waits for the
 * prompt. */
LORA_TEST(m13_p8_an_unload_that_waits_for_prompts_lets_the_recovery_pass)
{
    struct waiting_unload unloading = {.lora = lora};
    assert_ok(lora_load(lora, "a", path_of("a"), results, test_err()));
    assert_ok(cox_lora_take(lora, "a", test_err()));
    pthread_t thread = test_thread(waiting_unload_main, &unloading);
    AWAIT(strstr(list_of(lora), "a unloading"));
    rank_kill(g, 1);
    rank_replace(g, 1);
    lora_replay(lora);
    pthread_join(thread, NULL);
    assert_int_equal(unloading.result, COX_BUSY);
    assert_contains(unloading.err.text, "by 1 prompt, and ranks were replaced meanwhile");
    expect_list(lora, "a loaded 1");
    cox_lora_give(lora, "a");
    assert_ok(cox_lora_unload(lora, "a", test_patience(), results, test_err()));
    expect_list(lora, "");
}

LORA_TEST(m13_p8_files_that_are_gone_cost_the_group_nothing_that_is_not_used)
{
    for (int used = 1; used >= 0; used--) {
        assert_ok(lora_load(lora, "c", path_of("c"), results, test_err()));
        if (used)
            assert_ok(cox_lora_take(lora, "c", test_err()));
        fixture_directory_remove(path_of("c"));
        const uint32_t victim = used ? 1 : 0;
        rank_kill(g, victim);
        rank_replace(g, victim);
        if (used) {
            assert_refused(cox_lora_replay(lora, test_patience(), test_err()), COX_REJECTED,
                           "'c' is not loaded again");
            cox_lora_give(lora, "c");
        }
        lora_replay(lora);
        expect_list(lora, "");
        expect_status(g, UNLOAD, "c", NULL, STATUS(INVALID_LORA_ID), "");
        adapter_write("c");
    }
}

/* Under the same name: what other ranks compute with is nowhere any more. */
LORA_TEST(m13_p8_files_that_were_changed_are_not_loaded_again)
{
    for (int used = 1; used >= 0; used--) {
        assert_ok(lora_load(lora, "c", path_of("c"), results, test_err()));
        if (used)
            assert_ok(cox_lora_take(lora, "c", test_err()));
        adapter_write_as("c", "b");
        const uint32_t victim = used ? 1 : 0;
        rank_kill(g, victim);
        rank_replace(g, victim);
        if (used) {
            /* However often it is tried. */
            for (int i = 0; i < 2; i++) {
                assert_refused(cox_lora_replay(lora, test_patience(), test_err()), COX_REJECTED,
                               "differ from those that other ranks have loaded");
            }
            adapter_write("c");
            lora_replay(lora);
            expect_list(lora, "c loaded 1");
            cox_lora_give(lora, "c");
            assert_ok(cox_lora_unload(lora, "c", test_patience(), results, test_err()));
        } else {
            lora_replay(lora);
            expect_list(lora, "");
            expect_status(g, UNLOAD, "c", NULL, STATUS(INVALID_LORA_ID), "");
            adapter_write("c");
        }
    }
}

/* Each rank finds other files where the path leads it: as when they are changed in the middle of a
 * load. */
LORA_TEST(m13_ranks_that_read_other_files_keep_none)
{
    char links[2][80];
    for (uint32_t rank = 0; rank < 2; rank++) {
        snprintf(links[rank], sizeof links[rank], "%s/%" PRIu32 "/adapter", root, rank);
        assert_int_equal(symlink(path_of(rank ? "b" : "a"), links[rank]), 0);
    }
    assert_refused(lora_load(lora, "x", "/proc/self/cwd/adapter", results, test_err()),
                   COX_REJECTED, "rank 1 has read other files");
    expect_list(lora, "");
    expect_status(g, UNLOAD, "x", NULL, STATUS(INVALID_LORA_ID), "");
    for (uint32_t rank = 0; rank < 2; rank++)
        assert_int_equal(unlink(links[rank]), 0);
}

/* In a load, read or published, and in an unload. What there was before is there again, what was
 * not is not. */
TEST(m13_p8_a_rank_that_dies_in_an_operation_leaves_ranks_that_agree)
{
    static const struct {
        const char *plan;
        bool unloads;
    } cases[] = {
        {"lora.read:kill:1:2", false},   {"lora.loaded:kill:1:2", false},
        {"lora.read:kill:0:2", false},   {"lora.removed:kill:1:1", true},
        {"lora.removed:kill:0:1", true},
    };
#if !COX_TESTING
    skip();
#endif
    alone("a");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct cox_lora_result results[RANK_COUNT_MAX];
        const uint32_t victim = strstr(cases[i].plan, "kill:1") ? 1 : 0;
        setenv("COXSWAIN_FAULT", cases[i].plan, 1);
        setenv("COXSWAIN_FAULT_INCARNATION", "1", 1);
        OWN_GROUP *g = group_start(2);
        unsetenv("COXSWAIN_FAULT");
        unsetenv("COXSWAIN_FAULT_INCARNATION");
        struct cox_lora *lora = lora_of(g);
        assert_ok(lora_load(lora, "a", path_of("a"), results, test_err()));
        int r = cases[i].unloads ? cox_lora_unload(lora, "a", test_patience(), results, test_err())
                                 : lora_load(lora, "b", path_of("b"), results, test_err());
        if (r != COX_PEER_DEAD)
            fail_msg("%s: %d: %s", cases[i].plan, r, test_error.text);
        expect_list(lora, cases[i].unloads ? "a unsettled 0" : "a loaded 0, b unsettled 0");
        assert_int_equal(cox_lora_take(lora, cases[i].unloads ? "a" : "b", test_err()), COX_STATE);
        rank_replace(g, victim);
        lora_replay(lora);
        expect_list(lora, "a loaded 0");
        struct stream stream = stream_of(0, "a"), *streams[] = {&stream};
        uint64_t base = 0;
        steps(g, &base, streams, 1, STEP_COUNT);
        expect_alone(&stream);
        /* No rank has b: there is room for it, and it is not there twice. */
        if (lora_load(lora, "b", path_of("b"), results, test_err()))
            fail_msg("%s: %s", cases[i].plan, test_error.text);
        cox_lora_free(lora);
    }
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "worker") == 0)
        return worker_main(argc, argv);
    return test_run(files_create, files_remove);
}
