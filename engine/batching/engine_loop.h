/*
 * engine_loop: turns requests into tokens: continuous batching on the execute channel of one group.
 *
 * The thread that calls run batches, submits, and blocks until the handler has copied the outcome.
 * Scheduling is asynchronous: run batches, encodes and publishes the next step while the ranks
 * compute one, so that they need not wait for it. The ranks keep the tokens they sampled, so a step
 * contains none of them. The header of the batcher (batcher.h) has the rules, also for sequences
 * that end meanwhile.
 *
 * Threads: all functions on one thread, except stop, which any thread may call. done and feed run
 *   on the thread of run, and may call add. While the engine loop exists, only it may run steps on
 *   the group.
 * Ownership: requests are copied. What done receives is lent for the call. The executor is borrowed
 *   until free.
 * Blocks: run, until every request is done, or longer if feed wants it. Each wait in it ends at the
 *   step deadline, by stop or by a death, except inside recover.
 * Failures: a failed step voids all steps submitted after it; run waits for these, and the whole
 * counts as one failure. A step that ended with COX_REJECTED, COX_TIMEOUT, COX_STALE or COX_ABORTED
 * had no effect: every sequence is announced and recomputed, at most retry_max times in a row.
 * While a rank owes the reply of an earlier step, submit is retried for the time of one step. The
 * recover hook, if set, is called before each retry, and also for COX_PEER_DEAD, COX_STATE and
 * COX_LATE. Any other failure ends all requests with its text.
 * Pulls: while a sequence is pulled, others run. A failed pull is retried while the lease lasts, up
 * to three attempts. After that the sequence is computed here.
 * Leases: KV leases end with the group epoch in which they were computed, and with a failed step.
 * If the process dies: private memory; the ranks end with the coordinator.
 */
#ifndef COX_ENGINE_LOOP_H
#define COX_ENGINE_LOOP_H

#include <coxswain/requests.h>
#include "batcher.h"
#include "transfers.h"

struct cox_engine_loop;
struct cox_shared_weights;

/* 0 means the default, except in required fields. */
struct cox_engine_loop_options {
    /* running at a time; default 64, at most 4,096 */
    uint32_t sequence_count_max;
    /* tokens computed per step; default 512 */
    uint32_t token_count_max;
    /* time of a step once those before it are over; default 30,000 */
    uint64_t step_ms;
    /* retries of one step in a row; default 3 */
    uint32_t retry_max;
    /* At most the depth of the channels, and 1 with legacy workers. Default 2, or that limit. 1: a
     * step is batched after the previous one is over. */
    uint32_t steps_in_flight;
    /* required */
    uint32_t block_count;
    /* required */
    uint32_t block_size;
    /* required */
    uint32_t position_count_max;
    /* KV leases at a time; default 0 */
    uint32_t hold_count_max;
    /* cox_engine_loop_last_id of the previous engine loop, so that sequence ids are never reused */
    int64_t last_id;
    /* cox_engine_loop_take_unreported of that one, if it had the same limits; copied by new */
    const int64_t *unreported_ids;
    uint32_t unreported_count;
    /* Pulls for requests with a KV reference; used by this engine loop alone until free, and
     * requires feed. NULL: no request may have one. */
    struct cox_transfers *transfer;
    /* Called when a request's KV reference is no longer needed. error: why the sequence is computed
     * here, or fails; NULL: it was pulled. */
    void (*pulled)(void *context, const struct cox_sequence *sequence,
                   const struct cox_error *error);
    void *pulled_context;
    struct cox_log log;
    /* Called when a request is done or has failed. The order is not that of add. */
    void (*done)(void *context, const struct cox_sequence *sequence);
    void *done_context;
    /* Called on the thread of run before each step is batched; may call add, cancel and release.
     * With idle, there is nothing to compute and the ranks know which sequences ended. It then
     * blocks until there is something to add or do, the wake hook of the transfers is called, or
     * until_ns; false ends run. Without idle the result is ignored. NULL: run ends when no request
     * is left. */
    bool (*feed)(void *context, bool idle, uint64_t until_ns);
    void *feed_context;
    /* Called on the thread of run when a step has failed or was refused (err: why). Blocks until
     * the group can run steps again. Returns
     *   0: the group can, unchanged (retry_max applies)
     *   COX_STALE: the group was recovered: everything is announced and recomputed, without
     *     counting as a retry
     *   another status: run ends with it and the text of err
     * NULL: a death ends run.
     */
    int (*recover)(void *context, struct cox_error *err);
    void *recover_context;
    /* Weights of the ranks: each step carries their version. A new version gets a step without rows
     * when there is nothing to run. NULL: the ranks have loaded their own. */
    struct cox_shared_weights *weights;
    /* Called by stop: makes recover return soon, for the current and all later calls. Must not
     * block. NULL: recover ends by itself. */
    void (*recover_cancel)(void *context);
};

