/* coxswain-replace: what the channel costs when one dead rank is replaced. Prints, judges nothing.
 * This program is worker, too.
 *
 * A group of N ranks is in a step: every rank waits in the rank group for one, which is killed. The
 * group is recovered by its policy (recovery.h), as `coxswain run --on-death restart` does, and the
 * step is run again.
 *
 * In the figure ("channel"): from the victim's pidfd readable to the entry of the handler of the
 * first step that succeeded, that is: noticing the death and ending the step on the other ranks,
 * the recovery thread, new wakeups, lines and incarnation (named and sealed), the new process's
 * options and attaching, the init that is said again to all ranks, the rank group formed anew in
 * memory of its own, the step. Not in it: fork and exec, from the call of clone to the entry of the
 * worker's main (printed beside it); loading a model, since there is none: an init of this worker
 * forms the group and does nothing else; what an engine loop plans; what the death itself takes in
 * the kernel, from kill() to the pidfd readable. A pidfd is readable a little before the thread
 * that waits for it runs: of that thread's stamp and that of the executor's own hook the earlier
 * one counts. */
#include "channel/base/idioms.h"
#include "coordinator/executor/core.h"
#include "coordinator/recovery/recovery.h"
#include "proto/executor.pb-c.h"
#include "group.h"
#include "measure.h"
#include "options.h"
#include "rows.h"

#include <coxswain/group.h>

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define RANK_COUNT_MAX 32
#define RUN_COUNT_MAX 100000
#define PATIENCE_MS 60000
#define TOKEN 7
#define VALUE_SIZE 64

struct replace_options {
    struct options_list worlds;
    size_t runs;
    /* NULL: none */
    const char *json_path;
};

static const char usage_text[] =
    "usage: coxswain-replace [--ranks LIST] [--runs N] [--json FILE]\n"
    "Kills a rank in the middle of a step and tells how long it is until the next step is done, without fork,\n"
    "exec and model.\n"
    "  --ranks LIST  numbers of ranks (2,4,8)\n"
    "  --runs N      ranks killed, per number and kind of group (200)\n"
    "  --json FILE   also writes every run to FILE\n";

/* In memory of both sides. Stamps are written by a new process, and read once a step of it is done.
 */
struct shared {
    /* rank + 1 that stays in its step; by the coordinator */
    _Atomic uint32_t victim;
    /* ranks that are in that step; counted by them */
    _Atomic uint32_t inside;
    struct {
        /* of the rank's newest process */
        _Atomic uint64_t main_ns, init_ns;
    } ranks[RANK_COUNT_MAX];
};

/* ---- the worker ---- */

struct worker_context {
    struct shared *shared;
    struct cox_group *group;
    uint64_t rank_group_incarnation;
    const struct cox_batch *batch;
    const struct cox_init_request *init;
    struct cox_worker *worker;
    uint64_t main_ns;
    uint32_t rank, rank_count;
};

static bool worker_given_up(void *context)
{
    const struct worker_context *own = context;
    return (own->batch && cox_batch_cancelled(own->batch)) ||
           (own->init &&
            cox_worker_cancelled(own->worker, COX_CHANNEL_EXECUTE, own->init->sequence));
}

static int worker_init(void *context, const struct cox_init_request *request,
                       struct cox_init_result *result, struct cox_error *err)
{
    struct worker_context *own = context;
    struct cox_group_options options = *request->group;
    if (atomic_load(&own->shared->ranks[own->rank].init_ns) == 0)
        atomic_store(&own->shared->ranks[own->rank].init_ns, measure_now_ns());
    options.deadline_ns = cox_deadline_after_ms(PATIENCE_MS);
    options.cancelled = worker_given_up;
    options.context = own;
    own->rank_count = options.rank_count;
    own->group = cox_group_leave(own->group);
    own->init = request;
    int r = cox_group_join(&options, &own->group, err);
    own->init = NULL;
    result->npu_block_count = 16;
    result->max_position_embeddings = 64;
    result->start_thinking_id = result->stop_thinking_id = -1;
    result->kv_cache_count = 1;
    result->kv_caches[0] =
        (struct cox_kv_cache_desc){.block_count = 16, .block_size = 16, .compression_ratio = 1};
    return r;
}

