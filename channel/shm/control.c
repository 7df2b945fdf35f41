#include "control.h"

#include "channel/base/base_internal.h"
#include "channel/base/idioms.h"
#include "channel/base/peer.h"
#include "region.h"

#include <inttypes.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define SHM_FOLDER "/dev/shm"

/* The size of the region, or of the memory that begins with it. */
static uint64_t control_size(const struct cox_geometry *geometry)
{
    return geometry->mode->limits.memory_per_rank ? cox_geometry_request_memory_size(geometry)
                                                  : cox_layout_control_size(geometry->rank_count);
}

void cox_control_point(struct cox_control *control)
{
    if (control->geometry.mode->limits.memory_per_rank)
        return;
    for (uint32_t rank = 0; rank < control->geometry.rank_count; rank++)
        control->ranks[rank] = &control->layout->ranks[rank];
}

int cox_control_verify(struct cox_control *control, const char *object, struct cox_error *err)
{
    const struct cox_region *region = &control->region;
    struct cox_layout_control *layout = region->base;
    if (region->size < sizeof *layout)
        return cox_fail(err, COX_CORRUPT, "%s has %" PRIu64 " bytes, expected at least %zu", object,
                        region->size, sizeof *layout);
    /* acquire: partner is the release in cox_control_fill; the rest was written before. */
    if (atomic_load_explicit(&layout->header.magic, memory_order_acquire) != COX_LAYOUT_MAGIC)
        return cox_fail(err, COX_CORRUPT, "%s is not a Coxswain control region (magic)", object);
    uint32_t version = layout->header.version, abi = layout->header.abi;
    if (version != COX_LAYOUT_VERSION || abi != COX_LAYOUT_ABI)
        return cox_fail(err, COX_VERSION,
                        "%s has layout version %" PRIu32 " in byte order %08" PRIx32
                        ", this program speaks %u in %08x: install the same version on both sides",
                        object, version, abi, COX_LAYOUT_VERSION, COX_LAYOUT_ABI);
    const uint32_t flags = layout->header.flags;
    struct cox_geometry geometry = {
        .rank_count = layout->header.rank_count,
        .depth = layout->header.depth,
        .recorder = flags & COX_LAYOUT_RECORDER,
        .mirrored = flags & COX_LAYOUT_MIRRORED,
        .spin_ns = layout->header.spin_ns,
        .serial = layout->header.serial,
    };
    memcpy(geometry.channels, layout->header.channels, sizeof geometry.channels);
    int r = cox_attach_of_flags(flags, &geometry.mode, err);
    if (r == 0)
        r = cox_geometry_verify(&geometry, err);
    if (r)
        return r;
    /* By the size, which no process overwrites; where ranks have memory of their own, recorders are
     * there. The flag says that the size is not one of a file that was cut off. */
    if (!geometry.mode->limits.memory_per_rank) {
        const bool said = geometry.recorder;
        geometry.recorder = geometry.mode->limits.rank_words;
        const uint64_t whole = cox_geometry_control_object_size(&geometry);
        if (said && region->size < whole)
            return cox_fail(err, COX_CORRUPT,
                            "%s has %" PRIu64 " bytes, %" PRIu32
                            " ranks with recorders need %" PRIu64,
                            object, region->size, geometry.rank_count, whole);
        geometry.recorder = geometry.recorder && region->size >= whole;
    }
    uint64_t size = control_size(&geometry);
    if (layout->header.size != size || region->size < size)
        return cox_fail(err, COX_CORRUPT,
                        "%s has %" PRIu64 " bytes, %" PRIu32 " ranks need %" PRIu64, object,
                        region->size, geometry.rank_count, size);
    control->layout = layout;
    control->geometry = geometry;
    control->group_incarnation = layout->header.group_incarnation;
    cox_control_point(control);
    return 0;
}

/* Two groups of a process never start in the same nanosecond. */
uint32_t cox_control_fresh(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t mix = (uint64_t)now.tv_sec * COX_NSEC_PER_SEC + (uint64_t)now.tv_nsec;
    mix ^= (uint64_t)getpid() << 40;
    return (uint32_t)(mix ^ (mix >> 32)) | 1;
}

