#include "await_token.h"
#include "channel/shm/request.h"

#include <endian.h>

#include "channel/base/fault.h"
#include "channel/shm/state.h"
#include "group_fixture.h"

static struct group *group_new(uint32_t depth)
{
    struct cox_geometry_choice choice = {.depth = depth};
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
        choice.request_size[c] = 4096 * depth;
    return group_create(&choice, 4);
}

static struct cox_rank_set only(uint32_t rank)
{
    struct cox_rank_set set = {{0}};
    cox_rank_set_add(&set, rank);
    return set;
}

/* What sequence s carries. */
static uint32_t type_of(uint64_t s)
{
    return (uint32_t)(s * 2654435761u);
}

static size_t length_of(uint64_t s)
{
    return s * 37 % 4000;
}

static void write_payload(const struct cox_channel *channel, uint64_t s, size_t length)
{
    size_t capacity;
    uint8_t *bytes = cox_request_frame(channel, s, &capacity);
    for (size_t i = 0; i < length; i++)
        bytes[i] = (uint8_t)(s + i);
}

static bool payload_is(const struct cox_request *request, uint64_t s, size_t length)
{
    if (request->sequence != s || request->size != length)
        return false;
    for (size_t i = 0; i < length; i++)
        if (request->bytes[i] != (uint8_t)(s + i))
            return false;
    return true;
}

LEAK_TEST(what_is_published_is_read_by_the_asked_ranks)
{
    for (uint32_t depth = 1; depth <= 8; depth++) {
        struct group *group = group_new(depth);
        for (uint64_t s = 1; s <= 3 * depth + 1; s++) {
            struct cox_rank_set asked = only(1);
            struct cox_request request;
            if (s % 2)
                cox_rank_set_add(&asked, 3);
            assert_int_equal(cox_request_read(&group->channel, s, 1, &request), COX_EMPTY);
            write_payload(&group->channel, s, length_of(s));
            assert_int_equal(cox_request_read(&group->channel, s, 1, &request),
                             COX_EMPTY); /* not yet */
            cox_request_publish(&group->channel, s, type_of(s), length_of(s), &asked);
            assert_true(
                cox_state_published(cox_state_channel(&group->control, COX_CHANNEL_EXECUTE)) == s);
            for (uint32_t rank = 0; rank < 4; rank++) {
                memset(&request, 0x5a, sizeof request);
                struct cox_request before = request;
                if (!cox_rank_set_has(&asked, rank)) {
                    assert_int_equal(cox_request_read(&group->channel, s, rank, &request),
                                     COX_EMPTY);
                    assert_memory_equal(&request, &before, sizeof request);
                    continue;
                }
                assert_int_equal(cox_request_read(&group->channel, s, rank, &request), 0);
                assert_true(payload_is(&request, s, length_of(s)));
                assert_int_equal(request.type, type_of(s));
                assert_int_equal(request.lowest, rank == 1);
            }
            /* The frames of earlier requests stay until they come round. */
            for (uint64_t old = s; old > 0; old--)
                assert_int_equal(cox_request_read(&group->channel, old, 1, &request),
                                 s - old < depth ? 0 : COX_EMPTY);
            assert_int_equal(cox_request_read(&group->channel, s + depth, 1, &request), COX_EMPTY);
        }
        test_release(group);
    }
}

GROUP_TEST(the_frame_has_the_contract_s_layout, 2)
{
    struct cox_rank_set asked = only(0);
    size_t capacity;
    uint8_t *bytes = cox_request_frame(&group->channel, 3, &capacity);
    assert_int_equal(capacity, 4096 - 4);
    assert_ptr_equal(bytes, (uint8_t *)group->channel.request.base + 4096 + 4); /* 3 mod 2 */
    memcpy(bytes, "abc", 3);
    cox_request_publish(&group->channel, 3, 1, 3, &asked);
    assert_memory_equal(bytes - 4, "\x03\0\0\0abc", 7);
}

