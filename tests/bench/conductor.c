#include "conductor.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "groups.h"
#include "machine.h"
#include "measure.h"
#include "programs.h"
#include "report.h"
#include "targets.h"

#define BYTES 4096
#define REPLY_BYTES 256
#define SIZES_RANKS 4
#define STEPS_RANKS 8

/* Every way to move bytes, in every number of ranks and every size. The small ones first: they are
 * what a run without time for all has. */
static void measure_bytes(struct bench *bench)
{
    report_section("Bytes", PLACEMENT_FREE);
    for (size_t s = 0; s < bench->size_count; s++)
        for (size_t i = 0; i < bench->rank_count_count; i++)
            cell_run(bench, &(struct cell){.section = "bytes",
                                           .rank_count = bench->rank_counts[i],
                                           .bytes = bench->sizes[s],
                                           .reply_bytes = REPLY_BYTES,
                                           .kinds = kinds_of_bytes,
                                           .busy = true});
}

/* The same on one processor, as far as a round is wake-ups: small requests, and no group that would
 * spin elsewhere. */
static void measure_packed(struct bench *bench)
{
    report_section("Bytes", PLACEMENT_ONE);
    for (size_t i = 0; i < bench->rank_count_count; i++)
        if (bench->rank_counts[i] >= 2)
            cell_run(bench, &(struct cell){.section = "packed",
                                           .rank_count = bench->rank_counts[i],
                                           .bytes = BYTES,
                                           .reply_bytes = REPLY_BYTES,
                                           .kinds = kinds_of_bytes,
                                           .placement = PLACEMENT_ONE});
}

/* Points between those: more ranks, more sizes, of the floors and of ours. */
static void measure_curves(struct bench *bench)
{
    static const uint32_t ranks[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64};
    static const size_t sizes[] = {256,       1 << 10, 4 << 10, 16 << 10, 64 << 10,
                                   256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20};
    const size_t rank_counts = bench->quick ? 2 : sizeof ranks / sizeof *ranks;
    const size_t size_count = bench->quick ? 2 : sizeof sizes / sizeof *sizes;
    struct cell cell = {.section = "per-rank",
                        .bytes = BYTES,
                        .reply_bytes = REPLY_BYTES,
                        .kinds = kinds_of_curves,
                        .pairs = bench->brief ? 0 : 5};
    for (int p = 0; p < PLACEMENT_COUNT; p++) {
        cell.placement = (enum placement)p;
        report_section("Growth per rank", cell.placement);
        for (size_t i = 0; i < rank_counts; i++) {
            cell.rank_count = ranks[i];
            cell_run(bench, &cell);
        }
    }
    report_section("Growth per byte", PLACEMENT_FREE);
    cell.section = "per-byte";
    cell.placement = PLACEMENT_FREE;
    cell.rank_count = SIZES_RANKS;
    for (size_t i = 0; i < size_count; i++) {
        cell.bytes = sizes[i];
        cell_run(bench, &cell);
    }
}

static void measure_one(struct bench *bench)
{
    report_section("One rank, spinning (sealed, within its budget; max) or not (off)",
                   PLACEMENT_FREE);
    cell_run(bench, &(struct cell){.section = "one",
                                   .rank_count = 1,
                                   .bytes = BYTES,
                                   .reply_bytes = REPLY_BYTES,
                                   .kinds = kinds_of_one,
                                   .busy = true});
}

static void measure_call(struct bench *bench)
{
    report_section(
        "A call, a submit, one whose handler wakes who submits; a thread that wakes another (one way)",
        PLACEMENT_FREE);
    cell_run(bench, &(struct cell){.section = "call",
                                   .rank_count = 4,
                                   .bytes = BYTES,
                                   .reply_bytes = REPLY_BYTES,
                                   .kinds = kinds_of_call,
                                   .pairs = bench->brief ? 0 : 25});
}

static void measure_steps(struct bench *bench)
{
    struct cell cell = {
        .section = "steps", .bytes = BYTES, .reply_bytes = REPLY_BYTES, .kinds = kinds_of_steps};
    report_section("Decode steps", PLACEMENT_FREE);
    cell.busy = true;
    for (size_t i = 0; i < bench->rank_count_count; i++) {
        cell.rank_count = bench->rank_counts[i];
        cell_run(bench, &cell);
    }
    report_section("Decode steps", PLACEMENT_ONE);
    cell.rank_count = STEPS_RANKS;
    cell.busy = false;
    cell.placement = PLACEMENT_ONE;
    cell_run(bench, &cell);
}

static void measure_depth(struct bench *bench)
{
    report_section("Several requests in flight, several callers; times between completions",
                   PLACEMENT_FREE);
    for (uint32_t rank_count = 4; rank_count <= (bench->quick ? 4 : 8); rank_count *= 2)
        cell_run(bench, &(struct cell){.section = "depth",
                                       .rank_count = rank_count,
                                       .bytes = BYTES,
                                       .reply_bytes = REPLY_BYTES,
                                       .kinds = kinds_of_depth});
}

/* What Python adds, beside its peers; apart: what a round takes where no process waits for the
 * other's processor. Free: the columns of a step. */
