/*
 * prompt_queue: clients that come, ask, stay silent and go, on the rank of engine_loop_fixture.h.
 */
#include "engine/batching/lora.h"
#include "engine/batching/prompt_queue.h"
#include "proto/executor.pb-c.h"
#include "worker/sequences/table_private.h"
#include "engine_loop_fixture.h"
#include "tests/lib/test.h"

#define PATIENCE_MS 30000
#define PROMPT_MAX 12

struct client {
    struct cox_prompt_queue_client *client;
    int wake_fd;
};

/* Made for each test: a rank, a queue of a group called "this", and one of its clients. */
static struct cox_executor *executor;
static struct cox_prompt_queue *queue;
static struct client *client;

TEST_OWNED(cox_prompt_queue_free)

static struct cox_prompt_queue *prompt_queue_new(struct cox_lora *lora, const char *name)
{
    const struct cox_prompt_queue_options options = {
        .engine_loop = {.block_count = BLOCK_COUNT_MAX,
                        .block_size = BLOCK_SIZE,
                        .position_count_max = 128,
                        .sequence_count_max = 8},
        .vocab_size = 100,
        .lora = lora,
        .name = name,
    };
    struct cox_prompt_queue *made = NULL;
    assert_ok(cox_prompt_queue_start(executor, &options, &made, test_err()));
    return test_own(made, cox_prompt_queue_free_owned);
}

static void client_free(void *object)
{
    struct client *freed = object;
    cox_prompt_queue_client_free(freed->client);
    close(freed->wake_fd);
    free(freed);
}

static struct client *client_new(void)
{
    struct client *made = test_own(calloc(1, sizeof *made), client_free);
    made->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    assert_true(made->wake_fd >= 0);
    assert_int_equal(cox_prompt_queue_client_new(queue, made->wake_fd, &made->client), 0);
    return made;
}

/* The prompt of an index, different for each. */
static uint32_t prompt_of(uint64_t index, int32_t tokens[PROMPT_MAX])
{
    uint32_t count = 1 + (uint32_t)(index % PROMPT_MAX);
    for (uint32_t i = 0; i < count; i++)
        tokens[i] = (int32_t)((index * 31 + i * 7) % 100);
    return count;
}

/* The prompt of the index that the sequence there is called by. */
static int32_t remote_token(const struct Coxswain__PullKVRequest__PullKVInfo *info,
                            uint32_t position)
{
    int32_t tokens[PROMPT_MAX];
    uint32_t count = prompt_of((uint64_t)info->src_sequence, tokens);
    return position < count ? tokens[position] : -1;
}

static int setup(void **state)
{
    (void)state;
    executor = executor_new();
    executor->remote_token = remote_token;
    queue = prompt_queue_new(NULL, "this");
    client = client_new();
    return 0;
}

#define QUEUE_TEST(name) TEST_WITH(name, setup, NULL)

static int submit_with(struct client *from, uint64_t index, uint32_t new_count, bool endless,
                       const char *lora)
{
    int32_t tokens[PROMPT_MAX];
    struct cox_prompt_request request = {
        .tokens = tokens,
        .token_count = prompt_of(index, tokens),
        .new_count_max = new_count,
        .stop_tokens = {STOP},
        .stop_count = endless ? 0 : 1,
        .lora = lora,
    };
    return cox_prompt_queue_submit(from->client, &request, index);
}

static int submit(struct client *from, uint64_t index, uint32_t new_count, bool endless)
{
    return submit_with(from, index, new_count, endless, NULL);
}

static void output_free(void *object)
{
    cox_prompt_output_deinit(object);
    free(object);
}

/* Waits for it; the test's. */
static const struct cox_prompt_output *take(struct client *from)
{
    struct cox_prompt_output *result = test_own(calloc(1, sizeof *result), output_free);
    while (cox_prompt_queue_take(from->client, result)) {
        struct pollfd fd = {.fd = from->wake_fd, .events = POLLIN};
        uint64_t count;
        if (poll(&fd, 1, PATIENCE_MS) != 1)
            fail_msg("no result");
        assert_int_equal(read(from->wake_fd, &count, sizeof count), sizeof count);
    }
    return result;
}

