/*
 * How a request completes. A thread that waits for something gathers until it is there: a call for
 * its completion, the response thread and a host that collects for any completion, a submit for
 * room. One thread gathers at a time, for all; the others wait until it has what they wait for, or
 * leaves, and one of them takes its place.
 *
 * A completion becomes ready in its frame. The one that takes it gets the replies that it points
 * into, and gives it back when its handler has returned, or at the next collection. A host with an
 * event loop polls an fd (readiness.h).
 */
#include "channel/base/base_internal.h"
#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/recorder/probes.h"
#include "collector_internal.h"
#include "reentrancy.h"

struct until {
    struct cox_collector *collector;
    /* NULL: not asked for */
    const struct cox_waiter *waiter;
    uint32_t rank;
    uint64_t ended;
    /* gathers also what else is there */
    bool all;
    /* a recent time; 0: not known */
    uint64_t now_ns;
};

typedef bool (*until_fn)(const struct until *until);

static bool nothing_is_in_flight(const struct until *until)
{
    return until->collector->ended == until->collector->published;
}

static bool call_is_done(const struct until *until)
{
    return until->waiter->done;
}

/* Returns true if a request in flight asks the rank. */
static bool collector_asks(struct cox_collector *collector, uint32_t rank)
{
    for (uint64_t sequence = collector->ended + 1; sequence <= collector->published; sequence++) {
        const struct cox_entry *entry = collector_entry(collector, sequence);
        if (!entry->ended && cox_rank_set_has(&entry->asked, rank))
            return true;
    }
    return false;
}

static bool rank_is_not_asked(const struct until *until)
{
    return !collector_asks(until->collector, until->rank);
}

static bool more_has_ended(const struct until *until)
{
    return until->collector->ended != until->ended;
}

COX_HOT static bool completion_is_ready(const struct until *until)
{
    /* acquire: partner is cox_collector_stop. */
    return until->collector->ready_count > 0 ||
           (atomic_load_explicit(&until->collector->stopping, memory_order_acquire) &&
            nothing_is_in_flight(until));
}

static inline bool is_over(uint64_t deadline_ns)
{
    return deadline_ns != COX_DEADLINE_NEVER && cox_now_ns() >= deadline_ns;
}

/* ---- taking a completion ---- */

/* The completion in the frame goes to its taker with its replies. Where no others are
 * spare, the frame stays in use until it is given back. */
COX_HOT static struct cox_replies *take(struct cox_collector *collector, uint32_t frame)
{
    struct cox_replies *taken = collector->replies[frame];
    taken->in_place = !collector->spares;
    if (!taken->in_place) {
        collector->replies[frame] = collector->spares;
        collector->spares = collector->spares->next;
        collector->is_ready[frame] = false;
    }
    return taken;
}

COX_HOT static struct cox_replies *take_first(struct cox_collector *collector)
{
    const uint32_t frame = collector->ready[collector->ready_begin];
    collector->ready_begin = (collector->ready_begin + 1) % COX_DEPTH_MAX;
    collector->ready_count--;
    return take(collector, frame);
}

/* The frame of a completion that was taken in place is free. */
COX_HOT static uint64_t frame_release(struct cox_collector *collector,
                                      const struct cox_replies *taken)
{
    const uint64_t frame =
        cox_geometry_frame(taken->completion.sequence, collector_geometry(collector)->depth);
    collector->is_ready[frame] = false;
    return frame;
}

/* What a host has collected stays with it until it collects again, which may be never: its frames
 * must not. False: none of it is in a frame. */
static bool lent_replace(struct cox_collector *collector, struct cox_replies *spare)
{
    struct cox_replies *lent = collector->lent;
    while (lent && !lent->in_place)
        lent = lent->next;
    if (!lent)
        return false;
    lent->in_place = false;
    collector->replies[frame_release(collector, lent)] = spare;
    return true;
}

COX_HOT static void give_back(struct cox_collector *collector, struct cox_replies *taken)
{
    if (taken->in_place) {
        frame_release(collector, taken);
    } else if (!collector->lent || !lent_replace(collector, taken)) {
        taken->next = collector->spares;
        collector->spares = taken;
    }
}

COX_HOT static void run_begin(struct cox_collector *collector, struct cox_handler_run *run,
                              struct cox_replies *taken, bool registered)
{
    *run = (struct cox_handler_run){.number = ++collector->handler_runs,
                                    .registered = registered,
                                    .taken = taken,
                                    .next = collector->running};
    collector->running = run;
}

COX_HOT static void run_end(struct cox_collector *collector, const struct cox_handler_run *run)
{
    struct cox_handler_run **link = &collector->running;
    while (*link != run)
        link = &(*link)->next;
    *link = run->next;
}

/* ---- gathering ---- */

