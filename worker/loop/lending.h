/*
 * lending: the requests of a channel between next and their replies: which of them are with a
 * callback or a caller (worker.h), and which replies wait for their turn.
 *
 * A request occupies the entry of its frame, from next until its reply is published:
 *
 *     free -> served -> ready -> free              a callback replies, or it is refused or skipped
 *             served -> lent -> replying -> ready  a caller of cox_worker_next replies
 *                               replying -> lent   the reply failed, the caller may try again
 *
 * ready: the reply is in its slot, or the request has no reply. Ready entries are published in the
 * order of the requests, each with its wakeup. This moves `done`, which the coordinator reads.
 *
 * Threads: on a channel that callers take from, lock protects every change of an entry and of the
 *   rank's line in the shared state. The thread inside next owns served entries, the replying
 *   thread owns entries in replying. On other channels the channel thread alone has one request at
 *   a time: it needs neither lock nor entries.
 * Ownership: the entries are part of the channel thread.
 * Blocks: for the lock; no thread waits for anything while it holds it.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_WORKER_LENDING_H
#define COX_WORKER_LENDING_H

#include "channel/shm/layout.h"

#include <coxswain/worker.h>

#include <pthread.h>
#include <stdatomic.h>

struct cox_channel_thread;

enum cox_lent_state {
    COX_LENT_FREE = 0,
    COX_LENT_SERVED,
    COX_LENT_LENT,
    COX_LENT_REPLYING,
    COX_LENT_READY,
};

/* A message is never lent: its callback fills an arena. */
enum cox_lent_kind { COX_LENT_OPAQUE, COX_LENT_STEP, COX_LENT_INIT, COX_LENT_MESSAGE };

/* The wakeup that accompanies the publication of a reply. */
enum cox_lent_wakeup {
    /* none: the request has no reply */
    COX_LENT_NONE,
    /* wakes the coordinator */
    COX_LENT_REPLY,
    /* wakes the coordinator, also if other replies are missing: the reply is a failure */
    COX_LENT_FAILURE,
    /* posts the token of a legacy rank that replies without a payload */
    COX_LENT_TOKEN,
};

struct cox_lent {
    uint64_t sequence;
    enum cox_lent_state state;
    enum cox_lent_kind kind;
    enum cox_lent_wakeup wakeup;
    /* the request came out of line: its bytes are in the channel thread's view of a payload */
    bool out_of_line;
    uint64_t taken_ns;
};

struct cox_lending {
    /* callers take from the channel; set at start */
    bool on;
    pthread_mutex_t lock;
    /* indexed by frame */
    struct cox_lent entries[COX_DEPTH_MAX];
    /* of these not free */
    uint32_t count;
    /* A step or an init is lent. release, by the replying thread as the last part of its reply;
     * partner: next, which takes nothing else before. */
    _Atomic bool typed;
    /* A thread is inside next. seq_cst; partner is `woken`: either that thread sees `woken`, or the
     * watcher sees `taking` and posts a wakeup. */
    _Atomic bool taking;
    /* the present call of next, or else the following one, returns COX_EMPTY */
    _Atomic bool woken;
};

static inline void cox_lending_lock(struct cox_lending *lending)
{
    if (lending->on)
        pthread_mutex_lock(&lending->lock);
}

static inline void cox_lending_unlock(struct cox_lending *lending)
{
    if (lending->on)
        pthread_mutex_unlock(&lending->lock);
}

/* Begins to serve a request that next has found. Returns false if earlier ones without a reply
 * forbid that: the shared state is invalid, because no coordinator reuses their frames. */
bool cox_lending_take(struct cox_channel_thread *thread, uint64_t sequence);
/* Stores the published values again, for a coordinator that does not see them. */
void cox_lending_repeat(struct cox_channel_thread *thread);
/* The frame is not read any more: returns it now, unless an earlier request is without a reply;
 * then with the reply. */
void cox_lending_return(struct cox_channel_thread *thread, uint64_t sequence);
/* The reply is in its slot: publishes it as soon as all earlier ones are published, and announces
 * failures on the error channel where the coordinator waits for one rank at a time. text: of a
 * failure. */
void cox_lending_ready(struct cox_channel_thread *thread, uint64_t sequence,
                       enum cox_lent_wakeup wakeup, const char *text);

/* Lends the request that was opened last (serve_internal.h). Returns false if the worker is paused,
 * and the request is no init. */
bool cox_lending_lend(struct cox_channel_thread *thread);
/* Claims a lent request for a reply; the caller then calls ready or unclaim. Returns NULL if the
 * request is not lent; err says why. */
struct cox_lent *cox_lending_claim(struct cox_channel_thread *thread, uint64_t sequence,
                                   struct cox_error *err);
void cox_lending_unclaim(struct cox_channel_thread *thread, struct cox_lent *entry);

#endif
