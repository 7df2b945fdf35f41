#include "engine.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "channel/base/fault.h"
#include <coxswain/handle.h>
#include "adapter_cache.h"
#include "adapter_commands.h"
#include "engine/rank/tensor_gather.h"
#include "engine/model/model_image.h"
#include "engine/rank/weights_subscriber.h"
#include "transfer.h"
#include "engine/compute/model.h"

/* Longest wait for other ranks in an init and in a step; the coordinator cancels either long
 * before. */
#define WAIT_MS (UINT64_C(10) * 60 * 1000)
/* For a pull to end, which checks before each block. */
#define CLEAR_MS 5000
/* For the control socket to send the fd of new weights within a step, which cannot be left
 * meanwhile. */
#define OPEN_MS 5000

/* Inputs of model and cache: with equal inputs they are not built again. */
struct engine_source {
    char directory[sizeof((struct cox_engine_options *)NULL)->model_dir];
    uint32_t block_size, block_count, swap_block_count;
    /* of the share */
    uint32_t rank, rank_count;
};

struct cox_engine {
    /* used where an init has no value */
    struct cox_engine_options given;
    /* of the last init */
    struct cox_engine_options options;
    struct cox_worker *worker;
    /* lends weights to the model; NULL: the model has loaded its own */
    struct cox_weights_subscriber *weights;
    struct cox_model *model;
    struct cox_cache *cache;
    struct cox_adapter_cache *adapters;
    struct cox_transfer *transfer;
    struct cox_exporter *exporter;
    bool exported;
    /* of the cache's blocks, while exported */
    struct cox_handle handle;
    /* of the cache, since the last successful init */
    struct cox_kv_layout layout;
    /* inputs of model and cache, while there is a cache */
    struct engine_source source;
    /* NULL: this rank computes everything */
    struct cox_group *group;
    uint64_t rank_group_incarnation;
    struct cox_tensor_gather *gather;
    /* the last init succeeded, so a step can run */
    bool ready;
    /* of the last init */
    uint64_t init_sequence;
    /* the running one, or NULL */
    const struct cox_init_request *init;
    /* of the running step */
    const struct cox_batch *batch;
    /* lock-free: stored in a signal handler */
    _Atomic bool stopping;
    /* reinit is using cache and model; seq_cst, see engine_enter */
    _Atomic bool rebuilding;
};

static bool pull_cancelled(void *context)
{
    const struct cox_engine *engine = context;

    return atomic_load_explicit(&engine->stopping, memory_order_relaxed) ||
           cox_worker_cancelled(engine->worker, COX_CHANNEL_TRANSFER, 0);
}

int cox_engine_new(const struct cox_engine_options *options, struct cox_engine **ret_engine)
{
    struct cox_engine *engine = calloc(1, sizeof *engine);
    const struct cox_transfer_options transfer = {
        .cancelled = pull_cancelled, .context = engine, .log = options->log};
    int r;

    if (!engine)
        return -ENOMEM;
    engine->given = engine->options = *options;
    r = cox_adapter_cache_new(options->lora_slot_count, &engine->adapters);
    if (r == 0)
        r = cox_transfer_new(&transfer, &engine->transfer);
    if (r) {
        cox_adapter_cache_free(engine->adapters);
        free(engine);
        return r;
    }
    *ret_engine = engine;
    return 0;
}

/* The caller ensures that no pull is running. */
static void engine_drop_cache(struct cox_engine *engine)
{
    if (engine->exported)
        cox_exporter_put(engine->exporter, &engine->handle);
    engine->exported = false;
    engine->cache = cox_cache_free(engine->cache);
}

static void engine_unload(struct cox_engine *engine)
{
    cox_adapter_cache_set_model(engine->adapters, NULL, NULL);
    engine_drop_cache(engine);
    engine->model = cox_model_free(engine->model);
    engine->weights = cox_weights_subscriber_free(engine->weights);
}

struct cox_engine *cox_engine_free(struct cox_engine *engine)
{
    if (!engine)
        return NULL;
    cox_tensor_gather_free(engine->gather);
    engine_unload(engine);
    cox_exporter_free(engine->exporter);
    cox_transfer_free(engine->transfer);
    cox_group_leave(engine->group);
    cox_adapter_cache_free(engine->adapters);
    free(engine);
    return NULL;
}

