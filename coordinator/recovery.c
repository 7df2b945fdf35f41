#include "recovery.h"

#include "../channel/thread.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RESTART_MAX_DEFAULT 5
#define WINDOW_MS_DEFAULT 60000
#define BACKOFF_MIN_MS_DEFAULT 100
#define BACKOFF_MAX_MS_DEFAULT 5000
#define RESTART_MS_DEFAULT 60000
/* Whoever waits for a dead rank knows of the death a little before the hook is called. */
#define NEWS_MS 5000

/* Tries of one thing, and when the next one is due. */
struct backoff {
    uint32_t tries; /* since it last went well for a window */
    uint64_t tried_ns;
    uint64_t due_ns;
};

struct rank {
    bool dead;     /* by its hook; during a try of a new one, too */
    bool expected; /* it was killed by order, or for being late, which counts by itself */
    bool ordered;  /* whoever ordered it replaced is still there, and sees to its death */
    bool replaced; /* and that is to be said once it is initialized */
    uint64_t died_ns;
    struct backoff backoff;
    char death[1024]; /* as the hook told it, with its last lines */
    char how[512];    /* without */
    char news[768];   /* replaced: by what */
};

/* On its caller's stack. */
struct order {
    struct order *next;
    bool is_restart;
    enum cox_recover_command command;
    struct cox_recover_result *results;
    uint32_t rank;
    bool kill;
    pid_t killed; /* before its turn; 0: not */
    bool replaced;
    uint64_t deadline_ns;
    bool started, done;
    int status;
    struct cox_error error;
};

struct cox_recovery {
    struct cox_executor *executor;
    struct cox_recovery_options options;
    uint32_t rank_count;
    bool whole; /* a rank is not replaced alone */
    pthread_t thread;
    bool joined;
    struct cox_rank_status *statuses; /* the thread's */

    pthread_mutex_t lock; /* everything below; not held over anything that waits */
    pthread_cond_t wake;  /* anything below has changed */
    bool stopped;
    bool cancelled;
    bool closing; /* the executor stops */
    bool failed;
    struct cox_error failure;
    struct cox_error last; /* of the tries that came to nothing */
    bool look;             /* somebody knows of a death that was not told */
    bool busy;             /* the thread is inside the executor */
    bool paused;           /* the engine is, by a command; or some ranks are */
    bool half_paused;      /* and only some */
    bool unready;          /* a rank was replaced, and init not replayed since */
    uint64_t changes,
        changes_seen; /* times that the group was not as before, and of those await has told */
    char doing[160];
    struct order *orders;
    struct rank *ranks;
    struct backoff all, replay;
    uint32_t hangs;   /* tries of the policy in a row that ended at their deadline */
    uint64_t *deaths; /* when: the last restart_max + 1 of them, a ring */
    uint64_t death_count;
};

const char *cox_on_death_name(uint32_t on_death)
{
    static const char *const names[] = {"fail", "wait", "restart", "restart-all"};
    return on_death < COX_ON_DEATH_COUNT ? names[on_death] : "unknown";
}

/* ---- back-off and limit, with the lock held ---- */

static void backoff_try(struct backoff *backoff)
{
    backoff->tries++;
    backoff->tried_ns = cox_now_ns();
}

/* It has failed, or what it made is dead: when may it be tried again? */
static void backoff_fail(const struct cox_recovery *recovery, struct backoff *backoff)
{
    const struct cox_recovery_options *options = &recovery->options;
    uint64_t now = cox_now_ns(), pause_ms = options->backoff_min_ms;
    if (now - backoff->tried_ns >= options->window_ms * COX_NSEC_PER_MSEC)
        backoff->tries = 0;
    for (uint32_t k = 1; k < backoff->tries && pause_ms < options->backoff_max_ms; k++)
        pause_ms *= 2;
    if (pause_ms > options->backoff_max_ms)
        pause_ms = options->backoff_max_ms;
    backoff->due_ns = backoff->tries ? now + pause_ms * COX_NSEC_PER_MSEC : now;
}

static void death_count(struct cox_recovery *recovery)
{
    recovery->deaths[recovery->death_count++ % (recovery->options.restart_max + 1)] = cox_now_ns();
}

