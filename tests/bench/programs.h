/*
 * programs: measures that are programs of their own, run one after the other; their tables are on
 * our stdout, their JSON goes into ours under their names.
 *
 * One thread; blocks until the program has ended. What is not built is left out.
 */
#ifndef BENCH_PROGRAMS_H
#define BENCH_PROGRAMS_H

#include "cells.h"

/* "deaths", "deadlines", "replace", "ranks", "pull", "model". One that has no time, or fails, says so
 * beside its rows (missing). */
void programs_run(struct bench *bench);

#endif
