/* wire_messages: each message goes there and back; some as bytes by hand from docs/wire.md. */
#include "wire_fixture.h"

/* ---- messages with every field set ---- */

static void assert_messages_equal(const ProtobufCMessage *a, const ProtobufCMessage *b);

static void assert_values_equal(const ProtobufCFieldDescriptor *field, const void *a, const void *b)
{
    if (field->type == PROTOBUF_C_TYPE_STRING) {
        assert_string_equal(*(char *const *)a, *(char *const *)b);
        assert_ptr_not_equal(*(char *const *)a, *(char *const *)b);
    } else if (field->type == PROTOBUF_C_TYPE_BYTES) {
        const ProtobufCBinaryData *x = a, *y = b;
        assert_int_equal(x->len, y->len);
        assert_memory_equal(x->data, y->data, x->len);
    } else if (field->type == PROTOBUF_C_TYPE_MESSAGE) {
        assert_messages_equal(*(ProtobufCMessage *const *)a, *(ProtobufCMessage *const *)b);
    } else {
        assert_memory_equal(a, b, scalar_size(field->type));
    }
}

/* Both full, of the same oneof case. */
static void assert_messages_equal(const ProtobufCMessage *a, const ProtobufCMessage *b)
{
    assert_non_null(a);
    assert_non_null(b);
    assert_ptr_equal(a->descriptor, b->descriptor);
    assert_int_equal(a->n_unknown_fields, 0);
    assert_int_equal(b->n_unknown_fields, 0);
    assert_int_equal((uintptr_t)b % 16, 0);
    for (unsigned f = 0; f < a->descriptor->n_fields; f++) {
        const ProtobufCFieldDescriptor *field = &a->descriptor->fields[f];
        const char *x = (const char *)a + field->offset, *y = (const char *)b + field->offset;
        const void *x_quantifier = (const char *)a + field->quantifier_offset;
        const void *y_quantifier = (const char *)b + field->quantifier_offset;
        if (field->label == PROTOBUF_C_LABEL_REPEATED) {
            size_t count = *(const size_t *)x_quantifier;
            assert_int_equal(*(const size_t *)y_quantifier, count);
            const char *x_values = *(char *const *)(const void *)x;
            const char *y_values = *(char *const *)(const void *)y;
            for (size_t i = 0; i < count; i++)
                assert_values_equal(field, x_values + i * scalar_size(field->type),
                                    y_values + i * scalar_size(field->type));
        } else if (field->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) {
            assert_int_equal(*(const uint32_t *)x_quantifier, *(const uint32_t *)y_quantifier);
            if (*(const uint32_t *)x_quantifier == field->id)
                assert_values_equal(field, x, y);
        } else {
            if (field->quantifier_offset)
                assert_true(*(const protobuf_c_boolean *)y_quantifier);
            assert_values_equal(field, x, y);
        }
    }
}

ARENA_TEST(every_message_there_and_back)
{
    struct cox_arena *arena = *state;
    for (unsigned kind = 0; kind < KIND_COUNT; kind++) {
        bool is_request;
        ProtobufCMessage *message = full_kind(arena, kind, &is_request), *copy = NULL;
        size_t size = 0;
        assert_int_equal(pack_any(message, frame, sizeof frame, &size), 0);
        assert_int_equal(size, is_request ? cox_wire_request_size((Request *)message)
                                          : cox_wire_response_size((Response *)message));
        assert_int_equal(unpack_any(arena, is_request, frame, size, &copy), 0);
        assert_messages_equal(message, copy);
        cox_arena_reset(arena);
    }
}

/* ---- bytes by hand ---- */

static void check_bytes(struct cox_arena *arena, const ProtobufCMessage *message,
                        const uint8_t *golden, size_t golden_size)
{
    const bool is_request = message->descriptor == &coxswain__execute_request__descriptor;
    ProtobufCMessage *copy = NULL;
    size_t size = 0;
    assert_int_equal(pack_any(message, frame, sizeof frame, &size), 0);
    assert_int_equal(size, golden_size);
    assert_memory_equal(frame, golden, size);
    assert_int_equal(unpack_any(arena, is_request, golden, size, &copy), 0);
    assert_int_equal(pack_any(copy, frame_again, sizeof frame_again, &size), 0);
    assert_int_equal(size, golden_size);
    assert_memory_equal(frame_again, golden, size);
}

