/* coxswain-deadlines: how long after its deadline a request that a rank does not answer is
 * COX_TIMEOUT at the caller. Prints, judges nothing. This program is the worker, too. */
#include "channel/base/base_internal.h"
#include "channel/base/futex.h"
#include "channel/base/idioms.h"
#include "measure.h"

#include <coxswain/executor.h>
#include <coxswain/requests.h>
#include <coxswain/worker.h>

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define RANK_COUNT_MAX 16
#define SAMPLES_MAX 100000
#define PATIENCE_MS 60000
/* A deadline is so far away, and up to so much more; evenly, so that it falls into every phase
 * of whatever ticks. */
#define AWAY_MIN_NS (2 * COX_NSEC_PER_MSEC)
#define AWAY_MORE_NS (6 * COX_NSEC_PER_MSEC)
/* Of the requests beside that are in flight at a time on the execute channel: all that a group
 * takes. */
#define BESIDE_DEPTH 4
#define WORKER_FLAG "--worker"
#define REQUEST_SIZE 256
#define EVERY_RANK UINT32_MAX

struct deadlines_options {
    uint32_t rank_count;
    /* of each row */
    size_t samples;
    /* The first deadline that passes has the stacks of all ranks gathered, as it does anywhere: at
     * most once in 10 s, by a process for each rank. Deadlines that pass meanwhile are late as
     * beside any other program. */
    bool stacks;
    /* NULL: none */
    const char *json_path;
    FILE *json;
};

static const char usage_text[] =
    "usage: coxswain-deadlines [OPTION...]\n"
    "Asks all ranks for what one of them holds back, and tells how long after its deadline the request ends.\n"
    "  --samples N  deadlines of each kind (500)\n"
    "  --ranks N    workers of a group (8)\n"
    "  --stacks     with the stacks that a deadline has gathered, by a process for each rank\n"
    "  --json FILE  also writes everything to FILE\n";

enum way {
    WAY_SUBMIT,  /* a handler on the response thread */
    WAY_CALL,    /* on the execute channel: the response thread gathers for the caller */
    WAY_GATHERS, /* on the link channel: the caller gathers itself */
    WAY_COUNT
};
static const char *const way_names[] = {"submit", "call", "call of the link channel"};
static const char *const load_names[] = {"idle", "requests beside"};

/* ---- the worker ---- */

/* Memory of both sides. The coordinator alone writes it. */
struct held {
    /* which holds what it is asked, plus 1; 0: none; EVERY_RANK: each */
    _Atomic uint32_t rank;
    /* on which */
    _Atomic uint32_t channel;
};

struct worker_context {
    struct held *held;
    uint32_t rank;
};

static void worker_hold(const struct worker_context *own, enum cox_channel_id channel)
{
    uint32_t rank;
    while (atomic_load(&own->held->channel) == channel &&
           ((rank = atomic_load(&own->held->rank)) == own->rank + 1 || rank == EVERY_RANK))
        cox_futex_wait(&own->held->rank, rank, COX_DEADLINE_NEVER);
}

static int worker_opaque(void *context, const uint8_t *request, size_t request_size, uint8_t *reply,
                         size_t reply_capacity, size_t *ret_reply_size, struct cox_error *err)
{
    const struct worker_context *own = context;
    (void)err;
    worker_hold(own, COX_CHANNEL_EXECUTE);
    *ret_reply_size = request_size < reply_capacity ? request_size : reply_capacity;
    memcpy(reply, request, *ret_reply_size);
    return 0;
}

static int worker_link_status(void *context, struct cox_arena *arena,
                              struct Coxswain__PDLinkStatusResponse *response,
                              struct cox_error *err)
{
    (void)arena, (void)response, (void)err;
    worker_hold(context, COX_CHANNEL_LINK);
    return 0;
}

static int held_map(const char *path, struct held **ret_held)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    void *map = fd < 0 ? MAP_FAILED
                       : mmap(NULL, sizeof **ret_held, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    const int r = map == MAP_FAILED ? -errno : 0;
    cox_close_fd(&fd);
    if (r == 0)
        *ret_held = map;
    return r;
}

