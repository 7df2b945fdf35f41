#include "groups.h"

#include <stdio.h>

#include "measure.h"

#define BYTES 4096
#define REPLY_BYTES 256
#define RATE 950
#define IDLE_MS 3000
#define SETTLE_NS 50000000
#define STARTS 5

static json_t *row_new(const char *section, const char *kind, enum placement placement,
                       uint32_t rank_count)
{
    return json_pack("{s:s, s:s, s:s, s:i, s:i, s:i, s:b}", "section", section, "kind", kind,
                     "placement", placement_name(placement), "ranks", (int)rank_count, "bytes",
                     BYTES, "reply_bytes", REPLY_BYTES, "busy", 0);
}

static void start_kind(const struct bench *bench, const struct kind *kind, enum placement placement,
                       uint32_t rank_count, struct process *process)
{
    bench_start(bench, kind, placement, rank_count, BYTES, REPLY_BYTES, process);
    process_await(process, kind->spins_idle);
}

/* Appends the row, unless the subject has failed: then it says why. Returns whether there are
 * figures to print. */
static bool row_end(struct bench *bench, json_t *row, const struct process *process)
{
    printf("%5.0f  %-16s", row_figure(row, "ranks"),
           json_string_value(json_object_get(row, "kind")));
    if (process->state != PROCESS_READY) {
        json_object_set_new(row, "missing", json_string(process->text));
        printf("  %s\n", process->text);
    }
    json_object_set_new(row, "processors", json_integer(process->processors));
    json_array_append_new(bench->rows, row);
    return process->state == PROCESS_READY;
}

static void rate_of(struct bench *bench, const struct kind *kind, enum placement placement,
                    uint32_t rank_count)
{
    const size_t count = bench->quick ? RATE / 10 : bench->brief ? RATE / 8 : RATE * 2;
    struct process process;
    struct procfs_usage begin, end;
    json_t *row = row_new("rate", kind->name, placement, rank_count);
    start_kind(bench, kind, placement, rank_count, &process);
    process_resume(&process);
    if (process.state == PROCESS_READY)
        process_rate(&process, bench->samples_ns, RATE / 10, 1000000000 / RATE); /* warm */
    if (process.state == PROCESS_READY) {
        const uint64_t begin_ns = measure_now_ns();
        procfs_usage(&process.tree, &begin);
        process_rate(&process, bench->samples_ns, count, 1000000000 / RATE);
        procfs_usage(&process.tree, &end);
        const double took_ns = (double)(measure_now_ns() - begin_ns);
        measure_sort(bench->samples_ns, count);
        json_object_set_new(row, "p50_us", json_real((double)bench->samples_ns[count / 2] / 1e3));
        json_object_set_new(row, "cpu_share",
                            json_real((double)(end.cpu_ns - begin.cpu_ns) / took_ns));
        json_object_set_new(row, "sleeps",
                            json_real((double)(end.sleeps - begin.sleeps) / (double)count));
    }
    if (row_end(bench, row, &process))
        printf("  p50 %8.2f us   cpu %6.1f %% of one core   sleeps %6.2f a round\n",
               row_figure(row, "p50_us"), row_figure(row, "cpu_share") * 100,
               row_figure(row, "sleeps"));
    process_free(&process);
}

static void each_kind(struct bench *bench, const char *const *kinds, enum placement placement,
                      uint32_t rank_count,
                      void (*measure)(struct bench *bench, const struct kind *kind,
                                      enum placement placement, uint32_t rank_count))
{
    for (size_t i = 0; kinds[i]; i++)
        if (name_chosen(bench->kinds, kinds[i]))
            measure(bench, kind_find(kinds[i]), placement, rank_count);
    fflush(stdout);
}

void groups_rate(struct bench *bench, const char *const *kinds, enum placement placement,
                 uint32_t rank_count)
{
    printf("\n%d rounds a second of %d bytes, %s\n", RATE, BYTES, placement_text(placement));
    each_kind(bench, kinds, placement, rank_count, rate_of);
}

