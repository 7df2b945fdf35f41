/*
 * The agent of one machine: an executor for its ranks, and the link to the lead that it follows.
 *
 * Threads: frames come on a thread of libnats, or of a direct connection; one thread keeps the time
 *   and hands requests to the ranks that did not fit before; one starts, replaces and ends ranks, which
 *   takes time; one runs pulls; an outbox sends what is too large for NATS. `lock` protects the link and the fields below
 *   it. The executor's forward is called with it held; hooks of the executor take it, and hold none of
 *   the executor's locks then.
 */
#include "nodes.h"

#include "channel/base/options.h"
#include "channel/base/peer.h"
#include "channel/base/thread.h"
#include "channel/base/version.h"
#include "channel/recorder/recorder.h"
#include "channel/socket/control_socket.h"
#include "coordinator/executor/executor.h"
#include "group_relay.h"
#include "image.h"
#include "kv_relay.h"
#include "nodes/link/agent_link.h"
#include "nodes/link/lead_link.h"
#include "nodes/link/recorder_fetch.h"
#include "outbox.h"
#include "proto/executor.pb-c.h"
#include "proto/operation.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define TICK_NS (20 * COX_NSEC_PER_MSEC)
#define CONNECT_MS 10000
#define START_TIMEOUT_MS 60000
#define FLUSH_MS 500
/* How often it is looked whether ranks are stopped. */
#define LOOK_NS (250 * COX_NSEC_PER_MSEC)
/* How often their processor time and memory are read. */
#define USAGE_NS COX_NSEC_PER_SEC

struct agent {
    const struct cox_node_agent_options *options;
    struct cox_cluster *cluster;
    struct cox_direct *direct;
    struct cox_group_relay *relay;
    struct cox_kv_relay *kv;
    char address[160];

    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct cox_agent_link link;
    uint64_t cancelled_through[COX_TWO_WAY_COUNT], ended_through[COX_TWO_WAY_COUNT];
    enum cox_lead_state told;
    /* what the ranks were started with */
    uint32_t world, rank_first, rank_count, depth;
    uint64_t request_size[COX_CHANNEL_COUNT], response_size[COX_CHANNEL_COUNT];
    bool sealed, no_recorder;
    /* a lead wants ranks; they are other ones than those that run, which get nothing more */
    bool wanted, renew;
    /* They could not be started, as these incarnations: tried again for a later one. */
    bool not_started;
    uint32_t start_failed[COX_RANK_COUNT_MAX];
    /* NULL: no ranks run */
    struct cox_executor *executor;
    /* of each rank here: the incarnation that its process stands for with the present lead; 0: none yet */
    uint32_t claimed[COX_RANK_COUNT_MAX];
    /* its process is dead, and is not being replaced */
    bool dead[COX_RANK_COUNT_MAX];
    uint32_t killed[COX_RANK_COUNT_MAX];
    /* the request that the kv thread fetches blocks for; 0: none */
    uint64_t pulling;
    struct cox_images images;
    /* for what is too large for NATS; NULL: direct is not open */
    struct cox_outbox *outbox;
    /* all that frames of the lead need is there */
    bool opened;
    /* why the agent ends; 0 with ending: the group has ended */
    bool ending;
    int end_code;
    char end_text[400];
    bool threaded, time_threaded, kv_threaded;
    pthread_t thread, time_thread, kv_thread;
};

static void agent_say(const struct agent *agent, const char *text)
{
    if (agent->options->state)
        agent->options->state(agent->options->context, text);
    else
        cox_log_write(&agent->options->log, 5, "%s", text);
}

/* The lock is held. */
static void agent_end(struct agent *agent, int code, const char *text)
{
    if (agent->ending)
        return;
    agent->ending = true;
    agent->end_code = code;
    snprintf(agent->end_text, sizeof agent->end_text, "%s", text);
    pthread_cond_broadcast(&agent->changed);
}

/* The group is over for this machine. The lock is held. */
static void group_end(struct agent *agent, int code, const char *text)
{
    if (!agent->options->stay) {
        agent_end(agent, code, text);
        return;
    }
    cox_agent_link_release(&agent->link);
    agent->wanted = false;
    agent->renew = agent->executor != NULL;
    pthread_cond_broadcast(&agent->changed);
}

/* ---- sending ---- */

/* By a direct connection. Takes bytes. The lock is held. */
static void send_large(struct agent *agent, uint8_t *bytes, size_t size)
{
    if (agent->outbox)
        cox_outbox_put(agent->outbox, agent->link.lead_address, COX_DIRECT_FRAME, bytes, size, -1,
                       0);
    else
        free(bytes); /* as if it were lost */
}

/* The lock is held. */
static void agent_send(void *context, uint8_t *bytes, size_t size)
{
    struct agent *agent = context;
    if (agent->cluster && size <= cox_cluster_size_max(agent->cluster) / 2)
        cox_cluster_send(agent->cluster, NULL, bytes, size);
    else
        send_large(agent, bytes, size);
}

/* The outbox has lost a message. */
static void on_lost(void *context, uint32_t number)
{
    struct agent *agent = context;
    (void)number;
    pthread_mutex_lock(&agent->lock);
    cox_agent_link_lost(&agent->link);
    pthread_mutex_unlock(&agent->lock);
}

/* The lock is held. */
static void send_message(struct agent *agent, enum cox_frame_kind kind,
                         const ProtobufCMessage *message)
{
    const struct cox_frame head = {.kind = kind,
                                   .epoch = agent->link.epoch,
                                   .incarnation = agent->link.incarnation,
                                   .sent_ns = cox_now_ns()};
    size_t size;
    uint8_t *bytes = cox_frame_of_message(&head, message, &size);
    if (bytes)
        agent_send(agent, bytes, size);
}

