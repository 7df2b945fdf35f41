#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/base/thread.h"
#include "channel/memory/reply_memory.h"
#include "channel/recorder/probes.h"
#include "channel/shm/request.h"
#include "channel/shm/state.h"
#include "coordinator/stacks/sentence.h"
#include "coordinator/transport/transport.h"
#include "proto/executor.pb-c.h"
#include "proto/operation.h"
#include "collector_internal.h"
#include "report.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* The text of a rank that is being replaced, with what became of it. */
__attribute__((noinline, cold)) static int begin_fail_replaced(struct cox_collector *collector,
                                                               uint32_t rank, struct cox_error *err)
{
    struct cox_last_death death;
    cox_supervisor_last_death(collector->supervisor, rank, &death);
    return cox_fail(err, COX_PEER_DEAD, "%s: rank %" PRIu32 " is being started again%s%s",
                    cox_channel_name(collector->channel->id), rank, death.count ? ": " : "",
                    death.text);
}

/* A rank that the request asks, and that cannot be asked. */
COX_HOT static int begin_check_ranks(struct cox_collector *collector,
                                     const struct cox_rank_set *asked, struct cox_error *err)
{
    const char *name = cox_channel_name(collector->channel->id);
    for (uint32_t rank = 0; rank < collector->rank_count; rank++) {
        if (!cox_rank_set_has(asked, rank))
            continue;
        if (cox_rank_is_detached(&collector->records[rank]))
            return begin_fail_replaced(collector, rank, err);
        if (!collector_dead(collector, rank))
            continue;
        char text[COX_RANK_TEXT_SIZE];
        cox_report_death(collector->supervisor, rank, text, sizeof text);
        return cox_fail(err, COX_PEER_DEAD, "%s: %s", name, text);
    }
    return 0;
}

/* A rank that still reads the frame of `old`; -1: none. One that has replied has returned it.
 * Usually all have. */
COX_HOT static int begin_reader(struct cox_collector *collector, const struct cox_entry *old)
{
    if (!old->sequence || cox_entry_is_consumed(old))
        return -1;
    for (uint32_t rank = 0; rank < collector->rank_count; rank++)
        if (cox_rank_set_has(&old->asked, rank) && !cox_rank_set_has(&old->consumed, rank) &&
            !collector_returned(collector, rank, old->sequence) && !collector_dead(collector, rank))
            return (int)rank;
    return -1;
}

COX_HOT static int begin_check(struct cox_collector *collector, const struct cox_entry *entry,
                               uint64_t sequence, struct cox_error *err)
{
    const char *name = cox_channel_name(collector->channel->id);
    const uint32_t depth = collector_geometry(collector)->depth;
    const struct cox_entry *old = collector_entry(collector, sequence);
    uint64_t late_sequence = 0;
    const int late = cox_collector_drop_late(collector, &late_sequence);
    int waits = late; /* for this rank */
    int r = begin_check_ranks(collector, &entry->asked, err);
    if (r)
        return r;
    if (late >= 0)
        r = cox_fail(err, COX_LATE, "%s: rank %d still owes the reply to sequence %" PRIu64, name,
                     late, late_sequence);
    else if (collector->late_count && cox_collector_watches_late(collector, sequence))
        r = cox_fail(err, COX_FULL,
                     "%s: late ranks of sequence %" PRIu64 " are still to be reported", name,
                     old->sequence);
    else if (old->sequence && !old->ended)
        r = cox_fail(err, COX_FULL, "%s: all %" PRIu32 " frames are in flight", name, depth);
    else if ((waits = begin_reader(collector, old)) >= 0)
        r = cox_fail(err, COX_FULL, "%s: rank %d still reads the frame of sequence %" PRIu64, name,
                     waits, old->sequence);
    else if (entry->replies && collector->is_ready[cox_geometry_frame(sequence, depth)])
        r = cox_fail(err, COX_FULL,
                     collector->collected
                         ? "%s: completions wait to be collected (cox_executor_completions)"
                         : "%s: completions wait for the handler",
                     name);
    /* Also a rank that has taken the frame: its words may have been overwritten since, and a wakeup
     * makes it store them again. */
    if (waits >= 0 && collector_rewake_due(&collector->claim_rewake_ns, cox_now_ns()))
        cox_collector_rewake(collector, (uint32_t)waits);
    return r;
}

