/* nodes-bench-nats: one nats-server between the lead and the nodes, mTLS on both sides. The server
 * is configured by coxswain-certificates: certificates are users, each of which has its subjects.
 *
 * The lead publishes one message per node, by default from its own thread (SendAsap); variant
 * `flusher` leaves the sending to the library's thread, which waits a millisecond for more.
 * It blocks in natsSubscription_NextMsg; nodes reply in their message callback. */
#include "peer.h"

#include <errno.h>
#include <inttypes.h>
#include <nats/nats.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define REPLY_PATIENCE_MS 10000
#define CONNECT_PATIENCE_MS 10000
#define RETRY_MS 10
#define SUBJECT_SIZE 32
#define FLUSHER "flusher"

struct lead {
    struct peer_options options;
    /* owned */
    natsConnection *connection;
    natsSubscription *replies;
    char subjects[PEER_NODES_MAX][SUBJECT_SIZE];
};

struct node {
    struct peer_options options;
    char subject[SUBJECT_SIZE];
    /* owned */
    uint8_t *reply;
    /* The hello was answered; then, the connection was closed. */
    sem_t event;
};

static int nats_fail(const char *what, natsStatus status)
{
    return peer_fail(what, natsStatus_GetText(status));
}

static natsStatus set_options(natsOptions *nats, const struct peer_options *options, bool lead)
{
    char url[64], ca[512], certificate[512], key[512];
    snprintf(url, sizeof url, "tls://%s:4222", options->server);
    snprintf(ca, sizeof ca, "%s/ca.pem", options->folder);
    peer_path(options, lead, ".pem", certificate, sizeof certificate);
    peer_path(options, lead, "-key.pem", key, sizeof key);
    natsStatus s = natsOptions_SetURL(nats, url);
    if (s == NATS_OK)
        s = natsOptions_SetSecure(nats, true);
    if (s == NATS_OK)
        s = natsOptions_LoadCATrustedCertificates(nats, ca);
    if (s == NATS_OK)
        s = natsOptions_LoadCertificatesChain(nats, certificate, key);
    if (s == NATS_OK)
        s = natsOptions_SetExpectedHostname(nats, "coxswain-nats");
    if (s == NATS_OK)
        s = natsOptions_SetSendAsap(nats, strcmp(options->variant, FLUSHER) != 0);
    if (s == NATS_OK)
        s = natsOptions_SetAllowReconnect(nats, false);
    return s;
}

/* On a thread of the library. */
static void on_closed(natsConnection *connection, void *context)
{
    struct node *node = context;
    (void)connection;
    sem_post(&node->event);
}

/* Waits for the server; `node` is NULL in the lead. */
static natsStatus connect_server(const struct peer_options *options, struct node *node,
                                 natsConnection **ret_connection)
{
    const struct timespec pause = {.tv_nsec = RETRY_MS * 1000000L};
    natsOptions *nats = NULL;
    natsStatus s = natsOptions_Create(&nats);
    if (s == NATS_OK)
        s = set_options(nats, options, !node);
    if (s == NATS_OK && node)
        s = natsOptions_SetClosedCB(nats, on_closed, node);
    if (s == NATS_OK)
        s = natsConnection_Connect(ret_connection, nats);
    for (int ms = 0; s == NATS_NO_SERVER && ms < CONNECT_PATIENCE_MS; ms += RETRY_MS) {
        nanosleep(&pause, NULL);
        s = natsConnection_Connect(ret_connection, nats);
    }
    natsOptions_Destroy(nats);
    return s;
}

static void lead_stop(void *peer)
{
    struct lead *lead = peer;
    natsSubscription_Destroy(lead->replies);
    natsConnection_Destroy(lead->connection);
    free(lead);
}

/* Answers every node's hello with an empty request. */
static natsStatus await_nodes(struct lead *lead)
{
    bool met[PEER_NODES_MAX] = {false};
    natsStatus s = NATS_OK;
    for (uint32_t left = lead->options.node_count; s == NATS_OK && left > 0;) {
        uint32_t index = PEER_NODES_MAX;
        natsMsg *message;
        s = natsSubscription_NextMsg(&message, lead->replies, REPLY_PATIENCE_MS);
        if (s != NATS_OK)
            return s;
        if (natsMsg_GetDataLength(message) == sizeof index)
            memcpy(&index, natsMsg_GetData(message), sizeof index);
        natsMsg_Destroy(message);
        if (index >= lead->options.node_count || met[index])
            continue;
        met[index] = true;
        left--;
        s = natsConnection_Publish(lead->connection, lead->subjects[index], "", 0);
    }
    return s;
}

