#include "collect.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "../channel/fault.h"
#include "../channel/request.h"
#include "../channel/thread.h"
#include "../channel/truth.h"
#include "../proto/operation.h"
#include "report.h"

/* More tokens than this in one place were not posted by workers that keep to the protocol. */
#define STRAY_COUNT_MAX 1024

static _Thread_local const struct cox_inside *inside_innermost;

void cox_inside_enter(struct cox_inside *frame, const void *owner)
{
    *frame = (struct cox_inside){.owner = owner, .outer = inside_innermost};
    inside_innermost = frame;
}

void cox_inside_leave(const struct cox_inside *frame)
{
    inside_innermost = frame->outer;
}

bool cox_inside(const void *owner)
{
    for (const struct cox_inside *frame = inside_innermost; frame; frame = frame->outer)
        if (frame->owner == owner)
            return true;
    return false;
}

COX_HOT static const struct cox_geometry *collector_geometry(const struct cox_collector *collector)
{
    return &collector->channel->control->geometry;
}

static struct cox_entry *collector_entry(struct cox_collector *collector, uint64_t sequence)
{
    return &collector->entries[cox_geometry_frame(sequence, collector_geometry(collector)->depth)];
}

static struct cox_frame_block *collector_frame_block(struct cox_collector *collector,
                                                     uint64_t sequence)
{
    return &collector
                ->frame_blocks[cox_geometry_frame(sequence, collector_geometry(collector)->depth)];
}

/* It has left by itself, and not because its process ends: that would be told in a moment, and better. */
COX_HOT static bool collector_left(struct cox_collector *collector, uint32_t rank)
{
    struct cox_collector_rank *r = &collector->ranks[rank];
    if (!cox_truth_left(collector->channel->control, rank)) {
        r->left_ns = 0;
        return false;
    }
    uint64_t now = cox_now_ns();
    if (r->left_ns == 0)
        r->left_ns = now;
    return now - r->left_ns >= COX_LEAVING_NS;
}

/* It serves no more. */
COX_HOT static bool collector_dead(struct cox_collector *collector, uint32_t rank)
{
    return cox_serving_dead(&cox_supervisor_lives(collector->supervisor)[rank]) ||
           collector_left(collector, rank);
}

/* A legacy rank has no lines: the n-th token is the n-th answer. At depth 1 the answer can only be
 * to the request in the one entry. */
static void collector_count_token(struct cox_collector *collector, uint32_t rank)
{
    struct cox_collector_rank *r = &collector->ranks[rank];
    uint32_t foreign = atomic_load_explicit(&r->foreign, memory_order_relaxed);
    /* relaxed: a count of tokens; the semaphore orders everything else. */
    while (foreign > 0)
        if (atomic_compare_exchange_weak_explicit(&r->foreign, &foreign, foreign - 1,
                                                  memory_order_relaxed, memory_order_relaxed))
            return;
    r->legacy_done = collector->entries[0].sequence;
}

COX_HOT static bool collector_answered(struct cox_collector *collector, uint32_t rank,
                                       uint64_t sequence)
{
    if (!collector->legacy)
        return cox_truth_done(cox_truth_line(collector->channel->control, rank,
                                             collector->channel->id)) >= sequence;
    struct cox_collector_rank *r = &collector->ranks[rank];
    while (r->legacy_done < sequence &&
           cox_gate_take(&collector->channel->gate, rank, COX_BELL_RESPONSE_CONSUME))
        collector_count_token(collector, rank);
    return r->legacy_done >= sequence;
}

static bool collector_returned(struct cox_collector *collector, uint32_t rank, uint64_t sequence)
{
    const struct cox_layout_rank_line *line =
        cox_truth_line(collector->channel->control, rank, collector->channel->id);
    /* Who has answered has returned the frame before; the word may have been written over since. */
    return cox_truth_returned(line) >= sequence || cox_truth_done(line) >= sequence;
}

/* The answer of `rank` was taken out of its slot, or is dropped: its tokens are matched, its slot
 * is free. */
COX_HOT static void collector_consume(struct cox_collector *collector, struct cox_entry *entry,
                                      uint32_t rank)
{
    cox_rank_set_add(&entry->consumed, rank);
    if (!collector->legacy)
        cox_gate_settle(&collector->channel->gate, rank, COX_BELL_RESPONSE_CONSUME);
    else
        cox_gate_post(&collector->channel->gate, rank, COX_BELL_RESPONSE_PRODUCE);
}

COX_HOT static bool entry_is_consumed(const struct cox_entry *entry)
{
    return memcmp(&entry->consumed, &entry->asked, sizeof entry->asked) == 0;
}

/* Drops the answers of ended requests that arrived by now. Returns a rank that still owes one, or
 * -1. */
COX_HOT static int collector_drop_late(struct cox_collector *collector, uint64_t *ret_sequence)
{
    const struct cox_geometry *geometry = collector_geometry(collector);
    int late = -1;
    /* Oldest first: a rank answers in order, and its tokens are matched in order. */
    uint64_t first =
        collector->published > geometry->depth ? collector->published - geometry->depth + 1 : 1;
    first = collector->settled < first ? first : collector->settled + 1;
    bool before = true; /* all until here are settled */
    for (uint64_t sequence = first; sequence <= collector->published; sequence++) {
        struct cox_entry *entry = collector_entry(collector, sequence);
        const bool settled = entry->sequence != sequence ||
                             (entry->ended && (!entry->replies || entry_is_consumed(entry)));
        before &= settled;
        if (before)
            collector->settled = sequence;
        if (settled || !entry->replies || !entry->ended)
            continue;
        for (uint32_t rank = 0; rank < collector->rank_count; rank++) {
            if (!cox_rank_set_has(&entry->asked, rank) || cox_rank_set_has(&entry->consumed, rank))
                continue;
            if (collector_answered(collector, rank, sequence)) {
                collector_consume(collector, entry, rank);
                collector->stats.counts.late_replies++;
            } else if (!collector_dead(collector, rank) && late < 0) {
                late = (int)rank;
                *ret_sequence = sequence;
            }
        }
    }
    return late;
}

/* A request that has ended, or is not answered, is rung for by nobody else; who sleeps through it
 * would keep its frame for ever. */
