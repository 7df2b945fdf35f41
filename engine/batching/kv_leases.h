/*
 * kv_leases: what finished sequences left in their blocks for others to pull.
 *
 * A hold lasts until it is released, its lease ends, or all are dropped because ranks forgot what
 * they had. Who pulls checks by itself that what it read was still there (generations of the
 * blocks): nobody waits for readers here.
 *
 * Threads: one at a time.
 * Ownership: a hold is lent until it is taken out; its blocks, which whoever takes it out gives
 * back, are taken until then. Blocks (the other kind): nothing. If the process dies: private
 * memory; nothing is left.
 */
#ifndef COX_COORDINATOR_KV_LEASES_H
#define COX_COORDINATOR_KV_LEASES_H

#include "channel/base/base.h"

struct cox_kv_lease {
    struct cox_kv_lease *next;
    /* of the sequence */
    int64_t id;
    /* a number of the caller's, not 0 */
    uint64_t owner;
    /* CLOCK_MONOTONIC */
    uint64_t lease_ns;
    /* of the sequence: ranks know it until they hear that it ended */
    uint32_t slot;
    uint32_t block_count;
    int32_t blocks[];
};

struct cox_kv_leases {
    /* oldest first */
    struct cox_kv_lease *first;
    uint32_t count;
    uint64_t block_count;
    /* another number with every change */
    uint64_t changes;
};

/* NULL: no memory. blocks are copied. */
struct cox_kv_lease *cox_kv_leases_add(struct cox_kv_leases *holds, int64_t id, uint64_t owner,
                                       uint64_t lease_ns, const int32_t *blocks, uint32_t count);
/* Takes out one of this owner (0: any) and id (0: any) whose lease is over at now_ns
 * (COX_DEADLINE_NEVER: any), NULL: there is none. It is the caller's, freed with free. */
struct cox_kv_lease *cox_kv_leases_take(struct cox_kv_leases *holds, uint64_t owner, int64_t id,
                                        uint64_t now_ns);
/* When the next lease ends; COX_DEADLINE_NEVER: there is none. */
uint64_t cox_kv_leases_due_ns(const struct cox_kv_leases *holds);

#endif
