#include "collect.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../channel/fault.h"
#include "../channel/reply.h"
#include "../channel/request.h"
#include "../channel/truth.h"
#include "../proto/operation.h"
#include "proto/executor.pb-c.h"
#include "report.h"

#define ARENA_FIRST_SIZE (64u << 10)
#define ARENA_SIZE_MAX (UINT64_C(512) << 20)

/* Which executor's handler or hook this thread is inside of: a call from there would wait for itself. */
static _Thread_local const void *inside_owner;

bool cox_collector_inside(const void *owner)
{
    return inside_owner == owner;
}

const void *cox_collector_enter(const void *owner)
{
    const void *before = inside_owner;
    inside_owner = owner;
    return before;
}

static const struct cox_geometry *collector_geometry(const struct cox_collector *collector)
{
    return &collector->channel->control->geometry;
}

static struct cox_entry *collector_entry(struct cox_collector *collector, uint64_t sequence)
{
    return &collector->entries[sequence % collector_geometry(collector)->depth];
}

static bool collector_dead(struct cox_collector *collector, uint32_t rank)
{
    return cox_supervisor_dead(collector->supervisor, rank, NULL);
}

/* A legacy rank has no lines: the n-th token is the n-th answer. At depth 1 the answer can only be to the request in
 * the one entry. */
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

static bool collector_answered(struct cox_collector *collector, uint32_t rank, uint64_t sequence)
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
    return cox_truth_returned(cox_truth_line(collector->channel->control, rank,
                                             collector->channel->id)) >= sequence;
}

/* The answer of `rank` was taken out of its slot, or is dropped: its tokens are matched, its slot is free. */
static void collector_consume(struct cox_collector *collector, struct cox_entry *entry, uint32_t rank)
{
    cox_rank_set_add(&entry->consumed, rank);
    if (!collector->legacy)
        cox_gate_settle(&collector->channel->gate, rank, COX_BELL_RESPONSE_CONSUME);
    cox_gate_post(&collector->channel->gate, rank, COX_BELL_RESPONSE_PRODUCE);
}

/* Drops the answers of ended requests that arrived by now. Returns a rank that still owes one, or -1. */
static int collector_drop_late(struct cox_collector *collector, uint64_t *ret_sequence)
{
    const struct cox_geometry *geometry = collector_geometry(collector);
    int late = -1;
    /* Oldest first: a rank answers in order, and its tokens are matched in order. */
    uint64_t first = collector->ended > geometry->depth ? collector->ended - geometry->depth + 1 : 1;
    for (uint64_t sequence = first; sequence <= collector->ended; sequence++) {
        struct cox_entry *entry = collector_entry(collector, sequence);
        if (entry->sequence != sequence || !entry->replies)
            continue;
        for (uint32_t rank = 0; rank < collector->rank_count; rank++) {
            if (!cox_rank_set_has(&entry->asked, rank) || cox_rank_set_has(&entry->consumed, rank))
                continue;
            if (collector_answered(collector, rank, sequence)) {
                collector_consume(collector, entry, rank);
                collector->stats.late_replies++;
            } else if (!collector_dead(collector, rank) && late < 0) {
                late = (int)rank;
                *ret_sequence = sequence;
            }
        }
    }
    return late;
}