static void collector_ring(struct cox_collector *collector, uint32_t rank)
{
    if (collector->legacy) /* its tokens count, none may be added */
        return;
    /* Said again as well, in case somebody wrote over it. */
    cox_truth_set_published(cox_truth_channel(collector->channel->control, collector->channel->id),
                            collector->published);
    cox_gate_post(&collector->channel->gate, rank, COX_BELL_REQUEST_CONSUME);
    collector->stats.counts.rings++;
}

/* True once a slice of the clock given. */
static bool ring_due(uint64_t *ring_ns, uint64_t now)
{
    if (now < *ring_ns)
        return false;
    *ring_ns = now + COX_SLICE_NS;
    return true;
}

COX_HOT int cox_collector_claim(struct cox_collector *collector, const struct cox_rank_set *asked,
                                uint64_t *ret_sequence, struct cox_error *err)
{
    const char *name = cox_channel_name(collector->channel->id);
    int r = 0;
    /* Before the ranks are looked at: a death after that is news to who gathers. */
    collector->claim_causes = atomic_load(&collector->causes);
    pthread_mutex_lock(&collector->lock);
    uint64_t sequence = collector->published + 1;
    struct cox_entry *old = collector_entry(collector, sequence);
    uint64_t late_sequence = 0;
    int late = collector_drop_late(collector, &late_sequence);
    int reading = -1; /* a rank that still has the frame */
    for (uint32_t rank = 0; r == 0 && rank < collector->rank_count; rank++) {
        if (cox_rank_set_has(asked, rank) && collector->ranks[rank].left_out)
            r = cox_fail(err, COX_PEER_DEAD, "%s: rank %" PRIu32 " is dead and being started again",
                         name, rank);
        if (r || !cox_rank_set_has(asked, rank) || !collector_dead(collector, rank))
            continue;
        char text[COX_RANK_TEXT_SIZE];
        cox_report_death(collector->supervisor, rank, text, sizeof text);
        r = cox_fail(err, COX_PEER_DEAD, "%s: %s", name, text);
    }
    if (r == 0 && late >= 0)
        r = cox_fail(err, COX_LATE, "%s: rank %d still owes the answer to sequence %" PRIu64, name,
                     late, late_sequence);
    if (r == 0 && old->sequence && !old->ended)
        r = cox_fail(err, COX_FULL, "%s: all %" PRIu32 " frames are in flight", name,
                     collector_geometry(collector)->depth);
    /* Who has answered has returned the frame: mostly all have. */
    const bool free = !collector->legacy && (!old->sequence || entry_is_consumed(old));
    for (uint32_t rank = 0; r == 0 && !free && rank < collector->rank_count; rank++) {
        if (collector->legacy) {
            struct cox_collector_rank *l = &collector->ranks[rank];
            if (cox_rank_set_has(asked, rank) && !l->legacy_free)
                l->legacy_free =
                    cox_gate_take(&collector->channel->gate, rank, COX_BELL_REQUEST_PRODUCE);
            if (cox_rank_set_has(asked, rank) && !l->legacy_free)
                r = cox_fail(err, COX_FULL, "%s: rank %" PRIu32 " has not returned the frame", name,
                             rank);
        } else if (old->sequence && cox_rank_set_has(&old->asked, rank) &&
                   !cox_rank_set_has(&old->consumed, rank) &&
                   !collector_returned(collector, rank, old->sequence) &&
                   !collector_dead(collector, rank)) {
            reading = (int)rank;
            r = cox_fail(err, COX_FULL,
                         "%s: rank %" PRIu32 " still reads the frame of sequence %" PRIu64, name,
                         rank, old->sequence);
        }
    }
    /* Also who has taken it: what he said of it since may have been written over, and he says it again. */
    if ((r == COX_LATE || reading >= 0) && ring_due(&collector->claim_ring_ns, cox_now_ns()))
        collector_ring(collector, (uint32_t)(reading >= 0 ? reading : late));
    pthread_mutex_unlock(&collector->lock);
    if (r)
        return r;
    *ret_sequence = sequence;
    cox_fault_point(COX_FAULT_REQUEST_CLAIMED);
    return 0;
}

/* The requests up to the first that has not ended are behind us: their slots are free. lock is
 * held. */
COX_HOT static void collector_advance(struct cox_collector *collector)
{
    uint64_t before = collector->ended;
    while (collector->ended < collector->published &&
           collector_entry(collector, collector->ended + 1)->ended)
        collector->ended++;
    if (collector->ended != before)
        cox_truth_set_ended(cox_truth_channel(collector->channel->control, collector->channel->id),
                            collector->ended);
}

/* Nobody owes an answer now: a token that lies there would be taken for the answer to come. */
static void collector_forget_stray(struct cox_collector *collector, uint32_t rank)
{
    collector->ranks[rank].legacy_free = false;
    for (uint32_t i = 0; i < STRAY_COUNT_MAX &&
                         cox_gate_take(&collector->channel->gate, rank, COX_BELL_RESPONSE_CONSUME);
         i++)
        collector_count_token(collector, rank);
}

COX_HOT static uint32_t asked_count(const struct cox_collector *collector,
                                    const struct cox_rank_set *asked)
{
    uint32_t count = 0;
    for (uint32_t rank = 0; rank < collector->rank_count; rank++)
        count += cox_rank_set_has(asked, rank);
    return count;
}

