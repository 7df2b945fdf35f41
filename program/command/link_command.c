/* coxswain link, unlink, link-status and role: which groups read each other's KV caches, and in
 * which role. */
#include "channel/base/idioms.h"
#include "channel/shm/geometry.h"
#include "coordinator/server/group_links.h"
#include "program/cli/client_command.h"
#include "program/cli/command.h"
#include "program/client/link_client.h"
#include "proto/control.pb-c.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#define TIMEOUT_MS 10000
/* The group fails at the timeout, and then sends the reason. */
#define GRACE_MS 2000
/* Between two requests for the state. */
#define POLL_NS (20 * COX_NSEC_PER_MSEC)

typedef CoxswainControl__LinkState link_message;
typedef CoxswainControl__LinkStatusReply links_reply;

struct link_choice {
    struct cox_connection connection;
    /* the other group, or the role; NULL: none */
    const char *word;
    bool wait, no_wait;
};

static int take_owner(void *context, int count, char *const *words, struct cox_error *err)
{
    struct link_choice *choice = context;
    if (count == 0)
        return cox_fail(err, COX_INVALID, "name the other group");
    choice->word = words[0];
    int r = cox_name_check(words[0], err);
    return r ? r : cox_connection_words(&choice->connection, count - 1, words + 1, err);
}

static int talk(const struct cox_client_command *command, const struct link_choice *choice)
{
    struct cox_client_command whole = *command;
    whole.timeout_ms = TIMEOUT_MS;
    return cox_client_command_run(&whole, &choice->connection, choice);
}

/* ---- link ---- */

static int ask_link(const void *context, struct cox_client *client, uint64_t timeout_ms,
                    uint64_t deadline_ns, const ProtobufCMessage **ret_reply, struct cox_error *err)
{
    const struct link_choice *choice = context;
    _cox_cleanup_(cox_client_close) struct cox_client owner = COX_CLIENT_NONE;
    uint64_t epoch;
    (void)timeout_ms, (void)ret_reply;
    int r = cox_client_open(&owner, choice->word, deadline_ns, err);
    return r ? r
             : cox_link_groups(client, &owner, choice->word, !choice->no_wait, deadline_ns, &epoch,
                               err);
}

static int run_link(void *context)
{
    const struct link_choice *choice = context;
    return talk(
        &(struct cox_client_command){.reply = &coxswain_control__done__descriptor,
                                     .did = choice->no_wait ? "begins to link" : "is linked",
                                     .ask = ask_link},
        choice);
}

static const struct cox_option link_options[] = {
    {"no-wait", NULL, "do not wait; link-status tells the state",
     COX_FLAG(struct link_choice, no_wait)},
    {0},
};
static const struct cox_option_group link_group = {.options = link_options};

const struct cox_command cox_command_link = {
    .name = "link",
    .summary = "let a running group read the KV caches of another one",
    .arguments = "OWNER [NAME]",
    .text = "The ranks of a running group attach the KV caches of the running group OWNER, and may "
            "then pull from it (coxswain generate --prefill OWNER --decode NAME). Both have the "
            "same model and as many ranks. Waits until every rank has attached, 10 s by default. A "
            "link ends with `unlink`; when OWNER has replaced a rank, it is made again.",
    .examples = "  coxswain link A B\n",
    .choice_size = sizeof(struct link_choice),
    .groups = {{&link_group, 0},
               {&cox_connection_options, offsetof(struct link_choice, connection)}},
    .words = take_owner,
    .run = run_link,
};

/* ---- unlink ---- */

static int ask_unlink(const void *context, struct cox_client *client, uint64_t timeout_ms,
                      uint64_t deadline_ns, const ProtobufCMessage **ret_reply,
                      struct cox_error *err)
{
    const struct link_choice *choice = context;
    CoxswainControl__LinkRequest link = COXSWAIN_CONTROL__LINK_REQUEST__INIT;
    const ProtobufCMessage *done = NULL;
    (void)ret_reply;
    link.unlink = (char *)(uintptr_t)choice->word;
    COX_SET(&link, timeout_ms, timeout_ms);
    return cox_client_expect(client, COX_REQUEST(LINK), &link.base, COX_REPLY(DONE), deadline_ns,
                             &done, err);
}

