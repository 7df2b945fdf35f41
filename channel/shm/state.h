/*
 * state: the shared words of the control region behind a few functions. Private to the library.
 *
 * Every load and store of layout.h's atomics is here, with the reason for its order. Two
 * exceptions: control.c has the magic number, futex_gate.c the words of the wake memory.
 * tests/tree/atomics.py checks it.
 *
 * Threads: coordinator functions (cox_state_publish...) under the submit lock of their channel;
 *   rank functions on the thread that serves the channel in that rank's process; loads from
 *   anywhere.
 * Blocks: nothing.
 * If the process dies: each word is one store; a reader sees it or does not.
 */
#ifndef COX_CHANNEL_STATE_H
#define COX_CHANNEL_STATE_H

#include "control.h"
#include "channel/base/fault.h"
#include "channel/base/futex.h"

static inline struct cox_layout_channel_state *cox_state_channel(const struct cox_control *control,
                                                                 enum cox_channel_id channel)
{
    return &control->layout->channels[channel];
}

static inline struct cox_layout_rank_line *cox_state_line(const struct cox_control *control,
                                                          uint32_t rank,
                                                          enum cox_channel_id channel)
{
    return &control->ranks[rank]->lines[channel];
}

/* ---- written by the coordinator ---- */

struct cox_frame_record {
    uint64_t sequence;
    uint32_t type;
    uint32_t length;
    struct cox_rank_set asked;
};

static inline void cox_state_set_published(struct cox_layout_channel_state *shared,
                                           uint64_t sequence)
{
    /* release: bytes and record before the number; partner is cox_state_published. */
    atomic_store_explicit(&shared->published, sequence, memory_order_release);
    cox_fault_point(COX_FAULT_REQUEST_PUBLISHED);
}

/* The bytes of the frame must be written before. */
static inline void cox_state_publish(struct cox_layout_channel_state *shared, uint32_t depth,
                                     const struct cox_frame_record *record)
{
    struct cox_layout_frame *frame = &shared->frames[cox_geometry_frame(record->sequence, depth)];
    /* relaxed: ordered before the fields by their release stores. So a reader that sees a new field
     * with its acquire load sees the zero, or a later value, when it loads sequence again. */
    atomic_store_explicit(&frame->sequence, 0, memory_order_relaxed);
    cox_fault_point(COX_FAULT_RECORD_BEGUN);
    atomic_store_explicit(&frame->type, record->type, memory_order_release);
    atomic_store_explicit(&frame->length, record->length, memory_order_release);
    for (size_t i = 0; i < COX_RANK_COUNT_MAX / 64; i++)
        atomic_store_explicit(&frame->asked[i], record->asked.words[i], memory_order_release);
    /* release: fields before sequence; partner is cox_state_read_frame. */
    atomic_store_explicit(&frame->sequence, record->sequence, memory_order_release);
    cox_fault_point(COX_FAULT_RECORD_WRITTEN);
    cox_state_set_published(shared, record->sequence);
}

/* relaxed: for display, and before the publication. Reading the clock would cost a rank that was
 * just scheduled more than this line, which it reads anyway. */
static inline void cox_state_set_stamp(struct cox_layout_channel_state *shared, uint64_t now_ns)
{
    atomic_store_explicit(&shared->stamp_ns, now_ns, memory_order_relaxed);
    cox_fault_point(COX_FAULT_REQUEST_STAMPED);
}

/* About when the last request was published; 0: unknown. */
static inline uint64_t cox_state_stamp(const struct cox_layout_channel_state *shared)
{
    return atomic_load_explicit(&shared->stamp_ns, memory_order_relaxed);
}

static inline uint64_t cox_state_published(const struct cox_layout_channel_state *shared)
{
    return atomic_load_explicit(&shared->published, memory_order_acquire);
}

/* Returns false if the frame holds another sequence or is being written: this rank was not asked
 * for `sequence`. */
