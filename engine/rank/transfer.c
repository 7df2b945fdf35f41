#include "transfer.h"

#include "channel/base/idioms.h"
#include "links.h"
#include "pulls.h"

#include <coxswain/base.h>

#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define ROLE(name) COXSWAIN__PDROLE__##name##_ROLE
#define CODE(name) COXSWAIN__PDERROR_CODE__##name
/* Texts of results are cut to this, so that those of many requests fit a slot. */
#define TEXT_SIZE_MAX 400

struct cox_transfer {
    struct cox_transfer_options options;
    struct cox_links *links;
    struct cox_pulls *pulls;
    /* rank in the lower half, rank_count in the upper; 0: unknown. relaxed: one word has it all */
    _Atomic uint64_t place;
    /* relaxed: carries no other data */
    _Atomic int role;
    /* relaxed: likewise */
    _Atomic uint64_t clears;
};

/* ---- constructor and destructor ---- */

int cox_transfer_new(const struct cox_transfer_options *options, struct cox_transfer **ret_transfer)
{
    struct cox_transfer *transfer = calloc(1, sizeof *transfer);
    if (!transfer)
        return -ENOMEM;
    transfer->options = *options;
    int r = cox_links_new(&options->log, &transfer->links);
    if (r == 0)
        r = cox_pulls_new(&transfer->pulls);
    if (r) {
        cox_transfer_free(transfer);
        return r;
    }
    *ret_transfer = transfer;
    return 0;
}

struct cox_transfer *cox_transfer_free(struct cox_transfer *transfer)
{
    if (!transfer)
        return NULL;
    cox_links_free(transfer->links);
    cox_pulls_free(transfer->pulls);
    free(transfer);
    return NULL;
}

void cox_transfer_open(struct cox_transfer *transfer, struct cox_cache *cache,
                       const struct cox_kv_layout *layout)
{
    atomic_store_explicit(&transfer->place, (uint64_t)layout->rank_count << 32 | layout->rank,
                          memory_order_relaxed);
    cox_links_use_layout(transfer->links, layout);
    cox_pulls_open(transfer->pulls, cache);
}

int cox_transfer_close(struct cox_transfer *transfer, uint64_t deadline_ns, struct cox_error *err)
{
    cox_pulls_open(transfer->pulls, NULL);
    return cox_transfer_clear(transfer, deadline_ns, err);
}

int cox_transfer_clear(struct cox_transfer *transfer, uint64_t deadline_ns, struct cox_error *err)
{
    atomic_fetch_add_explicit(&transfer->clears, 1, memory_order_relaxed);
    return cox_pulls_clear(transfer->pulls, deadline_ns, err);
}

/* ---- links ---- */

static const char *role_name(int role)
{
    static const char *const names[] = {"unknown", "prefill", "decode", "standard"};
    return role >= 0 && role <= ROLE(STANDARD) ? names[role] : "none that exists";
}

static void transfer_take_role(struct cox_transfer *transfer,
                               const Coxswain__PDLinkRequest__PDLinkInfo *info)
{
    const int before = atomic_load_explicit(&transfer->role, memory_order_relaxed);
    const int role = (int)info->pd_role;
    if (!info->has_pd_role || role == before)
        return;
    /* Without change_role the role applies only to ranks that have none. */
    if (!info->change_role && before != ROLE(UNKNOWN))
        return;
    if (role != ROLE(PREFILL) && role != ROLE(DECODE) && role != ROLE(STANDARD)) {
        cox_log_write(&transfer->options.log, 4,
                      "a switch to role %d is refused: this rank's stays %s", role,
                      role_name(before));
        return;
    }
    atomic_store_explicit(&transfer->role, role, memory_order_relaxed);
    cox_log_write(&transfer->options.log, 6, "role: %s, was %s", role_name(role),
                  role_name(before));
}

static const char *cluster_of(const Coxswain__RemoteInfo *info)
{
    const char *cluster = info->n_host_info ? info->host_info[0]->cluster_id : NULL;
    return cluster ? cluster : "";
}

