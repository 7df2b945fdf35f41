/*
 * kv_reference: names blocks with the keys and values of a sequence's first positions. A group
 * leases them to other groups, which pull them.
 *
 * Threads: one at a time.
 * Ownership: a copy is one allocation, which the caller owns.
 * Blocks: nothing.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_COORDINATOR_KV_REFERENCE_H
#define COX_COORDINATOR_KV_REFERENCE_H

#include <coxswain/base.h>

#ifdef __cplusplus
extern "C" {
#endif

struct cox_kv_reference {
    /* name of the group that leases the blocks */
    const char *cluster_id;
    /* epoch of that group when this reference was made */
    uint64_t epoch;
    /* sequence id in that group: the generation of the blocks, and the id of the lease */
    int64_t sequence;
    /* CLOCK_MONOTONIC: the end of the lease */
    uint64_t lease_ns;
    const int32_t *blocks;
    uint32_t block_count;
};

/* NULL: no memory. */
COX_PUBLIC struct cox_kv_reference *cox_kv_reference_dup(const struct cox_kv_reference *reference);
/* NULL-safe, returns NULL. */
COX_PUBLIC struct cox_kv_reference *cox_kv_reference_free(struct cox_kv_reference *reference);

#ifdef COX_INTERNAL
struct CoxswainControl__KvReference;
/* From a message of another process, lent.
 * Returns
 *   0
 *   COX_INVALID: a field is missing or out of range
 */
int cox_kv_reference_read(const struct CoxswainControl__KvReference *message,
                          struct cox_kv_reference *ret_reference, struct cox_error *err);
/* Fills in a message, which borrows all of reference. */
void cox_kv_reference_write(const struct cox_kv_reference *reference,
                            struct CoxswainControl__KvReference *message);
#endif

#ifdef __cplusplus
}
#endif

#endif
