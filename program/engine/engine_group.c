#include "engine_group.h"

#include "channel/base/idioms.h"
#include "coordinator/executor/core.h"
#include "coordinator/server/server_internal.h"
#include "engine/batching/lora.h"
#include "engine/batching/prompt_queue.h"
#include "engine/batching/reference_hooks.h"
#include "engine/batching/shared_weights.h"
#include "engine/model/model_image.h"
#include "engine/model/tokenizer.h"
#include "legacy_init.h"
#include "program/cli/console.h"

#include <stdlib.h>
#include <string.h>

#define ADAPTER_MS_DEFAULT 60000

struct cox_engine_group {
    struct cox_reference reference;
    struct cox_foreground *foreground;
    /* of start, while it runs */
    const struct cox_engine_group_options *options;
    struct cox_server_hooks hooks;
    struct cox_server *server;
    struct cox_legacy_init legacy_init;
};

/* ---- weights ---- */

/* True: a signal has cancelled it. */
static bool on_layer(void *context, uint32_t done, uint32_t count)
{
    const struct cox_engine_group *group = context;
    if (!group->options->foreground.quiet)
        cox_console_progress(
            &(struct cox_progress){.what = "layers of the model", .done = done, .total = count});
    return cox_foreground_signal(group->foreground) != 0;
}

/* Without memory that all can share, every rank loads its own weights, and that is logged. A fault
 * of the model would recur in every rank, so it is an error. */
static int weights_or_not(struct cox_engine_group *group, int r, const struct cox_error *error,
                          struct cox_error *err)
{
    if (r != COX_DENIED && r != COX_UNSUPPORTED && r != COX_NO_SPACE)
        return r ? cox_fail(err, r, "%s", error->text) : 0;
    cox_console_say("every rank loads its own part of the model: %s", error->text);
    group->reference.weights = cox_shared_weights_free(group->reference.weights);
    return 0;
}

static bool may_share_weights(const struct cox_engine_group_options *options)
{
    return options->share_weights && options->foreground.model;
}

/* Legacy workers do not support it. */
static int weights_load(void *context, struct cox_error *err)
{
    struct cox_engine_group *group = context;
    const struct cox_engine_group_options *options = group->options;
    struct cox_error error = {0};
    if (!may_share_weights(options) ||
        !cox_group_choice_limits(options->foreground.group)->extensions)
        return 0;
    int r = cox_shared_weights_load(options->foreground.model, on_layer, group,
                                    &group->reference.weights, &error);
    cox_console_progress_end();
    return weights_or_not(group, r, &error, err);
}

/* ---- hooks of the server ---- */

static int on_attached(void *context, struct cox_executor *executor, struct cox_error *err)
{
    struct cox_engine_group *group = context;
    const struct cox_log log = cox_foreground_full_log(group->foreground);
    struct cox_error error = {0};
    int r = group->reference.weights
                ? cox_shared_weights_publish(group->reference.weights, executor, &error)
                : 0;
    r = weights_or_not(group, r, &error, err);
    if (r)
        return r;
    r = cox_lora_new(executor, &log, &group->reference.lora);
    return r ? cox_fail(err, r, "no memory for the LoRA adapters") : 0;
}

static int adapters_load(struct cox_engine_group *group, struct cox_error *err)
{
    const struct cox_adapter_choice *choice = group->options->adapters;
    const struct cox_group_choice *group_choice = group->options->foreground.group;
    uint64_t timeout_ms =
        group_choice->start_timeout_ms ? group_choice->start_timeout_ms : ADAPTER_MS_DEFAULT;
    _cox_cleanup_(cox_free_ptr) struct cox_lora_result *results =
        calloc(group_choice->rank_count, sizeof *results);
    int r = results ? 0 : cox_fail(err, -ENOMEM, "no memory");
    for (size_t i = 0; r == 0 && choice && i < choice->count; i++)
        r = cox_lora_load(group->reference.lora, choice->items[i].name, choice->items[i].path,
                          cox_deadline_after_ms(timeout_ms), results, err);
    return r;
}

static int prompt_queue_start(struct cox_engine_group *group, struct cox_error *err)
{
    const struct cox_engine_group_options *options = group->options;
    struct cox_executor *executor = cox_engine_group_executor(group);
    struct cox_prompt_queue_options queue = {
        .name = cox_executor_limits(executor)->extensions ? cox_executor_name(executor) : NULL,
        .engine_loop = {.token_count_max = options->step_tokens,
                        .step_ms = options->foreground.group->step_ms,
                        .log = cox_foreground_log()},
        .lora = group->reference.lora,
    };
    int r = cox_vocab_size_load(options->foreground.model, &queue.vocab_size, err);
    if (!r)
        r = cox_text_digest_load(options->foreground.model, &queue.text_digest, err);
    if (!r)
        r = cox_engine_group_fit(group, &queue.engine_loop, err);
    return r ? r : cox_prompt_queue_start(executor, &queue, &group->reference.queue, err);
}

