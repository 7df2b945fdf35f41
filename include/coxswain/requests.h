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
#ifndef COX_REQUESTS_H
#define COX_REQUESTS_H

#include <coxswain/executor.h>
#include <coxswain/handle.h>

#include <stdlib.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * ==== link_state: the state of a link to the KV blocks of another group. A rank keeps one per
 * cluster that it reads from (engine/rank/links.h); the coordinator merges the states of its ranks.
 *
 *     WAITING -(an attach begins)-> RUNNING -(attached)-> SUCCESS -(the owner dies)-> FAILED
 *        |                             |                     |
 *        '---(refused, no layout)------'---------------------'-(layouts differ)----> FAILED
 *
 * A failed link stays failed; linking again creates a new link. The numbers are those of the
 * control protocol (LinkState.state).
 */

enum cox_link_state {
    COX_LINK_WAITING = 0,
    COX_LINK_RUNNING,
    COX_LINK_SUCCESS,
    COX_LINK_FAILED,
};

/* "waiting", "running", "success", "failed"; "unknown" outside. Static storage. */
static inline const char *cox_link_state_name(uint32_t state)
{
    static const char *const names[] = {"waiting", "running", "success", "failed"};
    return state < sizeof names / sizeof names[0] ? names[state] : "unknown";
}

/* ==== requests ==== */

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

/* MODEL_INIT on every rank. In each init the ranks form a new rank group, in new memory. Inits and
 * replays run one at a time: a second one waits, and each waits until no step is in flight, both
 * until deadline_ns. The number of device blocks of a rank is its npuBlockNum, or npu_block_num of
 * its first KV cache (MindIE-LLM's workers since March 2026). One group may have ranks of both
 * kinds. If a legacy rank describes no KV cache, the caches that other ranks describe are assumed
 * for it, the first with its npuBlockNum.
 * Returns as cox_executor_call, and
 *   COX_NO_SPACE: no memory for the rank group, err says how much; nothing was sent
 *   COX_DIVERGED: ranks disagree on a value that cannot be merged (block size, number of caches,
 *     thinking ids, digest of the model)
 *   COX_CORRUPT: a reply lacks a required key, or has a value that is not a number
 *   COX_INVALID: a rank refuses a value of config
 *   COX_NOT_FOUND: a rank does not find something that config names, such as the model
 *   COX_REJECTED: a rank replied with another error
 */
COX_PUBLIC int cox_executor_init(struct cox_executor *executor,
                                 const struct cox_config_entry *config, size_t config_count,
                                 uint64_t deadline_ns, struct cox_init_summary *ret_summary,
                                 struct cox_error *err);

/* A version of the model's weights: memory with the seals F_SEAL_WRITE, F_SEAL_SHRINK, F_SEAL_GROW
 * and F_SEAL_SEAL, which ranks map for reading. Each init has a handle to it. So do steps (fields
 * weights_version and weights), until a step of that version has succeeded on all ranks. */
struct cox_weights_announcement {
    /* to the whole memory; ranks must be able to open it until all use another version */
    struct cox_handle handle;
    /* its bytes */
    uint64_t size;
    /* from 1 */
    uint64_t version;
};
/* Sets a function that every init, replays included, calls on its thread before it is sent. Set it
 * before the first init. Legacy workers get no announcement. */
COX_PUBLIC void cox_executor_announce_weights(
    struct cox_executor *executor,
    void (*announce)(void *context, struct cox_weights_announcement *ret_announcement),
    void *context);

/* Memory that an announcement names: ranks on other nodes get a copy. Does nothing in a
 * group on one machine. fd: size bytes, sealed; it stays the caller's. digest: of the content.
 * Returns
 *   0
 *   COX_UNSUPPORTED: the transport shares no memory
 *   -errno
 */
COX_PUBLIC int cox_executor_share(struct cox_executor *executor, const struct cox_handle *handle,
                                  int fd, uint64_t size, uint64_t digest, struct cox_error *err);
/* It is announced no more. NULL-safe for executor. */
COX_PUBLIC void cox_executor_unshare(struct cox_executor *executor,
                                     const struct cox_handle *handle);

/* After a rank was replaced: sends the last init that succeeded to every rank again, unchanged but
 * marked as a replay. The ranks form a new rank group; ranks that have completed this init before
 * keep what they loaded. Legacy workers get it as a plain init. The call waits until no step is in
 * flight. The engine state becomes NORMAL, except that PAUSE and READY stay.
 * Returns
 *   as cox_executor_init
 *   COX_STATE: there was no init
 *   COX_DIVERGED: the reply differs from that of the first init
 */
COX_PUBLIC int cox_executor_replay_init(struct cox_executor *executor, uint64_t deadline_ns,
                                        struct cox_error *err);

