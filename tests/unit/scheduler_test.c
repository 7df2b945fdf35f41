/*
 * scheduler: whole runs against a rank that is a thread of this process. Its sequence table is the
 * workers' own; its model is a hash of all tokens of a sequence, read through a KV cache that
 * remembers what was written where, so that a wrong block, a position left out or a sequence taken
 * for another one changes the text or stops the test.
 */
#include "coordinator/scheduler.h"

#include "proto/executor.pb-c.h"
#include "proto/wire.h"
#include "worker/table.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define BLOCK_SIZE 4
#define BLOCK_COUNT_MAX 512
#define STOP 0
#define FRAME_SIZE 65536

struct cell {
    int64_t id;
    uint32_t position;
    int32_t token;
};

/* What the rank, or the executor, does with the n-th submit. */
struct script {
    int (*submit)(uint64_t number); /* what submit returns; NULL: 0 */
    int (*status)(uint64_t number); /* how the step ends; NULL: 0 */
    bool loses_table;               /* a step that failed was applied by this rank all the same */
    bool bad_reply;
    bool silent; /* never completes */
};

/* The executor of these tests. */
struct cox_executor {
    bool legacy;
    size_t request_size_max;
    struct script script;
    struct cox_table *table;
    struct cell cells[BLOCK_COUNT_MAX][BLOCK_SIZE];

    pthread_mutex_t lock;
    pthread_cond_t wake;
    pthread_t thread;
    cox_completion_fn handler;
    void *handler_context;
    bool stop;
    bool pending;
    uint8_t frame[FRAME_SIZE];
    size_t frame_size;
    void *request_context;
    uint64_t sequence;

    /* Only the test's thread touches these while the rank is idle. */
    uint64_t submit_count;
    uint64_t row_count;
    uint64_t row_count_max;
    uint64_t token_count_max;
    uint64_t cleanup_count;
};

static int32_t model(const int32_t *tokens, uint32_t count)
{
    uint64_t digest = cox_wire_token_digest(tokens, count);
    return (int32_t)(digest % 40); /* 0 is STOP */
}

/* ---- the rank ---- */

static void row_compute(struct cox_executor *executor, const struct cox_batch_row *row,
                        struct cox_batch_output *output)
{
    uint32_t end = row->position + row->token_count;
    COX_ASSERT(row->tables[0].count * BLOCK_SIZE >= end);
    for (uint32_t p = 0; p < end; p++) {
        int32_t block = row->tables[0].blocks[p / BLOCK_SIZE];
        COX_ASSERT(block >= 0 && block < BLOCK_COUNT_MAX);
        struct cell *cell = &executor->cells[block][p % BLOCK_SIZE];
        struct cell expected = {.id = row->id, .position = p, .token = row->tokens[p]};
        if (p >= row->position)
            *cell = expected;
        COX_ASSERT(cell->id == row->id && cell->position == p && cell->token == row->tokens[p]);
    }
    if (row->emit)
        output->token = model(row->tokens, end);
}

static void batch_run(struct cox_executor *executor, const struct cox_batch *batch,
                      struct cox_batch_output *outputs)
{
    uint64_t token_count = 0;
    for (uint32_t i = 0; i < batch->row_count; i++) {
        row_compute(executor, &batch->rows[i], &outputs[i]);
        token_count += batch->rows[i].token_count;
    }
    executor->row_count += batch->row_count;
    if (batch->row_count > executor->row_count_max)
        executor->row_count_max = batch->row_count;
    if (token_count > executor->token_count_max)
        executor->token_count_max = token_count;
}

static void complete(struct cox_executor *executor, int status, const char *text,
                     const ModelExecuteData__ExecuteResponse *response)
{
    struct cox_rank_result rank = {.outcome = COX_OUTCOME_OK, .response = response};
    struct cox_completion completion = {
        .sequence = executor->sequence,
        .channel = COX_CHANNEL_EXECUTE,
        .status = status,
        .text = text,
        .rank_count = 1,
        .ranks = &rank,
        .payload = response ? &rank : NULL,
        .request_context = executor->request_context,
    };
    executor->handler(executor->handler_context, &completion);
}

