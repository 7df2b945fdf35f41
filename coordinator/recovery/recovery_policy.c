#include "coordinator/executor/core.h"
#include "recovery_internal.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* Ranks of one node that die within this time count as one death. */
#define NODE_DEATH_NS COX_NSEC_PER_SEC

/* ---- back-off and limit ---- */

static void backoff_try(struct cox_backoff *backoff)
{
    backoff->tries++;
    backoff->tried_ns = cox_now_ns();
}

void cox_recovery_back_off(const struct cox_recovery *recovery, struct cox_backoff *backoff)
{
    const struct cox_recovery_options *options = &recovery->options;
    uint64_t now = cox_now_ns(), pause_ms = options->policy.backoff_min_ms;
    if (now - backoff->tried_ns >= options->policy.window_ms * COX_NSEC_PER_MSEC)
        backoff->tries = 0;
    for (uint32_t k = 1; k < backoff->tries && pause_ms < options->policy.backoff_max_ms; k++)
        pause_ms *= 2;
    if (pause_ms > options->policy.backoff_max_ms)
        pause_ms = options->policy.backoff_max_ms;
    backoff->due_ns = backoff->tries ? now + pause_ms * COX_NSEC_PER_MSEC : now;
}

static void death_count(struct cox_recovery *recovery)
{
    recovery->deaths[recovery->death_count++ % (recovery->options.policy.restart_max + 1)] =
        cox_now_ns();
}

uint32_t cox_recovery_recent_deaths(const struct cox_recovery *recovery)
{
    uint64_t now = cox_now_ns(), window_ns = recovery->options.policy.window_ms * COX_NSEC_PER_MSEC;
    uint32_t count = 0;
    for (uint32_t i = 0; i <= recovery->options.policy.restart_max && i < recovery->death_count;
         i++)
        count += now - recovery->deaths[i] < window_ns;
    return count;
}

struct cox_recovery_rank *cox_recovery_first_dead(struct cox_recovery *recovery)
{
    for (uint32_t rank = 0; rank < recovery->rank_count; rank++)
        if (recovery->ranks[rank].dead)
            return &recovery->ranks[rank];
    return NULL;
}

/* The first dead rank that no order is about to replace. */
static const struct cox_recovery_rank *first_lost(const struct cox_recovery *recovery)
{
    for (uint32_t rank = 0; rank < recovery->rank_count; rank++)
        if (recovery->ranks[rank].dead && !recovery->ranks[rank].ordered)
            return &recovery->ranks[rank];
    return NULL;
}

/* Returns true if an order exists, or is about to. */
static bool is_attended(const struct cox_recovery *recovery)
{
    bool attended = recovery->orders != NULL;
    for (uint32_t rank = 0; rank < recovery->rank_count; rank++)
        attended = attended || recovery->ranks[rank].ordered;
    return attended;
}

/* Whether another rank of the same node has died just now: a node that dies is one death. */
static bool is_of_dead_node(struct cox_recovery *recovery, const struct cox_recovery_rank *rank)
{
    char node[48], other[48];
    const uint64_t now = cox_now_ns();
    const uint32_t own = (uint32_t)(rank - recovery->ranks);
    if (!cox_executor_node(recovery->executor, own, node, sizeof node))
        return false;
    for (uint32_t i = 0; i < recovery->rank_count; i++)
        if (i != own && recovery->ranks[i].dead &&
            now - recovery->ranks[i].died_ns < NODE_DEATH_NS &&
            cox_executor_node(recovery->executor, i, other, sizeof other) &&
            strcmp(node, other) == 0)
            return true;
    return false;
}

void cox_recovery_died(struct cox_recovery *recovery, struct cox_recovery_rank *rank,
                       const char *text)
{
    /* If all are replaced together, ranks that die of each other count as one death. So do the
     * ranks of a node. */
    bool counts = !rank->expected && !(recovery->whole && cox_recovery_first_dead(recovery)) &&
                  !is_of_dead_node(recovery, rank);
    rank->dead = true;
    rank->died_ns = cox_now_ns();
    snprintf(rank->death, sizeof rank->death, "%s", text);
    if (counts) {
        death_count(recovery);
        cox_recovery_back_off(recovery, recovery->whole ? &recovery->all : &rank->backoff);
    }
    rank->expected = false;
}

