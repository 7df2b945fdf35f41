/* coxswain-deaths: how long it takes until the death of a worker is an error at the caller, and
 * until workers end with their coordinator. Prints, judges nothing. This program is worker and, for
 * the second figure, coordinator, too. */
#include "channel/base/idioms.h"
#include "channel/base/peer.h"
#include "coordinator/executor/core.h"
#include "measure.h"

#include <coxswain/executor.h>
#include <coxswain/worker.h>

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
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

#define SIZE_COUNT_MAX 8
#define RANK_COUNT_MAX 16
#define SERIES_MAX 100000
#define DEADLINE_MS 60000
/* What does not happen within this does not happen. */
#define PATIENCE_MS 60000
#define WORKER_FLAG "--worker"
#define COORDINATOR_FLAG "--coordinator"
#define HELD "held"

extern char **environ;

struct deaths_options {
    /* private memory on top of what a worker has anyhow */
    size_t sizes_mib[SIZE_COUNT_MAX];
    size_t size_count;
    uint32_t rank_count;
    /* of a worker, per size and way to wait */
    size_t kills;
    /* killed per state */
    size_t coordinators;
    /* NULL: none */
    const char *json_path;
    /* kills of workers are written there, too */
    FILE *json;
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
static int worker_main(int argc, char **argv)
{
    static const struct cox_worker_callbacks callbacks = {
        .size = sizeof(struct cox_worker_callbacks), .opaque = worker_opaque};
    struct cox_worker_options options = COX_WORKER_OPTIONS_INIT;
    struct worker_context own = {0};
    struct cox_worker *worker = NULL;
    struct cox_error err = {0};
    int r = cox_worker_options_parse(&options, &argc, argv, &err);
    if (r == 0 && argc != 4)
        r = cox_fail(&err, COX_INVALID, "expected " WORKER_FLAG " RANK MIB");
    if (r == 0) {
        int rank = atoi(argv[2]);
        size_t size = (size_t)strtoul(argv[3], NULL, 10) << 20;
        own.holds = rank < 0 || (uint32_t)rank == options.rank;
        void *memory = own.holds && size ? mmap(NULL, size, PROT_READ | PROT_WRITE,
                                                MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
                                         : NULL;
        if (memory == MAP_FAILED)
            r = cox_fail(&err, -errno, "no memory");
        else if (memory)
            memset(memory, 1, size);
    }
    if (r == 0)
        r = cox_worker_new(&options, &callbacks, &own, &worker, &err);
    if (r == 0)
        r = cox_worker_run(worker, &err);
    if (r)
        fprintf(stderr, "rank %" PRIu32 ": %s\n", options.rank, err.text);
    cox_worker_free(worker);
    return r != 0;
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
        fprintf(stderr, "[rank %" PRIu32 "]%s %s\n", rank, is_stderr ? "" : ":", text);
}

static void on_death(void *context, uint32_t rank, const char *text)
{
    (void)context, (void)rank, (void)text; /* that is what is measured */
}

static int program_path(char *program, size_t size, struct cox_error *err)
{
    ssize_t length = readlink("/proc/self/exe", program, size - 1);
    if (length < 0)
        return cox_fail(err, -errno, "/proc/self/exe: %s", cox_status_text(-errno));
    program[length] = '\0';
    return 0;
}

/* rank: the one that holds requests and has size_mib; -1: all ranks. */
static int group_start(struct group *group, uint32_t rank_count, int rank, size_t size_mib,
                       bool wrapped, struct cox_error *err)
{
    char program[4096], rank_text[16], size_text[24];
    int r = program_path(program, sizeof program, err);
    if (r)
        return r;
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

static void sem_wait_through(sem_t *semaphore)
{
    while (sem_wait(semaphore) < 0 && errno == EINTR)
        continue;
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
static void series_write(FILE *file, const char *name, const struct series *series)
{
    fprintf(file, ", \"%s_p50_us\": %.1f, \"%s_p99_us\": %.1f", name,
            (double)series->values_ns[series->count / 2] / 1e3, name,
            (double)series->values_ns[series->count * 99 / 100] / 1e3);
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
    sem_wait_through(&killer->group->held);
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
    sem_wait_through(&killer->seen);
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
static int measure_kill(const struct deaths_options *options, size_t size_mib, bool by_call,
                        uint32_t victim, struct kill_row *row, struct cox_error *err)
{
    struct group group;
    int r = group_start(&group, options->rank_count, (int)victim, size_mib, false, err);
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
            sem_wait_through(&group.ended);
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
                         struct cox_error *err)
{
    size_t kills = (options->kills + 1) / 2;
    struct kill_row row = {0};
    int r = 0;
    if (!series_init(&row.from_kill, kills) || !series_init(&row.from_readable, kills) ||
        !series_init(&row.control, kills))
        r = cox_fail(err, -ENOMEM, "no memory for samples");
    for (size_t i = 0; r == 0 && i < kills; i++)
        r = measure_kill(options, size_mib, by_call, (uint32_t)(i % options->rank_count), &row,
                         err);
    if (r == 0) {
        printf("%8.1f  %-6s  %6zu", (double)row.resident_kib / 1024 / (double)kills,
               by_call ? "call" : "submit", kills);
        series_print(&row.from_kill);
        series_print(&row.from_readable);
        series_print(&row.control);
        printf("  %5zu\n", row.wrong);
        fflush(stdout);
        if (options->json) {
            fprintf(options->json, "%s\n  {\"resident_mib\": %.1f, \"by\": \"%s\", \"kills\": %zu",
                    size_mib == options->sizes_mib[0] && !by_call ? "" : ",",
                    (double)row.resident_kib / 1024 / (double)kills, by_call ? "call" : "submit",
                    kills);
            series_write(options->json, "kill", &row.from_kill);
            series_write(options->json, "readable", &row.from_readable);
            series_write(options->json, "control", &row.control);
            fprintf(options->json, ", \"wrong\": %zu}", row.wrong);
        }
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
    int r = group_start(&group, rank_count, -1, size_mib, states[state].wrapped, &err);
    const struct cox_submit_options submit = {.size = sizeof(struct cox_submit_options),
                                              .gather = COX_GATHER_ALL,
                                              .deadline_ns = COX_DEADLINE_NEVER};
    if (r == 0 && states[state].doing == BLOCKED) {
        r = cox_executor_set_handler(group.executor, COX_CHANNEL_EXECUTE, pass_completion, NULL);
        if (r == 0)
            r = cox_executor_submit_opaque(group.executor, "", 1, &submit, NULL, &err);
        for (uint32_t rank = 0; r == 0 && rank < rank_count; rank++)
            sem_wait_through(&group.held);
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
    int out[2], r = program_path(program, sizeof program, err);
    if (r)
        return r;
    if (pipe2(out, O_CLOEXEC) < 0)
        return cox_fail(err, -errno, "pipe: %s", cox_status_text(-errno));
    snprintf(ranks, sizeof ranks, "%" PRIu32, options->rank_count);
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
    uint32_t count = 1 + options->rank_count;
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

static bool parse_number(const char *text, size_t max, size_t *ret_value)
{
    char *end;
    errno = 0;
    unsigned long value = strtoul(text, &end, 10);
    if (errno || end == text || *end || text[0] == '-' || value > max)
        return false;
    *ret_value = value;
    return true;
}

static bool parse_sizes(const char *text, struct deaths_options *options)
{
    char copy[128];
    char *rest = copy;
    if (snprintf(copy, sizeof copy, "%s", text) >= (int)sizeof copy)
        return false;
    options->size_count = 0;
    for (char *item; (item = strsep(&rest, ",")) != NULL; options->size_count++)
        if (options->size_count == SIZE_COUNT_MAX ||
            !parse_number(item, 1 << 20, &options->sizes_mib[options->size_count]))
            return false;
    return true;
}

/* Returns -1 to go on, or the exit status. */
static int parse_options(int argc, char **argv, struct deaths_options *options)
{
    static const struct option names[] = {
        {"kills", required_argument, NULL, 'k'},
        {"coordinators", required_argument, NULL, 'c'},
        {"sizes", required_argument, NULL, 's'},
        {"ranks", required_argument, NULL, 'n'},
        {"json", required_argument, NULL, 'j'},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    *options = (struct deaths_options){.sizes_mib = {0, 64, 512},
                                       .size_count = 3,
                                       .rank_count = 2,
                                       .kills = 1000,
                                       .coordinators = 200};
    for (int option; (option = getopt_long(argc, argv, "", names, NULL)) != -1;) {
        size_t number = options->rank_count;
        bool good = option == 's'   ? parse_sizes(optarg, options)
                    : option == 'k' ? parse_number(optarg, SERIES_MAX, &options->kills)
                    : option == 'c' ? parse_number(optarg, SERIES_MAX, &options->coordinators)
                    : option == 'j' ? (options->json_path = optarg) != NULL
                    : option == 'n' ? parse_number(optarg, RANK_COUNT_MAX, &number) && number > 0
                                    : false;
        options->rank_count = (uint32_t)number;
        if (!good) {
            fputs(usage_text, option == 'h' ? stdout : stderr);
            return option == 'h' ? 0 : 2;
        }
    }
    return -1;
}

static int measure_all(const struct deaths_options *options, struct cox_error *err)
{
    int r = 0;
    if (options->kills) {
        printf("a worker is killed with a request in its hand; %" PRIu32
               " ranks; us until the handler is entered (submit) or the call returns\n"
               "%8s  %-6s  %6s  %31s  %31s  %31s  %5s\n"
               "%8s  %-6s  %6s  %9s  %9s  %9s  %9s  %9s  %9s  %9s  %9s  %9s\n",
               options->rank_count, "resident", "", "", "from kill()", "from its pidfd readable",
               "to a thread that is woken", "wrong", "MiB", "by", "kills", "p50", "p99", "max",
               "p50", "p99", "max", "p50", "p99", "max");
        for (size_t s = 0; r == 0 && s < options->size_count; s++)
            for (int by_call = 0; r == 0 && by_call < 2; by_call++)
                r = measure_kills(options, options->sizes_mib[s], by_call, err);
    }
    if (r == 0 && options->coordinators) {
        printf(
            "\nthe coordinator is killed; us from its pidfd readable to each worker's pidfd readable\n%8s  %-14s  %6s  %9s  %9s  %9s  %5s\n",
            "MiB", "workers", "kills", "p50", "p99", "max", "never");
        for (size_t state = 0; r == 0 && state < STATE_COUNT; state++)
            r = measure_coordinators(options, state, 0, err);
        for (size_t s = 0; r == 0 && s < options->size_count; s++)
            if (options->sizes_mib[s])
                r = measure_coordinators(options, 0, options->sizes_mib[s], err);
    }
    return r;
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], WORKER_FLAG) == 0)
        return worker_main(argc, argv);
    if (argc == 5 && strcmp(argv[1], COORDINATOR_FLAG) == 0)
        return coordinator_main(argv);
    struct deaths_options options;
    struct cox_error err = {0};
    int r = parse_options(argc, argv, &options);
    if (r >= 0)
        return r;
    options.json = options.json_path ? fopen(options.json_path, "we") : NULL;
    if (options.json_path && !options.json) {
        fprintf(stderr, "coxswain-deaths: %s: %s\n", options.json_path, strerror(errno));
        return 1;
    }
    if (options.json)
        fputs("{\"rows\": [", options.json);
    r = measure_all(&options, &err);
    if (r)
        fprintf(stderr, "coxswain-deaths: %s\n", err.text);
    bool failed = options.json && (fputs("\n]}\n", options.json) < 0 || ferror(options.json));
    if (options.json && (fclose(options.json) || failed)) {
        fprintf(stderr, "coxswain-deaths: %s could not be written\n", options.json_path);
        r = 1;
    }
    return r != 0;
}
