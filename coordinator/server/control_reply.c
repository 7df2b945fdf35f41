#include "control_reply.h"

#include "channel/base/idioms.h"
#include "channel/shm/geometry.h"
#include "channel/socket/closer.h"
#include "channel/socket/control_socket.h"
#include "coordinator/collector/stats.h"
#include "coordinator/executor/core.h"
#include "proto/control.pb-c.h"
#include "proto/wire.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef CoxswainControl__StatusReply status_reply;
typedef CoxswainControl__RankStatus rank_message;
typedef CoxswainControl__RankChannelStatus rank_channel_message;
typedef CoxswainControl__ChannelStatus channel_message;
typedef CoxswainControl__PhaseStatus phase_message;
typedef CoxswainControl__ServingStatus serving_message;

/* Of the texts of all ranks in one reply. */
#define STACKS_SIZE_MAX ((size_t)12 << 20)
#define STACKS_CUT                                                                                 \
    "\nnot there: the rest, which is too much for one reply: ask for this rank alone\n"

/* Sets a field and its has_ beside it. */
#define SET(message, field, value) ((message)->has_##field = true, (message)->field = (value))

int cox_control_reply_phase(phase_message *message, const char *name,
                            const struct cox_phase_stats *stats, struct cox_arena *arena)
{
    coxswain_control__phase_status__init(message);
    message->name = (char *)(uintptr_t)name;
    SET(message, count, stats->count);
    if (stats->count == 0)
        return 0;
    SET(message, p50_ns, stats->p50_ns);
    SET(message, p99_ns, stats->p99_ns);
    SET(message, sum_ns, stats->sum_ns);
    message->n_below = COX_PHASE_BOUND_COUNT;
    message->below = cox_arena_alloc(arena, sizeof stats->below);
    if (!message->below)
        return -ENOMEM;
    memcpy(message->below, stats->below, sizeof stats->below);
    return 0;
}

static int rank_fill(rank_message *message, uint32_t rank, const struct cox_rank_status *status,
                     struct cox_arena *arena)
{
    coxswain_control__rank_status__init(message);
    SET(message, rank, rank);
    SET(message, pid, status->pid);
    SET(message, serving_pid, status->serving_pid);
    SET(message, incarnation, status->incarnation);
    SET(message, liveness, (uint32_t)status->liveness);
    SET(message, stopped, status->stopped);
    if (status->cpu_ns)
        SET(message, cpu_ns, status->cpu_ns);
    if (status->resident_bytes)
        SET(message, resident_bytes, status->resident_bytes);
    if (status->node[0])
        message->node = cox_arena_strdup(arena, status->node);
    if (status->liveness != COX_LIVENESS_DEAD && status->trouble[0])
        message->trouble = cox_arena_strdup(arena, status->trouble);
    message->death = status->death[0] ? cox_arena_strdup(arena, status->death) : NULL;
    if (status->liveness == COX_LIVENESS_DEAD) {
        SET(message, signal, status->signal);
        if (status->exit_status >= 0)
            SET(message, exit_status, status->exit_status);
    }
    message->last_lines =
        status->last_lines[0] ? cox_arena_strdup(arena, status->last_lines) : NULL;
    SET(message, deaths, status->deaths);
    SET(message, restarts, status->restarts);
    if (status->last_error[0]) {
        message->last_error = cox_arena_strdup(arena, status->last_error);
        SET(message, last_error_age_ns, status->last_error_age_ns);
    }
    SET(message, errors, status->errors);
    SET(message, stale_replies, status->stale_replies);
    SET(message, late_replies, status->late_replies);
    if (status->execute.count) {
        SET(message, group_ns, status->group_ns);
        SET(message, group_wait_ns, status->group_wait_ns);
        message->execute = cox_arena_alloc(arena, sizeof *message->execute);
        if (!message->execute ||
            cox_control_reply_phase(message->execute, "execute", &status->execute, arena))
            return -ENOMEM;
    }
    message->n_channels = COX_TWO_WAY_COUNT;
    message->channels = cox_arena_alloc(arena, COX_TWO_WAY_COUNT * sizeof *message->channels);
    rank_channel_message *channels = cox_arena_alloc(arena, COX_TWO_WAY_COUNT * sizeof *channels);
    if (!message->channels || !channels)
        return -ENOMEM;
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
        const struct cox_rank_channel_status *channel = &status->channels[c];
        coxswain_control__rank_channel_status__init(&channels[c]);
        message->channels[c] = &channels[c];
        if (channel->known) {
            SET(&channels[c], state, channel->state);
            SET(&channels[c], sequence, channel->sequence);
        }
        if (channel->age_ns)
            SET(&channels[c], age_ns, channel->age_ns);
    }
    return 0;
}