static int worker_execute(void *context, const struct cox_batch *batch,
                          struct cox_batch_output *outputs, struct cox_error *err)
{
    struct worker_context *own = context;
    uint8_t value[VALUE_SIZE] = {(uint8_t)own->rank}, values[VALUE_SIZE * RANK_COUNT_MAX];
    uint32_t victim = atomic_load(&own->shared->victim);
    if (victim)
        atomic_fetch_add(&own->shared->inside, 1);
    while (victim == own->rank + 1)
        pause();
    own->batch = batch;
    int r = cox_group_gather(own->group, value, sizeof value, values,
                             cox_deadline_after_ms(PATIENCE_MS), err);
    own->batch = NULL;
    for (uint32_t row = 0; r == 0 && row < batch->row_count; row++)
        outputs[row].token = TOKEN + values[VALUE_SIZE * (own->rank_count - 1)];
    return r;
}

static int worker_parse(void *context, uint32_t rank, int argc, char **argv)
{
    struct worker_context *own = context;
    own->shared = argc == 1 ? group_memory_map(argv[0], sizeof *own->shared) : NULL;
    if (!own->shared)
        return COX_INVALID;
    own->rank = rank;
    atomic_store(&own->shared->ranks[rank].main_ns, own->main_ns);
    atomic_store(&own->shared->ranks[rank].init_ns, 0);
    return 0;
}

/* --worker FILE */
static int worker_main(int argc, char **argv, uint64_t main_ns)
{
    static const struct cox_worker_callbacks callbacks = {.size =
                                                              sizeof(struct cox_worker_callbacks),
                                                          .init = worker_init,
                                                          .execute = worker_execute};
    struct worker_context own = {.main_ns = main_ns};
    int r = group_worker_main(argc, argv, &callbacks, worker_parse, &own, &own.worker);
    cox_group_leave(own.group);
    return r;
}

/* ---- fork is looked at from outside ---- */

static _Atomic uint64_t clone_ns;

int __real_clone(int (*main)(void *argument), void *stack, int flags, void *argument, ...);
int __wrap_clone(int (*main)(void *argument), void *stack, int flags, void *argument, ...);

/* The process that it begins has this one's memory. CLONE_PIDFD is the only flag with an argument.
 */
int __wrap_clone(int (*main)(void *argument), void *stack, int flags, void *argument, ...)
{
    va_list list;
    va_start(list, argument);
    int *pidfd = va_arg(list, int *);
    va_end(list);
    atomic_store(&clone_ns, measure_now_ns());
    return __real_clone(main, stack, flags, argument, pidfd);
}

/* ---- the group ---- */

struct group {
    struct cox_executor *executor;
    struct cox_recovery *recovery;
    struct shared *shared;
    int shared_fd;
    uint32_t rank_count;
    /* of the last death, by the hook */
    _Atomic uint64_t told_ns;
    sem_t ended;
    uint64_t ended_ns;
    int status;
    /* another token than is right */
    bool odd;
};

static void on_death(void *context, uint32_t rank, const char *text)
{
    struct group *group = context;
    atomic_store(&group->told_ns, measure_now_ns());
    if (group->recovery)
        cox_recovery_death(group->recovery, rank, text);
}

static void on_completion(void *context, const struct cox_completion *completion)
{
    uint64_t now = measure_now_ns();
    struct group *group = context;
    group->ended_ns = now;
    group->status = completion->status;
    const Coxswain__ExecuteResponse *response =
        completion->payload ? completion->payload->response : NULL;
    const Coxswain__ExecuteModelResponse *model =
        response ? response->execute_model_response : NULL;
    const Coxswain__StepResult *step = model ? model->step : NULL;
    group->odd =
        completion->status == 0 &&
        (!step || step->n_tokens != 1 || step->tokens[0] != TOKEN + (int32_t)group->rank_count - 1);
    sem_post(&group->ended);
}

static void group_deinit(struct group *group)
{
    if (group->executor)
        cox_executor_stop(group->executor);
    cox_recovery_free(group->recovery);
    group->executor = cox_executor_free(group->executor);
    if (group->shared)
        munmap(group->shared, sizeof *group->shared);
    cox_close_fd(&group->shared_fd);
    sem_destroy(&group->ended);
}

