#include "request.h"

#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "state.h"

#include <endian.h>
#include <string.h>

COX_HOT static uint8_t *request_base(const struct cox_channel *channel, uint64_t sequence)
{
    const struct cox_geometry *geometry = &channel->control->geometry;
    return (uint8_t *)channel->request.base + geometry->channels[channel->id].frame_size *
                                                  cox_geometry_frame(sequence, geometry->depth);
}

COX_HOT uint8_t *cox_request_frame(const struct cox_channel *channel, uint64_t sequence,
                                   size_t *ret_capacity)
{
    *ret_capacity = channel->control->geometry.channels[channel->id].frame_size - COX_PREFIX_SIZE;
    return request_base(channel, sequence) + COX_PREFIX_SIZE;
}

COX_HOT void cox_request_publish(const struct cox_channel *channel, uint64_t sequence,
                                 uint32_t type, size_t length, const struct cox_rank_set *asked)
{
    const struct cox_geometry *geometry = &channel->control->geometry;
    COX_ASSERT(length <= geometry->channels[channel->id].frame_size - COX_PREFIX_SIZE);
    uint32_t prefix = htole32((uint32_t)length);
    memcpy(request_base(channel, sequence), &prefix, sizeof prefix);
    cox_fault_point(COX_FAULT_REQUEST_WRITTEN);
    const struct cox_frame_record record = {
        .sequence = sequence,
        .type = type,
        .length = (uint32_t)length,
        .asked = *asked,
    };
    cox_state_publish(cox_state_channel(channel->control, channel->id), geometry->depth, &record);
}

COX_HOT int cox_request_read(const struct cox_channel *channel, uint64_t sequence, uint32_t rank,
                             struct cox_request *ret_request)
{
    const struct cox_geometry *geometry = &channel->control->geometry;
    struct cox_frame_record record;
    if (!cox_state_read_frame(cox_state_channel(channel->control, channel->id), geometry->depth,
                              sequence, &record) ||
        !cox_rank_set_has(&record.asked, rank))
        return COX_EMPTY;
    uint32_t prefix;
    memcpy(&prefix, request_base(channel, sequence), sizeof prefix);
    prefix = le32toh(prefix);
    bool possible = prefix <= geometry->channels[channel->id].frame_size - COX_PREFIX_SIZE &&
                    prefix == record.length;
    bool lowest = true;
    for (uint32_t word = 0; word <= rank / 64; word++) {
        const uint64_t below = word < rank / 64 ? UINT64_MAX : (UINT64_C(1) << rank % 64) - 1;
        lowest &= (record.asked.words[word] & below) == 0;
    }
    *ret_request = (struct cox_request){
        .sequence = sequence,
        .type = record.type,
        .lowest = lowest,
        .bytes = possible ? request_base(channel, sequence) + COX_PREFIX_SIZE : NULL,
        .size = possible ? prefix : 0,
    };
    return possible ? 0 : COX_CORRUPT;
}
