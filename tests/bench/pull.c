/* coxswain-pull: the cost of pulling KV blocks out of another process's memory, compared with
 * memcpy. Prints, judges nothing. Another process makes KV blocks, gives all of them and exports
 * them by handle; this one opens a view of them, and has blocks of its own of the same shape. A
 * copy of a block is done by pull: cox_kv_view_copy (reads the block's words, copies, reads the
 * words again); memcpy: without the words, the same blocks in the same order, between the same
 * memory; private: memcpy between two blocks of malloc, as large, touched before, which is the cost
 * without sharing. A slice is all blocks once, in an order that is no order of addresses. The three
 * are interleaved; neighbouring slices give a ratio, whose median is printed: 1.00 is memcpy's
 * speed. */
#include "channel/base/idioms.h"
#include "measure.h"
#include "options.h"
#include "rows.h"

#include <coxswain/handle.h>
#include <coxswain/kv.h>

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAIR_COUNT_MAX 10000
#define USER 7

enum kind { KIND_PULL, KIND_SAME, KIND_PRIVATE, KIND_COUNT };
static const char *const kind_names[KIND_COUNT] = {"pull", "memcpy_same", "memcpy_private"};

struct pull_options {
    /* of a block */
    struct options_list sizes;
    size_t pool_size;
    size_t pairs;
    /* NULL: none */
    const char *json_path;
};

static const char usage_text[] =
    "usage: coxswain-pull [--sizes LIST] [--bytes N] [--pairs N] [--json FILE]\n"
    "Copies KV blocks of another process into own ones, beside memcpy of the same blocks.\n"
    "  --sizes LIST  bytes of a block (16384,65536,1048576)\n"
    "  --bytes N     bytes of all blocks (134217728)\n"
    "  --pairs N     slices of each kind (31)\n"
    "  --json FILE   also writes every slice to FILE\n";

/* One size of blocks. */
struct run {
    uint64_t block_size;
    uint32_t block_count;
    struct cox_kv_view *theirs;
    /* the same, for memcpy alone */
    void *theirs_mapped;
    size_t theirs_size;
    struct cox_kv_blocks *own;
    /* private */
    uint8_t *from, *to;
    uint32_t *order;
    pid_t owner;
    /* closed: it ends */
    int owner_fd;
};

/* ---- the owner ---- */

/* Differs between blocks, and within one. */
static void block_fill(uint8_t *block, uint64_t size, uint32_t number)
{
    for (uint64_t i = 0; i < size; i += sizeof number) {
        const uint32_t word = number * UINT32_C(2654435761) + (uint32_t)i;
        memcpy(block + i, &word, sizeof word);
    }
}

/* Until the other side has let go of the socket. */
static _Noreturn void owner_main(const struct run *run, int fd)
{
    struct cox_handle handle;
    struct cox_exporter *exporter = NULL;
    struct cox_kv_blocks *blocks = NULL;
    struct cox_error err = {0};
    char byte;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int r = cox_kv_blocks_new(run->block_count, run->block_size, &blocks, &err);
    for (uint32_t b = 0; r == 0 && b < run->block_count; b++) {
        uint8_t *block = (uint8_t *)cox_kv_blocks_info(blocks).memory + b * run->block_size;
        cox_kv_blocks_take(blocks, b);
        block_fill(block, run->block_size, b);
        r = cox_kv_blocks_give(blocks, b, USER);
    }
    if (r == 0)
        r = cox_exporter_new(NULL, &exporter, &err);
    if (r == 0)
        r = cox_exporter_export(exporter, cox_kv_blocks_info(blocks).fd, 0, 0, &handle, &err);
    if (r)
        fprintf(stderr, "coxswain-pull: the blocks' owner: %s\n", err.text);
    else if (write(fd, &handle, sizeof handle) == sizeof handle)
        while (read(fd, &byte, 1) < 0 && errno == EINTR)
            ;
    cox_exporter_free(exporter);
    cox_kv_blocks_free(blocks);
    _exit(r != 0);
}

