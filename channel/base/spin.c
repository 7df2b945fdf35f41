#include "spin.h"

#include <sched.h>
#include <stdlib.h>

#include "cgroup.h"

/* More than any machine has: the kernel refuses a mask smaller than its own. */
#define CPU_COUNT_MAX 65536
#define CPU_MILLIONTHS UINT64_C(1000000)

const char *cox_spin_name(uint32_t spin)
{
    static const char *const names[COX_SPIN_COUNT] = {"auto", "off", "max"};
    return spin < COX_SPIN_COUNT ? names[spin] : NULL;
}

/* 0: unknown. */
static uint32_t affinity_count(void)
{
    cpu_set_t sets[CPU_COUNT_MAX / CPU_SETSIZE]; /* the kernel fills as much as it has */
    return sched_getaffinity(0, sizeof sets, sets) == 0 ? (uint32_t)CPU_COUNT_S(sizeof sets, sets)
                                                        : 0;
}

uint32_t cox_cpu_count(void)
{
    struct cox_cgroup_limit quota;
    uint64_t count = affinity_count();
#if COX_TESTING
    /* For tests: spinning and its sleeper counts are to be tested on small machines, too. */
    const char *text = getenv("COXSWAIN_TEST_CPUS");
    if (text)
        return (uint32_t)atoi(text);
#endif
    cox_cgroup_read_cpu("", &quota);
    if (quota.state == COX_CGROUP_LIMITED && quota.limit / CPU_MILLIONTHS < count)
        count = quota.limit / CPU_MILLIONTHS;
    return count ? (uint32_t)count : 1;
}

uint32_t cox_spin_budget_ns(enum cox_spin spin, uint32_t participant_count)
{
    if (spin == COX_SPIN_OFF || participant_count > cox_cpu_count())
        return 0;
    return spin == COX_SPIN_MAX ? COX_SPIN_MAX_NS : COX_SPIN_AUTO_NS;
}
