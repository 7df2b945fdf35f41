/* restart: gives another process to a dead rank, or to all ranks. */
#include "channel/base/base_internal.h"
#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/base/options.h"
#include "channel/shm/state.h"
#include "coordinator/collector/reentrancy.h"
#include "coordinator/process/launch.h"
#include "coordinator/transport/transport.h"
#include "core.h"
#include "engine_gate.h"
#include "executor_internal.h"

#include <coxswain/executor.h>

#include <inttypes.h>
#include <signal.h>

/* How long a new process that failed to attach, and was killed, may take to end. */
#define RESTART_KILL_MS 2000
/* How long workers that were started by hand may take to leave before they are killed. */
#define RESTART_LEAVE_MS 3000

/* ---- steps of a rank's replacement, in their order ---- */

/* Detaches the rank from every channel; requests that asked it have completed with its death. */
static int restart_detach(struct cox_executor *executor, uint32_t rank, uint64_t deadline_ns,
                          struct cox_error *err)
{
    int r = 0;
    for (int c = 0; r == 0 && c < COX_TWO_WAY_COUNT; c++)
        r = cox_collector_detach(&executor->collectors[c], rank, deadline_ns);
    return r ? cox_fail(err, r, "rank %" PRIu32 " is dead, but a handler did not return in time",
                        rank)
             : 0;
}

static void restart_attach(struct cox_executor *executor, uint32_t rank)
{
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
        cox_collector_attach(&executor->collectors[c], rank);
}

/* The rank is detached from every channel: what its old process does from here on, if it left and
 * lives on, does not matter. */
static int restart_release_slot(struct cox_executor *executor, uint32_t rank, uint64_t deadline_ns,
                                struct cox_error *err)
{
    return cox_executor_is_external(executor)
               ? cox_supervisor_release_slot(executor->supervisor, rank, deadline_ns, err)
               : 0;
}

/* Resets lines, identity and wakeups, and gives the rank a new incarnation. */
static int restart_reset(struct cox_executor *executor, uint32_t rank, struct cox_error *err)
{
    /* relaxed: one thread at a time restarts this rank; the control socket only compares. */
    atomic_fetch_add_explicit(&executor->ranks[rank].incarnation, 1, memory_order_relaxed);
    int r = 0;
    /* No rank elsewhere writes here. */
    if (!executor->remote.transport) {
        pthread_mutex_lock(&executor->memory_lock);
        r = cox_attach_renew_rank(executor->memory, rank, err);
        pthread_mutex_unlock(&executor->memory_lock);
    }
    for (int c = 0; r == 0 && c < COX_TWO_WAY_COUNT; c++) {
        enum cox_channel_id channel = (enum cox_channel_id)c;
        int *wakeups = cox_attach_wakeup_fds(executor->memory, rank, channel);
        r = cox_collector_reset_rank(&executor->collectors[c], rank, wakeups, err);
    }
    /* Then it still has the old memory, which is read-only. */
    if (r)
        return r;
    /* Whether the dead process held the error channel's slot is checked since its death was
     * reported. */
    cox_state_reset_line(cox_state_line(&executor->control, rank, COX_CHANNEL_ERROR), 0);
    cox_error_channel_reset_rank(&executor->error_channel, rank);
    cox_state_reset_identity(&executor->control.ranks[rank]->identity);
    cox_recorders_renew(executor, rank);
    return 0;
}

/* Closes what was meant for the next process: it has it, or there is none. */
static void restart_put_away(struct cox_executor *executor, uint32_t rank)
{
    pthread_mutex_lock(&executor->memory_lock);
    executor->ranks[rank].open_for_attach = false;
    pthread_mutex_unlock(&executor->memory_lock);
    cox_executor_put_away(executor, rank, false);
}

/* From here on the control socket gives the rank to a process that requests it. */
static void restart_open_slot(struct cox_executor *executor, uint32_t rank)
{
    pthread_mutex_lock(&executor->memory_lock);
    executor->ranks[rank].open_for_attach = true;
    pthread_mutex_unlock(&executor->memory_lock);
    cox_fault_point(COX_FAULT_RANK_OFFERED);
    cox_log_write(
        &executor->options.hooks.log, 6,
        "rank %" PRIu32
        " waits for a process to attach: coxswain-worker --socket %s --local_rank %" PRIu32,
        rank, cox_executor_socket(executor), rank);
}

