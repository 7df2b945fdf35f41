#include "channel/shm/state.h"

#include "channel/base/idioms.h"
#include "worker/group/group_memory.h"
#include "worker/sequences/weights_candidate.h"
#include "kv_layout.h"
#include "serve_internal.h"

#include <coxswain/worker.h>

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* Path of the control socket. False: the group has none, or the path is too long. */
static bool socket_find(const struct cox_worker *worker, char buffer[COX_SOCKET_PATH_SIZE])
{
    const struct cox_worker_options *options = &worker->options;
    char found[COX_SOCKET_PATH_SIZE];
    const char *path =
        strchr(options->control_socket, '/') ? options->control_socket : options->fd_store;
    /* A group without a control socket has no path. */
    if (!path[0] &&
        cox_control_socket_find(options->prefix + (options->prefix[0] == '/'), found, NULL) == 0)
        path = found;
    return path[0] && snprintf(buffer, COX_SOCKET_PATH_SIZE, "%s", path) < COX_SOCKET_PATH_SIZE;
}

static bool bytes_copy(const ProtobufCBinaryData *bytes, void *to, size_t size)
{
    if (bytes->len != size)
        return false;
    memcpy(to, bytes->data, size);
    return true;
}

/* Reads the ranks' memory from the request; missing entries are absent. */
static void sealed_read(struct cox_served_init *init, const struct cox_worker *worker,
                        const ExecuteRequest *message)
{
    struct cox_group_sealed *sealed = &init->sealed;
    sealed->memory = worker->group_memory;
    /* Without a control socket only memory that can be opened directly is opened. */
    sealed->control_socket = init->request.control_socket;
    sealed->rank_count = worker->options.rank_count;
    for (size_t rank = 0; rank < message->n_group_memory && rank < sealed->rank_count; rank++) {
        const Coxswain__RankGroupMemory *told = message->group_memory[rank];
        struct cox_handle *handles = sealed->ranks[rank].handles;
        sealed->ranks[rank].pid = (pid_t)told->pid;
        sealed->ranks[rank].given = bytes_copy(&told->words, &handles[0], sizeof handles[0]) &&
                                    bytes_copy(&told->values, &handles[1], sizeof handles[1]);
    }
}

/* Where the ranks form their rank group. */
static void group_fill(struct cox_served_init *init, const struct cox_worker *worker,
                       uint64_t incarnation)
{
    const struct cox_geometry *geometry = &worker->control.geometry;
    init->group = (struct cox_group_options){
        .size = sizeof init->group,
        .sealed = worker->group_memory ? &init->sealed : NULL,
        .fd = worker->group_fd,
        .fd_offset = cox_geometry_group_offset(geometry, incarnation),
        .rank = worker->options.rank,
        .rank_count = worker->options.rank_count,
        .value_size = geometry->mirrored ? cox_geometry_group_value_size(geometry) : 0,
        .incarnation = incarnation,
        .spin_ns = geometry->spin_ns,
        .recorder = worker->recorder,
        .mirrored = geometry->mirrored,
    };
}

/* Fills in what the callback sees; message and entries, room for its configuration, outlive it.
 * Returns as cox_weights_candidate_read. */
static int init_fill_request(struct cox_served_init *init, const struct cox_worker *worker,
                             const ExecuteRequest *message, struct cox_init_entry *entries,
                             struct cox_error *err)
{
    struct cox_init_request *request = &init->request;
    request->replayed = message->replayed;
    request->entries = entries;
    for (size_t i = 0; i < message->n_config; i++) {
        const Coxswain__ExecuteRequest__ConfigEntry *entry = message->config[i];
        if (entry->key)
            entries[request->entry_count++] =
                (struct cox_init_entry){entry->key, entry->value ? entry->value : ""};
    }
    if (socket_find(worker, init->control_socket))
        request->control_socket = init->control_socket;
    if (worker->group_memory)
        sealed_read(init, worker, message);
    group_fill(init, worker, message->rank_group_incarnation);
    request->group = &init->group;
    int r = cox_weights_candidate_read(message, &init->weights, err);
    if (r == 0)
        request->weights = &init->weights;
    return r == COX_EMPTY ? 0 : r;
}

struct init_reply {
    Coxswain__ExecuteResponse__InitResults results;
    Coxswain__ExecuteResponse__InitResults__InitResultMapEntry entries[8];
    Coxswain__ExecuteResponse__InitResults__InitResultMapEntry *entry_pointers[8];
    char numbers[8][24];
    Coxswain__KVCacheDesc descs[COX_KV_CACHE_DESC_COUNT_MAX];
    Coxswain__KVCacheDesc *desc_pointers[COX_KV_CACHE_DESC_COUNT_MAX];
    struct cox_kv_pool_message kv_pool;
};

static void init_put_text(struct init_reply *reply, const char *key, const char *value)
{
    size_t i = reply->results.n_init_result_map++;
    coxswain__execute_response__init_results__init_result_map_entry__init(&reply->entries[i]);
    reply->entries[i].key = (char *)(uintptr_t)key;
    reply->entries[i].value = (char *)(uintptr_t)value;
    reply->entry_pointers[i] = &reply->entries[i];
}

static void init_put_number(struct init_reply *reply, const char *key, int64_t value)
{
    char *text = reply->numbers[reply->results.n_init_result_map];
    snprintf(text, sizeof reply->numbers[0], "%" PRId64, value);
    init_put_text(reply, key, text);
}

