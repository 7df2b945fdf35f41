#include "engine_loop.h"

#include "message.h"
#include "channel/base/idioms.h"
#include "channel/base/thread.h"
#include "proto/executor.pb-c.h"
#include "shared_weights.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SEQUENCE_COUNT_DEFAULT 64
#define SEQUENCE_COUNT_MAX 4096 /* rows of the ranks' tables */
#define TOKEN_COUNT_DEFAULT 512
#define STEP_MS_DEFAULT 30000
#define RETRY_MAX_DEFAULT 3
/* Time of one attempt to pull a sequence; the lease limits it too. */
#define PULL_MS 10000
#define STEPS_IN_FLIGHT_DEFAULT 2
/* Attempts to pull one sequence. Each pause is four times as long as the one before. */
#define PULL_COUNT_MAX 3
#define PULL_PAUSE_NS (20 * COX_NSEC_PER_MSEC)
/* Samples kept for the percentiles, of the last steps. */
#define SAMPLE_COUNT 16384
/* Steps in time after a late one, before the step size grows again. */
#define CALM_COUNT 32
/* The size of a step falls at most to this part of token_count_max. */
#define LIMIT_FALL 8
/* Every submit completes by its deadline. This much later, the executor itself is broken. */
#define COMPLETION_SLACK_NS (10 * COX_NSEC_PER_SEC)
/* Pause between two attempts to submit while a rank still holds the frame or owes a reply. */
#define SUBMIT_PAUSE_MIN_NS (20 * UINT64_C(1000))
#define SUBMIT_PAUSE_MAX_NS (5 * COX_NSEC_PER_MSEC)

/* A step in flight, and what the handler stores for run. */
struct published_step {
    /* 0: the entry is free */
    uint64_t number;
    const struct cox_step *step;
    uint64_t submitted_ns, deadline_ns;
    /* of the weights; 0: none */
    uint64_t version;
    /* the version differs from the previous step's */
    bool switches;

    /* the handler has filled everything below */
    bool arrived;
    int status;
    struct cox_error error;
    uint64_t arrived_ns;
    /* 0: not reported */
    uint64_t model_ns;
    uint64_t group_ns, group_wait_ns;
    bool has_group;
    int32_t *tokens;
    struct cox_row_end *ends;
    /* what the worker says of the errors among them */
    char worker_text[512];
};

struct cox_engine_loop {
    struct cox_executor *executor;
    struct cox_engine_loop_options options;
    struct cox_batcher *batcher;
    struct cox_step_message *message;
    bool nested;
    /* run has failed: only free may be called */
    bool broken;
    /* of the last step; distinguishes a late completion from an awaited one */
    uint64_t number;
    uint32_t retry_count;
    /* tokens of a step; token_count_max, or less after a late step */
    uint32_t token_limit;
    /* steps in time since the last late one, or since the limit last grew */
    uint32_t calm_count;
    /* tokens of the last late step */
    uint32_t late_tokens;
    /* of the batcher's statistics, after the last step */
    uint64_t positions;
    /* group epoch of the ranks' tables that the batcher builds on */
    uint64_t epoch;
    /* weights version of the last step; 0: no step, or none */
    uint64_t version;

    /* protects stopped, and in flights what the handler uses */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    /* a ring of steps_in_flight; free entries have number 0 */
    struct published_step *flights;
    uint32_t flight_first, flight_count;
    bool stopped;

    uint64_t steps, retries, run_ns;
    /* of the previous step */
    uint64_t arrived_ns;
    /* rings of SAMPLE_COUNT */
    uint64_t *step_samples, *channel_samples;
    uint64_t step_count, channel_count;
    struct cox_engine_loop_times times;
};

int cox_engine_loop_fit(struct cox_engine_loop_options *options,
                        const struct cox_init_summary *summary, struct cox_error *err)
{
    if (summary->kv_cache_count == 0)
        return cox_fail(err, COX_CORRUPT, "the workers reported no KV cache at init");
    if (summary->kv_cache_count > 1)
        return cox_fail(err, COX_UNSUPPORTED,
                        "the workers have %" PRIu32 " KV caches; the engine loop supports one",
                        summary->kv_cache_count);
    int32_t block_size = summary->kv_caches[0].block_size;
    if (block_size < 1 || summary->npu_block_count < 1 || summary->npu_block_count > INT32_MAX ||
        summary->max_position_embeddings < 1 || summary->max_position_embeddings > INT32_MAX)
        return cox_fail(
            err, COX_CORRUPT,
            "the workers offer %" PRId64 " blocks of %" PRId32 " positions, and %" PRId64
            " positions at most: expected numbers from 1 to %d",
            summary->npu_block_count, block_size, summary->max_position_embeddings, INT32_MAX);
    options->block_count = (uint32_t)summary->npu_block_count;
    options->block_size = (uint32_t)block_size;
    options->position_count_max = (uint32_t)summary->max_position_embeddings;
    return 0;
}

/* ---- the handler, on the response thread ---- */

