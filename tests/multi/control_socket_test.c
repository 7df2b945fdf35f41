/* The control socket's own side: which clients are accepted, which are not, and that no client
 * delays another. */
#include "channel/socket/hello.h"
#include "control_socket_fixture.h"

#include <malloc.h>

/* ---- accepted clients ---- */

struct worker_connection {
    struct cox_hello hello;
    uint32_t rank, fd_count;
    /* pipe ends: accepted; until the other end closes */
    int told, hold;
};

static void worker_connection(void *context)
{
    const struct worker_connection *connection = context;
    struct cox_control_connection session;
    int r = cox_control_socket_connect(cox_control_socket_path(control_socket), &connection->hello,
                                       PATIENCE, &session, test_err());
    if (r)
        fprintf(stderr, "%s\n", test_error.text);
    CHECK(r == 0);
    CHECK(session.hello_reply.version == COX_HELLO_VERSION &&
          session.hello_reply.group_incarnation == 77);
    CHECK(session.hello_reply.attach == COX_ATTACH_SEALED && session.hello_reply.incarnation == 1);
    CHECK(connection->rank == COX_HELLO_RANK_ANY || session.hello_reply.rank == connection->rank);
    CHECK(session.fd_count == connection->fd_count);
    for (uint32_t i = 0; i < session.fd_count; i++) {
        CHECK(fd_says(session.fds[i], i));
        CHECK(session.fds[i] > STDERR_FILENO);
        CHECK(fcntl(session.fds[i], F_GETFD) == FD_CLOEXEC);
    }
    CHECK(fcntl(session.fd, F_GETFD) == FD_CLOEXEC);
    CHECK((fcntl(session.fd, F_GETFL) & O_NONBLOCK) == 0);
    if (connection->told >= 0) {
        char byte;
        tell(connection->told);
        CHECK(read(connection->hold, &byte, 1) == 0);
    }
    cox_control_connection_close(&session);
    CHECK(session.fd == -1 && session.fd_count == 0);
    cox_control_connection_close(&session);
}

OPEN_SOCKET_TEST(a1_a9_a_worker_gets_its_place_and_all_its_fds_at_once)
{
    const uint32_t counts[] = {0, 1, 4, 28, COX_HELLO_FD_COUNT_MAX};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        struct worker_connection connection = {worker_hello(), 3, counts[i], -1, -1};
        connection.hello.rank = 3;
        connection.hello.rank_count = 4;
        connection.hello.start = 12345;
        HOST(host.fd_count = counts[i]);
        pid_t pid = client_start(worker_connection, &connection);
        child_join(pid);
        await_count(&host.gone, (uint32_t)i + 1);
        assert_int_equal(last_client().pid, pid);
        assert_int_equal(last_client().uid, geteuid());
        assert_int_equal(last_client().hello.rank, 3);
        assert_true(last_client().hello.start == 12345);
        assert_int_equal(last_client().id, i + 1);
    }
}

OPEN_SOCKET_TEST(b20_the_end_of_a_worker_is_the_end_of_its_connection)
{
    int told[2], hold[2];
    test_pipe(told);
    test_pipe(hold);
    struct worker_connection connection = {worker_hello(), COX_HELLO_RANK_ANY, 4, told[1], hold[0]};
    for (uint32_t i = 0; i < 3; i++) {
        pid_t pid = client_start(worker_connection, &connection);
        assert_true(heard(told[0]));
        assert_int_equal(read_count(&host.gone), i);
        kill(pid, SIGKILL);
        assert_true(WIFSIGNALED(child_status(pid)));
        await_count(&host.gone, i + 1);
        assert_int_equal(last_client().pid, pid);
    }
}

static void at_once(void *context)
{
    struct worker_connection *connection = context;
    char byte;
    CHECK(read(connection->told, &byte, 1) == 0); /* all of them are there */
    connection->told = -1;
    worker_connection(connection);
}

