/* coxswain link, unlink, link-status and role: which groups read each other's KV caches, and what
 * for. */
#include "command.h"

#include "channel/shm/geometry.h"
#include "link_client.h"
#include "coordinator/server/group_links.h"
#include "proto/control.pb-c.h"
#include "connection.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#define TIMEOUT_MS 10000
/* The group gives up at the timeout, and then says so. */
#define ANSWER_MS 2000
#define LOOK_NS (20 * COX_NSEC_PER_MSEC)

enum {
    OPTION_WAIT = COX_OPTION_TARGET_COMMAND,
    OPTION_NO_WAIT,
    OPTION_JSON,
};

typedef CoxswainControl__ControlRequest control_request;
typedef CoxswainControl__ControlReply control_reply;
typedef CoxswainControl__LinkState link_message;

struct choice {
    const char *command;
    struct cox_connection target;
    /* the other group, or the role; NULL: none */
    const char *word;
    bool wait, no_wait;
    bool json;
};

struct verb {
    const char *name;
    const char *help;
    /* NULL: no word; what it is */
    const char *wants;
    bool word_may_lack;
    int (*run)(const struct choice *choice, struct cox_client *client, uint64_t deadline_ns,
               struct cox_error *err);
};

static const struct option long_options[] = {
    COX_TARGET_LONG_OPTIONS,
    {"wait", no_argument, NULL, OPTION_WAIT},
    {"no-wait", no_argument, NULL, OPTION_NO_WAIT},
    {"json", no_argument, NULL, OPTION_JSON},
    {NULL, 0, NULL, 0},
};

/* ---- link, unlink ---- */

static int run_link(const struct choice *choice, struct cox_client *client, uint64_t deadline_ns,
                    struct cox_error *err)
{
    _cox_cleanup_(cox_client_close) struct cox_client owner = COX_CLIENT_NONE;
    uint64_t life;
    int r = cox_client_open(&owner, choice->word, deadline_ns, err);
    return r ? r
             : cox_link_groups(client, &owner, choice->word, !choice->no_wait, deadline_ns, &life,
                               err);
}

static int run_unlink(const struct choice *choice, struct cox_client *client, uint64_t deadline_ns,
                      struct cox_error *err)
{
    CoxswainControl__LinkRequest link = COXSWAIN_CONTROL__LINK_REQUEST__INIT;
    control_request request = COXSWAIN_CONTROL__CONTROL_REQUEST__INIT;
    control_reply *reply = NULL;
    link.unlink = (char *)(uintptr_t)choice->word;
    link.has_timeout_ms = true;
    link.timeout_ms = choice->target.timeout_ms;
    request.request_case = COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_LINK;
    request.link = &link;
    return cox_client_expect(client, &request, COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_DONE,
                             deadline_ns + ANSWER_MS * COX_NSEC_PER_MSEC, &reply, err);
}

/* ---- link-status ---- */

static void links_print(const CoxswainControl__LinkStatusReply *status)
{
    for (size_t i = 0; i < status->n_links; i++) {
        const link_message *link = status->links[i];
        printf("%s %s", link->cluster_id ? link->cluster_id : "?",
               cox_group_link_state_name(link->state));
        if (link->state == COX_GROUP_LINK_FAILED)
            printf(" %" PRId32 ": %s", link->code, link->text ? link->text : "no reason was given");
        putchar('\n');
    }
    if (status->n_links == 0)
        printf("no group is linked\n");
}

static void links_print_json(const CoxswainControl__LinkStatusReply *status)
{
    json_t *root = json_object(), *links = json_array();
    for (size_t i = 0; i < status->n_links; i++) {
        const link_message *link = status->links[i];
        bool failed = link->state == COX_GROUP_LINK_FAILED;
        json_t *object = json_object();
        json_object_set_new(object, "name", json_string(link->cluster_id ? link->cluster_id : "?"));
        json_object_set_new(object, "state", json_string(cox_group_link_state_name(link->state)));
        json_object_set_new(object, "code", failed ? json_integer(link->code) : json_null());
        json_object_set_new(object, "text", link->text ? json_string(link->text) : json_null());
        json_array_append_new(links, object);
    }
    json_object_set_new(root, "links", links);
    json_dumpf(root, stdout, JSON_COMPACT);
    putchar('\n');
    json_decref(root);
}

