/* supervise_core: a rank is dead, and may be replaced, while its core is still being written. */
#include "coordinator/process/launch.h"
#include "supervise_fixture.h"

#include <sys/fanotify.h>

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
    assert_ok(
        GROUP_TRY(g, test_err(), .rank_count = 2, .command = command, .log = {on_core_log, core}));
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
TEST(p2_a_rank_that_dumps_core_is_dead)
{
    _cox_cleanup_(core_free) struct held_core core;
    struct group g;
    core_hold(&core);
    const pid_t pid = core_dump(&core, &g, CORE_SCRIPT);
    char text[200];
    snprintf(text, sizeof text,
             "rank 1 (pid %d) is dumping core after signal 11 (Segmentation fault)", pid);
    assert_string_equal(g.deaths[1].description, text);
    const struct cox_launch_incarnation next = {.number = 2};
    assert_ok(cox_supervisor_relaunch(g.supervisor, 1, &next, group_deadline(), test_err()));
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
}

/* Without a replacement, the rank's text says in the end how it ended. */
TEST(p2_a_rank_that_has_dumped_core_says_so)
{
    _cox_cleanup_(core_free) struct held_core core;
    _cox_cleanup_(group_free) struct group g;
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
}

/* What the wrapper does meanwhile is of no interest, and it ends with the process. */
TEST(p2_a_wrapped_rank_that_dumps_core_is_dead)
{
    _cox_cleanup_(core_free) struct held_core core;
    _cox_cleanup_(group_free) struct group g;
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
}

/* A process that another one has started, here this one, is reaped by that. Its core is not waited
 * for, and not cut off. */
TEST(p2_a_registered_rank_that_dumps_core_is_dead)
{
    _cox_cleanup_(core_free) struct held_core core;
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
    assert_ok(
        GROUP_TRY(&g, test_err(), .rank_count = 2, .external = true, .log = {on_core_log, &core}));
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
    assert_ok(cox_supervisor_release_slot(g.supervisor, 1, group_deadline(), test_err()));
    group_free(&g);
    assert_string_equal(core.log, "");
}

/* The group that ends waits for the core, and its log says so. */
TEST(m15_end_waits_for_a_core)
{
    _cox_cleanup_(core_free) struct held_core core;
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
}

/* But not for one that does not grow. */
TEST(m15_end_cuts_a_core_that_hangs)
{
    _cox_cleanup_(core_free) struct held_core core;
    struct group g;
    core_hold(&core);
    const pid_t pid = core_dump(&core, &g, CORE_SCRIPT);
    group_free(&g);
    assert_int_equal(kill(pid, 0), -1);
    assert_contains(core.log, "has ended, its core is cut off");
    assert_int_equal(core_size(&core), 0);
}
