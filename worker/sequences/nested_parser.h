/*
 * nested_parser: SequenceGroupMetadata of legacy coordinators, read into a sequence store and a
 * batch builder.
 *
 * Bytes of a request are hostile input: every index and length is checked here, and no memory is
 * taken beyond what the request itself is long. A failure leaves the sequence store half changed;
 * the caller reverts it.
 *
 * Threads: one.
 * Ownership: the request is only read, nothing keeps a pointer into it.
 * Codes: those of cox_table_apply, err says which entry and field.
 */
#ifndef COX_WORKER_NESTED_PARSER_H
#define COX_WORKER_NESTED_PARSER_H

#include "batch_builder.h"

struct Coxswain__ExecuteModelRequest;

/* finished_requests_ids go first, then the list in its order. Each id of seqIds is a prompt or
 * decodes: is_req_prefill says which, where present, else is_prompt. is_req_prefill,
 * is_req_last_chunk and the split have an entry for each id, or one for all; tokens too, where
 * prompt_lens counts them. A prompt (re)announces the id with its tokens, in the slot it has or
 * the lowest free one. The row computes [split_start_pos, split_end_pos) where given, else
 * everything; it emits unless is_req_last_chunk is false. Tokens that are just as many as the
 * split, which begins behind 0, are those of the chunk alone, and follow what earlier chunks have
 * told (COX_STALE where that is less); so do tokens without a split where is_prompt is false. An
 * id that decodes: the row computes the last known token and emits. block_tables replace all
 * tables where present. An unknown id is COX_STALE. last_sampled_token_ids, when it has one entry
 * for each such row, overrules the last token where that was not announced; entries below 0 say
 * nothing. The batch has as many tables as the row with the most. */
int cox_nested_parser_apply(struct cox_sequence_store *store, struct cox_batch_builder *builder,
                            const struct Coxswain__ExecuteModelRequest *request,
                            struct cox_error *err);

#endif
