#include "adapter_commands.h"

#include "engine/model/file.h"
#include "proto/executor.pb-c.h"

#include <string.h>

#define STATUS(name) COXSWAIN__LORA_OPERATION_STATUS__##name

/* The status for the result of a load; -1: the failure is not the request's. */
static int status_of(int r)
{
    switch (r) {
    case 0:
        return STATUS(LORA_CMD_SUCCESS);
    case COX_TAKEN:
        return STATUS(DUPLICATED_LORA_ID);
    case COX_FULL:
        return STATUS(SLOTS_FULL);
    case COX_DIVERGED:
        return STATUS(INVALID_LORA_RANK);
    case COX_STATE:
    case COX_NO_SPACE:
        return -1;
    default: /* missing, unreadable, broken, or for another model: another path may work */
        return r < 0 ? -1 : STATUS(INVALID_LORA_PATH);
    }
}

static bool is_name(const char *name)
{
    size_t length = 0;
    for (; name[length]; length++)
        if ((unsigned char)name[length] < ' ' || name[length] == 127)
            return false;
    return length > 0 && length <= COX_LORA_NAME_LENGTH_MAX;
}

/* Returns a status, or a failure in *ret_failure. */
static int load(struct cox_adapter_cache *adapters,
                const struct Coxswain__LoraOperationRequest *request,
                struct Coxswain__LoraOperationResponse *response, int *ret_failure,
                struct cox_error *err)
{
    const char *path = request->lora_path;
    const uint64_t expected = request->has_digest ? request->digest : 0;
    if (!path || !*path) {
        cox_fail(err, COX_INVALID, "the request has no adapter folder");
        return STATUS(INVALID_LORA_PATH);
    }
    int r = cox_adapter_cache_load(adapters, request->lora_name, path, expected, &response->digest,
                                   err);
    r = cox_file_blame(r, err);
    response->has_digest = r == 0;
    *ret_failure = status_of(r) < 0 ? r : 0;
    return status_of(r);
}

static int unload(struct cox_adapter_cache *adapters, struct cox_worker *worker, const char *name,
                  int *ret_failure, struct cox_error *err)
{
    if (!cox_adapter_cache_has(adapters, name)) {
        cox_fail(err, COX_NOT_FOUND, "no adapter of that name is loaded");
        return STATUS(INVALID_LORA_ID);
    }
    *ret_failure = cox_worker_lora_retire(worker, name, err);
    if (*ret_failure)
        return -1;
    /* An init may have removed it meanwhile. */
    return cox_adapter_cache_remove(adapters, name, err) ? STATUS(INVALID_LORA_ID)
                                                         : STATUS(LORA_CMD_SUCCESS);
}

int cox_engine_adapter_command(struct cox_adapter_cache *adapters, struct cox_worker *worker,
                               const struct Coxswain__LoraOperationRequest *request,
                               struct cox_arena *arena,
                               struct Coxswain__LoraOperationResponse *response,
                               struct cox_error *err)
{
    const char *name = request->lora_name ? request->lora_name : "";
    struct cox_error why = {0};
    int failure = 0, status = STATUS(UNSUPPORT_CMD);
    if (request->lora_op_type != COXSWAIN__LORA_OPERATION_TYPE__LOAD &&
        request->lora_op_type != COXSWAIN__LORA_OPERATION_TYPE__UNLOAD) {
        cox_fail(&why, COX_UNSUPPORTED, "no such operation: %d", (int)request->lora_op_type);
    } else if (!is_name(name)) {
        cox_fail(&why, COX_INVALID, "a name has 1 to %d bytes, and no control characters",
                 COX_LORA_NAME_LENGTH_MAX);
        status = STATUS(INVALID_LORA_ID);
    } else if (request->lora_op_type == COXSWAIN__LORA_OPERATION_TYPE__LOAD) {
        status = load(adapters, request, response, &failure, &why);
    } else {
        status = unload(adapters, worker, name, &failure, &why);
    }
    if (failure)
        return cox_fail(err, failure, "%s", why.text);
    response->lora_op_status = (Coxswain__LoraOperationStatus)status;
    if (status != STATUS(LORA_CMD_SUCCESS))
        response->text = cox_arena_strdup(arena, why.text); /* NULL: the status is enough */
    return 0;
}