static void init_fill(struct init_reply *reply, const struct cox_init_result *result)
{
    coxswain__execute_response__init_results__init(&reply->results);
    reply->results.init_result_map = reply->entry_pointers;
    init_put_text(reply, "status", "ok");
    init_put_number(reply, "cpuBlockNum", result->cpu_block_count);
    init_put_number(reply, "npuBlockNum", result->npu_block_count);
    init_put_number(reply, "maxPositionEmbeddings", result->max_position_embeddings);
    init_put_number(reply, "memPoolId", result->mem_pool_id);
    if (result->start_thinking_id >= 0)
        init_put_number(reply, "startThinkingId", result->start_thinking_id);
    if (result->stop_thinking_id >= 0)
        init_put_number(reply, "stopThinkingId", result->stop_thinking_id);
    if (result->early_stopping_ids)
        init_put_text(reply, "earlyStoppingIds", result->early_stopping_ids);
    reply->results.n_kv_cache_descs = result->kv_cache_count;
    reply->results.kv_cache_descs = reply->desc_pointers;
    for (uint32_t i = 0; i < result->kv_cache_count; i++) {
        Coxswain__KVCacheDesc *desc = &reply->descs[i];
        coxswain__kvcache_desc__init(desc);
        COX_SET(desc, npu_block_num, result->kv_caches[i].block_count);
        COX_SET(desc, block_size, result->kv_caches[i].block_size);
        COX_SET(desc, compression_ratio, result->kv_caches[i].compression_ratio);
        COX_SET(desc, cache_type, result->kv_caches[i].cache_type);
        reply->desc_pointers[i] = desc;
    }
    if (result->kv_pool.block_count)
        reply->results.kv_pool = cox_kv_pool_fill(&reply->kv_pool, &result->kv_pool);
}

/* Coordinators of MindIE-LLM up to 3.0.0.beta.2 read the number of device blocks from the map,
 * later ones from the description of the first KV cache only. The number is put where each finds
 * it. */
static void init_tell_legacy(struct cox_init_result *result)
{
    const int64_t blocks = result->npu_block_count;
    if (result->kv_cache_count == 0) {
        result->kv_cache_count = 1;
        result->kv_caches[0] = (struct cox_kv_cache_desc){.compression_ratio = 1};
    }
    if (result->kv_caches[0].block_count == 0)
        result->kv_caches[0].block_count = (int32_t)(blocks < INT32_MAX ? blocks : INT32_MAX);
    if (blocks == 0)
        result->npu_block_count = result->kv_caches[0].block_count;
}

static int call_init(struct cox_channel_thread *thread)
{
    const struct cox_worker *worker = thread->worker;
    struct cox_served_init *init = thread->served.init;
    return worker->callbacks->init(worker->context, &init->request, &init->result, &thread->error);
}

int cox_channel_thread_call_init(struct cox_channel_thread *thread)
{
    if (!thread->worker->callbacks->init)
        return 0;
    return cox_channel_thread_call(thread, COX_CALLBACK_UNPAUSABLE, call_init);
}

int cox_channel_thread_begin_init(struct cox_channel_thread *thread)
{
    const struct cox_worker *worker = thread->worker;
    const ExecuteRequest *message = thread->message;
    const struct cox_request *request = &thread->served.request;
    struct cox_served_init *init = cox_arena_alloc(&thread->arena, sizeof *init);
    struct cox_init_entry *entries =
        cox_arena_alloc(&thread->arena, (message->n_config + 1) * sizeof *entries);
    if (!init || !entries)
        return cox_fail(&thread->error, COX_TOO_LARGE, "no memory for an init");
    *init = (struct cox_served_init){.request.sequence = request->sequence};
    cox_init_result_init(&init->result);
    int r = init_fill_request(init, worker, message, entries, &thread->error);
    if (r)
        return r;
    /* The configuration is kept by nobody. */
    if (!worker->callbacks->init && !thread->lending.on && message->n_config)
        return cox_fail(
            &thread->error, COX_UNSUPPORTED,
            "this worker has no init callback, and so cannot take '%.100s': give it one, or start the group without configuration (no --init, --model)",
            message->config[0]->key ? message->config[0]->key : "");
    thread->served.kind = COX_LENT_INIT;
    thread->served.init = init;
    cox_channel_thread_record_begin(thread, request->sequence, request->type, 0);
    return 0;
}

void cox_channel_thread_end_init(struct cox_channel_thread *thread, int r)
{
    const struct cox_request *request = &thread->served.request;
    struct cox_init_result *result = &thread->served.init->result;
    ExecuteResponse response = COXSWAIN__EXECUTE_RESPONSE__INIT;
    struct init_reply reply = {0};
    cox_channel_thread_record_end(thread, request->sequence, request->type, r, 0);
    if (r == 0 && result->kv_cache_count > COX_KV_CACHE_DESC_COUNT_MAX)
        r = cox_fail(&thread->error, COX_TOO_LARGE,
                     "init tells of %" PRIu32 " KV caches: at most %d", result->kv_cache_count,
                     COX_KV_CACHE_DESC_COUNT_MAX);
    if (r == 0) {
        if (!cox_worker_limits(thread->worker)->coordinator_words)
            init_tell_legacy(result);
        init_fill(&reply, result);
        response.result_case = RESULT(INIT_RESULTS);
        response.init_results = &reply.results;
        cox_table_clear(thread->worker->table);
    } else {
        cox_channel_thread_fail(thread, &response, r);
    }
    cox_channel_thread_reply(thread, &response);
}
