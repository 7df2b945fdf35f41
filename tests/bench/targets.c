#include "targets.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "measure.h"

#define BYTES 4096
#define ARRAY_BYTES 5000000
#define MIB ((size_t)1 << 20)
/* That a step of 256 sequences has, and one of 16 has not. */
#define ROWS_MORE (256 - 16)

/* Of small requests. */
static const char *const bytes_sections[PLACEMENT_COUNT] = {"bytes", "packed"};

/* One target while it is put together: the worst of several figures, and all of them as text. */
struct verdict {
    struct bench *bench;
    char name[96];
    /* in words */
    const char *target;
    double limit;
    /* the figure must be no smaller; otherwise no larger */
    bool at_least;
    enum placement placement;
    double worst;
    size_t count, missing;
    char detail[1024];
};

static struct verdict verdict_new(struct bench *bench, const char *name, bool at_least,
                                  double limit, const char *target)
{
    struct verdict v = {.bench = bench, .target = target, .limit = limit, .at_least = at_least};
    snprintf(v.name, sizeof v.name, "%s", name);
    return v;
}

/* What is judged once per placement. */
static struct verdict verdict_placed(struct bench *bench, enum placement placement,
                                     const char *name, bool at_least, double limit,
                                     const char *target)
{
    struct verdict v = verdict_new(bench, name, at_least, limit, target);
    const size_t length = strlen(v.name);
    snprintf(v.name + length, sizeof v.name - length, ", %s", placement_text(placement));
    v.placement = placement;
    return v;
}

