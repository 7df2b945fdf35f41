/*
 * The agent of one machine: an executor for its ranks, and the link to the lead that it follows.
 *
 * Threads: frames come on a thread of libnats, or of a direct connection; one thread keeps the time
 *   and hands requests to the ranks that did not fit before; one starts, replaces and ends ranks, which
 *   takes time; one runs pulls; one reads stacks when they are asked for; an outbox sends what is too large for NATS. `lock` protects the link and the fields below
 *   it. The executor's forward is called with it held; hooks of the executor take it, and hold none of
 *   the executor's locks then.
 */
#include "channel/base/idioms.h"
#include "channel/base/options.h"
#include "channel/base/peer.h"
#include "channel/base/thread.h"
#include "channel/memory/large_payload.h"
#include "channel/socket/control_socket.h"
#include "coordinator/executor/core.h"
#include "coordinator/recording/recording.h"
#include "agent_private.h"
#include "nodes/link/limits.h"
#include "nodes/message_limits.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#define TICK_NS (20 * COX_NSEC_PER_MSEC)
#define CONNECT_MS 10000
#define FLUSH_MS 500
/* How often it is looked whether ranks are stopped. */
#define LOOK_NS (250 * COX_NSEC_PER_MSEC)
/* How often their processor time and memory are read. */
#define USAGE_NS COX_NSEC_PER_SEC

void cox_agent_say(const struct agent *agent, const char *text)
{
    agent->options->state(agent->options->context, text);
}

/* What a peer said that cannot be; it may say so as often as it likes. */
static void fault_log(struct agent *agent, const char *peer, int code, const char *text)
{
    pthread_mutex_lock(&agent->fault_lock);
    cox_log_limit_write(&agent->faults, 4, NULL, code, "%s: %s", peer, text);
    pthread_mutex_unlock(&agent->fault_lock);
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

/* The lead ends the group. The lock is held. */
static void finish(struct agent *agent)
{
    char text[160];
    snprintf(text, sizeof text, "node %s: the group has %s", agent->options->node,
             agent->link.failed ? "failed: its lead says how" : "ended");
    group_end(agent, agent->link.failed ? COX_PEER_DEAD : 0, text);
}

/* ---- frames ---- */

/* Whether the lead may be followed, by its epoch. Otherwise says why, or no lead would be followed
 * any more, and no log would say so. */
static int epoch_check(const struct agent *agent, uint64_t epoch, struct cox_error *err)
{
    const uint64_t real_ns = cox_real_ns();
    const uint64_t hour_ns = 3600 * COX_NSEC_PER_SEC;
    if (!cox_epoch_can_be(epoch, real_ns))
        return cox_fail(err, COX_CORRUPT,
                        "its epoch %" PRIu64 " is %" PRIu64
                        " h ahead of the clock of this machine: it is not followed: set the clocks",
                        epoch, (epoch - real_ns) / hour_ns);
    if (epoch < agent->link.epoch)
        return cox_fail(err, COX_CORRUPT,
                        "its epoch %" PRIu64
                        " is before that of the lead that was followed last, %" PRIu64
                        ": it is not followed",
                        epoch, agent->link.epoch);
    return 0;
}

/* The lock is held. Returns 0, or COX_CORRUPT. */
static int welcome_take(struct agent *agent, const CoxNode__Welcome *welcome, struct cox_error *err)
{
    if (welcome->agent != agent->link.agent)
        return 0;
    if (welcome->refusal) {
        agent_end(agent, welcome->final ? COX_INVALID : COX_TAKEN, welcome->refusal);
        return 0;
    }
    int r = epoch_check(agent, welcome->epoch, err);
    if (r)
        return r;
    if (welcome->rank_count == 0 || welcome->world > COX_RANK_COUNT_MAX ||
        welcome->rank_first >= welcome->world ||
        welcome->rank_count > welcome->world - welcome->rank_first || welcome->depth == 0 ||
        welcome->depth > COX_NODE_DEPTH_MAX || welcome->n_request_size != COX_CHANNEL_COUNT ||
        welcome->n_response_size != COX_CHANNEL_COUNT ||
        cox_agent_link_follow(&agent->link, welcome, cox_now_ns()))
        return 0;
    if (agent->outbox)
        cox_outbox_clear(agent->outbox); /* what the lead before has asked for */
    const size_t sizes = sizeof agent->request_size;
    const enum cox_attach attach = welcome->sealed ? COX_ATTACH_SEALED : COX_ATTACH_NAMED;
    bool behind = false;
    for (uint32_t c = 0; c < COX_TWO_WAY_COUNT && agent->executor; c++)
        behind = behind || cox_executor_forwarded_through(agent->executor, (enum cox_channel_id)c) >
                               agent->link.channels[c].taken;
    /* Numbers do not come again: ranks that have seen later ones are started anew. */
    const bool same = agent->executor && !behind && !welcome->fresh &&
                      agent->world == welcome->world && agent->rank_first == welcome->rank_first &&
                      agent->rank_count == welcome->rank_count && agent->depth == welcome->depth &&
                      agent->attach == attach && agent->no_recorder == welcome->no_recorder &&
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
    agent->attach = attach;
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
    return 0;
}

/* The lock is held. */
static void greet(struct agent *agent)
{
    char text[160];
    const uint64_t epoch = agent->link.epoch;
    snprintf(text, sizeof text,
             "its epoch %" PRIu64 " is of the future, and is forgotten: a clock was set", epoch);
    if (cox_agent_link_forget(&agent->link, cox_real_ns()))
        fault_log(agent, "the lead before", 0, text);
    cox_agent_send_hello(agent);
}

/* A frame that the link takes or answers. The lock is held. */
static int link_take(struct agent *agent, const struct cox_frame *frame, uint8_t **owned,
                     struct cox_payload_memory *memory, uint64_t now_ns, struct cox_error *err)
{
    struct cox_agent_link *link = &agent->link;
    const int r = memory ? cox_agent_link_receive_memory(link, frame, memory, now_ns, err)
                         : cox_agent_link_receive_owned(link, frame, owned, now_ns, err);
    if (r == 0 && frame->kind == COX_FRAME_RECORDER_ASK)
        cox_agent_send_recorders(agent, frame);
    if (r == 0 && frame->kind == COX_FRAME_STACKS_ASK)
        cox_agent_ask_stacks(agent, frame);
    if (cox_agent_link_greets(link, frame, r, now_ns))
        greet(agent);
    cox_agent_run_requests(agent);
    if (link->finishing)
        finish(agent);
    if (frame->kind == COX_FRAME_LEAD_BEAT) {
        cox_group_relay_set_peers(agent->relay, link->peers, link->peer_count);
        pthread_cond_broadcast(&agent->changed);
    }
    if (link->changed)
        cox_agent_link_tick(link, now_ns);
    return r;
}

/* May take *owned, the same bytes; NULL: they are lent. Or bytes has the head of a REQUEST alone, and
 * memory its payload; NULL: none has. */
static void frame_take(struct agent *agent, const uint8_t *bytes, size_t size, uint8_t **owned,
                       struct cox_payload_memory *memory)
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
            greet(agent);
    } else if (r == 0 && frame.kind == COX_FRAME_WELCOME) {
        CoxNode__Welcome *welcome = cox_node__welcome__unpack(NULL, frame.size, frame.payload);
        r = welcome ? welcome_take(agent, welcome, &why)
                    : cox_fail(&why, COX_CORRUPT, "a welcome that cannot be read");
        cox_node__welcome__free_unpacked(welcome, NULL);
    } else if (r == 0) {
        r = link_take(agent, &frame, owned, memory, now_ns, &why);
    }
    pthread_mutex_unlock(&agent->lock);
    if (r && r != COX_STALE)
        fault_log(agent, "from the lead", r, why.text);
}