static void reply(struct cox_executor *executor, const struct cox_batch *batch,
                  const struct cox_batch_output *outputs, bool nested)
{
    int32_t tokens[256];
    int64_t wide[256];
    static ModelExecuteData__SequenceOutput samples[256];
    static ModelExecuteData__SequenceOutput *sample_list[256];
    static ModelExecuteData__CompletionSequenceGroupOutput groups[256];
    static ModelExecuteData__CompletionSequenceGroupOutput *group_list[256];
    ModelExecuteData__StepResult result = MODEL_EXECUTE_DATA__STEP_RESULT__INIT;
    ModelExecuteData__ExecuteModelResponse answer =
        MODEL_EXECUTE_DATA__EXECUTE_MODEL_RESPONSE__INIT;
    ModelExecuteData__ExecuteResponse response = MODEL_EXECUTE_DATA__EXECUTE_RESPONSE__INIT;
    for (uint32_t i = 0; i < batch->row_count; i++) {
        tokens[i] = outputs[i].token;
        wide[i] = outputs[i].token;
        model_execute_data__sequence_output__init(&samples[i]);
        samples[i].seq_id = batch->rows[i].id;
        samples[i].n_output_token = 1;
        samples[i].output_token = &wide[i];
        sample_list[i] = &samples[i];
        model_execute_data__completion_sequence_group_output__init(&groups[i]);
        groups[i].n_samples = 1;
        groups[i].samples = &sample_list[i];
        /* Backwards: the order is the worker's affair. */
        group_list[batch->row_count - 1 - i] = &groups[i];
    }
    if (nested) {
        answer.n_outputs = batch->row_count - (executor->script.bad_reply ? 1 : 0);
        answer.outputs = group_list;
    } else {
        result.n_tokens = batch->row_count + (executor->script.bad_reply ? 1 : 0);
        result.tokens = tokens;
        result.has_base_sequence = true;
        result.base_sequence = executor->sequence;
        answer.step = &result;
    }
    answer.has_model_execute_time = true;
    answer.model_execute_time = 0.001f;
    response.result_case = MODEL_EXECUTE_DATA__EXECUTE_RESPONSE__RESULT_EXECUTE_MODEL_RESPONSE;
    response.execute_model_response = &answer;
    complete(executor, 0, NULL, &response);
}

static void step_take(struct cox_executor *executor, struct cox_arena *arena)
{
    ModelExecuteData__ExecuteRequest *request;
    const struct cox_batch *batch;
    struct cox_batch_output *outputs;
    struct cox_error error = {0};
    int status = executor->script.status ? executor->script.status(executor->sequence) : 0;
    bool aside = status && !executor->script.loses_table;
    cox_arena_reset(arena);
    int r = cox_wire_request_unpack(arena, executor->frame, executor->frame_size, &request);
    COX_ASSERT(r == 0);
    bool nested = request->execute_model_request->step == NULL;
    r = aside ? 0
              : cox_table_apply(executor->table, executor->sequence, request->execute_model_request,
                                &batch, &outputs, &error);
    if (r)
        fprintf(stderr, "apply: %s\n", error.text);
    COX_ASSERT(r == 0);
    if (!aside) {
        batch_run(executor, batch, outputs);
        struct cox_batch_row rows[256];
        struct cox_batch copy = *batch;
        memcpy(rows, batch->rows, batch->row_count * sizeof *rows);
        copy.rows = rows;
        struct cox_batch_output tokens[256];
        memcpy(tokens, outputs, batch->row_count * sizeof *tokens);
        cox_table_commit(executor->table);
        if (!status && !executor->script.silent)
            reply(executor, &copy, tokens, nested);
    }
    if (status) {
        /* Nothing computed before counts any more: a rank may have been replaced. */
        memset(executor->cells, 0, sizeof executor->cells);
        complete(executor, status, "rank 1 says no", NULL);
    }
}

static void *rank_main(void *context)
{
    struct cox_executor *executor = context;
    struct cox_arena arena;
    COX_ASSERT(cox_arena_init(&arena, 1 << 16, 1 << 24) == 0);
    pthread_mutex_lock(&executor->lock);
    for (;;) {
        while (!executor->stop && !executor->pending)
            pthread_cond_wait(&executor->wake, &executor->lock);
        if (!executor->pending)
            break;
        executor->pending = false;
        step_take(executor, &arena);
    }
    pthread_mutex_unlock(&executor->lock);
    cox_arena_deinit(&arena);
    return NULL;
}

/* ---- the executor's functions ---- */

