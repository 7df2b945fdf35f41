/*
 * Other weights between two steps of real ranks: which step is computed with which, bit by bit the
 * same for any number of ranks, also where one of them dies in the switch, or is hostile. The
 * workers are this program, with the engine of coxswain-worker. One rank cannot mix two versions in
 * a step: its texts are the reference.
 */
#include "testing.h"
#include "weights_attack.h"

#include "coordinator/recovery/recovery.h"
#include "engine/batching/engine_loop.h"
#include "engine/batching/shared_weights.h"
#include "tests/unit/model_fixture.h"
#include "engine_worker.h"

#define PROMPT_COUNT 6u
#define PROMPT_LENGTH 5u
#define NEW_COUNT 14u
#define LENGTH (PROMPT_LENGTH + NEW_COUNT)
/* Before so many steps are planned: the prompts are one step, so the sequences have so many tokens
 * less one of their own. */
#define SWITCH_LOOK 6u
#define NEVER UINT32_MAX
#define SWITCH_COUNT 200u

static const struct cox_model_config config = {
    .hidden_size = 64,
    .intermediate_size = 64,
    .layer_count = 2,
    .head_count = 8,
    .kv_head_count = 8,
    .head_dim = 8,
    .vocab_size = 257,
    .position_count_max = 64,
    .rms_norm_eps = 1e-5f,
    .rope_theta = 10000,
};

/* ---- the worker ---- */

/* Of the hostile rank, in all its incarnations: its action before each step, and the file to which
 * it writes it. */
#define HOSTILE 1u
#define ATTACK "COX_TEST_ATTACK"
#define REPORT "COX_TEST_REPORT"

static void (*attack)(int report_fd);
static int report_fd;

static void attack_choose(struct cox_worker_options *options)
{
    const char *name = getenv(ATTACK);
    if (name && options->rank == HOSTILE) {
        report_fd = open(getenv(REPORT), O_WRONLY | O_APPEND | O_CLOEXEC);
        attack = strcmp(name, "words") == 0 ? weights_attack_words : weights_attack_memory;
    }
}

static int on_execute(void *context, const struct cox_batch *batch,
                      struct cox_batch_output *outputs, struct cox_error *err)
{
    if (attack)
        attack(report_fd);
    return cox_engine_callbacks.execute(context, batch, outputs, err);
}

static int worker_main(int argc, char **argv)
{
    static const struct cox_engine_options engine_options = {
        .model_dir = "/nonexistent", /* what the coordinator publishes is all there is */
        .block_size = 4,
        .block_count = PROMPT_COUNT * (LENGTH / 4 + 1),
    };
    struct cox_worker_callbacks callbacks = cox_engine_callbacks;
    callbacks.execute = on_execute;
    return engine_worker_main(argc, argv, &engine_options, &callbacks, attack_choose);
}

/* ---- a group that replaces its dead ---- */

static char folders[2][FIXTURE_PATH_SIZE];
static struct cox_shared_weights *weights;
static struct cox_executor *executor;
static struct cox_init_summary summary;
static struct cox_recovery *_Atomic recovery;

static void on_death(void *context, uint32_t rank, const char *text)
{
    (void)context;
    struct cox_recovery *told = atomic_load(&recovery);
    if (told)
        cox_recovery_death(told, rank, text);
}

/* With the weights of a folder; fault: of the workers' first incarnation, or NULL. */
static void group_start(uint32_t rank_count, const char *folder, const char *fault)
{
    const struct cox_recovery_options replaces = {.policy.on_death = COX_ON_DEATH_RESTART,
                                                  .policy.backoff_min_ms = 1,
                                                  .policy.backoff_max_ms = 10};
    struct cox_recovery *started = NULL;
    int r = cox_shared_weights_load(folder, NULL, NULL, &weights, test_err());
    if (fault) {
        setenv("COXSWAIN_FAULT", fault, 1);
        setenv("COXSWAIN_FAULT_INCARNATION", "1", 1);
    }
    if (r == 0)
        r = cox_executor_start(START_WITH(.rank_count = rank_count,
                                          .workers.command = test_own_command,
                                          .memory.attach = test_attach(), .hooks.death = on_death),
                               &executor, test_err());
    unsetenv("COXSWAIN_FAULT");
    unsetenv("COXSWAIN_FAULT_INCARNATION");
    if (r == 0)
        r = cox_shared_weights_publish(weights, executor, test_err());
    if (r == 0)
        r = cox_executor_init(executor, NULL, 0, cox_deadline_after_ms(TEST_PATIENCE_MS), &summary,
                              test_err());
    if (r == 0)
        r = cox_recovery_start(executor, &replaces, &started, test_err());
    assert_ok(r);
    atomic_store(&recovery, started);
}

