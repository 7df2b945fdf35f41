/* coxswain-ranks: the rank group and by-value handles under measurement, beside a plain barrier
 * that polls with usleep, the plainest barrier of a futex, and memcpy, in interleaved slices.
 * Prints, judges nothing.
 *
 * Every number of ranks has several sets of processes, one after the other and in turns with the
 * other numbers, since the kernel places each set anew. All of a set run the same schedule; rank 0
 * takes the times, of each operation from its call to its return. */
#include "channel/base/base_internal.h"
#include "channel/base/futex.h"
#include "channel/socket/socket.h"
#include "engine/compute/tile.h"
#include "engine/rank/tensor_gather.h"
#include "measure.h"
#include "options.h"
#include "rows.h"

#include <coxswain/group.h>
#include <coxswain/handle.h>

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* linux/unistd.h of 5.6 and later; the number is the same on every architecture. */
#ifndef SYS_pidfd_getfd
#define SYS_pidfd_getfd 438
#endif

#define RANK_COUNT_MAX 64
#define SLICE_COUNT_MAX 101
#define SET_COUNT_MAX 32
#define ROUND_COUNT_MAX 100000
#define VALUE_SIZE 64
#define PATIENCE_NS (60 * COX_NSEC_PER_SEC)

enum kind {
    KIND_BARRIER,
    KIND_GATHER,
    KIND_GATHER_PAGE,
    KIND_GATHER_FDS,
    KIND_USLEEP_BARRIER,
    KIND_USLEEP_GATHER,
    KIND_USLEEP_FDS,
    KIND_HANDLE,
    KIND_FUTEX_BARRIER,
    KIND_FUTEX_FDS,
    KIND_REDUCE,
    KIND_REDUCE_LARGE,
    KIND_MEMCPY,
    KIND_MEMCPY_LARGE,
    KIND_MEMCPY_RANKS,
    KIND_COUNT
};

static const char *const kind_names[KIND_COUNT] = {
    "barrier",
    "gather 64 B",
    "gather 4 KiB",
    "gather fds",
    "usleep barrier",
    "usleep gather",
    "usleep fds",
    "handle open + close",
    "futex barrier",
    "futex fds",
    "reduce",
    "reduce large",
    "memcpy + barrier",
    "memcpy + barrier large",
    "memcpy of ranks + barrier large",
};

/* Sums of a model's layer: PIECE_COUNT pieces, of which each rank computes its part, of so many
 * floats each: 16 sequences with the shipped model's hidden size of 128, and with one of 2,048. */
#define PIECE_COUNT 8
#define PIECE_LENGTH (16 * 128)
#define PIECE_LENGTH_LARGE (16 * 2048)

/* The state of a polling barrier: the last rank to arrive opens the next incarnation. */
struct polled {
    _Atomic uint32_t arrived;
    _Atomic uint32_t incarnation;
    uint8_t values[RANK_COUNT_MAX][VALUE_SIZE];
};

/* The floor: nothing is looked after but that the last one wakes all. */
struct plain {
    _Alignas(128) _Atomic uint32_t incarnation;
    _Alignas(128) _Atomic uint32_t arrived;
};

struct shared {
    struct polled polled;
    struct plain plain;
    /* of rank 1's memory */
    struct cox_handle handle;
    struct {
        pid_t pid;
        int fd;
    } given[RANK_COUNT_MAX];
    double p50_us[KIND_COUNT][SLICE_COUNT_MAX];
};

struct options {
    struct options_list worlds;
    size_t rounds;
    /* of each set of processes */
    size_t slices;
    size_t sets;
    /* NULL: none */
    const char *json_path;
};

/* What was measured of a number of ranks, by all its sets. */
struct world {
    uint32_t rank_count;
    size_t slice_count;
    double p50_us[KIND_COUNT][SLICE_COUNT_MAX * SET_COUNT_MAX];
};

/* One rank. */
struct rank {
    const struct options *options;
    struct shared *shared;
    struct cox_group *group;
    struct cox_importer *importer;
    uint32_t rank, rank_count;
    /* what it gives in an exchange */
    int own_fd;
    /* pairs[a][b]: a's end of the connection of a and b */
    int (*pairs)[RANK_COUNT_MAX];
    int pidfds[RANK_COUNT_MAX];
    uint8_t *values;
    struct cox_tensor_gather *exchange;
    /* of all ranks */
    uint32_t piece_count;
    float *pieces, *copies, *sums;
    /* shared by the ranks: two times all pieces, each half written in turn */
    float *written;
    size_t turn;
    uint64_t *samples_ns;
};