static int restart_launch(struct cox_executor *executor, uint32_t rank, uint64_t deadline_ns,
                          struct cox_error *err)
{
    if (executor->remote.transport) {
        const struct cox_transport *transport = executor->remote.transport;
        return transport->open(transport->context, rank,
                               cox_rank_incarnation(&executor->ranks[rank]), err);
    }
    if (executor->options.workers.external) {
        restart_open_slot(executor, rank);
        return 0;
    }
    int fds[COX_FD_BUNDLE_COUNT];
    struct cox_launch_incarnation incarnation = {
        .number = cox_rank_incarnation(&executor->ranks[rank]), .fds = fds};
    int r = cox_executor_lend(executor, rank, fds, &incarnation.fd_count, err);
    if (r == 0)
        r = cox_supervisor_relaunch(executor->supervisor, rank, &incarnation, deadline_ns, err);
    cox_executor_put_away(executor, rank, true);
    restart_put_away(executor, rank);
    return r;
}

static int restart_late(struct cox_executor *executor, uint32_t rank, struct cox_error *err)
{
    if (cox_rank_pid(&executor->ranks[rank]))
        return cox_executor_describe_failure(executor, rank, COX_TIMEOUT,
                                             "but did not attach in time", err);
    if (executor->remote.transport)
        return cox_fail(err, COX_TIMEOUT, "rank %" PRIu32 ": its node has not started it in time",
                        rank);
    return cox_fail(
        err, COX_TIMEOUT,
        "rank %" PRIu32
        ": no process has attached in time: start a worker by hand (coxswain-worker --socket %s --local_rank %" PRIu32
        ") while the group waits",
        rank, cox_executor_socket(executor), rank);
}

static int restart_look(struct cox_executor *executor, uint32_t rank, uint64_t deadline_ns,
                        struct cox_error *err)
{
    cox_supervisor_see_dump(executor->supervisor, rank);
    if (cox_rank_is_dead(&executor->ranks[rank]))
        return cox_executor_describe_failure(executor, rank, COX_PEER_DEAD,
                                             "before it was back in the group", err);
    if (atomic_load_explicit(&executor->stopping, memory_order_acquire))
        return cox_fail(err, COX_CLOSED, "the group stops");
    return cox_now_ns() < deadline_ns ? 0 : restart_late(executor, rank, err);
}

/* Waits for one rank, while others up to `last` may be starting, too: the death of any of them ends
 * the wait. */
static int restart_await(struct cox_executor *executor, uint32_t rank, uint32_t last,
                         uint64_t deadline_ns, struct cox_error *err)
{
    struct cox_collector *collector = &executor->collectors[COX_CHANNEL_EXECUTE];
    struct cox_gate *gate = &executor->channels[COX_CHANNEL_EXECUTE].gate;
    const struct cox_layout_identity *identity = &executor->control.ranks[rank]->identity;
    for (;;) {
        uint32_t wake_sequence = cox_gate_wake_sequence(gate, COX_WAKEUP_RESPONSE_CONSUME);
        if (cox_state_attached(identity))
            break;
        int r = 0;
        for (uint32_t other = rank + 1; r == 0 && other <= last; other++)
            if (cox_rank_is_dead(&executor->ranks[other]))
                r = restart_look(executor, other, deadline_ns, err);
        if (r == 0)
            r = restart_look(executor, rank, deadline_ns, err);
        if (r)
            return r;
        /* No other thread waits on this wakeup while the rank is detached. */
        cox_gate_wait(gate, rank, COX_WAKEUP_RESPONSE_CONSUME, wake_sequence,
                      cox_deadline_min(deadline_ns, cox_deadline_after_ns(COX_SLICE_NS)));
    }
    pthread_mutex_lock(&collector->lock);
    cox_gate_absorb(gate, rank, COX_WAKEUP_RESPONSE_CONSUME);
    pthread_mutex_unlock(&collector->lock);
    return cox_executor_check_identity(executor, rank, err);
}

