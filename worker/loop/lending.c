#include "lending.h"

#include "channel/base/base_internal.h"
#include "channel/base/idioms.h"
#include "channel/shm/state.h"
#include "pause.h"
#include "serve_internal.h"
#include "worker_internal.h"

#include <inttypes.h>

static struct cox_lent *lending_entry(struct cox_channel_thread *thread, uint64_t sequence)
{
    return &thread->lending
                .entries[cox_geometry_frame(sequence, thread->worker->control.geometry.depth)];
}

/* With the lock, for display: the oldest request without a reply, or none. */
static void lending_show(struct cox_channel_thread *thread)
{
    if (thread->lending.count > 0)
        cox_state_set_rank(thread->line, COX_RANK_RUNNING, thread->done + 1,
                           lending_entry(thread, thread->done + 1)->taken_ns);
    else
        cox_state_set_rank(thread->line, COX_RANK_IDLE, thread->done, cox_now_coarse_ns());
}

COX_HOT static inline void lending_begin(struct cox_channel_thread *thread, uint64_t sequence)
{
    const struct cox_worker *worker = thread->worker;
    /* Again for every request: a reply of another incarnation is refused. */
    cox_state_set_incarnation(thread->line, worker->control.group_incarnation,
                              worker->options.incarnation);
    cox_channel_thread_set_taken(thread, sequence);
}

/* With the lock. Returns false if the request is in the frame of one without a reply, or if numbers
 * were skipped that may be in such frames. */
static bool lending_enter(struct cox_channel_thread *thread, uint64_t sequence)
{
    struct cox_lending *lending = &thread->lending;
    struct cox_lent *entry = lending_entry(thread, sequence);
    if (lending->count == 0)
        thread->done = sequence - 1;
    else if (entry->state != COX_LENT_FREE || sequence != thread->taken + 1)
        return false;
    *entry = (struct cox_lent){
        .sequence = sequence, .state = COX_LENT_SERVED, .taken_ns = thread->stamp_ns};
    lending->count++;
    return true;
}

/* Separate, as the next: the usual way saves no registers for it. */
__attribute__((noinline)) static bool lending_take(struct cox_channel_thread *thread,
                                                   uint64_t sequence)
{
    pthread_mutex_lock(&thread->lending.lock);
    const bool may = lending_enter(thread, sequence);
    if (may)
        lending_begin(thread, sequence);
    lending_show(thread);
    pthread_mutex_unlock(&thread->lending.lock);
    return may;
}

COX_HOT bool cox_lending_take(struct cox_channel_thread *thread, uint64_t sequence)
{
    if (thread->lending.on)
        return lending_take(thread, sequence);
    /* A number that this rank never saw was not for it. */
    thread->done = sequence - 1;
    lending_begin(thread, sequence);
    return true;
}

void cox_lending_repeat(struct cox_channel_thread *thread)
{
    cox_lending_lock(&thread->lending);
    cox_channel_thread_set_taken(thread, thread->taken);
    cox_channel_thread_set_returned(thread, thread->returned);
    cox_channel_thread_set_done(thread, thread->done);
    lending_show(thread);
    cox_lending_unlock(&thread->lending);
}

COX_HOT static void lending_give_back(struct cox_channel_thread *thread, uint64_t sequence)
{
    struct cox_gate *gate = &thread->channel.gate;
    cox_channel_thread_set_returned(thread, sequence);
    if (gate->credits)
        cox_gate_post(gate, thread->worker->options.rank, COX_WAKEUP_REQUEST_PRODUCE);
}

COX_HOT void cox_lending_return(struct cox_channel_thread *thread, uint64_t sequence)
{
    cox_lending_lock(&thread->lending);
    if (sequence == thread->done + 1)
        lending_give_back(thread, sequence);
    cox_lending_unlock(&thread->lending);
}

/* The reply whose turn it is. */
COX_HOT static inline void lending_publish(struct cox_channel_thread *thread, uint64_t sequence,
                                           enum cox_lent_wakeup wakeup)
{
    const uint32_t rank = thread->worker->options.rank;
    struct cox_gate *gate = &thread->channel.gate;
    if (thread->returned != sequence)
        lending_give_back(thread, sequence);
    cox_channel_thread_set_done(thread, sequence);
    if (wakeup == COX_LENT_TOKEN)
        cox_gate_post(gate, rank, COX_WAKEUP_RESPONSE_CONSUME);
    else if (wakeup != COX_LENT_NONE)
        cox_gate_reply(gate, rank, sequence, wakeup == COX_LENT_FAILURE);
}

/* The collector may wait on another rank's wakeup: the error channel makes it check now. A legacy
 * coordinator reads the text. */
