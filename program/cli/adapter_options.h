/*
 * adapter_options: LoRA adapters on a command line, NAME=DIR.
 *
 * Threads: one.
 * Ownership: the choice owns its texts.
 * Blocks: nothing.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_PROGRAM_ADAPTER_OPTIONS_H
#define COX_PROGRAM_ADAPTER_OPTIONS_H

#include <coxswain/base.h>

#define COX_ADAPTER_CHOICE_MAX 64

struct cox_adapter_choice {
    struct {
        char *name;
        /* absolute */
        char *path;
    } items[COX_ADAPTER_CHOICE_MAX];
    size_t count;
};

void cox_adapter_choice_deinit(struct cox_adapter_choice *choice); /* idempotent; zeroed is fine */
/* Takes one NAME=DIR into a struct cox_adapter_choice. Returns 0; COX_INVALID: not of this form, a
 * second one of the same name, or too many; COX_NOT_FOUND: no such folder; -ENOMEM. */
int cox_adapter_choice_take(void *choice, const char *text, struct cox_error *err);
/* The absolute path of a folder, for another process, in memory that the caller frees. Returns as
 * take. */
int cox_adapter_path(const char *text, char **ret_path, struct cox_error *err);

#endif
