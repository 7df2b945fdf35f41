/* The bytes of frames and answers (nodes/link/frame.h). */
#include "link_world.h"

/* ---- bytes ---- */

PLAIN_TEST(frames_as_bytes)
{
    uint8_t bytes[COX_FRAME_HEAD_SIZE + 5] = {0};
    struct cox_frame frame = {.kind = COX_FRAME_REQUEST,
                              .channel = COX_TWO_WAY_COUNT - 1,
                              .type = 0x01020304,
                              .epoch = UINT64_C(0x1112131415161718),
                              .incarnation = 3,
                              .sequence = 4,
                              .previous = 5,
                              .deadline_ns = 6,
                              .sent_ns = 7,
                              .void_through = 8,
                              .gone = 11,
                              .asked = {{9, 10}},
                              .size = 5};
    static const uint8_t head[] = {'C',  'X',  'N',  '1',  3,    COX_TWO_WAY_COUNT - 1,
                                   0,    0,    4,    3,    2,    1,
                                   5,    0,    0,    0,    0x18, 0x17,
                                   0x16, 0x15, 0x14, 0x13, 0x12, 0x11,
                                   3};
    struct cox_frame again;
    struct cox_error err = {0};
    cox_frame_pack_head(&frame, bytes);
    assert_memory_equal(bytes, head, sizeof head);
    for (int i = 0; i < 6; i++) { /* from sequence on */
        static const uint8_t offsets[] = {32, 40, 48, 56, 64, 72}, values[] = {4, 5, 6, 7, 9, 10};
        assert_int_equal(bytes[offsets[i]], values[i]);
    }
    assert_int_equal(bytes[80], 8);
    assert_int_equal(bytes[88], 11);
    assert_int_equal(cox_frame_unpack(bytes, sizeof bytes, &again, &err), 0);
    frame.payload = bytes + COX_FRAME_HEAD_SIZE;
    assert_true(again.kind == frame.kind && again.channel == frame.channel &&
                again.type == frame.type && again.epoch == frame.epoch &&
                again.incarnation == frame.incarnation && again.sequence == frame.sequence &&
                again.previous == frame.previous && again.deadline_ns == frame.deadline_ns &&
                again.sent_ns == frame.sent_ns && again.void_through == frame.void_through &&
                again.gone == frame.gone && again.payload == frame.payload &&
                again.size == frame.size &&
                !memcmp(&again.asked, &frame.asked, sizeof again.asked));
    for (size_t size = 0; size < sizeof bytes; size++)
        assert_int_equal(cox_frame_unpack(bytes, size, &again, &err), COX_CORRUPT);
    static const struct {
        uint8_t offset, value;
        const char *text;
    } bad[] = {
        {0, 'D', "begins with"},
        {4, 0, "kind 0"},
        {4, COX_FRAME_KIND_COUNT, "kind"},
        {4, 255, "kind 255"},
        {5, COX_TWO_WAY_COUNT, "channel"},
        {5, 255, "channel 255"},
        {12, 4, "payload has 4"},
        {12, 6, "payload has 6"},
        {15, 1, "payload has"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        uint8_t broken[sizeof bytes];
        memcpy(broken, bytes, sizeof bytes);
        broken[bad[i].offset] = bad[i].value;
        memset(&err, 0, sizeof err);
        assert_refused(cox_frame_unpack(broken, sizeof broken, &again, test_err()), COX_CORRUPT,
                       bad[i].text);
    }
    for (int kind = 1; kind < COX_FRAME_KIND_COUNT; kind++)
        assert_string_not_equal(cox_frame_kind_name((enum cox_frame_kind)kind), "unknown");
    assert_string_equal(cox_frame_kind_name((enum cox_frame_kind)0), "unknown");
    assert_string_equal(cox_frame_kind_name(COX_FRAME_KIND_COUNT), "unknown");
}

/* Whoever sends it: an agent looks into all other payloads. */
PLAIN_TEST(opaque_requests_alone_are_passed_on)
{
    static const uint32_t types[] = {0, 1, 1000, COX_TYPE_OPAQUE_LARGE, COX_TYPE_OPAQUE};
    uint32_t count = 0;
    for (uint32_t kind = 1; kind < COX_FRAME_KIND_COUNT; kind++)
        for (uint32_t channel = 0; channel < COX_TWO_WAY_COUNT; channel++)
            for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
                const struct cox_frame frame = {
                    .kind = (enum cox_frame_kind)kind, .channel = channel, .type = types[i]};
                if (!cox_frame_is_passed_on(&frame))
                    continue;
                assert_int_equal(kind, COX_FRAME_REQUEST);
                assert_int_equal(channel, COX_CHANNEL_EXECUTE);
                assert_int_equal(types[i], COX_TYPE_OPAQUE);
                count++;
            }
    assert_int_equal(count, 1);
}

