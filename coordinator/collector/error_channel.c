#include "error_channel.h"

#include "channel/base/base_internal.h"
#include "channel/base/futex.h"
#include "channel/base/thread.h"
#include "channel/shm/reply.h"
#include "channel/attach/sealed/sealed.h"
#include "channel/shm/state.h"
#include "proto/executor.pb-c.h"
#include "proto/wire.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define ARENA_SIZE_MAX (1u << 20)
/* A token that no process holds at this many checks, a slice apart, is lost. A rank that has taken
 * it and was killed before it stored its claim counts as waiting. */
#define LOOK_COUNT 2

/* Copies the report from the slot and frees the slot. Returns its length; 0: a token without a
 * report. */
static size_t error_channel_fetch(struct cox_error_channel *errors)
{
    struct cox_gate *gate = &errors->channel->gate;
    const size_t capacity = errors->channel->response.size - COX_PREFIX_SIZE;
    size_t over;
    const size_t length = cox_fault_reports_take(&errors->reports, errors->copy, capacity, &over);
    if (over)
        cox_log_write(&errors->log, 3,
                      "the error channel holds a report of %zu bytes, over %zu: dropped", over,
                      capacity);
    /* Surplus tokens, from a process that violates the protocol. */
    for (int i = 0; i < COX_RANK_COUNT_MAX && cox_gate_take(gate, 0, COX_WAKEUP_RESPONSE_PRODUCE);
         i++)
        continue;
    cox_gate_post(gate, 0, COX_WAKEUP_RESPONSE_PRODUCE);
    return length;
}

/* rank: the owner of the slot, whatever the report contains; -1: a shared slot, and the report
 * names its rank. */
static void error_channel_tell(struct cox_error_channel *errors, int rank, size_t length)
{
    if (length == 0)
        return;
    Coxswain__ExecuteResponse *report = NULL;
    cox_arena_reset(&errors->arena);
    if (cox_wire_response_unpack(&errors->arena, errors->copy, length, &report)) {
        cox_log_write(&errors->log, 3,
                      "the error channel holds %zu bytes that are no report: dropped", length);
        return;
    }
    if (cox_fault_report_is_of_request(report)) {
        /* The reply to that request may be in its slot already: wake the collector, whatever rank
         * it waits on. */
        cox_collector_wake(&errors->collectors[report->error_channel]);
        return;
    }
    uint32_t rank_count = errors->channel->control->geometry.rank_count;
    /* MindIE-LLM's workers never set the rank: no rank is not rank 0. */
    bool known = report->has_rank && report->rank >= 0 && (uint32_t)report->rank < rank_count;
    int named_rank = known ? report->rank : -1;
    errors->report(errors->context, rank >= 0 ? rank : named_rank, cox_fault_report_text(report));
}

static void error_channel_take(struct cox_error_channel *errors)
{
    error_channel_tell(errors, -1, error_channel_fetch(errors));
}

static uint64_t error_channel_state(const struct cox_error_channel *errors, uint32_t rank)
{
    const struct cox_layout_rank_line *line =
        cox_state_line(errors->channel->control, rank, COX_CHANNEL_ERROR);
    return cox_state_of_rank(line).word >> COX_STATE_SHIFT;
}

/* Called when nothing has arrived for a slice. */
static void error_channel_look(struct cox_error_channel *errors)
{
    struct cox_gate *gate = &errors->channel->gate;
    bool there = cox_gate_take(gate, 0, COX_WAKEUP_RESPONSE_PRODUCE), held = false;
    for (uint32_t rank = 0; rank < errors->channel->control->geometry.rank_count; rank++)
        held |= cox_rank_stage_lives(cox_rank_stage_of(&errors->ranks[rank])) &&
                error_channel_state(errors, rank) == COX_RANK_REPLYING;
    if (there)
        errors->doubt = 0;
    else if (held)
        errors->doubt = LOOK_COUNT;
    else
        errors->doubt--;
    if (there)
        cox_gate_post(gate, 0, COX_WAKEUP_RESPONSE_PRODUCE);
    else if (errors->doubt == 0)
        error_channel_take(
            errors); /* its last report, if it was complete; frees the slot in any case */
}

