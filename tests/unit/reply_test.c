#include "await_token.h"
#include "channel/shm/reply.h"

#include <endian.h>

#include "channel/shm/state.h"
#include "group_fixture.h"

#define STRIDE 1024
#define CAPACITY (STRIDE - 4)

/* As after every rank attached as incarnation 1. */
static struct group *group_new(uint32_t depth)
{
    struct cox_geometry_choice choice = {.depth = depth};
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
        choice.response_size[c] = STRIDE * 4 * depth;
    struct group *group = group_create(&choice, 4);
    for (uint32_t rank = 0; rank < 4; rank++) {
        struct cox_layout_rank_line *line =
            cox_state_line(&group->control, rank, COX_CHANNEL_EXECUTE);
        atomic_store(&line->group_incarnation, group->control.group_incarnation);
        atomic_store(&line->incarnation, 1);
    }
    return group;
}

static void fill(uint8_t *bytes, uint32_t rank, uint64_t s, size_t length)
{
    for (size_t i = 0; i < length; i++)
        bytes[i] = (uint8_t)(rank * 50 + s + i);
}

static void reply_with(const struct group *group, uint32_t rank, uint64_t s, size_t length,
                       bool failed)
{
    size_t capacity;
    fill(cox_reply_slot(&group->channel, rank, s, false, &capacity), rank, s, length);
    cox_reply_commit(&group->channel, rank, s, length, failed);
}

static int fetch(const struct group *group, uint32_t rank, uint64_t s, uint32_t incarnation,
                 uint8_t *buffer, size_t buffer_size, size_t *length, bool *failed,
                 struct cox_error *err)
{
    return cox_reply_fetch(&group->channel, rank, s, false, incarnation, buffer, buffer_size,
                           length, failed, err);
}

static void must_hold(const struct group *group, uint32_t rank, uint64_t s, size_t expected,
                      bool expected_failed)
{
    uint8_t buffer[CAPACITY + 1], wanted[CAPACITY];
    size_t length = SIZE_MAX;
    bool failed = !expected_failed;
    memset(buffer, 0xee, sizeof buffer);
    assert_ok(fetch(group, rank, s, 1, buffer, sizeof buffer, &length, &failed, test_err()));
    assert_int_equal(length, expected);
    assert_int_equal(failed, expected_failed);
    fill(wanted, rank, s, expected);
    assert_memory_equal(buffer, wanted, expected);
    assert_int_equal(buffer[expected], 0xee);
}

/* Refused with `code` and a text that holds a, b and the rank; nothing was given out. */
static void must_refuse(const struct group *group, uint32_t rank, uint64_t s, uint32_t incarnation,
                        size_t buffer_size, int code, const char *a, const char *b)
{
    uint8_t buffer[CAPACITY];
    size_t length = 77;
    bool failed = true;
    char who[32];
    memset(buffer, 0xee, sizeof buffer);
    snprintf(who, sizeof who, "rank %u ", rank);
    assert_refused(
        fetch(group, rank, s, incarnation, buffer, buffer_size, &length, &failed, test_err()), code,
        who);
    assert_contains(test_error.text, a);
    assert_contains(test_error.text, b);
    assert_true(length == 77 && failed);
    for (size_t i = 0; i < sizeof buffer; i++)
        assert_int_equal(buffer[i], 0xee);
}

LEAK_TEST(what_is_committed_is_fetched)
{
    for (uint32_t depth = 1; depth <= 8; depth++) {
        struct group *group = group_new(depth);
        for (uint64_t s = 1; s <= 3 * depth; s++) {
            for (uint32_t rank = 0; rank < 4; rank++)
                reply_with(group, rank, s, (s * 131 + rank * 17) % CAPACITY, (s + rank) % 2);
            for (uint64_t old = s > depth ? s - depth + 1 : 1; old <= s; old++)
                for (uint32_t rank = 0; rank < 4; rank++)
                    must_hold(group, rank, old, (old * 131 + rank * 17) % CAPACITY,
                              (old + rank) % 2);
        }
        test_release(group);
    }
}

GROUP_TEST(m4_full_slots_spoil_no_neighbour, 3)
{
    size_t capacity;
    for (uint64_t s = 1; s <= 3; s++)
        for (uint32_t rank = 0; rank < 4; rank++) {
            cox_reply_slot(&group->channel, rank, s, false, &capacity);
            assert_int_equal(capacity, CAPACITY);
            reply_with(group, rank, s, capacity, false);
        }
    for (uint64_t s = 1; s <= 3; s++)
        for (uint32_t rank = 0; rank < 4; rank++)
            must_hold(group, rank, s, CAPACITY, false);
    reply_with(group, 2, 4, 0, false);
    must_hold(group, 2, 4, 0, false);
}