/* The last step: the new process is the rank. */
static void restart_conclude(struct cox_executor *executor, uint32_t rank)
{
    struct cox_rank *record = &executor->ranks[rank];
    const pid_t pid = cox_rank_serving_pid(record);
    const uint32_t incarnation = cox_rank_incarnation(record);
    restart_put_away(executor, rank);
    cox_log_write(&executor->options.hooks.log, 6,
                  "rank %" PRIu32 ": process %jd (incarnation %" PRIu32
                  ") is replaced by process %jd (incarnation %" PRIu32 ")",
                  rank, (intmax_t)record->previous.pid, record->previous.incarnation, (intmax_t)pid,
                  incarnation);
    record->previous.pid = pid;
    record->previous.incarnation = incarnation;
    cox_executor_note_replaced(executor);
    /* release: the incarnation was counted before; partner is cox_rank_invariant. */
    atomic_fetch_add_explicit(&record->restarts, 1, memory_order_release);
}

/* Instead of the last step: no process attached, or not completely, and the rank is dead as before.
 * Returns 0; COX_TIMEOUT: the process did not end. Requests may ask the rank again only once all
 * threads can see that it is dead. */
static int restart_undo(struct cox_executor *executor, uint32_t rank)
{
    struct cox_supervisor *supervisor = executor->supervisor;
    const bool external = cox_executor_is_external(executor);
    restart_put_away(executor, rank);
    if (external && cox_supervisor_cancel_slot(supervisor, rank))
        return 0;
    cox_supervisor_kill(supervisor, rank, 0);
    int r =
        cox_supervisor_await_end(supervisor, rank, cox_deadline_after_ms(RESTART_KILL_MS), NULL);
    /* It may have left by itself before it was the rank. */
    if (r == 0 && external)
        cox_supervisor_cancel_slot(supervisor, rank);
    return r;
}

/* Records the previous process before anything is done. */
static void restart_note(struct cox_executor *executor, uint32_t rank)
{
    struct cox_rank *record = &executor->ranks[rank];
    if (record->previous.pid == 0)
        record->previous.pid = cox_rank_serving_pid(record);
}

/* ---- one rank ---- */

/* A process that has left and lives on is waited for only as long as one that ends would take. */
static int restart_await_end(struct cox_executor *executor, uint32_t rank, bool lives,
                             uint64_t deadline_ns, struct cox_error *err)
{
    struct cox_supervisor *supervisor = executor->supervisor;
    if (!lives)
        return cox_supervisor_await_end(supervisor, rank, deadline_ns, err);
    cox_supervisor_await_end(supervisor, rank,
                             cox_deadline_min(deadline_ns, cox_deadline_after_ns(COX_LEAVING_NS)),
                             NULL);
    return 0;
}

static int restart_guarded(struct cox_executor *executor, uint32_t rank, uint64_t deadline_ns,
                           struct cox_error *err)
{
    /* A process that an earlier restart has killed, and that did not end in time, is not alive. */
    const struct cox_rank *record = &executor->ranks[rank];
    bool alive = !cox_rank_is_dead(record) && !cox_rank_is_detached(record);
    bool left = alive && cox_executor_sees_left(executor, rank);
    if (alive && !left)
        return 0;
    if (left && !cox_executor_is_external(executor))
        return cox_fail(
            err, COX_STATE,
            "rank %" PRIu32
            " (pid %jd) left the group, its process lives: end it, then start the rank again",
            rank, (intmax_t)cox_rank_pid(&executor->ranks[rank]));
    restart_note(executor, rank);
    int r = restart_await_end(executor, rank, left, deadline_ns, err);
    if (r) /* a process that was killed by an earlier restart and does not end stays detached */
        return r;
    r = restart_detach(executor, rank, deadline_ns, err);
    if (r == 0) {
        r = restart_release_slot(executor, rank, deadline_ns, err);
        if (r == 0)
            r = restart_reset(executor, rank, err);
        if (r == 0)
            r = restart_launch(executor, rank, deadline_ns, err);
        if (r == 0)
            r = restart_await(executor, rank, rank, deadline_ns, err);
        if (r == 0)
            restart_conclude(executor, rank);
        else if (restart_undo(executor, rank))
            return r;
    }
    restart_attach(executor, rank);
    return r;
}

