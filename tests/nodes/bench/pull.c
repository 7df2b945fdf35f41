#include "pull.h"

#include "coordinator/executor/requests_internal.h"
#include "engine/compute/cache.h"
#include "engine/rank/transfer.h"
#include "proto/executor.pb-c.h"

#include <coxswain/handle.h>
#include <coxswain/requests.h>
#include <coxswain/worker.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define PATIENCE_MS 10000
/* Whose the blocks are, there and here. */
#define SOURCE_SEQUENCE 7
#define TARGET_SEQUENCE 9
/* What the ranks are asked to do. */
#define FILL "fill"
#define CHECK "check"

typedef Coxswain__PullKVRequest__PullKVInfo pull_info;

/* ---- the rank ---- */

/* A block has PULL_BLOCK_SIZE bytes: keys and values of floats. */
static const struct cox_cache_geometry geometry = {
    .layer_count = 8, .kv_head_count = 4, .head_dim = 128, .block_size = 32};

struct rank {
    uint32_t block_count;
    struct cox_worker *worker;
    struct cox_exporter *exporter;
    struct cox_cache *cache;
    struct cox_transfer *transfer;
};

static bool is_cancelled(void *context)
{
    const struct rank *rank = context;
    return cox_worker_cancelled(rank->worker, COX_CHANNEL_TRANSFER, 0);
}

static int rank_init(void *context, const struct cox_init_request *request,
                     struct cox_init_result *result, struct cox_error *err)
{
    struct rank *rank = context;
    struct cox_handle handle;
    (void)request;
    int r =
        cox_exporter_export(rank->exporter, cox_kv_blocks_info(cox_cache_kv_blocks(rank->cache)).fd,
                            0, 0, &handle, err);
    if (r)
        return r;
    result->npu_block_count = rank->block_count;
    result->kv_pool.block_count = rank->block_count;
    memcpy(result->kv_pool.handle, &handle, sizeof handle);
    result->kv_pool.layout = (struct cox_kv_layout){
        .rank_count = 1,
        .layer_count = geometry.layer_count,
        .kv_head_count = geometry.kv_head_count,
        .head_dim = geometry.head_dim,
        .block_size = geometry.block_size,
        .element_bytes = sizeof(float),
        .block_bytes = PULL_BLOCK_SIZE,
        .model_digest = 1,
    };
    cox_transfer_open(rank->transfer, rank->cache, &result->kv_pool.layout);
    return 0;
}

static void rank_link(void *context, const Coxswain__PDLinkRequest *request)
{
    const struct rank *rank = context;
    cox_transfer_link(rank->transfer, request);
}

static int rank_link_status(void *context, struct cox_arena *arena,
                            Coxswain__PDLinkStatusResponse *response, struct cox_error *err)
{
    const struct rank *rank = context;
    return cox_transfer_status(rank->transfer, arena, response, err);
}

static int rank_pull(void *context, const Coxswain__PullKVRequest *request, struct cox_arena *arena,
                     Coxswain__PullKVResponse *response, struct cox_error *err)
{
    const struct rank *rank = context;
    return cox_transfer_pull(rank->transfer, request, arena, response, err);
}

/* Differs between blocks, and within one. */
static uint32_t word_of(uint32_t block, size_t at)
{
    return block * UINT32_C(2654435761) + (uint32_t)at;
}

static int block_check(const struct rank *rank, uint32_t block, struct cox_error *err)
{
    const uint32_t *words = cox_cache_block(rank->cache, block);
    if (cox_kv_blocks_user(cox_cache_kv_blocks(rank->cache), block) != TARGET_SEQUENCE)
        return cox_fail(err, COX_STALE, "block %" PRIu32 " is not the sequence's", block);
    for (size_t i = 0; i < PULL_BLOCK_SIZE / sizeof *words; i++)
        if (words[i] != word_of(block, i))
            return cox_fail(err, COX_CORRUPT, "block %" PRIu32 " has other bytes", block);
    return 0;
}

