#include "prompt_queue.h"

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
    struct cox_prompt_queue_client *client;
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

struct item_list {
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

struct cox_prompt_queue_client {
    struct cox_prompt_queue *queue;
    /* unique for ever */
    uint64_t number;
    /* releases all its leases; queued when the client disconnects */
    struct release *last_release;
    struct cox_prompt_queue_client *next;
    int wake_fd;
    struct item_list inbox, done;
    uint32_t outstanding;
    /* of the outstanding prompts */
    uint64_t token_count;
    /* queued releases since the list was last processed */
    uint32_t release_count;
};

struct cox_prompt_queue {
    struct cox_executor *executor;
    struct cox_prompt_queue_options options;
    uint32_t running_max;
    pthread_t thread;
    bool joined;

    /* protects everything below */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    bool stopped;
    struct cox_error cause;
    /* while its run runs */
    struct cox_engine_loop *engine_loop;
    struct cox_prompt_queue_client *clients;
    /* the client whose prompt is next; NULL: the first one */
    struct cox_prompt_queue_client *turn;
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
    /* of the previous engine loops; the ids on the queue's thread alone */
    int64_t last_id;
    int64_t *unreported_ids;
    uint32_t unreported_count;
    /* copies of the leases, for other threads */
    struct cox_kv_reference **holds;
    size_t hold_count;
    /* of the engine loop, when they were copied */
    uint64_t hold_changes;
    struct cox_prompts_status status;
};

static void item_list_init(struct item_list *list)
{
    *list = (struct item_list){.end = &list->first};
}

static void item_list_append(struct item_list *list, struct item *item)
{
    item->next = NULL;
    *list->end = item;
    list->end = &item->next;
}

static struct item *item_list_pop(struct item_list *list)
{
    struct item *item = list->first;
    if (item) {
        list->first = item->next;
        if (!list->first)
            list->end = &list->first;
        item->next = NULL;
    }
    return item;
}

/* Nothing of the prompt is computed any more, except perhaps a row in flight. For that, the ranks
 * keep the adapter until they learn that the sequence has ended. */
static void item_give_lora(const struct cox_prompt_queue *queue, struct item *item)
{
    if (item->lora)
        cox_lora_give(queue->options.lora, item->lora);
    free(item->lora);
    item->lora = NULL;
}

static void item_free(const struct cox_prompt_queue *queue, struct item *item)
{
    item_give_lora(queue, item);
    cox_prompt_output_deinit(&item->result);
    free(item->tokens);
    free(item->source);
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
static struct cox_kv_reference *hold_source(const struct cox_prompt_queue *queue,
                                            const struct cox_kv_lease *hold)
{
    const struct cox_kv_reference source = {
        .cluster_id = queue->options.name,
        .epoch = cox_executor_kv_epoch(queue->executor, cox_engine_loop_epoch(queue->engine_loop)),
        .sequence = hold->id,
        .lease_ns = hold->lease_ns,
        .blocks = hold->blocks,
        .block_count = hold->block_count,
    };
    return cox_kv_reference_dup(&source);
}

static void item_fill(const struct cox_prompt_queue *queue, struct item *item,
                      const struct cox_sequence *sequence)
{
    item->result.recomputed = sequence->recomputed;
    if (sequence->report) {
        item->result.report = sequence->report;
        ((struct cox_sequence *)(uintptr_t)sequence)->report =
            NULL; /* the engine loop only frees it */
    }
    if (sequence->finish == COX_FINISH_ERROR) {
        bool has_cause = sequence->error.code == COX_CLOSED && queue->cause.code;
        const struct cox_error *error = has_cause ? &queue->cause : &sequence->error;
        item_fail(item, error->code, error->text);
        return;
    }
    item->result.finish = sequence->finish;
    uint32_t count = sequence->token_count - sequence->prompt_count;
    item->result.tokens = calloc((size_t)count + 1, sizeof *item->result.tokens);
    if (!item->result.tokens) {
        item_fail(item, -ENOMEM, "no memory for the reply");
        return;
    }
    memcpy(item->result.tokens, sequence->tokens + sequence->prompt_count,
           count * sizeof *item->result.tokens);
    item->result.token_count = count;
    if (!sequence->hold)
        return;
    item->result.hold = hold_source(queue, sequence->hold);
    if (!item->result.hold)
        item_fail(item, -ENOMEM, "no memory for the reply");
}

static void client_wake(const struct cox_prompt_queue_client *client)
{
    const uint64_t one = 1;
    while (write(client->wake_fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

static void item_hand_over(struct cox_prompt_queue *queue, struct item *item)
{
    item_give_lora(queue, item);
    queue->status.completed++;
    queue->status.unread++;
    queue->status.generated_tokens += item->result.token_count;
    item_list_append(&item->client->done, item);
    client_wake(item->client);
}

/* ---- hooks of the engine loop, on its thread ---- */

static void on_done(void *context, const struct cox_sequence *sequence)
{
    struct cox_prompt_queue *queue = context;
    struct item *item = sequence->request.context;
    pthread_mutex_lock(&queue->lock);
    struct item **link = &queue->running;
    while (*link != item)
        link = &(*link)->next;
    *link = item->next;
    queue->status.running--;
    bool handed = item->client != NULL;
    if (handed) {
        item_fill(queue, item, sequence);
        handed = item->result.hold != NULL;
        item_hand_over(queue, item);
    } else {
        queue->status.cancelled++;
        item_free(queue, item);
    }
    /* No client learns of the lease, so none would release it. */
    if (sequence->hold && !handed)
        cox_engine_loop_release(queue->engine_loop, sequence->request.owner, sequence->id);
    pthread_mutex_unlock(&queue->lock);
}

static void on_pulled(void *context, const struct cox_sequence *sequence,
                      const struct cox_error *error)
{
    struct cox_prompt_queue *queue = context;
    struct item *item = sequence->request.context;
    pthread_mutex_lock(&queue->lock);
    queue->status.recomputed += error && !sequence->request.pull_only;
    /* Without memory the client keeps its lease until the prompt ends. */
    struct item *word = item->client ? calloc(1, sizeof *word) : NULL;
    if (word) {
        word->result.index = item->result.index;
        word->result.is_pulled = true;
        word->result.error = error ? malloc(sizeof *error) : NULL;
        if (word->result.error)
            *word->result.error = *error;
        item_list_append(&item->client->done, word);
        client_wake(item->client);
    }
    pthread_mutex_unlock(&queue->lock);
}

static void on_transfer_news(void *context)
{
    struct cox_prompt_queue *queue = context;
    pthread_mutex_lock(&queue->lock);
    queue->woken = true;
    pthread_cond_signal(&queue->wake);
    pthread_mutex_unlock(&queue->lock);
}

/* The oldest prompt of the next client in turn; NULL: none. */
static struct item *next_item(struct cox_prompt_queue *queue)
{
    struct cox_prompt_queue_client *first = queue->turn ? queue->turn : queue->clients;
    struct cox_prompt_queue_client *client = first;
    while (client) {
        struct cox_prompt_queue_client *after = client->next ? client->next : queue->clients;
        struct item *item = item_list_pop(&client->inbox);
        if (item) {
            queue->turn = after;
            queue->status.waiting--;
            return item;
        }
        client = after == first ? NULL : after;
    }
    return NULL;
}

static void give(struct cox_prompt_queue *queue, struct item *item)
{
    int r = cox_engine_loop_add(queue->engine_loop, &item->request);
    if (r) {
        item_fail(item, r, "no memory for the prompt");
        item_hand_over(queue, item);
        return;
    }
    free(item->tokens); /* the engine loop has a copy */
    item->tokens = NULL;
    free(item->source);
    item->source = NULL;
    item->next = queue->running;
    queue->running = item;
    queue->status.running++;
}

/* With the lock held: the ranks must switch to other weights. */
static bool has_news(const struct cox_prompt_queue *queue)
{
    struct cox_shared_weights *weights = queue->options.engine_loop.weights;
    return weights && cox_shared_weights_pending(weights);
}

static void on_weights(void *context)
{
    struct cox_prompt_queue *queue = context;
    pthread_mutex_lock(&queue->lock);
    pthread_cond_signal(&queue->wake);
    pthread_mutex_unlock(&queue->lock);
}

static void holds_clear(struct cox_prompt_queue *queue)
{
    for (size_t i = 0; i < queue->hold_count; i++)
        free(queue->holds[i]);
    free(queue->holds);
    queue->holds = NULL;
    queue->hold_count = 0;
    queue->status.holds = queue->status.held_blocks = 0;
    queue->hold_changes = 0;
}

/* Copies the leases for other threads. A lease that cannot be copied for lack of memory is reported
 * as absent. */
static void holds_copy(struct cox_prompt_queue *queue)
{
    const struct cox_kv_leases *holds = cox_engine_loop_kv_leases(queue->engine_loop);
    if (holds->changes == queue->hold_changes)
        return;
    holds_clear(queue);
    queue->holds = calloc(holds->count + UINT64_C(1), sizeof *queue->holds);
    for (const struct cox_kv_lease *hold = holds->first; hold && queue->holds; hold = hold->next)
        if ((queue->holds[queue->hold_count] = hold_source(queue, hold)))
            queue->hold_count++;
    queue->status.holds = holds->count;
    queue->status.held_blocks = holds->block_count;
    queue->hold_changes = holds->changes;
}

static void releases_do(struct cox_prompt_queue *queue)
{
    while (queue->releases) {
        struct release *release = queue->releases;
        queue->releases = release->next;
        if (queue->engine_loop)
            cox_engine_loop_release(queue->engine_loop, release->owner, release->sequence);
        free(release);
    }
    for (struct cox_prompt_queue_client *client = queue->clients; client; client = client->next)
        client->release_count = 0;
}

/* Queues the release for the next call between two steps. Takes release. */
static void release_put(struct cox_prompt_queue *queue, struct release *release)
{
    release->next = queue->releases;
    queue->releases = release;
    if (!queue->engine_loop)
        releases_do(queue); /* there are no leases */
    queue->woken = true;
    pthread_cond_signal(&queue->wake);
}

/* Releases the lease of a prompt whose client will not learn of it. Without memory the lease stays
 * until it expires, or the client disconnects. */
static void item_release(struct cox_prompt_queue *queue,
                         const struct cox_prompt_queue_client *client, const struct item *item)
{
    struct release *release = item->result.hold ? calloc(1, sizeof *release) : NULL;
    if (!release)
        return;
    release->owner = client->number;
    release->sequence = item->result.hold->sequence;
    release_put(queue, release);
}

/* Returns whether a prompt could be given to the engine loop now. */
static bool is_hungry(const struct cox_prompt_queue *queue)
{
    return queue->status.waiting && queue->status.running < queue->running_max;
}

/* Copies numbers for status calls. */
static void status_update(struct cox_prompt_queue *queue)
{
    holds_copy(queue);
    queue->status.free_blocks = cox_engine_loop_free_blocks(queue->engine_loop);
}

static bool on_feed(void *context, bool idle, uint64_t until_ns)
{
    struct cox_prompt_queue *queue = context;
    const struct timespec until = cox_deadline_timespec(until_ns);
    int r = 0;
    pthread_mutex_lock(&queue->lock);
    status_update(queue);
    /* All work is done between two steps, including what arrives during this wait. */
    while (idle && !queue->stopped && !is_hungry(queue) && !queue->woken && !queue->cancelled &&
           !has_news(queue) && r != ETIMEDOUT)
        r = until_ns == COX_DEADLINE_NEVER
                ? pthread_cond_wait(&queue->wake, &queue->lock)
                : pthread_cond_timedwait(&queue->wake, &queue->lock, &until);
    queue->woken = false;
    for (struct item *item = queue->cancelled ? queue->running : NULL; item; item = item->next)
        if (!item->client)
            cox_engine_loop_cancel(queue->engine_loop, item);
    queue->cancelled = false;
    releases_do(queue);
    status_update(queue);
    while (!queue->stopped && queue->status.running < queue->running_max) {
        struct item *item = next_item(queue);
        if (!item)
            break;
        give(queue, item);
    }
    bool go_on = !queue->stopped;
    pthread_mutex_unlock(&queue->lock);
    return go_on;
}

/* ---- the thread ---- */

static void fail_waiting(struct cox_prompt_queue *queue, const struct cox_error *error)
{
    struct item *item;
    pthread_mutex_lock(&queue->lock);
    if (queue->cause.code)
        error = &queue->cause;
    while ((item = next_item(queue))) {
        item_fail(item, error->code, error->text);
        item_hand_over(queue, item);
    }
    pthread_mutex_unlock(&queue->lock);
}

/* No engine loop will run the switch, so replace fails with this error. */
static void news_fail(struct cox_prompt_queue *queue, const struct cox_error *error)
{
    struct cox_shared_weights *weights = queue->options.engine_loop.weights;
    if (weights)
        cox_shared_weights_give_up(weights, error->code, error->text);
}

/* Runs one engine loop until it ends. */
static void serve(struct cox_prompt_queue *queue)
{
    struct cox_error error = {0};
    struct cox_engine_loop *engine_loop;
    queue->options.engine_loop.last_id = queue->last_id;
    queue->options.engine_loop.unreported_ids = queue->unreported_ids;
    queue->options.engine_loop.unreported_count = queue->unreported_count;
    int r = cox_engine_loop_new(queue->executor, &queue->options.engine_loop, &engine_loop, &error);
    if (r) {
        fail_waiting(queue, &error);
        news_fail(queue, &error);
        return;
    }
    pthread_mutex_lock(&queue->lock);
    queue->engine_loop = engine_loop;
    if (queue->stopped)
        cox_engine_loop_stop(engine_loop);
    pthread_mutex_unlock(&queue->lock);
    r = cox_engine_loop_run(engine_loop, &error);
    pthread_mutex_lock(&queue->lock);
    queue->last_id = cox_engine_loop_last_id(engine_loop);
    queue->engine_loop = NULL;
    holds_clear(queue);
    bool stopped = queue->stopped;
    pthread_mutex_unlock(&queue->lock);
    free(queue->unreported_ids);
    queue->unreported_ids = cox_engine_loop_take_unreported(engine_loop, &queue->unreported_count);
    cox_engine_loop_free(engine_loop);
    if (r)
        news_fail(queue, &error);
    if (r && !stopped)
        cox_log_write(&queue->options.engine_loop.log, 4, "all running prompts have failed: %s",
                      error.text);
}

static void *prompt_queue_main(void *context)
{
    struct cox_prompt_queue *queue = context;
    for (;;) {
        pthread_mutex_lock(&queue->lock);
        while (!queue->stopped && !queue->status.waiting && !has_news(queue))
            pthread_cond_wait(&queue->wake, &queue->lock);
        bool stopped = queue->stopped;
        pthread_mutex_unlock(&queue->lock);
        if (stopped)
            break;
        serve(queue);
    }
    const struct cox_error closed = {.code = COX_CLOSED, .text = "stopped"};
    fail_waiting(queue, &closed);
    return NULL;
}

/* ---- constructor and destructor ---- */

int cox_prompt_queue_start(struct cox_executor *executor,
                           const struct cox_prompt_queue_options *options,
                           struct cox_prompt_queue **ret_queue, struct cox_error *err)
{
    struct cox_prompt_queue *queue = calloc(1, sizeof *queue);
    if (!queue)
        return cox_fail(err, -ENOMEM, "no memory for the clients' engine loop");
    queue->executor = executor;
    queue->options = *options;
    struct cox_engine_loop_options *engine_loop = &queue->options.engine_loop;
    if (!engine_loop->sequence_count_max)
        engine_loop->sequence_count_max = SEQUENCE_COUNT_DEFAULT;
    engine_loop->done = on_done;
    engine_loop->done_context = queue;
    engine_loop->feed = on_feed;
    engine_loop->feed_context = queue;
    engine_loop->pulled = on_pulled;
    engine_loop->pulled_context = queue;
    queue->running_max = engine_loop->sequence_count_max * AHEAD_FACTOR;
    queue->status.block_count = queue->status.free_blocks = engine_loop->block_count;
    pthread_mutex_init(&queue->lock, NULL);
    cox_condition_init(&queue->wake);
    const struct cox_transfers_options transfer = {.wake = on_transfer_news, .wake_context = queue};
    int r = options->name ? cox_transfers_new(executor, &transfer, &queue->transfer, err) : 0;
    if (r) {
        queue->joined = true;
        cox_prompt_queue_free(queue);
        return r;
    }
    engine_loop->transfer = queue->transfer;
    if (options->name)
        engine_loop->hold_count_max = HOLD_COUNT_MAX;
#if COX_TESTING
    /* Lets a test fill all leases with few prompts. */
    const char *holds = getenv("COXSWAIN_TEST_HOLDS");
    if (holds)
        engine_loop->hold_count_max = (uint32_t)atoi(holds);
#endif
    r = cox_thread_start(&queue->thread, prompt_queue_main, queue);
    if (r) {
        queue->joined = true;
        cox_prompt_queue_free(queue);
        return cox_fail(err, r, "starting a thread: %s", cox_status_text(r));
    }
    if (engine_loop->weights)
        cox_shared_weights_on_next(engine_loop->weights, on_weights, queue);
    *ret_queue = queue;
    return 0;
}

void cox_prompt_queue_stop(struct cox_prompt_queue *queue, const struct cox_error *cause)
{
    pthread_mutex_lock(&queue->lock);
    if (!queue->stopped && cause)
        queue->cause = *cause;
    queue->stopped = true;
    if (queue->engine_loop)
        cox_engine_loop_stop(queue->engine_loop);
    pthread_cond_signal(&queue->wake);
    pthread_mutex_unlock(&queue->lock);
    if (!queue->joined && queue->options.engine_loop.weights)
        cox_shared_weights_on_next(queue->options.engine_loop.weights, NULL, NULL);
    if (!queue->joined)
        pthread_join(queue->thread, NULL);
    queue->joined = true;
    /* The executor may be freed after this. */
    pthread_mutex_lock(&queue->lock);
    struct cox_transfers *transfer = cox_steal_ptr(&queue->transfer);
    if (transfer)
        cox_transfers_status(transfer, &queue->status.transfer);
    pthread_mutex_unlock(&queue->lock);
    cox_transfers_free(transfer);
}

struct cox_prompt_queue *cox_prompt_queue_free(struct cox_prompt_queue *queue)
{
    if (queue) {
        cox_prompt_queue_stop(queue, NULL);
        COX_ASSERT(!queue->clients);
        releases_do(queue);
        holds_clear(queue);
        free(queue->unreported_ids);
        pthread_cond_destroy(&queue->wake);
        pthread_mutex_destroy(&queue->lock);
        free(queue);
    }
    return NULL;
}

void cox_prompt_queue_status(struct cox_prompt_queue *queue, struct cox_prompts_status *ret_status)
{
    pthread_mutex_lock(&queue->lock);
    *ret_status = queue->status;
    ret_status->prompt_count_max = COX_PROMPT_QUEUE_PROMPT_COUNT_MAX;
    ret_status->text_digest = queue->options.text_digest;
    if (queue->transfer)
        cox_transfers_status(queue->transfer, &ret_status->transfer);
    pthread_mutex_unlock(&queue->lock);
}

int cox_prompt_queue_find_hold(struct cox_prompt_queue *queue, int64_t sequence,
                               struct cox_kv_reference **ret_source, struct cox_error *err)
{
    const struct cox_kv_reference *found = NULL;
    pthread_mutex_lock(&queue->lock);
    for (size_t i = 0; i < queue->hold_count && !found; i++)
        if (queue->holds[i]->sequence == sequence)
            found = queue->holds[i];
    struct cox_kv_reference *copy = found ? cox_kv_reference_dup(found) : NULL;
    pthread_mutex_unlock(&queue->lock);
    if (!found)
        return cox_fail(
            err, COX_NOT_FOUND,
            "the group '%s' has no KV lease of sequence %" PRId64
            ": there was none, or it was released or has expired, or ranks were replaced",
            queue->options.name ? queue->options.name : "", sequence);
    if (!copy)
        return cox_fail(err, -ENOMEM, "no memory");
    *ret_source = copy;
    return 0;
}

/* ---- clients ---- */

int cox_prompt_queue_client_new(struct cox_prompt_queue *queue, int wake_fd,
                                struct cox_prompt_queue_client **ret_client)
{
    struct cox_prompt_queue_client *client = calloc(1, sizeof *client);
    if (client)
        client->last_release = calloc(1, sizeof *client->last_release);
    if (!client || !client->last_release) {
        free(client);
        return -ENOMEM;
    }
    client->queue = queue;
    client->wake_fd = wake_fd;
    item_list_init(&client->inbox);
    item_list_init(&client->done);
    pthread_mutex_lock(&queue->lock);
    client->number = ++queue->client_number;
    client->next = queue->clients;
    queue->clients = client;
    queue->status.client_count++;
    pthread_mutex_unlock(&queue->lock);
    *ret_client = client;
    return 0;
}

struct cox_prompt_queue_client *cox_prompt_queue_client_free(struct cox_prompt_queue_client *client)
{
    if (!client)
        return NULL;
    struct cox_prompt_queue *queue = client->queue;
    cox_prompt_queue_cancel(client);
    pthread_mutex_lock(&queue->lock);
    struct cox_prompt_queue_client **link = &queue->clients;
    while (*link != client)
        link = &(*link)->next;
    *link = client->next;
    if (queue->turn == client)
        queue->turn = client->next;
    queue->status.client_count--;
    client->last_release->owner = client->number;
    release_put(queue, client->last_release);
    pthread_mutex_unlock(&queue->lock);
    free(client);
    return NULL;
}

/* The item's request uses its own copy of the name. */
static int item_take_lora(const struct cox_prompt_queue *queue, struct item *item,
                          struct cox_error *err)
{
    const char *name = item->request.lora;
    item->request.lora = NULL;
    if (!name)
        return 0;
    if (!queue->options.lora)
        return cox_fail(err, COX_UNSUPPORTED, "this group has no LoRA adapters");
    char *copy = strdup(name);
    if (!copy)
        return cox_fail(err, -ENOMEM, "no memory for the prompt");
    int r = cox_lora_take(queue->options.lora, copy, err);
    if (r)
        free(copy);
    else
        item->request.lora = item->lora = copy;
    return r;
}

/* Checks for what would make the ranks refuse a whole step. */
static int request_check(const struct cox_prompt_queue *queue,
                         const struct cox_prompt_request *request, struct cox_error *err)
{
    uint32_t vocab_size = queue->options.vocab_size;
    if ((request->source || request->hold_ms) && !queue->options.name)
        return cox_fail(err, COX_UNSUPPORTED, "this group takes no part in transfers");
    /* Checked before the copy: the block count of a waiting request is the client's number. */
    if (request->source && request->source->block_count > queue->options.engine_loop.block_count)
        return cox_fail(err, COX_INVALID, "%" PRIu32 " blocks are to be pulled: here are %" PRIu32,
                        request->source->block_count, queue->options.engine_loop.block_count);
    if (request->token_count > COX_PROMPT_QUEUE_TOKEN_COUNT_MAX)
        return cox_fail(err, COX_TOO_LARGE, "the prompt has %" PRIu32 " tokens: at most %" PRIu32,
                        request->token_count, COX_PROMPT_QUEUE_TOKEN_COUNT_MAX);
    for (uint32_t i = 0; !request->pull_only && i < request->token_count; i++)
        if (request->tokens[i] < 0 || (vocab_size && (uint32_t)request->tokens[i] >= vocab_size))
            return cox_fail(err, COX_INVALID,
                            "token %" PRIu32 " of the prompt is %" PRId32
                            ": expected a number from 0 to %" PRIu32,
                            i, request->tokens[i], vocab_size ? vocab_size - 1 : INT32_MAX);
    return 0;
}

static int item_new(const struct cox_prompt_queue *queue, const struct cox_prompt_request *request,
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
        item_free(queue, item);
        return -ENOMEM;
    }
    item->request.source = item->source;
    *ret_item = item;
    return 0;
}

int cox_prompt_queue_submit(struct cox_prompt_queue_client *client,
                            const struct cox_prompt_request *request, uint64_t index)
{
    struct cox_prompt_queue *queue = client->queue;
    /* Only this thread adds prompts to the client. */
    if (cox_prompt_queue_outstanding(client) >= COX_PROMPT_QUEUE_PROMPT_COUNT_MAX ||
        (client->token_count &&
         client->token_count + request->token_count > COX_PROMPT_QUEUE_TOKEN_COUNT_MAX))
        return COX_FULL;
    struct item *item;
    struct cox_error error = {0};
    struct cox_prompt_request checked = *request;
    int r = request_check(queue, request, &error);
    if (r) { /* this copy is only for the error */
        checked.source = NULL;
        checked.token_count = 0;
    }
    const int made = item_new(queue, &checked, index, &item);
    if (made)
        return made;
    item->client = client;
    item->request.owner = client->number;
    if (!r)
        r = item_take_lora(queue, item, &error);
    pthread_mutex_lock(&queue->lock);
    client->outstanding++;
    client->token_count += item->token_count;
    if (!r && queue->stopped)
        r = queue->cause.code ? cox_fail(&error, queue->cause.code, "%s", queue->cause.text)
                              : cox_fail(&error, COX_CLOSED, "stopped");
    if (r) {
        item_fail(item, r, error.text);
        item_hand_over(queue, item);
    } else {
        item_list_append(&client->inbox, item);
        queue->status.waiting++;
        pthread_cond_signal(&queue->wake);
    }
    pthread_mutex_unlock(&queue->lock);
    return 0;
}

int cox_prompt_queue_take(struct cox_prompt_queue_client *client,
                          struct cox_prompt_output *ret_result)
{
    struct cox_prompt_queue *queue = client->queue;
    pthread_mutex_lock(&queue->lock);
    struct item *item = item_list_pop(&client->done);
    if (item && !item->result.is_pulled) {
        queue->status.unread--;
        client->outstanding--;
        client->token_count -= item->token_count;
    }
    pthread_mutex_unlock(&queue->lock);
    if (!item)
        return COX_EMPTY;
    *ret_result = item->result;
    item->result = (struct cox_prompt_output){0};
    item_free(queue, item);
    return 0;
}

uint32_t cox_prompt_queue_outstanding(struct cox_prompt_queue_client *client)
{
    pthread_mutex_lock(&client->queue->lock);
    uint32_t outstanding = client->outstanding;
    pthread_mutex_unlock(&client->queue->lock);
    return outstanding;
}

void cox_prompt_queue_cancel(struct cox_prompt_queue_client *client)
{
    struct cox_prompt_queue *queue = client->queue;
    struct item *item;
    pthread_mutex_lock(&queue->lock);
    while ((item = item_list_pop(&client->inbox))) {
        queue->status.waiting--;
        queue->status.cancelled++;
        item_free(queue, item);
    }
    while ((item = item_list_pop(&client->done))) {
        queue->status.unread -= !item->result.is_pulled;
        item_release(queue, client, item);
        item_free(queue, item);
    }
    for (item = queue->running; item; item = item->next)
        if (item->client == client) {
            item->client = NULL;
            queue->cancelled = true;
            pthread_cond_signal(&queue->wake);
        }
    client->outstanding = 0;
    client->token_count = 0;
    pthread_mutex_unlock(&queue->lock);
}

int cox_prompt_queue_release(struct cox_prompt_queue_client *client, int64_t sequence)
{
    struct cox_prompt_queue *queue = client->queue;
    struct release *release = calloc(1, sizeof *release);
    if (!release)
        return -ENOMEM;
    release->owner = client->number;
    release->sequence = sequence;
    pthread_mutex_lock(&queue->lock);
    const bool room = client->release_count < RELEASE_COUNT_MAX;
    if (room) {
        client->release_count++;
        release_put(queue, release);
    }
    pthread_mutex_unlock(&queue->lock);
    if (!room)
        free(release);
    return room ? 0 : COX_FULL;
}
