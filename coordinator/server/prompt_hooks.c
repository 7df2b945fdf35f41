#include "server_internal.h"

#include <coxswain/server.h>

#include <stdlib.h>

static const char *const state_names[COX_PULL_STATE_COUNT] = {
    "queued", "sent", "success", "failed", "timeout", "peer dead", "cancelled",
};

const char *cox_pull_state_name(enum cox_pull_state state)
{
    return (size_t)state < COX_PULL_STATE_COUNT ? state_names[state] : "unknown";
}

void cox_prompt_output_deinit(struct cox_prompt_output *output)
{
    free(output->tokens);
    free(output->error);
    free(output->hold);
    free(output->report);
    *output = (struct cox_prompt_output){.index = output->index};
}
