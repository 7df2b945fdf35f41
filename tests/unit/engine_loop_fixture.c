#include "engine_loop_fixture.h"

#include "proto/executor.pb-c.h"
#include "proto/wire.h"
#include "tests/lib/test.h"
#include "tests/lib/token_hash.h"

int32_t model(const int32_t *tokens, uint32_t count)
{
    uint64_t digest = test_token_hash(tokens, count);
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
                     const Coxswain__ExecuteResponse *response)
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
        .request_context = executor->requests[executor->sequence % FIXTURE_DEPTH].request_context,
    };
    executor->handler(executor->handler_context, &completion);
}

static void reply(struct cox_executor *executor, const struct cox_batch *batch,
                  const struct cox_batch_output *outputs, bool nested)
{
    int32_t tokens[256];
    int64_t wide[256];
    static Coxswain__SequenceOutput samples[256];
    static Coxswain__SequenceOutput *sample_list[256];
    static Coxswain__CompletionSequenceGroupOutput groups[256];
    static Coxswain__CompletionSequenceGroupOutput *group_list[256];
    Coxswain__StepResult result = COXSWAIN__STEP_RESULT__INIT;
    Coxswain__ExecuteModelResponse reply = COXSWAIN__EXECUTE_MODEL_RESPONSE__INIT;
    Coxswain__ExecuteResponse response = COXSWAIN__EXECUTE_RESPONSE__INIT;
    for (uint32_t i = 0; i < batch->row_count; i++) {
        tokens[i] = outputs[i].token;
        wide[i] = outputs[i].token;
        coxswain__sequence_output__init(&samples[i]);
        samples[i].seq_id = batch->rows[i].id;
        samples[i].n_output_token = 1;
        samples[i].output_token = &wide[i];
        sample_list[i] = &samples[i];
        coxswain__completion_sequence_group_output__init(&groups[i]);
        groups[i].n_samples = 1;
        groups[i].samples = &sample_list[i];
        /* Backwards: the order is the worker's affair. */
        group_list[batch->row_count - 1 - i] = &groups[i];
    }
    if (nested) {
        reply.n_outputs = batch->row_count - (executor->script.bad_reply ? 1 : 0);
        reply.outputs = group_list;
    } else {
        result.n_tokens = batch->row_count + (executor->script.bad_reply ? 1 : 0);
        result.tokens = tokens;
        result.has_base_sequence = true;
        result.base_sequence = executor->sequence;
        reply.step = &result;
    }
    reply.has_model_execute_time = true;
    reply.model_execute_time = 0.001f;
    response.result_case = COXSWAIN__EXECUTE_RESPONSE__RESULT_EXECUTE_MODEL_RESPONSE;
    response.execute_model_response = &reply;
    complete(executor, 0, NULL, &response);
}

static void step_take(struct cox_executor *executor, struct cox_arena *arena)
{
    const struct fixture_request *taken = &executor->requests[executor->sequence % FIXTURE_DEPTH];
    Coxswain__ExecuteRequest *request;
    const struct cox_batch *batch;
    struct cox_batch_output *outputs;
    struct cox_error error = {0};
    if (executor->sequence <= executor->void_through) {
        complete(executor, COX_ABORTED, "the step is void", NULL);
        return;
    }
    if (executor->script.taken)
        executor->script.taken(executor, executor->sequence);
    int status = executor->script.status ? executor->script.status(executor->sequence) : 0;
    bool aside = status && !executor->script.loses_table;
    cox_arena_reset(arena);
    int r = cox_wire_request_unpack(arena, taken->frame, taken->frame_size, &request);
    COX_ASSERT(r == 0);
    /* It was published before its sender knew. */
    const Coxswain__StepDelta *delta = request->execute_model_request->step;
    if (executor->lost && delta && delta->base_sequence) {
        complete(executor, COX_STALE, "the step builds on one that has failed", NULL);
        return;
    }
    executor->lost = false;
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
        /* A step may have no rows, and an array of none no address. */
        if (batch->row_count)
            memcpy(rows, batch->rows, batch->row_count * sizeof *rows);
        copy.rows = rows;
        struct cox_batch_output tokens[256];
        if (batch->row_count)
            memcpy(tokens, outputs, batch->row_count * sizeof *tokens);
        cox_table_commit(executor->table);
        if (!status && !executor->script.silent)
            reply(executor, &copy, tokens, nested);
    }
    if (status) {
        /* Nothing computed before counts any more: a rank may have been replaced. */
        memset(executor->cells, 0, sizeof executor->cells);
        executor->lost = true;
        executor->void_through = executor->published;
        complete(executor, status, "rank 1 says no", NULL);
    }
}