static void block_fill(const struct rank *rank, uint32_t block)
{
    uint32_t *words = cox_cache_block(rank->cache, block);
    cox_cache_take(rank->cache, block);
    for (size_t i = 0; i < PULL_BLOCK_SIZE / sizeof *words; i++)
        words[i] = word_of(block, i);
    cox_cache_give(rank->cache, block, SOURCE_SEQUENCE);
}

static int rank_opaque(void *context, const uint8_t *request, size_t size, uint8_t *reply,
                       size_t capacity, size_t *ret_reply_size, struct cox_error *err)
{
    const struct rank *rank = context;
    const bool fills = size == sizeof FILL && !memcmp(request, FILL, size);
    int r = 0;
    (void)reply, (void)capacity;
    for (uint32_t b = 0; r == 0 && b < rank->block_count; b++)
        if (fills)
            block_fill(rank, b);
        else
            r = block_check(rank, b, err);
    *ret_reply_size = 0;
    return r;
}

static int rank_run(struct rank *rank, const struct cox_worker_options *options,
                    struct cox_error *err)
{
    static const struct cox_worker_callbacks callbacks = {
        .size = sizeof(struct cox_worker_callbacks),
        .init = rank_init,
        .opaque = rank_opaque,
        .link = rank_link,
        .link_status = rank_link_status,
        .pull_kv = rank_pull,
    };
    const struct cox_transfer_options transfer = {.cancelled = is_cancelled, .context = rank};
    struct cox_cache_geometry own = geometry;
    own.block_count = rank->block_count;
    int r = cox_cache_new(&own, &rank->cache, err);
    if (r == 0)
        r = cox_exporter_new(NULL, &rank->exporter, err);
    if (r == 0)
        r = cox_transfer_new(&transfer, &rank->transfer);
    if (r == 0)
        r = cox_worker_new(options, &callbacks, rank, &rank->worker, err);
    return r ? r : cox_worker_run(rank->worker, err);
}

int pull_rank_main(int argc, char **argv)
{
    struct cox_worker_options options = COX_WORKER_OPTIONS_INIT;
    struct cox_error err = {0};
    struct rank rank = {.block_count = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 0};
    int r = cox_worker_options_parse(&options, &argc, argv, &err);
    if (r == 0)
        r = rank_run(&rank, &options, &err);
    if (r)
        fprintf(stderr, "a rank with KV blocks: %s\n", err.text);
    cox_worker_free(rank.worker);
    cox_transfer_free(rank.transfer);
    cox_exporter_free(rank.exporter);
    cox_cache_free(rank.cache);
    return r != 0;
}

/* ---- the lead ---- */

struct pull {
    /* lent */
    struct cox_executor *to;
    /* of the other group; owned */
    Coxswain__RemoteInfo *from;
    size_t size;
    /* a table of blocks; owned */
    int64_t *blocks;
    uint64_t run_count;
};

static int rank_ask(struct cox_executor *executor, const char *what, struct cox_error *err)
{
    struct cox_submit_options options = COX_SUBMIT_OPTIONS_INIT;
    options.gather = COX_GATHER_ALL;
    options.deadline_ns = cox_deadline_after_ms(PATIENCE_MS);
    return cox_executor_call_opaque(executor, what, strlen(what) + 1, &options, NULL, NULL, err);
}

static int remote_get(struct pull *pull, struct cox_executor *from, struct cox_error *err)
{
    uint8_t *bytes;
    size_t size;
    int r = cox_executor_remote_info(from, &bytes, &size, err);
    if (r)
        return r;
    pull->from = coxswain__remote_info__unpack(NULL, size, bytes);
    free(bytes);
    return pull->from ? 0 : cox_fail(err, -ENOMEM, "no memory for the other group");
}

static int link_groups(struct pull *pull, struct cox_error *err)
{
    const struct timespec pause = {.tv_nsec = 5000000};
    const uint64_t deadline_ns = cox_deadline_after_ms(PATIENCE_MS);
    Coxswain__PDLinkRequest request = COXSWAIN__PDLINK_REQUEST__INIT;
    Coxswain__PDLinkRequest__PDLinkInfo info = COXSWAIN__PDLINK_REQUEST__PDLINK_INFO__INIT;
    Coxswain__PDLinkRequest__PDLinkInfo *infos = &info;
    struct cox_link_status status = {0};
    info.n_link_info = 1;
    info.link_info = &pull->from;
    request.n_pd_link_info = 1;
    request.pd_link_info = &infos;
    int r = cox_executor_link(pull->to, &request, deadline_ns, err);
    while (r == 0 && status.success_count == 0) {
        cox_link_status_deinit(&status);
        nanosleep(&pause, NULL);
        r = cox_executor_link_status(pull->to, deadline_ns, &status, err);
        if (r == 0 && status.failed_count)
            r = cox_fail(err, COX_REJECTED, "linking: %s", status.failed[0].text);
    }
    cox_link_status_deinit(&status);
    return r;
}

