#include "channel/base/idioms.h"
#include "proto/executor.pb-c.h"
#include "core.h"
#include "executor_internal.h"
#include "requests_internal.h"

#include <coxswain/requests.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef Coxswain__ExecuteRequest ExecuteRequest;
typedef Coxswain__ExecuteResponse ExecuteResponse;
#define TYPE(name) COXSWAIN__EXECUTE_TYPE__##name
#define RESULT(name) COXSWAIN__EXECUTE_RESPONSE__RESULT_##name

static ExecuteRequest request_of(Coxswain__ExecuteType type)
{
    ExecuteRequest request = COXSWAIN__EXECUTE_REQUEST__INIT;
    COX_SET(&request, execute_type, type);
    return request;
}

static struct cox_submit_options options_of(enum cox_gather gather, uint64_t deadline_ns)
{
    return (struct cox_submit_options){
        .size = sizeof(struct cox_submit_options), .gather = gather, .deadline_ns = deadline_ns};
}

/* ---- requests without reply ---- */

int cox_executor_cleanup(struct cox_executor *executor, const int64_t *seq_ids, size_t count,
                         uint64_t deadline_ns, struct cox_error *err)
{
    Coxswain__TGCleanupRequest cleanup = COXSWAIN__TGCLEANUP_REQUEST__INIT;
    cleanup.seq_ids = (int64_t *)(uintptr_t)seq_ids;
    cleanup.n_seq_ids = count;
    ExecuteRequest request = request_of(TYPE(TEXT_GENERATOR_CLEANUP));
    request.request_case = COXSWAIN__EXECUTE_REQUEST__REQUEST_TEXT_GENERATOR_CLEANUP_REQUEST;
    request.text_generator_cleanup_request = &cleanup;
    struct cox_submit_options options = options_of(COX_GATHER_NONE, deadline_ns);
    return cox_executor_call(executor, &request, &options, NULL, NULL, err);
}

int cox_executor_link(struct cox_executor *executor, const Coxswain__PDLinkRequest *link,
                      uint64_t deadline_ns, struct cox_error *err)
{
    ExecuteRequest request = request_of(TYPE(PD_LINK));
    request.request_case = COXSWAIN__EXECUTE_REQUEST__REQUEST_PD_LINK_REQUEST;
    request.pd_link_request = (Coxswain__PDLinkRequest *)(uintptr_t)link;
    struct cox_submit_options options = options_of(COX_GATHER_NONE, deadline_ns);
    return cox_executor_call(executor, &request, &options, NULL, NULL, err);
}

/* ---- link status ---- */

/* What one rank reports about a cluster; the first entry of a cluster then collects what all ranks
 * report. */
struct link_mention {
    char *id;
    uint32_t rank;
    enum cox_link_state state;
    int32_t code;
    char *text;
    /* ranks that list it */
    uint32_t rank_count;
};

struct link_reader {
    struct link_mention *mentions;
    size_t count, capacity;
    uint32_t replies;
    int status;
    struct cox_error *err;
};

static void link_add(struct link_reader *reader, uint32_t rank, const char *id,
                     enum cox_link_state state, int32_t code, const char *text)
{
    if (reader->status)
        return;
    if (cox_reserve((void **)&reader->mentions, &reader->capacity, reader->count + 1,
                    sizeof *reader->mentions)) {
        reader->status = cox_fail(reader->err, -ENOMEM, "no memory for the link status");
        return;
    }
    char *copy = strdup(id ? id : ""), *reason = NULL;
    if (!copy || (text && asprintf(&reason, "rank %" PRIu32 ": %s", rank, text) < 0)) {
        free(copy);
        reader->status = cox_fail(reader->err, -ENOMEM, "no memory for the link status");
        return;
    }
    reader->mentions[reader->count++] = (struct link_mention){
        .id = copy, .rank = rank, .state = state, .code = code, .text = reason, .rank_count = 1};
}

static int link_compare(const void *a, const void *b)
{
    const struct link_mention *left = a, *right = b;
    int order = strcmp(left->id, right->id);
    return order ? order : (int)left->rank - (int)right->rank;
}

/* Merges the entries of each cluster into one. Sorted, since a rank may report any number of them.
 */
