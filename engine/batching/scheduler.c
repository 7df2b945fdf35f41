#include "scheduler.h"

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
#define PULL_MS_DEFAULT 10000
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
struct flight {
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
    uint8_t *ended;
};

struct cox_scheduler {
    struct cox_executor *executor;
    struct cox_scheduler_options options;
    struct cox_plan *plan;
    struct cox_message *message;
    bool nested;
    /* run has failed: only free may be called */
    bool broken;
    /* of the last step; tells a late completion from an awaited one */
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
    uint64_t life;
    /* weights version of the last step; 0: no step, or none */
    uint64_t version;

    /* protects stopped, and in flights what the handler uses */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    /* a ring of steps_in_flight; free entries have number 0 */
    struct flight *flights;
    uint32_t flight_first, flight_count;
    bool stopped;

    uint64_t steps, retries, run_ns;
    /* of the previous step */
    uint64_t arrived_ns;
    /* rings of SAMPLE_COUNT */
    uint64_t *step_samples, *channel_samples;
    /* the same */
    uint64_t *group_samples, *group_wait_samples;
    uint64_t step_count, channel_count, group_count;
    struct cox_scheduler_times times;
};

int cox_scheduler_fit(struct cox_scheduler_options *options, const struct cox_init_summary *summary,
                      struct cox_error *err)
{
    if (summary->kv_cache_count == 0)
        return cox_fail(err, COX_CORRUPT, "the workers described no KV cache at init");
    if (summary->kv_cache_count > 1)
        return cox_fail(err, COX_UNSUPPORTED,
                        "the workers keep %" PRIu32
                        " KV caches; this scheduler fills tables of one",
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

static void outcome_fill(const struct cox_scheduler *scheduler, struct flight *flight,
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
    flight->status = cox_message_read(scheduler->message, flight->step, completion->sequence,
                                      response, flight->tokens, flight->ended, &flight->error);
    if (flight->status)
        return;
    const Coxswain__ExecuteModelResponse *answer = response->execute_model_response;
    if (answer->has_model_execute_time && answer->model_execute_time > 0 &&
        answer->model_execute_time < 1e9f)
        flight->model_ns = (uint64_t)((double)answer->model_execute_time * 1e6);
    /* It is a part of a part: a value above the whole is invalid. */
    if (answer->has_group_ns && answer->has_group_wait_ns && flight->model_ns &&
        answer->group_ns <= flight->model_ns && answer->group_wait_ns <= answer->group_ns) {
        flight->has_group = true;
        flight->group_ns = answer->group_ns;
        flight->group_wait_ns = answer->group_wait_ns;
    }
}

static void on_completion(void *context, const struct cox_completion *completion)
{
    uint64_t now = cox_now_ns();
    struct cox_scheduler *scheduler = context;
    pthread_mutex_lock(&scheduler->lock);
    for (uint32_t i = 0; i < scheduler->options.steps_in_flight; i++) {
        struct flight *flight = &scheduler->flights[i];
        /* After a stop run does not wait, and the step may be over. */
        if (flight->number != (uintptr_t)completion->request_context || flight->arrived)
            continue;
        outcome_fill(scheduler, flight, completion);
        flight->arrived_ns = now;
        flight->arrived = true;
        pthread_cond_signal(&scheduler->wake);
    }
    pthread_mutex_unlock(&scheduler->lock);
}

static void on_completion_dropped(void *context, const struct cox_completion *completion)
{
    (void)context;
    (void)completion;
}

/* ---- constructor and destructor ---- */

static void on_quarantine(void *context, const int32_t *blocks, uint32_t count)
{
    cox_plan_reserve(context, blocks, count);
}

static int flights_init(struct cox_scheduler *scheduler)
{
    const struct cox_scheduler_options *options = &scheduler->options;
    scheduler->flights = calloc(options->steps_in_flight, sizeof *scheduler->flights);
    if (!scheduler->flights)
        return -ENOMEM;
    for (uint32_t i = 0; i < options->steps_in_flight; i++) {
        struct flight *flight = &scheduler->flights[i];
        flight->tokens = calloc(options->sequence_count_max, sizeof *flight->tokens);
        flight->ended = calloc(options->sequence_count_max, sizeof *flight->ended);
        if (!flight->tokens || !flight->ended)
            return -ENOMEM;
    }
    return 0;
}

/* run may end with every step in flight. */
static uint32_t parting_count(const struct cox_scheduler_options *options)
{
    uint32_t wanted = options->sequence_count_max * (options->steps_in_flight - 1);
    uint32_t taken = options->sequence_count_max + options->hold_count_max;
    uint32_t room = taken < SEQUENCE_COUNT_MAX ? SEQUENCE_COUNT_MAX - taken : 0;
    return wanted < room ? wanted : room;
}

static int scheduler_init(struct cox_scheduler *scheduler, struct cox_error *err)
{
    const struct cox_scheduler_options *options = &scheduler->options;
    struct cox_plan_options plan_options = {
        .sequence_count_max = options->sequence_count_max,
        .token_count_max = options->token_count_max,
        .block_count = options->block_count,
        .block_size = options->block_size,
        .position_count_max = options->position_count_max,
        .request_size_max = cox_executor_request_size_max(scheduler->executor, COX_CHANNEL_EXECUTE),
        .last_id = options->last_id,
        .hold_count_max = options->hold_count_max,
        .step_count_max = options->steps_in_flight,
        .parting_count_max = parting_count(options),
        .nested = scheduler->nested,
    };
    int r = cox_plan_new(&plan_options, &scheduler->plan, err);
    if (r)
        return r;
    uint32_t rows = options->sequence_count_max;
    r = flights_init(scheduler);
    scheduler->step_samples = calloc(SAMPLE_COUNT, sizeof *scheduler->step_samples);
    scheduler->channel_samples = calloc(SAMPLE_COUNT, sizeof *scheduler->channel_samples);
    scheduler->group_samples = calloc(SAMPLE_COUNT, sizeof *scheduler->group_samples);
    scheduler->group_wait_samples = calloc(SAMPLE_COUNT, sizeof *scheduler->group_wait_samples);
    if (r || !scheduler->group_samples || !scheduler->group_wait_samples ||
        !scheduler->step_samples || !scheduler->channel_samples)
        return cox_fail(err, -ENOMEM, "no memory for the scheduler");
    r = cox_message_new(rows, scheduler->nested, &scheduler->message);
    if (r)
        return cox_fail(err, r, "no memory for the scheduler");
    r = cox_executor_replace(scheduler->executor, COX_CHANNEL_EXECUTE, on_completion, scheduler);
    if (r)
        return cox_fail(err, r, "the execute channel takes no handler: %s", cox_status_text(r));
    if (options->transfer) {
        /* Ranks may still write to blocks of the previous engine loop's pulls. */
        cox_transfers_abandon(options->transfer);
        cox_transfers_quarantine(options->transfer, on_quarantine, scheduler->plan);
    }
    return 0;
}

static void scheduler_destroy(struct cox_scheduler *scheduler)
{
    pthread_cond_destroy(&scheduler->wake);
    pthread_mutex_destroy(&scheduler->lock);
    cox_plan_free(scheduler->plan);
    cox_message_free(scheduler->message);
    for (uint32_t i = 0; scheduler->flights && i < scheduler->options.steps_in_flight; i++) {
        free(scheduler->flights[i].tokens);
        free(scheduler->flights[i].ended);
    }
    free(scheduler->flights);
    free(scheduler->step_samples);
    free(scheduler->channel_samples);
    free(scheduler->group_samples);
    free(scheduler->group_wait_samples);
    free(scheduler);
}

int cox_scheduler_new(struct cox_executor *executor, const struct cox_scheduler_options *options,
                      struct cox_scheduler **ret_scheduler, struct cox_error *err)
{
    if (options->sequence_count_max > SEQUENCE_COUNT_MAX)
        return cox_fail(err, COX_INVALID, "%" PRIu32 " sequences at a time: at most %d",
                        options->sequence_count_max, SEQUENCE_COUNT_MAX);
    /* Legacy workers, and their form, cannot compute tokens that the coordinator does not know. */
    bool nested = options->nested || cox_executor_legacy(executor);
    uint32_t flight_max = nested ? 1 : cox_executor_depth(executor);
    if (options->steps_in_flight > flight_max)
        return cox_fail(err, COX_INVALID, "%" PRIu32 " steps in flight: at most %" PRIu32 "%s",
                        options->steps_in_flight, flight_max,
                        nested ? " with the form of legacy workers"
                               : ", the depth of the group's channels");
    struct cox_scheduler *scheduler = calloc(1, sizeof *scheduler);
    if (!scheduler)
        return cox_fail(err, -ENOMEM, "no memory for the scheduler");
    scheduler->executor = executor;
    scheduler->options = *options;
    if (!options->sequence_count_max)
        scheduler->options.sequence_count_max = SEQUENCE_COUNT_DEFAULT;
    if (!options->token_count_max)
        scheduler->options.token_count_max = TOKEN_COUNT_DEFAULT;
    scheduler->token_limit = scheduler->options.token_count_max;
    if (!options->step_ms)
        scheduler->options.step_ms = STEP_MS_DEFAULT;
    if (!options->retry_max)
        scheduler->options.retry_max = RETRY_MAX_DEFAULT;
    if (!options->pull_ms)
        scheduler->options.pull_ms = PULL_MS_DEFAULT;
    if (!options->steps_in_flight)
        scheduler->options.steps_in_flight =
            flight_max < STEPS_IN_FLIGHT_DEFAULT ? flight_max : STEPS_IN_FLIGHT_DEFAULT;
    COX_ASSERT(!options->transfer || options->feed);
    scheduler->nested = nested;
    scheduler->life = cox_executor_life(executor);

    cox_condition_init(&scheduler->wake);
    pthread_mutex_init(&scheduler->lock, NULL);

    int r = scheduler_init(scheduler, err);
    if (r) {
        scheduler_destroy(scheduler);
        return r;
    }
    *ret_scheduler = scheduler;
    return 0;
}

struct cox_scheduler *cox_scheduler_free(struct cox_scheduler *scheduler)
{
    if (scheduler) {
        /* On return the old handler is not running. */
        cox_executor_replace(scheduler->executor, COX_CHANNEL_EXECUTE, on_completion_dropped, NULL);
        if (scheduler->options.transfer)
            cox_transfers_abandon(scheduler->options.transfer);
        scheduler_destroy(scheduler);
    }
    return NULL;
}

int cox_scheduler_add(struct cox_scheduler *scheduler, const struct cox_prompt_request *request)
{
    COX_ASSERT(!request->source || scheduler->options.transfer);
    return cox_plan_add(scheduler->plan, request);
}

/* ---- one step ---- */

static struct timespec timespec_of(uint64_t deadline_ns)
{
    return (struct timespec){.tv_sec = (time_t)(deadline_ns / COX_NSEC_PER_SEC),
                             .tv_nsec = (long)(deadline_ns % COX_NSEC_PER_SEC)};
}

/* Blocks until the deadline. Returns false when stopped. */
static bool pause_until(struct cox_scheduler *scheduler, uint64_t deadline_ns)
{
    struct timespec until = timespec_of(deadline_ns);
    pthread_mutex_lock(&scheduler->lock);
    while (!scheduler->stopped &&
           pthread_cond_timedwait(&scheduler->wake, &scheduler->lock, &until) == 0)
        ;
    bool go_on = !scheduler->stopped;
    pthread_mutex_unlock(&scheduler->lock);
    return go_on;
}

static struct flight *flight_at(const struct cox_scheduler *scheduler, uint32_t i)
{
    return &scheduler->flights[(scheduler->flight_first + i) % scheduler->options.steps_in_flight];
}

/* An earlier step in flight has failed, so a new step would be void. */
static bool is_void(struct cox_scheduler *scheduler)
{
    bool failed = false;
    pthread_mutex_lock(&scheduler->lock);
    for (uint32_t i = 0; i < scheduler->flight_count; i++)
        failed = failed || (flight_at(scheduler, i)->arrived && flight_at(scheduler, i)->status);
    pthread_mutex_unlock(&scheduler->lock);
    return failed;
}

/* Submits, and retries while a rank owes the reply of an earlier step or still reads the frame. */
static int step_submit(struct cox_scheduler *scheduler, struct flight *flight,
                       const struct Coxswain__ExecuteRequest *request, uint64_t *ret_sequence,
                       struct cox_error *err)
{
    uint64_t give_up_ns = cox_deadline_after_ms(scheduler->options.step_ms);
    uint64_t pause_ns = SUBMIT_PAUSE_MIN_NS;
    /* Ranks begin with it after those in flight, which have as long each. */
    const uint64_t patience_ms = scheduler->options.step_ms * (scheduler->flight_count + 1);
    for (;;) {
        struct cox_submit_options options = {
            .size = sizeof(struct cox_submit_options),
            .gather = COX_GATHER_RANK0,
            .deadline_ns = cox_deadline_after_ms(patience_ms),
            .request_context = (void *)(uintptr_t)flight->number,
            .life = scheduler->life,
        };
        struct cox_error error = {0};
        if (is_void(scheduler))
            return cox_fail(err, COX_ABORTED, "the step before it has failed");
        flight->submitted_ns = cox_now_ns();
        flight->deadline_ns = options.deadline_ns;
        int r = cox_executor_submit(scheduler->executor, request, &options, ret_sequence, &error);
        if (r == 0)
            return 0;
        if ((r != COX_LATE && r != COX_FULL) || flight->submitted_ns >= give_up_ns)
            return cox_fail(err, r, "%s", error.text[0] ? error.text : cox_status_text(r));
        if (!pause_until(scheduler, flight->submitted_ns + pause_ns))
            return cox_fail(err, COX_CLOSED, "stopped");
        pause_ns = cox_deadline_min(pause_ns * 2, SUBMIT_PAUSE_MAX_NS);
    }
}

/* From now on the handler may fill the entry. */
static struct flight *flight_expect(struct cox_scheduler *scheduler, const struct cox_step *step)
{
    struct flight *flight = flight_at(scheduler, scheduler->flight_count);
    pthread_mutex_lock(&scheduler->lock);
    flight->number = ++scheduler->number;
    flight->step = step;
    flight->arrived = false;
    pthread_mutex_unlock(&scheduler->lock);
    return flight;
}

/* Waits for the handler and removes the oldest step from the ring. Later completions of it are
 * ignored. Returns its status. */
static int flight_await(struct cox_scheduler *scheduler, struct cox_error *err)
{
    struct flight *flight = flight_at(scheduler, 0);
    struct timespec until = timespec_of(flight->deadline_ns + COMPLETION_SLACK_NS);
    int r = 0;
    pthread_mutex_lock(&scheduler->lock);
    while (!flight->arrived && !scheduler->stopped && r != ETIMEDOUT)
        r = pthread_cond_timedwait(&scheduler->wake, &scheduler->lock, &until);
    if (flight->arrived)
        r = flight->status ? cox_fail(err, flight->status, "%s", flight->error.text) : 0;
    else if (scheduler->stopped)
        r = cox_fail(err, COX_CLOSED, "stopped");
    else
        r = cox_fail(err, COX_STATE, "a step was not completed by its deadline");
    flight->number = 0;
    scheduler->flight_first = (scheduler->flight_first + 1) % scheduler->options.steps_in_flight;
    scheduler->flight_count--;
    pthread_mutex_unlock(&scheduler->lock);
    return r;
}

static void step_count(struct cox_scheduler *scheduler, const struct flight *flight)
{
    /* A rank begins with a step after it has ended the previous one. */
    uint64_t since_ns =
        flight->submitted_ns > scheduler->arrived_ns ? flight->submitted_ns : scheduler->arrived_ns;
    uint64_t own_ns = flight->arrived_ns > since_ns ? flight->arrived_ns - since_ns : 0;
    scheduler->steps++;
    scheduler->step_samples[scheduler->step_count++ % SAMPLE_COUNT] =
        flight->arrived_ns - flight->submitted_ns;
    scheduler->arrived_ns = flight->arrived_ns;
    if (!flight->model_ns)
        return;
    const uint64_t channel_ns = own_ns > flight->model_ns ? own_ns - flight->model_ns : 0;
    scheduler->channel_samples[scheduler->channel_count++ % SAMPLE_COUNT] = channel_ns;
    scheduler->times.step_ns += own_ns;
    scheduler->times.channel_ns += channel_ns;
    if (!flight->has_group)
        return;
    scheduler->group_samples[scheduler->group_count % SAMPLE_COUNT] = flight->group_ns;
    scheduler->group_wait_samples[scheduler->group_count++ % SAMPLE_COUNT] = flight->group_wait_ns;
    scheduler->times.has_group = true;
    scheduler->times.group_ns += flight->group_ns;
    scheduler->times.group_wait_ns += flight->group_wait_ns;
}

/* ---- pulls ---- */

/* Starts pulls for admitted sequences with a KV reference, in parallel with the steps. */
static int pulls_start(struct cox_scheduler *scheduler, struct cox_error *err)
{
    const struct cox_sequence *sequence;
    bool any = false;
    int r = 0;
    while (!r && (sequence = cox_plan_pull(scheduler->plan))) {
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
                                                                      : scheduler->options.pull_ms),
                                            sequence->source->lease_ns),
            .life = scheduler->life,
        };
        r = cox_transfers_start(scheduler->options.transfer, &request);
        any = true;
    }
    if (any)
        cox_transfers_turn(scheduler->options.transfer);
    return r ? cox_fail(err, r, "no memory for a pull") : 0;
}

