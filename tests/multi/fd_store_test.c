/* fds left at a control socket by one process, fetched by another. */
#include "channel/handle/fd_store.h"
#include "channel/socket/fd_entries.h"
#include "control_socket_fixture.h"

static void set(uint8_t *bytes, size_t size, uint64_t value)
{
    for (size_t i = 0; i < size; i++)
        bytes[i] = (uint8_t)(value >> (8 * i));
}

/* As handle.h lays it out; what a control socket does not look at is zero. */
static struct cox_handle handle_of(int fd, pid_t pid, uint32_t number)
{
    struct cox_handle handle = {{0}};
    struct stat st;
    CHECK(fstat(fd, &st) == 0);
    handle.bytes[3] = S_ISREG(st.st_mode) ? COX_HANDLE_MEMORY : COX_HANDLE_OTHER;
    set(handle.bytes + 4, 4, (uint64_t)pid);
    set(handle.bytes + 28, 4, st.st_dev);
    set(handle.bytes + 32, 8, st.st_ino);
    set(handle.bytes + 56, 4, number);
    return handle;
}

/* Of host_fds[number], as this process exports it. */
static struct cox_handle handle_own(uint32_t number)
{
    return handle_of(host_fds[number], getpid(), number);
}

static int put(struct cox_fd_store *fd_store, uint32_t number)
{
    const struct cox_handle handle = handle_own(number);
    return cox_fd_store_put(fd_store, &handle, host_fds[number], PATIENCE, test_err());
}

/* The fd is that of host_fds[number]. */
static void get(struct cox_fd_store *fd_store, uint32_t number, uint32_t value)
{
    const struct cox_handle handle = handle_of(host_fds[value], getpid(), number);
    int fd = -1;
    assert_ok(cox_fd_store_get(fd_store, &handle, PATIENCE, &fd, test_err()));
    assert_true(fd_says(fd, value));
    close(fd);
}

static struct cox_fd_store fd_store_open(void)
{
    struct cox_fd_store fd_store = {.fd = -1};
    if (cox_fd_store_connect(&fd_store, cox_control_socket_path(control_socket), PATIENCE,
                             test_err()))
        fprintf(stderr, "%s\n", test_error.text);
    CHECK(fd_store.fd >= 0);
    return fd_store;
}

struct exchange {
    int told, go;
};

/* Leaves three, withdraws one. */
static void fd_owner(void *context)
{
    const struct exchange *exchange = context;
    struct cox_fd_store fd_store = fd_store_open();
    char byte;
    for (uint32_t i = 0; i < 3; i++) {
        CHECK(put(&fd_store, i) == 0);
        CHECK(fd_says(host_fds[i], i)); /* it stays the caller's */
        CHECK(put(&fd_store, i) == COX_TAKEN);
    }
    struct cox_handle second = handle_own(1);
    CHECK(cox_fd_store_remove(&fd_store, &second, PATIENCE, NULL) == 0);
    CHECK(cox_fd_store_remove(&fd_store, &second, PATIENCE, NULL) == COX_NOT_FOUND);
    tell(exchange->told);
    CHECK(read(exchange->go, &byte, 1) == 0);
    for (;;)
        pause();
}

