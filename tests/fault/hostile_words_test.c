/* hostile_words: one byte, bit, frame or word of the shared memory of a group is changed. See
 * hostile_fixture.h for what must hold. */
#include "channel/attach/named/names.h"
#include "channel/shm/state.h"
#include "coordinator/executor/executor_internal.h"
#include "proto/executor.pb-c.h"
#include "proto/wire.h"
#include "hostile_fixture.h"

static void goodbye_completed(void *context, const struct cox_completion *completion)
{
    atomic_store((_Atomic int *)context, completion->status);
}

/* The workers are halted while the frame of a step is written over with a finalize of its length.
 */
TEST(p10_a_frame_turned_into_a_goodbye_ends_no_process)
{
    char name[64], path[128];
    struct test_group *group = group_start(2, test_unique_name(name));
    struct cox_executor *executor = test_group_executor(group);
    for (uint32_t rank = 0; rank < 2; rank++)
        test_stop_process(cox_executor_pid(executor, rank));
    Coxswain__ExecuteRequest request = COXSWAIN__EXECUTE_REQUEST__INIT;
    request.has_execute_type = request.has_trace_id = 1;
    request.execute_type = COXSWAIN__EXECUTE_TYPE__MODEL_INFER;
    request.trace_id = UINT64_MAX;
    const struct cox_submit_options options = {
        .size = sizeof(struct cox_submit_options),
        .gather = COX_GATHER_ALL,
        .deadline_ns = cox_deadline_after_ms(TEST_PATIENCE_MS),
    };
    uint64_t sequence;
    _Atomic int status = -1;
    assert_ok(cox_executor_set_handler(executor, COX_CHANNEL_EXECUTE, goodbye_completed, &status));
    assert_int_equal(cox_executor_submit(executor, &request, &options, &sequence, NULL), 0);

    /* execute_type 2, then an unknown field up to the same length. */
    uint8_t goodbye[64] = {0x08, 0x02, 0x7a};
    size_t length = cox_wire_request_size(&request);
    assert_in_range(length, 5, sizeof goodbye);
    goodbye[3] = (uint8_t)(length - 4);
    size_t frame_size = test_request_size_max(executor, COX_CHANNEL_EXECUTE) + 4;
    snprintf(path, sizeof path, "/dev/shm/%s_execute_request", name);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    off_t offset = (off_t)(frame_size * (sequence % 4) + 4);
    assert_int_equal(pwrite(fd, goodbye, length, offset), length);
    close(fd);

    for (uint32_t rank = 0; rank < 2; rank++)
        kill(cox_executor_pid(executor, rank), SIGCONT);
    while (atomic_load(&status) == -1) /* ends with the deadline at the latest */
        sched_yield();
    assert_int_equal(atomic_load(&status), COX_CORRUPT);
    expect_own(group);
    group_end(group);
}

/* ---- flips ---- */

static void control_attach(struct cox_control *control, const char *name)
{
    assert_ok(cox_control_attach(control, name, test_err()));
}

/* A test over a group of two and what all can write of it. */
#define CONTROL_TEST(test)                                                                         \
    static void test##_in(struct test_group *group, struct cox_control *control);                  \
    TEST(test)                                                                                     \
    {                                                                                              \
        char name[64];                                                                             \
        struct test_group *group = group_start(2, test_unique_name(name));                         \
        _cox_cleanup_(cox_control_close) struct cox_control control = COX_CONTROL_NONE;            \
        control_attach(&control, name);                                                            \
        assert_ok(cox_executor_set_handler(test_group_executor(group), COX_CHANNEL_EXECUTE,        \
                                           on_completion, NULL));                                  \
        test##_in(group, &control);                                                                \
        group_end(group);                                                                          \
    }                                                                                              \
    static void test##_in(struct test_group *group, struct cox_control *control)

/* Every byte, in an order of its own, as far as the time goes; all of its bits at once, so that it
 * is another one. */
