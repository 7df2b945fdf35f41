/*
 * The lead: a transport whose ranks are on nodes. It joins the links of the nodes (lead_link.h) to the
 * cluster, to direct connections, and to the executor.
 *
 * Threads: frames come on a thread of libnats, or of a direct connection; a thread of this file keeps
 *   the time; outboxes send what is too large for NATS. `lock` protects the links. Events are
 *   handled without it, in their order, under `delivery`: the executor's functions are called there.
 *   So the order of locks is delivery, the executor's, lock.
 */
#include "nodes.h"

#include "channel/base/options.h"
#include "channel/base/thread.h"
#include "channel/base/version.h"
#include "image.h"
#include "nodes/link/lead_link.h"
#include "nodes/link/recorder_fetch.h"
#include "outbox.h"

#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define TICK_NS (20 * COX_NSEC_PER_MSEC)
#define START_TIMEOUT_MS 60000
#define CONNECT_MS 10000
#define TELL_MS 1000
/* The end of the group, and what was published before it, must be with the server by then. */
#define FLUSH_MS 500
#define SEQUENCE_MARGIN 65536

/* What a node said that is not admitted. */
struct hello {
    /* 0: none */
    uint64_t agent;
    uint64_t heard_ns;
    /* another agent of this name, and when it came; 0: none */
    uint64_t rival, rival_ns;
    uint64_t epoch, silent_ms;
    bool has_ranks;
    char address[128];
    char server_id[64];
    uint64_t client_id;
    uint32_t pid;
    uint64_t through[COX_TWO_WAY_COUNT];
    uint64_t generation;
    uint64_t images[COX_IMAGE_COUNT_MAX];
    uint32_t image_count;
    size_t fact_count;
    char **facts; /* name, value, ... */
    /* why it was refused; "": it was not */
    char refusal[320];
};

/* Whether an agent whose connection to the server has ended is there: its address is tried. A process
 * that has died refuses; silence says nothing. */
struct probe {
    /* -1: none is under way */
    int fd;
    char reason[160];
};

struct gathered {
    uint8_t *bytes;
    size_t size;
};

struct cox_nodes {
    struct cox_nodes_options options;
    struct cox_node_times times;
    char url[1024];
    char group[COX_NAME_SIZE_MAX + 1];
    char **facts; /* name, value or NULL, ... */
    size_t fact_count;
    uint32_t node_count;
    uint32_t world;
    uint64_t epoch;
    bool continued;
    bool sealed, fresh;
    uint64_t first_sequence[COX_TWO_WAY_COUNT];
    struct cox_cluster *cluster;
    struct cox_direct *direct;
    char address[160];
    struct cox_transport transport;

    pthread_mutex_t delivery;
    /* under delivery; NULL: not started, or stopped */
    struct cox_executor *executor;
    const struct cox_transport_host *host;

    pthread_mutex_t lock;
    struct cox_lead_link *links;
    struct hello *hellos;
    struct probe *probes;
    /* what the links send while one request is published: of each, NULL: nothing */
    struct gathered *gathered;
    bool gathering;
    struct cox_lead_events events;
    struct cox_images images;
    CoxNode__Peer *peers;
    CoxNode__Peer **peer_pointers;
    uint64_t peers_version;
    /* nodes are admitted when they come */
    bool started, stopping;
    /* another lead has taken the nodes over; "": no */
    char taken_over[400];
    /* since when this process has no connection; 0: it has one */
    uint64_t cut_off_ns;
    uint64_t seek_ns;
    struct cox_recorder_fetches fetches;
    /* one of them is done */
    pthread_cond_t fetched;
    /* stopping has */
    pthread_cond_t changed;
    /* of each node, for what is too large for NATS; NULL: direct is not open */
    struct cox_outbox **outboxes;
    bool threaded;
    pthread_t thread;
};

/* ---- sending ---- */

/* Takes bytes and fd. The lock is held. */
static void send_large(struct cox_nodes *nodes, uint32_t node, uint32_t kind, uint8_t *bytes,
                       size_t size, int fd, uint64_t fd_size)
{
    if (nodes->outboxes[node]) {
        cox_outbox_put(nodes->outboxes[node], nodes->links[node].address, kind, bytes, size, fd,
                       fd_size);
        return;
    }
    free(bytes); /* as if it were lost */
    cox_close_fd(&fd);
}

/* A request that names an image follows it. */
static bool goes_by_nats(const struct cox_nodes *nodes, const uint8_t *bytes, size_t size)
{
    return size <= cox_cluster_size_max(nodes->cluster) / 2 &&
           !(nodes->images.count && bytes[4] == COX_FRAME_REQUEST &&
             cox_images_named(&nodes->images, bytes, size));
}

static void send_to(struct cox_nodes *nodes, uint32_t node, uint8_t *bytes, size_t size)
{
    if (!nodes->cluster) /* while it is opened, or closed */
        free(bytes);
    else if (goes_by_nats(nodes, bytes, size))
        cox_cluster_send(nodes->cluster, nodes->links[node].node, bytes, size);
    else
        send_large(nodes, node, COX_DIRECT_FRAME, bytes, size, -1, 0);
}

