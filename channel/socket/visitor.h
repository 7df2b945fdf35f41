/*
 * visitor: one connection at a control socket, from its first byte: the logon, its answer, and what
 * comes after.
 *
 *            frame in order              asks
 *   LOGON ------------------> FD_OWNER -----> FD_OWNER
 *     |  \\------------------> WORKER
 *     |  \\------------------> given away (a command)
 *     +--- refused, late, left              each of them, at its end: dropped
 *
 * Private to the library.
 * Threads: the control socket's.
 * Ownership: a visitor owns its fds until a command is given away; hooks are the control socket's.
 * Blocks: nothing.
 * If the process dies: connections close, nothing is left.
 */
#ifndef COX_CHANNEL_VISITOR_H
#define COX_CHANNEL_VISITOR_H

#include "fd_entries.h"
#include "control_socket.h"
#include "channel/base/log_limit.h"

/* What all visitors of a control socket share. */
struct cox_reception {
    struct cox_control_socket_hooks hooks;
    /* of what visitors cause */
    struct cox_log_limit log;
    uint64_t logon_ms;
    /* the rest of the places is for workers and commands */
    uint32_t fd_owner_count, fd_owner_max;
    struct cox_fd_entries fd_entries;
    /* borrowed; of all that visitors sent, and of their connections */
    struct cox_closer *closer;
};

enum cox_visitor_state {
    COX_VISITOR_LOGON,    /* its frame is not complete */
    COX_VISITOR_WORKER,   /* welcomed; nothing but its end is expected */
    COX_VISITOR_FD_OWNER, /* welcomed; asks */
};

struct cox_visitor {
    enum cox_visitor_state state;
    /* -1: dropped, or given away */
    int fd;
    /* of its logon */
    uint64_t deadline_ns;
    struct cox_control_client who;
    /* of its frame, or of its request */
    uint8_t bytes[COX_LOGON_SIZE + 1];
    size_t received;
    /* with its request; -1: none */
    int brought_fd;
    struct cox_fd_owner fd_owner;
    /* of its process, while something is left of it; -1: is not watched */
    int pidfd;
};

/* There is something to read, or its connection has ended. */
void cox_visitor_read(struct cox_reception *reception, struct cox_visitor *visitor);
/* Its pidfd says that it is dead. Its connection may live on: the child of a fork has it, or it is
 * itself among what was left. */
void cox_visitor_died(struct cox_reception *reception, struct cox_visitor *visitor);
/* Tells it why, and drops it; no hook is called. */
void cox_visitor_refuse(struct cox_reception *reception, struct cox_visitor *visitor, int code,
                        const char *format, ...) __attribute__((format(printf, 4, 5)));
/* Closes what it has, forgets what it left; no hook is called. Idempotent. */
void cox_visitor_drop(struct cox_reception *reception, struct cox_visitor *visitor);
/* A refusal for a connection that has not become a visitor; whether it gets there is its own
 * affair. fd stays the caller's. */
void cox_visitor_turn_away(int fd, int code, const char *reason);

#endif