OPEN_SOCKET_TEST(l12_what_one_process_leaves_another_one_fetches)
{
    int told[2], go[2], fd = -1;
    test_pipe(told);
    test_pipe(go);
    struct exchange exchange = {told[1], go[0]};
    pid_t pid = client_start(fd_owner, &exchange);
    assert_true(heard(told[0]));
    struct cox_fd_store fd_store = fd_store_open();
    for (uint32_t i = 0; i < 3; i++) {
        struct cox_handle handle = handle_of(host_fds[i], pid, i);
        for (int again = 0; again < 2; again++) {
            int r = cox_fd_store_get(&fd_store, &handle, PATIENCE, &fd, NULL);
            assert_int_equal(r, i == 1 ? COX_NOT_FOUND : 0);
            if (r)
                continue;
            assert_true(fd_says(fd, i));
            assert_int_equal(fcntl(fd, F_GETFD), FD_CLOEXEC);
            close(fd);
        }
        /* Not this one's to withdraw, nor to leave. */
        assert_int_equal(cox_fd_store_remove(&fd_store, &handle, PATIENCE, NULL), COX_NOT_FOUND);
        assert_int_equal(cox_fd_store_put(&fd_store, &handle, host_fds[i], PATIENCE, test_err()),
                         COX_DENIED);
    }
    struct cox_handle handle = handle_of(host_fds[0], pid, 0), own = handle_of(0, getpid(), 5);
    assert_int_equal(cox_fd_store_put(&fd_store, &own, host_fds[4], PATIENCE, NULL), COX_DENIED);
    /* It dies: its entries are removed, at once for a client that sees its end. */
    kill(pid, SIGKILL);
    child_status(pid);
    await_log("with 2 fds left here, has gone");
    assert_int_equal(cox_fd_store_get(&fd_store, &handle, PATIENCE, &fd, NULL), COX_NOT_FOUND);
    cox_fd_store_close(&fd_store);
    cox_fd_store_close(&fd_store);
    assert_int_equal(cox_fd_store_get(&fd_store, &handle, PATIENCE, &fd, NULL), COX_CLOSED);
}

SOCKET_TEST(no_more_is_kept_than_the_limit)
{
    struct cox_control_socket_options options = host_options("test");
    options.fd_entry_max = 4;
    socket_start(&options);
    struct cox_fd_store fd_store = fd_store_open();
    int before = fd_count();
    for (uint32_t i = 0; i < 6; i++)
        assert_int_equal(put(&fd_store, i), i < 4 ? 0 : COX_FULL);
    await_fds(before + 4 + 1); /* its process is watched */
    struct cox_handle first = handle_own(0);
    assert_int_equal(cox_fd_store_remove(&fd_store, &first, PATIENCE, NULL), 0);
    assert_ok(put(&fd_store, 5));
    get(&fd_store, 5, 5);
    cox_fd_store_close(&fd_store);
    await_log("has gone");
    await_fds(before - 2);
}

/* The other side of the socket is the test. */
SOCKET_TEST(b14_replies_that_make_no_sense_are_corrupt)
{
    struct cox_handle handle = handle_own(0);
    for (int what = 0; what < 4; what++) {
        int ends[2], fd = -1;
        uint8_t reply[COX_FD_STORE_REPLY_SIZE];
        assert_int_equal(cox_socket_pair(ends), 0);
        int before = fd_count();
        struct cox_fd_store fd_store = {.fd = ends[0]};
        /* Replies to nothing that was asked are passed over, with their fds; then half of one. */
        cox_fd_store_reply_format(0, 12345, reply);
        if (what == 1)
            reply[0] = COX_STATUS_COUNT;
        if (what == 2)
            reply[4] = 1;
        assert_ok(
            cox_socket_send(ends[1], reply, sizeof reply, host_fds, what == 3 ? 2 : 1, PATIENCE));
        assert_int_equal(cox_socket_send(ends[1], reply, 3, NULL, 0, PATIENCE), 0);
        int r = cox_fd_store_get(&fd_store, &handle, cox_deadline_after_ms(20), &fd, NULL);
        assert_int_equal(r, what == 0 ? COX_TIMEOUT : COX_CORRUPT);
        assert_int_equal(fd, -1);
        assert_int_equal(fd_store.fd >= 0, what == 0);
        assert_int_equal(fd_count(), before - (what != 0));
        cox_fd_store_close(&fd_store);
        close(ends[1]);
    }
}

static void *replies(void *argument)
{
    const int *way = argument; /* fd, fds with the reply */
    uint8_t request[COX_FD_STORE_REQUEST_SIZE], reply[COX_FD_STORE_REPLY_SIZE];
    uint64_t number = 0;
    int came = -1;
    uint32_t count = 0;
    if (cox_socket_receive(way[0], request, sizeof request, &came, 1, &count, PATIENCE))
        return NULL;
    cox_close_fd(&came);
    memcpy(&number, request + 8, sizeof number);
    cox_fd_store_reply_format(0, number, reply);
    cox_socket_send(way[0], reply, sizeof reply, host_fds, (uint32_t)way[1], PATIENCE);
    return NULL;
}

