#include "serving.h"

#include "channel/base/idioms.h"
#include "channel/base/thread.h"
#include "lora.h"
#include "shared_weights.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SEQUENCE_COUNT_DEFAULT 64
/* Prompts given to the engine loop, as a multiple of what it can run, so that no step lacks
 * prompts. */
#define AHEAD_FACTOR 2
/* Slots of the ranks' tables for leased sequences. */
#define HOLD_COUNT_MAX 512
/* Releases that a client may have queued: all its leases, and as many that have ended. */
#define RELEASE_COUNT_MAX (2 * HOLD_COUNT_MAX)

/* One prompt. It is in exactly one list: its client's inbox, the prompt queue's running list, or
 * its client's done list. */
struct item {
    struct item *next;
    /* NULL: cancelled */
    struct cox_serving_client *client;
    /* owns its tokens until the engine loop has copied them */
    struct cox_prompt_request request;
    int32_t *tokens;
    /* likewise */
    struct cox_kv_reference *source;
    /* of the prompt, for the client's limit */
    uint32_t token_count;
    /* name of its adapter while taken; NULL: none, or given back */
    char *lora;
    struct cox_prompt_output result;
};

struct queue {
    struct item *first;
    struct item **end;
};

/* A queued release of leases. */
struct release {
    struct release *next;
    uint64_t owner;
    /* 0: all of the owner */
    int64_t sequence;
};

struct cox_serving_client {
    struct cox_serving *serving;
    /* unique for ever */
    uint64_t number;
    /* releases all its leases; queued when the client disconnects */
    struct release *last_release;
    struct cox_serving_client *next;
    int wake_fd;
    struct queue inbox, done;
    uint32_t outstanding;
    /* of the outstanding prompts */
    uint64_t token_count;
    /* queued releases since the list was last processed */
    uint32_t release_count;
};

struct cox_serving {
    struct cox_executor *executor;
    struct cox_serving_options options;
    uint32_t running_max;
    pthread_t thread;
    bool joined;

    /* protects everything below */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    bool stopped;
    struct cox_error cause;
    /* while its run runs */
    struct cox_scheduler *scheduler;
    struct cox_serving_client *clients;
    /* the client whose prompt is next; NULL: the first one */
    struct cox_serving_client *turn;
    struct item *running;
    /* a running prompt was cancelled */
    bool cancelled;
    /* an ended pull, or a queued release */
    bool woken;
    /* NULL: no pulls */
    struct cox_transfers *transfer;
    /* in any order */
    struct release *releases;
    /* of the last client */
    uint64_t client_number;
    /* of the previous engine loops */
    int64_t last_id;
    /* copies of the leases, for other threads */
    struct cox_kv_reference **holds;
    size_t hold_count;
    /* of the engine loop, when they were copied */
    uint64_t hold_changes;
    struct cox_prompts_status status;
};

static void queue_init(struct queue *queue)
{
    *queue = (struct queue){.end = &queue->first};
}

static void queue_append(struct queue *queue, struct item *item)
{
    item->next = NULL;
    *queue->end = item;
    queue->end = &item->next;
}

static struct item *queue_pop(struct queue *queue)
{
    struct item *item = queue->first;
    if (item) {
        queue->first = item->next;
        if (!queue->first)
            queue->end = &queue->first;
        item->next = NULL;
    }
    return item;
}

/* Nothing of the prompt is computed any more, except perhaps a row in flight. For that, the ranks
 * keep the adapter until they learn that the sequence has ended. */
static void item_give_lora(const struct cox_serving *serving, struct item *item)
{
    if (item->lora)
        cox_lora_give(serving->options.lora, item->lora);
    free(item->lora);
    item->lora = NULL;
}

static void item_free(const struct cox_serving *serving, struct item *item)
{
    item_give_lora(serving, item);
    cox_prompt_output_deinit(&item->result);
    free(item->tokens);
    cox_kv_reference_free(item->source);
    free(item);
}

/* ---- results, with the lock held ---- */

static void item_fail(struct item *item, int code, const char *text)
{
    item->result.finish = COX_FINISH_ERROR;
    item->result.error = calloc(1, sizeof *item->result.error);
    if (item->result.error)
        cox_fail(item->result.error, code, "%s", text);
}

