/*
 * step_wire: what is packed by hand is what protobuf-c packs, and what is unpacked by hand is what
 * protobuf-c unpacks.
 */
#include "proto/executor.pb-c.h"
#include "proto/step_wire.h"
#include "proto/varint.h"
#include "proto/wire.h"
#include "tests/lib/test.h"

typedef Coxswain__ExecuteRequest Request;
typedef Coxswain__ExecuteResponse Response;

#define LENGTH(array) (sizeof(array) / sizeof(array)[0])
#define ROW_COUNT_MAX 1100
#define FRAME_SIZE (256u << 10)
#define RANDOM_COUNT 4000
#define CAP ((size_t)4 << 20)
/* of a step's result: what is packed by hand */
#define DIGEST_COUNT 5

static uint8_t expected[FRAME_SIZE], frame[FRAME_SIZE];

static uint64_t random_state = 88172645463325252u;

static uint32_t random_below(uint32_t limit)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 32) % limit;
}

/* A number of any width, often at the edge of one. */
static uint64_t random_number(unsigned bits)
{
    uint64_t value = random_state * UINT64_C(0x9e3779b97f4a7c15) ^ random_below(UINT32_MAX);
    unsigned width = 1 + random_below(bits);
    value &= UINT64_MAX >> (64 - width);
    if (random_below(8) == 0)
        value = (UINT64_C(1) << (width - 1)) - random_below(2);
    return value & UINT64_MAX >> (64 - bits);
}

/* ---- messages ---- */

struct request_parts {
    Request request;
    Coxswain__ExecuteModelRequest model;
    Coxswain__StepDelta step;
    uint32_t columns[10][ROW_COUNT_MAX];
};

struct response_parts {
    Response response;
    Coxswain__ExecuteModelResponse model;
    Coxswain__StepResult result;
    int32_t tokens[ROW_COUNT_MAX];
    float logprobs[ROW_COUNT_MAX];
    uint64_t digests[DIGEST_COUNT];
};

static void request_init(struct request_parts *p)
{
    coxswain__execute_request__init(&p->request);
    coxswain__execute_model_request__init(&p->model);
    coxswain__step_delta__init(&p->step);
    p->request.request_case = COXSWAIN__EXECUTE_REQUEST__REQUEST_EXECUTE_MODEL_REQUEST;
    p->request.execute_model_request = &p->model;
    p->model.step = &p->step;
}

static void response_init(struct response_parts *p)
{
    coxswain__execute_response__init(&p->response);
    coxswain__execute_model_response__init(&p->model);
    coxswain__step_result__init(&p->result);
    p->response.result_case = COXSWAIN__EXECUTE_RESPONSE__RESULT_EXECUTE_MODEL_RESPONSE;
    p->response.execute_model_response = &p->model;
    p->model.step = &p->result;
}

static size_t random_column(uint32_t *column)
{
    static const uint32_t counts[] = {0, 1, 3, 7, 8, 9, 16, 25, 64, 127, 128, 256, 1024};
    size_t count = random_below(3) ? counts[random_below(LENGTH(counts))] : 0;
    for (size_t i = 0; i < count; i++)
        column[i] = (uint32_t)random_number(32);
    return count;
}

static void request_fill(struct request_parts *p)
{
    request_init(p);
    Coxswain__StepDelta *step = &p->step;
    p->request.has_execute_type = random_below(8) != 0;
    p->request.execute_type = (Coxswain__ExecuteType)random_below(17);
    p->request.has_deadline_ns = random_below(2) != 0;
    p->request.deadline_ns = random_number(64);
    p->request.has_trace_id = random_below(2) != 0;
    p->request.trace_id = random_number(64);
    p->request.has_weights_version = random_below(2) != 0;
    p->request.weights_version = random_number(64);
    p->model.has_forward_type = random_below(8) != 0;
    p->model.forward_type = (Coxswain__ForwardType)random_below(6);
    step->has_base_sequence = random_below(8) != 0;
    step->base_sequence = random_number(64);
    step->has_table_count = random_below(2) != 0;
    step->table_count = (uint32_t)random_number(32);
    step->n_finished = random_column(step->finished = p->columns[0]);
    step->n_append_slot = random_column(step->append_slot = p->columns[1]);
    step->n_append_block = random_column(p->columns[2]);
    step->append_block = (int32_t *)p->columns[2];
    step->n_append_table = random_column(step->append_table = p->columns[3]);
    step->n_token_slot = random_column(step->token_slot = p->columns[4]);
    step->n_token = random_column(p->columns[5]);
    step->token = (int32_t *)p->columns[5];
    step->n_row_slot = random_column(step->row_slot = p->columns[6]);
    step->n_row_position = random_column(step->row_position = p->columns[7]);
    step->n_row_token_count = random_column(step->row_token_count = p->columns[8]);
    step->n_row_silent = random_column(step->row_silent = p->columns[9]);
}

