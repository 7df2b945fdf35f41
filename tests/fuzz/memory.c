#include "memory.h"

#include "fuzz.h"

struct made {
    struct cox_control control;
    struct cox_channel channels[COX_TWO_WAY_COUNT];
};

static void make(struct made *made, uint32_t rank_count, uint32_t depth, bool legacy)
{
    struct cox_geometry_choice choice = {.depth = depth,
                                         .mode = legacy ? &cox_attach_legacy : NULL};
    struct cox_control *control = &made->control;
    for (int c = 0; c < COX_CHANNEL_COUNT; c++) {
        choice.request_size[c] = c == COX_CHANNEL_ERROR ? 0 : 512 * depth;
        choice.response_size[c] = (legacy ? COX_LEGACY_SLOT_STRIDE : 256 * depth) * rank_count;
    }
    FUZZ_CHECK(cox_geometry_resolve(rank_count, &choice, &control->geometry, NULL) == 0);
    control->layout = calloc(1, cox_layout_control_size(rank_count));
    FUZZ_CHECK(control->layout);
    cox_control_point(control);
    control->group_incarnation = MEMORY_GROUP_INCARNATION;
    control->lock_fd = -1;
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
        const struct cox_layout_channel *sizes = &control->geometry.channels[c];
        struct cox_channel *channel = &made->channels[c];
        channel->id = (enum cox_channel_id)c;
        channel->control = control;
        channel->request.size = sizes->request_size;
        channel->request.base = calloc(1, sizes->request_size);
        channel->response.size = sizes->response_size;
        channel->response.base = calloc(1, sizes->response_size);
        FUZZ_CHECK(channel->request.base && channel->response.base);
    }
}

struct cox_channel *memory_channel(uint8_t rank_count, uint8_t depth, bool legacy,
                                   enum cox_channel_id id)
{
    static struct made *all[MEMORY_RANK_COUNT_MAX][MEMORY_DEPTH_MAX][2];
    uint32_t ranks = rank_count % MEMORY_RANK_COUNT_MAX;
    uint32_t frames = legacy ? 0 : depth % MEMORY_DEPTH_MAX;
    struct made **made = &all[ranks][frames][legacy];
    if (!*made) {
        *made = calloc(1, sizeof **made);
        FUZZ_CHECK(*made);
        make(*made, ranks + 1, frames + 1, legacy);
    }
    return &(*made)->channels[(unsigned)id % COX_TWO_WAY_COUNT];
}
