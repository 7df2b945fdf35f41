/*
 * command: the exit status of the program, and errors on standard error.
 */
#ifndef COX_COORDINATOR_COMMAND_H
#define COX_COORDINATOR_COMMAND_H

#include "channel/base/base.h"

#include <stdio.h>

enum cox_exit_status {
    COX_EXIT_OK = 0,
    COX_EXIT_FAILED = 1,   /* it did not work, and no worker is to blame */
    COX_EXIT_USAGE = 2,    /* options or input */
    COX_EXIT_WORKER = 3,   /* a worker died, failed, or did not reply */
    COX_EXIT_SIGNAL = 128, /* and the number of the signal that ended it */
};

/* The lines of --help that tell the exit statuses. */
void cox_exit_help(FILE *file);
/* The exit status for a result that is not 0. */
int cox_exit_of(int status);
/* Says so on standard error and returns the exit status for a signal that asked for the end. */
int cox_exit_interrupted(int signal_number);
/* Says the error on standard error and returns its exit status. */
int cox_exit_with(const struct cox_error *err);
/* The same for options and input: status COX_EXIT_USAGE, and where to read more. */
int cox_exit_usage(const char *command, const struct cox_error *err);
/* Closes standard output. Returns exit_status, or COX_EXIT_FAILED when something could not be
 * written. */
int cox_exit_flushed(int exit_status);

#endif