/* Packs to exactly these bytes, and these bytes unpack to what packs to them again. */
#define assert_bytes(arena, message, ...)                                                          \
    check_bytes(arena, &(message)->base, (const uint8_t[]){__VA_ARGS__},                           \
                sizeof((const uint8_t[]){__VA_ARGS__}))

static Request request_of(int type, unsigned request_case)
{
    Request request = COXSWAIN__EXECUTE_REQUEST__INIT;
    request.has_execute_type = 1;
    request.execute_type = (Coxswain__ExecuteType)type;
    request.request_case = (Coxswain__ExecuteRequest__RequestCase)request_case;
    return request;
}

ARENA_TEST(golden_link_request)
{
    struct cox_arena *arena = *state;
    Coxswain__RemoteInfo remote = COXSWAIN__REMOTE_INFO__INIT, *remotes[] = {&remote};
    Coxswain__PDLinkRequest__PDLinkInfo info = COXSWAIN__PDLINK_REQUEST__PDLINK_INFO__INIT;
    Coxswain__PDLinkRequest__PDLinkInfo *infos[] = {&info};
    Coxswain__PDLinkRequest link = COXSWAIN__PDLINK_REQUEST__INIT;
    Request request = request_of(4, 4);
    info.n_link_info = 1;
    info.link_info = remotes;
    link.n_pd_link_info = 1;
    link.pd_link_info = infos;
    request.pd_link_request = &link;
    /* Handles by value, in fields of our own: 1000 * 8 + 2 is 0x1f42, c2 3e as a varint; of 1090,
     * 92 44. */
    uint8_t handle[] = {0xaa, 0xbb};
    Coxswain__KvPool pool = COXSWAIN__KV_POOL__INIT;
    pool.has_blocks = 1;
    pool.blocks = (ProtobufCBinaryData){.len = sizeof handle, .data = handle};
    pool.has_block_count = 1;
    pool.block_count = 9;
    Coxswain__KvPool *pools[] = {&pool, &pool};
    remote.n_kv_pools = 2;
    remote.kv_pools = pools;
    remote.control_socket = (char *)"d";
    remote.has_epoch = 1;
    remote.epoch = 7;
    assert_bytes(arena, &request, 0x08, 0x04, 0x22, 0x1f, 0x0a, 0x1d, 0x2a, 0x1b, 0xc2, 0x3e, 0x07,
                 0x08, 0x09, 0x92, 0x44, 0x02, 0xaa, 0xbb, 0xc2, 0x3e, 0x07, 0x08, 0x09, 0x92, 0x44,
                 0x02, 0xaa, 0xbb, 0xca, 0x3e, 0x01, 'd', 0xd0, 0x3e, 0x07);
}

ARENA_TEST(golden_model_request)
{
    struct cox_arena *arena = *state;
    uint8_t seq_ids[8];
    cox_wire_int64_set(seq_ids, 0, 0x0102);
    int32_t stop_token_ids[] = {1, 300};
    protobuf_c_boolean is_req_prefill[] = {1, 0};
    int64_t predicted[] = {-1};
    Coxswain__SequenceGroupMetadata group = COXSWAIN__SEQUENCE_GROUP_METADATA__INIT;
    group.request_id = (char *)"r";
    group.has_is_prompt = 1;
    group.is_prompt = 1;
    group.has_seqids = 1;
    group.seqids = (ProtobufCBinaryData){.len = sizeof seq_ids, .data = seq_ids};
    group.n_stop_token_ids = LENGTH(stop_token_ids);
    group.stop_token_ids = stop_token_ids;
    group.n_is_req_prefill = LENGTH(is_req_prefill);
    group.is_req_prefill = is_req_prefill;
    group.n_predicted_token_ids = LENGTH(predicted);
    group.predicted_token_ids = predicted;
    Coxswain__SequenceGroupMetadata *groups[] = {&group};
    Coxswain__ExecuteModelRequest model = COXSWAIN__EXECUTE_MODEL_REQUEST__INIT;
    model.n_seq_group_metadata_list = 1;
    model.seq_group_metadata_list = groups;
    model.has_forward_type = 1;
    model.forward_type = COXSWAIN__FORWARD_TYPE__DECODE;
    Request request = request_of(1, 3);
    request.execute_model_request = &model;
    /* clang-format off */
    assert_bytes(arena, &request,
                         0x08, 0x01,
                         0x1a, 0x2a,
                         0x0a, 0x26,
                         0x0a, 0x01, 'r',
                         0x10, 0x01,
                         0x1a, 0x08, 0x02, 0x01, 0, 0, 0, 0, 0, 0,
                         0x6a, 0x03, 0x01, 0xac, 0x02, /* 13, packed */
                         0x8a, 0x01, 0x02, 0x01, 0x00, /* 17, packed */
                         /* 35 */
                         0x9a, 0x02, 0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
                         0x01,
                         0x60, 0x01);
    /* clang-format on */
}

