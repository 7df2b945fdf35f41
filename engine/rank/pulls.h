/*
 * pulls: copies KV blocks of another group's rank into the cache of this one, one request at a
 * time.
 *
 * A pull takes all destination blocks, which then belong to no sequence. It copies block after
 * block under the requested user. A copy fails if the source block has another user, or
 * was taken during the copy (coxswain/kv.h). Only when all blocks are copied are
 * they given to the sequence, so a failed copy is never visible. A pull waits for no reader or
 * writer on either side, except for a block whose content is on its way (COX_KV_EXPECTED). Before
 * each block, and while it waits, it checks whether it must end: cancelled, unlinked, past its
 * deadline or the lease, cancelled by the coordinator, paused, cleared, or the remote process is
 * dead.
 *
 * A pull is cancelled by request id, also before it begins. Up to COX_CANCELLED_COUNT_MAX such ids
 * are kept, the oldest forgotten first, and each ends one pull. So an id is for one attempt: a
 * second attempt with the same id could be ended by a late cancel of the first.
 *
 * Threads: run by one at a time; cancel, open and clear by any.
 * Ownership: the cache is lent from open until another open, and until the pull that was running
 *   then has ended.
 * Blocks: run, while it copies; clear, until the run that was active has ended.
 * If the process dies: the remote side is unaffected, and the local blocks are gone with the
 *   process.
 */
#ifndef COX_ENGINE_PULLS_H
#define COX_ENGINE_PULLS_H

#include "links.h"
#include "engine/compute/cache.h"

#define COX_CANCELLED_COUNT_MAX 1024
#define COX_REQUEST_ID_SIZE_MAX 1024

struct cox_pulls;

/* Returns 0 or -ENOMEM. */
int cox_pulls_new(struct cox_pulls **ret_pulls);
struct cox_pulls *cox_pulls_free(struct cox_pulls *pulls); /* NULL-safe, returns NULL */

/* The cache for pulls from now on; NULL: pulls are refused. */
void cox_pulls_open(struct cox_pulls *pulls, struct cox_cache *cache);
/* Ends the running pull with COX_ABORTED. Returns 0 when it has ended, or COX_TIMEOUT. */
int cox_pulls_clear(struct cox_pulls *pulls, uint64_t deadline_ns, struct cox_error *err);

/* Returns false when the id is too long or there is no memory: it was not kept. */
bool cox_pulls_cancel(struct cox_pulls *pulls, const char *request_id);

/* A destination block may not occur twice. */
struct cox_pull_pair {
    uint32_t from, to;
};

struct cox_pull {
    const char *request_id;
    /* taken by the caller */
    struct cox_link *link;
    const struct cox_pull_pair *pairs;
    uint32_t count;
    /* 0: any user */
    uint64_t from_user;
    /* 0: the blocks belong to no sequence until a step writes them */
    uint64_t to_user;
    /* COX_DEADLINE_NEVER is allowed */
    uint64_t deadline_ns;
    /* expiry of the other group's lease; COX_DEADLINE_NEVER is allowed */
    uint64_t lease_ns;
    /* checked before each block; NULL: never cancelled */
    bool (*cancelled)(void *context);
    void *context;
    /* Set by run, also on failure. */
    uint64_t copied_bytes;
    uint64_t copy_ns;
};

/* Returns
 *   0
 *   COX_INVALID: block ids, err says which
 *   COX_STALE: a source block has another user, the lease has expired, its group was linked
 *     anew, or a step took a destination block
 *   COX_ABORTED: cancelled, cleared or paused
 *   COX_CLOSED: unlinked
 *   COX_TIMEOUT
 *   COX_PEER_DEAD
 *   COX_STATE: no cache is open
 */
int cox_pulls_run(struct cox_pulls *pulls, struct cox_pull *pull, struct cox_error *err);

#endif
