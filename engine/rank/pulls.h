/*
 * pulls: KV blocks of another group's rank copied into the cache of this one, one request at a
 * time, each with one end.
 *
 * All destinations are taken (they are nobody's), then block after block is copied under the
 * generation that is asked for, which fails where the block there is another's, or was taken during
 * the copy (channel/memory/pool/kv_blocks.h): what a copy that failed has left is never seen, since
 * only when all blocks are there do they go to the sequence. Nobody is waited for, here or there.
 * Before each block it is looked at whether the pull is to end: cancelled, unlinked, past its
 * deadline or the lease of the other group, given up by the coordinator, paused, cleared, or the
 * process there is dead.
 *
 * Cancelling is by request id, also of a pull that is still to come: up to COX_CANCELLED_COUNT_MAX
 * of such ids are kept, the oldest are forgotten first, and each ends one pull. So an id is for one
 * attempt: a second one of the same id may meet the cancel of the first, that came too late for it.
 *
 * Threads: run by one at a time; cancel, open and close by any.
 * Ownership: the cache is lent from open to close.
 * Blocks: run, as long as its copies take; close, until no run is inside.
 * If the process dies: nothing is left of it there, and its own blocks are gone with it.
 */
#ifndef COX_WORKER_PULLS_H
#define COX_WORKER_PULLS_H

#include "links.h"
#include "engine/compute/cache.h"

#define COX_CANCELLED_COUNT_MAX 1024
#define COX_REQUEST_ID_SIZE_MAX 1024

struct cox_pulls;

/* Returns 0 or -ENOMEM. */
int cox_pulls_new(struct cox_pulls **ret_pulls);
struct cox_pulls *cox_pulls_free(struct cox_pulls *pulls); /* NULL-safe, returns NULL */

/* Pulls go into this cache from now on; NULL: they are refused. */
void cox_pulls_open(struct cox_pulls *pulls, struct cox_cache *cache);
/* The pull under way ends with COX_ABORTED, and others are refused until open. Returns 0: none is
 * inside; COX_TIMEOUT. */
int cox_pulls_close(struct cox_pulls *pulls, uint64_t deadline_ns, struct cox_error *err);
/* The pull under way ends with COX_ABORTED. Returns 0: it has come out; COX_TIMEOUT. */
int cox_pulls_clear(struct cox_pulls *pulls, uint64_t deadline_ns, struct cox_error *err);

/* Of an id that is too long, or where there is no memory, nothing is kept: false. */
bool cox_pulls_cancel(struct cox_pulls *pulls, const char *request_id);

/* The same block twice among the destinations is refused. */
struct cox_pull_pair {
    uint32_t from, to;
};

struct cox_pull {
    const char *request_id;
    /* taken */
    struct cox_link *link;
    const struct cox_pull_pair *pairs;
    uint32_t count;
    /* 0: whatever sequence has the block */
    uint64_t from_generation;
    /* 0: nobody's, until a step writes it */
    uint64_t to_generation;
    /* COX_DEADLINE_NEVER is allowed */
    uint64_t deadline_ns;
    /* until when the other group keeps the blocks; the same */
    uint64_t lease_ns;
    /* asked as the rest is; NULL: never */
    bool (*aborted)(void *context);
    void *context;
    /* What came of it, also where it failed. */
    uint64_t copied_bytes;
    uint64_t copy_ns;
};

/* Returns 0; COX_INVALID: block ids, err says which; COX_STALE: a block there is another's by now,
 * or the lease is over, or its group is linked anew, or a block here was taken by a step;
 * COX_ABORTED: cancelled, cleared, paused or given up; COX_CLOSED: unlinked; COX_TIMEOUT;
 * COX_PEER_DEAD; COX_STATE: no cache is open. */
int cox_pulls_run(struct cox_pulls *pulls, struct cox_pull *pull, struct cox_error *err);

#endif
