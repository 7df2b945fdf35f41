/*
 * lending: what of a taken channel (take.h) is with its caller, and which replies wait for their
 * turn.
 *
 * A request has the entry of its frame, from next until its reply is published:
 *
 *     free -> served -> ready -> free              next itself replies
 *             served -> lent -> replying -> ready  a caller does; replying -> lent if it cannot
 *
 *   ready: the reply is in its slot, or there is none to give. `done`, which the coordinator reads,
 *   moves over the ready entries that nothing earlier is in front of: they are published, oldest
 *   first, each with its wakeup.
 *
 * Threads: lock is held for every change of an entry and of the rank's line; entries that are
 *   served belong to the thread inside next, those that are replying to the thread that replies.
 * Blocks: for the lock, under which nothing waits.
 * If the process dies: private memory.
 */
#ifndef COX_WORKER_LENDING_H
#define COX_WORKER_LENDING_H

#include "channel/shm/layout.h"
#include "pause.h"
#include "take.h"

#include <pthread.h>
#include <stdatomic.h>

struct cox_channel_thread;
struct cox_request;
struct cox_served_step;

enum cox_lent_state {
    COX_LENT_FREE = 0,
    COX_LENT_SERVED,
    COX_LENT_LENT,
    COX_LENT_REPLYING,
    COX_LENT_READY,
};

enum cox_lent_kind { COX_LENT_OPAQUE, COX_LENT_STEP, COX_LENT_INIT };

/* What is woken when a reply is published. */
enum cox_lent_wakeup {
    /* nothing: there is no reply */
    COX_LENT_NONE,
    /* the coordinator, for a reply */
    COX_LENT_REPLY,
    /* the same, and the reply is a failure */
    COX_LENT_FAILURE,
    /* the token of a legacy rank without a payload */
    COX_LENT_TOKEN,
};

struct cox_lent {
    uint64_t sequence;
    enum cox_lent_state state;
    enum cox_lent_kind kind;
    enum cox_lent_wakeup wakeup;
    /* its bytes are in the channel thread's view of a payload */
    bool in_block;
    uint64_t taken_ns;
};

struct cox_lending {
    /* the channel is taken; constant while it is served */
    bool on;
    pthread_mutex_t lock;
    /* protects reply payloads (out_of_line.c) if several threads reply */
    pthread_mutex_t blocks_lock;
    /* by frame */
    struct cox_lent entries[COX_DEPTH_MAX];
    /* requests that are with a caller or a callback; under lock */
    uint32_t out;
    /* one of them is a step or an init; under lock */
    bool typed;
    /* it came out of line: an arena that has grown for it is not kept */
    bool trims;
    /* of that; NULL */
    struct cox_served_step *step;
    struct cox_init_request *init;
    /* A thread is inside next. seq_cst; partner is `woken`: either the thread sees that, or the
     * waker sees this and wakes it. */
    _Atomic bool taking;
    /* the present or next call of next returns COX_EMPTY */
    _Atomic bool woken;
    /* used by next: the struct to fill in; its sequence is 0 until a request is lent */
    struct cox_worker_request *to;
};

void cox_lending_init(struct cox_lending *lending);
void cox_lending_deinit(struct cox_lending *lending);

/* next has found this request, which is served from here on. Returns false if its frame holds one
 * that is still lent, which no coordinator publishes. */
bool cox_lending_take(struct cox_channel_thread *thread, uint64_t sequence);
/* This rank was not asked. Returns false as take does. */
bool cox_lending_pass(struct cox_channel_thread *thread, uint64_t sequence);
/* Publishes again what was published, for a coordinator that does not see it. */
void cox_lending_repeat(struct cox_channel_thread *thread);
/* The reply is in its slot; publishes it when its turn comes. */
void cox_lending_ready(struct cox_channel_thread *thread, uint64_t sequence,
                       enum cox_lent_wakeup wakeup);

/* Call before a callback or a caller gets it. Returns false if the worker is paused, and it must
 * not get it. Either way leave follows. */
bool cox_lending_enter(struct cox_channel_thread *thread, uint64_t sequence, uint32_t type);
void cox_lending_leave(struct cox_channel_thread *thread);

/* As cox_channel_thread_call (pause.h), on a taken channel. */
int cox_lending_call(struct cox_channel_thread *thread, const struct cox_request *request,
                     enum cox_callback_kind kind, int (*callback)(void *argument), void *argument);

/* Lends the request that is served, after enter. */
void cox_lending_lend(struct cox_channel_thread *thread, uint64_t sequence, uint32_t type,
                      enum cox_lent_kind kind, bool in_block);
/* Claims a lent request for a reply; ready follows, or unclaim. Returns NULL if there is none; err
 * says why. */
struct cox_lent *cox_lending_claim(struct cox_channel_thread *thread, uint64_t sequence,
                                   struct cox_error *err);
void cox_lending_unclaim(struct cox_channel_thread *thread, struct cox_lent *entry);

#endif
