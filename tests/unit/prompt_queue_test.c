/*
 * prompt_queue: clients that come, ask, stay silent and go, on the rank of engine_loop_fixture.h.
 */
#include "engine/batching/lora.h"
#include "engine/batching/prompt_queue.h"
#include "proto/executor.pb-c.h"
#include "engine_loop_fixture.h"
#include "tests/lib/test.h"

#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <stdlib.h>

#define PATIENCE_MS 30000
#define PROMPT_MAX 12

struct client {
    struct cox_prompt_queue_client *client;
    int wake_fd;
};

static struct cox_prompt_queue *prompt_queue_with(struct cox_executor *executor,
                                                  struct cox_lora *lora, const char *name)
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
    struct cox_prompt_queue *queue = NULL;
    struct cox_error error = {0};
    if (cox_prompt_queue_start(executor, &options, &queue, &error))
        fail_msg("%s", error.text);
    return queue;
}

static struct cox_prompt_queue *prompt_queue_new(struct cox_executor *executor)
{
    return prompt_queue_with(executor, NULL, NULL);
}

static struct client client_new(struct cox_prompt_queue *queue)
{
    struct client client = {.wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
    assert_true(client.wake_fd >= 0);
    assert_int_equal(cox_prompt_queue_client_new(queue, client.wake_fd, &client.client), 0);
    return client;
}

static void client_free(struct client *client)
{
    client->client = cox_prompt_queue_client_free(client->client);
    close(client->wake_fd);
}

/* The prompt of an index, different for each. */
static uint32_t prompt_of(uint64_t index, int32_t tokens[PROMPT_MAX])
{
    uint32_t count = 1 + (uint32_t)(index % PROMPT_MAX);
    for (uint32_t i = 0; i < count; i++)
        tokens[i] = (int32_t)((index * 31 + i * 7) % 100);
    return count;
}

static int submit_with(struct client *client, uint64_t index, uint32_t new_count, bool endless,
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
    return cox_prompt_queue_submit(client->client, &request, index);
}

static int submit(struct client *client, uint64_t index, uint32_t new_count, bool endless)
{
    return submit_with(client, index, new_count, endless, NULL);
}

/* Waits for it. */
static struct cox_prompt_output take(struct client *client)
{
    struct cox_prompt_output result;
    while (cox_prompt_queue_take(client->client, &result)) {
        struct pollfd fd = {.fd = client->wake_fd, .events = POLLIN};
        uint64_t count;
        if (poll(&fd, 1, PATIENCE_MS) != 1)
            fail_msg("no result");
        assert_int_equal(read(client->wake_fd, &count, sizeof count), sizeof count);
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

static void await_status(struct cox_prompt_queue *queue,
                         bool (*holds)(const struct cox_prompts_status *status))
{
    uint64_t deadline_ns = cox_deadline_after_ms(PATIENCE_MS);
    for (;;) {
        struct cox_prompts_status status;
        cox_prompt_queue_status(queue, &status);
        if (holds(&status))
            return;
        if (cox_now_ns() > deadline_ns)
            fail_msg("it never comes to that: %d waiting, %d running, %d unread, %u blocks free",
                     (int)status.waiting, (int)status.running, (int)status.unread,
                     status.free_blocks);
        nanosleep(&(struct timespec){.tv_nsec = COX_NSEC_PER_MSEC}, NULL);
    }
}

static bool is_all_free(const struct cox_prompts_status *status)
{
    return status->running == 0 && status->waiting == 0 &&
           status->free_blocks == status->block_count;
}

static bool is_busy(const struct cox_prompts_status *status)
{
    return status->free_blocks < status->block_count;
}

static bool is_all_done(const struct cox_prompts_status *status)
{
    return status->running == 0 && status->waiting == 0;
}

PLAIN_TEST(clients_get_their_own_replies)
{
    struct cox_executor *executor = executor_new();
    struct cox_prompt_queue *queue = prompt_queue_new(executor);
    struct client clients[5];
    for (uint32_t round = 0; round < 3; round++) { /* idle between them */
        for (int c = 0; c < 5; c++) {
            clients[c] = client_new(queue);
            for (uint64_t i = 0; i < 40; i++)
                assert_int_equal(submit(&clients[c], i * 5 + (uint64_t)c, 10, false), 0);
        }
        for (int c = 4; c >= 0; c--) {
            bool seen[40] = {false};
            for (int i = 0; i < 40; i++) {
                struct cox_prompt_output result = take(&clients[c]);
                assert_int_equal(result.index % 5, c);
                assert_false(seen[result.index / 5]);
                seen[result.index / 5] = true;
                expect_text(&result, 10);
                cox_prompt_output_deinit(&result);
            }
            assert_int_equal(cox_prompt_queue_outstanding(clients[c].client), 0);
            client_free(&clients[c]);
        }
        await_status(queue, is_all_free);
    }
    struct cox_prompts_status status;
    cox_prompt_queue_status(queue, &status);
    assert_int_equal(status.completed, 600);
    assert_int_equal(status.prompt_count_max, COX_PROMPT_QUEUE_PROMPT_COUNT_MAX);
    assert_int_equal(status.cancelled, 0);
    assert_int_equal(status.client_count, 0);
    cox_prompt_queue_free(queue);
    executor_free(executor);
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

static uint64_t steps_of(struct cox_executor *executor)
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

PLAIN_TEST(a_client_with_many_prompts_does_not_delay_another_by_all_of_them)
{
    struct cox_executor *executor = executor_new();
    limit_set(0);
    executor->script.status = waits_at_the_limit;
    struct cox_prompt_queue *queue = prompt_queue_new(executor);
    struct client many = client_new(queue), one = client_new(queue);
    uint64_t count = 0;
    while (submit(&many, count, 40, true) == 0)
        count++;
    assert_int_equal(count, COX_PROMPT_QUEUE_PROMPT_COUNT_MAX);
    assert_int_equal(submit(&one, 1000, 3, false), 0);
    /* Eight run at a time, 40 steps each, and eight more are ahead: all of them take 2,560 steps.
     */
    limit_set(200);
    struct cox_prompt_output result = take(&one);
    expect_text(&result, 3);
    cox_prompt_output_deinit(&result);
    struct cox_prompts_status status;
    cox_prompt_queue_status(queue, &status);
    assert_true(status.waiting > COX_PROMPT_QUEUE_PROMPT_COUNT_MAX / 2);
    limit_set(UINT64_MAX);
    /* It reads nothing, and has room again for as many as it takes. */
    assert_int_equal(submit(&many, count, 1, true), COX_FULL);
    result = take(&many);
    cox_prompt_output_deinit(&result);
    assert_int_equal(submit(&many, count, 1, true), 0);
    assert_int_equal(submit(&many, count, 1, true), COX_FULL);
    await_status(queue, is_all_done);
    cox_prompt_queue_status(queue, &status);
    assert_int_equal(status.unread, COX_PROMPT_QUEUE_PROMPT_COUNT_MAX);
    client_free(&many);
    client_free(&one);
    cox_prompt_queue_free(queue);
    executor_free(executor);
}

PLAIN_TEST(tokens_have_a_bound_of_their_own)
{
    static int32_t tokens[COX_PROMPT_QUEUE_TOKEN_COUNT_MAX + 1];
    struct cox_executor *executor = executor_new();
    struct cox_prompt_queue *queue = prompt_queue_new(executor);
    struct client client = client_new(queue);
    struct cox_prompt_request request = {
        .tokens = tokens, .token_count = COX_PROMPT_QUEUE_TOKEN_COUNT_MAX, .new_count_max = 1};
    assert_int_equal(cox_prompt_queue_submit(client.client, &request, 0), 0);
    request.token_count = 1;
    assert_int_equal(cox_prompt_queue_submit(client.client, &request, 1), COX_FULL);
    struct cox_prompt_output result = take(&client);
    assert_int_equal(result.error->code, COX_TOO_LARGE);
    cox_prompt_output_deinit(&result);
    /* One that is larger alone fails, and its tokens are not kept. */
    for (uint64_t i = 0; i < 2; i++) {
        request.token_count = COX_PROMPT_QUEUE_TOKEN_COUNT_MAX + 1;
        assert_int_equal(cox_prompt_queue_submit(client.client, &request, i), 0);
    }
    for (uint64_t i = 0; i < 2; i++) {
        result = take(&client);
        assert_int_equal(result.error->code, COX_TOO_LARGE);
        assert_non_null(strstr(result.error->text, "4194305 tokens: at most 4194304"));
        cox_prompt_output_deinit(&result);
    }
    request.token_count = 1;
    assert_int_equal(cox_prompt_queue_submit(client.client, &request, 1), 0);
    client_free(&client);
    cox_prompt_queue_free(queue);
    executor_free(executor);
}

PLAIN_TEST(what_is_given_up_frees_its_blocks)
{
    struct cox_executor *executor = executor_new();
    limit_set(UINT64_MAX);
    executor->script.status = waits_at_the_limit;
    struct cox_prompt_queue *queue = prompt_queue_new(executor);
    struct client gone = client_new(queue), stays = client_new(queue);
    for (int round = 0; round < 20; round++) {
        if (round % 2) /* a few steps from now, so that prompts are running at the cancel */
            limit_set(steps_of(executor) + 5);
        for (uint64_t i = 0; i < 30; i++)
            assert_int_equal(submit(&gone, i, 100, true), 0);
        for (uint64_t i = 0; i < 3; i++)
            assert_int_equal(submit(&stays, i, 20, false), 0);
        if (round % 2)
            await_status(queue, is_busy);
        cox_prompt_queue_cancel(gone.client);
        limit_set(UINT64_MAX);
        assert_int_equal(cox_prompt_queue_outstanding(gone.client), 0);
        for (int i = 0; i < 3; i++) {
            struct cox_prompt_output result = take(&stays);
            expect_text(&result, 20);
            cox_prompt_output_deinit(&result);
        }
        await_status(queue, is_all_free);
        struct cox_prompt_output none;
        assert_int_equal(cox_prompt_queue_take(gone.client, &none), COX_EMPTY);
    }
    client_free(&gone);
    client_free(&stays);
    cox_prompt_queue_free(queue);
    executor_free(executor);
}

PLAIN_TEST(what_is_given_up_runs_no_further)
{
    struct cox_executor *executor = executor_new();
    limit_set(5);
    executor->script.status = waits_at_the_limit;
    struct cox_prompt_queue *queue = prompt_queue_new(executor);
    struct client gone = client_new(queue);
    for (uint64_t i = 0; i < 30; i++)
        assert_int_equal(submit(&gone, i, 100, true), 0);
    await_status(queue, is_busy);
    cox_prompt_queue_cancel(gone.client);
    limit_set(20); /* they would need a hundred */
    await_status(queue, is_all_free);
    struct cox_prompts_status status;
    cox_prompt_queue_status(queue, &status);
    assert_int_equal(status.cancelled, 30);
    limit_set(UINT64_MAX);
    client_free(&gone);
    cox_prompt_queue_free(queue);
    executor_free(executor);
}

PLAIN_TEST(bad_prompts_fail_alone)
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
    struct cox_executor *executor = executor_new();
    struct cox_prompt_queue *queue = prompt_queue_new(executor);
    struct client client = client_new(queue);
    for (uint64_t i = 0; i < 4; i++)
        assert_int_equal(cox_prompt_queue_submit(client.client, &bad[i], i), 0);
    assert_int_equal(submit(&client, 4, 5, false), 0);
    for (int i = 0; i < 5; i++) {
        struct cox_prompt_output result = take(&client);
        if (result.index == 4) {
            expect_text(&result, 5);
        } else {
            assert_int_equal(result.finish, COX_FINISH_ERROR);
            assert_int_equal(result.error->code, codes[result.index]);
        }
        cox_prompt_output_deinit(&result);
    }
    client_free(&client);
    cox_prompt_queue_free(queue);
    executor_free(executor);
}

static int third_is_dead(uint64_t number)
{
    return number == 3 ? COX_PEER_DEAD : 0;
}

PLAIN_TEST(after_a_failure_the_next_prompt_gets_another_scheduler)
{
    struct cox_executor *executor = executor_new();
    executor->script.status = third_is_dead;
    struct cox_prompt_queue *queue = prompt_queue_new(executor);
    struct client client = client_new(queue);
    for (uint64_t i = 0; i < 4; i++)
        assert_int_equal(submit(&client, i, 60, true), 0);
    for (int i = 0; i < 4; i++) {
        struct cox_prompt_output result = take(&client);
        assert_int_equal(result.error->code, COX_PEER_DEAD);
        assert_non_null(strstr(result.error->text, "rank 1 says no"));
        cox_prompt_output_deinit(&result);
    }
    assert_int_equal(submit(&client, 9, 20, false), 0);
    struct cox_prompt_output result = take(&client);
    expect_text(&result, 20);
    cox_prompt_output_deinit(&result);
    client_free(&client);
    cox_prompt_queue_free(queue);
    executor_free(executor);
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

PLAIN_TEST(sequences_of_a_failed_engine_loop_leave_legacy_ranks)
{
    for (int reported = 0; reported < 2; reported++) {
        struct cox_executor *executor = executor_new();
        executor->legacy = true;
        executor->script.status = third_is_refused;
        executor->script.loses_table = true;
        executor->script.cleanup = reported ? first_fails : NULL;
        struct cox_prompt_queue *queue = prompt_queue_new(executor);
        struct client client = client_new(queue);
        assert_int_equal(submit(&client, 0, 60, true), 0);
        struct cox_prompt_output failed = take(&client);
        assert_int_equal(failed.error->code, COX_CORRUPT);
        cox_prompt_output_deinit(&failed);
        pthread_mutex_lock(&executor->lock);
        assert_true(cox_table_count(executor->table) > 0);
        pthread_mutex_unlock(&executor->lock);
        for (uint64_t i = 8; i < 10; i++) {
            assert_int_equal(submit(&client, i, 20, false), 0);
            struct cox_prompt_output result = take(&client);
            expect_text(&result, 20);
            cox_prompt_output_deinit(&result);
        }
        /* The end of the last one may not have been reported yet. */
        pthread_mutex_lock(&executor->lock);
        assert_true(cox_table_count(executor->table) <= 1);
        pthread_mutex_unlock(&executor->lock);
        client_free(&client);
        cox_prompt_queue_free(queue);
        executor_free(executor);
    }
}

PLAIN_TEST(the_end_is_reported_with_its_cause)
{
    for (int with_cause = 0; with_cause < 2; with_cause++) {
        struct cox_executor *executor = executor_new();
        executor->script.silent = true; /* a step that never ends */
        struct cox_prompt_queue *queue = prompt_queue_new(executor);
        struct client client = client_new(queue);
        struct cox_error cause = {0};
        cox_fail(&cause, COX_PEER_DEAD, "rank 7 died");
        for (uint64_t i = 0; i < 30; i++) /* some are running, some wait */
            assert_int_equal(submit(&client, i, 10, false), 0);
        cox_prompt_queue_stop(queue, with_cause ? &cause : NULL);
        cox_prompt_queue_stop(queue, NULL);
        assert_int_equal(submit(&client, 30, 10, false), 0);
        for (int i = 0; i < 31; i++) {
            struct cox_prompt_output result = take(&client);
            assert_int_equal(result.error->code, with_cause ? COX_PEER_DEAD : COX_CLOSED);
            assert_true(!with_cause || !strcmp(result.error->text, "rank 7 died"));
            cox_prompt_output_deinit(&result);
        }
        client_free(&client);
        cox_prompt_queue_free(queue);
        executor_free(executor);
    }
}

/* ---- adapters ---- */

static struct cox_lora *lora_new(struct cox_executor *executor)
{
    const struct cox_log log = {0};
    struct cox_lora *lora = NULL;
    struct cox_lora_result result;
    struct cox_error error = {0};
    assert_int_equal(cox_lora_new(executor, &log, &lora), 0);
    for (const char *name = "a\0b\0"; *name; name += 2)
        if (cox_lora_load(lora, name, "/folder", COX_DEADLINE_NEVER, &result, &error))
            fail_msg("%s", error.text);
    return lora;
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

PLAIN_TEST(m13_prompts_count_as_uses_until_they_are_done)
{
    struct cox_executor *executor = executor_new();
    struct cox_lora *lora = lora_new(executor);
    struct cox_prompt_queue *queue = prompt_queue_with(executor, lora, NULL);
    struct client client = client_new(queue), other = client_new(queue);
    for (uint64_t i = 0; i < 60; i++)
        assert_int_equal(submit_with(&client, i, 10, false,
                                     i % 3 == 0   ? "a"
                                     : i % 3 == 1 ? "b"
                                                  : NULL),
                         0);
    for (uint64_t i = 0; i < 60; i++) {
        struct cox_prompt_output result = take(&client);
        expect_text(&result, 10);
        cox_prompt_output_deinit(&result);
    }
    assert_true(executor->lora_row_count > 0);
    assert_int_equal(uses_of(lora, "a"), 0);
    assert_int_equal(uses_of(lora, "b"), 0);
    /* Cancelled ones, running or waiting, do not stay uses. */
    for (uint64_t i = 0; i < 40; i++)
        assert_int_equal(submit_with(&other, i, 100, true, "a"), 0);
    assert_int_equal(uses_of(lora, "a"), 40);
    await_status(queue, is_busy);
    client_free(&other);
    await_status(queue, is_all_free);
    assert_int_equal(uses_of(lora, "a"), 0);
    client_free(&client);
    cox_prompt_queue_free(queue);
    cox_lora_free(lora);
    executor_free(executor);
}

PLAIN_TEST(m13_a_prompt_with_an_unknown_adapter_fails_alone)
{
    struct cox_executor *executor = executor_new();
    struct cox_lora *lora = lora_new(executor);
    for (int with = 0; with < 2; with++) {
        struct cox_prompt_queue *queue = prompt_queue_with(executor, with ? lora : NULL, NULL);
        struct client client = client_new(queue);
        assert_int_equal(submit(&client, 1, 10, false), 0);
        assert_int_equal(submit_with(&client, 2, 10, false, "missing"), 0);
        for (int i = 0; i < 2; i++) {
            struct cox_prompt_output result = take(&client);
            if (result.index == 1)
                expect_text(&result, 10);
            else
                assert_int_equal(result.error->code, with ? COX_INVALID : COX_UNSUPPORTED);
            if (result.index == 2 && with)
                assert_non_null(strstr(result.error->text, "'missing' is loaded; there are: a, b"));
            cox_prompt_output_deinit(&result);
        }
        client_free(&client);
        cox_prompt_queue_free(queue);
    }
    cox_lora_free(lora);
    executor_free(executor);
}

/* Every prompt ends, and none stays a use. */
PLAIN_TEST(m13_the_end_gives_all_adapters_back)
{
    struct cox_executor *executor = executor_new();
    struct cox_lora *lora = lora_new(executor);
    struct cox_prompt_queue *queue = prompt_queue_with(executor, lora, NULL);
    struct client client = client_new(queue);
    for (uint64_t i = 0; i < 50; i++)
        assert_int_equal(submit_with(&client, i, 100, true, "a"), 0);
    await_status(queue, is_busy);
    cox_prompt_queue_stop(queue, NULL);
    assert_int_equal(uses_of(lora, "a"), 0);
    client_free(&client);
    cox_prompt_queue_free(queue);
    cox_lora_free(lora);
    executor_free(executor);
}

/* ---- holds and pulls ---- */

/* The prompt of the index that the sequence there is called by. */
static int32_t remote_token(const struct Coxswain__PullKVRequest__PullKVInfo *info,
                            uint32_t position)
{
    int32_t tokens[PROMPT_MAX];
    uint32_t count = prompt_of((uint64_t)info->src_sequence, tokens);
    return position < count ? tokens[position] : -1;
}

static struct cox_executor *executor_of_two_groups(void)
{
    struct cox_executor *executor = executor_new();
    executor->remote_token = remote_token;
    return executor;
}

/* What the other group makes of the prompt: its first token, and a source. */
static void submit_pulled(struct client *client, uint64_t index, uint32_t new_count)
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
    assert_int_equal(cox_prompt_queue_submit(client->client, &request, index), 0);
}

static struct cox_prompt_output take_word(struct client *client, uint64_t index, int code)
{
    struct cox_prompt_output word = take(client);
    assert_true(word.is_pulled);
    assert_int_equal(word.index, index);
    assert_int_equal(word.error ? word.error->code : 0, code);
    cox_prompt_output_deinit(&word);
    return take(client);
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

static void await_free(struct cox_prompt_queue *queue)
{
    struct cox_prompts_status status;
    uint64_t deadline_ns = cox_deadline_after_ms(PATIENCE_MS);
    do {
        cox_prompt_queue_status(queue, &status);
        if (cox_now_ns() > deadline_ns)
            fail_msg("%u blocks are free", status.free_blocks);
        nanosleep(&(struct timespec){.tv_nsec = COX_NSEC_PER_MSEC}, NULL);
    } while (status.free_blocks != status.block_count || status.holds);
}

PLAIN_TEST(m11_a_pulled_prompt_goes_on_with_the_same_text)
{
    struct cox_executor *executor = executor_of_two_groups();
    struct cox_prompt_queue *queue = prompt_queue_with(executor, NULL, "this");
    struct client client = client_new(queue);
    struct cox_prompts_status status;
    for (uint64_t index = 3; index < 14; index++) {
        submit_pulled(&client, index, 5);
        struct cox_prompt_output result = take_word(&client, index, 0);
        expect_rest(&result, 5);
        assert_false(result.recomputed);
        cox_prompt_output_deinit(&result);
    }
    assert_int_equal(executor->token_count_max, 1); /* of no prompt was anything computed */
    cox_prompt_queue_status(queue, &status);
    assert_int_equal(status.transfer.succeeded, 11);
    await_free(queue);
    client_free(&client);
    cox_prompt_queue_free(queue);
    executor_free(executor);
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

PLAIN_TEST(m11_a_pull_that_fails_is_tried_again_and_then_computed)
{
    struct cox_executor *executor = executor_of_two_groups();
    struct cox_prompt_queue *queue = prompt_queue_with(executor, NULL, "this");
    struct client client = client_new(queue);
    struct cox_prompts_status status;
    executor->script.pull_code = fails_twice;
    submit_pulled(&client, 9, 5);
    struct cox_prompt_output result = take_word(&client, 9, 0);
    expect_rest(&result, 5);
    cox_prompt_output_deinit(&result);
    cox_prompt_queue_status(queue, &status);
    assert_int_equal(status.transfer.retries, 2);
    assert_int_equal(status.transfer.failed, 2);
    executor->script.pull_code = fails;
    submit_pulled(&client, 10, 5);
    result = take_word(&client, 10, COX_STALE);
    expect_rest(&result, 5);
    assert_true(result.recomputed);
    cox_prompt_output_deinit(&result);
    cox_prompt_queue_status(queue, &status);
    assert_int_equal(status.recomputed, 1);
    assert_int_equal(executor->pull_count, 6);
    await_free(queue);
    client_free(&client);
    cox_prompt_queue_free(queue);
    executor_free(executor);
}

PLAIN_TEST(p9_a_client_that_leaves_during_a_pull_leaves_no_block)
{
    struct cox_executor *executor = executor_of_two_groups();
    struct cox_prompt_queue *queue = prompt_queue_with(executor, NULL, "this");
    struct client client = client_new(queue);
    struct cox_prompts_status status;
    executor->script.pulls_held = true;
    submit_pulled(&client, 9, 5);
    struct fixture_pull pull = executor_await_pull(executor);
    client_free(&client);
    do
        cox_prompt_queue_status(queue, &status);
    while (status.transfer.cancelled == 0 || status.running);
    assert_int_equal(status.transfer.quarantined_blocks, 3);
    executor_complete_pull(executor, &pull, 0, COX_OUTCOME_OK, 0, 0);
    await_free(queue);
    cox_prompt_queue_status(queue, &status);
    assert_int_equal(status.transfer.late_results, 1);
    cox_prompt_queue_free(queue);
    executor_free(executor);
}

PLAIN_TEST(m10_a_hold_is_its_clients)
{
    struct cox_executor *executor = executor_of_two_groups();
    struct cox_prompt_queue *queue = prompt_queue_with(executor, NULL, "this");
    struct client client = client_new(queue), other = client_new(queue);
    struct cox_kv_reference *found;
    struct cox_error error = {0};
    int32_t tokens[PROMPT_MAX];
    struct cox_prompt_request request = {.tokens = tokens,
                                         .new_count_max = 4,
                                         .hold_ms = 60000,
                                         .token_count = prompt_of(9, tokens)};
    assert_int_equal(cox_prompt_queue_submit(client.client, &request, 9), 0);
    struct cox_prompt_output result = take(&client);
    assert_int_equal(result.token_count, 1);
    assert_non_null(result.hold);
    assert_string_equal(result.hold->cluster_id, "this");
    assert_int_equal(result.hold->block_count, 3);
    assert_int_equal(result.hold->epoch, 1001);
    int64_t id = result.hold->sequence;
    assert_int_equal(cox_prompt_queue_release(other.client, id), 0);
    assert_int_equal(cox_prompt_queue_find_hold(queue, id + 1, &found, &error), COX_NOT_FOUND);
    while (cox_prompt_queue_find_hold(queue, id, &found, NULL))
        ;
    assert_int_equal(found->blocks[2], result.hold->blocks[2]);
    free(found);
    cox_prompt_output_deinit(&result);
    assert_int_equal(cox_prompt_queue_release(client.client, id), 0);
    await_free(queue);
    /* And what it has not released goes with it. */
    assert_int_equal(cox_prompt_queue_submit(client.client, &request, 10), 0);
    result = take(&client);
    assert_non_null(result.hold);
    cox_prompt_output_deinit(&result);
    client_free(&client);
    await_free(queue);
    client_free(&other);
    cox_prompt_queue_free(queue);
    executor_free(executor);
}

static int submit_held(struct client *client, uint64_t index)
{
    int32_t tokens[PROMPT_MAX];
    struct cox_prompt_request request = {.tokens = tokens,
                                         .new_count_max = 4,
                                         .hold_ms = 600000,
                                         .token_count = prompt_of(index, tokens)};
    return cox_prompt_queue_submit(client->client, &request, index);
}

PLAIN_TEST(m10_holds_that_a_cancel_dropped_unheard_are_released)
{
    struct cox_executor *executor = executor_of_two_groups();
    struct cox_prompt_queue *queue = prompt_queue_with(executor, NULL, "this");
    struct client client = client_new(queue);
    struct cox_prompts_status status;
    for (uint64_t index = 0; index < 3; index++)
        assert_int_equal(submit_held(&client, index), 0);
    do
        cox_prompt_queue_status(queue, &status);
    while (status.unread < 3); /* done, and not taken */
    cox_prompt_queue_cancel(client.client);
    await_free(queue); /* although the client stays */
    client_free(&client);
    cox_prompt_queue_free(queue);
    executor_free(executor);
}

static void await_submit(struct cox_executor *executor)
{
    const uint64_t deadline_ns = cox_deadline_after_ms(PATIENCE_MS);
    bool submitted = false;
    while (!submitted) {
        assert_true(cox_now_ns() < deadline_ns);
        pthread_mutex_lock(&executor->lock);
        submitted = executor->submit_count > 0;
        pthread_mutex_unlock(&executor->lock);
    }
}

PLAIN_TEST(m10_orders_to_release_have_a_bound)
{
    struct cox_executor *executor = executor_of_two_groups();
    struct cox_prompt_queue *queue = prompt_queue_with(executor, NULL, "this");
    struct client client = client_new(queue), other = client_new(queue);
    uint64_t count = 0;
    /* While there is no engine loop, nothing is held, and so nothing is kept. */
    for (int i = 0; i < 5000; i++)
        assert_int_equal(cox_prompt_queue_release(client.client, 7), 0);
    executor->script.silent = true; /* a step that does not end */
    assert_int_equal(submit_held(&client, 1), 0);
    await_submit(executor);
    int r;
    while ((r = cox_prompt_queue_release(client.client, 7)) == 0 && count < 100000)
        count++;
    assert_int_equal(r, COX_FULL);
    assert_int_equal(count, 1024);
    assert_int_equal(cox_prompt_queue_release(other.client, 7), 0);
    client_free(&client);
    client_free(&other);
    cox_prompt_queue_free(queue);
    executor_free(executor);
}

PLAIN_TEST(m11_a_source_of_more_blocks_than_there_are_is_refused_before_it_is_copied)
{
    struct cox_executor *executor = executor_of_two_groups();
    struct cox_prompt_queue *queue = prompt_queue_with(executor, NULL, "this");
    struct client client = client_new(queue);
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
        assert_int_equal(cox_prompt_queue_submit(client.client, &request, 1), 0);
        struct cox_prompt_output result = take(&client);
        assert_int_equal(result.error->code, COX_INVALID);
        assert_non_null(strstr(result.error->text, "blocks are to be pulled: here are"));
        cox_prompt_output_deinit(&result);
    }
    client_free(&client);
    cox_prompt_queue_free(queue);
    executor_free(executor);
}

PLAIN_TEST(m10_a_group_without_transfers_says_so)
{
    struct cox_executor *executor = executor_new();
    struct cox_prompt_queue *queue = prompt_queue_new(executor);
    struct client client = client_new(queue);
    submit_pulled(&client, 9, 5);
    struct cox_prompt_output result = take(&client);
    assert_int_equal(result.error->code, COX_UNSUPPORTED);
    cox_prompt_output_deinit(&result);
    client_free(&client);
    cox_prompt_queue_free(queue);
    executor_free(executor);
}