int cox_executor_submit(struct cox_executor *executor,
                        const struct ModelExecuteData__ExecuteRequest *request,
                        const struct cox_submit_options *options, uint64_t *ret_sequence,
                        struct cox_error *err)
{
    pthread_mutex_lock(&executor->lock);
    uint64_t number = ++executor->submit_count;
    int r = executor->script.submit ? executor->script.submit(number) : 0;
    if (r) {
        pthread_mutex_unlock(&executor->lock);
        return cox_fail(err, r, "submit says %s", cox_status_text(r));
    }
    COX_ASSERT(!executor->pending);
    r = cox_wire_request_pack(request, executor->frame, executor->request_size_max,
                              &executor->frame_size);
    COX_ASSERT(r == 0); /* the plan keeps steps below the frame */
    executor->request_context = options->request_context;
    *ret_sequence = ++executor->sequence;
    executor->pending = true;
    pthread_cond_signal(&executor->wake);
    pthread_mutex_unlock(&executor->lock);
    return 0;
}

int cox_executor_replace(struct cox_executor *executor, enum cox_channel_id channel,
                         cox_completion_fn handler, void *context)
{
    COX_ASSERT(channel == COX_CHANNEL_EXECUTE);
    pthread_mutex_lock(&executor->lock);
    executor->handler = handler;
    executor->handler_context = context;
    pthread_mutex_unlock(&executor->lock);
    return 0;
}

int cox_executor_cleanup(struct cox_executor *executor, const int64_t *seq_ids, size_t count,
                         uint64_t deadline_ns, struct cox_error *err)
{
    (void)deadline_ns;
    (void)err;
    const uint32_t *slots;
    uint32_t slot_count;
    pthread_mutex_lock(&executor->lock);
    cox_table_cleanup(executor->table, seq_ids, count, &slots, &slot_count);
    COX_ASSERT(slot_count == count); /* every one of them was still there */
    executor->cleanup_count += count;
    pthread_mutex_unlock(&executor->lock);
    return 0;
}

bool cox_executor_legacy(const struct cox_executor *executor)
{
    return executor->legacy;
}

size_t cox_executor_request_size_max(const struct cox_executor *executor,
                                     enum cox_channel_id channel)
{
    COX_ASSERT(channel == COX_CHANNEL_EXECUTE);
    return executor->request_size_max;
}

static struct cox_executor *executor_new(void)
{
    struct cox_executor *executor = calloc(1, sizeof *executor);
    COX_ASSERT(executor);
    executor->request_size_max = FRAME_SIZE;
    pthread_mutex_init(&executor->lock, NULL);
    pthread_cond_init(&executor->wake, NULL);
    COX_ASSERT(cox_table_new(4096, 4096, &executor->table) == 0);
    COX_ASSERT(pthread_create(&executor->thread, NULL, rank_main, executor) == 0);
    return executor;
}

static void executor_free(struct cox_executor *executor)
{
    pthread_mutex_lock(&executor->lock);
    executor->stop = true;
    pthread_cond_signal(&executor->wake);
    pthread_mutex_unlock(&executor->lock);
    pthread_join(executor->thread, NULL);
    cox_table_free(executor->table);
    pthread_mutex_destroy(&executor->lock);
    pthread_cond_destroy(&executor->wake);
    free(executor);
}

/* ---- allocations of one thread, also those inside libprotobuf-c ---- */

static _Thread_local uint64_t allocation_count;

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#endif

#ifndef SANITIZED
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *memory, size_t size);

void *malloc(size_t size)
{
    allocation_count++;
    return __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    allocation_count++;
    return __libc_calloc(count, size);
}

void *realloc(void *memory, size_t size)
{
    allocation_count++;
    return __libc_realloc(memory, size);
}
#endif

/* ---- requests whose answers are known ---- */

#define REQUEST_COUNT 200
#define PROMPT_MAX 60

struct expectation {
    int32_t tokens[PROMPT_MAX + 40];
    uint32_t prompt_count;
    uint32_t new_max;
    uint32_t done_count;
    int code; /* expected */
};

static struct expectation expectations[REQUEST_COUNT];
static uint32_t random_state;

static uint32_t draw(uint32_t below)
{
    random_state = random_state * 1664525 + 1013904223;
    return (random_state >> 8) % below;
}

