#include "lending.h"

#include "channel/base/base_internal.h"
#include "channel/base/idioms.h"
#include "channel/shm/state.h"
#include "pause.h"
#include "serve_internal.h"
#include "worker_internal.h"

#include <inttypes.h>

void cox_lending_init(struct cox_lending *lending)
{
    pthread_mutex_init(&lending->lock, NULL);
    pthread_mutex_init(&lending->blocks_lock, NULL);
}

void cox_lending_deinit(struct cox_lending *lending)
{
    pthread_mutex_destroy(&lending->blocks_lock);
    pthread_mutex_destroy(&lending->lock);
}

static struct cox_lent *lending_entry(struct cox_channel_thread *thread, uint64_t sequence)
{
    return &thread->lending
                .entries[cox_geometry_frame(sequence, thread->worker->control.geometry.depth)];
}

/* For display: the oldest request without a reply, or none. */
static void lending_set_state(struct cox_channel_thread *thread)
{
    for (uint64_t sequence = thread->done + 1; sequence <= thread->taken; sequence++) {
        const struct cox_lent *entry = lending_entry(thread, sequence);
        if (entry->sequence == sequence && entry->state != COX_LENT_READY) {
            cox_state_set_rank(thread->line, COX_RANK_RUNNING, sequence, entry->taken_ns);
            return;
        }
    }
    cox_state_set_rank(thread->line, COX_RANK_IDLE, thread->taken, cox_now_coarse_ns());
}

static void lending_publish(struct cox_channel_thread *thread, const struct cox_lent *entry)
{
    const uint32_t rank = thread->worker->options.rank;
    struct cox_gate *gate = &thread->channel.gate;
    cox_channel_thread_set_returned(thread, entry->sequence);
    cox_gate_post(gate, rank, COX_WAKEUP_REQUEST_PRODUCE);
    cox_channel_thread_set_done(thread, entry->sequence);
    if (entry->wakeup == COX_LENT_TOKEN)
        cox_gate_post(gate, rank, COX_WAKEUP_RESPONSE_CONSUME);
    else if (entry->wakeup != COX_LENT_NONE)
        cox_gate_reply(gate, rank, entry->sequence, entry->wakeup == COX_LENT_FAILURE);
}

/* With the lock: publishes the replies whose turn it is. Returns how many of them are failures;
 * ret_failed has room for as many as there are entries. */
static size_t lending_advance(struct cox_channel_thread *thread, uint64_t *ret_failed)
{
    size_t failed_count = 0;
    for (;;) {
        struct cox_lent *entry = lending_entry(thread, thread->done + 1);
        if (entry->sequence != thread->done + 1 || entry->state != COX_LENT_READY)
            break;
        if (entry->wakeup == COX_LENT_FAILURE)
            ret_failed[failed_count++] = entry->sequence;
        lending_publish(thread, entry);
        entry->state = COX_LENT_FREE;
    }
    lending_set_state(thread);
    return failed_count;
}

/* With the lock. A number that this rank never saw was not for it. Only if a process overwrites the
 * shared state it sees one again, or skips one while replies are outstanding. */
static bool lending_begin(struct cox_channel_thread *thread, uint64_t sequence,
                          enum cox_lent_state state)
{
    struct cox_lending *lending = &thread->lending;
    bool owes = false;
    for (uint32_t i = 0; i < COX_DEPTH_MAX; i++)
        owes = owes || lending->entries[i].state != COX_LENT_FREE;
    if (!owes)
        thread->done = sequence - 1;
    struct cox_lent *entry = lending_entry(thread, sequence);
    if (entry->state != COX_LENT_FREE)
        return false;
    for (uint64_t gap = thread->taken + 1; owes && gap < sequence; gap++)
        *lending_entry(thread, gap) = (struct cox_lent){.sequence = gap, .state = COX_LENT_READY};
    *entry =
        (struct cox_lent){.sequence = sequence, .state = state, .taken_ns = cox_now_coarse_ns()};
    /* Again for every request: a reply of another incarnation is refused. */
    cox_state_set_incarnation(thread->line, thread->worker->control.instance,
                              thread->worker->options.incarnation);
    cox_channel_thread_set_taken(thread, sequence);
    return true;
}

