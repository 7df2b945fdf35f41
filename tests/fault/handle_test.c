/* By-value handles, with exporter and importer killed and stopped behind every step that others can
 * see. */
#include "channel/base/fault.h"
#include "channel/handle/handle_internal.h"
#include "tests/multi/control_socket_fixture.h"
#include "tests/multi/handle_peer.h"

#if COX_TESTING

#define HANDLE_COUNT 2

static char path[COX_SOCKET_PATH_SIZE]; /* of the control socket */

static void begin(void)
{
    socket_start(NULL);
    snprintf(path, sizeof path, "%s", cox_control_socket_path(control_socket));
}

static void expect_open(const struct cox_handle *handle, int code)
{
    int fd = -1, r = cox_handle_open(handle, path, PATIENCE, &fd, test_err());
    if (r != code)
        fprintf(stderr, "expected %d, got %d: %s\n", code, r, test_error.text);
    CHECK(r == code && (fd >= 0) == (r == 0));
    CHECK(fd < 0 || object_is(fd, 0, PEER_OBJECT_SIZE, 1));
    cox_close_fd(&fd);
}

struct expectation {
    struct cox_handle handle;
    /* else pidfd_getfd is denied */
    bool by_pidfd;
    int code;
};

static void expect_in_child(void *context)
{
    const struct expectation *expected = context;
    if (!expected->by_pidfd)
        call_deny(SYS_pidfd_getfd, ANY_ARGUMENT, EPERM);
    expect_open(&expected->handle, expected->code);
}

/* With pidfd_getfd, and, where filters can be had, without: the other ways give the same. */
static void expect_both(const struct cox_handle *handle, int code)
{
    struct expectation expected = {*handle, true, code};
    child_run(expect_in_child, &expected);
    expected.by_pidfd = false;
    if (filters_possible())
        child_run(expect_in_child, &expected);
}

/* ---- the exporter ---- */

struct life {
    char plan[64];
    /* each handle once it has it */
    int told;
};

static void export_and_put(void *context)
{
    const struct life *life = context;
    const struct cox_exporter_options options = {
        .size = sizeof(struct cox_exporter_options), .socket_path = path, .deadline_ms = 60000};
    struct cox_exporter *exporter;
    struct cox_handle handles[HANDLE_COUNT];
    int fd = object_new(PEER_OBJECT_SIZE, 1);
    cox_fault_arm(life->plan);
    CHECK(cox_exporter_new(&options, &exporter, NULL) == 0);
    for (int i = 0; i < HANDLE_COUNT; i++) {
        CHECK(cox_exporter_export(exporter, fd, 0, 0, &handles[i], NULL) == 0);
        CHECK(write(life->told, &handles[i], sizeof handles[i]) == sizeof handles[i]);
    }
    CHECK(cox_exporter_share(exporter, &handles[0]) == 0);
    CHECK(cox_exporter_put(exporter, &handles[0]) == 0);
    CHECK(cox_exporter_put(exporter, &handles[0]) == 0);
    CHECK(cox_exporter_put(exporter, &handles[1]) == 0);
    cox_exporter_free(exporter);
}

/* Whatever it had exported by then: it is gone, and nothing of it is left at the control socket. */
SOCKET_TEST(l8_b29_an_exporter_that_dies_at_any_step_is_gone_with_all_it_exported)
{
    static const char *const points[] = {
        "handle.exported",          "handle.stored",        "handle.withdrawn", "handle.put",
        "control_socket.connected", "control_socket.asked", "socket.sent",
    };
    begin();
    int before = fd_count_at(control_socket);
    for (size_t p = 0; p < sizeof points / sizeof points[0]; p++) {
        uint32_t count = 0;
        bool killed = true;
        while (killed) {
            struct life life;
            struct cox_handle handle;
            int told[2];
            assert_int_equal(pipe2(told, O_CLOEXEC), 0);
            life.told = told[1];
            snprintf(life.plan, sizeof life.plan, "%s:kill:coordinator:%u", points[p], ++count);
            killed = child_struck(client_start(export_and_put, &life));
            close(told[1]);
            while (read(told[0], &handle, sizeof handle) == sizeof handle)
                expect_both(&handle, COX_PEER_DEAD);
            close(told[0]);
            await_fds(before);
        }
        if (count == 1)
            fail_msg("nobody passes %s", points[p]);
    }
}

