/*
 * unwind: the native frames of threads that the tracer, or the rank, has copied.
 *
 * Threads: one. Blocks: on the file system: symbols and line numbers are read of every file that a
 *   frame is in. Nothing is fetched from a debuginfod.
 * Ownership: new and free.
 * If the process dies: private memory.
 */
#ifndef COX_PROGRAM_UNWIND_H
#define COX_PROGRAM_UNWIND_H

#include "libdw.h"
#include "tracer.h"

/* Frames of a thread that are shown. */
#define COX_UNWIND_FRAME_MAX 64

struct cox_unwind_frame {
    /* "": no symbol */
    char function[120];
    /* the name of the program or library without its folders, and the offset there; "": in none */
    char object[80];
    uint64_t offset;
    /* the name of the source without its folders; "": no line numbers */
    char file[80];
    int line;
    /* the C library, or the loader */
    bool of_system;
};

struct cox_unwind {
    struct cox_libdw libdw;
    struct Dwfl *dwfl;
    const struct cox_stack_copy *copy;
    const struct cox_stack_thread *thread;
    struct cox_unwind_frame *frames;
    uint32_t frame_count;
    /* there are more, or the copy of the stack ends there */
    bool cut;
};

/* Returns 0; COX_UNSUPPORTED; COX_DENIED: /proc/PID/maps; -errno. */
int cox_unwind_open(struct cox_unwind *unwind, pid_t pid, const struct cox_stack_copy *copy,
                    struct cox_error *err);
void cox_unwind_close(struct cox_unwind *unwind); /* idempotent */
/* Fills in up to COX_UNWIND_FRAME_MAX frames, the innermost first. Returns how many; unwind->cut.
 */
uint32_t cox_unwind_thread(struct cox_unwind *unwind, const struct cox_stack_thread *thread,
                           struct cox_unwind_frame *frames);

#endif
