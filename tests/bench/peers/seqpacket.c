/* bench-seqpacket: Unix sockets, a pair per worker: SOCK_SEQPACKET, one datagram a message, the
 * send buffers raised to hold it. The kernel allows that up to net.core.wmem_max; above,
 * SOCK_STREAM with messages of known size, written to all workers as they take it in, so that one
 * that reads slowly does not keep the others waiting. */
#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/bench/load.h"
#include "tests/bench/subject.h"
#include "workers.h"

/* What the kernel charges a datagram beyond its bytes, generously. */
#define DATAGRAM_OVERHEAD 4096
/* Linux wants all of a datagram but the last 64 KiB as one piece of memory, of at most 4 MiB, and
 * does not find those for ever. Measured at 1 MiB and four workers: 0.5 to 0.7 of what a stream
 * takes. */
#define DATAGRAM_SIZE_MAX (2 * 1024 * 1024)

/* Of a stream, read at once: about what a core's own cache holds. A multiple of eight, for the sum.
 */
#define PIECE_SIZE (256 * 1024)

struct pairs {
    struct subject_options options;
    struct workers workers;
    bool is_stream;
    /* owned; [0] the coordinator's */
    int (*fds)[2];
    /* owned */
    struct pollfd *polls;
    /* owned: of the request, to each */
    size_t *sent_sizes;
    /* owned */
    uint8_t *reply;
};

/* A whole message. Returns 0 or -errno; -EPIPE: the other side is gone. */
static int receive_exactly(int fd, uint8_t *bytes, size_t size)
{
    /* On a stream, a signal or the limit of one call may still cut it. */
    for (size_t done = 0; done < size;) {
        ssize_t n = recv(fd, bytes + done, size - done, MSG_WAITALL);
        if (n == 0)
            return -EPIPE;
        if (n < 0 && errno != EINTR)
            return -errno;
        done += n > 0 ? (size_t)n : 0;
    }
    return 0;
}

static int send_exactly(int fd, const uint8_t *bytes, size_t size)
{
    for (size_t done = 0; done < size;) {
        ssize_t n = send(fd, bytes + done, size - done, MSG_NOSIGNAL);
        if (n < 0 && errno != EINTR)
            return -errno;
        done += n > 0 ? (size_t)n : 0;
    }
    return 0;
}

/* The same, each piece read while it is in the cache; the reply is made. */
static int receive_stream(int fd, const struct load *load, uint8_t *request, uint32_t rank,
                          uint8_t *reply)
{
    uint64_t sum = 0;
    for (size_t done = 0; done < load->request_size;) {
        const size_t left = load->request_size - done;
        const size_t size = left < PIECE_SIZE ? left : PIECE_SIZE;
        int r = receive_exactly(fd, request + done, size);
        if (r)
            return r;
        sum += load_sum(request + done, size);
        done += size;
    }
    load_reply(load, sum, rank, reply);
    return 0;
}

static const char *worker_main(const void *context, uint32_t rank)
{
    const struct pairs *pairs = context;
    const int fd = pairs->fds[rank][1];
    for (uint32_t other = 0; other < pairs->options.rank_count; other++) {
        close(pairs->fds[other][0]);
        if (other != rank)
            close(pairs->fds[other][1]);
    }
    struct load load;
    uint8_t *request = calloc(1, pairs->options.request_size);
    uint8_t *reply = calloc(1, pairs->options.reply_size);
    if (!request || !reply ||
        load_init(&load, pairs->options.request_size, pairs->options.reply_size))
        return "no memory";
    for (;;) {
        int r = pairs->is_stream ? receive_stream(fd, &load, request, rank, reply)
                                 : receive_exactly(fd, request, load.request_size);
        if (r)
            return strerror(-r);
        if (!pairs->is_stream)
            load_answer(&load, request, rank, reply);
        r = send_exactly(fd, reply, load.reply_size);
        if (r)
            return strerror(-r);
    }
}

static void pairs_stop(void *subject)
{
    struct pairs *pairs = subject;
    workers_stop(&pairs->workers);
    for (uint32_t rank = 0; pairs->fds && rank < pairs->options.rank_count; rank++)
        for (int side = 0; side < 2; side++)
            if (pairs->fds[rank][side] >= 0)
                close(pairs->fds[rank][side]);
    free(pairs->fds);
    free(pairs->polls);
    free(pairs->sent_sizes);
    free(pairs->reply);
    free(pairs);
}

/* So that one message fits, as far as the kernel allows. */
static void raise_send_buffer(int fd, size_t size)
{
    const int wanted = size > INT_MAX / 4 ? INT_MAX / 4 : (int)size + DATAGRAM_OVERHEAD;
    int is;
    socklen_t is_size = sizeof is;
    if (getsockopt(fd, SOL_SOCKET, SO_SNDBUF, &is, &is_size) == 0 && is < wanted)
        setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &wanted, sizeof wanted);
}