/* Which handles open and which do not, at each step of an exporter that is continued later. */
SOCKET_TEST(l15_b2_an_exporter_that_stops_between_two_steps)
{
    static const struct {
        const char *plan;
        /* of the first handle, whose end comes first */
        int code;
        bool second;
    } stops[] = {
        {"handle.exported:stop:coordinator:2", 0, false},
        {"handle.stored:stop:coordinator:2", 0, false},
        {"handle.withdrawn:stop:coordinator:1", 0, true},
        {"handle.put:stop:coordinator:1", COX_NOT_FOUND, true},
    };
    begin();
    int before = fd_count_at(control_socket);
    for (size_t i = 0; i < sizeof stops / sizeof stops[0]; i++) {
        struct life life;
        struct cox_handle handles[HANDLE_COUNT];
        int told[2];
        assert_int_equal(pipe2(told, O_CLOEXEC), 0);
        life.told = told[1];
        snprintf(life.plan, sizeof life.plan, "%s", stops[i].plan);
        pid_t pid = client_start(export_and_put, &life);
        test_await_stopped(pid);
        assert_int_equal(read(told[0], &handles[0], sizeof handles[0]), sizeof handles[0]);
        expect_both(&handles[0], stops[i].code);
        if (stops[i].second) { /* the other one is not touched */
            assert_int_equal(read(told[0], &handles[1], sizeof handles[1]), sizeof handles[1]);
            expect_both(&handles[1], 0);
        }
        kill(pid, SIGCONT);
        child_join(pid);
        close(told[0]);
        close(told[1]);
        await_fds(before);
    }
}

/* ---- the importer ---- */

struct opening {
    char plan[64];
    struct cox_handle handle;
    bool by_pidfd;
    int code;
};

static void import_once(void *context)
{
    const struct opening *opening = context;
    const struct cox_importer_options options = {
        .size = sizeof(struct cox_importer_options), .socket_path = path, .deadline_ms = 60000};
    struct cox_importer *importer;
    const struct cox_import *import;
    if (!opening->by_pidfd)
        call_deny(SYS_pidfd_getfd, ANY_ARGUMENT, EPERM);
    cox_fault_arm(opening->plan);
    CHECK(cox_importer_new(&options, &importer, NULL) == 0);
    int r = cox_importer_open(importer, &opening->handle, COX_IMPORT_READ, &import, test_err());
    if (r != opening->code)
        fprintf(stderr, "expected %d, got %d: %s\n", opening->code, r, test_error.text);
    CHECK(r == opening->code);
    if (r == 0)
        cox_importer_close(importer, import);
    cox_importer_free(importer);
}

SOCKET_TEST(l15_b29_an_importer_that_dies_at_any_step_costs_no_other_anything)
{
    static const struct {
        const char *point;
        bool by_pidfd;
    } deaths[] = {
        {"handle.taken", true},
        {"handle.taken", false},
        {"control_socket.connected", false},
        {"control_socket.asked", false},
        {"socket.sent", false},
    };
    if (!filters_possible())
        skip();
    begin();
    _cox_cleanup_(peer_end) struct peer peer =
        peer_start(&(struct peer_options){.socket_path = path});
    struct opening opening = {.handle = peer_export(&peer, PEER_EXPORT, 1)};
    int there = peer_ask(&peer, PEER_COUNT_FDS, 0, NULL).number,
        before = fd_count_at(control_socket);
    for (size_t d = 0; d < sizeof deaths / sizeof deaths[0]; d++) {
        uint32_t count = 0;
        bool killed = true;
        opening.by_pidfd = deaths[d].by_pidfd;
        while (killed) {
            snprintf(opening.plan, sizeof opening.plan, "%s:kill:coordinator:%u", deaths[d].point,
                     ++count);
            killed = child_struck(client_start(import_once, &opening));
            await_fds(before);
            assert_int_equal(peer_ask(&peer, PEER_COUNT_FDS, 0, NULL).number, there);
            expect_both(&opening.handle, 0);
        }
        if (count == 1)
            fail_msg("nobody passes %s", deaths[d].point);
    }
    assert_int_equal(peer_ask(&peer, PEER_PUT, 0, &opening.handle).result, 0);
    expect_both(&opening.handle, COX_NOT_FOUND);
}

SOCKET_TEST(l8_an_exporter_that_dies_while_the_socket_is_asked_is_dead)
{
    if (!filters_possible())
        skip();
    begin();
    int before = fd_count_at(control_socket);
    struct peer peer = peer_start(&(struct peer_options){.socket_path = path});
    struct opening opening = {.plan = "control_socket.connected:stop",
                              .handle = peer_export(&peer, PEER_EXPORT, 1),
                              .code = COX_PEER_DEAD};
    pid_t pid = client_start(import_once, &opening);
    test_await_stopped(pid);
    peer_kill(&peer);
    /* Found dead by its connection, or as its export was replied to. */
    await_log("with 1 fds left here, ");
    kill(pid, SIGCONT);
    child_join(pid);
    peer_end(&peer);
    await_fds(before);
}

#endif
