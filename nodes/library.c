/* The one exported object of libcoxswain-nodes.so. */
#include "nodes.h"

#include <coxswain/version.h>

const COX_PUBLIC struct cox_nodes_library cox_nodes_library = {
    .version = COX_NODES_LIBRARY_VERSION,
    .release = COX_VERSION_TEXT,
    .open = cox_nodes_open,
    .transport = cox_nodes_transport,
    .close = cox_nodes_close,
    .agent_run = cox_node_agent_run,
};
