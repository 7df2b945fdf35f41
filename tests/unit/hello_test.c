#include "channel/socket/hello.h"

#include "channel_fixture.h"

static const struct cox_hello worker = {
    .role = COX_HELLO_WORKER,
    .rank = 2,
    .rank_count = 4,
    .fd_count_max = 33,
    .incarnation = 6,
    .request_size_min = 0x1122334455,
    .response_size_min = 0x66778899aa,
    .start = 0xf1e2d3c4b5a69788,
};

static int parse(const uint8_t *frame, struct cox_hello *hello, const char *text)
{
    int r = cox_hello_parse(frame, hello, test_err());
    assert_int_equal(test_error.code, r);
    assert_contains(test_error.text, text);
    return r;
}

LEAK_TEST(a3_b22_the_frame_has_its_bytes_where_the_header_says)
{
    uint8_t frame[COX_HELLO_SIZE], expected[COX_HELLO_SIZE] = {0};
    const uint8_t head[64] = {
        1,    0,    0,    0,    0,    0, 0, 0, 1,    0,    0,    0,    2,    0,    0,    0,
        0,    0,    0,    0,    0,    0, 0, 0, 4,    0,    0,    0,    33,   0,    0,    0,
        6,    0,    0,    0,    0,    0, 0, 0, 0x55, 0x44, 0x33, 0x22, 0x11, 0,    0,    0,
        0xaa, 0x99, 0x88, 0x77, 0x66, 0, 0, 0, 0x88, 0x97, 0xa6, 0xb5, 0xc4, 0xd3, 0xe2, 0xf1,
    };
    memcpy(expected, head, sizeof head);
    memset(frame, 0xff, sizeof frame);
    cox_hello_format(&worker, frame);
    assert_memory_equal(frame, expected, sizeof frame);
    struct cox_hello read;
    assert_int_equal(parse(frame, &read, ""), 0);
    assert_int_equal(read.version, COX_HELLO_VERSION);
    /* Compared as frames: the padding of a struct may be anything. */
    uint8_t again[COX_HELLO_SIZE];
    cox_hello_format(&read, again);
    assert_memory_equal(again, expected, sizeof again);
}

LEAK_TEST(a3_what_is_a_workers_is_not_sent_for_others)
{
    for (int role = COX_HELLO_COMMAND; role <= COX_HELLO_FD_STORE; role++) {
        struct cox_hello hello = worker, read;
        uint8_t frame[COX_HELLO_SIZE];
        hello.role = (enum cox_hello_role)role;
        cox_hello_format(&hello, frame);
        assert_int_equal(parse(frame, &read, ""), 0);
        assert_int_equal(read.role, role);
        assert_int_equal(read.rank | read.rank_count | read.incarnation, 0);
        assert_int_equal(read.request_size_min | read.response_size_min, 0);
        for (size_t at = 12; at < 56; at++) {
            if ((at >= 16 && at < 24) || (at >= 28 && at < 32) || (at >= 36 && at < 40))
                continue; /* flags, fds, reserved: of every role */
            frame[at] = 1;
            assert_int_equal(parse(frame, &read, "are a worker's"), COX_INVALID);
            frame[at] = 0;
        }
    }
}

LEAK_TEST(a4_another_version_gets_both_numbers)
{
    struct cox_hello hello = worker, read;
    uint8_t frame[COX_HELLO_SIZE];
    const uint64_t versions[] = {2, 4711, UINT64_MAX};
    for (size_t i = 0; i < 3; i++) {
        char text[64];
        hello.version = versions[i];
        cox_hello_format(&hello, frame);
        memset(frame + 8, 0xee, sizeof frame - 8); /* whatever the other fields mean by then */
        snprintf(text, sizeof text, "speaks version %llu, the coordinator speaks 1",
                 (unsigned long long)versions[i]);
        assert_int_equal(parse(frame, &read, text), COX_VERSION);
    }
    memset(frame, 0, sizeof frame);
    assert_int_equal(parse(frame, &read, "speaks version 0, the coordinator speaks 1"),
                     COX_VERSION);
}

/* A hello with one field changed. */
static int altered(size_t at, size_t size, uint64_t value, struct cox_hello *read, const char *text)
{
    uint8_t frame[COX_HELLO_SIZE];
    cox_hello_format(&worker, frame);
    for (size_t i = 0; i < size; i++)
        frame[at + i] = (uint8_t)(value >> (8 * i));
    return parse(frame, read, text);
}