static enum cox_pull_end pull_judge(const struct cox_scheduler *scheduler,
                                    const struct cox_sequence *sequence,
                                    const struct cox_pull_outcome *result)
{
    const struct cox_pull_report *report = result->report;
    if (report->state == COX_PULL_SUCCESS && result->life == scheduler->life)
        return COX_PULL_END_DONE;
    if (sequence->request.pull_only)
        return COX_PULL_END_FAIL;
    if (sequence->pulls < PULL_COUNT_MAX && cox_now_ns() < sequence->source->lease_ns &&
        report->error.code != COX_INVALID)
        return COX_PULL_END_RETRY;
    return sequence->request.no_recompute ? COX_PULL_END_FAIL : COX_PULL_END_RECOMPUTE;
}

static void pull_end(struct cox_scheduler *scheduler, struct cox_pull_outcome *result)
{
    const struct cox_scheduler_options *options = &scheduler->options;
    const struct cox_sequence *sequence = cox_plan_pulling(scheduler->plan, result->sequence, NULL);
    COX_ASSERT(sequence); /* a cancelled one has no outcome */
    struct cox_error error = {0};
    const struct cox_error *said = &result->report->error;
    enum cox_pull_end end = pull_judge(scheduler, sequence, result);
    if (end != COX_PULL_END_DONE)
        cox_fail(&error, said->code ? said->code : COX_STALE,
                 "sequence %" PRId64 " of the group '%s' could not be pulled in %" PRIu32
                 " tr%s: %.700s",
                 sequence->source->sequence, sequence->source->cluster_id, sequence->pulls,
                 sequence->pulls == 1 ? "y" : "ies",
                 said->text[0] ? said->text : "ranks were replaced meanwhile");
    if (end == COX_PULL_END_RECOMPUTE)
        cox_log_write(&options->log, 4, "%s: it is computed here", error.text);
    if (end != COX_PULL_END_RETRY && options->pulled)
        options->pulled(options->pulled_context, sequence,
                        end == COX_PULL_END_DONE ? NULL : &error);
    bool wanted = sequence->request.pull_only;
    cox_plan_pulled(scheduler->plan, result->sequence, end, result->quiet,
                    wanted ? result->report : NULL, &error);
    if (!wanted)
        free(result->report);
}

