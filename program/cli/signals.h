/*
 * signals: SIGINT, SIGTERM and SIGHUP, those of them that were not ignored at the start, blocked in
 * every thread and taken by one of their own. So is SIGCHLD, on request. A process that has not
 * ended some time after the first one gets it once more: its main thread may be inside a write to a
 * pipe that nobody reads.
 *
 * Threads: start and end from the main thread, start before any other thread exists; taken and
 *   child_changed are called on the thread of signals.
 * Ownership: the struct is the caller's, and stays where it is until end.
 * Blocks: end until taken has returned.
 * If the process dies: nothing is left.
 */
#ifndef COX_PROGRAM_SIGNALS_H
#define COX_PROGRAM_SIGNALS_H

#include <coxswain/base.h>

#include <pthread.h>
#include <signal.h>

struct cox_signals {
    /* False: the process dies of it, at once, as if it had not been blocked. */
    bool (*taken)(void *context, int number);
    /* A child has ended, was stopped, or continues; some may be reported together. */
    void (*child_changed)(void *context);
    void *context;
    bool masked;
    sigset_t old_mask;
    int signal_fd;
    /* an eventfd: the thread leaves */
    int end_fd;
    bool threaded;
    pthread_t thread;
    /* that time. An orderly end takes the ranks' grace of 3 s, and more on a busy machine. */
    uint32_t end_ms;
};

#define COX_SIGNALS_NONE                                                                           \
    {                                                                                              \
        .signal_fd = -1, .end_fd = -1, .end_ms = 20000                                             \
    }

/* Call it on a COX_SIGNALS_NONE. child_changed: NULL: SIGCHLD stays as it is. Returns 0 or -errno;
 * call end in both cases. */
int cox_signals_start(struct cox_signals *signals, bool (*taken)(void *context, int number),
                      void (*child_changed)(void *context), void *context, struct cox_error *err);
/* Unblocks the signals. Idempotent. */
void cox_signals_end(struct cox_signals *signals);

#endif
