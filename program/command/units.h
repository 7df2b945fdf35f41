/*
 * units: times and amounts for people: three digits and a unit.
 *
 * Threads: any; nothing is kept.
 */
#ifndef COX_PROGRAM_UNITS_H
#define COX_PROGRAM_UNITS_H

#include <stdint.h>

/* Of every text below, with its end. */
#define COX_UNITS_SIZE 32

/* "12.3us". Both write into text, at most COX_UNITS_SIZE bytes, and return it. */
const char *cox_units_duration(char *text, uint64_t ns);
/* "4.50KiB" */
const char *cox_units_bytes(char *text, uint64_t bytes);

#endif
