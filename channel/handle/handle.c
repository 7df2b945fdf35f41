#include "channel/base/base_internal.h"
#include "channel/base/fault.h"
#include "channel/base/handle_format.h"
#include "channel/base/idioms.h"
#include "channel/base/options.h"
#include "channel/base/peer.h"
#include "fd_store.h"
#include "handle_internal.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MAGIC 0x4843u /* "CH" */
#define LAYOUT_VERSION 1u

/* ---- bytes ---- */

static uint64_t load(const uint8_t *bytes, size_t size)
{
    uint64_t value = 0;
    for (size_t i = size; i-- > 0;)
        value = value << 8 | bytes[i];
    return value;
}

static void store(uint8_t *bytes, size_t size, uint64_t value)
{
    for (size_t i = 0; i < size; i++)
        bytes[i] = (uint8_t)(value >> 8 * i);
}

void cox_handle_format(const struct cox_handle_info *info, struct cox_handle *ret_handle)
{
    uint8_t *bytes = ret_handle->bytes;
    store(bytes + COX_HANDLE_AT_MAGIC, 2, MAGIC);
    store(bytes + COX_HANDLE_AT_VERSION, 1, LAYOUT_VERSION);
    store(bytes + COX_HANDLE_AT_KIND, 1, (uint64_t)info->kind);
    store(bytes + COX_HANDLE_AT_PID, 4, info->pid);
    store(bytes + COX_HANDLE_AT_START, 8, info->start);
    store(bytes + COX_HANDLE_AT_SYSTEM, 8, info->system);
    store(bytes + COX_HANDLE_AT_FD, 4, info->fd);
    store(bytes + COX_HANDLE_AT_DEV, 4, info->dev);
    store(bytes + COX_HANDLE_AT_INO, 8, info->ino);
    store(bytes + COX_HANDLE_AT_SIZE, 8, info->size);
    store(bytes + COX_HANDLE_AT_OFFSET, 8, info->offset);
    store(bytes + COX_HANDLE_AT_SERIAL, 4, info->serial);
    store(bytes + COX_HANDLE_AT_CRC, 4, cox_handle_crc(bytes, COX_HANDLE_AT_CRC));
}

/* Checks for numbers that no exporter writes, whatever the crc. */
static int info_check(const struct cox_handle_info *info, struct cox_error *err)
{
    if (info->kind != COX_HANDLE_MEMORY && info->kind != COX_HANDLE_OTHER)
        return cox_fail(err, COX_CORRUPT, "a handle of kind %d: expected %d or %d", (int)info->kind,
                        COX_HANDLE_MEMORY, COX_HANDLE_OTHER);
    if (info->pid == 0 || info->pid > INT32_MAX || info->fd > INT32_MAX)
        return cox_fail(err, COX_CORRUPT,
                        "a handle of fd %" PRIu32 " of process %" PRIu32 ": there cannot be one",
                        info->fd, info->pid);
    bool memory = info->kind == COX_HANDLE_MEMORY;
    if (memory != (info->size > 0) || (!memory && info->offset > 0) || info->size > INT64_MAX ||
        info->offset > INT64_MAX - info->size)
        return cox_fail(err, COX_CORRUPT,
                        "a handle of %s with %" PRIu64 " bytes from %" PRIu64
                        " on: there cannot be one",
                        memory ? "memory" : "something else", info->size, info->offset);
    return 0;
}

int cox_handle_parse(const struct cox_handle *handle, struct cox_handle_info *ret_info,
                     struct cox_error *err)
{
    uint8_t bytes[COX_HANDLE_SIZE]; /* the source may change meanwhile */
    memcpy(bytes, handle->bytes, sizeof bytes);
    uint64_t magic = load(bytes + COX_HANDLE_AT_MAGIC, 2),
             version = load(bytes + COX_HANDLE_AT_VERSION, 1);
    if (magic != MAGIC)
        return cox_fail(err, COX_CORRUPT,
                        "no handle: it begins with 0x%04" PRIx64 ", expected 0x%04x", magic, MAGIC);
    if (version != LAYOUT_VERSION)
        return cox_fail(err, COX_VERSION, "a handle of version %" PRIu64 ": this one reads %u",
                        version, LAYOUT_VERSION);
    uint32_t crc = cox_handle_crc(bytes, COX_HANDLE_AT_CRC),
             written = (uint32_t)load(bytes + COX_HANDLE_AT_CRC, 4);
    if (crc != written)
        return cox_fail(err, COX_CORRUPT,
                        "a damaged handle: its checksum is 0x%08" PRIx32
                        ", its bytes give 0x%08" PRIx32,
                        written, crc);
    const struct cox_handle_info info = {
        .kind = (enum cox_handle_kind)bytes[COX_HANDLE_AT_KIND],
        .pid = (uint32_t)load(bytes + COX_HANDLE_AT_PID, 4),
        .start = load(bytes + COX_HANDLE_AT_START, 8),
        .system = load(bytes + COX_HANDLE_AT_SYSTEM, 8),
        .fd = (uint32_t)load(bytes + COX_HANDLE_AT_FD, 4),
        .dev = (uint32_t)load(bytes + COX_HANDLE_AT_DEV, 4),
        .ino = load(bytes + COX_HANDLE_AT_INO, 8),
        .size = load(bytes + COX_HANDLE_AT_SIZE, 8),
        .offset = load(bytes + COX_HANDLE_AT_OFFSET, 8),
        .serial = (uint32_t)load(bytes + COX_HANDLE_AT_SERIAL, 4),
    };
    int r = info_check(&info, err);
    if (r == 0)
        *ret_info = info;
    return r;
}

