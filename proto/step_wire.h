/*
 * step_wire: the two messages that go to and fro for every token, by hand.
 *
 * A request that carries a step as columns, nothing announced; a reply that carries its tokens,
 * or their digest alone. What is written is byte for byte what protobuf-c writes, and what is read
 * is the message that protobuf-c reads; everything else is left to it: a caller that gets
 * false asks protobuf-c. So neither side can tell which of the two packed or unpacked.
 *
 * A step of 16 rows takes 2.7 times the instructions when protobuf-c packs and unpacks it.
 * README.md has the figures.
 *
 * Threads: as wire.h.
 * Ownership: as wire.h.
 * Codes: true: done; false: not such a message, and nothing is done: nothing is written, nothing is
 * taken of the arena. If the process dies: as wire.h.
 */
#ifndef COX_PROTO_STEP_WIRE_H
#define COX_PROTO_STEP_WIRE_H

#include "wire.h"

/* Packs into buffer. Also false when buffer has no room for the longest numbers there are; all of
 * buffer may be written to. */
bool cox_step_wire_pack_request(const struct Coxswain__ExecuteRequest *request, uint8_t *buffer,
                                size_t buffer_size, size_t *ret_size);
bool cox_step_wire_pack_response(const struct Coxswain__ExecuteResponse *response, uint8_t *buffer,
                                 size_t buffer_size, size_t *ret_size);

/* The bytes must not change meanwhile. Also false when the arena is exhausted. */
bool cox_step_wire_unpack_request(struct cox_arena *arena, const uint8_t *bytes, size_t size,
                                  struct Coxswain__ExecuteRequest **ret_request);
bool cox_step_wire_unpack_response(struct cox_arena *arena, const uint8_t *bytes, size_t size,
                                   struct Coxswain__ExecuteResponse **ret_response);

#endif