COX_HOT int cox_collector_begin(struct cox_collector *collector, struct cox_entry *entry,
                                struct cox_error *err)
{
    /* Loaded before the ranks are checked: a later death is news for the gathering thread. */
    entry->causes = atomic_load(&collector->causes);
    entry->large_size = 0;
    entry->away = NULL;
    pthread_mutex_lock(&collector->lock);
    const uint64_t sequence = collector->published + 1;
    int r = begin_check(collector, entry, sequence, err);
    /* The memory of the frame's last request: no rank reads it any more. */
    while (r == 0 && cox_collector_uses_payload(collector, sequence)) {
        pthread_mutex_unlock(&collector->lock);
        cox_collector_release_payloads(collector);
        pthread_mutex_lock(&collector->lock);
        r = begin_check(collector, entry, sequence, err);
    }
    if (r) {
        pthread_mutex_unlock(&collector->lock);
        return r;
    }
    entry->sequence = sequence;
    cox_fault_point(COX_FAULT_REQUEST_CLAIMED);
    return 0;
}

/* Under submit_lock: the frame is not used again meanwhile. */
static void collector_transport(struct cox_collector *collector, const struct cox_entry *entry,
                                size_t length)
{
    size_t capacity;
    const struct cox_transport_request request = {
        .channel = collector->channel->id,
        .type = entry->type,
        .sequence = entry->sequence,
        .deadline_ns = entry->replies ? entry->deadline_ns : COX_DEADLINE_NEVER,
        .replies = entry->replies,
        .asked = &entry->asked,
        .bytes = entry->away ? entry->away
                             : cox_request_frame(collector->channel, entry->sequence, &capacity),
        .size = entry->large_size ? entry->large_size : length,
    };
    collector->transport->publish(collector->transport->context, &request);
}

COX_HOT void cox_collector_commit(struct cox_collector *collector, const struct cox_entry *entry,
                                  size_t length)
{
    struct cox_gate *gate = &collector->channel->gate;
    struct cox_entry *slot = collector_entry(collector, entry->sequence);
    if (collector->reports)
        collector->report_count = cox_fault_reports_count(collector->reports, NULL, 0);
    cox_tokens_publish(collector->channel->tokens, &entry->asked, entry->sequence,
                       entry->operation->legacy_slotted);
    *slot = *entry;
    slot->away = NULL;
    slot->published_ns = cox_now_ns();
    cox_state_set_stamp(cox_state_channel(collector->channel->control, collector->channel->id),
                        slot->published_ns);
    if (collector->cancelled)
        collector_set_cancelled(collector, entry->sequence, false);
    const uint64_t size = entry->large_size ? entry->large_size : length;
    if (collector->recorder.records)
        cox_recorder_publish(
            &collector->recorder, entry->sequence,
            &(struct cox_recorder_published){
                .submitted = entry->recorded_submit,
                .packing = entry->recorded_packing,
                .published = cox_recorder_submits_time(&collector->recorder, slot->published_ns),
                .request = cox_recorder_request_word(entry->type, size),
                .asked = entry->asked.words,
            });
    COX_PROBE(request__publish, collector->channel->id, entry->sequence, entry->type, size);
    if (entry->replies)
        cox_gate_arm(gate, entry->sequence, cox_rank_set_count(&entry->asked));
    cox_request_publish(collector->channel, entry->sequence,
                        entry->large_size && entry->type == COX_TYPE_OPAQUE ? COX_TYPE_OPAQUE_LARGE
                                                                            : entry->type,
                        length, collector->forwards ? &entry->asked_anywhere : &entry->asked);
    collector->claim_rewake_ns = slot->published_ns + COX_SLICE_NS;
    if (collector->ended == collector->published) /* the first in flight */
        collector->rewake_ns = collector->claim_rewake_ns;
    collector->published = entry->sequence;
    cox_stats_publish(&collector->stats, size, entry->large_size > 0);
    if (entry->large_size && !entry->away)
        cox_collector_use_payload(collector, entry->sequence);
    /* relaxed: a thread that sees the new value takes the lock. */
    atomic_store_explicit(&collector->news, entry->sequence, memory_order_relaxed);
    slot->ended = !entry->replies; /* no rank replies, so there is nothing to gather */
    cox_collector_advance(collector);
    if (entry->replies && cox_readiness_is_open(&collector->readiness))
        cox_readiness_set_timer(&collector->readiness,
                                cox_deadline_min(entry->deadline_ns, collector->rewake_ns));
    /* The collector computed its wait before this request existed. */
    bool elsewhere = collector->sleep_rank >= 0 && !cox_gate_shared(gate) &&
                     !cox_rank_set_has(&entry->asked, (uint32_t)collector->sleep_rank);
    bool early = entry->replies && collector->sleep_rank >= 0 &&
                 (entry->deadline_ns < collector->sleep_ns || elsewhere);
    pthread_mutex_unlock(&collector->lock);
    if (collector->transport)
        collector_transport(collector, entry, length);
    else
        cox_gate_open(gate, &entry->asked);
    cox_recorder_woken(&collector->recorder, entry->sequence);
    COX_PROBE(request__wake, collector->channel->id, entry->sequence, entry->type, 0);
    cox_fault_point(COX_FAULT_GATE_OPENED);
    /* No system call unless the response thread is blocked. Done after the gate is opened, because
     * the thread has nothing to do before a rank replies, and without the lock, on which it would
     * block again at once. */
    pthread_cond_signal(&collector->work);
    if (early)
        cox_collector_wake(collector);
}