static void outcome_fill(const struct cox_engine_loop *engine_loop, struct published_step *flight,
                         const struct cox_completion *completion)
{
    flight->error = (struct cox_error){0};
    flight->model_ns = 0;
    flight->has_group = false;
    flight->status = completion->status;
    if (completion->status) {
        cox_fail(&flight->error, completion->status, "%s",
                 completion->text ? completion->text : cox_status_text(completion->status));
        return;
    }
    const Coxswain__ExecuteResponse *response =
        completion->payload ? completion->payload->response : NULL;
    flight->status = cox_step_message_read(engine_loop->message, flight->step, completion->sequence,
                                           response, flight->tokens, flight->ends, &flight->error);
    if (flight->status)
        return;
    const Coxswain__ExecuteModelResponse *reply = response->execute_model_response;
    snprintf(flight->worker_text, sizeof flight->worker_text, "%s",
             reply->err_msg ? reply->err_msg : "");
    cox_text_trim(flight->worker_text);
    if (reply->has_model_execute_time && reply->model_execute_time > 0 &&
        reply->model_execute_time < 1e9f)
        flight->model_ns = (uint64_t)((double)reply->model_execute_time * 1e6);
    /* It is a part of a part: a value above the whole is invalid. */
    if (reply->has_group_ns && reply->has_group_wait_ns && flight->model_ns &&
        reply->group_ns <= flight->model_ns && reply->group_wait_ns <= reply->group_ns) {
        flight->has_group = true;
        flight->group_ns = reply->group_ns;
        flight->group_wait_ns = reply->group_wait_ns;
    }
}

static void on_completion(void *context, const struct cox_completion *completion)
{
    uint64_t now = cox_now_ns();
    struct cox_engine_loop *engine_loop = context;
    pthread_mutex_lock(&engine_loop->lock);
    for (uint32_t i = 0; i < engine_loop->options.steps_in_flight; i++) {
        struct published_step *flight = &engine_loop->flights[i];
        /* After a stop run does not wait, and the step may be over. */
        if (flight->number != (uintptr_t)completion->request_context || flight->arrived)
            continue;
        outcome_fill(engine_loop, flight, completion);
        flight->arrived_ns = now;
        flight->arrived = true;
        pthread_cond_signal(&engine_loop->wake);
    }
    pthread_mutex_unlock(&engine_loop->lock);
}

static void on_completion_dropped(void *context, const struct cox_completion *completion)
{
    (void)context;
    (void)completion;
}

/* ---- constructor and destructor ---- */

static void on_quarantine(void *context, const int32_t *blocks, uint32_t count)
{
    cox_batcher_reserve(context, blocks, count);
}

static int flights_init(struct cox_engine_loop *engine_loop)
{
    const struct cox_engine_loop_options *options = &engine_loop->options;
    engine_loop->flights = calloc(options->steps_in_flight, sizeof *engine_loop->flights);
    if (!engine_loop->flights)
        return -ENOMEM;
    for (uint32_t i = 0; i < options->steps_in_flight; i++) {
        struct published_step *flight = &engine_loop->flights[i];
        flight->tokens = calloc(options->sequence_count_max, sizeof *flight->tokens);
        flight->ends = calloc(options->sequence_count_max, sizeof *flight->ends);
        if (!flight->tokens || !flight->ends)
            return -ENOMEM;
    }
    return 0;
}

/* run may end with every step in flight. */
static uint32_t retiring_count(const struct cox_engine_loop_options *options)
{
    uint32_t wanted = options->sequence_count_max * (options->steps_in_flight - 1);
    uint32_t taken = options->sequence_count_max + options->hold_count_max;
    uint32_t room = taken < SEQUENCE_COUNT_MAX ? SEQUENCE_COUNT_MAX - taken : 0;
    return wanted < room ? wanted : room;
}

static int engine_loop_init(struct cox_engine_loop *engine_loop, size_t request_size_max,
                            struct cox_error *err)
{
    const struct cox_engine_loop_options *options = &engine_loop->options;
    struct cox_batcher_options batcher_options = {
        .sequence_count_max = options->sequence_count_max,
        .token_count_max = options->token_count_max,
        .block_count = options->block_count,
        .block_size = options->block_size,
        .position_count_max = options->position_count_max,
        .request_size_max = request_size_max,
        .last_id = options->last_id,
        .unreported_ids = options->unreported_ids,
        .unreported_count = options->unreported_count,
        .hold_count_max = options->hold_count_max,
        .step_count_max = options->steps_in_flight,
        .retiring_count_max = retiring_count(options),
        .nested = engine_loop->nested,
    };
    int r = cox_batcher_new(&batcher_options, &engine_loop->batcher, err);
    if (r)
        return r;
    uint32_t rows = options->sequence_count_max;
    r = flights_init(engine_loop);
    engine_loop->step_samples = calloc(SAMPLE_COUNT, sizeof *engine_loop->step_samples);
    engine_loop->channel_samples = calloc(SAMPLE_COUNT, sizeof *engine_loop->channel_samples);
    if (r || !engine_loop->step_samples || !engine_loop->channel_samples)
        return cox_fail(err, -ENOMEM, "no memory for the engine loop");
    r = cox_step_message_new(rows, engine_loop->nested, &engine_loop->message);
    if (r)
        return cox_fail(err, r, "no memory for the engine loop");
    r = cox_executor_set_handler(engine_loop->executor, COX_CHANNEL_EXECUTE, on_completion,
                                 engine_loop);
    if (r)
        return cox_fail(err, r, "cannot become the handler of the execute channel: %s",
                        cox_status_text(r));
    if (options->transfer) {
        /* Ranks may still write to blocks of the previous engine loop's pulls. */
        cox_transfers_abandon(options->transfer);
        cox_transfers_quarantine(options->transfer, on_quarantine, engine_loop->batcher);
    }
    return 0;
}

