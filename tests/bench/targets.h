/*
 * targets: what Coxswain must show, and whether this run does. Where something was not measured,
 * that is said instead.
 *
 * One thread; reads the bench's JSON and adds targets to it: [{name, target, measured, quartiles,
 * met, detail}], measured, quartiles and met null where there is nothing. Quartiles are those of
 * the slices: a limit between them is not decided by this run.
 */
#ifndef BENCH_TARGETS_H
#define BENCH_TARGETS_H

#include "cells.h"

/* 625,000 numbers */
#define ARRAY_BYTES 5000000

void targets_judge(struct bench *bench);

#endif
