#include "socket.h"

#include "channel/base/base_internal.h"
#include "channel/base/fault.h"
#include "channel/base/idioms.h"

#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

/* SCM_MAX_FD of the kernel: with room for all of them a sender cannot make it cut the list. */
#define KERNEL_FD_COUNT_MAX 253

/* In a union, because an array of chars alone has no alignment. */
union control {
    char bytes[CMSG_SPACE(KERNEL_FD_COUNT_MAX * sizeof(int)) + CMSG_SPACE(64)];
    struct cmsghdr header;
};

/* What one recvmsg has received. */
struct arrival {
    int fds[KERNEL_FD_COUNT_MAX];
    uint32_t fd_count;
};

static void fds_close(int *fds, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        cox_close_fd(&fds[i]);
}

int cox_socket_pair(int ret_fds[2])
{
    int fds[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) < 0)
        return -errno;
    int r = cox_fd_raise(&fds[0]);
    if (r == 0)
        r = cox_fd_raise(&fds[1]);
    if (r) {
        fds_close(fds, 2);
        return r;
    }
    memcpy(ret_fds, fds, sizeof fds);
    return 0;
}

int cox_socket_wait(int fd, short events, uint64_t deadline_ns)
{
    for (;;) {
        struct pollfd p = {.fd = fd, .events = events};
        int count = poll(&p, 1, cox_deadline_poll_ms(deadline_ns));
        if (count > 0)
            return p.revents & POLLNVAL ? -EBADF : 0;
        if (count < 0 && errno != EINTR)
            return -errno;
        if (count == 0 && cox_now_ns() >= deadline_ns)
            return COX_TIMEOUT;
    }
}

/* Returns 0; COX_EMPTY: there is no room; COX_CLOSED; COX_FULL; -errno. */
static int socket_send_some(int fd, const uint8_t *bytes, size_t size, const int *fds,
                            uint32_t fd_count, size_t *ret_size)
{
    union control control;
    struct iovec part = {.iov_base = (void *)bytes, .iov_len = size};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd_count) {
        /* Also the padding between header and fds. */
        memset(&control, 0, sizeof control);
        message.msg_control = &control;
        message.msg_controllen = CMSG_SPACE(fd_count * sizeof *fds);
        control.header.cmsg_level = SOL_SOCKET;
        control.header.cmsg_type = SCM_RIGHTS;
        control.header.cmsg_len = CMSG_LEN(fd_count * sizeof *fds);
        memcpy(CMSG_DATA(&control.header), fds, fd_count * sizeof *fds);
    }
    ssize_t sent;
    do
        sent = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (sent < 0 && errno == EINTR);
    int e = sent < 0 ? errno : 0;
    cox_fault_point(COX_FAULT_SOCKET_SENT);
    if (e == 0) {
        *ret_size = (size_t)sent;
        return 0;
    }
    if (e == EAGAIN || e == EWOULDBLOCK)
        return COX_EMPTY;
    if (e == EPIPE || e == ECONNRESET)
        return COX_CLOSED;
    return e == ETOOMANYREFS ? COX_FULL : -e;
}

int cox_socket_send(int fd, const void *bytes, size_t size, const int *fds, uint32_t fd_count,
                    uint64_t deadline_ns)
{
    COX_ASSERT(size > 0 && fd_count <= COX_SOCKET_FD_COUNT_MAX);
    const uint8_t *next = bytes;
    while (size > 0) {
        size_t sent = 0;
        int r = socket_send_some(fd, next, size, fds, fd_count, &sent);
        if (r == COX_EMPTY)
            r = cox_socket_wait(fd, POLLOUT, deadline_ns);
        if (r)
            return r;
        next += sent;
        size -= sent;
        if (sent > 0)
            fd_count = 0;
    }
    return 0;
}

/* Collects all fds of a message, whatever else it contains. Returns 0; COX_CORRUPT: it contains
 * something else. */