static void group_end(void)
{
    if (weights)
        cox_shared_weights_stop(weights);
    if (executor)
        cox_executor_stop(executor);
    atomic_store(&recovery, cox_recovery_free(atomic_load(&recovery)));
    executor = cox_executor_free(executor);
    weights = cox_shared_weights_free(weights);
}

static int setup(void **state)
{
    for (uint32_t i = 0; i < 2; i++) {
        fixture_directory_create(folders[i]);
        fixture_write_model(folders[i], &config, 7 + i, 1);
    }
    return test_setup(state);
}

static int teardown(void **state)
{
    group_end();
    for (uint32_t i = 0; i < 2; i++)
        fixture_directory_remove(folders[i]);
    return test_teardown(state);
}

#define SWITCH_TEST(name) TEST_WITH(name, setup, teardown)

/* ---- texts ---- */

struct texts {
    /* tokens that were given */
    uint32_t prompt_count;
    int32_t tokens[PROMPT_COUNT][LENGTH];
};

struct run {
    struct texts *texts;
    uint32_t looks, switch_look;
    /* of the other weights */
    const char *folder;
    uint32_t done_count;
};

static void on_done(void *context, const struct cox_sequence *sequence)
{
    struct run *run = context;
    int32_t *tokens = sequence->request.context;
    if (sequence->error.code)
        fail_msg("a prompt has failed: %s", sequence->error.text);
    assert_int_equal(sequence->token_count, LENGTH);
    memcpy(tokens, sequence->tokens, LENGTH * sizeof *tokens);
    run->done_count++;
}

static bool on_feed(void *context, bool idle, uint64_t until_ns)
{
    struct run *run = context;
    uint64_t version;
    (void)until_ns;
    if (idle)
        return false;
    if (++run->looks == run->switch_look) {
        struct cox_error late = {0};
        /* Published, and not waited for: the step that is planned now is the first with it. */
        int r = cox_shared_weights_replace(weights, run->folder, cox_now_ns(), &version, &late);
        if (r != COX_TIMEOUT)
            fail_msg("%d: %s", r, late.text);
    }
    return true;
}

static int on_recover(void *context, struct cox_error *err)
{
    return cox_recovery_await(context, COX_DEADLINE_NEVER, err);
}

/* The rest of the texts, with the weights of a folder from the step at switch_look on. */
static void texts_run_to(struct texts *texts, const char *folder, uint32_t switch_look,
                         uint32_t in_flight)
{
    struct run run = {.texts = texts, .switch_look = switch_look, .folder = folder};
    struct cox_engine_loop_options options = {
        .steps_in_flight = in_flight,
        .weights = weights,
        .done = on_done,
        .done_context = &run,
        .feed = on_feed,
        .feed_context = &run,
        .recover = on_recover,
        .recover_context = atomic_load(&recovery),
    };
    struct cox_engine_loop *engine_loop = NULL;
    int r = cox_engine_loop_fit(&options, &summary, test_err());
    if (r == 0)
        r = cox_engine_loop_new(executor, &options, &engine_loop, test_err());
    assert_ok(r);
    for (uint32_t i = 0; i < PROMPT_COUNT; i++) {
        const struct cox_prompt_request request = {
            .tokens = texts->tokens[i],
            .token_count = texts->prompt_count,
            .new_count_max = LENGTH - texts->prompt_count,
            .context = texts->tokens[i],
        };
        assert_int_equal(cox_engine_loop_add(engine_loop, &request), 0);
    }
    r = cox_engine_loop_run(engine_loop, test_err());
    cox_engine_loop_free(engine_loop);
    assert_ok(r);
    assert_int_equal(run.done_count, PROMPT_COUNT);
}

static void texts_run(struct texts *texts, uint32_t switch_look, uint32_t in_flight)
{
    texts_run_to(texts, folders[1], switch_look, in_flight);
}

static struct texts prompts(void)
{
    struct texts texts = {.prompt_count = PROMPT_LENGTH};
    for (uint32_t i = 0; i < PROMPT_COUNT; i++)
        for (uint32_t t = 0; t < PROMPT_LENGTH; t++)
            texts.tokens[i][t] = (int32_t)((i * 37 + t * 11 + 3) % config.vocab_size);
    return texts;
}

/* What one rank gives. */
static struct texts alone(const char *folder, const struct texts *from, uint32_t switch_look)
{
    struct texts texts = *from;
    group_start(1, folder, NULL);
    texts_run(&texts, switch_look, 1);
    group_end();
    return texts;
}

