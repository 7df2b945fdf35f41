#include "client_command.h"

#include "channel/base/idioms.h"
#include "console.h"
#include "proto/control.pb-c.h"
#include "reply_json.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static void json_print(const struct cox_client_command *command, const void *choice,
                       const ProtobufCMessage *reply, const struct cox_error *error)
{
    _cox_cleanup_(cox_free_ptr) ProtobufCMessage *empty = NULL;
    if (!reply) {
        empty = malloc(command->reply->sizeof_message);
        if (!empty)
            return;
        command->reply->message_init(empty);
    }
    json_t *root = cox_reply_json(reply ? reply : empty);
    json_object_set_new(root, "ok", json_boolean(error->code == 0));
    json_object_set_new(root, "error", error->code ? json_string(error->text) : json_null());
    if (command->json)
        command->json(choice, reply, root);
    json_dumpf(root, stdout, JSON_COMPACT);
    putchar('\n');
    json_decref(root);
}

int cox_client_command_run(const struct cox_client_command *command,
                           const struct cox_connection *connection, const void *choice)
{
    _cox_cleanup_(cox_client_close) struct cox_client client = COX_CLIENT_NONE;
    const ProtobufCMessage *reply = NULL;
    struct cox_error error = {0};
    uint64_t timeout_ms = connection->timeout_ms ? connection->timeout_ms : command->timeout_ms;
    uint64_t deadline_ns = cox_deadline_after_ms(timeout_ms + command->grace_ms);
    int r = cox_connection_open(connection, &client, deadline_ns, &error);
    struct cox_watch watch = {.name = client.group,
                              .timeout_ms = timeout_ms + command->grace_ms,
                              .heard_ns = cox_now_ns()};
    client.check = cox_connection_watch;
    client.watch = &watch;
    if (!r && command->did && !connection->name && !connection->control_socket)
        r = cox_fail(&error, COX_INVALID,
                     "this changes a group, so say which: --name %s is the only one that is alive",
                     client.group);
    if (!r)
        r = command->ask(choice, &client, timeout_ms, deadline_ns, &reply, &error);
    cox_client_clean_text(error.text);
    if (connection->json)
        json_print(command, choice, reply, &error);
    else if (reply && command->print)
        command->print(choice, reply);
    if (!r && command->did && !connection->json)
        cox_console_say("the group '%s' %s", client.group, command->did);
    if (!r)
        return command->exit_status ? command->exit_status(choice, reply) : COX_EXIT_OK;
    int exit_status = cox_exit_with(&error);
    return command->failed && r != COX_INVALID ? command->failed : exit_status;
}

int cox_client_ask_status(const void *choice, struct cox_client *client, uint64_t timeout_ms,
                          uint64_t deadline_ns, const ProtobufCMessage **ret_reply,
                          struct cox_error *err)
{
    struct CoxswainControl__StatusReply *status;
    (void)choice, (void)timeout_ms;
    int r = cox_client_status(client, deadline_ns, &status, err);
    if (!r)
        *ret_reply = &status->base;
    return r;
}

void cox_client_pause_ms(uint64_t ms)
{
    nanosleep(&(struct timespec){.tv_sec = (time_t)(ms / 1000),
                                 .tv_nsec = (long)(ms % 1000 * COX_NSEC_PER_MSEC)},
              NULL);
}
