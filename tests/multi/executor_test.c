/* Requests and their completions with real workers: their contents, how they may end, and that they
 * end once. */
#include "channel/base/hash.h"
#include "proto/executor.pb-c.h"
#include "proto/wire.h"
#include "steps.h"

static uint64_t digest(const uint8_t *bytes, size_t size)
{
    return cox_hash_bytes(COX_HASH_START, bytes, size);
}

/* ---- broadcast ---- */

GROUPS_TEST(m2_one_request_reaches_every_rank_whole)
{
    size_t size = test_request_size_max(executor, COX_CHANNEL_EXECUTE);
    uint8_t *bytes = malloc(size);
    assert_non_null(bytes);
    for (size_t i = 0; i < size; i++)
        bytes[i] = (uint8_t)(i % 251 + 1);
    memcpy(bytes, "sum ", 4);
    char expected[32];
    snprintf(expected, sizeof expected, "%016" PRIx64, digest(bytes, size));
    OWN_COMPLETION c = {0};
    assert_int_equal(test_call_bytes(g, &c, &test_all, bytes, size), 0);
    assert_int_equal(c.rank_count, n);
    for (uint32_t rank = 0; rank < n; rank++) {
        assert_int_equal(c.ranks[rank].outcome, COX_OUTCOME_OK);
        assert_true(c.ranks[rank].taken);
        assert_string_equal(c.ranks[rank].bytes, expected);
        assert_int_equal(c.ranks[rank].pid, cox_executor_pid(executor, rank));
    }
    /* One request was published for all of them. */
    const struct cox_channel_stats stats = test_stats(executor, COX_CHANNEL_EXECUTE);
    assert_int_equal(stats.submitted, 1);
    assert_int_equal(stats.completed, 1);
    free(bytes);
}

GROUP_TEST(m2_ranks_that_are_not_asked_do_nothing, 4)
{
    for (uint64_t ranks = 1; ranks < 16; ranks++) {
        const struct test_how how = {.gather = COX_GATHER_ALL, .ranks = ranks};
        OWN_COMPLETION c = {0};
        assert_int_equal(test_call_how(g, &c, &how, "pid"), 0);
        for (uint32_t rank = 0; rank < 4; rank++) {
            bool asked = ranks >> rank & 1;
            assert_int_equal(c.ranks[rank].outcome, asked ? COX_OUTCOME_OK : COX_OUTCOME_NOT_ASKED);
            assert_int_equal(atoi(c.ranks[rank].bytes), asked ? c.ranks[rank].pid : 0);
        }
    }
    const struct test_how outside = {.gather = COX_GATHER_ALL, .ranks = 16 + 1};
    assert_int_equal(test_call_how(g, NULL, &outside, "pid"), COX_INVALID);
    struct cox_rank_set nobody = {{0}};
    assert_int_equal(cox_executor_call_opaque(
                         executor, "pid", 3,
                         SUBMIT_WITH(.gather = COX_GATHER_ALL,
                                     .deadline_ns = cox_deadline_after_ms(1000), .asked = &nobody),
                         NULL, NULL, NULL),
                     COX_INVALID);
    /* Half of the 15 named each rank, and then all did. */
    OWN_COMPLETION c = {0};
    assert_int_equal(test_call(g, &c, "served"), 0);
    for (uint32_t rank = 0; rank < 4; rank++)
        assert_string_equal(c.ranks[rank].bytes, "9");
}

/* ---- bounds ---- */