static void link_merge(struct link_reader *reader)
{
    size_t kept = 0;
    if (reader->count)
        qsort(reader->mentions, reader->count, sizeof *reader->mentions, link_compare);
    for (size_t i = 0; i < reader->count; i++) {
        struct link_mention *mention = &reader->mentions[i];
        struct link_mention *first = kept ? &reader->mentions[kept - 1] : NULL;
        if (!first || strcmp(first->id, mention->id) != 0) {
            reader->mentions[kept++] = *mention;
            continue;
        }
        first->rank_count += first->rank != mention->rank;
        first->rank = mention->rank;
        if (cox_link_merge(first->state, mention->state) != first->state) {
            first->state = mention->state;
            first->code = mention->code;
            char *text = first->text;
            first->text = mention->text;
            mention->text = text;
        }
        free(mention->id);
        free(mention->text);
    }
    reader->count = kept;
}

static void link_read_replies(void *context, const struct cox_completion *completion)
{
    struct link_reader *reader = context;
    for (uint32_t rank = 0;
         rank < completion->rank_count && completion->status == 0 && !reader->status; rank++) {
        const ExecuteResponse *response = completion->ranks[rank].response;
        if (!response)
            continue; /* a legacy rank, for which rank 0 replies */
        if (response->result_case != RESULT(PD_LINK_STATUS_RESPONSE) ||
            !response->pd_link_status_response) {
            reader->status = cox_fail(
                reader->err, COX_CORRUPT,
                "rank %" PRIu32 ": the reply to a link status query has no link status", rank);
            return;
        }
        const Coxswain__PDLinkStatusResponse *links = response->pd_link_status_response;
        reader->replies++;
        for (size_t i = 0; i < links->n_failed_link_info; i++)
            link_add(reader, rank, links->failed_link_info[i]->cluster_id, COX_LINK_FAILED,
                     (int32_t)links->failed_link_info[i]->pd_error_code,
                     links->failed_link_info[i]->text);
        for (size_t i = 0; i < links->n_running_link_info; i++)
            link_add(reader, rank, links->running_link_info[i], COX_LINK_RUNNING, 0, NULL);
        for (size_t i = 0; i < links->n_waiting_link_info; i++)
            link_add(reader, rank, links->waiting_link_info[i], COX_LINK_WAITING, 0, NULL);
        for (size_t i = 0; i < links->n_success_link_info; i++)
            link_add(reader, rank, links->success_link_info[i], COX_LINK_SUCCESS, 0, NULL);
    }
}

static int link_fill(struct link_reader *reader, struct cox_link_status *status)
{
    size_t size = reader->count + 1;
    status->failed = calloc(size, sizeof *status->failed);
    status->success = calloc(size, sizeof *status->success);
    status->running = calloc(size, sizeof *status->running);
    status->waiting = calloc(size, sizeof *status->waiting);
    if (!status->failed || !status->success || !status->running || !status->waiting)
        return cox_fail(reader->err, -ENOMEM, "no memory for the link status");
    for (size_t i = 0; i < reader->count; i++) {
        struct link_mention *cluster = &reader->mentions[i];
        /* For a rank that does not list the cluster the link is still to come. */
        enum cox_link_state state =
            cluster->state == COX_LINK_SUCCESS && cluster->rank_count < reader->replies
                ? COX_LINK_WAITING
                : cluster->state;
        char *id = cox_steal_ptr(&cluster->id);
        if (state == COX_LINK_FAILED)
            status->failed[status->failed_count++] = (struct cox_link_failure){
                .cluster_id = id, .code = cluster->code, .text = cox_steal_ptr(&cluster->text)};
        else if (state == COX_LINK_RUNNING)
            status->running[status->running_count++] = id;
        else if (state == COX_LINK_WAITING)
            status->waiting[status->waiting_count++] = id;
        else
            status->success[status->success_count++] = id;
    }
    return 0;
}

int cox_executor_link_status(struct cox_executor *executor, uint64_t deadline_ns,
                             struct cox_link_status *ret_status, struct cox_error *err)
{
    Coxswain__PDLinkStatusRequest query = COXSWAIN__PDLINK_STATUS_REQUEST__INIT;
    ExecuteRequest request = request_of(TYPE(PD_LINK_STATUS_QUERY));
    request.request_case = COXSWAIN__EXECUTE_REQUEST__REQUEST_PD_LINK_STATUS_REQUEST;
    request.pd_link_status_request = &query;
    struct link_reader reader = {.err = err};
    struct cox_submit_options options = options_of(COX_GATHER_ALL, deadline_ns);
    int r = cox_executor_call(executor, &request, &options, link_read_replies, &reader, err);
    if (r == 0)
        r = reader.status;
    struct cox_link_status status = {0};
    link_merge(&reader);
    if (r == 0)
        r = link_fill(&reader, &status);
    for (size_t i = 0; i < reader.count; i++) {
        free(reader.mentions[i].id);
        free(reader.mentions[i].text);
    }
    free(reader.mentions);
    if (r)
        cox_link_status_deinit(&status);
    else
        *ret_status = status;
    return r;
}

