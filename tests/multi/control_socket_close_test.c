/* Fds that clients send and the control socket does not want: closing them may hang as long as they
 * like, without delaying others. */
#include "channel/handle/fd_store.h"
#include "channel/socket/fd_entries.h"
#include "channel/socket/hello.h"
#include "control_socket_fixture.h"

#define TRAP_COUNT_MAX 4000

/* ---- fds whose last close hangs ---- */

enum kind {
    LINGERS, /* a TCP socket with bytes that are never read */
    NESTED,  /* a unix socket with such a socket in its queue, which cannot be disarmed */
    KIND_COUNT,
};

/* Each is sent by a process that exits at once: an exit does not linger, so that its own close
 * never hangs, whichever close is last. It leaves the test what must remain open: the other ends,
 * whose closing ends the hanging close, and its connection to the control socket. */
static int home = -1;
static int ends[TRAP_COUNT_MAX];
static uint32_t end_count;

static int lingering(void)
{
    int end, fd = test_lingering_socket(&end);
    CHECK(cox_socket_send(home, "e", 1, &end, 1, PATIENCE) == 0);
    return fd;
}

static int trap(enum kind kind)
{
    int fd = lingering(), pair[2];
    if (kind == LINGERS)
        return fd;
    CHECK(cox_socket_pair(pair) == 0);
    CHECK(cox_socket_send(pair[0], "x", 1, &fd, 1, PATIENCE) == 0);
    return pair[1];
}

static void traps_release(void)
{
    while (end_count > 0)
        close(ends[--end_count]);
}

/* Where a test failed the control socket may be at such a close, and would not end before it. */
static int traps_teardown(void **state)
{
    traps_release();
    return socket_teardown(state);
}

#define TRAP_TEST(name) TEST_WITH(name, socket_setup, traps_teardown)
/* ---- ways to leave them with the control socket ---- */

static void send_all(int fd, const void *bytes, size_t size, int *fds, uint32_t count)
{
    int r = cox_socket_send(fd, bytes, size, fds, count, PATIENCE);
    CHECK(r == 0 || r == COX_CLOSED); /* it has been refused by now */
}

static int fd_owner(void)
{
    struct cox_fd_store fd_store = {-1};
    if (cox_fd_store_connect(&fd_store, cox_control_socket_path(control_socket), PATIENCE,
                             test_err()))
        fprintf(stderr, "%s\n", test_error.text);
    CHECK(fd_store.fd >= 0);
    return fd_store.fd;
}

/* As handle.h lays it out. */
static struct cox_handle handle_of(int fd)
{
    struct cox_handle handle = {{0}};
    struct stat st;
    CHECK(fstat(fd, &st) == 0);
    uint32_t dev = (uint32_t)st.st_dev, pid = (uint32_t)getpid();
    uint64_t ino = st.st_ino;
    handle.bytes[3] = COX_HANDLE_OTHER;
    memcpy(handle.bytes + 4, &pid, sizeof pid);
    memcpy(handle.bytes + 28, &dev, sizeof dev);
    memcpy(handle.bytes + 32, &ino, sizeof ino);
    return handle;
}

/* Each returns the connection. */
static int with_a_hello(enum kind kind)
{
    uint8_t frame[COX_HELLO_SIZE] = {0};
    int fd = raw_client(), unwanted = trap(kind);
    send_all(fd, frame, 100, &unwanted, 1);
    return fd;
}

static int as_an_fd_entry(enum kind kind)
{
    int fd = fd_owner(), left = trap(kind);
    struct cox_fd_store fd_store = {fd};
    struct cox_handle handle = handle_of(left);
    CHECK(cox_fd_store_put(&fd_store, &handle, left, PATIENCE, NULL) == 0);
    return fd;
}

static int as_an_fd_entry_that_is_removed(enum kind kind)
{
    int fd = fd_owner(), left = trap(kind);
    struct cox_fd_store fd_store = {fd};
    struct cox_handle handle = handle_of(left);
    CHECK(cox_fd_store_put(&fd_store, &handle, left, PATIENCE, NULL) == 0);
    CHECK(cox_fd_store_remove(&fd_store, &handle, PATIENCE, NULL) == 0);
    return fd;
}