static void expectations_make(uint32_t seed)
{
    random_state = seed;
    memset(expectations, 0, sizeof expectations);
    for (int i = 0; i < REQUEST_COUNT; i++) {
        struct expectation *e = &expectations[i];
        e->prompt_count = 1 + draw(draw(4) ? 10 : PROMPT_MAX);
        e->new_max = 1 + draw(30);
        for (uint32_t t = 0; t < e->prompt_count; t++)
            e->tokens[t] = (int32_t)draw(100);
    }
}

static void on_done(void *context, const struct cox_sequence *sequence)
{
    (void)context;
    struct expectation *e = sequence->request.context;
    e->done_count++;
    COX_ASSERT(sequence->error.code == e->code);
    if (e->code) {
        COX_ASSERT(sequence->finish == COX_FINISH_ERROR);
        return;
    }
    int32_t tokens[PROMPT_MAX + 40];
    uint32_t count = e->prompt_count;
    memcpy(tokens, e->tokens, sizeof tokens);
    do
        tokens[count] = model(tokens, count);
    while (tokens[count++] != STOP && count < e->prompt_count + e->new_max);
    COX_ASSERT(sequence->token_count == count);
    COX_ASSERT(!memcmp(sequence->tokens, tokens, count * sizeof *tokens));
    COX_ASSERT(sequence->finish ==
               (tokens[count - 1] == STOP ? COX_FINISH_STOP : COX_FINISH_LENGTH));
}

static struct cox_scheduler_options options_make(void)
{
    return (struct cox_scheduler_options){
        .block_count = BLOCK_COUNT_MAX,
        .block_size = BLOCK_SIZE,
        .position_count_max = 128,
        .done = on_done,
    };
}

static void add_all(struct cox_scheduler *scheduler)
{
    for (int i = 0; i < REQUEST_COUNT; i++) {
        struct expectation *e = &expectations[i];
        struct cox_request request = {
            .tokens = e->tokens,
            .token_count = e->prompt_count,
            .new_count_max = e->new_max,
            .stop_tokens = {STOP},
            .stop_count = 1,
            .context = e,
        };
        assert_int_equal(cox_scheduler_add(scheduler, &request), 0);
    }
}

/* Runs all requests and expects `code` of the run; every request is reported once. */
static void run_all(struct cox_executor *executor, const struct cox_scheduler_options *options,
                    int code, struct cox_error *ret_error, struct cox_scheduler_stats *ret_stats)
{
    struct cox_scheduler *scheduler = NULL;
    struct cox_error error = {0};
    if (cox_scheduler_new(executor, options, &scheduler, &error))
        fail_msg("%s", error.text);
    for (int i = 0; i < REQUEST_COUNT; i++)
        expectations[i].code = code;
    add_all(scheduler);
    int r = cox_scheduler_run(scheduler, &error);
    if (r != code)
        fail_msg("run returned %d: %s", r, error.text);
    for (int i = 0; i < REQUEST_COUNT; i++)
        assert_int_equal(expectations[i].done_count, 1);
    cox_scheduler_stats(scheduler, ret_stats);
    cox_scheduler_free(scheduler);
    *ret_error = error;
    if (!code)
        assert_int_equal(cox_table_count(executor->table), 0);
}

static void many_requests_share_steps(void **state)
{
    (void)state;
    struct cox_executor *executor = executor_new();
    struct cox_scheduler_options options = options_make();
    struct cox_scheduler_stats stats;
    struct cox_error error;
    expectations_make(1);
    run_all(executor, &options, 0, &error, &stats);
    assert_true(executor->row_count_max > 32);
    assert_true(executor->row_count_max <= 64);
    assert_true(executor->token_count_max <= 512);
    assert_int_equal(stats.steps, executor->submit_count);
    assert_int_equal(stats.retries, 0);
    assert_true(stats.step_p50_ns > 0 && stats.step_p50_ns <= stats.step_p99_ns);
    assert_true(stats.channel_p50_ns > 0 && stats.channel_p99_ns <= stats.step_p99_ns);
    assert_true(stats.run_ns > 0);

    /* A second scheduler on the same group starts anew. */
    expectations_make(2);
    options.sequence_count_max = 1;
    run_all(executor, &options, 0, &error, &stats);
    assert_int_equal(stats.plan.preemptions, 0);
    executor_free(executor);
}