SOCKET_TEST(b14_an_reply_with_the_wrong_fds_is_corrupt)
{
    struct cox_handle handle = handle_own(0);
    for (int fetch = 0; fetch < 2; fetch++)
        for (int sent = 0; sent < 2; sent++) {
            int ends[2], fd = -1;
            assert_int_equal(cox_socket_pair(ends), 0);
            struct cox_fd_store fd_store = {.fd = ends[0]};
            int way[2] = {ends[1], sent};
            pthread_t thread = test_thread(replies, way);
            int r = fetch ? cox_fd_store_get(&fd_store, &handle, PATIENCE, &fd, NULL)
                          : cox_fd_store_put(&fd_store, &handle, host_fds[0], PATIENCE, NULL);
            assert_int_equal(r, fetch == sent ? 0 : COX_CORRUPT);
            assert_int_equal(fd >= 0, fetch && sent);
            pthread_join(thread, NULL);
            cox_close_fd(&fd);
            cox_fd_store_close(&fd_store);
            close(ends[1]);
        }
}

/* Requests in pieces, requests without end, requests whose replies are never read. */
OPEN_SOCKET_TEST(b14_b21_an_odd_fd_owner_harms_itself_alone)
{
    uint64_t seed = 99;
    _cox_cleanup_(cox_fd_store_close) struct cox_fd_store good = fd_store_open();
    struct cox_handle handle = handle_own(2);
    int fd;
    assert_ok(put(&good, 2));
    for (int round = 0; round < 50; round++) {
        _cox_cleanup_(cox_fd_store_close) struct cox_fd_store odd = fd_store_open();
        uint8_t bytes[512];
        for (size_t i = 0; i < sizeof bytes; i++)
            bytes[i] = (uint8_t)random_next(&seed);
        if (round % 2) { /* nearly good */
            cox_fd_store_request_format((enum cox_fd_store_op)(round % 5), 7, &handle, bytes);
            bytes[random_next(&seed) % 128] ^= (uint8_t)(1 << round % 8);
        }
        size_t size = 1 + random_next(&seed) % sizeof bytes;
        assert_ok(cox_socket_send(odd.fd, bytes, size, host_fds, round % 3 == 0, PATIENCE));
        if (round % 7 == 0) { /* two fds: dropped */
            cox_socket_send(odd.fd, bytes, 1, host_fds, 2, PATIENCE);
            uint8_t reply;
            int r;
            do
                r = cox_socket_receive(odd.fd, &reply, 1, &fd, 1, &(uint32_t){0}, PATIENCE);
            while (r == 0);
            assert_int_equal(r, COX_CLOSED);
        }
        get(&good, 2, 2);
    }
    /* One that asks and asks, and never reads. */
    struct cox_fd_store deaf = fd_store_open();
    uint8_t request[COX_FD_STORE_REQUEST_SIZE];
    int r = 0;
    struct cox_handle none = handle_of(host_fds[3], getpid(), 4711);
    cox_fd_store_request_format(COX_FD_STORE_GET, 1, &none, request);
    while (r == 0)
        r = cox_socket_send(deaf.fd, request, sizeof request, NULL, 0, PATIENCE);
    assert_int_equal(r, COX_CLOSED);
    await_log("does not read its replies");
    cox_fd_store_close(&deaf);
    get(&good, 2, 2);
}

OPEN_SOCKET_TEST(b29_10000_fetches_leave_nothing)
{
    _cox_cleanup_(cox_fd_store_close) struct cox_fd_store fd_store = fd_store_open();
    int before = fd_count();
    for (uint32_t i = 0; i < 10000; i++) {
        struct cox_handle handle = handle_of(host_fds[i % 8], getpid(), i);
        assert_int_equal(cox_fd_store_put(&fd_store, &handle, host_fds[i % 8], PATIENCE, NULL), 0);
        get(&fd_store, i, i % 8);
        assert_int_equal(cox_fd_store_remove(&fd_store, &handle, PATIENCE, NULL), 0);
    }
    await_fds(before);
}

struct heir {
    struct exchange exchange;
    /* a read from exchange.go waits for its end */
    int gate;
    /* a child that keeps the connection; else the connection itself is left as well */
    bool forks;
};

