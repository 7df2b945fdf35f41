/*
 * thread: threads of the library.
 *
 * All signals are blocked in them: signals are for the host's own threads, whose handlers must not
 * run on ours.
 *
 * Threads: any.
 * Blocks: nothing.
 * If the process dies: so do they.
 */
#ifndef COX_CHANNEL_THREAD_H
#define COX_CHANNEL_THREAD_H

#include "base.h"

#include <pthread.h>

/* Returns 0 or -errno. */
int cox_thread_start(pthread_t *ret_thread, void *(*main)(void *argument), void *argument);

#endif