int cox_collector_claim(struct cox_collector *collector, const struct cox_rank_set *asked,
                        uint64_t *ret_sequence, struct cox_error *err)
{
    const char *name = cox_channel_name(collector->channel->id);
    int r = 0;
    pthread_mutex_lock(&collector->lock);
    uint64_t sequence = collector->published + 1;
    struct cox_entry *old = collector_entry(collector, sequence);
    uint64_t late_sequence = 0;
    int late = collector_drop_late(collector, &late_sequence);
    if (atomic_load_explicit(&collector->stopping, memory_order_acquire))
        r = cox_fail(err, COX_CLOSED, "%s: the group is being stopped", name);
    for (uint32_t rank = 0; r == 0 && rank < collector->rank_count; rank++) {
        if (!cox_rank_set_has(asked, rank) || !collector_dead(collector, rank))
            continue;
        char text[COX_RANK_TEXT_SIZE];
        cox_report_death(collector->supervisor, rank, text, sizeof text);
        r = cox_fail(err, COX_PEER_DEAD, "%s: %s", name, text);
    }
    if (r == 0 && late >= 0)
        r = cox_fail(err, COX_LATE, "%s: rank %d still owes the answer to sequence %" PRIu64, name, late,
                     late_sequence);
    if (r == 0 && old->sequence && !old->ended)
        r = cox_fail(err, COX_FULL, "%s: all %" PRIu32 " frames are in flight", name,
                     collector_geometry(collector)->depth);
    for (uint32_t rank = 0; r == 0 && rank < collector->rank_count; rank++) {
        if (collector->legacy) {
            struct cox_collector_rank *l = &collector->ranks[rank];
            if (cox_rank_set_has(asked, rank) && !l->legacy_free)
                l->legacy_free =
                    cox_gate_take(&collector->channel->gate, rank, COX_BELL_REQUEST_PRODUCE);
            if (cox_rank_set_has(asked, rank) && !l->legacy_free)
                r = cox_fail(err, COX_FULL, "%s: rank %" PRIu32 " has not returned the frame", name, rank);
        } else if (old->sequence && cox_rank_set_has(&old->asked, rank) &&
                   !collector_returned(collector, rank, old->sequence) &&
                   !collector_dead(collector, rank)) {
            r = cox_fail(err, COX_FULL, "%s: rank %" PRIu32 " still reads the frame of sequence %" PRIu64,
                         name, rank, old->sequence);
        }
    }
    pthread_mutex_unlock(&collector->lock);
    if (r)
        return r;
    *ret_sequence = sequence;
    return 0;
}

void cox_collector_publish(struct cox_collector *collector, const struct cox_entry *entry, size_t length)
{
    struct cox_gate *gate = &collector->channel->gate;
    pthread_mutex_lock(&collector->lock);
    struct cox_entry *slot = collector_entry(collector, entry->sequence);
    *slot = *entry;
    slot->published_ns = cox_now_ns();
    for (uint32_t rank = 0; rank < collector->rank_count; rank++) {
        if (!cox_rank_set_has(&entry->asked, rank))
            continue;
        if (collector->legacy)
            collector->ranks[rank].legacy_free = false;
        else
            cox_gate_settle(gate, rank, COX_BELL_REQUEST_PRODUCE);
    }
    cox_request_publish(collector->channel, entry->sequence, entry->type, length, &entry->asked);
    collector->published = entry->sequence;
    collector->stats.submitted++;
    pthread_cond_signal(&collector->work); /* no system call unless the response thread sleeps */
    pthread_mutex_unlock(&collector->lock);
    cox_gate_open(gate, &entry->asked);
    cox_fault_point("request.gate_opened");
}

void cox_collector_await_room(struct cox_collector *collector, uint64_t deadline_ns)
{
    /* What is waited for may be a word in shared memory that nobody signals here (a frame returned, a late answer), so
     * the slice is a short one. */
    uint64_t until = cox_deadline_min(deadline_ns, cox_deadline_after_ms(1));
    struct timespec ts = {.tv_sec = (time_t)(until / COX_NSEC_PER_SEC),
                          .tv_nsec = (long)(until % COX_NSEC_PER_SEC)};
    pthread_mutex_lock(&collector->lock);
    pthread_cond_timedwait(&collector->ended_cond, &collector->lock, &ts);
    pthread_mutex_unlock(&collector->lock);
}

void cox_collector_wake(struct cox_collector *collector)
{
    /* seq_cst, both sides: the waker stores its cause and reads `sleeping`, the collector stores `sleeping` and reads
     * `causes`; one of the two sees the other. Partner: cox_collector_sleep. */
    atomic_fetch_add(&collector->causes, 1);
    uint32_t sleeping = atomic_load(&collector->sleeping);
    if (sleeping) {
        /* relaxed: see collector_count_token. Counted before the post, so that no token is taken for an answer. */
        atomic_fetch_add_explicit(&collector->ranks[sleeping - 1].foreign, collector->legacy,
                                  memory_order_relaxed);
        cox_gate_post(&collector->channel->gate, sleeping - 1, COX_BELL_RESPONSE_CONSUME);
    }
    pthread_mutex_lock(&collector->lock);
    pthread_cond_broadcast(&collector->work);
    pthread_cond_broadcast(&collector->ended_cond);
    pthread_mutex_unlock(&collector->lock);
}

