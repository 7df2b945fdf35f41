/* wire_fixture: an arena for each test, and messages with every field set. */
#ifndef COX_TESTS_WIRE_FIXTURE_H
#define COX_TESTS_WIRE_FIXTURE_H

#include "proto/wire.h"
#include "proto/executor.pb-c.h"
#include "tests/lib/test.h"

typedef struct Coxswain__ExecuteRequest Request;
typedef struct Coxswain__ExecuteResponse Response;

#define LENGTH(array) (sizeof(array) / sizeof(array)[0])
#define CAP ((size_t)8 << 20)

/* ---- messages with every field set ---- */

size_t scalar_size(ProtobufCType type);

Request *full_request(struct cox_arena *arena, unsigned chosen);

Response *full_response(struct cox_arena *arena, unsigned chosen);

/* The oneof's field numbers. */
#define REQUEST_FIRST 3
#define REQUEST_LAST 11
#define RESPONSE_FIRST 4
#define RESPONSE_LAST 11

extern uint8_t frame[1 << 17];
extern uint8_t frame_again[1 << 17];

int pack_any(const ProtobufCMessage *message, uint8_t *bytes, size_t size_max, size_t *ret_size);

int unpack_any(struct cox_arena *arena, bool is_request, const uint8_t *bytes, size_t size,
               ProtobufCMessage **ret_message);

/* Of the requests, then of the responses; pack_kind fills frame with a full message of the kind. */
#define KIND_COUNT (REQUEST_LAST - REQUEST_FIRST + 1 + RESPONSE_LAST - RESPONSE_FIRST + 1)

ProtobufCMessage *full_kind(struct cox_arena *arena, unsigned kind, bool *ret_is_request);

size_t pack_kind(struct cox_arena *arena, unsigned kind, bool *ret_is_request);

/* ---- the small functions ---- */

int arena_new(void **state);

int arena_free(void **state);

#define ARENA_TEST(name) TEST_WITH(name, arena_new, arena_free)

#endif