static void expect_text(const struct cox_prompt_output *result, uint32_t new_count)
{
    int32_t tokens[PROMPT_MAX + 64];
    uint32_t prompt_count = prompt_of(result->index, tokens), count = prompt_count;
    assert_null(result->error);
    do
        tokens[count] = model(tokens, count);
    while (tokens[count++] != STOP && count < prompt_count + new_count);
    assert_int_equal(result->token_count, count - prompt_count);
    assert_memory_equal(result->tokens, tokens + prompt_count,
                        result->token_count * sizeof *tokens);
    assert_int_equal(result->finish,
                     tokens[count - 1] == STOP ? COX_FINISH_STOP : COX_FINISH_LENGTH);
}

static struct cox_prompts_status status_now(void)
{
    struct cox_prompts_status status;
    cox_prompt_queue_status(queue, &status);
    return status;
}

static bool is_all_free(void)
{
    const struct cox_prompts_status status = status_now();
    return status.running == 0 && status.waiting == 0 && status.holds == 0 &&
           status.free_blocks == status.block_count;
}

static bool is_busy(void)
{
    return status_now().free_blocks < status_now().block_count;
}

static bool is_all_done(void)
{
    const struct cox_prompts_status status = status_now();
    return status.running == 0 && status.waiting == 0;
}

QUEUE_TEST(clients_get_their_own_replies)
{
    struct client *clients[5];
    for (uint32_t round = 0; round < 3; round++) { /* idle between them */
        for (int c = 0; c < 5; c++) {
            clients[c] = client_new();
            for (uint64_t i = 0; i < 40; i++)
                assert_int_equal(submit(clients[c], i * 5 + (uint64_t)c, 10, false), 0);
        }
        for (int c = 4; c >= 0; c--) {
            bool seen[40] = {false};
            for (int i = 0; i < 40; i++) {
                const struct cox_prompt_output *result = take(clients[c]);
                assert_int_equal(result->index % 5, c);
                assert_false(seen[result->index / 5]);
                seen[result->index / 5] = true;
                expect_text(result, 10);
            }
            assert_int_equal(cox_prompt_queue_outstanding(clients[c]->client), 0);
            test_release(clients[c]);
        }
        AWAIT(is_all_free());
    }
    assert_int_equal(status_now().completed, 600);
    assert_int_equal(status_now().prompt_count_max, COX_PROMPT_QUEUE_PROMPT_COUNT_MAX);
    assert_int_equal(status_now().cancelled, 0);
    assert_int_equal(status_now().client_count, 1); /* the one that every test has */
}

/* Steps beyond the limit wait for a higher one. */
static pthread_mutex_t limit_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t limit_wake = PTHREAD_COND_INITIALIZER;
static uint64_t step_limit;

static void limit_set(uint64_t limit)
{
    pthread_mutex_lock(&limit_lock);
    step_limit = limit;
    pthread_cond_broadcast(&limit_wake);
    pthread_mutex_unlock(&limit_lock);
}

static uint64_t steps_taken(void)
{
    pthread_mutex_lock(&executor->lock);
    uint64_t steps = executor->published;
    pthread_mutex_unlock(&executor->lock);
    return steps;
}

static int waits_at_the_limit(uint64_t number)
{
    pthread_mutex_lock(&limit_lock);
    while (number > step_limit)
        pthread_cond_wait(&limit_wake, &limit_lock);
    pthread_mutex_unlock(&limit_lock);
    return 0;
}

QUEUE_TEST(a_client_with_many_prompts_does_not_delay_another_by_all_of_them)
{
    limit_set(0);
    executor->script.status = waits_at_the_limit;
    struct client *many = client_new(), *one = client_new();
    uint64_t count = 0;
    while (submit(many, count, 40, true) == 0)
        count++;
    assert_int_equal(count, COX_PROMPT_QUEUE_PROMPT_COUNT_MAX);
    assert_int_equal(submit(one, 1000, 3, false), 0);
    /* Eight run at a time, 40 steps each, and eight more are ahead: all of them take 2,560 steps.
     */
    limit_set(200);
    expect_text(take(one), 3);
    assert_true(status_now().waiting > COX_PROMPT_QUEUE_PROMPT_COUNT_MAX / 2);
    limit_set(UINT64_MAX);
    /* It reads nothing, and has room again for as many as it takes. */
    assert_int_equal(submit(many, count, 1, true), COX_FULL);
    take(many);
    assert_int_equal(submit(many, count, 1, true), 0);
    assert_int_equal(submit(many, count, 1, true), COX_FULL);
    AWAIT(is_all_done());
    assert_int_equal(status_now().unread, COX_PROMPT_QUEUE_PROMPT_COUNT_MAX);
}

