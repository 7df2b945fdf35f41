/*
 * shared_weights: the model's weights, which the coordinator loads and converts once, and all ranks
 * use in place. Each version is an image (channel/shm/region.h) that no process can write any more,
 * the coordinator included.
 *
 *     load, publish
 *          |                      .- used: every rank has computed a step with it --> PRESENT
 *          v                      |
 *       PRESENT      replace -> NEXT
 *                                 '- a rank failed, or cancelled: withdrawn. The previous version
 *                                    is present again, under a later number ------------> PRESENT
 *
 * Version numbers only grow. So a repeated step asks for the same weights or later ones, and no
 * rank has to keep a version it has left. At most one version is NEXT. An init offers the newest
 * version, and so does every step until one with it has succeeded in this group epoch. Therefore
 * every rank that receives a step has its version or learns where to find it. The coordinator drops
 * a replaced or withdrawn version at once. The kernel frees its memory when the last rank unmaps
 * it, so nothing counts references.
 *
 * Threads: any; one replace at a time. The executor's init and the engine loop call tell, step,
 *   used and failed.
 * Ownership: the caller owns the object. Folders are read in load and replace only. The executor is
 *   borrowed from publish to free.
 * Blocks: load and replace, while they read files. replace, until a step has used the version, its
 *   deadline, or stop. publish, and functions that drop a version, while the group's control socket
 *   replies, 1 s at most.
 * If the process dies: images have no names; the ranks end with their coordinator.
 */
#ifndef COX_ENGINE_SHARED_WEIGHTS_H
#define COX_ENGINE_SHARED_WEIGHTS_H

#include "channel/base/idioms.h"

#include <coxswain/server.h>

struct cox_shared_weights;

/* Loads a folder into the first version. progress (NULL: not called) is called before every layer
 * is read, with the number of those that are; true cancels.
 * Returns
 *   0
 *   COX_ABORTED: progress returned true
 *   COX_NO_SPACE
 *   COX_BUSY: another process has mapped the memory for writing
 *   as cox_model_image_fill: err names the file
 *   -errno
 */
int cox_shared_weights_load(const char *directory,
                            bool (*progress)(void *context, uint32_t done, uint32_t count),
                            void *context, struct cox_shared_weights **ret_weights,
                            struct cox_error *err);
/* To be called after stop, and after the executor has ended. NULL-safe, returns NULL. */
struct cox_shared_weights *cox_shared_weights_free(struct cox_shared_weights *weights);
COX_DEFINE_FREEP(struct cox_shared_weights, cox_shared_weights_free);

/* Makes the executor's inits offer the weights. To be called once, before the first init. Returns
 * as cox_exporter_new and cox_exporter_export. */
int cox_shared_weights_publish(struct cox_shared_weights *weights, struct cox_executor *executor,
                               struct cox_error *err);

/* Replaces the weights by a model of the same shapes. The next step uses it; with no request, a
 * step without rows is run.
 * Returns
 *   0 and the version: every rank has switched
 *   COX_INVALID: other shapes, err says what differs
 *   COX_BUSY: there is a NEXT already
 *   COX_NOT_FOUND, COX_CORRUPT and others: the folder
 *   COX_NO_SPACE
 *   COX_TIMEOUT: no step succeeded in time; the version stays NEXT
 *   COX_CLOSED
 *   COX_REJECTED and others: the version was withdrawn, err says why
 */
int cox_shared_weights_replace(struct cox_shared_weights *weights, const char *directory,
                               uint64_t deadline_ns, uint64_t *ret_version, struct cox_error *err);
/* Sets the function to call when there is a NEXT, so that the engine loop runs a step; NULL: none.
 * On return the previous function is not running. Callers of pending, step, used and failed may
 * hold a lock that wake takes. */
void cox_shared_weights_on_next(struct cox_shared_weights *weights, void (*wake)(void *context),
                                void *context);
/* Returns whether there is a NEXT. */
bool cox_shared_weights_pending(struct cox_shared_weights *weights);
/* Ends current and later waits in replace. Idempotent. */
void cox_shared_weights_stop(struct cox_shared_weights *weights);

/* The version for a step that is about to be submitted in this group epoch. Returns true when the
 * step must offer it, since a rank may not have it. Otherwise only the version of ret_told is
 * valid. */
bool cox_shared_weights_step(struct cox_shared_weights *weights, uint64_t epoch,
                             struct cox_weights_announcement *ret_announcement);
/* Reports the end of a step of this version, submitted in this epoch: success on every rank, or the
 * error of a rank. */
void cox_shared_weights_used(struct cox_shared_weights *weights, uint64_t version, uint64_t epoch);
void cox_shared_weights_failed(struct cox_shared_weights *weights, uint64_t version, int status,
                               const char *text);
/* Withdraws the NEXT, because no step will be run for it. */
void cox_shared_weights_give_up(struct cox_shared_weights *weights, int status, const char *text);

void cox_shared_weights_status(struct cox_shared_weights *weights,
                               struct cox_weights_status *ret_status);

#endif
