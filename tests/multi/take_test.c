/* A worker that takes its requests (coxswain/worker.h): replies later, in any order, from any
 * thread, up to the depth; what ends a wait; what is refused; deaths with lent requests. */
#include "tests/lib/ranks.h"
#include "tests/lib/testing.h"

#include "channel/shm/layout.h"
#include "proto/executor.pb-c.h"

static const uint32_t rank_counts[] = {1, 2, 4, 8};
#define COUNT_OF(array) (sizeof array / sizeof *array)

static struct test_group *takers(uint32_t rank_count, uint32_t depth)
{
    const char *command[] = {test_worker_program(), "takes", NULL};
    return test_group_start(rank_count, START_WITH(.workers.command = command, .depth = depth));
}

static void expect_reply(struct test_group *g, size_t n, const char *text)
{
    const struct test_completion *c = test_await(g, n);
    if (c->status)
        fail_msg("completion %zu: %s", n, c->text);
    for (uint32_t rank = 0; rank < c->rank_count; rank++)
        assert_string_equal(c->ranks[rank].bytes, text);
}

static void submit(struct test_group *g, const char *text)
{
    assert_int_equal(test_submit(g, &test_all, "%s", text), 0);
}

/* ---- replies ---- */

TEST(requests_are_taken_and_replied_to)
{
    for (size_t i = 0; i < COUNT_OF(rank_counts); i++) {
        OWN_GROUP *g = takers(rank_counts[i], 0);
        for (int round = 0; round < 50; round++)
            test_expect_echo(g, round % 2 ? "x" : "a longer text");
    }
}

TEST(an_error_names_process_and_cause)
{
    OWN_GROUP *g = takers(2, 0);
    OWN_COMPLETION c = {0};
    assert_int_equal(test_call(g, &c, "only 1 fail %d it does not like this", COX_BUSY),
                     COX_REJECTED);
    assert_int_equal(c.ranks[1].code, COX_BUSY);
    assert_string_equal(c.ranks[1].text, "it does not like this");
    test_expect_echo(g, "and goes on");
}

TEST(a_long_reply_goes_out_of_line)
{
    test_needs_processes(); /* whose the memory is, is checked */
    OWN_GROUP *g = takers(2, 0);
    OWN_COMPLETION c = {0};
    const size_t size = 1u << 20; /* a slot has 64 KiB */
    for (int round = 0; round < 3; round++) {
        assert_int_equal(test_call(g, &c, "size %zu", size), 0);
        for (uint32_t rank = 0; rank < 2; rank++) {
            assert_int_equal(c.ranks[rank].size, size);
            for (size_t at = 0; at < size; at++)
                if ((uint8_t)c.ranks[rank].bytes[at] != (uint8_t)(7 * at + rank))
                    fail_msg("rank %" PRIu32 ", byte %zu", rank, at);
        }
    }
}

/* Each in the frame of the one before, whose copy does not change. */
TEST(a_copy_of_a_request_outlives_it)
{
    static const size_t sizes[] = {100, 3u << 20, 3u << 20, 9u << 20, 2u << 20};
    test_needs_processes(); /* a thread's mapping is that of the coordinator */
    char *text = malloc(sizes[3] + 1);
    assert_non_null(text);
    for (size_t i = 0; i < COUNT_OF(rank_counts); i++) {
        OWN_GROUP *g = takers(rank_counts[i], 1);
        for (size_t n = 0; n < COUNT_OF(sizes); n++) {
            memset(text, 'a' + (int)n, sizes[n]);
            memcpy(text, "copy ", 5);
            text[sizes[n]] = '\0';
            submit(g, text);
            expect_reply(g, n, n ? "ok" : "in its frame");
        }
    }
    free(text);
}

/* All that fit are kept, and the last one releases them. */
static void release(uint32_t rank_count, uint32_t depth, const char *order)
{
    OWN_GROUP *g = takers(rank_count, depth);
    char text[32], count[16];
    size_t n = 0;
    for (int round = 0; round < 3; round++) {
        for (uint32_t i = 0; i + 1 < depth; i++) {
            snprintf(text, sizeof text, "keep text %" PRIu32, i);
            submit(g, text);
        }
        snprintf(text, sizeof text, "release %s", order);
        submit(g, text);
        for (uint32_t i = 0; i + 1 < depth; i++) {
            snprintf(text, sizeof text, "text %" PRIu32, i);
            expect_reply(g, n++, text);
        }
        snprintf(count, sizeof count, "%" PRIu32, depth - 1);
        expect_reply(g, n++, count);
    }
}

