/* Any bytes, by hand and by protobuf-c: what is read by hand is what protobuf-c reads, and what
 * protobuf-c has read is packed by hand as by itself, or left alone. */
#include "fuzz.h"

#include "proto/executor.pb-c.h"
#include "proto/step_wire.h"

#define ARENA_SIZE_MAX (64u << 10)

static bool unpack(bool request, struct cox_arena *arena, const uint8_t *bytes, size_t size,
                   ProtobufCMessage **ret_message)
{
    return request ? cox_step_wire_unpack_request(arena, bytes, size,
                                                  (Coxswain__ExecuteRequest **)ret_message)
                   : cox_step_wire_unpack_response(arena, bytes, size,
                                                   (Coxswain__ExecuteResponse **)ret_message);
}

static bool pack(bool request, const ProtobufCMessage *message, uint8_t *buffer, size_t size,
                 size_t *ret_size)
{
    return request ? cox_step_wire_pack_request((const Coxswain__ExecuteRequest *)message, buffer,
                                                size, ret_size)
                   : cox_step_wire_pack_response((const Coxswain__ExecuteResponse *)message, buffer,
                                                 size, ret_size);
}

/* The first byte: which message (its lowest bit), and the cap of the arena. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input input = {data, size};
    const uint8_t how = fuzz_eat_byte(&input);
    const bool request = how & 1;
    const ProtobufCMessageDescriptor *descriptor =
        request ? &coxswain__execute_request__descriptor : &coxswain__execute_response__descriptor;
    struct cox_arena arena;
    FUZZ_CHECK(cox_arena_init(&arena, 0, ARENA_SIZE_MAX >> (how >> 1) % 12) == 0);
    ProtobufCMessage *message = NULL;
    ProtobufCMessage *reference =
        protobuf_c_message_unpack(descriptor, NULL, input.size, input.bytes);
    const bool by_hand = unpack(request, &arena, input.bytes, input.size, &message);
    FUZZ_CHECK(arena.used <= arena.size_max && !arena.exhausted);
    FUZZ_CHECK(by_hand ? reference && message : !message && arena.used == 0);
    if (reference) {
        const size_t packed = protobuf_c_message_get_packed_size(reference);
        /* A byte is a number of ten at most. */
        const size_t room = 1024 + 10 * packed;
        uint8_t *bytes = malloc(packed + 1), *again = malloc(room);
        size_t length = SIZE_MAX;
        FUZZ_CHECK(bytes && again);
        FUZZ_CHECK(protobuf_c_message_pack(reference, bytes) == packed);
        if (pack(request, reference, again, room, &length))
            FUZZ_CHECK(length == packed && memcmp(bytes, again, packed) == 0);
        else
            FUZZ_CHECK(!by_hand && length == SIZE_MAX);
        if (by_hand) {
            FUZZ_CHECK(protobuf_c_message_get_packed_size(message) == packed);
            FUZZ_CHECK(protobuf_c_message_pack(message, again) == packed);
            FUZZ_CHECK(memcmp(bytes, again, packed) == 0);
        }
        free(bytes);
        free(again);
        protobuf_c_message_free_unpacked(reference, NULL);
    }
    cox_arena_deinit(&arena);
    return 0;
}
