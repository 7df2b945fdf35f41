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
struct cox_step;

enum cox_lent_state {
    COX_LENT_FREE = 0,
    COX_LENT_SERVED,
    COX_LENT_LENT,
    COX_LENT_REPLYING,
    COX_LENT_READY,
};

enum cox_lent_kind { COX_LENT_OPAQUE, COX_LENT_STEP, COX_LENT_INIT };

/* Who is woken when a reply is published. */
enum cox_lent_wakeup {
    /* nobody: it has no reply */
    COX_LENT_NONE,
    /* who waits for replies to this request */
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
    /* its bytes are in the channel thread's view of a block */
    bool in_block;
    uint64_t taken_ns;
};

struct cox_lending {
    /* the channel is taken; constant while it is served */
    bool on;
    pthread_mutex_t lock;
    /* of the blocks of replies (large_payload.c), where several threads reply */
    pthread_mutex_t blocks_lock;
    /* by frame */
    struct cox_lent entries[COX_DEPTH_MAX];
    /* requests that a caller or a callback has; under lock */
    uint32_t out;
    /* one of them is a step or an init; under lock */
    bool typed;
    /* it came in a block: the arena that has grown for it is not kept */
    bool trims;
    /* of that; NULL */
    struct cox_step *step;
    struct cox_init_request *init;
    /* A thread is inside next. seq_cst; partner is `woken`: either the thread sees that, or the
     * watcher sees this, and wakes it. */
    _Atomic bool taking;
    /* the next that waits, or the one that comes, is to return COX_EMPTY */
    _Atomic bool woken;
    /* next's own: what is to be filled; its sequence is 0 until something is lent */
    struct cox_worker_request *to;
};

void cox_lending_init(struct cox_lending *lending);
void cox_lending_deinit(struct cox_lending *lending);

/* next has seen this request: it is served from here on. False: its frame is that of one which is
 * still lent, which no coordinator publishes. */
bool cox_lending_take(struct cox_channel_thread *thread, uint64_t sequence);
/* This rank was not asked. False: as take. */
bool cox_lending_pass(struct cox_channel_thread *thread, uint64_t sequence);
/* Publishes again what was published, for a coordinator that does not see it. */
void cox_lending_repeat(struct cox_channel_thread *thread);
/* The reply is in its slot; publishes it when its turn comes. */
void cox_lending_ready(struct cox_channel_thread *thread, uint64_t sequence,
                       enum cox_lent_wakeup wakeup);

/* A callback, or a caller, is about to have it. False: the worker is paused, and it may not. Either
 * way leave follows. */
bool cox_lending_enter(struct cox_channel_thread *thread, uint64_t sequence, uint32_t type);
void cox_lending_leave(struct cox_channel_thread *thread);

/* As cox_channel_thread_call (pause.h), on a taken channel. */
int cox_lending_call(struct cox_channel_thread *thread, const struct cox_request *request,
                     enum cox_callback_kind kind, int (*callback)(void *argument), void *argument);

/* Lends the request that is served, after enter. */
void cox_lending_lend(struct cox_channel_thread *thread, uint64_t sequence, uint32_t type,
                      enum cox_lent_kind kind, bool in_block);
/* The lent request is the caller's to reply to; ready follows, or unclaim. NULL: there is no such
 * one, err says why. */
struct cox_lent *cox_lending_claim(struct cox_channel_thread *thread, uint64_t sequence,
                                   struct cox_error *err);
void cox_lending_unclaim(struct cox_channel_thread *thread, struct cox_lent *entry);

#endif
