#include "spin.h"

#include <sched.h>
#include <stdlib.h>

#include "cgroup.h"

/* More than any machine has: the mask of the affinity is refused while it is too small for the kernel's. */
#define CPU_COUNT_MAX 65536
#define CPU_MILLIONTHS UINT64_C(1000000)

const char *cox_spin_name(uint32_t spin)
{
    static const char *const names[COX_SPIN_COUNT] = {"auto", "off", "max"};
    return spin < COX_SPIN_COUNT ? names[spin] : NULL;
}

/* 0: not told. */
static uint32_t affinity_count(void)
{
    for (size_t cpus = CPU_SETSIZE; cpus <= CPU_COUNT_MAX; cpus *= 2) {
        const size_t size = cpus / 8;
        cpu_set_t *set = malloc(size);
        const int r = set ? sched_getaffinity(0, size, set) : -1;
        const int count = r == 0 ? CPU_COUNT_S(size, set) : 0;
        const bool larger = set && r < 0 && errno == EINVAL;
        free(set);
        if (!larger)
            return (uint32_t)count;
    }
    return 0;
}

uint32_t cox_cpu_count(void)
{
    struct cox_cgroup cgroup;
    uint64_t count = affinity_count();
    cox_cgroup_read("", &cgroup);
    if (cgroup.cpu.state == COX_CGROUP_LIMITED && cgroup.cpu.limit / CPU_MILLIONTHS < count)
        count = cgroup.cpu.limit / CPU_MILLIONTHS;
    return count ? (uint32_t)count : 1;
}

uint32_t cox_spin_budget_ns(enum cox_spin spin, uint32_t participant_count)
{
    if (spin == COX_SPIN_OFF || participant_count > cox_cpu_count())
        return 0;
    return spin == COX_SPIN_MAX ? COX_SPIN_MAX_NS : COX_SPIN_AUTO_NS;
}
