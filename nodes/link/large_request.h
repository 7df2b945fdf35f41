/*
 * large_request: the bytes of a request that is too large for NATS, at the lead: one copy for all
 * nodes, however often it is sent. Connections send it while it is still being copied.
 *
 * Threads: any; one fills.
 * Ownership: counted references. new gives one.
 * Blocks: await, until the thread that fills has copied more, which waits for nobody.
 */
#ifndef COX_NODES_LARGE_REQUEST_H
#define COX_NODES_LARGE_REQUEST_H

#include <stddef.h>
#include <stdint.h>

struct cox_large_request;

/* Memory for size bytes, more than 0, which fill copies. NULL: no memory. */
struct cox_large_request *cox_large_request_new(size_t size);
struct cox_large_request *cox_large_request_ref(struct cox_large_request *request);
/* NULL-safe, returns NULL. */
struct cox_large_request *cox_large_request_unref(struct cox_large_request *request);
/* Copies the bytes of the request, once: a reference that waits must get them all. */
void cox_large_request_fill(struct cox_large_request *request, const void *bytes);

/* How many references there are, for tests. */
uint32_t cox_large_request_references(const struct cox_large_request *request);
/* Lent with the reference. As many of them as await has returned may be read. */
const uint8_t *cox_large_request_bytes(const struct cox_large_request *request);
size_t cox_large_request_size(const struct cox_large_request *request);
/* How many bytes are there: more than `done`, which is less than the size. context: the request, as
 * in struct cox_direct_message. */
size_t cox_large_request_await(void *context, size_t done);

#endif
