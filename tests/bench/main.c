/* coxswain-bench: Coxswain, the least that blocking processes can do, and peers, side by side.
 * Prints, judges nothing but the targets at its end; the exit status says only whether it ran.
 * Started again as each of its subjects and workers. */
#include "conductor.h"
#include "coxswain.h"
#include "floor.h"
#include "group.h"
#include "load.h"
#include "steps.h"

#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SUBJECT_FLAG "--subject"
#define SIZE_MAX_ALLOWED ((size_t)64 << 20)
#define PAIRS_MAX_ALLOWED 64
#define BUDGET_MAX_S 3600
#define BRIEF_BUDGET_S 117

static const char usage_text[] =
    "usage: coxswain-bench [OPTION...]\n"
    "Rounds of one request to every worker and one reply from each: by Coxswain, by the raw floors, and by\n"
    "peers as far as they are built; decode steps, depth, growth, memory, deaths; and the targets.\n"
    "  --sections LIST  of " CONDUCTOR_SECTIONS " (all)\n"
    "  --kinds LIST     subjects, as the table names them (all)\n"
    "  --ranks LIST     numbers of workers, of bytes (1,2,4,8,16,32)\n"
    "  --bytes LIST     sizes of a request, of bytes (4096,65536,1048576,67108864)\n"
    "  --pairs N        slices of each kind (9)\n"
    "  --slice-ms N     time of a slice (25)\n"
    "  --brief          every row in two minutes, with wider intervals\n"
    "  --budget S       seconds of a run (brief: 117); a row that has no time left says so\n"
    "  --quick          seconds in place of minutes; the figures mean nothing\n"
    "  --json FILE      also writes everything to FILE\n";

struct options {
    struct bench bench;
    const char *json_path;
};

/* ---- subjects ---- */

/* argv begins with the subject's name. */
static int own_subject_main(int argc, char **argv)
{
    if (strcmp(argv[0], "semaphore") == 0)
        return subject_main(argc, argv, &floor_semaphore_ops);
    if (strcmp(argv[0], "futex") == 0)
        return subject_main(argc, argv, &floor_futex_ops);
    if (strcmp(argv[0], "coxswain") == 0)
        return coxswain_subject_main(argc, argv);
    if (strcmp(argv[0], "steps") == 0)
        return steps_subject_main(argc, argv);
    fprintf(stderr, "coxswain-bench: what is '%s'?\n", argv[0]);
    return 2;
}

static int worker_main(int argc, char **argv)
{
    return strcmp(argv[2], STEPS_WORDS) == 0 ? steps_worker_main(argc, argv)
                                             : coxswain_worker_main(argc, argv);
}

/* ---- options ---- */

static bool parse_number(const char *text, size_t min, size_t max, size_t *ret_value)
{
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (errno || end == text || *end || text[0] == '-' || value < min || value > max)
        return false;
    *ret_value = value;
    return true;
}

static bool parse_numbers(const char *text, size_t min, size_t max, size_t *ret_values,
                          size_t *ret_count)
{
    char copy[256];
    char *rest = copy;
    size_t count = 0;
    if (snprintf(copy, sizeof copy, "%s", text) >= (int)sizeof copy)
        return false;
    for (char *item; (item = strsep(&rest, ",")) != NULL; count++)
        if (count == BENCH_LIST_MAX || !parse_number(item, min, max, &ret_values[count]))
            return false;
    *ret_count = count;
    return true;
}

static bool parse_ranks(const char *text, struct bench *bench)
{
    size_t values[BENCH_LIST_MAX];
    if (!parse_numbers(text, 1, COX_RANK_COUNT_MAX, values, &bench->rank_count_count))
        return false;
    for (size_t i = 0; i < bench->rank_count_count; i++)
        bench->rank_counts[i] = (uint32_t)values[i];
    return true;
}

static bool parse_option(int option, const char *text, struct options *options)
{
    struct bench *bench = &options->bench;
    size_t number;
    switch (option) {
    case 'n':
        return parse_ranks(text, bench);
    case 'b':
        return parse_numbers(text, LOAD_SIZE_MIN, SIZE_MAX_ALLOWED, bench->sizes,
                             &bench->size_count);
    case 'p':
        return parse_number(text, 1, PAIRS_MAX_ALLOWED, &bench->pairs);
    case 'm':
        if (!parse_number(text, 1, 10000, &number))
            return false;
        bench->slice_ms = number;
        return true;
    case 'g':
        return parse_number(text, 1, BUDGET_MAX_S, &bench->budget_s);
    case 'k':
        bench->kinds = text;
        return true;
    case 's':
        bench->sections = text;
        return true;
    case 'j':
        options->json_path = text;
        return true;
    default:
        return false;
    }
}

