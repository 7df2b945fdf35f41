/*
 * stream: one side of a control connection (proto/control.proto): messages with a length in front,
 * both ways, over a stream socket.
 *
 * Both sides may write at the same time. No call here blocks; the owner of the stream polls its fd.
 *
 * Threads: one at a time.
 * Ownership: the stream owns its fd from init on; a message that next gave is lent until the next
 *   call of fill or deinit.
 * Blocks: nothing, whether or not the socket does.
 * Bytes: what is received is untrusted input. A length outside 1 to COX_STREAM_MESSAGE_MAX is
 *   COX_CORRUPT, and memory grows with the bytes received, not with the length announced.
 * If the process dies: private memory; the kernel closes the connection.
 */
#ifndef COX_COORDINATOR_STREAM_H
#define COX_COORDINATOR_STREAM_H

#include <coxswain/base.h>

#define COX_STREAM_MESSAGE_MAX ((size_t)16 << 20)

struct ProtobufCMessage;

struct cox_stream {
    /* -1: none */
    int fd;
    uint8_t *in;
    size_t in_size, in_capacity;
    /* bytes of `in` that next has returned */
    size_t taken;
    uint8_t *out;
    size_t out_size, out_capacity;
    /* bytes of `out` that are written */
    size_t sent;
};

void cox_stream_init(struct cox_stream *stream, int fd); /* takes fd */
void cox_stream_deinit(struct cox_stream *stream);       /* closes; idempotent after init */

/* Reads the bytes that are there now, at most a buffer of them. Returns 0, also when there was
 * nothing; COX_CLOSED: the other side will send no more; COX_CORRUPT: the message had fds, which
 * the protocol does not use; -ENOMEM; -errno. */
int cox_stream_fill(struct cox_stream *stream);
/* The oldest whole message that was read. Returns 0; COX_EMPTY: fill first; COX_CORRUPT. */
int cox_stream_next(struct cox_stream *stream, const uint8_t **ret_bytes, size_t *ret_size);

/* Queues a message behind what is queued. Returns 0; COX_TOO_LARGE; -ENOMEM. */
int cox_stream_put(struct cox_stream *stream, const struct ProtobufCMessage *message);
/* Writes what can be written now. Returns 0; COX_CLOSED: the other side is gone; -errno. */
int cox_stream_flush(struct cox_stream *stream);
/* Bytes queued and not written. */
size_t cox_stream_pending(const struct cox_stream *stream);

#endif