void cox_engine_serve(struct cox_engine *engine, struct cox_worker *worker)
{
    engine->worker = worker;
}

void cox_engine_stop(struct cox_engine *engine)
{
    /* relaxed; partner: cancelled. The flag carries no other data. */
    atomic_store_explicit(&engine->stopping, true, memory_order_relaxed);
}

/* The group polls it while this rank waits. */
static bool cancelled(void *context)
{
    const struct cox_engine *engine = context;

    return atomic_load_explicit(&engine->stopping, memory_order_relaxed) ||
           (engine->init &&
            cox_worker_cancelled(engine->worker, COX_CHANNEL_EXECUTE, engine->init->sequence)) ||
           (engine->batch && cox_batch_cancelled(engine->batch));
}

static int engine_number(const struct cox_init_request *request, const char *key, uint32_t *value,
                         struct cox_error *err)
{
    const char *text = cox_init_request_get(request, key);
    if (!text)
        return 0;
    char *end;
    errno = 0;
    unsigned long number = strtoul(text, &end, 10);
    if (errno || end == text || *end || number > INT32_MAX)
        return cox_fail(err, COX_INVALID, "init: %s is '%.40s', expected a number", key, text);
    *value = (uint32_t)number;
    return 0;
}

static int engine_numbers(struct cox_engine *engine, const struct cox_init_request *request,
                          struct cox_error *err)
{
    int r = engine_number(request, "block_size", &engine->options.block_size, err);

    if (r == 0)
        r = engine_number(request, "block_count", &engine->options.block_count, err);
    if (r == 0)
        r = engine_number(request, "swap_block_count", &engine->options.swap_block_count, err);
    return r;
}

/* The share of this rank; all zero without a group. */
static struct cox_share engine_share(const struct cox_engine *engine,
                                     const struct cox_group_options *options)
{
    if (options->rank_count == 1)
        return (struct cox_share){0};
    if (options->fd >= 0 || options->sealed)
        return (struct cox_share){.rank = options->rank, .rank_count = options->rank_count};
    cox_log_write(&engine->options.log, 7,
                  "rank %" PRIu32 " of %" PRIu32
                  " computes the whole model: the coordinator provides no group memory",
                  options->rank, options->rank_count);
    return (struct cox_share){0};
}

/* Checks, before this rank waits for others, whether the model can be divided among so many. All
 * ranks get the same result. An unreadable file is no failure here: others may be able to read it,
 * and learn of it once this rank is in step with them. */
static int engine_check_share(const char *directory, const struct cox_share *share,
                              struct cox_error *err)
{
    struct cox_model_config config;

    return cox_model_folder_config(directory, &config, NULL) == 0
               ? cox_share_check(&config, share, err)
               : 0;
}

/* Joins the group of all ranks, which are in the same init. If
 * cox_group_options.incarnation has not changed, it aligns this rank in the group it has joined
 * before. */
static int engine_join(struct cox_engine *engine, const struct cox_group_options *options,
                       struct cox_error *err)
{
    int r = 0;

    if (!engine->group) {
        r = cox_group_join(options, &engine->group, err);
        if (r)
            return cox_fail(err, r, "the group of ranks: %s", cox_status_text(r));
        engine->rank_group_incarnation = options->incarnation;
    }
    r = cox_group_align(engine->group, engine->init_sequence);
    return r ? cox_fail(err, r, "the group of ranks: %s", cox_status_text(r)) : 0;
}

static int engine_gather(void *context, float *slices, size_t stride, size_t slice_length,
                         const float **ret_slices, struct cox_error *err)
{
    struct cox_engine *engine = context;

    return cox_tensor_gather_all(engine->gather, slices, stride, slice_length, ret_slices, err);
}

static int engine_blame(void *context, const float *const *slices, size_t slice_length,
                        struct cox_error *err)
{
    struct cox_engine *engine = context;

    return cox_tensor_gather_blame(engine->gather, slices, slice_length, err);
}

static struct engine_source engine_source(const struct cox_engine *engine, const char *directory,
                                          const struct cox_share *share)
{
    struct engine_source source = {
        .block_size = engine->options.block_size,
        .block_count = engine->options.block_count,
        .swap_block_count = engine->options.swap_block_count,
        .rank = share->rank,
        .rank_count = share->rank_count,
    };

    snprintf(source.directory, sizeof source.directory, "%s", directory);
    return source;
}

