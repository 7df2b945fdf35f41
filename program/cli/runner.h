/*
 * runner: the common part of all commands: the command line from tables, --help, usage errors, exit
 * status.
 *
 * A command is a table: struct cox_command. Its options come in groups that commands share; each
 * group takes its options into a struct of its own, which is a part of the command's choice. argp
 * parses them, and prints the help.
 *
 * Threads: one.
 * Blocks: as the command does.
 * Ownership: tables are static; strings are argv's.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_PROGRAM_RUNNER_H
#define COX_PROGRAM_RUNNER_H

#include "command.h"

#include <stddef.h>

#define COX_COMMAND_GROUP_COUNT_MAX 8
/* Options of a group. */
#define COX_OPTION_COUNT_MAX 16

/* What an option is, and the type of the member that it goes into. */
enum cox_option_kind {
    COX_OPTION_FLAG,    /* bool, which becomes true; the option has no value */
    COX_OPTION_TEXT,    /* const char * */
    COX_OPTION_NAME,    /* const char *, the name of a group */
    COX_OPTION_COUNT,   /* uint32_t or int32_t, from min to max */
    COX_OPTION_NUMBER,  /* uint64_t, from min to max */
    COX_OPTION_SECONDS, /* uint64_t, in milliseconds */
};

struct cox_option {
    /* without dashes */
    const char *name;
    /* as in "SEC"; NULL: it has none */
    const char *value;
    /* of --help */
    const char *text;
    /* 0: none */
    char letter;
    enum cox_option_kind kind;
    /* of the member, in the struct of the group */
    size_t offset;
    uint64_t min, max;
    /* of a bool that becomes true, too; 0: of none */
    size_t given;
    /* In place of kind: takes the value into the member. Returns 0 or a code of usage: COX_INVALID,
     * COX_NOT_FOUND; others end the command as failed. */
    int (*take)(void *member, const char *value, struct cox_error *err);
};

/* The members of an option by its kind; the type of the member is checked. */
#define COX_FLAG(type, member)                                                                     \
    .kind = COX_OPTION_FLAG, .offset = COX_OPTION_OFFSET(type, member, bool)
#define COX_TEXT(type, member)                                                                     \
    .kind = COX_OPTION_TEXT, .offset = COX_OPTION_OFFSET(type, member, const char *)
#define COX_NAME(type, member)                                                                     \
    .kind = COX_OPTION_NAME, .offset = COX_OPTION_OFFSET(type, member, const char *)
#define COX_COUNT(type, member, least, most)                                                       \
    .kind = COX_OPTION_COUNT, .offset = offsetof(type, member) + COX_OPTION_IS_32(type, member),   \
    .min = (least), .max = (most)
#define COX_NUMBER(type, member, least, most)                                                      \
    .kind = COX_OPTION_NUMBER, .offset = COX_OPTION_OFFSET(type, member, uint64_t),                \
    .min = (least), .max = (most)
#define COX_SECONDS(type, member)                                                                  \
    .kind = COX_OPTION_SECONDS, .offset = COX_OPTION_OFFSET(type, member, uint64_t)
#define COX_TAKE(type, member, function) .take = (function), .offset = offsetof(type, member)
#define COX_GIVEN(type, member) .given = COX_OPTION_OFFSET(type, member, bool)
#define COX_OPTION_OFFSET(type, member, member_type)                                               \
    _Generic(((type *)0)->member, member_type : offsetof(type, member))
#define COX_OPTION_IS_32(type, member) _Generic(((type *)0)->member, uint32_t : 0, int32_t : 0)

struct cox_option_group {
    /* of --help; NULL: none */
    const char *title;
    /* ends with {0} */
    const struct cox_option *options;
    /* Called when all options are taken; NULL: nothing to check. Returns as take of an option. */
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
     * Returns as take of an option. */
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

/* Takes the value of one option into the struct of its group; NULL where the option has none.
 * Returns as take. */
int cox_option_take(const struct cox_option *option, void *choice, const char *value,
                    struct cox_error *err);

/* Strict numbers: no blanks or other text around them. `what` names the option in the error. Return
 * 0 or COX_INVALID. */
int cox_parse_number(const char *what, const char *text, uint64_t min, uint64_t max,
                     uint64_t *ret_number, struct cox_error *err);
int cox_parse_real(const char *what, const char *text, double min, double max, double *ret_number,
                   struct cox_error *err);
int cox_parse_size(const char *what, const char *text, uint64_t *ret_size, struct cox_error *err);
/* "1.5" seconds, to milliseconds, at least 1. */
int cox_parse_seconds(const char *what, const char *text, uint64_t *ret_ms, struct cox_error *err);

#endif
