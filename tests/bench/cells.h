/*
 * cells: measures subjects beside each other: all of a cell are alive, and take turns in slices of
 * rounds.
 *
 * A slice is limited by time, not by rounds; so many rounds as took slice_ms when it was tried,
 * three at least. What is slow gets fewer slices, and one round in each where a round takes longer
 * than a slice should. A cell whose subjects would not fit the memory together is measured in
 * batches, each with the floors in it. Rows of one batch are pairs, slice by slice: a ratio is the
 * median over pairs (row_ratio).
 *
 * What the kernel's placement decides is measured in visits: a few slices at many times of the run,
 * each time with processes that have just been placed. All slices of a row are pairs of the same
 * visit's others. A visit in which a subject fails, or that has no time, adds nothing.
 *
 * A brief run takes three short slices, of what is slow a single round behind a first one, and
 * starts the floors once: rows of all batches are pairs, taken at other times. When the time of a
 * run is over, the rest of its rows say so.
 *
 * One thread. Ownership: struct bench is the caller's. If the process dies: the kernel kills the
 * subjects.
 */
#ifndef BENCH_CELLS_H
#define BENCH_CELLS_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "kinds.h"
#include "options.h"
#include "placement.h"
#include "process.h"

#define BENCH_BUSY_LOOPS 2

struct bench {
    /* options */
    struct options_list rank_counts, sizes;
    /* names, comma separated; NULL: all */
    const char *kinds;
    /* the same */
    const char *sections;
    size_t pairs;
    size_t slice_ms;
    /* that it runs, in seconds: the figures mean nothing */
    bool quick;
    /* all rows in two minutes, with wider intervals */
    bool brief;
    /* how long the run may take; 0: as long as it takes */
    size_t budget_s;
    /* of this program and the peers */
    const char *folder;
    /* state */
    /* owned */
    json_t *root;
    /* in root: of all cells; lent */
    json_t *rows;
    int batches;
    /* owned: processes that go through several rows */
    struct hosts *hosts;
    /* end_ns: UINT64_MAX: none */
    uint64_t begin_ns, end_ns;
    uint64_t *samples_ns;
};

struct cell {
    const char *section;
    uint32_t rank_count;
    size_t bytes, reply_bytes;
    const char *const *kinds;
    /* 0: the bench's */
    size_t pairs;
    /* quiet, and then again with two busy loops beside */
    bool busy;
    /* one of many visits, each with new processes: their slices are one row */
    bool is_visit;
    enum placement placement;
};

/* Rounds of a slice, at most. */
#define BENCH_ROUNDS_MAX 20000

/* Appends a row for each kind to rows, and prints it. A subject that fails is a row with its text,
 * and no failure of the bench. */
void cell_run(struct bench *bench, const struct cell *cell);

/* True when `name` is among a comma separated list, or the list is NULL. */
bool name_chosen(const char *list, const char *name);

/* Whether the time of the run is over. */
bool bench_is_over(const struct bench *bench);
/* Starts a subject, if it is one of this run and there is time; process_await has to follow. */
void bench_start(const struct bench *bench, const struct kind *kind, enum placement placement,
                 uint32_t rank_count, size_t bytes, size_t reply_bytes, struct process *process);

/* A row of a cell that was measured; NULL: there is none, or it has no figures. */
const json_t *row_find(const struct bench *bench, const char *section, const char *kind,
                       enum placement placement, uint32_t rank_count, size_t bytes, bool busy);
/* One of its figures, "p50_us" for example; 0: NULL. */
double row_figure(const json_t *row, const char *name);
/* Of the ratios over pairs; count 0: not measured. */
struct spread {
    double low, median, high;
    size_t count;
};
/* The row's p50 by that of the other kind in the same batch; low and high are the quartiles. */
struct spread row_spread(const struct bench *bench, const json_t *row, const char *other);
/* Its median; 0: not measured. */
double row_ratio(const struct bench *bench, const json_t *row, const char *other);
/* The same of two arrays of numbers; other NULL: of the numbers themselves. */
struct spread spread_of(const json_t *array, const json_t *other);

#endif
