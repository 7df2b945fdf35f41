#include "runtime_dir.h"

#include "channel/base/base_internal.h"
#include "channel/base/fault.h"
#include "channel/base/hash.h"
#include "channel/base/idioms.h"
#include "channel/base/peer.h"
#include "socket.h"

#include <assert.h>
#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define SOCKET_END ".sock"
/* The start of a shortened name; then follow '~', which no name contains, 16 digits and the end. */
#define NAME_START_SIZE 48
#define MODE 0700
/* Names of fds in /proc. */
#define FD_PATH_SIZE 32

static_assert(NAME_START_SIZE + 1 + 16 + sizeof SOCKET_END <= COX_RUNTIME_DIR_FILE_SIZE,
              "a shortened name fits");
static_assert(sizeof COX_RUNTIME_DIR_NEW_FILE <= COX_RUNTIME_DIR_FILE_SIZE,
              "the new file's name fits");

/* ---- names ---- */

__attribute__((format(printf, 3, 4))) static int path_format(char buffer[COX_SOCKET_PATH_SIZE],
                                                             struct cox_error *err,
                                                             const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int length = vsnprintf(buffer, COX_SOCKET_PATH_SIZE, format, args);
    va_end(args);
    if (length >= COX_SOCKET_PATH_SIZE)
        return cox_fail(
            err, COX_TOO_LARGE,
            "COXSWAIN_RUNTIME_DIR or XDG_RUNTIME_DIR makes a path of %d bytes: expected less than %d",
            length, COX_SOCKET_PATH_SIZE);
    return 0;
}

/* What is in the way may be another program's or user's: nothing is to be removed. */
#define OWN_DIR                                                                                    \
    "set COXSWAIN_RUNTIME_DIR to a folder of your own, for the group and for its commands (mkdir " \
    "-m 700 ~/.coxswain; export COXSWAIN_RUNTIME_DIR=~/.coxswain)"

/* COXSWAIN_RUNTIME_DIR; NULL: it is not set. */
static int own_variable(const char **ret_path, struct cox_error *err)
{
    const char *path = getenv("COXSWAIN_RUNTIME_DIR");
    if (path && path[0] && path[0] != '/')
        return cox_fail(err, COX_INVALID,
                        "COXSWAIN_RUNTIME_DIR is '%.200s': expected a path from /", path);
    *ret_path = path && path[0] ? path : NULL;
    return 0;
}

int cox_runtime_dir_default(char buffer[COX_SOCKET_PATH_SIZE], struct cox_error *err)
{
    const char *own = NULL, *login = getenv("XDG_RUNTIME_DIR");
    int r = own_variable(&own, err);
    if (r)
        return r;
    if (own)
        return path_format(buffer, err, "%s", own);
    return login && login[0] == '/' ? path_format(buffer, err, "%s/coxswain", login)
                                    : path_format(buffer, err, "/tmp/coxswain-%u", geteuid());
}

int cox_runtime_dir_search(uint32_t index, char buffer[COX_SOCKET_PATH_SIZE], struct cox_error *err)
{
    const char *own = NULL, *login = getenv("XDG_RUNTIME_DIR");
    int r = own_variable(&own, err);
    if (r)
        return r;
    if (own)
        return index == 0 ? path_format(buffer, err, "%s", own) : COX_EMPTY;
    if (!login || login[0] != '/')
        index++;
    switch (index) {
    case 0:
        return path_format(buffer, err, "%s/coxswain", login);
    case 1:
        return path_format(buffer, err, "/run/user/%u/coxswain", geteuid());
    case 2:
        return path_format(buffer, err, "/run/coxswain");
    case 3:
        return path_format(buffer, err, "/tmp/coxswain-%u", geteuid());
    default:
        return COX_EMPTY;
    }
}

static bool is_below(const char *path, const char *folder)
{
    const size_t length = folder ? strlen(folder) : 0;
    return length > 0 && strncmp(path, folder, length) == 0 &&
           (path[length] == '/' || path[length] == '\0');
}

const char *cox_runtime_dir_remedy(const char *path)
{
    if (is_below(path, getenv("COXSWAIN_RUNTIME_DIR")))
        return "; COXSWAIN_RUNTIME_DIR names it: unset it, or set it to a folder of your own";
    if (is_below(path, getenv("XDG_RUNTIME_DIR")))
        return "; XDG_RUNTIME_DIR is that of another user: unset it";
    return "";
}

