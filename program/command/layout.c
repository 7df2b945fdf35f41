#include "program/cli/command.h"

#include "channel/memory/large_payload.h"
#include "channel/shm/geometry.h"
#include "channel/shm/region.h"
#include "program/cli/group_options.h"

#include <inttypes.h>
#include <semaphore.h>
#include <string.h>
#include <unistd.h>

static void print_regions(const struct cox_geometry *geometry, const char *name,
                          const char *objects)
{
    char object[COX_OBJECT_NAME_SIZE];
    printf("region %s %" PRIu64 "\n", cox_name_control(object, name),
           cox_geometry_control_object_size(geometry));
    if (geometry->mode->limits.rank_group == COX_ATTACH_WINDOWS)
        printf("region %s %" PRIu64 " taken of %" PRIu64 " in %d windows\n",
               cox_name_group(object, name), cox_geometry_group_size(geometry),
               cox_geometry_group_object_size(geometry), COX_GROUP_WINDOW_COUNT);
    for (int c = 0; c < COX_CHANNEL_COUNT; c++) {
        enum cox_channel_id channel = (enum cox_channel_id)c;
        const struct cox_layout_channel *sizes = &geometry->channels[c];
        if (sizes->request_size)
            printf("region %s %" PRIu64 " frames %" PRIu32 " of %" PRIu64 "\n",
                   cox_name_request(object, objects, channel), sizes->request_size, geometry->depth,
                   sizes->frame_size);
        printf("region %s %" PRIu64 " slots of %" PRIu64 "\n",
               cox_name_response(object, objects, channel), sizes->response_size,
               sizes->slot_stride);
    }
}

static void print_wakeup(const struct cox_geometry *geometry, const char *name,
                         enum cox_channel_id channel, enum cox_wakeup wakeup, uint32_t rank)
{
    char object[COX_OBJECT_NAME_SIZE];
    bool produce = wakeup == COX_WAKEUP_REQUEST_PRODUCE || wakeup == COX_WAKEUP_RESPONSE_PRODUCE;
    /* The error channel has one slot, whatever the depth. */
    uint32_t depth = channel == COX_CHANNEL_ERROR ? 1 : geometry->depth;
    printf("semaphore %s value %" PRIu32 "\n", cox_name_wakeup(object, name, channel, wakeup, rank),
           produce ? depth : 0);
}

static void print_wakeups(const struct cox_geometry *geometry, const char *name)
{
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
        for (uint32_t rank = 0; rank < geometry->rank_count; rank++)
            for (int wakeup = 0; wakeup < COX_WAKEUP_COUNT; wakeup++)
                print_wakeup(geometry, name, (enum cox_channel_id)c, (enum cox_wakeup)wakeup, rank);
    print_wakeup(geometry, name, COX_CHANNEL_ERROR, COX_WAKEUP_RESPONSE_PRODUCE, 0);
    print_wakeup(geometry, name, COX_CHANNEL_ERROR, COX_WAKEUP_RESPONSE_CONSUME, 0);
}

static void print_totals(const struct cox_geometry *geometry)
{
    uint64_t regions = cox_geometry_account(geometry).region_bytes;
    uint64_t semaphores = cox_geometry_semaphore_bytes(geometry);
    printf("total regions %" PRIu64 " (%.2f MiB)\n", regions, (double)regions / 1048576);
    printf("total semaphores %" PRIu64 " (%" PRIu64 " of %zu)\n", semaphores,
           semaphores / sizeof(sem_t), sizeof(sem_t));
    uint64_t needed = cox_geometry_memory_bytes(geometry);
    printf("total of /dev/shm %" PRIu64 " (%.2f MiB), in whole pages\n", needed,
           (double)needed / 1048576);
    uint64_t names = cox_geometry_account(geometry).name_count;
    printf("total names %" PRIu64 "\n", names);
    if (geometry->mode->limits.has_serial)
        printf("SERIAL is another hexadecimal number at every start\n");
    struct cox_region_space space;
    if (cox_region_space(&space))
        return;
    if (space.bytes == UINT64_MAX)
        printf("free in /dev/shm: no limit\n");
    else
        printf("free in /dev/shm %" PRIu64 " (%.2f MiB)%s\n", space.bytes,
               (double)space.bytes / 1048576, space.bytes < needed ? ": too little" : "");
    if (space.files < names)
        printf("free names in /dev/shm %" PRIu64 ": too few\n", space.files);
}

