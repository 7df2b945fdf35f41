/* supervise_death: how a rank's end is seen, and how the supervisor ends all of them. */
#include "channel/base/peer.h"
#include "supervise_fixture.h"

#include <sys/ptrace.h>

static bool pidfd_is_dead(int pidfd, int timeout_ms)
{
    struct pollfd p = {.fd = pidfd, .events = POLLIN};
    return poll(&p, 1, timeout_ms) == 1;
}

/* Of one that is not reaped. */
static bool process_is_dead(pid_t pid, int timeout_ms)
{
    _cox_cleanup_(cox_close_fd) int pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    return pidfd >= 0 && pidfd_is_dead(pidfd, timeout_ms);
}

TEST(m14_how_a_worker_ended)
{
    struct group g;
    group_start(
        &g, 4,
        "echo last words; [ $R = 0 ] && exit 3; [ $R = 1 ] && kill -KILL $$; [ $R = 2 ] && kill -SEGV $$; exec sleep 1000");
    char text[200], expected[200];
    for (uint32_t rank = 0; rank < 3; rank++) {
        static const char *const how[] = {"exited with status 3", "was killed by signal 9 (Killed)",
                                          "was killed by signal 11 (Segmentation fault)"};
        group_await_death(&g, rank);
        const struct death *death = &g.deaths[rank];
        assert_true(death->how.known);
        assert_int_equal(death->how.exit_status, rank == 0 ? 3 : 0);
        assert_int_equal(death->how.signal, rank == 0 ? 0 : rank == 1 ? 9 : 11);
        assert_memory_equal(&death->how, &death->getter, sizeof death->how);
        snprintf(expected, sizeof expected, "rank %u (pid %d) %s", rank, death->pid, how[rank]);
        assert_memory_equal(death->description, expected, strlen(expected));
        assert_string_equal(death->last_lines, "last words");
        assert_true(cox_supervisor_dead(g.supervisor, rank, NULL));
        /* A check for a coming death may run just after the death. */
        assert_true(cox_supervisor_exiting(g.supervisor, rank));
    }
    assert_false(cox_supervisor_exiting(g.supervisor, 3));
    snprintf(expected, sizeof expected, "rank 3 (pid %d) is alive",
             cox_supervisor_pid(g.supervisor, 3));
    cox_supervisor_describe(g.supervisor, 3, text, sizeof text);
    assert_string_equal(text, expected);
    assert_false(cox_supervisor_dead(g.supervisor, 3, NULL));
    assert_false(process_is_dead(cox_supervisor_pid(g.supervisor, 3), 0));
    assert_int_equal(kill(cox_supervisor_pid(g.supervisor, 3), 0), 0);
    assert_int_equal(cox_supervisor_wait(g.supervisor, cox_now_ns()), COX_TIMEOUT);
    group_free(&g);
}

TEST(m14_a_grandchild_with_the_pipe_hides_no_death)
{
    _cox_cleanup_(group_free) struct group g;
    /* One writes for ever and one nothing, so neither the end of the file nor an empty pipe can be
     * waited for. Both have left the worker's group before it ends. */
    group_start(
        &g, 2,
        "trap 'printf unfinished; exit 5' USR1; export W=$$; [ $R = 1 ] && setsid sh -c 'echo pid $$; kill -USR1 $W; exec sleep 1000' & [ $R = 0 ] && setsid sh -c 'echo pid $$; kill -USR1 $W; exec yes grandchild' & while :; do wait; done");
    const char *flooding = group_await_line(&g, 0, false, "pid ");
    const char *silent = group_await_line(&g, 1, false, "pid ");
    group_await_end(&g);
    assert_int_equal(g.deaths[0].how.exit_status, 5);
    assert_int_equal(g.deaths[1].how.exit_status, 5);
    assert_contains(g.deaths[1].last_lines, "\nunfinished");
    group_await_seen(&g, 0, 10000); /* its lines are still taken */
    assert_int_equal(kill(atoi(flooding + 4), SIGKILL), 0);
    assert_int_equal(kill(atoi(silent + 4), SIGKILL), 0);
}