static void status_clean(const CoxswainControl__LinkStatusReply *status, uint32_t *ret_pending,
                         const link_message **ret_failed)
{
    *ret_pending = 0;
    *ret_failed = NULL;
    for (size_t i = 0; i < status->n_links; i++) {
        link_message *link = status->links[i];
        if (link->cluster_id)
            cox_client_clean_text(link->cluster_id);
        if (link->text)
            cox_client_clean_text(link->text);
        *ret_pending +=
            link->state == COX_GROUP_LINK_WAITING || link->state == COX_GROUP_LINK_RUNNING;
        if (link->state == COX_GROUP_LINK_FAILED)
            *ret_failed = link;
    }
}

static int run_link_status(const struct choice *choice, struct cox_client *client,
                           uint64_t deadline_ns, struct cox_error *err)
{
    CoxswainControl__LinkStatusReply *status;
    const link_message *failed;
    uint32_t pending;
    for (;;) {
        int r = cox_client_link_status(client, deadline_ns, &status, err);
        if (r)
            return r;
        status_clean(status, &pending, &failed);
        if (!choice->wait || !pending || cox_now_ns() >= deadline_ns)
            break;
        nanosleep(&(struct timespec){.tv_nsec = LOOK_NS}, NULL);
    }
    if (choice->json)
        links_print_json(status);
    else
        links_print(status);
    if (failed)
        return cox_fail(err, COX_REJECTED, "'%s' could not be linked", failed->cluster_id);
    return choice->wait && pending
               ? cox_fail(err, COX_TIMEOUT, "%" PRIu32 " of %zu groups are not linked in time",
                          pending, status->n_links)
               : 0;
}

/* ---- role ---- */

static int run_role(const struct choice *choice, struct cox_client *client, uint64_t deadline_ns,
                    struct cox_error *err)
{
    CoxswainControl__RoleRequest role = COXSWAIN_CONTROL__ROLE_REQUEST__INIT;
    CoxswainControl__StatusReply *status;
    control_request request = COXSWAIN_CONTROL__CONTROL_REQUEST__INIT;
    control_reply *reply = NULL;
    enum cox_role wanted = COX_ROLE_STANDARD;
    int r = choice->word ? cox_role_parse(choice->word, &wanted, err)
                         : cox_client_status(client, deadline_ns, &status, err);
    if (r)
        return r;
    if (!choice->word) {
        printf("%s\n", status->transfer ? cox_role_name(status->transfer->role) : "none");
        return 0;
    }
    role.has_role = role.has_timeout_ms = true;
    role.role = wanted;
    role.timeout_ms = choice->target.timeout_ms;
    request.request_case = COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_ROLE;
    request.role = &role;
    return cox_client_expect(client, &request, COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_DONE,
                             deadline_ns + ANSWER_MS * COX_NSEC_PER_MSEC, &reply, err);
}

/* ---- the commands ---- */

static const struct verb link_verb = {
    "link",
    "Usage: coxswain link [--name NAME | --door PATH] [OPTION]... OWNER\n"
    "\n"
    "The ranks of a running group attach the KV caches of the running group OWNER, and may then pull\n"
    "from it (coxswain generate --prefill OWNER --decode NAME). Both have the same model and as many\n"
    "ranks. Waits until every rank has attached. A link ends with `unlink`; when OWNER has replaced a\n"
    "rank, it is made again.\n"
    "\n"
    "      --no-wait      do not wait: link-status tells how it goes\n",
    "the group to pull from", false, run_link};
static const struct verb unlink_verb = {
    "unlink",
    "Usage: coxswain unlink [--name NAME | --door PATH] [OPTION]... OWNER\n"
    "\n"
    "The ranks of a running group let go of the KV caches of OWNER, which may have ended.\n"
    "\n",
    "the group that was linked", false, run_unlink};
static const struct verb link_status_verb = {
    "link-status",
    "Usage: coxswain link-status [--name NAME | --door PATH] [OPTION]...\n"
    "\n"
    "Asks every rank of a running group how its links are, and prints a line for each: waiting,\n"
    "running, success, or failed with a code and a reason. One that failed at any rank has failed;\n"
    "success is that of all ranks.\n"
    "\n"
    "      --wait         until nothing waits or runs any more\n"
    "      --json         one JSON object\n",
    NULL, true, run_link_status};
