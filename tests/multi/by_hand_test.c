/* Workers that are started by hand and do not do as they should: they die, go, come twice, or never
 * come. */
#include "channel/base/peer.h"
#include "channel/socket/control_socket.h"
#include "hand.h"

#include <coxswain/worker.h>

extern char **environ;

/* Logs on as this process, and is gone again unless that is refused. */
static int log_on(const char *control_socket, uint32_t rank, uint32_t incarnation,
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
            r = log_on(control_socket, COX_HELLO_RANK_ANY, 0, 0, test_err());
            break;
        case 's': /* claims to be another incarnation of this pid */
            r = log_on(control_socket, COX_HELLO_RANK_ANY, 0, 1, test_err());
            break;
        case 'o': /* as an old incarnation */
            r = log_on(control_socket, 0, 1, 0, test_err());
            break;
        case '1':
            r = log_on(control_socket, 1, 0, 0, test_err());
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

static char client_text[512]; /* with the last result */

/* It does that, with this result. */
static void client_expect(const struct test_helper *client, char order, int expected)
{
    size_t length = 0;
    assert_int_equal(write(client->in, &order, 1), 1);
    while (length < sizeof client_text - 1 && read(client->out, client_text + length, 1) == 1 &&
           client_text[length] != '\n')
        length++;
    client_text[length] = '\0';
    if (length == 0 || atoi(client_text) != expected)
        fail_msg("'%c': expected %d, got %s", order, expected, client_text);
}

/* It was not signalled. */
static void client_end(struct test_helper *client)
{
    assert_int_equal(test_helper_wait(client), 0);
}

/* A group that waits, and a client that knows its control socket. */
static struct test_helper client_open(struct hand *hand, uint32_t rank_count,
                                      enum cox_attach attach)
{
    hand_open(hand, rank_count, attach);
    return test_helper_start("client", hand->control_socket);
}

/* A wait for the end of a process that has left would be in vain, so it is signalled. */
#define BRIEF                                                                                      \
    {                                                                                              \
        .times.finalize_ms = 1, .times.term_ms = 1                                                 \
    }

/* ---- tests ---- */

ATTACH_TEST(p8_a_dead_rank_that_was_started_by_hand_stays_dead_without_an_order)
{
    struct hand hand = {0};
    pid_t pids[2];
    hand_open(&hand, 2, attach);
    pids[0] = hand_worker(&hand, "0");
    pids[1] = hand_worker(&hand, "1");
    hand_complete(&hand);
    assert_int_equal(kill(pids[1], SIGKILL), 0);
    assert_int_equal(hand_worker_end(pids[1]), 128 + SIGKILL);
    test_await_death(hand.group, 1);
    struct test_helper client = test_helper_start("client", hand.control_socket);
    client_expect(&client, '1', COX_STATE);
    assert_contains(client_text, "rank 1");
    assert_contains(client_text, "coxswain recover restart --rank 1");
    client_expect(&client, 'v', COX_TAKEN);
    /* It is as dead as before. */
    assert_int_equal(test_call(hand.group, NULL, "echo x"), COX_PEER_DEAD);
    client_end(&client);
    const struct test_how first = {.gather = COX_GATHER_ALL, .ranks = 1};
    assert_int_equal(test_call_how(hand.group, NULL, &first, "echo alone"), 0);
    test_group_free(hand.group);
    assert_int_equal(hand_worker_end(pids[0]), 0);
}

ATTACH_TEST(b20_a_process_that_connects_and_leaves_frees_its_slot_and_is_not_signalled)
{
    struct hand hand = {0};
    struct test_helper client = client_open(&hand, 1, attach);
    client_expect(&client, 'v', 0);
    client_expect(&client, 'v', 0); /* the same one again */
    pid_t pid = hand_worker(&hand, "0");
    hand_complete(&hand);
    assert_int_equal(test_pid(hand.group, 0), pid);
    test_expect_echo(hand.group, "x");
    test_group_free(hand.group);
    assert_int_equal(hand_worker_end(pid), 0);
    client_end(&client);
}

ATTACH_TEST(b20_a_process_that_has_left_is_not_signalled)
{
    struct hand hand = {.options = BRIEF};
    struct test_helper client = client_open(&hand, 1, attach);
    client_expect(&client, 'w', 0);
    hand_complete(&hand);
    client_expect(&client, 'l', 0);
    assert_int_equal(test_call(hand.group, NULL, "echo x"), COX_PEER_DEAD);
    assert_contains(test_error_text(hand.group), "left the group, its process lives");
    client_expect(&client, 'v', COX_TAKEN);
    test_group_free(hand.group);
    client_end(&client);
}

/* A process that was the rank, left, and lives on: it is released, another one takes its place, and
 * that may even be the same process, as another incarnation. */
ATTACH_TEST(p8_b20_a_process_that_has_left_is_released_and_replaced)
{
    struct hand hand = {.options = BRIEF};
    struct test_helper client = client_open(&hand, 1, attach);
    client_expect(&client, 'w', 0);
    hand_complete(&hand);
    for (size_t k = 0; k < 2; k++) {
        struct order order;
        client_expect(&client, 'l', 0);
        client_expect(&client, 'v', COX_TAKEN);
        order_give(&order, &hand, 0, test_patience(), k + 1);
        client_expect(&client, 'w', 0);
        if (order_end(&order))
            fail_msg("%d: %s", order.result, order.err.text);
        client_expect(&client, 'o', COX_STALE);
    }
    client_expect(&client, 'l', 0);
    client_expect(&client, 'v', COX_TAKEN);
    test_group_free(hand.group);
    client_end(&client);
}

/* Its pid may belong to another process by the time it is checked. */
TEST(b25_a_process_that_claims_another_identity_is_no_rank)
{
    struct hand hand = {0};
    struct test_helper client = client_open(&hand, 1, COX_ATTACH_SEALED);
    client_expect(&client, 's', COX_PEER_DEAD);
    /* Nor is the coordinator, which would signal itself. */
    assert_refused(log_on(hand.control_socket, COX_HELLO_RANK_ANY, 0, 0, test_err()), COX_INVALID,
                   "this process is the coordinator");
    client_expect(&client, 'w', 0);
    hand_complete(&hand);
    client_expect(&client, 'l', 0);
    test_group_free(hand.group);
    client_end(&client);
}

TEST(b20_a_rank_that_is_never_started_is_named)
{
    struct hand hand = {.options = {.times.start_timeout_ms = 100}};
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
