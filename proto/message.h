/*
 * message: messages, and their parts, made in an arena.
 *
 * Threads: any; an arena is one thread's.
 * Ownership: all of it is in the arena.
 * Errors: what finds no memory is left out, and the arena is exhausted from then on. So a reply is
 *   made without a check for each part, and arena->exhausted is checked once, before it is sent.
 * Blocks: nothing.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_PROTO_MESSAGE_H
#define COX_PROTO_MESSAGE_H

#include <coxswain/base.h>

#include <protobuf-c/protobuf-c.h>

/* A message of this type, initialized. NULL: no memory. */
void *cox_message_new(struct cox_arena *arena, const ProtobufCMessageDescriptor *type);
/* A repeated field: pointers to `count` messages of this type, initialized. *ret_count: count; 0:
 * no memory. */
void *cox_message_list(struct cox_arena *arena, const ProtobufCMessageDescriptor *type,
                       size_t count, size_t *ret_count);
/* A copy. NULL: the text is NULL or empty, or there is no memory. */
char *cox_message_text(struct cox_arena *arena, const char *text);
/* A text that is lent to the message, which does not change it. */
char *cox_message_lend(const char *text);

#endif
