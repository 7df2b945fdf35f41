#include "visitor.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

#include "channel/base/fault.h"
#include "logon.h"
#include "channel/base/peer.h"
#include "socket.h"

void cox_visitor_drop(struct cox_reception *reception, struct cox_visitor *visitor)
{
    reception->fd_owner_count -= visitor->fd >= 0 && visitor->state == COX_VISITOR_FD_OWNER;
    cox_fd_entries_forget(&reception->fd_entries, &visitor->fd_owner);
    cox_closer_give(reception->closer, &visitor->brought_fd);
    cox_close_fd(&visitor->pidfd);
    cox_closer_hang_up(reception->closer, &visitor->fd);
}

void cox_visitor_died(struct cox_reception *reception, struct cox_visitor *visitor)
{
    cox_log_limit_write(&reception->log, 7, NULL, 0,
                        "control socket: the fd owner process %d, with %" PRIu32
                        " fds left here, has gone",
                        (int)visitor->who.pid, visitor->fd_owner.count);
    cox_visitor_drop(reception, visitor);
}

/* Whether it gets there is its own affair. */
void cox_visitor_turn_away(int fd, int code, const char *reason)
{
    uint8_t bytes[COX_REFUSAL_SIZE_MAX];
    size_t size = cox_refusal_format(code, reason, bytes);
    cox_socket_send(fd, bytes, size, NULL, 0, 0);
}

