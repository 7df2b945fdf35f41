/* status: the state of a group, from the coordinator's records and the shared words; no worker
 * takes part. */
#include "channel/base/peer.h"
#include "channel/shm/state.h"
#include "coordinator/collector/report.h"
#include "coordinator/transport/transport.h"
#include "core.h"
#include "executor_internal.h"
#include "requests_internal.h"

#include <coxswain/executor.h>

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* How old a request is before a rank that has not taken it is named; and before one that has taken
 * it is, if it cannot go on: a wait for a disk may be short. */
#define UNTAKEN_NS COX_NSEC_PER_SEC
#define HELD_NS (5 * COX_NSEC_PER_SEC)

const char *cox_rank_state_name(uint32_t state)
{
    static const char *const names[] = {"idle", "taken", "running", "replying"};
    return state < sizeof names / sizeof *names ? names[state] : "unknown";
}

const char *cox_rank_liveness_name(uint32_t liveness)
{
    static const char *const names[] = {"alive", "dead", "left", "absent"};
    return liveness < sizeof names / sizeof *names ? names[liveness] : "unknown";
}

/* Written by the rank: each word is read once, and used for display only. */
static void channel_status(struct cox_executor *executor, uint32_t rank,
                           enum cox_channel_id channel, uint64_t now,
                           struct cox_rank_channel_status *ret_status)
{
    *ret_status =
        (struct cox_rank_channel_status){.known = executor->geometry.mode->limits.rank_words};
    if (!ret_status->known)
        return;
    const struct cox_layout_rank_line *line = cox_state_line(&executor->control, rank, channel);
    const struct cox_rank_word state = cox_state_of_rank(line);
    uint64_t word = state.word, stamp = state.stamp_ns;
    ret_status->state = (uint32_t)(word >> COX_STATE_SHIFT);
    ret_status->sequence = word & ((UINT64_C(1) << COX_STATE_SHIFT) - 1);
    ret_status->age_ns = stamp && stamp <= now ? now - stamp : 0;
}

static enum cox_rank_liveness rank_liveness(struct cox_executor *executor, uint32_t rank)
{
    const struct cox_rank *record = &executor->ranks[rank];
    if (cox_rank_is_dead(record))
        return COX_LIVENESS_DEAD;
    if (cox_executor_sees_left(executor, rank))
        return COX_LIVENESS_LEFT;
    const enum cox_rank_stage stage = cox_rank_stage_of(record);
    return stage == COX_STAGE_VACANT || stage == COX_STAGE_STARTING ? COX_LIVENESS_ABSENT
                                                                    : COX_LIVENESS_ALIVE;
}

/* Its failures so far. */
static void rank_troubles(struct cox_executor *executor, uint32_t rank, uint64_t now,
                          struct cox_rank_status *ret_status)
{
    struct cox_last_death death;
    cox_supervisor_last_death(executor->supervisor, rank, &death);
    ret_status->deaths = death.count;
    /* relaxed: a number for display. */
    ret_status->restarts =
        atomic_load_explicit(&executor->ranks[rank].restarts, memory_order_relaxed);
    /* Its own last lines come first if it is dead: its remaining processes may still write, and
     * after a stop no death is counted. But the replacement that could not be started has written
     * nothing. */
    size_t size = 0;
    if (ret_status->liveness == COX_LIVENESS_DEAD)
        size = cox_supervisor_last_lines(executor->supervisor, rank, ret_status->last_lines,
                                         sizeof ret_status->last_lines);
    if (size == 0)
        memcpy(ret_status->last_lines, death.last_lines, sizeof ret_status->last_lines);
    uint64_t when_ns = cox_last_errors_get(&executor->last_errors, rank, ret_status->last_error,
                                           sizeof ret_status->last_error);
    if (death.when_ns > when_ns) {
        when_ns = death.when_ns;
        memcpy(ret_status->last_error, death.text, sizeof ret_status->last_error);
    }
    ret_status->last_error_age_ns = when_ns && when_ns < now ? now - when_ns : 0;
}

/* The lock of a collector is held while one rank's counters are copied. */
static void rank_stats(struct cox_executor *executor, uint32_t rank,
                       struct cox_rank_status *ret_status)
{
    struct cox_rank_stats stats = {0};
    for (int c = COX_TWO_WAY_COUNT - 1; c >= 0; c--) { /* execute, which has times, is the last */
        struct cox_collector *collector = &executor->collectors[c];
        pthread_mutex_lock(&collector->lock);
        stats = collector->rank_stats[rank];
        pthread_mutex_unlock(&collector->lock);
        ret_status->errors += stats.errors;
        ret_status->stale_replies += stats.stale_replies;
        ret_status->late_replies += stats.late_replies;
    }
    cox_latency_read(&stats.execute, &ret_status->execute);
    ret_status->group_ns = stats.group_ns;
    ret_status->group_wait_ns = stats.group_wait_ns;
}