/* A KV reference as other groups use it. NULL: no memory. */
static struct cox_kv_reference *hold_source(const struct cox_serving *serving,
                                            const struct cox_kv_lease *hold)
{
    const struct cox_kv_reference source = {
        .cluster_id = serving->options.name,
        .life = cox_executor_kv_life(serving->executor, cox_scheduler_life(serving->scheduler)),
        .sequence = hold->id,
        .lease_ns = hold->lease_ns,
        .blocks = hold->blocks,
        .block_count = hold->block_count,
    };
    return cox_kv_reference_dup(&source);
}

static void item_fill(const struct cox_serving *serving, struct item *item,
                      const struct cox_sequence *sequence)
{
    item->result.recomputed = sequence->recomputed;
    if (sequence->report) {
        item->result.report = sequence->report;
        ((struct cox_sequence *)(uintptr_t)sequence)->report =
            NULL; /* the engine loop only frees it */
    }
    if (sequence->finish == COX_FINISH_ERROR) {
        bool told = sequence->error.code == COX_CLOSED && serving->cause.code;
        const struct cox_error *error = told ? &serving->cause : &sequence->error;
        item_fail(item, error->code, error->text);
        return;
    }
    item->result.finish = sequence->finish;
    uint32_t count = sequence->token_count - sequence->prompt_count;
    item->result.tokens = calloc((size_t)count + 1, sizeof *item->result.tokens);
    if (!item->result.tokens) {
        item_fail(item, -ENOMEM, "no memory for the answer");
        return;
    }
    memcpy(item->result.tokens, sequence->tokens + sequence->prompt_count,
           count * sizeof *item->result.tokens);
    item->result.token_count = count;
    if (!sequence->hold)
        return;
    item->result.hold = hold_source(serving, sequence->hold);
    if (!item->result.hold)
        item_fail(item, -ENOMEM, "no memory for the answer");
}

