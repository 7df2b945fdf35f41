#include "channel_fixture.h"

#include "channel/socket/control_socket.h"
#include "coordinator/executor/core.h"
#include "tests/lib/rights.h"

#include <sys/time.h>

static bool own_shm;
static int fds_before;

bool private_shm(const char *size)
{
    char options[64];
    snprintf(options, sizeof options, "mode=1777%s%s", size ? ",size=" : "", size ? size : "");
    own_shm = test_unshare_shm(options);
    return own_shm;
}

static void try_private_shm(void *context)
{
    (void)context;
    _exit(private_shm("64k") ? 0 : 1);
}

bool proc_hide(void)
{
    return unshare(CLONE_NEWNS) == 0 && mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
           mount("proc", "/proc", "proc", 0, "hidepid=2") == 0;
}

bool private_shm_possible(void)
{
    int status = child_status(child_start(try_private_shm, NULL));
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static void user_take(const char *text)
{
    const struct rlimit limit = {1024, 1024};
    const uid_t uid = (uid_t)strtoul(text, NULL, 10);
    if (!test_can_switch_user())
        _exit(77);
    CHECK(uid > 0 && setrlimit(RLIMIT_NOFILE, &limit) == 0);
    CHECK(setgroups(0, NULL) == 0 && setresgid((gid_t)uid, (gid_t)uid, (gid_t)uid) == 0);
    CHECK(setresuid(uid, uid, uid) == 0 && prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) == 0);
}

/* Where permitted, gives this program a /dev/shm of its own, so that leak_teardown sees every
 * leftover. With COX_TEST_USER=UID in the environment a program of root's becomes that user's
 * first, with 1,024 fds at most; without the right to do so it ends as skipped. */
void test_begin(void)
{
    const char *uid = getenv("COX_TEST_USER");
    if (uid)
        user_take(uid);
    /* Not in a user namespace, which would hide the user's rights from its tests. */
    if (unshare(CLONE_NEWNS) == 0)
        private_shm(NULL);
}

/* What the names of this program's objects start with. The pid alone does not do: a killed program
 * leaves its names, and its pid is used again. */
static const char *own_prefix(void)
{
    static char prefix[40]; /* of the program, also in its children */
    if (!prefix[0])
        snprintf(prefix, sizeof prefix, "coxt%d_%x_", (int)getpid(), (unsigned)cox_now_ns());
    return prefix;
}

int shm_count(const char *part)
{
    return test_entry_count(SHM, own_shm ? "" : own_prefix(), part ? part : "");
}

int fd_count(void)
{
    return test_entry_count("/proc/self/fd", "", "");
}

int fd_count_at(const struct cox_control_socket *control_socket)
{
    struct cox_control_socket_counts counts;
    AWAIT((cox_control_socket_counts(control_socket, &counts), counts.closing == 0));
    return fd_count();
}

int leak_setup(void **state)
{
    (void)state;
    fds_before = fd_count();
    return 0;
}

int leak_teardown(void **state)
{
    (void)state;
    assert_int_equal(shm_count(NULL), 0);
    /* On a busy machine the end of a control socket leaves its last closes to detached threads. */
    AWAIT(fd_count() <= fds_before);
    assert_int_equal(fd_count(), fds_before);
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
    assert_int_equal(errno, ECHILD);
    return 0;
}

const char *test_object(const char *what)
{
    static char names[4][512];
    static unsigned next;
    char *name = names[next++ % 4];
    snprintf(name, sizeof names[0], "/%s%s", own_prefix(), what);
    return name;
}

const char *test_name(const char *what)
{
    return test_object(what) + 1;
}

pid_t child_start(void (*fn)(void *context), void *context)
{
    own_prefix(); /* the program's, also in the child */
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* no orphan survives a failed test */
        fn(context);
        _exit(0);
    }
    return pid;
}

int child_status(pid_t pid)
{
    int status = -1;
    pid_t r;
    do
        r = waitpid(pid, &status, 0);
    while (r < 0 && errno == EINTR);
    assert_int_equal(r, pid);
    return status;
}

bool child_struck(pid_t pid)
{
    const int status = child_status(pid);
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
        return true;
    assert_int_equal(status, 0);
    return false;
}

void child_kill(pid_t pid)
{
    kill(pid, SIGKILL);
    child_status(pid);
}

void child_join(pid_t pid)
{
    assert_int_equal(child_status(pid), 0);
}

void child_run(void (*fn)(void *context), void *context)
{
    child_join(child_start(fn, context));
}

struct quiet_call {
    void (*fn)(void *context);
    void *context;
};

static void quietly(void *context)
{
    const struct quiet_call *call = context;
    int null = open("/dev/null", O_WRONLY | O_CLOEXEC);
    CHECK(null >= 0 && dup2(null, STDERR_FILENO) == STDERR_FILENO);
    signal(SIGABRT, SIG_DFL);
    call->fn(call->context);
}

void child_aborts(void (*fn)(void *context), void *context)
{
    struct quiet_call call = {fn, context};
    int status = child_status(child_start(quietly, &call));
    assert_true(WIFSIGNALED(status));
    assert_int_equal(WTERMSIG(status), SIGABRT);
}

static bool in_futex(pid_t pid)
{
    char path[64], text[64];
    snprintf(path, sizeof path, "/proc/%d/syscall", (int)pid);
    FILE *file = fopen(path, "re");
    assert_non_null(file);
    bool futex = fgets(text, sizeof text, file) && strtol(text, NULL, 10) == SYS_futex;
    fclose(file);
    return futex;
}

