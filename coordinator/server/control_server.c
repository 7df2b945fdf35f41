#include "control_server.h"

#include "channel/base/idioms.h"
#include "channel/base/peer.h"
#include "channel/base/thread.h"
#include "channel/socket/closer.h"
#include "channel/socket/socket.h"
#include "coordinator/executor/core.h"
#include "proto/control.pb-c.h"
#include "proto/message.h"
#include "proto/wire.h"
#include "control_reply.h"
#include "kv_reference.h"
#include "stream.h"

#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#define IDLE_MS 10000
/* Including connections that have lost their place and whose threads have not ended yet. */
#define SLOT_COUNT (2 * COX_CONTROL_CONNECTION_MAX)
/* Results stay in the prompt queue while more than this many bytes are unsent. */
#define PENDING_MAX ((size_t)64 << 10)
/* Of one request, unpacked: packed numbers grow fourfold. */
#define REQUEST_ARENA_MAX ((size_t)96 << 20)
#define REPLY_ARENA_MAX ((size_t)16 << 20)
/* Bytes of a connection that do not count: status and stop are served whatever others have. */
#define MEMORY_FREE ((size_t)256 << 10)
/* A larger request is unpacked while no other such one is, before its memory is known. */
#define UNPACK_ALONE_SIZE ((size_t)64 << 10)
#define BUSY                                                                                       \
    "requests of other clients have the memory that all of them may have: try again later, or "    \
    "send fewer prompts in one request"
#define TEMPERATURE_MAX 100.0f
#define HOLD_MS_MAX UINT64_C(3600000)
#define PULL_MS_DEFAULT 10000
#define STARTING "the group is still being started"

/* The index of pulls that are requested by command; refused for prompts. */
#define PULL_INDEX UINT64_MAX

typedef CoxswainControl__CompleteRequest complete_request;

struct connection {
    struct cox_control_server *service;
    pthread_t thread;
    /* Under the service's lock. */
    /* ended: only join is left */
    bool used, ended;
    /* it has sent prompts */
    bool prompts;
    /* it waits for its client only, so another connection may take its place */
    bool idle;
    /* it also waits for input from the client */
    bool reading;
    /* another connection has taken its place */
    bool outbid;
    /* when its client last sent a request or read from a reply */
    uint64_t idle_ns;
    /* of the client; pid 0: unknown */
    pid_t pid;
    uid_t uid;
    char program[COX_PEER_PROGRAM_SIZE];
    /* served by the spare thread: it has none of its own */
    bool spare;
    /* its part of the service's memory; written by its own thread */
    size_t memory;

    /* The thread's own. */
    struct cox_stream stream;
    /* what complete is in */
    struct cox_arena arena;
    /* prompts of it, from next_prompt on, that wait for room */
    const complete_request *complete;
    size_t next_prompt;
    /* NULL: it has sent no prompts yet */
    void *client;
    /* of that */
    const struct cox_prompt_hooks *prompt_hooks;
    /* pulls of its own, without a reply */
    uint32_t pull_count;
    /* end of the leases of what is held for it, which others may still pull */
    uint64_t held_until_ns;
    int wake_fd;
    /* it has sent a stop */
    bool stopping;
    /* reads nothing more, and ends when everything is written */
    bool last;
    uint64_t deadline_ns;
};

struct cox_control_server {
    struct cox_control_options options;
    char *model;
    /* an eventfd: every thread leaves; written once, never read */
    int end_fd;
    struct cox_closer *closer;
    pthread_t spare_thread;
    bool spare_started;
    /* held while a large request is unpacked; taken before lock */
    pthread_mutex_t unpack_lock;

    /* everything below */
    pthread_mutex_t lock;
    struct cox_control_phase phase;
    char note[COX_NOTE_SIZE];
    /* a client has sent a stop */
    bool stopping;
    /* requests in progress that may take long */
    uint32_t orders_count;
    /* bytes of requests and replies of all connections, at most COX_CONTROL_MEMORY_MAX */
    size_t memory;
    struct connection connections[SLOT_COUNT];
    /* NULL: the spare thread is free */
    struct connection *spare;
    pthread_cond_t spare_wake;
    bool closing;
};

struct places {
    uint32_t taken;
    /* of them, connections with prompts */
    uint32_t prompts;
};

/* ---- replies ---- */

static int reply_put(struct connection *c, const control_reply *reply)
{
    return cox_stream_put(&c->stream, &reply->base);
}

static CoxswainControl__Error error_of(int code, const char *text)
{
    CoxswainControl__Error error = COXSWAIN_CONTROL__ERROR__INIT;
    COX_SET(&error, code, code);
    error.text = cox_message_lend(text);
    return error;
}

