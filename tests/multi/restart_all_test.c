/*
 * All ranks of a group are started again, and what a restart of one has in common with that; ranks
 * are killed by order: requirements P8, A23 and A24.
 */
#include "channel/base/peer.h"
#include "testing.h"

static uint64_t echo_sequence(struct test_group *g)
{
    OWN_COMPLETION c = {0};
    assert_int_equal(test_call(g, &c, "echo which number?"), 0);
    uint64_t sequence = c.sequence;
    return sequence;
}

TEST(p8_all_ranks_are_replaced)
{
    for (uint32_t n = 1; n <= 8; n *= n == 1 ? 4 : 2) {
        OWN_GROUP *g = test_group_start(n, NULL);
        pid_t pids[8];
        for (uint32_t rank = 0; rank < n; rank++)
            pids[rank] = test_pid(g, rank);
        test_expect_echo(g, "before");
        uint64_t sequence = echo_sequence(g);
        test_restart_rank(g, COX_RANK_ALL);
        /* Numbers go on. */
        assert_int_equal(echo_sequence(g), sequence + 1);
        for (uint32_t rank = 0; rank < n; rank++) {
            assert_int_not_equal(test_pid(g, rank), pids[rank]);
            assert_int_equal(test_served(g, rank), 2);
        }
        test_restart_rank(g, COX_RANK_ALL);
        test_expect_echo(g, "after");
    }
}

TEST(a24_what_is_in_flight_ends_by_a_death)
{
    for (uint32_t n = 1; n <= 8; n *= n == 1 ? 4 : 2) {
        OWN_GROUP *g = test_group_start(n, START_WITH(.depth = 4));
        struct test_pipe *pipe = test_pipe_new();
        for (int k = 0; k < 4; k++)
            assert_int_equal(test_submit(g, &test_all, "block %s", test_pipe_path(pipe)), 0);
        for (uint32_t rank = 0; rank < n; rank++)
            test_await_lines(g, (int)rank, "blocked", 1);
        test_restart_rank(g, COX_RANK_ALL);
        /* Their completions were handed over before the first new process was started. */
        assert_int_equal(test_completion_count(g), 4);
        for (size_t k = 0; k < 4; k++)
            assert_int_equal(test_await(g, k)->status, COX_PEER_DEAD);
        for (int k = 0; k < 10; k++)
            test_expect_echo(g, "after");
        for (uint32_t rank = 0; rank < n; rank++)
            assert_int_equal(test_served(g, rank), 11);
    }
}

GROUP_TEST(p3_p8_with_a_stopped_and_a_dead_one, 4)
{
    pid_t stopped = test_pid(g, 2);
    test_stop_process(stopped);
    test_kill_rank(g, 1);
    test_restart_rank(g, COX_RANK_ALL);
    assert_int_not_equal(test_pid(g, 2), stopped);
    test_expect_echo(g, "all four");
}

/* Whichever process reaps it. */
static void assert_ended(pid_t pid)
{
    struct cox_peer peer = COX_PEER_NONE;
    if (cox_peer_open(pid, 0, &peer) == 0)
        assert_false(cox_peer_alive(&peer));
    cox_peer_close(&peer);
}

TEST(p3_p8_a_stopped_rank_is_killed)
{
    char line[300];
    snprintf(line, sizeof line, "%s \"$@\"; exit $?", test_worker_program());
    const char *const wrapped[] = {"sh", "-c", line, "worker", NULL};
    for (int w = 0; w < 2; w++) {
        OWN_GROUP *g = test_group_start(2, START_WITH(.workers.command = w ? wrapped : NULL));
        struct cox_executor *executor = test_group_executor(g);
        struct cox_executor_status status;
        struct cox_rank_status ranks[2];
        cox_executor_read_status(executor, &status, ranks);
        assert_int_equal(ranks[1].serving_pid != ranks[1].pid, w);
        test_stop_process(ranks[1].serving_pid);
        if (w)
            test_stop_process(ranks[1].pid);
        assert_ok(cox_executor_kill(executor, 1, test_err()));
        test_await_death(g, 1);
        assert_ended(ranks[1].serving_pid);
        assert_ended(ranks[1].pid);
        assert_ok(cox_executor_kill(executor, 1, test_err())); /* it is dead */
        const struct test_how first = {.gather = COX_GATHER_ALL, .ranks = 1};
        assert_int_equal(test_call_how(g, NULL, &first, "echo alone"), 0);
        assert_refused(cox_executor_kill(executor, 2, test_err()), COX_INVALID,
                       "there is no rank 2");
        test_restart_rank(g, 1);
        test_expect_echo(g, "both");
    }
}

