/*
 * reference_hooks: connects the prompts, adapters and weights of the reference engine to the hooks
 * of a server (coxswain/server.h).
 *
 * Threads: as the hooks.
 * Ownership: context of every hook is a struct cox_reference, which owns nothing. Each member is
 *   set, or NULL, before a hook that uses it is called.
 * Blocks: as the hooks.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_ENGINE_REFERENCE_HOOKS_H
#define COX_ENGINE_REFERENCE_HOOKS_H

#include <coxswain/server.h>

struct cox_lora;
struct cox_prompt_queue;
struct cox_shared_weights;

struct cox_reference {
    struct cox_lora *lora;
    /* NULL: the ranks load their own */
    struct cox_shared_weights *weights;
    /* NULL: clients cannot send prompts */
    struct cox_prompt_queue *queue;
};

extern const struct cox_prompt_hooks cox_reference_prompt_hooks;
extern const struct cox_lora_hooks cox_reference_lora_hooks;
extern const struct cox_weights_hooks cox_reference_weights_hooks;

#endif
