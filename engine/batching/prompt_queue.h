/*
 * prompt_queue: one engine loop on one thread for any number of clients: prompts come while it
 * runs, and share its steps.
 *
 * Each client has a queue of its own for what it asked and one for what is done. The engine loop is
 * given prompts in turn, one of each client, and not many more than it can run, so that one client
 * with thousands of prompts delays another one's by a step or two. A client that takes nothing
 * stops getting anything, and nobody else does. Between prompts the thread sleeps without a
 * timeout.
 *
 * Prompts whose keys and values another group holds are pulled from there; prompts may be held for
 * other groups: a hold is its client's, who releases it, at the latest by going.
 *
 * Other weights (shared_weights.h, of the engine loop's options) wake the engine loop, so that the
 * ranks switch also when nobody asks anything.
 *
 * A failure that ends the engine loop ends all that it was given, with that failure; the next
 * prompt gets a new one on the same group.
 *
 * Threads: start, stop and free from one thread; a client's functions from one thread at a time;
 *   status from any.
 * Ownership: the executor is borrowed from start to stop. Clients are freed before the prompt
 *   queue. A request's tokens are copied; a result is the caller's.
 * Blocks: stop until the step in flight is given up, which is soon; the rest nothing.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_ENGINE_PROMPT_QUEUE_H
#define COX_ENGINE_PROMPT_QUEUE_H

#include "engine_loop.h"

struct cox_lora;
struct cox_prompt_queue;
struct cox_prompt_queue_client;

/* Prompts of a client without a result, or with one that it has not taken. */
#define COX_PROMPT_QUEUE_PROMPT_COUNT_MAX 512
/* And tokens of these, except that one prompt may have any number. */
#define COX_PROMPT_QUEUE_TOKEN_COUNT_MAX (UINT32_C(4) << 20)

struct cox_prompt_queue_options {
    /* Limits; block numbers as cox_engine_loop_fit left them. transfer, done, pulled and feed are
     * the prompt queue's own. */
    struct cox_engine_loop_options engine_loop;
    /* adapters that prompts may name; borrowed as the executor; NULL: none */
    struct cox_lora *lora;
    /* of the model: tokens are below it; 0: not known */
    uint32_t vocab_size;
    /* of the group, for holds; borrowed. NULL: nothing is held, and nothing pulled */
    const char *name;
};

/* Returns 0; COX_INVALID; -ENOMEM; -errno. */
int cox_prompt_queue_start(struct cox_executor *executor,
                           const struct cox_prompt_queue_options *options,
                           struct cox_prompt_queue **ret_queue, struct cox_error *err);
/* Ends the thread. What is not done ends with the cause, NULL: COX_CLOSED. Idempotent. */
void cox_prompt_queue_stop(struct cox_prompt_queue *queue, const struct cox_error *cause);
/* NULL-safe, returns NULL. */
struct cox_prompt_queue *cox_prompt_queue_free(struct cox_prompt_queue *queue);
void cox_prompt_queue_freep(struct cox_prompt_queue **queue); /* for _cox_cleanup_ */
void cox_prompt_queue_status(struct cox_prompt_queue *queue, struct cox_prompts_status *ret_status);

/* The hold of this sequence, as others pull it: a copy, freed with cox_kv_reference_free. Returns
 * 0; COX_NOT_FOUND: there is none, err says more; -ENOMEM. */
int cox_prompt_queue_find_hold(struct cox_prompt_queue *queue, int64_t sequence,
                               struct cox_kv_reference **ret_source, struct cox_error *err);

/* wake_fd: an eventfd of the caller's that is written to when a result is there. Returns 0;
 * -ENOMEM. */
int cox_prompt_queue_client_new(struct cox_prompt_queue *queue, int wake_fd,
                                struct cox_prompt_queue_client **ret_client);
/* Cancels; NULL-safe, returns NULL. */
struct cox_prompt_queue_client *cox_prompt_queue_client_free(
    struct cox_prompt_queue_client *client);

/* Queues a prompt; its owner is the client. What is wrong with it is told by its result. Returns 0;
 * COX_FULL: take results first; -ENOMEM. */
int cox_prompt_queue_submit(struct cox_prompt_queue_client *client,
                            const struct cox_prompt_request *request, uint64_t index);
/* Ends a hold of this client; of another one, or one that is over, nothing. Returns 0; COX_FULL:
 * more are waiting for the end of a step than it can hold; -ENOMEM. */
int cox_prompt_queue_release(struct cox_prompt_queue_client *client, int64_t sequence);

/* The oldest result, or word of a pull. Returns 0 or COX_EMPTY. */
int cox_prompt_queue_take(struct cox_prompt_queue_client *client,
                          struct cox_prompt_output *ret_result);
/* Prompts whose results were not taken. */
uint32_t cox_prompt_queue_outstanding(struct cox_prompt_queue_client *client);
/* All of them are given up, done or not; their blocks are free before the next step, those too that
 * are held for results that were not taken. */
void cox_prompt_queue_cancel(struct cox_prompt_queue_client *client);

#endif