/* ---- one rank, or all of them ---- */

static const uint32_t targets[] = {1, COX_RANK_ALL};

/* With a rank to start again. mode: what the ranks do in the incarnations behind it. */
static struct test_group *start_for(uint32_t target, const char *mode, const char *second)
{
    const char *const command[] = {test_worker_program(), mode, "2", second, NULL};
    struct test_group *g = test_group_start(2, START_WITH(.workers.command = command));
    if (target != COX_RANK_ALL)
        test_kill_rank(g, target);
    return g;
}

/* What is not restarted serves. */
static void expect_half(struct test_group *g, uint32_t target)
{
    const struct test_how living = {.gather = COX_GATHER_ALL, .ranks = 1};
    assert_int_equal(test_call(g, NULL, "echo both"), COX_PEER_DEAD);
    assert_int_equal(test_call_how(g, NULL, &living, "echo alone"),
                     target == COX_RANK_ALL ? COX_PEER_DEAD : 0);
}

/* New processes that die on their way: the group is as before and can be tried again. */
TEST(p8_those_that_die_half_way_are_started_again)
{
    for (int i = 0; i < 2; i++) {
        OWN_GROUP *g = start_for(targets[i], "dies", "3");
        for (int k = 0; k < 2; k++) {
            assert_refused(cox_executor_restart(test_group_executor(g), targets[i], test_patience(),
                                                test_err()),
                           COX_PEER_DEAD, "killed by signal 9");
            if (i == 0)
                assert_contains(test_error.text, "rank 1 ");
            expect_half(g, targets[i]);
        }
        test_restart_rank(g, targets[i]);
        test_expect_echo(g, "both");
    }
}

TEST(p8_b2_those_that_never_attach)
{
    for (int i = 0; i < 2; i++) {
        OWN_GROUP *g = start_for(targets[i], "sleeps", NULL);
        struct cox_executor_status status;
        struct cox_rank_status ranks[2] = {{0}};
        /* On a machine that is busy enough they are not even started by then. */
        for (uint64_t ms = 500; ranks[1].incarnation != 2; ms *= 4) {
            assert_int_equal(cox_executor_restart(test_group_executor(g), targets[i],
                                                  cox_deadline_after_ms(ms), test_err()),
                             COX_TIMEOUT);
            expect_half(g, targets[i]);
            cox_executor_read_status(test_group_executor(g), &status, ranks);
        }
        assert_contains(test_error.text, "did not attach in time");
        test_restart_rank(g, targets[i]);
        test_expect_echo(g, "both");
    }
}

/* ---- beside others ---- */

struct restarter {
    struct cox_executor *executor;
    uint32_t target;
    int status;
};

static void *restarter_main(void *argument)
{
    struct restarter *restarter = argument;
    restarter->status =
        cox_executor_restart(restarter->executor, restarter->target, test_patience(), NULL);
    return NULL;
}

GROUP_TEST(p8_two_ranks_at_once, 4)
{
    for (int k = 0; k < 5; k++) {
        struct restarter restarters[2] = {{executor, 1, 0}, {executor, 3, 0}};
        pthread_t threads[2];
        for (int i = 0; i < 2; i++)
            test_kill_rank(g, restarters[i].target);
        for (int i = 0; i < 2; i++)
            threads[i] = test_thread(restarter_main, &restarters[i]);
        for (int i = 0; i < 2; i++) {
            pthread_join(threads[i], NULL);
            assert_int_equal(restarters[i].status, 0);
        }
        test_expect_echo(g, "all four");
    }
}