static void must(bool condition, const char *what)
{
    if (condition)
        return;
    fprintf(stderr, "coxswain-ranks: %s: %s\n", what, strerror(errno));
    _exit(1);
}

static void must_group(int r, const struct cox_error *err)
{
    if (r == 0)
        return;
    fprintf(stderr, "coxswain-ranks: %s\n", err->text[0] ? err->text : cox_status_text(r));
    _exit(1);
}

/* ---- the plain way: shared counters, looked at again and again ---- */

static void usleep_barrier(struct rank *own)
{
    struct polled *polled = &own->shared->polled;
    uint32_t incarnation = atomic_load(&polled->incarnation);
    if (atomic_fetch_add(&polled->arrived, 1) + 1 == own->rank_count) {
        atomic_store(&polled->arrived, 0);
        atomic_fetch_add(&polled->incarnation, 1);
        return;
    }
    while (atomic_load(&polled->incarnation) == incarnation)
        usleep(1);
}

static void usleep_gather(struct rank *own)
{
    memset(own->shared->polled.values[own->rank], (int)own->rank, VALUE_SIZE);
    usleep_barrier(own);
    memcpy(own->values, own->shared->polled.values, (size_t)own->rank_count * VALUE_SIZE);
    usleep_barrier(own); /* before any rank writes again */
}

static void usleep_fds(struct rank *own)
{
    uint8_t byte = 0;
    for (uint32_t other = 0; other < own->rank_count; other++)
        if (other != own->rank)
            must(cox_socket_send(own->pairs[own->rank][other], &byte, 1, &own->own_fd, 1,
                                 cox_deadline_after_ns(PATIENCE_NS)) == 0,
                 "sending an fd");
    for (uint32_t other = 0; other < own->rank_count; other++) {
        int fd = -1;
        uint32_t count = 0;
        if (other == own->rank)
            continue;
        must(cox_socket_receive(own->pairs[own->rank][other], &byte, 1, &fd, 1, &count,
                                cox_deadline_after_ns(PATIENCE_NS)) == 0 &&
                 count == 1,
             "receiving an fd");
        close(fd);
    }
    usleep_barrier(own);
}

static void futex_barrier(struct rank *own)
{
    struct plain *plain = &own->shared->plain;
    uint32_t incarnation = atomic_load(&plain->incarnation);
    if (atomic_fetch_add(&plain->arrived, 1) + 1 == own->rank_count) {
        atomic_store(&plain->arrived, 0);
        atomic_fetch_add(&plain->incarnation, 1);
        cox_futex_wake(&plain->incarnation);
        return;
    }
    while (atomic_load(&plain->incarnation) == incarnation)
        cox_futex_wait(&plain->incarnation, incarnation, COX_DEADLINE_NEVER);
}

/* The floor of an exchange: each copies the fd of each other one. Nothing is looked after but that
 * all have theirs before anybody goes on. */
static void futex_fds(struct rank *own)
{
    int fds[RANK_COUNT_MAX];
    futex_barrier(own);
    for (uint32_t step = 1; step < own->rank_count; step++) {
        const uint32_t other = (own->rank + step) % own->rank_count;
        fds[other] =
            (int)syscall(SYS_pidfd_getfd, own->pidfds[other], own->shared->given[other].fd, 0);
        must(fds[other] >= 0, "an fd of another process");
    }
    futex_barrier(own);
    for (uint32_t other = 0; other < own->rank_count; other++)
        if (other != own->rank)
            close(fds[other]);
}

/* ---- ours ---- */

static void gather(struct rank *own, size_t size)
{
    struct cox_error err = {0};
    uint8_t value[4096] = {(uint8_t)own->rank};
    must_group(cox_group_gather(own->group, value, size, own->values,
                                cox_deadline_after_ns(PATIENCE_NS), &err),
               &err);
    must(own->values[size * (own->rank_count - 1)] == own->rank_count - 1, "a gathered value");
}

static void gather_fds(struct rank *own)
{
    struct cox_error err = {0};
    int fds[RANK_COUNT_MAX];
    must_group(cox_group_gather_fds(own->group, own->own_fd, COX_GROUP_FD_KEEP, fds,
                                    cox_deadline_after_ns(PATIENCE_NS), &err),
               &err);
    for (uint32_t other = 0; other < own->rank_count; other++)
        if (other != own->rank)
            close(fds[other]);
}

/* As the model does it: all pieces are added where they are. */
static void reduce(struct rank *own, size_t length)
{
    const float *pieces[RANK_COUNT_MAX];
    struct cox_error err = {0};
    must_group(cox_tensor_gather_begin(own->exchange, 1, cox_deadline_after_ns(PATIENCE_NS), &err),
               &err);
    must_group(cox_tensor_gather_all(own->exchange, own->pieces, length, length, pieces, &err),
               &err);
    cox_tile_add_parts(own->sums, pieces, own->piece_count, length);
}

