#include "named_channel.h"

#include "channel/base/base_internal.h"
#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "channel/shm/region.h"
#include "semaphore_gate.h"

#include <fcntl.h>
#include <stdio.h>

/* Fault reports wait for the token that stands for their slot; so do ranks that read no words. */
static bool has_credits(const struct cox_channel *channel)
{
    return !channel->control->geometry.mode->limits.rank_words || channel->id == COX_CHANNEL_ERROR;
}

int cox_channel_create(struct cox_channel *channel, const char *name,
                       const struct cox_control *control, enum cox_channel_id id,
                       struct cox_error *err)
{
    const struct cox_layout_channel *sizes = &control->geometry.channels[id];
    struct cox_channel made = {.id = id, .control = control};
    char request[COX_OBJECT_NAME_SIZE], response[COX_OBJECT_NAME_SIZE];
    cox_name_request(request, name, id);
    cox_name_response(response, name, id);
    int r = 0;
    if (sizes->request_size)
        r = cox_region_create(&made.request, request, sizes->request_size, err);
    if (r)
        return r;
    r = cox_region_create(&made.response, response, sizes->response_size, err);
    if (r)
        goto unlink_request;
    r = cox_gate_create_semaphores(&made.gate, name, id, &control->geometry, err);
    if (r)
        goto unlink_response;
    made.gate.credits = has_credits(&made);
    cox_fault_point(COX_FAULT_CHANNEL_CREATED);
    *channel = made;
    return 0;

unlink_response:
    cox_region_unlink(response);
unlink_request:
    if (sizes->request_size)
        cox_region_unlink(request);
    cox_channel_close(&made);
    return r;
}

int cox_channel_attach(struct cox_channel *channel, const char *name,
                       const struct cox_control *control, enum cox_channel_id id, uint32_t rank,
                       struct cox_error *err)
{
    const struct cox_layout_channel *sizes = &control->geometry.channels[id];
    struct cox_channel made = {.id = id, .control = control};
    char object[COX_OBJECT_NAME_SIZE];
    int r = 0;
    if (sizes->request_size)
        r = cox_region_attach(&made.request, cox_name_request(object, name, id),
                              sizes->request_size, COX_REGION_READ, err);
    if (r == 0)
        r = cox_region_attach(&made.response, cox_name_response(object, name, id),
                              sizes->response_size, COX_REGION_WRITE, err);
    if (r == 0)
        r = cox_gate_attach_semaphores(&made.gate, name, NULL, id, rank, err);
    if (r) {
        cox_channel_close(&made);
        return r;
    }
    made.gate.credits = has_credits(&made);
    *channel = made;
    return 0;
}

int cox_channel_renew_regions(struct cox_channel *channel, const char *name, struct cox_error *err)
{
    char object[COX_OBJECT_NAME_SIZE];
    int r = 0;
    if (channel->request.base)
        r = cox_region_renew(&channel->request, cox_name_request(object, name, channel->id), err);
    if (r == 0)
        r = cox_region_renew(&channel->response, cox_name_response(object, name, channel->id), err);
    return r;
}

/* ---- by fds ---- */

/* file: the prefix of the name in /dev/shm, "" or "sem.". */
static int bundle_open_one(int *fd, const char *file, const char *object, int flags,
                           struct cox_error *err)
{
    char path[COX_OBJECT_NAME_SIZE + 32];
    snprintf(path, sizeof path, "/dev/shm/%s%s", file, object + 1);
    *fd = open(path, flags | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    int r = *fd < 0 ? -errno : cox_fd_raise(fd);
    return r ? cox_fail(err, r, "%s: %s", path, cox_status_text(r)) : 0;
}

int cox_fd_bundle_open(struct cox_fd_bundle *bundle, const char *name,
                       const struct cox_geometry *geometry, struct cox_error *err)
{
    char object[COX_OBJECT_NAME_SIZE];
    cox_fd_bundle_init(bundle);
    int r = bundle_open_one(&bundle->fds[COX_FD_BUNDLE_CONTROL], "", cox_name_control(object, name),
                            O_RDWR, err);
    for (int c = 0; r == 0 && c < COX_CHANNEL_COUNT; c++) {
        enum cox_channel_id channel = (enum cox_channel_id)c;
        if (geometry->channels[c].request_size)
            r = bundle_open_one(&bundle->fds[cox_fd_bundle_request(channel)], "",
                                cox_name_request(object, name, channel), O_RDONLY, err);
        if (r == 0)
            r = bundle_open_one(&bundle->fds[cox_fd_bundle_response(channel)], "",
                                cox_name_response(object, name, channel), O_RDWR, err);
    }
    for (int b = 0; r == 0 && b < COX_WAKEUP_COUNT; b++) {
        enum cox_wakeup wakeup = (enum cox_wakeup)b;
        if (cox_wakeup_exists(COX_CHANNEL_ERROR, wakeup))
            r = bundle_open_one(&bundle->fds[cox_fd_bundle_wakeup(COX_CHANNEL_ERROR, wakeup)],
                                "sem.", cox_name_wakeup(object, name, COX_CHANNEL_ERROR, wakeup, 0),
                                O_RDWR, err);
    }
    if (r == 0)
        r = bundle_open_one(&bundle->fds[COX_FD_BUNDLE_GROUP], "", cox_name_group(object, name),
                            O_RDWR, err);
    bundle->count = COX_FD_BUNDLE_COUNT;
    if (r)
        cox_fd_bundle_close(bundle);
    return r;
}

int cox_fd_bundle_attach(const struct cox_fd_bundle *bundle, struct cox_channel *channel,
                         const struct cox_control *control, enum cox_channel_id id, uint32_t rank,
                         struct cox_error *err)
{
    const struct cox_layout_channel *sizes = &control->geometry.channels[id];
    struct cox_channel made = {.id = id, .control = control};
    int wakeups[COX_WAKEUP_COUNT], r = 0;
    for (int b = 0; b < COX_WAKEUP_COUNT; b++)
        wakeups[b] = cox_wakeup_exists(id, (enum cox_wakeup)b)
                         ? bundle->fds[cox_fd_bundle_wakeup(id, (enum cox_wakeup)b)]
                         : -1;
    if (sizes->request_size)
        r = cox_region_attach_fd(&made.request, bundle->fds[cox_fd_bundle_request(id)],
                                 cox_channel_name(id), sizes->request_size, COX_REGION_READ, err);
    if (r == 0)
        r = cox_region_attach_fd(&made.response, bundle->fds[cox_fd_bundle_response(id)],
                                 cox_channel_name(id), sizes->response_size, COX_REGION_WRITE, err);
    if (r == 0)
        r = cox_gate_attach_semaphores(&made.gate, NULL, wakeups, id, rank, err);
    if (r) {
        cox_channel_close(&made);
        return r;
    }
    made.gate.credits = has_credits(&made);
    *channel = made;
    return 0;
}