TEST(replies_come_in_any_order)
{
    static const uint32_t depths[] = {1, 3, 8, COX_DEPTH_MAX};
    for (size_t i = 0; i < COUNT_OF(rank_counts); i++) {
        release(rank_counts[i], depths[i], "reverse");
        release(rank_counts[i], depths[i], "first");
        release(rank_counts[i], depths[i], "forward");
    }
}

TEST(a_reply_comes_from_another_thread_after_later_requests)
{
    for (size_t i = 0; i < COUNT_OF(rank_counts); i++) {
        OWN_GROUP *g = takers(rank_counts[i], 4);
        submit(g, "keep a");
        submit(g, "release later");
        submit(g, "echo b");
        expect_reply(g, 0, "a");
        expect_reply(g, 1, "1");
        expect_reply(g, 2, "b");
    }
}

/* A rank that is not asked passes a frame while it still owes replies to those in front of it. */
TEST(requests_to_others_pass_what_is_kept)
{
    OWN_GROUP *g = takers(4, 4);
    const struct test_how others = {.gather = COX_GATHER_ALL, .ranks = 6};
    submit(g, "keep a");
    assert_int_equal(test_submit(g, &others, "keep b"), 0);
    assert_int_equal(test_submit(g, &others, "keep c"), 0);
    submit(g, "release first"); /* of three, or of one */
    test_await(g, 3);
    for (size_t n = 0; n < 4; n++) {
        static const char *const texts[] = {"a", "b", "c"};
        /* Requests to other ranks end when those have replied. */
        const struct test_completion *c = test_await(g, n);
        assert_int_equal(c->status, 0);
        assert_in_range(c->sequence, 1, 4);
        if (c->sequence == 4)
            continue;
        for (uint32_t rank = 1; rank < 3; rank++)
            assert_string_equal(c->ranks[rank].bytes, texts[c->sequence - 1]);
        assert_string_equal(c->ranks[3].bytes, c->sequence == 1 ? "a" : "");
    }
}

/* ---- waits, and what is refused ---- */

TEST(what_ends_a_wait_and_what_is_refused)
{
    for (size_t i = 0; i < COUNT_OF(rank_counts); i++) {
        OWN_GROUP *g = takers(rank_counts[i], 0);
        submit(g, "check");
        expect_reply(g, 0, "ok");
    }
}

/* Callers of next are woken; the library's own threads have none. */
TEST(a_wake_does_not_end_a_channel_that_is_not_taken)
{
    OWN_GROUP *g = takers(2, 0);
    submit(g, "wake");
    expect_reply(g, 0, "ok");
    for (int round = 0; round < 2; round++) {
        Coxswain__LoraOperationRequest lora = COXSWAIN__LORA_OPERATION_REQUEST__INIT;
        struct cox_lora_result results[2];
        assert_ok(cox_executor_lora_results(test_group_executor(g), &lora,
                                            cox_deadline_after_ms(TEST_PATIENCE_MS), results,
                                            test_err()));
    }
}

TEST(a_second_reply_is_refused_in_words)
{
    OWN_GROUP *g = takers(1, 0);
    char text[64];
    submit(g, "twice x");
    expect_reply(g, 0, "x");
    submit(g, "told");
    snprintf(text, sizeof text, "%d request 1 is replied to already", COX_STATE);
    expect_reply(g, 1, text);
}

/* Waits until both ranks have seen `count` requests cancelled. Returns whether both had found each
 * of them alive before. */
static bool await_cancelled(struct test_group *g, size_t count)
{
    test_await_lines(g, -1, "cancelled", 2 * count);
    return test_count_lines(g, -1, "alive") == 2 * count;
}

