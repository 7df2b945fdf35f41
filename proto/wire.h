/*
 * wire: packs protobuf messages into frames, and unpacks them.
 *
 * Packing writes directly into shared memory; unpacking takes its memory from an arena. So neither
 * side allocates in the steady state.
 *
 * Threads: an arena belongs to one thread at a time; everything else is stateless.
 * Ownership: an unpacked message is in its arena until cox_arena_reset or cox_arena_deinit; it is
 *   never freed separately. String and bytes fields are copies, they do not point into the frame.
 * Blocks: nothing.
 * Codes: COX_TOO_LARGE (pack: the message does not fit; unpack: it exceeds the arena's cap, or
 *   there is no memory), COX_CORRUPT (the bytes are no such message).
 * If the process dies: arenas are private memory; a half-packed frame was never published.
 */
#ifndef COX_PROTO_WIRE_H
#define COX_PROTO_WIRE_H

#include <coxswain/base.h>

struct Coxswain__ExecuteRequest;
struct Coxswain__ExecuteResponse;
struct CoxswainControl__ControlRequest;
struct CoxswainControl__ControlReply;

/* Frees all allocations at once. If they needed several blocks, these are merged into one of the
 * whole size. So a steady load ends up with one block and does not allocate any more. */
void cox_arena_reset(struct cox_arena *arena);

/* Size of the packed message in bytes. */
size_t cox_wire_request_size(const struct Coxswain__ExecuteRequest *request);
size_t cox_wire_response_size(const struct Coxswain__ExecuteResponse *response);

/* Packs into buffer. Nothing is written when it does not fit.
 * Returns
 *   0
 *   COX_TOO_LARGE: it does not fit; *ret_size is untouched
 */
int cox_wire_request_pack(const struct Coxswain__ExecuteRequest *request, void *buffer,
                          size_t buffer_size, size_t *ret_size);
int cox_wire_response_pack(const struct Coxswain__ExecuteResponse *response, void *buffer,
                           size_t buffer_size, size_t *ret_size);

/* Unpacks size bytes. The bytes must not change meanwhile: memory that another process can write is
 * copied first.
 * Returns
 *   0
 *   COX_CORRUPT
 *   COX_TOO_LARGE
 */
int cox_wire_request_unpack(struct cox_arena *arena, const void *bytes, size_t size,
                            struct Coxswain__ExecuteRequest **ret_request);
int cox_wire_response_unpack(struct cox_arena *arena, const void *bytes, size_t size,
                             struct Coxswain__ExecuteResponse **ret_response);

/* The same for control.proto. */
int cox_wire_control_request_unpack(struct cox_arena *arena, const void *bytes, size_t size,
                                    struct CoxswainControl__ControlRequest **ret_request);
int cox_wire_control_reply_unpack(struct cox_arena *arena, const void *bytes, size_t size,
                                  struct CoxswainControl__ControlReply **ret_reply);

/* "MODEL_INFER" and so on; "unknown" for anything else. */
const char *cox_wire_type_name(uint32_t execute_type);

#endif
