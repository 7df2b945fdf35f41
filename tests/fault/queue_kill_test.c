/*
 * queue_kill_test: a process is killed at each step of a queue; the others continue, no block is
 * lost, and no process waits for the dead.
 *
 * The parent has a publisher and two subscribers, in two domains. A child does everything that a
 * process can do with a queue, and is killed at the n-th passage of a fault point, for each n until
 * it completes.
 */
#include "channel/base/fault.h"
#include "memory/pool/pool_internal.h"
#include "memory/queue/queue_internal.h"
#include "memory/queue/queue_lock.h"
#include "tests/unit/queue_fixture.h"
#include "tests/lib/test.h"

#if COX_TESTING

#define DEPTH 4
#define BLOCKS 24
/* Limit for all that a survivor does after a death; a slice is 50 ms. */
#define SURVIVAL_MS 3000

static struct cox_domains *domains;
static struct cox_pool *host, *bounce;
static struct cox_queue *queue;
static struct cox_publisher *publisher;
static struct cox_subscriber *near, *far;
static uint64_t user_data_last; /* of the last message that the parent published */

/* ---- children ---- */

/* Private state of a child. */
struct own {
    struct cox_pool *host, *bounce;
    struct cox_queue *queue;
};

static struct own attach(bool with_bounce)
{
    struct own own = {0};
    const struct cox_pool_attach_options options = {.size = sizeof(struct cox_pool_attach_options),
                                                    .domains = domains};
    int fds[2];
    cox_pool_fds(host, fds);
    COX_ASSERT(cox_pool_attach(fds, &options, &own.host, NULL) == 0);
    cox_pool_fds(bounce, fds);
    if (with_bounce)
        COX_ASSERT(cox_pool_attach(fds, &options, &own.bounce, NULL) == 0);
    COX_ASSERT(cox_queue_attach(cox_queue_fd(queue), NULL, &own.queue, NULL) == 0);
    return own;
}

static void detach(struct own *own)
{
    cox_queue_free(own->queue);
    cox_pool_free(own->host);
    cox_pool_free(own->bounce);
}

static void take_all(struct cox_subscriber *subscriber, uint32_t count_max)
{
    for (uint32_t i = 0; i < count_max; i++) {
        struct cox_message message;
        int r = cox_subscriber_take(subscriber, &message, test_err());
        if (r == COX_EMPTY)
            return;
        if (r)
            fprintf(stderr, "take: %s: %s\n", cox_status_text(r), test_error.text);
        COX_ASSERT(r == 0);
        COX_ASSERT(fixture_is_sound(&message));
        fixture_let_go(&message);
    }
}

static void child_publish(struct cox_publisher *of_child, struct cox_pool *pool, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        COX_ASSERT(fixture_publish(of_child, pool, 100, 1000 + i, NULL) == 0);
}

static void child_publish_batch(struct cox_publisher *of_child, struct cox_pool *pool)
{
    struct cox_publication batch[DEPTH];
    uint32_t count;
    for (uint64_t i = 0; i < DEPTH; i++) {
        batch[i] = (struct cox_publication){.length = 100, .user_data = 2000 + i};
        COX_ASSERT(cox_pool_allocate(pool, 100, &batch[i].ref, NULL) == 0);
        fixture_fill(cox_pool_pointer(pool, &batch[i].ref), 100, batch[i].user_data);
    }
    COX_ASSERT(cox_publisher_publish_batch(of_child, batch, DEPTH, &count, NULL) == 0);
    for (uint64_t i = 0; i < DEPTH; i++)
        COX_ASSERT(cox_pool_unref(pool, &batch[i].ref, NULL) == 0);
}

