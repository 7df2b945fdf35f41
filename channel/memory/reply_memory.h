/*
 * reply_memory: the private memory that large replies are copied to. Fresh pages cost more than the
 * copy into them, so what is freed is kept for the next reply of about the same size: at most
 * COX_REPLY_MEMORY_COUNT buffers below a huge page in a process, from COX_REPLY_MEMORY_SIZE_MIN on,
 * as many above, up to COX_LARGE_PAYLOAD_KEEP_SIZE, and only while it has a group.
 *
 * A host may take such memory, and free it after the group has ended (cox_executor_take_reply).
 * That is why it belongs to the process. It is of malloc: free frees it, and keeps nothing.
 *
 * Private to the library.
 * Threads: any. Blocks: no. In the child of a fork: as malloc and free.
 */
#ifndef COX_CHANNEL_REPLY_MEMORY_H
#define COX_CHANNEL_REPLY_MEMORY_H

#include <stddef.h>
#include <stdint.h>

#define COX_REPLY_MEMORY_COUNT 8
/* From here on malloc maps memory for each buffer, whose pages are new. */
#define COX_REPLY_MEMORY_SIZE_MIN ((size_t)128 << 10)
#define COX_REPLY_MEMORY_ALIGNMENT ((size_t)64)

/* A group begins, or ends: after the last one nothing is kept. */
void cox_reply_memory_begin(void);
void cox_reply_memory_end(void);

/* NULL: no memory. Its content is undefined. From COX_REPLY_MEMORY_SIZE_MIN on at a multiple of
 * COX_REPLY_MEMORY_ALIGNMENT. */
uint8_t *cox_reply_memory_alloc(size_t size);
/* Of alloc; NULL: nothing. */
void cox_reply_memory_free(uint8_t *bytes);

#endif