OPEN_SOCKET_TEST(a1_64_workers_come_in_at_once)
{
    pid_t pids[64];
    int gate[2];
    HOST(host.rank_count = 64);
    test_pipe(gate);
    struct worker_connection connection = {worker_hello(), COX_HELLO_RANK_ANY, 4, gate[0], -1};
    for (int i = 0; i < 64; i++) {
        int write_end = gate[1];
        pids[i] = fork();
        assert_true(pids[i] >= 0);
        if (pids[i] == 0) {
            close(write_end);
            at_once(&connection);
            _exit(0);
        }
    }
    test_close(gate[1]);
    for (int i = 0; i < 64; i++)
        child_join(pids[i]);
    await_count(&host.gone, 64);
    assert_int_equal(read_count(&host.workers), 64);
    for (int i = 0; i < 64; i++) /* each of them once */
        for (int j = 0; j < i; j++)
            assert_int_not_equal(host.gone_id[i], host.gone_id[j]);
}

static void command_connection(void *context)
{
    struct cox_control_connection session;
    char text[4] = "";
    int r = connect_as(COX_HELLO_COMMAND, &session);
    CHECK(r == *(int *)context);
    if (r) {
        CHECK(strstr(test_error.text, r == COX_UNSUPPORTED ? "no commands" : "not now"));
        return;
    }
    CHECK(session.fd_count == 0);
    for (int i = 0; i < 3; i++) {
        CHECK(cox_socket_send(session.fd, "abc", 4, NULL, 0, PATIENCE) == 0);
        CHECK(cox_socket_receive(session.fd, text, 4, NULL, 0, NULL, PATIENCE) == 0);
        CHECK(strcmp(text, "abc") == 0);
    }
    cox_control_connection_close(&session);
}

OPEN_SOCKET_TEST(a_command_has_a_stream_of_its_own)
{
    int expected = 0;
    int before = fd_count();
    client_run(command_connection, &expected);
    await_count(&host.commands, 1);
    HOST(host.refuse_command = expected = COX_BUSY);
    client_run(command_connection, &expected);
    await_fds(before);
    assert_int_equal(read_count(&host.gone), 0);
}

SOCKET_TEST(roles_without_a_hook_are_refused)
{
    struct cox_control_socket_options options = host_options("test");
    const struct cox_control_socket_hooks none = {.context = NULL};
    struct cox_control_connection session;
    int expected = COX_UNSUPPORTED;
    assert_int_equal(cox_control_socket_open(&options, &none, &control_socket, NULL), 0);
    client_run(command_connection, &expected);
    assert_refused(connect_as(COX_HELLO_WORKER, &session), COX_UNSUPPORTED,
                   "workers do not come in");
}

/* ---- refused clients ---- */

static void refused(const struct cox_hello *hello, int code, const char *text)
{
    struct cox_control_connection session;
    assert_refused(cox_control_socket_connect(cox_control_socket_path(control_socket), hello,
                                              PATIENCE, &session, test_err()),
                   code, text);
}

OPEN_SOCKET_TEST(a21_a10_a_veto_has_its_reason_and_its_code)
{
    struct cox_hello hello = worker_hello();
    HOST(host.refuse = COX_TAKEN);
    HOST(strcpy(host.reason, "rank 3 is served by process 17"));
    refused(&hello, COX_TAKEN, "rank 3 is served by process 17");
    HOST(host.refuse = -EIO); /* no status */
    refused(&hello, COX_REJECTED, "rank 3 is served");
    HOST(host.refuse = COX_DIVERGED);
    char reason[sizeof host.reason];
    memset(reason, 'x', 253);
    strcpy(reason + 253, "!\xe2\x98\x83 and more");
    HOST(strcpy(host.reason, reason));
    refused(&hello, COX_DIVERGED, "xx!");
    HOST(host.refuse = 0);
    hello.rank_count = 5;
    refused(&hello, COX_DIVERGED, "the group has 4 ranks, not 5");
    assert_int_equal(read_count(&host.gone), 0);
    assert_int_equal(read_count(&host.workers), 0);
}