/* The connection ends with it. */
static int error_put(struct connection *c, int code, const char *text)
{
    CoxswainControl__Error error = error_of(code, text);
    control_reply reply = COXSWAIN_CONTROL__CONTROL_REPLY__INIT;
    reply.reply_case = COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_ERROR;
    reply.error = &error;
    c->last = true;
    return reply_put(c, &reply);
}

static int done_put(struct connection *c, bool process_ends)
{
    CoxswainControl__Done done = COXSWAIN_CONTROL__DONE__INIT;
    control_reply reply = COXSWAIN_CONTROL__CONTROL_REPLY__INIT;
    done.has_process_ends = done.process_ends = process_ends;
    reply.reply_case = COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_DONE;
    reply.done = &done;
    return reply_put(c, &reply);
}

static int item_put(struct connection *c, const struct cox_prompt_output *result)
{
    static const CoxswainControl__Finish finishes[] = {
        [COX_FINISH_STOP] = COXSWAIN_CONTROL__FINISH__STOP,
        [COX_FINISH_LENGTH] = COXSWAIN_CONTROL__FINISH__LENGTH,
        [COX_FINISH_ERROR] = COXSWAIN_CONTROL__FINISH__FAILED,
    };
    CoxswainControl__Error error = error_of(result->error ? result->error->code : -ENOMEM,
                                            result->error ? result->error->text : NULL);
    CoxswainControl__CompletionItem item = COXSWAIN_CONTROL__COMPLETION_ITEM__INIT;
    control_reply reply = COXSWAIN_CONTROL__CONTROL_REPLY__INIT;
    COX_SET(&item, index, result->index);
    COX_SET(&item, finish, finishes[result->finish]);
    item.tokens = result->tokens;
    item.n_tokens = result->token_count;
    CoxswainControl__KvReference hold;
    if (result->hold) {
        cox_kv_reference_write(result->hold, &hold);
        item.hold = &hold;
    }
    item.has_recomputed = item.recomputed = result->recomputed;
    item.error = result->finish == COX_FINISH_ERROR ? &error : NULL;
    reply.reply_case = COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_ITEM;
    reply.item = &item;
    return reply_put(c, &reply);
}

/* Reports that a prompt's source is no longer needed. */
static int pulled_put(struct connection *c, const struct cox_prompt_output *result)
{
    CoxswainControl__Error error = error_of(result->error ? result->error->code : 0,
                                            result->error ? result->error->text : NULL);
    CoxswainControl__PulledReply pulled = COXSWAIN_CONTROL__PULLED_REPLY__INIT;
    control_reply reply = COXSWAIN_CONTROL__CONTROL_REPLY__INIT;
    COX_SET(&pulled, index, result->index);
    pulled.error = result->error ? &error : NULL;
    reply.reply_case = COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_PULLED;
    reply.pulled = &pulled;
    return reply_put(c, &reply);
}

static int pull_put(struct connection *c, const struct cox_prompt_output *result)
{
    _cox_cleanup_(cox_arena_deinit) struct cox_arena arena = {.size_max = REPLY_ARENA_MAX};
    control_reply reply = COXSWAIN_CONTROL__CONTROL_REPLY__INIT;
    reply.reply_case = COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_PULL;
    reply.pull = cox_control_reply_pull(result, &arena);
    return arena.exhausted ? -ENOMEM : reply_put(c, &reply);
}

/* Carries the request out. This connection's thread alone waits. */
static int made_put(struct connection *c, const struct cox_control_source *source,
                    const control_request *request)
{
    _cox_cleanup_(cox_arena_deinit) struct cox_arena arena = {.size_max = REPLY_ARENA_MAX};
    control_reply reply = COXSWAIN_CONTROL__CONTROL_REPLY__INIT;
    struct cox_error error = {0};
    int r = cox_control_reply_make(source, request, &arena, &reply, &error);
    if (r)
        return error.code ? error_put(c, r, error.text) : r;
    return arena.exhausted ? -ENOMEM : reply_put(c, &reply);
}

/* ---- prompts ---- */

/* Checks the prompts against the group's role and links. */
static int transfer_check(const complete_request *complete, const struct cox_control_source *source,
                          struct cox_error *err)
{
    bool hold = complete->has_hold_ms && complete->hold_ms;
    for (size_t i = 0; i < complete->n_prompts; i++) {
        struct cox_kv_reference read;
        const CoxswainControl__Prompt *prompt = complete->prompts[i];
        if (prompt->index == PULL_INDEX)
            return cox_fail(err, COX_INVALID, "a prompt's index is too large");
        if (!prompt->source)
            continue;
        if (!source->phase.links)
            return cox_fail(err, COX_UNSUPPORTED, "this group pulls nothing");
        if (hold)
            return cox_fail(err, COX_INVALID, "a prompt is either pulled or held");
        int r = cox_kv_reference_read(prompt->source, &read, err);
        if (r)
            return r;
    }
    if (hold && !source->phase.links)
        return cox_fail(err, COX_UNSUPPORTED, "this group holds nothing");
    if (hold && complete->hold_ms > HOLD_MS_MAX)
        return cox_fail(err, COX_INVALID, "a prompt is held for an hour at most");
    if (!hold && source->phase.links &&
        cox_group_links_role(source->phase.links) == COX_ROLE_PREFILL)
        return cox_fail(
            err, COX_UNSUPPORTED,
            "the role of this group is prefill: it computes prompts for a group that decodes (coxswain generate --prefill %s --decode NAME), or give it another role (coxswain role --name %s standard)",
            cox_executor_name(source->phase.executor), cox_executor_name(source->phase.executor));
    return 0;
}

