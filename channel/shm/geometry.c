#include "geometry.h"

#include <inttypes.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "channel/base/spin.h"
#include "channel/recorder/recorder_layout.h"

#define KIB UINT64_C(1024)
#define MIB (KIB * KIB)
#define FRAME_SIZE_MIN UINT64_C(256)
/* Room for cox_group_memory_size of the smallest values (a test compares them): words, and two
 * values per rank for the group and each of its subgroups. */
#define GROUP_BASE (8 * KIB)
#define GROUP_PER_RANK (28 * KIB)
#define GROUP_VALUE_SIZE 4096u
/* Between machines a round takes longer: larger values, and fewer rounds. */
#define GROUP_MIRRORED_VALUE_SIZE 65536u
/* The parts of a sealed group: words and values of one rank, and hints, of which each rank has a
 * line per subgroup. */
#define GROUP_WORDS (2 * KIB)
#define GROUP_PAYLOAD (24 * KIB)
#define GROUP_HINTS_BASE COX_LINE_SIZE
#define GROUP_HINTS_PER_RANK (8 * COX_LINE_SIZE)

/* Per frame and per slot. For 8 ranks and depth 4 all channels together take under 9 MiB. */
static const struct {
    const char *name;
    uint64_t frame_size;
    uint64_t slot_stride;
} channel_defaults[COX_CHANNEL_COUNT] = {
    [COX_CHANNEL_EXECUTE] = {"execute", 1 * MIB, 64 * KIB},
    [COX_CHANNEL_LINK] = {"shared_sync_link", 64 * KIB, 16 * KIB},
    [COX_CHANNEL_TRANSFER] = {"transfer", 256 * KIB, 16 * KIB},
    [COX_CHANNEL_RECOVER] = {"recover_command", 4 * KIB, 4 * KIB},
    [COX_CHANNEL_ERROR] = {"execute_error", 0, 1 * KIB},
};

static int geometry_check(const struct cox_geometry *geometry, int code, struct cox_error *err)
{
    if (geometry->rank_count < 1 || geometry->rank_count > COX_RANK_COUNT_MAX)
        return cox_fail(err, code, "%" PRIu32 " ranks: expected 1 to %d", geometry->rank_count,
                        COX_RANK_COUNT_MAX);
    if (geometry->depth < 1 || geometry->depth > COX_DEPTH_MAX)
        return cox_fail(err, code, "depth %" PRIu32 ": expected 1 to %d", geometry->depth,
                        COX_DEPTH_MAX);
    int r = geometry->mode->check(geometry, code, err);
    if (r)
        return r;
    for (int c = 0; c < COX_CHANNEL_COUNT; c++) {
        const struct cox_layout_channel *channel = &geometry->channels[c];
        const char *name = channel_defaults[c].name;
        if (channel->request_size > (UINT64_C(1) << 40) ||
            channel->response_size > (UINT64_C(1) << 40))
            return cox_fail(err, code, "%s: a region of over 1 TiB", name);
        if (channel->frame_size > INT32_MAX || channel->slot_stride > INT32_MAX)
            return cox_fail(err, code,
                            "%s: frames of %" PRIu64 " and slots of %" PRIu64
                            " bytes: a length has 31 bits, use smaller regions or a larger depth",
                            name, channel->frame_size, channel->slot_stride);
        if (channel->response_size < FRAME_SIZE_MIN)
            return cox_fail(
                err, code, "%s: a response region of %" PRIu64 " bytes: expected at least %" PRIu64,
                name, channel->response_size, FRAME_SIZE_MIN);
        if (c == COX_CHANNEL_ERROR) {
            if (channel->request_size)
                return cox_fail(err, code,
                                "%s: a request region of %" PRIu64 " bytes: it has no requests",
                                name, channel->request_size);
            continue;
        }
        if (channel->frame_size < FRAME_SIZE_MIN ||
            channel->frame_size > channel->request_size / geometry->depth)
            return cox_fail(err, code,
                            "%s: a request region of %" PRIu64 " bytes gives %" PRIu32
                            " frames %" PRIu64 " bytes each: expected at least %" PRIu64,
                            name, channel->request_size, geometry->depth,
                            cox_geometry_align_down(channel->request_size / geometry->depth),
                            FRAME_SIZE_MIN);
        uint64_t part = cox_geometry_align_down(channel->response_size / geometry->depth);
        /* Replies to a link request are one of rank 0 where that may be whole. */
        const bool slotted = !geometry->mode->limits.whole_replies || c != COX_CHANNEL_LINK;
        if (channel->slot_stride < FRAME_SIZE_MIN ||
            channel->slot_stride % COX_GEOMETRY_ALIGNMENT ||
            (slotted && channel->slot_stride > part / geometry->rank_count))
            return cox_fail(err, code,
                            "%s: a response region of %" PRIu64 " bytes at depth %" PRIu32
                            " holds %" PRIu64 " slots of %" PRIu64 " bytes, %" PRIu32
                            " ranks need one each: enlarge the region or use fewer ranks",
                            name, channel->response_size, geometry->depth,
                            channel->slot_stride ? part / channel->slot_stride : 0,
                            channel->slot_stride, geometry->rank_count);
    }
    return 0;
}

