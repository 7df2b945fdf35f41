#include "shared_weights.h"

#include "../../channel/fault.h"
#include "../../channel/memory/queue.h"
#include "model/block.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* PRESENT, NEXT, and what ranks have not let go of yet: of the version before, and of one withdrawn. */
#define BLOCK_COUNT 4u
#define QUEUE_DEPTH 8u
/* Rows of the pool: this process, the ranks, and those that come in the place of dead ones before these are swept. */
#define OWNER_COUNT (2u * COX_RANK_COUNT_MAX + 2u)

struct version {
    uint64_t number; /* 0: there is none */
    struct cox_block_ref ref;
    uint64_t digest;
    uint64_t life; /* of the executor, when it was published; 0: it never was */
};

struct cox_shared_weights {
    struct cox_model_config config; /* of the first version; all have its shapes */
    uint64_t size;                  /* bytes of one version */
    struct cox_pool *pool;
    struct cox_exporter *exporter;
    struct cox_queue *queue;
    struct cox_publisher *publisher;
    struct cox_executor *executor;
    struct cox_handle queue_handle;
    struct cox_pool_handle pool_handle;

    pthread_mutex_t lock; /* everything below */
    pthread_cond_t change;
    struct version present, next;
    uint64_t newest; /* number ever given */
    uint64_t told;   /* number that the last init told */
    bool replacing;  /* somebody loads, or waits */
    bool stopped;
    struct cox_error withdrawn; /* why the last NEXT went; code 0: it did not */

    pthread_mutex_t wake_lock; /* the two below; held while wake runs */
    void (*wake)(void *context);
    void *wake_context;
};

/* ---- blocks ---- */

static int block_load(struct cox_shared_weights *weights, const struct cox_model_config *config,
                      const char *directory, bool (*cancelled)(void *context), void *context,
                      struct version *ret_version, struct cox_error *err)
{
    struct cox_model_block block;
    struct cox_block_ref ref;
    struct cox_error why = {0};
    int r = cox_pool_allocate(weights->pool, weights->size, &ref, &why);
    if (r)
        return cox_fail(err, r, "memory for the %" PRIu64 " bytes of %s: %s", weights->size,
                        directory, why.text);
    void *memory = cox_pool_pointer(weights->pool, &ref);
    r = cox_model_block_fill(config, directory, memory, cancelled, context, err);
    if (!r)
        r = cox_model_block_read(memory, weights->size, &block, err);
    if (r) {
        cox_pool_unref(weights->pool, &ref, NULL);
        return r;
    }
    cox_fault_point(COX_FAULT_WEIGHTS_FILLED);
    *ret_version = (struct version){.ref = ref, .digest = block.digest};
    return 0;
}

/* With the lock held: a number of its own, told to all that have subscribed. */
static int version_publish(struct cox_shared_weights *weights, struct version *version,
                           struct cox_error *err)
{
    struct cox_error why = {0};
    uint64_t message;
    /* Before the message: an init that ends meanwhile makes this life an old one. */
    const uint64_t life = cox_executor_life(weights->executor);
    int r = cox_publisher_publish(weights->publisher, &version->ref, version->ref.size,
                                  weights->newest + 1, &message, &why);
    if (r)
        return cox_fail(err, r, "publishing the model's weights: %s", why.text);
    version->number = ++weights->newest;
    version->life = life;
    cox_fault_point(COX_FAULT_WEIGHTS_PUBLISHED);
    return 0;
}

/* ---- constructor and destructor ---- */

static int pool_make(struct cox_shared_weights *weights, struct cox_error *err)
{
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    weights->size = cox_model_block_size(&weights->config);
    const struct cox_pool_options options = {
        .strategy = COX_POOL_FIXED,
        .block_size = (weights->size + page - 1) / page * page,
        .block_count = BLOCK_COUNT,
        .owner_count_max = OWNER_COUNT,
        .on_demand = true, /* what no version is in takes no memory */
    };
    struct cox_error why = {0};
    int r = cox_pool_create(&options, &weights->pool, &why);
    return r ? cox_fail(err, r, "memory for the model's weights: %s", why.text) : 0;
}

