/* init: the ranks load their model and form their group; also replayed after a rank was replaced.
 *
 * One init at a time. It owns the incarnation of the rank group, the record of the last init that
 * succeeded, and the state that it leaves. */
#include "channel/base/idioms.h"
#include "channel/base/options.h"
#include "coordinator/collector/reentrancy.h"
#include "coordinator/transport/transport.h"
#include "proto/executor.pb-c.h"
#include "engine_gate.h"
#include "executor_internal.h"
#include "group_handles.h"

#include <coxswain/requests.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef Coxswain__ExecuteRequest ExecuteRequest;
typedef Coxswain__ExecuteResponse ExecuteResponse;
typedef Coxswain__ExecuteRequest__ConfigEntry ConfigEntry;
#define RESULT(name) COXSWAIN__EXECUTE_RESPONSE__RESULT_##name

/* ---- the replies ---- */

struct init_reader {
    struct cox_init_summary summary;
    struct cox_kv_caches *kv_caches;
    uint32_t seen;
    bool extensions;
    /* of the previous ranks: those that described KV caches */
    uint32_t described;
    /* of the previous ranks; 0: none reported it */
    uint64_t model_digest;
    int status;
    /* the code of a rank that refuses its input: COX_INVALID or COX_NOT_FOUND */
    int refused;
    struct cox_error *err;
};

static const char *init_find(const Coxswain__ExecuteResponse__InitResults *results, const char *key)
{
    for (size_t i = 0; i < results->n_init_result_map; i++)
        if (results->init_result_map[i]->key && strcmp(results->init_result_map[i]->key, key) == 0)
            return results->init_result_map[i]->value;
    return NULL;
}

static int init_number(struct init_reader *reader, uint32_t rank,
                       const Coxswain__ExecuteResponse__InitResults *results, const char *key,
                       bool required, int64_t *ret_value)
{
    const char *text = init_find(results, key);
    if (!text || !*text) {
        if (!required)
            return 0;
        return reader->status = cox_fail(reader->err, COX_CORRUPT,
                                         "rank %" PRIu32 ": init reply without %s", rank, key);
    }
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (errno || *end)
        return reader->status =
                   cox_fail(reader->err, COX_CORRUPT,
                            "rank %" PRIu32 ": init reply has %s = '%.40s', expected a number",
                            rank, key, text);
    *ret_value = value;
    return 0;
}

static int init_same(struct init_reader *reader, uint32_t rank, const char *what, int64_t mine,
                     int64_t theirs)
{
    if (mine == theirs)
        return 0;
    return reader->status =
               cox_fail(reader->err, COX_DIVERGED,
                        "rank %" PRIu32 " says %s = %" PRId64 ", the ranks before said %" PRId64,
                        rank, what, theirs, mine);
}

static void init_take_min(int64_t *value, int64_t other)
{
    if (other < *value)
        *value = other;
}

/* The number of device blocks: MindIE-LLM reports it in the map up to 3.0.0.beta.2, and since March
 * 2026 in the description of the first KV cache only. */
static int init_blocks(struct init_reader *reader, uint32_t rank,
                       const Coxswain__ExecuteResponse__InitResults *results, int64_t *ret_blocks)
{
    const char *text = init_find(results, "npuBlockNum");
    if (text && *text)
        return init_number(reader, rank, results, "npuBlockNum", true, ret_blocks);
    if (results->n_kv_cache_descs && results->kv_cache_descs[0]->npu_block_num) {
        *ret_blocks = results->kv_cache_descs[0]->npu_block_num;
        return 0;
    }
    return reader->status = cox_fail(
               reader->err, COX_CORRUPT,
               "rank %" PRIu32
               ": init reply without the number of device blocks: neither npuBlockNum nor kv_cache_descs[0].npu_block_num is there",
               rank);
}

/* blocks: the rank's, from either place. Workers that report them in the map need not describe
 * their caches. */
