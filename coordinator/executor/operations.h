/*
 * operations: the calls of the executor protocol as functions: init, link status, LoRA, pull KV,
 * recovery, each with the reply of every rank merged as its meaning demands.
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

/* Every rank's init reply, merged: the smallest of each capacity. */
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

/* MODEL_INIT on every rank: in each the ranks form their group anew, in memory of its own. One init
 * at a time: another one, also one that is said again, waits its turn until deadline_ns; and an
 * init waits for the end of the steps in flight. The device blocks of a rank are its npuBlockNum,
 * or, as MindIE-LLM's workers reply since March 2026, npu_block_num of its first KV cache; ranks
 * of both kinds may be in one group. A legacy rank that describes no KV cache has those that the
 * others describe, the first of them with its npuBlockNum.
 * Returns as cox_executor_call, and
 *   COX_NO_SPACE: no memory for the ranks' group, err says how much; nothing was sent
 *   COX_DIVERGED: ranks disagree on something that cannot be merged (block size, number of caches,
 *     thinking ids, digest of the model)
 *   COX_CORRUPT: a reply without a required key or with a value that is no number
 *   COX_INVALID: a rank refuses a value of config
 *   COX_NOT_FOUND: a rank does not find what config names, its model
 *   COX_REJECTED: a rank replies with any other error
 */
COX_PUBLIC int cox_executor_init(struct cox_executor *executor,
                                 const struct cox_config_entry *config, size_t config_count,
                                 uint64_t deadline_ns, struct cox_init_summary *ret_summary,
                                 struct cox_error *err);

/* Where a version of the model's weights is: memory with the seals F_SEAL_WRITE, F_SEAL_SHRINK,
 * F_SEAL_GROW and F_SEAL_SEAL, which a rank maps for reading. An init tells of it; whoever submits
 * steps says so again in those (fields weights_version and weights), until one of the version has
 * succeeded on all ranks that are there. */
struct cox_weights_told {
    /* of the whole memory; can be opened until another version was used by all */
    struct cox_handle handle;
    /* bytes of it */
    uint64_t size;
    /* from 1 */
    uint64_t version;
};
/* tell is called in every init from now on, also in one that is said again, on its thread and
 * before it goes out. Before the first init; legacy workers are told nothing. */
COX_PUBLIC void cox_executor_tell_weights(struct cox_executor *executor,
                                          void (*tell)(void *context,
                                                       struct cox_weights_told *ret_told),
                                          void *context);

/* The last init that succeeded once more, word for word and marked as such, on every rank: after a
 * rank was replaced. The ranks form their group anew; who has what it asks for keeps it. To legacy
 * workers it is the same init again. Steps in flight end first. The engine state becomes NORMAL,
 * except that PAUSE and READY stay.
 * Returns
 *   as cox_executor_init
 *   COX_STATE: there was no init
 *   COX_DIVERGED: the reply is another one than then
 */
COX_PUBLIC int cox_executor_replay_init(struct cox_executor *executor, uint64_t deadline_ns,
                                        struct cox_error *err);

/* What other groups need to pull from this one: RemoteInfo of executor.proto, packed: its name, its
 * control socket, and the KV cache of every rank, as the last init told them, with the life in
 * which they are so. *ret_bytes is the caller's (free). Any thread, asks no worker. Returns
 *   0
 *   COX_UNSUPPORTED: ranks told of no KV cache that others could read
 *   COX_STATE: there was no init
 *   -ENOMEM
 */
COX_PUBLIC int cox_executor_remote_info(struct cox_executor *executor, uint8_t **ret_bytes,
                                        size_t *ret_size, struct cox_error *err);
/* The life of the group as others know it: of this one, by cox_executor_life, and of the present
 * model. No other group of the same name has the same. */
COX_PUBLIC uint64_t cox_executor_kv_life(const struct cox_executor *executor, uint64_t life);
/* All ranks compute with the model of this digest from now on, and with none of before: other
 * groups are told of it, and of another life, so that they have to link anew. Keys and values
 * computed since are told to nobody before this. Any thread. */
COX_PUBLIC void cox_executor_renew_kv(struct cox_executor *executor, uint64_t model_digest);

/* TEXT_GENERATOR_CLEANUP: sequences ended without a further step. No reply. */
COX_PUBLIC int cox_executor_cleanup(struct cox_executor *executor, const int64_t *seq_ids,
                                    size_t count, uint64_t deadline_ns, struct cox_error *err);