/* Within the window; more than restart_max are one more. */
static uint32_t recent_deaths(const struct cox_recovery *recovery)
{
    uint64_t now = cox_now_ns(), window_ns = recovery->options.window_ms * COX_NSEC_PER_MSEC;
    uint32_t count = 0;
    for (uint32_t i = 0; i <= recovery->options.restart_max && i < recovery->death_count; i++)
        count += now - recovery->deaths[i] < window_ns;
    return count;
}

static struct rank *first_dead(struct cox_recovery *recovery)
{
    for (uint32_t rank = 0; rank < recovery->rank_count; rank++)
        if (recovery->ranks[rank].dead)
            return &recovery->ranks[rank];
    return NULL;
}

/* Whom nobody's order is about to make good. */
static const struct rank *first_lost(const struct cox_recovery *recovery)
{
    for (uint32_t rank = 0; rank < recovery->rank_count; rank++)
        if (recovery->ranks[rank].dead && !recovery->ranks[rank].ordered)
            return &recovery->ranks[rank];
    return NULL;
}

/* Somebody has ordered something, or is about to. */
static bool is_attended(const struct cox_recovery *recovery)
{
    bool attended = recovery->orders != NULL;
    for (uint32_t rank = 0; rank < recovery->rank_count; rank++)
        attended = attended || recovery->ranks[rank].ordered;
    return attended;
}

static void rank_died(struct cox_recovery *recovery, struct rank *rank, const char *text)
{
    /* Where all are replaced together, those that die of each other are one death. */
    bool counts = !rank->expected && !(recovery->whole && first_dead(recovery));
    rank->dead = true;
    rank->died_ns = cox_now_ns();
    snprintf(rank->death, sizeof rank->death, "%s", text);
    if (counts) {
        death_count(recovery);
        backoff_fail(recovery, recovery->whole ? &recovery->all : &rank->backoff);
    }
    rank->expected = false;
}

void cox_recovery_death(struct cox_recovery *recovery, uint32_t rank, const char *text)
{
    pthread_mutex_lock(&recovery->lock);
    /* While a new one is tried, the try tells. */
    if (!recovery->ranks[rank].dead)
        rank_died(recovery, &recovery->ranks[rank], text);
    pthread_cond_broadcast(&recovery->wake);
    pthread_mutex_unlock(&recovery->lock);
}

/* ---- inside the executor: on the thread, the lock is held except over the call ---- */

static void enter(struct cox_recovery *recovery)
{
    recovery->busy = true;
    pthread_mutex_unlock(&recovery->lock);
}

/* statuses are of this moment: a death that they do not tell is told by a hook that finds the lock free. */
static int leave(struct cox_recovery *recovery, int r)
{
    struct cox_executor_status status;
    pthread_mutex_lock(&recovery->lock);
    cox_executor_status(recovery->executor, &status, recovery->statuses);
    recovery->busy = false;
    recovery->doing[0] = '\0';
    recovery->closing = recovery->closing || r == COX_CLOSED;
    pthread_cond_broadcast(&recovery->wake);
    return r;
}

/* The try of a new process has ended: what is known of the rank is what the executor knows now, since the hook was not
 * listened to. */
static void rank_settle(struct cox_recovery *recovery, uint32_t number, int r)
{
    struct rank *rank = &recovery->ranks[number];
    const struct cox_rank_status *status = &recovery->statuses[number];
    rank->dead = r != 0;
    rank->expected = false;
    if (r)
        return;
    recovery->unready = true;
    if (status->life == COX_LIFE_DEAD) {
        rank_died(recovery, rank, status->death);
        return;
    }
    rank->replaced = true;
    snprintf(rank->news, sizeof rank->news, "%s: replaced by process %jd (generation %" PRIu32 ")",
             rank->how, (intmax_t)status->pid, status->generation);
}

/* How it died, before the next life makes that unknown. */
static void rank_remember(struct cox_recovery *recovery, uint32_t number)
{
    struct cox_executor_status status;
    struct rank *rank = &recovery->ranks[number];
    cox_executor_status(recovery->executor, &status, recovery->statuses);
    if (rank->dead)
        snprintf(rank->how, sizeof rank->how, "%s", recovery->statuses[number].death);
    else
        snprintf(rank->how, sizeof rank->how, "rank %" PRIu32 " was ended with the others", number);
}

