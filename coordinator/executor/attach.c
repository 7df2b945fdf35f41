/* attach: the ranks attach while the group starts: which have, whose process each is, and why one
 * has not. */
#include "channel/base/base_internal.h"
#include "channel/base/fault.h"
#include "channel/base/peer.h"
#include "coordinator/collector/collector.h"
#include "executor_internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* Once a millisecond. */
#define DEATH_ATTEMPTS 1000

/* A process that ended of itself and never attached may be a program of another kind. lines: its
 * last ones. */
static const char *executor_why_ended(struct cox_executor *executor, uint32_t rank,
                                      const char *lines)
{
    struct cox_exit how;
    if (executor->remote.transport || cox_executor_is_external(executor) ||
        cox_state_attached(&executor->control.ranks[rank]->identity) ||
        !cox_supervisor_dead(executor->supervisor, rank, &how) || !how.known || how.signal)
        return "";
    if (!executor->options.workers.environment_only && strstr(lines, "local_rank"))
        return "; it may not know the flags that are appended to its command: sh -c 'exec "
               "PROGRAM' ignores them (options.workers.environment_only leaves them out)";
    if (how.exit_status == 0 || !lines[0])
        return "; it may be no Coxswain worker: a worker attaches to the group and serves requests "
               "until the group ends (cox_worker_run, or coxswain.serve in Python)";
    return "";
}

int cox_executor_describe_failure(struct cox_executor *executor, uint32_t rank, int code,
                                  const char *what, struct cox_error *err)
{
    char how[COX_RANK_TEXT_SIZE], lines[400] = "";
    cox_supervisor_describe(executor->supervisor, rank, how, sizeof how);
    size_t length = cox_supervisor_last_lines(executor->supervisor, rank, lines, sizeof lines);
    const bool said = strstr(how, what) != NULL; /* by another machine */
    return cox_fail(err, code, "%s%s%s%s%s%s", how, said ? "" : " ", said ? "" : what,
                    code == COX_PEER_DEAD ? executor_why_ended(executor, rank, lines) : "",
                    length ? "; its last lines: " : "", lines);
}

/* A process that cannot be adopted may have lost its wrapper at this moment, and one that the
 * kernel reports dead is about to be reaped: the supervisor then soon knows how it ended. */
static bool executor_sees_death(struct cox_executor *executor, uint32_t rank)
{
    for (int attempt = 0; attempt < DEATH_ATTEMPTS; attempt++) {
        if (cox_rank_is_dead(&executor->ranks[rank]))
            return true;
        nanosleep(&(struct timespec){.tv_nsec = COX_NSEC_PER_MSEC}, NULL);
    }
    return false;
}

int cox_executor_check_identity(struct cox_executor *executor, uint32_t rank, struct cox_error *err)
{
    const struct cox_identity identity =
        cox_state_identity(&executor->control.ranks[rank]->identity);
    uint32_t incarnation = identity.incarnation, group_incarnation = identity.group_incarnation,
             pid = identity.pid;
    uint64_t start = identity.start;
    const struct cox_rank *record = &executor->ranks[rank];
    uint32_t expected = cox_rank_incarnation(record);
    pid_t holder = atomic_load_explicit(&record->holder.pid, memory_order_relaxed);
    if (incarnation != expected || group_incarnation != executor->control.group_incarnation)
        return cox_fail(err, COX_CORRUPT,
                        "rank %" PRIu32 " attached as incarnation %" PRIu32 ", expected %" PRIu32,
                        rank, incarnation, expected);
    if (holder && (uint32_t)holder != pid)
        return cox_fail(
            err, COX_CORRUPT,
            "rank %" PRIu32 " attached as process %" PRIu32
            ", but process %jd has connected: is it in a pid namespace of its own? Start it in the coordinator's",
            rank, pid, (intmax_t)holder);
    /* With a start time of 0 any process with that pid would be taken for the rank, and killed with
     * it. */
    if (start == 0 || (pid_t)pid <= 0)
        return cox_fail(err, COX_CORRUPT, "rank %" PRIu32 " attached without its pid or start time",
                        rank);
    int r = cox_supervisor_adopt(executor->supervisor, rank, (pid_t)pid, start);
    if (r && executor_sees_death(executor, rank))
        return cox_executor_describe_failure(executor, rank, COX_PEER_DEAD,
                                             "before the group was complete", err);
    return r ? cox_fail(err, r, "rank %" PRIu32 " attached as process %" PRIu32 ": %s", rank, pid,
                        r == -ENOSYS || r == -EPERM
                            ? "pidfd_open is missing or denied, without which a worker in "
                              "a wrapper cannot be watched (coxswain doctor)"
                            : cox_status_text(r))
             : 0;
}

/* Checks every rank that has attached by now, also behind one that has not, and from then on
 * watches its process. checked grows. The lock of the execute collector is held, and released
 * meanwhile. Returns 0, or what is wrong with one. */
static int executor_check_attached(struct cox_executor *executor, struct cox_rank_set *checked,
                                   struct cox_error *err)
{
    struct cox_collector *collector = &executor->collectors[COX_CHANNEL_EXECUTE];
    int r = 0;
    for (uint32_t rank = 0; r == 0 && rank < executor->geometry.rank_count; rank++) {
        const struct cox_layout_identity *identity = &executor->control.ranks[rank]->identity;
        if (cox_rank_set_has(checked, rank) || !cox_state_attached(identity))
            continue;
        /* Without the lock: it may wait for a death, whose report takes the lock. */
        pthread_mutex_unlock(&collector->lock);
        r = cox_executor_check_identity(executor, rank, err);
        pthread_mutex_lock(&collector->lock);
        cox_gate_absorb(&executor->channels[COX_CHANNEL_EXECUTE].gate, rank,
                        COX_WAKEUP_RESPONSE_CONSUME);
        cox_rank_set_add(checked, rank);
        cox_fault_point(COX_FAULT_RANK_CHECKED);
    }
    return r;
}