/* --worker PATH: of the memory that says what is held. */
static int worker_main(int argc, char **argv)
{
    static const struct cox_worker_callbacks callbacks = {.size =
                                                              sizeof(struct cox_worker_callbacks),
                                                          .opaque = worker_opaque,
                                                          .link_status = worker_link_status};
    struct cox_worker_options options = COX_WORKER_OPTIONS_INIT;
    struct worker_context own = {0};
    struct cox_worker *worker = NULL;
    struct cox_error err = {0};
    int r = cox_worker_options_parse(&options, &argc, argv, &err);
    if (r == 0 && argc != 3)
        r = cox_fail(&err, COX_INVALID, "expected " WORKER_FLAG " PATH");
    own.rank = options.rank;
    if (r == 0 && (r = held_map(argv[2], &own.held)) != 0)
        cox_fail(&err, r, "%s: %s", argv[2], cox_status_text(r));
    if (r == 0)
        r = cox_worker_new(&options, &callbacks, &own, &worker, &err);
    if (r == 0)
        r = cox_worker_run(worker, &err);
    if (r)
        fprintf(stderr, "rank %" PRIu32 ": %s\n", options.rank, err.text);
    cox_worker_free(worker);
    return r != 0;
}

/* ---- a group ---- */

struct group {
    struct cox_executor *executor;
    struct held *held;
    enum way way;
    uint64_t seed;
    uint8_t request[REQUEST_SIZE];
    /* Of the completion of a submit. */
    sem_t ended;
    uint64_t ended_ns;
    int status;
    /* Requests beside. */
    _Atomic bool beside_ends;
    _Atomic uint64_t beside_count;
    _Atomic int beside_failure;
    _Atomic uint32_t beside_in_flight;
    /* of the link channel */
    pthread_t beside_thread;
    bool beside;
};

static void on_line(void *context, uint32_t rank, bool is_stderr, const char *text)
{
    (void)context;
    fprintf(stderr, "[rank %" PRIu32 "]%s %s\n", rank, is_stderr ? "" : ":", text);
}

static int group_start(struct group *group, uint32_t rank_count, bool stacks,
                       enum cox_attach attach, enum way way, struct cox_error *err)
{
    char program[4096], path[64];
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    if (length < 0)
        return cox_fail(err, -errno, "/proc/self/exe: %s", cox_status_text(-errno));
    program[length] = '\0';
    *group = (struct group){.way = way, .seed = UINT64_C(88172645463325252)};
    sem_init(&group->ended, 0, 0);
    _cox_cleanup_(cox_close_fd) int fd = memfd_create("coxswain-deadlines", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, sizeof *group->held) < 0)
        return cox_fail(err, -errno, "memory for what is held: %s", cox_status_text(-errno));
    snprintf(path, sizeof path, "/proc/%jd/fd/%d", (intmax_t)getpid(), fd);
    int r = held_map(path, &group->held);
    if (r)
        return cox_fail(err, r, "memory for what is held: %s", cox_status_text(r));
    const char *const command[] = {program, WORKER_FLAG, path, NULL};
    const struct cox_executor_options options = {.size = sizeof(struct cox_executor_options),
                                                 .rank_count = rank_count,
                                                 .workers.command = command,
                                                 .memory.attach = attach,
                                                 .recorder.stacks_off = !stacks,
                                                 .hooks.line = on_line};
    return cox_executor_start(&options, &group->executor, err);
}

static void group_free(struct group *group)
{
    group->executor = cox_executor_free(group->executor);
    sem_destroy(&group->ended);
    if (group->held)
        munmap(group->held, sizeof *group->held);
}

static struct cox_submit_options until(uint64_t deadline_ns)
{
    return (struct cox_submit_options){.size = sizeof(struct cox_submit_options),
                                       .gather = COX_GATHER_ALL,
                                       .deadline_ns = deadline_ns};
}

static int link_status(struct group *group, uint64_t deadline_ns, struct cox_error *err)
{
    struct cox_link_status status = {0};
    int r = cox_executor_link_status(group->executor, deadline_ns, &status, err);
    if (r == 0)
        cox_link_status_deinit(&status);
    return r;
}

/* ---- requests beside, at full rate, on the channel that is not measured ---- */

static void beside_submit(struct group *group)
{
    const struct cox_submit_options options = until(cox_deadline_after_ms(PATIENCE_MS));
    struct cox_error err = {0};
    int r = cox_executor_submit_opaque(group->executor, group->request, REQUEST_SIZE, &options,
                                       NULL, &err);
    if (r) {
        atomic_store(&group->beside_failure, r);
        atomic_fetch_sub(&group->beside_in_flight, 1);
    }
}

