/*
 * The second completion of a request that ended while ranks were pending: it follows when each of
 * them has replied or is dead. While one is awaited, the gathering thread wakes up once per slice,
 * because a late reply need not wake it.
 */
#include "channel/base/idioms.h"
#include "collector_internal.h"

#include <inttypes.h>
#include <stdio.h>

static struct cox_late_request *late_of(const struct cox_collector *collector, uint64_t sequence)
{
    const uint64_t frame = cox_geometry_frame(sequence, collector_geometry(collector)->depth);
    return (struct cox_late_request *)&collector->late[frame];
}

static void late_clear(struct cox_collector *collector, struct cox_late_request *late)
{
    if (late->sequence)
        collector->late_count--;
    late->sequence = 0;
}

void cox_collector_watch_late(struct cox_collector *collector, const struct cox_entry *entry)
{
    const struct cox_replies *replies = collector_replies(collector, entry);
    struct cox_late_request late = {.sequence = entry->sequence, .ended_ns = cox_now_ns()};
    bool any = false;
    for (uint32_t rank = 0; rank < collector->rank_count; rank++)
        if (replies->results[rank].outcome == COX_OUTCOME_LATE) {
            cox_rank_set_add(&late.ranks, rank);
            any = true;
        }
    if (!any)
        return;
    *late_of(collector, entry->sequence) = late;
    collector->late_count++;
}

bool cox_collector_watches_late(const struct cox_collector *collector, uint64_t sequence)
{
    /* acquire: partner is cox_collector_stop. After a stop the goodbye may use any frame, and no
     * second completion follows. */
    return late_of(collector, sequence)->sequence != 0 &&
           !atomic_load_explicit(&collector->stopping, memory_order_acquire);
}

/* Returns true if all late ranks have replied or are dead. */
static bool late_is_due(struct cox_collector *collector, const struct cox_late_request *late,
                        const struct cox_entry *entry)
{
    for (uint32_t rank = 0; rank < collector->rank_count; rank++)
        if (cox_rank_set_has(&late->ranks, rank) && !cox_rank_set_has(&entry->consumed, rank) &&
            !collector_dead(collector, rank))
            return false;
    return true;
}

static void late_write_text(const struct cox_collector *collector,
                            const struct cox_late_request *late, uint64_t now_ns, char *text,
                            size_t size)
{
    const struct cox_replies *replies =
        collector
            ->replies[cox_geometry_frame(late->sequence, collector_geometry(collector)->depth)];
    uint32_t replied = 0, dead = 0, rank_of_one = 0;
    for (uint32_t rank = 0; rank < collector->rank_count; rank++) {
        replied += replies->results[rank].outcome == COX_OUTCOME_OK;
        dead += replies->results[rank].outcome == COX_OUTCOME_DEAD;
        if (replies->results[rank].outcome == COX_OUTCOME_OK)
            rank_of_one = rank;
    }
    const double seconds = (double)(now_ns - late->ended_ns) / 1e9;
    if (replied == 1 && dead == 0)
        snprintf(text, size,
                 "%s sequence %" PRIu64 ": rank %" PRIu32
                 " has replied %.3f s after the request ended, and is free again",
                 cox_channel_name(collector->channel->id), late->sequence, rank_of_one, seconds);
    else
        snprintf(text, size,
                 "%s sequence %" PRIu64 ": of the late ranks, %" PRIu32 " replied and %" PRIu32
                 " died within %.3f s after the request ended",
                 cox_channel_name(collector->channel->id), late->sequence, replied, dead, seconds);
}

static struct cox_replies *late_finish(struct cox_collector *collector,
                                       struct cox_late_request *late, struct cox_entry *entry)
{
    struct cox_replies *replies = collector_replies(collector, entry);
    const uint64_t now_ns = cox_now_ns();
    cox_replies_begin(replies, &late->ranks, collector->records);
    for (uint32_t rank = 0; rank < collector->rank_count; rank++) {
        struct cox_rank_result *result = &replies->results[rank];
        if (!cox_rank_set_has(&late->ranks, rank))
            continue;
        const bool replied = cox_rank_set_has(&late->replied, rank);
        result->outcome = replied ? COX_OUTCOME_OK : COX_OUTCOME_DEAD;
        result->text = replied ? NULL : "it died before it replied";
        result->taken = replied;
    }
    late_write_text(collector, late, now_ns, replies->text, sizeof replies->text);
    late_clear(collector, late);
    replies->completion = (struct cox_completion){
        .sequence = entry->sequence,
        .channel = collector->channel->id,
        .type = entry->type,
        .status = COX_LATE,
        .text = replies->text,
        .rank_count = collector->rank_count,
        .ranks = replies->results,
        .request_context = entry->request_context,
        .submitted_ns = entry->submitted_ns,
        .published_ns = entry->published_ns,
    };
    return replies;
}

struct cox_replies *cox_collector_finish_late(struct cox_collector *collector)
{
    const bool stopping = atomic_load_explicit(&collector->stopping, memory_order_acquire);
    for (uint32_t frame = 0; frame < collector_geometry(collector)->depth; frame++) {
        struct cox_late_request *late = &collector->late[frame];
        struct cox_entry *entry = &collector->entries[frame];
        if (stopping)
            late_clear(collector, late);
        /* The first completion must be taken before this one can be ready. */
        if (!late->sequence || collector->is_ready[frame] || !late_is_due(collector, late, entry))
            continue;
        return late_finish(collector, late, entry);
    }
    return NULL;
}

COX_HOT int cox_collector_drop_late(struct cox_collector *collector, uint64_t *ret_sequence)
{
    const struct cox_geometry *geometry = collector_geometry(collector);
    int late = -1;
    /* Oldest first: a rank replies in order, and its tokens are matched in that order. */
    uint64_t first =
        collector->published > geometry->depth ? collector->published - geometry->depth + 1 : 1;
    first = collector->finished < first ? first : collector->finished + 1;
    bool before = true; /* every request before this one has finished */
    for (uint64_t sequence = first; sequence <= collector->published; sequence++) {
        struct cox_entry *entry = collector_entry(collector, sequence);
        const bool finished = entry->sequence != sequence ||
                              (entry->ended && (!entry->replies || cox_entry_is_consumed(entry)));
        before &= finished;
        if (before)
            collector->finished = sequence;
        if (finished || !entry->replies || !entry->ended)
            continue;
        for (uint32_t rank = 0; rank < collector->rank_count; rank++) {
            if (!cox_rank_set_has(&entry->asked, rank) || cox_rank_set_has(&entry->consumed, rank))
                continue;
            if (collector_replied(collector, rank, sequence)) {
                collector_consume(collector, entry, rank);
                collector->stats.counts.late_replies++;
                collector->rank_stats[rank].late_replies++;
                struct cox_late_request *request = late_of(collector, sequence);
                if (request->sequence == sequence)
                    cox_rank_set_add(&request->replied, rank);
            } else if (!collector_dead(collector, rank) && late < 0) {
                late = (int)rank;
                *ret_sequence = sequence;
            }
        }
    }
    return late;
}
