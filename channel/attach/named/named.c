#include "named.h"

#include "channel/base/base_internal.h"
#include "channel/base/idioms.h"
#include "channel/shm/region.h"
#include "named_channel.h"
#include "names.h"
#include "windows.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int cox_named_check(const struct cox_geometry *geometry, int code, struct cox_error *err)
{
    return geometry->serial ? cox_fail(err, code, "serial %08" PRIx32 ": only with legacy workers",
                                       geometry->serial)
                            : 0;
}

void cox_named_account(const struct cox_geometry *geometry, struct cox_attach_account *ret_account)
{
    const uint64_t control = cox_geometry_control_object_size(geometry);
    const uint64_t group = cox_geometry_group_object_size(geometry);
    struct cox_attach_account account = {
        .region_bytes = control + cox_geometry_group_size(geometry),
        .region_size_max = group > control ? group : control,
        .semaphore_count =
            (uint64_t)COX_TWO_WAY_COUNT * COX_WAKEUP_COUNT * geometry->rank_count + 2,
        .name_count = group ? 2 : 1,
    };
    account.name_count += account.semaphore_count;
    for (int c = 0; c < COX_CHANNEL_COUNT; c++) {
        const struct cox_layout_channel *sizes = &geometry->channels[c];
        const uint64_t larger =
            sizes->request_size > sizes->response_size ? sizes->request_size : sizes->response_size;
        account.region_bytes += sizes->request_size + sizes->response_size;
        if (larger > account.region_size_max)
            account.region_size_max = larger;
        account.name_count += sizes->request_size ? 2 : 1;
    }
    *ret_account = account;
}

static struct cox_named_group *named_of(struct cox_attach_group *group)
{
    return (struct cox_named_group *)group;
}

/* ---- create, unlink, free ---- */

static int objects_create(struct cox_named_group *named, struct cox_error *err)
{
    const struct cox_attach_request *request = &named->base.request;
    const struct cox_attach_limits *limits = &named->base.mode->limits;
    int r = cox_control_create(request->control, request->name, request->geometry, err);
    if (r)
        return r;
    named->linked = true;
    for (int c = 0; r == 0 && c < COX_CHANNEL_COUNT; c++) {
        r = cox_channel_create(&request->channels[c], named->objects, request->control,
                               (enum cox_channel_id)c, err);
        named->parts_made += r == 0; /* objects of others under such a name are not removed */
    }
    if (r == 0 && limits->rank_group == COX_ATTACH_WINDOWS) {
        r = cox_windows_create_named(request->name, request->geometry, err);
        named->parts_made += r == 0;
    }
    /* Ranks without words find everything by its name, which stays. */
    if (r == 0 && limits->rank_words)
        r = cox_fd_bundle_open(&named->shared, request->name, request->geometry, err);
    named->base.rank_group_fd = named->shared.fds[COX_FD_BUNDLE_GROUP];
    return r;
}

void cox_named_undo(struct cox_attach_group *group)
{
    cox_named_unlink(group);
    for (int c = 0; c < COX_CHANNEL_COUNT; c++)
        cox_channel_close(&group->request.channels[c]);
    cox_control_close(group->request.control);
    cox_named_free(group);
}

int cox_named_create(const struct cox_attach_request *request, struct cox_attach_group **ret_group,
                     struct cox_error *err)
{
    int r = cox_control_clear(request->name, request->geometry, err);
    if (r == 0)
        r = cox_control_check_space(request->geometry, err);
    if (r)
        return r;
    struct cox_named_group *named = calloc(1, sizeof *named);
    if (!named)
        return cox_fail(err, -ENOMEM, "no memory for the group's names");
    named->base = (struct cox_attach_group){
        .mode = request->geometry->mode, .request = *request, .rank_group_fd = -1};
    cox_name_objects(named->objects, request->name, request->geometry);
    cox_fd_bundle_init(&named->shared);
    for (uint32_t rank = 0; rank < COX_RANK_COUNT_MAX; rank++)
        cox_fd_bundle_init(&named->replacements[rank]);
    r = objects_create(named, err);
    if (r) {
        cox_named_undo(&named->base);
        return r;
    }
    *ret_group = &named->base;
    return 0;
}

struct cox_attach_group *cox_named_free(struct cox_attach_group *group)
{
    cox_fd_bundle_close(&named_of(group)->shared);
    free(group);
    return NULL;
}

