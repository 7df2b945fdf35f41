#include "thread.h"

#include <signal.h>

int cox_thread_start(pthread_t *ret_thread, void *(*main)(void *argument), void *argument)
{
    static const int own_faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT};
    sigset_t mask, saved;
    sigfillset(&mask);
    for (size_t i = 0; i < sizeof own_faults / sizeof own_faults[0]; i++)
        sigdelset(&mask, own_faults[i]);
    pthread_sigmask(SIG_SETMASK, &mask, &saved);
    int e = pthread_create(ret_thread, NULL, main, argument);
    pthread_sigmask(SIG_SETMASK, &saved, NULL);
    return -e;
}
