/* A control connection that any bytes come in by, cut anywhere: refused, or requests and replies
 * that pack and unpack to the same bytes again. */
#include "fuzz.h"

#include "program/client/client.h"
#include "coordinator/server/stream.h"
#include "proto/control.pb-c.h"
#include "proto/wire.h"

#define ARENA_SIZE_MAX (64u << 10)

/* What unpacks goes through another stream, and is the same behind it. */
static void round_trip(const ProtobufCMessage *message, bool has_long_tag)
{
    int fds[2];
    FUZZ_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
    struct cox_stream out, in;
    const uint8_t *bytes;
    size_t size, packed_size = protobuf_c_message_get_packed_size(message);
    uint8_t *packed = malloc(packed_size + 1);
    FUZZ_CHECK(packed);
    protobuf_c_message_pack(message, packed);
    cox_stream_init(&out, fds[0]);
    cox_stream_init(&in, fds[1]);
    int r = cox_stream_put(&out, message);
    FUZZ_CHECK(packed_size ? r == 0 : r == COX_TOO_LARGE);
    if (r == 0) {
        FUZZ_CHECK(cox_stream_flush(&out) == 0 && cox_stream_pending(&out) == 0);
        while ((r = cox_stream_next(&in, &bytes, &size)) == COX_EMPTY)
            FUZZ_CHECK(cox_stream_fill(&in) == 0);
        FUZZ_CHECK(r == 0 && size == packed_size && !memcmp(bytes, packed, size));
        FUZZ_CHECK(in.in_size == in.taken);
        struct cox_arena arena;
        ProtobufCMessage *again = NULL;
        FUZZ_CHECK(cox_arena_init(&arena, 0, 4 * ARENA_SIZE_MAX) == 0);
        if (message->descriptor == &coxswain_control__control_request__descriptor)
            r = cox_wire_control_request_unpack(&arena, bytes, size,
                                                (CoxswainControl__ControlRequest **)&again);
        else
            r = cox_wire_control_reply_unpack(&arena, bytes, size,
                                              (CoxswainControl__ControlReply **)&again);
        FUZZ_CHECK(r == 0 || (r == COX_CORRUPT && has_long_tag));
        if (r == 0)
            FUZZ_CHECK(protobuf_c_message_get_packed_size(again) == packed_size);
        cox_arena_deinit(&arena);
    }
    free(packed);
    cox_stream_deinit(&in);
    cox_stream_deinit(&out);
}

static void message_try(const uint8_t *bytes, size_t size, size_t size_max)
{
    struct cox_arena arena;
    CoxswainControl__ControlRequest *request = NULL;
    CoxswainControl__ControlReply *reply = NULL;
    bool has_long_tag = fuzz_has_long_tag_0(bytes, size);
    FUZZ_CHECK(cox_arena_init(&arena, 0, size_max) == 0);
    int r = cox_wire_control_request_unpack(&arena, bytes, size, &request);
    FUZZ_CHECK(arena.used <= size_max);
    FUZZ_CHECK(r == 0 || ((r == COX_CORRUPT || r == COX_TOO_LARGE) && !request));
    if (r == 0)
        round_trip(&request->base, has_long_tag);
    cox_arena_reset(&arena);
    r = cox_wire_control_reply_unpack(&arena, bytes, size, &reply);
    FUZZ_CHECK(arena.used <= size_max);
    FUZZ_CHECK(r == 0 || ((r == COX_CORRUPT || r == COX_TOO_LARGE) && !reply));
    if (r == 0)
        round_trip(&reply->base, has_long_tag);
    if (r == 0 && reply->reply_case == COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_ERROR) {
        struct cox_error err = {0};
        fuzz_check_error(cox_client_error(reply->error, &err), &err);
    }
    cox_arena_deinit(&arena);
}

/* The first byte chooses the cap of the arena, the second one how much is sent at a time. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input input = {data, size};
    size_t size_max = ARENA_SIZE_MAX >> fuzz_eat_byte(&input) % 12;
    size_t part = 1 + fuzz_eat_byte(&input);
    int fds[2], r = 0;
    FUZZ_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
    struct cox_stream stream;
    cox_stream_init(&stream, fds[0]);
    size_t taken = 0, total = input.size;
    while (input.size && !r) {
        uint8_t bytes[256];
        size_t count = fuzz_eat(&input, bytes, part);
        FUZZ_CHECK(send(fds[1], bytes, count, MSG_NOSIGNAL) == (ssize_t)count);
        FUZZ_CHECK(cox_stream_fill(&stream) == 0);
        const uint8_t *message;
        size_t length;
        while ((r = cox_stream_next(&stream, &message, &length)) == 0) {
            FUZZ_CHECK(length >= 1 && length <= COX_STREAM_MESSAGE_MAX);
            taken += 4 + length;
            message_try(message, length, size_max);
        }
        FUZZ_CHECK(r == COX_EMPTY || r == COX_CORRUPT);
        r = r == COX_EMPTY ? 0 : r;
    }
    FUZZ_CHECK(taken <= total);
    close(fds[1]);
    if (!r)
        FUZZ_CHECK(cox_stream_fill(&stream) == COX_CLOSED);
    cox_stream_deinit(&stream);
    return 0;
}
