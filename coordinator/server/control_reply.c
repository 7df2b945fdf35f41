#include "control_reply.h"

#include "channel/base/idioms.h"
#include "channel/recorder/recorder_layout.h"
#include "channel/shm/geometry.h"
#include "channel/socket/closer.h"
#include "channel/socket/control_socket.h"
#include "coordinator/collector/stats.h"
#include "coordinator/executor/core.h"
#include "proto/control.pb-c.h"
#include "proto/message.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef CoxswainControl__StatusReply status_reply;
typedef CoxswainControl__RankStatus rank_message;
typedef CoxswainControl__ChannelStatus channel_message;
typedef CoxswainControl__PhaseStatus phase_message;
typedef CoxswainControl__ServingStatus serving_message;

/* How long a node may take to send the recorder of a rank. */
#define RECORDER_MS 2000
/* The stacks of 128 ranks take 24 s at most. */
#define STACKS_MS 30000
/* Of the texts of all ranks in one reply. */
#define STACKS_SIZE_MAX ((size_t)12 << 20)
#define STACKS_CUT                                                                                 \
    "\nnot there: the rest, which is too much for one reply: ask for this rank alone\n"

/* The descriptor of a message. */
#define TYPE(name) &coxswain_control__##name##__descriptor

/* ---- status ---- */

/* The numbers of the ranks in a set. */
static void ranks_list(const struct cox_rank_set *set, uint32_t rank_count, struct cox_arena *arena,
                       uint32_t **ret_ranks, size_t *ret_count)
{
    *ret_ranks = cox_arena_alloc(arena, rank_count * sizeof **ret_ranks);
    for (uint32_t rank = 0; *ret_ranks && rank < rank_count; rank++)
        if (cox_rank_set_has(set, rank))
            (*ret_ranks)[(*ret_count)++] = rank;
}

static void rank_channels_fill(rank_message *message, const struct cox_rank_status *status,
                               struct cox_arena *arena)
{
    message->channels =
        cox_message_list(arena, TYPE(rank_channel_status), COX_TWO_WAY_COUNT, &message->n_channels);
    for (size_t c = 0; c < message->n_channels; c++) {
        const struct cox_rank_channel_status *channel = &status->channels[c];
        if (channel->known) {
            COX_SET(message->channels[c], state, channel->state);
            COX_SET(message->channels[c], sequence, channel->sequence);
        }
        if (channel->age_ns)
            COX_SET(message->channels[c], age_ns, channel->age_ns);
    }
}

static void rank_fill(rank_message *message, uint32_t rank, const struct cox_rank_status *status,
                      struct cox_arena *arena)
{
    const bool dead = status->liveness == COX_LIVENESS_DEAD;
    COX_SET(message, rank, rank);
    COX_SET(message, pid, status->pid);
    COX_SET(message, serving_pid, status->serving_pid);
    COX_SET(message, incarnation, status->incarnation);
    COX_SET(message, liveness, (uint32_t)status->liveness);
    COX_SET(message, stopped, status->stopped);
    if (status->cpu_ns)
        COX_SET(message, cpu_ns, status->cpu_ns);
    if (status->resident_bytes)
        COX_SET(message, resident_bytes, status->resident_bytes);
    message->node = cox_message_text(arena, status->node);
    message->trouble = dead ? NULL : cox_message_text(arena, status->trouble);
    message->death = cox_message_text(arena, status->death);
    if (dead)
        COX_SET(message, signal, status->signal);
    if (dead && status->exit_status >= 0)
        COX_SET(message, exit_status, status->exit_status);
    message->last_lines = cox_message_text(arena, status->last_lines);
    COX_SET(message, deaths, status->deaths);
    COX_SET(message, restarts, status->restarts);
    message->last_error = cox_message_text(arena, status->last_error);
    if (message->last_error)
        COX_SET(message, last_error_age_ns, status->last_error_age_ns);
    COX_SET(message, errors, status->errors);
    COX_SET(message, stale_replies, status->stale_replies);
    COX_SET(message, late_replies, status->late_replies);
    if (status->execute.count) {
        COX_SET(message, group_ns, status->group_ns);
        COX_SET(message, group_wait_ns, status->group_wait_ns);
    }
    message->execute = cox_control_reply_phase_new("execute", &status->execute, arena);
    rank_channels_fill(message, status, arena);
}

