/*
 * fd store: fds stored at a group's control socket, for processes that have a by-value handle
 * (handle.h) and cannot take the fd from its owner with pidfd_getfd.
 *
 * An owner keeps one connection. When the connection or the owner's process ends, its entries are
 * removed, even if a forked child still has the connection open. Every process of this user that
 * has the 64 bytes of a handle can get a duplicate of the fd.
 *
 * Threads: one at a time per struct cox_fd_store.
 * Ownership: stored fds are duplicated by the kernel and stay the caller's; a fetched one is the
 *   caller's.
 * Blocks: until the deadline.
 * If the process dies: the control socket removes its entries. If the coordinator dies: all entries
 *   are gone.
 */
#ifndef COX_CHANNEL_FD_STORE_H
#define COX_CHANNEL_FD_STORE_H

#include <coxswain/handle.h>

struct cox_fd_store {
    /* connection to the control socket; -1: none */
    int fd;
};

/* Returns 0, or what cox_control_socket_connect returns. */
int cox_fd_store_connect(struct cox_fd_store *fd_store, const char *socket_path,
                         uint64_t deadline_ns, struct cox_error *err);
void cox_fd_store_close(struct cox_fd_store *fd_store); /* idempotent */
/* Stores fd under this handle. The handle must name this process (its pid is in the handle) and
 * this fd.
 * Returns
 *   0
 *   COX_FULL: the control socket stores no more
 *   COX_DENIED: a handle of another process or another object
 *   COX_TAKEN: stored already
 *   COX_TIMEOUT: it may be stored or not
 *   COX_CLOSED: the control socket is gone, or has dropped the connection with all its entries
 *   COX_CORRUPT: an invalid reply; the connection is closed
 *   -errno
 */
int cox_fd_store_put(struct cox_fd_store *fd_store, const struct cox_handle *handle, int fd,
                     uint64_t deadline_ns, struct cox_error *err);
/* Removes an entry of this connection. Returns 0; COX_NOT_FOUND; COX_TIMEOUT; COX_CLOSED;
 * COX_CORRUPT; -errno. */
int cox_fd_store_remove(struct cox_fd_store *fd_store, const struct cox_handle *handle,
                        uint64_t deadline_ns, struct cox_error *err);
/* Gets a duplicate of the fd stored under the handle.
 * Returns
 *   0
 *   COX_NOT_FOUND
 *   COX_FULL: too many fds of this user are in flight
 *   COX_TIMEOUT
 *   COX_CLOSED
 *   COX_CORRUPT
 *   -errno
 */
int cox_fd_store_get(struct cox_fd_store *fd_store, const struct cox_handle *handle,
                     uint64_t deadline_ns, int *ret_fd, struct cox_error *err);

#endif
