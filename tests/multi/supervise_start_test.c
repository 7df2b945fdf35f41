/* The supervisor with real processes: shells and small programs as workers. Whatever a test waits
 * for, it waits for by the hooks, with a deadline. After each test this process has the fds it had
 * before, and no children. */
#include "channel/base/fault.h"
#include "channel/base/peer.h"
#include "channel/base/thread.h"
#include "channel/base/tsan.h"
#include "coordinator/process/launch.h"
#include "coordinator/process/output.h"
#include "coordinator/process/supervise.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sched.h>
#include <sys/fanotify.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#define PATIENCE_MS 30000

/* What the hooks said. */
struct line {
    uint32_t rank;
    bool is_stderr;
    char *text;
};

struct death {
    pid_t pid;
    uint32_t times;
    uint64_t told_ns;
    struct cox_exit how, getter;
    char description[200], last_lines[200];
};

struct group {
    struct cox_supervisor *supervisor;
    struct cox_rank ranks[COX_RANK_COUNT_MAX];
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct line *lines;
    size_t line_count;
    uint64_t seen_by_rank[COX_RANK_COUNT_MAX];
    struct death deaths[COX_RANK_COUNT_MAX];
    uint32_t death_count;
};

static void on_line(void *context, uint32_t rank, bool is_stderr, const char *text)
{
    struct group *g = context;
    pthread_mutex_lock(&g->lock);
    /* A flood is counted, not kept. */
    if (g->seen_by_rank[rank]++ < 1000) {
        g->lines = realloc(g->lines, (g->line_count + 1) * sizeof *g->lines);
        g->lines[g->line_count++] = (struct line){rank, is_stderr, strdup(text)};
    }
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->lock);
}

static void on_death(void *context, uint32_t rank, pid_t pid, const struct cox_exit *how)
{
    struct group *g = context;
    struct death death = {
        .pid = pid, .how = *how, .times = g->deaths[rank].times + 1, .told_ns = cox_now_ns()};
    /* The getters are allowed in a hook, and know it already. */
    if (!cox_supervisor_dead(g->supervisor, rank, &death.getter))
        death.times = 100;
    cox_supervisor_describe(g->supervisor, rank, death.description, sizeof death.description);
    cox_supervisor_last_lines(g->supervisor, rank, death.last_lines, sizeof death.last_lines);
    pthread_mutex_lock(&g->lock);
    g->deaths[rank] = death;
    g->death_count++;
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->lock);
}

static void group_init(struct group *g)
{
    *g = (struct group){0};
    pthread_mutex_init(&g->lock, NULL);
    cox_ranks_init(g->ranks, COX_RANK_COUNT_MAX);
    cox_condition_init(&g->changed);
}

static int group_try(struct group *g, uint32_t rank_count, const char *const *command,
                     bool pass_flags, struct cox_error *err)
{
    group_init(g);
    const struct cox_supervise_options options = {
        .rank_count = rank_count,
        .ranks = g->ranks,
        .command = command,
        .pass_flags = pass_flags,
        .prefix = "/test",
        .hooks = {.context = g, .line = on_line, .death = on_death},
    };
    return cox_supervisor_start(&options, &g->supervisor, err);
}

/* Every rank runs the script; R is its rank. */
static void group_start(struct group *g, uint32_t rank_count, const char *script)
{
    char *text;
    assert_true(asprintf(&text, "R=$COXSWAIN_RANK; %s", script) > 0);
    const char *const command[] = {"/bin/sh", "-c", text, NULL};
    struct cox_error err = {0};
    int r = group_try(g, rank_count, command, false, &err);
    free(text);
    if (r)
        fail_msg("start: %d: %s", r, err.text);
}

static void group_free(struct group *g)
{
    g->supervisor = cox_supervisor_free(g->supervisor);
    for (size_t i = 0; i < g->line_count; i++)
        free(g->lines[i].text);
    free(g->lines);
    pthread_cond_destroy(&g->changed);
    pthread_mutex_destroy(&g->lock);
}

static uint64_t group_deadline(void)
{
    return cox_deadline_after_ms(PATIENCE_MS);
}

/* With the lock held. False: the deadline has passed. */
static bool group_wait_change(struct group *g, uint64_t deadline_ns)
{
    struct timespec ts = {(time_t)(deadline_ns / COX_NSEC_PER_SEC),
                          (long)(deadline_ns % COX_NSEC_PER_SEC)};
    return pthread_cond_timedwait(&g->changed, &g->lock, &ts) != ETIMEDOUT;
}

/* The first line of a rank that starts with the text; it stays where it is until group_free. */
static const char *group_await_line(struct group *g, uint32_t rank, bool is_stderr,
                                    const char *start)
{
    uint64_t deadline_ns = group_deadline();
    const char *found = NULL;
    pthread_mutex_lock(&g->lock);
    do
        for (size_t i = 0; !found && i < g->line_count; i++)
            if (g->lines[i].rank == rank && g->lines[i].is_stderr == is_stderr &&
                strncmp(g->lines[i].text, start, strlen(start)) == 0)
                found = g->lines[i].text;
    while (!found && group_wait_change(g, deadline_ns));
    pthread_mutex_unlock(&g->lock);
    if (!found)
        fail_msg("rank %u never wrote '%s'", rank, start);
    return found;
}

static void group_await_seen(struct group *g, uint32_t rank, uint64_t more)
{
    uint64_t deadline_ns = group_deadline();
    pthread_mutex_lock(&g->lock);
    uint64_t target = g->seen_by_rank[rank] + more;
    while (g->seen_by_rank[rank] < target && group_wait_change(g, deadline_ns))
        ;
    bool reached = g->seen_by_rank[rank] >= target;
    pthread_mutex_unlock(&g->lock);
    assert_true(reached);
}

static void group_await_death(struct group *g, uint32_t rank)
{
    uint64_t deadline_ns = group_deadline();
    pthread_mutex_lock(&g->lock);
    while (g->deaths[rank].times == 0 && group_wait_change(g, deadline_ns))
        ;
    uint32_t times = g->deaths[rank].times;
    pthread_mutex_unlock(&g->lock);
    assert_int_equal(times, 1);
}

static void group_await_end(struct group *g)
{
    assert_int_equal(cox_supervisor_wait(g->supervisor, group_deadline()), 0);
}

/* The text of the n-th line of a rank's stream, after all is over. */
static const char *group_line(struct group *g, uint32_t rank, bool is_stderr, size_t n)
{
    for (size_t i = 0; i < g->line_count; i++)
        if (g->lines[i].rank == rank && g->lines[i].is_stderr == is_stderr && n-- == 0)
            return g->lines[i].text;
    return NULL;
}

static int count_fds(void)
{
    int count = 0;
    DIR *dir = opendir("/proc/self/fd");
    assert_non_null(dir);
    while (readdir(dir))
        count++;
    closedir(dir);
    return count;
}

static bool pidfd_is_dead(int pidfd, int timeout_ms)
{
    struct pollfd p = {.fd = pidfd, .events = POLLIN};
    return poll(&p, 1, timeout_ms) == 1;
}

static int fds_before;

static int setup(void **state)
{
    (void)state;
    fds_before = count_fds();
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    siginfo_t info;
    assert_int_equal(waitid(P_ALL, 0, &info, WEXITED | WNOHANG | __WALL), -1);
    assert_int_equal(errno, ECHILD);
    assert_int_equal(count_fds(), fds_before);
    return 0;
}