/* Before this process has blocks of its own. */
static int owner_start(struct run *run, struct cox_handle *ret_handle, struct cox_error *err)
{
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
        return cox_fail(err, -errno, "socketpair: %s", cox_status_text(-errno));
    run->owner_fd = pair[0];
    run->owner = fork();
    if (run->owner == 0) {
        close(pair[0]);
        owner_main(run, pair[1]);
    }
    int e = errno;
    close(pair[1]);
    if (run->owner < 0)
        return cox_fail(err, -e, "fork: %s", cox_status_text(-e));
    ssize_t n;
    while ((n = read(run->owner_fd, ret_handle, sizeof *ret_handle)) < 0 && errno == EINTR)
        ;
    return n == sizeof *ret_handle ? 0
                                   : cox_fail(err, COX_PEER_DEAD, "the blocks' owner has ended");
}

/* ---- a run ---- */

static int run_deinit(struct run *run)
{
    int status = 0;
    cox_kv_blocks_free(run->own);
    cox_kv_view_free(run->theirs);
    if (run->theirs_mapped)
        munmap(run->theirs_mapped, run->theirs_size);
    free(run->from);
    free(run->to);
    free(run->order);
    cox_close_fd(&run->owner_fd);
    if (run->owner > 0)
        while (waitpid(run->owner, &status, 0) < 0 && errno == EINTR)
            ;
    return status;
}

/* The same in every run. */
static void order_shuffle(uint32_t *order, uint32_t count)
{
    uint64_t random = 88172645463325252u;
    for (uint32_t i = 0; i < count; i++)
        order[i] = i;
    for (uint32_t i = count - 1; i > 0; i--) {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        const uint32_t k = (uint32_t)(random % (i + 1)), kept = order[i];
        order[i] = order[k];
        order[k] = kept;
    }
}

/* As a view, and as plain memory: the blocks end where it does. */
static int theirs_open(struct run *run, const struct cox_handle *handle, struct cox_error *err)
{
    _cox_cleanup_(cox_close_fd) int fd = -1;
    struct stat st;
    int r = cox_handle_open(handle, NULL, COX_DEADLINE_NEVER, &fd, err);
    if (r == 0)
        r = cox_kv_view_attach(fd, &run->theirs, err);
    if (r)
        return r;
    void *map = fstat(fd, &st) < 0 ? MAP_FAILED
                                   : mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED)
        return cox_fail(err, -errno, "mapping the blocks: %s", cox_status_text(-errno));
    run->theirs_mapped = map;
    run->theirs_size = (size_t)st.st_size;
    return 0;
}

static uint8_t *own_block(const struct run *run, uint32_t block)
{
    return (uint8_t *)cox_kv_blocks_info(run->own).memory + block * run->block_size;
}

static int run_init(struct run *run, const struct pull_options *options, uint64_t block_size,
                    struct cox_error *err)
{
    struct cox_handle handle;
    *run = (struct run){.block_size = block_size,
                        .block_count = (uint32_t)(options->pool_size / block_size),
                        .owner_fd = -1};
    const size_t size = run->block_count * block_size;
    int r = owner_start(run, &handle, err);
    if (r == 0)
        r = theirs_open(run, &handle, err);
    if (r == 0)
        r = cox_kv_blocks_new(run->block_count, block_size, &run->own, err);
    if (r)
        return r;
    run->from = aligned_alloc(4096, size);
    run->to = aligned_alloc(4096, size);
    run->order = calloc(run->block_count, sizeof *run->order);
    if (!run->from || !run->to || !run->order)
        return cox_fail(err, -ENOMEM, "no memory for %zu bytes", size);
    for (uint32_t b = 0; b < run->block_count; b++)
        block_fill(run->from + b * block_size, block_size, b);
    memset(run->to, 0, size);
    order_shuffle(run->order, run->block_count);
    return 0;
}

/* Blocks go where others are: a table of blocks maps to another one. */
static uint32_t target_of(const struct run *run, uint32_t i)
{
    return run->order[run->block_count - 1 - i];
}

