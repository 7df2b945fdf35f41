/*
 * shared_weights: the model's weights, loaded and converted once by the coordinator and used by all ranks where they are: a pool of
 * blocks, one for each version, and a queue that tells the ranks of new ones.
 *
 *     load, publish
 *          |                      .- used: every rank has computed a step with it --> PRESENT
 *          v                      |
 *       PRESENT      replace -> NEXT
 *                                 '- a rank could not, or gave up: withdrawn; what was present before is
 *                                    published again, under a later number ----------> PRESENT
 *
 * Numbers of versions only grow, so that a step which is repeated asks for the same weights or for later ones, and no rank has to
 * keep what it left. While there is a NEXT there is no other one. Ranks get the block of the first version, or of whichever is
 * the newest when they are started again, with their init; and only those that subscribed before a version was published
 * hear of it: so a version that was published while an init was under way is published again.
 *
 * Threads: any; one replace at a time. tell, step, used and failed: the executor's init and the scheduler.
 * Ownership: the caller owns the object; folders are read, and forgotten. The executor is borrowed from publish to free.
 * Blocks: load and replace while files are read; replace until a step has used the version, its deadline, or stop. The rest for
 *   the queue's lock.
 * If the process dies: pool and queue are without names; the ranks end with their coordinator.
 */
#ifndef COX_COORDINATOR_SHARED_WEIGHTS_H
#define COX_COORDINATOR_SHARED_WEIGHTS_H

#include "../operations.h"

struct cox_shared_weights;

/* Loads a folder into the first version. cancelled (NULL: never) is asked now and then: COX_ABORTED. Returns 0; what
 * cox_model_block_fill and cox_pool_create return: err says of which file. */
int cox_shared_weights_load(const char *directory, bool (*cancelled)(void *context), void *context,
                            struct cox_shared_weights **ret_weights, struct cox_error *err);
/* After stop, and after the executor has ended. NULL-safe, returns NULL. */
struct cox_shared_weights *cox_shared_weights_free(struct cox_shared_weights *weights);
void cox_shared_weights_freep(struct cox_shared_weights **weights); /* for _cox_cleanup_ */

/* From now on the executor's inits tell of them. Once, before the first init. Returns 0; what cox_exporter_new, cox_queue_create and
 * cox_publisher_new return. */
int cox_shared_weights_publish(struct cox_shared_weights *weights, struct cox_executor *executor,
                               struct cox_error *err);

/* The model of a folder instead, of the same shapes: the next step of anybody is computed with it, and where nobody has any
 * one without rows is. Returns 0, every rank has switched, and the version; COX_INVALID: other shapes, err says what differs;
 * COX_BUSY: there is a NEXT already; COX_NOT_FOUND, COX_CORRUPT, ...: the folder; COX_NO_SPACE; COX_TIMEOUT: no step came to an
 * end until then, and the version stays NEXT; COX_CLOSED; COX_REJECTED and others: it was withdrawn, and err says why. */
int cox_shared_weights_replace(struct cox_shared_weights *weights, const char *directory,
                               uint64_t deadline_ns, uint64_t *ret_version, struct cox_error *err);
/* wake is called when there is a NEXT: somebody has to run a step. NULL: nobody. On return the one before is not running.
 * What it locks may be held by who calls pending, step, used and failed. */
void cox_shared_weights_on_next(struct cox_shared_weights *weights, void (*wake)(void *context),
                                void *context);
/* There is a NEXT. */
bool cox_shared_weights_pending(struct cox_shared_weights *weights);
/* Ends waits in replace, now and later. Idempotent. */
void cox_shared_weights_stop(struct cox_shared_weights *weights);

/* The version of a step that is about to be submitted, planned in this life of the executor. Returns 0; what
 * cox_publisher_publish returns. */
int cox_shared_weights_step(struct cox_shared_weights *weights, uint64_t life,
                            uint64_t *ret_version, struct cox_error *err);
/* A step of this version has ended: well on every rank, or with what a rank said. */
void cox_shared_weights_used(struct cox_shared_weights *weights, uint64_t version);
void cox_shared_weights_failed(struct cox_shared_weights *weights, uint64_t version, int status,
                               const char *text);
/* No step will be run for what is NEXT: it is withdrawn. */
void cox_shared_weights_give_up(struct cox_shared_weights *weights, int status, const char *text);

struct cox_shared_weights_status {
    uint64_t version; /* PRESENT */
    uint64_t next;    /* 0: none */
    uint64_t digest;  /* of PRESENT */
    uint64_t size;    /* bytes of one version */
    struct cox_pool_stats pool;
};
void cox_shared_weights_status(struct cox_shared_weights *weights,
                               struct cox_shared_weights_status *ret_status);

#endif