static bool source_equal(const struct engine_source *a, const struct engine_source *b)
{
    return strcmp(a->directory, b->directory) == 0 && a->block_size == b->block_size &&
           a->block_count == b->block_count && a->swap_block_count == b->swap_block_count &&
           a->rank == b->rank && a->rank_count == b->rank_count;
}

/* Also hands the handles to the control socket, if there is one that accepts them. */
static int engine_make_exporter(struct cox_engine *engine, struct cox_error *err)
{
    const struct cox_exporter_options options = {.size = sizeof(struct cox_exporter_options),
                                                 .socket_path = engine->given.control_socket};
    struct cox_error why = {0};

    if (engine->exporter)
        return 0;
    if (options.socket_path[0] && cox_exporter_new(&options, &engine->exporter, &why) == 0)
        return 0;
    if (options.socket_path[0])
        cox_log_write(&engine->options.log, 4,
                      "the control socket does not keep the KV cache's fd: %s", why.text);
    return cox_exporter_new(NULL, &engine->exporter, err);
}

static struct cox_kv_layout engine_layout(const struct cox_engine *engine,
                                          const struct cox_group_options *options)
{
    const struct cox_cache_geometry *geometry = cox_cache_geometry(engine->cache);

    return (struct cox_kv_layout){
        .rank = options->rank,
        .rank_count = options->rank_count,
        .layer_count = geometry->layer_count,
        .kv_head_first = cox_model_kv_heads(engine->model).first,
        .kv_head_count = geometry->kv_head_count,
        .head_dim = geometry->head_dim,
        .block_size = geometry->block_size,
        .element_bytes = sizeof(float),
        .block_bytes = cox_cache_block_size(geometry),
        .model_digest = cox_model_digest(engine->model),
    };
}

/* From now on other groups may read the cache, and pulls may fill it. A failure of the export does
 * not concern this group's own work. */
static void engine_publish(struct cox_engine *engine, const struct cox_group_options *options)
{
    struct cox_error err = {0};

    engine->layout = engine_layout(engine, options);
    if (!engine->exported) {
        int r = engine_make_exporter(engine, &err);
        if (r == 0)
            r = cox_exporter_export(engine->exporter,
                                    cox_kv_blocks_info(cox_cache_kv_blocks(engine->cache)).fd, 0, 0,
                                    &engine->handle, &err);
        if (r == 0) {
            cox_fault_point(COX_FAULT_CACHE_EXPORTED);
            engine->exported = true;
        } else {
            cox_log_write(&engine->options.log, 4, "no other group can read the KV cache: %s",
                          err.text);
        }
    }
    cox_transfer_open(engine->transfer, engine->cache, &engine->layout);
}

static struct cox_model_options engine_model_options(struct cox_engine *engine,
                                                     const struct cox_share *share)
{
    struct cox_model_options options = {
        .share = *share,
        .adapters = {cox_adapter_cache_find, engine->adapters},
    };

    if (share->rank_count) {
        options.share.gather = engine_gather;
        options.share.blame = engine_blame;
        options.share.context = engine;
    }
    return options;
}

/* Switches to this version of the shared weights: a model that borrows its image replaces the
 * former one. Caches stay, since they fit the same shapes, which is checked. After a failure
 * nothing has changed. */
static int engine_borrow(struct cox_engine *engine, const struct cox_share *share, uint64_t version,
                         const struct cox_weights_candidate *candidate, uint64_t deadline_ns,
                         struct cox_error *err)
{
    const struct cox_model_options options = engine_model_options(engine, share);
    struct cox_error why = {0};
    struct cox_model *model = NULL;
    const void *image;
    uint64_t length;
    int r = cox_weights_subscriber_take(engine->weights, version, candidate, deadline_ns, &image,
                                        &length, err);

    if (r)
        return r;
    /* Switching back needs no memory if the switch itself failed for lack of it. */
    if (engine->model && cox_weights_subscriber_version(engine->weights) == version)
        return 0;
    r = cox_model_borrow(image, length, &options, &model, &why);
    if (!r && engine->model)
        r = cox_model_config_compare(cox_model_config(engine->model), cox_model_config(model),
                                     &why);
    if (r) {
        cox_model_free(model);
        return cox_fail(err, r, "version %" PRIu64 " of the model's weights: %s", version,
                        why.text);
    }
    cox_model_free(engine->model);
    engine->model = model;
    cox_weights_subscriber_commit(engine->weights);
    cox_log_write(&engine->options.log, 7, "computes with version %" PRIu64 " of the weights",
                  version);
    return 0;
}