/* ---- pull KV ---- */

struct pull_reader {
    struct cox_pull_result *results;
    size_t count;
    int status;
    struct cox_error *err;
};

static int32_t pull_find(const Coxswain__PullKVResponse *response, const char *request_id)
{
    for (size_t i = 0; i < response->n_pull_kv_results; i++) {
        const char *id = response->pull_kv_results[i]->request_id;
        if (id && strcmp(id, request_id) == 0)
            return (int32_t)response->pull_kv_results[i]->pd_error_code;
    }
    return COXSWAIN__PDERROR_CODE__PD_PULL_KV_UNKNOWN_ERROR;
}

/* A pull is cancelled, and its result found, by its id: with two of one id the second would get the
 * first one's. */
static bool pull_is_known(const struct cox_pull_result *results, size_t count,
                          const char *request_id)
{
    bool known = false;
    for (size_t i = 0; i < count && !known; i++)
        known = strcmp(results[i].request_id, request_id) == 0;
    return known;
}

static void pull_read_replies(void *context, const struct cox_completion *completion)
{
    struct pull_reader *reader = context;
    for (uint32_t rank = 0;
         rank < completion->rank_count && completion->status == 0 && !reader->status; rank++) {
        const ExecuteResponse *response = completion->ranks[rank].response;
        if (!response || response->result_case != RESULT(PULL_KV_RESPONSE) ||
            !response->pull_kv_response) {
            reader->status =
                cox_fail(reader->err, COX_CORRUPT,
                         "rank %" PRIu32 ": the reply to a pull has no pull results", rank);
            return;
        }
        for (size_t i = 0; i < reader->count; i++)
            if (reader->results[i].code == 0)
                reader->results[i].code =
                    pull_find(response->pull_kv_response, reader->results[i].request_id);
    }
}

/* One allocation, with the ids behind the results. */
static int pull_results_new(const Coxswain__PullKVRequest *pull,
                            struct cox_pull_result **ret_results, struct cox_error *err)
{
    const size_t count = pull->n_pull_kv_infos;
    size_t size = (count + 1) * sizeof(struct cox_pull_result);
    for (size_t i = 0; i < count; i++) {
        const Coxswain__SequenceGroupMetadata *metadata =
            pull->pull_kv_infos[i]->seq_group_metadata;
        if (!metadata || !metadata->request_id || !metadata->request_id[0])
            return cox_fail(err, COX_INVALID, "pull %zu has no request id", i);
        size += strlen(metadata->request_id) + 1;
    }
    _cox_cleanup_(cox_free_ptr) struct cox_pull_result *results = calloc(1, size);
    if (!results)
        return cox_fail(err, -ENOMEM, "no memory for the pull results");
    char *id = (char *)(results + count + 1);
    for (size_t i = 0; i < count; i++) {
        const char *given = pull->pull_kv_infos[i]->seq_group_metadata->request_id;
        if (pull_is_known(results, i, given))
            return cox_fail(err, COX_INVALID,
                            "pull %zu has the request id '%.100s', which one before it has", i,
                            given);
        results[i].request_id = id;
        id = stpcpy(id, given) + 1;
    }
    *ret_results = cox_steal_ptr(&results);
    return 0;
}

int cox_executor_pull_kv(struct cox_executor *executor, const Coxswain__PullKVRequest *pull,
                         uint64_t deadline_ns, struct cox_pull_result **ret_results,
                         size_t *ret_count, struct cox_error *err)
{
    struct pull_reader reader = {.count = pull->n_pull_kv_infos, .err = err};
    int r = pull_results_new(pull, &reader.results, err);
    if (r == 0) {
        ExecuteRequest request = request_of(TYPE(KV_TRANSFER));
        request.request_case = COXSWAIN__EXECUTE_REQUEST__REQUEST_PULL_KV_REQUEST;
        request.pull_kv_request = (Coxswain__PullKVRequest *)(uintptr_t)pull;
        struct cox_submit_options options = options_of(COX_GATHER_ALL, deadline_ns);
        r = cox_executor_call(executor, &request, &options, pull_read_replies, &reader, err);
    }
    if (r == 0)
        r = reader.status;
    if (r) {
        free(reader.results);
        return r;
    }
    *ret_results = reader.results;
    *ret_count = reader.count;
    return 0;
}

