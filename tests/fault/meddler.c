#include "meddler.h"

#include "channel/attach/named/names.h"
#include "channel/shm/region.h"

#include <poll.h>
#include <string.h>
#include <time.h>

static uint64_t next(struct meddler *meddler)
{
    uint64_t *state = &meddler->state;
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

struct meddler_temper meddler_temper(uint64_t seed)
{
    static const struct meddler_temper tempers[] = {
        {MEDDLE_PAYLOADS, 16, COX_NSEC_PER_MSEC / 10, 16, false},
        {MEDDLE_CONTROL, 1, 5 * COX_NSEC_PER_MSEC, 1, false},
        {MEDDLE_ALL, 4, COX_NSEC_PER_MSEC, 8, false},
        {MEDDLE_CONTROL, 64, 0, 256, false},
        {MEDDLE_RESPONSES, 64, 0, 4096, false},
        {MEDDLE_ALL, 64, 0, 4096, false},
        {MEDDLE_REQUESTS, 64, 0, 64, false},
        {MEDDLE_CONTROL, 2, 20 * COX_NSEC_PER_MSEC, 8, false},
    };
    const size_t count = sizeof tempers / sizeof tempers[0];
    struct meddler_temper temper = tempers[seed % count];
    temper.spares_abort = seed / count % 2;
    return temper;
}

int meddler_attach(struct meddler *meddler, const char *name, uint64_t seed, struct cox_error *err)
{
    char object[COX_OBJECT_NAME_SIZE];
    struct cox_control control = COX_CONTROL_NONE;
    memset(meddler, 0, sizeof *meddler);
    meddler->state = seed * UINT64_C(0x9e3779b97f4a7c15) | 1;
    meddler->temper = meddler_temper(seed);
    int r = cox_control_attach(&control, name, err);
    if (r)
        return r;
    meddler->geometry = control.geometry;
    meddler->control = control.region;
    for (int c = 0; r == 0 && c < COX_CHANNEL_COUNT; c++) {
        enum cox_channel_id channel = (enum cox_channel_id)c;
        r = cox_region_attach(&meddler->responses[c], cox_name_response(object, name, channel), 1,
                              COX_REGION_WRITE, err);
        if (r == 0 && c < COX_TWO_WAY_COUNT)
            r = cox_region_attach(&meddler->requests[c], cox_name_request(object, name, channel), 1,
                                  COX_REGION_WRITE, err);
    }
    if (r)
        meddler_detach(meddler);
    return r;
}

void meddler_detach(struct meddler *meddler)
{
    cox_region_detach(&meddler->control);
    for (int c = 0; c < COX_CHANNEL_COUNT; c++)
        cox_region_detach(&meddler->responses[c]);
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
        cox_region_detach(&meddler->requests[c]);
}

/* The lowest byte of a reply tag: see the header. */
static bool is_forgery(uint64_t offset)
{
    uint64_t first = offsetof(struct cox_layout_control, ranks);
    if (offset < first)
        return false;
    uint64_t in_rank = (offset - first) % sizeof(struct cox_layout_rank);
    if (in_rank < offsetof(struct cox_layout_rank, lines))
        return false;
    uint64_t in_line =
        (in_rank - offsetof(struct cox_layout_rank, lines)) % sizeof(struct cox_layout_rank_line);
    const struct cox_layout_rank_line *line = NULL;
    uint64_t near = offsetof(struct cox_layout_rank_line, tags);
    uint64_t far = offsetof(struct cox_layout_rank_line, far_tags);
    return ((in_line >= near && in_line < near + sizeof line->tags) ||
            (in_line >= far && in_line < far + sizeof line->far_tags)) &&
           in_line % sizeof(uint64_t) == 0;
}

static bool is_abort(uint64_t offset)
{
    uint64_t first = offsetof(struct cox_layout_control, abort);
    return offset >= first && offset < first + sizeof(struct cox_layout_abort);
}

/* A range of random bytes, of one byte again and again, or with bits turned. */
static void write_range(struct meddler *meddler, const struct cox_region *region, uint64_t offset,
                        uint64_t length)
{
    uint8_t *bytes = region->base;
    bool guarded = region == &meddler->control;
    uint64_t how = next(meddler) % 4, fill = next(meddler) % 2 ? 0xff : 0;
    for (uint64_t i = offset; i < offset + length; i++) {
        if (guarded && (is_forgery(i) || (meddler->temper.spares_abort && is_abort(i))))
            continue;
        uint8_t old = bytes[i];
        uint64_t byte = how == 0 ? fill : next(meddler);
        if (how == 1)
            byte = old ^ (1u << byte % 8);
        bytes[i] = (uint8_t)byte;
    }
}

/* Where something is read: in the control region anywhere, else mostly at the start of a frame or
 * slot. */
static uint64_t choose_offset(struct meddler *meddler, const struct cox_region *region,
                              uint64_t stride)
{
    uint64_t offset = next(meddler) % region->size;
    if (stride && next(meddler) % 8) {
        uint64_t start = offset / stride * stride;
        offset = start + next(meddler) % (next(meddler) % 2 ? 4 : 160);
    }
    return offset < region->size ? offset : 0;
}

static void write_once(struct meddler *meddler)
{
    const struct cox_region *region = NULL;
    uint64_t stride = 0;
    while (!region) {
        uint64_t r = next(meddler);
        unsigned target = 1u << r % 3;
        /* The busy channel more often than the others. */
        int c = (r >> 8) % 2 ? COX_CHANNEL_EXECUTE : (int)((r >> 16) % COX_CHANNEL_COUNT);
        if (!(meddler->temper.targets & target))
            continue;
        if (target == MEDDLE_CONTROL)
            region = &meddler->control;
        else if (target == MEDDLE_RESPONSES)
            region = &meddler->responses[c], stride = meddler->geometry.channels[c].slot_stride;
        else if (c < COX_TWO_WAY_COUNT)
            region = &meddler->requests[c], stride = meddler->geometry.channels[c].frame_size;
    }
    uint64_t offset = choose_offset(meddler, region, stride);
    uint64_t length = 1 + next(meddler) % meddler->temper.length_max;
    if (length > region->size - offset)
        length = region->size - offset;
    write_range(meddler, region, offset, length);
}

void meddler_run(struct meddler *meddler, int fd)
{
    const struct timespec pause = {0, (long)meddler->temper.pause_ns};
    struct pollfd end = {.fd = fd, .events = POLLIN};
    while (!end.revents) {
        for (uint32_t i = 0; i < meddler->temper.burst; i++)
            write_once(meddler);
        ppoll(&end, 1, &pause, NULL);
    }
}
