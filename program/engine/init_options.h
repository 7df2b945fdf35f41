/*
 * init_options: the configuration that a command line sends to workers with the init: --init
 * KEY=VALUE and --init @FILE.
 *
 * Threads: one.
 * Ownership: the choice owns its texts; entries point into it.
 * Blocks: reading a file.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_PROGRAM_INIT_OPTIONS_H
#define COX_PROGRAM_INIT_OPTIONS_H

#include <coxswain/requests.h>

struct cox_init_choice {
    struct cox_config_entry *entries;
    size_t count;
    /* the first ones of them are from the file */
    size_t file_count;
    bool has_file;
};

void cox_init_choice_deinit(struct cox_init_choice *choice); /* idempotent; zeroed is fine */
/* Takes KEY=VALUE or @FILE, in any order, into a struct cox_init_choice. A value may be empty, and
 * overrides the file's. FILE, the only one, is a JSON object of strings, numbers, true and false,
 * which are sent as they are written there. Returns 0; COX_INVALID: another form, twice the same
 * key, no UTF-8, a second file, or another content of the file, err names line and key;
 * COX_NOT_FOUND: no such file; COX_TOO_LARGE; -errno. */
int cox_init_choice_take(void *choice, const char *text, struct cox_error *err);
/* NULL: no such key. */
const char *cox_init_choice_get(const struct cox_init_choice *choice, const char *key);

#endif
