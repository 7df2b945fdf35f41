/*
 * direct_stream: a connection of direct.h, with or without TLS, and what passes through it: exact
 * numbers of bytes, greetings and messages, until deadlines.
 *
 * On the wire, all numbers little-endian:
 *   first the sender's greeting: its name and its group, 64 bytes each, filled up with NUL
 *   the receiver's greeting, once it accepts the connection
 *   then messages of the sender, each a head of 24 bytes and `size` bytes:
 *     offset 0   u32 magic, "COXD"
 *            4   u32 kind
 *            8   u64 size
 *           16   u64 reserved, 0
 * The greeting that the receiver replies costs a flight per connection, and is worth it: with TLS 1.3
 * a client is done before its certificate is checked.
 *
 * Threads: one at a time uses a stream. Another may end what it does with shutdown(2) on its fd.
 * Ownership: a stream owns its fd and its TLS state. It does not move once it is secure.
 * Blocks: until the deadline, or the fd is shut down.
 * If the process dies: the kernel ends the connection.
 */
#ifndef COX_NODES_DIRECT_STREAM_H
#define COX_NODES_DIRECT_STREAM_H

#include "direct.h"
#include "direct_tls.h"

#define COX_DIRECT_NAME_SIZE (COX_DIRECT_NAME_MAX + 1)
/* Bytes per key of TLS 1.3: AES-GCM needs another after 2^24.5 records (RFC 8446, 5.5), and OpenSSL
 * leaves this to its users. 64 GiB are 2^22 full records. */
#define COX_DIRECT_KEY_USED_MAX (UINT64_C(64) << 30)

/* A message that has begun must come by then, and this for each byte (10 MB/s). */
#define COX_DIRECT_PATIENCE_NS (5 * COX_NSEC_PER_SEC)
#define COX_DIRECT_NS_PER_BYTE 100

struct cox_direct_stream {
    struct cox_direct_socket socket;
    /* NULL: without TLS */
    SSL *ssl;
    /* bytes sent with the present key of TLS */
    uint64_t key_used;
};

/* Without a connection. */
void cox_direct_stream_init(struct cox_direct_stream *stream);
/* Closes; as after init. */
void cox_direct_stream_end(struct cox_direct_stream *stream);

/* TLS over the socket, as its client or its server. Gives the name in the peer's certificate.
 * Returns
 *   0
 *   COX_DENIED: one side does not accept the other's certificate, or the peer does not speak TLS
 *   COX_CLOSED: the peer has closed
 *   COX_TIMEOUT
 *   -errno
 */
int cox_direct_stream_secure(struct cox_direct_stream *stream, const struct cox_direct_tls *tls,
                             bool serves, uint64_t deadline_ns, char ret_name[COX_DIRECT_NAME_SIZE],
                             struct cox_error *err);
/* Nothing has arrived, not even the end: what a sender, to whom nothing is sent, expects. */
bool cox_direct_stream_is_quiet(const struct cox_direct_stream *stream);

/* A process's name and group. Read gives a valid name, and a group that is valid or "".
 * Return
 *   0
 *   COX_CLOSED: the peer has closed, or the fd was shut down
 *   COX_DENIED: the peer does not accept this process's certificate
 *   COX_CORRUPT
 *   COX_TIMEOUT
 *   -errno
 */
int cox_direct_stream_write_greeting(struct cox_direct_stream *stream, const char *name,
                                     const char *group, uint64_t deadline_ns,
                                     struct cox_error *err);
int cox_direct_stream_read_greeting(struct cox_direct_stream *stream, uint64_t deadline_ns,
                                    char ret_name[COX_DIRECT_NAME_SIZE],
                                    char ret_group[COX_DIRECT_NAME_SIZE], struct cox_error *err);

/* size: of all parts. After a failure the stream has to end.
 * Returns
 *   0
 *   COX_CLOSED: the peer has closed, or the fd was shut down
 *   COX_TIMEOUT
 *   -errno
 */
int cox_direct_stream_write_message(struct cox_direct_stream *stream,
                                    const struct cox_direct_message *message, uint64_t size,
                                    uint64_t deadline_ns, struct cox_error *err);
/* The head of the next message, which may be long in coming; once it has begun, it must come by
 * COX_DIRECT_PATIENCE_NS.
 * Returns
 *   0
 *   COX_CLOSED: the peer has closed, between messages
 *   COX_CORRUPT: a head that is none, or an end within it
 *   COX_TIMEOUT
 *   COX_TOO_LARGE: larger than size_max
 *   -errno
 */
int cox_direct_stream_read_head(struct cox_direct_stream *stream, uint64_t size_max,
                                uint32_t *ret_kind, uint64_t *ret_size, struct cox_error *err);
/* Bytes of the message.
 * Returns
 *   0
 *   COX_CORRUPT: an end within the message
 *   COX_TIMEOUT
 *   -errno
 */
int cox_direct_stream_read_body(struct cox_direct_stream *stream, uint8_t *bytes, size_t size,
                                uint64_t deadline_ns, struct cox_error *err);

#endif
