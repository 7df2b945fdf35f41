/* take: how a request leaves its channel: next waits for it and opens it. A channel thread answers
 * it with a callback; a caller of cox_worker_next gets it where there is none. */
#include "channel/base/base_internal.h"
#include "channel/base/idioms.h"
#include "channel/shm/state.h"
#include "serve_internal.h"
#include "worker_internal.h"

#include <coxswain/worker.h>

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>

/* Inlined twice: for channel threads, which have no deadline, and for cox_worker_next. */
#define COX_HOT_INLINE __attribute__((always_inline)) inline

/* acquire: partner is the release of stop; its token comes after it. */
COX_HOT static bool worker_leaves(const struct cox_worker *worker)
{
    return atomic_load_explicit(&worker->stopping, memory_order_acquire) ||
           cox_state_aborted(&worker->control);
}

/* Returns true if the wait ends: the worker leaves, or the caller of next is woken. */
COX_HOT static bool thread_ends(const struct cox_channel_thread *thread)
{
    return worker_leaves(thread->worker) ||
           /* seq_cst, as `taking`: see lending.h. */
           (thread->lending.on &&
            atomic_load_explicit(&thread->lending.woken, memory_order_seq_cst));
}

struct thread_look {
    const struct cox_channel_thread *thread;
    const struct cox_layout_channel_state *shared;
    uint64_t published;
};

COX_HOT static bool thread_has_news(const void *context)
{
    const struct thread_look *look = context;
    return cox_state_published(look->shared) != look->published || thread_ends(look->thread);
}

/* Blocks until request `next` or a later one is published, and moves *next to the oldest that is
 * still in the ring. If the coordinator's number is below what was published before, it stores it
 * again and wakes the rank. Returns 0; COX_EMPTY: the worker leaves, or the caller is woken;
 * COX_TIMEOUT; -errno. */
COX_HOT_INLINE static int thread_await(struct cox_channel_thread *thread, uint64_t *next,
                                       uint64_t deadline_ns)
{
    struct cox_worker *worker = thread->worker;
    const struct cox_layout_channel_state *shared =
        cox_state_channel(&worker->control, thread->channel.id);
    uint32_t depth = worker->control.geometry.depth;
    bool woken = false;
    for (;;) {
        /* Read before the checks: later events end the wait. */
        uint32_t wake_sequence =
            cox_gate_wake_sequence(&thread->channel.gate, COX_WAKEUP_REQUEST_CONSUME);
        if (thread_ends(thread))
            return COX_EMPTY;
        cox_channel_thread_release_payloads(thread);
        const uint64_t said = cox_state_published(shared);
        uint64_t published = said;
        /* A frame that asks this rank is not reused before the rank has returned it: requests older
         * than the ring were for others. */
        if (published >= *next && published - *next >= depth) {
            /* Unless a process has overwritten the number: a rank that followed it would never
             * return to the right one. A request for this rank is still in its frame. */
            if (cox_state_frame_holds(shared, depth, published))
                *next = published - depth + 1;
            else if (cox_state_published(shared) != published)
                continue; /* the frame was reused meanwhile, and the number has grown */
            else
                published = cox_state_frame_holds(shared, depth, *next) ? *next : *next - 1;
        }
        if (published >= *next)
            return 0;
        if (deadline_ns != COX_DEADLINE_NEVER && cox_now_ns() >= deadline_ns)
            return COX_TIMEOUT;
        if (woken)
            /* The coordinator has woken this rank although there is no new request: it does not see
             * what the rank has stored. */
            cox_lending_repeat(thread);
        /* Compares with the stored number, not with the expected one: spinning for another number
         * would miss a change. */
        const struct thread_look look = {thread, shared, said};
        if (!woken && cox_spin_once(&thread->spinner, *next, thread_has_news, &look, deadline_ns))
            continue;
        /* Nothing is outstanding: block without a timeout. The coordinator wakes again if this
         * wakeup gets lost. */
        int r = cox_gate_wait(&thread->channel.gate, worker->options.rank,
                              COX_WAKEUP_REQUEST_CONSUME, wake_sequence, deadline_ns);
        if (r < 0)
            return r;
        woken = true;
        /* Without a control region the token is the event, unless it was posted by stop.
         * cox_worker_wake posts none: if next is woken too, a later call returns this request. */
        if (r == 0 && thread->channel.tokens && !worker_leaves(worker))
            cox_tokens_taken(thread->channel.tokens, *next);
    }
}

/* Returns true if `published` was overwritten: the request is still to come, and a token has come,
 * or the deadline. */
