/*
 * message: a step of the batcher as protobuf, and the tokens out of its reply.
 *
 * Two forms: packed columns against the ranks' sequence tables, and the nested
 * SequenceGroupMetadata of legacy workers. The structs and columns are made once and used again for
 * every step.
 *
 * Threads: fill by one thread; read by another one, also meanwhile.
 * Ownership: the message fill gives is lent until the next fill, and points into the batcher's
 * step. Blocks: nothing. Allocates in new, and in fill when a nested step is larger than all before
 * it. If the process dies: private memory; nothing is left.
 */
#ifndef COX_COORDINATOR_MESSAGE_H
#define COX_COORDINATOR_MESSAGE_H

#include "batcher.h"

struct cox_message;
struct cox_weights_told;
struct Coxswain__ExecuteRequest;
struct Coxswain__ExecuteResponse;

/* Returns 0 or -ENOMEM. */
int cox_message_new(uint32_t row_count_max, bool nested, struct cox_message **ret_message);
struct cox_message *cox_message_free(struct cox_message *message); /* NULL-safe */

/* Returns 0 and lends the request; -ENOMEM. */
int cox_message_fill(struct cox_message *message, const struct cox_step *step,
                     const struct Coxswain__ExecuteRequest **ret_request);

/* The version of the weights in every request from now on, and, where offered, where that is; told
 * NULL: none, as at the start. Copied. */
void cox_message_weights(struct cox_message *message, const struct cox_weights_told *told,
                         bool offered);

/* Reads the reply of a step, which ran as number `sequence`: one token per row, -1
 * where the row emits none, and whether the worker ended the sequence. Returns 0; COX_CORRUPT: not
 * the reply of this step, err says why; COX_UNSUPPORTED: several tokens for one sequence. */
int cox_message_read(const struct cox_message *message, const struct cox_step *step,
                     uint64_t sequence, const struct Coxswain__ExecuteResponse *response,
                     int32_t *ret_tokens, uint8_t *ret_ended, struct cox_error *err);

#endif
