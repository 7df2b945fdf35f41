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
 * Ownership: the caller's memory.
 * If the process dies: its child dies with it (PDEATHSIG), and the kernel lets go.
 */
#ifndef COX_PROGRAM_TRACER_H
#define COX_PROGRAM_TRACER_H

#include "rank_connection.h"

#include <stdbool.h>

#define COX_TRACER_MS 45

/* connection: its rank is asked for frames; it may have none. writer: the thread that writes them,
 * which is not stopped; 0: there is none. held: a signal has stopped the process; that thread goes
 * on for this time, and no other. Fills in the copy. Returns 0; -errno: no process. */
int cox_tracer_copy(struct cox_rank_connection *connection, pid_t pid, pid_t writer, bool held,
                    struct cox_stack_copy *copy);

#endif
