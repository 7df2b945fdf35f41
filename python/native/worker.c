/* A rank as Python serves it. Python takes the execute channel itself. A request of another channel is
 * an order: the library's thread leaves it here and waits, a thread of Python fetches it. */
#include "native.h"

#include "proto/executor.pb-c.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct coxpy_worker {
    struct cox_worker *worker;
    /* protects what follows */
    pthread_mutex_t lock;
    /* an order came, or was done; or the worker ends */
    pthread_cond_t wake;
    struct coxpy_order *orders[COX_TWO_WAY_COUNT];
    bool ended;
    uint32_t *slots;
    uint32_t slot_count, slot_capacity;
};

/* ---- orders: the library's side ---- */

static int order_serve(struct coxpy_worker *worker, int channel, struct coxpy_order *order)
{
    pthread_mutex_lock(&worker->lock);
    worker->orders[channel] = order;
    pthread_cond_broadcast(&worker->wake);
    /* A thread of Python that has the order uses it until done. */
    while (!order->done && (order->taken || !worker->ended))
        pthread_cond_wait(&worker->wake, &worker->lock);
    worker->orders[channel] = NULL;
    pthread_mutex_unlock(&worker->lock);
    return order->done ? order->result : cox_fail(order->err, COX_CLOSED, "the rank ends");
}

static int on_lora(void *context, const struct Coxswain__LoraOperationRequest *request,
                   struct cox_arena *arena, struct Coxswain__LoraOperationResponse *response,
                   struct cox_error *err)
{
    struct coxpy_order order = {
        .kind = COXPY_LORA, .lora = request, .lora_response = response, .arena = arena, .err = err};
    return order_serve(context, COX_CHANNEL_LINK, &order);
}

static void on_link(void *context, const struct Coxswain__PDLinkRequest *request)
{
    struct cox_error err = {0};
    struct coxpy_order order = {.kind = COXPY_LINK, .link = request, .err = &err};
    order_serve(context, COX_CHANNEL_LINK, &order);
}

static int on_link_status(void *context, struct cox_arena *arena,
                          struct Coxswain__PDLinkStatusResponse *response, struct cox_error *err)
{
    struct coxpy_order order = {
        .kind = COXPY_LINK_STATUS, .link_response = response, .arena = arena, .err = err};
    return order_serve(context, COX_CHANNEL_LINK, &order);
}

static int on_pull(void *context, const struct Coxswain__PullKVRequest *request,
                   struct cox_arena *arena, struct Coxswain__PullKVResponse *response,
                   struct cox_error *err)
{
    struct coxpy_order order = {
        .kind = COXPY_PULL, .pull = request, .pull_response = response, .arena = arena, .err = err};
    return order_serve(context, COX_CHANNEL_TRANSFER, &order);
}

static int recover(void *context, int kind, struct cox_error *err)
{
    struct coxpy_order order = {.kind = kind, .err = err};
    return order_serve(context, COX_CHANNEL_RECOVER, &order);
}

static int on_pause(void *context, struct cox_error *err)
{
    return recover(context, COXPY_PAUSE, err);
}

static int on_pause_net(void *context, struct cox_error *err)
{
    return recover(context, COXPY_PAUSE_NET, err);
}

static int on_clear(void *context, struct cox_error *err)
{
    return recover(context, COXPY_CLEAR, err);
}

static int on_reinit(void *context, struct cox_error *err)
{
    return recover(context, COXPY_REINIT, err);
}

static int on_start(void *context, struct cox_error *err)
{
    return recover(context, COXPY_START, err);
}

/* Inside cox_worker_next, on the thread of Python that called it: which is woken to fetch the slots. */
static void on_cleanup(void *context, const uint32_t *slots, uint32_t count)
{
    struct coxpy_worker *worker = context;
    pthread_mutex_lock(&worker->lock);
    if (worker->slot_count + count > worker->slot_capacity) {
        const uint32_t capacity = 2 * (worker->slot_count + count);
        uint32_t *grown = realloc(worker->slots, capacity * sizeof *grown);
        if (!grown)
            abort(); /* a lost clean-up would leak the KV blocks of its sequences for ever */
        worker->slots = grown;
        worker->slot_capacity = capacity;
    }
    memcpy(worker->slots + worker->slot_count, slots, count * sizeof *slots);
    worker->slot_count += count;
    pthread_mutex_unlock(&worker->lock);
    cox_worker_wake(worker->worker, COX_CHANNEL_EXECUTE);
}