static int run_unlink(void *choice)
{
    return talk(&(struct cox_client_command){.reply = &coxswain_control__done__descriptor,
                                             .did = "is unlinked",
                                             .grace_ms = GRACE_MS,
                                             .ask = ask_unlink},
                choice);
}

const struct cox_command cox_command_unlink = {
    .name = "unlink",
    .summary = "take that back",
    .arguments = "OWNER [NAME]",
    .text = "The ranks of a running group detach the KV caches of OWNER, which may have ended. "
            "The default of --timeout is 10 s.",
    .examples = "  coxswain unlink A B\n",
    .choice_size = sizeof(struct link_choice),
    .groups = {{&cox_connection_options, offsetof(struct link_choice, connection)}},
    .words = take_owner,
    .run = run_unlink,
};

/* ---- link-status ---- */

static void print_links(const void *choice, const ProtobufCMessage *message)
{
    const links_reply *status = (const links_reply *)message;
    (void)choice;
    for (size_t i = 0; i < status->n_links; i++) {
        const link_message *link = status->links[i];
        printf("%s %s", link->cluster_id ? link->cluster_id : "?",
               cox_link_state_name(link->state));
        if (link->state == COX_LINK_FAILED)
            printf(" %" PRId32 ": %s", link->code, link->text ? link->text : "no reason was given");
        putchar('\n');
    }
    if (status->n_links == 0)
        printf("no group is linked\n");
}

static void json_links(const void *choice, const ProtobufCMessage *reply, json_t *root)
{
    size_t i;
    json_t *link;
    (void)choice, (void)reply;
    json_array_foreach(json_object_get(root, "links"), i, link)
    {
        json_object_set(link, "name", json_object_get(link, "cluster_id"));
        if (strcmp(json_string_value(json_object_get(link, "state")), "failed") != 0)
            json_object_set_new(link, "code", json_null());
    }
}

static uint32_t count_pending(const links_reply *status, const link_message **ret_failed)
{
    uint32_t pending = 0;
    *ret_failed = NULL;
    for (size_t i = 0; i < status->n_links; i++) {
        const link_message *link = status->links[i];
        pending += link->state == COX_LINK_WAITING || link->state == COX_LINK_RUNNING;
        if (link->state == COX_LINK_FAILED)
            *ret_failed = link;
    }
    return pending;
}

static int ask_links(const void *context, struct cox_client *client, uint64_t timeout_ms,
                     uint64_t deadline_ns, const ProtobufCMessage **ret_reply,
                     struct cox_error *err)
{
    const struct link_choice *choice = context;
    links_reply *status;
    const link_message *failed;
    uint32_t pending;
    (void)timeout_ms;
    for (;;) {
        int r = cox_client_link_status(client, deadline_ns, &status, err);
        if (r)
            return r;
        pending = count_pending(status, &failed);
        if (!choice->wait || !pending || cox_now_ns() >= deadline_ns)
            break;
        nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
    }
    *ret_reply = &status->base;
    if (failed)
        return cox_fail(err, COX_REJECTED, "'%s' could not be linked",
                        failed->cluster_id ? failed->cluster_id : "?");
    return choice->wait && pending
               ? cox_fail(err, COX_TIMEOUT, "%" PRIu32 " of %zu groups are not linked in time",
                          pending, status->n_links)
               : 0;
}

static int run_link_status(void *choice)
{
    return talk(
        &(struct cox_client_command){.reply = &coxswain_control__link_status_reply__descriptor,
                                     .ask = ask_links,
                                     .print = print_links,
                                     .json = json_links},
        choice);
}

static const struct cox_option link_status_options[] = {
    {"wait", NULL, "wait until no link is waiting or running", COX_FLAG(struct link_choice, wait)},
    {0},
};
static const struct cox_option_group link_status_group = {.options = link_status_options};

