#include "announcement.h"

#include "proto/executor.pb-c.h"

#include <math.h>
#include <string.h>

struct cox_sampling cox_announcement_sampling(const struct Coxswain__SamplingParams *params)
{
    struct cox_sampling sampling = {.top_p = 1, .repetition_penalty = 1};
    if (!params)
        return sampling;
    if (params->has_temperature && isfinite(params->temperature) && params->temperature > 0)
        sampling.temperature = params->temperature;
    if (params->has_top_k && params->top_k > 0)
        sampling.top_k = params->top_k;
    if (params->has_top_p && params->top_p > 0 && params->top_p < 1)
        sampling.top_p = params->top_p;
    if (params->has_repetition_penalty && isfinite(params->repetition_penalty) &&
        params->repetition_penalty > 0)
        sampling.repetition_penalty = params->repetition_penalty;
    if (params->has_seed)
        sampling.seed = (uint32_t)params->seed;
    return sampling;
}

int cox_announcement_set_lora(struct cox_sequence_store *store, uint32_t slot, const char *name,
                              const char *where, size_t index, struct cox_error *err)
{
    if (!name || !*name)
        return 0;
    int r = cox_sequence_store_set_lora(store, slot, name);
    if (r == COX_BUSY)
        return cox_fail(err, r, "%s %zu: the LoRA adapter '%.*s' is being unloaded", where, index,
                        COX_LORA_NAME_LENGTH_MAX, name);
    if (r == COX_TOO_LARGE)
        return cox_fail(err, r, "%s %zu: lora_id of %zu bytes, at most %d", where, index,
                        strlen(name), COX_LORA_NAME_LENGTH_MAX);
    return r ? cox_fail(err, r, "%s %zu: no memory", where, index) : 0;
}
