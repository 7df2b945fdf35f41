/*
 * make_corpus: writes the corpus of every target from real objects:
 *
 *     make_corpus tests/fuzz/corpus
 *
 * To be run again when a layout or message changes; the files are committed.
 */
#include "fuzz.h"

#include "tests/unit/table_request.h"
#include "channel/attach/named/names.h"
#include "channel/recorder/recorder_layout.h"
#include "channel/socket/fd_entries.h"
#include "channel/socket/hello.h"
#include "channel/handle/handle_internal.h"
#include "channel/shm/reply.h"
#include "channel/shm/request.h"
#include "channel/shm/state.h"
#include "coordinator/server/stream.h"
#include "memory.h"
#include "nodes/link/lead_link.h"
#include "proto/control.pb-c.h"
#include "proto/executor.pb-c.h"
#include "proto/recording.pb-c.h"
#include "proto/wire.h"

#include <sys/stat.h>

static const char *root;

struct bytes {
    size_t size;
    uint8_t data[8192];
};

static void put(struct bytes *bytes, const void *data, size_t size)
{
    FUZZ_CHECK(bytes->size + size <= sizeof bytes->data);
    if (size)
        memcpy(bytes->data + bytes->size, data, size);
    bytes->size += size;
}

static void put_byte(struct bytes *bytes, unsigned value)
{
    uint8_t byte = (uint8_t)value;
    put(bytes, &byte, 1);
}

static void save(const char *target, const char *name, const struct bytes *bytes)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", root, target);
    mkdir(path, 0777);
    snprintf(path, sizeof path, "%s/%s/%s", root, target, name);
    FILE *file = fopen(path, "w");
    FUZZ_CHECK(file && fwrite(bytes->data, 1, bytes->size, file) == bytes->size);
    FUZZ_CHECK(fclose(file) == 0);
}

static void save_text(const char *target, const char *name, const char *text)
{
    struct bytes bytes = {0};
    put(&bytes, text, strlen(text));
    save(target, name, &bytes);
}

static void control_attach(const char *name, uint32_t rank_count,
                           const struct cox_geometry_choice *choice)
{
    struct cox_control control = COX_CONTROL_NONE;
    struct cox_geometry geometry;
    FUZZ_CHECK(cox_geometry_resolve(rank_count, choice, &geometry, NULL) == 0);
    FUZZ_CHECK(cox_control_create(&control, "cox_corpus", &geometry, NULL) == 0);
    /* The same bytes at every run. */
    control.layout->header.coordinator_pid = 4242;
    control.layout->header.coordinator_start = 424242;
    control.layout->header.instance = MEMORY_INSTANCE;
    struct bytes bytes = {0};
    uint32_t size = (uint32_t)control.region.size;
    put(&bytes, &size, sizeof size);
    put(&bytes, control.layout, offsetof(struct cox_layout_header, padding));
    save("control_attach", name, &bytes);
    cox_control_unlink_names("cox_corpus", &geometry, 0);
    cox_control_close(&control);
}

static void request_frame(const char *name, unsigned ranks, unsigned depth, uint64_t sequence,
                          struct cox_rank_set asked, const char *text)
{
    const struct cox_channel *channel =
        memory_channel((uint8_t)ranks, (uint8_t)depth, false, COX_CHANNEL_EXECUTE);
    size_t capacity;
    uint8_t *frame = cox_request_frame(channel, sequence, &capacity);
    memcpy(frame, text, strlen(text));
    cox_request_publish(channel, sequence, COX_TYPE_OPAQUE, strlen(text), &asked);
    struct bytes bytes = {0};
    put_byte(&bytes, ranks);
    put_byte(&bytes, depth);
    put_byte(&bytes, COX_CHANNEL_EXECUTE);
    put(&bytes, &sequence, sizeof sequence);
    put(&bytes,
        &cox_state_channel(channel->control, COX_CHANNEL_EXECUTE)
             ->frames[sequence % channel->control->geometry.depth],
        sizeof(struct cox_layout_frame));
    put(&bytes, frame - COX_PREFIX_SIZE, COX_PREFIX_SIZE + strlen(text));
    save("request_frame", name, &bytes);
}

static void reply_slot(const char *name, unsigned ranks, unsigned depth, uint32_t rank,
                       unsigned flags, uint64_t sequence, bool failed, const char *text)
{
    const struct cox_channel *channel =
        memory_channel((uint8_t)ranks, (uint8_t)depth, flags & 1, COX_CHANNEL_EXECUTE);
    struct cox_layout_rank_line *line = cox_state_line(channel->control, rank, COX_CHANNEL_EXECUTE);
    uint32_t incarnation = 1, buffer_size = UINT32_MAX;
    size_t capacity;
    uint8_t *slot = cox_reply_slot(channel, rank, sequence, flags & 2, &capacity);
    memset(line, 0, sizeof *line);
    atomic_store(&line->instance, MEMORY_INSTANCE);
    atomic_store(&line->incarnation, incarnation);
    memcpy(slot, text, strlen(text));
    cox_reply_commit(channel, rank, sequence, strlen(text), failed);
    cox_state_set_done(line, sequence);
    struct bytes bytes = {0};
    put_byte(&bytes, ranks);
    put_byte(&bytes, depth);
    put_byte(&bytes, COX_CHANNEL_EXECUTE);
    put_byte(&bytes, rank);
    put_byte(&bytes, flags);
    put(&bytes, &sequence, sizeof sequence);
    put(&bytes, &incarnation, sizeof incarnation);
    put(&bytes, &buffer_size, sizeof buffer_size);
    put(&bytes, line, sizeof *line);
    put(&bytes, slot - COX_PREFIX_SIZE, COX_PREFIX_SIZE + strlen(text));
    save("reply_slot", name, &bytes);
}