static void times_fill(channel_message *message, const struct cox_channel_stats *stats,
                       struct cox_arena *arena)
{
    phase_message *detections[] = {
        cox_control_reply_phase_new("death", &stats->death_detection, arena),
        cox_control_reply_phase_new("hang", &stats->hang_detection, arena),
    };
    message->phases =
        cox_message_list(arena, TYPE(phase_status), COX_PHASE_COUNT, &message->n_phases);
    for (uint32_t phase = 0; phase < message->n_phases; phase++)
        cox_control_reply_phase(message->phases[phase], cox_phase_name(phase),
                                &stats->phases[phase], arena);
    message->detections = cox_arena_alloc(arena, sizeof detections);
    for (size_t i = 0; message->detections && i < sizeof detections / sizeof *detections; i++)
        if (detections[i])
            message->detections[message->n_detections++] = detections[i];
}

static CoxswainControl__OldestStatus *oldest_make(const struct cox_oldest_status *status,
                                                  uint32_t rank_count, struct cox_arena *arena)
{
    CoxswainControl__OldestStatus *oldest =
        status->sequence ? cox_message_new(arena, TYPE(oldest_status)) : NULL;
    if (!oldest)
        return NULL;
    COX_SET(oldest, sequence, status->sequence);
    COX_SET(oldest, still_ns, status->still_ns);
    if (status->limit_ns)
        COX_SET(oldest, limit_ns, status->limit_ns);
    ranks_list(&status->owing, rank_count, arena, &oldest->owing_ranks, &oldest->n_owing_ranks);
    return oldest;
}

static void channel_fill(channel_message *message, int id, const struct cox_executor_status *status,
                         struct cox_arena *arena)
{
    const struct cox_channel_stats *stats = &status->channels[id].stats;
    message->name = cox_message_lend(cox_channel_name((enum cox_channel_id)id));
    COX_SET(message, published, status->channels[id].published);
    COX_SET(message, ended, status->channels[id].ended);
    COX_SET(message, in_flight, status->channels[id].in_flight);
    COX_SET(message, submitted, stats->submitted);
    COX_SET(message, completed, stats->completed);
    COX_SET(message, failed, stats->failed);
    COX_SET(message, timeouts, stats->timeouts);
    COX_SET(message, late_replies, stats->late_replies);
    COX_SET(message, divergences, stats->divergences);
    COX_SET(message, rewakes, stats->rewakes);
    COX_SET(message, wakeups, stats->wakeups);
    COX_SET(message, spins, stats->spins);
    COX_SET(message, request_bytes, stats->request_bytes);
    COX_SET(message, reply_bytes, stats->reply_bytes);
    COX_SET(message, large_requests, stats->large_requests);
    COX_SET(message, large_request_bytes, stats->large_request_bytes);
    COX_SET(message, large_replies, stats->large_replies);
    COX_SET(message, large_reply_bytes, stats->large_reply_bytes);
    COX_SET(message, large_held_bytes, stats->large_held_bytes);
    ranks_list(&status->channels[id].late, status->rank_count, arena, &message->late_ranks,
               &message->n_late_ranks);
    message->oldest = oldest_make(&status->channels[id].oldest, status->rank_count, arena);
    times_fill(message, stats, arena);
}

static serving_message *prompts_make(const struct cox_control_source *source,
                                     struct cox_arena *arena)
{
    struct cox_prompts_status status = {0};
    serving_message *message = cox_message_new(arena, TYPE(serving_status));
    if (!message)
        return NULL;
    source->prompts->status(source->hooks.context, &status);
    COX_SET(message, clients, status.client_count);
    COX_SET(message, waiting, status.waiting);
    COX_SET(message, running, status.running);
    COX_SET(message, unread, status.unread);
    COX_SET(message, completed, status.completed);
    COX_SET(message, cancelled, status.cancelled);
    COX_SET(message, generated_tokens, status.generated_tokens);
    COX_SET(message, free_blocks, status.free_blocks);
    COX_SET(message, block_count, status.block_count);
    /* A client sends at most this many before it waits for the first output. */
    COX_SET(message, prompt_count_max,
            status.prompt_count_max ? status.prompt_count_max : UINT32_MAX);
    if (status.text_digest)
        COX_SET(message, text_digest, status.text_digest);
    return message;
}

/* Limits and counts of what the group keeps for clients. */
static void limits_fill(status_reply *reply, const struct cox_control_source *source,
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
    reply->limits = cox_message_list(arena, TYPE(limit_status), sizeof limits / sizeof *limits,
                                     &reply->n_limits);
    for (size_t i = 0; i < reply->n_limits; i++) {
        reply->limits[i]->name = cox_message_lend(limits[i].name);
        COX_SET(reply->limits[i], count, limits[i].count);
        COX_SET(reply->limits[i], max, limits[i].max);
    }
}

