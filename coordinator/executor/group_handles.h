/*
 * group_handles: what an init of a sealed group says of the memory of the rank group: by-value
 * handles of the objects that each rank has sealed, so that only that rank can write them. Private
 * to the library.
 *
 * An object without the seals is not offered: its rank has not attached, or forms no rank group.
 * Once an object is exported, this process keeps no other fd of it.
 *
 * Threads: one at a time. The fds in `sealed` are under memory_lock of the executor, which fill
 *   takes.
 * Ownership: fill lends what it puts into the request, until the next fill or free.
 * Blocks: fill, for at most a second per object, while the group's control socket takes the fds.
 * If the process dies: the ranks end with it.
 */
#ifndef COX_COORDINATOR_GROUP_HANDLES_H
#define COX_COORDINATOR_GROUP_HANDLES_H

#include <coxswain/base.h>
#include "proto/executor.pb-c.h"

struct cox_executor;
struct cox_group_handles; /* executor->group_handles; NULL: nothing was sent yet */

/* group_memory of the request. Returns 0; -ENOMEM; what cox_exporter_new and cox_exporter_export
 * return. Does nothing where the group is not sealed. */
int cox_group_handles_fill(struct cox_executor *executor, Coxswain__ExecuteRequest *request,
                           struct cox_error *err);
/* NULL-safe, returns NULL. */
struct cox_group_handles *cox_group_handles_free(struct cox_group_handles *handles);

#endif
