#include "cells.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "hosts.h"
#include "measure.h"
#include "report.h"

#define KINDS_MAX 24
#define PAIRS_MAX 64
/* Of all visits together. */
#define SPREAD_MAX 1024
#define SLICE_TIMEOUT_MS 60000
/* A round that takes longer than so in a trial is not measured: it would take the bench's whole
 * time. A brief run has measured it then. */
#define ROUND_MAX_NS UINT64_C(2000000000)
/* All slices of a pass; fewer pairs than asked for are made where they would take longer, three at
 * least. */
#define PASS_MAX_NS UINT64_C(3500000000)
#define PAIRS_MIN 3
/* Of a brief run, which has some hundred passes. */
#define BRIEF_PASS_MAX_NS UINT64_C(60000000)
#define ROUNDS_MIN 3
#define TRIALS_MAX 4

/* Of one slice; per round where it says so. */
struct slice {
    double p50_us, p99_us, mean_us;
    /* per round, of all processes */
    double cpu_us, sleeps, preempted, runs;
};

struct member {
    const struct kind *kind;
    struct process process;
    size_t bytes, reply_bytes;
    /* of a slice; 0: not tried */
    size_t rounds;
    /* of all of them, as they were tried */
    uint64_t slice_ns;
    /* the try is the only slice */
    bool is_measured;
    struct slice slices[PAIRS_MAX];
};

struct batch {
    struct bench *bench;
    const struct cell *cell;
    struct member *members;
    size_t count;
    size_t pairs;
};

bool name_chosen(const char *list, const char *name)
{
    const size_t length = strlen(name);
    if (!list)
        return true;
    for (const char *at = list; (at = strstr(at, name)) != NULL; at += length)
        if ((at == list || at[-1] == ',') && (at[length] == ',' || at[length] == '\0'))
            return true;
    return false;
}

bool bench_is_over(const struct bench *bench)
{
    return process_stopped() || (bench->end_ns != UINT64_MAX && measure_now_ns() >= bench->end_ns);
}

static size_t largest(const struct options_list *list)
{
    size_t value = 1;
    for (size_t i = 0; i < list->count; i++)
        value = list->values[i] > value ? list->values[i] : value;
    return value;
}

void bench_start(const struct bench *bench, const struct kind *kind, enum placement placement,
                 uint32_t rank_count, size_t bytes, size_t reply_bytes, struct process *process)
{
    char program[4096], numbers[4][24];
    const char *argv[24] = {program};
    struct process *home = hosts_home(bench->hosts, kind, bench->brief);
    const size_t world = kind->world ? kind->world : largest(&bench->rank_counts);
    size_t n = 1;
    *process = (struct process){.in_fd = -1, .out_fd = -1, .state = PROCESS_SKIPPED};
    if (home && home->text[0]) {
        memcpy(process->text, home->text, sizeof process->text);
        return;
    }
    if (bench_is_over(bench)) {
        process_give_up(process);
        return;
    }
    snprintf(program, sizeof program, "%s/%s", bench->folder,
             kind->program ? kind->program : "coxswain-bench");
    snprintf(numbers[0], sizeof numbers[0], "%" PRIu32, rank_count);
    snprintf(numbers[1], sizeof numbers[1], "%zu", bytes);
    snprintf(numbers[2], sizeof numbers[2], "%zu", reply_bytes);
    for (size_t i = 0; kind->words[i]; i++)
        argv[n++] = kind->words[i];
    snprintf(numbers[3], sizeof numbers[3], "%zu", world);
    const char *const flags[] = {"--ranks", "--bytes", "--reply-bytes", "--world"};
    for (int i = 0; i < (kind->host ? 4 : 3); i++) {
        argv[n++] = flags[i];
        argv[n++] = numbers[i];
    }
    if (home && home->pid > 0) {
        process_again(argv + 1, placement, bench->end_ns, home, process);
        return;
    }
    process_start(argv, placement, bench->end_ns, process);
    process->home = home;
}

/* ---- two busy loops ---- */

static void busy_start(pid_t *pids)
{
    const pid_t parent = getpid();
    for (int i = 0; i < BENCH_BUSY_LOOPS; i++) {
        pids[i] = fork();
        if (pids[i] != 0)
            continue;
        if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 || getppid() != parent)
            _exit(1);
        for (;;)
            __asm__ volatile("");
    }
}

