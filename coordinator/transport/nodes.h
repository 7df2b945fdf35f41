/* nodes: names of nodes (executor.h). */
#ifndef COX_COORDINATOR_NODES_H
#define COX_COORDINATOR_NODES_H

#include <coxswain/executor.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Names of nodes, and of groups over several machines, are parts of NATS subjects: letters, digits,
 * '-' and '_'. what: "node" or "group". Returns 0 or COX_INVALID. */
int cox_node_name_check(const char *what, const char *name, struct cox_error *err);

#ifdef __cplusplus
}
#endif

#endif
