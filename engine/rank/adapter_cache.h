/*
 * adapter_cache: the LoRA adapters that a rank has loaded, by name.
 *
 * A load reads its files into memory of its own and is then published in one of the slots, while
 * steps run on. find takes no lock: a step may be left at any instruction (cox_worker_pause). What
 * it found stays until the step's end, because who removes an adapter has made sure that no
 * sequence has it (cox_worker_lora_retire), and set_model is called on the thread that computes
 * steps. The names of all that are loaded are looked at meanwhile, also of one that is being
 * removed: its name stays until that find is over.
 *
 * Threads: find and set_model on the execute thread; load, remove and has on the link thread; new
 *   and free when neither runs.
 * Ownership: the object owns the adapters; what find gives is lent as said.
 * Blocks: load reads files; the rest nothing.
 * Codes: load: 0; COX_TAKEN: there is one of that name; COX_FULL: all slots are taken; COX_STATE:
 *   there is no model, or it was replaced meanwhile; COX_INVALID: also, it is not what was
 *   expected; those of cox_adapter_load. remove: COX_NOT_FOUND.
 * If the process dies: private memory; nothing is left. A new process of the rank has none.
 */
#ifndef COX_WORKER_ADAPTER_CACHE_H
#define COX_WORKER_ADAPTER_CACHE_H

#include "engine/model/config.h"
#include "engine/model/share.h"
#include "engine/compute/adapter.h"

#define COX_ADAPTER_SLOT_COUNT_DEFAULT 8u
#define COX_ADAPTER_SLOT_COUNT_MAX 64u

struct cox_adapter_cache;

/* slot_count: 0: the default; at most the maximum (asserted). Returns 0 or -ENOMEM. */
int cox_adapter_cache_new(uint32_t slot_count, struct cox_adapter_cache **ret_adapters);
struct cox_adapter_cache *cox_adapter_cache_free(
    struct cox_adapter_cache *adapters); /* NULL-safe */

/* Adapters are for this model and share from now on; those that are there go. config NULL: there is
 * no model. */
void cox_adapter_cache_set_model(struct cox_adapter_cache *adapters,
                                 const struct cox_model_config *config,
                                 const struct cox_share *share);

/* For cox_adapter_source, with the object as its context. */
const struct cox_adapter *cox_adapter_cache_find(void *context, const char *name);

/* expected: the digest of what it is to be; 0: anything. *ret_digest is that of what it is. */
int cox_adapter_cache_load(struct cox_adapter_cache *adapters, const char *name,
                           const char *directory, uint64_t expected, uint64_t *ret_digest,
                           struct cox_error *err);
bool cox_adapter_cache_has(struct cox_adapter_cache *adapters, const char *name);
/* No sequence has it. */
int cox_adapter_cache_remove(struct cox_adapter_cache *adapters, const char *name,
                             struct cox_error *err);

#endif
