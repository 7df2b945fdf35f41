/*
 * pause: the gate in front of the callbacks that a pause stops, and what it takes to get one out
 * that is inside.
 *
 * A running callback is one callback on a channel thread: from the moment the request was let in
 * until the callback has returned or was left. Its number is that of its request, which no other
 * request of the channel thread has. Only the channel threads of the execute and the transfer
 * channel have callbacks.
 *
 * Threads: begin, call and end on the channel thread; pause, resume and the questions (worker.h) on
 * any but those. Blocks: call as long as the callback; pause as worker.h says; nothing else. If the
 * process dies: private memory; nothing is left.
 */
#ifndef COX_WORKER_PAUSE_H
#define COX_WORKER_PAUSE_H

#include "channel/base/base.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>

struct cox_channel_thread;
struct cox_request;
struct cox_worker;

struct cox_running_callback {
    /* The callback under way; 0: none. seq_cst; partner is `paused`: either the channel thread sees
     * that, or the pause sees this. */
    _Atomic uint64_t inside;
    /* callbacks up to this one are asked to come out; only grows */
    _Atomic uint64_t told;
    /* this one is left by the next SIGURG */
    _Atomic uint64_t leave;
    /* the one inside */
    _Atomic bool leavable;
    /* type of its request; this and the next for words alone */
    _Atomic uint32_t kind;
    /* it was let in */
    _Atomic uint64_t since_ns;
    /* where it is left to; the channel thread's own */
    sigjmp_buf frame;
    /* not to be left now; the channel thread's own, and read by the handler on its thread */
    volatile sig_atomic_t held;
    /* the channel thread's own */
    sigset_t mask;
    /* under lock; while reachable */
    pthread_t thread;
    /* under lock: the thread can be sent signals */
    bool reachable;
};

/* One for a worker. */
struct cox_pause {
    pthread_mutex_t lock;
    /* on CLOCK_MONOTONIC; a callback has ended while somebody waited */
    pthread_cond_t out;
    /* seq_cst; partner is `inside` */
    _Atomic bool paused;
    /* threads inside a pause. seq_cst; partner is `inside` */
    _Atomic uint32_t awaiting;
    /* release, by a reinit; partner: the execute channel thread, before it looks at its table */
    _Atomic bool forget;
};

void cox_pause_init(struct cox_pause *pause);
void cox_pause_deinit(struct cox_pause *pause);

/* Around cox_worker_run: SIGURG has a handler, whoever asked for it first, until the last one is
 * gone. */
void cox_pause_listen(void);
void cox_pause_unlisten(void);

/* The channel thread begins and ends. Nothing, for channel threads without callbacks. */
void cox_channel_thread_begin(struct cox_channel_thread *thread);
void cox_channel_thread_end(struct cox_channel_thread *thread);

enum cox_callback_kind {
    COX_CALLBACK_PAUSABLE,   /* does not begin while paused, and may be left */
    COX_CALLBACK_UNPAUSABLE, /* begins all the same, and is never left: init, cleanup */
};

/* Calls back for this request. Returns what the callback did; COX_ABORTED, with the channel
 * thread's error telling why: paused, or left. After the latter the channel thread's arena is
 * another one: what it gave out before is never freed. */
int cox_channel_thread_call(struct cox_channel_thread *thread, const struct cox_request *request,
                            enum cox_callback_kind kind, int (*callback)(void *argument),
                            void *argument);

/* The same for requests that are lent (lending.h), several at a time, which are never left: the
 * callback is that of the newest until all are replied to. Under the lock of the lending. */
void cox_running_callback_lend(struct cox_channel_thread *thread, uint64_t sequence, uint32_t type);
void cox_running_callback_end_lend(struct cox_channel_thread *thread);

/* The channel thread's error for a request that is not begun. Returns COX_ABORTED. */
int cox_channel_thread_fail_paused(struct cox_channel_thread *thread);

#endif