int cox_shared_weights_load(const char *directory, bool (*cancelled)(void *context), void *context,
                            struct cox_shared_weights **ret_weights, struct cox_error *err)
{
    _cox_cleanup_(cox_shared_weights_freep) struct cox_shared_weights *weights =
        calloc(1, sizeof *weights);
    pthread_condattr_t monotonic;
    if (!weights)
        return cox_fail(err, -ENOMEM, "no memory for the model's weights");
    pthread_mutex_init(&weights->lock, NULL);
    pthread_mutex_init(&weights->wake_lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&weights->change, &monotonic);
    pthread_condattr_destroy(&monotonic);
    int r = cox_model_folder_config(directory, &weights->config, err);
    if (!r)
        r = pool_make(weights, err);
    if (!r)
        r = block_load(weights, &weights->config, directory, cancelled, context, &weights->present,
                       err);
    if (r)
        return r;
    weights->present.number = weights->newest = 1;
    *ret_weights = cox_steal_ptr(&weights);
    return 0;
}

struct cox_shared_weights *cox_shared_weights_free(struct cox_shared_weights *weights)
{
    if (!weights)
        return NULL;
    cox_publisher_free(weights->publisher);
    cox_queue_free(weights->queue);
    cox_exporter_free(weights->exporter);
    cox_pool_free(weights->pool); /* with the references that this process has */
    pthread_cond_destroy(&weights->change);
    pthread_mutex_destroy(&weights->wake_lock);
    pthread_mutex_destroy(&weights->lock);
    free(weights);
    return NULL;
}

void cox_shared_weights_freep(struct cox_shared_weights **weights)
{
    cox_shared_weights_free(*weights);
}

static void on_init(void *context, struct cox_weights_told *ret_told)
{
    struct cox_shared_weights *weights = context;
    pthread_mutex_lock(&weights->lock);
    const struct version *newest = weights->next.number ? &weights->next : &weights->present;
    *ret_told = (struct cox_weights_told){
        .queue = weights->queue_handle,
        .pool = weights->pool_handle,
        .ref = newest->ref,
        .version = newest->number,
    };
    weights->told = newest->number;
    pthread_mutex_unlock(&weights->lock);
}

/* Where the door takes nothing, ranks come to the fds by themselves, or not at all. */
static int exporter_make(struct cox_shared_weights *weights, const char *door,
                         struct cox_error *err)
{
    const struct cox_exporter_options with = {.door_path = door}, without = {0};
    return cox_exporter_new(&with, &weights->exporter, NULL) == 0
               ? 0
               : cox_exporter_new(&without, &weights->exporter, err);
}

int cox_shared_weights_publish(struct cox_shared_weights *weights, struct cox_executor *executor,
                               struct cox_error *err)
{
    const struct cox_queue_options queue = {
        .depth = QUEUE_DEPTH,
        .domain_count_max = 1,
        .publisher_count_max = 1,
        .subscriber_count_max = OWNER_COUNT,
        .pool_count_max = 1,
    };
    struct cox_error why = {0};
    weights->executor = executor;
    int r = exporter_make(weights, cox_executor_door(executor), &why);
    if (!r)
        r = cox_pool_export(weights->pool, weights->exporter, true, &weights->pool_handle, &why);
    if (!r)
        r = cox_queue_create(&queue, &weights->queue, &why);
    if (!r)
        r = cox_queue_export(weights->queue, weights->exporter, &weights->queue_handle, &why);
    /* Whoever subscribes has the pool from its init. */
    const struct cox_publisher_options publishing = {.pool = weights->pool};
    if (!r)
        r = cox_publisher_new(weights->queue, &publishing, &weights->publisher, &why);
    if (r)
        return cox_fail(err, r, "publishing the model's weights: %s", why.text);
    cox_executor_tell_weights(executor, on_init, weights);
    return 0;
}

/* ---- replace ---- */

static bool is_stopped(void *context)
{
    struct cox_shared_weights *weights = context;
    pthread_mutex_lock(&weights->lock);
    bool stopped = weights->stopped;
    pthread_mutex_unlock(&weights->lock);
    return stopped;
}

