/*
 * The passes over the requests in flight: a pass checks the ranks that have not replied, wakes
 * ranks that have not taken their request, and ends a request that can end. Its completion goes
 * back to the caller. Requests end in order, except at their deadlines. Before a pass the thread
 * waits, or spins.
 */
#include "channel/base/base_internal.h"
#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/recorder/probes.h"
#include "coordinator/stacks/incidents.h"
#include "coordinator/transport/transport.h"
#include "proto/operation.h"
#include "collector_internal.h"
#include "report.h"

#include <inttypes.h>

/* ---- waits ---- */

void cox_collector_rewake(struct cox_collector *collector, uint32_t rank)
{
    /* Also stored again, in case a process has overwritten it. */
    cox_state_set_published(cox_state_channel(collector->channel->control, collector->channel->id),
                            collector->published);
    collector->stats.counts.rewakes += cox_gate_rewake(&collector->channel->gate, rank);
}

COX_HOT void cox_collector_advance(struct cox_collector *collector)
{
    uint64_t before = collector->ended;
    while (collector->ended < collector->published &&
           collector_entry(collector, collector->ended + 1)->ended)
        collector->ended++;
    if (collector->ended != before)
        cox_state_set_ended(cox_state_channel(collector->channel->control, collector->channel->id),
                            collector->ended);
}

void cox_collector_wake(struct cox_collector *collector)
{
    /* seq_cst, both sides: the waker stores its cause and reads `sleeping`, the collector stores
     * `sleeping` and reads `causes`; one of the two sees the other. Partner: cox_collector_sleep.
     */
    atomic_fetch_add(&collector->causes, 1);
    uint32_t sleeping = atomic_load(&collector->sleeping);
    if (sleeping) {
        cox_tokens_expect_wake(collector->channel->tokens, sleeping - 1);
        cox_gate_wake(&collector->channel->gate, sleeping - 1, COX_WAKEUP_RESPONSE_CONSUME);
    }
    pthread_mutex_lock(&collector->lock);
    pthread_cond_broadcast(&collector->work);
    pthread_cond_broadcast(&collector->ended_cond);
    pthread_mutex_unlock(&collector->lock);
    cox_readiness_signal(&collector->readiness);
}

COX_HOT struct cox_wait_snapshot cox_collector_snapshot(const struct cox_collector *collector)
{
    return (struct cox_wait_snapshot){
        .causes = atomic_load(&collector->causes),
        .wake_sequence =
            cox_gate_wake_sequence(&collector->channel->gate, COX_WAKEUP_RESPONSE_CONSUME),
    };
}

struct collector_spin_state {
    const struct cox_collector *collector;
    /* NULL: the wakeup of all ranks */
    const struct cox_layout_rank_line *line;
    uint64_t sequence;
    const struct cox_wait_snapshot *before;
};

COX_HOT static bool collector_has_reply(const void *context)
{
    const struct collector_spin_state *spin = context;
    const struct cox_collector *collector = spin->collector;
    const bool woken = spin->line ? cox_state_done(spin->line) >= spin->sequence
                                  : cox_gate_wake_sequence(&collector->channel->gate,
                                                           COX_WAKEUP_RESPONSE_CONSUME) !=
                                        spin->before->wake_sequence;
    return woken || atomic_load(&collector->causes) != spin->before->causes;
}