ARENA_TEST(golden_recover_response)
{
    struct cox_arena *arena = *state;
    Response response = COXSWAIN__EXECUTE_RESPONSE__INIT;
    Coxswain__RecoverCommandResponse command = COXSWAIN__RECOVER_COMMAND_RESPONSE__INIT;
    command.has_npu_device_id = 1;
    command.npu_device_id = 1;
    command.has_command_result = 1;
    command.command_result = -1;
    command.error_msg = (char *)"e";
    response.has_msg_type = response.has_rank = 1;
    response.msg_type = 10;
    response.rank = 1;
    response.result_case = COXSWAIN__EXECUTE_RESPONSE__RESULT_RECOVER_COMMAND_RESPONSE;
    response.recover_command_response = &command;
    response.error_text = (char *)"t";
    assert_bytes(arena, &response, 0x08, 0x0a, 0x10, 0x01, 0x5a, 0x10, 0x08, 0x01, 0x10, 0xff, 0xff,
                 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01, 0x1a, 0x01, 'e', 0xc2, 0x3e, 0x01,
                 't');
}

ARENA_TEST(empty_messages_take_no_bytes)
{
    struct cox_arena *arena = *state;
    Request request = COXSWAIN__EXECUTE_REQUEST__INIT, *request_copy = NULL;
    Response *response_copy = NULL;
    size_t size = 1;
    assert_int_equal(cox_wire_request_pack(&request, frame, 0, &size), 0);
    assert_int_equal(size, 0);
    assert_int_equal(cox_wire_request_unpack(arena, frame, 0, &request_copy), 0);
    assert_int_equal(request_copy->execute_type, 0);
    assert_int_equal(request_copy->request_case, 0);
    assert_int_equal(cox_wire_response_unpack(arena, frame, 0, &response_copy), 0);
    assert_int_equal(response_copy->result_case, 0);

    /* A oneof that names a message it does not have: left out, as protobuf-c's own senders do. */
    request = request_of(1, 3);
    assert_int_equal(cox_wire_request_pack(&request, frame, 2, &size), 0);
    assert_int_equal(size, 2);
    assert_int_equal(cox_wire_request_unpack(arena, frame, size, &request_copy), 0);
    assert_int_equal(request_copy->request_case, 0);
}

/* ---- the small functions ---- */

PLAIN_TEST(int64_arrays)
{
    assert_int_equal(cox_wire_int64_count(0), 0);
    assert_int_equal(cox_wire_int64_count(8), 1);
    assert_int_equal(cox_wire_int64_count(4096), 512);
    for (size_t size = 1; size < 8; size++)
        assert_int_equal(cox_wire_int64_count(size), -1);
    assert_int_equal(cox_wire_int64_count(12), -1);

    uint8_t bytes[1 + 3 * 8] = {0};
    cox_wire_int64_set(bytes + 1, 0, INT64_MIN);
    cox_wire_int64_set(bytes + 1, 1, -2);
    cox_wire_int64_set(bytes + 1, 2, 0x0807060504030201);
    static const uint8_t expected[] = {0,    0,    0,    0,    0,    0,    0,    0,    0x80,
                                       0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1,
                                       2,    3,    4,    5,    6,    7,    8};
    assert_memory_equal(bytes, expected, sizeof bytes);
    assert_true(cox_wire_int64_get(bytes + 1, 0) == INT64_MIN);
    assert_int_equal(cox_wire_int64_get(bytes + 1, 1), -2);
    assert_int_equal(cox_wire_int64_get(bytes + 1, 2), 0x0807060504030201);
}

PLAIN_TEST(type_names)
{
    const ProtobufCEnumDescriptor *types = &coxswain__execute_type__descriptor;
    uint32_t count = 0;
    for (; count < types->n_values && types->values[count].value < 1000; count++)
        assert_string_equal(cox_wire_type_name(count), types->values[count].name);
    const uint32_t unknown[] = {count, INT32_MAX, (uint32_t)INT32_MAX + 1, UINT32_MAX};
    for (size_t i = 0; i < LENGTH(unknown); i++)
        assert_string_equal(cox_wire_type_name(unknown[i]), "unknown");
}
