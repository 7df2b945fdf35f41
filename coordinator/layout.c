#include "command.h"

#include "../channel/geometry.h"
#include "../channel/region.h"
#include "options.h"

#include <inttypes.h>
#include <semaphore.h>
#include <string.h>
#include <unistd.h>

static void help(FILE *file)
{
    fprintf(file, "Usage: coxswain layout [OPTION]...\n"
                  "\n"
                  "Prints every shared memory object that a group would create, its size, every "
                  "semaphore with\n"
                  "its starting value, the totals, and what is free. Nothing is created.\n"
                  "\n");
    cox_layout_options_help(file);
    cox_exit_help(file);
}

static const struct option long_options[] = {
    COX_LAYOUT_LONG_OPTIONS,
    {NULL, 0, NULL, 0},
};

static void print_regions(const struct cox_geometry *geometry, const char *name)
{
    char object[COX_OBJECT_NAME_SIZE];
    printf("region %s %" PRIu64 "\n", cox_name_control(object, name),
           cox_layout_control_size(geometry->rank_count));
    for (int c = 0; c < COX_CHANNEL_COUNT; c++) {
        enum cox_channel_id channel = (enum cox_channel_id)c;
        const struct cox_layout_channel *sizes = &geometry->channels[c];
        if (sizes->request_size)
            printf("region %s %" PRIu64 " frames %" PRIu32 " of %" PRIu64 "\n",
                   cox_name_request(object, name, channel), sizes->request_size, geometry->depth,
                   sizes->frame_size);
        printf("region %s %" PRIu64 " slots of %" PRIu64 "\n",
               cox_name_response(object, name, channel), sizes->response_size, sizes->slot_stride);
    }
}

static void print_bell(const struct cox_geometry *geometry, const char *name,
                       enum cox_channel_id channel, enum cox_bell bell, uint32_t rank)
{
    char object[COX_OBJECT_NAME_SIZE];
    bool produce = bell == COX_BELL_REQUEST_PRODUCE || bell == COX_BELL_RESPONSE_PRODUCE;
    /* The error channel has one slot, whatever the depth. */
    uint32_t depth = channel == COX_CHANNEL_ERROR ? 1 : geometry->depth;
    printf("semaphore %s value %" PRIu32 "\n", cox_name_bell(object, name, channel, bell, rank),
           produce ? depth : 0);
}

static void print_bells(const struct cox_geometry *geometry, const char *name)
{
    for (int c = 0; c < COX_TWO_WAY_COUNT; c++)
        for (uint32_t rank = 0; rank < geometry->rank_count; rank++)
            for (int bell = 0; bell < COX_BELL_COUNT; bell++)
                print_bell(geometry, name, (enum cox_channel_id)c, (enum cox_bell)bell, rank);
    print_bell(geometry, name, COX_CHANNEL_ERROR, COX_BELL_RESPONSE_PRODUCE, 0);
    print_bell(geometry, name, COX_CHANNEL_ERROR, COX_BELL_RESPONSE_CONSUME, 0);
}

static void print_totals(const struct cox_geometry *geometry)
{
    uint64_t regions = cox_geometry_region_bytes(geometry);
    uint64_t semaphores = cox_geometry_semaphore_bytes(geometry);
    printf("total regions %" PRIu64 " (%.2f MiB)\n", regions, (double)regions / 1048576);
    printf("total semaphores %" PRIu64 " (%" PRIu64 " of %zu)\n", semaphores,
           semaphores / sizeof(sem_t), sizeof(sem_t));
    uint64_t needed = cox_geometry_memory_bytes(geometry);
    printf("total of /dev/shm %" PRIu64 " (%.2f MiB), in whole pages\n", needed,
           (double)needed / 1048576);
    uint64_t names = cox_geometry_name_count(geometry);
    printf("total names %" PRIu64 "\n", names);
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

int cox_command_layout(int argc, char **argv)
{
    struct cox_group_options group;
    struct cox_error error = {0};
    cox_group_options_init(&group);
    int option, r = 0;
    while (!r &&
           (option = getopt_long(argc, argv, COX_GROUP_SHORT_OPTIONS, long_options, NULL)) != -1) {
        if (option == 'h') {
            help(stdout);
            return cox_exit_flushed(COX_EXIT_OK);
        }
        r = cox_group_option(&group, option, optarg, argv, &error);
    }
    if (!r && optind < argc)
        r = cox_fail(&error, COX_INVALID, "'%.64s' is one argument too many", argv[optind]);
    struct cox_geometry geometry;
    struct cox_geometry_choice choice = {.depth = group.depth, .legacy = group.legacy_workers};
    memcpy(choice.request_size, group.request_size, sizeof choice.request_size);
    memcpy(choice.response_size, group.response_size, sizeof choice.response_size);
    if (!r)
        r = cox_geometry_resolve(group.rank_count, &choice, &geometry, &error);
    if (r)
        return cox_exit_usage("layout", &error);
    const char *name = group.name ? group.name : "NAME";
    print_regions(&geometry, name);
    print_bells(&geometry, name);
    print_totals(&geometry);
    return cox_exit_flushed(COX_EXIT_OK);
}