COX_HOT void cox_collector_sleep(struct cox_collector *collector, uint32_t rank, uint64_t sequence,
                                 const struct cox_wait_snapshot *before, uint64_t deadline_ns)
{
    const struct cox_channel *channel = collector->channel;
    COX_PROBE(collector__sleep, channel->id, sequence, rank, 0);
    const struct collector_spin_state spin = {
        .collector = collector,
        .line = cox_gate_shared(&channel->gate)
                    ? NULL
                    : cox_state_line(channel->control, rank, channel->id),
        .sequence = sequence,
        .before = before,
    };
    collector->sleep_rank = (int)rank;
    collector->sleep_ns = deadline_ns;
    pthread_mutex_unlock(&collector->lock);
    if (cox_spin_until(&collector->spinner, collector_has_reply, &spin, deadline_ns)) {
        pthread_mutex_lock(&collector->lock);
        collector->stats.counts.spins = collector->spinner.found;
        collector->sleep_rank = -1;
        return;
    }
    int r = COX_TIMEOUT;
    atomic_store(&collector->sleeping, rank + 1); /* seq_cst: see cox_collector_wake */
    if (atomic_load(&collector->causes) == before->causes)
        r = cox_gate_wait(&collector->channel->gate, rank, COX_WAKEUP_RESPONSE_CONSUME,
                          before->wake_sequence, deadline_ns);
    /* relaxed: seen late, it causes one surplus token. */
    atomic_store_explicit(&collector->sleeping, 0, memory_order_relaxed);
    pthread_mutex_lock(&collector->lock);
    collector->sleep_rank = -1;
    if (r == 0)
        cox_tokens_waited(collector->channel->tokens, rank);
    collector->stats.counts.wakeups++;
}

/* Releases request payload buffers, or waits a slice, or until the deadline. lock is held on entry
 * and on return, and released meanwhile. */
static void collector_await_payloads(struct cox_collector *collector, uint64_t deadline_ns)
{
    const struct timespec until =
        cox_deadline_timespec(cox_deadline_min(deadline_ns, cox_deadline_after_ns(COX_SLICE_NS)));
    const uint64_t published = collector->published;
    pthread_mutex_unlock(&collector->lock);
    cox_collector_release_payloads(collector);
    pthread_mutex_lock(&collector->lock);
    if (collector->published == published &&
        !atomic_load_explicit(&collector->stopping, memory_order_acquire) &&
        atomic_load_explicit(&collector->payloads_used, memory_order_relaxed) > 0)
        pthread_cond_timedwait(&collector->work, &collector->lock, &until);
}

struct idle_spin_state {
    const struct cox_collector *collector;
    uint64_t published;
};

static bool collector_has_work(const void *context)
{
    const struct idle_spin_state *spin = context;
    return atomic_load_explicit(&spin->collector->news, memory_order_relaxed) != spin->published ||
           atomic_load_explicit(&spin->collector->stopping, memory_order_relaxed);
}

/* Returns true if a request was published while it was spinning. lock is held on entry and on
 * return. */
static bool collector_spins(struct cox_collector *collector)
{
    const struct idle_spin_state spin = {collector, collector->published};
    /* Before the first request the spinner belongs to the thread that waits for ranks to attach
     * (cox_collector_sleep). */
    if (collector->spinner.budget_ns == 0 || collector->published == 0)
        return false;
    pthread_mutex_unlock(&collector->lock);
    const bool found =
        cox_spin_until(&collector->spinner, collector_has_work, &spin, COX_DEADLINE_NEVER);
    pthread_mutex_lock(&collector->lock);
    collector->stats.counts.spins = collector->spinner.found;
    return found || collector->published != spin.published ||
           atomic_load_explicit(&collector->stopping, memory_order_acquire);
}

void cox_collector_idle(struct cox_collector *collector, uint64_t deadline_ns)
{
    /* While a late rank may still read a request payload buffer, the thread wakes up in each slice.
     * Otherwise it blocks without a timeout, if the caller has none. */
    if (atomic_load_explicit(&collector->payloads_used, memory_order_relaxed) > 0) {
        collector_await_payloads(collector, deadline_ns);
    } else if (!collector_spins(collector)) {
        const struct timespec until = cox_deadline_timespec(deadline_ns);
        if (deadline_ns == COX_DEADLINE_NEVER)
            pthread_cond_wait(&collector->work, &collector->lock);
        else
            pthread_cond_timedwait(&collector->work, &collector->lock, &until);
    }
}