LEAK_TEST(a5_a6_counts_that_cannot_be_are_refused_by_number)
{
    struct cox_hello read;
    assert_int_equal(altered(24, 4, 129, &read, "world size; count=129: expected 1 to 128"),
                     COX_INVALID);
    assert_int_equal(altered(24, 4, UINT32_MAX, &read, "world size; count=4294967295"),
                     COX_INVALID);
    assert_int_equal(altered(24, 4, 128, &read, ""), 0);
    assert_int_equal(altered(24, 4, 0, &read, ""), 0);
    assert_int_equal(read.rank_count, 0);
    assert_int_equal(altered(28, 4, 129, &read, "fds at once; count=129: expected 1 to 128"),
                     COX_INVALID);
    assert_int_equal(altered(28, 4, 1, &read, ""), 0);
    assert_int_equal(altered(28, 4, 0, &read, ""), 0);
    assert_int_equal(read.fd_count_max, COX_HELLO_FD_COUNT_MAX);
    assert_int_equal(altered(12, 4, 4, &read, "rank; rank=4: expected 0 to 3"), COX_INVALID);
    assert_int_equal(altered(12, 4, 3, &read, ""), 0);
    assert_int_equal(altered(12, 4, COX_HELLO_RANK_ANY, &read, ""), 0);
    assert_int_equal(altered(8, 4, 0, &read, "role; role=0"), COX_INVALID);
    assert_int_equal(altered(8, 4, 4, &read, "role; role=4"), COX_INVALID);
}

LEAK_TEST(a7_sizes_have_to_be_sizes)
{
    struct cox_hello read;
    uint64_t most = SIZE_MAX / 2;
    for (size_t at = 40; at <= 48; at += 8) {
        assert_int_equal(altered(at, 8, most, &read, ""), 0);
        assert_int_equal(altered(at, 8, most + 1, &read, " size; bytes=9223372036854775808"),
                         COX_INVALID);
    }
    assert_int_equal(altered(48, 8, UINT64_MAX, &read, "response size"), COX_INVALID);
}

LEAK_TEST(a8_flags_and_reserved_bytes_are_a_later_versions)
{
    struct cox_hello read;
    for (int bit = 0; bit < 64; bit++)
        assert_int_equal(altered(16, 8, UINT64_C(1) << bit, &read, "flags; bits="), COX_INVALID);
    assert_int_equal(altered(36, 1, 1, &read, "byte 36 is 1: expected 0"), COX_INVALID);
    assert_int_equal(altered(64, 1, 9, &read, "byte 64 is 9: expected 0"), COX_INVALID);
    assert_int_equal(altered(1023, 1, 2, &read, "sent by a later version"), COX_INVALID);
}

/* Refused, or accepted and then every bit of it has a meaning that was taken. */
LEAK_TEST(p10_b14_any_bit_of_the_frame_may_be_another)
{
    size_t accepted = 0;
    for (size_t bit = 0; bit < COX_HELLO_SIZE * 8; bit++) {
        uint8_t frame[COX_HELLO_SIZE], again[COX_HELLO_SIZE];
        struct cox_hello read;
        struct cox_error err = {0};
        cox_hello_format(&worker, frame);
        frame[bit / 8] ^= (uint8_t)(1u << (bit % 8));
        if (cox_hello_parse(frame, &read, &err)) {
            assert_true(err.code == COX_INVALID || err.code == COX_VERSION);
            assert_true(strlen(err.text) > 0);
            continue;
        }
        cox_hello_format(&read, again);
        assert_memory_equal(again, frame, sizeof frame);
        accepted++;
    }
    assert_in_range(accepted, 64 + 32, 64 + 32 + 2 * 63 + 32); /* start and incarnation at least */
}

LEAK_TEST(p10_a11_any_bit_of_the_hello_reply_may_be_another)
{
    struct cox_hello_reply hello_reply = {.version = COX_HELLO_VERSION,
                                          .attach = COX_ATTACH_SEALED,
                                          .rank = 2,
                                          .rank_count = 4,
                                          .incarnation = 6,
                                          .group_incarnation = 0x12345678},
                           read;
    uint8_t good[COX_HELLO_REPLY_SIZE], bytes[COX_HELLO_REPLY_SIZE], again[COX_HELLO_REPLY_SIZE];
    cox_hello_reply_format(&hello_reply, 4, good);
    assert_int_equal(good[0], 1);
    assert_int_equal(cox_hello_reply_parse(good, &worker, 4, &read, NULL), 0);
    /* As bytes: the struct has padding, which clang leaves as it is. */
    cox_hello_reply_format(&read, 4, again);
    assert_memory_equal(again, good, sizeof good);
    for (size_t bit = 8; bit < COX_HELLO_REPLY_SIZE * 8; bit++) {
        struct cox_error err = {0};
        memcpy(bytes, good, sizeof bytes);
        bytes[bit / 8] ^= (uint8_t)(1u << (bit % 8));
        int r = cox_hello_reply_parse(bytes, &worker, 4, &read, &err);
        if (r == 0) {
            cox_hello_reply_format(&read, 4, again);
            assert_memory_equal(again, bytes, sizeof bytes);
            /* attach and group_incarnation alone may be another. */
            assert_true(bit / 8 == 9 || (bit / 8 >= 25 && bit / 8 < 29));
        } else {
            assert_int_equal(r, COX_CORRUPT);
            assert_int_equal(err.code, r);
        }
    }
}

