/* control_reply_recover: recovery of a group by request: commands, replacements, and its state. */
#include "channel/base/idioms.h"
#include "coordinator/executor/core.h"
#include "coordinator/executor/requests_internal.h"
#include "coordinator/recovery/recovery.h"
#include "proto/control.pb-c.h"
#include "proto/message.h"
#include "control_reply.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#define TIMEOUT_MS_DEFAULT 60000
#define COMMAND_RESTART 5

typedef CoxswainControl__RecoverRequest recover_request;
typedef CoxswainControl__RecoverReply recover_reply;
typedef CoxswainControl__RecoverResult result_message;

CoxswainControl__RecoveryStatus *cox_control_reply_recovery(const struct cox_control_source *source,
                                                            struct cox_arena *arena)
{
    struct cox_recovery_status status;
    CoxswainControl__RecoveryStatus *message =
        cox_message_new(arena, &coxswain_control__recovery_status__descriptor);
    if (!message)
        return NULL;
    cox_recovery_status(source->phase.recovery, &status);
    COX_SET(message, on_death, (uint32_t)status.on_death);
    COX_SET(message, recent_deaths, status.recent_deaths);
    COX_SET(message, restart_max, status.restart_max);
    message->replacements = cox_control_reply_phase_new("replacement", &status.replacements, arena);
    message->doing = cox_message_text(arena, status.doing);
    return message;
}

static void result_add(recover_reply *reply, struct cox_arena *arena, uint32_t rank,
                       const struct cox_recover_result *result)
{
    result_message *message = cox_message_new(arena, &coxswain_control__recover_result__descriptor);
    if (!message)
        return;
    COX_SET(message, rank, rank);
    COX_SET(message, result, result->result);
    if (result->device >= 0)
        COX_SET(message, device, result->device);
    message->text = cox_message_text(arena, result->text);
    reply->ranks[reply->n_ranks++] = message;
}

/* Returns 0 or -ENOMEM; the result is in the reply. */
static int command_run(const struct cox_control_source *source, const recover_request *request,
                       uint64_t deadline_ns, struct cox_arena *arena, recover_reply *reply)
{
    struct cox_error error = {0};
    uint32_t rank_count = cox_executor_rank_count(source->phase.executor);
    _cox_cleanup_(cox_free_ptr) struct cox_recover_result *results =
        calloc(rank_count, sizeof *results);
    if (!results)
        return -ENOMEM;
    int r = cox_recovery_command(source->phase.recovery, (enum cox_recover_command)request->command,
                                 deadline_ns, results, &error);
    reply->error = r ? cox_control_reply_error(arena, error.code, error.text) : NULL;
    /* A refused command has asked no rank. */
    for (uint32_t rank = 0; r != COX_STATE && rank < rank_count; rank++)
        result_add(reply, arena, rank, &results[rank]);
    return 0;
}

/* Describes the rank's present state. */
static int restart_result(const struct cox_control_source *source, uint32_t rank, int r,
                          bool replaced, struct cox_recover_result *ret_result)
{
    struct cox_executor_status status;
    _cox_cleanup_(cox_free_ptr) struct cox_rank_status *ranks =
        calloc(cox_executor_rank_count(source->phase.executor), sizeof *ranks);
    if (!ranks)
        return -ENOMEM;
    cox_executor_read_status(source->phase.executor, &status, ranks);
    *ret_result = (struct cox_recover_result){.device = -1, .result = r};
    if (replaced)
        snprintf(ret_result->text, sizeof ret_result->text,
                 "replaced by process %jd (incarnation %" PRIu32 ")", (intmax_t)ranks[rank].pid,
                 ranks[rank].incarnation);
    else if (r == 0)
        snprintf(ret_result->text, sizeof ret_result->text,
                 "it lives (pid %jd), nothing was to be done", (intmax_t)ranks[rank].pid);
    else
        snprintf(ret_result->text, sizeof ret_result->text, "not replaced: %s", cox_status_text(r));
    return 0;
}

