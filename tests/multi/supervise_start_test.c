/* supervise_start: what a worker starts with, and what is left of a start that fails. */
#include "channel/base/fault.h"
#include "channel/base/tsan.h"
#include "coordinator/process/launch.h"
#include "supervise_fixture.h"

TEST(m14_every_rank_gets_environment_and_flags)
{
    setenv("COXSWAIN_RANK", "77", 1); /* of the host; must not be there twice */
    setenv("SUPERVISE_TEST", "kept", 1);
    for (uint32_t n = 1; n <= 8; n *= 2) {
        /* sh is found in PATH; what follows "name" are its arguments. */
        const char *const command[] = {
            "sh", "-c",
            "echo \"$COXSWAIN_PREFIX $COXSWAIN_RANK $COXSWAIN_WORLD_SIZE $COXSWAIN_DEVICE $COXSWAIN_PARENT_PID $COXSWAIN_INCARNATION $COXSWAIN_SOCKET $COXSWAIN_LOCAL_RANK $COXSWAIN_LOCAL_WORLD_SIZE $SUPERVISE_TEST $PPID\"; echo \"$0 $*\"; env | grep -c ^COXSWAIN_",
            "name", NULL};
        const int32_t devices[8] = {7, 6, 5, 4, 3, 2, 1, 0};
        _cox_cleanup_(group_free) struct group g;
        group_init(&g);
        assert_ok(GROUP_TRY(&g, test_err(), .rank_count = n, .command = command, .pass_flags = true,
                            .prefix = "/pre fix", .control_socket = "/a.sock",
                            .devices = n == 8 ? devices : NULL));
        group_await_end(&g);
        for (uint32_t rank = 0; rank < n; rank++) {
            int device = n == 8 ? 7 - (int)rank : (int)rank;
            char expected[300];
            snprintf(expected, sizeof expected, "/pre fix %u %u %d %d 1 /a.sock %u %u kept %d",
                     rank, n, device, getpid(), rank, n, getpid());
            assert_string_equal(group_line(&g, rank, false, 0), expected);
            snprintf(
                expected, sizeof expected,
                "name --local_rank %u --local_world_size %u --npu_num_per_dp %u --npu_device_id %d --parent_pid %d --shm_name_prefix /pre fix",
                rank, n, n, device, getpid());
            assert_string_equal(group_line(&g, rank, false, 1), expected);
            assert_string_equal(group_line(&g, rank, false, 2), "9");
        }
    }
    /* A shell would hide a variable that is there twice. */
    struct group g;
    const char *const command[] = {"env", NULL};
    assert_int_equal(group_try(&g, 1, command, NULL), 0);
    group_await_end(&g);
    int times = 0;
    for (size_t i = 0; group_line(&g, 0, false, i); i++)
        times += strncmp(group_line(&g, 0, false, i), "COXSWAIN_RANK=", 14) == 0;
    assert_int_equal(times, 1);
    group_free(&g);
    unsetenv("COXSWAIN_RANK");
}

/* What is allowed is in tests/python/test_launch.py. */
TEST(m14_environments_and_working_directories_that_cannot_be)
{
    static const struct {
        const char *change, *directory;
        int code;
        const char *text;
    } refused[] = {
        {"=value", NULL, COX_INVALID, "environment has '=value', which names no variable"},
        {"", NULL, COX_INVALID, "environment has '', which names no variable"},
        {"COXSWAIN_RANK=1", NULL, COX_INVALID, "COXSWAIN_RANK, which the group sets itself"},
        {"COXSWAIN_SOCKET", NULL, COX_INVALID, "COXSWAIN_SOCKET, which the group sets itself"},
        {"KEPT=1", NULL, COX_INVALID, "environment has KEPT twice"},
        {NULL, "/missing", COX_NOT_FOUND, "/missing' as their working directory: No such file"},
        {NULL, "/dev/null", COX_NOT_FOUND,
         "/dev/null' as their working directory: it is no directory"},
    };
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        _cox_cleanup_(group_free) struct group g;
        const char *const command[] = {"/bin/true", NULL};
        const char *const wrong[] = {refused[i].change, "KEPT", NULL};
        group_init(&g);
        assert_refused(GROUP_TRY(&g, test_err(), .rank_count = 1, .command = command,
                                 .environment = refused[i].change ? wrong : NULL,
                                 .working_directory = refused[i].directory),
                       refused[i].code, refused[i].text);
    }
}