GROUP_TEST(the_slot_has_the_contract_s_layout, 1)
{
    uint8_t *base = group->channel.response.base;
    reply_with(group, 2, 1, 0x0203, false);
    assert_memory_equal(base + 2 * STRIDE, "\x03\x02\0\0", 4);
    assert_int_equal(base[2 * STRIDE + 4], (uint8_t)(2 * 50 + 1));
}

GROUP_TEST(m3_an_impossible_length_is_corrupt, 1)
{
    static const uint32_t lengths[] = {CAPACITY + 1, STRIDE,      STRIDE * 4,
                                       INT32_MAX,    0x80000000u, UINT32_MAX};
    reply_with(group, 3, 1, 100, false); /* the last slot: behind it the region ends */
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        uint32_t prefix = htole32(lengths[i]);
        char number[32];
        memcpy((uint8_t *)group->channel.response.base + 3 * STRIDE, &prefix, 4);
        snprintf(number, sizeof number, "length of %u bytes", lengths[i]);
        must_refuse(group, 3, 1, 1, SIZE_MAX, COX_CORRUPT, number, "holds 1020");
    }
    cox_reply_commit(&group->channel, 3, 1, CAPACITY + 1, false); /* a worker that says so itself */
    must_refuse(group, 3, 1, 1, SIZE_MAX, COX_CORRUPT, "1021 bytes", "holds 1020");
}

GROUP_TEST(a_buffer_that_is_too_small_is_distinguished, 1)
{
    uint8_t buffer[100];
    size_t length = 0;
    bool failed;
    reply_with(group, 0, 1, 100, false);
    must_refuse(group, 0, 1, 1, 99, COX_TOO_LARGE, "100 bytes", "room for 99");
    assert_int_equal(fetch(group, 0, 1, 1, buffer, 100, &length, &failed, NULL), 0);
    assert_int_equal(length, 100);
}

GROUP_TEST(b50_a_late_reply_is_not_taken_for_the_next_one, 2)
{
    must_refuse(group, 1, 1, 1, CAPACITY, COX_CORRUPT, "sequence 0",
                "expected 1"); /* nothing yet */
    reply_with(group, 1, 1, 10, false);
    must_refuse(group, 1, 3, 1, CAPACITY, COX_CORRUPT, "sequence 1",
                "expected 3"); /* the same slot */
    reply_with(group, 1, 1, 10, true);
    must_refuse(group, 1, 3, 1, CAPACITY, COX_CORRUPT, "sequence 1,", "expected 3");
    must_refuse(group, 2, 1, 1, CAPACITY, COX_CORRUPT, "sequence 0",
                "expected 1"); /* another rank's */
    reply_with(group, 1, 5, 10, false);
    must_refuse(group, 1, 3, 1, CAPACITY, COX_CORRUPT, "sequence 5",
                "expected 3"); /* nor a later one */
    must_hold(group, 1, 5, 10, false);
    /* A half-written tag. */
    atomic_store(&cox_state_line(&group->control, 1, COX_CHANNEL_EXECUTE)->tags[1], UINT64_MAX);
    must_refuse(group, 1, 5, 1, CAPACITY, COX_CORRUPT, "sequence", "expected 5");
}

GROUP_TEST(another_incarnation_or_group_is_corrupt, 1)
{
    struct cox_layout_rank_line *line = cox_state_line(&group->control, 1, COX_CHANNEL_EXECUTE);
    reply_with(group, 1, 1, 10, false);
    must_refuse(group, 1, 1, 2, CAPACITY, COX_CORRUPT, "incarnation 1",
                "expected 2"); /* it was replaced since */
    atomic_store(&line->incarnation, 2);
    must_refuse(group, 1, 1, 1, CAPACITY, COX_CORRUPT, "incarnation 2", "expected 1");
    atomic_store(&line->incarnation, 1);
    must_hold(group, 1, 1, 10, false);
    for (int bit = 0; bit < 32; bit++) {
        atomic_store(&line->group_incarnation, group->control.group_incarnation ^ (1u << bit));
        must_refuse(group, 1, 1, 1, CAPACITY, COX_CORRUPT, "of group", "expected 1");
    }
    atomic_store(&line->group_incarnation, group->control.group_incarnation);
    must_hold(group, 1, 1, 10, false);
}

