#include "hello.h"

#include "channel/base/base_internal.h"
#include "channel/base/idioms.h"

#include <inttypes.h>
#include <string.h>

/* What the wire allows; this version sends at most COX_HELLO_FD_COUNT_MAX. */
#define FD_COUNT_MAX 128
/* So that the sum of two sizes does not overflow, and no size is negative as a signed number. */
#define SIZE_LIMIT ((uint64_t)SIZE_MAX / 2)

/* Offsets of the fields of the frame. */
enum {
    VERSION = 0,
    ROLE = 8,
    RANK = 12,
    FLAGS = 16,
    RANK_COUNT = 24,
    FD_COUNT = 28,
    INCARNATION = 32,
    RESERVED_32 = 36,
    REQUEST_SIZE = 40,
    RESPONSE_SIZE = 48,
    START = 56,
    RESERVED_64 = 64,
};

/* Offsets of the fields of the hello reply, after its first byte. */
enum {
    W_VERSION = 0,
    W_ATTACH = 8,
    W_RANK = 12,
    W_RANK_COUNT = 16,
    W_INCARNATION = 20,
    W_GROUP_INCARNATION = 24,
    W_FD_COUNT = 28,
    W_RESERVED = 32,
    W_SIZE = COX_HELLO_REPLY_SIZE - 1,
};

/* The first non-zero byte in [from, to); to: all are zero. */
static size_t first_set(const uint8_t *bytes, size_t from, size_t to)
{
    while (from < to && bytes[from] == 0)
        from++;
    return from;
}

/* ---- the hello ---- */

void cox_hello_format(const struct cox_hello *hello, uint8_t frame[COX_HELLO_SIZE])
{
    bool worker = hello->role == COX_HELLO_WORKER;
    memset(frame, 0, COX_HELLO_SIZE);
    cox_le64_put(frame + VERSION, hello->version ? hello->version : COX_HELLO_VERSION);
    cox_le32_put(frame + ROLE, (uint32_t)hello->role);
    cox_le64_put(frame + FLAGS, hello->flags);
    cox_le32_put(frame + FD_COUNT,
                 hello->fd_count_max ? hello->fd_count_max : COX_HELLO_FD_COUNT_MAX);
    cox_le64_put(frame + START, hello->start);
    if (!worker)
        return;
    cox_le32_put(frame + RANK, hello->rank);
    cox_le32_put(frame + RANK_COUNT, hello->rank_count);
    cox_le32_put(frame + INCARNATION, hello->incarnation);
    cox_le64_put(frame + REQUEST_SIZE, hello->request_size_min);
    cox_le64_put(frame + RESPONSE_SIZE, hello->response_size_min);
}

static int hello_check_counts(const struct cox_hello *hello, struct cox_error *err)
{
    if (hello->rank_count > COX_RANK_COUNT_MAX)
        return cox_fail(err, COX_INVALID,
                        "world size; count=%" PRIu32
                        ": expected 1 to %d, or 0 for whatever the group has",
                        hello->rank_count, COX_RANK_COUNT_MAX);
    uint32_t rank_limit = hello->rank_count ? hello->rank_count : COX_RANK_COUNT_MAX;
    if (hello->rank != COX_HELLO_RANK_ANY && hello->rank >= rank_limit)
        return cox_fail(err, COX_INVALID,
                        "rank; rank=%" PRIu32 ": expected 0 to %" PRIu32 ", or %" PRIu32
                        " for any that is free",
                        hello->rank, rank_limit - 1, COX_HELLO_RANK_ANY);
    if (hello->fd_count_max > FD_COUNT_MAX)
        return cox_fail(err, COX_INVALID,
                        "fds at once; count=%" PRIu32 ": expected 1 to %d, or 0 for %d",
                        hello->fd_count_max, FD_COUNT_MAX, COX_HELLO_FD_COUNT_MAX);
    if (hello->request_size_min > SIZE_LIMIT || hello->response_size_min > SIZE_LIMIT)
        return cox_fail(err, COX_INVALID, "%s size; bytes=%" PRIu64 ": expected at most %" PRIu64,
                        hello->request_size_min > SIZE_LIMIT ? "request" : "response",
                        hello->request_size_min > SIZE_LIMIT ? hello->request_size_min
                                                             : hello->response_size_min,
                        SIZE_LIMIT);
    return 0;
}

