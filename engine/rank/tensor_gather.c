#include "tensor_gather.h"

#include "channel/base/fault.h"
#include "channel/base/idioms.h"

#include <coxswain/handle.h>

#include <fcntl.h>
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define ALIGNMENT_FLOATS (64 / sizeof(float))
#define BUFFER_COUNT 2u
/* Seals that make mapped memory safe to read: it cannot shrink, and only its owner can write it. */
#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL)
#define NAME_SIZE 32

struct cox_tensor_gather {
    struct cox_group *group;
    uint32_t rank, rank_count;
    /* of each rank */
    uint32_t slice_count;
    /* floats */
    size_t slice_length_max;
    /* floats */
    size_t buffer_length;
    /* 0: before the first step */
    uint64_t epoch;
    /* of the next gather in its epoch */
    uint32_t index;
    /* of the step */
    uint64_t deadline_ns;
    /* of the step */
    struct cox_tensor_gather_times times;
    /* buffers by rank; only this rank's are mapped for writing */
    struct cox_region *ranks;
    /* Ranks are on several machines: slices travel as values of the group, in pieces of part_size
     * bytes, and all buffers are private. NULL: they are shared memory. */
    uint8_t *parts;
    size_t part_size;
};

/* Values that the ranks must agree on; each sends its own to the others. */
struct facts {
    uint64_t slice_count;
    uint64_t slice_length_max;
};

const struct cox_tensor_gather_times *cox_tensor_gather_times(
    const struct cox_tensor_gather *gather)
{
    return &gather->times;
}

/* Bytes that each rank shares. */
static uint64_t gather_size(const struct cox_tensor_gather *gather)
{
    return gather->buffer_length * BUFFER_COUNT * sizeof(float);
}

static float *buffer_of(const struct cox_tensor_gather *gather, uint32_t rank, uint32_t buffer)
{
    return (float *)gather->ranks[rank].base + buffer * gather->buffer_length;
}

static int map_private(struct cox_region *region, size_t size)
{
    void *base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED)
        return -errno;
    *region = (struct cox_region){.base = base, .size = size};
    return 0;
}

/* In place of shared memory. */
static int make_private(struct cox_tensor_gather *gather, struct cox_error *err)
{
    gather->part_size = cox_group_get_info(gather->group).value_size;
    gather->parts = malloc(gather->rank_count * gather->part_size);
    int r = gather->parts ? 0 : -ENOMEM;
    for (uint32_t rank = 0; r == 0 && rank < gather->rank_count; rank++)
        r = map_private(&gather->ranks[rank], gather_size(gather));
    return r ? cox_fail(err, r, "memory for the gather of slices: %s", cox_status_text(r)) : 0;
}

/* Copies the buffer of every other machine's ranks, and of those here, which is as fast. */
static int gather_parts(struct cox_tensor_gather *gather, uint32_t buffer, size_t size,
                        struct cox_error *err)
{
    int r = 0;
    for (size_t done = 0, part; r == 0 && done < size; done += part) {
        part = size - done < gather->part_size ? size - done : gather->part_size;
        r = cox_group_gather(gather->group,
                             (const uint8_t *)buffer_of(gather, gather->rank, buffer) + done, part,
                             gather->parts, gather->deadline_ns, err);
        for (uint32_t rank = 0; r == 0 && rank < gather->rank_count; rank++)
            if (rank != gather->rank)
                memcpy((uint8_t *)buffer_of(gather, rank, buffer) + done,
                       gather->parts + rank * part, part);
    }
    return r;
}

/* Creates the memory of this rank and maps it for writing, before the seal that denies that to
 * others. */
static int make_memory(struct cox_tensor_gather *gather, int *ret_fd, struct cox_error *err)
{
    struct cox_error why = {0};
    int r = cox_region_create_unnamed(&gather->ranks[gather->rank], "cox_payload_exchange",
                                      gather_size(gather), SEALS, false, ret_fd, &why);
    if (r)
        return cox_fail(err, r, "memory for the gather of slices: %s", why.text);
    cox_fault_point(COX_FAULT_EXCHANGE_MADE);
    return 0;
}

/* Before any memory is checked, so that a rank with another model gets that as its error. */
static int compare_facts(struct cox_tensor_gather *gather, uint64_t deadline_ns,
                         struct cox_error *err)
{
    const struct facts own = {gather->slice_count, gather->slice_length_max};
    struct facts all[COX_RANK_COUNT_MAX];
    int r = cox_group_gather(gather->group, &own, sizeof own, all, deadline_ns, err);