static int rank_replace(struct cox_recovery *recovery, uint32_t number, uint64_t deadline_ns,
                        struct cox_error *err)
{
    snprintf(recovery->doing, sizeof recovery->doing,
             recovery->options.external ? "waiting for rank %" PRIu32
                                          " to log on: coxswain-worker --door %s"
                                        : "replacing rank %" PRIu32,
             number, cox_executor_name(recovery->executor));
    if (recovery->options.external)
        cox_log_write(&recovery->options.log, 4, "%s: %s", recovery->ranks[number].death,
                      recovery->doing);
    backoff_try(&recovery->ranks[number].backoff);
    rank_remember(recovery, number);
    enter(recovery);
    int r = cox_executor_restart(recovery->executor, number, deadline_ns, err);
    leave(recovery, r);
    rank_settle(recovery, number, r);
    return r;
}

static int all_replace(struct cox_recovery *recovery, uint64_t deadline_ns, struct cox_error *err)
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
    enter(recovery);
    int r = cox_executor_restart_all(recovery->executor, deadline_ns, err);
    leave(recovery, r);
    for (uint32_t rank = 0; rank < recovery->rank_count; rank++)
        recovery->ranks[rank].dead = false;
    for (uint32_t rank = 0; rank < recovery->rank_count; rank++)
        rank_settle(recovery, rank, r);
    return r;
}

/* Every rank lives. Returns 0: they can run steps. */
static int init_replay(struct cox_recovery *recovery, uint64_t deadline_ns, struct cox_error *err)
{
    snprintf(recovery->doing, sizeof recovery->doing, "initializing the ranks again");
    backoff_try(&recovery->replay);
    enter(recovery);
    int r = cox_executor_replay_init(recovery->executor, deadline_ns, err);
    if (r == 0 && recovery->options.replayed)
        r = recovery->options.replayed(recovery->options.context, deadline_ns, err);
    else if (r == COX_STATE) /* they were never initialized */
        r = 0;
    leave(recovery, r);
    if (r)
        return r;
    recovery->unready = false;
    recovery->hangs = 0;
    recovery->changes++;
    uint64_t now = cox_now_ns();
    for (uint32_t i = 0; i < recovery->rank_count; i++) {
        struct rank *rank = &recovery->ranks[i];
        if (rank->replaced)
            cox_log_write(&recovery->options.log, 5, "%s in %.0f ms", rank->news,
                          (double)(now - rank->died_ns) / (double)COX_NSEC_PER_MSEC);
        rank->replaced = false;
    }
    return 0;
}

/* ---- the policy, on the thread, with the lock held ---- */

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

/* A failure that another try would meet as well. */
static bool is_final(int r)
{
    return r == COX_EXEC_FAILED || r == COX_UNSUPPORTED || r == COX_INVALID || r == COX_DIVERGED ||
           r == COX_VERSION;
}

/* A try of the policy has come to r, for the reason in err. */
static void tried(struct cox_recovery *recovery, struct backoff *backoff, int r,
                  const struct cox_error *err)
{
    char text[sizeof err->text + 64];
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
    backoff_fail(recovery, backoff);
    for (uint32_t rank = 0; rank < recovery->rank_count; rank++)
        if (&recovery->ranks[rank].backoff == backoff)
            snprintf(recovery->ranks[rank].death, sizeof recovery->ranks[rank].death, "%s",
                     err->text);
    recovery->last = *err;
}

static bool acts(const struct cox_recovery *recovery)
{
    return recovery->options.on_death == COX_ON_DEATH_RESTART ||
           recovery->options.on_death == COX_ON_DEATH_RESTART_ALL;
}

/* Tries that hang last too long for many of them to be in one window. */
static bool is_exhausted(const struct cox_recovery *recovery)
{
    uint32_t restart_max = recovery->options.restart_max;
    return recent_deaths(recovery) > restart_max || recovery->hangs > restart_max;
}

