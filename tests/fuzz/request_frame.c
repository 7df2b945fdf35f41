/* A frame and its record of any bytes, read by every rank: refused, or inside the region. */
#include "fuzz.h"

#include "channel/shm/request.h"
#include "memory.h"

/* Bytes: ranks, depth, channel, sequence (8), the record (32), then the frame with its length. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input input = {data, size};
    uint8_t ranks = fuzz_eat_byte(&input), depth = fuzz_eat_byte(&input);
    const struct cox_channel *channel =
        memory_channel(ranks, depth, false, (enum cox_channel_id)(fuzz_eat_byte(&input) % 4));
    const struct cox_geometry *geometry = &channel->control->geometry;
    const struct cox_layout_channel *sizes = &geometry->channels[channel->id];
    uint64_t sequence;
    fuzz_eat(&input, &sequence, sizeof sequence);
    struct cox_layout_channel_state *shared = &channel->control->layout->channels[channel->id];
    struct cox_layout_frame *record = &shared->frames[sequence % geometry->depth];
    fuzz_eat(&input, record, sizeof *record);
    uint8_t *frame =
        (uint8_t *)channel->request.base + sizes->frame_size * (sequence % geometry->depth);
    fuzz_eat(&input, frame, sizes->frame_size);
    size_t capacity;
    FUZZ_CHECK(cox_request_frame(channel, sequence, &capacity) == frame + COX_PREFIX_SIZE);
    FUZZ_CHECK(capacity + COX_PREFIX_SIZE == sizes->frame_size);
    uint32_t lowest_count = 0;
    for (uint32_t rank = 0; rank < geometry->rank_count; rank++) {
        struct cox_request request = {.sequence = UINT64_MAX};
        int r = cox_request_read(channel, sequence, rank, &request);
        if (r) {
            FUZZ_CHECK(r == COX_EMPTY || r == COX_CORRUPT);
            /* What is impossible has its record all the same, so that it can be replied to or not.
             */
            FUZZ_CHECK(request.sequence == (r == COX_CORRUPT ? sequence : UINT64_MAX));
            FUZZ_CHECK(!request.bytes && request.size == 0);
            continue;
        }
        FUZZ_CHECK(request.sequence == sequence && atomic_load(&record->sequence) == sequence);
        FUZZ_CHECK(request.size == atomic_load(&record->length));
        FUZZ_CHECK(request.bytes == frame + COX_PREFIX_SIZE && request.size <= capacity);
        fuzz_touch(request.bytes, request.size);
        lowest_count += request.lowest;
    }
    FUZZ_CHECK(lowest_count <= 1);
    return 0;
}
