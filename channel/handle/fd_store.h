/*
 * fd store: fds left at a group's control socket, for those who hold a by-value handle (handle.h)
 * and cannot, or may not, take the fd out of its owner with pidfd_getfd.
 *
 * An fd owner keeps one connection; whatever it left is forgotten when that ends, or its process,
 * though the child of a fork may still have the connection. Whoever has the 64 bytes of a handle
 * and is of this user gets a duplicate of the fd.
 *
 * Threads: one at a time per struct cox_fd_store.
 * Ownership: fds that are left are duplicated by the kernel and stay the caller's; a fetched one is
 *   the caller's.
 * Blocks: until the deadline.
 * If the process dies: the control socket forgets what it left. If the coordinator dies, all is
 * forgotten.
 */
#ifndef COX_CHANNEL_FD_STORE_H
#define COX_CHANNEL_FD_STORE_H

#include "handle.h"

struct cox_fd_store {
    /* connection to the control socket; -1: none */
    int fd;
};

/* Returns 0, or what cox_control_socket_connect returns. */
int cox_fd_store_connect(struct cox_fd_store *fd_store, const char *socket_path,
                         uint64_t deadline_ns, struct cox_error *err);
void cox_fd_store_close(struct cox_fd_store *fd_store); /* idempotent */
/* Leaves fd under this handle. Only for handles of the process that is connected (its pid is in the
 * handle) that mean this fd. Returns 0; COX_FULL: the control socket keeps no more; COX_DENIED: a
 * handle of another process or another object; COX_TAKEN: there already; COX_TIMEOUT: it may be
 * there or not; COX_CLOSED: the control socket is gone, or has dropped the connection with all that
 * was left on it; COX_CORRUPT: the reply makes no sense, the connection is closed; -errno. */
int cox_fd_store_put(struct cox_fd_store *fd_store, const struct cox_handle *handle, int fd,
                     uint64_t deadline_ns, struct cox_error *err);
/* Forgets what was left on this connection. Returns 0; COX_NOT_FOUND; COX_TIMEOUT; COX_CLOSED;
 * COX_CORRUPT; -errno. */
int cox_fd_store_remove(struct cox_fd_store *fd_store, const struct cox_handle *handle,
                        uint64_t deadline_ns, struct cox_error *err);
/* A duplicate of what was left under the handle. Returns 0; COX_NOT_FOUND; COX_FULL: too many fds
 * of this user are under way; COX_TIMEOUT; COX_CLOSED; COX_CORRUPT; -errno. */
int cox_fd_store_get(struct cox_fd_store *fd_store, const struct cox_handle *handle,
                     uint64_t deadline_ns, int *ret_fd, struct cox_error *err);

#endif
