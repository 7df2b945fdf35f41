/* coxswain-bench: our channel beside the raw semaphore floor, in interleaved slices. Prints, judges
 * nothing. */
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../channel/base.h"
#include "coxswain.h"
#include "floor.h"
#include "load.h"
#include "measure.h"

#define GROUP_COUNT_MAX 16
#define PAIR_COUNT_MAX 1000
#define SIZE_MAX_ALLOWED (64 << 20)

enum subject {
    SUBJECT_FLOOR,
    SUBJECT_SUBMIT,
    SUBJECT_CALL,
    SUBJECT_SEALED,
    SUBJECT_SEALED_CALL,
    SUBJECT_COUNT
};

static const char *const subject_names[SUBJECT_COUNT] = {"floor", "submit", "call", "sealed",
                                                         "sealed-call"};

struct bench_options {
    uint32_t rank_counts[GROUP_COUNT_MAX];
    size_t group_count;
    size_t request_size;
    size_t reply_size;
    size_t rounds; /* of a slice */
    size_t pairs;
    bool kinds[SUBJECT_COUNT]; /* which are measured */
    const char *json_path;     /* NULL: none */
};

/* One row: everything about one number of ranks. */
struct bench_row {
    uint32_t rank_count;
    struct measure_slice *slices[SUBJECT_COUNT]; /* pairs of each */
    struct measure_slice medians[SUBJECT_COUNT];
    double ratios[SUBJECT_COUNT]; /* median over pairs of p50 by the floor's p50; without floor 0 */
};

/* What runs while one row is measured. */
struct bench_run {
    const struct bench_options *options;
    struct floor *floor;
    struct group *groups[2]; /* named, sealed */
    uint8_t *request;
    uint64_t *samples_ns;
    uint64_t floor_rounds;
};

static const char usage_text[] =
    "usage: coxswain-bench [OPTION...]\n"
    "Rounds of one request to every worker and one reply from each: the raw semaphore floor, and a "
    "Coxswain\n"
    "group by submit and handler and by synchronous call, with named and with sealed attach, in "
    "interleaved slices.\n"
    "  --ranks LIST      numbers of workers (1,2,4,8)\n"
    "  --bytes N         bytes of a request (4096)\n"
    "  --reply-bytes N   bytes of a reply (256)\n"
    "  --rounds N        rounds of one slice (3000)\n"
    "  --pairs N         slices of each kind (9)\n"
    "  --kinds LIST      what is measured, to look at one alone "
    "(floor,submit,call,sealed,sealed-call)\n"
    "  --json FILE       also writes every slice to FILE\n";

/* ---- options ---- */

static bool parse_size(const char *text, size_t min, size_t max, size_t *ret_value)
{
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (errno || end == text || *end || text[0] == '-' || value < min || value > max)
        return false;
    *ret_value = (size_t)value;
    return true;
}

static bool parse_ranks(const char *text, struct bench_options *options)
{
    char copy[256];
    size_t value, count = 0;
    char *rest = copy;
    if (snprintf(copy, sizeof copy, "%s", text) >= (int)sizeof copy)
        return false;
    for (char *item; (item = strsep(&rest, ",")) != NULL; count++) {
        if (count == GROUP_COUNT_MAX || !parse_size(item, 1, COX_RANK_COUNT_MAX, &value))
            return false;
        options->rank_counts[count] = (uint32_t)value;
    }
    options->group_count = count;
    return count > 0;
}

static bool parse_kinds(const char *text, struct bench_options *options)
{
    char copy[64];
    char *rest = copy;
    if (snprintf(copy, sizeof copy, "%s", text) >= (int)sizeof copy)
        return false;
    memset(options->kinds, 0, sizeof options->kinds);
    for (char *item; (item = strsep(&rest, ",")) != NULL;) {
        int s = 0;
        while (s < SUBJECT_COUNT && strcmp(item, subject_names[s]) != 0)
            s++;
        if (s == SUBJECT_COUNT)
            return false;
        options->kinds[s] = true;
    }
    return true;
}

