/* coxswain-bench: Coxswain, the least that blocking processes can do, and peers, side by side.
 * Prints, judges nothing but the targets at its end; the exit status says only whether it ran.
 * Started again as each of its subjects and workers. */
#include "conductor.h"
#include "coxswain.h"
#include "floor.h"
#include "group.h"
#include "load.h"
#include "options.h"
#include "steps.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SUBJECT_FLAG "--subject"
#define SIZE_MAX_ALLOWED ((size_t)64 << 20)
#define PAIRS_MAX_ALLOWED 64
#define BUDGET_MAX_S 3600
#define BRIEF_BUDGET_S 114
/* Of a shell after ctrl-C. */
#define STOPPED_STATUS 130

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
    "  --budget S       seconds of a run (brief: 114); a row that has no time left says so\n"
    "  --quick          seconds in place of minutes; the figures mean nothing\n"
    "  --json FILE      also writes everything to FILE\n";

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

static void make_quick(struct bench *bench)
{
    bench->quick = true;
    bench->pairs = 1;
    bench->slice_ms = 2;
    bench->rank_counts = (struct options_list){{1, 2, 8}, 3};
    bench->sizes = (struct options_list){{4096, 1 << 20}, 2};
}

/* Few and short slices: an interval is some times as wide as that of a whole run. */
static void make_brief(struct bench *bench)
{
    bench->brief = true;
    bench->budget_s = BRIEF_BUDGET_S;
    bench->pairs = 3;
    bench->slice_ms = 3;
}

static bool has_word(int argc, char **argv, const char *word)
{
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], word) == 0)
            return true;
    return false;
}

/* Returns -1 to go on, or the exit status. What a word of these makes, other options change. */
static int parse_options(int argc, char **argv, struct bench *bench, const char **json_path)
{
    const struct option_spec specs[] = {
        {.name = "sections", .text = &bench->sections},
        {.name = "kinds", .text = &bench->kinds},
        {.name = "ranks", .list = &bench->rank_counts, .min = 1, .max = COX_RANK_COUNT_MAX},
        {.name = "bytes", .list = &bench->sizes, .min = LOAD_SIZE_MIN, .max = SIZE_MAX_ALLOWED},
        {.name = "pairs", .number = &bench->pairs, .min = 1, .max = PAIRS_MAX_ALLOWED},
        {.name = "slice-ms", .number = &bench->slice_ms, .min = 1, .max = 10000},
        {.name = "quick", .flag = &bench->quick},
        {.name = "brief", .flag = &bench->brief},
        {.name = "budget", .number = &bench->budget_s, .min = 1, .max = BUDGET_MAX_S},
        {.name = "json", .text = json_path},
        {.name = NULL},
    };
    *bench = (struct bench){.pairs = 9,
                            .slice_ms = 25,
                            .rank_counts = {{1, 2, 4, 8, 16, 32}, 6},
                            .sizes = {{4096, 65536, 1 << 20, SIZE_MAX_ALLOWED}, 4}};
    if (has_word(argc, argv, "--quick"))
        make_quick(bench);
    if (has_word(argc, argv, "--brief"))
        make_brief(bench);
    return options_parse(argc, argv, specs, usage_text);
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
    struct bench bench;
    const char *json_path = NULL;
    if (argc > 2 && strcmp(argv[1], WORKER_FLAG) == 0)
        return worker_main(argc, argv);
    if (argc > 2 && strcmp(argv[1], SUBJECT_FLAG) == 0)
        return own_subject_main(argc - 2, argv + 2);
    int r = parse_options(argc, argv, &bench, &json_path);
    if (r >= 0)
        return r;
    r = options_program_path(folder, sizeof folder);
    if (r == 0) {
        *strrchr(folder, '/') = '\0';
        bench.folder = folder;
        signal(SIGPIPE, SIG_IGN);
        r = conductor_run(&bench);
    }
    if (r) {
        fprintf(stderr, "coxswain-bench: %s\n", cox_status_text(r));
        return 1;
    }
    r = own_failures(&bench) > 0;
    if (process_stopped()) {
        fputs("coxswain-bench: stopped; nothing is written\n", stderr);
        r = STOPPED_STATUS;
    } else if (json_path &&
               json_dump_file(bench.root, json_path, JSON_INDENT(1) | JSON_REAL_PRECISION(6)) < 0) {
        fprintf(stderr, "coxswain-bench: %s could not be written\n", json_path);
        r = 1;
    }
    json_decref(bench.root);
    return r;
}
