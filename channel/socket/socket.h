/*
 * socket: bytes and file descriptors over a connected unix socket, each under a deadline; and names
 * by which processes that share nothing find each other.
 *
 * Usable alone: nothing here knows of groups or control sockets.
 *
 * Threads: any; one at a time sends, one at a time receives on a socket.
 * Ownership: fds that are sent stay the caller's; fds that are received are the caller's, all of
 *   them close-on-exec and 3 or above. After a failure none was received.
 * Blocks: send, receive, accept and connect until their deadline, whether or not the socket blocks.
 * If the process dies: what was sent is the kernel's until it is received; the name of a socket
 *   that listened stays, nobody can connect to it any more, and cox_socket_unlink removes it.
 */
#ifndef COX_CHANNEL_SOCKET_H
#define COX_CHANNEL_SOCKET_H

#include "../base/base.h"

#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* File descriptors in one message, at most: the kernel's limit is 253. */
#define COX_SOCKET_FD_COUNT_MAX 128

#ifdef COX_INTERNAL
/* Two connected stream sockets, close-on-exec. Returns 0 or -errno. */
int cox_socket_pair(int ret_fds[2]);
#endif

/* A socket that listens at path, of mode 0600: nobody else but root can connect. What has that name
 * already is left alone. The path may be longer than an address; its last part has 1 to 82 bytes.
 * Returns
 *   0
 *   COX_INVALID: the path
 *   COX_TAKEN: something is there, perhaps a socket of the dead
 *   COX_NOT_FOUND: no such folder
 *   COX_DENIED
 *   -errno
 */
COX_PUBLIC int cox_socket_listen(const char *path, int *ret_fd, struct cox_error *err);
/* Takes the next process that has connected.
 * Returns
 *   0
 *   COX_TIMEOUT
 *   -errno
 */
COX_PUBLIC int cox_socket_accept(int listen_fd, uint64_t deadline_ns, int *ret_fd);
/* Connects to whoever listens at path, if that is a process of this user or of root.
 * Returns
 *   0
 *   COX_INVALID: the path
 *   COX_NOT_FOUND
 *   COX_CLOSED: nobody listens there any more
 *   COX_DENIED: another user's, or no socket
 *   COX_TIMEOUT: so many wait there already
 *   -errno
 */
COX_PUBLIC int cox_socket_connect(const char *path, uint64_t deadline_ns, int *ret_fd,
                                  struct cox_error *err);
/* Takes the name away, whoever listens; connections stay.
 * Returns
 *   0, also when there is none
 *   COX_INVALID: the path
 *   COX_DENIED: no socket
 *   -errno
 */
COX_PUBLIC int cox_socket_unlink(const char *path, struct cox_error *err);

/* Sends all of bytes (size at least 1), and the fds with the first of them. SIGPIPE is never
 * raised. Tries once whatever the deadline, so that a deadline of 0 does not wait.
 * Returns
 *   0
 *   COX_TIMEOUT: some bytes may be sent
 *   COX_CLOSED: the other side is gone
 *   COX_FULL: the kernel holds too many fds of this user that nobody has received (ETOOMANYREFS)
 *   -errno
 */
COX_PUBLIC int cox_socket_send(int fd, const void *bytes, size_t size, const int *fds,
                               uint32_t fd_count, uint64_t deadline_ns);
/* Receives exactly size bytes (at least 1), and the fds that came with them. Unless 0 every fd that
 * came is closed, and the bytes that came are lost.
 * Returns
 *   0
 *   COX_TIMEOUT
 *   COX_CLOSED: the other side closed before the first byte
 *   COX_CORRUPT: it closed half-way, or sent more than fd_count_max fds, or other control messages
 *   -EMFILE: this process may not have as many fds as came
 *   -errno
 */
COX_PUBLIC int cox_socket_receive(int fd, void *bytes, size_t size, int *ret_fds,
                                  uint32_t fd_count_max, uint32_t *ret_fd_count,
                                  uint64_t deadline_ns);

#ifdef COX_INTERNAL
/* Receives what there is, up to size bytes (at least 1), and the fds that came with it, without
 * waiting. *ret_size 0: the other side has closed.
 * Returns
 *   0
 *   COX_EMPTY: nothing is there yet
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
#endif

/* Who is at the other end, as the kernel knows it. */
struct cox_socket_peer {
    /* 0: in a pid namespace that cannot be seen from here */
    pid_t pid;
    uid_t uid;
    gid_t gid;
};
/* Returns 0 or -errno. */
COX_PUBLIC int cox_socket_peer(int fd, struct cox_socket_peer *ret_peer);

#ifdef __cplusplus
}
#endif

#endif
