/* coxswain pull-kv: pulls leased KV blocks of another group into blocks of a running group, prints
 * the result of every rank, and frees the blocks. */
#include "channel/base/idioms.h"
#include "channel/shm/geometry.h"
#include "program/cli/client_command.h"
#include "program/cli/command.h"
#include "program/cli/group_options.h"
#include "program/client/link_client.h"
#include "proto/control.pb-c.h"

#include <inttypes.h>
#include <stdio.h>

#define TIMEOUT_MS 10000
/* The group fails at the timeout, and then sends the reason. */
#define GRACE_MS 10000

typedef CoxswainControl__PullReply pull_reply;
typedef CoxswainControl__RankPull rank_pull;

struct pull_choice {
    struct cox_connection connection;
    const char *from;
    uint64_t hold;
};

/* ---- the reply ---- */

static void print(const void *choice, const ProtobufCMessage *message)
{
    const pull_reply *reply = (const pull_reply *)message;
    (void)choice;
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

static void json(const void *choice, const ProtobufCMessage *reply, json_t *root)
{
    (void)choice, (void)reply;
    if (json_is_null(json_object_get(root, "state")))
        json_object_set_new(root, "state", json_string("failed"));
}

/* ---- the command ---- */

static int ask(const void *context, struct cox_client *client, uint64_t timeout_ms,
               uint64_t deadline_ns, const ProtobufCMessage **ret_reply, struct cox_error *err)
{
    const struct pull_choice *choice = context;
    _cox_cleanup_(cox_client_close) struct cox_client owner = COX_CLIENT_NONE;
    CoxswainControl__KvInfoReply *info;
    CoxswainControl__PullRequest pull = COXSWAIN_CONTROL__PULL_REQUEST__INIT;
    int r = cox_client_open(&owner, choice->from, deadline_ns, err);
    if (!r)
        r = cox_client_kv_info(&owner, (int64_t)choice->hold, deadline_ns, &info, err);
    if (r)
        return r;
    pull.source = info->hold;
    COX_SET(&pull, timeout_ms, timeout_ms);
    r = cox_client_expect(client, COX_REQUEST(PULL), &pull.base, COX_REPLY(PULL), deadline_ns,
                          ret_reply, err);
    if (r)
        return r;
    const pull_reply *reply = (const pull_reply *)*ret_reply;
    if (reply->error)
        return cox_client_error(reply->error, err);
    return reply->n_ranks ? 0 : cox_fail(err, COX_CORRUPT, "the group's reply names no rank");
}

static int check(const void *context, struct cox_error *err)
{
    const struct pull_choice *choice = context;
    return choice->from && choice->hold
               ? 0
               : cox_fail(err, COX_INVALID, "say what: --from OWNER --hold ID");
}

static int run(void *context)
{
    static const struct cox_client_command command = {
        .reply = &coxswain_control__pull_reply__descriptor,
        .timeout_ms = TIMEOUT_MS,
        .grace_ms = GRACE_MS,
        .ask = ask,
        .print = print,
        .json = json,
    };
    const struct pull_choice *choice = context;
    return cox_client_command_run(&command, &choice->connection, choice);
}

static const struct cox_option options[] = {
    {"from", "OWNER", "the group that holds the blocks", COX_NAME(struct pull_choice, from)},
    {"hold", "ID", "of the hold there", COX_NUMBER(struct pull_choice, hold, 1, INT64_MAX)},
    {0},
};
static const struct cox_option_group pull_options = {.options = options, .check = check};

const struct cox_command cox_command_pull_kv = {
    .name = "pull-kv",
    .summary = "try a pull of what another group holds",
    .arguments = "[NAME]",
    .text = "Pulls the keys and values that the running group OWNER holds as ID into free blocks "
            "of the running group NAME, prints a line `rank R: ok: BYTES bytes in T ms` or `rank "
            "R: CODE: TEXT` for each rank, and frees the blocks. The hold stays its client's. NAME "
            "has to be linked with OWNER (coxswain link). The default of --timeout is 10 s.",
    .examples = "  coxswain pull-kv B --from A --hold 7\n",
    .choice_size = sizeof(struct pull_choice),
    .groups = {{&pull_options, 0},
               {&cox_connection_options, offsetof(struct pull_choice, connection)}},
    .words = cox_connection_words,
    .run = run,
};