static int restart_refuse(struct cox_executor *executor, struct cox_error *err)
{
    if (atomic_load_explicit(&executor->stopping, memory_order_acquire))
        return cox_fail(err, COX_CLOSED, "the group stops");
    if (!atomic_load_explicit(&executor->complete, memory_order_acquire))
        return cox_fail(err, COX_BUSY, "the group is still being started");
    return cox_executor_taken_over(executor, err);
}

/* acq_rel: partner is the release in give; one thread at a time changes the rank's incarnation. */
static bool restart_take(struct cox_executor *executor, uint32_t rank)
{
    return !atomic_exchange_explicit(&executor->ranks[rank].restarting, true, memory_order_acq_rel);
}

static void restart_give(struct cox_executor *executor, uint32_t rank)
{
    atomic_store_explicit(&executor->ranks[rank].restarting, false, memory_order_release);
}

int cox_executor_kill(struct cox_executor *executor, uint32_t rank, struct cox_error *err)
{
    if (rank >= executor->geometry.rank_count)
        return cox_fail(err, COX_INVALID, "there is no rank %" PRIu32 ": the group has %" PRIu32,
                        rank, executor->geometry.rank_count);
    if (cox_rank_pid(&executor->ranks[rank]) == 0)
        return cox_fail(err, COX_UNSUPPORTED, "no process has attached as rank %" PRIu32, rank);
    int r = cox_supervisor_kill(executor->supervisor, rank, 0);
    return r ? cox_fail(err, r, "rank %" PRIu32 " (pid %jd) cannot be killed: %s", rank,
                        (intmax_t)cox_rank_pid(&executor->ranks[rank]), cox_status_text(r))
             : 0;
}

/* ---- all ranks ---- */

/* Waits until every process that counts as a rank is dead and reported. In slices: a stop ends it.
 */
static int all_await_end(struct cox_executor *executor, uint64_t deadline_ns)
{
    int r;
    do {
        if (atomic_load_explicit(&executor->stopping, memory_order_acquire))
            return COX_CLOSED;
        r = cox_supervisor_wait(executor->supervisor,
                                cox_deadline_min(deadline_ns, cox_deadline_after_ns(COX_SLICE_NS)));
    } while (r == COX_TIMEOUT && cox_now_ns() < deadline_ns);
    return r;
}

/* Processes of others are asked to end first, because they may have to clean up. */
static int all_end(struct cox_executor *executor, uint64_t deadline_ns, struct cox_error *err)
{
    struct cox_supervisor *supervisor = executor->supervisor;
    int r = COX_TIMEOUT;
    if (executor->options.workers.external) {
        cox_supervisor_signal_all(supervisor, SIGTERM);
        cox_supervisor_signal_all(supervisor, SIGCONT);
        r = all_await_end(executor,
                          cox_deadline_min(deadline_ns, cox_deadline_after_ms(RESTART_LEAVE_MS)));
    }
    if (r == COX_TIMEOUT) {
        cox_supervisor_signal_all(supervisor, SIGKILL);
        r = all_await_end(executor, deadline_ns);
    }
    if (r == COX_CLOSED)
        return cox_fail(err, r, "the group stops");
    return r ? cox_fail(err, r, "the ranks were killed, but not all deaths were reported in time")
             : 0;
}

/* Renews what ranks find by its name, and their error channel. */
static int all_renew(struct cox_executor *executor, uint64_t deadline_ns, struct cox_error *err)
{
    int r = COX_TIMEOUT;
    while (r == COX_TIMEOUT && cox_now_ns() < deadline_ns &&
           !atomic_load_explicit(&executor->stopping, memory_order_acquire))
        r = cox_error_channel_restore(
            &executor->error_channel,
            cox_deadline_min(deadline_ns, cox_deadline_after_ns(COX_SLICE_NS)));
    if (r)
        return cox_fail(err, r, "the error channel is not free: a hook did not return in time");
    pthread_mutex_lock(&executor->memory_lock);
    r = cox_attach_renew_all(executor->memory, err);
    pthread_mutex_unlock(&executor->memory_lock);
    return r;
}