/* Wakes the threads in await_news. */
COX_HOT static inline void tell(struct cox_collector *collector)
{
    if (collector->waiting > 0)
        pthread_cond_broadcast(&collector->ended_cond);
}

static void await_news(struct cox_collector *collector, const struct timespec *until)
{
    collector->waiting++;
    pthread_cond_timedwait(&collector->ended_cond, &collector->lock, until);
    collector->waiting--;
}

void cox_collector_await_handler(struct cox_collector *collector)
{
    const struct timespec until = cox_deadline_timespec(COX_DEADLINE_NEVER);
    const uint64_t through = collector->handler_runs;
    while (cox_collector_runs_handler(collector, through))
        await_news(collector, &until);
}

COX_HOT static void make_ready(struct cox_collector *collector, struct cox_replies *replies)
{
    struct cox_completion *completion = &replies->completion;
    struct cox_entry *entry = collector_entry(collector, completion->sequence);
    const uint64_t frame =
        cox_geometry_frame(completion->sequence, collector_geometry(collector)->depth);
    completion->completed_ns = cox_now_ns();
    if (completion->status != COX_LATE) /* a second completion changes nothing */
        cox_recorder_gathered(&collector->recorder, completion->sequence,
                              cox_recorder_result_word(completion->status, replies->taken.bytes),
                              completion->completed_ns);
    collector->is_ready[frame] = true;
    struct cox_waiter *waiter = entry->waiter;
    if (waiter) { /* taken now, so that the frame is free before the caller runs */
        run_begin(collector, &waiter->run, take(collector, (uint32_t)frame), false);
        waiter->done = true;
        entry->waiter = NULL;
    } else {
        collector->ready[(collector->ready_begin + collector->ready_count++) % COX_DEPTH_MAX] =
            (uint8_t)frame;
        if (!collector->collecting)
            cox_readiness_signal(&collector->readiness);
    }
    tell(collector);
}

COX_HOT static inline bool gather_once(struct cox_collector *collector, bool *rescanned,
                                       uint64_t deadline_ns)
{
    struct cox_replies *ended;
    const bool more = cox_collector_gather_step(collector, rescanned, deadline_ns, &ended);
    if (ended)
        make_ready(collector, ended);
    return more;
}

/* With lock held, which it releases meanwhile: waits until done, or the deadline. Gathers, or waits
 * for the thread that does. After the deadline it still takes what is there. Inlined, with `done`,
 * since it runs once for each completion. */
COX_HOT __attribute__((always_inline)) static inline void gather_until(const struct until *until,
                                                                       until_fn done,
                                                                       uint64_t deadline_ns)
{
    struct cox_collector *collector = until->collector;
    bool rescanned = false;
    uint64_t now_ns = until->now_ns;
    while (collector->gathering && !done(until) && !is_over(deadline_ns)) {
        const struct timespec timeout = cox_deadline_timespec(deadline_ns);
        await_news(collector, &timeout);
        now_ns = 0;
    }
    if (collector->gathering)
        return;
    collector->gathering = true;
    collector->cached_now_ns = now_ns;
    while (!done(until) && !is_over(deadline_ns))
        if (!gather_once(collector, &rescanned, deadline_ns) && !done(until))
            cox_collector_idle(collector, deadline_ns);
    while (until->all && gather_once(collector, &rescanned, 0))
        continue;
    collector->gathering = false;
    tell(collector);
    /* A host that polls was not served meanwhile, and its timer must be set. */
    if (cox_readiness_is_open(&collector->readiness) && !collector->collecting &&
        (!nothing_is_in_flight(until) || collector->late_count > 0))
        cox_readiness_signal(&collector->readiness);
}

void cox_collector_await_room(struct cox_collector *collector, uint64_t deadline_ns)
{
    /* The condition may be a word in shared memory (a frame returned, a late reply) that no thread
     * signals here, so the slice is short. */
    const uint64_t until_ns = cox_deadline_min(deadline_ns, cox_deadline_after_ms(1));
    struct until until = {.collector = collector};
    const struct timespec timeout = cox_deadline_timespec(until_ns);
    pthread_mutex_lock(&collector->lock);
    until.ended = collector->ended;
    /* After a stop there is nothing to gather: the goodbye waits for ranks to return frames. */
    if (atomic_load_explicit(&collector->stopping, memory_order_acquire) &&
        nothing_is_in_flight(&until))
        await_news(collector, &timeout);
    else
        gather_until(&until, more_has_ended, until_ns);
    pthread_mutex_unlock(&collector->lock);
}

void cox_collector_gather_rest(struct cox_collector *collector)
{
    const struct until until = {.collector = collector};
    pthread_mutex_lock(&collector->lock);
    while (!nothing_is_in_flight(&until))
        gather_until(&until, nothing_is_in_flight, COX_DEADLINE_NEVER);
    pthread_mutex_unlock(&collector->lock);
}