/* Selects the pool of the remote rank with this rank's number. */
static int remote_read(const struct cox_transfer *transfer, const Coxswain__RemoteInfo *info,
                       struct cox_kv_pool *ret_pool, struct cox_error *err)
{
    const uint64_t place = atomic_load_explicit(&transfer->place, memory_order_relaxed);
    const uint32_t rank = (uint32_t)place, rank_count = (uint32_t)(place >> 32);
    if (info->n_kv_pools == 0)
        return cox_fail(err, COX_UNSUPPORTED, "the request does not describe its KV caches");
    if (!place)
        return cox_fail(err, COX_STATE, "this rank has no KV cache to pull into: init first");
    if (info->n_kv_pools != rank_count)
        return cox_fail(err, COX_INVALID,
                        "its KV blocks are laid out in another way: rank_count %zu there, %" PRIu32
                        " here",
                        info->n_kv_pools, rank_count);
    return cox_kv_pool_read(info->kv_pools[rank], ret_pool, err);
}

static void transfer_link_one(struct cox_transfer *transfer, const Coxswain__RemoteInfo *info)
{
    struct cox_kv_pool pool;
    struct cox_error why = {0}, err = {0};
    const int r = remote_read(transfer, info, &pool, &why);
    const struct cox_link_target target = {
        .cluster = cluster_of(info),
        .epoch = info->epoch,
        .kv = r ? NULL : &pool,
        .control_socket = info->control_socket,
        .error = &why,
    };
    if (cox_links_set(transfer->links, &target, &err))
        cox_log_write(&transfer->options.log, 4, "link to '%.255s': %s", target.cluster, err.text);
}

static void transfer_unlink_one(struct cox_transfer *transfer, const Coxswain__RemoteInfo *info)
{
    if (cox_links_remove(transfer->links, cluster_of(info)))
        cox_log_write(&transfer->options.log, 6, "unlink of '%.255s': there is no such link",
                      cluster_of(info));
}

void cox_transfer_link(struct cox_transfer *transfer, const Coxswain__PDLinkRequest *request)
{
    for (size_t i = 0; i < request->n_cancelled_pulls; i++)
        if (!cox_pulls_cancel(transfer->pulls, request->cancelled_pulls[i]))
            cox_log_write(&transfer->options.log, 4, "the cancel of pull '%.100s' was lost",
                          request->cancelled_pulls[i]);
    for (size_t i = 0; i < request->n_pd_link_info; i++) {
        const Coxswain__PDLinkRequest__PDLinkInfo *info = request->pd_link_info[i];
        transfer_take_role(transfer, info);
        for (size_t k = 0; k < info->n_unlink_info; k++)
            transfer_unlink_one(transfer, info->unlink_info[k]);
        for (size_t k = 0; k < info->n_link_info; k++)
            transfer_link_one(transfer, info->link_info[k]);
    }
}

/* ---- status ---- */

struct listing {
    struct cox_arena *arena;
    Coxswain__PDLinkStatusResponse *response;
    /* out of memory */
    bool failed;
};

static void list_failed(struct listing *listing, char *cluster, const struct cox_link *link)
{
    Coxswain__PDLinkStatusResponse__FailedLinkInfo *info =
        cox_arena_alloc(listing->arena, sizeof *info);
    if (!info) {
        listing->failed = true;
        return;
    }
    coxswain__pdlink_status_response__failed_link_info__init(info);
    info->cluster_id = cluster;
    COX_SET(info, pd_error_code, CODE(PD_LINK_ERROR));
    info->text = cox_arena_strdup(listing->arena, link->error.text);
    listing->response->failed_link_info[listing->response->n_failed_link_info++] = info;
}

static void list_link(void *context, const struct cox_link *link)
{
    struct listing *listing = context;
    Coxswain__PDLinkStatusResponse *response = listing->response;
    char *cluster = cox_arena_strdup(listing->arena, link->cluster);
    if (!cluster)
        listing->failed = true;
    if (listing->failed)
        return;
    switch (link->state) {
    case COX_LINK_WAITING:
        response->waiting_link_info[response->n_waiting_link_info++] = cluster;
        break;
    case COX_LINK_RUNNING:
        response->running_link_info[response->n_running_link_info++] = cluster;
        break;
    case COX_LINK_SUCCESS:
        response->success_link_info[response->n_success_link_info++] = cluster;
        break;
    case COX_LINK_FAILED:
        list_failed(listing, cluster, link);
        break;
    }
}