/* The model was replaced between two steps. Keys and values of the former one may no longer be
 * pulled by other groups, nor be pulled here from a group that still uses it. */
static void engine_renew_digest(struct cox_engine *engine)
{
    const uint64_t digest = cox_model_digest(engine->model);
    struct cox_error err = {0};

    /* An init does all of this anyway. */
    if (!engine->ready || digest == engine->layout.model_digest)
        return;
    engine->layout.model_digest = digest;
    cox_cache_forget_all(engine->cache);
    if (cox_transfer_close(engine->transfer, cox_deadline_after_ms(CLEAR_MS), &err) == 0)
        cox_transfer_open(engine->transfer, engine->cache, &engine->layout);
    else
        cox_log_write(&engine->options.log, 4, "pulls are disabled until the next init: %s",
                      err.text);
}

/* Switches to the version of a step or an init. A pause must not leave this function, since its
 * open fds, mappings and allocations would leak. It is short: the scratch of a model, and a
 * connection to the control socket. */
static int engine_switch(struct cox_engine *engine, uint64_t version,
                         const struct cox_weights_candidate *candidate, uint64_t deadline_ns,
                         struct cox_error *err)
{
    int r;

    if (!engine->weights)
        return cox_fail(err, COX_STATE,
                        "version %" PRIu64
                        " of the model's weights is required, but init offered none",
                        version);
    if (version == cox_weights_subscriber_version(engine->weights))
        return 0;
    const struct cox_share share = {.rank = engine->source.rank,
                                    .rank_count = engine->source.rank_count};
    cox_worker_allow_leave(false);
    r = engine_borrow(engine, &share, version, candidate, deadline_ns, err);
    if (r == 0)
        engine_renew_digest(engine);
    cox_worker_allow_leave(true);
    return r;
}

/* Selects the weights of the step, if the coordinator shares weights. */
static int engine_step_weights(struct cox_engine *engine, const struct cox_batch *batch,
                               struct cox_error *err)
{
    const struct cox_weights_candidate *candidate = batch->weights;

    if (!batch->weights_version)
        return 0;
    return engine_switch(
        engine, batch->weights_version, candidate,
        candidate ? cox_deadline_min(candidate->deadline_ns, cox_deadline_after_ms(OPEN_MS)) : 0,
        err);
}

static int engine_model(struct cox_engine *engine, const struct engine_source *source,
                        const struct cox_share *share,
                        const struct cox_weights_candidate *candidate, uint64_t deadline_ns,
                        struct cox_error *err)
{
    const struct cox_model_options options = engine_model_options(engine, share);

    return candidate ? engine_borrow(engine, share, candidate->version, candidate, deadline_ns, err)
                     : cox_model_load(source->directory, &options, &engine->model, err);
}

/* Loads model and cache. */
static int engine_load(struct cox_engine *engine, const struct engine_source *source,
                       const struct cox_share *share, const struct cox_weights_candidate *candidate,
                       uint64_t deadline_ns, struct cox_error *err)
{
    const struct cox_model_config *config;
    struct cox_slices own;
    int r = engine_model(engine, source, share, candidate, deadline_ns, err);

    if (r)
        return r;
    config = cox_model_config(engine->model);
    own = cox_share_slices(config, share);
    cox_log_write(&engine->options.log, 7,
                  "%" PRIu64 " bytes of weights of its own, slices %u to %u of %u",
                  cox_model_weights_size(engine->model), own.first, own.first + own.count - 1,
                  cox_slice_count(config));
    r = cox_model_cache_new(engine->model, source->block_count, source->block_size,
                            source->swap_block_count, &engine->cache, err);
    if (r) {
        engine_unload(engine);
        return r;
    }
    engine->source = *source;
    cox_adapter_cache_set_model(engine->adapters, config, share);
    return 0;
}

/* For shared weights. */
static int engine_take_weights(struct cox_engine *engine, struct cox_error *err)
{
    int r;

    if (engine->weights)
        return 0;
    r = cox_weights_subscriber_new(engine->init->control_socket, &engine->weights);
    return r ? cox_fail(err, r, "no memory for the model's weights") : 0;
}

