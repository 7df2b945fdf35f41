/*
 * weights_subscriber: the rank's side of the weights that its coordinator shares. It maps the image
 * (channel/shm/region.h) of the version in use, and of the next one.
 *
 *     take(v):     next = the image of the candidate v, opened, checked and mapped. An image that
 *                  is present already only gets the new number: a version between was withdrawn.
 *     commit:      present = next; the image that was present is unmapped
 *
 * Versions only grow. A step that is cancelled and repeated asks for the same version, or a later
 * one. What was taken for it is still next, or present. No process can write an image, so no other
 * rank can corrupt one.
 *
 * Threads: the execute thread. Inside a callback that a pause may leave, call
 *   cox_worker_allow_leave(false) first: otherwise an image could stay half opened.
 * Ownership: bytes are lent for reading. Those of present: until commit. Those of next: until they
 *   are present or a later version is taken.
 * Blocks: take, until the deadline, where it must fetch the fd from the control socket.
 * Bytes: candidates come from the coordinator, which a rank trusts; they are checked all the same.
 * If the process dies: the kernel unmaps. If the coordinator dies, mapped images stay.
 */
#ifndef COX_ENGINE_WEIGHTS_SUBSCRIBER_H
#define COX_ENGINE_WEIGHTS_SUBSCRIBER_H

#include <coxswain/worker.h>

struct cox_weights_subscriber;

/* control_socket: serves handles that cannot be opened otherwise; NULL: none. Copied. Returns 0 or
 * -ENOMEM. */
int cox_weights_subscriber_new(const char *control_socket,
                               struct cox_weights_subscriber **ret_weights);
/* NULL-safe, returns NULL. */
struct cox_weights_subscriber *cox_weights_subscriber_free(struct cox_weights_subscriber *weights);

/* The version in use; 0: none yet. */
uint64_t cox_weights_subscriber_version(const struct cox_weights_subscriber *weights);

/* The image of a version that is present, next, or the candidate's (NULL: none). A candidate
 * becomes next, or, if its image is present, gives that its number. On failure nothing has changed,
 * and err names the version.
 * Returns
 *   0
 *   COX_STALE: older than the present version
 *   COX_NOT_FOUND: the rank does not have it, and the candidate is another version, or was closed
 *   COX_DENIED: the memory is not sealed, or cannot be reached
 *   COX_CORRUPT: another size
 *   as cox_handle_open
 */
int cox_weights_subscriber_take(struct cox_weights_subscriber *weights, uint64_t version,
                                const struct cox_weights_candidate *candidate, uint64_t deadline_ns,
                                const void **ret_bytes, uint64_t *ret_size, struct cox_error *err);

/* Makes next present; no computation may use the former present any more. Without a next, does
 * nothing. */
void cox_weights_subscriber_commit(struct cox_weights_subscriber *weights);

#endif