static void make_quick(struct bench *bench)
{
    bench->quick = true;
    bench->pairs = 1;
    bench->slice_ms = 2;
    parse_ranks("1,2,8", bench);
    bench->sizes[0] = 4096;
    bench->sizes[1] = 1 << 20;
    bench->size_count = 2;
}

/* Few and short slices: an interval is some times as wide as that of a whole run. */
static void make_brief(struct bench *bench)
{
    bench->brief = true;
    bench->budget_s = bench->budget_s ? bench->budget_s : BRIEF_BUDGET_S;
    bench->pairs = 3;
    bench->slice_ms = 3;
}

/* Returns -1 to go on, or the exit status. */
static int parse_options(int argc, char **argv, struct options *options)
{
    static const struct option names[] = {
        {"sections", required_argument, NULL, 's'}, {"kinds", required_argument, NULL, 'k'},
        {"ranks", required_argument, NULL, 'n'},    {"bytes", required_argument, NULL, 'b'},
        {"pairs", required_argument, NULL, 'p'},    {"slice-ms", required_argument, NULL, 'm'},
        {"quick", no_argument, NULL, 'q'},          {"brief", no_argument, NULL, 'B'},
        {"budget", required_argument, NULL, 'g'},   {"json", required_argument, NULL, 'j'},
        {"help", no_argument, NULL, 'h'},           {NULL, 0, NULL, 0},
    };
    *options = (struct options){.bench = {.pairs = 9, .slice_ms = 25}};
    parse_ranks("1,2,4,8,16,32", &options->bench);
    parse_numbers("4096,65536,1048576,67108864", LOAD_SIZE_MIN, SIZE_MAX_ALLOWED,
                  options->bench.sizes, &options->bench.size_count);
    for (int option; (option = getopt_long(argc, argv, "", names, NULL)) != -1;) {
        if (option == 'q') {
            make_quick(&options->bench);
        } else if (option == 'B') {
            make_brief(&options->bench);
        } else if (!parse_option(option, optarg, options)) {
            fputs(usage_text, option == 'h' ? stdout : stderr);
            return option == 'h' ? 0 : 2;
        }
    }
    if (optind < argc)
        fputs(usage_text, stderr);
    return optind < argc ? 2 : -1;
}

/* A row that says "not built" is no failure, nor one that had no time; another of ours that has no
 * figures is. */
static int own_failures(const struct bench *bench)
{
    int failures = 0;
    size_t i;
    const json_t *row;
    json_array_foreach(bench->rows, i, row)
    {
        const struct kind *kind = kind_find(json_string_value(json_object_get(row, "kind")));
        const char *missing = json_string_value(json_object_get(row, "missing"));
        if (!missing || kind->program || strcmp(missing, PROCESS_OVER) == 0)
            continue;
        fprintf(stderr, "coxswain-bench: %s: %s\n", kind->name, missing);
        failures++;
    }
    return failures;
}

int main(int argc, char **argv)
{
    char folder[4096];
    struct options options;
    if (argc > 2 && strcmp(argv[1], WORKER_FLAG) == 0)
        return worker_main(argc, argv);
    if (argc > 2 && strcmp(argv[1], SUBJECT_FLAG) == 0)
        return own_subject_main(argc - 2, argv + 2);
    int r = parse_options(argc, argv, &options);
    if (r >= 0)
        return r;
    ssize_t length = readlink("/proc/self/exe", folder, sizeof folder - 1);
    if (length < 0) {
        perror("coxswain-bench: /proc/self/exe");
        return 1;
    }
    folder[length] = '\0';
    *strrchr(folder, '/') = '\0';
    options.bench.folder = folder;
    signal(SIGPIPE, SIG_IGN);
    r = conductor_run(&options.bench);
    if (r) {
        fprintf(stderr, "coxswain-bench: %s\n", cox_status_text(r));
        return 1;
    }
    r = own_failures(&options.bench) > 0;
    if (options.json_path && json_dump_file(options.bench.root, options.json_path,
                                            JSON_INDENT(1) | JSON_REAL_PRECISION(6)) < 0) {
        fprintf(stderr, "coxswain-bench: %s could not be written\n", options.json_path);
        r = 1;
    }
    json_decref(options.bench.root);
    return r;
}
