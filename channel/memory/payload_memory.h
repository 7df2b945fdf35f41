/*
 * payload_memory: memory that a large payload is received into, and that other processes then map:
 * a memfd to which this process alone can write. Fresh pages cost more than what is written to
 * them, so what was released last is kept for the next payloads.
 *
 *   take -> write -> finish -> [ref, unref] -> unref
 *
 * The next payload overwrites the bytes. Whoever has given the fd to other processes keeps a
 * reference until none of them reads through it any more.
 *
 * Private to the library.
 * Threads: any; one at a time writes and finishes.
 * Ownership: take gives a reference. The last unref gives the memory back to its pool.
 * Blocks: while pages are allocated or freed.
 * If the process dies: what others have mapped stays valid; the kernel frees the rest.
 */
#ifndef COX_CHANNEL_PAYLOAD_MEMORY_H
#define COX_CHANNEL_PAYLOAD_MEMORY_H

#include <coxswain/base.h>

#include <pthread.h>

/* A pool keeps as much, of what was released last; nothing that is larger. */
#define COX_PAYLOAD_MEMORY_KEEP_SIZE (UINT64_C(256) << 20)
/* Until there was no payload for so long. */
#define COX_PAYLOAD_MEMORY_KEEP_NS (UINT64_C(10) * 1000 * 1000 * 1000)

struct cox_payload_memory;

struct cox_payload_memory_pool {
    pthread_mutex_t lock;
    /* under the lock: what was released last comes first */
    struct cox_payload_memory *kept;
    uint64_t used_ns;
};

void cox_payload_memory_pool_init(struct cox_payload_memory_pool *pool);
/* All that was taken is released. */
void cox_payload_memory_pool_deinit(struct cox_payload_memory_pool *pool);
/* Frees what is kept, COX_PAYLOAD_MEMORY_KEEP_NS after the last payload. */
void cox_payload_memory_pool_expire(struct cox_payload_memory_pool *pool, uint64_t now_ns);

/* Memory of at least size bytes: of what is kept and at most twice as large, or new, of which no
 * page is allocated.
 * Returns
 *   0
 *   COX_NO_SPACE
 *   as cox_region_create_unnamed
 */
int cox_payload_memory_take(struct cox_payload_memory_pool *pool, uint64_t size,
                            struct cox_payload_memory **ret_memory, struct cox_error *err);
/* Where the payload is to be written. NULL: the memory is new, and fill writes to it. */
uint8_t *cox_payload_memory_bytes(struct cox_payload_memory *memory);
/* Of new memory: allocates and writes pages in calls that neither clear nor fault them. Returns 0,
 * COX_NO_SPACE or -errno. */
int cox_payload_memory_fill(struct cox_payload_memory *memory, uint64_t offset, const void *bytes,
                            uint64_t size, struct cox_error *err);
/* The payload is written, and others may map it. Returns 0 or -errno. */
int cox_payload_memory_finish(struct cox_payload_memory *memory, struct cox_error *err);
/* Finished memory, open for reading only; lent. It cannot shrink. */
int cox_payload_memory_fd(const struct cox_payload_memory *memory);
/* Returns memory. */
struct cox_payload_memory *cox_payload_memory_ref(struct cox_payload_memory *memory);
/* NULL-safe, returns NULL. What is not finished is freed. */
struct cox_payload_memory *cox_payload_memory_unref(struct cox_payload_memory *memory);

#endif
