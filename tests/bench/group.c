#include "group.h"

#include "channel/base/idioms.h"
#include "channel/base/spin.h"
#include "options.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* What a region holds in each of its parts without being asked for more. */
#define FRAME_SIZE_DEFAULT ((size_t)1 << 20)
#define SLOT_SIZE_DEFAULT ((size_t)64 << 10)
#define PREFIX_SIZE 4
#define PAGE_SIZE 4096
#define WORD_COUNT_MAX 8

static int flavour_set(struct group_flavour *flavour, const char *flag, const char *value)
{
    if (strcmp(flag, "--attach") == 0) {
        flavour->sealed = strcmp(value, "sealed") == 0;
        return flavour->sealed || strcmp(value, "named") == 0 ? 0 : COX_INVALID;
    }
    if (strcmp(flag, "--by") == 0) {
        static const char *const names[] = {"submit", "call",     "collect",
                                            "poll",   "hand-off", "ping"};
        uint32_t by = 0;
        while (by < GROUP_BY_COUNT && strcmp(value, names[by]) != 0)
            by++;
        flavour->by = (enum group_by)by;
        return by < GROUP_BY_COUNT ? 0 : COX_INVALID;
    }
    if (strcmp(flag, "--spin") == 0) {
        uint32_t spin = 0;
        while (spin < COX_SPIN_COUNT && strcmp(value, cox_spin_name(spin)) != 0)
            spin++;
        flavour->spin = (enum cox_spin)spin;
        return spin < COX_SPIN_COUNT ? 0 : COX_INVALID;
    }
    if (strcmp(flag, "--worker-program") == 0) {
        flavour->worker_program = value;
        return 0;
    }
    uint32_t number = (uint32_t)strtoul(value, NULL, 10);
    if (number == 0 || number > 4096)
        return COX_INVALID;
    if (strcmp(flag, "--depth") == 0)
        flavour->in_flight = flavour->depth = number;
    else if (strcmp(flag, "--callers") == 0)
        flavour->callers = number;
    else
        flavour->sequences = number;
    return 0;
}

int group_flavour_parse(int *argc, char **argv, struct group_flavour *ret_flavour)
{
    static const char *const flags[] = {"--attach",  "--by",        "--spin",          "--depth",
                                        "--callers", "--sequences", "--worker-program"};
    struct group_flavour flavour = {.in_flight = 1};
    int kept = 0, r = 0;
    for (int i = 0; i < *argc; i++) {
        size_t f = 0;
        while (f < sizeof flags / sizeof *flags && strcmp(argv[i], flags[f]) != 0)
            f++;
        if (f == sizeof flags / sizeof *flags)
            argv[kept++] = argv[i];
        else
            r = r ? r : i + 1 < *argc ? flavour_set(&flavour, argv[i], argv[i + 1]) : COX_INVALID;
        i += f < sizeof flags / sizeof *flags;
    }
    argv[kept] = NULL;
    *argc = kept;
    *ret_flavour = flavour;
    return r;
}

void group_show_line(void *context, uint32_t rank, bool is_stderr, const char *text)
{
    (void)context;
    (void)is_stderr;
    fprintf(stderr, "[rank %" PRIu32 "] %s\n", rank, text);
}

/* Bytes of a region with `count` parts for `size` bytes each; 0: the default is enough. */
static uint64_t region_size(size_t count, size_t size, size_t enough)
{
    size_t part = (size + PREFIX_SIZE + PAGE_SIZE - 1) / PAGE_SIZE * PAGE_SIZE;
    return size + PREFIX_SIZE <= enough ? 0 : (uint64_t)count * part;
}

int group_start(const struct group_flavour *flavour, uint32_t rank_count, size_t request_size,
                size_t reply_size, const char *const *words, struct cox_executor **ret_executor,
                struct cox_error *err)
{
    char program[4096];
    const char *command[WORD_COUNT_MAX + 3] = {program, WORKER_FLAG};
    int r = options_program_path(program, sizeof program);
    if (r)
        return cox_fail(err, r, "/proc/self/exe: %s", cox_status_text(r));
    if (flavour->worker_program)
        command[0] = flavour->worker_program;
    for (int i = 0; i < WORD_COUNT_MAX && words[i]; i++)
        command[i + 2] = words[i];
    const uint32_t depth = flavour->depth ? flavour->depth : GROUP_DEPTH_DEFAULT;
    struct cox_executor_options options = {
        .size = sizeof(struct cox_executor_options),
        .rank_count = rank_count,
        .workers.command = command,
        .depth = depth,
        .spin = flavour->spin,
        .collect = flavour->by == GROUP_BY_COLLECT || flavour->by == GROUP_BY_POLL,
        .memory.attach = flavour->sealed ? COX_ATTACH_SEALED : COX_ATTACH_NAMED,
        .hooks.line = group_show_line,
    };
    options.memory.request_size[COX_CHANNEL_EXECUTE] =
        region_size(depth, request_size, FRAME_SIZE_DEFAULT);
    options.memory.response_size[COX_CHANNEL_EXECUTE] =
        region_size((size_t)depth * rank_count, reply_size, SLOT_SIZE_DEFAULT);
    return cox_executor_start(&options, ret_executor, err);
}

int group_worker_main(int argc, char **argv, const struct cox_worker_callbacks *callbacks,
                      int (*parse)(void *context, uint32_t rank, int argc, char **argv),
                      void *context, struct cox_worker **worker)
{
    struct cox_worker_options options = COX_WORKER_OPTIONS_INIT;
    struct cox_worker *unnamed = NULL;
    worker = worker ? worker : &unnamed;
    struct cox_error err = {0};
    int r = cox_worker_options_parse(&options, &argc, argv, &err);
    if (r == 0 && (r = parse(context, options.rank, argc - 2, argv + 2)) != 0)
        cox_fail(&err, r, "started with other words than expected");
    if (r == 0)
        r = cox_worker_new(&options, callbacks, context, worker, &err);
    if (r == 0)
        r = cox_worker_run(*worker, &err);
    if (r)
        fprintf(stderr, "rank %" PRIu32 ": %s\n", options.rank,
                err.text[0] ? err.text : cox_status_text(r));
    cox_worker_free(*worker);
    return r != 0;
}

void group_sem_wait(sem_t *semaphore)
{
    while (sem_wait(semaphore) < 0 && errno == EINTR)
        continue;
}

void *group_memory_map(const char *path, size_t size)
{
    _cox_cleanup_(cox_close_fd) int fd = open(path, O_RDWR | O_CLOEXEC);
    void *memory =
        fd < 0 ? MAP_FAILED : mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

int group_memory_new(size_t size, int *ret_fd, char *path, void **ret_memory, struct cox_error *err)
{
    _cox_cleanup_(cox_close_fd) int fd = memfd_create("coxswain-bench", MFD_CLOEXEC);
    snprintf(path, GROUP_PATH_SIZE, "/proc/%jd/fd/%d", (intmax_t)getpid(), fd);
    void *memory = fd < 0 || ftruncate(fd, (off_t)size) < 0 ? NULL : group_memory_map(path, size);
    if (!memory)
        return cox_fail(err, -errno, "shared memory: %s", cox_status_text(-errno));
    *ret_fd = fd;
    *ret_memory = memory;
    fd = -1;
    return 0;
}
