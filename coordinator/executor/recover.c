/* recover: the recovery commands of requests.h behind their state gate.
 *
 *            pause, pause-net                reinit
 *   NORMAL ------------------.          .-----------> READY ---.
 *   ABNORMAL ----------------+--> PAUSE                        | start
 *   BUSY --------------------'          `----------------------+------> NORMAL
 *                                              start
 *   clear is legal everywhere and changes nothing. A pause that failed changes nothing either, but
 *   may have paused some ranks: then start is legal as well, since nothing else could undo that.
 *
 * An init makes any state NORMAL, one that is said again all but PAUSE and READY; a death makes
 * NORMAL ABNORMAL. BUSY is not kept: it is NORMAL with a step in flight. What would be NORMAL is
 * ABNORMAL from when a rank was replaced, or an init that the ranks got has failed, until one
 * succeeds: ranks have nothing to run steps on.
 */
#include "channel/base/idioms.h"
#include "coordinator/collector/reentrancy.h"
#include "proto/executor.pb-c.h"
#include "core.h"
#include "engine_gate.h"
#include "executor_internal.h"
#include "requests_internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define TYPE(name) COXSWAIN__EXECUTE_TYPE__##name
#define FROM(state) (1u << COX_ENGINE_##state)
#define FROM_ANY 0x3fu

static const struct {
    const char *name;
    const char *wire;
    Coxswain__ExecuteType type;
    /* set of states */
    uint32_t from;
    /* -1: stays */
    int to;
} commands[] = {
    [COX_RECOVER_PAUSE] = {"pause", "CMD_PAUSE_ENGINE", TYPE(PAUSE_COMMAND_EXEC),
                           FROM(NORMAL) | FROM(ABNORMAL) | FROM(BUSY), COX_ENGINE_PAUSE},
    [COX_RECOVER_PAUSE_NET] = {"pause-net", "CMD_PAUSE_ENGINE_ROCE", TYPE(PAUSE_COMMAND_EXEC_ROCE),
                               FROM(NORMAL) | FROM(ABNORMAL) | FROM(BUSY), COX_ENGINE_PAUSE},
    [COX_RECOVER_CLEAR] = {"clear", "CMD_CLEAR_TRANSER", TYPE(CLEAR_COMMAND_EXEC), FROM_ANY, -1},
    [COX_RECOVER_REINIT] = {"reinit", "CMD_REINIT_NPU", TYPE(RECOVER_COMMAND_EXEC), FROM(PAUSE),
                            COX_ENGINE_READY},
    [COX_RECOVER_START] = {"start", "CMD_START_ENGINE", TYPE(START_COMMAND_EXEC),
                           FROM(READY) | FROM(PAUSE), COX_ENGINE_NORMAL},
};
#define COMMAND_COUNT (sizeof commands / sizeof commands[0])

const char *cox_recover_command_name(enum cox_recover_command command)
{
    return (size_t)command < COMMAND_COUNT ? commands[command].name : "unknown";
}

/* The command is legal. Earlier steps are in flight, and later ones are refused: none reaches a
 * rank after its reply to the command. */
static void recover_gate_steps(struct cox_executor *executor, enum cox_recover_command command)
{
    struct cox_collector *collector = &executor->collectors[COX_CHANNEL_EXECUTE];
    pthread_mutex_lock(&executor->recover_lock);
    executor->gates_steps = commands[command].name;
    pthread_mutex_unlock(&executor->recover_lock);
    /* A submit that was checked before is still inside, or has published. */
    pthread_mutex_lock(&collector->submit_lock);
    pthread_mutex_unlock(&collector->submit_lock);
}

struct recover_reader {
    struct cox_recover_result *results;
    bool extensions;
    /* the command reached the ranks' queues */
    bool asked;
};

static void recover_read_replies(void *context, const struct cox_completion *completion)
{
    struct recover_reader *reader = context;
    reader->asked = true;
    for (uint32_t rank = 0; rank < completion->rank_count; rank++) {
        struct cox_recover_result *result = &reader->results[rank];
        const struct cox_rank_result *reply = &completion->ranks[rank];
        const Coxswain__ExecuteResponse *response = reply->response;
        if (response &&
            response->result_case == COXSWAIN__EXECUTE_RESPONSE__RESULT_RECOVER_COMMAND_RESPONSE &&
            response->recover_command_response) {
            const Coxswain__RecoverCommandResponse *said = response->recover_command_response;
            result->device = said->npu_device_id;
            /* Without a result the command counts as failed. Except for a legacy rank, whose
             * protobuf omits a value of 0; its result is the message itself. */
            result->result =
                said->has_command_result || !reader->extensions ? said->command_result : -1;
            snprintf(result->text, sizeof result->text, "%s",
                     said->error_msg ? said->error_msg : "");
        } else if (reply->text) {
            snprintf(result->text, sizeof result->text, "%s", reply->text);
        } else {
            snprintf(result->text, sizeof result->text, "no reply");
        }
    }
}

/* recover_lock is held. */
static bool is_legal(const struct cox_executor *executor, size_t command)
{
    return commands[command].from & (1u << executor->engine_state) ||
           (command == COX_RECOVER_START && executor->partially_paused);
}

