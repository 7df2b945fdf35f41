/*
 * nodes: the functions behind nodes_library.h: the lead's side (lead/) and the agent of one machine
 * (agent/). What they tell each other: frame.h, lead_link.h, agent_link.h.
 *
 * If the lead dies: agents keep their ranks for lead_grace_ms; a lead of the same group takes them over.
 * If an agent dies: its ranks die with it; the lead's executor reports each.
 */
#ifndef COX_NODES_H
#define COX_NODES_H

#include "cluster.h"

/* A direct message that is a frame. Other kinds: image.h, group_relay.h, kv_relay.h. */
#define COX_DIRECT_FRAME 1u

int cox_nodes_open(const struct cox_nodes_options *options, struct cox_nodes **ret_nodes,
                   struct cox_error *err);
const struct cox_transport *cox_nodes_transport(struct cox_nodes *nodes);
struct cox_nodes *cox_nodes_close(struct cox_nodes *nodes);
int cox_node_agent_run(const struct cox_node_agent_options *options, struct cox_error *err);

extern const COX_PUBLIC struct cox_nodes_library cox_nodes_library;

#endif
