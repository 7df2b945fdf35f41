/*
 * Channels whose completions the host collects: there is no response thread. One thread that waits,
 * in a call or for completions, gathers for all. The others wait until it has their completion, or
 * leaves, and one of them takes its place. A completion without a caller is kept in its frame until
 * it is collected; then what it points to is lent until the next collection. A host with an event
 * loop polls an fd (readiness.h).
 */
#include "collect_internal.h"

#include <string.h>

#include "channel/base/fault.h"

struct until {
    struct cox_collector *collector;
    /* NULL: not asked for */
    const struct cox_waiter *waiter;
    uint32_t rank;
    uint64_t ended;
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

static bool rank_is_not_asked(const struct until *until)
{
    return !cox_collector_asks(until->collector, until->rank);
}

static bool more_has_ended(const struct until *until)
{
    return until->collector->ended != until->ended;
}

static bool completion_is_kept(const struct until *until)
{
    /* acquire: partner is cox_collector_stop. */
    return until->collector->kept_count > 0 ||
           (atomic_load_explicit(&until->collector->stopping, memory_order_acquire) &&
            nothing_is_in_flight(until));
}

static bool is_over(uint64_t deadline_ns)
{
    return deadline_ns != COX_DEADLINE_NEVER && cox_now_ns() >= deadline_ns;
}

/* With lock held, which it releases meanwhile: waits until done, or the deadline. Gathers, or waits
 * for the thread that does. After the deadline it still takes what is there. */
static void gather_until(const struct until *until, until_fn done, uint64_t deadline_ns)
{
    struct cox_collector *collector = until->collector;
    bool rescanned = false;
    while (!done(until) && collector->gathering && !is_over(deadline_ns)) {
        const struct timespec timeout = cox_deadline_timespec(deadline_ns);
        pthread_cond_timedwait(&collector->ended_cond, &collector->lock, &timeout);
    }
    if (done(until) || collector->gathering)
        return;
    collector->gathering = true;
    collector->cached_now_ns = 0; /* of the previous thread */
    while (!done(until) && !is_over(deadline_ns))
        if (!cox_collector_gather_step(collector, &rescanned, deadline_ns) && !done(until))
            cox_collector_idle(collector, deadline_ns);
    /* The rest of the batch. */
    while (cox_collector_gather_step(collector, &rescanned, 0))
        continue;
    collector->gathering = false;
    pthread_cond_broadcast(&collector->ended_cond);
    /* A host that polls was not served meanwhile, and its timer must be set. */
    if (!collector->collecting && !nothing_is_in_flight(until))
        cox_readiness_signal(&collector->readiness);
}

void cox_collector_keep(struct cox_collector *collector, const struct cox_entry *entry,
                        struct cox_completion *completion)
{
    const uint64_t frame =
        cox_geometry_frame(entry->sequence, collector_geometry(collector)->depth);
    completion->completed_ns = cox_now_ns();
    if (completion->status != COX_LATE)
        cox_recorder_gathered(&collector->recorder, entry->sequence, completion->status,
                              collector->gatherings[frame].taken.bytes, completion->completed_ns);
    collector->kept[frame] = *completion;
    collector->is_kept[frame] = true;
    collector->kept_count++;
    if (completion->status != COX_LATE) /* the request is counted once */
        cox_stats_return(&collector->stats, completion, completion->completed_ns);
    pthread_cond_broadcast(&collector->ended_cond);
    if (!collector->collecting)
        cox_readiness_signal(&collector->readiness);
}

bool cox_collector_is_uncollected(struct cox_collector *collector, uint64_t sequence)
{
    const uint64_t frame = cox_geometry_frame(sequence, collector_geometry(collector)->depth);
    pthread_mutex_lock(&collector->lock);
    const bool is_kept = collector->is_kept[frame];
    pthread_mutex_unlock(&collector->lock);
    return is_kept;
}

int cox_collector_collect_call(struct cox_collector *collector, const struct cox_waiter *waiter)
{
    const struct until until = {.collector = collector, .waiter = waiter};
    pthread_mutex_lock(&collector->lock);
    while (!waiter->done)
        gather_until(&until, call_is_done, COX_DEADLINE_NEVER);
    pthread_mutex_unlock(&collector->lock);
    return waiter->status;
}

void cox_collector_collect_room(struct cox_collector *collector, uint64_t deadline_ns)
{
    struct until until = {.collector = collector};
    pthread_mutex_lock(&collector->lock);
    until.ended = collector->ended;
    gather_until(&until, more_has_ended, deadline_ns);
    pthread_mutex_unlock(&collector->lock);
}

void cox_collector_collect_rest(struct cox_collector *collector)
{
    const struct until until = {.collector = collector};
    pthread_mutex_lock(&collector->lock);
    while (!nothing_is_in_flight(&until))
        gather_until(&until, nothing_is_in_flight, COX_DEADLINE_NEVER);
    pthread_mutex_unlock(&collector->lock);
}

void cox_collector_collect_rank(struct cox_collector *collector, uint32_t rank,
                                uint64_t deadline_ns)
{
    const struct until until = {.collector = collector, .rank = rank};
    while (!rank_is_not_asked(&until) && !is_over(deadline_ns))
        gather_until(&until, rank_is_not_asked, deadline_ns);
}

/* ---- completions ---- */

/* The kept frame with the oldest request. */
static uint32_t kept_first(const struct cox_collector *collector)
{
    const uint32_t depth = collector_geometry(collector)->depth;
    uint32_t first = depth;
    for (uint32_t frame = 0; frame < depth; frame++)
        if (collector->is_kept[frame] &&
            (first == depth || collector->kept[frame].sequence < collector->kept[first].sequence))
            first = frame;
    return first;
}

/* The gathering is lent with its completion; the frame gets an unused one. */
static void lend(struct cox_collector *collector, uint32_t frame, struct cox_completion *completion)
{
    struct cox_gathering *gathering = &collector->gatherings[frame];
    struct cox_gathering *lent = &collector->lent[collector->lent_count++];
    const size_t size = offsetof(struct cox_gathering, text);
    uint8_t spare[offsetof(struct cox_gathering, text)];
    memcpy(spare, lent, size);
    memcpy(lent, gathering, size);
    memcpy(gathering, spare, size);
    *completion = collector->kept[frame];
    if (completion->text) {
        memcpy(lent->text, gathering->text, sizeof lent->text);
        completion->text = lent->text;
    }
    collector->is_kept[frame] = false;
    collector->kept_count--;
}

/* Takes back what was lent by the last collection. */
static void take_back(struct cox_collector *collector)
{
    for (uint32_t i = 0; i < collector->lent_count; i++)
        if (cox_gathering_holds(&collector->lent[i]))
            cox_collector_let_go(collector, &collector->lent[i]);
    collector->lent_count = 0;
}

bool cox_collector_take_reply(struct cox_collector *collector, const struct cox_rank_result *result)
{
    bool taken = false;
    pthread_mutex_lock(&collector->lock);
    for (uint32_t i = 0; i < collector->lent_count; i++)
        for (uint32_t rank = 0; rank < collector->rank_count; rank++) {
            struct cox_gathering *lent = &collector->lent[i];
            struct cox_gathering_rank *own = &lent->ranks[rank];
            if (&lent->results[rank] != result || !own->block || own->block != result->bytes)
                continue;
            own->block = NULL;
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
    if (collector->kept_count > 0)
        cox_readiness_signal(&collector->readiness);
    if (collector->ended != collector->published && !collector->gathering)
        next_ns = cox_deadline_min(collector->next_ns, collector->rewake_ns);
    if (atomic_load_explicit(&collector->blocks_used, memory_order_relaxed) > 0)
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

int cox_collector_collect(struct cox_collector *collector, struct cox_completion *completions,
                          uint32_t count_max, uint64_t deadline_ns, uint32_t *ret_count)
{
    const struct until until = {.collector = collector};
    pthread_mutex_lock(&collector->lock);
    if (collector->collecting) {
        pthread_mutex_unlock(&collector->lock);
        return COX_BUSY;
    }
    collector->collecting = true;
    pthread_mutex_unlock(&collector->lock);

    take_back(collector);
    cox_collector_release_blocks(collector);

    pthread_mutex_lock(&collector->lock);
    if (cox_readiness_is_open(&collector->readiness))
        cox_readiness_clear(&collector->readiness);
    do
        gather_until(&until, completion_is_kept, deadline_ns);
    while (!completion_is_kept(&until) && !is_over(deadline_ns));
    uint32_t count = 0;
    const uint64_t now_ns = collector->recorder.records && collector->kept_count ? cox_now_ns() : 0;
    while (collector->kept_count > 0 && count < count_max) {
        lend(collector, kept_first(collector), &completions[count]);
        cox_recorder_handled(&collector->recorder, completions[count++].sequence, now_ns);
    }
    const int r = count ? 0 : completion_is_kept(&until) ? COX_CLOSED : COX_TIMEOUT;
    collector->collecting = false;
    if (cox_readiness_is_open(&collector->readiness))
        expect_more(collector);
    /* Threads in a submit may wait for the frames. */
    pthread_cond_broadcast(&collector->ended_cond);
    pthread_mutex_unlock(&collector->lock);
    *ret_count = count;
    return r;
}
