/*
 * inside: is this thread inside a handler or hook of an executor? A call from there would wait for
 * itself.
 *
 * Threads: each knows of itself only.
 * Blocks: never.
 * If the process dies: nothing is left.
 */
#ifndef COX_COORDINATOR_INSIDE_H
#define COX_COORDINATOR_INSIDE_H

#include <stdbool.h>

/* A stay of this thread inside a handler or hook; frames are nested on the stack. */
struct cox_inside {
    const void *owner;
    const struct cox_inside *outer;
};
void cox_inside_enter(struct cox_inside *frame, const void *owner);
void cox_inside_leave(const struct cox_inside *frame);
/* True inside a handler or hook of this owner, on this thread. */
bool cox_inside(const void *owner);

#endif