/* ---- inside the executor ---- */

void cox_recovery_enter(struct cox_recovery *recovery)
{
    recovery->busy = true;
    pthread_mutex_unlock(&recovery->lock);
}

/* The statuses are current: a later death is reported by a hook, which finds the lock free. */
int cox_recovery_leave(struct cox_recovery *recovery, int r)
{
    struct cox_executor_status status;
    pthread_mutex_lock(&recovery->lock);
    cox_executor_read_status(recovery->executor, &status, recovery->statuses);
    recovery->busy = false;
    recovery->doing[0] = '\0';
    recovery->closing = recovery->closing || r == COX_CLOSED;
    pthread_cond_broadcast(&recovery->wake);
    return r;
}

/* The attempt to start a new process has ended. The executor's present state counts, since hooks
 * were ignored meanwhile. */
static void rank_restarted(struct cox_recovery *recovery, uint32_t number, int r)
{
    struct cox_recovery_rank *rank = &recovery->ranks[number];
    const struct cox_rank_status *status = &recovery->statuses[number];
    rank->dead = r != 0;
    rank->expected = false;
    if (r)
        return;
    recovery->unready = true;
    if (status->liveness == COX_LIVENESS_DEAD) {
        cox_recovery_died(recovery, rank, status->death);
        return;
    }
    rank->replaced = true;
    /* A node that was away may come back with its ranks alive. */
    snprintf(rank->news, sizeof rank->news,
             status->pid == rank->before && status->node[0]
                 ? "%s: its process %jd is there again (incarnation %" PRIu32 ")"
                 : "%s: replaced by process %jd (incarnation %" PRIu32 ")",
             rank->how, (intmax_t)status->pid, status->incarnation);
}

/* Records how it died, before the next incarnation overwrites that. */
static void rank_remember(struct cox_recovery *recovery, uint32_t number)
{
    struct cox_executor_status status;
    struct cox_recovery_rank *rank = &recovery->ranks[number];
    cox_executor_read_status(recovery->executor, &status, recovery->statuses);
    rank->before = recovery->statuses[number].pid;
    if (rank->dead)
        snprintf(rank->how, sizeof rank->how, "%s", recovery->statuses[number].death);
    else
        snprintf(rank->how, sizeof rank->how, "rank %" PRIu32 " was ended with the others", number);
}

int cox_recovery_replace(struct cox_recovery *recovery, uint32_t number, uint64_t deadline_ns,
                         struct cox_error *err)
{
    snprintf(recovery->doing, sizeof recovery->doing,
             recovery->options.external ? "waiting for rank %" PRIu32
                                          " to attach: coxswain-worker --socket %s"
                                        : "replacing rank %" PRIu32,
             number, cox_executor_name(recovery->executor));
    if (recovery->options.external)
        cox_log_write(&recovery->options.log, 4, "%s: %s", recovery->ranks[number].death,
                      recovery->doing);
    backoff_try(&recovery->ranks[number].backoff);
    rank_remember(recovery, number);
    cox_recovery_enter(recovery);
    int r = cox_executor_restart(recovery->executor, number, deadline_ns, err);
    cox_recovery_leave(recovery, r);
    rank_restarted(recovery, number, r);
    return r;
}

int cox_recovery_replace_all(struct cox_recovery *recovery, uint64_t deadline_ns,
                             struct cox_error *err)
{
    snprintf(recovery->doing, sizeof recovery->doing, "starting all ranks again");
    backoff_try(&recovery->all);
    for (uint32_t rank = 0; rank < recovery->rank_count; rank++)
        rank_remember(recovery, rank);
    for (uint32_t rank = 0; rank < recovery->rank_count; rank++) {
        if (!recovery->ranks[rank].dead)
            recovery->ranks[rank].died_ns = cox_now_ns();
        recovery->ranks[rank].dead = true;
    }
    cox_recovery_enter(recovery);
    int r = cox_executor_restart(recovery->executor, COX_RANK_ALL, deadline_ns, err);
    cox_recovery_leave(recovery, r);
    for (uint32_t rank = 0; rank < recovery->rank_count; rank++)
        recovery->ranks[rank].dead = false;
    for (uint32_t rank = 0; rank < recovery->rank_count; rank++)
        rank_restarted(recovery, rank, r);
    return r;
}

