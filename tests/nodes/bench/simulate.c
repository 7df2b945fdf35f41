/* A simulation of a group of many nodes: discrete events, and the links that really run
 * (lead_link.h, agent_link.h), one pair per node. The lead, the NATS server and each agent are
 * queues with one server and a cost per message, below; what lead.c does around the links is
 * repeated here: SEEK, HELLO, WELCOME, the table of peers, and the request that goes once to all.
 *
 *     simulate [--seed N] [--server-us N] [--sender-us N] [--peer-bytes 0|1] [K...]
 *
 * Each node has one rank, numbered from 0 on its own link, so that limits of the executor do not
 * count. Prints a table. */
#include "channel/base/idioms.h"
#include "nodes/link/agent_link.h"
#include "nodes/link/lead_link.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MS COX_NSEC_PER_MSEC
#define US UINT64_C(1000)
#define LEAD_TICK_NS (10 * MS)
#define AGENT_TICK_NS (5 * MS)
#define WIRE_NS (50 * US)
#define REQUEST_SIZE 1024
#define REPLY_SIZE 1024
/* One TLS handshake at the server; libnats waits 50 ms before it connects again, and up to 100
 * more. */
#define CONNECT_NS (2 * MS)
#define RECONNECT_NS (50 * MS)
#define RECONNECT_JITTER_NS (100 * MS)
/* 10 Gb/s at the server, each way. */
#define BYTE_PS 800
#define STEP_COUNT 40
#define PACED_COUNT 300
#define DEATH_COUNT 8

/* Half of it in, half of it out: a message to all costs one half, and one for each node. */
static uint64_t server_message_ns = 40 * US;
static uint64_t sender_message_ns = 10 * US;
static bool peers_in_beats = true;

/* ---- events ---- */

enum event_kind {
    LEAD_TICK,
    AGENT_TICK,
    AT_SERVER,
    AT_LEAD,
    LEAD_HANDLES,
    AT_AGENT,
    CONNECTS,
    SERVER_SAYS_GONE,
};

enum direction { TO_LEAD, TO_NODE, TO_ALL };

struct event {
    uint64_t at_ns, number;
    enum event_kind kind;
    /* TO_ALL: 0 */
    uint32_t node;
    enum direction to;
    uint8_t *bytes;
    size_t size;
};

struct node {
    struct cox_lead_link lead;
    struct cox_agent_link agent;
    /* 0: none came */
    uint64_t hello_agent;
    bool runs, connected, connecting, attached, replied;
    uint32_t claimed;
    char name[16];
    /* what the link sent while one request was published; NULL: nothing */
    uint8_t *gathered;
    size_t gathered_size;
};

static struct simulation {
    uint64_t random, now_ns, number;
    struct event *heap;
    size_t count, capacity;
    uint32_t k;
    struct node *nodes;
    struct cox_lead_events events;
    CoxNode__Peer *peers;
    CoxNode__Peer **peer_pointers;
    bool started, lead_connected, gathering;
    uint64_t seek_ns, lead_tx_ns, lead_rx_ns, server_ns, peers_version;
    uint64_t step, replies;
    /* counted at the lead and the server */
    uint64_t lead_out, lead_in, lead_out_bytes, lead_in_bytes, server_busy_ns, deaths, dead_at_ns;
    /* of these, requests and answers; a request to all is one */
    uint64_t work, work_bytes, work_busy_ns;
} sim;

static const struct cox_node_times times = COX_NODE_TIMES_DEFAULT;

static uint64_t random_next(void)
{
    sim.random ^= sim.random << 13;
    sim.random ^= sim.random >> 7;
    sim.random ^= sim.random << 17;
    return sim.random >> 8;
}

static bool before(const struct event *a, const struct event *b)
{
    return a->at_ns < b->at_ns || (a->at_ns == b->at_ns && a->number < b->number);
}

static void event_put(struct event event)
{
    if (sim.count == sim.capacity) {
        sim.capacity = sim.capacity ? 2 * sim.capacity : 4096;
        sim.heap = realloc(sim.heap, sim.capacity * sizeof *sim.heap);
        COX_ASSERT(sim.heap);
    }
    event.number = sim.number++;
    size_t i = sim.count++;
    for (; i > 0 && before(&event, &sim.heap[(i - 1) / 2]); i = (i - 1) / 2)
        sim.heap[i] = sim.heap[(i - 1) / 2];
    sim.heap[i] = event;
}