/* ---- where this is ---- */

int cox_handle_reachable(const struct cox_handle_info *info, uint64_t system, struct cox_error *err)
{
    if (info->system == system)
        return 0;
    return cox_fail(
        err, COX_NOT_FOUND,
        "unreachable: the handle was made on another machine, before the last boot, or in another pid or time namespace (system %016" PRIx64
        ", here %016" PRIx64 ")",
        info->system, system);
}

/* ---- opening ---- */

enum cox_handle_kind cox_handle_kind_of(const struct stat *st)
{
    return S_ISREG(st->st_mode) ? COX_HANDLE_MEMORY : COX_HANDLE_OTHER;
}

/* Checks that the fd is what the handle names; then it is the caller's. */
static int fd_give(const struct cox_handle_info *info, int *fd, int *ret_fd, struct cox_error *err)
{
    struct stat st;
    cox_fault_point(COX_FAULT_HANDLE_TAKEN);
    int r = cox_fd_raise(fd);
    if (r == 0 && fstat(*fd, &st) < 0)
        r = -errno;
    if (r)
        return cox_fail(err, r, "an fd of process %" PRIu32 " cannot be kept: %s", info->pid,
                        cox_status_text(r));
    if (cox_handle_device_of(&st) != info->dev || st.st_ino != info->ino ||
        cox_handle_kind_of(&st) != info->kind)
        return cox_fail(err, COX_NOT_FOUND,
                        "fd %" PRIu32 " of process %" PRIu32
                        " is another object by now (inode %ju, the handle means %" PRIu64
                        "): the handle was put",
                        info->fd, info->pid, (uintmax_t)st.st_ino, info->ino);
    if (info->kind == COX_HANDLE_MEMORY && (uint64_t)st.st_size < info->offset + info->size)
        return cox_fail(err, COX_NOT_FOUND,
                        "the object has %jd bytes left, the handle means %" PRIu64
                        " bytes from %" PRIu64 " on: it was truncated",
                        (intmax_t)st.st_size, info->size, info->offset);
    *ret_fd = cox_steal_fd(fd);
    return 0;
}

static int fail_closed(const struct cox_handle_info *info, struct cox_error *err)
{
    return cox_fail(err, COX_NOT_FOUND,
                    "process %" PRIu32 " has no fd %" PRIu32 " any more: the handle was put",
                    info->pid, info->fd);
}

int cox_handle_fail_dead(const struct cox_handle_info *info, struct cox_error *err)
{
    return cox_fail(err, COX_PEER_DEAD,
                    "process %" PRIu32 ", started at %" PRIu64
                    ", which exported the handle, is gone",
                    info->pid, info->start);
}

int cox_handle_check_exporter(const struct cox_handle_info *info)
{
    uint64_t start;
    bool exiting = false;
    int r = cox_peer_start_time((pid_t)info->pid, &start);
    if (r == 0 && start != info->start)
        return COX_PEER_DEAD;
    if (r == 0)
        r = cox_peer_check_exiting((pid_t)info->pid, &exiting);
    return r == 0 && exiting ? COX_PEER_DEAD : r;
}