static void engine_describe(const struct cox_engine *engine, struct cox_init_result *result)
{
    const struct cox_engine_options *options = &engine->options;

    result->cpu_block_count = options->swap_block_count;
    result->npu_block_count = options->block_count;
    result->max_position_embeddings = cox_model_config(engine->model)->position_count_max;
    result->kv_cache_count = 1;
    result->kv_caches[0] = (struct cox_kv_cache_desc){
        .block_count = (int32_t)options->block_count,
        .block_size = (int32_t)options->block_size,
        .compression_ratio = 1,
    };
    if (engine->exported) {
        result->kv_pool.block_count = options->block_count;
        result->kv_pool.layout = engine->layout;
        memcpy(result->kv_pool.handle, &engine->handle, sizeof result->kv_pool.handle);
    }
}

/* The tensor gather comes last, after all that can fail on this rank alone. So no other rank waits
 * for it in vain. */
static int engine_form(struct cox_engine *engine, const struct cox_group_options *options,
                       const struct engine_source *source, const struct cox_share *share,
                       const struct cox_weights_candidate *candidate, struct cox_error *err)
{
    int r = share->rank_count && !candidate ? engine_check_share(source->directory, share, err) : 0;

    if (r == 0 && share->rank_count)
        r = engine_join(engine, options, err);

    if (r == 0 && candidate)
        r = engine_take_weights(engine, err);
    if (r == 0 && engine->cache && candidate)
        r = engine_switch(engine, candidate->version, candidate, options->deadline_ns, err);
    if (r == 0 && !engine->cache)
        r = engine_load(engine, source, share, candidate, options->deadline_ns, err);
    if (r == 0 && share->rank_count)
        r = cox_tensor_gather_new(engine->group, cox_model_slice_count(engine->model),
                                  cox_model_slice_length_max(engine->model), options->deadline_ns,
                                  &engine->gather, err);
    return r;
}

/* Reads the request, with the options as defaults. Values of an earlier init are not used, since a
 * replaced rank does not have them. */
static int engine_read(struct cox_engine *engine, const struct cox_init_request *request,
                       const char **ret_directory, struct cox_error *err)
{
    const char *directory = cox_init_request_get(request, "model");

    if (!directory || !*directory)
        directory = cox_init_request_get(request, "model_id"); /* of a legacy coordinator */
    if (!directory || !*directory)
        directory = engine->options.model_dir;
    if (!*directory)
        return cox_fail(
            err, COX_INVALID,
            "init: no model given: use --model DIR, or 'model' or 'model_id' in the init request");
    *ret_directory = directory;
    engine->options = engine->given;
    return engine_numbers(engine, request, err);
}

/* A repeated init keeps what was loaded, whether it succeeds this time or the next. */
static int engine_renew(struct cox_engine *engine, const struct cox_init_request *request,
                        const struct cox_group_options *options, struct cox_error *err)
{
    const bool replayed = request->replayed;
    const char *directory = NULL;
    struct cox_share share;
    struct engine_source source;
    int r = engine_read(engine, request, &directory, err);

    if (r)
        return r;
    share = engine_share(engine, options);
    source = engine_source(engine, directory, &share);
    /* Frees the old memory before allocating the new. A failed reinit has left a model without a
     * cache. */
    if (!replayed || !engine->cache || !source_equal(&source, &engine->source))
        engine_unload(engine);
    r = engine_form(engine, options, &source, &share, request->weights, err);
    if (r && !replayed)
        engine_unload(engine);
    return r;
}

static int engine_init(void *context, const struct cox_init_request *request,
                       struct cox_init_result *result, struct cox_error *err)
{
    struct cox_engine *engine = context;
    struct cox_group_options options = *request->group;
    int r;

