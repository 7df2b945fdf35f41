/* The client's side of control_socket.h. */
#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/base/peer.h"
#include "channel/shm/geometry.h"
#include "hello.h"
#include "runtime_dir.h"
#include "socket.h"

#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

/* Connections of a client whose hello came too late. */
#define TRIES 3

static int socket_path(const char *runtime_dir, const char *file, char *buffer,
                       struct cox_error *err)
{
    size_t size = strlen(runtime_dir) + 1 + strlen(file) + 1;
    if (size > COX_SOCKET_PATH_SIZE)
        return cox_fail(err, COX_TOO_LARGE,
                        "the path of the control socket has %zu bytes: expected less than %d",
                        size - 1, COX_SOCKET_PATH_SIZE);
    strcpy(stpcpy(stpcpy(buffer, runtime_dir), "/"), file);
    return 0;
}

enum presence { ABSENT, LEFT, LISTENING };

/* Whether there is a socket of that name, and a process that listens. What is not this user's is
 * not looked at. */
static enum presence socket_presence(const char *runtime_dir, const char *file)
{
    _cox_cleanup_(cox_close_fd) int fd = -1;
    pid_t pid;
    if (cox_runtime_dir_open(runtime_dir, false, &fd, NULL))
        return ABSENT;
    int r = cox_runtime_dir_probe(fd, file, &pid);
    return r == 0 ? LISTENING : r == COX_NOT_FOUND ? ABSENT : LEFT;
}

int cox_control_socket_find(const char *name, char *buffer, struct cox_error *err)
{
    char best[COX_SOCKET_PATH_SIZE], place[COX_SOCKET_PATH_SIZE];
    char file[COX_RUNTIME_DIR_FILE_SIZE];
    enum presence found = ABSENT;
    int r = cox_name_check(name, err);
    if (r == 0)
        r = cox_runtime_dir_default(best, err);
    if (r)
        return r;
    cox_runtime_dir_file(name, file);
    /* Of a single place, connecting tells as much. */
    const bool alone = cox_runtime_dir_search(1, place, NULL) != 0;
    for (uint32_t i = 0; !alone && found != LISTENING; i++) {
        if (cox_runtime_dir_search(i, place, NULL))
            break;
        enum presence here = socket_presence(place, file);
        if (here > found)
            strcpy(best, place);
        found = here > found ? here : found;
    }
    return socket_path(best, file, buffer, err);
}

void cox_control_socket_places(char *buffer, size_t buffer_size)
{
    char place[COX_SOCKET_PATH_SIZE];
    size_t used = 0;
    buffer[0] = '\0';
    for (uint32_t i = 0; used < buffer_size && cox_runtime_dir_search(i, place, NULL) == 0; i++)
        used += (size_t)snprintf(buffer + used, buffer_size - used, "%s%s", i ? ", " : "", place);
}

/* ---- to the control socket ---- */