static void m14_every_rank_gets_environment_and_flags(void **state)
{
    (void)state;
    setenv("COXSWAIN_RANK", "77", 1); /* of the host; must not be there twice */
    setenv("SUPERVISE_TEST", "kept", 1);
    for (uint32_t n = 1; n <= 8; n *= 2) {
        /* sh is found in PATH; what follows "name" are its arguments. */
        const char *const command[] = {
            "sh", "-c",
            "echo \"$COXSWAIN_PREFIX $COXSWAIN_RANK $COXSWAIN_WORLD_SIZE $COXSWAIN_DEVICE $COXSWAIN_PARENT_PID $COXSWAIN_INCARNATION $COXSWAIN_SOCKET $COXSWAIN_LOCAL_RANK $COXSWAIN_LOCAL_WORLD_SIZE $SUPERVISE_TEST $PPID\"; echo \"$0 $*\"; env | grep -c ^COXSWAIN_",
            "name", NULL};
        const int32_t devices[8] = {7, 6, 5, 4, 3, 2, 1, 0};
        struct group g;
        group_init(&g);
        const struct cox_supervise_options options = {
            .rank_count = n,
            .ranks = g.ranks,
            .command = command,
            .pass_flags = true,
            .prefix = "/pre fix",
            .control_socket = "/a.sock",
            .devices = n == 8 ? devices : NULL,
            .hooks = {.context = &g, .line = on_line, .death = on_death},
        };
        assert_int_equal(cox_supervisor_start(&options, &g.supervisor, NULL), 0);
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
        group_free(&g);
    }
    /* A shell would hide a variable that is there twice. */
    struct group g;
    const char *const command[] = {"env", NULL};
    assert_int_equal(group_try(&g, 1, command, false, NULL), 0);
    group_await_end(&g);
    int times = 0;
    for (size_t i = 0; group_line(&g, 0, false, i); i++)
        times += strncmp(group_line(&g, 0, false, i), "COXSWAIN_RANK=", 14) == 0;
    assert_int_equal(times, 1);
    group_free(&g);
    unsetenv("COXSWAIN_RANK");
}

/* A group of one rank with changes of the environment and a working directory. */
static int elsewhere_try(struct group *g, const char *const *command,
                         const char *const *environment, const char *directory,
                         struct cox_error *err)
{
    group_init(g);
    const struct cox_supervise_options options = {
        .rank_count = 1,
        .ranks = g->ranks,
        .command = command,
        .environment = environment,
        .working_directory = directory,
        .prefix = "/test",
        .hooks = {.context = g, .line = on_line, .death = on_death},
    };
    *err = (struct cox_error){0};
    return cox_supervisor_start(&options, &g->supervisor, err);
}

static void write_script(const char *folder, const char *name, const char *text)
{
    char *path;
    assert_true(asprintf(&path, "%s/%s", folder, name) > 0);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) > 0);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(chmod(path, 0700), 0);
    free(path);
}

static void m14_environment_and_working_directory(void **state)
{
    (void)state;
    char folder[] = "/tmp/supervise-XXXXXX", *deeper, *missing, *file;
    assert_non_null(mkdtemp(folder));
    assert_true(asprintf(&deeper, "%s/bin", folder) > 0);
    assert_true(asprintf(&missing, "%s/missing", folder) > 0);
    assert_true(asprintf(&file, "%s/here", folder) > 0);
    assert_int_equal(mkdir(deeper, 0700), 0);
    const char *const text = "#!/bin/sh\necho \"$PWD|$KEPT|$CHANGED|${GONE-none}|$ADDED\"\n";
    write_script(folder, "here", text);
    write_script(deeper, "there", text);
    setenv("KEPT", "kept", 1);
    setenv("CHANGED", "before", 1);
    setenv("GONE", "still", 1);
    char expected[200];
    snprintf(expected, sizeof expected, "%s|kept|after|none|a=b", folder);
    const char *const changes[] = {"CHANGED=after", "GONE", "ADDED=a=b", "PATH=nowhere:bin", NULL};
    /* Relative to the directory; and in a relative entry of the workers' PATH. */
    static const char *const programs[] = {"./here", "there"};
    for (size_t i = 0; i < 2; i++) {
        struct group g;
        struct cox_error err;
        const char *const command[] = {programs[i], NULL};
        const int r = elsewhere_try(&g, command, changes, folder, &err);
        if (r)
            fail_msg("%d: %s", r, err.text);
        group_await_end(&g);
        assert_string_equal(group_line(&g, 0, false, 0), expected);
        group_free(&g);
    }
    const struct {
        const char *change, *directory;
        int code;
        const char *text;
    } refused[] = {
        {"=value", NULL, COX_INVALID, "environment has '=value', which names no variable"},
        {"", NULL, COX_INVALID, "environment has '', which names no variable"},
        {"COXSWAIN_RANK=1", NULL, COX_INVALID, "COXSWAIN_RANK, which the group sets itself"},
        {"COXSWAIN_SOCKET", NULL, COX_INVALID, "COXSWAIN_SOCKET, which the group sets itself"},
        {"KEPT=1", NULL, COX_INVALID, "environment has KEPT twice"},
        {NULL, missing, COX_NOT_FOUND, "/missing' as their working directory: No such file"},
        {NULL, file, COX_NOT_FOUND, "/here' as their working directory: it is no directory"},
    };
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        struct group g;
        struct cox_error err;
        const char *const command[] = {"/bin/true", NULL};
        const char *const wrong[] = {refused[i].change, "KEPT", NULL};
        const int r = elsewhere_try(&g, command, refused[i].change ? wrong : NULL,
                                    refused[i].directory, &err);
        assert_int_equal(r, refused[i].code);
        if (!strstr(err.text, refused[i].text))
            fail_msg("'%s' is not in: %s", refused[i].text, err.text);
        group_free(&g);
    }
    /* It is entered at each start, and may have gone since. */
    struct group g;
    struct cox_error err;
    const char *const true_command[] = {"/bin/true", NULL};
    assert_int_equal(elsewhere_try(&g, true_command, NULL, deeper, &err), 0);
    group_await_end(&g);
    char *there;
    assert_true(asprintf(&there, "%s/there", deeper) > 0);
    assert_int_equal(unlink(there), 0);
    assert_int_equal(rmdir(deeper), 0);
    const struct cox_launch_incarnation second = {.number = 2};
    assert_int_equal(cox_supervisor_relaunch(g.supervisor, 0, &second, group_deadline(), &err),
                     -ENOENT);
    assert_non_null(strstr(err.text, "rank 0: entering its working directory '"));
    group_free(&g);
    assert_int_equal(unlink(file), 0);
    assert_int_equal(rmdir(folder), 0);
    free(there);
    free(file);
    free(missing);
    free(deeper);
    unsetenv("KEPT");
    unsetenv("CHANGED");
    unsetenv("GONE");
}

static void m14_lines_carry_rank_and_stream(void **state)
{
    (void)state;
    for (uint32_t n = 1; n <= 8; n *= 2) {
        struct group g;
        group_start(&g, n, "echo out $R; echo; echo err $R >&2; printf 'cut %s' $R");
        group_await_end(&g);
        for (uint32_t rank = 0; rank < n; rank++) {
            char expected[32];
            snprintf(expected, sizeof expected, "out %u", rank);
            assert_string_equal(group_line(&g, rank, false, 0), expected);
            assert_string_equal(group_line(&g, rank, false, 1), "");
            snprintf(expected, sizeof expected, "cut %u", rank);
            assert_string_equal(group_line(&g, rank, false, 2), expected);
            assert_null(group_line(&g, rank, false, 3));
            snprintf(expected, sizeof expected, "err %u", rank);
            assert_string_equal(group_line(&g, rank, true, 0), expected);
            assert_null(group_line(&g, rank, true, 1));
            assert_int_equal(g.deaths[rank].times, 1);
            assert_int_equal(g.deaths[rank].pid, cox_supervisor_pid(g.supervisor, rank));
        }
        group_free(&g);
    }
}

