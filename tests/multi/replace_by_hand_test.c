/*
 * Ranks that were started by hand get a successor that is started by hand: requirements P8, A23 and
 * A24.
 */
#include "channel/attach/sealed/futex_gate.h"
#include "channel/base/peer.h"
#include "channel/shm/gate.h"
#include "channel/attach/sealed/sealed.h"
#include "channel/shm/state.h"
#include "channel/socket/control_socket.h"
#include "hand.h"

static pid_t pid_of(struct hand *hand, uint32_t rank)
{
    return test_pid(hand->group, rank);
}

static const char *const rank_texts[] = {"0", "1", "2", "3", "4", "5", "6", "7"};

/* A group of rank_count workers, each at its place. */
static void group_by_hand(struct hand *hand, uint32_t rank_count, enum cox_attach attach,
                          pid_t *pids)
{
    hand_open(hand, rank_count, attach);
    for (uint32_t rank = 0; rank < rank_count; rank++)
        pids[rank] = hand_worker(hand, rank_texts[rank]);
    hand_complete(hand);
    test_expect_echo(hand->group, "before");
}

static void group_end(struct hand *hand, uint32_t rank_count, const pid_t *pids)
{
    hand_free(hand);
    for (uint32_t rank = 0; rank < rank_count; rank++)
        assert_int_equal(hand_worker_end(pids[rank]), 0);
}

/* Over a group of ranks that were started by hand, which all end with 0. */
#define BY_HAND_TEST(name, rank_count)                                                             \
    static void name##_by_hand(struct hand *hand, pid_t *pids);                                    \
    ATTACH_TEST(name)                                                                              \
    {                                                                                              \
        struct hand made = {0};                                                                    \
        pid_t pids[rank_count];                                                                    \
        group_by_hand(&made, rank_count, attach, pids);                                            \
        name##_by_hand(&made, pids);                                                               \
        group_end(&made, rank_count, pids);                                                        \
    }                                                                                              \
    static void name##_by_hand(struct hand *hand, __attribute__((unused)) pid_t *pids)

/* The rank has been replaced. */
static void order_expect(struct order *order)
{
    if (order_end(order))
        fail_msg("%d: %s", order->result, order->err.text);
}

static struct cox_rank_status status_of(struct hand *hand, uint32_t rank)
{
    return test_rank_status(test_group_executor(hand->group), rank);
}

/* Logs on as this process, and is refused. */
static int log_on(const struct hand *hand, uint32_t rank, uint32_t incarnation,
                  struct cox_error *err)
{
    struct cox_control_connection session = {.fd = -1};
    struct cox_hello hello = {.role = COX_HELLO_WORKER, .rank = rank, .incarnation = incarnation};
    *err = (struct cox_error){0};
    int r =
        cox_control_socket_connect(hand->control_socket, &hello, test_patience(), &session, err);
    if (r == 0)
        cox_control_connection_close(&session);
    return r;
}

