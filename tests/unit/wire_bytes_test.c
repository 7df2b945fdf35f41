/* wire_bytes: bytes written by hand from docs/wire.md. */
#include "wire_fixture.h"

#include <unistd.h>

/* ---- bytes by hand ---- */

/* Packs to exactly these bytes, and these bytes unpack to what packs to them again. */
#define assert_request_bytes(arena, request, ...)                                                  \
    do {                                                                                           \
        static const uint8_t golden_[] = {__VA_ARGS__};                                            \
        size_t size_ = 0;                                                                          \
        Request *copy_ = NULL;                                                                     \
        assert_int_equal(cox_wire_request_pack((request), frame, sizeof frame, &size_), 0);        \
        assert_int_equal(size_, sizeof golden_);                                                   \
        assert_memory_equal(frame, golden_, sizeof golden_);                                       \
        assert_int_equal(cox_wire_request_unpack((arena), golden_, sizeof golden_, &copy_), 0);    \
        assert_int_equal(cox_wire_request_pack(copy_, frame_again, sizeof frame_again, &size_),    \
                         0);                                                                       \
        assert_int_equal(size_, sizeof golden_);                                                   \
        assert_memory_equal(frame_again, golden_, sizeof golden_);                                 \
    } while (0)

#define assert_response_bytes(arena, response, ...)                                                \
    do {                                                                                           \
        static const uint8_t golden_[] = {__VA_ARGS__};                                            \
        size_t size_ = 0;                                                                          \
        Response *copy_ = NULL;                                                                    \
        assert_int_equal(cox_wire_response_pack((response), frame, sizeof frame, &size_), 0);      \
        assert_int_equal(size_, sizeof golden_);                                                   \
        assert_memory_equal(frame, golden_, sizeof golden_);                                       \
        assert_int_equal(cox_wire_response_unpack((arena), golden_, sizeof golden_, &copy_), 0);   \
        assert_int_equal(cox_wire_response_pack(copy_, frame_again, sizeof frame_again, &size_),   \
                         0);                                                                       \
        assert_int_equal(size_, sizeof golden_);                                                   \
        assert_memory_equal(frame_again, golden_, sizeof golden_);                                 \
    } while (0)

static Request request_of(int type, unsigned request_case)
{
    Request request = COXSWAIN__EXECUTE_REQUEST__INIT;
    request.has_execute_type = 1;
    request.execute_type = (Coxswain__ExecuteType)type;
    request.request_case = (Coxswain__ExecuteRequest__RequestCase)request_case;
    return request;
}

ARENA_TEST(golden_small_requests)
{
    struct cox_arena *arena = *state;

    Coxswain__ExecuteRequest__ConfigEntry entry = COXSWAIN__EXECUTE_REQUEST__CONFIG_ENTRY__INIT;
    entry.key = (char *)"k";
    entry.value = (char *)"v";
    Coxswain__ExecuteRequest__ConfigEntry *entries[] = {&entry};
    Request init = request_of(0, 0);
    init.n_config = 1;
    init.config = entries;
    assert_request_bytes(arena, &init, 0x08, 0x00, 0x12, 0x06, 0x0a, 0x01, 'k', 0x12, 0x01, 'v');

    Coxswain__LoraOperationRequest lora = COXSWAIN__LORA_OPERATION_REQUEST__INIT;
    lora.master_model = (char *)"m";
    lora.lora_name = (char *)"a";
    lora.lora_path = (char *)"/p";
    lora.has_lora_op_type = 1;
    lora.lora_op_type = COXSWAIN__LORA_OPERATION_TYPE__UNLOAD;
    Request operation = request_of(7, 8);
    operation.lora_operation_request = &lora;
    assert_request_bytes(arena, &operation, 0x08, 0x07, 0x42, 0x0c, 0x0a, 0x01, 'm', 0x12, 0x01,
                         'a', 0x1a, 0x02, '/', 'p', 0x20, 0x01);

    int64_t seq_ids[] = {7, 300};
    Coxswain__TGCleanupRequest cleanup = COXSWAIN__TGCLEANUP_REQUEST__INIT;
    cleanup.n_seq_ids = LENGTH(seq_ids);
    cleanup.seq_ids = seq_ids;
    Request clean = request_of(6, 7);
    clean.text_generator_cleanup_request = &cleanup;
    assert_request_bytes(arena, &clean, 0x08, 0x06, 0x3a, 0x05, 0x0a, 0x03, 0x07, 0xac, 0x02);

    Coxswain__RecoverCommandRequest command = COXSWAIN__RECOVER_COMMAND_REQUEST__INIT;
    command.command = (char *)"CMD";
    Request pause = request_of(16, 10);
    pause.recover_command_request = &command;
    /* Our own fields: 1000 * 8 + 0 is 0x1f40, c0 3e as a varint. */
    pause.has_deadline_ns = 1;
    pause.deadline_ns = 1;
    pause.has_trace_id = 1;
    pause.trace_id = 2;
    assert_request_bytes(arena, &pause, 0x08, 0x10, 0x52, 0x05, 0x0a, 0x03, 'C', 'M', 'D', 0xc0,
                         0x3e, 0x01, 0xc8, 0x3e, 0x02);
}

