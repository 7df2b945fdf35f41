#include "control.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "fault.h"
#include "peer.h"
#include "semaphore.h"

#define SHM_FOLDER "/dev/shm"
/* Once a millisecond. */
#define SWEEP_ATTEMPTS 500

static int control_verify(struct cox_control *control, const char *object, struct cox_error *err)
{
    const struct cox_region *region = &control->region;
    struct cox_layout_control *layout = region->base;
    if (region->size < sizeof *layout)
        return cox_fail(err, COX_CORRUPT, "%s has %" PRIu64 " bytes, expected at least %zu", object,
                        region->size, sizeof *layout);
    /* acquire: partner is the release in control_fill; what follows was written before it. */
    if (atomic_load_explicit(&layout->header.magic, memory_order_acquire) != COX_LAYOUT_MAGIC)
        return cox_fail(err, COX_CORRUPT, "%s is not a Coxswain control region (magic)", object);
    uint32_t version = layout->header.version, abi = layout->header.abi;
    if (version != COX_LAYOUT_VERSION || abi != COX_LAYOUT_ABI)
        return cox_fail(err, COX_VERSION,
                        "%s has layout version %" PRIu32 " in byte order %08" PRIx32
                        ", this program speaks %u in %08x: install the same version on "
                        "both sides",
                        object, version, abi, COX_LAYOUT_VERSION, COX_LAYOUT_ABI);
    struct cox_geometry geometry = {
        .rank_count = layout->header.rank_count,
        .depth = layout->header.depth,
        .legacy = layout->header.flags & COX_LAYOUT_LEGACY,
    };
    memcpy(geometry.channels, layout->header.channels, sizeof geometry.channels);
    int r = cox_geometry_verify(&geometry, err);
    if (r)
        return r;
    uint64_t size = cox_layout_control_size(geometry.rank_count);
    if (layout->header.size != size || region->size < size)
        return cox_fail(err, COX_CORRUPT,
                        "%s has %" PRIu64 " bytes, %" PRIu32 " ranks need %" PRIu64, object,
                        region->size, geometry.rank_count, size);
    control->layout = layout;
    control->geometry = geometry;
    control->epoch = layout->header.epoch;
    return 0;
}

static int control_fill(struct cox_layout_control *layout, const struct cox_geometry *geometry)
{
    struct cox_layout_header *header = &layout->header;
    header->version = COX_LAYOUT_VERSION;
    header->abi = COX_LAYOUT_ABI;
    header->size = cox_layout_control_size(geometry->rank_count);
    header->rank_count = geometry->rank_count;
    header->depth = geometry->depth;
    header->coordinator_pid = (uint32_t)getpid();
    header->flags = geometry->legacy ? COX_LAYOUT_LEGACY : 0;
    int r = cox_peer_start_time(getpid(), &header->coordinator_start);
    if (r)
        return r;
    /* Another value for every group that had this name: two starts are never in one nanosecond of
     * one process. */
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t mix = (uint64_t)now.tv_sec * COX_NSEC_PER_SEC + (uint64_t)now.tv_nsec;
    mix ^= (uint64_t)getpid() << 40;
    header->epoch = (uint32_t)(mix ^ (mix >> 32)) | 1;
    memcpy(header->channels, geometry->channels, sizeof header->channels);
    /* release: partner is control_verify. */
    atomic_store_explicit(&header->magic, COX_LAYOUT_MAGIC, memory_order_release);
    return 0;
}

uint32_t cox_control_unlink_names(const char *name, const struct cox_geometry *geometry,
                                  int channel_count)
{
    char object[COX_OBJECT_NAME_SIZE];
    uint32_t count = 0;
    for (int c = 0; c < channel_count; c++) {
        enum cox_channel_id channel = (enum cox_channel_id)c;
        uint32_t pairs = channel == COX_CHANNEL_ERROR ? 1 : geometry->rank_count;
        for (uint32_t rank = 0; rank < pairs; rank++)
            for (int bell = 0; bell < COX_BELL_COUNT; bell++)
                count += cox_bell_exists(channel, (enum cox_bell)bell) &&
                         sem_unlink(
                             cox_name_bell(object, name, channel, (enum cox_bell)bell, rank)) == 0;
        if (geometry->channels[c].request_size)
            count += shm_unlink(cox_name_request(object, name, channel)) == 0;
        count += shm_unlink(cox_name_response(object, name, channel)) == 0;
    }
    cox_fault_point("control.unlink.last");
    count += shm_unlink(cox_name_control(object, name)) == 0;
    return count;
}

