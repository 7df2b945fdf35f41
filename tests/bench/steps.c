#include "steps.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>

#include "engine/batching/message.h"
#include "engine/batching/batcher.h"
#include "proto/wire.h"
#include "group.h"
#include "proto/executor.pb-c.h"
#include "subject.h"

#define STEP_DEADLINE_MS 60000
#define PROMPT_TOKENS 32
/* When all of them are generated the sequences end, and are announced again. */
#define NEW_TOKENS 32000
#define BLOCK_SIZE 128

static struct group_flavour flavour;

struct steps {
    struct cox_executor *executor;
    struct cox_batcher *batcher;
    struct cox_step_message *message;
    int32_t *tokens;
    struct cox_row_end *ends;

    /* The slice that runs; as in coxswain.c. */
    /* in flight */
    const struct cox_step *step;
    uint64_t *samples_ns;
    size_t sample_count;
    size_t sampled;
    uint64_t begin_ns;
    int failure;
    struct cox_error *err;
    /* of all but done */
    pthread_mutex_t lock;
    sem_t done;
};

/* What every rank samples, and the coordinator expects. */
static int32_t token_after(int64_t id, uint32_t position)
{
    return (int32_t)(((uint64_t)id * 31 + position) & 0x7fff);
}

/* ---- workers ---- */

static int worker_execute(void *context, const struct cox_batch *batch,
                          struct cox_batch_output *outputs, struct cox_error *err)
{
    (void)context;
    (void)err;
    for (uint32_t i = 0; i < batch->row_count; i++) {
        const struct cox_batch_row *row = &batch->rows[i];
        outputs[i].token = row->emit ? token_after(row->id, row->position + row->token_count) : -1;
        outputs[i].logprob = 0;
    }
    return 0;
}

static int worker_parse(void *context, uint32_t rank, int argc, char **argv)
{
    (void)context;
    (void)rank;
    (void)argv;
    return argc == 1 ? 0 : COX_INVALID;
}

int steps_worker_main(int argc, char **argv)
{
    static const struct cox_worker_callbacks callbacks = {
        .size = sizeof(struct cox_worker_callbacks), .execute = worker_execute};
    return group_worker_main(argc, argv, &callbacks, worker_parse, NULL, NULL);
}

/* ---- planning ---- */

static int add_sequences(struct steps *s)
{
    int32_t prompt[PROMPT_TOKENS];
    for (int i = 0; i < PROMPT_TOKENS; i++)
        prompt[i] = i * 37;
    const struct cox_prompt_request request = {
        .tokens = prompt,
        .token_count = PROMPT_TOKENS,
        .new_count_max = NEW_TOKENS,
        .sampling = {.top_p = 1},
    };
    int r = 0;
    for (uint32_t i = 0; r == 0 && i < flavour.sequences; i++)
        r = cox_batcher_add(s->batcher, &request);
    return r;
}

static int batcher_next(struct steps *s)
{
    int r = cox_batcher_next(s->batcher, &s->step);
    if (r != COX_EMPTY)
        return r;
    for (struct cox_sequence *done; (done = cox_batcher_done(s->batcher)) != NULL;)
        cox_sequence_free(done);
    r = add_sequences(s);
    return r ? r : cox_batcher_next(s->batcher, &s->step);
}

static int check_tokens(const struct steps *s, struct cox_error *err)
{
    for (uint32_t i = 0; i < s->step->row_count; i++) {
        const struct cox_step_row *row = &s->step->rows[i];
        if (row->emit && s->tokens[i] != token_after(row->sequence->id, row->position + row->count))
            return cox_fail(err, -EBADMSG, "row %" PRIu32 " got another token", i);
    }
    return 0;
}

/* ---- rounds ---- */

static int submit_next(struct steps *s)
{
    const struct Coxswain__ExecuteRequest *request;
    int r = batcher_next(s);
    if (r)
        return cox_fail(s->err, r, "planning a step: %s", cox_status_text(r));
    s->begin_ns = cox_now_ns();
    r = cox_step_message_fill(s->message, s->step, &request);
    if (r)
        return cox_fail(s->err, r, "filling a step: %s", cox_status_text(r));
    const struct cox_submit_options options = {
        .size = sizeof(struct cox_submit_options),
        .gather = COX_GATHER_RANK0,
        .deadline_ns = s->begin_ns + STEP_DEADLINE_MS * COX_NSEC_PER_MSEC,
    };
    uint64_t sequence;
    r = cox_executor_submit(s->executor, request, &options, &sequence, s->err);
    if (r == 0)
        cox_batcher_publish(s->batcher, sequence);
    return r;
}