/* Returns true if the token was posted by note_death. */
static bool error_channel_count_death(struct cox_error_channel *errors)
{
    /* acquire: partner is the release in note_death. Only this thread decrements. */
    if (atomic_load_explicit(&errors->deaths, memory_order_acquire) == 0)
        return false;
    atomic_fetch_sub_explicit(&errors->deaths, 1, memory_order_relaxed);
    errors->doubt = LOOK_COUNT;
    return true;
}

/* ---- sealed groups: every rank has a slot of its own, and nothing gets lost with a dead one ----
 */

/* Copies the report of a rank that has made one. Returns its length; 0: none. */
static size_t error_channel_copy(struct cox_error_channel *errors, uint32_t rank)
{
    const struct cox_control *control = errors->channel->control;
    uint64_t done = cox_state_done(cox_state_line(control, rank, COX_CHANNEL_ERROR));
    if (done == errors->heard[rank])
        return 0;
    size_t capacity, length;
    uint8_t *base = cox_reply_report(errors->channel, rank, &capacity);
    length = cox_le32_get(base);
    if (length > capacity)
        cox_log_write(&errors->log, 3,
                      "rank %" PRIu32 " reports with a length of %zu bytes, over %zu: dropped",
                      rank, length, capacity);
    length = length > capacity ? 0 : length;
    memcpy(errors->copy, base + COX_PREFIX_SIZE, length);
    errors->heard[rank] = done;
    cox_sealed_set_heard(control, rank, done);
    return length;
}

static void error_channel_take_rank(struct cox_error_channel *errors, uint32_t rank)
{
    /* Its line and its count must belong to one incarnation. */
    pthread_mutex_lock(&errors->heard_lock);
    size_t length = error_channel_copy(errors, rank);
    pthread_mutex_unlock(&errors->heard_lock);
    error_channel_tell(errors, (int)rank, length);
}

static void error_channel_listen(struct cox_error_channel *errors)
{
    const struct cox_gate *gate = &errors->channel->gate;
    for (;;) {
        /* Read before the check: a report that arrives later ends the wait. */
        uint32_t wake_sequence = cox_gate_wake_sequence(gate, COX_WAKEUP_RESPONSE_CONSUME);
        bool stopping = atomic_load_explicit(&errors->stopping, memory_order_acquire);
        for (uint32_t rank = 0; rank < errors->channel->control->geometry.rank_count; rank++)
            error_channel_take_rank(errors, rank);
        if (stopping)
            return;
        int r = cox_gate_wait(&errors->channel->gate, 0, COX_WAKEUP_RESPONSE_CONSUME, wake_sequence,
                              COX_DEADLINE_NEVER);
        if (r < 0) {
            cox_log_write(&errors->log, 3,
                          "the error channel's futex: %s; faults are not heard any more",
                          cox_status_text(r));
            return;
        }
    }
}

/* ---- named groups ---- */

/* All tokens belong to dead processes. The last one may stand for a report; that of restore is
 * counted as a death. */
static bool error_channel_restored(struct cox_error_channel *errors)
{
    /* acquire: partner is the release in cox_error_channel_restore. */
    if (atomic_load_explicit(&errors->restoring, memory_order_acquire) == 0)
        return false;
    do
        error_channel_count_death(errors);
    while (cox_gate_take(&errors->channel->gate, 0, COX_WAKEUP_RESPONSE_CONSUME));
    errors->doubt = 0;
    error_channel_take(errors);
    /* release: the state of the slot; partner is the acquire there. */
    atomic_store_explicit(&errors->restoring, 0, memory_order_release);
    cox_futex_wake(&errors->restoring);
    return true;
}

static void error_channel_listen_named(struct cox_error_channel *errors)
{
    for (;;) {
        int r =
            cox_gate_wait(&errors->channel->gate, 0, COX_WAKEUP_RESPONSE_CONSUME, 0,
                          errors->doubt ? cox_deadline_after_ns(COX_SLICE_NS) : COX_DEADLINE_NEVER);
        /* acquire: partner is the release in stop, before its post. */
        if (atomic_load_explicit(&errors->stopping, memory_order_acquire)) {
            /* Reports from before the end are delivered; a surplus token finds an empty slot. */
            error_channel_take(errors);
            return;
        }
        if (r < 0) {
            cox_log_write(&errors->log, 3,
                          "the error channel's semaphore: %s; faults are not heard any more",
                          cox_status_text(r));
            return;
        }
        if (r != COX_TIMEOUT && error_channel_restored(errors))
            continue;
        if (r == COX_TIMEOUT) {
            error_channel_look(errors);
        } else if (!error_channel_count_death(errors) &&
                   r == 0) { /* else a token that was overwritten */
            errors->doubt = errors->doubt ? LOOK_COUNT : 0;
            error_channel_take(errors);
        }
    }
}