/* The lock is held by somebody else: by the coordinator, or, when that is dead, by another sweeper
 * or a child it left. */
static int control_locked(const char *name, const struct cox_control *old, int e,
                          struct cox_error *err)
{
    const struct cox_layout_header *header = &old->layout->header;
    if (e != EWOULDBLOCK)
        return cox_fail(err, -e, "the group '%s': flock: %s", name, cox_status_text(-e));
    struct cox_peer coordinator = COX_PEER_NONE;
    if (cox_peer_open((pid_t)header->coordinator_pid, header->coordinator_start, &coordinator) ==
        COX_PEER_DEAD)
        return cox_fail(err, COX_BUSY,
                        "what process %" PRIu32 " left of the group '%s' is being removed by "
                        "another process, or a child of the dead one still holds its lock",
                        header->coordinator_pid, name);
    cox_peer_close(&coordinator);
    return cox_fail(err, COX_TAKEN,
                    "the name '%s' is taken by a live group of process %" PRIu32
                    ": stop that one or choose another name",
                    name, header->coordinator_pid);
}

static bool control_same_file(int fd, const char *path)
{
    struct stat own, named;
    return fstat(fd, &own) == 0 && stat(path, &named) == 0 && named.st_ino == own.st_ino &&
           named.st_dev == own.st_dev;
}

bool cox_control_is_named(const struct cox_control *control, const char *name)
{
    char object[COX_OBJECT_NAME_SIZE], path[COX_OBJECT_NAME_SIZE + sizeof SHM_FOLDER];
    snprintf(path, sizeof path, SHM_FOLDER "%s", cox_name_control(object, name));
    return control_same_file(control->lock_fd, path);
}

/* A lock that can be won means that the coordinator is dead. */
int cox_control_sweep(const char *name, uint32_t *ret_count, struct cox_error *err)
{
    char object[COX_OBJECT_NAME_SIZE];
    cox_name_control(object, name);
    uint32_t count = 0;
    char path[COX_OBJECT_NAME_SIZE + sizeof SHM_FOLDER];
    snprintf(path, sizeof path, SHM_FOLDER "%s", object);
    int r;
    _cox_cleanup_(cox_close_fd) int fd = open(path, O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        if (errno == ENOENT) {
            *ret_count = 0;
            return 0;
        }
        r = errno;
        bool foreign = r == ELOOP || r == EACCES || r == EISDIR || r == ENXIO;
        return cox_fail(err, foreign ? COX_DENIED : -r, "%s is in the way: %s", object,
                        cox_status_text(-r));
    }
    r = cox_region_check_fd(fd, object, err);
    if (r)
        return r;
    struct stat st;
    if (fstat(fd, &st) < 0)
        return cox_fail(err, -errno, "%s: %s", object, cox_status_text(-errno));
    struct cox_control old = COX_CONTROL_NONE;
    if (st.st_size <= 0)
        return cox_fail(err, COX_DENIED, "%s is in the way: an empty file that is none of ours",
                        object);
    r = cox_region_map(&old.region, fd, (uint64_t)st.st_size, COX_REGION_READ, object, err);
    if (r)
        return r;
    cox_fault_point("control.sweep");
    struct cox_error why = {0};
    r = control_verify(&old, object, &why);
    if (r == COX_VERSION) {
        r = cox_fail(
            err, COX_DENIED,
            "%s is in the way: %s; when nothing of that version runs any more, remove what it "
            "left (rm /dev/shm%s)",
            object, why.text, object);
    } else if (r) {
        r = cox_fail(err, COX_DENIED, "%s is in the way: %s", object, why.text);
    } else if (flock(fd, LOCK_EX | LOCK_NB) < 0) {
        r = control_locked(name, &old, errno, err);
    } else if (control_same_file(fd, path)) {
        /* Won, and the name still means the file that is locked. */
        count = cox_control_unlink_names(name, &old.geometry, COX_CHANNEL_COUNT);
    }
    cox_region_detach(&old.region);
    if (r == 0)
        *ret_count = count;
    return r;
}