/* As many bytes as are read there. */
static void copy(struct rank *own, size_t length)
{
    struct cox_error err = {0};
    memcpy(own->copies, own->pieces, own->piece_count * length * sizeof(float));
    must_group(cox_group_barrier(own->group, cox_deadline_after_ns(PATIENCE_NS), &err), &err);
}

/* The same, from where each rank has written its part: the lines are on several processors. */
static void copy_of_ranks(struct rank *own, size_t length)
{
    struct cox_error err = {0};
    const size_t each = own->piece_count / own->rank_count * length;
    float *half = own->written + own->turn++ % 2 * own->piece_count * length;
    memcpy(half + own->rank * each, own->pieces + own->rank * each, each * sizeof(float));
    must_group(cox_group_barrier(own->group, cox_deadline_after_ns(PATIENCE_NS), &err), &err);
    memcpy(own->copies, half, own->piece_count * length * sizeof(float));
}

static uint32_t pieces_of(uint32_t rank_count)
{
    return rank_count < PIECE_COUNT ? PIECE_COUNT / rank_count * rank_count : rank_count;
}

static void make_pieces(struct rank *own)
{
    struct cox_error err = {0};
    own->piece_count = pieces_of(own->rank_count);
    own->pieces = calloc(own->piece_count, PIECE_LENGTH_LARGE * sizeof(float));
    own->copies = calloc(own->piece_count, PIECE_LENGTH_LARGE * sizeof(float));
    own->sums = calloc(PIECE_LENGTH_LARGE, sizeof(float));
    must(own->pieces && own->copies && own->sums, "memory");
    must_group(cox_tensor_gather_new(own->group, own->piece_count / own->rank_count,
                                     PIECE_LENGTH_LARGE, cox_deadline_after_ns(PATIENCE_NS),
                                     &own->exchange, &err),
               &err);
}

/* Rank 0 alone; the others wait at the next barrier. */
static void open_handle(struct rank *own)
{
    const struct cox_import *import;
    struct cox_error err = {0};
    if (own->rank != 0)
        return;
    must_group(cox_importer_open(own->importer, &own->shared->handle, COX_IMPORT_FD, &import, &err),
               &err);
    cox_importer_close(own->importer, import);
}

static void run_one(struct rank *own, enum kind kind)
{
    struct cox_error err = {0};
    switch (kind) {
    case KIND_BARRIER:
        must_group(cox_group_barrier(own->group, cox_deadline_after_ns(PATIENCE_NS), &err), &err);
        return;
    case KIND_GATHER:
        gather(own, VALUE_SIZE);
        return;
    case KIND_GATHER_PAGE:
        gather(own, 4096);
        return;
    case KIND_GATHER_FDS:
        gather_fds(own);
        return;
    case KIND_USLEEP_BARRIER:
        usleep_barrier(own);
        return;
    case KIND_USLEEP_GATHER:
        usleep_gather(own);
        return;
    case KIND_USLEEP_FDS:
        usleep_fds(own);
        return;
    case KIND_FUTEX_BARRIER:
        futex_barrier(own);
        return;
    case KIND_FUTEX_FDS:
        futex_fds(own);
        return;
    case KIND_REDUCE:
    case KIND_REDUCE_LARGE:
        reduce(own, kind == KIND_REDUCE ? PIECE_LENGTH : PIECE_LENGTH_LARGE);
        return;
    case KIND_MEMCPY:
    case KIND_MEMCPY_LARGE:
        copy(own, kind == KIND_MEMCPY ? PIECE_LENGTH : PIECE_LENGTH_LARGE);
        return;
    case KIND_MEMCPY_RANKS:
        copy_of_ranks(own, PIECE_LENGTH_LARGE);
        return;
    default:
        open_handle(own);
    }
}

static void run_slice(struct rank *own, enum kind kind, size_t slice)
{
    size_t rounds = own->options->rounds;
    run_one(own, KIND_BARRIER); /* all begin together */
    for (size_t i = 0; i < rounds; i++) {
        uint64_t begin_ns = measure_now_ns();
        run_one(own, kind);
        own->samples_ns[i] = measure_now_ns() - begin_ns;
    }
    if (own->rank != 0)
        return;
    measure_sort(own->samples_ns, rounds);
    own->shared->p50_us[kind][slice] = (double)own->samples_ns[rounds / 2] / 1e3;
}