QUEUE_TEST(tokens_have_a_bound_of_their_own)
{
    static int32_t tokens[COX_PROMPT_QUEUE_TOKEN_COUNT_MAX + 1];
    struct cox_prompt_request request = {
        .tokens = tokens, .token_count = COX_PROMPT_QUEUE_TOKEN_COUNT_MAX, .new_count_max = 1};
    assert_int_equal(cox_prompt_queue_submit(client->client, &request, 0), 0);
    request.token_count = 1;
    assert_int_equal(cox_prompt_queue_submit(client->client, &request, 1), COX_FULL);
    assert_int_equal(take(client)->error->code, COX_TOO_LARGE);
    /* One that is larger alone fails, and its tokens are not kept. */
    for (uint64_t i = 0; i < 2; i++) {
        request.token_count = COX_PROMPT_QUEUE_TOKEN_COUNT_MAX + 1;
        assert_int_equal(cox_prompt_queue_submit(client->client, &request, i), 0);
    }
    for (uint64_t i = 0; i < 2; i++) {
        const struct cox_prompt_output *result = take(client);
        assert_int_equal(result->error->code, COX_TOO_LARGE);
        assert_contains(result->error->text, "4194305 tokens: at most 4194304");
    }
    request.token_count = 1;
    assert_int_equal(cox_prompt_queue_submit(client->client, &request, 1), 0);
}

QUEUE_TEST(what_is_given_up_frees_its_blocks)
{
    limit_set(UINT64_MAX);
    executor->script.status = waits_at_the_limit;
    struct client *gone = client_new(), *stays = client_new();
    for (int round = 0; round < 20; round++) {
        if (round % 2) /* a few steps from now, so that prompts are running at the cancel */
            limit_set(steps_taken() + 5);
        for (uint64_t i = 0; i < 30; i++)
            assert_int_equal(submit(gone, i, 100, true), 0);
        for (uint64_t i = 0; i < 3; i++)
            assert_int_equal(submit(stays, i, 20, false), 0);
        if (round % 2)
            AWAIT(is_busy());
        cox_prompt_queue_cancel(gone->client);
        limit_set(UINT64_MAX);
        assert_int_equal(cox_prompt_queue_outstanding(gone->client), 0);
        for (int i = 0; i < 3; i++)
            expect_text(take(stays), 20);
        AWAIT(is_all_free());
        struct cox_prompt_output none;
        assert_int_equal(cox_prompt_queue_take(gone->client, &none), COX_EMPTY);
    }
}

QUEUE_TEST(what_is_given_up_runs_no_further)
{
    limit_set(5);
    executor->script.status = waits_at_the_limit;
    struct client *gone = client_new();
    for (uint64_t i = 0; i < 30; i++)
        assert_int_equal(submit(gone, i, 100, true), 0);
    AWAIT(is_busy());
    cox_prompt_queue_cancel(gone->client);
    limit_set(20); /* they would need a hundred */
    AWAIT(is_all_free());
    assert_int_equal(status_now().cancelled, 30);
    limit_set(UINT64_MAX);
}

QUEUE_TEST(bad_prompts_fail_alone)
{
    static const int32_t outside[] = {1, 100}, below[] = {-1};
    static int32_t huge[200];
    const struct cox_prompt_request bad[] = {
        {.tokens = outside, .token_count = 2, .new_count_max = 1},
        {.tokens = below, .token_count = 1, .new_count_max = 1},
        {.tokens = below, .token_count = 0, .new_count_max = 1},
        {.tokens = huge, .token_count = 200, .new_count_max = 1},
    };
    static const int codes[] = {COX_INVALID, COX_INVALID, COX_INVALID, COX_TOO_LARGE};
    for (uint64_t i = 0; i < 4; i++)
        assert_int_equal(cox_prompt_queue_submit(client->client, &bad[i], i), 0);
    assert_int_equal(submit(client, 4, 5, false), 0);
    for (int i = 0; i < 5; i++) {
        const struct cox_prompt_output *result = take(client);
        if (result->index == 4) {
            expect_text(result, 5);
        } else {
            assert_int_equal(result->finish, COX_FINISH_ERROR);
            assert_int_equal(result->error->code, codes[result->index]);
        }
    }
}

