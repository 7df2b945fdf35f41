/* node_command: the command of this folder. */
#ifndef COX_NODES_NODE_COMMAND_H
#define COX_NODES_NODE_COMMAND_H

#include "coordinator/cli/runner.h"

extern const struct cox_command cox_command_node;

#endif
