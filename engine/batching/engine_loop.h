/*
 * engine loop: requests in, tokens out: continuous batching over the execute channel of one group.
 *
 * The thread that calls run plans, submits, and sleeps until the handler has copied the outcome
 * out. Asynchronous scheduling: it plans, packs and publishes the next step while the ranks run
 * one, so that they find it when they are done. Ranks know the tokens they sampled, so a step needs
 * none of them. batcher.h has the rules of batching, and says what becomes of sequences that end
 * meanwhile.
 *
 * Threads: everything on one thread, except stop, which any thread may call. done and feed run on
 *   the thread of run; they may add. The engine loop is the only one that runs steps on the group
 *   while it exists.
 * Ownership: requests are copied; what done is shown is lent for the call. The executor is borrowed
 *   until free.
 * Blocks: run until every request is done, and for longer if feed says so; each wait in it ends at
 *   the step deadline, by stop, or by a death, except inside recover.
 * Failures: with a step all those submitted after it are void; they are waited for, and count as
 *   one failure. A step that ended with COX_REJECTED, COX_TIMEOUT, COX_STALE or COX_ABORTED counts
 *   as if it had never been: everything is announced and recomputed, retry_max times in a row.
 *   While a rank owes the reply of an earlier step, submitting is tried again until a step's time
 *   has passed. Where there is a recover hook, it is asked before, and also for COX_PEER_DEAD,
 *   COX_STATE and COX_LATE. Any other failure ends all requests with its text.
 * Pulls: while a sequence is pulled, others run. A pull that failed is tried again while the lease
 *   lasts, three times in all, and then the sequence is computed here like any other, unless it
 *   must not.
 * Holds end with the life of the group in which they were computed, and with a step that failed.
 * If the process dies: private memory; the ranks end with the coordinator.
 */
#ifndef COX_ENGINE_LOOP_H
#define COX_ENGINE_LOOP_H

#include "coordinator/executor/operations.h"
#include "batcher.h"
#include "transfers.h"

struct cox_engine_loop;
struct cox_shared_weights;

/* 0 everywhere means default, except where required. */
struct cox_engine_loop_options {
    /* running at a time; default 64, at most 4,096 */
    uint32_t sequence_count_max;
    /* computed per step; default 512 */
    uint32_t token_count_max;
    /* a step has so long behind those in flight; default 30,000 */
    uint64_t step_ms;
    /* of the same step in a row; default 3 */
    uint32_t retry_max;
    /* at most the depth of the channels, and 1 with the nested form; default 2, or what may be. 1:
     * a step is planned when the one before is over */
    uint32_t steps_in_flight;
    /* the legacy form also for ranks that know better */
    bool nested;
    /* required */
    uint32_t block_count;
    /* required */
    uint32_t block_size;
    /* required */
    uint32_t position_count_max;
    /* sequences that are held, at a time; default 0 */
    uint32_t hold_count_max;
    /* of the engine loop before: ids of sequences do not come again */
    int64_t last_id;
    /* Pulls what requests with a source need, and is this engine loop's alone until free; feed is
     * required then. NULL: no request has one. */
    struct cox_transfers *transfer;
    /* one attempt has so long, and not longer than the lease; default 10,000 */
    uint64_t pull_ms;
    /* The source of a request is not needed any more. error: why it is computed here, or fails;
     * NULL: it was pulled. */
    void (*pulled)(void *context, const struct cox_sequence *sequence,
                   const struct cox_error *error);
    void *pulled_context;
    struct cox_log log;
    /* A request is done, in any order. Also called for those that fail. */
    void (*done)(void *context, const struct cox_sequence *sequence);
    void *done_context;
    /* On the thread of run, before each step is planned; may add, cancel and release. idle: nothing
     * can be computed now, and the ranks know what has ended: sleeps until there is something to
     * add or do, the transfer's hook is called, or until_ns; or returns false: run ends. Not idle,
     * what it returns is not looked at. NULL: run ends when nothing is left. */
    bool (*feed)(void *context, bool idle, uint64_t until_ns);
    void *feed_context;
    /* On the thread of run, when a step has failed or was refused (err: how): sleeps until the
     * group can run steps again. Returns 0: it can, as before (retry_max counts); 1: it can, and
     * was recovered meanwhile: everything is announced and recomputed, without counting; otherwise
     * a status: run ends with it and what err says then. NULL: a death ends run. */
    int (*recover)(void *context, struct cox_error *err);
    void *recover_context;
    /* What ranks compute with: every step tells its version, and a new one gets a step without rows
     * where there is nothing to run. NULL: they have loaded their own. */
    struct cox_shared_weights *weights;
    /* From stop: makes recover return soon, now and whenever it is called again. Must not block.
     * NULL: recover ends by itself. */
    void (*recover_cancel)(void *context);
};

