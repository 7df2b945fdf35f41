/*
 * socket: sends and receives bytes and file descriptors over connected unix sockets, with
 * deadlines; and listens and connects at paths.
 *
 * Threads: any; on one socket, one at a time sends and one at a time receives.
 * Ownership: fds that are sent stay the caller's. The caller owns received fds, which are all
 *   close-on-exec and 3 or above. On failure it gets none.
 * Blocks: send, receive, accept and connect until their deadline, whether or not the socket is in
 *   blocking mode.
 * If the process dies: the kernel keeps sent data until it is received. The path of a listening
 *   socket stays; connecting to it fails, and cox_socket_unlink removes it.
 */
#ifndef COX_CHANNEL_SOCKET_H
#define COX_CHANNEL_SOCKET_H

#include <coxswain/base.h>

#include <sys/types.h>

/* File descriptors in one message, at most. The kernel's limit is 253. */
#define COX_SOCKET_FD_COUNT_MAX 128

/* Two connected stream sockets, close-on-exec. Returns 0 or -errno. */
int cox_socket_pair(int ret_fds[2]);

/* Creates a socket that listens at path, with mode 0600: only this user and root can connect. Never
 * removes an existing file at path. The path may be longer than a socket address; its last
 * component has 1 to 82 bytes.
 * Returns
 *   0
 *   COX_INVALID: the path
 *   COX_TAKEN: a file is there, possibly the socket of a dead process
 *   COX_NOT_FOUND: no such folder
 *   COX_DENIED
 *   -errno
 */
int cox_socket_listen(const char *path, int *ret_fd, struct cox_error *err);
/* Accepts the next connection.
 * Returns
 *   0
 *   COX_TIMEOUT
 *   -errno
 */
int cox_socket_accept(int listen_fd, uint64_t deadline_ns, int *ret_fd);
/* Connects to the socket at path, if its process is of this user or of root.
 * Returns
 *   0
 *   COX_INVALID: the path
 *   COX_NOT_FOUND
 *   COX_CLOSED: no process listens there any more
 *   COX_DENIED: another user's process, or not a socket
 *   COX_TIMEOUT: its queue of connections was full until the deadline
 *   -errno
 */
int cox_socket_connect(const char *path, uint64_t deadline_ns, int *ret_fd, struct cox_error *err);
/* Removes the path, even while a process listens there; connections stay.
 * Returns
 *   0: also if it does not exist
 *   COX_INVALID: the path
 *   COX_DENIED: not a socket
 *   -errno
 */
int cox_socket_unlink(const char *path, struct cox_error *err);

/* Sends all of bytes (size at least 1), and the fds with the first of them. Never raises SIGPIPE.
 * Tries once even if the deadline has passed; a deadline of 0 does not block.
 * Returns
 *   0
 *   COX_TIMEOUT: some bytes may have been sent
 *   COX_CLOSED: the other side has closed
 *   COX_FULL: too many fds of this user are in flight in the kernel (ETOOMANYREFS)
 *   -errno
 */
int cox_socket_send(int fd, const void *bytes, size_t size, const int *fds, uint32_t fd_count,
                    uint64_t deadline_ns);
/* Receives exactly size bytes (at least 1), and the fds sent with them. On failure it closes all
 * received fds, and the received bytes are lost.
 * Returns
 *   0
 *   COX_TIMEOUT
 *   COX_CLOSED: the other side closed before the first byte
 *   COX_CORRUPT: the other side closed after it, or sent more than fd_count_max fds, or other
 *     control messages
 *   -EMFILE: the received fds exceed the fd limit of this process
 *   -errno
 */
int cox_socket_receive(int fd, void *bytes, size_t size, int *ret_fds, uint32_t fd_count_max,
                       uint32_t *ret_fd_count, uint64_t deadline_ns);

/* Receives up to size bytes (at least 1) that have arrived, and the fds sent with them. Does not
 * block. *ret_size 0: the other side has closed.
 * Returns
 *   0
 *   COX_EMPTY: nothing has arrived
 *   COX_CORRUPT and -errno as cox_socket_receive
 */
int cox_socket_receive_some(int fd, void *bytes, size_t size, size_t *ret_size, int *ret_fds,
                            uint32_t fd_count_max, uint32_t *ret_fd_count);
/* Waits for events (poll.h), an error or the end of the connection.
 * Returns
 *   0
 *   COX_TIMEOUT
 *   -errno
 */
int cox_socket_wait(int fd, short events, uint64_t deadline_ns);

/* The process at the other end, as the kernel reports it (SO_PEERCRED). */
struct cox_socket_peer {
    /* 0: the process is in a pid namespace that is not visible from this one */
    pid_t pid;
    uid_t uid;
    gid_t gid;
};
/* Returns 0 or -errno. */
int cox_socket_read_peer(int fd, struct cox_socket_peer *ret_peer);
/* A pidfd of the process that connected: even if its pid has another process by now (Linux 6.5).
 * Returns
 *   0
 *   COX_UNSUPPORTED: an older kernel
 *   COX_PEER_DEAD
 *   -errno
 */
int cox_socket_open_peer(int fd, int *ret_pidfd);

#endif