/* PD_LINK: link, unlink, switch role. No reply; ask for the status. */
COX_PUBLIC int cox_executor_link(struct cox_executor *executor,
                                 const struct Coxswain__PDLinkRequest *request,
                                 uint64_t deadline_ns, struct cox_error *err);

struct cox_link_status {
    struct cox_link_failure {
        char *cluster_id;
        /* PDErrorCode */
        int32_t code;
        /* why, with the rank; NULL: it does not say */
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
/* PD_LINK_STATUS_QUERY, the lists of every rank merged: a cluster that failed anywhere failed; it
 * succeeded only when every rank lists it as success. With legacy workers rank 0 speaks for all. */
COX_PUBLIC int cox_executor_link_status(struct cox_executor *executor, uint64_t deadline_ns,
                                        struct cox_link_status *ret_status, struct cox_error *err);
COX_PUBLIC void cox_link_status_deinit(struct cox_link_status *status); /* idempotent */

struct cox_pull_result {
    char *request_id;
    /* PDErrorCode: 0, or the first failure of any rank */
    int32_t code;
};
/* KV_TRANSFER. One result per request of the call, in its order; a request that some rank does not
 * mention has failed (PD_PULL_KV_UNKNOWN_ERROR). *ret_results is freed with cox_pull_results_free.
 * Returns as cox_executor_call, and
 *   0: also when single pulls failed
 *   COX_INVALID: a request without an id, or two with the same: nothing was sent
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

/* What one rank says to a LoRA operation. */
struct cox_lora_result {
    /* LoraOperationStatus; -1: it gave no reply */
    int32_t status;
    /* it may have done it, also without a reply; false: it was never sent */
    bool asked;
    /* of what a load has read; 0: it says none */
    uint64_t digest;
    /* why, in its words; "": it says none */
    char text[256];
};
/* LORA_OPERATION on every rank, which is told until when it is waited for. ret_results: rank_count
 * of them, filled also on failure.
 * Returns as cox_executor_call, and
 *   0: every rank says LORA_CMD_SUCCESS
 *   COX_REJECTED: some do not, err names them
 */
COX_PUBLIC int cox_executor_lora_results(struct cox_executor *executor,
                                         const struct Coxswain__LoraOperationRequest *request,
                                         uint64_t deadline_ns, struct cox_lora_result *ret_results,
                                         struct cox_error *err);
/* "SLOTS_FULL"; "no answer" for -1; "an unknown status". Static storage. */
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
    /* 0: ok; -1 when the rank gave no reply: an absent result is a failure */
    int32_t result;
    char text[256];
};

/* The state is NORMAL after an init and after start; a death makes ABNORMAL of it, and so do a rank
 * that was replaced and an init that reached the ranks and failed, until an init succeeds. BUSY is
 * what NORMAL is called while a step is in flight. In PAUSE and READY, and from when a command
 * other than clear passes the gate until it has ended, steps are refused (COX_STATE): what reached
 * a rank's queue did so before that command. A pause that failed may have stopped some ranks: pause
 * again and start, or replay the init, which starts them where the state is neither PAUSE nor
 * READY. */

/* One recovery command on every rank, whatever the other channels do. ret_results: rank_count of
 * them, filled also on failure.
 * Returns as cox_executor_call, and
 *   0: every rank says 0
 *   COX_STATE: not legal now, err says which commands are
 *   COX_REJECTED: a rank's result is not 0
 */
COX_PUBLIC int cox_executor_recover(struct cox_executor *executor, enum cox_recover_command command,
                                    uint64_t deadline_ns, struct cox_recover_result *ret_results,
                                    struct cox_error *err);
COX_PUBLIC enum cox_engine_state cox_executor_engine_state(const struct cox_executor *executor);
/* A pause has failed, but came to some ranks, or may have: the state is as before, and yet they
 * refuse steps. Until a pause or start succeeds; start is legal, whatever the state. */
COX_PUBLIC bool cox_executor_partially_paused(const struct cox_executor *executor);
COX_PUBLIC const char *cox_engine_state_name(enum cox_engine_state state);
COX_PUBLIC const char *cox_recover_command_name(enum cox_recover_command command);

#ifdef __cplusplus
}
#endif

#endif