static int slice_pull(const struct run *run, struct cox_error *err)
{
    int r = 0;
    for (uint32_t i = 0; r == 0 && i < run->block_count; i++)
        r = cox_kv_view_copy(run->theirs, run->order[i], USER, 0, own_block(run, target_of(run, i)),
                             err);
    return r;
}

static void slice_copy(const struct run *run, const uint8_t *from, uint8_t *to)
{
    for (uint32_t i = 0; i < run->block_count; i++)
        memcpy(to + target_of(run, i) * run->block_size, from + run->order[i] * run->block_size,
               run->block_size);
}

static int slice_run(const struct run *run, enum kind kind, uint64_t *ret_ns, struct cox_error *err)
{
    const uint8_t *theirs =
        (const uint8_t *)run->theirs_mapped + run->theirs_size - run->block_count * run->block_size;
    int r = 0;
    const uint64_t begin = measure_now_ns();
    if (kind == KIND_PULL)
        r = slice_pull(run, err);
    else if (kind == KIND_SAME)
        slice_copy(run, theirs, own_block(run, 0));
    else
        slice_copy(run, run->from, run->to);
    *ret_ns = measure_now_ns() - begin;
    return r;
}

/* Every block has come where it belongs. */
static int run_check(const struct run *run, struct cox_error *err)
{
    _cox_cleanup_(cox_free_ptr) uint8_t *block = malloc(run->block_size);
    if (!block)
        return cox_fail(err, -ENOMEM, "no memory for a block");
    for (uint32_t i = 0; i < run->block_count; i++) {
        block_fill(block, run->block_size, run->order[i]);
        if (memcmp(own_block(run, target_of(run, i)), block, run->block_size) != 0)
            return cox_fail(err, -EBADMSG, "block %" PRIu32 " has other bytes", target_of(run, i));
    }
    return 0;
}

/* ---- many ---- */

/* One kind's speed by another's. */
static double ratio_median(uint64_t *const samples[KIND_COUNT], enum kind kind, enum kind base,
                           size_t pairs, double *scratch)
{
    for (size_t p = 0; p < pairs; p++)
        scratch[p] = (double)samples[base][p] / (double)samples[kind][p];
    return measure_median(scratch, pairs);
}

static double speed_median(const struct run *run, const uint64_t *samples, size_t pairs,
                           double *scratch)
{
    for (size_t p = 0; p < pairs; p++)
        scratch[p] = (double)run->block_count * (double)run->block_size / (double)samples[p];
    return measure_median(scratch, pairs);
}

static json_t *row_json(const struct run *run, uint64_t *const samples[KIND_COUNT], size_t pairs)
{
    char name[32];
    json_t *row = json_pack("{s:I, s:i}", "block_bytes", (json_int_t)run->block_size, "blocks",
                            (int)run->block_count);
    for (int k = 0; k < KIND_COUNT; k++) {
        snprintf(name, sizeof name, "%s_ns", kind_names[k]);
        json_object_set_new(row, name, rows_samples(samples[k], pairs, 1));
    }
    return row;
}

static int measure_slices(const struct run *run, size_t pairs, uint64_t *const samples[KIND_COUNT],
                          struct cox_error *err)
{
    uint64_t unused;
    int r = 0;
    /* Not counted: page tables, caches. What was pulled is looked at. */
    for (int k = 0; r == 0 && k < KIND_COUNT; k++) {
        memset(own_block(run, 0), 0, run->block_count * run->block_size);
        r = slice_run(run, (enum kind)k, &unused, err);
        if (r == 0 && k == KIND_PULL)
            r = run_check(run, err);
    }
    /* They take turns to be first. */
    for (size_t p = 0; r == 0 && p < pairs; p++)
        for (size_t k = 0; r == 0 && k < KIND_COUNT; k++) {
            const enum kind kind = (enum kind)((p + k) % KIND_COUNT);
            r = slice_run(run, kind, &samples[kind][p], err);
        }
    return r;
}