TEST(m15_a_stop_ends_it)
{
    for (int i = 0; i < 2; i++) {
        OWN_GROUP *g = start_for(targets[i], "sleeps", NULL);
        struct cox_executor *executor = test_group_executor(g);
        struct restarter restarter = {executor, targets[i], 0};
        pthread_t thread = test_thread(restarter_main, &restarter);
        test_await_lines(g, 1, "sleeps as told", 1);
        /* One at a time. */
        assert_int_equal(cox_executor_restart(executor, COX_RANK_ALL, test_patience(), NULL),
                         COX_BUSY);
        assert_int_equal(cox_executor_restart(executor, 1, test_patience(), NULL), COX_BUSY);
        cox_executor_stop(executor);
        pthread_join(thread, NULL);
        assert_int_equal(restarter.status, COX_CLOSED);
        assert_int_equal(cox_executor_restart(executor, targets[i], test_patience(), NULL),
                         COX_CLOSED);
    }
}

/* Lets the supervisor thread start nothing until a restart has ended, or for 20 s. */
struct busy_hook {
    atomic_bool entered, restart_ended, in_time;
};

static void death_of_rank_0(void *context, uint32_t rank, const char *text)
{
    struct busy_hook *hook = context;
    const uint64_t until_ns = cox_deadline_after_ms(20000);
    (void)text;
    if (rank != 0)
        return;
    atomic_store(&hook->entered, true);
    while (!atomic_load(&hook->restart_ended) && cox_now_ns() < until_ns)
        nanosleep(&(struct timespec){.tv_nsec = COX_NSEC_PER_MSEC}, NULL);
    atomic_store(&hook->in_time, atomic_load(&hook->restart_ended));
}

struct hooked_restarter {
    struct restarter restarter;
    struct busy_hook *hook;
};

static void *hooked_restarter_main(void *argument)
{
    struct hooked_restarter *hooked = argument;
    restarter_main(&hooked->restarter);
    atomic_store(&hooked->hook->restart_ended, true);
    return NULL;
}

static void kill_rank(struct cox_executor *executor, uint32_t rank)
{
    struct cox_executor_status status;
    struct cox_rank_status ranks[2];
    cox_executor_read_status(executor, &status, ranks);
    assert_int_equal(kill(ranks[rank].pid, SIGKILL), 0);
    AWAIT((cox_executor_read_status(executor, &status, ranks),
           ranks[rank].liveness == COX_LIVENESS_DEAD));
}

/* It waits for the supervisor thread, which is in the hook of another death. */
TEST(m15_a_stop_ends_one_that_has_not_begun)
{
    struct busy_hook hook = {0};
    const char *const command[] = {test_worker_program(), NULL};
    const struct cox_executor_options options = {.size = sizeof options,
                                                 .rank_count = 2,
                                                 .workers.command = command,
                                                 .memory.attach = test_attach(),
                                                 .hooks.context = &hook,
                                                 .hooks.death = death_of_rank_0};
    struct cox_executor_status status;
    struct cox_rank_status ranks[2];
    struct cox_executor *executor;
    assert_ok(cox_executor_start(&options, &executor, test_err()));
    kill_rank(executor, 1);
    kill_rank(executor, 0);
    AWAIT(atomic_load(&hook.entered));
    struct hooked_restarter hooked = {{executor, 1, 0}, &hook};
    pthread_t thread = test_thread(hooked_restarter_main, &hooked);
    AWAIT((cox_executor_read_status(executor, &status, ranks), ranks[1].incarnation == 2));
    cox_executor_stop(executor);
    pthread_join(thread, NULL);
    cox_executor_free(executor);
    assert_int_equal(hooked.restarter.status, COX_CLOSED);
    assert_true(atomic_load(&hook.in_time));
}

struct caller {
    struct cox_executor *executor;
    atomic_bool stop;
    atomic_uint good, dead;
    int other;
};

static void *caller_main(void *argument)
{
    struct caller *caller = argument;
    while (!atomic_load(&caller->stop) && !caller->other) {
        int r = cox_executor_call_opaque(
            caller->executor, "echo x", 6,
            SUBMIT_WITH(.gather = COX_GATHER_ALL, .deadline_ns = test_patience()), NULL, NULL,
            NULL);
        if (r == 0)
            atomic_fetch_add(&caller->good, 1);
        else if (r == COX_PEER_DEAD)
            atomic_fetch_add(&caller->dead, 1);
        else
            caller->other = r;
    }
    return NULL;
}

