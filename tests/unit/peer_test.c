#include "channel/base/peer.h"
#include "tests/lib/rights.h"
#include "channel_fixture.h"

#include <sys/file.h>
#include <sys/ptrace.h>

/* The kernel's largest limit of pids. A pid that was reaped may be another process's at once. */
#define PID_NEVER_USED (1 << 22)

static void sleep_for_ever(void *context)
{
    if (context)
        CHECK(prctl(PR_SET_NAME, context) == 0);
    raise(SIGSTOP);
    for (;;)
        pause();
}

/* A child that has done its prctl and sleeps. */
static pid_t sleeper(const char *name)
{
    char copy[16] = "";
    int status;
    if (name)
        snprintf(copy, sizeof copy, "%s", name);
    pid_t pid = child_start(sleep_for_ever, name ? copy : NULL);
    assert_int_equal(waitpid(pid, &status, WUNTRACED), pid);
    assert_true(WIFSTOPPED(status));
    return pid;
}

static void kill_without_reaping(pid_t pid)
{
    siginfo_t info;
    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(waitid(P_PID, (id_t)pid, &info, WEXITED | WNOWAIT), 0);
}

LEAK_TEST(oneself_is_alive)
{
    struct cox_peer peer = COX_PEER_NONE;
    uint64_t start = 0;
    assert_int_equal(cox_peer_start_time(getpid(), &start), 0);
    assert_int_equal(cox_peer_open(getpid(), 0, &peer), 0);
    assert_int_equal(peer.pid, getpid());
    assert_true(peer.start == start && start > 0);
    assert_true(cox_peer_alive(&peer));
    assert_int_equal(fcntl(peer.pidfd, F_GETFD), FD_CLOEXEC);
    cox_peer_close(&peer);
    assert_int_equal(peer.pidfd, -1);
    cox_peer_close(&peer);
    assert_int_equal(cox_peer_open(getpid(), start, &peer), 0);
    cox_peer_close(&peer);
}

static void *wait_for_ever(void *context)
{
    pause();
    return context;
}

LEAK_TEST(threads_are_counted)
{
    uint64_t before = 0, after = 0;
    assert_int_equal(cox_peer_thread_count(getpid(), &before), 0);
    assert_int_equal(before, 1);
    pthread_t thread = test_thread(wait_for_ever, NULL);
    assert_int_equal(cox_peer_thread_count(getpid(), &after), 0);
    assert_true(after > before);
    pthread_cancel(thread);
    pthread_join(thread, NULL);
    pid_t pid = sleeper(NULL);
    assert_int_equal(cox_peer_thread_count(pid, &after), 0);
#if defined(__SANITIZE_THREAD__)
    assert_int_equal(after, 2); /* ThreadSanitizer starts a thread of its own in a forked child */
#else
    assert_int_equal(after, 1);
#endif
    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    assert_int_equal(cox_peer_thread_count(pid, &after), COX_PEER_DEAD);
}

LEAK_TEST(the_start_time_is_when_it_started)
{
    struct timespec before, after;
    uint64_t start = 0, ticks = (uint64_t)sysconf(_SC_CLK_TCK);
    clock_gettime(CLOCK_BOOTTIME, &before);
    pid_t pid = sleeper(NULL);
    clock_gettime(CLOCK_BOOTTIME, &after);
    assert_int_equal(cox_peer_start_time(pid, &start), 0);
    uint64_t early =
        (uint64_t)before.tv_sec * ticks + (uint64_t)before.tv_nsec * ticks / 1000000000;
    uint64_t late = (uint64_t)after.tv_sec * ticks + (uint64_t)after.tv_nsec * ticks / 1000000000;
    assert_true(start >= early && start <= late);
    child_kill(pid);
}

