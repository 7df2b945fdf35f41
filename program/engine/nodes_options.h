/*
 * nodes_options: the file of --cluster, which describes a group over several machines, and what
 * must be the same on all of them.
 *
 * One file serves the lead and all nodes, a JSON object:
 *
 *   "servers": ["tls://HOST:PORT", ...]                          required
 *   "nodes": [{"name": "a", "ranks": 4, "listen": "HOST:PORT"}, ...]  required, but for listen
 *   "certificates": "DIR"          with ca.pem, lead.pem, node-NAME.pem and their keys, as
 *                                  coxswain-certificates makes them; from the file's directory
 *   "insecure_loopback": true      in place of certificates: loopback addresses only
 *   "lead_listen": "HOST:PORT"
 *   "lead_grace", "suspect_after", "dead_after": seconds
 *
 * Threads: the main thread.
 * Ownership: what a choice points to is its own, until deinit.
 * Blocks: reading files.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_PROGRAM_NODES_OPTIONS_H
#define COX_PROGRAM_NODES_OPTIONS_H

#include "coordinator/transport/nodes_library.h"
#include "program/cli/json_file.h"

#include <limits.h>

/* What one process gets of the file. */
struct cox_nodes_choice {
    struct cox_json_file file;
    struct cox_cluster_access access;
    /* NULL: the address from which the cluster is reached, any port */
    const char *listen;
    struct cox_node_times times;
    uint32_t rank_count;
    /* "a:4,b:4" */
    char nodes[4096];
    char url[1024];
    char ca[PATH_MAX], certificate[PATH_MAX], key[PATH_MAX];
};

/* Fills a zeroed choice, in place. node: the name of this machine; NULL: the process is the lead.
 * Returns 0; as cox_json_file_read; COX_INVALID: err names file, line and member. */
int cox_nodes_choice_read(struct cox_nodes_choice *choice, const char *path, const char *node,
                          struct cox_error *err);
void cox_nodes_choice_deinit(struct cox_nodes_choice *choice); /* idempotent; zeroed is fine */

/* What must be the same everywhere, of a model's folder: its digest, and that of its tokenizer.
 * Returns 0; as cox_model_digest_folder. */
#define COX_NODE_FACT_COUNT 2
struct cox_node_facts {
    struct cox_node_fact facts[COX_NODE_FACT_COUNT];
    char model[32], tokenizer[32];
};
int cox_node_facts_read(const char *model, struct cox_node_facts *ret_facts, struct cox_error *err);

#endif