static void client_wake(const struct cox_serving_client *client)
{
    const uint64_t one = 1;
    while (write(client->wake_fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

static void item_hand_over(struct cox_serving *serving, struct item *item)
{
    item_give_lora(serving, item);
    serving->status.completed++;
    serving->status.unread++;
    serving->status.generated_tokens += item->result.token_count;
    queue_append(&item->client->done, item);
    client_wake(item->client);
}

/* ---- hooks of the engine loop, on its thread ---- */

static void on_done(void *context, const struct cox_sequence *sequence)
{
    struct cox_serving *serving = context;
    struct item *item = sequence->request.context;
    pthread_mutex_lock(&serving->lock);
    struct item **link = &serving->running;
    while (*link != item)
        link = &(*link)->next;
    *link = item->next;
    serving->status.running--;
    bool handed = item->client != NULL;
    if (handed) {
        item_fill(serving, item, sequence);
        handed = item->result.hold != NULL;
        item_hand_over(serving, item);
    } else {
        serving->status.cancelled++;
        item_free(serving, item);
    }
    /* No client learns of the lease, so none would release it. */
    if (sequence->hold && !handed)
        cox_scheduler_release(serving->scheduler, sequence->request.owner, sequence->id);
    pthread_mutex_unlock(&serving->lock);
}

static void on_pulled(void *context, const struct cox_sequence *sequence,
                      const struct cox_error *error)
{
    struct cox_serving *serving = context;
    struct item *item = sequence->request.context;
    pthread_mutex_lock(&serving->lock);
    serving->status.recomputed +=
        error && !sequence->request.no_recompute && !sequence->request.pull_only;
    /* Without memory the client keeps its lease until the prompt ends. */
    struct item *word = item->client ? calloc(1, sizeof *word) : NULL;
    if (word) {
        word->result.index = item->result.index;
        word->result.is_pulled = true;
        word->result.error = error ? malloc(sizeof *error) : NULL;
        if (word->result.error)
            *word->result.error = *error;
        queue_append(&item->client->done, word);
        client_wake(item->client);
    }
    pthread_mutex_unlock(&serving->lock);
}

static void on_transfer_news(void *context)
{
    struct cox_serving *serving = context;
    pthread_mutex_lock(&serving->lock);
    serving->woken = true;
    pthread_cond_signal(&serving->wake);
    pthread_mutex_unlock(&serving->lock);
}

/* The oldest prompt of the next client in turn; NULL: none. */
static struct item *next_item(struct cox_serving *serving)
{
    struct cox_serving_client *first = serving->turn ? serving->turn : serving->clients;
    struct cox_serving_client *client = first;
    while (client) {
        struct cox_serving_client *after = client->next ? client->next : serving->clients;
        struct item *item = queue_pop(&client->inbox);
        if (item) {
            serving->turn = after;
            serving->status.waiting--;
            return item;
        }
        client = after == first ? NULL : after;
    }
    return NULL;
}

static void give(struct cox_serving *serving, struct item *item)
{
    int r = cox_scheduler_add(serving->scheduler, &item->request);
    if (r) {
        item_fail(item, r, "no memory for the prompt");
        item_hand_over(serving, item);
        return;
    }
    free(item->tokens); /* the engine loop has a copy */
    item->tokens = NULL;
    item->source = cox_kv_reference_free(item->source);
    item->next = serving->running;
    serving->running = item;
    serving->status.running++;
}

/* With the lock held: the ranks must switch to other weights. */
static bool has_news(const struct cox_serving *serving)
{
    struct cox_shared_weights *weights = serving->options.scheduler.weights;
    return weights && cox_shared_weights_pending(weights);
}

static void on_weights(void *context)
{
    struct cox_serving *serving = context;
    pthread_mutex_lock(&serving->lock);
    pthread_cond_signal(&serving->wake);
    pthread_mutex_unlock(&serving->lock);
}

static void holds_clear(struct cox_serving *serving)
{
    for (size_t i = 0; i < serving->hold_count; i++)
        cox_kv_reference_free(serving->holds[i]);
    free(serving->holds);
    serving->holds = NULL;
    serving->hold_count = 0;
    serving->status.holds = serving->status.held_blocks = 0;
    serving->hold_changes = 0;
}

/* Copies the leases for other threads. A lease that cannot be copied for lack of memory is reported
 * as absent. */
static void holds_copy(struct cox_serving *serving)
{
    const struct cox_kv_leases *holds = cox_scheduler_kv_leases(serving->scheduler);
    if (holds->changes == serving->hold_changes)
        return;
    holds_clear(serving);
    serving->holds = calloc(holds->count + UINT64_C(1), sizeof *serving->holds);
    for (const struct cox_kv_lease *hold = holds->first; hold && serving->holds; hold = hold->next)
        if ((serving->holds[serving->hold_count] = hold_source(serving, hold)))
            serving->hold_count++;
    serving->status.holds = holds->count;
    serving->status.held_blocks = holds->block_count;
    serving->hold_changes = holds->changes;
}

static void releases_do(struct cox_serving *serving)
{
    while (serving->releases) {
        struct release *release = serving->releases;
        serving->releases = release->next;
        if (serving->scheduler)
            cox_scheduler_release(serving->scheduler, release->owner, release->sequence);
        free(release);
    }
    for (struct cox_serving_client *client = serving->clients; client; client = client->next)
        client->release_count = 0;
}

/* Queues the release for the next call between two steps. Takes release. */
static void release_put(struct cox_serving *serving, struct release *release)
{
    release->next = serving->releases;
    serving->releases = release;
    if (!serving->scheduler)
        releases_do(serving); /* there are no leases */
    serving->woken = true;
    pthread_cond_signal(&serving->wake);
}

/* Releases the lease of a prompt whose client will not learn of it. Without memory the lease stays
 * until it expires, or the client disconnects. */
static void item_release(struct cox_serving *serving, const struct cox_serving_client *client,
                         const struct item *item)
{
    struct release *release = item->result.hold ? calloc(1, sizeof *release) : NULL;
    if (!release)
        return;
    release->owner = client->number;
    release->sequence = item->result.hold->sequence;
    release_put(serving, release);
}

/* Returns whether a prompt could be given to the engine loop now. */
static bool is_hungry(const struct cox_serving *serving)
{
    return serving->status.waiting && serving->status.running < serving->running_max;
}

/* Copies numbers for status calls. */
static void look(struct cox_serving *serving)
{
    holds_copy(serving);
    serving->status.free_blocks = cox_scheduler_free_blocks(serving->scheduler);
}

static bool on_feed(void *context, bool idle, uint64_t until_ns)
{
    struct cox_serving *serving = context;
    const struct timespec until = cox_deadline_timespec(until_ns);
    int r = 0;
    pthread_mutex_lock(&serving->lock);
    look(serving);
    /* All work is done between two steps, including what arrives during this wait. */
    while (idle && !serving->stopped && !is_hungry(serving) && !serving->woken &&
           !serving->cancelled && !has_news(serving) && r != ETIMEDOUT)
        r = until_ns == COX_DEADLINE_NEVER
                ? pthread_cond_wait(&serving->wake, &serving->lock)
                : pthread_cond_timedwait(&serving->wake, &serving->lock, &until);
    serving->woken = false;
    for (struct item *item = serving->cancelled ? serving->running : NULL; item; item = item->next)
        if (!item->client)
            cox_scheduler_cancel(serving->scheduler, item);
    serving->cancelled = false;
    releases_do(serving);
    look(serving);
    while (!serving->stopped && serving->status.running < serving->running_max) {
        struct item *item = next_item(serving);
        if (!item)
            break;
        give(serving, item);
    }
    bool go_on = !serving->stopped;
    pthread_mutex_unlock(&serving->lock);
    return go_on;
}

/* ---- the thread ---- */

static void fail_waiting(struct cox_serving *serving, const struct cox_error *error)
{
    struct item *item;
    pthread_mutex_lock(&serving->lock);
    if (serving->cause.code)
        error = &serving->cause;
    while ((item = next_item(serving))) {
        item_fail(item, error->code, error->text);
        item_hand_over(serving, item);
    }
    pthread_mutex_unlock(&serving->lock);
}

/* No engine loop will run the switch, so replace fails with this error. */
static void news_fail(struct cox_serving *serving, const struct cox_error *error)
{
    struct cox_shared_weights *weights = serving->options.scheduler.weights;
    if (weights)
        cox_shared_weights_give_up(weights, error->code, error->text);
}

/* Runs one engine loop until it ends. */
static void serve(struct cox_serving *serving)
{
    struct cox_error error = {0};
    struct cox_scheduler *scheduler;
    serving->options.scheduler.last_id = serving->last_id;
    int r = cox_scheduler_new(serving->executor, &serving->options.scheduler, &scheduler, &error);
    if (r) {
        fail_waiting(serving, &error);
        news_fail(serving, &error);
        return;
    }
    pthread_mutex_lock(&serving->lock);
    serving->scheduler = scheduler;
    if (serving->stopped)
        cox_scheduler_stop(scheduler);
    pthread_mutex_unlock(&serving->lock);
    r = cox_scheduler_run(scheduler, &error);
    pthread_mutex_lock(&serving->lock);
    serving->last_id = cox_scheduler_last_id(scheduler);
    serving->scheduler = NULL;
    holds_clear(serving);
    bool stopped = serving->stopped;
    pthread_mutex_unlock(&serving->lock);
    cox_scheduler_free(scheduler);
    if (r)
        news_fail(serving, &error);
    if (r && !stopped)
        cox_log_write(&serving->options.scheduler.log, 4,
                      "all prompts that were running have failed: %s", error.text);
}

static void *serving_main(void *context)
{
    struct cox_serving *serving = context;
    for (;;) {
        pthread_mutex_lock(&serving->lock);
        while (!serving->stopped && !serving->status.waiting && !has_news(serving))
            pthread_cond_wait(&serving->wake, &serving->lock);
        bool stopped = serving->stopped;
        pthread_mutex_unlock(&serving->lock);
        if (stopped)
            break;
        serve(serving);
    }
    const struct cox_error closed = {.code = COX_CLOSED, .text = "stopped"};
    fail_waiting(serving, &closed);
    return NULL;
}

/* ---- constructor and destructor ---- */

int cox_serving_start(struct cox_executor *executor, const struct cox_serving_options *options,
                      struct cox_serving **ret_serving, struct cox_error *err)
{
    struct cox_serving *serving = calloc(1, sizeof *serving);
    if (!serving)
        return cox_fail(err, -ENOMEM, "no memory for the clients' scheduler");
    serving->executor = executor;
    serving->options = *options;
    struct cox_scheduler_options *scheduler = &serving->options.scheduler;
    if (!scheduler->sequence_count_max)
        scheduler->sequence_count_max = SEQUENCE_COUNT_DEFAULT;
    scheduler->done = on_done;
    scheduler->done_context = serving;
    scheduler->feed = on_feed;
    scheduler->feed_context = serving;
    scheduler->pulled = on_pulled;
    scheduler->pulled_context = serving;
    serving->running_max = scheduler->sequence_count_max * AHEAD_FACTOR;
    serving->status.block_count = serving->status.free_blocks = scheduler->block_count;
    pthread_mutex_init(&serving->lock, NULL);
    cox_condition_init(&serving->wake);
    const struct cox_transfers_options transfer = {
        .log = scheduler->log, .wake = on_transfer_news, .wake_context = serving};
    int r = options->name ? cox_transfers_new(executor, &transfer, &serving->transfer, err) : 0;
    if (r) {
        serving->joined = true;
        cox_serving_free(serving);
        return r;
    }
    scheduler->transfer = serving->transfer;
    if (options->name)
        scheduler->hold_count_max = HOLD_COUNT_MAX;
#if COX_TESTING
    /* Lets a test fill all leases with few prompts. */
    const char *holds = getenv("COXSWAIN_TEST_HOLDS");
    if (holds)
        scheduler->hold_count_max = (uint32_t)atoi(holds);
#endif
    r = cox_thread_start(&serving->thread, serving_main, serving);
    if (r) {
        serving->joined = true;
        cox_serving_free(serving);
        return cox_fail(err, r, "starting a thread: %s", cox_status_text(r));
    }
    if (scheduler->weights)
        cox_shared_weights_on_next(scheduler->weights, on_weights, serving);
    *ret_serving = serving;
    return 0;
}

void cox_serving_stop(struct cox_serving *serving, const struct cox_error *cause)
{
    pthread_mutex_lock(&serving->lock);
    if (!serving->stopped && cause)
        serving->cause = *cause;
    serving->stopped = true;
    if (serving->scheduler)
        cox_scheduler_stop(serving->scheduler);
    pthread_cond_signal(&serving->wake);
    pthread_mutex_unlock(&serving->lock);
    if (!serving->joined && serving->options.scheduler.weights)
        cox_shared_weights_on_next(serving->options.scheduler.weights, NULL, NULL);
    if (!serving->joined)
        pthread_join(serving->thread, NULL);
    serving->joined = true;
    /* The executor may be freed after this. */
    pthread_mutex_lock(&serving->lock);
    struct cox_transfers *transfer = cox_steal_ptr(&serving->transfer);
    if (transfer)
        cox_transfers_status(transfer, &serving->status.transfer);
    pthread_mutex_unlock(&serving->lock);
    cox_transfers_free(transfer);
}

struct cox_serving *cox_serving_free(struct cox_serving *serving)
{
    if (serving) {
        cox_serving_stop(serving, NULL);
        COX_ASSERT(!serving->clients);
        releases_do(serving);
        holds_clear(serving);
        pthread_cond_destroy(&serving->wake);
        pthread_mutex_destroy(&serving->lock);
        free(serving);
    }
    return NULL;
}

void cox_serving_freep(struct cox_serving **serving)
{
    cox_serving_free(*serving);
}

void cox_serving_status(struct cox_serving *serving, struct cox_prompts_status *ret_status)
{
    pthread_mutex_lock(&serving->lock);
    *ret_status = serving->status;
    ret_status->prompt_count_max = COX_SERVING_PROMPT_COUNT_MAX;
    if (serving->transfer)
        cox_transfers_status(serving->transfer, &ret_status->transfer);
    pthread_mutex_unlock(&serving->lock);
}

int cox_serving_find_hold(struct cox_serving *serving, int64_t sequence,
                          struct cox_kv_reference **ret_source, struct cox_error *err)
{
    const struct cox_kv_reference *found = NULL;
    pthread_mutex_lock(&serving->lock);
    for (size_t i = 0; i < serving->hold_count && !found; i++)
        if (serving->holds[i]->sequence == sequence)
            found = serving->holds[i];
    struct cox_kv_reference *copy = found ? cox_kv_reference_dup(found) : NULL;
    pthread_mutex_unlock(&serving->lock);
    if (!found)
        return cox_fail(
            err, COX_NOT_FOUND,
            "the group '%s' holds no sequence %" PRId64
            ": it never did, or it was released, its lease has ended, or ranks were replaced",
            serving->options.name ? serving->options.name : "", sequence);
    if (!copy)
        return cox_fail(err, -ENOMEM, "no memory");
    *ret_source = copy;
    return 0;
}

/* ---- clients ---- */

int cox_serving_client_new(struct cox_serving *serving, int wake_fd,
                           struct cox_serving_client **ret_client)
{
    struct cox_serving_client *client = calloc(1, sizeof *client);
    if (client)
        client->last_release = calloc(1, sizeof *client->last_release);
    if (!client || !client->last_release) {
        free(client);
        return -ENOMEM;
    }
    client->serving = serving;
    client->wake_fd = wake_fd;
    queue_init(&client->inbox);
    queue_init(&client->done);
    pthread_mutex_lock(&serving->lock);
    client->number = ++serving->client_number;
    client->next = serving->clients;
    serving->clients = client;
    serving->status.client_count++;
    pthread_mutex_unlock(&serving->lock);
    *ret_client = client;
    return 0;
}

struct cox_serving_client *cox_serving_client_free(struct cox_serving_client *client)
{
    if (!client)
        return NULL;
    struct cox_serving *serving = client->serving;
    cox_serving_cancel(client);
    pthread_mutex_lock(&serving->lock);
    struct cox_serving_client **link = &serving->clients;
    while (*link != client)
        link = &(*link)->next;
    *link = client->next;
    if (serving->turn == client)
        serving->turn = client->next;
    serving->status.client_count--;
    client->last_release->owner = client->number;
    release_put(serving, client->last_release);
    pthread_mutex_unlock(&serving->lock);
    free(client);
    return NULL;
}

/* The item's request uses its own copy of the name. */
static int item_take_lora(const struct cox_serving *serving, struct item *item,
                          struct cox_error *err)
{
    const char *name = item->request.lora;
    item->request.lora = NULL;
    if (!name)
        return 0;
    if (!serving->options.lora)
        return cox_fail(err, COX_UNSUPPORTED, "this group has no LoRA adapters");
    char *copy = strdup(name);
    if (!copy)
        return cox_fail(err, -ENOMEM, "no memory for the prompt");
    int r = cox_lora_take(serving->options.lora, copy, err);
    if (r)
        free(copy);
    else
        item->request.lora = item->lora = copy;
    return r;
}

/* Checks for what would make the ranks refuse a whole step. */
static int request_check(const struct cox_serving *serving,
                         const struct cox_prompt_request *request, struct cox_error *err)
{
    uint32_t vocab_size = serving->options.vocab_size;
    if ((request->source || request->hold_ms) && !serving->options.name)
        return cox_fail(err, COX_UNSUPPORTED, "this group takes no part in transfers");
    /* Checked before the copy: the block count of a waiting request is the client's number. */
    if (request->source && request->source->block_count > serving->options.scheduler.block_count)
        return cox_fail(err, COX_INVALID, "%" PRIu32 " blocks are to be pulled: here are %" PRIu32,
                        request->source->block_count, serving->options.scheduler.block_count);
    for (uint32_t i = 0; !request->pull_only && i < request->token_count; i++)
        if (request->tokens[i] < 0 || (vocab_size && (uint32_t)request->tokens[i] >= vocab_size))
            return cox_fail(err, COX_INVALID,
                            "token %" PRIu32 " of the prompt is %" PRId32
                            ": expected a number from 0 to %" PRIu32,
                            i, request->tokens[i], vocab_size ? vocab_size - 1 : INT32_MAX);
    return 0;
}

static int item_new(const struct cox_serving *serving, const struct cox_prompt_request *request,
                    uint64_t index, struct item **ret_item)
{
    struct item *item = calloc(1, sizeof *item);
    if (!item)
        return -ENOMEM;
    item->request = *request;
    item->request.context = item;
    item->token_count = request->token_count;
    item->result.index = index;
    item->tokens = calloc((size_t)request->token_count + 1, sizeof *item->tokens);
    if (!item->tokens) {
        free(item);
        return -ENOMEM;
    }
    if (request->token_count)
        memcpy(item->tokens, request->tokens, request->token_count * sizeof *item->tokens);
    item->request.tokens = item->tokens;
    item->source = request->source ? cox_kv_reference_dup(request->source) : NULL;
    if (request->source && !item->source) {
        item_free(serving, item);
        return -ENOMEM;
    }
    item->request.source = item->source;
    *ret_item = item;
    return 0;
}

int cox_serving_submit(struct cox_serving_client *client, const struct cox_prompt_request *request,
                       uint64_t index)
{
    struct cox_serving *serving = client->serving;
    /* Only this thread adds prompts to the client. */
    if (cox_serving_outstanding(client) >= COX_SERVING_PROMPT_COUNT_MAX ||
        (client->token_count &&
         client->token_count + request->token_count > COX_SERVING_TOKEN_COUNT_MAX))
        return COX_FULL;
    struct item *item;
    struct cox_error error = {0};
    struct cox_prompt_request checked = *request;
    int r = request_check(serving, request, &error);
    if (r)
        checked.source = NULL; /* this copy is only for the error */
    const int made = item_new(serving, &checked, index, &item);
    if (made)
        return made;
    item->client = client;
    item->request.owner = client->number;
    if (!r)
        r = item_take_lora(serving, item, &error);
    pthread_mutex_lock(&serving->lock);
    client->outstanding++;
    client->token_count += item->token_count;
    if (!r && serving->stopped)
        r = serving->cause.code ? cox_fail(&error, serving->cause.code, "%s", serving->cause.text)
                                : cox_fail(&error, COX_CLOSED, "stopped");
    if (r) {
        item_fail(item, r, error.text);
        item_hand_over(serving, item);
    } else {
        queue_append(&client->inbox, item);
        serving->status.waiting++;
        pthread_cond_signal(&serving->wake);
    }
    pthread_mutex_unlock(&serving->lock);
    return 0;
}

int cox_serving_take(struct cox_serving_client *client, struct cox_prompt_output *ret_result)
{
    struct cox_serving *serving = client->serving;
    pthread_mutex_lock(&serving->lock);
    struct item *item = queue_pop(&client->done);
    if (item && !item->result.is_pulled) {
        serving->status.unread--;
        client->outstanding--;
        client->token_count -= item->token_count;
    }
    pthread_mutex_unlock(&serving->lock);
    if (!item)
        return COX_EMPTY;
    *ret_result = item->result;
    item->result = (struct cox_prompt_output){0};
    item_free(serving, item);
    return 0;
}

uint32_t cox_serving_outstanding(struct cox_serving_client *client)
{
    pthread_mutex_lock(&client->serving->lock);
    uint32_t outstanding = client->outstanding;
    pthread_mutex_unlock(&client->serving->lock);
    return outstanding;
}

void cox_serving_cancel(struct cox_serving_client *client)
{
    struct cox_serving *serving = client->serving;
    struct item *item;
    pthread_mutex_lock(&serving->lock);
    while ((item = queue_pop(&client->inbox))) {
        serving->status.waiting--;
        serving->status.cancelled++;
        item_free(serving, item);
    }
    while ((item = queue_pop(&client->done))) {
        serving->status.unread -= !item->result.is_pulled;
        item_release(serving, client, item);
        item_free(serving, item);
    }
    for (item = serving->running; item; item = item->next)
        if (item->client == client) {
            item->client = NULL;
            serving->cancelled = true;
            pthread_cond_signal(&serving->wake);
        }
    client->outstanding = 0;
    client->token_count = 0;
    pthread_mutex_unlock(&serving->lock);
}

int cox_serving_release(struct cox_serving_client *client, int64_t sequence)
{
    struct cox_serving *serving = client->serving;
    struct release *release = calloc(1, sizeof *release);
    if (!release)
        return -ENOMEM;
    release->owner = client->number;
    release->sequence = sequence;
    pthread_mutex_lock(&serving->lock);
    const bool room = client->release_count < RELEASE_COUNT_MAX;
    if (room) {
        client->release_count++;
        release_put(serving, release);
    }
    pthread_mutex_unlock(&serving->lock);
    if (!room)
        free(release);
    return room ? 0 : COX_FULL;
}