static struct event event_take(void)
{
    const struct event first = sim.heap[0], last = sim.heap[--sim.count];
    size_t i = 0;
    for (;;) {
        size_t child = 2 * i + 1;
        if (child + 1 < sim.count && before(&sim.heap[child + 1], &sim.heap[child]))
            child++;
        if (child >= sim.count || !before(&sim.heap[child], &last))
            break;
        sim.heap[i] = sim.heap[child];
        i = child;
    }
    sim.heap[i] = last;
    return first;
}

static uint64_t queue(uint64_t *free_ns, uint64_t cost_ns)
{
    *free_ns = (*free_ns > sim.now_ns ? *free_ns : sim.now_ns) + cost_ns;
    return *free_ns;
}

/* ---- sending ---- */

/* A request or an answer, by the kind in its head. */
static bool is_work(const uint8_t *bytes)
{
    return bytes[4] == COX_FRAME_REQUEST || bytes[4] == COX_FRAME_REQUEST_ALL ||
           bytes[4] == COX_FRAME_ANSWER;
}

static void put_message(uint32_t node, enum direction to, uint8_t *bytes, size_t size)
{
    struct event event = {.kind = AT_SERVER, .node = node, .to = to, .bytes = bytes, .size = size};
    if (is_work(bytes) && to != TO_LEAD) {
        sim.work++;
        sim.work_bytes += size;
    }
    if (to == TO_LEAD) {
        event.at_ns = sim.now_ns + WIRE_NS;
    } else {
        sim.lead_out++;
        sim.lead_out_bytes += size;
        event.at_ns = queue(&sim.lead_tx_ns, sender_message_ns) + WIRE_NS;
    }
    event_put(event);
}

static void on_lead_send(void *context, const struct cox_lead_link *link, uint8_t *bytes,
                         size_t size, struct cox_large_request *large)
{
    (void)large;
    (void)context;
    if (sim.gathering) {
        sim.nodes[link->index].gathered = bytes;
        sim.nodes[link->index].gathered_size = size;
    } else {
        put_message(link->index, TO_NODE, bytes, size);
    }
}

static void on_agent_send(void *context, uint8_t *bytes, size_t size)
{
    const struct node *node = context;
    put_message((uint32_t)(node - sim.nodes), TO_LEAD, bytes, size);
}

static void message(uint32_t i, enum cox_frame_kind kind, const ProtobufCMessage *of)
{
    const struct cox_frame head = {.kind = kind,
                                   .epoch = sim.nodes[i].lead.epoch,
                                   .incarnation = sim.nodes[i].lead.incarnation,
                                   .sent_ns = sim.now_ns};
    size_t size;
    uint8_t *bytes = cox_frame_of_message(&head, of, &size);
    COX_ASSERT(bytes);
    put_message(i, kind == COX_FRAME_HELLO ? TO_LEAD : TO_NODE, bytes, size);
}

/* ---- the lead, as lead.c ---- */

static void peers_fill(void)
{
    for (uint32_t i = 0; i < sim.k; i++) {
        CoxNode__Peer *peer = &sim.peers[i];
        const struct cox_lead_link *link = &sim.nodes[i].lead;
        cox_node__peer__init(peer);
        peer->node = sim.nodes[i].name;
        peer->address = (char *)(uintptr_t)link->address;
        peer->has_rank_first = peer->has_rank_count = peer->has_incarnation = 1;
        peer->rank_first = i;
        peer->rank_count = 1;
        peer->incarnation = link->state == COX_NODE_ABSENT ? 0 : link->incarnation;
        sim.peer_pointers[i] = peer;
    }
    sim.peers_version++;
    for (uint32_t i = 0; i < sim.k; i++) {
        sim.nodes[i].lead.peers = sim.peer_pointers;
        sim.nodes[i].lead.peer_count = peers_in_beats ? sim.k : 0;
        sim.nodes[i].lead.peers_version = sim.peers_version;
        sim.nodes[i].lead.changed = true;
    }
}

