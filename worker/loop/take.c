/* take: a channel thread waits for its next request, and serves it. */
#include "channel/base/base_internal.h"
#include "channel/base/idioms.h"
#include "channel/shm/state.h"
#include "legacy_shim.h"
#include "worker_internal.h"

#include <coxswain/worker.h>

#include <inttypes.h>

/* Inlined twice: for channel threads, which have no deadline, and for next. */
#define COX_HOT_INLINE __attribute__((always_inline)) inline

/* Skips the frame of a request that does not ask this rank, without using a wakeup. Returns false
 * if it is the frame of a lent request. */
static bool thread_pass(struct cox_channel_thread *thread, uint64_t sequence)
{
    if (thread->lending.on)
        return cox_lending_pass(thread, sequence);
    cox_channel_thread_set_taken(thread, sequence);
    cox_channel_thread_set_returned(thread, sequence);
    cox_channel_thread_set_done(thread, sequence);
    return true;
}

/* The coordinator has woken this rank although there is no new request: it does not see what the
 * rank has stored. A rank that waits has no reply outstanding, so it can store all of it again. */
static void thread_repeat(struct cox_channel_thread *thread)
{
    if (thread->lending.on) {
        cox_lending_repeat(thread);
        return;
    }
    cox_channel_thread_set_taken(thread, thread->taken);
    cox_channel_thread_set_returned(thread, thread->returned);
    cox_channel_thread_set_done(thread, thread->done);
}

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
           /* seq_cst, as `takers`: see lending.h. */
           atomic_load_explicit(&thread->lending.woken, memory_order_seq_cst);
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
        cox_channel_thread_release_blocks(thread);
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
            thread_repeat(thread);
        /* Compares with the stored number, not with the expected one: spinning for another number
         * would miss a change. */
        const struct thread_look look = {thread, shared, said};
        if (!woken && cox_spin_until(&thread->spinner, thread_has_news, &look, deadline_ns))
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
        if (r == 0 && worker->is_legacy_shim && !worker_leaves(worker))
            cox_legacy_shim_publish(&thread->channel, *next);
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
                                      struct cox_request *ret_request, int *ret_status)
{
    const struct cox_worker *worker = thread->worker;
    const struct cox_layout_channel_state *shared =
        cox_state_channel(&worker->control, thread->channel.id);
    const uint32_t rank = worker->options.rank;
    int r;
    while ((r = thread_await(thread, &thread->next, deadline_ns)) == 0) {
        *ret_status = cox_request_read(&thread->channel, thread->next, rank, ret_request);
        if (*ret_status != COX_EMPTY)
            break;
        if (thread_is_misled(thread, thread->next, deadline_ns)) {
            if (deadline_ns != COX_DEADLINE_NEVER && cox_now_ns() >= deadline_ns)
                return COX_TIMEOUT;
            continue;
        }
        if (!thread_pass(thread, thread->next))
            return COX_CORRUPT;
        thread->next++;
    }
    if (r)
        return r;
    cox_gate_absorb(&thread->channel.gate, rank, COX_WAKEUP_REQUEST_CONSUME);
    thread->stamp_ns = cox_state_stamp(shared);
    if (thread->stamp_ns == 0)
        thread->stamp_ns = cox_now_coarse_ns();
    cox_channel_thread_record_take(thread, ret_request);
    if (thread->lending.on)
        return cox_lending_take(thread, thread->next) ? 0 : COX_CORRUPT;
    /* Again for every request: a reply of another incarnation is refused. */
    cox_state_set_incarnation(thread->line, worker->control.instance, worker->options.incarnation);
    cox_channel_thread_set_taken(thread, thread->next);
    cox_state_set_rank(thread->line, COX_RANK_TAKEN, thread->next, thread->stamp_ns);
    return 0;
}

/* Returns true if it was the goodbye. */
COX_HOT static bool thread_serve(struct cox_channel_thread *thread,
                                 const struct cox_request *request, int status)
{
    if (status == 0)
        return cox_channel_thread_serve(thread, request);
    cox_channel_thread_refuse(thread, request, status, "the frame has an impossible length");
    return false;
}

COX_HOT void *cox_channel_thread_main(void *argument)
{
    struct cox_channel_thread *thread = argument;
    struct cox_worker *worker = thread->worker;
    struct cox_request request;
    bool goodbye = false;
    int r = 0, status;
    thread->self = pthread_self();
    cox_channel_thread_begin(thread);
    while (!goodbye && (r = thread_take(thread, COX_DEADLINE_NEVER, &request, &status)) == 0) {
        goodbye = thread_serve(thread, &request, status);
        cox_state_set_rank(thread->line, COX_RANK_IDLE, thread->next, thread->stamp_ns);
        thread->next++;
    }
    cox_channel_thread_end(thread);
    if (r < 0)
        thread->failed = r;
    if (goodbye)
        cox_worker_finalized(worker);
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
                        thread->next, name);
    if (r != COX_EMPTY)
        return cox_fail(err, r, "waiting for a request of the %s channel: %s", name,
                        cox_status_text(r));
    if (worker_leaves(worker))
        return next_fail_ended(worker, err);
    /* seq_cst: as in lending.h. */
    atomic_store_explicit(&thread->lending.woken, false, memory_order_seq_cst);
    return cox_fail(err, r, "woken: no request came on the %s channel", name);
}

static bool next_is_typed(struct cox_channel_thread *thread)
{
    pthread_mutex_lock(&thread->lending.lock);
    const bool typed = thread->lending.typed;
    pthread_mutex_unlock(&thread->lending.lock);
    return typed;
}

/* Serves requests that are not lent. */
static int thread_next(struct cox_channel_thread *thread, uint64_t deadline_ns,
                       struct cox_worker_request *ret_request, struct cox_error *err)
{
    struct cox_worker_request lent = {0};
    struct cox_request request;
    int r, status;
    if (next_is_typed(thread))
        return cox_fail(err, COX_BUSY,
                        "reply to the step or init that is lent: what follows builds on it");
    thread->self = pthread_self();
    thread->lending.to = &lent;
    while ((r = thread_take(thread, deadline_ns, &request, &status)) == 0) {
        const bool goodbye = thread_serve(thread, &request, status);
        thread->next++;
        if (goodbye)
            cox_worker_finalized(thread->worker);
        if (lent.sequence)
            break;
    }
    thread->lending.to = NULL;
    if (r)
        return next_fail(thread, r, err);
    *ret_request = lent;
    return 0;
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
    const int r = thread_next(thread, deadline_ns, ret_request, err);
    atomic_store_explicit(&thread->lending.taking, false, memory_order_seq_cst);
    /* release; partner: the watcher, after which the group is left. */
    atomic_fetch_sub_explicit(&worker->takers, 1, memory_order_release);
    if (atomic_load_explicit(&worker->stopping, memory_order_acquire))
        cox_worker_stop(worker); /* the watcher waits until no thread is inside */
    return r;
}