/* The epoch under which other groups link to this one: computed from epoch (cox_executor_epoch) and
 * the present model. No other group of the same name has the same value. */
COX_PUBLIC uint64_t cox_executor_kv_epoch(const struct cox_executor *executor, uint64_t epoch);
/* Declares that from now on all ranks compute with the model of this digest, and with no earlier
 * one. The epoch for other groups changes, and they have to link again. Keys and values of this
 * model must not be offered to them before this call. Any thread. */
COX_PUBLIC void cox_executor_renew_kv(struct cox_executor *executor, uint64_t model_digest);

/* TEXT_GENERATOR_CLEANUP: these sequences have ended without a further step. No reply. */
COX_PUBLIC int cox_executor_cleanup(struct cox_executor *executor, const int64_t *seq_ids,
                                    size_t count, uint64_t deadline_ns, struct cox_error *err);

/* PD_LINK: link, unlink, switch role. No reply; cox_executor_link_status returns the result. */
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
 * any rank, and succeeded if every rank lists it as success. With legacy workers only rank 0's list
 * is used. */
COX_PUBLIC int cox_executor_link_status(struct cox_executor *executor, uint64_t deadline_ns,
                                        struct cox_link_status *ret_status, struct cox_error *err);
/* Idempotent. */
static inline void cox_link_status_deinit(struct cox_link_status *status)
{
    for (size_t i = 0; i < status->failed_count; i++) {
        free(status->failed[i].cluster_id);
        free(status->failed[i].text);
    }
    for (size_t i = 0; i < status->success_count; i++)
        free(status->success[i]);
    for (size_t i = 0; i < status->running_count; i++)
        free(status->running[i]);
    for (size_t i = 0; i < status->waiting_count; i++)
        free(status->waiting[i]);
    free(status->failed);
    free(status->success);
    free(status->running);
    free(status->waiting);
    memset(status, 0, sizeof *status);
}

struct cox_pull_result {
    const char *request_id;
    /* PDErrorCode: 0, or the first failure of any rank */
    int32_t code;
};
/* KV_TRANSFER. One result per pull of the request, in the same order. A pull without a result of
 * some rank has failed (PD_PULL_KV_UNKNOWN_ERROR). *ret_results is one
 * allocation, which the caller frees (free).
 * Returns as cox_executor_call, and
 *   0: also if single pulls failed
 *   COX_INVALID: a pull without an id, or two with the same id; nothing was sent
 */
COX_PUBLIC int cox_executor_pull_kv(struct cox_executor *executor,
                                    const struct Coxswain__PullKVRequest *request,
                                    uint64_t deadline_ns, struct cox_pull_result **ret_results,
                                    size_t *ret_count, struct cox_error *err);

/* The result of a LoRA operation on one rank. */
struct cox_lora_result {
    /* LoraOperationStatus; -1: no reply */
    int32_t status;
    /* the request was sent, so the rank may have executed it even without a reply */
    bool asked;
    /* digest of the files that a load has read; 0: the rank reported none */
    uint64_t digest;
    /* the reason that the rank reported; "": none */
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
    COX_RECOVER_START,     /* CMD_START_ENGINE; from READY, PAUSE, partially paused; to NORMAL */
};

struct cox_recover_result {
    int32_t device;
    /* 0: ok; -1: no reply. A reply without command_result is a failure. */
    int32_t result;
    char text[256];
};

/* The state is NORMAL after an init and after start. It becomes ABNORMAL by a death, by the
 * replacement of a rank, and by an init that failed after it was sent; it stays so until an init
 * succeeds. BUSY is NORMAL while a step is in flight. Steps are refused (COX_STATE) in PAUSE and
 * READY, and while a command other than clear runs. Ranks still process steps that were published
 * before.
 *
 * A pause that failed may have stopped some ranks (partially_paused of struct
 * cox_executor_status). start, also after another pause, makes them continue. So does
 * cox_executor_init: it ends PAUSE, READY and a partial pause, and the init callback of each rank
 * calls cox_worker_resume, as the reference engine does. cox_executor_replay_init ends none of
 * them: paused ranks stay paused until start. */

/* Runs one recovery command on every rank, independent of the other channels. ret_results:
 * rank_count of them, filled also on failure.
 * Returns as cox_executor_call, and
 *   0: every rank's result is 0
 *   COX_STATE: the command is not legal now, err says which commands are
 *   COX_REJECTED: a rank's result is not 0
 */
COX_PUBLIC int cox_executor_recover(struct cox_executor *executor, enum cox_recover_command command,
                                    uint64_t deadline_ns, struct cox_recover_result *ret_results,
                                    struct cox_error *err);

#ifdef __cplusplus
}
#endif

#endif
