/* nodes-bench-tcp: the floor. A frame is a u32 of its size, then its bytes, sent in one call; the
 * lead blocks in one epoll for all nodes. Neither authenticated nor encrypted. */
#include "stream.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

/* What of a frame has been received. */
struct frame {
    /* owned: the size, then size_max bytes */
    uint8_t *bytes;
    size_t have, size_max;
};

struct lead {
    struct peer_options options;
    int fds[PEER_NODES_MAX];
    struct frame frames[PEER_NODES_MAX];
    int epoll_fd;
};

static bool frame_init(struct frame *frame, size_t size_max)
{
    *frame = (struct frame){.bytes = malloc(sizeof(uint32_t) + size_max), .size_max = size_max};
    return frame->bytes != NULL;
}

/* One recv, which in most cases has all. Returns the frame's size once it is complete, 0 if it is
 * not, or an error. */
static ssize_t frame_receive(struct frame *frame, int fd)
{
    uint32_t size;
    ssize_t n =
        recv(fd, frame->bytes + frame->have, sizeof size + frame->size_max - frame->have, 0);
    if (n <= 0)
        return n == 0 ? -ECONNRESET : errno == EINTR ? 0 : -errno;
    frame->have += (size_t)n;
    if (frame->have < sizeof size)
        return 0;
    memcpy(&size, frame->bytes, sizeof size);
    /* One frame is under way at a time. */
    if (size == 0 || size > frame->size_max || frame->have > sizeof size + size)
        return -EBADMSG;
    if (frame->have < sizeof size + size)
        return 0;
    frame->have = 0;
    return (ssize_t)size;
}

static int frame_send(int fd, const void *bytes, size_t size)
{
    uint32_t prefix = (uint32_t)size;
    struct iovec parts[2] = {{.iov_base = &prefix, .iov_len = sizeof prefix},
                             {.iov_base = (void *)(uintptr_t)bytes, .iov_len = size}};
    const struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    ssize_t n;
    do
        n = sendmsg(fd, &message, MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        return -errno;
    const size_t sent = (size_t)n, all = sizeof prefix + size;
    if (sent >= sizeof prefix)
        return stream_send(fd, (const uint8_t *)bytes + (sent - sizeof prefix), all - sent);
    int r = stream_send(fd, (const uint8_t *)&prefix + sent, sizeof prefix - sent);
    return r ? r : stream_send(fd, bytes, size);
}

static void lead_stop(void *peer)
{
    struct lead *lead = peer;
    for (uint32_t i = 0; i < lead->options.node_count; i++) {
        close(lead->fds[i]);
        free(lead->frames[i].bytes);
    }
    close(lead->epoll_fd);
    free(lead);
}

static int lead_start(const struct peer_options *options, void **ret_lead)
{
    struct lead *lead = calloc(1, sizeof *lead);
    if (!lead)
        return peer_fail_errno("the lead", ENOMEM);
    lead->options = *options;
    int r = stream_accept(options, lead->fds);
    if (r) {
        free(lead);
        return r;
    }
    lead->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    for (uint32_t i = 0; r == 0 && i < options->node_count; i++) {
        struct epoll_event event = {.events = EPOLLIN, .data.u32 = i};
        if (!frame_init(&lead->frames[i], options->reply_size))
            r = -ENOMEM;
        else if (epoll_ctl(lead->epoll_fd, EPOLL_CTL_ADD, lead->fds[i], &event) < 0)
            r = -errno;
    }
    if (r) {
        lead_stop(lead);
        return peer_fail_errno("the lead", -r);
    }
    *ret_lead = lead;
    return 0;
}

static int lead_step(void *peer, const uint8_t *request, struct peer_replies *replies)
{
    struct lead *lead = peer;
    for (uint32_t i = 0; i < lead->options.node_count; i++) {
        int r = frame_send(lead->fds[i], request, lead->options.request_size);
        if (r)
            return r;
    }
    while (replies->left > 0) {
        struct epoll_event events[PEER_NODES_MAX];
        int count = epoll_wait(lead->epoll_fd, events, PEER_NODES_MAX, -1);
        if (count < 0 && errno != EINTR)
            return -errno;
        for (int i = 0; i < count; i++) {
            const uint32_t node = events[i].data.u32;
            struct frame *frame = &lead->frames[node];
            ssize_t size = frame_receive(frame, lead->fds[node]);
            if (size < 0)
                return (int)size;
            int r = size ? peer_replies_take(replies, frame->bytes + sizeof(uint32_t), (size_t)size)
                         : 0;
            if (r)
                return r;
        }
    }
    return 0;
}

static int lead_bulk(void *peer, const uint8_t *chunk)
{
    struct lead *lead = peer;
    const size_t all = lead->options.bulk_size;
    uint8_t acknowledged;
    for (size_t sent = 0; sent < all;) {
        const size_t rest = all - sent;
        const size_t size = rest < lead->options.chunk_size ? rest : lead->options.chunk_size;
        int r = stream_send(lead->fds[0], chunk, size);
        if (r)
            return peer_fail_errno("bulk", -r);
        sent += size;
    }
    int r = stream_receive(lead->fds[0], &acknowledged, sizeof acknowledged);
    return r ? peer_fail_errno("bulk", -r) : 0;
}

static int serve_bulk(const struct peer_options *options, int fd, uint8_t *chunk)
{
    for (size_t received = 0;;) {
        const size_t rest = options->bulk_size - received;
        ssize_t n = recv(fd, chunk, rest < options->chunk_size ? rest : options->chunk_size, 0);
        if (n <= 0)
            return n == 0 ? -ECONNRESET : -errno;
        received += (size_t)n;
        if (received < options->bulk_size)
            continue;
        received = 0;
        int r = stream_send(fd, chunk, 1);
        if (r)
            return r;
    }
}

static int serve_steps(const struct peer_options *options, int fd, struct frame *frame,
                       uint8_t *reply)
{
    for (;;) {
        ssize_t size = frame_receive(frame, fd);
        if (size < 0)
            return (int)size;
        if (size == 0)
            continue;
        if (!peer_reply(options, frame->bytes + sizeof(uint32_t), (size_t)size, reply))
            return -EBADMSG;
        int r = frame_send(fd, reply, options->reply_size);
        if (r)
            return r;
    }
}

static int node_main(const struct peer_options *options)
{
    struct frame frame = {0};
    uint8_t *buffer = calloc(1, options->bulk ? options->chunk_size : options->reply_size);
    int r = -ENOMEM, fd = stream_connect(options);
    if (fd < 0)
        return fd;
    if (buffer && options->bulk)
        r = serve_bulk(options, fd, buffer);
    else if (buffer && frame_init(&frame, options->request_size))
        r = serve_steps(options, fd, &frame, buffer);
    close(fd);
    free(frame.bytes);
    free(buffer);
    return r == -ECONNRESET ? 0 : peer_fail_errno("serving", -r);
}

int main(int argc, char **argv)
{
    static const struct peer_ops ops = {.transport = "tcp",
                                        .start = lead_start,
                                        .step = lead_step,
                                        .bulk = lead_bulk,
                                        .stop = lead_stop,
                                        .node = node_main};
    return peer_main(argc, argv, &ops);
}
