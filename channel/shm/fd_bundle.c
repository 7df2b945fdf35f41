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

/* file: the prefix of the name in /dev/shm, "" or "sem.". */
static int bundle_open_one(int *fd, const char *file, const char *object, int flags,
                           struct cox_error *err)
{
    char path[COX_OBJECT_NAME_SIZE + 32];
    snprintf(path, sizeof path, "/dev/shm/%s%s", file, object + 1);
    *fd = open(path, flags | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    int r = *fd < 0 ? -errno : cox_fd_raise(fd);
    return r ? cox_fail(err, r, "%s: %s", path, cox_status_text(r)) : 0;
}

int cox_fd_bundle_open(struct cox_fd_bundle *bundle, const char *name,
                       const struct cox_geometry *geometry, struct cox_error *err)
{
    char object[COX_OBJECT_NAME_SIZE];
    cox_fd_bundle_init(bundle);
    int r = bundle_open_one(&bundle->fds[COX_FD_BUNDLE_CONTROL], "", cox_name_control(object, name),
                            O_RDWR, err);
    for (int c = 0; r == 0 && c < COX_CHANNEL_COUNT; c++) {
        enum cox_channel_id channel = (enum cox_channel_id)c;
        if (geometry->channels[c].request_size)
            r = bundle_open_one(&bundle->fds[cox_fd_bundle_request(channel)], "",
                                cox_name_request(object, name, channel), O_RDONLY, err);
        if (r == 0)
            r = bundle_open_one(&bundle->fds[cox_fd_bundle_response(channel)], "",
                                cox_name_response(object, name, channel), O_RDWR, err);
    }
    for (int b = 0; r == 0 && b < COX_WAKEUP_COUNT; b++) {
        enum cox_wakeup wakeup = (enum cox_wakeup)b;
        if (cox_wakeup_exists(COX_CHANNEL_ERROR, wakeup))
            r = bundle_open_one(&bundle->fds[cox_fd_bundle_wakeup(COX_CHANNEL_ERROR, wakeup)],
                                "sem.", cox_name_wakeup(object, name, COX_CHANNEL_ERROR, wakeup, 0),
                                O_RDWR, err);
    }
    if (r == 0)
        r = bundle_open_one(&bundle->fds[COX_FD_BUNDLE_GROUP], "", cox_name_group(object, name),
                            O_RDWR, err);
    bundle->count = COX_FD_BUNDLE_COUNT;
    if (r)
        cox_fd_bundle_close(bundle);
    return r;
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
    return count == COX_FD_BUNDLE_COUNT || count == COX_SEALED_FD_COUNT
               ? 0
               : cox_fail(
                     err, COX_INVALID,
                     "%" PRIu32
                     " fds are handed down, expected %d, or %d in a sealed group: coordinator and worker are of different versions",
                     count, COX_FD_BUNDLE_COUNT, COX_SEALED_FD_COUNT);
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
    const bool notifies = count == COX_FD_BUNDLE_COUNT + 1 || count == COX_SEALED_FD_COUNT + 1;
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

int cox_fd_bundle_attach(const struct cox_fd_bundle *bundle, struct cox_channel *channel,
                         const struct cox_control *control, enum cox_channel_id id, uint32_t rank,
                         struct cox_error *err)
{
    const struct cox_layout_channel *sizes = &control->geometry.channels[id];
    struct cox_channel made = {.id = id, .control = control};
    int wakeups[COX_WAKEUP_COUNT], r = 0;
    for (int b = 0; b < COX_WAKEUP_COUNT; b++)
        wakeups[b] = cox_wakeup_exists(id, (enum cox_wakeup)b)
                         ? bundle->fds[cox_fd_bundle_wakeup(id, (enum cox_wakeup)b)]
                         : -1;
    if (sizes->request_size)
        r = cox_region_attach_fd(&made.request, bundle->fds[cox_fd_bundle_request(id)],
                                 cox_channel_name(id), sizes->request_size, COX_REGION_READ, err);
    if (r == 0)
        r = cox_region_attach_fd(&made.response, bundle->fds[cox_fd_bundle_response(id)],
                                 cox_channel_name(id), sizes->response_size, COX_REGION_WRITE, err);
    if (r == 0)
        r = cox_gate_attach_fds(&made.gate, wakeups, id, rank, err);
    if (r) {
        cox_channel_close(&made);
        return r;
    }
    made.gate.credits = cox_channel_has_credits(&made);
    *channel = made;
    return 0;
}