OPEN_SOCKET_TEST(a4_a5_a6_a7_a8_a_hello_that_cannot_be_is_refused_in_words)
{
    static const struct {
        struct cox_hello hello;
        int code;
        const char *text;
    } hellos[] = {
        {{.version = 9}, COX_VERSION, "the client speaks version 9, the coordinator speaks 1"},
        {{.rank_count = 200}, COX_INVALID, "world size; count=200"},
        {{.fd_count_max = 129}, COX_INVALID, "fds at once; count=129"},
        {{.request_size_min = UINT64_MAX}, COX_INVALID, "request size; bytes="},
        {{.flags = 8}, COX_INVALID, "flags; bits=0x8"},
    };
    for (size_t i = 0; i < sizeof hellos / sizeof *hellos; i++) {
        struct cox_hello hello = hellos[i].hello;
        hello.role = COX_HELLO_WORKER;
        hello.rank = COX_HELLO_RANK_ANY;
        refused(&hello, hellos[i].code, hellos[i].text);
    }
    assert_int_equal(read_count(&host.admitted), 0);
}

OPEN_SOCKET_TEST(a12_a_worker_that_takes_too_few_fds_is_refused)
{
    struct cox_hello hello = worker_hello();
    HOST(host.fd_count = 28);
    hello.fd_count_max = 27;
    refused(&hello, COX_TOO_LARGE, "needs 28 fds at once; this one takes 27");
    await_count(&host.gone, 1);
    hello.fd_count_max = 28;
    struct worker_connection connection = {hello, COX_HELLO_RANK_ANY, 28, -1, -1};
    client_run(worker_connection, &connection);
}

/* The hook's fds cannot be sent: none was sent, and the client gets the error. */
OPEN_SOCKET_TEST(b19_a_hello_reply_that_cannot_be_sent_is_a_refusal)
{
    const struct cox_hello hello = worker_hello();
    int saved = host_fds[2];
    HOST(host_fds[2] = 9999);
    refused(&hello, COX_REJECTED, "the hello reply could not be sent: Bad file descriptor");
    await_count(&host.gone, 1);
    HOST(host_fds[2] = saved);
}

static void proper_connection(void)
{
    struct worker_connection connection = {worker_hello(), COX_HELLO_RANK_ANY, 4, -1, -1};
    client_run(worker_connection, &connection);
}

SOCKET_TEST(a15_a17_a_slow_client_gets_the_reason)
{
    struct cox_control_socket_options options = host_options("test");
    char text[256];
    uint8_t frame[COX_HELLO_SIZE];
    struct cox_hello hello = worker_hello();
    options.hello_ms = 20;
    socket_start(&options);
    const size_t sizes[] = {0, 1, 1023};
    cox_hello_format(&hello, frame);
    for (size_t i = 0; i < 3; i++) {
        int fd = raw_client();
        assert_true(sizes[i] == 0 || send(fd, frame, sizes[i], 0) == (ssize_t)sizes[i]);
        raw_refused(fd, COX_TIMEOUT, "of 1024 bytes of the hello came within 20 ms");
    }
    /* Bytes that go on coming, one by one, give it no more time. */
    unsigned came = COX_HELLO_SIZE;
    int slow = raw_client();
    for (size_t i = 0; i < 1023 && send(slow, frame + i, 1, MSG_NOSIGNAL) == 1; i++)
        nanosleep(&(struct timespec){.tv_nsec = 10 * (long)COX_NSEC_PER_MSEC}, NULL);
    assert_int_equal(raw_reply(slow, text), COX_TIMEOUT);
    assert_int_equal(sscanf(text, "%u of 1024", &came), 1);
    assert_true(came < 1023);
    close(slow);
    socket_stop();
    options.hello_ms = 0; /* with a silent client */
    socket_start(&options);
    raw_refused(raw_client(), COX_TIMEOUT, "came within 1000 ms");
}