static void hello_send(struct agent *agent)
{
    const struct cox_node_agent_options *options = agent->options;
    CoxNode__Hello hello = COX_NODE__HELLO__INIT;
    CoxNode__Channel channels[COX_TWO_WAY_COUNT], *channel_pointers[COX_TWO_WAY_COUNT];
    const uint64_t now_ns = cox_now_ns();
    char server_id[64] = "";
    uint64_t client_id = 0;
    if (!agent->cluster)
        return;
    CoxNode__Fact *facts = calloc(options->fact_count + 1, sizeof *facts);
    CoxNode__Fact **pointers = calloc(options->fact_count + 1, sizeof(CoxNode__Fact *));
    if (!facts || !pointers) {
        free(facts);
        free(pointers);
        return;
    }
    cox_cluster_identity(agent->cluster, server_id, &client_id);
    for (size_t i = 0; i < options->fact_count; i++) {
        cox_node__fact__init(&facts[i]);
        facts[i].name = (char *)(uintptr_t)options->facts[i].name;
        facts[i].value = (char *)(uintptr_t)options->facts[i].value;
        pointers[i] = &facts[i];
    }
    hello.version = (char *)(uintptr_t)COX_VERSION_TEXT;
    hello.has_protocol = hello.has_agent = hello.has_pid = hello.has_client_id = 1;
    hello.protocol = COX_FRAME_PROTOCOL;
    hello.agent = agent->link.agent;
    hello.pid = (uint32_t)getpid();
    hello.address = agent->address;
    hello.server_id = server_id;
    hello.client_id = client_id;
    hello.n_facts = options->fact_count;
    hello.facts = pointers;
    uint64_t digests[COX_IMAGE_COUNT_MAX];
    for (uint32_t i = 0; i < agent->images.count; i++)
        digests[i] = agent->images.images[i].digest;
    hello.n_images = agent->images.count;
    hello.images = digests;
    cox_agent_link_describe(&agent->link, now_ns, &hello, channels, channel_pointers);
    /* Without ranks nothing goes on. */
    if (!agent->executor)
        hello.rank_count = 0;
    struct cox_group_window window;
    hello.has_generation = agent->executor && !cox_executor_group_window(agent->executor, &window);
    hello.generation = hello.has_generation ? window.generation : 0;
    hello.has_world = 1;
    hello.world = agent->world;
    send_message(agent, COX_FRAME_HELLO, &hello.base);
    free(facts);
    free(pointers);
}

static void text_send(struct agent *agent, int32_t rank, bool is_stderr, bool is_fault,
                      const char *text)
{
    CoxNode__Text message = COX_NODE__TEXT__INIT;
    message.has_rank = message.has_is_stderr = message.has_is_fault = 1;
    message.rank = rank;
    message.is_stderr = is_stderr;
    message.is_fault = is_fault;
    message.text = (char *)(uintptr_t)text;
    pthread_mutex_lock(&agent->lock);
    if (agent->link.state == COX_LEAD_FOLLOWING)
        send_message(agent, COX_FRAME_TEXT, &message.base);
    pthread_mutex_unlock(&agent->lock);
}

/* The flight recorders of the ranks that a frame asks for, with their times on the lead's clock. The
 * lock is held. */
static void recorders_send(struct agent *agent, const struct cox_frame *ask)
{
    const int64_t offset = cox_agent_link_offset(&agent->link);
    void *copy = malloc(cox_recorder_block_size(false));
    if (!copy)
        return; /* the lead does not wait for ever */
    for (uint32_t i = 0; i < agent->rank_count; i++) {
        const uint32_t rank = agent->rank_first + i;
        if (!cox_rank_set_has(&ask->asked, rank))
            continue;
        const bool recorded =
            agent->executor && cox_executor_recorder(agent->executor, rank, copy, 0, NULL) == 0;
        if (recorded)
            cox_recorder_shift(copy, -offset);
        size_t size;
        uint8_t *bytes =
            cox_recorder_fetch_reply(ask, rank, recorded ? copy : NULL, cox_now_ns(), &size);
        if (bytes)
            send_large(agent, bytes, size);
    }
    free(copy);
}

/* ---- hooks of the executor ---- */

static void on_line(void *context, uint32_t rank, bool is_stderr, const char *text)
{
    struct agent *agent = context;
    if (agent->options->line)
        agent->options->line(agent->options->context, rank, is_stderr, text);
    text_send(agent, (int32_t)rank, is_stderr, false, text);
}

static void on_fault(void *context, int32_t rank, const char *text)
{
    text_send(context, rank, false, true, text);
}

/* "rank 5 (pid 123) was killed by ...": the lead knows rank and node. */
static const char *behind_name(const char *text)
{
    const char *end = strstr(text, ") ");
    return end ? end + 2 : text;
}

/* The lock is held. */
static void rank_say_dead(struct agent *agent, uint32_t rank, uint32_t pid, const char *text,
                          bool known, int signal, int exit_status)
{
    const uint32_t i = rank - agent->rank_first;
    /* One that died before it stood for anything was that. */
    if (!agent->claimed[i])
        agent->claimed[i] = agent->link.wanted[i];
    struct cox_agent_rank is = {
        .incarnation = agent->claimed[i],
        .state = COX_NODE__RANK_STATE__DEAD,
        .pid = pid,
        .known = known,
        .signal = signal,
        .exit_status = exit_status,
    };
    snprintf(is.text, sizeof is.text, "%s", text);
    agent->dead[i] = true;
    cox_agent_link_set_rank(&agent->link, rank, &is);
    cox_agent_link_tick(&agent->link, cox_now_ns());
}

static void on_death(void *context, uint32_t rank, const char *text)
{
    struct agent *agent = context;
    char ignored[8];
    (void)ignored;
    pthread_mutex_lock(&agent->lock);
    struct cox_executor *executor = agent->executor;
    pthread_mutex_unlock(&agent->lock);
    struct cox_executor_status status;
    struct cox_rank_status *ranks = executor ? calloc(COX_RANK_COUNT_MAX, sizeof *ranks) : NULL;
    int signal = 0, exit_status = -1;
    uint32_t pid = 0;
    if (ranks) {
        cox_executor_status(executor, &status, ranks);
        signal = ranks[rank].signal;
        exit_status = ranks[rank].exit_status;
        pid = (uint32_t)ranks[rank].pid;
    }
    free(ranks);
    agent_say(agent, text);
    pthread_mutex_lock(&agent->lock);
    rank_say_dead(agent, rank, pid, behind_name(text), signal || exit_status >= 0, signal,
                  exit_status);
    pthread_mutex_unlock(&agent->lock);
}

/* A reply that is no reply: what the lead's executor makes of it is a failure of the rank. */
static uint8_t *failure_pack(const struct cox_forwarded_reply *reply, size_t *ret_size)
{
    Coxswain__ExecuteResponse response = COXSWAIN__EXECUTE_RESPONSE__INIT;
    response.has_rank = response.has_status = 1;
    response.rank = (int32_t)reply->rank;
    response.status = reply->code ? reply->code : COX_REJECTED;
    response.error_text = (char *)(uintptr_t)(reply->text ? reply->text : "");
    *ret_size = coxswain__execute_response__get_packed_size(&response);
    uint8_t *bytes = malloc(*ret_size);
    if (bytes)
        coxswain__execute_response__pack(&response, bytes);
    return bytes;
}