static int phases_fill(channel_message *message, const struct cox_channel_stats *stats,
                       struct cox_arena *arena)
{
    message->n_phases = COX_PHASE_COUNT;
    message->phases = cox_arena_alloc(arena, COX_PHASE_COUNT * sizeof *message->phases);
    phase_message *phases = cox_arena_alloc(arena, COX_PHASE_COUNT * sizeof *phases);
    int r = message->phases && phases ? 0 : -ENOMEM;
    for (uint32_t phase = 0; r == 0 && phase < COX_PHASE_COUNT; phase++) {
        message->phases[phase] = &phases[phase];
        r = cox_control_reply_phase(&phases[phase], cox_phase_name(phase), &stats->phases[phase],
                                    arena);
    }
    return r;
}

static int detections_fill(channel_message *message, const struct cox_channel_stats *stats,
                           struct cox_arena *arena)
{
    const struct {
        const char *name;
        const struct cox_phase_stats *times;
    } detections[] = {{"death", &stats->death_detection}, {"hang", &stats->hang_detection}};
    const size_t count = sizeof detections / sizeof detections[0];
    message->detections = cox_arena_alloc(arena, count * sizeof *message->detections);
    phase_message *messages = cox_arena_alloc(arena, count * sizeof *messages);
    int r = message->detections && messages ? 0 : -ENOMEM;
    for (size_t i = 0; r == 0 && i < count; i++) {
        if (!detections[i].times->count)
            continue;
        r = cox_control_reply_phase(&messages[i], detections[i].name, detections[i].times, arena);
        message->detections[message->n_detections++] = &messages[i];
    }
    return r;
}

static int oldest_fill(channel_message *message, const struct cox_oldest_status *status,
                       uint32_t rank_count, struct cox_arena *arena)
{
    if (!status->sequence)
        return 0;
    CoxswainControl__OldestStatus *oldest = cox_arena_alloc(arena, sizeof *oldest);
    if (!oldest)
        return -ENOMEM;
    coxswain_control__oldest_status__init(oldest);
    SET(oldest, sequence, status->sequence);
    SET(oldest, still_ns, status->still_ns);
    if (status->limit_ns)
        SET(oldest, limit_ns, status->limit_ns);
    oldest->owing_ranks = cox_arena_alloc(arena, rank_count * sizeof *oldest->owing_ranks);
    if (!oldest->owing_ranks)
        return -ENOMEM;
    for (uint32_t rank = 0; rank < rank_count; rank++)
        if (cox_rank_set_has(&status->owing, rank))
            oldest->owing_ranks[oldest->n_owing_ranks++] = rank;
    message->oldest = oldest;
    return 0;
}

static int channel_fill(channel_message *message, int id, const struct cox_executor_status *status,
                        struct cox_arena *arena)
{
    const struct cox_channel_stats *stats = &status->channels[id].stats;
    coxswain_control__channel_status__init(message);
    message->name = (char *)(uintptr_t)cox_channel_name((enum cox_channel_id)id);
    SET(message, published, status->channels[id].published);
    SET(message, ended, status->channels[id].ended);
    SET(message, in_flight, status->channels[id].in_flight);
    SET(message, submitted, stats->submitted);
    SET(message, completed, stats->completed);
    SET(message, failed, stats->failed);
    SET(message, timeouts, stats->timeouts);
    SET(message, late_replies, stats->late_replies);
    SET(message, divergences, stats->divergences);
    SET(message, rewakes, stats->rewakes);
    SET(message, wakeups, stats->wakeups);
    SET(message, spins, stats->spins);
    SET(message, request_bytes, stats->request_bytes);
    SET(message, reply_bytes, stats->reply_bytes);
    SET(message, bulk_requests, stats->large_requests);
    SET(message, bulk_request_bytes, stats->large_request_bytes);
    SET(message, bulk_replies, stats->large_replies);
    SET(message, bulk_reply_bytes, stats->large_reply_bytes);
    SET(message, bulk_held_bytes, stats->large_held_bytes);
    message->late_ranks = cox_arena_alloc(arena, status->rank_count * sizeof *message->late_ranks);
    if (!message->late_ranks)
        return -ENOMEM;
    for (uint32_t rank = 0; rank < status->rank_count; rank++)
        if (cox_rank_set_has(&status->channels[id].late, rank))
            message->late_ranks[message->n_late_ranks++] = rank;
    int r = oldest_fill(message, &status->channels[id].oldest, status->rank_count, arena);
    if (!r)
        r = phases_fill(message, stats, arena);
    return r ? r : detections_fill(message, stats, arena);
}