LEAK_TEST(a_child_lives_until_it_is_killed)
{
    struct cox_peer peer = COX_PEER_NONE, again = COX_PEER_NONE;
    uint64_t start = 0;
    pid_t pid = sleeper(NULL);
    assert_int_equal(cox_peer_open(pid, 0, &peer), 0);
    assert_int_equal(cox_peer_open(pid, peer.start, &again), 0); /* stopped is alive */
    cox_peer_close(&again);
    for (int i = 0; i < 100; i++)
        assert_true(cox_peer_alive(&peer));
    kill_without_reaping(pid);
    /* A zombie has its pid and its start time still, and is dead. */
    assert_false(cox_peer_alive(&peer));
    assert_int_equal(cox_peer_start_time(pid, &start), 0);
    assert_true(start == peer.start);
    assert_int_equal(cox_peer_open(pid, 0, &again), COX_PEER_DEAD);
    assert_int_equal(cox_peer_open(pid, start, &again), COX_PEER_DEAD);
    assert_int_equal(again.pidfd, -1);
    child_status(pid);
    assert_false(cox_peer_alive(&peer));
    assert_int_equal(cox_peer_start_time(pid, &start), COX_PEER_DEAD);
    assert_int_equal(cox_peer_open(pid, 0, &again), COX_PEER_DEAD);
    cox_peer_close(&peer);
}

/* From the kill on, whether or not it ran since, and no moment before. */
LEAK_TEST(a23_a_killed_process_is_exiting)
{
    for (int i = 0; i < 50; i++) {
        pid_t pid = sleeper(NULL);
        assert_false(cox_peer_exiting(pid));
        assert_int_equal(kill(pid, SIGTERM), 0); /* stopped: it stays where it is */
        assert_false(cox_peer_exiting(pid));
        assert_int_equal(kill(pid, SIGKILL), 0);
        for (int k = 0; k < 20; k++)
            assert_true(cox_peer_exiting(pid));
        child_status(pid);
    }
    assert_true(cox_peer_exiting(PID_NEVER_USED));
}

LEAK_TEST(b25_another_start_time_is_another_process)
{
    struct cox_peer peer = COX_PEER_NONE;
    uint64_t start = 0;
    pid_t pid = sleeper(NULL);
    assert_int_equal(cox_peer_start_time(pid, &start), 0);
    assert_int_equal(cox_peer_open(pid, start - 1, &peer), COX_PEER_DEAD);
    assert_int_equal(cox_peer_open(pid, start + 1, &peer), COX_PEER_DEAD);
    assert_int_equal(cox_peer_open(pid, UINT64_MAX, &peer), COX_PEER_DEAD);
    assert_int_equal(peer.pid, 0);
    assert_int_equal(peer.pidfd, -1);
    assert_int_equal(cox_peer_open(pid, start, &peer), 0);
    cox_peer_close(&peer);
    child_kill(pid);
}

static void end_stopped(void *context)
{
    (void)context;
    raise(SIGSTOP);
}

/* The pid of a dead process is given to the next one; the pidfd stays with the dead. */
LEAK_TEST(b25_a_reused_pid_is_not_the_old_process)
{
    struct cox_peer old = COX_PEER_NONE, fresh = COX_PEER_NONE;
    char number[32];
    int status;
    pid_t pid = child_start(end_stopped, NULL);
    assert_int_equal(waitpid(pid, &status, WUNTRACED), pid);
    assert_int_equal(cox_peer_open(pid, 0, &old), 0);
    /* Start times count in ticks: the next process must not start in the same one. */
    uint64_t start = 0, own = 0;
    while (start <= old.start) {
        pid_t other = child_start(end_stopped, NULL);
        assert_int_equal(waitpid(other, &status, WUNTRACED), other);
        assert_int_equal(cox_peer_start_time(other, &start), 0);
        child_kill(other);
    }
    child_kill(pid);
    int fd = open("/proc/sys/kernel/ns_last_pid", O_WRONLY | O_CLOEXEC);
    int length = snprintf(number, sizeof number, "%d", (int)pid - 1);
    bool asked = fd >= 0 && write(fd, number, (size_t)length) == length;
    cox_close_fd(&fd);
    pid_t again = sleeper(NULL);
    if (!asked || again != pid) { /* not permitted, or another process was faster */
        child_kill(again);
        cox_peer_close(&old);
        skip();
    }
    assert_false(cox_peer_alive(&old));
    assert_int_equal(cox_peer_open(pid, old.start, &fresh), COX_PEER_DEAD);
    assert_int_equal(cox_peer_open(pid, 0, &fresh), 0);
    assert_int_equal(cox_peer_start_time(pid, &own), 0);
    assert_true(fresh.start == own && own > old.start);
    assert_true(cox_peer_alive(&fresh));
    cox_peer_close(&fresh);
    cox_peer_close(&old);
    child_kill(again);
}

struct hidden {
    pid_t living, zombie;
};