/* Whatever its end was: by its own will, by a signal from outside, by stop. */
TEST(m15_what_a_worker_leaves_behind_ends_with_it)
{
    _cox_cleanup_(group_free) struct group g;
    int pidfds[3];
    group_start(
        &g, 3,
        "trap '' TERM; sh -c 'trap \"\" TERM; echo pid $$; while :; do sleep 1000; done' & [ $R = 0 ] && { trap 'exit 0' USR1; echo go; wait; }; exec sleep 1000");
    for (uint32_t rank = 0; rank < 3; rank++) {
        pid_t pid = atoi(group_await_line(&g, rank, false, "pid ") + 4);
        assert_int_equal(getpgid(pid), cox_supervisor_pid(g.supervisor, rank));
        pidfds[rank] = (int)syscall(SYS_pidfd_open, pid, 0);
        assert_true(pidfds[rank] >= 0);
    }
    group_await_line(&g, 0, false, "go");
    assert_int_equal(kill(cox_supervisor_pid(g.supervisor, 1), SIGKILL), 0);
    assert_true(pidfd_is_dead(pidfds[1], PATIENCE_MS));
    assert_int_equal(kill(cox_supervisor_pid(g.supervisor, 0), SIGUSR1), 0);
    assert_true(pidfd_is_dead(pidfds[0], PATIENCE_MS));
    assert_false(pidfd_is_dead(pidfds[2], 0));
    cox_supervisor_end(g.supervisor, 0);
    assert_true(pidfd_is_dead(pidfds[2], PATIENCE_MS));
    for (int i = 0; i < 3; i++)
        close(pidfds[i]);
}

/* A shell as wrapper around one that is adopted as the process that serves. */
struct wrapped {
    struct group group;
    struct cox_peer peer;
    /* it was gone when the death was reported */
    bool gone;
    /* the thread of the supervisor, in a line */
    bool held, hold;
    /* the last words came after that, and after the death could be seen */
    bool woken, late;
};

static void on_wrapped_wake(void *context, uint32_t rank)
{
    struct wrapped *wrapped = context;
    char text[200];
    cox_supervisor_last_lines(wrapped->group.supervisor, rank, text, sizeof text);
    wrapped->woken =
        cox_supervisor_dead(wrapped->group.supervisor, rank, NULL) && strstr(text, "last words");
}

static void on_wrapped_line(void *context, uint32_t rank, bool is_stderr, const char *text)
{
    struct wrapped *wrapped = context;
    on_line(&wrapped->group, rank, is_stderr, text);
    pthread_mutex_lock(&wrapped->group.lock);
    if (strcmp(text, "last words") == 0)
        wrapped->late = wrapped->woken && wrapped->group.death_count == 0 &&
                        cox_supervisor_dead(wrapped->group.supervisor, rank, NULL);
    wrapped->held = wrapped->hold;
    pthread_cond_broadcast(&wrapped->group.changed);
    while (wrapped->hold)
        pthread_cond_wait(&wrapped->group.changed, &wrapped->group.lock);
    pthread_mutex_unlock(&wrapped->group.lock);
}

static void on_wrapped_death(void *context, uint32_t rank, pid_t pid, const struct cox_exit *how)
{
    struct wrapped *wrapped = context;
    wrapped->gone = !cox_peer_alive(&wrapped->peer);
    on_death(&wrapped->group, rank, pid, how);
}

static void wrapped_start(struct wrapped *wrapped, const char *script)
{
    const char *const command[] = {"sh", "-c", script, NULL};
    *wrapped = (struct wrapped){.peer = COX_PEER_NONE};
    group_init(&wrapped->group);
    const struct cox_supervise_hooks hooks = {.context = wrapped,
                                              .line = on_wrapped_line,
                                              .wake = on_wrapped_wake,
                                              .death = on_wrapped_death};
    assert_ok(GROUP_TRY(&wrapped->group, test_err(), .rank_count = 1, .command = command,
                        .hooks = hooks));
    pid_t pid = atoi(group_await_line(&wrapped->group, 0, false, "pid ") + 4);
    assert_int_equal(cox_peer_open(pid, 0, &wrapped->peer), 0);
    assert_ok(cox_supervisor_adopt(wrapped->group.supervisor, 0, pid, wrapped->peer.start));
}

/* At SIGUSR1 it writes a line, in which the supervisor is held until the started process has died.
 */
static void wrapped_hold(struct wrapped *wrapped)
{
    uint64_t deadline_ns = group_deadline();
    pthread_mutex_lock(&wrapped->group.lock);
    wrapped->hold = true;
    kill(wrapped->peer.pid, SIGUSR1);
    while (!wrapped->held && group_wait_change(&wrapped->group, deadline_ns))
        ;
    pthread_mutex_unlock(&wrapped->group.lock);
}

