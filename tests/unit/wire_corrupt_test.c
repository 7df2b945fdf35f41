/* wire_corrupt: bytes that are no message, odd ones that are, and messages above a cap. */
#include "wire_fixture.h"

/* ---- sizes ---- */

PLAIN_TEST(cap_is_distinguished_from_corruption)
{
    struct cox_arena arena;
    Request *request = NULL;

    /* One string of 8000 bytes in a lora_operation_request. */
    uint8_t large[3 + 3 + 8000] = {0x42, 0xc3, 0x3e, 0x0a, 0xc0, 0x3e};
    memset(large + 6, 'x', 8000);
    assert_int_equal(cox_arena_init(&arena, 0, 4096), 0);
    assert_int_equal(cox_wire_request_unpack(&arena, large, sizeof large, &request), COX_TOO_LARGE);
    assert_true(arena.exhausted);
    assert_null(request);

    /* The same arena, not reset: bytes that are no message are still called that. */
    static const uint8_t garbage[] = {0x0f};
    assert_int_equal(cox_wire_request_unpack(&arena, garbage, sizeof garbage, &request),
                     COX_CORRUPT);
    assert_true(arena.exhausted);
    cox_arena_reset(&arena);
    assert_false(arena.exhausted);
    assert_int_equal(cox_wire_request_unpack(&arena, garbage, sizeof garbage, &request),
                     COX_CORRUPT);
    assert_false(arena.exhausted);
    assert_null(request);
    cox_arena_deinit(&arena);

    assert_int_equal(cox_arena_init(&arena, 0, 32768), 0);
    assert_int_equal(cox_wire_request_unpack(&arena, large, sizeof large, &request), 0);
    assert_int_equal(strlen(request->lora_operation_request->master_model), 8000);
    /* Nothing is that long; the size alone decides. */
    assert_int_equal(cox_wire_request_unpack(&arena, large, (size_t)INT32_MAX + 1, &request),
                     COX_TOO_LARGE);
    cox_arena_deinit(&arena);
}

/* Every cap from nothing up to what is needed: refused each time, until it is enough. */
ARENA_TEST(any_cap_is_safe)
{
    struct cox_arena *source = *state;
    size_t size = 0;
    assert_int_equal(cox_wire_response_pack(full_response(source, 4), frame, sizeof frame, &size),
                     0);
    int r = COX_TOO_LARGE;
    size_t cap = 0;
    for (; r == COX_TOO_LARGE && cap < CAP; cap += 48) {
        struct cox_arena arena;
        Response *response = NULL;
        assert_int_equal(cox_arena_init(&arena, 0, cap), 0);
        r = cox_wire_response_unpack(&arena, frame, size, &response);
        assert_true(r == 0 || (r == COX_TOO_LARGE && !response));
        assert_true(arena.used <= cap);
        cox_arena_deinit(&arena);
    }
    assert_int_equal(r, 0);
    assert_true(cap > size);
}

/* ---- bytes that are no message ---- */

/* Bytes that end where the readable memory ends: one byte too far is a fault. */
struct guarded {
    uint8_t *map;
    size_t size;
};

static struct guarded guarded_new(void)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    struct guarded guarded = {.size = (sizeof frame + page - 1) / page * page};
    guarded.map =
        mmap(NULL, guarded.size + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(guarded.map != MAP_FAILED);
    assert_int_equal(mprotect(guarded.map + guarded.size, page, PROT_NONE), 0);
    return guarded;
}

static uint8_t *guarded_put(struct guarded *guarded, const void *bytes, size_t size)
{
    return memcpy(guarded->map + guarded->size - size, bytes, size);
}

static void guarded_free(struct guarded *guarded)
{
    munmap(guarded->map, guarded->size + (size_t)sysconf(_SC_PAGESIZE));
}

static size_t varint_size(const uint8_t *bytes)
{
    size_t n = 1;
    while (bytes[n - 1] & 0x80)
        n++;
    return n;
}

/* The end of the top-level field at bytes; only varints and lengths occur at the top. */
static size_t top_field_size(const uint8_t *bytes)
{
    size_t n = varint_size(bytes);
    if ((bytes[0] & 7) == 0)
        return n + varint_size(bytes + n);
    size_t length = 0, digits = varint_size(bytes + n);
    for (size_t i = digits; i-- > 0;)
        length = length << 7 | (bytes[n + i] & 0x7f);
    return n + digits + length;
}