static uint32_t rows_that_differ(const struct texts *a, const struct texts *b)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < PROMPT_COUNT; i++)
        count += memcmp(a->tokens[i], b->tokens[i], sizeof a->tokens[i]) != 0;
    return count;
}

static void expect_texts(const struct texts *texts, const struct texts *expected, const char *what)
{
    for (uint32_t i = 0; i < PROMPT_COUNT; i++)
        for (uint32_t t = 0; t < LENGTH; t++)
            if (texts->tokens[i][t] != expected->tokens[i][t])
                fail_msg("%s: token %" PRIu32 " of prompt %" PRIu32 " is %" PRId32
                         ", expected %" PRId32,
                         what, t, i, texts->tokens[i][t], expected->tokens[i][t]);
}

/* ---- tests ---- */

SWITCH_TEST(weights_no_step_is_of_two_versions)
{
    const struct texts start = prompts();
    const struct texts former = alone(folders[0], &start, NEVER);
    const struct texts latter = alone(folders[1], &start, NEVER);
    const struct texts switched = alone(folders[0], &start, SWITCH_LOOK);
    /* Otherwise nothing is said. Up to the switch it is the text of the former weights. */
    assert_int_equal(rows_that_differ(&switched, &former), PROMPT_COUNT);
    assert_int_equal(rows_that_differ(&switched, &latter), PROMPT_COUNT);
    for (uint32_t i = 0; i < PROMPT_COUNT; i++)
        assert_memory_equal(switched.tokens[i], former.tokens[i],
                            (PROMPT_LENGTH + SWITCH_LOOK - 1) * sizeof(int32_t));
    for (uint32_t n = 1; n <= 8; n *= 2)
        for (uint32_t in_flight = 1; in_flight <= 2; in_flight++) {
            struct cox_weights_status status;
            struct texts texts = start;
            char what[64];
            snprintf(what, sizeof what, "%" PRIu32 " ranks, %" PRIu32 " in flight", n, in_flight);
            group_start(n, folders[0], NULL);
            texts_run(&texts, SWITCH_LOOK, in_flight);
            expect_texts(&texts, &switched, what);
            cox_shared_weights_status(weights, &status);
            assert_int_equal(status.version, 2);
            assert_int_equal(status.next, 0);
            group_end();
        }
}

/* The step of the switch is void, and what was computed is computed again: all of it with the other
 * weights. */
SWITCH_TEST(weights_a_rank_that_dies_in_the_switch_leaves_no_step_of_two_versions)
{
#if !COX_TESTING
    skip();
#endif
    static const char *const points[] = {"weights.taken", "weights.switched"};
    static const struct {
        uint32_t rank_count, victim;
    } groups[] = {{1, 0}, {2, 0}, {2, 1}, {4, 2}};
    const struct texts start = prompts();
    const struct texts former = alone(folders[0], &start, NEVER);
    struct texts expected = former;
    expected.prompt_count = PROMPT_LENGTH + SWITCH_LOOK - 1;
    expected = alone(folders[1], &expected, NEVER);
    assert_int_equal(rows_that_differ(&expected, &former), PROMPT_COUNT);
    for (size_t g = 0; g < sizeof groups / sizeof groups[0]; g++)
        for (size_t p = 0; p < 2; p++)
            for (uint32_t in_flight = 1; in_flight <= 2; in_flight++) {
                struct cox_weights_status status;
                struct texts texts = start;
                char fault[64], what[128];
                /* Its second passage: the first one is in init. */
                snprintf(fault, sizeof fault, "%s:kill:%" PRIu32 ":2", points[p], groups[g].victim);
                snprintf(what, sizeof what, "%" PRIu32 " ranks, %s, %" PRIu32 " in flight",
                         groups[g].rank_count, fault, in_flight);
                group_start(groups[g].rank_count, folders[0], fault);
                texts_run(&texts, SWITCH_LOOK, in_flight);
                assert_int_equal(test_rank_status(executor, groups[g].victim).deaths, 1);
                expect_texts(&texts, &expected, what);
                cox_shared_weights_status(weights, &status);
                assert_int_equal(status.next, 0);
                group_end();
            }
}

/* fds, and images of weights that are mapped. */
struct held {
    size_t fds, images;
};

static struct held held_by(pid_t pid)
{
    return (struct held){test_count_proc(pid, "fd"), test_count_maps(pid, "memfd:cox_weights")};
}

static bool is_more(const struct held *held, const struct held *before)
{
    return held->fds > before->fds || held->images != before->images;
}

/* What the control socket had is closed by a thread of its own, which may be late. */
static struct held held_in_the_end(pid_t pid, const struct held *before)
{
    const uint64_t until_ns = cox_deadline_after_ms(TEST_PATIENCE_MS);
    struct held held = held_by(pid);
    while (is_more(&held, before) && cox_now_ns() < until_ns) {
        usleep(1000);
        held = held_by(pid);
    }
    return held;
}

