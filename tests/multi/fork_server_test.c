/* Workers of a fork server: children of the coordinator as if it had forked them, whatever becomes
 * of the server. The server of these tests is a child that forks twice and executes a shell in the
 * worker; it can be told to fail at each step. python/test_fork_server.py has the real one. */
#include "channel/base/fault.h"
#include "channel/socket/socket.h"
#include "coordinator/process/fork_server.h"
#include "coordinator/process/launch.h"
#include "coordinator/process/supervise.h"
#include "testing.h"

/* Where the server fails. */
enum failure {
    NONE,
    REFUSES,
    DIES_ASKED,   /* with the request in its hand */
    DIES_FORKED,  /* and what it has forked goes on alone */
    BETWEEN_DIES, /* before it says anything */
    WORKER_DIES,  /* before it is ready */
    LIES,         /* it names a process that is no child of the coordinator */
    SPEAKS_OTHERWISE,
};

struct answer {
    int32_t kind, pid, parent;
    char text[500];
};

static void answer(int fd, int kind, pid_t pid, pid_t parent, const char *text)
{
    struct answer message = {.kind = kind, .pid = pid, .parent = parent};
    snprintf(message.text, sizeof message.text, "%s", text);
    ssize_t sent = send(fd, &message, sizeof message, MSG_NOSIGNAL);
    (void)sent;
}

/* fds: answers, folder, environment, standard output, standard error, what is inherited. */
static _Noreturn void worker_main(const int *fds, uint32_t fd_count, pid_t between,
                                  pid_t coordinator, enum failure failure)
{
    AWAIT(getppid() != between);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (failure == WORKER_DIES || getppid() != coordinator)
        _exit(1);
    setpgid(0, 0);
    static char block[1 << 16];
    static char *variables[512];
    ssize_t size = pread(fds[2], block, sizeof block - 1, 0);
    size_t count = 0;
    for (char *at = block; at < block + size; at += strlen(at) + 1)
        variables[count++] = at;
    if (fchdir(fds[1]) < 0 || dup2(fds[3], 1) < 0 || dup2(fds[4], 2) < 0)
        _exit(1);
    answer(fds[0], 2, failure == LIES ? coordinator : getpid(), between, "");
    char go;
    if (read(fds[0], &go, 1) != 1)
        _exit(1);
    /* Their numbers are those that they came with, above the ones that they get. */
    for (uint32_t i = 5; i < fd_count; i++)
        dup2(fds[i], 4 + (int)i - 5);
    if (syscall(SYS_close_range, 4 + fd_count - 5, ~0U, 0) < 0)
        _exit(1);
    char *const argv[] = {"sh", "-c", getenv("TEST_SCRIPT"), NULL};
    execve("/bin/sh", argv, variables);
    _exit(1);
}

static _Noreturn void server_main(int fd, pid_t coordinator, enum failure failure)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) {
        uint32_t message[3], fd_count = 0;
        int fds[COX_SOCKET_FD_COUNT_MAX];
        size_t size = 0;
        if (cox_socket_wait(fd, POLLIN, COX_DEADLINE_NEVER) ||
            cox_socket_receive_some(fd, message, sizeof message, &size, fds, 64, &fd_count) ||
            size != sizeof message || fd_count != 5 + message[2] || getppid() != coordinator)
            _exit(0);
        if (failure == DIES_ASKED)
            _exit(0);
        if (failure == REFUSES)
            answer(fds[0], 0, 0, 0, "it has a cold");
        if (failure == SPEAKS_OTHERWISE)
            answer(fds[0], 77, 0, 0, "");
        pid_t between = failure == REFUSES || failure == SPEAKS_OTHERWISE ? -1 : fork();
        if (between == 0) {
            pid_t own = getpid(), pid = fork();
            if (pid == 0)
                worker_main(fds, fd_count, own, coordinator, failure);
            if (failure == BETWEEN_DIES)
                kill(own, SIGKILL);
            answer(fds[0], 1, pid, own, "");
            if (failure == DIES_FORKED) /* so that it is the coordinator's when it ends */
                AWAIT(getppid() == coordinator);
            _exit(0);
        }
        if (failure == DIES_FORKED)
            _exit(0);
        for (uint32_t i = 0; i < fd_count; i++)
            close(fds[i]);
        if (between > 0)
            waitpid(between, NULL, 0);
    }
}

struct fixture {
    pid_t server;
    int server_fd;
    struct cox_launch_plan plan;
    struct cox_launched launched;
    char log[1024];
    /* what the last worker wrote, to both streams */
    char text[4096];
};
#define FIXTURE _cox_cleanup_(fixture_deinit) struct fixture