/* The rest of the request never comes. */
static int with_half_a_request(enum kind kind)
{
    uint8_t bytes[COX_FD_STORE_REQUEST_SIZE] = {0};
    int fd = fd_owner(), left = trap(kind);
    send_all(fd, bytes, sizeof bytes / 2, &left, 1);
    return fd;
}

/* The rest comes when its sender has ended: the control socket alone has the fd by then, and
 * refuses it. */
static int with_a_request_in_two_parts(enum kind kind)
{
    return with_half_a_request(kind);
}

static void send_second_part(int fd)
{
    uint8_t bytes[COX_FD_STORE_REQUEST_SIZE] = {0};
    send_all(fd, bytes, sizeof bytes - sizeof bytes / 2, NULL, 0);
}

/* Not of the handle that it comes with. */
static int as_an_fd_entry_that_is_refused(enum kind kind)
{
    int fd = fd_owner(), left = trap(kind);
    struct cox_fd_store fd_store = {fd};
    struct cox_handle handle = {{0}};
    CHECK(cox_fd_store_put(&fd_store, &handle, left, PATIENCE, NULL) == COX_DENIED);
    return fd;
}

static int more_than_is_allowed(enum kind kind)
{
    uint8_t bytes[COX_FD_STORE_REQUEST_SIZE] = {0};
    int fd = fd_owner(), unwanted[3];
    for (size_t i = 0; i < 3; i++)
        unwanted[i] = trap(kind);
    send_all(fd, bytes, sizeof bytes, unwanted, 3);
    return fd;
}

/* Behind the bytes that end the connection: they are never received. */
static int left_unread(enum kind kind)
{
    uint8_t bytes[COX_HELLO_SIZE + 1] = {0};
    int fd = raw_client();
    for (size_t i = 0; i < 3; i++) {
        int unwanted = trap(kind);
        send_all(fd, bytes, sizeof bytes / 4, &unwanted, 1);
    }
    return fd;
}

static int of_a_worker(enum kind kind)
{
    struct cox_control_connection session;
    int unwanted = trap(kind);
    CHECK(connect_as(COX_HELLO_WORKER, &session) == 0);
    send_all(session.fd, "x", 1, &unwanted, 1);
    return session.fd;
}

/* A byte out of band, which a receive leaves out, and closes what comes with it; and behind which a
 * look does not see. */
static void send_urgent(int fd, int unwanted)
{
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr header;
    } control = {{0}};
    char byte = 'u';
    struct iovec part = {.iov_base = &byte, .iov_len = 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (unwanted >= 0) {
        message.msg_control = &control;
        message.msg_controllen = sizeof control;
        control.header.cmsg_level = SOL_SOCKET;
        control.header.cmsg_type = SCM_RIGHTS;
        control.header.cmsg_len = CMSG_LEN(sizeof unwanted);
        memcpy(CMSG_DATA(&control.header), &unwanted, sizeof unwanted);
    }
    CHECK(sendmsg(fd, &message, MSG_OOB | MSG_NOSIGNAL) == 1 || errno == EPIPE ||
          errno == EOPNOTSUPP); /* a kernel without CONFIG_AF_UNIX_OOB */
}

static int urgently(enum kind kind)
{
    int fd = raw_client();
    send_urgent(fd, trap(kind));
    return fd;
}

static int urgently_before_others(enum kind kind)
{
    int fd = raw_client(), unwanted = trap(kind);
    send_urgent(fd, unwanted);
    close(unwanted);
    send_all(fd, "x", 1, NULL, 0);
    return fd;
}

/* Where the connection ends at a byte before it, the rest cannot be seen. */
static int behind_an_urgent_byte(enum kind kind)
{
    static const uint8_t bytes[16384];
    int fd = raw_client(), unwanted = trap(kind);
    send_all(fd, bytes, sizeof bytes, NULL, 0);
    send_urgent(fd, -1);
    send_all(fd, "x", 1, &unwanted, 1);
    return fd;
}

static int (*const ways[])(enum kind kind) = {
    with_a_hello,
    as_an_fd_entry,
    as_an_fd_entry_that_is_removed,
    as_an_fd_entry_that_is_refused,
    with_half_a_request,
    with_a_request_in_two_parts,
    more_than_is_allowed,
    left_unread,
    of_a_worker,
    urgently,
    urgently_before_others,
    behind_an_urgent_byte,
};
#define WAY_COUNT (sizeof ways / sizeof *ways)