static void put_request(struct bytes *bytes, Request *step)
{
    Coxswain__ExecuteRequest request = COXSWAIN__EXECUTE_REQUEST__INIT;
    static uint8_t packed[4096];
    size_t size;
    request.has_execute_type = 1;
    request.execute_type = COXSWAIN__EXECUTE_TYPE__MODEL_INFER;
    request.request_case = COXSWAIN__EXECUTE_REQUEST__REQUEST_EXECUTE_MODEL_REQUEST;
    request.execute_model_request = step;
    FUZZ_CHECK(cox_wire_request_pack(&request, packed, sizeof packed, &size) == 0);
    put(bytes, packed, size);
}

/* ---- control connections ---- */

static void put_message(struct bytes *bytes, const ProtobufCMessage *message)
{
    struct cox_stream stream;
    cox_stream_init(&stream, -1);
    FUZZ_CHECK(cox_stream_put(&stream, message) == 0);
    put(bytes, stream.out, stream.out_size);
    cox_stream_deinit(&stream);
}

static void put_complete(struct bytes *bytes)
{
    int32_t tokens[] = {1, 5, 10, 13, 8, 11, 14, 300}, stops[] = {2};
    CoxswainControl__Prompt prompts[2], *list[2];
    CoxswainControl__CompleteRequest complete = COXSWAIN_CONTROL__COMPLETE_REQUEST__INIT;
    CoxswainControl__ControlRequest request = COXSWAIN_CONTROL__CONTROL_REQUEST__INIT;
    for (uint32_t i = 0; i < 2; i++) {
        coxswain_control__prompt__init(&prompts[i]);
        prompts[i].has_index = true;
        prompts[i].index = i * 1000;
        prompts[i].tokens = tokens;
        prompts[i].n_tokens = 8 - i;
        list[i] = &prompts[i];
    }
    complete.prompts = list;
    complete.n_prompts = 2;
    complete.has_new_count_max = complete.has_temperature = complete.has_top_k = true;
    complete.new_count_max = 20;
    complete.temperature = 0.5f;
    complete.top_k = 3;
    complete.stop_tokens = stops;
    complete.n_stop_tokens = 1;
    request.request_case = COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_COMPLETE;
    request.complete = &complete;
    put_message(bytes, &request.base);
}

static void put_replies(struct bytes *bytes)
{
    int32_t tokens[] = {11, 8, 2};
    uint32_t late[] = {0, 7};
    CoxswainControl__ControlReply reply = COXSWAIN_CONTROL__CONTROL_REPLY__INIT;
    CoxswainControl__CompletionItem item = COXSWAIN_CONTROL__COMPLETION_ITEM__INIT;
    CoxswainControl__Error error = COXSWAIN_CONTROL__ERROR__INIT;
    CoxswainControl__StatusReply status = COXSWAIN_CONTROL__STATUS_REPLY__INIT;
    CoxswainControl__RankStatus rank = COXSWAIN_CONTROL__RANK_STATUS__INIT, *ranks[] = {&rank};
    CoxswainControl__ChannelStatus channel = COXSWAIN_CONTROL__CHANNEL_STATUS__INIT,
                                   *channels[] = {&channel};
    item.has_index = item.has_finish = error.has_code = true;
    item.index = 3;
    item.tokens = tokens;
    item.n_tokens = 3;
    reply.reply_case = COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_ITEM;
    reply.item = &item;
    put_message(bytes, &reply.base);
    error.code = COX_TOO_LARGE;
    error.text = "too long";
    reply.reply_case = COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_ERROR;
    reply.error = &error;
    put_message(bytes, &reply.base);
    rank.has_rank = rank.has_pid = true;
    rank.pid = 4242;
    rank.death = "rank 0 (pid 4242) was killed by signal 9 (Killed)";
    channel.name = "execute";
    channel.late_ranks = late;
    channel.n_late_ranks = 2;
    status.name = "group";
    status.ranks = ranks;
    status.n_ranks = 1;
    status.channels = channels;
    status.n_channels = 1;
    reply.reply_case = COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_STATUS;
    reply.status = &status;
    put_message(bytes, &reply.base);
}

static void put_recover(struct bytes *bytes)
{
    CoxswainControl__RecoverRequest recover = COXSWAIN_CONTROL__RECOVER_REQUEST__INIT;
    CoxswainControl__ControlRequest request = COXSWAIN_CONTROL__CONTROL_REQUEST__INIT;
    recover.has_command = recover.has_rank = recover.has_kill = recover.has_timeout_ms = true;
    recover.command = 5;
    recover.rank = 2;
    recover.kill = true;
    recover.timeout_ms = 60000;
    request.request_case = COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_RECOVER;
    request.recover = &recover;
    put_message(bytes, &request.base);
}