/* Byte by byte is a frame all the same. */
OPEN_SOCKET_TEST(a17_a_frame_may_come_in_any_pieces)
{
    uint8_t frame[COX_HELLO_SIZE];
    struct cox_hello hello = worker_hello();
    uint64_t seed = 7;
    cox_hello_format(&hello, frame);
    for (int round = 0; round < 20; round++) {
        int fd = raw_client();
        for (size_t at = 0, size; at < sizeof frame; at += size) {
            size = round == 0 ? 1 : 1 + random_next(&seed) % 300;
            size = size > sizeof frame - at ? sizeof frame - at : size;
            assert_int_equal(send(fd, frame + at, size, 0), size);
        }
        assert_int_equal(raw_reply(fd, NULL), 0);
        close(fd);
        await_count(&host.gone, (uint32_t)round + 1);
    }
}

SOCKET_TEST(b21_200_slow_clients_delay_no_other)
{
    int slow[200];
    for (int few = 0; few < 2; few++) {
        struct cox_control_socket_options options = host_options("test");
        options.client_max = few ? 16 : 0; /* then the oldest make room */
        socket_start(&options);
        for (int i = 0; i < 200; i++) {
            slow[i] = test_own_fd(raw_client());
            assert_int_equal(send(slow[i], "\1", 1, MSG_NOSIGNAL), 1);
            if (i % 40 == 39)
                proper_connection();
        }
        await_count(&host.gone, few ? 10 : 5);
        if (few)
            raw_refused(dup(slow[0]), COX_FULL, "a newer client needed the place, one of 16");
        for (int i = 0; i < 200; i++)
            test_close(slow[i]);
        socket_stop();
    }
}

SOCKET_TEST(an_accepted_client_stays_when_all_places_are_taken)
{
    struct cox_control_socket_options options = host_options("test");
    struct cox_control_connection sessions[3];
    const struct cox_hello hello = worker_hello();
    options.client_max = 3;
    socket_start(&options);
    for (int i = 0; i < 3; i++)
        assert_ok(connect_as(COX_HELLO_WORKER, &sessions[i]));
    for (int i = 0; i < 5; i++)
        refused(&hello, COX_FULL, "3 connections are open");
    assert_int_equal(read_count(&host.gone), 0);
    cox_control_connection_close(&sessions[1]);
    await_count(&host.gone, 1);
    assert_ok(connect_as(COX_HELLO_WORKER, &sessions[1]));
    for (int i = 0; i < 3; i++)
        cox_control_connection_close(&sessions[i]);
    await_count(&host.gone, 4);
}

static void flooding(void *context)
{
    uint64_t seed = (uint64_t)getpid();
    (void)context;
    for (;;) {
        uint8_t bytes[2048];
        int fd = raw_client();
        if (fd < 0)
            continue;
        for (size_t i = 0; i < sizeof bytes; i++)
            bytes[i] = (uint8_t)random_next(&seed);
        size_t size = random_next(&seed) % 3 ? random_next(&seed) % sizeof bytes : 0;
        if (size)
            send(fd, bytes, size, MSG_NOSIGNAL | MSG_DONTWAIT);
        close(fd);
    }
}

/* Connections as fast as they can be made, some with garbage, most closed at once. */
OPEN_SOCKET_TEST(b14_b21_a_flood_of_garbage_delays_no_client)
{
    pid_t flood[2];
    for (int i = 0; i < 2; i++)
        flood[i] = client_start(flooding, NULL);
    for (int i = 0; i < 20; i++)
        proper_connection();
    for (int i = 0; i < 2; i++)
        child_kill(flood[i]);
    await_count(&host.gone, 20);
    assert_int_equal(read_count(&host.workers), 20);
}

/* All lines that were written, and the numbers of those that were not. */
static uint64_t log_told(void)
{
    uint64_t told = 0;
    for (char *line = host.log, *end; *line; line = end + 1) {
        unsigned long long more = 0;
        end = strchr(line, '\n');
        assert_non_null(end); /* none was cut */
        told += sscanf(line, "%llu more like it", &more) == 1 ? more : 1;
    }
    return told;
}