static void engine_loop_destroy(struct cox_engine_loop *engine_loop)
{
    pthread_cond_destroy(&engine_loop->wake);
    pthread_mutex_destroy(&engine_loop->lock);
    cox_batcher_free(engine_loop->batcher);
    cox_step_message_free(engine_loop->message);
    for (uint32_t i = 0; engine_loop->flights && i < engine_loop->options.steps_in_flight; i++) {
        free(engine_loop->flights[i].tokens);
        free(engine_loop->flights[i].ends);
    }
    free(engine_loop->flights);
    free(engine_loop->step_samples);
    free(engine_loop->channel_samples);
    free(engine_loop);
}

int cox_engine_loop_new(struct cox_executor *executor,
                        const struct cox_engine_loop_options *options,
                        struct cox_engine_loop **ret_engine_loop, struct cox_error *err)
{
    if (options->sequence_count_max > SEQUENCE_COUNT_MAX)
        return cox_fail(err, COX_INVALID, "%" PRIu32 " sequences at a time: at most %d",
                        options->sequence_count_max, SEQUENCE_COUNT_MAX);
    /* Legacy workers cannot compute tokens that the coordinator does not know. */
    struct cox_executor_status status;
    cox_executor_read_status(executor, &status, NULL);
    uint32_t flight_max = status.flight_max;
    if (options->steps_in_flight > flight_max)
        return cox_fail(err, COX_INVALID, "%" PRIu32 " steps in flight: at most %" PRIu32 "%s",
                        options->steps_in_flight, flight_max,
                        status.nested_steps ? " with legacy workers"
                                            : ", the depth of the group's channels");
    struct cox_engine_loop *engine_loop = calloc(1, sizeof *engine_loop);
    if (!engine_loop)
        return cox_fail(err, -ENOMEM, "no memory for the engine loop");
    engine_loop->executor = executor;
    engine_loop->options = *options;
    if (!options->sequence_count_max)
        engine_loop->options.sequence_count_max = SEQUENCE_COUNT_DEFAULT;
    if (!options->token_count_max)
        engine_loop->options.token_count_max = TOKEN_COUNT_DEFAULT;
    engine_loop->token_limit = engine_loop->options.token_count_max;
    if (!options->step_ms)
        engine_loop->options.step_ms = STEP_MS_DEFAULT;
    if (!options->retry_max)
        engine_loop->options.retry_max = RETRY_MAX_DEFAULT;
    if (!options->steps_in_flight)
        engine_loop->options.steps_in_flight =
            flight_max < STEPS_IN_FLIGHT_DEFAULT ? flight_max : STEPS_IN_FLIGHT_DEFAULT;
    COX_ASSERT(!options->transfer || options->feed);
    engine_loop->nested = status.nested_steps;
    engine_loop->epoch = cox_executor_epoch(executor);

    cox_condition_init(&engine_loop->wake);
    pthread_mutex_init(&engine_loop->lock, NULL);

    int r =
        engine_loop_init(engine_loop, status.channels[COX_CHANNEL_EXECUTE].request_size_max, err);
    if (r) {
        engine_loop_destroy(engine_loop);
        return r;
    }
    *ret_engine_loop = engine_loop;
    return 0;
}

struct cox_engine_loop *cox_engine_loop_free(struct cox_engine_loop *engine_loop)
{
    if (engine_loop) {
        /* On return the old handler is not running. */
        cox_executor_set_handler(engine_loop->executor, COX_CHANNEL_EXECUTE, on_completion_dropped,
                                 NULL);
        if (engine_loop->options.transfer)
            cox_transfers_abandon(engine_loop->options.transfer);
        engine_loop_destroy(engine_loop);
    }
    return NULL;
}

int cox_engine_loop_add(struct cox_engine_loop *engine_loop,
                        const struct cox_prompt_request *request)
{
    COX_ASSERT(!request->source || engine_loop->options.transfer);
    return cox_batcher_add(engine_loop->batcher, request);
}

/* ---- one step ---- */

/* Blocks until the deadline. Returns false when stopped. */
static bool pause_until(struct cox_engine_loop *engine_loop, uint64_t deadline_ns)
{
    struct timespec until = cox_deadline_timespec(deadline_ns);
    pthread_mutex_lock(&engine_loop->lock);
    while (!engine_loop->stopped &&
           pthread_cond_timedwait(&engine_loop->wake, &engine_loop->lock, &until) == 0)
        ;
    bool go_on = !engine_loop->stopped;
    pthread_mutex_unlock(&engine_loop->lock);
    return go_on;
}

static struct published_step *flight_at(const struct cox_engine_loop *engine_loop, uint32_t i)
{
    return &engine_loop
                ->flights[(engine_loop->flight_first + i) % engine_loop->options.steps_in_flight];
}

