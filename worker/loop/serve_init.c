#include "serve_internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "channel/shm/state.h"
#include "worker/group/group_memory.h"
#include "kv_layout.h"
#include "worker/sequences/weights_candidate.h"

struct cox_init_request {
    const struct cox_worker *worker;
    const ExecuteRequest *request;
    uint64_t sequence;
    uint32_t type;
    const struct cox_layout_channel_state *shared;
    const struct cox_running_callback *running;
    /* of a sealed group */
    struct cox_group_sealed sealed;
    char control_socket[COX_SOCKET_PATH_SIZE];
};

void cox_init_result_init(struct cox_init_result *ret_result)
{
    *ret_result = (struct cox_init_result){.start_thinking_id = -1, .stop_thinking_id = -1};
}

uint64_t cox_init_request_sequence(const struct cox_init_request *request)
{
    return request->sequence;
}

bool cox_init_request_replayed(const struct cox_init_request *request)
{
    return request->request->replayed;
}

void cox_init_request_group(const struct cox_init_request *request,
                            struct cox_group_options *options)
{
    const struct cox_worker *worker = request->worker;
    const uint64_t generation = request->request->group_generation;
    COX_ASSERT(options->size >= offsetof(struct cox_group_options, cancelled));
    options->name = NULL;
    options->sealed = worker->group_memory ? &request->sealed : NULL;
    options->fd = worker->group_fd;
    options->fd_offset = cox_geometry_group_offset(&worker->control.geometry, generation);
    options->rank = worker->options.rank;
    options->rank_count = worker->options.rank_count;
    options->generation = generation;
    options->spin_ns = worker->control.geometry.spin_ns;
    if (options->size >= offsetof(struct cox_group_options, recorder) + sizeof options->recorder)
        options->recorder = worker->recorder;
    if (options->size >= offsetof(struct cox_group_options, mirrored) + sizeof options->mirrored &&
        worker->control.geometry.mirrored) {
        options->mirrored = true;
        options->value_size = cox_geometry_group_value_size(&worker->control.geometry);
    }
}

int cox_init_request_weights(const struct cox_init_request *request,
                             struct cox_weights_candidate *ret_candidate, struct cox_error *err)
{
    return cox_weights_candidate_read(request->request, ret_candidate, err);
}

bool cox_init_request_socket(const struct cox_init_request *request, char *buffer, size_t size)
{
    const struct cox_worker_options *options = &request->worker->options;
    char found[COX_SOCKET_PATH_SIZE];
    const char *path =
        strchr(options->control_socket, '/') ? options->control_socket : options->fd_store;
    /* A group without a control socket has no path. */
    if (path[0])
        return snprintf(buffer, size, "%s", path) < (int)size;
    return cox_control_socket_find(options->prefix + (options->prefix[0] == '/'), found, NULL) ==
               0 &&
           snprintf(buffer, size, "%s", found) < (int)size;
}

static bool bytes_copy(const ProtobufCBinaryData *bytes, void *to, size_t size)
{
    if (bytes->len != size)
        return false;
    memcpy(to, bytes->data, size);
    return true;
}

/* Reads the ranks' memory from the request; missing entries are absent. */
static void sealed_read(struct cox_init_request *init)
{
    const ExecuteRequest *message = init->request;
    struct cox_group_sealed *sealed = &init->sealed;
    sealed->memory = init->worker->group_memory;
    /* Without a control socket only memory that can be opened directly is opened. */
    sealed->control_socket =
        cox_init_request_socket(init, init->control_socket, sizeof init->control_socket)
            ? init->control_socket
            : NULL;
    sealed->rank_count = init->worker->options.rank_count;
    for (size_t rank = 0; rank < message->n_group_memory && rank < sealed->rank_count; rank++) {
        const Coxswain__RankGroupMemory *told = message->group_memory[rank];
        struct cox_handle *handles = sealed->ranks[rank].handles;
        sealed->ranks[rank].pid = (pid_t)told->pid;
        sealed->ranks[rank].given = bytes_copy(&told->words, &handles[0], sizeof handles[0]) &&
                                    bytes_copy(&told->values, &handles[1], sizeof handles[1]);
    }
}

/* An init is not a step, so void_through does not cover it; but it has ended without this rank's
 * reply. */
bool cox_init_request_cancelled(const struct cox_init_request *request)
{
    return cox_state_ended(request->shared) >= request->sequence ||
           /* acquire; partner: wait_tell in pause.c. */
           atomic_load_explicit(&request->running->cancel_sequence, memory_order_acquire) >=
               request->sequence;
}

