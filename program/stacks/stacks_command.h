/*
 * stacks_command: asks a running group where the threads of its ranks are.
 *
 * Threads: one. Blocks: until the group has replied, or the deadline.
 * Ownership: the reply is lent by the client.
 * If the process dies: nothing is left.
 */
#ifndef COX_PROGRAM_STACKS_COMMAND_H
#define COX_PROGRAM_STACKS_COMMAND_H

#include "program/client/client.h"

#include <protobuf-c/protobuf-c.h>

struct CoxswainControl__StacksReply;

/* rank: NULL: of all. Returns as cox_client_expect. */
int cox_stacks_ask(struct cox_client *client, const uint32_t *rank, uint64_t deadline_ns,
                   const struct CoxswainControl__StacksReply **ret_reply, struct cox_error *err);

#endif
