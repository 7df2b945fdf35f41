/* mode: the memory and the gates of groups with workers of MindIE-LLM. */
#include "channel/attach/named/named.h"
#include "channel/shm/geometry.h"

#include <inttypes.h>

#define KIB UINT64_C(1024)
#define MIB (KIB * KIB)

static const struct cox_attach_sizes legacy_sizes = {
    .request =
        {
            [COX_CHANNEL_EXECUTE] = 256 * MIB,
            [COX_CHANNEL_LINK] = 32 * MIB,
            [COX_CHANNEL_TRANSFER] = 256 * MIB,
            [COX_CHANNEL_RECOVER] = 8 * MIB,
        },
    .response =
        {
            [COX_CHANNEL_EXECUTE] = 32 * MIB,
            [COX_CHANNEL_LINK] = 32 * MIB,
            [COX_CHANNEL_TRANSFER] = 32 * MIB,
            [COX_CHANNEL_RECOVER] = 8 * MIB,
            [COX_CHANNEL_ERROR] = 1 * KIB,
        },
    .slot_stride = COX_LEGACY_SLOT_STRIDE,
};

static int legacy_check(const struct cox_geometry *geometry, int code, struct cox_error *err)
{
    return geometry->depth != 1
               ? cox_fail(err, code,
                          "depth %" PRIu32 ": legacy workers know one frame only, use depth 1",
                          geometry->depth)
               : 0;
}

#define LEGACY_MODE(words)                                                                         \
    {                                                                                              \
        .name = "named", .attach = COX_ATTACH_NAMED, .wakeup_name = "semaphore",                   \
        .layout_flags = COX_LAYOUT_LEGACY,                                                         \
        .limits = {.depth_max = 1,                                                                 \
                   .depth_default = 1,                                                             \
                   .rank_group = COX_ATTACH_NO_RANK_GROUP,                                         \
                   .coordinator_words = (words),                                                   \
                   .has_serial = true,                                                             \
                   .whole_replies = true},                                                         \
        .sizes = &legacy_sizes, .check = legacy_check, .account = cox_named_account,               \
    }

const struct cox_attach_mode cox_attach_legacy = LEGACY_MODE(true);