/* Cut at any byte: a message only where a top-level field ends, corrupt everywhere else. */
ARENA_TEST(truncated_at_every_byte)
{
    struct cox_arena *arena = *state;
    struct guarded guarded = guarded_new();
    for (unsigned kind = 0; kind < KIND_COUNT; kind++) {
        bool is_request;
        size_t size = pack_kind(arena, kind, &is_request), boundary = 0;
        for (size_t cut = 0; cut < size; cut++) {
            ProtobufCMessage *message = NULL;
            cox_arena_reset(arena);
            int r = unpack_any(arena, is_request, guarded_put(&guarded, frame, cut), cut, &message);
            assert_int_equal(r, cut == boundary ? 0 : COX_CORRUPT);
            if (cut == boundary)
                boundary += top_field_size(frame + boundary);
        }
        assert_int_equal(boundary, size);
        cox_arena_reset(arena);
    }
    guarded_free(&guarded);
}

static uint64_t random_next(uint64_t *seed)
{
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    return *seed;
}

/* Whatever a few changed bytes make of a message, it is one (and packs to a fixed point) or it is
 * refused. */
ARENA_TEST(random_bytes_never_crash)
{
    struct cox_arena *source = *state;
    struct guarded guarded = guarded_new();
    struct cox_arena arena;
    assert_int_equal(cox_arena_init(&arena, 65536, (size_t)1 << 20), 0);
    uint64_t seed = 20260;
    size_t accepted = 0, refused = 0, zero_tags = 0;
    for (unsigned kind = 0; kind < KIND_COUNT; kind++) {
        bool is_request;
        size_t size = pack_kind(source, kind, &is_request);
        cox_arena_reset(source);
        for (int round = 0; round < 2000; round++) {
            uint8_t *bytes = guarded_put(&guarded, frame, size);
            for (uint64_t flips = 1 + random_next(&seed) % 4; flips > 0; flips--)
                bytes[random_next(&seed) % size] ^= (uint8_t)(1u << random_next(&seed) % 8);
            if (round % 4 == 0)
                bytes[random_next(&seed) % size] = (uint8_t)random_next(&seed);

            ProtobufCMessage *message = NULL;
            cox_arena_reset(&arena);
            int r = unpack_any(&arena, is_request, bytes, size, &message);
            if (r) {
                assert_true(r == COX_CORRUPT || r == COX_TOO_LARGE);
                refused++;
                continue;
            }
            accepted++;
            size_t first_size = protobuf_c_message_get_packed_size(message);
            assert_true(first_size < sizeof frame_again / 2);
            uint8_t *first = frame_again, *second = frame_again + sizeof frame_again / 2;
            protobuf_c_message_pack(message, first);
            cox_arena_reset(&arena);
            r = unpack_any(&arena, is_request, first, first_size, &message);
            if (r == COX_CORRUPT) {
                /* protobuf-c takes an overlong tag of field 0 (80 00) for an unknown field, writes
                 * it short (00) and refuses that. */
                zero_tags++;
                continue;
            }
            assert_int_equal(r, 0);
            assert_int_equal(protobuf_c_message_get_packed_size(message), first_size);
            protobuf_c_message_pack(message, second);
            assert_memory_equal(first, second, first_size);
        }
    }
    /* Both outcomes were really seen. */
    assert_true(accepted > 1000);
    assert_true(refused > 1000);
    assert_true(zero_tags < accepted / 100);
    cox_arena_deinit(&arena);
    guarded_free(&guarded);
}

static int unpack_request_bytes(struct cox_arena *arena, const void *bytes, size_t size,
                                Request **ret_request)
{
    struct guarded guarded = guarded_new();
    int r = cox_wire_request_unpack(arena, guarded_put(&guarded, bytes, size), size, ret_request);
    guarded_free(&guarded);
    return r;
}

#define unpack_request(arena, ret_request, ...)                                                    \
    unpack_request_bytes((arena), (const uint8_t[]){__VA_ARGS__},                                  \
                         sizeof((const uint8_t[]){__VA_ARGS__}), (ret_request))

