/*
 * fake_cuda: a stand-in for libcuda.so.1, with memfds for device memory.
 *
 * It shows what our side does with the driver: which calls in which order, what it undoes when one
 * of them fails, and that it waits for copies. It says nothing about a real driver or device.
 * Stricter than those: sizes have to be whole units, contexts current, and bytes copied to or
 * within a device are there only once the stream has been waited for.
 *
 * Threads: one, but for the current context, which is each thread's own. Its state is the
 *   process's: a library that is opened twice has one.
 */
#ifndef COX_TESTS_LIB_FAKE_CUDA_H
#define COX_TESTS_LIB_FAKE_CUDA_H

#include <stdint.h>

#define FAKE_CUDA_UNIT (UINT64_C(64) << 10)
#define FAKE_CUDA_DEVICE_SIZE (UINT64_C(16) << 20)

struct fake_cuda {
    /* To be set. */
    /* 2 */
    int device_count;
    /* 1: devices can */
    int virtual_memory;
    /* 1 */
    int fd_handles;
    /* the number of the call that is to fail, from 1; 0: none */
    int fail_call;
    /* with this */
    int fail_result;
    /* NULL: any; else calls of this function are counted */
    const char *fail_name;
    /* What there is. */
    /* those that count for fail_call, since it was set */
    int calls;
    /* the function that did */
    const char *failed;
    /* retained */
    int contexts;
    /* of this thread's contexts */
    int depth;
    /* handles not released */
    int allocations;
    int reservations;
    int mappings;
    /* for the stream */
    int waits;
};

/* Of the library that was opened: found by dlsym as "fake_cuda". */
typedef struct fake_cuda *fake_cuda_fn(void);

#endif
