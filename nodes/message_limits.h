/*
 * message_limits: which direct messages a lead and an agent take, from whom, and how large: one table.
 * What a frame may be is in link/frame.c, by its kind; numbers of peers are in link/limits.h; shares of
 * connections, and the memory of messages under way, in direct/direct.h.
 *
 * Threads: any; a pure function.
 */
#ifndef COX_NODES_MESSAGE_LIMITS_H
#define COX_NODES_MESSAGE_LIMITS_H

#include "nodes/link/nodes_common.h"

/* A message of direct.h, as on_announce has it, at the lead or an agent of this group. Returns 0;
 * COX_DENIED: this process says no such thing; COX_TOO_LARGE; COX_CORRUPT: a frame that is none. */
int cox_message_check(bool at_lead, const char *own_group, const char *peer, const char *group,
                      uint32_t kind, uint64_t size, const uint8_t *front, struct cox_error *err);

#endif
