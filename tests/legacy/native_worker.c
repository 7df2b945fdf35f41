/* A worker on Coxswain's library that replies as legacy_worker.py does, so that the two can be in
 * one group and differ only in speed: token = (sum of the prompt token ids + replies given for the
 * sequence before) % 97. Environment, for tests: COX_LEGACY_DELAY_MS and COX_LEGACY_FAULT as there;
 * COX_NATIVE_FAIL=rank:text lets that rank fail its first step instead; COX_NATIVE_FAIL_INIT=text
 * lets init fail; COX_NATIVE_FAIL_REST=text lets link_status, lora, pull_kv and the recovery
 * commands fail; COX_NATIVE_BLOCKS=count|cache lets init report its blocks only as the count, or
 * only as the cache; COX_NATIVE_REQUEST_MAX=bytes limits the memory of an unpacked request;
 * COX_NATIVE_TAKES=1 lets the main thread take steps and inits (coxswain/worker.h). The command
 * `clear` then wakes it while it blocks, and it reports the fault "woken". */
#include "proto/executor.pb-c.h"

#include <coxswain/worker.h>

#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define SLOT_COUNT 4096
#define NAME_COUNT 64
#define NAME_SIZE 64

struct names {
    char texts[NAME_COUNT][NAME_SIZE];
    uint32_t count;
};

struct engine {
    struct cox_worker_options options;
    struct cox_worker *worker;
    /* this rank's, until it was reported */
    const char *fault, *failure;
    struct timespec delay;
    /* the main thread takes steps and inits */
    bool takes;
    int64_t prompt_sums[SLOT_COUNT];
    int64_t replies[SLOT_COUNT];
    /* of the link channel's thread */
    struct names links, adapters;
};

static int names_find(const struct names *names, const char *text)
{
    for (uint32_t i = 0; i < names->count; i++)
        if (strcmp(names->texts[i], text) == 0)
            return (int)i;
    return -1;
}

static void names_add(struct names *names, const char *text)
{
    if (names_find(names, text) < 0 && names->count < NAME_COUNT)
        snprintf(names->texts[names->count++], NAME_SIZE, "%s", text);
}

static bool names_remove(struct names *names, const char *text)
{
    int at = names_find(names, text);
    if (at < 0)
        return false;
    names->count--;
    memmove(names->texts[at], names->texts[names->count], NAME_SIZE);
    return true;
}

static int engine_init(void *context, const struct cox_init_request *request,
                       struct cox_init_result *result, struct cox_error *err)
{
    const struct engine *engine = context;
    const char *fail = getenv("COX_NATIVE_FAIL_INIT"), *blocks = getenv("COX_NATIVE_BLOCKS");
    (void)request;
    if (fail)
        return cox_fail(err, COX_INVALID, "%s", fail);
    result->cpu_block_count = result->npu_block_count = 100 + (int64_t)engine->options.rank;
    result->max_position_embeddings = 4096 - (int64_t)engine->options.rank;
    result->mem_pool_id = engine->options.rank;
    result->kv_cache_count = 1;
    result->kv_caches[0] = (struct cox_kv_cache_desc){
        .block_count = 100 + (int32_t)engine->options.rank,
        .block_size = 128,
        .compression_ratio = 1,
    };
    if (blocks && strcmp(blocks, "count") == 0)
        result->kv_cache_count = 0;
    if (blocks && strcmp(blocks, "cache") == 0)
        result->npu_block_count = 0;
    return 0;
}

static int fail_rest(struct cox_error *err)
{
    const char *text = getenv("COX_NATIVE_FAIL_REST");
    return text ? cox_fail(err, COX_INVALID, "%s", text) : 0;
}

static int engine_execute(void *context, const struct cox_batch *batch,
                          struct cox_batch_output *outputs, struct cox_error *err)
{
    struct engine *engine = context;
    if (engine->failure) {
        const char *text = engine->failure;
        engine->failure = NULL;
        return cox_fail(err, COX_INVALID, "%s", text);
    }
    if (engine->fault) {
        cox_worker_report_fault(engine->worker, engine->fault, cox_deadline_after_ms(10000));
        engine->fault = NULL;
    }
    for (uint32_t i = 0; i < batch->row_count; i++) {
        const struct cox_batch_row *row = &batch->rows[i];
        if (row->position == 0)
            engine->replies[row->slot] = 0;
        if (!row->emit)
            continue; /* a chunk of the prompt */
        if (engine->replies[row->slot] == 0) {
            engine->prompt_sums[row->slot] = 0;
            for (uint32_t t = 0; t < row->position + row->token_count; t++)
                engine->prompt_sums[row->slot] += row->tokens[t];
        }
        int64_t token = (engine->prompt_sums[row->slot] + engine->replies[row->slot]++) % 97;
        outputs[i] = (struct cox_batch_output){.token = (int32_t)token, .logprob = -0.5f};
    }
    nanosleep(&engine->delay, NULL);
    return 0;
}

