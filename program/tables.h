/*
 * tables: what other programs read of the tables of commands and options: candidates for a shell's
 * completion, and all of them as JSON, which the man pages are made of.
 *
 * Threads: one.
 * Ownership: tables are static.
 * Blocks: complete, for names of groups, 300 ms at most; on standard output.
 * If the process dies: nothing is left.
 */
#ifndef COX_PROGRAM_TABLES_H
#define COX_PROGRAM_TABLES_H

#include "program/cli/runner.h"

struct cox_commands {
    const struct cox_command *const *list;
    size_t count;
};

/*
 * Prints what may stand for the last word of a command line, which may be empty: lines
 * "CANDIDATE\tDESCRIPTION", or ":files" or ":dirs", where the shell offers names of its own.
 */
void cox_tables_complete(const struct cox_commands *commands, int count, char *const *words);
/* Prints the commands with their options as one JSON array. Hidden options are left out. Returns
 * the exit status. */
int cox_tables_json(const struct cox_commands *commands);

#endif
