/* nodes-bench-zmq: ZeroMQ, a ROUTER of the lead and a DEALER of each node, with CURVE. The lead
 * accepts the nodes' keys alone: its main thread answers ZAP requests until all nodes are there.
 * `nodes-bench-zmq keys DIR NODES` writes the keys: NAME-zmq.secret and NAME-zmq.public. */
#include "peer.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zmq.h>

#define KEY_TEXT_SIZE 41
#define KEY_SIZE 32
#define ZAP_FRAMES 7
#define ZAP_FRAME_MAX 256
/* The parts of a ZAP request. */
enum { ZAP_VERSION, ZAP_ID, ZAP_DOMAIN, ZAP_ADDRESS, ZAP_ROUTING_ID, ZAP_MECHANISM, ZAP_KEY };

struct lead {
    struct peer_options options;
    /* owned */
    void *context, *zap, *router;
    /* of the nodes, as the handshake has them */
    uint8_t keys[PEER_NODES_MAX][KEY_SIZE];
};

static int zmq_fail(const char *what)
{
    return peer_fail(what, zmq_strerror(errno));
}

/* ---- keys ---- */

static int write_key(const char *folder, const char *name, const char *end, const char *key)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s-zmq.%s", folder, name, end);
    FILE *file = fopen(path, "we");
    if (!file)
        return peer_fail_errno(path, errno);
    fprintf(file, "%s\n", key);
    return fclose(file) == 0 ? 0 : peer_fail_errno(path, errno);
}

static int write_keys(const char *folder, const char *name)
{
    char public_key[KEY_TEXT_SIZE], secret_key[KEY_TEXT_SIZE];
    if (zmq_curve_keypair(public_key, secret_key) < 0)
        return zmq_fail("a pair of keys");
    int r = write_key(folder, name, "public", public_key);
    return r ? r : write_key(folder, name, "secret", secret_key);
}

static int keys_main(const char *folder, unsigned long count)
{
    int r = write_keys(folder, "lead");
    for (unsigned long i = 0; r == 0 && i < count; i++) {
        char name[32];
        snprintf(name, sizeof name, "node-%lu", i);
        r = write_keys(folder, name);
    }
    return r ? 1 : 0;
}

static int read_key(const struct peer_options *options, bool lead, const char *end, char *ret_key)
{
    char path[512];
    peer_path(options, lead, end, path, sizeof path);
    FILE *file = fopen(path, "re");
    bool read = file && fread(ret_key, 1, KEY_TEXT_SIZE - 1, file) == KEY_TEXT_SIZE - 1;
    ret_key[KEY_TEXT_SIZE - 1] = '\0';
    if (file)
        fclose(file);
    return read ? 0 : peer_fail(path, "no key");
}

/* Of this process. */
static int set_keys(void *socket, const struct peer_options *options, bool lead)
{
    char public_key[KEY_TEXT_SIZE], secret_key[KEY_TEXT_SIZE];
    int r = read_key(options, lead, "-zmq.public", public_key);
    if (r == 0)
        r = read_key(options, lead, "-zmq.secret", secret_key);
    if (r)
        return r;
    if (zmq_setsockopt(socket, ZMQ_CURVE_PUBLICKEY, public_key, KEY_TEXT_SIZE) < 0 ||
        zmq_setsockopt(socket, ZMQ_CURVE_SECRETKEY, secret_key, KEY_TEXT_SIZE) < 0)
        return zmq_fail("keys");
    return 0;
}

/* ---- the lead ---- */

static int read_node_keys(struct lead *lead)
{
    for (uint32_t i = 0; i < lead->options.node_count; i++) {
        struct peer_options node = lead->options;
        char key[KEY_TEXT_SIZE];
        node.index = i;
        int r = read_key(&node, false, "-zmq.public", key);
        if (r)
            return r;
        if (!zmq_z85_decode(lead->keys[i], key))
            return zmq_fail(key);
    }
    return 0;
}

