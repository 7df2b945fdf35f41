/*
 * lora: the LoRA adapters of a group: which ones its ranks have loaded, and which prompts use them.
 *
 * The ranks stay in agreement. When one rank refuses a load, the ranks that succeeded unload the
 * adapter again; an unload is reverted likewise. Where a rank's death or silence leaves the outcome
 * open, the adapter is unsettled. No prompt may use it until the next command, or the recovery of
 * the group, settles it. A replaced rank has no adapters; replay loads them again.
 *
 *     LOADING -(every rank)-> LOADED -(unload, unused)-> UNLOADING -(every rank)-> gone
 *        |                      ^                            |
 *        |                      '-(a rank failed: loaded everywhere again)
 *        '-(a rank failed: unloaded everywhere)-> gone
 *     LOADING, UNLOADING -(outcome open)-> UNSETTLED -(next command, or recovery)-> gone or LOADED
 *
 * Threads: any, except inside a hook or handler; replay on the recovery thread.
 * Ownership: the executor is borrowed until free.
 * Blocks: load, unload and replay, until their deadline or stop, because one command runs at a
 *   time. unload also waits for the prompts that use the adapter. take, give and list do not block.
 * If the process dies: private memory; the ranks end with it.
 */
#ifndef COX_ENGINE_LORA_H
#define COX_ENGINE_LORA_H

#include <coxswain/server.h>

/* Longest name in bytes; the ranks have the same limit. */
#define COX_LORA_NAME_MAX 128

struct cox_lora;

/* Returns 0 or -ENOMEM. */
int cox_lora_new(struct cox_executor *executor, const struct cox_log *log,
                 struct cox_lora **ret_lora);
/* Running and later commands fail with COX_CLOSED. Idempotent. */
void cox_lora_stop(struct cox_lora *lora);
struct cox_lora *cox_lora_free(struct cox_lora *lora); /* NULL-safe; no call may be running */

/* Loads an adapter on every rank. path is an absolute folder name. ret_results has rank_count
 * elements and is filled on failure too; status -1 means no reply. After a failure, the set of
 * ranks that have the adapter has not grown, or the adapter is unsettled, which err says.
 * Returns
 *   0
 *   COX_INVALID: the name or path is not valid, and no rank was asked; or ranks refused the files,
 *     and nothing else failed
 *   COX_STATE: ranks may disagree on an adapter of that name
 *   COX_TIMEOUT: until the deadline another command was running, or an earlier outcome was
 *     unsettled
 *   COX_CLOSED
 *   as cox_executor_lora_results
 */
int cox_lora_load(struct cox_lora *lora, const char *name, const char *path, uint64_t deadline_ns,
                  struct cox_lora_result *ret_results, struct cox_error *err);
/* Refuses new prompts with the adapter at once and waits for the running ones.
 * Returns
 *   as cox_lora_load
 *   COX_BUSY: still in use at the deadline or when ranks were replaced; it stays loaded
 */
int cox_lora_unload(struct cox_lora *lora, const char *name, uint64_t deadline_ns,
                    struct cox_lora_result *ret_results, struct cox_error *err);

/* Loads on every rank what it lacks, after an init was replayed. An adapter that cannot be loaded
 * any more and is not in use is unloaded, and that is logged. Returns 0, or the error of loading
 * one that is in use. */
int cox_lora_replay(struct cox_lora *lora, uint64_t deadline_ns, struct cox_error *err);

/* Marks the adapter as used by one prompt, until give.
 * Returns
 *   0
 *   COX_INVALID: no adapter has that name; err lists the existing ones
 *   COX_STATE: it is being loaded or unloaded, or is unsettled
 */
int cox_lora_take(struct cox_lora *lora, const char *name, struct cox_error *err);
void cox_lora_give(struct cox_lora *lora, const char *name);

/* In order of loading. Returns 0 or -ENOMEM. *ret_infos is one
 * allocation: free(3). */
int cox_lora_list(struct cox_lora *lora, struct cox_lora_info **ret_infos, size_t *ret_count);

#endif
