/*
 * engine: the reference model behind the callbacks of a worker. It loads at init and computes at
 * each step, together with the other ranks of its group.
 *
 * In a group every rank has a share of the model (engine/model/share.h), and the ranks gather each
 * other's results. Without a group, every rank computes everything. That is so for a single rank
 * and for a legacy coordinator, which provides no group memory.
 *
 * Weights: where an init offers shared weights (weights_subscriber.h), the model borrows the whole
 * block that the coordinator filled, and uses its slices in place. Otherwise the rank loads its
 * slices itself. A step that names another version is computed with that version. The switch
 * happens after the ranks are in step and before the first row.
 *
 * Recovery: pause and pause_net stop at the next layer or gather, or abandon the step wherever it
 * is (cox_worker_pause, half a second for each way, so a stuck rank replies after one). An
 * abandoned step neither allocates nor prints, so it holds a C library lock only if it was inside
 * the library. clear ends the running pulls. A pull is never abandoned, because it checks before
 * each block, and every 50 ms, whether it must end. reinit clears the KV cache to zero, in the pool
 * that other groups know.
 * Model, group and tensor gather stay. The next step after a cancelled one begins a new epoch of
 * the group, which depends on nothing of the previous one. start resumes. Each command may be
 * repeated, also on a rank that has loaded nothing yet.
 *
 * LoRA adapters: adapter_cache.h loads and removes them on the link thread while steps run. They
 * belong to the model. An init that loads a model starts without adapters; one that is replayed on
 * a rank that keeps its model keeps them.
 *
 * KV transfer: the cache is exported for reading, and the reply to init has its handle. It also has
 * the path of the group's control socket, for processes that may not open this one's fds (links.h,
 * pulls.h, transfer.h). Links survive init and reinit; an init ends the running pulls.
 *
 * Threads: callbacks on the worker's execute thread, except links, pulls and recovery, on the
 *   threads of their channels. new and free on the thread of run. stop from any thread or signal
 *   handler.
 * Ownership: the caller owns the engine; worker and options are lent until free.
 * Blocks: init and a step wait for the other ranks. The wait ends when a rank dies, the coordinator
 *   cancels, any rank fails, the worker is stopped, or ten minutes have passed.
 * Failures: a failure on one rank that others may wait for is signalled to them through the group,
 * so they wait at most 50 ms longer. What every rank detects itself, such as an invalid batch, is
 * checked before any rank waits.
 * If the process dies: the other ranks' step ends with COX_PEER_DEAD, and so does every later step
 *   until a new group exists.
 */
#ifndef COX_ENGINE_ENGINE_H
#define COX_ENGINE_ENGINE_H

#include <coxswain/worker.h>

struct cox_engine_options {
    /* empty: the init request must name it */
    char model_dir[4096];
    uint32_t block_size;
    uint32_t block_count;
    uint32_t swap_block_count;
    /* adapters at a time; 0: COX_ADAPTER_SLOT_COUNT_DEFAULT */
    uint32_t lora_slot_count;
    /* Path of the group's control socket, which also keeps the KV cache's fd; empty: none. */
    char control_socket[4096];
    struct cox_log log;
};

struct cox_engine;

/* Returns 0 or -ENOMEM. */
int cox_engine_new(const struct cox_engine_options *options, struct cox_engine **ret_engine);
struct cox_engine *cox_engine_free(struct cox_engine *engine);

/* The callbacks, with the engine as context, for a worker with the option leave_stuck. */
extern const struct cox_worker_callbacks cox_engine_callbacks;

/* Sets the worker that calls them; between cox_worker_new and cox_worker_run. */
void cox_engine_serve(struct cox_engine *engine, struct cox_worker *worker);

/* Current and later waits for other ranks end with COX_ABORTED. Async-signal-safe. */
void cox_engine_stop(struct cox_engine *engine);

#endif