static void admit(uint32_t i)
{
    struct cox_lead_link *link = &sim.nodes[i].lead;
    CoxNode__Welcome welcome = COX_NODE__WELCOME__INIT;
    uint64_t start_after[COX_TWO_WAY_COUNT];
    cox_lead_link_admit(link, sim.nodes[i].hello_agent, sim.now_ns);
    peers_fill();
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
        start_after[c] = link->channels[c].published;
    welcome.has_epoch = welcome.has_agent = welcome.has_incarnation = welcome.has_depth = 1;
    welcome.has_rank_first = welcome.has_rank_count = welcome.has_world = 1;
    welcome.epoch = link->epoch;
    welcome.agent = sim.nodes[i].hello_agent;
    welcome.incarnation = link->incarnation;
    welcome.rank_count = welcome.world = 1;
    welcome.depth = 4;
    welcome.n_start_after = COX_TWO_WAY_COUNT;
    welcome.start_after = start_after;
    welcome.n_peers = peers_in_beats ? sim.k : 0;
    welcome.peers = sim.peer_pointers;
    welcome.has_peers_version = 1;
    welcome.peers_version = sim.peers_version;
    welcome.address = (char *)(uintptr_t) "192.168.100.100:45678";
    message(i, COX_FRAME_WELCOME, &welcome.base);
}

static bool same_for_all(void)
{
    const struct node *first = &sim.nodes[0];
    if (sim.k < 2 || !first->gathered)
        return false;
    for (uint32_t i = 0; i < sim.k; i++) {
        const struct node *node = &sim.nodes[i];
        if (node->lead.state != COX_NODE_ALIVE || node->lead.peers_there != sim.peers_version ||
            !node->gathered || node->gathered_size != first->gathered_size ||
            !cox_frame_same_for_all(node->gathered, first->gathered, first->gathered_size))
            return false;
    }
    return true;
}

static void publish(const struct cox_transport_request *request)
{
    struct node *first = &sim.nodes[0];
    for (uint32_t i = 0; i < sim.k; i++)
        sim.nodes[i].gathered = NULL;
    sim.gathering = true;
    for (uint32_t i = 0; i < sim.k; i++)
        cox_lead_link_publish(&sim.nodes[i].lead, request, NULL, sim.now_ns);
    sim.gathering = false;
    const bool same = same_for_all();
    for (uint32_t i = 0; i < sim.k; i++) {
        struct node *node = &sim.nodes[i];
        if (node->gathered && !same)
            put_message(i, TO_NODE, node->gathered, node->gathered_size);
        else if (i > 0)
            free(node->gathered);
    }
    if (same) {
        cox_frame_address_all(first->gathered, sim.peers_version);
        put_message(0, TO_ALL, first->gathered, first->gathered_size);
    }
}

static void lead_pump(void)
{
    struct cox_lead_event *event;
    while ((event = cox_lead_events_take(&sim.events))) {
        struct node *node = &sim.nodes[event->node];
        if (event->kind == COX_LEAD_REPLY && event->sequence == sim.step && !node->replied) {
            node->replied = true;
            sim.replies++;
        } else if (event->kind == COX_LEAD_RANK_UP) {
            node->attached = true;
        } else if (event->kind == COX_LEAD_RANK_DIED) {
            node->attached = false;
            cox_lead_link_want(&node->lead, 0, ++node->claimed + 1);
        } else if (event->kind == COX_LEAD_NODE_STATE && event->state == COX_NODE_ABSENT) {
            sim.deaths++;
            sim.dead_at_ns = sim.now_ns;
            node->hello_agent = 0;
        }
        cox_lead_event_free(event);
    }
}

static void lead_tick(void)
{
    if (sim.now_ns - sim.seek_ns >= times.beat_ms * MS) {
        sim.seek_ns = sim.now_ns;
        for (uint32_t i = 0; i < sim.k; i++)
            if (sim.nodes[i].lead.state == COX_NODE_ABSENT)
                message(i, COX_FRAME_SEEK, NULL);
    }
    bool all = true;
    for (uint32_t i = 0; i < sim.k; i++)
        all = all && sim.nodes[i].hello_agent;
    if (!sim.started && all) {
        sim.started = true;
        for (uint32_t i = 0; i < sim.k; i++)
            admit(i);
    }
    for (uint32_t i = 0; i < sim.k; i++)
        cox_lead_link_tick(&sim.nodes[i].lead, sim.now_ns);
    lead_pump();
}

