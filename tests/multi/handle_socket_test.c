/* By-value handles where pidfd_getfd is missing or denied: the control socket has the fd, or memory
 * is opened by /proc. */
#include "channel/base/handle_format.h"
#include "channel/handle/handle_internal.h"
#include "channel/socket/control_socket.h"
#include "channel/socket/socket.h"
#include "tests/lib/rights.h"
#include "handle_peer.h"

#define PATIENCE cox_deadline_after_ms(20000)

static char runtime_dir[64];
static struct cox_control_socket *control_socket;
static const char *path; /* of the control socket */

static void socket_start(uint32_t fd_entry_max)
{
    const struct cox_control_socket_options options = {
        .name = "handles", .runtime_dir = runtime_dir, .fd_entry_max = fd_entry_max};
    static const struct cox_control_socket_hooks none;
    snprintf(runtime_dir, sizeof runtime_dir, "/tmp/cox_handles_XXXXXX");
    CHECK(mkdtemp(runtime_dir));
    if (cox_control_socket_open(&options, &none, &control_socket, test_err()))
        fprintf(stderr, "%s\n", test_error.text);
    CHECK(control_socket);
    path = cox_control_socket_path(control_socket);
}

static void socket_stop(void)
{
    control_socket = cox_control_socket_close(control_socket);
    if (runtime_dir[0])
        CHECK(rmdir(runtime_dir) == 0);
    runtime_dir[0] = '\0';
}

static int setup(void **state)
{
    leak_setup(state);
    runtime_dir[0] = '\0';
    return 0;
}

static int teardown(void **state)
{
    socket_stop();
    return leak_teardown(state);
}

#define HANDLE_TEST(name) TEST_WITH(name, setup, teardown)

/* In children. */
static void expect_refused(const struct cox_handle *handle, int code, const char *word)
{
    int fd = -77, r = cox_handle_open(handle, path, PATIENCE, &fd, test_err());
    if (r != code || !strstr(test_error.text, word))
        fprintf(stderr, "expected %d with '%s', got %d '%s'\n", code, word, r, test_error.text);
    CHECK(r == code && strstr(test_error.text, word) && fd == -77);
}

static void expect_opened(const struct cox_handle *handle, enum cox_handle_way expected,
                          unsigned seed)
{
    struct cox_handle_info info;
    enum cox_handle_way way = COX_HANDLE_BY_DUP;
    int fd = -1;
    if (cox_handle_open_way(handle, path, PATIENCE, &fd, &way, test_err()))
        fprintf(stderr, "%s\n", test_error.text);
    CHECK(fd >= 3 && way == expected && fcntl(fd, F_GETFD) == FD_CLOEXEC);
    CHECK(cox_handle_parse(handle, &info, NULL) == 0);
    CHECK(object_is(fd, info.offset, info.size, seed));
    close(fd);
}

/* ---- closed ways ---- */

struct denial {
    /* the last one: no memory */
    struct cox_handle first, second, other;
    uint32_t call;
    int error;
};

static void open_by_socket(void *context)
{
    const struct denial *denial = context;
    const struct cox_importer_options options = {
        .size = sizeof(struct cox_importer_options), .socket_path = path, .deadline_ms = 20000};
    struct cox_importer *importer;
    CHECK(cox_importer_new(&options, &importer, NULL) == 0);
    int fds = fd_count();
    expect_opened(&denial->first, COX_HANDLE_BY_PIDFD, 1);
    const struct cox_import *one = import_open(importer, &denial->first);
    call_deny(denial->call, ANY_ARGUMENT, denial->error);
    expect_opened(&denial->first, COX_HANDLE_BY_SOCKET, 1);
    expect_opened(&denial->second, COX_HANDLE_BY_SOCKET, 2);
    const struct cox_import *two = import_open(importer, &denial->second);
    CHECK(import_byte(one, 9) == object_byte(1, 9));
    CHECK(import_byte(two, 9) == object_byte(2, 5010));
    CHECK(import_open(importer, &denial->first) == one);
    cox_importer_close(importer, one);
    cox_importer_close(importer, one);
    cox_importer_close(importer, two);
    struct cox_handle forged = denial->other; /* that one was never stored */
    handle_forge(&forged, 56, 4, 7);
    expect_refused(&forged, denial->error == ENOSYS ? COX_UNSUPPORTED : COX_DENIED,
                   "does not help");
    forged = denial->second;
    handle_forge(&forged, 56, 4, 7);
    expect_opened(&forged, COX_HANDLE_BY_PROC, 2);
    cox_importer_free(importer);
    CHECK(fd_count() == fds);
}