int cox_named_unlink(struct cox_attach_group *group)
{
    struct cox_named_group *named = named_of(group);
    const struct cox_attach_request *request = &group->request;
    if (!named->linked)
        return 0;
    named->linked = false;
    if (!cox_control_is_named(request->control, request->name))
        return COX_NOT_FOUND;
    cox_control_unlink_names(request->name, request->geometry, named->parts_made);
    return 0;
}

/* ---- what a process gets ---- */

int cox_named_lend(struct cox_attach_group *group, uint32_t rank, int *ret_fds, uint32_t *ret_count,
                   struct cox_error *err)
{
    const struct cox_fd_bundle *bundle = &named_of(group)->replacements[rank];
    (void)err;
    memcpy(ret_fds, bundle->fds, sizeof bundle->fds);
    *ret_count = bundle->count;
    return 0;
}

/* Opens a semaphore of the rank. Those of its first incarnation have names while ranks attach.
 * Later ones have none, and are kept until a process has received them, which may not be the first
 * to try. */
static int wakeup_open(struct cox_named_group *named, uint32_t rank, enum cox_channel_id channel,
                       enum cox_wakeup wakeup, int *ret_fd, struct cox_error *err)
{
    char object[COX_OBJECT_NAME_SIZE], path[COX_OBJECT_NAME_SIZE + 32];
    cox_name_wakeup(object, named->base.request.name, channel, wakeup, rank);
    snprintf(path, sizeof path, "/dev/shm/sem.%s", object + 1);
    const int kept = named->replacements[rank].fds[cox_fd_bundle_wakeup(channel, wakeup)];
    _cox_cleanup_(cox_close_fd) int fd =
        kept >= 0 ? fcntl(kept, F_DUPFD_CLOEXEC, 3)
                  : open(path, O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    int r = fd < 0 ? -errno : 0;
    if (r == 0)
        r = cox_fd_raise(&fd);
    if (r)
        return cox_fail(err, r, "rank %" PRIu32 " cannot be given its semaphores any more (%s: %s)",
                        rank, path, cox_status_text(r));
    *ret_fd = cox_steal_fd(&fd);
    return 0;
}

int cox_named_hand_out(struct cox_attach_group *group, uint32_t rank, struct cox_attach_fds *fds,
                       bool *ret_renewed, struct cox_error *err)
{
    struct cox_named_group *named = named_of(group);
    *ret_renewed = false;
    memcpy(fds->fds, named->shared.fds, sizeof named->shared.fds);
    fds->count = COX_FD_BUNDLE_COUNT;
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
        for (int b = 0; b < COX_WAKEUP_COUNT; b++) {
            const int place = cox_fd_bundle_wakeup((enum cox_channel_id)c, (enum cox_wakeup)b);
            int r = wakeup_open(named, rank, (enum cox_channel_id)c, (enum cox_wakeup)b,
                                &fds->fds[place], err);
            if (r)
                return r;
            fds->given |= UINT64_C(1) << place;
        }
    }
    return 0;
}

void cox_named_put_away(struct cox_attach_group *group, uint32_t rank, bool lent)
{
    struct cox_fd_bundle *bundle = &named_of(group)->replacements[rank];
    (void)lent;
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
        for (int b = 0; b < COX_WAKEUP_COUNT; b++)
            cox_close_fd(
                &bundle->fds[cox_fd_bundle_wakeup((enum cox_channel_id)c, (enum cox_wakeup)b)]);
}

/* ---- the next process of a rank ---- */

int cox_named_renew_rank(struct cox_attach_group *group, uint32_t rank, struct cox_error *err)
{
    struct cox_named_group *named = named_of(group);
    (void)err;
    named->replacements[rank] = named->shared;
    return 0;
}

int *cox_named_wakeup_fds(struct cox_attach_group *group, uint32_t rank,
                          enum cox_channel_id channel)
{
    return &named_of(group)
                ->replacements[rank]
                .fds[cox_fd_bundle_wakeup(channel, (enum cox_wakeup)0)];
}

int cox_named_renew_rank_group(struct cox_attach_group *group, uint64_t incarnation,
                               struct cox_error *err)
{
    return group->rank_group_fd < 0
               ? 0
               : cox_windows_renew(group->rank_group_fd, group->request.geometry, incarnation, err);
}

