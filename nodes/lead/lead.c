/*
 * The lead: a transport whose ranks are on nodes. It joins the links of the nodes (lead_link.h) to the
 * cluster, to direct connections, and to the executor.
 *
 * Threads: frames come on a thread of libnats, or of a direct connection; a thread of this file keeps
 *   the time; outboxes send what is too large for NATS. `lock` protects the links. Events are
 *   handled without it, in their order, under `delivery`: the executor's functions are called there.
 *   So the order of locks is delivery, the executor's, lock.
 */
#include "channel/base/idioms.h"
#include "channel/base/options.h"
#include "channel/base/thread.h"
#include "lead_private.h"
#include "nodes/link/limits.h"
#include "nodes/message_limits.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define START_TIMEOUT_MS 60000
#define CONNECT_MS 10000
#define TELL_MS 1000
#define SEQUENCE_MARGIN 65536

/* ---- events ---- */

static void event_handle(struct cox_nodes *nodes, const struct cox_lead_event *event)
{
    const struct cox_lead_link *link = &nodes->links[event->node];
    struct cox_executor *executor = nodes->executor;
    struct cox_error why = {0};
    switch (event->kind) {
    case COX_LEAD_REPLY: {
        int r = nodes->host->reply(executor, (enum cox_channel_id)event->channel, event->rank,
                                   event->sequence, event->bytes, event->size, event->failed, &why);
        if (r && r != COX_STALE)
            cox_log_write(&nodes->options.log, 4, "rank %" PRIu32 " on node %s: %s", event->rank,
                          link->node, why.text);
        break;
    }
    case COX_LEAD_TAKEN:
        for (uint32_t i = 0; i < link->rank_count; i++)
            nodes->host->taken(executor, (enum cox_channel_id)event->channel, link->rank_first + i,
                               event->sequence);
        break;
    case COX_LEAD_RANK_UP:
        if (nodes->host->attach(executor, event->rank, link->node, (pid_t)event->pid, &why))
            cox_log_write(&nodes->options.log, 4, "%s", why.text);
        break;
    case COX_LEAD_RANK_DIED:
        if (event->sequence)
            nodes->host->failed(executor, event->rank, link->node, event->text);
        else
            nodes->host->died(executor, event->rank, event->text, event->known, event->signal,
                              event->exit_status);
        break;
    case COX_LEAD_NODE_STATE:
        pthread_mutex_lock(&nodes->lock);
        if (link->state == COX_NODE_ABSENT)
            cox_outbox_drop(nodes->outboxes[event->node]);
        pthread_mutex_unlock(&nodes->lock);
        cox_log_write(&nodes->options.log, event->state == COX_NODE_ALIVE ? 5 : 4, "%s",
                      event->text);
        break;
    }
}

static void pump(struct cox_nodes *nodes)
{
    pthread_mutex_lock(&nodes->delivery);
    for (;;) {
        pthread_mutex_lock(&nodes->lock);
        struct cox_lead_event *event =
            nodes->executor || nodes->stopping ? cox_lead_events_take(&nodes->events) : NULL;
        pthread_mutex_unlock(&nodes->lock);
        if (!event)
            break;
        if (nodes->executor)
            event_handle(nodes, event);
        cox_lead_event_free(event);
    }
    pthread_mutex_unlock(&nodes->delivery);
}

/* A node that means harm says it as often as it likes. */
static void fault_log(struct cox_nodes *nodes, uint32_t node, const struct cox_error *why)
{
    pthread_mutex_lock(&nodes->fault_lock);
    cox_log_limit_write(&nodes->faults, 4, NULL, (int)node, "node %s: %s", nodes->links[node].node,
                        why->text);
    pthread_mutex_unlock(&nodes->fault_lock);
}