/* Every rank lives. Replays the init. Returns 0: they can run steps. */
int cox_recovery_replay(struct cox_recovery *recovery, uint64_t deadline_ns, struct cox_error *err)
{
    snprintf(recovery->doing, sizeof recovery->doing, "initializing the ranks again");
    backoff_try(&recovery->replay);
    cox_recovery_enter(recovery);
    int r = cox_executor_replay_init(recovery->executor, deadline_ns, err);
    if (r == 0 && recovery->options.replayed)
        r = recovery->options.replayed(recovery->options.context, deadline_ns, err);
    else if (r == COX_STATE) /* they were never initialized */
        r = 0;
    cox_recovery_leave(recovery, r);
    if (r)
        return r;
    recovery->unready = false;
    recovery->hangs = 0;
    recovery->changes++;
    uint64_t now = cox_now_ns();
    for (uint32_t i = 0; i < recovery->rank_count; i++) {
        struct cox_recovery_rank *rank = &recovery->ranks[i];
        if (rank->replaced) {
            cox_latency_add(&recovery->replacements, now - rank->died_ns);
            cox_log_write(&recovery->options.log, 5, "%s in %.0f ms", rank->news,
                          (double)(now - rank->died_ns) / (double)COX_NSEC_PER_MSEC);
        }
        rank->replaced = false;
    }
    return 0;
}

/* ---- the policy ---- */

static void fail(struct cox_recovery *recovery, const char *text)
{
    cox_fail(&recovery->failure, COX_PEER_DEAD, "%s", text);
    recovery->failed = true;
    pthread_cond_broadcast(&recovery->wake);
    pthread_mutex_unlock(&recovery->lock);
    if (recovery->options.failed)
        recovery->options.failed(recovery->options.context, &recovery->failure);
    pthread_mutex_lock(&recovery->lock);
}

/* A failure that another attempt would repeat. */
static bool is_final(int r)
{
    return r == COX_EXEC_FAILED || r == COX_UNSUPPORTED || r == COX_INVALID || r == COX_DIVERGED ||
           r == COX_VERSION;
}

/* A lack of resources (space in /dev/shm, memory, fds, processes), which others may release. No
 * rank has died of it. */
static bool is_want(int r)
{
    static const int wants[] = {COX_NO_SPACE, -ENOSPC, -EDQUOT, -ENOMEM, -EMFILE, -ENFILE, -EAGAIN};
    for (size_t i = 0; i < sizeof wants / sizeof wants[0]; i++)
        if (r == wants[i])
            return true;
    return false;
}

/* An attempt failed for lack of resources: it is repeated until one window, the policy's time, is
 * over. */
static void wanted(struct cox_recovery *recovery, struct cox_backoff *backoff,
                   const struct cox_error *err)
{
    char text[sizeof err->text + 96];
    const uint64_t now = cox_now_ns(),
                   window_ns = recovery->options.policy.window_ms * COX_NSEC_PER_MSEC;
    if (!recovery->want_ns) {
        recovery->want_ns = now;
        cox_log_write(&recovery->options.log, 4,
                      "the group is not recovered yet, and tried again for %g s: %s",
                      (double)recovery->options.policy.window_ms / 1000, err->text);
    }
    recovery->last = *err;
    cox_recovery_back_off(recovery, backoff);
    if (now - recovery->want_ns < window_ns)
        return;
    snprintf(text, sizeof text,
             "the group cannot be recovered: what it needs was not there for %g s: %s",
             (double)(now - recovery->want_ns) / (double)COX_NSEC_PER_SEC, err->text);
    fail(recovery, text);
}