void child_asleep(pid_t pid)
{
    AWAIT(in_futex(pid));
}

struct timed_call {
    void (*fn)(void *context);
    void *context;
};

static void check_time_and_call(void *context)
{
    const struct timed_call *call = context;
    struct timespec real;
    clock_gettime(CLOCK_REALTIME, &real);
    CHECK(cox_now_ns() / COX_NSEC_PER_SEC > (uint64_t)real.tv_sec);
    alarm(20);
    call->fn(call->context);
}

static void enter_another_time(void *context)
{
    if (unshare(CLONE_NEWTIME) < 0)
        _exit(77);
    int fd = open("/proc/self/timens_offsets", O_WRONLY | O_CLOEXEC);
    if (fd < 0 || dprintf(fd, "monotonic 3000000000 0") < 0)
        _exit(77);
    close(fd);
    child_run(check_time_and_call, context);
}

void child_run_in_another_time(void (*fn)(void *context), void *context)
{
    struct timed_call call = {fn, context};
    int status = child_status(child_start(enter_another_time, &call));
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
        skip();
    assert_int_equal(status, 0);
}

#if defined(__SANITIZE_THREAD__)
#define SIGNALS_ARE_DEFERRED
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define SIGNALS_ARE_DEFERRED
#endif
#endif

static struct sigaction before_storm;

static void timer_set(uint32_t period_us)
{
    const struct itimerval timer = {{0, (suseconds_t)period_us}, {0, (suseconds_t)period_us}};
    assert_int_equal(setitimer(ITIMER_REAL, &timer, NULL), 0);
}

void storm_begin(void (*handler)(int number), uint32_t period_us)
{
    const struct sigaction action = {.sa_handler = handler};
#ifdef SIGNALS_ARE_DEFERRED
    skip();
#endif
    assert_int_equal(sigaction(SIGALRM, &action, &before_storm), 0);
    timer_set(period_us);
}

void storm_end(void)
{
    timer_set(0);
    assert_int_equal(sigaction(SIGALRM, &before_storm, NULL), 0);
}

void tell(int fd)
{
    ssize_t r;
    do
        r = write(fd, "x", 1);
    while (r < 0 && errno == EINTR);
}

bool heard(int fd)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};
    char byte;
    ssize_t r;
    do
        r = poll(&p, 1, 60000) == 1 ? read(fd, &byte, 1) : -1;
    while (r < 0 && errno == EINTR);
    return r == 1;
}

static void must_refuse(int (*attach)(struct cox_error *err), const char *what)
{
    int fds = fd_count();
    /* "" for where open and fstat say it differently */
    assert_refused(attach(test_err()), COX_DENIED, what);
    assert_int_equal(fd_count(), fds);
}

static bool can_open(const char *path, int flags)
{
    int fd = open(path, flags | O_CLOEXEC);
    if (fd >= 0)
        close(fd);
    return fd >= 0;
}

void refuses_impostors(const char *path, int flags, void (*make)(void),
                       int (*attach)(struct cox_error *err))
{
    static const struct {
        mode_t mode;
        const char *text;
    } modes[] = {
        {0644, "mode 0644"}, {0660, "mode 0660"},  {0602, "mode 0602"},
        {0700, "mode 0700"}, {01600, "mode 1600"}, {04600, "mode 4600"},
    };
    char other[600];
    snprintf(other, sizeof other, "%s_other", path);

    make();
    for (size_t i = 0; i < sizeof modes / sizeof modes[0]; i++) {
        assert_int_equal(chmod(path, modes[i].mode), 0);
        must_refuse(attach, modes[i].text);
    }
    /* Root may open both, the owner the second one and only for reading. */
    for (mode_t mode = 0; mode <= 0400; mode += 0400) {
        assert_int_equal(chmod(path, mode), 0);
        must_refuse(attach, can_open(path, flags) ? "expected 0600" : "ermission denied");
    }
    assert_int_equal(chmod(path, 0600), 0);

    assert_int_equal(link(path, other), 0);
    must_refuse(attach, "2 links");
    assert_int_equal(unlink(other), 0);

    assert_int_equal(rename(path, other), 0);
    assert_int_equal(symlink(other, path), 0);
    must_refuse(attach, "symbolic link");
    assert_int_equal(unlink(path), 0);
    assert_int_equal(rename(other, path), 0);

    if (test_can_switch_user()) {
        assert_int_equal(chown(path, 65534, (gid_t)-1), 0);
        must_refuse(attach, "belongs to user 65534, expected 0");
        assert_int_equal(chown(path, 0, (gid_t)-1), 0);
    }
    struct cox_error err = {0};
    assert_int_equal(attach(&err), 0); /* after all that it is good again */
    assert_int_equal(unlink(path), 0);

    assert_int_equal(mkfifo(path, 0600), 0);
    must_refuse(attach, "not a regular file");
    assert_int_equal(unlink(path), 0);

    assert_int_equal(mkdir(path, 0600), 0);
    must_refuse(attach, "");
    assert_int_equal(rmdir(path), 0);

    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    assert_true((size_t)snprintf(address.sun_path, sizeof address.sun_path, "%s", path) <
                sizeof address.sun_path);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(chmod(path, 0600), 0);
    must_refuse(attach, "No such device");
    assert_int_equal(unlink(path), 0);
    close(fd);
}

uint64_t random_next(uint64_t *state)
{
    uint64_t x = *state;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return *state = x;
}