void executor_await_published(struct cox_executor *executor, uint64_t number)
{
    while (executor->published < number)
        pthread_cond_wait(&executor->wake, &executor->lock);
}

static void *rank_main(void *context)
{
    struct cox_executor *executor = context;
    struct cox_arena arena;
    COX_ASSERT(cox_arena_init(&arena, 1 << 16, 1 << 24) == 0);
    pthread_mutex_lock(&executor->lock);
    for (;;) {
        while (!executor->stop && executor->sequence == executor->published)
            pthread_cond_wait(&executor->wake, &executor->lock);
        if (executor->sequence == executor->published)
            break;
        executor->sequence++;
        step_take(executor, &arena);
    }
    pthread_mutex_unlock(&executor->lock);
    cox_arena_deinit(&arena);
    return NULL;
}

/* ---- pulls: the test completes them, or they are done at once ---- */

/* The cells of the blocks pulled: as if the first tokens of the sequence had been computed into
 * them. The tokens are those that the test says the other group had. */
static void pull_copy(struct cox_executor *executor,
                      const Coxswain__PullKVRequest__PullKVInfo *info)
{
    const ProtobufCBinaryData *to = info->dst_block_tables;
    for (uint32_t p = 0; p < to->len / 8 * BLOCK_SIZE; p++) {
        int64_t block = cox_wire_int64_get(to->data, p / BLOCK_SIZE);
        COX_ASSERT(block >= 0 && block < BLOCK_COUNT_MAX);
        executor->cells[block][p % BLOCK_SIZE] = (struct cell){
            .id = info->dst_sequence, .position = p, .token = executor->remote_token(info, p)};
    }
}

void executor_complete_pull(struct cox_executor *executor, const struct fixture_pull *pull,
                            int status, enum cox_outcome outcome, int32_t code, int32_t pull_status)
{
    Coxswain__PullKVResponse__PullKVResult results[16], *list[16];
    Coxswain__PullKVResponse pulls = COXSWAIN__PULL_KVRESPONSE__INIT;
    Coxswain__ExecuteResponse response = COXSWAIN__EXECUTE_RESPONSE__INIT;
    struct cox_rank_result rank = {.outcome = outcome,
                                   .response = outcome == COX_OUTCOME_OK ? &response : NULL,
                                   .text = "not in time"};
    struct cox_completion completion = {
        .channel = COX_CHANNEL_TRANSFER,
        .status = status,
        .text = "the test says so",
        .rank_count = 1,
        .ranks = &rank,
        .request_context = pull->context,
    };
    for (uint32_t i = 0; i < pull->count; i++) {
        coxswain__pull_kvresponse__pull_kvresult__init(&results[i]);
        results[i].request_id = (char *)(uintptr_t)pull->ids[i];
        results[i].has_pd_error_code = results[i].has_status = results[i].has_copied_bytes = true;
        results[i].pd_error_code = (Coxswain__PDErrorCode)code;
        results[i].status = pull_status;
        results[i].copied_bytes = 100;
        results[i].has_copy_ns = true;
        results[i].copy_ns = UINT64_C(25) << 2 * i;
        list[i] = &results[i];
    }
    pulls.pull_kv_results = list;
    pulls.n_pull_kv_results = pull->count;
    response.result_case = COXSWAIN__EXECUTE_RESPONSE__RESULT_PULL_KV_RESPONSE;
    response.pull_kv_response = &pulls;
    pthread_mutex_lock(&executor->lock);
    cox_completion_fn handler = executor->pull_handler;
    void *context = executor->pull_context;
    pthread_mutex_unlock(&executor->lock);
    handler(context, &completion);
}

