/*
 * legacy_init: the init configuration that workers of MindIE-LLM require, made of the settings of
 * the command. docs/wire.md lists the keys.
 *
 * Threads: one.
 * Ownership: the texts are the caller's struct, or borrowed from the options.
 * Blocks: reading config.json of the model.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_PROGRAM_LEGACY_INIT_H
#define COX_PROGRAM_LEGACY_INIT_H

#include "program/cli/foreground.h"

#define COX_LEGACY_INIT_KEY_COUNT 16

struct cox_legacy_init {
    /* of the options, and then the defaults of keys that these lack; NULL: not made */
    struct cox_config_entry *entries;
    size_t count;
    char devices[COX_RANK_COUNT_MAX * 4];
    char ranks[12];
    char positions[12];
};

/* Returns
 *   0
 *   COX_CORRUPT: config.json, err says what is wrong
 *   COX_NOT_FOUND: the model has no config.json
 *   -ENOMEM
 *   -errno
 */
int cox_legacy_init_make(const struct cox_foreground_options *options,
                         struct cox_legacy_init *ret_init, struct cox_error *err);
void cox_legacy_init_deinit(struct cox_legacy_init *init); /* idempotent; zeroed is fine */

#endif
