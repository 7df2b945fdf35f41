/*
 * adapter_options: LoRA adapters on a command line, NAME=DIR, and loading them into the group that
 * the command has started.
 *
 * Threads: one.
 * Ownership: the choice owns its texts.
 * Blocks: load, until every rank has each adapter, or its deadline.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_COORDINATOR_ADAPTER_OPTIONS_H
#define COX_COORDINATOR_ADAPTER_OPTIONS_H

#include "engine/batching/lora.h"

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
/* Takes one NAME=DIR. Returns 0; COX_INVALID: not that, twice the same name, or too many;
 * COX_NOT_FOUND: there is no such folder; -ENOMEM. */
int cox_adapter_choice_take(struct cox_adapter_choice *choice, const char *text,
                            struct cox_error *err);
bool cox_adapter_choice_has(const struct cox_adapter_choice *choice, const char *name);
/* Each gets timeout_ms; 0: 60,000. Results as cox_lora_load. */
int cox_adapter_choice_load(const struct cox_adapter_choice *choice, struct cox_lora *lora,
                            uint32_t rank_count, uint64_t timeout_ms, struct cox_error *err);
/* The absolute path of a folder, for another process; the caller's. Codes as take. */
int cox_adapter_path(const char *text, char **ret_path, struct cox_error *err);

#endif
