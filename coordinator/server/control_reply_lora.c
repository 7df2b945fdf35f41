/* control_reply_lora: LoRA adapters of a group by request: load, unload, list. */
#include "channel/base/idioms.h"
#include "coordinator/executor/core.h"
#include "coordinator/executor/requests_internal.h"
#include "proto/control.pb-c.h"
#include "proto/wire.h"
#include "control_reply.h"

#include <stdlib.h>

#define TIMEOUT_MS_DEFAULT 60000
#define TIMEOUT_MS_MAX 3600000

typedef CoxswainControl__LoraRequest lora_request;
typedef CoxswainControl__LoraReply lora_reply;
typedef CoxswainControl__LoraAdapter adapter_message;
typedef CoxswainControl__LoraResult result_message;

#define ACTION(name) COXSWAIN_CONTROL__LORA_ACTION__##name
#define SET(message, field, value) ((message)->has_##field = true, (message)->field = (value))

static int results_add(const struct cox_control_source *source,
                       const struct cox_lora_result *results, struct cox_arena *arena,
                       lora_reply *reply)
{
    uint32_t rank_count = cox_executor_rank_count(source->phase.executor);
    result_message *messages = cox_arena_alloc(arena, rank_count * sizeof *messages);
    reply->ranks = cox_arena_alloc(arena, rank_count * sizeof *reply->ranks);
    if (!messages || !reply->ranks)
        return -ENOMEM;
    for (uint32_t rank = 0; rank < rank_count; rank++) {
        result_message *message = reply->ranks[rank] = &messages[rank];
        coxswain_control__lora_result__init(message);
        SET(message, rank, rank);
        SET(message, status, results[rank].status);
        message->status_name = (char *)(uintptr_t)cox_lora_status_name(results[rank].status);
        if (results[rank].text[0] && !(message->text = cox_arena_strdup(arena, results[rank].text)))
            return -ENOMEM;
    }
    reply->n_ranks = rank_count;
    return 0;
}

static int error_add(lora_reply *reply, struct cox_arena *arena, const struct cox_error *error)
{
    CoxswainControl__Error *message = cox_arena_alloc(arena, sizeof *message);
    if (!message)
        return -ENOMEM;
    coxswain_control__error__init(message);
    SET(message, code, error->code);
    message->text = cox_arena_strdup(arena, error->text);
    reply->error = message;
    return message->text ? 0 : -ENOMEM;
}

static int adapters_add(const struct cox_control_source *source, struct cox_arena *arena,
                        lora_reply *reply)
{
    struct cox_lora_info *infos = NULL;
    size_t count = 0;
    int r = source->hooks.lora->list(source->hooks.context, &infos, &count);
    if (r)
        return r;
    adapter_message *messages = cox_arena_alloc(arena, (count + 1) * sizeof *messages);
    reply->adapters = cox_arena_alloc(arena, (count + 1) * sizeof *reply->adapters);
    if (!messages || !reply->adapters)
        r = -ENOMEM;
    for (size_t i = 0; r == 0 && i < count; i++) {
        adapter_message *message = reply->adapters[i] = &messages[i];
        coxswain_control__lora_adapter__init(message);
        message->name = cox_arena_strdup(arena, infos[i].name);
        message->path = cox_arena_strdup(arena, infos[i].path);
        message->state = (char *)(uintptr_t)infos[i].state;
        SET(message, uses, infos[i].uses);
        if (!message->name || !message->path)
            r = -ENOMEM;
    }
    reply->n_adapters = r ? 0 : count;
    free(infos);
    return r;
}

/* Returns 0 or -ENOMEM; the result is in the reply. */
static int order_run(const struct cox_control_source *source, const lora_request *request,
                     struct cox_arena *arena, lora_reply *reply)
{
    uint64_t timeout_ms = request->has_timeout_ms ? request->timeout_ms : TIMEOUT_MS_DEFAULT;
    uint64_t deadline_ns =
        cox_deadline_after_ms(timeout_ms < TIMEOUT_MS_MAX ? timeout_ms : TIMEOUT_MS_MAX);
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
    int status =
        r == COX_INVALID && !results[0].asked ? 0 : results_add(source, results, arena, reply);
    return r && !status ? error_add(reply, arena, &error) : status;
}

int cox_control_reply_lora(const struct cox_control_source *source, const lora_request *request,
                           struct cox_arena *arena, lora_reply **ret_reply, struct cox_error *err)
{
    lora_reply *reply = cox_arena_alloc(arena, sizeof *reply);
    if (!reply)
        return -ENOMEM;
    coxswain_control__lora_reply__init(reply);
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
