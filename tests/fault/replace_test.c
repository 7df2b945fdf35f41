/* Workers that are started by hand, and processes that ranks get later, are killed and stopped at
 * each step of their attach: a start that waits for them continues to wait, or fails and names the
 * rank. Then the coordinator is killed while ranks get other processes. */
#include "tests/multi/hand.h"

#include "channel/attach/named/names.h"
#include "channel/shm/control.h"
#include "channel/base/fault.h"
#include "channel/base/peer.h"

#if COX_TESTING

#define NATIVE COX_TEST_BIN_DIR "/legacy_native"
#define PASSAGE_COUNT 4

/* In the order in which a worker passes them. */
static const char *const points[] = {
    "control_socket.connected", "control_socket.asked", "attach.accepted",
    "attach.control",           "attach.claimed",       "attach.channel",
    "attach.identity",          "attach.announced",     "attached",
};
#define POINT_COUNT (sizeof points / sizeof points[0])
/* From here on the coordinator knows the process as rank 1, and before, it cannot. */
#define FIRST_KNOWN 2
#define LAST_UNKNOWN 0
/* From here on it has said that it is there. */
#define FIRST_ANNOUNCED 7
/* A worker that the coordinator starts inherits the memory, and passes none before. */
#define FIRST_INHERITED 3
/* How long a start waits, at first. */
#define BRIEF_MS 500
#define BRIEF_FACTOR 4
/* How long a start may take to look at the last rank. */
#define HELD_MS 300

/* plan NULL: none. */
static pid_t worker_start(const struct hand *hand, const char *rank, const char *plan)
{
    setenv("COXSWAIN_RANK", rank, 1);
    if (plan)
        setenv("COXSWAIN_FAULT", plan, 1);
    pid_t pid = hand_worker(hand, NULL);
    unsetenv("COXSWAIN_RANK");
    unsetenv("COXSWAIN_FAULT");
    return pid;
}

static pid_t worker_start_at(const struct hand *hand, uint32_t rank, size_t p, const char *action)
{
    char plan[64];
    snprintf(plan, sizeof plan, "%s:%s:%" PRIu32, points[p], action, rank);
    return worker_start(hand, rank ? "1" : "0", plan);
}

/* Until it has ended, and was reaped by any process. */
static void worker_gone(pid_t pid)
{
    AWAIT(waitpid(pid, NULL, WNOHANG) != 0);
    assert_true(waitpid(pid, NULL, WNOHANG) < 0 && errno == ECHILD);
}

/* ---- a start ---- */

TEST(p1_b53_a_worker_killed_on_its_way_in)
{
    test_needs_processes();
    for (size_t p = 0; p < POINT_COUNT; p++) {
        struct hand hand = {0};
        hand_open(&hand, 2, test_attach());
        worker_gone(worker_start_at(&hand, 1, p, "kill"));
        /* Two others; they are late if the start has ended. */
        pid_t others[2] = {worker_start(&hand, "0", NULL), worker_start(&hand, "1", NULL)};
        pthread_join(hand.thread, NULL);
        const bool missed = hand.result == COX_PEER_DEAD && p > LAST_UNKNOWN &&
                            strstr(hand.err.text, "rank 1 (pid ");
        if (hand.result == 0 ? p >= FIRST_KNOWN : !missed)
            fail_msg("%s: %d: %s", points[p], hand.result, hand.err.text);
        if (hand.result == 0)
            test_expect_echo(hand.group, "by hand");
        hand_free(&hand);
        worker_gone(others[0]);
        worker_gone(others[1]);
    }
}

/* The supervisor has no processor from the death until long after the last rank has attached. */
TEST(p1_b53_a_death_that_the_supervisor_has_not_seen_yet_ends_the_start)
{
    test_needs_processes();
    for (size_t p = FIRST_ANNOUNCED; p < POINT_COUNT; p++) {
        struct hand hand = {0};
        cox_fault_arm("death.seen:hold:coordinator");
        hand_open(&hand, 2, test_attach());
        pid_t dead = worker_start_at(&hand, 1, p, "kill");
        worker_gone(dead);
        pid_t other = worker_start(&hand, "0", "attached:stop:0");
        test_await_stopped(other);
        const struct timespec until = cox_deadline_timespec(cox_deadline_after_ms(HELD_MS));
        bool ended = pthread_clockjoin_np(hand.thread, NULL, CLOCK_MONOTONIC, &until) == 0;
        cox_fault_arm(NULL);
        kill(other, SIGCONT);
        if (!ended)
            pthread_join(hand.thread, NULL);
        char named[32];
        snprintf(named, sizeof named, "rank 1 (pid %d)", dead);
        if (hand.result != COX_PEER_DEAD || !strstr(hand.err.text, named))
            fail_msg("%s: %d: %s", points[p], hand.result, hand.err.text);
        worker_gone(other);
        hand_free(&hand);
    }
}

