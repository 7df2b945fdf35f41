#include "supervise_fixture.h"

#include "channel/base/thread.h"

void on_line(void *context, uint32_t rank, bool is_stderr, const char *text)
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

void on_death(void *context, uint32_t rank, pid_t pid, const struct cox_exit *how)
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

void group_init(struct group *g)
{
    *g = (struct group){0};
    pthread_mutex_init(&g->lock, NULL);
    cox_ranks_init(g->ranks, COX_RANK_COUNT_MAX);
    cox_condition_init(&g->changed);
}

int group_try_with(struct group *g, struct cox_supervise_options options, struct cox_error *err)
{
    options.ranks = g->ranks;
    if (!options.prefix)
        options.prefix = "/test";
    if (!options.hooks.context)
        options.hooks =
            (struct cox_supervise_hooks){.context = g, .line = on_line, .death = on_death};
    return cox_supervisor_start(&options, &g->supervisor, err);
}

int group_try(struct group *g, uint32_t rank_count, const char *const *command,
              struct cox_error *err)
{
    group_init(g);
    return GROUP_TRY(g, err, .rank_count = rank_count, .command = command);
}

void group_start(struct group *g, uint32_t rank_count, const char *script)
{
    char *text;
    assert_true(asprintf(&text, "R=$COXSWAIN_RANK; %s", script) > 0);
    const char *const command[] = {"/bin/sh", "-c", text, NULL};
    int r = group_try(g, rank_count, command, test_err());
    free(text);
    assert_ok(r);
}

void group_free(struct group *g)
{
    g->supervisor = cox_supervisor_free(g->supervisor);
    for (size_t i = 0; i < g->line_count; i++)
        free(g->lines[i].text);
    free(g->lines);
    pthread_cond_destroy(&g->changed);
    pthread_mutex_destroy(&g->lock);
}

uint64_t group_deadline(void)
{
    return cox_deadline_after_ms(PATIENCE_MS);
}

bool group_wait_change(struct group *g, uint64_t deadline_ns)
{
    struct timespec ts = {(time_t)(deadline_ns / COX_NSEC_PER_SEC),
                          (long)(deadline_ns % COX_NSEC_PER_SEC)};
    return pthread_cond_timedwait(&g->changed, &g->lock, &ts) != ETIMEDOUT;
}

const char *group_await_line(struct group *g, uint32_t rank, bool is_stderr, const char *start)
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

void group_await_seen(struct group *g, uint32_t rank, uint64_t more)
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

void group_await_death(struct group *g, uint32_t rank)
{
    uint64_t deadline_ns = group_deadline();
    pthread_mutex_lock(&g->lock);
    while (g->deaths[rank].times == 0 && group_wait_change(g, deadline_ns))
        ;
    uint32_t times = g->deaths[rank].times;
    pthread_mutex_unlock(&g->lock);
    assert_int_equal(times, 1);
}

void group_await_end(struct group *g)
{
    assert_int_equal(cox_supervisor_wait(g->supervisor, group_deadline()), 0);
}

const char *group_line(struct group *g, uint32_t rank, bool is_stderr, size_t n)
{
    for (size_t i = 0; i < g->line_count; i++)
        if (g->lines[i].rank == rank && g->lines[i].is_stderr == is_stderr && n-- == 0)
            return g->lines[i].text;
    return NULL;
}

int count_fds(void)
{
    int count = 0;
    DIR *dir = opendir("/proc/self/fd");
    assert_non_null(dir);
    while (readdir(dir))
        count++;
    closedir(dir);
    return count;
}

int fds_before;

int setup(void **state)
{
    (void)state;
    fds_before = count_fds();
    return 0;
}

int teardown(void **state)
{
    (void)state;
    siginfo_t info;
    assert_int_equal(waitid(P_ALL, 0, &info, WEXITED | WNOHANG | __WALL), -1);
    assert_int_equal(errno, ECHILD);
    assert_int_equal(count_fds(), fds_before);
    return 0;
}

pid_t helper_start(const char *mode, int *ret_read_fd)
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

int helper_wait(pid_t pid)
{
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