/* Handles expired leases and ended pulls. Not 0: the group may have to be recovered first. */
static int transfers_look(struct cox_scheduler *scheduler, struct cox_error *err)
{
    struct cox_transfers *transfer = scheduler->options.transfer;
    struct cox_pull_outcome result;
    int32_t *blocks;
    uint32_t count;
    int r = 0;
    /* Ranks may have lost the leased blocks. */
    bool lost = cox_executor_life(scheduler->executor) != scheduler->life;
    if (cox_plan_kv_leases(scheduler->plan)->count)
        cox_plan_expire(scheduler->plan, lost ? COX_DEADLINE_NEVER : cox_now_ns());
    if (!transfer)
        return 0;
    cox_transfers_turn(transfer);
    while (cox_transfers_take_quiet(transfer, &blocks, &count) == 0) {
        cox_plan_give(scheduler->plan, blocks, count);
        free(blocks);
    }
    while (cox_transfers_take(transfer, &result) == 0) {
        /* Deaths in an earlier epoch were handled before. */
        if (result.own_death && result.life == scheduler->life)
            r = cox_fail(err, result.report->error.code, "%s", result.report->error.text);
        pull_end(scheduler, &result);
    }
    return r;
}

/* When to check although no wakeup arrives. */
static uint64_t transfers_due_ns(const struct cox_scheduler *scheduler)
{
    uint64_t due_ns = cox_kv_leases_due_ns(cox_plan_kv_leases(scheduler->plan));
    return scheduler->options.transfer
               ? cox_deadline_min(due_ns, cox_transfers_due_ns(scheduler->options.transfer))
               : due_ns;
}

