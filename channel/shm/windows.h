/*
 * windows: the memory of the rank group (worker/group/group.h) of a group that has names: one
 * object, a ring of windows, of which each time that the ranks form their group anew has another
 * one. All ranks write it: this form is for processes that trust each other. Sealed groups have
 * none of it (sealed.h).
 *
 * A rank that died, or a process that it left behind, may go on writing into what it had mapped. So
 * the next life of the rank group is in another window, all zero, and only after
 * COX_GROUP_WINDOW_COUNT lives in the same. Life n is in window n modulo that count; the first life
 * is 1. Who counts no lives is in life 0.
 *
 * Only the window in use takes memory, and, while the ranks go from one to the next, both: a rank
 * that still leaves the former one writes there. Others are holes; what somebody writes there all
 * the same is thrown away when the next life begins.
 *
 * Threads: the coordinator's, one at a time per object. It never maps a window.
 * Ownership: fds are the caller's.
 * Blocks: nothing.
 * If the process dies: the object goes as that of any region does; a window that is half renewed is
 *   renewed by nobody, since the ranks are killed with their coordinator.
 */
#ifndef COX_CHANNEL_WINDOWS_H
#define COX_CHANNEL_WINDOWS_H

#include "geometry.h"

/* The object `/<name>_group`; the window of the first life is reserved. Returns 0; as
 * cox_region_create. Nothing is left unless 0. */
int cox_windows_create_named(const char *name, const struct cox_geometry *geometry,
                             struct cox_error *err);

/* The window of this life is all zero and reserved. Returns 0; COX_NO_SPACE: err has the numbers;
 * -errno. Unless 0 the ranks must not be sent there. */
int cox_windows_renew(int fd, const struct cox_geometry *geometry, uint64_t life,
                      struct cox_error *err);
/* Every rank is in the window of this life, or dead: the others take no memory any more. Returns 0
 * or -errno: some still do. */
int cox_windows_keep(int fd, const struct cox_geometry *geometry, uint64_t life);

#endif