void cox_runtime_dir_file(const char *name, char buffer[COX_RUNTIME_DIR_FILE_SIZE])
{
    if (strlen(name) + sizeof SOCKET_END <= COX_RUNTIME_DIR_FILE_SIZE)
        snprintf(buffer, COX_RUNTIME_DIR_FILE_SIZE, "%s" SOCKET_END, name);
    else
        snprintf(buffer, COX_RUNTIME_DIR_FILE_SIZE, "%.*s~%016" PRIx64 SOCKET_END, NAME_START_SIZE,
                 name, cox_hash_bytes(COX_HASH_START, name, strlen(name)));
}

size_t cox_runtime_dir_name_length(const char *file)
{
    const size_t length = strlen(file), end_length = strlen(SOCKET_END);
    return length > end_length && strcmp(file + length - end_length, SOCKET_END) == 0
               ? length - end_length
               : 0;
}

void cox_runtime_dir_address(int runtime_dir_fd, const char *file, struct sockaddr_un *ret_address)
{
    COX_ASSERT(strlen(file) < COX_RUNTIME_DIR_FILE_SIZE);
    memset(ret_address, 0, sizeof *ret_address);
    ret_address->sun_family = AF_UNIX;
    snprintf(ret_address->sun_path, sizeof ret_address->sun_path, "/proc/self/fd/%d/%s",
             runtime_dir_fd, file);
}

/* ---- the runtime directory ---- */

static int runtime_dir_check(const char *path, const struct stat *st, struct cox_error *err)
{
    if (st->st_uid != geteuid())
        return cox_fail(err, COX_DENIED, "%s belongs to user %u, expected %u: " OWN_DIR, path,
                        st->st_uid, geteuid());
    if (st->st_mode & 077)
        return cox_fail(
            err, COX_DENIED,
            "%s has mode %04o, expected %04o: others could put sockets there; set COXSWAIN_RUNTIME_DIR to a folder of your own for sockets alone, or chmod 700 this one if it is that",
            path, st->st_mode & 07777, MODE);
    return 0;
}

/* Through an O_PATH fd: the mode may exclude even its owner. */
static int runtime_dir_set_mode(int fd)
{
    char path[FD_PATH_SIZE];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int r = chmod(path, MODE) < 0 ? -errno : 0;
    cox_fault_point(COX_FAULT_RUNTIME_DIR_MADE);
    return r;
}