static void look_at_hidden(void *context)
{
    const struct hidden *pids = context;
    struct cox_peer peer = COX_PEER_NONE;
    uint64_t start = 5;
    if (!proc_hide())
        _exit(77);
    CHECK(setgroups(0, NULL) == 0 && setresgid(65534, 65534, 65534) == 0 &&
          setresuid(65534, 65534, 65534) == 0);
    CHECK(access("/proc/1", F_OK) < 0);
    CHECK(cox_peer_start_time(pids->living, &start) == -EACCES && start == 5);
    CHECK(cox_peer_open(pids->living, 0, &peer) == -EACCES && peer.pidfd == -1);
    CHECK(!cox_peer_exiting(pids->living));
    CHECK(cox_peer_open(pids->zombie, 0, &peer) == COX_PEER_DEAD);
    CHECK(cox_peer_open(PID_NEVER_USED, 0, &peer) == COX_PEER_DEAD);
    CHECK(cox_peer_start_time(PID_NEVER_USED, &start) == COX_PEER_DEAD);
    CHECK(cox_peer_start_time(getpid(), &start) == 0);
}

/* hidepid: only what dead processes left is swept, and a hidden process is not dead. */
LEAK_TEST(b25_a_process_hidden_in_proc_is_not_dead)
{
    if (!test_can_switch_user())
        skip();
    struct hidden pids = {sleeper(NULL), sleeper(NULL)};
    kill_without_reaping(pids.zombie);
    int status = child_status(child_start(look_at_hidden, &pids));
    child_kill(pids.living);
    child_status(pids.zombie);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
        skip();
    assert_int_equal(status, 0);
}

LEAK_TEST(any_program_name_is_read_past)
{
    static const char *const names[] = {
        ") ", "a) R 1 1 1 1 1 ", ")) ) (", "x ) 7 7 7 7 7 7", "((((", ") ) ) ) ) ) ) )", "",
        " ",  "a\nb) S 1",
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        struct timespec now;
        uint64_t start = 0, own = 0;
        clock_gettime(CLOCK_BOOTTIME, &now);
        assert_int_equal(cox_peer_start_time(getpid(), &own), 0);
        pid_t pid = sleeper(names[i]);
        assert_int_equal(cox_peer_start_time(pid, &start), 0);
        uint64_t ticks = (uint64_t)sysconf(_SC_CLK_TCK);
        assert_true(start >= own && start + 1 >= (uint64_t)now.tv_sec * ticks);
        assert_true(start <= ((uint64_t)now.tv_sec + 60) * ticks);
        assert_true(cox_peer_stopped(pid));
        child_kill(pid);
    }
}

LEAK_TEST(unused_pids_are_refused)
{
    static const pid_t none[] = {INT32_MAX, 0, -1, INT32_MIN};
    for (size_t i = 0; i < sizeof none / sizeof none[0]; i++) {
        struct cox_peer peer = COX_PEER_NONE;
        uint64_t start = 5;
        assert_int_equal(cox_peer_start_time(none[i], &start), COX_PEER_DEAD);
        assert_int_not_equal(cox_peer_open(none[i], 0, &peer), 0);
        assert_true(start == 5 && peer.pidfd == -1);
    }
}

LEAK_TEST(stopped_is_distinguished_from_running_and_dead)
{
    pid_t pid = sleeper(NULL);
    assert_true(cox_peer_stopped(pid));
    assert_false(cox_peer_stopped(getpid()));
    kill_without_reaping(pid);
    assert_false(cox_peer_stopped(pid));
    child_status(pid);
    assert_false(cox_peer_stopped(pid));
}

/* Stops the process as a debugger does, and lets it go, often. Each time the process wants the
 * processor of this one, which does not give it away at once. */