static void wrapped_let_go(struct wrapped *wrapped)
{
    bool dead = process_is_dead(cox_supervisor_pid(wrapped->group.supervisor, 0), PATIENCE_MS);
    pthread_mutex_lock(&wrapped->group.lock);
    wrapped->hold = false;
    pthread_cond_broadcast(&wrapped->group.changed);
    pthread_mutex_unlock(&wrapped->group.lock);
    assert_true(dead);
    group_await_death(&wrapped->group, 0);
}

static void wrapped_free(struct wrapped *wrapped)
{
    group_free(&wrapped->group);
    cox_peer_close(&wrapped->peer);
}

/* Its memory may be given to the next incarnation of the rank. */
TEST(p8_a_rank_is_dead_when_no_process_serves_it)
{
    for (int k = 0; k < 20; k++) {
        _cox_cleanup_(wrapped_free) struct wrapped w;
        wrapped_start(&w, "sh -c 'echo pid $$; exec sleep 1000'; true");
        assert_int_equal(kill(cox_supervisor_pid(w.group.supervisor, 0), SIGKILL), 0);
        group_await_death(&w.group, 0);
        assert_true(w.gone);
        assert_non_null(
            strstr(w.group.deaths[0].description, "its wrapper was killed by signal 9"));
    }
}

TEST(m15_a_wrapped_worker_has_its_grace)
{
    _cox_cleanup_(wrapped_free) struct wrapped w;
    wrapped_start(
        &w,
        "sh -c 'trap \"sleep 0.2; echo cleaned; exit 0\" TERM; echo pid $$; while :; do sleep 0.01; done'; true");
    assert_int_equal(cox_supervisor_end(w.group.supervisor, PATIENCE_MS), 1);
    assert_string_equal(group_line(&w.group, 0, false, 1), "cleaned");
    assert_true(w.group.deaths[0].how.known); /* the wrapper waited for it, and ended by itself */
    assert_int_equal(w.group.deaths[0].how.signal, 0);
}

/* Both die while the supervisor looks elsewhere. */
TEST(p2_a_wrapper_reports_how_its_worker_ended)
{
    _cox_cleanup_(wrapped_free) struct wrapped w;
    wrapped_start(
        &w, "sh -c 'trap \"echo line\" USR1; echo pid $$; while :; do sleep 0.01; done'; exit $?");
    wrapped_hold(&w);
    kill(w.peer.pid, SIGKILL);
    wrapped_let_go(&w);
    char expected[200];
    snprintf(expected, sizeof expected,
             "rank 0 (pid %d, in its wrapper %d) is dead; its wrapper exited with status 137",
             w.peer.pid, w.group.deaths[0].pid);
    assert_string_equal(w.group.deaths[0].description, expected);
    assert_int_equal(w.group.deaths[0].how.exit_status, 137);
}

/* However much it wrote, and however long the host takes to read it. */
TEST(p2_a_death_is_seen_before_the_last_lines_are_reported)
{
    _cox_cleanup_(wrapped_free) struct wrapped w;
    wrapped_start(
        &w,
        "trap 'echo line' USR1; trap 'yes | head -c 50000; echo last words; exit 3' USR2; echo pid $$; while :; do sleep 0.01; done");
    wrapped_hold(&w);
    kill(w.peer.pid, SIGUSR2);
    wrapped_let_go(&w);
    assert_true(w.woken);
    assert_true(w.late);
    assert_int_equal(w.group.seen_by_rank[0], 25000 + 3);
    assert_int_equal(w.group.deaths[0].how.exit_status, 3);
    assert_string_equal(w.group.deaths[0].last_lines + strlen("y\n") * 15, "last words");
}

/* A process of its own that traces another until its standard pipe is closed. */
static pid_t trace(pid_t pid, int *ret_end_fd)
{
    int go[2], told[2];
    char byte = 0;
    assert_int_equal(pipe2(go, O_CLOEXEC), 0);
    assert_int_equal(pipe2(told, O_CLOEXEC), 0);
    pid_t tracer = fork();
    assert_true(tracer >= 0);
    if (tracer == 0) {
        close(go[1]);
        byte = ptrace(PTRACE_SEIZE, pid, NULL, NULL) == 0;
        bool done = write(told[1], &byte, 1) == 1 && read(go[0], &byte, 1) == 0;
        _exit(!done);
    }
    assert_int_equal(read(told[0], &byte, 1), 1);
    close(go[0]);
    close(told[0]);
    close(told[1]);
    *ret_end_fd = go[1];
    if (!byte) { /* not allowed here */
        close(go[1]);
        assert_int_equal(waitpid(tracer, NULL, 0), tracer);
    }
    return byte ? tracer : 0;
}