static void lead_handles(const struct event *event)
{
    struct node *node = &sim.nodes[event->node];
    struct cox_frame frame;
    COX_ASSERT(cox_frame_unpack(event->bytes, event->size, &frame, NULL) == 0);
    if (frame.kind == COX_FRAME_HELLO) {
        CoxNode__Hello *hello = cox_node__hello__unpack(NULL, frame.size, frame.payload);
        if (hello && node->lead.state == COX_NODE_ABSENT) {
            node->hello_agent = hello->agent;
            if (sim.started)
                admit(event->node);
        }
        cox_node__hello__free_unpacked(hello, NULL);
    } else {
        cox_lead_link_receive(&node->lead, &frame, sim.now_ns, NULL);
    }
    lead_pump();
}

/* ---- agents, as agent.c ---- */

static void agent_hello(struct node *node)
{
    CoxNode__Hello hello = COX_NODE__HELLO__INIT;
    CoxNode__Channel channels[COX_TWO_WAY_COUNT], *pointers[COX_TWO_WAY_COUNT];
    hello.has_agent = hello.has_protocol = hello.has_pid = 1;
    hello.version = (char *)(uintptr_t) "1.1.0";
    hello.protocol = COX_FRAME_PROTOCOL;
    hello.agent = node->agent.agent;
    hello.address = (char *)(uintptr_t) "192.168.100.100:45678";
    cox_agent_link_describe(&node->agent, sim.now_ns, &hello, channels, pointers);
    message((uint32_t)(node - sim.nodes), COX_FRAME_HELLO, &hello.base);
}

static void agent_work(struct node *node)
{
    static uint8_t bytes[REPLY_SIZE];
    struct cox_frame frame;
    uint64_t deadline_ns;
    for (uint32_t c = 0; c < COX_TWO_WAY_COUNT; c++)
        while (cox_agent_link_next(&node->agent, c, sim.now_ns, &frame, &deadline_ns)) {
            const struct cox_answer answer = {
                .count = 1,
                .replies = {{.flags = COX_ANSWER_REPLIED, .bytes = bytes, .size = sizeof bytes}}};
            const uint64_t sequence = frame.sequence;
            cox_agent_link_taken(&node->agent, c, sequence, false);
            cox_agent_link_answer(&node->agent, c, sequence, &answer, true, sim.now_ns);
        }
    if (node->agent.wanted[0] && node->agent.ranks[0].incarnation != node->agent.wanted[0]) {
        const struct cox_agent_rank is = {
            .incarnation = node->agent.wanted[0], .state = COX_NODE__RANK_STATE__UP, .pid = 4242};
        cox_agent_link_set_rank(&node->agent, 0, &is);
    }
}

static void agent_handles(struct node *node, const struct event *event)
{
    struct cox_frame frame;
    COX_ASSERT(cox_frame_unpack(event->bytes, event->size, &frame, NULL) == 0);
    if (frame.kind == COX_FRAME_SEEK) {
        if (cox_agent_link_greets(&node->agent, &frame, COX_STALE, sim.now_ns))
            agent_hello(node);
    } else if (frame.kind == COX_FRAME_WELCOME) {
        CoxNode__Welcome *welcome = cox_node__welcome__unpack(NULL, frame.size, frame.payload);
        if (welcome && welcome->agent == node->agent.agent &&
            cox_agent_link_follow(&node->agent, welcome, sim.now_ns) == 0)
            node->agent.ranks[0] = (struct cox_agent_rank){0};
        cox_node__welcome__free_unpacked(welcome, NULL);
    } else {
        cox_agent_link_receive(&node->agent, &frame, sim.now_ns, NULL);
    }
    agent_work(node);
    if (node->agent.changed)
        cox_agent_link_tick(&node->agent, sim.now_ns);
}

