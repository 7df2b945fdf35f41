/* coxswain reload: switches the weights of a running group, between two steps. */
#include "program/cli/command.h"

#include "channel/base/idioms.h"
#include "proto/control.pb-c.h"
#include "program/cli/client_command.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#define TIMEOUT_MS 60000
/* The group fails at the timeout, and then sends the reason. Before that it reads the files, which
 * no timeout interrupts. */
#define GRACE_MS (10 * UINT64_C(60) * 1000)

typedef CoxswainControl__WeightsReply weights_reply;

struct reload_choice {
    struct cox_connection connection;
    /* absolute */
    char *directory;
};

static int ask(const void *context, struct cox_client *client, uint64_t timeout_ms,
               uint64_t deadline_ns, const ProtobufCMessage **ret_reply, struct cox_error *err)
{
    const struct reload_choice *choice = context;
    CoxswainControl__WeightsRequest weights = COXSWAIN_CONTROL__WEIGHTS_REQUEST__INIT;
    const ProtobufCMessage *reply = NULL;
    weights.directory = choice->directory;
    COX_SET(&weights, timeout_ms, timeout_ms);
    int r = cox_client_expect(client, COX_REQUEST(WEIGHTS), &weights.base, COX_REPLY(WEIGHTS),
                              deadline_ns, &reply, err);
    if (!r && ((const weights_reply *)reply)->error)
        r = cox_client_error(((const weights_reply *)reply)->error, err);
    if (!r)
        *ret_reply = reply;
    return r;
}

static void print(const void *choice, const ProtobufCMessage *message)
{
    (void)choice;
    printf("version %" PRIu64 "\n", ((const weights_reply *)message)->version);
}

static int take_directory(void *context, int count, char *const *words, struct cox_error *err)
{
    struct reload_choice *choice = context;
    if (count == 0)
        return cox_fail(err, COX_INVALID, "expected one DIR: the folder of a model");
    int r = cox_connection_words(&choice->connection, count - 1, words + 1, err);
    if (r)
        return r;
    choice->directory = realpath(words[0], NULL);
    if (choice->directory)
        return 0;
    /* A missing folder is a usage error. */
    return cox_fail(err, COX_NOT_FOUND, "the model folder '%.900s': %s", words[0],
                    cox_status_text(-errno));
}

static void deinit(void *context)
{
    struct reload_choice *choice = context;
    free(choice->directory);
}

static int run(void *context)
{
    static const struct cox_client_command command = {
        .reply = &coxswain_control__weights_reply__descriptor,
        .did = "computes with these weights",
        .timeout_ms = TIMEOUT_MS,
        .grace_ms = GRACE_MS,
        .ask = ask,
        .print = print,
    };
    const struct reload_choice *choice = context;
    return cox_client_command_run(&command, &choice->connection, choice);
}

const struct cox_command cox_command_reload = {
    .name = "reload",
    .summary = "give a running group other weights, between two steps",
    .arguments = "DIR [NAME]",
    .text = "Loads the model in DIR, which has the shapes and the eos_token_id of the one in use, "
            "into the coordinator of a running group, and all its workers compute with it from "
            "one step on. Prompts under way continue with it; keys and values that were computed "
            "before stay, and so does the tokenizer. When every worker has switched it prints "
            "`version V`; the former weights are then out of memory. If a worker cannot switch, "
            "all keep the former ones. After --timeout (default 60 s) workers that have not "
            "switched do so with the next step that ends.",
    .examples = "  coxswain reload DIR mine\n",
    .choice_size = sizeof(struct reload_choice),
    .groups = {{&cox_connection_options, offsetof(struct reload_choice, connection)}},
    .words = take_directory,
    .run = run,
    .deinit = deinit,
};
