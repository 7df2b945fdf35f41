/* restart: one dead rank is started again while the others live. */
#include "executor.h"

#include <inttypes.h>
#include <signal.h>

#include "../channel/truth.h"
#include "executor_internal.h"
#include "launch.h"

/* A new process that did not make it is killed, and has this long to be gone. */
#define RESTART_KILL_MS 2000

/* Every channel goes on without the rank; whoever asked it has been told of its death. */
static int restart_leave_out(struct cox_executor *executor, uint32_t rank, uint64_t deadline_ns,
                             struct cox_error *err)
{
    int r = 0;
    atomic_store_explicit(&executor->left_out[rank], true, memory_order_release);
    for (int c = 0; r == 0 && c < COX_TWO_WAY_COUNT; c++)
        r = cox_collector_leave_out(&executor->collectors[c], rank, deadline_ns);
    return r ? cox_fail(err, r, "rank %" PRIu32 " is dead, but a handler did not return in time",
                        rank)
             : 0;
}

static void restart_admit(struct cox_executor *executor, uint32_t rank)
{
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
        cox_collector_admit(&executor->collectors[c], rank);
    atomic_store_explicit(&executor->left_out[rank], false, memory_order_release);
}

/* Lines, identity and bells as at the start. life is told of the fds: those of the group, which stay the
 * executor's, and the bells, which are the caller's also on failure. */
static int restart_reset(struct cox_executor *executor, uint32_t rank, struct cox_inherit *life,
                         struct cox_error *err)
{
    /* relaxed: one thread at a time starts this rank; the door only compares. */
    uint32_t generation =
        atomic_fetch_add_explicit(&executor->generations[rank], 1, memory_order_relaxed) + 1;
    int r = 0;
    if (executor->geometry.sealed) {
        pthread_mutex_lock(&executor->memory_lock);
        r = cox_sealed_renew_rank(&executor->sealed, &executor->geometry, rank, err);
        pthread_mutex_unlock(&executor->memory_lock);
    }
    *life = executor->inherit;
    for (int c = 0; r == 0 && c < COX_TWO_WAY_COUNT; c++) {
        enum cox_channel_id channel = (enum cox_channel_id)c;
        int *bells = &life->fds[cox_inherit_bell(channel, (enum cox_bell)0)];
        r = cox_collector_reset_rank(&executor->collectors[c], rank, generation, bells, err);
    }
    /* What the dead one held of the error channel's slot is looked for since its death was told. */
    cox_truth_reset_line(cox_truth_line(&executor->control, rank, COX_CHANNEL_ERROR), 0);
    cox_faults_revive(&executor->faults, rank);
    cox_truth_reset_identity(&executor->control.ranks[rank]->identity);
    return r;
}

static void restart_close_bells(struct cox_inherit *life)
{
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
        for (int b = 0; b < COX_BELL_COUNT; b++)
            cox_close_fd(&life->fds[cox_inherit_bell((enum cox_channel_id)c, (enum cox_bell)b)]);
}

static int restart_await(struct cox_executor *executor, uint32_t rank, uint64_t deadline_ns,
                         struct cox_error *err)
{
    struct cox_collector *collector = &executor->collectors[COX_CHANNEL_EXECUTE];
    struct cox_gate *gate = &executor->channels[COX_CHANNEL_EXECUTE].gate;
    const struct cox_layout_identity *identity = &executor->control.ranks[rank]->identity;
    for (;;) {
        uint32_t ticket = cox_gate_ticket(gate, COX_BELL_RESPONSE_CONSUME);
        if (cox_truth_attached(identity))
            break;
        if (cox_supervisor_dead(executor->supervisor, rank, NULL))
            return cox_executor_describe_failure(executor, rank, COX_PEER_DEAD,
                                                 "before it was back in the group", err);
        if (atomic_load_explicit(&executor->stopping, memory_order_acquire))
            return cox_fail(err, COX_CLOSED, "the group stops");
        if (cox_now_ns() >= deadline_ns)
            return cox_executor_describe_failure(executor, rank, COX_TIMEOUT,
                                                 "but did not attach in time", err);
        /* Nobody else sleeps on this bell while the rank is left out. */
        cox_gate_wait(gate, rank, COX_BELL_RESPONSE_CONSUME, ticket,
                      cox_deadline_min(deadline_ns, cox_deadline_after_ns(COX_SLICE_NS)));
    }
    pthread_mutex_lock(&collector->lock);
    cox_gate_settle(gate, rank, COX_BELL_RESPONSE_CONSUME);
    pthread_mutex_unlock(&collector->lock);
    return cox_executor_check_identity(executor, rank, err);
}