/* Everything that one process can do alone. */
static void do_everything(void)
{
    struct own own = attach(true);
    struct cox_exporter *exporter;
    struct cox_queue_set *set;
    struct cox_subscriber *ready;
    const struct cox_exporter_options exporting = {.size = sizeof(struct cox_exporter_options),
                                                   .ptrace_policy = COX_PTRACE_ANY};
    COX_ASSERT(cox_exporter_new(&exporting, &exporter, NULL) == 0);
    struct cox_publisher *of_child = fixture_publisher(own.queue, own.host, domains, exporter);
    struct cox_subscriber *child_near =
        fixture_subscriber(own.queue, NULL, &own.host, 1, domains, NULL);
    struct cox_subscriber *child_far =
        fixture_subscriber(own.queue, own.bounce, &own.host, 1, domains, exporter);
    COX_ASSERT(cox_queue_set_new(&set) == 0);
    COX_ASSERT(cox_queue_set_add(set, child_near, NULL) == 0);
    COX_ASSERT(cox_queue_set_wait(set, cox_deadline_after_ms(1), &ready) == COX_TIMEOUT);
    child_publish(of_child, own.host, 2);
    COX_ASSERT(cox_queue_set_wait(set, cox_deadline_after_ms(1000), &ready) == 0);
    take_all(child_far, 1);
    take_all(child_near, 1);
    child_publish(of_child, own.host, DEPTH + 1);
    child_publish_batch(of_child, own.host);
    take_all(child_far, UINT32_MAX);
    take_all(child_near, UINT32_MAX);
    child_publish(of_child, own.host, 1);
    cox_queue_set_remove(set, child_near);
    cox_queue_set_free(set);
    cox_queue_sweep(own.queue);
    cox_subscriber_free(child_far);
    cox_subscriber_free(child_near);
    cox_publisher_free(of_child);
    cox_exporter_free(exporter);
    detach(&own);
    struct cox_queue *made = fixture_queue(2);
    cox_queue_free(made);
}

/* The last subscriber of a message with an inaccessible copy. */
static void leave_a_copy_to_others(void)
{
    struct own own = attach(false);
    struct cox_subscriber *child_near =
        fixture_subscriber(own.queue, NULL, &own.host, 1, domains, NULL);
    struct cox_publisher *of_child = fixture_publisher(own.queue, own.host, domains, NULL);
    /* A child cannot use the parent's objects; what they would do, another child does. */
    pid_t pid = fork();
    COX_ASSERT(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        cox_fault_arm(NULL);
        struct own other = attach(true);
        struct cox_subscriber *other_far =
            fixture_subscriber(other.queue, other.bounce, &other.host, 1, domains, NULL);
        struct cox_publisher *of_other = fixture_publisher(other.queue, other.host, domains, NULL);
        child_publish(of_other, other.host, 3);
        take_all(other_far, UINT32_MAX);
        cox_subscriber_free(other_far);
        cox_publisher_free(of_other);
        detach(&other);
        _exit(0);
    }
    int status;
    COX_ASSERT(waitpid(pid, &status, 0) == pid && status == 0);
    child_publish(of_child, own.host, DEPTH + 2);
    cox_subscriber_free(child_near);
    cox_publisher_free(of_child);
    detach(&own);
}

static void sweep_only(void)
{
    struct own own = attach(true);
    struct cox_publisher *of_child = fixture_publisher(own.queue, own.host, domains, NULL);
    struct cox_subscriber *child_far =
        fixture_subscriber(own.queue, own.bounce, &own.host, 1, domains, NULL);
    cox_queue_sweep(own.queue);
    cox_subscriber_free(child_far);
    cox_publisher_free(of_child);
    detach(&own);
}

/* Room for one domain and one pool, which another process uses. */
static void reclaim(void)
{
    const struct cox_queue_options options = {
        .size = sizeof(struct cox_queue_options), .domain_count_max = 1, .pool_count_max = 1};
    struct own own = attach(true);
    struct cox_queue *small;
    COX_ASSERT(cox_queue_create(&options, &small, NULL) == 0);
    struct cox_publisher *first = fixture_publisher(small, own.bounce, domains, NULL);
    cox_publisher_free(first);
    struct cox_publisher *second = fixture_publisher(small, own.host, domains, NULL);
    cox_publisher_free(second);
    cox_queue_free(small);
    detach(&own);
}

/* Where the queue is full, it evicts a message that the parent's subscribers have not taken. */
static void publish_one(void)
{
    struct own own = attach(true);
    struct cox_publisher *of_child = fixture_publisher(own.queue, own.host, domains, NULL);
    child_publish(of_child, own.host, 1);
    cox_publisher_free(of_child);
    detach(&own);
}

/* Dead endpoints that had messages to take. */
static void leave_endpoints(void)
{
    struct own own = attach(true);
    fixture_publisher(own.queue, own.host, domains, NULL);
    fixture_subscriber(own.queue, own.bounce, &own.host, 1, domains, NULL);
    struct cox_publisher *of_child = fixture_publisher(own.queue, own.host, domains, NULL);
    fixture_subscriber(own.queue, NULL, &own.host, 1, domains, NULL);
    child_publish(of_child, own.host, 2);
    raise(SIGKILL);
}