static int take_tokens(struct steps *s, const struct cox_completion *completion)
{
    if (completion->status)
        return cox_fail(s->err, completion->status, "%s", completion->text);
    int r = cox_step_message_read(s->message, s->step, completion->sequence,
                                  completion->payload ? completion->payload->response : NULL,
                                  s->tokens, s->ends, s->err);
    if (r == 0)
        r = check_tokens(s, s->err);
    return r ? r : cox_batcher_commit(s->batcher, s->tokens, s->ends, NULL, s->err);
}

static void on_completion(void *context, const struct cox_completion *completion)
{
    const uint64_t now_ns = cox_now_ns();
    struct steps *s = context;
    pthread_mutex_lock(&s->lock);
    s->samples_ns[s->sampled++] = now_ns - s->begin_ns;
    s->failure = take_tokens(s, completion);
    bool more = s->failure == 0 && s->sampled < s->sample_count;
    if (more)
        s->failure = submit_next(s);
    more = more && s->failure == 0;
    pthread_mutex_unlock(&s->lock);
    if (!more)
        sem_post(&s->done);
}

static int steps_run(void *subject, uint8_t *request, uint64_t *samples_ns, size_t count,
                     struct cox_error *err)
{
    struct steps *s = subject;
    (void)request;
    s->samples_ns = samples_ns;
    s->sample_count = count;
    s->sampled = 0;
    s->err = err;
    pthread_mutex_lock(
        &s->lock); /* its answer may come before the batcher knows that it is on its way */
    int r = submit_next(s);
    pthread_mutex_unlock(&s->lock);
    if (r)
        return r;
    group_sem_wait(&s->done);
    return s->failure;
}

/* ---- the subject ---- */

static void steps_stop(void *subject)
{
    struct steps *s = subject;
    cox_executor_free(s->executor);
    cox_batcher_free(s->batcher);
    cox_step_message_free(s->message);
    sem_destroy(&s->done);
    pthread_mutex_destroy(&s->lock);
    free(s->tokens);
    free(s->ends);
    free(s);
}

static int steps_init(struct steps *s, const struct subject_options *options, struct cox_error *err)
{
    static const char *const words[] = {STEPS_WORDS, NULL};
    const uint32_t rows = flavour.sequences;
    const struct cox_batcher_options batcher_options = {
        .sequence_count_max = rows,
        .token_count_max = rows * PROMPT_TOKENS,
        .block_count = rows * ((PROMPT_TOKENS + NEW_TOKENS) / BLOCK_SIZE + 2),
        .block_size = BLOCK_SIZE,
        .position_count_max = PROMPT_TOKENS + NEW_TOKENS,
    };
    int r = cox_batcher_new(&batcher_options, &s->batcher, err);
    if (r)
        return r;
    s->tokens = calloc(rows, sizeof *s->tokens);
    s->ends = calloc(rows, sizeof *s->ends);
    if (!s->tokens || !s->ends || cox_step_message_new(rows, false, &s->message) ||
        add_sequences(s))
        return cox_fail(err, -ENOMEM, "no memory for %" PRIu32 " sequences", rows);
    r = group_start(&flavour, options->rank_count, 0, 0, words, &s->executor, err);
    return r ? r : cox_executor_set_handler(s->executor, COX_CHANNEL_EXECUTE, on_completion, s);
}

static int steps_start(const struct subject_options *options, void **ret_subject,
                       struct cox_error *err)
{
    struct steps *s = calloc(1, sizeof *s);
    if (!s)
        return cox_fail(err, -ENOMEM, "no memory for steps");
    sem_init(&s->done, 0, 0);
    pthread_mutex_init(&s->lock, NULL);
    int r = steps_init(s, options, err);
    if (r) {
        steps_stop(s);
        return cox_fail(err, r, "%s", cox_status_text(r));
    }
    *ret_subject = s;
    return 0;
}

int steps_subject_main(int argc, char **argv)
{
    static const struct subject_ops ops = {
        .start = steps_start, .run = steps_run, .stop = steps_stop};
    if (group_flavour_parse(&argc, argv, &flavour) || flavour.sequences == 0) {
        fputs("coxswain-bench: an option of a subject is wrong\n", stderr);
        return 2;
    }
    return subject_main(argc, argv, &ops);
}