/* ---- the step ---- */

/* Sets the weights version of the step. */
static void step_weights(struct cox_scheduler *scheduler, struct flight *flight)
{
    struct cox_shared_weights *weights = scheduler->options.weights;
    struct cox_weights_told told;
    flight->version = 0;
    flight->switches = false;
    if (!weights)
        return;
    const bool offered = cox_shared_weights_step(weights, scheduler->life, &told);
    flight->version = told.version;
    /* Correct also when the step turns out void: a failure reverts the batcher, and no earlier
     * computation is left. */
    flight->switches = scheduler->version && flight->version != scheduler->version;
    scheduler->version = flight->version;
    cox_message_weights(scheduler->message, &told, offered);
}

/* Reports status r of the step to the weights, when those before it succeeded. A step that is void
 * because of an earlier failure proves nothing about its weights. */
static void step_weights_end(struct cox_scheduler *scheduler, const struct flight *flight, int r,
                             const struct cox_error *err)
{
    struct cox_shared_weights *weights = scheduler->options.weights;
    if (!r && flight->switches)
        cox_plan_renew(scheduler->plan);
    if (weights && r)
        cox_shared_weights_failed(weights, flight->version, r, err->text);
    else if (weights)
        cox_shared_weights_used(weights, flight->version, scheduler->life);
}