const struct cox_command cox_command_link_status = {
    .name = "link-status",
    .summary = "tell how every rank's links are",
    .arguments = "[NAME]",
    .text = "Asks every rank of a running group for the state of its links, and prints a line for "
            "each link: waiting, running, success, or failed with a code and a reason. A link that "
            "failed at any rank has failed; success is that of all ranks. The default of --timeout "
            "is 10 s.",
    .examples = "  coxswain link-status B\n",
    .choice_size = sizeof(struct link_choice),
    .groups = {{&link_status_group, 0},
               {&cox_connection_options, offsetof(struct link_choice, connection)}},
    .words = cox_connection_words,
    .run = run_link_status,
};

/* ---- role ---- */

static int take_role(void *context, int count, char *const *words, struct cox_error *err)
{
    struct link_choice *choice = context;
    enum cox_role role;
    const bool named = choice->connection.name || choice->connection.control_socket;
    /* A single word that is no role is a name. */
    if (count == 0 || (count == 1 && !named && cox_role_parse(words[0], &role, NULL)))
        return cox_connection_words(&choice->connection, count, words, err);
    choice->word = words[0];
    int r = cox_role_parse(words[0], &role, err);
    return r ? r : cox_connection_words(&choice->connection, count - 1, words + 1, err);
}

static int ask_role(const void *context, struct cox_client *client, uint64_t timeout_ms,
                    uint64_t deadline_ns, const ProtobufCMessage **ret_reply, struct cox_error *err)
{
    const struct link_choice *choice = context;
    CoxswainControl__RoleRequest role = COXSWAIN_CONTROL__ROLE_REQUEST__INIT;
    CoxswainControl__StatusReply *status;
    const ProtobufCMessage *done = NULL;
    enum cox_role wanted = COX_ROLE_STANDARD;
    int r = choice->word ? cox_role_parse(choice->word, &wanted, err)
                         : cox_client_status(client, deadline_ns, &status, err);
    if (r)
        return r;
    if (!choice->word) {
        *ret_reply = &status->base;
        return 0;
    }
    COX_SET(&role, role, wanted);
    COX_SET(&role, timeout_ms, timeout_ms);
    return cox_client_expect(client, COX_REQUEST(ROLE), &role.base, COX_REPLY(DONE), deadline_ns,
                             &done, err);
}

static void print_role(const void *choice, const ProtobufCMessage *message)
{
    const CoxswainControl__StatusReply *status = (const CoxswainControl__StatusReply *)message;
    (void)choice;
    printf("%s\n", status->transfer ? cox_role_name(status->transfer->role) : "none");
}

/* Only the role of the status. */
static void json_role(const void *context, const ProtobufCMessage *reply, json_t *root)
{
    const struct link_choice *choice = context;
    (void)reply;
    json_t *transfer = json_object_get(root, "transfer");
    json_t *role = choice->word ? json_string(choice->word)
                   : transfer   ? json_incref(json_object_get(transfer, "role"))
                                : NULL;
    json_t *error = json_incref(json_object_get(root, "error"));
    json_t *ok = json_incref(json_object_get(root, "ok"));
    json_object_clear(root);
    json_object_set_new(root, "role", role ? role : json_null());
    json_object_set_new(root, "ok", ok);
    json_object_set_new(root, "error", error);
}

static int run_role(void *context)
{
    const struct link_choice *choice = context;
    return talk(&(struct cox_client_command){.reply = &coxswain_control__status_reply__descriptor,
                                             .did = choice->word ? "has this role" : NULL,
                                             .grace_ms = GRACE_MS,
                                             .ask = ask_role,
                                             .print = print_role,
                                             .json = json_role},
                choice);
}

const struct cox_command cox_command_role = {
    .name = "role",
    .summary = "say whether a running group computes prompts, decodes, or both",
    .arguments = "[prefill|decode|standard] [NAME]",
    .text = "Switches the role of a running group, or prints it.\n"
            "\n"
            "  prefill    computes prompts for a group that decodes; refuses others\n"
            "  decode     continues prompts of a group that computed them, and others\n"
            "  standard   both\n"
            "\n"
            "Prompts under way are not touched. The default of --timeout is 10 s.",
    .examples = "  coxswain role prefill A\n",
    .choice_size = sizeof(struct link_choice),
    .groups = {{&cox_connection_options, offsetof(struct link_choice, connection)}},
    .words = take_role,
    .run = run_role,
};
