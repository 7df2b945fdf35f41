/*
 * command: the sub-commands of coxswain, and what they have in common.
 *
 * Each takes its own argv, with the command's name in argv[0], and returns the exit status of the
 * program. They print.
 */
#ifndef COX_COORDINATOR_COMMAND_H
#define COX_COORDINATOR_COMMAND_H

#include "channel/base/base.h"

#include <stdio.h>

enum cox_exit {
    COX_EXIT_OK = 0,
    COX_EXIT_FAILED = 1,   /* it did not work, and no worker is to blame */
    COX_EXIT_USAGE = 2,    /* options or input */
    COX_EXIT_WORKER = 3,   /* a worker died, failed, or did not answer */
    COX_EXIT_SIGNAL = 128, /* and the number of the signal that ended it */
};

int cox_command_status(int argc, char **argv);
int cox_command_stop(int argc, char **argv);
int cox_command_recover(int argc, char **argv);
int cox_command_lora(int argc, char **argv);
int cox_command_link(int argc, char **argv);
int cox_command_unlink(int argc, char **argv);
int cox_command_link_status(int argc, char **argv);
int cox_command_role(int argc, char **argv);
int cox_command_pull_kv(int argc, char **argv);
int cox_command_layout(int argc, char **argv);
int cox_command_clean(int argc, char **argv);
int cox_command_doctor(int argc, char **argv);
int cox_command_weights(int argc, char **argv);
int cox_command_handle(int argc, char **argv);

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
