/*
 * python_frames: the text of CPython's faulthandler, found again by thread.
 *
 * Threads: one. Blocks: nothing.
 * Ownership: pointers into the text, which the caller has.
 */
#ifndef COX_PROGRAM_PYTHON_FRAMES_H
#define COX_PROGRAM_PYTHON_FRAMES_H

#include <stdbool.h>
#include <stdint.h>

#define COX_PYTHON_THREAD_MAX 128

struct cox_python_thread {
    /* as pthread_self() of it */
    uint64_t self;
    /* its lines, up to the next thread's */
    const char *frames;
    uint32_t size;
};

struct cox_python_frames {
    uint32_t count;
    struct cox_python_thread threads[COX_PYTHON_THREAD_MAX];
    /* there are more, which CPython leaves out after 100 */
    bool cut;
};

/* Finds the threads in a text with a zero at its end. */
void cox_python_frames_parse(const char *text, struct cox_python_frames *ret_frames);
/* NULL: none. */
const struct cox_python_thread *cox_python_frames_of(const struct cox_python_frames *frames,
                                                     uint64_t self);
/* The frame number index, the innermost is 0, as "FUNCTION (FILE:LINE)", FILE without its folders.
 * Returns false: there is none. */
bool cox_python_frame_text(const struct cox_python_thread *thread, uint32_t index, char *text,
                           uint32_t size);

#endif
