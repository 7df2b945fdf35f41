/*
 * forward: the far side of a transport (coordinator/transport/transport.h, which declares its
 * functions for requests). Here are those for the memory of the rank group in an executor that has
 * some of the ranks only, for a mirror (worker/group/group_mirror.h). In a sealed group each rank
 * has its own: that of a rank of another machine, whose words the mirror writes, stays mapped for
 * writing here and is sealed like the others; that of a rank here is mapped for reading.
 *
 * Threads: take under the submit lock of the execute channel; the window on any, after it.
 * Ownership: the executor owns it.
 * Blocks: nothing.
 */
#ifndef COX_COORDINATOR_FORWARD_H
#define COX_COORDINATOR_FORWARD_H

#include "channel/attach/sealed/sealed.h"

struct cox_executor;

struct cox_mirror_memory {
    struct cox_region parts[COX_RANK_COUNT_MAX][COX_ATTACH_MEMBER_FD_COUNT];
};

/* Before an init: maps what is new since the last one. Does nothing where it is not needed. Returns
 * 0 or -errno. */
int cox_mirror_memory_take(struct cox_executor *executor, struct cox_error *err);
struct cox_mirror_memory *cox_mirror_memory_free(struct cox_mirror_memory *memory); /* NULL-safe */

#endif