void cox_collector_sleep(struct cox_collector *collector, uint32_t rank, uint32_t causes_seen,
                         uint64_t deadline_ns)
{
    pthread_mutex_unlock(&collector->lock);
    int r = COX_TIMEOUT;
    atomic_store(&collector->sleeping, rank + 1); /* seq_cst: see cox_collector_wake */
    if (atomic_load(&collector->causes) == causes_seen)
        r = cox_gate_wait(&collector->channel->gate, rank, COX_BELL_RESPONSE_CONSUME, deadline_ns);
    atomic_store(&collector->sleeping, 0);
    pthread_mutex_lock(&collector->lock);
    if (r == 0 && collector->legacy)
        collector_count_token(collector, rank);
    collector->stats.wakeups++;
}

/* ---- gathering: one request, on one thread ---- */

static void gather_begin(struct cox_collector *collector, const struct cox_entry *entry)
{
    cox_arena_reset(&collector->arena);
    collector->text[0] = '\0';
    for (uint32_t rank = 0; rank < collector->rank_count; rank++)
        collector->results[rank] = (struct cox_rank_result){
            .outcome = cox_rank_set_has(&entry->asked, rank) ? COX_OUTCOME_LATE : COX_OUTCOME_NOT_ASKED,
            .pid = cox_supervisor_pid(collector->supervisor, rank),
            .exit_status = -1,
        };
}

static void gather_error(struct cox_collector *collector, uint32_t rank, int32_t code, const char *text)
{
    struct cox_rank_result *result = &collector->results[rank];
    snprintf(collector->ranks[rank].text, COX_RANK_TEXT_SIZE, "%.*s", COX_RANK_TEXT_SIZE - 1, text);
    result->outcome = COX_OUTCOME_ERROR;
    result->code = code;
    result->text = collector->ranks[rank].text;
    result->bytes = NULL;
    result->size = 0;
    result->response = NULL;
}

/* The words a failing rank sent along. */
static const char *gather_error_text(const ModelExecuteData__ExecuteResponse *response)
{
    if (response->error_text && response->error_text[0])
        return response->error_text;
    if (response->result_case == MODEL_EXECUTE_DATA__EXECUTE_RESPONSE__RESULT_EXECUTE_MODEL_RESPONSE &&
        response->execute_model_response && response->execute_model_response->err_msg &&
        response->execute_model_response->err_msg[0])
        return response->execute_model_response->err_msg;
    return cox_status_text(response->status > 0 ? response->status : COX_REJECTED);
}

/* A rank has answered: copies, checks, unpacks. */
static void gather_answer(struct cox_collector *collector, struct cox_entry *entry, uint32_t rank)
{
    const struct cox_channel *channel = collector->channel;
    struct cox_rank_result *result = &collector->results[rank];
    struct cox_collector_rank *own = &collector->ranks[rank];
    bool whole = collector->legacy && !entry->operation->legacy_slotted;
    result->taken = true;
    if (whole && rank > 0) { /* legacy: it only waited and posted */
        result->outcome = COX_OUTCOME_OK;
        collector_consume(collector, entry, rank);
        return;
    }
    size_t length = 0;
    bool failed = false;
    struct cox_error why = {0};
    int r = cox_reply_fetch(channel, rank, entry->sequence, whole, own->generation, own->buffer,
                            own->buffer_size, &length, &failed, &why);
    collector_consume(collector, entry, rank);
    if (r) {
        gather_error(collector, rank, r, why.text);
        return;
    }
    if (entry->type == COX_TYPE_OPAQUE && !failed) {
        result->outcome = COX_OUTCOME_OK;
        result->bytes = own->buffer;
        result->size = length;
        return;
    }
    ModelExecuteData__ExecuteResponse *response = NULL;
    r = cox_wire_response_unpack(&collector->arena, own->buffer, length, &response);
    if (r) {
        char text[128];
        snprintf(text, sizeof text, "rank %" PRIu32 " replied with %zu bytes that are no ExecuteResponse",
                 rank, length);
        gather_error(collector, rank, r, text);
        return;
    }
    if (response->status != 0 || failed) {
        gather_error(collector, rank, response->status ? response->status : COX_REJECTED,
                     gather_error_text(response));
        return;
    }
    if (!collector->legacy && (uint32_t)response->rank != rank) {
        char text[128];
        snprintf(text, sizeof text, "the slot of rank %" PRIu32 " holds an answer of rank %" PRId32, rank,
                 response->rank);
        gather_error(collector, rank, COX_CORRUPT, text);
        return;
    }
    result->outcome = COX_OUTCOME_OK;
    result->response = response;
    result->bytes = own->buffer;
    result->size = length;
}

