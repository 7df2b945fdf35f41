/* coxswain-deaths: how long it takes until the death of a worker is an error at the caller, and
 * until workers end with their coordinator. Prints, judges nothing. This program is worker and, for
 * the second figure, coordinator, too. */
#include "channel/base/idioms.h"
#include "channel/base/peer.h"
#include "coordinator/executor/core.h"
#include "group.h"
#include "measure.h"
#include "options.h"
#include "rows.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define RANK_COUNT_MAX 16
#define SERIES_MAX 100000
#define DEADLINE_MS 60000
/* What does not happen within this does not happen. */
#define PATIENCE_MS 60000
#define COORDINATOR_FLAG "--coordinator"
#define HELD "held"

extern char **environ;

struct deaths_options {
    /* private memory on top of what a worker has anyhow */
    struct options_list sizes_mib;
    size_t rank_count;
    /* of a worker, per size and way to wait */
    size_t kills;
    /* killed per state */
    size_t coordinators;
    /* NULL: none */
    const char *json_path;
};

static const char usage_text[] =
    "usage: coxswain-deaths [OPTION...]\n"
    "Kills workers and coordinators, a new group for each, and tells when it was seen.\n"
    "  --kills N         workers killed, per size, half with submit, half with call (1000)\n"
    "  --coordinators N  coordinators killed, per state of their workers (200)\n"
    "  --sizes LIST      MiB of private memory of the killed worker (0,64,512)\n"
    "  --ranks N         workers of a group (2)\n"
    "  --json FILE       also writes the kills of workers to FILE\n";

/* ---- the worker ---- */

struct worker_context {
    /* a request, for ever */
    bool holds;
};

static int worker_opaque(void *context, const uint8_t *request, size_t request_size, uint8_t *reply,
                         size_t reply_capacity, size_t *ret_reply_size, struct cox_error *err)
{
    const struct worker_context *own = context;
    (void)request, (void)request_size, (void)reply, (void)reply_capacity, (void)err;
    if (own->holds) {
        printf(HELD "\n");
        fflush(stdout);
        for (;;)
            pause();
    }
    *ret_reply_size = 0;
    return 0;
}

