/* control_reply_links: links, role, holds and pulls of a group by request. */
#include "channel/base/idioms.h"
#include "coordinator/executor/requests_internal.h"
#include "proto/control.pb-c.h"
#include "proto/message.h"
#include "control_reply.h"
#include "kv_reference.h"
#include "server_internal.h"

#include <stdlib.h>
#include <string.h>

#define TIMEOUT_MS_DEFAULT 10000

typedef CoxswainControl__LinkState link_message;

/* The descriptor of a message. */
#define TYPE(name) &coxswain_control__##name##__descriptor

/* ---- lists of links ---- */

static link_message **list_make(const struct cox_group_link *list, size_t count,
                                struct cox_arena *arena, size_t *ret_count)
{
    link_message **links = cox_message_list(arena, TYPE(link_state), count, ret_count);
    for (size_t i = 0; i < *ret_count; i++) {
        links[i]->cluster_id = cox_arena_strdup(arena, list[i].cluster_id);
        links[i]->text = list[i].text ? cox_arena_strdup(arena, list[i].text) : NULL;
        COX_SET(links[i], state, (uint32_t)list[i].state);
        if (list[i].epoch)
            COX_SET(links[i], epoch, list[i].epoch);
        if (list[i].state == COX_LINK_FAILED)
            COX_SET(links[i], code, list[i].code);
    }
    return links;
}

CoxswainControl__TransferStatus *cox_control_reply_transfer_status(
    const struct cox_control_source *source, struct cox_arena *arena)
{
    struct cox_prompts_status status = {0};
    CoxswainControl__TransferStatus *message = cox_message_new(arena, TYPE(transfer_status));
    struct cox_group_link *list = NULL;
    size_t count = 0;
    if (!message)
        return NULL;
    source->prompts->status(source->hooks.context, &status);
    COX_SET(message, role, (uint32_t)cox_group_links_role(source->phase.links));
    COX_SET(message, holds, status.holds);
    COX_SET(message, held_blocks, status.held_blocks);
    COX_SET(message, recomputed, status.recomputed);
    COX_SET(message, running, status.transfer.running);
    COX_SET(message, succeeded, status.transfer.succeeded);
    COX_SET(message, failed, status.transfer.failed);
    COX_SET(message, cancelled, status.transfer.cancelled);
    COX_SET(message, retries, status.transfer.retries);
    COX_SET(message, late_results, status.transfer.late_results);
    COX_SET(message, bytes, status.transfer.bytes);
    COX_SET(message, copy_ns, status.transfer.copy_ns);
    COX_SET(message, bytes_per_s, status.transfer.bytes_per_s);
    COX_SET(message, quarantined_blocks, status.transfer.quarantined_blocks);
    if (cox_group_links_list(source->phase.links, &list, &count))
        arena->exhausted = true;
    message->links = list_make(list, count, arena, &message->n_links);
    /* Their state was not asked for. */
    for (size_t i = 0; i < message->n_links; i++)
        message->links[i]->has_state = false;
    cox_group_link_list_free(list, count);
    return message;
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
    message->hold = cox_message_new(arena, TYPE(kv_reference));
    int32_t *blocks = cox_arena_alloc(arena, hold->block_count * sizeof *blocks);
    if (message->hold && blocks) {
        cox_kv_reference_write(hold, message->hold);
        message->hold->cluster_id = cox_arena_strdup(arena, hold->cluster_id);
        message->hold->blocks = memcpy(blocks, hold->blocks, hold->block_count * sizeof *blocks);
    }
    free(hold);
    return 0;
}

static int kv_info_make(const struct cox_control_source *source,
                        const CoxswainControl__KvInfoRequest *request, struct cox_arena *arena,
                        control_reply *reply, struct cox_error *err)
{
    CoxswainControl__KvInfoReply *message = cox_message_new(arena, TYPE(kv_info_reply));
    _cox_cleanup_(cox_free_ptr) uint8_t *bytes = NULL;
    size_t size;
    if (!message)
        return -ENOMEM;
    COX_SET(
        message, epoch,
        cox_executor_kv_epoch(source->phase.executor, cox_executor_epoch(source->phase.executor)));
    COX_SET(message, role, (uint32_t)cox_group_links_role(source->phase.links));
    int r = cox_executor_remote_info(source->phase.executor, &bytes, &size, err);
    if (!r && request->has_hold)
        r = hold_fill(source, request->hold, arena, message, err);
    if (r)
        return r;
    const ProtobufCBinaryData copy = {.data = cox_arena_alloc(arena, size), .len = size};
    if (copy.data)
        memcpy(copy.data, bytes, size);
    COX_SET(message, remote_info, copy);
    reply->kv_info = message;
    return 0;
}

