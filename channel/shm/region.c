#include "region.h"

#include "channel/base/base_internal.h"
#include "channel/base/cgroup.h"
#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/base/tsan.h"

#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#ifndef MFD_NOEXEC_SEAL /* Linux 6.3 */
#define MFD_NOEXEC_SEAL 0x0008u
#endif
#ifndef MFD_HUGE_2MB
#define MFD_HUGE_2MB (21u << 26)
#endif
#define HUGE_PAGE (UINT64_C(2) << 20)
/* From here on to find the limit of the control group, some hundred microseconds, is little beside
 * the time to fill the memory. */
#define CGROUP_SIZE_MIN (UINT64_C(64) << 20)

#if COX_TESTING

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

/* The lock is hidden from ThreadSanitizer: it would otherwise order what both sides did before they
 * attached, and hide that they do not order that themselves. */
#define REGION_UNSEEN __attribute__((noinline, no_sanitize("thread")))

/* One object, and where it is mapped. */
struct region_shared {
    struct region_shared *next;
    dev_t device;
    ino_t inode;
    void *base;
    uint64_t offset, size;
    bool writable;
    unsigned users;
};

static bool shares;
static struct region_shared *shared;
static atomic_flag shared_lock = ATOMIC_FLAG_INIT;

REGION_UNSEEN static void shared_enter(void)
{
    while (atomic_flag_test_and_set(&shared_lock))
        sched_yield();
}

REGION_UNSEEN void cox_region_share_mappings(bool share)
{
    shared_enter();
    shares = share;
    atomic_flag_clear(&shared_lock);
}

REGION_UNSEEN static void *region_mmap(int fd, uint64_t offset, uint64_t size, int protection)
{
    shared_enter();
    struct region_shared *found = NULL;
    struct stat st;
    if (shares && fstat(fd, &st) == 0)
        for (found = shared; found; found = found->next)
            if (found->device == st.st_dev && found->inode == st.st_ino &&
                found->offset == offset && found->size == size &&
                (found->writable || !(protection & PROT_WRITE)))
                break;
    void *base = found ? found->base : mmap(NULL, size, protection, MAP_SHARED, fd, (off_t)offset);
    /* Only the mapping itself, not later accesses, is ordered before what others do with it. */
    if (found) {
        cox_tsan_acquire(base);
        found->users++;
    } else if (shares && base != MAP_FAILED) {
        cox_tsan_release(base);
        struct region_shared *made = malloc(sizeof *made);
        COX_ASSERT(made);
        *made = (struct region_shared){
            shared, st.st_dev, st.st_ino, base, offset, size, (protection & PROT_WRITE) != 0, 1};
        shared = made;
    }
    atomic_flag_clear(&shared_lock);
    return base;
}

REGION_UNSEEN static void region_munmap(void *base, uint64_t size)
{
    shared_enter();
    struct region_shared **link = &shared;
    while (*link && (*link)->base != base)
        link = &(*link)->next;
    struct region_shared *found = *link;
    if (!found || --found->users == 0)
        munmap(base, size);
    if (found && found->users == 0) {
        *link = found->next;
        free(found);
    }
    atomic_flag_clear(&shared_lock);
}

/* The ranks that are threads write through the same mapping. */
REGION_UNSEEN static int region_mprotect(void *base, uint64_t size)
{
    shared_enter();
    const bool leave = shares;
    atomic_flag_clear(&shared_lock);
    return leave ? 0 : mprotect(base, size, PROT_READ);
}

#else

static int region_mprotect(void *base, uint64_t size)
{
    return mprotect(base, size, PROT_READ);
}

static void *region_mmap(int fd, uint64_t offset, uint64_t size, int protection)
{
    return mmap(NULL, size, protection, MAP_SHARED, fd, (off_t)offset);
}

static void region_munmap(void *base, uint64_t size)
{
    munmap(base, size);
}

#endif

static int region_name_check(const char *name, struct cox_error *err)
{
    if (name[0] != '/' || name[1] == '\0' || strchr(name + 1, '/'))
        return cox_fail(err, COX_INVALID,
                        "region name '%s': must be a slash and then no other slash", name);
    if (strlen(name + 1) > NAME_MAX)
        return cox_fail(err, COX_TOO_LARGE, "region name '%s' is too long: at most %d characters",
                        name, NAME_MAX);
    return 0;
}