/* --worker RANK SIZE: that rank (-1: every rank) has so many MiB, and holds what it is asked. */
static int worker_parse(void *context, uint32_t own_rank, int argc, char **argv)
{
    struct worker_context *own = context;
    if (argc != 2)
        return COX_INVALID;
    const int rank = atoi(argv[0]);
    const size_t size = (size_t)strtoul(argv[1], NULL, 10) << 20;
    own->holds = rank < 0 || (uint32_t)rank == own_rank;
    void *memory = own->holds && size ? mmap(NULL, size, PROT_READ | PROT_WRITE,
                                             MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
                                      : NULL;
    if (memory == MAP_FAILED)
        return -errno;
    if (memory)
        memset(memory, 1, size);
    return 0;
}

static int worker_main(int argc, char **argv)
{
    static const struct cox_worker_callbacks callbacks = {
        .size = sizeof(struct cox_worker_callbacks), .opaque = worker_opaque};
    struct worker_context own = {0};
    return group_worker_main(argc, argv, &callbacks, worker_parse, &own, NULL);
}

/* ---- groups ---- */

struct group {
    struct cox_executor *executor;
    /* once per rank that has a request in its hand */
    sem_t held;
    sem_t ended;
    /* Of the completion. */
    uint64_t ended_ns;
    int status;
    /* ranks that were called dead */
    uint32_t dead_count;
    pid_t dead_pid;
};

static void on_line(void *context, uint32_t rank, bool is_stderr, const char *text)
{
    struct group *group = context;
    if (strcmp(text, HELD) == 0)
        sem_post(&group->held);
    else
        group_show_line(context, rank, is_stderr, text);
}

static void on_death(void *context, uint32_t rank, const char *text)
{
    (void)context, (void)rank, (void)text; /* that is what is measured */
}

/* rank: the one that holds requests and has size_mib; -1: all ranks. */
static int deaths_start(struct group *group, uint32_t rank_count, int rank, size_t size_mib,
                        bool wrapped, struct cox_error *err)
{
    char program[4096], rank_text[16], size_text[24];
    int r = options_program_path(program, sizeof program);
    if (r)
        return cox_fail(err, r, "/proc/self/exe: %s", cox_status_text(r));
    snprintf(rank_text, sizeof rank_text, "%d", rank);
    snprintf(size_text, sizeof size_text, "%zu", size_mib);
    const char *const direct[] = {program, WORKER_FLAG, rank_text, size_text, NULL};
    const char *const inside[] = {
        "sh", "-c", "\"$0\" \"$@\"; true", program, WORKER_FLAG, rank_text, size_text, NULL};
    const struct cox_executor_options options = {
        .size = sizeof(struct cox_executor_options),
        .rank_count = rank_count,
        .workers.command = wrapped ? inside : direct,
        .hooks.context = group,
        .hooks.line = on_line,
        .hooks.death = on_death,
    };
    *group = (struct group){0};
    sem_init(&group->held, 0, 0);
    sem_init(&group->ended, 0, 0);
    return cox_executor_start(&options, &group->executor, err);
}

static void group_free(struct group *group)
{
    group->executor = cox_executor_free(group->executor);
    sem_destroy(&group->held);
    sem_destroy(&group->ended);
}

static void on_completion(void *context, const struct cox_completion *completion)
{
    uint64_t now = measure_now_ns();
    struct group *group = context;
    group->ended_ns = now;
    group->status = completion->status;
    for (uint32_t rank = 0; rank < completion->rank_count; rank++)
        if (completion->ranks[rank].outcome == COX_OUTCOME_DEAD) {
            group->dead_count++;
            group->dead_pid = completion->ranks[rank].pid;
        }
    sem_post(&group->ended);
}

/* ---- figures ---- */

/* Differences of stamps, of two threads: a little below zero is possible. */
struct series {
    int64_t *values_ns;
    size_t count;
};

static int compare_signed(const void *a, const void *b)
{
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static void series_print(struct series *series)
{
    if (series->count == 0) {
        printf("  %9s  %9s  %9s", "-", "-", "-");
        return;
    }
    qsort(series->values_ns, series->count, sizeof *series->values_ns, compare_signed);
    printf("  %9.1f  %9.1f  %9.1f", (double)series->values_ns[series->count / 2] / 1e3,
           (double)series->values_ns[series->count * 99 / 100] / 1e3,
           (double)series->values_ns[series->count - 1] / 1e3);
}

/* Sorted by series_print. */
static void series_json(json_t *row, const char *name, const struct series *series)
{
    char key[32];
    for (int percent = 50; percent < 100; percent += 49) {
        snprintf(key, sizeof key, "%s_p%d_us", name, percent);
        const int64_t ns = series->values_ns[series->count * (size_t)percent / 100];
        json_object_set_new(row, key, json_real((double)ns / 1e3));
    }
}

static bool series_init(struct series *series, size_t capacity)
{
    *series = (struct series){.values_ns = calloc(capacity, sizeof(int64_t))};
    return series->values_ns != NULL;
}

static void series_deinit(struct series *series)
{
    free(series->values_ns);
}

static void series_add(struct series *series, uint64_t from_ns, uint64_t to_ns)
{
    series->values_ns[series->count++] = (int64_t)(to_ns - from_ns);
}

static size_t resident_kib(pid_t pid)
{
    char path[64];
    size_t pages = 0;
    snprintf(path, sizeof path, "/proc/%jd/statm", (intmax_t)pid);
    FILE *file = fopen(path, "re");
    if (file && fscanf(file, "%*u %zu", &pages) != 1)
        pages = 0;
    if (file)
        fclose(file);
    return pages * (size_t)sysconf(_SC_PAGESIZE) / 1024;
}

/* ---- kills of a worker ---- */

/* The thread that kills, and sees the death through a pidfd of its own; and one that it wakes then,
 * as the supervisor wakes the thread that gathers: what that takes, beside the same end of the same
 * process. */
struct killer {
    struct group *group;
    pid_t pid;
    int pidfd;
    uint64_t killed_ns;
    uint64_t readable_ns;
    sem_t seen;
    uint64_t woken_ns;
    size_t resident_kib;
};

static void *killer_main(void *context)
{
    struct killer *killer = context;
    struct pollfd fd = {.fd = killer->pidfd, .events = POLLIN};
    group_sem_wait(&killer->group->held);
    killer->resident_kib = resident_kib(killer->pid);
    killer->killed_ns = measure_now_ns();
    kill(killer->pid, SIGKILL);
    while (poll(&fd, 1, PATIENCE_MS) < 0 && errno == EINTR)
        continue;
    killer->readable_ns = measure_now_ns();
    sem_post(&killer->seen);
    return NULL;
}

static void *woken_main(void *context)
{
    struct killer *killer = context;
    group_sem_wait(&killer->seen);
    killer->woken_ns = measure_now_ns();
    return NULL;
}

struct kill_row {
    struct series from_kill, from_readable, control;
    /* the sum */
    size_t resident_kib;
    /* not PEER_DEAD, or not of that rank alone */
    size_t wrong;
};

/* One group, one death, with a request in flight. */
static int measure_kill(uint32_t rank_count, size_t size_mib, bool by_call, uint32_t victim,
                        struct kill_row *row, struct cox_error *err)
{
    struct group group;
    int r = deaths_start(&group, rank_count, (int)victim, size_mib, false, err);
    if (r)
        return r;
    struct killer killer = {.group = &group, .pid = cox_executor_pid(group.executor, victim)};
    killer.pidfd = (int)syscall(SYS_pidfd_open, killer.pid, 0);
    pthread_t thread, woken;
    sem_init(&killer.seen, 0, 0);
    r = killer.pidfd < 0 ? -errno : -pthread_create(&woken, NULL, woken_main, &killer);
    if (r == 0 && (r = -pthread_create(&thread, NULL, killer_main, &killer)) != 0) {
        sem_post(&killer.seen);
        pthread_join(woken, NULL);
    }
    if (r) {
        group_free(&group);
        return cox_fail(err, r, "watching a worker: %s", cox_status_text(r));
    }
    const struct cox_submit_options submit = {.size = sizeof(struct cox_submit_options),
                                              .gather = COX_GATHER_ALL,
                                              .deadline_ns = cox_deadline_after_ms(DEADLINE_MS)};
    if (by_call) {
        r = cox_executor_call_opaque(group.executor, "", 1, &submit, on_completion, &group, err);
        group.ended_ns = measure_now_ns(); /* the return, not the hook call */
        r = r == COX_PEER_DEAD ? 0 : r;
    } else {
        r = cox_executor_set_handler(group.executor, COX_CHANNEL_EXECUTE, on_completion, &group);
        if (r == 0)
            r = cox_executor_submit_opaque(group.executor, "", 1, &submit, NULL, err);
        if (r == 0)
            group_sem_wait(&group.ended);
    }
    if (r)
        sem_post(&group.held); /* there is nothing to measure; the thread is let go */
    pthread_join(thread, NULL);
    pthread_join(woken, NULL);
    sem_destroy(&killer.seen);
    if (r == 0) {
        series_add(&row->from_kill, killer.killed_ns, group.ended_ns);
        series_add(&row->from_readable, killer.readable_ns, group.ended_ns);
        series_add(&row->control, killer.readable_ns, killer.woken_ns);
        row->resident_kib += killer.resident_kib;
        row->wrong +=
            group.status != COX_PEER_DEAD || group.dead_count != 1 || group.dead_pid != killer.pid;
    }
    close(killer.pidfd);
    group_free(&group);
    return r;
}

static int measure_kills(const struct deaths_options *options, size_t size_mib, bool by_call,
                         json_t *rows, struct cox_error *err)
{
    const uint32_t rank_count = (uint32_t)options->rank_count;
    size_t kills = (options->kills + 1) / 2;
    struct kill_row row = {0};
    int r = 0;
    if (!series_init(&row.from_kill, kills) || !series_init(&row.from_readable, kills) ||
        !series_init(&row.control, kills))
        r = cox_fail(err, -ENOMEM, "no memory for samples");
    for (size_t i = 0; r == 0 && i < kills; i++)
        r = measure_kill(rank_count, size_mib, by_call, (uint32_t)i % rank_count, &row, err);
    if (r == 0) {
        printf("%8.1f  %-6s  %6zu", (double)row.resident_kib / 1024 / (double)kills,
               by_call ? "call" : "submit", kills);
        series_print(&row.from_kill);
        series_print(&row.from_readable);
        series_print(&row.control);
        printf("  %5zu\n", row.wrong);
        fflush(stdout);
        json_t *json = json_pack(
            "{s:f, s:s, s:i, s:i}", "resident_mib", (double)row.resident_kib / 1024 / (double)kills,
            "by", by_call ? "call" : "submit", "kills", (int)kills, "wrong", (int)row.wrong);
        series_json(json, "kill", &row.from_kill);
        series_json(json, "readable", &row.from_readable);
        series_json(json, "control", &row.control);
        json_array_append_new(rows, json);
    }
    series_deinit(&row.from_kill);
    series_deinit(&row.from_readable);
    series_deinit(&row.control);
    return r;
}

/* ---- kills of a coordinator ---- */

enum doing { IDLE, BLOCKED, STOPPED };

static const struct {
    const char *name;
    enum doing doing;
    bool wrapped;
} states[] = {
    {"idle", IDLE, false},
    {"blocked", BLOCKED, false},
    {"stopped", STOPPED, false},
    {"idle, in sh", IDLE, true},
    {"blocked, in sh", BLOCKED, true},
    {"stopped, in sh", STOPPED, true},
};
#define STATE_COUNT (sizeof states / sizeof states[0])

static void pass_completion(void *context, const struct cox_completion *completion)
{
    (void)context, (void)completion;
}

/* --coordinator RANKS STATE MIB: writes the pids that serve, and waits to be killed. */
static int coordinator_main(char **argv)
{
    uint32_t rank_count = (uint32_t)strtoul(argv[2], NULL, 10);
    size_t state = strtoul(argv[3], NULL, 10), size_mib = strtoul(argv[4], NULL, 10);
    struct group group;
    struct cox_error err = {0};
    int r = deaths_start(&group, rank_count, -1, size_mib, states[state].wrapped, &err);
    const struct cox_submit_options submit = {.size = sizeof(struct cox_submit_options),
                                              .gather = COX_GATHER_ALL,
                                              .deadline_ns = COX_DEADLINE_NEVER};
    if (r == 0 && states[state].doing == BLOCKED) {
        r = cox_executor_set_handler(group.executor, COX_CHANNEL_EXECUTE, pass_completion, NULL);
        if (r == 0)
            r = cox_executor_submit_opaque(group.executor, "", 1, &submit, NULL, &err);
        for (uint32_t rank = 0; r == 0 && rank < rank_count; rank++)
            group_sem_wait(&group.held);
    }
    if (r) {
        fprintf(stderr, "coxswain-deaths: %s\n", err.text);
        return 1;
    }
    pid_t pids[RANK_COUNT_MAX];
    for (uint32_t rank = 0; rank < rank_count; rank++)
        pids[rank] = cox_executor_pid(group.executor, rank);
    if (write(STDOUT_FILENO, pids, rank_count * sizeof *pids) < 0)
        return 1;
    for (;;)
        pause();
}

/* The only child of a process with one thread. */
static pid_t only_child(pid_t pid)
{
    char path[96];
    int child = -1;
    snprintf(path, sizeof path, "/proc/%jd/task/%jd/children", (intmax_t)pid, (intmax_t)pid);
    FILE *file = fopen(path, "re");
    if (file && fscanf(file, "%d", &child) != 1)
        child = -1;
    if (file)
        fclose(file);
    return child;
}

static int coordinator_start(const struct deaths_options *options, size_t state, size_t size_mib,
                             pid_t *ret_pid, pid_t *workers, struct cox_error *err)
{
    char program[4096], ranks[16], number[16], size[24];
    int out[2], r = options_program_path(program, sizeof program);
    if (r)
        return cox_fail(err, r, "/proc/self/exe: %s", cox_status_text(r));
    if (pipe2(out, O_CLOEXEC) < 0)
        return cox_fail(err, -errno, "pipe: %s", cox_status_text(-errno));
    snprintf(ranks, sizeof ranks, "%zu", options->rank_count);
    snprintf(number, sizeof number, "%zu", state);
    snprintf(size, sizeof size, "%zu", size_mib);
    char *const argv[] = {program, (char[]){COORDINATOR_FLAG}, ranks, number, size, NULL};
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
    r = -posix_spawn(ret_pid, program, &actions, NULL, argv, environ);
    posix_spawn_file_actions_destroy(&actions);
    close(out[1]);
    ssize_t wanted = (ssize_t)(options->rank_count * sizeof *workers);
    if (r == 0 && read(out[0], workers, (size_t)wanted) != wanted) {
        waitpid(*ret_pid, NULL, 0);
        r = -EPIPE;
    }
    close(out[0]);
    if (r)
        return cox_fail(err, r, "a coordinator: %s", cox_status_text(r));
    for (uint32_t rank = 0; rank < options->rank_count; rank++) {
        if (states[state].wrapped)
            workers[rank] = only_child(workers[rank]);
        if (states[state].doing != STOPPED)
            continue;
        kill(workers[rank], SIGSTOP);
        while (!cox_peer_stopped(workers[rank]))
            sched_yield();
    }
    return 0;
}

/* fds[0] is the coordinator's. One thread for all of them: the order in which it sees them is the
 * order in which they became readable, or they did between two looks. */
static size_t watch_ends(struct pollfd *fds, uint64_t *ends_ns, uint32_t count)
{
    uint32_t left = count;
    while (left > 0) {
        int n = poll(fds, count, PATIENCE_MS);
        uint64_t now = measure_now_ns();
        if (n == 0)
            break;
        for (uint32_t i = 0; n > 0 && i < count; i++)
            if (fds[i].revents) {
                ends_ns[i] = now;
                fds[i].fd = -1;
                left--;
            }
    }
    return left;
}

static int measure_coordinator(const struct deaths_options *options, size_t state, size_t size_mib,
                               struct series *series, size_t *missing, struct cox_error *err)
{
    pid_t pid, workers[RANK_COUNT_MAX];
    int r = coordinator_start(options, state, size_mib, &pid, workers, err);
    if (r)
        return r;
    struct pollfd fds[1 + RANK_COUNT_MAX];
    int pidfds[1 + RANK_COUNT_MAX];
    uint64_t ends_ns[1 + RANK_COUNT_MAX] = {0};
    const uint32_t count = 1 + (uint32_t)options->rank_count;
    for (uint32_t i = 0; i < count; i++) {
        pidfds[i] = (int)syscall(SYS_pidfd_open, i ? workers[i - 1] : pid, 0);
        fds[i] = (struct pollfd){.fd = pidfds[i], .events = POLLIN};
        if (pidfds[i] < 0)
            r = cox_fail(err, -errno, "pidfd_open: %s", cox_status_text(-errno));
    }
    kill(pid, SIGKILL);
    if (r == 0)
        *missing += watch_ends(fds, ends_ns, count);
    for (uint32_t i = 0; i < count; i++) {
        if (i > 0 && r == 0 && ends_ns[i])
            series_add(series, ends_ns[0], ends_ns[i]);
        cox_close_fd(&pidfds[i]);
    }
    waitpid(pid, NULL, 0);
    return r;
}

static int measure_coordinators(const struct deaths_options *options, size_t state, size_t size_mib,
                                struct cox_error *err)
{
    struct series series;
    size_t missing = 0;
    if (!series_init(&series, options->coordinators * options->rank_count))
        return cox_fail(err, -ENOMEM, "no memory for samples");
    int r = 0;
    for (size_t i = 0; r == 0 && i < options->coordinators; i++)
        r = measure_coordinator(options, state, size_mib, &series, &missing, err);
    if (r == 0) {
        printf("%8zu  %-14s  %6zu", size_mib, states[state].name, options->coordinators);
        series_print(&series);
        printf("  %5zu\n", missing);
        fflush(stdout);
    }
    series_deinit(&series);
    return r;
}

/* ---- the program ---- */

static int measure_all(const struct deaths_options *options, json_t *rows, struct cox_error *err)
{
    const struct options_list *sizes = &options->sizes_mib;
    int r = 0;
    if (options->kills) {
        printf("a worker is killed with a request in its hand; %zu"
               " ranks; us until the handler is entered (submit) or the call returns\n"
               "%8s  %-6s  %6s  %31s  %31s  %31s  %5s\n"
               "%8s  %-6s  %6s  %9s  %9s  %9s  %9s  %9s  %9s  %9s  %9s  %9s\n",
               options->rank_count, "resident", "", "", "from kill()", "from its pidfd readable",
               "to a thread that is woken", "wrong", "MiB", "by", "kills", "p50", "p99", "max",
               "p50", "p99", "max", "p50", "p99", "max");
        for (size_t s = 0; r == 0 && s < sizes->count; s++)
            for (int by_call = 0; r == 0 && by_call < 2; by_call++)
                r = measure_kills(options, sizes->values[s], by_call, rows, err);
    }
    if (r == 0 && options->coordinators) {
        printf(
            "\nthe coordinator is killed; us from its pidfd readable to each worker's pidfd readable\n%8s  %-14s  %6s  %9s  %9s  %9s  %5s\n",
            "MiB", "workers", "kills", "p50", "p99", "max", "never");
        for (size_t state = 0; r == 0 && state < STATE_COUNT; state++)
            r = measure_coordinators(options, state, 0, err);
        for (size_t s = 0; r == 0 && s < sizes->count; s++)
            if (sizes->values[s])
                r = measure_coordinators(options, 0, sizes->values[s], err);
    }
    return r;
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], WORKER_FLAG) == 0)
        return worker_main(argc, argv);
    if (argc == 5 && strcmp(argv[1], COORDINATOR_FLAG) == 0)
        return coordinator_main(argv);
    struct deaths_options options = {
        .sizes_mib = {{0, 64, 512}, 3}, .rank_count = 2, .kills = 1000, .coordinators = 200};
    const struct option_spec specs[] = {
        {.name = "kills", .number = &options.kills, .max = SERIES_MAX},
        {.name = "coordinators", .number = &options.coordinators, .max = SERIES_MAX},
        {.name = "sizes", .list = &options.sizes_mib, .max = 1 << 20},
        {.name = "ranks", .number = &options.rank_count, .min = 1, .max = RANK_COUNT_MAX},
        {.name = "json", .text = &options.json_path},
        {.name = NULL},
    };
    struct cox_error err = {0};
    int r = options_parse(argc, argv, specs, usage_text);
    if (r >= 0)
        return r;
    json_t *rows = json_array();
    r = measure_all(&options, rows, &err);
    if (r)
        fprintf(stderr, "coxswain-deaths: %s\n", err.text);
    return rows_write("coxswain-deaths", options.json_path, rows) || r != 0;
}