static int complete_check(const complete_request *complete, struct cox_error *err)
{
    if (!complete->has_new_count_max || complete->new_count_max == 0)
        return cox_fail(err, COX_INVALID, "no number of tokens to generate was given");
    if (complete->n_stop_tokens > COX_STOP_COUNT_MAX)
        return cox_fail(err, COX_INVALID, "%zu stop tokens: at most %d", complete->n_stop_tokens,
                        COX_STOP_COUNT_MAX);
    /* Written so that NaN is refused. */
    if (complete->has_temperature &&
        !(complete->temperature >= 0 && complete->temperature <= TEMPERATURE_MAX))
        return cox_fail(err, COX_INVALID, "temperature %g: expected a number from 0 to %g",
                        (double)complete->temperature, (double)TEMPERATURE_MAX);
    if (complete->has_top_p && !(complete->top_p > 0 && complete->top_p <= 1))
        return cox_fail(err, COX_INVALID, "top-p %g: expected a number above 0, up to 1",
                        (double)complete->top_p);
    if (complete->top_k < 0 || complete->seed < 0)
        return cox_fail(err, COX_INVALID, "top-k %" PRId32 ", seed %" PRId32 ": expected 0 or more",
                        complete->top_k, complete->seed);
    return 0;
}

/* source: room for the prompt's. */
static struct cox_prompt_request request_make(const complete_request *complete,
                                              const CoxswainControl__Prompt *prompt,
                                              struct cox_kv_reference *source)
{
    struct cox_prompt_request request = {
        .tokens = prompt->tokens,
        .token_count = (uint32_t)prompt->n_tokens,
        .new_count_max = complete->new_count_max,
        .shorten = complete->shorten,
        .sampling = {.temperature = complete->temperature,
                     .top_p = complete->has_top_p ? complete->top_p : 1,
                     .top_k = complete->top_k,
                     .seed = complete->seed},
        .stop_count = (uint32_t)complete->n_stop_tokens,
        .lora = complete->lora && *complete->lora ? complete->lora : NULL,
    };
    for (size_t i = 0; i < complete->n_stop_tokens; i++)
        request.stop_tokens[i] = complete->stop_tokens[i];
    request.hold_ms = complete->hold_ms;
    /* It was checked before. */
    if (prompt->source && cox_kv_reference_read(prompt->source, source, NULL) == 0)
        request.source = source;
    return request;
}

static void complete_end(struct connection *c)
{
    c->complete = NULL;
    cox_arena_deinit(&c->arena);
}

/* Submits as many of the prompts as there is room for. */
static int prompts_submit(struct connection *c)
{
    while (c->complete && c->next_prompt < c->complete->n_prompts) {
        const CoxswainControl__Prompt *prompt = c->complete->prompts[c->next_prompt];
        struct cox_kv_reference source;
        const struct cox_prompt_request request = request_make(c->complete, prompt, &source);
        int r = c->prompt_hooks->submit(c->client, &request, prompt->index);
        if (r == COX_FULL)
            return 0;
        if (r)
            return r;
        c->next_prompt++;
    }
    if (c->complete)
        complete_end(c);
    return 0;
}

static int results_put(struct connection *c)
{
    struct cox_prompt_output result;
    while (c->client && cox_stream_pending(&c->stream) < PENDING_MAX &&
           c->prompt_hooks->take(c->client, &result) == 0) {
        bool is_pull = !result.is_pulled && result.index == PULL_INDEX && c->pull_count > 0;
        c->pull_count -= is_pull;
        if (result.hold && result.hold->lease_ns > c->held_until_ns)
            c->held_until_ns = result.hold->lease_ns;
        int r = is_pull            ? pull_put(c, &result)
                : result.is_pulled ? (result.index == PULL_INDEX ? 0 : pulled_put(c, &result))
                                   : item_put(c, &result);
        cox_prompt_output_deinit(&result);
        if (r)
            return r;
    }
    return 0;
}

/* ---- places ---- */