/* The oldest request on a channel to which the rank owes its reply. */
struct owed {
    uint64_t sequence, published_ns;
    /* by the rank, and by another one */
    bool taken, taken_elsewhere;
};

static bool rank_owes(struct cox_executor *executor, enum cox_channel_id channel, uint32_t rank,
                      struct owed *ret_owed)
{
    struct cox_collector *collector = &executor->collectors[channel];
    const struct cox_entry *oldest = NULL;
    pthread_mutex_lock(&collector->lock);
    for (uint32_t i = 0; i < executor->geometry.depth; i++) {
        const struct cox_entry *entry = &collector->entries[i];
        if (entry->sequence && entry->replies && cox_rank_set_has(&entry->asked, rank) &&
            !cox_rank_set_has(&entry->consumed, rank) &&
            cox_state_done(cox_state_line(&executor->control, rank, channel)) < entry->sequence &&
            (!oldest || entry->sequence < oldest->sequence))
            oldest = entry;
    }
    if (oldest)
        *ret_owed =
            (struct owed){.sequence = oldest->sequence, .published_ns = oldest->published_ns};
    for (uint32_t other = 0; oldest && other < collector->rank_count; other++)
        if (cox_rank_set_has(&oldest->asked, other) &&
            cox_state_taken(cox_state_line(&executor->control, other, channel)) >= oldest->sequence)
            *(other == rank ? &ret_owed->taken : &ret_owed->taken_elsewhere) = true;
    pthread_mutex_unlock(&collector->lock);
    return oldest != NULL;
}

/* Says of a rank that has not taken a request which others have, or that cannot go on in one, since
 * when, and what holds its process. The same words as long as it is so. */
static void rank_describe_hold(struct cox_executor *executor, uint32_t rank, uint64_t now,
                               struct cox_rank_status *status)
{
    char hold[COX_PEER_HOLD_SIZE], time[16] = "?";
    struct owed owed;
    for (int c = 0; c < COX_TWO_WAY_COUNT && !status->trouble[0]; c++) {
        const enum cox_channel_id channel = (enum cox_channel_id)c;
        if (!rank_owes(executor, channel, rank, &owed) || owed.published_ns > now ||
            now - owed.published_ns < (owed.taken ? HELD_NS : UNTAKEN_NS))
            continue;
        cox_peer_read_hold(status->serving_pid, hold);
        if (!hold[0] && (owed.taken || !owed.taken_elsewhere))
            continue;
        struct timespec clock;
        struct tm parts;
        clock_gettime(CLOCK_REALTIME, &clock);
        const uint64_t clock_ns =
            (uint64_t)clock.tv_sec * COX_NSEC_PER_SEC + (uint64_t)clock.tv_nsec;
        const time_t since =
            (time_t)((clock_ns - (cox_now_ns() - owed.published_ns)) / COX_NSEC_PER_SEC);
        if (gmtime_r(&since, &parts))
            strftime(time, sizeof time, "%H:%M:%S", &parts);
        snprintf(status->trouble, sizeof status->trouble, "%s %s %" PRIu64 " since %s UTC%s%s",
                 owed.taken ? "is in" : "has not taken", cox_channel_name(channel), owed.sequence,
                 time, status->stopped ? "" : ": ",
                 status->stopped ? ""
                 : hold[0]       ? hold
                                 : "its process sleeps, or waits for a processor");
    }
}