/* Where ranks have memory of their own, it begins with their lines. */
static void geometry_place(struct cox_geometry *geometry)
{
    uint64_t own_offset = COX_SEALED_PAGE;
    for (int c = 0; c < COX_CHANNEL_COUNT; c++) {
        const struct cox_layout_channel *sizes = &geometry->channels[c];
        const uint64_t part = cox_geometry_align_down(sizes->response_size / geometry->depth);
        geometry->slots[c] =
            geometry->mode->limits.memory_per_rank
                ? (struct cox_geometry_slots){.offset = own_offset,
                                              .frame_stride =
                                                  c == COX_CHANNEL_ERROR ? 0 : sizes->slot_stride}
                : (struct cox_geometry_slots){.frame_stride = part,
                                              .rank_stride = sizes->slot_stride};
        own_offset += sizes->slot_stride * geometry->depth;
    }
}

int cox_geometry_resolve(uint32_t rank_count, const struct cox_geometry_choice *choice,
                         struct cox_geometry *ret_geometry, struct cox_error *err)
{
    const struct cox_attach_mode *mode = choice->mode ? choice->mode : cox_attach_default;
    const struct cox_attach_sizes *fixed = mode->sizes;
    struct cox_geometry geometry = {
        .rank_count = rank_count,
        .depth = choice->depth ? choice->depth : mode->limits.depth_default,
        .mode = mode,
        .spin_ns = mode->limits.rank_words ? choice->spin_ns : 0,
        .recorder = mode->limits.rank_words && !choice->no_recorder,
        .mirrored = choice->mirrored,
    };
    /* Checked before any product is computed. */
    if (rank_count < 1 || rank_count > COX_RANK_COUNT_MAX || geometry.depth > COX_DEPTH_MAX)
        return geometry_check(&geometry, COX_INVALID, err);
    for (int c = 0; c < COX_CHANNEL_COUNT; c++) {
        struct cox_layout_channel *channel = &geometry.channels[c];
        uint64_t request =
            fixed ? fixed->request[c] : channel_defaults[c].frame_size * geometry.depth;
        uint64_t response = fixed ? fixed->response[c]
                            : c == COX_CHANNEL_ERROR
                                ? channel_defaults[c].slot_stride
                                : channel_defaults[c].slot_stride * geometry.depth * rank_count;
        channel->request_size = choice->request_size[c] ? choice->request_size[c] : request;
        channel->response_size = choice->response_size[c] ? choice->response_size[c] : response;
        channel->frame_size = cox_geometry_align_down(channel->request_size / geometry.depth);
        if (c == COX_CHANNEL_ERROR)
            channel->slot_stride = channel->response_size;
        else if (fixed)
            channel->slot_stride = fixed->slot_stride;
        else
            channel->slot_stride = cox_geometry_align_down(
                cox_geometry_align_down(channel->response_size / geometry.depth) / rank_count);
    }
    int r = geometry_check(&geometry, COX_INVALID, err);
    if (r)
        return r;
    geometry_place(&geometry);
    *ret_geometry = geometry;
    return 0;
}

int cox_geometry_verify(struct cox_geometry *geometry, struct cox_error *err)
{
    int r = geometry_check(geometry, COX_CORRUPT, err);
    if (r)
        return r;
    if (geometry->spin_ns && geometry->spin_ns != COX_SPIN_AUTO_NS &&
        geometry->spin_ns != COX_SPIN_MAX_NS)
        return cox_fail(err, COX_CORRUPT,
                        "ranks spin for %" PRIu32 " ns before they block: expected 0, %" PRIu32
                        " or %" PRIu32,
                        geometry->spin_ns, COX_SPIN_AUTO_NS, COX_SPIN_MAX_NS);
    /* Frames and strides follow from the sizes: resolving the sizes again must give the same
     * numbers, or one was changed since. */
    struct cox_geometry_choice choice = {.depth = geometry->depth, .mode = geometry->mode};
    for (int c = 0; c < COX_CHANNEL_COUNT; c++) {
        choice.request_size[c] = geometry->channels[c].request_size;
        choice.response_size[c] = geometry->channels[c].response_size;
    }
    struct cox_geometry derived;
    if (cox_geometry_resolve(geometry->rank_count, &choice, &derived, NULL))
        return cox_fail(err, COX_CORRUPT, "sizes that cannot have been chosen");
    for (int c = 0; c < COX_CHANNEL_COUNT; c++) {
        const struct cox_layout_channel *seen = &geometry->channels[c], *own = &derived.channels[c];
        if (seen->frame_size != own->frame_size || seen->slot_stride != own->slot_stride)
            return cox_fail(err, COX_CORRUPT,
                            "%s: frames of %" PRIu64 " and slots of %" PRIu64
                            " bytes: expected %" PRIu64 " and %" PRIu64,
                            channel_defaults[c].name, seen->frame_size, seen->slot_stride,
                            own->frame_size, own->slot_stride);
    }
    memcpy(geometry->slots, derived.slots, sizeof geometry->slots);
    return 0;
}