BY_HAND_TEST(p8_a23_one_that_is_started_by_hand_replaces_a_dead_one, 3)
{
    enum { N = 3 };
    struct order order;
    char line[160];
    for (uint32_t incarnation = 2; incarnation < 4; incarnation++) {
        pid_t old = pids[1];
        hand_kill(hand, 1);
        /* Until it is ordered, no process takes its place. */
        assert_refused(log_on(hand, 1, 0, test_err()), COX_STATE, "waits for an order");
        assert_contains(test_error.text, "coxswain recover restart --rank 1");
        assert_int_equal(log_on(hand, COX_HELLO_RANK_ANY, 0, test_err()), COX_TAKEN);
        order_give(&order, hand, 1, COX_DEADLINE_NEVER, incarnation - 1);
        assert_int_equal(status_of(hand, 1).liveness, COX_LIVENESS_ABSENT);
        assert_int_equal(status_of(hand, 1).pid, 0);
        assert_int_equal(cox_executor_kill(order.executor, 1, test_err()), COX_UNSUPPORTED);
        /* A live rank cannot be taken meanwhile, and an old incarnation is refused. */
        assert_refused(log_on(hand, 2, 0, test_err()), COX_TAKEN, "already");
        assert_int_equal(log_on(hand, 1, incarnation - 1, test_err()), COX_STALE);
        assert_int_equal(cox_executor_restart(order.executor, 1, test_patience(), test_err()),
                         COX_BUSY);
        assert_int_equal(
            cox_executor_restart(order.executor, COX_RANK_ALL, test_patience(), test_err()),
            COX_BUSY);
        /* The others work on. */
        const struct test_how living = {.gather = COX_GATHER_ALL, .ranks = 5};
        assert_int_equal(test_call_how(hand->group, NULL, &living, "echo two"), 0);
        assert_int_equal(test_call(hand->group, NULL, "echo three"), COX_PEER_DEAD);
        snprintf(line, sizeof line, "rank 1 is being started again: rank 1 (pid %d) ", old);
        assert_contains(test_error_text(hand->group), line);
        pids[1] = hand_worker(hand, incarnation == 2 ? NULL : "1");
        order_expect(&order);
        for (uint32_t rank = 0; rank < N; rank++)
            assert_int_equal(pid_of(hand, rank), pids[rank]);
        assert_int_equal(status_of(hand, 1).incarnation, incarnation);
        assert_int_equal(status_of(hand, 1).liveness, COX_LIVENESS_ALIVE);
        test_expect_echo(hand->group, "after");
        snprintf(line, sizeof line,
                 "6 rank 1: process %d (incarnation %" PRIu32
                 ") is replaced by process %d (incarnation %" PRIu32 ")\n",
                 old, incarnation - 1, pids[1], incarnation);
        assert_int_equal(hand_log_count(hand, line), 1);
        /* It is there, and nothing is to be done. */
        assert_int_equal(cox_executor_restart(order.executor, 1, test_patience(), NULL), 0);
        assert_int_equal(log_on(hand, 1, 0, test_err()), COX_TAKEN);
    }
}

BY_HAND_TEST(p8_two_that_are_started_by_hand_at_once, 4)
{
    enum { N = 4 };
    struct order orders[2];
    for (size_t i = 0; i < 3; i++) {
        for (uint32_t rank = 1; rank < 3; rank++)
            hand_kill(hand, rank);
        for (uint32_t k = 0; k < 2; k++)
            order_give(&orders[k], hand, k + 1, test_patience(), 2 * i + k + 1);
        /* The later one first. */
        pids[2] = hand_worker(hand, "2");
        pids[1] = hand_worker(hand, "1");
        for (uint32_t k = 0; k < 2; k++)
            order_expect(&orders[k]);
        for (uint32_t rank = 0; rank < N; rank++)
            assert_int_equal(pid_of(hand, rank), pids[rank]);
        test_expect_echo(hand->group, "all four");
    }
}

/* What was asked of the old process has its completion before another one can come, and is not for
 * that one. */
BY_HAND_TEST(a23_what_the_old_one_owed_has_ended_before_the_new_one_comes, 2)
{
    struct order order;
    test_stop_process(pids[1]);
    for (int k = 0; k < 3; k++)
        assert_int_equal(test_submit(hand->group, &test_all, "echo in flight %d", k), 0);
    hand_kill(hand, 1);
    order_give(&order, hand, 1, COX_DEADLINE_NEVER, 1);
    assert_int_equal(test_completion_count(hand->group), 3);
    for (size_t k = 0; k < 3; k++) {
        assert_int_equal(test_await(hand->group, k)->status, COX_PEER_DEAD);
        assert_int_equal(test_await(hand->group, k)->ranks[1].outcome, COX_OUTCOME_DEAD);
        assert_int_equal(test_await(hand->group, k)->ranks[1].pid, pids[1]);
    }
    pids[1] = hand_worker(hand, "1");
    assert_int_equal(order_end(&order), 0);
    assert_int_equal(test_served(hand->group, 1), 1); /* nothing but this */
    test_expect_echo(hand->group, "after");
}