/* Opens the folder of path; *ret_file points into path. */
static int connect_open_runtime_dir(const char *path, int *ret_fd, const char **ret_file,
                                    struct cox_error *err)
{
    char runtime_dir[COX_SOCKET_PATH_SIZE];
    const char *slash = strrchr(path, '/'), *file = slash ? slash + 1 : path;
    size_t size = slash ? (size_t)(slash - path) : 0;
    if (size >= sizeof runtime_dir || file[0] == '\0' || strlen(file) >= COX_RUNTIME_DIR_FILE_SIZE)
        return cox_fail(
            err, COX_INVALID,
            "the path of a control socket has a folder of %zu bytes and a file of %zu: expected less than %zu, and 1 to %zu",
            size, strlen(file), sizeof runtime_dir, COX_RUNTIME_DIR_FILE_SIZE - 1);
    memcpy(runtime_dir, path, size);
    runtime_dir[size] = '\0';
    const char *where = slash == path ? "/" : slash ? runtime_dir : ".";
    int fd = open(where, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    int e = fd < 0 ? errno : 0;
    if (e == ENOENT)
        return cox_fail(err, COX_NOT_FOUND, "no control socket is at %s: the folder does not exist",
                        path);
    if (e == ENOTDIR || e == ELOOP || e == EACCES)
        return cox_fail(err, COX_DENIED, "%s: expected a folder of this user, %s%s", where,
                        cox_status_text(-e), e == EACCES ? cox_runtime_dir_remedy(where) : "");
    if (e)
        return cox_fail(err, -e, "%s: %s", where, cox_status_text(-e));
    *ret_fd = fd;
    *ret_file = file;
    return 0;
}

static int connect_check_file(int runtime_dir_fd, const char *file, const char *path,
                              bool other_users, struct cox_error *err)
{
    struct stat st;
    if (fstatat(runtime_dir_fd, file, &st, AT_SYMLINK_NOFOLLOW) < 0) {
        if (errno == ENOENT)
            return cox_fail(err, COX_NOT_FOUND,
                            "no control socket is at %s: is the coordinator running?", path);
        if (errno == EACCES)
            return cox_fail(err, COX_DENIED, "%s: %s%s", path, cox_status_text(-errno),
                            cox_runtime_dir_remedy(path));
        return cox_fail(err, -errno, "%s: %s", path, cox_status_text(-errno));
    }
    if (!S_ISSOCK(st.st_mode))
        return cox_fail(err, COX_DENIED, "%s is no socket", path);
    if (st.st_uid != geteuid() && st.st_uid != 0 && !(other_users && geteuid() == 0))
        return cox_fail(err, COX_DENIED, "%s belongs to user %u: expected %u or 0", path, st.st_uid,
                        geteuid());
    return 0;
}

static int connect_to_path(const char *path, bool other_users, uint64_t deadline_ns, int *ret_fd,
                           struct cox_error *err)
{
    _cox_cleanup_(cox_close_fd) int runtime_dir_fd = -1;
    const char *file = NULL;
    int r = connect_open_runtime_dir(path, &runtime_dir_fd, &file, err);
    if (r == 0)
        r = connect_check_file(runtime_dir_fd, file, path, other_users, err);
    if (r)
        return r;
    r = cox_runtime_dir_connect(runtime_dir_fd, file, deadline_ns, ret_fd);
    switch (r) {
    case 0:
        return 0;
    case COX_TIMEOUT:
        return cox_fail(err, COX_TIMEOUT,
                        "%s: so many wait there that the time was over before a place was free",
                        path);
    case -ECONNREFUSED:
        return cox_fail(err, COX_CLOSED,
                        "no process listens at %s any more: the coordinator is dead", path);
    case -ENOENT:
        return cox_fail(err, COX_NOT_FOUND, "no control socket is at %s any more", path);
    case -EACCES:
    case -EPERM:
    case -ELOOP:
        return cox_fail(err, COX_DENIED, "%s: %s", path, cox_status_text(r));
    default:
        return cox_fail(err, r, "%s: %s", path, cox_status_text(r));
    }
}

/* ---- the exchange ---- */

static int connect_failed(int r, int fd, const char *path, struct cox_error *err)
{
    struct cox_socket_peer peer;
    switch (r) {
    case COX_TIMEOUT:
        if (cox_socket_read_peer(fd, &peer) == 0 && peer.pid > 0 && cox_peer_stopped(peer.pid))
            return cox_fail(
                err, r,
                "%s: no whole reply came in time: process %d, the coordinator, is stopped by a signal",
                path, (int)peer.pid);
        return cox_fail(err, r, "%s: no whole reply came in time", path);
    case COX_CLOSED:
        return cox_fail(err, r, "%s: the coordinator has closed the control socket without a reply",
                        path);
    case COX_CORRUPT:
        return cox_fail(err, r, "%s: the reply broke off, or has fds where none belong", path);
    default:
        return cox_fail(err, r, "%s: %s", path, cox_status_text(r));
    }
}

/* Reads the refusal after its first byte. */
static int connect_hear_refusal(int fd, uint64_t deadline_ns, const char *path,
                                struct cox_error *err)
{
    uint8_t bytes[COX_REFUSAL_SIZE_MAX] = {COX_REPLY_REFUSED};
    int r =
        cox_socket_receive(fd, bytes + 1, COX_REFUSAL_HEAD_SIZE - 1, NULL, 0, NULL, deadline_ns);
    size_t size = cox_refusal_reason_size(bytes);
    if (r == 0 && size > 0)
        r = cox_socket_receive(fd, bytes + COX_REFUSAL_HEAD_SIZE, size, NULL, 0, NULL, deadline_ns);
    if (r == COX_CLOSED) /* not before its first byte */
        r = COX_CORRUPT;
    return r ? connect_failed(r, fd, path, err) : cox_refusal_parse(bytes, err);
}

/* Nothing follows a hello reply until the client sends a request; a worker receives nothing more.
 */
static int connect_check_silence(int fd)
{
    uint8_t byte;
    size_t size = 0;
    uint32_t fd_count;
    int r = cox_socket_receive_some(fd, &byte, 1, &size, NULL, 0, &fd_count);
    return r == COX_EMPTY || (r == 0 && size == 0) ? 0 : r == 0 ? COX_CORRUPT : r;
}

static int connect_hear(int fd, const struct cox_hello *hello, uint64_t deadline_ns,
                        const char *path, struct cox_control_connection *session,
                        struct cox_error *err)
{
    uint8_t bytes[COX_HELLO_REPLY_SIZE];
    uint32_t most =
        hello->fd_count_max < COX_HELLO_FD_COUNT_MAX ? hello->fd_count_max : COX_HELLO_FD_COUNT_MAX;
    int r = cox_socket_receive(fd, bytes, 1, session->fds, most, &session->fd_count, deadline_ns);
    if (r)
        return connect_failed(r, fd, path, err);
    if (bytes[0] == COX_REPLY_REFUSED && session->fd_count == 0)
        return connect_hear_refusal(fd, deadline_ns, path, err);
    if (bytes[0] != COX_REPLY_HELLO)
        return cox_fail(err, COX_CORRUPT, "%s: the reply starts with %u and %" PRIu32 " fds", path,
                        bytes[0], session->fd_count);
    r = cox_socket_receive(fd, bytes + 1, sizeof bytes - 1, NULL, 0, NULL, deadline_ns);
    if (r == 0)
        r = connect_check_silence(fd);
    if (r)
        return connect_failed(r == COX_CLOSED ? COX_CORRUPT : r, fd, path, err);
    return cox_hello_reply_parse(bytes, hello, session->fd_count, &session->hello_reply, err);
}

void cox_control_connection_close(struct cox_control_connection *session)
{
    for (uint32_t i = 0; i < session->fd_count; i++)
        cox_close_fd(&session->fds[i]);
    session->fd_count = 0;
    cox_close_fd(&session->fd);
}

static int connect_once(const char *path, const struct cox_hello *hello, uint64_t deadline_ns,
                        struct cox_control_connection *ret_session, struct cox_error *err)
{
    uint8_t frame[COX_HELLO_SIZE];
    struct cox_control_connection session = {.fd = -1};
    cox_hello_format(hello, frame);
    int r = connect_to_path(path, hello->other_users, deadline_ns, &session.fd, err);
    if (r == 0)
        r = cox_runtime_dir_check_listener(session.fd, path, hello->other_users, err);
    if (r == 0) {
        r = cox_socket_send(session.fd, frame, sizeof frame, NULL, 0, deadline_ns);
        cox_fault_point(COX_FAULT_CONTROL_SOCKET_ASKED);
        /* A control socket that refuses before it has read everything has still sent its reason. */
        if (r == 0 || r == COX_CLOSED)
            r = connect_hear(session.fd, hello, deadline_ns, path, &session, err);
        else
            connect_failed(r, session.fd, path, err);
    }
    if (r) {
        cox_control_connection_close(&session);
        return r;
    }
    *ret_session = session;
    return 0;
}

int cox_control_socket_connect(const char *path, const struct cox_hello *hello,
                               uint64_t deadline_ns, struct cox_control_connection *ret_session,
                               struct cox_error *err)
{
    struct cox_hello asked = *hello;
    asked.fd_count_max = hello->fd_count_max ? hello->fd_count_max : COX_HELLO_FD_COUNT_MAX;
    int r = COX_TIMEOUT;
    /* Before the deadline it is the control socket that did not wait: this process was stopped, or
     * had no processor, between its connect and its hello. */
    struct cox_error error = {0};
    for (int i = 0; i < TRIES && r == COX_TIMEOUT && (i == 0 || cox_now_ns() < deadline_ns); i++) {
        cox_error_clear(&error); /* of the try before, whose end this one decides */
        r = connect_once(path, &asked, deadline_ns, ret_session, &error);
    }
    return r ? cox_fail(err, r, "%s", error.text) : 0;
}