/* Of a link; the lock is held. */
static void on_send(void *context, const struct cox_lead_link *link, uint8_t *bytes, size_t size)
{
    struct cox_nodes *nodes = context;
    if (nodes->gathering)
        nodes->gathered[link->index] = (struct gathered){.bytes = bytes, .size = size};
    else
        send_to(nodes, link->index, bytes, size);
}

/* Whether what was gathered is one request that every node can take as its own. */
static bool same_for_all(const struct cox_nodes *nodes)
{
    const struct gathered *first = &nodes->gathered[0];
    if (nodes->node_count < 2 || !nodes->cluster || !first->bytes ||
        !goes_by_nats(nodes, first->bytes, first->size))
        return false;
    for (uint32_t i = 0; i < nodes->node_count; i++) {
        const struct cox_lead_link *link = &nodes->links[i];
        const struct gathered *one = &nodes->gathered[i];
        if (link->state != COX_NODE_ALIVE || link->peers_there != nodes->peers_version ||
            !one->bytes || one->size != first->size ||
            !cox_frame_same_for_all(one->bytes, first->bytes, first->size))
            return false;
    }
    return true;
}

/* One copy for all where that will do: the server makes the others. */
static void send_gathered(struct cox_nodes *nodes)
{
    const bool same = same_for_all(nodes);
    for (uint32_t i = 0; i < nodes->node_count; i++) {
        struct gathered *one = &nodes->gathered[i];
        if (one->bytes && !same)
            send_to(nodes, i, one->bytes, one->size);
        else if (i > 0)
            free(one->bytes);
    }
    if (same) {
        struct gathered *first = &nodes->gathered[0];
        cox_frame_address_all(first->bytes, nodes->peers_version);
        cox_cluster_send(nodes->cluster, NULL, first->bytes, first->size);
    }
}

/* An outbox has lost a message for this node. */
static void on_lost(void *context, uint32_t node)
{
    struct cox_nodes *nodes = context;
    pthread_mutex_lock(&nodes->lock);
    cox_lead_link_lost(&nodes->links[node], cox_now_ns());
    pthread_mutex_unlock(&nodes->lock);
}

static void send_message(struct cox_nodes *nodes, uint32_t node, enum cox_frame_kind kind,
                         const ProtobufCMessage *message)
{
    const struct cox_frame head = {.kind = kind,
                                   .epoch = nodes->epoch,
                                   .incarnation = nodes->links[node].incarnation,
                                   .sent_ns = cox_now_ns()};
    size_t size;
    uint8_t *bytes = cox_frame_of_message(&head, message, &size);
    if (bytes)
        send_to(nodes, node, bytes, size);
}

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

/* ---- hello ---- */

static void hello_clear(struct hello *hello)
{
    for (size_t i = 0; i < 2 * hello->fact_count; i++)
        free(hello->facts[i]);
    free(hello->facts);
    *hello = (struct hello){0};
}

static const char *fact_of(char *const *facts, size_t count, const char *name)
{
    for (size_t i = 0; i < count; i++)
        if (strcmp(facts[2 * i], name) == 0)
            return facts[2 * i + 1];
    return NULL;
}

static bool fact_differs(const char *mine, const char *theirs)
{
    return mine && theirs && strcmp(mine, theirs) != 0;
}

/* Compares the node with the lead, and with the nodes that are there. Returns false: refusal says
 * what differs. */
static bool facts_agree(const struct cox_nodes *nodes, uint32_t node, char *refusal, size_t size)
{
    const struct hello *hello = &nodes->hellos[node];
    for (size_t i = 0; i < hello->fact_count; i++) {
        const char *name = hello->facts[2 * i], *theirs = hello->facts[2 * i + 1];
        const char *ours = fact_of(nodes->facts, nodes->fact_count, name);
        if (fact_differs(ours, theirs)) {
            snprintf(
                refusal, size,
                "node %s has another %s than the lead: '%s', the lead has '%s': give all machines the "
                "same",
                nodes->links[node].node, name, theirs, ours);
            return false;
        }
        for (uint32_t other = 0; other < node; other++) {
            const char *there =
                fact_of(nodes->hellos[other].facts, nodes->hellos[other].fact_count, name);
            if (fact_differs(there, theirs)) {
                snprintf(refusal, size,
                         "node %s has another %s than node %s: '%s', there '%s': give all machines "
                         "the same",
                         nodes->links[node].node, name, nodes->links[other].node, theirs, there);
                return false;
            }
        }
    }
    return true;
}

static void refuse(struct cox_nodes *nodes, uint32_t node, uint64_t agent, bool final,
                   const char *text)
{
    CoxNode__Welcome welcome = COX_NODE__WELCOME__INIT;
    welcome.has_epoch = welcome.has_agent = welcome.has_final = 1;
    welcome.epoch = nodes->epoch;
    welcome.agent = agent;
    welcome.final = final;
    welcome.refusal = (char *)(uintptr_t)text;
    send_message(nodes, node, COX_FRAME_WELCOME, &welcome.base);
}

