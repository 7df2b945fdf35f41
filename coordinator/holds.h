/*
 * holds: what finished sequences left in their blocks for others to pull.
 *
 * A hold lasts until it is released, its lease ends, or all are dropped because ranks forgot what they had. Who pulls
 * checks by itself that what it read was still there (generations of the blocks): nobody waits for readers here.
 *
 * Threads: one at a time.
 * Ownership: blocks belong to the hold, and go back to the free ones with its end; a hold is lent until then.
 * Blocks (the other kind): nothing.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_COORDINATOR_HOLDS_H
#define COX_COORDINATOR_HOLDS_H

#include "blocks.h"

struct cox_hold {
    struct cox_hold *next;
    int64_t id;        /* of the sequence */
    uint64_t owner;    /* a number of the caller's, not 0 */
    uint64_t lease_ns; /* CLOCK_MONOTONIC */
    uint32_t block_count;
    int32_t blocks[];
};

struct cox_holds {
    struct cox_hold *first; /* oldest first */
    uint32_t count;
    uint64_t block_count;
    uint64_t changes; /* another number with every change */
};

/* NULL: no memory. Of count blocks that are taken. */
struct cox_hold *cox_holds_add(struct cox_holds *holds, int64_t id, uint64_t owner,
                               uint64_t lease_ns, const int32_t *blocks, uint32_t count);
/* Ends those of this owner (0: any) and id (0: any) whose lease is over at now_ns (COX_DEADLINE_NEVER: all of them). */
void cox_holds_end(struct cox_holds *holds, struct cox_blocks *blocks, uint64_t owner, int64_t id,
                   uint64_t now_ns);
/* When the next lease ends; COX_DEADLINE_NEVER: there is none. */
uint64_t cox_holds_due_ns(const struct cox_holds *holds);

#endif