/* Once: a prompt that is not in a step yet would not fail. */
static int dies_after_four_rows(uint64_t number)
{
    static uint64_t dead;
    if (!dead && executor->row_count_max == 4)
        dead = number;
    return number == dead ? COX_PEER_DEAD : 0;
}

/* under the executor's lock */
static bool all_are_submitted;

static void third_waits(struct cox_executor *of, uint64_t number)
{
    while (number == 3 && !all_are_submitted)
        pthread_cond_wait(&of->wake, &of->lock);
}

QUEUE_TEST(after_a_failure_the_next_prompt_gets_another_scheduler)
{
    executor->script.status = dies_after_four_rows;
    executor->script.taken = third_waits;
    for (uint64_t i = 0; i < 4; i++)
        assert_int_equal(submit(client, i, 60, true), 0);
    pthread_mutex_lock(&executor->lock);
    all_are_submitted = true;
    pthread_cond_broadcast(&executor->wake);
    pthread_mutex_unlock(&executor->lock);
    for (int i = 0; i < 4; i++) {
        const struct cox_prompt_output *result = take(client);
        assert_int_equal(result->error->code, COX_PEER_DEAD);
        assert_contains(result->error->text, "rank 1 says no");
    }
    assert_int_equal(submit(client, 9, 20, false), 0);
    expect_text(take(client), 20);
}

static int third_is_refused(uint64_t number)
{
    return number == 3 ? COX_CORRUPT : 0;
}

/* Legacy ranks keep a sequence until its end is reported: by the next engine loop, here also with a
 * report that fails. */
static int first_fails(void)
{
    static int count;
    return count++ ? 0 : COX_REJECTED;
}

QUEUE_TEST(sequences_of_a_failed_engine_loop_leave_legacy_ranks)
{
    for (int reported = 0; reported < 2; reported++) {
        setup(state);
        executor->legacy = true;
        executor->script.status = third_is_refused;
        executor->script.loses_table = true;
        executor->script.cleanup = reported ? first_fails : NULL;
        assert_int_equal(submit(client, 0, 60, true), 0);
        assert_int_equal(take(client)->error->code, COX_CORRUPT);
        pthread_mutex_lock(&executor->lock);
        assert_true(executor->table->store.live_count > 0);
        pthread_mutex_unlock(&executor->lock);
        for (uint64_t i = 8; i < 10; i++) {
            assert_int_equal(submit(client, i, 20, false), 0);
            expect_text(take(client), 20);
        }
        /* The end of the last one may not have been reported yet. */
        pthread_mutex_lock(&executor->lock);
        assert_true(executor->table->store.live_count <= 1);
        pthread_mutex_unlock(&executor->lock);
    }
}

QUEUE_TEST(the_end_is_reported_with_its_cause)
{
    for (int with_cause = 0; with_cause < 2; with_cause++) {
        setup(state);
        executor->script.silent = true; /* a step that never ends */
        struct cox_error cause = {0};
        cox_fail(&cause, COX_PEER_DEAD, "rank 7 died");
        for (uint64_t i = 0; i < 30; i++) /* some are running, some wait */
            assert_int_equal(submit(client, i, 10, false), 0);
        cox_prompt_queue_stop(queue, with_cause ? &cause : NULL);
        cox_prompt_queue_stop(queue, NULL);
        assert_int_equal(submit(client, 30, 10, false), 0);
        for (int i = 0; i < 31; i++) {
            const struct cox_prompt_output *result = take(client);
            assert_int_equal(result->error->code, with_cause ? COX_PEER_DEAD : COX_CLOSED);
            assert_true(!with_cause || !strcmp(result->error->text, "rank 7 died"));
        }
    }
}

/* ---- adapters ---- */

TEST_OWNED(cox_lora_free)

