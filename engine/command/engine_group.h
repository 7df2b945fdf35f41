/*
 * engine_group: a group of reference workers that a command starts, serves and ends: the model's
 * weights for all ranks, adapters, and where wanted the prompts of clients.
 *
 * Threads: as foreground.h.
 * Ownership: options are borrowed until start returns, the group's choice until free; what the
 *   functions below return is lent until free.
 * Blocks: start while the model is loaded, and as cox_foreground_start; free as
 *   cox_foreground_free.
 * If the process dies: as server.h.
 */
#ifndef COX_ENGINE_GROUP_H
#define COX_ENGINE_GROUP_H

#include "coordinator/cli/adapter_options.h"
#include "coordinator/cli/foreground.h"
#include "engine/batching/engine_loop.h"

struct cox_engine_group;
struct cox_lora;

struct cox_engine_group_options {
    /* its hooks and shared_weights are set by start */
    struct cox_foreground_options foreground;
    /* Loads the model here, once, for all ranks (shared_weights.h), if it may. */
    bool share_weights;
    /* loaded at the start; NULL: none */
    const struct cox_adapter_choice *adapters;
    /* Prompts of clients are computed, with steps of so many tokens (0: default). */
    bool serve;
    uint32_t step_tokens;
};

/* Returns 0; what cox_foreground_start returns; COX_CLOSED: a signal came, and *ret_signal is its
 * number. Nothing is left unless 0. */
int cox_engine_group_start(const struct cox_engine_group_options *options,
                           struct cox_engine_group **ret_group, int *ret_signal,
                           struct cox_error *err);
/* NULL-safe, returns NULL. */
struct cox_engine_group *cox_engine_group_free(struct cox_engine_group *group);
void cox_engine_group_freep(struct cox_engine_group **group); /* for _cox_cleanup_ */

struct cox_foreground *cox_engine_group_foreground(struct cox_engine_group *group);
struct cox_executor *cox_engine_group_executor(struct cox_engine_group *group);
struct cox_lora *cox_engine_group_lora(struct cox_engine_group *group);
/* What an engine loop on the group needs: the ranks' limits, when it goes on after a recovery, and
 * the weights that it tells of. Returns as cox_engine_loop_fit. */
int cox_engine_group_fit(struct cox_engine_group *group, struct cox_engine_loop_options *options,
                         struct cox_error *err);
/* Prompts of clients that are not done end with this cause. */
void cox_engine_group_end_prompts(struct cox_engine_group *group, const struct cox_error *cause);

/* Whether the reference worker, where that is the one, can divide this model among so many ranks:
 * it would say so itself, each rank of them, once all are started. Returns 0 or COX_INVALID. */
int cox_worker_check(const struct cox_group_choice *options, const char *worker, const char *model,
                     struct cox_error *err);

#endif