/* An earlier step in flight has failed, so a new step would be void. */
static bool is_void(struct cox_engine_loop *engine_loop)
{
    bool failed = false;
    pthread_mutex_lock(&engine_loop->lock);
    for (uint32_t i = 0; i < engine_loop->flight_count; i++)
        failed =
            failed || (flight_at(engine_loop, i)->arrived && flight_at(engine_loop, i)->status);
    pthread_mutex_unlock(&engine_loop->lock);
    return failed;
}

/* Submits, and retries while a rank owes the reply of an earlier step or still reads the frame. */
static int step_submit(struct cox_engine_loop *engine_loop, struct published_step *flight,
                       const struct Coxswain__ExecuteRequest *request, uint64_t *ret_sequence,
                       struct cox_error *err)
{
    uint64_t give_up_ns = cox_deadline_after_ms(engine_loop->options.step_ms);
    uint64_t pause_ns = SUBMIT_PAUSE_MIN_NS;
    /* Ranks begin with it after those in flight, which have as long each. */
    const uint64_t patience_ms = engine_loop->options.step_ms * (engine_loop->flight_count + 1);
    for (;;) {
        struct cox_submit_options options = {
            .size = sizeof(struct cox_submit_options),
            .gather = COX_GATHER_RANK0,
            .deadline_ns = cox_deadline_after_ms(patience_ms),
            .request_context = (void *)(uintptr_t)flight->number,
            .epoch = engine_loop->epoch,
        };
        struct cox_error error = {0};
        if (is_void(engine_loop))
            return cox_fail(err, COX_ABORTED, "the previous step has failed");
        flight->submitted_ns = cox_now_ns();
        flight->deadline_ns = options.deadline_ns;
        int r = cox_executor_submit(engine_loop->executor, request, &options, ret_sequence, &error);
        if (r == 0)
            return 0;
        if ((r != COX_LATE && r != COX_FULL) || flight->submitted_ns >= give_up_ns)
            return cox_fail(err, r, "%s", error.text[0] ? error.text : cox_status_text(r));
        if (!pause_until(engine_loop, flight->submitted_ns + pause_ns))
            return cox_fail(err, COX_CLOSED, "stopped");
        pause_ns = cox_deadline_min(pause_ns * 2, SUBMIT_PAUSE_MAX_NS);
    }
}

/* From now on the handler may fill the entry. */
static struct published_step *flight_expect(struct cox_engine_loop *engine_loop,
                                            const struct cox_step *step)
{
    struct published_step *flight = flight_at(engine_loop, engine_loop->flight_count);
    pthread_mutex_lock(&engine_loop->lock);
    flight->number = ++engine_loop->number;
    flight->step = step;
    flight->arrived = false;
    pthread_mutex_unlock(&engine_loop->lock);
    return flight;
}

/* Waits for the handler and removes the oldest step from the ring. Later completions of it are
 * ignored. Returns its status. */
static int flight_await(struct cox_engine_loop *engine_loop, struct cox_error *err)
{
    struct published_step *flight = flight_at(engine_loop, 0);
    struct timespec until = cox_deadline_timespec(flight->deadline_ns + COMPLETION_SLACK_NS);
    int r = 0;
    pthread_mutex_lock(&engine_loop->lock);
    while (!flight->arrived && !engine_loop->stopped && r != ETIMEDOUT)
        r = pthread_cond_timedwait(&engine_loop->wake, &engine_loop->lock, &until);
    if (flight->arrived)
        r = flight->status ? cox_fail(err, flight->status, "%s", flight->error.text) : 0;
    else if (engine_loop->stopped)
        r = cox_fail(err, COX_CLOSED, "stopped");
    else
        r = cox_fail(err, COX_STATE, "a step was not completed by its deadline");
    flight->number = 0;
    engine_loop->flight_first =
        (engine_loop->flight_first + 1) % engine_loop->options.steps_in_flight;
    engine_loop->flight_count--;
    pthread_mutex_unlock(&engine_loop->lock);
    return r;
}

static void step_count(struct cox_engine_loop *engine_loop, const struct published_step *flight)
{
    /* A rank begins with a step after it has ended the previous one. */
    uint64_t since_ns = flight->submitted_ns > engine_loop->arrived_ns ? flight->submitted_ns
                                                                       : engine_loop->arrived_ns;
    uint64_t own_ns = flight->arrived_ns > since_ns ? flight->arrived_ns - since_ns : 0;
    engine_loop->steps++;
    engine_loop->step_samples[engine_loop->step_count++ % SAMPLE_COUNT] =
        flight->arrived_ns - flight->submitted_ns;
    engine_loop->arrived_ns = flight->arrived_ns;
    if (!flight->model_ns)
        return;
    const uint64_t channel_ns = own_ns > flight->model_ns ? own_ns - flight->model_ns : 0;
    engine_loop->channel_samples[engine_loop->channel_count++ % SAMPLE_COUNT] = channel_ns;
    engine_loop->times.step_ns += own_ns;
    engine_loop->times.channel_ns += channel_ns;
    if (!flight->has_group)
        return;
    engine_loop->times.has_group = true;
    engine_loop->times.group_ns += flight->group_ns;
    engine_loop->times.group_wait_ns += flight->group_wait_ns;
}

/* ---- pulls ---- */