static bool given_up(uint64_t timeout_ms)
{
    const struct test_how brief = {.gather = COX_GATHER_ALL, .timeout_ms = timeout_ms};
    OWN_GROUP *g = takers(2, 0);
    test_call_in_vain(g, NULL, &brief, "cancelled");
    const bool alive = await_cancelled(g, 1);
    assert_int_equal(test_submit_persist(g, &test_all, "echo x"), 0);
    expect_reply(g, 0, "x");
    return alive;
}

TEST(a_request_that_was_given_up_is_cancelled)
{
    test_with_longer_deadlines(given_up);
}

static bool before_earlier_ones(uint64_t timeout_ms)
{
    const struct test_how brief = {.gather = COX_GATHER_ALL, .timeout_ms = timeout_ms};
    OWN_GROUP *g = takers(2, 4);
    submit(g, "keep a");
    assert_int_equal(test_submit_persist(g, &brief, "cancelled"), 0);
    const bool alive = await_cancelled(g, 1);
    assert_int_equal(test_await(g, 0)->sequence, 2);
    assert_int_equal(test_await(g, 0)->status, COX_TIMEOUT);
    assert_int_equal(test_completion_count(g), 1);
    return alive;
}

/* The first one's deadline is far, and its reply keeps that of the second from being published. */
TEST(a_request_is_cancelled_before_earlier_ones_end)
{
    test_with_longer_deadlines(before_earlier_ones);
}

static bool in_a_frame_used_again(uint64_t timeout_ms)
{
    const struct test_how brief = {.gather = COX_GATHER_ALL, .timeout_ms = timeout_ms};
    bool alive = true;
    OWN_GROUP *g = takers(2, 1);
    for (size_t round = 1; round <= 2; round++) {
        assert_int_equal(test_submit_persist(g, &brief, "cancelled"), 0);
        alive = await_cancelled(g, round) && alive;
        assert_int_equal(test_submit_persist(g, &test_all, "echo x"), 0);
        expect_reply(g, 2 * round - 1, "x");
    }
    return alive;
}

/* The frame of one that was cancelled is used again. */
TEST(a_request_in_the_frame_of_a_cancelled_one_is_alive)
{
    test_with_longer_deadlines(in_a_frame_used_again);
}

/* ---- ends ---- */

TEST(the_end_of_the_group_ends_next)
{
    OWN_GROUP *g = takers(2, 0);
    test_expect_echo(g, "x");
    submit(g, "keep x"); /* in flight at the end, and never replied to */
    cox_executor_stop(test_group_executor(g));
    char text[64];
    snprintf(text, sizeof text, "next: %d the coordinator has ended the group", COX_CLOSED);
    test_await_lines(g, 0, text, 1);
    test_await_lines(g, 1, text, 1);
    assert_int_equal(test_await(g, 0)->status, COX_CLOSED);
}

TEST(a_worker_that_stops_leaves_what_it_was_lent)
{
    const struct test_how one = {.gather = COX_GATHER_ALL, .ranks = 2};
    OWN_GROUP *g = takers(2, 4);
    char text[64];
    submit(g, "keep a");
    assert_int_equal(test_submit(g, &one, "leave"), 0);
    snprintf(text, sizeof text, "next: %d the worker was stopped", COX_CLOSED);
    test_await_lines(g, 1, text, 1);
    for (size_t n = 0; n < 2; n++) {
        assert_int_equal(test_await(g, n)->status, COX_PEER_DEAD);
        assert_int_equal(test_await(g, n)->ranks[1].outcome, COX_OUTCOME_DEAD);
    }
}

TEST(a_death_ends_what_was_lent)
{
    test_needs_processes();
    for (size_t i = 0; i < COUNT_OF(rank_counts); i++) {
        const uint32_t last = rank_counts[i] - 1;
        OWN_GROUP *g = takers(rank_counts[i], 4);
        char text[64];
        submit(g, "keep a");
        submit(g, "keep b");
        snprintf(text, sizeof text, "only %" PRIu32 " kill 9", last);
        submit(g, text);
        for (size_t n = 0; n < 3; n++) {
            const struct test_completion *c = test_await(g, n);
            assert_int_equal(c->status, COX_PEER_DEAD);
            assert_int_equal(c->ranks[last].outcome, COX_OUTCOME_DEAD);
            assert_int_equal(c->ranks[last].signal, SIGKILL);
        }
    }
}