void cox_collector_begin_after(struct cox_collector *collector, uint64_t sequence)
{
    struct cox_layout_channel_state *words =
        cox_state_channel(collector->channel->control, collector->channel->id);
    pthread_mutex_lock(&collector->lock);
    collector->published = collector->ended = collector->begun = collector->finished = sequence;
    cox_state_set_published(words, sequence);
    cox_state_set_ended(words, sequence);
    atomic_store_explicit(&collector->news, sequence, memory_order_relaxed);
    pthread_mutex_unlock(&collector->lock);
}

void cox_collector_set_forwarded(struct cox_collector *collector, cox_completion_fn handler,
                                 void *context)
{
    collector->forwards = true;
    collector->handler = handler;
    collector->handler_context = context;
    /* relaxed: before the first request. */
    atomic_store_explicit(&collector->handled, true, memory_order_relaxed);
}

/* A number that asks no rank here. A rank that finds another number in its frame takes the number
 * for one that is still to come, so it is published like any other. */
static int publish_none(struct cox_collector *collector, struct cox_error *err)
{
    struct cox_entry none = {
        .type = COXSWAIN__EXECUTE_TYPE__MODEL_INFER,
        .operation = cox_operation_find(COXSWAIN__EXECUTE_TYPE__MODEL_INFER),
        .gather = COX_GATHER_NONE,
        .submitted_ns = cox_now_ns(),
    };
    none.recorded_submit = cox_recorder_submits_time(&collector->recorder, none.submitted_ns);
    const int r = cox_collector_begin(collector, &none, err);
    if (r == 0)
        cox_collector_commit(collector, &none, 0);
    return r;
}

int cox_collector_skip(struct cox_collector *collector, uint64_t sequence, struct cox_error *err)
{
    const uint64_t depth = collector_geometry(collector)->depth;
    int r = 0;
    if (sequence <= collector->published)
        return cox_fail(err, COX_STALE,
                        "%s: sequence %" PRIu64 " was passed on before, the last one is %" PRIu64,
                        cox_channel_name(collector->channel->id), sequence, collector->published);
    if (sequence - collector->published > depth + 1) {
        pthread_mutex_lock(&collector->lock);
        const bool busy = collector->ended != collector->published;
        pthread_mutex_unlock(&collector->lock);
        if (busy)
            return cox_fail(err, COX_FULL, "%s: requests before %" PRIu64 " are in flight",
                            cox_channel_name(collector->channel->id), sequence);
        cox_collector_begin_after(collector, sequence - depth - 1);
    }
    while (r == 0 && collector->published + 1 < sequence)
        r = publish_none(collector, err);
    return r;
}

bool cox_collector_awaits(struct cox_collector *collector, uint32_t rank, uint64_t sequence)
{
    pthread_mutex_lock(&collector->lock);
    const struct cox_entry *entry = collector_entry(collector, sequence);
    const bool awaits = entry->sequence == sequence && entry->replies &&
                        cox_rank_set_has(&entry->asked, rank) &&
                        !cox_rank_set_has(&entry->consumed, rank);
    pthread_mutex_unlock(&collector->lock);
    return awaits;
}

void cox_collector_end_through(struct cox_collector *collector, uint64_t through)
{
    const uint64_t now_ns = cox_now_ns();
    bool any = false;
    pthread_mutex_lock(&collector->lock);
    for (uint64_t sequence = collector->ended + 1;
         sequence <= collector->published && sequence <= through; sequence++) {
        struct cox_entry *entry = collector_entry(collector, sequence);
        if (entry->sequence != sequence || entry->ended || entry->deadline_ns <= now_ns)
            continue;
        entry->deadline_ns = now_ns;
        any = true;
    }
    pthread_mutex_unlock(&collector->lock);
    if (any)
        cox_collector_wake(collector);
}

bool cox_collector_in_step(struct cox_collector *collector)
{
    bool found = false;
    pthread_mutex_lock(&collector->lock);
    for (uint64_t sequence = collector->ended + 1; !found && sequence <= collector->published;
         sequence++) {
        const struct cox_entry *entry = collector_entry(collector, sequence);
        found = !entry->ended && entry->operation->step;
    }
    pthread_mutex_unlock(&collector->lock);
    return found;
}