/* No names, and no space in /dev/shm. */
static void print_unnamed(const struct cox_geometry *geometry)
{
    printf("memory request %" PRIu64 " read-only for ranks\n",
           cox_geometry_request_memory_size(geometry));
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++) {
        const struct cox_layout_channel *sizes = &geometry->channels[c];
        printf("channel %s at %" PRIu64 " frames %" PRIu32 " of %" PRIu64 " slots of %" PRIu64 "\n",
               cox_channel_name((enum cox_channel_id)c),
               cox_geometry_request_offset(geometry, (enum cox_channel_id)c), geometry->depth,
               sizes->frame_size, sizes->slot_stride);
    }
    for (uint32_t rank = 0; rank < geometry->rank_count; rank++)
        printf("memory rank %" PRIu32 " %" PRIu64 " group %" PRIu64 " and %" PRIu64
               ", read-only for other ranks\n",
               rank, cox_geometry_rank_object_size(geometry), cox_geometry_group_words_size(),
               cox_geometry_group_payload_size());
    printf("memory wake %" PRIu64 "\n", cox_geometry_wake_memory_size(geometry));
    uint64_t bytes = cox_geometry_account(geometry).region_bytes;
    printf("total %" PRIu64 " (%.2f MiB), no names\n", bytes, (double)bytes / 1048576);
}

/* Not reserved: allocated on demand, and freed. */
static void print_large_payloads(const struct cox_geometry *geometry)
{
    if (geometry->mode->limits.extensions)
        printf("large payloads 0, until something does not fit; then %" PRIu64
               " at most are kept per frame and slot\n",
               COX_LARGE_PAYLOAD_KEEP_SIZE);
}

static int check(const void *choice, struct cox_error *err)
{
    struct cox_geometry geometry;
    return cox_group_choice_geometry(choice, &geometry, err);
}

static int run(void *choice)
{
    const struct cox_group_choice *group = choice;
    struct cox_error error = {0};
    struct cox_geometry geometry;
    if (cox_group_choice_geometry(group, &geometry, &error))
        return cox_exit_with(&error);
    const char *name = group->name ? group->name : "NAME";
    if (cox_geometry_account(&geometry).name_count == 0) {
        print_unnamed(&geometry);
    } else {
        char objects[COX_OBJECT_NAME_SIZE];
        snprintf(objects, sizeof objects, "%s%s", name,
                 geometry.mode->limits.has_serial ? "_SERIAL" : "");
        print_regions(&geometry, name, objects);
        print_wakeups(&geometry, objects);
        print_totals(&geometry);
    }
    print_large_payloads(&geometry);
    return COX_EXIT_OK;
}

static void init(void *choice)
{
    cox_group_choice_init(choice);
}

static const struct cox_option no_options[] = {{0}};
static const struct cox_option_group checked = {.options = no_options, .check = check};

const struct cox_command cox_command_layout = {
    .name = "layout",
    .summary = "print what a group would create in shared memory",
    .text = "Prints every shared memory object that a group would create, its size, every "
            "semaphore with its starting value, the totals, and what is free. Nothing is created.",
    .examples = "  coxswain layout -n 8\n",
    .choice_size = sizeof(struct cox_group_choice),
    .init = init,
    .groups = {{&cox_layout_option_group, 0}, {&checked, 0}},
    .run = run,
};
