#include "direct_stream.h"

#include "channel/base/base_internal.h"
#include "channel/base/idioms.h"
#include "channel/socket/socket.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <openssl/err.h>
#include <openssl/ssl.h>

#define MAGIC UINT32_C(0x44584f43) /* "COXD" */
#define HEAD_SIZE 24
/* At most so much is given to TLS or the kernel between two looks at the deadline. */
#define CALL_SIZE ((size_t)1 << 20)
/* A record of TLS; smaller parts are put together. */
#define RECORD_SIZE ((size_t)16 << 10)

void cox_direct_stream_init(struct cox_direct_stream *stream)
{
    *stream = (struct cox_direct_stream){.socket = {.fd = -1}};
}

void cox_direct_stream_end(struct cox_direct_stream *stream)
{
    SSL_free(stream->ssl);
    free(stream->socket.waiting);
    cox_close_fd(&stream->socket.fd);
    cox_direct_stream_init(stream);
}

/* Waits for events; the deadline also ends what goes on without waiting. */
static int stream_wait(struct cox_direct_stream *stream, short events, uint64_t deadline_ns,
                       struct cox_error *err)
{
    int r = events ? cox_socket_wait(stream->socket.fd, events, deadline_ns) : 0;
    if (r == 0 && cox_now_ns() >= deadline_ns)
        r = COX_TIMEOUT;
    if (r)
        cox_fail(err, r, r == COX_TIMEOUT ? "the deadline has passed" : "cannot wait: %s",
                 cox_status_text(r));
    return r;
}

/* Why a call on the socket did nothing: to be tried again after *ret_events, or a failure. */
static int socket_outcome(const struct cox_direct_stream *stream, short events, short *ret_events,
                          struct cox_error *err)
{
    if (stream->socket.error)
        return cox_fail(err, -stream->socket.error, "%s", strerror(stream->socket.error));
    if (stream->socket.ended)
        return cox_fail(err, COX_CLOSED, "the peer has closed the connection");
    *ret_events = events;
    return 0;
}

/* The same for a call of TLS. */
static int tls_outcome(struct cox_direct_stream *stream, int result, short *ret_events,
                       struct cox_error *err)
{
    const int error = SSL_get_error(stream->ssl, result);
    if (error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE)
        return socket_outcome(stream, error == SSL_ERROR_WANT_READ ? POLLIN : POLLOUT, ret_events,
                              err);
    if (error == SSL_ERROR_ZERO_RETURN)
        stream->socket.ended = true;
    const long verified = SSL_get_verify_result(stream->ssl);
    if (error == SSL_ERROR_SSL && verified != X509_V_OK) {
        ERR_clear_error();
        return cox_fail(err, COX_DENIED, "the peer's certificate is not valid: %s",
                        X509_verify_cert_error_string(verified));
    }
    if (error == SSL_ERROR_SSL)
        return cox_fail(err, COX_DENIED, "TLS: %s", cox_direct_tls_reason());
    ERR_clear_error();
    int r = socket_outcome(stream, 0, ret_events, err);
    return r ? r : cox_fail(err, -EPROTO, "TLS failed");
}

static int peer_name(const struct cox_direct_stream *stream, char ret_name[COX_DIRECT_NAME_SIZE],
                     struct cox_error *err)
{
    const X509 *certificate = SSL_get0_peer_certificate(stream->ssl);
    if (!certificate)
        return cox_fail(err, COX_DENIED, "the peer shows no certificate");
    if (!cox_direct_tls_name(certificate, ret_name))
        return cox_fail(err, COX_DENIED, "the peer's certificate has no name that is valid");
    return 0;
}

int cox_direct_stream_secure(struct cox_direct_stream *stream, const struct cox_direct_tls *tls,
                             bool serves, uint64_t deadline_ns, char ret_name[COX_DIRECT_NAME_SIZE],
                             struct cox_error *err)
{
    ERR_clear_error();
    stream->ssl = cox_direct_tls_start(tls, &stream->socket, serves);
    if (!stream->ssl)
        return cox_fail(err, -ENOMEM, "TLS: %s", cox_direct_tls_reason());
    for (;;) {
        ERR_clear_error();
        const int result = SSL_do_handshake(stream->ssl);
        if (result == 1)
            return peer_name(stream, ret_name, err);
        short events = 0;
        int r = tls_outcome(stream, result, &events, err);
        if (r == 0)
            r = stream_wait(stream, events, deadline_ns, err);
        if (r)
            return r;
    }
}

bool cox_direct_stream_is_quiet(const struct cox_direct_stream *stream)
{
    struct pollfd p = {.fd = stream->socket.fd, .events = POLLIN | POLLRDHUP};
    int count;
    do
        count = poll(&p, 1, 0);
    while (count < 0 && errno == EINTR);
    return count == 0;
}