static void *response_main(void *collector)
{
    cox_collector_respond(collector);
    return NULL;
}

static uint32_t replies_count(const struct cox_geometry *geometry)
{
    return 2 * geometry->depth + 2;
}

/* One for each frame, and spare ones for those that a host has collected, or that handlers use. */
static int init_replies(struct cox_collector *collector)
{
    const struct cox_geometry *geometry = collector_geometry(collector);
    int r = 0;
    collector->replies_memory = calloc(replies_count(geometry), sizeof *collector->replies_memory);
    if (!collector->replies_memory)
        return -ENOMEM;
    for (uint32_t i = 0; r == 0 && i < replies_count(geometry); i++) {
        struct cox_replies *replies = &collector->replies_memory[i];
        r = cox_replies_init(replies, geometry, collector->channel->id);
        if (i < geometry->depth) {
            collector->replies[i] = replies;
        } else {
            replies->next = collector->spares;
            collector->spares = replies;
        }
    }
    return r;
}

int cox_collector_init(struct cox_collector *collector, struct cox_channel *channel,
                       const void *owner, struct cox_large_payload_choice *large_payloads,
                       const struct cox_log *log)
{
    const struct cox_geometry *geometry = &channel->control->geometry;
    memset(collector, 0, sizeof *collector);
    collector->large_payloads = large_payloads;
    collector->channel = channel;
    collector->sleep_rank = -1;
    collector->spinner.budget_ns = geometry->spin_ns;
    collector->rank_count = geometry->rank_count;
    collector->owner = owner;
    collector->log = log;
    pthread_mutex_init(&collector->submit_lock, NULL);
    pthread_mutex_init(&collector->lock, NULL);
    cox_condition_init(&collector->work);
    cox_condition_init(&collector->ended_cond);
    int r = init_replies(collector);
    if (r == 0)
        collector->rank_stats = calloc(collector->rank_count, sizeof *collector->rank_stats);
    if (r == 0)
        collector->reply_views =
            calloc((size_t)geometry->depth * collector->rank_count, sizeof *collector->reply_views);
    if (r == 0 && (!collector->rank_stats || !collector->reply_views))
        r = -ENOMEM;
    cox_reply_memory_begin();
    if (r)
        cox_collector_deinit(collector);
    return r;
}

void cox_collector_deinit(struct cox_collector *collector)
{
    if (!collector->channel)
        return;
    const uint32_t depth = collector_geometry(collector)->depth;
    for (uint32_t i = 0;
         collector->replies_memory && i < replies_count(collector_geometry(collector)); i++)
        cox_replies_deinit(&collector->replies_memory[i]);
    for (uint32_t frame = 0; frame < COX_DEPTH_MAX; frame++)
        cox_large_payload_drop(&collector->large_payloads->sender,
                               &collector->request_buffers[frame].payload);
    for (uint32_t i = 0; collector->reply_views && i < depth * collector->rank_count; i++)
        cox_large_payload_view_drop(&collector->reply_views[i]);
    cox_reply_memory_end();
    cox_readiness_close(&collector->readiness);
    free(collector->replies_memory);
    free(collector->rank_stats);
    free(collector->reply_views);
    pthread_cond_destroy(&collector->work);
    pthread_cond_destroy(&collector->ended_cond);
    pthread_mutex_destroy(&collector->lock);
    pthread_mutex_destroy(&collector->submit_lock);
    memset(collector, 0, sizeof *collector);
}

int cox_collector_start(struct cox_collector *collector)
{
    int r = cox_thread_start(&collector->thread, response_main, collector);
    collector->threaded = r == 0;
    return r;
}

void cox_collector_start_collected(struct cox_collector *collector)
{
    collector->collected = true;
    /* relaxed: before the first request. */
    atomic_store_explicit(&collector->handled, true, memory_order_relaxed);
}

void cox_collector_stop(struct cox_collector *collector)
{
    if (!collector->channel)
        return;
    /* Under submit_lock: every thread that has begun a request has committed it by now, and the
     * response thread sees that before it ends. release: partner are the acquire loads above; the
     * cause before the wake. */
    pthread_mutex_lock(&collector->submit_lock);
    atomic_store_explicit(&collector->stopping, true, memory_order_release);
    pthread_mutex_unlock(&collector->submit_lock);
    cox_collector_wake(collector);
    if (collector->threaded) {
        pthread_join(collector->thread, NULL);
        collector->threaded = false;
    }
    cox_collector_gather_rest(collector);
}
