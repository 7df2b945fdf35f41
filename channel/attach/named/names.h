/*
 * names: the names of a group in /dev/shm, from the first, that of the control region, to the last.
 *
 * The coordinator creates the control region first and removes it last. Until it is named it is an
 * unnamed file that is already complete and locked, so no process sees it half made. The lock
 * (flock) lives as long as the coordinator, and distinguishes a live group from the leftovers of a
 * dead one.
 *
 * Threads: create, attach and unlink on one thread; sweep: any.
 * Ownership: the caller owns struct cox_control.
 * Blocks: create and sweep, while another process sweeps the same name, at most 2 s.
 * If the process dies: the name stays, unlocked. The next start under it, or a sweep, removes it
 *   and all names of its group.
 */
#ifndef COX_CHANNEL_ATTACH_NAMES_H
#define COX_CHANNEL_ATTACH_NAMES_H

#include "channel/shm/control.h"

/* Creates the region. Leftovers of a dead group under this name (their lock is free) are removed
 * first.
 * Returns
 *   0
 *   COX_TAKEN: a live group has the name, err says which process
 *   COX_DENIED: another kind of object has the name
 *   COX_NO_SPACE
 *   -errno
 */
int cox_control_create(struct cox_control *control, const char *name,
                       const struct cox_geometry *geometry, struct cox_error *err);
/* Removes the leftovers of a dead group under this name, once it holds the lock of their control
 * region: a live group is never touched, and of two sweepers one wins. *ret_count: names removed.
 * Objects of another user stay.
 * Returns
 *   0
 *   COX_TAKEN: the group lives, err says in which process
 *   COX_BUSY: it is dead, but another process holds its lock, most likely to sweep as well, or its
 *     process is just ending
 *   COX_DENIED: another kind of object has the name
 *   -errno
 */
int cox_control_sweep(const char *name, uint32_t *ret_count, struct cox_error *err);
/* Before a group of this name is created, whatever its mode: sweeps, and waits until the memory
 * that was swept is free, or another sweeper is ready, for 2 s. Returns as cox_control_sweep, but 0
 * for COX_BUSY: create waits for that one. */
int cox_control_clear(const char *name, const struct cox_geometry *geometry, struct cox_error *err);
/* Attaches and verifies size, magic, version and geometry before any offset is trusted. Returns 0;
 * COX_NOT_FOUND; COX_DENIED; COX_VERSION; COX_CORRUPT; -errno. */
int cox_control_attach(struct cox_control *control, const char *name, struct cox_error *err);

/* For the creator: whether the name still refers to this control region. It does not if the names
 * of a live group were removed (RemoveIPC at logout); another group may have the name then. */
bool cox_control_is_named(const struct cox_control *control, const char *name);

/* The named parts of a group beside the control region: its channels in their order, then the
 * memory of the rank group. */
#define COX_CONTROL_PART_COUNT (COX_CHANNEL_COUNT + 1)
/* For the creator: removes every name of the first part_count parts of a group of this geometry,
 * then that of the control region. Returns how many there were. */
uint32_t cox_control_unlink_names(const char *name, const struct cox_geometry *geometry,
                                  int part_count);

#endif