static inline bool cox_state_read_frame(const struct cox_layout_channel_state *shared,
                                        uint32_t depth, uint64_t sequence,
                                        struct cox_frame_record *ret_record)
{
    const struct cox_layout_frame *frame = &shared->frames[cox_geometry_frame(sequence, depth)];
    if (atomic_load_explicit(&frame->sequence, memory_order_acquire) != sequence)
        return false;
    struct cox_frame_record record = {.sequence = sequence};
    /* acquire: partners are the release stores of cox_state_publish, see there. */
    record.type = atomic_load_explicit(&frame->type, memory_order_acquire);
    record.length = atomic_load_explicit(&frame->length, memory_order_acquire);
    for (size_t i = 0; i < COX_RANK_COUNT_MAX / 64; i++)
        record.asked.words[i] = atomic_load_explicit(&frame->asked[i], memory_order_acquire);
    /* relaxed: cannot move before the acquire loads above. */
    if (atomic_load_explicit(&frame->sequence, memory_order_relaxed) != sequence)
        return false;
    *ret_record = record;
    return true;
}

/* Returns false if the frame holds another sequence, is being written, or `sequence` does not fit a
 * state word. */
static inline bool cox_state_frame_holds(const struct cox_layout_channel_state *shared,
                                         uint32_t depth, uint64_t sequence)
{
    /* acquire: partner is the release of sequence in cox_state_publish; the frame's bytes were
     * written before it. */
    return sequence >> COX_STATE_SHIFT == 0 &&
           atomic_load_explicit(&shared->frames[cox_geometry_frame(sequence, depth)].sequence,
                                memory_order_acquire) == sequence;
}

/* Returns true if the frame of `sequence` still holds an earlier request: then `sequence` was not
 * published, whatever the published number is. 0 is a frame that is being written for a later one.
 */
static inline bool cox_state_frame_behind(const struct cox_layout_channel_state *shared,
                                          uint32_t depth, uint64_t sequence)
{
    /* acquire: as above. */
    uint64_t there = atomic_load_explicit(
        &shared->frames[cox_geometry_frame(sequence, depth)].sequence, memory_order_acquire);
    return there != 0 && there < sequence;
}

/* release/acquire: a reader that sees a step as void also sees why it was cancelled. */
static inline void cox_state_set_void(struct cox_layout_channel_state *shared, uint64_t sequence)
{
    atomic_store_explicit(&shared->void_through, sequence, memory_order_release);
    cox_fault_point(COX_FAULT_VOID_STORED);
}

static inline uint64_t cox_state_void_through(const struct cox_layout_channel_state *shared)
{
    return atomic_load_explicit(&shared->void_through, memory_order_acquire);
}

/* release: the copies out of the slots before the number; partner is cox_state_ended in the rank
 * that writes the slot next. */
static inline void cox_state_set_ended(struct cox_layout_channel_state *shared, uint64_t sequence)
{
    atomic_store_explicit(&shared->ended, sequence, memory_order_release);
    cox_fault_point(COX_FAULT_ENDED_STORED);
}

static inline uint64_t cox_state_ended(const struct cox_layout_channel_state *shared)
{
    return atomic_load_explicit(&shared->ended, memory_order_acquire);
}

/* Requests may end before earlier ones, which `ended` cannot express. release: a bit is cleared
 * before the frame is published again; partner is the acquire of the frame's readers. */
static inline void cox_state_set_cancelled(struct cox_layout_channel_state *shared, uint64_t frames)
{
    atomic_store_explicit(&shared->cancelled_frames, frames, memory_order_release);
    cox_fault_point(COX_FAULT_VOID_STORED);
}

/* Returns true if no caller waits for the reply to `sequence`, which this rank has taken and not
 * replied to, so that the frame still belongs to it. */
static inline bool cox_state_cancelled(const struct cox_layout_channel_state *shared,
                                       uint32_t depth, uint64_t sequence)
{
    return cox_state_ended(shared) >= sequence ||
           atomic_load_explicit(&shared->cancelled_frames, memory_order_acquire) >>
                   cox_geometry_frame(sequence, depth) &
               1;
}

/* Makes ranks write to their eventfd after each reply. seq_cst, both sides: the caller gathers
 * after this store, and a rank loads this after it has stored the wakeup word of its reply; one of
 * the two sees the other. Partner: cox_state_notifies. */
static inline void cox_state_set_notify(struct cox_layout_channel_state *shared)
{
    atomic_store_explicit(&shared->notify, 1, memory_order_seq_cst);
    cox_fault_point(COX_FAULT_VOID_STORED);
}

/* To be called after the words of a reply were stored; see cox_state_set_notify. */
static inline bool cox_state_notifies(const struct cox_layout_channel_state *shared)
{
    return atomic_load_explicit(&shared->notify, memory_order_seq_cst) != 0;
}

