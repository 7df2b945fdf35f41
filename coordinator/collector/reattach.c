/*
 * The collector's part in replacing a dead rank: it detaches the rank, resets its lines and
 * wakeups, and attaches it again.
 */
#include "collector_internal.h"

#include "channel/base/fault.h"

/* A dead rank is pending in no request any more. So no thread reads its words, whose memory is
 * replaced next. */
static void collector_drop_pending(struct cox_collector *collector, uint32_t rank)
{
    for (uint32_t frame = 0; frame < collector_geometry(collector)->depth; frame++)
        if (cox_rank_set_has(&collector->entries[frame].asked, rank))
            cox_rank_set_add(&collector->entries[frame].consumed, rank);
}

int cox_collector_detach(struct cox_collector *collector, uint32_t rank, uint64_t deadline_ns)
{
    /* Under submit_lock: every thread that has begun a request has opened its gate by now. */
    pthread_mutex_lock(&collector->submit_lock);
    pthread_mutex_lock(&collector->lock);
    /* release: partner is cox_rank_is_detached, in threads without these locks. */
    atomic_store_explicit(&collector->records[rank].detached, true, memory_order_release);
    pthread_mutex_unlock(&collector->submit_lock);
    /* All requests that ask it end soon, because it is dead. */
    const int r = cox_collector_await_rank(collector, rank, deadline_ns);
    if (r == 0)
        collector_drop_pending(collector, rank);
    pthread_mutex_unlock(&collector->lock);
    cox_fault_point(COX_FAULT_RANK_LEFT_OUT);
    return r;
}

static void collector_reset_line(struct cox_collector *collector, uint32_t rank)
{
    const struct cox_channel *channel = collector->channel;
    cox_state_reset_line(cox_state_line(channel->control, rank, channel->id), collector->published);
    /* Stored again: the new process compares the two. */
    cox_state_set_published(cox_state_channel(channel->control, channel->id), collector->published);
}

void cox_collector_reset_line(struct cox_collector *collector, uint32_t rank)
{
    pthread_mutex_lock(&collector->lock);
    collector_reset_line(collector, rank);
    pthread_mutex_unlock(&collector->lock);
}

int cox_collector_reset_rank(struct cox_collector *collector, uint32_t rank,
                             int ret_fds[COX_WAKEUP_COUNT], struct cox_error *err)
{
    struct cox_channel *channel = collector->channel;
    const struct cox_geometry *geometry = collector_geometry(collector);
    pthread_mutex_lock(&collector->lock);
    /* No thread waits on the rank's wakeups: the collector does so only while a request in flight
     * asks the rank. */
    cox_tokens_reset(channel->tokens, rank, collector->published,
                     cox_rank_incarnation(&collector->records[rank]));
    int r = cox_gate_reset(&channel->gate, channel->id, rank, geometry->depth, ret_fds, err);
    if (r == 0)
        collector_reset_line(collector, rank);
    pthread_mutex_unlock(&collector->lock);
    return r;
}

void cox_collector_attach(struct cox_collector *collector, uint32_t rank)
{
    pthread_mutex_lock(&collector->lock);
    atomic_store_explicit(&collector->records[rank].detached, false, memory_order_release);
    pthread_mutex_unlock(&collector->lock);
    cox_fault_point(COX_FAULT_RANK_ADMITTED);
}