static int channels_fill(status_reply *reply, const struct cox_executor_status *status,
                         struct cox_arena *arena)
{
    reply->n_channels = COX_TWO_WAY_COUNT;
    reply->channels = cox_arena_alloc(arena, COX_TWO_WAY_COUNT * sizeof *reply->channels);
    channel_message *channels = cox_arena_alloc(arena, COX_TWO_WAY_COUNT * sizeof *channels);
    int r = reply->channels && channels ? 0 : -ENOMEM;
    for (int c = 0; r == 0 && c < COX_TWO_WAY_COUNT; c++) {
        reply->channels[c] = &channels[c];
        r = channel_fill(&channels[c], c, status, arena);
    }
    return r;
}

static int ranks_fill(status_reply *reply, uint32_t rank_count, const struct cox_rank_status *ranks,
                      struct cox_arena *arena)
{
    reply->n_ranks = rank_count;
    reply->ranks = cox_arena_alloc(arena, rank_count * sizeof *reply->ranks);
    rank_message *messages = cox_arena_alloc(arena, rank_count * sizeof *messages);
    int r = reply->ranks && messages ? 0 : -ENOMEM;
    for (uint32_t rank = 0; r == 0 && rank < rank_count; rank++) {
        reply->ranks[rank] = &messages[rank];
        r = rank_fill(&messages[rank], rank, &ranks[rank], arena);
    }
    return r;
}

static int prompts_fill(status_reply *reply, const struct cox_control_source *source,
                        struct cox_arena *arena)
{
    struct cox_prompts_status status = {0};
    serving_message *message = cox_arena_alloc(arena, sizeof *message);
    if (!message)
        return -ENOMEM;
    source->prompts->status(source->hooks.context, &status);
    coxswain_control__serving_status__init(message);
    SET(message, clients, status.client_count);
    SET(message, waiting, status.waiting);
    SET(message, running, status.running);
    SET(message, unread, status.unread);
    SET(message, completed, status.completed);
    SET(message, cancelled, status.cancelled);
    SET(message, generated_tokens, status.generated_tokens);
    SET(message, free_blocks, status.free_blocks);
    SET(message, block_count, status.block_count);
    /* A client sends at most this many before it waits for the first output. */
    SET(message, prompt_count_max, status.prompt_count_max ? status.prompt_count_max : UINT32_MAX);
    if (status.text_digest)
        SET(message, text_digest, status.text_digest);
    reply->serving = message;
    return 0;
}

/* Limits and counts of what the group keeps for clients. */
static int limits_fill(status_reply *reply, const struct cox_control_source *source,
                       struct cox_arena *arena)
{
    struct cox_control_socket_counts control_socket = {0};
    cox_executor_socket_counts(source->phase.executor, &control_socket);
    const struct {
        const char *name;
        uint64_t count, max;
    } limits[] = {
        {"socket connections", control_socket.clients, control_socket.client_max},
        {"fd store owners", control_socket.fd_owners, control_socket.fd_owner_max},
        {"fd store entries", control_socket.fd_entries, control_socket.fd_entry_max},
        {"fds to close", control_socket.closing, control_socket.closing_max},
        {"closes that hang", control_socket.hanging, COX_CLOSER_THREAD_MAX},
        {"control connections", source->connections, source->connections_max},
        {"clients with prompts", source->prompt_connections, source->prompt_connections_max},
    };
    const size_t count = sizeof limits / sizeof limits[0];
    CoxswainControl__LimitStatus *messages = cox_arena_alloc(arena, count * sizeof *messages);
    reply->limits = cox_arena_alloc(arena, count * sizeof *reply->limits);
    if (!messages || !reply->limits)
        return -ENOMEM;
    for (size_t i = 0; i < count; i++) {
        coxswain_control__limit_status__init(&messages[i]);
        messages[i].name = (char *)(uintptr_t)limits[i].name;
        SET(&messages[i], count, limits[i].count);
        SET(&messages[i], max, limits[i].max);
        reply->limits[i] = &messages[i];
    }
    reply->n_limits = count;
    return 0;
}

