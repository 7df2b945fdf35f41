/*
 * command: the exit status of the program, errors on standard error, and the version.
 */
#ifndef COX_PROGRAM_COMMAND_H
#define COX_PROGRAM_COMMAND_H

#include <coxswain/base.h>

#include <stdio.h>

enum cox_exit_status {
    COX_EXIT_OK = 0,
    COX_EXIT_FAILED = 1, /* a failure that no worker caused */
    COX_EXIT_USAGE = 2,  /* options or input */
    COX_EXIT_WORKER = 3, /* a worker died, failed, or did not reply */
    COX_EXIT_DEGRADED =
        4, /* of status: a rank is dead, stopped or absent, or the group is paused */
    COX_EXIT_SIGNAL = 128, /* plus the number of the signal that ended it */
};

/* Prints the exit statuses, for --help. */
void cox_exit_help(FILE *file);
/* Prints version, features and limits on standard output; the first line is "coxswain VERSION". */
void cox_version_print(void);
/* The exit status for a result that is not 0. */
int cox_exit_of(int status);
/* Reports on standard error that a signal ended the command, and returns its exit status. */
int cox_exit_interrupted(int signal_number);
/* Prints the error on standard error and returns its exit status. */
int cox_exit_with(const struct cox_error *err);
/* The same for errors of options and input: adds where to read more, returns COX_EXIT_USAGE. */
int cox_exit_usage(const char *command, const struct cox_error *err);
/* Closes standard output. Returns exit_status, or COX_EXIT_FAILED if a write failed. */
int cox_exit_flushed(int exit_status);

#endif