__attribute__((noinline)) static void lending_tell(struct cox_channel_thread *thread,
                                                   uint64_t sequence, const char *text)
{
    if (!cox_gate_shared(&thread->channel.gate))
        cox_worker_tell(thread->worker, (int)thread->channel.id, sequence, text,
                        cox_deadline_after_ms(NOTICE_MS));
}

/* The reply, and those that have waited for it. */
__attribute__((noinline)) static void lending_ready(struct cox_channel_thread *thread,
                                                    uint64_t sequence, enum cox_lent_wakeup wakeup,
                                                    const char *text)
{
    struct cox_lending *lending = &thread->lending;
    uint64_t failed[COX_DEPTH_MAX];
    size_t failed_count = 0;
    pthread_mutex_lock(&lending->lock);
    struct cox_lent *entry = lending_entry(thread, sequence);
    COX_ASSERT(entry->sequence == sequence && entry->state != COX_LENT_FREE &&
               entry->state != COX_LENT_READY);
    if (entry->state == COX_LENT_REPLYING)
        cox_running_callback_end(thread);
    entry->state = COX_LENT_READY;
    entry->wakeup = wakeup;
    while (lending->count > 0 &&
           (entry = lending_entry(thread, thread->done + 1))->state == COX_LENT_READY) {
        if (entry->wakeup == COX_LENT_FAILURE)
            failed[failed_count++] = entry->sequence;
        lending_publish(thread, entry->sequence, entry->wakeup);
        entry->state = COX_LENT_FREE;
        lending->count--;
    }
    lending_show(thread);
    pthread_mutex_unlock(&lending->lock);
    for (size_t i = 0; i < failed_count; i++)
        lending_tell(thread, failed[i], failed[i] == sequence ? text : "");
}

COX_HOT void cox_lending_ready(struct cox_channel_thread *thread, uint64_t sequence,
                               enum cox_lent_wakeup wakeup, const char *text)
{
    if (thread->lending.on) {
        lending_ready(thread, sequence, wakeup, text);
        return;
    }
    lending_publish(thread, sequence, wakeup);
    if (wakeup == COX_LENT_FAILURE)
        lending_tell(thread, sequence, text);
    cox_state_set_rank(thread->line, COX_RANK_IDLE, sequence, thread->stamp_ns);
}

bool cox_lending_lend(struct cox_channel_thread *thread)
{
    const struct cox_served *served = &thread->served;
    struct cox_lending *lending = &thread->lending;
    pthread_mutex_lock(&lending->lock);
    const bool may = cox_running_callback_begin(thread) || served->kind == COX_LENT_INIT;
    if (may) {
        struct cox_lent *entry = lending_entry(thread, served->request.sequence);
        entry->state = COX_LENT_LENT;
        entry->kind = served->kind;
        entry->out_of_line = served->out_of_line;
        /* relaxed: a later call of next sees it, since `taking` comes after it. */
        atomic_store_explicit(&lending->typed, served->kind != COX_LENT_OPAQUE,
                              memory_order_relaxed);
    } else {
        cox_running_callback_end(thread);
    }
    pthread_mutex_unlock(&lending->lock);
    return may;
}

struct cox_lent *cox_lending_claim(struct cox_channel_thread *thread, uint64_t sequence,
                                   struct cox_error *err)
{
    pthread_mutex_lock(&thread->lending.lock);
    struct cox_lent *entry = lending_entry(thread, sequence);
    const bool own = entry->sequence == sequence && sequence > 0;
    const enum cox_lent_state state = own ? entry->state : COX_LENT_FREE;
    const uint64_t taken = thread->taken;
    if (state == COX_LENT_LENT)
        entry->state = COX_LENT_REPLYING;
    pthread_mutex_unlock(&thread->lending.lock);
    if (state == COX_LENT_LENT)
        return entry;
    if (state == COX_LENT_REPLYING || state == COX_LENT_READY || (own && state == COX_LENT_FREE))
        cox_fail(err, COX_STATE, "request %" PRIu64 " is replied to already", sequence);
    else if (sequence > taken)
        cox_fail(err, COX_STATE,
                 "request %" PRIu64 " was not taken: the last one that was is %" PRIu64, sequence,
                 taken);
    else
        cox_fail(err, COX_STATE,
                 "request %" PRIu64 " is not lent: it was replied to, or never was this rank's",
                 sequence);
    return NULL;
}

void cox_lending_unclaim(struct cox_channel_thread *thread, struct cox_lent *entry)
{
    pthread_mutex_lock(&thread->lending.lock);
    entry->state = COX_LENT_LENT;
    pthread_mutex_unlock(&thread->lending.lock);
}