typedef void (*scenario_fn)(void);

/* Returns its pid. plan NULL: no fault. */
static pid_t child_start(scenario_fn scenario, const char *plan)
{
    fflush(NULL);
    pid_t parent = getpid(), pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(1);
        alarm(60);
        cox_fault_arm(plan);
        scenario();
        _exit(0);
    }
    return pid;
}

/* True: killed; false: it completed. */
static bool child_end(pid_t pid, const char *what)
{
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
        return true;
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
        fail_msg("%s: the child ended with %#x", what, (unsigned)status);
    return false;
}

/* ---- the parent ---- */

static bool struck[COX_FAULT_POINT_COUNT];

static void note_struck(const char *point)
{
    for (int i = 0; i < COX_FAULT_POINT_COUNT; i++)
        if (strcmp(cox_fault_name((enum cox_fault_point)i), point) == 0)
            struck[i] = true;
}

static void setup_queue(void)
{
    host = fixture_pool(domains, COX_DOMAIN_HOST, BLOCKS);
    bounce = fixture_pool(domains, COX_DOMAIN_BOUNCE, BLOCKS);
    queue = fixture_queue(DEPTH);
    publisher = fixture_publisher(queue, host, domains, NULL);
    near = fixture_subscriber(queue, NULL, &host, 1, domains, NULL);
    far = fixture_subscriber(queue, bounce, &host, 1, domains, NULL);
}

/* Also messages of the dead process, if they were published. */
static uint64_t take_rest(struct cox_subscriber *subscriber, const char *what)
{
    uint64_t last = 0;
    for (;;) {
        struct cox_message message;
        int r = cox_subscriber_take(subscriber, &message, test_err());
        if (r == COX_EMPTY)
            return last;
        if (r)
            fail_msg("%s: %s: %s", what, cox_status_text(r), test_error.text);
        if (!fixture_is_sound(&message))
            fail_msg("%s: message %" PRIu64 " is not what was published", what, message.number);
        last = message.user_data;
        fixture_let_go(&message);
    }
}

static void complain(void *context, const char *text)
{
    (void)context;
    print_message("  %s\n", text);
}

/* All live processes continue at once, and in the end nothing is pinned. */
static void survive(const char *what)
{
    const uint64_t begin_ns = cox_now_ns();
    for (int i = 0; i < DEPTH + 2; i++) {
        int r = fixture_publish(publisher, host, 100, ++user_data_last, NULL);
        if (r)
            fail_msg("%s: publish: %s", what, cox_status_text(r));
        if (i % 2 == 0)
            assert_int_equal(take_rest(far, what), user_data_last);
        if (i % 3 == 0)
            assert_int_equal(take_rest(near, what), user_data_last);
    }
    cox_queue_sweep(queue);
    assert_int_equal(take_rest(near, what), user_data_last);
    take_rest(far, what);
    cox_pool_sweep(host);
    cox_pool_sweep(bounce);
    const uint64_t took_ms = (cox_now_ns() - begin_ns) / COX_NSEC_PER_MSEC;
    if (fixture_used(host) || fixture_used(bounce)) {
        cox_queue_dump(queue, complain, NULL);
        cox_pool_dump(host, complain, NULL);
        cox_pool_dump(bounce, complain, NULL);
        fail_msg("%s: %u blocks of host memory, %u others are held for nobody", what,
                 fixture_used(host), fixture_used(bounce));
    }
    if (took_ms > SURVIVAL_MS)
        fail_msg("%s: going on took %" PRIu64 " ms", what, took_ms);
}

static void teardown_queue(const char *what)
{
    survive(what);
    near = cox_subscriber_free(near);
    far = cox_subscriber_free(far);
    publisher = cox_publisher_free(publisher);
    queue = cox_queue_free(queue);
    assert_int_equal(fixture_used(host), 0);
    assert_int_equal(fixture_used(bounce), 0);
    host = cox_pool_free(host);
    bounce = cox_pool_free(bounce);
}

struct scenario {
    scenario_fn run;
    /* what it is made for */
    const char *step;
    /* what another child does before; NULL: nothing */
    scenario_fn first;
    const char *first_plan;
};

