#include "targets.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "measure.h"

#define BYTES 4096
#define MIB ((size_t)1 << 20)
/* That a step of 256 sequences has, and one of 16 has not. */
#define ROWS_MORE (256 - 16)
#define NO_SLICES ((struct spread){0})

/* One target while it is put together: the worst of several figures, and all of them as text. */
struct verdict {
    struct bench *bench;
    char name[96];
    /* in words */
    const char *target;
    double limit;
    /* the figure must be no smaller; otherwise no larger */
    bool at_least;
    double worst;
    /* of the worst; count 0: it is a figure without slices */
    struct spread slices;
    size_t count, missing;
    char detail[2048];
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

static void verdict_count(struct verdict *v, double figure, struct spread slices)
{
    if (v->count++ > 0 && (v->at_least ? figure >= v->worst : figure <= v->worst))
        return;
    v->worst = figure;
    v->slices = slices;
}

/* A figure of 0 was not measured. */
static void verdict_add(struct verdict *v, const char *what, double figure, double cpu_us)
{
    const char *comma = v->detail[0] ? ", " : "";
    if (!(figure > 0)) {
        v->missing++;
        return;
    }
    verdict_count(v, figure, NO_SLICES);
    if (cpu_us > 0)
        verdict_say(v, "%s%s %.2f (cpu %.0f us)", comma, what, figure, cpu_us);
    else
        verdict_say(v, "%s%s %.2f", comma, what, figure);
}

/* The median of slices, and in brackets the quartiles. */
static void verdict_slices(struct verdict *v, const char *what, struct spread slices)
{
    if (slices.count == 0) {
        v->missing++;
        return;
    }
    verdict_count(v, slices.median, slices.count > 1 ? slices : NO_SLICES);
    verdict_say(v, "%s%s %.2f", v->detail[0] ? ", " : "", what, slices.median);
    if (slices.count > 1)
        verdict_say(v, " (%.2f to %.2f of %zu)", slices.low, slices.high, slices.count);
}

/* What is partly not measured is not met, unless a peer that is not here is all that lacks. */
static void verdict_end(struct verdict *v, bool may_lack)
{
    json_t *target = json_pack("{s:s, s:s, s:n, s:n, s:n}", "name", v->name, "target", v->target,
                               "measured", "quartiles", "met");
    if (v->count) {
        bool met = v->at_least ? v->worst >= v->limit : v->worst <= v->limit;
        json_object_set_new(target, "measured", json_real(v->worst));
        if (!met || v->missing == 0 || may_lack)
            json_object_set_new(target, "met", json_boolean(met));
        if (v->slices.count)
            json_object_set_new(target, "quartiles",
                                json_pack("[f, f]", v->slices.low, v->slices.high));
        if (v->slices.count && v->slices.low < v->limit && v->limit < v->slices.high)
            verdict_say(v, "; the limit is between the quartiles");
        if (v->missing)
            verdict_say(v, "; %zu not measured", v->missing);
    }
    json_object_set_new(target, "detail", json_string(v->detail));
    json_array_append_new(json_object_get(v->bench->root, "targets"), target);
}

/* ---- ratios of rows ---- */

enum flag {
    FREE = 1 << PLACEMENT_FREE,
    ONE = 1 << PLACEMENT_ONE,
    APART = 1 << PLACEMENT_APART,
    /* its name has the placement behind it */
    PLACED = 8,
    AT_LEAST = 16,
    /* what is not measured does not matter: a peer that is not here */
    MAY_LACK = 32,
    BUSY = 64,
};

/* Rows by others of the same batch, slice by slice: each pair at each number of ranks. */
static const struct ratios {
    const char *name, *target;
    double limit;
    unsigned flags;
    /* NULL: that of small requests in each placement */
    const char *section;
    size_t bytes;
    uint32_t ranks[6];
    const char *pairs[4][2];
    /* what is said beside, and not judged */
    const char *note, *noted[2][2];
} ratios[] = {
    /* clang-format off */
    {"named by the semaphore floor, N = 2, 4, 8", "<= 1.15 x", 1.15, FREE | ONE | PLACED, NULL,
     BYTES, {2, 4, 8}, {{"named", "semaphore"}}, "the floor by itself",
     {{"semaphore-again", "semaphore"}}},
    {"sealed by the futex floor, N = 8, 16, 32", "<= 1.15 x", 1.15, FREE | ONE | PLACED, NULL,
     BYTES, {8, 16, 32}, {{"sealed", "futex"}}, "the floor by itself", {{"futex-again", "futex"}}},
    {"sealed by the semaphore floor, N = 8, 16, 32", "< 1 x", 1, FREE | ONE | PLACED, NULL, BYTES,
     {8, 16, 32}, {{"sealed", "semaphore"}}, "the floor by itself",
     {{"semaphore-again", "semaphore"}}},
    {"sealed by peers that sleep, every N >= 2", "< 1 x each", 1, FREE | ONE | PLACED | MAY_LACK,
     NULL, BYTES, {2, 4, 8, 16, 32}, {{"sealed", "seqpacket"}, {"sealed", "iceoryx"},
     {"sealed", "zmq"}, {"sealed", "nng"}}, NULL, {{0}}},
    {"ZeroMQ by sealed, N = 8", ">= 4 x", 4, FREE | ONE | PLACED | AT_LEAST, NULL, BYTES, {8},
     {{"zmq", "sealed"}}, NULL, {{0}}},
    {"sealed by peers that spin, N >= 8", "< 1 x each", 1, FREE | ONE | PLACED | MAY_LACK, NULL,
     BYTES, {8, 16, 32}, {{"sealed", "mpi"}, {"sealed", "pickle"}}, NULL, {{0}}},
    {"a pickle ring by the step of 256, N = 8", ">= 20 x", 20, FREE | ONE | PLACED | AT_LEAST,
     "steps", BYTES, {8}, {{"pickle-step-256", "sealed-step-256"}}, NULL, {{0}}},
    {"Python call by peers that sleep", "< 1 x each", 1, FREE | ONE | PLACED | MAY_LACK, "python",
     BYTES, {1, 2, 4, 8}, {{"py-call", "py-pipe"}, {"py-call", "py-zmq"}}, NULL, {{0}}},
    {"Python call by peers that spin, N = 8", "< 1 x each", 1, FREE | PLACED | MAY_LACK, "ring",
     BYTES, {8}, {{"py-call", "pickle"}, {"py-call", "py-vllm"}}, "the ring by itself",
     {{"pickle-again", "pickle"}}},
    /* On one processor a peer that spins only yields, and each rank's Python follows the other's:
     * docs/bench.md. */
    {"Python call by peers that spin, N = 8", "<= 2 x each", 2, ONE | PLACED | MAY_LACK, "python",
     BYTES, {8}, {{"py-call", "pickle"}, {"py-call", "py-vllm"}}, NULL, {{0}}},
    {"1 MiB by the semaphore floor, N = 4", "<= 1.0 x", 1, FREE, NULL, MIB, {4},
     {{"named", "semaphore"}, {"sealed", "semaphore"}}, NULL, {{0}}},
    /* Two slices of the same thing differ by as much on a busy machine. */
    {"N = 1 with busy cores, by the same that does not spin", "<= 1.05 x", 1.05, FREE | BUSY,
     "one", BYTES, {1}, {{"sealed", "sealed-off"}}, NULL, {{0}}},
    /* A quiet round spins, one beside loops is wakeups: docs/bench.md. */
    {"two busy loops beside, N = 8, by the floors beside them", "<= 1.15 x", 1.15, FREE | BUSY,
     "loops", BYTES, {8}, {{"named", "semaphore"}, {"sealed", "futex"}},
     "the floors by themselves", {{"semaphore-again", "semaphore"}, {"futex-again", "futex"}}},
    {"Python call by peers that sleep, N = 1, workers on another processor", "< 1 x each", 1,
     APART | MAY_LACK, "python", BYTES, {1}, {{"py-call", "py-pipe"}, {"py-call", "py-zmq"}}, NULL,
     {{0}}},
    {"Python method call with small arguments by bytes", "<= 1.5 x", 1.5, FREE | MAY_LACK,
     "python-objects", BYTES, {1, 2, 4, 8}, {{"py-method", "py-small"}}, NULL, {{0}}},
    {"5 MB there and back, 2 ranks, by the memcpy of its bytes", "<= 1.5 x", 1.5, FREE | MAY_LACK,
     "copies", ARRAY_BYTES, {2}, {{"py-array", "py-memcpy"}, {"py-array-sealed", "py-memcpy"}},
     "the copies alone, by the processes", {{"py-copies", "py-memcpy"}}},
    /* clang-format on */
};

static struct spread ratio_of(const struct bench *bench, const struct ratios *own,
                              enum placement placement, const char *const pair[2],
                              uint32_t rank_count)
{
    const char *section = own->section                 ? own->section
                          : placement == PLACEMENT_ONE ? "packed"
                                                       : "bytes";
    return row_spread(
        bench,
        row_find(bench, section, pair[0], placement, rank_count, own->bytes, own->flags & BUSY),
        pair[1]);
}

static void judge_ratios(struct bench *bench, const struct ratios *own, enum placement placement)
{
    char what[64];
    struct verdict v =
        own->flags & PLACED
            ? verdict_placed(bench, placement, own->name, own->flags & AT_LEAST, own->limit,
                             own->target)
            : verdict_new(bench, own->name, own->flags & AT_LEAST, own->limit, own->target);
    for (int p = 0; p < 4 && own->pairs[p][0]; p++)
        for (int i = 0; i < 6 && own->ranks[i]; i++) {
            snprintf(what, sizeof what, "%s by %s N=%u", own->pairs[p][0], own->pairs[p][1],
                     own->ranks[i]);
            verdict_slices(&v, what, ratio_of(bench, own, placement, own->pairs[p], own->ranks[i]));
        }
    for (int p = 0; p < 2 && own->noted[p][0]; p++)
        for (int i = 0; i < 6 && own->ranks[i] && v.count; i++) {
            const struct spread slices =
                ratio_of(bench, own, placement, own->noted[p], own->ranks[i]);
            if (slices.count)
                verdict_say(&v, "; %s: %s N=%u %.2f (%.2f to %.2f)", own->note, own->noted[p][0],
                            own->ranks[i], slices.median, slices.low, slices.high);
        }
    verdict_end(&v, own->flags & MAY_LACK);
}

static void judge_all_ratios(struct bench *bench)
{
    for (size_t i = 0; i < sizeof ratios / sizeof *ratios; i++)
        for (int p = 0; p <= PLACEMENT_APART; p++)
            if (ratios[i].flags & (1u << p))
                judge_ratios(bench, &ratios[i], (enum placement)p);
}

/* ---- one by one ---- */

static double slope_of(const struct bench *bench, const char *kind, enum placement placement)
{
    static const uint32_t ranks[] = {4, 8, 16, 32};
    const char *section = placement == PLACEMENT_ONE ? "packed" : "bytes";
    double x[4], y[4];
    for (int i = 0; i < 4; i++) {
        x[i] = ranks[i];
        y[i] =
            row_figure(row_find(bench, section, kind, placement, ranks[i], BYTES, false), "p50_us");
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

static void judge_one_rank(struct bench *bench)
{
    const json_t *row = row_find(bench, "one", "sealed", PLACEMENT_FREE, 1, BYTES, false);
    struct verdict v =
        verdict_new(bench, "N = 1 with a free core, sealed", false, 2.5, "<= 2.5 us");
    verdict_slices(&v, "p50", spread_of(json_object_get(row, "pairs"), NULL));
    row = row_find(bench, "one", "sealed", PLACEMENT_APART, 1, BYTES, false);
    if (v.count && row)
        verdict_say(&v, "; with the worker on the other processor %.2f", row_figure(row, "p50_us"));
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
        verdict_count(&v, (ratio - 1) * submit / hand_off, NO_SLICES);
        verdict_say(&v,
                    "%.2f us more than %.2f us; a hand-off takes %.2f us, within a round %.2f us",
                    (ratio - 1) * submit, submit, hand_off,
                    (row_ratio(bench, handed, "sealed") - 1) * submit);
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
        verdict_count(&v, (ratio - 1) * bytes_us / 8, NO_SLICES);
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
        verdict_count(&v, row_figure(row, "sleeps"), NO_SLICES);
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

/* Numbers of every row of a program, or of those of 8 ranks in one placement; by others of the same
 * slice, where there are. */
static const struct figures {
    const char *name, *target;
    double limit;
    unsigned flags;
    const char *program;
    /* of a row, that say which it is */
    const char *labels[3];
    const char *figure, *by;
    /* what is said beside, and not judged */
    const char *note, *noted[2][2];
} figures[] = {
    /* clang-format off */
    {"pidfd readable to error at the caller, p99", "<= 1000 us", 1000, 0, "deaths",
     {"resident_mib", "by"}, "readable_p99_us", NULL, "from kill(), and of the control",
     {{"kill_p99_us"}, {"control_p99_us"}}},
    {"replace one dead rank, channel part", "<= 10000 us", 10000, 0, "replace", {"ranks",
     "attach"}, "channel_us", NULL, NULL, {{0}}},
    {"deadline to COX_TIMEOUT at the caller, N = 8, p99", "<= 1000 us", 1000, 0, "deadlines",
     {"attach", "by", "load"}, "late_p99_us_of_turns", NULL, "of all turns, and of the timer",
     {{"late_p99_us_of_all"}, {"timer_p99_us"}}},
    {"group barrier, 8 ranks", "<= 30 us", 30, FREE | ONE | PLACED, "ranks", {0}, "barrier", NULL,
     "polling with usleep", {{"usleep barrier"}}},
    {"all-gather of 64 bytes by the barrier, 8 ranks", "<= 1.3 x", 1.3, FREE | ONE | PLACED,
     "ranks", {0}, "gather 64 B", "barrier", NULL, {{0}}},
    {"reduction by memcpy and one barrier, 8 ranks", "<= 1.25 x", 1.25, FREE | ONE | PLACED,
     "ranks", {0}, "reduce large", "memcpy + barrier large",
     "small, and the memcpy from where the ranks wrote", {{"reduce", "memcpy + barrier"},
     {"memcpy of ranks + barrier large", "memcpy + barrier large"}}},
    {"all-gather of fds, 8 ranks", "<= 150 us", 150, FREE, "ranks", {0}, "gather fds", NULL,
     "the floor", {{"futex fds"}}},
    {"by-value handle open + close", "<= 5 us", 5, FREE, "ranks", {0}, "handle open + close", NULL,
     NULL, {{0}}},
    {"KV pull by memcpy", ">= 0.9 x", 0.9, AT_LEAST, "pull", {"block_bytes"}, "memcpy_same_ns",
     "pull_ns", NULL, {{0}}},
    /* clang-format on */
};

/* A number is a slice by itself. */
static struct spread figure_of(const json_t *row, const char *figure, const char *by)
{
    const json_t *value = json_object_get(row, figure);
    if (!json_is_number(value))
        return spread_of(value, by ? json_object_get(row, by) : NULL);
    const double number = json_number_value(value);
    return (struct spread){number, number, number, 1};
}

static void judge_row(struct verdict *v, const struct figures *own, const json_t *row)
{
    char what[96] = "", *at = what;
    for (int i = 0; i < 3 && own->labels[i]; i++) {
        const json_t *label = json_object_get(row, own->labels[i]);
        const size_t room = sizeof what - (size_t)(at - what);
        at += json_is_string(label)
                  ? snprintf(at, room, "%s%s", i ? " " : "", json_string_value(label))
                  : snprintf(at, room, "%s%s %.0f", i ? " " : "", own->labels[i],
                             json_number_value(label));
    }
    verdict_slices(v, own->labels[0] ? what : own->figure, figure_of(row, own->figure, own->by));
    for (int i = 0; i < 2 && own->noted[i][0]; i++) {
        const struct spread slices = figure_of(row, own->noted[i][0], own->noted[i][1]);
        if (i == 0)
            verdict_say(v, " [%s:", own->note);
        verdict_say(v, " %.2f", slices.median);
        if (slices.count > 1)
            verdict_say(v, " (%.2f to %.2f)", slices.low, slices.high);
        if (i == 1 || !own->noted[1][0])
            verdict_say(v, "]");
    }
}

static const json_t *program_rows(const struct bench *bench, const char *program)
{
    return json_object_get(json_object_get(bench->root, program), "rows");
}

static void judge_figures(struct bench *bench, const struct figures *own, enum placement placement)
{
    size_t i;
    const json_t *row;
    const unsigned placed = own->flags & (FREE | ONE);
    struct verdict v =
        own->flags & PLACED
            ? verdict_placed(bench, placement, own->name, own->flags & AT_LEAST, own->limit,
                             own->target)
            : verdict_new(bench, own->name, own->flags & AT_LEAST, own->limit, own->target);
    json_array_foreach(program_rows(bench, own->program), i, row)
    {
        const char *name = json_string_value(json_object_get(row, "placement"));
        if (!placed ||
            (row_figure(row, "ranks") == 8 && strcmp(name, placement_name(placement)) == 0))
            judge_row(&v, own, row);
    }
    verdict_end(&v, false);
}

static void judge_all_figures(struct bench *bench)
{
    for (size_t i = 0; i < sizeof figures / sizeof *figures; i++)
        for (int p = 0; p < PLACEMENT_COUNT; p++)
            if (figures[i].flags & (1u << p) || (p == 0 && !(figures[i].flags & (FREE | ONE))))
                judge_figures(bench, &figures[i], (enum placement)p);
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
        verdict_count(&v, share, NO_SLICES);
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
    verdict_count(v, added_us, NO_SLICES);
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
    v = verdict_new(bench, "columns of 256 sequences to numpy", false, 10, "<= 10 us");
    verdict_slices(
        &v, "p50",
        spread_of(json_object_get(python_row(bench, "py-columns-256", PLACEMENT_ONE, 1), "pairs"),
                  NULL));
    verdict_end(&v, false);
}

/* At each number of ranks. */
static void judge_python_cpu(struct bench *bench, enum placement placement)
{
    static const char *const peers[] = {"py-pipe", "py-zmq"};
    char what[64];
    struct verdict v = verdict_placed(bench, placement, "CPU of a Python call by peers that sleep",
                                      false, 1, "<= 1 x each");
    for (uint32_t rank_count = 1; rank_count <= 8; rank_count *= 2)
        for (int p = 0; p < 2; p++) {
            const json_t *own = python_row(bench, "py-call", placement, rank_count);
            const json_t *peer = python_row(bench, peers[p], placement, rank_count);
            snprintf(what, sizeof what, "%s N=%u", peers[p], rank_count);
            verdict_add(&v, what,
                        own && peer ? row_figure(own, "cpu_us") / row_figure(peer, "cpu_us") : 0,
                        0);
        }
    verdict_end(&v, true);
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
        verdict_count(&v, row_figure(row, "allocations"), NO_SLICES);
        verdict_say(&v, "%s%s %.0f in %.0f rounds", v.detail[0] ? ", " : "",
                    kinds_of_allocations[k], row_figure(row, "allocations"),
                    row_figure(row, "rounds"));
    }
    verdict_end(&v, false);
}

void targets_judge(struct bench *bench)
{
    json_object_set_new(bench->root, "targets", json_array());
    judge_all_ratios(bench);
    for (int p = 0; p < PLACEMENT_COUNT; p++) {
        const enum placement placement = (enum placement)p;
        judge_growth(bench, placement);
        judge_small_step(bench, placement);
        judge_steps(bench, placement);
        judge_rate(bench, placement);
        judge_python_cpu(bench, placement);
    }
    judge_one_rank(bench);
    judge_call(bench);
    judge_groups(bench);
    judge_all_figures(bench);
    judge_model(bench);
    judge_allocations(bench);
    judge_python(bench);
}
