/*
 * peer: one transport of `make bench-nodes`, in two roles. The lead sends a request to every node
 * and takes a reply from each: a step. Each process runs in a network namespace (run.sh).
 *
 * Called as    PROGRAM lead|node OPTION...    with the options of peer.c; the lead prints one line
 * of JSON on stdout and ends, a node runs until it is killed or loses the lead.
 *
 * The main thread calls everything here; a transport's own threads call peer_reply and peer_now_ns
 * alone. The caller owns every buffer. Nothing blocks but the calls of struct peer_ops. If a
 * process dies: sockets are left to the kernel, and no names; the driver kills the others.
 */
#ifndef NODES_BENCH_PEER_H
#define NODES_BENCH_PEER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define PEER_NODES_MAX 32
/* A step's number, then the node's index. */
#define PEER_HEADER_SIZE 16
/* Ports of a lead, a node or a NATS server, each in a namespace of its own. */
#define PEER_PORT 7400

#ifdef __cplusplus
extern "C" {
#endif

struct peer_options {
    /* Addresses; a node's place is its index. */
    const char *lead, *server, *nodes[PEER_NODES_MAX];
    uint32_t node_count;
    /* of a node */
    uint32_t index;
    /* As coxswain-certificates makes it, for nodes that are named 0, 1, 2... */
    const char *folder;
    /* "" or a word of the transport's own */
    const char *variant;
    size_t request_size, reply_size;
    /* Bulk: so many bytes are acknowledged, sent in calls of chunk_size. */
    size_t bulk_size, chunk_size;
    bool bulk;
    /* Bulk that is a pull of KV blocks, where the transport has that: from node 1 to node 0. */
    bool pull;
};

/* The replies of one step. */
struct peer_replies {
    const struct peer_options *options;
    uint64_t step;
    uint32_t left;
    bool arrived[PEER_NODES_MAX];
};

struct peer_ops {
    const char *transport;
    /* Returns once all nodes are connected. Returns 0, or an error of errno, reported already. */
    int (*start)(const struct peer_options *options, void **ret_lead);
    /* Sends the request to every node; returns 0 once `replies` has one of each. NULL: no steps. */
    int (*step)(void *lead, const uint8_t *request, struct peer_replies *replies);
    /* Sends bulk_size bytes to node 0; returns 0 once it acknowledged them. NULL: no bulk. */
    int (*bulk)(void *lead, const uint8_t *chunk);
    /* Processes of nodes that the driver does not know, for their CPU time; returns how many. NULL:
     * none. */
    uint32_t (*processes)(void *lead, pid_t ret_pids[PEER_NODES_MAX]);
    /* What a request of a transport that makes its own has had on average. NULL: as the options. */
    size_t (*request_size)(void *lead);
    void (*stop)(void *lead);
    /* Serves requests or, where options->bulk is set, bulk. Returns 0 when the lead is gone. */
    int (*node)(const struct peer_options *options);
};

/* Returns the exit status. */
int peer_main(int argc, char **argv, const struct peer_ops *ops);

/* Writes a reply of options->reply_size bytes to a request. Returns false if it is malformed. */
bool peer_reply(const struct peer_options *options, const void *request, size_t size,
                uint8_t *ret_reply);
/* Returns 0, or -EBADMSG for a reply of another size, step or node, or a second one. */
int peer_replies_take(struct peer_replies *replies, const void *reply, size_t size);

/* Prints what failed and why on stderr. Returns -EIO. */
int peer_fail(const char *what, const char *why);
/* Prints what failed and the text of `error`, of errno's kind. Returns -error. */
int peer_fail_errno(const char *what, int error);
/* FOLDER/lead or FOLDER/node-INDEX, followed by `end`. */
void peer_path(const struct peer_options *options, bool lead, const char *end, char *ret_path,
               size_t size);

#ifdef __cplusplus
}
#endif

#endif