const char *cox_init_request_get(const struct cox_init_request *request, const char *key)
{
    for (size_t i = 0; i < request->request->n_config; i++) {
        const Coxswain__ExecuteRequest__ConfigEntry *entry = request->request->config[i];
        if (entry->key && strcmp(entry->key, key) == 0)
            return entry->value ? entry->value : "";
    }
    return NULL;
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
        desc->has_npu_block_num = desc->has_block_size = 1;
        desc->has_compression_ratio = desc->has_cache_type = 1;
        desc->npu_block_num = result->kv_caches[i].block_count;
        desc->block_size = result->kv_caches[i].block_size;
        desc->compression_ratio = result->kv_caches[i].compression_ratio;
        desc->cache_type = result->kv_caches[i].cache_type;
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

struct init_call {
    const struct cox_worker *worker;
    const struct cox_init_request *request;
    struct cox_init_result *result;
    struct cox_error *err;
};

static int call_init(void *argument)
{
    const struct init_call *call = argument;
    return call->worker->callbacks->init(call->worker->context, call->request, call->result,
                                         call->err);
}

/* The reply of a worker without an init callback. Its configuration is kept. */
static int init_without_callback(const ExecuteRequest *message, struct cox_error *err)
{
    if (message->n_config == 0)
        return 0;
    return cox_fail(
        err, COX_UNSUPPORTED,
        "this worker has no init callback, and so cannot take '%.100s': give it one, or start the group without configuration (no --init, --init-file, --model), or with --no-init",
        message->config[0]->key ? message->config[0]->key : "");
}

/* Lends an init, also while paused, as init callbacks are called then. */
static void init_lend(struct cox_channel_thread *thread, struct cox_init_request *init)
{
    cox_lending_enter(thread, init->sequence, init->type);
    thread->lending.init = init;
    cox_lending_lend(thread, init->sequence, init->type, COX_LENT_INIT, false);
    thread->lending.to->init = init;
}

void cox_channel_thread_reply_init_request(struct cox_channel_thread *thread,
                                           const struct cox_request *request,
                                           const ExecuteRequest *message)
{
    const struct cox_worker *worker = thread->worker;
    struct cox_init_result result;
    cox_init_result_init(&result);
    struct cox_init_request *init = cox_arena_alloc(&thread->arena, sizeof *init);
    if (!init) {
        ExecuteResponse response = COXSWAIN__EXECUTE_RESPONSE__INIT;
        cox_fail(&thread->error, COX_TOO_LARGE, "no memory for an init");
        cox_channel_thread_fail(thread, &response, COX_TOO_LARGE);
        cox_channel_thread_reply(thread, request->sequence, request->type, &response);
        return;
    }
    *init = (struct cox_init_request){
        .worker = worker,
        .request = message,
        .sequence = request->sequence,
        .type = request->type,
        .shared = cox_state_channel(&worker->control, thread->channel.id),
        .running = &thread->running,
    };
    if (worker->group_memory)
        sealed_read(init);
    cox_channel_thread_record_begin(thread, init->sequence, init->type, 0);
    if (!worker->callbacks->init && thread->lending.on && message->n_config) {
        init_lend(thread, init);
        return;
    }
    struct init_call call = {worker, init, &result, &thread->error};
    int r = worker->callbacks->init
                ? cox_channel_thread_call_any(thread, request, COX_CALLBACK_UNPAUSABLE, call_init,
                                              &call)
                : init_without_callback(message, &thread->error);
    cox_channel_thread_end_init(thread, init, &result, r);
}

void cox_channel_thread_end_init(struct cox_channel_thread *thread,
                                 const struct cox_init_request *init,
                                 struct cox_init_result *result, int r)
{
    ExecuteResponse response = COXSWAIN__EXECUTE_RESPONSE__INIT;
    struct init_reply reply = {0};
    cox_channel_thread_record_end(thread, init->sequence, init->type, r, 0);
    if (r == 0 && result->kv_cache_count > COX_KV_CACHE_DESC_COUNT_MAX)
        r = cox_fail(&thread->error, COX_TOO_LARGE,
                     "init tells of %" PRIu32 " KV caches: at most %d", result->kv_cache_count,
                     COX_KV_CACHE_DESC_COUNT_MAX);
    if (r == 0) {
        if (thread->worker->is_legacy_shim)
            init_tell_legacy(result);
        init_fill(&reply, result);
        response.result_case = RESULT(INIT_RESULTS);
        response.init_results = &reply.results;
        cox_table_clear(thread->worker->table);
    } else {
        cox_channel_thread_fail(thread, &response, r);
    }
    cox_channel_thread_reply(thread, init->sequence, init->type, &response);
}
