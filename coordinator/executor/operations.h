/*
 * operations: the calls of the executor protocol as functions: init, link status, LoRA, pull KV,
 * recovery. Each merges the replies of all ranks.
 *
 * Threads: any, not inside a handler (COX_DEADLOCK).
 * Ownership: results are the caller's; deinit functions free what they own.
 * Blocks: until the deadline.
 * Results: as cox_executor_call (executor.h), and what each function adds.
 * If the process dies: as executor.h.
 */
#ifndef COX_COORDINATOR_OPERATIONS_H
#define COX_COORDINATOR_OPERATIONS_H

#include "../../channel/handle/handle.h"
#include "../../proto/link_state.h"
#include "executor.h"

#ifdef __cplusplus
extern "C" {
#endif

struct Coxswain__PDLinkRequest;
struct Coxswain__PullKVRequest;
struct Coxswain__LoraOperationRequest;

struct cox_config_entry {
    const char *key;
    const char *value;
};

#define COX_KV_CACHE_COUNT_MAX 8

/* The init replies of all ranks, merged: the smallest of each capacity. */
struct cox_init_summary {
    int64_t cpu_block_count;
    int64_t npu_block_count;
    int64_t max_position_embeddings;
    /* -1: none */
    int64_t start_thinking_id;
    /* -1: none */
    int64_t stop_thinking_id;
    char early_stopping_ids[256];
    uint32_t kv_cache_count;
    struct {
        /* smallest of all ranks */
        int64_t block_count;
        int32_t block_size;
        uint32_t compression_ratio;
        int32_t cache_type;
    } kv_caches[COX_KV_CACHE_COUNT_MAX];
};

/* MODEL_INIT on every rank. In each init the ranks form their group anew, in new memory. Inits run
 * one at a time: another one, or a replay, waits until deadline_ns; and an init waits until no step
 * is in flight. The device blocks of a rank are its npuBlockNum, or npu_block_num of its first KV
 * cache, as MindIE-LLM's workers reply since March 2026; one group may have ranks of both kinds. A
 * legacy rank that describes no KV cache is taken to have the caches that the others describe, the
 * first with its npuBlockNum.
 * Returns as cox_executor_call, and
 *   COX_NO_SPACE: no memory for the ranks' group, err says how much; nothing was sent
 *   COX_DIVERGED: ranks disagree on a value that cannot be merged (block size, number of caches,
 *     thinking ids, digest of the model)
 *   COX_CORRUPT: a reply lacks a required key, or has a value that is not a number
 *   COX_INVALID: a rank refuses a value of config
 *   COX_NOT_FOUND: a rank does not find what config names, its model
 *   COX_REJECTED: a rank replied with another error
 */
COX_PUBLIC int cox_executor_init(struct cox_executor *executor,
                                 const struct cox_config_entry *config, size_t config_count,
                                 uint64_t deadline_ns, struct cox_init_summary *ret_summary,
                                 struct cox_error *err);

/* Where a version of the model's weights is: memory with the seals F_SEAL_WRITE, F_SEAL_SHRINK,
 * F_SEAL_GROW and F_SEAL_SEAL, which a rank maps for reading. An init names it. Steps name it again
 * (fields weights_version and weights), until a step of that version has succeeded on all ranks. */
struct cox_weights_announcement {
    /* of the whole memory; can be opened until all ranks use another version */
    struct cox_handle handle;
    /* its bytes */
    uint64_t size;
    /* from 1 */
    uint64_t version;
};
/* announce is called in every init from now on, replays included, on the thread of the init and
 * before it is sent. Set it before the first init; legacy workers get no announcement. */
COX_PUBLIC void cox_executor_announce_weights(
    struct cox_executor *executor,
    void (*announce)(void *context, struct cox_weights_announcement *ret_announcement),
    void *context);

/* Sends the last init that succeeded again to every rank, byte for byte and marked as a replay:
 * after a rank was replaced. The ranks form their group anew; ranks that already have what it asks
 * for keep it. Legacy workers get it as a plain init. It waits until no step is in flight. The
 * engine state becomes NORMAL, except that PAUSE and READY stay.
 * Returns
 *   as cox_executor_init
 *   COX_STATE: there was no init
 *   COX_DIVERGED: the reply differs from that of the first init
 */
COX_PUBLIC int cox_executor_replay_init(struct cox_executor *executor, uint64_t deadline_ns,
                                        struct cox_error *err);

#ifdef COX_INTERNAL
/* What other groups need to pull from this one, as a packed RemoteInfo (executor.proto): its name,
 * its control socket, and the KV cache of every rank as of the last init, with their epoch.
 * *ret_bytes is the caller's (free). Any thread; asks no worker.
 * Returns
 *   0
 *   COX_UNSUPPORTED: no rank has a KV cache that others could read
 *   COX_STATE: there was no init
 *   -ENOMEM
 */
int cox_executor_remote_info(struct cox_executor *executor, uint8_t **ret_bytes, size_t *ret_size,
                             struct cox_error *err);
#endif
/* The epoch of the group for other groups: made of cox_executor_epoch and the present model. No
 * other group of the same name has the same. */
COX_PUBLIC uint64_t cox_executor_kv_epoch(const struct cox_executor *executor, uint64_t epoch);
/* From now on all ranks compute with the model of this digest, and with no earlier one. Other
 * groups see another epoch and have to link again. Keys and values that were computed since are not
 * offered before this call. Any thread. */
COX_PUBLIC void cox_executor_renew_kv(struct cox_executor *executor, uint64_t model_digest);

/* TEXT_GENERATOR_CLEANUP: these sequences have ended without a further step. No reply. */
COX_PUBLIC int cox_executor_cleanup(struct cox_executor *executor, const int64_t *seq_ids,
                                    size_t count, uint64_t deadline_ns, struct cox_error *err);

/* PD_LINK: link, unlink, switch role. No reply; cox_executor_link_status has the result. */
COX_PUBLIC int cox_executor_link(struct cox_executor *executor,
                                 const struct Coxswain__PDLinkRequest *request,
                                 uint64_t deadline_ns, struct cox_error *err);

struct cox_link_status {
    struct cox_link_failure {
        char *cluster_id;
        /* PDErrorCode */
        int32_t code;
        /* the reason, with the rank; NULL: none given */
        char *text;
    } * failed;
    size_t failed_count;
    /* linked on every rank */
    char **success;
    size_t success_count;
    /* running on some rank, failed on none */
    char **running;
    size_t running_count;
    /* waiting on some rank, neither running nor failed on any */
    char **waiting;
    size_t waiting_count;
};
/* PD_LINK_STATUS_QUERY, with the lists of all ranks merged: a cluster has failed if it failed on
 * any rank, and succeeded if every rank lists it as success. For legacy workers rank 0's list
 * counts. */
COX_PUBLIC int cox_executor_link_status(struct cox_executor *executor, uint64_t deadline_ns,
                                        struct cox_link_status *ret_status, struct cox_error *err);
COX_PUBLIC void cox_link_status_deinit(struct cox_link_status *status); /* idempotent */

struct cox_pull_result {
    char *request_id;
    /* PDErrorCode: 0, or the first failure of any rank */
    int32_t code;
};
/* KV_TRANSFER. One result per request of the call, in its order. A request that some rank does not
 * mention has failed (PD_PULL_KV_UNKNOWN_ERROR). *ret_results is freed with cox_pull_results_free.
 * Returns as cox_executor_call, and
 *   0: also when single pulls failed
 *   COX_INVALID: a request without an id, or two with the same id; nothing was sent
 */
COX_PUBLIC int cox_executor_pull_kv(struct cox_executor *executor,
                                    const struct Coxswain__PullKVRequest *request,
                                    uint64_t deadline_ns, struct cox_pull_result **ret_results,
                                    size_t *ret_count, struct cox_error *err);
COX_PUBLIC void cox_pull_results_free(struct cox_pull_result *results, size_t count);

#ifdef COX_INTERNAL
/* LORA_OPERATION. ret_statuses: rank_count LoraOperationStatus values (legacy workers: rank 0's for
 * all). It is filled also on failure, with -1 for a rank without a reply.
 * Returns as cox_executor_call, and
 *   0: every rank says LORA_CMD_SUCCESS
 *   COX_REJECTED: some do not, err names them
 */
int cox_executor_lora(struct cox_executor *executor,
                      const struct Coxswain__LoraOperationRequest *request, uint64_t deadline_ns,
                      int32_t *ret_statuses, struct cox_error *err);
#endif

/* The result of a LoRA operation on one rank. */
struct cox_lora_result {
    /* LoraOperationStatus; -1: no reply */
    int32_t status;
    /* it may have been done, also without a reply; false: it was never sent */
    bool asked;
    /* digest of the files that a load has read; 0: none given */
    uint64_t digest;
    /* the reason, as the rank gives it; "": none given */
    char text[256];
};
/* LORA_OPERATION on every rank; the request carries its deadline. ret_results: rank_count of them,
 * filled also on failure.
 * Returns as cox_executor_call, and
 *   0: every rank replied LORA_CMD_SUCCESS
 *   COX_REJECTED: some did not, err names them
 */
COX_PUBLIC int cox_executor_lora_results(struct cox_executor *executor,
                                         const struct Coxswain__LoraOperationRequest *request,
                                         uint64_t deadline_ns, struct cox_lora_result *ret_results,
                                         struct cox_error *err);
/* "SLOTS_FULL"; "no reply" for -1; "an unknown status". Static storage. */
COX_PUBLIC const char *cox_lora_status_name(int32_t status);

/* States of a group, for recovery. */
enum cox_engine_state {
    COX_ENGINE_READY = 0,
    COX_ENGINE_NORMAL = 1,
    COX_ENGINE_ABNORMAL = 2,
    COX_ENGINE_PAUSE = 3,
    COX_ENGINE_INIT = 4,
    COX_ENGINE_BUSY = 5,
};

enum cox_recover_command {
    COX_RECOVER_PAUSE = 0, /* CMD_PAUSE_ENGINE; from NORMAL, ABNORMAL, BUSY; to PAUSE */
    COX_RECOVER_PAUSE_NET, /* CMD_PAUSE_ENGINE_ROCE; from NORMAL, ABNORMAL, BUSY; to PAUSE */
    COX_RECOVER_CLEAR,     /* CMD_CLEAR_TRANSER; from any state; state stays */
    COX_RECOVER_REINIT,    /* CMD_REINIT_NPU; from PAUSE; to READY */
    COX_RECOVER_START,     /* CMD_START_ENGINE; from READY, PAUSE, half paused; to NORMAL */
};

struct cox_recover_result {
    int32_t device;
    /* 0: ok; -1: no reply; an absent result is a failure */
    int32_t result;
    char text[256];
};

/* The state is NORMAL after an init and after start. A death makes it ABNORMAL, as do the
 * replacement of a rank and an init that reached the ranks and failed, until an init succeeds. BUSY
 * is NORMAL while a step is in flight. Steps are refused (COX_STATE) in PAUSE and READY, and while
 * a command other than clear runs; steps that a rank had queued before are processed. A pause that
 * failed may have stopped some ranks: pause again and start, or replay the init, which starts them
 * unless the state is PAUSE or READY. */

/* Runs one recovery command on every rank, whatever the other channels do. ret_results: rank_count
 * of them, filled also on failure.
 * Returns as cox_executor_call, and
 *   0: every rank's result is 0
 *   COX_STATE: not legal now, err says which commands are
 *   COX_REJECTED: a rank's result is not 0
 */
COX_PUBLIC int cox_executor_recover(struct cox_executor *executor, enum cox_recover_command command,
                                    uint64_t deadline_ns, struct cox_recover_result *ret_results,
                                    struct cox_error *err);
COX_PUBLIC enum cox_engine_state cox_executor_engine_state(const struct cox_executor *executor);
/* A pause has failed, but reached some ranks, or may have: the state is unchanged, yet they refuse
 * steps. Lasts until a pause or start succeeds; start is legal in any state then. */
COX_PUBLIC bool cox_executor_partially_paused(const struct cox_executor *executor);
COX_PUBLIC const char *cox_engine_state_name(enum cox_engine_state state);
COX_PUBLIC const char *cox_recover_command_name(enum cox_recover_command command);

#ifdef __cplusplus
}
#endif

#endif
