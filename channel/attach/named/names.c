#include "names.h"

#include "channel/base/base_internal.h"
#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/base/peer.h"
#include "channel/shm/region.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define SHM_FOLDER "/dev/shm"
/* How long leftovers may be somebody else's to remove. */
#define SWEEP_MS 2000
/* The longest pause meanwhile: each look reads /proc for who holds a lock. */
#define PAUSE_MAX_NS (16 * (long)COX_NSEC_PER_MSEC)

/* Twice as long as the last pause; the first has 1 ms. Returns how long. */
static long pause_longer(long last_ns)
{
    long ns = last_ns ? 2 * last_ns : (long)COX_NSEC_PER_MSEC;
    ns = ns < PAUSE_MAX_NS ? ns : PAUSE_MAX_NS;
    nanosleep(&(struct timespec){.tv_nsec = ns}, NULL);
    return ns;
}

/* `file` is the prefix of the file in /dev/shm; the object's name without its slash follows it.
 * own_only: skips objects of other users, which the sticky bit of /dev/shm protects from all users
 * but root. Returns true if the file existed and was removed. */
static bool control_unlink_one(const char *file, const char *object, bool own_only)
{
    char path[COX_OBJECT_NAME_SIZE + 32];
    struct stat st;
    snprintf(path, sizeof path, SHM_FOLDER "/%s%s", file, object + 1);
    if (own_only && fstatat(AT_FDCWD, path, &st, AT_SYMLINK_NOFOLLOW) == 0 &&
        st.st_uid != geteuid())
        return false;
    bool gone = unlink(path) == 0;
    cox_fault_point(COX_FAULT_NAME_UNLINKED);
    return gone;
}

static uint32_t control_unlink(const char *name, const struct cox_geometry *geometry,
                               int part_count, bool own_only)
{
    char object[COX_OBJECT_NAME_SIZE], objects[COX_NAME_SIZE_MAX + 1];
    uint32_t count = 0;
    cox_name_objects(objects, name, geometry);
    for (int c = 0; c < part_count && c < COX_CHANNEL_COUNT; c++) {
        enum cox_channel_id channel = (enum cox_channel_id)c;
        uint32_t pairs = channel == COX_CHANNEL_ERROR ? 1 : geometry->rank_count;
        for (uint32_t rank = 0; rank < pairs; rank++)
            for (int wakeup = 0; wakeup < COX_WAKEUP_COUNT; wakeup++)
                if (cox_wakeup_exists(channel, (enum cox_wakeup)wakeup))
                    count += control_unlink_one(
                        "sem.",
                        cox_name_wakeup(object, objects, channel, (enum cox_wakeup)wakeup, rank),
                        own_only);
        if (geometry->channels[c].request_size)
            count += control_unlink_one("", cox_name_request(object, objects, channel), own_only);
        count += control_unlink_one("", cox_name_response(object, objects, channel), own_only);
    }
    if (part_count > COX_CHANNEL_COUNT && geometry->mode->limits.rank_group == COX_ATTACH_WINDOWS)
        count += control_unlink_one("", cox_name_group(object, name), own_only);
    cox_fault_point(COX_FAULT_CONTROL_UNLINK);
    return count + control_unlink_one("", cox_name_control(object, name), own_only);
}

uint32_t cox_control_unlink_names(const char *name, const struct cox_geometry *geometry,
                                  int part_count)
{
    return control_unlink(name, geometry, part_count, false);
}

/* Another process holds the lock of this file: the coordinator, or, if that is dead, another
 * sweeper, or a process that the dead one made without fork(3), as an exact copy. */
