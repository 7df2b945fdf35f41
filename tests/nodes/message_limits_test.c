/* Which direct messages are taken, from whom and how large (nodes/message_limits.h), and what is
 * kept of those that come too early (nodes/group_relay.h). */
#include "direct_world.h"

#include "nodes/group_relay.h"
#include "nodes/image.h"
#include "nodes/kv_relay.h"
#include "nodes/link/frame.h"
#include "nodes/message_limits.h"
#include "nodes/nodes.h"

TEST(messages_are_taken_from_whom_they_come)
{
    static const struct {
        uint32_t kind;
        const char *peer, *group;
        uint64_t size;
        /* what the lead and an agent of the group say */
        int at_lead, at_agent;
    } cases[] = {
        {COX_DIRECT_GROUP, "node-a", "big", 100, COX_DENIED, 0},
        {COX_DIRECT_GROUP, "node-a", "other", 100, COX_DENIED, COX_DENIED},
        {COX_DIRECT_GROUP, "lead", "big", 100, COX_DENIED, COX_DENIED},
        {COX_DIRECT_IMAGE, "lead", "big", COX_DIRECT_SIZE_MAX, COX_DENIED, 0},
        {COX_DIRECT_IMAGE, "node-a", "big", COX_DIRECT_SIZE_MAX, COX_DENIED, COX_DENIED},
        {COX_DIRECT_IMAGE, "lead", "other", COX_DIRECT_SIZE_MAX, COX_DENIED, COX_DENIED},
        {COX_DIRECT_DROP_IMAGE, "lead", "big", 64, COX_DENIED, 0},
        {COX_DIRECT_DROP_IMAGE, "lead", "big", 65, COX_DENIED, COX_TOO_LARGE},
        {COX_DIRECT_FETCH, "node-a", "other", 1000, COX_DENIED, 0},
        {COX_DIRECT_FETCH, "node-a", "big", MIB, COX_DENIED, COX_TOO_LARGE},
        {COX_DIRECT_FETCH, "lead", "big", 1000, COX_DENIED, COX_DENIED},
        {COX_DIRECT_BLOCKS, "node-a", "other", MIB, COX_DENIED, 0},
        {0, "lead", "big", 1, COX_DENIED, COX_DENIED},
        {99, "node-a", "big", 1, COX_DENIED, COX_DENIED},
        {UINT32_MAX, "node-a", "big", 1, COX_DENIED, COX_DENIED},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int at_lead = 0; at_lead < 2; at_lead++)
            assert_int_equal(cox_message_check(at_lead, "big", cases[i].peer, cases[i].group,
                                               cases[i].kind, cases[i].size, NULL, NULL),
                             at_lead ? cases[i].at_lead : cases[i].at_agent);
}

TEST(frames_are_refused_by_their_head)
{
    uint8_t head[COX_FRAME_HEAD_SIZE];
    struct cox_error err = {0};
    struct cox_frame frame = {.kind = COX_FRAME_HELLO, .size = 50 * MIB};
    cox_frame_pack_head(&frame, head);
    assert_int_equal(cox_message_check(true, "big", "node-a", "big", COX_DIRECT_FRAME,
                                       sizeof head + frame.size, head, &err),
                     COX_CORRUPT);
    assert_string_equal(err.text, "a HELLO of 52428800 bytes: at most 1048576 are taken");
    assert_int_equal(
        cox_message_check(true, "big", "node-a", "big", COX_DIRECT_FRAME, 10, head, NULL),
        COX_CORRUPT);
    frame.kind = COX_FRAME_ANSWER;
    cox_frame_pack_head(&frame, head);
    assert_int_equal(cox_message_check(true, "big", "node-a", "big", COX_DIRECT_FRAME,
                                       sizeof head + frame.size, head, NULL),
                     0);
    assert_int_equal(cox_message_check(false, "big", "lead", "big", COX_DIRECT_FRAME,
                                       sizeof head + frame.size, head, NULL),
                     0);
    assert_int_equal(cox_message_check(true, "big", "lead", "big", COX_DIRECT_FRAME,
                                       sizeof head + frame.size, head, NULL),
                     COX_DENIED);
}

static void early(struct cox_group_relay *relay, const char *node, uint8_t incarnation, size_t size)
{
    uint8_t *bytes = calloc(1, sizeof(uint64_t) + size);
    assert_non_null(bytes);
    bytes[0] = incarnation;
    cox_group_relay_take(relay, node, bytes, sizeof(uint64_t) + size);
}

TEST(messages_for_incarnations_to_come_have_a_budget_and_an_end)
{
    struct cox_direct *direct = node("node-x", NULL, NULL);
    struct cox_group_relay *relay = NULL;
    const struct cox_log log = {0};
    const uint64_t begin_ns = cox_now_ns();
    assert_int_equal(cox_group_relay_new(direct, "x", &log, &relay, NULL), 0);
    for (int i = 0; i < 100; i++)
        early(relay, "a", 7, MIB);
    assert_int_equal(cox_group_relay_expire(relay, begin_ns), 64 * MIB);
    for (int n = 0; n < 8; n++)
        for (int i = 0; i < 64; i++)
            early(relay, (const char[]){(char)('b' + n), 0}, 7, MIB);
    assert_int_equal(cox_group_relay_expire(relay, begin_ns), 256 * MIB);
    const uint64_t minute_ns = 60 * COX_NSEC_PER_SEC;
    assert_int_equal(cox_group_relay_expire(relay, begin_ns + minute_ns - 1), 256 * MIB);
    assert_int_equal(cox_group_relay_expire(relay, cox_now_ns() + minute_ns), 0);
    early(relay, "a", 7, MIB);
    early(relay, "b", 7, 10);
    assert_int_equal(cox_group_relay_expire(relay, begin_ns), MIB + 10);
    for (int i = 0; i < 10000; i++)
        early(relay, "c", 7, 1);
    assert_int_equal(cox_group_relay_expire(relay, begin_ns), MIB + 10 + 4094);
    cox_group_relay_free(relay);
}
