/* mode: what sealed.h has, as a struct cox_attach_mode. */
#include "channel/attach/named/named.h"
#include "channel/attach/named/names.h"
#include "channel/base/base_internal.h"
#include "channel/base/idioms.h"
#include "channel/shm/fd_bundle.h"
#include "sealed.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct sealed_group {
    struct cox_attach_group base;
    struct cox_sealed sealed;
};

static void sealed_account(const struct cox_geometry *geometry,
                           struct cox_attach_account *ret_account)
{
    const uint64_t request = cox_geometry_request_memory_size(geometry);
    const uint64_t rank = cox_geometry_rank_object_size(geometry);
    const uint64_t wake = cox_geometry_wake_memory_size(geometry);
    const uint64_t larger = request > rank ? request : rank;
    *ret_account = (struct cox_attach_account){
        .region_bytes = request +
                        geometry->rank_count * (rank + cox_geometry_group_words_size() +
                                                cox_geometry_group_payload_size()) +
                        wake,
        .region_size_max = wake > larger ? wake : larger,
    };
}

static struct sealed_group *sealed_of(struct cox_attach_group *group)
{
    return (struct sealed_group *)group;
}

/* ---- create, unlink, free ---- */

static int sealed_create(const struct cox_attach_request *request,
                         struct cox_attach_group **ret_group, struct cox_error *err)
{
    /* A name belongs to one group, named or sealed; and a dead one of the other kind may have left
     * memory in /dev/shm, which this one may not even need. */
    struct cox_error why = {0};
    int r = cox_control_clear(request->name, request->geometry, &why);
    if (r == COX_TAKEN || r < 0)
        return cox_fail(err, r, "%s", why.text);
    r = cox_control_check_space(request->geometry, err);
    if (r)
        return r;
    struct sealed_group *group = calloc(1, sizeof *group);
    if (!group)
        return cox_fail(err, -ENOMEM, "no memory for the group's memfds");
    r = cox_sealed_create(&group->sealed, request->control, request->geometry, request->huge_pages,
                          err);
    if (r) {
        free(group);
        return r;
    }
    for (int c = 0; c < COX_CHANNEL_COUNT; c++)
        cox_channel_bind(&request->channels[c], &group->sealed, request->control,
                         (enum cox_channel_id)c, true);
    group->base = (struct cox_attach_group){
        .mode = &cox_attach_sealed,
        .request = *request,
        .rank_group_fd = -1,
        .rank_group_hints = (uint8_t *)group->sealed.wake.base + cox_geometry_group_hints_offset(),
    };
    *ret_group = &group->base;
    return 0;
}

static struct cox_attach_group *sealed_free(struct cox_attach_group *group)
{
    cox_sealed_close(&sealed_of(group)->sealed);
    free(group);
    return NULL;
}

/* ---- what a process gets ---- */

/* The coordinator's mapping of the rank's memory becomes read-only, before the rank's process gets
 * it; from then on it has one writer. The next renew makes it writable again. */
static int sealed_give(struct cox_attach_group *group, uint32_t rank, struct cox_error *err)
{
    const int r = cox_region_protect(&sealed_of(group)->sealed.ranks[rank]);
    return r ? cox_fail(err, r, "memory of rank %" PRIu32 ": %s", rank, cox_status_text(r)) : 0;
}

static int sealed_lend(struct cox_attach_group *group, uint32_t rank, int *ret_fds,
                       uint32_t *ret_count, struct cox_error *err)
{
    cox_sealed_hand_out(&sealed_of(group)->sealed, rank, ret_fds);
    *ret_count = COX_SEALED_FD_COUNT;
    return sealed_give(group, rank, err);
}

/* The memory that it writes in the rank group is passed to the others once it is sealed, and kept
 * for that. By then these fd numbers may have been reused. */
