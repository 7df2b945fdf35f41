/*
 * Shared by the files of the collector: collector.c (begin, commit, wait), pass.c (the passes over
 * requests in flight), complete.c (the threads that gather, and take completions),
 * request_buffers.c, late.c and reattach.c. lock is held in every call here.
 */
#ifndef COX_COORDINATOR_COLLECTOR_INTERNAL_H
#define COX_COORDINATOR_COLLECTOR_INTERNAL_H

#include "channel/base/idioms.h"
#include "channel/shm/state.h"
#include "collector.h"

#include <string.h>

COX_HOT static inline const struct cox_geometry *collector_geometry(
    const struct cox_collector *collector)
{
    return &collector->channel->control->geometry;
}

static inline struct cox_entry *collector_entry(struct cox_collector *collector, uint64_t sequence)
{
    return &collector->entries[cox_geometry_frame(sequence, collector_geometry(collector)->depth)];
}

/* Returns true if the rank is dead, or has left while its process lives on. After a rank has left
 * its death is awaited for a short time, because it is the better error. */
COX_HOT static inline bool collector_dead(struct cox_collector *collector, uint32_t rank)
{
    const enum cox_rank_stage stage = cox_rank_stage_of(&collector->records[rank]);
    if (stage >= COX_STAGE_DEAD)
        return true;
    const bool left = cox_state_left(collector->channel->control, rank);
    if (!left && stage != COX_STAGE_LEAVING)
        return false;
    return cox_supervisor_see_left(collector->supervisor, rank, left) > COX_LEAVING_NS;
}

COX_HOT static inline bool collector_replied(struct cox_collector *collector, uint32_t rank,
                                             uint64_t sequence)
{
    cox_tokens_update(collector->channel->tokens, rank);
    return cox_state_done(cox_state_line(collector->channel->control, rank,
                                         collector->channel->id)) >= sequence;
}

static inline bool collector_returned(struct cox_collector *collector, uint32_t rank,
                                      uint64_t sequence)
{
    cox_tokens_update(collector->channel->tokens, rank);
    const struct cox_layout_rank_line *line =
        cox_state_line(collector->channel->control, rank, collector->channel->id);
    /* A rank that has replied has returned the frame before; `returned` may have been overwritten
     * since. */
    return cox_state_returned(line) >= sequence || cox_state_done(line) >= sequence;
}

/* The reply of `rank` was copied from its slot, or dropped: matches its token and frees the slot.
 */
COX_HOT static inline void collector_consume(struct cox_collector *collector,
                                             struct cox_entry *entry, uint32_t rank)
{
    cox_rank_set_add(&entry->consumed, rank);
    cox_gate_consume_reply(&collector->channel->gate, rank);
}

COX_HOT static inline struct cox_replies *collector_replies(struct cox_collector *collector,
                                                            const struct cox_entry *entry)
{
    return collector
        ->replies[cox_geometry_frame(entry->sequence, collector_geometry(collector)->depth)];
}

COX_HOT static inline struct cox_large_payload_view *collector_reply_view(
    struct cox_collector *collector, uint32_t rank, uint64_t sequence)
{
    const uint64_t frame = cox_geometry_frame(sequence, collector_geometry(collector)->depth);
    return &collector->reply_views[frame * collector->rank_count + rank];
}

/* ---- late.c: the second completion of a request. lock is held ---- */

/* A request ended while ranks were pending, and its host asked for a completion when they have
 * replied (report_late).
 */
void cox_collector_watch_late(struct cox_collector *collector, const struct cox_entry *entry);
/* Returns true if a submit must not reuse the frame of `sequence` yet. */
bool cox_collector_watches_late(const struct cox_collector *collector, uint64_t sequence);
/* Ends one watch that is due. Returns the replies, with the second completion; NULL: none is. */
struct cox_replies *cox_collector_finish_late(struct cox_collector *collector);

/* Returns true once per slice. */
static inline bool collector_rewake_due(uint64_t *rewake_ns, uint64_t now)
{
    if (now < *rewake_ns)
        return false;
    *rewake_ns = now + COX_SLICE_NS;
    return true;
}

/* Publishes whether the request in the frame of `sequence` has ended without its ranks. */
COX_HOT static inline void collector_set_cancelled(struct cox_collector *collector,
                                                   uint64_t sequence, bool cancelled)
{
    const uint64_t bit = UINT64_C(1)
                         << cox_geometry_frame(sequence, collector_geometry(collector)->depth);
    if (!cancelled && !(collector->cancelled & bit))
        return;
    collector->cancelled = cancelled ? collector->cancelled | bit : collector->cancelled & ~bit;
    cox_state_set_cancelled(cox_state_channel(collector->channel->control, collector->channel->id),
                            collector->cancelled);
}

static inline bool cox_entry_is_consumed(const struct cox_entry *entry)
{
    return memcmp(&entry->consumed, &entry->asked, sizeof entry->asked) == 0;
}

/* Drops replies to requests that have ended. Returns a rank whose reply is still pending, or -1. */
int cox_collector_drop_late(struct cox_collector *collector, uint64_t *ret_sequence);
/* Wakes a rank again that has not taken a request. No other thread does that for requests that have
 * ended or expect no reply, and the rank would keep their frame. */
void cox_collector_rewake(struct cox_collector *collector, uint32_t rank);
/* Advances `ended` over the requests that have ended; their slots are free. */
void cox_collector_advance(struct cox_collector *collector);
/* True if the memory of the last large request in the frame of `sequence` was not released. */
bool cox_collector_uses_payload(struct cox_collector *collector, uint64_t sequence);
/* Records that request `sequence` is published with a payload buffer. */
void cox_collector_use_payload(struct cox_collector *collector, uint64_t sequence);
/* Makes one pass over the requests in flight. If none has ended, waits until a reply may be there,
 * or deadline_ns (0: does not wait). Returns false if nothing is in flight, or, with a deadline of
 * 0, if nothing has ended. *ret_ended: the replies to a request that has ended, with its
 * completion; NULL: none has. *rescanned is the caller's, false at first. The lock is released over
 * copies of large replies, texts of errors and what is read for them, and waits. */
bool cox_collector_gather_step(struct cox_collector *collector, bool *rescanned,
                               uint64_t deadline_ns, struct cox_replies **ret_ended);
/* Nothing is in flight: waits until a request is published, the collector stops, or deadline_ns.
 * May return early. */
void cox_collector_idle(struct cox_collector *collector, uint64_t deadline_ns);
/* Without the lock: releases the memory of large requests and replies, and wakes the ranks that
 * have to release theirs. */
void cox_collector_let_go(struct cox_collector *collector, struct cox_replies *replies);

#endif