static void response_fill(struct response_parts *p)
{
    response_init(p);
    p->response.has_msg_type = random_below(8) != 0;
    p->response.msg_type = (int32_t)random_number(31);
    p->response.has_rank = random_below(8) != 0;
    p->response.rank = (int32_t)random_below(64);
    p->response.has_status = random_below(8) != 0;
    p->response.status = random_below(4) ? 0 : (int32_t)random_number(31);
    p->model.has_model_execute_time = random_below(2) != 0;
    p->model.model_execute_time = (float)random_below(1000) / 7;
    p->model.has_group_ns = random_below(2) != 0;
    p->model.group_ns = random_number(64);
    p->model.has_group_wait_ns = random_below(2) != 0;
    p->model.group_wait_ns = random_number(64);
    p->result.n_tokens = random_column((uint32_t *)p->tokens);
    p->result.tokens = p->tokens;
    p->result.n_logprobs = random_below(2) ? p->result.n_tokens : random_below(4);
    p->result.logprobs = p->logprobs;
    for (size_t i = 0; i < p->result.n_logprobs; i++)
        p->logprobs[i] = -(float)random_below(10000) / 256;
    p->result.n_digests = random_below(8) ? DIGEST_COUNT : 0;
    p->result.digests = p->digests;
    for (size_t i = 0; i < p->result.n_digests; i++)
        p->digests[i] = random_number(64);
    p->result.has_base_sequence = random_below(2) != 0;
    p->result.base_sequence = random_number(64);
}

/* ---- both ways ---- */

static bool pack(const ProtobufCMessage *message, uint8_t *buffer, size_t buffer_size,
                 size_t *ret_size)
{
    return message->descriptor == &coxswain__execute_request__descriptor
               ? cox_step_wire_pack_request((const Request *)message, buffer, buffer_size, ret_size)
               : cox_step_wire_pack_response((const Response *)message, buffer, buffer_size,
                                             ret_size);
}

static bool unpack(const ProtobufCMessageDescriptor *descriptor, struct cox_arena *arena,
                   const uint8_t *bytes, size_t size, ProtobufCMessage **ret_message)
{
    return descriptor == &coxswain__execute_request__descriptor
               ? cox_step_wire_unpack_request(arena, bytes, size, (Request **)ret_message)
               : cox_step_wire_unpack_response(arena, bytes, size, (Response **)ret_message);
}

/* Packed by hand as by protobuf-c, unless it is left to it; true: by hand. */
static bool check_pack(const ProtobufCMessage *message)
{
    const size_t size = protobuf_c_message_pack(message, expected);
    size_t packed = SIZE_MAX;
    assert_true(size <= sizeof expected);
    memset(frame, 0x5a, size + 1);
    if (!pack(message, frame, sizeof frame, &packed)) {
        assert_int_equal(packed, SIZE_MAX);
        for (size_t i = 0; i <= size; i++)
            assert_int_equal(frame[i], 0x5a);
        return false;
    }
    assert_int_equal(packed, size);
    assert_memory_equal(frame, expected, size);
    return true;
}

/* Unpacked by hand as by protobuf-c, unless it is left to it; true: by hand. The bytes lie in
 * memory of their size. */
static bool check_unpack(const ProtobufCMessageDescriptor *descriptor, struct cox_arena *arena,
                         const uint8_t *bytes, size_t size)
{
    const size_t used = arena->used;
    ProtobufCMessage *message = NULL;
    uint8_t *exact = malloc(size ? size : 1);
    assert_non_null(exact);
    memcpy(exact, bytes, size);
    if (!unpack(descriptor, arena, exact, size, &message)) {
        assert_null(message);
        assert_int_equal(arena->used, used);
        assert_false(arena->exhausted);
        free(exact);
        return false;
    }
    ProtobufCMessage *reference = protobuf_c_message_unpack(descriptor, NULL, size, exact);
    free(exact); /* nothing points into it */
    assert_non_null(reference);
    const size_t packed = protobuf_c_message_pack(reference, expected);
    assert_int_equal(protobuf_c_message_get_packed_size(message), packed);
    assert_int_equal(protobuf_c_message_pack(message, frame), packed);
    assert_memory_equal(frame, expected, packed);
    protobuf_c_message_free_unpacked(reference, NULL);
    return true;
}