/* There is nothing to compute, but something to report to the ranks. */
static bool needs_empty_step(const struct cox_scheduler *scheduler)
{
    return scheduler->options.weights && cox_shared_weights_pending(scheduler->options.weights);
}

/* Batches a step and submits it. Returns 0, COX_EMPTY, COX_BUSY, or the failure. */
static int step_begin(struct cox_scheduler *scheduler, struct cox_error *err)
{
    const struct cox_step *step;
    int r = cox_plan_next(scheduler->plan, &step);
    /* A step in flight may be the one that reports it. */
    if ((r == COX_EMPTY || r == COX_BUSY) && !scheduler->flight_count &&
        needs_empty_step(scheduler)) {
        cox_plan_next_empty(scheduler->plan, &step);
        r = 0;
    }
    if (r)
        return r;
    struct flight *flight = flight_expect(scheduler, step);
    const struct Coxswain__ExecuteRequest *request;
    uint64_t sequence;
    step_weights(scheduler, flight);
    r = cox_message_fill(scheduler->message, step, &request);
    r = r ? cox_fail(err, r, "no memory for a step")
          : step_submit(scheduler, flight, request, &sequence, err);
    if (r)
        return r;
    cox_plan_publish(scheduler->plan, sequence);
    scheduler->flight_count++;
    return 0;
}

