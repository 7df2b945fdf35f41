/* Workers that are started by hand, killed and stopped at each step of their attach: the start that
 * waits for them continues to wait, or fails and names the rank. */
#include "testing.h"

#include "channel/base/fault.h"
#include "channel/socket/control_socket.h"

#if COX_TESTING

/* How long a start waits, at first. */
#define BRIEF_MS 500
#define BRIEF_FACTOR 4

extern char **environ;

/* In the order in which a worker passes them. */
static const char *const points[] = {
    "control_socket.connected", "control_socket.asked", "attach.accepted",
    "attach.control",           "attach.claimed",       "attach.channel",
    "attach.identity",          "attach.announced",     "attached",
};
#define POINT_COUNT (sizeof points / sizeof points[0])
/* From here on the coordinator knows the process as rank 1. */
#define FIRST_KNOWN 2
#define LAST_UNKNOWN 0
/* From here on it has said that it is there. */
#define FIRST_ANNOUNCED 7
/* How long a start may take to look at the last rank. */
#define HELD_MS 300

struct hand {
    char name[64], path[COX_SOCKET_PATH_SIZE];
    uint64_t timeout_ms;
    pthread_t thread;
    struct test_group *group;
    int status;
    struct cox_error err;
};

static void *start_main(void *context)
{
    struct hand *hand = context;
    const struct cox_executor_options options = {
        .size = sizeof(struct cox_executor_options),
        .name = hand->name,
        .rank_count = 2,
        .workers.external = true,
        .times.start_timeout_ms = hand->timeout_ms,
        .times.finalize_ms = TEST_PATIENCE_MS,
    };
    hand->status = test_group_try(&options, &hand->group, &hand->err);
    return NULL;
}

static void hand_start(struct hand *hand, uint64_t timeout_ms)
{
    *hand = (struct hand){.timeout_ms = timeout_ms};
    test_unique_name(hand->name);
    assert_int_equal(cox_control_socket_find(hand->name, hand->path, NULL), 0);
    assert_int_equal(pthread_create(&hand->thread, NULL, start_main, hand), 0);
    AWAIT(access(hand->path, F_OK) >= 0);
    assert_int_equal(access(hand->path, F_OK), 0);
}

/* plan NULL: none. */
static pid_t worker_start(const struct hand *hand, const char *rank, const char *plan)
{
    char *const argv[] = {"worker", "--socket", (char *)(uintptr_t)hand->path, NULL};
    pid_t pid;
    setenv("COXSWAIN_RANK", rank, 1);
    if (plan)
        setenv("COXSWAIN_FAULT", plan, 1);
    assert_int_equal(posix_spawn(&pid, test_worker_program(), NULL, NULL, argv, environ), 0);
    unsetenv("COXSWAIN_RANK");
    unsetenv("COXSWAIN_FAULT");
    return pid;
}

/* Until it has ended, and was reaped by any process. */
static void worker_gone(pid_t pid)
{
    AWAIT(waitpid(pid, NULL, WNOHANG) != 0);
    assert_true(waitpid(pid, NULL, WNOHANG) < 0 && errno == ECHILD);
}

static void worker_stopped(pid_t pid)
{
    int status = 0;
    assert_int_equal(waitpid(pid, &status, WUNTRACED), pid);
    assert_true(WIFSTOPPED(status));
}

/* The group is complete. */
static void hand_works(struct hand *hand)
{
    if (hand->status)
        fail_msg("%d: %s", hand->status, hand->err.text);
    test_expect_echo(hand->group, "by hand");
    test_group_free(hand->group);
}

TEST(p1_b53_a_worker_killed_on_its_way_in)
{
    test_needs_processes();
    for (size_t p = 0; p < POINT_COUNT; p++) {
        struct hand hand;
        char plan[64];
        snprintf(plan, sizeof plan, "%s:kill:1", points[p]);
        hand_start(&hand, 0);
        worker_gone(worker_start(&hand, "1", plan));
        /* Two others; they are late if the start has ended. */
        pid_t others[2] = {worker_start(&hand, "0", NULL), worker_start(&hand, "1", NULL)};
        pthread_join(hand.thread, NULL);
        if (hand.status == 0) {
            if (p >= FIRST_KNOWN)
                fail_msg("%s: nobody misses the dead one", plan);
            hand_works(&hand);
        } else if (hand.status != COX_PEER_DEAD || p <= LAST_UNKNOWN ||
                   !strstr(hand.err.text, "rank 1 (pid ")) {
            fail_msg("%s: %d: %s", plan, hand.status, hand.err.text);
        }
        worker_gone(others[0]);
        worker_gone(others[1]);
    }
}

