/*
 * serving: one scheduler on one thread for any number of clients: prompts come while it runs, and
 * share its steps.
 *
 * Each client has a queue of its own for what it asked and one for what is done. The scheduler is
 * given prompts in turn, one of each client, and not many more than it can run, so that one client
 * with thousands of prompts delays another one's by a step or two. A client that takes nothing
 * stops getting anything, and nobody else does. Between prompts the thread sleeps without a
 * timeout.
 *
 * Prompts whose keys and values another group holds are pulled from there; prompts may be held for
 * other groups: a hold is its client's, who releases it, at the latest by going.
 *
 * Other weights (shared_weights.h, of the scheduler's options) wake the scheduler, so that the
 * ranks switch also when nobody asks anything.
 *
 * A failure that ends the scheduler ends all that it was given, with that failure; the next prompt
 * gets a new one on the same group.
 *
 * Threads: start, stop and free from one thread; a client's functions from one thread at a time;
 *   status from any.
 * Ownership: the executor is borrowed from start to stop. Clients are freed before the serving. A
 *   request's tokens are copied; a result is the caller's.
 * Blocks: stop until the step in flight is given up, which is soon; the rest nothing.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_COORDINATOR_SERVING_H
#define COX_COORDINATOR_SERVING_H

#include "scheduler.h"

struct cox_lora;
struct cox_serving;
struct cox_serving_client;

/* Prompts of a client without a result, or with one that it has not taken. */
#define COX_SERVING_PROMPT_COUNT_MAX 512
/* And tokens of these, except that one prompt may have any number. */
#define COX_SERVING_TOKEN_COUNT_MAX (UINT32_C(4) << 20)

struct cox_serving_options {
    /* Limits; block numbers as cox_scheduler_fit left them. transfer, done, pulled and feed are the
     * serving's own. */
    struct cox_scheduler_options scheduler;
    /* adapters that prompts may name; borrowed as the executor; NULL: none */
    struct cox_lora *lora;
    /* of the model: tokens are below it; 0: not known */
    uint32_t vocab_size;
    /* of the group, for holds; borrowed. NULL: nothing is held, and nothing pulled */
    const char *name;
};

/* Returns 0; COX_INVALID; -ENOMEM; -errno. */
int cox_serving_start(struct cox_executor *executor, const struct cox_serving_options *options,
                      struct cox_serving **ret_serving, struct cox_error *err);
/* Ends the thread. What is not done ends with the cause, NULL: COX_CLOSED. Idempotent. */
void cox_serving_stop(struct cox_serving *serving, const struct cox_error *cause);
/* NULL-safe, returns NULL. */
struct cox_serving *cox_serving_free(struct cox_serving *serving);
void cox_serving_freep(struct cox_serving **serving); /* for _cox_cleanup_ */
void cox_serving_status(struct cox_serving *serving, struct cox_prompts_status *ret_status);

/* The hold of this sequence, as others pull it: a copy, freed with cox_kv_reference_free. Returns
 * 0; COX_NOT_FOUND: there is none, err says more; -ENOMEM. */
int cox_serving_find_hold(struct cox_serving *serving, int64_t sequence,
                          struct cox_kv_reference **ret_source, struct cox_error *err);

/* wake_fd: an eventfd of the caller's that is written to when a result is there. Returns 0;
 * -ENOMEM. */
int cox_serving_client_new(struct cox_serving *serving, int wake_fd,
                           struct cox_serving_client **ret_client);
/* Cancels; NULL-safe, returns NULL. */
struct cox_serving_client *cox_serving_client_free(struct cox_serving_client *client);

/* Queues a prompt; its owner is the client. What is wrong with it is told by its result. Returns 0;
 * COX_FULL: take results first; -ENOMEM. */
int cox_serving_submit(struct cox_serving_client *client, const struct cox_prompt_request *request,
                       uint64_t index);
/* Ends a hold of this client; of another one, or one that is over, nothing. Returns 0; COX_FULL:
 * more are waiting for the end of a step than it can hold; -ENOMEM. */
int cox_serving_release(struct cox_serving_client *client, int64_t sequence);

/* The oldest result, or word of a pull. Returns 0 or COX_EMPTY. */
int cox_serving_take(struct cox_serving_client *client, struct cox_prompt_output *ret_result);
/* Prompts whose results were not taken. */
uint32_t cox_serving_outstanding(struct cox_serving_client *client);
/* All of them are given up, done or not; their blocks are free before the next step, those too that
 * are held for results that were not taken. */
void cox_serving_cancel(struct cox_serving_client *client);

#endif