static void fail_exhausted(struct cox_recovery *recovery)
{
    const struct cox_recovery_options *options = &recovery->options;
    const struct rank *last = NULL;
    char text[1400];
    for (uint32_t i = 0; i < recovery->rank_count; i++)
        if (recovery->ranks[i].dead && (!last || recovery->ranks[i].died_ns > last->died_ns))
            last = &recovery->ranks[i];
    uint32_t tries = recovery->whole ? recovery->all.tries
                     : last          ? last->backoff.tries
                                     : recovery->replay.tries;
    if (recent_deaths(recovery) <= options->restart_max)
        snprintf(text, sizeof text,
                 "%" PRIu32
                 " tries in a row did not end within %g s, which are more than the %" PRIu32
                 " that are made: %s",
                 recovery->hangs, (double)options->restart_ms / 1000, options->restart_max,
                 recovery->last.text);
    else
        snprintf(text, sizeof text,
                 "%" PRIu32 " deaths within %g s are more than the %" PRIu32
                 " that are made good; after %" PRIu32 " tr%s: %s",
                 recent_deaths(recovery), (double)options->window_ms / 1000, options->restart_max,
                 tries, tries == 1 ? "y" : "ies", last ? last->death : recovery->last.text);
    fail(recovery, text);
}

static void replace_due(struct cox_recovery *recovery)
{
    uint64_t restart_ms = recovery->options.restart_ms, now = cox_now_ns();
    for (uint32_t i = 0; i < recovery->rank_count; i++) {
        struct rank *rank = &recovery->ranks[i];
        struct cox_error error = {0};
        if (!rank->dead || rank->backoff.due_ns > now || recovery->stopped || recovery->failed)
            continue;
        uint64_t deadline_ns =
            recovery->options.external ? COX_DEADLINE_NEVER : cox_deadline_after_ms(restart_ms);
        int r = rank_replace(recovery, i, deadline_ns, &error);
        tried(recovery, &rank->backoff, r, &error);
    }
}

static void replace_all(struct cox_recovery *recovery)
{
    struct cox_error error = {0};
    uint64_t deadline_ns = recovery->options.external
                               ? COX_DEADLINE_NEVER
                               : cox_deadline_after_ms(recovery->options.restart_ms);
    int r = all_replace(recovery, deadline_ns, &error);
    tried(recovery, &recovery->all, r, &error);
}

/* Whoever has not answered an init in time lives, and nothing else would ever end it: it is replaced in its turn. While a new
 * one is late, those that were there before may be so because they wait for it. */
static void kill_late(struct cox_recovery *recovery)
{
    struct cox_executor_status status;
    cox_executor_status(recovery->executor, &status, recovery->statuses);
    const struct cox_rank_set *late = &status.channels[COX_CHANNEL_EXECUTE].late;
    bool new_ones = false;
    for (uint32_t i = 0; i < recovery->rank_count; i++)
        new_ones = new_ones || (cox_rank_set_has(late, i) && recovery->ranks[i].replaced);
    for (uint32_t i = 0; i < recovery->rank_count; i++) {
        struct rank *rank = &recovery->ranks[i];
        if (!cox_rank_set_has(late, i) || rank->dead || (new_ones && !rank->replaced))
            continue;
        cox_log_write(&recovery->options.log, 4,
                      "rank %" PRIu32
                      " (pid %jd) lives, but has not answered in time: it is killed",
                      i, (intmax_t)recovery->statuses[i].pid);
        rank->expected = cox_executor_kill(recovery->executor, i, NULL) == 0;
    }
}

static void replay_turn(struct cox_recovery *recovery)
{
    struct cox_error error = {0};
    int r = init_replay(recovery, cox_deadline_after_ms(recovery->options.restart_ms), &error);
    if (r == COX_PEER_DEAD) { /* whose death is counted by itself */
        recovery->look = true;
        backoff_fail(recovery, &recovery->replay);
    } else {
        tried(recovery, &recovery->replay, r, &error);
    }
    if (r == COX_TIMEOUT && !is_exhausted(recovery))
        kill_late(recovery);
}