uint32_t coxpy_worker_cleanups(struct coxpy_worker *worker, uint32_t *slots, uint32_t count_max)
{
    pthread_mutex_lock(&worker->lock);
    const uint32_t count = worker->slot_count < count_max ? worker->slot_count : count_max;
    worker->slot_count -= count;
    if (count)
        memcpy(slots, worker->slots, count * sizeof *slots);
    if (worker->slot_count)
        memmove(worker->slots, worker->slots + count, worker->slot_count * sizeof *slots);
    pthread_mutex_unlock(&worker->lock);
    return count;
}

/* ---- orders: Python's side ---- */

struct coxpy_order *coxpy_order_next(struct coxpy_worker *worker, int channel)
{
    pthread_mutex_lock(&worker->lock);
    while (!worker->ended && (!worker->orders[channel] || worker->orders[channel]->taken))
        pthread_cond_wait(&worker->wake, &worker->lock);
    struct coxpy_order *order = worker->ended ? NULL : worker->orders[channel];
    if (order)
        order->taken = true;
    pthread_mutex_unlock(&worker->lock);
    return order;
}

size_t coxpy_order_message(const struct coxpy_order *order, uint8_t *buffer)
{
    const ProtobufCMessage *message = order->lora   ? &order->lora->base
                                      : order->link ? &order->link->base
                                      : order->pull ? &order->pull->base
                                                    : NULL;
    if (!message)
        return 0;
    return buffer ? protobuf_c_message_pack(message, buffer)
                  : protobuf_c_message_get_packed_size(message);
}

/* An array of the reply with room for one more; replies have a few entries. */
static void *grow(struct cox_arena *arena, void *array, size_t count, size_t size)
{
    void *grown = cox_arena_alloc(arena, (count + 1) * size);
    if (grown && count)
        memcpy(grown, array, count * size);
    return grown;
}

int coxpy_order_link_state(struct coxpy_order *order, const char *cluster_id, int state, int code,
                           const char *text)
{
    struct Coxswain__PDLinkStatusResponse *reply = order->link_response;
    char *id = cox_arena_strdup(order->arena, cluster_id);
    char ***lists[] = {NULL, &reply->success_link_info, &reply->running_link_info,
                       &reply->waiting_link_info};
    size_t *counts[] = {NULL, &reply->n_success_link_info, &reply->n_running_link_info,
                        &reply->n_waiting_link_info};
    if (!id)
        return -ENOMEM;
    if (state) {
        char **list = grow(order->arena, *lists[state], *counts[state], sizeof *list);
        if (!list)
            return -ENOMEM;
        *lists[state] = list;
        list[(*counts[state])++] = id;
        return 0;
    }
    Coxswain__PDLinkStatusResponse__FailedLinkInfo *failed =
        cox_arena_alloc(order->arena, sizeof *failed);
    void *list =
        grow(order->arena, reply->failed_link_info, reply->n_failed_link_info, sizeof failed);
    if (!failed || !list)
        return -ENOMEM;
    coxswain__pdlink_status_response__failed_link_info__init(failed);
    failed->cluster_id = id;
    failed->has_pd_error_code = true;
    failed->pd_error_code = (Coxswain__PDErrorCode)code;
    failed->text = cox_arena_strdup(order->arena, text);
    reply->failed_link_info = list;
    reply->failed_link_info[reply->n_failed_link_info++] = failed;
    return 0;
}