int cox_region_space(struct cox_region_space *ret_space)
{
    struct statvfs vfs;
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) < 0)
        return -errno;
    ret_space->region = limit.rlim_cur == RLIM_INFINITY ? UINT64_MAX : limit.rlim_cur;
    if (statvfs("/dev/shm", &vfs) < 0)
        return -errno;
    /* A tmpfs without a limit (mount -o size=0, nr_inodes=0) reports 0 of 0. */
    ret_space->bytes = vfs.f_blocks ? (uint64_t)vfs.f_bavail * vfs.f_frsize : UINT64_MAX;
    ret_space->files = vfs.f_files ? vfs.f_favail : UINT64_MAX;
    return 0;
}

/* Checks RLIMIT_FSIZE. Not by trying, because the signal would end the host. */
static int region_check_limit(const char *what, const char *name, uint64_t size,
                              struct cox_error *err)
{
    struct cox_region_space space = {.region = UINT64_MAX};
    cox_region_space(&space);
    if (size > space.region)
        return cox_fail(err, COX_NO_SPACE,
                        "%s %s needs %" PRIu64 " bytes, a file may have %" PRIu64
                        " (ulimit -f): raise that limit or choose smaller regions",
                        what, name, size, space.region);
    if (size < CGROUP_SIZE_MIN)
        return 0;
    struct cox_cgroup cgroup;
    cox_cgroup_read("", &cgroup);
    if (cgroup.memory.state == COX_CGROUP_LIMITED && size > cgroup.memory.limit)
        return cox_fail(err, COX_NO_SPACE,
                        "%s %s needs %" PRIu64
                        " bytes, this process's control group may use %" PRIu64
                        " (%.400s), and the kernel would kill it: raise that limit or use less",
                        what, name, size, cgroup.memory.limit, cgroup.memory.file);
    return 0;
}

int cox_region_reserve_part(int fd, uint64_t offset, uint64_t size, const char *name,
                            struct cox_error *err)
{
    struct cox_region_space space = {0};
    int e;
    do
        e = posix_fallocate(fd, (off_t)offset, (off_t)size);
    while (e == EINTR);
    if (e == 0)
        return 0;
    if (e != ENOSPC && e != EFBIG)
        return cox_fail(err, -e, "region %s: reserving %" PRIu64 " bytes: %s", name, size,
                        cox_status_text(-e));
    cox_region_space(&space);
    return cox_fail(
        err, COX_NO_SPACE,
        "region %s needs %" PRIu64 " bytes of /dev/shm, %" PRIu64
        " are free: enlarge it (mount -o remount,size=...), free some, or choose smaller regions",
        name, size, space.bytes);
}

int cox_region_reserve(int fd, uint64_t size, const char *name, struct cox_error *err)
{
    int r = region_check_limit("region", name, size, err);
    return r ? r : cox_region_reserve_part(fd, 0, size, name, err);
}

/* Returns true if it never had a name and cannot get one. */
static bool region_has_seals(int fd)
{
    int seals = fcntl(fd, F_GET_SEALS);
    return seals >= 0 && (seals & F_SEAL_SHRINK);
}

int cox_region_check_fd(int fd, const char *name, struct cox_error *err)
{
    struct stat st;
    if (fstat(fd, &st) < 0)
        return cox_fail(err, -errno, "region %s: fstat: %s", name, cox_status_text(-errno));
    if (!S_ISREG(st.st_mode))
        return cox_fail(err, COX_DENIED, "region %s is not a regular file", name);
    if (st.st_uid != geteuid())
        return cox_fail(err, COX_DENIED, "region %s belongs to user %u, expected %u", name,
                        st.st_uid, geteuid());
    /* Sealed memory is reachable only through a process that has it, whatever its mode; and each
     * such process may change the mode to lock others out. */
    if ((st.st_mode & 07777) != 0600 && !region_has_seals(fd))
        return cox_fail(err, COX_DENIED, "region %s has mode %04o, expected 0600", name,
                        st.st_mode & 07777);
    if (st.st_nlink > 1)
        return cox_fail(err, COX_DENIED, "region %s has %ju links, expected 1", name,
                        (uintmax_t)st.st_nlink);
    return 0;
}

int cox_region_map_part(struct cox_region *region, int fd, uint64_t offset, uint64_t size,
                        enum cox_region_access access, const char *name, struct cox_error *err)
{
    int protection = access == COX_REGION_WRITE ? PROT_READ | PROT_WRITE : PROT_READ;
    void *map = region_mmap(fd, offset, size, protection);
    if (map == MAP_FAILED)
        return cox_fail(err, -errno, "region %s: mapping %" PRIu64 " bytes: %s", name, size,
                        cox_status_text(-errno));
    region->base = map;
    region->size = size;
    return 0;
}