static void frame_take(void *context, const char *name, const uint8_t *bytes, size_t size)
{
    struct cox_nodes *nodes = context;
    struct cox_frame frame;
    struct cox_error why = {0};
    uint32_t node = 0;
    while (node < nodes->node_count && strcmp(nodes->links[node].node, name) != 0)
        node++;
    if (node == nodes->node_count)
        return; /* of another group, or a node that the group does not have */
    int r = cox_frame_unpack(bytes, size, &frame, &why);
    pthread_mutex_lock(&nodes->lock);
    if (r == 0 && frame.kind == COX_FRAME_HELLO) {
        CoxNode__Hello *hello = cox_node__hello__unpack(NULL, frame.size, frame.payload);
        r = hello ? cox_lead_hello_take(nodes, node, hello, &why)
                  : cox_fail(&why, COX_CORRUPT, "a hello that cannot be read");
        cox_node__hello__free_unpacked(hello, NULL);
    } else if (r == 0) {
        const struct cox_lead_link *link = &nodes->links[node];
        r = cox_lead_link_receive(&nodes->links[node], &frame, cox_now_ns(), &why);
        if (r == 0 && frame.kind == COX_FRAME_RECORDER &&
            cox_recorder_fetch_take(&nodes->fetches, &frame, name, link->rank_first,
                                    link->rank_count))
            pthread_cond_broadcast(&nodes->fetched);
        if (r == 0 && frame.kind == COX_FRAME_STACKS &&
            cox_stacks_fetch_take(&nodes->stacks, &frame, link->rank_first, link->rank_count))
            pthread_cond_broadcast(&nodes->fetched);
    }
    pthread_mutex_unlock(&nodes->lock);
    if (r == 0 && frame.kind == COX_FRAME_TEXT) {
        CoxNode__Text *text = cox_node__text__unpack(NULL, frame.size, frame.payload);
        const struct cox_lead_link *link = &nodes->links[node];
        const bool known = text && text->rank >= (int32_t)link->rank_first &&
                           text->rank < (int32_t)(link->rank_first + link->rank_count);
        pthread_mutex_lock(&nodes->delivery);
        if (nodes->executor && text && text->text && text->is_fault)
            nodes->host->fault(nodes->executor, known ? text->rank : -1, text->text);
        else if (nodes->executor && text && text->text && known)
            nodes->host->line(nodes->executor, (uint32_t)text->rank, text->is_stderr, text->text);
        pthread_mutex_unlock(&nodes->delivery);
        cox_node__text__free_unpacked(text, NULL);
    }
    if (r == COX_CORRUPT)
        fault_log(nodes, node, &why);
    pump(nodes);
}

static int on_announce(void *context, const char *peer, const char *group, uint32_t kind,
                       uint64_t size, const uint8_t *front, struct cox_error *err)
{
    const struct cox_nodes *nodes = context;
    return cox_message_check(true, nodes->group, peer, group, kind, size, front, err);
}

/* A peer that says what it may not, or stalls; or a connection of nobody who is known. */
static void on_direct_end(void *context, const char *peer, int code, const char *text)
{
    struct cox_nodes *nodes = context;
    (void)peer;
    if (code <= 0)
        return; /* an end like any other */
    pthread_mutex_lock(&nodes->fault_lock);
    cox_log_limit_write(&nodes->faults, 4, NULL, code, "direct connections: %s", text);
    pthread_mutex_unlock(&nodes->fault_lock);
}

static void on_direct(void *context, const char *peer, const char *group, uint32_t kind,
                      uint8_t *bytes, size_t size)
{
    struct cox_nodes *nodes = context;
    (void)group, (void)kind; /* on_announce has seen them */
    frame_take(nodes, peer + strlen("node-"), bytes, size);
    free(bytes);
}

/* ---- agents whose connection has ended ---- */

/* The lock is held. r: what is known of the probe. */
static void probe_take(struct cox_nodes *nodes, uint32_t node, int r)
{
    const bool suspect = nodes->links[node].state == COX_NODE_SUSPECT;
    if (r == -ECONNREFUSED && suspect)
        cox_lead_link_die(&nodes->links[node], nodes->probes[node].reason);
    if (r != -EINPROGRESS || !suspect)
        cox_close_fd(&nodes->probes[node].fd);
}

static void probe_start(struct cox_nodes *nodes, uint32_t node, const char *reason)
{
    struct probe *probe = &nodes->probes[node];
    cox_close_fd(&probe->fd);
    snprintf(probe->reason, sizeof probe->reason, "%s", reason);
    const int r = cox_direct_probe(nodes->links[node].address);
    probe->fd = r < 0 ? -1 : r;
    probe_take(nodes, node, r < 0 ? r : -EINPROGRESS);
}

static void probe_tick(struct cox_nodes *nodes, uint32_t node)
{
    if (nodes->probes[node].fd >= 0)
        probe_take(nodes, node, cox_direct_probe_result(nodes->probes[node].fd));
}

