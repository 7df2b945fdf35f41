/*
 * kv_reference: keys and values of a sequence's first positions, in blocks that a group holds for
 * others to pull.
 *
 * Threads: one at a time.
 * Ownership: a copy is one piece of memory, its owner's.
 * Blocks: nothing.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_COORDINATOR_KV_REFERENCE_H
#define COX_COORDINATOR_KV_REFERENCE_H

#include "../../channel/base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

struct cox_kv_reference {
    /* the group's name */
    const char *cluster_id;
    /* of that group, at the time of this reference */
    uint64_t epoch;
    /* there: the generation of its blocks, and the name of the hold */
    int64_t sequence;
    /* CLOCK_MONOTONIC: held until then */
    uint64_t lease_ns;
    const int32_t *blocks;
    uint32_t block_count;
};

/* NULL: no memory. */
COX_PUBLIC struct cox_kv_reference *cox_kv_reference_dup(const struct cox_kv_reference *reference);
/* NULL-safe, returns NULL. */
COX_PUBLIC struct cox_kv_reference *cox_kv_reference_free(struct cox_kv_reference *reference);

#ifdef COX_INTERNAL
struct CoxswainControl__KvSource;
/* Another process's bytes, lent.
 * Returns
 *   0
 *   COX_INVALID: something is missing, or out of range
 */
int cox_kv_reference_read(const struct CoxswainControl__KvSource *message,
                          struct cox_kv_reference *ret_reference, struct cox_error *err);
/* The other way; lends all of reference. */
void cox_kv_reference_write(const struct cox_kv_reference *reference,
                            struct CoxswainControl__KvSource *message);
#endif

#ifdef __cplusplus
}
#endif

#endif
