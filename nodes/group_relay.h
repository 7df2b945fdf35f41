/*
 * group_relay: the rank group over several machines: carries what the mirror of this machine
 * (worker/group/group_mirror.h) collects to the other agents, and theirs to it, by direct connections.
 *
 * Each init has an incarnation of the group, and a mirror of its own. A message of an incarnation that has
 * not begun here, because another machine got the init first, is kept until it begins, for a
 * minute, within a budget for each node and for all; one of an earlier incarnation is dropped.
 *
 * Threads: begin, set_peers and free on one thread at a time, take on any. A thread of this object
 *   collects and sends.
 * Ownership: direct is borrowed.
 * Blocks: begin, until what is being sent was sent.
 */
#ifndef COX_NODES_GROUP_RELAY_H
#define COX_NODES_GROUP_RELAY_H

#include "nodes/direct/direct.h"
#include "nodes/link/agent_link.h"
#include "worker/group/group_mirror.h"

/* Direct messages of a relay. */
#define COX_DIRECT_GROUP 2u

struct cox_group_relay;

/* node: of this machine, which is left out of the peers. */
int cox_group_relay_new(struct cox_direct *direct, const char *node, const struct cox_log *log,
                        struct cox_group_relay **ret_relay, struct cox_error *err);
/* NULL-safe, returns NULL. */
struct cox_group_relay *cox_group_relay_free(struct cox_group_relay *relay);
/* The other machines. */
void cox_group_relay_set_peers(struct cox_group_relay *relay, const struct cox_agent_peer *peers,
                               uint32_t count);
/* From now on this incarnation. Returns as cox_group_mirror_open. */
int cox_group_relay_begin(struct cox_group_relay *relay,
                          const struct cox_group_mirror_options *options, struct cox_error *err);
/* The incarnation is over, or its memory about to be: nothing of it is used from here on, until begin. */
void cox_group_relay_pause(struct cox_group_relay *relay);
/* Drops what was kept for an incarnation that has not begun since. Returns the bytes that are kept. */
size_t cox_group_relay_expire(struct cox_group_relay *relay, uint64_t now_ns);
/* A message of another machine, "b". Takes bytes (free). */
void cox_group_relay_take(struct cox_group_relay *relay, const char *node, uint8_t *bytes,
                          size_t size);

#endif