/* An attempt of the policy has ended with r, for the reason in err. */
static void tried(struct cox_recovery *recovery, struct cox_backoff *backoff, int r,
                  const struct cox_error *err)
{
    char text[sizeof err->text + 64];
    if (r && is_want(r)) {
        wanted(recovery, backoff, err);
        return;
    }
    recovery->want_ns = 0;
    if (r == 0 || r == COX_CLOSED)
        return;
    if (is_final(r)) {
        snprintf(text, sizeof text, "the group cannot be recovered: %s", err->text);
        fail(recovery, text);
        return;
    }
    cox_log_write(&recovery->options.log, 4, "the group is not recovered yet: %s", err->text);
    death_count(recovery);
    recovery->hangs = r == COX_TIMEOUT ? recovery->hangs + 1 : 0;
    cox_recovery_back_off(recovery, backoff);
    for (uint32_t rank = 0; rank < recovery->rank_count; rank++)
        if (&recovery->ranks[rank].backoff == backoff)
            snprintf(recovery->ranks[rank].death, sizeof recovery->ranks[rank].death, "%s",
                     err->text);
    recovery->last = *err;
}

static bool acts(const struct cox_recovery *recovery)
{
    return recovery->options.policy.on_death == COX_ON_DEATH_RESTART ||
           recovery->options.policy.on_death == COX_ON_DEATH_RESTART_ALL;
}

/* Attempts that hang take too long for many of them to fit one window. */
static bool is_exhausted(const struct cox_recovery *recovery)
{
    uint32_t restart_max = recovery->options.policy.restart_max;
    return cox_recovery_recent_deaths(recovery) > restart_max || recovery->hangs > restart_max;
}

static void fail_exhausted(struct cox_recovery *recovery)
{
    const struct cox_recovery_options *options = &recovery->options;
    const struct cox_recovery_rank *last = NULL;
    char text[1400];
    for (uint32_t i = 0; i < recovery->rank_count; i++)
        if (recovery->ranks[i].dead && (!last || recovery->ranks[i].died_ns > last->died_ns))
            last = &recovery->ranks[i];
    uint32_t tries = recovery->whole ? recovery->all.tries
                     : last          ? last->backoff.tries
                                     : recovery->replay.tries;
    if (cox_recovery_recent_deaths(recovery) <= options->policy.restart_max)
        snprintf(text, sizeof text,
                 "%" PRIu32
                 " tries in a row did not end within %g s, which are more than the %" PRIu32
                 " that are made: %s",
                 recovery->hangs, (double)options->restart_ms / 1000, options->policy.restart_max,
                 recovery->last.text);
    else
        snprintf(text, sizeof text,
                 "%" PRIu32 " deaths within %g s are more than the %" PRIu32
                 " that are made good; after %" PRIu32 " tr%s: %s",
                 cox_recovery_recent_deaths(recovery), (double)options->policy.window_ms / 1000,
                 options->policy.restart_max, tries, tries == 1 ? "y" : "ies",
                 last ? last->death : recovery->last.text);
    fail(recovery, text);
}

static void replace_due(struct cox_recovery *recovery)
{
    uint64_t restart_ms = recovery->options.restart_ms, now = cox_now_ns();
    for (uint32_t i = 0; i < recovery->rank_count; i++) {
        struct cox_recovery_rank *rank = &recovery->ranks[i];
        struct cox_error error = {0};
        if (!rank->dead || rank->backoff.due_ns > now || recovery->stopped || recovery->failed)
            continue;
        uint64_t deadline_ns =
            recovery->options.external ? COX_DEADLINE_NEVER : cox_deadline_after_ms(restart_ms);
        int r = cox_recovery_replace(recovery, i, deadline_ns, &error);
        tried(recovery, &rank->backoff, r, &error);
    }
}

static void replace_all(struct cox_recovery *recovery)
{
    struct cox_error error = {0};
    uint64_t deadline_ns = recovery->options.external
                               ? COX_DEADLINE_NEVER
                               : cox_deadline_after_ms(recovery->options.restart_ms);
    int r = cox_recovery_replace_all(recovery, deadline_ns, &error);
    tried(recovery, &recovery->all, r, &error);
}

/* A rank that has not replied to an init in time lives, and nothing else would end it: it is
 * replaced. While a new rank is late, the others may be late because they wait for it. */
