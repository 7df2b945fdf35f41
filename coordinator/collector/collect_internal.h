/*
 * What the files of the collector share: collect.c (claim, publish, sleep, the response thread),
 * gather.c (the passes over what is in flight), collecting.c, request_buffers.c and reattach.c. For
 * no one else.
 *
 * lock is held over every call here.
 */
#ifndef COX_COORDINATOR_COLLECT_INTERNAL_H
#define COX_COORDINATOR_COLLECT_INTERNAL_H

#include "collect.h"

#include "channel/shm/state.h"

COX_HOT static inline const struct cox_geometry *collector_geometry(
    const struct cox_collector *collector)
{
    return &collector->channel->control->geometry;
}

static inline struct cox_entry *collector_entry(struct cox_collector *collector, uint64_t sequence)
{
    return &collector->entries[cox_geometry_frame(sequence, collector_geometry(collector)->depth)];
}

/* It serves no more: it is dead, or it has left and its process lives on. A death that follows at
 * once is the better reason, and is waited for. */
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
    cox_legacy_bridge_update(&collector->bridge, rank);
    return cox_state_done(cox_state_line(collector->channel->control, rank,
                                         collector->channel->id)) >= sequence;
}

static inline bool collector_returned(struct cox_collector *collector, uint32_t rank,
                                      uint64_t sequence)
{
    cox_legacy_bridge_update(&collector->bridge, rank);
    const struct cox_layout_rank_line *line =
        cox_state_line(collector->channel->control, rank, collector->channel->id);
    /* Who has replied has returned the frame before; the word may have been written over since. */
    return cox_state_returned(line) >= sequence || cox_state_done(line) >= sequence;
}

/* The reply of `rank` was taken out of its slot, or is dropped: its tokens are matched, its slot
 * is free. */
COX_HOT static inline void collector_consume(struct cox_collector *collector,
                                             struct cox_entry *entry, uint32_t rank)
{
    cox_rank_set_add(&entry->consumed, rank);
    cox_gate_consume_reply(&collector->channel->gate, rank);
}

COX_HOT static inline struct cox_gathering *collector_gathering(struct cox_collector *collector,
                                                                const struct cox_entry *entry)
{
    return &collector->gatherings[cox_geometry_frame(entry->sequence,
                                                     collector_geometry(collector)->depth)];
}

/* ---- late.c: the second completion of a request. lock is held ---- */

/* The request has ended without the replies of some ranks, and its host wants to know when they are
 * there. */
void cox_collector_watch_late(struct cox_collector *collector, const struct cox_entry *entry);
/* The rank has replied, too late. */
void cox_collector_note_late_reply(struct cox_collector *collector, uint64_t sequence,
                                   uint32_t rank);
/* A submit may not reuse the frame of `sequence` yet. */
bool cox_collector_watches_late(const struct cox_collector *collector, uint64_t sequence);
/* Hands over one second completion that is due. Gives the lock up over a handler. Returns whether
 * there was one. */
bool cox_collector_finish_late(struct cox_collector *collector);
/* Hands a completion of the entry's request to its caller, the handler, or the host that collects
 * (gather.c). Gives the lock up over a handler. */
void cox_collector_hand_over(struct cox_collector *collector, struct cox_entry *entry,
                             struct cox_completion *completion);

/* True once a slice of the clock given. */
static inline bool collector_rewake_due(uint64_t *rewake_ns, uint64_t now)
{
    if (now < *rewake_ns)
        return false;
    *rewake_ns = now + COX_SLICE_NS;
    return true;
}

/* Tells the ranks whether the request in the frame of `sequence` has ended without them. */
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

/* Drops the replies of ended requests that arrived by now. Returns a rank that still owes one, or
 * -1. */
int cox_collector_drop_late(struct cox_collector *collector, uint64_t *ret_sequence);
/* A request that has ended, or is not replied to, is woken for by nobody else; who sleeps through
 * it would keep its frame for ever. */
void cox_collector_rewake(struct cox_collector *collector, uint32_t rank);
/* The requests up to the first that has not ended are behind us: their slots are free. */
void cox_collector_advance(struct cox_collector *collector);
/* The request of that number is published with what is in the block behind its frame. */
void cox_collector_use_block(struct cox_collector *collector, uint64_t sequence);
/* Gathers until `sequence` has ended, or (0) until nothing is in flight. lock is given up over
 * handlers, copies of large replies, and sleep. */
void cox_collector_gather_held(struct cox_collector *collector, uint64_t sequence);
/* One pass over what is in flight; where it ends nothing, a sleep until a reply may be there, or
 * deadline_ns (0: no sleep). False: nothing is in flight, or, with a deadline of 0, nothing has
 * ended. *rescanned is the caller's, false at first. */
bool cox_collector_gather_step(struct cox_collector *collector, bool *rescanned,
                               uint64_t deadline_ns);
/* Nothing is in flight: sleeps until something is published, the collector stops, or deadline_ns.
 * May return early. */
void cox_collector_idle(struct cox_collector *collector, uint64_t deadline_ns);
/* Some request in flight asks the rank. */
bool cox_collector_asks(struct cox_collector *collector, uint32_t rank);
/* Without the lock: gives back the memory that only large requests and replies take, and wakes the
 * ranks that have to give theirs back. */
void cox_collector_let_go(struct cox_collector *collector, struct cox_gathering *gathering);
/* The completion of an entry without a waiter, in a channel that the host collects. */
void cox_collector_keep(struct cox_collector *collector, const struct cox_entry *entry,
                        struct cox_completion *completion);

#endif
