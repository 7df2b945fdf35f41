/* mode: the memory and the gates of groups with workers of MindIE-LLM. */
#include "channel/attach/named/named.h"
#include "channel/attach/named/named_channel.h"
#include "channel/attach/named/names.h"

#include "legacy_bridge.h"
#include "legacy_shim.h"

#include <inttypes.h>
#include <stdlib.h>

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

static int legacy_create(const struct cox_attach_request *request,
                         struct cox_attach_group **ret_group, struct cox_error *err)
{
    struct cox_attach_group *group;
    int r = cox_named_create(request, &group, err);
    if (r)
        return r;
    for (int c = 0; r == 0 && c < COX_TWO_WAY_COUNT; c++)
        r = cox_legacy_bridge_new(&request->channels[c], &request->channels[c].tokens);
    if (r) {
        cox_named_undo(group);
        return cox_fail(err, r, "no memory for the tokens of legacy workers");
    }
    *ret_group = group;
    return 0;
}

/* Resource trackers of its workers may have unlinked regions by their names. */
static int legacy_renew_all(struct cox_attach_group *group, struct cox_error *err)
{
    struct cox_named_group *named = (struct cox_named_group *)group;
    const struct cox_attach_request *request = &group->request;
    if (!cox_control_is_named(request->control, request->name))
        return cox_fail(
            err, COX_NOT_FOUND,
            "the names of the group '%s' in /dev/shm were removed while it lived, by which legacy workers find it: stop it and start it",
            request->name);
    if (!named->linked) /* abandoned: no object may get a name again */
        return cox_fail(err, COX_CLOSED, "the group stops");
    int r = 0;
    for (int c = 0; r == 0 && c < COX_CHANNEL_COUNT; c++)
        r = cox_channel_renew_regions(&request->channels[c], named->objects, err);
    return r;
}

/* ---- a worker of Coxswain under a coordinator of MindIE-LLM ---- */

static int shim_join(const struct cox_attach_place *place, struct cox_attached **ret_attached,
                     struct cox_error *err)
{
    struct cox_attached *attached = calloc(1, sizeof *attached);
    if (!attached)
        return cox_fail(err, -ENOMEM, "no memory for the group's names");
    const int r = cox_legacy_shim_create(place->control, place->objects, place->rank_count,
                                         place->parent_pid, err);
    if (r) {
        free(attached);
        return r;
    }
    *attached = (struct cox_attached){.mode = &cox_attach_shim, .place = *place};
    *ret_attached = attached;
    return 0;
}

static int shim_join_channel(struct cox_attached *attached, struct cox_channel *channel,
                             enum cox_channel_id id, struct cox_error *err)
{
    int r = cox_named_join_channel(attached, channel, id, err);
    if (r || id == COX_CHANNEL_ERROR)
        return r;
    r = cox_legacy_shim_new(channel, &channel->tokens);
    if (r)
        cox_channel_close(channel);
    return r ? cox_fail(err, r, "no memory for the legacy shim of a channel") : 0;
}

#define LEGACY_LIMITS(words)                                                                       \
    {                                                                                              \
        .depth_default = 1, .rank_group = COX_ATTACH_NO_RANK_GROUP, .coordinator_words = (words),  \
        .has_serial = true, .whole_replies = true                                                  \
    }

const struct cox_attach_mode cox_attach_legacy = {
    .name = "named",
    .attach = COX_ATTACH_NAMED,
    .wakeup_name = "semaphore",
    .layout_flags = COX_LAYOUT_LEGACY,
    .limits = LEGACY_LIMITS(true),
    .sizes = &legacy_sizes,
    .check = legacy_check,
    .create = legacy_create,
    .renew_all = legacy_renew_all,
    .join = cox_named_join,
    .join_channel = cox_named_join_channel,
    COX_NAMED_FUNCTIONS,
};

const struct cox_attach_mode cox_attach_shim = {
    .name = "named",
    .attach = COX_ATTACH_NAMED,
    .wakeup_name = "semaphore",
    .layout_flags = COX_LAYOUT_LEGACY,
    .limits = LEGACY_LIMITS(false),
    .sizes = &legacy_sizes,
    .check = legacy_check,
    .join = shim_join,
    .join_channel = shim_join_channel,
    COX_NAMED_FUNCTIONS,
};