/* The value that ends this group and no other. Two of its bits are always set, so that a single
 * flipped bit of the initial 0 is not this value. */
static inline uint32_t cox_state_abort_value(const struct cox_control *control)
{
    uint64_t mixed =
        (control->layout->header.coordinator_start ^ (uint64_t)control->group_incarnation << 32) *
        UINT64_C(0x9e3779b97f4a7c15);
    return (uint32_t)(mixed >> 32) | 0x80000001u;
}

static inline void cox_state_abort(const struct cox_control *control)
{
    /* release/acquire: the cause was stored before. */
    atomic_store_explicit(&control->layout->abort.word, cox_state_abort_value(control),
                          memory_order_release);
    cox_fault_point(COX_FAULT_ABORT_STORED);
}

static inline bool cox_state_aborted(const struct cox_control *control)
{
    return atomic_load_explicit(&control->layout->abort.word, memory_order_acquire) ==
           cox_state_abort_value(control);
}

/* Resets the lines of a dead rank as if it had served everything so far: its next process then
 * reads only new requests. */
static inline void cox_state_reset_line(struct cox_layout_rank_line *line, uint64_t published)
{
    /* relaxed: the next process is forked after this, and readers in the meantime know that the
     * rank is dead. */
    for (size_t i = 0; i < COX_DEPTH_NEAR; i++)
        atomic_store_explicit(&line->tags[i], 0, memory_order_relaxed);
    for (size_t i = 0; i < COX_DEPTH_MAX - COX_DEPTH_NEAR; i++)
        atomic_store_explicit(&line->far_tags[i], 0, memory_order_relaxed);
    atomic_store_explicit(&line->group_incarnation, 0, memory_order_relaxed);
    atomic_store_explicit(&line->incarnation, 0, memory_order_relaxed);
    atomic_store_explicit(&line->stamp_ns, 0, memory_order_relaxed);
    atomic_store_explicit(&line->word, cox_state_word(COX_RANK_IDLE, published),
                          memory_order_relaxed);
    atomic_store_explicit(&line->taken, published, memory_order_relaxed);
    atomic_store_explicit(&line->returned, published, memory_order_relaxed);
    atomic_store_explicit(&line->done, published, memory_order_relaxed);
    cox_fault_point(COX_FAULT_RANK_RESET);
}

static inline void cox_state_reset_identity(struct cox_layout_identity *identity)
{
    /* relaxed: ordered by the release of `state`, after which the rank may be claimed again. */
    atomic_store_explicit(&identity->pid, 0, memory_order_relaxed);
    atomic_store_explicit(&identity->start, 0, memory_order_relaxed);
    atomic_store_explicit(&identity->incarnation, 0, memory_order_relaxed);
    atomic_store_explicit(&identity->group_incarnation, 0, memory_order_relaxed);
    atomic_store_explicit(&identity->state, COX_IDENTITY_EMPTY, memory_order_release);
    cox_fault_point(COX_FAULT_RANK_RESET);
}

/* ---- written by a rank ---- */

/* Returns false if another process is, or is about to be, the rank. Its pid and start appear a
 * moment after its claim, for error texts. */
static inline bool cox_state_claim_identity(struct cox_layout_identity *identity, uint32_t pid,
                                            uint64_t start)
{
    uint32_t empty = COX_IDENTITY_EMPTY;
    /* acquire: partners are cox_state_unclaim_identity and cox_state_reset_identity. */
    if (!atomic_compare_exchange_strong_explicit(&identity->state, &empty, COX_IDENTITY_CLAIMED,
                                                 memory_order_acquire, memory_order_relaxed))
        return false;
    /* relaxed: for display, until the release of ATTACHED. */
    atomic_store_explicit(&identity->start, start, memory_order_relaxed);
    atomic_store_explicit(&identity->pid, pid, memory_order_relaxed);
    cox_fault_point(COX_FAULT_ATTACH_CLAIMED);
    return true;
}

/* For the process that holds the claim and could not attach. */
static inline void cox_state_unclaim_identity(struct cox_layout_identity *identity)
{
    atomic_store_explicit(&identity->pid, 0, memory_order_relaxed);
    atomic_store_explicit(&identity->start, 0, memory_order_relaxed);
    /* release: everything done under the claim, before the next claim. */
    atomic_store_explicit(&identity->state, COX_IDENTITY_EMPTY, memory_order_release);
    cox_fault_point(COX_FAULT_ATTACH_CLAIMED);
}