/* The lock is held. */
static struct places places_count(const struct cox_control_server *service)
{
    struct places places = {0};
    for (size_t i = 0; i < SLOT_COUNT; i++) {
        const struct connection *c = &service->connections[i];
        places.taken += c->used && !c->outbid;
        places.prompts += c->used && !c->outbid && c->prompts;
    }
    return places;
}

/* Connections of the same process. The lock is held. */
static uint32_t places_of(const struct cox_control_server *service, pid_t pid)
{
    uint32_t count = 0;
    for (size_t i = 0; i < SLOT_COUNT; i++) {
        const struct connection *c = &service->connections[i];
        count += c->used && !c->outbid && c->pid == pid;
    }
    return count;
}

/* A client with prompts may take some time between requests. While it is idle its thread changes no
 * field that is read here. */
static bool may_be_outbid(const struct connection *c, bool prompts, uint64_t now_ns)
{
    return c->used && !c->outbid && c->idle && (c->prompts || !prompts) &&
           (!c->prompts ||
            (now_ns - c->idle_ns >= IDLE_MS * COX_NSEC_PER_MSEC && now_ns >= c->held_until_ns));
}

/* Takes the place of an idle connection (prompts: of one with prompts): of the process that has
 * most places, so that a process with one keeps it, the connection that was idle for longest.
 * Returns false if all are busy. The lock is held. */
static bool places_make_room(struct cox_control_server *service, bool prompts)
{
    struct connection *found = NULL;
    uint32_t found_count = 0;
    uint64_t now_ns = cox_now_ns();
    for (size_t i = 0; i < SLOT_COUNT; i++) {
        struct connection *c = &service->connections[i];
        if (!may_be_outbid(c, prompts, now_ns))
            continue;
        uint32_t count = places_of(service, c->pid);
        if (found &&
            (count < found_count || (count == found_count && c->idle_ns >= found->idle_ns)))
            continue;
        found = c;
        found_count = count;
    }
    if (!found)
        return false;
    found->outbid = true;
    /* Its thread polls the fd, which stays open while the connection is idle. A thread that only
     * waits to write would not notice the end of its input, and could not send a reason to a client
     * that does not read. */
    shutdown(found->stream.fd, found->reading ? SHUT_RD : SHUT_RDWR);
    return true;
}

/* Returns false if there are too many connections with prompts. */
static bool prompts_enter(struct connection *c)
{
    struct cox_control_server *service = c->service;
    pthread_mutex_lock(&service->lock);
    uint32_t count = places_count(service).prompts;
    bool room =
        (count < COX_CONTROL_PROMPTS_MAX && count + service->orders_count < COX_CONTROL_BUSY_MAX) ||
        places_make_room(service, true);
    c->prompts = room;
    pthread_mutex_unlock(&service->lock);
    return room;
}

/* Returns false if there are too many orders. */
static bool orders_enter(struct cox_control_server *service)
{
    pthread_mutex_lock(&service->lock);
    bool room = service->orders_count < COX_CONTROL_ORDERS_MAX &&
                places_count(service).prompts + service->orders_count < COX_CONTROL_BUSY_MAX;
    service->orders_count += room;
    pthread_mutex_unlock(&service->lock);
    return room;
}

/* Counts what the connection has now. Returns false if that is more than there was, and too much
 * for all connections together: it then counts with what it had, and is to end. */
static bool memory_count(struct connection *c)
{
    struct cox_control_server *service = c->service;
    const size_t has = c->stream.in_size + c->stream.out_size + c->arena.used;
    const size_t size = has > MEMORY_FREE ? has - MEMORY_FREE : 0;
    if (size == c->memory)
        return true;
    pthread_mutex_lock(&service->lock);
    const size_t sum = service->memory - c->memory + size;
    const bool room = size < c->memory || sum <= COX_CONTROL_MEMORY_MAX;
    if (room) {
        service->memory = sum;
        c->memory = size;
    }
    pthread_mutex_unlock(&service->lock);
    return room;
}

static void orders_leave(struct cox_control_server *service)
{
    pthread_mutex_lock(&service->lock);
    service->orders_count--;
    pthread_mutex_unlock(&service->lock);
}

static void progress_note(struct connection *c)
{
    pthread_mutex_lock(&c->service->lock);
    c->idle_ns = cox_now_ns();
    pthread_mutex_unlock(&c->service->lock);
}

/* Returns true if nothing is in progress for it, or it does not read the results. */
static bool waits_for_its_other_side(const struct connection *c)
{
    return !c->stopping &&
           (cox_stream_pending(&c->stream) > 0 ||
            (!c->complete && (!c->client || c->prompt_hooks->outstanding(c->client) == 0)));
}

/* Returns true if another connection has taken its place. */
static bool idle_set(struct connection *c, bool idle, bool reading)
{
    pthread_mutex_lock(&c->service->lock);
    bool outbid = c->outbid;
    c->idle = idle;
    c->reading = reading;
    pthread_mutex_unlock(&c->service->lock);
    return outbid;
}

