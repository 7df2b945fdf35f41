/*
 * options: the command lines of the programs that measure, and of their subjects.
 *
 * One thread. The caller owns everything; texts are lent from argv. Nothing blocks. If the process
 * dies: nothing is left.
 */
#ifndef BENCH_OPTIONS_H
#define BENCH_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>

#define OPTIONS_LIST_MAX 16

struct options_list {
    size_t values[OPTIONS_LIST_MAX];
    size_t count;
};

/* --NAME VALUE, or --NAME alone where it is a flag; one of these is where it goes. */
struct option_spec {
    const char *name;
    size_t *number;
    /* numbers with commas between; at least one */
    struct options_list *list;
    const char **text;
    bool *flag;
    /* of a number */
    size_t min, max;
};

/* specs end with one that has no name. Returns -1 to go on, or the exit status of the program,
 * which has then printed the usage: 0 after --help, 2 where argv is wrong or has more than options.
 * */
int options_parse(int argc, char **argv, const struct option_spec *specs, const char *usage);

/* The file of this program. Returns 0 or a negative errno. */
int options_program_path(char *path, size_t size);

#endif
