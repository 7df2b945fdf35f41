#include "channel.h"

#include "channel/base/fault.h"
#include "region.h"
#include "sealed.h"

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
    made.gate.credits = cox_channel_has_credits(&made);
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
        r = cox_gate_attach_semaphores(&made.gate, name, id, rank, err);
    if (r) {
        cox_channel_close(&made);
        return r;
    }
    made.gate.credits = cox_channel_has_credits(&made);
    *channel = made;
    return 0;
}

void cox_channel_bind(struct cox_channel *channel, const struct cox_sealed *sealed,
                      const struct cox_control *control, enum cox_channel_id id, bool coordinator)
{
    const struct cox_geometry *geometry = &control->geometry;
    *channel = (struct cox_channel){.id = id, .control = control};
    if (geometry->channels[id].request_size)
        channel->request = (struct cox_region){
            .base = (uint8_t *)control->region.base + cox_geometry_request_offset(geometry, id),
            .size = geometry->channels[id].request_size,
        };
    cox_gate_bind(&channel->gate,
                  id == COX_CHANNEL_ERROR ? NULL : &cox_sealed_wake(sealed, id)->ranks_wakeup,
                  cox_sealed_wake(sealed, id), geometry->depth, coordinator);
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

void cox_channel_close(struct cox_channel *channel)
{
    cox_gate_close(&channel->gate);
    if (channel->control && channel->control->geometry.mode->limits.memory_per_rank)
        channel->request = (struct cox_region){0}; /* it is the control's */
    cox_region_detach(&channel->request);
    cox_region_detach(&channel->response);
}