HANDLE_TEST(l11_l12_b27_denied_or_missing_later_the_socket_has_it)
{
    test_needs(test_can_take_fds());
    test_needs(filters_possible());
    socket_start(0);
    _cox_cleanup_(peer_end) struct peer peer =
        peer_start(&(struct peer_options){.socket_path = path});
    struct denial denial = {.first = peer_export(&peer, PEER_EXPORT, 1),
                            .second = peer_export(&peer, PEER_EXPORT_AT, 2),
                            .other = peer_export(&peer, PEER_EXPORT_SOCKET, 0)};
    const struct {
        uint32_t call;
        int error;
    } denials[] = {{SYS_pidfd_getfd, EPERM},
                   {SYS_pidfd_getfd, ENOSYS},
                   {SYS_pidfd_open, ENOSYS},
                   {SYS_pidfd_open, EPERM}};
    for (size_t i = 0; i < sizeof denials / sizeof denials[0]; i++) {
        denial.call = denials[i].call;
        denial.error = denials[i].error;
        child_run(open_by_socket, &denial);
    }
}

/* ---- by /proc ---- */

struct modes {
    struct cox_handle whole, reader, fifo;
    /* as a forged handle says: the same as memory */
    struct cox_handle fifo_as_memory;
};

static void open_modes(void *context)
{
    const struct modes *modes = context;
    enum cox_handle_way way;
    int fds = fd_count(), fd = -1;
    call_deny(SYS_pidfd_getfd, ANY_ARGUMENT, EPERM);
    path = NULL;
    CHECK(cox_handle_open_way(&modes->whole, NULL, PATIENCE, &fd, &way, NULL) == 0);
    CHECK(way == COX_HANDLE_BY_PROC && (fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDWR);
    close(fd);
    CHECK(cox_handle_open_way(&modes->reader, NULL, PATIENCE, &fd, &way, NULL) == 0);
    CHECK(way == COX_HANDLE_BY_PROC && (fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDONLY);
    close(fd);
    expect_refused(&modes->fifo, COX_DENIED, "no control socket was named");
    expect_refused(&modes->fifo_as_memory, COX_NOT_FOUND, "the handle was put");
    CHECK(fd_count() == fds);
}

/* What the exporter has opened for reading, nobody opens for writing. */
HANDLE_TEST(l12_by_proc_memory_opens_as_its_exporter_has_it_and_nothing_else_does)
{
    struct cox_exporter *exporter;
    struct modes modes;
    char self[64];
    int pipe_fds[2];
    test_needs(filters_possible());
    assert_int_equal(cox_exporter_new(NULL, &exporter, NULL), 0);
    int fd = object_new(PEER_OBJECT_SIZE, 16);
    snprintf(self, sizeof self, "/proc/self/fd/%d", fd);
    int reader = open(self, O_RDONLY | O_CLOEXEC);
    test_pipe(pipe_fds);
    assert_int_equal(cox_exporter_export(exporter, fd, 0, 0, &modes.whole, NULL), 0);
    assert_int_equal(cox_exporter_export(exporter, reader, 0, 0, &modes.reader, NULL), 0);
    assert_int_equal(cox_exporter_export(exporter, pipe_fds[0], 0, 0, &modes.fifo, NULL), 0);
    modes.fifo_as_memory = modes.fifo;
    handle_forge(&modes.fifo_as_memory, COX_HANDLE_AT_KIND, 1, COX_HANDLE_MEMORY);
    handle_forge(&modes.fifo_as_memory, COX_HANDLE_AT_SIZE, 8, 1);
    child_run(open_modes, &modes);
    cox_exporter_free(exporter);
    close(fd);
    close(reader);
}

static void not_dumpable_scene(void *context)
{
    (void)context;
    user_change(NOBODY);
    socket_start(0);
    struct peer with = peer_start(&(struct peer_options){.socket_path = path});
    struct peer without = peer_start(NULL);
    struct cox_handle handle = peer_export(&with, PEER_EXPORT, 3);
    struct cox_handle other = peer_export(&without, PEER_EXPORT, 4);
    expect_opened(&handle, COX_HANDLE_BY_PIDFD, 3);
    CHECK(peer_ask(&with, PEER_SET_DUMPABLE, 0, NULL).result == 0);
    CHECK(peer_ask(&without, PEER_SET_DUMPABLE, 0, NULL).result == 0);
    expect_opened(&handle, COX_HANDLE_BY_SOCKET, 3);
    expect_refused(&other, COX_DENIED, "not dumpable");
    peer_end(&with);
    peer_end(&without);
    socket_stop();
}

HANDLE_TEST(l12_an_exporter_that_is_not_dumpable_is_reached_by_the_socket)
{
    test_needs(test_can_take_fds());
    test_needs(test_can_switch_user());
    child_run(not_dumpable_scene, NULL);
}

static void hidden_scene(void *context)
{
    const struct cox_importer_options options = {
        .size = sizeof(struct cox_importer_options), .socket_path = NULL, .deadline_ms = 20000};
    struct cox_importer_options by_socket = options;
    struct cox_importer *importer;
    (void)context;
    if (!proc_hide())
        _exit(77);
    user_change(NOBODY);
    socket_start(0);
    by_socket.socket_path = path;
    struct peer with = peer_start(&(struct peer_options){.socket_path = path});
    struct peer without = peer_start(NULL);
    struct cox_handle handle = peer_export(&with, PEER_EXPORT, 3);
    struct cox_handle other = peer_export(&without, PEER_EXPORT, 4);
    CHECK(peer_ask(&with, PEER_SET_DUMPABLE, 0, NULL).result == 0);
    CHECK(peer_ask(&without, PEER_SET_DUMPABLE, 0, NULL).result == 0);
    expect_opened(&handle, COX_HANDLE_BY_SOCKET, 3);
    expect_refused(&other, COX_DENIED, "not dumpable, and /proc is mounted with hidepid");
    CHECK(cox_importer_new(&by_socket, &importer, NULL) == 0);
    const struct cox_import *one = import_open(importer, &handle);
    int fds = fd_count();
    CHECK(import_open(importer, &handle) == one);
    CHECK(peer_ask(&with, PEER_PUT, 0, &handle).result == 0);
    /* Whether its exporter lives is unknown now. */
    CHECK(import_try(importer, &handle) == COX_DENIED);
    CHECK(import_byte(one, 9) == object_byte(3, 9));
    uint64_t deadline_ns = PATIENCE; /* the control socket closes its ends in its own time */
    while (fd_count() > fds)
        CHECK(cox_now_ns() < deadline_ns);
    peer_kill(&with);
    CHECK(import_try(importer, &handle) == COX_PEER_DEAD);
    expect_refused(&handle, COX_PEER_DEAD, "is gone");
    cox_importer_close(importer, one);
    cox_importer_close(importer, one);
    cox_importer_free(importer);
    peer_end(&with);
    peer_end(&without);
    socket_stop();
}

/* One that is not dumpable has nothing in such a /proc. */
HANDLE_TEST(l8_l12_l17_an_exporter_that_proc_hides_is_reached_by_the_socket)
{
    test_needs(test_can_switch_user());
    child_expect(child_status(child_start(hidden_scene, NULL)));
}

static void open_as_nobody(void *context)
{
    user_change(NOBODY);
    expect_refused(context, COX_DENIED, "");
}

HANDLE_TEST(l6_l12_the_socket_helps_no_other_user)
{
    test_needs(test_can_switch_user());
    socket_start(0);
    CHECK(chmod(runtime_dir, 0711) == 0);
    CHECK(chmod(path, 0777) == 0); /* so that it is not the file that stops it */
    _cox_cleanup_(peer_end) struct peer peer =
        peer_start(&(struct peer_options){.socket_path = path});
    struct cox_handle handle = peer_export(&peer, PEER_EXPORT, 5);
    child_run(open_as_nobody, &handle);
}

/* ---- death of an exporter ---- */

struct scene {
    struct peer peer;
    struct cox_handle kept, put;
    /* read until it is closed */
    int go;
    int ready;
};

static void open_around_a_death(void *context)
{
    const struct scene *scene = context;
    call_deny(SYS_pidfd_getfd, ANY_ARGUMENT, EPERM);
    expect_opened(&scene->kept, COX_HANDLE_BY_SOCKET, 6);
    expect_refused(&scene->put, COX_NOT_FOUND, "the handle was put");
    tell(scene->ready);
    CHECK(heard(scene->go));
    expect_refused(&scene->kept, COX_PEER_DEAD, "is gone");
}

HANDLE_TEST(l8_l15_the_socket_forgets_entries_that_were_put_and_dead_owners)
{
    struct scene scene;
    int go[2], ready[2];
    test_needs(filters_possible());
    socket_start(0);
    scene.peer = peer_start(&(struct peer_options){.socket_path = path});
    scene.put = peer_export(&scene.peer, PEER_EXPORT, 7);
    scene.kept = peer_export(&scene.peer, PEER_EXPORT, 6);
    assert_int_equal(peer_ask(&scene.peer, PEER_PUT, 0, &scene.put).result, 0);
    test_pipe(go);
    test_pipe(ready);
    scene.go = go[0];
    scene.ready = ready[1];
    pid_t pid = child_start(open_around_a_death, &scene);
    test_close(ready[1]);
    bool there = heard(ready[0]);
    peer_kill(&scene.peer);
    tell(go[1]);
    child_join(pid);
    assert_true(there);
    peer_end(&scene.peer);
}

static void open_without_its_socket(void *context)
{
    expect_opened(context, COX_HANDLE_BY_PIDFD, 8);
    call_deny(SYS_pidfd_getfd, ANY_ARGUMENT, EPERM);
    expect_opened(context, COX_HANDLE_BY_PROC, 8);
}

HANDLE_TEST(l12_a_socket_that_is_gone_leaves_the_other_ways)
{
    char gone[COX_SOCKET_PATH_SIZE];
    test_needs(test_can_take_fds());
    test_needs(filters_possible());
    socket_start(0);
    snprintf(gone, sizeof gone, "%s", path);
    _cox_cleanup_(peer_end) struct peer peer =
        peer_start(&(struct peer_options){.socket_path = path});
    struct cox_handle handle = peer_export(&peer, PEER_EXPORT, 8);
    int fds = peer_ask(&peer, PEER_COUNT_FDS, 0, NULL).number;
    socket_stop();
    path = gone;
    child_run(open_without_its_socket, &handle);
    struct peer_reply reply = peer_ask(&peer, PEER_EXPORT, 9, NULL);
    assert_int_equal(reply.result, COX_CLOSED);
    assert_true(reply.err.text[0]);
    assert_int_equal(peer_ask(&peer, PEER_EXPORT, 9, NULL).result, COX_CLOSED);
    assert_int_equal(peer_ask(&peer, PEER_PUT, 0, &handle).result, 0);
    /* Less the connection and the duplicate. */
    assert_int_equal(peer_ask(&peer, PEER_COUNT_FDS, 0, NULL).number, fds - 2);
    struct cox_exporter *exporter = NULL;
    const struct cox_exporter_options options = {.size = sizeof(struct cox_exporter_options),
                                                 .socket_path = gone};
    int r = cox_exporter_new(&options, &exporter, test_err());
    assert_true(r == COX_NOT_FOUND || r == COX_CLOSED);
    assert_true(test_error.code == r && !exporter);
}

HANDLE_TEST(l12_a_full_fd_store_refuses_an_export_whole)
{
    socket_start(2);
    _cox_cleanup_(peer_end) struct peer peer =
        peer_start(&(struct peer_options){.socket_path = path});
    struct cox_handle one = peer_export(&peer, PEER_EXPORT, 10);
    peer_export(&peer, PEER_EXPORT, 11);
    int fds = peer_ask(&peer, PEER_COUNT_FDS, 0, NULL).number;
    for (int i = 0; i < 3; i++)
        assert_int_equal(peer_ask(&peer, PEER_EXPORT, 12, NULL).result, COX_FULL);
    assert_int_equal(peer_ask(&peer, PEER_COUNT_FDS, 0, NULL).number, fds);
    assert_int_equal(peer_ask(&peer, PEER_PUT, 0, &one).result, 0);
    struct cox_handle again = peer_export(&peer, PEER_EXPORT, 13);
    if (test_can_take_fds())
        expect_opened(&again, COX_HANDLE_BY_PIDFD, 13);
}

HANDLE_TEST(l15_b29_nothing_is_left_at_the_socket)
{
    socket_start(0);
    _cox_cleanup_(peer_end) struct peer peer =
        peer_start(&(struct peer_options){.socket_path = path});
    peer_export(&peer, PEER_EXPORT, 14);
    int fds = fd_count_at(control_socket), there = peer_ask(&peer, PEER_COUNT_FDS, 0, NULL).number;
    for (int round = 0; round < 20; round++) {
        assert_int_equal(peer_ask(&peer, PEER_EXPORT_BATCH, 0, NULL).result, 0);
        assert_int_equal(fd_count(), fds + PEER_BATCH); /* the control socket's, in this process */
        assert_int_equal(peer_ask(&peer, PEER_PUT_BATCH, 0, NULL).result, 0);
        assert_int_equal(fd_count_at(control_socket), fds);
    }
    assert_int_equal(peer_ask(&peer, PEER_COUNT_FDS, 0, NULL).number, there);
}

/* ---- beside it ---- */

HANDLE_TEST(l13_query_returns_whether_the_socket_replies)
{
    struct cox_handle_probe ways;
    socket_start(0);
    int fds = fd_count();
    assert_int_equal(cox_handle_query(path, PATIENCE, &ways), 0);
    assert_true(ways.control_socket && ways.socket_error == 0);
    /* The control socket notices its end, too, after a while. */
    uint64_t deadline_ns = PATIENCE;
    while (fd_count() != fds)
        assert_true(cox_now_ns() < deadline_ns);
}

/* What passes fds in messages passes bytes as well; neither is taken for the other. */
HANDLE_TEST(l20_b30_fds_in_messages_and_handles_by_value_go_side_by_side)
{
    int pair[2], came = -1, opened = -1, fd = object_new(PEER_OBJECT_SIZE, 15);
    uint32_t count = 0;
    struct cox_handle handle, bytes = {{0}};
    struct cox_exporter *exporter;
    assert_int_equal(cox_exporter_new(NULL, &exporter, NULL), 0);
    assert_int_equal(cox_exporter_export(exporter, fd, 0, 0, &handle, NULL), 0);
    assert_int_equal(cox_socket_pair(pair), 0);
    /* Legacy: the 64 bytes say nothing, the fd comes along. */
    assert_int_equal(cox_socket_send(pair[0], &bytes, sizeof bytes, &fd, 1, PATIENCE), 0);
    assert_ok(cox_socket_receive(pair[1], &bytes, sizeof bytes, &came, 1, &count, PATIENCE));
    assert_int_equal(count, 1);
    assert_true(object_is(came, 0, PEER_OBJECT_SIZE, 15));
    assert_int_equal(cox_handle_open(&bytes, NULL, PATIENCE, &opened, NULL), COX_CORRUPT);
    /* By value: no fd comes along, and none is needed. */
    assert_int_equal(cox_socket_send(pair[0], &handle, sizeof handle, NULL, 0, PATIENCE), 0);
    assert_ok(cox_socket_receive(pair[1], &bytes, sizeof bytes, NULL, 0, &count, PATIENCE));
    assert_int_equal(cox_handle_open(&bytes, NULL, PATIENCE, &opened, NULL), 0);
    assert_true(object_is(opened, 0, PEER_OBJECT_SIZE, 15));
    cox_exporter_free(exporter);
    int all[] = {pair[0], pair[1], came, opened, fd};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        close(all[i]);
}
