/*
 * message: encodes a step of the batcher as protobuf, and decodes the tokens of its reply.
 *
 * There are two forms: packed columns that refer to the ranks' sequence tables, and the nested
 * SequenceGroupMetadata of legacy workers. Structs and columns are allocated once and reused for
 * every step.
 *
 * Threads: one thread fills; another may read at the same time.
 * Ownership: the message that fill returns is lent until the next fill, and points into the
 *   batcher's step.
 * Blocks: nothing. Allocates in new, and in fill when a nested step is larger than any before.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_ENGINE_MESSAGE_H
#define COX_ENGINE_MESSAGE_H

#include "batcher.h"

struct cox_step_message;
struct cox_weights_announcement;
struct Coxswain__ExecuteRequest;
struct Coxswain__ExecuteResponse;

/* Returns 0 or -ENOMEM. */
int cox_step_message_new(uint32_t row_count_max, bool nested,
                         struct cox_step_message **ret_message);
struct cox_step_message *cox_step_message_free(struct cox_step_message *message); /* NULL-safe */

/* Returns
 *   0: the request is lent
 *   -ENOMEM
 */
int cox_step_message_fill(struct cox_step_message *message, const struct cox_step *step,
                          const struct Coxswain__ExecuteRequest **ret_request);

/* Sets the weights version of every request from now on; with offered, also the handle that ranks
 * find it by. NULL: no version, as initially. Copied. */
void cox_step_message_weights(struct cox_step_message *message,
                              const struct cox_weights_announcement *announcement, bool offered);

/* Decodes the reply of a step that ran under the number `sequence`: one token per row, -1 where the
 * row emits none, and whether and how the worker ended the sequence.
 * Returns
 *   0
 *   COX_CORRUPT: not the reply of this step, err says why
 *   COX_UNSUPPORTED: several tokens for one sequence
 */
int cox_step_message_read(const struct cox_step_message *message, const struct cox_step *step,
                          uint64_t sequence, const struct Coxswain__ExecuteResponse *response,
                          int32_t *ret_tokens, struct cox_row_end *ret_ends, struct cox_error *err);

#endif
