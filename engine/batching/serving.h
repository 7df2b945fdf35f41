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
#ifndef COX_COORDINATOR_SERVING_H
#define COX_COORDINATOR_SERVING_H

#include "scheduler.h"

struct cox_lora;
struct cox_serving;
struct cox_serving_client;

/* Prompts of a client that have no result yet, or one that the client has not taken. */
#define COX_SERVING_PROMPT_COUNT_MAX 512
/* Tokens of these prompts; a single prompt may have more. */
#define COX_SERVING_TOKEN_COUNT_MAX (UINT32_C(4) << 20)

struct cox_serving_options {
    /* Limits; block numbers as cox_scheduler_fit left them. The prompt queue sets transfer, done,
     * pulled and feed itself. */
    struct cox_scheduler_options scheduler;
    /* adapters that prompts may name; borrowed as long as the executor; NULL: none */
    struct cox_lora *lora;
    /* of the model: tokens are below it; 0: unknown */
    uint32_t vocab_size;
    /* group name, for KV leases; borrowed. NULL: no leases and no pulls */
    const char *name;
};

/* Returns
 *   0
 *   COX_INVALID
 *   -ENOMEM
 *   -errno
 */
int cox_serving_start(struct cox_executor *executor, const struct cox_serving_options *options,
                      struct cox_serving **ret_serving, struct cox_error *err);
/* Ends the thread. Unfinished prompts end with cause; NULL: COX_CLOSED. Idempotent. */
void cox_serving_stop(struct cox_serving *serving, const struct cox_error *cause);
/* NULL-safe, returns NULL. */
struct cox_serving *cox_serving_free(struct cox_serving *serving);
void cox_serving_freep(struct cox_serving **serving); /* for _cox_cleanup_ */
void cox_serving_status(struct cox_serving *serving, struct cox_prompts_status *ret_status);

/* The KV lease of this sequence as a KV reference: a copy, freed with cox_kv_reference_free.
 * Returns
 *   0
 *   COX_NOT_FOUND: no such lease, err has the reason
 *   -ENOMEM
 */
int cox_serving_find_hold(struct cox_serving *serving, int64_t sequence,
                          struct cox_kv_reference **ret_source, struct cox_error *err);

/* wake_fd: an eventfd of the caller's, written to when a result is available. Returns 0 or -ENOMEM.
 */
int cox_serving_client_new(struct cox_serving *serving, int wake_fd,
                           struct cox_serving_client **ret_client);
/* Cancels all its prompts. NULL-safe, returns NULL. */
struct cox_serving_client *cox_serving_client_free(struct cox_serving_client *client);

/* Queues a prompt, owned by the client. Errors in the prompt are reported by its result.
 * Returns
 *   0
 *   COX_FULL: take results first
 *   -ENOMEM
 */
int cox_serving_submit(struct cox_serving_client *client, const struct cox_prompt_request *request,
                       uint64_t index);
/* Ends a lease of this client. Leases of other clients, or that have ended, are ignored.
 * Returns
 *   0
 *   COX_FULL: too many releases wait for the end of a step
 *   -ENOMEM
 */
int cox_serving_release(struct cox_serving_client *client, int64_t sequence);

/* The oldest result, or notice of a pull. Returns 0 or COX_EMPTY. */
int cox_serving_take(struct cox_serving_client *client, struct cox_prompt_output *ret_result);
/* Number of prompts whose results were not taken. */
uint32_t cox_serving_outstanding(struct cox_serving_client *client);
/* Cancels all its prompts, done or not. Their blocks are free before the next step, including those
 * leased for results that were not taken. */
void cox_serving_cancel(struct cox_serving_client *client);

#endif