static void put_recovered(struct bytes *bytes)
{
    CoxswainControl__ControlReply reply = COXSWAIN_CONTROL__CONTROL_REPLY__INIT;
    CoxswainControl__RecoverReply recover = COXSWAIN_CONTROL__RECOVER_REPLY__INIT;
    CoxswainControl__RecoverResult results[2], *list[] = {&results[0], &results[1]};
    CoxswainControl__Error error = COXSWAIN_CONTROL__ERROR__INIT;
    CoxswainControl__StatusReply status = COXSWAIN_CONTROL__STATUS_REPLY__INIT;
    CoxswainControl__RecoveryStatus recovery = COXSWAIN_CONTROL__RECOVERY_STATUS__INIT;
    for (int32_t i = 0; i < 2; i++) {
        coxswain_control__recover_result__init(&results[i]);
        results[i].has_rank = results[i].has_result = true;
        results[i].rank = (uint32_t)i;
        results[i].result = i ? -1 : 507;
        results[i].text = "no answer";
    }
    error.has_code = true;
    error.code = COX_REJECTED;
    error.text = "pause: rank 0 replied 507";
    recover.ranks = list;
    recover.n_ranks = 2;
    recover.error = &error;
    recover.engine_state = "ABNORMAL";
    reply.reply_case = COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_RECOVER;
    reply.recover = &recover;
    put_message(bytes, &reply.base);
    recovery.has_on_death = recovery.has_restart_max = true;
    recovery.on_death = 2;
    recovery.restart_max = 5;
    recovery.doing = "replacing rank 2";
    status.recovery = &recovery;
    reply.reply_case = COXSWAIN_CONTROL__CONTROL_REPLY__REPLY_STATUS;
    reply.status = &status;
    put_message(bytes, &reply.base);
}

static void control_request(void)
{
    CoxswainControl__ControlRequest request = COXSWAIN_CONTROL__CONTROL_REQUEST__INIT;
    CoxswainControl__StatusRequest status = COXSWAIN_CONTROL__STATUS_REQUEST__INIT;
    CoxswainControl__StopRequest stop = COXSWAIN_CONTROL__STOP_REQUEST__INIT;
    struct bytes whole = {0}, pieces = {0}, replies = {0}, recover = {0}, recovered = {0};
    request.request_case = COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_STATUS;
    request.status = &status;
    put(&whole, "\0\377", 2);
    put_message(&whole, &request.base);
    put_complete(&whole);
    save("control_request", "status_and_prompts", &whole);
    request.request_case = COXSWAIN_CONTROL__CONTROL_REQUEST__REQUEST_STOP;
    request.stop = &stop;
    put(&pieces, "\2\0", 2);
    put_complete(&pieces);
    put_message(&pieces, &request.base);
    save("control_request", "prompts_and_stop_in_pieces", &pieces);
    put(&replies, "\1\37", 2);
    put_replies(&replies);
    save("control_request", "replies", &replies);
    put(&recover, "\3\0", 2);
    put_recover(&recover);
    save("control_request", "recover", &recover);
    put(&recovered, "\1\7", 2);
    put_recovered(&recovered);
    save("control_request", "recovered", &recovered);
}

/* Of the step target. */
static void put_record(struct bytes *bytes, unsigned how, Request *step)
{
    struct bytes packed = {0};
    put_request(&packed, step);
    uint16_t length = (uint16_t)packed.size;
    put_byte(bytes, how);
    put(bytes, &length, sizeof length);
    put(bytes, packed.data, packed.size);
    request_reset();
}

static Request *packed_prompts(void)
{
    static const int32_t tokens[] = {1, 5, 9, 2}, blocks[] = {3, 4};
    Request *step = packed_new(0, 0);
    StepSequence *one = packed_announce(step, 0, 100, tokens, 4);
    packed_table(one, blocks, 2);
    StepSequence *two = packed_announce(step, 3, 101, tokens, 2);
    packed_table(two, blocks, 1);
    packed_row(step, 0, 0, 4);
    packed_silent(step, packed_row(step, 3, 0, 1));
    request_swap_in(step, 1, 2);
    request_swap_out(step, 3, 4);
    request_copy(step, 5, 6);
    return step;
}

static Request *packed_decode(void)
{
    Request *step = packed_new(1, 1);
    packed_append(step, 0, 7, 0);
    packed_token(step, 3, 11);
    packed_row(step, 0, 4, 1);
    packed_row(step, 3, 1, 2);
    return step;
}

static Request *packed_finished(void)
{
    Request *step = packed_new(1, 2);
    packed_finish(step, 0);
    packed_row(step, 3, 3, 1);
    return step;
}

/* Columns of whole words: eight numbers of one byte, four of two, and some of all widths. */
static Request *packed_columns(void)
{
    Request *step = packed_new(1, UINT64_C(1) << 40);
    for (uint32_t i = 0; i < 20; i++) {
        packed_append(step, i, 200 + (int32_t)i, i % 2);
        packed_row(step, 120 + i, 1000 + i, i % 7 ? 1 : UINT32_C(1) << (i + 3));
    }
    packed_silent(step, 7);
    return step;
}

/* Numbers at their ends: a position whose sum with the count is small again, a slot and a block
 * that are as large as can be. */
static Request *packed_edges(void)
{
    Request *step = packed_new(1, 1);
    packed_append(step, 3, INT32_MAX, 0);
    packed_row(step, 0, UINT32_MAX - 1, 4);
    return step;
}

static Metadata *nested_one(Request *step, bool is_prompt)
{
    static const int32_t tokens[] = {1, 5, 9, 2}, blocks[] = {3, 4};
    Metadata *metadata = nested_add(step, "request-1", 100, is_prompt);
    if (is_prompt)
        metadata->prompt_token_ids = nested_bytes(tokens, 4);
    nested_table(metadata, blocks, 2);
    return metadata;
}