static int group_dup(struct cox_attach_fds *fds, uint32_t rank, struct cox_error *err)
{
    for (int i = COX_SEALED_GROUP; i < COX_SEALED_FD_COUNT; i++) {
        const int fd = fcntl(fds->fds[i], F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
        fds->fds[i] = fd;
        if (fd < 0)
            return cox_fail(err, -errno, "rank %" PRIu32 ": an fd of its memory: %s", rank,
                            cox_status_text(-errno));
        fds->given |= UINT64_C(1) << i;
    }
    return 0;
}

/* Its own memory is given away, so that no process keeps an fd of memory that another one writes
 * (this process's fds are in /proc for every process of the user). Memory that was given to a
 * process that did not attach is not given again. */
static int sealed_hand_out(struct cox_attach_group *group, uint32_t rank,
                           struct cox_attach_fds *fds, bool *ret_renewed, struct cox_error *err)
{
    struct cox_sealed *sealed = &sealed_of(group)->sealed;
    *ret_renewed = sealed->rank_fds[rank] < 0;
    int r = *ret_renewed ? cox_sealed_renew_rank(sealed, group->request.geometry, rank, err) : 0;
    if (r)
        return r;
    cox_sealed_hand_out(sealed, rank, fds->fds);
    fds->count = COX_SEALED_FD_COUNT;
    fds->given = UINT64_C(1) << COX_SEALED_RANK;
    sealed->rank_fds[rank] = -1;
    return group_dup(fds, rank, err);
}

static void sealed_put_away(struct cox_attach_group *group, uint32_t rank, bool lent)
{
    if (lent)
        cox_close_fd(&sealed_of(group)->sealed.rank_fds[rank]);
}

/* ---- the next process of a rank ---- */

static int sealed_renew_rank(struct cox_attach_group *group, uint32_t rank, struct cox_error *err)
{
    return cox_sealed_renew_rank(&sealed_of(group)->sealed, group->request.geometry, rank, err);
}

static int *sealed_member_fds(struct cox_attach_group *group, uint32_t rank)
{
    return sealed_of(group)->sealed.group_fds[rank];
}

/* ---- a rank's ---- */

struct sealed_rank {
    struct cox_attached base;
    struct cox_sealed sealed;
};

static int sealed_join(const struct cox_attach_place *place, struct cox_attached **ret_attached,
                       struct cox_error *err)
{
    struct sealed_rank *rank = calloc(1, sizeof *rank);
    if (!rank)
        return cox_fail(err, -ENOMEM, "no memory for the group's memfds");
    const int r =
        cox_sealed_attach(&rank->sealed, place->control, place->rank, place->bundle->fds, err);
    if (r) {
        free(rank);
        return r;
    }
    rank->base = (struct cox_attached){.mode = &cox_attach_sealed, .place = *place};
    *ret_attached = &rank->base;
    return 0;
}

static struct cox_attached *sealed_leave(struct cox_attached *attached)
{
    cox_sealed_close(&((struct sealed_rank *)attached)->sealed);
    free(attached);
    return NULL;
}

static int sealed_join_channel(struct cox_attached *attached, struct cox_channel *channel,
                               enum cox_channel_id id, struct cox_error *err)
{
    (void)err;
    cox_channel_bind(channel, &((struct sealed_rank *)attached)->sealed, attached->place.control,
                     id, false);
    return 0;
}

static int sealed_join_rank_group(struct cox_attached *attached, int *ret_fd,
                                  struct cox_region *ret_own, struct cox_region *ret_hints,
                                  struct cox_error *err)
{
    struct cox_sealed *sealed = &((struct sealed_rank *)attached)->sealed;
    (void)ret_fd;
    (void)err;
    memcpy(ret_own, sealed->group, sizeof sealed->group);
    *ret_hints = sealed->group_hints;
    memset(sealed->group, 0, sizeof sealed->group);
    sealed->group_hints = (struct cox_region){0};
    return 0;
}

static int sealed_open_recorder(struct cox_attached *attached, int *ret_fd, int *ret_opened_fd,
                                struct cox_error *err)
{
    (void)ret_opened_fd;
    (void)err;
    *ret_fd = attached->place.bundle->fds[COX_SEALED_RANK];
    return 0;
}

const struct cox_attach_mode cox_attach_sealed = {
    .name = "sealed",
    .attach = COX_ATTACH_SEALED,
    .wakeup_name = "futex",
    .layout_flags = COX_LAYOUT_SEALED,
    .fd_count = COX_SEALED_FD_COUNT,
    .limits =
        {
            .depth_default = COX_DEPTH_DEFAULT,
            .rank_group = COX_ATTACH_MEMBER_OWNED,
            .coordinator_words = true,
            .rank_words = true,
            .extensions = true,
            .replaces_one = true,
            .memory_per_rank = true,
            .guards_commands = true,
        },
    .check = cox_named_check,
    .account = sealed_account,
    .create = sealed_create,
    .free = sealed_free,
    .lend = sealed_lend,
    .hand_out = sealed_hand_out,
    .give = sealed_give,
    .put_away = sealed_put_away,
    .renew_rank = sealed_renew_rank,
    .member_fds = sealed_member_fds,
    .join = sealed_join,
    .leave = sealed_leave,
    .join_channel = sealed_join_channel,
    .join_rank_group = sealed_join_rank_group,
    .open_recorder = sealed_open_recorder,
};