int cox_region_protect(const struct cox_region *region)
{
    return region_mprotect(region->base, region->size) < 0 ? -errno : 0;
}

int cox_region_map(struct cox_region *region, int fd, uint64_t size, enum cox_region_access access,
                   const char *name, struct cox_error *err)
{
    return cox_region_map_part(region, fd, 0, size, access, name, err);
}

/* Creates an empty object under the name. *ret_fd is set also on failure if it is open: the caller
 * then removes the name. */
static int region_name(const char *name, int *ret_fd, struct cox_error *err)
{
    int r = region_name_check(name, err);
    if (r)
        return r;
    int fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0) {
        r = errno;
        if (r == EEXIST)
            return cox_fail(err, COX_TAKEN, "region %s exists already", name);
        return cox_fail(err, -r, "region %s: %s", name, cox_status_text(-r));
    }
    *ret_fd = fd;
    cox_fault_point(COX_FAULT_REGION_NAMED);
    return fchmod(fd, 0600) < 0 /* against an odd umask */
               ? cox_fail(err, -errno, "region %s: fchmod: %s", name, cox_status_text(-errno))
               : 0;
}

int cox_region_create(struct cox_region *region, const char *name, uint64_t size,
                      struct cox_error *err)
{
    _cox_cleanup_(cox_close_fd) int fd = -1;
    COX_ASSERT(size > 0);
    int r = region_name(name, &fd, err);
    if (r == 0)
        r = cox_region_reserve(fd, size, name, err);
    if (r == 0)
        r = cox_region_map(region, fd, size, COX_REGION_WRITE, name, err);
    if (r && fd >= 0)
        shm_unlink(name);
    cox_fault_point(COX_FAULT_REGION_CREATED);
    return r;
}

/* Returns 0 or -errno. */
static int region_resize(int fd, uint64_t size)
{
    int r;
    do
        r = ftruncate(fd, (off_t)size);
    while (r < 0 && errno == EINTR);
    return r < 0 ? -errno : 0;
}

int cox_region_create_sparse(const char *name, uint64_t size, int *ret_fd, struct cox_error *err)
{
    _cox_cleanup_(cox_close_fd) int fd = -1;
    int r = region_check_limit("region", name, size, err);
    if (r)
        return r;
    r = region_name(name, &fd, err);
    if (r == 0)
        r = cox_fd_raise(&fd);
    if (r == 0)
        r = region_resize(fd, size);
    if (r < 0)
        cox_fail(err, r, "region %s: %s", name, cox_status_text(r));
    if (r && fd >= 0)
        shm_unlink(name);
    cox_fault_point(COX_FAULT_REGION_CREATED);
    if (r == 0)
        *ret_fd = cox_steal_fd(&fd);
    return r;
}

/* A system may require memory that can never be executed (vm.memfd_noexec), or not know the flag.
 */
static int region_memfd_empty(const char *label, unsigned flags)
{
    int fd = memfd_create(label, flags | MFD_NOEXEC_SEAL);
    return fd < 0 && errno == EINVAL ? memfd_create(label, flags) : fd;
}

/* Returns -1, with errno, if the size, the kind of pages, or the memfd itself is not possible. */
static int region_memfd(const char *label, uint64_t size, unsigned flags)
{
    int fd = region_memfd_empty(label, flags);
    if (fd < 0)
        return -1;
    int e;
    do
        e = posix_fallocate(fd, 0, (off_t)size);
    while (e == EINTR);
    if (e == 0 && fchmod(fd, 0600) == 0)
        return fd;
    e = e ? e : errno;
    close(fd);
    errno = e;
    return -1;
}

/* region NULL: not mapped. */
static int region_create_memfd(struct cox_region *region, const char *label, uint64_t size,
                               unsigned flags, unsigned seals, int *ret_fd, struct cox_error *err)
{
    _cox_cleanup_(cox_close_fd) int fd =
        region_memfd(label, size, flags | MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) {
        const int e = errno;
        return cox_fail(err, e == ENOSPC || e == ENOMEM ? COX_NO_SPACE : -e,
                        "memory '%s' of %" PRIu64 " bytes: %s", label, size, cox_status_text(-e));
    }
    struct cox_region made = {0};
    int r = cox_fd_raise(&fd);
    if (r == 0 && region)
        r = cox_region_map(&made, fd, size, COX_REGION_WRITE, label, err);
    cox_fault_point(COX_FAULT_MEMORY_CREATED);
    if (r == 0 && fcntl(fd, F_ADD_SEALS, (int)seals) < 0)
        r = -errno;
    if (r) {
        cox_region_detach(&made);
        return cox_fail(err, r, "memory '%s': %s", label, cox_status_text(r));
    }
    if (region)
        *region = made;
    *ret_fd = cox_steal_fd(&fd);
    return 0;
}