/* Answers whether a client's key is a node's (rfc.zeromq.org/spec/27). */
static int authenticate(struct lead *lead)
{
    char frames[ZAP_FRAMES][ZAP_FRAME_MAX];
    int sizes[ZAP_FRAMES];
    bool known = false;
    for (int i = 0; i < ZAP_FRAMES; i++)
        if ((sizes[i] = zmq_recv(lead->zap, frames[i], ZAP_FRAME_MAX, 0)) < 0)
            return zmq_fail("ZAP");
    for (uint32_t i = 0; sizes[ZAP_KEY] == KEY_SIZE && i < lead->options.node_count; i++)
        known = known || memcmp(frames[ZAP_KEY], lead->keys[i], KEY_SIZE) == 0;
    const char *const answer[] = {known ? "200" : "400", known ? "OK" : "unknown key", "", ""};
    if (zmq_send(lead->zap, frames[ZAP_VERSION], (size_t)sizes[ZAP_VERSION], ZMQ_SNDMORE) < 0 ||
        zmq_send(lead->zap, frames[ZAP_ID], (size_t)sizes[ZAP_ID], ZMQ_SNDMORE) < 0)
        return zmq_fail("ZAP");
    for (size_t i = 0; i < 4; i++)
        if (zmq_send(lead->zap, answer[i], strlen(answer[i]), i < 3 ? ZMQ_SNDMORE : 0) < 0)
            return zmq_fail("ZAP");
    return 0;
}

/* An empty message of each node, behind its routing id. */
static int await_nodes(struct lead *lead)
{
    for (uint32_t met = 0; met < lead->options.node_count;) {
        zmq_pollitem_t items[] = {{.socket = lead->zap, .events = ZMQ_POLLIN},
                                  {.socket = lead->router, .events = ZMQ_POLLIN}};
        uint32_t index;
        if (zmq_poll(items, 2, -1) < 0)
            return zmq_fail("waiting for nodes");
        int r = items[0].revents ? authenticate(lead) : 0;
        if (r)
            return r;
        if (!items[1].revents)
            continue;
        if (zmq_recv(lead->router, &index, sizeof index, 0) != sizeof index ||
            zmq_recv(lead->router, NULL, 0, 0) != 0)
            return peer_fail("a node", "no hello");
        met++;
    }
    return 0;
}

static int open_lead(struct lead *lead)
{
    const int on = 1, off = 0;
    char endpoint[64];
    snprintf(endpoint, sizeof endpoint, "tcp://%s:%d", lead->options.lead, PEER_PORT);
    lead->context = zmq_ctx_new();
    lead->zap = lead->context ? zmq_socket(lead->context, ZMQ_REP) : NULL;
    lead->router = lead->zap ? zmq_socket(lead->context, ZMQ_ROUTER) : NULL;
    if (!lead->router || zmq_bind(lead->zap, "inproc://zeromq.zap.01") < 0)
        return zmq_fail("sockets");
    int r = set_keys(lead->router, &lead->options, true);
    if (r)
        return r;
    /* Without a domain ZAP is not asked. */
    if (zmq_setsockopt(lead->router, ZMQ_ZAP_DOMAIN, "nodes", 5) < 0 ||
        zmq_setsockopt(lead->router, ZMQ_CURVE_SERVER, &on, sizeof on) < 0 ||
        zmq_setsockopt(lead->router, ZMQ_ROUTER_MANDATORY, &on, sizeof on) < 0 ||
        zmq_setsockopt(lead->router, ZMQ_LINGER, &off, sizeof off) < 0 ||
        zmq_bind(lead->router, endpoint) < 0)
        return zmq_fail(endpoint);
    return 0;
}

static void lead_stop(void *peer)
{
    struct lead *lead = peer;
    if (lead->router)
        zmq_close(lead->router);
    if (lead->zap)
        zmq_close(lead->zap);
    if (lead->context)
        zmq_ctx_term(lead->context);
    free(lead);
}