/* ---- sealed groups ---- */

static uint64_t page_up(uint64_t size)
{
    return (size + COX_SEALED_PAGE - 1) / COX_SEALED_PAGE * COX_SEALED_PAGE;
}

uint64_t cox_geometry_request_offset(const struct cox_geometry *geometry,
                                     enum cox_channel_id channel)
{
    uint64_t offset = COX_SEALED_HEAD;
    for (int c = 0; c < (int)channel; c++)
        offset += page_up(geometry->channels[c].request_size);
    return offset;
}

uint64_t cox_geometry_request_memory_size(const struct cox_geometry *geometry)
{
    return cox_geometry_request_offset(geometry, COX_CHANNEL_ERROR);
}

uint64_t cox_geometry_rank_memory_size(const struct cox_geometry *geometry)
{
    return page_up(geometry->slots[COX_CHANNEL_ERROR].offset +
                   geometry->channels[COX_CHANNEL_ERROR].slot_stride);
}

/* A mapping at an offset needs whole pages of the machine, which may be larger. */
static uint64_t machine_page_up(uint64_t size)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    return (page_up(size) + page - 1) / page * page;
}

uint64_t cox_geometry_group_words_size(void)
{
    return machine_page_up(GROUP_WORDS);
}

uint64_t cox_geometry_group_payload_size(void)
{
    return machine_page_up(GROUP_PAYLOAD);
}

uint64_t cox_geometry_group_hints_offset(void)
{
    return machine_page_up(sizeof(struct cox_layout_wake));
}

uint64_t cox_geometry_wake_memory_size(const struct cox_geometry *geometry)
{
    return cox_geometry_group_hints_offset() +
           machine_page_up(GROUP_HINTS_BASE + GROUP_HINTS_PER_RANK * geometry->rank_count);
}

uint64_t cox_geometry_group_size(const struct cox_geometry *geometry)
{
    if (geometry->mode->limits.rank_group != COX_ATTACH_WINDOWS)
        return 0;
    const uint64_t more =
        2 * (uint64_t)(cox_geometry_group_value_size(geometry) - GROUP_VALUE_SIZE);
    return machine_page_up(GROUP_BASE + (GROUP_PER_RANK + more) * geometry->rank_count);
}

uint32_t cox_geometry_group_value_size(const struct cox_geometry *geometry)
{
    return geometry->mirrored && geometry->mode->limits.rank_group == COX_ATTACH_WINDOWS
               ? GROUP_MIRRORED_VALUE_SIZE
               : GROUP_VALUE_SIZE;
}

uint64_t cox_geometry_group_object_size(const struct cox_geometry *geometry)
{
    return cox_geometry_group_size(geometry) * COX_GROUP_WINDOW_COUNT;
}

uint64_t cox_geometry_group_offset(const struct cox_geometry *geometry, uint64_t incarnation)
{
    return cox_geometry_group_size(geometry) * (incarnation % COX_GROUP_WINDOW_COUNT);
}

/* ---- recorders ---- */

static uint64_t recorder_stride(void)
{
    return machine_page_up(cox_recorder_area_size(false));
}

uint64_t cox_geometry_recorder_offset(const struct cox_geometry *geometry, uint32_t rank)
{
    return geometry->mode->limits.memory_per_rank
               ? machine_page_up(cox_geometry_rank_memory_size(geometry))
               : machine_page_up(cox_layout_control_size(geometry->rank_count)) +
                     rank * recorder_stride();
}

uint64_t cox_geometry_control_object_size(const struct cox_geometry *geometry)
{
    return geometry->recorder ? cox_geometry_recorder_offset(geometry, geometry->rank_count)
                              : cox_layout_control_size(geometry->rank_count);
}

uint64_t cox_geometry_rank_object_size(const struct cox_geometry *geometry)
{
    return geometry->recorder ? cox_geometry_recorder_offset(geometry, 0) + recorder_stride()
                              : cox_geometry_rank_memory_size(geometry);
}