OPEN_SOCKET_TEST(g1h_a_storm_of_refusals_is_a_few_lines_and_their_number)
{
    enum { COUNT = 30000 };
    uint8_t frame[COX_HELLO_SIZE];
    memset(frame, 0xff, sizeof frame);
    for (int i = 0; i < COUNT; i++) {
        int fd = raw_client();
        cox_socket_send(fd, frame, sizeof frame, NULL, 0, PATIENCE);
        raw_refused(fd, COX_VERSION, "");
    }
    proper_connection();
    socket_stop();
    assert_int_equal(log_told(), COUNT);
    if (strlen(host.log) > 8192)
        fail_msg("%zu bytes of log", strlen(host.log));
}

static void hoarding(void *context)
{
    int held[800];
    (void)context;
    memset(held, -1, sizeof held);
    for (size_t i = 0;; i = (i + 1) % 800) {
        cox_close_fd(&held[i]);
        held[i] = raw_client();
    }
}

/* Connections as fast as they can be made, that say nothing and stay. A client that the scheduler
 * stops between its connect and its send is silent, too: it may be refused, and tries again. */
SOCKET_TEST(b21_a_flood_of_silent_connections_delays_no_other)
{
    pid_t flood[4];
    int refused = 0;
    struct cox_control_socket_options options = host_options("test");
    options.log.fn = NULL;
    socket_start(&options);
    for (int i = 0; i < 4; i++)
        flood[i] = client_start(hoarding, NULL);
    for (int i = 0; i < 100; i++) {
        _cox_cleanup_(cox_control_connection_close) struct cox_control_connection session = {
            .fd = -1};
        if (connect_as(COX_HELLO_WORKER, &session)) {
            if (!strstr(test_error.text, "a newer client needed the place") || ++refused > 10)
                fail_msg("connection %d: %s", i, test_error.text);
            i--;
        }
    }
    for (int i = 0; i < 4; i++)
        child_kill(flood[i]);
}

OPEN_SOCKET_TEST(b14_garbage_is_refused_in_words)
{
    uint64_t seed = 4711;
    char text[256];
    for (int round = 0; round < 200; round++) {
        uint8_t bytes[COX_HELLO_SIZE];
        int fd = raw_client();
        for (size_t i = 0; i < sizeof bytes; i++)
            bytes[i] = (uint8_t)random_next(&seed);
        if (round % 2) { /* of this version, at least */
            memset(bytes, 0, 8);
            bytes[0] = 1;
        }
        assert_int_equal(send(fd, bytes, sizeof bytes, 0), sizeof bytes);
        assert_int_equal(raw_reply(fd, text), round % 2 ? COX_INVALID : COX_VERSION);
        assert_true(strlen(text) > 20);
        close(fd);
    }
    assert_int_equal(read_count(&host.admitted), 0);
}

OPEN_SOCKET_TEST(b15_fds_that_come_with_a_hello_are_closed)
{
    uint8_t frame[COX_HELLO_SIZE];
    struct cox_hello hello = worker_hello();
    cox_hello_format(&hello, frame);
    int before = fd_count();
    for (uint32_t count = 1; count <= COX_HELLO_FD_COUNT_MAX; count *= 2)
        for (int late = 0; late < 2; late++) {
            int fd = raw_client();
            if (late) /* within the frame */
                assert_int_equal(cox_socket_send(fd, frame, 100, NULL, 0, PATIENCE), 0);
            assert_ok(cox_socket_send(fd, frame + 100 * late, 1024 - 100 * (size_t)late, host_fds,
                                      count, PATIENCE));
            raw_refused(fd, COX_CORRUPT, "came with the hello");
        }
    assert_int_equal(read_count(&host.admitted), 0);
    await_fds(before);
}