static void busy_stop(const pid_t *pids)
{
    for (int i = 0; i < BENCH_BUSY_LOOPS; i++)
        if (pids[i] > 0) {
            kill(pids[i], SIGKILL);
            while (waitpid(pids[i], NULL, 0) < 0 && errno == EINTR)
                continue;
        }
}

/* ---- slices ---- */

/* Sorts the samples. */
static bool samples_take(const struct batch *batch, struct member *member, size_t rounds,
                         double *ret_mean_us)
{
    uint64_t *samples_ns = batch->bench->samples_ns, sum_ns = 0;
    if (!process_slice(&member->process, samples_ns, rounds, SLICE_TIMEOUT_MS))
        return false;
    for (size_t i = 0; i < rounds; i++)
        sum_ns += samples_ns[i];
    measure_sort(samples_ns, rounds);
    *ret_mean_us = (double)sum_ns / 1e3 / (double)rounds;
    return true;
}

/* counts: what the kernel has counted is read around it: of 64 processes that takes as long as a
 * slice of a brief run, which reads it around the first one alone. */
static bool slice_run(const struct batch *batch, struct member *member, size_t pair, bool counts)
{
    const uint64_t *samples_ns = batch->bench->samples_ns;
    const size_t rounds = member->rounds;
    const double n = (double)rounds;
    double mean_us;
    struct procfs_usage begin = {0}, end = {0};
    struct slice *slice = &member->slices[pair];
    process_resume(&member->process);
    if (counts)
        procfs_usage(&member->process.tree, &begin);
    const bool good = samples_take(batch, member, rounds, &mean_us);
    if (counts)
        procfs_usage(&member->process.tree, &end);
    process_pause(&member->process);
    if (!good)
        return false;
    *slice = member->slices[0];
    slice->p50_us = (double)samples_ns[rounds / 2] / 1e3;
    slice->p99_us = (double)samples_ns[rounds * 99 / 100] / 1e3;
    slice->mean_us = mean_us;
    if (counts) {
        slice->cpu_us = (double)(end.cpu_ns - begin.cpu_ns) / 1e3 / n;
        slice->sleeps = (double)(end.sleeps - begin.sleeps) / n;
        slice->preempted = (double)(end.preempted - begin.preempted) / n;
        slice->runs = (double)(end.runs - begin.runs) / n;
    }
    return true;
}

static size_t rounds_of(uint64_t time_ns, double round_us)
{
    double rounds = (double)time_ns / 1e3 / (round_us > 0.1 ? round_us : 0.1);
    if (rounds < 1)
        return 1;
    return rounds < ROUNDS_MIN         ? ROUNDS_MIN
           : rounds > BENCH_ROUNDS_MAX ? BENCH_ROUNDS_MAX
                                       : (size_t)rounds;
}

/* Trials of half a slice, until a round takes no less than before: the first rounds have page
 * faults and cold caches in them, and so would slices of few rounds. What a brief run has found
 * slow is not tried again beside loops, and of what it has found very slow it measures the trial.
 */
static void try_member(const struct batch *batch, struct member *member)
{
    const uint64_t slice_ns = batch->bench->slice_ms * UINT64_C(1000000);
    const bool brief = batch->bench->brief;
    const struct slice *slice = &member->slices[0];
    size_t rounds = 0, fit = 1;
    member->is_measured = false;
    if (brief && member->rounds == 1)
        return;
    for (int i = 0; i < TRIALS_MAX && fit > rounds + rounds / 4; i++) {
        if (i > 0 && bench_is_over(batch->bench))
            break;
        member->rounds = rounds = fit;
        if (!slice_run(batch, member, 0, i == 0))
            return;
        if (!brief && slice->mean_us * 1e3 > (double)ROUND_MAX_NS) {
            snprintf(member->process.text, sizeof member->process.text, "a round takes %.1f s",
                     slice->mean_us / 1e6);
            member->process.state = PROCESS_SKIPPED;
            return;
        }
        const bool slow = slice->mean_us * 1e3 >= 4.0 * (double)slice_ns;
        member->is_measured = brief && i == 0 && slice->mean_us * 1e3 >= (double)BRIEF_PASS_MAX_NS;
        if (brief && slow)
            break;
        /* Of the first round alone nothing is known; of slow ones few are tried. By the middle one,
         * since another program may interrupt one for longer than all others take. */
        fit = i > 0 ? rounds_of(slice_ns / 2, slice->p50_us) : slow ? ROUNDS_MIN : 2 * ROUNDS_MIN;
    }
    member->rounds = rounds_of(slice_ns, slice->p50_us);
    member->slice_ns = (uint64_t)((double)member->rounds * slice->mean_us * 1e3);
}