static int restart_one(const struct cox_control_source *source, uint32_t rank, bool kill,
                       uint64_t deadline_ns, struct cox_arena *arena, recover_reply *reply)
{
    struct cox_error error = {0};
    struct cox_recover_result result;
    bool replaced;
    int r =
        cox_recovery_restart(source->phase.recovery, rank, kill, deadline_ns, &replaced, &error);
    if (r && !reply->error) /* the first failure is the reply's */
        reply->error = cox_control_reply_error(arena, error.code, error.text);
    r = restart_result(source, rank, r, replaced, &result);
    if (!r)
        result_add(reply, arena, rank, &result);
    return r;
}

static int restart_dead(const struct cox_control_source *source, uint64_t deadline_ns,
                        struct cox_arena *arena, recover_reply *reply)
{
    struct cox_executor_status status;
    uint32_t rank_count = cox_executor_rank_count(source->phase.executor);
    _cox_cleanup_(cox_free_ptr) struct cox_rank_status *ranks = calloc(rank_count, sizeof *ranks);
    if (!ranks)
        return -ENOMEM;
    cox_executor_read_status(source->phase.executor, &status, ranks);
    int r = 0;
    for (uint32_t rank = 0; !r && rank < rank_count; rank++)
        /* A rank that is being replaced is waited for. */
        if (ranks[rank].liveness != COX_LIVENESS_ALIVE)
            r = restart_one(source, rank, false, deadline_ns, arena, reply);
    /* All live, but the last order's init did not finish. */
    struct cox_recovery_status recovery;
    cox_recovery_status(source->phase.recovery, &recovery);
    return !r && !reply->n_ranks && recovery.unready
               ? restart_one(source, 0, false, deadline_ns, arena, reply)
               : r;
}

int cox_control_reply_recover(const struct cox_control_source *source,
                              const recover_request *request, struct cox_arena *arena,
                              recover_reply **ret_reply, struct cox_error *err)
{
    uint32_t rank_count = cox_executor_rank_count(source->phase.executor);
    bool is_restart = request->command == COMMAND_RESTART;
    if (!source->phase.recovery)
        return cox_fail(err, COX_STATE, COX_CONTROL_INITIALIZING);
    if (!request->has_command || request->command > COMMAND_RESTART)
        return cox_fail(err, COX_INVALID, "no such recovery command: expected 0 to %d",
                        COMMAND_RESTART);
    if (!is_restart && (request->has_rank || request->kill))
        return cox_fail(err, COX_INVALID, "%s is for all ranks",
                        cox_recover_command_name((enum cox_recover_command)request->command));
    if (request->kill && !request->has_rank)
        return cox_fail(err, COX_INVALID, "no rank to kill was given");
    if (request->has_rank && request->rank >= rank_count)
        return cox_fail(err, COX_INVALID, "there is no rank %" PRIu32 ": the group has %" PRIu32,
                        request->rank, rank_count);
    uint64_t deadline_ns = cox_control_reply_deadline(request->has_timeout_ms, request->timeout_ms,
                                                      TIMEOUT_MS_DEFAULT);
    recover_reply *reply = cox_message_new(arena, &coxswain_control__recover_reply__descriptor);
    if (!reply || !(reply->ranks = cox_arena_alloc(arena, rank_count * sizeof *reply->ranks)))
        return -ENOMEM;
    int r;
    if (!is_restart)
        r = command_run(source, request, deadline_ns, arena, reply);
    else if (request->has_rank)
        r = restart_one(source, request->rank, request->kill, deadline_ns, arena, reply);
    else
        r = restart_dead(source, deadline_ns, arena, reply);
    reply->engine_state =
        cox_message_lend(cox_engine_state_name(cox_executor_engine_state(source->phase.executor)));
    *ret_reply = reply;
    return r;
}