void cox_visitor_refuse(struct cox_reception *reception, struct cox_visitor *visitor, int code,
                        const char *format, ...)
{
    char reason[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(reason, sizeof reason, format, args);
    va_end(args);
    cox_log_limit_write(&reception->log, 6, format, code,
                        "control socket: process %d is refused: %s", (int)visitor->who.pid, reason);
    cox_visitor_turn_away(visitor->fd, code, reason);
    cox_visitor_drop(reception, visitor);
}

/* Returns 0, or what cox_socket_send returns: then it is to be dropped. */
static int welcome_send(int fd, struct cox_welcome *welcome, const int *fds, uint32_t fd_count)
{
    uint8_t bytes[COX_WELCOME_SIZE];
    welcome->version = COX_HELLO_VERSION;
    cox_welcome_format(welcome, fd_count, bytes);
    int r = cox_socket_send(fd, bytes, sizeof bytes, fds, fd_count, 0);
    cox_fault_point(COX_FAULT_CONTROL_SOCKET_WELCOMED);
    return r;
}

/* Of its fds or bytes the visitor has nothing, so that it can still be told why. */
static void visitor_unwelcomed(struct cox_reception *reception, struct cox_visitor *visitor, int r)
{
    cox_visitor_refuse(reception, visitor, r, "the welcome could not be sent: %s",
                       cox_status_text(r));
}

static void worker_gone(struct cox_reception *reception, const struct cox_visitor *visitor)
{
    if (reception->hooks.worker_gone)
        reception->hooks.worker_gone(reception->hooks.context, &visitor->who);
}

static void answer_end(struct cox_control_socket_reply *answer)
{
    for (uint32_t i = 0; i < COX_HELLO_FD_COUNT_MAX; i++)
        if (answer->given >> i & 1)
            cox_close_fd(&answer->fds[i]);
}

static void worker_logon(struct cox_reception *reception, struct cox_visitor *visitor)
{
    struct cox_error err = {0};
    _cox_cleanup_(answer_end) struct cox_control_socket_reply answer = {.fd_count = 0};
    uint32_t fd_count_max = visitor->who.logon.fd_count_max;
    if (!reception->hooks.worker) {
        cox_visitor_refuse(reception, visitor, COX_UNSUPPORTED,
                           "workers do not come in by this control socket");
        return;
    }
    int r = reception->hooks.worker(reception->hooks.context, &visitor->who, &answer, &err);
    if (r) {
        cox_visitor_refuse(reception, visitor, r, "%s", err.code ? err.text : cox_status_text(r));
        return;
    }
    COX_ASSERT(answer.fd_count <= COX_HELLO_FD_COUNT_MAX);
    if (answer.fd_count > fd_count_max) {
        cox_visitor_refuse(reception, visitor, COX_TOO_LARGE,
                           "a worker needs %" PRIu32 " fds at once; this one takes %" PRIu32,
                           answer.fd_count, fd_count_max);
        worker_gone(reception, visitor);
        return;
    }
    r = welcome_send(visitor->fd, &answer.welcome, answer.fds, answer.fd_count);
    if (r) {
        visitor_unwelcomed(reception, visitor, r);
        worker_gone(reception, visitor);
        return;
    }
    visitor->state = COX_VISITOR_WORKER;
}

/* The hook may give the fd to another thread, which may close it at once: so the welcome goes by a
 * duplicate, made before, when a failure is still a refusal. */
static void command_logon(struct cox_reception *reception, struct cox_visitor *visitor)
{
    struct cox_error err = {0};
    struct cox_welcome welcome = {.version = 0};
    if (!reception->hooks.command) {
        cox_visitor_refuse(reception, visitor, COX_UNSUPPORTED,
                           "no commands are taken at this control socket");
        return;
    }
    _cox_cleanup_(cox_close_fd) int own_fd = fcntl(visitor->fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    int r = own_fd < 0 ? -errno : 0;
    if (r == 0)
        r = reception->hooks.command(reception->hooks.context, &visitor->who, visitor->fd, &err);
    if (r) {
        cox_visitor_refuse(reception, visitor, r, "%s", err.code ? err.text : cox_status_text(r));
        return;
    }
    r = welcome_send(own_fd, &welcome, NULL, 0);
    visitor->fd = -1;
    if (r)
        cox_log_limit_write(&reception->log, 4, NULL, 0,
                            "control socket: the command of process %d is not welcomed: %s",
                            (int)visitor->who.pid, cox_status_text(r));
}

static void fd_store_logon(struct cox_reception *reception, struct cox_visitor *visitor)
{
    struct cox_welcome welcome = {.version = 0};
    if (reception->fd_owner_count >= reception->fd_owner_max) {
        cox_visitor_refuse(
            reception, visitor, COX_FULL,
            "%" PRIu32
            " connections that leave or fetch fds are open already: close some, each process needs one",
            reception->fd_owner_count);
        return;
    }
    int r = welcome_send(visitor->fd, &welcome, NULL, 0);
    if (r) {
        visitor_unwelcomed(reception, visitor, r);
        return;
    }
    reception->fd_owner_count++;
    visitor->fd_owner.pid = visitor->who.pid;
    visitor->received = 0;
    visitor->state = COX_VISITOR_FD_OWNER;
}

/* The frame is complete. */
static void visitor_logon(struct cox_reception *reception, struct cox_visitor *visitor)
{
    struct cox_error err = {0};
    int r = cox_logon_parse(visitor->bytes, &visitor->who.logon, &err);
    if (r == 0 && reception->hooks.admit)
        r = reception->hooks.admit(reception->hooks.context, &visitor->who, &err);
    if (r) {
        cox_visitor_refuse(reception, visitor, r, "%s", err.code ? err.text : cox_status_text(r));
        return;
    }
    switch (visitor->who.logon.role) {
    case COX_HELLO_WORKER:
        worker_logon(reception, visitor);
        break;
    case COX_HELLO_COMMAND:
        command_logon(reception, visitor);
        break;
    case COX_HELLO_FD_STORE:
        fd_store_logon(reception, visitor);
        break;
    }
}

/* Reads until there is no more, or more than belongs there. An end behind a whole frame is seen
 * again after the welcome. */
static void visitor_read_logon(struct cox_reception *reception, struct cox_visitor *visitor)
{
    size_t size = 0;
    int r = 0;
    do {
        r = cox_closer_receive(visitor->fd, visitor->bytes + visitor->received,
                               sizeof visitor->bytes - visitor->received, &size, NULL);
        visitor->received += r == 0 ? size : 0;
    } while (r == 0 && size > 0 && visitor->received <= COX_LOGON_SIZE);
    if (r == COX_CORRUPT)
        cox_visitor_refuse(
            reception, visitor, COX_CORRUPT,
            "fds or other control messages came with the logon: expected bytes alone");
    else if (r < 0)
        cox_visitor_refuse(reception, visitor, r, "the logon cannot be read: %s",
                           cox_status_text(r));
    else if (visitor->received > COX_LOGON_SIZE)
        cox_visitor_refuse(reception, visitor, COX_CORRUPT,
                           "more than the %d bytes of a logon came before the answer",
                           COX_LOGON_SIZE);
    else if (visitor->received == COX_LOGON_SIZE)
        visitor_logon(reception, visitor);
    else if (r == 0) {
        cox_log_limit_write(&reception->log, 7, NULL, 0,
                            "control socket: process %d left after %zu of %d bytes of its logon",
                            (int)visitor->who.pid, visitor->received, COX_LOGON_SIZE);
        cox_visitor_drop(reception, visitor);
    }
}

static void visitor_read_worker(struct cox_reception *reception, struct cox_visitor *visitor)
{
    uint8_t byte;
    size_t size = 0;
    int r = cox_closer_receive(visitor->fd, &byte, 1, &size, NULL);
    if (r == COX_EMPTY)
        return;
    if (r || size)
        cox_log_limit_write(
            &reception->log, 4, NULL, 0,
            "control socket: process %d, a worker, is dropped: expected nothing after its logon, %s",
            (int)visitor->who.pid, r ? cox_status_text(r) : "bytes came");
    cox_visitor_drop(reception, visitor);
    worker_gone(reception, visitor);
}

/* Whether it can go on: who is dead cannot. One that cannot be watched (out of fds, another pid
 * namespace) ends with its connection alone; it is tried again at its next request. */
static bool fd_owner_watch(struct cox_visitor *visitor)
{
    struct cox_peer peer = COX_PEER_NONE;
    if (visitor->fd_owner.count == 0)
        cox_close_fd(&visitor->pidfd);
    if (visitor->pidfd >= 0 || visitor->fd_owner.count == 0 || visitor->who.pid == 0)
        return true;
    int r = cox_peer_open(visitor->who.pid, 0, &peer);
    visitor->pidfd = peer.pidfd;
    return r != COX_PEER_DEAD;
}

/* Whether it can go on: one that does not take its answers cannot. */
static bool fd_owner_reply(struct cox_reception *reception, struct cox_visitor *visitor)
{
    uint8_t bytes[COX_FD_STORE_REPLY_SIZE];
    uint64_t number;
    int fd;
    int status = cox_fd_entries_serve(&reception->fd_entries, &visitor->fd_owner, visitor->bytes,
                                      &visitor->brought_fd, &fd, &number);
    cox_closer_give(reception->closer, &visitor->brought_fd);
    visitor->received = 0;
    cox_fd_store_reply_format(status, number, bytes);
    int r = cox_socket_send(visitor->fd, bytes, sizeof bytes, &fd, fd >= 0, 0);
    if (r != COX_FULL)
        return r == 0;
    /* So many fds of this user are under way that the kernel sends no more. */
    cox_fd_store_reply_format(COX_FULL, number, bytes);
    return cox_socket_send(visitor->fd, bytes, sizeof bytes, NULL, 0, 0) == 0;
}

static void visitor_read_fd_owner(struct cox_reception *reception, struct cox_visitor *visitor)
{
    size_t size = 0;
    int fd = -1;
    int r = cox_closer_receive(visitor->fd, visitor->bytes + visitor->received,
                               COX_FD_STORE_REQUEST_SIZE - visitor->received, &size,
                               visitor->brought_fd < 0 ? &fd : NULL);
    if (r == COX_EMPTY)
        return;
    if (fd >= 0)
        visitor->brought_fd = fd;
    visitor->received += r == 0 ? size : 0;
    bool whole = r == 0 && visitor->received == COX_FD_STORE_REQUEST_SIZE;
    if (r == 0 && size > 0 &&
        (!whole || (fd_owner_reply(reception, visitor) && fd_owner_watch(visitor))))
        return;
    cox_log_limit_write(&reception->log, r == 0 && size == 0 ? 7 : 4, NULL, 0,
                        "control socket: the fd owner process %d, with %" PRIu32
                        " fds left here, %s",
                        (int)visitor->who.pid, visitor->fd_owner.count,
                        r           ? cox_status_text(r)
                        : size == 0 ? "has gone"
                                    : "is dead, or does not read its answers: dropped");
    cox_visitor_drop(reception, visitor);
}

void cox_visitor_read(struct cox_reception *reception, struct cox_visitor *visitor)
{
    switch (visitor->state) {
    case COX_VISITOR_LOGON:
        visitor_read_logon(reception, visitor);
        break;
    case COX_VISITOR_WORKER:
        visitor_read_worker(reception, visitor);
        break;
    case COX_VISITOR_FD_OWNER:
        visitor_read_fd_owner(reception, visitor);
        break;
    }
}
