#include "semaphore.h"

#include "base_internal.h"
#include "fault.h"
#include "idioms.h"

#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

/* glibc keeps `/name` as this file. */
static int semaphore_path(const char *name, char *path, size_t path_size, struct cox_error *err)
{
    if (name[0] != '/' || name[1] == '\0' || strchr(name + 1, '/'))
        return cox_fail(err, COX_INVALID,
                        "semaphore name '%s': must be a slash and then no other slash", name);
    int length = snprintf(path, path_size, "/dev/shm/sem.%s", name + 1);
    if (length < 0 || (size_t)length >= path_size || strlen(name + 1) + 4 > NAME_MAX)
        return cox_fail(err, COX_TOO_LARGE,
                        "semaphore name '%s' is too long: at most %d characters", name,
                        NAME_MAX - 4);
    return 0;
}

static int semaphore_map(struct cox_semaphore *semaphore, int fd, const char *name,
                         struct cox_error *err)
{
    void *map = mmap(NULL, sizeof(sem_t), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED)
        return cox_fail(err, -errno, "semaphore %s: mmap: %s", name, cox_status_text(-errno));
    semaphore->sem = map;
    return 0;
}

/* Creates the complete file without a name. sem_init fills ordinary memory here; its bytes are
 * those of a named semaphore's file. */
static int semaphore_make(const char *name, unsigned value, int *ret_fd, struct cox_error *err)
{
    _cox_cleanup_(cox_close_fd) int fd = open("/dev/shm", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0)
        return cox_fail(err, -errno, "semaphore %s: cannot create in /dev/shm: %s", name,
                        cox_status_text(-errno));
    int r = cox_fd_raise(&fd);
    if (r)
        return cox_fail(err, r, "semaphore %s: dup: %s", name, cox_status_text(r));
    sem_t content;
    memset(&content, 0, sizeof content);
    if (sem_init(&content, 1, value) < 0)
        return cox_fail(err, -errno, "semaphore %s: %s", name, cox_status_text(-errno));
    if (fchmod(fd, 0600) < 0) /* against an odd umask */
        return cox_fail(err, -errno, "semaphore %s: fchmod: %s", name, cox_status_text(-errno));
    ssize_t written = write(fd, &content, sizeof content);
    if (written != (ssize_t)sizeof content) {
        struct statvfs fs = {0};
        r = written < 0 ? -errno : -ENOSPC;
        if (r != -ENOSPC || statvfs("/dev/shm", &fs) < 0)
            return cox_fail(err, r, "semaphore %s: %s", name, cox_status_text(r));
        return cox_fail(err, r,
                        "semaphore %s: %s: a page of %lu bytes is needed in /dev/shm, %ju are free",
                        name, cox_status_text(r), (unsigned long)fs.f_frsize,
                        (uintmax_t)fs.f_bavail * fs.f_frsize);
    }
    cox_fault_point(COX_FAULT_SEMAPHORE_FILLED);
    *ret_fd = cox_steal_fd(&fd);
    return 0;
}

int cox_semaphore_create(struct cox_semaphore *semaphore, const char *name, unsigned value,
                         struct cox_error *err)
{
    char path[NAME_MAX + 32];
    int r = semaphore_path(name, path, sizeof path, err);
    if (r)
        return r;
    /* Linked at the end: sem_open would create a temporary name, which a kill in between would
     * leave for ever. */
    _cox_cleanup_(cox_close_fd) int fd = -1;
    r = semaphore_make(name, value, &fd, err);
    if (r)
        return r;
    char self[64];
    snprintf(self, sizeof self, "/proc/self/fd/%d", fd);
    if (linkat(AT_FDCWD, self, AT_FDCWD, path, AT_SYMLINK_FOLLOW) < 0) {
        r = errno;
        if (r == EEXIST)
            return cox_fail(err, COX_TAKEN, "semaphore %s exists already", name);
        return cox_fail(err, -r, "semaphore %s: %s", name, cox_status_text(-r));
    }
    cox_fault_point(COX_FAULT_SEMAPHORE_LINKED);
    r = semaphore_map(semaphore, fd, name, err);
    if (r)
        unlink(path);
    return r;
}

int cox_semaphore_renew(struct cox_semaphore *semaphore, const char *name, unsigned value,
                        int *ret_fd, struct cox_error *err)
{
    _cox_cleanup_(cox_close_fd) int fd = -1;
    int r = semaphore_make(name, value, &fd, err);
    if (r)
        return r;
    if (mmap(semaphore->sem, sizeof(sem_t), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
             0) == MAP_FAILED)
        return cox_fail(err, -errno, "semaphore %s: mmap: %s", name, cox_status_text(-errno));
    cox_fault_point(COX_FAULT_SEMAPHORE_RENEWED);
    *ret_fd = cox_steal_fd(&fd);
    return 0;
}

static int semaphore_check_fd(int fd, const char *name, struct cox_error *err)
{
    struct stat st;
    if (fstat(fd, &st) < 0)
        return cox_fail(err, -errno, "semaphore %s: fstat: %s", name, cox_status_text(-errno));
    if (!S_ISREG(st.st_mode))
        return cox_fail(err, COX_DENIED, "semaphore %s is not a regular file", name);
    if (st.st_uid != geteuid())
        return cox_fail(err, COX_DENIED, "semaphore %s belongs to user %u, expected %u", name,
                        st.st_uid, geteuid());
    if ((st.st_mode & 07777) != 0600)
        return cox_fail(err, COX_DENIED, "semaphore %s has mode %04o, expected 0600", name,
                        st.st_mode & 07777);
    if (st.st_nlink > 1)
        return cox_fail(err, COX_DENIED, "semaphore %s has %ju links, expected 1", name,
                        (uintmax_t)st.st_nlink);
    if (st.st_size != (off_t)sizeof(sem_t))
        return cox_fail(err, COX_DENIED, "semaphore %s has %jd bytes, expected %zu", name,
                        (intmax_t)st.st_size, sizeof(sem_t));
    return 0;
}

int cox_semaphore_attach_fd(struct cox_semaphore *semaphore, int fd, const char *name,
                            struct cox_error *err)
{
    int r = semaphore_check_fd(fd, name, err);
    return r ? r : semaphore_map(semaphore, fd, name, err);
}

int cox_semaphore_attach(struct cox_semaphore *semaphore, const char *name, struct cox_error *err)
{
    char path[NAME_MAX + 32];
    int r = semaphore_path(name, path, sizeof path, err);
    if (r)
        return r;
    _cox_cleanup_(cox_close_fd) int fd = open(path, O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        r = errno;
        if (r == ENOENT)
            return cox_fail(err, COX_NOT_FOUND, "semaphore %s does not exist", name);
        if (r == ELOOP || r == EACCES || r == ENXIO || r == EISDIR)
            return cox_fail(err, COX_DENIED, "semaphore %s: %s", name,
                            r == ELOOP ? "the name is a symbolic link" : cox_status_text(-r));
        return cox_fail(err, -r, "semaphore %s: %s", name, cox_status_text(-r));
    }
    return cox_semaphore_attach_fd(semaphore, fd, name, err);
}

void cox_semaphore_detach(struct cox_semaphore *semaphore)
{
    if (semaphore->sem) {
        munmap(semaphore->sem, sizeof(sem_t));
        semaphore->sem = NULL;
    }
}

int cox_semaphore_unlink(const char *name)
{
    return sem_unlink(name) < 0 && errno != ENOENT ? -errno : 0;
}
