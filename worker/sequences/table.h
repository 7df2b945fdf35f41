/*
 * table: the sequences a rank knows, and how a step on the wire becomes a batch.
 *
 * A sequence is announced once in full; after that a step carries only what changed (StepDelta).
 * The table builds the same struct cox_batch from both forms: packed columns, and the nested
 * SequenceGroupMetadata of legacy coordinators. It moves only when a step succeeded: apply
 * prepares, then exactly one of commit or revert follows.
 *
 * Threads: one thread (the execute channel's).
 * Ownership: a batch is lent until commit or revert. The table owns its memory, which grows to a
 *   high-water mark.
 * Blocks: nothing; allocates only when a high-water mark is passed.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_WORKER_TABLE_H
#define COX_WORKER_TABLE_H

#include "step_digest.h"

#include <coxswain/worker.h>

struct cox_table;
struct cox_adapter_references;
struct Coxswain__ExecuteModelRequest;
struct Coxswain__TGCleanupRequest;

/* 24 bits keep the index below 2^26 cells; a token takes 4 bytes, so that no size overflows. */
#define COX_TABLE_SEQUENCE_COUNT_LIMIT (UINT32_C(1) << 24)
#define COX_TABLE_TOKEN_COUNT_LIMIT ((uint32_t)INT32_MAX)

/* Limits: live sequences, and tokens per sequence; a step beyond them is refused with
 * COX_TOO_LARGE. Returns 0; COX_INVALID: a limit is 0 or too large; -ENOMEM. */
int cox_table_new(uint32_t sequence_count_max, uint32_t token_count_max,
                  struct cox_table **ret_table);
struct cox_table *cox_table_free(struct cox_table *table);

/* Sets two words (each an _Atomic uint64_t), with which the sequence of a batch is compared. NULL,
 * the initial value: none.
 *   void_word: in shared memory; cox_batch_cancelled, which is implemented here, says of steps up
 *     to it that they are cancelled
 *   cancel_word: of a pause (pause.h); a callback for a step up to it should return */
void cox_table_watch(struct cox_table *table, const void *void_word, const void *cancel_word);

/* Prepares the step `sequence`. The request must stay until commit or revert. Nothing is changed
 * unless 0 is returned. *ret_batch and *ret_outputs (row_count of them, tokens set to -1) are lent.
 * Returns 0;
 *   COX_STALE: the delta builds on a base the table does not have;
 *   COX_CORRUPT: columns of unequal length, an unknown slot, a position outside its sequence, a
 * byte field that is no int64 array, ...: err says which; COX_TOO_LARGE: over the limits; -ENOMEM.
 */
int cox_table_apply(struct cox_table *table, uint64_t sequence,
                    const struct Coxswain__ExecuteModelRequest *request,
                    const struct cox_batch **ret_batch, struct cox_batch_output **ret_outputs,
                    struct cox_error *err);
/* Sets cox_batch.weights_version and .weights of the step just prepared; without this call they are
 * 0 and NULL. candidate is lent until commit or revert. */
void cox_table_weights(struct cox_table *table, uint64_t version,
                       const struct cox_weights_candidate *candidate);
/* Sets a digest of the step just prepared in place of the table's own, as
 * cox_worker_set_digest (worker.h) says. */
void cox_table_set_digest(struct cox_table *table, enum cox_digest which, uint64_t value);
/* The step succeeded: appends sampled tokens, removes finished sequences, and sets base to its
 * sequence. */
void cox_table_commit(struct cox_table *table);
/* The step failed: restores the table. */
void cox_table_revert(struct cox_table *table);

/* The last step that was committed; 0: none. */
uint64_t cox_table_base(const struct cox_table *table);
/* What the committed steps were (step_digest.h): COX_STEP_CHAIN_SIZE numbers, lent until the next
 * commit. */
const uint64_t *cox_table_chain(const struct cox_table *table);

/* Drops sequences by id, unknown ids are ignored. *ret_slots (count of them) is lent until the next
 * call. The base does not change: a cleanup arrives in order with the steps. */
void cox_table_cleanup(struct cox_table *table, const int64_t *seq_ids, size_t id_count,
                       const uint32_t **ret_slots, uint32_t *ret_count);
/* Drops everything; base is 0. */
void cox_table_clear(struct cox_table *table);
/* The adapters of its sequences; lent until free. For other threads than the table's, as
 * adapter_references.h says. */
struct cox_adapter_references *cox_table_adapter_references(const struct cox_table *table);

#endif