TEST(p10_b14_a_flipped_byte_gives_an_error_at_most)
{
    enum { RANK_COUNT = 2 };
    static uint32_t
        offsets[sizeof(struct cox_layout_control) + RANK_COUNT * sizeof(struct cox_layout_rank)];
    const uint32_t count = sizeof offsets / sizeof offsets[0];
    uint32_t statuses[COX_STATUS_COUNT] = {0}, done = 0, restarts = 0;
    uint64_t end_ns = cox_deadline_after_ms(FLIPS_MS);
    char name[64];
    for (uint32_t i = 0; i < count; i++)
        offsets[i] = i;
    shuffle(offsets, count);
    test_unique_name(name);
    struct test_group *group = group_start(RANK_COUNT, name);
    struct cox_control control = COX_CONTROL_NONE;
    control_attach(&control, name);
    expect_own(group);
    for (; done < count && cox_now_ns() < end_ns; done++) {
        enum verdict verdict = OWN;
        _Atomic uint8_t *byte = (_Atomic uint8_t *)control.region.base + offsets[done];
        uint8_t bits = (uint8_t)(done % 2 ? 0xff : 1u << done / 2 % 8);
        /* relaxed: a meddler's byte has no partner. */
        atomic_fetch_xor_explicit(byte, bits, memory_order_relaxed);
        int r = call_checked(group, DEADLINE_MS, &verdict);
        statuses[r]++;
        if (verdict != OWN)
            fail_msg("byte %" PRIu32 " flipped by %02x: a reply that is none", offsets[done], bits);
        if (group_works(group))
            continue;
        group_end(group);
        cox_control_close(&control);
        group = group_start(RANK_COUNT, name);
        control_attach(&control, name);
        expect_own(group);
        restarts++;
    }
    group_end(group);
    cox_control_close(&control);
    print_message("%" PRIu32 " of %" PRIu32 " bytes flipped, %" PRIu32 " groups given up;", done,
                  count, restarts);
    /* There is no byte that a group does not get over; a machine that is too busy for that is
     * not the group's fault. */
    assert_true(restarts < 4);
    for (int s = 0; s < COX_STATUS_COUNT; s++)
        if (statuses[s])
            print_message(" %" PRIu32 " %s;", statuses[s], cox_status_text(s));
    print_message("\n");
    assert_true(done > 100);
}

/* Flipping any bit of the abort line ends no group, on no channel; only the coordinator's store
 * does. */
CONTROL_TEST(p10_a_bit_of_the_abort_line_ends_no_process)
{
    _Atomic uint8_t *line = (_Atomic uint8_t *)&control->layout->abort;
    for (uint32_t bit = 0; bit < 8 * sizeof control->layout->abort; bit++) {
        /* relaxed: a meddler's byte has no partner. */
        atomic_fetch_xor_explicit(&line[bit / 8], (uint8_t)(1u << bit % 8), memory_order_relaxed);
        expect_own(group);
        struct cox_link_status links;
        int r =
            cox_executor_link_status(test_group_executor(group),
                                     cox_deadline_after_ms(TEST_PATIENCE_MS), &links, test_err());
        if (r != COX_REJECTED) /* these workers know no links, and say so */
            fail_msg("link status: %d: %s", r, test_error.text);
        atomic_fetch_xor_explicit(&line[bit / 8], (uint8_t)(1u << bit % 8), memory_order_relaxed);
    }
    cox_state_abort(control);
    enum verdict verdict;
    uint64_t deadline_ns = cox_deadline_after_ms(TEST_PATIENCE_MS);
    int r = 0;
    while ((r == 0 || r == COX_TIMEOUT) && cox_now_ns() < deadline_ns)
        r = call_checked(group, DEADLINE_MS, &verdict);
    assert_int_equal(r, COX_PEER_DEAD);
}

/* So many have ended in time, each once. */
static void load_await(struct load *load, size_t count)
{
    assert_int_equal(load_await_count(load, count), count);
    assert_int_equal(load->late + load->twice + load->foreign + load->odd, 0);
}

/* Every word in which a side publishes its progress, changed by one bit or more, while ranks are
 * idle and while they owe a reply: its writer stores it again. */
CONTROL_TEST(p10_overwritten_words_are_stored_again)
{
    static struct load load;
    struct cox_layout_rank_line *line = cox_state_line(control, 1, COX_CHANNEL_EXECUTE);
    struct cox_layout_channel_state *shared = cox_state_channel(control, COX_CHANNEL_EXECUTE);
    _Atomic uint64_t *const words[][2] = {{&shared->published, NULL},
                                          {&line->taken, NULL},
                                          {&line->returned, NULL},
                                          {&line->done, NULL},
                                          {&line->returned, &line->done}};
    pid_t pid = cox_executor_pid(test_group_executor(group), 1);
    for (size_t w = 0; w < sizeof words / sizeof words[0]; w++)
        for (uint64_t mask = 1; mask < 256; mask = mask == 128 ? 0xff : mask * 2)
            for (int busy = 0; busy < 2; busy++) {
                expect_own(group);
                load_init(&load);
                if (busy) {
                    test_stop_process(pid);
                    assert_int_equal(load_submit(group, &load), 0);
                    assert_int_equal(load_submit(group, &load), 0);
                }
                /* relaxed: a meddler's word has no partner. Downwards, where the bits are set. */
                for (size_t i = 0; i < 2 && words[w][i]; i++)
                    atomic_fetch_and_explicit(words[w][i], ~mask, memory_order_relaxed);
                if (busy)
                    assert_int_equal(kill(pid, SIGCONT), 0);
                if (!group_works(group))
                    fail_msg("word %zu without bits %02x, %s: the group does not work any more", w,
                             (unsigned)mask, busy ? "busy" : "idle");
                load_await(&load, load.submitted);
                load_deinit(&load);
            }
}