static void rank_status(struct cox_executor *executor, uint32_t rank, uint64_t now,
                        struct cox_rank_status *ret_status)
{
    struct cox_supervisor *supervisor = executor->supervisor;
    memset(ret_status, 0, sizeof *ret_status);
    cox_supervisor_see_dump(supervisor, rank); /* no request waits for the ranks of an idle group */
    ret_status->pid = cox_rank_pid(&executor->ranks[rank]);
    ret_status->serving_pid = cox_rank_serving_pid(&executor->ranks[rank]);
    ret_status->incarnation = cox_rank_incarnation(&executor->ranks[rank]);
    ret_status->liveness = rank_liveness(executor, rank);
    if (ret_status->liveness == COX_LIVENESS_DEAD) {
        struct cox_exit how = {0};
        cox_supervisor_describe(supervisor, rank, ret_status->death, sizeof ret_status->death);
        cox_supervisor_dead(supervisor, rank, &how);
        ret_status->signal = how.known ? how.signal : 0;
        ret_status->exit_status = how.known && !how.signal ? how.exit_status : -1;
    } else if (!executor->remote.transport) {
        ret_status->stopped = cox_peer_stopped(ret_status->serving_pid);
        cox_peer_cpu_time(ret_status->serving_pid, &ret_status->cpu_ns);
        cox_peer_resident(ret_status->serving_pid, &ret_status->resident_bytes);
        if (ret_status->liveness == COX_LIVENESS_ALIVE &&
            executor->geometry.mode->limits.rank_words)
            rank_describe_hold(executor, rank, now, ret_status);
    }
    const struct cox_transport *transport = executor->remote.transport;
    if (transport && transport->process && ret_status->liveness != COX_LIVENESS_DEAD) {
        struct cox_transport_process process = {0};
        transport->process(transport->context, rank, &process);
        ret_status->stopped = process.stopped;
        ret_status->cpu_ns = process.cpu_ns;
        ret_status->resident_bytes = process.resident_bytes;
    }
    cox_executor_node(executor, rank, ret_status->node, sizeof ret_status->node);
    if (transport && transport->trouble)
        transport->trouble(transport->context, rank, ret_status->trouble,
                           sizeof ret_status->trouble);
    rank_troubles(executor, rank, now, ret_status);
    rank_stats(executor, rank, ret_status);
    if (ret_status->liveness == COX_LIVENESS_LEFT)
        snprintf(ret_status->death, sizeof ret_status->death,
                 "rank %" PRIu32 " (pid %jd) left the group, its process lives", rank,
                 (intmax_t)ret_status->pid);
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
        channel_status(executor, rank, (enum cox_channel_id)c, now, &ret_status->channels[c]);
}

/* True if the rank has not replied yet to a request. The lock is held. */
static bool rank_late(struct cox_executor *executor, struct cox_collector *collector,
                      const struct cox_entry *entry, uint32_t rank)
{
    if (!cox_rank_set_has(&entry->asked, rank) || cox_rank_set_has(&entry->consumed, rank) ||
        rank_liveness(executor, rank) == COX_LIVENESS_DEAD)
        return false;
    cox_tokens_update(collector->channel->tokens, rank);
    return cox_state_done(cox_state_line(&executor->control, rank, collector->channel->id)) <
           entry->sequence;
}

/* The lock is held. */
static void oldest_status(struct cox_executor *executor, struct cox_collector *collector,
                          uint64_t now, struct cox_oldest_status *ret_status)
{
    const enum cox_channel_id channel = collector->channel->id;
    const struct cox_entry *oldest = NULL;
    for (uint32_t i = 0; i < executor->geometry.depth; i++) {
        const struct cox_entry *entry = &collector->entries[i];
        if (entry->sequence && !entry->ended && (!oldest || entry->sequence < oldest->sequence))
            oldest = entry;
    }
    if (!oldest || !oldest->published_ns)
        return;
    uint64_t moved_ns = oldest->published_ns;
    ret_status->sequence = oldest->sequence;
    if (oldest->deadline_ns != COX_DEADLINE_NEVER && oldest->deadline_ns > oldest->submitted_ns)
        ret_status->limit_ns = oldest->deadline_ns - oldest->submitted_ns;
    for (uint32_t rank = 0; rank < collector->rank_count; rank++) {
        struct cox_rank_channel_status state;
        channel_status(executor, rank, channel, now, &state);
        if (state.age_ns && now - state.age_ns > moved_ns)
            moved_ns = now - state.age_ns;
        if (rank_late(executor, collector, oldest, rank))
            cox_rank_set_add(&ret_status->owing, rank);
    }
    ret_status->still_ns = now > moved_ns ? now - moved_ns : 0;
}

static void collector_status(struct cox_executor *executor, enum cox_channel_id channel,
                             uint64_t now, struct cox_executor_status *ret_status)
{
    struct cox_collector *collector = &executor->collectors[channel];
    ret_status->channels[channel].request_size_max =
        executor->geometry.channels[channel].frame_size - COX_PREFIX_SIZE;
    pthread_mutex_lock(&collector->lock);
    ret_status->channels[channel].published = collector->published;
    ret_status->channels[channel].ended = collector->ended;
    cox_stats_read(&collector->stats, &ret_status->channels[channel].stats);
    ret_status->channels[channel].stats.large_held_bytes = cox_collector_held_bytes(collector);
    for (uint32_t i = 0; i < executor->geometry.depth; i++) {
        const struct cox_entry *entry = &collector->entries[i];
        if (entry->sequence && !entry->ended)
            ret_status->channels[channel].in_flight++;
        for (uint32_t rank = 0; rank < collector->rank_count; rank++)
            if (entry->sequence && entry->ended && entry->replies &&
                rank_late(executor, collector, entry, rank))
                cox_rank_set_add(&ret_status->channels[channel].late, rank);
    }
    oldest_status(executor, collector, now, &ret_status->channels[channel].oldest);
    pthread_mutex_unlock(&collector->lock);
}

