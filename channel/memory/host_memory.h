/*
 * host_memory: checks before memory of the host is allocated, or mapped from another process's fd.
 *
 * Private to the library.
 * Threads: any. Ownership: nothing is kept.
 * Blocks: on reading /proc.
 * If the process dies: nothing is left.
 */
#ifndef COX_CHANNEL_HOST_MEMORY_H
#define COX_CHANNEL_HOST_MEMORY_H

#include <coxswain/base.h>

/* Checks that the host has this much free memory, before it is allocated. The kernel overcommits:
 * without the check it may later kill this or another process. on_demand: the size is only
 * reserved, and pages are allocated when they are touched.
 * Returns
 *   0
 *   COX_INVALID: 0 bytes
 *   COX_NO_SPACE: err has the needed and the free size
 *   -errno
 */
int cox_host_memory_check_size(uint64_t size, bool on_demand, struct cox_error *err);
/* The last of these checks alone: that size bytes are free. */
int cox_host_memory_check_free(uint64_t size, struct cox_error *err);
/* Checks that fd is memory of this user that can neither shrink nor grow, of at least size bytes,
 * and writable if asked.
 * Returns:
 *   0
 *   COX_INVALID: 0 bytes
 *   COX_DENIED: not such memory
 *   COX_CORRUPT: too small
 *   -errno */
int cox_host_memory_check_fd(int fd, uint64_t size, bool writable, struct cox_error *err);

#endif