static void agent_restart(struct node *node)
{
    cox_agent_link_deinit(&node->agent);
    cox_agent_link_init(&node->agent, random_next() | 1);
    node->agent.context = node;
    node->agent.send = on_agent_send;
    node->runs = true;
}

/* ---- the server ---- */

/* Returns when it is done. */
static uint64_t server_works(const struct event *event, uint64_t message_ns, unsigned ways)
{
    const uint64_t cost_ns = message_ns + ways * event->size * BYTE_PS / 1000;
    sim.server_busy_ns += cost_ns;
    sim.work_busy_ns += is_work(event->bytes) ? cost_ns : 0;
    return queue(&sim.server_ns, cost_ns);
}

/* A copy for each node that is connected, one after the other. */
static void server_copies(const struct event *event)
{
    server_works(event, server_message_ns / 2, 1);
    for (uint32_t i = 0; i < sim.k; i++) {
        struct event next = *event;
        if (!sim.nodes[i].connected)
            continue;
        next.kind = AT_AGENT;
        next.node = i;
        next.at_ns = server_works(event, server_message_ns / 2, 1) + WIRE_NS;
        next.bytes = malloc(event->size);
        COX_ASSERT(next.bytes);
        memcpy(next.bytes, event->bytes, event->size);
        event_put(next);
    }
    free(event->bytes);
}

static void at_server(const struct event *event)
{
    struct event next = *event;
    if (!sim.lead_connected || (event->to != TO_ALL && !sim.nodes[event->node].connected)) {
        free(event->bytes);
        return;
    }
    if (event->to == TO_ALL) {
        server_copies(event);
        return;
    }
    next.at_ns = server_works(event, server_message_ns, 2) + WIRE_NS;
    next.kind = event->to == TO_LEAD ? AT_LEAD : AT_AGENT;
    event_put(next);
}

/* ---- time ---- */

static void handle(const struct event *event)
{
    struct node *node = &sim.nodes[event->node];
    switch (event->kind) {
    case LEAD_TICK:
        lead_tick();
        event_put((struct event){.at_ns = sim.now_ns + LEAD_TICK_NS, .kind = LEAD_TICK});
        break;
    case AGENT_TICK:
        if (node->runs)
            cox_agent_link_tick(&node->agent, sim.now_ns);
        event_put((struct event){
            .at_ns = sim.now_ns + AGENT_TICK_NS, .kind = AGENT_TICK, .node = event->node});
        break;
    case AT_SERVER:
        at_server(event);
        break;
    case AT_LEAD: {
        struct event next = *event;
        sim.lead_in++;
        sim.lead_in_bytes += event->size;
        sim.work += is_work(event->bytes);
        sim.work_bytes += is_work(event->bytes) ? event->size : 0;
        next.at_ns = queue(&sim.lead_rx_ns, sender_message_ns);
        next.kind = LEAD_HANDLES;
        event_put(next);
        break;
    }
    case LEAD_HANDLES:
        lead_handles(event);
        free(event->bytes);
        break;
    case AT_AGENT:
        if (node->runs)
            agent_handles(node, event);
        free(event->bytes);
        break;
    case CONNECTS: {
        /* The handshake takes its turn at the server. */
        struct event next = *event;
        if (!node->connecting) {
            node->connecting = true;
            sim.server_busy_ns += CONNECT_NS;
            next.at_ns = queue(&sim.server_ns, CONNECT_NS);
            event_put(next);
        } else {
            node->connecting = false;
            node->connected = true;
        }
        break;
    }
    case SERVER_SAYS_GONE:
        cox_lead_link_die(&node->lead, "is gone: its connection has ended");
        lead_pump();
        break;
    }
}

static void run_until(uint64_t until_ns)
{
    while (sim.count && sim.heap[0].at_ns <= until_ns) {
        const struct event event = event_take();
        sim.now_ns = event.at_ns;
        handle(&event);
    }
    sim.now_ns = until_ns;
}

static bool all_up(void)
{
    for (uint32_t i = 0; i < sim.k; i++)
        if (!sim.nodes[i].attached || sim.nodes[i].lead.state != COX_NODE_ALIVE)
            return false;
    return true;
}