BY_HAND_TEST(p8_b2_no_process_comes_until_the_deadline_and_one_later, 2)
{
    struct order order;
    hand_kill(hand, 0);
    assert_refused(cox_executor_restart(test_group_executor(hand->group), 0,
                                        cox_deadline_after_ms(50), test_err()),
                   COX_TIMEOUT, "rank 0");
    assert_contains(test_error.text, hand->control_socket);
    assert_contains(test_error.text, "coxswain-worker --socket");
    /* It is as dead as before, and its place not to be had. */
    assert_int_equal(test_call(hand->group, NULL, "echo both"), COX_PEER_DEAD);
    assert_int_equal(log_on(hand, 0, 0, test_err()), COX_STATE);
    assert_int_equal(status_of(hand, 0).liveness, COX_LIVENESS_DEAD);
    assert_int_equal(status_of(hand, 0).pid, pids[0]);
    order_give(&order, hand, 0, COX_DEADLINE_NEVER, 2);
    pids[0] = hand_worker(hand, NULL);
    assert_int_equal(order_end(&order), 0);
    test_expect_echo(hand->group, "both");
}

ATTACH_TEST(m15_a_stop_ends_the_wait_for_a_replacement)
{
    struct hand hand = {0};
    struct order order;
    pid_t pids[2];
    group_by_hand(&hand, 2, attach, pids);
    hand_kill(&hand, 1);
    order_give(&order, &hand, 1, COX_DEADLINE_NEVER, 1);
    cox_executor_stop(test_group_executor(hand.group));
    assert_int_equal(order_end(&order), COX_CLOSED);
    group_end(&hand, 1, pids);
}

/* Attaches as rank 1 and reports the result; goes: it closes its connection. Either way it lives
 * on. */
static int connect_main(const char *control_socket, bool goes)
{
    struct cox_control_connection session = {.fd = -1};
    struct cox_hello hello = {.role = COX_HELLO_WORKER, .rank = 1};
    int r = cox_peer_start_time(getpid(), &hello.start);
    if (r == 0)
        r = cox_control_socket_connect(control_socket, &hello, test_patience(), &session, NULL);
    if (r == 0 && goes)
        cox_control_connection_close(&session);
    dprintf(STDOUT_FILENO, "%d\n", r);
    char byte;
    while (read(STDIN_FILENO, &byte, 1) > 0)
        continue;
    return r;
}

static struct test_helper connection(const struct hand *hand, const char *mode, int *ret_result)
{
    char text[64] = "";
    struct test_helper helper = test_helper_start(mode, hand->control_socket);
    assert_true(read(helper.out, text, sizeof text - 1) > 0);
    *ret_result = atoi(text);
    return helper;
}

/* True: it was let in, and killed at the deadline. False: it came too late for that. */
static bool stays_half_way(struct hand *hand, uint64_t timeout_ms, size_t offered)
{
    struct order order;
    int result;
    order_give(&order, hand, 1, cox_deadline_after_ms(timeout_ms), offered);
    struct test_helper stays = connection(hand, "stays", &result);
    assert_int_equal(order_end(&order), COX_TIMEOUT);
    if (result == 0)
        assert_contains(order.err.text, "did not attach in time");
    assert_int_equal(test_helper_wait(&stays), result ? result : 128 + SIGKILL);
    return result == 0;
}

/* One that logs on and never attaches is killed at the deadline; one that logs on and goes leaves
 * its place to the next, and is left alone. */
BY_HAND_TEST(p8_one_that_does_not_come_all_the_way, 2)
{
    struct order order;
    size_t offered = 1;
    hand_kill(hand, 1);
    for (uint64_t timeout_ms = 500; !stays_half_way(hand, timeout_ms, offered++);)
        timeout_ms *= 4;
    order_give(&order, hand, 1, COX_DEADLINE_NEVER, offered);
    for (int k = 0; k < 3; k++) {
        int result;
        struct test_helper goes = connection(hand, "goes", &result);
        assert_int_equal(result, 0);
        /* The control socket hears in its own time that it has gone. */
        AWAIT(status_of(hand, 1).pid == 0);
        assert_int_equal(test_helper_wait(&goes), 0);
    }
    pids[1] = hand_worker(hand, "1");
    order_expect(&order);
    assert_int_equal(test_served(hand->group, 1), 1); /* nothing of before is asked of it again */
    test_expect_echo(hand->group, "after");
}

BY_HAND_TEST(p8_p7_nothing_grows_by_replacements, 2)
{
    struct order order;
    size_t fds = 0;
    for (size_t k = 0; k < 20; k++) {
        uint32_t rank = k & 1;
        hand_kill(hand, rank);
        order_give(&order, hand, rank, test_patience(), k + 1);
        pids[rank] = hand_worker(hand, NULL);
        assert_int_equal(order_end(&order), 0);
        assert_int_equal(test_count_names(hand->name), 0);
        if (k == 2) {
            test_await_socket(hand->group);
            fds = test_count_fds();
        }
    }
    test_await_socket(hand->group);
    assert_int_equal(test_count_fds(), fds);
    test_expect_echo(hand->group, "x");
}