static int replace_enter(struct cox_shared_weights *weights, struct cox_error *err)
{
    pthread_mutex_lock(&weights->lock);
    int r = weights->stopped ? cox_fail(err, COX_CLOSED, "the group ends")
            : weights->replacing || weights->next.number
                ? cox_fail(err, COX_BUSY,
                           "another version of the weights is on its way: try again "
                           "when the ranks have switched to it")
                : 0;
    if (!r)
        weights->replacing = true;
    pthread_mutex_unlock(&weights->lock);
    return r;
}

static int replace_load(struct cox_shared_weights *weights, const char *directory,
                        struct version *ret_version, struct cox_error *err)
{
    struct cox_model_config config;
    struct cox_error why = {0};
    int r = cox_model_folder_config(directory, &config, err);
    if (r)
        return r;
    r = cox_model_config_compare(&weights->config, &config, &why);
    if (r)
        return cox_fail(err, r, "%s: %s", directory, why.text);
    r = block_load(weights, &config, directory, is_stopped, weights, ret_version, err);
    if (r == COX_CORRUPT && err)
        err->code = COX_INVALID; /* the files that were named, and no other process's bytes */
    return r == COX_ABORTED ? COX_CLOSED : r == COX_CORRUPT ? COX_INVALID : r;
}

static void wake_call(struct cox_shared_weights *weights)
{
    pthread_mutex_lock(&weights->wake_lock);
    if (weights->wake)
        weights->wake(weights->wake_context);
    pthread_mutex_unlock(&weights->wake_lock);
}

/* Until number is PRESENT, or it went. */
static int replace_wait(struct cox_shared_weights *weights, uint64_t number, uint64_t deadline_ns,
                        uint64_t *ret_version, struct cox_error *err)
{
    const struct timespec until = cox_deadline_timespec(deadline_ns);
    int r = 0, waited = 0;
    pthread_mutex_lock(&weights->lock);
    while (weights->next.number && !weights->stopped && waited != ETIMEDOUT)
        waited = pthread_cond_timedwait(&weights->change, &weights->lock, &until);
    if (!weights->next.number && weights->withdrawn.code)
        r = cox_fail(err, weights->withdrawn.code,
                     "the ranks go on with the weights that they had: %.900s",
                     weights->withdrawn.text);
    else if (weights->next.number && weights->stopped)
        r = cox_fail(err, COX_CLOSED, "the group ends");
    else if (weights->next.number)
        r = cox_fail(err, COX_TIMEOUT,
                     "no step has ended with version %" PRIu64
                     " in time: the ranks switch to it in the next one",
                     number);
    else
        *ret_version = weights->present.number;
    pthread_mutex_unlock(&weights->lock);
    return r;
}

static void replace_leave(struct cox_shared_weights *weights)
{
    pthread_mutex_lock(&weights->lock);
    weights->replacing = false;
    pthread_mutex_unlock(&weights->lock);
}

int cox_shared_weights_replace(struct cox_shared_weights *weights, const char *directory,
                               uint64_t deadline_ns, uint64_t *ret_version, struct cox_error *err)
{
    struct version version = {0};
    int r = replace_enter(weights, err);
    if (r)
        return r;
    r = replace_load(weights, directory, &version, err);
    if (!r) {
        pthread_mutex_lock(&weights->lock);
        weights->withdrawn = (struct cox_error){0};
        r = version_publish(weights, &version, err);
        if (!r)
            weights->next = version;
        pthread_mutex_unlock(&weights->lock);
        if (r)
            cox_pool_unref(weights->pool, &version.ref, NULL);
    }
    if (!r) {
        wake_call(weights);
        r = replace_wait(weights, version.number, deadline_ns, ret_version, err);
    }
    replace_leave(weights);
    return r;
}

void cox_shared_weights_on_next(struct cox_shared_weights *weights, void (*wake)(void *context),
                                void *context)
{
    pthread_mutex_lock(&weights->wake_lock);
    weights->wake = wake;
    weights->wake_context = context;
    pthread_mutex_unlock(&weights->wake_lock);
}