static Request *nested_prompt(void)
{
    Request *step = request_new(0);
    nested_split(nested_one(step, true), 0, 3, false);
    return step;
}

static Request *nested_decode(void)
{
    Request *step = request_new(1);
    nested_one(step, false);
    return step;
}

static Request *nested_finished(void)
{
    Request *step = request_new(1);
    nested_finish(step, "request-1");
    return step;
}

static void steps(void)
{
    enum { COMMIT = 1, BASE = 2, CLEANUP = 4, CLEAR = 8 };
    static const int64_t id = 101;
    static const uint16_t id_size = sizeof id;
    struct bytes packed = {0}, nested = {0}, mixed = {0};
    put_record(&packed, COMMIT, packed_prompts());
    put_record(&packed, BASE, packed_decode());
    put_record(&packed, COMMIT | BASE, packed_edges());
    put_record(&packed, COMMIT | BASE, packed_decode());
    put_record(&packed, COMMIT | BASE, packed_finished());
    save("step", "packed", &packed);
    put_record(&nested, COMMIT, nested_prompt());
    put_record(&nested, 0, nested_decode());
    put_record(&nested, COMMIT, nested_decode());
    put_record(&nested, COMMIT, nested_finished());
    save("step", "nested", &nested);
    put_record(&mixed, 0, packed_prompts());
    put_record(&mixed, COMMIT, packed_prompts());
    put_byte(&mixed, CLEANUP);
    put(&mixed, &id_size, sizeof id_size);
    put(&mixed, &id, sizeof id);
    put_record(&mixed, COMMIT, nested_prompt());
    put_record(&mixed, COMMIT | CLEAR, nested_prompt());
    save("step", "mixed", &mixed);
    static const struct {
        const char *name;
        Request *(*make)(void);
    } requests[] = {{"packed_prompts", packed_prompts},
                    {"packed_decode", packed_decode},
                    {"packed_columns", packed_columns},
                    {"nested_prompt", nested_prompt},
                    {"nested_decode", nested_decode}};
    for (size_t i = 0; i < sizeof requests / sizeof requests[0]; i++) {
        struct bytes bytes = {0};
        put_byte(&bytes, 0);
        put_request(&bytes, requests[i].make());
        save("wire_request", requests[i].name, &bytes);
        bytes.data[0] = 1;
        save("step_wire", requests[i].name, &bytes);
        request_reset();
    }
}

static void put_response(const char *name, const Coxswain__ExecuteResponse *response)
{
    static uint8_t packed[4096];
    struct bytes bytes = {0};
    size_t size;
    FUZZ_CHECK(cox_wire_response_pack(response, packed, sizeof packed, &size) == 0);
    put_byte(&bytes, 0);
    put(&bytes, packed, size);
    save("wire_response", name, &bytes);
    save("step_wire", name, &bytes);
}

static void responses(void)
{
    static char key[] = "npuBlockNum", value[] = "1000", text[] = "out of blocks";
    Coxswain__ExecuteResponse response = COXSWAIN__EXECUTE_RESPONSE__INIT;
    Coxswain__ExecuteModelResponse model = COXSWAIN__EXECUTE_MODEL_RESPONSE__INIT;
    Coxswain__StepResult step = COXSWAIN__STEP_RESULT__INIT;
    int32_t tokens[] = {4, -1, 70000};
    float logprobs[] = {-0.5f, 0, -12.25f};
    response.has_msg_type = response.has_rank = response.has_status = 1;
    response.rank = 1;
    step.n_tokens = step.n_logprobs = 3;
    step.tokens = tokens;
    step.logprobs = logprobs;
    uint64_t digests[] = {7, UINT64_C(0x123456789abcdef0), 1, UINT64_MAX, 0};
    step.has_base_sequence = 1;
    step.n_digests = sizeof digests / sizeof digests[0];
    step.digests = digests;
    step.base_sequence = 9;
    model.step = &step;
    response.result_case = COXSWAIN__EXECUTE_RESPONSE__RESULT_EXECUTE_MODEL_RESPONSE;
    response.execute_model_response = &model;
    put_response("step", &response);
    Coxswain__ExecuteResponse__InitResults results = COXSWAIN__EXECUTE_RESPONSE__INIT_RESULTS__INIT;
    Coxswain__ExecuteResponse__InitResults__InitResultMapEntry entry =
        COXSWAIN__EXECUTE_RESPONSE__INIT_RESULTS__INIT_RESULT_MAP_ENTRY__INIT;
    Coxswain__ExecuteResponse__InitResults__InitResultMapEntry *entries[] = {&entry};
    entry.key = key;
    entry.value = value;
    results.n_init_result_map = 1;
    results.init_result_map = entries;
    response.result_case = COXSWAIN__EXECUTE_RESPONSE__RESULT_INIT_RESULTS;
    response.init_results = &results;
    put_response("init", &response);
    response.result_case = COXSWAIN__EXECUTE_RESPONSE__RESULT__NOT_SET;
    response.status = 77;
    response.error_text = text;
    response.has_error_channel = response.has_error_sequence = 1;
    response.error_sequence = 12;
    put_response("failure", &response);
}

static void safetensors(const char *name, const char *header, size_t data_size)
{
    static const uint8_t data[64] = {0, 0, 0x80, 0x3f, 0, 0, 0, 0x40};
    struct bytes bytes = {0};
    uint64_t length = strlen(header);
    put(&bytes, &length, sizeof length);
    put(&bytes, header, length);
    put(&bytes, data, data_size);
    save("safetensors", name, &bytes);
}