static void peers_fill(struct cox_nodes *nodes)
{
    for (uint32_t i = 0; i < nodes->node_count; i++) {
        CoxNode__Peer *peer = &nodes->peers[i];
        const struct cox_lead_link *link = &nodes->links[i];
        cox_node__peer__init(peer);
        peer->node = (char *)(uintptr_t)link->node;
        peer->address = (char *)(uintptr_t)link->address;
        peer->has_rank_first = peer->has_rank_count = peer->has_incarnation = 1;
        peer->rank_first = link->rank_first;
        peer->rank_count = link->rank_count;
        peer->incarnation = link->state == COX_NODE_ABSENT ? 0 : link->incarnation;
        nodes->peer_pointers[i] = peer;
    }
    nodes->peers_version++;
    for (uint32_t i = 0; i < nodes->node_count; i++) {
        nodes->links[i].peers = nodes->peer_pointers;
        nodes->links[i].peer_count = nodes->node_count;
        nodes->links[i].peers_version = nodes->peers_version;
        nodes->links[i].changed = true;
    }
}

/* Without its bytes, if the node has said that it has them. The lock is held. */
static void image_send(struct cox_nodes *nodes, uint32_t node, const struct cox_image *image)
{
    const struct hello *hello = &nodes->hellos[node];
    uint8_t *head = malloc(COX_IMAGE_HEAD_SIZE);
    bool there = false;
    if (!head)
        return;
    cox_image_pack_head(image, head);
    for (uint32_t i = 0; i < hello->image_count; i++)
        there = there || hello->images[i] == image->digest;
    send_large(nodes, node, COX_DIRECT_IMAGE, head, COX_IMAGE_HEAD_SIZE,
               there ? -1 : fcntl(image->fd, F_DUPFD_CLOEXEC, 3), there ? 0 : image->size);
}

static void admit(struct cox_nodes *nodes, uint32_t node)
{
    const struct cox_nodes_options *options = &nodes->options;
    struct hello *hello = &nodes->hellos[node];
    struct cox_lead_link *link = &nodes->links[node];
    snprintf(link->address, sizeof link->address, "%s", hello->address);
    snprintf(link->server_id, sizeof link->server_id, "%s", hello->server_id);
    link->client_id = hello->client_id;
    cox_outbox_drop(nodes->outboxes[node]); /* of an agent before it */
    cox_lead_link_admit(link, hello->agent, cox_now_ns());
    hello->heard_ns = 0; /* from here on its beats say whether it lives */
    peers_fill(nodes);
    for (uint32_t i = 0; i < nodes->images.count; i++)
        image_send(nodes, node, &nodes->images.images[i]);
    CoxNode__Welcome welcome = COX_NODE__WELCOME__INIT;
    uint64_t start_after[COX_TWO_WAY_COUNT];
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
        start_after[c] = link->channels[c].published;
    welcome.has_epoch = welcome.has_agent = welcome.has_incarnation = 1;
    welcome.epoch = nodes->epoch;
    welcome.agent = hello->agent;
    welcome.incarnation = link->incarnation;
    welcome.has_rank_first = welcome.has_rank_count = welcome.has_world = welcome.has_depth = 1;
    welcome.rank_first = link->rank_first;
    welcome.rank_count = link->rank_count;
    welcome.world = nodes->world;
    welcome.depth = options->depth;
    welcome.n_request_size = welcome.n_response_size = COX_CHANNEL_COUNT;
    welcome.request_size = (uint64_t *)(uintptr_t)options->request_size;
    welcome.response_size = (uint64_t *)(uintptr_t)options->response_size;
    welcome.has_sealed = welcome.has_no_recorder = welcome.has_fresh = 1;
    welcome.sealed = nodes->sealed;
    welcome.no_recorder = options->no_recorder;
    welcome.fresh = nodes->fresh;
    welcome.n_start_after = COX_TWO_WAY_COUNT;
    welcome.start_after = start_after;
    welcome.has_lead_grace_ms = welcome.has_beat_ms = welcome.has_suspect_ms = 1;
    welcome.has_dead_ms = 1;
    welcome.lead_grace_ms = nodes->times.lead_grace_ms;
    welcome.beat_ms = nodes->times.beat_ms;
    welcome.suspect_ms = nodes->times.suspect_ms;
    welcome.dead_ms = nodes->times.dead_ms;
    welcome.n_peers = nodes->node_count;
    welcome.peers = nodes->peer_pointers;
    welcome.has_peers_version = 1;
    welcome.peers_version = nodes->peers_version;
    welcome.address = nodes->address;
    send_message(nodes, node, COX_FRAME_WELCOME, &welcome.base);
}

enum rivalry { NO_RIVAL, RIVAL_WAITS, RIVAL_REPLACES, RIVAL_IS_SECOND };