static int on_ready(void *context, struct cox_server *server, struct cox_error *err)
{
    struct cox_engine_group *group = context;
    group->server = server;
    int r = adapters_load(group, err);
    return !r && group->options->serve ? prompt_queue_start(group, err) : r;
}

static int on_replayed(void *context, uint64_t deadline_ns, struct cox_error *err)
{
    const struct cox_engine_group *group = context;
    return cox_lora_replay(group->reference.lora, deadline_ns, err);
}

static void on_ending(void *context)
{
    const struct cox_engine_group *group = context;
    if (group->reference.lora)
        cox_lora_stop(group->reference.lora);
    if (group->reference.weights)
        cox_shared_weights_stop(group->reference.weights);
}

/* ---- constructor and destructor ---- */

static int group_start(struct cox_engine_group *group, struct cox_error *err)
{
    struct cox_foreground_options options = group->options->foreground;
    group->hooks = (struct cox_server_hooks){
        .size = sizeof(struct cox_server_hooks),
        .context = group,
        .attached = on_attached,
        .ready = on_ready,
        .replayed = on_replayed,
        .ending = on_ending,
        .prompts = group->options->serve ? &cox_reference_prompt_hooks : NULL,
        .lora = &cox_reference_lora_hooks,
        .weights = &cox_reference_weights_hooks,
    };
    options.hooks = &group->hooks;
    options.shared_weights = may_share_weights(group->options);
    if (!cox_group_choice_limits(options.group)->extensions) {
        int r = cox_legacy_init_make(&options, &group->legacy_init, err);
        if (r)
            return r;
        options.config = group->legacy_init.entries;
        options.config_count = group->legacy_init.count;
    }
    /* First, since a model that cannot be loaded needs no processes. */
    options.prepare = weights_load;
    return cox_foreground_start(group->foreground, &options, err);
}

int cox_engine_group_start(const struct cox_engine_group_options *options,
                           struct cox_engine_group **ret_group, int *ret_signal,
                           struct cox_error *err)
{
    _cox_cleanup_(cox_engine_group_freep) struct cox_engine_group *group = calloc(1, sizeof *group);
    if (!group)
        return cox_fail(err, -ENOMEM, "no memory");
    group->options = options;
    int r = cox_foreground_new(&group->foreground, err);
    if (r)
        return r;
    r = group_start(group, err);
    group->options = NULL;
    if (r) {
        *ret_signal = cox_foreground_signal(group->foreground);
        return *ret_signal ? COX_CLOSED : r;
    }
    *ret_group = cox_steal_ptr(&group);
    return 0;
}

struct cox_engine_group *cox_engine_group_free(struct cox_engine_group *group)
{
    if (group) {
        if (group->reference.queue)
            cox_prompt_queue_stop(group->reference.queue, NULL);
        /* also frees its connections, which are clients of the prompt queue */
        cox_foreground_free(group->foreground);
        cox_prompt_queue_free(group->reference.queue);
        cox_lora_free(group->reference.lora);
        cox_shared_weights_free(group->reference.weights);
        cox_legacy_init_deinit(&group->legacy_init);
        free(group);
    }
    return NULL;
}

struct cox_foreground *cox_engine_group_foreground(struct cox_engine_group *group)
{
    return group->foreground;
}

struct cox_executor *cox_engine_group_executor(struct cox_engine_group *group)
{
    return cox_server_executor(group->server);
}

static int engine_loop_recover(void *context, struct cox_error *err)
{
    return cox_server_await_recovery(context, COX_DEADLINE_NEVER, err);
}

static void engine_loop_recover_cancel(void *context)
{
    cox_server_cancel_recovery(context);
}

int cox_engine_group_fit(struct cox_engine_group *group, struct cox_engine_loop_options *options,
                         struct cox_error *err)
{
    options->recover = engine_loop_recover;
    options->recover_context = group->server;
    options->recover_cancel = engine_loop_recover_cancel;
    options->weights = group->reference.weights;
    return cox_engine_loop_fit(options, cox_server_init_summary(group->server), err);
}

void cox_engine_group_end_prompts(struct cox_engine_group *group, const struct cox_error *cause)
{
    if (group->reference.queue)
        cox_prompt_queue_stop(group->reference.queue, cause);
}

/* ---- limits of the reference worker ---- */

int cox_worker_check(const struct cox_group_choice *options, const char *worker, const char *model,
                     struct cox_error *err)
{
    const struct cox_share share = {.rank_count = options->rank_count};
    struct cox_model_config config;
    if (!cox_group_choice_limits(options)->extensions || !cox_worker_is_reference(worker))
        return 0;
    /* The process that loads it reports what is wrong. */
    if (cox_model_folder_config(model, &config, NULL))
        return 0;
    return cox_share_check(&config, &share, err);
}
