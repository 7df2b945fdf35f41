/*
 * lending: the requests of a taken channel (worker.h): which of them are with a caller, and which
 * replies wait for their turn.
 *
 * A request occupies the entry of its frame, from next until its reply is published:
 *
 *     free -> served -> ready -> free              next itself replies
 *             served -> lent -> replying -> ready  a caller replies
 *                               replying -> lent   the reply failed, the caller may try again
 *
 * ready: the reply is in its slot, or the request has no reply. Ready entries are published in the
 * order of the requests, each with its wakeup. This moves `done`, which the coordinator reads.
 *
 * Threads: lock protects every change of an entry and of the rank's line in the shared state. The
 *   thread inside next owns served entries, the replying thread owns entries in replying.
 * Ownership: the entries are part of the channel thread.
 * Blocks: for the lock; no thread waits for anything while it holds it.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_WORKER_LENDING_H
#define COX_WORKER_LENDING_H

#include "channel/shm/layout.h"
#include "pause.h"

#include <coxswain/worker.h>

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
    bool in_block;
    uint64_t taken_ns;
};

struct cox_lending {
    /* the channel is taken; set at start */
    bool on;
    pthread_mutex_t lock;
    /* protects the reply payloads (out_of_line.c), since several threads may reply */
    pthread_mutex_t blocks_lock;
    /* indexed by frame */
    struct cox_lent entries[COX_DEPTH_MAX];
    /* number of requests that are with a caller or in a callback; under lock */
    uint32_t out;
    /* a step or an init is lent; under lock */
    bool typed;
    /* the last request came out of line: release what the arena has grown for it */
    bool trims;
    /* the lent step or init; NULL: none */
    struct cox_served_step *step;
    struct cox_served_init *init;
    /* A thread is inside next. seq_cst; partner is `woken`: either that thread sees `woken`, or the
     * watcher sees `taking` and posts a wakeup. */
    _Atomic bool taking;
    /* the present call of next, or else the following one, returns COX_EMPTY */
    _Atomic bool woken;
    /* the struct that next fills in; its sequence is 0 until a request is lent. NULL: no thread is
     * inside next. */
    struct cox_worker_request *to;
};

void cox_lending_init(struct cox_lending *lending);
void cox_lending_deinit(struct cox_lending *lending);

/* Begins to serve a request that next has found. Returns false if its frame still holds an earlier
 * request: the shared state is invalid, because no coordinator reuses a frame that early. */
bool cox_lending_take(struct cox_channel_thread *thread, uint64_t sequence);
/* Skips a request that does not ask this rank. Returns false as take does. */
bool cox_lending_pass(struct cox_channel_thread *thread, uint64_t sequence);
/* Stores the published values again, for a coordinator that does not see them. */
void cox_lending_repeat(struct cox_channel_thread *thread);
/* The reply is in its slot: publishes it as soon as all earlier ones are published. */
void cox_lending_ready(struct cox_channel_thread *thread, uint64_t sequence,
                       enum cox_lent_wakeup wakeup);

/* Call before a callback or a caller gets the request. Returns false if the worker is paused: then
 * the callback or caller must not get it. Call leave in both cases. */
bool cox_lending_enter(struct cox_channel_thread *thread, uint64_t sequence, uint32_t type);
void cox_lending_leave(struct cox_channel_thread *thread);

/* As cox_channel_thread_call (pause.h), on a taken channel. */
int cox_lending_call(struct cox_channel_thread *thread, const struct cox_request *request,
                     enum cox_callback_kind kind, int (*callback)(void *argument), void *argument);

/* Lends the request that is being served; call enter first. */
void cox_lending_lend(struct cox_channel_thread *thread, uint64_t sequence, uint32_t type,
                      enum cox_lent_kind kind, bool in_block);
/* Claims a lent request for a reply; the caller then calls ready or unclaim. Returns NULL if the
 * request is not lent; err says why. */
struct cox_lent *cox_lending_claim(struct cox_channel_thread *thread, uint64_t sequence,
                                   struct cox_error *err);
void cox_lending_unclaim(struct cox_channel_thread *thread, struct cox_lent *entry);

#endif