static struct cox_lora *lora_new(void)
{
    const struct cox_log log = {0};
    struct cox_lora *lora = NULL;
    struct cox_lora_result result;
    assert_int_equal(cox_lora_new(executor, &log, &lora), 0);
    test_own(lora, cox_lora_free_owned);
    for (const char *name = "a\0b\0"; *name; name += 2)
        assert_ok(cox_lora_load(lora, name, "/folder", COX_DEADLINE_NEVER, &result, test_err()));
    return lora;
}

/* Steps beyond it wait, so that prompts are running for as long as the test wants; under the
 * executor's lock, which the wait releases: others may be published, and the queue may end. */
static uint64_t taken_max;

static void waits_when_taken(struct cox_executor *of, uint64_t number)
{
    while (number > taken_max && !of->stop)
        pthread_cond_wait(&of->wake, &of->lock);
}

static void taken_max_set(uint64_t number)
{
    pthread_mutex_lock(&executor->lock);
    taken_max = number;
    pthread_cond_broadcast(&executor->wake);
    pthread_mutex_unlock(&executor->lock);
}

static uint64_t uses_of(struct cox_lora *lora, const char *name)
{
    struct cox_lora_info *infos;
    size_t count;
    uint64_t uses = UINT64_MAX;
    assert_int_equal(cox_lora_list(lora, &infos, &count), 0);
    for (size_t i = 0; i < count; i++)
        if (!strcmp(infos[i].name, name))
            uses = infos[i].uses;
    free(infos);
    return uses;
}

QUEUE_TEST(m13_prompts_count_as_uses_until_they_are_done)
{
    taken_max_set(UINT64_MAX);
    executor->script.taken = waits_when_taken;
    struct cox_lora *lora = lora_new();
    queue = prompt_queue_new(lora, NULL);
    client = client_new();
    struct client *other = client_new();
    for (uint64_t i = 0; i < 60; i++)
        assert_int_equal(submit_with(client, i, 10, false,
                                     i % 3 == 0   ? "a"
                                     : i % 3 == 1 ? "b"
                                                  : NULL),
                         0);
    for (uint64_t i = 0; i < 60; i++) {
        expect_text(take(client), 10);
    }
    pthread_mutex_lock(&executor->lock);
    assert_true(executor->lora_row_count > 0);
    pthread_mutex_unlock(&executor->lock);
    assert_int_equal(uses_of(lora, "a"), 0);
    assert_int_equal(uses_of(lora, "b"), 0);
    /* Cancelled ones, running or waiting, do not stay uses. */
    taken_max_set(steps_taken() + 5); /* they would need a hundred */
    for (uint64_t i = 0; i < 40; i++)
        assert_int_equal(submit_with(other, i, 100, true, "a"), 0);
    assert_int_equal(uses_of(lora, "a"), 40);
    AWAIT(is_busy());
    test_release(other);
    taken_max_set(UINT64_MAX);
    AWAIT(is_all_free());
    assert_int_equal(uses_of(lora, "a"), 0);
}

QUEUE_TEST(m13_a_prompt_with_an_unknown_adapter_fails_alone)
{
    struct cox_lora *lora = lora_new();
    for (int with = 0; with < 2; with++) {
        queue = prompt_queue_new(with ? lora : NULL, NULL);
        client = client_new();
        assert_int_equal(submit(client, 1, 10, false), 0);
        assert_int_equal(submit_with(client, 2, 10, false, "missing"), 0);
        for (int i = 0; i < 2; i++) {
            const struct cox_prompt_output *result = take(client);
            if (result->index == 1)
                expect_text(result, 10);
            else
                assert_int_equal(result->error->code, with ? COX_INVALID : COX_UNSUPPORTED);
            if (result->index == 2 && with)
                assert_contains(result->error->text, "'missing' is loaded; there are: a, b");
        }
        /* A rank has the table of one queue at a time, and this one may still publish a step. */
        test_release(client);
        test_release(queue);
    }
}

/* Every prompt ends, and none stays a use. */
QUEUE_TEST(m13_the_end_gives_all_adapters_back)
{
    taken_max_set(5);
    executor->script.taken = waits_when_taken;
    struct cox_lora *lora = lora_new();
    queue = prompt_queue_new(lora, NULL);
    client = client_new();
    for (uint64_t i = 0; i < 50; i++)
        assert_int_equal(submit_with(client, i, 100, true, "a"), 0);
    AWAIT(is_busy());
    cox_prompt_queue_stop(queue, NULL);
    assert_int_equal(uses_of(lora, "a"), 0);
}

