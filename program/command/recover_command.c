/* coxswain recover: pauses, reinitializes and resumes a running group, and replaces its ranks. */
#include "coordinator/executor/requests_internal.h"

#include "channel/base/idioms.h"
#include "program/cli/client_command.h"
#include "program/cli/command.h"
#include "program/cli/group_options.h"
#include "proto/control.pb-c.h"

#include <coxswain/requests.h>

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define TIMEOUT_MS 60000
/* The group fails at the timeout, and then sends the reason. */
#define GRACE_MS 10000
#define COMMAND_RESTART 5

typedef CoxswainControl__RecoverReply recover_reply;
typedef CoxswainControl__RecoverResult recover_result;

struct recover_choice {
    uint32_t command;
    struct cox_connection connection;
    bool rank_given;
    uint32_t rank;
    bool kill;
};

static const char *command_name(uint32_t command)
{
    return command == COMMAND_RESTART ? "restart"
                                      : cox_recover_command_name((enum cox_recover_command)command);
}

/* ---- the reply ---- */

static bool is_well(const recover_result *result)
{
    return result->has_result && result->result == 0;
}

static void print(const void *context, const ProtobufCMessage *message)
{
    const struct recover_choice *choice = context;
    const recover_reply *reply = (const recover_reply *)message;
    for (size_t i = 0; i < reply->n_ranks; i++) {
        const recover_result *result = reply->ranks[i];
        printf("rank %" PRIu32 ": ", result->rank);
        if (is_well(result))
            printf("ok");
        else
            printf("%" PRId32, result->has_result ? result->result : -1);
        printf("%s%s\n", result->text ? ": " : "", result->text ? result->text : "");
    }
    if (choice->command == COMMAND_RESTART && !reply->error && reply->n_ranks == 0)
        printf("no rank is dead\n");
}

static void json(const void *context, const ProtobufCMessage *reply, json_t *root)
{
    const struct recover_choice *choice = context;
    (void)reply;
    size_t i;
    json_t *rank;
    json_object_set_new(root, "command", json_string(command_name(choice->command)));
    json_array_foreach(json_object_get(root, "ranks"), i,
                       rank) if (json_is_null(json_object_get(rank, "result")))
        json_object_set_new(rank, "result", json_integer(-1));
}

/* An absent result is a failure, whatever else the reply contains. */
static int reply_check(const recover_reply *reply, struct cox_error *err)
{
    int r = reply->error ? cox_client_error(reply->error, err) : 0;
    for (size_t i = 0; r == 0 && i < reply->n_ranks; i++)
        if (!is_well(reply->ranks[i]))
            r = cox_fail(err, COX_REJECTED, "rank %" PRIu32 " failed", reply->ranks[i]->rank);
    return r;
}

/* ---- the command ---- */

static int ask(const void *context, struct cox_client *client, uint64_t timeout_ms,
               uint64_t deadline_ns, const ProtobufCMessage **ret_reply, struct cox_error *err)
{
    const struct recover_choice *choice = context;
    CoxswainControl__RecoverRequest recover = COXSWAIN_CONTROL__RECOVER_REQUEST__INIT;
    COX_SET(&recover, command, choice->command);
    COX_SET(&recover, timeout_ms, timeout_ms);
    recover.has_rank = choice->rank_given;
    recover.rank = choice->rank;
    recover.has_kill = recover.kill = choice->kill;
    int r = cox_client_expect(client, COX_REQUEST(RECOVER), &recover.base, COX_REPLY(RECOVER),
                              deadline_ns, ret_reply, err);
    return r ? r : reply_check((const recover_reply *)*ret_reply, err);
}

static int take_command(void *context, int count, char *const *words, struct cox_error *err)
{
    struct recover_choice *choice = context;
    if (count == 0)
        return cox_fail(err, COX_INVALID,
                        "say what: pause, pause-net, clear, reinit, start or restart");
    for (choice->command = 0; choice->command <= COMMAND_RESTART; choice->command++)
        if (!strcmp(words[0], command_name(choice->command)))
            break;
    if (choice->command > COMMAND_RESTART)
        return cox_fail(
            err, COX_INVALID,
            "'%.64s' is no recovery command: expected pause, pause-net, clear, reinit, start or restart",
            words[0]);
    if (choice->command != COMMAND_RESTART && (choice->rank_given || choice->kill))
        return cox_fail(err, COX_INVALID, "--rank and --kill are for restart: %s is for all ranks",
                        words[0]);
    if (choice->kill && !choice->rank_given)
        return cox_fail(err, COX_INVALID, "--kill: say which with --rank");
    return cox_connection_words(&choice->connection, count - 1, words + 1, err);
}

static int run(void *context)
{
    /* by command: pause, pause-net, clear, reinit, start, restart */
    static const char *const did[] = {
        "is paused", "does no transfers", "has dropped its transfers", "has rebuilt its state",
        "continues", "has no dead rank"};
    const struct recover_choice *choice = context;
    const struct cox_client_command command = {
        .did = did[choice->command],
        .reply = &coxswain_control__recover_reply__descriptor,
        .timeout_ms = TIMEOUT_MS,
        .grace_ms = GRACE_MS,
        .ask = ask,
        .print = print,
        .json = json,
    };
    return cox_client_command_run(&command, &choice->connection, choice);
}

static const struct cox_option options[] = {
    {"rank", "R", "restart: this rank only",
     COX_COUNT(struct recover_choice, rank, 0, COX_RANK_COUNT_MAX - 1),
     COX_GIVEN(struct recover_choice, rank_given)},
    {"kill", NULL, "restart: also when the rank lives", COX_FLAG(struct recover_choice, kill)},
    {0},
};
static const struct cox_option_group restart_options = {.options = options};

const struct cox_command cox_command_recover = {
    .name = "recover",
    .summary = "pause, reinitialize or resume a running group, replace ranks",
    .arguments = "pause|pause-net|clear|reinit|start|restart [NAME]",
    .text = "Runs one recovery command on every rank of a running group, also when ranks are "
            "stuck, and prints a line `rank R: ok` or `rank R: NUMBER: TEXT` for each.\n"
            "\n"
            "  pause      no further step is computed; steps under way are cancelled\n"
            "  pause-net  the same for transfers\n"
            "  clear      transfers are dropped; at any time\n"
            "  reinit     a paused group rebuilds its state\n"
            "  start      a paused or reinitialized group continues, and its prompts\n"
            "             with it; also after a pause that failed at some ranks\n"
            "  restart    dead ranks are replaced by new processes; the others keep\n"
            "             their state\n"
            "\n"
            "A command that was carried out before succeeds. One that the group's state does not "
            "allow is refused, with those that it allows. The default of --timeout is 60 s.",
    .examples = "  coxswain recover pause mine\n"
                "  coxswain recover start mine\n"
                "  coxswain recover restart --rank 2 --kill mine\n",
    .choice_size = sizeof(struct recover_choice),
    .groups = {{&restart_options, 0},
               {&cox_connection_options, offsetof(struct recover_choice, connection)}},
    .words = take_command,
    .run = run,
};
