/*
 * report: what was measured, for people.
 *
 * One thread; prints to stdout, reads the bench's JSON alone.
 */
#ifndef BENCH_REPORT_H
#define BENCH_REPORT_H

#include "cells.h"

void report_heading(const struct bench *bench);
void report_section(const char *text, enum placement placement);
/* The last `count` rows. */
void report_rows(const struct bench *bench, size_t count);
/* Rows that were visited at many times of the run. */
void report_visits(const struct bench *bench);
/* By how much a floor differs from the same floor beside it, of every row that has one. */
void report_again(const struct bench *bench);
void report_targets(const struct bench *bench);

#endif
