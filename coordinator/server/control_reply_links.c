/* control_reply_links: links, role, holds and pulls of a group by request. */
#include "channel/base/idioms.h"
#include "coordinator/executor/requests_internal.h"
#include "proto/control.pb-c.h"
#include "proto/wire.h"
#include "control_reply.h"
#include "kv_reference.h"
#include "server_internal.h"

#include <stdlib.h>
#include <string.h>

#define TIMEOUT_MS_DEFAULT 10000
#define TIMEOUT_MS_MAX 3600000

typedef CoxswainControl__ControlRequest control_request;
typedef CoxswainControl__ControlReply control_reply;
typedef CoxswainControl__LinkState link_message;

#define SET(message, field, value) ((message)->has_##field = true, (message)->field = (value))

static uint64_t deadline_of(bool given, uint64_t timeout_ms)
{
    uint64_t ms = given ? timeout_ms : TIMEOUT_MS_DEFAULT;
    return cox_deadline_after_ms(ms < TIMEOUT_MS_MAX ? ms : TIMEOUT_MS_MAX);
}

/* ---- lists of links ---- */

static int link_fill(link_message *message, const struct cox_group_link *link,
                     struct cox_arena *arena)
{
    coxswain_control__link_state__init(message);
    message->cluster_id = cox_arena_strdup(arena, link->cluster_id);
    message->text = link->text ? cox_arena_strdup(arena, link->text) : NULL;
    SET(message, state, (uint32_t)link->state);
    if (link->epoch)
        SET(message, epoch, link->epoch);
    if (link->state == COX_LINK_FAILED)
        SET(message, code, link->code);
    return message->cluster_id && (message->text || !link->text) ? 0 : -ENOMEM;
}

static int list_fill(const struct cox_group_link *list, size_t count, struct cox_arena *arena,
                     link_message ***ret_links, size_t *ret_count)
{
    link_message *messages = cox_arena_alloc(arena, (count + 1) * sizeof *messages);
    link_message **pointers = cox_arena_alloc(arena, (count + 1) * sizeof(link_message *));
    int r = messages && pointers ? 0 : -ENOMEM;
    for (size_t i = 0; !r && i < count; i++) {
        pointers[i] = &messages[i];
        r = link_fill(&messages[i], &list[i], arena);
    }
    *ret_links = pointers;
    *ret_count = r ? 0 : count;
    return r;
}

int cox_control_reply_transfer_status(const struct cox_control_source *source,
                                      struct cox_arena *arena,
                                      struct CoxswainControl__TransferStatus **ret_status)
{
    struct cox_prompts_status status = {0};
    CoxswainControl__TransferStatus *message = cox_arena_alloc(arena, sizeof *message);
    struct cox_group_link *list = NULL;
    size_t count = 0;
    if (!message)
        return -ENOMEM;
    coxswain_control__transfer_status__init(message);
    source->prompts->status(source->hooks.context, &status);
    SET(message, role, (uint32_t)cox_group_links_role(source->phase.links));
    SET(message, holds, status.holds);
    SET(message, held_blocks, status.held_blocks);
    SET(message, recomputed, status.recomputed);
    SET(message, running, status.transfer.running);
    SET(message, succeeded, status.transfer.succeeded);
    SET(message, failed, status.transfer.failed);
    SET(message, cancelled, status.transfer.cancelled);
    SET(message, retries, status.transfer.retries);
    SET(message, late_results, status.transfer.late_results);
    SET(message, bytes, status.transfer.bytes);
    SET(message, copy_ns, status.transfer.copy_ns);
    SET(message, bytes_per_s, status.transfer.bytes_per_s);
    SET(message, quarantined_blocks, status.transfer.quarantined_blocks);
    int r = cox_group_links_list(source->phase.links, &list, &count);
    if (!r)
        r = list_fill(list, count, arena, &message->links, &message->n_links);
    /* Their state was not asked for. */
    for (size_t i = 0; !r && i < count; i++)
        message->links[i]->has_state = false;
    cox_group_link_list_free(list, count);
    *ret_status = message;
    return r;
}

