#include "placement.h"

#include <errno.h>
#include <sched.h>
#include <stdbool.h>
#include <string.h>

#include "procfs.h"

static const struct {
    const char *name, *text;
} placements[] = {
    [PLACEMENT_FREE] = {"free", "placed by the kernel"},
    [PLACEMENT_ONE] = {"one processor", "one processor"},
    [PLACEMENT_APART] = {"apart", "workers on another processor"},
};

const char *placement_name(enum placement placement)
{
    return placements[placement].name;
}

enum placement placement_of(const char *name)
{
    int placement = 0;
    while (placement < PLACEMENT_APART && strcmp(placements[placement].name, name) != 0)
        placement++;
    return (enum placement)placement;
}

const char *placement_text(enum placement placement)
{
    return placements[placement].text;
}

static int allow_one(pid_t thread, bool highest)
{
    cpu_set_t sets[PROCFS_PROCESSOR_SETS], one[PROCFS_PROCESSOR_SETS];
    const size_t count = 8 * sizeof sets;
    size_t i = 0;
    if (sched_getaffinity(0, sizeof sets, sets) < 0)
        return -errno;
    while (!CPU_ISSET_S(highest ? count - 1 - i : i, sizeof sets, sets)) /* there is one: it runs */
        i++;
    CPU_ZERO_S(sizeof one, one);
    CPU_SET_S(highest ? count - 1 - i : i, sizeof one, one);
    return sched_setaffinity(thread, sizeof one, one) < 0 ? -errno : 0;
}

int placement_apply(enum placement placement)
{
    return placement == PLACEMENT_FREE ? 0 : allow_one(0, false);
}

void placement_lowest(pid_t thread)
{
    allow_one(thread, false);
}

void placement_separate(pid_t thread)
{
    allow_one(thread, true);
}

void placement_anywhere(pid_t thread)
{
    cpu_set_t sets[PROCFS_PROCESSOR_SETS];
    if (sched_getaffinity(0, sizeof sets, sets) == 0)
        sched_setaffinity(thread, sizeof sets, sets);
}
