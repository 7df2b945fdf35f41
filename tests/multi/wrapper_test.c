/* Workers inside a wrapper: a shell that starts the real worker and stays. The process that serves
 * the rank is then a grandchild, and each of the two may die alone. */
#include "channel/base/peer.h"
#include "testing.h"

/* The wrapper's last command replaces it, so that nothing of it outlives a kill. */
#define WORKER COX_TEST_BIN_DIR "/scripted_worker \"$@\""
static const char *const stays[] = {"sh", "-c", WORKER "; exec sleep 1000", "sh", NULL};
static const char *const says[] = {"sh", "-c", WORKER "; echo done", "sh", NULL};

static struct test_group *group_of(const char *const *command, uint32_t rank_count)
{
    return test_group_start(
        rank_count, START_WITH(.workers.command = command,
                               .times.finalize_ms = command == stays ? 200 : TEST_PATIENCE_MS));
}

#define OWN_PEER _cox_cleanup_(cox_peer_close) struct cox_peer

/* The process that serves a rank, while it is alive. */
static struct cox_peer peer_of(struct test_group *g, uint32_t rank)
{
    const struct test_how how = {.gather = COX_GATHER_ALL, .ranks = UINT64_C(1) << rank};
    OWN_COMPLETION c = {0};
    struct cox_peer peer = COX_PEER_NONE;
    assert_int_equal(test_call_how(g, &c, &how, "pid"), 0);
    pid_t pid = atoi(c.ranks[rank].bytes);
    assert_int_not_equal(pid, cox_executor_pid(test_group_executor(g), rank));
    assert_int_equal(cox_peer_open(pid, 0, &peer), 0);
    return peer;
}

static bool peer_ends(const struct cox_peer *peer)
{
    struct pollfd fd = {.fd = peer->pidfd, .events = POLLIN};
    return poll(&fd, 1, TEST_PATIENCE_MS) == 1;
}

TEST(m1_a_wrapped_worker_serves)
{
    for (uint32_t n = 1; n <= 4; n *= 2) {
        struct test_group *g = group_of(stays, n);
        struct cox_peer peers[4];
        for (int k = 0; k < 20; k++)
            test_expect_echo(g, "through a wrapper");
        for (uint32_t rank = 0; rank < n; rank++)
            peers[rank] = peer_of(g, rank);
        uint64_t begin = cox_now_ns();
        test_group_free(g);
        assert_true(cox_now_ns() - begin < TEST_PATIENCE_MS * COX_NSEC_PER_MSEC);
        for (uint32_t rank = 0; rank < n; rank++) {
            assert_true(peer_ends(&peers[rank]));
            cox_peer_close(&peers[rank]);
        }
    }
}

TEST(p1_the_death_of_the_real_worker_is_reported_at_once)
{
    for (int busy = 0; busy < 2; busy++) {
        OWN_GROUP *g = group_of(stays, 2);
        struct test_pipe *pipe = test_pipe_new();
        OWN_PEER peer = peer_of(g, 1), wrapper = COX_PEER_NONE;
        assert_ok(cox_peer_open(cox_executor_pid(test_group_executor(g), 1), 0, &wrapper));
        const struct test_how how = {.gather = COX_GATHER_ALL, .timeout_ms = 10 * TEST_PATIENCE_MS};
        if (busy) { /* with a request in its hand */
            assert_int_equal(test_submit(g, &how, "only 1 block %s", test_pipe_path(pipe)), 0);
            test_await_lines(g, 1, "blocked", 1);
        }
        assert_int_equal(kill(peer.pid, SIGKILL), 0);
        if (busy) {
            const struct test_completion *c = test_await(g, 0);
            assert_int_equal(c->status, COX_PEER_DEAD);
            assert_int_equal(c->ranks[1].outcome, COX_OUTCOME_DEAD);
            assert_contains(c->text, "rank 1 (pid ");
        }
        test_await_death(g, 1);
        char real[128];
        snprintf(real, sizeof real,
                 "rank 1 (pid %d, in its wrapper %d) is dead; how is known only to its wrapper",
                 peer.pid, wrapper.pid);
        assert_contains(test_death_text(g, 1), real);
        assert_true(peer_ends(&wrapper));
        assert_int_equal(test_call(g, NULL, "echo x"), COX_PEER_DEAD);
        assert_contains(test_error_text(g), real);
        const struct test_how living = {.gather = COX_GATHER_ALL, .ranks = 1};
        assert_int_equal(test_call_how(g, NULL, &living, "echo x"), 0);
    }
}