static void m14_long_and_binary_lines(void **state)
{
    (void)state;
    struct group g;
    group_start(
        &g, 1,
        "x() { head -c $1 /dev/zero | tr '\\0' x; }; x 10000; echo; x 4000; echo; x 8000; echo; printf 'a\\0b\\001\\033\\377\\r\\n\\0'");
    group_await_end(&g);
    const size_t sizes[] = {4000, 4000, 2000, 4000, 4000, 4000};
    for (size_t i = 0; i < 6; i++) {
        assert_int_equal(strlen(group_line(&g, 0, false, i)), sizes[i]);
        assert_int_equal(strspn(group_line(&g, 0, false, i), "x"), sizes[i]);
    }
    assert_string_equal(group_line(&g, 0, false, 6), "a?b\001\033\377\r");
    assert_string_equal(group_line(&g, 0, false, 7), "?");
    assert_null(group_line(&g, 0, false, 8));
    group_free(&g);
}

static void collect_text(void *context, const char *text, size_t size)
{
    char **to = context;
    assert_int_equal(strlen(text), size);
    assert_true(size <= COX_OUTPUT_LINE_MAX);
    *to = stpcpy(stpcpy(*to, text), "|");
}

static void m14_lines_do_not_depend_on_how_they_arrive(void **state)
{
    (void)state;
    enum { SIZE = 20000 };
    static char bytes[SIZE], whole[2 * SIZE], parts[2 * SIZE];
    static struct cox_output output;
    for (size_t i = 0; i < SIZE; i++)
        bytes[i] = i < 12001 ? 'x' : i % 97 == 0 ? '\n' : i % 31 == 0 ? '\0' : 'y';
    char *to = whole;
    cox_output_feed(&output, bytes, SIZE, collect_text, &to);
    cox_output_finish(&output, collect_text, &to);
    for (size_t step = 1; step < 9000; step = step * 3 + 1) {
        to = parts;
        for (size_t at = 0; at < SIZE; at += step)
            cox_output_feed(&output, bytes + at, step < SIZE - at ? step : SIZE - at, collect_text,
                            &to);
        cox_output_finish(&output, collect_text, &to);
        assert_string_equal(parts, whole);
    }
}

static void m14_last_lines(void **state)
{
    (void)state;
    struct group g;
    group_start(
        &g, 2,
        "[ $R = 1 ] && exit; head -c 1000 /dev/zero | tr '\\0' x; echo; seq 1 100; echo end >&2");
    group_await_end(&g);
    char text[8000], expected[200] = "";
    size_t length = cox_supervisor_last_lines(g.supervisor, 0, text, sizeof text);
    assert_int_equal(length, strlen(text));
    /* The two streams have no order between them, the numbers have. */
    for (int i = 86; i <= 100; i++)
        snprintf(expected + strlen(expected), sizeof expected - strlen(expected), "%d%s", i,
                 i < 100 ? "\n" : "");
    assert_non_null(strstr(text, expected));
    assert_non_null(strstr(text, "end"));
    assert_int_equal(cox_supervisor_last_lines(g.supervisor, 1, text, sizeof text), 0);
    assert_string_equal(text, "");
    group_free(&g);

    static struct cox_last_lines lines;
    char line[1000];
    memset(line, 'z', sizeof line);
    cox_last_lines_add(&lines, "older", 5);
    cox_last_lines_add(&lines, line, sizeof line);
    cox_last_lines_add(&lines, "newest", 6);
    assert_int_equal(cox_last_lines_join(&lines, text, sizeof text), 5 + 1 + 400 + 1 + 6);
    assert_int_equal(cox_last_lines_join(&lines, text, 408), 400 + 1 + 6);
    assert_int_equal(cox_last_lines_join(&lines, text, 407), 6);
    assert_int_equal(cox_last_lines_join(&lines, text, 7), 6);
    assert_string_equal(text, "newest");
    assert_int_equal(cox_last_lines_join(&lines, text, 4), 3);
    assert_string_equal(text, "new");
    assert_int_equal(cox_last_lines_join(&lines, text, 1), 0);
    assert_int_equal(cox_last_lines_join(&lines, text, 0), 0);
}

static void m14_a_flood_starves_no_client(void **state)
{
    (void)state;
    struct group g;
    group_start(
        &g, 4,
        "[ $R = 0 ] && exec yes flood; [ $R = 1 ] && exec yes flood >&2; echo ready; read x < /dev/null; exec sleep 1000");
    group_await_seen(&g, 0, 100000);
    group_await_seen(&g, 1, 100000);
    group_await_line(&g, 2, false, "ready");
    group_await_line(&g, 3, false, "ready");
    assert_int_equal(cox_supervisor_signal(g.supervisor, 2, SIGKILL), 0);
    group_await_death(&g, 2);
    /* And the flood continues, while a flooding rank's own death is seen, too. */
    group_await_seen(&g, 0, 100000);
    assert_int_equal(cox_supervisor_signal(g.supervisor, 1, SIGKILL), 0);
    group_await_death(&g, 1);
    group_await_seen(&g, 0, 100000);
    assert_false(cox_supervisor_dead(g.supervisor, 0, NULL));
    assert_false(cox_supervisor_dead(g.supervisor, 3, NULL));
    group_free(&g);
}

static void m14_how_a_worker_ended(void **state)
{
    (void)state;
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
        assert_int_equal(cox_supervisor_signal(g.supervisor, rank, 0), COX_PEER_DEAD);
        assert_true(pidfd_is_dead(cox_supervisor_pidfd(g.supervisor, rank), 0));
        /* A check for a coming death may run just after the death. */
        assert_true(cox_supervisor_exiting(g.supervisor, rank));
    }
    assert_false(cox_supervisor_exiting(g.supervisor, 3));
    snprintf(expected, sizeof expected, "rank 3 (pid %d) is alive",
             cox_supervisor_pid(g.supervisor, 3));
    cox_supervisor_describe(g.supervisor, 3, text, sizeof text);
    assert_string_equal(text, expected);
    assert_false(pidfd_is_dead(cox_supervisor_pidfd(g.supervisor, 3), 0));
    assert_int_equal(cox_supervisor_signal(g.supervisor, 3, 0), 0);
    assert_int_equal(cox_supervisor_wait(g.supervisor, cox_now_ns()), COX_TIMEOUT);
    group_free(&g);
}

static void m14_a_grandchild_with_the_pipe_hides_no_death(void **state)
{
    (void)state;
    struct group g;
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
    assert_non_null(strstr(g.deaths[1].last_lines, "\nunfinished"));
    group_await_seen(&g, 0, 10000); /* its lines are still taken */
    assert_int_equal(kill(atoi(flooding + 4), SIGKILL), 0);
    assert_int_equal(kill(atoi(silent + 4), SIGKILL), 0);
    group_free(&g);
}

/* Whatever its end was: by its own will, by a signal from outside, by stop. */
static void m15_what_a_worker_leaves_behind_ends_with_it(void **state)
{
    (void)state;
    struct group g;
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
    assert_int_equal(cox_supervisor_signal(g.supervisor, 1, SIGKILL), 0);
    assert_true(pidfd_is_dead(pidfds[1], PATIENCE_MS));
    assert_int_equal(cox_supervisor_signal(g.supervisor, 0, SIGUSR1), 0);
    assert_true(pidfd_is_dead(pidfds[0], PATIENCE_MS));
    assert_false(pidfd_is_dead(pidfds[2], 0));
    cox_supervisor_end(g.supervisor, 0, 0);
    assert_true(pidfd_is_dead(pidfds[2], PATIENCE_MS));
    for (int i = 0; i < 3; i++)
        close(pidfds[i]);
    group_free(&g);
}