static void trace_often(void *context)
{
    const pid_t pid = *(const pid_t *)context;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET((size_t)sched_getcpu(), &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    CHECK(sched_setaffinity(pid, sizeof one, &one) == 0);
    CHECK(setpriority(PRIO_PROCESS, (id_t)pid, 19) == 0);
    for (int i = 0; i < 100; i++) {
        if (ptrace(PTRACE_SEIZE, pid, NULL, NULL) < 0 && errno == EPERM)
            return; /* Yama, or a container */
        CHECK(ptrace(PTRACE_INTERRUPT, pid, NULL, NULL) == 0);
        CHECK(waitpid(pid, NULL, __WALL) == pid);
        CHECK(ptrace(PTRACE_DETACH, pid, NULL, NULL) == 0);
        for (const uint64_t end_ns = cox_now_ns() + 200000; cox_now_ns() < end_ns;)
            continue;
    }
}

/* When it is let go it runs until it has stopped again. */
LEAK_TEST(a_stopped_process_is_stopped_while_another_one_traces_it)
{
    siginfo_t info;
    int status;
    uint32_t wrong = 0;
    pid_t pid = child_start(sleep_for_ever, NULL);
    assert_int_equal(waitid(P_PID, (id_t)pid, &info, WSTOPPED | WNOWAIT), 0);
    pid_t tracer = child_start(trace_often, &pid);
    while (waitpid(tracer, &status, WNOHANG) == 0)
        wrong += !cox_peer_stopped(pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert_int_equal(wrong, 0);
    kill(pid, SIGCONT);
    AWAIT(!cox_peer_stopped(pid));
    child_kill(pid);
}

struct held {
    pid_t pid;
    int ends[2];
};

/* Stops the process as a debugger does, says so, and holds it until it is killed. */
static void trace_and_hold(void *context)
{
    const struct held *held = context;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (ptrace(PTRACE_SEIZE, held->pid, NULL, NULL) < 0 && errno == EPERM)
        return; /* Yama, or a container */
    CHECK(ptrace(PTRACE_INTERRUPT, held->pid, NULL, NULL) == 0);
    CHECK(waitpid(held->pid, NULL, __WALL) == held->pid);
    CHECK(write(held->ends[1], "", 1) == 1);
    for (;;)
        pause();
}

/* As coxswain __stacks does. */
static void hold_by_a_child(void *context)
{
    const struct held *held = context;
    const pid_t child = fork();
    if (child == 0) {
        trace_and_hold(context);
        _exit(0);
    }
    close(held->ends[1]);
    CHECK(waitpid(child, NULL, 0) == child);
}

/* Its own tracer stops it for a moment, to read where it is. */
static void expect_running_while(void (*holds)(void *context))
{
    char text[COX_PEER_HOLD_SIZE], byte;
    struct held held;
    assert_int_equal(pipe2(held.ends, O_CLOEXEC), 0);
    held.pid = sleeper(NULL);
    kill(held.pid, SIGCONT);
    AWAIT(!cox_peer_stopped(held.pid));
    pid_t tracer = child_start(holds, &held);
    close(held.ends[1]);
    const ssize_t size = read(held.ends[0], &byte, 1);
    const bool stopped = cox_peer_stopped(held.pid);
    cox_peer_read_hold(held.pid, text);
    close(held.ends[0]);
    child_kill(tracer);
    child_kill(held.pid);
    if (size == 0)
        skip();
    assert_false(stopped);
    assert_string_not_equal(text, "stopped by a signal");
}

LEAK_TEST(a_process_is_not_stopped_while_a_child_of_this_one_traces_it)
{
    expect_running_while(trace_and_hold);
}

LEAK_TEST(a_process_is_not_stopped_while_a_child_of_a_child_traces_it)
{
    expect_running_while(hold_by_a_child);
}

/* Until its child executes a program or ends, a process that has called vfork waits in state D.
 * ThreadSanitizer makes a fork of vfork, so this is the system call. */
static void wait_in_the_kernel(void *context)
{
    (void)context;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const pid_t parent = getpid();
    if (syscall(SYS_clone, (unsigned long)(CLONE_VFORK | SIGCHLD), NULL, NULL, NULL, NULL) == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() == parent) /* else it was killed before the signal was asked for */
            pause();
        _exit(0);
    }
}

LEAK_TEST(what_holds_a_process_is_told)
{
    char text[COX_PEER_HOLD_SIZE] = "x";
    cox_peer_read_hold(getpid(), text);
    assert_string_equal(text, "");
    pid_t pid = sleeper(NULL);
    cox_peer_read_hold(pid, text);
    assert_string_equal(text, "stopped by a signal");
    child_kill(pid);
    cox_peer_read_hold(pid, text);
    assert_string_equal(text, "");
    pid = child_start(wait_in_the_kernel, NULL);
    do
        cox_peer_read_hold(pid, text);
    while (!text[0]);
    assert_contains(text, "in the kernel (state D");
    child_kill(pid);
}

static void hold_and_wait(void *context)
{
    tell(*(int *)context);
    pause();
}

/* A lock that this process holds is free once it lets go, whatever children it has. */
LEAK_TEST(a_child_of_fork_does_not_keep_what_shows_that_its_parent_lives)
{
    char path[] = "/tmp/cox_peer_test.XXXXXX";
    int fds[2];
    struct stat st;
    cox_unforked_hold();
    int fd = mkostemp(path, O_CLOEXEC);
    assert_int_equal(cox_unforked_release(&fd), 0);
    assert_int_equal(flock(fd, LOCK_EX | LOCK_NB), 0);
    assert_int_equal(fstat(fd, &st), 0);
    test_pipe(fds);
    pid_t pid = child_start(hold_and_wait, &fds[1]);
    assert_true(heard(fds[0]));
    assert_int_equal(cox_peer_find_holder(st.st_dev, st.st_ino), 0);
    cox_unforked_close(&fd);
    assert_int_equal(fd, -1);
    fd = test_own_fd(open(path, O_RDWR | O_CLOEXEC));
    assert_int_equal(flock(fd, LOCK_EX | LOCK_NB), 0);
    child_kill(pid);
    unlink(path);
}

LEAK_TEST(another_process_that_has_a_file_open_is_found)
{
    char path[] = "/tmp/cox_peer_test.XXXXXX";
    int fds[2];
    struct stat st;
    int fd = test_own_fd(mkostemp(path, O_CLOEXEC));
    assert_int_equal(fstat(fd, &st), 0);
    test_pipe(fds);
    pid_t pid = child_start(hold_and_wait, &fds[1]);
    assert_true(heard(fds[0]));
    assert_int_equal(cox_peer_find_holder(st.st_dev, st.st_ino), pid);
    child_kill(pid);
    assert_int_equal(cox_peer_find_holder(st.st_dev, st.st_ino), 0);
    unlink(path);
}

/* Processor time shows in the clock of the process that used it, and of no other. */
LEAK_TEST(processor_time_is_of_its_process)
{
    uint64_t own[2], others[2];
    pid_t pid = sleeper(NULL);
    kill(pid, SIGSTOP);
    AWAIT(cox_peer_stopped(pid));
    assert_int_equal(cox_peer_cpu_time(pid, &others[0]), 0);
    assert_int_equal(cox_peer_cpu_time(getpid(), &own[0]), 0);
    do
        assert_int_equal(cox_peer_cpu_time(getpid(), &own[1]), 0);
    while (own[1] < own[0] + 5 * COX_NSEC_PER_MSEC);
    assert_int_equal(cox_peer_cpu_time(pid, &others[1]), 0);
    assert_true(others[1] == others[0]);
    child_kill(pid);
    assert_int_equal(cox_peer_cpu_time(pid, &others[1]), COX_PEER_DEAD);
    assert_int_equal(cox_peer_cpu_time(0, &others[1]), COX_PEER_DEAD);
    assert_true(others[1] == others[0]);
}

LEAK_TEST(the_pidfd_becomes_readable_with_the_death)
{
    struct cox_peer peer = COX_PEER_NONE;
    pid_t pid = sleeper(NULL);
    assert_int_equal(cox_peer_open(pid, 0, &peer), 0);
    struct pollfd p = {.fd = peer.pidfd, .events = POLLIN};
    assert_int_equal(poll(&p, 1, 0), 0);
    kill(pid, SIGKILL);
    assert_int_equal(poll(&p, 1, 20000), 1);
    assert_false(cox_peer_alive(&peer));
    child_status(pid);
    cox_peer_close(&peer);
}

LEAK_TEST(descent_is_from_oneself_a_parent_or_its_parent)
{
    pid_t child = sleeper(NULL), other = sleeper(NULL);
    assert_true(cox_peer_descends(child, child));
    assert_true(cox_peer_descends(child, getpid()));
    if (getppid() > 0) /* 0: it is outside of this pid namespace */
        assert_true(cox_peer_descends(child, getppid()));
    assert_false(cox_peer_descends(child, other));
    assert_false(cox_peer_descends(getpid(), child));
    kill(child, SIGKILL);
    kill(other, SIGKILL);
    child_status(child);
    child_status(other);
    assert_false(cox_peer_descends(child, getpid()));
}