/* A rank on another machine: what is known of its node is said. */
static void why_late_there(const struct cox_transport *transport, uint32_t rank, char *text,
                           size_t size)
{
    char node[COX_NODE_NAME_MAX + 1] = "", address[128], trouble[200];
    if (transport->trouble &&
        transport->trouble(transport->context, rank, trouble, sizeof trouble)) {
        snprintf(text, size, "in time: %s", trouble);
        return;
    }
    if (transport->place)
        transport->place(transport->context, rank, node, sizeof node, address, sizeof address);
    snprintf(text, size, "in time: node %s has not started it: the log of its agent says why",
             node[0] ? node : "?");
}

static const char *executor_why_late(struct cox_executor *executor, uint32_t rank, char *text,
                                     size_t size)
{
    pid_t pid = cox_rank_pid(&executor->ranks[rank]);
    if (pid == 0 && executor->remote.transport) {
        why_late_there(executor->remote.transport, rank, text, size);
        return text;
    }
    if (pid == 0)
        return "in time: start it by hand (coxswain-worker --socket PATH), or wait longer";
    if (!executor->remote.transport && cox_peer_stopped(pid))
        return "but did not attach in time: it is stopped by a signal";
    return executor->options.workers.external
               ? "but did not attach in time"
               : "but did not attach in time: is it a Coxswain worker? (--legacy-workers for others)";
}

/* Calls the host's hook while ranks attach. reported: the missing ranks that the host knows of; all
 * zero at first. Returns true if the host cancels the start. */
static bool executor_ask_host(struct cox_executor *executor, const struct cox_rank_set *checked,
                              struct cox_rank_set *reported)
{
    const struct cox_executor_options *options = &executor->options;
    struct cox_rank_set missing = {{0}};
    for (uint32_t rank = 0; rank < executor->geometry.rank_count; rank++)
        if (!cox_rank_set_has(checked, rank))
            cox_rank_set_add(&missing, rank);
    if (options->hooks.attaching && memcmp(&missing, reported, sizeof missing) != 0)
        options->hooks.attaching(options->hooks.context, &missing);
    *reported = missing;
    return options->hooks.cancelled && options->hooks.cancelled(options->hooks.context);
}

/* All have attached. A rank that has died meanwhile may be known to the kernel only, if the
 * supervisor thread did not run since. It is found here, and not by the first request. */
static int executor_check_alive(struct cox_executor *executor, struct cox_error *err)
{
    for (uint32_t rank = 0; rank < executor->geometry.rank_count; rank++)
        if (cox_supervisor_ended(executor->supervisor, rank))
            return cox_executor_describe_failure(executor, rank, COX_PEER_DEAD,
                                                 executor_sees_death(executor, rank)
                                                     ? "before the group was complete"
                                                     : "but its process has ended",
                                                 err);
    return 0;
}

int cox_executor_await_attached(struct cox_executor *executor, uint64_t deadline_ns,
                                struct cox_error *err)
{
    struct cox_collector *collector = &executor->collectors[COX_CHANNEL_EXECUTE];
    struct cox_rank_set checked = {{0}}, reported = {{0}};
    uint32_t rank = 0; /* the first that has not attached */
    uint64_t look_ns = cox_deadline_after_ns(COX_SLICE_NS);
    int r = 0;
    for (uint32_t other = 0; other < executor->geometry.rank_count; other++)
        if (!cox_executor_has_rank(executor, other))
            cox_rank_set_add(&checked, other);
    pthread_mutex_lock(&collector->lock);
    while (r == 0 && rank < executor->geometry.rank_count) {
        const struct cox_wait_snapshot before = cox_collector_snapshot(collector);
        r = executor_check_attached(executor, &checked, err);
        if (cox_rank_set_has(&checked, rank)) {
            rank++;
            continue;
        }
        /* Any death during start fails it, not only that of the rank waited for. */
        const bool looks = cox_now_ns() >= look_ns;
        look_ns = looks ? cox_deadline_after_ns(COX_SLICE_NS) : look_ns;
        for (uint32_t other = 0; r == 0 && other < executor->geometry.rank_count; other++) {
            if (looks)
                cox_supervisor_see_dump(executor->supervisor, other);
            if (cox_rank_is_dead(&executor->ranks[other]))
                r = cox_executor_describe_failure(executor, other, COX_PEER_DEAD,
                                                  "before the group was complete", err);
        }
        pthread_mutex_unlock(&collector->lock);
        bool cancelled = executor_ask_host(executor, &checked, &reported);
        pthread_mutex_lock(&collector->lock);
        if (r == 0 && cancelled)
            r = cox_fail(err, COX_CLOSED, "cancelled while the workers were starting");
        char late[256];
        if (r == 0 && cox_now_ns() >= deadline_ns)
            r = cox_executor_describe_failure(executor, rank, COX_TIMEOUT,
                                              executor_why_late(executor, rank, late, sizeof late),
                                              err);
        if (r == 0)
            cox_collector_sleep(collector, rank, UINT64_MAX, &before,
                                cox_deadline_min(deadline_ns, cox_deadline_after_ns(COX_SLICE_NS)));
    }
    pthread_mutex_unlock(&collector->lock);
    return r ? r : executor_check_alive(executor, err);
}
