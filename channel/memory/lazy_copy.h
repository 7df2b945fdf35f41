/*
 * lazy_copy: a private copy of a payload, which costs nothing until somebody writes: a page is
 * copied when the copy is written to, and the rest when the copy is completed.
 *
 *   new, or again -> read and write -> [complete] -> free
 *
 * The payload must not change between new and complete. What is written to it later is not seen by
 * a copy that is complete, and may be seen by another one. A copy that is freed and not complete
 * stays mapped for its owner, who gets it `again` for the next message in the same memory: to map
 * and unmap the pages of a payload takes longer than to copy it where caches are large.
 *
 * Private to the library.
 * Threads: any. Others may read and write the copy while it is completed.
 * Ownership: the copy is the caller's; the fd stays the caller's, and may be closed after new.
 * Blocks: while pages are copied, and while another thread's are.
 * A fork completes all copies that are in use, so the child's are its own (pthread_atfork).
 * If the process dies: nothing is left.
 */
#ifndef COX_CHANNEL_LAZY_COPY_H
#define COX_CHANNEL_LAZY_COPY_H

#include <stddef.h>

/* size: above 0, of the whole file, which cannot shrink. used: how many of its bytes are of use.
 * owner: for again and forget.
 * Returns:
 *   0
 *   COX_NO_SPACE: no memory for the mapping
 *   -errno */
int cox_lazy_copy_new(int fd, size_t size, size_t used, const void *owner, void **ret_bytes);
/* A copy that this owner's caller has freed, with what the file has now. NULL: there is none. */
void *cox_lazy_copy_again(size_t used, const void *owner);
/* Copies the pages that are still the file's. Idempotent.
 * Returns:
 *   0
 *   COX_NO_SPACE: no memory for them: some may be copied */
int cox_lazy_copy_complete(void *bytes);
/* NULL: nothing. */
void cox_lazy_copy_free(void *bytes);
/* The owner has another file, or ends: what is freed is unmapped, now or when it is freed. */
void cox_lazy_copy_forget(const void *owner);

#endif