/* relaxed stamp before the release word: a reader of the word with acquire sees its stamp or a
 * later one. For display. */
static inline void cox_state_set_rank(struct cox_layout_rank_line *line, enum cox_rank_state state,
                                      uint64_t sequence, uint64_t now_ns)
{
    atomic_store_explicit(&line->stamp_ns, now_ns, memory_order_relaxed);
    atomic_store_explicit(&line->word, cox_state_word(state, sequence), memory_order_release);
    cox_fault_point(COX_FAULT_RANK_STATE);
}

/* The state of a rank on a channel, as the rank has stored it. */
struct cox_rank_word {
    /* state and sequence, cox_state_word */
    uint64_t word;
    uint64_t stamp_ns;
};

static inline struct cox_rank_word cox_state_of_rank(const struct cox_layout_rank_line *line)
{
    struct cox_rank_word state;
    /* acquire: partner is cox_state_set_rank; the stamp is this word's or a later one's. */
    state.word = atomic_load_explicit(&line->word, memory_order_acquire);
    state.stamp_ns = atomic_load_explicit(&line->stamp_ns, memory_order_relaxed);
    return state;
}

/* relaxed: seen by the coordinator after the release of `done` or of the identity. */
static inline void cox_state_set_incarnation(struct cox_layout_rank_line *line,
                                             uint32_t group_incarnation, uint32_t incarnation)
{
    atomic_store_explicit(&line->group_incarnation, group_incarnation, memory_order_relaxed);
    atomic_store_explicit(&line->incarnation, incarnation, memory_order_relaxed);
    cox_fault_point(COX_FAULT_RANK_INCARNATION);
}

/* The identity of the process that wrote the line, as it has stored it. relaxed: written once at
 * attach, ordered by the acquire of `done`. */
static inline uint32_t cox_state_line_group_incarnation(const struct cox_layout_rank_line *line)
{
    return atomic_load_explicit(&line->group_incarnation, memory_order_relaxed);
}

static inline uint32_t cox_state_line_incarnation(const struct cox_layout_rank_line *line)
{
    return atomic_load_explicit(&line->incarnation, memory_order_relaxed);
}

/* The process that claimed the identity has attached. From here on the coordinator relies on the
 * rank. */
static inline void cox_state_announce_identity(struct cox_layout_identity *identity,
                                               uint32_t group_incarnation, uint32_t incarnation)
{
    /* relaxed: ordered by the release of `state` below. pid and start are there since the claim. */
    atomic_store_explicit(&identity->incarnation, incarnation, memory_order_relaxed);
    atomic_store_explicit(&identity->group_incarnation, group_incarnation, memory_order_relaxed);
    cox_fault_point(COX_FAULT_ATTACH_IDENTITY);
    /* release: partner is the coordinator's acquire while it waits for the group. */
    atomic_store_explicit(&identity->state, COX_IDENTITY_ATTACHED, memory_order_release);
    cox_fault_point(COX_FAULT_ATTACH_ANNOUNCED);
}

/* Written by another process: each word is loaded once. */
struct cox_identity {
    uint32_t state;
    uint32_t pid;
    uint64_t start;
    uint32_t incarnation;
    uint32_t group_incarnation;
};

/* relaxed: for display, or ordered by the acquire of cox_state_attached before. */
static inline struct cox_identity cox_state_identity(const struct cox_layout_identity *identity)
{
    return (struct cox_identity){
        .state = atomic_load_explicit(&identity->state, memory_order_relaxed),
        .pid = atomic_load_explicit(&identity->pid, memory_order_relaxed),
        .start = atomic_load_explicit(&identity->start, memory_order_relaxed),
        .incarnation = atomic_load_explicit(&identity->incarnation, memory_order_relaxed),
        .group_incarnation =
            atomic_load_explicit(&identity->group_incarnation, memory_order_relaxed),
    };
}

/* release: after all its replies; partner is cox_state_left. */
static inline void cox_state_set_left(struct cox_layout_identity *identity)
{
    atomic_store_explicit(&identity->state, COX_IDENTITY_LEFT, memory_order_release);
    cox_fault_point(COX_FAULT_GROUP_LEFT);
}