static const struct verb role_verb = {
    "role",
    "Usage: coxswain role [--name NAME | --door PATH] [OPTION]... [ROLE]\n"
    "\n"
    "Switches the role of a running group, or prints it. ROLE is\n"
    "\n"
    "  prefill    computes prompts for a group that decodes; others are refused\n"
    "  decode     goes on with prompts of a group that computed them; others as well\n"
    "  standard   both\n"
    "\n"
    "Prompts under way are not touched.\n"
    "\n",
    "the role", true, run_role};

static void help(const struct verb *verb)
{
    fputs(verb->help, stdout);
    printf("      --name NAME    of the group (default: the only one that is alive)\n"
           "      --door PATH    the same by its door, as `run` prints it\n"
           "      --timeout SEC  give up after so long (default 10)\n"
           "  -h, --help         this text\n");
    cox_exit_help(stdout);
}

static int take_option(struct choice *choice, const struct verb *verb, int option,
                       char *const *argv, struct cox_error *err)
{
    bool fits = option == OPTION_NO_WAIT                         ? verb == &link_verb
                : option == OPTION_WAIT || option == OPTION_JSON ? verb == &link_status_verb
                                                                 : true;
    if (!fits)
        return cox_fail(err, COX_INVALID, "'%.64s' is not an option of %s", argv[optind - 1],
                        verb->name);
    choice->wait = choice->wait || option == OPTION_WAIT;
    choice->no_wait = choice->no_wait || option == OPTION_NO_WAIT;
    choice->json = choice->json || option == OPTION_JSON;
    return option >= COX_OPTION_TARGET_COMMAND
               ? 0
               : cox_connection_take(&choice->target, option, argv, err);
}

static int take_word(struct choice *choice, const struct verb *verb, int count, char *const *words,
                     struct cox_error *err)
{
    if (count > (verb->wants ? 1 : 0))
        return cox_fail(err, COX_INVALID, "'%.64s' is not expected here",
                        words[verb->wants ? 1 : 0]);
    if (count == 0)
        return verb->word_may_lack ? 0 : cox_fail(err, COX_INVALID, "name %s", verb->wants);
    enum cox_role role;
    choice->word = words[0];
    return verb == &role_verb ? cox_role_parse(words[0], &role, err)
                              : cox_name_check(words[0], err);
}

static int talk(const struct choice *choice, const struct verb *verb)
{
    _cox_cleanup_(cox_client_close) struct cox_client client = COX_CLIENT_NONE;
    struct cox_error error = {0};
    uint64_t deadline_ns = cox_deadline_after_ms(choice->target.timeout_ms);
    int r = cox_connection_open(&choice->target, &client, deadline_ns, &error);
    if (!r)
        r = verb->run(choice, &client, deadline_ns, &error);
    cox_client_clean_text(error.text);
    return r ? cox_exit_with(&error) : COX_EXIT_OK;
}

static int command(const struct verb *verb, int argc, char **argv)
{
    struct choice choice = {.command = verb->name, .target = {.timeout_ms = TIMEOUT_MS}};
    struct cox_error error = {0};
    int option, r = 0;
    while (!r &&
           (option = getopt_long(argc, argv, COX_TARGET_SHORT_OPTIONS, long_options, NULL)) != -1) {
        if (option == 'h') {
            help(verb);
            return cox_exit_flushed(COX_EXIT_OK);
        }
        r = take_option(&choice, verb, option, argv, &error);
    }
    if (!r)
        r = take_word(&choice, verb, argc - optind, argv + optind, &error);
    if (!r)
        r = cox_connection_check(&choice.target, &error);
    return r ? cox_exit_usage(verb->name, &error) : cox_exit_flushed(talk(&choice, verb));
}

int cox_command_link(int argc, char **argv)
{
    return command(&link_verb, argc, argv);
}

int cox_command_unlink(int argc, char **argv)
{
    return command(&unlink_verb, argc, argv);
}

int cox_command_link_status(int argc, char **argv)
{
    return command(&link_status_verb, argc, argv);
}

int cox_command_role(int argc, char **argv)
{
    return command(&role_verb, argc, argv);
}
