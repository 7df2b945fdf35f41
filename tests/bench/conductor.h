/*
 * conductor: everything that `make bench` measures, in order, section by section.
 *
 * One thread; blocks for minutes. Ownership: the bench is the caller's.
 */
#ifndef BENCH_CONDUCTOR_H
#define BENCH_CONDUCTOR_H

#include "cells.h"

/* Names of the sections, comma separated, in the order in which they are measured. */
#define CONDUCTOR_SECTIONS                                                                         \
    "call,one,idle,allocations,depth,start,rate,deaths,deadlines,replace,ranks,pull,model,"        \
    "steps,packed,curves,python,bytes"

/* bench: with its options; root and all that is measured are added. Returns 0 or -ENOMEM. */
int conductor_run(struct bench *bench);

#endif
