/* agent_requests: hands the requests of the lead to the ranks, and their replies to the lead. */
#include "coordinator/executor/core.h"

#include "channel/base/idioms.h"
#include "proto/executor.pb-c.h"
#include "proto/operation.h"
#include "agent_private.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A reply that is no reply: what the lead's executor makes of it is a failure of the rank. */
static uint8_t *failure_pack(uint32_t rank, int32_t code, const char *text, size_t *ret_size)
{
    Coxswain__ExecuteResponse response = COXSWAIN__EXECUTE_RESPONSE__INIT;
    COX_SET(&response, rank, (int32_t)rank);
    COX_SET(&response, status, code ? code : COX_REJECTED);
    response.error_text = (char *)(uintptr_t)(text ? text : "");
    *ret_size = coxswain__execute_response__get_packed_size(&response);
    uint8_t *bytes = malloc(*ret_size);
    if (bytes)
        coxswain__execute_response__pack(&response, bytes);
    return bytes;
}

void cox_agent_on_forwarded(void *context, const struct cox_completion *completion)
{
    struct agent *agent = context;
    struct cox_answer answer = {.status = completion->status};
    uint8_t *owned[COX_RANK_COUNT_MAX];
    uint32_t owned_count = 0;
    bool done = true;
    if (completion->status == COX_LATE) {
        pthread_mutex_lock(&agent->lock);
        cox_agent_link_done(&agent->link, completion->channel, completion->sequence);
        cox_agent_link_tick(&agent->link, cox_now_ns());
        pthread_cond_broadcast(&agent->changed); /* the next pull may begin */
        pthread_mutex_unlock(&agent->lock);
        return;
    }
    for (uint32_t rank = 0; rank < completion->rank_count; rank++) {
        const struct cox_rank_result *result = &completion->ranks[rank];
        if (result->outcome == COX_OUTCOME_NOT_ASKED)
            continue;
        const bool dead = result->outcome == COX_OUTCOME_DEAD;
        const bool replied = !dead && result->outcome != COX_OUTCOME_LATE;
        struct cox_answer_reply *to = &answer.replies[answer.count++];
        bool failed;
        *to = (struct cox_answer_reply){.rank = rank};
        to->bytes = cox_completion_raw(completion, rank, &to->size, &failed);
        if (replied && !to->bytes) {
            uint8_t *bytes = failure_pack(rank, result->code, result->text, &to->size);
            if (bytes)
                owned[owned_count++] = bytes;
            to->bytes = bytes;
            to->size = bytes ? to->size : 0;
            failed = true;
        }
        to->flags = (replied ? COX_ANSWER_REPLIED : 0u) | (dead ? COX_ANSWER_DEAD : 0u) |
                    (failed ? COX_ANSWER_FAILED : 0u);
        done = done && (replied || dead);
    }
    pthread_mutex_lock(&agent->lock);
    cox_agent_link_answer(&agent->link, completion->channel, completion->sequence, &answer, done,
                          cox_now_ns());
    if (completion->channel == COX_CHANNEL_TRANSFER) {
        if (completion->sequence == agent->pulling)
            cox_kv_relay_cancel(agent->kv); /* the ranks have ended, with all blocks or without */
        pthread_cond_broadcast(&agent->changed);
    }
    pthread_mutex_unlock(&agent->lock);
    while (owned_count > 0)
        free(owned[--owned_count]);
}

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
        *reply = (struct cox_answer_reply){.rank = rank, .flags = COX_ANSWER_DEAD};
        bytes[answer.count] = NULL;
        if (r != COX_PEER_DEAD) {
            reply->flags = COX_ANSWER_REPLIED | COX_ANSWER_FAILED;
            bytes[answer.count] = failure_pack(rank, r, why->text, &reply->size);
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
    options.incarnation = window.incarnation;
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
    if (!frame->payload || (frame->type != COXSWAIN__EXECUTE_TYPE__PD_LINK &&
                            frame->type != COXSWAIN__EXECUTE_TYPE__KV_TRANSFER &&
                            frame->type != COXSWAIN__EXECUTE_TYPE__LORA_OPERATION))
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
        .memory = frame->memory,
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
    if (frame->payload)
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
void cox_agent_run_requests(struct agent *agent)
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
        frame->payload ? coxswain__execute_request__unpack(NULL, frame->size, frame->payload)
                       : NULL;
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
    if (message)
        coxswain__execute_request__free_unpacked(message, NULL);
    return r != COX_FULL;
}

void *cox_agent_kv_main(void *context)
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