/* As step_begin, and then starts the pulls of newly admitted sequences. The order matters: after a
 * submit, no rank owes an earlier reply, so none still writes to these blocks. */
static int step_and_pulls_begin(struct cox_scheduler *scheduler, struct cox_error *err)
{
    int r = step_begin(scheduler, err);
    int started = 0;
    if ((!r || r == COX_BUSY) && scheduler->options.transfer)
        started = pulls_start(scheduler, err);
    return started ? started : r;
}

/* A step that was too slow once will be too slow again, so the next steps are half as large. There
 * is a floor, since ranks may be late for other reasons. */
static void limit_lower(struct cox_scheduler *scheduler)
{
    const uint32_t half = scheduler->late_tokens / 2;
    const uint32_t least = scheduler->options.token_count_max / LIMIT_FALL;
    scheduler->token_limit = half > least ? half : least ? least : 1;
    scheduler->calm_count = 0;
    cox_plan_limit(scheduler->plan, scheduler->token_limit);
}

/* Grows the limit step by step: the cause may have been a rank that was stopped for a while. */
static void limit_raise(struct cox_scheduler *scheduler)
{
    const uint32_t most = scheduler->options.token_count_max;
    if (scheduler->token_limit == most || ++scheduler->calm_count < CALM_COUNT)
        return;
    scheduler->token_limit = scheduler->token_limit < most / 2 ? scheduler->token_limit * 2 : most;
    scheduler->calm_count = 0;
    cox_plan_limit(scheduler->plan, scheduler->token_limit);
}

/* Waits for the oldest step in flight. Returns 0, or its failure. */
static int step_end(struct cox_scheduler *scheduler, struct cox_error *err)
{
    struct flight *flight = flight_at(scheduler, 0);
    int r = flight_await(scheduler, err);
    if (r == COX_TIMEOUT)
        scheduler->late_tokens = flight->step->token_count;
    step_weights_end(scheduler, flight, r, err);
    if (!r)
        r = cox_plan_commit(scheduler->plan, flight->tokens, flight->ended, err);
    if (r)
        return r;
    step_count(scheduler, flight);
    limit_raise(scheduler);
    /* A step that recomputes what was computed before the failure does not show that the failure is
     * over. */
    struct cox_plan_stats stats;
    cox_plan_stats(scheduler->plan, &stats);
    if (stats.positions != scheduler->positions || !flight->step->row_count)
        scheduler->retry_count = 0;
    scheduler->positions = stats.positions;
    return 0;
}