/* Kills at the n-th passage, for each n until the child completes. Returns how often it killed. */
static uint32_t strike(const char *point, const struct scenario *scenario)
{
    for (uint32_t passage = 1;; passage++) {
        char plan[128];
        snprintf(plan, sizeof plan, "%s:kill:coordinator:%" PRIu32, point, passage);
        setup_queue();
        if (scenario->first)
            assert_int_equal(child_end(child_start(scenario->first, scenario->first_plan), "first"),
                             scenario->first != leave_a_copy_to_others);
        bool killed = child_end(child_start(scenario->run, plan), plan);
        teardown_queue(plan);
        if (!killed)
            return passage - 1;
        note_struck(point);
    }
}

/* ---- tests ---- */

static uint64_t taken_one(struct cox_subscriber *subscriber, const char *what)
{
    struct cox_message message;
    int r = cox_subscriber_take(subscriber, &message, test_err());
    if (r)
        fail_msg("%s: %s: %s", what, cox_status_text(r), test_error.text);
    assert_true(fixture_is_sound(&message));
    fixture_let_go(&message);
    return message.number;
}

/* A message whose copies were being unpinned is either complete for all, or skipped by all. */
PLAIN_TEST(b37_h8_a_publisher_dies_while_it_makes_room_in_the_queue)
{
    static const char *const points[] = {
        "queue.locked",    "queue.intended",    "queue.pinned",        "queue.row_ending",
        "pool.unpinned",   "pool.freed",        "queue.copy_unpinned", "queue.row_ended",
        "queue.announced", "queue.copy_filled", "queue.row_filled",    "queue.intent_cleared"};
    for (size_t i = 0; i < sizeof points / sizeof points[0]; i++)
        for (uint32_t passage = 1;; passage++) {
            char plan[128];
            snprintf(plan, sizeof plan, "%s:kill:coordinator:%" PRIu32, points[i], passage);
            setup_queue();
            struct cox_subscriber *other =
                fixture_subscriber(queue, bounce, &host, 1, domains, NULL);
            for (int k = 0; k < DEPTH; k++)
                assert_int_equal(fixture_publish(publisher, host, 100, ++user_data_last, NULL), 0);
            assert_int_equal(taken_one(other, plan), 1); /* the message has two copies now */
            bool killed = child_end(child_start(publish_one, plan), plan);
            const uint64_t first = taken_one(near, plan);
            assert_true(first == 1 || first == 2);
            assert_int_equal(taken_one(far, plan), first);
            for (uint64_t number = first + 1; number <= DEPTH; number++) {
                assert_int_equal(taken_one(far, plan), number);
                assert_int_equal(taken_one(near, plan), number);
            }
            take_rest(other, plan);
            cox_subscriber_free(other);
            teardown_queue(plan);
            if (!killed) {
                if (passage == 1)
                    fail_msg("%s: the scenario does not pass it", plan);
                break;
            }
        }
}

/* At every passage of every step of the queue and of its pools, after a first death; among them is
 * the step that the scenario is made for. */
PLAIN_TEST(b37_b24_h9_h12_h20_a_process_dies_anywhere_and_nothing_is_lost)
{
    static const struct scenario all[] = {
        {do_everything, "queue.filled", NULL, NULL},
        {do_everything, "queue.drained", leave_a_copy_to_others, NULL},
        {leave_a_copy_to_others, "queue.free_pending", NULL, NULL},
        {reclaim, "queue.pool_cleared", NULL, NULL},
        {sweep_only, "queue.reaped", leave_endpoints, NULL},
        {sweep_only, "queue.repairing", do_everything, "queue.row_filled:kill:coordinator:2"},
        {sweep_only, "queue.intent_cleared", do_everything, "queue.pinned:kill:coordinator:3"},
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        uint32_t count = 0;
        for (int p = 0; p < COX_FAULT_POINT_COUNT; p++) {
            const char *name = cox_fault_name((enum cox_fault_point)p);
            if (strncmp(name, "queue.", 6) != 0 && strncmp(name, "pool.", 5) != 0)
                continue;
            const uint32_t killed = strike(name, &all[i]);
            if (!killed && strcmp(name, all[i].step) == 0)
                fail_msg("%s: the scenario does not pass it", name);
            count += killed;
        }
        print_message("%" PRIu32 " deaths\n", count);
    }
}

/* ---- waiters ---- */