/* Sums over the steps for which rank 0 reported its model time. */
struct cox_engine_loop_times {
    /* from submit, or the handler of the previous step, to the entry of the handler */
    uint64_t step_ns;
    /* step_ns without rank 0's model time */
    uint64_t channel_ns;
    bool has_group;
    /* part of step_ns that rank 0 spent in collective operations */
    uint64_t group_ns;
    /* part of group_ns that rank 0 waited for other ranks, which compute or have no CPU */
    uint64_t group_wait_ns;
};

struct cox_engine_loop_stats {
    /* successful ones */
    uint64_t steps;
    uint64_t retries;
    struct cox_batcher_stats batcher;
    /* time inside run */
    uint64_t run_ns;
    /* From submit to the entry of the handler, over the last steps, including the wait for the
     * previous step. */
    uint64_t step_p50_ns, step_p99_ns;
    /* Cost of the channel: from submit, or the handler of the previous step if that is later, minus
     * the model time of rank 0. 0: no rank reported any. */
    uint64_t channel_p50_ns, channel_p99_ns;
    struct cox_engine_loop_times times;
};

/* Sets block_count, block_size and position_count_max from the ranks' init replies.
 * Returns
 *   0
 *   COX_CORRUPT: impossible numbers
 *   COX_UNSUPPORTED: several caches with tables of their own
 */
int cox_engine_loop_fit(struct cox_engine_loop_options *options,
                        const struct cox_init_summary *summary, struct cox_error *err);

/* Becomes the handler of the execute channel.
 * Returns
 *   0
 *   COX_INVALID: err says which number is too large
 *   -ENOMEM
 */
int cox_engine_loop_new(struct cox_executor *executor,
                        const struct cox_engine_loop_options *options,
                        struct cox_engine_loop **ret_engine_loop, struct cox_error *err);
struct cox_engine_loop *cox_engine_loop_free(struct cox_engine_loop *engine_loop); /* NULL-safe */

/* A request that can never run is reported through done. Returns 0 or -ENOMEM. */
int cox_engine_loop_add(struct cox_engine_loop *engine_loop,
                        const struct cox_prompt_request *request);

/* Inside feed: ends the request of this context, which is then done with COX_CLOSED. Contexts of no
 * request, or of one that is done, are ignored. */
void cox_engine_loop_cancel(struct cox_engine_loop *engine_loop, const void *context);

/* Inside feed and done: ends the lease of this owner and id (0: all of the owner). Idempotent. */
void cox_engine_loop_release(struct cox_engine_loop *engine_loop, uint64_t owner, int64_t id);
/* On the thread of run: the current leases, lent until the next call of any function. */
const struct cox_kv_leases *cox_engine_loop_kv_leases(const struct cox_engine_loop *engine_loop);
/* The group epoch (cox_executor_epoch) of the leases. */
uint64_t cox_engine_loop_epoch(const struct cox_engine_loop *engine_loop);
/* The highest sequence id used. */
int64_t cox_engine_loop_last_id(const struct cox_engine_loop *engine_loop);
/* Gives, for free, the sequences that legacy ranks still hold after run has failed: the next engine
 * loop reports their end. NULL with other ranks, whose tables a first step clears. After this the
 * engine loop may only be freed. */
int64_t *cox_engine_loop_take_unreported(struct cox_engine_loop *engine_loop, uint32_t *ret_count);

/* Runs steps until no request is left, then reports the last ended sequences to the ranks. After a
 * recovery the next step does that, with base 0.
 * Returns
 *   0: also when single requests failed
 *   COX_CLOSED: stopped for good
 *   the status of the failure that ended all requests
 */
int cox_engine_loop_run(struct cox_engine_loop *engine_loop, struct cox_error *err);
/* Makes run return soon, whatever the steps in flight do. The owner of feed wakes a feed that is
 * blocked. Idempotent. */
void cox_engine_loop_stop(struct cox_engine_loop *engine_loop);

/* Number of free KV blocks; on the thread of run, for display and leak tests. */
uint32_t cox_engine_loop_free_blocks(const struct cox_engine_loop *engine_loop);
/* On the thread of run, or while run is not running. */
void cox_engine_loop_stats(struct cox_engine_loop *engine_loop,
                           struct cox_engine_loop_stats *ret_stats);

#endif