/* Of two agents of one name the second is refused if the first is heard after it has come. A new
 * agent on a machine whose old one has just died is no second one. */
static enum rivalry hello_compare(struct cox_nodes *nodes, uint32_t node, uint64_t agent,
                                  uint64_t now_ns)
{
    struct hello *hello = &nodes->hellos[node];
    const struct cox_lead_link *link = &nodes->links[node];
    const bool absent = link->state == COX_NODE_ABSENT;
    const uint64_t known = absent ? hello->agent : link->agent;
    const uint64_t heard_ns = absent ? hello->heard_ns : link->heard_ns;
    if (!known || known == agent)
        return NO_RIVAL;
    if (hello->rival != agent) {
        hello->rival = agent;
        hello->rival_ns = now_ns;
    }
    if (heard_ns > hello->rival_ns)
        return RIVAL_IS_SECOND;
    return now_ns - heard_ns >= nodes->times.suspect_ms * COX_NSEC_PER_MSEC ? RIVAL_REPLACES
                                                                            : RIVAL_WAITS;
}

/* One node that names a later epoch, by mistake or on purpose, ends no group. */
static bool any_follows(const struct cox_nodes *nodes)
{
    for (uint32_t i = 0; i < nodes->node_count; i++)
        if (nodes->links[i].state == COX_NODE_ALIVE)
            return true;
    return false;
}

/* Agents follow a later lead: this one was stopped, or cut off, for too long. The lock is held. */
static void give_up(struct cox_nodes *nodes, uint32_t node, const CoxNode__Hello *message)
{
    const char *address = message->lead_address ? message->lead_address : "";
    char text[sizeof nodes->taken_over + 16];
    if (nodes->taken_over[0])
        return;
    snprintf(
        nodes->taken_over, sizeof nodes->taken_over,
        "another lead of the group '%s' has taken over (epoch %" PRIu64 "%s%.128s, says node %s)",
        nodes->group, message->epoch, address[0] ? ", at " : "", address, nodes->links[node].node);
    snprintf(text, sizeof text, "is gone: %s", nodes->taken_over);
    for (uint32_t i = 0; i < nodes->node_count; i++)
        cox_lead_link_give_up(&nodes->links[i], text);
}

static int hello_take(struct cox_nodes *nodes, uint32_t node, const CoxNode__Hello *message)
{
    struct hello *hello = &nodes->hellos[node];
    struct cox_lead_link *link = &nodes->links[node];
    const uint64_t now_ns = cox_now_ns();
    char text[320];
    if (!message->address || !message->address[0])
        return COX_STALE; /* it says it again when it has one */
    /* While this one starts, it takes an epoch that is later than all (take_over). */
    if (nodes->started && message->epoch > nodes->epoch && !any_follows(nodes))
        give_up(nodes, node, message);
    if (nodes->taken_over[0])
        return COX_TAKEN;
    const enum rivalry rivalry = hello_compare(nodes, node, message->agent, now_ns);
    if (rivalry == RIVAL_WAITS)
        return COX_TAKEN; /* it says hello again */
    if (rivalry == RIVAL_REPLACES && link->state != COX_NODE_ABSENT)
        cox_lead_link_die(link, "is gone: another agent has come in its place");
    if (rivalry == RIVAL_IS_SECOND) {
        snprintf(text, sizeof text,
                 "node %s of the group '%s' is another agent (process %" PRIu32
                 " there), which lives: give each machine a name of its own",
                 link->node, nodes->group, hello->pid);
        refuse(nodes, node, message->agent, true, text);
        return COX_TAKEN;
    }
    if (link->state != COX_NODE_ABSENT)
        return 0; /* it is admitted already */
    hello_clear(hello);
    hello->agent = message->agent;
    hello->heard_ns = now_ns;
    hello->epoch = message->epoch;
    hello->silent_ms = message->silent_ms;
    hello->has_ranks = message->rank_count > 0;
    hello->pid = message->pid;
    hello->generation = message->generation;
    hello->client_id = message->client_id;
    snprintf(hello->address, sizeof hello->address, "%s", message->address ? message->address : "");
    snprintf(hello->server_id, sizeof hello->server_id, "%s",
             message->server_id ? message->server_id : "");
    for (size_t c = 0; c < message->n_channels && c < COX_TWO_WAY_COUNT; c++)
        hello->through[c] = message->channels[c]->through;
    for (size_t i = 0; i < message->n_images && i < COX_IMAGE_COUNT_MAX; i++)
        hello->images[hello->image_count++] = message->images[i];
    hello->facts = calloc(2 * message->n_facts + 1, sizeof *hello->facts);
    for (size_t i = 0; hello->facts && i < message->n_facts; i++) {
        const CoxNode__Fact *fact = message->facts[i];
        hello->facts[2 * i] = strdup(fact->name ? fact->name : "");
        hello->facts[2 * i + 1] = strdup(fact->value ? fact->value : "");
        hello->fact_count = i + 1;
    }
    if (cox_lead_link_release_agrees(link, message, hello->refusal, sizeof hello->refusal))
        facts_agree(nodes, node, hello->refusal, sizeof hello->refusal);
    if (hello->refusal[0]) {
        refuse(nodes, node, hello->agent, true, hello->refusal);
        return COX_INVALID;
    }
    if (hello->epoch && hello->epoch != nodes->epoch && hello->silent_ms < nodes->times.dead_ms)
        return COX_TAKEN; /* its lead lives; seen again soon */
    if (nodes->started && !nodes->stopping)
        admit(nodes, node);
    return 0;
}