/* ---- a pass ---- */

/* Ranks whose processes are looked at in one pass. */
#define LOOKS_MAX 8

/* Takes the reply of a rank, if there is one, or finds the rank dead. */
COX_HOT static void gather_check_rank(struct cox_collector *collector, struct cox_entry *entry,
                                      uint32_t rank)
{
    struct cox_replies *replies = collector_replies(collector, entry);
    /* Checked again after a death: a reply that was complete before the death counts. */
    bool replied = collector_replied(collector, rank, entry->sequence);
    bool dead = !replied && collector_dead(collector, rank);
    if (replied || (dead && collector_replied(collector, rank, entry->sequence))) {
        int r = 0;
        if (cox_replies_take(replies, collector->channel, rank, entry->sequence, entry->type,
                             cox_rank_incarnation(&collector->records[rank]))) {
            /* Without the lock: copying a large reply takes time, and only this thread reads it. */
            pthread_mutex_unlock(&collector->lock);
            struct cox_large_payload_view *view =
                collector_reply_view(collector, rank, entry->sequence);
            cox_large_payload_view_find(&collector->reply_views[rank],
                                        collector_geometry(collector)->depth, collector->rank_count,
                                        view, &replies->ranks[rank].ref);
            r = cox_replies_take_large(replies, &collector->large_payloads->reply_limits, view,
                                       rank, entry->type);
            pthread_mutex_lock(&collector->lock);
        }
        /* The reply is lost with its rank. If the rank is not known to be dead yet, its death will
         * wake this thread. */
        if (r == COX_PEER_DEAD && collector_dead(collector, rank))
            cox_replies_set_dead(replies, rank, collector->supervisor);
        if (r == COX_PEER_DEAD)
            return;
        cox_fault_point(COX_FAULT_REPLY_FETCHED);
        collector_consume(collector, entry, rank);
        if (replies->results[rank].response)
            cox_rank_stats_reply(&collector->rank_stats[rank], replies->results[rank].response);
    } else if (dead) {
        cox_replies_set_dead(replies, rank, collector->supervisor);
    }
}

/* One pass over the requests in flight. */
struct pass {
    /* Checks every rank. Otherwise a pass checks only what its wakeup can be about: the next rank
     * in order if each rank has a wakeup of its own, and no rank if the last one to reply wakes.
     * Reading a line while its rank writes it slows both down. */
    bool full_scan;
    /* a recent time; 0: unknown */
    uint64_t cached_now_ns;
    /* 0: not read yet; a pass that finds all replies does not need it */
    uint64_t now_ns;
    /* ranks that have not taken a frame are woken again; valid with now_ns */
    bool rewake;
};

COX_HOT static void pass_read_clock(struct cox_collector *collector, struct pass *pass)
{
    if (pass->now_ns)
        return;
    pass->now_ns = pass->cached_now_ns ? pass->cached_now_ns : cox_now_ns();
    collector->pass_ns = pass->now_ns;
    pass->rewake = collector_rewake_due(&collector->rewake_ns, pass->now_ns);
}

/* Checks pending ranks. Returns the last that is still pending, -1: none, -2: the request has
 * failed. It starts at the last rank and goes down: ranks are woken in order, so a thread that
 * waits for the last rank is usually woken once, when all the others have replied as well. */
COX_HOT static int gather_check(struct cox_collector *collector, struct cox_entry *entry,
                                const struct pass *pass)
{
    struct cox_replies *replies = collector_replies(collector, entry);
    const bool alone = !pass->full_scan && !replies->failed;
    int last = -1;
    for (uint32_t left = replies->left; left > 0; left--) {
        const uint32_t rank = left - 1;
        const struct cox_rank_result *result = &replies->results[rank];
        if (result->outcome == COX_OUTCOME_LATE &&
            (pass->full_scan || !cox_gate_shared(&collector->channel->gate)))
            gather_check_rank(collector, entry, rank);
        if (result->outcome == COX_OUTCOME_LATE && last < 0)
            last = (int)rank;
        replies->failed |=
            result->outcome == COX_OUTCOME_ERROR || result->outcome == COX_OUTCOME_DEAD;
        if (last >= 0 && alone)
            break;
    }
    replies->left = (uint32_t)(last + 1);
    return replies->failed ? -2 : last;
}