static int measure_row(const struct pull_options *options, uint64_t block_size, json_t *rows,
                       struct cox_error *err)
{
    struct run run;
    uint64_t *samples[KIND_COUNT] = {0};
    _cox_cleanup_(cox_free_ptr) double *scratch = calloc(options->pairs, sizeof *scratch);
    int r = scratch ? 0 : cox_fail(err, -ENOMEM, "no memory for samples");
    for (int k = 0; r == 0 && k < KIND_COUNT; k++)
        if (!(samples[k] = calloc(options->pairs, sizeof **samples)))
            r = cox_fail(err, -ENOMEM, "no memory for samples");
    if (r == 0) {
        r = run_init(&run, options, block_size, err);
        if (r == 0)
            r = measure_slices(&run, options->pairs, samples, err);
        if (run_deinit(&run) && r == 0)
            r = cox_fail(err, COX_PEER_DEAD, "the blocks' owner has failed");
    }
    if (r == 0) {
        printf("%8" PRIu64 "  %7" PRIu32, block_size, run.block_count);
        for (int k = 0; k < KIND_COUNT; k++)
            printf("  %8.2f", speed_median(&run, samples[k], options->pairs, scratch));
        for (int base = KIND_SAME; base < KIND_COUNT; base++)
            printf("  %7.2f",
                   ratio_median(samples, KIND_PULL, (enum kind)base, options->pairs, scratch));
        putchar('\n');
        fflush(stdout);
        json_array_append_new(rows, row_json(&run, samples, options->pairs));
    }
    for (int k = 0; k < KIND_COUNT; k++)
        free(samples[k]);
    return r;
}

static int measure_all(const struct pull_options *options, json_t *rows, struct cox_error *err)
{
    int r = 0;
    printf(
        "KV blocks of another process are copied into own ones; GB/s, medians of %zu slices of %zu"
        " MiB;\nbehind that pull's speed by memcpy's, and by that of private memory\n"
        "%8s  %7s  %8s  %8s  %8s  %7s  %7s\n",
        options->pairs, options->pool_size >> 20, "block", "blocks", "pull", "memcpy", "private",
        "pull", "pull/p");
    for (size_t i = 0; r == 0 && i < options->sizes.count; i++)
        r = measure_row(options, options->sizes.values[i], rows, err);
    return r;
}

/* ---- options ---- */

/* Each is aligned; there is a block at least, and there are not too many. */
static bool sizes_fit(const struct pull_options *options)
{
    for (size_t i = 0; i < options->sizes.count; i++) {
        const size_t size = options->sizes.values[i];
        if (size % COX_KV_BLOCK_ALIGNMENT || size > options->pool_size ||
            options->pool_size / size > COX_KV_BLOCK_COUNT_MAX)
            return false;
    }
    return true;
}

int main(int argc, char **argv)
{
    struct pull_options options = {
        .sizes = {{16384, 65536, 1048576}, 3}, .pool_size = (size_t)128 << 20, .pairs = 31};
    const struct option_spec specs[] = {
        {.name = "sizes",
         .list = &options.sizes,
         .min = COX_KV_BLOCK_ALIGNMENT,
         .max = (size_t)1 << 30},
        {.name = "bytes", .number = &options.pool_size, .min = 4096, .max = (size_t)1 << 36},
        {.name = "pairs", .number = &options.pairs, .min = 1, .max = PAIR_COUNT_MAX},
        {.name = "json", .text = &options.json_path},
        {.name = NULL},
    };
    struct cox_error err = {0};
    int r = options_parse(argc, argv, specs, usage_text);
    if (r >= 0)
        return r;
    if (!sizes_fit(&options)) {
        fputs(usage_text, stderr);
        return 2;
    }
    json_t *rows = json_array();
    r = measure_all(&options, rows, &err);
    if (r)
        fprintf(stderr, "coxswain-pull: %s\n", err.text);
    return rows_write("coxswain-pull", options.json_path, rows) || r != 0;
}
