/*
 * nodes: a group over several machines, for options.nodes of the executor (executor.h).
 *
 * The coordinator of such a group is its lead. On each machine an agent (`coxswain node`) starts
 * and serves the ranks of that machine. They meet at a NATS server, with certificates; large
 * payloads and the sums of the ranks go by direct connections. libcoxswain-nodes.so has all that;
 * the executor opens it when options.nodes is set, and no other group needs it.
 *
 * Threads, ownership, blocking: as options of the executor; start waits until every node has come.
 */
#ifndef COX_COORDINATOR_NODES_H
#define COX_COORDINATOR_NODES_H

#include <coxswain/base.h>

#ifdef __cplusplus
extern "C" {
#endif

#define COX_NODE_NAME_MAX 47
/* Nodes of a group, at most. */
#define COX_NODE_COUNT_MAX 64

/* How a process reaches the cluster, and shows who it is. */
struct cox_cluster_access {
    /* "tls://HOST:PORT", several with commas */
    const char *url;
    /* PEM files: the CA, the certificate (CN "lead", or "node-NAME"), its key */
    const char *ca, *certificate, *key;
    /* Without TLS and certificates, for trying things on one machine: all addresses must be
     * loopback. */
    bool insecure_loopback;
};

/* Times, in milliseconds; 0: the default. */
struct cox_node_times {
    /* beats, both ways, where nothing else was sent; default 100 */
    uint64_t beat_ms;
    /* silence after which a node is suspect: it gets no requests; default 300 */
    uint64_t suspect_ms;
    /* silence after which it is dead; default 800 */
    uint64_t dead_ms;
    /* a request that was not acknowledged is asked again; default 150 */
    uint64_t again_ms;
    /* how long agents wait for another lead; default 30,000 */
    uint64_t lead_grace_ms;
};

/* A value that must be the same on the lead and on every node: a difference is refused at the
 * start, in words. value NULL: the lead has none, and nodes are compared with each other. */
struct cox_node_fact {
    const char *name;
    const char *value;
};

struct cox_executor_nodes {
    /* set by COX_EXECUTOR_NODES_INIT (base.h) */
    size_t size;
    /* required: "a:4,b:4": ranks 0 to 3 are on node a, 4 to 7 on b */
    const char *nodes;
    struct cox_cluster_access access;
    /* "HOST:PORT" where nodes connect; NULL: the address from which the cluster is reached, any
     * port */
    const char *listen;
    struct cox_node_times times;
    const struct cox_node_fact *facts;
    size_t fact_count;
    /* the ranks' memory on their nodes is attached so; default named */
    enum cox_attach attach;
    /* Ranks that run for an earlier lead are not taken over: they end, and others are started.
     * Default false: they go on, with what they have loaded. */
    bool fresh;
};
#define COX_EXECUTOR_NODES_INIT COX_OPTIONS_INIT(struct cox_executor_nodes)

/* One node of a list as in nodes. */
struct cox_node_place {
    char name[COX_NODE_NAME_MAX + 1];
    uint32_t rank_first, rank_count;
};

/* Reads "a:4,b:4". ret_places has room for COX_NODE_COUNT_MAX; NULL: only checks.
 * Returns 0 or COX_INVALID. */
COX_PUBLIC int cox_nodes_parse(const char *nodes, struct cox_node_place *ret_places,
                               uint32_t *ret_node_count, uint32_t *ret_rank_count,
                               struct cox_error *err);
#ifdef COX_INTERNAL
/* Names of nodes, and of groups over several machines, are parts of NATS subjects: letters, digits,
 * '-' and '_'. what: "node" or "group". Returns 0 or COX_INVALID. */
int cox_node_name_check(const char *what, const char *name, struct cox_error *err);
#endif

#ifdef __cplusplus
}
#endif

#endif