static void on_forwarded(void *context, const struct cox_forwarded *forwarded)
{
    struct agent *agent = context;
    struct cox_answer answer = {.status = forwarded->status};
    uint8_t *owned[COX_RANK_COUNT_MAX];
    uint32_t owned_count = 0;
    bool done = true;
    if (forwarded->status == COX_LATE) {
        pthread_mutex_lock(&agent->lock);
        cox_agent_link_done(&agent->link, forwarded->channel, forwarded->sequence);
        cox_agent_link_tick(&agent->link, cox_now_ns());
        pthread_cond_broadcast(&agent->changed); /* the next pull may begin */
        pthread_mutex_unlock(&agent->lock);
        return;
    }
    for (uint32_t i = 0; i < forwarded->reply_count; i++) {
        const struct cox_forwarded_reply *from = &forwarded->replies[i];
        struct cox_answer_reply *to = &answer.replies[answer.count++];
        *to = (struct cox_answer_reply){.rank = from->rank,
                                        .flags = (from->replied ? COX_ANSWER_REPLIED : 0u) |
                                                 (from->dead ? COX_ANSWER_DEAD : 0u) |
                                                 (from->failed ? COX_ANSWER_FAILED : 0u),
                                        .bytes = from->bytes,
                                        .size = from->size};
        if (from->replied && !from->bytes) {
            uint8_t *bytes = failure_pack(from, &to->size);
            if (bytes)
                owned[owned_count++] = bytes;
            to->bytes = bytes;
            to->size = bytes ? to->size : 0;
            to->flags |= COX_ANSWER_FAILED;
        }
        done = done && (from->replied || from->dead);
    }
    pthread_mutex_lock(&agent->lock);
    cox_agent_link_answer(&agent->link, forwarded->channel, forwarded->sequence, &answer, done,
                          cox_now_ns());
    if (forwarded->channel == COX_CHANNEL_TRANSFER) {
        if (forwarded->sequence == agent->pulling)
            cox_kv_relay_cancel(agent->kv); /* the ranks have ended, with all blocks or without */
        pthread_cond_broadcast(&agent->changed);
    }
    pthread_mutex_unlock(&agent->lock);
    while (owned_count > 0)
        free(owned[--owned_count]);
}

/* ---- requests ---- */

/* The ranks refuse the request: says so for each that was asked. */
static void run_refused(struct agent *agent, const struct cox_frame *frame, int r,
                        const struct cox_error *why)
{
    struct cox_answer answer = {.status = r};
    uint8_t *bytes[COX_RANK_COUNT_MAX];
    for (uint32_t i = 0; i < agent->rank_count; i++) {
        const uint32_t rank = agent->rank_first + i;
        if (!cox_rank_set_has(&frame->asked, rank))
            continue;
        struct cox_answer_reply *reply = &answer.replies[answer.count];
        const struct cox_forwarded_reply failed = {.rank = rank, .code = r, .text = why->text};
        *reply = (struct cox_answer_reply){.rank = rank, .flags = COX_ANSWER_DEAD};
        bytes[answer.count] = NULL;
        if (r != COX_PEER_DEAD) {
            reply->flags = COX_ANSWER_REPLIED | COX_ANSWER_FAILED;
            bytes[answer.count] = failure_pack(&failed, &reply->size);
            reply->bytes = bytes[answer.count];
            reply->size = reply->bytes ? reply->size : 0;
        }
        answer.count++;
    }
    cox_agent_link_answer(&agent->link, frame->channel, frame->sequence, &answer, true,
                          cox_now_ns());
    for (uint32_t i = 0; i < answer.count; i++)
        free(bytes[i]);
}

/* The ranks form their group, of which others are on other machines. The lock is held. */
static void relay_begin(struct agent *agent)
{
    struct cox_group_mirror_options options = {.rank_count = agent->world,
                                               .rank_first = agent->rank_first,
                                               .rank_here = agent->rank_count};
    struct cox_group_window window;
    struct cox_error why = {0};
    if (cox_executor_group_window(agent->executor, &window))
        return;
    options.fd = window.fd;
    options.fd_offset = window.offset;
    options.generation = window.generation;
    options.value_size = window.value_size;
    options.words = window.words;
    options.values = window.values;
    options.wakeups = window.wakeups;
    cox_group_relay_set_peers(agent->relay, agent->link.peers, agent->link.peer_count);
    if (cox_group_relay_begin(agent->relay, &options, &why))
        cox_log_write(&agent->options->log, 3, "%s", why.text);
}

static void info_translate(const struct cox_agent_link *link,
                           Coxswain__PullKVRequest__PullKVInfo *info)
{
    if (info->deadline_ns)
        info->deadline_ns = cox_agent_link_here(link, info->deadline_ns);
    if (info->lease_ns)
        info->lease_ns = cox_agent_link_here(link, info->lease_ns);
}

/* Times of the lead become times here, and KV blocks of other machines those that stand for them. Other
 * requests are passed on as they are. Returns the bytes, which the caller frees; NULL: they stay. */
static uint8_t *request_rewrite(struct agent *agent, const struct cox_frame *frame,
                                size_t *ret_size, int *ret_status, struct cox_error *err)
{
    if (frame->type != COXSWAIN__EXECUTE_TYPE__PD_LINK &&
        frame->type != COXSWAIN__EXECUTE_TYPE__KV_TRANSFER &&
        frame->type != COXSWAIN__EXECUTE_TYPE__LORA_OPERATION)
        return NULL;
    const struct cox_agent_link *link = &agent->link;
    Coxswain__ExecuteRequest *message =
        coxswain__execute_request__unpack(NULL, frame->size, frame->payload);
    if (!message)
        return NULL; /* the ranks say so */
    if (message->has_deadline_ns && message->deadline_ns)
        message->deadline_ns = cox_agent_link_here(link, message->deadline_ns);
    if (message->request_case == COXSWAIN__EXECUTE_REQUEST__REQUEST_PD_LINK_REQUEST)
        *ret_status =
            cox_kv_relay_link(agent->kv, message->pd_link_request, agent->rank_first,
                              agent->rank_count, cox_executor_socket(agent->executor), err);
    if (message->request_case == COXSWAIN__EXECUTE_REQUEST__REQUEST_PULL_KV_REQUEST)
        for (size_t i = 0; i < message->pull_kv_request->n_pull_kv_infos; i++)
            info_translate(link, message->pull_kv_request->pull_kv_infos[i]);
    *ret_size = coxswain__execute_request__get_packed_size(message);
    uint8_t *bytes = malloc(*ret_size + 1);
    if (bytes)
        coxswain__execute_request__pack(message, bytes);
    coxswain__execute_request__free_unpacked(message, NULL);
    return bytes;
}

/* Hands one request to the ranks. Returns 0; COX_FULL: there is no room now; or why the lead was refused.
 * The lock is held. */
