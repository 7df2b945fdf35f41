/*
 * control: the control region of a group, which contains the shared state.
 *
 * In a named group it is an object of its own (channel/attach/named/names.h), in a sealed one the
 * beginning of the request memory.
 *
 * Threads: fill, attach and close on one thread; the words inside follow the rules of layout.h.
 * Ownership: the caller owns struct cox_control.
 * Blocks: nothing.
 * If the process dies: as the mode says.
 */
#ifndef COX_CHANNEL_CONTROL_H
#define COX_CHANNEL_CONTROL_H

#include "geometry.h"
#include "region.h"

struct cox_control {
    struct cox_region region;
    /* in region */
    struct cox_layout_control *layout;
    /* In region, or (sealed) in separate memory; NULL: not mapped in this process. */
    struct cox_layout_rank *ranks[COX_RANK_COUNT_MAX];
    /* private copy, verified */
    struct cox_geometry geometry;
    /* private copy */
    uint32_t group_incarnation;
    /* creator: holds the lock; -1 on the worker side */
    int lock_fd;
};

#define COX_CONTROL_NONE                                                                           \
    {                                                                                              \
        .lock_fd = -1                                                                              \
    }

/* A new number, never 0, for every group of this name: an incarnation, a serial. */
uint32_t cox_control_fresh(void);
/* Writes the header of a new group over zeroed memory, the magic last. Returns 0 or -errno. */
int cox_control_fill(struct cox_layout_control *layout, const struct cox_geometry *geometry);
/* Sets `ranks` to the parts of the region, where it contains them. */
void cox_control_point(struct cox_control *control);

/* The flight recorder of a rank. NULL: the group has none, or control is closed. */
void *cox_control_recorder(const struct cox_control *control, uint32_t rank);

/* Checks whether all objects of a group of this geometry could be created now. Returns 0;
 * COX_NO_SPACE: err says what is needed, what is free and what to do; -errno. */
int cox_control_check_space(const struct cox_geometry *geometry, struct cox_error *err);

/* Checks what `region` of control contains, and fills in the rest. Returns 0; COX_VERSION;
 * COX_CORRUPT. */
int cox_control_verify(struct cox_control *control, const char *object, struct cox_error *err);
/* The same for what was just attached: gives it to control, or detaches it. */
int cox_control_accept(struct cox_control *control, struct cox_control *attached,
                       const char *object, struct cox_error *err);
/* Attaches the region behind an fd, which stays the caller's. Verifies size, magic, version and
 * geometry before any offset is trusted. Returns 0; COX_NOT_FOUND; COX_DENIED; COX_VERSION;
 * COX_CORRUPT; -errno. */
int cox_control_attach_fd(struct cox_control *control, int fd, enum cox_region_access access,
                          struct cox_error *err);
void cox_control_close(struct cox_control *control); /* unmaps, drops the lock; idempotent */

#endif