static volatile int *exit_handlers_in_children; /* shared with them */
static pid_t test_pid;

static void count_exit_handler(void)
{
    if (getpid() != test_pid)
        ++*exit_handlers_in_children;
}

static void expect_exec_failure(const char *program, const char *named, const char *reason)
{
    struct group g;
    const char *const command[] = {program, "argument", NULL};
    struct cox_supervisor *const untouched = (struct cox_supervisor *)&g;
    for (uint32_t n = 1; n <= 8; n *= 8) {
        group_init(&g);
        g.supervisor = untouched;
        assert_refused(GROUP_TRY(&g, test_err(), .rank_count = n, .command = command),
                       COX_EXEC_FAILED, named);
        assert_ptr_equal(g.supervisor, untouched);
        assert_memory_equal(test_error.text, "rank 0: ", 8);
        assert_contains(test_error.text, reason);
        assert_int_equal(g.death_count, 0);
        g.supervisor = NULL;
        group_free(&g);
    }
}

static void write_file(const char *path, mode_t mode, const char *text)
{
    int fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC | O_TRUNC, mode);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), strlen(text));
    assert_int_equal(fchmod(fd, mode), 0);
    close(fd);
}

TEST(m14_b40_exec_failure_is_reported)
{
    test_pid = getpid();
    exit_handlers_in_children =
        mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(exit_handlers_in_children != MAP_FAILED);
    assert_int_equal(atexit(count_exit_handler), 0);

    char folder[] = "/tmp/supervise_XXXXXX", file[64];
    assert_non_null(mkdtemp(folder));
    snprintf(file, sizeof file, "%s/program", folder);
    expect_exec_failure(file, file, "No such file or directory");
    expect_exec_failure("no-such-worker", "'no-such-worker'", "PATH");
    expect_exec_failure("", "''", "PATH");
    expect_exec_failure(folder, folder, "is a directory");
    write_file(file, 0644, "#!/bin/sh\n");
    expect_exec_failure(file, file, "Permission denied");
    write_file(file, 0755, "neither script nor program\n");
    expect_exec_failure(file, file, "Exec format error");
    write_file(file, 0755, "#!/no/such/interpreter\n");
    expect_exec_failure(file, file, "interpreter");
    char *path = strdup(getenv("PATH"));
    setenv("PATH", folder, 1);
    write_file(file, 0644, "#!/bin/sh\n");
    expect_exec_failure("program", file, "Permission denied");
    setenv("PATH", path, 1);
    free(path);
    unlink(file);
    rmdir(folder);
    assert_int_equal(*exit_handlers_in_children, 0);
}

TEST(m14_exec_failure_of_a_later_rank_ends_the_earlier)
{
    char folder[] = "/tmp/supervise_XXXXXX", file[64];
    assert_non_null(mkdtemp(folder));
    snprintf(file, sizeof file, "%s/program", folder);
    /* It removes itself, long before all of the largest group are started. */
    write_file(file, 0755, "#!/bin/sh\nrm -f \"$0\"\nexec sleep 1000\n");
    struct group g;
    const char *const command[] = {file, NULL};
    assert_refused(group_try(&g, COX_RANK_COUNT_MAX, command, test_err()), COX_EXEC_FAILED, file);
    assert_int_equal(strncmp(test_error.text, "rank ", 5), 0);
    assert_true(atoi(test_error.text + 5) > 0);
    assert_int_equal(g.death_count, 0);
    assert_int_equal(g.line_count, 0);
    group_free(&g);
    rmdir(folder);
}

TEST(m14_arguments_are_checked)
{
    struct group g;
    const char *const command[] = {"/bin/true", NULL};
    assert_int_equal(group_try(&g, 0, command, test_err()), COX_INVALID);
    group_free(&g);
    assert_int_equal(group_try(&g, COX_RANK_COUNT_MAX + 1, command, NULL), COX_INVALID);
    group_free(&g);
    assert_int_equal(group_try(&g, 1, command + 1, NULL), COX_INVALID);
    group_free(&g);
    assert_null(cox_supervisor_free(NULL));
}

/* The shell's own fds; a pipeline or a substitution would add to them. */
#define STANDARD_FDS_SCRIPT                                                                        \
    "ls /proc/$$/fd; for f in 0 1 2; do readlink /proc/$$/fd/$f; done; echo err >&2"