/* ---- LoRA ---- */

struct lora_reader {
    struct cox_lora_result *results;
    int status;
    struct cox_error *err;
};

static void lora_read_replies(void *context, const struct cox_completion *completion)
{
    struct lora_reader *reader = context;
    for (uint32_t rank = 0; rank < completion->rank_count; rank++) {
        const struct cox_rank_result *result = &completion->ranks[rank];
        const ExecuteResponse *response = result->response;
        reader->results[rank].asked = true;
        if (result->outcome != COX_OUTCOME_OK)
            continue; /* the caller reports it */
        if (!response && rank > 0) {
            reader->results[rank] = reader->results[0]; /* a legacy rank that rank 0 speaks for */
        } else if (!response || response->result_case != RESULT(LORA_OPERATION_RESPONSE) ||
                   !response->lora_operation_response) {
            if (completion->status)
                continue; /* the error that ended the request is reported, not this */
            reader->status = cox_fail(
                reader->err, COX_CORRUPT,
                "rank %" PRIu32 ": the reply to a LoRA operation has no LoRA status", rank);
        } else {
            const Coxswain__LoraOperationResponse *lora = response->lora_operation_response;
            reader->results[rank].status = (int32_t)lora->lora_op_status;
            reader->results[rank].digest = lora->has_digest ? lora->digest : 0;
            snprintf(reader->results[rank].text, sizeof reader->results[rank].text, "%s",
                     lora->text ? lora->text : "");
            cox_text_trim(reader->results[rank].text);
        }
    }
}

const char *cox_lora_status_name(int32_t status)
{
    const ProtobufCEnumValue *value =
        protobuf_c_enum_descriptor_get_value(&coxswain__lora_operation_status__descriptor, status);
    return value ? value->name : status == -1 ? "no reply" : "an unknown status";
}

/* For ranks with the same status and text the first one's text is enough. */
static bool lora_said(const struct cox_lora_result *results, uint32_t rank)
{
    bool said = !results[rank].text[0];
    for (uint32_t other = 0; !said && other < rank; other++)
        said = strcmp(results[other].text, results[rank].text) == 0;
    return said;
}

int cox_executor_lora_results(struct cox_executor *executor,
                              const Coxswain__LoraOperationRequest *lora, uint64_t deadline_ns,
                              struct cox_lora_result *ret_results, struct cox_error *err)
{
    ExecuteRequest request = request_of(TYPE(LORA_OPERATION));
    request.request_case = COXSWAIN__EXECUTE_REQUEST__REQUEST_LORA_OPERATION_REQUEST;
    request.lora_operation_request = (Coxswain__LoraOperationRequest *)(uintptr_t)lora;
    /* Read now: after the call the executor may be freed. */
    uint32_t rank_count = cox_executor_rank_count(executor);
    request.has_deadline_ns = cox_executor_limits(executor)->extensions;
    request.deadline_ns = deadline_ns;
    for (uint32_t rank = 0; rank < rank_count; rank++)
        ret_results[rank] = (struct cox_lora_result){.status = -1};
    struct lora_reader reader = {.results = ret_results, .err = err};
    struct cox_submit_options options = options_of(COX_GATHER_ALL, deadline_ns);
    int r = cox_executor_call(executor, &request, &options, lora_read_replies, &reader, err);
    if (r == 0)
        r = reader.status;
    if (r)
        return r;
    char text[768] = "";
    for (uint32_t rank = 0; rank < rank_count; rank++) {
        const struct cox_lora_result *result = &ret_results[rank];
        if (result->status == COXSWAIN__LORA_OPERATION_STATUS__LORA_CMD_SUCCESS)
            continue;
        size_t used = strlen(text);
        snprintf(text + used, sizeof text - used, "%srank %" PRIu32 " says %s%s%s%s",
                 used ? ", " : "", rank, cox_lora_status_name(result->status),
                 lora_said(ret_results, rank) ? "" : " (",
                 lora_said(ret_results, rank) ? "" : result->text,
                 lora_said(ret_results, rank) ? "" : ")");
    }
    cox_text_trim(text);
    return text[0] ? cox_fail(err, COX_REJECTED, "LoRA operation on '%s': %s",
                              lora->lora_name ? lora->lora_name : "", text)
                   : 0;
}