COX_HOT void cox_collector_publish(struct cox_collector *collector, const struct cox_entry *entry,
                                   size_t length)
{
    struct cox_gate *gate = &collector->channel->gate;
    pthread_mutex_lock(&collector->lock);
    struct cox_entry *slot = collector_entry(collector, entry->sequence);
    /* Before the entry is the new one: what lies there is counted for the old one. */
    for (uint32_t rank = 0; collector->legacy && rank < collector->rank_count; rank++)
        if (cox_rank_set_has(&entry->asked, rank))
            collector_forget_stray(collector, rank);
    *slot = *entry;
    slot->causes = collector->claim_causes;
    slot->published_ns = cox_now_ns();
    cox_truth_set_stamp(cox_truth_channel(collector->channel->control, collector->channel->id),
                        slot->published_ns);
    if (entry->replies)
        cox_gate_arm(gate, entry->sequence, asked_count(collector, &entry->asked));
    cox_request_publish(collector->channel, entry->sequence,
                        entry->block_size && entry->type == COX_TYPE_OPAQUE ? COX_TYPE_OPAQUE_BLOCK
                                                                            : entry->type,
                        length, &entry->asked);
    collector->claim_ring_ns = slot->published_ns + COX_SLICE_NS;
    if (collector->ended == collector->published) /* the first in flight */
        collector->ring_ns = collector->claim_ring_ns;
    collector->published = entry->sequence;
    cox_stats_publish(&collector->stats, entry->block_size ? entry->block_size : length,
                      entry->block_size > 0);
    if (entry->block_size) {
        struct cox_frame_block *behind = collector_frame_block(collector, entry->sequence);
        /* relaxed: under the lock, where it is decided by. */
        atomic_fetch_add_explicit(&collector->blocks_used, !behind->used, memory_order_relaxed);
        behind->used = true;
    }
    /* relaxed: whoever sees it takes the lock. */
    atomic_store_explicit(&collector->news, entry->sequence, memory_order_relaxed);
    slot->ended = !entry->replies; /* nobody answers, so nobody gathers */
    collector_advance(collector);
    /* The collector planned its sleep without this one. */
    bool elsewhere = collector->sleep_rank >= 0 && !cox_gate_shared(gate) &&
                     !cox_rank_set_has(&entry->asked, (uint32_t)collector->sleep_rank);
    bool early = entry->replies && collector->sleep_rank >= 0 &&
                 (entry->deadline_ns < collector->sleep_ns || elsewhere);
    pthread_mutex_unlock(&collector->lock);
    cox_gate_open(gate, &entry->asked);
    cox_fault_point(COX_FAULT_GATE_OPENED);
    /* No system call unless the response thread sleeps. After the gate: it has nothing to do before
     * somebody answers. Not under the lock, which it would only wake up to wait for. */
    pthread_cond_signal(&collector->work);
    if (early)
        cox_collector_wake(collector);
}

int cox_collector_reserve_block(struct cox_collector *collector, uint64_t sequence, uint64_t size,
                                struct cox_bulk_block **ret_block, struct cox_error *err)
{
    struct cox_blocks_choice *blocks = collector->blocks;
    /* Whoever releases only looks at those in use. */
    struct cox_frame_block *behind = collector_frame_block(collector, sequence);
    int r = cox_bulk_reserve(&blocks->sender, blocks->intake.door_path, size, &behind->block, err);
    if (r == 0)
        *ret_block = &behind->block;
    return r;
}

/* Nobody that its request asked will open it any more. lock is held. */
static bool collector_block_is_free(struct cox_collector *collector, const struct cox_entry *entry)
{
    bool free = entry->ended;
    for (uint32_t rank = 0; free && rank < collector->rank_count; rank++)
        free = !cox_rank_set_has(&entry->asked, rank) ||
               collector_returned(collector, rank, entry->sequence) ||
               collector_dead(collector, rank);
    return free;
}

void cox_collector_release_blocks(struct cox_collector *collector)
{
    struct cox_bulk_block large[COX_DEPTH_MAX];
    uint32_t count = 0;
    /* relaxed: whoever claims has seen the request in that frame published. */
    if (atomic_load_explicit(&collector->blocks_used, memory_order_relaxed) == 0)
        return;
    pthread_mutex_lock(&collector->lock);
    for (uint32_t frame = 0; frame < collector_geometry(collector)->depth; frame++) {
        struct cox_frame_block *behind = &collector->frame_blocks[frame];
        if (!behind->used || !collector_block_is_free(collector, &collector->entries[frame]))
            continue;
        behind->used = false;
        atomic_fetch_sub_explicit(&collector->blocks_used, 1, memory_order_relaxed);
        if (cox_bulk_is_large(&behind->block)) {
            large[count++] = behind->block;
            behind->block = (struct cox_bulk_block){0};
        }
    }
    pthread_mutex_unlock(&collector->lock);
    /* Not under the lock: it may take a while to give a gigabyte back. */
    for (uint32_t i = 0; i < count; i++)
        cox_bulk_drop(&collector->blocks->sender, &large[i]);
}

uint64_t cox_collector_held_bytes(const struct cox_collector *collector)
{
    uint64_t bytes = 0;
    for (uint32_t frame = 0; frame < collector_geometry(collector)->depth; frame++)
        if (collector->frame_blocks[frame].used)
            bytes += collector->frame_blocks[frame].block.region.size;
    return bytes;
}

