#include "frame.h"

#include "channel/base/base_internal.h"

#include <inttypes.h>
#include <string.h>

#define MAGIC 0x314e5843u /* "CXN1" */
#define INCARNATION_AT 24
#define ANSWER_HEAD_SIZE 8
#define REPLY_HEAD_SIZE 12
#define MIB ((size_t)1 << 20)
/* As large as the requests and replies of the group are; see the budget of direct.h. */
#define AS_LARGE_AS_IT_IS UINT32_MAX

const char *cox_frame_kind_name(enum cox_frame_kind kind)
{
    static const char *const names[COX_FRAME_KIND_COUNT] = {
        [COX_FRAME_SEEK] = "SEEK",
        [COX_FRAME_WELCOME] = "WELCOME",
        [COX_FRAME_REQUEST] = "REQUEST",
        [COX_FRAME_LEAD_BEAT] = "LEAD_BEAT",
        [COX_FRAME_HELLO] = "HELLO",
        [COX_FRAME_ANSWER] = "ANSWER",
        [COX_FRAME_TEXT] = "TEXT",
        [COX_FRAME_AGENT_BEAT] = "AGENT_BEAT",
        [COX_FRAME_REQUEST_ALL] = "REQUEST_ALL",
        [COX_FRAME_RECORDER_ASK] = "RECORDER_ASK",
        [COX_FRAME_RECORDER] = "RECORDER",
        [COX_FRAME_STACKS_ASK] = "STACKS_ASK",
        [COX_FRAME_STACKS] = "STACKS",
    };
    return (unsigned)kind < COX_FRAME_KIND_COUNT && names[kind] ? names[kind] : "unknown";
}

size_t cox_frame_size_max(enum cox_frame_kind kind)
{
    static const size_t sizes[COX_FRAME_KIND_COUNT] = {
        [COX_FRAME_SEEK] = 0,
        [COX_FRAME_WELCOME] = MIB,
        [COX_FRAME_REQUEST] = AS_LARGE_AS_IT_IS,
        [COX_FRAME_LEAD_BEAT] = MIB,
        [COX_FRAME_HELLO] = MIB,
        [COX_FRAME_ANSWER] = AS_LARGE_AS_IT_IS,
        [COX_FRAME_AGENT_BEAT] = MIB,
        [COX_FRAME_TEXT] = MIB,
        [COX_FRAME_REQUEST_ALL] = AS_LARGE_AS_IT_IS,
        [COX_FRAME_RECORDER_ASK] = 0,
        [COX_FRAME_RECORDER] = MIB,
        [COX_FRAME_STACKS_ASK] = 0,
        [COX_FRAME_STACKS] = COX_FRAME_STACKS_MAX,
    };
    return sizes[kind];
}

bool cox_frame_is_passed_on(const struct cox_frame *frame)
{
    return frame->kind == COX_FRAME_REQUEST && frame->type == COX_TYPE_OPAQUE &&
           frame->channel == COX_CHANNEL_EXECUTE;
}

void cox_frame_pack_head(const struct cox_frame *frame, uint8_t head[COX_FRAME_HEAD_SIZE])
{
    memset(head, 0, COX_FRAME_HEAD_SIZE);
    cox_le32_put(head, MAGIC);
    head[4] = (uint8_t)frame->kind;
    head[5] = (uint8_t)frame->channel;
    cox_le32_put(head + 8, frame->type);
    cox_le32_put(head + 12, (uint32_t)frame->size);
    cox_le64_put(head + 16, frame->epoch);
    cox_le64_put(head + INCARNATION_AT, frame->incarnation);
    cox_le64_put(head + 32, frame->sequence);
    cox_le64_put(head + 40, frame->previous);
    cox_le64_put(head + 48, frame->deadline_ns);
    cox_le64_put(head + 56, frame->sent_ns);
    cox_le64_put(head + 64, frame->asked.words[0]);
    cox_le64_put(head + 72, frame->asked.words[1]);
    cox_le64_put(head + 80, frame->void_through);
    cox_le64_put(head + 88, frame->gone);
}

int cox_frame_check(const uint8_t *bytes, size_t size, struct cox_error *err)
{
    if (size < COX_FRAME_HEAD_SIZE)
        return cox_fail(err, COX_CORRUPT, "a frame of %zu bytes: its head has %d", size,
                        COX_FRAME_HEAD_SIZE);
    if (cox_le32_get(bytes) != MAGIC)
        return cox_fail(err, COX_CORRUPT, "a frame begins with %08" PRIx32 ", expected %08x",
                        cox_le32_get(bytes), MAGIC);
    if (bytes[4] == 0 || bytes[4] >= COX_FRAME_KIND_COUNT)
        return cox_fail(err, COX_CORRUPT, "a frame of kind %u", bytes[4]);
    if (bytes[5] >= COX_TWO_WAY_COUNT)
        return cox_fail(err, COX_CORRUPT, "a frame of channel %u", bytes[5]);
    if (cox_le32_get(bytes + 12) != size - COX_FRAME_HEAD_SIZE)
        return cox_fail(err, COX_CORRUPT, "a frame of %zu bytes says that its payload has %" PRIu32,
                        size, cox_le32_get(bytes + 12));
    if (size - COX_FRAME_HEAD_SIZE > cox_frame_size_max((enum cox_frame_kind)bytes[4]))
        return cox_fail(err, COX_CORRUPT, "a %s of %zu bytes: at most %zu are taken",
                        cox_frame_kind_name((enum cox_frame_kind)bytes[4]),
                        size - COX_FRAME_HEAD_SIZE,
                        cox_frame_size_max((enum cox_frame_kind)bytes[4]));
    return 0;
}