int cox_handle_open_own(const struct cox_handle_info *info, int *ret_fd, struct cox_error *err)
{
    _cox_cleanup_(cox_close_fd) int fd = fcntl((int)info->fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    if (fd < 0 && errno == EBADF)
        return fail_closed(info, err);
    if (fd < 0) {
        int e = errno;
        return cox_fail(err, -e, "fd %" PRIu32 " of this process: %s", info->fd,
                        cox_status_text(-e));
    }
    return fd_give(info, &fd, ret_fd, err);
}

int cox_handle_open_exporter(const struct cox_handle_info *info, struct cox_peer *ret_peer,
                             struct cox_error *err)
{
    struct cox_peer peer = COX_PEER_NONE;
    int r = cox_peer_open((pid_t)info->pid, info->start, &peer);
    if (cox_handle_way_closed(r))
        return r;
    /* A thread instead of a process: the pid was reused. */
    if (r == COX_PEER_DEAD || r == -EINVAL || r == -ENOENT)
        return cox_handle_fail_dead(info, err);
    if (r)
        return cox_fail(err, r, "process %" PRIu32 " cannot be looked at: %s", info->pid,
                        cox_status_text(r));
    /* cox_peer_open accepts any process for start 0. */
    if (peer.start != info->start) {
        cox_peer_close(&peer);
        return cox_handle_fail_dead(info, err);
    }
    *ret_peer = peer;
    return 0;
}

int cox_handle_open_pidfd(const struct cox_handle_info *info, const struct cox_peer *peer,
                          int *ret_fd, struct cox_error *err)
{
    _cox_cleanup_(cox_close_fd) int fd =
        (int)syscall(SYS_pidfd_getfd, peer->pidfd, (int)info->fd, 0);
    int e = fd < 0 ? errno : 0;
    if (cox_handle_way_closed(-e))
        return -e;
    /* An exiting process has no fds left: EBADF, or ESRCH since Linux 6.9. */
    if (e == ESRCH || (e == EBADF && !cox_peer_alive(peer)))
        return cox_handle_fail_dead(info, err);
    if (e == EBADF)
        return fail_closed(info, err);
    if (e)
        return cox_fail(err, -e, "fd %" PRIu32 " of process %" PRIu32 ": %s", info->fd, info->pid,
                        cox_status_text(-e));
    return fd_give(info, &fd, ret_fd, err);
}

/* The access mode of an fd of another process: the permissions of its link in /proc are those. */
static int link_access_mode(const struct stat *link)
{
    return !(link->st_mode & S_IWUSR) ? O_RDONLY : link->st_mode & S_IRUSR ? O_RDWR : O_WRONLY;
}

int cox_handle_open_proc(const struct cox_handle_info *info, int *ret_fd, struct cox_error *err)
{
    /* O_NONBLOCK: what the fd is may change after the check of its type. */
    const int flags = O_CLOEXEC | O_NOCTTY | O_NONBLOCK;
    _cox_cleanup_(cox_close_fd) int fd = -1;
    struct stat link, object;
    char path[64];
    if (info->kind != COX_HANDLE_MEMORY)
        return -EACCES;
    snprintf(path, sizeof path, "/proc/%" PRIu32 "/fd/%" PRIu32, info->pid, info->fd);
    int r = lstat(path, &link) < 0 || stat(path, &object) < 0 ? -errno : 0;
    if (r == 0 && cox_handle_kind_of(&object) == COX_HANDLE_MEMORY) {
        fd = open(path, link_access_mode(&link) | flags);
        r = fd < 0 ? -errno : 0;
    } else if (r == 0) {
        r = -ENOENT;
    }
    /* Afterwards: if the process with this pid is the exporter now, it was so all the time. */
    int alive = cox_handle_check_exporter(info);
    if (alive == COX_PEER_DEAD)
        return cox_handle_fail_dead(info, err);
    if (r == -ENOENT && alive == 0)
        return fail_closed(info, err);
    if (r == 0)
        r = alive;
    if (r == 0)
        return fd_give(info, &fd, ret_fd, err);
    /* ENOENT: /proc hides the exporter. ENXIO: memory that cannot be opened (memfd_secret). */
    if (cox_handle_way_closed(r) || r == -ENOENT || r == -ENXIO)
        return -EACCES;
    return cox_fail(err, r, "%s: %s", path, cox_status_text(r));
}

static int fail_no_way(const struct cox_handle_info *info, int closed, const char *control_socket,
                       struct cox_error *err)
{
    char why[512];
    if (closed == -ENOSYS)
        return cox_fail(err, COX_UNSUPPORTED,
                        "fd %" PRIu32 " of process %" PRIu32
                        ": this kernel has no pidfd_getfd (Linux 5.6 has it), and %s",
                        info->fd, info->pid, control_socket);
    cox_handle_explain_denied((pid_t)info->pid, why, sizeof why);
    return cox_fail(err, COX_DENIED,
                    "fd %" PRIu32 " of process %" PRIu32 ": taking it is denied (%s), and %s%s",
                    info->fd, info->pid, cox_status_text(closed), control_socket, why);
}

/* The last way; `control_socket` says what came of the one before. */
static int open_last(const struct cox_handle_info *info, int closed, const char *control_socket,
                     int *ret_fd, struct cox_error *err)
{
    int r = cox_handle_open_proc(info, ret_fd, err);
    if (!cox_handle_way_closed(r))
        return r;
    /* It may have died since, so that the control socket has no entry. */
    if (cox_handle_check_exporter(info) == COX_PEER_DEAD)
        return cox_handle_fail_dead(info, err);
    return fail_no_way(info, closed, control_socket, err);
}

int cox_handle_open_denied(const struct cox_handle *handle, const struct cox_handle_info *info,
                           const char *socket_path, uint64_t deadline_ns, int closed, int *ret_fd,
                           enum cox_handle_way *ret_way, struct cox_error *err)
{
    struct cox_fd_store fd_store = {.fd = -1};
    struct cox_error control_socket = {0};
    char text[512];
    _cox_cleanup_(cox_close_fd) int fd = -1;
    /* Without pidfds this was not checked yet. */
    int r = cox_handle_check_exporter(info);
    if (r == COX_PEER_DEAD)
        return cox_handle_fail_dead(info, err);
    if (r && !cox_handle_way_closed(r))
        return cox_fail(err, r, "whether process %" PRIu32 " lives is unknown: %s", info->pid,
                        cox_status_text(r));
    *ret_way = socket_path ? COX_HANDLE_BY_SOCKET : COX_HANDLE_BY_PROC;
    if (!socket_path)
        return open_last(info, closed, "no control socket was named that may have it", ret_fd, err);
    r = cox_fd_store_connect(&fd_store, socket_path, deadline_ns, &control_socket);
    if (r == 0)
        r = cox_fd_store_get(&fd_store, handle, deadline_ns, &fd, &control_socket);
    cox_fd_store_close(&fd_store);
    if (r == 0)
        return fd_give(info, &fd, ret_fd, err);
    *ret_way = COX_HANDLE_BY_PROC;
    const char *why = control_socket.text[0] ? control_socket.text : cox_status_text(r);
    if (r == COX_TIMEOUT || r < 0) {
        int last = cox_handle_open_proc(info, ret_fd, err);
        return cox_handle_way_closed(last)
                   ? cox_fail(err, r, "the control socket %s: %s", socket_path, why)
                   : last;
    }
    snprintf(text, sizeof text, "the control socket %.160s does not help: %.300s", socket_path,
             why);
    cox_text_trim(text);
    return open_last(info, closed, text, ret_fd, err);
}

static int open_foreign(const struct cox_handle *handle, const struct cox_handle_info *info,
                        const char *socket_path, uint64_t deadline_ns, int *ret_fd,
                        enum cox_handle_way *ret_way, struct cox_error *err)
{
    struct cox_peer peer = COX_PEER_NONE;
    int r = cox_handle_open_exporter(info, &peer, err);
    if (r == 0)
        r = cox_handle_open_pidfd(info, &peer, ret_fd, err);
    cox_peer_close(&peer);
    *ret_way = COX_HANDLE_BY_PIDFD;
    if (!cox_handle_way_closed(r))
        return r;
    return cox_handle_open_denied(handle, info, socket_path, deadline_ns, r, ret_fd, ret_way, err);
}

int cox_handle_open_way(const struct cox_handle *handle, const char *socket_path,
                        uint64_t deadline_ns, int *ret_fd, enum cox_handle_way *ret_way,
                        struct cox_error *err)
{
    const struct cox_handle copy = *handle;
    struct cox_handle_info info;
    uint64_t system;
    int r = cox_handle_parse(&copy, &info, err);
    if (r == 0)
        r = cox_handle_system(&system, err);
    if (r == 0)
        r = cox_handle_reachable(&info, system, err);
    if (r)
        return r;
    if ((pid_t)info.pid != getpid())
        return open_foreign(&copy, &info, socket_path, deadline_ns, ret_fd, ret_way, err);
    struct cox_handle_self self;
    r = cox_handle_self_load(&self, err);
    if (r)
        return r;
    if (self.start != info.start) /* the pid was reused by this process */
        return cox_handle_fail_dead(&info, err);
    *ret_way = COX_HANDLE_BY_DUP;
    return cox_handle_open_own(&info, ret_fd, err);
}

int cox_handle_open(const struct cox_handle *handle, const char *socket_path, uint64_t deadline_ns,
                    int *ret_fd, struct cox_error *err)
{
    enum cox_handle_way way;
    int r = socket_path ? cox_deadline_check(deadline_ns, err) : 0; /* not used without */
    return r ? r : cox_handle_open_way(handle, socket_path, deadline_ns, ret_fd, &way, err);
}
