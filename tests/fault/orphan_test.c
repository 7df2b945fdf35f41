/* The coordinator is killed, and everything it had started ends: whatever a worker is doing,
 * stopped or not, inside a wrapper or not, attached or not yet. This program is the coordinator,
 * too, in another process; as the subreaper of all that it started, the test sees every one of them
 * end. */
#include "channel/attach/named/names.h"
#include "channel/base/peer.h"
#include "channel/shm/control.h"
#include "testing.h"

#define DESCENDANTS_MAX 256
#define WORKER COX_TEST_BIN_DIR "/scripted_worker"

extern char **environ;

/* ---- what starts a worker ---- */

enum wrapper {
    DIRECT,
    EXECS,
    STAYS,
    TIMEOUT,
    SESSION,
    NUMACTL,
    VALGRIND,
    NESTED,
    RETURNS,
    WRAPPER_COUNT
};

static const struct {
    const char *name;
    const char *const command[8];
    /* of one rank */
    uint32_t process_count;
} wrappers[WRAPPER_COUNT] = {
    [DIRECT] = {"no wrapper", {WORKER}, 1},
    [EXECS] = {"sh -c exec", {"sh", "-c", "exec " WORKER " \"$@\"", "sh"}, 1},
    [STAYS] = {"sh -c", {"sh", "-c", WORKER " \"$@\"; true", "sh"}, 2},
    [TIMEOUT] = {"timeout", {"timeout", "1000", WORKER}, 2},
    [SESSION] = {"setsid --fork", {"setsid", "--fork", "--wait", WORKER}, 2},
    [NUMACTL] = {"numactl", {"numactl", "--localalloc", WORKER}, 1},
    [VALGRIND] = {"valgrind", {"valgrind", "-q", "--tool=none", WORKER}, 1},
    [NESTED] = {"sh -c in sh -c",
                {"sh", "-c", "sh -c '" WORKER " \"$@\"; echo $? >$STATUS_PIPE' sh \"$@\"; true",
                 "sh"},
                3},
    [RETURNS] = {"sh -c in sh -c, COX_ORPHAN_RETURN",
                 {"sh", "-c",
                  "sh -c '" WORKER " returns \"$@\"; echo $? >$STATUS_PIPE' sh \"$@\"; true", "sh"},
                 3},
};

/* It is here, and may do here what it does: in a container numactl may not. */
static bool usable(enum wrapper wrapper)
{
#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
    if (wrapper == VALGRIND)
        return false; /* two of a trade */
#endif
    if (wrapper == NUMACTL)
        return system("numactl --localalloc true 2>/dev/null") == 0;
    return wrapper != VALGRIND || system("valgrind --version >/dev/null 2>&1") == 0;
}

/* ---- the coordinator ---- */

/* What the workers do when it is killed. */
static const char *const states[] = {"idle", "blocked", "spinning", "reporting", "init", "stopped"};

static void call_every_rank(struct test_group *g, const char *text, const char *line)
{
    const struct test_how how = {.gather = COX_GATHER_ALL, .timeout_ms = 100 * TEST_PATIENCE_MS};
    assert_int_equal(test_submit(g, &how, "%s", text), 0);
    for (uint32_t rank = 0; rank < cox_executor_rank_count(test_group_executor(g)); rank++)
        test_await_lines(g, (int)rank, line, 1);
}

static void *init_main(void *context)
{
    char **arguments = context;
    struct cox_executor *executor = test_group_executor((struct test_group *)(void *)arguments[0]);
    const struct cox_config_entry config = {"block", arguments[1]};
    struct cox_init_summary summary;
    cox_executor_init(executor, &config, 1, COX_DEADLINE_NEVER, &summary, NULL);
    return NULL;
}

static void stop_every_rank(struct test_group *g)
{
    OWN_COMPLETION c = {0};
    assert_int_equal(test_call(g, &c, "pid"), 0);
    for (uint32_t rank = 0; rank < c.rank_count; rank++)
        test_stop_process(atoi(c.ranks[rank].bytes));
}

static void bring_about(struct test_group *g, const char *state, char *path)
{
    uint32_t rank_count = cox_executor_rank_count(test_group_executor(g));
    char text[128];
    if (strcmp(state, "blocked") == 0) {
        snprintf(text, sizeof text, "block %s", path);
        call_every_rank(g, text, "blocked");
    } else if (strcmp(state, "spinning") == 0) {
        call_every_rank(g, "spin", "spin");
    } else if (strcmp(state, "reporting") == 0) { /* all want the one slot for their faults */
        call_every_rank(g, "faults 100000000 x", "reports");
    } else if (strcmp(state, "init") == 0) {
        pthread_t thread;
        static char *arguments[2];
        arguments[0] = (char *)g;
        arguments[1] = path;
        assert_int_equal(pthread_create(&thread, NULL, init_main, arguments), 0);
        for (uint32_t rank = 0; rank < rank_count; rank++)
            test_await_lines(g, (int)rank, "blocked", 1);
    } else if (strcmp(state, "stopped") == 0) {
        stop_every_rank(g);
    } else if (strcmp(state, "serving") == 0) {
        assert_int_equal(test_submit(g, &test_all, "echo x"), 0);
    }
}

