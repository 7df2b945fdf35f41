/* control_reply_lora: LoRA adapters of a group by request: load, unload, list. */
#include "channel/base/idioms.h"
#include "coordinator/executor/core.h"
#include "coordinator/executor/requests_internal.h"
#include "proto/control.pb-c.h"
#include "proto/message.h"
#include "control_reply.h"

#include <stdlib.h>

#define TIMEOUT_MS_DEFAULT 60000

#define NO_ADAPTERS "this group has no LoRA adapters: the program that serves it manages none"

typedef CoxswainControl__LoraRequest lora_request;
typedef CoxswainControl__LoraReply lora_reply;
typedef CoxswainControl__LoraAdapter adapter_message;
typedef CoxswainControl__LoraResult result_message;

#define ACTION(name) COXSWAIN_CONTROL__LORA_ACTION__##name

static void results_add(const struct cox_control_source *source,
                        const struct cox_lora_result *results, struct cox_arena *arena,
                        lora_reply *reply)
{
    reply->ranks =
        cox_message_list(arena, &coxswain_control__lora_result__descriptor,
                         cox_executor_rank_count(source->phase.executor), &reply->n_ranks);
    for (uint32_t rank = 0; rank < reply->n_ranks; rank++) {
        result_message *message = reply->ranks[rank];
        COX_SET(message, rank, rank);
        COX_SET(message, status, results[rank].status);
        message->status_name = cox_message_lend(cox_lora_status_name(results[rank].status));
        message->text = cox_message_text(arena, results[rank].text);
    }
}

static int adapters_add(const struct cox_control_source *source, struct cox_arena *arena,
                        lora_reply *reply)
{
    struct cox_lora_info *infos = NULL;
    size_t count = 0;
    int r = source->hooks.lora->list(source->hooks.context, &infos, &count);
    if (r)
        return r;
    reply->adapters = cox_message_list(arena, &coxswain_control__lora_adapter__descriptor, count,
                                       &reply->n_adapters);
    for (size_t i = 0; i < reply->n_adapters; i++) {
        adapter_message *message = reply->adapters[i];
        message->name = cox_arena_strdup(arena, infos[i].name);
        message->path = cox_arena_strdup(arena, infos[i].path);
        message->state = cox_message_lend(infos[i].state);
        COX_SET(message, uses, infos[i].uses);
    }
    free(infos);
    return 0;
}

/* Returns 0 or -ENOMEM; the result is in the reply. */
static int order_run(const struct cox_control_source *source, const lora_request *request,
                     struct cox_arena *arena, lora_reply *reply)
{
    uint64_t deadline_ns = cox_control_reply_deadline(request->has_timeout_ms, request->timeout_ms,
                                                      TIMEOUT_MS_DEFAULT);
    struct cox_error error = {0};
    _cox_cleanup_(cox_free_ptr) struct cox_lora_result *results =
        calloc(cox_executor_rank_count(source->phase.executor), sizeof *results);
    if (!results)
        return -ENOMEM;
    const struct cox_lora_hooks *lora = source->hooks.lora;
    void *context = source->hooks.context;
    int r = request->action == ACTION(LORA_LOAD)
                ? lora->load(context, request->name, request->path, deadline_ns, results, &error)
                : lora->unload(context, request->name, deadline_ns, results, &error);
    /* An invalid request was sent to no rank. */
    if (r != COX_INVALID || results[0].asked)
        results_add(source, results, arena, reply);
    reply->error = r ? cox_control_reply_error(arena, error.code, error.text) : NULL;
    return 0;
}

int cox_control_reply_lora(const struct cox_control_source *source, const lora_request *request,
                           struct cox_arena *arena, lora_reply **ret_reply, struct cox_error *err)
{
    if (!source->hooks.lora)
        return cox_fail(err, COX_UNSUPPORTED, NO_ADAPTERS);
    if (!source->phase.recovery)
        return cox_fail(err, COX_STATE, COX_CONTROL_INITIALIZING);
    lora_reply *reply = cox_message_new(arena, &coxswain_control__lora_reply__descriptor);
    if (!reply)
        return -ENOMEM;
    if (!request->has_action ||
        (request->action != ACTION(LORA_LIST) && request->action != ACTION(LORA_LOAD) &&
         request->action != ACTION(LORA_UNLOAD)))
        return cox_fail(err, COX_INVALID, "no such LoRA operation: expected 0 to 2");
    int r = request->action == ACTION(LORA_LIST) ? 0 : order_run(source, request, arena, reply);
    if (!r)
        r = adapters_add(source, arena, reply);
    if (!r)
        *ret_reply = reply;
    return r;
}