static void texts(void)
{
    static const char config[] =
        "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\",\"hidden_size\":128,\"intermediate_size\":352,\"num_hidden_layers\":4,\"num_attention_heads\":8,\"num_key_value_heads\":4,\"head_dim\":16,\"vocab_size\":16,\"rms_norm_eps\":1e-05,\"rope_theta\":10000.0,\"rope_scaling\":null,\"max_position_embeddings\":64,\"hidden_act\":\"silu\",\"attention_bias\":false,\"mlp_bias\":false,\"tie_word_embeddings\":true,\"bos_token_id\":1,\"eos_token_id\":[2,3]}";
    static const char vocabulary[] =
        "27+58={\"added_tokens\":[{\"id\":0,\"content\":\"<pad>\",\"special\":true},{\"id\":1,\"content\":\"<bos>\",\"special\":true},{\"id\":2,\"content\":\"<eos>\",\"special\":true}],\"model\":{\"type\":\"WordLevel\",\"vocab\":{\"<pad>\":0,\"<bos>\":1,\"<eos>\":2,\"2\":3,\"7\":4,\"5\":5,\"8\":6,\"+\":7,\"=\":8,\"\xc3\xa4\":9},\"unk_token\":\"<pad>\"},\"eos_token_id\":[2,3]}";
    struct bytes bytes = {0};
    save_text("config", "llama", config);
    put_byte(&bytes, 6);
    put(&bytes, vocabulary, sizeof vocabulary - 1);
    save("tokenizer", "word_level", &bytes);
    safetensors("f32", "{\"a\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[0,16]}}  ", 16);
    safetensors(
        "mixed",
        "{\"__metadata__\":{\"format\":\"pt\"},\"a\":{\"dtype\":\"BF16\",\"shape\":[4,1],\"data_offsets\":[0,8]},\"b\":{\"dtype\":\"F16\",\"shape\":[],\"data_offsets\":[8,10]}}",
        10);
    save_text("sizes", "worker",
              "--shm_name_prefix=/4242_7\n--local_rank\n3\n--local_world_size\n8\n"
              "--npu_num_per_dp\n4\n--npu_device_id\n-1\n--parent_pid=4242\n--verbose");
    save_text("sizes", "coordinator",
              "X8\nYname-1.b\nZ4\n\\execute=16M\n\\transfer=4096\n]2.5\n^1e3");
    static const char *const numbers[] = {"16M",           "1G",   "0",    "-1",    "1e400",
                                          "nan",           " 5",   "5 ",   "1024K", "0x10",
                                          "1099511627777", "3.5s", "1.5e3"};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        char name[16];
        snprintf(name, sizeof name, "number_%zu", i);
        save_text("sizes", name, numbers[i]);
    }
}

static void hellos(void)
{
    struct cox_hello worker = {.role = COX_HELLO_WORKER,
                               .rank = 3,
                               .rank_count = 8,
                               .incarnation = 2,
                               .request_size_min = 1 << 20,
                               .response_size_min = 1 << 16,
                               .start = 424242};
    struct cox_hello fd_store = {.role = COX_HELLO_FD_STORE, .fd_count_max = 1};
    struct cox_hello later = {.role = COX_HELLO_COMMAND, .version = 2};
    struct bytes bytes = {.size = COX_HELLO_SIZE};
    cox_hello_format(&worker, bytes.data);
    save("hello", "worker", &bytes);
    cox_hello_format(&fd_store, bytes.data);
    save("hello", "fd_store", &bytes);
    cox_hello_format(&later, bytes.data);
    save("hello", "later_version", &bytes);
}