static void on_beside(void *context, const struct cox_completion *completion)
{
    struct group *group = context;
    atomic_fetch_add(&group->beside_count, 1);
    if (completion->status)
        atomic_store(&group->beside_failure, completion->status);
    if (atomic_load(&group->beside_ends) || completion->status)
        atomic_fetch_sub(&group->beside_in_flight, 1);
    else
        beside_submit(group);
}

static void *beside_main(void *context)
{
    struct group *group = context;
    struct cox_error err = {0};
    while (!atomic_load(&group->beside_ends) && !atomic_load(&group->beside_failure)) {
        int r = link_status(group, cox_deadline_after_ms(PATIENCE_MS), &err);
        if (r)
            atomic_store(&group->beside_failure, r);
        atomic_fetch_add(&group->beside_count, 1);
    }
    return NULL;
}

static int beside_start(struct group *group, struct cox_error *err)
{
    int r = 0;
    if (group->way != WAY_GATHERS) {
        r = -pthread_create(&group->beside_thread, NULL, beside_main, group);
    } else {
        r = cox_executor_set_handler(group->executor, COX_CHANNEL_EXECUTE, on_beside, group);
        atomic_store(&group->beside_in_flight, BESIDE_DEPTH);
        for (int i = 0; r == 0 && i < BESIDE_DEPTH; i++)
            beside_submit(group);
    }
    group->beside = r == 0;
    return r ? cox_fail(err, r, "requests beside: %s", cox_status_text(r)) : 0;
}

static int beside_end(struct group *group, struct cox_error *err)
{
    if (!group->beside)
        return 0;
    atomic_store(&group->beside_ends, true);
    if (group->way != WAY_GATHERS)
        pthread_join(group->beside_thread, NULL);
    while (group->way == WAY_GATHERS && atomic_load(&group->beside_in_flight) > 0)
        measure_sleep_until(measure_now_ns() + COX_NSEC_PER_MSEC);
    group->beside = false;
    const int r = atomic_load(&group->beside_failure);
    return r ? cox_fail(err, r, "requests beside: %s", cox_status_text(r)) : 0;
}

/* ---- one deadline ---- */

static void on_completion(void *context, const struct cox_completion *completion)
{
    const uint64_t now_ns = measure_now_ns();
    struct group *group = context;
    group->ended_ns = now_ns;
    group->status = completion->status;
    sem_post(&group->ended);
}

static uint64_t away_ns(struct group *group)
{
    group->seed ^= group->seed << 13;
    group->seed ^= group->seed >> 7;
    group->seed ^= group->seed << 17;
    return AWAY_MIN_NS + group->seed % AWAY_MORE_NS;
}

/* One rank after the other, and every second time all of them. */
static void hold(struct group *group, uint32_t rank_count, size_t i)
{
    atomic_store(&group->held->channel,
                 group->way == WAY_GATHERS ? COX_CHANNEL_LINK : COX_CHANNEL_EXECUTE);
    atomic_store(&group->held->rank, i % 2 ? EVERY_RANK : (uint32_t)(i / 2 % rank_count) + 1);
}

static void let_go(struct group *group)
{
    atomic_store(&group->held->rank, 0);
    cox_futex_wake(&group->held->rank);
}

/* *ret_ended_ns: when the caller knew. Returns what ended the request. */
static int ask(struct group *group, uint64_t deadline_ns, uint64_t *ret_ended_ns,
               struct cox_error *err)
{
    const struct cox_submit_options options = until(deadline_ns);
    int r = 0;
    switch (group->way) {
    case WAY_SUBMIT:
        r = cox_executor_submit_opaque(group->executor, group->request, REQUEST_SIZE, &options,
                                       NULL, err);
        if (r)
            return r;
        while (sem_wait(&group->ended) < 0 && errno == EINTR)
            continue;
        *ret_ended_ns = group->ended_ns;
        return group->status;
    case WAY_CALL:
        r = cox_executor_call_opaque(group->executor, group->request, REQUEST_SIZE, &options, NULL,
                                     NULL, err);
        break;
    default:
        r = link_status(group, deadline_ns, err);
    }
    *ret_ended_ns = measure_now_ns();
    return r;
}