static int hello_check_reserved(const uint8_t *frame, uint64_t flags, uint32_t role,
                                struct cox_error *err)
{
    if (role != COX_HELLO_WORKER && role != COX_HELLO_COMMAND && role != COX_HELLO_FD_STORE)
        return cox_fail(err, COX_INVALID,
                        "role; role=%" PRIu32
                        ": expected %d (worker), %d (command) or %d (fd store)",
                        role, COX_HELLO_WORKER, COX_HELLO_COMMAND, COX_HELLO_FD_STORE);
    if (flags)
        return cox_fail(err, COX_INVALID, "flags; bits=%#" PRIx64 ": version %" PRIu64 " has none",
                        flags, COX_HELLO_VERSION);
    size_t at = first_set(frame, RESERVED_32, REQUEST_SIZE);
    if (at == REQUEST_SIZE)
        at = first_set(frame, RESERVED_64, COX_HELLO_SIZE);
    if (at < COX_HELLO_SIZE)
        return cox_fail(err, COX_INVALID,
                        "byte %zu is %u: expected 0 in version %" PRIu64
                        ", this was sent by a later version",
                        at, frame[at], COX_HELLO_VERSION);
    if (role != COX_HELLO_WORKER &&
        (cox_le32_get(frame + RANK) || cox_le32_get(frame + RANK_COUNT) ||
         first_set(frame, INCARNATION, START) < START))
        return cox_fail(err, COX_INVALID,
                        "rank, world size, incarnation and sizes are a worker's: expected 0");
    return 0;
}

int cox_hello_parse(const uint8_t frame[COX_HELLO_SIZE], struct cox_hello *ret_hello,
                    struct cox_error *err)
{
    struct cox_hello hello = {
        .version = cox_le64_get(frame + VERSION),
        .rank = cox_le32_get(frame + RANK),
        .flags = cox_le64_get(frame + FLAGS),
        .rank_count = cox_le32_get(frame + RANK_COUNT),
        .fd_count_max = cox_le32_get(frame + FD_COUNT),
        .incarnation = cox_le32_get(frame + INCARNATION),
        .request_size_min = cox_le64_get(frame + REQUEST_SIZE),
        .response_size_min = cox_le64_get(frame + RESPONSE_SIZE),
        .start = cox_le64_get(frame + START),
    };
    uint32_t role = cox_le32_get(frame + ROLE);
    /* First: another version may have another layout. */
    if (hello.version != COX_HELLO_VERSION)
        return cox_fail(err, COX_VERSION,
                        "the client speaks version %" PRIu64 ", the coordinator speaks %" PRIu64
                        ": install the same version on both sides",
                        hello.version, COX_HELLO_VERSION);
    int r = hello_check_reserved(frame, hello.flags, role, err);
    if (r == 0)
        r = hello_check_counts(&hello, err);
    if (r)
        return r;
    hello.role = (enum cox_hello_role)role;
    if (hello.fd_count_max == 0)
        hello.fd_count_max = COX_HELLO_FD_COUNT_MAX;
    *ret_hello = hello;
    return 0;
}

/* ---- the hello reply ---- */

void cox_hello_reply_format(const struct cox_hello_reply *hello_reply, uint32_t fd_count,
                            uint8_t bytes[COX_HELLO_REPLY_SIZE])
{
    memset(bytes, 0, COX_HELLO_REPLY_SIZE);
    bytes[0] = COX_REPLY_HELLO;
    uint8_t *fields = bytes + 1;
    cox_le64_put(fields + W_VERSION, hello_reply->version);
    cox_le32_put(fields + W_ATTACH, (uint32_t)hello_reply->attach);
    cox_le32_put(fields + W_RANK, hello_reply->rank);
    cox_le32_put(fields + W_RANK_COUNT, hello_reply->rank_count);
    cox_le32_put(fields + W_INCARNATION, hello_reply->incarnation);
    cox_le32_put(fields + W_GROUP_INCARNATION, hello_reply->group_incarnation);
    cox_le32_put(fields + W_FD_COUNT, fd_count);
}

/* Checks that it matches the request. */
static int hello_reply_check_worker(const struct cox_hello_reply *hello_reply,
                                    const struct cox_hello *hello, struct cox_error *err)
{
    if (hello_reply->rank_count == 0 || hello_reply->rank_count > COX_RANK_COUNT_MAX ||
        hello_reply->rank >= hello_reply->rank_count)
        return cox_fail(err, COX_CORRUPT,
                        "the coordinator replies with rank %" PRIu32 " of %" PRIu32
                        ": expected a rank below a world size of 1 to %d",
                        hello_reply->rank, hello_reply->rank_count, COX_RANK_COUNT_MAX);
    if ((hello->rank != COX_HELLO_RANK_ANY && hello_reply->rank != hello->rank) ||
        (hello->rank_count && hello_reply->rank_count != hello->rank_count) ||
        (hello->incarnation && hello_reply->incarnation != hello->incarnation))
        return cox_fail(err, COX_CORRUPT,
                        "the coordinator replies with rank %" PRIu32 " of %" PRIu32
                        ", incarnation %" PRIu32 ": that is not what was asked for",
                        hello_reply->rank, hello_reply->rank_count, hello_reply->incarnation);
    return 0;
}