LEAK_TEST(replies_of_legacy_ranks_are_where_the_legacy_layout_has_them)
{
    const struct cox_geometry_choice choice = {
        .mode = &cox_attach_legacy,
        .request_size = {4096, 4096, 4096, 4096, 0},
        .response_size = {2 << 20, 1 << 20, 1 << 20, 1 << 20, 0},
    };
    struct group *group = group_create(&choice, 2);
    size_t capacity, length = 0, large = (2 << 20) - 4;
    bool failed = true;
    uint8_t *base = group->channel.response.base, *buffer = test_own(malloc(large), free);
    assert_non_null(buffer);
    for (uint32_t rank = 0; rank < 2; rank++) { /* as the legacy bridge writes them */
        struct cox_layout_rank_line *line =
            cox_state_line(&group->control, rank, COX_CHANNEL_EXECUTE);
        cox_state_set_incarnation(line, group->control.group_incarnation, 1);
        cox_state_set_tag(line, 1, 9, false);
    }
    memcpy(base + 524288, "\x03\0\0\0abc", 7); /* as a legacy rank 1 writes it */
    assert_int_equal(fetch(group, 1, 9, 1, buffer, large, &length, &failed, NULL), 0);
    assert_int_equal(length, 3);
    assert_false(failed);
    assert_memory_equal(buffer, "abc", 3);
    /* Rank 0 alone may fill the region. */
    uint8_t *slot = cox_reply_slot(&group->channel, 0, 9, true, &capacity);
    assert_ptr_equal(slot, base + 4);
    assert_int_equal(capacity, large);
    memset(slot, 0x77, large);
    uint32_t prefix = htole32((uint32_t)large);
    memcpy(base, &prefix, 4);
    assert_int_equal(
        cox_reply_fetch(&group->channel, 0, 9, true, 1, buffer, large, &length, &failed, NULL), 0);
    assert_int_equal(length, large);
    assert_int_equal(buffer[large - 1], 0x77);
    prefix = htole32((uint32_t)large + 1);
    memcpy(base, &prefix, 4);
    assert_int_equal(
        cox_reply_fetch(&group->channel, 0, 9, true, 1, buffer, SIZE_MAX, &length, &failed, NULL),
        COX_CORRUPT);
    prefix = htole32(524288 - 3); /* in a slot that is a byte too much */
    memcpy(base, &prefix, 4);
    assert_int_equal(fetch(group, 0, 9, 1, buffer, large, &length, &failed, NULL), COX_CORRUPT);
}

/* ---- two processes ---- */

enum { REPLIES = 3000 };

static void reply_as_rank_1(void *context)
{
    struct group *group = group_attach(1);
    (void)context;
    struct cox_layout_rank_line *line = cox_state_line(&group->control, 1, COX_CHANNEL_EXECUTE);
    for (uint64_t s = 1; s <= REPLIES; s++) {
        /* a free slot each */
        CHECK(await_token(&group->channel.gate, 1, COX_WAKEUP_RESPONSE_PRODUCE) == 0);
        reply_with(group, 1, s, s * 131 % CAPACITY, s % 7 == 0);
        cox_state_set_done(line, s);
        cox_gate_post(&group->channel.gate, 1, COX_WAKEUP_RESPONSE_CONSUME);
    }
    /* The next one it writes, and dies. */
    size_t capacity;
    CHECK(await_token(&group->channel.gate, 1, COX_WAKEUP_RESPONSE_PRODUCE) == 0);
    uint8_t *slot = cox_reply_slot(&group->channel, 1, REPLIES + 1, false, &capacity);
    memset(slot, 0xdd, capacity);
    kill(getpid(), SIGKILL);
}

GROUP_TEST(replies_of_another_process_arrive_until_it_dies, 2)
{
    pid_t pid = child_start(reply_as_rank_1, NULL);
    struct cox_layout_rank_line *line = cox_state_line(&group->control, 1, COX_CHANNEL_EXECUTE);
    for (uint64_t s = 1; s <= REPLIES; s++) {
        while (cox_state_done(line) < s)
            assert_int_equal(await_token(&group->channel.gate, 1, COX_WAKEUP_RESPONSE_CONSUME), 0);
        must_hold(group, 1, s, s * 131 % CAPACITY, s % 7 == 0);
        cox_gate_absorb(&group->channel.gate, 1, COX_WAKEUP_RESPONSE_CONSUME);
        cox_gate_post(&group->channel.gate, 1, COX_WAKEUP_RESPONSE_PRODUCE);
    }
    assert_int_equal(child_status(pid) & 0x7f, SIGKILL);
    assert_true(cox_state_done(line) == REPLIES);
    must_refuse(group, 1, REPLIES + 1, 1, CAPACITY, COX_CORRUPT, "expected 3001", "sequence 2999");
}