struct stacks_copy {
    struct cox_arena *arena;
    status_reply *reply;
};

/* The last stacks cannot be replaced meanwhile. */
static void last_stacks_fill(void *context, const struct cox_stacks *stacks)
{
    struct stacks_copy *copy = context;
    const uint64_t now = cox_now_ns();
    CoxswainControl__StacksStatus *message =
        stacks ? cox_message_new(copy->arena, TYPE(stacks_status)) : NULL;
    if (!message)
        return;
    message->text = cox_arena_strdup(copy->arena, stacks->paragraph);
    COX_SET(message, age_ns, now > stacks->taken_ns ? now - stacks->taken_ns : 0);
    copy->reply->stacks = message;
}

static void group_fill(status_reply *reply, const struct cox_control_source *source,
                       const struct cox_executor_status *status, struct cox_arena *arena)
{
    struct cox_executor *executor = source->phase.executor;
    reply->name = cox_message_lend(status->name);
    reply->attach = cox_message_lend(status->attach);
    reply->engine_state = cox_message_lend(status->engine_state);
    reply->model = cox_message_lend(source->model);
    reply->note = cox_message_lend(source->note[0] ? source->note : NULL);
    reply->refusal = cox_message_lend(source->prompts ? NULL : source->phase.refusal);
    COX_SET(reply, rank_count, status->rank_count);
    COX_SET(reply, depth, status->depth);
    COX_SET(reply, incarnation, status->incarnation);
    COX_SET(reply, uptime_ns, status->uptime_ns);
    if (status->cpu_ns)
        COX_SET(reply, cpu_ns, status->cpu_ns);
    COX_SET(reply, spin_ns, status->spin_ns);
    COX_SET(reply, stopping, status->stopping || source->stopping);
    COX_SET(reply, legacy, status->legacy);
    COX_SET(reply, pid, getpid());
    COX_SET(reply, deaths, status->deaths);
    COX_SET(reply, restarts, status->restarts);
    reply->unknown_error = cox_message_text(arena, status->unknown_error);
    if (reply->unknown_error)
        COX_SET(reply, unknown_error_age_ns, status->unknown_error_age_ns);
    COX_SET(reply, refused_connections, cox_executor_refused_connections(executor));
    cox_executor_last_stacks(executor, last_stacks_fill, &(struct stacks_copy){arena, reply});
    if (source->phase.recovery)
        reply->recovery = cox_control_reply_recovery(source, arena);
    if (source->hooks.weights)
        reply->weights = cox_control_reply_weights_status(source, arena);
    if (source->prompts)
        reply->serving = prompts_make(source, arena);
    if (source->prompts && source->phase.links)
        reply->transfer = cox_control_reply_transfer_status(source, arena);
}

static int status_make(const struct cox_control_source *source, struct cox_arena *arena,
                       control_reply *reply)
{
    struct cox_executor_status status;
    uint32_t rank_count = cox_executor_rank_count(source->phase.executor);
    _cox_cleanup_(cox_free_ptr) struct cox_rank_status *ranks = calloc(rank_count, sizeof *ranks);
    status_reply *message = reply->status = cox_message_new(arena, TYPE(status_reply));
    if (!ranks || !message)
        return -ENOMEM;
    cox_executor_read_status(source->phase.executor, &status, ranks);
    group_fill(message, source, &status, arena);
    message->ranks = cox_message_list(arena, TYPE(rank_status), rank_count, &message->n_ranks);
    for (uint32_t rank = 0; rank < message->n_ranks; rank++)
        rank_fill(message->ranks[rank], rank, &ranks[rank], arena);
    message->channels =
        cox_message_list(arena, TYPE(channel_status), COX_TWO_WAY_COUNT, &message->n_channels);
    for (size_t c = 0; c < message->n_channels; c++)
        channel_fill(message->channels[c], (int)c, &status, arena);
    limits_fill(message, source, arena);
    return 0;
}

/* ---- recorders and stacks ---- */

static int rank_check(const struct cox_control_source *source, bool given, uint32_t rank,
                      struct cox_error *err)
{
    return given && rank >= cox_executor_rank_count(source->phase.executor)
               ? cox_fail(err, COX_INVALID, "the group has no such rank")
               : 0;
}