/* ---- requests ---- */

static int hold_fill(const struct cox_control_source *source, int64_t sequence,
                     struct cox_arena *arena, CoxswainControl__KvInfoReply *message,
                     struct cox_error *err)
{
    struct cox_kv_reference *hold;
    if (!source->prompts || !source->prompts->find_hold)
        return cox_fail(err, COX_UNSUPPORTED, "%s",
                        source->prompts ? "this group holds nothing" : source->phase.refusal);
    int r = source->prompts->find_hold(source->hooks.context, sequence, &hold, err);
    if (r)
        return r;
    message->hold = cox_arena_alloc(arena, sizeof *message->hold);
    int32_t *blocks = cox_arena_alloc(arena, hold->block_count * sizeof *blocks);
    char *cluster_id = cox_arena_strdup(arena, hold->cluster_id);
    if (message->hold && blocks && cluster_id) {
        cox_kv_reference_write(hold, message->hold);
        message->hold->cluster_id = cluster_id;
        message->hold->blocks = memcpy(blocks, hold->blocks, hold->block_count * sizeof *blocks);
    } else {
        r = -ENOMEM;
    }
    free(hold);
    return r;
}

static int kv_info_reply(const struct cox_control_source *source,
                         const CoxswainControl__KvInfoRequest *request, struct cox_arena *arena,
                         control_reply *reply, struct cox_error *err)
{
    CoxswainControl__KvInfoReply *message = cox_arena_alloc(arena, sizeof *message);
    _cox_cleanup_(cox_free_ptr) uint8_t *bytes = NULL;
    size_t size;
    if (!message)
        return -ENOMEM;
    coxswain_control__kv_info_reply__init(message);
    SET(message, epoch,
        cox_executor_kv_epoch(source->phase.executor, cox_executor_epoch(source->phase.executor)));
    SET(message, role, (uint32_t)cox_group_links_role(source->phase.links));
    int r = cox_executor_remote_info(source->phase.executor, &bytes, &size, err);
    if (!r && request->has_hold)
        r = hold_fill(source, request->hold, arena, message, err);
    if (r)
        return r;
    message->has_remote_info = true;
    message->remote_info.len = size;
    message->remote_info.data = cox_arena_alloc(arena, size + 1);
    if (!message->remote_info.data)
        return -ENOMEM;
    memcpy(message->remote_info.data, bytes, size);
    reply->reply_case = COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_KV_INFO;
    reply->kv_info = message;
    return 0;
}

static int done_reply(struct cox_arena *arena, control_reply *reply)
{
    reply->reply_case = COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_DONE;
    reply->done = cox_arena_alloc(arena, sizeof *reply->done);
    if (!reply->done)
        return -ENOMEM;
    coxswain_control__done__init(reply->done);
    return 0;
}

static int link_reply(const struct cox_control_source *source,
                      const CoxswainControl__LinkRequest *request, struct cox_arena *arena,
                      control_reply *reply, struct cox_error *err)
{
    uint64_t deadline_ns = deadline_of(request->has_timeout_ms, request->timeout_ms);
    int r;
    if (request->has_remote_info == (request->unlink != NULL))
        return cox_fail(err, COX_INVALID, "a link needs either a group or one to unlink");
    if (request->unlink)
        r = cox_group_links_unlink(source->phase.links, request->unlink, deadline_ns, err);
    else
        r = cox_group_links_link(source->phase.links, request->remote_info.data,
                                 request->remote_info.len, deadline_ns, err);
    return r ? r : done_reply(arena, reply);
}