TEST(m3_oversize_request_is_refused_with_both_sizes)
{
    for (uint32_t n = 1; n <= 8; n *= 2) {
        OWN_GROUP *g = test_group_start(n, START_WITH(.memory.refuse_large_payloads = true));
        struct cox_executor *executor = test_group_executor(g);
        size_t max = test_request_size_max(executor, COX_CHANNEL_EXECUTE);
        char *bytes = malloc(max + 1), number[32];
        assert_non_null(bytes);
        memset(bytes, 'a', max + 1);
        memcpy(bytes, "sum ", 4);
        assert_int_equal(test_call_bytes(g, NULL, &test_all, bytes, max + 1), COX_TOO_LARGE);
        snprintf(number, sizeof number, "holds %zu:", max);
        assert_contains(test_error_text(g), number);
        snprintf(number, sizeof number, " %zu bytes", max + 1);
        assert_contains(test_error_text(g), number);

        /* A message, on another channel. */
        max = test_request_size_max(executor, COX_CHANNEL_LINK);
        bytes[max] = '\0';
        Coxswain__LoraOperationRequest lora = COXSWAIN__LORA_OPERATION_REQUEST__INIT;
        lora.lora_name = bytes;
        Coxswain__ExecuteRequest request =
            REQUEST_OF(LORA_OPERATION, LORA_OPERATION_REQUEST, &lora);
        snprintf(number, sizeof number, "holds %zu:", max);
        assert_refused(cox_executor_call(executor, &request,
                                         SUBMIT_WITH(.deadline_ns = test_patience()), NULL, NULL,
                                         test_err()),
                       COX_TOO_LARGE, number);
        snprintf(number, sizeof number, " %zu bytes", cox_wire_request_size(&request));
        assert_contains(test_error.text, number);

        test_expect_echo(g, "still here");
        free(bytes);
    }
}

GROUP_TEST_WITH(m3_oversize_reply_is_an_error_of_that_rank, 4, .depth = 2,
                .memory.response_size = {[COX_CHANNEL_EXECUTE] = 2 * 4 * 1024})
{
    OWN_COMPLETION c = {0};
    assert_int_equal(test_call(g, &c, "size 1020"), 0);
    for (uint32_t rank = 0; rank < 4; rank++) {
        assert_int_equal(c.ranks[rank].size, 1020);
        for (size_t i = 0; i < 1020; i++)
            assert_int_equal((uint8_t)c.ranks[rank].bytes[i], (uint8_t)(7 * i + rank));
    }
    for (uint32_t rank = 0; rank < 4; rank++) {
        char named[32];
        assert_int_equal(test_call(g, &c, "only %" PRIu32 " lie 1021", rank), COX_REJECTED);
        assert_int_equal(c.ranks[rank].outcome, COX_OUTCOME_ERROR);
        assert_int_equal(c.ranks[rank].code, COX_TOO_LARGE);
        assert_contains(c.ranks[rank].text, "1021");
        assert_contains(c.ranks[rank].text, "1020: cox_worker_reply_grow makes more");
        snprintf(named, sizeof named, "rank %" PRIu32 " failed", rank);
        assert_contains(c.text, named);
        assert_contains(test_error_text(g), named);
        for (uint32_t other = 0; other < 4; other++)
            assert_true(other == rank || c.ranks[other].outcome == COX_OUTCOME_OK ||
                        c.ranks[other].outcome == COX_OUTCOME_LATE);
        test_expect_echo(g, "still here");
    }
}

