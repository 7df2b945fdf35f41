#include "conductor.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "groups.h"
#include "hosts.h"
#include "machine.h"
#include "measure.h"
#include "procfs.h"
#include "programs.h"
#include "report.h"
#include "targets.h"

#define BYTES 4096
#define REPLY_BYTES 256
#define SIZES_RANKS 4
#define STEPS_RANKS 8
#define VISIT_PAIRS 3
/* A visit is behind every section, of a brief run behind so many, of a quick one there is one. */
#define BRIEF_VISIT_SECTIONS 5

#define FREE (1 << PLACEMENT_FREE)
#define ONE (1 << PLACEMENT_ONE)
#define APART (1 << PLACEMENT_APART)
#define POINTS_MAX 12

/* Cells of one section, at each of its sizes and numbers of ranks, in each placement. An empty list
 * is the run's. */
static const struct sweep {
    /* of --sections, and of its rows */
    const char *name, *section, *title;
    const char *const *kinds;
    unsigned placements;
    uint32_t ranks[POINTS_MAX];
    size_t sizes[POINTS_MAX];
    /* points of each list in a quick run; 0: all */
    size_t quick;
    /* 0: the run's */
    size_t pairs;
    bool busy;
} sweeps[] = {
    /* clang-format off */
    {"call", "call",
     "A call, a submit, one whose handler wakes who submits; a thread that wakes another (one way)",
     kinds_of_call, FREE, {4}, {BYTES}, 0, 25, false},
    {"depth", "depth", "Several requests in flight, several callers; times between completions",
     kinds_of_depth, FREE, {4, 8}, {BYTES}, 1, 0, false},
    {"steps", "steps", "Decode steps", kinds_of_steps, FREE, {0}, {BYTES}, 0, 0, true},
    {"steps", "steps", "Decode steps", kinds_of_steps, ONE, {STEPS_RANKS}, {BYTES}, 0, 0, false},
    /* The same as bytes on one processor, as far as a round is wake-ups: small requests, and no
     * group that would spin elsewhere. */
    {"packed", "packed", "Bytes", kinds_of_bytes, ONE, {0}, {BYTES}, 0, 0, false},
    /* Points between those: more ranks, more sizes, of the floors and of ours. */
    {"curves", "per-rank", "Growth per rank", kinds_of_curves, FREE | ONE, {1, 2, 3, 4, 6, 8, 12,
     16, 24, 32, 48, 64}, {BYTES}, 2, 5, false},
    {"curves", "per-byte", "Growth per byte", kinds_of_curves, FREE, {SIZES_RANKS}, {256, 1 << 10,
     4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20}, 2, 5, false},
    /* What Python adds, beside its peers; apart: what a round takes where no process waits for the
     * other's processor. */
    {"python", "python", "Python", kinds_of_python, FREE | ONE, {1, 2, 4, 8}, {BYTES}, 2, 0,
     false},
    {"python", "python", "Python", kinds_of_python, APART, {1}, {BYTES}, 0, 0, false},
    {"python", "python-objects", "Python: a method with small arguments", kinds_of_objects, FREE,
     {1, 2, 4, 8}, {BYTES}, 1, 0, false},
    {"python", "python-arrays", "Python: an array of 5 MB there and back", kinds_of_arrays, FREE,
     {1, 2, 4, 8}, {ARRAY_BYTES}, 1, 0, false},
    {"python", "python",
     "A step of 256 sequences in Python; columns: of the worker, from taken to numpy",
     kinds_of_columns, ONE, {1}, {BYTES}, 0, 0, false},
    /* Every way to move bytes, in every number of ranks and every size. The small ones first: they
     * are what a run without time for all has. */
    {"bytes", "bytes", "Bytes", kinds_of_bytes, FREE, {0}, {0}, 0, 0, true},
    /* clang-format on */
};

/* What the kernel's placement decides, which lasts longer than a slice: few slices in each of many
 * groups of processes, spread over the run. */
static void visit_placed(struct bench *bench)
{
    static const struct cell cells[] = {
        {.section = "one", .rank_count = 1, .bytes = BYTES, .kinds = kinds_of_one, .busy = true},
        {.section = "one",
         .rank_count = 1,
         .bytes = BYTES,
         .kinds = kinds_of_one,
         .placement = PLACEMENT_APART},
        {.section = "loops",
         .rank_count = 8,
         .bytes = BYTES,
         .kinds = kinds_of_loops,
         .busy = true},
        {.section = "ring", .rank_count = 8, .bytes = BYTES, .kinds = kinds_of_ring},
        {.section = "copies", .rank_count = 2, .bytes = ARRAY_BYTES, .kinds = kinds_of_copies},
    };
    for (size_t i = 0; i < sizeof cells / sizeof *cells; i++) {
        struct cell cell = cells[i];
        if (!name_chosen(bench->sections, cell.section))
            continue;
        cell.reply_bytes = cell.bytes == ARRAY_BYTES ? cell.bytes : REPLY_BYTES;
        cell.pairs = bench->pairs < VISIT_PAIRS ? bench->pairs : VISIT_PAIRS;
        cell.is_visit = true;
        cell_run(bench, &cell);
    }
}

