/*
 * large_payload_ref: the reference to a block of bytes (channel/memory/large_payload.h) as a
 * message.
 *
 * Private to the library.
 * Threads: any; no state.
 * Ownership: see fill.
 * Blocks: nothing.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_PROTO_LARGE_PAYLOAD_REF_H
#define COX_PROTO_LARGE_PAYLOAD_REF_H

#include "channel/memory/large_payload.h"

struct Coxswain__LargePayloadRef;

/* The message's handle is ref's, lent. */
void cox_large_payload_ref_fill(struct Coxswain__LargePayloadRef *message,
                                struct cox_large_payload_ref *ref);
/* The message is a stranger's. Returns 0 or COX_CORRUPT. */
int cox_large_payload_ref_read(const struct Coxswain__LargePayloadRef *message,
                               struct cox_large_payload_ref *ret_ref, struct cox_error *err);

#endif