/* ---- handlers ---- */

bool cox_collector_runs_handler(const struct cox_collector *collector, uint64_t through)
{
    for (const struct cox_handler_run *run = collector->running; run; run = run->next)
        if (run->registered && run->number <= through)
            return !pthread_equal(collector->thread, pthread_self());
    return false;
}

/* Runs the handler of a completion that was taken, without the lock; the run has begun. Returns the
 * time at which it returned; 0: that was some time ago. */
COX_HOT static uint64_t handle(struct cox_collector *collector, const struct cox_handler_run *run,
                               cox_completion_fn handler, void *context)
{
    struct cox_replies *taken = run->taken;
    const struct cox_completion *completion = &taken->completion;
    pthread_mutex_unlock(&collector->lock);

    COX_PROBE(handler__enter, completion->channel, completion->sequence, completion->type,
              completion->status);
    struct cox_reentrancy inside;
    cox_reentrancy_enter(&inside, collector->owner);
    if (handler)
        handler(context, completion);
    cox_reentrancy_exit(&inside);
    const uint64_t returned_ns = handler ? cox_now_ns() : completion->completed_ns;
    if (completion->status != COX_LATE)
        cox_recorder_handled(&collector->recorder, completion->sequence, returned_ns);
    COX_PROBE(handler__return, completion->channel, completion->sequence, completion->type, 0);
    cox_fault_point(COX_FAULT_HANDLED);

    /* relaxed: the payload buffer of this request, if it has one, is counted. */
    const bool holds = completion->status || cox_replies_holds(taken) ||
                       atomic_load_explicit(&collector->payloads_used, memory_order_relaxed) > 0;
    pthread_mutex_lock(&collector->lock);
    run_end(collector, run);
    if (completion->status != COX_LATE) /* the request is counted once */
        cox_stats_return(&collector->stats, completion, returned_ns);
    if (holds) { /* releasing much memory takes time */
        tell(collector);
        pthread_mutex_unlock(&collector->lock);
        cox_collector_let_go(collector, taken);
        pthread_mutex_lock(&collector->lock);
    }
    give_back(collector, taken);
    tell(collector);
    return holds ? 0 : returned_ns;
}

COX_HOT void cox_collector_respond(struct cox_collector *collector)
{
    struct until until = {.collector = collector};
    pthread_mutex_lock(&collector->lock);
    for (;;) {
        gather_until(&until, completion_is_ready, COX_DEADLINE_NEVER);
        if (collector->ready_count == 0)
            break;
        struct cox_handler_run run;
        run_begin(collector, &run, take_first(collector), true);
        until.now_ns = handle(collector, &run, collector->handler, collector->handler_context);
    }
    pthread_mutex_unlock(&collector->lock);
}

int cox_collector_await(struct cox_collector *collector, const struct cox_waiter *waiter,
                        cox_completion_fn handler, void *context, struct cox_error *err)
{
    const struct until until = {.collector = collector, .waiter = waiter};
    pthread_mutex_lock(&collector->lock);
    while (!waiter->done)
        gather_until(&until, call_is_done, COX_DEADLINE_NEVER);
    const struct cox_completion *completion = &waiter->run.taken->completion;
    const int status = completion->status;
    if (status)
        cox_fail(err, status, "%s", completion->text);
    handle(collector, &waiter->run, handler, context);
    pthread_mutex_unlock(&collector->lock);
    return status;
}

/* True if a completion of a request that asked the rank is still to be taken by the response
 * thread. */
static bool rank_has_ready(const struct cox_collector *collector, uint32_t rank)
{
    for (uint32_t frame = 0; !collector->collected && frame < collector_geometry(collector)->depth;
         frame++)
        if (collector->is_ready[frame] &&
            collector->replies[frame]->results[rank].outcome != COX_OUTCOME_NOT_ASKED)
            return true;
    return false;
}

/* True if a handler runs, or is about to, for a request that asked the rank. */
static bool rank_is_handled(const struct cox_collector *collector, uint32_t rank)
{
    for (const struct cox_handler_run *run = collector->running; run; run = run->next)
        if (run->taken->results[rank].outcome != COX_OUTCOME_NOT_ASKED)
            return true;
    return false;
}

int cox_collector_await_rank(struct cox_collector *collector, uint32_t rank, uint64_t deadline_ns)
{
    const struct timespec timeout = cox_deadline_timespec(deadline_ns);
    const struct until until = {.collector = collector, .rank = rank};
    for (;;) {
        const bool asked = !rank_is_not_asked(&until);
        if (!asked && !rank_has_ready(collector, rank) && !rank_is_handled(collector, rank))
            return 0;
        if (is_over(deadline_ns))
            return COX_TIMEOUT;
        if (asked)
            gather_until(&until, rank_is_not_asked, deadline_ns);
        else
            await_news(collector, &timeout);
    }
}