/* Returns -1 to go on, or the exit status. */
static int parse_options(int argc, char **argv, struct bench_options *options)
{
    static const struct option names[] = {
        {"ranks", required_argument, NULL, 'n'},
        {"bytes", required_argument, NULL, 'b'},
        {"reply-bytes", required_argument, NULL, 'r'},
        {"rounds", required_argument, NULL, 'c'},
        {"pairs", required_argument, NULL, 'p'},
        {"kinds", required_argument, NULL, 'k'},
        {"json", required_argument, NULL, 'j'},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    *options = (struct bench_options){
        .rank_counts = {1, 2, 4, 8},
        .group_count = 4,
        .request_size = 4096,
        .reply_size = 256,
        .rounds = 3000,
        .pairs = 9,
        .kinds = {true, true, true, true, true},
    };
    for (int option; (option = getopt_long(argc, argv, "", names, NULL)) != -1;) {
        bool good = false;
        switch (option) {
        case 'n':
            good = parse_ranks(optarg, options);
            break;
        case 'b':
            good = parse_size(optarg, LOAD_SIZE_MIN, SIZE_MAX_ALLOWED, &options->request_size);
            break;
        case 'r':
            good = parse_size(optarg, LOAD_SIZE_MIN, SIZE_MAX_ALLOWED, &options->reply_size);
            break;
        case 'c':
            good = parse_size(optarg, 1, 10000000, &options->rounds);
            break;
        case 'p':
            good = parse_size(optarg, 1, PAIR_COUNT_MAX, &options->pairs);
            break;
        case 'k':
            good = parse_kinds(optarg, options);
            break;
        case 'j':
            options->json_path = optarg;
            good = true;
            break;
        case 'h':
            fputs(usage_text, stdout);
            return 0;
        default:
            fputs(usage_text, stderr);
            return 2;
        }
        if (!good) {
            fprintf(stderr, "coxswain-bench: '%s' is not allowed here\n%s", optarg, usage_text);
            return 2;
        }
    }
    if (optind < argc) {
        fprintf(stderr, "coxswain-bench: what is '%s'?\n%s", argv[optind], usage_text);
        return 2;
    }
    return -1;
}

/* ---- measuring ---- */

static int floor_slice(struct bench_run *run, size_t rounds)
{
    int r = 0;
    for (size_t i = 0; r == 0 && i < rounds; i++) {
        uint64_t begin_ns = measure_now_ns();
        r = floor_round(run->floor, run->request, ++run->floor_rounds);
        run->samples_ns[i] = measure_now_ns() - begin_ns;
    }
    return r;
}

static struct group *subject_group(const struct bench_run *run, enum subject subject)
{
    return run->groups[subject >= SUBJECT_SEALED];
}

static int run_rounds(struct bench_run *run, enum subject subject, size_t rounds,
                      struct cox_error *err)
{
    int r;
    switch (subject) {
    case SUBJECT_FLOOR:
        r = floor_slice(run, rounds);
        return r ? cox_fail(err, r, "the floor: %s", cox_status_text(r)) : 0;
    case SUBJECT_SUBMIT:
    case SUBJECT_SEALED:
        return group_slice(subject_group(run, subject), run->request, run->samples_ns, rounds, err);
    default:
        return group_slice_calls(subject_group(run, subject), run->request, run->samples_ns, rounds,
                                 err);
    }
}

static int run_slice(struct bench_run *run, enum subject subject, uint32_t rank_count,
                     struct measure_slice *ret_slice, struct cox_error *err)
{
    const pid_t *pids =
        subject == SUBJECT_FLOOR ? floor_pids(run->floor) : group_pids(subject_group(run, subject));
    struct measure_usage begin, end;
    int r = measure_usage_begin(pids, rank_count, &begin);
    if (r == 0) {
        r = run_rounds(run, subject, run->options->rounds, err);
        if (r)
            return r;
        r = measure_usage_end(pids, rank_count, &end);
    }
    if (r)
        return cox_fail(err, r, "reading CPU time: %s", cox_status_text(r));
    measure_slice_fill(ret_slice, run->samples_ns, run->options->rounds, &begin, &end);
    return 0;
}

static int measure_pairs(struct bench_run *run, struct bench_row *row, struct cox_error *err)
{
    const struct bench_options *options = run->options;
    int r = 0;
    /* Not counted: page faults, caches, clocks of the processor. */
    for (int s = 0; r == 0 && s < SUBJECT_COUNT; s++)
        if (options->kinds[s])
            r = run_rounds(run, (enum subject)s, options->rounds / 10 + 1, err);
    for (size_t pair = 0; r == 0 && pair < options->pairs; pair++)
        for (int s = 0; r == 0 && s < SUBJECT_COUNT; s++)
            if (options->kinds[s])
                r = run_slice(run, (enum subject)s, row->rank_count, &row->slices[s][pair], err);
    return r;
}

static bool needs_group(const struct bench_options *options, bool sealed)
{
    return sealed ? options->kinds[SUBJECT_SEALED] || options->kinds[SUBJECT_SEALED_CALL]
                  : options->kinds[SUBJECT_SUBMIT] || options->kinds[SUBJECT_CALL];
}

static int measure_row(const struct bench_options *options, struct bench_row *row,
                       struct cox_error *err)
{
    struct bench_run run = {.options = options};
    run.request = calloc(1, options->request_size);
    run.samples_ns = calloc(options->rounds + 1, sizeof *run.samples_ns);
    int r = run.request && run.samples_ns ? 0 : cox_fail(err, -ENOMEM, "no memory for samples");
    for (int s = 0; r == 0 && s < SUBJECT_COUNT; s++) {
        row->slices[s] = calloc(options->pairs, sizeof *row->slices[s]);
        r = row->slices[s] ? 0 : cox_fail(err, -ENOMEM, "no memory for slices");
    }
    if (r == 0) { /* first the floor: it forks, and there are no threads yet */
        r = floor_start(row->rank_count, options->request_size, options->reply_size, &run.floor);
        if (r)
            cox_fail(err, r, "starting the floor: %s", cox_status_text(r));
    }
    for (int sealed = 0; r == 0 && sealed < 2; sealed++)
        if (needs_group(options, sealed))
            r = group_start(row->rank_count, options->request_size, options->reply_size, sealed,
                            &run.groups[sealed], err);
    if (r == 0)
        r = measure_pairs(&run, row, err);
    group_free(run.groups[0]);
    group_free(run.groups[1]);
    floor_free(run.floor);
    free(run.request);
    free(run.samples_ns);
    return r;
}

static double median_of(const struct measure_slice *slices, size_t count, size_t member_offset)
{
    double values[PAIR_COUNT_MAX];
    for (size_t i = 0; i < count; i++)
        memcpy(&values[i], (const uint8_t *)&slices[i] + member_offset, sizeof values[i]);
    return measure_median(values, count);
}

static void row_summarize(struct bench_row *row, size_t pairs, bool with_floor)
{
    for (int s = 0; s < SUBJECT_COUNT; s++) {
        const struct measure_slice *slices = row->slices[s];
        double ratios[PAIR_COUNT_MAX];
        row->medians[s] = (struct measure_slice){
            .p50_us = median_of(slices, pairs, offsetof(struct measure_slice, p50_us)),
            .p99_us = median_of(slices, pairs, offsetof(struct measure_slice, p99_us)),
            .cpu_us = median_of(slices, pairs, offsetof(struct measure_slice, cpu_us)),
            .sleeps = median_of(slices, pairs, offsetof(struct measure_slice, sleeps)),
            .preempted = median_of(slices, pairs, offsetof(struct measure_slice, preempted)),
        };
        for (size_t pair = 0; pair < pairs; pair++)
            ratios[pair] =
                with_floor ? slices[pair].p50_us / row->slices[SUBJECT_FLOOR][pair].p50_us : 0;
        row->ratios[s] = measure_median(ratios, pairs);
    }
}

/* ---- printing ---- */

static void print_heading(const struct bench_options *options)
{
    printf("%zu bytes to every worker, %zu back from each; %zu slices of %zu rounds of each kind, "
           "interleaved;\n"
           "medians over slices; ratio: median over pairs of p50 by the floor's p50; cpu, sleeps "
           "and preempted: of\n"
           "all processes, per round\n\n",
           options->request_size, options->reply_size, options->pairs, options->rounds);
    printf("%5s  %-11s  %9s  %9s  %6s  %9s  %7s  %9s\n", "ranks", "kind", "p50 us", "p99 us",
           "ratio", "cpu us", "sleeps", "preempted");
}

static void print_row(const struct bench_options *options, const struct bench_row *row)
{
    for (int s = 0; s < SUBJECT_COUNT; s++) {
        if (!options->kinds[s])
            continue;
        const struct measure_slice *m = &row->medians[s];
        printf("%5" PRIu32 "  %-11s  %9.2f  %9.2f  %6.2f  %9.2f  %7.2f  %9.2f\n", row->rank_count,
               subject_names[s], m->p50_us, m->p99_us, row->ratios[s], m->cpu_us, m->sleeps,
               m->preempted);
    }
    fflush(stdout);
}

static void write_slices(FILE *file, const struct measure_slice *slices, size_t pairs)
{
    for (size_t pair = 0; pair < pairs; pair++) {
        const struct measure_slice *s = &slices[pair];
        fprintf(file,
                "%s{\"p50_us\": %.3f, \"p99_us\": %.3f, \"cpu_us\": %.3f, \"sleeps\": %.3f, "
                "\"preempted\": %.3f}",
                pair ? ", " : "", s->p50_us, s->p99_us, s->cpu_us, s->sleeps, s->preempted);
    }
}

static int write_json(const struct bench_options *options, const struct bench_row *rows)
{
    FILE *file = fopen(options->json_path, "we");
    if (!file) {
        fprintf(stderr, "coxswain-bench: %s: %s\n", options->json_path, strerror(errno));
        return -1;
    }
    fprintf(file,
            "{\"bytes\": %zu, \"reply_bytes\": %zu, \"rounds\": %zu, \"pairs\": %zu, \"rows\": [",
            options->request_size, options->reply_size, options->rounds, options->pairs);
    for (size_t i = 0; i < options->group_count; i++) {
        fprintf(file, "%s\n  {\"ranks\": %" PRIu32, i ? "," : "", rows[i].rank_count);
        for (int s = 0; s < SUBJECT_COUNT; s++) {
            if (!options->kinds[s])
                continue;
            fprintf(file, ",\n   \"%s\": {\"ratio\": %.4f, \"slices\": [", subject_names[s],
                    rows[i].ratios[s]);
            write_slices(file, rows[i].slices[s], options->pairs);
            fputs("]}", file);
        }
        fputc('}', file);
    }
    fputs("\n]}\n", file);
    bool failed = ferror(file);
    if (fclose(file) || failed) {
        fprintf(stderr, "coxswain-bench: %s could not be written\n", options->json_path);
        return -1;
    }
    return 0;
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], WORKER_FLAG) == 0)
        return group_worker_main(argc, argv);
    struct bench_options options;
    struct bench_row rows[GROUP_COUNT_MAX] = {0};
    struct cox_error err = {0};
    int r = parse_options(argc, argv, &options);
    if (r >= 0)
        return r;
    print_heading(&options);
    r = 0;
    for (size_t i = 0; r == 0 && i < options.group_count; i++) {
        rows[i].rank_count = options.rank_counts[i];
        r = measure_row(&options, &rows[i], &err);
        if (r)
            break;
        row_summarize(&rows[i], options.pairs, options.kinds[SUBJECT_FLOOR]);
        print_row(&options, &rows[i]);
    }
    if (r)
        fprintf(stderr, "coxswain-bench: %s\n", err.text);
    else if (options.json_path)
        r = write_json(&options, rows);
    for (size_t i = 0; i < options.group_count; i++)
        for (int s = 0; s < SUBJECT_COUNT; s++)
            free(rows[i].slices[s]);
    return r != 0;
}
