/*
 * json_file: a file of the command line that is one JSON object, and the lines of its keys.
 *
 * Threads: one.
 * Ownership: the file owns what is read; path and option are lent until deinit.
 * Blocks: read reads a file.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_PROGRAM_JSON_FILE_H
#define COX_PROGRAM_JSON_FILE_H

#include <coxswain/base.h>

#include <jansson.h>

struct cox_json_file {
    const char *path;
    char *text;
    json_t *root;
};

/* Reads an object without duplicate keys, of at most 1 MiB. option: for errors, as in "--cluster".
 * Returns 0; COX_NOT_FOUND: no such file; COX_INVALID: other content, err names line and column;
 * COX_TOO_LARGE; -errno. */
int cox_json_file_read(const char *option, const char *path, struct cox_json_file *ret_file,
                       struct cox_error *err);
void cox_json_file_deinit(struct cox_json_file *file); /* idempotent; zeroed is fine */
/* The line of a key of the outer object; that of the end without such a key. */
int cox_json_file_line(const struct cox_json_file *file, const char *key);

#endif
