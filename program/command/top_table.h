/*
 * top_table: what `coxswain top` shows, as lines of text: a line for each group, then a row for
 * each rank, sorted. It knows no terminal.
 *
 * Rates are those between the last two samples of a group. Each is compared with the one before of
 * the same process: a rank that was replaced meanwhile has none until the next sample.
 *
 * Threads: one.
 * Ownership: a table owns everything in it; lines are lent until the next call on it.
 * Blocks: nothing.
 * If the process dies: private memory.
 */
#ifndef COX_PROGRAM_TOP_TABLE_H
#define COX_PROGRAM_TOP_TABLE_H

#include <coxswain/base.h>

#include <stdio.h>

struct CoxswainControl__StatusReply;

/* Columns that rows can be sorted by; each has a key of its own. */
enum cox_top_column {
    COX_TOP_RANK = 0, /* group and rank */
    COX_TOP_STATE,    /* longest in its state first, ranks that are not alive before all others */
    COX_TOP_STEPS,    /* fewest first */
    COX_TOP_P99,      /* slowest first, and so on */
    COX_TOP_WAIT,
    COX_TOP_CPU,
    COX_TOP_MEMORY,
    COX_TOP_DEATHS,
};
#define COX_TOP_COLUMN_COUNT 8

struct cox_top_column_name {
    const char *name;
    char key;
};
extern const struct cox_top_column_name cox_top_columns[COX_TOP_COLUMN_COUNT];

/* How a line stands out. */
enum cox_top_health {
    COX_TOP_WELL = 0,
    COX_TOP_HELD, /* stopped, suspect or starting; a group that is degraded */
    COX_TOP_DEAD, /* dead; a group that does not reply */
};

struct cox_top_table;

int cox_top_table_new(struct cox_top_table **ret_table);
struct cox_top_table *cox_top_table_free(struct cox_top_table *table); /* NULL-safe */

/* A group's status at now_ns (CLOCK_MONOTONIC). The first one adds the group. Returns 0 or
 * -ENOMEM. */
int cox_top_table_put(struct cox_top_table *table, const char *group,
                      const struct CoxswainControl__StatusReply *status, uint64_t now_ns);
/* The group gives no status, and why. Its ranks are no longer shown. Returns 0 or -ENOMEM. */
int cox_top_table_fail(struct cox_top_table *table, const char *group, const char *reason);

/* Formats all lines. */
void cox_top_table_format(struct cox_top_table *table, enum cox_top_column sort, bool reverse);
/* Of groups, then of ranks; `heading` is the line above the ranks. */
uint32_t cox_top_table_group_count(const struct cox_top_table *table);
uint32_t cox_top_table_rank_count(const struct cox_top_table *table);
const char *cox_top_table_group_line(const struct cox_top_table *table, uint32_t index);
const char *cox_top_table_heading(const struct cox_top_table *table);
const char *cox_top_table_rank_line(const struct cox_top_table *table, uint32_t index);
enum cox_top_health cox_top_table_group_health(const struct cox_top_table *table, uint32_t index);
enum cox_top_health cox_top_table_rank_health(const struct cox_top_table *table, uint32_t index);

#endif
