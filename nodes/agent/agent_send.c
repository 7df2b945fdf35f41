/* agent_send: what an agent tells its lead. */
#include "channel/recorder/recorder.h"

#include "channel/base/idioms.h"
#include "coordinator/executor/core.h"
#include "nodes/link/lead_link.h"
#include "nodes/link/recorder_fetch.h"
#include "agent_private.h"

#include <coxswain/version.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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
void cox_agent_send(void *context, uint8_t *bytes, size_t size)
{
    struct agent *agent = context;
    if (agent->cluster && size <= cox_cluster_size_max(agent->cluster) / 2)
        cox_cluster_send(agent->cluster, NULL, bytes, size);
    else
        send_large(agent, bytes, size);
}

/* The outbox has lost a message. */
void cox_agent_on_lost(void *context, uint32_t number)
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
        cox_agent_send(agent, bytes, size);
}

void cox_agent_send_hello(struct agent *agent)
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
    COX_SET(&hello, protocol, COX_FRAME_PROTOCOL);
    COX_SET(&hello, agent, agent->link.agent);
    COX_SET(&hello, pid, (uint32_t)getpid());
    hello.address = agent->address;
    hello.server_id = server_id;
    COX_SET(&hello, client_id, client_id);
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
    hello.has_rank_group_incarnation =
        agent->executor && !cox_executor_group_window(agent->executor, &window);
    hello.rank_group_incarnation = hello.has_rank_group_incarnation ? window.incarnation : 0;
    COX_SET(&hello, world, agent->world);
    send_message(agent, COX_FRAME_HELLO, &hello.base);
    free(facts);
    free(pointers);
}

void cox_agent_send_text(struct agent *agent, int32_t rank, bool is_stderr, bool is_fault,
                         const char *text)
{
    CoxNode__Text message = COX_NODE__TEXT__INIT;
    COX_SET(&message, rank, rank);
    COX_SET(&message, is_stderr, is_stderr);
    COX_SET(&message, is_fault, is_fault);
    message.text = (char *)(uintptr_t)text;
    pthread_mutex_lock(&agent->lock);
    if (agent->link.state == COX_LEAD_FOLLOWING)
        send_message(agent, COX_FRAME_TEXT, &message.base);
    pthread_mutex_unlock(&agent->lock);
}

/* The flight recorders of the ranks that a frame asks for, with their times on the lead's clock. The
 * lock is held. */
void cox_agent_send_recorders(struct agent *agent, const struct cox_frame *ask)
{
    const int64_t offset = cox_agent_link_offset(&agent->link);
    void *copy = malloc(cox_recorder_area_size(false));
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