static int run_request(struct agent *agent, const struct cox_frame *frame, uint64_t deadline_ns)
{
    struct cox_error why = {0};
    const struct cox_operation *operation = cox_operation_find(frame->type);
    struct cox_transport_request request = {
        .channel = (enum cox_channel_id)frame->channel,
        .type = frame->type,
        .sequence = frame->sequence,
        .deadline_ns = deadline_ns,
        .asked = &frame->asked,
        .bytes = frame->payload,
        .size = frame->size,
        .replies = true,
    };
    int r = 0;
    if (frame->type == COXSWAIN__EXECUTE_TYPE__MODEL_FINALIZE) {
        /* The ranks are ended as those of any executor are. */
        cox_agent_link_taken(&agent->link, frame->channel, frame->sequence, true);
        agent->renew = true;
        agent->wanted = false;
        pthread_cond_broadcast(&agent->changed);
        return 0;
    }
    cox_images_translate(&agent->images, (uint8_t *)(uintptr_t)frame->payload, frame->size);
    uint8_t *rewritten = request_rewrite(agent, frame, &request.size, &r, &why);
    if (rewritten)
        request.bytes = rewritten;
    else
        request.size = frame->size;
    if (frame->type == COXSWAIN__EXECUTE_TYPE__MODEL_INIT)
        cox_group_relay_pause(agent->relay); /* its memory may be renewed */
    if (r == 0)
        r = cox_executor_forward(agent->executor, &request, &why);
    free(rewritten);
    if (r == COX_FULL || r == COX_LATE)
        return COX_FULL;
    if (r == 0 && frame->type == COXSWAIN__EXECUTE_TYPE__MODEL_INIT)
        relay_begin(agent);
    cox_agent_link_taken(&agent->link, frame->channel, frame->sequence,
                         r == 0 && operation && !operation->replies);
    if (r)
        run_refused(agent, frame, r, &why);
    return r;
}

/* Hands requests to the ranks as long as there is room. The lock is held. */
static void run_requests(struct agent *agent)
{
    struct cox_agent_link *link = &agent->link;
    struct cox_frame frame;
    uint64_t deadline_ns;
    if (!agent->executor || agent->renew)
        return;
    for (uint32_t c = 0; c < COX_TWO_WAY_COUNT; c++) {
        /* Pulls wait for blocks of other machines: a thread of their own runs them. */
        while (c != COX_CHANNEL_TRANSFER &&
               cox_agent_link_next(link, c, cox_now_ns(), &frame, &deadline_ns) &&
               run_request(agent, &frame, deadline_ns) != COX_FULL)
            ;
        if (link->channels[c].ended > agent->ended_through[c]) {
            agent->ended_through[c] = link->channels[c].ended;
            cox_executor_end_forwarded(agent->executor, (enum cox_channel_id)c,
                                       agent->ended_through[c]);
        }
        if (link->channels[c].void_through > agent->cancelled_through[c]) {
            agent->cancelled_through[c] = link->channels[c].void_through;
            cox_executor_cancel_steps(agent->executor, (enum cox_channel_id)c,
                                      agent->cancelled_through[c]);
        }
    }
    if (cox_agent_link_next(link, COX_CHANNEL_TRANSFER, cox_now_ns(), &frame, &deadline_ns))
        pthread_cond_broadcast(&agent->changed);
}

/* Hands a request of the transfer channel to the ranks, and fetches what it pulls from other machines.
 * Returns false: there is no room now. The lock is held, and released while blocks come. */
static bool run_transfer(struct agent *agent, const struct cox_frame *frame, uint64_t deadline_ns)
{
    Coxswain__ExecuteRequest *message =
        coxswain__execute_request__unpack(NULL, frame->size, frame->payload);
    const Coxswain__PullKVRequest *pulls =
        message && message->request_case == COXSWAIN__EXECUTE_REQUEST__REQUEST_PULL_KV_REQUEST
            ? message->pull_kv_request
            : NULL;
    const uint32_t first = agent->rank_first, count = agent->rank_count;
    for (size_t i = 0; pulls && i < pulls->n_pull_kv_infos; i++)
        info_translate(&agent->link, pulls->pull_kv_infos[i]);
    if (pulls)
        cox_kv_relay_expect(agent->kv, pulls, first, count);
    const int r = run_request(agent, frame, deadline_ns);
    if (pulls && r)
        cox_kv_relay_give_up(agent->kv, pulls, first, count);
    if (pulls && r == 0) {
        agent->pulling = frame->sequence;
        pthread_mutex_unlock(&agent->lock);
        cox_kv_relay_pull(agent->kv, pulls, first, count, deadline_ns);
        pthread_mutex_lock(&agent->lock);
        agent->pulling = 0;
    }
    coxswain__execute_request__free_unpacked(message, NULL);
    return r != COX_FULL;
}

static void *kv_main(void *context)
{
    struct agent *agent = context;
    pthread_setname_np(pthread_self(), "cox-node-kv");
    pthread_mutex_lock(&agent->lock);
    while (!agent->ending) {
        struct cox_frame frame;
        uint64_t deadline_ns;
        const struct cox_agent_channel *transfer = &agent->link.channels[COX_CHANNEL_TRANSFER];
        /* The ranks have replied to the request before. */
        const bool ran = agent->executor && !agent->renew && transfer->done == transfer->taken &&
                         cox_agent_link_next(&agent->link, COX_CHANNEL_TRANSFER, cox_now_ns(),
                                             &frame, &deadline_ns) &&
                         run_transfer(agent, &frame, deadline_ns);
        /* run_requests says when there is one, at each tick too. */
        if (!ran && !agent->ending)
            pthread_cond_wait(&agent->changed, &agent->lock);
    }
    pthread_mutex_unlock(&agent->lock);
    return NULL;
}

/* ---- ranks ---- */

/* Compares what the lead wants with what runs. Returns a rank that needs another process, -1: none.
 * The lock is held. */
static int32_t ranks_compare(struct agent *agent)
{
    struct cox_agent_link *link = &agent->link;
    int32_t needs = -1;
    if (!agent->executor || agent->renew || link->state != COX_LEAD_FOLLOWING)
        return -1;
    for (uint32_t i = 0; i < agent->rank_count; i++) {
        const uint32_t rank = agent->rank_first + i, wanted = link->wanted[i];
        if (link->killed[i] && link->killed[i] == agent->claimed[i] &&
            agent->killed[i] != link->killed[i]) {
            agent->killed[i] = link->killed[i];
            cox_executor_kill(agent->executor, rank, NULL);
        }
        if (!wanted || agent->claimed[i] == wanted)
            continue;
        if (!agent->dead[i] && !agent->claimed[i]) {
            agent->claimed[i] = wanted;
            const struct cox_agent_rank is = {
                .incarnation = wanted,
                .state = COX_NODE__RANK_STATE__UP,
                .pid = (uint32_t)cox_executor_pid(agent->executor, rank),
            };
            cox_agent_link_set_rank(link, rank, &is);
        } else if (!agent->dead[i]) {
            /* The lead has given it up, and it lives. */
            if (agent->killed[i] != agent->claimed[i]) {
                agent->killed[i] = agent->claimed[i];
                cox_executor_kill(agent->executor, rank, NULL);
            }
        } else if (needs < 0) {
            needs = (int32_t)rank;
        }
    }
    return needs;
}