static void idle_of(struct bench *bench, const struct kind *kind, enum placement placement,
                    uint32_t rank_count)
{
    const uint32_t idle_ms = bench->quick ? 100 : bench->brief ? IDLE_MS / 6 : IDLE_MS;
    struct process process;
    struct procfs_usage begin, end;
    json_t *row = row_new("idle", kind->name, placement, rank_count);
    start_kind(bench, kind, placement, rank_count, &process);
    if (process.state == PROCESS_READY)
        process_slice(&process, bench->samples_ns, 100, 60000);
    /* It has answered, and waits for our next line, which does not come before both readings. */
    if (process.state == PROCESS_READY) {
        process_idle(&process, 200);
        measure_sleep_until(measure_now_ns() + SETTLE_NS); /* until it has gone to sleep again */
        procfs_usage(&process.tree, &begin);
        const uint64_t until_ns = measure_now_ns() + idle_ms * UINT64_C(1000000);
        measure_sleep_until(until_ns);
        procfs_usage(&process.tree, &end);
        json_object_set_new(row, "sleeps", json_integer((json_int_t)(end.sleeps - begin.sleeps)));
        json_object_set_new(row, "runs", json_integer((json_int_t)(end.runs - begin.runs)));
        json_object_set_new(row, "idle_ms", json_integer(idle_ms));
    }
    if (row_end(bench, row, &process))
        printf("  %4.0f sleeps, %4.0f runs of a thread in %u ms\n", row_figure(row, "sleeps"),
               row_figure(row, "runs"), idle_ms);
    process_free(&process);
}

void groups_idle(struct bench *bench, uint32_t rank_count)
{
    printf("\nNothing asked, after 100 rounds\n");
    each_kind(bench, kinds_of_idle, PLACEMENT_FREE, rank_count, idle_of);
}

static void start_of(struct bench *bench, const struct kind *kind, enum placement placement,
                     uint32_t rank_count)
{
    const size_t starts = bench->quick || bench->brief ? 1 : STARTS;
    double start_ms[STARTS], pss[STARTS], private[STARTS];
    struct procfs_memory memory = {0};
    struct process process;
    json_t *row = row_new("start", kind->name, placement, rank_count);
    for (size_t i = 0; i < starts; i++) {
        const uint64_t begin_ns = measure_now_ns();
        start_kind(bench, kind, placement, rank_count, &process);
        start_ms[i] = (double)(measure_now_ns() - begin_ns) / 1e6;
        if (process.state == PROCESS_READY)
            process_slice(&process, bench->samples_ns, 100, 60000);
        if (process.state == PROCESS_READY)
            procfs_memory(&process.tree, &memory);
        pss[i] = (double)memory.pss_kib;
        private[i] = (double)memory.private_kib;
        process_free(&process);
        if (process.state != PROCESS_READY)
            break;
    }
    if (process.state == PROCESS_READY) {
        json_object_set_new(row, "start_ms", json_real(measure_median(start_ms, starts)));
        json_object_set_new(row, "pss_kib", json_real(measure_median(pss, starts)));
        json_object_set_new(row, "private_kib", json_real(measure_median(private, starts)));
        json_object_set_new(row, "shared_kib", json_integer((json_int_t)memory.shared_kib));
    }
    if (row_end(bench, row, &process))
        printf(
            "  started in %8.2f ms   %8.0f KiB PSS, %8.0f KiB private, %8.0f KiB of shared memory reserved\n",
            row_figure(row, "start_ms"), row_figure(row, "pss_kib"), row_figure(row, "private_kib"),
            row_figure(row, "shared_kib"));
}

void groups_start(struct bench *bench, uint32_t rank_count)
{
    each_kind(bench, kinds_of_idle, PLACEMENT_FREE, rank_count, start_of);
}

static void allocations_of(struct bench *bench, const struct kind *kind, enum placement placement,
                           uint32_t rank_count)
{
    const size_t count = bench->quick ? 50 : bench->brief ? 500 : 5000;
    uint64_t allocations = 0;
    struct process process;
    json_t *row = row_new("allocations", kind->name, placement, rank_count);
    start_kind(bench, kind, placement, rank_count, &process);
    /* The first rounds find buffers that grow. */
    if (process.state == PROCESS_READY && process_slice(&process, bench->samples_ns, 100, 60000) &&
        process_slice(&process, bench->samples_ns, count, 60000) &&
        process_allocations(&process, &allocations)) {
        json_object_set_new(row, "allocations", json_integer((json_int_t)allocations));
        json_object_set_new(row, "rounds", json_integer((json_int_t)count));
    }
    if (row_end(bench, row, &process))
        printf("  %4.0f in %.0f rounds\n", row_figure(row, "allocations"),
               row_figure(row, "rounds"));
    process_free(&process);
}

void groups_allocations(struct bench *bench, uint32_t rank_count)
{
    printf("\nCalls of the allocator, in coordinator and workers, after 100 rounds\n");
    each_kind(bench, kinds_of_allocations, PLACEMENT_FREE, rank_count, allocations_of);
}
