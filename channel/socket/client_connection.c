#include "client_connection.h"

#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/base/peer.h"
#include "hello.h"
#include "socket.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

void cox_client_connection_drop(struct cox_socket_server *server,
                                struct cox_client_connection *client)
{
    server->fd_owner_count -= client->fd >= 0 && client->state == COX_CLIENT_FD_OWNER;
    cox_fd_entries_forget(&server->fd_entries, &client->fd_owner);
    cox_closer_give(server->closer, &client->brought_fd);
    cox_close_fd(&client->pidfd);
    cox_closer_hang_up(server->closer, &client->fd);
}

void cox_client_connection_died(struct cox_socket_server *server,
                                struct cox_client_connection *client)
{
    cox_log_limit_write(&server->log, 7, NULL, 0,
                        "control socket: the fd owner process %d, with %" PRIu32
                        " fds left here, has gone",
                        (int)client->identity.pid, client->fd_owner.count);
    cox_client_connection_drop(server, client);
}

/* Whether the refusal arrives is not checked. */
void cox_client_connection_turn_away(int fd, int code, const char *reason)
{
    uint8_t bytes[COX_REFUSAL_SIZE_MAX];
    size_t size = cox_refusal_format(code, reason, bytes);
    cox_socket_send(fd, bytes, size, NULL, 0, 0);
}