static void start_ranks(struct agent *agent)
{
    const struct cox_node_agent_options *from = agent->options;
    char name[COX_NAME_SIZE_MAX + 1];
    struct cox_executor_options options = COX_EXECUTOR_OPTIONS_INIT;
    struct cox_executor *executor = NULL;
    struct cox_error why = {0};
    pthread_mutex_lock(&agent->lock);
    snprintf(name, sizeof name, "%.30s.%s", from->group, from->node);
    options.name = name;
    options.rank_count = agent->world;
    options.rank_first = agent->rank_first;
    options.rank_here = agent->rank_count;
    options.command = from->command;
    options.no_flags = true;
    options.forwarded_model = from->model;
    options.depth = agent->depth;
    options.attach = agent->sealed ? COX_ATTACH_SEALED : COX_ATTACH_NAMED;
    options.no_recorder = agent->no_recorder;
    memcpy(options.request_size, agent->request_size, sizeof options.request_size);
    memcpy(options.response_size, agent->response_size, sizeof options.response_size);
    options.runtime_dir = from->runtime_dir;
    options.crash_dir = agent->no_recorder ? NULL : from->crash_dir;
    options.start_timeout_ms = from->start_timeout_ms ? from->start_timeout_ms : START_TIMEOUT_MS;
    options.log = from->log;
    options.hook_context = agent;
    options.line = on_line;
    options.fault = on_fault;
    options.death = on_death;
    options.forwarded = on_forwarded;
    /* Before there are processes, which may die at once. */
    memset(agent->claimed, 0, sizeof agent->claimed);
    memset(agent->dead, 0, sizeof agent->dead);
    memset(agent->killed, 0, sizeof agent->killed);
    pthread_mutex_unlock(&agent->lock);
    int r = cox_executor_start(&options, &executor, &why);
    char text[sizeof why.text + 32];
    snprintf(text, sizeof text, "could not be started: %s", why.text);
    pthread_mutex_lock(&agent->lock);
    if (r) {
        /* The lead's start, or replacement, fails with this text; it may want another one. */
        agent->wanted = false;
        agent->not_started = true;
        for (uint32_t i = 0; i < agent->rank_count; i++) {
            agent->start_failed[i] = agent->link.wanted[i];
            if (agent->link.wanted[i])
                rank_say_dead(agent, agent->rank_first + i, 0, text, false, 0, -1);
        }
        memset(agent->dead, 0, sizeof agent->dead);
    } else {
        agent->executor = executor;
        memset(agent->cancelled_through, 0, sizeof agent->cancelled_through);
        memset(agent->ended_through, 0, sizeof agent->ended_through);
        ranks_compare(agent);
        cox_agent_link_tick(&agent->link, cox_now_ns());
        run_requests(agent);
    }
    pthread_mutex_unlock(&agent->lock);
    if (r)
        agent_say(agent, why.text);
}

static void stop_ranks(struct agent *agent)
{
    pthread_mutex_lock(&agent->lock);
    struct cox_executor *executor = agent->executor;
    const uint64_t epoch = agent->link.epoch, incarnation = agent->link.incarnation;
    agent->executor = NULL;
    agent->renew = false;
    pthread_mutex_unlock(&agent->lock);
    if (!executor)
        return;
    cox_group_relay_pause(agent->relay);
    cox_executor_stop(executor);
    pthread_mutex_lock(&agent->lock);
    /* Unless another lead has come, for which these have never stood, or comes meanwhile. */
    const bool same = agent->link.epoch == epoch && agent->link.incarnation == incarnation &&
                      agent->link.state == COX_LEAD_FOLLOWING;
    for (uint32_t i = 0; i < agent->rank_count && same; i++)
        if (!agent->dead[i] && agent->claimed[i])
            rank_say_dead(agent, agent->rank_first + i, 0, "has ended with its group", true, 0, 0);
    pthread_mutex_unlock(&agent->lock);
    cox_executor_free(executor);
}

static void restart_rank(struct agent *agent, uint32_t rank)
{
    const uint32_t i = rank - agent->rank_first;
    struct cox_error why = {0};
    const uint64_t timeout_ms =
        agent->options->start_timeout_ms ? agent->options->start_timeout_ms : START_TIMEOUT_MS;
    /* Before there is another process, which may die at once. */
    pthread_mutex_lock(&agent->lock);
    agent->dead[i] = false;
    agent->claimed[i] = 0;
    pthread_mutex_unlock(&agent->lock);
    int r = cox_executor_restart(agent->executor, rank, cox_deadline_after_ms(timeout_ms), &why);
    pthread_mutex_lock(&agent->lock);
    if (r == 0)
        ranks_compare(agent);
    else
        rank_say_dead(agent, rank, 0, why.text, false, 0, -1); /* the next attempt is the lead's */
    cox_agent_link_tick(&agent->link, cox_now_ns());
    pthread_mutex_unlock(&agent->lock);
}

/* Ranks that could not be started are tried again when the lead wants another incarnation. */
static void start_again(struct agent *agent)
{
    if (agent->executor || agent->wanted || !agent->not_started ||
        agent->link.state != COX_LEAD_FOLLOWING)
        return;
    for (uint32_t i = 0; i < agent->rank_count; i++)
        agent->wanted = agent->wanted || agent->link.wanted[i] > agent->start_failed[i];
    if (agent->wanted)
        agent->not_started = false;
}

/* Starts, replaces and ends ranks. */
static void *agent_main(void *context)
{
    struct agent *agent = context;
    pthread_setname_np(pthread_self(), "cox-node-ranks");
    pthread_mutex_lock(&agent->lock);
    while (!agent->ending) {
        const int32_t needs = ranks_compare(agent);
        start_again(agent);
        const bool renew = agent->renew, start = agent->wanted && !agent->executor;
        pthread_mutex_unlock(&agent->lock);
        if (renew)
            stop_ranks(agent);
        else if (start)
            start_ranks(agent);
        else if (needs >= 0)
            restart_rank(agent, (uint32_t)needs);
        pthread_mutex_lock(&agent->lock);
        if (!renew && !start && needs < 0 && !agent->ending)
            pthread_cond_wait(&agent->changed, &agent->lock);
    }
    pthread_mutex_unlock(&agent->lock);
    return NULL;
}

