/*
 * connection: which running group a command is for: the options --name, --door and --timeout of the
 * commands that talk to one.
 *
 * Threads: one.
 * Blocks: open, until its deadline.
 * Ownership: strings are argv's.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_COORDINATOR_CONNECTION_H
#define COX_COORDINATOR_CONNECTION_H

#include "client.h"
#include "options.h"

struct cox_connection {
    /* neither: the only group that is alive */
    const char *name;
    /* path */
    const char *door;
    /* the caller's default before the first take */
    uint64_t timeout_ms;
};

enum {
    COX_OPTION_DOOR = COX_OPTION_COMMAND,
    COX_OPTION_TARGET_COMMAND, /* the first one of a command's own */
};

#define COX_TARGET_SHORT_OPTIONS ":h"
#define COX_TARGET_LONG_OPTIONS                                                                    \
    {"name", required_argument, NULL, COX_OPTION_NAME},                                            \
        {"door", required_argument, NULL, COX_OPTION_DOOR},                                        \
        {"timeout", required_argument, NULL, COX_OPTION_TIMEOUT},                                  \
    {                                                                                              \
        "help", no_argument, NULL, 'h'                                                             \
    }

/* Takes one option that getopt_long returned, its value in optarg. Returns 0, or COX_INVALID: not
 * one of these, a bad value, or what getopt_long did not understand (argv tells which). */
int cox_connection_take(struct cox_connection *target, int option, char *const *argv,
                        struct cox_error *err);
/* Once all are taken. Returns 0 or COX_INVALID. */
int cox_connection_check(const struct cox_connection *target, struct cox_error *err);
/* As cox_client_open and cox_client_open_path. */
int cox_connection_open(const struct cox_connection *target, struct cox_client *client,
                        uint64_t deadline_ns, struct cox_error *err);

#endif
