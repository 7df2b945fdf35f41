#include "legacy_init.h"

#include "engine/model/tokenizer.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What a MindIE-LLM server has in its configuration unless it is changed. */
#define POSITIONS_DEFAULT 2560
#define BLOCK_SIZE "128"

static bool is_given(const struct cox_foreground_options *options, const char *key)
{
    for (size_t i = 0; i < options->config_count; i++)
        if (strcmp(options->config[i].key, key) == 0)
            return true;
    return false;
}

static void texts_fill(struct cox_legacy_init *init, uint32_t rank_count, uint32_t positions)
{
    size_t length = 0;
    for (uint32_t rank = 0; rank < rank_count; rank++)
        length += (size_t)snprintf(init->devices + length, sizeof init->devices - length,
                                   "%s%" PRIu32, rank ? "," : "", rank);
    snprintf(init->ranks, sizeof init->ranks, "%" PRIu32, rank_count);
    snprintf(init->positions, sizeof init->positions, "%" PRIu32, positions);
}

int cox_legacy_init_make(const struct cox_foreground_options *options,
                         struct cox_legacy_init *ret_init, struct cox_error *err)
{
    uint32_t positions = POSITIONS_DEFAULT;
    int r = options->model ? cox_positions_load(options->model, &positions, err) : 0;
    if (r)
        return r;
    texts_fill(ret_init, options->group->rank_count, positions);
    /* A prompt that is longer than a step has a step of its own, so one may have all positions.
     * Blocks are not swapped. Rank and device are flags of each worker. */
    const struct cox_config_entry defaults[] = {
        {"model_id", options->model},
        {"infer_mode", "standard"},
        {"distributed_enable", "false"},
        {"rank", "0"},
        {"world_size", ret_init->ranks},
        {"tp", ret_init->ranks},
        {"npu_device_ids", ret_init->devices},
        {"cpu_mem", "0"},
        {"npu_mem", "-1"},
        {"block_size", BLOCK_SIZE},
        {"max_seq_len", ret_init->positions},
        {"max_iter_times", ret_init->positions},
        {"max_prefill_tokens", ret_init->positions},
        {"trust_remote_code", "false"},
        {"backend_type", "atb"},
        {"model_instance_type", "Standard"},
    };
    _Static_assert(sizeof defaults / sizeof defaults[0] == COX_LEGACY_INIT_KEY_COUNT, "keys");
    ret_init->entries =
        calloc(options->config_count + COX_LEGACY_INIT_KEY_COUNT, sizeof *ret_init->entries);
    if (!ret_init->entries)
        return cox_fail(err, -ENOMEM, "no memory for the init configuration");
    for (size_t i = 0; i < options->config_count; i++)
        ret_init->entries[ret_init->count++] = options->config[i];
    for (size_t i = 0; i < COX_LEGACY_INIT_KEY_COUNT; i++)
        if (defaults[i].value && !is_given(options, defaults[i].key))
            ret_init->entries[ret_init->count++] = defaults[i];
    return 0;
}

void cox_legacy_init_deinit(struct cox_legacy_init *init)
{
    free(init->entries);
    *init = (struct cox_legacy_init){0};
}