/* ---- holds and pulls ---- */

/* What the other group makes of the prompt: its first token, and a source. */
static void submit_pulled(struct client *from, uint64_t index, uint32_t new_count)
{
    int32_t tokens[PROMPT_MAX + 1];
    static const int32_t blocks[] = {1, 2, 3, 4};
    uint32_t count = prompt_of(index, tokens);
    tokens[count] = model(tokens, count);
    const struct cox_kv_reference source = {.cluster_id = "other",
                                            .epoch = 1,
                                            .sequence = (int64_t)index,
                                            .lease_ns = cox_deadline_after_ms(60000),
                                            .blocks = blocks,
                                            .block_count = (count + BLOCK_SIZE - 1) / BLOCK_SIZE};
    struct cox_prompt_request request = {
        .tokens = tokens,
        .token_count = count + 1,
        .new_count_max = new_count,
        .source = &source,
    };
    assert_int_equal(cox_prompt_queue_submit(from->client, &request, index), 0);
}

static const struct cox_prompt_output *take_word(struct client *from, uint64_t index, int code)
{
    const struct cox_prompt_output *word = take(from);
    assert_true(word->is_pulled);
    assert_int_equal(word->index, index);
    assert_int_equal(word->error ? word->error->code : 0, code);
    return take(from);
}

static void expect_rest(const struct cox_prompt_output *result, uint32_t new_count)
{
    int32_t tokens[PROMPT_MAX + 64];
    uint32_t count = prompt_of(result->index, tokens);
    tokens[count] = model(tokens, count);
    count++;
    assert_null(result->error);
    assert_int_equal(result->token_count, new_count);
    for (uint32_t i = 0; i < new_count; i++, count++) {
        tokens[count] = model(tokens, count);
        assert_int_equal(result->tokens[i], tokens[count]);
    }
}

QUEUE_TEST(m11_a_pulled_prompt_goes_on_with_the_same_text)
{
    for (uint64_t index = 3; index < 14; index++) {
        submit_pulled(client, index, 5);
        const struct cox_prompt_output *result = take_word(client, index, 0);
        expect_rest(result, 5);
        assert_false(result->recomputed);
    }
    assert_int_equal(executor->token_count_max, 1); /* of no prompt was anything computed */
    assert_int_equal(status_now().transfer.succeeded, 11);
    AWAIT(is_all_free());
}

static int32_t fails_twice(uint64_t number)
{
    return number <= 2 ? 2003 : 0;
}

static int32_t fails(uint64_t number)
{
    (void)number;
    return 2003;
}

QUEUE_TEST(m11_a_pull_that_fails_is_tried_again_and_then_computed)
{
    executor->script.pull_code = fails_twice;
    submit_pulled(client, 9, 5);
    const struct cox_prompt_output *result = take_word(client, 9, 0);
    expect_rest(result, 5);
    assert_int_equal(status_now().transfer.retries, 2);
    assert_int_equal(status_now().transfer.failed, 2);
    executor->script.pull_code = fails;
    submit_pulled(client, 10, 5);
    result = take_word(client, 10, COX_STALE);
    expect_rest(result, 5);
    assert_true(result->recomputed);
    assert_int_equal(status_now().recomputed, 1);
    assert_int_equal(executor->pull_count, 6);
    AWAIT(is_all_free());
}

QUEUE_TEST(p9_a_client_that_leaves_during_a_pull_leaves_no_block)
{
    executor->script.pulls_held = true;
    submit_pulled(client, 9, 5);
    struct fixture_pull pull = executor_await_pull(executor);
    test_release(client);
    AWAIT(status_now().transfer.cancelled && !status_now().running);
    assert_int_equal(status_now().transfer.quarantined_blocks, 3);
    executor_complete_pull(executor, &pull, 0, COX_OUTCOME_OK, 0, 0);
    AWAIT(is_all_free());
    assert_int_equal(status_now().transfer.late_results, 1);
}