int coxpy_order_pull_result(struct coxpy_order *order, const char *request_id,
                            uint64_t copied_bytes, uint64_t copy_ns, int status, const char *text)
{
    struct Coxswain__PullKVResponse *reply = order->pull_response;
    Coxswain__PullKVResponse__PullKVResult *result = cox_arena_alloc(order->arena, sizeof *result);
    void *list =
        grow(order->arena, reply->pull_kv_results, reply->n_pull_kv_results, sizeof result);
    if (!result || !list)
        return -ENOMEM;
    coxswain__pull_kvresponse__pull_kvresult__init(result);
    result->request_id = cox_arena_strdup(order->arena, request_id);
    result->has_pd_error_code = true;
    result->pd_error_code = status == 0 ? COXSWAIN__PDERROR_CODE__SUCCESS
                            : status == COX_NOT_FOUND
                                ? COXSWAIN__PDERROR_CODE__PD_PULL_KV_UNKNOWN_ERROR
                                : COXSWAIN__PDERROR_CODE__PD_PULL_KV_ERROR;
    result->has_copied_bytes = result->has_copy_ns = true;
    result->copied_bytes = copied_bytes;
    result->copy_ns = copy_ns;
    result->has_status = true;
    result->status = status;
    result->text = status ? cox_arena_strdup(order->arena, text) : NULL;
    reply->pull_kv_results = list;
    reply->pull_kv_results[reply->n_pull_kv_results++] = result;
    return 0;
}

void coxpy_order_done(struct coxpy_worker *worker, struct coxpy_order *order, int result, int lora,
                      const char *text)
{
    if (order->lora_response) {
        order->lora_response->has_lora_op_status = true;
        order->lora_response->lora_op_status = (Coxswain__LoraOperationStatus)lora;
        if (lora)
            order->lora_response->text = cox_arena_strdup(order->arena, text);
    }
    if (result)
        cox_fail(order->err, result, "%s", text);
    pthread_mutex_lock(&worker->lock);
    order->result = result;
    order->done = true;
    pthread_cond_broadcast(&worker->wake);
    pthread_mutex_unlock(&worker->lock);
}

/* ---- constructor and destructor ---- */

int coxpy_worker_new(const struct cox_worker_options *options, uint32_t served,
                     struct coxpy_worker **ret_worker, struct cox_error *err)
{
    struct cox_worker_callbacks callbacks = COX_WORKER_CALLBACKS_INIT;
    struct coxpy_worker *worker = calloc(1, sizeof *worker);
    if (!worker)
        return cox_fail(err, -ENOMEM, "no memory for the worker");
    pthread_mutex_init(&worker->lock, NULL);
    pthread_cond_init(&worker->wake, NULL);
    callbacks.cleanup = on_cleanup;
    if (served & COXPY_SERVES_LORA)
        callbacks.lora = on_lora;
    if (served & COXPY_SERVES_LINK) {
        callbacks.link = on_link;
        callbacks.link_status = on_link_status;
    }
    if (served & COXPY_SERVES_PULL)
        callbacks.pull_kv = on_pull;
    if (served & COXPY_SERVES_RECOVER) {
        callbacks.pause = on_pause;
        callbacks.pause_net = on_pause_net;
        callbacks.clear = on_clear;
        callbacks.reinit = on_reinit;
        callbacks.start = on_start;
    }
    struct cox_worker_options own = *options;
    own.write_frames = coxpy_frames_write;
    int r = cox_worker_new(&own, &callbacks, worker, &worker->worker, err);
    if (r) {
        coxpy_worker_free(worker);
        return r;
    }
    *ret_worker = worker;
    return 0;
}

struct cox_worker *coxpy_worker_of(struct coxpy_worker *worker)
{
    return worker->worker;
}

void coxpy_worker_end(struct coxpy_worker *worker)
{
    pthread_mutex_lock(&worker->lock);
    worker->ended = true;
    pthread_cond_broadcast(&worker->wake);
    pthread_mutex_unlock(&worker->lock);
}

struct coxpy_worker *coxpy_worker_free(struct coxpy_worker *worker)
{
    if (!worker)
        return NULL;
    worker->worker = cox_worker_free(worker->worker);
    free(worker->slots);
    pthread_cond_destroy(&worker->wake);
    pthread_mutex_destroy(&worker->lock);
    free(worker);
    return NULL;
}