/* A byte of each child that has joined; open throughout. */
static int told[2];
/* that a sleeper waits for as well, if it is there */
static struct cox_queue *second;

static void await_joined(void)
{
    char byte;
    assert_int_equal(read(told[0], &byte, 1), 1);
}

static void sleep_and_tell(void)
{
    struct own own = attach(true);
    struct cox_queue *other = NULL;
    struct cox_queue_set *set;
    struct cox_subscriber *ready, *of_other = NULL;
    struct cox_message message;
    struct cox_subscriber *sleeper =
        fixture_subscriber(own.queue, NULL, &own.host, 1, domains, NULL);
    COX_ASSERT(cox_queue_set_new(&set) == 0 && cox_queue_set_add(set, sleeper, NULL) == 0);
    if (second) {
        COX_ASSERT(cox_queue_attach(cox_queue_fd(second), NULL, &other, NULL) == 0);
        of_other = fixture_subscriber(other, NULL, &own.host, 1, domains, NULL);
        COX_ASSERT(cox_queue_set_add(set, of_other, NULL) == 0);
    }
    COX_ASSERT(write(told[1], "j", 1) == 1);
    COX_ASSERT(cox_queue_set_wait(set, COX_DEADLINE_NEVER, &ready) == 0);
    COX_ASSERT(cox_subscriber_take(ready, &message, NULL) == 0 && fixture_is_sound(&message));
    fixture_let_go(&message);
    cox_queue_set_remove(set, sleeper);
    cox_queue_set_free(set);
    cox_subscriber_free(sleeper);
    cox_subscriber_free(of_other);
    cox_queue_free(other);
    detach(&own);
}

/* The waiter is the third subscriber, after the parent's two. */
static struct cox_queue_layout_subscriber *sleeper_line(void)
{
    return cox_queue_subscriber_at(queue, 2);
}

static void await_asleep(void)
{
    await_joined();
    AWAIT(atomic_load(&sleeper_line()->subscriber_sleeping));
}

static bool ends_soon(pid_t pid)
{
    const uint64_t end_ns = cox_deadline_after_ms(SURVIVAL_MS);
    siginfo_t info = {0};
    while (cox_now_ns() < end_ns) {
        assert_int_equal(waitid(P_PID, (id_t)pid, &info, WEXITED | WNOWAIT | WNOHANG), 0);
        if (info.si_pid)
            return true;
        sched_yield();
    }
    return false;
}

/* No subscriber misses a message, though the process that was to wake it is dead. */
PLAIN_TEST(b36_b52_no_subscriber_sleeps_through_the_message_of_a_dead_publisher)
{
    static const char *const points[] = {
        "queue.pinned",    "queue.announced",    "queue.waking",
        "queue.woken",     "queue.row_filled",   "queue.intent_cleared",
        "queue.published", "queue.publish_done", "queue.unlocked",
    };
    for (size_t i = 0; i < sizeof points / sizeof points[0]; i++)
        for (uint32_t passage = 1; passage <= 4; passage++) {
            char plan[128];
            snprintf(plan, sizeof plan, "%s:kill:coordinator:%" PRIu32, points[i], passage);
            setup_queue();
            pid_t sleeper = child_start(sleep_and_tell, NULL);
            await_asleep();
            bool killed = child_end(child_start(publish_one, plan), plan);
            if (cox_subscriber_pending(near) > 0) {
                if (!ends_soon(sleeper))
                    fail_msg("%s: the message is there, and who waited for it sleeps", plan);
            } else {
                assert_int_equal(fixture_publish(publisher, host, 100, ++user_data_last, NULL), 0);
                if (!ends_soon(sleeper))
                    fail_msg("%s: the next message is there, and who waited sleeps", plan);
            }
            assert_false(child_end(sleeper, plan));
            teardown_queue(plan);
            if (!killed) {
                if (passage == 1)
                    fail_msg("%s: the scenario does not pass it", plan);
                break;
            }
            note_struck(points[i]);
        }
}

/* The waiter is stopped between its check and the futex call, while it announces its wait queue by
 * queue. It misses no message published meanwhile, announced or not. */