TEST(p3_b52_a_worker_stopped_on_its_way_in_is_waited_for)
{
    test_needs_processes();
    for (size_t p = 0; p < POINT_COUNT; p++) {
        struct hand hand = {0};
        hand_open(&hand, 2, test_attach());
        pid_t stopped = worker_start_at(&hand, 1, p, "stop");
        pid_t other = worker_start(&hand, "0", NULL);
        test_await_stopped(stopped);
        assert_int_equal(kill(stopped, SIGCONT), 0);
        hand_complete(&hand);
        test_expect_echo(hand.group, "by hand");
        hand_free(&hand);
        worker_gone(stopped);
        worker_gone(other);
    }
}

/* One start, rank 0 stopped on its way in. True: it was named with its state. False: the machine
 * may have been too slow for it to come so far in time. */
static bool names_the_stopped(size_t p, uint64_t timeout_ms)
{
    struct hand hand = {.options.times.start_timeout_ms = timeout_ms};
    char named[64];
    int status = 0;
    hand_open(&hand, 2, test_attach());
    pid_t stopped = worker_start_at(&hand, 0, p, "stop"), other = worker_start(&hand, "1", NULL);
    assert_int_equal(waitpid(stopped, &status, WUNTRACED), stopped);
    pthread_join(hand.thread, NULL);
    snprintf(named, sizeof named, "rank 0 (pid %d) is alive", stopped);
    bool known = strstr(hand.err.text, named) != NULL;
    bool told = known && strstr(hand.err.text, "stopped by a signal") && WIFSTOPPED(status);
    bool unknown = strstr(hand.err.text, "rank 0 has not attached in time: start it");
    if (!known && WIFSTOPPED(status))
        kill(stopped, SIGKILL); /* the group did not know it */
    if (!told)
        print_message("%s, %" PRIu64 " ms: %s\n", points[p], timeout_ms, hand.err.text);
    if (hand.result != COX_TIMEOUT || (!known && !unknown) || (known && p <= LAST_UNKNOWN))
        fail_msg("%s: %d: %s", points[p], hand.result, hand.err.text);
    if (WIFSTOPPED(status))
        worker_gone(stopped);
    worker_gone(other);
    hand_free(&hand);
    return told || (unknown && WIFSTOPPED(status) && p < FIRST_KNOWN);
}

TEST(p3_b2_a_start_with_a_deadline_names_the_worker_that_is_stopped)
{
    test_needs_processes();
    /* Behind the last two it has said that it is there. */
    for (size_t p = 0; p + 2 < POINT_COUNT; p++) {
        uint64_t timeout_ms = BRIEF_MS;
        while (!names_the_stopped(p, timeout_ms) && timeout_ms < TEST_PATIENCE_MS)
            timeout_ms *= BRIEF_FACTOR;
        assert_true(timeout_ms < TEST_PATIENCE_MS);
    }
}

/* ---- a replacement ---- */

static void group_by_hand(struct hand *hand, pid_t pids[2])
{
    hand_open(hand, 2, test_attach());
    pids[0] = worker_start(hand, "0", NULL);
    pids[1] = worker_start(hand, "1", NULL);
    hand_complete(hand);
    hand_kill(hand, 1);
}

static void group_end(struct hand *hand, const pid_t pids[2])
{
    test_expect_echo(hand->group, "by hand");
    hand_free(hand);
    for (int i = 0; i < 2; i++)
        assert_int_equal(hand_worker_end(pids[i]), 0);
}

static void replacement_comes(struct order *order, struct hand *hand, const pid_t pids[2],
                              const char *what)
{
    if (order_end(order))
        fail_msg("%s: %d: %s", what, order->result, order->err.text);
    group_end(hand, pids);
}