static void on_frame(void *context, const char *node, const uint8_t *bytes, size_t size)
{
    (void)node;
    frame_take(context, bytes, size, NULL, NULL);
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

static int on_announce(void *context, const char *peer, const char *group, uint32_t kind,
                       uint64_t size, const uint8_t *front, struct cox_error *err)
{
    const struct agent *agent = context;
    return cox_message_check(false, agent->options->group, peer, group, kind, size, front, err);
}

/* Opaque bytes that no rank gets in a frame are passed on as they are, in the memory that they came in:
 * unless they may name weights, which are others here. Those come before on the same connection. */
static bool to_memory(void *context, uint32_t kind, uint64_t size, const uint8_t *front)
{
    struct agent *agent = context;
    struct cox_frame frame;
    if (kind != COX_DIRECT_FRAME || size - COX_FRAME_HEAD_SIZE <= COX_LARGE_PAYLOAD_KEEP_SIZE ||
        cox_frame_unpack(front, size, &frame, NULL) || !cox_frame_is_passed_on(&frame))
        return false;
    pthread_mutex_lock(&agent->lock);
    const bool fits = agent->images.count == 0 && frame.size > agent->request_size[frame.channel];
    pthread_mutex_unlock(&agent->lock);
    return fits;
}

static void on_memory(void *context, const char *peer, const char *group, uint32_t kind,
                      const uint8_t *front, struct cox_payload_memory *memory, uint64_t memory_size)
{
    (void)peer, (void)group, (void)kind; /* to_memory has seen the kind */
    frame_take(context, front, COX_FRAME_HEAD_SIZE + memory_size, NULL, memory);
}

/* A peer that says what it may not, or stalls; or a connection of nobody who is known. */
static void on_direct_end(void *context, const char *peer, int code, const char *text)
{
    (void)peer;
    if (code > 0) /* no end like any other */
        fault_log(context, "direct connections", code, text);
}

static void on_direct(void *context, const char *peer, const char *group, uint32_t kind,
                      uint8_t *bytes, size_t size)
{
    struct agent *agent = context;
    pthread_mutex_lock(&agent->lock);
    const bool opened = agent->opened;
    pthread_mutex_unlock(&agent->lock);
    if (!opened) { /* as if it had come before this process listened */
        free(bytes);
        return;
    }
    (void)group; /* on_announce has seen who says it */
    switch (kind) {
    case COX_DIRECT_FETCH:
    case COX_DIRECT_BLOCKS:
        cox_kv_relay_take(agent->kv, peer, kind, bytes, size);
        return;
    case COX_DIRECT_GROUP:
        cox_group_relay_take(agent->relay, peer + strlen("node-"), bytes, size);
        return;
    case COX_DIRECT_FRAME:
        frame_take(agent, bytes, size, &bytes, NULL);
        break;
    case COX_DIRECT_IMAGE:
        image_take(agent, bytes, size);
        break;
    case COX_DIRECT_DROP_IMAGE:
        if (size == sizeof(struct cox_handle))
            image_drop(agent, bytes);
        break;
    }
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
        cox_agent_say(agent, text); /* otherwise it is what the agent ends with */
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
                agent->link.refused = (uint32_t)cox_direct_refused(agent->direct);
            }
            cox_agent_link_tick(&agent->link, cox_now_ns());
            cox_agent_run_requests(agent);
            tell_state(agent);
        }
        const bool ending = agent->ending;
        pthread_mutex_unlock(&agent->lock);
        cox_group_relay_expire(agent->relay, cox_now_ns());
        cox_payload_memory_pool_expire(&agent->memory, cox_now_ns());
        pthread_mutex_lock(&agent->fault_lock);
        cox_log_limit_turn(&agent->faults, ending);
        pthread_mutex_unlock(&agent->fault_lock);
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
                                               .lost = cox_agent_on_lost};
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
    char host[COX_CLUSTER_HOST_SIZE], listen[COX_CLUSTER_LISTEN_SIZE], name[COX_NODE_NAME_MAX + 8];
    cox_cluster_listen_address(agent->cluster, options->listen, host, listen);
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
        .on_announce = on_announce,
        .memory = &agent->memory,
        .to_memory = to_memory,
        .on_memory = on_memory,
        .on_end = on_direct_end,
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
    pthread_mutex_unlock(&agent->lock);
    if (agent->kv)
        cox_kv_relay_stop(agent->kv);
    if (agent->time_threaded)
        pthread_join(agent->time_thread, NULL);
    if (agent->threaded)
        pthread_join(agent->thread, NULL);
    if (agent->kv_threaded)
        pthread_join(agent->kv_thread, NULL);
    if (agent->stacks_threaded) /* none is started any more: it ends */
        pthread_join(agent->stacks_thread, NULL);
    cox_agent_stop_ranks(agent);
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
    if (agent->kv)
        cox_kv_relay_end(agent->kv);
    cox_outbox_free(outbox);
    cox_direct_close(agent->direct);
    cox_group_relay_free(agent->relay);
    cox_kv_relay_free(agent->kv);
    cox_images_clear(&agent->images);
    cox_agent_link_deinit(&agent->link);
    cox_payload_memory_pool_deinit(&agent->memory);
    pthread_cond_destroy(&agent->changed);
    pthread_mutex_destroy(&agent->fault_lock);
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
    pthread_mutex_init(&agent->fault_lock, NULL);
    cox_payload_memory_pool_init(&agent->memory);
    cox_log_limit_init(&agent->faults, &options->log);
    cox_condition_init(&agent->changed);
    if (getrandom(&id, sizeof id, 0) != (ssize_t)sizeof id)
        id = cox_now_ns() ^ (uint64_t)getpid() << 40;
    cox_agent_link_init(&agent->link, id | 1);
    agent->link.context = agent;
    agent->link.send = cox_agent_send;
    const struct cox_cluster_options cluster = {
        .access = options->access,
        .group = options->group,
        .node = options->node,
        .timeout_ms = CONNECT_MS,
        .log = options->log,
        .cancelled = options->cancelled,
        .cancel_context = options->context,
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
    /* Before a lead comes, whose whole start it would fail. */
    if (r == 0 && options->crash_dir)
        r = cox_recording_folder_make(options->crash_dir, err);
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
        r = cox_thread_start(&agent->thread, cox_agent_ranks_main, agent);
    agent->threaded = agent->direct && r == 0;
    if (r == 0)
        r = cox_thread_start(&agent->time_thread, time_main, agent);
    agent->time_threaded = agent->threaded && r == 0;
    if (r == 0)
        r = cox_thread_start(&agent->kv_thread, cox_agent_kv_main, agent);
    agent->kv_threaded = agent->time_threaded && r == 0;
    if (r == 0) {
        char text[200];
        snprintf(text, sizeof text, "node %s of the group '%s' waits for its lead", options->node,
                 options->group);
        cox_agent_say(agent, text);
        pthread_mutex_lock(&agent->lock);
        agent->opened = true;
        pthread_mutex_unlock(&agent->lock);
    }
    bool ending = r != 0;
    while (!ending) {
        nanosleep(&(struct timespec){.tv_nsec = 50 * COX_NSEC_PER_MSEC}, NULL);
        pthread_mutex_lock(&agent->lock);
        if (options->cancelled(options->context))
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