/* argument: wrapper, number of ranks, whether workers attach at all, name, path of a pipe. Tells
 * that the state is reached, and waits to be killed. */
static int coordinator_main(const char *state, const char *argument)
{
    int wrapper, attaches;
    uint32_t rank_count;
    char name[64], path[64];
    /* In a session of its own the kernel sends no SIGHUP to stopped processes when the wrapper
     * dies. */
    if (setsid() < 0 || sscanf(argument, "%d %" SCNu32 " %d %63s %63s", &wrapper, &rank_count,
                               &attaches, name, path) != 5)
        return 1;
    const char *command[10] = {NULL};
    int count = 0;
    for (; wrappers[wrapper].command[count]; count++)
        command[count] = wrappers[wrapper].command[count];
    if (!attaches)
        command[count] = "never";
    struct test_group *g = NULL;
    if (test_group_try(
            START_WITH(.rank_count = rank_count, .name = name, .workers.command = command), &g,
            test_err())) {
        fprintf(stderr, "%s: %s\n", wrappers[wrapper].name, test_error.text);
        return 2;
    }
    bring_about(g, state, path);
    if (write(1, "r", 1) != 1)
        return 3;
    for (;;)
        pause();
}

/* ---- processes that are there, and those that are gone ---- */

static size_t descendants(pid_t pid, pid_t *pids, size_t count)
{
    char path[320];
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *dir = opendir(path);
    for (struct dirent *entry; dir && (entry = readdir(dir)) != NULL;) {
        snprintf(path, sizeof path, "/proc/%d/task/%s/children", pid, entry->d_name);
        FILE *file = entry->d_name[0] == '.' ? NULL : fopen(path, "re");
        for (int child; file && count < DESCENDANTS_MAX && fscanf(file, "%d", &child) == 1;) {
            pids[count++] = child;
            count = descendants(child, pids, count);
        }
        if (file)
            fclose(file);
    }
    if (dir)
        closedir(dir);
    return count;
}

/* Every child has ended, also adopted ones. */
static bool all_gone(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    uint64_t deadline_ns = cox_deadline_after_ms(TEST_PATIENCE_MS);
    for (;;) {
        siginfo_t info = {0};
        if (waitid(P_ALL, 0, &info, WEXITED | WNOHANG | __WALL) < 0)
            return errno == ECHILD;
        if (info.si_pid)
            continue;
        uint64_t now = cox_now_ns();
        if (now >= deadline_ns)
            return false;
        const struct timespec left = {(time_t)((deadline_ns - now) / COX_NSEC_PER_SEC),
                                      (long)((deadline_ns - now) % COX_NSEC_PER_SEC)};
        sigtimedwait(&set, &info, &left);
    }
}

/* Prints remaining processes, and ends them before the next test. */
static void end_remaining(void)
{
    pid_t pids[DESCENDANTS_MAX];
    size_t count = descendants(getpid(), pids, 0);
    for (size_t i = 0; i < count; i++) {
        char path[64], text[256] = "";
        snprintf(path, sizeof path, "/proc/%d/stat", pids[i]);
        FILE *file = fopen(path, "re");
        if (file) {
            print_error("left: %.60s\n", fgets(text, sizeof text, file) ? text : "?");
            fclose(file);
        }
        kill(pids[i], SIGKILL);
    }
    all_gone();
}

/* Waits until so many descendants are there, or, stopped: are stopped by a signal. */
static void await_descendants(pid_t pid, size_t wanted, bool stopped)
{
    pid_t pids[DESCENDANTS_MAX];
    uint64_t deadline_ns = cox_deadline_after_ms(TEST_PATIENCE_MS);
    size_t seen;
    do {
        size_t count = descendants(pid, pids, 0);
        seen = stopped ? 0 : count;
        for (size_t i = 0; stopped && i < count; i++)
            seen += cox_peer_stopped(pids[i]);
        sched_yield();
    } while (seen < wanted && cox_now_ns() < deadline_ns);
    if (seen < wanted) {
        kill(pid, SIGKILL);
        end_remaining();
        fail_msg("%zu processes%s, expected %zu", seen, stopped ? " are stopped" : "", wanted);
    }
}

