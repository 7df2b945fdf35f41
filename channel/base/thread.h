/*
 * thread: threads of the library. A header alone, as idioms.h.
 *
 * Signals are blocked in them: signals are for the host's own threads, whose handlers must not run
 * on ours. Not those that an instruction of the thread itself causes (SIGSEGV, SIGBUS, SIGFPE,
 * SIGILL, SIGTRAP, SIGSYS, SIGABRT): blocked, the kernel would end the process past the handlers of
 * the host, which callbacks may count on.
 *
 * Threads: any.
 * Blocks: nothing.
 * If the process dies: so do they.
 */
#ifndef COX_CHANNEL_THREAD_H
#define COX_CHANNEL_THREAD_H

#include <pthread.h>
#include <signal.h>

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

/* A condition variable whose deadlines are of CLOCK_MONOTONIC, as every deadline here. Of glibc's
 * initializers none fails. */
static inline void cox_condition_init(pthread_cond_t *ret_condition)
{
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(ret_condition, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

#endif