static void frame_take(struct cox_nodes *nodes, const char *name, const uint8_t *bytes, size_t size)
{
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
        if (hello)
            hello_take(nodes, node, hello);
        else
            r = cox_fail(&why, COX_CORRUPT, "a hello that cannot be read");
        cox_node__hello__free_unpacked(hello, NULL);
    } else if (r == 0) {
        const struct cox_lead_link *link = &nodes->links[node];
        r = cox_lead_link_receive(&nodes->links[node], &frame, cox_now_ns(), &why);
        if (r == 0 && frame.kind == COX_FRAME_RECORDER &&
            cox_recorder_fetch_take(&nodes->fetches, &frame, name, link->rank_first,
                                    link->rank_count))
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
    if (r && r != COX_STALE)
        cox_log_write(&nodes->options.log, 4, "from node %s: %s", name, why.text);
    pump(nodes);
}

static void on_frame(void *context, const char *node, const uint8_t *bytes, size_t size)
{
    frame_take(context, node, bytes, size);
}

static void on_direct(void *context, const char *peer, const char *group, uint32_t kind,
                      uint8_t *bytes, size_t size)
{
    struct cox_nodes *nodes = context;
    if (kind == COX_DIRECT_FRAME && strncmp(peer, "node-", 5) == 0 &&
        strcmp(group, nodes->group) == 0)
        frame_take(nodes, peer + 5, bytes, size);
    free(bytes);
}

/* ---- agents whose connection has ended ---- */

static void probe_end(struct probe *probe)
{
    cox_close_fd(&probe->fd);
    probe->fd = -1;
}

/* The lock is held. r: what is known of the probe. */
static void probe_take(struct cox_nodes *nodes, uint32_t node, int r)
{
    const bool suspect = nodes->links[node].state == COX_NODE_SUSPECT;
    if (r == -ECONNREFUSED && suspect)
        cox_lead_link_die(&nodes->links[node], nodes->probes[node].reason);
    if (r != -EINPROGRESS || !suspect)
        probe_end(&nodes->probes[node]);
}

static void probe_start(struct cox_nodes *nodes, uint32_t node, const char *reason)
{
    struct probe *probe = &nodes->probes[node];
    probe_end(probe);
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
            send_message(nodes, i, COX_FRAME_SEEK, NULL);
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
        nanosleep(&(struct timespec){.tv_nsec = TICK_NS}, NULL);
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
        if (stopping)
            return NULL;
        pump(nodes);
    }
}

/* ---- the transport ---- */

static uint32_t node_of(const struct cox_nodes *nodes, uint32_t rank)
{
    uint32_t node = 0;
    while (rank >= nodes->links[node].rank_first + nodes->links[node].rank_count)
        node++;
    return node;
}

static int transport_start(void *context, struct cox_executor *executor,
                           const struct cox_transport_host *host, struct cox_error *err)
{
    struct cox_nodes *nodes = context;
    (void)err;
    pthread_mutex_lock(&nodes->delivery);
    nodes->executor = executor;
    nodes->host = host;
    pthread_mutex_unlock(&nodes->delivery);
    pthread_mutex_lock(&nodes->lock);
    nodes->started = true;
    for (uint32_t i = 0; i < nodes->node_count; i++)
        if (nodes->links[i].state == COX_NODE_ABSENT && nodes->hellos[i].agent &&
            !nodes->hellos[i].refusal[0])
            admit(nodes, i);
    pthread_mutex_unlock(&nodes->lock);
    return 0;
}

static uint64_t transport_first_sequence(void *context, enum cox_channel_id channel)
{
    const struct cox_nodes *nodes = context;
    return channel < COX_TWO_WAY_COUNT ? nodes->first_sequence[channel] : 0;
}

static bool transport_continued(void *context)
{
    const struct cox_nodes *nodes = context;
    return nodes->continued;
}

/* The lock is held. */
static int taken_over(const struct cox_nodes *nodes, struct cox_error *err)
{
    return nodes->taken_over[0] ? cox_fail(err, COX_TAKEN, "%s", nodes->taken_over) : 0;
}

static int transport_taken_over(void *context, struct cox_error *err)
{
    struct cox_nodes *nodes = context;
    pthread_mutex_lock(&nodes->lock);
    int r = taken_over(nodes, err);
    pthread_mutex_unlock(&nodes->lock);
    return r;
}