bool cox_shared_weights_pending(struct cox_shared_weights *weights)
{
    pthread_mutex_lock(&weights->lock);
    bool pending = weights->next.number != 0;
    pthread_mutex_unlock(&weights->lock);
    return pending;
}

void cox_shared_weights_stop(struct cox_shared_weights *weights)
{
    pthread_mutex_lock(&weights->lock);
    weights->stopped = true;
    pthread_cond_broadcast(&weights->change);
    pthread_mutex_unlock(&weights->lock);
}

/* ---- steps ---- */

int cox_shared_weights_step(struct cox_shared_weights *weights, uint64_t life,
                            uint64_t *ret_version, struct cox_error *err)
{
    int r = 0;
    pthread_mutex_lock(&weights->lock);
    struct version *newest = weights->next.number ? &weights->next : &weights->present;
    /* A rank that was started again since it was published may not have heard of it, except from its init. */
    if (newest->life && newest->life < life && newest->number != weights->told)
        r = version_publish(weights, newest, err);
    *ret_version = newest->number;
    pthread_mutex_unlock(&weights->lock);
    return r;
}

void cox_shared_weights_used(struct cox_shared_weights *weights, uint64_t version)
{
    pthread_mutex_lock(&weights->lock);
    if (weights->next.number && version >= weights->next.number) {
        const struct cox_block_ref former = weights->present.ref;
        weights->present = weights->next;
        weights->next = (struct version){0};
        /* Before what ranks hold since is told; and all of it before a replace hears that it has succeeded. */
        cox_executor_renew_kv(weights->executor, weights->present.digest);
        /* The last but for ranks that have died: those give theirs back in sweep. */
        cox_pool_unref(weights->pool, &former, NULL);
        cox_fault_point(COX_FAULT_WEIGHTS_RETIRED);
        cox_queue_sweep(weights->queue);
        cox_pool_sweep(weights->pool);
        pthread_cond_broadcast(&weights->change);
    }
    pthread_mutex_unlock(&weights->lock);
}

/* With the lock held. Ranks that have switched switch back in the next step. */
static void next_withdraw(struct cox_shared_weights *weights, int status, const char *text)
{
    struct cox_error error = {0};
    const struct cox_block_ref withdrawn = weights->next.ref;
    cox_fail(&weights->withdrawn, status, "%s", text);
    weights->next = (struct version){0};
    /* Without a message the ranks that have switched cannot go back, and say so in the next step. */
    if (version_publish(weights, &weights->present, &error))
        weights->present.number = ++weights->newest;
    /* Ranks that had switched have forgotten what other groups could pull. */
    cox_executor_renew_kv(weights->executor, weights->present.digest);
    cox_pool_unref(weights->pool, &withdrawn, NULL);
    pthread_cond_broadcast(&weights->change);
}

void cox_shared_weights_failed(struct cox_shared_weights *weights, uint64_t version, int status,
                               const char *text)
{
    pthread_mutex_lock(&weights->lock);
    /* What else fails is no matter of the weights: the step is repeated with them. */
    if (weights->next.number && version == weights->next.number && status == COX_REJECTED)
        next_withdraw(weights, status, text);
    pthread_mutex_unlock(&weights->lock);
}

void cox_shared_weights_give_up(struct cox_shared_weights *weights, int status, const char *text)
{
    pthread_mutex_lock(&weights->lock);
    if (weights->next.number)
        next_withdraw(weights, status, text);
    pthread_mutex_unlock(&weights->lock);
}

void cox_shared_weights_status(struct cox_shared_weights *weights,
                               struct cox_shared_weights_status *ret_status)
{
    pthread_mutex_lock(&weights->lock);
    *ret_status = (struct cox_shared_weights_status){
        .version = weights->present.number,
        .next = weights->next.number,
        .digest = weights->present.digest,
        .size = weights->size,
    };
    pthread_mutex_unlock(&weights->lock);
    cox_pool_stats(weights->pool, &ret_status->pool);
}
