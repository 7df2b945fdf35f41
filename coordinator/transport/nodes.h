/* nodes: names of nodes (executor.h). */
#ifndef COX_COORDINATOR_NODES_H
#define COX_COORDINATOR_NODES_H

#include <coxswain/executor.h>

/* One node of a list as in nodes. */
struct cox_node_place {
    char name[COX_NODE_NAME_MAX + 1];
    uint32_t rank_first, rank_count;
};

/* Reads "a:4,b:4". ret_places has room for COX_NODE_COUNT_MAX; NULL: only checks.
 * Returns 0 or COX_INVALID. */
int cox_nodes_parse(const char *nodes, struct cox_node_place *ret_places, uint32_t *ret_node_count,
                    uint32_t *ret_rank_count, struct cox_error *err);
/* Names of nodes, and of groups over several machines, are parts of NATS subjects: letters, digits,
 * '-' and '_'. what: "node" or "group". Returns 0 or COX_INVALID. */
int cox_node_name_check(const char *what, const char *name, struct cox_error *err);

#endif
