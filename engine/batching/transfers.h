/*
 * transfers: pulls of KV blocks from other groups into the blocks of this one, over the transfer
 * channel.
 *
 * A pull copies the blocks of one sequence that another group holds. It goes through these states,
 * and ends once:
 *
 *              (no room yet)
 *       .--------------------.
 *       v                    |
 *     QUEUED -(in a request)-> SENT -(every rank has all)-> SUCCESS
 *       |  |                    | '--(a rank says no)-----> FAILED
 *       |  |                    |'---(deadline)-----------> TIMEOUT
 *       |  |                    |----(a rank of ours died)> PEER_DEAD
 *       |  '-(cannot be sent)---|-> FAILED, TIMEOUT, PEER_DEAD
 *       '-----(nobody wants it)-'-> CANCELLED
 *
 * What ranks say of a pull that has ended is dropped and counted. A pull that has ended is quiet
 * when no rank writes to its blocks any more: at once, if it was never sent or every rank has
 * replied or is proven dead; otherwise its blocks stay in quarantine until the transfer channel
 * has nobody late. Ranks are told to leave such pulls, on the link channel.
 *
 * Threads: new and free from one thread; status from any; the rest from the engine loop's. The wake
 *   hook is called on the response thread of the channel.
 * Ownership: the executor is borrowed until free; what a start is given is copied. Reports are the
 *   caller's, freed with free.
 * Blocks (threads): nothing waits.
 * If the process dies: private memory; the ranks end with the coordinator.
 */
#ifndef COX_COORDINATOR_TRANSFERS_H
#define COX_COORDINATOR_TRANSFERS_H

#include "coordinator/executor/executor.h"
#include "coordinator/server/prompt_hooks.h"

struct cox_transfers;

static inline bool cox_pull_has_ended(enum cox_pull_state state)
{
    return state >= COX_PULL_SUCCESS;
}
/* The table of moves. */
bool cox_pull_may_move(enum cox_pull_state from, enum cox_pull_state to);

struct cox_transfers_options {
    struct cox_log log;
    /* A pull has ended, or may have: turn and take. Must not block. NULL: nobody is told. */
    void (*wake)(void *context);
    void *wake_context;
};

/* Becomes the handler of the transfer channel. Returns 0; -ENOMEM; what cox_executor_replace
 * returns. */
int cox_transfers_new(struct cox_executor *executor, const struct cox_transfers_options *options,
                      struct cox_transfers **ret_transfer, struct cox_error *err);
struct cox_transfers *cox_transfers_free(struct cox_transfers *transfer); /* NULL-safe */

struct cox_pull_request {
    /* of ours: the name of the pull while it lasts, and the generation of its blocks */
    int64_t sequence;
    /* 1 and up: each has a name of its own on the wire */
    uint32_t attempt;
    const struct cox_kv_reference *source;
    /* of ours, source->block_count of them */
    const int32_t *blocks;
    /* 0: now */
    uint64_t not_before_ns;
    uint64_t deadline_ns;
    /* cox_executor_life: in another one it fails with COX_STALE */
    uint64_t life;
};
/* Queues a pull. Returns 0 or -ENOMEM. */
int cox_transfers_start(struct cox_transfers *transfer, const struct cox_pull_request *request);
/* It ends as CANCELLED, if it has not ended, and nobody is told how. Returns whether it is quiet.
 */
bool cox_transfers_cancel(struct cox_transfers *transfer, int64_t sequence);
/* All of them; results that were not taken are dropped. Blocks that are quiet are forgotten. */
void cox_transfers_abandon(struct cox_transfers *transfer);

/* Sends, gives up, looks who is late. */
void cox_transfers_turn(struct cox_transfers *transfer);
/* When the next turn is due at the latest; COX_DEADLINE_NEVER: when the hook is called. */
uint64_t cox_transfers_due_ns(struct cox_transfers *transfer);

struct cox_pull_outcome {
    int64_t sequence;
    bool quiet;
    /* as requested */
    uint64_t life;
    /* a rank of this group died, or cannot be asked, or is of another life */
    bool own_death;
    /* the caller's */
    struct cox_pull_report *report;
};
/* The oldest pull that has ended. Returns 0 or COX_EMPTY. */
int cox_transfers_take(struct cox_transfers *transfer, struct cox_pull_outcome *ret_result);
/* Blocks of a pull that was taken or cancelled before it was quiet, and now is. Returns 0 and gives
 * them (free); COX_EMPTY. */
int cox_transfers_take_quiet(struct cox_transfers *transfer, int32_t **ret_blocks,
                             uint32_t *ret_count);
/* Every block in quarantine, for who begins to give out blocks anew: of these alone take_quiet
 * tells from then on. */
void cox_transfers_quarantine(struct cox_transfers *transfer,
                              void (*fn)(void *context, const int32_t *blocks, uint32_t count),
                              void *context);

void cox_transfers_status(struct cox_transfers *transfer, struct cox_transfers_status *ret_status);

#endif