TEST(p2_a_debugger_delays_no_other_rank)
{
    struct group g;
    group_start(&g, 2, "echo ready; exec sleep 1000");
    group_await_line(&g, 0, false, "ready");
    group_await_line(&g, 1, false, "ready");
    pid_t pid = cox_supervisor_pid(g.supervisor, 0);
    int end_fd;
    pid_t tracer = trace(pid, &end_fd);
    if (!tracer) {
        group_free(&g);
        skip();
    }
    kill(pid, SIGKILL);
    assert_true(process_is_dead(cox_supervisor_pid(g.supervisor, 0), PATIENCE_MS));
    uint64_t begin_ns = cox_now_ns();
    assert_int_equal(kill(cox_supervisor_pid(g.supervisor, 1), SIGKILL), 0);
    group_await_death(&g, 1);
    group_await_death(&g, 0);
    /* The one that is traced came second: the other did not wait for it. */
    assert_true(cox_now_ns() - begin_ns < PATIENCE_MS * COX_NSEC_PER_MSEC);
    assert_true(g.deaths[1].told_ns < g.deaths[0].told_ns);
    assert_false(g.deaths[0].how.known);
    assert_contains(g.deaths[0].description, "a debugger has it");
    /* And when it is let go, nothing is left of it. */
    close(end_fd);
    int status;
    assert_int_equal(waitpid(tracer, &status, 0), tracer);
    uint64_t deadline_ns = group_deadline();
    while (kill(pid, 0) == 0 && cox_now_ns() < deadline_ns)
        sched_yield();
    assert_int_equal(kill(pid, 0), -1);
    group_free(&g);
}

TEST(m15_end_is_bounded_whatever_workers_do)
{
    _cox_cleanup_(group_free) struct group g;
    /* 0 leaves by itself, 1 at SIGTERM, 2 ignores it, 3 is stopped and would end at SIGTERM, 4 is
     * stopped and ignores it, 5 leaves at SIGTERM with a status of its own. */
    group_start(
        &g, 6,
        "case $R in 0) echo ready; exit 0;; 2) trap '' TERM HUP INT;; 4) trap '' TERM;; 5) trap 'kill $!; exit 6' TERM;; esac; echo ready; [ $R = 3 -o $R = 4 ] && kill -STOP $$; [ $R != 5 ] && exec sleep 1000; sleep 1000 & wait");
    for (uint32_t rank = 0; rank < 6; rank++)
        group_await_line(&g, rank, false, "ready");
    group_await_death(&g, 0);
    uint64_t start_ns = cox_now_ns();
    cox_supervisor_expect_end(g.supervisor);
    assert_int_equal(cox_supervisor_wait(g.supervisor, cox_deadline_after_ms(50)), COX_TIMEOUT);
    assert_int_equal(cox_supervisor_end(g.supervisor, 1500), 5);
    uint64_t took_ns = cox_now_ns() - start_ns;
    assert_true(took_ns >= 1550 * COX_NSEC_PER_MSEC);
    assert_true(took_ns < 15000 * COX_NSEC_PER_MSEC);
    const int signals[] = {0, SIGTERM, SIGKILL, SIGTERM, SIGKILL, 0};
    for (uint32_t rank = 0; rank < 6; rank++) {
        assert_int_equal(g.deaths[rank].times, 1);
        assert_int_equal(g.deaths[rank].how.signal, signals[rank]);
    }
    assert_int_equal(g.deaths[5].how.exit_status, 6);
    assert_int_equal(cox_supervisor_end(g.supervisor, 1000), 0);
}

TEST(m15_free_ends_all_processes)
{
    for (uint32_t n = 1; n <= 8; n *= 2) {
        _cox_cleanup_(group_free) struct group g;
        group_start(&g, n, "trap '' TERM; echo ready; exec sleep 1000");
        for (uint32_t rank = 0; rank < n; rank++)
            group_await_line(&g, rank, false, "ready");
        g.supervisor = cox_supervisor_free(g.supervisor);
        assert_int_equal(g.death_count, n);
    }
}
