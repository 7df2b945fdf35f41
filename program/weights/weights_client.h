/*
 * weights_client: asks this user's holder of weights (protocol.h).
 *
 * Threads: any.
 * Ownership: results are the caller's.
 * Blocks: until the deadline.
 * If the process dies: nothing is left.
 */
#ifndef COX_PROGRAM_WEIGHTS_CLIENT_H
#define COX_PROGRAM_WEIGHTS_CLIENT_H

#include <coxswain/base.h>

#include <jansson.h>

/* The holder's list. Returns
 *   0
 *   COX_NOT_FOUND: this user has no holder
 *   COX_TIMEOUT, COX_CLOSED, COX_DENIED, COX_CORRUPT, COX_INVALID
 *   -errno
 */
int cox_weights_list(uint64_t deadline_ns, json_t **ret_list, struct cox_error *err);
/* Drops the weights of a key; "": all. Without a holder there are none. Returns as cox_weights_list,
 * and COX_INVALID: the key has more bytes than COX_WEIGHTS_KEY_SIZE. */
int cox_weights_drop(const char *key, uint64_t deadline_ns, uint64_t *ret_count,
                     struct cox_error *err);

#endif
