/*
 * conductor: everything that `make bench` measures, in order, section by section.
 *
 * One thread; blocks for minutes. Ownership: the bench is the caller's.
 */
#ifndef BENCH_CONDUCTOR_H
#define BENCH_CONDUCTOR_H

#include "cells.h"

/* Names of the sections, comma separated. */
#define CONDUCTOR_SECTIONS                                                                         \
    "bytes,packed,call,curves,one,steps,depth,python,rate,idle,start,allocations,deaths,"          \
    "deadlines,replace,ranks,pull,model"

/* bench: with its options; root and all that is measured are added. Returns 0 or -ENOMEM. */
int conductor_run(struct bench *bench);

#endif
