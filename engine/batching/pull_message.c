#include "pull_message.h"

#include "channel/base/idioms.h"
#include "proto/executor.pb-c.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

typedef Coxswain__ExecuteRequest ExecuteRequest;
typedef Coxswain__ExecuteResponse ExecuteResponse;
typedef Coxswain__PullKVRequest PullRequest;
typedef Coxswain__PullKVRequest__PullKVInfo PullInfo;
typedef Coxswain__SequenceGroupMetadata Metadata;
typedef Coxswain__PullKVResponse__PullKVResult PullResult;

#define TYPE(name) COXSWAIN__EXECUTE_TYPE__##name
#define CODE(name) COXSWAIN__PDERROR_CODE__##name
#define SET(message, field, value) ((message)->has_##field = true, (message)->field = (value))

/* ---- requests ---- */

static int table_fill(struct cox_arena *arena, const int32_t *blocks, uint32_t count,
                      ProtobufCBinaryData **ret_table)
{
    ProtobufCBinaryData *table = cox_arena_alloc(arena, sizeof *table);
    uint8_t *bytes = cox_arena_alloc(arena, count * sizeof(int64_t));
    if (!table || !bytes)
        return -ENOMEM;
    for (uint32_t i = 0; i < count; i++)
        cox_wire_int64_set(bytes, i, blocks[i]);
    *table = (ProtobufCBinaryData){.data = bytes, .len = count * sizeof(int64_t)};
    *ret_table = table;
    return 0;
}

static int info_fill(struct cox_arena *arena, const struct cox_pull_item *item, PullInfo *info)
{
    Metadata *metadata = cox_arena_alloc(arena, sizeof *metadata);
    coxswain__pull_kvrequest__pull_kvinfo__init(info);
    if (!metadata ||
        table_fill(arena, item->source->blocks, item->source->block_count,
                   &info->src_block_tables) ||
        table_fill(arena, item->blocks, item->source->block_count, &info->dst_block_tables))
        return -ENOMEM;
    info->n_src_block_tables = info->n_dst_block_tables = 1;
    coxswain__sequence_group_metadata__init(metadata);
    metadata->request_id = (char *)(uintptr_t)item->id;
    info->seq_group_metadata = metadata;
    info->cluster_id = (char *)(uintptr_t)item->source->cluster_id;
    SET(info, src_sequence, item->source->sequence);
    SET(info, dst_sequence, item->sequence);
    SET(info, deadline_ns, item->deadline_ns);
    SET(info, lease_ns, item->source->lease_ns);
    SET(info, epoch, item->source->epoch);
    return 0;
}

static ExecuteRequest *request_new(struct cox_arena *arena, Coxswain__ExecuteType type)
{
    ExecuteRequest *request = cox_arena_alloc(arena, sizeof *request);
    if (!request)
        return NULL;
    coxswain__execute_request__init(request);
    SET(request, execute_type, type);
    return request;
}

int cox_pull_message(struct cox_arena *arena, const struct cox_pull_item *items, size_t count,
                     struct Coxswain__ExecuteRequest **ret_request)
{
    ExecuteRequest *request = request_new(arena, TYPE(KV_TRANSFER));
    PullRequest *pull = cox_arena_alloc(arena, sizeof *pull);
    PullInfo *infos = cox_arena_alloc(arena, count * sizeof *infos);
    PullInfo **list = cox_arena_alloc(arena, count * sizeof(PullInfo *));
    if (!request || !pull || !infos || !list)
        return -ENOMEM;
    coxswain__pull_kvrequest__init(pull);
    pull->pull_kv_infos = list;
    pull->n_pull_kv_infos = count;
    for (size_t i = 0; i < count; i++) {
        list[i] = &infos[i];
        int r = info_fill(arena, &items[i], &infos[i]);
        if (r)
            return r;
    }
    request->request_case = COXSWAIN__EXECUTE_REQUEST__REQUEST_PULL_KV_REQUEST;
    request->pull_kv_request = pull;
    *ret_request = request;
    return 0;
}

