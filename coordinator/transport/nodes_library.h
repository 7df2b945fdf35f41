/*
 * nodes_library: what libcoxswain-nodes.so gives to the program that opens it. Private to Coxswain:
 * both sides are of one release, which is checked.
 *
 * Threads: open, close and agent_run on one thread each. The transport's functions: transport.h.
 * Ownership: options are copied, unless they say otherwise.
 * Blocks: open until every node has said hello, or the timeout; agent_run until the agent ends.
 */
#ifndef COX_COORDINATOR_NODES_LIBRARY_H
#define COX_COORDINATOR_NODES_LIBRARY_H

#include "channel/shm/geometry.h"
#include "nodes.h"
#include "transport.h"

struct cox_nodes;

/* The lead's side. */
struct cox_nodes_options {
    const struct cox_executor_nodes *nodes;
    const char *group;
    /* of the group; agents start their ranks with them */
    uint32_t depth;
    uint64_t request_size[COX_CHANNEL_COUNT], response_size[COX_CHANNEL_COUNT];
    bool no_recorder;
    /* 0: 60,000 */
    uint64_t start_timeout_ms;
    struct cox_log log;
    void *context;
    /* Asked every 10 ms in open; true ends it with COX_CLOSED. NULL: never. */
    bool (*cancelled)(void *context);
    /* The ranks of nodes that open waits for, at each change. NULL: not called. */
    void (*missing)(void *context, const struct cox_rank_set *missing);
};

/* An agent. What it points to is borrowed until agent_run returns. */
struct cox_node_agent_options {
    struct cox_cluster_access access;
    const char *group;
    const char *node;
    /* as in struct cox_executor_nodes */
    const char *listen;
    const struct cox_node_fact *facts;
    size_t fact_count;
    /* argv of every worker */
    const char *const *command;
    /* when the group has ended, or its lead is lost for good: waits for another lead */
    bool stay;
    /* replaces `model` in the configuration of an init: its folder on this machine; NULL: it stays
     * */
    const char *model;
    /* as in struct cox_executor_options */
    const char *crash_dir;
    struct cox_log log;
    void *context;
    /* A line that a rank of this machine wrote. */
    void (*line)(void *context, uint32_t rank, bool is_stderr, const char *text);
    /* The agent listens to the cluster; later: follows a lead, has lost it, and so on. */
    void (*state)(void *context, const char *text);
    /* Asked every 50 ms; true ends the agent. */
    bool (*cancelled)(void *context);
};

/* The one exported object of the library, cox_nodes_library. */
#define COX_NODES_LIBRARY_VERSION 1
struct cox_nodes_library {
    uint32_t version;
    /* of Coxswain; a program opens that of its own release only */
    const char *release;
    /* Connects, and waits until every node has said hello and agrees with the facts.
     * Returns
     *   0
     *   COX_INVALID: options, or a node has another value; err names node and value
     *   COX_TAKEN: a node follows another lead, which lives
     *   COX_DENIED: the cluster refuses the certificate
     *   COX_UNSUPPORTED: the NATS server is configured otherwise
     *   COX_TIMEOUT: no server, or a node has not come; err names it
     *   COX_CLOSED: cancelled
     */
    int (*open)(const struct cox_nodes_options *options, struct cox_nodes **ret_nodes,
                struct cox_error *err);
    /* Lent until close. */
    const struct cox_transport *(*transport)(struct cox_nodes *nodes);
    /* After the executor's last use of the transport. NULL-safe, returns NULL. */
    struct cox_nodes *(*close)(struct cox_nodes *nodes);
    /* Waits for a lead, and serves it until the group ends.
     * Returns
     *   0: the group has ended, or cancelled was true
     *   COX_PEER_DEAD: the group failed; or the lead was lost, and no other came in time
     *   COX_TAKEN: another agent is this node
     *   COX_INVALID: the lead refuses this node, in words
     *   as open
     */
    int (*agent_run)(const struct cox_node_agent_options *options, struct cox_error *err);
};

/* Opens libcoxswain-nodes.so.0, once: beside this program (../lib), beside this library, or where
 * the dynamic linker looks. Returns 0; COX_UNSUPPORTED: it, or what it needs, is not installed, or
 * it is of another release; err says which package has it. */
int cox_nodes_library_open(const struct cox_nodes_library **ret_library, struct cox_error *err);

#endif
