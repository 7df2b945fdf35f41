/*
 * lora: the LoRA adapters of a group: which ones its ranks have loaded, and who computes with them.
 *
 * Ranks agree: a load that some rank refuses is taken back on those that did not, an unload
 * likewise. Where a rank's death or silence leaves that open, the adapter is unsettled: nobody
 * computes with it until the next order, or the recovery of the group, has settled it. A rank that
 * was replaced has no adapters: replay loads them again.
 *
 *     load:    LOADING   -(every rank)-> LOADED    -(unload, unused, every rank)-> gone
 *                 |                        ^  |
 *                 '-(a rank failed: unloaded everywhere)-> gone, or UNSETTLED -> gone
 *                                          '-(an unload failed: loaded everywhere)-- UNLOADING, or
 *                                          UNSETTLED
 *
 * Threads: any, not inside a hook or handler; replay on recovery's thread.
 * Ownership: the executor is borrowed until free.
 * Blocks: load, unload and replay until their deadline or stop: one order at a time; unload also
 *   for the prompts that use the adapter. take, give and list nothing.
 * If the process dies: private memory; the ranks end with it.
 */
#ifndef COX_COORDINATOR_LORA_H
#define COX_COORDINATOR_LORA_H

#include "coordinator/server/hooks.h"

/* Bytes of a name, at most: as the ranks have it. */
#define COX_LORA_NAME_MAX 128

struct cox_lora;

/* Returns 0 or -ENOMEM. */
int cox_lora_new(struct cox_executor *executor, const struct cox_log *log,
                 struct cox_lora **ret_lora);
/* Orders come out with COX_CLOSED, now and later. Idempotent. */
void cox_lora_stop(struct cox_lora *lora);
struct cox_lora *cox_lora_free(struct cox_lora *lora); /* NULL-safe; nobody is inside */

/* ret_results: rank_count of them, filled also on failure; status -1: no reply. path: a folder,
 * absolute. Returns what cox_executor_lora_results does, and COX_INVALID: a name or path that
 * cannot be, then no rank was asked, or files that ranks refuse while nothing else is wrong;
 * COX_STATE: ranks may disagree on one of that name; COX_TIMEOUT: another order was under way until
 * the deadline, or what one left was not settled until then; COX_CLOSED. Unless 0, no rank has it
 * that did not have it before, or it is unsettled, which err says. */
int cox_lora_load(struct cox_lora *lora, const char *name, const char *path, uint64_t deadline_ns,
                  struct cox_lora_result *ret_results, struct cox_error *err);
/* New prompts with it are refused at once; those that there are, waited for. Results as load;
 * COX_BUSY: it is still in use at the deadline, or when ranks were replaced, and stays. */
int cox_lora_unload(struct cox_lora *lora, const char *name, uint64_t deadline_ns,
                    struct cox_lora_result *ret_results, struct cox_error *err);

/* After an init was replayed: every rank gets what it lacks. An adapter that cannot be loaded any
 * more, and that nobody uses, is unloaded, which is logged. Returns 0, or what a load of one that
 * is in use came to. */
int cox_lora_replay(struct cox_lora *lora, uint64_t deadline_ns, struct cox_error *err);

/* A prompt is computed with it, from now until give. Returns 0; COX_INVALID: there is none of that
 * name, err lists what there is; COX_STATE: it is being loaded or unloaded, or is unsettled. */
int cox_lora_take(struct cox_lora *lora, const char *name, struct cox_error *err);
void cox_lora_give(struct cox_lora *lora, const char *name);

/* In the order of loading. Returns 0 or -ENOMEM; *ret_infos is freed with cox_lora_infos_free. */
int cox_lora_list(struct cox_lora *lora, struct cox_lora_info **ret_infos, size_t *ret_count);

#endif