ARENA_TEST(golden_link_request)
{
    struct cox_arena *arena = *state;
    Coxswain__PDLinkRequest__PDLinkInfo__Instance2spEntry entry =
        COXSWAIN__PDLINK_REQUEST__PDLINK_INFO__INSTANCE2SP_ENTRY__INIT;
    entry.has_key = 1;
    entry.key = 3;
    entry.has_value = 1;
    entry.value = 5;
    Coxswain__PDLinkRequest__PDLinkInfo__Instance2spEntry *entries[] = {&entry};
    Coxswain__HostInfo host = COXSWAIN__HOST_INFO__INIT;
    host.host_ip = (char *)"h";
    host.cluster_id = (char *)"9";
    Coxswain__HostInfo *hosts[] = {&host};
    Coxswain__RemoteInfo remote = COXSWAIN__REMOTE_INFO__INIT;
    remote.n_host_info = 1;
    remote.host_info = hosts;
    Coxswain__RemoteInfo *remotes[] = {&remote};
    Coxswain__PDLinkRequest__PDLinkInfo info = COXSWAIN__PDLINK_REQUEST__PDLINK_INFO__INIT;
    info.has_pd_role = 1;
    info.pd_role = COXSWAIN__PDROLE__DECODE_ROLE;
    info.has_change_role = 1;
    info.change_role = 1;
    info.n_link_info = 1;
    info.link_info = remotes;
    info.n_instance2sp = 1;
    info.instance2sp = entries;
    info.has_contains_dp_instance_ids = 1;
    info.contains_dp_instance_ids = 1;
    Coxswain__PDLinkRequest__PDLinkInfo *infos[] = {&info};
    Coxswain__PDLinkRequest link = COXSWAIN__PDLINK_REQUEST__INIT;
    link.n_pd_link_info = 1;
    link.pd_link_info = infos;
    Request request = request_of(4, 4);
    request.pd_link_request = &link;
    assert_request_bytes(arena, &request, 0x08, 0x04, 0x22, 0x18, 0x0a, 0x16, 0x08, 0x02, 0x10,
                         0x01, 0x2a, 0x08, 0x0a, 0x06, 0x0a, 0x01, 'h', 0x12, 0x01, '9', 0x3a, 0x04,
                         0x08, 0x03, 0x10, 0x05, 0x58, 0x01);

    /* Handles by value, in fields of our own: 1000 * 8 + 2 is 0x1f42, c2 3e as a varint; of 1090,
     * 92 44. */
    uint8_t handle[] = {0xaa, 0xbb};
    Coxswain__KvPool pool = COXSWAIN__KV_POOL__INIT;
    pool.has_blocks = 1;
    pool.blocks = (ProtobufCBinaryData){.len = sizeof handle, .data = handle};
    pool.has_block_count = 1;
    pool.block_count = 9;
    Coxswain__KvPool *pools[] = {&pool, &pool};
    remote.n_host_info = 0;
    remote.n_kv_pools = 2;
    remote.kv_pools = pools;
    remote.control_socket = (char *)"d";
    remote.has_epoch = 1;
    remote.epoch = 7;
    info = (Coxswain__PDLinkRequest__PDLinkInfo)COXSWAIN__PDLINK_REQUEST__PDLINK_INFO__INIT;
    info.n_link_info = 1;
    info.link_info = remotes;
    assert_request_bytes(arena, &request, 0x08, 0x04, 0x22, 0x1f, 0x0a, 0x1d, 0x2a, 0x1b, 0xc2,
                         0x3e, 0x07, 0x08, 0x09, 0x92, 0x44, 0x02, 0xaa, 0xbb, 0xc2, 0x3e, 0x07,
                         0x08, 0x09, 0x92, 0x44, 0x02, 0xaa, 0xbb, 0xca, 0x3e, 0x01, 'd', 0xd0,
                         0x3e, 0x07);
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
    assert_request_bytes(arena, &request,
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

static Response response_of(int type, int rank, unsigned result_case)
{
    Response response = COXSWAIN__EXECUTE_RESPONSE__INIT;
    response.has_msg_type = 1;
    response.msg_type = type;
    response.has_rank = 1;
    response.rank = rank;
    response.result_case = (Coxswain__ExecuteResponse__ResultCase)result_case;
    return response;
}

ARENA_TEST(golden_responses)
{
    struct cox_arena *arena = *state;

    Coxswain__ExecuteResponse__InitResults__InitResultMapEntry entry =
        COXSWAIN__EXECUTE_RESPONSE__INIT_RESULTS__INIT_RESULT_MAP_ENTRY__INIT;
    entry.key = (char *)"a";
    entry.value = (char *)"b";
    Coxswain__ExecuteResponse__InitResults__InitResultMapEntry *entries[] = {&entry};
    Coxswain__KVCacheDesc desc = COXSWAIN__KVCACHE_DESC__INIT;
    desc.has_npu_block_num = 1;
    desc.npu_block_num = 100;
    desc.has_block_size = 1;
    desc.block_size = 128;
    desc.has_compression_ratio = 1;
    desc.compression_ratio = 1;
    desc.has_cache_type = 1;
    Coxswain__KVCacheDesc *descs[] = {&desc};
    Coxswain__ExecuteResponse__InitResults init = COXSWAIN__EXECUTE_RESPONSE__INIT_RESULTS__INIT;
    init.n_init_result_map = 1;
    init.init_result_map = entries;
    init.n_kv_cache_descs = 1;
    init.kv_cache_descs = descs;
    Response response = response_of(0, 2, 5);
    response.init_results = &init;
    assert_response_bytes(arena, &response, 0x08, 0x00, 0x10, 0x02, 0x2a, 0x13, 0x0a, 0x06, 0x0a,
                          0x01, 'a', 0x12, 0x01, 'b', 0x12, 0x09, 0x08, 0x64, 0x10, 0x80, 0x01,
                          0x18, 0x01, 0x20, 0x00);

    Coxswain__RecoverCommandResponse command = COXSWAIN__RECOVER_COMMAND_RESPONSE__INIT;
    command.has_npu_device_id = 1;
    command.npu_device_id = 1;
    command.has_command_result = 1;
    command.command_result = -1;
    command.error_msg = (char *)"e";
    response = response_of(10, 1, 11);
    response.recover_command_response = &command;
    response.error_text = (char *)"t";
    assert_response_bytes(arena, &response, 0x08, 0x0a, 0x10, 0x01, 0x5a, 0x10, 0x08, 0x01, 0x10,
                          0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01, 0x1a, 0x01,
                          'e', 0xc2, 0x3e, 0x01, 't');
}

ARENA_TEST(golden_model_responses)
{
    struct cox_arena *arena = *state;
    int64_t tokens[] = {42};
    float logprobs[] = {-0.5f};
    Coxswain__SequenceOutput sample = COXSWAIN__SEQUENCE_OUTPUT__INIT;
    sample.has_seq_id = 1;
    sample.seq_id = 5;
    sample.n_output_token = 1;
    sample.output_token = tokens;
    sample.n_logprob = 1;
    sample.logprob = logprobs;
    sample.has_num_parallel_tokens = 1;
    sample.num_parallel_tokens = 1;
    Coxswain__SequenceOutput *samples[] = {&sample};
    Coxswain__CompletionSequenceGroupOutput group =
        COXSWAIN__COMPLETION_SEQUENCE_GROUP_OUTPUT__INIT;
    group.n_samples = 1;
    group.samples = samples;
    Coxswain__CompletionSequenceGroupOutput *groups[] = {&group};
    Coxswain__ExecuteModelResponse model = COXSWAIN__EXECUTE_MODEL_RESPONSE__INIT;
    model.n_outputs = 1;
    model.outputs = groups;
    Response response = response_of(1, 0, 4);
    response.execute_model_response = &model;
    assert_response_bytes(arena, &response, 0x08, 0x01, 0x10, 0x00, 0x22, 0x11, 0x0a, 0x0f, 0x0a,
                          0x0d, 0x08, 0x05, 0x1a, 0x01, 0x2a, 0x22, 0x04, 0x00, 0x00, 0x00, 0xbf,
                          0x58, 0x01);

    Coxswain__ExecuteModelResponse failed = COXSWAIN__EXECUTE_MODEL_RESPONSE__INIT;
    failed.err_msg = (char *)"x";
    response = response_of(15, 3, 4);
    response.execute_model_response = &failed;
    assert_response_bytes(arena, &response, 0x08, 0x0f, 0x10, 0x03, 0x22, 0x03, 0x2a, 0x01, 'x');

    char *success[] = {(char *)"1"};
    Coxswain__PDLinkStatusResponse__FailedLinkInfo link =
        COXSWAIN__PDLINK_STATUS_RESPONSE__FAILED_LINK_INFO__INIT;
    link.cluster_id = (char *)"2";
    link.has_pd_error_code = 1;
    link.pd_error_code = COXSWAIN__PDERROR_CODE__PD_LINK_ERROR;
    Coxswain__PDLinkStatusResponse__FailedLinkInfo *links[] = {&link};
    Coxswain__PDLinkStatusResponse status = COXSWAIN__PDLINK_STATUS_RESPONSE__INIT;
    status.n_failed_link_info = 1;
    status.failed_link_info = links;
    status.n_success_link_info = 1;
    status.success_link_info = success;
    response = response_of(14, 0, 6);
    response.pd_link_status_response = &status;
    assert_response_bytes(arena, &response, 0x08, 0x0e, 0x10, 0x00, 0x32, 0x0b, 0x0a, 0x06, 0x0a,
                          0x01, '2', 0x10, 0xd1, 0x0f, 0x12, 0x01, '1');
}

/* ---- sizes ---- */

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
