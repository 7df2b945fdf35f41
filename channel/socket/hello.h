/*
 * hello: the bytes of the handshake at a control socket (control_socket.h), except the hello frame:
 * the hello reply, and the refusal.
 *
 *   byte 1, then the hello reply of 127 bytes; all fds are sent with the first of these bytes
 *   byte 0, enum cox_status (u8), length (u8), then so many bytes of UTF-8
 *
 * Private to the library. Threads: any. Blocks: nothing.
 */
#ifndef COX_CHANNEL_HELLO_H
#define COX_CHANNEL_HELLO_H

#include "control_socket.h"

#define COX_REPLY_REFUSED 0
#define COX_REPLY_HELLO 1
/* Both with their first byte. */
#define COX_HELLO_REPLY_SIZE 128
#define COX_REFUSAL_HEAD_SIZE 3
#define COX_REFUSAL_SIZE_MAX (COX_REFUSAL_HEAD_SIZE + COX_HELLO_REASON_MAX)

void cox_hello_reply_format(const struct cox_hello_reply *hello_reply, uint32_t fd_count,
                            uint8_t bytes[COX_HELLO_REPLY_SIZE]);
/* bytes are input; fd_count fds came with them; hello is the request, as cox_hello_parse returns
 * it. Returns 0 or COX_CORRUPT. */
int cox_hello_reply_parse(const uint8_t bytes[COX_HELLO_REPLY_SIZE], const struct cox_hello *hello,
                          uint32_t fd_count, struct cox_hello_reply *ret_reply,
                          struct cox_error *err);

/* code: the client's result; a value outside enum cox_status is sent as COX_REJECTED. Returns the
 * number of bytes. */
size_t cox_refusal_format(int code, const char *reason, uint8_t bytes[COX_REFUSAL_SIZE_MAX]);
/* Bytes of the reason that follow the head. */
static inline size_t cox_refusal_reason_size(const uint8_t head[COX_REFUSAL_HEAD_SIZE])
{
    return head[2];
}
/* bytes are input: the head, and the reason that follows. Returns the status sent, or COX_REJECTED
 * if it is not a status, with the reason in err; never 0. */
int cox_refusal_parse(const uint8_t *bytes, struct cox_error *err);

#endif