static void small_pools_chunks_and_frames_change_no_text(void **state)
{
    (void)state;
    uint64_t preemptions = 0;
    for (uint32_t seed = 1; seed <= 30; seed++) {
        struct cox_executor *executor = executor_new();
        expectations_make(seed);
        struct cox_scheduler_options options = options_make();
        options.block_count = 24 + draw(30);
        options.token_count_max = 1 + draw(40);
        options.sequence_count_max = 1 + draw(40);
        options.nested = seed % 3 == 0;
        if (seed % 2)
            executor->request_size_max = 4000 + draw(2000);
        struct cox_scheduler_stats stats;
        struct cox_error error;
        run_all(executor, &options, 0, &error, &stats);
        if (!options.nested)
            assert_true(executor->token_count_max <= options.token_count_max);
        preemptions += stats.plan.preemptions;
        executor_free(executor);
    }
    assert_true(preemptions > 0);
}

static int fails_now_and_then(uint64_t number)
{
    static const int statuses[] = {COX_REJECTED, COX_TIMEOUT, COX_STALE, COX_ABORTED};
    uint64_t h = number * 2654435761u >> 7;
    return h % 5 == 0 ? statuses[h / 5 % 4] : 0;
}

static void failed_steps_change_no_text(void **state)
{
    (void)state;
    for (uint32_t seed = 1; seed <= 24; seed++) {
        struct cox_executor *executor = executor_new();
        expectations_make(seed);
        struct cox_scheduler_options options = options_make();
        options.block_count = 24 + draw(100);
        options.token_count_max = 100;
        options.retry_max = 20;
        options.nested = seed % 3 == 0;
        executor->script.status = fails_now_and_then;
        executor->script.loses_table = seed % 2;
        struct cox_scheduler_stats stats;
        struct cox_error error;
        run_all(executor, &options, 0, &error, &stats);
        assert_true(stats.retries > 0);
        executor_free(executor);
    }
}

static int always_rejected(uint64_t number)
{
    (void)number;
    return COX_REJECTED;
}

static void retries_end(void **state)
{
    (void)state;
    struct cox_executor *executor = executor_new();
    struct cox_scheduler_options options = options_make();
    struct cox_scheduler_stats stats;
    struct cox_error error;
    expectations_make(1);
    executor->script.status = always_rejected;
    run_all(executor, &options, COX_REJECTED, &error, &stats);
    assert_int_equal(executor->submit_count, 4);
    assert_int_equal(stats.retries, 3);
    assert_non_null(strstr(error.text, "rank 1 says no"));
    assert_non_null(strstr(error.text, "tried 4 times"));
    executor_free(executor);
}

static int late_at_first(uint64_t number)
{
    return number % 7 ? 0 : number % 2 ? COX_LATE : COX_FULL;
}

static int late_for_ever(uint64_t number)
{
    (void)number;
    return COX_LATE;
}

static void a_late_rank_is_waited_for(void **state)
{
    (void)state;
    struct cox_executor *executor = executor_new();
    struct cox_scheduler_options options = options_make();
    struct cox_scheduler_stats stats;
    struct cox_error error;
    expectations_make(3);
    executor->script.submit = late_at_first;
    run_all(executor, &options, 0, &error, &stats);
    assert_true(executor->submit_count > stats.steps);
    assert_int_equal(stats.retries, 0);

    expectations_make(3);
    executor->script.submit = late_for_ever;
    options.step_ms = 50;
    run_all(executor, &options, COX_LATE, &error, &stats);
    assert_non_null(strstr(error.text, "submit says"));
    executor_free(executor);
}

static int dead(uint64_t number)
{
    (void)number;
    return COX_PEER_DEAD;
}

static void a_death_and_nonsense_end_all(void **state)
{
    (void)state;
    struct cox_scheduler_options options = options_make();
    struct cox_scheduler_stats stats;
    struct cox_error error;
    struct cox_executor *executor = executor_new();
    executor->script.status = dead;
    expectations_make(4);
    run_all(executor, &options, COX_PEER_DEAD, &error, &stats);
    assert_int_equal(stats.retries, 0);
    executor_free(executor);

    for (int nested = 0; nested < 2; nested++) {
        executor = executor_new();
        executor->legacy = nested;
        executor->script.bad_reply = true;
        expectations_make(4);
        run_all(executor, &options, COX_CORRUPT, &error, &stats);
        assert_non_null(strstr(error.text, "tokens for"));
        executor_free(executor);
    }
}

static void *stop_soon(void *context)
{
    cox_scheduler_stop(context);
    return NULL;
}