/* one_ns: of one slice of every kind. */
static size_t pairs_of(const struct batch *batch, uint64_t one_ns)
{
    size_t asked = batch->cell->pairs ? batch->cell->pairs : batch->bench->pairs;
    const bool brief = batch->bench->brief;
    const size_t least = brief ? 1 : PAIRS_MIN;
    size_t fit = one_ns ? (brief ? BRIEF_PASS_MAX_NS : PASS_MAX_NS) / one_ns : asked;
    asked = asked > PAIRS_MAX ? PAIRS_MAX : asked;
    fit = fit < least ? least : fit;
    return fit < asked ? fit : asked;
}

/* ---- rows ---- */

#define MEDIAN(slices, count, member) median_of(slices, count, offsetof(struct slice, member))
static json_t *median_of(const struct slice *slices, size_t count, size_t offset)
{
    double values[PAIRS_MAX];
    for (size_t i = 0; i < count; i++)
        memcpy(&values[i], (const uint8_t *)&slices[i] + offset, sizeof values[i]);
    return json_real(measure_median(values, count));
}

static json_t *row_new(const struct batch *batch, const struct member *member, bool busy)
{
    const struct cell *cell = batch->cell;
    json_t *row =
        json_pack("{s:s, s:s, s:s, s:i, s:i, s:I, s:I, s:b, s:i}", "section", cell->section, "kind",
                  member->kind->name, "placement", placement_name(cell->placement), "processors",
                  member->process.processors, "ranks", (int)cell->rank_count, "bytes",
                  (json_int_t)cell->bytes, "reply_bytes", (json_int_t)member->reply_bytes, "busy",
                  busy, "batch", batch->bench->batches);
    if (member->process.state != PROCESS_READY) {
        json_object_set_new(row, "missing", json_string(member->process.text));
    } else {
        const struct slice *slices = member->slices;
        json_t *pairs = json_array();
        for (size_t i = 0; i < batch->pairs; i++)
            json_array_append_new(pairs, json_real(slices[i].p50_us));
        json_object_set_new(row, "rounds", json_integer((json_int_t)member->rounds));
        json_object_set_new(row, "p50_us", MEDIAN(slices, batch->pairs, p50_us));
        json_object_set_new(row, "p99_us", MEDIAN(slices, batch->pairs, p99_us));
        json_object_set_new(row, "mean_us", MEDIAN(slices, batch->pairs, mean_us));
        json_object_set_new(row, "cpu_us", MEDIAN(slices, batch->pairs, cpu_us));
        json_object_set_new(row, "sleeps", MEDIAN(slices, batch->pairs, sleeps));
        json_object_set_new(row, "preempted", MEDIAN(slices, batch->pairs, preempted));
        json_object_set_new(row, "runs", MEDIAN(slices, batch->pairs, runs));
        json_object_set_new(row, "pairs", pairs);
    }
    return row;
}

static json_t *row_of(const struct bench *bench, const char *section, const char *kind,
                      const char *placement, json_int_t rank_count, json_int_t bytes, bool busy)
{
    size_t i;
    json_t *row;
    json_array_foreach(bench->rows, i, row)
    {
        if (json_integer_value(json_object_get(row, "ranks")) == rank_count &&
            json_integer_value(json_object_get(row, "bytes")) == bytes &&
            json_is_true(json_object_get(row, "busy")) == busy &&
            strcmp(json_string_value(json_object_get(row, "section")), section) == 0 &&
            strcmp(json_string_value(json_object_get(row, "placement")), placement) == 0 &&
            strcmp(json_string_value(json_object_get(row, "kind")), kind) == 0)
            return row;
    }
    return NULL;
}