GROUP_TEST(the_full_capacity_works_and_spoils_no_neighbour, 4)
{
    struct cox_rank_set asked = only(2);
    struct cox_request request;
    for (uint64_t s = 1; s <= 4; s++) {
        size_t capacity;
        cox_request_frame(&group->channel, s, &capacity);
        write_payload(&group->channel, s, capacity);
        cox_request_publish(&group->channel, s, 1, capacity, &asked);
    }
    for (uint64_t s = 1; s <= 4; s++) {
        assert_int_equal(cox_request_read(&group->channel, s, 2, &request), 0);
        assert_true(payload_is(&request, s, 4092));
    }
    cox_request_publish(&group->channel, 5, 1, 0, &asked); /* and nothing at all works too */
    assert_int_equal(cox_request_read(&group->channel, 5, 2, &request), 0);
    assert_int_equal(request.size, 0);
}

static void publish_too_much(void *context)
{
    struct group *group = context;
    struct cox_rank_set asked = only(0);
    cox_request_publish(&group->channel, 1, 1, 4093, &asked);
}

static void publish_4_gib(void *context)
{
    struct group *group = context;
    struct cox_rank_set asked = only(0);
    cox_request_publish(&group->channel, 1, 1, UINT64_C(1) << 32, &asked);
}

GROUP_TEST(one_byte_over_the_capacity_is_a_programmer_error, 1)
{
    child_aborts(publish_too_much, group);
    child_aborts(publish_4_gib, group); /* not cut to 32 bits first */
}

LEAK_TEST(m3_an_impossible_length_is_corrupt)
{
    static const uint32_t lengths[] = {99,   101,       4092,        4093,
                                       4096, INT32_MAX, 0x80000000u, UINT32_MAX};
    struct group *group = group_new(2);
    struct cox_rank_set asked = only(0);
    struct cox_request request = {0};
    struct cox_layout_channel_state *shared =
        cox_state_channel(&group->control, COX_CHANNEL_EXECUTE);
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        uint32_t prefix = htole32(lengths[i]);
        cox_request_publish(&group->channel, 1, 1, 100, &asked);
        assert_int_equal(cox_request_read(&group->channel, 1, 0, &request), 0);
        memcpy((uint8_t *)group->channel.request.base + 4096, &prefix,
               4); /* the frame disagrees with the record */
        memset(&request, 0, sizeof request);
        assert_int_equal(cox_request_read(&group->channel, 1, 0, &request), COX_CORRUPT);
        assert_int_equal(cox_request_read(&group->channel, 1, 1, &request), COX_EMPTY);
        assert_null(request.bytes);
        /* Whether a reply is expected is known all the same. */
        assert_int_equal(request.sequence, 1);
        assert_int_equal(request.type, 1);
        atomic_store(&shared->frames[1].length, lengths[i]); /* both lie alike */
        assert_int_equal(cox_request_read(&group->channel, 1, 0, &request),
                         lengths[i] <= 4092 ? 0 : COX_CORRUPT);
    }
}

/* ---- two processes ---- */

enum { REQUESTS = 3000 };

static void serve_rank_1(void *context)
{
    struct group *group = group_attach(1);
    uint64_t served = 0;
    (void)context;
    struct cox_layout_channel_state *shared =
        cox_state_channel(&group->control, COX_CHANNEL_EXECUTE);
    struct cox_layout_rank_line *line = cox_state_line(&group->control, 1, COX_CHANNEL_EXECUTE);
    for (uint64_t s = 1; s <= REQUESTS; s++) {
        while (cox_state_published(shared) < s)
            CHECK(await_token(&group->channel.gate, 1, COX_WAKEUP_REQUEST_CONSUME) == 0);
        cox_gate_absorb(&group->channel.gate, 1, COX_WAKEUP_REQUEST_CONSUME);
        struct cox_request request;
        int r = cox_request_read(&group->channel, s, 1, &request);
        CHECK(r == (s % 3 ? 0 : COX_EMPTY));
        if (r == 0) {
            CHECK(payload_is(&request, s, length_of(s)) && request.type == type_of(s));
            CHECK(request.lowest == (s % 2 == 0));
            served++;
        }
        cox_state_set_returned(line, s);
        cox_gate_post(&group->channel.gate, 1, COX_WAKEUP_REQUEST_PRODUCE);
    }
    CHECK(served == REQUESTS - REQUESTS / 3);
}

