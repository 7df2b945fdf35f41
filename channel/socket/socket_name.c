/* Names of sockets; the other half of socket.h. */
#include "channel/base/base_internal.h"
#include "channel/base/idioms.h"
#include "runtime_dir.h"
#include "socket.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define BACKLOG 128

/* Opens the folder of path; *ret_file points into path. */
static int name_find(const char *path, int *ret_runtime_dir_fd, const char **ret_file,
                     struct cox_error *err)
{
    char runtime_dir[PATH_MAX];
    const char *slash = strrchr(path, '/'), *file = slash ? slash + 1 : path;
    size_t size = slash ? (size_t)(slash - path) : 0;
    if (size >= sizeof runtime_dir || file[0] == '\0' || strlen(file) >= COX_RUNTIME_DIR_FILE_SIZE)
        return cox_fail(
            err, COX_INVALID,
            "the path of a socket has a folder of %zu bytes and a name of %zu: expected less than %zu, and 1 to %zu",
            size, strlen(file), sizeof runtime_dir, COX_RUNTIME_DIR_FILE_SIZE - 1);
    memcpy(runtime_dir, path, size);
    runtime_dir[size] = '\0';
    const char *where = slash == path ? "/" : slash ? runtime_dir : ".";
    int fd = open(where, O_PATH | O_DIRECTORY | O_CLOEXEC);
    int e = fd < 0 ? errno : 0;
    if (e == ENOENT)
        return cox_fail(err, COX_NOT_FOUND, "%s: no such folder", where);
    if (e == ENOTDIR || e == EACCES)
        return cox_fail(err, COX_DENIED, "%s: %s%s", where, cox_status_text(-e),
                        e == EACCES ? cox_runtime_dir_remedy(where) : "");
    if (e == 0)
        e = -cox_fd_raise(&fd);
    if (e)
        return cox_fail(err, -e, "%s: %s", where, cox_status_text(-e));
    *ret_runtime_dir_fd = fd;
    *ret_file = file;
    return 0;
}

int cox_socket_listen(const char *path, int *ret_fd, struct cox_error *err)
{
    _cox_cleanup_(cox_close_fd) int runtime_dir_fd = -1, fd = -1;
    struct sockaddr_un address;
    const char *file = NULL;
    int r = name_find(path, &runtime_dir_fd, &file, err);
    if (r)
        return r;
    cox_runtime_dir_address(runtime_dir_fd, file, &address);
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    r = fd < 0 ? -errno : cox_fd_raise(&fd);
    /* The file gets the mode of the socket, minus the umask: never more than this. */
    if (r == 0 && fchmod(fd, 0600) < 0)
        r = -errno;
    if (r)
        return cox_fail(err, r, "%s: %s", path, cox_status_text(r));
    if (bind(fd, (const struct sockaddr *)&address, sizeof address) < 0) {
        int e = errno;
        if (e == EADDRINUSE)
            return cox_fail(err, COX_TAKEN, "%s is there already: expected nothing", path);
        return cox_fail(err, e == EACCES ? COX_DENIED : -e, "%s: %s", path, cox_status_text(-e));
    }
    if (fchmodat(runtime_dir_fd, file, 0600, 0) < 0 || listen(fd, BACKLOG) < 0) {
        r = -errno;
        unlinkat(runtime_dir_fd, file, 0);
        return cox_fail(err, r, "%s: %s", path, cox_status_text(r));
    }
    *ret_fd = cox_steal_fd(&fd);
    return 0;
}

int cox_socket_accept(int listen_fd, uint64_t deadline_ns, int *ret_fd)
{
    for (;;) {
        int r = cox_socket_wait(listen_fd, POLLIN, deadline_ns);
        if (r)
            return r;
        _cox_cleanup_(cox_close_fd) int fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC);
        r = fd < 0 ? -errno : cox_fd_raise(&fd);
        /* Another thread may have accepted it, or it has gone. */
        if (r == -EAGAIN || r == -EINTR || r == -ECONNABORTED)
            continue;
        if (r == 0)
            *ret_fd = cox_steal_fd(&fd);
        return r;
    }
}

int cox_socket_connect(const char *path, uint64_t deadline_ns, int *ret_fd, struct cox_error *err)
{
    _cox_cleanup_(cox_close_fd) int runtime_dir_fd = -1, fd = -1;
    const char *file = NULL;
    int r = name_find(path, &runtime_dir_fd, &file, err);
    if (r)
        return r;
    r = cox_runtime_dir_connect(runtime_dir_fd, file, deadline_ns, &fd);
    switch (r) {
    case 0:
        r = cox_runtime_dir_check_listener(fd, path, false, err);
        if (r == 0)
            *ret_fd = cox_steal_fd(&fd);
        return r;
    case COX_TIMEOUT:
        return cox_fail(err, r, "%s: so many wait there that the time was over", path);
    case -ENOENT:
        return cox_fail(err, COX_NOT_FOUND, "%s: no such socket", path);
    case -ECONNREFUSED: { /* also for a file that is not a socket */
        struct stat st;
        if (fstatat(runtime_dir_fd, file, &st, 0) == 0 && !S_ISSOCK(st.st_mode))
            return cox_fail(err, COX_DENIED, "%s is no socket", path);
        return cox_fail(err, COX_CLOSED, "%s: no process listens there any more", path);
    }
    case -EACCES:
    case -EPERM:
        return cox_fail(err, COX_DENIED, "%s: %s%s", path, cox_status_text(r),
                        cox_runtime_dir_remedy(path));
    default:
        return cox_fail(err, r, "%s: %s", path, cox_status_text(r));
    }
}

int cox_socket_unlink(const char *path, struct cox_error *err)
{
    _cox_cleanup_(cox_close_fd) int runtime_dir_fd = -1;
    const char *file = NULL;
    struct stat st;
    int r = name_find(path, &runtime_dir_fd, &file, err);
    if (r)
        return r;
    if (fstatat(runtime_dir_fd, file, &st, AT_SYMLINK_NOFOLLOW) == 0) {
        if (!S_ISSOCK(st.st_mode))
            return cox_fail(err, COX_DENIED, "%s is no socket", path);
        if (unlinkat(runtime_dir_fd, file, 0) == 0)
            return 0;
    }
    return errno == ENOENT ? 0 : cox_fail(err, -errno, "%s: %s", path, cox_status_text(-errno));
}