static void kill_late(struct cox_recovery *recovery)
{
    struct cox_executor_status status;
    cox_executor_read_status(recovery->executor, &status, recovery->statuses);
    const struct cox_rank_set *late = &status.channels[COX_CHANNEL_EXECUTE].late;
    bool new_ones = false;
    for (uint32_t i = 0; i < recovery->rank_count; i++)
        new_ones = new_ones || (cox_rank_set_has(late, i) && recovery->ranks[i].replaced);
    for (uint32_t i = 0; i < recovery->rank_count; i++) {
        struct cox_recovery_rank *rank = &recovery->ranks[i];
        if (!cox_rank_set_has(late, i) || rank->dead || (new_ones && !rank->replaced))
            continue;
        cox_log_write(&recovery->options.log, 4,
                      "rank %" PRIu32 " (pid %jd) lives, but has not replied in time: it is killed",
                      i, (intmax_t)recovery->statuses[i].pid);
        rank->expected = cox_executor_kill(recovery->executor, i, NULL) == 0;
    }
}

static void replay_turn(struct cox_recovery *recovery)
{
    struct cox_error error = {0};
    int r =
        cox_recovery_replay(recovery, cox_deadline_after_ms(recovery->options.restart_ms), &error);
    if (r == COX_PEER_DEAD) { /* its death counts separately */
        recovery->check = true;
        cox_recovery_back_off(recovery, &recovery->replay);
    } else {
        tried(recovery, &recovery->replay, r, &error);
    }
    if (r == COX_TIMEOUT && !is_exhausted(recovery))
        kill_late(recovery);
}

uint64_t cox_recovery_turn_due(struct cox_recovery *recovery)
{
    uint64_t due_ns = COX_DEADLINE_NEVER;
    const struct cox_recovery_rank *dead = cox_recovery_first_dead(recovery);
    if (recovery->failed || recovery->closing)
        return due_ns;
    if (dead && cox_executor_taken_over(recovery->executor, NULL))
        return 0;
    /* Also if an order has replaced a rank, and the ranks cannot be initialized. */
    if (recovery->options.policy.on_death == COX_ON_DEATH_FAIL)
        return first_lost(recovery) || (recovery->unready && !dead && !is_attended(recovery))
                   ? 0
                   : due_ns;
    if (!acts(recovery))
        return due_ns;
    if (is_exhausted(recovery) && (dead || recovery->unready))
        return 0;
    if (!dead)
        return recovery->unready ? recovery->replay.due_ns : due_ns;
    if (recovery->whole)
        return recovery->all.due_ns;
    for (uint32_t i = 0; i < recovery->rank_count; i++)
        if (recovery->ranks[i].dead)
            due_ns = cox_deadline_min(due_ns, recovery->ranks[i].backoff.due_ns);
    return due_ns;
}

void cox_recovery_turn(struct cox_recovery *recovery)
{
    const struct cox_recovery_rank *dead = cox_recovery_first_dead(recovery);
    struct cox_error taken = {0};
    if (dead && cox_executor_taken_over(recovery->executor, &taken))
        fail(recovery, taken.text);
    else if (recovery->options.policy.on_death == COX_ON_DEATH_FAIL)
        fail(recovery, first_lost(recovery) ? first_lost(recovery)->death : recovery->last.text);
    else if (is_exhausted(recovery))
        fail_exhausted(recovery);
    else if (dead && recovery->whole)
        replace_all(recovery);
    else if (dead)
        replace_due(recovery);
    else
        replay_turn(recovery);
}

/* A rank that has left the group counts as dead, but its process lives, and no death is reported.
 */
void cox_recovery_check(struct cox_recovery *recovery)
{
    recovery->check = false;
    cox_recovery_enter(recovery);
    cox_recovery_leave(recovery, 0);
    for (uint32_t i = 0; i < recovery->rank_count; i++) {
        if (recovery->statuses[i].liveness != COX_LIVENESS_LEFT || recovery->ranks[i].dead)
            continue;
        if (acts(recovery)) /* its death is then reported */
            cox_executor_kill(recovery->executor, i, NULL);
        else
            cox_recovery_died(recovery, &recovery->ranks[i], recovery->statuses[i].death);
    }
}