    options.deadline_ns = cox_deadline_after_ms(WAIT_MS);
    options.cancelled = cancelled;
    options.context = engine;
    /* Whatever the outcome, the previous state is over: the other ranks are in this init too, or
     * dead. This comes before anything can fail, since the memory of a former group gets
     * reused. */
    engine->ready = false;
    r = cox_transfer_close(engine->transfer, cox_deadline_after_ms(CLEAR_MS), err);
    if (r)
        return r;
    /* The contents of a cache that stays are unknown too: all sequences are forgotten. */
    if (engine->cache)
        cox_cache_forget_all(engine->cache);
    engine->gather = cox_tensor_gather_free(engine->gather);
    if (engine->group && engine->rank_group_incarnation != options.incarnation)
        engine->group = cox_group_leave(engine->group);
    engine->init_sequence = request->sequence;
    /* After an init the group is NORMAL without a start command. This comes first, so that a pause
     * from here on remains in effect. */
    if (!request->replayed)
        cox_worker_resume(engine->worker);
    engine->init = request;
    r = engine_renew(engine, request, &options, err);
    engine->init = NULL;
    if (r && engine->group)
        cox_group_abort(engine->group);
    if (r)
        return r;
    engine->ready = true;
    engine_publish(engine, &options);
    engine_describe(engine, result);
    return 0;
}

/* Brings this rank in step with the others.
 *
 * Epochs of the group are request numbers. The epoch is that of the init until a step is cancelled;
 * then it is the number after the last cancelled step. All ranks that compute one step agree on it:
 * had the coordinator cancelled another step meanwhile, it would have cancelled this one too. Each
 * init, and each step after a failure, has an epoch never used before, because an epoch is at most
 * the number of the requests in it.
 */
static int engine_begin(struct cox_engine *engine, const struct cox_batch *batch,
                        struct cox_error *err)
{
    const uint64_t void_through = cox_batch_void_through(batch);
    const uint64_t epoch =
        void_through >= engine->init_sequence ? void_through + 1 : engine->init_sequence;

    if (batch->void_word && void_through >= batch->sequence)
        return cox_fail(err, COX_ABORTED, "the step was cancelled before it began");
    return cox_tensor_gather_begin(engine->gather, epoch, cox_deadline_after_ms(WAIT_MS), err);
}

#if COX_TESTING
/* Changes a block of this rank's memory behind its back, once a test has made the file. */
static void engine_bend(const struct cox_engine *engine, const struct cox_batch *batch)
{
    const char *prefix = getenv("COXSWAIN_TEST_BEND");
    char path[4096];
    if (!prefix || !batch->row_count)
        return;
    snprintf(path, sizeof path, "%s%" PRIu32, prefix, cox_worker_rank(engine->worker));
    const struct cox_block_table *table = &batch->rows[0].tables[0];
    if (unlink(path) == 0)
        ((int32_t *)(uintptr_t)table->blocks)[table->count - 1] ^= 1;
}
#endif

static int engine_execute(void *context, const struct cox_batch *batch,
                          struct cox_batch_output *outputs, struct cox_error *err)
{
    struct cox_engine *engine = context;
    int r = 0;

    if (!engine->ready || !engine->cache)
        return cox_fail(err, COX_STATE, "a step before a successful init");
    if (batch->forward_type == COX_FORWARD_DUMMY)
        return engine_step_weights(engine, batch, err);
    engine->batch = batch;
    /* Before anything can fail, so that failures signalled to the others concern this step. */
    if (engine->gather)
        r = engine_begin(engine, batch, err);
    if (r == 0)
        r = engine_step_weights(engine, batch, err);
    if (r == 0)
        r = cox_model_step(engine->model, engine->cache, batch, outputs, NULL, err);
    engine->batch = NULL;
#if COX_TESTING
    if (r == 0)
        engine_bend(engine, batch);
#endif
    if (r == 0 && engine->gather) {
        const struct cox_tensor_gather_times *times = cox_tensor_gather_times(engine->gather);
        cox_worker_tell_group_time(engine->worker, times->total_ns, times->wait_ns);
    }
    if (r && engine->group)
        cox_group_abort(engine->group);
    return r;
}

/* ---- the execute channel, and a concurrent reinit ---- */

/* Called first in each callback of the execute channel. This thread counts as busy
 * (cox_worker_busy) before it loads `rebuilding`; a reinit stores that before it checks for busy.
 * So at least one sees the other, and a callback that sees a reinit returns at once. The previous
 * callback may have been abandoned anywhere, so nothing of it is running. */
static int engine_enter(struct cox_engine *engine, struct cox_error *err)
{
    engine->init = NULL;
    engine->batch = NULL;
    if (atomic_load_explicit(&engine->rebuilding, memory_order_seq_cst))
        return cox_fail(err, COX_ABORTED, "a reinit is running");
    return 0;
}