TEST(p1_the_death_of_a_wrapper_is_the_end_of_its_worker)
{
    OWN_GROUP *g = group_of(stays, 2);
    OWN_PEER peer = peer_of(g, 1);
    assert_int_equal(kill(cox_executor_pid(test_group_executor(g), 1), SIGKILL), 0);
    assert_true(peer_ends(&peer));
    test_await_death(g, 1);
    assert_contains(test_death_text(g, 1), "rank 1");
    assert_contains(test_death_text(g, 1), "signal 9");
    assert_int_equal(test_call(g, NULL, "echo x"), COX_PEER_DEAD);
}

/* Neither of the two listens; the stop ends all the same. */
TEST(m9_a_stop_ends_wrappers_that_stay)
{
    OWN_GROUP *g = group_of(stays, 2);
    struct cox_peer peers[2] = {peer_of(g, 0), peer_of(g, 1)};
    test_stop_process(peers[1].pid);
    uint64_t begin = cox_now_ns();
    assert_int_equal(cox_executor_stop(test_group_executor(g)), 2);
    assert_true(cox_now_ns() - begin < TEST_PATIENCE_MS * COX_NSEC_PER_MSEC);
    for (uint32_t rank = 0; rank < 2; rank++) {
        assert_true(peer_ends(&peers[rank]));
        cox_peer_close(&peers[rank]);
    }
    test_await_lines(g, 0, "finalized", 1); /* those that could have left in order */
}

TEST(m9_the_last_words_of_a_wrapper_are_heard)
{
    OWN_GROUP *g = group_of(says, 4);
    test_expect_echo(g, "x");
    assert_int_equal(cox_executor_stop(test_group_executor(g)), 0);
    for (int rank = 0; rank < 4; rank++) {
        assert_int_equal(test_count_lines(g, rank, "finalized"), 1);
        assert_int_equal(test_count_lines(g, rank, "done"), 1);
    }
}

/* The wrapper is alive, and is not the process that should have replied. */
TEST(p3_a_report_names_the_serving_process)
{
    OWN_GROUP *g = group_of(stays, 2);
    OWN_PEER peer = peer_of(g, 1);
    const struct test_how brief = {.gather = COX_GATHER_ALL, .timeout_ms = 200};
    OWN_COMPLETION c = {0};
    test_stop_process(peer.pid);
    assert_int_equal(test_call_how(g, &c, &brief, "echo x"), COX_TIMEOUT);
    char expected[64];
    snprintf(expected, sizeof expected, "rank 1 (pid %d) ", peer.pid);
    assert_contains(c.text, expected);
    assert_contains(c.text, "alive but stopped by a signal");
    assert_int_equal(c.ranks[1].pid, peer.pid);
    kill(peer.pid, SIGCONT);
}

/* Of a group that does not start: the process that printed "pid N", watched from then on. */
struct said {
    pthread_mutex_t lock;
    struct cox_peer peer;
};

static void on_said(void *context, uint32_t rank, bool is_stderr, const char *text)
{
    struct said *said = context;
    (void)rank;
    (void)is_stderr;
    pthread_mutex_lock(&said->lock);
    if (strncmp(text, "pid ", 4) == 0 && said->peer.pidfd < 0)
        cox_peer_open(atoi(text + 4), 0, &said->peer);
    pthread_mutex_unlock(&said->lock);
}

