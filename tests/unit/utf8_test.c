/* utf8: what is no UTF-8 is found, wherever it stands in a request, and told by path and offset. */
#include "proto/utf8.h"

#include "proto/executor.pb-c.h"
#include "tests/lib/test.h"

#define LENGTH(array) (sizeof(array) / sizeof(array)[0])

PLAIN_TEST(what_is_no_utf8_is_found)
{
    static const struct {
        const char *text;
        /* of the first bad byte; -1: there is none */
        int at;
    } cases[] = {
        {"", -1},
        {"plain text, longer than a word of it", -1},
        {"caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80", -1},
        {"\xc2\x80\xdf\xbf\xe0\xa0\x80\xed\x9f\xbf\xee\x80\x80\xef\xbf\xbf\xf0\x90\x80\x80"
         "\xf4\x8f\xbf\xbf",
         -1},
        {"\xff", 0},
        {"12345678\xfe", 8},
        {"1234567\x80", 7},
        {"\xc3", 0},             /* cut short */
        {"ab\xe2\x82", 2},       /* the same */
        {"ab\xf0\x9f\x98", 2},   /* the same */
        {"\xc0\xaf", 0},         /* overlong */
        {"\xe0\x9f\xbf", 0},     /* overlong */
        {"\xf0\x8f\xbf\xbf", 0}, /* overlong */
        {"\xed\xa0\x80", 0},     /* a surrogate */
        {"\xf4\x90\x80\x80", 0}, /* above U+10FFFF */
        {"\xf5\x80\x80\x80", 0},
        {"\xc3\xa9\xa9", 2},
    };
    for (size_t i = 0; i < LENGTH(cases); i++) {
        /* In a block of its own size: what reads over its end is seen by the sanitizers. */
        char *text = strdup(cases[i].text);
        const char *bad = cox_utf8_find_bad(text);
        if ((bad ? (int)(bad - text) : -1) != cases[i].at)
            fail_msg("case %zu: at %d", i, bad ? (int)(bad - text) : -1);
        cox_utf8_mend(text);
        assert_null(cox_utf8_find_bad(text));
        assert_int_equal(strlen(text), strlen(cases[i].text));
        free(text);
    }
    char text[] = "caf\xe9 \xc3\xa9!\xff";
    cox_utf8_mend(text);
    assert_string_equal(text, "caf? \xc3\xa9!?");
}

/* ---- every string field there is, by the protocol's own description ---- */

static char bad_text[] = "good\xff";
static char good_text[] = "g\xc3\xb6od";
static size_t string_count;

static void check_refused(const Coxswain__ExecuteRequest *request, const char *path)
{
    assert_refused(cox_utf8_check_request(request, test_err()), COX_INVALID, path);
    assert_contains(test_error.text, "0xff at offset 4");
}

/* One message of each kind in turn, with a bad string in each of its fields in turn. */
static void each_string(const Coxswain__ExecuteRequest *request, ProtobufCMessage *message,
                        const char *path)
{
    const ProtobufCMessageDescriptor *descriptor = message->descriptor;
    for (unsigned i = 0; i < descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *field = &descriptor->fields[i];
        char below[512], *base = (char *)message;
        const bool repeated = field->label == PROTOBUF_C_LABEL_REPEATED;
        void *value = base + field->offset, *items[2] = {good_text, NULL}, *saved;
        _Alignas(16) char child[1024] = {0};
        snprintf(below, sizeof below, "%s%s%s%s", path, *path ? "." : "", field->name,
                 repeated ? "[0]" : "");
        if (field->type != PROTOBUF_C_TYPE_STRING && field->type != PROTOBUF_C_TYPE_MESSAGE)
            continue;
        if (field->type == PROTOBUF_C_TYPE_MESSAGE) {
            const ProtobufCMessageDescriptor *kind = field->descriptor;
            assert_true(kind->sizeof_message <= sizeof child);
            protobuf_c_message_init(kind, child);
        }
        items[0] = field->type == PROTOBUF_C_TYPE_MESSAGE ? (void *)child : (void *)good_text;
        memcpy(&saved, value, sizeof saved);
        void *set = repeated ? (void *)items : items[0];
        memcpy(value, &set, sizeof set);
        if (repeated)
            *(size_t *)(void *)(base + field->quantifier_offset) = 1;
        if (field->flags & PROTOBUF_C_FIELD_FLAG_ONEOF)
            *(uint32_t *)(void *)(base + field->quantifier_offset) = field->id;
        if (field->type == PROTOBUF_C_TYPE_MESSAGE) {
            each_string(request, (ProtobufCMessage *)(void *)child, below);
        } else {
            struct cox_error err = {0};
            assert_int_equal(cox_utf8_check_request(request, &err), 0);
            items[0] = bad_text;
            set = repeated ? (void *)items : (void *)bad_text;
            memcpy(value, &set, sizeof set);
            check_refused(request, below);
            string_count++;
        }
        memcpy(value, &saved, sizeof saved);
        if (repeated)
            *(size_t *)(void *)(base + field->quantifier_offset) = 0;
        if (field->flags & PROTOBUF_C_FIELD_FLAG_ONEOF)
            *(uint32_t *)(void *)(base + field->quantifier_offset) = 0;
    }
}

PLAIN_TEST(every_string_of_a_request_is_looked_at)
{
    Coxswain__ExecuteRequest request = COXSWAIN__EXECUTE_REQUEST__INIT;
    each_string(&request, &request.base, "");
    /* config twice; of a sequence request_id, stop, lora_id, server_id, response_format, there
     * and in a pull; ... */
    assert_true(string_count >= 24);
    assert_int_equal(cox_utf8_check_request(&request, NULL), 0);
}