int cox_pull_cancel_message(struct cox_arena *arena, const char *const *ids, size_t count,
                            struct Coxswain__ExecuteRequest **ret_request)
{
    ExecuteRequest *request = request_new(arena, TYPE(PD_LINK));
    Coxswain__PDLinkRequest *link = cox_arena_alloc(arena, sizeof *link);
    char **list = cox_arena_alloc(arena, count * sizeof *list);
    if (!request || !link || !list)
        return -ENOMEM;
    coxswain__pdlink_request__init(link);
    for (size_t i = 0; i < count; i++)
        list[i] = (char *)(uintptr_t)ids[i];
    link->cancelled_pulls = list;
    link->n_cancelled_pulls = count;
    request->request_case = COXSWAIN__EXECUTE_REQUEST__REQUEST_PD_LINK_REQUEST;
    request->pd_link_request = link;
    *ret_request = request;
    return 0;
}

/* ---- replies ---- */

static const PullResult *result_find(const ExecuteResponse *response, const char *id)
{
    if (!response || response->result_case != COXSWAIN__EXECUTE_RESPONSE__RESULT_PULL_KV_RESPONSE ||
        !response->pull_kv_response)
        return NULL;
    const Coxswain__PullKVResponse *pulls = response->pull_kv_response;
    for (size_t i = 0; i < pulls->n_pull_kv_results; i++)
        if (pulls->pull_kv_results[i]->request_id &&
            strcmp(pulls->pull_kv_results[i]->request_id, id) == 0)
            return pulls->pull_kv_results[i];
    return NULL;
}

/* A missing field is not success. */
static void rank_read(const struct cox_rank_result *reply, const char *id,
                      struct cox_pull_rank *rank)
{
    const PullResult *result = result_find(reply->response, id);
    *rank = (struct cox_pull_rank){.code = CODE(PD_PULL_KV_UNKNOWN_ERROR)};
    if (!result) {
        snprintf(rank->text, sizeof rank->text, "%s",
                 reply->text ? reply->text : "the reply does not contain the pull");
        rank->status = reply->outcome == COX_OUTCOME_DEAD   ? COX_PEER_DEAD
                       : reply->outcome == COX_OUTCOME_LATE ? COX_TIMEOUT
                                                            : COX_REJECTED;
        return;
    }
    rank->replied = true;
    if (result->has_pd_error_code)
        rank->code = (int32_t)result->pd_error_code;
    rank->status = result->has_status && result->status < COX_STATUS_COUNT ? result->status : 0;
    rank->copied_bytes = result->copied_bytes;
    rank->copy_ns = result->copy_ns;
    snprintf(rank->text, sizeof rank->text, "%s", result->text ? result->text : "");
    cox_text_trim(rank->text);
    if (rank->code && !rank->status)
        rank->status = COX_REJECTED;
}

static enum cox_pull_state state_of(int status)
{
    return status == 0               ? COX_PULL_SUCCESS
           : status == COX_TIMEOUT   ? COX_PULL_TIMEOUT
           : status == COX_PEER_DEAD ? COX_PULL_PEER_DEAD
                                     : COX_PULL_FAILED;
}

void cox_pull_read(const struct cox_completion *completion, const char *id,
                   struct cox_pull_report *report)
{
    report->state = COX_PULL_SUCCESS;
    for (uint32_t i = 0; i < report->rank_count && i < completion->rank_count; i++)
        rank_read(&completion->ranks[i], id, &report->ranks[i]);
    if (completion->status) {
        report->state = state_of(completion->status);
        cox_fail(&report->error, completion->status, "%s",
                 completion->text ? completion->text : cox_status_text(completion->status));
        return;
    }
    for (uint32_t i = 0; i < report->rank_count; i++) {
        const struct cox_pull_rank *rank = &report->ranks[i];
        if (rank->code == 0)
            continue;
        report->state = state_of(rank->status);
        cox_fail(&report->error, rank->status, "rank %" PRIu32 ": %s", i,
                 rank->text[0] ? rank->text : cox_status_text(rank->status));
        return;
    }
}