/* r is the result of step_begin. Waits for the oldest step when the ring is full, or when nothing
 * can be batched before it ends. After a failure waits for all: earlier steps count, later ones are
 * void, and so would be steps submitted now. Returns
 *   0
 *   COX_EMPTY, COX_BUSY: r, and no step is in flight
 *   the first failure, and no step is in flight
 */
static int steps_wait(struct cox_scheduler *scheduler, int r, struct cox_error *err)
{
    const bool waits = r == COX_EMPTY || r == COX_BUSY;
    const bool failed = r && !waits;
    struct cox_error earlier = {0}, later = {0};
    int e = 0;
    if (failed) {
        while (!e && scheduler->flight_count)
            e = step_end(scheduler, &earlier);
    } else if (scheduler->flight_count &&
               (waits || scheduler->flight_count == scheduler->options.steps_in_flight)) {
        e = step_end(scheduler, &earlier);
        r = 0;
    }
    while (e && scheduler->flight_count)
        flight_await(scheduler, &later);
    if (e)
        *err = earlier;
    return e ? e : r;
}

/* ---- run ---- */

static void done_report(struct cox_scheduler *scheduler)
{
    struct cox_sequence *sequence;
    while ((sequence = cox_plan_done(scheduler->plan))) {
        if (scheduler->options.done)
            scheduler->options.done(scheduler->options.done_context, sequence);
        cox_sequence_free(sequence);
    }
}