LEAK_TEST(a11_a_hello_reply_has_to_be_what_was_asked_for)
{
    struct cox_hello_reply good = {.version = 1, .rank = 2, .rank_count = 4, .incarnation = 6},
                           read;
    struct cox_hello any = {
        .role = COX_HELLO_WORKER, .rank = COX_HELLO_RANK_ANY, .fd_count_max = 4};
    struct cox_hello command = {.role = COX_HELLO_COMMAND, .fd_count_max = 4};
    uint8_t bytes[COX_HELLO_REPLY_SIZE];
    cox_hello_reply_format(&good, 4, bytes);
    assert_int_equal(cox_hello_reply_parse(bytes, &any, 4, &read, NULL), 0);
    assert_int_equal(cox_hello_reply_parse(bytes, &any, 3, &read, NULL), COX_CORRUPT);
    assert_int_equal(cox_hello_reply_parse(bytes, &any, 5, &read, NULL), COX_CORRUPT);
    assert_int_equal(cox_hello_reply_parse(bytes, &command, 4, &read, NULL), COX_CORRUPT);
    cox_hello_reply_format(&good, 5, bytes); /* more than it takes */
    assert_int_equal(cox_hello_reply_parse(bytes, &any, 5, &read, NULL), COX_CORRUPT);
    good.rank = 4;
    cox_hello_reply_format(&good, 4, bytes);
    assert_int_equal(cox_hello_reply_parse(bytes, &any, 4, &read, NULL), COX_CORRUPT);
    good = (struct cox_hello_reply){.version = 1};
    cox_hello_reply_format(&good, 0, bytes);
    assert_int_equal(cox_hello_reply_parse(bytes, &any, 0, &read, NULL), COX_CORRUPT);
    assert_int_equal(cox_hello_reply_parse(bytes, &command, 0, &read, NULL), 0);
}

LEAK_TEST(a10_a_reason_is_cut_at_a_character)
{
    uint8_t bytes[COX_REFUSAL_SIZE_MAX];
    char text[400];
    assert_int_equal(cox_refusal_format(COX_TAKEN, "rank 3 is there", bytes), 3 + 15);
    assert_int_equal(bytes[0], 0);
    assert_int_equal(bytes[1], COX_TAKEN);
    assert_int_equal(bytes[2], 15);
    assert_memory_equal(bytes + 3, "rank 3 is there", 15);
    assert_refused(cox_refusal_parse(bytes, test_err()), COX_TAKEN, "rank 3 is there");
    for (size_t before = 240; before <= 256; before++) { /* where the snowman lies */
        memset(text, 'x', sizeof text);
        memcpy(text + before, "\xe2\x98\x83", 3);
        text[before + 3 + 20] = '\0';
        size_t size = cox_refusal_format(COX_INVALID, text, bytes) - 3;
        assert_int_equal(bytes[2], size);
        assert_memory_equal(bytes + 3, text, size);
        assert_int_equal(size, before > 252 && before < 255 ? before : 255);
    }
    memset(text, 'x', sizeof text);
    text[255] = '\0';
    assert_int_equal(cox_refusal_format(COX_INVALID, text, bytes), 3 + 255);
    assert_refused(cox_refusal_parse(bytes, test_err()), COX_INVALID, text);
    assert_int_equal(cox_refusal_format(COX_FULL, "", bytes), 3);
    assert_int_equal(cox_refusal_parse(bytes, NULL), COX_FULL);
}

LEAK_TEST(a28_a_refusal_is_never_success)
{
    uint8_t bytes[COX_REFUSAL_SIZE_MAX] = {0, 0, 5, 'a', 0x1b, 0xc2, 0x9b, 0xe2};
    for (int code = 0; code < 256; code++) {
        struct cox_error err = {0};
        bytes[1] = (uint8_t)code;
        int expected = code > 0 && code < COX_STATUS_COUNT ? code : COX_REJECTED;
        assert_int_equal(cox_refusal_parse(bytes, &err), expected);
        assert_string_equal(strrchr(err.text, ' ') + 1,
                            "a???"); /* nothing for a terminal to obey */
    }
    const int odd[] = {0, -ENOMEM, COX_STATUS_COUNT, 256 + COX_TAKEN};
    for (size_t i = 0; i < 4; i++) {
        cox_refusal_format(odd[i], "x", bytes);
        assert_int_equal(bytes[1], COX_REJECTED);
    }
}
