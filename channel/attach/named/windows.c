#include "windows.h"

#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/shm/region.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>

#define FIRST_INCARNATION 1
#define LABEL "of the rank group"

static int window_reserve(int fd, const struct cox_geometry *geometry, uint64_t incarnation,
                          struct cox_error *err)
{
    return cox_region_reserve_part(fd, cox_geometry_group_offset(geometry, incarnation),
                                   cox_geometry_group_size(geometry), LABEL, err);
}

/* Discards the content; processes that have it mapped read zeroes. Returns 0 or -errno. */
static int windows_punch(int fd, uint64_t offset, uint64_t size)
{
    int r;
    if (size == 0)
        return 0;
    do
        r = fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)size);
    while (r < 0 && errno == EINTR);
    return r < 0 ? -errno : 0;
}

int cox_windows_create_named(const char *name, const struct cox_geometry *geometry,
                             struct cox_error *err)
{
    char object[COX_OBJECT_NAME_SIZE];
    _cox_cleanup_(cox_close_fd) int fd = -1;
    cox_name_group(object, name);
    int r = cox_region_create_sparse(object, cox_geometry_group_object_size(geometry), &fd, err);
    if (r)
        return r;
    r = window_reserve(fd, geometry, FIRST_INCARNATION, err);
    if (r)
        cox_region_unlink(object);
    cox_fault_point(COX_FAULT_WINDOW_RENEWED);
    return r;
}

int cox_windows_renew(int fd, const struct cox_geometry *geometry, uint64_t incarnation,
                      struct cox_error *err)
{
    int r = windows_punch(fd, cox_geometry_group_offset(geometry, incarnation),
                          cox_geometry_group_size(geometry));
    if (r)
        return cox_fail(err, r, "memory " LABEL ", incarnation %" PRIu64 ": %s", incarnation,
                        cox_status_text(r));
    r = window_reserve(fd, geometry, incarnation, err);
    cox_fault_point(COX_FAULT_WINDOW_RENEWED);
    return r;
}

int cox_windows_keep(int fd, const struct cox_geometry *geometry, uint64_t incarnation)
{
    uint64_t kept = cox_geometry_group_offset(geometry, incarnation);
    uint64_t behind = kept + cox_geometry_group_size(geometry);
    int before = windows_punch(fd, 0, kept);
    int after = windows_punch(fd, behind, cox_geometry_group_object_size(geometry) - behind);
    cox_fault_point(COX_FAULT_WINDOWS_KEPT);
    return before ? before : after;
}
