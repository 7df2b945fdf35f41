/* Completions for a host with an event loop: it sleeps in poll on cox_executor_fd, and collects
 * what is there. Nothing here waits inside the library. */
#include "coordinator/executor/executor_internal.h"
#include "testing.h"

#include <sys/epoll.h>

#define EXECUTE COX_CHANNEL_EXECUTE
#define DEPTH 4

static struct test_group *start(uint32_t rank_count)
{
    return test_group_start(rank_count,
                            START_WITH(.collect = true, .depth = DEPTH, .times.finalize_ms = 300));
}

/* What was collected last. */
static struct cox_completion completions[DEPTH];
static uint32_t count;

static int executor_fd(struct test_group *g)
{
    int fd = -1;
    assert_ok(cox_executor_fd(test_group_executor(g), EXECUTE, &fd, test_err()));
    assert_true(fd > STDERR_FILENO);
    return fd;
}

static int submit(struct test_group *g, const char *text, uint64_t deadline_ns)
{
    return cox_executor_submit_opaque(
        test_group_executor(g), text, strlen(text),
        SUBMIT_WITH(.gather = COX_GATHER_ALL, .deadline_ns = deadline_ns), NULL, NULL);
}

/* After a request that ended early, some ranks may still have to reply to it. */
static void submit_persist(struct test_group *g, const char *text, uint64_t deadline_ns)
{
    int r;
    while ((r = submit(g, text, deadline_ns)) == COX_LATE || r == COX_FULL)
        sched_yield();
    assert_int_equal(r, 0);
}

static int collect_now(struct test_group *g)
{
    return cox_executor_completions(test_group_executor(g), EXECUTE, completions, DEPTH, 0, &count,
                                    NULL);
}

/* Returns how often the fd was readable for nothing until there was a completion. */
static unsigned poll_and_collect(struct test_group *g, int fd)
{
    struct pollfd polled = {.fd = fd, .events = POLLIN};
    for (unsigned nothing = 0;; nothing++) {
        int ready;
        while ((ready = poll(&polled, 1, TEST_PATIENCE_MS)) < 0)
            assert_int_equal(errno, EINTR);
        assert_int_equal(ready, 1);
        assert_int_equal(polled.revents, POLLIN);
        int r = collect_now(g);
        if (r == 0)
            return nothing;
        assert_int_equal(r, COX_TIMEOUT);
    }
}

static bool is_readable(int fd)
{
    struct pollfd polled = {.fd = fd, .events = POLLIN};
    return poll(&polled, 1, 0) == 1;
}

/* The count of a rank's eventfd, which is never read. */
static uint64_t notified(struct test_group *g, uint32_t rank)
{
    char path[64], line[128];
    unsigned long long notices = UINT64_MAX;
    snprintf(path, sizeof path, "/proc/self/fdinfo/%d", test_group_executor(g)->notify_fds[rank]);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    while (fgets(line, sizeof line, file))
        sscanf(line, "eventfd-count: %llx", &notices);
    fclose(file);
    assert_true(notices != UINT64_MAX);
    return notices;
}

static const char *block_on(const struct test_pipe *pipe)
{
    static char text[256];
    snprintf(text, sizeof text, "block %s", test_pipe_path(pipe));
    return text;
}

/* ---- requests ---- */

TEST(p4_an_event_loop_gets_every_completion)
{
    for (uint32_t n = 1; n <= 8; n *= 2) {
        OWN_GROUP *g = start(n);
        const int fd = executor_fd(g);
        uint32_t sent = 0, seen = 0;
        uint64_t nothing = 0;
        while (seen < 200) {
            char text[32];
            for (; sent < 200; sent++) {
                snprintf(text, sizeof text, "echo %u", sent);
                if (submit(g, text, test_patience()))
                    break;
            }
            nothing += poll_and_collect(g, fd);
            for (uint32_t i = 0; i < count; i++, seen++) {
                snprintf(text, sizeof text, "%u", seen);
                assert_int_equal(completions[i].status, 0);
                for (uint32_t rank = 0; rank < n; rank++) {
                    assert_int_equal(completions[i].ranks[rank].size, strlen(text));
                    assert_memory_equal(completions[i].ranks[rank].bytes, text, strlen(text));
                }
            }
        }
        print_message("# %u ranks: readable for nothing %llu times in 200 requests\n", n,
                      (unsigned long long)nothing);
    }
}

TEST(p4_replies_before_the_first_call_are_collected)
{
    OWN_GROUP *g = start(2);
    /* A group that did not ask for the fd: its ranks make no call more. */
    test_expect_echo(g, "x");
    assert_int_equal(notified(g, 0) + notified(g, 1), 0);
    assert_int_equal(submit(g, "echo y", test_patience()), 0);
    poll_and_collect(g, executor_fd(g));
    assert_int_equal(count, 1);
    assert_int_equal(completions[0].ranks[1].size, 1);

    assert_int_equal(submit(g, "echo z", test_patience()), 0);
    poll_and_collect(g, executor_fd(g));
    /* A rank notifies after its reply, which may be gathered before. */
    AWAIT(notified(g, 0) + notified(g, 1) != 0);
}