/* ---- a host that collects ---- */

bool cox_collector_take_reply(struct cox_collector *collector, const struct cox_rank_result *result)
{
    bool taken = false;
    pthread_mutex_lock(&collector->lock);
    for (struct cox_replies *lent = collector->lent; lent; lent = lent->next)
        for (uint32_t rank = 0; rank < collector->rank_count; rank++) {
            struct cox_replies_rank *own = &lent->ranks[rank];
            if (&lent->results[rank] != result || !own->large || own->large != result->bytes)
                continue;
            own->large = NULL;
            taken = true;
        }
    pthread_mutex_unlock(&collector->lock);
    return taken;
}

/* Makes the fd readable for what remains: completions that did not fit, and requests in flight. A
 * payload buffer that a late rank may still read is released at the next check. */
static void expect_more(struct cox_collector *collector)
{
    uint64_t next_ns = COX_DEADLINE_NEVER;
    if (collector->ready_count > 0)
        cox_readiness_signal(&collector->readiness);
    if (collector->ended != collector->published && !collector->gathering)
        next_ns = cox_deadline_min(collector->next_ns, collector->rewake_ns);
    if (atomic_load_explicit(&collector->payloads_used, memory_order_relaxed) > 0)
        next_ns = cox_deadline_min(next_ns, cox_deadline_after_ns(COX_SLICE_NS));
    /* A late reply need not make the fd readable. */
    if (collector->late_count > 0)
        next_ns = cox_deadline_min(next_ns, cox_deadline_after_ns(COX_SLICE_NS));
    cox_readiness_set_timer(&collector->readiness, next_ns);
}

int cox_collector_fd(struct cox_collector *collector, const int *rank_fds, int *ret_fd)
{
    struct cox_readiness *readiness = &collector->readiness;
    int r = 0;
    pthread_mutex_lock(&collector->lock);
    if (!cox_readiness_is_open(readiness)) {
        r = cox_readiness_open(readiness, rank_fds, collector->rank_count);
        if (r == 0)
            cox_state_set_notify(
                cox_state_channel(collector->channel->control, collector->channel->id));
        /* Replies from before are found at the first collection. */
        cox_readiness_signal(readiness);
    }
    *ret_fd = readiness->epoll_fd;
    pthread_mutex_unlock(&collector->lock);
    return r;
}

/* Takes back what was lent by the last collection. lock is released where memory is let go. */
static void end_lending(struct cox_collector *collector)
{
    struct cox_replies *lent = collector->lent;
    bool holds = atomic_load_explicit(&collector->payloads_used, memory_order_relaxed) > 0;
    collector->lent = NULL;
    for (const struct cox_replies *one = lent; one; one = one->next)
        holds |= cox_replies_holds(one);
    if (holds) {
        pthread_mutex_unlock(&collector->lock);
        for (struct cox_replies *one = lent; one; one = one->next)
            if (cox_replies_holds(one))
                cox_collector_let_go(collector, one);
        cox_collector_release_payloads(collector);
        pthread_mutex_lock(&collector->lock);
    }
    while (lent) {
        struct cox_replies *next = lent->next;
        give_back(collector, lent);
        lent = next;
    }
}

int cox_collector_collect(struct cox_collector *collector, struct cox_completion *completions,
                          uint32_t count_max, uint64_t deadline_ns, uint32_t *ret_count)
{
    const struct until until = {.collector = collector, .all = true};
    pthread_mutex_lock(&collector->lock);
    if (collector->collecting) {
        pthread_mutex_unlock(&collector->lock);
        return COX_BUSY;
    }
    collector->collecting = true;
    end_lending(collector);
    if (cox_readiness_is_open(&collector->readiness))
        cox_readiness_clear(&collector->readiness);
    do
        gather_until(&until, completion_is_ready, deadline_ns);
    while (!completion_is_ready(&until) && !is_over(deadline_ns));
    uint32_t count = 0;
    while (collector->ready_count > 0 && count < count_max) {
        struct cox_replies *taken = take_first(collector);
        taken->next = collector->lent;
        collector->lent = taken;
        completions[count] = taken->completion;
        if (taken->completion.status != COX_LATE) /* the request is counted once */
            cox_stats_return(&collector->stats, &completions[count],
                             completions[count].completed_ns);
        cox_recorder_handled(&collector->recorder, completions[count++].sequence, 0);
    }
    const int r = count ? 0 : completion_is_ready(&until) ? COX_CLOSED : COX_TIMEOUT;
    collector->collecting = false;
    if (cox_readiness_is_open(&collector->readiness))
        expect_more(collector);
    /* Threads in a submit may wait for the frames. */
    tell(collector);
    pthread_mutex_unlock(&collector->lock);
    *ret_count = count;
    return r;
}