static bool thread_is_misled(struct cox_channel_thread *thread, uint64_t next, uint64_t deadline_ns)
{
    const struct cox_worker *worker = thread->worker;
    const struct cox_layout_channel_state *shared =
        cox_state_channel(&worker->control, thread->channel.id);
    uint32_t wake_sequence =
        cox_gate_wake_sequence(&thread->channel.gate, COX_WAKEUP_REQUEST_CONSUME);
    if (!cox_state_frame_behind(shared, worker->control.geometry.depth, next))
        return false;
    cox_gate_wait(&thread->channel.gate, worker->options.rank, COX_WAKEUP_REQUEST_CONSUME,
                  wake_sequence, deadline_ns);
    return true;
}

/* Takes the next request of this rank. *ret_status: the result of cox_request_read. Returns as
 * thread_await; COX_CORRUPT: it is in the frame of a lent one. */
COX_HOT_INLINE static int thread_take(struct cox_channel_thread *thread, uint64_t deadline_ns,
                                      int *ret_status)
{
    const struct cox_worker *worker = thread->worker;
    const struct cox_layout_channel_state *shared =
        cox_state_channel(&worker->control, thread->channel.id);
    const uint32_t rank = worker->options.rank;
    uint64_t next = thread->taken + 1;
    int r;
    while ((r = thread_await(thread, &next, deadline_ns)) == 0) {
        *ret_status = cox_request_read(&thread->channel, next, rank, &thread->served.request);
        if (*ret_status != COX_EMPTY)
            break;
        if (thread_is_misled(thread, next, deadline_ns)) {
            if (deadline_ns != COX_DEADLINE_NEVER && cox_now_ns() >= deadline_ns)
                return COX_TIMEOUT;
            continue;
        }
        /* It does not ask this rank: skipped, without using a wakeup. */
        if (!cox_lending_take(thread, next))
            return COX_CORRUPT;
        cox_lending_ready(thread, next, COX_LENT_NONE, "");
        next++;
    }
    if (r)
        return r;
    cox_gate_absorb(&thread->channel.gate, rank, COX_WAKEUP_REQUEST_CONSUME);
    thread->stamp_ns = cox_state_stamp(shared);
    if (thread->stamp_ns == 0)
        thread->stamp_ns = cox_now_coarse_ns();
    cox_channel_thread_record_take(thread, &thread->served.request);
    if (!cox_lending_take(thread, next))
        return COX_CORRUPT;
    cox_channel_thread_set_state(thread, COX_RANK_TAKEN, next);
    return 0;
}

/* The next request that is to be answered; it is in thread->served. Returns as thread_take. */
COX_HOT_INLINE static int thread_next(struct cox_channel_thread *thread, uint64_t deadline_ns)
{
    int r, status;
    do
        r = thread_take(thread, deadline_ns, &status);
    while (r == 0 && !cox_channel_thread_open(thread, status));
    return r;
}

COX_HOT void *cox_channel_thread_main(void *argument)
{
    struct cox_channel_thread *thread = argument;
    struct cox_worker *worker = thread->worker;
    int r;
    thread->self = pthread_self();
    char name[16];
    snprintf(name, sizeof name, "cox-%.11s", cox_channel_name(thread->channel.id));
    pthread_setname_np(thread->self, name);
    cox_channel_thread_begin(thread);
    while ((r = thread_next(thread, COX_DEADLINE_NEVER)) == 0)
        cox_channel_thread_answer(thread);
    cox_channel_thread_end(thread);
    if (r < 0)
        thread->failed = r;
    atomic_fetch_sub_explicit(&worker->running, 1, memory_order_release);
    cox_worker_stop(worker); /* the goodbye of one channel is for all, and wakes run */
    return NULL;
}

/* ---- the caller of next ---- */

/* Fails with the reason why there are no more requests. */
static int next_fail_ended(const struct cox_worker *worker, struct cox_error *err)
{
    if (atomic_load_explicit(&worker->orphaned, memory_order_acquire))
        return cox_fail(err, COX_PEER_DEAD, "the coordinator (process %jd) has died",
                        (intmax_t)worker->coordinator.pid);
    if (atomic_load_explicit(&worker->finalized, memory_order_acquire) ||
        cox_state_aborted(&worker->control))
        return cox_fail(err, COX_CLOSED, "the coordinator has ended the group");
    return cox_fail(err, COX_CLOSED, "the worker was stopped");
}