/* Returns as cox_runtime_dir_open; *ret_fd has O_PATH. */
static int runtime_dir_find(const char *path, int *ret_fd, struct cox_error *err)
{
    int fd = open(path, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    int e = fd < 0 ? errno : 0;
    if (e == ENOENT)
        return cox_fail(
            err, COX_NOT_FOUND,
            "%s is not there, nor can it be made: %s (set XDG_RUNTIME_DIR to a folder that exists, or unset it, or set COXSWAIN_RUNTIME_DIR)",
            path, cox_status_text(-e));
    if (e == ENOTDIR || e == ELOOP)
        return cox_fail(err, COX_DENIED, "%s is a link or a file, expected a folder: " OWN_DIR,
                        path);
    if (e)
        return cox_fail(err, -e, "%s: %s%s", path, cox_status_text(-e),
                        e == EACCES ? cox_runtime_dir_remedy(path) : "");
    *ret_fd = fd;
    return 0;
}

int cox_runtime_dir_open(const char *path, bool create, int *ret_fd, struct cox_error *err)
{
    _cox_cleanup_(cox_close_fd) int named = -1, fd = -1;
    struct stat st;
    int e = create && mkdir(path, MODE) < 0 ? errno : 0;
    cox_fault_point(COX_FAULT_RUNTIME_DIR_MADE);
    if (e && e != EEXIST && e != ENOENT)
        return cox_fail(err, -e, "%s cannot be made: %s%s", path, cox_status_text(-e),
                        e == EACCES ? cox_runtime_dir_remedy(path) : "");
    int r = runtime_dir_find(path, &named, err);
    if (r)
        return r;
    if (fstat(named, &st) < 0)
        return cox_fail(err, -errno, "%s: %s", path, cox_status_text(-errno));
    r = runtime_dir_check(path, &st, err);
    if (r)
        return r;
    if ((st.st_mode & 07777) != MODE)
        r = runtime_dir_set_mode(named);
    if (r == 0)
        fd = openat(named, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (r == 0)
        r = fd < 0 ? -errno : cox_fd_raise(&fd);
    if (r)
        return cox_fail(err, r, "%s: %s", path, cox_status_text(r));
    *ret_fd = cox_steal_fd(&fd);
    return 0;
}

int cox_runtime_dir_lock(int runtime_dir_fd, uint64_t deadline_ns, struct cox_error *err)
{
    for (;;) {
        int e = flock(runtime_dir_fd, LOCK_EX | LOCK_NB) < 0 ? errno : 0;
        cox_fault_point(COX_FAULT_RUNTIME_DIR_LOCKED);
        if (e == 0)
            return 0;
        if (e != EWOULDBLOCK && e != EINTR)
            return cox_fail(err, -e, "lock of the runtime directory: %s", cox_status_text(-e));
        if (cox_now_ns() >= deadline_ns)
            return cox_fail(
                err, COX_BUSY,
                "another process holds the lock of the runtime directory: a start or a clean-up that is stopped?");
        nanosleep(&(struct timespec){.tv_nsec = COX_NSEC_PER_MSEC}, NULL);
    }
}

/* Not only by close: a child that was forked meanwhile shares the lock. */
void cox_runtime_dir_unlock(int runtime_dir_fd)
{
    flock(runtime_dir_fd, LOCK_UN);
    cox_fault_point(COX_FAULT_RUNTIME_DIR_LOCKED);
}

/* ---- what is in it ---- */

/* How long connect waits for room in the backlog; 0: without limit. */
static int socket_set_patience(int fd, uint64_t deadline_ns)
{
    struct timeval patience = {.tv_sec = 0};
    if (deadline_ns != COX_DEADLINE_NEVER) {
        uint64_t now_ns = cox_now_ns();
        uint64_t left_ns = now_ns < deadline_ns ? deadline_ns - now_ns : 0;
        patience.tv_sec = (time_t)(left_ns / COX_NSEC_PER_SEC);
        patience.tv_usec = (suseconds_t)(left_ns % COX_NSEC_PER_SEC / 1000) + 1;
        if (patience.tv_usec > 999999)
            patience.tv_usec = 999999;
    }
    return setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience) < 0 ? -errno : 0;
}

/* Returns 0 or -errno; COX_TIMEOUT: the backlog was full until the deadline. */
static int socket_connect(int fd, const struct sockaddr_un *address, uint64_t deadline_ns)
{
    for (;;) {
        int r = socket_set_patience(fd, deadline_ns);
        if (r)
            return r;
        int e = connect(fd, (const struct sockaddr *)address, sizeof *address) < 0 ? errno : 0;
        cox_fault_point(COX_FAULT_CONTROL_SOCKET_CONNECTED);
        if (e == 0) /* the connection blocks without limit, as others do */
            return socket_set_patience(fd, COX_DEADLINE_NEVER);
        if (e != EAGAIN && e != EINTR)
            return -e;
        if (cox_now_ns() >= deadline_ns)
            return COX_TIMEOUT;
    }
}

int cox_runtime_dir_connect(int runtime_dir_fd, const char *file, uint64_t deadline_ns, int *ret_fd)
{
    struct sockaddr_un address;
    cox_runtime_dir_address(runtime_dir_fd, file, &address);
    _cox_cleanup_(cox_close_fd) int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int r = fd < 0 ? -errno : cox_fd_raise(&fd);
    if (r == 0)
        r = socket_connect(fd, &address, deadline_ns);
    if (r == 0)
        *ret_fd = cox_steal_fd(&fd);
    return r;
}

int cox_runtime_dir_check_listener(int fd, const char *path, bool other_users,
                                   struct cox_error *err)
{
    struct cox_socket_peer peer;
    int r = cox_socket_read_peer(fd, &peer);
    if (r)
        return cox_fail(err, r, "%s: %s", path, cox_status_text(r));
    if (peer.uid != geteuid() && peer.uid != 0 && !(other_users && geteuid() == 0))
        return cox_fail(err, COX_DENIED,
                        "process %d of user %u listens at %s: expected user %u or 0", (int)peer.pid,
                        peer.uid, path, geteuid());
    return 0;
}

/* The process that called listen(2) is dead, and a copy of it, made without fork(3), has the
 * socket. pid: its own, 0 if that is unknown. */
static bool listener_is_dead(int fd, pid_t pid)
{
    _cox_cleanup_(cox_peer_close) struct cox_peer peer = COX_PEER_NONE;
    uint64_t start;
    const int r = cox_socket_open_peer(fd, &peer.pidfd);
    if (r == 0)
        return !cox_peer_alive(&peer);
    return r == COX_PEER_DEAD || (pid > 0 && cox_peer_start_time(pid, &start) == COX_PEER_DEAD);
}

int cox_runtime_dir_probe(int runtime_dir_fd, const char *file, pid_t *ret_pid)
{
    struct stat st;
    struct sockaddr_un address;
    struct cox_socket_peer peer = {.pid = 0};
    if (strlen(file) >= COX_RUNTIME_DIR_FILE_SIZE)
        return COX_DENIED;
    if (fstatat(runtime_dir_fd, file, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return errno == ENOENT ? COX_NOT_FOUND : -errno;
    if (!S_ISSOCK(st.st_mode) || st.st_uid != geteuid())
        return COX_DENIED;
    _cox_cleanup_(cox_close_fd) int fd =
        socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int r = fd < 0 ? -errno : cox_fd_raise(&fd);
    if (r)
        return r;
    cox_runtime_dir_address(runtime_dir_fd, file, &address);
    int e = connect(fd, (const struct sockaddr *)&address, sizeof address) < 0 ? errno : 0;
    cox_fault_point(COX_FAULT_CONTROL_SOCKET_CONNECTED);
    if (e == ECONNREFUSED)
        return COX_CLOSED;
    if (e == ENOENT)
        return COX_NOT_FOUND;
    if (e && e != EAGAIN && e != EINTR) /* its backlog is full, so it lives */
        return -e;
    if (e == 0) {
        cox_socket_read_peer(fd, &peer); /* else it stays 0 */
        if (listener_is_dead(fd, peer.pid))
            return COX_CLOSED;
    }
    *ret_pid = peer.pid;
    return 0;
}

static bool runtime_dir_is_socket(const char *file)
{
    return strcmp(file, COX_RUNTIME_DIR_NEW_FILE) == 0 || cox_runtime_dir_name_length(file) > 0;
}

/* An object of another type cannot be probed and is not a control socket; other failures are this
 * process's. */
static int runtime_dir_sweep_one(int runtime_dir_fd, const char *file, uint32_t *count)
{
    pid_t pid;
    int r = cox_runtime_dir_probe(runtime_dir_fd, file, &pid);
    /* Only a start that holds the lock creates a new file: if a process listens on it, it was left
     * by a start that died, whose forked child has the socket. */
    if (r == COX_CLOSED || (r == 0 && strcmp(file, COX_RUNTIME_DIR_NEW_FILE) == 0))
        *count += unlinkat(runtime_dir_fd, file, 0) == 0;
    cox_fault_point(COX_FAULT_RUNTIME_DIR_SWEPT);
    return r >= 0 || r == -EPROTOTYPE || r == -EACCES ? 0 : r;
}

int cox_runtime_dir_sweep(int runtime_dir_fd, uint32_t *ret_count, struct cox_error *err)
{
    uint32_t count = 0;
    int list_fd = openat(runtime_dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *list = list_fd < 0 ? NULL : fdopendir(list_fd);
    int r = list ? 0 : -errno;
    if (!list)
        cox_close_fd(&list_fd);
    for (const struct dirent *entry; r == 0 && (entry = readdir(list));)
        if (runtime_dir_is_socket(entry->d_name))
            r = runtime_dir_sweep_one(runtime_dir_fd, entry->d_name, &count);
    if (list)
        closedir(list);
    if (r)
        return cox_fail(err, r, "sweep of the runtime directory: %s", cox_status_text(r));
    *ret_count = count;
    return 0;
}