static void prompts_leave(struct connection *c)
{
    if (c->client)
        c->prompt_hooks->close(c->client);
    c->client = NULL;
    cox_close_fd(&c->wake_fd);
    pthread_mutex_lock(&c->service->lock);
    c->prompts = false;
    pthread_mutex_unlock(&c->service->lock);
}

static int client_make(struct connection *c, const struct cox_control_source *source)
{
    if (c->client)
        return 0;
    if (!prompts_enter(c))
        return COX_FULL;
    c->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    c->prompt_hooks = source->prompts;
    int r = c->wake_fd < 0 ? -errno
                           : source->prompts->open(source->hooks.context, c->wake_fd, &c->client);
    if (r)
        prompts_leave(c);
    return r;
}

/* complete is in the connection's arena. */
static int complete_take(struct connection *c, const struct cox_control_source *source,
                         const complete_request *complete)
{
    struct cox_error error = {0};
    if (!source->prompts)
        return error_put(c, COX_UNSUPPORTED, source->phase.refusal);
    int r = complete_check(complete, &error);
    if (!r)
        r = transfer_check(complete, source, &error);
    if (r)
        return error_put(c, r, error.text);
    r = client_make(c, source);
    if (r)
        return error_put(c, r,
                         r == COX_FULL ? "too many clients complete prompts at this time"
                                       : cox_status_text(r));
    c->complete = complete;
    c->next_prompt = 0;
    return 0;
}

static int pull_take(struct connection *c, const struct cox_control_source *source,
                     const CoxswainControl__PullRequest *pull)
{
    struct cox_error error = {0};
    struct cox_kv_reference read;
    if (!source->prompts)
        return error_put(c, COX_UNSUPPORTED, source->phase.refusal);
    int r = !source->phase.links ? cox_fail(&error, COX_UNSUPPORTED, "this group pulls nothing")
            : pull->source       ? cox_kv_reference_read(pull->source, &read, &error)
                                 : cox_fail(&error, COX_INVALID, "nothing to pull was named");
    if (!r)
        r = client_make(c, source);
    uint64_t timeout_ms = pull->has_timeout_ms ? pull->timeout_ms : PULL_MS_DEFAULT;
    const struct cox_prompt_request request = {
        .source = &read,
        .pull_only = true,
        .pull_ms = timeout_ms < HOLD_MS_MAX ? timeout_ms : HOLD_MS_MAX,
        .new_count_max = 1,
    };
    if (!r)
        r = c->prompt_hooks->submit(c->client, &request, PULL_INDEX);
    if (r)
        return error_put(c, r, error.code ? error.text : cox_status_text(r));
    c->pull_count++;
    return 0;
}

/* ---- requests ---- */

static struct cox_control_source source_of(struct cox_control_server *service)
{
    pthread_mutex_lock(&service->lock);
    const struct places places = places_count(service);
    struct cox_control_source source = {
        .phase = service->phase,
        .hooks = service->options.hooks,
        .prompts = service->phase.prompts ? service->options.hooks.prompts : NULL,
        .model = service->model,
        .stopping = service->stopping,
        .connections = places.taken,
        .connections_max = COX_CONTROL_CONNECTION_MAX,
        .prompt_connections = places.prompts,
        .prompt_connections_max = COX_CONTROL_PROMPTS_MAX,
    };
    memcpy(source.note, service->note, sizeof source.note);
    pthread_mutex_unlock(&service->lock);
    return source;
}

/* The command that changes the group with this request; NULL: it changes nothing. */
static const char *change_name(const control_request *request)
{
    switch (request->request_case) {
    case COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_STOP:
        return "stop";
    case COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_RECOVER:
        return "recover";
    case COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_LORA:
        return request->lora->action == COXSWAIN_CONTROL__LORA_ACTION__LORA_LIST ? NULL : "lora";
    case COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_WEIGHTS:
        return "reload";
    case COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_LINK:
        return "link";
    case COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_ROLE:
        return "role";
    default:
        return NULL;
    }
}

/* Before the order is served: whatever comes of it, the log has who gave it. */
static void change_log(const struct connection *c, const control_request *request)
{
    const char *name = change_name(request);
    if (name)
        cox_log_write(&c->service->options.log, 5, "%s: ordered by process %jd (%s) of user %ju",
                      name, (intmax_t)c->pid, c->program, (uintmax_t)c->uid);
}

/* An order may wait for other orders, and for ranks, until its deadline. */
static int order_serve(struct connection *c, const struct cox_control_source *source,
                       const control_request *request)
{
    if (!orders_enter(c->service))
        return error_put(c, COX_FULL, "too many orders are under way: try again later");
    int r = made_put(c, source, request);
    orders_leave(c->service);
    return r;
}