static void init_merge_caches(struct init_reader *reader, uint32_t rank, int64_t blocks,
                              const Coxswain__ExecuteResponse__InitResults *results)
{
    struct cox_init_summary *summary = &reader->summary;
    if (!reader->extensions && results->n_kv_cache_descs == 0) {
        init_take_min(&summary->kv_caches[0].block_count, blocks);
        return;
    }
    if (results->n_kv_cache_descs > COX_KV_CACHE_COUNT_MAX) {
        reader->status = cox_fail(reader->err, COX_TOO_LARGE,
                                  "rank %" PRIu32 " has %zu KV caches: at most %d are supported",
                                  rank, results->n_kv_cache_descs, COX_KV_CACHE_COUNT_MAX);
        return;
    }
    uint32_t count = (uint32_t)results->n_kv_cache_descs;
    if (reader->described > 0 &&
        init_same(reader, rank, "the number of KV caches", summary->kv_cache_count, count))
        return;
    for (uint32_t i = 0; i < count; i++) {
        const Coxswain__KVCacheDesc *desc = results->kv_cache_descs[i];
        if (reader->described == 0) {
            summary->kv_caches[i].block_size = desc->block_size;
            summary->kv_caches[i].compression_ratio = desc->compression_ratio;
            summary->kv_caches[i].cache_type = desc->cache_type;
        } else if (init_same(reader, rank, "block_size", summary->kv_caches[i].block_size,
                             desc->block_size) ||
                   init_same(reader, rank, "compression_ratio",
                             summary->kv_caches[i].compression_ratio, desc->compression_ratio) ||
                   init_same(reader, rank, "cache_type", summary->kv_caches[i].cache_type,
                             desc->cache_type)) {
            return;
        }
        init_take_min(&summary->kv_caches[i].block_count, desc->npu_block_num);
    }
    summary->kv_cache_count = count;
    reader->described++;
}

/* Ranks that load the model themselves may find different files. Returns true if all have the same
 * model. */
static bool init_same_model(struct init_reader *reader, uint32_t rank,
                            const Coxswain__ExecuteResponse__InitResults *results)
{
    const Coxswain__KvLayout *layout = results->kv_pool ? results->kv_pool->layout : NULL;
    const uint64_t digest = layout && layout->has_model_digest ? layout->model_digest : 0;
    if (reader->model_digest && digest && digest != reader->model_digest) {
        reader->status = cox_fail(
            reader->err, COX_DIVERGED,
            "rank %" PRIu32
            " has loaded another model, or other weights, than the ranks before: were the files changed?",
            rank);
        return false;
    }
    reader->model_digest = digest ? digest : reader->model_digest;
    return true;
}

static void init_merge(struct init_reader *reader, uint32_t rank, const ExecuteResponse *response)
{
    struct cox_init_summary *summary = &reader->summary;
    if (response->result_case != RESULT(INIT_RESULTS) || !response->init_results) {
        reader->status = cox_fail(reader->err, COX_CORRUPT,
                                  "rank %" PRIu32 ": the reply to init has no init results", rank);
        return;
    }
    const Coxswain__ExecuteResponse__InitResults *results = response->init_results;
    int64_t cpu = 0, npu = 0, positions = 0, start = -1, stop = -1;
    const char *status = init_find(results, "status");
    if (status && strcmp(status, "ok") != 0 && strcmp(status, "0") != 0) {
        reader->status =
            cox_fail(reader->err, COX_REJECTED,
                     "rank %" PRIu32 ": init failed with status '%.200s'", rank, status);
        return;
    }
    if (init_number(reader, rank, results, "cpuBlockNum", true, &cpu) ||
        init_blocks(reader, rank, results, &npu) ||
        init_number(reader, rank, results, "maxPositionEmbeddings", true, &positions) ||
        init_number(reader, rank, results, "startThinkingId", false, &start) ||
        init_number(reader, rank, results, "stopThinkingId", false, &stop))
        return;
    const char *early = init_find(results, "earlyStoppingIds");
    if (reader->seen == 0) {
        summary->start_thinking_id = start;
        summary->stop_thinking_id = stop;
        snprintf(summary->early_stopping_ids, sizeof summary->early_stopping_ids, "%s",
                 early ? early : "");
    } else if (init_same(reader, rank, "startThinkingId", summary->start_thinking_id, start) ||
               init_same(reader, rank, "stopThinkingId", summary->stop_thinking_id, stop)) {
        return;
    } else if (strncmp(summary->early_stopping_ids, early ? early : "",
                       sizeof summary->early_stopping_ids - 1) != 0) {
        reader->status = cox_fail(reader->err, COX_DIVERGED,
                                  "rank %" PRIu32
                                  " says earlyStoppingIds = '%.80s', the ranks before said '%.80s'",
                                  rank, early ? early : "", summary->early_stopping_ids);
        return;
    }
    if (!init_same_model(reader, rank, results))
        return;
    init_take_min(&summary->cpu_block_count, cpu);
    init_take_min(&summary->npu_block_count, npu);
    init_take_min(&summary->max_position_embeddings, positions);
    init_merge_caches(reader, rank, npu, results);
    reader->seen++;
}