OPEN_SOCKET_TEST(a16_a_client_that_leaves_before_its_hello_is_complete_is_forgotten)
{
    uint8_t frame[COX_HELLO_SIZE] = {1};
    int before = fd_count();
    const size_t sizes[] = {1, 500, 1023};
    for (size_t i = 0; i < 3; i++)
        for (int half = 0; half < 2; half++) {
            char text[64];
            int fd = raw_client();
            assert_int_equal(send(fd, frame, sizes[i], 0), sizes[i]);
            if (half) {
                assert_int_equal(shutdown(fd, SHUT_WR), 0);
                assert_int_equal(raw_reply(fd, NULL), -COX_CLOSED);
            }
            close(fd);
            snprintf(text, sizeof text, "left after %zu of 1024 bytes", sizes[i]);
            await_log(text);
        }
    assert_int_equal(read_count(&host.admitted), 0);
    proper_connection();
    await_count(&host.gone, 1);
    await_fds(before);
}

/* Half of a connection is none, for a worker. */
OPEN_SOCKET_TEST(a16_b20_a_worker_that_closes_one_direction_has_gone)
{
    struct cox_control_connection session;
    struct cox_hello hello = worker_hello();
    uint8_t frame[COX_HELLO_SIZE];
    assert_ok(connect_as(COX_HELLO_WORKER, &session));
    assert_int_equal(shutdown(session.fd, SHUT_WR), 0);
    await_count(&host.gone, 1);
    cox_control_connection_close(&session);
    cox_hello_format(&hello, frame);
    int fd = raw_client();
    assert_int_equal(send(fd, frame, sizeof frame, 0), sizeof frame);
    assert_int_equal(shutdown(fd, SHUT_WR), 0);
    assert_int_equal(raw_reply(fd, NULL), 0);
    await_count(&host.gone, 2);
    close(fd);
}

OPEN_SOCKET_TEST(b14_more_than_a_frame_is_refused)
{
    uint8_t bytes[COX_HELLO_SIZE * 3] = {0};
    struct cox_hello hello = worker_hello();
    struct cox_control_connection session;
    cox_hello_format(&hello, bytes);
    for (size_t more = 1; more < sizeof bytes - COX_HELLO_SIZE; more *= 3) {
        int fd = raw_client();
        assert_int_equal(send(fd, bytes, COX_HELLO_SIZE + more, 0), COX_HELLO_SIZE + more);
        raw_refused(fd, COX_CORRUPT, "more than the 1024 bytes");
    }
    /* And after its hello reply it has nothing to say: it is taken for dead. */
    assert_int_equal(read_count(&host.gone), 0);
    for (uint32_t with_fd = 0; with_fd < 2; with_fd++) {
        assert_ok(connect_as(COX_HELLO_WORKER, &session));
        assert_int_equal(cox_socket_send(session.fd, "x", 1, host_fds, with_fd, PATIENCE), 0);
        await_count(&host.gone, with_fd + 1);
        assert_int_equal(raw_reply(session.fd, NULL), -COX_CLOSED);
        cox_control_connection_close(&session);
    }
    await_log("expected nothing after its hello");
}

/* ---- want of fds, time, and much of it ---- */

/* Leaves this process room for so many fds. */
static void leave_fds(int count)
{
    int fds[8];
    struct rlimit limit;
    CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    for (int i = 0; i < count; i++) { /* the lowest ones: the last of them is the highest */
        fds[i] = dup(0);
        CHECK(fds[i] >= 0);
    }
    limit.rlim_cur = (rlim_t)fds[count - 1] + 1;
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    for (int i = 0; i < count; i++)
        close(fds[i]);
}

static void few_fds(void *context)
{
    (void)context;
    struct cox_control_connection session;
    struct rlimit limit;
    char text[256];

    CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    socket_start(NULL);
    leave_fds(1);                 /* the end of a connection */
    for (int i = 0; i < 4; i++) { /* it refuses more than once */
        int fd = raw_client();
        CHECK(fd >= 0 && raw_reply(fd, text) == COX_FULL);
        CHECK(strstr(text, "may not open more fds"));
        close(fd);
    }
    await_log("accepts no client");
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    CHECK(connect_as(COX_HELLO_WORKER, &session) == 0);
    cox_control_connection_close(&session);
    socket_stop();
}

SOCKET_TEST(a_socket_without_fds_refuses_and_recovers)
{
    client_run(few_fds, NULL);
}

struct scarce {
    /* pipe ends */
    int told, end;
};