/* Returns true if the rank has not taken the request, or is idle without a reply: its reply words
 * were overwritten, and it stores them again when it is woken. */
static bool gather_sleeps(const struct cox_layout_rank_line *line, uint64_t sequence)
{
    uint64_t word = cox_state_of_rank(line).word;
    return cox_state_taken(line) < sequence || (word >> COX_STATE_SHIFT == COX_RANK_IDLE &&
                                                word >= cox_state_word(COX_RANK_IDLE, sequence));
}

/* Wakes each live rank that has not taken its frame again: the first wakeup may have been lost with
 * a signal, with a killed process, or because a process has overwritten the words. */
static void gather_rewake(struct cox_collector *collector, const struct cox_entry *entry)
{
    const struct cox_replies *replies = collector_replies(collector, entry);
    for (uint32_t rank = 0; rank < collector->rank_count; rank++)
        if (replies->results[rank].outcome == COX_OUTCOME_LATE &&
            gather_sleeps(cox_state_line(collector->channel->control, rank, collector->channel->id),
                          entry->sequence))
            cox_collector_rewake(collector, rank);
}

/* A look reads /proc, under the lock: each rank has one in turn, so that 128 do not take long. */
static void gather_see_dumps(struct cox_collector *collector, const struct cox_entry *entry,
                             uint64_t now_ns)
{
    const struct cox_replies *replies = collector_replies(collector, entry);
    const uint32_t stride = (collector->rank_count + LOOKS_MAX - 1) / LOOKS_MAX;
    for (uint32_t rank = (uint32_t)(now_ns / COX_SLICE_NS % stride); rank < collector->rank_count;
         rank += stride)
        if (replies->results[rank].outcome == COX_OUTCOME_LATE)
            cox_supervisor_see_dump(collector->supervisor, rank);
}

/* ret_odd: with COX_DIVERGED that is found here, the ranks that differ from most. */
COX_HOT static void gather_complete(struct cox_collector *collector, const struct cox_entry *entry,
                                    int status, struct cox_rank_set *ret_odd,
                                    struct cox_completion *ret_completion)
{
    struct cox_replies *replies = collector_replies(collector, entry);
    if (status)
        cox_report_late(collector, entry, status, replies);
    if (status == 0 && entry->operation->step) {
        if (collector->reports)
            cox_fault_reports_read(collector->reports, collector->report_count,
                                   replies->results[0].response, replies->text,
                                   sizeof replies->text);
        status = cox_report_divergence(collector, entry, replies, ret_odd);
    }
    if (status && replies->text[0] == '\0')
        cox_report_failure(collector, entry, status, replies);
    if (status == COX_TIMEOUT && collector->incidents)
        cox_incidents_append(collector->incidents, (int)collector->channel->id, entry->sequence,
                             replies->text, sizeof replies->text);
    *ret_completion = (struct cox_completion){
        .sequence = entry->sequence,
        .channel = collector->channel->id,
        .type = entry->type,
        .status = status,
        .text = status ? replies->text : NULL,
        .rank_count = collector->rank_count,
        .ranks = replies->results,
        .payload = cox_replies_choose(replies, entry->gather),
        .request_context = entry->request_context,
        .submitted_ns = entry->submitted_ns,
        .published_ns = entry->published_ns,
    };
}

/* A rank's error that is to be kept. cancelled: an earlier step has failed, whose error that is. */
static bool result_counts(const struct cox_rank_result *result, bool cancelled)
{
    return result->outcome == COX_OUTCOME_ERROR && !(cancelled && result->code == COX_ABORTED);
}

