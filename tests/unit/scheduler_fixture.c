#include "scheduler_fixture.h"

#include "proto/executor.pb-c.h"
#include "proto/wire.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int32_t model(const int32_t *tokens, uint32_t count)
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
        executor->lora_row_count += batch->rows[i].lora_id != NULL;
    }
    executor->row_count += batch->row_count;
    executor->empty_count += batch->row_count == 0;
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
    executor->weights_version = request->weights_version;
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
    int r = executor->script.cleanup ? executor->script.cleanup() : 0;
    if (r)
        return cox_fail(err, r, "cleanup says %d", r);
    const uint32_t *slots;
    uint32_t slot_count;
    pthread_mutex_lock(&executor->lock);
    cox_table_cleanup(executor->table, seq_ids, count, &slots, &slot_count);
    COX_ASSERT(slot_count == count); /* every one of them was still there */
    executor->cleanup_count += count;
    pthread_mutex_unlock(&executor->lock);
    return 0;
}

/* No rank of it ever forgets, unless a test says so. */
uint64_t cox_executor_life(const struct cox_executor *executor)
{
    return executor->life;
}

void cox_executor_tell_weights(struct cox_executor *executor,
                               void (*tell)(void *context, struct cox_weights_told *ret_told),
                               void *context)
{
    executor->tell = tell;
    executor->tell_context = context;
}

const char *cox_executor_door(const struct cox_executor *executor)
{
    (void)executor;
    return NULL;
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

struct cox_executor *executor_new(void)
{
    struct cox_executor *executor = calloc(1, sizeof *executor);
    COX_ASSERT(executor);
    executor->request_size_max = FRAME_SIZE;
    executor->life = 1;
    pthread_mutex_init(&executor->lock, NULL);
    pthread_cond_init(&executor->wake, NULL);
    COX_ASSERT(cox_table_new(4096, 4096, &executor->table) == 0);
    COX_ASSERT(pthread_create(&executor->thread, NULL, rank_main, executor) == 0);
    return executor;
}

void executor_free(struct cox_executor *executor)
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

uint32_t cox_executor_rank_count(const struct cox_executor *executor)
{
    (void)executor;
    return 1;
}

/* Its one rank does what it is told. */
int cox_executor_lora_results(struct cox_executor *executor,
                              const struct ModelExecuteData__LoraOperationRequest *request,
                              uint64_t deadline_ns, struct cox_lora_result *ret_results,
                              struct cox_error *err)
{
    (void)executor, (void)request, (void)deadline_ns, (void)err;
    ret_results[0] = (struct cox_lora_result){.status = 0};
    return 0;
}