static int group_init(struct group *group, uint32_t rank_count, bool sealed, struct cox_error *err)
{
    char program[4096], file[GROUP_PATH_SIZE];
    void *memory = NULL;
    *group = (struct group){.shared_fd = -1, .rank_count = rank_count};
    sem_init(&group->ended, 0, 0);
    int r = options_program_path(program, sizeof program);
    if (r)
        return cox_fail(err, r, "/proc/self/exe: %s", cox_status_text(r));
    r = group_memory_new(sizeof *group->shared, &group->shared_fd, file, &memory, err);
    if (r)
        return r;
    group->shared = memory;
    const char *const command[] = {program, WORKER_FLAG, file, NULL};
    const struct cox_executor_options options = {
        .size = sizeof(struct cox_executor_options),
        .rank_count = rank_count,
        .workers.command = command,
        .memory.attach = sealed ? COX_ATTACH_SEALED : COX_ATTACH_NAMED,
        .hooks.context = group,
        .hooks.line = group_show_line,
        .hooks.death = on_death,
    };
    /* No pause between two deaths of a rank, of which there are many here. */
    const struct cox_recovery_options policy = {
        .policy.on_death = COX_ON_DEATH_RESTART,
        .policy.restart_max = 1000,
        .policy.window_ms = 1,
        .policy.backoff_min_ms = 1,
        .policy.backoff_max_ms = 1,
    };
    struct cox_init_summary summary;
    r = cox_executor_start(&options, &group->executor, err);
    if (r == 0)
        r = cox_executor_set_handler(group->executor, COX_CHANNEL_EXECUTE, on_completion, group);
    if (r == 0)
        r = cox_executor_init(group->executor, NULL, 0, cox_deadline_after_ms(PATIENCE_MS),
                              &summary, err);
    if (r == 0)
        r = cox_recovery_start(group->executor, &policy, &group->recovery, err);
    return r;
}

/* ---- a step ---- */

/* One sequence of three tokens, announced: as after every recovery. Returns what submit does. */
static int step_submit(struct group *group, struct cox_error *err)
{
    int32_t tokens[] = {1, 2, 3}, blocks[] = {0};
    uint32_t slot[] = {0}, position[] = {0}, count[] = {3};
    Coxswain__StepBlockTable table = COXSWAIN__STEP_BLOCK_TABLE__INIT;
    Coxswain__StepBlockTable *tables[] = {&table};
    Coxswain__StepSequence sequence = COXSWAIN__STEP_SEQUENCE__INIT;
    Coxswain__StepSequence *announced[] = {&sequence};
    Coxswain__StepDelta delta = COXSWAIN__STEP_DELTA__INIT;
    Coxswain__ExecuteModelRequest model = COXSWAIN__EXECUTE_MODEL_REQUEST__INIT;
    Coxswain__ExecuteRequest request = COXSWAIN__EXECUTE_REQUEST__INIT;
    table.n_blocks = 1;
    table.blocks = blocks;
    sequence.has_seq_id = sequence.has_slot = 1;
    sequence.seq_id = 1;
    sequence.n_tokens = 3;
    sequence.tokens = tokens;
    sequence.n_tables = 1;
    sequence.tables = tables;
    delta.has_base_sequence = delta.has_table_count = 1;
    delta.table_count = 1;
    delta.n_announced = delta.n_row_slot = delta.n_row_position = delta.n_row_token_count = 1;
    delta.announced = announced;
    delta.row_slot = slot;
    delta.row_position = position;
    delta.row_token_count = count;
    model.step = &delta;
    model.has_forward_type = 1;
    model.forward_type = COXSWAIN__FORWARD_TYPE__PREFILL;
    request.has_execute_type = 1;
    request.execute_type = COXSWAIN__EXECUTE_TYPE__MODEL_INFER;
    request.request_case = COXSWAIN__EXECUTE_REQUEST__REQUEST_EXECUTE_MODEL_REQUEST;
    request.execute_model_request = &model;
    const struct cox_submit_options options = {.size = sizeof(struct cox_submit_options),
                                               .gather = COX_GATHER_RANK0,
                                               .deadline_ns = cox_deadline_after_ms(PATIENCE_MS)};
    return cox_executor_submit(group->executor, &request, &options, NULL, err);
}

/* Until one succeeds, as an engine loop does it. *ret_submitted_ns: that one. */
static int step_succeed(struct group *group, uint64_t *ret_submitted_ns, struct cox_error *err)
{
    for (int turn = 0; turn < 1000; turn++) {
        struct cox_error why = {0};
        *ret_submitted_ns = measure_now_ns();
        int r = step_submit(group, &why);
        if (r == 0) {
            group_sem_wait(&group->ended);
            r = group->status;
            if (r == 0)
                return group->odd ? cox_fail(err, -EBADMSG, "the step has another token") : 0;
            cox_fail(&why, r, "a step failed: %s", cox_status_text(r));
        }
        if (r != COX_PEER_DEAD && r != COX_STATE && r != COX_ABORTED && r != COX_LATE)
            return cox_fail(err, r, "%s", why.text);
        bool late = r == COX_LATE;
        r = cox_recovery_await(group->recovery, COX_DEADLINE_NEVER, &why);
        if (r != 0 && r != COX_STALE)
            return cox_fail(err, r, "%s", why.text);
        if (late && r == 0) /* no rank is dead; a rank still in the step will leave it soon */
            usleep(100);
    }
    return cox_fail(err, COX_TIMEOUT, "the group is not recovered");
}