/* ---- frames ---- */

static void welcome_take(struct agent *agent, const CoxNode__Welcome *welcome)
{
    if (welcome->agent != agent->link.agent)
        return;
    if (welcome->refusal) {
        agent_end(agent, welcome->final ? COX_INVALID : COX_TAKEN, welcome->refusal);
        return;
    }
    if (welcome->rank_count == 0 || welcome->world > COX_RANK_COUNT_MAX ||
        welcome->rank_first >= welcome->world ||
        welcome->rank_count > welcome->world - welcome->rank_first || welcome->depth == 0 ||
        welcome->depth > COX_NODE_DEPTH_MAX || welcome->n_request_size != COX_CHANNEL_COUNT ||
        welcome->n_response_size != COX_CHANNEL_COUNT ||
        cox_agent_link_follow(&agent->link, welcome, cox_now_ns()))
        return;
    const size_t sizes = sizeof agent->request_size;
    bool behind = false;
    for (uint32_t c = 0; c < COX_TWO_WAY_COUNT && agent->executor; c++)
        behind = behind || cox_executor_forwarded_through(agent->executor, (enum cox_channel_id)c) >
                               agent->link.channels[c].taken;
    /* Numbers do not come again: ranks that have seen later ones are started anew. */
    const bool same = agent->executor && !behind && !welcome->fresh &&
                      agent->world == welcome->world && agent->rank_first == welcome->rank_first &&
                      agent->rank_count == welcome->rank_count && agent->depth == welcome->depth &&
                      agent->sealed == welcome->sealed &&
                      agent->no_recorder == welcome->no_recorder &&
                      !memcmp(agent->request_size, welcome->request_size, sizes) &&
                      !memcmp(agent->response_size, welcome->response_size, sizes);
    /* Also ranks that are to end, and have not yet. */
    agent->renew = agent->executor && (agent->renew || !same);
    agent->not_started = false;
    agent->wanted = true;
    agent->world = welcome->world;
    agent->rank_first = welcome->rank_first;
    agent->rank_count = welcome->rank_count;
    agent->depth = welcome->depth;
    agent->sealed = welcome->sealed;
    agent->no_recorder = welcome->no_recorder;
    memcpy(agent->request_size, welcome->request_size, sizes);
    memcpy(agent->response_size, welcome->response_size, sizes);
    /* Ranks that live may be taken over, and stand for nothing yet. */
    memset(agent->claimed, 0, sizeof agent->claimed);
    memset(agent->killed, 0, sizeof agent->killed);
    for (uint32_t i = 0; i < agent->rank_count; i++)
        agent->link.ranks[i] = (struct cox_agent_rank){0};
    /* What they do for the lead before is over. */
    if (same) {
        const uint64_t through =
            cox_executor_forwarded_through(agent->executor, COX_CHANNEL_EXECUTE);
        cox_executor_cancel_steps(agent->executor, COX_CHANNEL_EXECUTE, through);
        for (uint32_t c = 0; c < COX_TWO_WAY_COUNT; c++)
            cox_executor_end_forwarded(agent->executor, (enum cox_channel_id)c, UINT64_MAX);
    }
    pthread_cond_broadcast(&agent->changed);
}

/* May take *owned, the same bytes; NULL: they are lent. */
static void frame_take(struct agent *agent, const uint8_t *bytes, size_t size, uint8_t **owned)
{
    struct cox_frame frame;
    struct cox_error why = {0};
    const uint64_t now_ns = cox_now_ns();
    int r = cox_frame_unpack(bytes, size, &frame, &why);
    pthread_mutex_lock(&agent->lock);
    if (!agent->opened) {
        pthread_mutex_unlock(&agent->lock);
        return; /* the lead says it again */
    }
    if (r == 0 && frame.kind == COX_FRAME_SEEK) {
        if (cox_agent_link_greets(&agent->link, &frame, COX_STALE, now_ns))
            hello_send(agent);
    } else if (r == 0 && frame.kind == COX_FRAME_WELCOME) {
        CoxNode__Welcome *welcome = cox_node__welcome__unpack(NULL, frame.size, frame.payload);
        if (welcome)
            welcome_take(agent, welcome);
        cox_node__welcome__free_unpacked(welcome, NULL);
    } else if (r == 0) {
        r = cox_agent_link_receive_owned(&agent->link, &frame, owned, now_ns, &why);
        if (r == 0 && frame.kind == COX_FRAME_RECORDER_ASK)
            recorders_send(agent, &frame);
        if (cox_agent_link_greets(&agent->link, &frame, r, now_ns))
            hello_send(agent);
        run_requests(agent);
        if (agent->link.finishing)
            group_end(agent, 0, "the group has ended");
        if (frame.kind == COX_FRAME_LEAD_BEAT) {
            cox_group_relay_set_peers(agent->relay, agent->link.peers, agent->link.peer_count);
            pthread_cond_broadcast(&agent->changed);
        }
        if (agent->link.changed)
            cox_agent_link_tick(&agent->link, now_ns);
    }
    pthread_mutex_unlock(&agent->lock);
    if (r && r != COX_STALE)
        cox_log_write(&agent->options->log, 4, "from the lead: %s", why.text);
}

static void on_frame(void *context, const char *node, const uint8_t *bytes, size_t size)
{
    (void)node;
    frame_take(context, bytes, size, NULL);
}

static void image_take(struct agent *agent, const uint8_t *bytes, size_t size)
{
    struct cox_error why = {0};
    struct cox_image image = {.fd = -1};
    char socket[COX_SOCKET_PATH_SIZE] = "";
    int r = cox_image_read(&image, bytes, size, &why);
    pthread_mutex_lock(&agent->lock);
    const char *path = agent->executor ? cox_executor_socket(agent->executor) : NULL;
    if (path)
        snprintf(socket, sizeof socket, "%s", path);
    if (r == 0 && image.fd < 0)
        image.fd = cox_images_find(&agent->images, image.digest, image.size);
    pthread_mutex_unlock(&agent->lock);
    if (r == 0 && image.fd < 0)
        r = cox_fail(&why, COX_NOT_FOUND, "those of digest %016" PRIx64 " are not here",
                     image.digest);
    if (r == 0)
        r = cox_image_export(&image, socket[0] ? socket : NULL, &why);
    if (r) {
        cox_image_close(&image);
        cox_log_write(&agent->options->log, 3, "weights from the lead: %s", why.text);
        return;
    }
    pthread_mutex_lock(&agent->lock);
    cox_images_add(&agent->images, &image);
    pthread_mutex_unlock(&agent->lock);
}