GROUP_TEST(a_rank_in_another_process_reads_them_all, 3)
{
    pid_t pid = child_start(serve_rank_1, NULL);
    struct cox_layout_rank_line *line = cox_state_line(&group->control, 1, COX_CHANNEL_EXECUTE);
    for (uint64_t s = 1; s <= REQUESTS; s++) {
        while (s > 3 && cox_state_returned(line) < s - 3)
            assert_int_equal(await_token(&group->channel.gate, 1, COX_WAKEUP_REQUEST_PRODUCE), 0);
        struct cox_rank_set asked = only(2), woken = only(1);
        if (s % 3)
            cox_rank_set_add(&asked, 1);
        if (s % 2)
            cox_rank_set_add(&asked, 0);
        write_payload(&group->channel, s, length_of(s));
        cox_request_publish(&group->channel, s, type_of(s), length_of(s), &asked);
        cox_gate_open(&group->channel.gate, &woken);
    }
    child_join(pid);
}

static void write_a_frame(void *context)
{
    struct group *group = group_attach(0);
    (void)context;
    signal(SIGSEGV, SIG_DFL);
    *(volatile uint8_t *)group->channel.request.base = 1;
}

GROUP_TEST(a_rank_cannot_write_requests, 1)
{
    assert_int_equal(child_status(child_start(write_a_frame, NULL)) & 0x7f, SIGSEGV);
}

static void publish_for_ever(void *context)
{
    struct group *group = context;
    for (uint64_t s = 1;; s++) {
        struct cox_rank_set asked = {{s * 0x9e3779b97f4a7c15u & ~UINT64_C(2), ~s}};
        cox_request_publish(&group->channel, s, type_of(s), length_of(s), &asked);
    }
}

/* A rank that was not asked reads records while the writer laps it: what it gets is of one piece or
 * nothing. */
LEAK_TEST(s3_a_rank_that_was_not_asked_reads_nothing_torn)
{
    for (uint32_t depth = 1; depth <= 2; depth++) {
        struct group *group = group_new(depth);
        struct cox_layout_channel_state *shared =
            cox_state_channel(&group->control, COX_CHANNEL_EXECUTE);
        pid_t pid = child_start(publish_for_ever, group);
        uint64_t whole = 0, lapped = 0, torn = 0, asked = 0;
        uint64_t least = cox_deadline_after_ms(500), most = cox_deadline_after_ms(300000);
        for (uint64_t now = 0;
             (now = cox_now_ns()) < least || ((whole < 1000 || lapped < 1000) && now < most);) {
            for (int i = 0; i < 1000; i++) {
                uint64_t s = cox_state_published(shared);
                struct cox_frame_record record;
                struct cox_request request;
                if (s == 0) /* not started yet */
                    break;
                if (cox_state_read_frame(shared, depth, s, &record)) {
                    whole++;
                    torn += record.sequence != s || record.type != type_of(s) ||
                            record.length != length_of(s) || record.asked.words[1] != ~s ||
                            record.asked.words[0] != (s * 0x9e3779b97f4a7c15u & ~UINT64_C(2));
                } else {
                    lapped++;
                }
                asked += cox_request_read(&group->channel, s, 1, &request) != COX_EMPTY;
            }
        }
        child_kill(pid);
        assert_int_equal(torn, 0);
        assert_int_equal(asked, 0);
        assert_true(whole >= 1000 && lapped >= 1000); /* both were seen, or nothing was tested */
        test_release(group);
    }
}

static void publish_and_die(void *context)
{
    struct group *group = context;
    struct cox_rank_set asked = only(1);
    cox_fault_arm("request.written:kill");
    write_payload(&group->channel, 1, 100);
    cox_request_publish(&group->channel, 1, 1, 100, &asked);
    kill(getpid(), SIGKILL); /* without fault points: as good as published */
}

LEAK_TEST(a_coordinator_that_dies_while_writing_published_nothing)
{
    struct cox_request request;
#if !COX_TESTING
    skip();
#endif
    struct group *group = group_new(1);
    assert_int_equal(child_status(child_start(publish_and_die, group)) & 0x7f, SIGKILL);
    assert_true(cox_state_published(cox_state_channel(&group->control, COX_CHANNEL_EXECUTE)) == 0);
    assert_int_equal(cox_request_read(&group->channel, 1, 1, &request), COX_EMPTY);
}