TEST(m3_a_reply_that_makes_no_sense_is_corrupt)
{
    char name[64];
    OWN_GROUP *g =
        test_group_start(4, START_WITH(.memory.keep_names = true, .name = test_unique_name(name)));
    static const struct {
        const char *command, *says;
    } cases[] = {
        {"raw 65533 ok", "length of 65533 bytes, its slot holds 65532"},
        {"raw 4294967295 ok", "length of 4294967295 bytes"},
        {"raw 64 failed", "no ExecuteResponse"},
        {"raw 64 other", "expected"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (uint32_t rank = 0; rank < 4; rank += 3) {
            OWN_COMPLETION c = {0};
            char named[16];
            assert_int_equal(test_call(g, &c, "only %" PRIu32 " %s", rank, cases[i].command),
                             COX_CORRUPT);
            assert_int_equal(c.ranks[rank].outcome, COX_OUTCOME_ERROR);
            assert_int_equal(c.ranks[rank].code, COX_CORRUPT);
            assert_contains(c.ranks[rank].text, cases[i].says);
            snprintf(named, sizeof named, "rank %" PRIu32, rank);
            assert_contains(c.text, named);
            test_expect_echo(g, "still here");
        }
}

/* ---- gather policies ---- */

GROUPS_TEST(m4_which_ranks_send_the_payload)
{
    /* From all, from all but the first, from the last alone. */
    const uint64_t all = (UINT64_C(1) << n) - 1, sets[] = {all, all & ~UINT64_C(1), 1u << (n - 1)};
    for (size_t s = 0; s < 3; s++) {
        if (!sets[s])
            continue;
        int lowest = 0;
        while (!(sets[s] >> lowest & 1))
            lowest++;
        for (int policy = COX_GATHER_RANK0; policy <= COX_GATHER_FIRST_ERROR; policy++) {
            const struct test_how how = {.gather = (enum cox_gather)policy, .ranks = sets[s]};
            OWN_COMPLETION c = {0};
            assert_int_equal(test_call_how(g, &c, &how, "pid"), 0);
            assert_int_equal(c.rank_count, n);
            assert_int_equal(c.payload_rank, policy == COX_GATHER_RANK0 ? lowest : -1);
            for (uint32_t rank = 0; rank < n; rank++) {
                bool asked = sets[s] >> rank & 1;
                bool payload = asked && (policy == COX_GATHER_ALL ||
                                         (policy == COX_GATHER_RANK0 && (int)rank == lowest));
                assert_int_equal(c.ranks[rank].outcome,
                                 asked ? COX_OUTCOME_OK : COX_OUTCOME_NOT_ASKED);
                assert_int_equal(c.ranks[rank].has_payload, payload);
                if (payload)
                    assert_int_equal(atoi(c.ranks[rank].bytes), c.ranks[rank].pid);
            }
        }
    }
    const struct test_how none = {.gather = COX_GATHER_NONE};
    assert_int_equal(test_call_how(g, NULL, &none, "pid"), COX_INVALID);
}

GROUPS_TEST(m4_an_error_of_any_rank_is_the_end_under_every_policy)
{
    for (int policy = COX_GATHER_RANK0; policy <= COX_GATHER_FIRST_ERROR; policy++)
        for (uint32_t bad = 0; bad < n; bad++) {
            const struct test_how how = {.gather = (enum cox_gather)policy};
            OWN_COMPLETION c = {0};
            char named[64];
            assert_int_equal(
                test_call_how(g, &c, &how, "only %" PRIu32 " fail 7 the words of it", bad),
                COX_REJECTED);
            assert_int_equal(c.status, COX_REJECTED);
            snprintf(named, sizeof named, "rank %" PRIu32 " failed: the words of it", bad);
            assert_contains(c.text, named);
            for (uint32_t rank = 0; rank < n; rank++) {
                const struct test_rank *r = &c.ranks[rank];
                if (rank == bad) {
                    assert_int_equal(r->outcome, COX_OUTCOME_ERROR);
                    assert_int_equal(r->code, 7);
                    assert_string_equal(r->text, "the words of it");
                    assert_false(r->has_payload);
                } else {
                    assert_true(r->outcome == COX_OUTCOME_OK || r->outcome == COX_OUTCOME_LATE);
                    assert_true(r->outcome == COX_OUTCOME_OK || r->text[0]);
                }
            }
        }
    test_expect_echo(g, "still here");
}

TEST(m4_p1_an_error_or_a_death_does_not_wait_for_the_others)
{
    static const char *const ends[] = {"fail 9 ouch", "exit 3", "kill 9"};
    for (size_t e = 0; e < 3; e++)
        for (uint32_t n = 2; n <= 8; n *= 2) {
            OWN_GROUP *g = test_group_start(n, NULL);
            struct test_pipe *pipe = test_pipe_new();
            const struct test_how how = {.gather = COX_GATHER_ALL,
                                         .timeout_ms = 10 * TEST_PATIENCE_MS};
            /* Rank 0 blocks, rank 1 ends it, the others reply. */
            assert_int_equal(
                test_submit(g, &how, "each block %s|%s|echo x", test_pipe_path(pipe), ends[e]), 0);
            const struct test_completion *c = test_await(g, 0);
            assert_int_equal(c->status, e == 0 ? COX_REJECTED : COX_PEER_DEAD);
            assert_int_equal(c->ranks[0].outcome, COX_OUTCOME_LATE);
            const struct test_rank *bad = &c->ranks[1];
            assert_int_equal(bad->outcome, e == 0 ? COX_OUTCOME_ERROR : COX_OUTCOME_DEAD);
            assert_int_equal(bad->exit_status, e == 1 ? 3 : -1);
            assert_int_equal(bad->signal, e == 2 ? SIGKILL : 0);
            assert_contains(c->text, e == 0   ? "ouch"
                                     : e == 1 ? "exited with status 3"
                                              : "signal 9");
            test_await_lines(g, 0, "blocked", 1);
            test_pipe_release(pipe, 1);
            if (e == 0) {
                test_expect_echo(g, "still here");
            } else {
                assert_int_equal(test_call(g, NULL, "echo x"), COX_PEER_DEAD);
                assert_contains(test_error_text(g), "rank 1");
                test_await_death(g, 1);
                assert_contains(test_death_text(g, 1), "rank 1");
                const struct test_how living = {.gather = COX_GATHER_ALL, .ranks = 1};
                assert_int_equal(test_call_how(g, NULL, &living, "echo x"), 0);
            }
        }
}

/* ---- completions ---- */

/* Each way to end, several at a time: a completion per request, in order, and no other. */
TEST(m5_every_request_completes_once)
{
    static const struct {
        const char *first;
        int status;
    } cases[] = {
        {"echo x", 0},
        {"only 1 fail 5 no", COX_REJECTED},
        {"only 1 block %s", COX_TIMEOUT},
        {"only 1 kill 9", COX_PEER_DEAD},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        OWN_GROUP *g = test_group_start(2, NULL);
        struct test_pipe *pipe = test_pipe_new();
        char command[128];
        int contexts[4];
        snprintf(command, sizeof command, cases[i].first, test_pipe_path(pipe));
        for (size_t k = 0; k < 4; k++) {
            struct test_how how = {.gather = COX_GATHER_ALL, .context = &contexts[k]};
            if (cases[i].status == COX_TIMEOUT)
                how.timeout_ms = k == 0 ? 100 : TEST_PATIENCE_MS;
            int r = test_submit(g, &how, "%s", k == 0 ? command : "echo later");
            /* After a death or an error, what follows may be refused: then it has no completion. */
            if (r) {
                assert_true(k > 0 && (r == COX_PEER_DEAD || r == COX_LATE));
                contexts[k] = -1;
                continue;
            }
            contexts[k] = 0;
        }
        if (cases[i].status == COX_TIMEOUT) {
            test_await(g, 0);
            test_pipe_release(pipe, 1);
        }
        size_t expected = 0;
        for (size_t k = 0; k < 4; k++)
            expected += contexts[k] == 0;
        for (size_t k = 0; k < expected; k++) {
            const struct test_completion *c = test_await(g, k);
            ++*(int *)c->request_context;
            assert_int_equal(c->sequence, k + 1);
            assert_int_equal(c->status, k == 0 ? cases[i].status : c->status);
            assert_true(c->submitted_ns <= c->published_ns && c->published_ns <= c->completed_ns);
            if (cases[i].status != COX_PEER_DEAD && k > 0)
                assert_int_equal(c->status, 0);
        }
        if (cases[i].status != COX_PEER_DEAD)
            test_expect_echo(g, "and nothing else");
        for (size_t k = 0; k < 4; k++)
            assert_int_equal(contexts[k], contexts[k] < 0 ? -1 : 1);
        /* Nothing comes after the stop, either. */
        cox_executor_stop(test_group_executor(g));
        assert_int_equal(test_completion_count(g), expected);
    }
}

/* At every depth, also when every frame is taken. */
TEST(m5_m15_stop_completes_what_is_outstanding)
{
    for (uint32_t n = 1; n <= 8; n *= 2) {
        OWN_GROUP *g =
            test_group_start(n, START_WITH(.depth = n, .times.finalize_ms = 1, .times.term_ms = 1));
        struct test_pipe *pipe = test_pipe_new();
        const struct test_how how = {.gather = COX_GATHER_ALL, .timeout_ms = 10 * TEST_PATIENCE_MS};
        for (size_t k = 0; k < n; k++)
            assert_int_equal(test_submit(g, &how, "block %s", test_pipe_path(pipe)), 0);
        test_await_lines(g, -1, "blocked", n);
        assert_int_equal(cox_executor_stop(test_group_executor(g)), n);
        assert_int_equal(test_completion_count(g), n);
        for (size_t k = 0; k < n; k++)
            assert_int_equal(test_await(g, k)->status, COX_CLOSED);
        assert_int_equal(test_submit(g, &how, "echo x"), COX_CLOSED);
        assert_int_equal(test_call(g, NULL, "echo x"), COX_CLOSED);
        assert_int_equal(cox_executor_stop(test_group_executor(g)), 0);
    }
}

GROUP_TEST(m5_a_deadline_does_not_wait_for_the_request_before, 2)
{
    struct test_pipe *pipe = test_pipe_new();
    const struct test_how slow = {.gather = COX_GATHER_ALL, .timeout_ms = 5000};
    const struct test_how fast = {.gather = COX_GATHER_ALL, .timeout_ms = 50};
    assert_int_equal(test_submit(g, &slow, "block %s", test_pipe_path(pipe)), 0);
    test_await_lines(g, -1, "blocked", 2);
    assert_int_equal(test_call_how(g, NULL, &fast, "echo x"), COX_TIMEOUT);
    assert_int_equal(test_completion_count(g), 0); /* the slow one is still on its way */
    test_pipe_release(pipe, 2);
    assert_int_equal(test_await(g, 0)->status, 0);
    test_expect_echo(g, "still here");
}

/* ---- handlers ---- */

struct inside {
    struct cox_executor *executor;
    atomic_int calls, call_result, submit_result, left;
};

static void handler_inside(void *context, const struct cox_completion *completion)
{
    struct inside *inside = context;
    const struct cox_submit_options *options = SUBMIT_WITH(.deadline_ns = test_patience());
    (void)completion;
    inside->call_result =
        cox_executor_call_opaque(inside->executor, "echo x", 6, options, NULL, NULL, NULL);
    if (inside->left-- > 0)
        inside->submit_result =
            cox_executor_submit_opaque(inside->executor, "echo x", 6, options, NULL, NULL);
    inside->calls++; /* last: the test looks at the rest once it sees this */
}

GROUP_TEST(m5_inside_a_handler_call_is_refused_and_submit_works, 2)
{
    struct inside inside = {.executor = executor, .left = 100};
    assert_ok(
        cox_executor_set_handler(inside.executor, COX_CHANNEL_EXECUTE, handler_inside, &inside));
    assert_int_equal(test_submit(g, &test_all, "echo x"), 0);
    AWAIT((test_expect_echo(g, "meanwhile"), inside.calls >= 101));
    assert_int_equal(inside.calls, 101);
    assert_int_equal(inside.call_result, COX_DEADLOCK);
    assert_int_equal(inside.submit_result, 0);
}

/* A deadline that was forgotten: the same words from each function that needs one. */
GROUP_TEST(m5_a_deadline_of_0_is_refused, 1)
{
    const struct cox_submit_options options = {.size = sizeof options};
    Coxswain__PDLinkRequest link = COXSWAIN__PDLINK_REQUEST__INIT;
    Coxswain__PullKVRequest pull = COXSWAIN__PULL_KVREQUEST__INIT;
    Coxswain__LoraOperationRequest lora = COXSWAIN__LORA_OPERATION_REQUEST__INIT;
    struct cox_init_summary summary;
    struct cox_link_status links;
    struct cox_pull_result *pulls;
    struct cox_lora_result loras[1];
    struct cox_recover_result recovered[1];
    size_t count;
    uint64_t sequence;
    const int64_t ended = 1;
#define REFUSED(function, ...)                                                                     \
    assert_refused(function(executor, __VA_ARGS__, test_err()), COX_INVALID, "deadline_ns is 0");  \
    assert_contains(test_error.text, "cox_deadline_after_ms")
    REFUSED(cox_executor_submit_opaque, "x", 1, &options, &sequence);
    REFUSED(cox_executor_call_opaque, "x", 1, &options, NULL, NULL);
    REFUSED(cox_executor_init, NULL, 0, 0, &summary);
    REFUSED(cox_executor_replay_init, 0);
    REFUSED(cox_executor_cleanup, &ended, 1, 0);
    REFUSED(cox_executor_link, &link, 0);
    REFUSED(cox_executor_link_status, 0, &links);
    REFUSED(cox_executor_pull_kv, &pull, 0, &pulls, &count);
    REFUSED(cox_executor_lora_results, &lora, 0, loras);
    REFUSED(cox_executor_recover, COX_RECOVER_CLEAR, 0, recovered);
    REFUSED(cox_executor_restart, 0, 0);
    REFUSED(cox_executor_restart, COX_RANK_ALL, 0);
    test_expect_echo(g, "still here");
}

GROUP_TEST(m5_a_handler_is_set_once_on_channels_that_have_one, 1)
{
    const struct cox_submit_options *options = SUBMIT_WITH(.deadline_ns = test_patience());
    assert_refused(cox_executor_submit_opaque(executor, "echo", 4, options, NULL, test_err()),
                   COX_STATE, "execute");
    for (int c = COX_CHANNEL_EXECUTE; c < COX_CHANNEL_COUNT; c++) {
        bool allowed = c == COX_CHANNEL_EXECUTE || c == COX_CHANNEL_TRANSFER;
        assert_int_equal(
            cox_executor_set_handler(executor, (enum cox_channel_id)c, test_handler, g),
            allowed ? 0 : COX_INVALID);
        assert_int_equal(
            cox_executor_set_handler(executor, (enum cox_channel_id)c, test_handler, g),
            allowed ? COX_BUSY : COX_INVALID);
        /* Nothing in its place: the one there was stays. */
        assert_int_equal(cox_executor_set_handler(executor, (enum cox_channel_id)c, NULL, NULL),
                         COX_INVALID);
    }
    assert_ok(cox_executor_submit_opaque(executor, "echo", 4, options, NULL, test_err()));
    assert_int_equal(test_await(g, 0)->status, 0);
}

struct counter {
    atomic_int calls;
    /* no call may come any more */
    atomic_bool retired;
    atomic_bool violated;
};

static void handler_count(void *context, const struct cox_completion *completion)
{
    struct counter *counter = context;
    (void)completion;
    if (counter->retired)
        counter->violated = true;
    counter->calls++;
}

static int counted(const struct counter *counters, size_t count)
{
    int calls = 0;
    for (size_t i = 0; i < count; i++)
        calls += counters[i].calls;
    return calls;
}

GROUP_TEST(m5_another_handler_is_set_while_requests_run, 2)
{
    static struct counter counters[200];
    memset(counters, 0, sizeof counters);
    const struct test_how how = {.gather = COX_GATHER_FIRST_ERROR};
    int submitted = 0;
    test_submit(g, &how, "echo x"); /* registers the handler of the library; replaced at once */
    test_await(g, 0);
    for (size_t i = 0; i < 200; i++) {
        assert_ok(
            cox_executor_set_handler(executor, COX_CHANNEL_EXECUTE, handler_count, &counters[i]));
        if (i > 0)
            counters[i - 1].retired = true;
        for (int k = 0; k < 5; k++)
            submitted += test_submit_persist(g, &how, "echo x") == 0;
    }
    assert_int_equal(submitted, 1000);
    test_expect_echo(g, "behind them all"); /* its handler may run before those of the last ones */
    AWAIT(counted(counters, 200) >= 1000);
    assert_int_equal(counted(counters, 200), 1000);
    for (size_t i = 0; i < 200; i++)
        assert_false(counters[i].violated);
}

struct slow_handler {
    atomic_bool inside, replacing, left;
};

static void handler_slow(void *context, const struct cox_completion *completion)
{
    struct slow_handler *slow = context;
    (void)completion;
    slow->inside = true;
    AWAIT(slow->replacing);
    /* Long enough for a set_handler that does not wait to return. */
    uint64_t until_ns = cox_deadline_after_ms(20);
    while (cox_now_ns() < until_ns)
        sched_yield();
    slow->left = true;
}

GROUP_TEST(m5_set_handler_waits_for_the_handler_that_runs, 1)
{
    struct slow_handler slow = {false};
    assert_ok(cox_executor_set_handler(executor, COX_CHANNEL_EXECUTE, handler_slow, &slow));
    assert_int_equal(test_submit(g, &test_all, "echo x"), 0);
    AWAIT(slow.inside);
    slow.replacing = true;
    assert_ok(cox_executor_set_handler(executor, COX_CHANNEL_EXECUTE, test_handler, g));
    assert_true(slow.left);
    assert_int_equal(test_submit(g, &test_all, "echo y"), 0);
    assert_string_equal(test_await(g, 0)->ranks[0].bytes, "y");
}

TEST(m5_full_at_depth_then_room_again)
{
    for (uint32_t depth = 1; depth <= 8; depth++) {
        OWN_GROUP *g = test_group_start(2, START_WITH(.depth = depth));
        struct test_pipe *pipe = test_pipe_new();
        const struct test_how how = {.gather = COX_GATHER_RANK0};
        for (uint32_t k = 0; k < depth; k++)
            assert_int_equal(test_submit(g, &how, "only 1 block %s", test_pipe_path(pipe)), 0);
        assert_int_equal(test_submit(g, &how, "echo x"), COX_FULL);
        assert_contains(test_error_text(g), "in flight");
        const struct test_how brief = {.gather = COX_GATHER_RANK0, .timeout_ms = 20};
        assert_int_equal(test_call_how(g, NULL, &brief, "echo x"), COX_TIMEOUT);
        assert_int_equal(test_completion_count(g), 0);
        test_pipe_release(pipe, depth);
        test_await(g, depth - 1);
        assert_int_equal(test_submit(g, &how, "echo y"), 0);
        assert_int_equal(test_await(g, depth)->status, 0);
    }
}

struct caller {
    struct test_group *group;
    int number, good, result;
    atomic_int *started;
};

static void check_own(void *context, const struct cox_completion *completion)
{
    struct caller *caller = context;
    char expected[32];
    int length = snprintf(expected, sizeof expected, "%d.%d", caller->number, caller->good);
    for (uint32_t rank = 0; rank < completion->rank_count && completion->status == 0; rank++)
        if (completion->ranks[rank].size != (size_t)length ||
            memcmp(completion->ranks[rank].bytes, expected, (size_t)length) != 0)
            return;
    caller->good += completion->status == 0;
}

static void *caller_main(void *argument)
{
    struct caller *caller = argument;
    do {
        char text[32];
        int length = snprintf(text, sizeof text, "echo %d.%d", caller->number, caller->good);
        int before = caller->good;
        caller->result = cox_executor_call_opaque(
            test_group_executor(caller->group), text, (size_t)length,
            SUBMIT_WITH(.gather = COX_GATHER_ALL, .deadline_ns = test_patience()), check_own,
            caller, NULL);
        if (before == 0)
            atomic_fetch_add(caller->started, 1);
        if (caller->result == 0 && caller->good != before + 1)
            caller->result = COX_CORRUPT; /* another's reply */
    } while (caller->result == 0);
    return NULL;
}

/* Many threads call, and each gets its own reply, until the group is stopped under them; then each
 * gets an end. */
TEST(m5_callers_on_many_threads_and_a_stop_among_them)
{
    for (int round = 0; round < 10; round++) {
        OWN_GROUP *g = test_group_start(2, NULL);
        pthread_t threads[6];
        struct caller callers[6];
        atomic_int started = 0;
        for (int i = 0; i < 6; i++) {
            callers[i] = (struct caller){.group = g, .number = i, .started = &started};
            threads[i] = test_thread(caller_main, &callers[i]);
        }
        AWAIT((test_expect_echo(g, "one more"), started >= 6));
        cox_executor_stop(test_group_executor(g));
        for (int i = 0; i < 6; i++) {
            assert_int_equal(pthread_join(threads[i], NULL), 0);
            assert_true(callers[i].good > 0);
            assert_true(callers[i].result == COX_CLOSED || callers[i].result == COX_PEER_DEAD);
        }
    }
}

TEST(m5_p1_rounds_with_and_without_a_spin_before_sleep)
{
    enum { ROUND_COUNT = 3000, FLIGHT = 4 };
    static const enum cox_spin spins[] = {COX_SPIN_MAX, COX_SPIN_OFF};
    test_needs_processes();
    for (size_t i = 0; i < sizeof spins / sizeof spins[0]; i++) {
        OWN_GROUP *g = test_group_start(1, START_WITH(.spin = spins[i], .depth = FLIGHT));
        for (size_t round = 0; round < ROUND_COUNT; round++)
            test_expect_echo(g, "round");
        /* The rank is killed at one of these, or after them. */
        for (size_t n = 0; n < FLIGHT; n++)
            assert_int_equal(test_submit(g, &test_all, "echo round"), 0);
        assert_int_equal(kill(cox_executor_pid(test_group_executor(g), 0), SIGKILL), 0);
        for (size_t n = 0; n < FLIGHT; n++) {
            const struct test_completion *c = test_await(g, n);
            assert_true(c->status == 0 || c->status == COX_PEER_DEAD);
            if (c->status) {
                assert_int_equal(c->ranks[0].signal, SIGKILL);
                assert_contains(c->text, "signal 9");
            }
        }
        test_await_death(g, 0);
        assert_int_equal(test_call(g, NULL, "echo x"), COX_PEER_DEAD);
        assert_contains(test_error_text(g), "signal 9");
    }
}