static int control_locked(const char *name, const struct cox_control *old, const struct stat *file,
                          int e, struct cox_error *err)
{
    const struct cox_layout_header *header = &old->layout->header;
    if (e != EWOULDBLOCK)
        return cox_fail(err, -e, "the group '%s': flock: %s", name, cox_status_text(-e));
    struct cox_peer coordinator = COX_PEER_NONE;
    int r = cox_peer_open((pid_t)header->coordinator_pid, header->coordinator_start, &coordinator);
    bool ending = false;
    if (r == 0)
        r = cox_peer_check_exiting(coordinator.pid, &ending);
    cox_peer_close(&coordinator);
    if (r < 0 || r == COX_CORRUPT)
        return cox_fail(err, r,
                        "the group '%s' is locked, and whether its process %" PRIu32
                        " lives is unknown: %s",
                        name, header->coordinator_pid, cox_status_text(r));
    if (r == COX_PEER_DEAD)
        return cox_fail(err, COX_BUSY,
                        "process %" PRIu32 " of the group '%s' is dead, but process %d holds its "
                        "lock: it removes what is left, or is a copy of the dead one (0: it is not "
                        "in /proc here); end it, or choose another name",
                        header->coordinator_pid, name,
                        (int)cox_peer_find_holder(file->st_dev, file->st_ino));
    if (ending)
        return cox_fail(err, COX_BUSY,
                        "process %" PRIu32 ", which has the name '%s', is just ending",
                        header->coordinator_pid, name);
    return cox_fail(err, COX_TAKEN,
                    "the name '%s' is taken by a live group of process %" PRIu32
                    ": stop that one or choose another name",
                    name, header->coordinator_pid);
}

/* Checks that the path names the file behind fd. Returns 0; COX_NOT_FOUND: it does not; -errno. */
static int control_same_file(int fd, const char *path)
{
    struct stat own, named;
    if (fstat(fd, &own) < 0 || stat(path, &named) < 0)
        return errno == ENOENT ? COX_NOT_FOUND : -errno;
    return named.st_ino == own.st_ino && named.st_dev == own.st_dev ? 0 : COX_NOT_FOUND;
}

bool cox_control_is_named(const struct cox_control *control, const char *name)
{
    char object[COX_OBJECT_NAME_SIZE], path[COX_OBJECT_NAME_SIZE + sizeof SHM_FOLDER];
    snprintf(path, sizeof path, SHM_FOLDER "%s", cox_name_control(object, name));
    /* If it cannot be checked it is assumed to be ours, as it nearly always is. */
    return control_same_file(control->lock_fd, path) != COX_NOT_FOUND;
}

/* Checks that the names of the group are known: also of another version, if its number of ranks is
 * possible. */
static int control_verify_names(struct cox_control *old, const char *name, const char *object,
                                struct cox_error *err)
{
    struct cox_error why = {0};
    int r = cox_control_verify(old, object, &why);
    if (r == 0)
        return 0;
    if (r != COX_VERSION)
        return cox_fail(err, COX_DENIED, "%s is in the way: %s", object, why.text);
    struct cox_layout_control *layout = old->region.base;
    uint32_t rank_count = layout->header.rank_count;
    if (layout->header.abi != COX_LAYOUT_ABI || rank_count == 0 || rank_count > COX_RANK_COUNT_MAX)
        return cox_fail(
            err, COX_DENIED,
            "%s is in the way: %s; choose another name than '%s', or clean up with that version (coxswain clean)",
            object, why.text, name);
    old->layout = layout;
    old->geometry = (struct cox_geometry){
        .rank_count = rank_count, .mode = &cox_attach_named, .serial = layout->header.serial};
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
        old->geometry.channels[c].request_size = 1; /* the region exists */
    return 0;
}

/* If the lock can be taken the coordinator is dead. */
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
    cox_fault_point(COX_FAULT_CONTROL_SWEEP);
    r = control_verify_names(&old, name, object, err);
    if (r) {
        /* Nothing is removed on the basis of invalid numbers. */
    } else if (flock(fd, LOCK_EX | LOCK_NB) < 0) {
        r = control_locked(name, &old, &st, errno, err);
    } else if ((r = control_same_file(fd, path))) {
        /* Gone: another sweeper was faster. Other errors say nothing about the object. */
        r = r == COX_NOT_FOUND ? 0 : cox_fail(err, r, "%s: stat: %s", object, cox_status_text(r));
    } else {
        /* Locked, and the name still refers to the locked file. */
        cox_fault_point(COX_FAULT_CONTROL_LOCKED);
        count = control_unlink(name, &old.geometry, COX_CONTROL_PART_COUNT, true);
    }
    cox_region_detach(&old.region);
    if (r == 0)
        *ret_count = count;
    return r;
}