/* p50 is that of all slices; another figure is the mean of those of the visits. */
static void row_visit(json_t *row, json_t *visit)
{
    static const char *const names[] = {"p99_us",    "mean_us", "cpu_us", "sleeps",
                                        "preempted", "runs",    "rounds"};
    json_t *pairs = json_object_get(row, "pairs");
    const double visits = row_figure(row, "visits") + 1;
    if (!pairs)
        return;
    json_array_extend(pairs, json_object_get(visit, "pairs"));
    json_object_set_new(row, "visits", json_integer((json_int_t)visits));
    json_object_set_new(row, "p50_us", json_real(spread_of(pairs, NULL).median));
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const double mean = row_figure(row, names[i]);
        json_object_set_new(row, names[i],
                            json_real(mean + (row_figure(visit, names[i]) - mean) / visits));
    }
}

/* Appends the rows, or adds the visit to those there are. Returns how many are new. */
static size_t rows_add(const struct batch *batch, bool busy)
{
    const struct cell *cell = batch->cell;
    size_t added = 0;
    bool whole = true;
    for (size_t i = 0; i < batch->count; i++)
        whole = whole && (batch->members[i].process.state == PROCESS_READY ||
                          batch->members[i].process.state == PROCESS_SKIPPED);
    for (size_t i = 0; i < batch->count; i++) {
        const struct member *member = &batch->members[i];
        json_t *row = row_new(batch, member, busy);
        json_t *known = cell->is_visit ? row_of(batch->bench, cell->section, member->kind->name,
                                                placement_name(cell->placement), cell->rank_count,
                                                (json_int_t)cell->bytes, busy)
                                       : NULL;
        if (!known) {
            if (cell->is_visit)
                json_object_set_new(row, "visits", json_integer(1));
            json_array_append(batch->bench->rows, row);
            added++;
        } else if (member->process.state == PROCESS_FAILED) {
            json_object_set_new(known, "missing", json_string(member->process.text));
        } else if (whole) {
            row_visit(known, row);
        }
        json_decref(row);
    }
    return added;
}

const json_t *row_find(const struct bench *bench, const char *section, const char *kind,
                       enum placement placement, uint32_t rank_count, size_t bytes, bool busy)
{
    const json_t *row = row_of(bench, section, kind, placement_name(placement), rank_count,
                               (json_int_t)bytes, busy);
    return json_object_get(row, "missing") ? NULL : row;
}

double row_figure(const json_t *row, const char *name)
{
    return json_number_value(json_object_get(row, name));
}

struct spread spread_of(const json_t *array, const json_t *other)
{
    double values[SPREAD_MAX];
    size_t count = json_array_size(array);
    if (other && count > json_array_size(other))
        count = json_array_size(other);
    count = count > SPREAD_MAX ? SPREAD_MAX : count;
    for (size_t i = 0; i < count; i++)
        values[i] = json_number_value(json_array_get(array, i)) /
                    (other ? json_number_value(json_array_get(other, i)) : 1);
    if (count == 0)
        return (struct spread){0};
    return (struct spread){.low = measure_quantile(values, count, 0.25),
                           .median = measure_median(values, count),
                           .high = measure_quantile(values, count, 0.75),
                           .count = count};
}

struct spread row_spread(const struct bench *bench, const json_t *row, const char *other)
{
    size_t i;
    const json_t *candidate, *beside = NULL;
    json_array_foreach(bench->rows, i, candidate)
    {
        if (row && json_equal(json_object_get(candidate, "batch"), json_object_get(row, "batch")) &&
            json_equal(json_object_get(candidate, "busy"), json_object_get(row, "busy")) &&
            strcmp(json_string_value(json_object_get(candidate, "kind")), other) == 0)
            beside = candidate;
    }
    const json_t *pairs = json_object_get(beside, "pairs");
    return pairs ? spread_of(json_object_get(row, "pairs"), pairs) : (struct spread){0};
}

double row_ratio(const struct bench *bench, const json_t *row, const char *other)
{
    return row_spread(bench, row, other).median;
}

/* ---- a batch ---- */

/* Returns false when the time is over before all have had their slice. Of the first pair each that
 * has none is left out; a later pair is left out as a whole. */