/* All ranks are dead and detached. arrived: the ranks that have attached again. */
static int all_start(struct cox_executor *executor, uint64_t deadline_ns,
                     struct cox_rank_set *arrived, struct cox_error *err)
{
    const uint32_t rank_count = executor->geometry.rank_count;
    const bool attach = executor->geometry.mode->limits.rank_words;
    int r = attach ? 0 : all_renew(executor, deadline_ns, err);
    /* One after the other, for all of them: after a later failure every rank is either dead or
     * running. */
    for (uint32_t rank = 0; rank < rank_count; rank++) {
        int vacated = restart_release_slot(executor, rank, deadline_ns, err);
        r = r ? r : vacated;
    }
    for (uint32_t rank = 0; r == 0 && rank < rank_count; rank++)
        r = restart_reset(executor, rank, err);
    for (uint32_t rank = 0; r == 0 && rank < rank_count; rank++)
        r = restart_launch(executor, rank, deadline_ns, err);
    if (r == 0 && !attach)
        r = cox_executor_adopt_ranks(executor, err);
    for (uint32_t rank = 0; r == 0 && rank < rank_count; rank++) {
        r = attach ? restart_await(executor, rank, rank_count - 1, deadline_ns, err) : 0;
        if (r == 0) {
            restart_conclude(executor, rank);
            cox_rank_set_add(arrived, rank);
        }
    }
    return r;
}

static int all_guarded(struct cox_executor *executor, uint64_t deadline_ns, struct cox_error *err)
{
    const uint32_t rank_count = executor->geometry.rank_count;
    struct cox_rank_set arrived = {{0}};
    for (uint32_t rank = 0; rank < rank_count; rank++)
        restart_note(executor, rank);
    int r = all_end(executor, deadline_ns, err);
    if (r)
        return r;
    for (uint32_t rank = 0; r == 0 && rank < rank_count; rank++)
        r = restart_detach(executor, rank, deadline_ns, err);
    bool begun = r == 0;
    if (begun)
        r = all_start(executor, deadline_ns, &arrived, err);
    for (uint32_t rank = 0; rank < rank_count; rank++)
        if (!begun || cox_rank_set_has(&arrived, rank) || restart_undo(executor, rank) == 0)
            restart_attach(executor, rank);
    return r;
}

/* One rank, or all. A thread that replaces ranks has taken each of them. */
static int restart_taken(struct cox_executor *executor, uint32_t rank, uint64_t deadline_ns,
                         struct cox_error *err)
{
    const bool all = rank == COX_RANK_ALL;
    const uint32_t first = all ? 0 : rank, end = all ? executor->geometry.rank_count : rank + 1;
    uint32_t taken = first;
    int r;
    while (taken < end && restart_take(executor, taken))
        taken++;
    if (taken < end)
        r = cox_fail(err, COX_BUSY, "rank %" PRIu32 " is being started again already", taken);
    else if (all)
        r = all_guarded(executor, deadline_ns, err);
    else
        r = restart_guarded(executor, rank, deadline_ns, err);
    while (taken > first)
        restart_give(executor, --taken);
    return r;
}

int cox_executor_restart(struct cox_executor *executor, uint32_t rank, uint64_t deadline_ns,
                         struct cox_error *err)
{
    if (rank >= executor->geometry.rank_count && rank != COX_RANK_ALL)
        return cox_fail(err, COX_INVALID, "there is no rank %" PRIu32 ": the group has %" PRIu32,
                        rank, executor->geometry.rank_count);
    if (!executor->geometry.mode->limits.replaces_one && rank != COX_RANK_ALL)
        return cox_fail(
            err, COX_UNSUPPORTED,
            "a group with legacy workers starts again as a whole (COX_RANK_ALL, coxswain recover restart)");
    if (cox_reentrancy_inside(executor))
        return cox_fail(err, COX_DEADLOCK,
                        "ranks cannot be started again from inside a handler or hook");
    _cox_cleanup_(cox_executor_exit) struct cox_executor *inside = cox_executor_enter(executor);
    int r = cox_deadline_check(deadline_ns, err);
    if (r == 0)
        r = restart_refuse(inside, err);
    return r ? r : restart_taken(inside, rank, deadline_ns, err);
}