static void gather_death(struct cox_collector *collector, uint32_t rank)
{
    struct cox_rank_result *result = &collector->results[rank];
    struct cox_exit how = {0};
    cox_supervisor_dead(collector->supervisor, rank, &how);
    result->outcome = COX_OUTCOME_DEAD;
    result->signal = how.signal;
    result->exit_status = how.known && !how.signal ? how.exit_status : -1;
    cox_report_death(collector->supervisor, rank, collector->ranks[rank].text, COX_RANK_TEXT_SIZE);
    result->text = collector->ranks[rank].text;
}

/* Looks at every rank that owes an answer. Returns the first that still does, -1: none, -2: the request has failed. */
static int gather_look(struct cox_collector *collector, struct cox_entry *entry)
{
    int first = -1;
    bool failed = false;
    for (uint32_t rank = 0; rank < collector->rank_count; rank++) {
        struct cox_rank_result *result = &collector->results[rank];
        if (result->outcome != COX_OUTCOME_LATE)
            continue;
        /* Dead first, then the answer: an answer that was complete before the death counts. */
        bool dead = collector_dead(collector, rank);
        if (collector_answered(collector, rank, entry->sequence))
            gather_answer(collector, entry, rank);
        else if (dead)
            gather_death(collector, rank);
        else if (first < 0)
            first = (int)rank;
        failed |= result->outcome == COX_OUTCOME_ERROR || result->outcome == COX_OUTCOME_DEAD;
    }
    return failed ? -2 : first;
}

/* Rings again each live rank that has not taken its frame: the one wake-up may have been lost with a signal, a
 * killed predecessor, or a meddler. */
static void gather_ring(struct cox_collector *collector, const struct cox_entry *entry)
{
    if (collector->legacy)
        return; /* their tokens count, none may be added */
    for (uint32_t rank = 0; rank < collector->rank_count; rank++) {
        if (collector->results[rank].outcome != COX_OUTCOME_LATE ||
            cox_truth_taken(cox_truth_line(collector->channel->control, rank,
                                           collector->channel->id)) >= entry->sequence)
            continue;
        cox_gate_post(&collector->channel->gate, rank, COX_BELL_REQUEST_CONSUME);
        collector->stats.rings++;
    }
}

/* What became of the request, from its ranks. Errors outrank deaths outrank lateness. */
static int gather_status(const struct cox_collector *collector, int ended_by)
{
    int status = 0;
    bool dead = false;
    for (uint32_t rank = 0; rank < collector->rank_count; rank++) {
        const struct cox_rank_result *result = &collector->results[rank];
        if (result->outcome == COX_OUTCOME_DEAD)
            dead = true;
        if (result->outcome != COX_OUTCOME_ERROR)
            continue;
        bool telling = result->code == COX_CORRUPT || result->code == COX_STALE ||
                       result->code == COX_ABORTED;
        int this_status = telling ? result->code : COX_REJECTED;
        /* A rank's own failure is the cause; stale and aborted are what follows from one. */
        if (status == 0 || status == COX_STALE || status == COX_ABORTED)
            status = this_status;
    }
    return dead ? COX_PEER_DEAD : status ? status : ended_by;
}

