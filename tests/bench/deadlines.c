/* coxswain-deadlines: how long after its deadline a request that a rank does not answer is
 * COX_TIMEOUT at the caller. Prints, judges nothing. This program is the worker, too. */
#include "channel/base/base_internal.h"
#include "channel/base/futex.h"
#include "channel/base/idioms.h"
#include "group.h"
#include "measure.h"
#include "options.h"
#include "rows.h"

#include <coxswain/requests.h>

#include <errno.h>
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
#define TURNS_MAX 100
#define PATIENCE_MS 60000
/* A deadline is so far away, and up to so much more; evenly, so that it falls into every phase
 * of whatever ticks. */
#define AWAY_MIN_NS (2 * COX_NSEC_PER_MSEC)
#define AWAY_MORE_NS (6 * COX_NSEC_PER_MSEC)
/* Of the requests beside that are in flight at a time on the execute channel: all that a group
 * takes. */
#define BESIDE_DEPTH 4
#define REQUEST_SIZE 256
#define EVERY_RANK UINT32_MAX

struct deadlines_options {
    size_t rank_count;
    /* of each row, in each turn */
    size_t samples;
    /* each has a new group for every row */
    size_t turns;
    /* The first deadline that passes has the stacks of all ranks gathered, as it does anywhere: at
     * most once in 10 s, by a process for each rank. Deadlines that pass meanwhile are late as
     * beside any other program. */
    bool stacks;
    /* NULL: none */
    const char *json_path;
};

static const char usage_text[] =
    "usage: coxswain-deadlines [OPTION...]\n"
    "Asks all ranks for what one of them holds back, and tells how long after its deadline the request ends.\n"
    "  --samples N  deadlines of each kind in a turn (69: the worst of those is their 99th percentile)\n"
    "  --turns N    of all kinds, each with new groups (7)\n"
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

static int worker_parse(void *context, uint32_t rank, int argc, char **argv)
{
    struct worker_context *own = context;
    own->rank = rank;
    own->held = argc == 1 ? group_memory_map(argv[0], sizeof *own->held) : NULL;
    return own->held ? 0 : COX_INVALID;
}

/* --worker PATH: of the memory that says what is held. */
static int worker_main(int argc, char **argv)
{
    static const struct cox_worker_callbacks callbacks = {.size =
                                                              sizeof(struct cox_worker_callbacks),
                                                          .opaque = worker_opaque,
                                                          .link_status = worker_link_status};
    struct worker_context own = {0};
    return group_worker_main(argc, argv, &callbacks, worker_parse, &own, NULL);
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

static int deadlines_start(struct group *group, const struct deadlines_options *asked,
                           enum cox_attach attach, enum way way, struct cox_error *err)
{
    char program[4096], path[GROUP_PATH_SIZE];
    void *memory = NULL;
    _cox_cleanup_(cox_close_fd) int fd = -1;
    *group = (struct group){.way = way, .seed = UINT64_C(88172645463325252)};
    sem_init(&group->ended, 0, 0);
    int r = options_program_path(program, sizeof program);
    if (r)
        return cox_fail(err, r, "/proc/self/exe: %s", cox_status_text(r));
    r = group_memory_new(sizeof *group->held, &fd, path, &memory, err);
    if (r)
        return r;
    group->held = memory;
    const char *const command[] = {program, WORKER_FLAG, path, NULL};
    const struct cox_executor_options options = {
        .size = sizeof(struct cox_executor_options),
        .rank_count = (uint32_t)asked->rank_count,
        .workers.command = command,
        .memory.attach = attach,
        .recorder.stacks = asked->stacks ? COX_STACKS_AT_FAILURES : COX_STACKS_ON_REQUEST,
        .hooks.line = group_show_line};
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
        group_sem_wait(&group->ended);
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
    enum cox_attach attach;
    enum way way;
    int load;
    uint64_t *late_ns;
    /* in turns with them: of a thread that only sleeps until a deadline */
    uint64_t *timer_ns;
    /* of both, in all turns */
    size_t count;
    double p99_us[TURNS_MAX];
    /* ended by something else than the deadline, or before it */
    size_t wrong;
    /* requests a second, in the last turn */
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
        hold(group, (uint32_t)options->rank_count, i);
        const uint64_t deadline_ns = cox_deadline_after_ns(away_ns(group));
        const int status = ask(group, deadline_ns, &ended_ns, &why);
        let_go(group);
        row->wrong += status != COX_TIMEOUT || ended_ns < deadline_ns;
        row->late_ns[row->count] = ended_ns > deadline_ns ? ended_ns - deadline_ns : 0;
        if (status < 0 || status == COX_PEER_DEAD || status == COX_CLOSED)
            r = cox_fail(err, status, "%s", why.text);
        else
            r = settle(group, err);
        const uint64_t timer_ns = cox_deadline_after_ns(away_ns(group));
        measure_sleep_until(timer_ns);
        row->timer_ns[row->count++] = measure_now_ns() - timer_ns;
    }
    row->beside = (double)(atomic_load(&group->beside_count) - begin_count) * 1e9 /
                  (double)(measure_now_ns() - begin_ns);
    return r;
}

/* ---- rows ---- */

static double quantile_us(const uint64_t *sorted_ns, size_t count, size_t percent)
{
    return (double)sorted_ns[percent == 100 ? count - 1 : count * percent / 100] / 1e3;
}

/* Prints it, and adds it to the rows. A turn's p99 is disturbed where a program runs beside that
 * turn alone; the median of those is not, and the same where nothing runs beside. */
