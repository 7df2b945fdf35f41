#include "server_internal.h"

#include <coxswain/server.h>

static const char *const state_names[COX_PULL_STATE_COUNT] = {
    "queued", "sent", "success", "failed", "timeout", "peer dead", "cancelled",
};

const char *cox_pull_state_name(enum cox_pull_state state)
{
    return (size_t)state < COX_PULL_STATE_COUNT ? state_names[state] : "unknown";
}