/* Reports ended sequences to the ranks that no step reports. */
static int tell(struct cox_scheduler *scheduler, struct cox_error *err)
{
    const int64_t *ids;
    uint32_t count = cox_plan_unreported(scheduler->plan, &ids);
    if (count == 0)
        return 0;
    uint64_t deadline_ns = cox_deadline_after_ms(scheduler->options.step_ms);
    int r = cox_executor_cleanup(scheduler->executor, ids, count, deadline_ns, err);
    /* After a failure the batcher is reverted, and base 0 of the next step reports everything. With
     * no next step, it is not retried for ever. */
    if (!r || !scheduler->nested)
        cox_plan_reported(scheduler->plan);
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

static bool is_stopped(struct cox_scheduler *scheduler)
{
    pthread_mutex_lock(&scheduler->lock);
    bool stopped = scheduler->stopped;
    pthread_mutex_unlock(&scheduler->lock);
    return stopped;
}

/* Nothing can be computed now. Reports to the ranks before blocking, which may last long. Returns
 * 0: there is more to do; COX_EMPTY: no request is left; or the failure of the report. */
static int idle(struct cox_scheduler *scheduler, struct cox_error *err)
{
    const struct cox_scheduler_options *options = &scheduler->options;
    int r = tell(scheduler, err);
    if (r)
        return r;
    return options->feed && options->feed(options->feed_context, true, transfers_due_ns(scheduler))
               ? 0
               : COX_EMPTY;
}

/* A step, or a report, has failed with r. Returns 0 to retry, or the status that run ends with,
 * also in err. */
static int step_failed(struct cox_scheduler *scheduler, int r, struct cox_error *err)
{
    const struct cox_scheduler_options *options = &scheduler->options;
    int recovered = 0;
    if (options->recover && may_recover(r)) {
        recovered = options->recover(options->recover_context, err);
        if (recovered != 0 && recovered != 1)
            return recovered;
    }
    if (!recovered && !may_retry(r))
        return r;
    if (!recovered && scheduler->retry_count == options->retry_max) {
        const struct cox_error last = *err;
        char advice[128] = "";
        if (r == COX_TIMEOUT)
            snprintf(advice, sizeof advice,
                     ", at last with %" PRIu32
                     " tokens: a longer --timeout, or fewer --step-tokens",
                     scheduler->late_tokens);
        *err = (struct cox_error){0};
        return cox_fail(err, r, "%.800s (tried %" PRIu32 " times%s)", last.text,
                        scheduler->retry_count + 1, advice);
    }
    if (r == COX_TIMEOUT && scheduler->late_tokens)
        limit_lower(scheduler);
    if (recovered)
        scheduler->retry_count = 0;
    else
        scheduler->retry_count++;
    scheduler->retries++;
    cox_log_write(&options->log, recovered ? 5 : 4, "a step failed and is run again: %s",
                  err->text);
    scheduler->life = cox_executor_life(scheduler->executor);
    cox_plan_revert(scheduler->plan);
    return 0;
}

static int steps_run(struct cox_scheduler *scheduler, struct cox_error *err)
{
    for (;;) {
        done_report(scheduler); /* reports leases before feed can release them */
        if (scheduler->options.feed)
            scheduler->options.feed(scheduler->options.feed_context, false, 0);
        struct cox_error error = {0};
        int r = is_stopped(scheduler) ? cox_fail(&error, COX_CLOSED, "stopped")
                                      : transfers_look(scheduler, &error);
        done_report(scheduler);
        if (!r && scheduler->nested)
            r = tell(scheduler, &error);
        if (!r)
            r = step_and_pulls_begin(scheduler, &error);
        r = steps_wait(scheduler, r, &error);
        if ((r == COX_EMPTY || r == COX_BUSY) && (r = idle(scheduler, &error)) == COX_EMPTY)
            return 0;
        if (r)
            r = step_failed(scheduler, r, &error);
        if (r)
            return cox_fail(err, r, "%s", error.text);
    }
}

int cox_scheduler_run(struct cox_scheduler *scheduler, struct cox_error *err)
{
    if (scheduler->broken)
        return cox_fail(err, COX_CLOSED, "the scheduler has failed or was stopped before");
    uint64_t started_ns = cox_now_ns();
    struct cox_error error = {0};
    int r = steps_run(scheduler, &error);
    if (r) {
        scheduler->broken = true;
        cox_plan_fail(scheduler->plan, r, error.text);
        cox_fail(err, r, "%s", error.text);
    }
    scheduler->run_ns += cox_now_ns() - started_ns;
    done_report(scheduler);
    return r;
}

void cox_scheduler_cancel(struct cox_scheduler *scheduler, const void *context)
{
    const struct cox_error error = {.code = COX_CLOSED, .text = "cancelled"};
    const struct cox_sequence *sequence = cox_plan_pulling(scheduler->plan, 0, context);
    if (!sequence) {
        cox_plan_cancel(scheduler->plan, context);
        return;
    }
    int64_t id = sequence->id;
    bool quiet = cox_transfers_cancel(scheduler->options.transfer, id);
    cox_plan_pulled(scheduler->plan, id, COX_PULL_END_FAIL, quiet, NULL, &error);
}

void cox_scheduler_release(struct cox_scheduler *scheduler, uint64_t owner, int64_t id)
{
    cox_plan_release(scheduler->plan, owner, id);
}

const struct cox_kv_leases *cox_scheduler_kv_leases(const struct cox_scheduler *scheduler)
{
    return cox_plan_kv_leases(scheduler->plan);
}

uint64_t cox_scheduler_life(const struct cox_scheduler *scheduler)
{
    return scheduler->life;
}

int64_t cox_scheduler_last_id(const struct cox_scheduler *scheduler)
{
    return cox_plan_last_id(scheduler->plan);
}

void cox_scheduler_stop(struct cox_scheduler *scheduler)
{
    pthread_mutex_lock(&scheduler->lock);
    scheduler->stopped = true;
    pthread_cond_broadcast(&scheduler->wake);
    pthread_mutex_unlock(&scheduler->lock);
    if (scheduler->options.recover_cancel)
        scheduler->options.recover_cancel(scheduler->options.recover_context);
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

uint32_t cox_scheduler_free_blocks(const struct cox_scheduler *scheduler)
{
    return cox_plan_free_blocks(scheduler->plan);
}

void cox_scheduler_stats(struct cox_scheduler *scheduler, struct cox_scheduler_stats *ret_stats)
{
    *ret_stats = (struct cox_scheduler_stats){
        .steps = scheduler->steps,
        .retries = scheduler->retries,
        .run_ns = scheduler->run_ns,
        .times = scheduler->times,
    };
    cox_plan_stats(scheduler->plan, &ret_stats->plan);
    percentiles(scheduler->step_samples, scheduler->step_count, &ret_stats->step_p50_ns,
                &ret_stats->step_p99_ns);
    percentiles(scheduler->channel_samples, scheduler->channel_count, &ret_stats->channel_p50_ns,
                &ret_stats->channel_p99_ns);
    percentiles(scheduler->group_samples, scheduler->group_count, &ret_stats->group_p50_ns,
                &ret_stats->group_p99_ns);
    percentiles(scheduler->group_wait_samples, scheduler->group_count,
                &ret_stats->group_wait_p50_ns, &ret_stats->group_wait_p99_ns);
}