static void engine_link(void *context, const Coxswain__PDLinkRequest *request)
{
    struct engine *engine = context;
    for (size_t i = 0; i < request->n_pd_link_info; i++) {
        const Coxswain__PDLinkRequest__PDLinkInfo *info = request->pd_link_info[i];
        for (size_t j = 0; j < info->n_unlink_info; j++)
            for (size_t k = 0; k < info->unlink_info[j]->n_host_info; k++)
                names_remove(&engine->links, info->unlink_info[j]->host_info[k]->cluster_id);
        for (size_t j = 0; j < info->n_link_info; j++)
            for (size_t k = 0; k < info->link_info[j]->n_host_info; k++)
                names_add(&engine->links, info->link_info[j]->host_info[k]->cluster_id);
    }
}

static int engine_link_status(void *context, struct cox_arena *arena,
                              Coxswain__PDLinkStatusResponse *response, struct cox_error *err)
{
    const struct engine *engine = context;
    if (fail_rest(err))
        return err->code;
    char **success = cox_arena_alloc(arena, (engine->links.count + 1) * sizeof *success);
    if (!success)
        return cox_fail(err, COX_TOO_LARGE, "no memory");
    for (uint32_t i = 0; i < engine->links.count; i++)
        success[i] = cox_arena_strdup(arena, engine->links.texts[i]);
    response->success_link_info = success;
    response->n_success_link_info = engine->links.count;
    return 0;
}

static int reply_lora(void *context, const Coxswain__LoraOperationRequest *request,
                      struct cox_arena *arena, Coxswain__LoraOperationResponse *response,
                      struct cox_error *err)
{
    struct engine *engine = context;
    (void)arena;
    if (fail_rest(err))
        return err->code;
    bool known = names_find(&engine->adapters, request->lora_name) >= 0;
    response->lora_op_status = COXSWAIN__LORA_OPERATION_STATUS__LORA_CMD_SUCCESS;
    if (request->lora_op_type == COXSWAIN__LORA_OPERATION_TYPE__LOAD) {
        if (known)
            response->lora_op_status = COXSWAIN__LORA_OPERATION_STATUS__DUPLICATED_LORA_ID;
        names_add(&engine->adapters, request->lora_name);
    } else if (!names_remove(&engine->adapters, request->lora_name)) {
        response->lora_op_status = COXSWAIN__LORA_OPERATION_STATUS__INVALID_LORA_ID;
    }
    return 0;
}

static int engine_pull(void *context, const Coxswain__PullKVRequest *request,
                       struct cox_arena *arena, Coxswain__PullKVResponse *response,
                       struct cox_error *err)
{
    (void)context;
    if (fail_rest(err))
        return err->code;
    size_t count = request->n_pull_kv_infos;
    Coxswain__PullKVResponse__PullKVResult **results =
        cox_arena_alloc(arena, (count + 1) * sizeof(Coxswain__PullKVResponse__PullKVResult *));
    for (size_t i = 0; results && i < count; i++) {
        results[i] = cox_arena_alloc(arena, sizeof *results[i]);
        if (!results[i])
            return cox_fail(err, COX_TOO_LARGE, "no memory");
        coxswain__pull_kvresponse__pull_kvresult__init(results[i]);
        results[i]->request_id = request->pull_kv_infos[i]->seq_group_metadata->request_id;
        results[i]->has_pd_error_code = 1;
        results[i]->pd_error_code = COXSWAIN__PDERROR_CODE__SUCCESS;
    }
    if (!results)
        return cox_fail(err, COX_TOO_LARGE, "no memory");
    response->n_pull_kv_results = count;
    response->pull_kv_results = results;
    return 0;
}

static int engine_recover(void *context, struct cox_error *err)
{
    (void)context;
    return fail_rest(err);
}

