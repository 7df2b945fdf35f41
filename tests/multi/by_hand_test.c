/* Workers that are started by hand and do not do as they should: they die, go, come twice, or never
 * come. */
#include "channel/base/peer.h"
#include "channel/socket/control_socket.h"
#include "hand.h"

#include <coxswain/worker.h>

extern char **environ;

/* Logs on as this process, and is gone again unless that is refused. */
static int log_on_as(const char *control_socket, uint32_t rank, uint32_t incarnation,
                     uint64_t start_offset, struct cox_error *err)
{
    struct cox_control_connection session = {.fd = -1};
    struct cox_hello hello = {.role = COX_HELLO_WORKER, .rank = rank, .incarnation = incarnation};
    int r = cox_peer_start_time(getpid(), &hello.start);
    hello.start += start_offset;
    if (r == 0)
        r = cox_control_socket_connect(control_socket, &hello,
                                       cox_deadline_after_ms(TEST_PATIENCE_MS), &session, err);
    if (r == 0)
        cox_control_connection_close(&session);
    return r;
}

static int log_on(const char *control_socket, uint32_t rank, uint64_t start_offset,
                  struct cox_error *err)
{
    return log_on_as(control_socket, rank, 0, start_offset, err);
}

/* A process that does one action for each byte it reads, and replies with a line: a result and a
 * text. At the end of its input it exits with 0; a signal would end it otherwise. */
static int client_main(const char *control_socket)
{
    static const struct cox_worker_callbacks callbacks = COX_WORKER_CALLBACKS_INIT;
    struct cox_worker *worker = NULL;
    char order;
    while (read(STDIN_FILENO, &order, 1) == 1) {
        int r = 0;
        struct cox_worker_options options = {.size = sizeof(struct cox_worker_options),
                                             .rank = COX_WORKER_RANK_ANY};
        switch (order) {
        case 'v': /* comes and goes */
            r = log_on(control_socket, COX_HELLO_RANK_ANY, 0, test_err());
            break;
        case 's': /* claims to be another incarnation of this pid */
            r = log_on(control_socket, COX_HELLO_RANK_ANY, 1, test_err());
            break;
        case 'o': /* as an old incarnation */
            r = log_on_as(control_socket, 0, 1, 0, test_err());
            break;
        case '1':
            r = log_on(control_socket, 1, 0, test_err());
            break;
        case 'w': /* becomes a rank */
            snprintf(options.control_socket, sizeof options.control_socket, "%s", control_socket);
            r = cox_worker_new(&options, &callbacks, NULL, &worker, test_err());
            break;
        case 'l': /* and leaves */
            worker = cox_worker_free(worker);
            break;
        }
        dprintf(STDOUT_FILENO, "%d %s\n", r, test_error.text);
    }
    return 0;
}

static int client_hear(const struct test_helper *client, char text[512])
{
    size_t length = 0;
    char own[512], *into = text ? text : own;
    while (length < 511 && read(client->out, into + length, 1) == 1 && into[length] != '\n')
        length++;
    into[length] = '\0';
    assert_true(length > 0);
    return atoi(into);
}

static int client_do(const struct test_helper *client, char order, char text[512])
{
    assert_int_equal(write(client->in, &order, 1), 1);
    return client_hear(client, text);
}

/* ---- tests ---- */

ATTACH_TEST(p8_a_dead_rank_that_was_started_by_hand_stays_dead_without_an_order)
{
    struct hand hand = {.result = -1, .options = COX_EXECUTOR_OPTIONS_INIT};
    char text[512];
    pid_t pids[2];
    hand_open(&hand, 2, attach);
    pids[0] = hand_worker(&hand, "0");
    pids[1] = hand_worker(&hand, "1");
    hand_complete(&hand);
    assert_int_equal(kill(pids[1], SIGKILL), 0);
    assert_int_equal(hand_worker_end(pids[1]), 128 + SIGKILL);
    test_await_death(hand.group, 1);
    struct test_helper client = test_helper_start("client", hand.control_socket);
    assert_int_equal(client_do(&client, '1', text), COX_STATE);
    assert_contains(text, "rank 1");
    assert_contains(text, "coxswain recover restart --rank 1");
    assert_int_equal(client_do(&client, 'v', text), COX_TAKEN);
    /* It is as dead as before. */
    assert_int_equal(test_call(hand.group, NULL, "echo x"), COX_PEER_DEAD);
    assert_int_equal(test_helper_wait(&client), 0);
    const struct test_how first = {.gather = COX_GATHER_ALL, .ranks = 1};
    assert_int_equal(test_call_how(hand.group, NULL, &first, "echo alone"), 0);
    test_group_free(hand.group);
    assert_int_equal(hand_worker_end(pids[0]), 0);
}