/* A control socket with room for a few clients' fds and no more. */
static void scarce_socket(void *context)
{
    const struct scarce *scarce = context;
    struct cox_control_socket_options options = host_options("test");
    char byte;
    options.log.fn = NULL;
    CHECK(cox_control_socket_open(&options, &host_hooks, &control_socket, NULL) == 0);
    leave_fds(4);
    tell(scarce->told);
    CHECK(read(scarce->end, &byte, 1) == 0);
    CHECK(read_count(&host.workers) == 10);
    socket_stop();
}

/* If fds run out before places do, silent clients are closed in favour of connecting ones, too. */
SOCKET_TEST(b21_silent_clients_keep_no_fd_from_others)
{
    struct cox_hello hello = worker_hello();
    struct cox_control_connection session;
    int told[2], end[2], silent[50];
    char path[COX_SOCKET_PATH_SIZE];
    test_pipe(told);
    test_pipe(end);
    snprintf(path, sizeof path, "%s/test.sock", runtime_dir);
    struct scarce scarce = {told[1], end[0]};
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        close(end[1]);
        scarce_socket(&scarce);
        _exit(0);
    }
    assert_true(heard(told[0]));
    for (int i = 0; i < 50; i++) {
        silent[i] = test_own_fd(raw_connect(path));
        if (i % 5 < 4)
            continue;
        assert_ok(cox_control_socket_connect(path, &hello, PATIENCE, &session, test_err()));
        cox_control_connection_close(&session);
    }
    raw_refused(dup(silent[0]), COX_FULL,
                "0 of 1024 bytes of the hello had come when a newer client needed its fd");
    test_close(end[1]);
    child_join(pid);
}

static sem_t admit_entered, admit_go;

/* The first one holds the control socket up, until those that are to be there at once have come. */
static int held_admit(void *context, const struct cox_control_client *client, struct cox_error *err)
{
    static bool held;
    (void)context;
    (void)client;
    (void)err;
    if (held)
        return 0;
    held = true;
    sem_post(&admit_entered);
    while (sem_wait(&admit_go) < 0)
        continue;
    return 0;
}

static void more_than_fds(void *context)
{
    enum { COUNT = 6, ROOM = 3 };
    struct cox_control_socket_options options = host_options("crowd");
    struct cox_control_socket_hooks hooks = host_hooks;
    struct cox_hello hello = worker_hello();
    uint8_t frame[COX_HELLO_SIZE];
    int fds[COUNT + 1];
    char text[256];
    (void)context;
    hooks.admit = held_admit;
    HOST(host.fd_count = 0);
    CHECK(sem_init(&admit_entered, 0, 0) == 0 && sem_init(&admit_go, 0, 0) == 0);
    CHECK(cox_control_socket_open(&options, &hooks, &control_socket, NULL) == 0);
    cox_hello_format(&hello, frame);
    for (int i = 0; i <= COUNT; i++) {
        fds[i] = raw_client();
        CHECK(fds[i] >= 0);
        CHECK(cox_socket_send(fds[i], frame, sizeof frame, NULL, 0, PATIENCE) == 0);
        while (i == 0 && sem_wait(&admit_entered) < 0)
            continue;
    }
    leave_fds(ROOM);
    sem_post(&admit_go);
    for (int i = 0; i <= COUNT; i++) {
        int code = raw_reply(fds[i], text);
        if (code)
            fprintf(stderr, "client %d: %s\n", i, text);
        CHECK(code == (i <= ROOM ? 0 : COX_FULL));
        CHECK(i <= ROOM || strstr(text, "may not open more fds"));
    }
    for (int i = 0; i <= COUNT; i++)
        close(fds[i]);
    socket_stop();
}

/* A client that sends its whole hello at once does not count as silent. */
SOCKET_TEST(b21_a_connecting_client_keeps_its_fd_from_later_ones)
{
    client_run(more_than_fds, NULL);
}