PLAIN_TEST(answers_as_bytes)
{
    const struct cox_answer answer = {
        .status = -5,
        .count = 3,
        .replies = {
            {.rank = 5, .flags = COX_ANSWER_REPLIED, .bytes = (const uint8_t *)"abc", .size = 3},
            {.rank = 4, .flags = COX_ANSWER_DEAD},
            {.rank = 6,
             .flags = COX_ANSWER_REPLIED | COX_ANSWER_FAILED,
             .bytes = (const uint8_t *)"defg",
             .size = 4}}};
    struct cox_answer again;
    struct cox_error err = {0};
    uint8_t bytes[64];
    const size_t size = cox_answer_size(&answer);
    assert_int_equal(size, 8 + 3 * 12 + 7);
    cox_answer_pack(&answer, bytes);
    assert_int_equal(cox_answer_unpack(bytes, size, 4, 7, &again, &err), 0);
    assert_true(again.status == -5 && again.count == 3);
    for (uint32_t i = 0; i < 3; i++) {
        assert_true(again.replies[i].rank == answer.replies[i].rank &&
                    again.replies[i].flags == answer.replies[i].flags &&
                    again.replies[i].size == answer.replies[i].size);
        assert_memory_equal(again.replies[i].bytes, i ? (i == 2 ? "defg" : "") : "abc",
                            again.replies[i].size);
    }
    /* Of all sizes but this. */
    for (size_t cut = 0; cut < size; cut++) {
        uint8_t *exact = test_own(malloc(cut ? cut : 1), free);
        memcpy(exact, bytes, cut);
        assert_int_equal(cox_answer_unpack(exact, cut, 4, 7, &again, &err), COX_CORRUPT);
    }
    bytes[size] = 0;
    err = (struct cox_error){0};
    assert_refused(cox_answer_unpack(bytes, size + 1, 4, 7, &again, test_err()), COX_CORRUPT,
                   "1 bytes too many");
    /* Of other ranks: of the first, of the last, and too many. */
    err = (struct cox_error){0};
    assert_refused(cox_answer_unpack(bytes, size, 5, 8, &again, test_err()), COX_CORRUPT, "rank 4");
    err = (struct cox_error){0};
    assert_refused(cox_answer_unpack(bytes, size, 3, 6, &again, test_err()), COX_CORRUPT, "rank 6");
    err = (struct cox_error){0};
    assert_refused(cox_answer_unpack(bytes, size, 5, 7, &again, test_err()), COX_CORRUPT,
                   "3 replies of 2 ranks");
    static const struct {
        uint8_t offset, value;
    } bad[] = {
        {4, 4},          /* more replies than there are */
        {7, 255},        /* many more */
        {8, 4},          /* rank 4 twice */
        {8 + 12 + 3, 5}, /* rank 5 twice */
        {8 + 2, 1},      /* a rank over all */
        {8 + 8, 4},
        {8 + 8, 2},    /* another size */
        {8 + 11, 255}, /* a very large one */
        {8 + 12 + 3 + 12 + 8 + 3, 128},
        {8 + 4, COX_ANSWER_FAILED << 1}, /* flags that there are not */
        {8 + 7, 128},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        uint8_t broken[64];
        memcpy(broken, bytes, size);
        broken[bad[i].offset] = bad[i].value;
        if (cox_answer_unpack(broken, size, 4, 7, &again, &err) != COX_CORRUPT)
            fail_msg("form %zu was taken", i);
    }
}