/* Starts pulls for admitted sequences with a KV reference, in parallel with the steps. */
static int pulls_start(struct cox_engine_loop *engine_loop, struct cox_error *err)
{
    const struct cox_sequence *sequence;
    bool any = false;
    int r = 0;
    while (!r && (sequence = cox_batcher_pull(engine_loop->batcher))) {
        uint64_t now = cox_now_ns();
        const struct cox_pull_request request = {
            .sequence = sequence->id,
            .attempt = sequence->pulls,
            .source = sequence->source,
            .blocks = sequence->blocks,
            .not_before_ns =
                sequence->pulls > 1 ? now + (PULL_PAUSE_NS << 2 * (sequence->pulls - 2)) : 0,
            .deadline_ns = cox_deadline_min(cox_deadline_after_ms(sequence->request.pull_ms
                                                                      ? sequence->request.pull_ms
                                                                      : PULL_MS),
                                            sequence->source->lease_ns),
            .epoch = engine_loop->epoch,
        };
        r = cox_transfers_start(engine_loop->options.transfer, &request);
        any = true;
    }
    if (any)
        cox_transfers_turn(engine_loop->options.transfer);
    return r ? cox_fail(err, r, "no memory for a pull") : 0;
}

static enum cox_pull_end pull_judge(const struct cox_engine_loop *engine_loop,
                                    const struct cox_sequence *sequence,
                                    const struct cox_pull_outcome *result)
{
    const struct cox_pull_report *report = result->report;
    if (report->state == COX_PULL_SUCCESS && result->epoch == engine_loop->epoch)
        return COX_PULL_END_DONE;
    if (sequence->request.pull_only)
        return COX_PULL_END_FAIL;
    if (sequence->pulls < PULL_COUNT_MAX && cox_now_ns() < sequence->source->lease_ns &&
        report->error.code != COX_INVALID)
        return COX_PULL_END_RETRY;
    return COX_PULL_END_RECOMPUTE;
}

static void pull_end(struct cox_engine_loop *engine_loop, struct cox_pull_outcome *result)
{
    const struct cox_engine_loop_options *options = &engine_loop->options;
    const struct cox_sequence *sequence =
        cox_batcher_pulling(engine_loop->batcher, result->sequence, NULL);
    COX_ASSERT(sequence); /* a cancelled one has no outcome */
    struct cox_error error = {0};
    const struct cox_error *said = &result->report->error;
    enum cox_pull_end end = pull_judge(engine_loop, sequence, result);
    if (end != COX_PULL_END_DONE)
        cox_fail(&error, said->code ? said->code : COX_STALE,
                 "sequence %" PRId64 " of the group '%s' could not be pulled in %" PRIu32
                 " tr%s: %.700s",
                 sequence->source->sequence, sequence->source->cluster_id, sequence->pulls,
                 sequence->pulls == 1 ? "y" : "ies",
                 said->text[0] ? said->text : "ranks were replaced meanwhile");
    if (end == COX_PULL_END_RECOMPUTE)
        cox_log_write(&options->log, 4, "%s: computing it here", error.text);
    if (end != COX_PULL_END_RETRY && options->pulled)
        options->pulled(options->pulled_context, sequence,
                        end == COX_PULL_END_DONE ? NULL : &error);
    bool wanted = sequence->request.pull_only;
    cox_batcher_pulled(engine_loop->batcher, result->sequence, end, result->drained,
                       wanted ? result->report : NULL, &error);
    if (!wanted)
        free(result->report);
}

/* Handles expired leases and ended pulls. Not 0: the group may have to be recovered first. */
static int transfers_look(struct cox_engine_loop *engine_loop, struct cox_error *err)
{
    struct cox_transfers *transfer = engine_loop->options.transfer;
    struct cox_pull_outcome result;
    int32_t *blocks;
    uint32_t count;
    int r = 0;
    /* Ranks may have lost the leased blocks. */
    bool lost = cox_executor_epoch(engine_loop->executor) != engine_loop->epoch;
    if (cox_batcher_kv_leases(engine_loop->batcher)->count)
        cox_batcher_expire(engine_loop->batcher, lost ? COX_DEADLINE_NEVER : cox_now_ns());
    if (!transfer)
        return 0;
    cox_transfers_turn(transfer);
    while (cox_transfers_take_drained(transfer, &blocks, &count) == 0) {
        cox_batcher_give(engine_loop->batcher, blocks, count);
        free(blocks);
    }
    while (cox_transfers_take(transfer, &result) == 0) {
        /* Deaths in an earlier epoch were handled before. */
        if (result.own_death && result.epoch == engine_loop->epoch)
            r = cox_fail(err, result.report->error.code, "%s", result.report->error.text);
        pull_end(engine_loop, &result);
    }
    return r;
}

/* When to check although no wakeup arrives. */
static uint64_t transfers_due_ns(const struct cox_engine_loop *engine_loop)
{
    uint64_t due_ns = cox_kv_leases_due_ns(cox_batcher_kv_leases(engine_loop->batcher));
    return engine_loop->options.transfer
               ? cox_deadline_min(due_ns, cox_transfers_due_ns(engine_loop->options.transfer))
               : due_ns;
}

/* ---- the step ---- */

