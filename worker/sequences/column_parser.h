/*
 * column_parser: the columns of a step on the wire, read into a sequence store and a batch builder.
 *
 * Bytes of a request are hostile input: every index and length is checked here, and no memory is
 * taken beyond what the request itself is long. A failure leaves the sequence store half changed;
 * the caller reverts it.
 *
 * Threads: one.
 * Ownership: the request is only read, nothing keeps a pointer into it.
 * Codes: those of cox_table_apply, err says which column and index.
 */
#ifndef COX_WORKER_COLUMN_PARSER_H
#define COX_WORKER_COLUMN_PARSER_H

#include "batch_builder.h"

struct Coxswain__StepDelta;

/* Columns against the store. The base was checked by the caller; 0 empties the sequence store
 * first, and what `finished` names is gone with the rest. */
int cox_column_parser_apply(struct cox_sequence_store *store, struct cox_batch_builder *builder,
                            const struct Coxswain__StepDelta *step, struct cox_error *err);

#endif