/* The rank is left out of every channel. */
static int restart_rank(struct cox_executor *executor, uint32_t rank, uint64_t deadline_ns,
                        struct cox_error *err)
{
    struct cox_inherit inherit;
    int r = restart_reset(executor, rank, &inherit, err);
    if (r == 0) {
        const struct cox_launch_life life = {
            .generation = executor->generations[rank],
            .fds = inherit.fds,
            .fd_count = inherit.count,
        };
        atomic_store_explicit(&executor->death_told[rank], false, memory_order_release);
        r = cox_supervisor_relaunch(executor->supervisor, rank, &life, deadline_ns, err);
    }
    restart_close_bells(&inherit);
    if (r)
        return r;
    r = restart_await(executor, rank, deadline_ns, err);
    if (r == 0)
        cox_executor_count_restart(executor, rank);
    else
        cox_supervisor_signal(executor->supervisor, rank, SIGKILL);
    return r;
}

static int restart_guarded(struct cox_executor *executor, uint32_t rank, uint64_t deadline_ns,
                           struct cox_error *err)
{
    /* One that an earlier restart killed, and that would not go in time, is not alive. */
    bool left_out = atomic_load_explicit(&executor->left_out[rank], memory_order_acquire);
    if (!cox_supervisor_dead(executor->supervisor, rank, NULL) && !left_out)
        return cox_truth_left(&executor->control, rank)
                   ? cox_fail(err, COX_STATE,
                              "rank %" PRIu32 " (pid %jd) left the group, its process lives: end "
                              "it, then start the rank again",
                              rank, (intmax_t)cox_supervisor_pid(executor->supervisor, rank))
                   : 0;
    int r = cox_supervisor_await_end(executor->supervisor, rank, deadline_ns, err);
    if (r == 0)
        r = restart_leave_out(executor, rank, deadline_ns, err);
    if (r == 0) {
        r = restart_rank(executor, rank, deadline_ns, err);
        /* One that is killed is asked again only once everybody can see that it is dead. */
        if (r && cox_supervisor_await_end(executor->supervisor, rank,
                                          cox_deadline_after_ms(RESTART_KILL_MS), NULL))
            return r;
    }
    restart_admit(executor, rank);
    return r;
}

int cox_executor_restart(struct cox_executor *executor, uint32_t rank, uint64_t deadline_ns,
                         struct cox_error *err)
{
    if (rank >= executor->geometry.rank_count)
        return cox_fail(err, COX_INVALID, "there is no rank %" PRIu32 ": the group has %" PRIu32,
                        rank, executor->geometry.rank_count);
    if (executor->geometry.legacy)
        return cox_fail(
            err, COX_UNSUPPORTED,
            "a group with legacy workers starts again as a whole: stop it and start it");
    if (executor->options.external_workers)
        return cox_fail(err, COX_UNSUPPORTED,
                        "the workers of this group were started by hand: it cannot start one, and "
                        "takes no other in place of a dead one; stop it and start it");
    if (cox_inside(executor))
        return cox_fail(err, COX_DEADLOCK,
                        "a rank cannot be started again from inside a handler or hook");
    _cox_cleanup_(cox_executor_go) struct cox_executor *inside = cox_executor_come(executor);
    if (atomic_load_explicit(&inside->stopping, memory_order_acquire))
        return cox_fail(err, COX_CLOSED, "the group stops");
    if (!atomic_load_explicit(&inside->complete, memory_order_acquire))
        return cox_fail(err, COX_BUSY, "the group is still being started");
    /* acq_rel: partner is the release below; one thread at a time has the rank's generation. */
    if (atomic_exchange_explicit(&inside->restarting[rank], true, memory_order_acq_rel))
        return cox_fail(err, COX_BUSY, "rank %" PRIu32 " is being started again already", rank);
    int r = restart_guarded(inside, rank, deadline_ns, err);
    atomic_store_explicit(&inside->restarting[rank], false, memory_order_release);
    return r;
}
