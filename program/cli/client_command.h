/*
 * client_command: a command that sends a request to a running group and prints the reply.
 *
 * This is the common part of such commands: connection, deadline, the reply as text or JSON, exit
 * status. The JSON object is that of reply_json, and `ok` and `error` (null: none). An error is
 * also written to standard error, as without --json.
 *
 * Threads: one.
 * Blocks: until the group has replied or the deadline has passed.
 * Ownership: replies are lent by the client, until it is asked again.
 * If the process dies: the kernel closes the connection, and the group cancels the request.
 */
#ifndef COX_PROGRAM_CLIENT_COMMAND_H
#define COX_PROGRAM_CLIENT_COMMAND_H

#include "connection.h"

#include <jansson.h>
#include <protobuf-c/protobuf-c.h>

struct cox_client_command {
    /* the type of the reply; if there is none, JSON has an empty one */
    const ProtobufCMessageDescriptor *reply;
    /* What a group did whose command succeeded, printed on standard error behind its name. Such a
     * command changes a group, which the command line names. NULL: it changes nothing. */
    const char *did;
    /* the default of --timeout */
    uint64_t timeout_ms;
    /* Added to the timeout: the group itself ends the command at the timeout, with the reason. */
    uint64_t grace_ms;
    /* Sends the request and waits. timeout_ms goes into the request, deadline_ns is this side's.
     * Returns 0, or a failure with err filled. *ret_reply, NULL before, is also printed after a
     * failure. */
    int (*ask)(const void *choice, struct cox_client *client, uint64_t timeout_ms,
               uint64_t deadline_ns, const ProtobufCMessage **ret_reply, struct cox_error *err);
    /* Prints the reply for people; NULL: there is nothing to print. */
    void (*print)(const void *choice, const ProtobufCMessage *reply);
    /* Adds to the JSON object; reply is NULL after a failure without one. NULL: nothing. */
    void (*json)(const void *choice, const ProtobufCMessage *reply, json_t *root);
    /* The exit status after a reply; NULL: 0. */
    int (*exit_status)(const void *choice, const ProtobufCMessage *reply);
    /* The exit status after a failure, unless the command line caused it; 0: that of the error. */
    int failed;
};

/* Returns the exit status. */
int cox_client_command_run(const struct cox_client_command *command,
                           const struct cox_connection *connection, const void *choice);

/* An `ask` for the status of a group. */
int cox_client_ask_status(const void *choice, struct cox_client *client, uint64_t timeout_ms,
                          uint64_t deadline_ns, const ProtobufCMessage **ret_reply,
                          struct cox_error *err);

/* Waits before the next request; a signal ends it. */
void cox_client_pause_ms(uint64_t ms);

#endif