int cox_control_fill(struct cox_layout_control *layout, const struct cox_geometry *geometry)
{
    struct cox_layout_header *header = &layout->header;
    header->version = COX_LAYOUT_VERSION;
    header->abi = COX_LAYOUT_ABI;
    header->size = control_size(geometry);
    header->rank_count = geometry->rank_count;
    header->depth = geometry->depth;
    header->spin_ns = geometry->spin_ns;
    header->serial = geometry->serial;
    header->coordinator_pid = (uint32_t)getpid();
    header->flags = geometry->mode->layout_flags |
                    (geometry->recorder ? (uint32_t)COX_LAYOUT_RECORDER : 0) |
                    (geometry->mirrored ? (uint32_t)COX_LAYOUT_MIRRORED : 0);
    int r = cox_peer_start_time(getpid(), &header->coordinator_start);
    if (r)
        return r;
    header->group_incarnation = cox_control_fresh();
    memcpy(header->channels, geometry->channels, sizeof header->channels);
    /* release: partner is cox_control_verify. */
    atomic_store_explicit(&header->magic, COX_LAYOUT_MAGIC, memory_order_release);
    return 0;
}

void *cox_control_recorder(const struct cox_control *control, uint32_t rank)
{
    if (!control->layout || !control->geometry.recorder)
        return NULL;
    uint8_t *base = control->geometry.mode->limits.memory_per_rank
                        ? (uint8_t *)control->ranks[rank]
                        : (uint8_t *)control->region.base;
    return base + cox_geometry_recorder_offset(&control->geometry, rank);
}

int cox_control_check_space(const struct cox_geometry *geometry, struct cox_error *err)
{
    struct cox_region_space space;
    int r = cox_region_space(&space);
    const uint64_t files = cox_geometry_account(geometry).name_count;
    if (r && files == 0)
        return 0; /* optional: the sweep works without it */
    if (r)
        return cox_fail(err, r, SHM_FOLDER ": %s", cox_status_text(r));
    const uint64_t bytes = files ? cox_geometry_memory_bytes(geometry) : 0;
    if (space.bytes < bytes)
        return cox_fail(
            err, COX_NO_SPACE,
            "the group needs %" PRIu64 " bytes of " SHM_FOLDER ", %" PRIu64
            " are free: enlarge it (mount -o remount,size=...), use fewer ranks, a smaller depth or smaller regions (see coxswain layout), or no recorder (COX_RECORDER_NONE)",
            bytes, space.bytes);
    if (space.files < files)
        return cox_fail(
            err, COX_NO_SPACE,
            "the group needs %" PRIu64 " files in " SHM_FOLDER ", %" PRIu64
            " more are allowed: raise that (mount -o remount,nr_inodes=...), remove some, or use fewer ranks",
            files, space.files);
    uint64_t size = cox_geometry_account(geometry).region_size_max;
    if (space.region < size)
        return cox_fail(
            err, COX_NO_SPACE,
            "the group's largest region needs %" PRIu64 " bytes, a file may have %" PRIu64
            " (ulimit -f): raise that limit or choose smaller regions (see coxswain layout)",
            size, space.region);
    return 0;
}

int cox_control_accept(struct cox_control *control, struct cox_control *attached,
                       const char *object, struct cox_error *err)
{
    int r = cox_control_verify(attached, object, err);
    if (r)
        cox_region_detach(&attached->region);
    else
        *control = *attached;
    return r;
}

int cox_control_attach_fd(struct cox_control *control, int fd, enum cox_region_access access,
                          struct cox_error *err)
{
    struct cox_control attached = COX_CONTROL_NONE;
    int r = cox_region_attach_fd(&attached.region, fd, "control", sizeof(struct cox_layout_control),
                                 access, err);
    return r ? r : cox_control_accept(control, &attached, "the control region", err);
}

void cox_control_close(struct cox_control *control)
{
    cox_region_detach(&control->region);
    control->layout = NULL;
    memset(control->ranks, 0, sizeof control->ranks);
    cox_unforked_close(&control->lock_fd);
}