/* ---- both ---- */

static void *error_channel_main(void *argument)
{
    struct cox_error_channel *errors = argument;
    if (errors->channel->control->geometry.mode->limits.memory_per_rank)
        error_channel_listen(errors);
    else
        error_channel_listen_named(errors);
    /* release: only the end itself; partner: error_channel_end. */
    atomic_store_explicit(&errors->ended, 1, memory_order_release);
    cox_futex_wake(&errors->ended);
    return NULL;
}

/* Other processes can write the words on which the thread blocks, and one that restores the old
 * value at the right moment makes it miss a wakeup. So it is woken until it has ended. */
static void error_channel_end(struct cox_error_channel *errors)
{
    while (atomic_load_explicit(&errors->ended, memory_order_acquire) == 0) {
        cox_gate_wake(&errors->channel->gate, 0, COX_WAKEUP_RESPONSE_CONSUME);
        cox_futex_wait(&errors->ended, 0, cox_deadline_after_ns(COX_SLICE_NS));
    }
}

int cox_error_channel_start(struct cox_error_channel *errors)
{
    const struct cox_geometry *geometry = &errors->channel->control->geometry;
    cox_fault_reports_init(&errors->reports, errors->channel);
    pthread_mutex_init(&errors->heard_lock, NULL);
    errors->copy = malloc(geometry->channels[COX_CHANNEL_ERROR].response_size);
    int r = errors->copy ? cox_arena_init(&errors->arena, 0, ARENA_SIZE_MAX) : -ENOMEM;
    if (r == 0)
        r = cox_thread_start(&errors->thread, error_channel_main, errors);
    errors->threaded = r == 0;
    if (r)
        cox_error_channel_stop(errors);
    return r;
}

void cox_error_channel_stop(struct cox_error_channel *errors)
{
    if (errors->threaded) {
        atomic_store_explicit(&errors->stopping, true, memory_order_release);
        error_channel_end(errors);
        pthread_join(errors->thread, NULL);
        errors->threaded = false;
    }
    free(errors->copy);
    errors->copy = NULL;
    cox_arena_deinit(&errors->arena);
}

void cox_error_channel_reset_rank(struct cox_error_channel *errors, uint32_t rank)
{
    if (!errors->channel->control->geometry.mode->limits.memory_per_rank)
        return;
    pthread_mutex_lock(&errors->heard_lock);
    errors->heard[rank] = 0;
    cox_sealed_set_heard(errors->channel->control, rank, 0);
    pthread_mutex_unlock(&errors->heard_lock);
}

void cox_error_channel_note_death(struct cox_error_channel *errors, uint32_t rank)
{
    if (error_channel_state(errors, rank) == COX_RANK_IDLE)
        return;
    if (errors->channel->control->geometry.mode->limits.memory_per_rank) {
        /* Its last report may be there without a wakeup. */
        cox_gate_post(&errors->channel->gate, rank, COX_WAKEUP_RESPONSE_CONSUME);
        return;
    }
    /* release: partner is error_channel_count_death. */
    atomic_fetch_add_explicit(&errors->deaths, 1, memory_order_release);
    cox_gate_wake(&errors->channel->gate, 0, COX_WAKEUP_RESPONSE_CONSUME);
}

int cox_error_channel_restore(struct cox_error_channel *errors, uint64_t deadline_ns)
{
    if (atomic_exchange_explicit(&errors->restoring, 1, memory_order_release) == 0) {
        /* Once: a surplus token would be taken for a report, and would release the slot of a report
         * that a rank has begun since. */
        atomic_fetch_add_explicit(&errors->deaths, 1, memory_order_release);
        cox_gate_wake(&errors->channel->gate, 0, COX_WAKEUP_RESPONSE_CONSUME);
    }
    for (;;) {
        if (atomic_load_explicit(&errors->restoring, memory_order_acquire) == 0)
            return 0;
        int r = cox_futex_wait(&errors->restoring, 1, deadline_ns);
        if (r)
            return r;
    }
}