PLAIN_TEST(h14_b36_a_message_between_the_check_and_the_sleep_is_seen)
{
    for (int armed = 1; armed <= 2; armed++)
        for (int to = 0; to < 2; to++) {
            char plan[64];
            snprintf(plan, sizeof plan, "queue.armed:stop:coordinator:%d", armed);
            setup_queue();
            second = fixture_queue(DEPTH);
            struct cox_publisher *to_second = fixture_publisher(second, host, domains, NULL);
            pid_t sleeper = child_start(sleep_and_tell, plan);
            await_joined();
            test_await_stopped(sleeper);
            assert_int_equal(
                fixture_publish(to ? to_second : publisher, host, 100, ++user_data_last, NULL), 0);
            kill(sleeper, SIGCONT);
            if (!ends_soon(sleeper))
                fail_msg("%s: a message of queue %d is slept through", plan, to);
            assert_false(child_end(sleeper, plan));
            cox_publisher_free(to_second);
            second = cox_queue_free(second);
            teardown_queue(plan);
        }
}

/* A subscriber that is about to block sees the announced message, and waits for the lock of a dead
 * publisher. */
PLAIN_TEST(b36_a_process_dies_that_waited_for_a_publisher)
{
    for (int strikes = 0; strikes < 2; strikes++) {
        setup_queue();
        pid_t stuck = child_start(publish_one, "queue.announced:stop:coordinator:1");
        test_await_stopped(stuck);
        /* It cannot join before the lock is free: uses an endpoint of the parent, in a child's own
         * set. */
        test_kill_child(stuck);
        pid_t sleeper = child_start(sleep_and_tell,
                                    strikes ? "queue.publisher_awaited:kill:coordinator:1" : NULL);
        await_joined();
        /* A corrupt word: the process that checks it repairs it. */
        atomic_store(&queue->layout->state.queue_publishing, 7);
        cox_queue_wake_subscriber(sleeper_line());
        AWAIT((cox_queue_wake_subscriber(sleeper_line()),
               !atomic_load(&queue->layout->state.queue_publishing)));
        if (!strikes)
            assert_int_equal(fixture_publish(publisher, host, 100, ++user_data_last, NULL), 0);
        assert_int_equal(child_end(sleeper, "sleeper"), strikes != 0);
        if (strikes)
            note_struck("queue.publisher_awaited");
        teardown_queue("publisher awaited");
    }
}

/* ---- copies ---- */

static void take_far(void)
{
    struct own own = attach(true);
    struct cox_subscriber *child_far =
        fixture_subscriber(own.queue, own.bounce, &own.host, 1, domains, NULL);
    COX_ASSERT(write(told[1], "j", 1) == 1);
    AWAIT(cox_subscriber_pending(child_far) != 0);
    take_all(child_far, 1);
    cox_subscriber_free(child_far);
    detach(&own);
}

/* One process copies and is stopped, another one waits for the copy; when the first is dead, the
 * second makes it. */
PLAIN_TEST(h6_b37_a_copier_dies_in_the_copy_and_a_waiter_makes_it)
{
    static const char *const points[] = {"pool.claimed:stop", "queue.copied:stop"};
    for (size_t i = 0; i < sizeof points / sizeof points[0]; i++) {
        setup_queue();
        pid_t copier = child_start(take_far, points[i]);
        await_joined();
        pid_t waiter = child_start(take_far, "queue.copying:stop:coordinator:1000");
        await_joined();
        /* Either of the two may copy, but only one is stopped there. */
        kill(waiter, SIGSTOP);
        test_await_stopped(waiter);
        assert_int_equal(fixture_publish(publisher, host, 100, ++user_data_last, NULL), 0);
        test_await_stopped(copier);
        kill(waiter, SIGCONT);
        AWAIT(atomic_load(&queue->layout->state.queue_copy_wait));
        test_kill_child(copier);
        if (!ends_soon(waiter))
            fail_msg("%s: who waits for the copy of a dead process waits on", points[i]);
        assert_false(child_end(waiter, points[i]));
        teardown_queue(points[i]);
    }
}

PLAIN_TEST(b37_every_step_was_struck)
{
    for (int i = 0; i < COX_FAULT_POINT_COUNT; i++) {
        const char *name = cox_fault_name((enum cox_fault_point)i);
        if (strncmp(name, "queue.", 6) == 0 && !struck[i])
            fail_msg("nobody was killed at %s", name);
    }
}

int main(void)
{
    assert_int_equal(cox_domains_new(&domains), 0);
    assert_int_equal(pipe(told), 0);
    int failed = test_run(NULL, NULL);
    cox_domains_free(domains);
    return failed;
}

#endif