TEST(p4_what_is_not_collected_keeps_the_fd_readable)
{
    OWN_GROUP *g = start(2);
    const int fd = executor_fd(g);
    uint32_t seen = 0;
    for (int i = 0; i < DEPTH - 1; i++)
        assert_int_equal(submit(g, "echo x", test_patience()), 0);
    /* They all end in here, and one is taken. */
    test_expect_echo(g, "after them");
    assert_ok(
        cox_executor_completions(test_group_executor(g), EXECUTE, completions, 1, 0, &count, NULL));
    for (seen = 1; seen < DEPTH - 1; seen += count) {
        assert_true(is_readable(fd));
        assert_int_equal(collect_now(g), 0);
    }
    assert_int_equal(seen, DEPTH - 1);
}

/* ---- what else ends a request ---- */

TEST(a26_m4_deadlines_and_deaths_make_the_fd_readable)
{
    OWN_GROUP *g = start(4);
    const int fd = executor_fd(g);
    struct test_pipe *pipe = test_pipe_new();
    const char *text = block_on(pipe);
    assert_int_equal(submit(g, text, cox_deadline_after_ms(80)), 0);
    poll_and_collect(g, fd);
    assert_int_equal(completions[0].status, COX_TIMEOUT);
    test_pipe_release(pipe, 4);

    submit_persist(g, "each echo x|fail 7 no|echo x|echo x", test_patience());
    poll_and_collect(g, fd);
    assert_int_equal(completions[0].status, COX_REJECTED);

    submit_persist(g, text, test_patience());
    kill(cox_executor_pid(test_group_executor(g), 2), SIGKILL);
    poll_and_collect(g, fd);
    assert_int_equal(completions[0].status, COX_PEER_DEAD);
    assert_int_equal(completions[0].ranks[2].signal, SIGKILL);
    test_pipe_release(pipe, 3);
}

TEST(m4_a_deadline_before_that_of_an_earlier_request_is_kept)
{
    OWN_GROUP *g = start(2);
    const int fd = executor_fd(g);
    struct test_pipe *pipe = test_pipe_new();
    const char *text = block_on(pipe);
    assert_int_equal(submit(g, text, test_patience()), 0);
    assert_int_equal(submit(g, "echo x", cox_deadline_after_ms(10)), 0);
    poll_and_collect(g, fd);
    assert_int_equal(count, 1);
    assert_int_equal(completions[0].sequence, 2);
    assert_int_equal(completions[0].status, COX_TIMEOUT);
    test_pipe_release(pipe, 2);
    poll_and_collect(g, fd);
    assert_int_equal(completions[0].sequence, 1);
    assert_int_equal(completions[0].status, 0);
}

TEST(m13_a_replaced_rank_notifies_as_the_one_before)
{
    OWN_GROUP *g = start(2);
    const int fd = executor_fd(g);
    test_kill_rank(g, 1);
    test_restart_rank(g, 1);
    const uint64_t before = notified(g, 1);
    /* In a sealed group the last one notifies: it has to be rank 1 once. */
    for (int i = 0; i < 200 && (i == 0 || notified(g, 1) == before); i++) {
        struct test_pipe *pipe = test_pipe_new();
        char text[256];
        snprintf(text, sizeof text, "each echo x|block %s", test_pipe_path(pipe));
        submit_persist(g, text, test_patience());
        test_pipe_release(pipe, 1);
        poll_and_collect(g, fd);
        assert_int_equal(completions[0].status, 0);
    }
    assert_true(notified(g, 1) > before);
}

/* ---- nothing to do ---- */

TEST(s4_a_second_completion_makes_the_fd_readable)
{
    OWN_GROUP *g = start(2);
    struct test_pipe *pipe = test_pipe_new();
    struct cox_submit_options options = {
        .size = sizeof options, .gather = COX_GATHER_ALL, .report_late = true};
    char text[256];
    uint64_t sequence;
    const int fd = executor_fd(g);
    snprintf(text, sizeof text, "only 1 block %s", test_pipe_path(pipe));
    do /* on a machine that was held up the deadline has passed before */
        options.deadline_ns = cox_deadline_after_ms(20);
    while (cox_executor_submit_opaque(test_group_executor(g), text, strlen(text), &options,
                                      &sequence, NULL) == COX_TIMEOUT);
    poll_and_collect(g, fd);
    assert_int_equal(completions[0].status, COX_TIMEOUT);
    assert_int_equal(completions[0].ranks[1].outcome, COX_OUTCOME_LATE);
    test_pipe_release(pipe, 1);
    poll_and_collect(g, fd);
    assert_int_equal(count, 1);
    assert_int_equal(completions[0].status, COX_LATE);
    assert_int_equal(completions[0].sequence, sequence);
    assert_int_equal(completions[0].ranks[1].outcome, COX_OUTCOME_OK);
}