/* A concurrent call gets a reply or a death, at once and nothing else. */
GROUP_TEST(a24_p7_nothing_grows_under_load, 4)
{
    struct caller callers[2] = {{.executor = test_group_executor(g)},
                                {.executor = test_group_executor(g)}};
    pthread_t threads[2];
    size_t fds = 0;
    const char *name = cox_executor_name(test_group_executor(g));
    for (int i = 0; i < 2; i++)
        threads[i] = test_thread(caller_main, &callers[i]);
    for (int k = 0; k < 20; k++) {
        test_restart_rank(g, COX_RANK_ALL);
        assert_int_equal(test_count_names(name), 0);
        if (k == 2) {
            test_await_socket(g);
            fds = test_count_fds();
        }
        test_expect_echo(g, "between");
    }
    for (int i = 0; i < 2; i++)
        atomic_store(&callers[i].stop, true);
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(callers[i].other, 0);
        assert_true(atomic_load(&callers[i].good) > 0);
    }
    AWAIT(test_count_fds() <= fds);
    test_expect_echo(g, "at last");
}

/* ---- what the old one owed is handed over first ---- */

struct drain {
    struct cox_executor *executor;
    atomic_int status;
    atomic_bool entered, early;
};

/* Takes its time; the next process of the rank is not to be there before it has returned. */
static void drain_handler(void *context, const struct cox_completion *completion)
{
    struct drain *drain = context;
    struct cox_executor_status status;
    struct cox_rank_status ranks[2];
    uint64_t until_ns = cox_deadline_after_ms(200);
    atomic_store(&drain->status, completion->status);
    atomic_store(&drain->entered, true);
    do {
        cox_executor_read_status(drain->executor, &status, ranks);
        if (ranks[1].incarnation > 1)
            atomic_store(&drain->early, true);
    } while (cox_now_ns() < until_ns);
}

TEST(a23_the_old_one_is_drained_before_the_new_one_is_started)
{
    for (int all = 0; all < 2; all++) {
        OWN_GROUP *g = test_group_start(2, NULL);
        struct drain drain = {.executor = test_group_executor(g)};
        assert_ok(
            cox_executor_set_handler(drain.executor, COX_CHANNEL_EXECUTE, drain_handler, &drain));
        test_stop_process(test_pid(g, 1));
        assert_ok(cox_executor_submit_opaque(
            drain.executor, "echo x", 6,
            SUBMIT_WITH(.gather = COX_GATHER_ALL, .deadline_ns = test_patience()), NULL, NULL));
        test_kill_rank(g, 1);
        AWAIT(atomic_load(&drain.entered));
        test_restart_rank(g, all ? COX_RANK_ALL : 1);
        assert_int_equal(atomic_load(&drain.status), COX_PEER_DEAD);
        assert_false(atomic_load(&drain.early));
    }
}

/* ---- the log ---- */

struct log {
    pthread_mutex_t lock;
    char text[8192];
    size_t used;
};

static void log_keep(void *context, int level, const char *text)
{
    struct log *log = context;
    pthread_mutex_lock(&log->lock);
    int length =
        snprintf(log->text + log->used, sizeof log->text - log->used, "%d %s\n", level, text);
    log->used += (size_t)length;
    pthread_mutex_unlock(&log->lock);
}

TEST(a23_the_log_names_old_and_new_process)
{
    struct log log = {.lock = PTHREAD_MUTEX_INITIALIZER};
    OWN_GROUP *g = test_group_start(2, START_WITH(.hooks.log = {log_keep, &log}));
    pid_t before[2] = {test_pid(g, 0), test_pid(g, 1)};
    char line[160];
    for (int life = 0; life < 2; life++) {
        if (life == 0)
            test_kill_rank(g, 1);
        test_restart_rank(g, life == 0 ? 1 : COX_RANK_ALL);
        for (int rank = life == 0; rank < 2; rank++) {
            const int incarnation = life + rank;
            snprintf(line, sizeof line,
                     "6 rank %d: process %d (incarnation %d) is replaced by process %d "
                     "(incarnation %d)\n",
                     rank, before[rank], incarnation, test_pid(g, (uint32_t)rank), incarnation + 1);
            assert_contains(log.text, line);
            before[rank] = test_pid(g, (uint32_t)rank);
        }
    }
}