static bool pair_run(struct batch *batch, size_t pair)
{
    for (size_t i = 0; i < batch->count; i++) {
        struct member *member = &batch->members[i];
        if (member->process.state != PROCESS_READY || (pair == 0 && member->is_measured))
            continue;
        if (bench_is_over(batch->bench)) {
            if (pair > 0)
                return false;
            process_give_up(&member->process);
        } else if (!slice_run(batch, member, pair, pair == 0 || !batch->bench->brief) && pair > 0) {
            if (member->process.state != PROCESS_LATE)
                continue;
            member->process.state = PROCESS_READY;
            return false;
        }
    }
    return true;
}

static void batch_pass(struct batch *batch, bool busy)
{
    pid_t loops[BENCH_BUSY_LOOPS];
    uint64_t one_ns = 0;
    if (busy)
        busy_start(loops);
    for (size_t i = 0; i < batch->count; i++)
        if (batch->members[i].process.state == PROCESS_READY) {
            if (bench_is_over(batch->bench))
                process_give_up(&batch->members[i].process);
            else
                try_member(batch, &batch->members[i]);
            one_ns += batch->members[i].slice_ns;
        }
    batch->pairs = pairs_of(batch, one_ns);
    for (size_t pair = 0; pair < batch->pairs; pair++)
        if (!pair_run(batch, pair))
            batch->pairs = pair;
    if (busy)
        busy_stop(loops);
    const size_t added = rows_add(batch, busy);
    if (!batch->cell->is_visit)
        report_rows(batch->bench, added);
}

static void batch_run(struct bench *bench, const struct cell *cell, struct member *members,
                      size_t count)
{
    struct batch batch = {bench, cell, members, count, 0};
    for (size_t i = 0; i < count; i++) {
        struct member *member = &members[i];
        const struct kind *kind = member->kind;
        member->bytes = kind->bytes ? kind->bytes : cell->bytes;
        member->reply_bytes = kind->reply_bytes ? kind->reply_bytes : cell->reply_bytes;
        bench_start(bench, kind, cell->placement, cell->rank_count, member->bytes,
                    member->reply_bytes, &member->process);
        if (kind->host) /* and would not be ready in time beside another such one */
            process_await(&member->process, kind->spins_idle);
    }
    for (size_t i = 0; i < count; i++)
        if (!members[i].kind->host)
            process_await(&members[i].process, members[i].kind->spins_idle);
    batch_pass(&batch, false);
    if (cell->busy)
        batch_pass(&batch, true);
    for (size_t i = 0; i < count; i++)
        process_quit(&members[i].process);
    for (size_t i = 0; i < count; i++)
        process_free(&members[i].process);
}

/* ---- a cell ---- */

static bool is_floor(const struct kind *kind)
{
    return strcmp(kind->name, "semaphore") == 0 || strcmp(kind->name, "futex") == 0;
}

/* How many subjects fit half of the memory that is free, each with a copy of the request in every
 * process, in the transport, and once more. */
static size_t fitting(const struct cell *cell)
{
    const uint64_t each = (uint64_t)cell->bytes * (2 * cell->rank_count + 6) + (64 << 20);
    const uint64_t fit = procfs_available() / 2 / each;
    return fit > KINDS_MAX ? KINDS_MAX : (size_t)fit;
}

void cell_run(struct bench *bench, const struct cell *cell)
{
    const struct kind *chosen[KINDS_MAX];
    struct member *members = calloc(KINDS_MAX, sizeof *members);
    size_t count = 0, floors = 0, fit = fitting(cell);
    if (!members)
        return;
    for (size_t i = 0; cell->kinds[i] && count < KINDS_MAX; i++) {
        const struct kind *kind = kind_find(cell->kinds[i]);
        if (!name_chosen(bench->kinds, kind->name) ||
            (kind->bytes_max && cell->bytes > kind->bytes_max))
            continue;
        floors += is_floor(kind) && !bench->brief;
        chosen[count++] = kind;
    }
    /* The floors are first in every list. A brief run has them in the first batch alone. */
    const size_t room = fit > floors ? fit - floors : 1;
    for (size_t next = floors; next < count || next == floors; next += room) {
        size_t in_batch = 0;
        bench->batches += next == floors || !bench->brief;
        for (size_t i = 0; i < floors; i++)
            members[in_batch++] = (struct member){.kind = chosen[i]};
        for (size_t i = next; i < count && i < next + room; i++)
            members[in_batch++] = (struct member){.kind = chosen[i]};
        if (in_batch)
            batch_run(bench, cell, members, in_batch);
    }
    free(members);
}
