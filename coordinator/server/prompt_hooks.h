/*
 * prompt_hooks: the interface between a server and its engine for prompts: requests, outputs, pulls
 * of KV blocks, and the hooks that an engine sets to complete prompts.
 *
 * Each connection that brings prompts is one client of the engine. The server checks requests from
 * the socket: numbers in range, at most COX_STOP_COUNT_MAX stop tokens. If the engine cannot
 * compute a prompt, its output is an error.
 *
 * Threads: hooks with a client are called by one thread at a time for each client. Each client has
 *   a thread of its own, so the engine locks state that clients share. Hooks with a context: any
 *   thread.
 * Ownership: a request is lent for the call. The server owns an output: what it points to is
 *   allocated with malloc and freed by cox_prompt_output_deinit.
 * Blocks: no hook may block. take returns COX_EMPTY instead; the engine writes to wake_fd later.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_COORDINATOR_PROMPT_HOOKS_H
#define COX_COORDINATOR_PROMPT_HOOKS_H

#include "kv_reference.h"

#ifdef __cplusplus
extern "C" {
#endif

#define COX_STOP_COUNT_MAX 8

struct cox_prompt_sampling {
    /* 0: greedy */
    float temperature;
    /* 1: off */
    float top_p;
    /* 0: off */
    int32_t top_k;
    int32_t seed;
};

struct cox_prompt_request {
    /* the prompt */
    const int32_t *tokens;
    uint32_t token_count;
    /* tokens to generate, at most; at least 1 */
    uint32_t new_count_max;
    /* if the KV cache or the positions do not suffice: generate fewer tokens, do not refuse */
    bool shorten;
    struct cox_prompt_sampling sampling;
    int32_t stop_tokens[COX_STOP_COUNT_MAX];
    uint32_t stop_count;
    /* name of the LoRA adapter; NULL: none */
    const char *lora;
    /* private to the engine; the server sets neither */
    void *context;
    uint64_t owner;
    /* Blocks from which the keys and values of all tokens but the last one are pulled. NULL: they
     * are computed.
     */
    const struct cox_kv_reference *source;
    /* the request ends with the pull, successful or not; tokens are not read */
    bool pull_only;
    /* not 0: the pull is cancelled after this time */
    uint64_t pull_ms;
    /* if the pull fails, the prompt fails instead of being computed here */
    bool no_recompute;
    /* not 0: the prompt ends with its first token, and its blocks are leased for this time */
    uint64_t hold_ms;
};

enum cox_finish {
    COX_FINISH_STOP,   /* the last of the tokens is a stop token, or the worker ended the prompt */
    COX_FINISH_LENGTH, /* new_count_max */
    COX_FINISH_ERROR,  /* error has the reason */
};

/* engine/batching/transfers.h has the diagram. */
enum cox_pull_state {
    COX_PULL_QUEUED = 0,
    COX_PULL_SENT,
    COX_PULL_SUCCESS,
    COX_PULL_FAILED,
    COX_PULL_TIMEOUT,
    COX_PULL_PEER_DEAD,
    COX_PULL_CANCELLED,
    COX_PULL_STATE_COUNT,
};
#ifdef COX_INTERNAL
/* "queued", "success", ...; "unknown" outside. Static storage. */
const char *cox_pull_state_name(enum cox_pull_state state);
#endif

/* The result of a pull on one rank. */
struct cox_pull_rank {
    bool replied;
    /* PDErrorCode */
    int32_t code;
    /* enum cox_status of the failure; 0: the rank gave none */
    int32_t status;
    uint64_t copied_bytes, copy_ns;
    char text[256];
};

/* How a pull ended. One allocation: ranks follow the struct. */
struct cox_pull_report {
    enum cox_pull_state state;
    /* not SUCCESS */
    struct cox_error error;
    uint32_t rank_count;
    struct cox_pull_rank *ranks;
};

