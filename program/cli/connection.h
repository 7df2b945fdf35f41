/*
 * connection: the options shared by commands that talk to a running group: which group, and how its
 * reply is printed.
 *
 * Threads: one.
 * Blocks: open, until its deadline.
 * Ownership: strings are argv's.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_PROGRAM_CONNECTION_H
#define COX_PROGRAM_CONNECTION_H

#include "program/client/client.h"
#include "runner.h"

struct cox_connection {
    /* if neither is given: the only live group */
    const char *name;
    /* path */
    const char *control_socket;
    /* 0: not given */
    uint64_t timeout_ms;
    /* the reply is printed as one JSON object */
    bool json;
};

/* --name, --socket, --timeout, --json into a struct cox_connection. */
extern const struct cox_option_group cox_connection_options;

/* The last arguments of such a command: NAME, as --name, or none. `words` of a command whose choice
 * begins with its connection, and the rest of it where others come before. */
int cox_connection_words(void *connection, int count, char *const *words, struct cox_error *err);

/* As cox_client_open and cox_client_open_path. */
int cox_connection_open(const struct cox_connection *connection, struct cox_client *client,
                        uint64_t deadline_ns, struct cox_error *err);

/* Runs the watch, and says on standard error what a group that cannot work waits for, when that
 * changes. Returns as cox_client_watch. */
int cox_connection_watch(struct cox_watch *watch, struct cox_error *err);

#endif