/* When the policy has something to do: 0: now; COX_DEADLINE_NEVER: nothing. */
static uint64_t turn_due(struct cox_recovery *recovery)
{
    uint64_t due_ns = COX_DEADLINE_NEVER;
    const struct rank *dead = first_dead(recovery);
    if (recovery->failed || recovery->closing)
        return due_ns;
    /* Also when an order has replaced a rank, and the ranks cannot be initialized. */
    if (recovery->options.on_death == COX_ON_DEATH_FAIL)
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

static void turn(struct cox_recovery *recovery)
{
    const struct rank *dead = first_dead(recovery);
    if (recovery->options.on_death == COX_ON_DEATH_FAIL)
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

/* A rank that has left the group is as good as dead, but its process lives, and nothing is told. */
static void look(struct cox_recovery *recovery)
{
    recovery->look = false;
    enter(recovery);
    leave(recovery, 0);
    for (uint32_t i = 0; i < recovery->rank_count; i++) {
        if (recovery->statuses[i].life != COX_LIFE_LEFT || recovery->ranks[i].dead)
            continue;
        if (acts(recovery)) /* and then its death is told */
            cox_executor_kill(recovery->executor, i, NULL);
        else
            rank_died(recovery, &recovery->ranks[i], recovery->statuses[i].death);
    }
}

/* ---- orders, on the thread, with the lock held ---- */

/* unready: no rank is dead, and the init that makes the state NORMAL is due; a start has nothing to add to it. */
static bool is_done_already(enum cox_recover_command command, enum cox_engine_state state,
                            bool unready)
{
    switch (command) {
    case COX_RECOVER_PAUSE:
    case COX_RECOVER_PAUSE_NET:
        return state == COX_ENGINE_PAUSE;
    case COX_RECOVER_REINIT:
        return state == COX_ENGINE_READY;
    case COX_RECOVER_START:
        return state == COX_ENGINE_NORMAL || state == COX_ENGINE_BUSY ||
               (state == COX_ENGINE_ABNORMAL && unready);
    default:
        return false;
    }
}

static void order_command(struct cox_recovery *recovery, struct order *order)
{
    snprintf(recovery->doing, sizeof recovery->doing, "carrying out %s",
             cox_recover_command_name(order->command));
    const bool unready = recovery->unready && !first_dead(recovery);
    enter(recovery);
    int r = 0;
    bool half_paused = cox_executor_half_paused(recovery->executor);
    bool already =
        is_done_already(order->command, cox_executor_engine_state(recovery->executor), unready) &&
        !(order->command == COX_RECOVER_START && half_paused);
    for (uint32_t rank = 0; already && rank < recovery->rank_count; rank++)
        order->results[rank] = (struct cox_recover_result){.device = -1, .text = "already"};
    if (!already)
        r = cox_executor_recover(recovery->executor, order->command, order->deadline_ns,
                                 order->results, &order->error);
    enum cox_engine_state state = cox_executor_engine_state(recovery->executor);
    half_paused = cox_executor_half_paused(recovery->executor);
    order->status = leave(recovery, r);
    recovery->half_paused = half_paused;
    recovery->paused = half_paused || state == COX_ENGINE_PAUSE || state == COX_ENGINE_READY;
    recovery->changes += !already; /* refused ones as well: steps were refused meanwhile */
}

/* Waits until a death is told. */
static int await_death(struct cox_recovery *recovery, const struct order *order,
                       struct cox_error *err)
{
    const struct timespec until = cox_deadline_timespec(order->deadline_ns);
    const struct rank *rank = &recovery->ranks[order->rank];
    int r = 0;
    while (!rank->dead && !recovery->stopped && r != ETIMEDOUT)
        r = pthread_cond_timedwait(&recovery->wake, &recovery->lock, &until);
    if (rank->dead)
        return 0;
    if (recovery->stopped)
        return cox_fail(err, COX_CLOSED, "the group stops");
    return cox_fail(err, COX_TIMEOUT, "rank %" PRIu32 " is not dead yet, although it was killed",
                    order->rank);
}

/* On return the rank is to be replaced, or *ret_lives. */
static int rank_end(struct cox_recovery *recovery, const struct order *order, bool *ret_lives,
                    struct cox_error *err)
{
    struct rank *rank = &recovery->ranks[order->rank];
    enter(recovery);
    leave(recovery, 0);
    enum cox_rank_life life = recovery->statuses[order->rank].life;
    *ret_lives = false;
    if (rank->dead)
        return 0;
    if (life == COX_LIFE_DEAD ||
        (order->killed && recovery->statuses[order->rank].pid == order->killed))
        return await_death(recovery, order, err);
    if (order->killed) { /* and the policy has made that good meanwhile */
        *ret_lives = true;
        return 0;
    }
    if (!order->kill && life != COX_LIFE_LEFT) {
        *ret_lives = true;
        return 0;
    }
    rank->expected = true;
    snprintf(recovery->doing, sizeof recovery->doing, "killing rank %" PRIu32, order->rank);
    enter(recovery);
    int r = leave(recovery, cox_executor_kill(recovery->executor, order->rank, err));
    if (r) {
        rank->expected = false;
        return r;
    }
    return await_death(recovery, order, err);
}

static void order_restart(struct cox_recovery *recovery, struct order *order)
{
    struct cox_error *err = &order->error;
    bool lives;
    if (recovery->failed) {
        order->status =
            cox_fail(err, COX_PEER_DEAD, "the group has failed: %.900s", recovery->failure.text);
        return;
    }
    int r = rank_end(recovery, order, &lives, err);
    if (!r && !lives) {
        r = recovery->whole ? all_replace(recovery, order->deadline_ns, err)
                            : rank_replace(recovery, order->rank, order->deadline_ns, err);
        order->replaced = r == 0;
        if (r) /* the policy need not try the same at once */
            backoff_fail(recovery,
                         recovery->whole ? &recovery->all : &recovery->ranks[order->rank].backoff);
    } else if (!r) {
        order->replaced = order->killed != 0;
    }
    if (!r && recovery->unready && !first_dead(recovery))
        r = init_replay(recovery, order->deadline_ns, err);
    if (r)
        recovery->last = *err;
    order->status = r;
}

static void order_run(struct cox_recovery *recovery, struct order *order)
{
    order->started = true;
    if (recovery->closing)
        order->status = cox_fail(&order->error, COX_CLOSED, "the group stops");
    else if (cox_now_ns() >= order->deadline_ns) /* whoever gave it is about to take it back */
        order->status = cox_fail(&order->error, COX_TIMEOUT, "its turn did not come in time");
    else if (order->is_restart)
        order_restart(recovery, order);
    else
        order_command(recovery, order);
    recovery->orders = order->next;
    order->done = true;
    pthread_cond_broadcast(&recovery->wake);
}

/* ---- the thread ---- */

static void *recovery_main(void *context)
{
    struct cox_recovery *recovery = context;
    bool turned = false;
    pthread_mutex_lock(&recovery->lock);
    while (!recovery->stopped) {
        uint64_t due_ns = turn_due(recovery);
        const struct timespec until = cox_deadline_timespec(due_ns);
        /* A turn that came to nothing can be due again at once: an order waits for one, not for all of
         * them. */
        bool skips = turned && recovery->orders;
        turned = false;
        if (due_ns <= cox_now_ns() && !skips) {
            turn(recovery);
            turned = true;
        } else if (recovery->look) {
            look(recovery);
        } else if (recovery->orders) {
            order_run(recovery, recovery->orders);
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
    if (!options->restart_max)
        options->restart_max = RESTART_MAX_DEFAULT;
    if (!options->window_ms)
        options->window_ms = WINDOW_MS_DEFAULT;
    if (!options->backoff_min_ms)
        options->backoff_min_ms = BACKOFF_MIN_MS_DEFAULT;
    if (!options->backoff_max_ms)
        options->backoff_max_ms = BACKOFF_MAX_MS_DEFAULT;
    if (options->backoff_max_ms < options->backoff_min_ms)
        options->backoff_max_ms = options->backoff_min_ms;
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
    recovery->whole =
        options->on_death == COX_ON_DEATH_RESTART_ALL || cox_executor_legacy(executor);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&recovery->wake, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&recovery->lock, NULL);
    recovery->statuses = calloc(recovery->rank_count, sizeof *recovery->statuses);
    recovery->ranks = calloc(recovery->rank_count, sizeof *recovery->ranks);
    recovery->deaths = calloc((size_t)recovery->options.restart_max + 1, sizeof *recovery->deaths);
    int r = recovery->statuses && recovery->ranks && recovery->deaths ? 0 : -ENOMEM;
    if (!r)
        r = cox_thread_start(&recovery->thread, recovery_main, recovery);
    if (r) {
        recovery_destroy(recovery);
        return cox_fail(err, r, "recovery: %s", cox_status_text(r));
    }
    if (options->on_death == COX_ON_DEATH_RESTART && recovery->whole)
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

/* ---- for the scheduler ---- */

static bool is_ended(const struct cox_recovery *recovery)
{
    return recovery->stopped || recovery->cancelled || recovery->closing || recovery->failed;
}

static bool is_disturbed(struct cox_recovery *recovery)
{
    return recovery->busy || recovery->paused || recovery->unready || first_dead(recovery);
}

/* Whoever has seen a death is right, but the hook may be still to come; or it never comes, since the
 * rank has left. */
static void await_news(struct cox_recovery *recovery)
{
    const struct timespec until = cox_deadline_timespec(cox_deadline_after_ms(NEWS_MS));
    int r = 0;
    recovery->look = true;
    pthread_cond_broadcast(&recovery->wake);
    while (!is_ended(recovery) && !first_dead(recovery) &&
           recovery->changes == recovery->changes_seen && r != ETIMEDOUT)
        r = pthread_cond_timedwait(&recovery->wake, &recovery->lock, &until);
}

int cox_recovery_await(struct cox_recovery *recovery, struct cox_error *err)
{
    pthread_mutex_lock(&recovery->lock);
    if (err->code == COX_PEER_DEAD && recovery->changes == recovery->changes_seen)
        await_news(recovery);
    while (!is_ended(recovery) && is_disturbed(recovery))
        pthread_cond_wait(&recovery->wake, &recovery->lock);
    int r = recovery->changes != recovery->changes_seen;
    recovery->changes_seen = recovery->changes;
    if (recovery->stopped || recovery->cancelled || recovery->closing)
        *err = (struct cox_error){.code = r = COX_CLOSED, .text = "stopped"};
    else if (recovery->failed) {
        r = COX_PEER_DEAD;
        /* What the caller says of the death says more than that there was one. */
        if (err->code != r || recovery->options.on_death != COX_ON_DEATH_FAIL)
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

/* ---- orders ---- */

/* Queues and waits; the lock is held. One that was started ends by its deadline by itself. */
static int order_wait(struct cox_recovery *recovery, struct order *order, struct cox_error *err)
{
    const struct timespec until = cox_deadline_timespec(order->deadline_ns);
    struct order **link = &recovery->orders;
    int r = 0;
    while (*link)
        link = &(*link)->next;
    *link = order;
    pthread_cond_broadcast(&recovery->wake);
    while (!order->done && (order->started || (!recovery->stopped && r != ETIMEDOUT)))
        r = order->started ? pthread_cond_wait(&recovery->wake, &recovery->lock)
                           : pthread_cond_timedwait(&recovery->wake, &recovery->lock, &until);
    if (order->done)
        return order->status ? cox_fail(err, order->status, "%s", order->error.text) : 0;
    for (link = &recovery->orders; *link != order;)
        link = &(*link)->next;
    *link = order->next;
    if (recovery->stopped)
        return cox_fail(err, COX_CLOSED, "the group stops");
    return cox_fail(err, COX_TIMEOUT, "its turn did not come in time: recovery is %s",
                    recovery->doing[0] ? recovery->doing : "busy");
}

static int order_give(struct cox_recovery *recovery, struct order *order, struct cox_error *err)
{
    pthread_mutex_lock(&recovery->lock);
    int r = recovery->stopped ? cox_fail(err, COX_CLOSED, "the group stops")
                              : order_wait(recovery, order, err);
    pthread_mutex_unlock(&recovery->lock);
    return r;
}

int cox_recovery_command(struct cox_recovery *recovery, enum cox_recover_command command,
                         uint64_t deadline_ns, struct cox_recover_result *ret_results,
                         struct cox_error *err)
{
    struct order order = {.command = command, .results = ret_results, .deadline_ns = deadline_ns};
    for (uint32_t rank = 0; rank < recovery->rank_count; rank++)
        ret_results[rank] =
            (struct cox_recover_result){.device = -1, .result = -1, .text = "not asked"};
    return order_give(recovery, &order, err);
}

/* What is under way may wait for this very rank, which does nothing: it dies at once, not when it is the order's
 * turn. Of a rank that is being replaced it is the new process. */
static int kill_now(struct cox_recovery *recovery, struct order *order, struct cox_error *err)
{
    pthread_mutex_lock(&recovery->lock);
    struct rank *rank = &recovery->ranks[order->rank];
    bool waits = recovery->busy && !recovery->failed;
    if (waits && !rank->dead)
        rank->expected = rank->ordered = true;
    pthread_mutex_unlock(&recovery->lock);
    if (!waits)
        return 0;
    struct cox_error error = {0};
    pid_t pid = cox_executor_pid(recovery->executor, order->rank);
    int r = cox_executor_kill(recovery->executor, order->rank, &error);
    if (!r) {
        order->killed = pid;
        return 0;
    }
    pthread_mutex_lock(&recovery->lock);
    rank->expected = false;
    pthread_mutex_unlock(&recovery->lock);
    if (r == COX_UNSUPPORTED) /* nobody has logged on as it yet */
        return 0;
    return cox_fail(err, r, "%s", error.text);
}

int cox_recovery_restart(struct cox_recovery *recovery, uint32_t rank, bool kill,
                         uint64_t deadline_ns, bool *ret_replaced, struct cox_error *err)
{
    struct order order = {
        .is_restart = true, .rank = rank, .kill = kill, .deadline_ns = deadline_ns};
    *ret_replaced = false;
    if (rank >= recovery->rank_count)
        return cox_fail(err, COX_INVALID, "there is no rank %" PRIu32 ": the group has %" PRIu32,
                        rank, recovery->rank_count);
    int r = kill ? kill_now(recovery, &order, err) : 0;
    if (!r)
        r = order_give(recovery, &order, err);
    pthread_mutex_lock(&recovery->lock);
    if (recovery->ranks[rank].ordered) {
        recovery->ranks[rank].ordered = false;
        pthread_cond_broadcast(&recovery->wake);
    }
    pthread_mutex_unlock(&recovery->lock);
    *ret_replaced = order.replaced;
    return r;
}

/* ---- how it is ---- */

static void describe(struct cox_recovery *recovery, char *text, size_t size)
{
    const struct rank *dead = first_dead(recovery);
    uint64_t due_ns = turn_due(recovery), now = cox_now_ns();
    if (recovery->doing[0])
        snprintf(text, size, "%s", recovery->doing);
    else if (recovery->failed)
        snprintf(text, size, "the group has failed");
    else if (due_ns != COX_DEADLINE_NEVER && due_ns > now)
        snprintf(text, size, "pausing %" PRIu64 " ms before the next try",
                 (due_ns - now) / COX_NSEC_PER_MSEC + 1);
    else if (dead && recovery->options.on_death == COX_ON_DEATH_WAIT)
        snprintf(text, size, "waiting for an order: coxswain recover restart --rank %td",
                 dead - recovery->ranks);
    else if (recovery->unready && recovery->options.on_death == COX_ON_DEATH_WAIT)
        snprintf(text, size, "waiting for an order: coxswain recover restart");
    else if (recovery->half_paused)
        snprintf(text, size,
                 "a pause has failed and some ranks are paused: coxswain recover start, or pause");
}

void cox_recovery_status(struct cox_recovery *recovery, struct cox_recovery_status *ret_status)
{
    pthread_mutex_lock(&recovery->lock);
    *ret_status = (struct cox_recovery_status){
        .on_death = recovery->options.on_death,
        .recent_deaths = recent_deaths(recovery),
        .restart_max = recovery->options.restart_max,
        .unready = recovery->unready,
    };
    describe(recovery, ret_status->doing, sizeof ret_status->doing);
    pthread_mutex_unlock(&recovery->lock);
}