int cox_transfer_status(struct cox_transfer *transfer, struct cox_arena *arena,
                        Coxswain__PDLinkStatusResponse *response, struct cox_error *err)
{
    struct listing listing = {.arena = arena, .response = response};
    const size_t size = 2 * COX_LINK_COUNT_MAX * sizeof(void *);
    response->failed_link_info = cox_arena_alloc(arena, size);
    response->success_link_info = cox_arena_alloc(arena, size);
    response->running_link_info = cox_arena_alloc(arena, size);
    response->waiting_link_info = cox_arena_alloc(arena, size);
    listing.failed = !response->failed_link_info || !response->success_link_info ||
                     !response->running_link_info || !response->waiting_link_info;
    if (!listing.failed)
        cox_links_each(transfer->links, list_link, &listing);
    return listing.failed ? cox_fail(err, COX_TOO_LARGE, "no memory for the list of links") : 0;
}

/* ---- pulls ---- */

/* One request of a message. */
struct pulling {
    struct cox_transfer *transfer;
    struct cox_arena *arena;
    /* value of clears when the message arrived */
    uint64_t clears;
};

static bool pulling_cancelled(void *context)
{
    const struct pulling *pulling = context;
    const struct cox_transfer *transfer = pulling->transfer;
    return atomic_load_explicit(&transfer->clears, memory_order_relaxed) != pulling->clears ||
           (transfer->options.cancelled && transfer->options.cancelled(transfer->options.context));
}

static const char *id_of(const Coxswain__PullKVRequest__PullKVInfo *info)
{
    const char *id = info->seq_group_metadata ? info->seq_group_metadata->request_id : NULL;
    return id ? id : "";
}

/* Counts all tables of all managers: this rank has one cache, which contains the blocks of all. */
static int tables_count(const Coxswain__PullKVRequest__PullKVInfo *info, uint32_t *ret_count,
                        struct cox_error *err)
{
    uint64_t count = 0;
    if (info->n_src_block_tables != info->n_dst_block_tables || info->n_src_block_tables == 0)
        return cox_fail(
            err, COX_INVALID,
            "%zu block tables there and %zu here: one for every manager is required on each side",
            info->n_src_block_tables, info->n_dst_block_tables);
    if (info->n_src_block_tables > COX_BLOCK_TABLE_COUNT_MAX)
        return cox_fail(err, COX_TOO_LARGE, "%zu block tables: at most %d",
                        info->n_src_block_tables, COX_BLOCK_TABLE_COUNT_MAX);
    for (size_t i = 0; i < info->n_src_block_tables; i++) {
        const int64_t from = cox_wire_int64_count(info->src_block_tables[i].len);
        const int64_t to = cox_wire_int64_count(info->dst_block_tables[i].len);
        if (from < 0 || to < 0)
            return cox_fail(err, COX_CORRUPT, "block table %zu is not an int64 array", i);
        if (from != to)
            return cox_fail(err, COX_INVALID,
                            "block table %zu has %" PRId64 " blocks there and %" PRId64 " here", i,
                            from, to);
        count += (uint64_t)from;
    }
    if (count == 0 || count > UINT32_MAX)
        return cox_fail(err, COX_INVALID, "block tables of %" PRIu64 " blocks", count);
    *ret_count = (uint32_t)count;
    return 0;
}

static int tables_read(const Coxswain__PullKVRequest__PullKVInfo *info, struct cox_pull_pair *pairs,
                       struct cox_error *err)
{
    for (size_t t = 0; t < info->n_src_block_tables; t++) {
        const int64_t count = cox_wire_int64_count(info->src_block_tables[t].len);
        for (size_t i = 0; i < (size_t)count; i++, pairs++) {
            const int64_t from = cox_wire_int64_get(info->src_block_tables[t].data, i);
            const int64_t to = cox_wire_int64_get(info->dst_block_tables[t].data, i);
            if (from < 0 || from > INT32_MAX || to < 0 || to > INT32_MAX)
                return cox_fail(err, COX_INVALID,
                                "block table %zu: block %" PRId64 " to block %" PRId64
                                ": such blocks do not exist",
                                t, from, to);
            *pairs = (struct cox_pull_pair){(uint32_t)from, (uint32_t)to};
        }
    }
    return 0;
}

/* 0 in a message means absent or "never". */
static uint64_t time_or_never(uint64_t time_ns)
{
    return time_ns ? time_ns : COX_DEADLINE_NEVER;
}