static void leave_and_die(void *context)
{
    const struct heir *heir = context;
    close(heir->gate);
    struct cox_fd_store fd_store = fd_store_open();
    char byte;
    CHECK(put(&fd_store, 1) == 0);
    if (!heir->forks) {
        struct cox_handle own = handle_of(fd_store.fd, getpid(), 2);
        CHECK(cox_fd_store_put(&fd_store, &own, fd_store.fd, PATIENCE, NULL) == 0);
    } else if (fork() == 0) {
        tell(heir->exchange.told);
        CHECK(read(heir->exchange.go, &byte, 1) == 0);
        _exit(0);
    }
}

/* Its memory, too, would stay until the coordinator ends. */
OPEN_SOCKET_TEST(l8_b29_entries_of_a_dead_process_are_removed_though_its_connection_is_open)
{
    int told[2], go[2];
    test_pipe(told);
    test_pipe(go);
    int before = fd_count();
    struct heir heir = {.exchange = {told[1], go[0]}, .gate = go[1]};
    client_run(leave_and_die, &heir);
    await_fds(before);
    heir.forks = true;
    pid_t pid = client_start(leave_and_die, &heir);
    assert_true(heard(told[0]));
    child_join(pid);
    await_fds(before);
}

/* A hundred unsolicited replies are there: a client without time left receives one. */
SOCKET_TEST(b14_b21_replies_without_end_are_a_timeout)
{
    int ends[2], fd = -1;
    uint8_t bytes[COX_FD_STORE_REPLY_SIZE];
    assert_int_equal(cox_socket_pair(ends), 0);
    struct cox_fd_store fd_store = {.fd = ends[0]};
    struct cox_handle handle = handle_own(0);
    cox_fd_store_reply_format(0, 1, bytes);
    for (int i = 0; i < 100; i++)
        assert_int_equal(cox_socket_send(ends[1], bytes, sizeof bytes, NULL, 0, PATIENCE), 0);
    assert_int_equal(cox_fd_store_get(&fd_store, &handle, 0, &fd, NULL), COX_TIMEOUT);
    for (int i = 1; i < 100; i++)
        assert_int_equal(cox_socket_receive(ends[0], bytes, sizeof bytes, NULL, 0, NULL, 0), 0);
    cox_fd_store_close(&fd_store);
    close(ends[1]);
}

/* However many processes leave fds: workers, stop and status find a place. */
SOCKET_TEST(b21_fd_owners_leave_room_for_commands)
{
    struct cox_fd_store fd_stores[16];
    struct cox_control_socket_options options = host_options("room");
    struct cox_control_connection session;
    options.client_max = 16;
    socket_start(&options);
    for (int i = 0; i < 10; i++)
        fd_stores[i] = fd_store_open();
    assert_refused(cox_fd_store_connect(&fd_stores[10], cox_control_socket_path(control_socket),
                                        PATIENCE, test_err()),
                   COX_FULL, "10 connections");
    struct cox_control_connection workers[5];
    for (int i = 0; i < 5; i++)
        assert_ok(connect_as(COX_HELLO_WORKER, &workers[i]));
    assert_ok(connect_as(COX_HELLO_COMMAND, &session));
    cox_control_connection_close(&session);
    for (int i = 0; i < 5; i++)
        cox_control_connection_close(&workers[i]);
    cox_fd_store_close(&fd_stores[0]);
    uint64_t deadline_ns = PATIENCE; /* the control socket hears of it in its own time */
    while (cox_fd_store_connect(&fd_stores[0], cox_control_socket_path(control_socket), PATIENCE,
                                NULL) == COX_FULL &&
           cox_now_ns() < deadline_ns)
        continue;
    for (int i = 0; i < 10; i++)
        cox_fd_store_close(&fd_stores[i]);
}

OPEN_SOCKET_TEST(a_socket_that_closes_ends_its_fd_store)
{
    _cox_cleanup_(cox_fd_store_close) struct cox_fd_store fd_store = fd_store_open();
    struct cox_handle handle = handle_own(0);
    int fd = -1;
    assert_ok(put(&fd_store, 0));
    socket_stop();
    assert_refused(cox_fd_store_get(&fd_store, &handle, PATIENCE, &fd, test_err()), COX_CLOSED, "");
}