/* Sends one, which is the only way to know. */
static bool datagrams_fit(size_t size)
{
    int fds[2];
    if (size > DATAGRAM_SIZE_MAX || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) < 0)
        return false;
    uint8_t *bytes = calloc(1, size);
    raise_send_buffer(fds[0], size);
    const bool fits =
        bytes && send(fds[0], bytes, size, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)size;
    free(bytes);
    close(fds[0]);
    close(fds[1]);
    return fits;
}

static int pairs_open(struct pairs *pairs, struct cox_error *err)
{
    const struct subject_options *options = &pairs->options;
    const size_t largest =
        options->request_size > options->reply_size ? options->request_size : options->reply_size;
    pairs->is_stream = !datagrams_fit(largest);
    const int type = pairs->is_stream ? SOCK_STREAM : SOCK_SEQPACKET;
    for (uint32_t rank = 0; rank < options->rank_count; rank++) {
        if (socketpair(AF_UNIX, type | SOCK_CLOEXEC, 0, pairs->fds[rank]) < 0)
            return cox_fail(err, -errno, "socketpair: %s", strerror(errno));
        raise_send_buffer(pairs->fds[rank][0], options->request_size);
        raise_send_buffer(pairs->fds[rank][1], options->reply_size);
    }
    return 0;
}

static int pairs_start(const struct subject_options *options, void **ret_subject,
                       struct cox_error *err)
{
    struct pairs *pairs = calloc(1, sizeof *pairs);
    if (!pairs)
        return cox_fail(err, -ENOMEM, "no memory");
    const uint32_t count = options->rank_count;
    *pairs = (struct pairs){
        .options = *options,
        .fds = calloc(count, sizeof *pairs->fds),
        .polls = calloc(count, sizeof *pairs->polls),
        .sent_sizes = calloc(count, sizeof *pairs->sent_sizes),
        .reply = calloc(1, options->reply_size),
    };
    for (uint32_t rank = 0; pairs->fds && rank < count; rank++)
        pairs->fds[rank][0] = pairs->fds[rank][1] = -1;
    int r = pairs->fds && pairs->polls && pairs->sent_sizes && pairs->reply
                ? pairs_open(pairs, err)
                : cox_fail(err, -ENOMEM, "no memory");
    if (r == 0)
        r = workers_start(&pairs->workers, count, worker_main, pairs, err);
    if (r) {
        pairs_stop(pairs);
        return r;
    }
    workers_go(&pairs->workers);
    for (uint32_t rank = 0; rank < count; rank++) {
        close(pairs->fds[rank][1]);
        pairs->fds[rank][1] = -1;
    }
    *ret_subject = pairs;
    return 0;
}

static int send_datagrams(struct pairs *pairs, const uint8_t *request)
{
    for (uint32_t rank = 0; rank < pairs->options.rank_count; rank++) {
        int r = send_exactly(pairs->fds[rank][0], request, pairs->options.request_size);
        if (r)
            return r;
    }
    return 0;
}

static int send_streams(struct pairs *pairs, const uint8_t *request)
{
    const uint32_t count = pairs->options.rank_count;
    const size_t size = pairs->options.request_size;
    for (uint32_t rank = 0; rank < count; rank++) {
        pairs->sent_sizes[rank] = 0;
        pairs->polls[rank] = (struct pollfd){.fd = pairs->fds[rank][0], .events = POLLOUT};
    }
    for (uint32_t left = count;;) {
        for (uint32_t rank = 0; rank < count; rank++) {
            if (pairs->sent_sizes[rank] == size || pairs->polls[rank].events == 0)
                continue;
            ssize_t n = send(pairs->fds[rank][0], request + pairs->sent_sizes[rank],
                             size - pairs->sent_sizes[rank], MSG_NOSIGNAL | MSG_DONTWAIT);
            if (n < 0 && errno != EAGAIN && errno != EINTR)
                return -errno;
            pairs->sent_sizes[rank] += n > 0 ? (size_t)n : 0;
            if (pairs->sent_sizes[rank] == size) {
                pairs->polls[rank].fd = -1;
                left--;
            }
        }
        if (left == 0)
            return 0;
        if (poll(pairs->polls, count, -1) < 0 && errno != EINTR)
            return -errno;
    }
}

static int pairs_round(void *subject, uint8_t *request, uint64_t round, struct cox_error *err)
{
    struct pairs *pairs = subject;
    int r = pairs->is_stream ? send_streams(pairs, request) : send_datagrams(pairs, request);
    if (r)
        return cox_fail(err, r, "send: %s", strerror(-r));
    for (uint32_t rank = 0; rank < pairs->options.rank_count; rank++) {
        r = receive_exactly(pairs->fds[rank][0], pairs->reply, pairs->options.reply_size);
        if (r)
            return cox_fail(err, r, "recv: %s", strerror(-r));
        if (!load_matches(pairs->reply, rank, round))
            return cox_fail(err, -EBADMSG, "worker %u answered wrongly", rank);
    }
    return 0;
}

int main(int argc, char **argv)
{
    static const struct subject_ops ops = {
        .start = pairs_start, .round = pairs_round, .stop = pairs_stop};
    return subject_main(argc, argv, &ops);
}
