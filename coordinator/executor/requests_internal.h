/* requests_internal: what the library has beyond requests.h. Its contract is the same. */
#ifndef COX_COORDINATOR_REQUESTS_INTERNAL_H
#define COX_COORDINATOR_REQUESTS_INTERNAL_H

#include <coxswain/requests.h>

/* Merges the states a and b of two ranks: FAILED if either is, else RUNNING if either is. SUCCESS
 * only if both are, else WAITING. */
static inline enum cox_link_state cox_link_merge(enum cox_link_state a, enum cox_link_state b)
{
    if (a == COX_LINK_FAILED || b == COX_LINK_FAILED)
        return COX_LINK_FAILED;
    if (a == COX_LINK_RUNNING || b == COX_LINK_RUNNING)
        return COX_LINK_RUNNING;
    return a < b ? a : b;
}

/* Packs a RemoteInfo (executor.proto), which other groups need to pull from this one: its name, its
 * control socket, the KV cache of every rank since the last init, and their epoch. The caller frees
 * *ret_bytes (free). Any thread; asks no worker.
 * Returns
 *   0
 *   COX_UNSUPPORTED: no rank exports a KV cache
 *   COX_STATE: there was no init
 *   -ENOMEM
 */
int cox_executor_remote_info(struct cox_executor *executor, uint8_t **ret_bytes, size_t *ret_size,
                             struct cox_error *err);

/* "SLOTS_FULL", ...; -1: "no reply"; any other number: "an unknown status". Static storage. */
const char *cox_lora_status_name(int32_t status);

/* As in struct cox_executor_status. */
enum cox_engine_state cox_executor_engine_state(const struct cox_executor *executor);
bool cox_executor_partially_paused(const struct cox_executor *executor);
const char *cox_engine_state_name(enum cox_engine_state state);
const char *cox_recover_command_name(enum cox_recover_command command);

#endif