static int transport_open(void *context, uint32_t rank, uint32_t incarnation, struct cox_error *err)
{
    struct cox_nodes *nodes = context;
    pthread_mutex_lock(&nodes->lock);
    int r = taken_over(nodes, err);
    if (r == 0)
        cox_lead_link_want(&nodes->links[node_of(nodes, rank)], rank, incarnation);
    pthread_mutex_unlock(&nodes->lock);
    return r;
}

static void transport_kill(void *context, uint32_t rank)
{
    struct cox_nodes *nodes = context;
    pthread_mutex_lock(&nodes->lock);
    cox_lead_link_kill(&nodes->links[node_of(nodes, rank)], rank);
    pthread_mutex_unlock(&nodes->lock);
}

static void transport_publish(void *context, const struct cox_transport_request *request)
{
    struct cox_nodes *nodes = context;
    const uint64_t now_ns = cox_now_ns();
    pthread_mutex_lock(&nodes->lock);
    memset(nodes->gathered, 0, nodes->node_count * sizeof *nodes->gathered);
    nodes->gathering = true;
    for (uint32_t i = 0; i < nodes->node_count; i++)
        cox_lead_link_publish(&nodes->links[i], request, now_ns);
    nodes->gathering = false;
    send_gathered(nodes);
    pthread_mutex_unlock(&nodes->lock);
}

static void transport_cancel_steps(void *context, enum cox_channel_id channel, uint64_t through)
{
    struct cox_nodes *nodes = context;
    const uint64_t now_ns = cox_now_ns();
    pthread_mutex_lock(&nodes->lock);
    for (uint32_t i = 0; i < nodes->node_count; i++) {
        cox_lead_link_cancel(&nodes->links[i], channel, through);
        cox_lead_link_tick(&nodes->links[i],
                           now_ns); /* ranks wait in the step: not at the next beat */
    }
    pthread_mutex_unlock(&nodes->lock);
}

static void transport_ended(void *context, enum cox_channel_id channel, uint64_t through)
{
    struct cox_nodes *nodes = context;
    const uint64_t now_ns = cox_now_ns();
    pthread_mutex_lock(&nodes->lock);
    for (uint32_t i = 0; i < nodes->node_count; i++) {
        cox_lead_link_end(&nodes->links[i], channel, through);
        cox_lead_link_tick(&nodes->links[i], now_ns);
    }
    pthread_mutex_unlock(&nodes->lock);
}

static bool transport_place(void *context, uint32_t rank, char *node, size_t node_size,
                            char *address, size_t address_size)
{
    struct cox_nodes *nodes = context;
    pthread_mutex_lock(&nodes->lock);
    const struct cox_lead_link *link = &nodes->links[node_of(nodes, rank)];
    snprintf(node, node_size, "%s", link->node);
    snprintf(address, address_size, "%s", link->address);
    pthread_mutex_unlock(&nodes->lock);
    return address[0] != '\0';
}

static int transport_share(void *context, const void *handle, int fd, uint64_t size,
                           uint64_t digest, struct cox_error *err)
{
    struct cox_nodes *nodes = context;
    struct cox_image image = {.fd = fcntl(fd, F_DUPFD_CLOEXEC, 3), .size = size, .digest = digest};
    if (image.fd < 0)
        return cox_fail(err, -errno, "dup: %s", cox_status_text(-errno));
    memcpy(image.handle.bytes, handle, sizeof image.handle.bytes);
    pthread_mutex_lock(&nodes->lock);
    const bool room = nodes->images.count < COX_IMAGE_COUNT_MAX;
    if (room)
        nodes->images.images[nodes->images.count++] = image;
    for (uint32_t i = 0; room && i < nodes->node_count; i++)
        if (nodes->links[i].state != COX_NODE_ABSENT)
            image_send(nodes, i, &image);
    pthread_mutex_unlock(&nodes->lock);
    if (!room)
        cox_close_fd(&image.fd);
    return room ? 0
                : cox_fail(err, COX_FULL, "%d images are shared with the nodes already",
                           COX_IMAGE_COUNT_MAX);
}

static void transport_unshare(void *context, const void *handle)
{
    struct cox_nodes *nodes = context;
    pthread_mutex_lock(&nodes->lock);
    for (uint32_t i = 0; i < nodes->images.count; i++) {
        struct cox_image *image = &nodes->images.images[i];
        if (memcmp(&image->handle, handle, sizeof image->handle) != 0)
            continue;
        for (uint32_t node = 0; node < nodes->node_count; node++) {
            uint8_t *bytes = malloc(sizeof image->handle);
            if (bytes)
                memcpy(bytes, handle, sizeof image->handle);
            if (bytes && nodes->links[node].state != COX_NODE_ABSENT)
                send_large(nodes, node, COX_DIRECT_DROP_IMAGE, bytes, sizeof image->handle, -1, 0);
            else
                free(bytes);
        }
        cox_close_fd(&image->fd);
        *image = nodes->images.images[--nodes->images.count];
        break;
    }
    pthread_mutex_unlock(&nodes->lock);
}