static void rank_main(struct rank *own, int group_fd, uint32_t value_size)
{
    struct cox_error err = {0};
    const struct cox_group_options options = {
        .size = sizeof(struct cox_group_options),
        .fd = group_fd,
        .rank = own->rank,
        .rank_count = own->rank_count,
        .value_size = value_size,
        .deadline_ns = cox_deadline_after_ns(PATIENCE_NS),
    };
    struct cox_exporter *exporter = NULL;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    must_group(cox_group_join(&options, &own->group, &err), &err);
    must(cox_group_align(own->group, 1) == 0, "the epoch of exchanges");
    must_group(cox_importer_new(NULL, &own->importer, &err), &err);
    must_group(cox_exporter_new(NULL, &exporter, &err), &err);
    own->own_fd = memfd_create("coxswain-ranks", MFD_CLOEXEC);
    own->values = calloc(own->rank_count, 4096);
    own->samples_ns = calloc(own->options->rounds, sizeof *own->samples_ns);
    must(own->own_fd >= 0 && ftruncate(own->own_fd, 4096) == 0 && own->values && own->samples_ns,
         "memory");
    if (own->rank == own->rank_count - 1)
        must_group(cox_exporter_export(exporter, own->own_fd, 0, 0, &own->shared->handle, &err),
                   &err);
    make_pieces(own);
    own->shared->given[own->rank].pid = getpid();
    own->shared->given[own->rank].fd = own->own_fd;
    run_one(own, KIND_BARRIER);
    for (uint32_t other = 0; other < own->rank_count; other++) {
        own->pidfds[other] = (int)syscall(SYS_pidfd_open, own->shared->given[other].pid, 0);
        must(own->pidfds[other] >= 0, "pidfd_open");
    }
    for (int i = 0; i < 2 * KIND_COUNT; i++) /* not counted: page faults, caches */
        run_one(own, (enum kind)(i % KIND_COUNT));
    for (size_t slice = 0; slice < own->options->slices; slice++)
        for (int kind = 0; kind < KIND_COUNT; kind++)
            run_slice(own, (enum kind)kind, slice);
    run_one(own, KIND_BARRIER);
    cox_tensor_gather_free(own->exchange);
    cox_exporter_free(exporter);
    cox_importer_free(own->importer);
    cox_group_leave(own->group);
    _exit(0);
}

/* ---- one number of ranks ---- */

static void print_world(struct world *world)
{
    static const enum kind beside[KIND_COUNT] = {
        [KIND_BARRIER] = KIND_USLEEP_BARRIER,    [KIND_GATHER] = KIND_USLEEP_GATHER,
        [KIND_GATHER_FDS] = KIND_USLEEP_FDS,     [KIND_FUTEX_BARRIER] = KIND_USLEEP_BARRIER,
        [KIND_FUTEX_FDS] = KIND_USLEEP_FDS,      [KIND_REDUCE] = KIND_MEMCPY,
        [KIND_REDUCE_LARGE] = KIND_MEMCPY_LARGE, [KIND_MEMCPY_RANKS] = KIND_MEMCPY_LARGE,
    };
    static double ratios[KIND_COUNT][SLICE_COUNT_MAX * SET_COUNT_MAX];
    const size_t count = world->slice_count;
    for (int kind = 0; kind < KIND_COUNT; kind++)
        for (size_t i = 0; i < count; i++)
            ratios[kind][i] = world->p50_us[beside[kind]][i] / world->p50_us[kind][i];
    for (int kind = 0; kind < KIND_COUNT; kind++) {
        printf("%5" PRIu32 "  %-31s  %9.2f", world->rank_count, kind_names[kind],
               measure_median(world->p50_us[kind], count));
        if (beside[kind])
            printf("  %9.2f  (%.2f to %.2f)", measure_median(ratios[kind], count),
                   measure_quantile(ratios[kind], count, 0.25),
                   measure_quantile(ratios[kind], count, 0.75));
        putchar('\n');
    }
    fflush(stdout);
}

/* Before print_world, which sorts them. */
static json_t *world_json(const struct world *world)
{
    json_t *row = json_pack("{s:i}", "ranks", (int)world->rank_count);
    for (int kind = 0; kind < KIND_COUNT; kind++)
        json_object_set_new(row, kind_names[kind],
                            rows_figures(world->p50_us[kind], world->slice_count));
    return row;
}

static void *shared_new(size_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    must(memory != MAP_FAILED, "shared memory");
    return memory;
}

