#include "legacy_failure.h"

#include "proto/operation.h"
#include "proto/utf8.h"

typedef Coxswain__ExecuteRequest ExecuteRequest;
typedef Coxswain__ExecuteResponse ExecuteResponse;

#define TYPE(name) COXSWAIN__EXECUTE_TYPE__##name
#define RESULT(name) COXSWAIN__EXECUTE_RESPONSE__RESULT_##name
#define REQUEST(name) COXSWAIN__EXECUTE_REQUEST__REQUEST_##name

/* The type to reply to if the request cannot be parsed. */
static uint32_t replied_type(enum cox_channel_id channel, uint32_t type)
{
    static const uint32_t usual[COX_TWO_WAY_COUNT] = {
        [COX_CHANNEL_EXECUTE] = TYPE(MODEL_INFER),
        [COX_CHANNEL_LINK] = TYPE(PD_LINK_STATUS_QUERY),
        [COX_CHANNEL_TRANSFER] = TYPE(KV_TRANSFER),
        [COX_CHANNEL_RECOVER] = TYPE(RECOVER_COMMAND_EXEC),
    };
    const struct cox_operation *operation = cox_operation_find(type);
    bool known =
        type != COX_TYPE_OPAQUE && operation && operation->replies && operation->channel == channel;
    return known ? type : usual[channel];
}

static void fill_init(struct cox_legacy_reply *reply, char *text)
{
    coxswain__execute_response__init_results__init(&reply->init);
    coxswain__execute_response__init_results__init_result_map_entry__init(&reply->entry);
    reply->entry.key = (char *)(uintptr_t) "status";
    reply->entry.value = text;
    reply->entries[0] = &reply->entry;
    reply->init.n_init_result_map = 1;
    reply->init.init_result_map = reply->entries;
}

static void fill_lora(struct cox_legacy_reply *reply, const ExecuteRequest *message)
{
    coxswain__lora_operation_response__init(&reply->lora);
    if (message && message->request_case == REQUEST(LORA_OPERATION_REQUEST) &&
        message->lora_operation_request)
        reply->lora.lora_name = message->lora_operation_request->lora_name;
    reply->lora.has_lora_op_status = 1;
    reply->lora.lora_op_status = COXSWAIN__LORA_OPERATION_STATUS__UNSUPPORT_CMD;
}

/* The coordinator ignores pulls that are not mentioned: each gets its code, if there is memory for
 * it. */
static void fill_pulls(struct cox_legacy_reply *reply, const struct cox_legacy_failure *failure)
{
    typedef Coxswain__PullKVResponse__PullKVResult Result;
    const ExecuteRequest *message = failure->message;
    coxswain__pull_kvresponse__init(&reply->pulls);
    if (!message || message->request_case != REQUEST(PULL_KV_REQUEST) || !message->pull_kv_request)
        return;
    const Coxswain__PullKVRequest *pulls = message->pull_kv_request;
    Result **pointers =
        cox_arena_alloc(failure->arena, (pulls->n_pull_kv_infos + 1) * sizeof(Result *));
    Result *results =
        cox_arena_alloc(failure->arena, (pulls->n_pull_kv_infos + 1) * sizeof *results);
    for (size_t i = 0; pointers && results && i < pulls->n_pull_kv_infos; i++) {
        const Coxswain__SequenceGroupMetadata *metadata =
            pulls->pull_kv_infos[i]->seq_group_metadata;
        coxswain__pull_kvresponse__pull_kvresult__init(&results[i]);
        results[i].request_id = metadata ? metadata->request_id : NULL;
        results[i].has_pd_error_code = 1;
        results[i].pd_error_code = COXSWAIN__PDERROR_CODE__PD_PULL_KV_ERROR;
        pointers[i] = &results[i];
        reply->pulls.n_pull_kv_results = i + 1;
    }
    reply->pulls.pull_kv_results = pointers;
}

static void fill_command(struct cox_legacy_reply *reply, int32_t device, int status, char *text)
{
    coxswain__recover_command_response__init(&reply->command);
    reply->command.has_npu_device_id = reply->command.has_command_result = 1;
    reply->command.npu_device_id = device;
    reply->command.command_result = status;
    reply->command.error_msg = text;
}

void cox_legacy_failure_fill(const struct cox_legacy_failure *failure, ExecuteResponse *response,
                             struct cox_legacy_reply *ret_reply)
{
    const int status = response->status;
    struct cox_error *error = failure->error;
    if (!error->text[0]) { /* there may be a code already, without a text */
        cox_error_clear(error);
        cox_fail(error, status, "%s", cox_status_text(status));
    }
    cox_utf8_mend(error->text);
    char *text = response->error_text = error->text;
    const uint32_t type = replied_type(failure->channel, failure->type);
    response->status = 0;
    response->msg_type = (int32_t)type;
    switch (type) {
    case TYPE(MODEL_INIT):
        fill_init(ret_reply, text);
        response->result_case = RESULT(INIT_RESULTS);
        response->init_results = &ret_reply->init;
        return;
    case TYPE(PD_LINK_STATUS_QUERY):
        coxswain__pdlink_status_response__init(&ret_reply->links);
        response->result_case = RESULT(PD_LINK_STATUS_RESPONSE);
        response->pd_link_status_response = &ret_reply->links;
        return;
    case TYPE(LORA_OPERATION):
        fill_lora(ret_reply, failure->message);
        response->result_case = RESULT(LORA_OPERATION_RESPONSE);
        response->lora_operation_response = &ret_reply->lora;
        return;
    case TYPE(KV_TRANSFER):
        fill_pulls(ret_reply, failure);
        response->result_case = RESULT(PULL_KV_RESPONSE);
        response->pull_kv_response = &ret_reply->pulls;
        return;
    case TYPE(MODEL_INFER):
    case TYPE(MODEL_INFER_SECOND):
        coxswain__execute_model_response__init(&ret_reply->step);
        ret_reply->step.err_msg = text;
        response->result_case = RESULT(EXECUTE_MODEL_RESPONSE);
        response->execute_model_response = &ret_reply->step;
        return;
    default:
        fill_command(ret_reply, failure->device, status, text);
        response->result_case = RESULT(RECOVER_COMMAND_RESPONSE);
        response->recover_command_response = &ret_reply->command;
        return;
    }
}