static int release_serve(struct connection *c, const CoxswainControl__ReleaseRequest *release)
{
    bool holds = c->client && c->prompt_hooks->release;
    int r = 0;
    for (size_t i = 0; !r && holds && i < release->n_holds; i++)
        if (release->holds[i] > 0)
            r = c->prompt_hooks->release(c->client, release->holds[i]);
    return r ? error_put(c, r,
                         r == COX_FULL ? "more holds are to be released than there can be"
                                       : cox_status_text(r))
             : 0;
}

static int request_serve(struct connection *c, const control_request *request)
{
    struct cox_control_server *service = c->service;
    const struct cox_control_source source = source_of(service);
    change_log(c, request);
    if (request->request_case == COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_STOP) {
        int r = done_put(c, service->options.process_ends);
        if (!r)
            r = cox_stream_flush(&c->stream); /* before the group ends, which may happen at once */
        c->stopping = true;
        pthread_mutex_lock(&service->lock);
        service->stopping = true;
        pthread_mutex_unlock(&service->lock);
        if (service->options.stop)
            service->options.stop(service->options.context, c->pid);
        return r;
    }
    if (!source.phase.executor)
        return error_put(c, COX_STATE, source.phase.refusal);
    switch (request->request_case) {
    case COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_STATUS:
    case COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_RECORDER:
    case COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_STACKS:
    case COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_KV_INFO:
        return made_put(c, &source, request);
    case COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_COMPLETE:
        return complete_take(c, &source, request->complete);
    case COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_CANCEL:
        if (c->client)
            c->prompt_hooks->cancel(c->client);
        return done_put(c, false);
    case COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_RECOVER:
    case COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_LORA:
    case COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_WEIGHTS:
    case COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_LINK:
    case COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_LINK_STATUS:
    case COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_ROLE:
        return order_serve(c, &source, request);
    case COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_PULL:
        return pull_take(c, &source, request->pull);
    case COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_RELEASE:
        return release_serve(c, request->release);
    default:
        return error_put(
            c, COX_UNSUPPORTED,
            "no such request: expected status, stop, complete, cancel, recover, kv_info, link, link_status, role, pull, release, lora, weights, recorder or stacks");
    }
}

/* Returns as the unpacking, and COX_FULL: no memory is left for it. */
static int message_unpack(struct connection *c, const uint8_t *bytes, size_t size,
                          control_request **ret_request)
{
    const bool alone = size > UNPACK_ALONE_SIZE;
    cox_arena_init(&c->arena, 0, REQUEST_ARENA_MAX); /* without memory: cannot fail */
    if (alone)
        pthread_mutex_lock(&c->service->unpack_lock);
    int r = cox_wire_control_request_unpack(&c->arena, bytes, size, ret_request);
    if (!memory_count(c)) {
        cox_arena_deinit(&c->arena);
        r = COX_FULL;
    }
    if (alone)
        pthread_mutex_unlock(&c->service->unpack_lock);
    return r;
}

static int message_serve(struct connection *c, const uint8_t *bytes, size_t size)
{
    control_request *request;
    int r = message_unpack(c, bytes, size, &request);
    if (r)
        r = error_put(c, r,
                      r == COX_CORRUPT ? "the bytes are no ControlRequest"
                      : r == COX_FULL  ? BUSY
                                       : "the request is too large");
    else
        r = request_serve(c, request);
    if (!c->complete)
        cox_arena_deinit(&c->arena);
    c->deadline_ns = cox_deadline_after_ms(IDLE_MS);
    progress_note(c);
    return r;
}

/* Serves received messages while there is room for the replies. Returns 0; COX_EMPTY: more must be
 * read. */
static int messages_serve(struct connection *c)
{
    const uint8_t *bytes;
    size_t size;
    while (!c->last && !c->complete && cox_stream_pending(&c->stream) < PENDING_MAX) {
        int r = cox_stream_next(&c->stream, &bytes, &size);
        if (r == COX_CORRUPT)
            return error_put(c, r, "a message's length is outside 1 to 16 MiB");
        if (!r)
            r = message_serve(c, bytes, size);
        if (!r)
            r = prompts_submit(c);
        if (r)
            return r;
    }
    return 0;
}

/* ---- a connection's thread ---- */

static int poll_timeout(const struct connection *c)
{
    if (c->client || c->stopping)
        return -1;
    uint64_t now = cox_now_ns();
    if (now >= c->deadline_ns)
        return 0;
    return (int)((c->deadline_ns - now) / COX_NSEC_PER_MSEC) + 1;
}

static int connection_fill(struct connection *c)
{
    int r = cox_stream_fill(&c->stream);
    if (r == COX_CORRUPT)
        error_put(c, r, "fds or other control messages came: expected bytes alone");
    if (!r && !memory_count(c))
        r = error_put(c, COX_FULL, BUSY);
    return r;
}