static void verdict_say(struct verdict *v, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static void verdict_say(struct verdict *v, const char *format, ...)
{
    const size_t length = strlen(v->detail);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(v->detail + length, sizeof v->detail - length, format, arguments);
    va_end(arguments);
}

static void verdict_count(struct verdict *v, double figure)
{
    if (v->count++ == 0 || (v->at_least ? figure < v->worst : figure > v->worst))
        v->worst = figure;
}

/* A figure of 0 was not measured. */
static void verdict_add(struct verdict *v, const char *what, double figure, double cpu_us)
{
    const char *comma = v->detail[0] ? ", " : "";
    if (!(figure > 0)) {
        v->missing++;
        return;
    }
    verdict_count(v, figure);
    if (cpu_us > 0)
        verdict_say(v, "%s%s %.2f (cpu %.0f us)", comma, what, figure, cpu_us);
    else
        verdict_say(v, "%s%s %.2f", comma, what, figure);
}

/* What is partly not measured is not met, unless a peer that is not here is all that lacks. */
static void verdict_end(struct verdict *v, bool may_lack)
{
    json_t *target =
        json_pack("{s:s, s:s, s:n, s:n}", "name", v->name, "target", v->target, "measured", "met");
    if (v->count) {
        bool met = v->at_least ? v->worst >= v->limit : v->worst <= v->limit;
        json_object_set_new(target, "measured", json_real(v->worst));
        if (!met || v->missing == 0 || may_lack)
            json_object_set_new(target, "met", json_boolean(met));
        if (v->missing)
            verdict_say(v, "; %zu not measured", v->missing);
    }
    json_object_set_new(target, "detail", json_string(v->detail));
    json_array_append_new(json_object_get(v->bench->root, "targets"), target);
}

/* ---- bytes ---- */

static const json_t *bytes_row(const struct bench *bench, const char *kind,
                               enum placement placement, uint32_t rank_count, size_t bytes)
{
    return row_find(bench, bytes_sections[placement], kind, placement, rank_count, bytes, false);
}

static void add_ratio(struct verdict *v, const char *kind, const char *other, uint32_t rank_count,
                      size_t bytes)
{
    char what[64];
    const json_t *row = bytes_row(v->bench, kind, v->placement, rank_count, bytes);
    snprintf(what, sizeof what, "N=%u", rank_count);
    verdict_add(v, what, row_ratio(v->bench, row, other), row_figure(row, "cpu_us"));
}

static void judge_floors(struct bench *bench, enum placement placement)
{
    static const struct {
        const char *name, *kind, *floor, *again;
        double limit;
        const char *target;
        uint32_t ranks[3];
    } floors[] = {
        {"named by the semaphore floor, N = 2, 4, 8",
         "named",
         "semaphore",
         "semaphore-again",
         1.15,
         "<= 1.15 x",
         {2, 4, 8}},
        {"sealed by the futex floor, N = 8, 16, 32",
         "sealed",
         "futex",
         "futex-again",
         1.15,
         "<= 1.15 x",
         {8, 16, 32}},
        {"sealed by the semaphore floor, N = 8, 16, 32",
         "sealed",
         "semaphore",
         "semaphore-again",
         1,
         "< 1 x",
         {8, 16, 32}},
    };
    for (size_t f = 0; f < sizeof floors / sizeof *floors; f++) {
        const char *before = "; the floor by itself:";
        struct verdict v = verdict_placed(bench, placement, floors[f].name, false, floors[f].limit,
                                          floors[f].target);
        for (int i = 0; i < 3; i++)
            add_ratio(&v, floors[f].kind, floors[f].floor, floors[f].ranks[i], BYTES);
        for (int i = 0; i < 3; i++) {
            const uint32_t rank_count = floors[f].ranks[i];
            const json_t *again = bytes_row(bench, floors[f].again, placement, rank_count, BYTES);
            const double ratio = row_ratio(bench, again, floors[f].floor);
            if (ratio > 0) {
                verdict_say(&v, "%s N=%u %.2f", before, rank_count, ratio);
                before = ",";
            }
        }
        verdict_end(&v, false);
    }
}

static void judge_large(struct bench *bench)
{
    struct verdict v =
        verdict_new(bench, "1 MiB by the semaphore floor, N = 4", false, 1, "<= 1.0 x");
    add_ratio(&v, "named", "semaphore", 4, MIB);
    add_ratio(&v, "sealed", "semaphore", 4, MIB);
    verdict_end(&v, false);
}

static void judge_one_rank(struct bench *bench)
{
    const json_t *row = row_find(bench, "one", "sealed", PLACEMENT_FREE, 1, BYTES, false);
    struct verdict v =
        verdict_new(bench, "N = 1 with a free core, sealed", false, 2.5, "<= 2.5 us");
    verdict_add(&v, "p50", row_figure(row, "p50_us"), row_figure(row, "cpu_us"));
    verdict_end(&v, false);
    row = row_find(bench, "one", "sealed", PLACEMENT_FREE, 1, BYTES, true);
    /* Two slices of the same thing differ by as much on a busy machine. */
    v = verdict_new(bench, "N = 1 with busy cores, by the same that does not spin", false, 1.05,
                    "<= 1.05 x");
    verdict_add(&v, "N=1", row_ratio(bench, row, "sealed-off"), row_figure(row, "cpu_us"));
    verdict_end(&v, false);
}

static void judge_peers(struct bench *bench, enum placement placement)
{
    char what[64] = "";
    struct verdict v = verdict_placed(bench, placement, "sealed by peers that sleep, every N >= 2",
                                      false, 1, "< 1 x each");
    for (size_t p = 0; peers_that_sleep[p]; p++) {
        double worst = 0;
        for (size_t i = 0; i < bench->rank_count_count; i++) {
            const uint32_t rank_count = bench->rank_counts[i];
            const json_t *row = bytes_row(bench, "sealed", placement, rank_count, BYTES);
            const double ratio = rank_count < 2 ? 0 : row_ratio(bench, row, peers_that_sleep[p]);
            if (ratio <= worst)
                continue;
            worst = ratio;
            snprintf(what, sizeof what, "%s N=%u", peers_that_sleep[p], rank_count);
        }
        verdict_add(&v, what, worst, 0);
    }
    if (v.count)
        verdict_say(&v, " (each at its worst N)");
    verdict_end(&v, true);
    const json_t *row = bytes_row(bench, "sealed", placement, 8, BYTES);
    double ratio = row_ratio(bench, row, "zmq");
    v = verdict_placed(bench, placement, "ZeroMQ by sealed, N = 8", true, 4, ">= 4 x");
    verdict_add(&v, "N=8", ratio > 0 ? 1 / ratio : 0, 0);
    verdict_end(&v, false);
    v = verdict_placed(bench, placement, "sealed by peers that spin, N >= 8", false, 1,
                       "< 1 x each");
    for (size_t p = 0; peers_that_spin[p]; p++)
        for (size_t i = 0; i < bench->rank_count_count; i++) {
            const uint32_t rank_count = bench->rank_counts[i];
            row = bytes_row(bench, "sealed", placement, rank_count, BYTES);
            snprintf(what, sizeof what, "%s N=%u", peers_that_spin[p], rank_count);
            if (rank_count >= 8)
                verdict_add(&v, what, row_ratio(bench, row, peers_that_spin[p]), 0);
        }
    verdict_end(&v, true);
}

static double slope_of(const struct bench *bench, const char *kind, enum placement placement)
{
    static const uint32_t ranks[] = {4, 8, 16, 32};
    double x[4], y[4];
    for (int i = 0; i < 4; i++) {
        x[i] = ranks[i];
        y[i] = row_figure(bytes_row(bench, kind, placement, ranks[i], BYTES), "p50_us");
        if (!(y[i] > 0))
            return 0;
    }
    return measure_slope(x, y, 4);
}

static void judge_growth(struct bench *bench, enum placement placement)
{
    struct verdict v = verdict_placed(
        bench, placement, "growth N = 4 to 32, sealed by the futex floor", false, 1.2, "<= 1.2 x");
    const double own = slope_of(bench, "sealed", placement);
    const double floor = slope_of(bench, "futex", placement);
    verdict_add(&v, "slopes", own > 0 && floor > 0 ? own / floor : 0, 0);
    if (own > 0)
        verdict_say(&v, " (%.2f and %.2f us a rank; named %.2f, semaphore floor %.2f)", own, floor,
                    slope_of(bench, "named", placement), slope_of(bench, "semaphore", placement));
    verdict_end(&v, false);
}

static const json_t *call_row(const struct bench *bench, const char *kind)
{
    return row_find(bench, "call", kind, PLACEMENT_FREE, 4, BYTES, false);
}

/* A hand-off is from one processor to another, while the group is there and the machine is as it
 * was for the call. What a semaphore for the thread that submits costs within a round, with the
 * workers on the processors, is said beside it. */
static void judge_call(struct bench *bench)
{
    const json_t *call = call_row(bench, "sealed-call");
    const json_t *handed = call_row(bench, "sealed-hand-off");
    const double submit = row_figure(call_row(bench, "sealed"), "p50_us");
    const double hand_off = row_figure(call_row(bench, "ping"), "p50_us");
    const double ratio = row_ratio(bench, call, "sealed");
    struct verdict v = verdict_new(bench, "synchronous call beside submit, sealed, N = 4", false, 1,
                                   "<= 1 hand-off");
    if (hand_off > 0 && submit > 0 && ratio > 0) {
        verdict_count(&v, (ratio - 1) * submit / hand_off);
        verdict_say(&v,
                    "%.2f us more than %.2f us; a hand-off takes %.2f us, within a round %.2f us",
                    (ratio - 1) * submit, submit, hand_off,
                    (row_ratio(bench, handed, "sealed") - 1) * submit);
    }
    verdict_end(&v, false);
}

/* A quiet round spins, one beside loops is wakeups: docs/bench.md. */
static void judge_busy(struct bench *bench)
{
    static const char *const kinds[][2] = {{"named", "semaphore"}, {"sealed", "futex"}};
    struct verdict v = verdict_new(bench, "two busy loops beside, N = 8, by the floors beside them",
                                   false, 1.15, "<= 1.15 x");
    for (int k = 0; k < 2; k++) {
        const json_t *busy = row_find(bench, "bytes", kinds[k][0], PLACEMENT_FREE, 8, BYTES, true);
        verdict_add(&v, kinds[k][0], row_ratio(bench, busy, kinds[k][1]),
                    row_figure(busy, "cpu_us"));
    }
    verdict_end(&v, false);
}

/* ---- steps ---- */

static const json_t *step_row(const struct bench *bench, const char *kind, enum placement placement)
{
    return row_find(bench, "steps", kind, placement, 8, BYTES, false);
}

/* What it adds to a round of as many bytes, by pairs of slices; the ratio grows as a round of bytes
 * becomes faster. */
static void judge_small_step(struct bench *bench, enum placement placement)
{
    const json_t *step = step_row(bench, "sealed-step-16", placement);
    const double ratio = row_ratio(bench, step, "sealed-bytes");
    const double bytes_us = row_figure(step_row(bench, "sealed-bytes", placement), "p50_us");
    struct verdict v = verdict_placed(bench, placement,
                                      "a step of 16 in each rank beside its bytes, sealed, N = 8",
                                      false, 1, "<= 1 us");
    if (ratio > 0 && bytes_us > 0) {
        verdict_count(&v, (ratio - 1) * bytes_us / 8);
        verdict_say(&v, "N=8 %.2f (%.2f x %.2f us)", (ratio - 1) * bytes_us / 8, ratio, bytes_us);
    } else {
        v.missing++;
    }
    verdict_end(&v, false);
}

static void judge_steps(struct bench *bench, enum placement placement)
{
    const double small_us = row_figure(step_row(bench, "sealed-step-16", placement), "p50_us");
    const json_t *step = step_row(bench, "sealed-step-256", placement);
    struct verdict v = verdict_placed(
        bench, placement, "a row of a step in each rank, sealed, N = 8", false, 25, "<= 25 ns");
    if (step && small_us > 0)
        verdict_add(&v, "N=8", (row_figure(step, "p50_us") - small_us) * 1e3 / ROWS_MORE / 8,
                    row_figure(step, "cpu_us"));
    else
        v.missing++;
    if (v.count)
        verdict_say(&v, " (the step of 256 by that of 16: %.2f)",
                    row_ratio(bench, step, "sealed-step-16"));
    verdict_end(&v, false);
    double ratio = row_ratio(bench, step, "pickle-step-256");
    v = verdict_placed(bench, placement, "a pickle ring by the step of 256, N = 8", true, 20,
                       ">= 20 x");
    verdict_add(&v, "N=8", ratio > 0 ? 1 / ratio : 0, 0);
    verdict_end(&v, false);
}

/* ---- groups ---- */

/* 0: not measured. */
static double rate_percent(const struct bench *bench, const char *kind, enum placement placement)
{
    return row_figure(row_find(bench, "rate", kind, placement, 8, BYTES, false), "cpu_share") * 100;
}

/* Where each wakeup is one of an idle processor the floors alone have 10 %. docs/bench.md. */
static void judge_rate_woken(struct bench *bench)
{
    static const char *const kinds[][2] = {{"named-off", "semaphore"}, {"sealed-off", "futex"}};
    struct verdict v =
        verdict_placed(bench, PLACEMENT_FREE, "CPU at 950 rounds a second, N = 8, by the floors",
                       false, 1.3, "<= 1.3 x");
    for (int k = 0; k < 2; k++) {
        const double floor = rate_percent(bench, kinds[k][1], PLACEMENT_FREE);
        verdict_add(&v, kinds[k][0],
                    floor > 0 ? rate_percent(bench, kinds[k][0], PLACEMENT_FREE) / floor : 0, 0);
    }
    if (v.count)
        verdict_say(&v, "; of a core: named %.1f %%, sealed %.1f; semaphore floor %.1f, futex %.1f",
                    rate_percent(bench, "named", PLACEMENT_FREE),
                    rate_percent(bench, "sealed", PLACEMENT_FREE),
                    rate_percent(bench, "semaphore", PLACEMENT_FREE),
                    rate_percent(bench, "futex", PLACEMENT_FREE));
    verdict_end(&v, false);
}

static void judge_rate(struct bench *bench, enum placement placement)
{
    if (placement == PLACEMENT_FREE) {
        judge_rate_woken(bench);
        return;
    }
    struct verdict v = verdict_placed(bench, placement, "CPU at 950 rounds a second, N = 8", false,
                                      10, "<= 10 % of a core");
    for (int k = 0; kinds_of_idle[k]; k++)
        verdict_add(&v, kinds_of_idle[k], rate_percent(bench, kinds_of_idle[k], placement), 0);
    if (v.count)
        verdict_say(&v, "; semaphore floor %.2f, futex floor %.2f",
                    rate_percent(bench, "semaphore", placement),
                    rate_percent(bench, "futex", placement));
    verdict_end(&v, false);
}

static void judge_groups(struct bench *bench)
{
    char what[64];
    struct verdict v = verdict_new(bench, "wake-ups of an idle group, N = 8", false, 0, "0");
    for (int k = 0; kinds_of_idle[k]; k++) {
        const json_t *row =
            row_find(bench, "idle", kinds_of_idle[k], PLACEMENT_FREE, 8, BYTES, false);
        if (!row)
            continue;
        verdict_count(&v, row_figure(row, "sleeps"));
        verdict_say(&v, "%s%s %.0f in %.0f ms", v.detail[0] ? ", " : "", kinds_of_idle[k],
                    row_figure(row, "sleeps"), row_figure(row, "idle_ms"));
    }
    verdict_end(&v, false);
    v = verdict_new(bench, "shared memory reserved, N = 8, defaults", false, 16, "<= 16 MiB");
    for (int k = 0; kinds_of_idle[k]; k++) {
        const json_t *row =
            row_find(bench, "start", kinds_of_idle[k], PLACEMENT_FREE, 8, BYTES, false);
        snprintf(what, sizeof what, "%s MiB", kinds_of_idle[k]);
        verdict_add(&v, what, row_figure(row, "shared_kib") / 1024, 0);
    }
    verdict_end(&v, false);
}

/* ---- programs of their own ---- */

/* The median of a row's array of numbers; 0: there is none. */
static double median_figure(const json_t *row, const char *name)
{
    double values[512];
    const json_t *array = json_object_get(row, name);
    size_t count = json_array_size(array);
    count = count > 512 ? 512 : count;
    for (size_t i = 0; i < count; i++)
        values[i] = json_number_value(json_array_get(array, i));
    return count ? measure_median(values, count) : 0;
}

/* The median over slices of one by the other of the same slice; 0: not measured. */
static double median_ratio(const json_t *row, const char *name, const char *other)
{
    double ratios[512];
    const json_t *own = json_object_get(row, name), *beside = json_object_get(row, other);
    size_t count = json_array_size(own);
    count = count > 512 ? 512 : count;
    count = count > json_array_size(beside) ? json_array_size(beside) : count;
    for (size_t i = 0; i < count; i++)
        ratios[i] = json_number_value(json_array_get(own, i)) /
                    json_number_value(json_array_get(beside, i));
    return count ? measure_median(ratios, count) : 0;
}

static const json_t *program_rows(const struct bench *bench, const char *program)
{
    return json_object_get(json_object_get(bench->root, program), "rows");
}

static void judge_deaths(struct bench *bench)
{
    size_t i;
    const json_t *row;
    char what[96];
    struct verdict v =
        verdict_new(bench, "pidfd readable to error at the caller, p99", false, 1000, "<= 1000 us");
    json_array_foreach(program_rows(bench, "deaths"), i, row)
    {
        snprintf(what, sizeof what, "%.0f MiB by %s (from kill() %.0f us, control %.0f)",
                 row_figure(row, "resident_mib"), json_string_value(json_object_get(row, "by")),
                 row_figure(row, "kill_p99_us"), row_figure(row, "control_p99_us"));
        verdict_add(&v, what, fmax(row_figure(row, "readable_p99_us"), 0.01), 0);
    }
    verdict_end(&v, false);
    v = verdict_new(bench, "replace one dead rank, channel part", false, 10, "<= 10 ms");
    json_array_foreach(program_rows(bench, "replace"), i, row)
    {
        snprintf(what, sizeof what, "N=%.0f %s", row_figure(row, "ranks"),
                 json_string_value(json_object_get(row, "attach")));
        verdict_add(&v, what, median_figure(row, "channel_us") / 1000, 0);
    }
    verdict_end(&v, false);
}

/* The worst row; what a thread has that only sleeps until a deadline is said beside each. */
static void judge_deadlines(struct bench *bench)
{
    size_t i;
    const json_t *row;
    char what[128];
    struct verdict v = verdict_new(bench, "deadline to COX_TIMEOUT at the caller, N = 8, p99",
                                   false, 1000, "<= 1000 us");
    json_array_foreach(program_rows(bench, "deadlines"), i, row)
    {
        snprintf(what, sizeof what, "%s %s %s (timer %.0f us)",
                 json_string_value(json_object_get(row, "attach")),
                 json_string_value(json_object_get(row, "by")),
                 json_string_value(json_object_get(row, "load")), row_figure(row, "timer_p99_us"));
        verdict_add(&v, what, fmax(row_figure(row, "late_p99_us"), 0.01), 0);
    }
    verdict_end(&v, false);
}

static const json_t *ranks_row(const struct bench *bench, enum placement placement)
{
    size_t i;
    const json_t *row;
    json_array_foreach(program_rows(bench, "ranks"), i, row)
    {
        const char *name = json_string_value(json_object_get(row, "placement"));
        if (row_figure(row, "ranks") == 8 && strcmp(name, placement_name(placement)) == 0)
            return row;
    }
    return NULL;
}

static void judge_ranks_woken(struct bench *bench, enum placement placement)
{
    const json_t *row = ranks_row(bench, placement);
    const double barrier = median_figure(row, "barrier");
    struct verdict v =
        verdict_placed(bench, placement, "group barrier, 8 ranks", false, 30, "<= 30 us");
    verdict_add(&v, "p50", barrier, 0);
    if (barrier > 0)
        verdict_say(&v, " (polling with usleep: %.0f)", median_figure(row, "usleep barrier"));
    verdict_end(&v, false);
    v = verdict_placed(bench, placement, "all-gather of 64 bytes by the barrier, 8 ranks", false,
                       1.3, "<= 1.3 x");
    verdict_add(&v, "N=8", barrier > 0 ? median_figure(row, "gather 64 B") / barrier : 0, 0);
    verdict_end(&v, false);
    v = verdict_placed(bench, placement, "reduction by memcpy and one barrier, 8 ranks", false,
                       1.25, "<= 1.25 x");
    verdict_add(&v, "large", median_ratio(row, "reduce large", "memcpy + barrier large"), 0);
    if (v.count)
        verdict_say(&v, " (small %.2f)", median_ratio(row, "reduce", "memcpy + barrier"));
    verdict_end(&v, false);
}

static void judge_ranks(struct bench *bench)
{
    const json_t *row = ranks_row(bench, PLACEMENT_FREE);
    struct verdict v = verdict_new(bench, "all-gather of fds, 8 ranks", false, 150, "<= 150 us");
    verdict_add(&v, "p50", median_figure(row, "gather fds"), 0);
    if (v.count)
        verdict_say(&v, " (the floor: %.0f)", median_figure(row, "futex fds"));
    verdict_end(&v, false);
    v = verdict_new(bench, "by-value handle open + close", false, 5, "<= 5 us");
    verdict_add(&v, "p50", median_figure(row, "handle open + close"), 0);
    verdict_end(&v, false);
}

static void judge_pull(struct bench *bench)
{
    size_t i;
    const json_t *row;
    char what[64];
    struct verdict v = verdict_new(bench, "KV pull by memcpy", true, 0.9, ">= 0.9 x");
    json_array_foreach(program_rows(bench, "pull"), i, row)
    {
        snprintf(what, sizeof what, "%.0f KiB", row_figure(row, "block_bytes") / 1024);
        verdict_add(&v, what, median_ratio(row, "memcpy_same_ns", "pull_ns"), 0);
    }
    verdict_end(&v, false);
}

static void judge_model(struct bench *bench)
{
    size_t i;
    const json_t *row;
    struct verdict v =
        verdict_new(bench, "channel's share of a step of the model, N = 4", false, 5, "< 5 %");
    json_array_foreach(program_rows(bench, "model"), i, row)
    {
        if (row_figure(row, "ranks") != 4)
            continue;
        const double share = row_figure(row, "channel_p50_share") * 100;
        verdict_count(&v, share);
        verdict_say(&v, "%sasync %s %.2f %% (of all steps %.2f %%)", v.detail[0] ? ", " : "",
                    json_string_value(json_object_get(row, "async")), share,
                    row_figure(row, "channel_share") * 100);
    }
    verdict_end(&v, false);
}

static const json_t *python_row(const struct bench *bench, const char *kind,
                                enum placement placement, uint32_t rank_count)
{
    return row_find(bench, "python", kind, placement, rank_count, BYTES, false);
}

/* Of each peer the number of ranks at which it is the closest. */
static void judge_python_peers(struct bench *bench, enum placement placement)
{
    static const char *const sleepers[] = {"py-pipe", "py-zmq"}, *const spinners[] = {"py-vllm",
                                                                                      "pickle"};
    char what[64] = "";
    struct verdict v =
        verdict_placed(bench, placement, "Python call by peers that sleep", false, 1, "< 1 x each");
    struct verdict cpu = verdict_placed(
        bench, placement, "CPU of a Python call by peers that sleep", false, 1, "<= 1 x each");
    /* On one processor a peer that spins only yields, and each rank's Python follows the other's:
     * docs/bench.md. */
    const bool packed = placement == PLACEMENT_ONE;
    struct verdict spin =
        verdict_placed(bench, placement, "Python call by peers that spin, N = 8", false,
                       packed ? 2 : 1, packed ? "<= 2 x each" : "< 1 x each");
    for (uint32_t rank_count = 1; rank_count <= 8; rank_count *= 2) {
        const json_t *own = python_row(bench, "py-call", placement, rank_count);
        for (int p = 0; p < 2; p++) {
            const json_t *peer = python_row(bench, sleepers[p], placement, rank_count);
            snprintf(what, sizeof what, "%s N=%u", sleepers[p], rank_count);
            verdict_add(&v, what, row_ratio(bench, own, sleepers[p]), 0);
            verdict_add(&cpu, what,
                        own && peer ? row_figure(own, "cpu_us") / row_figure(peer, "cpu_us") : 0,
                        0);
            snprintf(what, sizeof what, "%s", spinners[p]);
            if (rank_count == 8)
                verdict_add(&spin, what, row_ratio(bench, own, spinners[p]), 0);
        }
    }
    verdict_end(&v, true);
    verdict_end(&cpu, true);
    verdict_end(&spin, true);
}

/* A difference of two rounds, which is noise where it is below 0. */
static void add_python(struct verdict *v, const char *what, const char *kind,
                       enum placement placement)
{
    const json_t *c = python_row(v->bench, "named-collect", placement, 1);
    const json_t *row = python_row(v->bench, kind, placement, 1);
    if (!c || !row) {
        v->missing++;
        return;
    }
    const double added_us = row_figure(row, "p50_us") - row_figure(c, "p50_us");
    verdict_count(v, added_us);
    verdict_say(v, "%s%s %.2f of %.2f (%s)", v->detail[0] ? ", " : "", what, added_us,
                row_figure(row, "p50_us"), placement_text(placement));
}

static void judge_python(struct bench *bench)
{
    struct verdict v =
        verdict_new(bench, "what Python adds to a call, N = 1", false, 15, "<= 15 us");
    add_python(&v, "coordinator", "py-call-c", PLACEMENT_ONE);
    add_python(&v, "and worker", "py-call", PLACEMENT_ONE);
    add_python(&v, "coordinator", "py-call-c", PLACEMENT_APART);
    add_python(&v, "and worker", "py-call", PLACEMENT_APART);
    verdict_end(&v, false);
    const json_t *call = python_row(bench, "py-call", PLACEMENT_APART, 1);
    v = verdict_new(bench, "Python call by peers that sleep, N = 1, workers on another processor",
                    false, 1, "< 1 x each");
    verdict_add(&v, "py-pipe", row_ratio(bench, call, "py-pipe"), 0);
    verdict_add(&v, "py-zmq", row_ratio(bench, call, "py-zmq"), 0);
    verdict_end(&v, true);
    v = verdict_new(bench, "Python method call with small arguments by bytes", false, 1.5,
                    "<= 1.5 x");
    for (uint32_t rank_count = 1; rank_count <= 8; rank_count *= 2) {
        char what[16];
        snprintf(what, sizeof what, "N=%u", rank_count);
        const json_t *row = row_find(bench, "python-objects", "py-method", PLACEMENT_FREE,
                                     rank_count, BYTES, false);
        verdict_add(&v, what, row_ratio(bench, row, "py-small"), 0);
    }
    verdict_end(&v, true);
    v = verdict_new(bench, "5 MB there and back, 2 ranks, by the memcpy of its bytes", false, 1.5,
                    "<= 1.5 x");
    static const char *const arrays[] = {"py-array", "py-array-sealed"};
    for (size_t i = 0; i < 2; i++)
        verdict_add(&v, arrays[i],
                    row_ratio(bench,
                              row_find(bench, "python-arrays", arrays[i], PLACEMENT_FREE, 2,
                                       ARRAY_BYTES, false),
                              "py-memcpy"),
                    0);
    const double copies = row_ratio(
        bench, row_find(bench, "python-arrays", "py-copies", PLACEMENT_FREE, 2, ARRAY_BYTES, false),
        "py-memcpy");
    if (v.count && copies > 0)
        verdict_say(&v, " (the copies alone, by the processes: %.2f)", copies);
    verdict_end(&v, true);
    v = verdict_new(bench, "columns of 256 sequences to numpy", false, 10, "<= 10 us");
    verdict_add(&v, "p50",
                row_figure(python_row(bench, "py-columns-256", PLACEMENT_ONE, 1), "p50_us"), 0);
    verdict_end(&v, false);
}

static void judge_allocations(struct bench *bench)
{
    struct verdict v =
        verdict_new(bench, "allocations between request and reply, both sides", false, 0, "none");
    for (int k = 0; kinds_of_allocations[k]; k++) {
        const json_t *row = row_find(bench, "allocations", kinds_of_allocations[k], PLACEMENT_FREE,
                                     8, BYTES, false);
        if (!row)
            continue;
        verdict_count(&v, row_figure(row, "allocations"));
        verdict_say(&v, "%s%s %.0f in %.0f rounds", v.detail[0] ? ", " : "",
                    kinds_of_allocations[k], row_figure(row, "allocations"),
                    row_figure(row, "rounds"));
    }
    verdict_end(&v, false);
}

void targets_judge(struct bench *bench)
{
    json_object_set_new(bench->root, "targets", json_array());
    for (int p = 0; p < PLACEMENT_COUNT; p++) {
        const enum placement placement = (enum placement)p;
        judge_floors(bench, placement);
        judge_peers(bench, placement);
        judge_growth(bench, placement);
        judge_small_step(bench, placement);
        judge_steps(bench, placement);
        judge_rate(bench, placement);
        judge_ranks_woken(bench, placement);
        judge_python_peers(bench, placement);
    }
    judge_large(bench);
    judge_one_rank(bench);
    judge_call(bench);
    judge_busy(bench);
    judge_groups(bench);
    judge_deaths(bench);
    judge_deadlines(bench);
    judge_ranks(bench);
    judge_pull(bench);
    judge_model(bench);
    judge_allocations(bench);
    judge_python(bench);
}