/* A rank that replied sleeps; before its reply is read, `done` is reset. */
CONTROL_TEST(p10_a_reply_that_was_reset_is_stored_again)
{
    static struct load load;
    struct cox_layout_rank_line *line = cox_state_line(control, 0, COX_CHANNEL_EXECUTE);
    struct cox_executor *executor = test_group_executor(group);
    _Atomic uint32_t *sleeping = &executor->collectors[COX_CHANNEL_EXECUTE].sleeping;
    for (int round = 0; round < 10; round++) {
        expect_own(group);
        load_init(&load);
        uint64_t before = atomic_load(&line->done);
        for (uint32_t rank = 0; rank < 2; rank++)
            test_stop_process(cox_executor_pid(executor, rank));
        assert_int_equal(load_submit(group, &load), 0);
        /* The collector sleeps on rank 1, and looks at rank 0 once a slice only. */
        AWAIT(atomic_load(sleeping) == 2);
        assert_int_equal(kill(cox_executor_pid(executor, 0), SIGCONT), 0);
        AWAIT(atomic_load(&line->done) != before);
        atomic_store(&line->done, before);
        assert_int_equal(kill(cox_executor_pid(executor, 1), SIGCONT), 0);
        load_await(&load, 1); /* in vain; the next request shows that a rank owes a reply */
        if (!group_works(group))
            fail_msg("round %d: the group does not work any more", round);
        load_deinit(&load);
    }
}

/* ---- cost ---- */

static uint64_t cpu_ns(pid_t pid)
{
    clockid_t clock;
    struct timespec used;
    assert_int_equal(clock_getcpuclockid(pid, &clock), 0);
    assert_int_equal(clock_gettime(clock, &used), 0);
    return (uint64_t)used.tv_sec * COX_NSEC_PER_SEC + (uint64_t)used.tv_nsec;
}

/* This measures a span of time: it must not wait for a rank. */
CONTROL_TEST(p10_p5_a_wild_sequence_number_costs_neither_cpu_nor_hearing)
{
    enum { STRETCH_MS = 300 };
    static struct load load;
    uint64_t before[2];
    pid_t pids[2];
    expect_own(group);
    for (uint32_t rank = 0; rank < 2; rank++)
        test_stop_process(pids[rank] = cox_executor_pid(test_group_executor(group), rank));
    /* They find it with a request. */
    load_init(&load);
    assert_int_equal(load_submit(group, &load), 0);
    /* relaxed: a meddler's word has no partner. */
    atomic_store_explicit(&cox_state_channel(control, COX_CHANNEL_EXECUTE)->published, UINT64_MAX,
                          memory_order_relaxed);
    for (uint32_t rank = 0; rank < 2; rank++)
        kill(pids[rank], SIGCONT);
    load_await(&load, 1);
    load_deinit(&load);
    for (uint32_t rank = 0; rank < 2; rank++)
        before[rank] = cpu_ns(pids[rank]);
    uint64_t end_ns = cox_deadline_after_ms(STRETCH_MS);
    const struct timespec until = {(time_t)(end_ns / COX_NSEC_PER_SEC),
                                   (long)(end_ns % COX_NSEC_PER_SEC)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR)
        continue;
    for (uint32_t rank = 0; rank < 2; rank++) {
        uint64_t used_ms = (cpu_ns(pids[rank]) - before[rank]) / COX_NSEC_PER_MSEC;
        if (used_ms > STRETCH_MS / 4)
            fail_msg("rank %" PRIu32 " used %" PRIu64 " ms of CPU in %d ms", rank, used_ms,
                     STRETCH_MS);
    }
    /* Nor did a rank follow the number to a request that never comes. */
    if (!group_works(group))
        fail_msg("the group is deaf");
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "worker") == 0)
        return checked_worker_main(argc, argv);
    const int failed = test_run(NULL, NULL);
    const int late = punctual_check(&requests) + punctual_check(&stops);
    return failed ? failed : late;
}
