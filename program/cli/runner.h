/*
 * runner: the common part of all commands: the command line from tables, --help, usage errors, exit
 * status.
 *
 * A command is a table: struct cox_command. Its options come in groups that commands share; each
 * group takes its options into a struct of its own, which is a part of the command's choice. The
 * tables of options are those of argp, which also prints the help.
 *
 * Threads: one.
 * Blocks: as the command does.
 * Ownership: tables are static; strings are argv's.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_PROGRAM_RUNNER_H
#define COX_PROGRAM_RUNNER_H

#include "command.h"

#include <argp.h>

/* Options without a letter get keys from here on. Keys differ within one command. */
#define COX_OPTION_KEY(number) (256 + (number))
#define COX_COMMAND_GROUP_COUNT_MAX 8

struct cox_option_group {
    /* of --help; NULL: none */
    const char *title;
    /* ends with {0} */
    const struct argp_option *options;
    /* Takes one of the options; value is NULL where the option has none. Returns 0 or a code of
     * usage: COX_INVALID, COX_NOT_FOUND; others end the command as failed. */
    int (*take)(void *choice, int key, const char *value, struct cox_error *err);
    /* Called when all options are taken; NULL: nothing to check. Returns as take. */
    int (*check)(const void *choice, struct cox_error *err);
};

struct cox_command {
    const char *name;
    /* one line of `coxswain --help` */
    const char *summary;
    /* the arguments after the options, as in "NAME DIR"; "\n" separates forms; NULL: none */
    const char *arguments;
    /* what the command does; the second part, after "\v", is printed below the options */
    const char *text;
    /* lines of --help, at most 80 columns; NULL: none */
    const char *examples;
    /* size of the struct that run gets; it is zeroed first */
    size_t choice_size;
    /* NULL: zeros are the defaults */
    void (*init)(void *choice);
    struct {
        const struct cox_option_group *group;
        /* of the group's struct within the choice */
        size_t offset;
    } groups[COX_COMMAND_GROUP_COUNT_MAX];
    /* Takes the arguments after the options, also if there are none. NULL where arguments is NULL.
     * Returns as take of a group. */
    int (*words)(void *choice, int count, char *const *words, struct cox_error *err);
    /* words gets what stands after "--"; one word in front of it is the value of --name */
    bool name_in_front;
    /* Returns the exit status. */
    int (*run)(void *choice);
    /* NULL: nothing to release. Also called when the command line was refused. */
    void (*deinit)(void *choice);
};

/* The commands of this folder. */
extern const struct cox_command cox_command_run;
extern const struct cox_command cox_command_status;
extern const struct cox_command cox_command_list;
extern const struct cox_command cox_command_top;
extern const struct cox_command cox_command_metrics;
extern const struct cox_command cox_command_stacks;
extern const struct cox_command cox_command_trace;
extern const struct cox_command cox_command_postmortem;
extern const struct cox_command cox_command_stop;
extern const struct cox_command cox_command_recover;
extern const struct cox_command cox_command_lora;
extern const struct cox_command cox_command_link;
extern const struct cox_command cox_command_unlink;
extern const struct cox_command cox_command_link_status;
extern const struct cox_command cox_command_role;
extern const struct cox_command cox_command_pull_kv;
extern const struct cox_command cox_command_layout;
extern const struct cox_command cox_command_clean;
extern const struct cox_command cox_command_doctor;
extern const struct cox_command cox_command_reload;
extern const struct cox_command cox_command_weights;
extern const struct cox_command cox_command_handle;

/* Parses the command line and runs the command; argv[0] is its name. Returns the exit status of
 * the program. Standard output is closed afterwards. */
int cox_command_main(const struct cox_command *command, int argc, char **argv);

#endif