/* All ranks answer, also what they still owe; a call waits for that, a submit does not. */
static int settle(struct group *group, struct cox_error *err)
{
    const uint64_t deadline_ns = cox_deadline_after_ms(PATIENCE_MS);
    const struct cox_submit_options options = until(deadline_ns);
    return group->way == WAY_GATHERS
               ? link_status(group, deadline_ns, err)
               : cox_executor_call_opaque(group->executor, group->request, REQUEST_SIZE, &options,
                                          NULL, NULL, err);
}

struct row {
    uint64_t *late_ns;
    /* in turns with them: of a thread that only sleeps until a deadline */
    uint64_t *timer_ns;
    /* ended by something else than the deadline, or before it */
    size_t wrong;
    /* requests a second */
    double beside;
};

static int measure_deadlines(const struct deadlines_options *options, struct group *group,
                             struct row *row, struct cox_error *err)
{
    int r = settle(group, err);
    const uint64_t begin_ns = measure_now_ns(), begin_count = atomic_load(&group->beside_count);
    for (size_t i = 0; r == 0 && i < options->samples; i++) {
        uint64_t ended_ns = 0;
        struct cox_error why = {0};
        hold(group, options->rank_count, i);
        const uint64_t deadline_ns = cox_deadline_after_ns(away_ns(group));
        const int status = ask(group, deadline_ns, &ended_ns, &why);
        let_go(group);
        row->wrong += status != COX_TIMEOUT || ended_ns < deadline_ns;
        row->late_ns[i] = ended_ns > deadline_ns ? ended_ns - deadline_ns : 0;
        if (status < 0 || status == COX_PEER_DEAD || status == COX_CLOSED)
            r = cox_fail(err, status, "%s", why.text);
        else
            r = settle(group, err);
        const uint64_t timer_ns = cox_deadline_after_ns(away_ns(group));
        measure_sleep_until(timer_ns);
        row->timer_ns[i] = measure_now_ns() - timer_ns;
    }
    row->beside = (double)(atomic_load(&group->beside_count) - begin_count) * 1e9 /
                  (double)(measure_now_ns() - begin_ns);
    return r;
}

/* ---- rows ---- */

static void row_print(const struct deadlines_options *options, enum cox_attach attach, enum way way,
                      int load, struct row *row, bool first)
{
    const char *attach_name = attach == COX_ATTACH_SEALED ? "sealed" : "named";
    measure_sort(row->late_ns, options->samples);
    measure_sort(row->timer_ns, options->samples);
    const double p50 = (double)row->late_ns[options->samples / 2] / 1e3;
    const double p99 = (double)row->late_ns[options->samples * 99 / 100] / 1e3;
    const double max = (double)row->late_ns[options->samples - 1] / 1e3;
    const double timer_p99 = (double)row->timer_ns[options->samples * 99 / 100] / 1e3;
    const double timer_max = (double)row->timer_ns[options->samples - 1] / 1e3;
    printf("%-6s  %-24s  %-15s  %9.0f  %7zu  %9.1f  %9.1f  %9.1f  %9.1f  %9.1f  %5zu\n",
           attach_name, way_names[way], load_names[load], row->beside, options->samples, p50, p99,
           max, timer_p99, timer_max, row->wrong);
    fflush(stdout);
    if (options->json)
        fprintf(
            options->json,
            "%s\n  {\"attach\": \"%s\", \"by\": \"%s\", \"load\": \"%s\", \"ranks\": %" PRIu32
            ", \"samples\": %zu, \"beside_per_s\": %.0f, \"late_p50_us\": %.1f, \"late_p99_us\": %.1f, \"late_max_us\": %.1f, \"timer_p99_us\": %.1f, \"timer_max_us\": %.1f, \"wrong\": %zu}",
            first ? "" : ",", attach_name, way_names[way], load_names[load], options->rank_count,
            options->samples, row->beside, p50, p99, max, timer_p99, timer_max, row->wrong);
}

