/* coxswain lora: loads LoRA adapters into the ranks of a running group, unloads and lists them. */
#include "command.h"

#include "adapter_options.h"
#include "proto/control.pb-c.h"
#include "connection.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TIMEOUT_MS 60000
/* The group gives up at the timeout, takes back what some ranks did, and then says so. */
#define ANSWER_MS 20000

#define ACTION(name) COXSWAIN_CONTROL__LORA_ACTION__##name

enum {
    OPTION_JSON = COX_OPTION_TARGET_COMMAND,
};

typedef CoxswainControl__LoraReply lora_reply;

struct choice {
    CoxswainControl__LoraAction action;
    struct cox_connection target;
    const char *adapter;
    /* absolute */
    char *path;
    bool json;
};

static void help(FILE *file)
{
    fprintf(
        file,
        "Usage: coxswain lora load ADAPTER DIR [--name NAME | --door PATH] [OPTION]...\n"
        "       coxswain lora unload ADAPTER [--name NAME | --door PATH] [OPTION]...\n"
        "       coxswain lora list [--name NAME | --door PATH] [OPTION]...\n"
        "\n"
        "LoRA adapters of the attention projections, in every rank of a running group, while it serves.\n"
        "DIR has adapter_config.json and adapter_model.safetensors, as PEFT writes them. Prompts name\n"
        "an adapter with `coxswain generate --name NAME --lora ADAPTER`.\n"
        "\n"
        "  load    every rank loads it, or none keeps it; prints a line `rank R: STATUS` for each\n"
        "  unload  new prompts with it are refused, those that run are waited for\n"
        "  list    a line `ADAPTER STATE USES DIR` for each\n"
        "\n"
        "      --name NAME    of the group (default: the only one that is alive)\n"
        "      --door PATH    the same by its door, as `run` prints it\n"
        "      --timeout SEC  give up after so long (default 60)\n"
        "      --json         one JSON object\n"
        "  -h, --help         this text\n");
    cox_exit_help(file);
}

static const struct option long_options[] = {
    COX_TARGET_LONG_OPTIONS,
    {"json", no_argument, NULL, OPTION_JSON},
    {NULL, 0, NULL, 0},
};

static const char *action_name(CoxswainControl__LoraAction action)
{
    return action == ACTION(LORA_LOAD) ? "load" : action == ACTION(LORA_UNLOAD) ? "unload" : "list";
}

/* ---- the answer ---- */

/* Another process's writing. */
static const char *text_of(char *text)
{
    if (text)
        cox_client_clean_text(text);
    return text ? text : "";
}

static void print_people(const struct choice *choice, const lora_reply *reply)
{
    for (size_t i = 0; i < reply->n_results; i++) {
        const CoxswainControl__LoraResult *result = reply->results[i];
        const char *text = text_of(result->text);
        printf("rank %" PRIu32 ": %s%s%s\n", result->rank, text_of(result->status_name),
               *text ? ": " : "", text);
    }
    for (size_t i = 0; choice->action == ACTION(LORA_LIST) && i < reply->n_adapters; i++) {
        const CoxswainControl__LoraAdapter *adapter = reply->adapters[i];
        printf("%s %s %" PRIu64 " %s\n", text_of(adapter->name), text_of(adapter->state),
               adapter->uses, text_of(adapter->path));
    }
}

static json_t *text_json(char *text)
{
    return text && *text ? json_string(text_of(text)) : json_null();
}

static void print_json(const struct choice *choice, const lora_reply *reply,
                       const struct cox_error *error)
{
    json_t *root = json_object(), *ranks = json_array(), *adapters = json_array();
    for (size_t i = 0; i < reply->n_results; i++) {
        const CoxswainControl__LoraResult *result = reply->results[i];
        json_t *rank = json_object();
        json_object_set_new(rank, "rank", json_integer(result->rank));
        json_object_set_new(rank, "status", json_integer(result->status));
        json_object_set_new(rank, "status_name", text_json(result->status_name));
        json_object_set_new(rank, "text", text_json(result->text));
        json_array_append_new(ranks, rank);
    }
    for (size_t i = 0; i < reply->n_adapters; i++) {
        const CoxswainControl__LoraAdapter *message = reply->adapters[i];
        json_t *adapter = json_object();
        json_object_set_new(adapter, "name", text_json(message->name));
        json_object_set_new(adapter, "path", text_json(message->path));
        json_object_set_new(adapter, "state", text_json(message->state));
        json_object_set_new(adapter, "uses", json_integer((json_int_t)message->uses));
        json_array_append_new(adapters, adapter);
    }
    json_object_set_new(root, "action", json_string(action_name(choice->action)));
    json_object_set_new(root, "ok", json_boolean(error->code == 0));
    json_object_set_new(root, "error", error->code ? json_string(error->text) : json_null());
    json_object_set_new(root, "ranks", ranks);
    json_object_set_new(root, "adapters", adapters);
    json_dumpf(root, stdout, JSON_COMPACT);
    putchar('\n');
    json_decref(root);
}