int cox_control_create(struct cox_control *control, const char *name,
                       const struct cox_geometry *geometry, struct cox_error *err)
{
    int r = cox_name_check(name, err);
    if (r)
        return r;
    char object[COX_OBJECT_NAME_SIZE], path[COX_OBJECT_NAME_SIZE + sizeof SHM_FOLDER], self[64];
    cox_name_control(object, name);
    snprintf(path, sizeof path, SHM_FOLDER "%s", object);
    _cox_cleanup_(cox_close_fd) int fd = open(SHM_FOLDER, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0)
        return cox_fail(err, -errno, "%s: cannot create in " SHM_FOLDER ": %s", object,
                        cox_status_text(-errno));
    if (fchmod(fd, 0600) < 0)
        return cox_fail(err, -errno, "%s: fchmod: %s", object, cox_status_text(-errno));
    uint64_t size = cox_layout_control_size(geometry->rank_count);
    r = cox_region_reserve(fd, size, object, err);
    if (r)
        return r;
    struct cox_region region = {0};
    r = cox_region_map(&region, fd, size, COX_REGION_WRITE, object, err);
    if (r)
        return r;
    r = control_fill(region.base, geometry);
    if (r)
        r = cox_fail(err, r, "%s: own start time: %s", object, cox_status_text(r));
    if (r == 0 && flock(fd, LOCK_EX | LOCK_NB) < 0)
        r = cox_fail(err, -errno, "%s: flock: %s", object, cox_status_text(-errno));
    snprintf(self, sizeof self, "/proc/self/fd/%d", fd);
    cox_fault_point("control.link");
    /* A second round only after leftovers were swept; somebody else may then be faster, who is
     * alive. */
    for (int attempt = 0; r == 0; attempt++) {
        if (linkat(AT_FDCWD, self, AT_FDCWD, path, AT_SYMLINK_FOLLOW) == 0)
            break;
        if (errno != EEXIST || attempt > SWEEP_ATTEMPTS) {
            r = cox_fail(err, errno == EEXIST ? COX_TAKEN : -errno, "%s: %s", object,
                         cox_status_text(-errno));
            break;
        }
        uint32_t swept;
        struct cox_error why = {0};
        r = cox_control_sweep(name, &swept, &why);
        if (r == COX_BUSY && attempt < SWEEP_ATTEMPTS) {
            /* Another starter sweeps at this moment: either it takes the name, or we do. */
            nanosleep(&(struct timespec){.tv_nsec = COX_NSEC_PER_MSEC}, NULL);
            r = 0;
        } else if (r) {
            cox_fail(err, r, "%s", why.text);
        }
    }
    if (r) {
        cox_region_detach(&region);
        return r;
    }
    cox_fault_point("control.linked");
    *control = (struct cox_control){
        .region = region,
        .layout = region.base,
        .geometry = *geometry,
        .epoch = ((struct cox_layout_control *)region.base)->header.epoch,
        .lock_fd = cox_steal_fd(&fd),
    };
    return 0;
}

int cox_control_attach(struct cox_control *control, const char *name, struct cox_error *err)
{
    int r = cox_name_check(name, err);
    if (r)
        return r;
    char object[COX_OBJECT_NAME_SIZE];
    cox_name_control(object, name);
    struct cox_control attached = COX_CONTROL_NONE;
    r = cox_region_attach(&attached.region, object, sizeof(struct cox_layout_control),
                          COX_REGION_WRITE, err);
    if (r)
        return r;
    r = control_verify(&attached, object, err);
    if (r) {
        cox_region_detach(&attached.region);
        return r;
    }
    *control = attached;
    return 0;
}

void cox_control_close(struct cox_control *control)
{
    cox_region_detach(&control->region);
    control->layout = NULL;
    cox_close_fd(&control->lock_fd);
}
