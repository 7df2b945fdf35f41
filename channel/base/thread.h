/*
 * thread: threads of the library. Header only, as idioms.h.
 *
 * They block signals: handlers of the host must run on the host's own threads. Signals that an
 * instruction of the thread itself raises stay unblocked (SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP,
 * SIGSYS, SIGABRT): the kernel would otherwise kill the process without calling the host's
 * handlers, which callbacks may rely on.
 *
 * Threads: any.
 * Blocks: nothing.
 * If the process dies: its threads end with it.
 */
#ifndef COX_CHANNEL_THREAD_H
#define COX_CHANNEL_THREAD_H

#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>

#include <coxswain/base.h>

/* Of the stack of each thread, whose size is the limit of the process: what the library and the C
 * library need, several times over. */
#define COX_THREAD_STACK_MIN (UINT64_C(256) << 10)

/* For the start of a program or a group: a stack that is too small ends a process by SIGSEGV later.
 * Returns
 *   0
 *   COX_INVALID
 */
static inline int cox_thread_check_stack(struct cox_error *err)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_STACK, &limit) < 0 || limit.rlim_cur >= COX_THREAD_STACK_MIN)
        return 0;
    return cox_fail(err, COX_INVALID,
                    "the stack of a thread may have %" PRIu64 " KiB (ulimit -s): expected %" PRIu64
                    " or more; ulimit -s 8192",
                    (uint64_t)limit.rlim_cur >> 10, COX_THREAD_STACK_MIN >> 10);
}

/* Returns 0 or -errno. */
static inline int cox_thread_start(pthread_t *ret_thread, void *(*main)(void *argument),
                                   void *argument)
{
    static const int own_faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT};
    sigset_t mask, saved;
    sigfillset(&mask);
    for (unsigned i = 0; i < sizeof own_faults / sizeof own_faults[0]; i++)
        sigdelset(&mask, own_faults[i]);
    pthread_sigmask(SIG_SETMASK, &mask, &saved);
    int e = pthread_create(ret_thread, NULL, main, argument);
    pthread_sigmask(SIG_SETMASK, &saved, NULL);
    return -e;
}

/* Initializes a condition variable with deadlines on CLOCK_MONOTONIC, like every deadline here.
 * glibc's initializers cannot fail. */
static inline void cox_condition_init(pthread_cond_t *ret_condition)
{
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(ret_condition, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

#endif
