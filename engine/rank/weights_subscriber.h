/*
 * weights_subscriber: the rank's end of the model's weights that its coordinator shares: the image
 * (channel/shm/region.h) of the version that it computes with, and of the next one.
 *
 *     take(v):     next = the image of the candidate v, opened, checked and mapped; an image that
 *                  is present already only gets the new number: a version between them was
 *                  withdrawn
 *     commit:      present = next; the image that was present is unmapped
 *
 * Versions only grow. A step that is given up and repeated asks for the same version, or a later
 * one: what was taken for it is still next, or present. No process can write an image, so nothing
 * here can be spoilt by another rank.
 *
 * Threads: one, that of the execute channel. Inside a callback that a pause may leave, call
 *   cox_worker_disable_leave first: an image that is half opened would stay so.
 * Ownership: bytes are lent, for reading: those of present until commit, those of next until they
 *   are present or a later version is taken.
 * Blocks: take, where the coordinator's fd has to be fetched at its control socket, until the
 * deadline. Bytes: candidates come from the coordinator, which a rank trusts, and are checked all
 * the same. If the process dies: the kernel unmaps. If the coordinator dies, what is mapped stays.
 */
#ifndef COX_ENGINE_WEIGHTS_SUBSCRIBER_H
#define COX_ENGINE_WEIGHTS_SUBSCRIBER_H

#include "worker/sequences/batch.h"

struct cox_weights_subscriber;

/* control socket: where handles can be had that cannot be opened otherwise; NULL: nowhere. Copied.
 * Returns 0 or -ENOMEM. */
int cox_weights_subscriber_new(const char *control_socket,
                               struct cox_weights_subscriber **ret_weights);
/* NULL-safe, returns NULL. */
struct cox_weights_subscriber *cox_weights_subscriber_free(struct cox_weights_subscriber *weights);

/* The version that is present; 0: none yet. */
uint64_t cox_weights_subscriber_version(const struct cox_weights_subscriber *weights);

/* The image of a version: present, next, or of the candidate (NULL: none), which makes it next, or
 * present under this number. Returns 0; COX_STALE: older than what is present; COX_NOT_FOUND: the
 * rank does not have it, and the candidate is of another version, or closed by now; COX_DENIED: the
 * memory is not sealed, or cannot be reached; COX_CORRUPT: another size; what cox_handle_open
 * returns. err says which version; nothing has changed. */
int cox_weights_subscriber_take(struct cox_weights_subscriber *weights, uint64_t version,
                                const struct cox_weights_candidate *candidate, uint64_t deadline_ns,
                                const void **ret_bytes, uint64_t *ret_size, struct cox_error *err);

/* Nothing computes with present any more: next takes its place. Nothing, where there is no next. */
void cox_weights_subscriber_commit(struct cox_weights_subscriber *weights);

#endif
