/*
 * engine_group: a group of reference workers that a command starts, serves and ends, with shared
 * weights, adapters, and optionally a prompt queue for clients.
 *
 * Threads: as foreground.h.
 * Ownership: options are borrowed until start returns, the group's choice until free. What the
 *   functions below return is lent until free.
 * Blocks: start, while the model is loaded, and as cox_foreground_start; free, as
 *   cox_foreground_free.
 * If the process dies: as server.h.
 */
#ifndef COX_PROGRAM_GROUP_H
#define COX_PROGRAM_GROUP_H

#include "channel/base/idioms.h"
#include "program/cli/adapter_options.h"
#include "program/cli/foreground.h"
#include "engine/batching/engine_loop.h"

struct cox_engine_group;

struct cox_engine_group_options {
    /* start sets its hooks and shared_weights */
    struct cox_foreground_options foreground;
    /* Loads the model once, for all ranks (shared_weights.h), if memory and workers allow it. Of
     * other workers than the reference worker the format of the model is not known. */
    bool share_weights;
    /* loaded at the start; NULL: none */
    const struct cox_adapter_choice *adapters;
    /* Accepts prompts of clients, with at most step_tokens tokens per step (0: default). */
    bool serve;
    uint32_t step_tokens;
};

/* After a failure nothing is left.
 * Returns
 *   0
 *   COX_CLOSED: a signal arrived, *ret_signal is its number
 *   as cox_foreground_start
 */
int cox_engine_group_start(const struct cox_engine_group_options *options,
                           struct cox_engine_group **ret_group, int *ret_signal,
                           struct cox_error *err);
/* NULL-safe, returns NULL. */
struct cox_engine_group *cox_engine_group_free(struct cox_engine_group *group);
COX_DEFINE_FREEP(struct cox_engine_group, cox_engine_group_free);

struct cox_foreground *cox_engine_group_foreground(struct cox_engine_group *group);
struct cox_executor *cox_engine_group_executor(struct cox_engine_group *group);
/* Sets what an engine loop on the group needs: the ranks' limits, the recover hook, and the
 * weights. Returns as cox_engine_loop_fit. */
int cox_engine_group_fit(struct cox_engine_group *group, struct cox_engine_loop_options *options,
                         struct cox_error *err);
/* Ends unfinished prompts of clients with this cause. */
void cox_engine_group_end_prompts(struct cox_engine_group *group, const struct cox_error *cause);

/* Checks whether the reference worker, if that is the worker, can divide this model among so many
 * ranks. Each rank would check that too, but only after all are started. Returns 0 or COX_INVALID.
 */
int cox_worker_check(const struct cox_group_choice *options, const char *worker, const char *model,
                     struct cox_error *err);

#endif