/* A worker started by hand, killed at the point; another one comes later. */
static void replaced_at(size_t p)
{
    struct hand hand = {0};
    struct order order;
    pid_t pids[2];
    group_by_hand(&hand, pids);
    order_give(&order, &hand, 1, COX_DEADLINE_NEVER, 1);
    pid_t struck = worker_start_at(&hand, 1, p, "kill");
    assert_int_equal(hand_worker_end(struck), 128 + SIGKILL);
    if (p <= LAST_UNKNOWN) { /* the wait continues */
        pids[1] = worker_start(&hand, "1", NULL);
        replacement_comes(&order, &hand, pids, points[p]);
        return;
    }
    /* Where it is not sure to be known, an end of the wait is brought about by another one. */
    pid_t second = p < FIRST_KNOWN ? worker_start(&hand, "1", NULL) : 0;
    int r = order_end(&order);
    if (r && r != COX_PEER_DEAD)
        fail_msg("%s: %d: %s", points[p], r, order.err.text);
    if (r)
        assert_contains(order.err.text, "rank 1 (pid ");
    if (r == 0 && second) {
        pids[1] = second;
        group_end(&hand, pids);
        return;
    }
    if (second)
        assert_int_equal(hand_worker_end(second), 1); /* refused */
    /* It may have been in the group before it was struck. */
    const struct test_how how = {.gather = COX_GATHER_ALL, .ranks = 2};
    assert_int_equal(test_call_how(hand.group, NULL, &how, "echo still there?"), COX_PEER_DEAD);
    order_give(&order, &hand, 1, COX_DEADLINE_NEVER, 2);
    pids[1] = worker_start(&hand, "1", NULL);
    replacement_comes(&order, &hand, pids, points[p]);
}

TEST(p1_p8_a_replacement_killed_on_its_way_in)
{
    test_needs_processes();
    for (size_t p = 0; p < POINT_COUNT; p++)
        replaced_at(p);
}

TEST(p3_p8_a_replacement_stopped_on_its_way_in_is_waited_for)
{
    test_needs_processes();
    for (size_t p = 0; p < POINT_COUNT; p++) {
        struct hand hand = {0};
        struct order order;
        pid_t pids[2];
        group_by_hand(&hand, pids);
        order_give(&order, &hand, 1, COX_DEADLINE_NEVER, 1);
        pids[1] = worker_start_at(&hand, 1, p, "stop");
        test_await_stopped(pids[1]);
        assert_int_equal(kill(pids[1], SIGCONT), 0);
        replacement_comes(&order, &hand, pids, points[p]);
    }
}

/* ---- all ranks, one of the new ones is struck ---- */

static void all_struck_at(const char *point, const char *action, uint32_t rank)
{
    char plan[64];
    snprintf(plan, sizeof plan, "%s:%s:%" PRIu32, point, action, rank);
    setenv("COXSWAIN_FAULT_INCARNATION", "2", 1);
    setenv("COXSWAIN_FAULT", plan, 1);
    OWN_GROUP *group = test_group_start(3, START_WITH(.memory.attach = test_attach()));
    unsetenv("COXSWAIN_FAULT_INCARNATION");
    unsetenv("COXSWAIN_FAULT");
    struct cox_executor *executor = test_group_executor(group);
    int r = cox_executor_restart(executor, COX_RANK_ALL, test_patience(), test_err());
    char named[32];
    snprintf(named, sizeof named, "rank %" PRIu32 " (pid ", rank);
    if (r && (r != COX_PEER_DEAD || !strstr(test_error.text, named)))
        fail_msg("%s: %d: %s", plan, r, test_error.text);
    /* It had attached when it was struck: then it is a death as any other. */
    if (r == 0)
        r = test_call(group, NULL, "echo still there?");
    assert_int_equal(r, COX_PEER_DEAD);
    if (cox_executor_restart(executor, COX_RANK_ALL, test_patience(), test_err()))
        fail_msg("%s: %s", plan, test_error.text);
    test_expect_echo(group, "again");
}

TEST(p1_p8_one_of_all_killed_on_its_way_in)
{
    test_needs_processes();
    for (size_t p = FIRST_INHERITED; p < POINT_COUNT; p++)
        for (uint32_t rank = 0; rank < 3; rank++)
            all_struck_at(points[p], "kill", rank);
}

/* ---- the coordinator is killed ---- */

enum kind { OWN, BY_HAND, LEGACY };
static const char kind_letters[] = "ohl";

/* Workers that attach by themselves, started by another process. */
static void start_two(void *context, const char *name, const char *control_socket)
{
    struct hand hand;
    (void)context, (void)name;
    snprintf(hand.control_socket, sizeof hand.control_socket, "%s", control_socket);
    for (int i = 0; i < 2; i++)
        hand_worker(&hand, NULL);
}

static void end_one(struct cox_executor *executor)
{
    struct cox_executor_status status;
    struct cox_rank_status ranks[2];
    cox_executor_kill(executor, 1, NULL);
    do
        cox_executor_read_status(executor, &status, ranks);
    while (ranks[1].liveness != COX_LIVENESS_DEAD);
}

/* This program again: a coordinator that starts all ranks of its group once more, and is struck
 * then. */
