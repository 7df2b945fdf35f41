/*
 * stack_writer: the rank's part of stack_protocol.h: a thread that sleeps until somebody rings, and
 * then tells the coordinator's helper, and no other process, what that cannot see.
 *
 * While it does so, a tracer may hold all other threads of the process. So it calls nothing that
 * takes a lock: system calls, and the host's write_frames, of which the same is asked. The dump of
 * PyTorch's flight recorder takes locks: another thread takes it, when no tracer holds the process.
 *
 * Threads: start and stop on one thread.
 * Ownership: the struct has the fd, the mapping and the thread.
 * Blocks: stop, until the threads have ended: a few milliseconds, at most 100 while it has a
 *   connection, and 400 while PyTorch's recorder does not reply.
 * If the process dies: the kernel frees the memory.
 */
#ifndef COX_WORKER_STACK_WRITER_H
#define COX_WORKER_STACK_WRITER_H

#include "channel/stacks/stack_protocol.h"
#include "torch_recorder.h"

#include <coxswain/base.h>

#include <pthread.h>
#include <stdbool.h>
#include <sys/types.h>

struct cox_stack_writer {
    /* NULL: it does not run */
    struct cox_stack_doorbell *doorbell;
    int fd;
    /* the only process whose sockets it trusts */
    pid_t coordinator;
    pthread_t thread;
    _Atomic bool stopping;
    /* as in cox_worker_options; NULL: none */
    void (*write_frames)(void *context, int fd);
    void *context;
    /* CPython's own, if the process has it; NULL */
    const char *(*python_dump)(int fd, void *interpreter, void *thread_state);
    /* NULL: there is none */
    struct cox_torch_recorder *torch;
};

/* coordinator: as the rank was told when it was started, or as the kernel says; 0: unknown. Returns
 * 0, also where that is 0, and where memfds are denied (seccomp), or files of that size
 * (ulimit -f): then nothing is started, and the rank works without; -errno: no memory, fd or
 * thread. */
int cox_stack_writer_start(struct cox_stack_writer *writer, pid_t coordinator,
                           void (*write_frames)(void *context, int fd), void *context,
                           struct cox_error *err);
/* Idempotent; a zeroed one is fine. */
void cox_stack_writer_stop(struct cox_stack_writer *writer);

#endif