static int pull_prepare(struct pulling *pulling, const Coxswain__PullKVRequest__PullKVInfo *info,
                        struct cox_pull *pull, struct cox_error *err)
{
    const int role = atomic_load_explicit(&pulling->transfer->role, memory_order_relaxed);
    if (role == ROLE(PREFILL))
        return cox_fail(err, COX_STATE, "this rank's role is prefill: it does not pull");
    if (strlen(id_of(info)) > COX_REQUEST_ID_SIZE_MAX)
        return cox_fail(err, COX_TOO_LARGE, "a request id of %zu bytes: at most %d",
                        strlen(id_of(info)), COX_REQUEST_ID_SIZE_MAX);
    int r = tables_count(info, &pull->count, err);
    if (r)
        return r;
    struct cox_pull_pair *pairs =
        cox_arena_alloc(pulling->arena, pull->count * sizeof(struct cox_pull_pair));
    if (!pairs)
        return cox_fail(err, COX_TOO_LARGE, "no memory for %" PRIu32 " blocks", pull->count);
    pull->request_id = id_of(info);
    pull->pairs = pairs;
    pull->from_user = info->has_src_sequence ? cox_kv_user_of(info->src_sequence) : 0;
    pull->to_user = info->has_dst_sequence ? cox_kv_user_of(info->dst_sequence) : 0;
    pull->deadline_ns = time_or_never(info->deadline_ns);
    pull->lease_ns = time_or_never(info->lease_ns);
    pull->cancelled = pulling_cancelled;
    pull->context = pulling;
    return tables_read(info, pairs, err);
}

static int pull_one(struct pulling *pulling, const Coxswain__PullKVRequest__PullKVInfo *info,
                    struct cox_pull *pull, int32_t *ret_code, struct cox_error *err)
{
    struct cox_links *links = pulling->transfer->links;
    const char *cluster = info->cluster_id ? info->cluster_id : "";
    int r = cox_links_take(links, cluster, info->epoch, &pull->link, err);
    *ret_code = r == COX_NOT_FOUND ? CODE(PD_PULL_KV_UNKNOWN_ERROR) : CODE(PD_PULL_KV_ERROR);
    if (r)
        return r;
    r = pull_prepare(pulling, info, pull, err);
    if (r == 0)
        r = cox_pulls_run(pulling->transfer->pulls, pull, err);
    cox_links_release(links, pull->link);
    if (r == 0)
        *ret_code = CODE(SUCCESS);
    return r;
}

static int result_fill(struct pulling *pulling, const Coxswain__PullKVRequest__PullKVInfo *info,
                       Coxswain__PullKVResponse__PullKVResult *result, struct cox_error *err)
{
    struct cox_pull pull = {0};
    struct cox_error why = {0};
    int32_t code = CODE(PD_PULL_KV_ERROR);
    const int r = pull_one(pulling, info, &pull, &code, &why);
    coxswain__pull_kvresponse__pull_kvresult__init(result);
    result->request_id = cox_arena_strdup(pulling->arena, id_of(info));
    COX_SET(result, pd_error_code, (Coxswain__PDErrorCode)code);
    COX_SET(result, status, r);
    COX_SET(result, copied_bytes, pull.copied_bytes);
    COX_SET(result, copy_ns, pull.copy_ns);
    if (r) {
        why.text[TEXT_SIZE_MAX] = '\0';
        cox_text_trim(why.text);
        result->text =
            cox_arena_strdup(pulling->arena, why.text[0] ? why.text : cox_status_text(r));
    }
    return result->request_id && (r == 0 || result->text)
               ? 0
               : cox_fail(err, COX_TOO_LARGE, "no memory for the results");
}

int cox_transfer_pull(struct cox_transfer *transfer, const Coxswain__PullKVRequest *request,
                      struct cox_arena *arena, Coxswain__PullKVResponse *response,
                      struct cox_error *err)
{
    const size_t count = request->n_pull_kv_infos;
    struct pulling pulling = {
        .transfer = transfer,
        .arena = arena,
        .clears = atomic_load_explicit(&transfer->clears, memory_order_relaxed),
    };
    Coxswain__PullKVResponse__PullKVResult *results =
        cox_arena_alloc(arena, (count + 1) * sizeof *results);
    response->pull_kv_results =
        cox_arena_alloc(arena, (count + 1) * sizeof *response->pull_kv_results);
    if (!results || !response->pull_kv_results)
        return cox_fail(err, COX_TOO_LARGE, "no memory for %zu results", count);
    for (size_t i = 0; i < count; i++) {
        int r = result_fill(&pulling, request->pull_kv_infos[i], &results[i], err);
        if (r)
            return r;
        response->pull_kv_results[i] = &results[i];
        response->n_pull_kv_results++;
    }
    return 0;
}