static void sweep_point(struct bench *bench, const struct sweep *sweep, enum placement placement,
                        size_t rank_count, size_t bytes)
{
    /* A quick run has ours: the peers' interpreters take seconds to start. */
    const char *const ours[] = {sweep->kinds[0], sweep->kinds[1], sweep->kinds[2], NULL};
    const bool slow = sweep->kinds == kinds_of_objects || sweep->kinds == kinds_of_arrays;
    const struct cell cell = {.section = sweep->section,
                              .rank_count = (uint32_t)rank_count,
                              .bytes = bytes,
                              .reply_bytes = slow ? bytes : REPLY_BYTES,
                              .kinds = slow && bench->quick ? ours : sweep->kinds,
                              .pairs = bench->brief ? 0 : sweep->pairs,
                              .busy = sweep->busy,
                              .placement = placement};
    /* One rank is on one processor what it is anywhere, but for the spinning. */
    if (sweep->ranks[0] || placement != PLACEMENT_ONE || rank_count > 1)
        cell_run(bench, &cell);
}

static void sweep_run(struct bench *bench, const struct sweep *sweep, enum placement placement)
{
    struct options_list ranks = bench->rank_counts, sizes = bench->sizes;
    const size_t most = bench->quick && sweep->quick ? sweep->quick : POINTS_MAX;
    for (size_t i = 0; i < most && sweep->ranks[i]; i++) {
        ranks.values[i] = sweep->ranks[i];
        ranks.count = i + 1;
    }
    for (size_t i = 0; i < most && sweep->sizes[i]; i++) {
        sizes.values[i] = sweep->sizes[i];
        sizes.count = i + 1;
    }
    report_section(sweep->title, placement);
    for (size_t s = 0; s < sizes.count; s++) {
        /* This is half of a run. */
        if (s > 0 && !sweep->sizes[0] && !bench->brief && !bench->quick)
            visit_placed(bench);
        for (size_t i = 0; i < ranks.count; i++)
            sweep_point(bench, sweep, placement, ranks.values[i], sizes.values[s]);
    }
    if (sweep->kinds == kinds_of_arrays)
        hosts_end(bench->hosts, "ray"); /* its servers run now and then */
}

static void sweeps_run(struct bench *bench, const char *name)
{
    for (size_t i = 0; i < sizeof sweeps / sizeof *sweeps; i++)
        for (int p = 0; p <= PLACEMENT_APART; p++)
            if (strcmp(sweeps[i].name, name) == 0 && sweeps[i].placements & (1u << p))
                sweep_run(bench, &sweeps[i], (enum placement)p);
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

/* Those that take longer come later. Without a function: sweeps of that name. */
static const struct {
    const char *name;
    void (*measure)(struct bench *bench);
} sections[] = {
    {"idle", measure_idle},
    {"allocations", measure_allocations},
    {"call", NULL},
    {"depth", NULL},
    {"start", measure_starts},
    {"rate", measure_rates},
    {NULL, programs_run},
    {"steps", NULL},
    {"packed", NULL},
    {"curves", NULL},
    {"python", NULL},
    {"bytes", NULL},
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
    bench->hosts = hosts_new();
    if (!bench->root || !bench->rows || !bench->samples_ns || !bench->hosts)
        return -ENOMEM;
    process_catch_stop();
    json_t *machine = machine_begin(bench->folder);
    json_object_set_new(bench->root, "machine", machine);
    json_object_set_new(bench->root, "rows", bench->rows);
    report_heading(bench);
    const size_t count = sizeof sections / sizeof *sections;
    const size_t apart = bench->quick ? count : bench->brief ? BRIEF_VISIT_SECTIONS : 1;
    for (size_t i = 0; i < count; i++) {
        if (i % apart == 0)
            visit_placed(bench);
        if (sections[i].name && !name_chosen(bench->sections, sections[i].name))
            continue;
        if (sections[i].name) /* how far a run of minutes is */
            fprintf(stderr, "coxswain-bench: %s, after %.0f s\n", sections[i].name,
                    (double)(measure_now_ns() - bench->begin_ns) / 1e9);
        if (sections[i].measure)
            sections[i].measure(bench);
        else
            sweeps_run(bench, sections[i].name);
    }
    hosts_free(bench->hosts);
    bench->hosts = NULL;
    procfs_sweep();
    machine_end(machine);
    report_visits(bench);
    report_again(bench);
    targets_judge(bench);
    report_targets(bench);
    count_rows(bench);
    machine_print(machine);
    free(bench->samples_ns);
    bench->samples_ns = NULL;
    return 0;
}