/* No rank is asked: its recorder is memory, here or on its node. */
static int recorder_make(const struct cox_control_source *source,
                         const CoxswainControl__RecorderRequest *request, struct cox_arena *arena,
                         control_reply *reply, struct cox_error *err)
{
    const uint32_t rank = request->has_rank ? request->rank : COX_RECORDER_COORDINATOR;
    int r = rank_check(source, request->has_rank, rank, err);
    if (r)
        return r;
    const size_t size = cox_recorder_area_size(!request->has_rank);
    CoxswainControl__RecorderReply *message = cox_message_new(arena, TYPE(recorder_reply));
    uint8_t *copy = cox_arena_alloc(arena, size);
    struct cox_error why = {0};
    if (!message || !copy)
        return -ENOMEM;
    r = cox_executor_recorder(source->phase.executor, rank, copy,
                              cox_deadline_after_ms(RECORDER_MS), &why);
    message->has_copy = r == 0;
    message->copy = (ProtobufCBinaryData){.data = copy, .len = size};
    message->error = r && r != COX_NOT_FOUND ? cox_control_reply_error(arena, r, why.text) : NULL;
    reply->recorder = message;
    return 0;
}

static void stacks_fill(CoxswainControl__StacksReply *message, const struct cox_stacks *stacks,
                        struct cox_arena *arena)
{
    const size_t size_max = STACKS_SIZE_MAX / (stacks->count + 1);
    message->text = cox_arena_strdup(arena, stacks->paragraph);
    message->ranks = cox_message_list(arena, TYPE(rank_stacks), stacks->count, &message->n_ranks);
    for (size_t i = 0; i < message->n_ranks; i++) {
        const struct cox_rank_stacks *stack = &stacks->ranks[i];
        CoxswainControl__RankStacks *rank = message->ranks[i];
        COX_SET(rank, rank, stack->rank);
        COX_SET(rank, pid, stack->pid);
        if (stack->age_ns)
            COX_SET(rank, age_ns, stack->age_ns);
        rank->summary = cox_arena_strdup(arena, stack->summary);
        const size_t size = strlen(stack->text) + 1, kept = size < size_max ? size : size_max;
        rank->text = cox_arena_alloc(arena, kept);
        if (rank->text)
            snprintf(rank->text, kept, "%s", stack->text);
        if (rank->text && kept < size)
            snprintf(rank->text + kept - sizeof STACKS_CUT, sizeof STACKS_CUT, STACKS_CUT);
    }
}

/* No rank takes part, so it works while all of them are stuck. */
static int stacks_make(const struct cox_control_source *source,
                       const CoxswainControl__StacksRequest *request, struct cox_arena *arena,
                       control_reply *reply, struct cox_error *err)
{
    struct cox_rank_set asked = {{0}};
    struct cox_stacks *stacks = NULL;
    int r = rank_check(source, request->has_rank, request->rank, err);
    if (r)
        return r;
    if (request->has_rank)
        cox_rank_set_add(&asked, request->rank);
    r = cox_executor_stacks(source->phase.executor, request->has_rank ? &asked : NULL,
                            cox_deadline_after_ms(STACKS_MS), &stacks);
    if (r == COX_TIMEOUT)
        return cox_fail(err, r, "other commands read the stacks all the time");
    reply->stacks = r ? NULL : cox_message_new(arena, TYPE(stacks_reply));
    if (reply->stacks)
        stacks_fill(reply->stacks, stacks, arena);
    cox_stacks_free(stacks);
    return r;
}

/* ---- all ---- */

#define REQUEST(name) COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_##name
#define REPLY(name) COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_##name

int cox_control_reply_make(const struct cox_control_source *source, const control_request *request,
                           struct cox_arena *arena, control_reply *reply, struct cox_error *err)
{
    switch (request->request_case) {
    case REQUEST(STATUS):
        reply->reply_case = REPLY(STATUS);
        return status_make(source, arena, reply);
    case REQUEST(RECORDER):
        reply->reply_case = REPLY(RECORDER);
        return recorder_make(source, request->recorder, arena, reply, err);
    case REQUEST(STACKS):
        reply->reply_case = REPLY(STACKS);
        return stacks_make(source, request->stacks, arena, reply, err);
    case REQUEST(RECOVER):
        reply->reply_case = REPLY(RECOVER);
        return cox_control_reply_recover(source, request->recover, arena, &reply->recover, err);
    case REQUEST(LORA):
        reply->reply_case = REPLY(LORA);
        return cox_control_reply_lora(source, request->lora, arena, &reply->lora, err);
    case REQUEST(WEIGHTS):
        reply->reply_case = REPLY(WEIGHTS);
        return cox_control_reply_weights(source, request->weights, arena, &reply->weights, err);
    default:
        return cox_control_reply_links(source, request, arena, reply, err);
    }
}
