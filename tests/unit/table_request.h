/*
 * table_request: ExecuteModelRequests for tests, both forms. Memory comes from one static buffer
 * that request_reset forgets, so that building a request allocates nothing.
 */
#ifndef COX_TESTS_UNIT_TABLE_REQUEST_H
#define COX_TESTS_UNIT_TABLE_REQUEST_H

#include "proto/executor.pb-c.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef Coxswain__ExecuteModelRequest Request;
typedef Coxswain__StepDelta Step;
typedef Coxswain__StepSequence StepSequence;
typedef Coxswain__SequenceGroupMetadata Metadata;
typedef Coxswain__SamplingParams SamplingParams;

/* Items of any column of a request, at most. */
#define REQUEST_COLUMN_MAX 4200

void request_reset(void);
void *request_take(size_t size); /* zeroed */

Request *request_new(uint32_t forward_type);
void request_swap_in(Request *request, int32_t from, int32_t to);
void request_swap_out(Request *request, int32_t from, int32_t to);
void request_copy(Request *request, int32_t from, int32_t to);

/* The packed form: request->step with empty columns. */
Request *packed_new(uint32_t forward_type, uint64_t base);
void packed_finish(Request *request, uint32_t slot);
StepSequence *packed_announce(Request *request, uint32_t slot, int64_t id, const int32_t *tokens,
                              size_t token_count);
void packed_table(StepSequence *sequence, const int32_t *blocks, size_t block_count);
void packed_append(Request *request, uint32_t slot, int32_t block, uint32_t table);
void packed_token(Request *request, uint32_t slot, int32_t token);
/* Returns the index of the row. */
uint32_t packed_row(Request *request, uint32_t slot, uint32_t position, uint32_t token_count);
void packed_silent(Request *request, uint32_t row);

/* The nested form. */
Metadata *nested_add(Request *request, const char *request_id, int64_t id, bool is_prompt);
ProtobufCBinaryData nested_bytes(const int32_t *values, size_t count);
ProtobufCBinaryData nested_ids(const int64_t *ids, size_t count);
void nested_table(Metadata *metadata, const int32_t *blocks, size_t block_count);
void nested_split(Metadata *metadata, int32_t start, int32_t end, bool last);
void nested_finish(Request *request, const char *request_id);

#endif
