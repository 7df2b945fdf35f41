#include "thread.h"

#include <signal.h>

int cox_thread_start(pthread_t *ret_thread, void *(*main)(void *argument), void *argument)
{
    sigset_t all, saved;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &saved);
    int e = pthread_create(ret_thread, NULL, main, argument);
    pthread_sigmask(SIG_SETMASK, &saved, NULL);
    return -e;
}