/* A request has failed. Without the lock: the host logs. The replies belong to the calling
 * thread. */
static void gather_tell_failure(struct cox_collector *collector, const struct cox_entry *entry,
                                const struct cox_completion *completion, bool cancelled,
                                const struct cox_rank_set *odd)
{
    const struct cox_replies *replies = collector_replies(collector, entry);
    bool diverged = false;
    for (uint32_t rank = 0; rank < collector->rank_count; rank++) {
        const struct cox_rank_result *result = &replies->results[rank];
        if (cox_rank_set_has(odd, rank)) {
            diverged = true;
            cox_last_errors_add(collector->last_errors, rank, "pid %jd on %s",
                                (intmax_t)result->pid, replies->text);
        }
        if (!result_counts(result, cancelled))
            continue;
        cox_last_errors_add(collector->last_errors, rank,
                            "pid %jd on %s sequence %" PRIu64 " (%s): %s", (intmax_t)result->pid,
                            cox_channel_name(collector->channel->id), entry->sequence,
                            entry->operation->name, result->text);
    }
    if (diverged)
        cox_log_write(collector->log, 3, "%s", replies->text);
    if (collector->failed)
        collector->failed(collector->owner, collector, entry->sequence, completion->status,
                          completion->text);
}

/* How long it took to find out that a rank is dead, or hangs. */
static void gather_count_detection(struct cox_collector *collector, const struct cox_entry *entry,
                                   int status)
{
    const struct cox_replies *replies = collector_replies(collector, entry);
    uint64_t seen_ns = entry->published_ns, silent_ns = 0;
    for (uint32_t rank = 0; rank < collector->rank_count; rank++) {
        const struct cox_rank_result *result = &replies->results[rank];
        /* relaxed: the rank was found dead, which is acquired after it. */
        const uint64_t exiting_ns =
            atomic_load_explicit(&collector->records[rank].exiting_ns, memory_order_relaxed);
        if (result->outcome == COX_OUTCOME_DEAD && exiting_ns > seen_ns)
            seen_ns = exiting_ns;
        if (result->outcome == COX_OUTCOME_LATE && result->silent_ns > silent_ns)
            silent_ns = result->silent_ns;
    }
    if (status == COX_PEER_DEAD)
        cox_latency_add(&collector->stats.death_detection, cox_now_ns() - seen_ns);
    else if (status == COX_TIMEOUT)
        cox_latency_add(&collector->stats.hang_detection, silent_ns);
}

/* The request has failed: no rank begins another step after it. Others may be told now, and then
 * the lock is released meanwhile. */
static void gather_fail(struct cox_collector *collector, const struct cox_entry *entry,
                        const struct cox_completion *completion, const struct cox_rank_set *odd)
{
    const struct cox_replies *replies = collector_replies(collector, entry);
    struct cox_layout_channel_state *words =
        cox_state_channel(collector->channel->control, collector->channel->id);
    const bool step = entry->operation->step;
    const bool cancelled = step && cox_state_void_through(words) >= entry->sequence;
    if (step)
        cox_state_set_void(words, collector->published);
    collector_set_cancelled(collector, entry->sequence, true);
    for (uint32_t rank = 0; rank < collector->rank_count; rank++)
        if (result_counts(&replies->results[rank], cancelled))
            cox_rank_stats_fail(&collector->rank_stats[rank], replies->results[rank].code);
    gather_count_detection(collector, entry, completion->status);
    uint64_t through = collector->published;
    pthread_mutex_unlock(&collector->lock);
    if (step && collector->transport)
        collector->transport->cancel_steps(collector->transport->context, collector->channel->id,
                                           through);
    gather_tell_failure(collector, entry, completion, cancelled, odd);
    pthread_mutex_lock(&collector->lock);
    if (step) /* what was published meanwhile */
        cox_state_set_void(words, collector->published);
    if (step && collector->transport && through < collector->published) {
        through = collector->published;
        pthread_mutex_unlock(&collector->lock);
        collector->transport->cancel_steps(collector->transport->context, collector->channel->id,
                                           through);
        pthread_mutex_lock(&collector->lock);
    }
}