/* Sets the weights version of the step. */
static void step_weights(struct cox_engine_loop *engine_loop, struct published_step *flight)
{
    struct cox_shared_weights *weights = engine_loop->options.weights;
    struct cox_weights_announcement announcement;
    flight->version = 0;
    flight->switches = false;
    if (!weights)
        return;
    const bool offered = cox_shared_weights_step(weights, engine_loop->epoch, &announcement);
    flight->version = announcement.version;
    /* Correct also when the step turns out void: a failure reverts the batcher, and no earlier
     * computation is left. */
    flight->switches = engine_loop->version && flight->version != engine_loop->version;
    engine_loop->version = flight->version;
    cox_step_message_weights(engine_loop->message, &announcement, offered);
}

/* Reports status r of the step to the weights, when those before it succeeded. A step that is void
 * because of an earlier failure proves nothing about its weights. */
static void step_weights_end(struct cox_engine_loop *engine_loop,
                             const struct published_step *flight, int r,
                             const struct cox_error *err)
{
    struct cox_shared_weights *weights = engine_loop->options.weights;
    if (!r && flight->switches)
        cox_batcher_renew(engine_loop->batcher);
    if (weights && r)
        cox_shared_weights_failed(weights, flight->version, r, err->text);
    else if (weights)
        cox_shared_weights_used(weights, flight->version, engine_loop->epoch);
}

/* There is nothing to compute, but something to report to the ranks. */
static bool needs_empty_step(const struct cox_engine_loop *engine_loop)
{
    return engine_loop->options.weights && cox_shared_weights_pending(engine_loop->options.weights);
}

/* Batches a step and submits it. Returns 0, COX_EMPTY, COX_BUSY, or the failure. */
static int step_begin(struct cox_engine_loop *engine_loop, struct cox_error *err)
{
    const struct cox_step *step;
    int r = cox_batcher_next(engine_loop->batcher, &step);
    /* A step in flight may be the one that reports it. */
    if ((r == COX_EMPTY || r == COX_BUSY) && !engine_loop->flight_count &&
        needs_empty_step(engine_loop)) {
        cox_batcher_next_empty(engine_loop->batcher, &step);
        r = 0;
    }
    if (r)
        return r;
    struct published_step *flight = flight_expect(engine_loop, step);
    const struct Coxswain__ExecuteRequest *request;
    uint64_t sequence;
    step_weights(engine_loop, flight);
    r = cox_step_message_fill(engine_loop->message, step, &request);
    r = r ? cox_fail(err, r, "no memory for a step")
          : step_submit(engine_loop, flight, request, &sequence, err);
    if (r)
        return r;
    cox_batcher_publish(engine_loop->batcher, sequence);
    engine_loop->flight_count++;
    return 0;
}

/* As step_begin, and then starts the pulls of newly admitted sequences. The order matters: after a
 * submit, no rank owes an earlier reply, so none still writes to these blocks. */
static int step_and_pulls_begin(struct cox_engine_loop *engine_loop, struct cox_error *err)
{
    int r = step_begin(engine_loop, err);
    int started = 0;
    if ((!r || r == COX_BUSY) && engine_loop->options.transfer)
        started = pulls_start(engine_loop, err);
    return started ? started : r;
}

/* A step that was too slow once will be too slow again, so the next steps are half as large. There
 * is a floor, since ranks may be late for other reasons. */
static void limit_lower(struct cox_engine_loop *engine_loop)
{
    const uint32_t half = engine_loop->late_tokens / 2;
    const uint32_t least = engine_loop->options.token_count_max / LIMIT_FALL;
    engine_loop->token_limit = half > least ? half : least ? least : 1;
    engine_loop->calm_count = 0;
    cox_batcher_limit(engine_loop->batcher, engine_loop->token_limit);
}

/* Grows the limit step by step: the cause may have been a rank that was stopped for a while. */
static void limit_raise(struct cox_engine_loop *engine_loop)
{
    const uint32_t most = engine_loop->options.token_count_max;
    if (engine_loop->token_limit == most || ++engine_loop->calm_count < CALM_COUNT)
        return;
    engine_loop->token_limit =
        engine_loop->token_limit < most / 2 ? engine_loop->token_limit * 2 : most;
    engine_loop->calm_count = 0;
    cox_batcher_limit(engine_loop->batcher, engine_loop->token_limit);
}

/* Waits for the oldest step in flight. Returns 0, or its failure. */
static int step_end(struct cox_engine_loop *engine_loop, struct cox_error *err)
{
    struct published_step *flight = flight_at(engine_loop, 0);
    int r = flight_await(engine_loop, err);
    if (r == COX_TIMEOUT)
        engine_loop->late_tokens = flight->step->token_count;
    step_weights_end(engine_loop, flight, r, err);
    if (!r)
        r = cox_batcher_commit(engine_loop->batcher, flight->tokens, flight->ends,
                               flight->worker_text, err);
    if (r)
        return r;
    step_count(engine_loop, flight);
    limit_raise(engine_loop);
    /* A step that recomputes what was computed before the failure does not show that the failure is
     * over. */
    struct cox_batcher_stats stats;
    cox_batcher_stats(engine_loop->batcher, &stats);
    if (stats.positions != engine_loop->positions || !flight->step->row_count)
        engine_loop->retry_count = 0;
    engine_loop->positions = stats.positions;
    return 0;
}