/* Leftovers of a dead group of this name occupy space that is needed now; and unlinked memory is
 * freed only when its last process, killed with the group, is gone. */
int cox_control_clear(const char *name, const struct cox_geometry *geometry, struct cox_error *err)
{
    uint32_t count = 0;
    struct cox_error why = {0};
    uint64_t deadline_ns = cox_deadline_after_ms(SWEEP_MS);
    long pause_ns = 0;
    int r;
    while ((r = cox_control_sweep(name, &count, &why)) == COX_BUSY && cox_now_ns() < deadline_ns) {
        cox_error_clear(&why);
        pause_ns = pause_longer(pause_ns);
    }
    if (r && r != COX_BUSY)
        return cox_fail(err, r, "%s", why.text);
    while (count && cox_control_check_space(geometry, NULL) == COX_NO_SPACE &&
           cox_now_ns() < deadline_ns)
        nanosleep(&(struct timespec){.tv_nsec = COX_NSEC_PER_MSEC}, NULL);
    return 0;
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
    r = cox_fd_raise(&fd);
    if (r)
        return cox_fail(err, r, "%s: dup: %s", object, cox_status_text(r));
    if (fchmod(fd, 0600) < 0)
        return cox_fail(err, -errno, "%s: fchmod: %s", object, cox_status_text(-errno));
    uint64_t size = cox_geometry_control_object_size(geometry);
    r = cox_region_reserve(fd, size, object, err);
    if (r)
        return r;
    struct cox_region region = {0};
    r = cox_region_map(&region, fd, size, COX_REGION_WRITE, object, err);
    if (r)
        return r;
    r = cox_control_fill(region.base, geometry);
    if (r)
        r = cox_fail(err, r, "%s: own start time: %s", object, cox_status_text(r));
    snprintf(self, sizeof self, "/proc/self/fd/%d", fd);
    /* The lock is on a description of its own, which must not outlive this process in a child: the
     * other one lives as long as a mapping. */
    cox_unforked_hold();
    _cox_cleanup_(cox_unforked_close) int lock_fd = open(self, O_RDWR | O_CLOEXEC);
    const int opened = cox_unforked_release(&lock_fd);
    if (r == 0 && (opened || flock(lock_fd, LOCK_EX | LOCK_NB) < 0))
        r = cox_fail(err, opened ? opened : -errno, "%s: flock: %s", object,
                     cox_status_text(opened ? opened : -errno));
    cox_fault_point(COX_FAULT_CONTROL_FILLED);
    /* A second attempt only after leftovers were swept; a live process may be faster then. */
    const uint64_t deadline_ns = cox_deadline_after_ms(SWEEP_MS);
    long pause_ns = 0;
    for (bool late = false, last = false; r == 0; last = late, late = cox_now_ns() >= deadline_ns) {
        if (linkat(AT_FDCWD, self, AT_FDCWD, path, AT_SYMLINK_FOLLOW) == 0)
            break;
        if (errno != EEXIST || last) {
            r = cox_fail(err, errno == EEXIST ? COX_TAKEN : -errno, "%s: %s", object,
                         cox_status_text(-errno));
            break;
        }
        uint32_t swept;
        struct cox_error why = {0};
        r = cox_control_sweep(name, &swept, &why);
        if (r == COX_BUSY && !late) {
            /* Another start is sweeping: either it gets the name or this one does. Or the owner of
             * the name was killed a moment ago. */
            pause_ns = pause_longer(pause_ns);
            r = 0;
        } else if (r) {
            cox_fail(err, r, "%s", why.text);
        }
    }
    if (r) {
        cox_region_detach(&region);
        return r;
    }
    cox_fault_point(COX_FAULT_CONTROL_LINKED);
    *control = (struct cox_control){
        .region = region,
        .layout = region.base,
        .geometry = *geometry,
        .group_incarnation = ((struct cox_layout_control *)region.base)->header.group_incarnation,
        .lock_fd = cox_steal_fd(&lock_fd),
    };
    cox_control_point(control);
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
    return cox_control_accept(control, &attached, object, err);
}