/* Returns after how long; UINT64_MAX: not within max_ns. */
static uint64_t await_all_up(uint64_t max_ns)
{
    const uint64_t begun_ns = sim.now_ns;
    while (!all_up() && sim.now_ns - begun_ns < max_ns)
        run_until(sim.now_ns + MS);
    return all_up() ? sim.now_ns - begun_ns : UINT64_MAX;
}

static void connect_at(uint32_t i, uint64_t at_ns)
{
    sim.nodes[i].connected = sim.nodes[i].connecting = false;
    event_put((struct event){.at_ns = at_ns, .kind = CONNECTS, .node = i});
}

static uint64_t step(uint64_t max_ns)
{
    static uint8_t bytes[REQUEST_SIZE];
    const struct cox_rank_set asked = {{1}};
    const struct cox_transport_request request = {.channel = COX_CHANNEL_EXECUTE,
                                                  .sequence = ++sim.step,
                                                  .deadline_ns = COX_DEADLINE_NEVER,
                                                  .replies = true,
                                                  .asked = &asked,
                                                  .bytes = bytes,
                                                  .size = sizeof bytes};
    const uint64_t begun_ns = sim.now_ns;
    uint32_t expected = 0;
    sim.replies = 0;
    for (uint32_t i = 0; i < sim.k; i++) {
        sim.nodes[i].replied = false;
        expected += sim.nodes[i].lead.state != COX_NODE_ABSENT;
    }
    publish(&request);
    while (sim.replies < expected && sim.now_ns - begun_ns < max_ns)
        run_until(sim.now_ns + 5 * US);
    return sim.now_ns - begun_ns;
}