static void image_drop(struct agent *agent, const uint8_t *handle)
{
    pthread_mutex_lock(&agent->lock);
    cox_images_drop(&agent->images, handle);
    pthread_mutex_unlock(&agent->lock);
}

static void on_direct(void *context, const char *peer, const char *group, uint32_t kind,
                      uint8_t *bytes, size_t size)
{
    struct agent *agent = context;
    /* KV blocks go to, and come from, other groups; everything else is the group's own. */
    if ((kind == COX_DIRECT_FETCH || kind == COX_DIRECT_BLOCKS) && strncmp(peer, "node-", 5) == 0) {
        cox_kv_relay_take(agent->kv, peer, kind, bytes, size);
        return;
    }
    const bool own = strcmp(group, agent->options->group) == 0;
    const bool from_lead = own && strcmp(peer, "lead") == 0;
    if (own && kind == COX_DIRECT_GROUP && strncmp(peer, "node-", 5) == 0) {
        cox_group_relay_take(agent->relay, peer + 5, bytes, size);
        return;
    }
    if (from_lead && kind == COX_DIRECT_FRAME)
        frame_take(agent, bytes, size, &bytes);
    else if (from_lead && kind == COX_DIRECT_IMAGE)
        image_take(agent, bytes, size);
    else if (from_lead && kind == COX_DIRECT_DROP_IMAGE && size == sizeof(struct cox_handle))
        image_drop(agent, bytes);
    free(bytes);
}

static void on_connection(void *context, bool connected, const char *text)
{
    struct agent *agent = context;
    cox_log_write(&agent->options->log, connected ? 5 : 4, "the cluster: %s%s",
                  connected ? "connected again to " : "connection lost: ", text);
    pthread_mutex_lock(&agent->lock);
    if (connected && agent->cluster) {
        cox_cluster_identity(agent->cluster, agent->link.server_id, &agent->link.client_id);
        agent->link.changed = true;
        cox_agent_link_tick(&agent->link, cox_now_ns());
    }
    pthread_mutex_unlock(&agent->lock);
}

/* ---- time ---- */

/* The lock is held. */
static void tell_state(struct agent *agent)
{
    const enum cox_lead_state state = agent->link.state;
    char text[200];
    if (state == agent->told)
        return;
    if (state == COX_LEAD_FOLLOWING)
        snprintf(text, sizeof text,
                 "node %s follows its lead: ranks %" PRIu32 " to %" PRIu32 " of %" PRIu32,
                 agent->options->node, agent->rank_first, agent->rank_first + agent->rank_count - 1,
                 agent->world);
    else if (state == COX_LEAD_LOST)
        snprintf(text, sizeof text,
                 "node %s: the lead has not been heard for %" PRIu64
                 " ms; the ranks wait %.0f s for it, or another",
                 agent->options->node, agent->link.times.dead_ms,
                 (double)agent->link.times.lead_grace_ms / 1e3);
    else if (state == COX_LEAD_OVER)
        snprintf(text, sizeof text, "node %s: no lead has come: the ranks end",
                 agent->options->node);
    else
        snprintf(text, sizeof text, "node %s of the group '%s' waits for its lead",
                 agent->options->node, agent->options->group);
    agent->told = state;
    if (state != COX_LEAD_OVER || agent->options->stay)
        agent_say(agent, text); /* otherwise it is what the agent ends with */
    /* What waits for ranks of other nodes need not wait. */
    if (state == COX_LEAD_LOST && agent->executor)
        cox_executor_cancel_steps(
            agent->executor, COX_CHANNEL_EXECUTE,
            cox_executor_forwarded_through(agent->executor, COX_CHANNEL_EXECUTE));
    if (state == COX_LEAD_OVER)
        group_end(agent, COX_PEER_DEAD, text);
}

/* Whether ranks are stopped by a signal. The lock is held. */
static void look_for_stopped(struct agent *agent)
{
    for (uint32_t i = 0; agent->executor && i < agent->rank_count; i++) {
        struct cox_agent_rank *rank = &agent->link.ranks[i];
        const bool stopped =
            rank->state == COX_NODE__RANK_STATE__UP &&
            cox_peer_stopped(cox_executor_serving_pid(agent->executor, agent->rank_first + i));
        agent->link.changed = agent->link.changed || stopped != rank->stopped;
        rank->stopped = stopped;
    }
}

/* For the next beat. The lock is held. */
static void read_usage(struct agent *agent)
{
    for (uint32_t i = 0; agent->executor && i < agent->rank_count; i++) {
        struct cox_agent_rank *rank = &agent->link.ranks[i];
        if (rank->state != COX_NODE__RANK_STATE__UP)
            continue;
        const pid_t pid = cox_executor_serving_pid(agent->executor, agent->rank_first + i);
        cox_peer_cpu_time(pid, &rank->cpu_ns);
        cox_peer_resident(pid, &rank->resident_bytes);
    }
}

static void *time_main(void *context)
{
    struct agent *agent = context;
    uint64_t looked_ns = 0, usage_ns = 0;
    pthread_setname_np(pthread_self(), "cox-node-time");
    for (;;) {
        nanosleep(&(struct timespec){.tv_nsec = TICK_NS}, NULL);
        pthread_mutex_lock(&agent->lock);
        if (!agent->ending) {
            if (cox_now_ns() - looked_ns >= LOOK_NS) {
                looked_ns = cox_now_ns();
                look_for_stopped(agent);
            }
            if (cox_now_ns() - usage_ns >= USAGE_NS) {
                usage_ns = cox_now_ns();
                read_usage(agent);
            }
            cox_agent_link_tick(&agent->link, cox_now_ns());
            run_requests(agent);
            tell_state(agent);
        }
        const bool ending = agent->ending;
        pthread_mutex_unlock(&agent->lock);
        if (ending)
            return NULL;
    }
}

/* ---- run ---- */

/* Whether a process is a rank of this machine. */
static bool is_rank(void *context, pid_t pid)
{
    struct agent *agent = context;
    bool found = false;
    pthread_mutex_lock(&agent->lock);
    for (uint32_t i = 0; agent->executor && i < agent->rank_count; i++)
        found = found || cox_executor_pid(agent->executor, agent->rank_first + i) == pid;
    pthread_mutex_unlock(&agent->lock);
    return found;
}

static int outbox_open(struct agent *agent, struct cox_error *err)
{
    const struct cox_outbox_options options = {.direct = agent->direct,
                                               .peer = "lead",
                                               .log = agent->options->log,
                                               .context = agent,
                                               .lost = on_lost};
    struct cox_outbox *outbox = NULL;
    if (cox_outbox_new(&options, &outbox))
        return cox_fail(err, -ENOMEM, "no memory for the agent");
    pthread_mutex_lock(&agent->lock);
    agent->outbox = outbox;
    pthread_mutex_unlock(&agent->lock);
    return 0;
}