static int arena_new(void **state)
{
    struct cox_arena *arena = malloc(sizeof *arena);
    if (!arena || cox_arena_init(arena, 4096, CAP))
        return -1;
    *state = arena;
    return 0;
}

static int arena_free(void **state)
{
    cox_arena_deinit(*state);
    free(*state);
    return 0;
}

#define ARENA_TEST(name) TEST_WITH(name, arena_new, arena_free)

ARENA_TEST(random_steps_and_replies_there_and_back)
{
    struct cox_arena *arena = *state;
    static struct request_parts q;
    static struct response_parts a;
    static uint8_t bytes[FRAME_SIZE];
    for (int i = 0; i < 2 * RANDOM_COUNT; i++) {
        const ProtobufCMessage *message = i % 2 ? &q.request.base : &a.response.base;
        request_fill(&q);
        response_fill(&a);
        assert_true(check_pack(message));
        assert_true(check_unpack(message->descriptor, arena, bytes,
                                 protobuf_c_message_pack(message, bytes)));
        cox_arena_reset(arena);
    }
}

/* ---- what is left to protobuf-c ---- */

/* Sets a field of a message, whatever it is. */
static void field_set(ProtobufCMessage *message, const ProtobufCFieldDescriptor *field)
{
    static char text[] = "text", *texts[] = {text};
    static uint8_t word[8] = {1};
    static const uint8_t ones[64] = {1};
    static ProtobufCBinaryData binary = {.len = 3, .data = word};
    static uint64_t room[8][64];
    static ProtobufCMessage *messages[8];
    static int used;
    void *member = (uint8_t *)message + field->offset;
    void *quantifier = (uint8_t *)message + field->quantifier_offset;
    ProtobufCMessage *inner = NULL;
    if (field->type == PROTOBUF_C_TYPE_MESSAGE) {
        const ProtobufCMessageDescriptor *descriptor = field->descriptor;
        assert_true(descriptor->sizeof_message <= sizeof room[0]);
        used = (used + 1) % 8;
        inner = (ProtobufCMessage *)room[used];
        protobuf_c_message_init(descriptor, inner);
        messages[used] = inner;
    }
    if (field->label == PROTOBUF_C_LABEL_REPEATED) {
        const void *items = inner                                   ? (const void *)&messages[used]
                            : field->type == PROTOBUF_C_TYPE_STRING ? (const void *)texts
                            : field->type == PROTOBUF_C_TYPE_BYTES  ? (const void *)&binary
                                                                    : (const void *)ones;
        memcpy(member, &items, sizeof items);
        *(size_t *)quantifier = 1;
        return;
    }
    const char *string = text;
    if (inner)
        memcpy(member, &inner, sizeof inner);
    else if (field->type == PROTOBUF_C_TYPE_STRING)
        memcpy(member, &string, sizeof string);
    else if (field->type == PROTOBUF_C_TYPE_BYTES)
        memcpy(member, &binary, sizeof binary);
    else
        *(uint8_t *)member = 1; /* little-endian, or any other number */
    if (field->flags & PROTOBUF_C_FIELD_FLAG_ONEOF)
        *(uint32_t *)quantifier = field->id;
    else if (field->quantifier_offset)
        *(protobuf_c_boolean *)quantifier = 1;
}

/* Each field there is, alone on top of the smallest step and reply: also those that the protocol
 * has yet to get. Returns how many were packed by hand. */
static unsigned each_field(ProtobufCMessage *outer, ProtobufCMessage *message, size_t size,
                           struct cox_arena *arena)
{
    const ProtobufCMessageDescriptor *descriptor = message->descriptor;
    unsigned by_hand = 0;
    uint8_t *plain = malloc(size), *bytes = malloc(FRAME_SIZE);
    assert_true(plain && bytes);
    memcpy(plain, message, size);
    for (unsigned f = 0; f < descriptor->n_fields; f++) {
        field_set(message, &descriptor->fields[f]);
        by_hand += check_pack(outer);
        check_unpack(outer->descriptor, arena, bytes, protobuf_c_message_pack(outer, bytes));
        memcpy(message, plain, size);
    }
    ProtobufCMessageUnknownField unknown = {
        .tag = 999, .wire_type = PROTOBUF_C_WIRE_TYPE_VARINT, .len = 1, .data = (uint8_t[]){1}};
    message->n_unknown_fields = 1;
    message->unknown_fields = &unknown;
    assert_false(check_pack(outer));
    assert_false(
        check_unpack(outer->descriptor, arena, bytes, protobuf_c_message_pack(outer, bytes)));
    memcpy(message, plain, size);
    free(plain);
    free(bytes);
    return by_hand;
}

