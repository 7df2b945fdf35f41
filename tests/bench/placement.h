/*
 * placement: which processors a subject may run on. The cost of a wakeup depends on whether the
 * woken thread is on the waker's processor, on another busy one, or on an idle one; the kernel
 * chooses anew, also within a run. So rounds that are mostly wakeups are measured in both ways. Any
 * process. Nothing blocks. Child processes inherit the placement.
 */
#ifndef BENCH_PLACEMENT_H
#define BENCH_PLACEMENT_H

#include <sys/types.h>

enum placement {
    PLACEMENT_FREE, /* wherever the bench itself may run */
    PLACEMENT_ONE,  /* on the lowest of those processors, all processes of a subject */
    /* what follows is no placement of every section */
    PLACEMENT_COUNT,
    /* the coordinator on the lowest, its workers on the highest of those processors */
    PLACEMENT_APART = PLACEMENT_COUNT
};

/* Of a row: "free", "one processor", "apart". */
const char *placement_name(enum placement placement);
/* The one of that name, which there is. */
enum placement placement_of(const char *name);
/* For people: "placed by the kernel", "one processor", "workers on another processor". */
const char *placement_text(enum placement placement);
/* Places the process that calls; apart: as a coordinator, whose workers placement_separate places.
 * Returns 0 or a negative errno. */
int placement_apply(enum placement placement);
/* Place a thread of another process: on the lowest of those processors, on the highest, on any. */
void placement_lowest(pid_t thread);
void placement_separate(pid_t thread);
void placement_anywhere(pid_t thread);

#endif