static void on_gone(void *context, const char *server_id, uint64_t client_id, const char *reason)
{
    struct cox_nodes *nodes = context;
    char text[160], suspect[192];
    snprintf(text, sizeof text, "is gone: its connection has ended, says the NATS server (%.60s)",
             reason);
    snprintf(suspect, sizeof suspect,
             "is suspect: its connection has ended, says the NATS server (%.60s)", reason);
    pthread_mutex_lock(&nodes->lock);
    for (uint32_t i = 0; i < nodes->node_count; i++)
        if (nodes->links[i].state != COX_NODE_ABSENT && nodes->links[i].client_id == client_id &&
            strcmp(nodes->links[i].server_id, server_id) == 0) {
            cox_lead_link_suspect(&nodes->links[i], suspect);
            probe_start(nodes, i, text);
        }
    pthread_mutex_unlock(&nodes->lock);
    pump(nodes);
}

static void on_connection(void *context, bool connected, const char *text)
{
    struct cox_nodes *nodes = context;
    pthread_mutex_lock(&nodes->lock);
    nodes->cut_off_ns = connected ? 0 : cox_now_ns();
    pthread_mutex_unlock(&nodes->lock);
    cox_log_write(&nodes->options.log, connected ? 5 : 4, "the cluster: %s%s",
                  connected ? "connected again to " : "connection lost: ", text);
}

/* ---- time ---- */

static void seek(struct cox_nodes *nodes, uint64_t now_ns)
{
    if (nodes->taken_over[0] || now_ns - nodes->seek_ns < nodes->times.beat_ms * COX_NSEC_PER_MSEC)
        return;
    nodes->seek_ns = now_ns;
    for (uint32_t i = 0; i < nodes->node_count; i++)
        if (nodes->links[i].state == COX_NODE_ABSENT)
            cox_lead_send(nodes, i, COX_FRAME_SEEK, NULL);
}

/* While this process hears nothing, silence says nothing of the nodes: they are suspect, and not dead,
 * until agents give up this lead. The lock is held. */
static void excuse_silence(struct cox_nodes *nodes, uint64_t now_ns)
{
    const uint64_t suspect_ns = nodes->times.suspect_ms * COX_NSEC_PER_MSEC;
    if (!nodes->cut_off_ns ||
        now_ns - nodes->cut_off_ns > nodes->times.lead_grace_ms * COX_NSEC_PER_MSEC)
        return;
    for (uint32_t i = 0; i < nodes->node_count; i++)
        if (now_ns - nodes->links[i].heard_ns > suspect_ns)
            nodes->links[i].heard_ns = now_ns - suspect_ns;
}

static void *nodes_main(void *context)
{
    struct cox_nodes *nodes = context;
    pthread_setname_np(pthread_self(), "cox-nodes");
    for (;;) {
        nanosleep(&(struct timespec){.tv_nsec = COX_LEAD_TICK_NS}, NULL);
        const uint64_t now_ns = cox_now_ns();
        pthread_mutex_lock(&nodes->lock);
        const bool stopping = nodes->stopping;
        if (!stopping) {
            seek(nodes, now_ns);
            excuse_silence(nodes, now_ns);
            for (uint32_t i = 0; i < nodes->node_count; i++) {
                cox_lead_link_tick(&nodes->links[i], now_ns);
                probe_tick(nodes, i);
            }
        }
        pthread_mutex_unlock(&nodes->lock);
        pthread_mutex_lock(&nodes->fault_lock);
        cox_log_limit_turn(&nodes->faults, stopping);
        pthread_mutex_unlock(&nodes->fault_lock);
        if (stopping)
            return NULL;
        pump(nodes);
    }
}

/* ---- open ---- */

static int direct_open(struct cox_nodes *nodes, struct cox_error *err)
{
    const struct cox_executor_nodes *options = nodes->options.nodes;
    char host[COX_CLUSTER_HOST_SIZE], listen[COX_CLUSTER_LISTEN_SIZE];
    cox_cluster_listen_address(nodes->cluster, options->listen, host, listen);
    const struct cox_direct_options direct = {
        .name = "lead",
        .group = nodes->group,
        .ca = options->access.ca,
        .certificate = options->access.certificate,
        .key = options->access.key,
        .insecure_loopback = options->access.insecure_loopback,
        .listen = listen,
        .context = nodes,
        .on_message = on_direct,
        .on_announce = on_announce,
        .on_end = on_direct_end,
    };
    int r = cox_direct_open(&direct, &nodes->direct, err);
    if (r == 0) {
        pthread_mutex_lock(&nodes->lock);
        snprintf(nodes->address, sizeof nodes->address, "%s:%u", host,
                 cox_direct_port(nodes->direct));
        pthread_mutex_unlock(&nodes->lock);
    }
    return r;
}

