/*
 * bulk_ref: the reference to a block of bytes (channel/memory/bulk.h) as a message.
 *
 * Private to the library.
 * Threads: any; no state.
 * Ownership: see fill.
 * Blocks: nothing.
 * If the process dies: private memory; nothing is left.
 */
#ifndef COX_PROTO_BULK_REF_H
#define COX_PROTO_BULK_REF_H

#include "channel/memory/bulk.h"

struct Coxswain__BulkRef;

/* The message's handle is ref's, lent. */
void cox_bulk_ref_fill(struct Coxswain__BulkRef *message, struct cox_bulk_ref *ref);
/* The message is a stranger's. Returns 0 or COX_CORRUPT. */
int cox_bulk_ref_read(const struct Coxswain__BulkRef *message, struct cox_bulk_ref *ret_ref,
                      struct cox_error *err);

#endif
