/*
 * control: the control region of a group, which has the shared state.
 *
 * The coordinator creates it first and removes it last. Until it has its name it is an unnamed file
 * that is already complete and locked, so nobody ever sees it half made; the lock (flock) lives as
 * long as the coordinator and tells a live group from what a dead one left behind.
 *
 * Threads: create, attach, unlink and close from one thread; the words inside under the rules of
 *   layout.h.
 * Ownership: the caller owns struct cox_control.
 * Blocks: nothing.
 * If the process dies: the name stays, unlocked; the next start under it, or a sweep, removes it
 *   and all names of its group.
 */
#ifndef COX_CHANNEL_CONTROL_H
#define COX_CHANNEL_CONTROL_H

#include "geometry.h"
#include "region.h"

struct cox_control {
    struct cox_region region;
    /* in region */
    struct cox_layout_control *layout;
    /* In region, or (sealed) in a memory of its own; NULL: not for this process. */
    struct cox_layout_rank *ranks[COX_RANK_COUNT_MAX];
    /* private copy, verified */
    struct cox_geometry geometry;
    /* private copy */
    uint32_t epoch;
    /* creator: holds the lock; -1 on the worker side */
    int lock_fd;
};

#define COX_CONTROL_NONE                                                                           \
    {                                                                                              \
        .lock_fd = -1                                                                              \
    }

/* Another number, other than 0, for every group that had this name: an epoch, a serial. */
uint32_t cox_control_fresh(void);
/* Writes the header of a new group over zeroes, the magic last. Returns 0 or -errno. */
int cox_control_fill(struct cox_layout_control *layout, const struct cox_geometry *geometry);
/* Finds the ranks' blocks where they are in the region itself. */
void cox_control_point(struct cox_control *control);

/* Whether all that a group of this geometry has could be created now. Returns 0; COX_NO_SPACE: err
 * says what is needed, what is there and what to do; -errno. */
int cox_control_check_space(const struct cox_geometry *geometry, struct cox_error *err);

/* Creates. Leftovers of a dead group under this name (their lock is free) are removed first.
 * Returns 0; COX_TAKEN: a live group has the name, err says which process; COX_DENIED: the name
 * belongs to something else; COX_NO_SPACE; -errno. */
int cox_control_create(struct cox_control *control, const char *name,
                       const struct cox_geometry *geometry, struct cox_error *err);
/* Removes what a dead group left under this name, after winning the lock of its control region: a
 * live group is never touched, and of two sweepers one wins. *ret_count: names removed; 0: there
 * was nothing. What belongs to another user stays. Returns 0; COX_TAKEN: the group lives, err says
 * in which process; COX_BUSY: it is dead, but another process holds its lock, most likely to do the
 * same, or its process is just ending; COX_DENIED: something else has the name; -errno. */
int cox_control_sweep(const char *name, uint32_t *ret_count, struct cox_error *err);
/* Attaches and verifies size, magic, version and geometry before any offset is trusted. Returns 0;
 * COX_NOT_FOUND; COX_DENIED; COX_VERSION; COX_CORRUPT; -errno. */
int cox_control_attach(struct cox_control *control, const char *name, struct cox_error *err);
/* The same by an fd, which stays the caller's. */
int cox_control_attach_fd(struct cox_control *control, int fd, enum cox_region_access access,
                          struct cox_error *err);
void cox_control_close(struct cox_control *control); /* unmaps, drops the lock; idempotent */

/* Creator: whether the name still means this control region. Not so when somebody removed the names
 * of a live group (RemoveIPC at logout); another group may have them by now. */
bool cox_control_is_named(const struct cox_control *control, const char *name);

/* What a group has names for beside the control region: its channels in their order, then the
 * memory of the rank group. */
#define COX_CONTROL_PART_COUNT (COX_CHANNEL_COUNT + 1)
/* For the creator. Removes every name that the first part_count parts of a group of this geometry
 * have, then the control region's. Returns how many there were. */
uint32_t cox_control_unlink_names(const char *name, const struct cox_geometry *geometry,
                                  int part_count);

#endif
