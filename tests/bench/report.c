#include "report.h"

#include <stdio.h>
#include <string.h>

#define ROW_FORMAT "%5s  %10s  %-5s  %-16s"

void report_heading(const struct bench *bench)
{
    printf(
        "Requests to every worker, and %d bytes back from each, every byte read by every worker. %zu slices of about %zu ms of each kind,\n"
        "interleaved; medians over slices. x sem, x futex: median over pairs of p50 by that floor's p50. cpu, sleeps (voluntary switches),\n"
        "preempted and runs (times a thread was put on a processor): of all processes, per round. All of a subject are placed by the kernel, on the processors that this program may use,\n"
        "or are on one processor, the lowest of these.\n",
        256, bench->pairs, (size_t)bench->slice_ms);
}

void report_section(const char *text, enum placement placement)
{
    printf("\n%s, %s\n" ROW_FORMAT "  %10s %10s  %6s %7s  %10s %8s %9s %8s\n", text,
           placement_text(placement), "ranks", "bytes", "load", "kind", "p50 us", "p99 us", "x sem",
           "x futex", "cpu us", "sleeps", "preempted", "runs");
    fflush(stdout);
}

static void print_ratio(double ratio, int width)
{
    if (ratio > 0)
        printf(" %*.2f", width, ratio);
    else
        printf(" %*s", width, "-");
}

static void print_row(const struct bench *bench, const json_t *row)
{
    char ranks[16], bytes[24];
    const char *kind = json_string_value(json_object_get(row, "kind"));
    const char *missing = json_string_value(json_object_get(row, "missing"));
    snprintf(ranks, sizeof ranks, "%.0f", row_figure(row, "ranks"));
    snprintf(bytes, sizeof bytes, "%.0f", row_figure(row, "bytes"));
    printf(ROW_FORMAT, ranks, bytes, json_is_true(json_object_get(row, "busy")) ? "busy" : "quiet",
           kind);
    if (missing) {
        printf("  %s\n", missing);
        return;
    }
    printf("  %10.2f %10.2f ", row_figure(row, "p50_us"), row_figure(row, "p99_us"));
    print_ratio(row_ratio(bench, row, "semaphore"), 6);
    print_ratio(row_ratio(bench, row, "futex"), 7);
    printf("  %10.2f %8.2f %9.2f %8.2f\n", row_figure(row, "cpu_us"), row_figure(row, "sleeps"),
           row_figure(row, "preempted"), row_figure(row, "runs"));
}

void report_rows(const struct bench *bench, size_t count)
{
    const size_t size = json_array_size(bench->rows);
    for (size_t i = size - count; i < size; i++)
        print_row(bench, json_array_get(bench->rows, i));
    fflush(stdout);
}

void report_visits(const struct bench *bench)
{
    size_t i;
    const json_t *row, *last = NULL;
    json_array_foreach(bench->rows, i, row)
    {
        const char *name = json_string_value(json_object_get(row, "placement"));
        if (!json_object_get(row, "visits"))
            continue;
        if (!last ||
            !json_equal(json_object_get(last, "placement"), json_object_get(row, "placement")))
            report_section("Visited at many times of the run", placement_of(name));
        print_row(bench, row);
        last = row;
    }
}

/* The floor's name, where the row is one that is measured again; else NULL. */
static const char *floor_again(const json_t *row)
{
    const char *kind = json_string_value(json_object_get(row, "kind"));
    return strcmp(kind, "semaphore-again") == 0 ? "semaphore"
           : strcmp(kind, "futex-again") == 0   ? "futex"
           : strcmp(kind, "pickle-again") == 0  ? "pickle"
                                                : NULL;
}

void report_again(const struct bench *bench)
{
    size_t i;
    const json_t *row;
    printf("\nA floor by itself, by which the measurement varies: median and quartiles\n");
    json_array_foreach(bench->rows, i, row)
    {
        const char *floor = floor_again(row);
        const struct spread ratio = floor ? row_spread(bench, row, floor) : (struct spread){0};
        if (ratio.count)
            printf("%-14s  %-5s  %-10s  N=%-3.0f  %6.2f  (%.2f to %.2f)\n",
                   json_string_value(json_object_get(row, "placement")),
                   json_is_true(json_object_get(row, "busy")) ? "busy" : "quiet", floor,
                   row_figure(row, "ranks"), ratio.median, ratio.low, ratio.high);
    }
}

void report_targets(const struct bench *bench)
{
    size_t i;
    const json_t *target;
    printf("\nTargets\n");
    json_array_foreach(json_object_get(bench->root, "targets"), i, target)
    {
        const json_t *met = json_object_get(target, "met");
        const char *detail = json_string_value(json_object_get(target, "detail"));
        printf("%-12s  %-72s  %-18s  %s\n",
               json_is_true(met)    ? "met"
               : json_is_false(met) ? "NOT MET"
                                    : "not measured",
               json_string_value(json_object_get(target, "name")),
               json_string_value(json_object_get(target, "target")), detail ? detail : "");
    }
}