    for (uint32_t rank = 0; r == 0 && rank < gather->rank_count; rank++)
        if (memcmp(&all[rank], &own, sizeof own) != 0)
            r = cox_fail(err, COX_INVALID,
                         "rank %" PRIu32 " gathers %" PRIu64 " slices of at most %" PRIu64
                         " numbers, this rank %" PRIu64 " of %" PRIu64
                         ": they have not loaded the same model",
                         rank, all[rank].slice_count, all[rank].slice_length_max, own.slice_count,
                         own.slice_length_max);
    return r;
}

/* Checks that a rank's mapped memory is what the gather may read. */
static int check_memory(const struct cox_tensor_gather *gather, const struct cox_region *memory,
                        int fd, const char *name, struct cox_error *err)
{
    const int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0)
        return cox_fail(err, COX_DENIED, "region %s could shrink: it is not sealed", name);
    if (memory->size != gather_size(gather))
        return cox_fail(err, COX_CORRUPT, "region %s has %" PRIu64 " bytes, expected %" PRIu64,
                        name, memory->size, gather_size(gather));
    if ((seals & SEALS) != SEALS)
        return cox_fail(err, COX_DENIED,
                        "region %s has the seals %#x, expected %#x: other processes could write it",
                        name, (unsigned)seals, (unsigned)SEALS);
    return 0;
}

static int map_rank(struct cox_tensor_gather *gather, uint32_t rank, int fd, struct cox_error *err)
{
    struct cox_region *memory = &gather->ranks[rank];
    char name[NAME_SIZE];
    snprintf(name, sizeof name, "of slices of rank %" PRIu32, rank);
    int r = cox_region_attach_fd(memory, fd, name, 1, COX_REGION_READ, err);
    if (r)
        return r;
    r = check_memory(gather, memory, fd, name, err);
    if (r)
        cox_region_detach(memory);
    return r;
}

static int map_ranks(struct cox_tensor_gather *gather, int own_fd, uint64_t deadline_ns,
                     struct cox_error *err)
{
    int fds[COX_RANK_COUNT_MAX];
    int r = cox_group_gather_fds(gather->group, own_fd, COX_GROUP_FD_KEEP, fds, deadline_ns, err);

    if (r)
        return r;
    for (uint32_t rank = 0; rank < gather->rank_count; rank++) {
        if (rank == gather->rank)
            continue;
        if (r == 0)
            r = map_rank(gather, rank, fds[rank], err);
        cox_close_fd(&fds[rank]);
    }
    return r;
}

int cox_tensor_gather_new(struct cox_group *group, uint32_t slice_count, size_t slice_length_max,
                          uint64_t deadline_ns, struct cox_tensor_gather **ret_gather,
                          struct cox_error *err)
{
    _cox_cleanup_(cox_tensor_gather_freep) struct cox_tensor_gather *gather =
        calloc(1, sizeof *gather);
    _cox_cleanup_(cox_close_fd) int fd = -1;
    int r;

    COX_ASSERT(slice_count > 0 && slice_length_max > 0);
    if (!gather)
        return cox_fail(err, -ENOMEM, "no memory for the gather of slices");
    gather->group = group;
    gather->rank = cox_group_get_info(group).rank;
    gather->rank_count = cox_group_get_info(group).rank_count;
    gather->slice_count = slice_count;
    gather->slice_length_max = slice_length_max;
    gather->buffer_length = (slice_count * slice_length_max + ALIGNMENT_FLOATS - 1) /
                            ALIGNMENT_FLOATS * ALIGNMENT_FLOATS;
    gather->ranks = calloc(gather->rank_count, sizeof gather->ranks[0]);
    if (!gather->ranks)
        return cox_fail(err, -ENOMEM, "no memory for the gather of slices");
    const bool mirrored = cox_group_get_info(group).mirrored;
    r = mirrored ? make_private(gather, err) : make_memory(gather, &fd, err);
    if (r == 0)
        r = compare_facts(gather, deadline_ns, err);
    if (r == 0 && !mirrored)
        r = map_ranks(gather, fd, deadline_ns, err);
    if (r)
        return cox_fail(err, r, "the ranks could not share memory: %s", cox_status_text(r));
    *ret_gather = cox_steal_ptr(&gather);
    return 0;
}