static int pull_submit(struct cox_executor *executor,
                       const struct Coxswain__ExecuteRequest *request,
                       const struct cox_submit_options *options, uint64_t *ret_sequence,
                       struct cox_error *err)
{
    const Coxswain__PullKVRequest *pulls = request->pull_kv_request;
    struct fixture_pull pull = {.context = options->request_context,
                                .count = (uint32_t)pulls->n_pull_kv_infos};
    pthread_mutex_lock(&executor->lock);
    uint64_t number = ++executor->pull_count;
    int r = executor->script.pull_submit ? executor->script.pull_submit(number) : 0;
    bool held = executor->script.pulls_held;
    int32_t code = executor->script.pull_code ? executor->script.pull_code(number) : 0;
    for (uint32_t i = 0; !r && i < pull.count; i++) {
        snprintf(pull.ids[i], sizeof pull.ids[i], "%s",
                 pulls->pull_kv_infos[i]->seq_group_metadata->request_id);
        if (!held && !code)
            pull_copy(executor, pulls->pull_kv_infos[i]);
    }
    if (!r && held) {
        COX_ASSERT(executor->held_count < FIXTURE_PULLS_MAX);
        executor->held[executor->held_count++] = pull;
        pthread_cond_broadcast(&executor->wake);
    }
    *ret_sequence = number;
    pthread_mutex_unlock(&executor->lock);
    if (r)
        return cox_fail(err, r, "submit of a pull says %s", cox_status_text(r));
    if (!held)
        executor_complete_pull(executor, &pull, 0, COX_OUTCOME_OK, code, code ? COX_STALE : 0);
    return 0;
}

struct fixture_pull executor_await_pull(struct cox_executor *executor)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 30;
    pthread_mutex_lock(&executor->lock);
    while (executor->held_count == 0)
        COX_ASSERT(pthread_cond_timedwait(&executor->wake, &executor->lock, &until) == 0);
    struct fixture_pull pull = executor->held[0];
    memmove(executor->held, executor->held + 1, --executor->held_count * sizeof pull);
    pthread_mutex_unlock(&executor->lock);
    return pull;
}

void cox_executor_read_status(struct cox_executor *executor, struct cox_executor_status *ret_status,
                              struct cox_rank_status *ret_ranks)
{
    *ret_status = (struct cox_executor_status){.rank_count = 1,
                                               .depth = FIXTURE_DEPTH,
                                               .nested_steps = executor->legacy,
                                               .flight_max = executor->legacy ? 1 : FIXTURE_DEPTH};
    ret_status->channels[COX_CHANNEL_EXECUTE].request_size_max = executor->request_size_max;
    if (ret_ranks)
        memset(ret_ranks, 0, sizeof *ret_ranks);
    pthread_mutex_lock(&executor->lock);
    if (executor->late)
        cox_rank_set_add(&ret_status->channels[COX_CHANNEL_TRANSFER].late, 0);
    pthread_mutex_unlock(&executor->lock);
}

uint64_t cox_executor_kv_epoch(const struct cox_executor *executor, uint64_t epoch)
{
    return 1000 + epoch + atomic_load(&executor->kv_changes) * 1000000;
}

void cox_executor_renew_kv(struct cox_executor *executor, uint64_t model_digest)
{
    executor->kv_digest = model_digest;
    atomic_fetch_add(&executor->kv_changes, 1);
}

/* ---- the executor's functions ---- */