void cox_client_connection_refuse(struct cox_socket_server *server,
                                  struct cox_client_connection *client, int code,
                                  const char *format, ...)
{
    char reason[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(reason, sizeof reason, format, args);
    va_end(args);
    cox_log_limit_write(&server->log, 6, format, code, "control socket: process %d is refused: %s",
                        (int)client->identity.pid, reason);
    cox_client_connection_turn_away(client->fd, code, reason);
    cox_client_connection_drop(server, client);
}

/* Returns 0, or what cox_socket_send returns: then the client is to be dropped. */
static int hello_reply_send(int fd, struct cox_hello_reply *hello_reply, const int *fds,
                            uint32_t fd_count)
{
    uint8_t bytes[COX_HELLO_REPLY_SIZE];
    hello_reply->version = COX_HELLO_VERSION;
    cox_hello_reply_format(hello_reply, fd_count, bytes);
    int r = cox_socket_send(fd, bytes, sizeof bytes, fds, fd_count, 0);
    cox_fault_point(COX_FAULT_CONTROL_SOCKET_ACCEPTED);
    return r;
}

/* The client has received no fds or bytes yet, so a refusal can still be sent. */
static void client_not_accepted(struct cox_socket_server *server,
                                struct cox_client_connection *client, int r)
{
    cox_client_connection_refuse(server, client, r, "the hello reply could not be sent: %s",
                                 cox_status_text(r));
}

static void worker_gone(struct cox_socket_server *server,
                        const struct cox_client_connection *client)
{
    if (server->hooks.worker_gone)
        server->hooks.worker_gone(server->hooks.context, &client->identity);
}

static void reply_end(struct cox_control_socket_reply *reply)
{
    for (uint32_t i = 0; i < COX_HELLO_FD_COUNT_MAX; i++)
        if (reply->given >> i & 1)
            cox_close_fd(&reply->fds[i]);
}

static void worker_hello(struct cox_socket_server *server, struct cox_client_connection *client)
{
    struct cox_error err = {0};
    _cox_cleanup_(reply_end) struct cox_control_socket_reply reply = {.fd_count = 0};
    uint32_t fd_count_max = client->identity.hello.fd_count_max;
    if (!server->hooks.worker) {
        cox_client_connection_refuse(server, client, COX_UNSUPPORTED,
                                     "workers do not come in by this control socket");
        return;
    }
    int r = server->hooks.worker(server->hooks.context, &client->identity, &reply, &err);
    if (r) {
        cox_client_connection_refuse(server, client, r, "%s",
                                     err.code ? err.text : cox_status_text(r));
        return;
    }
    COX_ASSERT(reply.fd_count <= COX_HELLO_FD_COUNT_MAX);
    if (reply.fd_count > fd_count_max) {
        cox_client_connection_refuse(server, client, COX_TOO_LARGE,
                                     "a worker needs %" PRIu32
                                     " fds at once; this one takes %" PRIu32,
                                     reply.fd_count, fd_count_max);
        worker_gone(server, client);
        return;
    }
    r = hello_reply_send(client->fd, &reply.hello_reply, reply.fds, reply.fd_count);
    if (r) {
        client_not_accepted(server, client, r);
        worker_gone(server, client);
        return;
    }
    client->state = COX_CLIENT_WORKER;
}

/* The hook may give the fd to another thread, which may close it at once. So the hello reply is
 * sent over a duplicate, made while a failure can still be a refusal. */
static void command_hello(struct cox_socket_server *server, struct cox_client_connection *client)
{
    struct cox_error err = {0};
    struct cox_hello_reply hello_reply = {.version = 0};
    if (!server->hooks.command) {
        cox_client_connection_refuse(server, client, COX_UNSUPPORTED,
                                     "no commands are taken at this control socket");
        return;
    }
    _cox_cleanup_(cox_close_fd) int own_fd = fcntl(client->fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    int r = own_fd < 0 ? -errno : 0;
    if (r == 0)
        r = server->hooks.command(server->hooks.context, &client->identity, client->fd, &err);
    if (r) {
        cox_client_connection_refuse(server, client, r, "%s",
                                     err.code ? err.text : cox_status_text(r));
        return;
    }
    r = hello_reply_send(own_fd, &hello_reply, NULL, 0);
    client->fd = -1;
    if (r)
        cox_log_limit_write(&server->log, 4, NULL, 0,
                            "control socket: the command of process %d is not accepted: %s",
                            (int)client->identity.pid, cox_status_text(r));
}

static void fd_store_hello(struct cox_socket_server *server, struct cox_client_connection *client)
{
    struct cox_hello_reply hello_reply = {.version = 0};
    if (server->fd_owner_count >= server->fd_owner_max) {
        cox_client_connection_refuse(
            server, client, COX_FULL,
            "%" PRIu32
            " connections that leave or fetch fds are open already: close some, each process needs one",
            server->fd_owner_count);
        return;
    }
    int r = hello_reply_send(client->fd, &hello_reply, NULL, 0);
    if (r) {
        client_not_accepted(server, client, r);
        return;
    }
    server->fd_owner_count++;
    client->fd_owner.pid = client->identity.pid;
    client->received = 0;
    client->state = COX_CLIENT_FD_OWNER;
}

/* The frame is complete. */
static void client_hello(struct cox_socket_server *server, struct cox_client_connection *client)
{
    struct cox_error err = {0};
    int r = cox_hello_parse(client->bytes, &client->identity.hello, &err);
    if (r == 0 && server->hooks.admit)
        r = server->hooks.admit(server->hooks.context, &client->identity, &err);
    if (r) {
        cox_client_connection_refuse(server, client, r, "%s",
                                     err.code ? err.text : cox_status_text(r));
        return;
    }
    switch (client->identity.hello.role) {
    case COX_HELLO_WORKER:
        worker_hello(server, client);
        break;
    case COX_HELLO_COMMAND:
        command_hello(server, client);
        break;
    case COX_HELLO_FD_STORE:
        fd_store_hello(server, client);
        break;
    }
}

/* Reads until the socket is empty, or holds more than a hello. The end of the connection after a
 * whole frame is seen after the hello reply. */
static void client_read_hello(struct cox_socket_server *server,
                              struct cox_client_connection *client)
{
    size_t size = 0;
    int r = 0;
    do {
        r = cox_closer_receive(client->fd, client->bytes + client->received,
                               sizeof client->bytes - client->received, &size, NULL);
        client->received += r == 0 ? size : 0;
    } while (r == 0 && size > 0 && client->received <= COX_HELLO_SIZE);
    if (r == COX_CORRUPT)
        cox_client_connection_refuse(
            server, client, COX_CORRUPT,
            "fds or other control messages came with the hello: expected bytes alone");
    else if (r < 0)
        cox_client_connection_refuse(server, client, r, "the hello cannot be read: %s",
                                     cox_status_text(r));
    else if (client->received > COX_HELLO_SIZE)
        cox_client_connection_refuse(server, client, COX_CORRUPT,
                                     "more than the %d bytes of a hello came before the reply",
                                     COX_HELLO_SIZE);
    else if (client->received == COX_HELLO_SIZE)
        client_hello(server, client);
    else if (r == 0) {
        cox_log_limit_write(&server->log, 7, NULL, 0,
                            "control socket: process %d left after %zu of %d bytes of its hello",
                            (int)client->identity.pid, client->received, COX_HELLO_SIZE);
        cox_client_connection_drop(server, client);
    }
}

static void client_read_worker(struct cox_socket_server *server,
                               struct cox_client_connection *client)
{
    uint8_t byte;
    size_t size = 0;
    int r = cox_closer_receive(client->fd, &byte, 1, &size, NULL);
    if (r == COX_EMPTY)
        return;
    if (r || size)
        cox_log_limit_write(
            &server->log, 4, NULL, 0,
            "control socket: process %d, a worker, is dropped: expected nothing after its hello, %s",
            (int)client->identity.pid, r ? cox_status_text(r) : "bytes came");
    cox_client_connection_drop(server, client);
    worker_gone(server, client);
}

/* Returns false if the owner is dead. A process that cannot be watched (no fds left, another pid
 * namespace) loses its entries only with its connection; watching is tried again at its next
 * request. */
static bool fd_owner_watch(struct cox_client_connection *client)
{
    struct cox_peer peer = COX_PEER_NONE;
    if (client->fd_owner.count == 0)
        cox_close_fd(&client->pidfd);
    if (client->pidfd >= 0 || client->fd_owner.count == 0 || client->identity.pid == 0)
        return true;
    int r = cox_peer_open(client->identity.pid, 0, &peer);
    client->pidfd = peer.pidfd;
    return r != COX_PEER_DEAD;
}

/* Returns false if the owner does not read its replies. */
static bool fd_owner_reply(struct cox_socket_server *server, struct cox_client_connection *client)
{
    uint8_t bytes[COX_FD_STORE_REPLY_SIZE];
    uint64_t number;
    int fd;
    int status = cox_fd_entries_serve(&server->fd_entries, &client->fd_owner, client->bytes,
                                      &client->brought_fd, &fd, &number);
    cox_closer_give(server->closer, &client->brought_fd);
    client->received = 0;
    cox_fd_store_reply_format(status, number, bytes);
    int r = cox_socket_send(client->fd, bytes, sizeof bytes, &fd, fd >= 0, 0);
    if (r != COX_FULL)
        return r == 0;
    /* So many fds of this user are in flight that the kernel sends no more. */
    cox_fd_store_reply_format(COX_FULL, number, bytes);
    return cox_socket_send(client->fd, bytes, sizeof bytes, NULL, 0, 0) == 0;
}

static void client_read_fd_owner(struct cox_socket_server *server,
                                 struct cox_client_connection *client)
{
    size_t size = 0;
    int fd = -1;
    int r = cox_closer_receive(client->fd, client->bytes + client->received,
                               COX_FD_STORE_REQUEST_SIZE - client->received, &size,
                               client->brought_fd < 0 ? &fd : NULL);
    if (r == COX_EMPTY)
        return;
    if (fd >= 0)
        client->brought_fd = fd;
    client->received += r == 0 ? size : 0;
    bool whole = r == 0 && client->received == COX_FD_STORE_REQUEST_SIZE;
    if (r == 0 && size > 0 &&
        (!whole || (fd_owner_reply(server, client) && fd_owner_watch(client))))
        return;
    cox_log_limit_write(&server->log, r == 0 && size == 0 ? 7 : 4, NULL, 0,
                        "control socket: the fd owner process %d, with %" PRIu32
                        " fds left here, %s",
                        (int)client->identity.pid, client->fd_owner.count,
                        r           ? cox_status_text(r)
                        : size == 0 ? "has gone"
                                    : "is dead, or does not read its replies: dropped");
    cox_client_connection_drop(server, client);
}

void cox_client_connection_read(struct cox_socket_server *server,
                                struct cox_client_connection *client)
{
    switch (client->state) {
    case COX_CLIENT_HELLO:
        client_read_hello(server, client);
        break;
    case COX_CLIENT_WORKER:
        client_read_worker(server, client);
        break;
    case COX_CLIENT_FD_OWNER:
        client_read_fd_owner(server, client);
        break;
    }
}