struct sender {
    size_t way;
    enum kind kind;
};

static void sender_main(void *context)
{
    const struct sender *sender = context;
    int fd = ways[sender->way](sender->kind);
    CHECK(cox_socket_send(home, "c", 1, &fd, 1, PATIENCE) == 0);
    _exit(0);
}

/* Returns the connection. */
static int leave(size_t way, enum kind kind)
{
    struct sender sender = {way, kind};
    int pair[2], fd = -1;
    assert_int_equal(cox_socket_pair(pair), 0);
    home = pair[1];
    pid_t pid = child_start(sender_main, &sender);
    cox_close_fd(&home);
    child_join(pid);
    char what;
    int came;
    uint32_t count;
    while (cox_socket_receive(pair[0], &what, 1, &came, 1, &count, PATIENCE) == 0) {
        assert_true(count == 1 && end_count < TRAP_COUNT_MAX);
        if (what == 'e')
            ends[end_count++] = came;
        else
            fd = came;
    }
    close(pair[0]);
    assert_true(fd >= 0);
    if (ways[way] == with_a_request_in_two_parts)
        send_second_part(fd);
    return fd;
}

/* ---- and what others find meanwhile ---- */

static void served(void)
{
    struct cox_hello hello = worker_hello();
    _cox_cleanup_(cox_control_connection_close) struct cox_control_connection session;
    HOST(host.fd_count = 0);
    assert_ok(cox_control_socket_connect(cox_control_socket_path(control_socket), &hello,
                                         cox_deadline_after_ms(20000), &session, test_err()));
}

TRAP_TEST(g1g_others_are_served_while_closes_hang)
{
    for (int kind = 0; kind < KIND_COUNT; kind++)
        for (size_t way = 0; way < WAY_COUNT; way++) {
            int before = fd_count();
            socket_start(NULL);
            HOST(host.fd_count = 0);
            int fd = leave(way, (enum kind)kind);
            served();
            close(fd); /* a sender that leaves something here takes it back with that */
            served();
            served();
            uint64_t begin_ns = cox_now_ns();
            socket_stop();
            if (cox_now_ns() - begin_ns > 20 * COX_NSEC_PER_SEC)
                fail_msg("the control socket was closed only after %d s",
                         (int)((cox_now_ns() - begin_ns) / COX_NSEC_PER_SEC));
            traps_release();
            await_fds(before);
        }
}

/* What does not linger any more is closed by the time that the control socket is. */
TRAP_TEST(g1g_what_lingers_is_closed_at_once)
{
    const int outside = fd_count();
    for (size_t way = 0; way < WAY_COUNT; way++) {
        socket_start(NULL);
        int before = fd_count();
        HOST(host.fd_count = 0);
        int fd = leave(way, LINGERS);
        close(fd);
        await_fds(before + (int)end_count);
        traps_release();
        socket_stop();
        /* On a busy machine the last closes come after the stop. */
        await_fds(outside);
    }
}

TRAP_TEST(g1g_those_that_were_not_let_in_yet_do_not_hold_up_the_end)
{
    int before = fd_count(), fds[8];
    socket_start(NULL);
    host_lock(); /* and with it the control socket, at its first line */
    for (size_t i = 0; i < 8; i++)
        fds[i] = leave(0, i % 2 ? LINGERS : NESTED);
    host_unlock();
    socket_stop();
    for (size_t i = 0; i < 8; i++)
        close(fds[i]);
    traps_release();
    await_fds(before);
}

/* More of them than the limit: then no client is accepted, until some of them end. */
TRAP_TEST(g1g_so_many_closes_hang_that_no_client_is_accepted)
{
    struct rlimit limit, before;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    limit = before;
    limit.rlim_cur = 16384 < limit.rlim_max ? 16384 : limit.rlim_max;
    if (limit.rlim_cur < 8192)
        skip();
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &limit), 0);
    int count = fd_count();
    socket_start(NULL);
    /* Where a sender exits after the control socket's close, its exit is the last close, which does
     * not hang: on a busy machine more senders are needed than the limit. */
    while (!in_log("and their closes hang") && end_count < TRAP_COUNT_MAX)
        close(leave(0, NESTED));
    await_log("and their closes hang");
    traps_release();
    served();
    socket_stop();
    await_fds(count);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
}