/* Releases the memory of large requests and replies. Ranks that replied out of line release theirs
 * when they are awake next, which may be never. So they are woken, and so are ranks whose reply
 * came too late. */
COX_HOT void cox_collector_let_go(struct cox_collector *collector, struct cox_replies *replies)
{
    for (uint32_t rank = 0; rank < collector->rank_count; rank++)
        if (replies->ranks[rank].out_of_line ||
            (replies->results[rank].outcome == COX_OUTCOME_LATE &&
             collector->large_payloads->reply_limits.size_max > 0))
            cox_gate_post(&collector->channel->gate, rank, COX_WAKEUP_REQUEST_CONSUME);
    cox_replies_let_go(replies);
    cox_collector_release_payloads(collector);
}

/* Ends the request. Returns its replies, with the completion. */
COX_HOT static struct cox_replies *gather_finish(struct cox_collector *collector,
                                                 struct cox_entry *entry, int status)
{
    struct cox_replies *replies = collector_replies(collector, entry);
    struct cox_completion *completion = &replies->completion;
    struct cox_rank_set odd = {{0}};
    if (status) /* formatting the error takes time */
        pthread_mutex_unlock(&collector->lock);
    gather_complete(collector, entry, status, &odd, completion);
    COX_PROBE(request__gather, collector->channel->id, entry->sequence, entry->type,
              completion->status);
    cox_fault_point(COX_FAULT_COMPLETE);
    if (status)
        pthread_mutex_lock(&collector->lock);
    if (completion->status)
        gather_fail(collector, entry, completion, &odd);
    entry->ended = true;
    cox_collector_advance(collector);
    if (completion->status && collector->transport)
        collector->transport->ended(collector->transport->context, collector->channel->id,
                                    collector->ended);
    cox_stats_end(&collector->stats, completion->status, &replies->taken);
    if (completion->status && entry->reports_late)
        cox_collector_watch_late(collector, entry);
    return replies;
}

/* A request has failed. Returns true if a pending rank is about to be reported dead, because that
 * is probably why the others failed. *ret_pending: that rank. */
static bool gather_awaits_death(struct cox_collector *collector, struct cox_entry *entry,
                                int *ret_pending)
{
    const struct cox_replies *replies = collector_replies(collector, entry);
    if (!entry->exiting_ns)
        entry->exiting_ns = cox_deadline_after_ns(COX_EXITING_NS);
    for (uint32_t rank = 0; rank < collector->rank_count; rank++)
        if (replies->results[rank].outcome == COX_OUTCOME_DEAD)
            return false;
    if (cox_now_ns() >= entry->exiting_ns)
        return false;
    for (uint32_t rank = 0; rank < collector->rank_count; rank++)
        if (replies->results[rank].outcome == COX_OUTCOME_LATE &&
            cox_supervisor_exiting(collector->supervisor, rank)) {
            *ret_pending = (int)rank;
            return true;
        }
    return false;
}

/* Once per slice. */
static void gather_suspect(struct cox_collector *collector, struct cox_entry *entry,
                           uint64_t now_ns)
{
    if (entry->suspected || !collector->incidents ||
        now_ns < cox_incidents_due(entry->published_ns, entry->deadline_ns))
        return;
    entry->suspected = true;
    cox_incidents_suspect(collector->incidents, (int)collector->channel->id, entry->sequence);
}

/* The reason to end a request that ranks have not replied to; 0: none. */
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

static void replies_add_pending(const struct cox_replies *replies,
                                struct cox_rank_set *pending_ranks)
{
    for (uint32_t rank = 0; rank < replies->rank_count; rank++)
        if (replies->results[rank].outcome == COX_OUTCOME_LATE)
            cox_rank_set_add(pending_ranks, rank);
}