static bool has_standard_fds(struct group *g, uint32_t rank)
{
    const char *lines[7];
    for (size_t i = 0; i < 7; i++)
        lines[i] = group_line(g, rank, false, i) ? group_line(g, rank, false, i) : "";
    const char *err = group_line(g, rank, true, 0);
    return strcmp(lines[0], "0") == 0 && strcmp(lines[1], "1") == 0 && strcmp(lines[2], "2") == 0 &&
           strcmp(lines[3], "/dev/null") == 0 && strncmp(lines[4], "pipe:", 5) == 0 &&
           strncmp(lines[5], "pipe:", 5) == 0 && strcmp(lines[4], lines[5]) != 0 &&
           strcmp(lines[6], "") == 0 && err && strcmp(err, "err") == 0;
}

#if COX_TESTING
/* The new process is stopped before it has executed anything: the thread that starts it sleeps
 * until it has. */
TEST(b2_a_process_stopped_before_exec_is_given_up)
{
    for (uint32_t rank = 0; rank < 3; rank++) {
        const char *const command[] = {"/bin/sleep", "1000", NULL};
        _cox_cleanup_(group_free) struct group g;
        char plan[32], named[100];
        group_init(&g);
        snprintf(plan, sizeof plan, "launch.child:stop:%u", rank);
        snprintf(named, sizeof named,
                 "rank %u: its process did not get as far as executing '/bin/sleep'", rank);
        cox_fault_arm(plan);
        int r = GROUP_TRY(&g, test_err(), .rank_count = 3, .command = command,
                          .deadline_ns = cox_deadline_after_ms(1000));
        cox_fault_arm(NULL);
        assert_refused(r, COX_TIMEOUT, named);
        assert_null(g.supervisor);
    }
}

static void *start_main(void *group)
{
    static const char *const command[] = {"/bin/sleep", "1000", NULL};
    const int r = group_try(group, 1, command, test_err());
    return (void *)(intptr_t)r;
}

/* A copy of the host's page tables takes 50 ms for each GB. A value that this process writes while
 * the new one is stopped before exec is there in both. */
TEST(m14_a_new_process_copies_no_memory)
{
#ifdef COX_TSAN
    skip(); /* ThreadSanitizer needs a copy */
#endif
    static volatile uint64_t witness;
    struct group g;
    void *r = NULL;
    cox_fault_arm("launch.child:stop:0");
    pthread_t thread = test_thread(start_main, &g);
    siginfo_t stopped = {0};
    AWAIT(!(waitid(P_ALL, 0, &stopped, WSTOPPED | WNOWAIT) < 0 && errno == ECHILD));
    cox_fault_arm(NULL);
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/mem", (int)stopped.si_pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    const uint64_t secret = 0x636f787377616e21;
    witness = secret;
    uint64_t seen = 0;
    assert_int_equal(pread(fd, &seen, sizeof seen, (off_t)(uintptr_t)&witness), sizeof seen);
    close(fd);
    kill(stopped.si_pid, SIGCONT);
    pthread_join(thread, &r);
    assert_null(r);
    group_free(&g);
    assert_true(seen == secret);
}
#endif

TEST(b15_a_worker_has_only_its_standard_fds)
{
    int inheritable = open("/dev/null", O_RDWR); /* no O_CLOEXEC: the host's slip */
    assert_true(inheritable > 2);
    struct group g;
    group_start(&g, 4, STANDARD_FDS_SCRIPT);
    group_await_end(&g);
    for (uint32_t rank = 0; rank < 4; rank++)
        assert_true(has_standard_fds(&g, rank));
    group_free(&g);
    close(inheritable);
}

TEST(m14_a_worker_starts_with_default_signals)
{
    sigset_t blocked, saved;
    sigfillset(&blocked);
    pthread_sigmask(SIG_SETMASK, &blocked, &saved);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGUSR1, SIG_IGN);
    struct group g;
    const char *const command[] = {"grep", "-E", "^Sig(Blk|Ign|Cgt)", "/proc/self/status", NULL};
    assert_int_equal(group_try(&g, 2, command, NULL), 0);
    group_await_end(&g);
    for (uint32_t rank = 0; rank < 2; rank++) {
        assert_string_equal(group_line(&g, rank, false, 0), "SigBlk:\t0000000000000000");
        assert_string_equal(group_line(&g, rank, false, 1), "SigIgn:\t0000000000000000");
    }
    group_free(&g);
    signal(SIGPIPE, SIG_DFL);
    signal(SIGUSR1, SIG_DFL);
    sigset_t now;
    pthread_sigmask(SIG_SETMASK, &saved, &now);
    assert_int_equal(sigismember(&now, SIGUSR2), 1); /* start gave the caller's mask back */
}