static void init_read_replies(void *context, const struct cox_completion *completion)
{
    struct init_reader *reader = context;
    for (uint32_t rank = 0; rank < completion->rank_count && completion->status == COX_REJECTED;
         rank++)
        if (completion->ranks[rank].outcome == COX_OUTCOME_ERROR &&
            (completion->ranks[rank].code == COX_INVALID ||
             completion->ranks[rank].code == COX_NOT_FOUND))
            reader->refused = completion->ranks[rank].code;
    for (uint32_t rank = 0;
         rank < completion->rank_count && completion->status == 0 && !reader->status; rank++)
        init_merge(reader, rank, completion->ranks[rank].response);
    if (completion->status || reader->status)
        return;
    reader->kv_caches = cox_kv_caches_new(completion);
    if (!reader->kv_caches)
        reader->status = cox_fail(reader->err, -ENOMEM, "no memory for the init replies");
}

/* ---- what is said again ---- */

/* The configuration of an init, and its result. */
struct cox_init_record {
    struct cox_init_summary summary;
    size_t count;
    struct cox_config_entry entries[];
};

struct cox_init_record *cox_init_record_free(struct cox_init_record *record)
{
    for (size_t i = 0; record && i < record->count; i++) {
        free((char *)(uintptr_t)record->entries[i].key);
        free((char *)(uintptr_t)record->entries[i].value);
    }
    free(record);
    return NULL;
}

COX_DEFINE_FREEP(struct cox_init_record, cox_init_record_free);

/* A value may be NULL. */
static bool text_copy(const char *text, const char **ret_copy)
{
    *ret_copy = text ? strdup(text) : NULL;
    return *ret_copy || !text;
}

/* NULL: no memory. */
static struct cox_init_record *record_new(const struct cox_config_entry *config, size_t count)
{
    struct cox_init_record *record = calloc(1, sizeof *record + count * sizeof record->entries[0]);
    for (size_t i = 0; record && i < count; i++) {
        record->count = i + 1;
        if (!text_copy(config[i].key, &record->entries[i].key) ||
            !text_copy(config[i].value, &record->entries[i].value))
            record = cox_init_record_free(record);
    }
    return record;
}

/* Compares texts up to their ends; the bytes behind may differ. */
static bool summary_equal(const struct cox_init_summary *a, const struct cox_init_summary *b)
{
    bool equal = a->cpu_block_count == b->cpu_block_count &&
                 a->npu_block_count == b->npu_block_count &&
                 a->max_position_embeddings == b->max_position_embeddings &&
                 a->start_thinking_id == b->start_thinking_id &&
                 a->stop_thinking_id == b->stop_thinking_id &&
                 strcmp(a->early_stopping_ids, b->early_stopping_ids) == 0 &&
                 a->kv_cache_count == b->kv_cache_count;
    for (uint32_t i = 0; equal && i < a->kv_cache_count; i++)
        equal = a->kv_caches[i].block_count == b->kv_caches[i].block_count &&
                a->kv_caches[i].block_size == b->kv_caches[i].block_size &&
                a->kv_caches[i].compression_ratio == b->kv_caches[i].compression_ratio &&
                a->kv_caches[i].cache_type == b->kv_caches[i].cache_type;
    return equal;
}

/* ---- one init ---- */

/* Waits for the caller's turn, which lasts until init_leave. */
static int init_enter(struct cox_executor *executor, uint64_t deadline_ns, struct cox_error *err)
{
    const struct timespec until = cox_deadline_timespec(deadline_ns);
    if (cox_reentrancy_inside(executor))
        return cox_fail(err, COX_DEADLOCK,
                        "an init from inside a handler or hook would wait for itself");
    pthread_mutex_lock(&executor->recover_lock);
    while (executor->in_init && cox_now_ns() < deadline_ns)
        pthread_cond_timedwait(&executor->recover_cond, &executor->recover_lock, &until);
    int r = executor->in_init ? COX_TIMEOUT : 0;
    if (r == 0)
        executor->init_sent = false;
    executor->in_init = true;
    pthread_mutex_unlock(&executor->recover_lock);
    return r ? cox_fail(err, r, "another init was under way until the deadline") : 0;
}

/* r: the result. An init that reached no rank does not count as an incarnation of the rank group:
 * otherwise, after as many such inits as there are windows, the window that the ranks use would be
 * cleared. */