uint64_t cox_executor_refused_connections(struct cox_executor *executor)
{
    const struct cox_transport *transport = executor->remote.transport;
    return transport && transport->refused ? transport->refused(transport->context) : 0;
}

void cox_executor_read_status(struct cox_executor *executor, struct cox_executor_status *ret_status,
                              struct cox_rank_status *ret_ranks)
{
    uint64_t now = cox_now_ns();
    *ret_status = (struct cox_executor_status){
        .name = cox_executor_name(executor),
        .attach = executor->attach,
        .engine_state = cox_engine_state_name(cox_executor_engine_state(executor)),
        .rank_count = executor->geometry.rank_count,
        .depth = executor->geometry.depth,
        .partially_paused = cox_executor_partially_paused(executor),
        .epoch = cox_executor_epoch(executor),
        .incarnation = executor->control.group_incarnation,
        .uptime_ns = now - executor->started_ns,
        .spin_ns = executor->geometry.spin_ns,
        .legacy = !executor->geometry.mode->limits.extensions,
        .nested_steps = !executor->geometry.mode->limits.extensions,
        .flight_max = executor->geometry.mode->limits.extensions ? executor->geometry.depth : 1,
        .stopping = atomic_load_explicit(&executor->stopping, memory_order_acquire),
    };
    pthread_mutex_lock(&executor->memory_lock);
    ret_status->socket = cox_executor_socket(executor);
    pthread_mutex_unlock(&executor->memory_lock);
    cox_peer_cpu_time(getpid(), &ret_status->cpu_ns);
    const uint64_t unknown_ns =
        cox_last_errors_get(&executor->last_errors, COX_LAST_ERROR_UNKNOWN,
                            ret_status->unknown_error, sizeof ret_status->unknown_error);
    ret_status->unknown_error_age_ns = unknown_ns && unknown_ns < now ? now - unknown_ns : 0;
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
        collector_status(executor, (enum cox_channel_id)c, now, ret_status);
    for (uint32_t rank = 0; ret_ranks && rank < executor->geometry.rank_count; rank++) {
        rank_status(executor, rank, now, &ret_ranks[rank]);
        ret_status->deaths += ret_ranks[rank].deaths;
        ret_status->restarts += ret_ranks[rank].restarts;
    }
}

/* ---- stacks ---- */

/* What the rank is at on the channel where it has been longest. */
static void target_describe(struct cox_executor *executor, uint32_t rank, uint64_t now,
                            struct cox_stacks_target *target)
{
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
        struct owed owed;
        const enum cox_channel_id channel = (enum cox_channel_id)c;
        if (!rank_owes(executor, channel, rank, &owed) || owed.published_ns >= now ||
            now - owed.published_ns <= target->age_ns)
            continue;
        target->age_ns = now - owed.published_ns;
        snprintf(target->request, sizeof target->request, "%s %s %" PRIu64,
                 owed.taken ? "is in" : "has not taken", cox_channel_name(channel), owed.sequence);
    }
}

/* How a dead rank ended, its last lines, and where its core is. */
static void target_bury(struct cox_executor *executor, uint32_t rank,
                        struct cox_stacks_target *target)
{
    char pattern[128] = "";
    cox_report_death(executor->supervisor, rank, target->why, sizeof target->why);
    if (!strstr(target->why, "(core dumped)"))
        return;
    FILE *file = fopen("/proc/sys/kernel/core_pattern", "re");
    if (file && !fgets(pattern, sizeof pattern, file))
        pattern[0] = '\0';
    if (file)
        fclose(file);
    pattern[strcspn(pattern, "\n")] = '\0';
    const size_t used = strlen(target->why);
    if (strstr(pattern, "systemd-coredump"))
        snprintf(target->why + used, sizeof target->why - used, "; its core: coredumpctl info %jd",
                 (intmax_t)target->pid);
    else if (pattern[0])
        snprintf(target->why + used, sizeof target->why - used,
                 "; where its core is: %s (kernel.core_pattern)", pattern);
}