static int submit_held(struct client *from, uint64_t index)
{
    int32_t tokens[PROMPT_MAX];
    struct cox_prompt_request request = {.tokens = tokens,
                                         .new_count_max = 4,
                                         .hold_ms = 60000,
                                         .token_count = prompt_of(index, tokens)};
    return cox_prompt_queue_submit(from->client, &request, index);
}

QUEUE_TEST(m10_a_hold_is_its_clients)
{
    struct client *other = client_new();
    struct cox_kv_reference *found;
    assert_int_equal(submit_held(client, 9), 0);
    const struct cox_prompt_output *result = take(client);
    assert_int_equal(result->token_count, 1);
    assert_non_null(result->hold);
    assert_string_equal(result->hold->cluster_id, "this");
    assert_int_equal(result->hold->block_count, 3);
    assert_int_equal(result->hold->epoch, 1001);
    int64_t id = result->hold->sequence;
    assert_int_equal(cox_prompt_queue_release(other->client, id), 0);
    assert_int_equal(cox_prompt_queue_find_hold(queue, id + 1, &found, test_err()), COX_NOT_FOUND);
    AWAIT(cox_prompt_queue_find_hold(queue, id, &found, NULL) == 0);
    assert_int_equal(found->blocks[2], result->hold->blocks[2]);
    free(found);
    assert_int_equal(cox_prompt_queue_release(client->client, id), 0);
    AWAIT(is_all_free());
    /* And what it has not released goes with it. */
    assert_int_equal(submit_held(client, 10), 0);
    assert_non_null(take(client)->hold);
    test_release(client);
    AWAIT(is_all_free());
}

QUEUE_TEST(m10_holds_that_a_cancel_dropped_unheard_are_released)
{
    for (uint64_t index = 0; index < 3; index++)
        assert_int_equal(submit_held(client, index), 0);
    AWAIT(status_now().unread == 3); /* done, and not taken */
    cox_prompt_queue_cancel(client->client);
    AWAIT(is_all_free()); /* although the client stays */
}

static bool is_submitted(void)
{
    pthread_mutex_lock(&executor->lock);
    const bool submitted = executor->submit_count > 0;
    pthread_mutex_unlock(&executor->lock);
    return submitted;
}

QUEUE_TEST(m10_orders_to_release_have_a_bound)
{
    struct client *other = client_new();
    uint64_t count = 0;
    /* While there is no engine loop, nothing is held, and so nothing is kept. */
    for (int i = 0; i < 5000; i++)
        assert_int_equal(cox_prompt_queue_release(client->client, 7), 0);
    executor->script.silent = true; /* a step that does not end */
    assert_int_equal(submit_held(client, 1), 0);
    AWAIT(is_submitted());
    int r;
    while ((r = cox_prompt_queue_release(client->client, 7)) == 0 && count < 100000)
        count++;
    assert_int_equal(r, COX_FULL);
    assert_int_equal(count, 1024);
    assert_int_equal(cox_prompt_queue_release(other->client, 7), 0);
}

QUEUE_TEST(m11_a_source_of_more_blocks_than_there_are_is_refused_before_it_is_copied)
{
    int32_t token = 1;
    /* Of so many, none is there to be copied. */
    const struct cox_kv_reference source = {.cluster_id = "other",
                                            .epoch = 1,
                                            .sequence = 1,
                                            .lease_ns = COX_DEADLINE_NEVER,
                                            .blocks = &token,
                                            .block_count = BLOCK_COUNT_MAX + 1};
    for (int only = 0; only < 2; only++) {
        const struct cox_prompt_request request = {.tokens = &token,
                                                   .token_count = !only,
                                                   .new_count_max = 1,
                                                   .source = &source,
                                                   .pull_only = only};
        assert_int_equal(cox_prompt_queue_submit(client->client, &request, 1), 0);
        const struct cox_prompt_output *result = take(client);
        assert_int_equal(result->error->code, COX_INVALID);
        assert_contains(result->error->text, "blocks are to be pulled: here are");
    }
}

QUEUE_TEST(m10_a_group_without_transfers_says_so)
{
    queue = prompt_queue_new(NULL, NULL);
    client = client_new();
    submit_pulled(client, 9, 5);
    assert_int_equal(take(client)->error->code, COX_UNSUPPORTED);
}
