/*
 * announcement: what both forms of a step say in the same way of a sequence that they announce.
 *
 * Threads: one.
 * Ownership: messages and names are only read; the sequence store refers to its own copy of a name.
 * Codes: those of cox_table_apply, err says which entry.
 */
#ifndef COX_WORKER_ANNOUNCEMENT_H
#define COX_WORKER_ANNOUNCEMENT_H

#include "sequence_store.h"

#include <coxswain/worker.h>

struct Coxswain__SamplingParams;

/* NULL, absent, not finite or out of range: greedy, and no filter. */
struct cox_sampling cox_announcement_sampling(const struct Coxswain__SamplingParams *params);

/* Sets the adapter of the sequence that was announced into a slot in this step. An empty name is
 * none. where and index name the entry in err. */
int cox_announcement_set_lora(struct cox_sequence_store *store, uint32_t slot, const char *name,
                              const char *where, size_t index, struct cox_error *err);

#endif
