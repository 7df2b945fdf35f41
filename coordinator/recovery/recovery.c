#include "recovery.h"

#include "channel/base/thread.h"
#include "coordinator/executor/core.h"
#include "recovery_internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RESTART_MAX_DEFAULT 5
#define WINDOW_MS_DEFAULT 60000
#define BACKOFF_MIN_MS_DEFAULT 100
#define BACKOFF_MAX_MS_DEFAULT 5000
#define RESTART_MS_DEFAULT 60000
/* How long to wait for the hook: waiters for a dead rank know of the death a little earlier. */
#define NEWS_MS 5000

const char *cox_on_death_name(uint32_t on_death)
{
    static const char *const names[] = {"fail", "wait", "restart", "restart-all"};
    return on_death < COX_ON_DEATH_COUNT ? names[on_death] : "unknown";
}

void cox_recovery_death(struct cox_recovery *recovery, uint32_t rank, const char *text)
{
    pthread_mutex_lock(&recovery->lock);
    /* While a replacement is tried, the attempt reports. */
    if (!recovery->ranks[rank].dead)
        cox_recovery_died(recovery, &recovery->ranks[rank], text);
    pthread_cond_broadcast(&recovery->wake);
    pthread_mutex_unlock(&recovery->lock);
}

/* ---- the thread ---- */

static void *recovery_main(void *context)
{
    struct cox_recovery *recovery = context;
    bool turned = false;
    pthread_mutex_lock(&recovery->lock);
    while (!recovery->stopped) {
        uint64_t due_ns = cox_recovery_turn_due(recovery);
        const struct timespec until = cox_deadline_timespec(due_ns);
        /* A turn without success can be due again at once; it is skipped while an order waits. */
        bool skips = turned && recovery->orders;
        turned = false;
        if (due_ns <= cox_now_ns() && !skips) {
            cox_recovery_turn(recovery);
            turned = true;
        } else if (recovery->check) {
            cox_recovery_check(recovery);
        } else if (recovery->orders) {
            cox_recovery_order_run(recovery, recovery->orders);
        } else if (due_ns == COX_DEADLINE_NEVER) {
            pthread_cond_wait(&recovery->wake, &recovery->lock);
        } else {
            pthread_cond_timedwait(&recovery->wake, &recovery->lock, &until);
        }
    }
    pthread_mutex_unlock(&recovery->lock);
    return NULL;
}

/* ---- constructor and destructor ---- */

static void options_complete(struct cox_recovery_options *options)
{
    if (!options->policy.restart_max)
        options->policy.restart_max = RESTART_MAX_DEFAULT;
    if (!options->policy.window_ms)
        options->policy.window_ms = WINDOW_MS_DEFAULT;
    if (!options->policy.backoff_min_ms)
        options->policy.backoff_min_ms = BACKOFF_MIN_MS_DEFAULT;
    if (!options->policy.backoff_max_ms)
        options->policy.backoff_max_ms = BACKOFF_MAX_MS_DEFAULT;
    if (options->policy.backoff_max_ms < options->policy.backoff_min_ms)
        options->policy.backoff_max_ms = options->policy.backoff_min_ms;
    if (!options->restart_ms)
        options->restart_ms = RESTART_MS_DEFAULT;
}

static void recovery_destroy(struct cox_recovery *recovery)
{
    pthread_cond_destroy(&recovery->wake);
    pthread_mutex_destroy(&recovery->lock);
    free(recovery->statuses);
    free(recovery->ranks);
    free(recovery->deaths);
    free(recovery);
}

int cox_recovery_start(struct cox_executor *executor, const struct cox_recovery_options *options,
                       struct cox_recovery **ret_recovery, struct cox_error *err)
{
    struct cox_recovery *recovery = calloc(1, sizeof *recovery);
    if (!recovery)
        return cox_fail(err, -ENOMEM, "no memory for recovery");
    recovery->executor = executor;
    recovery->options = *options;
    options_complete(&recovery->options);
    recovery->rank_count = cox_executor_rank_count(executor);
    recovery->whole = options->policy.on_death == COX_ON_DEATH_RESTART_ALL ||
                      !cox_executor_limits(executor)->replaces_one;
    cox_condition_init(&recovery->wake);
    pthread_mutex_init(&recovery->lock, NULL);
    recovery->statuses = calloc(recovery->rank_count, sizeof *recovery->statuses);
    recovery->ranks = calloc(recovery->rank_count, sizeof *recovery->ranks);
    recovery->deaths =
        calloc((size_t)recovery->options.policy.restart_max + 1, sizeof *recovery->deaths);
    int r = recovery->statuses && recovery->ranks && recovery->deaths ? 0 : -ENOMEM;
    if (!r)
        r = cox_thread_start(&recovery->thread, recovery_main, recovery);
    if (r) {
        recovery_destroy(recovery);
        return cox_fail(err, r, "recovery: %s", cox_status_text(r));
    }
    if (options->policy.on_death == COX_ON_DEATH_RESTART && recovery->whole)
        cox_log_write(
            &options->log, 4,
            "legacy workers take no new one among them: a death starts all of them again");
    *ret_recovery = recovery;
    return 0;
}

void cox_recovery_stop(struct cox_recovery *recovery)
{
    pthread_mutex_lock(&recovery->lock);
    recovery->stopped = true;
    pthread_cond_broadcast(&recovery->wake);
    pthread_mutex_unlock(&recovery->lock);
    if (!recovery->joined)
        pthread_join(recovery->thread, NULL);
    recovery->joined = true;
}