ARENA_TEST(no_field_is_lost)
{
    static struct request_parts q;
    static struct response_parts a;
    request_init(&q);
    response_init(&a);
    /* execute_type, deadline_ns, trace_id and weights_version; forward_type and step; all but
     * announced */
    assert_int_equal(each_field(&q.request.base, &q.request.base, sizeof q.request, *state), 4);
    assert_int_equal(each_field(&q.request.base, &q.model.base, sizeof q.model, *state), 2);
    assert_int_equal(each_field(&q.request.base, &q.step.base, sizeof q.step, *state), 12);
    /* msg_type, rank, status; model_execute_time, step and the group's two; everything */
    assert_int_equal(each_field(&a.response.base, &a.response.base, sizeof a.response, *state), 3);
    assert_int_equal(each_field(&a.response.base, &a.model.base, sizeof a.model, *state), 4);
    /* one digest is none of theirs */
    assert_int_equal(each_field(&a.response.base, &a.result.base, sizeof a.result, *state), 3);
    uint8_t bytes[256];
    for (a.result.n_digests = 0; a.result.n_digests <= DIGEST_COUNT + 1; a.result.n_digests++) {
        static uint64_t digests[DIGEST_COUNT + 1] = {1, UINT64_MAX, 0, 3, UINT64_C(1) << 63};
        const bool by_hand = a.result.n_digests % DIGEST_COUNT == 0;
        a.result.digests = digests;
        assert_int_equal(check_pack(&a.response.base), by_hand);
        assert_int_equal(check_unpack(a.response.base.descriptor, *state, bytes,
                                      protobuf_c_message_pack(&a.response.base, bytes)),
                         by_hand);
    }
}

ARENA_TEST(requests_without_a_step_are_left_alone)
{
    static struct request_parts q;
    static struct response_parts a;
    request_init(&q);
    q.model.step = NULL;
    assert_false(check_pack(&q.request.base));
    q.request.execute_model_request = NULL;
    assert_false(check_pack(&q.request.base));
    q.request.request_case = COXSWAIN__EXECUTE_REQUEST__REQUEST__NOT_SET;
    assert_false(check_pack(&q.request.base));
    response_init(&a);
    a.model.step = NULL;
    assert_false(check_pack(&a.response.base));
    a.response.execute_model_response = NULL;
    assert_false(check_pack(&a.response.base));
    a.response.result_case = COXSWAIN__EXECUTE_RESPONSE__RESULT__NOT_SET;
    assert_false(check_pack(&a.response.base));
    assert_false(check_unpack(q.request.base.descriptor, *state, frame, 0));
    assert_false(check_unpack(a.response.base.descriptor, *state, frame, 0));
    /* Negative ones are nothing that a rank of this library sends. */
    response_init(&a);
    a.response.has_status = 1;
    a.response.status = -7;
    assert_true(check_pack(&a.response.base));
    uint8_t bytes[64];
    assert_false(check_unpack(a.response.base.descriptor, *state, bytes,
                              protobuf_c_message_pack(&a.response.base, bytes)));
}

/* A frame that has just the room, and one that has a byte too few: nothing is written to it. */
PLAIN_TEST(a_frame_without_room_is_left_alone)
{
    static struct request_parts q;
    static struct response_parts a;
    request_fill(&q);
    response_fill(&a);
    ProtobufCMessage *messages[] = {&q.request.base, &a.response.base};
    for (size_t m = 0; m < LENGTH(messages); m++) {
        const size_t size = protobuf_c_message_pack(messages[m], expected);
        size_t packed = SIZE_MAX, room = size;
        for (bool done = false; !done; room++) {
            uint8_t *exact = test_own(malloc(room + 1), free);
            memset(exact, 0x5a, room + 1);
            done = pack(messages[m], exact, room, &packed);
            assert_int_equal(exact[room], 0x5a);
            if (done)
                assert_memory_equal(exact, expected, size);
            for (size_t i = 0; !done && i < room; i++)
                assert_int_equal(exact[i], 0x5a);
        }
        assert_int_equal(packed, size);
    }
}