TEST(p6_an_idle_group_is_silent)
{
    OWN_GROUP *g = start(2);
    const int fd = executor_fd(g);
    for (int i = 0; i < 10; i++) {
        submit_persist(g, "echo x", test_patience());
        poll_and_collect(g, fd);
    }
    /* The timer of the last request, and in a named group a reply that was seen before its rank had
     * notified. After that, nothing until the test's own patience for silence ends. */
    unsigned readable = 0;
    struct pollfd polled = {.fd = fd, .events = POLLIN};
    while (poll(&polled, 1, 300) == 1) {
        assert_int_equal(collect_now(g), COX_TIMEOUT);
        readable++;
        assert_true(readable <= 4);
    }
}

TEST(p4_it_works_in_an_epoll_of_the_host)
{
    OWN_GROUP *g = start(2);
    const int fd = executor_fd(g), loop = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    uint32_t seen = 0;
    assert_true(loop >= 0);
    assert_int_equal(epoll_ctl(loop, EPOLL_CTL_ADD, fd, &event), 0);
    for (int i = 0; i < 50; i++, seen += count) {
        submit_persist(g, "echo x", test_patience());
        do
            assert_int_equal(epoll_wait(loop, &event, 1, TEST_PATIENCE_MS), 1);
        while (collect_now(g) != 0);
    }
    assert_int_equal(seen, 50);
    close(loop);
}

/* ---- several threads ---- */

#define CALLS 300

struct caller {
    struct test_group *group;
    int failed;
};

static void *call(void *context)
{
    struct caller *caller = context;
    for (int i = 0; i < CALLS; i++)
        caller->failed += test_call(caller->group, NULL, "echo c") != 0;
    return NULL;
}

/* The thread of a call gathers, also what the event loop has submitted. */
TEST(p4_calls_of_other_threads_take_nothing_from_the_loop)
{
    struct caller caller = {.group = start(2)};
    const int fd = executor_fd(caller.group);
    uint32_t sent = 0, seen = 0;
    pthread_t thread = test_thread(call, &caller);
    while (seen < CALLS) {
        while (sent < CALLS && submit(caller.group, "echo s", test_patience()) == 0)
            sent++;
        if (sent == seen) { /* no room: the calls have it all */
            sched_yield();
            continue;
        }
        poll_and_collect(caller.group, fd);
        for (uint32_t i = 0; i < count; i++)
            assert_int_equal(completions[i].status, 0);
        seen += count;
    }
    pthread_join(thread, NULL);
    assert_int_equal(caller.failed, 0);
    test_group_free(caller.group);
}

static void *stop(void *context)
{
    cox_executor_stop(context);
    return NULL;
}

TEST(p4_a_stop_is_reported)
{
    OWN_GROUP *g = start(2);
    const int fd = executor_fd(g);
    struct pollfd polled = {.fd = fd, .events = POLLIN};
    struct test_pipe *pipe = test_pipe_new();
    uint32_t closed = 0;
    int r = COX_TIMEOUT;
    assert_int_equal(submit(g, block_on(pipe), COX_DEADLINE_NEVER), 0);
    pthread_t thread = test_thread(stop, test_group_executor(g));
    while (r != COX_CLOSED) {
        assert_int_equal(poll(&polled, 1, TEST_PATIENCE_MS), 1);
        r = collect_now(g);
        closed += r == 0 && completions[0].status == COX_CLOSED;
    }
    pthread_join(thread, NULL);
    assert_int_equal(closed, 1);
    test_pipe_release(pipe, 2);
}

/* ---- refusals ---- */

TEST(p4_wrong_use_is_refused)
{
    int fd = -1, again = -1;
    struct test_group *g = start(1);
    struct cox_executor *executor = test_group_executor(g);
    assert_int_equal(cox_executor_fd(executor, COX_CHANNEL_LINK, &fd, test_err()), COX_INVALID);
    assert_ok(cox_executor_fd(executor, EXECUTE, &fd, test_err()));
    assert_ok(cox_executor_fd(executor, EXECUTE, &again, test_err()));
    assert_int_equal(fd, again);
    assert_ok(cox_executor_fd(executor, COX_CHANNEL_TRANSFER, &again, test_err()));
    assert_int_not_equal(fd, again);
    test_group_free(g);

    g = test_group_start(1, NULL);
    assert_refused(cox_executor_fd(test_group_executor(g), EXECUTE, &fd, test_err()), COX_STATE,
                   "collect");
    test_group_free(g);
}
