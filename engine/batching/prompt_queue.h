/*
 * prompt_queue: one engine loop on one thread for any number of clients. Prompts arrive while it
 * runs, and share its steps.
 *
 * Each client has a queue of prompts and a queue of results. The engine loop takes prompts from the
 * clients in turn, and few more than it can run. So a client with thousands of prompts delays
 * another one by a step or two. A client that does not take its results gets no further ones, and
 * delays no other client. Without prompts the thread blocks without a timeout.
 *
 * Prompts whose keys and values another group has are pulled from there. A prompt may ask for a KV
 * lease for other groups. The lease belongs to its client, which releases it, or disconnects.
 *
 * A new weights version (shared_weights.h, in the options of the engine loop) wakes the loop, so
 * that the ranks switch also while there are no prompts.
 *
 * A failure that ends the engine loop ends all its prompts with that failure. The next prompt
 * starts a new engine loop on the same group.
 *
 * Threads: start, stop and free from one thread; a client's functions from one thread at a time;
 *   status from any.
 * Ownership: the executor is borrowed from start to stop. Free all clients before the prompt queue.
 *   A request's tokens are copied; a result is the caller's.
 * Blocks: stop, until the step in flight is cancelled, which is soon; nothing else.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_ENGINE_PROMPT_QUEUE_H
#define COX_ENGINE_PROMPT_QUEUE_H

#include "engine_loop.h"

struct cox_lora;
struct cox_prompt_queue;
struct cox_prompt_queue_client;

/* Prompts of a client that have no result yet, or one that the client has not taken. */
#define COX_PROMPT_QUEUE_PROMPT_COUNT_MAX 512
/* Tokens of these prompts. */
#define COX_PROMPT_QUEUE_TOKEN_COUNT_MAX (UINT32_C(4) << 20)

struct cox_prompt_queue_options {
    /* Limits; block numbers as cox_engine_loop_fit left them. The prompt queue sets transfer, done,
     * pulled and feed itself. */
    struct cox_engine_loop_options engine_loop;
    /* adapters that prompts may name; borrowed as long as the executor; NULL: none */
    struct cox_lora *lora;
    /* of the model: tokens are below it; 0: unknown */
    uint32_t vocab_size;
    /* cox_text_digest_load; 0: unknown */
    uint64_t text_digest;
    /* group name, for KV leases; borrowed. NULL: no leases and no pulls */
    const char *name;
};

/* Returns
 *   0
 *   COX_INVALID
 *   -ENOMEM
 *   -errno
 */
int cox_prompt_queue_start(struct cox_executor *executor,
                           const struct cox_prompt_queue_options *options,
                           struct cox_prompt_queue **ret_queue, struct cox_error *err);
/* Ends the thread. Unfinished prompts end with cause; NULL: COX_CLOSED. Idempotent. */
void cox_prompt_queue_stop(struct cox_prompt_queue *queue, const struct cox_error *cause);
/* NULL-safe, returns NULL. */
struct cox_prompt_queue *cox_prompt_queue_free(struct cox_prompt_queue *queue);
void cox_prompt_queue_status(struct cox_prompt_queue *queue, struct cox_prompts_status *ret_status);

/* The KV lease of this sequence as a KV reference: a copy, freed with free.
 * Returns
 *   0
 *   COX_NOT_FOUND: no such lease, err has the reason
 *   -ENOMEM
 */
int cox_prompt_queue_find_hold(struct cox_prompt_queue *queue, int64_t sequence,
                               struct cox_kv_reference **ret_source, struct cox_error *err);

/* wake_fd: an eventfd of the caller's, written to when a result is available. Returns 0 or -ENOMEM.
 */
int cox_prompt_queue_client_new(struct cox_prompt_queue *queue, int wake_fd,
                                struct cox_prompt_queue_client **ret_client);
/* Cancels all its prompts. NULL-safe, returns NULL. */
struct cox_prompt_queue_client *cox_prompt_queue_client_free(
    struct cox_prompt_queue_client *client);

/* Queues a prompt, owned by the client. Errors in the prompt are reported by its result.
 * Returns
 *   0
 *   COX_FULL: take results first
 *   -ENOMEM
 */
int cox_prompt_queue_submit(struct cox_prompt_queue_client *client,
                            const struct cox_prompt_request *request, uint64_t index);
/* Ends a lease of this client. Leases of other clients, or that have ended, are ignored.
 * Returns
 *   0
 *   COX_FULL: too many releases wait for the end of a step
 *   -ENOMEM
 */
int cox_prompt_queue_release(struct cox_prompt_queue_client *client, int64_t sequence);

/* The oldest result, or notice of a pull. Returns 0 or COX_EMPTY. */
int cox_prompt_queue_take(struct cox_prompt_queue_client *client,
                          struct cox_prompt_output *ret_result);
/* Number of prompts whose results were not taken. */
uint32_t cox_prompt_queue_outstanding(struct cox_prompt_queue_client *client);
/* Cancels all its prompts, done or not. Their blocks are free before the next step, including those
 * leased for results that were not taken. */
void cox_prompt_queue_cancel(struct cox_prompt_queue_client *client);

#endif
