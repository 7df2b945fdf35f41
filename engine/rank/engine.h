/*
 * engine: the reference model behind the callbacks of a worker: load at init, compute at a step,
 * together with the other ranks where there is a group of them.
 *
 * With a group every rank has a share of the model (engine/model/share.h) and the ranks exchange
 * what they computed. Without one (a single rank, or a legacy coordinator, which has no memory for
 * it) every rank computes everything.
 *
 * Weights: where an init offers them (weights_subscriber.h) the model borrows the block that the
 *   coordinator has filled, all of it, and uses its slices in place; else the rank loads its slices
 *   by itself. A step that names another version of them is computed with that one: the switch
 *   comes after the ranks are in step and before the first row.
 *
 * Recovery: pause and pause_net stop at the next layer or gather, or leave the step wherever it
 *   is (cox_worker_pause, with half a second for each way: a rank that is stuck replies after one).
 *   A step that was left has locks of the C library only if it was inside of one, and it neither
 *   allocates nor prints; what it may keep is one of OpenBLAS's buffers, of which there are dozens.
 *   clear ends the pulls under way. A pull is never left, but looks at each block, and each 50 ms,
 *   whether it is to end. reinit makes the KV cache anew, all zero, in the pool that others know
 *   of; model, group and tensor gather stay, and the next step after one that was given up begins a
 *   new epoch of the group, which needs nothing of what the rank was in before. start goes on. All
 *   may be repeated, also on a rank that has loaded nothing yet.
 *
 * LoRA adapters (adapter_cache.h) are loaded and taken away on the link thread while steps run.
 * They belong to the model: an init that loads one begins without any; an init that is replayed on
 * a rank that keeps its model keeps them.
 *
 * KV transfer: the cache is exported for reading, which init tells, with the group's control socket
 * for those
 *   who may not look into this process (links.h, pulls.h, transfer.h). Links outlive init and
 *   reinit; an init ends the pulls under way.
 *
 * Threads: callbacks on the worker's execute thread, those of links and pulls on the threads of
 *   their channels, recovery on that of its own channel; new and free on the thread of run; stop
 *   from anywhere, signal handlers included.
 * Ownership: the caller owns the engine; worker and options are lent until free.
 * Blocks: init and a step wait for the other ranks: until a rank is dead, the coordinator has given
 *   the init or the step up, any rank has failed in it, the worker is stopped, or ten minutes have
 *   passed.
 * Failures: whatever fails on one rank while others may be waiting for it is told to them through
 *   the group, so that they wait no longer than 50 ms. What every rank finds by itself, such as a
 *   batch that cannot be, is checked before anybody waits.
 * If the process dies: the others' step ends with COX_PEER_DEAD, and so does every later one until
 *   there is another group.
 */
#ifndef COX_WORKER_ENGINE_H
#define COX_WORKER_ENGINE_H

#include "worker/loop/worker.h"

struct cox_engine_options {
    /* empty: the init request has to name it */
    char model_dir[4096];
    uint32_t block_size;
    uint32_t block_count;
    uint32_t swap_block_count;
    /* adapters at a time; 0: COX_ADAPTER_SLOT_COUNT_DEFAULT */
    uint32_t lora_slot_count;
    /* path of the group's control socket, where the KV cache is left as well; empty: nowhere */
    char control_socket[4096];
    struct cox_log log;
};

struct cox_engine;

/* Returns 0 or -ENOMEM. */
int cox_engine_new(const struct cox_engine_options *options, struct cox_engine **ret_engine);
struct cox_engine *cox_engine_free(struct cox_engine *engine);

/* The callbacks, with the engine as their context; for a worker whose options say leave_stuck. */
extern const struct cox_worker_callbacks cox_engine_callbacks;

/* Whose callbacks they are; between cox_worker_new and cox_worker_run. */
void cox_engine_serve(struct cox_engine *engine, struct cox_worker *worker);

/* A wait for other ranks ends with COX_ABORTED, now and later. Async-signal-safe. */
void cox_engine_stop(struct cox_engine *engine);

#endif
