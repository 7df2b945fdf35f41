/*
 * inside: is this thread inside a handler or hook of an executor? A call from there would wait for
 * itself.
 *
 * Threads: each knows of itself only.
 * Blocks: never.
 * If the process dies: nothing is left.
 */
#ifndef COX_COORDINATOR_REENTRANCY_H
#define COX_COORDINATOR_REENTRANCY_H

#include <stdbool.h>

/* A stay of this thread inside a handler or hook; frames are nested on the stack. */
struct cox_reentrancy {
    const void *owner;
    const struct cox_reentrancy *outer;
};
void cox_reentrancy_enter(struct cox_reentrancy *frame, const void *owner);
void cox_reentrancy_exit(const struct cox_reentrancy *frame);
/* True inside a handler or hook of this owner, on this thread. */
bool cox_reentrancy_inside(const void *owner);

#endif