static int fail_in(uint64_t timeout_ms, const char *script, struct said *said)
{
    const char *const command[] = {"sh", "-c", script, "sh", NULL};
    const struct cox_executor_options options = {
        .size = sizeof(struct cox_executor_options),
        .rank_count = 2,
        .workers.command = command,
        .times.start_timeout_ms = timeout_ms,
        .hooks.context = said,
        .hooks.line = on_said,
    };
    *said = (struct said){.lock = PTHREAD_MUTEX_INITIALIZER, .peer = COX_PEER_NONE};
    struct cox_executor *executor = NULL;
    int r = cox_executor_start(&options, &executor, NULL);
    assert_null(executor);
    return r;
}

/* A start that fails with this code; with more time where the worker did not get so far. */
static void fail_to_start(const char *script, int code, struct said *said)
{
    uint64_t timeout_ms = 1000;
    for (; fail_in(timeout_ms, script, said) != code || said->peer.pidfd < 0; timeout_ms *= 4) {
        assert_true(timeout_ms < TEST_PATIENCE_MS);
        cox_peer_close(&said->peer);
    }
}

/* Rank 1 attached, in a wrapper; rank 0 never does. */
TEST(m15_no_worker_outlives_a_start_that_failed)
{
    struct said said;
    fail_to_start(
        "[ $COXSWAIN_RANK = 0 ] && exec sleep 1000; sh -c 'echo pid $$; exec " COX_TEST_BIN_DIR
        "/scripted_worker'; true",
        COX_TIMEOUT, &said);
    assert_true(peer_ends(&said.peer));
    cox_peer_close(&said.peer);
}

/* It has left its wrapper and the wrapper's group, is refused for it, and only the group's memory
 * tells it so. */
TEST(m15_a_stranger_that_attached_leaves)
{
    struct said said;
    fail_to_start(
        "[ $COXSWAIN_RANK = 0 ] && exec sleep 1000; (setsid sh -c 'echo pid $$; exec " COX_TEST_BIN_DIR
        "/scripted_worker' &); exec sleep 1000",
        COX_DENIED, &said);
    assert_true(peer_ends(&said.peer));
    cox_peer_close(&said.peer);
}

/* A group without a hook for lines, of workers that write "out" and "err"; both streams of this
 * process are `fd` meanwhile. */
static int run_into(int fd)
{
    static const char *const command[] = {"sh", "-c", "echo out; echo err >&2; exec " WORKER, "sh",
                                          NULL};
    struct cox_executor *executor = NULL;
    const int out = dup(STDOUT_FILENO), err = dup(STDERR_FILENO);
    fflush(stdout);
    dup2(fd, STDOUT_FILENO);
    dup2(fd, STDERR_FILENO);
    const int r = cox_executor_start(START_WITH(.rank_count = 2, .workers.command = command),
                                     &executor, NULL);
    cox_executor_free(executor);
    dup2(out, STDOUT_FILENO);
    dup2(err, STDERR_FILENO);
    close(out);
    close(err);
    return r;
}

TEST(m14_lines_that_no_hook_takes_are_printed)
{
    char text[4096];
    int fds[2];
    assert_int_equal(pipe(fds), 0);
    assert_int_equal(run_into(fds[1]), 0);
    close(fds[1]);
    const ssize_t size = read(fds[0], text, sizeof text - 1);
    assert_true(size > 0);
    text[size] = '\0';
    assert_contains(text, "rank 0: out\n");
    assert_contains(text, "rank 0: err\n");
    assert_contains(text, "rank 1: out\n");
    assert_contains(text, "rank 1: err\n");
    close(fds[0]);
}

/* Nor is one killed by SIGPIPE. */
TEST(m14_a_group_whose_lines_nobody_reads_starts_and_ends)
{
    static const char filler[4096];
    int fds[2];
    assert_int_equal(pipe(fds), 0);
    fcntl(fds[1], F_SETFL, O_NONBLOCK);
    while (write(fds[1], filler, sizeof filler) > 0)
        ;
    fcntl(fds[1], F_SETFL, 0);
    assert_int_equal(run_into(fds[1]), 0);
    close(fds[0]);
    assert_int_equal(run_into(fds[1]), 0);
    close(fds[1]);
}
