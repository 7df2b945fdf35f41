/*
 * nodes: a group over several machines: the lead's side, and the agent of one machine.
 *
 * libcoxswain-nodes.so has it, which needs libnats and OpenSSL; nothing else of Coxswain does. Programs
 * open it when a group has nodes (coordinator/cli/nodes_library.h).
 *
 * The lead is the coordinator: its executor reaches the ranks through cox_nodes_transport. On each
 * machine an agent (cox_node_agent_run, `coxswain node`) has an executor for the ranks of its machine,
 * and follows one lead. What they tell each other: frame.h, lead_link.h, agent_link.h.
 *
 * Threads: open, close and agent_run on one thread. The transport's functions: transport.h.
 * Ownership: options are copied.
 * Blocks: open until every node has said hello, or the timeout; agent_run until the agent ends.
 * If the lead dies: agents keep their ranks for lead_grace_ms; a lead of the same group takes them over.
 * If an agent dies: its ranks die with it; the lead's executor reports each.
 */
#ifndef COX_NODES_H
#define COX_NODES_H

#include "cluster.h"

struct cox_nodes;

/* A value that must be the same on the lead and on every node; value NULL: it must only be the same
 * on all nodes. */
struct cox_node_fact {
    const char *name;
    const char *value;
};

struct cox_nodes_options {
    size_t size;
    struct cox_cluster_access access;
    const char *group;
    /* "a:4,b:4": ranks 0 to 3 on node a, 4 to 7 on b */
    const char *nodes;
    /* "HOST:PORT" for direct connections of nodes; NULL: the address that the cluster is reached from,
     * any port */
    const char *listen;
    struct cox_node_times times;
    const struct cox_node_fact *facts;
    size_t fact_count;
    /* of the group; agents start their ranks with them */
    uint32_t depth;
    uint64_t request_size[COX_CHANNEL_COUNT], response_size[COX_CHANNEL_COUNT];
    bool sealed;
    bool no_recorder;
    /* 0: 60,000 */
    uint64_t start_timeout_ms;
    struct cox_log log;
    void *context;
    /* A text about nodes that are awaited; NULL: not told. */
    void (*waiting)(void *context, const char *text);
    /* Asked every 50 ms in open; true ends it with COX_CLOSED. NULL: never. */
    bool (*cancelled)(void *context);
};

/* The ranks of "a:4,b:4". Returns 0; COX_INVALID. */
int cox_nodes_count(const char *nodes, uint32_t *ret_rank_count, struct cox_error *err);
/* Connects, and waits until every node has said hello and agrees with the facts.
 * Returns
 *   0
 *   COX_INVALID: options, or a node has another value; err names node and value
 *   COX_TAKEN: a node follows another lead, which lives
 *   COX_TIMEOUT: a node has not come; err names it
 *   COX_CLOSED: cancelled
 *   as cox_cluster_open and cox_direct_open
 */
int cox_nodes_open(const struct cox_nodes_options *options, struct cox_nodes **ret_nodes,
                              struct cox_error *err);
/* For struct cox_executor_options; lent until close. */
const struct cox_transport *cox_nodes_transport(struct cox_nodes *nodes);
/* After the executor is freed. NULL-safe, returns NULL. */
struct cox_nodes *cox_nodes_close(struct cox_nodes *nodes);

struct cox_node_agent_options {
    size_t size;
    struct cox_cluster_access access;
    const char *group;
    const char *node;
    const char *listen;
    const struct cox_node_fact *facts;
    size_t fact_count;
    /* argv of every worker */
    const char *const *command;
    /* replaces `model` in the configuration of an init: its folder on this machine; NULL: it stays */
    const char *model;
    /* as in struct cox_executor_options */
    const char *runtime_dir;
    const char *crash_dir;
    uint64_t start_timeout_ms;
    struct cox_log log;
    void *context;
    /* A line that a rank of this machine wrote. NULL: not told. */
    void (*line)(void *context, uint32_t rank, bool is_stderr, const char *text);
    /* The agent listens to the cluster; later: follows a lead, has lost it, and so on. NULL: logged. */
    void (*state)(void *context, const char *text);
    /* Asked every 50 ms; true ends the agent. */
    bool (*cancelled)(void *context);
};

/* Waits for a lead, and serves it until the group ends.
 * Returns
 *   0: the group has ended, or cancelled was true
 *   COX_PEER_DEAD: the lead was lost, and no other came in time
 *   COX_TAKEN: another agent is this node
 *   COX_INVALID: the lead refuses this node, in words
 *   as cox_cluster_open, cox_direct_open
 */
int cox_node_agent_run(const struct cox_node_agent_options *options,
                                  struct cox_error *err);

/* What a program that opens the library gets: cox_nodes_library, its only exported object. version:
 * COX_NODES_LIBRARY_VERSION of the library. */
#define COX_NODES_LIBRARY_VERSION 1
struct cox_nodes_library {
    uint32_t version;
    /* of Coxswain; a program opens that of its own release only */
    const char *release;
    int (*count)(const char *nodes, uint32_t *ret_rank_count, struct cox_error *err);
    int (*open)(const struct cox_nodes_options *options, struct cox_nodes **ret_nodes,
                struct cox_error *err);
    const struct cox_transport *(*transport)(struct cox_nodes *nodes);
    struct cox_nodes *(*close)(struct cox_nodes *nodes);
    int (*agent_run)(const struct cox_node_agent_options *options, struct cox_error *err);
};
extern const COX_PUBLIC struct cox_nodes_library cox_nodes_library;

#endif