/* ---- old processes that live on ---- */

/* Becomes rank 1 of a sealed group without the library; then, one step for each byte it reads:
 * stores that it has left; attaches again as the incarnation that it had; overwrites all the memory
 * that it was given. */
static int late_main(const char *control_socket)
{
    static struct cox_sealed sealed;
    struct cox_control control;
    struct cox_control_connection session = {.fd = -1}, again = {.fd = -1};
    struct cox_hello hello = {.role = COX_HELLO_WORKER, .rank = 1};
    struct cox_gate gate;
    char byte;
    int r = cox_peer_start_time(getpid(), &hello.start);
    if (r == 0)
        r = cox_control_socket_connect(control_socket, &hello, test_patience(), &session,
                                       test_err());
    if (r == 0)
        r = cox_sealed_attach(&sealed, &control, session.hello_reply.rank, session.fds, test_err());
    if (r) {
        fprintf(stderr, "late: %d: %s\n", r, test_error.text);
        return 1;
    }
    struct cox_layout_identity *identity = &control.ranks[1]->identity;
    if (!cox_state_claim_identity(identity, (uint32_t)getpid(), hello.start))
        return 2;
    atomic_store(&identity->incarnation, session.hello_reply.incarnation);
    atomic_store(&identity->group_incarnation, control.group_incarnation);
    atomic_store(&identity->state, COX_IDENTITY_ATTACHED);
    cox_gate_bind(&gate, &cox_sealed_wake(&sealed, COX_CHANNEL_EXECUTE)->ranks_wakeup,
                  cox_sealed_wake(&sealed, COX_CHANNEL_EXECUTE), control.geometry.depth, false);
    cox_gate_post(&gate, 1, COX_WAKEUP_RESPONSE_CONSUME);
    if (read(STDIN_FILENO, &byte, 1) != 1)
        return 3;
    cox_state_set_left(identity);
    if (read(STDIN_FILENO, &byte, 1) != 1)
        return 3;
    hello.incarnation = session.hello_reply.incarnation;
    r = cox_control_socket_connect(control_socket, &hello, test_patience(), &again, test_err());
    for (unsigned k = 0; k < 256; k++)
        memset(sealed.ranks[1].base, (int)k, sealed.ranks[1].size);
    dprintf(STDOUT_FILENO, "%d\n", r);
    if (read(STDIN_FILENO, &byte, 1) != 1)
        return 3;
    cox_close_fd(&session.fd); /* late as well: another process has the seat */
    for (;;)
        pause();
}

static void tell(const struct test_helper *helper)
{
    assert_int_equal(write(helper->in, "", 1), 1);
}

TEST(a24_p8_a_late_old_process_has_no_effect)
{
    struct hand hand = {0};
    struct order order;
    char text[64] = "";
    hand_open(&hand, 2, COX_ATTACH_SEALED);
    pid_t pids[2] = {hand_worker(&hand, "0"), 0};
    struct test_helper late = test_helper_start("late", hand.control_socket);
    hand_complete(&hand);
    assert_int_equal(pid_of(&hand, 1), late.pid);
    tell(&late);
    AWAIT(status_of(&hand, 1).liveness == COX_LIVENESS_LEFT);
    /* It still has its connection, and lives on. */
    order_give(&order, &hand, 1, COX_DEADLINE_NEVER, 1);
    tell(&late);
    assert_true(read(late.out, text, sizeof text - 1) > 0);
    assert_int_equal(atoi(text), COX_STALE);
    pids[1] = hand_worker(&hand, "1");
    order_expect(&order);
    tell(&late);
    for (int k = 0; k < 50; k++)
        test_expect_echo(hand.group, "after");
    assert_int_equal(pid_of(&hand, 1), pids[1]);
    assert_int_equal(kill(late.pid, 0), 0); /* it was not signalled */
    group_end(&hand, 2, pids);
    kill(late.pid, SIGTERM);
    assert_int_equal(test_helper_wait(&late), 128 + SIGTERM);
}

