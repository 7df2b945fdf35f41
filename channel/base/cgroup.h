/*
 * cgroup: the limits that control groups set for this process, with either version of the kernel's
 * interface.
 *
 * The smallest limit applies of all groups from the process's own up to the root, as far as these
 * are visible.
 *
 * Threads: any; nothing here has state.
 * Blocks: on reading /proc and /sys.
 * If the process dies: nothing is left.
 */
#ifndef COX_CHANNEL_CGROUP_H
#define COX_CHANNEL_CGROUP_H

#include <coxswain/base.h>

enum cox_cgroup_state {
    COX_CGROUP_UNKNOWN, /* not everything could be read */
    COX_CGROUP_NONE,    /* everything was read, and there is no limit */
    COX_CGROUP_LIMITED,
};

struct cox_cgroup_limit {
    enum cox_cgroup_state state;
    /* When limited: */
    /* millionths of a processor; bytes; processes and threads */
    uint64_t limit;
    /* used now, in the group that has the limit; 0 if unknown */
    uint64_t used;
    /* the file that sets it */
    char file[4096];
};

struct cox_cgroup {
    struct cox_cgroup_limit cpu;
    struct cox_cgroup_limit memory;
    struct cox_cgroup_limit pids;
};

/* root: "", or a folder that stands for / (its proc/self and what is mounted below it). */
void cox_cgroup_read(const char *root, struct cox_cgroup *ret_cgroup);

#endif
