#include "wire_fixture.h"

/* ---- messages with every field set ---- */

size_t scalar_size(ProtobufCType type)
{
    switch (type) {
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_FIXED64:
        return 8;
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_MESSAGE:
        return sizeof(void *);
    case PROTOBUF_C_TYPE_BYTES:
        return sizeof(ProtobufCBinaryData);
    case PROTOBUF_C_TYPE_BOOL:
        return sizeof(protobuf_c_boolean);
    default:
        return 4;
    }
}

static ProtobufCMessage *full_message(struct cox_arena *arena,
                                      const ProtobufCMessageDescriptor *descriptor, unsigned chosen,
                                      uint32_t *seed);

/* One value of the field's type, other than zero and other than the one before. */
static void fill_value(struct cox_arena *arena, const ProtobufCFieldDescriptor *field, void *member,
                       uint32_t *seed)
{
    uint32_t n = ++*seed;
    switch (field->type) {
    case PROTOBUF_C_TYPE_INT32:
    case PROTOBUF_C_TYPE_SFIXED32:
        *(int32_t *)member = n % 2 ? (int32_t)n : -(int32_t)n;
        break;
    case PROTOBUF_C_TYPE_INT64:
        *(int64_t *)member = n % 2 ? (int64_t)n << 33 : -((int64_t)n << 33);
        break;
    case PROTOBUF_C_TYPE_UINT32:
    case PROTOBUF_C_TYPE_FIXED32:
        *(uint32_t *)member = UINT32_MAX - n;
        break;
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_FIXED64:
        *(uint64_t *)member = UINT64_MAX - n;
        break;
    case PROTOBUF_C_TYPE_FLOAT:
        *(float *)member = (float)n / 4;
        break;
    case PROTOBUF_C_TYPE_BOOL:
        *(protobuf_c_boolean *)member = 1;
        break;
    case PROTOBUF_C_TYPE_ENUM: {
        const ProtobufCEnumDescriptor *values = field->descriptor;
        *(int32_t *)member = values->values[1 + n % (values->n_values - 1)].value;
        break;
    }
    case PROTOBUF_C_TYPE_STRING: {
        char text[32];
        snprintf(text, sizeof text, "text %u", n);
        *(char **)member = cox_arena_strdup(arena, text);
        break;
    }
    case PROTOBUF_C_TYPE_BYTES: {
        ProtobufCBinaryData *bytes = member;
        bytes->len = 24;
        bytes->data = cox_arena_alloc(arena, bytes->len);
        for (size_t i = 0; i < 3; i++)
            cox_wire_int64_set(bytes->data, i, (int64_t)n << 40);
        break;
    }
    case PROTOBUF_C_TYPE_MESSAGE:
        *(ProtobufCMessage **)member = full_message(arena, field->descriptor, 0, seed);
        break;
    default:
        fail_msg("field %s: a type nobody fills", field->name);
    }
}

/* Every field set, repeated ones three times; of a oneof the field numbered `chosen`. */
static ProtobufCMessage *full_message(struct cox_arena *arena,
                                      const ProtobufCMessageDescriptor *descriptor, unsigned chosen,
                                      uint32_t *seed)
{
    ProtobufCMessage *message = cox_arena_alloc(arena, descriptor->sizeof_message);
    assert_non_null(message);
    descriptor->message_init(message);
    for (unsigned f = 0; f < descriptor->n_fields; f++) {
        const ProtobufCFieldDescriptor *field = &descriptor->fields[f];
        char *member = (char *)message + field->offset;
        char *quantifier = (char *)message + field->quantifier_offset;
        if (field->label == PROTOBUF_C_LABEL_REPEATED) {
            size_t size = scalar_size(field->type);
            char *values = cox_arena_alloc(arena, 3 * size);
            memset(values, 0, 3 * size);
            for (size_t i = 0; i < 3; i++)
                fill_value(arena, field, values + i * size, seed);
            *(size_t *)(void *)quantifier = 3;
            *(void **)(void *)member = values;
        } else if (field->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) {
            if (field->id == chosen) {
                *(uint32_t *)(void *)quantifier = field->id;
                fill_value(arena, field, member, seed);
            }
        } else {
            if (field->type != PROTOBUF_C_TYPE_STRING && field->type != PROTOBUF_C_TYPE_MESSAGE)
                *(protobuf_c_boolean *)(void *)quantifier = 1;
            fill_value(arena, field, member, seed);
        }
    }
    return message;
}

Request *full_request(struct cox_arena *arena, unsigned chosen)
{
    uint32_t seed = 100 * chosen;
    return (Request *)full_message(arena, &coxswain__execute_request__descriptor, chosen, &seed);
}

Response *full_response(struct cox_arena *arena, unsigned chosen)
{
    uint32_t seed = 100 * chosen;
    return (Response *)full_message(arena, &coxswain__execute_response__descriptor, chosen, &seed);
}

uint8_t frame[1 << 17];
uint8_t frame_again[1 << 17];

/* ---- bytes that are no message ---- */

int unpack_any(struct cox_arena *arena, bool is_request, const uint8_t *bytes, size_t size,
               ProtobufCMessage **ret_message)
{
    Request *request = NULL;
    Response *response = NULL;
    int r = is_request ? cox_wire_request_unpack(arena, bytes, size, &request)
                       : cox_wire_response_unpack(arena, bytes, size, &response);
    if (r == 0)
        *ret_message = is_request ? &request->base : &response->base;
    else
        assert_true(!request && !response);
    return r;
}

int pack_any(const ProtobufCMessage *message, uint8_t *bytes, size_t size_max, size_t *ret_size)
{
    return message->descriptor == &coxswain__execute_request__descriptor
               ? cox_wire_request_pack((const Request *)message, bytes, size_max, ret_size)
               : cox_wire_response_pack((const Response *)message, bytes, size_max, ret_size);
}

ProtobufCMessage *full_kind(struct cox_arena *arena, unsigned kind, bool *ret_is_request)
{
    const unsigned request_count = REQUEST_LAST - REQUEST_FIRST + 1;
    *ret_is_request = kind < request_count;
    return kind < request_count
               ? &full_request(arena, REQUEST_FIRST + kind)->base
               : &full_response(arena, RESPONSE_FIRST + kind - request_count)->base;
}

size_t pack_kind(struct cox_arena *arena, unsigned kind, bool *ret_is_request)
{
    size_t size = 0;
    assert_int_equal(pack_any(full_kind(arena, kind, ret_is_request), frame, sizeof frame, &size),
                     0);
    return size;
}

/* ---- the small functions ---- */

int arena_new(void **state)
{
    struct cox_arena *arena = malloc(sizeof *arena);
    if (!arena || cox_arena_init(arena, 4096, CAP))
        return -1;
    *state = arena;
    return 0;
}

int arena_free(void **state)
{
    cox_arena_deinit(*state);
    free(*state);
    return 0;
}