/* The supervisor has no processor from the death until long after the last rank has attached. */
TEST(p1_b53_a_death_that_the_supervisor_has_not_seen_yet_ends_the_start)
{
    test_needs_processes();
    for (size_t p = FIRST_ANNOUNCED; p < POINT_COUNT; p++) {
        struct hand hand;
        char plan[64];
        int status = 0;
        snprintf(plan, sizeof plan, "%s:kill:1", points[p]);
        cox_fault_arm("death.seen:hold:coordinator");
        hand_start(&hand, 0);
        pid_t dead = worker_start(&hand, "1", plan);
        worker_gone(dead);
        pid_t other = worker_start(&hand, "0", "attached:stop:0");
        assert_int_equal(waitpid(other, &status, WUNTRACED), other);
        assert_true(WIFSTOPPED(status));
        const struct timespec until = cox_deadline_timespec(cox_deadline_after_ms(HELD_MS));
        bool ended = pthread_clockjoin_np(hand.thread, NULL, CLOCK_MONOTONIC, &until) == 0;
        cox_fault_arm(NULL);
        kill(other, SIGCONT);
        if (!ended)
            pthread_join(hand.thread, NULL);
        char named[32];
        snprintf(named, sizeof named, "rank 1 (pid %d)", dead);
        if (hand.status != COX_PEER_DEAD || !strstr(hand.err.text, named))
            fail_msg("%s: %d: %s", plan, hand.status, hand.err.text);
        worker_gone(other);
    }
}

TEST(p3_b52_a_worker_stopped_on_its_way_in_is_waited_for)
{
    test_needs_processes();
    for (size_t p = 0; p < POINT_COUNT; p++) {
        struct hand hand;
        char plan[64];
        snprintf(plan, sizeof plan, "%s:stop:1", points[p]);
        hand_start(&hand, 0);
        pid_t stopped = worker_start(&hand, "1", plan), other = worker_start(&hand, "0", NULL);
        worker_stopped(stopped);
        assert_int_equal(kill(stopped, SIGCONT), 0);
        pthread_join(hand.thread, NULL);
        hand_works(&hand);
        worker_gone(stopped);
        worker_gone(other);
    }
}

/* One start, rank 0 stopped on its way in. True: it was named with its state. False: the machine
 * may have been too slow for it to come so far in time. */
static bool names_the_stopped(size_t p, uint64_t timeout_ms)
{
    struct hand hand;
    char plan[64], named[64];
    int status = 0;
    snprintf(plan, sizeof plan, "%s:stop:0", points[p]);
    hand_start(&hand, timeout_ms);
    pid_t stopped = worker_start(&hand, "0", plan), other = worker_start(&hand, "1", NULL);
    assert_int_equal(waitpid(stopped, &status, WUNTRACED), stopped);
    pthread_join(hand.thread, NULL);
    snprintf(named, sizeof named, "rank 0 (pid %d) is alive", stopped);
    bool known = strstr(hand.err.text, named) != NULL;
    bool told = known && strstr(hand.err.text, "stopped by a signal") && WIFSTOPPED(status);
    bool unknown = strstr(hand.err.text, "rank 0 has not attached in time: start it");
    if (!known && WIFSTOPPED(status))
        kill(stopped, SIGKILL); /* the group did not know it */
    if (!told)
        print_message("%s, %" PRIu64 " ms: %s\n", plan, timeout_ms, hand.err.text);
    if (hand.status != COX_TIMEOUT || (!known && !unknown) || (known && p <= LAST_UNKNOWN))
        fail_msg("%s: %d: %s", plan, hand.status, hand.err.text);
    if (WIFSTOPPED(status))
        worker_gone(stopped);
    worker_gone(other);
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

#endif