static int by_value(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

struct result {
    uint32_t k;
    double step_messages, step_bytes, step_server_us, step_p50_us, step_p99_us;
    double idle_messages, idle_bytes, idle_out_bytes, idle_load;
    double load_100, beats_100;
    double dead_server_ms, dead_silence_ms, dead_silence_max_ms;
    double start_ms, start_messages, start_bytes, server_restart_ms, server_restart_deaths;
};

static void begin(uint32_t k, uint64_t seed)
{
    memset(&sim, 0, sizeof sim);
    sim.random = (seed + 1) * UINT64_C(0x9e3779b97f4a7c15) | 1;
    sim.now_ns = 1000 * MS;
    sim.k = k;
    sim.nodes = calloc(k, sizeof *sim.nodes);
    sim.peers = calloc(k, sizeof *sim.peers);
    sim.peer_pointers = calloc(k, sizeof *sim.peer_pointers);
    COX_ASSERT(sim.nodes && sim.peers && sim.peer_pointers);
    cox_lead_events_init(&sim.events);
    for (uint32_t i = 0; i < k; i++) {
        struct node *node = &sim.nodes[i];
        snprintf(node->name, sizeof node->name, "node-%03u", i);
        cox_lead_link_init(&node->lead, node->name, 0, 1, 1, 4);
        snprintf(node->lead.address, sizeof node->lead.address, "192.168.100.%u:45678", i % 200);
        node->lead.index = i;
        node->lead.times = &times;
        node->lead.epoch = 7;
        node->lead.send = on_lead_send;
        node->lead.events = &sim.events;
        cox_lead_link_want(&node->lead, 0, 1);
        cox_agent_link_init(&node->agent, 1);
        agent_restart(node);
        connect_at(i, sim.now_ns + random_next() % RECONNECT_JITTER_NS);
        event_put((struct event){
            .at_ns = sim.now_ns + random_next() % AGENT_TICK_NS, .kind = AGENT_TICK, .node = i});
    }
    sim.lead_connected = true;
    event_put((struct event){.at_ns = sim.now_ns, .kind = LEAD_TICK});
}

static void end(void)
{
    for (size_t i = 0; i < sim.count; i++)
        free(sim.heap[i].bytes);
    for (uint32_t i = 0; i < sim.k; i++) {
        cox_lead_link_deinit(&sim.nodes[i].lead);
        cox_agent_link_deinit(&sim.nodes[i].agent);
    }
    struct cox_lead_event *event;
    while ((event = cox_lead_events_take(&sim.events)))
        cox_lead_event_free(event);
    free(sim.heap);
    free(sim.nodes);
    free(sim.peers);
    free(sim.peer_pointers);
}

struct counts {
    uint64_t messages, bytes, out_bytes, busy_ns;
    uint64_t work, work_bytes, work_busy_ns;
};

static struct counts counts_now(void)
{
    return (struct counts){sim.lead_out + sim.lead_in,
                           sim.lead_out_bytes + sim.lead_in_bytes,
                           sim.lead_out_bytes,
                           sim.server_busy_ns,
                           sim.work,
                           sim.work_bytes,
                           sim.work_busy_ns};
}

static double in_ms(uint64_t ns)
{
    return ns == UINT64_MAX ? -1 : (double)ns / (double)MS;
}

static double death(uint32_t i, bool server_says)
{
    struct node *node = &sim.nodes[i];
    run_until(sim.now_ns + 200 * MS + random_next() % (100 * MS));
    const uint64_t begun_ns = sim.now_ns;
    sim.dead_at_ns = 0;
    node->runs = node->connected = false;
    if (server_says) /* the kernel resets the connection, the server publishes it, the lead hears */
        event_put((struct event){.at_ns = queue(&sim.server_ns, server_message_ns) + 3 * WIRE_NS +
                                          sender_message_ns,
                                 .kind = SERVER_SAYS_GONE,
                                 .node = i});
    while (!sim.dead_at_ns && sim.now_ns - begun_ns < 3000 * MS)
        run_until(sim.now_ns + 100 * US);
    const double took_ms = in_ms(sim.dead_at_ns - begun_ns);
    agent_restart(node);
    connect_at(i, sim.now_ns + RECONNECT_NS);
    await_all_up(20000 * MS);
    return took_ms;
}

static struct result simulate(uint32_t k, uint64_t seed)
{
    struct result result = {.k = k};
    uint64_t steps[STEP_COUNT];
    begin(k, seed);
    result.start_ms = in_ms(await_all_up(60000 * MS));
    struct counts now = counts_now(), last;
    result.start_messages = (double)now.messages;
    result.start_bytes = (double)now.bytes;
    run_until(sim.now_ns + 1000 * MS);
    /* idle */
    last = counts_now();
    run_until(sim.now_ns + 4000 * MS);
    now = counts_now();
    result.idle_messages = (double)(now.messages - last.messages) / 4;
    result.idle_bytes = (double)(now.bytes - last.bytes) / 4;
    result.idle_out_bytes = (double)(now.out_bytes - last.out_bytes) / 4;
    result.idle_load = (double)(now.busy_ns - last.busy_ns) / 4e9;
    /* steps, back to back; beats go on beside them */
    last = counts_now();
    for (int i = 0; i < STEP_COUNT; i++)
        steps[i] = step(5000 * MS);
    now = counts_now();
    qsort(steps, STEP_COUNT, sizeof steps[0], by_value);
    result.step_p50_us = (double)steps[STEP_COUNT / 2] / 1000;
    result.step_p99_us = (double)steps[STEP_COUNT - 1] / 1000;
    result.step_messages = (double)(now.work - last.work) / STEP_COUNT;
    result.step_bytes = (double)(now.work_bytes - last.work_bytes) / STEP_COUNT;
    result.step_server_us = (double)(now.work_busy_ns - last.work_busy_ns) / 1000 / STEP_COUNT;
    /* One each 10 ms, or one after the other where they take longer: with the beats that are left.
     */
    last = counts_now();
    for (int i = 0; i < PACED_COUNT; i++) {
        const uint64_t next_ns = sim.now_ns + 10 * MS;
        step(5000 * MS);
        if (sim.now_ns < next_ns)
            run_until(next_ns);
    }
    now = counts_now();
    result.load_100 = (double)(now.busy_ns - last.busy_ns) / PACED_COUNT * 100 / 1e9;
    result.beats_100 =
        (double)((now.messages - now.work) - (last.messages - last.work)) / PACED_COUNT * 100;
    /* a node dies */
    for (uint32_t i = 0; i < DEATH_COUNT; i++) {
        const double silence_ms = death((uint32_t)random_next() % k, false);
        result.dead_silence_ms += silence_ms / DEATH_COUNT;
        if (silence_ms > result.dead_silence_max_ms)
            result.dead_silence_max_ms = silence_ms;
        result.dead_server_ms += death((uint32_t)random_next() % k, true) / DEATH_COUNT;
    }
    /* the server is started anew: all connect again, the lead with them */
    sim.deaths = 0;
    for (uint32_t i = 0; i < k; i++)
        connect_at(i, sim.now_ns + RECONNECT_NS + random_next() % RECONNECT_JITTER_NS);
    const uint64_t restarted_ns = sim.now_ns;
    sim.server_ns = sim.now_ns;
    for (bool back = false; !back && sim.now_ns - restarted_ns < 60000 * MS;) {
        run_until(sim.now_ns + MS);
        back = all_up();
        for (uint32_t i = 0; i < k && back; i++)
            back =
                sim.nodes[i].connected && sim.nodes[i].lead.heard_ns > restarted_ns + RECONNECT_NS;
    }
    result.server_restart_ms = in_ms(sim.now_ns - restarted_ns);
    result.server_restart_deaths = (double)sim.deaths;
    end();
    return result;
}

int main(int argc, char **argv)
{
    static const uint32_t standard[] = {2, 8, 32, 128, 512};
    uint32_t counts[32], count = 0;
    uint64_t seed = 1;
    for (int i = 1; i < argc; i++) {
        const uint64_t value = strtoull(argv[i + (i + 1 < argc && argv[i][0] == '-')], NULL, 10);
        if (!strcmp(argv[i], "--seed"))
            seed = value;
        else if (!strcmp(argv[i], "--server-us"))
            server_message_ns = value * US;
        else if (!strcmp(argv[i], "--sender-us"))
            sender_message_ns = value * US;
        else if (!strcmp(argv[i], "--peer-bytes"))
            peers_in_beats = value != 0;
        else if (value > 0 && count < 32)
            counts[count++] = (uint32_t)value;
        i += argv[i][0] == '-';
    }
    for (uint32_t i = 0; count == 0 && i < sizeof standard / sizeof standard[0]; i++)
        counts[i] = standard[i];
    count = count ? count : sizeof standard / sizeof standard[0];
    printf(
        "cost of a message: %" PRIu64 " us at the lead, %" PRIu64 " us at the server; seed %" PRIu64
        "\n\n| K | step: messages | KB | p50 us | max us | server us | idle: messages/s | KB/s | "
        "of it by "
        "the lead | server load | load at 100 steps/s | beats/s there | dead, "
        "server's word ms | by silence ms (max) | start ms | messages | MB | server restart ms | "
        "deaths |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n",
        sender_message_ns / US, server_message_ns / US, seed);
    for (uint32_t i = 0; i < count; i++) {
        const struct result result = simulate(counts[i], seed), *r = &result;
        printf("| %u | %.0f | %.1f | %.0f | %.0f | %.0f | %.0f | %.1f | %.1f | %.4f | %.3f | %.0f "
               "| %.2f | %.0f (%.0f) | %.0f | %.0f | %.2f | %.0f | %.0f |\n",
               r->k, r->step_messages, r->step_bytes / 1e3, r->step_p50_us, r->step_p99_us,
               r->step_server_us, r->idle_messages, r->idle_bytes / 1e3, r->idle_out_bytes / 1e3,
               r->idle_load, r->load_100, r->beats_100, r->dead_server_ms, r->dead_silence_ms,
               r->dead_silence_max_ms, r->start_ms, r->start_messages, r->start_bytes / 1e6,
               r->server_restart_ms, r->server_restart_deaths);
        fflush(stdout);
    }
    /* A step is one message of the lead and an answer of each node: the server takes the request in
     * once, copies it to each, and passes on the answers. Bytes and beats come on top. */
    const double step_ns = 10.0 * (double)MS, receiver = step_ns / (double)sender_message_ns;
    const double server =
        (step_ns - (double)server_message_ns / 2) / (1.5 * (double)server_message_ns);
    printf(
        "\nAt 100 steps/s the lead's receiver is the limit from K = %.0f on, the server (one core) "
        "from K = %.0f on.\n",
        receiver, server);
    return 0;
}