SWITCH_TEST(g1c_switches_leave_nothing_behind)
{
    struct held before[3];
    group_start(2, folders[0], NULL);
    for (uint32_t i = 0; i < SWITCH_COUNT; i++) {
        struct texts texts = prompts();
        texts_run_to(&texts, folders[(i + 1) % 2], 2, 2);
        const pid_t pids[3] = {getpid(), cox_executor_pid(executor, 0),
                               cox_executor_pid(executor, 1)};
        for (size_t k = 0; k < 3; k++) {
            if (i < 2) {
                before[k] = held_by(pids[k]);
                continue;
            }
            const struct held held = held_in_the_end(pids[k], &before[k]);
            if (is_more(&held, &before[k]))
                fail_msg("%s %zu has %zu fds and %zu images after %" PRIu32
                         " switches, %zu and %zu after 2",
                         k ? "rank" : "coordinator", k ? k - 1 : k, held.fds, held.images, i + 1,
                         before[k].fds, before[k].images);
        }
    }
    struct cox_weights_status now;
    cox_shared_weights_status(weights, &now);
    assert_int_equal(now.version, 1 + SWITCH_COUNT);
    assert_int_equal(before[0].images, 0);
    assert_int_equal(before[1].images, 1);
    assert_int_equal(before[2].images, 1);
    group_end();
}

/* ---- a hostile rank ---- */

/* Every kind was tried, and none was done. */
static void expect_refused(const char *path)
{
    static const char *const kinds[] = {
#define KIND(name) name,
        WEIGHTS_ATTACK_KINDS(KIND)};
    char line[256];
    uint64_t counts[sizeof kinds / sizeof kinds[0]] = {0};
    FILE *report = fopen(path, "re");
    assert_non_null(report);
    while (fgets(line, sizeof line, report)) {
        if (strstr(line, ": done"))
            fail_msg("a rank has changed what is all ranks': %s", line);
        for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
            counts[i] += strncmp(line, kinds[i], strlen(kinds[i])) == 0;
    }
    fclose(report);
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        if (counts[i] == 0)
            fail_msg("%s was never tried", kinds[i]);
}

static void expect_empty(const char *path)
{
    char line[256];
    FILE *report = fopen(path, "re");
    assert_non_null(report);
    if (fgets(line, sizeof line, report))
        fail_msg("a rank has words of a pool or a queue of its coordinator's: %s", line);
    fclose(report);
}

/* One attack writes to the weights (g1c). The other one writes to shared words of a pool or a
 * queue, of which there are none (g1a, g1b). Then the rank is replaced (g1e). */
SWITCH_TEST(g1a_g1b_g1c_g1e_weights_are_right_whatever_a_hostile_rank_does)
{
    static const struct {
        const char *attack;
        void (*expect)(const char *path);
    } rows[] = {{"memory", expect_refused}, {"words", expect_empty}};
    const struct texts start = prompts();
    const struct texts former = alone(folders[0], &start, NEVER);
    const struct texts latter = alone(folders[1], &start, NEVER);
    const struct texts switched = alone(folders[0], &start, SWITCH_LOOK);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        for (uint32_t n = 2; n <= 4; n *= 2) {
            char report[] = "/tmp/coxswitchXXXXXX";
            struct texts texts = start;
            int fd = mkstemp(report);
            assert_true(fd >= 0);
            close(fd);
            setenv(ATTACK, rows[i].attack, 1);
            setenv(REPORT, report, 1);
            group_start(n, folders[0], NULL);
            texts_run(&texts, NEVER, 2);
            expect_texts(&texts, &former, "at first");
            texts = start;
            texts_run(&texts, SWITCH_LOOK, 1);
            expect_texts(&texts, &switched, "in the switch");
            texts = start;
            texts_run(&texts, NEVER, 2);
            expect_texts(&texts, &latter, "after it");
            assert_int_equal(kill(cox_executor_pid(executor, HOSTILE), SIGKILL), 0);
            texts = start;
            texts_run(&texts, NEVER, 2);
            assert_int_equal(test_rank_status(executor, HOSTILE).deaths, 1);
            expect_texts(&texts, &latter, "after its replacement");
            group_end();
            unsetenv(ATTACK);
            unsetenv(REPORT);
            rows[i].expect(report);
            unlink(report);
        }
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "worker") != 0)
        cmocka_set_test_filter(argv[1]);
    if (argc > 1 && strcmp(argv[1], "worker") == 0)
        return worker_main(argc, argv);
    return test_run(NULL, NULL);
}
