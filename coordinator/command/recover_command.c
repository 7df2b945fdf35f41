/* coxswain recover: pauses, reinitializes and resumes a running group, and replaces its ranks. */
#include "command.h"

#include "proto/control.pb-c.h"
#include "connection.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#define TIMEOUT_MS 60000
/* The group gives up at the timeout, and then says so. */
#define ANSWER_MS 10000
#define COMMAND_RESTART 5

enum {
    OPTION_RANK = COX_OPTION_TARGET_COMMAND,
    OPTION_KILL,
    OPTION_JSON,
};

typedef CoxswainControl__RecoverReply recover_reply;
typedef CoxswainControl__RecoverResult recover_result;

struct choice {
    uint32_t command;
    struct cox_connection target;
    bool rank_given;
    uint32_t rank;
    bool kill;
    bool json;
};

static void help(FILE *file)
{
    fprintf(
        file,
        "Usage: coxswain recover COMMAND [--name NAME | --door PATH] [OPTION]...\n"
        "\n"
        "Carries out one recovery command on every rank of a running group, also when they are\n"
        "stuck, and prints a line `rank R: ok` or `rank R: NUMBER: TEXT` for each. COMMAND is\n"
        "\n"
        "  pause      no step is computed any more; what is under way is given up\n"
        "  pause-net  the same, for transfers\n"
        "  clear      transfers are dropped; at any time\n"
        "  reinit     a paused group rebuilds its state\n"
        "  start      a paused or reinitialized group goes on; its prompts, where they were; also\n"
        "             after a pause that failed at some ranks\n"
        "  restart    dead ranks are replaced by new processes; the others keep what they have\n"
        "\n"
        "What has been done already is fine; what is not legal now is refused, with what is.\n"
        "\n"
        "      --name NAME    of the group (default: the only one that is alive)\n"
        "      --door PATH    the same by its door, as `run` prints it\n"
        "      --rank R       restart: this one only\n"
        "      --kill         restart: also when it lives\n"
        "      --timeout SEC  give up after so long (default 60)\n"
        "      --json         one JSON object\n"
        "  -h, --help         this text\n");
    cox_exit_help(file);
}

static const struct option long_options[] = {
    COX_TARGET_LONG_OPTIONS,
    {"rank", required_argument, NULL, OPTION_RANK},
    {"kill", no_argument, NULL, OPTION_KILL},
    {"json", no_argument, NULL, OPTION_JSON},
    {NULL, 0, NULL, 0},
};

static const char *command_name(uint32_t command)
{
    return command == COMMAND_RESTART ? "restart"
                                      : cox_recover_command_name((enum cox_recover_command)command);
}

/* ---- the answer ---- */

static bool is_well(const recover_result *result)
{
    return result->has_result && result->result == 0;
}

static void print_people(const struct choice *choice, const recover_reply *reply)
{
    for (size_t i = 0; i < reply->n_results; i++) {
        const recover_result *result = reply->results[i];
        printf("rank %" PRIu32 ": ", result->rank);
        if (is_well(result))
            printf("ok");
        else
            printf("%" PRId32, result->has_result ? result->result : -1);
        printf("%s%s\n", result->text ? ": " : "", result->text ? result->text : "");
    }
    if (choice->command == COMMAND_RESTART && !reply->error && reply->n_results == 0)
        printf("no rank is dead\n");
}

static json_t *text_json(const char *text)
{
    return text ? json_string(text) : json_null();
}

static void print_json(const struct choice *choice, const recover_reply *reply,
                       const struct cox_error *error)
{
    json_t *root = json_object(), *ranks = json_array();
    for (size_t i = 0; i < reply->n_results; i++) {
        const recover_result *result = reply->results[i];
        json_t *rank = json_object();
        json_object_set_new(rank, "rank", json_integer(result->rank));
        json_object_set_new(rank, "result", json_integer(result->has_result ? result->result : -1));
        json_object_set_new(rank, "device",
                            result->has_device ? json_integer(result->device) : json_null());
        json_object_set_new(rank, "text", text_json(result->text));
        json_array_append_new(ranks, rank);
    }
    json_object_set_new(root, "command", json_string(command_name(choice->command)));
    json_object_set_new(root, "ok", json_boolean(error->code == 0));
    json_object_set_new(root, "error", text_json(error->code ? error->text : NULL));
    json_object_set_new(root, "engine_state", text_json(reply->engine_state));
    json_object_set_new(root, "ranks", ranks);
    json_dumpf(root, stdout, JSON_COMPACT);
    putchar('\n');
    json_decref(root);
}