int cox_executor_submit(struct cox_executor *executor,
                        const struct Coxswain__ExecuteRequest *request,
                        const struct cox_submit_options *options, uint64_t *ret_sequence,
                        struct cox_error *err)
{
    if (request->execute_type == COXSWAIN__EXECUTE_TYPE__KV_TRANSFER)
        return pull_submit(executor, request, options, ret_sequence, err);
    if (request->execute_type == COXSWAIN__EXECUTE_TYPE__PD_LINK) {
        pthread_mutex_lock(&executor->lock);
        executor->leave_count += (uint32_t)request->pd_link_request->n_cancelled_pulls;
        pthread_mutex_unlock(&executor->lock);
        return 0;
    }
    pthread_mutex_lock(&executor->lock);
    uint64_t number = ++executor->submit_count;
    int r = executor->script.submit ? executor->script.submit(number) : 0;
    if (r) {
        pthread_mutex_unlock(&executor->lock);
        return cox_fail(err, r, "submit says %s", cox_status_text(r));
    }
    uint64_t waiting = executor->published + 1 - executor->sequence;
    COX_ASSERT(waiting <= FIXTURE_DEPTH);
    executor->waiting_max = waiting > executor->waiting_max ? waiting : executor->waiting_max;
    struct fixture_request *made = &executor->requests[++executor->published % FIXTURE_DEPTH];
    r = cox_wire_request_pack(request, made->frame, executor->request_size_max, &made->frame_size);
    COX_ASSERT(r == 0); /* the batcher keeps steps below the frame */
    made->request_context = options->request_context;
    *ret_sequence = executor->published;
    if (request->weights) {
        COX_ASSERT(request->weights->handle.len == sizeof executor->offered.handle.bytes);
        executor->offered = (struct cox_weights_announcement){.size = request->weights->size,
                                                              .version = request->weights_version};
        memcpy(executor->offered.handle.bytes, request->weights->handle.data,
               sizeof executor->offered.handle.bytes);
    }
    if (executor->published < FIXTURE_SENT_MAX) {
        executor->weights_sent[executor->published] = request->weights_version;
        executor->deadlines_ns[executor->published] = options->deadline_ns;
    }
    pthread_cond_broadcast(&executor->wake);
    pthread_mutex_unlock(&executor->lock);
    return 0;
}

int cox_executor_set_handler(struct cox_executor *executor, enum cox_channel_id channel,
                             cox_completion_fn handler, void *context)
{
    pthread_mutex_lock(&executor->lock);
    if (channel == COX_CHANNEL_TRANSFER) {
        executor->pull_handler = handler;
        executor->pull_context = context;
    } else {
        executor->handler = handler;
        executor->handler_context = context;
    }
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
    /* Every one of them was still there, unless it may have gone with a step that failed. */
    COX_ASSERT(slot_count == count || executor->void_through);
    executor->cleanup_count += count;
    pthread_mutex_unlock(&executor->lock);
    return 0;
}

/* No rank of it ever forgets, unless a test says so. */
uint64_t cox_executor_epoch(const struct cox_executor *executor)
{
    return atomic_load(&executor->epoch);
}

void cox_executor_announce_weights(
    struct cox_executor *executor,
    void (*announce)(void *context, struct cox_weights_announcement *ret_announcement),
    void *context)
{
    executor->announce = announce;
    executor->announce_context = context;
}

int cox_executor_share(struct cox_executor *executor, const struct cox_handle *handle, int fd,
                       uint64_t size, uint64_t digest, struct cox_error *err)
{
    (void)executor, (void)handle, (void)fd, (void)size, (void)digest, (void)err;
    return 0;
}

void cox_executor_unshare(struct cox_executor *executor, const struct cox_handle *handle)
{
    (void)executor, (void)handle;
}

static void executor_free(void *object)
{
    struct cox_executor *executor = object;
    pthread_mutex_lock(&executor->lock);
    executor->stop = true;
    pthread_cond_broadcast(&executor->wake);
    pthread_mutex_unlock(&executor->lock);
    pthread_join(executor->thread, NULL);
    cox_table_free(executor->table);
    pthread_mutex_destroy(&executor->lock);
    pthread_cond_destroy(&executor->wake);
    free(executor);
}

struct cox_executor *executor_new(void)
{
    struct cox_executor *executor = calloc(1, sizeof *executor);
    COX_ASSERT(executor);
    executor->request_size_max = FRAME_SIZE;
    executor->epoch = 1;
    pthread_mutex_init(&executor->lock, NULL);
    pthread_cond_init(&executor->wake, NULL);
    COX_ASSERT(cox_table_new(4096, 4096, &executor->table) == 0);
    COX_ASSERT(pthread_create(&executor->thread, NULL, rank_main, executor) == 0);
    return test_own(executor, executor_free);
}

/* Its one rank does what the test sets. */
int cox_executor_lora_results(struct cox_executor *executor,
                              const struct Coxswain__LoraOperationRequest *request,
                              uint64_t deadline_ns, struct cox_lora_result *ret_results,
                              struct cox_error *err)
{
    (void)executor, (void)request, (void)deadline_ns, (void)err;
    ret_results[0] = (struct cox_lora_result){.status = 0};
    return 0;
}