static int recover_refuse(struct cox_executor *executor, enum cox_recover_command command,
                          struct cox_error *err)
{
    char legal[128] = "";
    for (size_t i = 0; i < COMMAND_COUNT; i++) {
        size_t used = strlen(legal);
        if (is_legal(executor, i))
            snprintf(legal + used, sizeof legal - used, "%s%s", used ? ", " : "", commands[i].name);
    }
    return cox_fail(err, COX_STATE, "%s is not legal in state %s: legal are %s%s",
                    commands[command].name, cox_engine_state_name(executor->engine_state), legal,
                    executor->engine_state == COX_ENGINE_INIT
                        ? "; no init was sent to its ranks: the program that drives this group "
                          "decides itself when it sends requests"
                        : "");
}

/* For a pause that has failed. A rank that is stuck is paused; one that has not replied may be. */
static bool is_partially_paused(const struct recover_reader *reader, uint32_t rank_count)
{
    bool partially_paused = false;
    for (uint32_t rank = 0; reader->asked && rank < rank_count; rank++) {
        int32_t result = reader->results[rank].result;
        partially_paused = partially_paused || result == 0 || result == -1 || result == COX_TIMEOUT;
    }
    return partially_paused;
}

/* recover_lock is held. The command has ended with r. */
static void state_move(struct cox_executor *executor, enum cox_recover_command command,
                       const struct recover_reader *reader, int r)
{
    const int to = commands[command].to;
    if (r == 0 && to >= 0)
        executor->engine_state = (enum cox_engine_state)to;
    if (r == 0 && (to == COX_ENGINE_PAUSE || to == COX_ENGINE_NORMAL))
        executor->partially_paused = false;
    else if (r != 0 && to == COX_ENGINE_PAUSE)
        executor->partially_paused = executor->partially_paused ||
                                     is_partially_paused(reader, executor->geometry.rank_count);
    cox_executor_look_state(executor);
}

/* Waits for the turn: one command at a time, because the state must not change between the check
 * and the replies. */
static int recover_enter(struct cox_executor *executor, uint64_t deadline_ns, struct cox_error *err)
{
    const struct timespec until = cox_deadline_timespec(deadline_ns);
    pthread_mutex_lock(&executor->recover_lock);
    while (executor->recovering && cox_now_ns() < deadline_ns)
        pthread_cond_timedwait(&executor->recover_cond, &executor->recover_lock, &until);
    int r = executor->recovering ? COX_TIMEOUT : 0;
    executor->recovering = true;
    pthread_mutex_unlock(&executor->recover_lock);
    return r ? cox_fail(err, r, "another recovery command was running until the deadline") : 0;
}

static int recover_call(struct cox_executor *executor, enum cox_recover_command command,
                        uint64_t deadline_ns, struct recover_reader *reader, struct cox_error *err)
{
    Coxswain__RecoverCommandRequest body = COXSWAIN__RECOVER_COMMAND_REQUEST__INIT;
    Coxswain__ExecuteRequest request = COXSWAIN__EXECUTE_REQUEST__INIT;
    const struct cox_submit_options options = {.size = sizeof(struct cox_submit_options),
                                               .gather = COX_GATHER_ALL,
                                               .deadline_ns = deadline_ns};
    body.command = (char *)(uintptr_t)commands[command].wire;
    COX_SET(&request, execute_type, commands[command].type);
    request.request_case = COXSWAIN__EXECUTE_REQUEST__REQUEST_RECOVER_COMMAND_REQUEST;
    request.recover_command_request = &body;
    return cox_executor_call(executor, &request, &options, recover_read_replies, reader, err);
}

int cox_executor_recover(struct cox_executor *executor, enum cox_recover_command command,
                         uint64_t deadline_ns, struct cox_recover_result *ret_results,
                         struct cox_error *err)
{
    _cox_cleanup_(cox_executor_exit) struct cox_executor *entered = cox_executor_enter(executor);
    (void)entered;
    if ((size_t)command >= COMMAND_COUNT)
        return cox_fail(err, COX_INVALID, "recovery command %d does not exist", (int)command);
    uint32_t rank_count = cox_executor_rank_count(executor);
    for (uint32_t rank = 0; rank < rank_count; rank++)
        ret_results[rank] =
            (struct cox_recover_result){.device = -1, .result = -1, .text = "not asked"};
    if (cox_reentrancy_inside(executor))
        return cox_fail(err, COX_DEADLOCK,
                        "a recovery command from inside a handler or hook would wait for itself");

    /* The lock is released over the call: meanwhile the state can be queried, and other commands
     * fail at their deadline. */
    struct recover_reader reader = {.results = ret_results,
                                    .extensions = executor->geometry.mode->limits.extensions};
    int r = recover_enter(executor, deadline_ns, err);
    if (r)
        return r;
    pthread_mutex_lock(&executor->recover_lock);
    if (!is_legal(executor, command))
        r = recover_refuse(executor, command, err);
    pthread_mutex_unlock(&executor->recover_lock);
    if (r == 0 && command != COX_RECOVER_CLEAR)
        recover_gate_steps(executor, command);
    if (r == 0)
        r = recover_call(executor, command, deadline_ns, &reader, err);
    for (uint32_t rank = 0; r == 0 && rank < rank_count; rank++)
        if (ret_results[rank].result != 0)
            r = cox_fail(err, COX_REJECTED, "%s: rank %" PRIu32 " replied %" PRId32 ": %s",
                         commands[command].name, rank, ret_results[rank].result,
                         ret_results[rank].text);
    pthread_mutex_lock(&executor->recover_lock);
    state_move(executor, command, &reader, r);
    executor->recovering = false;
    executor->gates_steps = NULL;
    pthread_cond_broadcast(&executor->recover_cond);
    pthread_mutex_unlock(&executor->recover_lock);
    return r;
}
