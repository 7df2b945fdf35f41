/*
 * placement: which processors a subject may run on. The cost of a wakeup depends on whether the
 * woken thread is on the waker's processor, on another busy one, or on an idle one; the kernel
 * chooses anew, also within a run. So rounds that are mostly wakeups are measured in both ways. Any
 * process. Nothing blocks. Child processes inherit the placement.
 */
#ifndef BENCH_PLACEMENT_H
#define BENCH_PLACEMENT_H

enum placement {
    PLACEMENT_FREE, /* wherever the bench itself may run */
    PLACEMENT_ONE,  /* on the lowest of those processors, all processes of a subject */
    PLACEMENT_COUNT
};

/* Of a row: "free", "one processor". */
const char *placement_name(enum placement placement);
/* For people: "placed by the kernel", "one processor". */
const char *placement_text(enum placement placement);
/* Places the process that calls. Returns 0 or a negative errno. */
int placement_apply(enum placement placement);

#endif
