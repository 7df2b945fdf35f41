/*
 * collectives: which ranks have not entered the collective that the others wait in, from the lines
 * "torch:" of their texts (program/stacks/flight_recorder.h).
 *
 *   PyTorch: rank 1 never entered all_reduce 4711; ranks 0,2-3 wait in it
 *
 * Ranks are compared by process group and number; those without such lines are not named.
 *
 * Bytes: the texts are input.
 * Threads: any. Blocks: nothing. Ownership: lent for the call.
 * If the process dies: private memory.
 */
#ifndef COX_COORDINATOR_COLLECTIVES_H
#define COX_COORDINATOR_COLLECTIVES_H

#include <coxswain/executor.h>

/* Process groups of a rank that are compared, and those that are told, of ranks that are missing
 * first. */
#define COX_COLLECTIVES_GROUP_MAX 32
#define COX_COLLECTIVES_TOLD_MAX 2

/* Appends to a text of size bytes, with "; " behind it; nothing if no rank waits. Returns 0;
 * -ENOMEM. */
int cox_collectives_append(const struct cox_stacks *stacks, char *text, size_t size);

#endif