static int direct_open(struct agent *agent, struct cox_error *err)
{
    const struct cox_node_agent_options *options = agent->options;
    char host[128], listen[160], name[COX_NODE_NAME_MAX + 8];
    if (options->listen) {
        const char *colon = strrchr(options->listen, ':');
        if (!colon)
            return cox_fail(err, COX_INVALID, "--listen '%s' is no HOST:PORT", options->listen);
        snprintf(listen, sizeof listen, "%s", options->listen);
        snprintf(host, sizeof host, "%.*s", (int)(colon - options->listen), options->listen);
    } else {
        if (!cox_cluster_local_address(agent->cluster, host, sizeof host))
            snprintf(host, sizeof host, "127.0.0.1");
        snprintf(listen, sizeof listen, "%s:0", host);
    }
    snprintf(name, sizeof name, "node-%s", options->node);
    const struct cox_direct_options direct = {
        .name = name,
        .group = options->group,
        .ca = options->access.ca,
        .certificate = options->access.certificate,
        .key = options->access.key,
        .insecure_loopback = options->access.insecure_loopback,
        .listen = listen,
        .context = agent,
        .on_message = on_direct,
    };
    int r = cox_direct_open(&direct, &agent->direct, err);
    if (r == 0)
        r = outbox_open(agent, err);
    if (r == 0)
        r = cox_group_relay_new(agent->direct, options->node, &options->log, &agent->relay, err);
    if (r == 0)
        snprintf(agent->address, sizeof agent->address, "%s:%u", host,
                 cox_direct_port(agent->direct));
    if (r == 0)
        r = cox_kv_relay_new(agent->direct, agent->address, &options->log, is_rank, agent,
                             &agent->kv, err);
    return r;
}

static void agent_close(struct agent *agent)
{
    pthread_mutex_lock(&agent->lock);
    agent_end(agent, 0, "");
    if (agent->kv)
        cox_kv_relay_cancel(agent->kv);
    pthread_mutex_unlock(&agent->lock);
    if (agent->time_threaded)
        pthread_join(agent->time_thread, NULL);
    if (agent->threaded)
        pthread_join(agent->thread, NULL);
    if (agent->kv_threaded)
        pthread_join(agent->kv_thread, NULL);
    stop_ranks(agent);
    if (agent->cluster) {
        pthread_mutex_lock(&agent->lock);
        cox_agent_link_leave(&agent->link, agent->end_text, cox_now_ns());
        pthread_mutex_unlock(&agent->lock);
        cox_cluster_flush(agent->cluster, cox_deadline_after_ms(FLUSH_MS));
    }
    /* Direct connections still bring frames, which would be answered. */
    pthread_mutex_lock(&agent->lock);
    struct cox_cluster *cluster = agent->cluster;
    struct cox_outbox *outbox = agent->outbox;
    agent->cluster = NULL;
    agent->outbox = NULL;
    pthread_mutex_unlock(&agent->lock);
    cox_cluster_close(cluster);
    if (agent->direct)
        cox_direct_end(agent->direct);
    cox_outbox_free(outbox);
    cox_direct_close(agent->direct);
    cox_group_relay_free(agent->relay);
    cox_kv_relay_free(agent->kv);
    cox_images_clear(&agent->images);
    cox_agent_link_deinit(&agent->link);
    pthread_cond_destroy(&agent->changed);
    pthread_mutex_destroy(&agent->lock);
}

int cox_node_agent_run(const struct cox_node_agent_options *options, struct cox_error *err)
{
    struct agent *agent = calloc(1, sizeof *agent);
    uint64_t id = 0;
    if (!agent)
        return cox_fail(err, -ENOMEM, "no memory for the agent");
    agent->options = options;
    pthread_mutex_init(&agent->lock, NULL);
    cox_condition_init(&agent->changed);
    if (getrandom(&id, sizeof id, 0) != (ssize_t)sizeof id)
        id = cox_now_ns() ^ (uint64_t)getpid() << 40;
    cox_agent_link_init(&agent->link, id | 1);
    agent->link.context = agent;
    agent->link.send = agent_send;
    const struct cox_cluster_options cluster = {
        .access = options->access,
        .group = options->group,
        .node = options->node,
        .timeout_ms = CONNECT_MS,
        .log = options->log,
        .context = agent,
        .on_frame = on_frame,
        .on_connection = on_connection,
    };
    struct cox_cluster *made = NULL;
    char name[COX_NODE_NAME_MAX + 8];
    snprintf(name, sizeof name, "node-%s", options->node);
    /* A server that does not accept it says nothing that can be told. */
    int r = options->access.insecure_loopback
                ? 0
                : cox_direct_check_certificate(options->access.ca, options->access.certificate,
                                               options->access.key, name, err);
    if (r == 0)
        r = cox_cluster_open(&cluster, &made, err);
    pthread_mutex_lock(&agent->lock);
    agent->cluster = made;
    if (made)
        cox_cluster_identity(made, agent->link.server_id, &agent->link.client_id);
    pthread_mutex_unlock(&agent->lock);
    if (r == 0)
        r = direct_open(agent, err);
    if (r == 0)
        r = cox_thread_start(&agent->thread, agent_main, agent);
    agent->threaded = agent->direct && r == 0;
    if (r == 0)
        r = cox_thread_start(&agent->time_thread, time_main, agent);
    agent->time_threaded = agent->threaded && r == 0;
    if (r == 0)
        r = cox_thread_start(&agent->kv_thread, kv_main, agent);
    agent->kv_threaded = agent->time_threaded && r == 0;
    if (r == 0) {
        char text[200];
        snprintf(text, sizeof text, "node %s of the group '%s' waits for its lead", options->node,
                 options->group);
        agent_say(agent, text);
        pthread_mutex_lock(&agent->lock);
        agent->opened = true;
        pthread_mutex_unlock(&agent->lock);
    }
    bool ending = r != 0;
    while (!ending) {
        nanosleep(&(struct timespec){.tv_nsec = 50 * COX_NSEC_PER_MSEC}, NULL);
        pthread_mutex_lock(&agent->lock);
        if (options->cancelled && options->cancelled(options->context))
            agent_end(agent, 0, "has been stopped");
        ending = agent->ending;
        pthread_mutex_unlock(&agent->lock);
    }
    if (r == 0 && agent->end_code)
        r = cox_fail(err, agent->end_code, "%s", agent->end_text);
    agent_close(agent);
    free(agent);
    return r;
}
