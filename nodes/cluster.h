/*
 * cluster: the connection of one process to NATS, with the subjects of one group.
 *
 *   cox.GROUP.to.NODE     lead -> node
 *   cox.GROUP.all         lead -> each node: the server makes the copies
 *   cox.GROUP.from.NODE   node -> lead
 *
 * NATS authenticates by certificate, says who may use which subject, and connects again by itself. What
 * is set here: pings of 100 ms, two of which may be missing; nothing is kept while there is no
 * connection (what is sent then is lost, and the protocol of lead_link.h sends it again); 50 ms between
 * attempts. What the server must have is checked when the cluster is opened, and told in the log of
 * each server that takes the place of another.
 *
 * Threads: send on any. It writes to the connection itself, since a step would wait for another thread
 *   to wake; where it might block, since the connection may be lost, a thread of this object does. Hooks
 *   are called on threads of libnats, on_frame on one.
 * Ownership: options are copied. send takes the bytes; those of on_frame are lent.
 * Blocks: open until connected, or for timeout_ms; close until the threads have ended; nothing else.
 * If the process dies: the server closes the connection, and tells the lead.
 */
#ifndef COX_NODES_CLUSTER_H
#define COX_NODES_CLUSTER_H

#include "nodes/link/nodes_common.h"

struct cox_cluster;

struct cox_cluster_options {
    struct cox_cluster_access access;
    const char *group;
    /* NULL: this is the lead */
    const char *node;
    uint64_t timeout_ms;
    struct cox_log log;
    /* Asked while there is no connection yet; true ends open. NULL: nobody is. */
    bool (*cancelled)(void *cancel_context);
    void *cancel_context;
    void *context;
    /* A frame has come; the lead: from this node. */
    void (*on_frame)(void *context, const char *node, const uint8_t *bytes, size_t size);
    /* The lead: a connection has ended, as the server says. NULL: not told. */
    void (*on_gone)(void *context, const char *server_id, uint64_t client_id, const char *reason);
    /* The connection is there, or not any more. */
    void (*on_connection)(void *context, bool connected, const char *text);
};

/* Connects, checks the server and subscribes.
 * Returns
 *   0
 *   COX_INVALID: the options, or a certificate
 *   COX_DENIED: the server refuses the certificate, or the subjects
 *   COX_TIMEOUT: no server answers; err says what became of each
 *   COX_CLOSED: cancelled
 *   COX_UNSUPPORTED: the server is configured otherwise; err says what, and what it should be
 */
int cox_cluster_open(const struct cox_cluster_options *options, struct cox_cluster **ret_cluster,
                     struct cox_error *err);
/* NULL-safe, returns NULL. Not on a thread of libnats. */
struct cox_cluster *cox_cluster_close(struct cox_cluster *cluster);

/* Sends a frame to a node, or with NULL to the lead; the lead: with NULL to all nodes. Takes bytes (free). Nothing may call it when the
 * cluster is closed. */
void cox_cluster_send(struct cox_cluster *cluster, const char *node, uint8_t *bytes, size_t size);
/* Waits until what was given to send is with the server, or deadline_ns. */
void cox_cluster_flush(struct cox_cluster *cluster, uint64_t deadline_ns);
/* The present connection, as the server names it. Returns false if there is none. */
bool cox_cluster_identity(struct cox_cluster *cluster, char server_id[64], uint64_t *ret_client_id);
#define COX_CLUSTER_HOST_SIZE 128
#define COX_CLUSTER_LISTEN_SIZE (COX_CLUSTER_HOST_SIZE + 32)
/* Where direct connections are listened for: as wanted, "HOST:PORT" (cox_direct_open checks it); NULL: the
 * address of this machine from which the cluster is reached, any port. host: that which others use. */
void cox_cluster_listen_address(struct cox_cluster *cluster, const char *wanted,
                                char host[COX_CLUSTER_HOST_SIZE],
                                char listen[COX_CLUSTER_LISTEN_SIZE]);
/* The largest frame that NATS takes; larger ones go by direct connections. */
size_t cox_cluster_size_max(const struct cox_cluster *cluster);

#endif
