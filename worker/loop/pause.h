/*
 * pause: stops callbacks from starting while the worker is paused, and interrupts those that run.
 *
 * A running callback lasts from the moment its request was admitted until the callback has returned
 * or was left by a jump. Its number is that of its request, which is unique on its channel thread.
 * Only the channel threads of the execute and the transfer channel have running callbacks in this
 * sense.
 *
 * Threads: begin, call and end on the channel thread; pause, resume and the queries (worker.h) on
 *   any other thread.
 * Blocks: call as long as the callback; pause as worker.h says; nothing else.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_WORKER_PAUSE_H
#define COX_WORKER_PAUSE_H

#include <coxswain/base.h>

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>

struct cox_channel_thread;

struct cox_running_callback {
    /* The number of the running callback; 0: none. seq_cst; partner is `paused`: either the channel
     * thread sees that, or the pause sees this. */
    _Atomic uint64_t inside;
    /* callbacks up to this one are asked to return; only grows */
    _Atomic uint64_t cancel_sequence;
    /* the next SIGURG leaves this one by a jump */
    _Atomic uint64_t leave;
    /* whether the running callback may be left */
    _Atomic bool leavable;
    /* type of its request; this and the next are used in texts only */
    _Atomic uint32_t kind;
    /* time at which it was admitted */
    _Atomic uint64_t since_ns;
    /* target of the jump; the channel thread's own */
    sigjmp_buf frame;
    /* set while it must not be left; the channel thread's own, read by the handler on that thread
     */
    volatile sig_atomic_t held;
    /* the channel thread's own */
    sigset_t mask;
    /* under lock; while reachable */
    pthread_t thread;
    /* under lock: the thread can receive signals */
    bool reachable;
    /* requests that are with a callback or a caller; under the lock of the lending */
    uint32_t count;
};

/* One for a worker. */
struct cox_pause {
    pthread_mutex_t lock;
    /* on CLOCK_MONOTONIC; signalled when a callback ends while a pause waits */
    pthread_cond_t out;
    /* seq_cst; partner is `inside` */
    _Atomic bool paused;
    /* threads inside a pause. seq_cst; partner is `inside` */
    _Atomic uint32_t awaiting;
    /* release, by a reinit; partner: the execute channel thread, before it reads its table */
    _Atomic bool forget;
};

void cox_pause_init(struct cox_pause *pause);
void cox_pause_deinit(struct cox_pause *pause);

/* Around cox_worker_run: installs the handler of SIGURG with the first caller, and removes it with
 * the last. */
void cox_pause_listen(void);
void cox_pause_unlisten(void);

/* At the begin and the end of a channel thread. No effect on threads without such callbacks. */
void cox_channel_thread_begin(struct cox_channel_thread *thread);
void cox_channel_thread_end(struct cox_channel_thread *thread);

enum cox_callback_kind {
    COX_CALLBACK_PAUSABLE,   /* refused while paused, and may be left */
    COX_CALLBACK_UNPAUSABLE, /* runs also while paused, and is never left: init, cleanup */
};

/* Calls the callback for the request that was opened last. Returns its result; COX_ABORTED if the
 * callback was refused or left, with the reason in the channel thread's error. After a jump the
 * channel thread has another arena: memory of the former one is never freed. On a channel that
 * callers take from no callback is left. */
int cox_channel_thread_call(struct cox_channel_thread *thread, enum cox_callback_kind kind,
                            int (*callback)(struct cox_channel_thread *thread));

/* The same for a request that is lent, of which there may be several, and which is never left: the
 * running callback is the newest of them until all are replied to. begin returns false if the
 * worker is paused; end is called in any case. Under the lock of the lending. */
bool cox_running_callback_begin(struct cox_channel_thread *thread);
void cox_running_callback_end(struct cox_channel_thread *thread);

/* Sets the channel thread's error for a request that was refused. Returns COX_ABORTED. */
int cox_channel_thread_fail_paused(struct cox_channel_thread *thread);

#endif
