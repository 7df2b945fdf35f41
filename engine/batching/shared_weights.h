/*
 * shared_weights: the model's weights, loaded and converted once by the coordinator and used by all
 * ranks where they are: an image (channel/shm/region.h) for each version, which nobody can write
 * any more, the coordinator included.
 *
 *     load, publish
 *          |                      .- used: every rank has computed a step with it --> PRESENT
 *          v                      |
 *       PRESENT      replace -> NEXT
 *                                 '- a rank could not, or gave up: withdrawn; what was present
 *                                    before is present again, under a later number ------------>
 *                                    PRESENT
 *
 * Numbers of versions only grow, so that a step which is repeated asks for the same weights or for
 * later ones, and no rank has to keep what it left. While there is a NEXT there is no other one. An
 * init offers the newest version, and so does every step until one with it has succeeded in this
 * life of the executor: whatever rank a step comes to, it has the version or is told where that is.
 * A version that is no more, replaced or withdrawn, is let go here at once; the kernel frees its
 * memory with the last rank that has it mapped. Nobody counts.
 *
 * Threads: any; one replace at a time. tell, step, used and failed: the executor's init and the
 * engine loop. Ownership: the caller owns the object; folders are read, and forgotten. The executor
 * is borrowed from publish to free. Blocks: load and replace while files are read; replace until a
 * step has used the version, its deadline, or stop; what lets a version go,
 *   and publish, while the group's control socket replies, 1 s at most.
 * If the process dies: images are without names; the ranks end with their coordinator.
 */
#ifndef COX_COORDINATOR_SHARED_WEIGHTS_H
#define COX_COORDINATOR_SHARED_WEIGHTS_H

#include "coordinator/server/hooks.h"

struct cox_shared_weights;

/* Loads a folder into the first version. cancelled (NULL: never) is asked now and then:
 * COX_ABORTED. Returns 0; what cox_model_block_fill returns: err says of which file; COX_NO_SPACE;
 * COX_BUSY: the memory was mapped for writing by somebody else; -errno. */
int cox_shared_weights_load(const char *directory, bool (*cancelled)(void *context), void *context,
                            struct cox_shared_weights **ret_weights, struct cox_error *err);
/* After stop, and after the executor has ended. NULL-safe, returns NULL. */
struct cox_shared_weights *cox_shared_weights_free(struct cox_shared_weights *weights);
void cox_shared_weights_freep(struct cox_shared_weights **weights); /* for _cox_cleanup_ */

/* From now on the executor's inits tell of them. Once, before the first init. Returns 0; what
 * cox_exporter_new and cox_exporter_export return. */
int cox_shared_weights_publish(struct cox_shared_weights *weights, struct cox_executor *executor,
                               struct cox_error *err);

/* The model of a folder instead, of the same shapes: the next step of anybody is computed with it,
 * and where nobody has any one without rows is. Returns 0, every rank has switched, and the
 * version; COX_INVALID: other shapes, err says what differs; COX_BUSY: there is a NEXT already;
 * COX_NOT_FOUND, COX_CORRUPT, ...: the folder; COX_NO_SPACE; COX_TIMEOUT: no step came to an end
 * until then, and the version stays NEXT; COX_CLOSED; COX_REJECTED and others: it was withdrawn,
 * and err says why. */
int cox_shared_weights_replace(struct cox_shared_weights *weights, const char *directory,
                               uint64_t deadline_ns, uint64_t *ret_version, struct cox_error *err);
/* wake is called when there is a NEXT: somebody has to run a step. NULL: nobody. On return the one
 * before is not running. What it locks may be held by who calls pending, step, used and failed. */
void cox_shared_weights_on_next(struct cox_shared_weights *weights, void (*wake)(void *context),
                                void *context);
/* There is a NEXT. */
bool cox_shared_weights_pending(struct cox_shared_weights *weights);
/* Ends waits in replace, now and later. Idempotent. */
void cox_shared_weights_stop(struct cox_shared_weights *weights);

/* The version of a step that is about to be submitted in this life of the executor. True: the step
 * is to offer it, since a rank may not have it. Of what is not offered the version alone counts. */
bool cox_shared_weights_step(struct cox_shared_weights *weights, uint64_t life,
                             struct cox_weights_told *ret_told);
/* A step of this version, submitted in this life, has ended: well on every rank, or with what a
 * rank said. */
void cox_shared_weights_used(struct cox_shared_weights *weights, uint64_t version, uint64_t life);
void cox_shared_weights_failed(struct cox_shared_weights *weights, uint64_t version, int status,
                               const char *text);
/* No step will be run for what is NEXT: it is withdrawn. */
void cox_shared_weights_give_up(struct cox_shared_weights *weights, int status, const char *text);

void cox_shared_weights_status(struct cox_shared_weights *weights,
                               struct cox_weights_status *ret_status);

#endif
