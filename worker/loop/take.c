/* take: a channel thread waits for its next request, and serves it. */
#include "channel/base/fault.h"
#include "channel/shm/state.h"
#include "legacy_shim.h"
#include "worker_internal.h"

/* A rank that is not asked passes the frame without touching a bell. */
static void thread_pass(struct cox_channel_thread *thread, uint64_t sequence)
{
    cox_channel_thread_set_taken(thread, sequence);
    cox_channel_thread_set_returned(thread, sequence);
    cox_channel_thread_set_done(thread, sequence);
}

/* Somebody rang and there is no news: the coordinator does not see what this rank has said. Who is
 * asleep owes nothing, so all of it can be said again, as it was. */
static void thread_repeat(struct cox_channel_thread *thread)
{
    cox_channel_thread_set_taken(thread, thread->taken);
    cox_channel_thread_set_returned(thread, thread->returned);
    cox_channel_thread_set_done(thread, thread->done);
}

COX_HOT static bool thread_leaving(const struct cox_channel_thread *thread)
{
    return atomic_load_explicit(&thread->worker->stopping, memory_order_acquire) ||
           cox_state_aborted(&thread->worker->control);
}

struct thread_look {
    const struct cox_channel_thread *thread;
    const struct cox_layout_channel_state *shared;
    uint64_t published;
};

COX_HOT static bool thread_has_news(const void *context)
{
    const struct thread_look *look = context;
    return cox_state_published(look->shared) != look->published || thread_leaving(look->thread);
}

/* Sleeps until request `next` or a later one is published, and moves *next to what is still in the
 * ring. A number below what was published is said again by the coordinator, which rings for it.
 * False: the worker leaves. */
COX_HOT static bool thread_await(struct cox_channel_thread *thread, uint64_t *next)
{
    struct cox_worker *worker = thread->worker;
    const struct cox_layout_channel_state *shared =
        cox_state_channel(&worker->control, thread->channel.id);
    uint32_t depth = worker->control.geometry.depth;
    bool rung = false;
    for (;;) {
        /* Before the looks: what comes after them is not slept through. */
        uint32_t ticket = cox_gate_ticket(&thread->channel.gate, COX_BELL_REQUEST_CONSUME);
        if (thread_leaving(thread))
            return false;
        cox_channel_thread_release_blocks(thread);
        const uint64_t said = cox_state_published(shared);
        uint64_t published = said;
        /* A frame that names this rank is not reused before it is returned: what is older than the
         * ring was for others. */
        if (published >= *next && published - *next >= depth) {
            /* Unless somebody wrote over the number: whoever followed it would never come back.
             * What was meant for this rank is still in its frame. */
            if (cox_state_frame_holds(shared, depth, published))
                *next = published - depth + 1;
            else if (cox_state_published(shared) != published)
                continue; /* a frame was taken again meanwhile, and the number has moved on */
            else
                published = cox_state_frame_holds(shared, depth, *next) ? *next : *next - 1;
        }
        if (published >= *next)
            return true;
        if (rung)
            thread_repeat(thread);
        /* What is said there, not what is believed of it: who looks for another number sleeps. */
        const struct thread_look look = {thread, shared, said};
        if (!rung && cox_spin_until(&thread->spinner, thread_has_news, &look, COX_DEADLINE_NEVER))
            continue;
        /* Nothing is owed: sleep without a timeout. The coordinator rings again if this wake-up got
         * lost. */
        int r = cox_gate_wait(&thread->channel.gate, worker->options.rank, COX_BELL_REQUEST_CONSUME,
                              ticket, COX_DEADLINE_NEVER);
        if (r < 0) {
            thread->failed = r;
            return false;
        }
        rung = true;
        /* Without a control region the token is the news, unless it is the one that stop rings
         * with. */
        if (r == 0 && worker->is_legacy_shim && !thread_leaving(thread))
            cox_legacy_shim_publish(&thread->channel, *next);
    }
}

/* Somebody wrote over `published`: the request is still to come, and with it a token. True: so it
 * was, and a token has come. */
static bool thread_is_misled(struct cox_channel_thread *thread, uint64_t next)
{
    const struct cox_worker *worker = thread->worker;
    const struct cox_layout_channel_state *shared =
        cox_state_channel(&worker->control, thread->channel.id);
    uint32_t ticket = cox_gate_ticket(&thread->channel.gate, COX_BELL_REQUEST_CONSUME);
    if (!cox_state_frame_behind(shared, worker->control.geometry.depth, next))
        return false;
    cox_gate_wait(&thread->channel.gate, worker->options.rank, COX_BELL_REQUEST_CONSUME, ticket,
                  COX_DEADLINE_NEVER);
    return true;
}

COX_HOT void *cox_channel_thread_main(void *argument)
{
    struct cox_channel_thread *thread = argument;
    struct cox_worker *worker = thread->worker;
    struct cox_gate *gate = &thread->channel.gate;
    uint32_t rank = worker->options.rank;
    uint64_t next = thread->taken + 1;
    bool goodbye = false;
    thread->self = pthread_self();
    thread->spinner.budget_ns = worker->control.geometry.spin_ns;
    cox_channel_thread_begin(thread);
    while (!goodbye && thread_await(thread, &next)) {
        struct cox_request request;
        int r = cox_request_read(&thread->channel, next, rank, &request);
        if (r == COX_EMPTY && !thread_is_misled(thread, next))
            thread_pass(thread, next++);
        if (r == COX_EMPTY)
            continue;
        cox_gate_settle(gate, rank, COX_BELL_REQUEST_CONSUME);
        /* Again for every request: an answer from another life is refused. */
        cox_state_set_life(thread->line, worker->control.epoch, worker->options.generation);
        cox_channel_thread_set_taken(thread, next);
        thread->stamp_ns = cox_state_stamp(cox_state_channel(&worker->control, thread->channel.id));
        if (thread->stamp_ns == 0)
            thread->stamp_ns = cox_now_coarse_ns();
        cox_state_set_rank(thread->line, COX_RANK_TAKEN, next, thread->stamp_ns);
        if (r)
            cox_channel_thread_refuse(thread, &request, r, "the frame has an impossible length");
        else
            goodbye = cox_channel_thread_serve(thread, &request);
        cox_state_set_rank(thread->line, COX_RANK_IDLE, next, thread->stamp_ns);
        next++;
    }
    cox_channel_thread_end(thread);
    if (goodbye) {
        atomic_store_explicit(&worker->finalized, true, memory_order_release);
        atomic_store_explicit(&worker->stopping, true, memory_order_release);
    }
    atomic_fetch_sub_explicit(&worker->running, 1, memory_order_release);
    cox_worker_stop(worker); /* the goodbye of one channel is the goodbye of all; and wakes run */
    return NULL;
}