static int on_init(void *context, const struct cox_init_request *request,
                   struct cox_init_result *result, struct cox_error *err)
{
    int r = engine_enter(context, err);

    return r ? r : engine_init(context, request, result, err);
}

static int on_execute(void *context, const struct cox_batch *batch,
                      struct cox_batch_output *outputs, struct cox_error *err)
{
    int r = engine_enter(context, err);

    return r ? r : engine_execute(context, batch, outputs, err);
}

static void on_cleanup(void *context, const uint32_t *slots, uint32_t count)
{
    struct cox_engine *engine = context;

    if (engine_enter(engine, NULL) == 0 && engine->cache)
        cox_cache_forget(engine->cache, slots, count);
}

/* ---- KV transfer ---- */

static void on_link(void *context, const Coxswain__PDLinkRequest *request)
{
    struct cox_engine *engine = context;

    cox_transfer_link(engine->transfer, request);
}

static int on_link_status(void *context, struct cox_arena *arena,
                          Coxswain__PDLinkStatusResponse *response, struct cox_error *err)
{
    struct cox_engine *engine = context;

    return cox_transfer_status(engine->transfer, arena, response, err);
}

/* Guarded as in engine_enter. Because it holds locks it is never abandoned; it ends by itself. */
static int on_pull_kv(void *context, const Coxswain__PullKVRequest *request,
                      struct cox_arena *arena, Coxswain__PullKVResponse *response,
                      struct cox_error *err)
{
    struct cox_engine *engine = context;
    int r;

    if (atomic_load_explicit(&engine->rebuilding, memory_order_seq_cst))
        return cox_fail(err, COX_ABORTED, "a reinit is running");
    cox_worker_allow_leave(false);
    r = cox_transfer_pull(engine->transfer, request, arena, response, err);
    cox_worker_allow_leave(true);
    return r;
}

/* ---- recovery ---- */

static int on_pause(void *context, struct cox_error *err)
{
    struct cox_engine *engine = context;

    return cox_worker_pause(engine->worker, 0, err);
}

static int on_lora(void *context, const struct Coxswain__LoraOperationRequest *request,
                   struct cox_arena *arena, struct Coxswain__LoraOperationResponse *response,
                   struct cox_error *err)
{
    struct cox_engine *engine = context;

    return cox_engine_adapter_command(engine->adapters, engine->worker, request, arena, response,
                                      err);
}

static int on_clear(void *context, struct cox_error *err)
{
    struct cox_engine *engine = context;

    return cox_transfer_clear(engine->transfer, cox_deadline_after_ms(CLEAR_MS), err);
}

static int engine_rebuild(struct cox_engine *engine, struct cox_error *err)
{
    int r;

    if (!engine->cache) /* nothing was loaded yet, or an init has failed */
        return 0;
    r = cox_transfer_close(engine->transfer, cox_deadline_after_ms(CLEAR_MS), err);
    if (r)
        return r;
    cox_cache_clear(engine->cache);
    if (engine->layout.block_bytes)
        cox_transfer_open(engine->transfer, engine->cache, &engine->layout);
    return 0;
}

static int on_reinit(void *context, struct cox_error *err)
{
    struct cox_engine *engine = context;
    int r;

    atomic_store_explicit(&engine->rebuilding, true, memory_order_seq_cst);
    if (cox_worker_busy(engine->worker))
        r = cox_fail(err, COX_STATE,
                     "a request is running: pause the worker before reinit, or wait for its end");
    else
        r = engine_rebuild(engine, err);
    atomic_store_explicit(&engine->rebuilding, false, memory_order_seq_cst);
    return r;
}

static int on_start(void *context, struct cox_error *err)
{
    struct cox_engine *engine = context;

    (void)err;
    cox_worker_resume(engine->worker);
    return 0;
}

const struct cox_worker_callbacks cox_engine_callbacks = {
    .size = sizeof(struct cox_worker_callbacks),
    .init = on_init,
    .execute = on_execute,
    .lora = on_lora,
    .cleanup = on_cleanup,
    .link = on_link,
    .link_status = on_link_status,
    .pull_kv = on_pull_kv,
    .pause = on_pause,
    .pause_net = on_pause,
    .clear = on_clear,
    .reinit = on_reinit,
    .start = on_start,
};
