/*
 * windows: the memory of the rank group (coxswain/group.h) in a named group: one object with a
 * ring of windows. Each time the ranks form their group, they use the next window. All ranks write
 * to it: this form is for processes that trust each other. Sealed groups have separate memory per
 * rank (sealed.h).
 *
 * A rank that died, or a process that it left behind, may go on writing to the window it had
 * mapped. So the next incarnation of the rank group uses another window, all zero, and the same one
 * only after COX_GROUP_WINDOW_COUNT incarnations. Incarnation n is in window n modulo that count.
 * The first incarnation is 1; a group without incarnations uses incarnation 0.
 *
 * Only the window in use takes memory, and during a change both do, because a rank that is still
 * leaving the former one writes there. All other windows are holes; writes to them are discarded
 * when the next incarnation begins.
 *
 * Threads: the coordinator's, one at a time per object. It never maps a window.
 * Ownership: fds are the caller's.
 * Blocks: nothing.
 * If the process dies: the object is removed like any other region. A half renewed window does no
 *   harm, since the ranks are killed with their coordinator.
 */
#ifndef COX_CHANNEL_WINDOWS_H
#define COX_CHANNEL_WINDOWS_H

#include "channel/shm/geometry.h"

/* Creates the object `/<name>_group` and reserves the window of the first incarnation. Returns as
 * cox_region_create. On failure nothing is left. */
int cox_windows_create_named(const char *name, const struct cox_geometry *geometry,
                             struct cox_error *err);

/* Zeroes and reserves the window of this incarnation. Returns 0; COX_NO_SPACE: err has the numbers;
 * -errno. On failure the ranks must not use it. */
int cox_windows_renew(int fd, const struct cox_geometry *geometry, uint64_t incarnation,
                      struct cox_error *err);
/* Releases the memory of all windows but that of this incarnation, once every rank uses that one or
 * is dead. Returns 0 or -errno: some still take memory. */
int cox_windows_keep(int fd, const struct cox_geometry *geometry, uint64_t incarnation);

#endif