struct group_case {
    enum wrapper wrapper;
    const char *state;
    uint32_t rank_count;
    /* workers sit before cox_worker_new */
    bool never;
    /* where one worker stops itself */
    const char *fault;
};

static void kill_coordinator(const struct group_case *c)
{
    char name[64], argument[256];
    struct test_pipe *pipe = test_pipe_new();
    snprintf(argument, sizeof argument, "%d %" PRIu32 " %d %s %s", (int)c->wrapper, c->rank_count,
             !c->never, test_unique_name(name), test_pipe_path(pipe));
    if (c->fault)
        setenv("COXSWAIN_FAULT", c->fault, 1);
    struct test_helper helper = test_helper_start(c->state, argument);
    unsetenv("COXSWAIN_FAULT");
    char ready = 0;
    if (c->never || c->fault)
        await_descendants(helper.pid,
                          c->fault ? 1 : c->rank_count * wrappers[c->wrapper].process_count,
                          c->fault != NULL);
    else if (read(helper.out, &ready, 1) != 1)
        fail_msg("%s, %s: the coordinator did not get there", wrappers[c->wrapper].name, c->state);
    else
        await_descendants(helper.pid, c->rank_count * wrappers[c->wrapper].process_count, false);

    assert_int_equal(kill(helper.pid, SIGKILL), 0);
    close(helper.in);
    close(helper.out);
    if (!all_gone()) {
        print_error("%s, %" PRIu32 " ranks, %s %s:\n", wrappers[c->wrapper].name, c->rank_count,
                    c->state, c->fault ? c->fault : "");
        end_remaining();
        fail_msg("processes outlive their coordinator");
    }
    /* What it leaves in /dev/shm, a sweep removes; the next start does the same. */
    uint32_t swept = 0;
    assert_ok(cox_control_sweep(name, &swept, test_err()));
    assert_int_equal(test_count_names(name), 0);
    test_sweep_sockets(1);
    if (ready || test_attach() == COX_ATTACH_SEALED)
        assert_int_equal(swept, 0);
    else if (c->never || strstr(c->fault, "attach."))
        assert_true(swept > 0);
}

/* ---- tests ---- */

TEST(p2_whatever_workers_do_they_end_with_the_coordinator)
{
    for (uint32_t n = 1; n <= 8; n *= 2)
        for (size_t s = 0; s < sizeof states / sizeof *states; s++) {
            kill_coordinator(&(const struct group_case){DIRECT, states[s], n, false, NULL});
        }
}

TEST(p2_so_do_workers_inside_a_wrapper)
{
    for (int w = EXECS; w < RETURNS; w++) {
        if (!usable((enum wrapper)w)) {
            print_message("%s is not here\n", wrappers[w].command[0]);
            continue;
        }
        for (size_t s = 0; s < sizeof states / sizeof *states; s++) {
            /* Of two wrappers only the outer one is killed with the coordinator: see worker.h. */
            if (w == NESTED && strcmp(states[s], "stopped") == 0)
                continue;
            kill_coordinator(
                &(const struct group_case){(enum wrapper)w, states[s], 2, false, NULL});
        }
    }
}

TEST(p2_p7_before_they_attached)
{
    for (uint32_t n = 1; n <= 8; n *= 2) {
        kill_coordinator(&(const struct group_case){DIRECT, "idle", n, true, NULL});
    }
}

TEST(p2_p7_stopped_at_any_point)
{
#if !COX_TESTING
    skip();
#endif
    static const char *const points[] = {
        "attach.channel:stop:0:1", "attach.channel:stop:1:4", "attach.identity:stop:1",
        "attached:stop:0",         "rank.taken:stop:1",       "execute:stop:0",
        "rank.done:stop:1",        "rank.returned:stop:0",
    };
    for (size_t p = 0; p < sizeof points / sizeof *points; p++)
        for (int w = DIRECT; w <= STAYS; w += STAYS - DIRECT) {
            kill_coordinator(
                &(const struct group_case){(enum wrapper)w, "serving", 2, false, points[p]});
        }
}