static void http_requests(void)
{
    save_text("http_request", "get", "GET /metrics?a=b HTTP/1.1\r\nHost: localhost\r\n\r\n");
    save_text("http_request", "head", "HEAD /readyz HTTP/1.0\r\n\r\n");
    save_text("http_request", "post", "POST /metrics HTTP/1.1\r\nContent-Length: 1\r\n\r\nx");
    save_text("http_request", "http2", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
}

static void sockets(void)
{
    struct cox_hello_reply hello_reply = {.version = COX_HELLO_VERSION,
                                          .attach = COX_ATTACH_SEALED,
                                          .rank = 3,
                                          .rank_count = 8,
                                          .incarnation = 2,
                                          .instance = MEMORY_INSTANCE};
    static const uint8_t head[] = {0, 4, 0, 31, 3},
                         requests[] = {2, 8, 4, 1, 2, 1, 20, 2, 22, 2, 1, 1, 12, 3, 70, 1, 246, 2};
    struct bytes bytes = {0};
    put(&bytes, head, sizeof head);
    cox_hello_reply_format(&hello_reply, 4, bytes.data + bytes.size);
    bytes.size += COX_HELLO_REPLY_SIZE;
    save("control_socket", "hello_reply", &bytes);
    bytes = (struct bytes){.size = 1, .data = {1}};
    bytes.size += cox_refusal_format(COX_TAKEN, "rank 3 is served by process 4242", bytes.data + 1);
    save("control_socket", "refusal", &bytes);
    bytes.size = 0;
    put(&bytes, requests, sizeof requests);
    save("control_socket", "fd_store", &bytes);
    bytes = (struct bytes){.size = 1 + COX_FD_STORE_REPLY_SIZE, .data = {3}};
    cox_fd_store_reply_format(COX_FULL, 4242, bytes.data + 1);
    save("control_socket", "fd_store_reply", &bytes);
}

/* how: of the target; what depends on the process that reads it is made right there. */
static void handle(const char *name, unsigned how, struct cox_handle_info info)
{
    struct cox_handle packed;
    struct bytes bytes = {0};
    info.pid = info.pid ? info.pid : 4242;
    info.start = 424242;
    info.system = UINT64_C(0x0123456789abcdef);
    info.dev = 1;
    info.ino = 4711;
    info.generation = 7;
    cox_handle_format(&info, &packed);
    put_byte(&bytes, how);
    put(&bytes, packed.bytes, sizeof packed.bytes);
    save("handle", name, &bytes);
}

static void handles(void)
{
    const struct cox_handle_info memory = {.kind = COX_HANDLE_MEMORY, .fd = 256, .size = 1000};
    struct cox_handle_info info = memory;
    handle("plain", 0, memory);
    handle("elsewhere", 1, memory);
    handle("other_fd", 1 | 2, memory);
    info.offset = 5000;
    handle("own", 1 | 2 | 4, info);
    info.size = 5001;
    handle("too_long", 1 | 2 | 4, info);
    info.offset = UINT64_MAX - 100;
    handle("overflow", 1 | 2 | 4, info);
    handle("socket", 1 | 2, (struct cox_handle_info){.kind = COX_HANDLE_OTHER, .fd = 2});
}

/* Of the recording target: a word of recorder 0, the coordinator's, or of rank number - 1. */
static void put_word(struct bytes *bytes, uint8_t number, uint64_t offset, uint64_t word)
{
    const struct {
        uint8_t recorder, size;
        uint32_t offset;
        uint64_t word;
    } patch = {number, offset < 4096 ? 0 : 0x80, (uint32_t)(offset / 8), word};
    bytes->data[1]++;
    put(bytes, &patch, sizeof patch);
}

/* Step `sequence` of two ranks; the second has not replied. */
static void put_step(struct bytes *bytes, uint64_t sequence)
{
    const uint64_t at = 1000 * sequence, type = (uint64_t)COXSWAIN__EXECUTE_TYPE__MODEL_INFER << 32;
    const uint64_t own[] = {sequence, type | 63, 3, 0, at, at + 1, at + 2, at + 3};
    const uint64_t rank[] = {sequence,        at + 10, type | 63, at + 11,
                             1ULL << 48 | 20, at + 90, 84,        at + 91};
    const uint64_t operation[] = {sequence, at + 20, 1ULL << 56, sequence, 1, at + 40, 0, at + 41};
    for (uint64_t i = 0; i < 8; i++)
        put_word(bytes, 0, cox_recorder_ring_offset(true, 0) + 128 * sequence + 8 * i, own[i]);
    for (uint64_t i = 0; i < 8; i++)
        put_word(bytes, 1, cox_recorder_ring_offset(false, 0) + 64 * sequence + 8 * i, rank[i]);
    for (uint64_t i = 0; i < 4; i++)
        put_word(bytes, 2, cox_recorder_ring_offset(false, 0) + 64 * sequence + 8 * i, rank[i]);
    for (uint64_t i = 0; i < 8; i++)
        put_word(bytes, 1,
                 cox_recorder_ring_offset(false, COX_RECORDER_GROUP) + 64 * sequence + 8 * i,
                 operation[i]);
}

static void recordings(void)
{
    uint32_t pending[] = {1};
    CoxswainRecording__State state = COXSWAIN_RECORDING__STATE__INIT, *states[] = {&state};
    CoxswainRecording__Request request = COXSWAIN_RECORDING__REQUEST__INIT,
                               *requests[] = {&request};
    CoxswainRecording__Rank ranks[2], *list[] = {&ranks[0], &ranks[1]};
    CoxswainRecording__Recording recording = COXSWAIN_RECORDING__RECORDING__INIT;
    state.has_state = state.has_sequence = state.has_age_ns = true;
    state.state = 2;
    state.sequence = 2;
    state.age_ns = 77;
    for (uint32_t i = 0; i < 2; i++) {
        coxswain_recording__rank__init(&ranks[i]);
        ranks[i].has_rank = ranks[i].has_pid = true;
        ranks[i].rank = i;
        ranks[i].pid = 4242 + i;
        ranks[i].liveness = i ? "dead" : "alive";
        ranks[i].states = states;
        ranks[i].n_states = 1;
    }
    ranks[1].death = "rank 1 (pid 4243) was killed by signal 9 (Killed)";
    ranks[1].last_lines = "last words";
    request.has_sequence = request.has_type = request.has_size = true;
    request.sequence = 2;
    request.type = COXSWAIN__EXECUTE_TYPE__MODEL_INFER;
    request.asked = request.pending = pending;
    request.n_asked = request.n_pending = 1;
    recording.name = "group";
    recording.cause = "death";
    recording.text = ranks[1].death;
    recording.has_rank_count = recording.has_monotonic_ns = recording.has_realtime_ns = true;
    recording.rank_count = 2;
    recording.monotonic_ns = recording.realtime_ns = 5000;
    recording.ranks = list;
    recording.n_ranks = 2;
    recording.requests = requests;
    recording.n_requests = 1;
    for (unsigned part = 0; part < 2; part++) {
        struct bytes bytes = {0};
        put_byte(&bytes, part ? 2 | 1 << 2 : 0); /* the last request */
        put_byte(&bytes, 0);
        for (uint64_t sequence = 1; sequence <= 2; sequence++)
            put_step(&bytes, sequence);
        const size_t size = protobuf_c_message_get_packed_size(&recording.base);
        FUZZ_CHECK(bytes.size + size <= sizeof bytes.data);
        bytes.size += protobuf_c_message_pack(&recording.base, bytes.data + bytes.size);
        save("recording", part ? "last" : "death", &bytes);
    }
}

/* ---- nodes, as node_frame.c reads them: its first byte is 0 ---- */

static const struct cox_frame node_head = {
    .epoch = 7, .incarnation = 1, .sent_ns = 1000 * COX_NSEC_PER_MSEC};

/* A frame of the links' life: its kind, or how a request goes to all; channel, 4 words, payload. */
static void put_node_frame(struct bytes *bytes, unsigned what, unsigned sequence, unsigned previous,
                           const void *payload, size_t size)
{
    FUZZ_CHECK(size < 256);
    put_byte(bytes, what);
    put_byte(bytes, 0);
    put_byte(bytes, sequence);
    put_byte(bytes, previous);
    put_byte(bytes, 0);
    put_byte(bytes, 0);
    put_byte(bytes, (unsigned)size);
    put(bytes, payload, size);
}

static void put_node_message(struct bytes *bytes, enum cox_frame_kind kind,
                             const ProtobufCMessage *message)
{
    uint8_t packed[255];
    FUZZ_CHECK(protobuf_c_message_get_packed_size(message) <= sizeof packed);
    put_node_frame(bytes, kind - 1, 0, 0, packed, protobuf_c_message_pack(message, packed));
}

/* The same, as it comes from the other side. */
static void save_node_frame(const char *name, const struct cox_frame *frame)
{
    struct bytes bytes = {0};
    uint8_t head[COX_FRAME_HEAD_SIZE];
    cox_frame_pack_head(frame, head);
    put_byte(&bytes, 0);
    put_byte(&bytes, 200);
    put_byte(&bytes, (unsigned)(sizeof head + frame->size));
    put(&bytes, head, sizeof head);
    put(&bytes, frame->payload, frame->size);
    save("node_frame", name, &bytes);
}

static void node_requests(void)
{
    struct bytes gap = {0}, all = {0};
    struct cox_frame frame = node_head;
    put_byte(&gap, 0);
    put_node_frame(&gap, COX_FRAME_REQUEST - 1, 2, 1, "x", 1);
    put_node_frame(&gap, COX_FRAME_REQUEST - 1, 1, 0, "y", 1);
    put_byte(&gap, 104); /* they are run */
    save("node_frame", "gap", &gap);
    put_byte(&all, 0);
    for (unsigned i = 1; i <= 3; i++) {
        put_byte(&all, 64); /* the lead publishes one */
        put_byte(&all, 60);
        put_node_frame(&all, 32 | (COX_FRAME_REQUEST - 1), i, i - 1, "abcd", 4);
        put_byte(&all, 96);
    }
    put_node_frame(&all, COX_FRAME_REQUEST - 1, 3, 2, "abcd", 4); /* it is sent again, to one */
    save("node_frame", "to_all", &all);
    frame.kind = COX_FRAME_REQUEST;
    frame.deadline_ns = COX_DEADLINE_NEVER;
    frame.asked = (struct cox_rank_set){{0x1c}};
    frame.sequence = 1;
    frame.payload = (const uint8_t *)"abcd";
    frame.size = 4;
    save_node_frame("raw_request", &frame);
    frame.kind = COX_FRAME_REQUEST_ALL;
    frame.incarnation = 5;
    save_node_frame("raw_request_all", &frame);
}

static void node_messages(void)
{
    uint64_t start_after[] = {5, 5};
    uint32_t wanted[] = {1, 1, 1}, killed[] = {0, 0, 0};
    struct bytes session = {0}, messages = {0};
    CoxNode__Channel channels[2], *channel_list[] = {&channels[0], &channels[1]};
    CoxNode__Rank ranks[3], *rank_list[] = {&ranks[0], &ranks[1], &ranks[2]};
    CoxNode__Fact fact = COX_NODE__FACT__INIT, *facts[] = {&fact};
    CoxNode__Peer peer = COX_NODE__PEER__INIT, *peers[] = {&peer};
    CoxNode__Hello hello = COX_NODE__HELLO__INIT;
    CoxNode__Welcome welcome = COX_NODE__WELCOME__INIT;
    CoxNode__AgentBeat agent = COX_NODE__AGENT_BEAT__INIT;
    CoxNode__LeadBeat lead = COX_NODE__LEAD_BEAT__INIT;
    CoxNode__Text text = COX_NODE__TEXT__INIT;
    struct cox_frame raw = node_head;
    uint8_t packed[255], reply[64];
    for (uint32_t i = 0; i < 2; i++) {
        cox_node__channel__init(&channels[i]);
        channels[i].has_through = channels[i].has_done = true;
        channels[i].through = channels[i].done = i == 0;
    }
    for (uint32_t i = 0; i < 3; i++) {
        cox_node__rank__init(&ranks[i]);
        ranks[i].has_incarnation = ranks[i].has_state = ranks[i].has_pid = true;
        ranks[i].incarnation = 1;
        ranks[i].state = i < 2 ? COX_NODE__RANK_STATE__UP : COX_NODE__RANK_STATE__DEAD;
        ranks[i].pid = 100 + i;
    }
    ranks[2].text = "was killed";
    ranks[2].has_known = ranks[2].known = ranks[2].has_signal = true;
    ranks[2].signal = 9;
    peer.node = "b";
    peer.address = "10.0.0.1:9";
    peer.has_rank_first = peer.has_rank_count = peer.has_incarnation = true;
    peer.rank_first = 2;
    peer.rank_count = 3;
    peer.incarnation = 1;

    agent.channels = lead.channels = channel_list;
    agent.n_channels = lead.n_channels = 2;
    agent.ranks = rank_list;
    agent.n_ranks = 3;
    agent.has_peers_version = agent.has_agent = true;
    agent.peers_version = 5;
    agent.agent = 42;
    lead.wanted = wanted;
    lead.n_wanted = 3;
    lead.killed = killed;
    lead.n_killed = 3;
    lead.peers = peers;
    lead.n_peers = 1;
    lead.has_peers_version = true;
    lead.peers_version = 6;
    const struct cox_answer answer = {
        .count = 2,
        .replies = {
            {.rank = 2, .flags = COX_ANSWER_REPLIED, .bytes = (const uint8_t *)"ok", .size = 2},
            {.rank = 3, .flags = COX_ANSWER_DEAD}}};
    put_byte(&session, 0);
    put_byte(&session, 64); /* the lead publishes one */
    put_byte(&session, 60);
    put_node_frame(&session, COX_FRAME_REQUEST - 1, 1, 0, "abcd", 4);
    put_byte(&session, 96); /* it is run */
    FUZZ_CHECK(cox_answer_size(&answer) <= sizeof reply);
    cox_answer_pack(&answer, reply);
    put_node_frame(&session, COX_FRAME_ANSWER - 1, 1, 0, reply, cox_answer_size(&answer));
    put_node_message(&session, COX_FRAME_AGENT_BEAT, &agent.base);
    put_node_message(&session, COX_FRAME_LEAD_BEAT, &lead.base);
    /* Of the peers that the beat has brought. */
    put_node_frame(&session, 32 | (COX_FRAME_REQUEST - 1), 2, 1, "abcd", 4);
    put_byte(&session, 128); /* 160 ms pass */
    put_byte(&session, 40);
    save("node_frame", "session", &session);

    raw.kind = COX_FRAME_AGENT_BEAT;
    raw.deadline_ns = COX_DEADLINE_NEVER;
    raw.size = protobuf_c_message_pack(&agent.base, packed);
    raw.payload = packed;
    save_node_frame("raw_beat", &raw);

    fact.name = "model";
    fact.value = "x";
    hello.version = "1.1.0";
    hello.has_protocol = hello.has_agent = hello.has_pid = true;
    hello.protocol = COX_FRAME_PROTOCOL;
    hello.agent = 42;
    hello.pid = 100;
    hello.address = "10.0.0.2:9";
    hello.facts = facts;
    hello.n_facts = 1;
    hello.channels = channel_list;
    hello.n_channels = 2;
    hello.has_epoch = true;
    hello.epoch = 6;
    hello.lead_address = "10.0.0.1:9";
    welcome.has_epoch = welcome.has_agent = welcome.has_incarnation = true;
    welcome.epoch = 8;
    welcome.agent = 42;
    welcome.incarnation = 1;
    welcome.has_rank_first = welcome.has_rank_count = welcome.has_world = welcome.has_depth = true;
    welcome.rank_first = 2;
    welcome.rank_count = 3;
    welcome.world = 8;
    welcome.depth = 4;
    welcome.start_after = start_after;
    welcome.n_start_after = 2;
    welcome.peers = peers;
    welcome.n_peers = 1;
    welcome.has_peers_version = true;
    welcome.peers_version = 7;
    welcome.address = "10.0.0.1:9";
    text.has_rank = text.has_is_stderr = true;
    text.rank = 2;
    text.text = "line";
    put_byte(&messages, 0);
    put_node_message(&messages, COX_FRAME_HELLO, &hello.base);
    put_node_message(&messages, COX_FRAME_WELCOME, &welcome.base);
    put_node_frame(&messages, 32 | (COX_FRAME_REQUEST - 1), 6, 5, "x", 1); /* of the new lead */
    put_byte(&messages, 96);
    put_node_message(&messages, COX_FRAME_TEXT, &text.base);
    save("node_frame", "messages", &messages);
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
        return 2;
    }
    root = argv[1];
    mkdir(root, 0777);
    control_request();
    control_attach("default", 4, &(struct cox_geometry_choice){0});
    control_attach("deep", 1, &(struct cox_geometry_choice){.depth = 8});
    control_attach("legacy", 8, &(struct cox_geometry_choice){.mode = &cox_attach_legacy});
    struct cox_rank_set all = cox_rank_set_first(4), one = {{4}};
    request_frame("all", 3, 2, 1, all, "echo hello");
    request_frame("one", 3, 1, 1000, one, "");
    reply_slot("own", 3, 2, 2, 8, 7, false, "hello");
    reply_slot("failed", 1, 0, 1, 8, 3, true, "no");
    reply_slot("legacy_whole", 1, 0, 0, 1 | 2 | 4, 1, false, "hello");
    hellos();
    http_requests();
    sockets();
    handles();
    steps();
    responses();
    texts();
    recordings();
    node_requests();
    node_messages();
    return 0;
}