static void row_end(const struct deadlines_options *options, struct row *row, json_t *rows)
{
    const char *attach_name = row->attach == COX_ATTACH_SEALED ? "sealed" : "named";
    const size_t n = row->count;
    json_t *turns = rows_figures(row->p99_us, options->turns);
    measure_sort(row->late_ns, n);
    measure_sort(row->timer_ns, n);
    const double p50 = quantile_us(row->late_ns, n, 50), all = quantile_us(row->late_ns, n, 99);
    const double max = quantile_us(row->late_ns, n, 100);
    const double timer_p99 = quantile_us(row->timer_ns, n, 99);
    const double timer_max = quantile_us(row->timer_ns, n, 100);
    const double p99 = measure_median(row->p99_us, options->turns);
    printf("%-6s  %-24s  %-15s  %9.0f  %7zu  %9.1f  %9.1f  %9.1f  %9.1f  %9.1f  %9.1f  %5zu\n",
           attach_name, way_names[row->way], load_names[row->load], row->beside, n, p50, p99, all,
           max, timer_p99, timer_max, row->wrong);
    fflush(stdout);
    json_array_append_new(
        rows,
        json_pack("{s:s, s:s, s:s, s:i, s:i, s:f, s:f, s:f, s:o, s:f, s:f, s:f, s:f, s:i}",
                  "attach", attach_name, "by", way_names[row->way], "load", load_names[row->load],
                  "ranks", (int)options->rank_count, "samples", (int)n, "beside_per_s", row->beside,
                  "late_p50_us", p50, "late_p99_us", p99, "late_p99_us_of_turns", turns,
                  "late_p99_us_of_all", all, "late_max_us", max, "timer_p99_us", timer_p99,
                  "timer_max_us", timer_max, "wrong", (int)row->wrong));
}

static int measure_turn(const struct deadlines_options *options, struct row *row, size_t turn,
                        struct cox_error *err)
{
    struct group group = {0};
    int r = deadlines_start(&group, options, row->attach, row->way, err);
    if (r == 0 && row->way == WAY_SUBMIT)
        r = cox_executor_set_handler(group.executor, COX_CHANNEL_EXECUTE, on_completion, &group);
    if (r == 0 && row->load)
        r = beside_start(&group, err);
    if (r == 0)
        r = measure_deadlines(options, &group, row, err);
    const int ended = beside_end(&group, err);
    r = r ? r : ended;
    group_free(&group);
    if (r)
        return r;
    uint64_t *turn_ns = calloc(options->samples, sizeof *turn_ns);
    if (!turn_ns)
        return cox_fail(err, -ENOMEM, "no memory for samples");
    memcpy(turn_ns, row->late_ns + row->count - options->samples,
           options->samples * sizeof *turn_ns);
    measure_sort(turn_ns, options->samples);
    row->p99_us[turn] = quantile_us(turn_ns, options->samples, 99);
    free(turn_ns);
    return 0;
}

static int measure_all(const struct deadlines_options *options, json_t *json, struct cox_error *err)
{
    static struct row rows[2 * WAY_COUNT * 2];
    const size_t row_count = sizeof rows / sizeof *rows, count = options->samples * options->turns;
    int r = 0;
    printf(
        "a request is held by one of %zu"
        " ranks; us from its deadline until the handler is entered (submit) or the call returns; timer: of a thread that only sleeps\n"
        "%-6s  %-24s  %-15s  %9s  %7s  %9s  %9s  %9s  %9s  %9s  %9s  %5s\n",
        options->rank_count, "attach", "by", "load", "beside/s", "samples", "p50", "p99", "p99 all",
        "max", "timer p99", "timer max", "wrong");
    for (size_t i = 0; r == 0 && i < row_count; i++) {
        rows[i] = (struct row){.attach = i < row_count / 2 ? COX_ATTACH_NAMED : COX_ATTACH_SEALED,
                               .way = (enum way)(i / 2 % WAY_COUNT),
                               .load = i % 2,
                               .late_ns = calloc(count, sizeof(uint64_t)),
                               .timer_ns = calloc(count, sizeof(uint64_t))};
        if (!rows[i].late_ns || !rows[i].timer_ns)
            r = cox_fail(err, -ENOMEM, "no memory for samples");
    }
    for (size_t turn = 0; r == 0 && turn < options->turns; turn++)
        for (size_t i = 0; r == 0 && i < row_count; i++)
            r = measure_turn(options, &rows[i], turn, err);
    for (size_t i = 0; i < row_count; i++) {
        if (r == 0)
            row_end(options, &rows[i], json);
        free(rows[i].late_ns);
        free(rows[i].timer_ns);
    }
    return r;
}

/* ---- the program ---- */

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], WORKER_FLAG) == 0)
        return worker_main(argc, argv);
    struct deadlines_options options = {.rank_count = 8, .samples = 69, .turns = 7};
    const struct option_spec specs[] = {
        {.name = "samples", .number = &options.samples, .min = 1, .max = SAMPLES_MAX},
        {.name = "turns", .number = &options.turns, .min = 1, .max = TURNS_MAX},
        {.name = "ranks", .number = &options.rank_count, .min = 1, .max = RANK_COUNT_MAX},
        {.name = "stacks", .flag = &options.stacks},
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
        fprintf(stderr, "coxswain-deadlines: %s\n", err.text);
    return rows_write("coxswain-deadlines", options.json_path, rows) || r != 0;
}
