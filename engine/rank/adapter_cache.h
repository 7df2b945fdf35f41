/*
 * adapter_cache: the LoRA adapters that a rank has loaded, by name.
 *
 * load reads the files into private memory and then publishes the adapter in a slot, while steps
 * run. find takes no lock, because a pause may leave a step at any instruction (cox_worker_pause).
 * What find returns stays valid until the end of the step, for two reasons. The caller of remove
 * has ensured that no sequence uses the adapter (cox_worker_lora_retire). And set_model is called
 * on the thread that computes steps. find compares the names of all entries, also of one being
 * removed; that entry's name is freed only after the find.
 *
 * Threads: find and set_model on the execute thread; load, remove and has on the link thread; new
 *   and free when neither runs.
 * Ownership: the object owns the adapters; what find returns is lent as described.
 * Blocks: load reads files; nothing else.
 * Codes of load:
 *   0
 *   COX_TAKEN: an adapter of that name is loaded
 *   COX_FULL: all slots are in use
 *   COX_STATE: no model, or it was replaced meanwhile
 *   COX_INVALID: also, not the expected files
 *   as cox_adapter_load
 * Codes of remove: 0, COX_NOT_FOUND.
 * If the process dies: private memory; nothing is left. A new process of the rank has no adapters.
 */
#ifndef COX_ENGINE_ADAPTER_CACHE_H
#define COX_ENGINE_ADAPTER_CACHE_H

#include "engine/model/config.h"
#include "engine/model/share.h"
#include "engine/compute/adapter.h"

#define COX_ADAPTER_SLOT_COUNT_DEFAULT 8u
#define COX_ADAPTER_SLOT_COUNT_MAX 64u

struct cox_adapter_cache;

/* slot_count 0: the default. Above the maximum asserts. Returns 0 or -ENOMEM. */
int cox_adapter_cache_new(uint32_t slot_count, struct cox_adapter_cache **ret_adapters);
struct cox_adapter_cache *cox_adapter_cache_free(
    struct cox_adapter_cache *adapters); /* NULL-safe */

/* Sets the model and share of all adapters loaded from now on, and drops the present ones. config
 * NULL: no model. */
void cox_adapter_cache_set_model(struct cox_adapter_cache *adapters,
                                 const struct cox_model_config *config,
                                 const struct cox_share *share);

/* For cox_adapter_source, with the object as its context. */
const struct cox_adapter *cox_adapter_cache_find(void *context, const char *name);

/* expected: the digest that the files must have; 0: any. *ret_digest is their actual digest. */
int cox_adapter_cache_load(struct cox_adapter_cache *adapters, const char *name,
                           const char *directory, uint64_t expected, uint64_t *ret_digest,
                           struct cox_error *err);
bool cox_adapter_cache_has(struct cox_adapter_cache *adapters, const char *name);
/* The caller ensures that no sequence uses the adapter. */
int cox_adapter_cache_remove(struct cox_adapter_cache *adapters, const char *name,
                             struct cox_error *err);

#endif