/* Waits until there is something to do, and reads. A result other than 0 ends the connection. */
static int connection_wait(struct connection *c, bool reading)
{
    size_t pending = cox_stream_pending(&c->stream);
    struct pollfd fds[3] = {
        {.fd = c->stream.fd, .events = (short)((reading ? POLLIN : 0) | (pending ? POLLOUT : 0))},
        {.fd = c->service->end_fd, .events = POLLIN},
        {.fd = pending < PENDING_MAX ? c->wake_fd : -1, .events = POLLIN},
    };
    idle_set(c, waits_for_its_other_side(c), reading);
    int count = poll(fds, 3, poll_timeout(c));
    int e = errno;
    if (idle_set(c, false, false)) {
        error_put(
            c, COX_FULL,
            "another connection needed the place of this one, which asked for nothing or did not take its replies");
        return COX_CLOSED;
    }
    if (count < 0)
        return e == EINTR ? 0 : -e;
    if (count == 0)
        return poll_timeout(c) ? 0 : COX_TIMEOUT;
    if (fds[1].revents)
        return COX_CLOSED;
    uint64_t wakes;
    if (fds[2].revents && read(c->wake_fd, &wakes, sizeof wakes) < 0 && errno != EAGAIN &&
        errno != EINTR)
        return -errno;
    if (fds[0].revents & POLLIN)
        return connection_fill(c);
    return fds[0].revents & (POLLHUP | POLLERR | POLLNVAL) ? COX_CLOSED : 0;
}

/* The rest in the prompt queue follows with a wake, or when the stream is writable. */
static int results_send(struct connection *c)
{
    int r;
    bool full;
    do {
        r = results_put(c);
        full = cox_stream_pending(&c->stream) >= PENDING_MAX;
        size_t pending = cox_stream_pending(&c->stream);
        if (!r)
            r = cox_stream_flush(&c->stream);
        if (cox_stream_pending(&c->stream) < pending)
            progress_note(c);
    } while (!r && full && cox_stream_pending(&c->stream) < PENDING_MAX);
    return r;
}

static int connection_turn(struct connection *c)
{
    int r = results_send(c);
    if (!r)
        r = prompts_submit(c); /* after results, which make room */
    bool reading = false;
    if (!r) {
        r = messages_serve(c);
        reading = r == COX_EMPTY;
        r = reading ? 0 : r;
    }
    if (!r && c->last && !cox_stream_pending(&c->stream))
        r = COX_CLOSED;
    memory_count(c); /* what was served has given some back; a reply is small */
    return r ? r : connection_wait(c, reading);
}

static void *connection_main(void *context)
{
    struct connection *c = context;
    while (connection_turn(c) == 0)
        ;
    results_send(c); /* when the group ends: as much as can be written without waiting */
    if (c->client)
        prompts_leave(c);
    complete_end(c);
    cox_closer_hang_up(c->service->closer, &c->stream.fd);
    cox_stream_deinit(&c->stream);
    memory_count(c);
    pthread_mutex_lock(&c->service->lock);
    c->ended = true;
    if (c->spare)
        c->service->spare = NULL;
    pthread_mutex_unlock(&c->service->lock);
    return NULL;
}

/* A process that may start no thread is one whose status is wanted. */
static void *spare_main(void *context)
{
    struct cox_control_server *service = context;
    pthread_mutex_lock(&service->lock);
    for (;;) {
        while (!service->spare && !service->closing)
            pthread_cond_wait(&service->spare_wake, &service->lock);
        struct connection *c = service->spare;
        pthread_mutex_unlock(&service->lock);
        if (!c)
            return NULL;
        connection_main(c);
        pthread_mutex_lock(&service->lock);
    }
}

/* ---- constructor and destructor ---- */

int cox_control_server_new(const struct cox_control_options *options,
                           struct cox_control_server **ret_service, struct cox_error *err)
{
    struct cox_control_server *service = calloc(1, sizeof *service);
    if (!service)
        return cox_fail(err, -ENOMEM, "no memory for the control connections");
    service->options = *options;
    snprintf(service->phase.refusal, sizeof service->phase.refusal, "%s", STARTING);
    pthread_mutex_init(&service->lock, NULL);
    pthread_mutex_init(&service->unpack_lock, NULL);
    pthread_cond_init(&service->spare_wake, NULL);
    service->model = options->model ? strdup(options->model) : NULL;
    service->end_fd = eventfd(0, EFD_CLOEXEC);
    int r = options->model && !service->model ? -ENOMEM : service->end_fd < 0 ? -errno : 0;
    if (r == 0)
        r = cox_closer_new(&service->closer);
    if (r == 0)
        r = cox_thread_start(&service->spare_thread, spare_main, service);
    service->spare_started = r == 0;
    if (r) {
        cox_control_server_free(service);
        return cox_fail(err, r, "the control connections: %s", cox_status_text(r));
    }
    *ret_service = service;
    return 0;
}

