/*
 * stack_copy: the threads of a process at one moment: their registers and stacks, and the frames of
 * an interpreter.
 *
 * Threads: any. Ownership: new gives it, in memory that a forked child shares.
 * Blocks: nothing.
 * If the process dies: nothing is left.
 */
#ifndef COX_PROGRAM_STACK_COPY_H
#define COX_PROGRAM_STACK_COPY_H

#include "channel/stacks/stack_protocol.h"

#include <stdbool.h>

#define COX_STACK_COPY_POOL_SIZE (UINT64_C(32) << 20)

struct cox_stack_copy {
    /* threads that are in the copy, in the order of their numbers */
    uint32_t count;
    /* 0, or why ptrace cannot be had: errno */
    int refused;
    /* threads that did not stop in time */
    uint32_t unstopped;
    /* of the threads stopped first */
    _Atomic uint64_t stopped_ns, continued_ns;
    struct cox_stack_thread threads[COX_STACK_THREAD_MAX];
    uint32_t pool_used;
    /* the rank has written text: its frames, with a zero at the end */
    _Atomic uint32_t frames;
    char text[COX_STACK_TEXT_MAX + 1];
    uint8_t pool[COX_STACK_COPY_POOL_SIZE];
};

/* Returns NULL: no memory. */
struct cox_stack_copy *cox_stack_copy_new(void);
/* NULL-safe, returns NULL. */
struct cox_stack_copy *cox_stack_copy_free(struct cox_stack_copy *copy);

#endif
