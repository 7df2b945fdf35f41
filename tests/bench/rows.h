/*
 * rows: the JSON of a program that measures: {"rows": [...]}.
 *
 * One thread. Nothing blocks. If the process dies: nothing is left but a file that is not whole.
 */
#ifndef BENCH_ROWS_H
#define BENCH_ROWS_H

#include <jansson.h>
#include <stddef.h>
#include <stdint.h>

/* An array of the samples by `unit_ns`: 1000 gives microseconds. */
json_t *rows_samples(const uint64_t *samples_ns, size_t count, double unit_ns);
json_t *rows_figures(const double *figures, size_t count);
/* Takes the rows, and writes them to the file; path NULL: nowhere. Returns 0 or 1, having told why:
 * the exit status of `program`. */
int rows_write(const char *program, const char *path, json_t *rows);

#endif
