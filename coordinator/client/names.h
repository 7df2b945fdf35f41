/*
 * names: the groups of this user that run, by name.
 *
 * Threads: any.
 * Ownership: everything is the caller's.
 * Blocks: until every group found has accepted a connection, or the deadline has passed.
 * If the process dies: nothing is left.
 */
#ifndef COX_COORDINATOR_NAMES_H
#define COX_COORDINATOR_NAMES_H

#include "channel/base/base.h"

/* Calls each with the name of every group that runs. Returns 0, also where there is no runtime
 * directory; -errno; COX_INVALID, COX_TOO_LARGE: the directory's path. */
int cox_client_names(void (*each)(void *context, const char *name), void *context,
                     uint64_t deadline_ns, struct cox_error *err);

#endif