static bool transport_trouble(void *context, uint32_t rank, char *buffer, size_t buffer_size)
{
    struct cox_nodes *nodes = context;
    pthread_mutex_lock(&nodes->lock);
    const bool said = cox_lead_link_trouble(&nodes->links[node_of(nodes, rank)], cox_now_ns(),
                                            buffer, buffer_size);
    pthread_mutex_unlock(&nodes->lock);
    return said;
}

static void transport_process(void *context, uint32_t rank,
                              struct cox_transport_process *ret_process)
{
    struct cox_nodes *nodes = context;
    pthread_mutex_lock(&nodes->lock);
    const struct cox_lead_link *link = &nodes->links[node_of(nodes, rank)];
    const struct cox_lead_rank *is = &link->ranks[rank - link->rank_first];
    *ret_process = (struct cox_transport_process){
        .stopped = is->stopped, .cpu_ns = is->cpu_ns, .resident_bytes = is->resident_bytes};
    pthread_mutex_unlock(&nodes->lock);
}

static void recorder_ask(struct cox_nodes *nodes, const struct cox_recorder_fetch *fetch,
                         const struct cox_lead_link *link)
{
    struct cox_frame head = {.kind = COX_FRAME_RECORDER_ASK,
                             .epoch = nodes->epoch,
                             .incarnation = link->incarnation,
                             .sequence = fetch->number,
                             .sent_ns = cox_now_ns()};
    uint8_t *bytes = malloc(COX_FRAME_HEAD_SIZE);
    if (!bytes)
        return; /* as if it were lost */
    cox_rank_set_add(&head.asked, fetch->rank);
    cox_frame_pack_head(&head, bytes);
    send_to(nodes, link->index, bytes, COX_FRAME_HEAD_SIZE);
}

static int transport_recorder(void *context, uint32_t rank, void *copy, uint64_t deadline_ns,
                              struct cox_error *err)
{
    struct cox_nodes *nodes = context;
    struct cox_recorder_fetch fetch = {.rank = rank, .copy = copy};
    char trouble[256] = "";
    const uint64_t begin_ns = cox_now_ns();
    uint64_t now_ns = begin_ns;
    pthread_mutex_lock(&nodes->lock);
    const struct cox_lead_link *link = &nodes->links[node_of(nodes, rank)];
    bool silent = cox_lead_link_trouble(link, begin_ns, trouble, sizeof trouble);
    cox_recorder_fetch_begin(&nodes->fetches, &fetch);
    if (!silent)
        recorder_ask(nodes, &fetch, link);
    /* Nothing wakes this when a node becomes suspect: it is looked at. */
    while (!fetch.done && !silent && !nodes->stopping && now_ns < deadline_ns) {
        const uint64_t until_ns = now_ns + TICK_NS < deadline_ns ? now_ns + TICK_NS : deadline_ns;
        const struct timespec until = cox_deadline_timespec(until_ns);
        pthread_cond_timedwait(&nodes->fetched, &nodes->lock, &until);
        now_ns = cox_now_ns();
        silent = cox_lead_link_trouble(link, now_ns, trouble, sizeof trouble);
    }
    cox_recorder_fetch_end(&nodes->fetches, &fetch);
    const bool stopping = nodes->stopping;
    pthread_mutex_unlock(&nodes->lock);
    if (fetch.done && fetch.err.code)
        return cox_fail(err, fetch.status, "%s", fetch.err.text);
    if (fetch.done)
        return fetch.status;
    if (silent)
        return cox_fail(err, COX_PEER_DEAD, "%s", trouble);
    return stopping
               ? cox_fail(err, COX_CLOSED, "the group ends")
               : cox_fail(err, COX_TIMEOUT,
                          "node %s has not sent its recorder in %.1f s: see the log of its agent",
                          link->node, (double)(now_ns - begin_ns) / 1e9);
}

static void transport_stop(void *context)
{
    struct cox_nodes *nodes = context;
    pthread_mutex_lock(&nodes->delivery);
    nodes->executor = NULL;
    pthread_mutex_unlock(&nodes->delivery);
    pthread_mutex_lock(&nodes->lock);
    for (uint32_t i = 0; i < nodes->node_count; i++) {
        nodes->links[i].finishing = nodes->links[i].changed = true;
        cox_lead_link_tick(&nodes->links[i], cox_now_ns());
    }
    nodes->stopping = true;
    pthread_cond_broadcast(&nodes->changed);
    pthread_mutex_unlock(&nodes->lock);
    cox_cluster_flush(nodes->cluster, cox_deadline_after_ms(FLUSH_MS));
}

/* ---- open ---- */

static int direct_open(struct cox_nodes *nodes, struct cox_error *err)
{
    const struct cox_executor_nodes *options = nodes->options.nodes;
    char host[128], listen[160];
    if (options->listen) {
        snprintf(listen, sizeof listen, "%s", options->listen);
        snprintf(host, sizeof host, "%.*s", (int)(strrchr(listen, ':') - listen), listen);
    } else {
        if (!cox_cluster_local_address(nodes->cluster, host, sizeof host))
            snprintf(host, sizeof host, "127.0.0.1");
        snprintf(listen, sizeof listen, "%s:0", host);
    }
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
    };
    int r = cox_direct_open(&direct, &nodes->direct, err);
    if (r == 0)
        snprintf(nodes->address, sizeof nodes->address, "%s:%u", host,
                 cox_direct_port(nodes->direct));
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
                                                   .lost = on_lost};
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