/* Checks the requests in flight, oldest first, and ends the first one that can end. Returns true
 * if one has ended (*ret_ended), or if there is more to check at once. Otherwise *ret_pending is a
 * rank to wait on, -1: nothing is in flight, and *ret_deadline_ns is the next deadline. */
COX_HOT static bool gather_round(struct cox_collector *collector,
                                 const struct cox_wait_snapshot *before, bool *rescanned,
                                 int *ret_pending, uint64_t *ret_sequence,
                                 uint64_t *ret_deadline_ns, struct cox_replies **ret_ended)
{
    uint64_t late_sequence = 0;
    const int late = cox_collector_drop_late(collector, &late_sequence);
    if (collector->late_count && (*ret_ended = cox_collector_finish_late(collector)))
        return true;
    *ret_pending = -1;
    *ret_sequence = 0;
    *ret_deadline_ns = COX_DEADLINE_NEVER;
    struct pass pass = {.cached_now_ns = collector->cached_now_ns};
    collector->cached_now_ns = 0;
    const bool rescan = collector->rescan;
    collector->rescan = false;
    const bool news = before->causes != collector->seen.causes ||
                      before->wake_sequence != collector->seen.wake_sequence;
    bool apart = false; /* a request in flight does not ask the rank that is waited on */
    struct cox_rank_set pending_ranks = {{0}}; /* of the requests checked so far */
    for (uint64_t sequence = collector->ended + 1; sequence <= collector->published; sequence++) {
        struct cox_entry *entry = collector_entry(collector, sequence);
        if (entry->ended)
            continue;
        struct cox_replies *replies = collector_replies(collector, entry);
        if (collector->begun < sequence) {
            cox_replies_begin(replies, &entry->asked, collector->records);
            collector->begun = sequence;
        }
        pass.full_scan =
            news || pass.rewake || *rescanned || rescan || entry->causes != before->causes;
        int pending = gather_check(collector, entry, &pass);
        if (pending >= 0) {
            const bool early =
                pass.now_ns == 0; /* the ranks were checked before the clock was read */
            pass_read_clock(collector, &pass);
            if ((pass.rewake && !pass.full_scan) ||
                (early && gather_cut(collector, entry, &pass))) {
                pass.full_scan = true;
                pending = gather_check(collector, entry, &pass);
            }
        }
        if (pass.rewake && pending >= 0)
            gather_suspect(collector, entry, pass.now_ns);
        int cut = pending >= 0 ? gather_cut(collector, entry, &pass) : 0;
        /* It ends before its turn: check every rank once more, for its reply, and for which of the
         * failures is the cause. */
        if ((cut || pending == -2) && !pass.full_scan)
            return collector->rescan = true;
        if (pending == -2 && gather_awaits_death(collector, entry, &pending)) {
            *ret_deadline_ns = cox_deadline_min(*ret_deadline_ns, entry->exiting_ns);
            pass_read_clock(collector, &pass);
            cut = gather_cut(collector, entry, &pass);
        }
        /* A rank replies in order: if it was pending for an earlier request a moment ago, that
         * reply is there by now, also before an error or a death. One more pass, and only one,
         * since the words are another process's. */
        if (pending < 0 && !*rescanned && rank_sets_meet(&pending_ranks, &entry->asked))
            return *rescanned = true;
        if (sequence < collector->published)
            replies_add_pending(replies, &pending_ranks);
        if (pending < 0 || cut) {
            if (sequence == collector->published) /* every request was checked */
                collector->seen = *before;
            *ret_ended = gather_finish(collector, entry, cox_replies_status(replies, cut));
            *rescanned = false;
            return true;
        }
        if (pass.rewake) {
            gather_rewake(collector, entry);
            gather_see_dumps(collector, entry, pass.now_ns);
        }
        if (*ret_pending < 0) {
            *ret_pending = pending;
            *ret_sequence = sequence;
        }
        apart = apart || replies->results[*ret_pending].outcome != COX_OUTCOME_LATE;
        *ret_deadline_ns = cox_deadline_min(*ret_deadline_ns, entry->deadline_ns);
    }
    collector->seen = *before;
    collector->next_ns = *ret_deadline_ns;
    if (*ret_pending < 0 && late >= 0 && collector->late_count) {
        *ret_pending = late;
        *ret_sequence = late_sequence;
        *ret_deadline_ns = cox_deadline_after_ns(COX_SLICE_NS);
    }
    if (apart && !cox_gate_shared(&collector->channel->gate))
        *ret_deadline_ns = cox_deadline_min(*ret_deadline_ns, cox_deadline_after_ns(COX_APART_NS));
    return false;
}