ARENA_TEST(odd_but_legal_bytes)
{
    struct cox_arena *arena = *state;
    Request *request = NULL;

    /* An unknown execute type: kept as the number it is. */
    assert_int_equal(unpack_request(arena, &request, 0x08, 0x63), 0);
    assert_int_equal(request->execute_type, 99);
    assert_string_equal(cox_wire_type_name((uint32_t)request->execute_type), "unknown");
    /* Also as large as an enum can be. */
    assert_int_equal(unpack_request(arena, &request, 0x08, 0xff, 0xff, 0xff, 0xff, 0x0f), 0);
    assert_string_equal(cox_wire_type_name((uint32_t)request->execute_type), "unknown");

    /* Unknown fields, of every wire type: kept, and packed again. */
    assert_int_equal(unpack_request(arena, &request, 0xb8, 0x17, 0x05, 0x08, 0x01, 0xbd, 0x17, 1, 2,
                                    3, 4, 0xb9, 0x17, 1, 2, 3, 4, 5, 6, 7, 8, 0xba, 0x17, 0x01,
                                    'x'),
                     0);
    assert_int_equal(request->execute_type, 1);
    assert_int_equal(request->base.n_unknown_fields, 4);
    assert_int_equal(cox_wire_request_size(request), 25);

    /* The oneof twice: the last one counts. Also when both are the same, which other libraries
     * merge; no sender writes that. */
    assert_int_equal(
        unpack_request(arena, &request, 0x3a, 0x03, 0x0a, 0x01, 0x07, 0x52, 0x03, 0x0a, 0x01, 'c'),
        0);
    assert_int_equal(request->request_case, 10);
    assert_string_equal(request->recover_command_request->command, "c");
    assert_int_equal(
        unpack_request(arena, &request, 0x3a, 0x03, 0x0a, 0x01, 0x07, 0x3a, 0x03, 0x0a, 0x01, 0x08),
        0);
    assert_int_equal(request->request_case, 7);
    assert_int_equal(request->text_generator_cleanup_request->n_seq_ids, 1);
    assert_int_equal(request->text_generator_cleanup_request->seq_ids[0], 8);

    /* The oneof's message empty: there, with nothing in it. */
    assert_int_equal(unpack_request(arena, &request, 0x1a, 0x00), 0);
    assert_int_equal(request->request_case, 3);
    assert_non_null(request->execute_model_request);

    /* Repeated scalars one by one, as a sender without packing writes them. */
    assert_int_equal(unpack_request(arena, &request, 0x3a, 0x04, 0x08, 0x07, 0x08, 0x09), 0);
    assert_int_equal(request->text_generator_cleanup_request->n_seq_ids, 2);
    assert_int_equal(request->text_generator_cleanup_request->seq_ids[1], 9);

    /* A map entry without key and value: protobuf-c leaves NULL, readers have to look. */
    assert_int_equal(unpack_request(arena, &request, 0x12, 0x00), 0);
    assert_int_equal(request->n_config, 1);
    assert_true(!request->config[0]->key || !*request->config[0]->key);
}