int pull_new(struct cox_executor *to, struct cox_executor *from, size_t size,
             struct pull **ret_pull, struct cox_error *err)
{
    const uint64_t deadline_ns = cox_deadline_after_ms(PATIENCE_MS);
    const size_t count = size / PULL_BLOCK_SIZE;
    struct cox_init_summary summary;
    struct pull *pull = calloc(1, sizeof *pull);
    if (!pull || !(pull->blocks = calloc(count, sizeof *pull->blocks))) {
        free(pull);
        return cox_fail(err, -ENOMEM, "no memory for a pull");
    }
    pull->to = to;
    pull->size = count * PULL_BLOCK_SIZE;
    for (size_t i = 0; i < count; i++)
        pull->blocks[i] = (int64_t)i;
    int r = cox_executor_init(from, NULL, 0, deadline_ns, &summary, err);
    if (r == 0)
        r = cox_executor_init(to, NULL, 0, deadline_ns, &summary, err);
    if (r == 0)
        r = rank_ask(from, FILL, err);
    if (r == 0)
        r = remote_get(pull, from, err);
    if (r == 0)
        r = link_groups(pull, err);
    if (r == 0)
        r = pull_run(pull, err);
    if (r == 0)
        r = rank_ask(to, CHECK, err);
    if (r) {
        pull_free(pull);
        return r;
    }
    *ret_pull = pull;
    return 0;
}

struct pull *pull_free(struct pull *pull)
{
    if (!pull)
        return NULL;
    if (pull->from)
        coxswain__remote_info__free_unpacked(pull->from, NULL);
    free(pull->blocks);
    free(pull);
    return NULL;
}

int pull_run(struct pull *pull, struct cox_error *err)
{
    Coxswain__PullKVRequest request = COXSWAIN__PULL_KVREQUEST__INIT;
    Coxswain__SequenceGroupMetadata metadata = COXSWAIN__SEQUENCE_GROUP_METADATA__INIT;
    pull_info info = COXSWAIN__PULL_KVREQUEST__PULL_KVINFO__INIT, *infos = &info;
    ProtobufCBinaryData table = {.data = (uint8_t *)pull->blocks,
                                 .len = pull->size / PULL_BLOCK_SIZE * sizeof *pull->blocks};
    struct cox_pull_result *results = NULL;
    size_t count = 0;
    char id[32];
    snprintf(id, sizeof id, "%" PRIu64, ++pull->run_count);
    metadata.request_id = id;
    info.seq_group_metadata = &metadata;
    info.cluster_id = pull->from->host_info[0]->cluster_id;
    info.n_src_block_tables = info.n_dst_block_tables = 1;
    info.src_block_tables = info.dst_block_tables = &table;
    info.has_src_sequence = info.has_dst_sequence = info.has_deadline_ns = info.has_lease_ns = 1;
    info.src_sequence = SOURCE_SEQUENCE;
    info.dst_sequence = TARGET_SEQUENCE;
    info.deadline_ns = info.lease_ns = cox_deadline_after_ms(PATIENCE_MS);
    info.has_epoch = pull->from->has_epoch;
    info.epoch = pull->from->epoch;
    request.n_pull_kv_infos = 1;
    request.pull_kv_infos = &infos;
    int r = cox_executor_pull_kv(pull->to, &request, info.deadline_ns, &results, &count, err);
    if (r == 0 && (count != 1 || results[0].code))
        r = cox_fail(err, COX_REJECTED, "a pull failed with code %" PRId32,
                     count ? results[0].code : -1);
    free(results);
    return r;
}