int cox_control_reply_stacks(const struct cox_stacks *stacks, struct cox_arena *arena,
                             struct CoxswainControl__StacksReply **ret_reply)
{
    CoxswainControl__StacksReply *reply = cox_arena_alloc(arena, sizeof *reply);
    CoxswainControl__RankStacks *ranks =
        cox_arena_alloc(arena, (stacks->count + 1) * sizeof *ranks);
    if (!reply || !ranks)
        return -ENOMEM;
    coxswain_control__stacks_reply__init(reply);
    reply->text = (char *)(uintptr_t)stacks->paragraph;
    reply->ranks = cox_arena_alloc(arena, (stacks->count + 1) * sizeof *reply->ranks);
    if (!reply->ranks)
        return -ENOMEM;
    const size_t size_max = STACKS_SIZE_MAX / (stacks->count + 1);
    for (uint32_t i = 0; i < stacks->count; i++) {
        const struct cox_rank_stacks *stack = &stacks->ranks[i];
        coxswain_control__rank_stacks__init(&ranks[i]);
        SET(&ranks[i], rank, stack->rank);
        SET(&ranks[i], pid, stack->pid);
        if (stack->age_ns)
            SET(&ranks[i], age_ns, stack->age_ns);
        ranks[i].summary = (char *)(uintptr_t)stack->summary;
        ranks[i].text = (char *)(uintptr_t)stack->text;
        if (strlen(stack->text) > size_max) {
            ranks[i].text = cox_arena_strdup(arena, stack->text);
            if (!ranks[i].text)
                return -ENOMEM;
            snprintf(ranks[i].text + size_max - sizeof STACKS_CUT, sizeof STACKS_CUT, STACKS_CUT);
        }
        reply->ranks[reply->n_ranks++] = &ranks[i];
    }
    *ret_reply = reply;
    return 0;
}

/* ---- status ---- */

struct stacks_copy {
    struct cox_arena *arena;
    status_reply *reply;
};

/* The last stacks cannot be replaced meanwhile. */
static void stacks_fill(void *context, const struct cox_stacks *stacks)
{
    struct stacks_copy *copy = context;
    const uint64_t now = cox_now_ns();
    CoxswainControl__StacksStatus *message =
        stacks ? cox_arena_alloc(copy->arena, sizeof *message) : NULL;
    if (!message)
        return;
    coxswain_control__stacks_status__init(message);
    message->text = cox_arena_strdup(copy->arena, stacks->paragraph);
    SET(message, age_ns, now > stacks->taken_ns ? now - stacks->taken_ns : 0);
    copy->reply->stacks = message;
}

int cox_control_reply_status(const struct cox_control_source *source, struct cox_arena *arena,
                             struct CoxswainControl__StatusReply **ret_status)
{
    struct cox_executor_status status;
    uint32_t rank_count = cox_executor_rank_count(source->phase.executor);
    _cox_cleanup_(cox_free_ptr) struct cox_rank_status *ranks = calloc(rank_count, sizeof *ranks);
    status_reply *reply = cox_arena_alloc(arena, sizeof *reply);
    if (!ranks || !reply)
        return -ENOMEM;
    cox_executor_read_status(source->phase.executor, &status, ranks);
    coxswain_control__status_reply__init(reply);
    reply->name = (char *)(uintptr_t)status.name;
    reply->attach = (char *)(uintptr_t)status.attach;
    reply->engine_state = (char *)(uintptr_t)status.engine_state;
    reply->model = (char *)(uintptr_t)source->model;
    reply->note = (char *)(uintptr_t)(source->note[0] ? source->note : NULL);
    reply->refusal = (char *)(uintptr_t)(source->prompts ? NULL : source->phase.refusal);
    SET(reply, rank_count, rank_count);
    SET(reply, depth, status.depth);
    SET(reply, instance, status.instance);
    SET(reply, uptime_ns, status.uptime_ns);
    if (status.cpu_ns)
        SET(reply, cpu_ns, status.cpu_ns);
    SET(reply, spin_ns, status.spin_ns);
    SET(reply, stopping, status.stopping || source->stopping);
    SET(reply, legacy, status.legacy);
    SET(reply, pid, getpid());
    SET(reply, deaths, status.deaths);
    SET(reply, restarts, status.restarts);
    if (status.unknown_error[0]) {
        reply->unknown_error = cox_arena_strdup(arena, status.unknown_error);
        SET(reply, unknown_error_age_ns, status.unknown_error_age_ns);
    }
    SET(reply, refused_connections, cox_executor_refused_connections(source->phase.executor));
    cox_executor_last_stacks(source->phase.executor, stacks_fill,
                             &(struct stacks_copy){arena, reply});
    int r = ranks_fill(reply, rank_count, ranks, arena);
    if (!r)
        r = channels_fill(reply, &status, arena);
    if (!r)
        r = limits_fill(reply, source, arena);
    if (!r && source->phase.recovery)
        r = cox_control_reply_recovery(source, arena, &reply->recovery);
    if (!r && source->hooks.weights) {
        r = cox_control_reply_weights_status(source, arena, &reply->weights);
        r = r == COX_UNSUPPORTED ? 0 : r;
    }
    if (!r && source->prompts)
        r = prompts_fill(reply, source, arena);
    if (!r && source->prompts && source->phase.links)
        r = cox_control_reply_transfer_status(source, arena, &reply->transfer);
    if (!r)
        *ret_status = reply;
    return r;
}