struct cox_recovery *cox_recovery_free(struct cox_recovery *recovery)
{
    if (recovery) {
        cox_recovery_stop(recovery);
        recovery_destroy(recovery);
    }
    return NULL;
}

/* ---- how it is ---- */

static void describe(struct cox_recovery *recovery, char *text, size_t size)
{
    const struct cox_recovery_rank *dead = cox_recovery_first_dead(recovery);
    uint64_t due_ns = cox_recovery_turn_due(recovery), now = cox_now_ns();
    if (recovery->doing[0] && recovery->want_ns)
        snprintf(text, size, "%s; before: %.*s", recovery->doing,
                 (int)(size - strlen(recovery->doing)) - 16, recovery->last.text);
    else if (recovery->doing[0])
        snprintf(text, size, "%s", recovery->doing);
    else if (recovery->failed)
        snprintf(text, size, "the group has failed");
    else if (recovery->want_ns)
        snprintf(text, size, "waiting for what a replacement needs: %.*s", (int)size - 40,
                 recovery->last.text);
    else if (due_ns != COX_DEADLINE_NEVER && due_ns > now)
        snprintf(text, size, "pausing %" PRIu64 " ms before the next try",
                 (due_ns - now) / COX_NSEC_PER_MSEC + 1);
    else if (dead && recovery->options.policy.on_death == COX_ON_DEATH_WAIT)
        snprintf(text, size, "waiting for an order: coxswain recover restart --rank %td",
                 dead - recovery->ranks);
    else if (recovery->unready && recovery->options.policy.on_death == COX_ON_DEATH_WAIT)
        snprintf(text, size, "waiting for an order: coxswain recover restart");
    else if (recovery->partially_paused)
        snprintf(text, size,
                 "a pause has failed and some ranks are paused: coxswain recover start, or pause");
}

/* ---- for the engine loop ---- */

static bool is_ended(const struct cox_recovery *recovery)
{
    return recovery->stopped || recovery->cancelled || recovery->closing || recovery->failed;
}

static bool is_disturbed(struct cox_recovery *recovery)
{
    return recovery->busy || recovery->paused_ns || recovery->unready ||
           cox_recovery_first_dead(recovery);
}

/* A death was seen, but its hook may not have run yet, or never will, since the rank has left. */
static void await_news(struct cox_recovery *recovery, uint64_t deadline_ns)
{
    const struct timespec until =
        cox_deadline_timespec(cox_deadline_min(deadline_ns, cox_deadline_after_ms(NEWS_MS)));
    int r = 0;
    recovery->check = true;
    pthread_cond_broadcast(&recovery->wake);
    while (!is_ended(recovery) && !cox_recovery_first_dead(recovery) &&
           recovery->changes == recovery->changes_seen && r != ETIMEDOUT)
        r = pthread_cond_timedwait(&recovery->wake, &recovery->lock, &until);
}

int cox_recovery_await(struct cox_recovery *recovery, uint64_t deadline_ns, struct cox_error *err)
{
    const struct timespec until = cox_deadline_timespec(deadline_ns);
    int e = 0;
    pthread_mutex_lock(&recovery->lock);
    if (err->code == COX_PEER_DEAD && recovery->changes == recovery->changes_seen)
        await_news(recovery, deadline_ns);
    while (!is_ended(recovery) && is_disturbed(recovery) && e != ETIMEDOUT)
        e = deadline_ns == COX_DEADLINE_NEVER
                ? pthread_cond_wait(&recovery->wake, &recovery->lock)
                : pthread_cond_timedwait(&recovery->wake, &recovery->lock, &until);
    if (!is_ended(recovery) && is_disturbed(recovery)) {
        *err = (struct cox_error){.code = COX_TIMEOUT};
        describe(recovery, err->text, sizeof err->text);
        pthread_mutex_unlock(&recovery->lock);
        return COX_TIMEOUT;
    }
    int r = recovery->changes != recovery->changes_seen ? COX_STALE : 0;
    recovery->changes_seen = recovery->changes;
    if (recovery->stopped || recovery->cancelled || recovery->closing)
        *err = (struct cox_error){.code = r = COX_CLOSED, .text = "stopped"};
    else if (recovery->failed) {
        r = COX_PEER_DEAD;
        /* The caller's text has more details than the death alone. */
        if (err->code != r || recovery->options.policy.on_death != COX_ON_DEATH_FAIL)
            *err = recovery->failure;
    }
    pthread_mutex_unlock(&recovery->lock);
    return r;
}

void cox_recovery_cancel(struct cox_recovery *recovery)
{
    pthread_mutex_lock(&recovery->lock);
    recovery->cancelled = true;
    pthread_cond_broadcast(&recovery->wake);
    pthread_mutex_unlock(&recovery->lock);
}

void cox_recovery_status(struct cox_recovery *recovery, struct cox_recovery_status *ret_status)
{
    pthread_mutex_lock(&recovery->lock);
    *ret_status = (struct cox_recovery_status){
        .on_death = recovery->options.policy.on_death,
        .recent_deaths = cox_recovery_recent_deaths(recovery),
        .restart_max = recovery->options.policy.restart_max,
        .unready = recovery->unready,
    };
    describe(recovery, ret_status->doing, sizeof ret_status->doing);
    cox_latency_read(&recovery->replacements, &ret_status->replacements);
    pthread_mutex_unlock(&recovery->lock);
}