/* Returns true if the rank has attached; it may have left again since. acquire: partner is the
 * worker's release after it stored its identity. */
static inline bool cox_state_attached(const struct cox_layout_identity *identity)
{
    uint32_t state = atomic_load_explicit(&identity->state, memory_order_acquire);
    return state == COX_IDENTITY_ATTACHED || state == COX_IDENTITY_LEFT;
}

/* Returns true if the rank has left the group, whether or not its process lives. */
static inline bool cox_state_left(const struct cox_control *control, uint32_t rank)
{
    return atomic_load_explicit(&control->ranks[rank]->identity.state, memory_order_acquire) ==
           COX_IDENTITY_LEFT;
}

/* release: no data needs it, since the rank only read; it keeps `taken` from seeming to run ahead
 * of attach. */
static inline void cox_state_set_taken(struct cox_layout_rank_line *line, uint64_t sequence)
{
    atomic_store_explicit(&line->taken, sequence, memory_order_release);
    cox_fault_point(COX_FAULT_RANK_TAKEN);
}

/* release: the rank's reads of the frame before the number; partner is the coordinator that writes
 * the frame again. */
static inline void cox_state_set_returned(struct cox_layout_rank_line *line, uint64_t sequence)
{
    atomic_store_explicit(&line->returned, sequence, memory_order_release);
    cox_fault_point(COX_FAULT_RANK_RETURNED);
}

/* The reply is an ExecuteResponse even if replies are opaque: it reports a failure, or a reply out
 * of line (large_payload.h). */
#define COX_TAG_FAILED (UINT64_C(1) << 63)

/* relaxed tag before the release of done. */
static inline void cox_state_set_tag(struct cox_layout_rank_line *line, uint32_t depth,
                                     uint64_t sequence, bool failed)
{
    const uint64_t frame = cox_geometry_frame(sequence, depth);
    const uint64_t tag = sequence | (failed ? COX_TAG_FAILED : 0);
    if (frame < COX_DEPTH_NEAR)
        atomic_store_explicit(&line->tags[frame], tag, memory_order_relaxed);
    else
        atomic_store_explicit(&line->far_tags[frame - COX_DEPTH_NEAR], tag, memory_order_relaxed);
    cox_fault_point(COX_FAULT_REPLY_TAGGED);
}

/* release: slot bytes and tag before the number; partner is cox_state_done. */
static inline void cox_state_set_done(struct cox_layout_rank_line *line, uint64_t sequence)
{
    atomic_store_explicit(&line->done, sequence, memory_order_release);
    cox_fault_point(COX_FAULT_RANK_DONE);
}

static inline uint64_t cox_state_taken(const struct cox_layout_rank_line *line)
{
    return atomic_load_explicit(&line->taken, memory_order_acquire);
}

static inline uint64_t cox_state_returned(const struct cox_layout_rank_line *line)
{
    return atomic_load_explicit(&line->returned, memory_order_acquire);
}

static inline uint64_t cox_state_done(const struct cox_layout_rank_line *line)
{
    return atomic_load_explicit(&line->done, memory_order_acquire);
}

static inline uint64_t cox_state_tag(const struct cox_layout_rank_line *line, uint32_t depth,
                                     uint64_t sequence)
{
    const uint64_t frame = cox_geometry_frame(sequence, depth);
    return frame < COX_DEPTH_NEAR ? atomic_load_explicit(&line->tags[frame], memory_order_relaxed)
                                  : atomic_load_explicit(&line->far_tags[frame - COX_DEPTH_NEAR],
                                                         memory_order_relaxed);
}

/* ---- sealed groups: reports taken out of a rank's slot of the error channel ---- */

/* release: the copy out of the slot before the number; partner is cox_state_fetched. */
static inline void cox_state_set_fetched(struct cox_layout_reports *reports, uint32_t rank,
                                         uint64_t number)
{
    atomic_store_explicit(&reports->fetched[rank], (uint32_t)number, memory_order_release);
    cox_futex_wake(&reports->fetched[rank]);
    cox_fault_point(COX_FAULT_REPORT_FETCHED);
}

static inline uint32_t cox_state_fetched(const struct cox_layout_reports *reports, uint32_t rank)
{
    return atomic_load_explicit(&reports->fetched[rank], memory_order_acquire);
}

#endif
