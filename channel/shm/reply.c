#include "reply.h"

#include "channel/base/fault.h"
#include "channel/base/idioms.h"
#include "state.h"

#include <endian.h>
#include <inttypes.h>
#include <string.h>

COX_HOT static uint8_t *reply_base(const struct cox_channel *channel, uint32_t rank,
                                   uint64_t sequence)
{
    const struct cox_control *control = channel->control;
    /* Without a response region, slots are in the memory of their ranks. */
    void *base = channel->response.base ? channel->response.base : (void *)control->ranks[rank];
    return (uint8_t *)base +
           cox_geometry_slot_offset(&control->geometry, channel->id, rank, sequence);
}

COX_HOT uint8_t *cox_reply_slot(const struct cox_channel *channel, uint32_t rank, uint64_t sequence,
                                bool whole, size_t *ret_capacity)
{
    *ret_capacity = cox_geometry_slot_capacity(&channel->control->geometry, channel->id, whole);
    return reply_base(channel, rank, sequence) + COX_PREFIX_SIZE;
}

uint8_t *cox_reply_report(const struct cox_channel *channel, uint32_t rank, size_t *ret_capacity)
{
    const struct cox_geometry *geometry = &channel->control->geometry;
    *ret_capacity = geometry->channels[COX_CHANNEL_ERROR].slot_stride - COX_PREFIX_SIZE;
    return reply_base(channel, geometry->mode->limits.memory_per_rank ? rank : 0, 0);
}

COX_HOT void cox_reply_commit(const struct cox_channel *channel, uint32_t rank, uint64_t sequence,
                              size_t length, bool failed)
{
    uint32_t prefix = htole32((uint32_t)length);
    memcpy(reply_base(channel, rank, sequence), &prefix, sizeof prefix);
    cox_fault_point(COX_FAULT_REPLY_WRITTEN);
    cox_state_set_tag(cox_state_line(channel->control, rank, channel->id),
                      channel->control->geometry.depth, sequence, failed);
}

/* A separate function, so that the usual path saves no registers for it. */
__attribute__((cold, noinline)) static int reply_refuse(const struct cox_channel *channel,
                                                        uint32_t rank, uint64_t sequence,
                                                        uint32_t incarnation, struct cox_error *err)
{
    const struct cox_control *control = channel->control;
    const struct cox_layout_rank_line *line = cox_state_line(control, rank, channel->id);
    uint64_t tag = cox_state_tag(line, control->geometry.depth, sequence) & ~COX_TAG_FAILED;
    if (tag != sequence)
        return cox_fail(err, COX_CORRUPT,
                        "rank %" PRIu32 " replied with sequence %" PRIu64 ", expected %" PRIu64,
                        rank, tag, sequence);
    return cox_fail(err, COX_CORRUPT,
                    "rank %" PRIu32 " replied as incarnation %" PRIu32 " of group %" PRIx32
                    ", expected %" PRIu32 " of %" PRIx32,
                    rank, cox_state_line_incarnation(line), cox_state_line_group_incarnation(line),
                    incarnation, control->group_incarnation);
}

__attribute__((cold, noinline)) static int reply_refuse_length(uint32_t rank, size_t length,
                                                               size_t capacity, size_t buffer_size,
                                                               struct cox_error *err)
{
    if (length > capacity)
        return cox_fail(err, COX_CORRUPT,
                        "rank %" PRIu32 " replied with a length of %zu bytes, its slot holds %zu",
                        rank, length, capacity);
    return cox_fail(err, COX_TOO_LARGE,
                    "rank %" PRIu32 " replied with %zu bytes, there is room for %zu", rank, length,
                    buffer_size);
}

COX_HOT int cox_reply_fetch(const struct cox_channel *channel, uint32_t rank, uint64_t sequence,
                            bool whole, uint32_t incarnation, void *buffer, size_t buffer_size,
                            size_t *ret_length, bool *ret_failed, struct cox_error *err)
{
    const struct cox_control *control = channel->control;
    const struct cox_layout_rank_line *line = cox_state_line(control, rank, channel->id);
    const uint64_t tag = cox_state_tag(line, control->geometry.depth, sequence);
    if ((tag & ~COX_TAG_FAILED) != sequence ||
        cox_state_line_group_incarnation(line) != control->group_incarnation ||
        cox_state_line_incarnation(line) != incarnation)
        return reply_refuse(channel, rank, sequence, incarnation, err);
    const uint8_t *base = reply_base(channel, rank, sequence);
    uint32_t prefix;
    memcpy(&prefix, base, sizeof prefix);
    const size_t length = le32toh(prefix);
    const size_t capacity = cox_geometry_slot_capacity(&control->geometry, channel->id, whole);
    if (length > capacity || length > buffer_size)
        return reply_refuse_length(rank, length, capacity, buffer_size, err);
    memcpy(buffer, base + COX_PREFIX_SIZE, length);
    *ret_length = length;
    *ret_failed = tag & COX_TAG_FAILED;
    return 0;
}

void cox_reply_erase(const struct cox_channel *channel, uint32_t rank, uint64_t sequence)
{
    memset(reply_base(channel, rank, sequence), 0, COX_PREFIX_SIZE);
}

bool cox_reply_is_written(const struct cox_channel *channel, uint32_t rank, uint64_t sequence)
{
    uint32_t prefix;
    memcpy(&prefix, reply_base(channel, rank, sequence), sizeof prefix);
    return prefix != 0; /* no message of a legacy rank is empty */
}