static int outboxes_open(struct cox_nodes *nodes, struct cox_error *err)
{
    for (uint32_t i = 0; i < nodes->node_count; i++) {
        char peer[COX_NODE_NAME_MAX + 8];
        const struct cox_outbox_options options = {.direct = nodes->direct,
                                                   .peer = peer,
                                                   .log = nodes->options.log,
                                                   .context = nodes,
                                                   .number = i,
                                                   .lost = cox_lead_on_lost};
        struct cox_outbox *outbox = NULL;
        snprintf(peer, sizeof peer, "node-%s", nodes->links[i].node);
        if (cox_outbox_new(&options, &outbox))
            return cox_fail(err, -ENOMEM, "no memory for the nodes");
        pthread_mutex_lock(&nodes->lock);
        nodes->outboxes[i] = outbox;
        pthread_mutex_unlock(&nodes->lock);
    }
    return 0;
}

/* What they send fails from now on. */
static void outboxes_free(struct cox_nodes *nodes)
{
    if (nodes->direct)
        cox_direct_end(nodes->direct);
    for (uint32_t i = 0; nodes->outboxes && i < nodes->node_count; i++) {
        pthread_mutex_lock(&nodes->lock);
        struct cox_outbox *outbox = nodes->outboxes[i];
        nodes->outboxes[i] = NULL;
        pthread_mutex_unlock(&nodes->lock);
        cox_outbox_free(outbox);
    }
}

/* Ranks that have loaded the model for another layout are not given up for a mistyped one. */
static bool has_other_ranks(const struct cox_nodes *nodes, uint32_t node)
{
    const struct hello *hello = &nodes->hellos[node];
    const struct cox_lead_link *link = &nodes->links[node];
    return hello->rank_count && !nodes->fresh &&
           (hello->rank_first != link->rank_first || hello->rank_count != link->rank_count ||
            hello->world != nodes->world);
}

/* The nodes behind this one that have not come, as ", c, d". */
static void missing_others(const struct cox_nodes *nodes, uint32_t node, char *text, size_t size)
{
    size_t length = 0;
    text[0] = '\0';
    for (uint32_t i = node + 1; i < nodes->node_count && length < size; i++)
        if (!nodes->hellos[i].agent)
            length += (size_t)snprintf(text + length, size - length, ", %s", nodes->links[i].node);
}

/* A node that is not there yet (COX_TIMEOUT), follows another lead (COX_TAKEN), has ranks of another
 * layout (COX_STATE) or is refused (COX_INVALID); -1: none. */
static int32_t missing_node(struct cox_nodes *nodes, char *text, size_t size, int *ret_code,
                            struct cox_rank_set *ret_ranks)
{
    int32_t missing = -1;
    *ret_ranks = (struct cox_rank_set){{0}};
    *ret_code = COX_TIMEOUT;
    for (uint32_t i = 0; i < nodes->node_count; i++) {
        const struct hello *hello = &nodes->hellos[i];
        const bool fresh = hello->agent && cox_now_ns() - hello->heard_ns <
                                               nodes->times.dead_ms * COX_NSEC_PER_MSEC;
        if (hello->refusal[0]) {
            snprintf(text, size, "%s", hello->refusal);
            *ret_code = COX_INVALID;
            return (int32_t)i;
        }
        const bool follows = fresh && hello->epoch && hello->epoch != nodes->epoch &&
                             hello->silent_ms < nodes->times.dead_ms;
        const bool others = fresh && has_other_ranks(nodes, i);
        const struct cox_lead_link *link = &nodes->links[i];
        for (uint32_t k = 0; (!fresh || follows || others) && k < link->rank_count; k++)
            cox_rank_set_add(ret_ranks, link->rank_first + k);
        if ((!fresh || follows || others) && missing < 0) {
            char behind[160];
            missing = (int32_t)i;
            missing_others(nodes, i, behind, sizeof behind);
            *ret_code = !fresh ? COX_TIMEOUT : follows ? COX_TAKEN : COX_STATE;
            if (others && !follows)
                snprintf(text, size,
                         "node %s has %" PRIu32 " ranks, from %" PRIu32 " on, of %" PRIu32
                         ", loaded for a lead that is lost; this lead gives it %" PRIu32
                         " of %" PRIu32 ": give the nodes of that lead, or wait until its "
                         "lead_grace is over",
                         nodes->links[i].node, hello->rank_count, hello->rank_first, hello->world,
                         nodes->links[i].rank_count, nodes->world);
            else if (follows)
                snprintf(text, size,
                         "node %s follows another lead of the group '%s', at %s, heard %" PRIu64
                         " ms ago: stop that one",
                         nodes->links[i].node, nodes->group,
                         hello->lead_address[0] ? hello->lead_address : "an unknown address",
                         hello->silent_ms);
            else
                snprintf(text, size,
                         "node %s has not come%s%s: run there: coxswain node --name %s --node %s "
                         "--cluster FILE, with the servers %.100s",
                         nodes->links[i].node, behind[0] ? ", nor have" : "",
                         behind[0] ? behind + 1 : "", nodes->group, nodes->links[i].node,
                         nodes->url);
        }
    }
    return missing;
}

