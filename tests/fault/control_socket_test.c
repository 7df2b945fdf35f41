/* Control sockets and their clients, killed and stopped behind every step that others can see. */
#include "tests/multi/control_socket_fixture.h"
#include "channel/handle/fd_store.h"
#include "channel/base/fault.h"
#include "channel/socket/runtime_dir.h"

#if COX_TESTING

static const char *const points[] = {
    "runtime_dir.made",         "runtime_dir.locked",     "runtime_dir.swept",
    "control_socket.bound",     "control_socket.listens", "control_socket.named",
    "control_socket.connected", "control_socket.asked",   "socket.sent",
    "control_socket.accepted",  "control_socket.unnamed",
};
#define POINT_COUNT (sizeof points / sizeof points[0])

struct life {
    char plan[64];
    /* of a client: the control socket's */
    const char *path;
};

static void connect_all_ways(const char *path)
{
    struct cox_hello hello = worker_hello();
    _cox_cleanup_(cox_control_connection_close) struct cox_control_connection session;
    _cox_cleanup_(cox_fd_store_close) struct cox_fd_store fd_store = {.fd = -1};
    struct cox_handle handle = {{0, 0, 0, COX_HANDLE_MEMORY}};
    struct stat st;
    int fd;
    CHECK(cox_control_socket_connect(path, &hello, PATIENCE, &session, NULL) == 0);
    CHECK(cox_fd_store_connect(&fd_store, path, PATIENCE, NULL) == 0);
    CHECK(fstat(host_fds[3], &st) == 0);
    for (int i = 0; i < 8; i++) {
        handle.bytes[4 + i % 4] = (uint8_t)((uint32_t)getpid() >> (8 * (i % 4)));
        handle.bytes[28 + i % 4] = (uint8_t)((uint32_t)st.st_dev >> (8 * (i % 4)));
        handle.bytes[32 + i] = (uint8_t)((uint64_t)st.st_ino >> (8 * i));
    }
    CHECK(cox_fd_store_put(&fd_store, &handle, host_fds[3], PATIENCE, NULL) == 0);
    CHECK(cox_fd_store_get(&fd_store, &handle, PATIENCE, &fd, NULL) == 0);
    CHECK(fd_says(fd, 3));
    close(fd);
}

static void live_and_die(void *context)
{
    const struct life *life = context;
    struct cox_control_socket_options options = host_options("test");
    options.log.fn = NULL;
    cox_fault_arm(life->plan);
    CHECK(cox_control_socket_open(&options, &host_hooks, &control_socket, NULL) == 0);
    connect_all_ways(cox_control_socket_path(control_socket));
    socket_stop();
}

/* What a control socket left that died before. */
static void leave_a_dead_socket(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    mkdir(runtime_dir, 0700);
    snprintf(address.sun_path, sizeof address.sun_path, "%s/old.sock", runtime_dir);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(fd, (const struct sockaddr *)&address, sizeof address), 0);
    close(fd);
}

SOCKET_TEST(b4_p7_a_start_after_a_death_at_any_step_works)
{
    for (size_t p = 0; p < POINT_COUNT; p++) {
        uint32_t count = 0;
        bool killed = true;
        while (killed) {
            struct life life;
            snprintf(life.plan, sizeof life.plan, "%s:kill:coordinator:%u", points[p], ++count);
            if (p > 0)
                leave_a_dead_socket();
            killed = child_struck(client_start(live_and_die, &life));
            socket_start(NULL);
            if (runtime_dir_count() != 1)
                fail_msg("%s: %d files", life.plan, runtime_dir_count());
            connect_all_ways(cox_control_socket_path(control_socket));
            socket_stop();
            assert_int_equal(runtime_dir_count(), 0);
            rmdir(runtime_dir); /* the next one has to make it again */
        }
        if (count == 1)
            fail_msg("nobody passes %s", points[p]);
    }
}

static void connect_and_die(void *context)
{
    const struct life *life = context;
    cox_fault_arm(life->plan);
    connect_all_ways(life->path);
}

SOCKET_TEST(b15_b21_a_client_that_dies_at_any_step_leaves_nothing)
{
    static const char *const connected[] = {"control_socket.connected", "control_socket.asked",
                                            "socket.sent"};
    char path[COX_SOCKET_PATH_SIZE];
    socket_start(NULL);
    snprintf(path, sizeof path, "%s", cox_control_socket_path(control_socket));
    int before = fd_count();
    for (size_t p = 0; p < 3; p++) {
        uint32_t count = 0;
        bool killed = true;
        while (killed) {
            struct life life = {.path = path};
            snprintf(life.plan, sizeof life.plan, "%s:kill:coordinator:%u", connected[p], ++count);
            killed = child_struck(client_start(connect_and_die, &life));
            client_run(connect_and_die, &(struct life){.plan = "stopped:kill", .path = path});
            await_fds(before);
        }
        assert_true(count > 1);
    }
    await_count(&host.gone, read_count(&host.workers));
    assert_int_equal(read_count(&host.gone), read_count(&host.workers));
}

struct second {
    int told;
};

static void start_another(void *context)
{
    const struct second *second = context;
    struct cox_control_socket_options options = host_options("another");
    options.log.fn = NULL;
    tell(second->told);
    CHECK(cox_control_socket_open(&options, &host_hooks, &control_socket, NULL) == 0);
    connect_all_ways(cox_control_socket_path(control_socket));
    socket_stop();
}

SOCKET_TEST(b52_b54_a_start_that_is_stopped_is_waited_for)
{
    static const char *const held[] = {"runtime_dir.swept", "control_socket.bound",
                                       "control_socket.listens", "control_socket.named"};
    for (size_t p = 0; p < sizeof held / sizeof held[0]; p++) {
        struct life life;
        struct second second;
        int told[2], runtime_dir_fd;
        /* Something to sweep. */
        snprintf(life.plan, sizeof life.plan, "control_socket.named:kill");
        assert_true(child_struck(client_start(live_and_die, &life)));
        assert_int_equal(pipe2(told, O_CLOEXEC), 0);
        second.told = told[1];
        snprintf(life.plan, sizeof life.plan, "%s:stop", held[p]);
        pid_t first = client_start(live_and_die, &life);
        test_await_stopped(first);
        pid_t other = client_start(start_another, &second);
        assert_true(heard(told[0]));
        assert_int_equal(cox_runtime_dir_open(runtime_dir, false, &runtime_dir_fd, NULL), 0);
        assert_refused(cox_runtime_dir_lock(runtime_dir_fd, cox_deadline_after_ms(5), test_err()),
                       COX_BUSY, "stopped?");
        close(runtime_dir_fd);
        kill(first, SIGCONT);
        child_join(other);
        child_join(first);
        assert_int_equal(runtime_dir_count(), 0);
        close(told[0]);
        close(told[1]);
    }
}

/* Its socket was alive when the next start swept, and is dead when that one looks at its name. */
SOCKET_TEST(b4_p7_a_name_whose_owner_dies_during_a_start_is_free)
{
    struct life owner = {.plan = "control_socket.accepted:stop"};
    struct life next = {.plan = "runtime_dir.swept:stop"};
    pid_t first = client_start(live_and_die, &owner);
    test_await_stopped(first);
    pid_t second = client_start(live_and_die, &next);
    test_await_stopped(second);
    test_kill_child(first);
    kill(second, SIGCONT);
    child_join(second);
    assert_int_equal(runtime_dir_count(), 0);
}

#endif