bool cox_lending_take(struct cox_channel_thread *thread, uint64_t sequence)
{
    pthread_mutex_lock(&thread->lending.lock);
    const bool begun = lending_begin(thread, sequence, COX_LENT_SERVED);
    lending_set_state(thread);
    pthread_mutex_unlock(&thread->lending.lock);
    return begun;
}

bool cox_lending_pass(struct cox_channel_thread *thread, uint64_t sequence)
{
    uint64_t failed[COX_DEPTH_MAX];
    pthread_mutex_lock(&thread->lending.lock);
    const bool begun = lending_begin(thread, sequence, COX_LENT_READY);
    lending_advance(thread, failed); /* none: a failure before it was published when it came */
    pthread_mutex_unlock(&thread->lending.lock);
    return begun;
}

void cox_lending_repeat(struct cox_channel_thread *thread)
{
    pthread_mutex_lock(&thread->lending.lock);
    cox_channel_thread_set_taken(thread, thread->taken);
    cox_channel_thread_set_returned(thread, thread->returned);
    cox_channel_thread_set_done(thread, thread->done);
    lending_set_state(thread);
    pthread_mutex_unlock(&thread->lending.lock);
}

void cox_lending_ready(struct cox_channel_thread *thread, uint64_t sequence,
                       enum cox_lent_wakeup wakeup)
{
    uint64_t failed[COX_DEPTH_MAX];
    pthread_mutex_lock(&thread->lending.lock);
    struct cox_lent *entry = lending_entry(thread, sequence);
    COX_ASSERT(entry->sequence == sequence && entry->state != COX_LENT_READY);
    entry->state = COX_LENT_READY;
    entry->wakeup = wakeup;
    const size_t failed_count = lending_advance(thread, failed);
    pthread_mutex_unlock(&thread->lending.lock);
    /* The collector may wait on another rank's wakeup: the error channel makes it check now. The
     * text is in the reply. */
    for (size_t i = 0; i < failed_count && !cox_gate_shared(&thread->channel.gate); i++)
        cox_worker_tell(thread->worker, (int)thread->channel.id, failed[i], "",
                        cox_deadline_after_ms(NOTICE_MS));
}

bool cox_lending_enter(struct cox_channel_thread *thread, uint64_t sequence, uint32_t type)
{
    pthread_mutex_lock(&thread->lending.lock);
    thread->lending.out++;
    cox_running_callback_lend(thread, sequence, type);
    pthread_mutex_unlock(&thread->lending.lock);
    return !cox_worker_paused(thread->worker);
}

void cox_lending_leave(struct cox_channel_thread *thread)
{
    pthread_mutex_lock(&thread->lending.lock);
    if (--thread->lending.out == 0)
        cox_running_callback_end_lend(thread);
    pthread_mutex_unlock(&thread->lending.lock);
}

int cox_lending_call(struct cox_channel_thread *thread, const struct cox_request *request,
                     enum cox_callback_kind kind, int (*callback)(void *argument), void *argument)
{
    const bool may = cox_lending_enter(thread, request->sequence, request->type);
    const int r = may || kind != COX_CALLBACK_PAUSABLE ? callback(argument)
                                                       : cox_channel_thread_fail_paused(thread);
    cox_lending_leave(thread);
    return r;
}

void cox_lending_lend(struct cox_channel_thread *thread, uint64_t sequence, uint32_t type,
                      enum cox_lent_kind kind, bool in_block)
{
    struct cox_lending *lending = &thread->lending;
    pthread_mutex_lock(&lending->lock);
    struct cox_lent *entry = lending_entry(thread, sequence);
    entry->state = COX_LENT_LENT;
    entry->kind = kind;
    entry->in_block = in_block;
    lending->typed = lending->typed || kind != COX_LENT_OPAQUE;
    pthread_mutex_unlock(&lending->lock);
    *lending->to = (struct cox_worker_request){
        .channel = thread->channel.id, .type = type, .sequence = sequence};
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
