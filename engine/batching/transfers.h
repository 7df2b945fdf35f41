/*
 * transfers: pulls KV blocks of other groups into blocks of this group, over the transfer channel.
 *
 * A pull copies the blocks of one sequence, on which another group has a KV lease. States of a
 * pull:
 *
 *              (no room yet)
 *       .--------------------.
 *       v                    |
 *     QUEUED -(in a request)-> SENT -(every rank has all)-> SUCCESS
 *       |  |                    | '--(a rank refused)-----> FAILED
 *       |  |                    |'---(deadline)-----------> TIMEOUT
 *       |  |                    |----(own rank died)------> PEER_DEAD
 *       |  '-(cannot be sent)---|-> FAILED, TIMEOUT, PEER_DEAD
 *       '-----(cancelled)-------'-> CANCELLED
 *
 * Replies to a pull that has ended are dropped and counted. An ended pull is drained when no rank
 * writes to its blocks any more. That holds at once if it was never sent, or every rank has replied
 * or is proven dead. Otherwise its blocks stay in quarantine until no rank is late on the transfer
 * channel. Ranks are asked on the link channel to cancel such pulls.
 *
 * Threads: new and free from one thread; status from any; the rest on the engine loop's thread. The
 *   wake hook is called on the response thread of the channel.
 * Ownership: the executor is borrowed until free. The arguments of start are copied. Reports are
 *   the caller's, freed with free.
 * Blocks: nothing (threads).
 * If the process dies: private memory; the ranks end with the coordinator.
 */
#ifndef COX_ENGINE_TRANSFERS_H
#define COX_ENGINE_TRANSFERS_H

#include <coxswain/executor.h>
#include <coxswain/server.h>

struct cox_transfers;

static inline bool cox_pull_has_ended(enum cox_pull_state state)
{
    return state >= COX_PULL_SUCCESS;
}
/* The table of allowed state changes. */
bool cox_pull_may_move(enum cox_pull_state from, enum cox_pull_state to);

struct cox_transfers_options {
    /* A pull may have ended: call turn and take. Must not block. NULL: no hook. */
    void (*wake)(void *context);
    void *wake_context;
};

/* Becomes the handler of the transfer channel.
 * Returns
 *   0
 *   -ENOMEM
 *   as cox_executor_set_handler
 */
int cox_transfers_new(struct cox_executor *executor, const struct cox_transfers_options *options,
                      struct cox_transfers **ret_transfer, struct cox_error *err);
struct cox_transfers *cox_transfers_free(struct cox_transfers *transfer); /* NULL-safe */

struct cox_pull_request {
    /* Local sequence: the name of the pull while it lasts, and the user of its blocks. */
    int64_t sequence;
    /* from 1; each attempt has its own name on the wire */
    uint32_t attempt;
    const struct cox_kv_reference *source;
    /* local blocks, source->block_count of them */
    const int32_t *blocks;
    /* earliest start; 0: now */
    uint64_t not_before_ns;
    uint64_t deadline_ns;
    /* cox_executor_epoch; in another group epoch the pull fails with COX_STALE */
    uint64_t epoch;
};
/* Queues a pull. Returns 0 or -ENOMEM. */
int cox_transfers_start(struct cox_transfers *transfer, const struct cox_pull_request *request);
/* Ends the pull as CANCELLED if it has not ended; no outcome is reported. Returns whether it is
 * drained. */
bool cox_transfers_cancel(struct cox_transfers *transfer, int64_t sequence);
/* Cancels all pulls and drops outcomes that were not taken. Drained blocks are forgotten. */
void cox_transfers_abandon(struct cox_transfers *transfer);

/* Runs one iteration: sends queued pulls, expires deadlines, checks late ranks. */
void cox_transfers_turn(struct cox_transfers *transfer);
/* When the next turn is due at the latest; COX_DEADLINE_NEVER: when the hook is called. */
uint64_t cox_transfers_due_ns(struct cox_transfers *transfer);

struct cox_pull_outcome {
    int64_t sequence;
    bool drained;
    /* as requested */
    uint64_t epoch;
    /* a rank of this group died, cannot be asked, or is of another epoch */
    bool own_death;
    /* the caller's */
    struct cox_pull_report *report;
};
/* The oldest outcome. Returns 0 or COX_EMPTY. */
int cox_transfers_take(struct cox_transfers *transfer, struct cox_pull_outcome *ret_result);
/* Blocks of a pull that was taken or cancelled before it was drained, and is drained now. Returns
 *   0: *ret_blocks is the caller's, freed with free
 *   COX_EMPTY
 */
int cox_transfers_take_drained(struct cox_transfers *transfer, int32_t **ret_blocks,
                               uint32_t *ret_count);
/* Calls fn for the blocks of every pull in quarantine. A caller that starts a new block allocator
 * reserves these. From then on take_quiet returns only these. */
void cox_transfers_quarantine(struct cox_transfers *transfer,
                              void (*fn)(void *context, const int32_t *blocks, uint32_t count),
                              void *context);

void cox_transfers_status(struct cox_transfers *transfer, struct cox_transfers_status *ret_status);

#endif
