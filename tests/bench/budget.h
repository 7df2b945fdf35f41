/*
 * budget: the time of a brief run, shared out beforehand: to sections by weight, and to the cells
 * of a section, or its rows, in equal parts. What a part leaves over is shared by those that
 * follow, and what has no time left is a row that says so. So no part can make the run longer.
 *
 * One thread. Nothing blocks. Ownership: the caller's. If the process dies: nothing is left.
 */
#ifndef BENCH_BUDGET_H
#define BENCH_BUDGET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define BUDGET_BRIEF_S 105
/* What a row says that had no time. */
#define BUDGET_OVER "no time left in a brief run"

/* CLOCK_MONOTONIC; UINT64_MAX: whenever it is done. */
struct budget {
    uint64_t run_ns, section_ns, cell_begin_ns, cell_ns;
};

/* seconds: 0: without an end. */
struct budget budget_new(size_t seconds);
/* chosen: comma separated, NULL: all; those that follow get their shares, too. */
void budget_section(struct budget *budget, const char *section, const char *chosen);
/* left: cells of the section from this one on, this one included. */
void budget_cell(struct budget *budget, size_t left);
/* Of the cell. */
bool budget_is_over(const struct budget *budget);
/* Whether more than a quarter of the cell's time is left: what is still to be started needs time to
 * be measured. */
bool budget_may_start(const struct budget *budget);

#endif