struct cox_control_server *cox_control_server_free(struct cox_control_server *service)
{
    if (!service)
        return NULL;
    if (service->end_fd >= 0)
        cox_eventfd_signal(service->end_fd);
    for (size_t i = 0; i < SLOT_COUNT; i++)
        if (service->connections[i].used && !service->connections[i].spare)
            pthread_join(service->connections[i].thread, NULL);
    if (service->spare_started) {
        pthread_mutex_lock(&service->lock);
        service->closing = true;
        pthread_cond_signal(&service->spare_wake);
        pthread_mutex_unlock(&service->lock);
        pthread_join(service->spare_thread, NULL);
    }
    cox_closer_free(service->closer);
    cox_close_fd(&service->end_fd);
    pthread_cond_destroy(&service->spare_wake);
    pthread_mutex_destroy(&service->unpack_lock);
    pthread_mutex_destroy(&service->lock);
    free(service->model);
    free(service);
    return NULL;
}

void cox_control_server_update(struct cox_control_server *service,
                               const struct cox_control_phase *phase)
{
    pthread_mutex_lock(&service->lock);
    service->phase = *phase;
    if (!phase->refusal[0])
        snprintf(service->phase.refusal, sizeof service->phase.refusal, "%s", STARTING);
    pthread_mutex_unlock(&service->lock);
}

int cox_control_server_set_note(struct cox_control_server *service, const char *note,
                                struct cox_error *err)
{
    const size_t length = strlen(note);
    if (length >= COX_NOTE_SIZE)
        return cox_fail(err, COX_TOO_LARGE, "the note has %zu bytes: expected less than %d", length,
                        COX_NOTE_SIZE);
    pthread_mutex_lock(&service->lock);
    memcpy(service->note, note, length + 1);
    pthread_mutex_unlock(&service->lock);
    return 0;
}

/* A free slot; those of ended threads are free. NULL: there is none, or no room for another
 * connection. The lock is held. */
static struct connection *connection_find(struct cox_control_server *service)
{
    struct connection *found = NULL;
    for (size_t i = 0; i < SLOT_COUNT; i++) {
        struct connection *c = &service->connections[i];
        if (c->used && c->ended) {
            if (!c->spare)
                pthread_join(c->thread, NULL); /* it has nothing left to do */
            c->used = false;
        }
        if (!c->used && !found)
            found = c;
    }
    /* First finds a slot: no connection may lose its place for one that then has none. */
    return found && (places_count(service).taken < COX_CONTROL_CONNECTION_MAX ||
                     places_make_room(service, false))
               ? found
               : NULL;
}

int cox_control_server_take(struct cox_control_server *service, int fd, struct cox_error *err)
{
    struct cox_socket_peer peer = {0};
    int r = 0;
    pthread_mutex_lock(&service->lock);
    struct connection *c = NULL;
    cox_closer_turn(service->closer);
    if (cox_closer_counts(service->closer).waiting >= COX_CLOSER_WAITING_MAX) {
        r = cox_fail(
            err, COX_FULL,
            "%d connections wait to be closed with fds that were sent over them, and their closes hang (SO_LINGER, FUSE): try again later",
            COX_CLOSER_WAITING_MAX);
    } else if (!(c = connection_find(service))) {
        r = cox_fail(err, COX_FULL, "%d control connections are busy: try again later",
                     COX_CONTROL_CONNECTION_MAX);
    } else {
        *c = (struct connection){.service = service, .used = true, .wake_fd = -1};
        c->deadline_ns = cox_deadline_after_ms(IDLE_MS);
        c->idle_ns = cox_now_ns();
        c->pid = cox_socket_read_peer(fd, &peer) == 0 ? peer.pid : 0;
        c->uid = peer.uid;
        cox_peer_read_program(c->pid, c->program);
        cox_stream_init(&c->stream, fd);
        r = cox_thread_start(&c->thread, connection_main, c);
        if (r && !service->spare) {
            c->spare = true;
            service->spare = c;
            pthread_cond_signal(&service->spare_wake);
            r = 0;
        } else if (r) {
            c->used = false;
            cox_fail(err, r, "starting a thread: %s", cox_status_text(r));
        }
    }
    pthread_mutex_unlock(&service->lock);
    return r;
}

uint32_t cox_control_server_connection_count(struct cox_control_server *service)
{
    uint32_t count = 0;
    pthread_mutex_lock(&service->lock);
    for (size_t i = 0; i < SLOT_COUNT; i++)
        count += service->connections[i].used && !service->connections[i].ended;
    pthread_mutex_unlock(&service->lock);
    return count;
}
