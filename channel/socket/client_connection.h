/*
 * client_connection: one connection to a control socket: its hello, the reply to it, and the
 * requests that follow.
 *
 *            frame in order              asks
 *   HELLO ------------------> FD_OWNER -----> FD_OWNER
 *     |  \\------------------> WORKER
 *     |  \\------------------> handed to the control server (a command)
 *     +--- refused, late or closed            each ends: dropped
 *
 * Private to the library.
 * Threads: the control socket's.
 * Ownership: a client owns its fds until a command is given away; hooks are the control socket's.
 * Blocks: nothing.
 * If the process dies: connections close, nothing is left.
 */
#ifndef COX_CHANNEL_CLIENT_CONNECTION_H
#define COX_CHANNEL_CLIENT_CONNECTION_H

#include "fd_entries.h"
#include "control_socket.h"
#include "channel/base/log_limit.h"

/* What all clients of a control socket share. */
struct cox_socket_server {
    struct cox_control_socket_hooks hooks;
    /* for events that clients cause */
    struct cox_log_limit log;
    uint64_t hello_ms;
    /* the other places are reserved for workers and commands */
    uint32_t fd_owner_count, fd_owner_max;
    struct cox_fd_entries fd_entries;
    /* borrowed; closes the clients' connections and the fds that they sent */
    struct cox_closer *closer;
};

enum cox_client_connection_state {
    COX_CLIENT_HELLO,    /* its frame is not complete */
    COX_CLIENT_WORKER,   /* accepted; expected to send nothing more */
    COX_CLIENT_FD_OWNER, /* accepted; sends requests */
};

struct cox_client_connection {
    enum cox_client_connection_state state;
    /* -1: dropped, or given away */
    int fd;
    /* of the hello */
    uint64_t deadline_ns;
    struct cox_control_client identity;
    /* of the hello frame, or of a request */
    uint8_t bytes[COX_HELLO_SIZE + 1];
    size_t received;
    /* received with the request; -1: none */
    int brought_fd;
    struct cox_fd_owner fd_owner;
    /* of the client's process, while it has entries; -1: not watched */
    int pidfd;
};

/* The connection is readable, or has ended. */
void cox_client_connection_read(struct cox_socket_server *server,
                                struct cox_client_connection *client);
/* The client's process is dead, as its pidfd shows. The connection may still be open: in a forked
 * child, or in the queue of a socket among the client's entries. */
void cox_client_connection_died(struct cox_socket_server *server,
                                struct cox_client_connection *client);
/* Sends the reason and drops the client; calls no hook. */
void cox_client_connection_refuse(struct cox_socket_server *server,
                                  struct cox_client_connection *client, int code,
                                  const char *format, ...) __attribute__((format(printf, 4, 5)));
/* Closes the client's fds and removes its entries; calls no hook. Idempotent. */
void cox_client_connection_drop(struct cox_socket_server *server,
                                struct cox_client_connection *client);
/* Sends a refusal over a connection that is not a client yet. Whether it arrives is not checked. fd
 * stays the caller's. */
void cox_client_connection_turn_away(int fd, int code, const char *reason);

#endif