static int next_fail(struct cox_channel_thread *thread, int r, struct cox_error *err)
{
    const struct cox_worker *worker = thread->worker;
    const char *name = cox_channel_name(thread->channel.id);
    if (r == COX_TIMEOUT)
        return cox_fail(err, r, "no request came on the %s channel until the deadline", name);
    if (r == COX_CORRUPT)
        return cox_fail(err, r,
                        "request %" PRIu64
                        " of the %s channel lies in the frame of one that is not replied to",
                        thread->taken + 1, name);
    if (r != COX_EMPTY)
        return cox_fail(err, r, "waiting for a request of the %s channel: %s", name,
                        cox_status_text(r));
    if (worker_leaves(worker))
        return next_fail_ended(worker, err);
    /* seq_cst: as in lending.h. */
    atomic_store_explicit(&thread->lending.woken, false, memory_order_seq_cst);
    return cox_fail(err, r, "woken: no request came on the %s channel", name);
}

/* Whether the caller of next gets the opened request, as there is no callback for it. */
static bool thread_lends(const struct cox_channel_thread *thread)
{
    const struct cox_worker_callbacks *callbacks = thread->worker->callbacks;
    switch (thread->served.kind) {
    case COX_LENT_OPAQUE:
        return !callbacks->opaque;
    case COX_LENT_STEP:
        return !callbacks->execute;
    case COX_LENT_INIT: /* without a configuration the library replies */
        return !callbacks->init && thread->message->n_config > 0;
    default:
        return false;
    }
}

/* Returns false if the worker is paused: then the request was refused. */
static bool thread_lend(struct cox_channel_thread *thread, struct cox_worker_request *ret_request)
{
    const struct cox_served *served = &thread->served;
    const struct cox_request *request = &served->request;
    struct cox_worker_request lent = {
        .channel = thread->channel.id, .type = request->type, .sequence = request->sequence};
    if (served->kind == COX_LENT_OPAQUE) {
        lent.bytes = request->bytes;
        lent.size = request->size;
        lent.reply = served->opaque.slot;
        lent.reply_capacity = served->opaque.slot_capacity;
    } else if (served->kind == COX_LENT_STEP) {
        lent.batch = served->step.batch;
        lent.outputs = served->step.outputs;
    } else {
        lent.init = &served->init->request;
    }
    if (!cox_lending_lend(thread)) {
        cox_channel_thread_refuse(thread, cox_channel_thread_fail_paused(thread));
        cox_channel_thread_close(thread);
        return false;
    }
    *ret_request = lent; /* not from `served`: another thread may have replied meanwhile */
    return true;
}

static int taker_next(struct cox_channel_thread *thread, uint64_t deadline_ns,
                      struct cox_worker_request *ret_request, struct cox_error *err)
{
    int r;
    if (atomic_load_explicit(&thread->lending.typed, memory_order_acquire))
        return cox_fail(err, COX_BUSY,
                        "reply to the step or init that is lent: what follows builds on it");
    thread->self = pthread_self();
    while ((r = thread_next(thread, deadline_ns)) == 0) {
        if (!thread_lends(thread))
            cox_channel_thread_answer(thread);
        else if (thread_lend(thread, ret_request))
            return 0;
    }
    return next_fail(thread, r, err);
}

int cox_worker_next(struct cox_worker *worker, enum cox_channel_id channel, uint64_t deadline_ns,
                    struct cox_worker_request *ret_request, struct cox_error *err)
{
    if (err)
        cox_error_clear(err);
    if ((unsigned)channel >= COX_TWO_WAY_COUNT)
        return cox_fail(err, COX_INVALID, "channel %d has no requests", (int)channel);
    struct cox_channel_thread *thread = &worker->threads[channel];
    if (!worker->started || !thread->lending.on)
        return cox_fail(err, COX_STATE,
                        "the %s channel is not taken: name it to cox_worker_start first",
                        cox_channel_name(channel));
    /* seq_cst; partners: the store below, by the thread that was inside before; the watcher. */
    if (atomic_exchange_explicit(&thread->lending.taking, true, memory_order_seq_cst))
        return cox_fail(err, COX_BUSY,
                        "another thread waits for the next request of the %s channel",
                        cox_channel_name(channel));
    atomic_fetch_add_explicit(&worker->takers, 1, memory_order_relaxed);
    const int r = taker_next(thread, deadline_ns, ret_request, err);
    atomic_store_explicit(&thread->lending.taking, false, memory_order_seq_cst);
    /* release; partner: the watcher, after which the group is left. */
    atomic_fetch_sub_explicit(&worker->takers, 1, memory_order_release);
    if (atomic_load_explicit(&worker->stopping, memory_order_acquire))
        cox_worker_stop(worker); /* the watcher waits until no thread is inside */
    return r;
}