static int measure_row(const struct deadlines_options *options, enum cox_attach attach,
                       enum way way, int load, bool first, struct cox_error *err)
{
    struct group group = {0};
    struct row row = {.late_ns = calloc(options->samples, sizeof *row.late_ns),
                      .timer_ns = calloc(options->samples, sizeof *row.timer_ns)};
    int r = row.late_ns && row.timer_ns
                ? group_start(&group, options->rank_count, options->stacks, attach, way, err)
                : cox_fail(err, -ENOMEM, "no memory for samples");
    if (r == 0 && way == WAY_SUBMIT)
        r = cox_executor_set_handler(group.executor, COX_CHANNEL_EXECUTE, on_completion, &group);
    if (r == 0 && load)
        r = beside_start(&group, err);
    if (r == 0)
        r = measure_deadlines(options, &group, &row, err);
    const int ended = beside_end(&group, err);
    r = r ? r : ended;
    group_free(&group);
    if (r == 0)
        row_print(options, attach, way, load, &row, first);
    free(row.late_ns);
    free(row.timer_ns);
    return r;
}

static int measure_all(const struct deadlines_options *options, struct cox_error *err)
{
    static const enum cox_attach attaches[] = {COX_ATTACH_NAMED, COX_ATTACH_SEALED};
    int r = 0;
    printf(
        "a request is held by one of %" PRIu32
        " ranks; us from its deadline until the handler is entered (submit) or the call returns; timer: of a thread that only sleeps\n"
        "%-6s  %-24s  %-15s  %9s  %7s  %9s  %9s  %9s  %9s  %9s  %5s\n",
        options->rank_count, "attach", "by", "load", "beside/s", "samples", "p50", "p99", "max",
        "timer p99", "timer max", "wrong");
    for (int a = 0; r == 0 && a < 2; a++)
        for (int way = 0; r == 0 && way < WAY_COUNT; way++)
            for (int load = 0; r == 0 && load < 2; load++)
                r = measure_row(options, attaches[a], (enum way)way, load, a + way + load == 0,
                                err);
    return r;
}

/* ---- the program ---- */

static bool parse_number(const char *text, size_t max, size_t *ret_value)
{
    char *end;
    errno = 0;
    unsigned long value = strtoul(text, &end, 10);
    if (errno || end == text || *end || text[0] == '-' || value == 0 || value > max)
        return false;
    *ret_value = value;
    return true;
}

/* Returns -1 to go on, or the exit status. */
static int parse_options(int argc, char **argv, struct deadlines_options *options)
{
    static const struct option names[] = {
        {"samples", required_argument, NULL, 's'}, {"ranks", required_argument, NULL, 'n'},
        {"stacks", no_argument, NULL, 't'},        {"json", required_argument, NULL, 'j'},
        {"help", no_argument, NULL, 'h'},          {NULL, 0, NULL, 0},
    };
    *options = (struct deadlines_options){.rank_count = 8, .samples = 500};
    for (int option; (option = getopt_long(argc, argv, "", names, NULL)) != -1;) {
        size_t number = options->rank_count;
        bool good = option == 's'   ? parse_number(optarg, SAMPLES_MAX, &options->samples)
                    : option == 'j' ? (options->json_path = optarg) != NULL
                    : option == 't' ? (options->stacks = true)
                    : option == 'n' ? parse_number(optarg, RANK_COUNT_MAX, &number)
                                    : false;
        options->rank_count = (uint32_t)number;
        if (!good) {
            fputs(usage_text, option == 'h' ? stdout : stderr);
            return option == 'h' ? 0 : 2;
        }
    }
    return -1;
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], WORKER_FLAG) == 0)
        return worker_main(argc, argv);
    struct deadlines_options options;
    struct cox_error err = {0};
    int r = parse_options(argc, argv, &options);
    if (r >= 0)
        return r;
    options.json = options.json_path ? fopen(options.json_path, "we") : NULL;
    if (options.json_path && !options.json) {
        fprintf(stderr, "coxswain-deadlines: %s: %s\n", options.json_path, strerror(errno));
        return 1;
    }
    if (options.json)
        fputs("{\"rows\": [", options.json);
    r = measure_all(&options, &err);
    if (r)
        fprintf(stderr, "coxswain-deadlines: %s\n", err.text);
    bool failed = options.json && (fputs("\n]}\n", options.json) < 0 || ferror(options.json));
    if (options.json && (fclose(options.json) || failed)) {
        fprintf(stderr, "coxswain-deadlines: %s could not be written\n", options.json_path);
        r = 1;
    }
    return r != 0;
}
