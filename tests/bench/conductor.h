/*
 * conductor: everything that `make bench` measures, in order, section by section.
 *
 * One thread; blocks for minutes. Ownership: the bench is the caller's.
 */
#ifndef BENCH_CONDUCTOR_H
#define BENCH_CONDUCTOR_H

#include "cells.h"

/* Names of the sections, comma separated, in the order in which they are measured. The first four
 * are visited at many times of the run. */
#define CONDUCTOR_SECTIONS                                                                         \
    "one,loops,ring,copies,idle,allocations,call,depth,start,rate,deaths,deadlines,replace,ranks," \
    "pull,model,steps,packed,curves,python,bytes"

/* bench: with its options; root and all that is measured are added. Returns 0 or -ENOMEM. */
int conductor_run(struct bench *bench);

#endif