static void target_fill(struct cox_executor *executor, uint32_t rank, uint64_t now,
                        struct cox_stacks_target *target)
{
    const enum cox_rank_liveness liveness = rank_liveness(executor, rank);
    *target = (struct cox_stacks_target){.rank = rank,
                                         .pid = cox_rank_serving_pid(&executor->ranks[rank])};
    if (liveness == COX_LIVENESS_DEAD)
        target_bury(executor, rank, target);
    else if (target->pid <= 0 || liveness == COX_LIVENESS_ABSENT)
        snprintf(target->why, sizeof target->why, "it has no process");
    else if (executor->remote.transport && !executor->remote.transport->stacks)
        snprintf(target->why, sizeof target->why, "it is a process of another machine");
    else if (!executor->remote.transport && target->pid == getpid())
        snprintf(target->why, sizeof target->why, "it is a thread of the coordinator");
    if (liveness == COX_LIVENESS_ALIVE)
        target_describe(executor, rank, now, target);
}

/* Those of other machines, which read them. */
static void targets_fetch(struct cox_executor *executor, uint64_t deadline_ns,
                          struct cox_stacks_target *targets, uint32_t count)
{
    const struct cox_transport *transport = executor->remote.transport;
    struct cox_rank_set asked = {{0}};
    struct cox_transport_stacks *list = calloc(executor->geometry.rank_count, sizeof *list);
    for (uint32_t i = 0; i < count; i++)
        if (!targets[i].why[0])
            cox_rank_set_add(&asked, targets[i].rank);
    if (list)
        transport->stacks(transport->context, &asked, deadline_ns, list);
    for (uint32_t i = 0; i < count; i++) {
        if (targets[i].why[0])
            continue;
        const struct cox_transport_stacks *from = list ? &list[targets[i].rank] : NULL;
        targets[i].text = from ? from->text : NULL;
        if (!targets[i].text)
            snprintf(targets[i].why, sizeof targets[i].why, "%s", from ? from->why : "no memory");
    }
    free(list);
}

static uint32_t stacks_targets(void *context, const struct cox_rank_set *asked,
                               uint64_t deadline_ns, struct cox_stacks_target *targets)
{
    struct cox_executor *executor = context;
    const uint64_t now = cox_now_ns();
    uint32_t count = 0;
    for (uint32_t rank = 0; executor->supervisor && rank < executor->geometry.rank_count; rank++)
        if (!asked || cox_rank_set_has(asked, rank))
            target_fill(executor, rank, now, &targets[count++]);
    if (executor->remote.transport && executor->remote.transport->stacks)
        targets_fetch(executor, deadline_ns, targets, count);
    return count;
}

int cox_executor_open_incidents(struct cox_executor *executor, struct cox_error *err)
{
    struct cox_incidents *incidents = &executor->incidents;
    int r = cox_incidents_open(incidents, err);
    if (r)
        return r;
    incidents->targets = stacks_targets;
    incidents->context = executor;
    incidents->log = &executor->options.hooks.log;
    incidents->rank_count = executor->geometry.rank_count;
    const struct cox_executor_remote *remote = &executor->remote;
    incidents->off = executor->options.recorder.stacks == COX_STACKS_ON_REQUEST ||
                     remote->forwarded || (remote->transport && !remote->transport->stacks);
    incidents->filed = executor->options.recorder.crash_dir != NULL;
    for (int c = 0; c < COX_TWO_WAY_COUNT && !incidents->off; c++)
        executor->collectors[c].incidents = incidents;
    return 0;
}

int cox_executor_stacks(struct cox_executor *executor, const struct cox_rank_set *asked,
                        uint64_t deadline_ns, struct cox_stacks **ret_stacks)
{
    _cox_cleanup_(cox_executor_exit) struct cox_executor *inside = cox_executor_enter(executor);
    const uint32_t count = inside->geometry.rank_count, most = cox_stacks_at_a_time();
    const uint64_t rounds = (count + most - 1) / most;
    /* A node that does not reply costs no more than the time of one that has it. */
    const uint64_t round_ms = inside->remote.transport ? COX_STACKS_MS : COX_STACKS_BUSY_MS;
    return cox_incidents_gather(
        &inside->incidents, asked,
        cox_deadline_min(deadline_ns, cox_deadline_after_ms(rounds * round_ms)), ret_stacks);
}

void cox_executor_keep_stacks(struct cox_executor *executor, struct cox_stacks *stacks)
{
    cox_incidents_keep(&executor->incidents, stacks);
}

void cox_executor_last_stacks(struct cox_executor *executor,
                              void (*take)(void *context, const struct cox_stacks *stacks),
                              void *context)
{
    cox_incidents_last(&executor->incidents, take, context);
}