static int await_nodes(struct cox_nodes *nodes, struct cox_error *err)
{
    const struct cox_nodes_options *options = &nodes->options;
    const uint64_t deadline_ns = cox_deadline_after_ms(
        options->start_timeout_ms ? options->start_timeout_ms : START_TIMEOUT_MS);
    /* Those that are there say so at once. */
    const uint64_t tell_ns = cox_deadline_after_ms(TELL_MS);
    struct cox_rank_set ranks, told_ranks = {{0}};
    int32_t told = -1;
    int told_code = 0; /* the same node may be waited for for another reason */
    for (;;) {
        char text[768];
        int code;
        pthread_mutex_lock(&nodes->lock);
        const int32_t missing = missing_node(nodes, text, sizeof text, &code, &ranks);
        pthread_mutex_unlock(&nodes->lock);
        if (missing >= 0 && options->missing && memcmp(&ranks, &told_ranks, sizeof ranks) != 0) {
            options->missing(options->context, &ranks);
            told_ranks = ranks;
        }
        if (missing < 0)
            return 0;
        if (code == COX_INVALID || cox_now_ns() >= deadline_ns)
            return cox_fail(err, code, "%s", text);
        if (options->cancelled && options->cancelled(options->context))
            return cox_fail(err, COX_CLOSED, "cancelled while nodes were awaited");
        if ((missing != told || code != told_code) && cox_now_ns() >= tell_ns) {
            cox_log_write(&options->log, 4, "waiting: %s", text);
            told = missing;
            told_code = code;
        }
        nanosleep(&(struct timespec){.tv_nsec = COX_LEAD_TICK_NS}, NULL);
    }
}

static bool window_is_used(const struct cox_nodes *nodes, uint64_t incarnation)
{
    for (uint32_t i = 0; i < nodes->node_count; i++) {
        const uint64_t has = nodes->hellos[i].rank_group_incarnation;
        if (has && has % COX_GROUP_WINDOW_COUNT == incarnation % COX_GROUP_WINDOW_COUNT)
            return true;
    }
    return false;
}

/* Where the requests of an earlier lead ended. */
static void take_over(struct cox_nodes *nodes)
{
    pthread_mutex_lock(&nodes->lock);
    for (uint32_t i = 0; i < nodes->node_count; i++) {
        const struct hello *hello = &nodes->hellos[i];
        nodes->continued = nodes->continued || (hello->rank_count && !nodes->fresh);
        if (hello->epoch >= nodes->epoch)
            nodes->epoch = hello->epoch + 1;
        for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
            if (hello->through[c] > nodes->first_sequence[c])
                nodes->first_sequence[c] = hello->through[c];
    }
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
        nodes->fresh = nodes->fresh || nodes->first_sequence[c] > COX_NODE_SEQUENCE_MAX / 2;
    if (nodes->fresh) {
        nodes->continued = false;
        memset(nodes->first_sequence, 0, sizeof nodes->first_sequence);
    }
    /* A lead that was not quite lost may have sent some more since. */
    for (int c = 0; c < COX_TWO_WAY_COUNT && nodes->continued; c++)
        nodes->first_sequence[c] += SEQUENCE_MARGIN;
    /* The next incarnation of the rank group, which follows it, is in no window that ranks leave:
     * nodes that lie may leave none. */
    for (int i = 0; i < COX_GROUP_WINDOW_COUNT && nodes->continued &&
                    window_is_used(nodes, nodes->first_sequence[COX_CHANNEL_EXECUTE] + 1);
         i++)
        nodes->first_sequence[COX_CHANNEL_EXECUTE]++;
    for (uint32_t i = 0; i < nodes->node_count; i++) {
        nodes->links[i].epoch = nodes->epoch;
        for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
            nodes->links[i].channels[c].published = nodes->first_sequence[c];
    }
    pthread_mutex_unlock(&nodes->lock);
}