struct cox_tensor_gather *cox_tensor_gather_free(struct cox_tensor_gather *gather)
{
    if (!gather)
        return NULL;
    if (gather->ranks)
        for (uint32_t rank = 0; rank < gather->rank_count; rank++)
            cox_region_detach(&gather->ranks[rank]);
    free(gather->ranks);
    free(gather->parts);
    free(gather);
    return NULL;
}

int cox_tensor_gather_begin(struct cox_tensor_gather *gather, uint64_t epoch, uint64_t deadline_ns,
                            struct cox_error *err)
{
    gather->deadline_ns = deadline_ns;
    gather->times = (struct cox_tensor_gather_times){0};
    /* Ranks in one epoch have made the same gathers in it, so they agree which buffer is next. */
    if (epoch == gather->epoch)
        return 0;
    int r = cox_group_align(gather->group, epoch);
    if (r)
        return cox_fail(err, r, "the ranks cannot begin epoch %" PRIu64 ": %s", epoch,
                        cox_status_text(r));
    gather->epoch = epoch;
    gather->index = 0;
    return 0;
}

int cox_tensor_gather_all(struct cox_tensor_gather *gather, const float *slices, size_t stride,
                          size_t slice_length, const float **ret_slices, struct cox_error *err)
{
    const uint32_t buffer = gather->index % BUFFER_COUNT;
    const uint32_t slice_count = gather->slice_count, first = gather->rank * slice_count;
    const uint64_t begin_ns = cox_now_ns();
    uint64_t arrived_ns, end_ns;
    int r;

    COX_ASSERT(slice_length <= gather->slice_length_max);
    gather->index++;
    for (uint32_t slice = 0; slice < slice_count; slice++)
        memcpy(buffer_of(gather, gather->rank, buffer) + slice * slice_length,
               slices + (first + slice) * stride, slice_length * sizeof(float));
    cox_fault_point(COX_FAULT_EXCHANGE_WRITTEN);
    arrived_ns = cox_now_ns();
    r = gather->parts
            ? gather_parts(gather, buffer, slice_count * slice_length * sizeof(float), err)
            : cox_group_barrier(gather->group, gather->deadline_ns, err);
    if (r)
        return cox_fail(err, r, "the gather of slices: %s", cox_status_text(r));
    for (uint32_t rank = 0; rank < gather->rank_count; rank++)
        for (uint32_t slice = 0; slice < slice_count; slice++)
            ret_slices[rank * slice_count + slice] =
                rank == gather->rank ? slices + (first + slice) * stride
                                     : buffer_of(gather, rank, buffer) + slice * slice_length;
    end_ns = cox_now_ns();
    gather->times.total_ns += end_ns - begin_ns;
    gather->times.wait_ns += end_ns - arrived_ns;
    cox_fault_point(COX_FAULT_EXCHANGE_READ);
    return 0;
}

/* Returns whether a sum of that many such numbers can overflow. */
static bool overflows(float number, uint32_t count)
{
    return (double)number * count >= FLT_MAX;
}

int cox_tensor_gather_blame(const struct cox_tensor_gather *gather, const float *const *slices,
                            size_t slice_length, struct cox_error *err)
{
    /* The slices of all ranks, and the value they are added to. */
    const uint32_t number_count = gather->rank_count * gather->slice_count + 1;
    uint32_t largest_rank = 0;
    float largest = -1;
    for (uint32_t rank = 0; rank < gather->rank_count; rank++)
        for (uint32_t i = 0; i < gather->slice_count; i++) {
            const float *slice = slices[rank * gather->slice_count + i];
            for (size_t j = 0; j < slice_length; j++) {
                const float number = fabsf(slice[j]);
                if (!isfinite(number)) {
                    cox_group_blame(gather->group, rank);
                    return cox_fail(
                        err, COX_INVALID,
                        "rank %" PRIu32
                        " gave a number that is not finite: its weights or KV cache do not fit the model, or it is faulty",
                        rank);
                }
                if (number > largest) {
                    largest = number;
                    largest_rank = rank;
                }
            }
        }
    if (!overflows(largest, number_count))
        return cox_fail(
            err, COX_INVALID,
            "a sum is not finite, and none of its inputs explains that: an earlier sum was as large, or an input has changed since");
    cox_group_blame(gather->group, largest_rank);
    return cox_fail(err, COX_INVALID,
                    "rank %" PRIu32 " gave the number %g, with which a sum is not finite",
                    largest_rank, (double)largest);
}
