#include "programs.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "measure.h"
#include "procfs.h"

#define WORD_COUNT_MAX 10
#define PROGRAM_LOOK_US 5000

struct program {
    /* in our JSON, and of a section */
    const char *name;
    const char *title;
    const char *file;
    enum placement placement;
    /* with spaces between: of a whole run, a brief one, a quick one */
    const char *words, *brief_words, *quick_words;
};

static const struct program programs[] = {
    /* clang-format off */
    {"deaths", "A worker dies", "coxswain-deaths", PLACEMENT_FREE,
     "--kills 1000 --coordinators 0 --sizes 0,64", "--kills 20 --coordinators 0 --sizes 0,64",
     "--kills 4 --coordinators 0 --sizes 0"},
    {"deadlines", "A deadline passes", "coxswain-deadlines", PLACEMENT_FREE,
     "--samples 69 --turns 7", "--samples 20 --turns 1", "--samples 4 --turns 1"},
    {"replace", "A rank is replaced", "coxswain-replace", PLACEMENT_FREE,
     "--ranks 2,4,8 --runs 30", "--ranks 2,4,8 --runs 4", "--ranks 2 --runs 2"},
    {"ranks", "Ranks among themselves", "coxswain-ranks", PLACEMENT_FREE,
     "--ranks 2,4,8,16 --rounds 80 --slices 3 --sets 9",
     "--ranks 2,4,8,16 --rounds 10 --slices 1 --sets 3",
     "--ranks 8 --rounds 5 --slices 1 --sets 1"},
    {"ranks", "Ranks among themselves", "coxswain-ranks", PLACEMENT_ONE,
     "--ranks 8 --rounds 80 --slices 3 --sets 9", "--ranks 8 --rounds 10 --slices 1 --sets 3",
     "--ranks 8 --rounds 5 --slices 1 --sets 1"},
    {"pull", "KV blocks are pulled", "coxswain-pull", PLACEMENT_FREE, "--pairs 15", "--pairs 3",
     "--bytes 4194304 --pairs 2"},
    /* What a step of the model spends in the channel and in the group. */
    {"model", "The model", "share.py", PLACEMENT_FREE, "", "--prompts 24 --runs 1",
     "--ranks 1,4 --prompts 24 --runs 1"},
    /* clang-format on */
};

/* Returns the status, or -errno. -ETIME: the time of the run was over, and it was killed. */
static int run_and_wait(const struct bench *bench, const char *const *argv,
                        enum placement placement)
{
    int status;
    struct procfs_tree tree;
    const pid_t parent = getpid();
    if (bench_is_over(bench))
        return -ETIME;
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        if (prctl(PR_SET_PDEATHSIG, SIGKILL) == 0 && getppid() == parent &&
            placement_apply(placement) == 0)
            execv(argv[0], (char *const *)(uintptr_t)argv);
        _exit(127);
    }
    if (pid < 0)
        return -errno;
    for (;;) {
        const pid_t ended = waitpid(pid, &status, bench->end_ns == UINT64_MAX ? 0 : WNOHANG);
        if (ended == pid)
            return status;
        if (ended < 0 && errno != EINTR)
            return -errno;
        if (ended <= 0 && bench_is_over(bench)) {
            procfs_tree(pid, &tree);
            procfs_end(&tree);
            return -ETIME;
        }
        if (ended == 0)
            usleep(PROGRAM_LOOK_US);
    }
}

/* Those of a program that has run before stay. json: given; NULL: there are none, text says why. */
static void rows_add(struct bench *bench, const struct program *program, json_t *json,
                     const char *text)
{
    size_t i;
    json_t *row, *own = json_object_get(bench->root, program->name);
    json_t *rows = json_object_get(json, "rows");
    json_array_foreach(rows, i, row)
        json_object_set_new(row, "placement", json_string(placement_name(program->placement)));
    if (json && !own) {
        json_object_set(bench->root, program->name, json);
    } else if (!own) {
        own = json_pack("{s:[]}", "rows");
        json_object_set_new(bench->root, program->name, own);
    } else if (rows) {
        json_array_extend(json_object_get(own, "rows"), rows);
    }
    if (!json) {
        fprintf(stderr, "coxswain-bench: %s: %s\n", program->file, text);
        json_object_set_new(own, "missing", json_string(text));
    }
    json_decref(json);
}

static void program_run(struct bench *bench, const struct program *program)
{
    char path[4096 + 64], json_path[64], copy[128];
    char *words = copy;
    const char *argv[WORD_COUNT_MAX + 4] = {path};
    size_t n = 1;
    snprintf(copy, sizeof copy, "%s",
             bench->quick   ? program->quick_words
             : bench->brief ? program->brief_words
                            : program->words);
    snprintf(path, sizeof path, "%s/%s", bench->folder, program->file);
    if (access(path, X_OK) < 0)
        return;
    int fd = memfd_create("coxswain-bench-json", 0); /* inherited under its number */
    if (fd < 0)
        return;
    snprintf(json_path, sizeof json_path, "/proc/%d/fd/%d", (int)getpid(), fd);
    for (char *word; n <= WORD_COUNT_MAX && (word = strsep(&words, " ")) != NULL;)
        if (*word)
            argv[n++] = word;
    argv[n++] = "--json";
    argv[n++] = json_path;
    fprintf(stderr, "coxswain-bench: %s, after %.0f s\n", program->name,
            (double)(measure_now_ns() - bench->begin_ns) / 1e9);
    printf("\n%s, %s\n", program->title, placement_text(program->placement));
    json_error_t error = {.text = PROCESS_OVER};
    json_t *json = NULL;
    const int status = run_and_wait(bench, argv, program->placement);
    if (status == 0)
        json = json_load_file(json_path, 0, &error);
    else if (status != -ETIME)
        snprintf(error.text, sizeof error.text, "failed (status %d)", status);
    rows_add(bench, program, json, error.text);
    close(fd);
}

void programs_run(struct bench *bench)
{
    for (size_t i = 0; i < sizeof programs / sizeof *programs; i++)
        if (name_chosen(bench->sections, programs[i].name))
            program_run(bench, &programs[i]);
}
