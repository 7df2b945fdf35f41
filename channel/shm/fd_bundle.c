#include "fd_bundle.h"

#include "channel/base/base_internal.h"
#include "channel/base/idioms.h"

#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

void cox_fd_bundle_init(struct cox_fd_bundle *bundle)
{
    for (int i = 0; i < COX_FD_BUNDLE_COUNT; i++)
        bundle->fds[i] = -1;
    bundle->count = 0;
    bundle->notify_fd = -1;
}

void cox_fd_bundle_close(struct cox_fd_bundle *bundle)
{
    for (int i = 0; i < COX_FD_BUNDLE_COUNT; i++)
        cox_close_fd(&bundle->fds[i]);
    cox_close_fd(&bundle->notify_fd);
}

/* Wrong numbers may name fds of the host: fds that cannot be memory of a group are left alone.
 * Their content is checked when they are attached. */
static int bundle_check_one(int fd, struct cox_error *err)
{
    struct stat st;
    if (fstat(fd, &st) < 0)
        return errno == EBADF
                   ? cox_fail(
                         err, COX_INVALID,
                         "fd %d, said to be handed down, is not open: a wrapper around the worker has to pass it on",
                         fd)
                   : cox_fail(err, -errno, "fd %d, said to be handed down: fstat: %s", fd,
                              cox_status_text(-errno));
    if (!S_ISREG(st.st_mode) || st.st_uid != geteuid() || st.st_size <= 0)
        return cox_fail(
            err, COX_DENIED,
            "fd %d, said to be handed down, is no memory of a group: expected a file with something in it that belongs to user %u",
            fd, geteuid());
    return 0;
}

static int bundle_check_notify(int fd, struct cox_error *err)
{
    struct stat st;
    if (fstat(fd, &st) < 0)
        return errno == EBADF
                   ? cox_fail(
                         err, COX_INVALID,
                         "fd %d (COXSWAIN_NOTIFY_FD) is not open: a wrapper around the worker has to pass it on",
                         fd)
                   : cox_fail(err, -errno, "fd %d (COXSWAIN_NOTIFY_FD): fstat: %s", fd,
                              cox_status_text(-errno));
    /* Anonymous inodes of the kernel have no type. */
    return st.st_mode & S_IFMT
               ? cox_fail(err, COX_DENIED,
                          "fd %d (COXSWAIN_NOTIFY_FD) is a file: expected an eventfd", fd)
               : 0;
}

int cox_fd_bundle_take_notify(struct cox_fd_bundle *bundle, int fd, struct cox_error *err)
{
    int r = bundle_check_notify(fd, err);
    if (r)
        return r;
    if (fcntl(fd, F_SETFD, FD_CLOEXEC) < 0)
        return cox_fail(err, -errno, "fd %d: %s", fd, cox_status_text(-errno));
    bundle->notify_fd = fd;
    return 0;
}

static int bundle_check_count(uint32_t count, struct cox_error *err)
{
    const struct cox_attach_mode *mode;
    return cox_attach_of_fd_count(count, &mode, err);
}

int cox_fd_bundle_take(struct cox_fd_bundle *bundle, int first, uint32_t count,
                       struct cox_error *err)
{
    cox_fd_bundle_init(bundle);
    int r = bundle_check_count(count, err);
    if (r)
        return r;
    if (first < 0 || first > INT_MAX - COX_FD_BUNDLE_COUNT)
        return cox_fail(err, COX_INVALID, "fds from %d on cannot be handed down", first);
    for (int i = 0; i < (int)count; i++) {
        r = bundle_check_one(first + i, err);
        if (r)
            return r;
    }
    for (int i = 0; i < (int)count; i++)
        if (fcntl(first + i, F_SETFD, FD_CLOEXEC) < 0)
            return cox_fail(err, -errno, "fd %d: %s", first + i, cox_status_text(-errno));
    for (int i = 0; i < (int)count; i++)
        bundle->fds[i] = first + i;
    bundle->count = count;
    return 0;
}

int cox_fd_bundle_adopt(struct cox_fd_bundle *bundle, int *fds, uint32_t count,
                        struct cox_error *err)
{
    cox_fd_bundle_init(bundle);
    /* One more than any group has: the eventfd. */
    const bool notifies =
        bundle_check_count(count, NULL) && count > 0 && bundle_check_count(count - 1, NULL) == 0;
    count -= notifies;
    int r = bundle_check_count(count, err);
    for (uint32_t i = 0; r == 0 && i < count; i++)
        r = bundle_check_one(fds[i], err);
    if (r == 0 && notifies)
        r = bundle_check_notify(fds[count], err);
    if (notifies && r)
        cox_close_fd(&fds[count]);
    else if (notifies)
        bundle->notify_fd = cox_steal_fd(&fds[count]);
    for (uint32_t i = 0; i < count; i++) {
        if (r)
            cox_close_fd(&fds[i]);
        else
            bundle->fds[i] = cox_steal_fd(&fds[i]);
    }
    bundle->count = r ? 0 : count;
    return r;
}
