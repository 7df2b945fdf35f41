/*
 * placement: which processors a subject may run on. What a wake-up costs depends on whether who is
 * woken is on the processor of who wakes, on another that runs, or on one that idles, and the
 * kernel chooses anew, also within a run. So what is about wake-ups is measured in both ways.
 *
 * Any process. Nothing blocks. Whatever a process starts is placed as it is.
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