/* ---- bytes ---- */

static int write_once(struct cox_direct_stream *stream, const uint8_t *bytes, size_t size,
                      size_t *ret_size, short *ret_events, struct cox_error *err)
{
    if (!stream->ssl) {
        *ret_size = cox_direct_socket_send(&stream->socket, bytes, size);
        return *ret_size > 0 ? 0 : socket_outcome(stream, POLLOUT, ret_events, err);
    }
    ERR_clear_error();
    /* All of it, or to be called again with the same bytes. */
    const int result = SSL_write_ex(stream->ssl, bytes, size, ret_size);
    if (result != 1)
        return tls_outcome(stream, result, ret_events, err);
    stream->key_used += size;
    if (stream->key_used >= COX_DIRECT_KEY_USED_MAX && SSL_version(stream->ssl) == TLS1_3_VERSION) {
        if (SSL_key_update(stream->ssl, SSL_KEY_UPDATE_NOT_REQUESTED) != 1)
            return cox_fail(err, -EPROTO, "TLS: %s", cox_direct_tls_reason());
        stream->key_used = 0;
    }
    return 0;
}

static int stream_flush(struct cox_direct_stream *stream, uint64_t deadline_ns,
                        struct cox_error *err)
{
    while (!cox_direct_socket_flush(&stream->socket)) {
        short events = 0;
        int r = socket_outcome(stream, POLLOUT, &events, err);
        if (r == 0)
            r = stream_wait(stream, events, deadline_ns, err);
        if (r)
            return r;
    }
    return 0;
}

static int stream_write(struct cox_direct_stream *stream, const uint8_t *bytes, size_t size,
                        uint64_t deadline_ns, struct cox_error *err)
{
    struct cox_direct_socket *socket = &stream->socket;
    if (stream->ssl && size > RECORD_SIZE && !socket->waiting)
        socket->waiting = malloc(COX_DIRECT_WAITING_SIZE); /* if there is none, nothing waits */
    socket->gathers = stream->ssl && size > RECORD_SIZE && socket->waiting;
    while (size > 0) {
        size_t sent = 0;
        short events = 0;
        int r = write_once(stream, bytes, size < CALL_SIZE ? size : CALL_SIZE, &sent, &events, err);
        bytes += sent;
        size -= sent;
        if (r == 0 && size > 0)
            r = stream_wait(stream, events, deadline_ns, err);
        if (r)
            return r;
    }
    return stream_flush(stream, deadline_ns, err);
}

static int read_once(struct cox_direct_stream *stream, uint8_t *bytes, size_t size,
                     size_t *ret_size, short *ret_events, struct cox_error *err)
{
    if (!stream->ssl) {
        *ret_size = cox_direct_socket_receive(&stream->socket, bytes, size);
        return *ret_size > 0 ? 0 : socket_outcome(stream, POLLIN, ret_events, err);
    }
    ERR_clear_error();
    const int result = SSL_read_ex(stream->ssl, bytes, size, ret_size);
    return result == 1 ? 0 : tls_outcome(stream, result, ret_events, err);
}

/* COX_CLOSED: before the first byte. */
static int stream_read(struct cox_direct_stream *stream, uint8_t *bytes, size_t size,
                       uint64_t deadline_ns, struct cox_error *err)
{
    for (size_t done = 0; done < size;) {
        size_t came = 0;
        short events = 0;
        int r = read_once(stream, bytes + done, size - done, &came, &events, err);
        if (r == COX_CLOSED && done > 0)
            r = COX_CORRUPT;
        done += came;
        if (r == 0 && done < size)
            r = stream_wait(stream, events, deadline_ns, err);
        if (r)
            return r;
    }
    return 0;
}

/* ---- greetings ---- */

int cox_direct_stream_write_greeting(struct cox_direct_stream *stream, const char *name,
                                     const char *group, uint64_t deadline_ns, struct cox_error *err)
{
    uint8_t record[2][COX_DIRECT_NAME_SIZE] = {{0}};
    memcpy(record[0], name, strlen(name));
    memcpy(record[1], group, strlen(group));
    return stream_write(stream, record[0], sizeof record, deadline_ns, err);
}

/* A name that is valid, or "", and NUL behind it. */
static bool field_is_valid(const uint8_t field[COX_DIRECT_NAME_SIZE])
{
    char name[COX_DIRECT_NAME_SIZE], filled[COX_DIRECT_NAME_SIZE] = {0};
    memcpy(name, field, sizeof name);
    name[COX_DIRECT_NAME_MAX] = '\0';
    if (cox_direct_name_is_valid(name))
        memcpy(filled, name, strlen(name));
    return !memcmp(filled, field, sizeof filled);
}

