/*
 * tracer: the registers and the stacks of all threads of a process at one moment.
 *
 * The threads are stopped by ptrace, without a signal (PTRACE_SEIZE, PTRACE_INTERRUPT), read, and
 * let go; nothing is unwound meanwhile. A process of its own does it, for at most COX_TRACER_MS;
 * when that ends, however it ends, the kernel lets go of all threads.
 *
 * While they are stopped the rank writes the frames of its interpreter, so that these do not change
 * meanwhile.
 *
 * Threads: one. Blocks: COX_TRACER_MS, and as long as the kernel needs to end a process.
 * Ownership: new gives the copy; the area is borrowed.
 * If the process dies: its child dies with it (PDEATHSIG), and the kernel lets go.
 */
#ifndef COX_PROGRAM_TRACER_H
#define COX_PROGRAM_TRACER_H

#include "rank_area.h"

#include <stdbool.h>

#define COX_TRACER_MS 45
#define COX_TRACER_POOL_SIZE (UINT64_C(32) << 20)

struct cox_stack_copy {
    /* threads that are in the copy, in the order of their numbers */
    uint32_t count;
    /* 0, or why ptrace cannot be had: errno */
    int refused;
    /* threads that did not stop in time */
    uint32_t unstopped;
    /* the rank has written its frames while it was stopped */
    _Atomic uint32_t frames;
    /* of the threads stopped first */
    _Atomic uint64_t stopped_ns, continued_ns;
    struct cox_stack_thread threads[COX_STACK_THREAD_MAX];
    uint32_t pool_used;
    uint8_t pool[COX_TRACER_POOL_SIZE];
};

/* area: its rank is asked for frames; NULL: none is. held: a signal has stopped the process; its
 * thread that writes the frames goes on for that, and no other. Returns NULL: no memory, or no
 * process. */
struct cox_stack_copy *cox_tracer_copy(pid_t pid, struct cox_rank_area *area, bool held);
/* NULL-safe, returns NULL. */
struct cox_stack_copy *cox_stack_copy_free(struct cox_stack_copy *copy);

/* Where ptrace is refused: takes what the rank has copied by itself, all of it checked. */
void cox_stack_copy_take(struct cox_stack_copy *copy, const struct cox_rank_area *area);

#endif