struct cox_prompt_output {
    /* index given to submit */
    uint64_t index;
    enum cox_finish finish;
    /* the generated tokens; NULL: none */
    int32_t *tokens;
    uint32_t token_count;
    /* COX_FINISH_ERROR; else NULL */
    struct cox_error *error;
    /* True: this reports the end of the pull, not of the prompt. The source is no longer needed;
     * error is the reason if the pull failed. */
    bool is_pulled;
    /* the pull failed, and the prompt was computed here */
    bool recomputed;
    /* the KV lease of the prompt's blocks; NULL: none */
    struct cox_kv_reference *hold;
    /* for a request with pull_only */
    struct cox_pull_report *report;
};
COX_PUBLIC void cox_prompt_output_deinit(struct cox_prompt_output *output); /* idempotent */

struct cox_transfers_status {
    /* pulls that have not ended */
    uint64_t running;
    /* so far */
    uint64_t succeeded;
    /* so far, including TIMEOUT and PEER_DEAD */
    uint64_t failed;
    uint64_t cancelled;
    /* pulls that were not the first attempt */
    uint64_t retries;
    uint64_t late_results;
    /* bytes copied by all ranks */
    uint64_t bytes;
    /* Copying time, summed over ranks, which copy in parallel. Includes waits for a destination. */
    uint64_t copy_ns;
    /* Median speed of one rank in one pull, over the last complete pulls; 0: none. */
    uint64_t bytes_per_s;
    uint64_t quarantined_blocks;
};

struct cox_prompts_status {
    uint32_t client_count;
    /* limit of prompts without an output, per client; 0: no limit */
    uint32_t prompt_count_max;
    /* prompts that are not computed yet */
    uint64_t waiting;
    /* prompts that are being computed */
    uint64_t running;
    /* prompts whose output is ready and was not taken */
    uint64_t unread;
    /* so far, failed ones included */
    uint64_t completed;
    /* so far */
    uint64_t cancelled;
    uint64_t generated_tokens;
    /* blocks of the KV cache, as of the last step's start */
    uint32_t free_blocks;
    uint32_t block_count;
    /* KV leases that have not ended */
    uint64_t holds;
    uint64_t held_blocks;
    /* sequences that could not be pulled and were computed here, so far */
    uint64_t recomputed;
    struct cox_transfers_status transfer;
};

/* All of them are required, except where NULL is allowed. */
struct cox_prompt_hooks {
    /* set by COX_PROMPT_HOOKS_INIT (base.h) */
    size_t size;
    /* wake_fd: an eventfd of the server. The engine writes to it when take has an output.
     * Returns
     *   0
     *   -ENOMEM
     *   -errno
     */
    int (*open)(void *context, int wake_fd, void **ret_client);
    /* Cancels the client's prompts and ends its KV leases. */
    void (*close)(void *client);
    /* Queues a prompt.
     * Returns
     *   0: take has its output later
     *   COX_FULL: the server has to take outputs first
     *   -ENOMEM
     */
    int (*submit)(void *client, const struct cox_prompt_request *request, uint64_t index);
    /* The oldest output, or the end of a pull.
     * Returns
     *   0
     *   COX_EMPTY
     */
    int (*take)(void *client, struct cox_prompt_output *ret_output);
    /* Number of prompts of the client whose output was not taken yet. */
    uint32_t (*outstanding)(void *client);
    /* Cancels all prompts of the client: they get no output. */
    void (*cancel)(void *client);
    void (*status)(void *context, struct cox_prompts_status *ret_status);
    /* Ends a KV lease of this client. Has no effect on an expired lease, or on that of another
     * client. NULL: the engine leases nothing.
     * Returns
     *   0
     *   COX_FULL
     *   -ENOMEM
     */
    int (*release)(void *client, int64_t sequence);
    /* Finds the KV lease of this sequence, for another group that pulls it. The server frees it
     * with cox_kv_reference_free. NULL: the engine leases nothing.
     * Returns
     *   0
     *   COX_NOT_FOUND: err says more
     *   -ENOMEM
     */
    int (*find_hold)(void *context, int64_t sequence, struct cox_kv_reference **ret_reference,
                     struct cox_error *err);
};
#define COX_PROMPT_HOOKS_INIT COX_OPTIONS_INIT(struct cox_prompt_hooks)

#ifdef __cplusplus
}
#endif

#endif