ATTACH_TEST(b20_a_process_that_connects_and_leaves_frees_its_slot_and_is_not_signalled)
{
    struct hand hand = {.result = -1, .options = COX_EXECUTOR_OPTIONS_INIT};
    char text[512];
    hand_open(&hand, 1, attach);
    struct test_helper client = test_helper_start("client", hand.control_socket);
    assert_int_equal(client_do(&client, 'v', text), 0);
    assert_int_equal(client_do(&client, 'v', text), 0); /* the same one again */
    pid_t pid = hand_worker(&hand, "0");
    hand_complete(&hand);
    assert_int_equal(cox_executor_pid(test_group_executor(hand.group), 0), pid);
    test_expect_echo(hand.group, "x");
    test_group_free(hand.group);
    assert_int_equal(hand_worker_end(pid), 0);
    assert_int_equal(test_helper_wait(&client), 0); /* it was not signalled */
}

ATTACH_TEST(b20_a_process_that_has_left_is_not_signalled)
{
    /* A wait for its end would be in vain, so it is signalled. */
    struct hand hand = {.result = -1,
                        .options = {.size = sizeof(struct cox_executor_options),
                                    .times.finalize_ms = 1,
                                    .times.term_ms = 1}};
    char text[512];
    hand_open(&hand, 1, attach);
    struct test_helper client = test_helper_start("client", hand.control_socket);
    if (client_do(&client, 'w', text))
        fail_msg("%s", text);
    hand_complete(&hand);
    assert_int_equal(client_do(&client, 'l', text), 0);
    assert_int_equal(test_call(hand.group, NULL, "echo x"), COX_PEER_DEAD);
    assert_contains(test_error_text(hand.group), "left the group, its process lives");
    assert_int_equal(client_do(&client, 'v', text), COX_TAKEN);
    test_group_free(hand.group);
    assert_int_equal(test_helper_wait(&client), 0);
}

struct replacement {
    struct cox_executor *executor;
    int result;
    struct cox_error err;
};

static void *replacement_main(void *argument)
{
    struct replacement *order = argument;
    order->result = cox_executor_restart(order->executor, 0,
                                         cox_deadline_after_ms(TEST_PATIENCE_MS), &order->err);
    return NULL;
}

/* A process that was the rank, left, and lives on: it is released, another one takes its place, and
 * that may even be the same process, as another incarnation. */
ATTACH_TEST(p8_b20_a_process_that_has_left_is_released_and_replaced)
{
    struct hand hand = {.result = -1,
                        .options = {.size = sizeof(struct cox_executor_options),
                                    .times.finalize_ms = 1,
                                    .times.term_ms = 1}};
    char text[512];
    hand_open(&hand, 1, attach);
    struct test_helper client = test_helper_start("client", hand.control_socket);
    if (client_do(&client, 'w', text))
        fail_msg("%s", text);
    hand_complete(&hand);
    for (int k = 0; k < 2; k++) {
        struct replacement order = {.executor = test_group_executor(hand.group), .result = -1};
        pthread_t thread;
        int r;
        assert_int_equal(client_do(&client, 'l', text), 0);
        assert_int_equal(client_do(&client, 'v', text), COX_TAKEN);
        assert_int_equal(pthread_create(&thread, NULL, replacement_main, &order), 0);
        /* Refused until it is waited for. */
        while ((r = client_do(&client, 'w', text)) == COX_TAKEN)
            continue;
        if (r)
            fail_msg("%d: %s", r, text);
        pthread_join(thread, NULL);
        if (order.result)
            fail_msg("%d: %s", order.result, order.err.text);
        assert_int_equal(client_do(&client, 'o', text), COX_STALE);
    }
    assert_int_equal(client_do(&client, 'l', text), 0);
    assert_int_equal(client_do(&client, 'v', text), COX_TAKEN);
    test_group_free(hand.group);
    assert_int_equal(test_helper_wait(&client), 0); /* it was not signalled */
}

/* Its pid may belong to another process by the time it is checked. */
TEST(b25_a_process_that_claims_another_identity_is_no_rank)
{
    struct hand hand = {.result = -1, .options = COX_EXECUTOR_OPTIONS_INIT};
    char text[512];
    hand_open(&hand, 1, COX_ATTACH_SEALED);
    struct test_helper client = test_helper_start("client", hand.control_socket);
    assert_int_equal(client_do(&client, 's', text), COX_PEER_DEAD);
    /* Nor is the coordinator, which would signal itself. */
    assert_refused(log_on(hand.control_socket, COX_HELLO_RANK_ANY, 0, test_err()), COX_INVALID,
                   "this process is the coordinator");
    if (client_do(&client, 'w', text))
        fail_msg("%s", text);
    hand_complete(&hand);
    assert_int_equal(client_do(&client, 'l', text), 0);
    test_group_free(hand.group);
    assert_int_equal(test_helper_wait(&client), 0);
}

TEST(b20_a_rank_that_is_never_started_is_named)
{
    struct hand hand = {
        .result = -1,
        .options = {.size = sizeof(struct cox_executor_options), .times.start_timeout_ms = 100}};
    hand_open(&hand, 1, COX_ATTACH_SEALED);
    pthread_join(hand.thread, NULL);
    assert_int_equal(hand.result, COX_TIMEOUT);
    assert_contains(hand.err.text, "rank 0 has not attached in time");
    assert_contains(hand.err.text, "--socket");
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "client") == 0)
        return client_main(argv[2]);
    return test_run(NULL, NULL);
}