/* All of it is another process's writing. An absent result is a failure, whatever else is said. */
static void reply_check(recover_reply *reply, struct cox_error *error)
{
    if (reply->engine_state)
        cox_client_clean_text(reply->engine_state);
    if (reply->error)
        cox_client_error(reply->error, error);
    for (size_t i = 0; i < reply->n_results; i++) {
        const recover_result *result = reply->results[i];
        if (result->text)
            cox_client_clean_text(result->text);
        if (!is_well(result) && !error->code)
            cox_fail(error, COX_REJECTED, "rank %" PRIu32 " gave no good result", result->rank);
    }
}

/* ---- the command ---- */

static int ask(const struct choice *choice, struct cox_client *client, recover_reply **ret_reply,
               struct cox_error *err)
{
    CoxswainControl__RecoverRequest recover = COXSWAIN_CONTROL__RECOVER_REQUEST__INIT;
    CoxswainControl__ControlRequest request = COXSWAIN_CONTROL__CONTROL_REQUEST__INIT;
    CoxswainControl__ControlReply *reply;
    uint64_t deadline_ns = cox_deadline_after_ms(choice->target.timeout_ms + ANSWER_MS);
    recover.has_command = recover.has_timeout_ms = true;
    recover.command = choice->command;
    recover.timeout_ms = choice->target.timeout_ms;
    recover.has_rank = choice->rank_given;
    recover.rank = choice->rank;
    recover.has_kill = recover.kill = choice->kill;
    request.request_case = COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_RECOVER;
    request.recover = &recover;
    int r = cox_connection_open(&choice->target, client, deadline_ns, err);
    if (!r)
        r = cox_client_ask(client, &request, deadline_ns, &reply, err);
    if (r)
        return r;
    if (reply->reply_case != COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_RECOVER)
        return cox_fail(err, COX_CORRUPT, "the group answered something else than how it went");
    *ret_reply = reply->recover;
    return 0;
}

static int recover(const struct choice *choice)
{
    _cox_cleanup_(cox_client_close) struct cox_client client = COX_CLIENT_NONE;
    struct cox_error error = {0};
    recover_reply *reply = NULL;
    recover_reply nobodys = COXSWAIN_CONTROL__RECOVER_REPLY__INIT;
    int r = ask(choice, &client, &reply, &error);
    if (!r)
        reply_check(reply, &error);
    else
        cox_client_clean_text(error.text); /* the path of a door is in it */
    if (choice->json)
        print_json(choice, r ? &nobodys : reply, &error);
    else if (!r)
        print_people(choice, reply);
    return error.code ? cox_exit_with(&error) : COX_EXIT_OK;
}

static int take_command(struct choice *choice, int count, char *const *words, struct cox_error *err)
{
    if (count == 0)
        return cox_fail(err, COX_INVALID,
                        "say what: pause, pause-net, clear, reinit, start or restart");
    if (count > 1)
        return cox_fail(err, COX_INVALID, "'%.64s' is not expected here", words[1]);
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
    return 0;
}

static int take_option(struct choice *choice, int option, char *const *argv, struct cox_error *err)
{
    uint64_t number;
    int r;
    switch (option) {
    case OPTION_RANK:
        r = cox_parse_number("--rank", optarg, 0, COX_RANK_COUNT_MAX - 1, &number, err);
        if (!r)
            choice->rank = (uint32_t)number;
        choice->rank_given = true;
        return r;
    case OPTION_KILL:
        choice->kill = true;
        return 0;
    case OPTION_JSON:
        choice->json = true;
        return 0;
    default:
        return cox_connection_take(&choice->target, option, argv, err);
    }
}

int cox_command_recover(int argc, char **argv)
{
    struct choice choice = {.target = {.timeout_ms = TIMEOUT_MS}};
    struct cox_error error = {0};
    int option, r = 0;
    while (!r &&
           (option = getopt_long(argc, argv, COX_TARGET_SHORT_OPTIONS, long_options, NULL)) != -1) {
        if (option == 'h') {
            help(stdout);
            return cox_exit_flushed(COX_EXIT_OK);
        }
        r = take_option(&choice, option, argv, &error);
    }
    if (!r)
        r = take_command(&choice, argc - optind, argv + optind, &error);
    if (!r)
        r = cox_connection_check(&choice.target, &error);
    return r ? cox_exit_usage("recover", &error) : cox_exit_flushed(recover(&choice));
}