/* Cut off anywhere, and with any one bit turned. */
ARENA_TEST(broken_bytes)
{
    struct cox_arena *arena = *state;
    static struct request_parts q;
    static struct response_parts a;
    static uint8_t bytes[FRAME_SIZE];
    for (int i = 0; i < 12; i++) {
        request_fill(&q);
        response_fill(&a);
        ProtobufCMessage *message = i % 2 ? &q.request.base : &a.response.base;
        size_t size = protobuf_c_message_pack(message, bytes);
        if (size > 4096)
            continue;
        for (size_t cut = 0; cut < size; cut++)
            check_unpack(message->descriptor, arena, bytes, cut);
        cox_arena_reset(arena);
        for (size_t bit = 0; bit < 8 * size; bit++) {
            bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
            check_unpack(message->descriptor, arena, bytes, size);
            bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
            if (bit % 64 == 0)
                cox_arena_reset(arena);
        }
        cox_arena_reset(arena);
    }
}

/* Each byte that ends a number, a length or a tag in a longer form of the same: protobuf-c takes
 * some of them. */
ARENA_TEST(longer_forms)
{
    struct cox_arena *arena = *state;
    static struct request_parts q;
    static uint8_t bytes[64], longer[64 + COX_VARINT_SIZE_MAX];
    request_init(&q);
    q.request.has_execute_type = q.request.has_deadline_ns = q.model.has_forward_type = 1;
    q.request.execute_type = COXSWAIN__EXECUTE_TYPE__MODEL_INFER;
    q.request.deadline_ns = 300;
    const size_t size = protobuf_c_message_pack(&q.request.base, bytes);
    unsigned by_hand = 0;
    for (size_t at = 0; at < size; at++)
        for (size_t more = 1; bytes[at] < 0x80 && more <= COX_VARINT_SIZE_MAX; more++) {
            memcpy(longer, bytes, size);
            longer[at] |= 0x80;
            memset(longer + at + 1, 0x80, more - 1);
            longer[at + more] = 0;
            memcpy(longer + at + more + 1, bytes + at + 1, size - at - 1);
            by_hand += check_unpack(q.request.base.descriptor, arena, longer, size + more);
        }
    /* execute_type in up to ten bytes, the length of the step's message in up to five, deadline_ns,
     * which has two, in up to ten */
    assert_int_equal(by_hand, 9 + 4 + 8);
}

/* Every cap from nothing up to what is needed. */
PLAIN_TEST(an_arena_without_room_is_left_alone)
{
    static struct request_parts q;
    static uint8_t bytes[FRAME_SIZE];
    request_fill(&q);
    size_t size = protobuf_c_message_pack(&q.request.base, bytes), cap = 0;
    for (bool done = false; !done; cap += 64) {
        struct cox_arena arena;
        Request *request = NULL;
        assert_int_equal(cox_arena_init(&arena, 0, cap), 0);
        done = cox_step_wire_unpack_request(&arena, bytes, size, &request);
        assert_true(done || (!request && arena.used == 0 && !arena.exhausted));
        assert_true(arena.used <= cap);
        cox_arena_deinit(&arena);
        assert_true(cap < CAP);
    }
}

/* ---- numbers ---- */

PLAIN_TEST(numbers_of_every_width)
{
    for (unsigned width = 0; width <= 64; width++)
        for (int less = 0; less < 2; less++) {
            uint64_t value = (width == 64 ? 0 : UINT64_C(1) << width) - (uint64_t)less, again = 0;
            uint8_t bytes[COX_VARINT_SIZE_MAX + 1];
            uint8_t *end = bytes + sizeof bytes - 1, *at = cox_varint_put(end, value);
            const uint8_t *read = at;
            assert_true(at >= bytes);
            assert_true(cox_varint_get(&read, end, &again));
            assert_true(again == value && read == end);
            read = at;
            if (at + 1 < end) {
                assert_false(cox_varint_get(&read, end - 1, &again));
                assert_true(read == at);
            }
        }
    /* The tenth byte has one bit; an eleventh there is not. */
    static const uint8_t large[] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2};
    static const uint8_t longer[] = {0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0};
    const uint8_t *at = large;
    uint64_t value;
    assert_false(cox_varint_get(&at, large + sizeof large, &value));
    at = longer;
    assert_false(cox_varint_get(&at, longer + sizeof longer, &value));
}
