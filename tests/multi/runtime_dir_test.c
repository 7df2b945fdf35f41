/* Where control sockets are: the folder, names, what dead control sockets left, two starts at once.
 */
#include "control_socket_fixture.h"

#include "channel/shm/geometry.h"
#include "channel/socket/runtime_dir.h"
#include "tests/lib/rights.h"

static int try_open(const struct cox_control_socket_options *options, struct cox_error *err)
{
    struct cox_control_socket *made = NULL;
    *err = (struct cox_error){0};
    int before = fd_count(), r = cox_control_socket_open(options, &host_hooks, &made, err);
    if (r) {
        assert_null(made);
        assert_int_equal(err->code, r);
        assert_int_equal(fd_count(), before);
    }
    cox_control_socket_close(made);
    return r;
}

static void refused(const struct cox_control_socket_options *options, int code, const char *text)
{
    assert_int_equal(try_open(options, test_err()), code);
    assert_contains(test_error.text, text);
}

/* ---- the folder ---- */

SOCKET_TEST(b9_a_runtime_directory_that_lets_others_in_is_refused)
{
    struct cox_control_socket_options options = host_options("test");
    char link[80];
    struct stat st;
    const mode_t modes[] = {0755, 0750, 0701, 0770, 01777, 0710};
    assert_int_equal(mkdir(runtime_dir, 0700), 0);
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        assert_int_equal(chmod(runtime_dir, modes[i]), 0);
        refused(&options, COX_DENIED, "expected 0700");
        assert_int_equal(cox_control_socket_sweep(runtime_dir, &(uint32_t){0}, NULL), COX_DENIED);
        assert_int_equal(stat(runtime_dir, &st), 0);
        assert_int_equal(st.st_mode & 07777, modes[i]); /* it may belong to another program */
    }
    assert_int_equal(chmod(runtime_dir, 0700), 0);
    assert_ok(try_open(&options, test_err()));
    snprintf(link, sizeof link, "%s_link", runtime_dir);
    assert_int_equal(symlink(runtime_dir, link), 0);
    options.runtime_dir = link;
    refused(&options, COX_DENIED, "link");
    unlink(link);
    close(open(link, O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
    refused(&options, COX_DENIED, "expected a folder");
    refused(&options, COX_DENIED, "export COXSWAIN_RUNTIME_DIR=");
    unlink(link);
    if (test_can_switch_user()) {
        options.runtime_dir = runtime_dir;
        assert_int_equal(chown(runtime_dir, NOBODY, (gid_t)-1), 0);
        refused(&options, COX_DENIED, "belongs to user 65534, expected 0");
        refused(&options, COX_DENIED, "export COXSWAIN_RUNTIME_DIR=");
        assert_int_equal(chown(runtime_dir, 0, (gid_t)-1), 0);
    }
    char nowhere[100];
    snprintf(nowhere, sizeof nowhere, "%s/not/there", runtime_dir);
    options.runtime_dir = nowhere;
    refused(&options, COX_NOT_FOUND, "XDG_RUNTIME_DIR");
}

static void with_umask(void *context)
{
    const mode_t *mask = context;
    struct cox_control_socket_options options = host_options("test");
    struct cox_hello hello = worker_hello();
    struct cox_control_connection session;
    struct stat st;
    umask(*mask);
    if (cox_control_socket_open(&options, &host_hooks, &control_socket, test_err()))
        fprintf(stderr, "%s\n", test_error.text);
    CHECK(control_socket);
    CHECK(stat(runtime_dir, &st) == 0 && (st.st_mode & 07777) == 0700);
    CHECK(stat(cox_control_socket_path(control_socket), &st) == 0 && (st.st_mode & 07777) == 0600);
    CHECK(cox_control_socket_connect(cox_control_socket_path(control_socket), &hello, PATIENCE,
                                     &session, NULL) == 0);
    cox_control_connection_close(&session);
    socket_stop();
    CHECK(runtime_dir_count() == 0);
    CHECK(rmdir(runtime_dir) == 0);
}

static void as_nobody(void *context)
{
    if (test_can_switch_user())
        CHECK(setgid(NOBODY) == 0 && setuid(NOBODY) == 0);
    with_umask(context);
}

SOCKET_TEST(b45_an_odd_umask_takes_nothing_away)
{
    mode_t masks[] = {0, 022, 0777, 0200, 0700};
    for (size_t i = 0; i < sizeof masks / sizeof *masks; i++) {
        client_run(with_umask, &masks[i]);
        client_run(as_nobody, &masks[i]); /* whom modes concern */
    }
    /* Death between the making of the folder and its mode. */
    assert_int_equal(mkdir(runtime_dir, 0), 0);
    client_run(with_umask, &masks[1]);
}

static void in_a_runtime_dir_of_its_own(void *context)
{
    char path[COX_SOCKET_PATH_SIZE], expected[COX_SOCKET_PATH_SIZE];
    struct cox_control_socket_options options = host_options("some.group");
    struct cox_control_connection session;
    struct cox_hello hello = worker_hello();
    const char *runtime = context;
    options.runtime_dir = NULL;
    if (runtime)
        CHECK(setenv("XDG_RUNTIME_DIR", runtime, 1) == 0);
    else
        CHECK(unsetenv("XDG_RUNTIME_DIR") == 0);
    CHECK(cox_control_socket_find("some.group", path, NULL) == 0);
    if (runtime && runtime[0] == '/')
        snprintf(expected, sizeof expected, "%s/coxswain/some.group.sock", runtime);
    else
        snprintf(expected, sizeof expected, "/tmp/coxswain-%u/some.group.sock", geteuid());
    CHECK(strcmp(path, expected) == 0);
    CHECK(cox_control_socket_open(&options, &host_hooks, &control_socket, NULL) == 0);
    CHECK(strcmp(cox_control_socket_path(control_socket), path) == 0);
    CHECK(cox_control_socket_connect(path, &hello, PATIENCE, &session, NULL) == 0);
    cox_control_connection_close(&session);
    socket_stop();
    uint32_t swept = 9;
    CHECK(cox_control_socket_sweep(NULL, &swept, NULL) == 0 && swept == 0);
}

SOCKET_TEST(the_default_runtime_directory_is_the_same_for_both_sides)
{
    assert_int_equal(mkdir(runtime_dir, 0700), 0);
    client_run(in_a_runtime_dir_of_its_own, runtime_dir);
    client_run(in_a_runtime_dir_of_its_own, NULL);
    client_run(in_a_runtime_dir_of_its_own, "");
    client_run(in_a_runtime_dir_of_its_own, "not/absolute");
}

SOCKET_TEST(a22_k19_long_paths_and_names_work)
{
    char path[COX_SOCKET_PATH_SIZE], name[130] = "", found[COX_SOCKET_PATH_SIZE];
    struct cox_control_socket_options options = host_options(name);
    struct cox_hello hello = worker_hello();
    struct cox_control_connection session;
    snprintf(path, sizeof path, "%s", runtime_dir);
    assert_int_equal(mkdir(path, 0700), 0);
    for (int i = 0; i < 15; i++) {
        size_t used = strlen(path);
        memset(path + used, 'd', 200);
        path[used] = '/';
        path[used + 200] = '\0';
        assert_int_equal(mkdir(path, 0700), 0);
    }
    options.runtime_dir = path;
    for (size_t length = 1; length <= 128; length++) {
        memset(name, 'n', length);
        name[length] = '\0';
        if (cox_control_socket_open(&options, &host_hooks, &control_socket, test_err()))
            fail_msg("%zu: %s", length, test_error.text);
        assert_ok(cox_control_socket_connect(cox_control_socket_path(control_socket), &hello,
                                             PATIENCE, &session, test_err()));
        cox_control_connection_close(&session);
        setenv("XDG_RUNTIME_DIR", path, 1);
        assert_int_equal(cox_control_socket_find(name, found, NULL), 0);
        unsetenv("XDG_RUNTIME_DIR");
        assert_string_equal(strrchr(found, '/'),
                            strrchr(cox_control_socket_path(control_socket), '/'));
        if (length == 128) { /* another long name is another control socket */
            struct cox_control_socket *other;
            name[127] = 'm';
            assert_ok(cox_control_socket_open(&options, &host_hooks, &other, test_err()));
            assert_string_not_equal(cox_control_socket_path(other),
                                    cox_control_socket_path(control_socket));
            cox_control_socket_close(other);
            /* Nor is the short one a control socket's whose group has that very name. */
            char *file = strrchr(found, '/') + 1;
            file[strlen(file) - strlen(".sock")] = '\0';
            assert_true(strlen(file) < 128);
            assert_int_equal(cox_name_check(file, NULL), COX_INVALID);
        }
        socket_stop();
    }
    size_t used = strlen(path);
    memset(path + used, '/', sizeof path - 1 - used);
    path[sizeof path - 1] = '\0';
    refused(&options, COX_TOO_LARGE, "expected less than 4096");
    path[used] = '\0';
    const char *names[] = {"", "a/b", ".a", "..", "a b"};
    for (size_t i = 0; i < 5; i++) {
        strcpy(name, names[i]);
        refused(&options, COX_INVALID, "");
        assert_int_equal(cox_control_socket_find(name, found, NULL), COX_INVALID);
    }
}

/* ---- names ---- */

static void serve_for_ever(void *context)
{
    int *told = context;
    struct cox_control_socket_options options = host_options("test");
    CHECK(cox_control_socket_open(&options, &host_hooks, &control_socket, NULL) == 0);
    tell(told[1]);
    for (;;)
        pause();
}

static pid_t server_start(void)
{
    int told[2];
    assert_int_equal(pipe2(told, O_CLOEXEC), 0);
    pid_t pid = client_start(serve_for_ever, told);
    assert_true(heard(told[0]));
    close(told[0]);
    close(told[1]);
    return pid;
}

static void server_kill(pid_t pid)
{
    kill(pid, SIGKILL);
    assert_true(WIFSIGNALED(child_status(pid)));
}

SOCKET_TEST(a22_b4_a_dead_groups_socket_is_no_obstacle)
{
    struct cox_control_socket_options options = host_options("test");
    struct cox_control_connection session;
    struct cox_hello hello = worker_hello();
    char path[COX_SOCKET_PATH_SIZE];
    uint32_t swept = 0;
    snprintf(path, sizeof path, "%s/test.sock", runtime_dir);
    assert_int_equal(cox_control_socket_connect(path, &hello, PATIENCE, &session, test_err()),
                     COX_NOT_FOUND);
    server_kill(server_start());
    assert_int_equal(runtime_dir_count(), 1);
    assert_refused(cox_control_socket_connect(path, &hello, PATIENCE, &session, test_err()),
                   COX_CLOSED, "the coordinator is dead");
    assert_ok(try_open(&options, test_err())); /* under the same name */
    assert_int_equal(runtime_dir_count(), 0);
    server_kill(server_start());
    options.name = "another";
    assert_ok(try_open(&options, test_err())); /* under any name */
    assert_int_equal(runtime_dir_count(), 0);
    server_kill(server_start());
    pid_t live = server_start(); /* swept, and there again */
    assert_int_equal(cox_control_socket_sweep(runtime_dir, &swept, NULL), 0);
    assert_int_equal(swept, 0);
    server_kill(live);
    assert_int_equal(cox_control_socket_sweep(runtime_dir, &swept, NULL), 0);
    assert_int_equal(swept, 1);
    assert_int_equal(runtime_dir_count(), 0);
    rmdir(runtime_dir);
    assert_int_equal(cox_control_socket_sweep(runtime_dir, &swept, NULL), 0);
    assert_int_equal(swept, 0);
    assert_int_equal(cox_control_socket_connect(path, &hello, PATIENCE, &session, test_err()),
                     COX_NOT_FOUND);
}

SOCKET_TEST(b9_a_live_name_is_taken)
{
    struct cox_control_socket_options options = host_options("test"), other = host_options("other");
    char text[64];
    pid_t live = server_start();
    snprintf(text, sizeof text, "process %d listens", (int)live);
    refused(&options, COX_TAKEN, text);
    assert_ok(try_open(&other, test_err()));
    kill(live, SIGSTOP); /* that is no death */
    refused(&options, COX_TAKEN, text);
    kill(live, SIGCONT);
    server_kill(live);
    assert_ok(try_open(&options, test_err()));
}

SOCKET_TEST(something_else_at_the_name_is_left_alone)
{
    struct cox_control_socket_options options = host_options("test");
    char path[100];
    struct stat st;
    uint32_t swept = 0;
    snprintf(path, sizeof path, "%s/test.sock", runtime_dir);
    assert_ok(try_open(&options, test_err())); /* makes the folder */
    close(open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
    refused(&options, COX_DENIED, "is in the way");
    unlink(path);
    assert_int_equal(symlink("/nowhere", path), 0);
    refused(&options, COX_DENIED, "is in the way");
    unlink(path);
    assert_int_equal(mkdir(path, 0700), 0);
    refused(&options, COX_DENIED, "is in the way");
    assert_int_equal(cox_control_socket_sweep(runtime_dir, &swept, NULL), 0);
    assert_int_equal(swept, 0);
    rmdir(path);
    snprintf(path, sizeof path, "%s/starting.new", runtime_dir);
    close(open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
    refused(&options, COX_DENIED, "starting.new is in the way: expected nothing there; move it");
    assert_int_equal(stat(path, &st), 0);
    unlink(path);
    /* A socket without a control socket's name may belong to another program. */
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s/mine.socket", runtime_dir);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(fd, (const struct sockaddr *)&address, sizeof address), 0);
    close(fd);
    assert_ok(try_open(&options, test_err()));
    assert_int_equal(stat(address.sun_path, &st), 0);
}

/* As a start leaves it that was killed between two steps, when a child of a fork has its socket. */
SOCKET_TEST(b4_a_new_file_that_another_process_still_has_is_no_obstacle)
{
    struct cox_control_socket_options options = host_options("test");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    assert_ok(try_open(&options, test_err())); /* makes the folder */
    snprintf(address.sun_path, sizeof address.sun_path, "%s/starting.new", runtime_dir);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(fd, (const struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(listen(fd, 1), 0);
    assert_ok(try_open(&options, test_err()));
    assert_int_equal(runtime_dir_count(), 0);
    close(fd);
}

SOCKET_TEST(b10_only_its_own_socket_is_removed_at_the_end)
{
    struct cox_control_socket *first, *second;
    struct cox_control_socket_options options = host_options("test");
    struct cox_hello hello = worker_hello();
    struct cox_control_connection session;
    assert_int_equal(cox_control_socket_open(&options, &host_hooks, &first, NULL), 0);
    /* by a cleaner that knows no better */
    assert_int_equal(unlink(cox_control_socket_path(first)), 0);
    assert_int_equal(cox_control_socket_open(&options, &host_hooks, &second, NULL), 0);
    cox_control_socket_close(first);
    assert_ok(cox_control_socket_connect(cox_control_socket_path(second), &hello, PATIENCE,
                                         &session, NULL));
    cox_control_connection_close(&session);
    cox_control_socket_close(second);
    assert_int_equal(runtime_dir_count(), 0);
}

struct race {
    /* pipe ends */
    int go, result, end;
};

static void racer(void *context)
{
    const struct race *race = context;
    struct cox_control_socket_options options = host_options("test");
    char byte;
    CHECK(read(race->go, &byte, 1) == 0);
    int r = cox_control_socket_open(&options, &host_hooks, &control_socket, NULL);
    CHECK(r == 0 || r == COX_TAKEN);
    CHECK(write(race->result, r == 0 ? "w" : "l", 1) == 1);
    CHECK(read(race->end, &byte, 1) == 0); /* it holds what it won until all have tried */
    socket_stop();
}

/* In a folder that is not there yet, or that a dead control socket has left its socket in. */
SOCKET_TEST(b4_b54_of_eight_starts_at_once_one_wins)
{
    for (int round = 0; round < 12; round++) {
        int go[2], result[2], end[2], won = 0;
        pid_t pids[8];
        if (round % 2)
            server_kill(server_start());
        assert_int_equal(pipe2(go, 0) | pipe2(result, 0) | pipe2(end, 0), 0);
        struct race race = {go[0], result[1], end[0]};
        for (int i = 0; i < 8; i++) {
            fflush(NULL);
            pids[i] = fork();
            assert_true(pids[i] >= 0);
            if (pids[i] == 0) {
                close(go[1]);
                close(end[1]);
                racer(&race);
                _exit(0);
            }
        }
        close(go[1]);
        for (int i = 0; i < 8; i++) {
            char byte;
            assert_int_equal(read(result[0], &byte, 1), 1);
            won += byte == 'w';
        }
        close(end[1]);
        for (int i = 0; i < 8; i++)
            child_join(pids[i]);
        assert_int_equal(won, 1);
        assert_int_equal(runtime_dir_count(), 0);
        close(go[0]);
        close(result[0]);
        close(result[1]);
        close(end[0]);
        if (round % 4 == 0)
            rmdir(runtime_dir);
    }
}

/* ---- other users ---- */

static void become_nobody(void)
{
    CHECK(setgid(NOBODY) == 0 && setuid(NOBODY) == 0);
}

static void nobody_visits(void *context)
{
    struct cox_hello hello = worker_hello();
    struct cox_control_connection session;
    const char *text = context;
    become_nobody();
    CHECK(cox_control_socket_connect(cox_control_socket_path(control_socket), &hello, PATIENCE,
                                     &session, test_err()) == COX_DENIED);
    if (!strstr(test_error.text, text))
        fprintf(stderr, "'%s' is not in: %s\n", text, test_error.text);
    CHECK(strstr(test_error.text, text));
}

SOCKET_TEST(b9_b28_another_user_does_not_come_in)
{
    if (!test_can_switch_user())
        skip();
    socket_start(NULL);
    client_run(nobody_visits, "ermission denied"); /* the folder's mode */
    /* Even if another process opens it. */
    assert_int_equal(chmod(runtime_dir, 0711), 0);
    client_run(nobody_visits, "ermission denied"); /* the socket's */
    assert_int_equal(chmod(cox_control_socket_path(control_socket), 0666), 0);
    client_run(nobody_visits, "user 65534 may not come in: expected 0");
    assert_int_equal(read_count(&host.admitted), 0);
    assert_int_equal(chmod(runtime_dir, 0700), 0);
}

static void nobody_has_our_variable(void *context)
{
    const char *variable = context;
    struct cox_hello hello = worker_hello();
    struct cox_control_connection session;
    struct cox_error err = {0}, made = {0};
    char inner[80], socket_path[COX_SOCKET_PATH_SIZE];
    int fd;
    become_nobody();
    CHECK(setenv(variable, runtime_dir, 1) == 0);
    snprintf(inner, sizeof inner, "%s/coxswain", runtime_dir);
    CHECK(cox_control_socket_find("test", socket_path, NULL) == 0);
    CHECK(cox_control_socket_connect(socket_path, &hello, PATIENCE, &session, &err) == COX_DENIED);
    CHECK(strstr(err.text, variable) && strstr(err.text, "unset it"));
    CHECK(cox_runtime_dir_open(inner, true, &fd, &made) == -EACCES);
    CHECK(strstr(made.text, variable) && strstr(made.text, "unset it"));
}

/* As su and runuser leave them. */
SOCKET_TEST(variables_of_another_user_are_named)
{
    if (!test_can_switch_user())
        skip();
    assert_int_equal(mkdir(runtime_dir, 0700), 0);
    client_run(nobody_has_our_variable, "XDG_RUNTIME_DIR");
    client_run(nobody_has_our_variable, "COXSWAIN_RUNTIME_DIR");
}

static void nobody_serves(void *context)
{
    become_nobody();
    serve_for_ever(context);
}

static pid_t nobody_start(void)
{
    int told[2];
    assert_int_equal(pipe2(told, O_CLOEXEC), 0);
    pid_t pid = client_start(nobody_serves, told);
    assert_true(heard(told[0]));
    close(told[0]);
    close(told[1]);
    return pid;
}

/* Whatever its name and the file's owner: the listening process counts. */
SOCKET_TEST(b9_a_squatted_socket_is_not_entered)
{
    struct cox_hello hello = worker_hello();
    struct cox_control_connection session;
    char path[100], text[100];
    if (!test_can_switch_user())
        skip();
    assert_int_equal(mkdir(runtime_dir, 0700), 0);
    assert_int_equal(chown(runtime_dir, NOBODY, NOBODY), 0);
    pid_t pid = nobody_start();
    snprintf(path, sizeof path, "%s/test.sock", runtime_dir);
    assert_refused(cox_control_socket_connect(path, &hello, PATIENCE, &session, test_err()),
                   COX_DENIED, "belongs to user 65534: expected 0 or 0");
    assert_int_equal(chown(path, 0, 0), 0);
    assert_int_equal(cox_control_socket_connect(path, &hello, PATIENCE, &session, test_err()),
                     COX_DENIED);
    snprintf(text, sizeof text, "process %d of user 65534 listens", (int)pid);
    assert_contains(test_error.text, text);
    server_kill(pid);
}

static void root_visits_as_root(void *context)
{
    struct cox_hello hello = worker_hello();
    _cox_cleanup_(cox_control_connection_close) struct cox_control_connection session;
    char path[100];
    (void)context;
    snprintf(path, sizeof path, "%s/test.sock", runtime_dir);
    /* The real user stays root, which is what the control socket sees; the effective one says whose
     * control sockets are its own. */
    int fd = raw_connect(path);
    CHECK(fd >= 0);
    uint8_t frame[COX_HELLO_SIZE];
    cox_hello_format(&hello, frame);
    CHECK(send(fd, frame, sizeof frame, 0) == sizeof frame);
    CHECK(raw_reply(fd, NULL) == 0);
    close(fd);
    become_nobody();
    CHECK(cox_control_socket_connect(path, &hello, PATIENCE, &session, NULL) == 0);
}

SOCKET_TEST(root_and_its_own_user_come_in)
{
    if (!test_can_switch_user())
        skip();
    assert_int_equal(mkdir(runtime_dir, 0700), 0);
    assert_int_equal(chown(runtime_dir, NOBODY, NOBODY), 0);
    pid_t pid = nobody_start();
    client_run(root_visits_as_root, NULL);
    server_kill(pid);
}

int main(void)
{
    test_begin();
    unsetenv("XDG_RUNTIME_DIR");
    return test_run(NULL, NULL);
}