TEST(b15_fd_shortage_undoes_everything)
{
    struct rlimit saved;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &saved), 0);
    const char *const command[] = {"/bin/sleep", "1000", NULL};
    int failures = 0;
    for (rlim_t limit = 3;; limit++) {
        struct group g;
        setrlimit(RLIMIT_NOFILE, &(struct rlimit){limit, saved.rlim_max});
        int r = group_try(&g, 3, command, test_err());
        setrlimit(RLIMIT_NOFILE, &saved);
        group_free(&g);
        assert_int_equal(count_fds(), fds_before);
        siginfo_t info;
        assert_int_equal(waitid(P_ALL, 0, &info, WEXITED | WNOHANG | __WALL), -1);
        if (r == 0)
            break;
        assert_true(r == -EMFILE || r == -EINVAL);
        assert_int_equal(test_error.code, r);
        assert_true(limit < 1000);
        failures++;
    }
    assert_true(failures > 10);
}

/* Without standard fds the numbers of the supervisor's own get into the way of the worker's. */
static int helper_closed(unsigned closed)
{
    for (int fd = 0; fd < 3; fd++)
        if (closed & (1u << fd))
            close(fd);
    struct group g;
    group_start(&g, 2, STANDARD_FDS_SCRIPT);
    bool good = true;
    /* A line of the host's log goes nowhere, and the host may open what it likes there. */
    for (int fd = 0; fd < 3; fd++)
        good = good && (!(closed & (1u << fd)) || fcntl(fd, F_GETFD) < 0);
    group_await_end(&g);
    good = good && has_standard_fds(&g, 0) && has_standard_fds(&g, 1);
    group_free(&g);
    return good ? 0 : 1;
}

TEST(m14_host_without_standard_fds)
{
    for (int closed = 1; closed < 8; closed++) {
        int fd;
        char mode[2] = {(char)('0' + closed), '\0'};
        assert_int_equal(helper_wait(helper_start(mode, &fd)), 0);
        close(fd);
    }
}

/* As a user with too few processes: the thread cannot be made, then the first worker, then the
 * second. */
static int helper_few(void)
{
    if (setresgid(65533, 65533, 65533) || setresuid(65533, 65533, 65533))
        return 77;
    const char *const command[] = {"/bin/sleep", "1000", NULL};
    int failures = 0;
    for (rlim_t limit = 1; limit < 20; limit++) {
        setrlimit(RLIMIT_NPROC, &(struct rlimit){limit, 20});
        int fds = count_fds();
        struct group g;
        int r = group_try(&g, 3, command, test_err());
        group_free(&g);
        siginfo_t info;
        if (count_fds() != fds || waitid(P_ALL, 0, &info, WEXITED | WNOHANG) == 0)
            return 2;
        if (r == 0)
            return failures >= 4 ? 0 : 3;
        if (r != -EAGAIN || test_error.code != r)
            return 4;
        failures++;
    }
    return 5;
}

TEST(m14_process_shortage_undoes_everything)
{
    int fd;
    int status = helper_wait(helper_start("few", &fd));
    close(fd);
    if (status == 77)
        skip();
    assert_int_equal(status, 0);
}

TEST(m14_host_that_ignores_sigchld)
{
    signal(SIGCHLD, SIG_IGN);
    struct group g;
    group_start(&g, 4, "echo line; exit 3");
    group_await_end(&g);
    for (uint32_t rank = 0; rank < 4; rank++) {
        assert_string_equal(group_line(&g, rank, false, 0), "line");
        assert_int_equal(g.deaths[rank].times, 1);
        assert_false(g.deaths[rank].how.known);
        assert_contains(g.deaths[rank].description, "SIGCHLD");
    }
    group_free(&g);
    const char *const command[] = {"/no/such/worker", NULL};
    assert_int_equal(group_try(&g, 2, command, test_err()), COX_EXEC_FAILED);
    group_free(&g);
    signal(SIGCHLD, SIG_DFL);
}

int main(int argc, char **argv)
{
    if (argc == 2)
        return strcmp(argv[1], "few") == 0 ? helper_few() : helper_closed((unsigned)atoi(argv[1]));
    return test_run(NULL, NULL);
}