static int link_status_reply(const struct cox_control_source *source,
                             const CoxswainControl__LinkStatusRequest *request,
                             struct cox_arena *arena, control_reply *reply, struct cox_error *err)
{
    CoxswainControl__LinkStatusReply *message = cox_arena_alloc(arena, sizeof *message);
    struct cox_group_link *list;
    size_t count;
    if (!message)
        return -ENOMEM;
    coxswain_control__link_status_reply__init(message);
    int r = cox_group_links_status(source->phase.links,
                                   deadline_of(request->has_timeout_ms, request->timeout_ms), &list,
                                   &count, err);
    if (r)
        return r;
    r = list_fill(list, count, arena, &message->links, &message->n_links);
    cox_group_link_list_free(list, count);
    reply->reply_case = COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_LINK_STATUS;
    reply->link_status = message;
    return r;
}

int cox_control_reply_links(const struct cox_control_source *source,
                            const struct CoxswainControl__ControlRequest *request,
                            struct cox_arena *arena, struct CoxswainControl__ControlReply *reply,
                            struct cox_error *err)
{
    if (!source->phase.links)
        return cox_fail(err, COX_UNSUPPORTED, "the group takes no part in transfers: %s",
                        source->phase.refusal);
    switch (request->request_case) {
    case COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_KV_INFO:
        return kv_info_reply(source, request->kv_info, arena, reply, err);
    case COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_LINK:
        return link_reply(source, request->link, arena, reply, err);
    case COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_LINK_STATUS:
        return link_status_reply(source, request->link_status, arena, reply, err);
    default: {
        const CoxswainControl__RoleRequest *role = request->role;
        int r = cox_group_links_set_role(source->phase.links, role->role,
                                         deadline_of(role->has_timeout_ms, role->timeout_ms), err);
        return r ? r : done_reply(arena, reply);
    }
    }
}

/* ---- pulls ---- */

static int rank_fill(CoxswainControl__RankPull *message, uint32_t number,
                     const struct cox_pull_rank *rank, struct cox_arena *arena)
{
    coxswain_control__rank_pull__init(message);
    SET(message, rank, number);
    SET(message, code, rank->code);
    SET(message, status, rank->status);
    SET(message, copied_bytes, rank->copied_bytes);
    SET(message, copy_ns, rank->copy_ns);
    message->text = rank->text[0] ? cox_arena_strdup(arena, rank->text) : NULL;
    return message->text || !rank->text[0] ? 0 : -ENOMEM;
}

int cox_control_reply_pull(const struct cox_prompt_output *result, struct cox_arena *arena,
                           struct CoxswainControl__PullReply **ret_reply)
{
    const struct cox_pull_report *report = result->report;
    CoxswainControl__PullReply *reply = cox_arena_alloc(arena, sizeof *reply);
    uint32_t count = report ? report->rank_count : 0;
    if (!reply)
        return -ENOMEM;
    coxswain_control__pull_reply__init(reply);
    /* A request that was refused before it became a pull counts as failed. */
    reply->state = (char *)(uintptr_t)cox_pull_state_name(report ? report->state : COX_PULL_FAILED);
    reply->ranks = cox_arena_alloc(arena, (count + 1) * sizeof *reply->ranks);
    CoxswainControl__RankPull *ranks = cox_arena_alloc(arena, (count + 1) * sizeof *ranks);
    if (!reply->ranks || !ranks)
        return -ENOMEM;
    for (; reply->n_ranks < count; reply->n_ranks++) {
        reply->ranks[reply->n_ranks] = &ranks[reply->n_ranks];
        int r = rank_fill(&ranks[reply->n_ranks], (uint32_t)reply->n_ranks,
                          &report->ranks[reply->n_ranks], arena);
        if (r)
            return r;
    }
    if (result->finish == COX_FINISH_ERROR) {
        reply->error = cox_arena_alloc(arena, sizeof *reply->error);
        if (!reply->error)
            return -ENOMEM;
        coxswain_control__error__init(reply->error);
        SET(reply->error, code, result->error ? result->error->code : -ENOMEM);
        reply->error->text = result->error ? cox_arena_strdup(arena, result->error->text) : NULL;
    }
    *ret_reply = reply;
    return 0;
}