/* r is the result of step_begin. Waits for the oldest step when the ring is full, or when nothing
 * can be batched before it ends. After a failure waits for all: earlier steps count, later ones are
 * void, and so would be steps submitted now. Returns
 *   0
 *   COX_EMPTY, COX_BUSY: r, and no step is in flight
 *   the first failure, and no step is in flight
 */
static int steps_wait(struct cox_engine_loop *engine_loop, int r, struct cox_error *err)
{
    const bool waits = r == COX_EMPTY || r == COX_BUSY;
    const bool failed = r && !waits;
    struct cox_error earlier = {0}, later = {0};
    int e = 0;
    if (failed) {
        while (!e && engine_loop->flight_count)
            e = step_end(engine_loop, &earlier);
    } else if (engine_loop->flight_count &&
               (waits || engine_loop->flight_count == engine_loop->options.steps_in_flight)) {
        e = step_end(engine_loop, &earlier);
        r = 0;
    }
    while (e && engine_loop->flight_count)
        flight_await(engine_loop, &later);
    if (e)
        *err = earlier;
    return e ? e : r;
}

/* ---- run ---- */

static void done_report(struct cox_engine_loop *engine_loop)
{
    struct cox_sequence *sequence;
    while ((sequence = cox_batcher_done(engine_loop->batcher))) {
        if (engine_loop->options.done)
            engine_loop->options.done(engine_loop->options.done_context, sequence);
        cox_sequence_free(sequence);
    }
}

/* Reports ended sequences to the ranks that no step reports. */
static int announce(struct cox_engine_loop *engine_loop, struct cox_error *err)
{
    const int64_t *ids;
    uint32_t count = cox_batcher_unreported(engine_loop->batcher, &ids);
    if (count == 0)
        return 0;
    uint64_t deadline_ns = cox_deadline_after_ms(engine_loop->options.step_ms);
    int r = cox_executor_cleanup(engine_loop->executor, ids, count, deadline_ns, err);
    /* After a failure the batcher is reverted, and base 0 of the next step reports everything. With
     * no next step, it is not retried for ever. */
    if (!r || !engine_loop->nested)
        cox_batcher_reported(engine_loop->batcher);
    return r;
}

/* Returns whether a step that failed with status may be retried. */
static bool may_retry(int status)
{
    return status == COX_REJECTED || status == COX_TIMEOUT || status == COX_STALE ||
           status == COX_ABORTED;
}

/* Returns whether the group may need recovery first. */
static bool may_recover(int status)
{
    return may_retry(status) || status == COX_PEER_DEAD || status == COX_STATE ||
           status == COX_LATE;
}

static bool is_stopped(struct cox_engine_loop *engine_loop)
{
    pthread_mutex_lock(&engine_loop->lock);
    bool stopped = engine_loop->stopped;
    pthread_mutex_unlock(&engine_loop->lock);
    return stopped;
}

/* Nothing can be computed now. Reports to the ranks before blocking, which may last long. Returns
 * 0: there is more to do; COX_EMPTY: no request is left; or the failure of the report. */
static int idle(struct cox_engine_loop *engine_loop, struct cox_error *err)
{
    const struct cox_engine_loop_options *options = &engine_loop->options;
    int r = announce(engine_loop, err);
    if (r)
        return r;
    return options->feed &&
                   options->feed(options->feed_context, true, transfers_due_ns(engine_loop))
               ? 0
               : COX_EMPTY;
}

/* A step, or a report, has failed with r. Returns 0 to retry, or the status that run ends with,
 * also in err. */
static int step_failed(struct cox_engine_loop *engine_loop, int r, struct cox_error *err)
{
    const struct cox_engine_loop_options *options = &engine_loop->options;
    bool recovered = false;
    if (options->recover && may_recover(r)) {
        int result = options->recover(options->recover_context, err);
        recovered = result == COX_STALE;
        if (result && !recovered)
            return result;
    }
    if (!recovered && !may_retry(r))
        return r;
    if (!recovered && engine_loop->retry_count == options->retry_max) {
        const struct cox_error last = *err;
        char advice[128] = "";
        if (r == COX_TIMEOUT)
            snprintf(advice, sizeof advice,
                     ", at last with %" PRIu32
                     " tokens: a longer --timeout, or fewer --step-tokens",
                     engine_loop->late_tokens);
        *err = (struct cox_error){0};
        return cox_fail(err, r, "%.800s (tried %" PRIu32 " times%s)", last.text,
                        engine_loop->retry_count + 1, advice);
    }
    if (r == COX_TIMEOUT && engine_loop->late_tokens)
        limit_lower(engine_loop);
    if (recovered)
        engine_loop->retry_count = 0;
    else
        engine_loop->retry_count++;
    engine_loop->retries++;
    cox_log_write(&options->log, recovered ? 5 : 4, "a step failed and is retried: %s", err->text);
    engine_loop->epoch = cox_executor_epoch(engine_loop->executor);
    cox_batcher_revert(engine_loop->batcher);
    return 0;
}