/* Where the time of steps went, all of those together for which rank 0 has told its model's time.
 */
struct cox_engine_loop_times {
    /* from submit, or the handler of the step before, to the entry of the handler */
    uint64_t step_ns;
    /* of it not rank 0's model */
    uint64_t channel_ns;
    bool has_group;
    /* of it rank 0 in operations with other ranks */
    uint64_t group_ns;
    /* of that waiting for them: they compute, or have no CPU */
    uint64_t group_wait_ns;
};

struct cox_engine_loop_stats {
    /* that succeeded */
    uint64_t steps;
    uint64_t retries;
    struct cox_batcher_stats batcher;
    /* spent in run */
    uint64_t run_ns;
    /* from submit to the entry of the handler, over the last steps; with the wait for the step
     * before */
    uint64_t step_p50_ns, step_p99_ns;
    /* What the channel costs: from submit, or from the handler of the step before if that is later,
     * without the time that rank 0 reports for its model. 0: no rank reported any. */
    uint64_t channel_p50_ns, channel_p99_ns;
    /* As rank 0 reports them (cox_engine_loop_times); 0: it did not. */
    uint64_t group_p50_ns, group_p99_ns, group_wait_p50_ns, group_wait_p99_ns;
    struct cox_engine_loop_times times;
};

/* Sets block_count, block_size and position_count_max from what the ranks said at init. Returns 0;
 * COX_CORRUPT: numbers that no cache has; COX_UNSUPPORTED: several caches with tables of their own.
 */
int cox_engine_loop_fit(struct cox_engine_loop_options *options,
                        const struct cox_init_summary *summary, struct cox_error *err);

/* Becomes the handler of the execute channel. Returns 0; COX_INVALID: err says which number is too
 * large; -ENOMEM. */
int cox_engine_loop_new(struct cox_executor *executor,
                        const struct cox_engine_loop_options *options,
                        struct cox_engine_loop **ret_engine_loop, struct cox_error *err);
struct cox_engine_loop *cox_engine_loop_free(struct cox_engine_loop *engine_loop); /* NULL-safe */

/* Returns 0 or -ENOMEM. A request that can never run is reported through done. */
int cox_engine_loop_add(struct cox_engine_loop *engine_loop,
                        const struct cox_prompt_request *request);

/* Inside feed: ends the request with this context, which is then done, with COX_CLOSED. One that is
 * done, or never was, is fine. */
void cox_engine_loop_cancel(struct cox_engine_loop *engine_loop, const void *context);

/* Inside feed and done: ends the hold of this owner and id (0: all of the owner). One that is over
 * is fine. */
void cox_engine_loop_release(struct cox_engine_loop *engine_loop, uint64_t owner, int64_t id);
/* On the thread of run: what is held now, lent until anything else is called. */
const struct cox_kv_leases *cox_engine_loop_kv_leases(const struct cox_engine_loop *engine_loop);
/* cox_executor_life in which the ranks have what is held. */
uint64_t cox_engine_loop_life(const struct cox_engine_loop *engine_loop);
/* Sequences had ids up to this. */
int64_t cox_engine_loop_last_id(const struct cox_engine_loop *engine_loop);

/* Runs steps until nothing is left, then tells the ranks of the sequences that ended last (after a
 * recovery, the next step tells that there is nothing). Returns 0, also when single requests
 * failed; COX_CLOSED: stopped, nothing can be run any more; the status of the failure that ended
 * all. */
int cox_engine_loop_run(struct cox_engine_loop *engine_loop, struct cox_error *err);
/* Makes run return soon, whatever the steps in flight do; a feed that sleeps is its owner's to
 * wake. Idempotent. */
void cox_engine_loop_stop(struct cox_engine_loop *engine_loop);

/* Blocks of KV cache that are not taken; on the thread of run, for display and tests of leaks. */
uint32_t cox_engine_loop_free_blocks(const struct cox_engine_loop *engine_loop);
/* Not while run runs, except on its thread. */
void cox_engine_loop_stats(struct cox_engine_loop *engine_loop,
                           struct cox_engine_loop_stats *ret_stats);

#endif