static void on_log(void *context, int level, const char *text)
{
    struct fixture *f = context;
    assert_int_equal(level, 4);
    snprintf(f->log, sizeof f->log, "%s", text);
}

/* Workers are this shell's: of the server, or executed. */
static void fixture_init(struct fixture *f, enum failure failure, const char *script)
{
    *f = (struct fixture){.launched.pidfd = -1};
    setenv("TEST_SCRIPT", script, 1);
    int pair[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    pid_t self = getpid();
    f->server = fork();
    if (f->server == 0) {
        close(pair[0]);
        server_main(pair[1], self, failure);
    }
    close(pair[1]);
    f->server_fd = pair[0];
    static const char *const command[] = {"/bin/sh", "-c", "echo executed; eval \"$TEST_SCRIPT\"",
                                          NULL};
    const struct cox_supervise_options options = {
        .rank_count = 1,
        .command = command,
        .prefix = "/test",
        .fork_server_fds = &f->server_fd,
        .log = {on_log, f},
    };
    assert_int_equal(cox_launch_plan_init(&f->plan, &options, NULL), 0);
}

static void fixture_deinit(struct fixture *f)
{
    cox_launch_plan_deinit(&f->plan);
    close(f->server_fd);
    int status;
    assert_int_equal(waitpid(f->server, &status, 0), f->server);
    int before = -1;
    assert_int_equal(prctl(PR_GET_CHILD_SUBREAPER, &before), 0);
    assert_int_equal(before, 0);
}

/* The server has it on return. */
static void fixture_signal(struct fixture *f, int number, int options)
{
    siginfo_t info;
    assert_int_equal(kill(f->server, number), 0);
    assert_int_equal(waitid(P_PID, (id_t)f->server, &info, options), 0);
}

static void launch(struct fixture *f, const int *fds, uint32_t fd_count)
{
    const struct cox_launch_incarnation incarnation = {
        .number = 3, .fds = fds, .fd_count = fd_count};
    assert_ok(cox_launch(&f->plan, 0, &incarnation, &f->launched, test_err()));
}

/* How the worker ended. A server that is stopped may have the pipes, too, so their end is not
 * awaited. */
static siginfo_t finish(struct fixture *f)
{
    int pidfd = atomic_exchange(&f->launched.pidfd, -1);
    assert_int_equal(cox_socket_wait(pidfd, POLLIN, cox_deadline_after_ms(TEST_PATIENCE_MS)), 0);
    size_t size = 0;
    for (int stream = 0; stream < 2; stream++) {
        ssize_t got;
        while ((got = read(f->launched.stream_fds[stream], f->text + size,
                           sizeof f->text - 1 - size)) > 0)
            size += (size_t)got;
        close(f->launched.stream_fds[stream]);
    }
    f->text[size] = '\0';
    siginfo_t info = {0};
    assert_true(cox_launch_reap(pidfd, true, &info));
    assert_int_equal(info.si_pid, f->launched.pid);
    close(pidfd);
    return info;
}

/* One worker, to its end. */
static siginfo_t run_worker(struct fixture *f)
{
    launch(f, NULL, 0);
    return finish(f);
}

TEST(p2_a_forked_worker_is_a_child_of_the_coordinator)
{
    FIXTURE f;
    char expected[128];
    fixture_init(&f, NONE, "echo $PPID $COXSWAIN_RANK $COXSWAIN_INCARNATION; echo bad >&2; exit 7");
    for (int i = 0; i < 3; i++) {
        siginfo_t info = run_worker(&f);
        snprintf(expected, sizeof expected, "%d 0 3\nbad\n", getpid());
        assert_string_equal(f.text, expected);
        assert_int_equal(info.si_code, CLD_EXITED);
        assert_int_equal(info.si_status, 7);
    }
    assert_string_equal(f.log, "");
}

TEST(p2_how_a_forked_worker_was_killed_is_known)
{
    struct fixture f;
    fixture_init(&f, NONE, "kill -9 $$");
    siginfo_t info = run_worker(&f);
    assert_int_equal(info.si_code, CLD_KILLED);
    assert_int_equal(info.si_status, SIGKILL);
    fixture_deinit(&f);
    /* Its process group is its own, and ends with it. */
    fixture_init(&f, NONE, "sleep 1000 & exec sleep 1000");
    launch(&f, NULL, 0);
    int output_fd = dup(f.launched.stream_fds[0]);
    cox_launch_kill_group(f.launched.pid, atomic_load(&f.launched.pidfd));
    info = finish(&f);
    assert_int_equal(info.si_status, SIGKILL);
    /* The end of the output is that of both. */
    assert_ok(cox_socket_wait(output_fd, POLLIN, cox_deadline_after_ms(TEST_PATIENCE_MS)));
    assert_int_equal(read(output_fd, f.text, 1), 0);
    close(output_fd);
    fixture_deinit(&f);
}

TEST(b15_a_forked_worker_has_the_fds_that_it_inherits)
{
    struct fixture f;
    int fds[2];
    for (int i = 0; i < 2; i++) {
        fds[i] = memfd_create(i == 0 ? "first" : "second", MFD_CLOEXEC);
        assert_true(fds[i] >= 0);
    }
    fixture_init(&f, NONE,
                 "echo $COXSWAIN_FDS; readlink /proc/$$/fd/4 /proc/$$/fd/5 /proc/$$/fd/6");
    launch(&f, fds, 2);
    finish(&f);
    assert_string_equal(f.text, "4:2\n/memfd:first (deleted)\n/memfd:second (deleted)\n");
    fixture_deinit(&f);
    close(fds[0]);
    close(fds[1]);
}

/* Whatever happens to the server, one worker runs, and nothing else is left (teardown looks). */
TEST(p2_where_the_server_fails_the_program_is_executed)
{
    static const struct {
        enum failure failure;
        const char *reason; /* NULL: it costs nothing */
    } cases[] = {
        {REFUSES, "it has a cold"},
        {DIES_ASKED, "it has ended"},
        {DIES_FORKED, NULL},
        {BETWEEN_DIES, NULL},
        {WORKER_DIES, "it has ended"},
        {LIES, "no child of this process"},
        {SPEAKS_OTHERWISE, "another version"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        FIXTURE f;
        fixture_init(&f, cases[i].failure, "echo here");
        run_worker(&f);
        assert_string_equal(f.text, cases[i].reason ? "executed\nhere\n" : "here\n");
        if (cases[i].reason)
            assert_contains(f.log, cases[i].reason);
        else
            assert_string_equal(f.log, "");
    }
}

TEST(p2_a_server_that_was_killed_costs_the_fast_path)
{
    FIXTURE f;
    fixture_init(&f, NONE, "echo here");
    fixture_signal(&f, SIGKILL, WEXITED | WNOWAIT);
    run_worker(&f);
    assert_string_equal(f.text, "executed\nhere\n");
    assert_contains(f.log, "closed");
}

/* Once, for its patience: its socket is shut down then. */
TEST(b2_a_server_that_is_stopped_is_given_up)
{
    FIXTURE f;
    fixture_init(&f, NONE, "echo here");
    fixture_signal(&f, SIGSTOP, WSTOPPED);
    for (int i = 0; i < 2; i++) {
        run_worker(&f);
        assert_string_equal(f.text, "executed\nhere\n");
        assert_contains(f.log, i == 0 ? "within 10 s" : "closed");
    }
    assert_int_equal(kill(f.server, SIGCONT), 0);
}

TEST(p2_a_host_that_is_a_subreaper_stays_one)
{
    FIXTURE f;
    assert_int_equal(prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
    fixture_init(&f, NONE, "echo here");
    run_worker(&f);
    int now = 0;
    assert_int_equal(prctl(PR_GET_CHILD_SUBREAPER, &now), 0);
    assert_int_equal(now, 1);
    assert_int_equal(prctl(PR_SET_CHILD_SUBREAPER, 0), 0);
    assert_string_equal(f.text, "here\n");
}

#if COX_TESTING
/* The pipe's write end is inherited by all processes of the coordinator, so its end is theirs. */
TEST(p2_nothing_outlives_a_coordinator_that_is_killed)
{
    static const struct {
        const char *plan;
        enum failure failure;
    } rows[] = {
        {"launch.asked:kill", NONE},
        {"launch.adopted:kill", NONE},
        {"launch.forked:kill", NONE},
        {"launch.undone:kill", LIES},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        int pair[2];
        assert_int_equal(pipe(pair), 0);
        pid_t pid = fork();
        if (pid == 0) {
            close(pair[0]);
            cox_fault_arm(rows[i].plan);
            struct fixture f;
            fixture_init(&f, rows[i].failure, "exec sleep 1000");
            launch(&f, NULL, 0);
            _exit(0); /* not killed */
        }
        close(pair[1]);
        int status;
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        assert_ok(cox_socket_wait(pair[0], POLLIN, cox_deadline_after_ms(TEST_PATIENCE_MS)));
        char byte;
        assert_int_equal(read(pair[0], &byte, 1), 0);
        close(pair[0]);
    }
}
#endif