/* When the looks at the ranks that have not replied begin, so that the error at the deadline need
 * not wait for them; not before three quarters of the time, when most requests that ranks reply to
 * have ended. UINT64_MAX: there is none to come. */
COX_HOT static uint64_t looks_due(struct cox_collector *collector, const struct cox_entry *entry)
{
    if (entry->ended || entry->look_rank == collector->rank_count ||
        entry->deadline_ns == COX_DEADLINE_NEVER || entry->deadline_ns <= entry->published_ns ||
        collector_replies(collector, entry)->failed)
        return COX_DEADLINE_NEVER;
    const uint64_t look_ns = collector->rank_count * COX_REPORT_LOOK_NS;
    const uint64_t quarter_ns = (entry->deadline_ns - entry->published_ns) / 4;
    return entry->deadline_ns - (quarter_ns < look_ns ? quarter_ns : look_ns);
}

/* At one rank, without the lock, since it reads /proc: a pass follows, for replies that have come
 * meanwhile, and for the deadline. */
static void gather_look(struct cox_collector *collector, struct cox_entry *entry)
{
    struct cox_replies *replies = collector_replies(collector, entry);
    if (!entry->looked_ns)
        entry->looked_ns = collector->pass_ns;
    while (entry->look_rank < collector->rank_count) {
        const uint32_t rank = entry->look_rank++;
        if (replies->results[rank].outcome != COX_OUTCOME_LATE)
            continue;
        replies->ranks[rank].text[0] = '\0';
        if (collector_replied(collector, rank, entry->sequence) || collector_dead(collector, rank))
            continue;
        pthread_mutex_unlock(&collector->lock);
        cox_report_look(collector, replies, rank);
        pthread_mutex_lock(&collector->lock);
        return;
    }
}

COX_HOT bool cox_collector_gather_step(struct cox_collector *collector, bool *rescanned,
                                       uint64_t deadline_ns, struct cox_replies **ret_ended)
{
    /* Taken before the check: a cause that is stored later ends the wait. */
    const struct cox_wait_snapshot before = cox_collector_snapshot(collector);
    int pending;
    uint64_t pending_sequence, next_ns;
    *ret_ended = NULL;
    if (gather_round(collector, &before, rescanned, &pending, &pending_sequence, &next_ns,
                     ret_ended))
        return true;
    if (pending < 0 || deadline_ns == 0)
        return false;
    struct cox_entry *entry = collector_entry(collector, pending_sequence);
    const uint64_t looks_ns = looks_due(collector, entry);
    const bool due = collector->pass_ns >= looks_ns;
    /* Not for a caller that wants to be back before. */
    if (due && deadline_ns > collector->pass_ns + COX_REPORT_LOOK_NS) {
        gather_look(collector, entry);
        return true;
    }
    next_ns = cox_deadline_min(next_ns, collector->rewake_ns);
    if (!due)
        next_ns = cox_deadline_min(next_ns, looks_ns);
    cox_collector_sleep(collector, (uint32_t)pending, pending_sequence, &before,
                        cox_deadline_min(next_ns, deadline_ns));
    *rescanned = false;
    return true;
}