static void measure_python(struct bench *bench)
{
    struct cell cell = {
        .section = "python", .bytes = BYTES, .reply_bytes = REPLY_BYTES, .kinds = kinds_of_python};
    for (int p = 0; p <= PLACEMENT_APART; p++) {
        cell.placement = (enum placement)p;
        report_section("Python", cell.placement);
        for (uint32_t rank_count = 1; rank_count <= (p == PLACEMENT_APART ? 1 : 8);
             rank_count *= 2) {
            cell.rank_count = rank_count;
            if (!bench->quick || rank_count <= 2)
                cell_run(bench, &cell);
        }
    }
    static const struct {
        const char *section, *title;
        const char *const *kinds;
        size_t bytes;
    } parts[] = {
        {"python-objects", "Python: a method with small arguments", kinds_of_objects, BYTES},
        {"python-arrays", "Python: an array of 5 MB there and back", kinds_of_arrays, ARRAY_BYTES},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        /* A quick run has ours: the peers' interpreters take seconds to start. */
        const char *const ours[] = {parts[i].kinds[0], parts[i].kinds[1], parts[i].kinds[2], NULL};
        struct cell of_objects = {.section = parts[i].section,
                                  .bytes = parts[i].bytes,
                                  .reply_bytes = parts[i].bytes,
                                  .kinds = bench->quick ? ours : parts[i].kinds};
        report_section(parts[i].title, PLACEMENT_FREE);
        for (uint32_t rank_count = 1; rank_count <= (bench->quick ? 1 : 8); rank_count *= 2) {
            of_objects.rank_count = rank_count;
            cell_run(bench, &of_objects);
        }
    }
    report_section("A step of 256 sequences in Python; columns: of the worker, from taken to numpy",
                   PLACEMENT_ONE);
    cell.rank_count = 1;
    cell.kinds = kinds_of_columns;
    cell.placement = PLACEMENT_ONE;
    cell_run(bench, &cell);
}

static void measure_rates(struct bench *bench)
{
    groups_rate(bench, kinds_of_rate, PLACEMENT_FREE, 8);
    groups_rate(bench, kinds_of_curves, PLACEMENT_ONE, 8);
}

static void measure_idle(struct bench *bench)
{
    groups_idle(bench, 8);
}

static void measure_starts(struct bench *bench)
{
    printf("\nStart and memory, after 100 rounds\n");
    for (uint32_t rank_count = 1; rank_count <= (bench->quick ? 2 : 64); rank_count *= 2)
        groups_start(bench, rank_count);
    if (bench->quick)
        groups_start(bench, 8);
}

static void measure_allocations(struct bench *bench)
{
    groups_allocations(bench, 8);
}

/* Those that take longer come later. */
static const struct {
    const char *name;
    void (*measure)(struct bench *bench);
} sections[] = {
    {"call", measure_call},     {"one", measure_one},
    {"idle", measure_idle},     {"allocations", measure_allocations},
    {"depth", measure_depth},   {"start", measure_starts},
    {"rate", measure_rates},    {NULL, programs_run},
    {"steps", measure_steps},   {"packed", measure_packed},
    {"curves", measure_curves}, {"python", measure_python},
    {"bytes", measure_bytes},
};

/* How many rows there are, and how many of them have no figure: for want of time, and for another
 * reason, which each says. */
static void count_rows(struct bench *bench)
{
    size_t i, late = 0, missing = 0;
    const char *name;
    json_t *row;
    json_array_foreach(bench->rows, i, row)
    {
        const char *text = json_string_value(json_object_get(row, "missing"));
        late += text && strcmp(text, PROCESS_OVER) == 0;
        missing += text && strcmp(text, PROCESS_OVER) != 0;
    }
    json_object_foreach(bench->root, name, row)
    {
        const char *text = json_string_value(json_object_get(row, "missing"));
        late += text && strcmp(text, PROCESS_OVER) == 0;
        missing += text && strcmp(text, PROCESS_OVER) != 0;
    }
    printf("\n%zu rows; %zu had no time, %zu have no figure for another reason\n",
           json_array_size(bench->rows), late, missing);
    json_object_set_new(bench->root, "counts",
                        json_pack("{s:I, s:I, s:I}", "rows",
                                  (json_int_t)json_array_size(bench->rows), "late",
                                  (json_int_t)late, "missing", (json_int_t)missing));
}

int conductor_run(struct bench *bench)
{
    bench->begin_ns = measure_now_ns();
    bench->end_ns =
        bench->budget_s ? bench->begin_ns + bench->budget_s * UINT64_C(1000000000) : UINT64_MAX;
    bench->root = json_object();
    bench->rows = json_array();
    bench->samples_ns = calloc(BENCH_ROUNDS_MAX, sizeof *bench->samples_ns);
    if (!bench->root || !bench->rows || !bench->samples_ns)
        return -ENOMEM;
    json_t *machine = machine_begin(bench->folder);
    json_object_set_new(bench->root, "machine", machine);
    json_object_set_new(bench->root, "rows", bench->rows);
    report_heading(bench);
    for (size_t i = 0; i < sizeof sections / sizeof *sections; i++) {
        if (sections[i].name && !name_chosen(bench->sections, sections[i].name))
            continue;
        if (sections[i].name) /* how far a run of minutes is */
            fprintf(stderr, "coxswain-bench: %s, after %.0f s\n", sections[i].name,
                    (double)(measure_now_ns() - bench->begin_ns) / 1e9);
        sections[i].measure(bench);
    }
    report_again(bench);
    targets_judge(bench);
    report_targets(bench);
    count_rows(bench);
    machine_end(machine);
    machine_print(machine);
    free(bench->samples_ns);
    bench->samples_ns = NULL;
    return 0;
}