static void init_leave(struct cox_executor *executor, int r)
{
    pthread_mutex_lock(&executor->recover_lock);
    if (executor->init_sent)
        /* relaxed: as in init_renew_group. */
        atomic_fetch_add_explicit(&executor->rank_group_incarnation, 1, memory_order_relaxed);
    executor->init_void = executor->init_void || (r && executor->init_sent);
    executor->in_init = false;
    pthread_cond_broadcast(&executor->recover_cond);
    pthread_mutex_unlock(&executor->recover_lock);
}

/* Begins another incarnation of the rank group, in memory of its own. */
static int init_renew_group(struct cox_executor *executor, uint64_t *ret_incarnation,
                            struct cox_error *err)
{
    /* relaxed: a count, changed by one init at a time; other readers need the number only. */
    *ret_incarnation =
        atomic_load_explicit(&executor->rank_group_incarnation, memory_order_relaxed) + UINT64_C(1);
    return cox_attach_renew_rank_group(executor->memory, *ret_incarnation, err);
}

int cox_executor_renew_group(struct cox_executor *executor, uint64_t incarnation,
                             struct cox_error *err)
{
    /* Every rank has replied to the init before, or is dead. relaxed: as in init_renew_group. */
    const uint64_t before = atomic_exchange_explicit(&executor->rank_group_incarnation, incarnation,
                                                     memory_order_relaxed);
    if (before)
        cox_attach_keep_rank_group(executor->memory, before);
    return cox_attach_renew_rank_group(executor->memory, incarnation, err);
}

/* Every rank has replied, so all are in this incarnation or in none. */
static void init_keep_group(struct cox_executor *executor, uint64_t incarnation)
{
    const int r = cox_attach_keep_rank_group(executor->memory, incarnation);
    if (r)
        cox_log_write(
            &executor->options.hooks.log, 4,
            "the memory of the rank group's former incarnation could not be given back: %s",
            cox_status_text(r));
}

/* The weights in an init request; all of it is lent to the request. */
struct weights_words {
    struct cox_weights_announcement announcement;
    Coxswain__WeightsCandidate offer;
};

static void weights_fill(const struct cox_executor *executor, struct weights_words *words,
                         ExecuteRequest *request)
{
    struct cox_weights_announcement *announcement = &words->announcement;
    if (!executor->announce_weights || !executor->geometry.mode->limits.extensions)
        return;
    executor->announce_weights(executor->announce_context, announcement);
    coxswain__weights_candidate__init(&words->offer);
    words->offer.has_handle = words->offer.has_size = 1;
    words->offer.handle = (ProtobufCBinaryData){.data = announcement->handle.bytes,
                                                .len = sizeof announcement->handle.bytes};
    words->offer.size = announcement->size;
    COX_SET(request, weights_version, announcement->version);
    request->weights = &words->offer;
}

/* Blames the user's input, not the rank that read it first. */
static int init_blame(const struct init_reader *reader, int r, struct cox_error *err)
{
    if (r != COX_REJECTED || !reader->refused)
        return r;
    if (err)
        err->code = reader->refused;
    return reader->refused;
}