ARENA_TEST(corrupt_bytes)
{
    static const struct {
        uint8_t bytes[12];
        size_t size;
    } corrupt[] = {
        /* Field number 0; wire types 3, 4, 6, 7; a tag without end. */
        {{0x00, 0x00}, 2},
        {{0x0b}, 1},
        {{0x0c}, 1},
        {{0x0e}, 1},
        {{0x0f}, 1},
        {{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, 6},
        /* A value without end; lengths beyond the bytes, up to what no address can reach. */
        {{0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, 12},
        {{0x1a, 0x01}, 2},
        {{0x1a, 0xff, 0xff, 0xff, 0xff, 0x07}, 6},
        {{0x1a, 0xff, 0xff, 0xff, 0xff, 0x0f}, 6},
        {{0x1a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01}, 11},
        /* The oneof's message as a number; the type as a message. */
        {{0x18, 0x01}, 2},
        {{0x0a, 0x00}, 2},
    };
    Request *request = NULL;
    for (size_t i = 0; i < LENGTH(corrupt); i++)
        assert_int_equal(unpack_request_bytes(*state, corrupt[i].bytes, corrupt[i].size, &request),
                         COX_CORRUPT);
    assert_null(request);
}

/* Puts the tag of a field, and the length, in front of its bytes. Returns the size with them. */
static size_t enclose(uint8_t *bytes, size_t size, unsigned number)
{
    const unsigned tag = number << 3 | 2;
    const size_t head = tag < 0x80 ? 2 : 3;
    memmove(bytes + head, bytes, size);
    bytes[0] = (uint8_t)(head == 2 ? tag : tag | 0x80);
    bytes[1] = (uint8_t)(tag >> 7);
    bytes[head - 1] = (uint8_t)size;
    return head + size;
}

/* Every column of a step and of its result is of numbers of 4 bytes, digests of 8. */
ARENA_TEST(a_column_of_any_other_size_is_refused)
{
    struct cox_arena *arena = *state;
    static const struct {
        const ProtobufCMessageDescriptor *message;
        /* the fields that it is in, from the inside, and 0 */
        unsigned path[5];
    } places[] = {
        {&coxswain__step_delta__descriptor, {1000, 3}},
        {&coxswain__step_sequence__descriptor, {4, 1000, 3}},
        {&coxswain__step_block_table__descriptor, {4, 4, 1000, 3}},
        {&coxswain__step_result__descriptor, {1000, 4}},
    };
    unsigned columns = 0;
    for (size_t p = 0; p < LENGTH(places); p++)
        for (unsigned f = 0; f < places[p].message->n_fields; f++) {
            const ProtobufCFieldDescriptor *field = &places[p].message->fields[f];
            if (!(field->flags & PROTOBUF_C_FIELD_FLAG_PACKED))
                continue;
            const size_t item = field->type == PROTOBUF_C_TYPE_FIXED64 ? 8 : 4;
            columns++;
            for (size_t count = 0; count <= 16; count++) {
                uint8_t bytes[64] = {0};
                Request *request = NULL;
                Response *response = NULL;
                size_t size = enclose(bytes, count, field->id);
                for (const unsigned *number = places[p].path; *number; number++)
                    size = enclose(bytes, size, *number);
                const int r = p == LENGTH(places) - 1
                                  ? cox_wire_response_unpack(arena, bytes, size, &response)
                                  : cox_wire_request_unpack(arena, bytes, size, &request);
                if (r != (count % item ? COX_CORRUPT : 0))
                    fail_msg("%s.%s of %zu bytes: %s", places[p].message->short_name, field->name,
                             count, cox_status_text(r));
                assert_int_equal(r == 0, request || response);
            }
        }
    assert_int_equal(columns, 10 + 1 + 1 + 3);
}

ARENA_TEST(columns_lie_in_a_frame_as_in_memory)
{
    struct cox_arena *arena = *state;
    Coxswain__StepDelta step = COXSWAIN__STEP_DELTA__INIT;
    Coxswain__ExecuteModelRequest model = COXSWAIN__EXECUTE_MODEL_REQUEST__INIT;
    Request request = COXSWAIN__EXECUTE_REQUEST__INIT, *again = NULL;
    step.token_slot = (uint32_t[]){0x01020304, UINT32_MAX};
    step.token = (int32_t[]){-2, INT32_MAX};
    step.n_token_slot = step.n_token = 2;
    model.step = &step;
    request.execute_model_request = &model;
    request.request_case = COXSWAIN__EXECUTE_REQUEST__REQUEST_EXECUTE_MODEL_REQUEST;
    static const uint8_t expected[] = {0x1a, 23,   0xc2, 0x3e, 20,   0x42, 8,    4, 3,
                                       2,    1,    0xff, 0xff, 0xff, 0xff, 0x4a, 8, 0xfe,
                                       0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f};
    uint8_t bytes[64];
    size_t size;
    assert_int_equal(cox_wire_request_pack(&request, bytes, sizeof bytes, &size), 0);
    assert_int_equal(size, sizeof expected);
    assert_memory_equal(bytes, expected, size);
    assert_int_equal(cox_wire_request_unpack(arena, bytes, size, &again), 0);
    const Coxswain__StepDelta *read = again->execute_model_request->step;
    assert_int_equal(read->n_token_slot, 2);
    assert_int_equal(read->n_token, 2);
    assert_memory_equal(read->token_slot, step.token_slot, 2 * sizeof *step.token_slot);
    assert_memory_equal(read->token, step.token, 2 * sizeof *step.token);
}

/* Two bytes that cost some hundred: the cap ends it, and without the cap the count is right. */
PLAIN_TEST(many_empty_members)
{
    enum { COUNT = 10000 };
    static uint8_t bytes[4 + 2 * COUNT] = {0x1a, 0xa0, 0x9c, 0x01};
    for (size_t i = 0; i < COUNT; i++)
        bytes[4 + 2 * i] = 0x0a;
    struct cox_arena arena;
    Request *request = NULL;
    assert_int_equal(cox_arena_init(&arena, 0, 65536), 0);
    assert_int_equal(unpack_request_bytes(&arena, bytes, sizeof bytes, &request), COX_TOO_LARGE);
    cox_arena_deinit(&arena);
    assert_int_equal(cox_arena_init(&arena, 0, (size_t)32 << 20), 0);
    assert_int_equal(unpack_request_bytes(&arena, bytes, sizeof bytes, &request), 0);
    assert_int_equal(request->execute_model_request->n_seq_group_metadata_list, COUNT);
    cox_arena_deinit(&arena);
}