/* ---- one death ---- */

enum figure {
    FIGURE_CHANNEL, /* what the target is about */
    FIGURE_NOTICED, /* readable -> clone */
    FIGURE_START,   /* clone -> main: not counted */
    FIGURE_ATTACH,  /* main -> its init callback is entered */
    FIGURE_INIT,    /* -> all ranks have answered it, and the step is submitted */
    FIGURE_STEP,
    FIGURE_COUNT,
};

static const char *const figure_names[FIGURE_COUNT] = {
    "channel", "noticed", "fork_exec", "attach", "init", "step",
};

struct watcher {
    int pidfd;
    uint64_t readable_ns;
};

static void *watcher_main(void *context)
{
    struct watcher *watcher = context;
    struct pollfd fd = {.fd = watcher->pidfd, .events = POLLIN};
    while (poll(&fd, 1, PATIENCE_MS) < 0 && errno == EINTR)
        continue;
    watcher->readable_ns = measure_now_ns();
    return NULL;
}

static int watch_death(struct group *group, uint32_t victim, struct watcher *watcher,
                       struct cox_error *err)
{
    pid_t pid = cox_executor_pid(group->executor, victim);
    pthread_t thread;
    /* All are in the step: the others wait in the group. */
    const uint64_t deadline_ns = cox_deadline_after_ms(60000);
    while (atomic_load(&group->shared->inside) < group->rank_count) {
        if (cox_now_ns() >= deadline_ns)
            return cox_fail(err, COX_TIMEOUT, "a rank did not come into the step");
        usleep(50);
    }
    watcher->pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    int r = watcher->pidfd < 0 ? -errno : -pthread_create(&thread, NULL, watcher_main, watcher);
    if (r)
        return cox_fail(err, r, "watching a worker: %s", cox_status_text(r));
    atomic_store(&group->shared->victim, 0);
    kill(pid, SIGKILL);
    group_sem_wait(&group->ended);
    pthread_join(thread, NULL);
    return group->status == COX_PEER_DEAD
               ? 0
               : cox_fail(err, -EBADMSG, "the step ended with '%s', expected the death",
                          cox_status_text(group->status));
}

static int measure_one(struct group *group, uint32_t victim, uint64_t figures[FIGURE_COUNT],
                       struct cox_error *err)
{
    struct watcher watcher = {.pidfd = -1};
    uint64_t submitted_ns = 0;
    atomic_store(&group->shared->inside, 0);
    atomic_store(&group->shared->victim, victim + 1);
    int r = step_submit(group, err);
    if (r == 0)
        r = watch_death(group, victim, &watcher, err);
    if (r == 0)
        r = step_succeed(group, &submitted_ns, err);
    cox_close_fd(&watcher.pidfd);
    if (r)
        return r;
    uint64_t told = atomic_load(&group->told_ns), cloned = atomic_load(&clone_ns);
    uint64_t from = told < watcher.readable_ns ? told : watcher.readable_ns;
    uint64_t begun = atomic_load(&group->shared->ranks[victim].main_ns);
    uint64_t init = atomic_load(&group->shared->ranks[victim].init_ns);
    /* It may have slept between its stamp and the submit. */
    submitted_ns = submitted_ns < init ? init : submitted_ns;
    if (!(from <= cloned && cloned <= begun && begun <= init && init <= submitted_ns &&
          submitted_ns <= group->ended_ns))
        return cox_fail(err, -EBADMSG,
                        "stamps that are not in order: after the death %" PRId64 " clone, %" PRId64
                        " main, %" PRId64 " init, %" PRId64 " step, %" PRId64 " done (ns)",
                        (int64_t)(cloned - from), (int64_t)(begun - from), (int64_t)(init - from),
                        (int64_t)(submitted_ns - from), (int64_t)(group->ended_ns - from));
    figures[FIGURE_NOTICED] = cloned - from;
    figures[FIGURE_START] = begun - cloned;
    figures[FIGURE_ATTACH] = init - begun;
    figures[FIGURE_INIT] = submitted_ns - init;
    figures[FIGURE_STEP] = group->ended_ns - submitted_ns;
    figures[FIGURE_CHANNEL] = group->ended_ns - from - figures[FIGURE_START];
    return 0;
}

