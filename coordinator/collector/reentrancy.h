/*
 * reentrancy: knows whether this thread runs a handler or hook of an executor. A call from there
 * would wait for itself.
 *
 * Threads: each thread sees its own state.
 * Blocks: never.
 * If the process dies: nothing is left.
 */
#ifndef COX_COORDINATOR_REENTRANCY_H
#define COX_COORDINATOR_REENTRANCY_H

#include <stdbool.h>

/* One handler or hook that this thread runs; nested ones are linked on the stack. */
struct cox_reentrancy {
    const void *owner;
    const struct cox_reentrancy *outer;
};
void cox_reentrancy_enter(struct cox_reentrancy *frame, const void *owner);
void cox_reentrancy_exit(const struct cox_reentrancy *frame);
/* True if this thread runs a handler or hook of this owner. */
bool cox_reentrancy_inside(const void *owner);

#endif
