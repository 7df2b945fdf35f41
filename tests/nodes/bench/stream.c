#include "stream.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define RETRY_MS 5

static int open_socket(const char *text, struct sockaddr_in *ret_address)
{
    const int on = 1;
    *ret_address = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons(PEER_PORT)};
    if (inet_pton(AF_INET, text, &ret_address->sin_addr) != 1)
        return -EINVAL;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -errno;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    /* Accepted sockets inherit it. */
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return fd;
}

static void close_all(int *fds, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        if (fds[i] >= 0)
            close(fds[i]);
        fds[i] = -1;
    }
}

static int accept_one(int listener, int *fds, uint32_t count)
{
    uint32_t index;
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0)
        return -errno;
    int r = stream_receive(fd, &index, sizeof index);
    if (r == 0 && (index >= count || fds[index] >= 0))
        r = -EBADMSG;
    if (r)
        close(fd);
    else
        fds[index] = fd;
    return r;
}

int stream_accept(const struct peer_options *options, int *ret_fds)
{
    struct sockaddr_in address;
    int listener = open_socket(options->lead, &address), r = 0;
    if (listener < 0)
        return peer_fail_errno(options->lead, -listener);
    for (uint32_t i = 0; i < options->node_count; i++)
        ret_fds[i] = -1;
    if (bind(listener, (struct sockaddr *)&address, sizeof address) < 0 ||
        listen(listener, PEER_NODES_MAX) < 0)
        r = -errno;
    for (uint32_t i = 0; r == 0 && i < options->node_count; i++)
        r = accept_one(listener, ret_fds, options->node_count);
    close(listener);
    if (r == 0)
        return 0;
    close_all(ret_fds, options->node_count);
    return peer_fail_errno("accepting nodes", -r);
}

int stream_connect(const struct peer_options *options)
{
    const struct timespec pause = {.tv_nsec = RETRY_MS * 1000000L};
    for (int waited_ms = 0;; waited_ms += RETRY_MS) {
        struct sockaddr_in address;
        int fd = open_socket(options->lead, &address);
        if (fd < 0)
            return peer_fail_errno(options->lead, -fd);
        if (connect(fd, (struct sockaddr *)&address, sizeof address) == 0) {
            int r = stream_send(fd, &options->index, sizeof options->index);
            if (r == 0)
                return fd;
            errno = -r;
        }
        const int error = errno;
        close(fd);
        if (error != ECONNREFUSED || waited_ms >= STREAM_PATIENCE_MS)
            return peer_fail_errno("connecting to the lead", error);
        nanosleep(&pause, NULL);
    }
}

int stream_send(int fd, const void *bytes, size_t size)
{
    for (size_t done = 0; done < size;) {
        ssize_t n = send(fd, (const uint8_t *)bytes + done, size - done, MSG_NOSIGNAL);
        if (n < 0 && errno != EINTR)
            return -errno;
        done += n < 0 ? 0 : (size_t)n;
    }
    return 0;
}

int stream_receive(int fd, void *bytes, size_t size)
{
    for (size_t done = 0; done < size;) {
        ssize_t n = recv(fd, (uint8_t *)bytes + done, size - done, 0);
        if (n == 0)
            return -ECONNRESET;
        if (n < 0 && errno != EINTR)
            return -errno;
        done += n < 0 ? 0 : (size_t)n;
    }
    return 0;
}
