/*
 * kv_leases: KV blocks of finished sequences, kept for other groups to pull.
 *
 * A lease lasts until its owner releases it, it expires, or all are dropped because the ranks'
 * sequence tables were emptied. A reader of the blocks checks their users itself after
 * reading, so no code here waits for readers.
 *
 * Threads: one at a time.
 * Ownership: a lease is lent until cox_kv_leases_take removes it. Its blocks stay taken until then;
 *   the caller of take gives them back.
 * Blocks: nothing (threads).
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_ENGINE_KV_LEASES_H
#define COX_ENGINE_KV_LEASES_H

#include <coxswain/base.h>

struct cox_kv_lease {
    struct cox_kv_lease *next;
    /* of the sequence */
    int64_t id;
    /* chosen by the caller, not 0 */
    uint64_t owner;
    /* expiry, CLOCK_MONOTONIC */
    uint64_t lease_ns;
    /* of the sequence: the ranks keep it in their tables until a step reports the end */
    uint32_t slot;
    uint32_t block_count;
    int32_t blocks[];
};

struct cox_kv_leases {
    /* oldest first */
    struct cox_kv_lease *first;
    uint32_t count;
    uint64_t block_count;
    /* changes with every add and take */
    uint64_t changes;
};

/* Copies blocks. Returns NULL when there is no memory. */
struct cox_kv_lease *cox_kv_leases_add(struct cox_kv_leases *holds, int64_t id, uint64_t owner,
                                       uint64_t lease_ns, const int32_t *blocks, uint32_t count);
/* Removes one lease of this owner (0: any) and id (0: any) that has expired at now_ns
 * (COX_DEADLINE_NEVER: any). Returns it, for the caller to free with free, or NULL when none
 * matches. */
struct cox_kv_lease *cox_kv_leases_take(struct cox_kv_leases *holds, uint64_t owner, int64_t id,
                                        uint64_t now_ns);
/* The earliest expiry; COX_DEADLINE_NEVER when there is no lease. */
uint64_t cox_kv_leases_due_ns(const struct cox_kv_leases *holds);

#endif