/* One set of processes. */
static int run_set(const struct options *options, struct world *world)
{
    static int pairs[RANK_COUNT_MAX][RANK_COUNT_MAX];
    const uint32_t rank_count = world->rank_count, value_size = COX_GROUP_VALUE_SIZE_MIN;
    const size_t written_size = 2 * pieces_of(rank_count) * PIECE_LENGTH_LARGE * sizeof(float);
    struct shared *shared = shared_new(sizeof *shared);
    float *written = shared_new(written_size);
    int group_fd = memfd_create("coxswain-ranks-group", MFD_CLOEXEC);
    must(group_fd >= 0 &&
             ftruncate(group_fd, (off_t)cox_group_memory_size(rank_count, value_size)) == 0,
         "shared memory");
    for (uint32_t a = 0; a < rank_count; a++)
        for (uint32_t b = 0; b < a; b++) {
            int ends[2];
            must(cox_socket_pair(ends) == 0, "sockets");
            pairs[a][b] = ends[0];
            pairs[b][a] = ends[1];
        }
    for (uint32_t rank = 0; rank < rank_count; rank++) {
        struct rank own = {.options = options,
                           .shared = shared,
                           .rank = rank,
                           .rank_count = rank_count,
                           .pairs = pairs,
                           .written = written};
        pid_t pid = fork();
        must(pid >= 0, "fork");
        if (pid == 0)
            rank_main(&own, group_fd, value_size);
    }
    int failed = 0, status;
    for (uint32_t i = 0; i < rank_count; i++)
        failed |= waitpid(-1, &status, 0) < 0 || status != 0;
    for (int kind = 0; kind < KIND_COUNT; kind++)
        memcpy(&world->p50_us[kind][world->slice_count], shared->p50_us[kind],
               options->slices * sizeof(double));
    world->slice_count += options->slices;
    for (uint32_t a = 0; a < rank_count; a++)
        for (uint32_t b = 0; b < rank_count; b++)
            if (a != b)
                close(pairs[a][b]);
    close(group_fd);
    munmap(written, written_size);
    munmap(shared, sizeof *shared);
    return failed;
}

/* ---- options ---- */

static const char usage_text[] =
    "usage: coxswain-ranks [--ranks LIST] [--rounds N] [--slices N] [--sets N] [--json FILE]\n"
    "Barrier, all-gather of values and of fds by a rank group, beside a barrier that polls with usleep(1), and a\n"
    "by-value handle opened and closed: p50 in microseconds, medians over interleaved slices.\n"
    "  --ranks LIST      numbers of ranks (2,4,8,16)\n"
    "  --rounds N        operations of one slice (500)\n"
    "  --slices N        slices of each kind, in a set of processes (3)\n"
    "  --sets N          sets of processes, which the kernel places one by one (3)\n"
    "  --json FILE       also writes every slice to FILE\n";

int main(int argc, char **argv)
{
    static struct world worlds[OPTIONS_LIST_MAX];
    struct options options = {.worlds = {{2, 4, 8, 16}, 4}, .rounds = 500, .slices = 3, .sets = 3};
    const struct option_spec specs[] = {
        {.name = "ranks", .list = &options.worlds, .min = 2, .max = RANK_COUNT_MAX},
        {.name = "rounds", .number = &options.rounds, .min = 1, .max = ROUND_COUNT_MAX},
        {.name = "slices", .number = &options.slices, .min = 1, .max = SLICE_COUNT_MAX},
        {.name = "sets", .number = &options.sets, .min = 1, .max = SET_COUNT_MAX},
        {.name = "json", .text = &options.json_path},
        {.name = NULL},
    };
    int failed = options_parse(argc, argv, specs, usage_text);
    if (failed >= 0)
        return failed;
    printf(
        "%zu slices of %zu operations of each kind, interleaved, in %zu sets of processes; p50 of rank 0 in us, median over slices;\n"
        "ratio, and its quartiles: how often as long the usleep barrier takes for the same, and memcpy of the same bytes with one\n"
        "barrier for a reduction\n\n"
        "%5s  %-31s  %9s  %9s\n",
        options.slices * options.sets, options.rounds, options.sets, "ranks", "operation", "p50 us",
        "ratio");
    fflush(stdout);
    failed = 0;
    for (size_t i = 0; i < options.worlds.count * options.sets && !failed; i++) {
        struct world *world = &worlds[i % options.worlds.count];
        world->rank_count = (uint32_t)options.worlds.values[i % options.worlds.count];
        failed = run_set(&options, world);
    }
    json_t *rows = json_array();
    for (size_t i = 0; i < options.worlds.count && !failed; i++) {
        json_array_append_new(rows, world_json(&worlds[i]));
        print_world(&worlds[i]);
    }
    return rows_write("coxswain-ranks", options.json_path, rows) || failed;
}
