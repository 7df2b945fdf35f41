#include "placement.h"

#include <errno.h>
#include <sched.h>

#include "procfs.h"

const char *placement_name(enum placement placement)
{
    return placement == PLACEMENT_ONE ? "one processor" : "free";
}

const char *placement_text(enum placement placement)
{
    return placement == PLACEMENT_ONE ? "one processor" : "placed by the kernel";
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
    CPU_ZERO_S(sizeof sets, sets);
    CPU_SET_S(lowest, sizeof sets, sets);
    return sched_setaffinity(0, sizeof sets, sets) < 0 ? -errno : 0;
}
