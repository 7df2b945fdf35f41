/* A reply slot and its line of any bytes: refused, or copied whole into the buffer. */
#include "fuzz.h"

#include "channel/shm/reply.h"
#include "memory.h"

enum { LEGACY = 1, WHOLE = 2, OWN_GROUP_INCARNATION = 8 };

/* Bytes: ranks, depth, channel, rank, flags, sequence (8), incarnation (4), size of the buffer (4),
 * the line (128), then the slot with its length. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz_input input = {data, size};
    uint8_t ranks = fuzz_eat_byte(&input), depth = fuzz_eat_byte(&input);
    enum cox_channel_id id = (enum cox_channel_id)(fuzz_eat_byte(&input) % COX_TWO_WAY_COUNT);
    uint8_t rank_byte = fuzz_eat_byte(&input), flags = fuzz_eat_byte(&input);
    bool legacy = flags & LEGACY;
    const struct cox_channel *channel = memory_channel(ranks, depth, legacy, id);
    const struct cox_geometry *geometry = &channel->control->geometry;
    uint32_t rank = rank_byte % geometry->rank_count;
    bool whole = legacy && rank == 0 && (flags & WHOLE);
    uint64_t sequence;
    uint32_t incarnation, buffer_size;
    fuzz_eat(&input, &sequence, sizeof sequence);
    fuzz_eat(&input, &incarnation, sizeof incarnation);
    fuzz_eat(&input, &buffer_size, sizeof buffer_size);
    struct cox_layout_rank_line *line = &channel->control->layout->ranks[rank].lines[id];
    fuzz_eat(&input, line, sizeof *line);
    if (flags & OWN_GROUP_INCARNATION)
        atomic_store(&line->group_incarnation, MEMORY_GROUP_INCARNATION);
    size_t capacity;
    uint8_t *slot = cox_reply_slot(channel, rank, sequence, whole, &capacity);
    uint64_t offset = (uint64_t)(slot - (uint8_t *)channel->response.base);
    FUZZ_CHECK(offset >= COX_PREFIX_SIZE && offset <= channel->response.size &&
               capacity <= channel->response.size - offset);
    fuzz_eat(&input, slot - COX_PREFIX_SIZE, COX_PREFIX_SIZE + (capacity < 1024 ? capacity : 1024));
    /* Also more than a slot holds: then the slot is the limit. */
    buffer_size %= (uint32_t)capacity + 256;
    uint8_t *buffer = malloc(buffer_size ? buffer_size : 1);
    FUZZ_CHECK(buffer);
    size_t length = SIZE_MAX;
    bool failed = false;
    struct cox_error err = {0};
    int r = cox_reply_fetch(channel, rank, sequence, whole, incarnation, buffer, buffer_size,
                            &length, &failed, &err);
    if (r) {
        fuzz_check_error(r, &err);
        FUZZ_CHECK(r == COX_CORRUPT || r == COX_TOO_LARGE);
        FUZZ_CHECK(length == SIZE_MAX && !failed);
    } else {
        FUZZ_CHECK(length <= buffer_size && length <= capacity);
        FUZZ_CHECK(memcmp(buffer, slot, length) == 0);
        uint64_t tag = atomic_load(&line->tags[sequence % geometry->depth]);
        FUZZ_CHECK((tag | UINT64_C(1) << 63) == (sequence | UINT64_C(1) << 63));
        FUZZ_CHECK(atomic_load(&line->group_incarnation) == MEMORY_GROUP_INCARNATION);
        FUZZ_CHECK(atomic_load(&line->incarnation) == incarnation);
    }
    free(buffer);
    return 0;
}