int cox_named_keep_rank_group(struct cox_attach_group *group, uint64_t incarnation)
{
    return group->rank_group_fd < 0
               ? 0
               : cox_windows_keep(group->rank_group_fd, group->request.geometry, incarnation);
}

/* ---- a rank's ---- */

/* By the prefix it was given, which may have the group's serial. */
static int control_by_name(const struct cox_attach_place *place, struct cox_error *err)
{
    char name[COX_NAME_SIZE_MAX + 1];
    uint32_t serial;
    int r = cox_control_attach(place->control, place->objects, err);
    if (r != COX_NOT_FOUND || !cox_name_of_objects(name, place->objects, &serial) ||
        cox_control_attach(place->control, name, NULL))
        return r;
    if (place->control->geometry.serial == serial)
        return 0;
    cox_control_close(place->control); /* it belongs to another group, or to another start */
    return r;
}

int cox_named_join(const struct cox_attach_place *place, struct cox_attached **ret_attached,
                   struct cox_error *err)
{
    int r = place->fd_count
                ? cox_control_attach_fd(place->control, place->bundle->fds[COX_FD_BUNDLE_CONTROL],
                                        COX_REGION_WRITE, err)
                : control_by_name(place, err);
    if (r)
        return r;
    struct cox_attached *attached = calloc(1, sizeof *attached);
    if (!attached) {
        cox_control_close(place->control);
        return cox_fail(err, -ENOMEM, "no memory for the group's names");
    }
    /* Its header says whether it is named or legacy. */
    *attached = (struct cox_attached){.mode = place->control->geometry.mode, .place = *place};
    *ret_attached = attached;
    return 0;
}

struct cox_attached *cox_named_leave(struct cox_attached *attached)
{
    free(attached);
    return NULL;
}

int cox_named_join_channel(struct cox_attached *attached, struct cox_channel *channel,
                           enum cox_channel_id id, struct cox_error *err)
{
    const struct cox_attach_place *place = &attached->place;
    return place->fd_count
               ? cox_fd_bundle_attach(place->bundle, channel, place->control, id, place->rank, err)
               : cox_channel_attach(channel, place->objects, place->control, id, place->rank, err);
}

int cox_named_join_rank_group(struct cox_attached *attached, int *ret_fd,
                              struct cox_region *ret_own, struct cox_region *ret_hints,
                              struct cox_error *err)
{
    const struct cox_attach_place *place = &attached->place;
    char object[COX_OBJECT_NAME_SIZE];
    (void)ret_own;
    (void)ret_hints;
    if (attached->mode->limits.rank_group == COX_ATTACH_NO_RANK_GROUP)
        return 0;
    if (place->fd_count) {
        *ret_fd = cox_steal_fd(&place->bundle->fds[COX_FD_BUNDLE_GROUP]);
        return 0;
    }
    return cox_region_open(cox_name_group(object, place->objects), COX_REGION_WRITE, ret_fd, err);
}

int cox_named_open_recorder(struct cox_attached *attached, int *ret_fd, int *ret_opened_fd,
                            struct cox_error *err)
{
    const struct cox_attach_place *place = &attached->place;
    char object[COX_OBJECT_NAME_SIZE];
    if (place->fd_count) {
        *ret_fd = place->bundle->fds[COX_FD_BUNDLE_CONTROL];
        return 0;
    }
    const int r = cox_region_open(cox_name_control(object, place->objects), COX_REGION_WRITE,
                                  ret_opened_fd, err);
    if (r == 0)
        *ret_fd = *ret_opened_fd;
    return r;
}

const struct cox_attach_mode cox_attach_named = {
    .name = "named",
    .attach = COX_ATTACH_NAMED,
    .wakeup_name = "semaphore",
    .fd_count = COX_FD_BUNDLE_COUNT,
    .limits =
        {
            .depth_default = COX_DEPTH_DEFAULT,
            .rank_group = COX_ATTACH_WINDOWS,
            .coordinator_words = true,
            .rank_words = true,
            .extensions = true,
            .replaces_one = true,
        },
    .check = cox_named_check,
    .create = cox_named_create,
    .join = cox_named_join,
    .join_channel = cox_named_join_channel,
    COX_NAMED_FUNCTIONS,
};
