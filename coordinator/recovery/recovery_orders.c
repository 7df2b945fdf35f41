#include "coordinator/executor/core.h"
#include "coordinator/executor/requests_internal.h"
#include "recovery_internal.h"

#include <inttypes.h>
#include <stdio.h>

/* unready: no rank is dead, and the init that leads to NORMAL is due; a start has nothing to add.
 */
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

/* After a command: the engine is paused, or not. */
static void set_paused(struct cox_recovery *recovery, bool paused)
{
    const uint64_t now = cox_now_ns(), since = recovery->paused_ns;
    recovery->paused_ns = !paused ? 0 : since ? since : now;
    if (paused && !since)
        cox_log_write(&recovery->options.log, 5, "the group is paused%s: coxswain recover start",
                      recovery->partially_paused ? " in part, since not all ranks replied" : "");
    else if (!paused && since)
        cox_log_write(&recovery->options.log, 5, "the group goes on after a pause of %.1f s",
                      (double)(now - since) / (double)COX_NSEC_PER_SEC);
}

static void order_command(struct cox_recovery *recovery, struct cox_recovery_order *order)
{
    snprintf(recovery->doing, sizeof recovery->doing, "carrying out %s",
             cox_recover_command_name(order->command));
    const bool unready = recovery->unready && !cox_recovery_first_dead(recovery);
    cox_recovery_enter(recovery);
    int r = 0;
    bool partially_paused = cox_executor_partially_paused(recovery->executor);
    bool already =
        is_done_already(order->command, cox_executor_engine_state(recovery->executor), unready) &&
        !(order->command == COX_RECOVER_START && partially_paused);
    for (uint32_t rank = 0; already && rank < recovery->rank_count; rank++)
        order->results[rank] = (struct cox_recover_result){.device = -1, .text = "already"};
    if (!already)
        r = cox_executor_recover(recovery->executor, order->command, order->deadline_ns,
                                 order->results, &order->error);
    enum cox_engine_state state = cox_executor_engine_state(recovery->executor);
    partially_paused = cox_executor_partially_paused(recovery->executor);
    order->status = cox_recovery_leave(recovery, r);
    recovery->partially_paused = partially_paused;
    set_paused(recovery,
               partially_paused || state == COX_ENGINE_PAUSE || state == COX_ENGINE_READY);
    recovery->changes += !already; /* also refused ones: steps were refused meanwhile */
}

/* Waits until the death is reported. */
static int await_death(struct cox_recovery *recovery, const struct cox_recovery_order *order,
                       struct cox_error *err)
{
    const struct timespec until = cox_deadline_timespec(order->deadline_ns);
    const struct cox_recovery_rank *rank = &recovery->ranks[order->rank];
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

/* On return the rank is to be replaced, or *ret_lives is set. */
static int rank_end(struct cox_recovery *recovery, const struct cox_recovery_order *order,
                    bool *ret_lives, struct cox_error *err)
{
    struct cox_recovery_rank *rank = &recovery->ranks[order->rank];
    cox_recovery_enter(recovery);
    cox_recovery_leave(recovery, 0);
    enum cox_rank_liveness liveness = recovery->statuses[order->rank].liveness;
    *ret_lives = false;
    if (rank->dead)
        return 0;
    if (liveness == COX_LIVENESS_DEAD ||
        (order->killed && recovery->statuses[order->rank].pid == order->killed))
        return await_death(recovery, order, err);
    if (order->killed) { /* and the policy has replaced it meanwhile */
        *ret_lives = true;
        return 0;
    }
    if (!order->kill && liveness != COX_LIVENESS_LEFT) {
        *ret_lives = true;
        return 0;
    }
    rank->expected = true;
    snprintf(recovery->doing, sizeof recovery->doing, "killing rank %" PRIu32, order->rank);
    cox_recovery_enter(recovery);
    int r = cox_recovery_leave(recovery, cox_executor_kill(recovery->executor, order->rank, err));
    if (r) {
        rank->expected = false;
        return r;
    }
    return await_death(recovery, order, err);
}

static void order_restart(struct cox_recovery *recovery, struct cox_recovery_order *order)
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
        r = recovery->whole ? cox_recovery_replace_all(recovery, order->deadline_ns, err)
                            : cox_recovery_replace(recovery, order->rank, order->deadline_ns, err);
        order->replaced = r == 0;
        if (r) /* the policy does not try the same at once */
            cox_recovery_back_off(
                recovery, recovery->whole ? &recovery->all : &recovery->ranks[order->rank].backoff);
    } else if (!r) {
        order->replaced = order->killed != 0;
    }
    if (!r && recovery->unready && !cox_recovery_first_dead(recovery))
        r = cox_recovery_replay(recovery, order->deadline_ns, err);
    if (r)
        recovery->last = *err;
    order->status = r;
}

void cox_recovery_order_run(struct cox_recovery *recovery, struct cox_recovery_order *order)
{
    order->started = true;
    if (recovery->closing)
        order->status = cox_fail(&order->error, COX_CLOSED, "the group stops");
    else if (cox_now_ns() >= order->deadline_ns) /* its caller is about to withdraw it */
        order->status = cox_fail(&order->error, COX_TIMEOUT, "its turn did not come in time");
    else if (order->is_restart)
        order_restart(recovery, order);
    else
        order_command(recovery, order);
    recovery->orders = order->next;
    order->done = true;
    pthread_cond_broadcast(&recovery->wake);
}

/* Queues an order and waits; the lock is held. An order that has started ends by its deadline. */
static int order_wait(struct cox_recovery *recovery, struct cox_recovery_order *order,
                      struct cox_error *err)
{
    const struct timespec until = cox_deadline_timespec(order->deadline_ns);
    struct cox_recovery_order **link = &recovery->orders;
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

static int order_give(struct cox_recovery *recovery, struct cox_recovery_order *order,
                      struct cox_error *err)
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
    struct cox_recovery_order order = {
        .command = command, .results = ret_results, .deadline_ns = deadline_ns};
    for (uint32_t rank = 0; rank < recovery->rank_count; rank++)
        ret_results[rank] =
            (struct cox_recover_result){.device = -1, .result = -1, .text = "not asked"};
    return order_give(recovery, &order, err);
}

/* The operation in progress may wait for this rank, which does nothing. So it is killed at once,
 * not when the order's turn comes. If the rank is being replaced, the new process is killed. */
static int kill_now(struct cox_recovery *recovery, struct cox_recovery_order *order,
                    struct cox_error *err)
{
    pthread_mutex_lock(&recovery->lock);
    struct cox_recovery_rank *rank = &recovery->ranks[order->rank];
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
    if (r == COX_UNSUPPORTED) /* no process has attached as it yet */
        return 0;
    return cox_fail(err, r, "%s", error.text);
}

int cox_recovery_restart(struct cox_recovery *recovery, uint32_t rank, bool kill,
                         uint64_t deadline_ns, bool *ret_replaced, struct cox_error *err)
{
    struct cox_recovery_order order = {
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
