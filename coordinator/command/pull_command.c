/* coxswain pull-kv: pulls what another group holds into blocks of a running group, tells how that
 * went at every rank, and gives the blocks back. */
#include "command.h"

#include "channel/shm/geometry.h"
#include "link_client.h"
#include "proto/control.pb-c.h"
#include "connection.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>

#define TIMEOUT_MS 10000
/* The group gives up at the timeout, and then says so. */
#define ANSWER_MS 10000

enum {
    OPTION_FROM = COX_OPTION_TARGET_COMMAND,
    OPTION_HOLD,
    OPTION_JSON,
};

typedef CoxswainControl__PullReply pull_reply;
typedef CoxswainControl__RankPull rank_pull;

struct choice {
    struct cox_connection target;
    const char *from;
    uint64_t hold;
    bool json;
};

static void help(FILE *file)
{
    fprintf(
        file,
        "Usage: coxswain pull-kv --from OWNER --hold ID [--name NAME | --door PATH] [OPTION]...\n"
        "\n"
        "Pulls the keys and values that the running group OWNER holds as ID into free blocks of the\n"
        "running group NAME, prints a line `rank R: ok: BYTES bytes in T ms` or `rank R: CODE: TEXT`\n"
        "for each, and gives the blocks back. The hold stays its client's. NAME has to be linked\n"
        "with OWNER (coxswain link).\n"
        "\n"
        "      --from OWNER   the group that holds it\n"
        "      --hold ID      of the hold there\n"
        "      --name NAME    of the group that pulls (default: the only one that is alive)\n"
        "      --door PATH    the same by its door, as `run` prints it\n"
        "      --timeout SEC  give up after so long (default 10)\n"
        "      --json         one JSON object\n"
        "  -h, --help         this text\n");
    cox_exit_help(file);
}

static const struct option long_options[] = {
    COX_TARGET_LONG_OPTIONS,
    {"from", required_argument, NULL, OPTION_FROM},
    {"hold", required_argument, NULL, OPTION_HOLD},
    {"json", no_argument, NULL, OPTION_JSON},
    {NULL, 0, NULL, 0},
};

/* ---- the answer ---- */

static void print_people(const pull_reply *reply)
{
    for (size_t i = 0; i < reply->n_ranks; i++) {
        const rank_pull *rank = reply->ranks[i];
        if (rank->code == 0)
            printf("rank %" PRIu32 ": ok: %" PRIu64 " bytes in %.3f ms\n", rank->rank,
                   rank->copied_bytes, (double)rank->copy_ns / (double)COX_NSEC_PER_MSEC);
        else
            printf("rank %" PRIu32 ": %" PRId32 ": %s\n", rank->rank, rank->code,
                   rank->text ? rank->text : "no reason was given");
    }
}

static void print_json(const pull_reply *reply, const struct cox_error *error)
{
    json_t *root = json_object(), *ranks = json_array();
    for (size_t i = 0; i < reply->n_ranks; i++) {
        const rank_pull *rank = reply->ranks[i];
        json_t *object = json_object();
        json_object_set_new(object, "rank", json_integer(rank->rank));
        json_object_set_new(object, "code", json_integer(rank->code));
        json_object_set_new(object, "status", json_integer(rank->status));
        json_object_set_new(object, "text", rank->text ? json_string(rank->text) : json_null());
        json_object_set_new(object, "bytes", json_integer((json_int_t)rank->copied_bytes));
        json_object_set_new(object, "seconds", json_real((double)rank->copy_ns / 1e9));
        json_array_append_new(ranks, object);
    }
    json_object_set_new(root, "ok", json_boolean(error->code == 0));
    json_object_set_new(root, "state", json_string(reply->state ? reply->state : "failed"));
    json_object_set_new(root, "error", error->code ? json_string(error->text) : json_null());
    json_object_set_new(root, "ranks", ranks);
    json_dumpf(root, stdout, JSON_COMPACT);
    putchar('\n');
    json_decref(root);
}

/* All of it is another process's writing. */
static void reply_check(pull_reply *reply, struct cox_error *error)
{
    if (reply->state)
        cox_client_clean_text(reply->state);
    for (size_t i = 0; i < reply->n_ranks; i++)
        if (reply->ranks[i]->text)
            cox_client_clean_text(reply->ranks[i]->text);
    if (reply->error)
        cox_client_error(reply->error, error);
    else if (reply->n_ranks == 0)
        cox_fail(error, COX_CORRUPT, "the group tells of no rank");
}

/* ---- the command ---- */

static int ask(const struct choice *choice, struct cox_client *owner, struct cox_client *client,
               pull_reply **ret_reply, struct cox_error *err)
{
    uint64_t deadline_ns = cox_deadline_after_ms(choice->target.timeout_ms + ANSWER_MS);
    CoxswainControl__KvInfoReply *info;
    CoxswainControl__PullRequest pull = COXSWAIN_CONTROL__PULL_REQUEST__INIT;
    CoxswainControl__ControlRequest request = COXSWAIN_CONTROL__CONTROL_REQUEST__INIT;
    CoxswainControl__ControlReply *reply;
    int r = cox_connection_open(&choice->target, client, deadline_ns, err);
    if (!r)
        r = cox_client_open(owner, choice->from, deadline_ns, err);
    if (!r)
        r = cox_client_kv_info(owner, (int64_t)choice->hold, deadline_ns, &info, err);
    if (r)
        return r;
    pull.source = info->hold;
    pull.has_timeout_ms = true;
    pull.timeout_ms = choice->target.timeout_ms;
    request.request_case = COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_PULL;
    request.pull = &pull;
    r = cox_client_expect(client, &request, COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_PULL,
                          deadline_ns, &reply, err);
    if (!r)
        *ret_reply = reply->pull;
    return r;
}

static int pull_kv(const struct choice *choice)
{
    _cox_cleanup_(cox_client_close) struct cox_client owner = COX_CLIENT_NONE;
    _cox_cleanup_(cox_client_close) struct cox_client client = COX_CLIENT_NONE;
    struct cox_error error = {0};
    pull_reply nobodys = COXSWAIN_CONTROL__PULL_REPLY__INIT, *reply = NULL;
    int r = ask(choice, &owner, &client, &reply, &error);
    if (!r)
        reply_check(reply, &error);
    else
        cox_client_clean_text(error.text);
    if (choice->json)
        print_json(r ? &nobodys : reply, &error);
    else if (!r)
        print_people(reply);
    return error.code ? cox_exit_with(&error) : COX_EXIT_OK;
}

static int take_option(struct choice *choice, int option, char *const *argv, struct cox_error *err)
{
    switch (option) {
    case OPTION_FROM:
        choice->from = optarg;
        return cox_name_check(optarg, err);
    case OPTION_HOLD:
        return cox_parse_number("--hold", optarg, 1, INT64_MAX, &choice->hold, err);
    case OPTION_JSON:
        choice->json = true;
        return 0;
    default:
        return cox_connection_take(&choice->target, option, argv, err);
    }
}

int cox_command_pull_kv(int argc, char **argv)
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
    if (!r && optind < argc)
        r = cox_fail(&error, COX_INVALID, "'%.64s' is not expected here", argv[optind]);
    if (!r && (!choice.from || !choice.hold))
        r = cox_fail(&error, COX_INVALID, "say what: --from OWNER --hold ID");
    if (!r)
        r = cox_connection_check(&choice.target, &error);
    return r ? cox_exit_usage("pull-kv", &error) : cox_exit_flushed(pull_kv(&choice));
}
