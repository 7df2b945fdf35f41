/* coxswain lora: loads LoRA adapters into the ranks of a running group, unloads and lists them. */
#include "program/cli/command.h"

#include "channel/base/idioms.h"
#include "program/cli/adapter_options.h"
#include "proto/control.pb-c.h"
#include "program/cli/client_command.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TIMEOUT_MS 60000
/* The group fails at the timeout, undoes what some ranks did, and then sends the reason. */
#define GRACE_MS 20000

#define ACTION(name) COXSWAIN_CONTROL__LORA_ACTION__##name

typedef CoxswainControl__LoraReply lora_reply;

struct lora_choice {
    CoxswainControl__LoraAction action;
    struct cox_connection connection;
    const char *adapter;
    /* absolute */
    char *path;
};

static const char *action_name(CoxswainControl__LoraAction action)
{
    return action == ACTION(LORA_LOAD) ? "load" : action == ACTION(LORA_UNLOAD) ? "unload" : "list";
}

/* ---- the reply ---- */

static const char *text_of(const char *text)
{
    return text ? text : "";
}

static void print(const void *context, const ProtobufCMessage *message)
{
    const struct lora_choice *choice = context;
    const lora_reply *reply = (const lora_reply *)message;
    for (size_t i = 0; i < reply->n_ranks; i++) {
        const CoxswainControl__LoraResult *result = reply->ranks[i];
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

static void json(const void *context, const ProtobufCMessage *reply, json_t *root)
{
    const struct lora_choice *choice = context;
    (void)reply;
    json_object_set_new(root, "action", json_string(action_name(choice->action)));
}

/* ---- the command ---- */

/* Every rank refuses the name: it is unknown, or taken. That is the input's fault, not theirs. */
static bool is_name_wrong(const CoxswainControl__LoraReply *reply)
{
    for (size_t i = 0; i < reply->n_ranks; i++) {
        const char *status = reply->ranks[i]->status_name;
        if (!status ||
            (strcmp(status, "INVALID_LORA_ID") != 0 && strcmp(status, "DUPLICATED_LORA_ID") != 0))
            return false;
    }
    return reply->n_ranks > 0;
}

static int ask(const void *context, struct cox_client *client, uint64_t timeout_ms,
               uint64_t deadline_ns, const ProtobufCMessage **ret_reply, struct cox_error *err)
{
    const struct lora_choice *choice = context;
    CoxswainControl__LoraRequest lora = COXSWAIN_CONTROL__LORA_REQUEST__INIT;
    COX_SET(&lora, action, choice->action);
    COX_SET(&lora, timeout_ms, timeout_ms);
    lora.name = (char *)(uintptr_t)choice->adapter;
    lora.path = choice->path;
    int r = cox_client_expect(client, COX_REQUEST(LORA), &lora.base, COX_REPLY(LORA), deadline_ns,
                              ret_reply, err);
    if (r)
        return r;
    const lora_reply *reply = (const lora_reply *)*ret_reply;
    r = reply->error ? cox_client_error(reply->error, err) : 0;
    return r == COX_REJECTED && is_name_wrong(reply) ? err->code = COX_INVALID : r;
}

static int take_words(void *context, int count, char *const *words, struct cox_error *err)
{
    struct lora_choice *choice = context;
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
    if (count < actions[i].count)
        return cox_fail(err, COX_INVALID, "%s takes %s", words[0], actions[i].expected);
    choice->action = actions[i].action;
    const int own = actions[i].count;
    choice->adapter = own > 1 ? words[1] : NULL;
    int r = cox_connection_words(&choice->connection, count - own, words + own, err);
    return r || own < 3 ? r : cox_adapter_path(words[2], &choice->path, err);
}

static void deinit(void *context)
{
    struct lora_choice *choice = context;
    free(choice->path);
}

static int run(void *context)
{
    const struct lora_choice *choice = context;
    const struct cox_client_command command = {
        .reply = &coxswain_control__lora_reply__descriptor,
        .did = choice->action == ACTION(LORA_LOAD)     ? "has loaded the adapter"
               : choice->action == ACTION(LORA_UNLOAD) ? "has unloaded the adapter"
                                                       : NULL,
        .timeout_ms = TIMEOUT_MS,
        /* No rank is asked for a list. */
        .grace_ms = choice->action == ACTION(LORA_LIST) ? 0 : GRACE_MS,
        .ask = ask,
        .print = print,
        .json = json,
    };
    return cox_client_command_run(&command, &choice->connection, choice);
}

const struct cox_command cox_command_lora = {
    .name = "lora",
    .summary = "load, unload and list LoRA adapters of a running group",
    .arguments = "load ADAPTER DIR [NAME]\nunload ADAPTER [NAME]\nlist [NAME]",
    .text = "LoRA adapters of the attention projections, in every rank of a running group, while "
            "it serves. DIR has adapter_config.json and adapter_model.safetensors, as PEFT writes "
            "them. Prompts name an adapter with `coxswain generate --name NAME --lora ADAPTER`.\n"
            "\n"
            "  load    every rank loads it, or none keeps it; prints a line\n"
            "          `rank R: STATUS` for each\n"
            "  unload  new prompts with it are refused; waits for those that run\n"
            "  list    a line `ADAPTER STATE USES DIR` for each\n"
            "\n"
            "The default of --timeout is 60 s.",
    .examples = "  coxswain lora load tuned DIR mine\n"
                "  coxswain lora list mine\n",
    .choice_size = sizeof(struct lora_choice),
    .groups = {{&cox_connection_options, offsetof(struct lora_choice, connection)}},
    .words = take_words,
    .run = run,
    .deinit = deinit,
};
