#include "legacy_shim.h"

#include "channel/base/peer.h"
#include "channel/shm/region.h"
#include "channel/shm/state.h"

#include <endian.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static int region_size(const char *object, uint64_t *ret_size, struct cox_error *err)
{
    struct cox_region region = {0};
    int r = cox_region_attach(&region, object, 1, COX_REGION_READ, err);
    if (r == 0)
        *ret_size = region.size;
    cox_region_detach(&region);
    return r;
}

static int find_geometry(const char *name, uint32_t rank_count, struct cox_geometry *ret_geometry,
                         struct cox_error *err)
{
    struct cox_geometry_choice choice = {.mode = &cox_attach_shim};
    char object[COX_OBJECT_NAME_SIZE];
    int r = 0;
    for (int c = 0; r == 0 && c < COX_CHANNEL_COUNT; c++) {
        enum cox_channel_id channel = (enum cox_channel_id)c;
        if (channel != COX_CHANNEL_ERROR)
            r = region_size(cox_name_request(object, name, channel), &choice.request_size[c], err);
        if (r == 0)
            r = region_size(cox_name_response(object, name, channel), &choice.response_size[c],
                            err);
    }
    return r ? r : cox_geometry_resolve(rank_count, &choice, ret_geometry, err);
}

int cox_legacy_shim_create(struct cox_control *control, const char *name, uint32_t rank_count,
                           pid_t coordinator_pid, struct cox_error *err)
{
    struct cox_geometry geometry;
    uint64_t start;
    int r = find_geometry(name, rank_count, &geometry, err);
    if (r)
        return r;
    r = cox_peer_start_time(coordinator_pid, &start);
    if (r)
        return cox_fail(err, r, "the coordinator of /%s, process %jd: %s", name,
                        (intmax_t)coordinator_pid, cox_status_text(r));
    uint64_t size = cox_layout_control_size(rank_count);
    void *base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED)
        return cox_fail(err, -errno, "no memory for the legacy shim of the control region");
    struct cox_layout_control *layout = base;
    layout->header.coordinator_pid = (uint32_t)coordinator_pid;
    layout->header.coordinator_start = start;
    *control = (struct cox_control){
        .region = {.base = base, .size = size},
        .layout = layout,
        .geometry = geometry,
        .lock_fd = -1,
    };
    cox_control_point(control);
    return 0;
}

struct shim {
    struct cox_tokens base;
    /* borrowed */
    const struct cox_channel *channel;
};

static void shim_taken(struct cox_tokens *tokens, uint64_t sequence)
{
    const struct cox_channel *channel = ((struct shim *)tokens)->channel;
    const struct cox_geometry *geometry = &channel->control->geometry;
    /* Checked against the frame in cox_request_read. */
    uint32_t prefix;
    memcpy(&prefix, channel->request.base, sizeof prefix);
    const struct cox_frame_record record = {
        .sequence = sequence,
        .length = le32toh(prefix),
        .asked = cox_rank_set_first(geometry->rank_count),
    };
    cox_state_publish(cox_state_channel(channel->control, channel->id), geometry->depth, &record);
}

static struct cox_tokens *shim_free(struct cox_tokens *tokens)
{
    free(tokens);
    return NULL;
}

static const struct cox_tokens_ops shim_ops = {.taken = shim_taken, .free = shim_free};

int cox_legacy_shim_new(const struct cox_channel *channel, struct cox_tokens **ret_tokens)
{
    struct shim *shim = calloc(1, sizeof *shim);
    if (!shim)
        return -ENOMEM;
    *shim = (struct shim){.base = {.ops = &shim_ops}, .channel = channel};
    *ret_tokens = &shim->base;
    return 0;
}
