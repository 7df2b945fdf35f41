/*
 * client: one connection at a control socket, from its first byte: the hello, its reply, and what
 * comes after.
 *
 *            frame in order              asks
 *   HELLO ------------------> FD_OWNER -----> FD_OWNER
 *     |  \\------------------> WORKER
 *     |  \\------------------> given away (a command)
 *     +--- refused, late, left              each of them, at its end: dropped
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
    /* of what clients cause */
    struct cox_log_limit log;
    uint64_t hello_ms;
    /* the rest of the places is for workers and commands */
    uint32_t fd_owner_count, fd_owner_max;
    struct cox_fd_entries fd_entries;
    /* borrowed; of all that clients sent, and of their connections */
    struct cox_closer *closer;
};

enum cox_client_connection_state {
    COX_CLIENT_HELLO,    /* its frame is not complete */
    COX_CLIENT_WORKER,   /* accepted; nothing but its end is expected */
    COX_CLIENT_FD_OWNER, /* accepted; asks */
};

struct cox_client_connection {
    enum cox_client_connection_state state;
    /* -1: dropped, or given away */
    int fd;
    /* of its hello */
    uint64_t deadline_ns;
    struct cox_control_client who;
    /* of its frame, or of its request */
    uint8_t bytes[COX_HELLO_SIZE + 1];
    size_t received;
    /* with its request; -1: none */
    int brought_fd;
    struct cox_fd_owner fd_owner;
    /* of its process, while something is left of it; -1: is not watched */
    int pidfd;
};

/* There is something to read, or its connection has ended. */
void cox_client_connection_read(struct cox_socket_server *server,
                                struct cox_client_connection *client);
/* Its pidfd says that it is dead. Its connection may live on: the child of a fork has it, or it is
 * itself among what was left. */
void cox_client_connection_died(struct cox_socket_server *server,
                                struct cox_client_connection *client);
/* Tells it why, and drops it; no hook is called. */
void cox_client_connection_refuse(struct cox_socket_server *server,
                                  struct cox_client_connection *client, int code,
                                  const char *format, ...) __attribute__((format(printf, 4, 5)));
/* Closes what it has, forgets what it left; no hook is called. Idempotent. */
void cox_client_connection_drop(struct cox_socket_server *server,
                                struct cox_client_connection *client);
/* A refusal for a connection that has not become a client; whether it gets there is its own
 * affair. fd stays the caller's. */
void cox_client_connection_turn_away(int fd, int code, const char *reason);

#endif