static int link_change(const struct cox_control_source *source,
                       const CoxswainControl__LinkRequest *request, struct cox_error *err)
{
    uint64_t deadline_ns = cox_control_reply_deadline(request->has_timeout_ms, request->timeout_ms,
                                                      TIMEOUT_MS_DEFAULT);
    if (request->has_remote_info == (request->unlink != NULL))
        return cox_fail(err, COX_INVALID, "a link needs either a group or one to unlink");
    return request->unlink
               ? cox_group_links_unlink(source->phase.links, request->unlink, deadline_ns, err)
               : cox_group_links_link(source->phase.links, request->remote_info.data,
                                      request->remote_info.len, deadline_ns, err);
}

static int link_status_make(const struct cox_control_source *source,
                            const CoxswainControl__LinkStatusRequest *request,
                            struct cox_arena *arena, control_reply *reply, struct cox_error *err)
{
    CoxswainControl__LinkStatusReply *message = cox_message_new(arena, TYPE(link_status_reply));
    struct cox_group_link *list;
    size_t count;
    int r =
        cox_group_links_status(source->phase.links,
                               cox_control_reply_deadline(request->has_timeout_ms,
                                                          request->timeout_ms, TIMEOUT_MS_DEFAULT),
                               &list, &count, err);
    if (r)
        return r;
    if (message)
        message->links = list_make(list, count, arena, &message->n_links);
    cox_group_link_list_free(list, count);
    reply->link_status = message;
    return 0;
}

int cox_control_reply_links(const struct cox_control_source *source, const control_request *request,
                            struct cox_arena *arena, control_reply *reply, struct cox_error *err)
{
    const CoxswainControl__RoleRequest *role = request->role;
    int r;
    if (!source->phase.links)
        return cox_fail(err, COX_UNSUPPORTED, "the group takes no part in transfers: %s",
                        source->phase.refusal);
    switch (request->request_case) {
    case COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_KV_INFO:
        reply->reply_case = COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_KV_INFO;
        return kv_info_make(source, request->kv_info, arena, reply, err);
    case COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_LINK_STATUS:
        reply->reply_case = COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_LINK_STATUS;
        return link_status_make(source, request->link_status, arena, reply, err);
    case COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_LINK:
        r = link_change(source, request->link, err);
        break;
    default:
        r = cox_group_links_set_role(
            source->phase.links, role->role,
            cox_control_reply_deadline(role->has_timeout_ms, role->timeout_ms, TIMEOUT_MS_DEFAULT),
            err);
    }
    reply->reply_case = COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_DONE;
    reply->done = cox_message_new(arena, TYPE(done));
    return r;
}

/* ---- pulls ---- */

CoxswainControl__PullReply *cox_control_reply_pull(const struct cox_prompt_output *result,
                                                   struct cox_arena *arena)
{
    const struct cox_pull_report *report = result->report;
    const struct cox_error *error = result->error;
    CoxswainControl__PullReply *reply = cox_message_new(arena, TYPE(pull_reply));
    if (!reply)
        return NULL;
    /* A request that was refused before it became a pull counts as failed. */
    reply->state = cox_message_lend(cox_pull_state_name(report ? report->state : COX_PULL_FAILED));
    reply->ranks =
        cox_message_list(arena, TYPE(rank_pull), report ? report->rank_count : 0, &reply->n_ranks);
    for (uint32_t i = 0; i < reply->n_ranks; i++) {
        CoxswainControl__RankPull *rank = reply->ranks[i];
        COX_SET(rank, rank, i);
        COX_SET(rank, code, report->ranks[i].code);
        COX_SET(rank, status, report->ranks[i].status);
        COX_SET(rank, copied_bytes, report->ranks[i].copied_bytes);
        COX_SET(rank, copy_ns, report->ranks[i].copy_ns);
        rank->text = cox_message_text(arena, report->ranks[i].text);
    }
    if (result->finish == COX_FINISH_ERROR)
        reply->error = cox_control_reply_error(arena, error ? error->code : -ENOMEM,
                                               error ? error->text : NULL);
    return reply;
}
