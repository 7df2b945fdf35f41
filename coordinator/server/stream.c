#include "stream.h"

#include "channel/base/base_internal.h"
#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/socket/closer.h"

#include <protobuf-c/protobuf-c.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define PREFIX_SIZE sizeof(uint32_t)
/* Read at a time. */
#define FILL_SIZE ((size_t)64 << 10)
/* Kept between messages; larger memory is released. */
#define KEPT_SIZE ((size_t)256 << 10)

void cox_stream_init(struct cox_stream *stream, int fd)
{
    *stream = (struct cox_stream){.fd = fd};
}

void cox_stream_deinit(struct cox_stream *stream)
{
    cox_close_fd(&stream->fd);
    free(stream->in);
    free(stream->out);
    *stream = (struct cox_stream){.fd = -1};
}

/* Releases memory beyond KEPT_SIZE, so that one large message does not occupy it for the life of
 * the connection. */
static void release(uint8_t **bytes, size_t *capacity)
{
    if (*capacity <= KEPT_SIZE)
        return;
    free(*bytes);
    *bytes = NULL;
    *capacity = 0;
}

/* ---- in ---- */

static void drop_taken(struct cox_stream *stream)
{
    if (!stream->taken)
        return;
    stream->in_size -= stream->taken;
    if (stream->in_size)
        memmove(stream->in, stream->in + stream->taken, stream->in_size);
    else
        release(&stream->in, &stream->in_capacity);
    stream->taken = 0;
}

int cox_stream_fill(struct cox_stream *stream)
{
    drop_taken(stream);
    int r = cox_reserve((void **)&stream->in, &stream->in_capacity, stream->in_size + FILL_SIZE, 1);
    if (r)
        return r;
    size_t size = 0;
    r = cox_closer_receive(stream->fd, stream->in + stream->in_size, FILL_SIZE, &size, NULL);
    stream->in_size += size;
    return r == COX_EMPTY ? 0 : r || size ? r : COX_CLOSED;
}

int cox_stream_next(struct cox_stream *stream, const uint8_t **ret_bytes, size_t *ret_size)
{
    size_t there = stream->in_size - stream->taken;
    if (there < PREFIX_SIZE)
        return COX_EMPTY;
    const uint32_t size = cox_le32_get(stream->in + stream->taken);
    if (size == 0 || size > COX_STREAM_MESSAGE_MAX)
        return COX_CORRUPT;
    if (there - PREFIX_SIZE < size)
        return COX_EMPTY;
    *ret_bytes = stream->in + stream->taken + PREFIX_SIZE;
    *ret_size = size;
    stream->taken += PREFIX_SIZE + size;
    return 0;
}

/* ---- out ---- */

int cox_stream_put(struct cox_stream *stream, const struct ProtobufCMessage *message)
{
    size_t size = protobuf_c_message_get_packed_size(message);
    if (size == 0 || size > COX_STREAM_MESSAGE_MAX)
        return COX_TOO_LARGE;
    int r = cox_reserve((void **)&stream->out, &stream->out_capacity,
                        stream->out_size + PREFIX_SIZE + size, 1);
    if (r)
        return r;
    cox_le32_put(stream->out + stream->out_size, (uint32_t)size);
    protobuf_c_message_pack(message, stream->out + stream->out_size + PREFIX_SIZE);
    stream->out_size += PREFIX_SIZE + size;
    return 0;
}

int cox_stream_flush(struct cox_stream *stream)
{
    while (stream->sent < stream->out_size) {
        ssize_t size = send(stream->fd, stream->out + stream->sent, stream->out_size - stream->sent,
                            MSG_DONTWAIT | MSG_NOSIGNAL);
        if (size >= 0) {
            stream->sent += (size_t)size;
            cox_fault_point(COX_FAULT_SOCKET_SENT);
        } else if (errno == EAGAIN) {
            return 0;
        } else if (errno == EPIPE || errno == ECONNRESET) {
            return COX_CLOSED;
        } else if (errno != EINTR) {
            return -errno;
        }
    }
    stream->sent = stream->out_size = 0;
    release(&stream->out, &stream->out_capacity);
    return 0;
}

size_t cox_stream_pending(const struct cox_stream *stream)
{
    return stream->out_size - stream->sent;
}