int cox_frame_unpack(const uint8_t *bytes, size_t size, struct cox_frame *ret_frame,
                     struct cox_error *err)
{
    int r = cox_frame_check(bytes, size, err);
    if (r)
        return r;
    *ret_frame = (struct cox_frame){
        .kind = (enum cox_frame_kind)bytes[4],
        .channel = bytes[5],
        .type = cox_le32_get(bytes + 8),
        .epoch = cox_le64_get(bytes + 16),
        .incarnation = cox_le64_get(bytes + INCARNATION_AT),
        .sequence = cox_le64_get(bytes + 32),
        .previous = cox_le64_get(bytes + 40),
        .deadline_ns = cox_le64_get(bytes + 48),
        .sent_ns = cox_le64_get(bytes + 56),
        .asked = {{cox_le64_get(bytes + 64), cox_le64_get(bytes + 72)}},
        .void_through = cox_le64_get(bytes + 80),
        .gone = cox_le64_get(bytes + 88),
        .payload = bytes + COX_FRAME_HEAD_SIZE,
        .size = size - COX_FRAME_HEAD_SIZE,
    };
    return 0;
}

bool cox_frame_same_for_all(const uint8_t *bytes, const uint8_t *other, size_t size)
{
    const size_t before = INCARNATION_AT, after = INCARNATION_AT + sizeof(uint64_t);
    return memcmp(bytes, other, before) == 0 &&
           memcmp(bytes + after, other + after, size - after) == 0;
}

void cox_frame_address_all(uint8_t *bytes, uint64_t peers_version)
{
    bytes[4] = COX_FRAME_REQUEST_ALL;
    cox_le64_put(bytes + INCARNATION_AT, peers_version);
}

size_t cox_answer_size(const struct cox_answer *answer)
{
    size_t size = ANSWER_HEAD_SIZE;
    for (uint32_t i = 0; i < answer->count; i++)
        size += REPLY_HEAD_SIZE + answer->replies[i].size;
    return size;
}

void cox_answer_pack(const struct cox_answer *answer, uint8_t *buffer)
{
    cox_le32_put(buffer, (uint32_t)answer->status);
    cox_le32_put(buffer + 4, answer->count);
    buffer += ANSWER_HEAD_SIZE;
    for (uint32_t i = 0; i < answer->count; i++) {
        const struct cox_answer_reply *reply = &answer->replies[i];
        cox_le32_put(buffer, reply->rank);
        cox_le32_put(buffer + 4, reply->flags);
        cox_le32_put(buffer + 8, (uint32_t)reply->size);
        if (reply->size)
            memcpy(buffer + REPLY_HEAD_SIZE, reply->bytes, reply->size);
        buffer += REPLY_HEAD_SIZE + reply->size;
    }
}

int cox_answer_unpack(const uint8_t *bytes, size_t size, uint32_t rank_first, uint32_t rank_end,
                      struct cox_answer *ret_answer, struct cox_error *err)
{
    struct cox_rank_set seen = {{0}};
    if (size < ANSWER_HEAD_SIZE)
        return cox_fail(err, COX_CORRUPT, "an answer of %zu bytes", size);
    ret_answer->status = (int32_t)cox_le32_get(bytes);
    ret_answer->count = cox_le32_get(bytes + 4);
    bytes += ANSWER_HEAD_SIZE;
    size -= ANSWER_HEAD_SIZE;
    if (ret_answer->count > rank_end - rank_first)
        return cox_fail(err, COX_CORRUPT, "an answer with %" PRIu32 " replies of %" PRIu32 " ranks",
                        ret_answer->count, rank_end - rank_first);
    for (uint32_t i = 0; i < ret_answer->count; i++) {
        struct cox_answer_reply *reply = &ret_answer->replies[i];
        if (size < REPLY_HEAD_SIZE)
            return cox_fail(err, COX_CORRUPT, "an answer that is cut off");
        *reply = (struct cox_answer_reply){.rank = cox_le32_get(bytes),
                                           .flags = cox_le32_get(bytes + 4),
                                           .size = cox_le32_get(bytes + 8)};
        if (reply->size > size - REPLY_HEAD_SIZE)
            return cox_fail(err, COX_CORRUPT, "an answer that is cut off");
        if (reply->rank < rank_first || reply->rank >= rank_end ||
            cox_rank_set_has(&seen, reply->rank))
            return cox_fail(err, COX_CORRUPT,
                            "an answer for rank %" PRIu32 ", which is not the node's, or twice",
                            reply->rank);
        if (reply->flags & ~(uint32_t)COX_ANSWER_FLAGS)
            return cox_fail(err, COX_CORRUPT, "an answer with flags %" PRIx32, reply->flags);
        cox_rank_set_add(&seen, reply->rank);
        reply->bytes = bytes + REPLY_HEAD_SIZE;
        bytes += REPLY_HEAD_SIZE + reply->size;
        size -= REPLY_HEAD_SIZE + reply->size;
    }
    return size ? cox_fail(err, COX_CORRUPT, "an answer with %zu bytes too many", size) : 0;
}