struct refill {
    int write_fd;
    size_t lines;
};

static void refill_pipe(void *context, const char *text, size_t size)
{
    struct refill *refill = context;
    (void)text;
    (void)size;
    if (++refill->lines < 1000000) /* so that a mistake here ends, too */
        while (write(refill->write_fd, "again\n", 6) == 6)
            ;
}

static void m14_reading_is_bounded(void **state)
{
    (void)state;
    int fds[2];
    assert_int_equal(pipe2(fds, O_CLOEXEC | O_NONBLOCK), 0);
    static struct cox_output output;
    output.fd = fds[0];
    /* A writer so fast that the pipe is never empty. */
    struct refill refill = {.write_fd = fds[1]};
    refill_pipe(&refill, NULL, 0);
    assert_int_equal(cox_output_read(&output, refill_pipe, &refill), COX_OUTPUT_READ_MAX);
    cox_output_drain(&output, refill_pipe, &refill);
    assert_true(refill.lines < 200000);
    close(fds[0]);
    close(fds[1]);
}

/* The thread of the supervisor is held in the hook while one rank fills its pipe and another writes
 * a line. */
struct gate {
    /* for its lock and condition */
    struct group group;
    bool reached, open;
    /* of rank 0, when rank 1 had its turn */
    uint64_t bytes_before;
    uint64_t bytes;
    bool turn_seen;
};

static void on_gated_line(void *context, uint32_t rank, bool is_stderr, const char *text)
{
    struct gate *gate = context;
    (void)is_stderr;
    pthread_mutex_lock(&gate->group.lock);
    gate->reached = true;
    pthread_cond_broadcast(&gate->group.changed);
    while (!gate->open)
        pthread_cond_wait(&gate->group.changed, &gate->group.lock);
    if (rank == 0)
        gate->bytes += strlen(text) + 1;
    if (rank == 1 && !gate->turn_seen) {
        gate->turn_seen = true;
        gate->bytes_before = gate->bytes;
        pthread_cond_broadcast(&gate->group.changed);
    }
    pthread_mutex_unlock(&gate->group.lock);
}

static void await_stop(struct cox_supervisor *supervisor, uint32_t rank)
{
    siginfo_t info;
    assert_int_equal(waitid(P_PIDFD, (id_t)cox_supervisor_pidfd(supervisor, rank), &info, WSTOPPED),
                     0);
}