static int nodes_new(const struct cox_nodes_options *options, struct cox_nodes **ret_nodes,
                     struct cox_error *err)
{
    struct cox_nodes *nodes = calloc(1, sizeof *nodes);
    if (!nodes)
        return cox_fail(err, -ENOMEM, "no memory for the nodes");
    *ret_nodes = nodes;
    nodes->options = *options;
    const struct cox_node_times defaults = COX_NODE_TIMES_DEFAULT;
    struct cox_node_times *times = &nodes->times;
    *times = options->nodes->times;
    nodes->attach = options->nodes->attach;
    nodes->fresh = options->nodes->fresh;
    snprintf(nodes->url, sizeof nodes->url, "%s",
             options->nodes->access.url ? options->nodes->access.url : "");
    times->beat_ms = times->beat_ms ? times->beat_ms : defaults.beat_ms;
    times->suspect_ms = times->suspect_ms ? times->suspect_ms : defaults.suspect_ms;
    times->dead_ms = times->dead_ms ? times->dead_ms : defaults.dead_ms;
    times->again_ms = times->again_ms ? times->again_ms : defaults.again_ms;
    times->lead_grace_ms = times->lead_grace_ms ? times->lead_grace_ms : defaults.lead_grace_ms;
    nodes->options.depth = options->depth ? options->depth : 4;
    pthread_mutex_init(&nodes->delivery, NULL);
    pthread_mutex_init(&nodes->fault_lock, NULL);
    cox_log_limit_init(&nodes->faults, &options->log);
    pthread_mutex_init(&nodes->lock, NULL);
    cox_condition_init(&nodes->fetched);
    cox_lead_events_init(&nodes->events);
    nodes->links = calloc(COX_NODE_COUNT_MAX, sizeof *nodes->links);
    nodes->hellos = calloc(COX_NODE_COUNT_MAX, sizeof *nodes->hellos);
    nodes->probes = calloc(COX_NODE_COUNT_MAX, sizeof *nodes->probes);
    nodes->gathered = calloc(COX_NODE_COUNT_MAX, sizeof *nodes->gathered);
    nodes->outboxes = calloc(COX_NODE_COUNT_MAX, sizeof(struct cox_outbox *));
    for (uint32_t i = 0; nodes->probes && i < COX_NODE_COUNT_MAX; i++)
        nodes->probes[i].fd = -1;
    nodes->peers = calloc(COX_NODE_COUNT_MAX, sizeof *nodes->peers);
    nodes->peer_pointers = calloc(COX_NODE_COUNT_MAX, sizeof *nodes->peer_pointers);
    nodes->facts = calloc(2 * options->nodes->fact_count + 1, sizeof *nodes->facts);
    if (!nodes->links || !nodes->hellos || !nodes->probes || !nodes->gathered || !nodes->outboxes ||
        !nodes->peers || !nodes->peer_pointers || !nodes->facts)
        return cox_fail(err, -ENOMEM, "no memory for the nodes");
    for (size_t i = 0; i < options->nodes->fact_count; i++) {
        nodes->facts[2 * i] = strdup(options->nodes->facts[i].name);
        nodes->facts[2 * i + 1] =
            options->nodes->facts[i].value ? strdup(options->nodes->facts[i].value) : NULL;
        nodes->fact_count = i + 1;
    }
    snprintf(nodes->group, sizeof nodes->group, "%s", options->group);
    nodes->epoch = cox_real_ns();
    if (times->suspect_ms < 2 * times->beat_ms || times->dead_ms <= times->suspect_ms)
        return cox_fail(err, COX_INVALID,
                        "beats of %" PRIu64 " ms, suspect_after %" PRIu64 " ms, dead_after %" PRIu64
                        " ms: suspect needs two beats at least, and dead must be later",
                        times->beat_ms, times->suspect_ms, times->dead_ms);
    struct cox_node_place places[COX_NODE_COUNT_MAX];
    int r = cox_nodes_parse(options->nodes->nodes, places, &nodes->node_count, &nodes->world, err);
    for (uint32_t i = 0; r == 0 && i < nodes->node_count; i++) {
        struct cox_lead_link *link = &nodes->links[i];
        cox_lead_link_init(link, places[i].name, places[i].rank_first, places[i].rank_count,
                           nodes->world, nodes->options.depth);
        link->index = i;
        link->times = times;
        link->epoch = nodes->epoch;
        link->context = nodes;
        link->send = cox_lead_on_send;
        link->events = &nodes->events;
    }
    cox_lead_transport_init(nodes);
    return r;
}

