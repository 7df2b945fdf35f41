#include "placement.h"

#include <errno.h>
#include <sched.h>

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

const char *placement_text(enum placement placement)
{
    return placements[placement].text;
}

static int allow_one(pid_t thread, size_t processor)
{
    cpu_set_t sets[PROCFS_PROCESSOR_SETS];
    CPU_ZERO_S(sizeof sets, sets);
    CPU_SET_S(processor, sizeof sets, sets);
    return sched_setaffinity(thread, sizeof sets, sets) < 0 ? -errno : 0;
}

int placement_apply(enum placement placement)
{
    cpu_set_t sets[PROCFS_PROCESSOR_SETS];
    size_t lowest = 0;
    if (placement == PLACEMENT_FREE)
        return 0;
    if (sched_getaffinity(0, sizeof sets, sets) < 0)
        return -errno;
    while (!CPU_ISSET_S(lowest, sizeof sets, sets)) /* there is one: this one runs */
        lowest++;
    return allow_one(0, lowest);
}

void placement_separate(pid_t thread)
{
    cpu_set_t sets[PROCFS_PROCESSOR_SETS];
    size_t highest = 8 * sizeof sets - 1;
    if (sched_getaffinity(0, sizeof sets, sets) < 0)
        return;
    while (highest > 0 && !CPU_ISSET_S(highest, sizeof sets, sets))
        highest--;
    allow_one(thread, highest);
}