static int steps_run(struct cox_engine_loop *engine_loop, struct cox_error *err)
{
    for (;;) {
        done_report(engine_loop); /* reports leases before feed can release them */
        if (engine_loop->options.feed)
            engine_loop->options.feed(engine_loop->options.feed_context, false, 0);
        struct cox_error error = {0};
        int r = is_stopped(engine_loop) ? cox_fail(&error, COX_CLOSED, "stopped")
                                        : transfers_look(engine_loop, &error);
        done_report(engine_loop);
        if (!r && engine_loop->nested)
            r = announce(engine_loop, &error);
        if (!r)
            r = step_and_pulls_begin(engine_loop, &error);
        r = steps_wait(engine_loop, r, &error);
        if ((r == COX_EMPTY || r == COX_BUSY) && (r = idle(engine_loop, &error)) == COX_EMPTY)
            return 0;
        if (r)
            r = step_failed(engine_loop, r, &error);
        if (r)
            return cox_fail(err, r, "%s", error.text);
    }
}

int cox_engine_loop_run(struct cox_engine_loop *engine_loop, struct cox_error *err)
{
    if (engine_loop->broken)
        return cox_fail(err, COX_CLOSED, "the engine loop has failed or was stopped");
    uint64_t started_ns = cox_now_ns();
    struct cox_error error = {0};
    int r = steps_run(engine_loop, &error);
    if (r) {
        engine_loop->broken = true;
        cox_batcher_fail(engine_loop->batcher, r, error.text);
        cox_fail(err, r, "%s", error.text);
    }
    engine_loop->run_ns += cox_now_ns() - started_ns;
    done_report(engine_loop);
    return r;
}

void cox_engine_loop_cancel(struct cox_engine_loop *engine_loop, const void *context)
{
    const struct cox_error error = {.code = COX_CLOSED, .text = "cancelled"};
    const struct cox_sequence *sequence = cox_batcher_pulling(engine_loop->batcher, 0, context);
    if (!sequence) {
        cox_batcher_cancel(engine_loop->batcher, context);
        return;
    }
    int64_t id = sequence->id;
    bool drained = cox_transfers_cancel(engine_loop->options.transfer, id);
    cox_batcher_pulled(engine_loop->batcher, id, COX_PULL_END_FAIL, drained, NULL, &error);
}

void cox_engine_loop_release(struct cox_engine_loop *engine_loop, uint64_t owner, int64_t id)
{
    cox_batcher_release(engine_loop->batcher, owner, id);
}

const struct cox_kv_leases *cox_engine_loop_kv_leases(const struct cox_engine_loop *engine_loop)
{
    return cox_batcher_kv_leases(engine_loop->batcher);
}

uint64_t cox_engine_loop_epoch(const struct cox_engine_loop *engine_loop)
{
    return engine_loop->epoch;
}

int64_t cox_engine_loop_last_id(const struct cox_engine_loop *engine_loop)
{
    return cox_batcher_last_id(engine_loop->batcher);
}

int64_t *cox_engine_loop_take_unreported(struct cox_engine_loop *engine_loop, uint32_t *ret_count)
{
    *ret_count = 0;
    return engine_loop->nested ? cox_batcher_take_unreported(engine_loop->batcher, ret_count)
                               : NULL;
}

void cox_engine_loop_stop(struct cox_engine_loop *engine_loop)
{
    pthread_mutex_lock(&engine_loop->lock);
    engine_loop->stopped = true;
    pthread_cond_broadcast(&engine_loop->wake);
    pthread_mutex_unlock(&engine_loop->lock);
    if (engine_loop->options.recover_cancel)
        engine_loop->options.recover_cancel(engine_loop->options.recover_context);
}

/* ---- statistics ---- */

static int number_compare(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Sets both to 0 when there are no samples. */
static void percentiles(const uint64_t *samples, uint64_t count, uint64_t *ret_p50,
                        uint64_t *ret_p99)
{
    size_t n = count < SAMPLE_COUNT ? (size_t)count : SAMPLE_COUNT;
    _cox_cleanup_(cox_free_ptr) uint64_t *sorted = n ? calloc(n, sizeof *sorted) : NULL;
    *ret_p50 = *ret_p99 = 0;
    if (!sorted)
        return;
    memcpy(sorted, samples, n * sizeof *sorted);
    qsort(sorted, n, sizeof *sorted, number_compare);
    /* Nearest rank: the smallest sample that this percentage does not exceed. */
    *ret_p50 = sorted[(n * 50 + 99) / 100 - 1];
    *ret_p99 = sorted[(n * 99 + 99) / 100 - 1];
}

uint32_t cox_engine_loop_free_blocks(const struct cox_engine_loop *engine_loop)
{
    return cox_batcher_free_blocks(engine_loop->batcher);
}

void cox_engine_loop_stats(struct cox_engine_loop *engine_loop,
                           struct cox_engine_loop_stats *ret_stats)
{
    *ret_stats = (struct cox_engine_loop_stats){
        .steps = engine_loop->steps,
        .retries = engine_loop->retries,
        .run_ns = engine_loop->run_ns,
        .times = engine_loop->times,
    };
    cox_batcher_stats(engine_loop->batcher, &ret_stats->batcher);
    percentiles(engine_loop->step_samples, engine_loop->step_count, &ret_stats->step_p50_ns,
                &ret_stats->step_p99_ns);
    percentiles(engine_loop->channel_samples, engine_loop->channel_count,
                &ret_stats->channel_p50_ns, &ret_stats->channel_p99_ns);
}