/* ---- many ---- */

struct row {
    uint32_t rank_count;
    bool sealed;
    /* in order of time */
    uint64_t *samples[FIGURE_COUNT];
};

/* Sorts. */
static void row_print(struct row *row, size_t runs)
{
    uint64_t *channel = row->samples[FIGURE_CHANNEL];
    for (int f = 0; f < FIGURE_COUNT; f++)
        measure_sort(row->samples[f], runs);
    printf("%5" PRIu32 "  %-6s  %5zu  %8.2f  %8.2f  %8.2f ", row->rank_count,
           row->sealed ? "sealed" : "named", runs, (double)channel[runs / 2] / 1e6,
           (double)channel[runs * 99 / 100] / 1e6, (double)channel[runs - 1] / 1e6);
    for (int f = FIGURE_CHANNEL + 1; f < FIGURE_COUNT; f++)
        printf("  %8.2f", (double)row->samples[f][runs / 2] / 1e6);
    putchar('\n');
    fflush(stdout);
}

static json_t *row_json(const struct row *row, size_t runs)
{
    char name[32];
    json_t *json = json_pack("{s:i, s:s}", "ranks", (int)row->rank_count, "attach",
                             row->sealed ? "sealed" : "named");
    for (int f = 0; f < FIGURE_COUNT; f++) {
        snprintf(name, sizeof name, "%s_us", figure_names[f]);
        json_object_set_new(json, name, rows_samples(row->samples[f], runs, 1e3));
    }
    return json;
}

static void row_deinit(struct row *row)
{
    for (int f = 0; f < FIGURE_COUNT; f++)
        free(row->samples[f]);
}

static int measure_row(struct row *row, size_t runs, json_t *rows, struct cox_error *err)
{
    struct group group;
    int r = group_init(&group, row->rank_count, row->sealed, err);
    for (int f = 0; r == 0 && f < FIGURE_COUNT; f++)
        if (!(row->samples[f] = calloc(runs, sizeof **row->samples)))
            r = cox_fail(err, -ENOMEM, "no memory for samples");
    /* The first is not counted: page faults, caches. */
    for (size_t i = 0; r == 0 && i <= runs; i++) {
        uint64_t figures[FIGURE_COUNT];
        r = measure_one(&group, (uint32_t)(i % row->rank_count), figures, err);
        for (int f = 0; r == 0 && i && f < FIGURE_COUNT; f++)
            row->samples[f][i - 1] = figures[f];
    }
    group_deinit(&group);
    if (r == 0)
        json_array_append_new(rows, row_json(row, runs));
    if (r == 0)
        row_print(row, runs);
    row_deinit(row);
    return r;
}

static int measure_all(const struct replace_options *options, json_t *rows, struct cox_error *err)
{
    int r = 0;
    printf(
        "a rank is killed in a step and replaced; ms from its pidfd readable to the next step done, without fork, exec and model;\nbehind that the p50 of its parts, and of fork and exec\n"
        "%5s  %-6s  %5s  %8s  %8s  %8s   %8s  %8s  %8s  %8s  %8s\n",
        "ranks", "attach", "runs", "p50", "p99", "max", "noticed", "fork,exec", "attach", "init",
        "step");
    for (int sealed = 0; r == 0 && sealed < 2; sealed++)
        for (size_t i = 0; r == 0 && i < options->worlds.count; i++) {
            struct row row = {.rank_count = (uint32_t)options->worlds.values[i], .sealed = sealed};
            r = measure_row(&row, options->runs, rows, err);
        }
    return r;
}

int main(int argc, char **argv)
{
    const uint64_t main_ns = measure_now_ns();
    if (argc > 1 && strcmp(argv[1], WORKER_FLAG) == 0)
        return worker_main(argc, argv, main_ns);
    struct replace_options options = {.worlds = {{2, 4, 8}, 3}, .runs = 200};
    const struct option_spec specs[] = {
        {.name = "ranks", .list = &options.worlds, .min = 1, .max = RANK_COUNT_MAX},
        {.name = "runs", .number = &options.runs, .min = 1, .max = RUN_COUNT_MAX},
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
        fprintf(stderr, "coxswain-replace: %s\n", err.text);
    return rows_write("coxswain-replace", options.json_path, rows) || r != 0;
}