static int init_send(struct cox_executor *executor, const struct cox_init_record *record,
                     bool replayed, uint64_t deadline_ns, struct cox_init_summary *ret_summary,
                     struct cox_error *err)
{
    ExecuteRequest request = COXSWAIN__EXECUTE_REQUEST__INIT;
    _cox_cleanup_(cox_free_ptr) ConfigEntry *entries = calloc(record->count + 1, sizeof *entries);
    _cox_cleanup_(cox_free_ptr) ConfigEntry **pointers =
        calloc(record->count + 1, sizeof(ConfigEntry *));
    if (!entries || !pointers)
        return cox_fail(err, -ENOMEM, "no memory for the init request");
    for (size_t i = 0; i < record->count; i++) {
        coxswain__execute_request__config_entry__init(&entries[i]);
        entries[i].key = (char *)(uintptr_t)record->entries[i].key;
        entries[i].value = (char *)(uintptr_t)record->entries[i].value;
        pointers[i] = &entries[i];
    }
    COX_SET(&request, execute_type, COXSWAIN__EXECUTE_TYPE__MODEL_INIT);
    request.config = pointers;
    request.n_config = record->count;
    int r = init_renew_group(executor, &request.rank_group_incarnation, err);
    if (r == 0)
        r = cox_group_handles_fill(executor, &request, err);
    if (r)
        return r;
    /* Legacy workers have no rank group, and a replayed init is an ordinary one to them. */
    request.has_rank_group_incarnation = executor->geometry.mode->limits.extensions;
    request.has_replayed = request.replayed =
        replayed && executor->geometry.mode->limits.extensions;
    struct weights_words words;
    weights_fill(executor, &words, &request);
    struct init_reader reader = {.err = err,
                                 .extensions = executor->geometry.mode->limits.extensions,
                                 .summary = {.cpu_block_count = INT64_MAX,
                                             .npu_block_count = INT64_MAX,
                                             .max_position_embeddings = INT64_MAX}};
    for (uint32_t i = 0; i < COX_KV_CACHE_COUNT_MAX; i++)
        reader.summary.kv_caches[i].block_count = INT64_MAX;
    const struct cox_submit_options options = {.size = sizeof(struct cox_submit_options),
                                               .gather = COX_GATHER_ALL,
                                               .deadline_ns = deadline_ns};
    r = cox_executor_call(executor, &request, &options, init_read_replies, &reader, err);
    if (!replayed)
        r = init_blame(&reader, r, err);
    if (r == 0)
        init_keep_group(executor, request.rank_group_incarnation);
    if (r == 0)
        r = reader.status;
    for (uint32_t i = reader.summary.kv_cache_count; i < COX_KV_CACHE_COUNT_MAX; i++)
        reader.summary.kv_caches[i].block_count = 0; /* there is no such cache */
    if (r == 0) {
        *ret_summary = reader.summary;
        cox_executor_set_kv_caches(executor, cox_steal_ptr(&reader.kv_caches));
    }
    cox_kv_caches_free(reader.kv_caches);
    return r;
}

void cox_executor_announce_weights(
    struct cox_executor *executor,
    void (*announce)(void *context, struct cox_weights_announcement *ret_announcement),
    void *context)
{
    executor->announce_weights = announce;
    executor->announce_context = context;
}

int cox_executor_init(struct cox_executor *executor, const struct cox_config_entry *config,
                      size_t config_count, uint64_t deadline_ns,
                      struct cox_init_summary *ret_summary, struct cox_error *err)
{
    /* The state is written after the call. */
    _cox_cleanup_(cox_executor_exit) struct cox_executor *entered = cox_executor_enter(executor);
    (void)entered;
    _cox_cleanup_(cox_init_record_freep) struct cox_init_record *record =
        record_new(config, config_count);
    if (!record)
        return cox_fail(err, -ENOMEM, "no memory for the init request");
    int r = cox_deadline_check(deadline_ns, err);
    if (r == 0)
        r = init_enter(executor, deadline_ns, err);
    if (r)
        return r;
    const struct cox_transport *transport = executor->remote.transport;
    const bool continued = transport && transport->continued && !executor->init_record &&
                           transport->continued(transport->context);
    r = init_send(executor, record, continued, deadline_ns, &record->summary, err);
    if (r == 0) {
        *ret_summary = record->summary;
        cox_executor_set_normal(executor, false);
        cox_init_record_free(executor->init_record);
        executor->init_record = cox_steal_ptr(&record);
    }
    init_leave(executor, r);
    return r;
}

int cox_executor_replay_init(struct cox_executor *executor, uint64_t deadline_ns,
                             struct cox_error *err)
{
    _cox_cleanup_(cox_executor_exit) struct cox_executor *entered = cox_executor_enter(executor);
    (void)entered;
    int r = cox_deadline_check(deadline_ns, err);
    if (r == 0)
        r = init_enter(executor, deadline_ns, err);
    if (r)
        return r;
    const struct cox_init_record *record = executor->init_record;
    struct cox_init_summary summary;
    r = record ? init_send(executor, record, true, deadline_ns, &summary, err)
               : cox_fail(err, COX_STATE,
                          "there was no init that could be said again: call cox_executor_init");
    if (r == 0 && !summary_equal(&summary, &record->summary))
        r = cox_fail(err, COX_DIVERGED,
                     "the ranks reply the same init otherwise than at first: %" PRId64
                     " blocks and %" PRId64 " positions, then %" PRId64 " and %" PRId64
                     ": has the model, or the command of the workers, been changed?",
                     summary.npu_block_count, summary.max_position_embeddings,
                     record->summary.npu_block_count, record->summary.max_position_embeddings);
    if (r == 0)
        cox_executor_set_normal(executor, true);
    init_leave(executor, r);
    return r;
}