int cox_collector_await(struct cox_collector *collector, uint64_t sequence,
                        struct cox_waiter *waiter, uint64_t deadline_ns, struct cox_error *err)
{
    /* The completion at the deadline says more than this function can: only a handler that runs for a
     * slice from there on is not waited for. */
    uint64_t until_ns = deadline_ns, held_run = 0;
    bool abandoned = false;
    pthread_mutex_lock(&collector->lock);
    while (!waiter->done && !abandoned) {
        const struct cox_entry *entry = collector_entry(collector, sequence);
        const struct timespec until = cox_deadline_timespec(until_ns);
        /* Once it is taken from the entry only the visit is left, which is the caller's own. */
        bool taken = entry->sequence != sequence || entry->waiter != waiter;
        if (taken || cox_now_ns() < until_ns) {
            pthread_cond_timedwait(&collector->ended_cond, &collector->lock, &until);
            until_ns = taken ? COX_DEADLINE_NEVER : until_ns;
            continue;
        }
        abandoned = collector->in_handler && held_run == collector->handler_runs;
        held_run = collector->in_handler ? collector->handler_runs : 0;
        until_ns = cox_deadline_after_ns(COX_SLICE_NS);
    }
    if (abandoned)
        collector_entry(collector, sequence)->waiter = &collector->nobody;
    pthread_mutex_unlock(&collector->lock);
    return abandoned
               ? cox_fail(err, COX_TIMEOUT,
                          "%s sequence %" PRIu64
                          ": the response thread is held up in a handler, so nobody looked at "
                          "the answers until the deadline",
                          cox_channel_name(collector->channel->id), sequence)
               : waiter->status;
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

void cox_collector_await_room(struct cox_collector *collector, uint64_t deadline_ns)
{
    /* What is waited for may be a word in shared memory that nobody signals here (a frame returned,
     * a late answer), so the slice is a short one. */
    uint64_t until = cox_deadline_min(deadline_ns, cox_deadline_after_ms(1));
    struct timespec ts = cox_deadline_timespec(until);
    pthread_mutex_lock(&collector->lock);
    pthread_cond_timedwait(&collector->ended_cond, &collector->lock, &ts);
    pthread_mutex_unlock(&collector->lock);
}

void cox_collector_wake(struct cox_collector *collector)
{
    /* seq_cst, both sides: the waker stores its cause and reads `sleeping`, the collector stores
     * `sleeping` and reads `causes`; one of the two sees the other. Partner: cox_collector_sleep.
     */
    atomic_fetch_add(&collector->causes, 1);
    uint32_t sleeping = atomic_load(&collector->sleeping);
    if (sleeping) {
        /* relaxed: see collector_count_token. Counted before the post, so that no token is taken
         * for an answer. */
        atomic_fetch_add_explicit(&collector->ranks[sleeping - 1].foreign, collector->legacy,
                                  memory_order_relaxed);
        cox_gate_post(&collector->channel->gate, sleeping - 1, COX_BELL_RESPONSE_CONSUME);
    }
    pthread_mutex_lock(&collector->lock);
    pthread_cond_broadcast(&collector->work);
    pthread_cond_broadcast(&collector->ended_cond);
    pthread_mutex_unlock(&collector->lock);
}

COX_HOT struct cox_look cox_collector_look(const struct cox_collector *collector)
{
    return (struct cox_look){
        .causes = atomic_load(&collector->causes),
        .ticket = cox_gate_ticket(&collector->channel->gate, COX_BELL_RESPONSE_CONSUME),
    };
}

struct collector_gaze {
    const struct cox_collector *collector;
    const struct cox_layout_rank_line *line; /* NULL: the bell of all ranks */
    uint64_t sequence;
    const struct cox_look *before;
};

COX_HOT static bool collector_has_answer(const void *context)
{
    const struct collector_gaze *gaze = context;
    const struct cox_collector *collector = gaze->collector;
    const bool rung = gaze->line
                          ? cox_truth_done(gaze->line) >= gaze->sequence
                          : cox_gate_ticket(&collector->channel->gate, COX_BELL_RESPONSE_CONSUME) !=
                                gaze->before->ticket;
    return rung || atomic_load(&collector->causes) != gaze->before->causes;
}

COX_HOT void cox_collector_sleep(struct cox_collector *collector, uint32_t rank, uint64_t sequence,
                                 const struct cox_look *before, uint64_t deadline_ns)
{
    const struct cox_channel *channel = collector->channel;
    const struct collector_gaze gaze = {
        .collector = collector,
        .line = cox_gate_shared(&channel->gate) || collector->legacy
                    ? NULL
                    : cox_truth_line(channel->control, rank, channel->id),
        .sequence = sequence,
        .before = before,
    };
    collector->sleep_rank = (int)rank;
    collector->sleep_ns = deadline_ns;
    pthread_mutex_unlock(&collector->lock);
    if (cox_spin_until(&collector->spinner, collector_has_answer, &gaze, deadline_ns)) {
        pthread_mutex_lock(&collector->lock);
        collector->stats.counts.looks = collector->spinner.found;
        collector->sleep_rank = -1;
        return;
    }
    int r = COX_TIMEOUT;
    atomic_store(&collector->sleeping, rank + 1); /* seq_cst: see cox_collector_wake */
    if (atomic_load(&collector->causes) == before->causes)
        r = cox_gate_wait(&collector->channel->gate, rank, COX_BELL_RESPONSE_CONSUME,
                          before->ticket, deadline_ns);
    /* relaxed: seen late, it is one token too many. */
    atomic_store_explicit(&collector->sleeping, 0, memory_order_relaxed);
    pthread_mutex_lock(&collector->lock);
    collector->sleep_rank = -1;
    if (r == 0 && collector->legacy)
        collector_count_token(collector, rank);
    collector->stats.counts.wakeups++;
}

/* ---- a rank that is started again ---- */

static bool collector_asks(struct cox_collector *collector, uint32_t rank)
{
    for (uint64_t sequence = collector->ended + 1; sequence <= collector->published; sequence++) {
        const struct cox_entry *entry = collector_entry(collector, sequence);
        if (!entry->ended && cox_rank_set_has(&entry->asked, rank))
            return true;
    }
    return false;
}

int cox_collector_leave_out(struct cox_collector *collector, uint32_t rank, uint64_t deadline_ns)
{
    const struct timespec until = cox_deadline_timespec(deadline_ns);
    /* Under submit_lock: whoever was let through by claim has published by now. */
    pthread_mutex_lock(&collector->submit_lock);
    pthread_mutex_lock(&collector->lock);
    collector->ranks[rank].left_out = true;
    pthread_mutex_unlock(&collector->submit_lock);
    /* They all end soon: the rank is dead. */
    while (collector_asks(collector, rank) && cox_now_ns() < deadline_ns)
        pthread_cond_timedwait(&collector->ended_cond, &collector->lock, &until);
    /* The last of them may be in the hands of the handler that runs now; later ones are about others. */
    uint64_t run = collector->handler_runs;
    while (collector->in_handler && collector->handler_runs == run && cox_now_ns() < deadline_ns)
        pthread_cond_timedwait(&collector->ended_cond, &collector->lock, &until);
    bool told = !collector->in_handler || collector->handler_runs != run;
    int r = collector_asks(collector, rank) || !told ? COX_TIMEOUT : 0;
    pthread_mutex_unlock(&collector->lock);
    cox_fault_point(COX_FAULT_RANK_LEFT_OUT);
    return r;
}

static void collector_reset_line(struct cox_collector *collector, uint32_t rank)
{
    const struct cox_channel *channel = collector->channel;
    cox_truth_reset_line(cox_truth_line(channel->control, rank, channel->id), collector->published);
    /* Said again: the new process compares the two. */
    cox_truth_set_published(cox_truth_channel(channel->control, channel->id), collector->published);
}

void cox_collector_reset_line(struct cox_collector *collector, uint32_t rank)
{
    pthread_mutex_lock(&collector->lock);
    collector_reset_line(collector, rank);
    pthread_mutex_unlock(&collector->lock);
}

/* Every token that lies there is of the dead. Those of wakers are counted first, so that none of them is still
 * expected. */
static void collector_restore_bells(struct cox_collector *collector, uint32_t rank)
{
    collector_forget_stray(collector, rank);
    cox_gate_restore(&collector->channel->gate, rank, collector_geometry(collector)->depth);
    collector->ranks[rank].legacy_done = collector->published;
}

int cox_collector_reset_rank(struct cox_collector *collector, uint32_t rank, uint32_t generation,
                             int ret_fds[COX_BELL_COUNT], struct cox_error *err)
{
    struct cox_channel *channel = collector->channel;
    const struct cox_geometry *geometry = collector_geometry(collector);
    int r = 0;
    pthread_mutex_lock(&collector->lock);
    /* Nobody sleeps on its bells: the collector only does while a request in flight asks the rank. */
    if (collector->legacy)
        collector_restore_bells(collector, rank);
    else if (!cox_gate_shared(&channel->gate))
        r = cox_gate_renew(&channel->gate, channel->id, rank, geometry->depth, ret_fds, err);
    if (r == 0) {
        collector_reset_line(collector, rank);
        for (uint32_t frame = 0; frame < geometry->depth; frame++)
            if (cox_rank_set_has(&collector->entries[frame].asked, rank))
                cox_rank_set_add(&collector->entries[frame].consumed, rank);
        collector->ranks[rank].generation = collector->legacy ? 0 : generation;
        collector->ranks[rank].left_ns = 0;
    }
    pthread_mutex_unlock(&collector->lock);
    return r;
}

void cox_collector_admit(struct cox_collector *collector, uint32_t rank)
{
    pthread_mutex_lock(&collector->lock);
    collector->ranks[rank].left_out = false;
    pthread_mutex_unlock(&collector->lock);
    cox_fault_point(COX_FAULT_RANK_ADMITTED);
}

/* ---- gathering: requests end in order, except that a deadline waits for nobody ---- */

static struct cox_gathering *collector_gathering(struct cox_collector *collector,
                                                 const struct cox_entry *entry)
{
    return &collector->gatherings[cox_geometry_frame(entry->sequence,
                                                     collector_geometry(collector)->depth)];
}

/* Takes the answer of a rank that owed it, if it is there, or sees its death. */
COX_HOT static void gather_look_rank(struct cox_collector *collector, struct cox_entry *entry,
                                     uint32_t rank)
{
    struct cox_gathering *gathering = collector_gathering(collector, entry);
    /* Once more after a death: an answer that was complete before it counts. */
    bool answered = collector_answered(collector, rank, entry->sequence);
    bool dead = !answered && collector_dead(collector, rank);
    if (answered || (dead && collector_answered(collector, rank, entry->sequence))) {
        int r = 0;
        if (collector->legacy && !entry->operation->legacy_slotted && rank > 0) {
            cox_gathering_take_empty(gathering, rank);
        } else if (cox_gathering_take(gathering, collector->channel, rank, entry->sequence,
                                      entry->type, collector->ranks[rank].generation)) {
            /* Not under the lock: a large answer takes a while to copy, and only this thread looks at it. */
            pthread_mutex_unlock(&collector->lock);
            r = cox_gathering_take_block(gathering, &collector->blocks->intake, rank, entry->type);
            pthread_mutex_lock(&collector->lock);
        }
        /* The answer went with its rank. If that is not known to be dead it is about to be, which wakes. */
        if (r == COX_PEER_DEAD && collector_dead(collector, rank))
            cox_gathering_bury(gathering, rank, collector->supervisor);
        if (r == COX_PEER_DEAD)
            return;
        cox_fault_point(COX_FAULT_REPLY_FETCHED);
        collector_consume(collector, entry, rank);
    } else if (dead) {
        cox_gathering_bury(gathering, rank, collector->supervisor);
    }
}

/* One pass over what is in flight. */
struct pass {
    /* Every rank is looked at. Otherwise only what a bell without news of its own can tell: the next rank in turn where
     * each has a bell, and nothing where the last of all rings; a line that is looked at while its rank writes it costs both. */
    bool thorough;
    uint64_t told_ns; /* the time a moment ago, where it is known */
    uint64_t now_ns;  /* 0: nobody has asked: a pass that finds all answers does without */
    bool ring;        /* who has not taken a frame is rung again; known with now_ns */
};

COX_HOT static void pass_look_at_clock(struct cox_collector *collector, struct pass *pass)
{
    if (pass->now_ns)
        return;
    pass->now_ns = pass->told_ns ? pass->told_ns : cox_now_ns();
    pass->ring = ring_due(&collector->ring_ns, pass->now_ns);
}

/* Looks at ranks that owe an answer. Returns the last that still does, -1: none, -2: the request has failed. The last, and
 * from there down: ranks are let through in order, and who waits for the last of them is mostly woken once, when all the
 * others have answered as well. */
COX_HOT static int gather_look(struct cox_collector *collector, struct cox_entry *entry,
                               const struct pass *pass)
{
    struct cox_gathering *gathering = collector_gathering(collector, entry);
    const bool alone = !pass->thorough && !gathering->failed;
    int last = -1;
    for (uint32_t left = gathering->left; left > 0; left--) {
        const uint32_t rank = left - 1;
        const struct cox_rank_result *result = &gathering->results[rank];
        if (result->outcome == COX_OUTCOME_LATE &&
            (pass->thorough || !cox_gate_shared(&collector->channel->gate)))
            gather_look_rank(collector, entry, rank);
        if (result->outcome == COX_OUTCOME_LATE && last < 0)
            last = (int)rank;
        gathering->failed |=
            result->outcome == COX_OUTCOME_ERROR || result->outcome == COX_OUTCOME_DEAD;
        if (last >= 0 && alone)
            break;
    }
    gathering->left = (uint32_t)(last + 1);
    return gathering->failed ? -2 : last;
}

/* It has not taken the request; or it is idle again, and its answer was written over, which it says again. */
static bool gather_sleeps(const struct cox_layout_rank_line *line, uint64_t sequence)
{
    /* acquire: partner is cox_truth_set_state. */
    uint64_t word = atomic_load_explicit(&line->word, memory_order_acquire);
    return cox_truth_taken(line) < sequence || (word >> COX_STATE_SHIFT == COX_RANK_IDLE &&
                                                word >= cox_state_word(COX_RANK_IDLE, sequence));
}

/* Rings again each live rank that has not taken its frame: the one wake-up may have been lost with
 * a signal, a killed predecessor, or a meddler. */
static void gather_ring(struct cox_collector *collector, const struct cox_entry *entry)
{
    const struct cox_gathering *gathering = collector_gathering(collector, entry);
    for (uint32_t rank = 0; rank < collector->rank_count; rank++)
        if (gathering->results[rank].outcome == COX_OUTCOME_LATE &&
            gather_sleeps(cox_truth_line(collector->channel->control, rank, collector->channel->id),
                          entry->sequence))
            collector_ring(collector, rank);
}

COX_HOT static void gather_complete(struct cox_collector *collector, const struct cox_entry *entry,
                                    int status, struct cox_completion *ret_completion)
{
    struct cox_gathering *gathering = collector_gathering(collector, entry);
    if (status)
        cox_report_late(collector, entry, status, gathering);
    if (status == 0 && entry->operation->step && !collector->legacy)
        status = cox_report_divergence(gathering);
    if (status && gathering->text[0] == '\0')
        cox_report_failure(collector, entry, status, gathering);
    *ret_completion = (struct cox_completion){
        .sequence = entry->sequence,
        .channel = collector->channel->id,
        .type = entry->type,
        .status = status,
        .text = status ? gathering->text : NULL,
        .rank_count = collector->rank_count,
        .ranks = gathering->results,
        .payload = cox_gathering_choose(gathering, entry->gather),
        .request_context = entry->request_context,
        .submitted_ns = entry->submitted_ns,
        .published_ns = entry->published_ns,
    };
}

/* The gathering is the caller's alone. */
static void gather_note_complaints(struct cox_collector *collector, const struct cox_entry *entry)
{
    const struct cox_gathering *gathering = collector_gathering(collector, entry);
    for (uint32_t rank = 0; rank < collector->rank_count; rank++) {
        const struct cox_rank_result *result = &gathering->results[rank];
        if (result->outcome == COX_OUTCOME_ERROR)
            cox_complaints_add(collector->complaints, rank,
                               "pid %jd on %s sequence %" PRIu64 " (%s): %s", (intmax_t)result->pid,
                               cox_channel_name(collector->channel->id), entry->sequence,
                               entry->operation->name, result->text);
    }
}

/* Memory that only large requests and answers take. The ranks that answered in a block give it back when they are awake next,
 * which may be never: so they are woken, and those as well whose answer has just come too late to be looked at. */
COX_HOT static void gather_let_go(struct cox_collector *collector, struct cox_gathering *gathering)
{
    for (uint32_t rank = 0; rank < collector->rank_count; rank++)
        if (gathering->ranks[rank].in_block ||
            (gathering->results[rank].outcome == COX_OUTCOME_LATE &&
             collector->blocks->intake.size_max > 0))
            cox_gate_post(&collector->channel->gate, rank, COX_BELL_REQUEST_CONSUME);
    cox_gathering_let_go(gathering);
    cox_collector_release_blocks(collector);
}

/* Hands the completion over. lock is held on entry and on return, not over the handler. */
COX_HOT static void gather_finish(struct cox_collector *collector, struct cox_entry *entry,
                                  int status)
{
    struct cox_gathering *gathering = collector_gathering(collector, entry);
    struct cox_completion completion;
    if (status) /* many words may have to be found for it */
        pthread_mutex_unlock(&collector->lock);
    gather_complete(collector, entry, status, &completion);
    if (completion.status)
        gather_note_complaints(collector, entry);
    cox_fault_point(COX_FAULT_COMPLETE);
    if (status)
        pthread_mutex_lock(&collector->lock);
    if (completion.status && entry->operation->step)
        cox_truth_set_void(cox_truth_channel(collector->channel->control, collector->channel->id),
                           collector->published);
    entry->ended = true;
    collector_advance(collector);
    cox_stats_end(&collector->stats, completion.status, &gathering->taken);
    struct cox_waiter *waiter = entry->waiter;
    entry->waiter = NULL;
    cox_completion_fn handler = waiter ? waiter->visit : collector->handler;
    void *context = waiter ? waiter->visit_context : collector->handler_context;
    collector->in_handler = true;
    collector->handler_runs++;
    collector->handler_thread = pthread_self();
    pthread_mutex_unlock(&collector->lock);

    completion.completed_ns = cox_now_ns();
    struct cox_inside inside;
    cox_inside_enter(&inside, collector->owner);
    if (handler)
        handler(context, &completion);
    cox_inside_leave(&inside);
    uint64_t returned_ns = handler ? cox_now_ns() : completion.completed_ns;
    cox_fault_point(COX_FAULT_HANDLED);

    /* relaxed: the block of this request is among them, if it has one. */
    const bool holds = completion.status || cox_gathering_holds(gathering) ||
                       atomic_load_explicit(&collector->blocks_used, memory_order_relaxed) > 0;
    pthread_mutex_lock(&collector->lock);
    collector->in_handler = false;
    collector->told_ns = holds ? 0 : returned_ns; /* to give much back takes a while */
    cox_stats_return(&collector->stats, &completion, returned_ns);
    if (!waiter && !holds) {
        pthread_cond_broadcast(&collector->ended_cond);
        return;
    }
    if (waiter) {
        if (completion.status)
            cox_fail(waiter->err, completion.status, "%s", completion.text);
        waiter->status = completion.status;
        waiter->done = true;
    }
    pthread_mutex_unlock(&collector->lock);
    /* From here on the waiter may be gone. Not under the lock, which the caller would only wake up
     * to wait for. */
    pthread_cond_broadcast(&collector->ended_cond);
    if (holds)
        gather_let_go(collector, gathering);
    pthread_mutex_lock(&collector->lock);
}

/* A request has failed. Is a rank that owes an answer about to be known as dead? Then that is most likely why
 * the others failed. *ret_owing: which. */
static bool gather_awaits_death(struct cox_collector *collector, struct cox_entry *entry,
                                int *ret_owing)
{
    const struct cox_gathering *gathering = collector_gathering(collector, entry);
    if (!entry->dying_ns)
        entry->dying_ns = cox_deadline_after_ns(COX_DYING_NS);
    for (uint32_t rank = 0; rank < collector->rank_count; rank++)
        if (gathering->results[rank].outcome == COX_OUTCOME_DEAD)
            return false;
    if (cox_now_ns() >= entry->dying_ns)
        return false;
    for (uint32_t rank = 0; rank < collector->rank_count; rank++)
        if (gathering->results[rank].outcome == COX_OUTCOME_LATE &&
            cox_supervisor_dying(collector->supervisor, rank)) {
            *ret_owing = (int)rank;
            return true;
        }
    return false;
}

/* Why a request ends now although ranks still owe answers; 0: it does not. */
static int gather_cut(const struct cox_collector *collector, const struct cox_entry *entry,
                      const struct pass *pass)
{
    if (atomic_load_explicit(&collector->stopping, memory_order_acquire))
        return COX_CLOSED;
    return pass->now_ns >= entry->deadline_ns ? COX_TIMEOUT : 0;
}

static bool rank_sets_meet(const struct cox_rank_set *a, const struct cox_rank_set *b)
{
    uint64_t both = 0;
    for (size_t i = 0; i < COX_RANK_COUNT_MAX / 64; i++)
        both |= a->words[i] & b->words[i];
    return both != 0;
}

static void gathering_add_owing(const struct cox_gathering *gathering, struct cox_rank_set *owed)
{
    for (uint32_t rank = 0; rank < gathering->rank_count; rank++)
        if (gathering->results[rank].outcome == COX_OUTCOME_LATE)
            cox_rank_set_add(owed, rank);
}

/* Looks at everything in flight, oldest first, and ends the first request that can end. Returns
 * true when one did, or when there is already more to look at. Otherwise *ret_owing is a rank to
 * sleep on, -1: nothing is in flight, and *ret_deadline_ns the next deadline. lock is held on entry
 * and on return, given up over a handler. */
COX_HOT static bool gather_round(struct cox_collector *collector, const struct cox_look *before,
                                 bool *looked_again, int *ret_owing, uint64_t *ret_sequence,
                                 uint64_t *ret_deadline_ns)
{
    uint64_t late_sequence;
    collector_drop_late(collector, &late_sequence);
    *ret_owing = -1;
    *ret_sequence = 0;
    *ret_deadline_ns = COX_DEADLINE_NEVER;
    struct pass pass = {.told_ns = collector->told_ns};
    collector->told_ns = 0;
    const bool whole = collector->whole;
    collector->whole = false;
    const bool news =
        before->causes != collector->seen.causes || before->ticket != collector->seen.ticket;
    bool apart = false;               /* a request is not owed by the rank that is slept on */
    struct cox_rank_set owed = {{0}}; /* by whom, for the requests looked at */
    for (uint64_t sequence = collector->ended + 1; sequence <= collector->published; sequence++) {
        struct cox_entry *entry = collector_entry(collector, sequence);
        if (entry->ended)
            continue;
        struct cox_gathering *gathering = collector_gathering(collector, entry);
        if (collector->begun < sequence) {
            cox_gathering_begin(gathering, &entry->asked, collector->supervisor);
            collector->begun = sequence;
        }
        pass.thorough =
            news || pass.ring || *looked_again || whole || entry->causes != before->causes;
        int owing = gather_look(collector, entry, &pass);
        if (owing >= 0) {
            const bool early =
                pass.now_ns == 0; /* the look was before the clock, and may have taken a while */
            pass_look_at_clock(collector, &pass);
            if ((pass.ring && !pass.thorough) || (early && gather_cut(collector, entry, &pass))) {
                pass.thorough = true;
                owing = gather_look(collector, entry, &pass);
            }
        }
        int cut = owing >= 0 ? gather_cut(collector, entry, &pass) : 0;
        /* It ends before its turn: everybody is looked at once more, for what they answered, and for which of the failures
         * is the cause. */
        if ((cut || owing == -2) && !pass.thorough)
            return collector->whole = true;
        if (owing == -2 && gather_awaits_death(collector, entry, &owing)) {
            *ret_deadline_ns = cox_deadline_min(*ret_deadline_ns, entry->dying_ns);
            pass_look_at_clock(collector, &pass);
            cut = gather_cut(collector, entry, &pass);
        }
        /* A rank answers in order: if it owed an earlier answer a moment ago, that is there by now,
         * also before an error or a death. One more look; not for ever, since its words are another
         * process's. */
        if (owing < 0 && !*looked_again && rank_sets_meet(&owed, &entry->asked))
            return *looked_again = true;
        if (sequence < collector->published)
            gathering_add_owing(gathering, &owed);
        if (owing < 0 || cut) {
            if (sequence == collector->published) /* all was looked at */
                collector->seen = *before;
            gather_finish(collector, entry, cox_gathering_status(gathering, cut));
            *looked_again = false;
            return true;
        }
        if (pass.ring)
            gather_ring(collector, entry);
        if (*ret_owing < 0) {
            *ret_owing = owing;
            *ret_sequence = sequence;
        }
        apart = apart || gathering->results[*ret_owing].outcome != COX_OUTCOME_LATE;
        *ret_deadline_ns = cox_deadline_min(*ret_deadline_ns, entry->deadline_ns);
    }
    collector->seen = *before;
    if (apart && !cox_gate_shared(&collector->channel->gate))
        *ret_deadline_ns = cox_deadline_min(*ret_deadline_ns, cox_deadline_after_ns(COX_APART_NS));
    return false;
}

/* Gathers until `sequence` has ended, or (0) until nothing is in flight. lock is held on entry and
 * on return. */
COX_HOT static void collector_gather(struct cox_collector *collector, uint64_t sequence)
{
    bool looked_again = false;
    while (sequence == 0 || collector->ended < sequence) {
        /* Before the look: a cause stored after this is seen by the sleep. */
        const struct cox_look before = cox_collector_look(collector);
        int owing;
        uint64_t owed, deadline_ns;
        if (gather_round(collector, &before, &looked_again, &owing, &owed, &deadline_ns))
            continue;
        if (owing < 0)
            return;
        cox_collector_sleep(collector, (uint32_t)owing, owed, &before,
                            cox_deadline_min(deadline_ns, collector->ring_ns));
        looked_again = false;
    }
}

int cox_collector_gather_enter(struct cox_collector *collector, uint64_t deadline_ns)
{
    const struct timespec until = cox_deadline_timespec(deadline_ns);
    pthread_mutex_lock(&collector->lock);
    while (collector->gathering && cox_now_ns() < deadline_ns)
        pthread_cond_timedwait(&collector->ended_cond, &collector->lock, &until);
    int r = collector->gathering ? COX_TIMEOUT : 0;
    collector->gathering = true;
    pthread_mutex_unlock(&collector->lock);
    return r;
}

void cox_collector_gather_leave(struct cox_collector *collector)
{
    pthread_mutex_lock(&collector->lock);
    collector->gathering = false;
    pthread_cond_broadcast(&collector->ended_cond);
    pthread_mutex_unlock(&collector->lock);
}

void cox_collector_gather(struct cox_collector *collector, uint64_t sequence)
{
    pthread_mutex_lock(&collector->lock);
    collector->told_ns = 0; /* of the caller before */
    collector_gather(collector, sequence);
    pthread_mutex_unlock(&collector->lock);
}

/* Releases what can be, or sleeps a slice. lock is held on entry and on return, and given up meanwhile. */
static void collector_await_blocks(struct cox_collector *collector)
{
    const struct timespec until = cox_deadline_timespec(cox_deadline_after_ns(COX_SLICE_NS));
    const uint64_t published = collector->published;
    pthread_mutex_unlock(&collector->lock);
    cox_collector_release_blocks(collector);
    pthread_mutex_lock(&collector->lock);
    if (collector->published == published &&
        !atomic_load_explicit(&collector->stopping, memory_order_acquire) &&
        atomic_load_explicit(&collector->blocks_used, memory_order_relaxed) > 0)
        pthread_cond_timedwait(&collector->work, &collector->lock, &until);
}

struct idle_gaze {
    const struct cox_collector *collector;
    uint64_t published;
};

static bool collector_has_work(const void *context)
{
    const struct idle_gaze *gaze = context;
    return atomic_load_explicit(&gaze->collector->news, memory_order_relaxed) != gaze->published ||
           atomic_load_explicit(&gaze->collector->stopping, memory_order_relaxed);
}

/* True: something was published while it looked. lock is held on entry and on return. */
static bool collector_looks(struct cox_collector *collector)
{
    const struct idle_gaze gaze = {collector, collector->published};
    if (collector->spinner.budget_ns == 0)
        return false;
    pthread_mutex_unlock(&collector->lock);
    const bool found =
        cox_spin_until(&collector->spinner, collector_has_work, &gaze, COX_DEADLINE_NEVER);
    pthread_mutex_lock(&collector->lock);
    collector->stats.counts.looks = collector->spinner.found;
    return found || collector->published != gaze.published ||
           atomic_load_explicit(&collector->stopping, memory_order_acquire);
}

static void *collector_main(void *argument)
{
    struct cox_collector *collector = argument;
    pthread_mutex_lock(&collector->lock);
    for (;;) {
        collector_gather(collector, 0);
        if (atomic_load_explicit(&collector->stopping, memory_order_acquire))
            break;
        /* A block that a late rank may still read is owed; otherwise nothing: sleep without a timeout. */
        if (atomic_load_explicit(&collector->blocks_used, memory_order_relaxed) > 0)
            collector_await_blocks(collector);
        else if (!collector_looks(collector))
            pthread_cond_wait(&collector->work, &collector->lock);
    }
    pthread_mutex_unlock(&collector->lock);
    return NULL;
}

int cox_collector_init(struct cox_collector *collector, struct cox_channel *channel,
                       const void *owner, struct cox_blocks_choice *blocks,
                       const struct cox_log *log)
{
    const struct cox_geometry *geometry = &channel->control->geometry;
    memset(collector, 0, sizeof *collector);
    collector->blocks = blocks;
    collector->channel = channel;
    collector->sleep_rank = -1;
    collector->spinner.budget_ns = geometry->spin_ns;
    collector->rank_count = geometry->rank_count;
    collector->legacy = geometry->legacy;
    collector->owner = owner;
    collector->log = log;
    pthread_mutex_init(&collector->submit_lock, NULL);
    pthread_mutex_init(&collector->lock, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&collector->work, &monotonic);
    pthread_cond_init(&collector->ended_cond, &monotonic);
    pthread_condattr_destroy(&monotonic);
    collector->ranks = calloc(collector->rank_count, sizeof *collector->ranks);
    int r = collector->ranks ? 0 : -ENOMEM;
    for (uint32_t rank = 0; r == 0 && rank < collector->rank_count; rank++)
        collector->ranks[rank].generation = geometry->legacy ? 0 : 1;
    for (uint32_t frame = 0; r == 0 && frame < geometry->depth; frame++)
        r = cox_gathering_init(&collector->gatherings[frame], geometry, channel->id);
    if (r)
        cox_collector_deinit(collector);
    return r;
}

void cox_collector_deinit(struct cox_collector *collector)
{
    if (!collector->channel)
        return;
    for (uint32_t frame = 0; frame < COX_DEPTH_MAX; frame++) {
        cox_gathering_deinit(&collector->gatherings[frame]);
        cox_bulk_drop(&collector->blocks->sender, &collector->frame_blocks[frame].block);
    }
    free(collector->ranks);
    pthread_cond_destroy(&collector->work);
    pthread_cond_destroy(&collector->ended_cond);
    pthread_mutex_destroy(&collector->lock);
    pthread_mutex_destroy(&collector->submit_lock);
    memset(collector, 0, sizeof *collector);
}

int cox_collector_start(struct cox_collector *collector)
{
    int r = cox_thread_start(&collector->thread, collector_main, collector);
    collector->threaded = r == 0;
    return r;
}

void cox_collector_stop(struct cox_collector *collector)
{
    if (!collector->channel)
        return;
    /* Under submit_lock: whoever was let through by claim has published by now, and the response
     * thread sees that before it ends. release: partner are the acquire loads above; the cause
     * before the wake. */
    pthread_mutex_lock(&collector->submit_lock);
    atomic_store_explicit(&collector->stopping, true, memory_order_release);
    pthread_mutex_unlock(&collector->submit_lock);
    cox_collector_wake(collector);
    if (collector->threaded) {
        pthread_join(collector->thread, NULL);
        collector->threaded = false;
    }
}