static int lead_start(const struct peer_options *options, void **ret_lead)
{
    struct lead *lead = calloc(1, sizeof *lead);
    if (!lead)
        return peer_fail_errno("the lead", ENOMEM);
    lead->options = *options;
    for (uint32_t i = 0; i < options->node_count; i++)
        snprintf(lead->subjects[i], SUBJECT_SIZE, "cox.bench.to.%" PRIu32, i);
    natsStatus s = connect_server(options, NULL, &lead->connection);
    if (s == NATS_OK)
        s = natsConnection_SubscribeSync(&lead->replies, lead->connection, "cox.bench.from.*");
    if (s == NATS_OK)
        s = await_nodes(lead);
    if (s != NATS_OK) {
        lead_stop(lead);
        return nats_fail("the lead", s);
    }
    *ret_lead = lead;
    return 0;
}

static int lead_step(void *peer, const uint8_t *request, struct peer_replies *replies)
{
    struct lead *lead = peer;
    for (uint32_t i = 0; i < lead->options.node_count; i++) {
        natsStatus s = natsConnection_Publish(lead->connection, lead->subjects[i], request,
                                              (int)lead->options.request_size);
        if (s != NATS_OK)
            return nats_fail("publishing", s);
    }
    while (replies->left > 0) {
        natsMsg *message;
        natsStatus s = natsSubscription_NextMsg(&message, lead->replies, REPLY_PATIENCE_MS);
        if (s != NATS_OK)
            return nats_fail("a reply", s);
        const size_t size = (size_t)natsMsg_GetDataLength(message);
        /* A hello may have been sent twice. */
        int r = size == sizeof(uint32_t)
                    ? 0
                    : peer_replies_take(replies, natsMsg_GetData(message), size);
        natsMsg_Destroy(message);
        if (r)
            return r;
    }
    return 0;
}

/* On the library's delivery thread. An empty request answers the hello. */
static void on_request(natsConnection *connection, natsSubscription *subscription, natsMsg *message,
                       void *context)
{
    struct node *node = context;
    const size_t size = (size_t)natsMsg_GetDataLength(message);
    (void)subscription;
    if (size == 0)
        sem_post(&node->event);
    else if (!peer_reply(&node->options, natsMsg_GetData(message), size, node->reply) ||
             natsConnection_Publish(connection, node->subject, node->reply,
                                    (int)node->options.reply_size) != NATS_OK)
        peer_fail("a request", "malformed, or its reply cannot be published");
    natsMsg_Destroy(message);
}

/* The lead may subscribe later than this node publishes its hello: it is sent until answered. */
static natsStatus greet(struct node *node, natsConnection *connection)
{
    struct timespec until;
    natsStatus s;
    clock_gettime(CLOCK_MONOTONIC, &until);
    do {
        s = natsConnection_Publish(connection, node->subject, &node->options.index,
                                   sizeof node->options.index);
        until.tv_nsec += RETRY_MS * 1000000L;
        until.tv_sec += until.tv_nsec / 1000000000L;
        until.tv_nsec %= 1000000000L;
    } while (s == NATS_OK && sem_clockwait(&node->event, CLOCK_MONOTONIC, &until) < 0);
    return s;
}

static int node_main(const struct peer_options *options)
{
    struct node node = {.options = *options, .reply = calloc(1, options->reply_size)};
    char requests[SUBJECT_SIZE];
    natsConnection *connection = NULL;
    natsSubscription *subscription = NULL;
    snprintf(requests, sizeof requests, "cox.bench.to.%" PRIu32, options->index);
    snprintf(node.subject, sizeof node.subject, "cox.bench.from.%" PRIu32, options->index);
    sem_init(&node.event, 0, 0);
    natsStatus s = node.reply ? connect_server(options, &node, &connection) : NATS_NO_MEMORY;
    if (s == NATS_OK)
        s = natsConnection_Subscribe(&subscription, connection, requests, on_request, &node);
    if (s == NATS_OK)
        s = greet(&node, connection);
    while (s == NATS_OK && sem_wait(&node.event) < 0)
        continue;
    natsSubscription_Destroy(subscription);
    natsConnection_Destroy(connection);
    nats_Close();
    sem_destroy(&node.event);
    free(node.reply);
    return s == NATS_OK ? 0 : nats_fail("the node", s);
}

int main(int argc, char **argv)
{
    static const struct peer_ops ops = {.transport = "nats",
                                        .start = lead_start,
                                        .step = lead_step,
                                        .stop = lead_stop,
                                        .node = node_main};
    return peer_main(argc, argv, &ops);
}