/* ---- the command ---- */

static int ask(const struct choice *choice, struct cox_client *client, lora_reply **ret_reply,
               struct cox_error *err)
{
    CoxswainControl__LoraRequest lora = COXSWAIN_CONTROL__LORA_REQUEST__INIT;
    CoxswainControl__ControlRequest request = COXSWAIN_CONTROL__CONTROL_REQUEST__INIT;
    CoxswainControl__ControlReply *reply;
    /* No rank is asked for a list. */
    uint64_t deadline_ns = cox_deadline_after_ms(
        choice->target.timeout_ms + (choice->action == ACTION(LORA_LIST) ? 0 : ANSWER_MS));
    lora.has_action = lora.has_timeout_ms = true;
    lora.action = choice->action;
    lora.timeout_ms = choice->target.timeout_ms;
    lora.name = (char *)(uintptr_t)choice->adapter;
    lora.path = choice->path;
    request.request_case = COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_LORA;
    request.lora = &lora;
    int r = cox_connection_open(&choice->target, client, deadline_ns, err);
    if (!r)
        r = cox_client_ask(client, &request, deadline_ns, &reply, err);
    if (r)
        return r;
    if (reply->reply_case != COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_LORA)
        return cox_fail(err, COX_CORRUPT, "the group answered something else than how it went");
    *ret_reply = reply->lora;
    if ((*ret_reply)->error)
        cox_client_error((*ret_reply)->error, err);
    return 0;
}

static int lora(const struct choice *choice)
{
    _cox_cleanup_(cox_client_close) struct cox_client client = COX_CLIENT_NONE;
    struct cox_error error = {0};
    lora_reply *reply = NULL;
    lora_reply nobodys = COXSWAIN_CONTROL__LORA_REPLY__INIT;
    int r = ask(choice, &client, &reply, &error);
    if (error.code)
        cox_client_clean_text(error.text);
    if (choice->json)
        print_json(choice, r ? &nobodys : reply, &error);
    else if (!r)
        print_people(choice, reply);
    return error.code ? cox_exit_with(&error) : COX_EXIT_OK;
}

static int take_words(struct choice *choice, int count, char *const *words, struct cox_error *err)
{
    static const struct {
        CoxswainControl__LoraAction action;
        int count;
        const char *expected;
    } actions[] = {
        {ACTION(LORA_LIST), 1, "nothing"},
        {ACTION(LORA_LOAD), 3, "an adapter's name and its folder"},
        {ACTION(LORA_UNLOAD), 2, "an adapter's name"},
    };
    const size_t action_count = sizeof actions / sizeof actions[0];
    size_t i = 0;
    if (count == 0)
        return cox_fail(err, COX_INVALID, "say what: load, unload or list");
    while (i < action_count && strcmp(words[0], action_name(actions[i].action)) != 0)
        i++;
    if (i == action_count)
        return cox_fail(err, COX_INVALID,
                        "'%.64s' is no LoRA operation: expected load, unload or list", words[0]);
    if (count != actions[i].count)
        return cox_fail(err, COX_INVALID, "%s takes %s", words[0], actions[i].expected);
    choice->action = actions[i].action;
    choice->adapter = count > 1 ? words[1] : NULL;
    return count > 2 ? cox_adapter_path(words[2], &choice->path, err) : 0;
}

int cox_command_lora(int argc, char **argv)
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
        if (option == OPTION_JSON)
            choice.json = true;
        else
            r = cox_connection_take(&choice.target, option, argv, &error);
    }
    if (!r)
        r = take_words(&choice, argc - optind, argv + optind, &error);
    if (!r)
        r = cox_connection_check(&choice.target, &error);
    int exit_status = r ? cox_exit_usage("lora", &error) : cox_exit_flushed(lora(&choice));
    free(choice.path);
    return exit_status;
}