static void gather_finish(struct cox_collector *collector, struct cox_entry *entry, int status)
{
    struct cox_completion completion = {
        .sequence = entry->sequence,
        .channel = collector->channel->id,
        .type = entry->type,
        .status = status,
        .rank_count = collector->rank_count,
        .ranks = collector->results,
        .request_context = entry->request_context,
        .submitted_ns = entry->submitted_ns,
        .published_ns = entry->published_ns,
    };
    cox_report_late(collector, entry);
    if (completion.status == 0 && entry->operation->step && !collector->legacy)
        completion.status = cox_report_divergence(collector, collector->text, sizeof collector->text);
    if (completion.status && collector->text[0] == '\0')
        cox_report_failure(collector, entry, completion.status, collector->text,
                           sizeof collector->text);
    completion.text = completion.status ? collector->text : NULL;
    for (uint32_t rank = 0; rank < collector->rank_count; rank++) {
        struct cox_rank_result *result = &collector->results[rank];
        bool wanted = entry->gather == COX_GATHER_ALL ||
                      (entry->gather == COX_GATHER_RANK0 && !completion.payload);
        if (result->outcome == COX_OUTCOME_OK && wanted) {
            if (entry->gather == COX_GATHER_RANK0)
                completion.payload = result;
        } else {
            result->bytes = NULL;
            result->size = 0;
            result->response = NULL;
        }
    }

    struct cox_layout_channel_truth *truth =
        cox_truth_channel(collector->channel->control, collector->channel->id);
    cox_fault_point("collect.complete");
    pthread_mutex_lock(&collector->lock);
    if (completion.status && entry->operation->step)
        cox_truth_set_void(truth, collector->published);
    entry->ended = true;
    collector->ended = entry->sequence;
    cox_truth_set_ended(truth, entry->sequence);
    collector->stats.completed++;
    collector->stats.failed += completion.status != 0;
    collector->stats.timeouts += completion.status == COX_TIMEOUT;
    struct cox_waiter *waiter = entry->waiter;
    entry->waiter = NULL;
    cox_completion_fn handler = waiter ? waiter->visit : collector->handler;
    void *context = waiter ? waiter->visit_context : collector->handler_context;
    collector->in_handler = true;
    collector->handler_thread = pthread_self();
    pthread_mutex_unlock(&collector->lock);

    completion.completed_ns = cox_now_ns();
    const void *before = cox_collector_enter(collector->owner);
    if (handler)
        handler(context, &completion);
    cox_collector_enter(before);

    pthread_mutex_lock(&collector->lock);
    collector->in_handler = false;
    if (waiter) {
        if (completion.status)
            cox_fail(waiter->err, completion.status, "%s", completion.text);
        waiter->status = completion.status;
        waiter->done = true;
    }
    pthread_cond_broadcast(&collector->ended_cond);
    pthread_mutex_unlock(&collector->lock);
}

static void gather_one(struct cox_collector *collector, struct cox_entry *entry)
{
    gather_begin(collector, entry);
    int ended_by = 0;
    uint64_t ring_ns = cox_deadline_after_ns(COX_SLICE_NS);
    pthread_mutex_lock(&collector->lock);
    for (;;) {
        /* Before the look: a cause stored after this is seen by the sleep. */
        uint32_t causes = atomic_load(&collector->causes);
        uint64_t late_sequence;
        collector_drop_late(collector, &late_sequence);
        int owing = gather_look(collector, entry);
        if (owing < 0)
            break;
        if (atomic_load_explicit(&collector->stopping, memory_order_acquire)) {
            ended_by = COX_CLOSED;
            break;
        }
        uint64_t now = cox_now_ns();
        if (now >= entry->deadline_ns) {
            ended_by = COX_TIMEOUT;
            break;
        }
        if (now >= ring_ns) {
            gather_ring(collector, entry);
            ring_ns = now + COX_SLICE_NS;
        }
        cox_fault_point("collect.sleep");
        cox_collector_sleep(collector, (uint32_t)owing, causes,
                            cox_deadline_min(entry->deadline_ns, ring_ns));
    }
    pthread_mutex_unlock(&collector->lock);
    gather_finish(collector, entry, gather_status(collector, ended_by));
}