int cox_nodes_open(const struct cox_nodes_options *options, struct cox_nodes **ret_nodes,
                   struct cox_error *err)
{
    struct cox_nodes *nodes = NULL;
    int r = nodes_new(options, &nodes, err);
    const struct cox_cluster_options cluster = {
        .access = options->nodes->access,
        .group = options->group,
        .timeout_ms = CONNECT_MS,
        .log = options->log,
        .cancelled = options->cancelled,
        .cancel_context = options->context,
        .context = nodes,
        .on_frame = frame_take,
        .on_gone = on_gone,
        .on_connection = on_connection,
    };
    const struct cox_cluster_access *access = &options->nodes->access;
    /* A server that does not accept it says nothing that can be told. */
    if (r == 0 && !access->insecure_loopback)
        r = cox_direct_check_certificate(access->ca, access->certificate, access->key, "lead", err);
    struct cox_cluster *made = NULL;
    if (r == 0)
        r = cox_cluster_open(&cluster, &made, err);
    if (made) { /* frames have come meanwhile */
        pthread_mutex_lock(&nodes->lock);
        nodes->cluster = made;
        pthread_mutex_unlock(&nodes->lock);
    }
    if (r == 0)
        r = direct_open(nodes, err);
    if (r == 0)
        r = outboxes_open(nodes, err);
    if (r == 0)
        r = cox_thread_start(&nodes->thread, nodes_main, nodes);
    if (nodes)
        nodes->threaded = nodes->direct && r == 0;
    if (r == 0)
        r = await_nodes(nodes, err);
    if (r) {
        cox_nodes_close(nodes);
        return r;
    }
    take_over(nodes);
    *ret_nodes = nodes;
    return 0;
}

const struct cox_transport *cox_nodes_transport(struct cox_nodes *nodes)
{
    return &nodes->transport;
}

struct cox_nodes *cox_nodes_close(struct cox_nodes *nodes)
{
    if (!nodes)
        return NULL;
    pthread_mutex_lock(&nodes->lock);
    nodes->stopping = true;
    pthread_mutex_unlock(&nodes->lock);
    if (nodes->threaded)
        pthread_join(nodes->thread, NULL);
    /* Frames still come, by direct connections too, and would be answered. */
    pthread_mutex_lock(&nodes->lock);
    struct cox_cluster *cluster = nodes->cluster;
    nodes->cluster = NULL;
    pthread_mutex_unlock(&nodes->lock);
    cox_cluster_close(cluster);
    outboxes_free(nodes);
    cox_direct_close(nodes->direct);
    struct cox_lead_event *event;
    while ((event = cox_lead_events_take(&nodes->events)))
        cox_lead_event_free(event);
    cox_images_clear(&nodes->images);
    for (uint32_t i = 0; nodes->links && i < nodes->node_count; i++) {
        cox_lead_link_deinit(&nodes->links[i]);
        cox_lead_hello_clear(&nodes->hellos[i]);
        cox_close_fd(&nodes->probes[i].fd);
    }
    for (size_t i = 0; i < 2 * nodes->fact_count; i++)
        free(nodes->facts[i]);
    free(nodes->facts);
    free(nodes->links);
    free(nodes->hellos);
    free(nodes->probes);
    free(nodes->gathered);
    free((void *)nodes->outboxes);
    free(nodes->peers);
    free(nodes->peer_pointers);
    pthread_cond_destroy(&nodes->fetched);
    pthread_mutex_destroy(&nodes->lock);
    pthread_mutex_destroy(&nodes->fault_lock);
    pthread_mutex_destroy(&nodes->delivery);
    free(nodes);
    return NULL;
}