/* A node that is not there yet, or refused; -1: none. */
static int32_t missing_node(struct cox_nodes *nodes, char *text, size_t size, int *ret_code)
{
    int32_t missing = -1;
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
        if ((!fresh || follows) && missing < 0) {
            missing = (int32_t)i;
            *ret_code = follows ? COX_TAKEN : COX_TIMEOUT;
            if (follows)
                snprintf(text, size,
                         "node %s follows another lead of the group '%s', heard %" PRIu64
                         " ms ago: stop that one",
                         nodes->links[i].node, nodes->group, hello->silent_ms);
            else
                snprintf(text, size,
                         "node %s has not come: run there: coxswain node --name %s --node %s "
                         "--cluster %.100s ...",
                         nodes->links[i].node, nodes->group, nodes->links[i].node, nodes->url);
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
    int32_t told = -1;
    for (;;) {
        char text[512];
        int code;
        pthread_mutex_lock(&nodes->lock);
        const int32_t missing = missing_node(nodes, text, sizeof text, &code);
        pthread_mutex_unlock(&nodes->lock);
        if (missing < 0)
            return 0;
        if (code == COX_INVALID || cox_now_ns() >= deadline_ns)
            return cox_fail(err, code, "%s", text);
        if (options->cancelled && options->cancelled(options->context))
            return cox_fail(err, COX_CLOSED, "cancelled while nodes were awaited");
        if (missing != told && cox_now_ns() >= tell_ns)
            cox_log_write(&options->log, 4, "waiting: %s", text);
        if (cox_now_ns() >= tell_ns)
            told = missing;
        nanosleep(&(struct timespec){.tv_nsec = TICK_NS}, NULL);
    }
}

static bool window_is_used(const struct cox_nodes *nodes, uint64_t generation)
{
    for (uint32_t i = 0; i < nodes->node_count; i++) {
        const uint64_t has = nodes->hellos[i].generation;
        if (has && has % COX_GROUP_WINDOW_COUNT == generation % COX_GROUP_WINDOW_COUNT)
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
        nodes->continued = nodes->continued || (hello->has_ranks && !nodes->fresh);
        if (hello->epoch >= nodes->epoch)
            nodes->epoch = hello->epoch + 1;
        for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
            if (hello->through[c] > nodes->first_sequence[c])
                nodes->first_sequence[c] = hello->through[c];
    }
    /* A lead that was not quite lost may have sent some more since. */
    for (int c = 0; c < COX_TWO_WAY_COUNT && nodes->continued; c++)
        nodes->first_sequence[c] += SEQUENCE_MARGIN;
    /* The next generation of the rank group, which follows it, is in no window that ranks leave. */
    while (nodes->continued &&
           window_is_used(nodes, nodes->first_sequence[COX_CHANNEL_EXECUTE] + 1))
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
    nodes->sealed = options->nodes->attach == COX_ATTACH_SEALED;
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
    pthread_mutex_init(&nodes->lock, NULL);
    cox_condition_init(&nodes->changed);
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
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    nodes->epoch = (uint64_t)now.tv_sec * COX_NSEC_PER_SEC + (uint64_t)now.tv_nsec;
    if (times->suspect_ms < 2 * times->beat_ms || times->dead_ms <= times->suspect_ms)
        return cox_fail(err, COX_INVALID,
                        "beats of %" PRIu64 " ms, suspect after %" PRIu64 " ms, dead after %" PRIu64
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
        link->send = on_send;
        link->events = &nodes->events;
    }
    nodes->transport = (struct cox_transport){
        .size = sizeof nodes->transport,
        .context = nodes,
        .continued = transport_continued,
        .start = transport_start,
        .first_sequence = transport_first_sequence,
        .open = transport_open,
        .kill = transport_kill,
        .publish = transport_publish,
        .cancel_steps = transport_cancel_steps,
        .ended = transport_ended,
        .place = transport_place,
        .share = transport_share,
        .unshare = transport_unshare,
        .trouble = transport_trouble,
        .process = transport_process,
        .recorder = transport_recorder,
        .taken_over = transport_taken_over,
        .stop = transport_stop,
    };
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
        .context = nodes,
        .on_frame = on_frame,
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
    pthread_cond_broadcast(&nodes->changed);
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
        hello_clear(&nodes->hellos[i]);
        probe_end(&nodes->probes[i]);
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
    pthread_cond_destroy(&nodes->changed);
    pthread_cond_destroy(&nodes->fetched);
    pthread_mutex_destroy(&nodes->lock);
    pthread_mutex_destroy(&nodes->delivery);
    free(nodes);
    return NULL;
}