/* lock is held on entry and on return. False: nothing was published that is not ended. */
static bool collector_next(struct cox_collector *collector)
{
    if (collector->ended == collector->published)
        return false;
    struct cox_entry *entry = collector_entry(collector, collector->ended + 1);
    if (!entry->replies) {
        entry->ended = true;
        collector->ended = entry->sequence;
        cox_truth_set_ended(cox_truth_channel(collector->channel->control, collector->channel->id),
                            entry->sequence);
        pthread_cond_broadcast(&collector->ended_cond);
        return true;
    }
    pthread_mutex_unlock(&collector->lock);
    gather_one(collector, entry);
    pthread_mutex_lock(&collector->lock);
    return true;
}

void cox_collector_gather(struct cox_collector *collector, uint64_t sequence)
{
    pthread_mutex_lock(&collector->lock);
    while (collector->ended < sequence && collector_next(collector))
        continue;
    pthread_mutex_unlock(&collector->lock);
}

static void *collector_main(void *argument)
{
    struct cox_collector *collector = argument;
    pthread_mutex_lock(&collector->lock);
    for (;;) {
        if (collector_next(collector))
            continue;
        if (atomic_load_explicit(&collector->stopping, memory_order_acquire))
            break;
        pthread_cond_wait(&collector->work, &collector->lock);
    }
    pthread_mutex_unlock(&collector->lock);
    return NULL;
}

int cox_collector_init(struct cox_collector *collector, struct cox_channel *channel, const void *owner,
                       const struct cox_log *log)
{
    const struct cox_geometry *geometry = &channel->control->geometry;
    memset(collector, 0, sizeof *collector);
    collector->channel = channel;
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
    collector->results = calloc(collector->rank_count, sizeof *collector->results);
    int r = collector->ranks && collector->results ? 0 : -ENOMEM;
    for (uint32_t rank = 0; r == 0 && rank < collector->rank_count; rank++) {
        bool whole = geometry->legacy && rank == 0;
        struct cox_collector_rank *own = &collector->ranks[rank];
        own->generation = geometry->legacy ? 0 : 1;
        own->buffer_size = cox_geometry_slot_capacity(geometry, channel->id, whole);
        own->buffer = malloc(own->buffer_size); /* pages are touched only as far as replies reach */
        if (!own->buffer)
            r = -ENOMEM;
    }
    if (r == 0)
        r = cox_arena_init(&collector->arena, ARENA_FIRST_SIZE, ARENA_SIZE_MAX);
    if (r)
        cox_collector_deinit(collector);
    return r;
}

void cox_collector_deinit(struct cox_collector *collector)
{
    if (!collector->channel)
        return;
    for (uint32_t rank = 0; collector->ranks && rank < collector->rank_count; rank++)
        free(collector->ranks[rank].buffer);
    free(collector->ranks);
    free(collector->results);
    cox_arena_deinit(&collector->arena);
    pthread_cond_destroy(&collector->work);
    pthread_cond_destroy(&collector->ended_cond);
    pthread_mutex_destroy(&collector->lock);
    pthread_mutex_destroy(&collector->submit_lock);
    memset(collector, 0, sizeof *collector);
}

int cox_collector_start(struct cox_collector *collector)
{
    int e = pthread_create(&collector->thread, NULL, collector_main, collector);
    collector->threaded = e == 0;
    return -e;
}

void cox_collector_stop(struct cox_collector *collector)
{
    if (!collector->channel)
        return;
    /* release: partner are the acquire loads above; the cause before the wake. */
    atomic_store_explicit(&collector->stopping, true, memory_order_release);
    cox_collector_wake(collector);
    if (collector->threaded) {
        pthread_join(collector->thread, NULL);
        collector->threaded = false;
    }
}