/* ---- accounts ---- */

struct cox_attach_account cox_geometry_account(const struct cox_geometry *geometry)
{
    struct cox_attach_account account;
    geometry->mode->account(geometry, &account);
    return account;
}

uint64_t cox_geometry_semaphore_bytes(const struct cox_geometry *geometry)
{
    return cox_geometry_account(geometry).semaphore_count * sizeof(sem_t);
}

uint64_t cox_geometry_memory_bytes(const struct cox_geometry *geometry)
{
    const struct cox_attach_account account = cox_geometry_account(geometry);
    return account.region_bytes + account.semaphore_count * (uint64_t)sysconf(_SC_PAGESIZE);
}

int cox_name_check(const char *name, struct cox_error *err)
{
    size_t length = strlen(name);
    if (length == 0)
        return cox_fail(err, COX_INVALID, "the group name is empty");
    if (length > COX_NAME_SIZE_MAX)
        return cox_fail(err, COX_INVALID,
                        "the group name has %zu characters: at most %d are allowed", length,
                        COX_NAME_SIZE_MAX);
    static const char allowed[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
    size_t good = strspn(name, allowed);
    if (good < length)
        return cox_fail(
            err, COX_INVALID,
            "the group name '%s' has a '%c' at position %zu: only letters, digits, '.', '_' and '-' are allowed",
            name, name[good], good + 1);
    if (name[0] == '.')
        return cox_fail(err, COX_INVALID, "the group name '%s' starts with a dot", name);
    return 0;
}

const char *cox_channel_name(enum cox_channel_id channel)
{
    return channel_defaults[channel].name;
}

bool cox_wakeup_exists(enum cox_channel_id channel, enum cox_wakeup wakeup)
{
    return channel != COX_CHANNEL_ERROR || wakeup == COX_WAKEUP_RESPONSE_PRODUCE ||
           wakeup == COX_WAKEUP_RESPONSE_CONSUME;
}

const char *cox_name_objects(char buffer[COX_NAME_SIZE_MAX + 1], const char *name,
                             const struct cox_geometry *geometry)
{
    char serial[COX_NAME_SERIAL_SIZE + 1] = "";
    if (geometry->serial)
        snprintf(serial, sizeof serial, "_%08" PRIx32, geometry->serial);
    snprintf(buffer, COX_NAME_SIZE_MAX + 1, "%s%s", name, serial);
    return buffer;
}

const char *cox_name_of_objects(char buffer[COX_NAME_SIZE_MAX + 1], const char *objects,
                                uint32_t *ret_serial)
{
    size_t length = strlen(objects);
    if (length <= COX_NAME_SERIAL_SIZE || length > COX_NAME_SIZE_MAX)
        return NULL;
    length -= COX_NAME_SERIAL_SIZE;
    const char *serial = objects + length;
    if (*serial != '_' || strspn(serial + 1, "0123456789abcdef") != COX_NAME_SERIAL_SIZE - 1)
        return NULL;
    *ret_serial = (uint32_t)strtoul(serial + 1, NULL, 16);
    memcpy(buffer, objects, length);
    buffer[length] = '\0';
    return buffer;
}

const char *cox_name_control(char *buffer, const char *name)
{
    snprintf(buffer, COX_OBJECT_NAME_SIZE, "/%s_control", name);
    return buffer;
}

const char *cox_name_group(char *buffer, const char *name)
{
    snprintf(buffer, COX_OBJECT_NAME_SIZE, "/%s_group", name);
    return buffer;
}

const char *cox_name_request(char *buffer, const char *name, enum cox_channel_id channel)
{
    snprintf(buffer, COX_OBJECT_NAME_SIZE, "/%s_%s_request", name, cox_channel_name(channel));
    return buffer;
}

const char *cox_name_response(char *buffer, const char *name, enum cox_channel_id channel)
{
    snprintf(buffer, COX_OBJECT_NAME_SIZE, "/%s_%s_response", name, cox_channel_name(channel));
    return buffer;
}

const char *cox_name_wakeup(char *buffer, const char *name, enum cox_channel_id channel,
                            enum cox_wakeup wakeup, uint32_t rank)
{
    static const char *const ends[COX_WAKEUP_COUNT] = {
        [COX_WAKEUP_REQUEST_PRODUCE] = "request_produce",
        [COX_WAKEUP_REQUEST_CONSUME] = "request_consume",
        [COX_WAKEUP_RESPONSE_PRODUCE] = "response_produce",
        [COX_WAKEUP_RESPONSE_CONSUME] = "response_consume",
    };
    snprintf(buffer, COX_OBJECT_NAME_SIZE, "/%s_%s_%s_%" PRIu32, name, cox_channel_name(channel),
             ends[wakeup], rank);
    return buffer;
}