static int lead_start(const struct peer_options *options, void **ret_lead)
{
    struct lead *lead = calloc(1, sizeof *lead);
    if (!lead)
        return peer_fail_errno("the lead", ENOMEM);
    lead->options = *options;
    int r = read_node_keys(lead);
    if (r == 0)
        r = open_lead(lead);
    if (r == 0)
        r = await_nodes(lead);
    if (r) {
        lead_stop(lead);
        return r;
    }
    *ret_lead = lead;
    return 0;
}

static int lead_step(void *peer, const uint8_t *request, struct peer_replies *replies)
{
    struct lead *lead = peer;
    for (uint32_t i = 0; i < lead->options.node_count; i++)
        if (zmq_send(lead->router, &i, sizeof i, ZMQ_SNDMORE) < 0 ||
            zmq_send(lead->router, request, lead->options.request_size, 0) < 0)
            return -errno;
    zmq_msg_t message;
    zmq_msg_init(&message);
    int r = 0;
    while (r == 0 && replies->left > 0) {
        uint32_t index;
        if (zmq_recv(lead->router, &index, sizeof index, 0) < 0 ||
            zmq_msg_recv(&message, lead->router, 0) < 0)
            r = -errno;
        else
            r = peer_replies_take(replies, zmq_msg_data(&message), zmq_msg_size(&message));
    }
    zmq_msg_close(&message);
    return r;
}

/* ---- a node ---- */

static int open_node(const struct peer_options *options, void *dealer)
{
    char endpoint[64], lead_key[KEY_TEXT_SIZE];
    const int off = 0, retry_ms = 5;
    snprintf(endpoint, sizeof endpoint, "tcp://%s:%d", options->lead, PEER_PORT);
    int r = set_keys(dealer, options, false);
    if (r == 0)
        r = read_key(options, true, "-zmq.public", lead_key);
    if (r)
        return r;
    if (zmq_setsockopt(dealer, ZMQ_CURVE_SERVERKEY, lead_key, sizeof lead_key) < 0 ||
        zmq_setsockopt(dealer, ZMQ_ROUTING_ID, &options->index, sizeof options->index) < 0 ||
        zmq_setsockopt(dealer, ZMQ_RECONNECT_IVL, &retry_ms, sizeof retry_ms) < 0 ||
        zmq_setsockopt(dealer, ZMQ_LINGER, &off, sizeof off) < 0 ||
        zmq_connect(dealer, endpoint) < 0 || zmq_send(dealer, NULL, 0, 0) < 0)
        return zmq_fail(endpoint);
    return 0;
}

static int serve(const struct peer_options *options, void *dealer)
{
    zmq_msg_t request, reply;
    zmq_msg_init(&request);
    for (;;) {
        if (zmq_msg_recv(&request, dealer, 0) < 0 ||
            zmq_msg_init_size(&reply, options->reply_size) < 0)
            return zmq_fail("serving");
        if (!peer_reply(options, zmq_msg_data(&request), zmq_msg_size(&request),
                        zmq_msg_data(&reply)))
            return peer_fail("a request", "malformed");
        if (zmq_msg_send(&reply, dealer, 0) < 0)
            return zmq_fail("serving");
    }
}

static int node_main(const struct peer_options *options)
{
    void *context = zmq_ctx_new();
    void *dealer = context ? zmq_socket(context, ZMQ_DEALER) : NULL;
    int r = dealer ? open_node(options, dealer) : zmq_fail("a socket");
    if (r == 0)
        r = serve(options, dealer);
    if (dealer)
        zmq_close(dealer);
    if (context)
        zmq_ctx_term(context);
    return r;
}

int main(int argc, char **argv)
{
    static const struct peer_ops ops = {.transport = "zmq",
                                        .start = lead_start,
                                        .step = lead_step,
                                        .stop = lead_stop,
                                        .node = node_main};
    if (argc == 4 && strcmp(argv[1], "keys") == 0)
        return keys_main(argv[2], strtoul(argv[3], NULL, 10));
    return peer_main(argc, argv, &ops);
}