/* ---- killed by order ---- */

BY_HAND_TEST(p3_p8_a_stopped_rank_that_was_started_by_hand_is_killed, 2)
{
    struct order order;
    struct cox_executor *executor = test_group_executor(hand->group);
    test_stop_process(pids[1]);
    assert_ok(cox_executor_kill(executor, 1, test_err()));
    assert_int_equal(hand_worker_end(pids[1]), 128 + SIGKILL);
    test_await_death(hand->group, 1);
    assert_ok(cox_executor_kill(executor, 1, test_err()));
    assert_int_equal(cox_executor_kill(executor, 2, test_err()), COX_INVALID);
    order_give(&order, hand, 1, test_patience(), 1);
    pids[1] = hand_worker(hand, NULL);
    assert_int_equal(order_end(&order), 0);
    test_expect_echo(hand->group, "after");
}

/* ---- all of them ---- */

ATTACH_TEST(p8_a23_all_that_were_started_by_hand)
{
    enum { N = 3 };
    struct hand hand = {0};
    struct order order;
    pid_t pids[N], old[N];
    const struct test_how deaf = {.gather = COX_GATHER_ALL, .ranks = 4};
    group_by_hand(&hand, N, attach, pids);
    for (size_t round = 0; round < 2; round++) {
        memcpy(old, pids, sizeof old);
        if (round == 1) { /* one that is dead, one that does not listen */
            hand_kill(&hand, 1);
            assert_int_equal(test_call_how(hand.group, NULL, &deaf, "deaf"), 0);
        }
        order_give(&order, &hand, ORDER_ALL, COX_DEADLINE_NEVER, N * (round + 1));
        assert_int_equal(hand_worker_end(old[0]), 128 + SIGTERM);
        if (round == 0)
            assert_int_equal(hand_worker_end(old[1]), 128 + SIGTERM);
        assert_int_equal(hand_worker_end(old[2]), 128 + (round == 0 ? SIGTERM : SIGKILL));
        for (uint32_t rank = 0; rank < N; rank++)
            pids[rank] = hand_worker(&hand, rank_texts[rank]);
        order_expect(&order);
        for (uint32_t rank = 0; rank < N; rank++)
            assert_int_equal(pid_of(&hand, rank), pids[rank]);
        assert_int_equal(hand_log_count(&hand, "is replaced by"), N * (round + 1));
        test_expect_echo(hand.group, "all of them");
    }
    group_end(&hand, N, pids);
}

/* One comes and dies while the others are waited for: the group has no rank then, and all can be
 * tried again. */
BY_HAND_TEST(p8_all_that_were_started_by_hand_and_one_dies, 3)
{
    enum { N = 3 };
    struct order order;
    char text[64];
    int result;
    order_give(&order, hand, ORDER_ALL, COX_DEADLINE_NEVER, N);
    for (uint32_t rank = 0; rank < N; rank++)
        assert_int_equal(hand_worker_end(pids[rank]), 128 + SIGTERM);
    struct test_helper stays = connection(hand, "stays", &result);
    assert_int_equal(result, 0);
    pid_t dead = stays.pid;
    kill(dead, SIGKILL);
    assert_int_equal(order_end(&order), COX_PEER_DEAD);
    assert_int_equal(test_helper_wait(&stays), 128 + SIGKILL);
    snprintf(text, sizeof text, "rank 1 (pid %d) is dead", dead);
    assert_contains(order.err.text, text);
    assert_int_equal(test_call(hand->group, NULL, "echo x"), COX_PEER_DEAD);
    order_give(&order, hand, ORDER_ALL, COX_DEADLINE_NEVER, 2 * N);
    for (uint32_t rank = 0; rank < N; rank++)
        pids[rank] = hand_worker(hand, NULL);
    order_expect(&order);
    test_expect_echo(hand->group, "all of them");
}

int main(int argc, char **argv)
{
    if (argc == 3 && (strcmp(argv[1], "stays") == 0 || strcmp(argv[1], "goes") == 0))
        return connect_main(argv[2], argv[1][0] == 'g');
    if (argc == 3 && strcmp(argv[1], "late") == 0)
        return late_main(argv[2]);
    return test_run(NULL, NULL);
}