int cox_region_create_unnamed(struct cox_region *region, const char *label, uint64_t size,
                              unsigned seals, bool huge, int *ret_fd, struct cox_error *err)
{
    struct cox_region_space space = {.region = UINT64_MAX};
    cox_region_space(&space);
    int r = region_check_limit("memory", label, size, err);
    if (r)
        return r;
    seals |= F_SEAL_SEAL;
    uint64_t rounded = (size + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    /* No huge pages are reserved or free, or there is no such file system: normal pages are used.
     */
    if (huge && rounded <= space.region &&
        region_create_memfd(region, label, rounded, MFD_HUGETLB | MFD_HUGE_2MB, seals, ret_fd,
                            NULL) == 0)
        return 0;
    return region_create_memfd(region, label, size, 0, seals, ret_fd, err);
}

int cox_region_open_reader(int fd, const char *label, int *ret_fd, struct cox_error *err)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int reader = open(path, O_RDONLY | O_CLOEXEC);
    int r = reader < 0 ? -errno : cox_fd_raise(&reader);
    if (r)
        return cox_fail(err, r, "memory '%s': opening it for reading (is /proc there?): %s", label,
                        cox_status_text(r));
    *ret_fd = reader;
    return 0;
}

int cox_region_create_unnamed_unmapped(const char *label, uint64_t size, unsigned seals,
                                       int *ret_fd, struct cox_error *err)
{
    const int r = region_check_limit("memory", label, size, err);
    return r ? r : region_create_memfd(NULL, label, size, 0, seals, ret_fd, err);
}

int cox_region_create_unnamed_sparse(const char *label, uint64_t size, unsigned seals, int *ret_fd,
                                     struct cox_error *err)
{
    int r = region_check_limit("memory", label, size, err);
    if (r)
        return r;
    _cox_cleanup_(cox_close_fd) int fd = region_memfd_empty(label, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    r = fd < 0 ? -errno : cox_fd_raise(&fd);
    if (r == 0)
        r = region_resize(fd, size);
    if (r == 0 && (fchmod(fd, 0600) < 0 || fcntl(fd, F_ADD_SEALS, (int)seals) < 0))
        r = -errno;
    cox_fault_point(COX_FAULT_MEMORY_CREATED);
    if (r)
        return cox_fail(err, r, "memory '%s' of %" PRIu64 " bytes: %s", label, size,
                        cox_status_text(r));
    *ret_fd = cox_steal_fd(&fd);
    return 0;
}

int cox_region_fill(int fd, uint64_t offset, const void *bytes, uint64_t size, const char *label,
                    struct cox_error *err)
{
    int r = 0;
    for (uint64_t done = 0; r == 0 && done < size;) {
        const ssize_t count =
            pwrite(fd, (const uint8_t *)bytes + done, size - done, (off_t)(offset + done));
        done += count > 0 ? (uint64_t)count : 0;
        if (count < 0 && errno != EINTR)
            r = -errno;
    }
    if (r == 0)
        return 0;
    return cox_fail(err, r == -ENOSPC || r == -ENOMEM ? COX_NO_SPACE : r,
                    "memory '%s' up to byte %" PRIu64 ": %s", label, offset + size,
                    cox_status_text(r));
}

static int region_seal_filled(int fd, const char *label, int *ret_fd, struct cox_error *err)
{
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL)) {
        const int r = -errno;
        return cox_fail(err, r, "memory '%s': %s", label, cox_status_text(r));
    }
    return cox_region_open_reader(fd, label, ret_fd, err);
}

int cox_region_create_unnamed_filled(const char *label, const struct iovec *parts, uint64_t size,
                                     int *ret_fd, struct cox_error *err)
{
    _cox_cleanup_(cox_close_fd) int fd = -1;
    int r = cox_region_create_unnamed_sparse(label, size, 0, &fd, err);
    for (uint64_t done = 0; r == 0 && done < size; done += parts++->iov_len)
        r = cox_region_fill(fd, done, parts->iov_base, parts->iov_len, label, err);
    return r ? r : region_seal_filled(fd, label, ret_fd, err);
}

