/* lead_hello: what nodes say that are not admitted, which of them are refused, and how one is admitted. */
#include "lead_private.h"

#include "channel/base/idioms.h"

#include <coxswain/version.h>
#include "nodes/link/limits.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void cox_lead_hello_clear(struct hello *hello)
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

static bool is_loopback(const char *address)
{
    return strncmp(address, "127.", 4) == 0 || strncmp(address, "[::1]", 5) == 0 ||
           strncmp(address, "localhost:", 10) == 0;
}

/* A process that reaches the cluster over loopback listens there, too: on Debian the name of a machine
 * is 127.0.1.1 on that machine. Returns false if it is the node or the lead, and not both; *ret_lead:
 * it is the lead. refusal says what to do. */
static bool addresses_agree(const struct cox_nodes *nodes, uint32_t node, bool *ret_lead,
                            char *refusal, size_t size)
{
    const char *theirs = nodes->hellos[node].address, *ours = nodes->address;
    *ret_lead = is_loopback(ours);
    if (is_loopback(theirs) == *ret_lead)
        return true;
    if (*ret_lead)
        snprintf(
            refusal, size,
            "the lead listens at %.64s, which node %s at %.64s cannot reach: give the lead, and "
            "each node on its machine, a HOST:PORT to listen at, the address that other "
            "machines have of it (lead_listen and listen in the file of --cluster)",
            ours, nodes->links[node].node, theirs);
    else
        snprintf(
            refusal, size,
            "node %s listens at %.64s, which other machines cannot reach (the lead is at "
            "%.64s): give it a HOST:PORT to listen at, the address that other machines have of "
            "it (listen in the file of --cluster)",
            nodes->links[node].node, theirs, ours);
    return false;
}

static void refuse(struct cox_nodes *nodes, uint32_t node, uint64_t agent, bool final,
                   const char *text)
{
    CoxNode__Welcome welcome = COX_NODE__WELCOME__INIT;
    COX_SET(&welcome, epoch, nodes->epoch);
    COX_SET(&welcome, agent, agent);
    COX_SET(&welcome, final, final);
    welcome.refusal = (char *)(uintptr_t)text;
    cox_lead_send(nodes, node, COX_FRAME_WELCOME, &welcome.base);
}

static void peers_fill(struct cox_nodes *nodes)
{
    for (uint32_t i = 0; i < nodes->node_count; i++) {
        CoxNode__Peer *peer = &nodes->peers[i];
        const struct cox_lead_link *link = &nodes->links[i];
        cox_node__peer__init(peer);
        peer->node = (char *)(uintptr_t)link->node;
        peer->address = (char *)(uintptr_t)link->address;
        COX_SET(peer, rank_first, link->rank_first);
        COX_SET(peer, rank_count, link->rank_count);
        COX_SET(peer, incarnation, link->state == COX_NODE_ABSENT ? 0 : link->incarnation);
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
void cox_lead_image_send(struct cox_nodes *nodes, uint32_t node, const struct cox_image *image)
{
    const struct hello *hello = &nodes->hellos[node];
    uint8_t *head = malloc(COX_IMAGE_HEAD_SIZE);
    bool there = false;
    if (!head)
        return;
    cox_image_pack_head(image, head);
    for (uint32_t i = 0; i < hello->image_count; i++)
        there = there || hello->images[i] == image->digest;
    cox_lead_send_large(nodes, node, COX_DIRECT_IMAGE, head, COX_IMAGE_HEAD_SIZE,
                        there ? -1 : fcntl(image->fd, F_DUPFD_CLOEXEC, 3), there ? 0 : image->size);
}

void cox_lead_admit(struct cox_nodes *nodes, uint32_t node)
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
        cox_lead_image_send(nodes, node, &nodes->images.images[i]);
    CoxNode__Welcome welcome = COX_NODE__WELCOME__INIT;
    uint64_t start_after[COX_TWO_WAY_COUNT];
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
        start_after[c] = link->channels[c].published;
    COX_SET(&welcome, epoch, nodes->epoch);
    COX_SET(&welcome, agent, hello->agent);
    COX_SET(&welcome, incarnation, link->incarnation);
    COX_SET(&welcome, rank_first, link->rank_first);
    COX_SET(&welcome, rank_count, link->rank_count);
    COX_SET(&welcome, world, nodes->world);
    COX_SET(&welcome, depth, options->depth);
    welcome.n_request_size = welcome.n_response_size = COX_CHANNEL_COUNT;
    welcome.request_size = (uint64_t *)(uintptr_t)options->request_size;
    welcome.response_size = (uint64_t *)(uintptr_t)options->response_size;
    COX_SET(&welcome, sealed, nodes->attach == COX_ATTACH_SEALED);
    COX_SET(&welcome, no_recorder, options->no_recorder);
    COX_SET(&welcome, fresh, nodes->fresh);
    welcome.n_start_after = COX_TWO_WAY_COUNT;
    welcome.start_after = start_after;
    COX_SET(&welcome, lead_grace_ms, nodes->times.lead_grace_ms);
    COX_SET(&welcome, beat_ms, nodes->times.beat_ms);
    COX_SET(&welcome, suspect_ms, nodes->times.suspect_ms);
    COX_SET(&welcome, dead_ms, nodes->times.dead_ms);
    welcome.n_peers = nodes->node_count;
    welcome.peers = nodes->peer_pointers;
    COX_SET(&welcome, peers_version, nodes->peers_version);
    welcome.address = nodes->address;
    cox_lead_send(nodes, node, COX_FRAME_WELCOME, &welcome.base);
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

int cox_lead_hello_take(struct cox_nodes *nodes, uint32_t node, const CoxNode__Hello *message,
                        struct cox_error *err)
{
    struct hello *hello = &nodes->hellos[node];
    struct cox_lead_link *link = &nodes->links[node];
    const uint64_t now_ns = cox_now_ns();
    char text[320];
    const int r = cox_hello_check(message, cox_real_ns(), err);
    if (r)
        return r;
    if (!message->address || !message->address[0] || !nodes->address[0])
        return COX_STALE; /* it says it again when both have one */
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
    cox_lead_hello_clear(hello);
    hello->agent = message->agent;
    hello->heard_ns = now_ns;
    hello->epoch = message->epoch;
    hello->silent_ms = message->silent_ms;
    hello->rank_first = message->rank_first;
    hello->rank_count = message->rank_count;
    hello->world = message->world;
    hello->pid = message->pid;
    hello->rank_group_incarnation = message->rank_group_incarnation;
    hello->client_id = message->client_id;
    snprintf(hello->address, sizeof hello->address, "%s", message->address ? message->address : "");
    snprintf(hello->lead_address, sizeof hello->lead_address, "%s",
             message->lead_address ? message->lead_address : "");
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
    bool is_leads = false;
    if (cox_lead_link_release_agrees(link, message, hello->refusal, sizeof hello->refusal) &&
        facts_agree(nodes, node, hello->refusal, sizeof hello->refusal))
        addresses_agree(nodes, node, &is_leads, hello->refusal, sizeof hello->refusal);
    if (hello->refusal[0]) {
        /* A lead that is started otherwise finds the node that waits. */
        if (!is_leads || nodes->started)
            refuse(nodes, node, hello->agent, true, hello->refusal);
        return COX_INVALID;
    }
    if (hello->epoch && hello->epoch != nodes->epoch && hello->silent_ms < nodes->times.dead_ms)
        return COX_TAKEN; /* its lead lives; seen again soon */
    if (nodes->started && !nodes->stopping)
        cox_lead_admit(nodes, node);
    return 0;
}