/* Two workers in two wrappers each; the inner one stays, and tells how its worker ended. */
static void expect_status(enum wrapper wrapper, const char *state, const char *expected)
{
    struct test_pipe *pipe = test_pipe_new();
    char seen[64] = "";
    int fd = open(test_pipe_path(pipe), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    setenv("STATUS_PIPE", test_pipe_path(pipe), 1);
    kill_coordinator(&(const struct group_case){wrapper, state, 2, false, NULL});
    unsetenv("STATUS_PIPE");
    assert_true(read(fd, seen, sizeof seen - 1) > 0);
    close(fd);
    assert_string_equal(seen, expected);
}

TEST(p2_b40_run_ends_the_process_only_when_asked_to)
{
    expect_status(NESTED, "idle", "70\n70\n");
    expect_status(NESTED, "blocked", "70\n70\n");
    expect_status(NESTED, "spinning", "70\n70\n");
    expect_status(RETURNS, "idle", "1\n1\n");
}

/* ---- a wrapper with threads ---- */

static char **wrapper_argv;
static pid_t wrapped;

/* Starts the worker, and ends when `leave` is set. */
static void *wrapper_thread(void *context)
{
    (void)context;
    char byte;
    posix_spawn(&wrapped, WORKER, NULL, NULL, wrapper_argv + 2, environ);
    int fd = open(wrapper_argv[2], O_RDONLY | O_CLOEXEC);
    if (fd < 0 || read(fd, &byte, 1) != 1)
        _exit(1);
    close(fd);
    return NULL;
}

/* threads PATH, and then the worker's flags: its own name is PATH. */
static int wrapper_main(char **argv)
{
    pthread_t thread;
    int status;
    wrapper_argv = argv;
    if (pthread_create(&thread, NULL, wrapper_thread, NULL) || pthread_join(thread, NULL))
        return 1;
    return waitpid(wrapped, &status, 0) == wrapped ? 0 : 1;
}

static size_t count_threads(pid_t pid)
{
    uint64_t count = 0;
    assert_int_equal(cox_peer_thread_count(pid, &count), 0);
    return (size_t)count;
}

TEST(p2_the_end_of_a_wrappers_thread_ends_no_rank)
{
    struct test_pipe *pipe = test_pipe_new();
    const char *const command[] = {"/proc/self/exe", "threads", test_pipe_path(pipe), NULL};
    char program[4096] = "";
    assert_true(readlink(command[0], program, sizeof program - 1) > 0);
    const char *const real[] = {program, command[1], command[2], NULL};
    OWN_GROUP *g = test_group_start(2, START_WITH(.workers.command = real));
    test_expect_echo(g, "one thread more");
    size_t before[2];
    pid_t pids[2];
    for (uint32_t rank = 0; rank < 2; rank++) {
        pids[rank] = cox_executor_pid(test_group_executor(g), rank);
        before[rank] = count_threads(pids[rank]);
    }
    test_pipe_release(pipe, 2);
    for (uint32_t rank = 0; rank < 2; rank++) {
        AWAIT(count_threads(pids[rank]) != before[rank]);
        assert_true(count_threads(pids[rank]) < before[rank]);
    }
    for (int i = 0; i < 10; i++)
        test_expect_echo(g, "one thread less");
}

/* ---- a start that fails ---- */

/* Rank 0 never comes. The process that rank 1 has in its two wrappers was not adopted when the
 * start failed, and still ends, although the host lives on. */
TEST(p2_a_process_that_attached_to_a_failed_start_ends)
{
    const char *const command[] = {"sh", "-c",
                                   "[ $COXSWAIN_RANK = 0 ] && exec sleep 1000; sh -c '" WORKER
                                   " \"$@\"; true' sh \"$@\"; true",
                                   "sh", NULL};
    struct test_group *g = NULL;
    assert_int_equal(test_group_try(START_WITH(.rank_count = 2, .workers.command = command,
                                               .times.start_timeout_ms = 500),
                                    &g, NULL),
                     COX_TIMEOUT);
    if (!all_gone()) {
        end_remaining();
        fail_msg("processes outlive a start that failed");
    }
}

/* argument: the name. Tells how the start fails. */
static int refused_main(const char *name)
{
    struct test_group *g = NULL;
    int r = test_group_try(
        START_WITH(.rank_count = 1, .name = name, .workers.command = wrappers[NESTED].command), &g,
        test_err());
    return dprintf(1, "%d %s", r, test_error.text) > 0 ? 0 : 1;
}

static void await_attached(const char *name)
{
    struct cox_control control = COX_CONTROL_NONE;
    assert_int_equal(cox_control_attach(&control, name, NULL), 0);
    uint64_t deadline_ns = cox_deadline_after_ms(TEST_PATIENCE_MS);
    uint32_t state;
    do {
        sched_yield();
        state = atomic_load(&control.layout->ranks[0].identity.state);
    } while (state != COX_IDENTITY_ATTACHED && cox_now_ns() < deadline_ns);
    cox_control_close(&control);
    assert_int_equal(state, COX_IDENTITY_ATTACHED);
}

/* The coordinator, which slept, sees at once that the worker has attached and belongs to no rank
 * any more. */
TEST(p1_p2_the_death_of_a_wrapper_at_attach_is_reported)
{
#if !COX_TESTING
    skip();
#endif
    test_needs_names(); /* by which it is seen to attach */
    char name[64], text[1024] = "", expected[64];
    pid_t pids[DESCENDANTS_MAX];
    setenv("COXSWAIN_FAULT", "attach.identity:stop:0", 1);
    struct test_helper helper = test_helper_start("refused", test_unique_name(name));
    unsetenv("COXSWAIN_FAULT");
    await_descendants(helper.pid, 1, true);
    test_stop_process(helper.pid);
    assert_int_equal(descendants(helper.pid, pids, 0), 3); /* two wrappers, and the worker */
    struct cox_peer wrapper = COX_PEER_NONE;
    assert_int_equal(cox_peer_open(pids[0], 0, &wrapper), 0);
    assert_int_equal(kill(pids[0], SIGKILL), 0);
    struct pollfd end = {.fd = wrapper.pidfd, .events = POLLIN};
    assert_int_equal(poll(&end, 1, TEST_PATIENCE_MS), 1);
    cox_peer_close(&wrapper);
    assert_int_equal(kill(pids[2], SIGCONT), 0);
    await_attached(name);
    assert_int_equal(kill(helper.pid, SIGCONT), 0);
    assert_true(read(helper.out, text, sizeof text - 1) > 0);
    snprintf(expected, sizeof expected, "%d rank 0 (pid %d) was killed by signal 9", COX_PEER_DEAD,
             pids[0]);
    if (strncmp(text, expected, strlen(expected)) != 0)
        fail_msg("'%s' expected, not: %s", expected, text);
    assert_int_equal(test_helper_wait(&helper), 0);
    assert_true(all_gone());
}

/* ---- hosts with a mind of their own about children ---- */

static _Atomic bool reaping;

static void *reaper_main(void *context)
{
    (void)context;
    while (reaping)
        if (waitpid(-1, NULL, WNOHANG) <= 0)
            sched_yield();
    return NULL;
}

/* Killed with a request in its hand; the host ignores SIGCHLD, or takes the ends of all children.
 */
static void die_unseen(void)
{
    OWN_GROUP *g = test_group_start(4, NULL);
    struct test_pipe *pipe = test_pipe_new();
    const struct test_how how = {.gather = COX_GATHER_ALL, .timeout_ms = 10 * TEST_PATIENCE_MS};
    pid_t pid = cox_executor_pid(test_group_executor(g), 2);
    assert_int_equal(test_submit(g, &how, "only 2 block %s", test_pipe_path(pipe)), 0);
    test_await_lines(g, 2, "blocked", 1);
    assert_int_equal(kill(pid, SIGKILL), 0);
    const struct test_completion *c = test_await(g, 0);
    assert_int_equal(c->status, COX_PEER_DEAD);
    assert_int_equal(c->ranks[2].outcome, COX_OUTCOME_DEAD);
    assert_int_equal(c->ranks[2].pid, pid);
    char named[64];
    snprintf(named, sizeof named, "rank 2 (pid %d)", pid);
    assert_contains(c->text, named);
    test_await_death(g, 2);
    assert_int_equal(test_call(g, NULL, "echo x"), COX_PEER_DEAD);
    cox_executor_stop(test_group_executor(g));
}

TEST(p2_a_death_is_reported_although_the_host_ignores_sigchld)
{
    signal(SIGCHLD, SIG_IGN);
    die_unseen();
    signal(SIGCHLD, SIG_DFL);
}

TEST(p2_a_death_is_reported_although_the_host_reaps)
{
    pthread_t thread;
    reaping = true;
    assert_int_equal(pthread_create(&thread, NULL, reaper_main, NULL), 0);
    for (int i = 0; i < 5; i++)
        die_unseen();
    reaping = false;
    pthread_join(thread, NULL);
}

/* Orphans become ours, and SIGCHLD is waited for. */
static int become_reaper(void **state)
{
    (void)state;
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigprocmask(SIG_BLOCK, &set, NULL);
    return prctl(PR_SET_CHILD_SUBREAPER, 1);
}

int main(int argc, char **argv)
{
    if (argc > 2 && strcmp(argv[1], "threads") == 0)
        return wrapper_main(argv);
    if (argc == 3 && strcmp(argv[1], "refused") == 0)
        return refused_main(argv[2]);
    if (argc == 3)
        return coordinator_main(argv[1], argv[2]);
    return test_run(become_reaper, NULL);
}
