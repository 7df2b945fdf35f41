#include "mirror_memory.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>

#include "coordinator/transport/transport.h"
#include "executor_internal.h"

static uint64_t part_size(int part)
{
    return part == 0 ? cox_geometry_group_words_size() : cox_geometry_group_payload_size();
}

/* With memory_lock. */
static int rank_take(struct cox_executor *executor, uint32_t rank, struct cox_error *err)
{
    const bool here = cox_executor_has_rank(executor, rank);
    int r = 0;
    for (int part = 0; r == 0 && part < COX_SEALED_GROUP_FD_COUNT; part++) {
        struct cox_region *region = &executor->mirror_memory->parts[rank][part];
        const int fd = executor->sealed.group_fds[rank][part];
        if (fd < 0)
            continue; /* not renewed */
        cox_region_detach(region);
        r = cox_region_map(region, fd, part_size(part), here ? COX_REGION_READ : COX_REGION_WRITE,
                           "memory of the rank group", err);
        if (r == 0 && !here && fcntl(fd, F_ADD_SEALS, (int)COX_SEALED_OWNED) < 0)
            r = cox_fail(err, -errno, "memory of the rank group cannot be sealed: %s",
                         cox_status_text(-errno));
    }
    return r;
}

int cox_mirror_memory_take(struct cox_executor *executor, struct cox_error *err)
{
    int r = 0;
    if (!executor->geometry.mirrored || !executor->geometry.sealed)
        return 0;
    if (!executor->mirror_memory)
        executor->mirror_memory = calloc(1, sizeof *executor->mirror_memory);
    if (!executor->mirror_memory)
        return cox_fail(err, -ENOMEM, "no memory for a mirror of the rank group");
    pthread_mutex_lock(&executor->memory_lock);
    for (uint32_t rank = 0; r == 0 && rank < executor->geometry.rank_count; rank++)
        r = rank_take(executor, rank, err);
    pthread_mutex_unlock(&executor->memory_lock);
    return r;
}

struct cox_mirror_memory *cox_mirror_memory_free(struct cox_mirror_memory *memory)
{
    for (uint32_t rank = 0; memory && rank < COX_RANK_COUNT_MAX; rank++)
        for (int part = 0; part < COX_SEALED_GROUP_FD_COUNT; part++)
            cox_region_detach(&memory->parts[rank][part]);
    free(memory);
    return NULL;
}

int cox_executor_group_window(const struct cox_executor *executor,
                              struct cox_group_window *ret_window)
{
    const struct cox_geometry *geometry = &executor->geometry;
    *ret_window = (struct cox_group_window){
        .generation = atomic_load_explicit(&executor->group_generation, memory_order_relaxed),
        .value_size = cox_geometry_group_value_size(geometry),
        .fd = geometry->sealed ? -1 : executor->bundle.fds[COX_FD_BUNDLE_GROUP],
    };
    ret_window->offset = cox_geometry_group_offset(geometry, ret_window->generation);
    if (!geometry->mirrored || ret_window->generation == 0)
        return COX_UNSUPPORTED;
    for (uint32_t rank = 0; geometry->sealed && rank < geometry->rank_count; rank++) {
        ret_window->words[rank] = executor->mirror_memory->parts[rank][0].base;
        ret_window->values[rank] = executor->mirror_memory->parts[rank][1].base;
    }
    if (geometry->sealed)
        ret_window->wakeups =
            (uint8_t *)executor->sealed.wake.base + cox_geometry_group_hints_offset();
    return 0;
}