static void stop_ends_a_run_whose_step_never_ends(void **state)
{
    (void)state;
    struct cox_executor *executor = executor_new();
    struct cox_scheduler_options options = options_make();
    struct cox_scheduler *scheduler = NULL;
    struct cox_error error = {0};
    executor->script.silent = true;
    expectations_make(5);
    for (int i = 0; i < REQUEST_COUNT; i++)
        expectations[i].code = COX_CLOSED;
    assert_int_equal(cox_scheduler_new(executor, &options, &scheduler, &error), 0);
    add_all(scheduler);
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, stop_soon, scheduler), 0);
    assert_int_equal(cox_scheduler_run(scheduler, &error), COX_CLOSED);
    pthread_join(thread, NULL);
    for (int i = 0; i < REQUEST_COUNT; i++)
        assert_int_equal(expectations[i].done_count, 1);
    error.code = 0;
    assert_int_equal(cox_scheduler_run(scheduler, &error), COX_CLOSED);
    cox_scheduler_free(scheduler);
    executor_free(executor);
}

static uint64_t allocations_before, allocations_after;

static int counts_allocations(uint64_t number)
{
    if (number == 5)
        allocations_before = allocation_count;
    if (number == 30)
        allocations_after = allocation_count;
    return 0;
}

static void steps_allocate_nothing(void **state)
{
    (void)state;
#ifdef SANITIZED
    skip();
#endif
    for (int nested = 0; nested < 2; nested++) {
        struct cox_executor *executor = executor_new();
        struct cox_scheduler_options options = options_make();
        struct cox_scheduler *scheduler = NULL;
        struct cox_error error = {0};
        executor->script.submit = counts_allocations;
        options.done = NULL;
        options.nested = nested;
        assert_int_equal(cox_scheduler_new(executor, &options, &scheduler, &error), 0);
        const int32_t tokens[3] = {1, 2, 3};
        struct cox_request request = {.tokens = tokens, .token_count = 3, .new_count_max = 40};
        for (int i = 0; i < 8; i++)
            assert_int_equal(cox_scheduler_add(scheduler, &request), 0);
        allocations_before = allocations_after = 0;
        assert_int_equal(cox_scheduler_run(scheduler, &error), 0);
        assert_int_equal(executor->submit_count, 40);
        assert_true(allocations_before > 0);
        assert_int_equal(allocations_after, allocations_before);
        cox_scheduler_free(scheduler);
        executor_free(executor);
    }
}

static void capacities_of_init_are_checked(void **state)
{
    (void)state;
    struct cox_scheduler_options options = {0};
    struct cox_init_summary summary = {
        .npu_block_count = 100,
        .max_position_embeddings = 64,
        .kv_cache_count = 1,
        .kv_caches = {{.block_count = 100, .block_size = 16}},
    };
    struct cox_error error = {0};
    assert_int_equal(cox_scheduler_fit(&options, &summary, &error), 0);
    assert_int_equal(options.block_count, 100);
    assert_int_equal(options.block_size, 16);
    assert_int_equal(options.position_count_max, 64);
    summary.kv_caches[0].block_size = 0;
    assert_int_equal(cox_scheduler_fit(&options, &summary, &error), COX_CORRUPT);
    summary.kv_caches[0].block_size = 16;
    summary.npu_block_count = -5;
    assert_int_equal(cox_scheduler_fit(&options, &summary, NULL), COX_CORRUPT);
    summary.kv_cache_count = 0;
    assert_int_equal(cox_scheduler_fit(&options, &summary, NULL), COX_CORRUPT);
    summary.kv_cache_count = 2;
    assert_int_equal(cox_scheduler_fit(&options, &summary, NULL), COX_UNSUPPORTED);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(many_requests_share_steps),
        cmocka_unit_test(small_pools_chunks_and_frames_change_no_text),
        cmocka_unit_test(failed_steps_change_no_text),
        cmocka_unit_test(retries_end),
        cmocka_unit_test(a_late_rank_is_waited_for),
        cmocka_unit_test(a_death_and_nonsense_end_all),
        cmocka_unit_test(stop_ends_a_run_whose_step_never_ends),
        cmocka_unit_test(steps_allocate_nothing),
        cmocka_unit_test(capacities_of_init_are_checked),
    };
    return cmocka_run_group_tests_name("scheduler", tests, NULL, NULL);
}