int cox_direct_stream_read_greeting(struct cox_direct_stream *stream, uint64_t deadline_ns,
                                    char ret_name[COX_DIRECT_NAME_SIZE],
                                    char ret_group[COX_DIRECT_NAME_SIZE], struct cox_error *err)
{
    uint8_t record[2][COX_DIRECT_NAME_SIZE];
    int r = stream_read(stream, record[0], sizeof record, deadline_ns, err);
    if (r)
        return r;
    if (!record[0][0] || !field_is_valid(record[0]) || !field_is_valid(record[1]))
        return cox_fail(err, COX_CORRUPT, "the peer does not begin with a name and a group");
    memcpy(ret_name, record[0], sizeof record[0]);
    memcpy(ret_group, record[1], sizeof record[1]);
    return 0;
}

/* ---- messages ---- */

/* Small parts are put together with the head: one record, one segment. */
struct writer {
    struct cox_direct_stream *stream;
    uint64_t deadline_ns;
    size_t size;
    uint8_t bytes[RECORD_SIZE];
};

static int writer_flush(struct writer *writer, struct cox_error *err)
{
    const size_t size = writer->size;
    writer->size = 0;
    return stream_write(writer->stream, writer->bytes, size, writer->deadline_ns, err);
}

static int writer_add(struct writer *writer, const uint8_t *bytes, size_t size,
                      struct cox_error *err)
{
    const size_t room = sizeof writer->bytes - writer->size;
    const size_t first = size < room ? size : room;
    if (first > 0)
        memcpy(writer->bytes + writer->size, bytes, first);
    writer->size += first;
    if (first == size)
        return 0;
    int r = writer_flush(writer, err);
    if (r)
        return r;
    bytes += first;
    size -= first;
    if (size >= sizeof writer->bytes)
        return stream_write(writer->stream, bytes, size, writer->deadline_ns, err);
    memcpy(writer->bytes, bytes, size);
    writer->size = size;
    return 0;
}

/* A part that is still being written: as far as it is. What was gathered before it goes first. */
static int writer_follow(struct writer *writer, const struct cox_direct_message *message,
                         const struct iovec *part, struct cox_error *err)
{
    int r = writer_flush(writer, err);
    for (size_t done = 0, end; r == 0 && done < part->iov_len; done = end) {
        end = message->await(message->await_context, done);
        r = stream_write(writer->stream, (const uint8_t *)part->iov_base + done, end - done,
                         writer->deadline_ns, err);
    }
    return r;
}

int cox_direct_stream_write_message(struct cox_direct_stream *stream,
                                    const struct cox_direct_message *message, uint64_t size,
                                    uint64_t deadline_ns, struct cox_error *err)
{
    const struct iovec *parts = message->parts;
    const int whole = message->await ? message->count - 1 : message->count;
    uint8_t head[HEAD_SIZE] = {0};
    cox_le32_put(head, MAGIC);
    cox_le32_put(head + 4, message->kind);
    cox_le64_put(head + 8, size);
    struct writer writer;
    writer.stream = stream;
    writer.deadline_ns = deadline_ns;
    writer.size = 0;
    int r = writer_add(&writer, head, sizeof head, err);
    for (int i = 0; r == 0 && i < whole; i++)
        r = writer_add(&writer, parts[i].iov_base, parts[i].iov_len, err);
    if (r == 0 && message->await)
        r = writer_follow(&writer, message, &parts[whole], err);
    return r ? r : writer_flush(&writer, err);
}

int cox_direct_stream_read_head(struct cox_direct_stream *stream, uint64_t size_max,
                                uint32_t *ret_kind, uint64_t *ret_size, struct cox_error *err)
{
    uint8_t head[HEAD_SIZE];
    int r = stream_read(stream, head, 1, COX_DEADLINE_NEVER, err);
    if (r)
        return r;
    r = cox_direct_stream_read_body(stream, head + 1, sizeof head - 1,
                                    cox_deadline_after_ns(COX_DIRECT_PATIENCE_NS), err);
    if (r)
        return r;
    const uint64_t size = cox_le64_get(head + 8);
    if (cox_le32_get(head) != MAGIC || cox_le64_get(head + 16))
        return cox_fail(err, COX_CORRUPT, "the peer sent something that is not a message");
    if (size > size_max)
        return cox_fail(err, COX_TOO_LARGE,
                        "the peer announced a message of %llu bytes; at most %llu are accepted",
                        (unsigned long long)size, (unsigned long long)size_max);
    *ret_kind = cox_le32_get(head + 4);
    *ret_size = size;
    return 0;
}

int cox_direct_stream_read_body(struct cox_direct_stream *stream, uint8_t *bytes, size_t size,
                                uint64_t deadline_ns, struct cox_error *err)
{
    int r = stream_read(stream, bytes, size, deadline_ns, err);
    return r == COX_CLOSED ? COX_CORRUPT : r;
}