/* poll(2) takes no more fds than the process may have. */
static void limit_lowered(void *context)
{
    (void)context;
    struct rlimit limit;
    struct cox_hello hello = {.role = COX_HELLO_WORKER, .flags = 1};
    uint8_t frame[COX_HELLO_SIZE];
    int fds[8];
    socket_start(NULL);
    for (int i = 0; i < 8; i++) {
        fds[i] = raw_client();
        CHECK(fds[i] >= 0);
    }
    proper_connection(); /* behind them: they are let in */
    CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    limit.rlim_cur = 4;
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    cox_hello_format(&hello, frame);
    CHECK(cox_socket_send(fds[0], frame, sizeof frame, NULL, 0, PATIENCE) == 0);
    /* A thread that was waiting in poll(2) refuses the hello, and its next poll(2) fails. One that
     * had not begun to wait fails at once, and answers nobody. */
    int r = cox_socket_wait(fds[0], POLLIN, cox_deadline_after_ms(500));
    CHECK(r == COX_TIMEOUT || (r == 0 && raw_reply(fds[0], NULL) == COX_INVALID));
    socket_stop();
}

SOCKET_TEST(b29_a_socket_can_be_closed_though_its_limit_was_lowered)
{
    child_run(limit_lowered, NULL);
}

SOCKET_TEST(b29_10000_connections_leave_nothing)
{
    struct cox_control_connection session;
    struct cox_control_socket_options options = host_options("test");
    options.log.fn = NULL;
    socket_start(&options);
    int before = 0;
    size_t memory = 0;
    for (uint32_t i = 0; i < 10000; i++) {
        if (i == 100) {
            await_count(&host.gone, 50);
            before = fd_count();
            memory = mallinfo2().uordblks;
        }
        assert_ok(connect_as(i % 2 ? COX_HELLO_WORKER : COX_HELLO_FD_STORE, &session));
        cox_control_connection_close(&session);
    }
    await_count(&host.gone, 5000);
    /* A last connection comes after all that went before. */
    assert_ok(connect_as(COX_HELLO_WORKER, &session));
    cox_control_connection_close(&session);
    await_count(&host.gone, 5001);
    await_fds(before);
    assert_true(mallinfo2().uordblks <= memory + 65536);
}

/* ---- the end ---- */

OPEN_SOCKET_TEST(a22_a_socket_that_closes_tells_all_clients)
{
    struct cox_control_connection sessions[2];
    char path[COX_SOCKET_PATH_SIZE];
    struct stat st;
    snprintf(path, sizeof path, "%s", cox_control_socket_path(control_socket));
    assert_int_equal(stat(path, &st), 0);
    assert_ok(connect_as(COX_HELLO_WORKER, &sessions[0]));
    assert_ok(connect_as(COX_HELLO_FD_STORE, &sessions[1]));
    int waiting = test_own_fd(raw_connect(path));
    socket_stop();
    assert_int_equal(raw_reply(waiting, NULL), -COX_CLOSED);
    assert_int_equal(stat(path, &st), -1);
    assert_int_equal(runtime_dir_count(), 0);
    assert_int_equal(read_count(&host.gone), 0); /* those get no message */
    for (int i = 0; i < 2; i++) {
        assert_int_equal(raw_reply(sessions[i].fd, NULL), -COX_CLOSED);
        cox_control_connection_close(&sessions[i]);
    }
    assert_null(cox_control_socket_close(NULL));
}

static void without_standard_fds(void *context)
{
    (void)context;
    struct cox_control_socket_options options = host_options("test");
    struct cox_control_connection session;
    options.log.fn = NULL;
    for (int fd = 0; fd < 3; fd++)
        close(fd);
    if (cox_control_socket_open(&options, &host_hooks, &control_socket, NULL) ||
        connect_as(COX_HELLO_WORKER, &session))
        _exit(1);
    if (session.fd < 3 || session.fds[0] < 3 || session.fds[3] < 3)
        _exit(2);
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) >= 0)
            _exit(3);
    cox_control_connection_close(&session);
    socket_stop();
}

SOCKET_TEST(b15_the_numbers_of_standard_fds_are_never_used)
{
    client_run(without_standard_fds, NULL);
}
