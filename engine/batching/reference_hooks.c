#include "reference_hooks.h"

#include "lora.h"
#include "prompt_queue.h"
#include "shared_weights.h"

/* ---- prompts ---- */

static int prompts_open(void *context, int wake_fd, void **ret_client)
{
    const struct cox_reference *reference = context;
    struct cox_prompt_queue_client *client;
    int r = cox_prompt_queue_client_new(reference->queue, wake_fd, &client);
    if (!r)
        *ret_client = client;
    return r;
}

static void prompts_close(void *client)
{
    cox_prompt_queue_client_free(client);
}

static int prompts_submit(void *client, const struct cox_prompt_request *request, uint64_t index)
{
    return cox_prompt_queue_submit(client, request, index);
}

static int prompts_take(void *client, struct cox_prompt_output *ret_output)
{
    return cox_prompt_queue_take(client, ret_output);
}

static uint32_t prompts_outstanding(void *client)
{
    return cox_prompt_queue_outstanding(client);
}

static void prompts_cancel(void *client)
{
    cox_prompt_queue_cancel(client);
}

static void prompts_status(void *context, struct cox_prompts_status *ret_status)
{
    const struct cox_reference *reference = context;
    cox_prompt_queue_status(reference->queue, ret_status);
}

static int prompts_release(void *client, int64_t sequence)
{
    return cox_prompt_queue_release(client, sequence);
}

static int prompts_find_hold(void *context, int64_t sequence,
                             struct cox_kv_reference **ret_reference, struct cox_error *err)
{
    const struct cox_reference *reference = context;
    return cox_prompt_queue_find_hold(reference->queue, sequence, ret_reference, err);
}

const struct cox_prompt_hooks cox_reference_prompt_hooks = {
    .size = sizeof(struct cox_prompt_hooks),
    .open = prompts_open,
    .close = prompts_close,
    .submit = prompts_submit,
    .take = prompts_take,
    .outstanding = prompts_outstanding,
    .cancel = prompts_cancel,
    .status = prompts_status,
    .release = prompts_release,
    .find_hold = prompts_find_hold,
};

/* ---- adapters ---- */

static int lora_list(void *context, struct cox_lora_info **ret_infos, size_t *ret_count)
{
    const struct cox_reference *reference = context;
    return cox_lora_list(reference->lora, ret_infos, ret_count);
}

static int lora_load(void *context, const char *name, const char *path, uint64_t deadline_ns,
                     struct cox_lora_result *ret_results, struct cox_error *err)
{
    const struct cox_reference *reference = context;
    return cox_lora_load(reference->lora, name, path, deadline_ns, ret_results, err);
}

static int lora_unload(void *context, const char *name, uint64_t deadline_ns,
                       struct cox_lora_result *ret_results, struct cox_error *err)
{
    const struct cox_reference *reference = context;
    return cox_lora_unload(reference->lora, name, deadline_ns, ret_results, err);
}

const struct cox_lora_hooks cox_reference_lora_hooks = {
    .size = sizeof(struct cox_lora_hooks),
    .list = lora_list,
    .load = lora_load,
    .unload = lora_unload,
};

/* ---- weights ---- */

static int weights_status(void *context, struct cox_weights_status *ret_status)
{
    const struct cox_reference *reference = context;
    if (!reference->weights)
        return COX_UNSUPPORTED;
    cox_shared_weights_status(reference->weights, ret_status);
    return 0;
}

static int weights_replace(void *context, const char *directory, uint64_t deadline_ns,
                           uint64_t *ret_version, struct cox_error *err)
{
    const struct cox_reference *reference = context;
    return cox_shared_weights_replace(reference->weights, directory, deadline_ns, ret_version, err);
}

const struct cox_weights_hooks cox_reference_weights_hooks = {
    .size = sizeof(struct cox_weights_hooks),
    .status = weights_status,
    .replace = weights_replace,
};
