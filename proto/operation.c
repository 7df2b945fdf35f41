#include "operation.h"

#include "channel/base/idioms.h"
#include "proto/executor.pb-c.h"

#define TYPE(name) COXSWAIN__EXECUTE_TYPE__##name

static const struct cox_operation operations[] = {
    [TYPE(MODEL_INIT)] = {"MODEL_INIT", COX_CHANNEL_EXECUTE, true, true, false},
    [TYPE(MODEL_INFER)] = {"MODEL_INFER", COX_CHANNEL_EXECUTE, true, false, true},
    [TYPE(MODEL_FINALIZE)] = {"MODEL_FINALIZE", COX_CHANNEL_EXECUTE, false, false, false},
    [TYPE(MODEL_INFER_SECOND)] = {"MODEL_INFER_SECOND", COX_CHANNEL_EXECUTE, true, false, true},
    [TYPE(PD_LINK)] = {"PD_LINK", COX_CHANNEL_LINK, false, false, false},
    [TYPE(KV_TRANSFER)] = {"KV_TRANSFER", COX_CHANNEL_TRANSFER, true, true, false},
    [TYPE(TEXT_GENERATOR_CLEANUP)] = {"TEXT_GENERATOR_CLEANUP", COX_CHANNEL_EXECUTE, false, false,
                                      false},
    [TYPE(LORA_OPERATION)] = {"LORA_OPERATION", COX_CHANNEL_LINK, true, false, false},
    [TYPE(REMOTE_MODEL_INIT)] = {"REMOTE_MODEL_INIT", COX_CHANNEL_EXECUTE, true, true, false},
    [TYPE(EOS_CLEANUP)] = {"EOS_CLEANUP", COX_CHANNEL_EXECUTE, false, false, false},
    [TYPE(PAUSE_COMMAND_EXEC)] = {"PAUSE_COMMAND_EXEC", COX_CHANNEL_RECOVER, true, true, false},
    [TYPE(CLEAR_COMMAND_EXEC)] = {"CLEAR_COMMAND_EXEC", COX_CHANNEL_RECOVER, true, true, false},
    [TYPE(RECOVER_COMMAND_EXEC)] = {"RECOVER_COMMAND_EXEC", COX_CHANNEL_RECOVER, true, true, false},
    [TYPE(START_COMMAND_EXEC)] = {"START_COMMAND_EXEC", COX_CHANNEL_RECOVER, true, true, false},
    [TYPE(PD_LINK_STATUS_QUERY)] = {"PD_LINK_STATUS_QUERY", COX_CHANNEL_LINK, true, false, false},
    [TYPE(EXECUTE_ERROR)] = {"EXECUTE_ERROR", COX_CHANNEL_ERROR, false, false, false},
    [TYPE(PAUSE_COMMAND_EXEC_ROCE)] = {"PAUSE_COMMAND_EXEC_ROCE", COX_CHANNEL_RECOVER, true, true,
                                       false},
};

static const struct cox_operation opaque = {"OPAQUE", COX_CHANNEL_EXECUTE, true, true, false};

COX_HOT const struct cox_operation *cox_operation_find(uint32_t execute_type)
{
    if (execute_type == COX_TYPE_OPAQUE)
        return &opaque;
    if (execute_type >= sizeof operations / sizeof operations[0])
        return NULL;
    return &operations[execute_type];
}