/* The main thread's id is the pid. */
static bool main_thread_blocks(void)
{
    char path[64], text[256] = "";
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", (int)getpid());
    FILE *file = fopen(path, "re");
    if (!file)
        return false;
    const size_t size = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[size] = '\0';
    const char *name_end = strrchr(text, ')');
    return name_end && strncmp(name_end, ") S", 3) == 0;
}

static int engine_clear(void *context, struct cox_error *err)
{
    const struct engine *engine = context;
    while (engine->takes && !main_thread_blocks())
        sched_yield();
    if (engine->takes)
        cox_worker_wake(engine->worker, COX_CHANNEL_EXECUTE);
    return engine_recover(context, err);
}

static const struct cox_worker_callbacks callbacks = {
    .size = sizeof(struct cox_worker_callbacks),
    .init = engine_init,
    .execute = engine_execute,
    .link = engine_link,
    .link_status = engine_link_status,
    .lora = reply_lora,
    .pull_kv = engine_pull,
    .pause = engine_recover,
    .pause_net = engine_recover,
    .clear = engine_clear,
    .reinit = engine_recover,
    .start = engine_recover,
};

static int engine_reply(struct engine *engine, const struct cox_worker_request *request,
                        struct cox_error *err)
{
    struct cox_init_result result;
    int r;
    if (request->batch) {
        r = engine_execute(engine, request->batch, request->outputs, err);
        return r ? r
                 : cox_worker_reply_step(engine->worker, request->sequence, NULL, NULL,
                                         request->batch->row_count, err);
    }
    cox_init_result_init(&result);
    r = engine_init(engine, request->init, &result, err);
    return r ? r : cox_worker_reply_init(engine->worker, request->sequence, &result, err);
}

/* As cox_worker_run. */
static int engine_take(struct engine *engine, struct cox_error *err)
{
    struct cox_worker_request request;
    int r = cox_worker_start(engine->worker, COX_WORKER_TAKES(COX_CHANNEL_EXECUTE), err);
    while (r == 0 || r == COX_EMPTY) {
        r = cox_worker_next(engine->worker, COX_CHANNEL_EXECUTE, COX_DEADLINE_NEVER, &request, err);
        if (r == 0)
            r = engine_reply(engine, &request, err);
        else if (r == COX_EMPTY)
            cox_worker_report_fault(engine->worker, "woken", cox_deadline_after_ms(10000));
    }
    return r == COX_CLOSED ? cox_worker_join(engine->worker, err) : r;
}

/* "RANK:TEXT" of the environment, when it is about this rank. */
static const char *own_text(const char *variable, uint32_t rank)
{
    const char *value = getenv(variable);
    const char *colon = value ? strchr(value, ':') : NULL;
    return colon && strtoul(value, NULL, 10) == rank ? colon + 1 : NULL;
}

int main(int argc, char **argv)
{
    static struct engine engine = {.options = COX_WORKER_OPTIONS_INIT};
    struct cox_error err = {0};
    const char *request_max = getenv("COX_NATIVE_REQUEST_MAX");
    engine.options.request_size_max = request_max ? strtoul(request_max, NULL, 10) : 0;
    struct cox_worker_callbacks used = callbacks;
    engine.takes = getenv("COX_NATIVE_TAKES") != NULL;
    if (engine.takes) {
        used.init = NULL;
        used.execute = NULL;
    }
    int r = cox_worker_options_parse(&engine.options, &argc, argv, &err);
    if (r == 0)
        r = cox_worker_new(&engine.options, &used, &engine, &engine.worker, &err);
    if (r == 0) {
        const char *delay = getenv("COX_LEGACY_DELAY_MS");
        long delay_ms = delay ? strtol(delay, NULL, 10) : 0;
        engine.delay =
            (struct timespec){.tv_sec = delay_ms / 1000, .tv_nsec = delay_ms % 1000 * 1000000};
        engine.fault = own_text("COX_LEGACY_FAULT", engine.options.rank);
        engine.failure = own_text("COX_NATIVE_FAIL", engine.options.rank);
        r = engine.takes ? engine_take(&engine, &err) : cox_worker_run(engine.worker, &err);
    }
    if (r)
        fprintf(stderr, "native worker %" PRIu32 ": %s\n", engine.options.rank, err.text);
    cox_worker_free(engine.worker);
    return r != 0;
}
