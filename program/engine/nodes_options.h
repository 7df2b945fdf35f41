/*
 * nodes_options: options of commands for groups over several machines.
 *
 * Threads: the main thread.
 * Ownership: texts are those of the command line.
 */
#ifndef COX_NODES_OPTIONS_H
#define COX_NODES_OPTIONS_H

#include "program/cli/runner.h"
#include "coordinator/transport/nodes_library.h"

struct cox_nodes_choice {
    /* --nodes; NULL: the group is on this machine */
    const char *nodes;
    struct cox_cluster_access access;
    const char *listen;
    struct cox_node_times times;
};

/* --cluster, --ca, --cert, --key, --insecure-loopback, --listen; of the lead also --nodes,
 * --lead-grace, --suspect-after and --dead-after. Of a struct cox_nodes_choice. */
extern const struct cox_option_group cox_lead_option_group;
extern const struct cox_option_group cox_agent_option_group;

/* Whether any of them was, but --nodes. */
bool cox_nodes_choice_given(const struct cox_nodes_choice *choice);
/* Whether what the cluster needs was given. Returns 0 or COX_INVALID. */
int cox_nodes_choice_check(const struct cox_nodes_choice *choice, struct cox_error *err);
/* What must be the same everywhere, of a model's folder: its digest, and that of its tokenizer.
 * Returns 0; as cox_model_digest_folder. */
#define COX_NODE_FACT_COUNT 2
struct cox_node_facts {
    struct cox_node_fact facts[COX_NODE_FACT_COUNT];
    char model[32], tokenizer[32];
};
int cox_node_facts_read(const char *model, struct cox_node_facts *ret_facts, struct cox_error *err);

#endif