int cox_region_replace(struct cox_region *region, int fd)
{
    void *map =
        mmap(region->base, region->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    return map == MAP_FAILED ? -errno : 0;
}

static int region_check_seals(int fd, const char *name, struct cox_error *err)
{
    const int all = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL;
    const int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0)
        return cox_fail(err, errno == EINVAL ? COX_DENIED : -errno,
                        "region %s cannot be sealed: %s", name, cox_status_text(-errno));
    if ((seals & all) != all)
        return cox_fail(
            err, COX_DENIED,
            "region %s has the seals %#x, expected %#x among them: another process could change it",
            name, (unsigned)seals, (unsigned)all);
    return 0;
}

int cox_region_attach_fd(struct cox_region *region, int fd, const char *name, uint64_t size_min,
                         enum cox_region_access access, struct cox_error *err)
{
    int r = cox_region_check_fd(fd, name, err);
    if (r == 0 && access == COX_REGION_SEALED)
        r = region_check_seals(fd, name, err);
    if (r)
        return r;
    struct stat st;
    if (fstat(fd, &st) < 0)
        return cox_fail(err, -errno, "region %s: fstat: %s", name, cox_status_text(-errno));
    if (st.st_size <= 0 || (uint64_t)st.st_size < size_min)
        return cox_fail(err, COX_CORRUPT, "region %s has %jd bytes, expected at least %" PRIu64,
                        name, (intmax_t)st.st_size, size_min);
    return cox_region_map(region, fd, (uint64_t)st.st_size, access, name, err);
}

int cox_region_open(const char *name, enum cox_region_access access, int *ret_fd,
                    struct cox_error *err)
{
    int r = region_name_check(name, err);
    if (r)
        return r;
    _cox_cleanup_(cox_close_fd) int fd = shm_open(
        name,
        (access == COX_REGION_WRITE ? O_RDWR : O_RDONLY) | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0);
    if (fd < 0) {
        r = errno;
        if (r == ENOENT)
            return cox_fail(err, COX_NOT_FOUND, "region %s does not exist", name);
        /* shm_open returns EINVAL for EISDIR; the name itself was checked above. */
        if (r == ELOOP || r == EACCES || r == EISDIR || r == EINVAL || r == ENXIO)
            return cox_fail(err, COX_DENIED, "region %s: %s", name,
                            r == ELOOP    ? "the name is a symbolic link"
                            : r == EINVAL ? "the name is a directory"
                                          : cox_status_text(-r));
        return cox_fail(err, -r, "region %s: %s", name, cox_status_text(-r));
    }
    r = cox_region_check_fd(fd, name, err);
    if (r)
        return r;
    r = cox_fd_raise(&fd);
    if (r)
        return cox_fail(err, r, "region %s: dup: %s", name, cox_status_text(r));
    *ret_fd = cox_steal_fd(&fd);
    return 0;
}

int cox_region_renew(struct cox_region *region, const char *name, struct cox_error *err)
{
    struct cox_region made = {0};
    _cox_cleanup_(cox_close_fd) int fd = -1;
    /* Released first: there may be no room for both. */
    madvise(region->base, region->size, MADV_REMOVE);
    cox_region_unlink(name); /* otherwise create returns COX_TAKEN */
    int r = cox_region_create(&made, name, region->size, err);
    if (r)
        return r;
    cox_region_detach(&made);
    r = cox_region_open(name, COX_REGION_WRITE, &fd, err);
    if (r == 0 && (r = cox_region_replace(region, fd)))
        cox_fail(err, r, "region %s: mapping it again: %s", name, cox_status_text(r));
    if (r)
        cox_region_unlink(name);
    cox_tsan_release(
        region->base); /* for threads that learn through a semaphore what it contains */
    cox_fault_point(COX_FAULT_REGION_RENEWED);
    return r;
}

int cox_region_attach(struct cox_region *region, const char *name, uint64_t size_min,
                      enum cox_region_access access, struct cox_error *err)
{
    _cox_cleanup_(cox_close_fd) int fd = -1;
    int r = cox_region_open(name, access, &fd, err);
    return r ? r : cox_region_attach_fd(region, fd, name, size_min, access, err);
}

void cox_region_detach(struct cox_region *region)
{
    if (region->base) {
        region_munmap(region->base, region->size);
        region->base = NULL;
        region->size = 0;
    }
}

int cox_region_unlink(const char *name)
{
    return shm_unlink(name) < 0 && errno != ENOENT ? -errno : 0;
}