static int arrival_collect(struct arrival *arrival, struct msghdr *message)
{
    int r = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c; c = CMSG_NXTHDR(message, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) {
            r = COX_CORRUPT;
            continue;
        }
        size_t size = c->cmsg_len - CMSG_LEN(0);
        for (size_t at = 0; at + sizeof(int) <= size; at += sizeof(int)) {
            COX_ASSERT(arrival->fd_count < KERNEL_FD_COUNT_MAX); /* the buffer holds no more */
            memcpy(&arrival->fds[arrival->fd_count++], CMSG_DATA(c) + at, sizeof(int));
        }
    }
    return r;
}

/* The kernel truncated the list although there was room for every fd. */
static int arrival_cut(int fd)
{
    _cox_cleanup_(cox_close_fd) int other = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    return other < 0 ? -errno : COX_CORRUPT;
}

int cox_socket_receive_some(int fd, void *bytes, size_t size, size_t *ret_size, int *ret_fds,
                            uint32_t fd_count_max, uint32_t *ret_fd_count)
{
    COX_ASSERT(size > 0);
    union control control;
    struct arrival arrival = {.fd_count = 0};
    struct iovec part = {.iov_base = bytes, .iov_len = size};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = &control,
                             .msg_controllen = sizeof control};
    ssize_t count;
    do
        count = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    while (count < 0 && errno == EINTR);
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        return COX_EMPTY;
    if (count < 0 && errno != ECONNRESET) /* reset: the peer closed with our bytes unread */
        return -errno;
    int r = count > 0 ? arrival_collect(&arrival, &message) : 0;
    if (count > 0 && message.msg_flags & MSG_CTRUNC)
        r = arrival_cut(fd);
    if (r == 0 && arrival.fd_count > fd_count_max)
        r = COX_CORRUPT;
    for (uint32_t i = 0; r == 0 && i < arrival.fd_count; i++)
        r = cox_fd_raise(&arrival.fds[i]);
    if (r) {
        fds_close(arrival.fds, arrival.fd_count);
        return r;
    }
    if (arrival.fd_count)
        memcpy(ret_fds, arrival.fds, arrival.fd_count * sizeof *ret_fds);
    *ret_fd_count = arrival.fd_count;
    *ret_size = count > 0 ? (size_t)count : 0;
    return 0;
}

int cox_socket_receive(int fd, void *bytes, size_t size, int *ret_fds, uint32_t fd_count_max,
                       uint32_t *ret_fd_count, uint64_t deadline_ns)
{
    COX_ASSERT(size > 0 && fd_count_max <= COX_SOCKET_FD_COUNT_MAX);
    int fds[COX_SOCKET_FD_COUNT_MAX], r = 0;
    uint32_t fd_count = 0;
    for (size_t done = 0; r == 0 && done < size;) {
        size_t came = 0;
        uint32_t fds_came = 0;
        r = cox_socket_receive_some(fd, (uint8_t *)bytes + done, size - done, &came, fds + fd_count,
                                    fd_count_max - fd_count, &fds_came);
        if (r == COX_EMPTY)
            r = cox_socket_wait(fd, POLLIN, deadline_ns);
        else if (r == 0 && came == 0)
            r = done == 0 ? COX_CLOSED : COX_CORRUPT;
        done += came;
        fd_count += fds_came;
    }
    if (r) {
        fds_close(fds, fd_count);
        return r;
    }
    if (fd_count)
        memcpy(ret_fds, fds, fd_count * sizeof *fds);
    if (ret_fd_count)
        *ret_fd_count = fd_count;
    return 0;
}

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

int cox_socket_open_peer(int fd, int *ret_pidfd)
{
    int pidfd = -1;
    socklen_t size = sizeof pidfd;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &size) < 0)
        return errno == ENOPROTOOPT                                    ? COX_UNSUPPORTED
               : errno == EINVAL || errno == ESRCH || errno == ENODATA ? COX_PEER_DEAD
                                                                       : -errno;
    int r = cox_fd_raise(&pidfd);
    if (r) {
        cox_close_fd(&pidfd);
        return r;
    }
    *ret_pidfd = pidfd;
    return 0;
}

int cox_socket_read_peer(int fd, struct cox_socket_peer *ret_peer)
{
    struct ucred credentials;
    socklen_t size = sizeof credentials;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &size) < 0)
        return -errno;
    *ret_peer = (struct cox_socket_peer){
        .pid = credentials.pid, .uid = credentials.uid, .gid = credentials.gid};
    return 0;
}