int cox_hello_reply_parse(const uint8_t bytes[COX_HELLO_REPLY_SIZE], const struct cox_hello *hello,
                          uint32_t fd_count, struct cox_hello_reply *ret_reply,
                          struct cox_error *err)
{
    const uint8_t *fields = bytes + 1;
    uint32_t attach = cox_le32_get(fields + W_ATTACH), fds_said = cox_le32_get(fields + W_FD_COUNT);
    struct cox_hello_reply hello_reply = {
        .version = cox_le64_get(fields + W_VERSION),
        .rank = cox_le32_get(fields + W_RANK),
        .rank_count = cox_le32_get(fields + W_RANK_COUNT),
        .incarnation = cox_le32_get(fields + W_INCARNATION),
        .group_incarnation = cox_le32_get(fields + W_GROUP_INCARNATION),
    };
    if (hello_reply.version != COX_HELLO_VERSION)
        return cox_fail(err, COX_CORRUPT,
                        "the coordinator replies in version %" PRIu64 ", it was asked in %" PRIu64,
                        hello_reply.version, COX_HELLO_VERSION);
    if (fds_said != fd_count || fd_count > hello->fd_count_max)
        return cox_fail(err, COX_CORRUPT,
                        "the coordinator says it sends %" PRIu32 " fds, %" PRIu32
                        " came: expected as many, %" PRIu32 " at most",
                        fds_said, fd_count, hello->fd_count_max);
    size_t at = first_set(fields, W_RESERVED, W_SIZE);
    if (at < W_SIZE)
        return cox_fail(err, COX_CORRUPT, "byte %zu of the hello reply is %u: expected 0", at,
                        fields[at]);
    if (attach != COX_ATTACH_NAMED && attach != COX_ATTACH_SEALED)
        return cox_fail(err, COX_CORRUPT, "the coordinator replies with attach %" PRIu32, attach);
    hello_reply.attach = (enum cox_attach)attach;
    int r = 0;
    if (hello->role == COX_HELLO_WORKER)
        r = hello_reply_check_worker(&hello_reply, hello, err);
    else if (fd_count)
        r = cox_fail(err, COX_CORRUPT, "the coordinator sends %" PRIu32 " fds: expected none",
                     fd_count);
    if (r == 0)
        *ret_reply = hello_reply;
    return r;
}

/* ---- the refusal ---- */

size_t cox_refusal_format(int code, const char *reason, uint8_t bytes[COX_REFUSAL_SIZE_MAX])
{
    char text[COX_HELLO_REASON_MAX + 1];
    size_t size = strnlen(reason, sizeof text);
    if (size == sizeof text)
        size--;
    memcpy(text, reason, size);
    text[size] = '\0';
    cox_text_trim(text);
    size = strlen(text);
    bool known = code > 0 && code < COX_STATUS_COUNT;
    bytes[0] = COX_REPLY_REFUSED;
    bytes[1] = (uint8_t)(known ? code : COX_REJECTED);
    bytes[2] = (uint8_t)size;
    memcpy(bytes + COX_REFUSAL_HEAD_SIZE, text, size);
    return COX_REFUSAL_HEAD_SIZE + size;
}

int cox_refusal_parse(const uint8_t *bytes, struct cox_error *err)
{
    char text[COX_HELLO_REASON_MAX + 1];
    size_t size = cox_refusal_reason_size(bytes);
    int code = bytes[1] > 0 && bytes[1] < COX_STATUS_COUNT ? bytes[1] : COX_REJECTED;
    memcpy(text, bytes + COX_REFUSAL_HEAD_SIZE, size);
    text[size] = '\0';
    /* It may be printed on a terminal, to which U+0080 to U+009F are control characters, too. */
    for (size_t i = 0; i < size; i++) {
        const unsigned char *bytes_at = (const unsigned char *)text + i;
        bool c1 = bytes_at[0] == 0xc2 && bytes_at[1] >= 0x80 && bytes_at[1] <= 0x9f;
        if (bytes_at[0] < ' ' || bytes_at[0] == 0x7f || c1)
            text[i] = '?';
        if (c1)
            text[i + 1] = '?';
    }
    cox_text_trim(text);
    return cox_fail(err, code, "the coordinator refuses: %s", size ? text : "it gives no reason");
}