static void m14_ranks_take_turns(void **state)
{
    (void)state;
    struct gate gate = {.open = false};
    group_init(&gate.group);
    uint64_t deadline_ns = group_deadline();
    const char *const command[] = {
        "sh", "-c",
        "if [ $COXSWAIN_RANK = 0 ]; then echo start; kill -STOP $$; yes | head -c 60000; kill -STOP $$; else kill -STOP $$; echo line; kill -STOP $$; fi",
        NULL};
    const struct cox_supervise_options options = {
        .rank_count = 2,
        .ranks = gate.group.ranks,
        .command = command,
        .prefix = "/test",
        .hooks = {.context = &gate, .line = on_gated_line},
    };
    struct cox_supervisor *supervisor;
    assert_int_equal(cox_supervisor_start(&options, &supervisor, NULL), 0);
    pthread_mutex_lock(&gate.group.lock);
    while (!gate.reached && group_wait_change(&gate.group, deadline_ns))
        ;
    assert_true(gate.reached);
    pthread_mutex_unlock(&gate.group.lock);
    for (uint32_t rank = 0; rank < 2; rank++) {
        await_stop(supervisor, rank);
        assert_int_equal(cox_supervisor_signal(supervisor, rank, SIGCONT), 0);
        await_stop(supervisor, rank);
    }
    pthread_mutex_lock(&gate.group.lock);
    gate.open = true;
    pthread_cond_broadcast(&gate.group.changed);
    while (!gate.turn_seen && group_wait_change(&gate.group, deadline_ns))
        ;
    pthread_mutex_unlock(&gate.group.lock);
    assert_true(gate.bytes_before > 0);
    assert_true(gate.bytes_before <= 2 * COX_OUTPUT_READ_MAX);
    gate.group.supervisor = supervisor;
    group_free(&gate.group);
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
    struct cox_error err = {0};
    const char *const command[] = {program, "argument", NULL};
    struct cox_supervisor *const untouched = (struct cox_supervisor *)&g;
    for (uint32_t n = 1; n <= 8; n *= 8) {
        err.code = 0;
        group_init(&g);
        const struct cox_supervise_options options = {
            .rank_count = n,
            .ranks = g.ranks,
            .command = command,
            .prefix = "/test",
            .hooks = {.context = &g, .line = on_line, .death = on_death},
        };
        g.supervisor = untouched;
        assert_int_equal(cox_supervisor_start(&options, &g.supervisor, &err), COX_EXEC_FAILED);
        assert_ptr_equal(g.supervisor, untouched);
        assert_int_equal(err.code, COX_EXEC_FAILED);
        assert_memory_equal(err.text, "rank 0: ", 8);
        if (!strstr(err.text, named) || !strstr(err.text, reason))
            fail_msg("'%s' or '%s' is not in: %s", named, reason, err.text);
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

static void m14_b40_exec_failure_is_reported(void **state)
{
    (void)state;
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

static void m14_exec_failure_of_a_later_rank_ends_the_earlier(void **state)
{
    (void)state;
    char folder[] = "/tmp/supervise_XXXXXX", file[64];
    assert_non_null(mkdtemp(folder));
    snprintf(file, sizeof file, "%s/program", folder);
    /* It removes itself, long before all of the largest group are started. */
    write_file(file, 0755, "#!/bin/sh\nrm -f \"$0\"\nexec sleep 1000\n");
    struct group g;
    struct cox_error err = {0};
    const char *const command[] = {file, NULL};
    assert_int_equal(group_try(&g, COX_RANK_COUNT_MAX, command, false, &err), COX_EXEC_FAILED);
    assert_non_null(strstr(err.text, file));
    assert_int_equal(strncmp(err.text, "rank ", 5), 0);
    assert_true(atoi(err.text + 5) > 0);
    assert_int_equal(g.death_count, 0);
    assert_int_equal(g.line_count, 0);
    group_free(&g);
    rmdir(folder);
}

static void m14_arguments_are_checked(void **state)
{
    (void)state;
    struct group g;
    struct cox_error err = {0};
    const char *const command[] = {"/bin/true", NULL};
    assert_int_equal(group_try(&g, 0, command, false, &err), COX_INVALID);
    group_free(&g);
    assert_int_equal(group_try(&g, COX_RANK_COUNT_MAX + 1, command, false, NULL), COX_INVALID);
    group_free(&g);
    assert_int_equal(group_try(&g, 1, command + 1, false, NULL), COX_INVALID);
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
static void b2_a_process_stopped_before_exec_is_given_up(void **state)
{
    (void)state;
    for (uint32_t rank = 0; rank < 3; rank++) {
        const char *const command[] = {"/bin/sleep", "1000", NULL};
        struct cox_rank ranks[3];
        cox_ranks_init(ranks, 3);
        const struct cox_supervise_options options = {
            .rank_count = 3,
            .ranks = ranks,
            .command = command,
            .prefix = "/test",
            .deadline_ns = cox_deadline_after_ms(1000),
        };
        struct cox_supervisor *supervisor = NULL;
        struct cox_error err = {0};
        char plan[32], named[100];
        snprintf(plan, sizeof plan, "launch.child:stop:%u", rank);
        snprintf(named, sizeof named,
                 "rank %u: its process did not get as far as executing '/bin/sleep'", rank);
        cox_fault_arm(plan);
        int r = cox_supervisor_start(&options, &supervisor, &err);
        cox_fault_arm(NULL);
        assert_int_equal(r, COX_TIMEOUT);
        assert_int_equal(err.code, COX_TIMEOUT);
        assert_non_null(strstr(err.text, named));
        assert_null(supervisor);
    }
}

struct start {
    struct cox_supervise_options options;
    struct cox_supervisor *supervisor;
    int r;
};

static void *start_main(void *start)
{
    struct start *s = start;
    struct cox_error err = {0};
    s->r = cox_supervisor_start(&s->options, &s->supervisor, &err);
    return NULL;
}

/* A copy of the host's page tables takes 50 ms for each GB. A value that this process writes while
 * the new one is stopped before exec is there in both. */
static void m14_a_new_process_copies_no_memory(void **state)
{
    (void)state;
#ifdef COX_TSAN
    skip(); /* ThreadSanitizer needs a copy */
#endif
    static volatile uint64_t witness;
    const char *const command[] = {"/bin/sleep", "1000", NULL};
    struct cox_rank ranks[1];
    cox_ranks_init(ranks, 1);
    struct start start = {.options = {.rank_count = 1,
                                      .ranks = ranks,
                                      .command = command,
                                      .prefix = "/test",
                                      .deadline_ns = cox_deadline_after_ms(60000)}};
    cox_fault_arm("launch.child:stop:0");
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, start_main, &start), 0);
    siginfo_t stopped = {0};
    while (waitid(P_ALL, 0, &stopped, WSTOPPED | WNOWAIT) < 0 && errno == ECHILD)
        sched_yield(); /* it is not there yet */
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
    pthread_join(thread, NULL);
    assert_int_equal(start.r, 0);
    cox_supervisor_free(start.supervisor);
    assert_true(seen == secret);
}
#endif

static void b15_a_worker_has_only_its_standard_fds(void **state)
{
    (void)state;
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

static void m14_a_worker_starts_with_default_signals(void **state)
{
    (void)state;
    sigset_t blocked, saved;
    sigfillset(&blocked);
    pthread_sigmask(SIG_SETMASK, &blocked, &saved);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGUSR1, SIG_IGN);
    struct group g;
    const char *const command[] = {"grep", "-E", "^Sig(Blk|Ign|Cgt)", "/proc/self/status", NULL};
    assert_int_equal(group_try(&g, 2, command, false, NULL), 0);
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

static void b15_fd_shortage_undoes_everything(void **state)
{
    (void)state;
    struct rlimit saved;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &saved), 0);
    const char *const command[] = {"/bin/sleep", "1000", NULL};
    int failures = 0;
    for (rlim_t limit = 3;; limit++) {
        struct group g;
        struct cox_error err = {0};
        setrlimit(RLIMIT_NOFILE, &(struct rlimit){limit, saved.rlim_max});
        int r = group_try(&g, 3, command, false, &err);
        setrlimit(RLIMIT_NOFILE, &saved);
        group_free(&g);
        assert_int_equal(count_fds(), fds_before);
        siginfo_t info;
        assert_int_equal(waitid(P_ALL, 0, &info, WEXITED | WNOHANG | __WALL), -1);
        if (r == 0)
            break;
        assert_true(r == -EMFILE || r == -EINVAL);
        assert_int_equal(err.code, r);
        assert_true(limit < 1000);
        failures++;
    }
    assert_true(failures > 10);
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
    const struct cox_supervise_options options = {
        .rank_count = 1,
        .ranks = wrapped->group.ranks,
        .command = command,
        .prefix = "/test",
        .hooks = {.context = wrapped,
                  .line = on_wrapped_line,
                  .wake = on_wrapped_wake,
                  .death = on_wrapped_death},
    };
    assert_int_equal(cox_supervisor_start(&options, &wrapped->group.supervisor, NULL), 0);
    pid_t pid = atoi(group_await_line(&wrapped->group, 0, false, "pid ") + 4);
    assert_int_equal(cox_peer_open(pid, 0, &wrapped->peer), 0);
    assert_int_equal(cox_supervisor_adopt(wrapped->group.supervisor, 0, pid, wrapped->peer.start),
                     0);
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
    bool dead = pidfd_is_dead(cox_supervisor_pidfd(wrapped->group.supervisor, 0), PATIENCE_MS);
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
static void p8_a_rank_is_dead_when_no_process_serves_it(void **state)
{
    (void)state;
    for (int k = 0; k < 20; k++) {
        struct wrapped w;
        wrapped_start(&w, "sh -c 'echo pid $$; exec sleep 1000'; true");
        assert_int_equal(cox_supervisor_signal(w.group.supervisor, 0, SIGKILL), 0);
        group_await_death(&w.group, 0);
        assert_true(w.gone);
        assert_non_null(
            strstr(w.group.deaths[0].description, "its wrapper was killed by signal 9"));
        wrapped_free(&w);
    }
}

static void m15_a_wrapped_worker_has_its_grace(void **state)
{
    (void)state;
    struct wrapped w;
    wrapped_start(
        &w,
        "sh -c 'trap \"sleep 0.2; echo cleaned; exit 0\" TERM; echo pid $$; while :; do sleep 0.01; done'; true");
    assert_int_equal(cox_supervisor_end(w.group.supervisor, 0, PATIENCE_MS), 1);
    assert_string_equal(group_line(&w.group, 0, false, 1), "cleaned");
    assert_true(w.group.deaths[0].how.known); /* the wrapper waited for it, and ended by itself */
    assert_int_equal(w.group.deaths[0].how.signal, 0);
    wrapped_free(&w);
}

/* Both die while the supervisor looks elsewhere. */
static void p2_a_wrapper_reports_how_its_worker_ended(void **state)
{
    (void)state;
    struct wrapped w;
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
    wrapped_free(&w);
}

/* However much it wrote, and however long the host takes to read it. */
static void p2_a_death_is_seen_before_the_last_lines_are_reported(void **state)
{
    (void)state;
    struct wrapped w;
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
    wrapped_free(&w);
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

static void p2_a_debugger_delays_no_other_rank(void **state)
{
    (void)state;
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
    assert_true(pidfd_is_dead(cox_supervisor_pidfd(g.supervisor, 0), PATIENCE_MS));
    uint64_t begin_ns = cox_now_ns();
    assert_int_equal(cox_supervisor_signal(g.supervisor, 1, SIGKILL), 0);
    group_await_death(&g, 1);
    group_await_death(&g, 0);
    /* The one that is traced came second: the other did not wait for it. */
    assert_true(cox_now_ns() - begin_ns < PATIENCE_MS * COX_NSEC_PER_MSEC);
    assert_true(g.deaths[1].told_ns < g.deaths[0].told_ns);
    assert_false(g.deaths[0].how.known);
    assert_non_null(strstr(g.deaths[0].description, "a debugger has it"));
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

/* ---- a rank whose core is being written ---- */

/* A folder in which the kernel, when it opens a file to write a core, asks this process (fanotify),
 * and waits until it is answered. */
struct held_core {
    char folder[32], path[48];
    int ask_fd;
    struct fanotify_event_metadata asked;
    /* what the supervisor logged, and whether its first line is the answer */
    char log[512];
    bool released_by_log;
};

static bool file_is(const char *path, const char *text)
{
    char content[256] = "";
    FILE *file = fopen(path, "re");
    bool same = file && fgets(content, sizeof content, file) && strcmp(content, text) == 0;
    if (file)
        fclose(file);
    return same;
}

static void core_free(struct held_core *core)
{
    if (core->ask_fd >= 0)
        close(core->ask_fd);
    if (core->asked.fd >= 0)
        close(core->asked.fd);
    unlink(core->path);
    rmdir(core->folder);
}

static void core_hold(struct held_core *core)
{
    struct rlimit limit;
    *core = (struct held_core){.folder = "/tmp/supervise-XXXXXX", .asked.fd = -1};
    assert_non_null(mkdtemp(core->folder));
    snprintf(core->path, sizeof core->path, "%s/core", core->folder);
    core->ask_fd = fanotify_init(FAN_CLASS_CONTENT | FAN_CLOEXEC | FAN_NONBLOCK, O_RDONLY);
    assert_int_equal(getrlimit(RLIMIT_CORE, &limit), 0);
    if (core->ask_fd >= 0 && limit.rlim_max == RLIM_INFINITY &&
        file_is("/proc/sys/kernel/core_pattern", "core\n") &&
        file_is("/proc/sys/kernel/core_uses_pid", "0\n") &&
        fanotify_mark(core->ask_fd, FAN_MARK_ADD, FAN_OPEN_PERM | FAN_EVENT_ON_CHILD, AT_FDCWD,
                      core->folder) == 0)
        return;
    core_free(core);
    print_message("no core can be made and held here: that takes root, no limit of cores, and "
                  "kernel.core_pattern = core\n");
    skip();
}

static void core_await_begin(struct held_core *core)
{
    struct pollfd ask = {.fd = core->ask_fd, .events = POLLIN};
    assert_int_equal(poll(&ask, 1, PATIENCE_MS), 1);
    assert_int_equal(read(core->ask_fd, &core->asked, sizeof core->asked), sizeof core->asked);
}

static void core_release(struct held_core *core)
{
    const struct fanotify_response answer = {.fd = core->asked.fd, .response = FAN_ALLOW};
    assert_int_equal(write(core->ask_fd, &answer, sizeof answer), sizeof answer);
}

static void on_core_log(void *context, int level, const char *text)
{
    struct held_core *core = context;
    (void)level;
    const size_t used = strlen(core->log);
    snprintf(core->log + used, sizeof core->log - used, "%s\n", text);
    if (core->released_by_log)
        core_release(core);
    core->released_by_log = false;
}

/* Lets rank 1 dump core: the core is not written yet, and its death is known. */
static void core_begin(struct held_core *core, struct group *g, pid_t pid)
{
    cox_supervisor_see_dump(g->supervisor, 1);
    assert_true(cox_rank_stage_serves(cox_rank_stage_of(&g->ranks[1])));
    kill(pid, SIGSEGV);
    core_await_begin(core);
    cox_supervisor_see_dump(g->supervisor, 1);
    cox_supervisor_see_dump(g->supervisor, 1); /* nothing new */
    group_await_death(g, 1);
    assert_int_equal(kill(pid, 0), 0);
    assert_int_equal(g->deaths[1].how.signal, SIGSEGV);
}

/* Starts two ranks whose core is that one, below a wrapper or not, and lets rank 1 dump core. */
static pid_t core_dump(struct held_core *core, struct group *g, const char *run)
{
    char script[256];
    snprintf(script, sizeof script, "cd %s; ulimit -c unlimited; %s", core->folder, run);
    const char *const command[] = {"/bin/sh", "-c", script, NULL};
    group_init(g);
    const struct cox_supervise_options options = {
        .rank_count = 2,
        .ranks = g->ranks,
        .command = command,
        .prefix = "/test",
        .hooks = {.context = g, .line = on_line, .death = on_death},
        .log = {on_core_log, core},
    };
    struct cox_error err = {0};
    assert_int_equal(cox_supervisor_start(&options, &g->supervisor, &err), 0);
    const pid_t pid = (pid_t)atoi(group_await_line(g, 1, false, "pid ") + strlen("pid "));
    assert_int_equal(cox_supervisor_adopt(g->supervisor, 1, pid, 0), 0);
    core_begin(core, g, pid);
    return pid;
}

static void core_await_end(pid_t pid)
{
    const uint64_t deadline_ns = group_deadline();
    while (kill(pid, 0) == 0 && cox_now_ns() < deadline_ns)
        sched_yield();
    assert_int_equal(kill(pid, 0), -1);
}

static off_t core_size(const struct held_core *core)
{
    struct stat file;
    assert_int_equal(stat(core->path, &file), 0);
    return file.st_size;
}

#define CORE_SCRIPT "echo pid $$; exec sleep 1000"

/* The death is known, and the rank replaced, while the kernel writes the core; its end is no second
 * death. */
static void p2_a_rank_that_dumps_core_is_dead(void **state)
{
    (void)state;
    struct held_core core;
    struct group g;
    core_hold(&core);
    const pid_t pid = core_dump(&core, &g, CORE_SCRIPT);
    char text[200];
    snprintf(text, sizeof text,
             "rank 1 (pid %d) is dumping core after signal 11 (Segmentation fault)", pid);
    assert_string_equal(g.deaths[1].description, text);
    const struct cox_launch_incarnation next = {.number = 2};
    struct cox_error err = {0};
    assert_int_equal(cox_supervisor_relaunch(g.supervisor, 1, &next, group_deadline(), &err), 0);
    assert_int_not_equal(cox_supervisor_pid(g.supervisor, 1), pid);
    assert_int_equal(core_size(&core), 0);
    core_release(&core);
    core_await_end(pid);
    assert_true(core_size(&core) > 0);
    assert_int_equal(g.deaths[1].times, 1);
    assert_false(cox_supervisor_ended(g.supervisor, 1));
    group_free(&g);
    snprintf(text, sizeof text, "rank 1 (pid %d) has ended, its core is written\n", pid);
    assert_string_equal(core.log, text);
    core_free(&core);
}

/* Without a replacement, the rank's text says in the end how it ended. */
static void p2_a_rank_that_has_dumped_core_says_so(void **state)
{
    (void)state;
    struct held_core core;
    struct group g;
    core_hold(&core);
    const pid_t pid = core_dump(&core, &g, CORE_SCRIPT);
    core_release(&core);
    core_await_end(pid);
    char text[200], wanted[200];
    snprintf(wanted, sizeof wanted,
             "rank 1 (pid %d) was killed by signal 11 (Segmentation fault) (core dumped)", pid);
    const uint64_t deadline_ns = group_deadline();
    do /* it is reaped a moment before */
        cox_supervisor_describe(g.supervisor, 1, text, sizeof text);
    while (strcmp(text, wanted) != 0 && cox_now_ns() < deadline_ns);
    assert_string_equal(text, wanted);
    group_free(&g);
    core_free(&core);
}

/* What the wrapper does meanwhile is of no interest, and it ends with the process. */
static void p2_a_wrapped_rank_that_dumps_core_is_dead(void **state)
{
    (void)state;
    struct held_core core;
    struct group g;
    core_hold(&core);
    const pid_t pid = core_dump(&core, &g, "sleep 1000 & echo pid $!; wait; exec sleep 1000");
    const pid_t wrapper = cox_supervisor_pid(g.supervisor, 1);
    char text[200];
    snprintf(
        text, sizeof text,
        "rank 1 (pid %d, in its wrapper %d) is dumping core after signal 11 (Segmentation fault)",
        pid, wrapper);
    assert_string_equal(g.deaths[1].description, text);
    core_release(&core);
    core_await_end(pid);
    core_await_end(wrapper);
    assert_true(core_size(&core) > 0);
    assert_int_equal(g.deaths[1].times, 1);
    group_free(&g);
    core_free(&core);
}

/* A process that another one has started, here this one, is reaped by that. Its core is not waited
 * for, and not cut off. */
static void p2_a_registered_rank_that_dumps_core_is_dead(void **state)
{
    (void)state;
    struct held_core core;
    struct group g;
    core_hold(&core);
    char script[128], text[200], byte;
    snprintf(script, sizeof script, "cd %s; ulimit -c unlimited; echo; exec sleep 1000 >&-",
             core.folder);
    int fds[2];
    assert_int_equal(pipe2(fds, O_CLOEXEC), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fds[1], 1);
    char *const argv[] = {"sh", "-c", script, NULL};
    pid_t pid;
    assert_int_equal(posix_spawn(&pid, "/bin/sh", &actions, NULL, argv, environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    assert_int_equal(read(fds[0], &byte, 1), 1);
    close(fds[0]);
    close(fds[1]);
    group_init(&g);
    const struct cox_supervise_options options = {
        .rank_count = 2,
        .ranks = g.ranks,
        .external = true,
        .prefix = "/test",
        .hooks = {.context = &g, .line = on_line, .death = on_death},
        .log = {on_core_log, &core},
    };
    struct cox_error err = {0};
    assert_int_equal(cox_supervisor_start(&options, &g.supervisor, &err), 0);
    assert_int_equal(cox_supervisor_register(g.supervisor, 1, pid, 0), 0);
    core_begin(&core, &g, pid);
    snprintf(text, sizeof text,
             "rank 1 (pid %d) is dumping core after signal 11 (Segmentation fault)", pid);
    assert_string_equal(g.deaths[1].description, text);
    core_release(&core);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    assert_true(core_size(&core) > 0);
    char later[200];
    cox_supervisor_describe(g.supervisor, 1, later, sizeof later);
    snprintf(text, sizeof text, "rank 1 (pid %d) was killed by signal 11 (Segmentation fault)",
             pid);
    assert_string_equal(later, text);
    assert_int_equal(cox_supervisor_release_slot(g.supervisor, 1, group_deadline(), &err), 0);
    group_free(&g);
    assert_string_equal(core.log, "");
    core_free(&core);
}

/* The group that ends waits for the core, and its log says so. */
static void m15_end_waits_for_a_core(void **state)
{
    (void)state;
    struct held_core core;
    struct group g;
    core_hold(&core);
    core.released_by_log = true;
    const pid_t pid = core_dump(&core, &g, CORE_SCRIPT);
    group_free(&g);
    char text[300];
    snprintf(text, sizeof text,
             "the group ends when rank 1 (pid %d) has written its core; kill -9 %d cuts it off\n"
             "rank 1 (pid %d) has ended, its core is written\n",
             pid, pid, pid);
    assert_string_equal(core.log, text);
    assert_true(core_size(&core) > 0);
    core_free(&core);
}

/* But not for one that does not grow. */
static void m15_end_cuts_a_core_that_hangs(void **state)
{
    (void)state;
    struct held_core core;
    struct group g;
    core_hold(&core);
    const pid_t pid = core_dump(&core, &g, CORE_SCRIPT);
    group_free(&g);
    assert_int_equal(kill(pid, 0), -1);
    assert_non_null(strstr(core.log, "has ended, its core is cut off"));
    assert_int_equal(core_size(&core), 0);
    core_free(&core);
}

/* Runs this program again with other arguments. */
static pid_t helper_start(const char *mode, int *ret_read_fd)
{
    int fds[2];
    assert_int_equal(pipe2(fds, O_CLOEXEC), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fds[1], 9);
    char *const argv[] = {"supervise_test", (char *)mode, NULL};
    pid_t pid;
    assert_int_equal(posix_spawn(&pid, "/proc/self/exe", &actions, NULL, argv, environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    close(fds[1]);
    *ret_read_fd = fds[0];
    return pid;
}

static int helper_wait(pid_t pid)
{
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* Starts workers that hear of nothing, tells their pids, and waits to be killed. */
static int helper_orphan(void)
{
    struct group g;
    group_start(&g, 4,
                "trap '' HUP INT TERM; [ $R = 3 ] && kill -STOP $$; echo ready; exec sleep 1000");
    for (uint32_t rank = 0; rank < 3; rank++)
        group_await_line(&g, rank, false, "ready");
    pid_t pids[4];
    for (uint32_t rank = 0; rank < 4; rank++)
        pids[rank] = cox_supervisor_pid(g.supervisor, rank);
    if (write(9, pids, sizeof pids) != sizeof pids)
        return 1;
    for (;;)
        pause();
}

static void p2_workers_die_with_the_coordinator(void **state)
{
    (void)state;
    int fd, pidfds[4];
    pid_t helper = helper_start("orphan", &fd), pids[4];
    assert_int_equal(read(fd, pids, sizeof pids), sizeof pids);
    for (int i = 0; i < 4; i++) {
        pidfds[i] = (int)syscall(SYS_pidfd_open, pids[i], 0);
        assert_true(pidfds[i] >= 0);
        assert_false(pidfd_is_dead(pidfds[i], 0));
    }
    kill(helper, SIGKILL);
    for (int i = 0; i < 4; i++) {
        assert_true(pidfd_is_dead(pidfds[i], PATIENCE_MS));
        close(pidfds[i]);
    }
    assert_int_equal(helper_wait(helper), 128 + SIGKILL);
    close(fd);
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

static void m14_host_without_standard_fds(void **state)
{
    (void)state;
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
        struct cox_error err = {0};
        int r = group_try(&g, 3, command, false, &err);
        group_free(&g);
        siginfo_t info;
        if (count_fds() != fds || waitid(P_ALL, 0, &info, WEXITED | WNOHANG) == 0)
            return 2;
        if (r == 0)
            return failures >= 4 ? 0 : 3;
        if (r != -EAGAIN || err.code != r)
            return 4;
        failures++;
    }
    return 5;
}

static void m14_process_shortage_undoes_everything(void **state)
{
    (void)state;
    int fd;
    int status = helper_wait(helper_start("few", &fd));
    close(fd);
    if (status == 77)
        skip();
    assert_int_equal(status, 0);
}

static void m15_end_is_bounded_whatever_workers_do(void **state)
{
    (void)state;
    struct group g;
    /* 0 leaves by itself, 1 at SIGTERM, 2 ignores it, 3 is stopped and would end at SIGTERM, 4 is
     * stopped and ignores it, 5 leaves at SIGTERM with a status of its own. */
    group_start(
        &g, 6,
        "case $R in 0) echo ready; exit 0;; 2) trap '' TERM HUP INT;; 4) trap '' TERM;; 5) trap 'kill $!; exit 6' TERM;; esac; echo ready; [ $R = 3 -o $R = 4 ] && kill -STOP $$; [ $R != 5 ] && exec sleep 1000; sleep 1000 & wait");
    for (uint32_t rank = 0; rank < 6; rank++)
        group_await_line(&g, rank, false, "ready");
    group_await_death(&g, 0);
    uint64_t start_ns = cox_now_ns();
    assert_int_equal(cox_supervisor_end(g.supervisor, 50, 1500), 5);
    uint64_t took_ns = cox_now_ns() - start_ns;
    assert_true(took_ns >= 1550 * COX_NSEC_PER_MSEC);
    assert_true(took_ns < 15000 * COX_NSEC_PER_MSEC);
    const int signals[] = {0, SIGTERM, SIGKILL, SIGTERM, SIGKILL, 0};
    for (uint32_t rank = 0; rank < 6; rank++) {
        assert_int_equal(g.deaths[rank].times, 1);
        assert_int_equal(g.deaths[rank].how.signal, signals[rank]);
    }
    assert_int_equal(g.deaths[5].how.exit_status, 6);
    assert_int_equal(cox_supervisor_end(g.supervisor, 1000, 1000), 0);
    group_free(&g);
}

static void m15_end_waits_for_workers_that_leave(void **state)
{
    (void)state;
    struct group g;
    group_start(&g, 4, "sleep 0.2");
    assert_int_equal(cox_supervisor_end(g.supervisor, PATIENCE_MS, PATIENCE_MS), 0);
    assert_int_equal(g.death_count, 4);
    group_free(&g);
}

static void m15_free_ends_all_processes(void **state)
{
    (void)state;
    for (uint32_t n = 1; n <= 8; n *= 2) {
        struct group g;
        group_start(&g, n, "trap '' TERM; echo ready; exec sleep 1000");
        for (uint32_t rank = 0; rank < n; rank++)
            group_await_line(&g, rank, false, "ready");
        g.supervisor = cox_supervisor_free(g.supervisor);
        assert_int_equal(g.death_count, n);
        group_free(&g);
    }
}

static void m14_host_that_ignores_sigchld(void **state)
{
    (void)state;
    signal(SIGCHLD, SIG_IGN);
    struct group g;
    group_start(&g, 4, "echo line; exit 3");
    group_await_end(&g);
    for (uint32_t rank = 0; rank < 4; rank++) {
        assert_string_equal(group_line(&g, rank, false, 0), "line");
        assert_int_equal(g.deaths[rank].times, 1);
        assert_false(g.deaths[rank].how.known);
        assert_non_null(strstr(g.deaths[rank].description, "SIGCHLD"));
    }
    group_free(&g);
    struct cox_error err = {0};
    const char *const command[] = {"/no/such/worker", NULL};
    assert_int_equal(group_try(&g, 2, command, false, &err), COX_EXEC_FAILED);
    group_free(&g);
    signal(SIGCHLD, SIG_DFL);
}

static void m17_two_supervisors_at_once(void **state)
{
    (void)state;
    struct group a, b;
    group_start(&a, 2, "echo a; exec sleep 1000");
    group_start(&b, 2, "echo b; exec sleep 1000");
    for (uint32_t rank = 0; rank < 2; rank++) {
        group_await_line(&a, rank, false, "a");
        group_await_line(&b, rank, false, "b");
    }
    group_free(&a);
    assert_false(cox_supervisor_dead(b.supervisor, 0, NULL));
    assert_false(cox_supervisor_dead(b.supervisor, 1, NULL));
    group_free(&b);
}

/* Voluntary switches of the supervisor's thread: how often it went to sleep. */
static long supervisor_switches(void)
{
    long switches = -1;
    DIR *dir = opendir("/proc/self/task");
    assert_non_null(dir);
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
        char path[300], line[200];
        bool ours = false;
        snprintf(path, sizeof path, "/proc/self/task/%s/status", entry->d_name);
        FILE *file = fopen(path, "re");
        while (file && fgets(line, sizeof line, file)) {
            ours = ours || strcmp(line, "Name:\tcox-supervise\n") == 0;
            if (ours)
                sscanf(line, "voluntary_ctxt_switches: %ld", &switches);
        }
        if (file)
            fclose(file);
    }
    closedir(dir);
    return switches;
}

static uint64_t process_cpu_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts);
    return (uint64_t)ts.tv_sec * COX_NSEC_PER_SEC + (uint64_t)ts.tv_nsec;
}

static void p5_idle_costs_no_wakeup(void **state)
{
    (void)state;
    struct group g;
    /* One is dead, one has closed its output, one is merely silent. */
    group_start(
        &g, 3,
        "echo ready; [ $R = 0 ] && exit; [ $R = 1 ] && exec sleep 1000 >&- 2>&-; exec sleep 1000");
    for (uint32_t rank = 0; rank < 3; rank++)
        group_await_line(&g, rank, false, "ready");
    group_await_death(&g, 0);
    /* The two ends of file may come a little later; a wake-up that repeats is in every window.
     * Measured over time, because the absence of something is. */
    uint64_t deadline_ns = group_deadline();
    bool idle = false;
    while (!idle && cox_now_ns() < deadline_ns) {
        long switches = supervisor_switches();
        uint64_t cpu_ns = process_cpu_ns();
        nanosleep(&(struct timespec){.tv_nsec = 300000000}, NULL);
        uint64_t used_ns = process_cpu_ns() - cpu_ns;
        assert_true(switches >= 0);
        idle = supervisor_switches() == switches && used_ns < 60 * COX_NSEC_PER_MSEC;
    }
    assert_true(idle);
    group_free(&g);
}

int main(int argc, char **argv)
{
    if (argc == 2)
        return strcmp(argv[1], "orphan") == 0 ? helper_orphan()
               : strcmp(argv[1], "few") == 0  ? helper_few()
                                              : helper_closed((unsigned)atoi(argv[1]));
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
        TEST(m14_every_rank_gets_environment_and_flags),
        TEST(m14_environment_and_working_directory),
        TEST(m14_lines_carry_rank_and_stream),
        TEST(m14_long_and_binary_lines),
        TEST(m14_lines_do_not_depend_on_how_they_arrive),
        TEST(m14_last_lines),
        TEST(m14_a_flood_starves_no_client),
        TEST(m14_how_a_worker_ended),
        TEST(m14_a_grandchild_with_the_pipe_hides_no_death),
        TEST(m15_what_a_worker_leaves_behind_ends_with_it),
        TEST(m14_reading_is_bounded),
        TEST(m14_ranks_take_turns),
        TEST(m14_b40_exec_failure_is_reported),
        TEST(m14_exec_failure_of_a_later_rank_ends_the_earlier),
        TEST(m14_arguments_are_checked),
#if COX_TESTING
        TEST(b2_a_process_stopped_before_exec_is_given_up),
        TEST(m14_a_new_process_copies_no_memory),
#endif
        TEST(b15_a_worker_has_only_its_standard_fds),
        TEST(m14_a_worker_starts_with_default_signals),
        TEST(b15_fd_shortage_undoes_everything),
        TEST(p8_a_rank_is_dead_when_no_process_serves_it),
        TEST(m15_a_wrapped_worker_has_its_grace),
        TEST(p2_a_wrapper_reports_how_its_worker_ended),
        TEST(p2_a_death_is_seen_before_the_last_lines_are_reported),
        TEST(p2_a_debugger_delays_no_other_rank),
        TEST(p2_a_rank_that_dumps_core_is_dead),
        TEST(p2_a_rank_that_has_dumped_core_says_so),
        TEST(p2_a_wrapped_rank_that_dumps_core_is_dead),
        TEST(p2_a_registered_rank_that_dumps_core_is_dead),
        TEST(m15_end_waits_for_a_core),
        TEST(m15_end_cuts_a_core_that_hangs),
        TEST(p2_workers_die_with_the_coordinator),
        TEST(m14_host_without_standard_fds),
        TEST(m14_process_shortage_undoes_everything),
        TEST(m15_end_is_bounded_whatever_workers_do),
        TEST(m15_end_waits_for_workers_that_leave),
        TEST(m15_free_ends_all_processes),
        TEST(m14_host_that_ignores_sigchld),
        TEST(m17_two_supervisors_at_once),
        TEST(p5_idle_costs_no_wakeup),
#undef TEST
    };
    return cmocka_run_group_tests_name("supervise", tests, NULL, NULL);
}