static int driver_main(const char *kind_name_plan)
{
    static const char *const scripted[] = {COX_TEST_BIN_DIR "/scripted_worker", NULL};
    static const char *const native[] = {NATIVE, NULL};
    char name[64], plan[64];
    char kind = kind_name_plan[0];
    if (sscanf(kind_name_plan + 1, "%63[^,],%63s", name, plan) != 2)
        return 2;
    const struct cox_executor_options options = {
        .size = sizeof(struct cox_executor_options),
        .name = name,
        .rank_count = 2,
        .workers.command = kind == 'l' ? native : scripted,
        .memory.attach = kind == 'l' ? COX_ATTACH_NAMED : test_attach(),
        .workers.legacy = kind == 'l',
        .workers.external = kind == 'h',
        .hooks.waiting = start_two,
        .memory.request_size = {16384, 16384, 16384, 16384},
        .memory.response_size = {kind == 'l' ? 1 << 20 : 131072, kind == 'l' ? 1 << 20 : 131072,
                                 kind == 'l' ? 1 << 20 : 131072, kind == 'l' ? 8 << 20 : 131072},
        .times.start_timeout_ms = TEST_PATIENCE_MS,
    };
    struct cox_executor *executor = NULL;
    int r = cox_executor_start(&options, &executor, test_err());
    if (r == 0 && kind == 'h')
        end_one(executor);
    cox_fault_arm(plan);
    if (r == 0 && kind == 'h') /* no worker comes */
        r = cox_executor_restart(executor, 1, cox_deadline_after_ms(100), test_err()) == COX_TIMEOUT
                ? 0
                : 1;
    else if (r == 0)
        r = cox_executor_restart(executor, COX_RANK_ALL, test_patience(), test_err());
    cox_fault_arm(NULL);
    if (r)
        fprintf(stderr, "%d: %s\n", r, test_error.text);
    cox_executor_free(executor);
    return r != 0;
}

/* True: it was struck. All that it had started ends, and of its names nothing is in the way. */
static bool coordinator_struck(enum kind kind, const char *point, uint32_t passage)
{
    char name[64], argument[256];
    int status = 0;
    test_unique_name(name);
    snprintf(argument, sizeof argument, "%c%s,%s:kill:coordinator:%" PRIu32, kind_letters[kind],
             name, point, passage);
    struct test_helper driver = test_helper_start("driver", argument);
    int ended = test_helper_wait(&driver);
    if (ended != 0 && ended != 128 + SIGKILL)
        fail_msg("%s: it ended with %d", argument, ended);
    /* Its processes are this one's children now. */
    while (waitpid(-1, &status, 0) > 0 || errno == EINTR)
        continue;
    if (kind == LEGACY) {
        uint32_t count;
        if (cox_control_sweep(name, &count, test_err()))
            fail_msg("%s: %s", argument, test_error.text);
    }
    if (test_count_names(name))
        fail_msg("%s: %zu names are left", argument, test_count_names(name));
    if (ended)
        test_sweep_sockets(1);
    return ended != 0;
}

static void each_passage(enum kind kind, const char *const *struck_points)
{
    for (size_t p = 0; struck_points[p]; p++) {
        uint32_t passage = 1;
        while (passage <= PASSAGE_COUNT && coordinator_struck(kind, struck_points[p], passage))
            passage++;
        if (passage == 1)
            fail_msg("nobody passes %s", struck_points[p]);
    }
}

TEST(p1_p8_a_coordinator_killed_while_it_starts_all_again)
{
    test_needs_processes();
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    static const char *const named[] = {
        "death.seen",       "death.stored",      "death.reported", "rank.left_out", "rank.reset",
        "semaphore.filled", "semaphore.renewed", "launch.forked",  "rank.admitted", NULL};
    static const char *const sealed[] = {
        "death.seen",     "death.stored", "death.reported", "rank.left_out", "memory.created",
        "memory.renewed", "rank.reset",   "launch.forked",  "rank.admitted", NULL};
    each_passage(OWN, test_attach() == COX_ATTACH_SEALED ? sealed : named);
}

TEST(p1_p8_a_coordinator_killed_while_it_starts_legacy_workers_again)
{
    test_needs_processes();
    test_needs_names();
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    static const char *const struck[] = {
        "region.named", "region.created", "region.renewed", "token.taken",
        "rank.reset",   "launch.forked",  "rank.admitted",  NULL};
    each_passage(LEGACY, struck);
}

TEST(p1_p8_a_coordinator_killed_while_it_waits_for_a_replacement)
{
    test_needs_processes();
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    static const char *const struck[] = {"rank.left_out", "rank.reset", "rank.offered",
                                         "rank.admitted", NULL};
    each_passage(BY_HAND, struck);
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "driver") == 0)
        return driver_main(argv[2]);
    return test_run(NULL, NULL);
}

#endif
